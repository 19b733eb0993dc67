"""What a device has charged is sent as the same bytes until it is acknowledged, and what a refusal asks for; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from crowdml.device.asking import Compare, Request
from crowdml.device.machine import (
    Acknowledge,
    Answered,
    Ask,
    Begun,
    Done,
    Event,
    Life,
    Machine,
    Moment,
    Move,
    Sealed,
    Tell,
    TurnedDown,
    Write,
    Written,
    end,
    end_at,
    newly_sealed,
    pop,
    push,
    sha256,
    stay,
    windowed,
)
from crowdml.device.statements import ROUND_KINDS
from crowdml.records import record
from crowdml.storage import Ledger, Outgoing
from crowdml.wire.envelopes import Signed, open_signed, sign
from crowdml.wire.packing import LARGEST_INTEGER
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import open_receipt

__all__ = ["Fall", "Outbox", "Send"]

MOST_REFUSALS = 3
"""Messages in a row that a server may refuse before a device stops: something is wrong with one of the two."""
MSGPACK: Mapping[str, str] = {"Content-Type": "application/msgpack"}


@record
class Outbox:
    """Send what was charged and not acknowledged, oldest first. What comes of it: whether the last was taken."""

    taken: bool = False

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        taken = self.taken if isinstance(event, Begun) else bool(getattr(event, "value", False))
        waiting = at.books.resend(machine.task.hash)
        return push(life, Outbox(taken), Send(found(waiting[0]))) if waiting else pop(life, taken)


@record
class Send:
    """Check in. What comes of it: whether the server took it. Where it refused, the outbox is as the refusal asks."""

    message: Sealed
    doing: Literal["sending", "acknowledging", "comparing", "replacing"] = "sending"
    status: int = 0
    seq: int = 0
    """The number that the server expects; after the outbox was changed, that of the last message."""

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        match event:
            case Begun():
                body = self.message.waiting.body
                return push(life, self, Request(Ask("POST", f"{machine.path}/check-in", body, MSGPACK)))
            case Done(value=Answered() as answered):
                return self._answered(machine, life, answered, at)
            case Done(value=TurnedDown() as refusal) if self.doing == "sending":
                return self._refused(machine, life, refusal.problem, at)
            case Done(value=shown):
                return self._compared(machine, life, shown, at)
            case Written() if self.doing == "acknowledging":
                life = life.counted(check_ins=1, repeated=int(self.status == 200))
                return pop(replace(life, refused_in_a_row=0), True, Tell("acknowledged"))
            case _:
                return pop(replace(life, seq=self.seq), False)

    def _answered(self, machine: Machine, life: Life, answered: Answered, at: Moment) -> Move:
        flaw = _flaw(machine, self.message, answered.answer.body)
        if flaw:
            return end(life, "refused", flaw, Tell("sent"))
        phase = replace(self, doing="acknowledging", status=answered.answer.status)
        write = Acknowledge(self.message, answered.answer.body)
        return stay(windowed(life, answered.answer, at), phase, Tell("sent"), write)

    def _refused(self, machine: Machine, life: Life, problem: Problem, at: Moment) -> Move:
        expected = problem.extra.get("expected")
        if problem.status == 409 and type(expected) is int and 1 <= expected <= LARGEST_INTEGER:
            life = _counted(life, problem)
            return push(life, replace(self, doing="comparing", seq=expected), Compare()) if life.doing else Move(life)
        if problem.slug == "totals-fell":
            return push(life, self, Fall(problem))
        if problem.status in (413, 422) and problem.slug != "stale":  # that one is of a server that was put back
            return end(
                life.counted(refused=1),
                "refused",
                f"The server does not take what this device says: {problem} It would not take the next message "
                "either, so nothing more is charged. This one is paid for: it waits in the outbox, and is sent first "
                "when the device is started again. Ask whoever runs the study.",
            )
        if problem.status in (400, 422) or problem.slug in ("round-over", "round-refused"):
            life = life.counted(refused=1)
            if problem.slug != "round-over":  # late: that is nobody's fault
                life = _counted(life, problem)
            if not life.doing:
                return Move(life)
            if machine.is_masked or problem.slug != "round-over":
                life = replace(life, gave=None)  # it is in no round: its cohort, if it was in one, does without it
            return self._replace(machine, life, (), open_signed(self.message.waiting.body).envelope.seq - 1)
        return end_at(life, problem)

    def _compared(self, machine: Machine, life: Life, shown: Signed | None, at: Moment) -> Move:
        """Stop where the server says that it has messages which this ledger does not know: a copy may have given them.

        For good if it can show one that this device signed. Its number alone proves nothing: anyone on the way may have
        written it. A server that was restored has fewer messages than the ledger knows, and the device goes on from
        there.
        """
        known, has = highest_taken(machine, life, at.books), self.seq - 1
        if known is None or has <= known or _is_number(machine, shown, has):
            return self._renumber(machine, life, at)
        return end(
            life,
            "refused",
            f"The server says that it has {has} messages of this device for this task, and its ledger knows of "
            f"{known}; it shows none that the ledger lacks. {UNPROVEN}",
        )

    def _renumber(self, machine: Machine, life: Life, at: Moment) -> Move:
        """The server never took these bytes under their number: the same release, under the number it expects.

        No noise is drawn and nothing is charged again. The old bytes go in the transaction that writes the new ones,
        so that the release can be counted once at most.
        """
        task, books = machine.task.hash, at.books
        signed = open_signed(self.message.waiting.body)
        data = sign(replace(signed.envelope, seq=self.seq), signed.statement, machine.member.key)
        round_ = books.round(task) if machine.is_masked else None
        place = Outgoing(task, books.next_seq(task), data)
        new = newly_sealed(place, self.seq, signed.envelope.body, signed.statement.samples, round_)
        return self._replace(machine, life, (new,), self.seq)

    def _replace(self, machine: Machine, life: Life, sealed: tuple[Sealed, ...], seq: int) -> Move:
        standing = machine.standing(replace(life, seq=seq))
        write = Write(standing, sealed=sealed, done=(self.message.waiting.seq,))
        return stay(life, replace(self, doing="replacing", seq=seq), write)


@record
class Fall:
    """The server says that this device's totals fell: for good if it can show the message with the larger ones."""

    problem: Problem

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        if isinstance(event, Begun):
            return push(life, self, Compare())
        sentence = f"{self.problem.detail} The server shows no message that the ledger lacks. {UNPROVEN}"
        return end(life, "refused", sentence)


