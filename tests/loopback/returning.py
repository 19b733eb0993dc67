"""A crowd of real devices that returns after an outage: the fleet runner's, with keys and ledgers on disk.

What takes long over HTTP one by one is written at once, with what the same code would have written: registrations on
the server, and keys and the consent in the fleet's folder. From there on all is as ever: each device checks out,
computes, charges its ledger, and has a signed message in its outbox when the outage begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.device.client import Answer, Client, Limits
from crowdml.device.fleet import Fleet, Summary
from crowdml.device.folder import Folder, Server, consent_to
from crowdml.device.sources import DealtSource, Sample
from crowdml.messages import decode
from crowdml.price import Price
from crowdml.protocols import find, settled
from crowdml.storage.server import Store
from crowdml.task import Task, parse
from crowdml.wire.envelopes import open_signed
from crowdml.wire.keys import Key

NOW = "2025-01-31T12:00:00.000000+00:00"

TEXT = """\
name = "returning"
title = "A task whose weights are the sum of all that was counted"
features = { dimension = 8, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b"] }
model = { kind = "softmax" }
protocol = { kind = "sgd", batch = 1, step = { schedule = "constant", c = 1.0 }, radius = 1e9 }
privacy = { mechanism = "discrete-gaussian", epsilon = { gradient = 16.0 }, delta = 1e-6, \
budget = { epsilon = 16.0, samples = 8 } }
stop = { steps = 1000000 }
"""
TASK = settled(parse(TEXT))


@dataclass
class Crowd:
    """A fleet's folder, whose devices a server knows."""

    folder: Folder
    task: Task
    devices: int
    url: str

    def fleet(self, client: Client) -> Fleet:
        """All of them may be at work at once: nobody waits for another before it asks."""
        task, protocol = self.folder.accepted(self.task.hash)
        return Fleet(self.folder, client, task, protocol, devices=self.devices, single=False, at_work=self.devices)

    def source(self, number: int) -> DealtSource:
        x = np.full(self.task.features.dimension, 0.25, np.float32)
        return DealtSource(f"rows:{number}/{self.devices}", [Sample(x, float(number % 2))])

    def sealed(self) -> list[bytes]:
        """What waits in all outboxes: signed, charged, and not acknowledged."""
        with self.folder.ledger() as ledger:
            return [each.body for number in range(self.devices) for each in ledger.of(number).resend()]

    def receipts(self) -> int:
        with self.folder.ledger() as ledger:
            return sum(len(ledger.of(number).receipts()) for number in range(self.devices))


def join(folder: Path, database: Path, url: str, devices: int, task: Task = TASK) -> Crowd:
    """So many devices that have joined the server of this database, and have given nothing yet."""
    home = Folder(folder)
    home.make()
    home.accept(task, consent_to(Price.of(find(task), task)))
    home.ledger().close()
    with Store(database) as store:
        key = store.setting("server-key")
        store.invite(bytes(32), NOW, uses=devices)
    assert key is not None
    home.pin(Server(url, Key.from_secret(key).public.hex()))
    (folder / "keys").mkdir(mode=0o700)
    with ThreadPoolExecutor(8) as writers:  # each key is a file that is on disk before anybody goes on
        keys = list(writers.map(home.key, range(devices)))
    with closing(sqlite3.connect(database)) as opened, opened as connection:  # as `enrol` does, in one transaction
        rows = [(number, key.id, key.public, NOW) for number, key in enumerate(keys, 1)]
        connection.executemany("insert into device (number, id, public_key, enrolled_at) values (?, ?, ?, ?)", rows)
        invited = "insert into admission (invitation, device, at) values (1, ?, ?)"
        connection.executemany(invited, [(number, NOW) for number, *_ in rows])
        connection.execute("update invitation set used = ?", (devices,))
    return Crowd(home, task, devices, url)


def total(bodies: list[bytes]) -> Any:
    """The sum of the gradients in signed envelopes, in grid steps."""
    found = (open_signed(data).envelope for data in bodies)
    return sum(decode(each.kind, each.body).gradient.value.astype(np.int64) for each in found)


@dataclass
class Heard:
    """What the devices were answered."""

    statuses: Counter[int] = field(default_factory=Counter)
    unexplained: int = 0
    """Of 503 without Retry-After."""
    seconds: list[float] = field(default_factory=list)
    """From each check-in that was taken: from the first byte sent to the last of its receipt."""

    at: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))]


class Listening(Client):
    """The devices' own client, which notes what it hears."""

    def __init__(self, url: str, connections: int) -> None:
        super().__init__(url, limits=Limits(connections=connections))
        self.heard = Heard()

    async def _once(self, connection: Any, request: Any, *rest: Any) -> Answer:
        began = time.perf_counter()
        answer = await super()._once(connection, request, *rest)
        self.heard.statuses[answer.status] += 1
        if answer.status in (200, 202) and request.method == b"POST":
            self.heard.seconds.append(time.perf_counter() - began)
        elif answer.status == 503:
            self.heard.unexplained += "retry-after" not in answer.headers
        return answer


async def give(crowd: Crowd, connections: int) -> None:
    """Every device takes a turn with a server that takes nothing, until all have charged; then their power fails."""
    charged, all_charged = 0, asyncio.Event()

    def tell(what: str) -> None:
        nonlocal charged
        charged += what == "charged"
        if charged == crowd.devices:
            all_charged.set()

    client = Listening(crowd.url, connections)
    fleet = crowd.fleet(client)
    fleet.tell = tell
    running = asyncio.create_task(fleet.run(crowd.source, most=1))
    waiting = asyncio.create_task(all_charged.wait())
    await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
    assert not running.done(), f"the devices stopped: {running.result()}"
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await client.close()


async def come_back(crowd: Crowd, connections: int, limit: float) -> tuple[Heard, Summary]:
    """All devices start at once, each with a message that waits; each goes on until its message is taken."""
    client = Listening(crowd.url, connections)
    try:
        summary = await crowd.fleet(client).run(crowd.source, most=1, seconds=limit)
    finally:
        await client.close()
    return client.heard, summary
