"""The event engine beside real devices and a real server with the same seed: the same messages, the same state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from loopback import LoopbackServer, QuickClock, joined, serving, small_task
from masked_server import masked_task

from crowdml.datasets.populations import Population
from crowdml.device.client import Client
from crowdml.device.commits import Commits
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder
from crowdml.device.member import Patience, terms
from crowdml.device.runner import Runner
from crowdml.device.sources import FileSource
from crowdml.messages import decode
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import find
from crowdml.sim import events
from crowdml.sim.cohorts import meet_in_time
from crowdml.sim.fleet import FleetWorld
from crowdml.sim.layout import Holding
from crowdml.sim.run import small_releases
from crowdml.sim.world import World
from crowdml.task import Task
from crowdml.wire.envelopes import open_signed

SEED, DEVICES, BATCH = 11, 5, 5


@dataclass(frozen=True)
class InTurn(World):
    """Device after device has a batch, then each of them its next."""

    def sensed(self, seed: int, device: Any, sample: Any) -> Any:
        turn, within = np.divmod(np.asarray(sample), BATCH)
        time = turn * self.devices + device + within / (2 * BATCH)
        return np.where(np.asarray(sample) < self.samples, time, np.inf)


def held(each: int, passes: int = 1) -> Holding:
    """Rows inside the ball of the task, in 32 bits: a device and the simulator take them as they are."""
    rng = np.random.default_rng(3)
    x = (0.2 * rng.normal(size=(DEVICES * each, 4))).clip(-0.45, 0.45).astype(np.float32)
    y = rng.integers(0, 3, len(x)).astype(np.int32)
    rows = np.arange(len(x), dtype=np.int32).reshape(DEVICES, each)
    return Holding(x, y, Population("dealt", rows, np.full(DEVICES, each, np.int32), 0), passes)


async def live(home: Folder, server: LoopbackServer, task: Task, holding: Holding, turns: int) -> Any:
    """Real devices over HTTP, whose noise is the simulator's. Every check-in is a new start of the device.

    One by one each waits for the one before it; under masks they meet, and the next cohort waits for the sum of this
    one. Returns the server's state.
    """
    client, runner = Client(server.address), server.hub.find(task.hash)
    found, protocol = home.accepted(task.hash)
    patience = Patience(0.05, 0.5)
    await Fleet(home, client, found, protocol, DEVICES, False, QuickClock().clock, patience).enrol(server.code, None)
    member, ledger = terms(home, found, protocol), home.ledger()
    gate = asyncio.Semaphore(DEVICES)

    async def check_in(device: int, trip: int) -> None:
        rows = holding.population.rows[device]
        own = list(zip(holding.x[rows], holding.y[rows].tolist(), strict=True))
        noise = SeededSource(stream(SEED, device, trip))
        await Runner(
            member(home.key(device), ledger.of(device)), task, protocol, client,
            FileSource(f"rows {device}", own, task), commit=Commits(ledger), gate=gate, clock=QuickClock().clock,
            patience=patience, noise=noise, most=1,
        ).run()  # fmt: skip

    try:
        for trip in range(turns):
            if task.masking is not None:
                await asyncio.gather(*(check_in(device, trip) for device in range(DEVICES)))
                while int(runner.fold.state.steps) <= trip:  # the server takes the masks off when its devices are done
                    await asyncio.sleep(0.01)
                continue
            for device in range(DEVICES):
                await check_in(device, trip)
        return runner.fold.state
    finally:
        ledger.close()
        await client.close()


def same(left: Any, right: Any) -> bool:
    return all(
        np.array_equal(np.asarray(one), np.asarray(other))
        for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    )


def test_one_by_one_a_simulated_run_says_what_real_devices_say_and_ends_in_the_same_state(tmp_path: Path) -> None:
    task, holding = small_task(), held(2 * BATCH)
    with serving(tmp_path / "server", task) as server:
        state = asyncio.run(live(joined(tmp_path / "devices", task), server, task, holding, 2))
        journal = [open_signed(body).envelope for _, body in server.hub.store.tail(task.hash)]
    run = events.run(task, holding, InTurn(DEVICES, 2 * BATCH), seed=SEED, keep_said=True)
    assert len(journal) == run.heard == 2 * DEVICES
    for number, envelope in enumerate(journal):
        for name, value in small_releases(decode(envelope.kind, envelope.body)).items():
            np.testing.assert_array_equal(value, run.said[name][number])
    assert same(state, run.state)


@dataclass(frozen=True)
class FleetInTurn(FleetWorld):
    """A fleet whose devices check in one after the other, so that a test knows their order."""

    def trip(self, seed: int, device: Any, trip: Any, start: Any) -> Any:
        return start, start, start


def test_a_simulated_fleet_takes_its_batches_in_the_order_of_real_devices(tmp_path: Path) -> None:
    """A batch serves twice before the next one is read."""
    task, holding = small_task(), held(2 * BATCH, passes=2)
    task = replace(task, privacy=replace(task.privacy, uses=2))
    with serving(tmp_path / "server", task) as server:
        state = asyncio.run(live(joined(tmp_path / "devices", task), server, task, holding, 4))
    at = np.array([InTurn(DEVICES, 20).sensed(0, device, np.arange(4 * BATCH)) for device in range(DEVICES)])
    counts = holding.counts
    at = np.append(at, np.full((DEVICES, 1), np.inf), 1)
    world = FleetInTurn(DEVICES, 4 * BATCH, counts=counts, batch=BATCH, passes=2, at=at)
    assert same(state, events.run(task, holding, world, seed=SEED).state)


def test_a_simulated_cohort_is_a_real_one_whose_masks_came_off(tmp_path: Path) -> None:
    task, holding = masked_task(uses=2), held(BATCH, passes=2)
    with serving(tmp_path / "server", task) as server:
        state = asyncio.run(live(joined(tmp_path / "devices", task), server, task, holding, 2))
    laid = meet_in_time(task, holding, InTurn(DEVICES, BATCH), SEED)
    run = events.run_rounds(task, holding, laid, seed=SEED)
    assert int(state.steps) == len(laid) == 2
    assert same(state, run.state)
    assert (find(task).model(task, run.state) != 0).any()
