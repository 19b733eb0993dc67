"""What version 0.1 left, unpacked for a test; today's server in a thread; and today's device in an old folder.

Time does not wait: a device's clock passes when it sleeps.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import json
import lzma
import tarfile
import threading
import time
import urllib.request
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.device.client import Client
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder, Server
from crowdml.device.member import Clock, Patience
from crowdml.device.sources import FileSource, Series
from crowdml.server.limits import Limits
from crowdml.server.serve import Started, run, serve
from crowdml.storage.server import Store
from crowdml.task import Task

HERE = Path(__file__).parent / "0.1"
FACTS: dict[str, Any] = json.loads((HERE / "facts.json").read_text())
"""What version 0.1 itself read in its data."""
TASKS = {name: bytes.fromhex(each["hash"]) for name, each in FACTS["tasks"].items()}


@functools.cache
def unpacked(name: str) -> bytes:
    return lzma.decompress((HERE / name).read_bytes())


@dataclass(frozen=True)
class Old:
    """The data of version 0.1 below a folder of the test's own. Each part is unpacked when it is asked for."""

    path: Path

    def device(self, name: str) -> Folder:
        """A device's folder, or a fleet's."""
        if not (self.path / "devices").exists():
            self._unpack("devices")
        return Folder(self.path / "devices" / name)

    def server(self, name: str = "server") -> Path:
        """The server's folder as it was at the end; `server-before`: before its first device."""
        return self._unpack(name)

    def store(self) -> Store:
        return Store(self.server() / "server.sqlite")

    def backup(self) -> Path:
        path = self.path / "backup.sqlite"
        path.write_bytes(unpacked("backup.sqlite.xz"))
        return path

    def _unpack(self, name: str) -> Path:
        with tarfile.open(fileobj=io.BytesIO(unpacked(f"{name}.tar.xz"))) as archive:
            archive.extractall(self.path / name, filter="data")
        return self.path / name


def transcript(name: str) -> Path:
    return HERE / "transcripts" / name


# --- the server ---


class Serving:
    """Today's `crowdml serve` in a thread, in an old folder."""

    def __init__(self, folder: Path) -> None:
        ready, said = threading.Event(), list[Started]()

        def started(told: Started) -> None:
            said.append(told)
            ready.set()

        def work() -> None:
            limits = Limits(device_rate=1e4, device_burst=1e4, address_rate=1e6, address_burst=1e6, pace=1e6)
            run(serve(folder, port=0, limits=limits, started=started))

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        assert ready.wait(60), "the server did not start"
        (self.told,) = said
        self.address, self.hub = self.told.address, self.told.hub

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def stop(self) -> None:
        self.told.stop()
        self._thread.join(60)

    def get(self, path: str) -> bytes:
        """One request, and those that it is sent on to, with the cookies that are set on the way."""
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with browser.open(self.address + path, timeout=20) as answer:
            return answer.read()

    def listed(self) -> dict[str, dict[str, Any]]:
        """The tasks by name, as GET /v1/tasks shows them."""
        return {each["name"]: each for each in json.loads(self.get("/v1/tasks"))["tasks"]}

    def entries(self, task: str) -> int:
        return self.hub.find(TASKS[task]).index

    def wait_for(self, holds: Callable[[], bool]) -> None:
        """Until the server has done what it does by itself."""
        for _ in range(3000):
            if holds():
                return
            time.sleep(0.02)
        raise AssertionError("the server did not get there")


@contextlib.contextmanager
def serving(folder: Path) -> Generator[Serving]:
    server = Serving(folder)
    try:
        yield server
    finally:
        server.stop()


# --- devices ---


class PassingClock:
    """Time that passes when somebody sleeps: from `start` on, or from now."""

    def __init__(self, start: float | None = None) -> None:
        self._start, self._ahead = start, 0.0

    def now(self) -> float:
        return (time.time() if self._start is None else self._start) + self._ahead

    async def sleep(self, seconds: float) -> None:
        self._ahead += seconds
        await asyncio.sleep(0.005)

    @property
    def clock(self) -> Clock:
        return Clock(self.now, self.sleep)


