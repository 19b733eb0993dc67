"""A device's machine and the server's turn in one process: no socket, no clock, and no chance but what a test says."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from crowdml.arrays import Samples
from crowdml.buffer import Buffer
from crowdml.device.asking import CompareOnce
from crowdml.device.client import Answer
from crowdml.device.giving import Afford, Contribute, NextRound
from crowdml.device.machine import (
    Acknowledge,
    Answered,
    Ask,
    Effect,
    Event,
    Exhaust,
    Machine,
    Moment,
    Phase,
    Serving,
    Silent,
    Tell,
    TurnedDown,
    Wait,
    Waited,
    Write,
    Written,
)
from crowdml.device.member import Ending, Member, Patience
from crowdml.device.sending import Outbox
from crowdml.messages import encode
from crowdml.privacy.noise import Silence, Source
from crowdml.protocols import find
from crowdml.server.fold import Fold
from crowdml.storage import Budget, Ledger
from crowdml.task import Task
from crowdml.wire.envelopes import open_signed
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import Receipt, chain_next, chain_start, sign_receipts
from crowdml.wire.statements import totals_fell

DEVICE, SERVER_KEY = (Key.from_secret(bytes([n]) * 32) for n in (1, 3))
PLENTY = Budget(Fraction(1000), 1e-6, 10_000)
NOW, CHANCE = 1_800_000_000.0, 0.5
MOST_STEPS = 200


class Server:
    """What a server answers: its fold of the handlers, and of each device the last message and the next number."""

    def __init__(self, task: Task) -> None:
        self.task, self.fold, self.chain = task, Fold(task), chain_start(task.hash)
        self.journal: list[bytes] = []
        self.receipts: dict[bytes, bytes] = {}
        self.said: dict[str, bytes] = {}
        self.instead: deque[Callable[[Ask], Event | None]] = deque()
        """Each is asked once for an answer in place of the server's; None: the server answers."""

    def answer(self, ask: Ask) -> Event:
        instead = self.instead.popleft()(ask) if self.instead else None
        return self.hear(ask) if instead is None else instead

    def hear(self, ask: Ask) -> Event:
        """The server's own answer."""
        try:
            return Answered(self._answer(ask))
        except Problem as problem:
            return TurnedDown(problem)

    def _answer(self, ask: Ask) -> Answer:
        if ask.path.endswith("/publication"):
            return self._publication(ask.headers.get("If-None-Match"))
        if ask.path.endswith("/statement"):
            said = self.said.get(ask.path.split("/")[3])
            if said is None:
                raise Problem("not-found", "This device has said nothing.")
            return Answer(200, {}, said)
        assert ask.path.endswith("/check-in"), ask.path
        return self._check_in(ask.body)

    def _publication(self, tag: str | None) -> Answer:
        etag = f'"{self.fold.version}"'
        headers = {"etag": etag, "crowdml-kind": self.fold.message.kind}
        if self.fold.rule is not None:
            headers["crowdml-state"] = "stopped"
        return Answer(304, headers, b"") if tag == etag else Answer(200, headers, encode(self.fold.message))

    def _check_in(self, data: bytes) -> Answer:
        signed = open_signed(data)
        envelope, before = signed.envelope, self.said.get(signed.envelope.sender)
        if signed.hash in self.receipts:
            return Answer(200, {}, self.receipts[signed.hash])
        last = None if before is None else open_signed(before)
        expected = 1 if last is None else last.envelope.seq + 1
        if envelope.seq != expected:
            raise Problem("seq-gap", f"Seq {envelope.seq} came before {expected}.", expected=expected)
        if last is not None and totals_fell(pack(last.statement.plain()), pack(signed.statement.plain())):
            raise Problem("totals-fell", f"Seq {envelope.seq} comes with smaller totals than the check-in before it.")
        message = self.fold.read(envelope.kind, envelope.body)
        self.journal.append(data)
        self.chain = chain_next(self.chain, self.task.hash, envelope.sender, envelope.seq, signed.hash)
        self.fold.apply(message, envelope.sender, len(self.journal))
        link = Receipt(self.task.hash, envelope.sender, envelope.seq, len(self.journal), signed.hash, self.chain)
        (receipt,) = sign_receipts(self.task.hash, [link], SERVER_KEY)
        self.receipts[signed.hash], self.said[envelope.sender] = receipt, data
        return Answer(202, {}, receipt)

    def forget(self, kept: int) -> None:
        """Be the server of an older backup, which has so many of the check-ins."""
        journal = self.journal[:kept]
        self.__init__(self.task)
        for data in journal:
            self._check_in(data)


class Crash(Exception):  # noqa: N818  # a signal of this bench
    """The device lost its power."""


