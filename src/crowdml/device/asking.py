"""What a device asks its server, without I/O: any request, the publication, and the last message that it signed."""

from __future__ import annotations

from dataclasses import replace

from crowdml.device.machine import (
    Answered,
    Ask,
    Begun,
    Done,
    Event,
    Exhaust,
    Life,
    Machine,
    Moment,
    Move,
    Silent,
    Tell,
    TurnedDown,
    Wait,
    Waited,
    end,
    end_at,
    pop,
    push,
    stay,
    windowed,
)
from crowdml.device.statements import is_known, open_own, statement_path
from crowdml.records import record
from crowdml.wire.problems import Problem

__all__ = ["COPIED", "CheckOut", "Compare", "CompareOnce", "Request"]


@record
class Request:
    """Ask until there is an answer: a server that is away, busy or full is asked again, later and later.

    What comes of it is `Answered`, or `TurnedDown` by a refusal that waiting does not change.
    """

    ask: Ask
    failures: int = 0

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        match event:
            case Answered() as answered:
                return pop(life, answered)
            case Silent() as silent:
                return self._later(life, machine.patience.pause(self.failures, chance=at.chance), silent.why)
            case TurnedDown() as refusal:
                return self._turned_down(machine, life, refusal.problem, at)
            case _:
                signed = self._is_signed(life) and self.ask.method == "GET"
                return stay(life, self, replace(self.ask, signed=signed))

    def _is_signed(self, life: Life) -> bool:
        return self.ask.signed or life.signs_reads

    def _turned_down(self, machine: Machine, life: Life, problem: Problem, at: Moment) -> Move:
        if problem.slug in ("closed", "authorization") and not self._is_signed(life):
            return Move(replace(life, signs_reads=True), event=Waited())
        if problem.status not in (408, 429) and problem.status < 500:
            if self.ask.method == "GET" and not self.ask.signed:
                return end_at(life, problem)
            return pop(life, TurnedDown(problem))
        if problem.slug == "task-paused":
            return stay(life.counted(retries=1), self, *paused((problem.retry_after or 1) * (1 + at.chance)))
        return self._later(
            life, machine.patience.pause(self.failures, problem.retry_after, chance=at.chance), str(problem)
        )

    def _later(self, life: Life, seconds: float, why: str) -> Move:
        told = Tell(f"waiting {seconds:.0f} s: {why}")
        return stay(life.counted(retries=1), replace(self, failures=self.failures + 1), told, Wait(seconds))


def paused(seconds: float) -> tuple[Tell, Wait]:
    """The task is paused: look again later. That does not grow, for a round waits no longer for its devices."""
    return Tell(f"waiting {seconds:.0f} s: the task is paused"), Wait(seconds)


@record
class CheckOut:
    """Read the publication; nothing is charged while the task is paused."""

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        match event:
            case Done(value=Answered() as answered):
                return self._read(machine, life, answered, at)
            case _:
                tag = {} if life.offer is None else {"If-None-Match": life.offer[0]}
                return push(life, self, Request(Ask("GET", f"{machine.path}/publication", headers=tag)))

    def _read(self, machine: Machine, life: Life, answered: Answered, at: Moment) -> Move:
        answer = answered.answer
        life = windowed(life.counted(check_outs=1), answer, at)
        said = answer.headers.get("crowdml-state")
        if said == "paused":
            return stay(life.counted(retries=1), self, *paused(max(1.0, life.not_before - at.now)))
        if said == "stopped":  # say so before anything is charged for nothing
            return end(life, "stopped", "The task is stopped. Nothing more was sent.")
        if answer.status == 304 and life.offer is not None:
            return pop(life.counted(unchanged=1), life.offer[1])
        try:
            message = machine.understood(answer.headers.get("crowdml-kind", ""), answer.body)
        except ValueError as error:
            return end(life, "refused", f"The server's publication cannot be used: {error}. Nothing was sent.")
        tag = answer.headers.get("etag")
        return pop(replace(life, offer=(tag, message)) if tag else life, message)


@record
class Compare:
    """Hold the ledger against the last message that the server can prove this device signed: that message, if any.

    Where the ledger does not know it, the ledger is an older copy, and the device stops for good. A server that was
    restored shows an older message, which the ledger knows.
    """

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        member, books = machine.member, at.books
        match event:
            case Done(value=TurnedDown() as refusal):
                problem = refusal.problem
                if problem.status in (404, 405) or problem.slug in ("unknown-device", "revoked", "withdrawn"):
                    return pop(life)  # it has none; of those that it knows no more, the next request says so
                return end_at(life, problem)
            case Done(value=Answered() as answered):
                signed = open_own(answered.answer.body, member.key)
                if signed is None or is_known(books, signed, recovered=member.recovered):
                    return pop(life, signed)
                return end(
                    life,
                    "budget",
                    "The server has a message that this device signed when it had given "
                    f"{signed.statement.samples} samples, and its ledger, which knows of {books.samples_given()}, does "
                    f"not have it. {COPIED}",
                    Exhaust(),
                )
            case _:
                return push(life, self, Request(Ask("GET", statement_path(member.key), signed=True)))


@record
class CompareOnce:
    """Before this process sends or draws anything: hold the ledger against what the server can prove."""

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        if isinstance(event, Begun) and not life.is_compared:
            return push(life, self, Compare())
        return pop(replace(life, is_compared=True))


COPIED = (
    "So this folder is a copy of another one, or an older copy was put in its place, and samples may have been given "
    "that it does not count. From here this device gives nothing more. Go on in the folder that gave them; if there is "
    "none, join with another --folder, and with samples that were never given."
)
