"""`crowdml serve` and `crowdml fleet` in processes of their own: started, killed with -9, started again, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from crowdml.errors import CrowdmlError

__all__ = ["DoomedDevices", "ServerFailed", "ServerProcess", "heed_signals", "run_until_signal"]


T = TypeVar("T")

PATIENCE = 3.0
"""Seconds for a server to end in order: on a busy machine it may have a minute's work before it."""


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


@dataclass
class ServerProcess:
    """One folder and one port; the process comes and goes. Its log is `log.txt` in the folder."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    async def start(self, *options: str) -> dict[str, Any]:
        """Start, and wait until it listens; what it said then."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        command = [sys.executable, "-m", "crowdml.cli", "serve", "--folder", str(self.folder / "server")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--json", "-", *options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # an interrupt at the terminal is for the demo, which stops it in order
            )
        self.starts += 1
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
        return ServerFailed(f"The demo's server {what}. Its last words: {said[-1]}")

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

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            self.killed = self.devices
