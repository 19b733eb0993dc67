"""One device's life with one task: sense, check out, compute, let out, charge, check in; again and again.

The order is the promise. Whether the budgets allow a step is asked before noise is drawn; its charges, its sealed
messages and its state are on disk before a byte is sent; and what is sent are those bytes, until the server has
acknowledged them with a receipt that its pinned key signed. A crash anywhere between two of these steps sends nothing
that was not charged, and nothing twice under two numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import secrets
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeVar

import msgpack
import numpy as np

from crowdml.arrays import Samples
from crowdml.buffer import Buffer
from crowdml.device.client import Answer, Client, Unreachable
from crowdml.device.conditions import Conditions
from crowdml.device.folder import Folder
from crowdml.device.marks import Mark, Marks
from crowdml.device.sources import Sample, SampleSource
from crowdml.errors import BudgetExhausted, CrowdmlError, DataError, ProtocolError
from crowdml.messages import KINDS, SERVER, decode, seal
from crowdml.privacy.door import Door, Passage
from crowdml.privacy.losses import Loss
from crowdml.privacy.noise import Source, SystemSource
from crowdml.privacy.private import Private
from crowdml.protocol import CheckOut, Context, Protocol, Publish, Send, Sensed, Step, Stop, advance, quote
from crowdml.records import record
from crowdml.storage import Budget, Charge, Ledger, Outgoing
from crowdml.task import Task
from crowdml.wire.envelopes import LARGEST_ENVELOPE, open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import open_receipt
from crowdml.wire.statements import Statement

__all__ = [
    "Clock",
    "Commits",
    "Counts",
    "Ending",
    "Member",
    "Offers",
    "Patience",
    "Runner",
    "charges_of",
    "statement_after",
    "terms",
]

T = TypeVar("T")

MOST_REFUSALS = 3
"""Messages in a row that a server may refuse before a device stops: something is wrong with one of the two."""
MSGPACK = {"Content-Type": "application/msgpack"}

EndingKind = Literal["budget", "source", "limit", "stopped", "withdrawn", "revoked", "refused"]


@record
class Ending:
    """Why a device stopped, and the sentence for its owner."""

    kind: EndingKind
    reason: str


@dataclass
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


class Commits:
    """Writes to a ledger; with a `window`, those that come within so many seconds of each other in one transaction.

    What returns has been committed. One that is refused does not touch the others. What was marked is on disk before.
    """

    def __init__(self, ledger: Ledger, window: float = 0.0, marks: Marks | None = None) -> None:
        self._ledger, self._window, self._marks = ledger, window, marks
        self._waiting: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []

    def mark(self, device: int, digest: bytes, seq: int, statement: Statement) -> None:
        """This message is the device's last, from the next commit on: after a lost ledger no older one counts."""
        if self._marks is not None:
            self._marks.add(device, Mark(seq, statement.samples, digest.hex()))

    def _keep_marks(self) -> None:
        if self._marks is not None:
            self._marks.flush()

    async def __call__(self, work: Callable[[], T]) -> T:
        if not self._window:
            self._keep_marks()
            return work()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if not self._waiting:
            loop.call_later(self._window, self._flush)
        self._waiting.append((work, future))
        return await future

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        outcomes: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        failure: BaseException | None = None
        try:
            self._keep_marks()
            with self._ledger.together():
                for work, future in waiting:
                    try:
                        outcomes.append((future, work(), None))
                    except CrowdmlError as error:
                        outcomes.append((future, None, error))
        except CrowdmlError as error:  # nothing of it was written
            failure = error
        for future, value, error in outcomes:
            if future.cancelled():
                continue
            if failure or error:
                future.set_exception(failure or error or RuntimeError())
            else:
                future.set_result(value)
        for _, future in waiting[len(outcomes) :]:
            if not future.cancelled():
                future.set_exception(failure or RuntimeError("a write was lost"))


@dataclass
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


