"""Tables at the 80 columns of a terminal or a pipe: no word and no number is broken or left out."""

from __future__ import annotations

import io
from fractions import Fraction
from pathlib import Path

import pytest
from cli_runner import crowdml
from rich.console import Console

from crowdml.cli.output import make_table
from crowdml.cli.plain import PlainTable
from crowdml.privacy.losses import Renyi
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.storage import Budget, Charge, Ledger

TASK, AT = b"t" * 32, "2026-01-31T12:00:00+00:00"
RATIO = "fleet of 1,000 with durable ledgers: at least 500 a second, p99 under 2 s, no error"


def renyi(times: int) -> Renyi:
    orders = (2, 4, 8, 16, 32)
    return Renyi(orders, tuple(Fraction(order * times, 1000) for order in orders))


def test_long_names_of_a_benchmark_leave_its_numbers_their_place():
    table = make_table("ratio", "value", "goal", "holds", wrap=True)
    table.add_row(RATIO, "526.4", "500", "yes")
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[-3:] == ["526.4", "500", "yes"] for line in lines)
    assert set(RATIO.split()) <= set(out.getvalue().split())


@pytest.mark.parametrize("row", ["gradient", "labels"])
def test_the_ledger_of_a_masked_study_fits_into_80_columns(tmp_path: Path, row: str):
    with Ledger(tmp_path / "ledger.sqlite") as book:
        book.take_serials(20_000)
        charge = Charge(
            TASK, row, renyi(1), renyi(400), Observer.AGGREGATE, Adjacency.REPLACE_SAMPLE, 10_000, 10_059, AT,
            renyi(50), renyi(20_000),
        )  # fmt: skip
        book.charge(TASK, [charge], [Budget(Fraction(10**6), 1e-6, 10**9)])
    shown = crowdml("ledger", "--folder", str(tmp_path))
    assert shown.code == 0
    assert max(map(len, shown.out.splitlines())) <= 80
    words = shown.out.split()
    for word in ("2026-01-31", TASK.hex()[:12], row, "10000-10059", "aggregate", "collude"):
        assert word in words, shown.out
    assert "renyi" not in words


def test_a_cell_of_two_lines_keeps_its_column_where_rich_is_not_installed():
    table = PlainTable(("what", "sample pays\nif all collude", "seen by"), None, numbers=False)
    table.add_row("gradient", "0.1\n12", "aggregate")
    assert str(table).splitlines() == [
        "what      sample pays     seen by",
        "          if all collude",
        "-----------------------------------",
        "gradient  0.1             aggregate",
        "          12",
    ]


def test_the_tasks_and_invitations_of_a_server_fit_into_80_columns_with_every_word_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Review 2, users: long lines broke within words at 80 columns."""
    from crowdml.protocols import settled
    from crowdml.server.serve import DATABASE
    from crowdml.storage.server import Store
    from crowdml.task import find_task

    found = settled(find_task("digits012").with_(name="how-hamburg-moves"))
    with Store(tmp_path / DATABASE) as store:
        store.add_task(found.canonical, found.name, AT, "running")
    monkeypatch.chdir(tmp_path)
    where = ("--folder", ".")
    label = "The third class of the school in the old town of Hamburg"
    options = ("--address", "https://study.example", "--label", label, "--csv", "codes.csv")
    for command, words in (
        (("task", "list"), (found.name, found.hash.hex()[:8], "running", "anyone", "check-ins", "devices")),
        (("invite", *options), ("label,", "code,", "CODE:")),
        (("invitation", "list"), ("0", "of", "1", "Hamburg", "all", "ends")),
    ):
        shown = crowdml(*command, *where)
        assert shown.code == 0, shown.err
        assert max(len(line) for line in shown.out.splitlines() if "crowdml join" not in line) <= 80
        assert set(words) <= set(shown.out.split()), shown.out
