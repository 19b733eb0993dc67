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
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from crowdml.buffer import Buffer
from crowdml.device.asking import CheckOut, CompareOnce, Request
from crowdml.device.client import Client, Unreachable
from crowdml.device.commits import Commits
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
from crowdml.device.marks import Mark
from crowdml.device.member import Clock, Ending, Member, Patience, chance, statement_after
from crowdml.device.places import needs_place
from crowdml.device.sending import MSGPACK, Fall, Outbox
from crowdml.device.sources import NO_MORE, Sample, SampleSource
from crowdml.errors import ASK_FOR_STATEMENT, LOST_MARKS, BudgetExhausted, CrowdmlError, LedgerError, ProtocolError
from crowdml.messages import SERVER, Envelope, masked_steps
from crowdml.privacy.noise import Source, SystemSource
from crowdml.protocol import Protocol, Sensed, Woken
from crowdml.records import record
from crowdml.storage import Batch, Ledger, Waiting
from crowdml.task import Task
from crowdml.texts import count_text
from crowdml.turn import Outcome, Tamper
from crowdml.wire.envelopes import LARGEST_ENVELOPE
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem

if TYPE_CHECKING:
    from crowdml.device.learning import Learner
    from crowdml.device.letters import Correspondence
    from crowdml.device.rounds import OwnRounds, Publication
    from crowdml.secagg.device import DeviceRound
    from crowdml.wire.letters import Letter

__all__ = ["Counts", "Halted", "Runner"]