def _sealed(waiting: Outgoing) -> _Sealed:
    """The same of one that was found on disk."""
    return _Sealed(waiting, open_signed(waiting.body).envelope.seq, hashlib.sha256(waiting.body).digest())


@record
class Member:
    """Who a runner runs: a device's key, its ledger, and the server's key that receipts must be signed with."""

    key: Key
    ledger: Ledger
    server_key: bytes
    budgets: tuple[Budget, ...]
    recovered: bool = False
    """Whether its ledger began from a statement: then nobody knows which rows of which source were given."""


def terms(folder: Folder, task: Task, protocol: Protocol) -> Callable[[Key, Ledger], Member]:
    """Makes members of a folder: with the task's budget and the owner's, which are fixed here for all of them.

    On doubt about what a device has given, nothing is allowed to it.
    """
    server, own, limit = folder.server, folder.budget, task.privacy.budget
    recovered, exhausted = folder.recovered, folder.exhausted
    if server is None:
        raise CrowdmlError(f"{folder.path} has not joined a server. Join with `crowdml join URL CODE`.")
    public = bytes.fromhex(server.key)
    owners = () if own is None else (own.budget,)
    tasks: dict[bytes | None, Budget] = {}
    if limit is not None:
        plan = quote(protocol, task).sample()
        for whose in (task.hash, None):
            tasks[whose] = Budget(limit.epsilon, task.privacy.delta, limit.samples, task=whose, plan=plan)

    def member(key: Key, ledger: Ledger) -> Member:
        # After a lost ledger nobody knows which task took what: then all of it counts against this one.
        whose = None if ledger.device in recovered else task.hash
        budgets = (*((tasks[whose],) if tasks else ()), *owners)
        if ledger.device in exhausted:
            budgets = tuple(Budget(each.epsilon, each.delta, 0) for each in budgets)
        return Member(key, ledger, public, budgets, ledger.device in recovered)

    return member


Losses = Mapping[str, tuple[Loss, Loss]]
"""What each row of a table costs a sample and the device: worked out once."""


def charges_of(
    task: Task, passages: Iterable[Passage], first: int, now: str, losses: Losses | None = None
) -> list[Charge]:
    """What went through the door, bound to the serials of the batch whose first sample has serial `first`.

    `losses` are those of the table that the passages are of, where somebody has them at hand.
    """
    return [
        Charge(
            task.hash,
            passage.row,
            *((passage.mechanism.loss, passage.mechanism.device_loss) if losses is None else losses[passage.row]),
            passage.mechanism.observer,
            passage.mechanism.sensitivity.adjacency,
            first + passage.part.start,
            first + passage.part.stop - 1,
            now,
        )
        for passage in passages
    ]


def statement_after(ledger: Ledger, charges: Sequence[Charge], samples: int) -> Statement:
    """The device's running totals once these charges on `samples` samples are written.

    What it names for the dearest sample bounds every sample's total at every delta: whoever reads it chooses one.
    """
    return Statement.of(*ledger.after(charges, samples))


