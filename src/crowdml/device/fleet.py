"""Many devices in one process: each a real one, with its own key, ledger and outbox, over real HTTP.

`join` is a fleet of one. The ledgers of a fleet lie in one SQLite file, and steps of different devices that come within
a few milliseconds are committed together: each is on disk before its bytes are sent, at a fraction of the fsyncs.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from crowdml.device.client import Client, Unreachable
from crowdml.device.commits import Commits
from crowdml.device.conditions import Conditions
from crowdml.device.folder import Folder
from crowdml.device.machine import Offers
from crowdml.device.member import Clock, Ending, Patience, chance, terms
from crowdml.device.places import needs_place
from crowdml.device.runner import Runner
from crowdml.device.sources import SampleSource
from crowdml.pace import AT_WORK, GROUP_WINDOW
from crowdml.protocol import Protocol
from crowdml.records import record
from crowdml.storage import Ledger
from crowdml.storage.device.ledger import paid_in
from crowdml.task import Task
from crowdml.turn import Tamper
from crowdml.wire.keys import Key
from crowdml.wire.problems import Problem

if TYPE_CHECKING:
    from crowdml.device.peering import Peering

T = TypeVar("T")

AT_ONCE = 32
"""Enrolments under way at a time."""


@record
class Rates:
    """How a fleet is doing at one moment."""

    seconds: float
    devices: int
    at_work: int
    check_ins: int
    per_second: float
    """Over the last report's interval."""
    p50: float
    p99: float
    retries: int
    refused: int


@record
class Summary:
    """What a fleet did, and why its devices stopped. Epsilons are those of the dearest device, at `delta`."""

    devices: int
    check_ins: int
    repeated: int
    refused: int
    retries: int
    seconds: float
    per_second: float
    p50: float
    p99: float
    bytes_up: int
    bytes_down: int
    epsilon_sample: float
    epsilon_device: float
    epsilon_sample_alone: float
    """If everyone else colludes: more than `epsilon_sample` where something left under masks."""
    epsilon_device_alone: float
    delta: float
    endings: dict[str, int]
    reason: str
    problems: dict[str, int]
    letters: Letters | None = None
    """What became of letters, where devices have peers."""
    unreadable: dict[str, int] = field(default_factory=dict)
    """How many rows could not be used, by reason: for the owner alone."""
    liars: int = 0
    """Devices that lied, to test a study."""


@record
class Letters:
    """What devices heard of their peers, and how often they predicted right: for their owner alone."""

    heard: int
    bytes: int
    refused: dict[str, int]
    right: int
    guessed: int
    next: str | None = None
    """The class that a single device's votes say comes next."""
    brought: int = 0
    """Letters that peers brought to this device itself, and that were taken."""
    turned_away: int = 0
    """Whatever else came to where this device listens."""
    carried: int = 0
    """Its own letters that it brought to a peer, which took them."""


