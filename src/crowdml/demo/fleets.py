"""A live fleet as anybody would start one: `crowdml serve` and `crowdml fleet` on this machine. Nobody is killed."""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from crowdml.datasets import load
from crowdml.datasets.populations import Population, iid
from crowdml.demo.compare import Simulated
from crowdml.demo.process import ServerProcess, join_fleet
from crowdml.demo.stages import Stage
from crowdml.device.client import Client
from crowdml.device.folder import Folder
from crowdml.device.sources import FileSource
from crowdml.features.norms import Norm
from crowdml.protocols import find, settled
from crowdml.secagg.server import ADVERTISE
from crowdml.server.transcript import write_transcript
from crowdml.storage.server import Store
from crowdml.task import Task

LOOK_EVERY = 0.25
"""Seconds between two looks at whether the server has added up its last cohort."""


def fleet_stage(task: Task, data_name: str, devices: int | None, seed: int) -> Stage:
    """A task on a named data set, whose rows are dealt out evenly; as many devices as have a check-in each, where
    nobody says how many."""
    task = settled(task)
    norm = task.features.norm.kind if task.features.low is None else "none"  # bounds are those of raw columns
    data = load(data_name, normalise=cast(Norm, norm))
    many = devices or max(1, len(data.y_train) // find(task).batch(task))
    rows = iid(len(data.y_train), many, seed).rows
    return Stage(task, "rows", data.x_train, data.y_train, data.x_test, data.y_test, rows, task.stop.steps or 1, 0)


async def run_fleet(folder: Path, stage: Stage) -> float:
    """Serve the task, and run a fleet until its devices have given what they may. How good its model is in the end."""
    task, server = stage.task, ServerProcess(folder, whose="fleet", rates=())
    try:
        code = await server.host(task, stage.devices)
        client = Client(server.url)
        try:
            too_few = asyncio.Event()
            home = Folder(folder / "devices")
            fleet = await join_fleet(client, home, "demo", devices=stage.devices, say=lambda _: too_few.set())
            await fleet.enrol(code, None)

            def source(number: int) -> FileSource:
                return FileSource(f"demo:{number}/{stage.devices}", stage.held_by(number), task)

            learning = asyncio.create_task(fleet.run(source))
            await _until_given(learning, too_few, task)
            return await asyncio.to_thread(_learned, server.database, stage)
        finally:
            await client.close()
    finally:
        server.stop()


async def _until_given(learning: asyncio.Task[Any], too_few: asyncio.Event, task: Task) -> None:
    """Until every device is done, or those that are left are too few for a cohort and their last round is over."""
    waiting = asyncio.create_task(too_few.wait())
    try:
        await asyncio.wait({learning, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not learning.done() and task.masking is not None:
            await asyncio.wait({learning}, timeout=float(task.masking.lease))
    finally:
        for each in (waiting, learning):
            each.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await learning


def _learned(database: Path, stage: Stage) -> float:
    """Accuracy of the model that the journal leads to, once no round is under way."""
    with Store(database) as store:
        while any(each.row.phase != ADVERTISE for each in store.open_rounds(stage.task.hash)):
            time.sleep(LOOK_EVERY)
        return stage.accuracy(write_transcript(store, stage.task.hash, io.BytesIO()).weights)


def simulate_fleet(stage: Stage, seed: int, trials: int) -> Simulated:
    """Simulate the fleet: its devices and rows, the timing of a live one, and other noise in each trial."""
    from crowdml.sim.studies import simulate

    held = np.full(stage.devices, stage.each, np.int32)
    people = Population("dealt", stage.rows.astype(np.int32), held, 0)
    test = stage.x_test, stage.y_test
    study = simulate(
        stage.task, stage.x, stage.y, devices=people, test=test, trials=trials, seed=seed, world="fleet", points=1
    )
    return Simulated(np.arange(1), study.scores[:, None])
