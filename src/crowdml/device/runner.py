"""One device's life with one task: sense, check out, compute, let out, charge, check in; again and again.

The order is the promise. Whether the budgets allow a step is asked before noise is drawn; its charges, its sealed
messages and its state are on disk before a byte is sent; and what is sent are those bytes, until the server has
acknowledged them with a receipt that its pinned key signed. A crash anywhere between two of these steps sends nothing
that was not charged, and nothing twice under two numbers. Of a masked task what is sent is a vector under masks, and
the steps around it are those of a round (device/rounds.py). Of a task with peers a device also reads its mailbox
between two turns, and learns for itself from what it heard (device/letters.py, device/learning.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from crowdml.device.asking import CheckOut, CompareOnce, Request
from crowdml.device.client import Client, Unreachable
from crowdml.device.commits import Commits, trust_ledger
from crowdml.device.conditions import Conditions
from crowdml.device.files import check_known
from crowdml.device.giving import Afford, Contribute, Give, KeepStanding, NextRound, sentence
from crowdml.device.machine import (
    Acknowledge,
    Answered,
    Ask,
    Effect,
    Event,
    Exhaust,
    Machine,
    Moment,
    Offers,
    Phase,
    Serving,
    Silent,
    Tally,
    Tell,
    TurnedDown,
    Wait,
    Waited,
    Write,
    Written,
    final,
    read_standing,
)
from crowdml.device.mail import LOOK, Mail
from crowdml.device.member import Clock, Ending, Member, Patience, chance, statement_after
from crowdml.device.places import needs_place
from crowdml.device.sending import MSGPACK, Fall, Outbox
from crowdml.device.sensing import Sensing
from crowdml.device.sources import SampleSource
from crowdml.errors import BudgetExhausted, CrowdmlError, ProtocolError
from crowdml.messages import SERVER, Envelope, masked_steps
from crowdml.privacy.noise import Source, SystemSource
from crowdml.protocol import Protocol, Sensed, Woken
from crowdml.records import record
from crowdml.task import Task
from crowdml.turn import Outcome, Tamper
from crowdml.wire.envelopes import LARGEST_ENVELOPE
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem

if TYPE_CHECKING:
    from crowdml.device.learning import Learner
    from crowdml.device.letters import Correspondence
    from crowdml.device.rounds import OwnRounds, Publication
    from crowdml.secagg.device import DeviceRound

__all__ = ["Counts", "Halted", "Runner"]

LARGEST_ANSWER = 4 * LARGEST_ENVELOPE
"""Bytes: a publication, with a cohort's keys where a task is masked."""


@record
class Counts(Tally):
    """What happened, for people: no sample is in it."""

    problems: Counter[str] = field(default_factory=Counter)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    """How long the last check-ins took, from the request to the receipt."""