def rows(task: Task, count: int, seed: int) -> list[tuple[Any, int]]:
    """The rows that the data was made from (make.py), and more of them: a device goes on where it stopped."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(count, task.features.dimension)).round(3)
    return [(x, int(rng.integers(task.classes or 2))) for x in made]


def readings(count: int, place: int) -> list[float]:
    return [round(30 + 28 * np.sin(t / 5 + place), 3) for t in range(count)]


def source(task: Task, given: Sequence[Any], name: str = "csv:rows.csv:0/1") -> FileSource:
    """A source under the name that the old ledger knows; readings of a task with windows are cut into them."""
    made: Any = Series(given, task) if task.features.kind == "windows" else given
    return FileSource(name, made, task)


def moved(home: Folder, address: str) -> Folder:
    """The folder after its owner joined again at the server's new address."""
    known = home.server
    assert known is not None
    home.pin(Server(address, known.key))
    return home


async def goes_on(
    home: Folder,
    address: str,
    task: str,
    sources: Callable[[int, Task], FileSource],
    *,
    most: int | None = None,
    clock: Clock | None = None,
    new_data: bool = False,
) -> tuple[Fleet, Any]:
    """An old folder's devices take part with today's code, until their source ends; what they did."""
    found, protocol = home.accepted(TASKS[task])
    devices = len(list((home.path / "keys").iterdir())) if home.is_fleet else 1
    client = Client(address)
    fleet = Fleet(
        home, client, found, protocol, devices, not home.is_fleet, clock or PassingClock().clock, Patience(0.05, 0.5)
    )
    place = home.place(found.hash)
    fleet.place, fleet.new_data = -1 if place is None else place, new_data
    try:
        return fleet, await fleet.run(lambda number: sources(number, found), most=most)
    finally:
        await client.close()


def go_on(*arguments: Any, **options: Any) -> tuple[Fleet, Any]:
    return asyncio.run(asyncio.wait_for(goes_on(*arguments, **options), 60))


# --- what was said on the wire ---


@dataclass(frozen=True)
class Exchange:
    """One request of an old device and the old server's answer, byte for byte, and when it was signed."""

    who: str
    at: int
    request: str
    request_body: bytes
    answer: str
    answer_body: bytes

    @property
    def line(self) -> str:
        """Method and path with its query."""
        return self.request.partition(" HTTP/1.1\r\n")[0]

    @property
    def status(self) -> int:
        return int(self.answer.split(" ")[1])


def conversations() -> list[Exchange]:
    """Everything that the recorded devices asked, in the order in which the server took it."""
    made: list[Exchange] = []
    for line in (HERE / "conversations.jsonl").read_text().splitlines():
        plain = json.loads(line)
        for name in ("request_body", "answer_body"):
            plain[name] = base64.b64decode(plain[name])
        made.append(Exchange(**plain))
    return made


@contextlib.asynccontextmanager
async def answering(said: Sequence[Exchange]) -> AsyncGenerator[tuple[str, list[str]]]:
    """The old server's recorded answers on a real socket: the address, and what was asked.

    Each request gets the next recorded answer to the same method, path and body; what was asked more often then, while
    waiting for others, is passed over. A request that was never recorded gets 404.
    """
    left, heard = list(said), list[str]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                sizes = [line.partition(":")[2] for line in head.lower().split("\r\n") if line.startswith("content-le")]
                body = await reader.readexactly(int(sizes[0]) if sizes else 0)
                line = head.partition(" HTTP/1.1\r\n")[0]
                heard.append(line)
                at = next((n for n, each in enumerate(left) if (each.line, each.request_body) == (line, body)), None)
                if at is None:
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                else:
                    found = left[at]
                    del left[: at + 1]
                    writer.write(found.answer.encode("latin-1") + found.answer_body)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heard
    finally:
        server.close()
