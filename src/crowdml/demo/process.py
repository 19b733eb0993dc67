"""`crowdml serve` and `crowdml fleet` in processes of their own: started, killed with -9, started again, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from crowdml.device.client import Client
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder, consent_to
from crowdml.device.joining import choose_task, fetch_artefacts, fetch_task, list_tasks
from crowdml.device.member import Clock
from crowdml.errors import CrowdmlError
from crowdml.price import Price
from crowdml.storage.server import Store
from crowdml.task import Task

T = TypeVar("T")

PATIENCE = 3.0
"""Seconds for a server to end in order: on a busy machine it may have a minute's work before it."""
RATES = ("--device-rate", "1000", "--pace", "1000", "--address-rate", "100000")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def heed_signals() -> None:
    """Let SIGTERM end a command as Ctrl-C does, also where Ctrl-C is ignored, as in the background of a script."""
    for each in SIGNALS:
        if signal.getsignal(each) != signal.SIG_IGN:
            signal.signal(each, _interrupt)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, whose first signal cancels every task at once; a second one leaves everything as it is.

    asyncio's own handler cancels the main task alone, which waits its turn behind all that is ready: with a hundred
    devices in one process, each about to work for a second, a busy machine took two minutes to end them.
    """
    is_over = False

    async def whole() -> T:
        loop = asyncio.get_running_loop()

        def heed(*_: object) -> None:
            nonlocal is_over
            if is_over:
                raise KeyboardInterrupt
            is_over = True
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon_threadsafe(lambda: None)  # it may be asleep

        before = {each: signal.getsignal(each) for each in SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
        for each in before:
            signal.signal(each, heed)
        try:
            return await work
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    try:
        return asyncio.run(whole())
    except asyncio.CancelledError:
        if is_over:
            raise KeyboardInterrupt from None
        raise


class ServerFailed(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """The server process ended by itself, or never listened."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@dataclass(frozen=True)
class Login:
    """The operator account of this run. It goes with the folder."""

    name: str
    password: str


@dataclass
class ServerProcess:
    """One folder and one port; the process comes and goes. Its log is `log.txt` in the folder."""

    folder: Path
    port: int = field(default_factory=free_port)
    whose: str = "demo"
    rates: tuple[str, ...] = RATES
    process: subprocess.Popen[bytes] | None = None
    login: Login = field(default_factory=lambda: Login("demo", secrets.token_urlsafe(12)))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def database(self) -> Path:
        return self.folder / "server" / "server.sqlite"

    async def host(self, task: Task, devices: int) -> str:
        """Start with an operator's account, the task, and an invitation for every device; its code."""
        from crowdml.server.hub import utc_now
        from crowdml.server.operators import hash_password

        self.database.parent.mkdir(parents=True, mode=0o700)
        with Store(self.database) as store:
            store.set_operator(self.login.name, hash_password(self.login.password), utc_now())
            store.add_task(task.canonical, task.name, utc_now(), "running")
        return str((await self.start("--invite", str(devices)))["code"])

    async def start(self, *options: str) -> dict[str, Any]:
        """Start, and wait until it listens; what it said then."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [sys.executable, "-m", "crowdml.cli", "serve", "--folder", str(self.folder / "server")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--json", "-", *options, *self.rates],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # an interrupt at the terminal is for the demo, which stops it in order
            )
        assert self.process.stdout is not None
        try:
            said = await asyncio.to_thread(self.process.stdout.readline)
        except BaseException:  # an interrupt: the thread that reads ends with the process
            self.process.kill()
            raise
        if not said:
            raise self.failure("did not start")
        return json.loads(said)

    def check(self) -> None:
        """Raise where the process ended without being asked to."""
        if self.process is not None and self.process.poll() is not None:
            raise self.failure("stopped by itself")

    def failure(self, what: str) -> ServerFailed:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        said = [line.removeprefix("crowdml: ") for line in lines if line.startswith("crowdml: ")] or lines or ["none"]
        return ServerFailed(f"The {self.whose}'s server {what}. Its last words: {said[-1]}")

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: it drains, and ends. What is left after `PATIENCE` is killed: its folder goes in any case."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def in_own_folder(make: Callable[[Path], T]) -> Generator[T]:
    """The crowd that `make` sets up in a new folder. Its processes and the folder are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="crowdml-demo-", ignore_cleanup_errors=True) as folder:
        made: Any = make(Path(folder))
        try:
            yield made
        except KeyboardInterrupt:
            made.server.kill()  # nothing of it is kept
            raise
        finally:
            made.stop()


async def join_fleet(client: Client, home: Folder, by: str, *, devices: int, **more: Any) -> Fleet:
    """What `crowdml fleet --yes` does: find the task, note the consent to its promise and price."""
    chosen = choose_task(await list_tasks(client), None)
    task, protocol = await fetch_task(client, bytes.fromhex(chosen.hash))
    clock = Clock()
    home.make()
    await fetch_artefacts(client, home, task)
    home.accept(task, replace(consent_to(Price.of(protocol, task)), by=by, at=clock.utc()))
    return Fleet(home, client, task, protocol, devices=devices, single=False, clock=clock, **more)


@dataclass
class DoomedDevices:
    """`crowdml fleet` with some devices, until it is killed with -9: then they are gone, in whatever they were at."""

    folder: Path
    devices: int
    killed: int = 0
    process: subprocess.Popen[bytes] | None = None

    async def start(self, url: str, code: str, rows: Path) -> None:
        command = [sys.executable, "-m", "crowdml.cli", "fleet", url, code, "--devices", str(self.devices)]
        source = ["--source", f"ndjson:{rows}", "--folder", str(self.folder), "--yes"]
        with (self.folder.parent / "doomed.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *source], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def check(self) -> None:
        """Raise where the process ended before it was killed."""
        if self.process is not None and self.process.poll() is not None:
            said = (self.folder.parent / "doomed.txt").read_text(errors="replace").strip().splitlines() or ["nothing"]
            raise ServerFailed(f"The devices that were to be killed ended by themselves. Their last words: {said[-1]}")

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            self.killed = self.devices
