"""All tasks of a server, and the queue in front of its one writing thread.

Requests arrive on the event loop and wait here; the writing thread takes whatever has gathered, verifies signatures,
and hands each task its batch. While it commits, the next batch gathers: the busier the server, the larger the batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from crowdml.errors import CrowdmlError, TaskError
from crowdml.privacy.noise import Source, SystemSource
from crowdml.protocols import check_for_devices, find
from crowdml.secagg import server as masking
from crowdml.secagg.server import ServerRound
from crowdml.server import plot_points
from crowdml.server.artefacts import check_artefacts, keep_artefacts
from crowdml.server.checks import SERVER_ID, SERVER_KEY
from crowdml.server.closing import RoundNow
from crowdml.server.codes import new_code
from crowdml.server.fold import Fold
from crowdml.server.hosting import next_state
from crowdml.server.limits import SPAN, Limits, Population, Queue, Rates
from crowdml.server.relay import Relay
from crowdml.server.rounds import CohortRounds, RoundFigures
from crowdml.server.runner import Answer, Offer, TaskRunner
from crowdml.server.sizes import LARGEST_CHECK_IN, check_sizes
from crowdml.server.validation import evaluate, is_due, unpack_rows
from crowdml.storage.server import EnrolmentRefused, Invitation, State, Store, StoreError, UnwrittenError
from crowdml.storage.server.looks import Look, Validation, rows_of, validations
from crowdml.task import Task
from crowdml.wire.envelopes import Signed
from crowdml.wire.keys import Key
from crowdml.wire.letters import pack_held
from crowdml.wire.problems import Problem
from crowdml.wire.requests import Enrolled, Enrolment

T = TypeVar("T")

WATCH_EVERY = 1.0
"""Seconds until a change by another command is noticed."""
LOOKS = 4
"""Times as often as it may check in, a device may look at a round: 20 times a second. Views ask for far less."""
BEAT = 0.05
"""Seconds after which the deadline of a phase is noticed."""
SWITCH = 0.0005
"""Seconds after which a busy event loop lets the writing thread go on: it gives way at each signature it verifies."""
LINGER = 0.003
"""Seconds at most between two batches: a larger one costs each of its check-ins less."""
PAUSED = 5
"""Seconds after which a device looks again at a task that is paused; longer where the crowd is large."""
AWAY = 2, 5
"""Seconds, from and to, after which those come back who were answered that the database is away: a connection that was
dropped is made anew at the next statement."""
log = logging.getLogger("crowdml.server")


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def check_hosted(task: Task, most: int = LARGEST_CHECK_IN) -> None:
    """Refuse a task that no server may run, before anything is written. `most`: bytes of a check-in that one takes."""
    check_for_devices(task)
    if task.as_published:
        raise TaskError(f"task {task.name!r} runs as published: that is for the simulator alone.")
    check_artefacts(task)
    check_sizes(task, find(task), most)  # before its arrays are made
    Fold(task)


def why_ended(store: Store, canonical: bytes) -> str | None:
    """Why this task of the store has ended, from its journal; None if it may go on. Nothing is written."""
    return TaskRunner(store, canonical, Key.generate(), utc_now).reason  # this key signs nothing


def code_hash(code: str) -> bytes:
    """Codes are long random texts, so a plain hash keeps them. A capital is its small letter, for people type them."""
    return hashlib.sha256(b"crowdml/invitation/1" + code.strip().lower().encode()).digest()


def _refusal(refused: EnrolmentRefused) -> Problem:
    """An invitation's refusal as it travels."""
    if refused.reason in ("revoked", "withdrawn"):
        return Problem(refused.reason, str(refused))
    extra = {} if refused.retry_after is None else {"retry_after": refused.retry_after}
    return Problem("too-many" if extra else "invitation", str(refused), **extra)


@dataclass(frozen=True)
class Hosted:
    """A task on this server, as the portal and the API show it."""

    task: Task
    state: State
    offer: Offer
    check_ins: int
    reason: str | None
    ended_by: str | None
    """The name of the rule that ended it; None while it goes on."""


@dataclass(frozen=True)
class Aside:
    """A task of this server that is not served, because its journal cannot be folded; `why` is a sentence."""

    name: str
    state: State
    why: str


