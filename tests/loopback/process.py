"""A real `crowdml serve` in a process of its own, which can be killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device import TEXT, Line

from crowdml.storage.server import Store

OPTIONS = ("--device-rate", "100000", "--address-rate", "100000")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


WRITE_NOTHING = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Becomes the process that its arguments name, which can make no file larger than 64 KiB: not the database's log, but
the index of that log, for which SQLite uses the room of the one before."""


@dataclass
class Server:
    """One folder and one port; the process comes and goes."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    database: str | None = None
    """A PostgreSQL elsewhere; None: SQLite in the folder."""
    can_write: bool = True
    """Whether the process may write to the database: if not, it is to it as if the disk were full."""

    def write_task(self, name: str = "one", steps: int = 1_000_000) -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(TEXT.format(name=name, steps=steps))
        return path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def where(self) -> str:
        """What a `Store` is opened with, beside the server."""
        return self.database or str(self.data / "server.sqlite")

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def spawn(self, *options: str) -> None:
        before = [] if self.can_write else ["-c", WRITE_NOTHING]
        command = [sys.executable, *before, "-m", "crowdml.cli", "serve", "--folder", str(self.data)]
        if self.database is not None:
            command += ["--database", self.database]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), "--json", "-", *OPTIONS, *options],
                stdout=subprocess.PIPE,
                stderr=log if self.can_write else subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        self.starts += 1

    def started(self) -> dict[str, Any]:
        """Wait until it listens."""
        assert self.process is not None
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, f"the server did not start: {self.log.read_text()[-2000:]}"
        return json.loads(said)

    def start(self, *options: str) -> dict[str, Any]:
        self.spawn(*options)
        return self.started()

    def kill(self) -> None:
        """SIGKILL: no handler runs, nothing is flushed."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM: it drains, and ends well."""
        return self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(how)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return code

    def line(self) -> Line:
        return Line("127.0.0.1", self.port)


def journal(server: Server, task: bytes, after: int = 0) -> Sequence[tuple[int, str, int]]:
    """Index, device and seq of every entry, read beside the server."""
    with Store(server.where) as store:
        return [(entry.index, entry.device, entry.seq) for entry in store.entries(task, after)]
