"""Writes to a ledger and the marks beside it, one by one or in groups; and whether the ledger is behind its marks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from crowdml.device.marks import Mark, Marked, Marks
from crowdml.device.member import Member
from crowdml.errors import ASK_FOR_STATEMENT, LOST_MARKS, BudgetExhausted, CrowdmlError, LedgerError
from crowdml.storage import Ledger

T = TypeVar("T")

DeviceMarks = Sequence[tuple[int, Mark]]
"""Marks of messages, each with the number of its device."""


class Commits:
    """Writes to a ledger; with a `window`, those that come within so many seconds of each other in one transaction.

    What returns has been committed. One that is refused does not touch the others. The marks of what was written are on
    disk when it returns, and not before it: a mark that the ledger does not know tells of an older copy.
    """

    def __init__(self, ledger: Ledger, window: float = 0.0, marks: Marks | None = None) -> None:
        self._ledger, self._window, self._marks = ledger, window, marks
        self._waiting: list[tuple[Callable[[], Any], DeviceMarks, asyncio.Future[Any]]] = []

    def marked(self, device: int) -> Marked | None:
        """What is marked of a device; None: nothing, or nobody keeps marks here."""
        return None if self._marks is None else self._marks.of(device)

    @property
    def keeps_marks(self) -> bool:
        return self._marks is not None

    def _mark(self, marks: DeviceMarks) -> None:
        if self._marks is not None:
            for device, mark in marks:
                self._marks.add(device, mark)

    def _keep_marks(self) -> None:
        if self._marks is not None:
            self._marks.flush()

    async def __call__(self, work: Callable[[], T], marks: DeviceMarks = ()) -> T:
        """Do the work and commit it; then its marks are written, which name the device and the message."""
        if not self._window:
            done = work()
            self._mark(marks)
            self._keep_marks()
            return done
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._waiting:
            loop.call_later(self._window, self._flush)
        self._waiting.append((work, marks, future))
        return await future

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        outcomes: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        written: list[DeviceMarks] = []
        failure: BaseException | None = None
        try:
            with self._ledger.together():
                for work, marks, future in waiting:
                    try:
                        outcomes.append((future, work(), None))
                        written.append(marks)
                    except CrowdmlError as error:
                        outcomes.append((future, None, error))
            for marks in written:
                self._mark(marks)
            self._keep_marks()
        except CrowdmlError as error:  # nothing of it was written, or nothing of it may be sent yet
            failure = error
        for future, value, error in outcomes:
            if future.cancelled():
                continue
            if failure or error:
                future.set_exception(failure or error or RuntimeError())
            else:
                future.set_result(value)
        for _, _, future in waiting[len(outcomes) :]:
            if not future.cancelled():
                future.set_exception(failure or RuntimeError("a write was lost"))


async def trust_ledger(member: Member, commit: Commits) -> None:
    """Refuse a ledger that is behind `given.log`, and mark its last message where a crash came before the mark."""
    ledger = member.ledger
    if member.exhausted:
        raise BudgetExhausted(_EXHAUSTED)
    marked, sent = commit.marked(ledger.device), ledger.last_sent()
    check_in = None if marked is None else marked.check_in
    if check_in is not None and _is_behind(ledger, check_in):
        raise LedgerError(
            f"the ledger {ledger.path} is older than `given.log` beside it: it does not know check-in "
            f"{check_in.seq}, with which this device had given {check_in.samples} samples, and it knows of "
            f"{ledger.samples_given()}. Nothing was sent. {ASK_FOR_STATEMENT}"
        )
    if commit.keeps_marks and marked is None and ledger.any_taken():
        raise LedgerError(
            f"`given.log` beside the ledger {ledger.path} names no message of this device, and the server has "
            f"taken messages from it: whether this ledger is the newest is not known. {LOST_MARKS}"
        )
    if not commit.keeps_marks or sent is None or sent.hash is None:
        return
    if check_in is None or (check_in.hash != sent.hash.hex() and ledger.knows(bytes.fromhex(check_in.hash))):
        found = ledger.round(sent.task)
        mark = Mark(sent.seq + 1, ledger.samples_given(), sent.hash.hex(), 0 if found is None else found.number)
        await commit(lambda: None, [(ledger.device, replace(mark, task=sent.task.hex()))])


_EXHAUSTED = (
    "What this device has given is not known: its ledger was lost without a signed statement, or the server has "
    "messages that the ledger does not know. Nothing was sent. Go on in the folder that has the newer ledger; if there "
    "is none, join with another --folder, and with samples that were never given."
)


def _is_behind(ledger: Ledger, check_in: Mark) -> bool:
    """Whether the ledger lacks the last check-in that was marked: it is an older copy.

    Marks of version 0.1 do not tell a check-in from a later message of its round, which no ledger keeps, and a ledger
    that was recovered then knows no message: of those the samples tell.
    """
    if ledger.knows(bytes.fromhex(check_in.hash)):
        return False
    return bool(check_in.task) or ledger.samples_given() < check_in.samples