@dataclass
class Hub:
    """The server's state in memory. `open` folds every journal; afterwards reads need no database."""

    store: Store
    key: Key
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], str] = utc_now
    ticks: Callable[[], float] = time.monotonic
    """For the deadlines of rounds: a clock that never jumps."""
    noise: Source = field(default_factory=SystemSource)
    """For looks at charged rows; the server draws no other noise."""
    runners: dict[bytes, TaskRunner] = field(default_factory=dict)
    states: dict[bytes, State] = field(default_factory=dict)
    aside: dict[bytes, Aside] = field(default_factory=dict)
    """Tasks that are put aside while the others are served."""
    closed: set[bytes] = field(default_factory=set)
    """Tasks whose publication and text only devices that joined may read."""
    artefacts: dict[str, bytes] = field(default_factory=dict)
    """Public files that the tasks name, by their SHA-256."""
    keys: dict[str, bytes] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """How many answers there were of each kind, for /metrics."""

    def __post_init__(self) -> None:
        self.devices = Rates(self.limits.device_rate, self.limits.device_burst)
        self.polls = Rates(LOOKS * self.limits.device_rate, LOOKS * self.limits.device_burst)
        """Looks at rounds, by device: for the event loop, as `devices` is for the writing thread."""
        self._joined: dict[str, frozenset[bytes]] = {}
        self._sets: dict[frozenset[bytes], frozenset[bytes]] = {}
        self._doubtful: set[bytes] = set()
        self._pointed: dict[bytes, int] = {}
        self.ending = asyncio.Event()
        """Set when the server begins to stop: what never ends by itself, such as a live page, ends then."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._summer = ThreadPoolExecutor(1, thread_name_prefix="summer")
        self._sums: set[asyncio.Task[None]] = set()
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="looker")
        self._unlooked: dict[bytes, int] = {}
        """Versions that could not be looked at: not tried again."""
        self._waiting: list[tuple[Signed, Callable[[Answer], None], bool]] = []
        self._waiting_bytes = 0
        self._in_hand = 0
        self.queue = Queue()
        self.population = Population()
        self._awake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._watching: list[asyncio.Task[None]] = []
        """What runs beside the queue until the server stops."""
        self.closing = False

    # --- start and stop ---

    @classmethod
    def open(cls, store: Store, limits: Limits | None = None) -> Hub:
        """Fold every task's journal. The server's own key lies in the store."""
        secret = store.setting(SERVER_KEY)
        if secret is None:
            secret = secrets.token_bytes(32)
            store.set_setting(SERVER_KEY, secret)
        hub = cls(store, Key.from_secret(secret), limits or Limits())
        if store.setting(SERVER_ID) is None:  # for `restore`, which compares the two
            with contextlib.suppress(StoreError):
                store.set_setting(SERVER_ID, hub.key.id.encode())
        for stored in store.tasks():
            try:
                hub._host(stored.canonical, stored.state)
            except Exception as error:
                if stored.hash in hub.runners and isinstance(error, StoreError):  # it could not write: that comes again
                    log.error("task %s can be read alone: %s", stored.name, error)
                    hub._doubtful.add(stored.hash)
                else:
                    hub._put_aside(stored.hash, stored.name, stored.state, error)
            if stored.closed:
                hub.closed.add(stored.hash)
        hub.keys = store.active_keys()
        hub._joined = store.joined()
        return hub

    def _host(self, canonical: bytes, state: State) -> TaskRunner:
        runner = TaskRunner(
            self.store,
            canonical,
            self.key,
            self.clock,
            snapshot_every=self.limits.snapshot_every,
            clock=self.ticks,
            noise=self.noise,
        )
        self.artefacts |= keep_artefacts(self.store, runner.task)
        self.runners[runner.task.hash] = runner
        self.states[runner.task.hash] = state
        ended = runner.fold.reason is not None and state == "running"  # and the server stopped before it wrote that
        if ended or (runner.refusal is not None and state != "stopped"):
            self._stop(runner)
        self._look_after_rounds(runner)
        return runner

    def _put_aside(self, hash_: bytes, name: str, state: State, error: Exception) -> None:
        """Serve the other tasks without one whose journal cannot be folded, and tell the operator why."""
        why = f"its protocol failed with {type(error).__name__}"  # the text could hold what a device gave
        why = str(error).rstrip(".") if isinstance(error, CrowdmlError) else why
        self.aside[hash_] = Aside(name, state, why)
        self.runners = {each: runner for each, runner in self.runners.items() if each != hash_}
        self._doubtful.discard(hash_)
        log.error("task %s is put aside: %s. The other tasks are served; mend this and restart the server", name, why)
        with contextlib.suppress(StoreError):
            self.store.record("put aside", self.clock(), f"{why}. Mend this, and restart the server", hash_)

    def _look_after_rounds(self, runner: TaskRunner) -> None:
        """A running task has an open round, a stopped or ended one none at all. One that pauses keeps what it has."""
        if runner.rounds is None:
            return
        state = self.states[runner.task.hash]
        if state == "running" and runner.reason is None:
            runner.rounds.open()
        elif state == "stopped":
            runner.rounds.abandon_all("the task was stopped")

    def _stop(self, runner: TaskRunner) -> None:
        self.states[runner.task.hash] = "stopped"
        self._look_after_rounds(runner)
        self._keep_state(runner.task.hash, "stopped", runner.reason or "")

    def _keep_state(self, hash_: bytes, state: State, why: str) -> None:
        """Write a task's state down, and an event of it for the operator."""
        self.store.set_state(hash_, state, self.clock())
        self.store.record(state, self.clock(), why, hash_)

    def start(self) -> None:
        sys.setswitchinterval(SWITCH)
        self._worker = asyncio.create_task(self._work())
        self._watching = [asyncio.create_task(each()) for each in (self._watch, self._beat, self._validate)]

    async def _watch(self) -> None:
        """Notice what `crowdml task start|stop` wrote beside us, and keep a point of each task that moved."""
        while not self.closing:
            with contextlib.suppress(StoreError):
                await self.write(self._follow)
                await self.write(self._point)
            await asyncio.sleep(WATCH_EVERY)

    def _follow(self) -> None:
        for hash_ in list(self._doubtful):
            self._fold_again(hash_)
        for stored in self.store.tasks():
            try:
                (self.closed.add if stored.closed else self.closed.discard)(stored.hash)  # first: never open meanwhile
                if stored.hash in self.aside:
                    continue
                if stored.hash not in self.runners:
                    self._host(stored.canonical, stored.state)
                    self._joined = self.store.joined()
                elif self.states[stored.hash] != stored.state:
                    self.states[stored.hash] = stored.state
                    runner = self.runners[stored.hash]
                    self._turned(runner)
                    if stored.state == "running" and runner.reason is not None:  # it ended by its own rule, for good
                        self._stop(runner)
            except StoreError as error:
                log.error("task %s cannot be hosted: %s", stored.name, error)
            except Exception as error:
                self._put_aside(stored.hash, stored.name, stored.state, error)

    def _turned(self, runner: TaskRunner) -> None:
        """The task's state changed: nobody could answer while it was not running, and devices come back by and by."""
        later = 2.0 * self.next_visit("paused")
        if runner.rounds is not None:
            runner.rounds.renew(later)
        runner.closing.renew(later)
        self._look_after_rounds(runner)

    def _point(self) -> None:
        for hash_, runner in self.runners.items():
            if hash_ not in self._doubtful and self._pointed.get(hash_) != runner.index:
                plot_points.record(self.store, runner, self.clock())
                self._pointed[hash_] = runner.index

    async def close(self) -> None:
        """Drain what waits, take snapshots, close the store."""
        self.closing = True
        self.ending.set()
        self._awake.set()
        for watching in (*self._watching, *self._sums):
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        if self._worker is not None:
            await self._worker
        await self.write(self._snapshots)
        self._writer.shutdown()
        self._summer.shutdown(cancel_futures=True)
        self._looker.shutdown(cancel_futures=True)
        self.store.close()

    def _snapshots_due(self) -> None:
        for hash_, runner in list(self.runners.items()):
            if runner.is_due and hash_ not in self._doubtful:
                try:
                    runner.take_snapshot()
                except Exception as error:  # what was acknowledged is in the journal: fold it again before going on
                    log.error("no snapshot of task %s: %s", runner.task.name, error)
                    self._doubtful.add(hash_)

    def _snapshots(self) -> None:
        with contextlib.suppress(StoreError):
            self._point()
        for hash_, runner in self.runners.items():
            if hash_ in self._doubtful:
                continue
            try:
                runner.take_snapshot()
            except StoreError as error:  # the journal has everything; the next start folds a little longer
                log.error("no snapshot of task %s: %s", runner.task.name, error)

    async def write(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run something in the writing thread: the one place that changes the store."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, work, *arguments)

    # --- check-ins ---

    def admit(self) -> None:
        """Let one more check-in wait, or refuse it before its body is read.

        It waits if the writer will come to it within `limits.patience` seconds, at the speed it has now. Else it is
        told when to come back: each that is refused a little later, so that they do not come back together.
        """
        if self.closing:
            raise Problem("not-ready", "The server is stopping.", retry_after=5)
        waiting = len(self._waiting) + self._in_hand
        if waiting < 32:
            return
        if waiting >= self.limits.waiting or self.queue.wait(waiting) > self.limits.patience:
            raise self._busy(waiting)

    def _busy(self, waiting: int) -> Problem:
        later = self.queue.later(time.monotonic(), crowd=len(self.keys), pace=self.limits.pace)
        return Problem("busy", f"{waiting} check-ins wait already.", retry_after=later)

    def submit(self, signed: Signed, done: Callable[[Answer], None], *, posted: bool = False) -> None:
        """Have a check-in, or what was `posted` to a round, taken with the next batch; `done` is called on the event
        loop, once it is durable."""
        if self.closing:
            raise Problem("not-ready", "The server is stopping.", retry_after=5)
        if len(self._waiting) >= self.limits.waiting or self._waiting_bytes > self.limits.bodies:
            raise self._busy(len(self._waiting))  # many were admitted, and their bodies came together
        self._waiting_bytes += len(signed.data)
        self._waiting.append((signed, done, posted))
        self._awake.set()

    async def check_in(self, signed: Signed, *, posted: bool = False) -> tuple[int, bytes]:
        """Wait until the check-in is durable; its status and receipt, or a Problem. `posted`: a message of a round,
        and the view of it."""
        future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

        def done(answer: Answer) -> None:
            if future.done():
                return
            if isinstance(answer, Problem):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        self.submit(signed, done, posted=posted)
        return await future

    async def _work(self) -> None:
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self._waiting:
                batch = self._waiting[: self.limits.batch]
                del self._waiting[: self.limits.batch]
                self._waiting_bytes -= sum(len(signed.data) for signed, _, _ in batch)
                self._in_hand = len(batch)
                began = time.monotonic()
                answers = await self.write(
                    self._accept, [signed for signed, _, _ in batch], [each[2] for each in batch]
                )
                taken = time.monotonic() - began
                self.queue.took(len(batch), taken)
                self._in_hand = 0
                for (_, done, _), answer in zip(batch, answers, strict=True):
                    try:
                        done(answer)
                    except Exception:
                        log.exception("an answer could not be given")
                await self._sum_up()
                if any(runner.is_due for runner in self.runners.values()):
                    await self.write(self._snapshots_due)
                if len(batch) > 1 and not self.closing:  # under load: those just answered are on their way back
                    await asyncio.sleep(min(LINGER, taken / 8))
            if self.closing:
                return

    # --- rounds ---

    def rounds(self, hash_: bytes) -> CohortRounds:
        """The rounds of a masked task; a Problem of any other."""
        found = self.find(hash_).rounds
        if found is None:
            raise Problem("not-found", "This task has no rounds: its devices check in one by one.")
        return found

    def round_figures(self, hash_: bytes, limit: int = 50) -> list[RoundFigures]:
        """The newest rounds of a task, for people to look at; of one without masks none."""
        runner = self.runners.get(hash_)
        return [] if runner is None or runner.rounds is None else runner.rounds.figures(limit)

    def round_now(self, hash_: bytes) -> RoundNow | None:
        """In a thread: the open round of uploads; None of a task that gathers none, or has ended."""
        runner = self.runners.get(hash_)
        return None if runner is None or self.states[hash_] == "stopped" else runner.closing.now()

    def look_at(self, hash_: bytes, device: str, number: int | None) -> bytes:
        """What this device is told of a round now, as it travels."""
        rounds = self.rounds(hash_)
        self.polls.take(device, time.monotonic())
        if (rests := self._rests(hash_)) is not None:
            raise rests
        return rounds.view(device, number).encode()

    # --- places and letters ---

    def relay(self, hash_: bytes) -> Relay:
        """The places of a task whose devices hold some; a Problem of any other."""
        found = self.find(hash_).relay
        if found is None:
            raise Problem("not-found", "This task has no places: its devices speak to the server alone.")
        return found

    def handed(self, hash_: bytes) -> int:
        """Bytes of letters that devices of this task read since the server started; of one without places none."""
        relay = self.find(hash_).relay
        return 0 if relay is None else relay.handed

    async def claim(self, hash_: bytes, place: int, device: str) -> bool:
        """Let a device stand at a place of the task, durably; whether that is new."""
        self.relay(hash_)
        self.polls.take(device, time.monotonic())

        def work() -> bool:
            if self.states[hash_] == "stopped":
                raise Problem("task-stopped", self.runners[hash_].reason or "The task was stopped.")
            if self.is_full():
                raise Problem("full", "The server's disk is full.", retry_after=300)
            return self.relay(hash_).claim(place, device)

        return await self.write(work)

    async def mailbox(self, hash_: bytes, device: str, after: int) -> bytes:
        """What was written to the place where this device stands, after that entry of the journal, as it travels."""
        relay = self.relay(hash_)
        if not relay.has_peers:
            raise Problem("not-found", "This task has no mailboxes: its devices have no peers.")
        self.polls.take(device, time.monotonic())
        place = relay.place_of(device)
        if relay.is_empty(place, after):
            return relay.read(place, after).encode()
        return (await asyncio.to_thread(relay.read, place, after)).encode()

    def held(self, hash_: bytes, device: str) -> bytes:
        """The devices at the places that this device hears, packed; without those that were revoked or withdrew."""
        relay = self.relay(hash_)
        self.polls.take(device, time.monotonic())
        near = set(relay.peers[relay.place_of(device)])
        return pack_held({place: name for name, place in relay.places.items() if place in near and name in self.keys})

    # --- the deadlines of rounds ---

    async def _beat(self) -> None:
        """Close phases whose time is over."""
        while not self.closing:
            try:
                due = [
                    hash_
                    for hash_, runner in self.runners.items()
                    if (runner.rounds and runner.rounds.is_due())
                    or (self.states[hash_] == "running" and hash_ not in self._doubtful and runner.closing.is_due())
                ]
                if due:
                    await self.write(self._advance, due)
                    await self._sum_up()
            except StoreError as error:
                log.error("rounds wait: %s", error)
                await asyncio.sleep(WATCH_EVERY)
            except Exception:  # a task that is in doubt is folded again: the others' rounds go on
                log.exception("rounds wait")
                await asyncio.sleep(WATCH_EVERY)
            await asyncio.sleep(BEAT)

    def _advance(self, due: list[bytes]) -> None:
        for hash_ in due:
            runner = self.runners[hash_]
            if hash_ in self._doubtful or self.states[hash_] != "running" or self.is_full():
                if runner.rounds is not None:
                    runner.rounds.renew()
                continue
            try:
                runner.advance()
                runner.closing.ring()
                self._settle(runner)
            except Exception:
                self._doubtful.add(hash_)
                raise

    def _settle(self, runner: TaskRunner) -> None:
        """Stop a task that ended by its own rule; pause one that cannot go on, and tell its operator why."""
        hash_, failure = runner.task.hash, runner.closing.failure
        if runner.reason is not None:
            self._stop(runner)
        elif failure is not None and self.states[hash_] == "running":
            self.states[hash_] = "paused"
            self._keep_state(hash_, "paused", f"round {runner.fold.version} cannot be closed: {failure}")

    async def _sum_up(self) -> None:
        """Have rounds summed up that are ready, beside the writing thread: it may take seconds."""
        for hash_, runner in list(self.runners.items()):
            if runner.unsummed:
                for state in await self.write(runner.take_unsummed):
                    task = asyncio.get_running_loop().create_task(self._sum(hash_, runner, state))
                    self._sums.add(task)
                    task.add_done_callback(self._sums.discard)

    async def _sum(self, hash_: bytes, runner: TaskRunner, state: ServerRound) -> None:
        assert runner.rounds is not None
        try:
            loop = asyncio.get_running_loop()
            closed = await loop.run_in_executor(self._summer, masking.close, runner.rounds.terms, state)
        except Exception:
            log.exception("task %s: round %d could not be summed", runner.task.name, state.round)
            closed = masking.abandon(state, "failed", "the server made a mistake")
        try:
            await self.write(self._finish, hash_, runner, state, closed)
        except StoreError as error:
            log.error("task %s: round %d: %s", runner.task.name, state.round, error)
        except Exception:
            log.exception("task %s: round %d could not be ended", runner.task.name, state.round)

    def _finish(self, hash_: bytes, runner: TaskRunner, before: ServerRound, closed: ServerRound) -> None:
        """In the writing thread: the total of a round, journalled and applied."""
        if self.runners.get(hash_) is not runner or hash_ in self._doubtful:
            return  # folded again: it will be summed anew
        try:
            runner.finish(before, closed)
            if self.states[hash_] == "running":
                self._settle(runner)
            if self.states[hash_] == "running":
                runner.advance()
        except Exception:
            self._doubtful.add(hash_)
            raise

    # --- validation ---

    async def _validate(self) -> None:
        while not self.closing:
            with contextlib.suppress(StoreError):
                await self.look()
            await asyncio.sleep(WATCH_EVERY)

    async def look(self) -> int:
        """Try the models that are due on the operator's own rows, beside everything else; how many looks were kept."""
        kept = 0
        for hash_, found in (await asyncio.to_thread(validations, self.store)).items():
            runner = self.runners.get(hash_)
            if runner is None or hash_ in self._doubtful or runner.offer.version <= self._unlooked.get(hash_, 0):
                continue
            if is_due(found, runner.offer.version, stopped=self.states[hash_] == "stopped"):
                kept += await self._look_at_rows(runner, found)
        return kept

    async def _look_at_rows(self, runner: TaskRunner, found: Validation) -> bool:
        version, weights = await self.write(lambda: (runner.offer.version, runner.fold.weights.copy()))

        def work() -> Look | None:
            data = rows_of(self.store, found.rows)
            if data is None:
                return None
            rows = unpack_rows(data, found.count, found.dimension)
            return evaluate(runner.task, weights, rows, version, self.clock(), found.terms.epsilon, self.noise)

        try:
            seen = await asyncio.get_running_loop().run_in_executor(self._looker, work)
            if seen is None:
                return False
            return await self.write(self._keep_look, runner, found.rows, seen)
        except StoreError:
            self._doubtful.add(runner.task.hash)
            raise
        except Exception as error:  # its text could hold a row
            self._unlooked[runner.task.hash] = version
            log.error("task %s: version %d was not looked at: %s", runner.task.name, version, type(error).__name__)
            return False

    def _keep_look(self, runner: TaskRunner, rows: int, seen: Look) -> bool:
        hash_ = runner.task.hash
        if self.runners.get(hash_) is not runner or hash_ in self._doubtful:
            return False  # folded again, or soon: the version is looked at later
        return runner.keep_look(rows, seen) is not None

    # --- in the writing thread ---

    def _accept(self, batch: list[Signed], posted: list[bool] | None = None) -> list[Answer]:
        """In the writing thread: authenticate, then each task takes its part of the batch. Never raises."""
        answers: list[Answer] = [Problem("internal", "The server made a mistake.")] * len(batch)
        by_task: dict[bytes, list[int]] = {}
        now = time.monotonic()
        for place, signed in enumerate(batch):
            try:
                self._authenticate(signed, now)
                self.population.saw(signed.envelope.sender, now)
                by_task.setdefault(signed.envelope.task, []).append(place)
            except Problem as problem:
                answers[place] = problem
            except StoreError as error:
                log.error("a check-in could not be authenticated: %s", error)
                answers[place] = self.unwritten(error)
            except Exception:
                log.exception("a check-in could not be authenticated")
        for hash_, places in by_task.items():
            part = [batch[place] for place in places]
            try:
                found = self._accept_for(hash_, part, [posted is not None and posted[place] for place in places])
            except StoreError as error:
                log.error("task %s: %s", hash_.hex()[:12], error)
                self._doubtful.add(hash_)
                found = [self.unwritten(error)] * len(part)
            except Exception:
                log.exception("a batch of %d check-ins failed", len(part))
                self._doubtful.add(hash_)
                continue
            for place, answer in zip(places, found, strict=True):
                answers[place] = answer
        return answers

    def _authenticate(self, signed: Signed, now: float) -> None:
        """Refuse who is not enrolled, what its key did not sign, a task it did not join, and too many at once."""
        sender = signed.envelope.sender
        public = self.keys.get(sender)
        if public is None:
            raise self.stranger(sender)
        if not signed.verify(public):
            raise Problem("signature", "The envelope is not signed by the key of its sender.")
        if signed.envelope.task not in self._tasks_of(sender):
            raise Problem("not-joined", f"Device {sender} was not invited to this task.")
        self.devices.take(sender, now)

    def _tasks_of(self, device: str) -> frozenset[bytes]:
        found = self._joined.get(device)
        if found is None:
            found = frozenset(self.store.tasks_of(device))
            found = self._sets.setdefault(found, found)  # a crowd has few different ones
            self._joined[device] = found
        return found

    def _accept_for(self, hash_: bytes, batch: list[Signed], posted: list[bool]) -> list[Answer]:
        if hash_ in self._doubtful:  # a write failed, and nobody knows what was kept: fold the journal again first
            self._fold_again(hash_)
        runner = self.runners.get(hash_)
        if runner is None:
            return [self._absent(hash_)] * len(batch)
        refusal = self._rests(hash_)
        if refusal is None and self.is_full():
            refusal = Problem("full", "The server's disk is full.", retry_after=300)
        if refusal is not None:
            return [runner.repeated(signed) or refusal for signed in batch]
        answers = runner.accept(batch) if runner.rounds is None else runner.accept_rounds(batch, posted)
        self._settle(runner)
        return answers

    def _fold_again(self, hash_: bytes) -> None:
        task, state = self.runners[hash_].task, self.states[hash_]
        try:
            self._host(task.canonical, state)
        except StoreError:
            raise
        except Exception as error:
            self._put_aside(hash_, task.name, state, error)
        self._doubtful.discard(hash_)

    def is_full(self) -> bool:
        free = self.store.free_space()
        return free is not None and free < self.limits.free_space

    def not_ready(self) -> Problem | None:
        """Why check-ins are not taken now; None if they are."""
        if self.closing or self.ending.is_set():
            return Problem("not-ready", "The server is stopping.", retry_after=5)
        if self._doubtful:
            return Problem(
                "not-ready", f"{len(self._doubtful)} journals are folded anew after a write failed.", retry_after=5
            )
        if self.is_full():
            return Problem("full", "The server's disk is full; reading goes on.", retry_after=300)
        try:
            self.store.setting(SERVER_KEY)
        except StoreError as error:
            return self.unwritten(error)
        return None

    def unwritten(self, error: StoreError) -> Problem:
        """What a peer hears when the store fails: that it shall come back. What the store said is in the log."""
        if isinstance(error, UnwrittenError) or self.is_full():
            return Problem("full", "The server could not write.", retry_after=60)
        soon = AWAY[0] + secrets.randbelow(AWAY[1] - AWAY[0] + 1)  # not all of them at once
        return Problem("busy", "The server's database is not there for now.", retry_after=soon)

    def stranger(self, device: str) -> Problem:
        known = self.store.device(device)
        if known is not None and known.withdrawn_at:
            return Problem("withdrawn", f"Device {device} has withdrawn.")
        if known is not None and known.revoked_at:
            return Problem("revoked", f"Device {device} was revoked.")
        return Problem("unknown-device", f"Device {device} is not enrolled here.")

    # --- devices and tasks ---

    async def enrol(self, request: Enrolment) -> tuple[bool, Enrolled]:
        def work() -> tuple[bool, Enrolled]:
            if self.is_full():
                raise Problem("full", "The server's disk is full.", retry_after=300)
            wanted = [bytes.fromhex(each) for each in request.tasks]
            try:
                done = self.store.enrol(code_hash(request.code), request.key, self.clock(), wanted)
            except EnrolmentRefused as refused:
                raise _refusal(refused) from refused
            self.keys[done.device] = request.key
            self._joined.pop(done.device, None)
            invited = tuple(hash_.hex() for hash_ in done.tasks)
            joined = tuple(each for each in invited if not request.tasks or each in request.tasks)
            return done.is_new, Enrolled(done.device, self.key.public, joined)

        return await self.write(work)

    async def check_invitation(self, code: str) -> tuple[Invitation, list[Hosted]]:
        """What a code admits to, if it would let a device in now: the invitation and its tasks. Nothing is used up."""
        try:
            found = await asyncio.to_thread(self.store.check_invitation, code_hash(code), self.clock())
        except EnrolmentRefused as refused:
            raise _refusal(refused) from refused
        return found, [each for each in self.hosted() if not found.tasks or each.task.hash in found.tasks]

    async def withdraw(self, device: str) -> None:
        def work() -> None:
            self.store.withdraw(device, self.clock())  # first: what is not written has not happened
            self.keys.pop(device, None)

        await self.write(work)

    async def revoke(self, device: str) -> bool:
        def work() -> bool:
            known = self.store.revoke(device, self.clock())
            self.keys.pop(device, None)
            return known

        return await self.write(work)

    async def add_task(self, task: Task, state: State = "running", *, closed: bool = False) -> bytes:
        """Host a task; one whose bytes are here already stays as it is. A `closed` one is so from the first moment.

        One that no server may run is a TaskError.
        """

        def work() -> bytes:
            if task.hash not in self.runners:
                check_hosted(task, self.limits.body)
            hash_ = self.store.add_task(task.canonical, task.name, self.clock(), state, closed=closed)
            if hash_ not in self.runners and hash_ not in self.aside:
                if closed:
                    self.closed.add(hash_)
                self._host(task.canonical, state)
                self._joined = self.store.joined()
                self.store.record("added", self.clock(), task.name, hash_)
            return hash_

        return await self.write(work)

    async def change(self, hash_: bytes, change: str, detail: str = "") -> State:
        """Start, resume, pause or stop a task; a ChangeError where `hosting` does not allow it."""

        def work() -> State:
            runner = self.runners[hash_]
            state = next_state(change, runner.task.name, self.states[hash_], lambda: runner.reason)
            self._keep_state(hash_, state, detail)
            self.states[hash_] = state
            self._turned(runner)
            return state

        return await self.write(work)

    async def set_closed(self, hash_: bytes, closed: bool) -> None:
        """Whether only devices that joined may read what the task publishes."""

        def work() -> None:
            self.store.set_closed(hash_, closed, self.clock())
            (self.closed.add if closed else self.closed.discard)(hash_)

        await self.write(work)

    async def may_read(self, device: str, hash_: bytes) -> bool:
        """Whether the device joined the task: then it may read what a closed one publishes."""
        known = self._joined.get(device)
        if known is None:
            known = await self.write(self._tasks_of, device)
        return hash_ in known

    async def invite(self, *, uses: int = 1, ends_at: str | None = None, rate: int | None = None,
                     tasks: tuple[bytes, ...] = (), label: str = "") -> str:  # fmt: skip
        """A new invitation; its code, which is kept nowhere."""
        code = new_code()
        await self.write(
            lambda: self.store.invite(
                code_hash(code), self.clock(), uses=uses, ends_at=ends_at, rate=rate, tasks=tasks, label=label
            )
        )
        return code

    def hosted(self) -> list[Hosted]:
        return [
            Hosted(runner.task, self.states[hash_], runner.offer, runner.check_ins, runner.reason, runner.ended_by)
            for hash_, runner in self.runners.items()
        ]

    def find(self, hash_: bytes) -> TaskRunner:
        runner = self.runners.get(hash_)
        if runner is None:
            raise self._absent(hash_)
        return runner

    def _absent(self, hash_: bytes) -> Problem:
        """What a peer hears of a task that nobody serves here. One that was put aside may come back."""
        if hash_ not in self.aside:
            return Problem("unknown-task", "No such task here.")
        later = self.next_visit("paused")
        return Problem("task-paused", "The task cannot be served now. The operator was told why.", retry_after=later)

    def window(self) -> int:
        """Seconds after which a device shall come back, so that all who are there keep to the pace; 0 for a few."""
        now = time.monotonic()
        window = int(self.population.size(len(self.keys), now) / self.limits.pace)
        self.population.span = max(SPAN, 2.0 * window)  # whoever keeps to the window is seen in it
        return window

    def next_visit(self, state: State) -> int:
        """Seconds after which a device of a task in this state shall come back. While a task is paused nobody checks
        in, so all registered devices count, and each stays away for up to twice as long."""
        return self.window() if state != "paused" else max(PAUSED, int(len(self.keys) / self.limits.pace))

    def _rests(self, hash_: bytes) -> Problem | None:
        """What a peer hears of a task that is stopped, paused or not begun; None while it runs."""
        state = self.states[hash_]
        if state == "running":
            return None
        if state == "stopped":
            return Problem("task-stopped", self.runners[hash_].reason or "The task was stopped.")
        what = "The task is paused: what was charged waits on the device." if state == "paused" else "It has not begun."
        return Problem("task-paused", what, retry_after=self.next_visit("paused"))
