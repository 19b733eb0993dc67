"""Readings of a sensor as samples: each begins at its own reading, none is given twice, no reading is in any word."""

from __future__ import annotations

import asyncio
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import QuickClock, joined, serving
from tasks import STREET, toml

from crowdml.datasets.files import locate
from crowdml.datasets.traffic import SCATS
from crowdml.device.client import Client
from crowdml.device.files import Share
from crowdml.device.fleet import Fleet
from crowdml.device.sources import FileSource, LiveSource, Sample, Series, deal_sources, open_source
from crowdml.errors import DataError
from crowdml.features.series import label, look_ahead
from crowdml.task import parse

TEXT = toml(
    STREET,
    features={"dimension": 3, "horizon": 2},
    labels={"bins": [10, 50]},
    model={"kind": "histogram", "k": None},
    protocol={"batch": 4, "peers": None},
    privacy={"budget": {"epsilon": 1.0, "samples": 1000}},
)
TASK = parse(TEXT)
EDGES = [10.0, 50.0]
READINGS = [3, 12, 55, 9, 10, 49.5, 50, 7, 80, 21, 5, 60]


def all_of(source, most: int = 100) -> list[Sample]:
    async def whole() -> list[Sample]:
        found: list[Sample] = []
        while samples := await source.read(most):
            found += samples
        return found

    return asyncio.run(whole())


def shown(samples: list[Sample]) -> list[tuple[list[float], float]]:
    return [(sample.x.tolist(), sample.y) for sample in samples]


def expected(values: list[float]) -> list[tuple[list[float], float]]:
    x, target = look_ahead(values, 3, 2)
    return [(row.tolist(), float(y)) for row, y in zip(x, label(target, EDGES), strict=True)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("csv", "vehicles\n" + "\n".join(map(str, READINGS)) + "\n"),
        ("csv", "\n".join(map(str, READINGS))),
        ("ndjson", "\n".join(f'{{"value": {each}, "at": "now"}}' for each in READINGS)),
        ("ndjson", "\n".join(map(str, READINGS)) + "\n"),
    ],
)
def test_a_row_is_a_reading_and_samples_are_cut_from_them_one_after_another(tmp_path, kind, text):
    path = tmp_path / "readings"
    path.write_text(text)
    for most in (1, 3, 100):
        source = open_source(f"{kind}:{path}", TASK)
        assert shown(all_of(source, most)) == expected(READINGS)
        assert (source.taken, source.faults.total) == (len(READINGS) - 4, 0)
        assert source.latest.tolist() == READINGS[-3:]


def test_a_reader_that_comes_back_goes_on_at_the_next_sample_with_nothing_lost_and_nothing_twice(tmp_path):
    path = tmp_path / "readings.csv"
    path.write_text("\n".join(map(str, READINGS)))
    whole = expected(READINGS)

    @settings(max_examples=20)
    @given(st.lists(st.integers(1, 4), max_size=6))
    def in_pieces(pieces: list[int]) -> None:
        found, taken = [], 0
        for most in [*pieces, 100]:
            source = open_source(f"csv:{path}", TASK)
            asyncio.run(source.skip(taken))
            found += shown(asyncio.run(source.read(most)))
            taken = source.taken
        assert (found, taken) == (whole, len(whole))

    in_pieces()
    assert all_of(open_source(f"csv:{path}", TASK)) != []


class Noted(FileSource):
    """Notes which readings it gave as the labels of samples: of readings 0, 1, 2, ... the window says which."""

    def __init__(self, task, labels: list[float], *, waits: bool) -> None:
        super().__init__("sensor:0/1", Series([float(each) for each in range(60)], task), task)
        self.labels, self.waits, self.horizon = labels, waits, task.features.horizon

    async def read(self, most: int) -> list[Sample]:
        samples = await super().read(most)
        self.labels += [float(sample.x[-1]) + self.horizon for sample in samples]
        return samples


@pytest.mark.parametrize("waits", [True, False])
def test_no_reading_is_a_label_in_two_tasks_whose_windows_are_unlike(tmp_path, waits):
    """A sample of the first has its label four readings on, of the second one: those between were counted already."""
    shorter = parse(TEXT.replace("dimension = 3\nhorizon = 2", "dimension = 1\nhorizon = 1"))
    labels: list[float] = []

    async def take_part(task) -> None:
        client, home = Client(server.address), joined(tmp_path / "device", task)
        found, protocol = home.accepted(task.hash)
        fleet = Fleet(home, client, found, protocol, clock=QuickClock().clock)
        try:
            await fleet.enrol(server.code, None)
            assert (await fleet.run(lambda _: Noted(found, labels, waits=waits), most=2)).check_ins == 2
        finally:
            await client.close()

    with serving(tmp_path / "server", TASK, shorter) as server:
        for task in (TASK, shorter, TASK):
            asyncio.run(take_part(task))
    assert labels == list(range(4, 4 + len(labels)))