@record(frozen=False)
class Fleet:
    """The devices of one folder on one task. `single`: the folder of one device, as `join` makes it."""

    folder: Folder
    client: Client
    task: Task
    protocol: Protocol
    devices: int = 1
    single: bool = True
    clock: Clock = field(default_factory=Clock)
    patience: Patience = field(default_factory=Patience)
    conditions: Conditions = field(default_factory=Conditions)
    tell: Callable[[str], None] = lambda _: None
    """Hears what every device tells."""
    say: Callable[[str], None] = lambda _: None
    """Hears what concerns the fleet."""
    at_work: int = AT_WORK
    new_data: bool = False
    """The owner says that nothing of these sources was ever given: asked for after a lost ledger."""
    place: int = -1
    """Where a single device stands, of a task with places; devices of a fleet stand at places 0, 1, 2, ..."""
    listen: tuple[str, int] | None = None
    """Where peers on the same network may bring a single device their letters themselves."""
    peers: dict[int, str] = field(default_factory=dict)
    """By place, the addresses of peers that a single device brings its own letters to."""
    liars: Mapping[int, Tamper] = field(default_factory=dict)
    """Devices that lie, by number, to test a study of one's own."""
    peering: Peering | None = None
    runners: list[Runner] = field(default_factory=list)
    _is_ended: bool = False
    new: set[int] = field(default_factory=set)
    """Devices that the server did not know before this process enrolled them: it has no statement of theirs."""
    asked: bool = False
    """Whether the server may know a device of this folder: an enrolment was sent, and not refused."""

    def place_of(self, number: int) -> int:
        """Where a device of this folder stands; -1: nowhere."""
        if not needs_place(self.task, self.protocol):
            return -1
        return self.place if self.single else number

    def all_keys(self) -> list[tuple[int, Key]]:
        return [(number, self.folder.key(None if self.single else number)) for number in range(self.devices)]

    async def enrol(self, code: str, ca: str | None, progress: Callable[[int], None] = lambda _: None) -> None:
        """Enrol every device; those that the server knows already stay as they are."""
        from crowdml.device.joining import enrol_device, pinned

        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int, key: Key) -> None:
            async with gate:
                before, self.asked = self.asked, True
                try:
                    ask = partial(enrol_device, self.client, key, code, self.task.hash)
                    enrolled, is_new = await self._patiently(ask)
                except Problem as problem:
                    if problem.status < 500:
                        self.asked = before
                    raise
            if is_new:
                self.new.add(number)
            known = self.folder.server
            if known is None or known.key != enrolled.server_key.hex() or known.url != self.client.url:
                pinned(self.folder, self.client, enrolled, ca)
            await self._claim(key, number)
            progress(1)

        keys = self.all_keys()
        if not self.folder.joined:
            self.folder.ledger().close()  # it is there before the server knows the device: a missing one is a lost one
        await one(*keys[0])
        try:
            async with asyncio.TaskGroup() as group:
                for number, key in keys[1:]:
                    group.create_task(one(number, key))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # one reason is enough for whoever waits

    async def _claim(self, key: Key, number: int) -> None:
        """Stand where this device stands, before it says anything from there."""
        from crowdml.device.joining import claim_place

        place = self.place_of(number)
        if place < 0:
            return
        await self._patiently(lambda: claim_place(self.client, key, self.task, place, self.clock))
        if self.single and self.folder.place(self.task.hash) != place:
            self.folder.stand(self.task.hash, place)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask again where the server says to wait. The owner is there, so an unreachable one is said at once."""
        failures = 0
        while True:
            try:
                return await ask()
            except Problem as problem:
                if problem.status not in (408, 429, 503) or failures >= 20:
                    raise
                await self.clock.sleep(self.patience.pause(min(failures, 4), problem.retry_after, chance=chance()))
                failures += 1

    async def open_ledger(self) -> Ledger:
        """The ledger; where it was lost, a new one that begins from what the server can prove."""
        failures = 0
        while self.folder.lost:
            from crowdml.device.joining import recover

            try:
                found, exhausted = await recover(self.folder, self.client, self.all_keys(), self.clock)
                self.tell(f"the ledger was lost: {found} began from a signed statement, {exhausted} as exhausted")
            except (Unreachable, Problem) as error:
                asked = error.retry_after if isinstance(error, Problem) else None
                pause = self.patience.pause(failures, asked, chance=chance())
                self.tell(f"the ledger is lost and the server cannot be asked: {error} Waiting {pause:.0f} s.")
                failures += 1
                await self.clock.sleep(pause)
        return self.folder.ledger()

    async def run(
        self,
        sources: Callable[[int], SampleSource],
        *,
        seconds: float | None = None,
        most: int | None = None,
        report: Callable[[Rates], None] | None = None,
        every: float = 1.0,
    ) -> Summary:
        """Drive every device until it ends, or until `seconds` are over; what was charged stays in the outbox."""
        ledger = await self.open_ledger()
        began = time.perf_counter()
        with contextlib.closing(ledger), self.folder.marks() as marks:
            commit = Commits(ledger, GROUP_WINDOW if self.devices > 1 else 0.0, marks)
            member, gate = terms(self.folder, self.task, self.protocol), asyncio.Semaphore(self.at_work)
            offers = Offers()
            for number, key in self.all_keys():
                self.runners.append(
                    Runner(
                        member(key, ledger.of(number)),
                        self.task,
                        self.protocol,
                        self.client,
                        sources(number),
                        commit=commit,
                        gate=gate,
                        conditions=self.conditions,
                        clock=self.clock,
                        patience=self.patience,
                        most=most,
                        new_data=self.new_data,
                        offers=offers,
                        place=self.place_of(number),
                        is_new=number in self.new,
                        tamper=self.liars.get(number),
                        tell=self.tell,
                    )
                )
            async with self._peering():
                endings = await self._drive(began, seconds, report, every)
            return self._summary(time.perf_counter() - began, endings)

    def end(self) -> None:
        """End `run` as if its seconds were over: what was charged stays in the outbox."""
        self._is_ended = True

    @contextlib.asynccontextmanager
    async def _peering(self) -> AsyncGenerator[None]:
        """A single device's own door to its neighbours, where its owner opened one."""
        runner = self.runners[0]
        if runner.letters is None or not (self.listen or self.peers):
            yield
            return
        from crowdml.device.peering import Peering

        made = Peering(runner.letters, runner.member.key.public, listen=self.listen, peers=self.peers, clock=self.clock)
        async with made:
            runner.carry, self.peering = made.carry, made
            if self.listen is not None:
                self.say(f"Peers may bring letters to {self.listen[0]}:{made.port}.")
            yield

    async def _drive(
        self, began: float, seconds: float | None, report: Callable[[Rates], None] | None, every: float
    ) -> list[Ending | None]:
        tasks = [asyncio.create_task(runner.run()) for runner in self.runners]
        whole = asyncio.gather(*tasks)
        last, then = 0, began
        masking, told = self.task.masking, False
        try:
            while True:
                left = None if seconds is None else seconds - (time.perf_counter() - began)
                pause = every if left is None else min(every, max(0.0, left))
                await asyncio.wait((whole,), timeout=pause)  # one future: a watch over each of many takes long
                if whole.done():
                    whole.result()  # where one failed, so does the fleet
                now = time.perf_counter()
                if masking is not None and not told:
                    waiting = sum(not task.done() for task in tasks)
                    if told := 0 < waiting < min(masking.minimum, len(tasks)):
                        self.say(
                            f"waiting: {waiting} devices of this fleet have samples left, and a cohort needs "
                            f"{masking.minimum}. They go on when others come; --seconds or Ctrl-C ends this."
                        )
                if report is not None:
                    made = sum(runner.counts.check_ins for runner in self.runners)
                    pending = sum(not task.done() for task in tasks)
                    report(self._rates(now - began, pending, made, (made - last) / max(now - then, 1e-9)))
                    last, then = made, now
                if whole.done() or self._is_ended or (left is not None and left <= every):
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(whole, *tasks, return_exceptions=True)
        return [None if task.cancelled() else task.result() for task in tasks]

    def _rates(self, seconds: float, at_work: int, made: int, per_second: float) -> Rates:
        p50, p99 = self._latency()
        counts = [runner.counts for runner in self.runners]
        retries, refused = sum(each.retries for each in counts), sum(each.refused for each in counts)
        return Rates(seconds, len(self.runners), at_work, made, per_second, p50, p99, retries, refused)

    def _latency(self) -> tuple[float, float]:
        taken = [second for runner in self.runners for second in runner.counts.seconds]
        if not taken:
            return 0.0, 0.0
        low, high = np.percentile(np.asarray(taken), [50, 99])
        return float(low), float(high)

    def _summary(self, seconds: float, endings: Sequence[Ending | None]) -> Summary:
        counts, delta = [runner.counts for runner in self.runners], self.task.privacy.delta
        paid = paid_in([runner.member.ledger for runner in self.runners], delta)
        made, (p50, p99) = sum(each.check_ins for each in counts), self._latency()
        up, down = (0, 0) if self.peering is None else self.peering.size
        ended = [ending for ending in endings if ending is not None]
        return Summary(
            devices=len(self.runners),
            check_ins=made,
            repeated=sum(each.repeated for each in counts),
            refused=sum(each.refused for each in counts),
            retries=sum(each.retries for each in counts),
            seconds=seconds,
            per_second=made / max(seconds, 1e-9),
            p50=p50,
            p99=p99,
            bytes_up=self.client.bytes_up + up,
            bytes_down=self.client.bytes_down + down,
            **paid.plain,
            delta=delta,
            endings=dict(Counter("time" if ending is None else ending.kind for ending in endings)),
            reason=ended[0].reason if ended else "The time was over.",
            problems=dict(sum((each.problems for each in counts), Counter())),
            letters=self._letters(),
            liars=len(self.liars),
            unreadable=dict(sum((Counter(runner.source.faults.counts) for runner in self.runners), Counter())),
        )

    def _letters(self) -> Letters | None:
        posts = [runner.letters.post for runner in self.runners if runner.letters is not None]
        if not posts:
            return None
        learners = [runner.learner for runner in self.runners if runner.learner is not None]
        forecast = learners[0].forecast(self.runners[0].source.latest) if len(learners) == 1 else None
        door = Counter[int]() if self.peering is None else self.peering.answers
        return Letters(
            sum(post.heard for post in posts),
            sum(post.size for post in posts),
            dict(sum((Counter(post.refused) for post in posts), Counter())),
            sum(each.score.right for each in learners),
            sum(each.score.guessed for each in learners),
            None if forecast is None else self.task.labels.classes[forecast.label],
            brought=door[202],
            turned_away=sum(times for status, times in door.items() if status >= 400),
            carried=0 if self.peering is None else self.peering.carried,
        )
