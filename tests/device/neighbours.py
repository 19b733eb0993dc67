"""Devices with peers, for tests: a live one at a place, and one whose letters are made by hand."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from loopback import LoopbackServer, QuickClock, joined
from proportions_task import street

from crowdml.device.client import Answer, Client
from crowdml.device.fleet import Fleet
from crowdml.device.joining import claim_place, enrol_device
from crowdml.device.member import Clock, Patience
from crowdml.device.sources import FileSource, Series
from crowdml.messages import Envelope, encode
from crowdml.privacy.losses import Total
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocol import address_of
from crowdml.protocols import find
from crowdml.protocols.proportions import Proportions
from crowdml.task import Task
from crowdml.wire.envelopes import sign
from crowdml.wire.keys import Key
from crowdml.wire.letters import Letter
from crowdml.wire.statements import Statement

STREET = street()
NOTHING = Statement.of(Total(), 0, Total())


def readings(count: int, place: int = 0) -> list[float]:
    """Made up, and unlike at each place: no two windows are the same."""
    return [round(30 + 28 * math.sin(t / 5 + place) + 0.001 * t + 0.0001 * place, 4) for t in range(count)]


class Watched(Client):
    """A client that keeps every byte which a device sent, and may answer itself."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.said: list[bytes] = []
        self.instead: Any = lambda method, path: None

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Any = None, *, largest: int | None = None
    ) -> Answer:
        self.said.append(b"\n".join([method.encode(), path.encode(), repr(headers).encode(), body]))
        found = self.instead(method, path)
        if isinstance(found, Exception):
            raise found
        if isinstance(found, bytes):
            return Answer(200, {}, found)
        return await super().request(method, path, body, headers, largest=largest)


def at_place(folder: Path, place: int, client: Client, time_: QuickClock, task: Task = STREET) -> Fleet:
    """A device of its own folder, whose owner accepted the task."""
    home = joined(folder, task)
    found, protocol = home.accepted(task.hash)
    fleet = Fleet(home, client, found, protocol, clock=time_.clock, patience=Patience(0.1, 10.0))
    fleet.place = place
    return fleet


async def stand(
    folder: Path,
    server: LoopbackServer,
    place: int,
    values: list[float],
    *,
    task: Task = STREET,
    client: Client | None = None,
    time_: QuickClock | None = None,
    tell: Any = lambda _: None,
    source: Any = None,
    peers: dict[int, str] | None = None,
    **options: Any,
) -> tuple[Fleet, Any]:
    """Join at a place, and give what there is."""
    client = client or Client(server.address)
    fleet = at_place(folder, place, client, time_ or QuickClock(), task)
    fleet.tell, fleet.peers, found = tell, peers or {}, fleet.task
    try:
        await fleet.enrol(server.code, None)
        made = FileSource(f"place {place}", Series(values, found), found) if source is None else source(found)
        return fleet, await fleet.run(lambda _: made, **options)
    finally:
        await client.close()


def stands(*arguments: Any, **options: Any) -> tuple[Fleet, Any]:
    return asyncio.run(stand(*arguments, **options))


class Scribe:
    """A device whose letters are written by hand."""

    def __init__(self, place: int, task: Task = STREET) -> None:
        self.key, self.place, self.task, self.seq = Key.generate(), place, task, 0

    def envelope(self, batch: int = 0, counts: Any = (1, 2, 3), **changes: Any) -> Envelope:
        """To whom the task says, with these counts, and then as the test wants it."""
        said = Proportions(
            Release(np.asarray(counts, np.int32) if isinstance(counts, tuple) else counts, RECEIVED),
            np.int32(changes.pop("place", self.place)),
            np.int32(batch),
        )
        protocol = find(self.task)
        assert protocol.peers is not None
        to = frozenset(map(address_of, protocol.peers(self.task)[self.place]))
        made = Envelope(self.task.hash, self.key.id, to, batch + 1, "proportions/counts/1", encode(said))
        return replace(made, **changes)

    def letter(self, batch: int = 0, counts: Any = (1, 2, 3), index: int = 1, **changes: Any) -> Letter:
        return Letter(index, self.key.public, sign(self.envelope(batch, counts, **changes), NOTHING, self.key))

    async def join(self, server: LoopbackServer) -> None:
        client = Client(server.address)
        try:
            await enrol_device(client, self.key, server.code, self.task.hash)
            await claim_place(client, self.key, self.task, self.place, Clock())
        finally:
            await client.close()

    async def check_in(self, server: LoopbackServer, data: bytes) -> Answer:
        client = Client(server.address)
        path = f"/v1/tasks/{self.task.hash.hex()}/check-in"
        try:
            return await client.request("POST", path, data, {"Content-Type": "application/msgpack"})
        finally:
            await client.close()
