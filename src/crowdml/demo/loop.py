"""The loop itself: serve, invite, learn, kill with -9 halfway, start again, learn on, prove that nothing was lost."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from crowdml.demo.digits import Digits, TimedSource, deal, moments
from crowdml.demo.process import ServerProcess
from crowdml.demo.proof import Proof, prove
from crowdml.device.client import Client, Limits, Unreachable
from crowdml.device.fleet import Fleet, Summary
from crowdml.device.folder import Folder, offer
from crowdml.device.joining import choose_task, fetch_task, list_tasks
from crowdml.device.runner import Clock
from crowdml.messages import decode
from crowdml.protocol import quote
from crowdml.protocols.sgd import plan
from crowdml.storage.server import Store
from crowdml.task import Task
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import open_receipt

__all__ = ["Crowd", "Login", "Outcome", "View"]

SERVER_FILE = "server.sqlite"
LOOK_EVERY = 0.25
"""Seconds between two looks at the published model."""
STALLED = 60.0
"""Seconds without a new acknowledgement, with check-ins waiting, after which the demo gives up."""
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
    acknowledged: int
    waiting: int
    """Devices whose check-in was charged and not yet acknowledged."""
    accuracy: float | None
    epsilon_sample: float
    epsilon_device: float
    delta: float
    bytes_up: int
    bytes_down: int
    restarts: int
    asked_again: int
    address: str


@dataclass(frozen=True)
class Login:
    """The operator account of this run. It goes with the folder."""

    name: str
    password: str


@dataclass(frozen=True)
class Outcome:
    """How it ended."""

    task: Task
    each: int
    """Digits that a device gave."""
    summary: Summary
    proof: Proof
    restarts: int
    away: float
    """Seconds from the kill until the server listened again."""
    seconds: float


@dataclass
class Crowd:
    """One run in one folder. `show` hears of every change that is worth a look."""

    folder: Path
    task: Task
    devices: int
    seconds: float
    seed: int
    show: Callable[[View], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None
    server: ServerProcess = field(init=False)
    login: Login = field(init=False)

    def __post_init__(self) -> None:
        self.server = ServerProcess(self.folder)
        self.login = Login("demo", secrets.token_urlsafe(12))
        self._began = time.perf_counter()
        self._state, self._restarts, self._away = "starting", 0, 0.0
        self._enrolled, self._charged, self._accuracy = 0, 0, None
        self._killing = False
        self._fleet: Fleet | None = None
        self._kill: asyncio.Future[None] | None = None

    @property
    def database(self) -> Path:
        return self.folder / "server" / SERVER_FILE

    @property
    def each(self) -> int:
        """Digits that a device gives: those of one check-in."""
        return plan(self.task).settings.batch

    # --- the whole of it ---

    async def run(self) -> Outcome:
        """Everything but the end of the server: it still serves when this returns."""
        digits = deal(self.task, self.devices, self.each, self.seed)
        code = await self._serve_first()
        self.say(f"Portal: {self.server.url}/  (task {self.task.hash.hex()[:12]})")
        async with _client(self.server.url, 64) as client, _client(self.server.url, 1) as looking:
            fleet = self._fleet = await self._join(client)
            await fleet.enrol(code, None, self._one_more)
            self._state = "serving"
            at = moments(self.devices, self.each, self.seconds, self.seed)
            sources = [
                TimedSource(f"demo:{number}/{self.devices}", digits.held_by(number), self.task, at[number])
                for number in range(self.devices)
            ]
            watching = asyncio.create_task(self._watch(looking, digits))
            killing = asyncio.create_task(self._kill_and_restart())
            for source in sources:
                source.start()
            learning = asyncio.create_task(fleet.run(lambda number: sources[number]))
            try:
                busy = {learning, watching, killing}
                while not learning.done():
                    done, busy = await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
                    for each_task in done:
                        each_task.result()
                summary = learning.result()
                _resolve(self._kill)  # where every charge came before half of the crowd was acknowledged
                await killing
            finally:
                for each_task in (watching, killing, learning):
                    each_task.cancel()
                await asyncio.gather(watching, killing, learning, return_exceptions=True)
            await self._look(looking, digits)
            self._show()
            published = (await looking.request("GET", f"{self._path}/publication")).body
            proof = await asyncio.to_thread(self._prove, fleet, published, digits)
        seconds = time.perf_counter() - self._began
        return Outcome(self.task, self.each, summary, proof, self._restarts, self._away, seconds)

    @property
    def _path(self) -> str:
        return f"/v1/tasks/{self.task.hash.hex()}"

    async def _serve_first(self) -> str:
        """The server with an operator's account, the task, and an invitation for every device; its code."""
        from crowdml.server.hub import utc_now
        from crowdml.server.operators import hash_password

        self.database.parent.mkdir(parents=True, mode=0o700)
        with Store(self.database) as store:
            store.set_operator(self.login.name, hash_password(self.login.password), utc_now())
            store.add_task(self.task.canonical, self.task.name, utc_now(), "running")
        said = await self.server.start("--invite", str(self.devices), *_RATES)
        return str(said["code"])

    async def _join(self, client: Client) -> Fleet:
        """What `crowdml fleet --yes` does: find the task, note the consent to its promise and price."""
        chosen = choose_task(await list_tasks(client), None)
        task, protocol = await fetch_task(client, bytes.fromhex(chosen.hash))
        home, clock = Folder(self.folder / "devices"), Clock()
        home.make()
        home.accept(task, replace(offer(task, protocol), by="demo", at=clock.utc()))
        return Fleet(
            home, client, task, protocol, devices=self.devices, single=False, clock=clock, tell=self._hear
        )  # fmt: skip

    def _one_more(self, count: int) -> None:
        self._enrolled += count
        self._show()

    # --- the kill ---

    def _hear(self, text: str) -> None:
        """What each device tells. The first charge after half of the crowd was acknowledged is the moment to kill."""
        if text == "charged":
            self._charged += 1
            if not self._killing and self._acknowledged() >= self.devices // 2 and self._kill is not None:
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
        await self.server.start(*_RATES)
        self._away, self._restarts, self._state = time.perf_counter() - killed, self._restarts + 1, "serving"
        self.say(f"The server is back after {self._away:.1f} s, on the same folder and port.")
        self._show()

    # --- what there is to see ---

    def _acknowledged(self) -> int:
        return 0 if self._fleet is None else sum(runner.counts.check_ins for runner in self._fleet.runners)

    async def _watch(self, looking: Client, digits: Digits) -> None:
        acknowledged, moved = 0, time.perf_counter()
        while True:
            if self._state == "serving":
                self.server.check()
                await self._look(looking, digits)
            self._show()
            now = time.perf_counter()
            if self._charged == self._acknowledged() or acknowledged != self._acknowledged():
                acknowledged, moved = self._acknowledged(), now
            if now - moved > STALLED:
                raise self.server.failure(f"acknowledged no check-in for {STALLED:.0f} s")
            await asyncio.sleep(LOOK_EVERY)

    async def _look(self, looking: Client, digits: Digits) -> None:
        with contextlib.suppress(Unreachable, Problem):
            answer = await looking.request("GET", f"{self._path}/publication")
            weights = decode(answer.headers["crowdml-kind"], answer.body).weights
            predicted = plan(self.task).model.predict(np.asarray(weights), digits.x_test)
            self._accuracy = float(np.mean(predicted == digits.y_test))

    def _show(self) -> None:
        fleet, delta = self._fleet, self.task.privacy.delta
        runners = [] if fleet is None else fleet.runners
        sample, device = self._paid()
        acknowledged = self._acknowledged()
        self.show(
            View(
                server=self._state,
                seconds=time.perf_counter() - self._began,
                devices=self.devices,
                enrolled=self._enrolled,
                acknowledged=acknowledged,
                waiting=self._charged - acknowledged,
                accuracy=self._accuracy,
                epsilon_sample=sample,
                epsilon_device=device,
                delta=delta,
                bytes_up=0 if fleet is None else fleet.client.bytes_up,
                bytes_down=0 if fleet is None else fleet.client.bytes_down,
                restarts=self._restarts,
                asked_again=sum(runner.counts.retries for runner in runners),
                address=f"{self.server.url}/",
            )
        )

    def _paid(self) -> tuple[float, float]:
        """The dearest sample and the dearest device so far, by the task's own prices; the end reads the ledgers."""
        most = max((runner.counts.check_ins for runner in self._fleet.runners), default=0) if self._fleet else 0
        most = max(most, int(self._charged > 0))
        if not most:
            return 0.0, 0.0
        price = quote(self._fleet.protocol, self.task) if self._fleet else None
        assert price is not None
        return price.sample_epsilon(), price.device_epsilon(most)

    # --- the proof ---

    def _prove(self, fleet: Fleet, published: bytes, digits: Digits) -> Proof:
        server = fleet.folder.server
        assert server is not None
        with fleet.folder.ledger() as ledger:
            receipts = [
                open_receipt(data)
                for number in range(self.devices)
                for data in ledger.of(number).receipts(self.task.hash)
            ]
        return prove(
            self.database,
            self.task,
            receipts,
            bytes.fromhex(server.key),
            published,
            self.folder / "transcript",
            digits.x_test,
            digits.y_test,
        )


AWAY = 1.0
"""Seconds that the server stays dead, so that somebody can see the devices wait."""
_RATES = ("--device-rate", "1000", "--pace", "1000")


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
