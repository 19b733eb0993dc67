"""`crowdml serve` and `crowdml fleet` in processes of their own: started, killed with -9, started again, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crowdml.errors import CrowdmlError

__all__ = ["DoomedDevices", "ServerFailed", "ServerProcess"]


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
        said = await asyncio.to_thread(self.process.stdout.readline)
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
        """SIGTERM: it drains, and ends. Whatever is left after that is killed."""
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(30)
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
