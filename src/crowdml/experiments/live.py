"""A crowd of real devices for a figure: a server in a process of its own, and a fleet of devices over HTTP.

Every device has its key, ledger and outbox, as `crowdml fleet` makes them; the model is read as any device reads it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.demo.process import ServerProcess, join_fleet
from crowdml.device.client import Client, Limits
from crowdml.device.fleet import Summary
from crowdml.device.folder import Folder
from crowdml.device.sources import DealtSource, Sample
from crowdml.messages import decode
from crowdml.task import Task

LOOK_EVERY = 0.1
"""Seconds between two looks at the publication."""


@dataclass(frozen=True)
class Played:
    """The weights of the rounds that were seen, and what the fleet did."""

    rounds: tuple[int, ...]
    weights: Array
    taken: int
    """Check-ins behind the last model: others were of an older round."""
    summary: Summary


def play(task: Task, x: Array, y: Array, rows: Array, folder: Path, *, at_work: int) -> Played:
    """Device i holds `rows[i]` of x [n, d], y [n], and gives them in order; `at_work` devices are active at a time."""
    return asyncio.run(_play(task, x, y, rows, folder, at_work))


async def _play(task: Task, x: Array, y: Array, rows: Array, folder: Path, at_work: int) -> Played:
    server = ServerProcess(folder, whose="figure")
    try:
        code = await server.host(task, len(rows))
        client, looking = (Client(server.url, limits=Limits(connections=many)) for many in (16, 1))
        try:
            home = Folder(folder / "devices")
            fleet = await join_fleet(client, home, "figure", devices=len(rows), at_work=at_work)
            await fleet.enrol(code, None)

            def source(number: int) -> DealtSource:
                held = [Sample(x[row], float(y[row])) for row in rows[number]]
                return DealtSource(f"figure:{number}/{len(rows)}", held)

            learning = asyncio.create_task(fleet.run(source))
            seen: dict[int, Array] = {}
            path, taken = f"/v1/tasks/{task.hash.hex()}/publication", 0
            while True:
                over = learning.done()
                answer = await looking.request("GET", path)
                offered: Any = decode(answer.headers["crowdml-kind"], answer.body)
                seen[int(offered.version)] = np.array(offered.weights)
                taken = int(offered.taken)
                if over:
                    break
                await asyncio.wait((learning,), timeout=LOOK_EVERY)
            summary = learning.result()
        finally:
            await client.close()
            await looking.close()
    finally:
        server.stop()
    rounds = tuple(sorted(seen))
    return Played(rounds, np.stack([seen[number] for number in rounds]), taken, summary)
