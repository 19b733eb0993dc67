"""The loop itself: serve, invite, learn, kill devices and the server with -9, start again, learn on, prove it all."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from crowdml.demo.process import DoomedDevices, ServerProcess, join_fleet
from crowdml.demo.proof import Proof, prove
from crowdml.demo.stages import Stage, TimedSource, moments
from crowdml.device.client import Client, Limits, Unreachable
from crowdml.device.fleet import Fleet, Summary
from crowdml.device.folder import Folder
from crowdml.messages import decode
from crowdml.price import Epsilons, Price
from crowdml.secagg.device import SHARED
from crowdml.task import Task
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import open_receipt

LOOK_EVERY = 0.25
"""Seconds between two looks at the published model."""
STALLED = 60.0
"""Seconds without a new acknowledgement, with check-ins waiting, after which the demo gives up."""
IDLE = 45.0
"""Seconds after the last sample, without a charge, an acknowledgement or a sum, after which the demo ends."""
IN_FLIGHT = 0.003
"""Seconds between a charge and the kill: the check-in is on its way then."""


@dataclass(frozen=True)
class View:
    """What there is to see at one moment."""

    server: str
    """serving, killed with -9, starting again"""
    seconds: float
    devices: int
    enrolled: int
    gone: int
    """Devices that were killed with -9."""
    acknowledged: int
    waiting: int
    """Devices whose check-in was charged and not yet acknowledged."""
    rounds: int
    """Cohorts that were added up,"""
    of_rounds: int
    abandoned: int
    survivors: int
    """and the devices in those sums."""
    accuracy: float | None
    epsilon_sample: float
    epsilon_sample_alone: float
    """If everyone else colludes."""
    epsilon_device: float
    delta: float
    bytes_up: int
    bytes_down: int
    restarts: int
    asked_again: int
    address: str


@dataclass(frozen=True)
class Outcome:
    """How it ended."""

    stage: Stage
    summary: Summary
    rounds: int
    abandoned: int
    survivors: int
    cohort: int
    """Devices whose masks were in the sums: those and the ones that vanished after the cohort was fixed."""
    killed: int
    """Devices that were killed with -9."""
    proof: Proof
    restarts: int
    away: float
    """Seconds from the kill until the server listened again."""
    seconds: float


@dataclass
class DemoCrowd:
    """One run in one folder. `show` hears of every change that is worth a look."""

    folder: Path
    stage: Stage
    seconds: float
    seed: int
    show: Callable[[View], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None
    server: ServerProcess = field(init=False)

    def __post_init__(self) -> None:
        self.server = ServerProcess(self.folder)
        self._began = time.perf_counter()
        self._state, self._restarts, self._away = "starting", 0, 0.0
        self._enrolled, self._charged, self._accuracy = 0, 0, None
        self._rounds, self._counts, self._survivors = 0, {}, 0
        self._killing, self._sharing, self._is_short = False, 0, False
        self._doomed = DoomedDevices(self.folder / "doomed", self.stage.doomed)
        self._shared = asyncio.Event()
        self._fleet: Fleet | None = None
        self._kill: asyncio.Future[None] | None = None

    @property
    def task(self) -> Task:
        return self.stage.task

    @property
    def devices(self) -> int:
        """How many devices run in this process: the others are killed."""
        return self.stage.devices - self.stage.doomed

    # --- the whole of it ---

    async def run(self) -> Outcome:
        """Everything but the end of the server: it still serves when this returns."""
        stage = self.stage
        code = await self.server.host(self.task, stage.devices)
        self.say(f"Portal: {self.server.url}/  (task {self.task.hash.hex()[:12]})")
        async with _client(self.server.url, 64) as client, _client(self.server.url, 1) as looking:
            home = Folder(self.folder / "devices")
            fleet = self._fleet = await join_fleet(client, home, "demo", devices=self.devices, tell=self._hear)
            fleet.liars = stage.liars
            await fleet.enrol(code, None, self._one_more)
            self._state = "serving"
            await self._start_doomed(code, looking)
            at = moments(self.devices, stage.each, self.seconds, self.seed)
            sources = [
                TimedSource(f"demo:{number}/{self.devices}", stage.held_by(number), self.task, at[number])
                for number in range(self.devices)
            ]
            watching = asyncio.create_task(self._watch(looking))
            killing = asyncio.create_task(self._kill_and_restart())
            doom = asyncio.create_task(self._kill_devices())
            for source in sources:
                source.start()
            learning = asyncio.create_task(fleet.run(lambda number: sources[number]))
            try:
                busy = {learning, watching, killing, doom}
                while not learning.done():
                    done, busy = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
                    for each_task in done:
                        each_task.result()
                summary = learning.result()
                _resolve(self._kill)  # where every charge came before half of the crowd was acknowledged
                await killing
            finally:
                for each_task in (watching, killing, learning, doom):
                    each_task.cancel()
                await asyncio.gather(watching, killing, learning, doom, return_exceptions=True)
            await self._last_sums(looking)
            published = (await looking.request("GET", f"{self._path}/publication")).body
            proof = self._prove(fleet, published)  # in this thread, which a signal can end
        seconds = time.perf_counter() - self._began
        abandoned = sum(many for how, many in self._counts.items() if how != "summed")
        return Outcome(
            stage,
            summary,
            self._rounds,
            abandoned,
            proof.survivors,
            proof.cohort,
            stage.doomed,
            proof,
            self._restarts,
            self._away,
            seconds,
        )

    def stop(self) -> None:
        """End what is left of its processes."""
        self._doomed.kill()
        self.server.stop()

    @property
    def _path(self) -> str:
        return f"/v1/tasks/{self.task.hash.hex()}"

    def _one_more(self, count: int) -> None:
        self._enrolled += count
        self._show()

    # --- the kills ---

    async def _start_doomed(self, code: str, looking: Client) -> None:
        """Some devices live in a process of their own, so that they can be killed; until the server knows them all."""
        if self.stage.doomed:
            rows = self.folder / "doomed.ndjson"
            await asyncio.to_thread(self.stage.write_rows, rows, range(self.devices, self.stage.devices))
            await self._doomed.start(self.server.url, code, rows)
            while f"crowdml_devices {self.stage.devices}" not in (await self._figures(looking)).splitlines():
                self._doomed.check()
                await asyncio.sleep(LOOK_EVERY)
            self._one_more(self.stage.doomed)

    async def _kill_devices(self) -> None:
        """Once half of a cohort has shared its secrets nobody of it has drawn yet: whoever goes now is missed, and its
        masks must come off. Without masks they go before they have given anything."""
        if self.stage.doomed:
            if self.task.masking is not None:
                await self._shared.wait()
            self._doomed.kill()
            self.say(f"{self.stage.doomed} devices were killed with -9 in the middle of a round.")

    def _hear(self, text: str) -> None:
        """What each device tells. The first charge after half of the rounds is the moment to kill the server."""
        masking = self.task.masking
        self._sharing += text == SHARED
        if text == "charged" or (masking is not None and 2 * self._sharing >= masking.cohort - self.stage.doomed):
            self._shared.set()
        if text == "charged":
            self._charged += 1
            is_half = self._rounds >= self.stage.rounds // 2
            if self.task.masking is None:  # one upload a device: half of them
                is_half = 2 * self._charged >= self.devices
            if not self._killing and is_half and self._kill is not None:
                self._killing = True
                asyncio.get_running_loop().call_later(IN_FLIGHT, _resolve, self._kill)

    async def _kill_and_restart(self) -> None:
        self._kill = asyncio.get_running_loop().create_future()
        await self._kill
        self.server.kill()
        killed = time.perf_counter()
        self._state = "killed with -9"
        self.say(f"{self._acknowledged()} check-ins are acknowledged. Killed the server with -9.")
        self._show()
        await asyncio.sleep(AWAY)
        self._state = "starting again"
        self._show()
        await self.server.start()
        self._away, self._restarts, self._state = time.perf_counter() - killed, self._restarts + 1, "serving"
        self.say(f"The server is back after {self._away:.1f} s, on the same folder and port.")
        self._show()

    # --- what there is to see ---

    def _acknowledged(self) -> int:
        return 0 if self._fleet is None else sum(runner.counts.check_ins for runner in self._fleet.runners)

    async def _watch(self, looking: Client) -> None:
        acknowledged, moved = 0, time.perf_counter()
        last, stirred = (0, 0, 0), moved
        while True:
            if self._state == "serving":
                self.server.check()
                await self._look(looking)
            self._show()
            now = time.perf_counter()
            if self._charged == self._acknowledged() or acknowledged != self._acknowledged():
                acknowledged, moved = self._acknowledged(), now
            if now - moved > STALLED:
                raise self.server.failure(f"acknowledged no check-in for {STALLED:.0f} s")
            if (seen := (self._charged, acknowledged, self._rounds)) != last or self._state != "serving":
                last, stirred = seen, now
            if self._fleet is not None and now - stirred > IDLE + self.seconds:
                self._is_short = True
                self.say(
                    f"No cohort was filled for {IDLE:.0f} s: rounds were lost after their devices had paid; too few "
                    f"have samples left. The demo ends with {self._rounds} of {self.stage.rounds} {self.stage.unit}."
                )
                self._fleet.end()
                return
            await asyncio.sleep(LOOK_EVERY)

    async def _last_sums(self, looking: Client) -> None:
        """The devices have done their part; the server may still be taking masks off."""
        waited = time.perf_counter()
        while True:
            await self._look(looking)
            self._show()
            if self._is_short or self._rounds >= self.stage.rounds or time.perf_counter() - waited > STALLED:
                return
            await asyncio.sleep(LOOK_EVERY)

    async def _look(self, looking: Client) -> None:
        with contextlib.suppress(Unreachable, Problem):
            answer = await looking.request("GET", f"{self._path}/publication")
            offered = decode(answer.headers["crowdml-kind"], answer.body)
            if self._accuracy is None or int(offered.version) != self._rounds:
                self._accuracy = await asyncio.to_thread(self.stage.accuracy, offered.weights)
                self._rounds = int(offered.version)
            figures = await self._figures(looking)
            self._counts = {
                how: int(many) for how, many in re.findall(r'crowdml_rounds\{.*ended="([^"]*)"\} (\d+)', figures)
            }
            found = re.search(r"crowdml_round_survivors\{.*\} (\d+)", figures)
            self._survivors = int(found[1]) if found else 0

    async def _figures(self, looking: Client) -> str:
        return (await looking.request("GET", "/metrics")).body.decode()

    def _show(self) -> None:
        fleet, delta = self._fleet, self.task.privacy.delta
        runners = [] if fleet is None else fleet.runners
        paid = self._paid()
        acknowledged = self._acknowledged()
        self.show(
            View(
                server=self._state,
                seconds=time.perf_counter() - self._began,
                devices=self.stage.devices,
                enrolled=self._enrolled,
                gone=self._doomed.killed,
                acknowledged=acknowledged,
                waiting=self._charged - acknowledged,
                rounds=self._rounds,
                of_rounds=self.stage.rounds,
                abandoned=sum(many for how, many in self._counts.items() if how != "summed"),
                survivors=self._survivors,
                accuracy=self._accuracy,
                epsilon_sample=paid.sample,
                epsilon_sample_alone=paid.sample_alone,
                epsilon_device=paid.device,
                delta=delta,
                bytes_up=0 if fleet is None else fleet.client.bytes_up,
                bytes_down=0 if fleet is None else fleet.client.bytes_down,
                restarts=self._restarts,
                asked_again=sum(runner.counts.retries for runner in runners),
                address=f"{self.server.url}/",
            )
        )

    def _paid(self) -> Epsilons:
        """What the most expensive device has paid so far; the end reads the ledgers."""
        most = max((runner.counts.check_ins for runner in self._fleet.runners), default=0) if self._fleet else 0
        most = max(most, int(self._charged > 0))
        return Price.of(self._fleet.protocol, self.task).after(most) if self._fleet else Epsilons()

    # --- the proof ---

    def _prove(self, fleet: Fleet, published: bytes) -> Proof:
        server = fleet.folder.server
        assert server is not None
        with fleet.folder.ledger() as ledger:
            receipts = [
                open_receipt(data)
                for number in range(self.devices)
                for data in ledger.of(number).receipts(self.task.hash)
            ]
        return prove(
            self.server.database,
            self.task,
            receipts,
            bytes.fromhex(server.key),
            published,
            self.folder / "transcript",
            self.stage.accuracy,
        )


AWAY = 1.0
"""Seconds that the server stays dead, so that somebody can see the devices wait."""


def _resolve(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


@asynccontextmanager
async def _client(url: str, connections: int) -> AsyncGenerator[Client]:
    client = Client(url, limits=Limits(connections=connections))
    try:
        yield client
    finally:
        await client.close()