class Halted(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """The device's life with this task is over."""

    def __init__(self, ending: Ending) -> None:
        super().__init__(ending.reason)
        self.ending = ending


class Runner:
    """Drives the device side of a protocol for one device and one task. `run` returns when there is no more to do."""

    def __init__(
        self,
        member: Member,
        task: Task,
        protocol: Protocol,
        client: Client,
        source: SampleSource,
        *,
        commit: Commits | None = None,
        gate: asyncio.Semaphore | None = None,
        conditions: Conditions | None = None,
        clock: Clock | None = None,
        patience: Patience | None = None,
        noise: Source | None = None,
        most: int | None = None,
        new_data: bool = False,
        offers: Offers | None = None,
        place: int = -1,
        is_new: bool = False,
        tamper: Tamper | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        if needs_place(task, protocol) and not 0 <= place < len(task.places):
            raise ProtocolError(f"a device of task {task.name!r} stands at one of its places. Nothing was sent.")
        check_known(source.name, member.ledger.sources())
        self.member, self.task, self.protocol, self.client, self.source = member, task, protocol, client, source
        self.commit = commit or Commits(member.ledger)
        self.gate = gate or asyncio.Semaphore(1)
        """Devices of a fleet that are at work at once: the others wait before they check out."""
        self.conditions, self.clock = conditions or Conditions(), clock or Clock()
        self.most, self.tell, self.place = most, tell, place
        self.machine = Machine(
            member,
            task,
            protocol,
            noise=noise or SystemSource(),
            patience=patience,
            offers=offers,
            place=place,
            tamper=tamper,
        )
        self.life = self.machine.wake(member.ledger, is_new=is_new)
        kept = read_standing(member.ledger.state(task.hash))
        self.letters = self._make_correspondence(kept.get("post"))
        self.carry: Callable[[bytes], None] = lambda data: None
        """Given every message that the server has acknowledged: to bring it to peers as well (device/peering.py)."""
        self.learner = self._make_learner(kept.get("own"))
        self._problems: Counter[str] = Counter()
        self._seconds: deque[float] = deque(maxlen=4096)
        self._sending: tuple[bytes, float] = (b"", 0.0)
        """The check-in that is under way, and since when."""
        self.sensing = Sensing(
            self.machine, source, commit=self.commit, tell=tell, learner=self.learner, new_data=new_data
        )
        if self.letters is not None:
            self.letters.arrived = self.sensing.changed.set
        self.mail = Mail(
            self.letters,
            self.learner,
            key=member.key,
            client=client,
            path=self.machine.path,
            clock=self.clock,
            state=lambda: self.life.state,
            keep=self._keep_state,
            latest=lambda: self.source.latest,
            problems=self._problems,
            tell=tell,
        )
        self._rounds = self._masked_rounds()

    @property
    def counts(self) -> Counts:
        """What happened so far."""
        return Counts(**dataclasses.asdict(self.life.tally), problems=self._problems, seconds=self._seconds)

    # --- the life of a device ---

    async def run(self) -> Ending:
        """Until a budget, the source, the server or `most` ends it. What waits for an acknowledgement goes first."""
        sensing: asyncio.Task[None] | None = None
        try:
            await trust_ledger(self.member, self.commit)
            await self._conditions()
            # First: what answers a refusal writes down how often the batch has served.
            self.life = replace(self.life, serving=self.sensing.restore())
            if self.member.ledger.resend(self.task.hash) or (self._rounds is not None and self._rounds.drawn):
                await self._do(CompareOnce())
            await self._do(Outbox())
            if self._rounds is not None:
                await self._in_rounds(self._rounds.finish())
            await self.mail.hear(anew=self.learner is not None and self.learner.has_samples)
            self.sensing.is_lazy = self.source.waits and not len(self.sensing.buffer)
            if self.sensing.is_lazy:
                await self.sensing.find_place()
            else:
                sensing = asyncio.create_task(self.sensing.sense())
            while self.most is None or self.life.tally.check_ins < self.most:
                if not await self._ready():
                    stop = await self._heed(wait=True)
                    return Ending("source", self.sensing.why_ended()) if stop is None else Ending("stopped", stop)
                stop = await self._turn() or await self._heed()
                await self.mail.hear()
                if stop is not None:
                    return Ending("stopped", stop)
            made = self.life.tally.check_ins
            return Ending("limit", f"{made} check-in{'s were' if made != 1 else ' was'} made, as asked.")
        except BudgetExhausted as error:
            return Ending("budget", str(error))
        except Halted as error:
            return error.ending
        finally:
            if sensing is not None:
                sensing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await sensing
            self.source.close()

    async def _conditions(self) -> None:
        if not self.conditions.always:
            await self.conditions.wait(self.clock.local, self.clock.sleep, self.tell)

    async def _pause(self) -> None:
        """Until the window that the server named."""
        while (left := self.life.not_before - self.clock.now()) > 0:
            if self.letters is None:
                await self.clock.sleep(left)
            else:
                await self.clock.sleep(min(left, self.mail.look))
                await self.mail.look_again()

    async def _turn(self) -> str | None:
        """One check-in, or none where the protocol says nothing; a reason where the protocol stops."""
        # It waits on disk or at its source until it is charged.
        now = self.life.serving or Serving(*self.sensing.buffer.take())
        if (now := await self._do(Afford(now, self.sensing.is_lazy))) is None:
            return None
        self.sensing.room.set()
        await self._conditions()
        if self._rounds is not None:
            async with self.gate:
                await self._do(CompareOnce())
            await self._next_round()
            return await self._contribute_masked(self._rounds, now)
        await self._pause()
        await self._next_round()
        async with self.gate:
            await self._do(CompareOnce())
            return await self._do(Contribute(now))

    async def _next_round(self) -> None:
        """Where uploads are gathered: until a round is open that this device did not give to."""
        if self.machine.gathers:
            async with self.gate:
                await self._do(NextRound())

    async def _heed(self, *, wait: bool = False) -> str | None:
        """Hear the timers that ran out between two batches, or `wait` for all of them; a reason where one stops."""
        while (left := self.life.timers.left(self.clock.now())) is not None and (wait or not left):
            await self.clock.sleep(left)
            timers, tag = self.life.timers.take(self.clock.now())
            self.life = replace(self.life, timers=timers)
            if tag is None:
                continue
            turn = self._hear_timer(tag, Woken(tag))
            if turn.asks and turn.stopped is None:
                turn = self._hear_timer(tag, await self._do(CheckOut()))
            await self._do(KeepStanding())
            if turn.stopped is not None:
                return sentence(turn)
        return None

    def _hear_timer(self, tag: str, event: Any) -> Outcome:
        """A turn between two batches: nothing may leave, and its state and its timers are kept."""
        turn = self.machine.hear(self.life, event, self.machine.noise, self.clock.now())
        if turn.said or turn.passages:
            raise ProtocolError(
                f"protocol {self.protocol.name!r} says something when its timer {tag!r} runs out and no batch is "
                "under way: there is no sample to charge. Nothing was sent."
            )
        timers, _ = self.life.timers.set(turn.wakes, self.clock.now())
        self.life = replace(self.life, state=turn.state, timers=timers)
        return turn

    # --- what the machine wants done ---

    async def _do(self, phase: Phase) -> Any:
        """Do one thing of the machine to its end: what came of it. `Halted` where that is the end of all."""
        below, self.life = self.life.doing, replace(self.life, doing=())
        self.life, effects = self.machine.begin(self.life, phase, self._moment())
        while True:
            event = None
            for effect in effects:
                event = await self._carry_out(effect)
            if self.life.ending is not None:
                raise Halted(self.life.ending)
            if event is None:
                self.life, result = replace(self.life, doing=below, result=None), self.life.result
                return result
            self.life, effects = self.machine.advance(self.life, event, self._moment())

    def _moment(self) -> Moment:
        return Moment(self.clock.now(), chance(), self.member.ledger)

    async def _carry_out(self, effect: Effect) -> Event | None:
        """Do it; the answer, where there is one."""
        match effect:
            case Ask():
                return await self._ask(effect)
            case Wait():
                await self._wait(effect)
                return Waited()
            case Write():
                await self._write(effect)
                return Written()
            case Acknowledge():
                seq, body = effect.message.waiting.seq, effect.message.waiting.body
                await self.commit(partial(self.member.ledger.acknowledge, self.task.hash, seq, effect.receipt))
                self.carry(body)
                return Written()
            case Exhaust():
                self.member.exhaust()
            case Tell():
                self.tell(effect.text)
        return None

    async def _ask(self, ask: Ask) -> Event:
        """Ask the server once."""
        sent = dict(ask.headers)
        if ask.signed:
            from crowdml.wire.requests import authorize

            target = self.client.prefix + ask.path
            sent["Authorization"] = authorize(self.member.key, ask.method, target, ask.body, now=self.clock.now())
        if ask.body is not self._sending[0]:
            self._sending = (ask.body, time.perf_counter())
        try:
            answer = await self.client.request(ask.method, ask.path, ask.body, sent, largest=LARGEST_ANSWER)
        except Unreachable as error:
            return Silent(str(error))
        except Problem as problem:
            self._problems[problem.slug] += 1
            return TurnedDown(problem)
        if ask.path.endswith("/check-in"):
            self._seconds.append(time.perf_counter() - self._sending[1])
        return Answered(answer)

    async def _wait(self, wait: Wait) -> None:
        if wait.why == "round":  # a device that waits for others leaves its place at work to them
            self.gate.release()
            try:
                await self.clock.sleep(wait.seconds)
                await self._conditions()
                await self._pause()
            finally:
                await self.gate.acquire()
            return
        await self.clock.sleep(wait.seconds)
        if wait.why == "retry":
            await self._conditions()

    async def _write(self, write: Write) -> None:
        """One transaction. To what the machine wants written it adds where the samples of the batch come from, what is
        kept of them to learn from, and what became of letters and of predictions."""
        ledger, step = self.member.ledger, self.sensing.given(write, self.life.trips)
        standing = dict(write.standing)
        if self.letters is not None:
            standing["post"] = self.letters.post.plain()
        if self.learner is not None:
            standing["own"] = self.learner.plain()
        work = partial(
            ledger.charge,
            self.task.hash,
            write.charges,
            self.member.budgets if write.used is not None else [],
            outbox={each.waiting.seq: each.waiting.body for each in write.sealed},
            contents={each.waiting.seq: each.content for each in write.sealed},
            done=write.done,
            round_=write.round_,
            state=pack(standing),
            **step,
        )
        await self.commit(work, [(ledger.device, each.mark) for each in write.sealed if each.mark is not None])
        self.sensing.written(write, step)

    async def _keep_state(self, state: Any) -> None:
        self.life = replace(self.life, state=state)
        await self._do(KeepStanding())

    # --- under masks ---

    def _masked_rounds(self) -> OwnRounds | None:
        """Where the task's sums alone are seen: what drives this device through its rounds."""
        if not self.machine.is_masked:
            return None
        from crowdml.device.rounds import OwnRounds  # with its keys and curves: for masked tasks alone
        from crowdml.secagg.terms import terms_of

        ledger = self.member.ledger

        async def ask(method: str, path: str, body: bytes = b"") -> bytes:
            said = await self._do(Request(Ask(method, path, body, MSGPACK if body else {}, signed=True)))
            if isinstance(said, TurnedDown):
                raise said.problem
            return said.answer.body

        async def ready() -> None:
            await self._conditions()
            await self._pause()

        return OwnRounds(
            self.member.key,
            ledger,
            terms_of(self.task, self.machine.table),
            self.machine.path,
            ask=ask,
            statement=lambda: statement_after(ledger, [], 0),
            commit=self.commit,
            gate=self.gate,
            clock=self.clock,
            ready=ready,
            chance=chance,
            tell=self.tell,
        )

    async def _contribute_masked(self, rounds: OwnRounds, now: Serving) -> str | None:
        """Rounds until this device has drawn in one. The batch is kept for the next where a round ends before that."""
        turn = self.machine.hear(self.life, Sensed(now.batch), None, self.clock.now())
        self.life = replace(self.life, state=turn.state)
        self.tell("sensed")

        async def draw(publication: Publication, held: DeviceRound) -> bool:
            nonlocal turn
            turn, taken = await self._draw(rounds, now, publication, held)
            return taken

        if turn.stopped is None:
            timers, _ = self.life.timers.set(turn.wakes, self.clock.now())
            self.life = replace(self.life, timers=timers)
            await self._in_rounds(rounds.contribute(draw))
        return sentence(turn)

    async def _in_rounds(self, part: Awaitable[None]) -> None:
        from crowdml.device.rounds import Lied

        try:
            await part
        except Lied as error:
            raise Halted(Ending("refused", str(error))) from error
        except Problem as problem:
            if problem.slug == "totals-fell":
                await self._do(Fall(problem))
            raise Halted(Ending(*final(problem))) from problem

    async def _draw(
        self, rounds: OwnRounds, now: Serving, publication: Publication, held: DeviceRound
    ) -> tuple[Outcome, bool]:
        """Compute, draw, mask, charge; then check in. What the turn was, and whether the server took it."""
        from crowdml.device.rounds import MASKED_KIND, drawn
        from crowdml.secagg import device
        from crowdml.secagg.refusals import Refused as Left

        _, kind, body = publication
        try:
            heard = self.machine.understood(kind, body)
        except ValueError as error:
            raise Left(f"The publication for this cohort cannot be used: {error}.") from error
        turn = self.machine.hear(self.life, heard, self.machine.noise, self.clock.now())
        vectors = self._said_under_masks(turn)
        timers, _ = self.life.timers.set(turn.wakes, self.clock.now())
        self.life = replace(self.life, timers=timers, gave=self.machine.round_of(self.life, [heard]))
        state = device.mask(rounds.terms, held, vectors)
        envelope = Envelope(self.task.hash, self.member.key.id, frozenset((SERVER,)), 0, MASKED_KIND, state.sent)
        return turn, await self._do(Give(now, turn, [envelope], drawn(state)))

    def _said_under_masks(self, turn: Outcome) -> dict[str, Any]:
        """The integers of the one message that a masked protocol says, as flat vectors."""
        said = [message for _, message in turn.said]
        expected = None if self.protocol.masked is None else self.protocol.masked[0]
        if len(said) != 1 or type(said[0]) is not expected:
            raise ProtocolError(
                f"protocol {self.protocol.name!r} says one {expected.__name__ if expected else 'message'} under masks, "
                f"and this step says {[type(each).__name__ for each in said]}. Nothing was sent."
            )
        return {name: np.asarray(steps).reshape(-1) for name, steps in masked_steps(said[0]).items()}

    # --- peers ---

    def _make_correspondence(self, post: Mapping[str, Any] | None) -> Correspondence | None:
        """Where devices of this task have peers: who of them is believed, and what became of their letters."""
        if self.place < 0 or self.protocol.peers is None or not self.protocol.peers(self.task):
            return None
        from crowdml.device.letters import Correspondence, Post

        made = Correspondence(self.task, self.protocol, self.member.key.id, self.place, Post.of(post), self.clock.now)
        return made

    def _make_learner(self, own: Mapping[str, Any] | None) -> Learner | None:
        """Where devices of this task learn for themselves: from the samples that are kept, and what is heard."""
        if self.protocol.learn is None or not self.protocol.keeps(self.task):
            return None
        from crowdml.device.learning import Learner  # and its models: for tasks with peers alone

        return Learner(self.task, self.protocol, self.member.ledger.remembered(self.task.hash), own)

    # --- waiting for a batch ---

    async def _ready(self) -> bool:
        """Wait for a batch; false where none will come."""
        if self.life.serving is not None:
            return True
        if self.sensing.is_lazy:
            return await self.sensing.read()
        while not self.sensing.buffer.ready:
            if self.sensing.failure is not None:
                raise self.sensing.failure
            if self.sensing.ended is not None:
                return False
            self.sensing.changed.clear()
            await self._until_changed()
            if (stop := await self._heed()) is not None:
                raise Halted(Ending("stopped", stop))
        return True

    async def _until_changed(self) -> None:
        """Until there is a sample; meanwhile timers and what peers say are heard."""
        left = self.life.timers.left(self.clock.now())
        if self.letters is None and left is None:
            await self.sensing.changed.wait()
            return
        # Letters that were brought are heard together, a moment later: who brings many makes nobody learn often.
        brought = self.letters is not None and self.letters.has_brought
        look = math.inf if self.letters is None else LOOK if brought else self.mail.look
        nap = self.clock.sleep(look if left is None else min(look, left))
        changed, pause = asyncio.ensure_future(self.sensing.changed.wait()), asyncio.ensure_future(nap)
        try:
            await asyncio.wait((changed, pause), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (changed, pause):
                each.cancel()
        if self.sensing.changed.is_set() or self.letters is None:
            return
        if brought:  # and one who brings without end keeps nobody else's letters in the mailbox
            await self.mail.hear(anew=False, mail=self.mail.is_due)
        else:
            await self.mail.look_again()
