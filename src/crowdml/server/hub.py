"""All tasks of a server, and the queue in front of its one writing thread.

Requests arrive on the event loop and wait here; the writing thread takes whatever has gathered, verifies signatures,
and hands each task its batch. While it commits, the next batch gathers: the busier the server, the larger the batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

from crowdml.errors import CrowdmlError
from crowdml.protocol import quote
from crowdml.server.limits import Limits
from crowdml.server.runner import Answer, Offer, TaskRunner
from crowdml.storage.server import EnrolmentRefused, State, Store, StoreError
from crowdml.task import Task
from crowdml.wire.envelopes import Signed
from crowdml.wire.keys import Key
from crowdml.wire.problems import Problem
from crowdml.wire.requests import Enrolled, Enrolment

T = TypeVar("T")


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def code_hash(code: str) -> bytes:
    """Codes are long random texts, so a plain hash keeps them."""
    return hashlib.sha256(b"crowdml/invitation/1" + code.encode()).digest()


@dataclass(frozen=True)
class Hosted:
    """A task on this server, as the portal and the API show it."""

    task: Task
    state: State
    offer: Offer
    check_ins: int
    reason: str | None


@dataclass
class Hub:
    """The server's state in memory. `open` folds every journal; afterwards reads need no database."""

    store: Store
    key: Key
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], str] = utc_now
    runners: dict[bytes, TaskRunner] = field(default_factory=dict)
    states: dict[bytes, State] = field(default_factory=dict)
    keys: dict[str, bytes] = field(default_factory=dict)
    joined: dict[str, frozenset[bytes]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Of answers by what happened: for /metrics."""

    def __post_init__(self) -> None:
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._waiting: list[tuple[Signed, asyncio.Future[tuple[int, bytes]]]] = []
        self._awake = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._closing = False

    # --- start and stop ---

    @classmethod
    def open(cls, store: Store, limits: Limits | None = None) -> Hub:
        """Fold every task's journal. The server's own key lies in the store."""
        secret = store.setting("server-key")
        if secret is None:
            secret = secrets.token_bytes(32)
            store.set_setting("server-key", secret)
        hub = cls(store, Key.from_secret(secret), limits or Limits())
        for stored in store.tasks():
            hub._host(stored.canonical, stored.state)
        hub.keys = store.active_keys()
        return hub

    def _host(self, canonical: bytes, state: State) -> TaskRunner:
        runner = TaskRunner(self.store, canonical, self.key, self.clock)
        self.runners[runner.task.hash] = runner
        self.states[runner.task.hash] = state
        return runner

    def start(self) -> None:
        self._worker = asyncio.get_running_loop().create_task(self._work())

    async def close(self) -> None:
        """Drain what waits, take snapshots, close the store."""
        self._closing = True
        self._awake.set()
        if self._worker is not None:
            await self._worker
        await self.write(self._snapshots)
        self._writer.shutdown()
        self.store.close()

    def _snapshots(self) -> None:
        for runner in self.runners.values():
            runner.take_snapshot()

    async def write(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run something in the writing thread: the one place that changes the store."""
        return await asyncio.get_running_loop().run_in_executor(self._writer, work, *arguments)

    # --- check-ins ---

    async def check_in(self, signed: Signed) -> tuple[int, bytes]:
        """Wait until the check-in is durable; its status and receipt, or a Problem."""
        if self._closing:
            raise Problem("not-ready", "The server is stopping.", retry_after=5)
        if len(self._waiting) >= self.limits.waiting:
            raise Problem("busy", f"{len(self._waiting)} check-ins wait already.", retry_after=2)
        future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._waiting.append((signed, future))
        self._awake.set()
        return await future

    async def _work(self) -> None:
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self._waiting:
                batch = self._waiting[: self.limits.batch]
                del self._waiting[: self.limits.batch]
                answers = await self.write(self._accept, [signed for signed, _ in batch])
                for (_, future), answer in zip(batch, answers, strict=True):
                    if future.cancelled():
                        continue
                    if isinstance(answer, Problem):
                        future.set_exception(answer)
                    else:
                        future.set_result(answer)
            if self._closing:
                return

    def _accept(self, batch: list[Signed]) -> list[Answer]:
        """In the writing thread: verify, then each task takes its part of the batch."""
        answers: list[Answer] = [Problem("internal", "not answered")] * len(batch)
        free = self.store.free_space()
        by_task: dict[bytes, list[int]] = {}
        for place, signed in enumerate(batch):
            public = self.keys.get(signed.envelope.sender)
            if free is not None and free < self.limits.free_space:
                answers[place] = Problem("full", "The server's disk is full.", retry_after=300)
            elif public is None:
                answers[place] = self._stranger(signed.envelope.sender)
            elif not signed.verify(public):
                answers[place] = Problem("signature", "The envelope is not signed by the key of its sender.")
            else:
                by_task.setdefault(signed.envelope.task, []).append(place)
        for hash_, places in by_task.items():
            for place, answer in zip(places, self._accept_for(hash_, [batch[place] for place in places]), strict=True):
                answers[place] = answer
        return answers

    def _accept_for(self, hash_: bytes, batch: list[Signed]) -> list[Answer]:
        runner = self.runners.get(hash_)
        if runner is None:
            return [Problem("unknown-task", "No such task here.")] * len(batch)
        if self.states[hash_] == "stopped":
            return [Problem("task-stopped", runner.reason or "The task was stopped.")] * len(batch)
        if self.states[hash_] != "running":
            return [Problem("busy", f"The task is {self.states[hash_]}.", retry_after=60)] * len(batch)
        try:
            answers = runner.accept(batch)
        except StoreError as error:
            self._reopen(hash_)
            return [Problem("full", f"The server could not write: {error}", retry_after=60)] * len(batch)
        if runner.reason is not None:
            self.states[hash_] = "stopped"
            self.store.set_state(hash_, "stopped", self.clock())
            self.store.record("stopped", self.clock(), runner.reason, hash_)
        return answers

    def _reopen(self, hash_: bytes) -> None:
        """After a failed write nobody knows what was kept: fold the journal again before anything else is taken."""
        with contextlib.suppress(CrowdmlError):
            self._host(self.runners[hash_].task.canonical, self.states[hash_])

    def _stranger(self, device: str) -> Problem:
        known = self.store.device(device)
        if known is not None and known.withdrawn_at:
            return Problem("withdrawn", f"Device {device} has withdrawn.")
        if known is not None and known.revoked_at:
            return Problem("revoked", f"Device {device} was revoked.")
        return Problem("unknown-device", f"Device {device} is not enrolled here.")

    # --- devices and tasks ---

    async def enrol(self, request: Enrolment) -> tuple[bool, Enrolled]:
        def work() -> tuple[bool, Enrolled]:
            try:
                done = self.store.enrol(code_hash(request.code), request.key, self.clock())
            except EnrolmentRefused as refused:
                if refused.reason in ("revoked", "withdrawn"):
                    raise Problem(refused.reason, str(refused)) from refused
                extra = {} if refused.retry_after is None else {"retry_after": refused.retry_after}
                raise Problem("too-many" if extra else "invitation", str(refused), **extra) from refused
            self.keys[done.device] = request.key
            return done.is_new, Enrolled(done.device, self.key.public, tuple(hash_.hex() for hash_ in done.tasks))

        return await self.write(work)

    async def withdraw(self, device: str) -> None:
        self.keys.pop(device, None)
        await self.write(self.store.withdraw, device, self.clock())

    async def revoke(self, device: str) -> bool:
        self.keys.pop(device, None)
        return await self.write(self.store.revoke, device, self.clock())

    async def add_task(self, task: Task, state: State = "running") -> bytes:
        """Host a task; one whose bytes are here already stays as it is."""

        def work() -> bytes:
            hash_ = self.store.add_task(task.canonical, task.name, self.clock(), state)
            if hash_ not in self.runners:
                self._host(task.canonical, state)
                self.store.record("added", self.clock(), task.name, hash_)
            return hash_

        return await self.write(work)

    async def set_state(self, hash_: bytes, state: State) -> None:
        def work() -> None:
            self.store.set_state(hash_, state, self.clock())
            self.store.record(state, self.clock(), "", hash_)
            self.states[hash_] = state

        await self.write(work)

    async def invite(self, *, uses: int = 1, ends_at: str | None = None, rate: int | None = None,
                     tasks: tuple[bytes, ...] = (), label: str = "") -> str:  # fmt: skip
        """A new invitation; its code, which is kept nowhere."""
        code = secrets.token_urlsafe(12)
        await self.write(
            lambda: self.store.invite(
                code_hash(code), self.clock(), uses=uses, ends_at=ends_at, rate=rate, tasks=tasks, label=label
            )
        )
        return code

    def hosted(self) -> list[Hosted]:
        return [
            Hosted(runner.task, self.states[hash_], runner.offer, runner.index, runner.reason)
            for hash_, runner in self.runners.items()
        ]

    def find(self, hash_: bytes) -> TaskRunner:
        runner = self.runners.get(hash_)
        if runner is None:
            raise Problem("unknown-task", "No such task here.")
        return runner

    def window(self) -> int:
        """Seconds after which a device shall come back, so that the whole crowd keeps to the pace."""
        return max(1, round(len(self.keys) / self.limits.pace))


def price_of(runner: TaskRunner) -> dict[str, Any]:
    """What a check-in of this task costs, for people who read JSON."""
    priced = quote(runner.protocol, runner.task)
    return {
        "unit": "sample",
        "adjacency": "replace-sample",
        "delta": priced.delta,
        "sample_epsilon": priced.sample_epsilon(),
        "device_epsilon": priced.device_epsilon(),
        "rows": [
            {
                "row": row.row,
                "mechanism": row.mechanism.kind,
                "promise": row.mechanism.promise,
                "loss": str(row.loss),
                "observer": row.mechanism.observer.value,
            }
            for row in priced.rows
        ],
    }