def found(waiting: Outgoing) -> Sealed:
    """A sealed message that was found on disk."""
    return Sealed(waiting, open_signed(waiting.body).envelope.seq, sha256(waiting.body))


def _flaw(machine: Machine, message: Sealed, data: bytes) -> str | None:
    """Why this is no receipt for these bytes that the server which this device knows has signed; None: it is."""
    try:
        receipt = open_receipt(data)
    except Problem as problem:
        return f"The server's receipt cannot be read: {problem}"
    if not receipt.answers(machine.task.hash, machine.member.key.id, message.seq, message.digest):
        return f"The receipt for check-in {message.seq} is for another one. It stays in the outbox."
    if not receipt.verify(machine.member.server_key):
        return (
            f"The receipt for check-in {message.seq} is not signed by the server that this device joined. It stays in "
            "the outbox. Ask whoever runs the study."
        )
    return None


def _counted(life: Life, problem: Problem) -> Life:
    """One refusal more in a row; after too many the life is over."""
    life = replace(life, refused_in_a_row=life.refused_in_a_row + 1)
    if life.refused_in_a_row <= MOST_REFUSALS:
        return life
    return end(life, "refused", f"The server refused {MOST_REFUSALS + 1} messages in a row: {problem}").life


def highest_taken(machine: Machine, life: Life, books: Ledger) -> int | None:
    """The highest number of a message that the server ever took, as far as the ledger knows; None: it began from a
    statement, which does not tell it of every task."""
    task = machine.task.hash
    if numbers := [open_receipt(each).seq for each in books.receipts(task)]:
        return max(numbers)
    if machine.member.recovered:
        return None
    waiting = books.resend(task)
    return found(waiting[0]).seq - 1 if waiting else life.seq


def _is_number(machine: Machine, shown: Signed | None, seq: int) -> bool:
    """Whether this is the check-in of this task with that number."""
    if shown is None or shown.envelope.kind in ROUND_KINDS:
        return False
    return (shown.envelope.task, shown.envelope.seq) == (machine.task.hash, seq)


UNPROVEN = (
    "So nothing is proven, and this run ends here: what was charged waits as it is, and is sent first when the device "
    "is started again. If it hears the same then, ask whoever runs the study."
)
