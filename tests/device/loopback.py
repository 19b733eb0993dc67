"""A real server in a thread, a small task, and a clock that does not make anybody wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.device.client import Client
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder, consent_to
from crowdml.device.member import Clock, Patience
from crowdml.device.sources import FileSource
from crowdml.price import Price
from crowdml.protocols import find
from crowdml.server.limits import Limits
from crowdml.server.serve import Started, serve
from crowdml.task import Task, parse
from crowdml.turn import Tamper

SMALL = """
name = "{name}"
title = "A small task"
[features]
dimension = 4
norm = {{ kind = "l2", bound = 1.0 }}
[labels]
classes = ["a", "b", "c"]
[model]
kind = "softmax"
[protocol]
kind = "sgd"
batch = 5
step = {{ c = 1.0 }}
[privacy]
mechanism = "discrete-gaussian"
epsilon = {{ gradient = 1.0, labels = 0.5 }}
delta = 1e-6
budget = {{ epsilon = 1.5, samples = {samples} }}
"""


def small_task(name: str = "small", samples: int = 1000) -> Task:
    return parse(SMALL.format(name=name, samples=samples))


def rows(n: int, seed: int = 1) -> list[tuple[Any, int]]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=4), int(rng.integers(3))) for _ in range(n)]


@dataclass
class QuickClock:
    """Time that passes when somebody sleeps, and remembers how long."""

    ahead: float = 0.0
    slept: list[float] = field(default_factory=list)

    def now(self) -> float:
        return time.time() + self.ahead

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.ahead += seconds
        await asyncio.sleep(0.005)

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.sleep)


class LoopbackServer:
    """`crowdml serve` in a thread. `stop` and `start` again: the same folder and the same port."""

    def __init__(self, folder: Path, tasks: list[Task]) -> None:
        self.folder, self.tasks, self.port = folder, tasks, 0
        self.address = self.code = ""
        self.start()

    def start(self) -> None:
        ready = threading.Event()

        def started(told: Started) -> None:
            self.told, self.loop = told, asyncio.get_running_loop()
            self.address, self.code = told.address, told.code or self.code
            self.port = int(told.address.rpartition(":")[2])
            ready.set()

        def run() -> None:
            limits = Limits(device_rate=10_000, device_burst=10_000, address_rate=1e6, address_burst=1e6)
            asyncio.run(
                serve(self.folder, port=self.port, tasks=self.tasks, invite=1000, limits=limits, started=started)
            )

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert ready.wait(60), "the server did not start"
        self.hub = self.told.hub

    def stop(self) -> None:
        self.told.stop()
        self.thread.join(30)

    def call(self, work: Any) -> Any:
        """Run a coroutine of the hub on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def check_ins(self, task: Task) -> int:
        return self.hub.find(task.hash).index


@contextmanager
def serving(folder: Path, *tasks: Task) -> Iterator[LoopbackServer]:
    server = LoopbackServer(folder, list(tasks))
    try:
        yield server
    finally:
        server.stop()


def joined(folder: Path, task: Task) -> Folder:
    """A folder whose owner accepted the task."""
    home = Folder(folder)
    home.make()
    home.accept(task, consent_to(Price.of(find(task), task)))
    return home


async def take_part(
    home: Folder,
    address: str,
    code: str | None,
    task: Task,
    samples: list[tuple[Any, int]],
    *,
    devices: int = 1,
    time_: QuickClock | None = None,
    new_data: bool = False,
    waits: bool = True,
    liars: Mapping[int, Tamper] | None = None,
    **options: Any,
) -> tuple[Fleet, Any]:
    """Enrol where there is a code, and run until the end. `waits`: whether the samples wait at their source."""
    client = Client(address)
    found, protocol = home.accepted(task.hash)
    clock = (time_ or QuickClock()).clock
    fleet = Fleet(home, client, found, protocol, devices, devices == 1, clock, Patience(0.1, 10.0))
    fleet.new_data, fleet.liars = new_data, liars or {}

    def source(number: int) -> FileSource:
        made = FileSource(f"rows {number}", samples[number::devices] if devices > 1 else samples, found)
        made.waits = waits
        return made

    try:
        if code is not None:
            await fleet.enrol(code, None)
        summary = await fleet.run(source, **options)
        return fleet, summary
    finally:
        await client.close()


def run(*arguments: Any, **options: Any) -> tuple[Fleet, Any]:
    return asyncio.run(take_part(*arguments, **options))
