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
import hashlib
import math
import secrets
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import msgpack
import numpy as np

from crowdml.arrays import Samples
from crowdml.buffer import Buffer
from crowdml.channels import Channel
from crowdml.device.client import Answer, Client, Unreachable, whole_number
from crowdml.device.conditions import Conditions
from crowdml.device.files import check_known
from crowdml.device.folder import Folder
from crowdml.device.gathering import Timers, wait_for_round
from crowdml.device.marks import Mark, Marked, Marks
from crowdml.device.places import needs_place
from crowdml.device.sources import NO_MORE, Sample, SampleSource
from crowdml.device.statements import ROUND_KINDS, is_known, open_own, statement_path
from crowdml.errors import ASK_FOR_STATEMENT, LOST_MARKS, BudgetExhausted, CrowdmlError, LedgerError, ProtocolError
from crowdml.messages import KINDS, SERVER, Envelope, decode, masked_steps, seal
from crowdml.plugins import blaming
from crowdml.price import Price
from crowdml.privacy.door import Passage
from crowdml.privacy.losses import Loss
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.noise import Source, SystemSource
from crowdml.privacy.private import Private
from crowdml.privacy.sensitivity import Observer
from crowdml.protocol import Protocol, Sensed, Woken
from crowdml.records import record
from crowdml.storage import Batch, Budget, Charge, Ledger, Outgoing, Round, Waiting
from crowdml.task import Task
from crowdml.texts import count_text
from crowdml.turn import Outcome, Tamper, device_turn, first_device_turn, first_turn
from crowdml.wire.envelopes import LARGEST_ENVELOPE, Signed, open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.packing import LARGEST_INTEGER, pack
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import open_receipt
from crowdml.wire.statements import Statement
from crowdml.wire.states import pack_state, unpack_state

if TYPE_CHECKING:
    from crowdml.device.learning import Learner
    from crowdml.device.letters import Correspondence
    from crowdml.device.rounds import OwnRounds, Publication
    from crowdml.secagg.device import DeviceRound
    from crowdml.wire.letters import Letter

__all__ = [
    "Clock", "Commits", "Counts", "Ending", "Member", "Offers", "Patience", "Runner", "charges_of", "statement_after",
    "terms",
]  # fmt: skip

T = TypeVar("T")

MOST_REFUSALS = 3
"""Messages in a row that a server may refuse before a device stops: something is wrong with one of the two."""
MSGPACK = {"Content-Type": "application/msgpack"}
LARGEST_ANSWER = 4 * LARGEST_ENVELOPE
"""Bytes: a publication, with a cohort's keys where a task is masked."""
MOST_PAGES = 16
"""Answers of a mailbox that are read in a row: then the device's own work goes on."""
LOOK, LONGEST_LOOK = 1.0, 60.0
"""Seconds between two looks into the mailbox while samples are waited for: they double while nothing comes."""

EndingKind = Literal["budget", "source", "limit", "stopped", "withdrawn", "revoked", "refused"]


@record
class Ending:
    """Why a device stopped, and the sentence for its owner."""

    kind: EndingKind
    reason: str


@record(frozen=False)
class Counts:
    """What happened, for people: no sample is in it."""

    check_ins: int = 0
    repeated: int = 0
    """Acknowledgements that the server gave before: the first did not arrive."""
    refused: int = 0
    retries: int = 0
    check_outs: int = 0
    unchanged: int = 0
    problems: Counter[str] = field(default_factory=Counter)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    """How long the last check-ins took, from the request to the receipt."""


@record
class Clock:
    """The time, and how to let it pass."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def utc(self) -> str:
        return datetime.fromtimestamp(self.now(), UTC).isoformat()

    def local(self) -> datetime:
        return datetime.fromtimestamp(self.now())


@record
class Patience:
    """Capped exponential back-off with jitter: after the n-th failure, between half and all of first * 2^n seconds."""

    first: float = 1.0
    cap: float = 300.0

    def pause(self, failures: int, asked: float | None = None) -> float:
        """Seconds to wait; at least what the server asked for, and then spread out, so that a crowd does not return at
        once."""
        grown = min(self.cap, self.first * 2.0 ** min(failures, 30))
        return grown * (0.5 + 0.5 * chance()) if asked is None else asked + grown * chance()


def chance() -> float:
    """Uniform in [0, 1), from the operating system."""
    return secrets.randbits(53) / 2**53


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


@record(frozen=False)
class Offers:
    """The publication that was read last, by its bytes: devices of one process that are offered the same read it once.

    Each of them asks for it by itself; what is shared is the work of decoding.
    """

    body: bytes = b""
    message: Any = None


@record
class _Sealed:
    """A message of this process that waits for its receipt: its place in the outbox, and what the receipt must say."""

    waiting: Outgoing
    seq: int
    digest: bytes
    content: bytes = b""


@record
class _Serving:
    """The batch that is under way, where samples serve several times: which, and how often it has served."""

    serials: tuple[int, ...]
    batch: Private[Samples]
    served: int = 0


def _sealed(waiting: Outgoing) -> _Sealed:
    """A sealed message that was found on disk."""
    return _Sealed(waiting, open_signed(waiting.body).envelope.seq, hashlib.sha256(waiting.body).digest())


@record
class Member:
    """The device that a runner runs: its key, its ledger, and the server's key that receipts must be signed with."""

    key: Key
    ledger: Ledger
    server_key: bytes
    budgets: tuple[Budget, ...]
    recovered: bool = False
    """Whether its ledger began from a statement: then nobody knows which rows of which source were given."""
    exhausted: bool = False
    """Whether nobody knows what the device gave: then it gives nothing more."""
    exhaust: Callable[[], None] = lambda: None
    """Note in the folder, for good, that nobody knows what the device gave."""


