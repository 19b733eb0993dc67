"""A ledger that is behind `given.log` takes no second draw in a round: it would wear the masks of the first.

Nor does it agree or reveal a second time: together the two might open what another device sent.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crowdml.device.commits import Commits
from crowdml.device.joining import _begin_from
from crowdml.device.marks import Mark, Marked, Marks, read_marks
from crowdml.device.member import Clock
from crowdml.device.rounds import KINDS, OwnRounds, kept
from crowdml.device.statements import is_known
from crowdml.messages import SERVER, Envelope
from crowdml.secagg.device import advertise
from crowdml.secagg.terms import RingField, Terms
from crowdml.storage import Ledger, Round
from crowdml.wire.envelopes import Signed, open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.rounds import RoundView
from crowdml.wire.statements import Statement

TERMS = Terms(b"t" * 32, (RingField("sum", 4, 32, 10, 100),), 5, 5, 5, 0)


def open_marks(path: Path) -> Marks:
    return Marks(path, path.write_bytes)


async def nothing(*_: Any) -> Any:
    raise AssertionError("nobody is asked")


def rounds(ledger: Ledger, key: Key, marks: Marks, tell: Any = lambda _: None) -> OwnRounds:
    return OwnRounds(
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


# --- after the draw ---

GIVEN = Statement(("zcdp 1/10",), 5, ("zcdp 1/10",))
NOTHING = Statement((), 0, ())


def said_in(round_: int, phase: str, key: Key, statement: Statement = GIVEN, task: bytes = TERMS.task) -> Signed:
    """What a device says in this phase of a round; after its draw, where the phase says nothing in it."""
    kind = KINDS.get(phase, "secagg/masked/1")
    return open_signed(sign(Envelope(task, key.id, frozenset((SERVER,)), round_, kind, b"said"), statement, key))


def stand(ledger: Ledger, key: Key, phase: str, round_: int = 7) -> bytes:
    """Put the ledger into this phase of a round; what the device said last."""
    said = said_in(round_, phase, key).data if phase in KINDS else b""
    ledger.keep_round(TERMS.task, kept(replace(advertise(TERMS, round_, key, after=0), phase=phase), said))
    return said


def mark_of(said: bytes, *, is_check_in: bool) -> Mark:
    return Mark(7, 5, hashlib.sha256(said).hexdigest(), 7, TERMS.task.hex(), is_check_in=is_check_in)


@pytest.mark.parametrize(
    ("phase", "marked", "goes_on"),
    [
        ("masked", "check-in", True),
        ("masked", "agreed", False),
        ("agreed", "check-in", True),  # a crash came before the mark
        ("agreed", "agreed", True),
        ("agreed", "revealed", False),
        ("revealed", "agreed", True),  # a crash came before the mark
        ("revealed", "revealed", True),
    ],
)
def test_a_ledger_that_was_put_back_between_its_check_in_and_its_reveal_leaves_the_round(
    tmp_path: Path, phase: str, marked: str, goes_on: bool
) -> None:
    """Review 3, privacy finding 8: only check-ins were looked for in `given.log`."""
    key = Key.generate()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        said = stand(ledger, key, phase)
        marks = open_marks(tmp_path / "given.log")
        known = said if marked == phase else marked.encode()
        marks.add(0, mark_of(known, is_check_in=marked == "check-in"))
        marks.flush()
        assert rounds(ledger, key, marks).drawn == goes_on
        standing = ledger.round(TERMS.task)
        assert standing is not None
        assert (standing.number, standing.body is not None) == (7, goes_on)
        marks.close()


def test_what_a_crash_left_unmarked_in_a_round_is_marked_before_it_is_said(tmp_path: Path) -> None:
    """A lost ledger is recovered from the last mark alone: the server would show the agreement, and nobody knew it."""
    key = Key.generate()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        said = stand(ledger, key, "agreed")
        marks = open_marks(tmp_path / "given.log")
        marks.add(0, mark_of(b"the check-in", is_check_in=True))
        marks.flush()
        with pytest.raises(AssertionError, match="nobody is asked"):
            asyncio.run(rounds(ledger, key, marks).finish())
        marks.close()
    assert read_marks(tmp_path / "given.log")[0].last == mark_of(said, is_check_in=False)


def test_a_message_of_another_task_that_was_marked_later_stays_the_last(tmp_path: Path) -> None:
    """Marked again, an older statement would be believed after a lost ledger, which counts less than was given."""
    key, later = Key.generate(), Mark(9, 40, "cc" * 32, 0, "dd" * 32)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        stand(ledger, key, "agreed")
        marks = open_marks(tmp_path / "given.log")
        for mark in (mark_of(b"the check-in", is_check_in=True), later):
            marks.add(0, mark)
        marks.flush()
        with pytest.raises(AssertionError, match="nobody is asked"):
            asyncio.run(rounds(ledger, key, marks).finish())
        marks.close()
    assert read_marks(tmp_path / "given.log")[0].last == later


def test_a_round_goes_on_where_no_marks_are_kept_or_none_of_its_task(tmp_path: Path) -> None:
    key = Key.generate()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        stand(ledger, key, "agreed")
        marks = open_marks(tmp_path / "given.log")
        marks.add(0, Mark(9, 40, "cc" * 32, 3, "dd" * 32))
        for kept in (marks, None):
            going = rounds(ledger, key, kept)
            assert going.drawn
            with pytest.raises(AssertionError, match="nobody is asked"):
                asyncio.run(going.finish())
        marks.close()


def test_a_recovered_ledger_goes_into_no_round_up_to_the_highest_that_was_marked(tmp_path: Path) -> None:
    key, other = Key.generate(), b"o" * 32
    signed = said_in(3, "agreed", key, task=other)
    marked = Marked(Mark(7, 5, "aa" * 32, 7, TERMS.task.hex()))
    for mark in (marked.last, Mark(2, 9, signed.hash.hex(), 3, other.hex(), is_check_in=False)):
        marked.add(mark)
    marked.add(Mark(2, 9, "bb" * 32, 4, other.hex()))
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        _begin_from(ledger, signed, marked, "2025-01-31T12:00:00+00:00", masked=True)
        assert ledger.round(TERMS.task) == Round(7, None)
        assert ledger.round(other) == Round(4, None), "the statement is of an earlier one"


# --- what the server shows of a round ---


@pytest.mark.parametrize(
    ("stands", "shown", "known"),
    [
        ("masked", "agreed", False),
        ("agreed", "agreed", True),
        ("agreed", "revealed", False),
        ("revealed", "agreed", True),
        ("advertised", "advertised", True),
        ("advertised", "shared", False),
    ],
)
def test_a_ledger_knows_what_was_said_in_a_round_by_where_it_stands(
    tmp_path: Path, stands: str, shown: str, known: bool
) -> None:
    key = Key.generate()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        stand(ledger, key, stands)
        assert is_known(ledger, said_in(7, shown, key, NOTHING), recovered=False) == known
        assert is_known(ledger, said_in(6, "revealed", key, NOTHING), recovered=False)
        assert not is_known(ledger, said_in(8, "advertised", key, NOTHING), recovered=False)
        assert not is_known(ledger, said_in(6, "revealed", key, GIVEN), recovered=False), "it counts less than it gave"
        assert not is_known(ledger, said_in(1, "masked", key, NOTHING), recovered=False), "a check-in it never sealed"


def test_a_ledger_that_version_0_1_recovered_knows_by_its_totals_what_it_began_from(tmp_path: Path) -> None:
    key = Key.generate()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert is_known(ledger, said_in(3, "masked", key, NOTHING), recovered=True)
        assert not is_known(ledger, said_in(3, "masked", key, GIVEN), recovered=True)
