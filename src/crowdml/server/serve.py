"""Run the server: one process, one data folder."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from crowdml.errors import CrowdmlError
from crowdml.server.app import make_app
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
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    hub = Hub.open(Store(database or folder / DATABASE, serving=True), limits)
    for task in tasks:
        await hub.add_task(task)
    code = await hub.invite(uses=invite, label="made at the start") if invite else None
    config = uvicorn.Config(
        make_app(hub),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=10_000,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=20,
        h11_max_incomplete_event_size=16_384,
        ssl_certfile=certificate[0] if certificate else None,
        ssl_keyfile=certificate[1] if certificate else None,
    )
    server = uvicorn.Server(config)
    running = asyncio.get_running_loop().create_task(server.serve())
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    if server.started:
        listening = server.servers[0].sockets[0].getsockname()
        scheme = "https" if certificate else "http"
        names = tuple(each.task.name for each in hub.hosted())
        started(Started(f"{scheme}://{host}:{listening[1]}", names, code))
    with contextlib.suppress(asyncio.CancelledError):
        await running
    if not server.started:
        raise CannotServe(f"The server could not listen on {host}:{port}. Is another one running there?")


def log_plainly() -> None:
    """One line a refusal, on stderr, with its time and request id."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    for name in ("uvicorn.error", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
