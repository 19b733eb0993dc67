"""A crowd of real devices for a figure: a server in a process of its own, and a fleet of devices over HTTP.

Every device has its key, ledger and outbox, as `crowdml fleet` makes them; the model is read as any device reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.device.client import Client, Limits
from crowdml.device.fleet import Fleet, Summary
from crowdml.device.folder import Folder, offer
from crowdml.device.joining import choose_task, fetch_task, list_tasks
from crowdml.device.runner import Clock
from crowdml.device.sources import DealtSource, Sample
from crowdml.errors import CrowdmlError
from crowdml.messages import decode
from crowdml.server.hub import utc_now
from crowdml.storage.server import Store
from crowdml.task import Task

__all__ = ["Played", "play"]

LOOK_EVERY = 0.1
"""Seconds between two looks at the publication."""
RATES = ("--device-rate", "1000", "--pace", "1000", "--address-rate", "100000")


class ServerFailed(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """The server process never listened."""


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
    home, server = folder / "devices", folder / "server"
    server.mkdir(parents=True, mode=0o700)
    with Store(server / "server.sqlite") as store:
        store.add_task(task.canonical, task.name, utc_now(), "running")
    with _served(server, len(rows)) as (url, code):
        client, looking = (Client(url, limits=Limits(connections=many)) for many in (16, 1))
        try:
            fleet = await _join(client, Folder(home), len(rows), at_work)
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
    rounds = tuple(sorted(seen))
    return Played(rounds, np.stack([seen[number] for number in rounds]), taken, summary)


async def _join(client: Client, home: Folder, devices: int, at_work: int) -> Fleet:
    """What `crowdml fleet --yes` does: find the task, note the consent to its promise and price."""
    chosen = choose_task(await list_tasks(client), None)
    task, protocol = await fetch_task(client, bytes.fromhex(chosen.hash))
    clock = Clock()
    home.make()
    home.accept(task, replace(offer(task, protocol), by="figure", at=clock.utc()))
    return Fleet(home, client, task, protocol, devices=devices, single=False, clock=clock, at_work=at_work)


@contextlib.contextmanager
def _served(folder: Path, devices: int) -> Generator[tuple[str, str]]:
    """A server that listens, by its address and the code of an invitation; it is stopped at the end."""
    log = folder.parent / "log.txt"
    command = [sys.executable, "-m", "crowdml.cli", "serve", "--folder", str(folder), "--port", "0", "--json", "-"]
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [*command, "--invite", str(devices), *RATES],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise ServerFailed(f"the figure's server did not start. Its last words: {last}")
        told = json.loads(said)
        yield told["address"], told["code"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()
