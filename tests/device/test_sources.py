"""Where samples come from: read in order, never twice, and no sample in any word."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from loopback import SMALL, small_task

import crowdml
from crowdml.arrays import Samples
from crowdml.device.files import Share, parse_share
from crowdml.device.sensing import _pack, _unpack
from crowdml.device.sources import LiveSource, Sample, deal_sources, open_source
from crowdml.errors import DataError
from crowdml.models import make_model
from crowdml.task import parse

TASK = small_task()


def all_of(source, most: int = 100) -> list[Sample]:
    async def whole() -> list[Sample]:
        found: list[Sample] = []
        while samples := await source.read(most):
            found += samples
        return found

    return asyncio.run(whole())


def test_a_csv_file_has_a_row_for_each_sample_and_may_name_its_columns(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("x1,x2,x3,x4,label\n0.1,0,0,0,a\n0,0.5,0,0,2\n3,4,0,0,b\n")
    samples = all_of(open_source(f"csv:{path}", TASK))
    assert [sample.y for sample in samples] == [0.0, 2.0, 1.0]
    np.testing.assert_allclose(samples[0].x, [0.1, 0, 0, 0])
    np.testing.assert_allclose(samples[2].x, [0.6, 0.8, 0, 0], rtol=1e-6)


def test_a_row_that_cannot_be_read_is_kept_as_a_sample_that_adds_nothing_and_counted(tmp_path):
    """Rows that were dropped would show in the number of check-ins, and move every later batch (R3)."""
    path = tmp_path / "rows.ndjson"
    good, big = '{"x": [0, 0, 0, 1], "y": "c"}', "9" * 400
    bad = ["not json", "[]", '{"x": [1], "y": 0}', '{"x": [0, 0, 0, "q"], "y": 0}', '{"x": [0, 0, 0, 0], "y": 3}',
           '{"x": [0, 0, 0, 1], "y": null}', '{"x": [0, 0, 0, 1], "y": NaN}', good.replace('"c"', big),
           good.replace("1", big), good.replace("1", "NaN"), good.replace("1", "1e999"), ""]  # fmt: skip
    path.write_text("\n".join([good, *bad, good]))
    for most in (1, 4, 100):
        source = open_source(f"ndjson:{path}", TASK)
        samples = all_of(source, most)
        assert [sample.y for sample in samples] == [2.0, *[-1.0] * len(bad), 2.0]
        assert not any(sample.x.any() for sample in samples[1:-1])
        assert (source.taken, source.faults.total) == (len(bad) + 2, len(bad))
        assert f"{len(bad)} of its rows" in source.why_ended


def test_the_stand_in_for_a_row_that_cannot_be_read_adds_nothing_in_any_model():
    labels = Samples(np.ones((2, 4), np.float32), np.stack([_unpack(_pack(Sample(np.ones(4), y)), TASK)[1]
                                                           for y in (-1.0, float("nan"))]))  # fmt: skip
    assert labels.y.tolist() == [-1, -1]
    numbers = Samples(np.ones((2, 4), np.float32), np.full(2, np.nan, np.float32))
    for kind, classes in (("softmax", 3), ("logistic", 2), ("svm", 2), ("linear", None)):
        model = make_model(kind, 4, classes)
        samples, weights = labels if classes else numbers, np.ones(model.shape, np.float32)
        assert not model.gradients(weights, samples).any()
        assert not model.mistakes(weights, samples).any()
        assert not model.label_cells(samples).any()


def test_a_first_line_is_a_heading_where_none_of_its_fields_is_a_number_and_the_owner_is_told_or_decides(tmp_path):
    """Review 2, privacy finding 5: the first line alone counts as public."""
    path, told = tmp_path / "rows.csv", []
    for first, header, count in (
        (",0,0,0,a", None, 2),
        ("0,1,2,3,label", None, 2),
        ("w,x,y,z,label", None, 1),
        ("w,w,w,,label", None, 1),
        ("w,x,y,z,label", False, 2),
        ("0,1,2,3,label", True, 1),
    ):
        path.write_text(f"{first}\n0,0,0,1,b\n")
        told.clear()
        assert len(all_of(open_source(f"csv:{path}", TASK, header=header, tell=told.append))) == count
        assert len(deal_sources(f"csv:{path}", TASK, count, header=header)) == count
        assert [f"The first line of {path} is taken for a heading" in each for each in told] == (
            [True] if header is None and count == 1 else []
        )
    path.write_bytes(b"\xef\xbb\xbf" + "größe,x,y,z,label\n0,0,0,1,b\n".encode("latin-1"))
    assert [sample.y for sample in all_of(open_source(f"csv:{path}", TASK))] == [1.0]
    path.write_bytes(b"\xef\xbb\xbf0,0,0,1,b\n")
    assert [sample.y for sample in all_of(open_source(f"csv:{path}", TASK))] == [1.0]
    with pytest.raises(DataError, match="--header is for CSV files"):
        open_source(f"ndjson:{path}", TASK, header=True)


@pytest.mark.parametrize(
    ("kind", "first", "sentence"),
    [
        ("csv", "0.25,0.25,a", "has 3 fields, and the task wants 4 numbers and a label. Nothing was sent."),
        ("csv", "0.25 0 0 0 a", "has 1 field, and the task wants 4 numbers and a label. Nothing was sent."),
        ("csv", "w,x,label\n0,0,0,0.25,a", "has 3 fields, and the task wants 4 numbers and a label. Nothing was sent."),
        ("csv", '0,0,0,"0.25,a', "is not in the source's format, and the task wants 4 numbers and a label."),
        ("csv", "", "is blank, and the task wants 4 numbers and a label."),
        ("ndjson", '{"x": [0.25], "y": "a"}', "has 1 field, and the task wants 4 numbers and a label."),
        ("ndjson", "0.25", 'is no object like {"x": [...], "y": ...}, and the task wants 4 numbers and a label.'),
    ],
)
def test_a_file_whose_first_line_has_another_width_is_refused_without_showing_it(tmp_path, kind, first, sentence):
    path = tmp_path / "rows"
    path.write_text(f"{first}\n{first}\n")
    for opened in (
        lambda: open_source(f"{kind}:{path}", TASK, Share(1, 2)),
        lambda: deal_sources(f"{kind}:{path}", TASK, 1),
    ):
        with pytest.raises(DataError) as refused:
            opened()
        assert str(refused.value).startswith(f"{path}: its first line {sentence}")
        assert "25" not in str(refused.value).removeprefix(str(path))


@pytest.mark.parametrize(
    ("kind", "first"), [("csv", "0,0,0,0.25,z25"), ("csv", "0,0,0,,a"), ("ndjson", '{"x": [0, 0, 0, 0.25], "y": 3}')]
)
def test_what_stands_in_the_first_row_does_not_stop_a_device(tmp_path, kind, first):
    """Review 2, privacy finding 5: too few lines and the width of the first one do, and nothing else."""
    path = tmp_path / "rows"
    path.write_text(f"{first}\n" * 3)
    source = open_source(f"{kind}:{path}", TASK)
    assert [sample.y for sample in all_of(source)] == [-1.0] * 3


def test_a_data_set_with_labels_that_the_task_does_not_have_is_refused():
    shape = SMALL.format(name="digits", samples=100).replace("dimension = 4", "dimension = 64")
    with pytest.raises(DataError, match=r"data set 'digits' has 10 classes.*takes 3\. Nothing was sent\."):
        open_source("shard:digits", parse(shape))
    with pytest.raises(DataError, match=r"64 features.*takes 4\. Nothing was sent\."):
        open_source("shard:digits", TASK)


def test_an_empty_file_and_the_first_row_of_a_share_are_no_error(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("")
    assert all_of(open_source(f"csv:{path}", TASK)) == []
    path.write_text("0,0,0,0.1,a\n0,0,0,0.2,b\n0,0,0,0.3,c\n")
    assert [sample.y for sample in all_of(open_source(f"csv:{path}", TASK, Share(1, 2)))] == [1.0]


def test_a_source_goes_on_where_the_last_reader_stopped(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"0,0,0,0.{i},a\n" for i in range(10)))
    source = open_source(f"csv:{path}", TASK)
    asyncio.run(source.skip(7))
    assert [round(float(sample.x[3]), 1) for sample in all_of(source)] == [0.7, 0.8, 0.9]
    assert source.taken == 10


def test_shares_of_a_file_are_disjoint_and_dealt_to_a_fleet_the_same_way(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("".join(f"0,0,0,0.{i},a\n" for i in range(10)))
    dealt = deal_sources(f"csv:{path}", TASK, 3)
    for number, source in enumerate(dealt):
        alone = open_source(f"csv:{path}", TASK, Share(number, 3))
        assert source.name == alone.name
        assert [sample.x[3] for sample in all_of(source)] == [sample.x[3] for sample in all_of(alone)]
    with pytest.raises(DataError, match="too few"):
        deal_sources(f"csv:{path}", TASK, 11)


def test_a_function_of_ten_lines_is_a_source(tmp_path, monkeypatch):
    (tmp_path / "my_sensor.py").write_text(
        "def read():\n    for i in range(3):\n        yield [0, 0, 0, i / 10], 'b'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    samples = all_of(open_source("python:my_sensor:read", TASK))
    assert [(round(float(sample.x[3]), 1), sample.y) for sample in samples] == [(0.0, 1.0), (0.1, 1.0), (0.2, 1.0)]
    sys.modules.pop("my_sensor")


def test_a_live_source_waits_for_its_samples_and_holds_its_thread_when_nobody_reads():
    given, go = [], threading.Event()

    def sensor():
        go.wait(60)
        for i in range(100):
            given.append(i)
            yield [0, 0, 0, 0], 0

    source = LiveSource(sensor, TASK, 5)

    async def read() -> list[Sample]:
        asyncio.get_running_loop().call_later(0.05, go.set)
        first = await source.read(3)
        source.close()
        return first

    samples = asyncio.run(read())
    assert 1 <= len(samples) <= 3
    assert len(given) < 20


def test_a_source_that_fails_says_of_what_kind_and_not_with_which_sample():
    def sensor():
        yield [0, 0, 0, 0], 0
        raise ValueError("the secret sample 42")

    source = LiveSource(sensor, TASK, 5)
    with pytest.raises(DataError, match="ValueError") as failure:
        all_of(source)
    assert "42" not in str(failure.value)


@pytest.mark.parametrize("spec", ["", "csv", "csv:", "tape:x", "csv:absent.csv", "python:absent:read", "python:json"])
def test_a_source_that_is_none_is_refused(spec):
    with pytest.raises(DataError):
        open_source(spec, TASK)


def test_a_folder_in_place_of_a_file_is_said_to_be_one(tmp_path):
    """A newcomer's trial, owner 21: "there is no file study" beside a folder of that name."""
    with pytest.raises(DataError, match=r": .* is a folder\. Name a file in it\."):
        open_source(f"csv:{tmp_path}", TASK)


@pytest.mark.parametrize("text", ["", "1", "3/3", "-1/3", "a/b"])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(DataError):
        parse_share(text)


def test_a_sample_is_never_shown():
    assert "0.25" not in repr(Sample(np.full(4, 0.25), 1.0))


WAITS = """
import asyncio, sys
from crowdml.device.sources import open_source
from crowdml.task import find_task

async def wait():
    reading = asyncio.create_task(open_source("csv:-", find_task("activity")).read(5))
    await asyncio.sleep(0)
    print("reads", flush=True)
    await asyncio.wait([reading], timeout=0.3)
    print(reading.done(), flush=True)
    sys.exit(130)

asyncio.run(wait())
"""


def test_a_process_that_waits_for_stdin_can_end():
    environment = {**os.environ, "PYTHONPATH": str(Path(crowdml.__file__).parents[1])}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WAITS], env=environment, text=True, **pipes) as device:
        assert device.wait(60) == 130, device.stderr.read()
        assert device.stdout.read().split() == ["reads", "False"]