def terms(folder: Folder, task: Task, protocol: Protocol) -> Callable[[Key, Ledger], Member]:
    """Makes members of a folder: with the task's budget and the owner's, which are fixed here for all of them.

    On doubt about what a device has given, nothing is allowed to it.
    """
    server, own, limit = folder.server, folder.budget, task.privacy.budget
    recovered, exhausted = folder.recovered, folder.exhausted
    if server is None:
        raise CrowdmlError(f"{folder.path} has not joined a server. Join with `crowdml join URL CODE`.")
    public = bytes.fromhex(server.key)
    owners = () if own is None else (own.to_give_under(),)
    tasks: dict[bytes | None, Budget] = {}
    if limit is not None:
        plan = Price.of(protocol, task).sample(task.privacy.uses)
        for whose in (task.hash, None):
            tasks[whose] = Budget(limit.epsilon, task.privacy.delta, limit.samples, task=whose, plan=plan)

    def member(key: Key, ledger: Ledger) -> Member:
        # After a lost ledger nobody knows which task took what: then all of it counts against this one.
        whose = None if ledger.device in recovered else task.hash
        budgets = (*((tasks[whose],) if tasks else ()), *owners)
        if ledger.device in exhausted:
            budgets = tuple(Budget(each.epsilon, each.delta, 0) for each in budgets)
        exhaust = partial(folder.note_recovery, frozenset[int](), frozenset((ledger.device,)))
        return Member(key, ledger, public, budgets, ledger.device in recovered, ledger.device in exhausted, exhaust)

    return member


Losses = Mapping[str, tuple[Loss, Loss]]
"""What each row of a table costs a sample and the device: worked out once."""


def charges_of(
    task: Task, passages: Iterable[Passage], first: int, now: str, losses: Losses | None = None
) -> list[Charge]:
    """What went through the door, bound to the serials of the batch whose first sample has serial `first`.

    `losses` are those of the table that the passages are of, where somebody has them at hand and they are always the
    same.
    """
    return [
        Charge(
            task.hash,
            passage.row,
            *(_losses_of(passage.priced) if losses is None else losses[passage.row]),
            passage.mechanism.observer,
            passage.mechanism.sensitivity.adjacency,
            first + passage.part.start,
            first + passage.part.stop - 1,
            now,
            *_alone(passage.mechanism),
        )
        for passage in passages
    ]


def _losses_of(mechanism: Mechanism) -> tuple[Loss, Loss]:
    return mechanism.loss, mechanism.device_loss


def _alone(mechanism: Mechanism) -> tuple[Loss | None, Loss | None]:
    """What a row costs if everyone else colludes, where that is not the loss itself (review, R11)."""
    if mechanism.observer is not Observer.AGGREGATE:
        return None, None
    return mechanism.alone, mechanism.device_alone


def statement_after(ledger: Ledger, charges: Sequence[Charge], samples: int) -> Statement:
    """The device's running totals once these charges on `samples` samples are written.

    What it names for the dearest sample bounds every sample's total at every delta: whoever reads it chooses one.
    """
    return Statement.of(*ledger.after(charges, samples))