def test_a_file_that_grew_goes_on_where_it_ended(tmp_path):
    path = tmp_path / "readings.csv"
    path.write_text("\n".join(map(str, READINGS[:7])))
    before = open_source(f"csv:{path}", TASK)
    first = shown(all_of(before))
    path.write_text("\n".join(map(str, READINGS)))
    after = open_source(f"csv:{path}", TASK)
    asyncio.run(after.skip(before.taken))
    assert first + shown(all_of(after)) == expected(READINGS)


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("csv", ["3", "", "NA", "nan", "7", "inf", "x1", "12", "1,2", "5", "6", "8"]),
        ("ndjson", ["3", "null", '{"other": 1}', "NaN", "7", "1e999", "[1, 2]", "12", '"q"', "5", "6", "8"]),
    ],
)
def test_a_reading_that_cannot_be_read_keeps_its_place_and_moves_no_other(tmp_path, kind, lines):
    path = tmp_path / "readings"
    path.write_text("\n".join(lines))
    source = open_source(f"{kind}:{path}", TASK)
    samples = all_of(source)
    values = [float(each) if each.isdigit() else math.nan for each in lines]
    wanted = expected(values)
    assert [sample.y for sample in samples] == [y for _, y in wanted]
    assert len(samples) == len(lines) - 4
    for sample, (x, y) in zip(samples, wanted, strict=True):
        assert sample.x.tolist() == (x if y >= 0 and np.isfinite(x).all() else [0.0] * 3)
    assert source.faults.total == sum(math.isnan(each) for each in values)


def test_a_first_line_that_is_blank_or_no_reading_is_no_heading(tmp_path):
    path = tmp_path / "readings.csv"
    for first, count in (("vehicles", 8), ("nan", 9), ("", 9), ("17", 9)):
        path.write_text("\n".join([first, *map(str, READINGS)]))
        assert len(all_of(open_source(f"csv:{path}", TASK))) == count


def test_a_share_of_a_file_of_readings_is_one_of_its_columns(tmp_path):
    path = tmp_path / "city.csv"
    rows = [[each, 2 * each, 3 * each] for each in READINGS]
    path.write_text("north,mid,south\n" + "\n".join(",".join(map(str, row)) for row in rows))
    for column in range(3):
        source = open_source(f"csv:{path}", TASK, Share(column, 3))
        assert source.name == f"csv-lines:{path.resolve()}:{column}/3"
        assert shown(all_of(source)) == expected([row[column] for row in rows])
    dealt = deal_sources(f"csv:{path}", TASK, 3)
    assert [shown(all_of(each)) for each in dealt] == [expected([row[column] for row in rows]) for column in range(3)]
    assert [each.name for each in dealt] == [f"csv-lines:{path.resolve()}:{column}/3" for column in range(3)]


def test_rows_of_another_width_are_refused_without_showing_a_reading(tmp_path):
    path = tmp_path / "city.csv"
    path.write_text("north,mid\n7125,7225\n7325,7425\n")
    for share, wanted in ((Share(), "one a row; --shard I/N reads one of N columns"), (Share(0, 3), "3 columns")):
        with pytest.raises(DataError) as refused:
            open_source(f"csv:{path}", TASK, share)
        assert (
            str(refused.value) == f"{path}: its first line has 2 fields, and the task wants {wanted}. Nothing was sent."
        )
    lines = tmp_path / "readings.ndjson"
    lines.write_text("7125\n")
    with pytest.raises(DataError, match=r"no columns to share\. Nothing was sent\.") as refused:
        open_source(f"ndjson:{lines}", TASK, Share(0, 2))
    assert "7125" not in str(refused.value)


def test_a_stream_begins_its_window_anew_and_knows_its_newest_readings():
    async def read() -> tuple[list[Sample], object]:
        source = LiveSource(lambda: iter([*READINGS, "seven", None, 4, 5, 6]), TASK, 100)
        found: list[Sample] = []
        while samples := await source.read(3):
            found += samples
        source.close()
        return found, source.latest

    found, latest = asyncio.run(read())
    wanted = expected([*READINGS, math.nan, math.nan, 4, 5, 6])
    assert [sample.y for sample in found] == [y for _, y in wanted]
    assert latest.tolist() == [4, 5, 6]


def test_fewer_readings_than_a_window_make_no_newest_one():
    series = Series([1, 2], TASK)
    assert list(series) == []
    assert series.latest is None
    assert Series([], TASK).latest is None


@pytest.mark.skipif(locate(SCATS) is None, reason="set CROWDML_DATA to the folder with the SCATS counts")
def test_a_data_set_of_series_gives_each_device_one_sensor():
    source = open_source("shard:scats", TASK, Share(4, 106))
    assert isinstance(source, FileSource)
    samples = asyncio.run(source.read(5))
    assert all(abs(sample.x).max() > 0 for sample in samples)
    assert source.name == "shard:scats:4/106"
    with pytest.raises(DataError, match=r"106 series, too few for 107\. Nothing was sent\."):
        open_source("shard:scats", TASK, Share(0, 107))
    names = {each.name for each in itertools.islice(deal_sources("shard:scats", TASK, 106), 3)}
    assert names == {f"shard:scats:{number}/106" for number in range(3)}
