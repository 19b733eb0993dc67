"""Run the server: one process, one data folder."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import signal
import socket
import ssl
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
from crowdml.server.invitations import ADDRESS, AUTHORITY
from crowdml.server.limits import PROXIES, Limits
from crowdml.server.operators import new_setup_token
from crowdml.server.tls import Local, TlsError, local_certificate, reachable_host
from crowdml.storage.server import Store, StoreError
from crowdml.task import Task

DATABASE = "server.sqlite"
RENEW_EVERY = 3600.0
"""Seconds between looks at the certificate: one that was renewed is used for new connections."""
FILES = 128
"""Files that the server keeps open beside its connections, at most: the database, the log, what a page reads."""
log = logging.getLogger("crowdml.server")


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
    setup: str | None = None
    """Where the first operator makes an account; None once there is one. Shown once, kept nowhere."""
    local: Local | None = None
    """The local authority of `--tls-local`."""


class _Server(uvicorn.Server):
    """A stop that was asked for is no failure: SIGINT and SIGTERM drain, and the process goes on to its own end."""

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self.ending = ending

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.ending.set()  # live pages end now; what else is under way is waited for
        await super().shutdown(sockets)

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
    tls_local: bool = False,
    limits: Limits | None = None,
    started: Callable[[Started], None] = lambda _: None,
) -> None:
    """Serve until SIGINT or SIGTERM; then drain and take snapshots. `invite` uses of a fresh invitation are printed."""
    renewing = None
    with contextlib.closing(_listen(host, port)) as listening:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        local = local_certificate(folder, host) if tls_local else None
        if local is not None:
            certificate = local.certificate, local.key
        tls = None if certificate is None else ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if certificate is not None and tls is not None:
            _load(tls, certificate)  # a wrong file is said before anything starts
            renewing = asyncio.create_task(_renew(tls, certificate, folder if local else None, host))
        try:
            await _serve(folder, listening, host, database, tasks, invite, tls, local, limits, started)
        finally:
            if renewing is not None:
                renewing.cancel()


def _load(context: ssl.SSLContext, certificate: tuple[Path, Path]) -> None:
    try:
        context.load_cert_chain(*certificate)
    except (OSError, ssl.SSLError) as error:
        raise CannotServe(
            f"The certificate {certificate[0]} with the key {certificate[1]} cannot be used: {error}. "
            "Name the chain first, then its key, both in PEM."
        ) from error


async def _renew(context: ssl.SSLContext, certificate: tuple[Path, Path], folder: Path | None, host: str) -> None:
    """Use a renewed certificate for new connections, without a restart: our own, or files that somebody replaced."""
    loaded = _age(certificate)
    while True:
        await asyncio.sleep(RENEW_EVERY)
        try:
            if folder is not None:
                await asyncio.to_thread(local_certificate, folder, host)
            if _age(certificate) != loaded:
                _load(context, certificate)
                loaded = _age(certificate)
                log.info("the certificate was renewed")
        except (TlsError, CannotServe, OSError) as error:
            log.error("the certificate could not be renewed: %s", error)


def _age(certificate: tuple[Path, Path]) -> tuple[int, ...]:
    return tuple(each.stat().st_mtime_ns for each in certificate)


def _listen(host: str, port: int) -> socket.socket:
    """A socket of our own: uvicorn would end the process where it cannot have one."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=2048)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # for its connections: asyncio does not set it
        return listening
    except (OSError, OverflowError) as error:
        raise CannotServe(f"The server could not listen on {host}:{port}: {_why(error, host, port)}") from error


def _why(error: OSError | OverflowError, host: str, port: int) -> str:
    """What is wrong with the address, and what to do."""
    if isinstance(error, socket.gaierror):
        return f"nobody knows the name {host}. Name an address of this machine, or 0.0.0.0 for all of them."
    number = getattr(error, "errno", None)
    if number == errno.EADDRNOTAVAIL:
        return "it is no address of this machine. Name one of its own, or 0.0.0.0 for all of them."
    if number == errno.EADDRINUSE:
        return "another program listens there. Stop it, or choose another --port."
    if number == errno.EACCES:
        return f"the system does not let this user have port {port}. Choose a --port above 1023."
    return f"{getattr(error, 'strerror', None) or error}. Choose another --host or --port."


def _with_files(limits: Limits, *, is_tls: bool) -> Limits:
    """Have the system allow a file for each connection, or allow no more connections than it has files for.

    A server that runs out of files takes no connection at all, and cannot even say so.
    """
    try:
        import resource
    except ImportError:  # there is no such limit here
        return limits
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    beside = FILES + (limits.handshakes if is_tls else 0)
    endless, wanted = resource.RLIM_INFINITY, limits.connections + beside
    if soft != endless and soft < wanted:
        better = wanted if hard == endless else min(hard, wanted)
        with contextlib.suppress(OSError, ValueError):  # some systems have a limit that they do not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (better, hard))
            soft = better
    if soft == endless or soft >= wanted:
        return limits
    if is_tls and beside > soft // 2:  # fewer handshakes at once, so that connections are left
        limits = dataclasses.replace(limits, handshakes=max(1, (soft - FILES) // 2))
        beside = FILES + limits.handshakes
    most = max(1, soft - beside)
    log.warning("this process may open %d files: %d connections are taken instead of %d. Raise it: docs/server.md",
                soft, most, limits.connections)  # fmt: skip
    return dataclasses.replace(limits, connections=most)


async def _serve(
    folder: Path,
    listening: socket.socket,
    host: str,
    database: str | None,
    tasks: Sequence[Task],
    invite: int,
    tls: ssl.SSLContext | None,
    local: Local | None,
    limits: Limits | None,
    started: Callable[[Started], None],
) -> None:
    limits = _with_files(limits or Limits(), is_tls=tls is not None)
    hub = Hub.open(Store(database or folder / DATABASE, serving=True), limits)
    for task in tasks:
        await hub.add_task(task)
    code = await hub.invite(uses=invite, label="made at the start") if invite else None
    address = f"{'http' if tls is None else 'https'}://{reachable_host(host)}:{listening.getsockname()[1]}"
    token = None
    try:
        await hub.write(_note_address, hub.store, address, local)
        token = await hub.write(new_setup_token, hub.store)
    except StoreError as error:  # a disk that takes nothing more keeps nobody from reading what is there
        log.error("where this server listens was not kept: %s", error)
    app = make_app(hub)
    config = uvicorn.Config(
        app,
        http=connection_class(limits, app, hub.queue, tls),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=limits.behind_proxy,
        forwarded_allow_ips=list(PROXIES),
        timeout_graceful_shutdown=20,
    )
    server = _Server(config, hub.ending)
    running = asyncio.get_running_loop().create_task(server.serve(sockets=[listening]))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    if server.started:
        names = tuple(each.task.name for each in hub.hosted())

        def stop() -> None:
            server.should_exit = True

        setup = None if token is None else f"{address}/operator/setup?token={token}"
        started(Started(address, names, code, hub, stop, setup, local))
    with contextlib.suppress(asyncio.CancelledError):
        await running
    if not server.started:
        raise CannotServe("The server did not start. The log above says why.")


def _note_address(store: Store, address: str, local: Local | None) -> None:
    """For invitations: where this server is, and what to trust there. What is so already is not written again."""
    notes = {ADDRESS: address.encode(), AUTHORITY: b"" if local is None else local.authority.read_bytes()}
    for name, value in notes.items():
        if store.setting(name) != value:
            store.set_setting(name, value)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run the server on uvloop, or on asyncio's own loop where there is none."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(work)