class Halted(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """The server will not have this device, this task or this message: waiting does not help."""

    def __init__(self, kind: EndingKind, sentence: str) -> None:
        super().__init__(sentence)
        self.kind: EndingKind = kind


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
        self.patience, self.noise = patience or Patience(), noise or SystemSource()
        self.most, self.new_data, self.tell, self.place = most, new_data, tell, place
        self.tamper = tamper
        """How this device lies, where a fleet tests a study. It is charged as an honest one."""
        self.counts = Counts()
        self.path = f"/v1/tasks/{task.hash.hex()}"
        self._table = protocol.mechanisms(task)
        scheduled = any(row.scheduled for row in self._table.values())
        self._losses = None if scheduled else {name: _losses_of(row) for name, row in self._table.items()}
        self._dearest = self._price(0)
        self._dearest_at = min((charge.first_sample for charge in self._dearest), default=0)
        self._batch = protocol.batch(task)
        self._capacity = protocol.capacity(task)
        self._buffer = Buffer(self._batch, self._capacity)
        self._uses = task.privacy.uses
        self._serving: _Serving | None = None
        self._bodies: list[bytes] = []
        """The samples that were read last, where they will have to wait here until they have served as often as they
        may, or are learned from."""
        self._sensed: dict[int, bytes] = {}
        """Those that wait in the buffer, by serial, where they are learned from."""
        self._state: Any = first_device_turn(protocol, task, me=member.key.id, place=place)
        kept = _read_standing(member.ledger.state(task.hash))
        self._seq: int = kept.get("seq", 0)
        self._is_compared = is_new
        """Whether the ledger was held against the last message that the server has of this device. A server that never
        knew the device has none."""
        self._trips: int = kept.get("trips", self._seq)
        """Check-ins that were charged: which share of a schedule comes next. The server numbers messages, and could
        have one given twice if it numbered these."""
        if scheduled and member.recovered and "trips" not in kept:  # as many as those samples allowed, at the most
            self._trips = max(self._trips, member.ledger.next_serial() * self._uses // self._batch)
        if kept.get("state") is not None:
            self._state = unpack_state(self._state, kept["state"])
        self.letters = self._make_correspondence(kept.get("post"))
        self.carry: Callable[[bytes], None] = lambda data: None
        """Given every message that the server has acknowledged: to bring it to peers as well (device/peering.py)."""
        self.learner = self._make_learner(kept.get("own"))
        self._gathers = protocol.channel(task) is Channel.GATHERED
        self._gathering = protocol.gathers(task)
        self._gave: int | None = kept.get("gave")
        self._drawn_for = -1
        """The round for which the lottery drew this device, as it found it when it looked."""
        """The round of uploads that this device gave to last."""
        self._timers = Timers(kept.get("wakes"))
        self._look, self._mail_by = LOOK, 0.0
        self._offer: tuple[str, Any] | None = None
        self._offers = offers or Offers()
        self._pattern = _published(protocol, task)
        self._lazy, self._place = False, 0
        self._signs_reads = False
        self._not_before = 0.0
        self._changed, self._room = asyncio.Event(), asyncio.Event()
        self._ended: str | None = None
        self._failure: BaseException | None = None
        self._refused_in_a_row = 0
        self._told_faults = 1
        self._rounds = self._masked_rounds()

    # --- the life of a device ---

    async def run(self) -> Ending:
        """Until a budget, the source, the server or `most` ends it. What waits for an acknowledgement goes first."""
        sensing: asyncio.Task[None] | None = None
        try:
            await self._trust_ledger()
            await self._conditions()
            self._restore()  # first: what answers a refusal writes down how often the batch has served
            if self.member.ledger.resend(self.task.hash) or (self._rounds is not None and self._rounds.drawn):
                await self._compare_once()
            await self._send_outbox()
            if self._rounds is not None:
                await self._in_rounds(self._rounds.finish())
            await self._hear_peers(anew=self.learner is not None and self.learner.has_samples)
            self._lazy = self.source.waits and not len(self._buffer)
            if self._lazy:
                await self._find_place()
            else:
                sensing = asyncio.create_task(self._sense())
            while self.most is None or self.counts.check_ins < self.most:
                if not await self._ready():
                    stop = await self._heed(wait=True)
                    return Ending("source", self._why_ended()) if stop is None else Ending("stopped", stop)
                stop = await self._turn() or await self._heed()
                await self._hear_peers()
                if stop is not None:
                    return Ending("stopped", stop)
            made = self.counts.check_ins
            return Ending("limit", f"{made} check-in{'s were' if made != 1 else ' was'} made, as asked.")
        except BudgetExhausted as error:
            return Ending("budget", str(error))
        except Halted as error:
            return Ending(error.kind, str(error))
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
        while (left := self._not_before - self.clock.now()) > 0:
            if self.letters is None:
                await self.clock.sleep(left)
            else:
                await self.clock.sleep(min(left, self._look))
                await self._look_again()

    def _price(self, trip: int) -> list[Charge]:
        """The dearest form of a step, the whole table, at the device's check-in number `trip`."""
        rows = [Passage(name, mechanism, mechanism.covers, trip) for name, mechanism in self._table.items()]
        return charges_of(self.task, rows, 0, self.clock.utc(), self._losses)

    def _afford(self, now: _Serving) -> _Serving:
        """The batch with its serials, if the budgets allow it the dearest form of the step: the whole table.

        Asked before any noise is drawn. A batch that waits at its source would get the next serials.
        """
        ledger, size = self.member.ledger, len(now.serials)
        take = size if self._lazy and not now.served else 0
        with ledger.reading():
            if take:
                first = ledger.next_serial()
                now = replace(now, serials=tuple(range(first, first + size)))
            at = now.serials[0] + self._dearest_at
            dearest = self._dearest if self._losses is not None else self._price(self._trips)
            ledger.check(self.task.hash, dearest, self.member.budgets, at=at, take=take)
        return now

    async def _turn(self) -> str | None:
        """One check-in, or none where the protocol says nothing; a reason where the protocol stops."""
        now = self._serving or _Serving(*self._buffer.take())  # it waits on disk or at its source until it is charged
        try:
            now = self._afford(now)
        except BudgetExhausted:
            if not now.served:
                raise
            await self._drop(now)  # it has given what it may; a fresh one has all of its budget
            return None
        self._serving = now
        self._room.set()
        await self._conditions()
        if self._rounds is not None:
            async with self.gate:
                await self._compare_once()
            await self._next_round()
            return await self._contribute_masked(self._rounds, now)
        await self._pause()
        await self._next_round()
        async with self.gate:
            await self._compare_once()
            return await self._contribute(now)

    async def _drop(self, now: _Serving) -> None:
        self._serving = None
        write = partial(self.member.ledger.charge, self.task.hash, [], [], given=now.serials)
        await self.commit(partial(write, state=self._standing(self._state, self._seq, None)))

    async def _next_round(self) -> None:
        """Where uploads are gathered: until a round is open that this device did not give to."""
        if not self._gathers:
            return

        async def look() -> int:
            async with self.gate:
                version = int((await self._check_out()).version)
                if version != self._gave or not await self._is_lost():
                    return version
            self.tell(f"what this device gave to round {version} is in no sum of it: it gives again, and pays again")
            self._gave = None
            await self._keep_standing()
            return -1

        self._drawn_for = await wait_for_round(self._gave, look, self._rest, self.tell, self._lottery)

    async def _rest(self, looks: int) -> None:
        await self.clock.sleep(self.patience.pause(looks))
        await self._conditions()
        await self._pause()

    @property
    def _lottery(self) -> Callable[[int, int], bool] | None:
        """Whether this device is drawn for a round that it found open at so many looks; None: every device is."""
        drawn, name = self._gathering, self.member.key.id
        if drawn is None or drawn.drawn is None:
            return None
        return lambda number, looks: drawn.draws(self.task, number, name, looks)

    async def _publication(self) -> Any:
        """The publication to answer. If another round opened since this device looked, it waits to be drawn for that:
        the server would refuse what it paid for."""
        found = await self._check_out()
        if self._lottery is None or int(found.version) == self._drawn_for:
            return found

        async def look() -> int:
            nonlocal found
            found = await self._check_out()
            return int(found.version)

        self._drawn_for = await wait_for_round(self._gave, look, self._rest, self.tell, self._lottery)
        return found

    async def _is_lost(self) -> bool:
        """Whether the server does not have what this device gave last: its cohort came to nothing, or the server was
        put back to an earlier state."""
        if self._rounds is not None:
            return await self._rounds.came_to_nothing()
        shown = await self._compare()
        return shown is None or (shown.envelope.task == self.task.hash and shown.envelope.seq < self._seq)

    async def _contribute(self, now: _Serving) -> str | None:
        self._serving = None
        turn = self._hear(Sensed(now.batch), None)
        self._state = turn.state
        self.tell("sensed")
        tags = self._timers.set(turn.wakes, self.clock.now())
        while turn.stopped is None and (event := await self._next_event(turn, tags)) is not None:
            turn = self._hear(event, self.noise)
            tags += self._timers.set(turn.wakes, self.clock.now())
            if not turn.said and not turn.passages and (turn.asks or self._timers.left(0.0, tags) is not None):
                self._state = turn.state  # the batch is still under way
                continue
            self._gave = self._round_of(*(message for _, message in turn.said))
            sealed = await self._write(turn, now, self._sealed_messages(turn))
            self._state = turn.state
            self.tell("charged")
            for message in sealed:
                if not await self._check_in(message):
                    await self._send_outbox()
                    break
            break
        return _sentence(turn)

    def _round_of(self, *messages: Any) -> int | None:
        """The round that these are for; where nothing is said, the one that this device gave to last."""
        return int(messages[0].version) if self._gathers and messages else self._gave

    async def _next_event(self, turn: Outcome, tags: Sequence[str]) -> Any:
        """What a device hears next while a batch is under way: the publication that it asked for, or a timer."""
        if turn.asks:
            publication = await self._publication()
            self.tell("checked out")
            return publication
        while self._timers.left(0.0, tags) is not None:
            await self.clock.sleep(self._timers.left(self.clock.now()) or 0.0)
            if (tag := self._timers.take(self.clock.now())) is not None:
                return Woken(tag)
        return None

    async def _heed(self, *, wait: bool = False) -> str | None:
        """Hear the timers that ran out between two batches, or `wait` for all of them; a reason where one stops."""
        while (left := self._timers.left(self.clock.now())) is not None and (wait or not left):
            await self.clock.sleep(left)
            if (tag := self._timers.take(self.clock.now())) is None:
                continue
            turn = self._hear_timer(tag, Woken(tag))
            if turn.asks and turn.stopped is None:
                turn = self._hear_timer(tag, await self._check_out())
            await self._keep_standing()
            if turn.stopped is not None:
                return _sentence(turn)
        return None

    def _hear_timer(self, tag: str, event: Any) -> Outcome:
        """A turn between two batches: nothing may leave, and its state and its timers are kept."""
        turn = self._hear(event, self.noise)
        if turn.said or turn.passages:
            raise ProtocolError(
                f"protocol {self.protocol.name!r} says something when its timer {tag!r} runs out and no batch is "
                "under way: there is no sample to charge. Nothing was sent."
            )
        self._state = turn.state
        self._timers.set(turn.wakes, self.clock.now())
        return turn

    async def _keep_standing(self) -> None:
        standing = self._standing(self._state, self._seq, self._serving)
        await self.commit(partial(self.member.ledger.charge, self.task.hash, [], [], state=standing))

    def _hear(self, event: Any, noise: Source | None) -> Outcome:
        """One turn of this device: what it hears, and the noise for what it answers; without noise nothing leaves."""
        with blaming(f"protocol {self.protocol.name!r} failed", "Nothing was sent.", alone=True, quotes=False):
            return device_turn(
                self.protocol, self.task, self._state, event,
                noise=noise, me=self.member.key.id, trip=self._trips, place=self.place, now=self.clock.now(),
                tamper=self.tamper,
            )  # fmt: skip

    def _sealed_messages(self, turn: Outcome) -> list[Envelope]:
        """What a turn says, encoded; numbered when it is written."""
        assert turn.door is not None
        me, door = self.member.key.id, turn.door
        return [seal(self.task.hash, me, to, 0, message, door) for to, message in turn.said]

    # --- under masks ---

    def _masked_rounds(self) -> OwnRounds | None:
        """Where the task's sums alone are seen: what drives this device through its rounds."""
        if not self.protocol.is_masked(self.task):
            return None
        from crowdml.device.rounds import OwnRounds  # with its keys and curves: for masked tasks alone
        from crowdml.secagg.terms import terms_of

        ledger = self.member.ledger

        async def ask(method: str, path: str, body: bytes = b"") -> bytes:
            return (await self._ask(method, path, body, MSGPACK if body else {}, signed=True)).body

        async def ready() -> None:
            await self._conditions()
            await self._pause()

        return OwnRounds(
            self.member.key,
            ledger,
            terms_of(self.task, self._table),
            self.path,
            ask=ask,
            statement=lambda: statement_after(ledger, [], 0),
            commit=self.commit,
            gate=self.gate,
            clock=self.clock,
            ready=ready,
            chance=chance,
            tell=self.tell,
        )

    async def _contribute_masked(self, rounds: OwnRounds, now: _Serving) -> str | None:
        """Rounds until this device has drawn in one. The batch is kept for the next where a round ends before that."""
        turn = self._hear(Sensed(now.batch), None)
        self._state = turn.state
        self.tell("sensed")

        async def draw(publication: Publication, held: DeviceRound) -> bool:
            nonlocal turn
            turn, taken = await self._draw(rounds, now, publication, held)
            return taken

        if turn.stopped is None:
            self._timers.set(turn.wakes, self.clock.now())
            await self._in_rounds(rounds.contribute(draw))
        return _sentence(turn)

    async def _in_rounds(self, part: Awaitable[None]) -> None:
        from crowdml.device.rounds import Lied

        try:
            await part
        except Lied as error:
            raise Halted("refused", str(error)) from error
        except Problem as problem:
            if problem.slug == "totals-fell":
                await self._answer_fall(problem)
            raise _final(problem) from problem

    async def _draw(
        self, rounds: OwnRounds, now: _Serving, publication: Publication, held: DeviceRound
    ) -> tuple[Outcome, bool]:
        """Compute, draw, mask, charge; then check in. What the turn was, and whether the server took it."""
        from crowdml.device.rounds import MASKED_KIND, drawn
        from crowdml.secagg import device

        heard = self._heard(publication)
        turn = self._hear(heard, self.noise)
        vectors = self._said_under_masks(turn)
        self._timers.set(turn.wakes, self.clock.now())
        self._gave = self._round_of(heard)
        state = device.mask(rounds.terms, held, vectors)
        envelope = Envelope(self.task.hash, self.member.key.id, frozenset((SERVER,)), 0, MASKED_KIND, state.sent)
        (sealed,) = await self._write(turn, now, [envelope], drawn(state))
        self._state = turn.state
        self.tell("charged")
        return turn, await self._check_in(sealed) or await self._send_outbox()

    def _heard(self, publication: Publication) -> Any:
        from crowdml.secagg.refusals import Refused as Left

        _, kind, body = publication
        try:
            return self._publication_of(kind, body)
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
            await asyncio.to_thread(self.learner.learn, self._state)
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
            path = f"{self.path}/mailbox?after={self.letters.post.after}"
            try:
                box = open_mailbox(await self._ask_once(path))
            except Unreachable:
                break
            except Problem as problem:
                self.counts.problems[problem.slug] += 1
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
            letters.stand(open_held(await self._ask_once(f"{self.path}/places")))
        except Unreachable:
            return
        except Problem as problem:
            self.counts.problems[problem.slug] += 1
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
        state, heard, flaws = post.hear(self._state, letters, self.clock.now())
        post.post = replace(post.post, after=after)
        for flaw in flaws:
            self.tell(f"a letter was left aside: {SENTENCES[flaw]}. Others like it are counted.")
        if letters:
            self._state = state
            await self._keep_standing()
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
        return learner.packed(self._trips, x, y, self.source.latest), learner.batches

    def _standing(self, state: Any, seq: int, again: _Serving | None, trips: int | None = None) -> bytes:
        """Where the protocol stands after a step, as it is kept on disk, and how often the batch has served that serves
        again. Its samples are in `waiting`, not here."""
        served = {} if again is None or not again.served else {"first": again.serials[0], "served": again.served}
        more: dict[str, Any] = {} if self.letters is None else {"post": self.letters.post.plain()}
        if self.learner is not None:
            more["own"] = self.learner.plain()
        if self._gave is not None:
            more["gave"] = self._gave
        if self._timers.due:
            more["wakes"] = self._timers.due
        made = {"seq": seq, "trips": self._trips if trips is None else trips}
        return pack({**made, "state": None if state is None else pack_state(state), **served, **more})

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
        kept = _read_standing(self.member.ledger.state(self.task.hash))
        first, served = kept.get("first", 0), kept.get("served", 0)
        if not served:
            return waiting
        span = range(first, first + self._batch)
        again = Buffer(self._batch, self._batch)
        for each in waiting:
            if each.serial in span:
                again.add(each.serial, *_unpack(each.body, self.task))
        if again.ready and served < self._uses:
            self._serving = _Serving(*again.take(), served)
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
            if self._uses > 1 or self.learner is not None:
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
        if self._serving is not None:
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
                raise Halted("stopped", stop)
        return True

    async def _until_changed(self) -> None:
        """Until there is a sample; meanwhile timers and what peers say are heard."""
        left = self._timers.left(self.clock.now())
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

    # --- check-out ---

    async def _check_out(self) -> Any:
        headers = {} if self._offer is None else {"If-None-Match": self._offer[0]}
        while True:
            answer = await self._ask("GET", f"{self.path}/publication", headers=headers)
            self.counts.check_outs += 1
            self._window(answer)
            if answer.headers.get("crowdml-state") != "paused":
                break
            await self._wait_out(max(1.0, self._not_before - self.clock.now()))  # nothing is charged meanwhile
        if answer.headers.get("crowdml-state") == "stopped":  # say so before anything is charged for nothing
            raise Halted("stopped", "The task is stopped. Nothing more was sent.")
        if answer.status == 304 and self._offer is not None:
            self.counts.unchanged += 1
            return self._offer[1]
        message = self._understood(answer)
        if tag := answer.headers.get("etag"):
            self._offer = (tag, message)
        return message

    def _understood(self, answer: Answer) -> Any:
        """The publication, of the kind and with the shapes that the task gives it. Nothing else reaches a handler."""
        try:
            return self._publication_of(answer.headers.get("crowdml-kind", ""), answer.body)
        except ValueError as error:
            raise Halted("refused", f"The server's publication cannot be used: {error}. Nothing was sent.") from error

    def _publication_of(self, kind: str, body: bytes) -> Any:
        """The publication in these bytes; a ValueError where it is not one of this task's."""
        if kind == self._pattern.kind and body == self._offers.body:
            return self._offers.message
        if kind != self._pattern.kind:
            raise ValueError(f"it is of kind {kind[:64]!r}")
        try:
            message = decode(kind, body)
            for entry in dataclasses.fields(message):
                ours, theirs = (np.asarray(getattr(each, entry.name)) for each in (self._pattern, message))
                if ours.shape != theirs.shape or not _same_type(ours, theirs):
                    raise ValueError(f"{entry.name} has another shape or type than the task says")
                if not np.isfinite(theirs).all():
                    raise ValueError(f"{entry.name} has numbers that are not finite")
        except (TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
            raise ValueError(str(error)) from error
        self._offers.body, self._offers.message = body, message
        return message

    def _window(self, answer: Answer) -> None:
        """Come back around the moment that the server named, spread by half of it to either side."""
        seconds = whole_number(answer.headers.get("crowdml-next", ""))
        if seconds is not None:
            self._not_before = self.clock.now() + min(seconds, 86_400) * (0.5 + chance())

    # --- charge, then send ---

    async def _write(
        self, turn: Outcome, now: _Serving, envelopes: Sequence[Envelope], round_: Round | None = None
    ) -> list[_Sealed]:
        """One transaction: charges, sealed messages, state; and the samples of the batch wait no more, or serve again.

        With masks also where the device stands in its round.
        """
        ledger, key, serials = self.member.ledger, self.member.key, now.serials
        charges = charges_of(self.task, turn.passages, serials[0], self.clock.utc(), self._losses)
        with ledger.reading():
            statement = statement_after(ledger, charges, len(serials))
            number, seq = ledger.next_seq(self.task.hash), self._seq
        sealed: list[_Sealed] = []
        marks: list[tuple[int, Mark]] = []
        for envelope in envelopes:
            seq += 1
            data = sign(replace(envelope, seq=seq), statement, key)
            digest = hashlib.sha256(data).digest()
            waiting = Outgoing(self.task.hash, number + len(sealed), data)
            sealed.append(_Sealed(waiting, seq, digest, hashlib.sha256(envelope.body).digest()))
            marks.append(self._mark(digest, seq, statement, 0 if round_ is None else round_.number))
        outbox = {each.waiting.seq: each.waiting.body for each in sealed}
        contents = {each.waiting.seq: each.content for each in sealed}
        served, place = now.served + 1, self._place
        again = replace(now, served=served) if served < self._uses else None
        own, batches = self._own(serials)
        trips = self._trips + bool(turn.passages)
        standing = self._standing(turn.state, seq, again, trips)
        write = partial(ledger.charge, outbox=outbox, contents=contents, state=standing)
        write = partial(write, remember=own, batches=batches)
        if self._lazy and not now.served:
            place += len(serials)
            kept = self._bodies if again is not None else []
            write = partial(
                write,
                take=range(serials[0], serials[-1] + 1),
                source=self.source.name,
                taken=self.source.before + place,
                keep=kept,
            )
        else:
            write = partial(write, given=() if again is not None else serials)
        await self.commit(partial(write, self.task.hash, charges, self.member.budgets, round_=round_), marks)
        self._seq, self._trips, self._place, self._serving, self._bodies = seq, trips, place, again, []
        if self.learner is not None and own is not None:
            self.learner.add(own)
        return sealed

    async def _send_outbox(self) -> bool:
        """Send what was charged and not acknowledged, oldest first: the same bytes each time. Whether the last was
        taken."""
        taken = False
        while waiting := self.member.ledger.resend(self.task.hash):
            taken = await self._check_in(_sealed(waiting[0]))
        return taken

    async def _check_in(self, message: _Sealed) -> bool:
        """Whether the server took it; where it refused, the outbox is as the refusal asks for."""
        started = time.perf_counter()
        try:
            answer = await self._ask("POST", f"{self.path}/check-in", message.waiting.body, MSGPACK)
        except Problem as problem:
            await self._answer_refusal(message.waiting, problem)
            return False
        self.counts.seconds.append(time.perf_counter() - started)
        self.tell("sent")
        self._verify(message, answer.body)
        self._window(answer)
        await self.commit(partial(self.member.ledger.acknowledge, self.task.hash, message.waiting.seq, answer.body))
        self.counts.check_ins += 1
        self.counts.repeated += answer.status == 200
        self._refused_in_a_row = 0
        self.carry(message.waiting.body)
        self.tell("acknowledged")
        return True

    def _verify(self, message: _Sealed, data: bytes) -> None:
        """The receipt is for these bytes, and the server that this device knows signed it."""
        try:
            receipt = open_receipt(data)
        except Problem as problem:
            raise Halted("refused", f"The server's receipt cannot be read: {problem}") from problem
        seq = message.seq
        if not receipt.answers(self.task.hash, self.member.key.id, seq, message.digest):
            raise Halted("refused", f"The receipt for check-in {seq} is for another one. It stays in the outbox.")
        if not receipt.verify(self.member.server_key):
            raise Halted(
                "refused",
                f"The receipt for check-in {seq} is not signed by the server that this device joined. It stays in the "
                "outbox. Ask whoever runs the study.",
            )

    async def _answer_refusal(self, message: Outgoing, problem: Problem) -> None:
        expected = problem.extra.get("expected")
        if problem.status == 409 and type(expected) is int and 1 <= expected <= LARGEST_INTEGER:
            self._count_refusal(problem)
            await self._notice_copy(expected)
            await self._renumber(message, expected)
        elif problem.slug == "totals-fell":
            await self._answer_fall(problem)
        elif problem.status in (413, 422) and problem.slug != "stale":  # that one is of a server that was put back
            self.counts.refused += 1
            raise Halted(
                "refused",
                f"The server does not take what this device says: {problem} It would not take the next message "
                "either, so nothing more is charged. This one is paid for: it waits in the outbox, and is sent first "
                "when the device is started again. Ask whoever runs the study.",
            )
        elif problem.status in (400, 422) or problem.slug in ("round-over", "round-refused"):
            self.counts.refused += 1
            if problem.slug != "round-over":  # late: that is nobody's fault
                self._count_refusal(problem)
            last = open_signed(message.body).envelope.seq - 1
            if self._rounds is not None or problem.slug != "round-over":
                self._gave = None  # it is in no round: its cohort, if it was in one, does without it
            await self._replace(message, {}, last)
        else:
            raise _final(problem)

    def _count_refusal(self, problem: Problem) -> None:
        self._refused_in_a_row += 1
        if self._refused_in_a_row > MOST_REFUSALS:
            raise Halted("refused", f"The server refused {MOST_REFUSALS + 1} messages in a row: {problem}")

    # --- an older ledger ---

    async def _compare_once(self) -> None:
        """Before this process sends or draws anything: hold the ledger against what the server can prove."""
        if not self._is_compared:
            await self._compare()
            self._is_compared = True

    async def _compare(self) -> Signed | None:
        """Stop for good where the server has a message of this device that its ledger does not know: the ledger is an
        older copy. Otherwise that message; None where the server has none.

        A server that was restored shows an older message, which the ledger knows.
        """
        ledger, key = self.member.ledger, self.member.key
        try:
            answer = await self._ask("GET", statement_path(key), signed=True)
        except Problem as problem:
            if problem.status in (404, 405) or problem.slug in ("unknown-device", "revoked", "withdrawn"):
                return None  # it has none; of those that it knows no more, the next request says so
            raise _final(problem) from problem
        signed = open_own(answer.body, key)
        if signed is None or is_known(ledger, signed, recovered=self.member.recovered):
            return signed
        self.member.exhaust()
        raise BudgetExhausted(
            f"The server has a message that this device signed when it had given {signed.statement.samples} samples, "
            f"and its ledger, which knows of {ledger.samples_given()}, does not have it. {_COPIED}"
        )

    async def _notice_copy(self, expected: int) -> None:
        """Stop where the server says that it has messages which this ledger does not know: a copy may have given them.

        For good if it can show one that this device signed. Its number alone proves nothing: anyone on the way may have
        written it. A server that was restored has fewer messages than the ledger knows, and the device goes on from
        there.
        """
        shown, known = await self._compare(), self._highest_taken()
        if known is None or expected - 1 <= known or self._is_number(shown, expected - 1):
            return
        raise Halted(
            "refused",
            f"The server says that it has {expected - 1} messages of this device for this task, and its ledger knows "
            f"of {known}; it shows none that the ledger lacks. {_UNPROVEN}",
        )

    def _highest_taken(self) -> int | None:
        """The highest number of a message that the server ever took, as far as the ledger knows; None: it began from a
        statement, which does not tell it of every task."""
        ledger = self.member.ledger
        if numbers := [open_receipt(each).seq for each in ledger.receipts(self.task.hash)]:
            return max(numbers)
        if self.member.recovered:
            return None
        waiting = ledger.resend(self.task.hash)
        return _sealed(waiting[0]).seq - 1 if waiting else self._seq

    def _is_number(self, shown: Signed | None, seq: int) -> bool:
        """Whether this is the check-in of this task with that number."""
        if shown is None or shown.envelope.kind in ROUND_KINDS:
            return False
        return (shown.envelope.task, shown.envelope.seq) == (self.task.hash, seq)

    async def _answer_fall(self, problem: Problem) -> NoReturn:
        """The server says that this device's totals fell: for good if it can show the message with the larger ones."""
        await self._compare()
        raise Halted("refused", f"{problem.detail} The server shows no message that the ledger lacks. {_UNPROVEN}")

    def _mark(self, digest: bytes, seq: int, statement: Statement, round_: int) -> tuple[int, Mark]:
        mark = Mark(seq, statement.samples, digest.hex(), round_, self.task.hash.hex())
        return self.member.ledger.device, mark

    async def _renumber(self, message: Outgoing, expected: int) -> None:
        """The server never took these bytes under their number: the same release, under the number it expects.

        No noise is drawn and nothing is charged again. The old bytes go in the transaction that writes the new ones,
        so that the release can be counted once at most.
        """
        signed = open_signed(message.body)
        data = sign(replace(signed.envelope, seq=expected), signed.statement, self.member.key)
        found = None if self._rounds is None else self.member.ledger.round(self.task.hash)
        round_ = 0 if found is None else found.number
        marks = [self._mark(hashlib.sha256(data).digest(), expected, signed.statement, round_)]
        content = hashlib.sha256(signed.envelope.body).digest()
        await self._replace(message, {self.member.ledger.next_seq(self.task.hash): data}, expected, content, marks)

    async def _replace(
        self, message: Outgoing, outbox: Mapping[int, bytes], seq: int, content: bytes = b"", marks: DeviceMarks = ()
    ) -> None:
        write = partial(self.member.ledger.charge, self.task.hash, [], [], outbox=outbox, done=[message.seq])
        state = self._standing(self._state, seq, self._serving)
        await self.commit(partial(write, contents=dict.fromkeys(outbox, content), state=state), marks)
        self._seq = seq

    # --- asking the server ---

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        signed: bool = False,
    ) -> Answer:
        """Ask until there is an answer: a server that is away, busy or full is asked again, later and later.

        `signed`: a read that says who asks, as of a round.
        """
        failures = 0
        while True:
            sent = dict(headers or {})
            if (signed or self._signs_reads) and method == "GET":
                from crowdml.wire.requests import authorize

                target = self.client.prefix + path
                sent["Authorization"] = authorize(self.member.key, method, target, body, now=self.clock.now())
            try:
                return await self.client.request(method, path, body, sent, largest=LARGEST_ANSWER)
            except Unreachable as error:
                pause = self.patience.pause(failures)
                self.tell(f"waiting {pause:.0f} s: {error}")
            except Problem as problem:
                self.counts.problems[problem.slug] += 1
                if problem.slug in ("closed", "authorization") and not (signed or self._signs_reads):
                    self._signs_reads = True
                    continue
                if problem.status not in (408, 429) and problem.status < 500:
                    raise (_final(problem) if method == "GET" and not signed else problem) from None
                if problem.slug == "task-paused":
                    await self._wait_out((problem.retry_after or 1) * (1 + chance()))
                    continue
                pause = self.patience.pause(failures, problem.retry_after)
                self.tell(f"waiting {pause:.0f} s: {problem}")
            failures += 1
            self.counts.retries += 1
            await self.clock.sleep(pause)
            await self._conditions()

    async def _wait_out(self, seconds: float) -> None:
        """The task is paused: look again later. That does not grow, for a round waits no longer for its devices."""
        self.tell(f"waiting {seconds:.0f} s: the task is paused")
        self.counts.retries += 1
        await self.clock.sleep(seconds)
        await self._conditions()


def _final(problem: Problem) -> Halted:
    kinds: dict[str, EndingKind] = {"task-stopped": "stopped", "withdrawn": "withdrawn", "revoked": "revoked"}
    return Halted(kinds.get(problem.slug, "refused"), f"{problem.title}: {problem.detail} {problem.help}")


_COPIED = (
    "So this folder is a copy of another one, or an older copy was put in its place, and samples may have been given "
    "that it does not count. From here this device gives nothing more. Go on in the folder that gave them; if there is "
    "none, join with another --folder, and with samples that were never given."
)

_UNPROVEN = (
    "So nothing is proven, and this run ends here: what was charged waits as it is, and is sent first when the device "
    "is started again. If it hears the same then, ask whoever runs the study."
)

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


def _published(protocol: Protocol, task: Task) -> Any:
    """What the server first offers: every later publication has its kind and shapes."""
    message = first_turn(protocol, task).published
    if message is None or type(message) not in KINDS.values():
        raise ProtocolError(f"protocol {protocol.name!r} offers nothing at its start, so no device can check out.")
    return message


def _same_type(ours: Any, theirs: Any) -> bool:
    """Arrays travel with their type, which must be ours to the bit; a lone number without, and must fit into ours."""
    if ours.ndim:
        return theirs.dtype == ours.dtype.newbyteorder("<")
    return ours.dtype.kind == theirs.dtype.kind and bool(theirs.astype(ours.dtype) == theirs)


def _sentence(turn: Outcome) -> str | None:
    return None if turn.stopped is None else turn.stopped.sentence


def _read_standing(data: bytes | None) -> dict[str, Any]:
    """What is kept on disk of a task: `seq`, the number of the last message that was sealed (the server counts from 1);
    `trips`, check-ins that were charged, whatever became of them; `state`, of the protocol; `first` and `served`, the
    first serial of the batch that serves again and how often it has; `post` and `own`, what became of letters and of
    predictions; `gave`, the round of uploads that the last one was for; `wakes`, timers and when they run out."""
    return {} if data is None else msgpack.unpackb(data)


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
