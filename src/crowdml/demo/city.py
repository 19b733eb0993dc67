"""Devices that teach each other, on one machine: a real server that relays, a `crowdml join` process at every place.

Each device reads its sensor from a pipe. Halfway two are killed with -9; one of them comes back later, and its readings
of the time between are missing. In the end the journal is held against the receipts of all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from crowdml.datasets import made_up_city, series
from crowdml.datasets.files import locate
from crowdml.datasets.traffic import SCATS
from crowdml.demo.process import ServerProcess
from crowdml.demo.proof import Proof, prove
from crowdml.device.client import Client
from crowdml.device.folder import Folder
from crowdml.errors import DataError
from crowdml.protocol import Noisy
from crowdml.protocols import find
from crowdml.server.fold import Fold
from crowdml.storage.server import Store
from crowdml.task import Task
from crowdml.wire.envelopes import open_signed
from crowdml.wire.receipts import open_receipt

LONGEST_END = 120.0
"""Seconds that a device may take to end, once its sensor has."""


@dataclass(frozen=True)
class Scene:
    """Where each device stands, and what is measured there: `values` [places, n]."""

    task: Task
    values: Any
    data: str
    batches: int

    @property
    def devices(self) -> int:
        return len(self.task.places)


def set_scene(task: Task, devices: int, seed: int, batches: int = 20) -> Scene:
    """The first places of the task, by the real readings where they are there, else by made-up ones."""
    if not int(task.protocol["peers"]) < devices <= len(task.places):
        raise DataError(
            f"--devices {devices}: task {task.name!r} has {len(task.places)} places, and each device learns from "
            f"{task.protocol['peers']} others."
        )
    small = replace(task, places=task.places[:devices])
    count = batches * find(small).batch(small) + small.features.dimension + small.features.horizon - 1
    if locate(SCATS) is None:
        days = -(-count // 96) + 1
        city = made_up_city(places=devices, days=days, learned_days=days - 1, seed=seed)
        return Scene(small, city.values[:, :count], "made up", batches)
    found = series("scats")
    rows = [found.names.index(place.name) for place in small.places]
    return Scene(small, found.values[rows, :count], found.name, batches)


@dataclass(frozen=True)
class Sight:
    """What there is to see of one device: its state, and the last that it said on its own terminal."""

    name: str
    state: str
    """starting, at work, killed with -9, back, done"""
    said: str = ""


@dataclass(frozen=True)
class Ended:
    """What came of it. `summaries`: by place, what each device that ended by itself says of itself."""

    scene: Scene
    proof: Proof
    counts: Noisy
    summaries: Mapping[int, Mapping[str, Any]]
    killed: tuple[int, ...]
    back: tuple[int, ...]
    seconds: float

    def total(self, *path: str) -> float:
        """The sum of one number over all summaries."""
        found = 0.0
        for summary in self.summaries.values():
            each: Any = summary
            for name in path:
                each = each[name]
            found += each
        return found


@dataclass
class _Device:
    process: asyncio.subprocess.Process
    reading: asyncio.Task[bytes]
    """Reads its stdout: the JSON, in the end."""
    telling: asyncio.Task[None]


@dataclass
class City:
    """One run in one folder. `show` hears of every change that is worth a look."""

    folder: Path
    scene: Scene
    seconds: float
    show: Callable[[list[Sight]], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None
    server: ServerProcess = field(init=False)

    def __post_init__(self) -> None:
        self.server = ServerProcess(self.folder)
        self._devices: dict[int, _Device] = {}
        self._sights = [Sight(place.name, "starting") for place in self.scene.task.places]
        self._joined = [asyncio.Event() for _ in self._sights]

    async def run(self) -> Ended:
        """Everything but the end of the server: it still serves when this returns."""
        began, scene = time.perf_counter(), self.scene
        code = await self.server.host(scene.task, scene.devices)
        self.say(f"Portal: {self.server.url}/  (task {scene.task.hash.hex()[:12]})")
        gone = scene.devices // 2, scene.devices - 1
        try:
            for place in range(scene.devices):
                await self._start(place, code)
            for joined in self._joined:
                await asyncio.wait_for(joined.wait(), LONGEST_END)
            await self._feed(code, gone)
            summaries = {place: await self._end(place) for place in sorted(self._devices)}
        finally:
            await self.stop_devices()
        published = await self._publication()
        proof, counts = self._prove(published)
        return Ended(scene, proof, counts, summaries, gone, gone[:1], time.perf_counter() - began)

    async def _publication(self) -> bytes:
        client = Client(self.server.url)
        try:
            return (await client.request("GET", f"/v1/tasks/{self.scene.task.hash.hex()}/publication")).body
        finally:
            await client.close()

    # --- the devices ---

    async def _start(self, place: int, code: str) -> None:
        """`crowdml join` at this place, with a pipe for its sensor. The same folder: it goes on where it was."""
        command = [sys.executable, "-m", "crowdml.cli", "join", self.server.url, code, "--source", "csv:-", "--yes"]
        where = ["--place", str(place), "--folder", str(self._home(place)), "--json", "-"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *where,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,
        )
        assert process.stdout is not None
        reading = asyncio.create_task(process.stdout.read())
        self._devices[place] = _Device(process, reading, asyncio.create_task(self._hear(place, process)))

    def _home(self, place: int) -> Path:
        return self.folder / f"device{place}"

    async def _hear(self, place: int, process: asyncio.subprocess.Process) -> None:
        """Its own terminal: the line that it is known to have joined, and what it predicts."""
        assert process.stderr is not None
        async for line in process.stderr:
            text = line.decode(errors="replace").strip()
            if text.startswith("Joined as device"):
                again = self._sights[place].state != "starting"
                self._seen(place, state="back" if again else "at work")
                self._joined[place].set()
            elif text.startswith(("next: ", "crowdml: ")):
                self._seen(place, said=text)

    def _seen(self, place: int, **changes: str) -> None:
        self._sights[place] = replace(self._sights[place], **changes)
        self.show(list(self._sights))

    async def _feed(self, code: str, gone: tuple[int, ...]) -> None:
        """Reading after reading to everybody who is there, over so many seconds; the kills are on the way."""
        count = self.scene.values.shape[1]
        began = time.perf_counter()
        for at, row in enumerate(self.scene.values.T.tolist()):
            if at == count // 2:
                for place in gone:
                    self._kill(place)
                names = " and ".join(self._sights[place].name for place in gone)
                self.say(f"Killed with -9: the devices at {names}. The others go on with the votes that they have.")
            if at == 3 * count // 4:
                await self._start(gone[0], code)
                self.say(f"The device at {self._sights[gone[0]].name} is back, on the same folder.")
            await asyncio.sleep(max(0.0, began + self.seconds * at / count - time.perf_counter()))
            for place, device in self._devices.items():
                assert device.process.stdin is not None
                device.process.stdin.write(f"{row[place]:g}\n".encode())
                with contextlib.suppress(ConnectionError):  # it ended: what it said says why
                    await device.process.stdin.drain()
            self.server.check()

    def _kill(self, place: int) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        device = self._devices.pop(place)
        device.process.kill()
        self._joined[place].clear()
        self._seen(place, state="killed with -9")

    async def _end(self, place: int) -> Mapping[str, Any]:
        """Its sensor ends, so it does; what it says then."""
        device = self._devices[place]
        assert device.process.stdin is not None
        device.process.stdin.close()
        said = await asyncio.wait_for(device.reading, LONGEST_END)
        await device.telling
        if await device.process.wait():
            raise DataError(f"The device at {self._sights[place].name} failed: {self._sights[place].said}")
        self._seen(place, state="done")
        return json.loads(said)

    async def stop_devices(self) -> None:
        for device in self._devices.values():
            with contextlib.suppress(ProcessLookupError):
                device.process.kill()
            await device.process.wait()
            device.reading.cancel()
            device.telling.cancel()

    def stop(self) -> None:
        """End the server; the devices are gone by then."""
        self.server.stop()

    # --- the proof ---

    def _prove(self, published: bytes) -> tuple[Proof, Noisy]:
        task, receipts, key = self.scene.task, [], b""
        for place in range(self.scene.devices):
            home = Folder(self._home(place))
            assert home.server is not None
            key = bytes.fromhex(home.server.key)
            with home.ledger() as ledger:
                receipts += [open_receipt(data) for data in ledger.receipts(task.hash)]
        proof = prove(self.server.database, task, receipts, key, published, self.folder / "transcript")
        fold, protocol = Fold(task), find(task)
        with Store(self.server.database) as store:
            for index, body in store.tail(task.hash):
                envelope = open_signed(body).envelope
                fold.hear(index, envelope.kind, envelope.body, envelope.sender)
        told = protocol.progress(task, fold.state)
        assert told is not None
        assert told.labels is not None
        return proof, told.labels
