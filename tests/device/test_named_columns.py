"""Columns of a CSV source by the names in its heading: the table that was simulated is the table that devices hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from crowdml.datasets import Columns, load
from crowdml.device.files import check_known
from crowdml.device.sources import deal_sources, holders_in, open_source
from crowdml.errors import DataError
from crowdml.lines import csv_fields, separator
from crowdml.server.validation import read_rows
from crowdml.sim.studies import _rows as simulated_rows
from crowdml.task import Bound, Features, Labels, find_task

TASK = replace(
    find_task("digits012"),
    features=Features(2, Bound("l2"), low=(Fraction(0), Fraction(-1)), high=(Fraction(100), Fraction(1))),
    labels=Labels(("left", "right")),
)
ROWS = "who,side,a,b\nanna,left,10,0.5\nanna,right,120,-0.5\nbert,left,50,1\n"


def written(folder: Path, text: str = ROWS) -> str:
    path = folder / "own.csv"
    path.write_text(text)
    return str(path)


def test_a_device_holds_the_rows_that_the_simulator_runs_on(tmp_path: Path):
    path = written(tmp_path)
    source = open_source(f"csv:{path}", TASK, label="side", ignore=("who",))
    held = asyncio.run(source.read(10))
    table = Columns("side", ignore=("who",)).table(path)
    x, y = simulated_rows(TASK, table.x, table.y)
    assert np.array_equal(np.stack([sample.x for sample in held]), x)
    assert [sample.y for sample in held] == y.tolist()
    assert source.faults.total == 0
    assert source.faults.clipped == 1
    assert "1 row had a number outside the task's bounds" in source.why_ended
    assert load(path, normalise="none", seed=1, columns=Columns("side", ignore=("who",), test="0.4")).features == 2


def test_a_fleet_finds_columns_by_name_too(tmp_path: Path):
    first, second = deal_sources(f"csv:{written(tmp_path)}", TASK, 2, label="side", ignore=("who",))
    assert (first.count, second.count) == (2, 1)
    assert [sample.y for sample in asyncio.run(second.read(5))] == [1]


def test_a_fleet_deals_out_rows_by_the_column_that_the_simulation_dealt_them_by(tmp_path: Path):
    path = written(tmp_path, ROWS + "anna,left,1,0\n")
    assert holders_in(f"csv:{path}", "who") == 2
    anna, bert = deal_sources(f"csv:{path}", TASK, 2, label="side", device="who")
    assert [sample.y for sample in asyncio.run(anna.read(5))] == [0, 1, 0]
    assert bert.count == 1
    table = Columns("side", "who").table(path)
    x, _ = simulated_rows(TASK, table.x, table.y)
    assert np.array_equal(asyncio.run(bert.read(5))[0].x, x[table.devices == "bert"][0])
    assert bert.name == f"csv-lines:{path}:who=bert"
    assert bert.place({bert.name: 1}) == 1


def test_rows_that_were_given_by_a_column_are_not_given_again_by_number(tmp_path: Path):
    path = written(tmp_path)
    (anna, _), (first, _) = (
        deal_sources(f"csv:{path}", TASK, 2, label="side", **said)  # pyright: ignore[reportArgumentType]
        for said in ({"device": "who"}, {"ignore": ("who",)})
    )
    for known, now in ((anna, first), (first, anna)):
        with pytest.raises(DataError, match="may hold the same rows"):
            check_known(now.name, {str(known.name): 1})
    check_known(anna.name, {str(anna.name): 1})


def test_a_row_that_nobody_holds_stops_a_fleet_before_anything_is_sent(tmp_path: Path):
    path = written(tmp_path, ROWS + " ,left,1,0\n")
    with pytest.raises(DataError, match=r"own\.csv, line 5: column 'who' does not say whose the row is"):
        deal_sources(f"csv:{path}", TASK, 2, label="side", device="who")
    with pytest.raises(DataError, match=r"has no column 'whos'. Did you mean 'who'\?"):
        holders_in(f"csv:{path}", "whos")


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_device_reads_another_separator_as_the_simulator_does(mark: str, tmp_path: Path):
    text = ROWS.replace(",", mark)
    text = text.replace(".", ",") if mark == ";" else text
    path = written(tmp_path, text)
    source = open_source(f"csv:{path}", TASK, label="side", ignore=("who",))
    held = asyncio.run(source.read(10))
    table = Columns("side", ignore=("who",)).table(path)
    assert table.x.tolist() == [[10, 0.5], [120, -0.5], [50, 1]]
    assert np.array_equal(np.stack([sample.x for sample in held]), simulated_rows(TASK, table.x, table.y)[0])
    assert source.faults.total == 0
    assert read_rows(TASK, path, "side", ("who",)).x.tolist() == table.x.tolist()


def test_a_comma_wins_over_other_separators_and_is_a_decimal_mark_between_semicolons_alone():
    assert separator(b"a;b,c") == ","
    assert separator(b"value") == ","
    assert csv_fields("1,5;-,5e3;1.234,5;x,y;2", ";") == ["1.5", "-.5e3", "1.234,5", "x,y", "2"]
    assert csv_fields("1,5\t2", "\t") == ["1,5", "2"]


def test_rows_for_validation_name_their_columns_as_devices_do(tmp_path: Path):
    path = written(tmp_path)
    rows = read_rows(TASK, path, "side", ("who",))
    assert rows.x.tolist() == [[10, 0.5], [120, -0.5], [50, 1]]
    assert rows.y.tolist() == [0, 1, 0]
    for args, why in (
        (("sid", ()), "has no column 'sid'. Did you mean 'side'? Nothing was written."),
        (("side", ()), "has 3 features (who, a, b, side), and the task takes 2. Leave columns out with --ignore"),
        (("side", ("side", "who")), "--ignore leaves no column for the label"),
    ):
        with pytest.raises(DataError) as refused:
            read_rows(TASK, path, *args)
        assert why in str(refused.value)
    with pytest.raises(DataError, match="by a heading, and it has none"):
        read_rows(TASK, written(tmp_path, "1,2,left\n"), "side")


def test_a_line_of_another_length_keeps_its_place_and_is_counted(tmp_path: Path):
    source = open_source(f"csv:{written(tmp_path, ROWS + 'bert,left,1')}", TASK, label="side", ignore=("who",))
    held = asyncio.run(source.read(10))
    assert len(held) == 4
    assert held[3].y == -1
    assert source.faults.counts == {"fields": 1}


@pytest.mark.parametrize(
    ("text", "options", "why"),
    [
        (ROWS, {"label": "sid"}, "has no column 'sid'. Did you mean 'side'?"),
        (ROWS, {"label": "side", "ignore": ("when",)}, "has no column 'when'"),
        (ROWS, {"label": "side"}, "its first line has 4 fields, and the task wants 2 numbers and a label"),
        ("1,2,left\n", {"label": "side"}, "--label, --ignore and --device name columns by a heading, and it has none"),
    ],
)
def test_columns_that_are_not_there_are_refused_before_anything_is_sent(
    text: str, options: dict[str, object], why: str, tmp_path: Path
):
    with pytest.raises(DataError) as refused:
        open_source(f"csv:{written(tmp_path, text)}", TASK, **options)  # pyright: ignore[reportArgumentType]
    assert why in str(refused.value)
    assert str(refused.value).endswith("Nothing was sent.")


def test_only_csv_files_have_columns_by_name():
    with pytest.raises(DataError, match="--label, --ignore and --device are for CSV files"):
        open_source("ndjson:rows.ndjson", TASK, label="side")
