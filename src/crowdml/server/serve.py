"""Run the server: one process, one data folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from crowdml.errors import CrowdmlError
from crowdml.server.app import make_app
from crowdml.server.connection import connection_class
from crowdml.server.hub import Hub
from crowdml.server.limits import Limits
from crowdml.storage.server import Store
from crowdml.task import Task

DATABASE = "server.sqlite"


class CannotServe(CrowdmlError):  # noqa: N818  reads as the sentence it raises
    """The server could not start, or stopped by itself."""


@dataclass(frozen=True)
class Started:
    """What people need to know once the server listens."""

    address: str
    tasks: tuple[str, ...]
    code: str | None
    hub: Hub
    stop: Callable[[], None]
    """Ask the server to drain and end; from any thread."""


class _Server(uvicorn.Server):
    """A stop that was asked for is no failure: SIGINT and SIGTERM drain, and the process goes on to its own end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self.handle_exit, each, None)
        try:
            yield
        finally:
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)


async def serve(
    folder: Path,
    *,
    database: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    tasks: Sequence[Task] = (),
    invite: int = 0,
    certificate: tuple[Path, Path] | None = None,
    limits: Limits | None = None,
    started: Callable[[Started], None] = lambda _: None,
) -> None:
    """Serve until SIGINT or SIGTERM; then drain and take snapshots. `invite` uses of a fresh invitation are printed."""
    listening = _listen(host, port)
    with contextlib.closing(listening):
        await _serve(folder, listening, host, database, tasks, invite, certificate, limits, started)


def _listen(host: str, port: int) -> socket.socket:
    """A socket of our own: uvicorn would end the process where it cannot have one."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise CannotServe(
            f"The server could not listen on {host}:{port}: {error}. Is another one running there? Choose another port."
        ) from error


async def _serve(
    folder: Path,
    listening: socket.socket,
    host: str,
    database: str | None,
    tasks: Sequence[Task],
    invite: int,
    certificate: tuple[Path, Path] | None,
    limits: Limits | None,
    started: Callable[[Started], None],
) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    hub = Hub.open(Store(database or folder / DATABASE, serving=True), limits)
    for task in tasks:
        await hub.add_task(task)
    code = await hub.invite(uses=invite, label="made at the start") if invite else None
    limits = hub.limits
    config = uvicorn.Config(
        make_app(hub),
        http=connection_class(limits),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=20,
        ssl_certfile=certificate[0] if certificate else None,
        ssl_keyfile=certificate[1] if certificate else None,
    )
    server = _Server(config)
    running = asyncio.get_running_loop().create_task(server.serve(sockets=[listening]))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    if server.started:
        scheme = "https" if certificate else "http"
        names = tuple(each.task.name for each in hub.hosted())

        def stop() -> None:
            server.should_exit = True

        started(Started(f"{scheme}://{host}:{listening.getsockname()[1]}", names, code, hub, stop))
    with contextlib.suppress(asyncio.CancelledError):
        await running
    if not server.started:
        raise CannotServe("The server did not start. The log above says why.")


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run the server on uvloop, or on asyncio's own loop where there is none."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)


def log_plainly() -> None:
    """One line a refusal, on stderr, with its time and request id."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in ("uvicorn.error", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
