"""A ledger that is behind `given.log` takes no second draw in a round: it would wear the masks of the first."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from crowdml.device.marks import Mark, Marks, read_marks
from crowdml.device.rounds import Rounds, kept
from crowdml.device.runner import Clock, Commits
from crowdml.secagg.device import advertise
from crowdml.secagg.terms import Field, Terms
from crowdml.storage import Ledger, Round
from crowdml.wire.keys import Key
from crowdml.wire.rounds import RoundView

TERMS = Terms(b"t" * 32, (Field("sum", 4, 32, 10, 100),), 5, 5, 5, 0)


def open_marks(path: Path) -> Marks:
    return Marks(path, path.write_bytes)


async def nothing(*_: Any) -> Any:
    raise AssertionError("nobody is asked")


def rounds(ledger: Ledger, key: Key, marks: Marks, tell: Any = lambda _: None) -> Rounds:
    return Rounds(
        key,
        ledger,
        TERMS,
        "/v1/tasks/x",
        ask=nothing,
        statement=lambda: None,  # pyright: ignore[reportArgumentType]  not asked for
        commit=Commits(ledger, 0.0, marks),
        gate=asyncio.Semaphore(1),
        clock=Clock(),
        ready=nothing,
        chance=lambda: 0.5,
        tell=tell,
    )


@pytest.mark.parametrize(("marked", "goes_on"), [(0, True), (6, True), (7, False), (9, False)])
def test_a_round_in_which_given_log_knows_of_a_draw_is_over(tmp_path: Path, marked: int, goes_on: bool) -> None:
    key, path = Key.generate(), tmp_path / "given.log"
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        state = advertise(TERMS, 7, key, after=0)
        ledger.keep_round(TERMS.task, kept(state, b""))
        marks = open_marks(path)
        if marked:
            marks.add(ledger.device, Mark(3, 20, "ab" * 32, marked))
            marks.flush()
        found = rounds(ledger, key, marks)
        standing = ledger.round(TERMS.task)
        assert standing is not None
        assert standing.number == 7
        assert (standing.body is not None) == goes_on
        assert (found._phase == "advertised") == goes_on
        marks.close()


def test_a_round_that_another_release_wrote_down_is_over(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.keep_round(TERMS.task, Round(7, b"what nobody reads any more"))
        found = rounds(ledger, Key.generate(), open_marks(tmp_path / "given.log"))
        assert found._phase is None
        assert ledger.round(TERMS.task) == Round(7, None)


def test_a_mark_tells_the_round_and_older_lines_have_none(tmp_path: Path) -> None:
    path = tmp_path / "given.log"
    marks = open_marks(path)
    marks.add(0, Mark(1, 5, "aa" * 32))
    marks.add(1, Mark(2, 9, "bb" * 32, 12))
    marks.flush()
    marks.close()
    found = read_marks(path)
    assert {device: each.last for device, each in found.items()} == {
        0: Mark(1, 5, "aa" * 32),
        1: Mark(2, 9, "bb" * 32, 12),
    }
    assert (found[0].round(""), found[1].round("")) == (0, 12)


def test_a_lower_round_is_waited_out_and_no_key_is_made_for_it(tmp_path: Path) -> None:
    key, said = Key.generate(), list[str]()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.keep_round(TERMS.task, Round(7, None))
        marks = open_marks(tmp_path / "given.log")
        found = rounds(ledger, key, marks, said.append)
        view = RoundView(round=3, phase="advertise", closes=1000, wait=100, kind="", body=b"", publication=None, why="")
        assert asyncio.run(found._begin(view)) is None
        assert ledger.round(TERMS.task) == Round(7, None)
        assert said == ["round 7: the server is at round 3 again; this device waits for one after its last"]
        marks.close()
