"""Histograms as files for others: the same numbers in each, a card whose lines run, and no ONNX."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from device import make_task, serving
from proportions_task import histogram, street
from relay_device import claim, say

from crowdml.cli.output import whole_file
from crowdml.errors import DataError
from crowdml.price import Epsilons
from crowdml.protocol import Noisy
from crowdml.server.estimates import REACH, share_of
from crowdml.server.export import Exported, export_model, model_card, model_file, onnx_file, table_file, write_model
from crowdml.task import Task

COUNTS = (40, -3, 23)


def exported(task: Task, *, batches: int = 3) -> Exported:
    size = int(task.protocol["batch"])
    noisy = Noisy(COUNTS if batches else (0, 0, 0), batches * size, batches * 2.5)
    shares = np.array([0.6, 0.0, 0.4], np.float32)
    return Exported(task, shares, version=3, check_ins=3, devices=2, most=2, paid=Epsilons(1.0, 40.0), labels=noisy)


def test_a_share_has_the_interval_of_the_noise_and_of_the_choice_of_samples():
    noisy = Noisy((20, -2), 100, 9.0)
    share = share_of(noisy, 0)
    reach = REACH * np.sqrt(9 / 100**2 + 0.2 * 0.8 / 100)
    assert (share.value, share.low, share.high) == pytest.approx((0.2, 0.2 - reach, 0.2 + reach))
    assert share_of(noisy, 1).high == pytest.approx(-0.02 + REACH * 0.03), "the noise alone, where nobody was counted"


@pytest.mark.parametrize("task", [street(), histogram(), histogram(masked=True)], ids=["peers", "alone", "masked"])
def test_every_file_says_the_same(task: Task):
    model = exported(task)
    said = json.loads(table_file(model, ".json"))
    rows = list(csv.DictReader(io.StringIO(table_file(model, ".csv").decode())))
    raw = model_file(model)
    end = 8 + int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8:end])
    assert said["format"] == "crowdml/histogram/1"
    assert (said["measurements"], said["variance"]) == (model.labels.samples if model.labels else 0, 7.5)
    assert [row["label"] for row in said["labels"]] == list(task.labels.classes) == [row["label"] for row in rows]
    assert [row["count"] for row in said["labels"]] == list(COUNTS)
    for name in ("count", "share", "low", "high", "projected"):
        column = np.frombuffer(raw[end:][slice(*head[name]["data_offsets"])], "<f4")
        assert column == pytest.approx([row[name] for row in said["labels"]])
        assert column == pytest.approx([float(row[name]) for row in rows])


def test_the_card_says_whom_it_protects_shows_the_bars_and_its_lines_run(tmp_path: Path, monkeypatch):
    model = exported(street())
    paths = [tmp_path / f"street.{ending}" for ending in ("json", "csv", "safetensors")]
    card = write_model(model, paths, whole_file).read_text(encoding="utf-8")
    assert "The guarantee protects one measurement, not a person" in card
    assert "| quiet | 40 | 166.7 % |" in card
    assert "windows of 3 readings; none of them left its device" in card
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)\n```", card, re.DOTALL)
    assert len(snippets) == 3
    for snippet in snippets:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            exec(snippet, {})
        assert [line.split()[0] for line in shown.getvalue().splitlines()] == ["quiet", "busy", "full"], snippet


def test_before_the_first_check_in_there_are_no_bars():
    model = exported(histogram(), batches=0)
    assert json.loads(table_file(model, ".json"))["labels"] == []
    assert table_file(model, ".csv").decode().count("\n") == 1
    assert "## What came of it" in model_card(model, "x.csv")


def test_onnx_is_refused_with_the_reason_and_nothing_is_written(tmp_path: Path):
    model = exported(street())
    with pytest.raises(DataError, match="has no model to run as ONNX: its server counts labels"):
        onnx_file(model)
    with pytest.raises(DataError):
        write_model(model, [tmp_path / "a.json", tmp_path / "a.onnx"], whole_file)
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_no_table(tmp_path: Path):
    task = make_task("table")
    model = Exported(task, np.zeros((8, 2), np.float32), 1, 1, 1, 1, 1.0, 1.0)
    with pytest.raises(DataError, match="holds a histogram, and task count-table learns a model"):
        write_model(model, [tmp_path / "a.csv"], whole_file)


def test_what_a_server_counted_is_what_is_exported(tmp_path: Path):
    task = street()
    with serving(tmp_path, task) as server:
        device = server.device()
        assert claim(device, 1, task).status == 201
        for _ in range(2):
            assert say(device, 1, task, counts=(5, 2, 1)).status == 202
        model = export_model(server.hub.store, task.hash)
    assert model.labels == Noisy((10, 4, 2), 16, pytest.approx(2 * 7.835396, rel=1e-6))
    assert [row["share"] for row in json.loads(table_file(model, ".json"))["labels"]] == [0.625, 0.25, 0.125]