class Device:
    """A machine with a ledger, whose effects are carried out here. `log` is what was done and heard, in order."""

    def __init__(
        self,
        task: Task,
        server: Server,
        ledger: Ledger | None = None,
        *,
        noise: Source | None = None,
        budgets: Iterable[Budget] = (PLENTY,),
        is_new: bool = False,
    ) -> None:
        self.task, self.server, self.ledger = task, server, ledger or Ledger(":memory:")
        member = Member(DEVICE, self.ledger, SERVER_KEY.public, tuple(budgets))
        self.machine = Machine(member, task, find(task), noise=noise or Silence(), patience=Patience(1.0, 8.0))
        self.life = self.machine.wake(self.ledger, is_new=is_new)
        self.now = NOW
        self.log: list[Effect | Event | Phase] = []
        self.steps: list[tuple[Phase | Event, float, tuple[Effect, ...]]] = []
        """Each event, when it came, and what was to be done."""
        self.batches: list[Samples] = []
        """What it was given to give."""
        self.crash_at: int | None = None
        """After so many effects the device loses its power."""

    def begin(self) -> Ending | None:
        """What a device does at its start: what waits goes first."""
        for phase in (*((CompareOnce(),) if self.ledger.resend(self.task.hash) else ()), Outbox()):
            self.do(phase)
            if self.life.ending is not None:
                break
        return self.life.ending

    def give(self, batch: Samples) -> Ending | None:
        """One check-in with this batch; why the device's life is over, if it is."""
        self.batches.append(batch)
        buffer = Buffer(self.machine.batch, self.machine.batch)
        buffer.fill(batch.x, batch.y)
        now = self.do(Afford(Serving(*buffer.take()), at_source=True))
        for phase in (NextRound(), CompareOnce(), Contribute(now)) if now is not None else ():
            self.do(phase)
            if self.life.ending is not None:
                break
        return self.life.ending

    def do(self, phase: Phase) -> Any:
        """One thing to its end."""
        event: Phase | Event = phase
        self.life, effects = self.machine.begin(self.life, phase, self._moment())
        for _ in range(MOST_STEPS):
            self.steps.append((event, self.now, effects))
            self.log.append(event)
            heard = None
            for effect in effects:
                self.log.append(effect)
                self._spend_power()
                heard = self._carry_out(effect)
            if heard is None:
                return self.life.result
            event = heard
            self.life, effects = self.machine.advance(self.life, heard, self._moment())
        raise AssertionError("this conversation has no end")

    def _moment(self) -> Moment:
        return Moment(self.now, CHANCE, self.ledger)

    def _spend_power(self) -> None:
        if self.crash_at is not None:
            self.crash_at -= 1
            if self.crash_at < 0:
                raise Crash

    def _carry_out(self, effect: Effect) -> Event | None:
        match effect:
            case Ask():
                return self.server.answer(effect)
            case Wait():
                self.now += effect.seconds
                return Waited()
            case Write():
                self._write(effect)
                return Written()
            case Acknowledge():
                self.ledger.acknowledge(self.task.hash, effect.message.waiting.seq, effect.receipt)
                return Written()
            case Tell() | Exhaust():
                return None

    def _write(self, write: Write) -> None:
        used = write.used
        self.ledger.charge(
            self.task.hash,
            write.charges,
            self.machine.member.budgets if used is not None else (),
            outbox={each.waiting.seq: each.waiting.body for each in write.sealed},
            contents={each.waiting.seq: each.content for each in write.sealed},
            done=write.done,
            state=pack(write.standing),
            given=write.dropped,
            take=None if used is None or used.served else range(used.serials[0], used.serials[-1] + 1),
        )

    # --- what was done ---

    @property
    def done(self) -> list[str]:
        """What was done besides telling, in words."""
        return [word for effect in self.log if (word := in_words(effect)) is not None]

    @property
    def told(self) -> list[str]:
        return [effect.text for effect in self.log if isinstance(effect, Tell)]

    @property
    def sent(self) -> list[bytes]:
        """Each time that a check-in was sent, its bytes."""
        return [effect.body for effect in self.log if isinstance(effect, Ask) and effect.method == "POST"]


def in_words(effect: Any) -> str | None:
    match effect:
        case Ask():
            return f"{effect.method} {effect.path.rpartition('/')[2]}"
        case Wait():
            return f"wait {effect.seconds:g}"
        case Write():
            return f"write {len(effect.charges)} charges, {len(effect.sealed)} messages"
        case Acknowledge():
            return "acknowledge"
        case Exhaust():
            return "exhaust"
        case _:
            return None


def refuses(slug: str, detail: str = "No.", *, at: str = "check-in", **extra: Any) -> Callable[[Ask], Event | None]:
    """In place of the server's answer to a request of this name: a refusal."""
    status = extra.pop("status", None)
    problem = Problem(slug, detail, status=status, **extra)
    return lambda ask: TurnedDown(problem) if ask.path.endswith(at) else None


def silent(ask: Ask) -> Event:
    """The request did not arrive."""
    return Silent("the server is away")


def unheard(server: Server) -> Callable[[Ask], Event]:
    """The server heard it, and its answer did not arrive."""

    def lose(ask: Ask) -> Event:
        server.hear(ask)
        return Silent("the connection was closed")

    return lose


def untouched(count: int) -> Iterable[Callable[[Ask], Event | None]]:
    """So many answers of the server's own."""
    return itertools.repeat(lambda ask: None, count)