class Refused(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
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
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        _check_share(source.name, member.ledger.sources())
        self.member, self.task, self.protocol, self.client, self.source = member, task, protocol, client, source
        self.commit = commit or Commits(member.ledger)
        self.gate = gate or asyncio.Semaphore(1)
        """Devices of a fleet that are at work at once: the others wait before they check out."""
        self.conditions, self.clock = conditions or Conditions(), clock or Clock()
        self.patience, self.noise = patience or Patience(), noise or SystemSource()
        self.most, self.new_data, self.tell = most, new_data, tell
        self.counts = Counts()
        self.path = f"/v1/tasks/{task.hash.hex()}"
        self._table = protocol.mechanisms(task)
        self._losses = {name: (row.loss, row.device_loss) for name, row in self._table.items()}
        rows = [Passage(name, mechanism, mechanism.covers) for name, mechanism in self._table.items()]
        self._dearest = charges_of(task, rows, 0, self.clock.utc(), self._losses)
        self._dearest_at = min((charge.first_sample for charge in self._dearest), default=0)
        self._batch = protocol.batch(task)
        self._capacity = max(self._batch, int(task.protocol.get("buffer") or 10 * self._batch))
        self._buffer = Buffer(self._batch, self._capacity)
        self._state: Any = protocol.device.start(task, Context(me=member.key.id)).state
        self._seq = _read_seq(member.ledger.state(task.hash))
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

    # --- the life of a device ---

    async def run(self) -> Ending:
        """Until a budget, the source, the server or `most` ends it. What waits for an acknowledgement goes first."""
        sensing: asyncio.Task[None] | None = None
        try:
            await self._conditions()
            await self._send_outbox()
            self._restore()
            self._lazy = self.source.waits and not len(self._buffer)
            if self._lazy:
                await self._find_place()
            else:
                sensing = asyncio.create_task(self._sense())
            while self.most is None or self.counts.check_ins < self.most:
                if not await self._ready():
                    return Ending("source", self._ended or "The source has no more samples.")
                stop = await self._turn()
                if stop is not None:
                    return Ending("stopped", stop)
            made = self.counts.check_ins
            return Ending("limit", f"{made} check-in{'s were' if made != 1 else ' was'} made, as asked.")
        except BudgetExhausted as error:
            return Ending("budget", str(error))
        except Refused as error:
            return Ending(error.kind, str(error))
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
        while (left := self._not_before - self.clock.now()) > 0:
            await self.clock.sleep(left)

    def _afford(self, serials: tuple[int, ...]) -> tuple[int, ...]:
        """The serials of a batch, if the budgets allow it the dearest form of the step: the whole table.

        Asked before any noise is drawn. A batch that waits at its source would get the next serials.
        """
        ledger, size = self.member.ledger, len(serials)
        with ledger.reading():
            if self._lazy:
                first = ledger.next_serial()
                serials = tuple(range(first, first + size))
            take = size if self._lazy else 0
            ledger.check(
                self.task.hash, self._dearest, self.member.budgets, at=serials[0] + self._dearest_at, take=take
            )
        return serials

    async def _turn(self) -> str | None:
        """One check-in, or none where the protocol says nothing; a reason where the protocol stops."""
        serials, batch = self._buffer.take()  # it waits on disk or at its source until it is charged
        serials = self._afford(serials)
        self._room.set()
        await self._conditions()
        await self._pause()
        async with self.gate:
            return await self._contribute(serials, batch)

    async def _contribute(self, serials: tuple[int, ...], batch: Private[Samples]) -> str | None:
        step = advance(self.protocol.device, self.task, self._state, Sensed(batch), self._context())
        self._state = step.state
        self.tell("sensed")
        if any(isinstance(effect, CheckOut) for effect in step.effects):
            publication = await self._check_out()
            self.tell("checked out")
            door = Door(self._table, self.noise)
            context = Context(self.member.key.id, SERVER, self.clock.now(), door.release)
            step = advance(self.protocol.device, self.task, self._state, publication, context)
            sealed = await self._write(step, door, serials)
            self._state = step.state
            self.tell("charged")
            for message in sealed:
                if not await self._check_in(message):
                    await self._send_outbox()
                    break
        return next((each.reason for each in step.effects if isinstance(each, Stop) and _holds(each.when)), None)

    def _context(self) -> Context:
        return Context(me=self.member.key.id, sender=SERVER, now=self.clock.now())

    # --- sensing ---

    def _restore(self) -> None:
        """Samples that waited when this device last stopped. A batch is one span: what lies before a gap is dropped."""
        waiting = self.member.ledger.waiting(self.task.hash)
        start = max((i for i in range(1, len(waiting)) if waiting[i].serial != waiting[i - 1].serial + 1), default=0)
        self.member.ledger.discard(each.serial for each in waiting[:start])
        self._buffer = Buffer(
            self._batch, max(self._capacity, len(waiting))
        )  # one batch was under way beside a full one
        for each in waiting[start:]:
            self._buffer.add(each.serial, *_unpack(each.body, self.task))

    async def _find_place(self) -> None:
        """Go to the first row of the source that no step has used."""
        name = self.source.name
        place = 0 if name is None else self.member.ledger.taken(name)
        if self.member.recovered and not place and not self.new_data:
            raise BudgetExhausted(_AGAIN)
        await self.source.skip(place)
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
                if not samples:
                    self._ended = self.source.why_ended
                    break
                bodies = [_pack(sample) for sample in samples]
                keep = partial(ledger.keep, self.task.hash, bodies, source=name, taken=self.source.taken)
                serials = await self.commit(keep)
                for serial, body in zip(serials, bodies, strict=True):
                    self._buffer.add(serial, *_unpack(body, self.task))
                self._changed.set()
        except Exception as error:  # the main loop raises it: a task of its own would swallow it
            self._failure = error
        self._ended = self._ended or "The source has no more samples."
        self._changed.set()

    async def _read(self) -> bool:
        """A batch of rows that stay at their source until they are charged; false where there are too few."""
        while not self._buffer.ready:
            samples = await self.source.read(self._batch - len(self._buffer))
            if not samples:
                self._ended = self.source.why_ended
                return False
            x = np.array([sample.x for sample in samples], "<f4").reshape(len(samples), -1)
            self._buffer.fill(x, _labels([sample.y for sample in samples], self.task))
        return True

    async def _ready(self) -> bool:
        """Wait for a batch; false where none will come."""
        if self._lazy:
            return await self._read()
        while not self._buffer.ready:
            if self._failure is not None:
                raise self._failure
            if self._ended is not None:
                return False
            self._changed.clear()
            await self._changed.wait()
        return True

    # --- check-out ---

    async def _check_out(self) -> Any:
        headers = {} if self._offer is None else {"If-None-Match": self._offer[0]}
        answer = await self._ask("GET", f"{self.path}/publication", headers=headers)
        self.counts.check_outs += 1
        self._window(answer)
        if answer.headers.get("crowdml-state") == "stopped":  # say so before anything is charged for nothing
            raise Refused("stopped", "The task is stopped. Nothing more was sent.")
        if answer.status == 304 and self._offer is not None:
            self.counts.unchanged += 1
            return self._offer[1]
        message = self._understood(answer)
        if tag := answer.headers.get("etag"):
            self._offer = (tag, message)
        return message

    def _understood(self, answer: Answer) -> Any:
        """The publication, of the kind and with the shapes that the task gives it. Nothing else reaches a handler."""
        kind = answer.headers.get("crowdml-kind", "")
        if kind == self._pattern.kind and answer.body == self._offers.body:
            return self._offers.message
        try:
            if kind != self._pattern.kind:
                raise ValueError(f"it is of kind {kind[:64]!r}")
            message = decode(kind, answer.body)
            for entry in dataclasses.fields(message):
                ours, theirs = (np.asarray(getattr(each, entry.name)) for each in (self._pattern, message))
                if ours.shape != theirs.shape or not _same_type(ours, theirs):
                    raise ValueError(f"{entry.name} has another shape or type than the task says")
        except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
            raise Refused("refused", f"The server's publication cannot be used: {error}. Nothing was sent.") from error
        self._offers.body, self._offers.message = answer.body, message
        return message

    def _window(self, answer: Answer) -> None:
        """Come back around the moment that the server named, spread by half of it to either side."""
        seconds = answer.headers.get("crowdml-next", "")
        if seconds.isascii() and seconds.isdigit():
            self._not_before = self.clock.now() + min(int(seconds), 86_400) * (0.5 + chance())

    # --- charge, then send ---

    async def _write(self, step: Step[Any], door: Door, serials: tuple[int, ...]) -> list[_Sealed]:
        """One transaction: charges, sealed messages, state; and the samples of the batch wait no more."""
        ledger, key, now = self.member.ledger, self.member.key, self.clock.utc()
        charges = charges_of(self.task, door.passages, serials[0], now, self._losses)
        with ledger.reading():
            statement = statement_after(ledger, charges, len(serials))
            number, seq = ledger.next_seq(self.task.hash), self._seq
        sealed: list[_Sealed] = []
        for effect in step.effects:
            if isinstance(effect, Send) and _holds(effect.when):
                seq += 1
                to = frozenset((effect.to,)) if isinstance(effect.to, str) else effect.to
                envelope = seal(self.task.hash, key.id, to, seq, effect.message, door)
                data = sign(envelope, statement, key)
                digest = hashlib.sha256(data).digest()
                waiting = Outgoing(self.task.hash, number + len(sealed), data)
                sealed.append(_Sealed(waiting, seq, digest, hashlib.sha256(envelope.body).digest()))
                self.commit.mark(ledger.device, digest, seq, statement)
        outbox = {each.waiting.seq: each.waiting.body for each in sealed}
        contents = {each.waiting.seq: each.content for each in sealed}
        state, place = _write_state(step.state, seq), self._place + len(serials)
        if self._lazy:
            write = partial(
                ledger.charge,
                take=range(serials[0], serials[-1] + 1),
                source=self.source.name,
                taken=place,
            )
        else:
            write = partial(ledger.charge, given=serials)
        await self.commit(
            partial(write, self.task.hash, charges, self.member.budgets, outbox=outbox, contents=contents, state=state)
        )
        self._seq, self._place = seq, place
        return sealed

    async def _send_outbox(self) -> None:
        """Send what was charged and not acknowledged, oldest first: the same bytes each time."""
        while waiting := self.member.ledger.resend(self.task.hash):
            await self._check_in(_sealed(waiting[0]))

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
        self.tell("acknowledged")
        return True

    def _verify(self, message: _Sealed, data: bytes) -> None:
        """The receipt is for these bytes, and the server that this device knows signed it."""
        try:
            receipt = open_receipt(data)
        except Problem as problem:
            raise Refused("refused", f"The server's receipt cannot be read: {problem}") from problem
        seq = message.seq
        if not receipt.answers(self.task.hash, self.member.key.id, seq, message.digest):
            raise Refused("refused", f"The receipt for check-in {seq} is for another one. It stays in the outbox.")
        if not receipt.verify(self.member.server_key):
            raise Refused(
                "refused",
                f"The receipt for check-in {seq} is not signed by the server that this device joined. It stays in the "
                "outbox. Ask whoever runs the study.",
            )

    async def _answer_refusal(self, message: Outgoing, problem: Problem) -> None:
        expected = problem.extra.get("expected")
        if problem.status == 409 and isinstance(expected, int) and expected >= 1:
            self._count_refusal(problem)
            await self._renumber(message, expected)
        elif problem.status in (400, 413, 422):
            self.counts.refused += 1
            self._count_refusal(problem)
            last = open_signed(message.body).envelope.seq - 1
            await self._replace(message, {}, last)
        else:
            raise _final(problem)

    def _count_refusal(self, problem: Problem) -> None:
        self._refused_in_a_row += 1
        if self._refused_in_a_row > MOST_REFUSALS:
            raise Refused("refused", f"The server refused {MOST_REFUSALS + 1} messages in a row: {problem}")

    async def _renumber(self, message: Outgoing, expected: int) -> None:
        """The server never took these bytes under their number: the same release, under the number it expects.

        No noise is drawn and nothing is charged again. The old bytes go in the transaction that writes the new ones,
        so that the release can be counted once at most.
        """
        signed = open_signed(message.body)
        data = sign(replace(signed.envelope, seq=expected), signed.statement, self.member.key)
        self.commit.mark(self.member.ledger.device, hashlib.sha256(data).digest(), expected, signed.statement)
        content = hashlib.sha256(signed.envelope.body).digest()
        await self._replace(message, {self.member.ledger.next_seq(self.task.hash): data}, expected, content)

    async def _replace(self, message: Outgoing, outbox: Mapping[int, bytes], seq: int, content: bytes = b"") -> None:
        write = partial(self.member.ledger.charge, self.task.hash, [], [], outbox=outbox, done=[message.seq])
        await self.commit(partial(write, contents=dict.fromkeys(outbox, content), state=_write_state(None, seq)))
        self._seq = seq

    # --- asking the server ---

    async def _ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Answer:
        """Ask until there is an answer: a server that is away, busy or full is asked again, later and later."""
        failures = 0
        while True:
            signed = dict(headers or {})
            if self._signs_reads and method == "GET":
                from crowdml.wire.requests import authorize

                target = self.client.prefix + path
                signed["Authorization"] = authorize(self.member.key, method, target, body, now=self.clock.now())
            try:
                return await self.client.request(method, path, body, signed, largest=LARGEST_ENVELOPE)
            except Unreachable as error:
                pause = self.patience.pause(failures)
                self.tell(f"waiting {pause:.0f} s: {error}")
            except Problem as problem:
                self.counts.problems[problem.slug] += 1
                if problem.slug in ("closed", "authorization") and not self._signs_reads:  # read with a signature
                    self._signs_reads = True
                    continue
                if problem.status not in (408, 429) and problem.status < 500:
                    raise (_final(problem) if method == "GET" else problem) from None
                pause = self.patience.pause(failures, problem.retry_after)
                self.tell(f"waiting {pause:.0f} s: {problem}")
            failures += 1
            self.counts.retries += 1
            await self.clock.sleep(pause)
            await self._conditions()


def _final(problem: Problem) -> Refused:
    kinds: dict[str, EndingKind] = {"task-stopped": "stopped", "withdrawn": "withdrawn", "revoked": "revoked"}
    return Refused(kinds.get(problem.slug, "refused"), f"{problem.title}: {problem.detail} {problem.help}")


def _holds(when: Any) -> bool:
    return when is None or bool(when)


_AGAIN = (
    "This device lost its ledger, and with it the note of which samples it gave: those of this source may have been "
    "given before. Nothing was sent. If none of them ever was, say so once with --new-data; if you do not know, name "
    "another source."
)


def _check_share(name: str | None, known: Mapping[str, int]) -> None:
    """One share of a file or data set for a device's whole life: any two may have rows in common."""
    whole, _, share = (name or "").rpartition(":")
    for other in known:
        before, _, theirs = other.rpartition(":")
        if whole and whole == before and theirs != share:
            raise DataError(
                f"{whole} was read as share {theirs}, and share {share} of it may hold the same rows. Nothing was "
                f"read. Go on with share {theirs} (--shard, or --devices of a fleet), or name another source."
            )


def _published(protocol: Protocol, task: Task) -> Any:
    """What the server first offers: every later publication has its kind and shapes."""
    effects = protocol.server.start(task, Context(me=SERVER)).effects
    message = next((effect.message for effect in effects if isinstance(effect, Publish)), None)
    if message is None or type(message) not in KINDS.values():
        raise ProtocolError(f"protocol {protocol.name!r} offers nothing at its start, so no device can check out.")
    return message


def _same_type(ours: Any, theirs: Any) -> bool:
    """Arrays travel with their type, which must be ours to the bit; a lone number without, and must fit into ours."""
    if ours.ndim:
        return theirs.dtype == ours.dtype.newbyteorder("<")
    return ours.dtype.kind == theirs.dtype.kind and bool(theirs.astype(ours.dtype) == theirs)


def _write_state(state: Any, seq: int) -> bytes:
    """Where the protocol stands after a step that was charged. A batch that is under way is in `waiting`, not here."""
    if state is not None:
        raise ProtocolError(
            f"a device keeps no state of type {type(state).__name__} on disk yet. Nothing was sent. Let the handler "
            "end its turn with None."
        )
    return pack({"seq": seq, "state": None})


def _read_seq(data: bytes | None) -> int:
    """The number of the last message that was sealed; the server counts from 1."""
    return 0 if data is None else int(msgpack.unpackb(data)["seq"])


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
