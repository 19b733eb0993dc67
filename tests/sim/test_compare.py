"""`crowdml.compare` and `crowdml compare`: every protocol that fits a table, at the same honest total."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from crowdml import compare, find_task
from crowdml.errors import CrowdmlError, PrivacyWarning
from crowdml.sim.compare import Cell, Plan, Row, plan
from crowdml.task import Task

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_runner import crowdml, refused

CHANCE = np.random.default_rng(1)
Y = np.arange(120) % 2
X = CHANCE.normal(np.stack([4.0 * Y - 2, 0 * Y], axis=1), 0.5)
QUICK = {"devices": 8, "protocols": ["gram"], "bounds": (-4, 4), "trials": 2, "seed": 1}
KEYS = ["protocol", "masked", "epsilon", "devices", "accuracy", "low", "high", "epsilon_sample", "epsilon_device",
        "bytes_up", "rounds", "seconds"]  # fmt: skip


def planned(**settings) -> Plan:
    usual = {"epsilon": 4, "delta": None, "devices": 8, "groups": None, "protocols": None, "masked": None,
             "bounds": (-4, 4), "target": None, "test": 0.2, "trials": 1, "seed": 1}  # fmt: skip
    return plan(settings.pop("X", X), settings.pop("y", Y), **{**usual, **settings})


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sides = np.array(["left", "right"])[Y]
    lines = [f"{a:.3f},{b:.3f},{side},p{row % 8}" for row, ((a, b), side) in enumerate(zip(X, sides, strict=True))]
    (tmp_path / "own.csv").write_text("a,b,side,who\n" + "\n".join(lines) + "\n")
    return tmp_path


def test_every_protocol_that_fits_is_planned_alone_and_under_masks():
    made = planned()
    assert {(cell.protocol, cell.masked) for cell in made.cells} == {
        (name, masked) for name in ("admm", "gram", "local_updates", "sgd") for masked in (False, True)
    } - {("gram", False)}
    assert any(note.startswith("Left out: gram alone, because") for note in made.notes)


def test_several_prices_and_crowds_make_a_grid():
    made = planned(epsilon=[1, 4], devices=[6, 8], protocols=["sgd"])
    assert {(cell.epsilon, cell.shape.devices, cell.masked) for cell in made.cells} == {
        (epsilon, devices, masked) for epsilon in (1, 4) for devices in (6, 8) for masked in (False, True)
    }


def test_a_comparison_learns_within_the_total_that_was_asked_for():
    found = compare(X, Y, epsilon=8, **QUICK)
    (row,) = found.rows
    assert row.masked
    assert row.rounds == 1
    assert row.devices == 8
    assert row.epsilon_sample <= 8 < row.epsilon_device
    assert found.majority < row.low <= row.accuracy <= row.high
    assert found.no_privacy > 0.95
    assert found.best is row
    assert row.task.protocol["kind"] == "gram"
    assert list(row.plain()) == KEYS == list(found.frame())


def test_one_seed_gives_the_same_rows_again():
    first, again = (compare(X, Y, epsilon=0.2, **QUICK).frame() for _ in range(2))
    other = compare(X, Y, epsilon=0.2, **{**QUICK, "seed": 2}).frame()
    for each in (first, again, other):
        del each["seconds"]
    assert first == again != other


def test_numbers_are_judged_by_r2_beside_the_mean_and_linear_regression():
    found = compare(X, X[:, 0] / 4 + 0.01, target=(-1, 1), epsilon=100, **QUICK)
    assert found.measure == "R²"
    assert abs(found.majority) < 0.1
    assert found.no_privacy > 0.99
    assert found.rows[0].accuracy > 0.5
    assert "without privacy" in found.verdict


def test_many_whole_numbers_are_numbers_and_few_are_classes():
    assert planned(y=np.arange(120.0), masked=True, protocols=["sgd"]).classes == ()
    assert planned(y=1.0 + Y, masked=True, protocols=["sgd"]).classes == ("1", "2")


def test_who_holds_a_row_decides_how_large_a_batch_is():
    made = planned(groups=np.repeat(np.arange(10), 12), devices=None, test=(X, Y), protocols=["sgd"])
    assert {(cell.shape.devices, cell.shape.held) for cell in made.cells} == {(10, 12)}
    with pytest.raises(CrowdmlError, match="Leave out one of the two"):
        planned(groups=np.repeat(np.arange(10), 12))


def test_bounds_taken_from_the_rows_are_told():
    assert planned().warnings == ()
    taken = planned(bounds=None)
    assert "no ε covers" in taken.warnings[0]
    assert not any("outside" in note for note in (*taken.notes, *taken.changed))
    assert "outside their bounds" in planned(bounds=(-1, 1)).changed[0]
    with pytest.warns(PrivacyWarning, match="no ε covers"):
        compare(X, Y, **{**QUICK, "bounds": None})


def test_delta_is_the_usual_one_or_the_ceiling_of_a_large_crowd():
    assert {cell.task.privacy.delta for cell in planned().cells} == {1e-6}
    many = planned(X=np.tile(X, (2000, 1)), y=np.tile(Y, 2000), test=(X, Y), devices=100, protocols=["sgd"])
    assert {cell.task.privacy.delta for cell in many.cells} == {1 / 2_400_000}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"epsilon": 0}, "epsilon = 0: a number above 0"),
        ({"delta": 0.1}, "delta = 0.1: above 0 and at most"),
        ({"devices": 97}, "devices = 97: there are 96 rows"),
        ({"protocols": ["gramm"]}, "Did you mean 'gram'"),
        ({"protocols": ["gram"], "masked": False}, "needs masks"),
        ({"protocols": ["proportions"]}, "not from rows of a table"),
        ({"test": 1.5}, "test = 1.5 of 120 rows"),
        ({"y": 0 * Y}, "all 120 labels are 0"),
        ({"y": Y[:10]}, "one label for each row"),
        ({"X": np.where(X > 2, np.nan, X)}, "finite numbers"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(settings, said):
    with pytest.raises(CrowdmlError, match=said):
        planned(**settings)


def test_the_command_prints_one_object_of_the_promised_shape(table: Path):
    args = ("--label", "side", "--ignore", "who", "--epsilon", "8", "--devices", "8", "--protocols", "gram")
    answer = crowdml("compare", "--data", "own.csv", *args, "--seed", "1", "--plot", "out.png", "--json", "-")
    assert answer.code == 0, answer.err
    assert list(answer.json) == ["id", "rows", "majority", "no_privacy"]
    assert answer.json["id"] == "compare"
    (row,) = answer.json["rows"]
    assert list(row) == KEYS
    assert row["epsilon_sample"] <= 8
    assert "no ε covers" in " ".join(answer.err.split())
    assert "Best: gram, masked." in answer.err
    assert (table / "out.png").stat().st_size > 1000


def test_a_range_below_zero_is_readable(table: Path):
    args = ("--label", "b", "--ignore", "who", "--ignore", "side", "--devices", "8", "--protocols", "sgd", "--alone")
    said = crowdml("compare", "--data", "own.csv", *args, "--epsilon", "0.001", "--trials", "2", "--seed", "1")
    assert said.code == 0, said.err
    assert re.search(r" -\d+\.\d\d to -?\d+\.\d\d ", said.out), said.out


@pytest.mark.parametrize("form", ["--masked", "--alone"])
def test_a_comparison_ends_with_the_command_that_makes_the_task_of_the_best(table: Path, form: str):
    (table / "bounds.csv").write_text("a,-4,4\nb,-4,4\n")
    args = ("--label", "side", "--ignore", "who", "--bounds", "bounds.csv", "--epsilon", "8", "--devices", "12")
    said = crowdml("compare", "--data", "own.csv", *args, "--protocols", "sgd", form, "--trials", "1", "--seed", "1")
    assert "no ε covers" not in said.err
    command = next(line for line in said.out.splitlines() if line.startswith("Next: "))
    assert crowdml(*command.removeprefix("Next: crowdml ").split()).code == 0
    made = find_task("my-task.toml")
    assert made.protocol["kind"] == "sgd"
    assert (made.masking is not None) == (form == "--masked")
    assert made.features.low == (-4, -4)


def ran_and_written(monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[Task, Task]:
    """The task of the best row of a comparison, and the one that its last line writes."""
    ran: list[Task] = []
    run = Plan.run
    monkeypatch.setattr(Plan, "run", lambda made, cell: [ran.append(cell.task), run(made, cell)][1])
    said = crowdml("compare", "--data", "own.csv", *args, "--trials", "1", "--seed", "1")
    assert said.code == 0, said.err
    command = next(line for line in said.out.splitlines() if line.startswith("Next: "))
    assert crowdml(*shlex.split(command.removeprefix("Next: crowdml "))).code == 0
    written = find_task("my-task.toml")
    best = next(task for task in ran if task.protocol["kind"] == written.protocol["kind"])
    return best, written.with_(name=best.name, privacy=replace(written.privacy, budget=None))


@pytest.mark.parametrize(
    "args",
    [
        ("--label", "side", "--ignore", "who", "--masked", "--protocols", "gram", "--delta", "1e-7"),
        ("--label", "side", "--device", "who", "--alone", "--protocols", "sgd", "--epsilon", "4"),
        ("--label", "side", "--device", "who", "--test", "0.4", "--masked", "--protocols", "gram"),
        ("--label", "a", "--ignore", "who", "--ignore", "side", "--masked", "--protocols", "gram", "--devices", "9"),
    ],
)
def test_the_last_line_of_a_comparison_writes_the_task_that_ran(table: Path, monkeypatch, args: tuple[str, ...]):
    best, written = ran_and_written(monkeypatch, *args)
    assert written == best


def test_a_crowd_that_is_too_small_and_a_constant_column_are_told_before_the_run(table: Path):
    text = (
        (table / "own.csv")
        .read_text()
        .replace("a,b,", "a,b,c,")
        .replace(",left", ",1,left")
        .replace(",right", ",1,right")
    )
    (table / "own.csv").write_text(text)
    args = ("--label", "side", "--device", "who", "--bounds", "-4,4", "--protocols", "gram", "--epsilon", "0.01")
    answer = crowdml("compare", "--data", "own.csv", *args, "--trials", "1", "--seed", "1")
    assert answer.code == 0, answer.err
    said = " ".join(answer.err.split())
    assert "At ε 0.01 the noise may hide what 8 devices know in gram (masked)." in said
    assert "column 'c' has one value in all 120 rows" in said


def test_an_interrupt_shows_the_runs_that_are_done(table: Path, monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    whole = Plan.run

    def run(self: Plan, cell: Cell) -> Row:
        done.append(cell.name)
        if len(done) == 2:
            raise KeyboardInterrupt
        return whole(self, cell)

    monkeypatch.setattr(Plan, "run", run)
    args = ("--label", "side", "--ignore", "who", "--devices", "8", "--protocols", "gram,sgd", "--epsilon", "8")
    answer = crowdml("compare", "--data", "own.csv", *args, "--seed", "1")
    assert answer.code == 130
    assert "gram" in answer.out
    assert "interrupted: 2 of 3 runs are missing above." in answer.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--label", "colour"), "colour"),
        (("--label", "side"), "who"),
        (("--label", "side", "--ignore", "who", "--devices", "1000"), "devices = 1,000"),
        (("--label", "side", "--device", "who", "--devices", "8"), "who holds each row is known"),
        (("--label", "side", "--ignore", "who", "--bounds", "4,-4"), "the lower bound 4 is above the upper bound -4"),
        (("--label", "side", "--ignore", "who", "--protocols", "gram", "--alone"), "needs masks"),
    ],
)
def test_a_wrong_command_is_refused_in_a_sentence(table: Path, args, said):
    assert said in refused("compare", "--data", "own.csv", *args, "--seed", "1")
