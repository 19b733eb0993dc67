"""One check-in of a device without I/O: may it, which round, compute, charge, send."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from crowdml.device.asking import CheckOut, Compare, Request
from crowdml.device.machine import (
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
    Serving,
    Tell,
    Wait,
    Write,
    Written,
    end,
    pop,
    push,
    stay,
)
from crowdml.device.sending import Outbox, Send
from crowdml.errors import BudgetExhausted
from crowdml.messages import Envelope
from crowdml.protocol import Sensed, Woken
from crowdml.records import record
from crowdml.storage import Round
from crowdml.turn import Outcome
from crowdml.wire.envelopes import Signed
from crowdml.wire.problems import Problem
from crowdml.wire.rounds import open_view

__all__ = ["Afford", "Contribute", "Give", "KeepStanding", "NextRound", "sentence"]


@record
class Afford:
    """Ask the budgets, before any noise is drawn, for the dearest form of a step: the whole table.

    What comes of it is the batch with its serials; None where it served as often as its own budget allows, so that a
    fresh one takes its place. `at_source`: the batch waits there, and would get the next serials.
    """

    now: Serving
    at_source: bool = False

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        if isinstance(event, Written):
            return pop(life)
        now, books = self.now, at.books
        take = len(now.serials) if self.at_source and not now.served else 0
        try:
            with books.reading():
                if take:
                    first = books.next_serial()
                    now = replace(now, serials=tuple(range(first, first + take)))
                dearest = machine.dearest(life.trips, at.utc)
                start = now.serials[0] + machine.dearest_at
                books.check(machine.task.hash, dearest, machine.member.budgets, at=start, take=take)
        except BudgetExhausted as error:
            if not now.served:
                return end(life, "budget", str(error))
            life = replace(life, serving=None)  # it has given what it may; a fresh one has all of its budget
            return stay(life, self, Write(machine.standing(life), dropped=now.serials))
        return pop(replace(life, serving=now), now)


@record
class KeepStanding:
    """Write where this device stands."""

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        return stay(life, self, Write(machine.standing(life))) if isinstance(event, Begun) else pop(life)


@record
class NextRound:
    """Where uploads are gathered: wait until a round is open that this device did not give to and is drawn for.

    Nothing is charged meanwhile.
    """

    gave: int | None = None
    looks: int = 0
    seen: int = 0
    found: int = -1
    doing: Literal["looking", "asking", "keeping"] = "looking"
    """It reads which round is open, asks whether what it gave is lost, or writes that it is."""

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        match event:
            case Begun() if not machine.gathers or (life.gave is None and not machine.is_drawn):
                return pop(life)
            case Begun():
                return push(life, replace(self, gave=life.gave), CheckOut())
            case Done(value=publication) if self.doing == "looking":
                version = int(publication.version)
                return (
                    push(life, replace(self, doing="asking"), Lost())
                    if version == self.gave
                    else self._opened(machine, life, version, at)
                )
            case Done(value=True) if self.doing == "asking":
                given = f"what this device gave to round {self.gave} is in no sum of it"
                told = Tell(f"{given}: it gives again, and pays again")
                return push(replace(life, gave=None), replace(self, doing="keeping"), KeepStanding(), told)
            case Done() if self.doing == "asking":
                return self._opened(machine, life, self.gave, at)
            case Done():
                return pop(life)
            case _:
                return push(life, replace(self, doing="looking"), CheckOut())

    def _opened(self, machine: Machine, life: Life, found: int | None, at: Moment) -> Move:
        """This round is open."""
        assert found is not None
        seen = self.seen + 1 if found == self.found else 0
        if found != self.gave and machine.draws(found, seen):
            return pop(replace(life, drawn_for=found))
        phase = replace(self, looks=self.looks + 1, seen=seen, found=found)
        wait = Wait(machine.patience.pause(self.looks, chance=at.chance), "round")
        if self.looks:
            return stay(life, phase, wait)
        why = f"gave to round {found}" if found == self.gave else f"is not drawn for round {found}"
        told = f"waiting, uncharged: this device {why}, which is open until enough others gave"
        return stay(life, phase, Tell(told), wait)


@record
class Lost:
    """Ask whether the server lacks what this device gave last: its cohort came to nothing, or the server was put back.

    Under masks the round says so: it ended without a total, or the server has forgotten it.
    """

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        if isinstance(event, Done):
            if machine.is_masked:
                return pop(life, _came_to_nothing(event.value))
            shown: Signed | None = event.value
            is_ours = shown is not None and shown.envelope.task == machine.task.hash
            return pop(life, shown is None or (is_ours and shown.envelope.seq < life.seq))
        if not machine.is_masked:
            return push(life, self, Compare())
        last = at.books.round(machine.task.hash)
        path = f"{machine.path}/round?round={0 if last is None else last.number}"
        return push(life, self, Request(Ask("GET", path, signed=True)))


def _came_to_nothing(said: Any) -> bool:
    if not isinstance(said, Answered):
        return said.problem.slug == "round-over"
    try:
        return open_view(said.answer.body).phase == "abandoned"
    except Problem:
        return False


@record
class Contribute:
    """Compute on what the server offers, draw, charge, send. What comes of it: why the protocol stops, or None."""

    now: Serving
    tags: tuple[str, ...] = ()
    turn: Outcome | None = None
    is_given: bool = False

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        turn = self.turn
        match event:
            case Begun():
                life = replace(life, serving=None)
                turn = machine.hear(life, Sensed(self.now.batch), None, at.now)
                timers, tags = life.timers.set(turn.wakes, at.now)
                return self._go_on(replace(life, state=turn.state, timers=timers), turn, tags, at, Tell("sensed"))
            case Done() if self.is_given:
                return pop(life, None if turn is None else sentence(turn))
            case Done(value=None):  # a round is open for which this device is drawn
                return push(life, self, CheckOut())
            case Done(value=publication) if machine.is_drawn and int(publication.version) != life.drawn_for:
                return push(life, self, NextRound())  # the server would refuse what this device paid for
            case Done(value=publication):
                return self._hear(machine, life, publication, at, Tell("checked out"))
            case _:
                assert turn is not None
                timers, tag = life.timers.take(at.now)
                life = replace(life, timers=timers)
                return (
                    self._go_on(life, turn, self.tags, at) if tag is None else self._hear(machine, life, Woken(tag), at)
                )

    def _go_on(self, life: Life, turn: Outcome, tags: tuple[str, ...], at: Moment, *told: Tell) -> Move:
        """Hear the publication, if the batch asks for it, or the timer that runs out next."""
        phase = replace(self, tags=tags, turn=turn)
        if turn.stopped is None and turn.asks:
            return push(life, phase, CheckOut(), *told)
        if turn.stopped is not None or life.timers.left(0.0, tags) is None:
            return pop(life, sentence(turn), *told)
        return stay(life, phase, *told, Wait(life.timers.left(at.now) or 0.0, "timer"))

    def _hear(self, machine: Machine, life: Life, event: Any, at: Moment, *told: Tell) -> Move:
        turn = machine.hear(life, event, machine.noise, at.now)
        timers, new = life.timers.set(turn.wakes, at.now)
        life, tags = replace(life, timers=timers), (*self.tags, *new)
        says_nothing = not turn.said and not turn.passages
        if says_nothing and (turn.asks or timers.left(0.0, tags) is not None):  # the batch is still under way
            return self._go_on(replace(life, state=turn.state), turn, tags, at, *told)
        life = replace(life, gave=machine.round_of(life, [message for _, message in turn.said]))
        give = Give(self.now, turn, machine.sealed_messages(turn))
        return push(life, replace(self, turn=turn, is_given=True), give, *told)


@record
class Give:
    """Charge, write, send. What comes of it: whether the server took the last of these messages."""

    now: Serving
    turn: Outcome
    envelopes: Sequence[Envelope]
    round_: Round | None = None
    after: Life | None = None
    waiting: tuple[Sealed, ...] = ()
    is_refused: bool = False

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        match event:
            case Begun():
                after, write = machine.charged(life, self.turn, self.now, self.envelopes, self.round_, at)
                return stay(life, replace(self, after=after, waiting=tuple(write.sealed)), write)
            case Done(value=taken) if self.is_refused or (taken and not self.waiting):
                return pop(life, taken)
            case Done(value=False):
                return push(life, replace(self, is_refused=True), Outbox())
            case _ if self.waiting:
                life, told = (life, ()) if self.after is None else (replace(self.after, doing=life.doing), _CHARGED)
                return push(life, replace(self, after=None, waiting=self.waiting[1:]), Send(self.waiting[0]), *told)
            case _:
                assert self.after is not None
                return pop(replace(self.after, doing=life.doing), True, *_CHARGED)


_CHARGED = (Tell("charged"),)


def sentence(turn: Outcome) -> str | None:
    return None if turn.stopped is None else turn.stopped.sentence
