"""A crowd of registered devices that speaks the real protocol over a bounded number of sockets, each its own way.

A device here is its signed bytes and the time at which it comes back: it checks out, checks in, and does as it is told
by `Retry-After`, with jitter. The fleet runner's devices also keep ledgers and draw noise, which is several
milliseconds of this machine each: fifty thousand of them would measure the player and not the server.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import sqlite3
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.messages import SERVER, Envelope, encode
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocols.sgd import Gradient
from crowdml.storage.server import Store
from crowdml.task import Task
from crowdml.wire.envelopes import PREFIX, pack_envelope
from crowdml.wire.keys import Key
from crowdml.wire.statements import Statement

NOW = "2025-01-31T12:00:00.000000+00:00"


def register(path: Path, task: Task, devices: int) -> list[Key]:
    """A server's database with a running task and so many devices that joined it."""
    keys = [Key.from_secret(number.to_bytes(32, "big")) for number in range(1, devices + 1)]
    with Store(path) as store:
        store.add_task(task.canonical, task.name, NOW, "running")
        store.invite(bytes(32), NOW, uses=devices)
    with closing(sqlite3.connect(path)) as opened, opened as connection:  # as `enrol` does, in one transaction
        rows = [(number, key.id, key.public, NOW) for number, key in enumerate(keys, 1)]
        connection.executemany("insert into device (number, id, public_key, enrolled_at) values (?, ?, ?, ?)", rows)
        invited = "insert into admission (invitation, device, at) values (1, ?, ?)"
        connection.executemany(invited, [(number, NOW) for number, *_ in rows])
        connection.execute("update invitation set used = ?", (devices,))
    return keys


def signed(task: Task, key: Key, seq: int = 1) -> bytes:
    """A check-in whose gradient is one everywhere."""
    body = encode(Gradient(Release(np.ones((8, 2), np.int32), RECEIVED), None, None, np.int32(0)))
    envelope = Envelope(task.hash, key.id, frozenset((SERVER,)), seq, "sgd/gradient/1", body)
    packed = pack_envelope(envelope, Statement(("zcdp 1/10",), seq, ("zcdp 1/10",)))
    return key.sign(PREFIX + packed) + packed


@dataclass
class Drained:
    """What happened: statuses, how long accepted check-ins took, and when the last one was taken."""

    statuses: Counter[int] = field(default_factory=Counter)
    unexplained: int = 0
    """Of 503 without Retry-After."""
    seconds: list[float] = field(default_factory=list)
    ended: float = 0.0

    def percentile(self, share: float) -> float:
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))]


class _Socket(asyncio.Protocol):
    """One connection: a request at a time, and its answer."""

    def __init__(self) -> None:
        self.data, self.answer = b"", asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        self.data, self.answer = b"", asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.answer

    def data_received(self, data: bytes) -> None:
        self.data += data
        if self.answer.done():  # it was idle for too long, and is told so
            return
        head, found, body = self.data.partition(b"\r\n\r\n")
        if found:
            head = head.lower()
            at = head.find(b"content-length: ")
            if at < 0 or len(body) >= int(head[at + 16 :].split(b"\r", 1)[0]):
                self.answer.set_result((int(head[9:12]), head))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(ConnectionError("the server closed the connection"))


async def drain(port: int, task: Task, bodies: list[bytes], sockets: int, limit: float) -> Drained:
    """All devices come at once; each stays until its check-in is taken, or `limit` seconds are over."""
    found, began = Drained(), time.monotonic()
    path = f"/v1/tasks/{task.hash.hex()}"
    check_out = f"GET {path}/publication HTTP/1.1\r\nHost: x\r\n\r\n".encode()
    check_in = f"POST {path}/check-in HTTP/1.1\r\nHost: x\r\nContent-Type: application/msgpack\r\nContent-Length: "
    draw = random.Random(7)
    waiting = [(0.0, number, False) for number in range(len(bodies))]

    async def work() -> None:
        line: _Socket | None = None

        async def ask(request: bytes) -> tuple[int, bytes]:
            """Over a connection that is kept, or a new one where the server closed it while nothing was asked."""
            nonlocal line
            while True:
                if line is None or line.transport.is_closing():
                    _, line = await asyncio.get_running_loop().create_connection(_Socket, "127.0.0.1", port)
                try:
                    return await line.ask(request)
                except ConnectionError:
                    line = None

        while waiting and time.monotonic() - began < limit:
            due, number, has_read = heapq.heappop(waiting)
            if (left := began + due - time.monotonic()) > 0:
                heapq.heappush(waiting, (due, number, has_read))
                await asyncio.sleep(min(left, 1.0))
                continue
            if not has_read:
                status, _ = await ask(check_out)
                found.statuses[status] += 1
            started = time.monotonic()
            status, head = await ask(f"{check_in}{len(bodies[number])}\r\n\r\n".encode() + bodies[number])
            found.statuses[status] += 1
            if status in (200, 202):
                found.seconds.append(time.monotonic() - started)
                found.ended = time.monotonic() - began
            elif status == 503:
                at = head.find(b"retry-after: ")
                found.unexplained += at < 0
                later = int(head[at + 13 :].split(b"\r", 1)[0]) if at >= 0 else 1
                heapq.heappush(waiting, (time.monotonic() - began + later + draw.random(), number, True))
        if line is not None:
            line.transport.abort()

    await asyncio.gather(*(work() for _ in range(sockets)))
    return found