LARGEST_ANSWER = 4 * LARGEST_ENVELOPE
"""Bytes: a publication, with a cohort's keys where a task is masked."""
MOST_PAGES = 16
"""Answers of a mailbox that are read in a row: then the device's own work goes on."""
LOOK, LONGEST_LOOK = 1.0, 60.0
"""Seconds between two looks into the mailbox while samples are waited for: they double while nothing comes."""


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
        self.most, self.new_data, self.tell, self.place = most, new_data, tell, place
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
        self._batch, self._capacity = self.machine.batch, protocol.capacity(task)
        self._buffer = Buffer(self._batch, self._capacity)
        self._bodies: list[bytes] = []
        """The samples that were read last, where they will have to wait here until they have served as often as they
        may, or are learned from."""
        self._sensed: dict[int, bytes] = {}
        """Those that wait in the buffer, by serial, where they are learned from."""
        kept = read_standing(member.ledger.state(task.hash))
        self.letters = self._make_correspondence(kept.get("post"))
        self.carry: Callable[[bytes], None] = lambda data: None
        """Given every message that the server has acknowledged: to bring it to peers as well (device/peering.py)."""
        self.learner = self._make_learner(kept.get("own"))
        self._problems: Counter[str] = Counter()
        self._seconds: deque[float] = deque(maxlen=4096)
        self._sending: tuple[bytes, float] = (b"", 0.0)
        """The check-in that is under way, and since when."""
        self._look, self._mail_by = LOOK, 0.0
        self._lazy, self._place = False, 0
        self._changed, self._room = asyncio.Event(), asyncio.Event()
        self._ended: str | None = None
        self._failure: BaseException | None = None
        self._told_faults = 1
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
            await self._trust_ledger()
            await self._conditions()
            self._restore()  # first: what answers a refusal writes down how often the batch has served
            if self.member.ledger.resend(self.task.hash) or (self._rounds is not None and self._rounds.drawn):
                await self._do(CompareOnce())
            await self._do(Outbox())
            if self._rounds is not None:
                await self._in_rounds(self._rounds.finish())
            await self._hear_peers(anew=self.learner is not None and self.learner.has_samples)
            self._lazy = self.source.waits and not len(self._buffer)
            if self._lazy:
                await self._find_place()
            else:
                sensing = asyncio.create_task(self._sense())
            while self.most is None or self.life.tally.check_ins < self.most:
                if not await self._ready():
                    stop = await self._heed(wait=True)
                    return Ending("source", self._why_ended()) if stop is None else Ending("stopped", stop)
                stop = await self._turn() or await self._heed()
                await self._hear_peers()
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

    async def _trust_ledger(self) -> None:
        """Refuse a ledger that is behind `given.log`, and mark its last message where a crash came before the mark."""
        ledger, commit = self.member.ledger, self.commit
        if self.member.exhausted:
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

    async def _conditions(self) -> None:
        if not self.conditions.always:
            await self.conditions.wait(self.clock.local, self.clock.sleep, self.tell)

    async def _pause(self) -> None:
        """Until the window that the server named."""
        while (left := self.life.not_before - self.clock.now()) > 0:
            if self.letters is None:
                await self.clock.sleep(left)
            else:
                await self.clock.sleep(min(left, self._look))
                await self._look_again()

    async def _turn(self) -> str | None:
        """One check-in, or none where the protocol says nothing; a reason where the protocol stops."""
        # It waits on disk or at its source until it is charged.
        now = self.life.serving or Serving(*self._buffer.take())
        if (now := await self._do(Afford(now, self._lazy))) is None:
            return None
        self._room.set()
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
        kept of them to learn from, and what became of letters."""
        ledger, used, step = self.member.ledger, write.used, dict[str, Any]()
        own, place = None, self._place
        if used is not None:
            own, batches = self._own(used.serials)
            step = {"remember": own, "batches": batches, "given": () if write.again else used.serials}
            if self._lazy and not used.served:
                place += len(used.serials)
                step |= {"take": range(used.serials[0], used.serials[-1] + 1), "given": ()}
                step |= {"source": self.source.name, "taken": self.source.before + place}
                step |= {"keep": self._bodies if write.again else []}
        step.setdefault("given", write.dropped)
        work = partial(
            ledger.charge,
            self.task.hash,
            write.charges,
            self.member.budgets if used is not None else [],
            outbox={each.waiting.seq: each.waiting.body for each in write.sealed},
            contents={each.waiting.seq: each.content for each in write.sealed},
            done=write.done,
            round_=write.round_,
            state=self._packed(write.standing),
            **step,
        )
        await self.commit(work, [(ledger.device, each.mark) for each in write.sealed if each.mark is not None])
        if used is not None:
            self._place, self._bodies = place, []
        if self.learner is not None and own is not None:
            self.learner.add(own)

    def _packed(self, standing: Mapping[str, Any]) -> bytes:
        """With what became of letters and of predictions."""
        more: dict[str, Any] = {} if self.letters is None else {"post": self.letters.post.plain()}
        if self.learner is not None:
            more["own"] = self.learner.plain()
        return pack({**standing, **more})

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

        heard = self._heard(publication)
        turn = self.machine.hear(self.life, heard, self.machine.noise, self.clock.now())
        vectors = self._said_under_masks(turn)
        timers, _ = self.life.timers.set(turn.wakes, self.clock.now())
        self.life = replace(self.life, timers=timers, gave=self.machine.round_of(self.life, [heard]))
        state = device.mask(rounds.terms, held, vectors)
        envelope = Envelope(self.task.hash, self.member.key.id, frozenset((SERVER,)), 0, MASKED_KIND, state.sent)
        return turn, await self._do(Give(now, turn, [envelope], drawn(state)))

    def _heard(self, publication: Publication) -> Any:
        from crowdml.secagg.refusals import Refused as Left

        _, kind, body = publication
        try:
            return self.machine.understood(kind, body)
        except ValueError as error:
            raise Left(f"The publication for this cohort cannot be used: {error}.") from error

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
        made.arrived = self._wake
        return made

    def _wake(self) -> None:
        self._changed.set()

    def _make_learner(self, own: Mapping[str, Any] | None) -> Learner | None:
        """Where devices of this task learn for themselves: from the samples that are kept, and what is heard."""
        if self.protocol.learn is None or not self.protocol.keeps(self.task):
            return None
        from crowdml.device.learning import Learner  # and its models: for tasks with peers alone

        return Learner(self.task, self.protocol, self.member.ledger.remembered(self.task.hash), own)

    async def _hear_peers(self, *, anew: bool = True, mail: bool = True) -> int:
        """Hear what peers brought and what is in the mailbox; how many letters were heard. Then, or where there is
        something else, learn anew.

        What fails here stops nobody: the next look finds what this one did not.
        """
        heard = await self._hear_brought()
        heard += await self._read_mail() if mail else 0
        if self.learner is not None and (heard or anew):
            self._look = LOOK
            await asyncio.to_thread(self.learner.learn, self.life.state)
            if text := self._outlook():
                self.tell(text)
        return heard

    async def _look_again(self) -> None:
        """A look while the device waits: rarer and rarer while nothing comes."""
        before = self._look
        if not await self._hear_peers(anew=False):
            self._look = min(LONGEST_LOOK, 2 * before) * (0.75 + 0.25 * chance())

    async def _hear_brought(self) -> int:
        if self.letters is None:
            return 0
        return await self._hear_letters(self.letters.take(), self.letters.post.after)

    async def _read_mail(self) -> int:
        if self.letters is None:
            return 0
        from crowdml.wire.letters import open_mailbox

        heard, self._mail_by = 0, self.clock.now() + LONGEST_LOOK
        if self.letters.listens:
            await self._ask_who_stands(self.letters)
        for _ in range(MOST_PAGES):
            path = f"{self.machine.path}/mailbox?after={self.letters.post.after}"
            try:
                box = open_mailbox(await self._ask_once(path))
            except Unreachable:
                break
            except Problem as problem:
                self._problems[problem.slug] += 1
                if problem.slug != "too-many":
                    self.tell(f"the mailbox could not be read: {problem}")
                break
            heard += await self._hear_letters(box.letters, box.last)
            if not box.letters:
                break
        return heard

    async def _ask_who_stands(self, letters: Correspondence) -> None:
        """Ask the server which devices stand at the places of peers: no other may bring its letters itself."""
        from crowdml.wire.letters import open_held

        try:
            letters.stand(open_held(await self._ask_once(f"{self.machine.path}/places")))
        except Unreachable:
            return
        except Problem as problem:
            self._problems[problem.slug] += 1
            if problem.slug != "too-many":
                self.tell(f"the server does not say who stands at the places of peers: {problem}")

    async def _ask_once(self, path: str) -> bytes:
        from crowdml.wire.letters import LARGEST_MAILBOX
        from crowdml.wire.requests import authorize

        header = authorize(self.member.key, "GET", self.client.prefix + path, now=self.clock.now())
        headers = {"Authorization": header}
        return (await self.client.request("GET", path, headers=headers, largest=LARGEST_MAILBOX)).body

    async def _hear_letters(self, letters: Sequence[Letter], after: int) -> int:
        """Those that are believed reach the handlers; the state and how far was read are written as one."""
        from crowdml.device.letters import SENTENCES

        post = self.letters
        assert post is not None
        state, heard, flaws = post.hear(self.life.state, letters, self.clock.now())
        post.post = replace(post.post, after=after)
        for flaw in flaws:
            self.tell(f"a letter was left aside: {SENTENCES[flaw]}. Others like it are counted.")
        if letters:
            self.life = replace(self.life, state=state)
            await self._do(KeepStanding())
        return heard

    def _outlook(self) -> str:
        """For the owner's eyes: what comes next, how often that was right, and who was heard."""
        from crowdml.device.learning import outlook

        assert self.learner is not None
        forecast = self.learner.forecast(self.source.latest)
        return outlook(self.task, forecast, self.learner.score, None if self.letters is None else self.letters.post)

    def _own(self, serials: Sequence[int]) -> tuple[Batch | None, int]:
        """The batch as it is kept to learn from, once it was predicted; and how many of them are kept."""
        learner = self.learner
        if learner is None:
            return None, 0
        bodies = self._bodies if self._lazy else [self._sensed.pop(serial) for serial in serials]
        samples = [_unpack(body, self.task) for body in bodies]
        x, y = np.stack([x for x, _ in samples]), np.stack([y for _, y in samples])
        learner.judge(x, y)
        return learner.packed(self.life.trips, x, y, self.source.latest), learner.batches

    # --- sensing ---

    def _restore(self) -> None:
        """Samples that waited when this device last stopped. A batch is one span: what lies before a gap is dropped."""
        waiting = self._restore_serving(self.member.ledger.waiting(self.task.hash))
        start = max((i for i in range(1, len(waiting)) if waiting[i].serial != waiting[i - 1].serial + 1), default=0)
        self.member.ledger.discard(each.serial for each in waiting[:start])
        self._buffer = Buffer(
            self._batch, max(self._capacity, len(waiting))
        )  # one batch was under way beside a full one
        for each in waiting[start:]:
            self._keep_in_sight(each.serial, each.body)
            self._buffer.add(each.serial, *_unpack(each.body, self.task))

    def _keep_in_sight(self, serial: int, body: bytes) -> None:
        if self.learner is not None:
            self._sensed[serial] = body

    def _restore_serving(self, waiting: tuple[Waiting, ...]) -> tuple[Waiting, ...]:
        """The batch that has served and may serve again; and what waits beside it."""
        kept = read_standing(self.member.ledger.state(self.task.hash))
        first, served = kept.get("first", 0), kept.get("served", 0)
        if not served:
            return waiting
        span = range(first, first + self._batch)
        again = Buffer(self._batch, self._batch)
        for each in waiting:
            if each.serial in span:
                again.add(each.serial, *_unpack(each.body, self.task))
        if again.ready and served < self.machine.uses:
            self.life = replace(self.life, serving=Serving(*again.take(), served))
        else:
            self.member.ledger.discard(span)
        return tuple(each for each in waiting if each.serial not in span)

    async def _find_place(self) -> None:
        """Go to the first row of the source that no step has used."""
        place = self.source.place(self.member.ledger.sources())
        if self.member.recovered and not place and not self.new_data:
            raise BudgetExhausted(_AGAIN)
        await self.source.skip(max(0, place - self.source.before))
        self._place = self.source.taken

    async def _sense(self) -> None:
        """Fill the buffer while there is room; at a full one nothing is collected."""
        ledger, name = self.member.ledger, self.source.name
        try:
            await self._find_place()
            while True:
                room = (self._batch if self.source.waits else self._capacity) - len(self._buffer)
                if room <= 0:
                    self._room.clear()
                    await self._room.wait()
                    continue
                samples = await self.source.read(room)
                self._tell_faults()
                if not samples:
                    self._ended = self.source.why_ended
                    break
                bodies = [_pack(sample) for sample in samples]
                taken = self.source.before + self.source.taken
                keep = partial(ledger.keep, self.task.hash, bodies, source=name, taken=taken)
                serials = await self.commit(keep)
                for serial, body in zip(serials, bodies, strict=True):
                    self._keep_in_sight(serial, body)
                    self._buffer.add(serial, *_unpack(body, self.task))
                self._changed.set()
        except Exception as error:  # the main loop raises it: a task of its own would swallow it
            self._failure = error
        self._ended = self._ended or NO_MORE
        self._changed.set()

    async def _read(self) -> bool:
        """A batch of rows that stay at their source until they are charged; false where there are too few."""
        while not self._buffer.ready:
            samples = await self.source.read(self._batch - len(self._buffer))
            self._tell_faults()
            if not samples:
                self._ended = self.source.why_ended
                return False
            x = np.array([sample.x for sample in samples], "<f4").reshape(len(samples), -1)
            self._buffer.fill(x, _labels([sample.y for sample in samples], self.task))
            if self.machine.uses > 1 or self.learner is not None:
                self._bodies = [*self._bodies, *map(_pack, samples)][-self._batch :]
        return True

    def _why_ended(self) -> str:
        """The source's own sentence, and what is there and fills no batch: how much follows from the number of rows."""
        said, left = self._ended or NO_MORE, len(self._buffer)
        if not left:
            return said
        few = "is too few" if left == 1 else "are too few"
        waits = f"wait{'s' * (left == 1)} {'in the source' if self._lazy else 'in the folder'} for more"
        return (
            f"Every full batch was given.{said.removeprefix(NO_MORE)} {count_text(left, 'sample')} {few} for a "
            f"check-in of {self._batch:,}, and {waits}."
        )

    def _tell_faults(self) -> None:
        """Tell the owner, at the first, tenth, hundredth, ... one, of rows that cannot be used."""
        faults = self.source.faults
        if faults.total >= self._told_faults:
            self._told_faults = 10 ** len(str(faults.total))
            self.tell(f"{count_text(faults.total, 'row')} of the source could not be used, for these reasons: {faults}")

    async def _ready(self) -> bool:
        """Wait for a batch; false where none will come."""
        if self.life.serving is not None:
            return True
        if self._lazy:
            return await self._read()
        while not self._buffer.ready:
            if self._failure is not None:
                raise self._failure
            if self._ended is not None:
                return False
            self._changed.clear()
            await self._until_changed()
            if (stop := await self._heed()) is not None:
                raise Halted(Ending("stopped", stop))
        return True

    async def _until_changed(self) -> None:
        """Until there is a sample; meanwhile timers and what peers say are heard."""
        left = self.life.timers.left(self.clock.now())
        if self.letters is None and left is None:
            await self._changed.wait()
            return
        # Letters that were brought are heard together, a moment later: who brings many makes nobody learn often.
        brought = self.letters is not None and self.letters.has_brought
        look = math.inf if self.letters is None else LOOK if brought else self._look
        nap = self.clock.sleep(look if left is None else min(look, left))
        changed, pause = asyncio.ensure_future(self._changed.wait()), asyncio.ensure_future(nap)
        try:
            await asyncio.wait((changed, pause), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in (changed, pause):
                each.cancel()
        if self._changed.is_set() or self.letters is None:
            return
        if brought:  # and one who brings without end keeps nobody else's letters in the mailbox
            await self._hear_peers(anew=False, mail=self.clock.now() >= self._mail_by)
        else:
            await self._look_again()


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


_AGAIN = (
    "This device lost its ledger, and with it the note of which samples it gave: those of this source may have been "
    "given before. Nothing was sent. If none of them ever was, say so once with --new-data; if you do not know, name "
    "another source."
)


def _pack(sample: Sample) -> bytes:
    x = np.asarray(sample.x, "<f4").reshape(-1)
    return struct.pack("<d", float(sample.y)) + x.tobytes()


def _labels(ys: Sequence[float], task: Task) -> Any:
    """Labels [b] as the handlers see them; one that is no class is -1, which no model counts."""
    labels = np.array(ys, np.float64)
    if not task.classes:
        return labels.astype(np.float32)
    return np.where((labels >= 0) & (labels < task.classes), labels, -1).astype(np.int32)


def _unpack(body: bytes, task: Task) -> tuple[Any, Any]:
    (y,) = struct.unpack_from("<d", body)
    if not task.classes:
        return np.frombuffer(body, "<f4", offset=8), np.float32(y)
    return np.frombuffer(body, "<f4", offset=8), np.int32(y if 0 <= y < task.classes else -1)  # not a number: no class
