"""The demo's crowd in the simulator: the same samples, sensed at the same moments, as fast as the real devices were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from crowdml.datasets.populations import Population
from crowdml.demo.compare import Simulated
from crowdml.demo.stages import Stage, moments
from crowdml.pace import poll_wait
from crowdml.protocols import find, sgd
from crowdml.sim.fleet import FleetWorld
from crowdml.sim.world import Delay, World
from crowdml.task import Task

if TYPE_CHECKING:  # whoever imports this has not yet decided for JAX
    from crowdml.sim.layout import Holding, Rounds

QUICK = 0.25
"""The share of rounds by whose time the machine is measured."""


def demo_world(stage: Stage, seconds: float, seed: int, work: float) -> FleetWorld:
    """The world of the demo: its sensors, one process that runs all devices, and a server that is polled.

    Those in the process that is killed have their samples at once, and are the last ones.
    """
    there = stage.devices - stage.doomed
    at = [*moments(there, stage.each, seconds, seed), *([[0.0] * stage.each] * stage.doomed)]
    looks = Delay("uniform", poll_wait(stage.devices))
    return FleetWorld(stage.devices, stage.each, request=looks, work=work, at=np.asarray(at))


def work_of(stage: Stage, seconds: float, seed: int, took: Sequence[float]) -> float:
    """How long one device works on a message of a round on this machine, by how long the real rounds `took`: a quarter
    of the simulated ones end as soon as a quarter of those did, which waited neither for a device that was killed nor
    for the server. Nothing that was learned enters it."""
    assert stage.task.masking is not None
    quick = float(np.quantile(took, QUICK))
    low, high = 0.0, quick / stage.task.masking.cohort
    for _ in range(10):
        middle = (low + high) / 2
        simulated: Any = laid_out_in_time(stage, seconds, seed, middle, seed).took
        low, high = (middle, high) if np.quantile(simulated, QUICK) < quick else (low, middle)
    return (low + high) / 2


def laid_out_in_time(stage: Stage, seconds: float, seed: int, work: float, trial: int) -> Rounds:
    """The cohorts of one simulated trial: public timing alone."""
    from crowdml.sim.cohorts import meet_in_time

    world = demo_world(stage, seconds, seed, work)
    lost = range(stage.devices - stage.doomed, stage.devices)
    holding = _holding(stage, stage.task.privacy.uses)
    return meet_in_time(stage.task, holding, world, trial, lost=lost, rounds=stage.rounds)


def simulate_masked(stage: Stage, seconds: float, seed: int, trials: int, took: Sequence[float]) -> Simulated:
    """The crowd of the demo, with the same samples at the same moments and as fast as the real one, whose rounds `took`
    so many seconds: each time with other noise, and with other delays that decide who meets whom."""
    from crowdml.sim import events
    from crowdml.sim.studies import trial_seeds

    work, holding = work_of(stage, seconds, seed, took), _holding(stage, stage.task.privacy.uses)
    found: list[list[float]] = []
    for trial in trial_seeds(seed, trials):
        laid = laid_out_in_time(stage, seconds, seed, work, trial)
        run = events.run_rounds(stage.task, holding, laid, seed=trial, points=range(stage.rounds + 1))
        curve = [stage.accuracy(each) for each in run.weights]
        found.append([*curve, *[curve[-1]] * stage.rounds][: stage.rounds + 1])
    return Simulated(np.arange(stage.rounds + 1), np.array(found))


def simulate_unmasked(stage: Stage, seeds: Sequence[int]) -> Simulated:
    """As many passes for the same epsilon, without masks; its step by the same public rule."""
    from crowdml.sim import compiled
    from crowdml.sim.layout import lay_out

    task, devices = unmasked(stage.task), stage.devices
    uses = task.privacy.uses
    points = [devices * use for use in range(uses + 1)]
    found: list[list[float]] = []
    for seed in seeds:
        world = World(devices, stage.each * uses)
        schedule = lay_out(world, seed=seed, batch=stage.each, capacity=find(task).capacity(task))
        (run,) = compiled.run(task, _holding(stage, uses), [schedule], [seed], points=points, workers=1)
        found.append([stage.accuracy(each) for each in run.weights])
    return Simulated(np.asarray(points), np.array(found))


def simulate_honest(stage: Stage, seed: int, trials: int) -> Simulated:
    """The honest devices of a crowd alone, with the samples that they hold there, and the same rule. It is told of as
    many liars, or of as many as it could stand among so few uploads."""
    from crowdml.sim.studies import trial_seeds
    from crowdml.sim.trial import Trial, run_trial

    rows = np.delete(stage.rows, list(stage.liars), axis=0)
    told = stage.task.protocol["combine"]
    combine = {**told, "uploads": len(rows), "f": min(told["f"], (len(rows) - 3) // 2)}
    task = stage.task.with_(protocol={"combine": combine})
    people = Population("dealt", rows.astype(np.int32), np.full(len(rows), stage.each, np.int32), 0)
    found: list[list[float]] = []
    for trial in trial_seeds(seed, trials):
        run = run_trial(Trial(task, people, trial, points=(0, stage.rounds), engine="events"), stage.x, stage.y)
        found.append([stage.accuracy(each) for each in run.weights])
    return Simulated(np.array([0, stage.rounds]), np.array(found))


def unmasked(task: Task) -> Task:
    """This task at the same price, with all of the noise on each device."""
    plain = replace(task, masking=None, privacy=replace(task.privacy, mechanism="discrete-gaussian", grid=None))
    c = Fraction(sgd.public_step(plain))
    return plain.with_(protocol={"step": {"schedule": "1/sqrt(t)", "c": c}})


def _holding(stage: Stage, passes: int) -> Holding:
    from crowdml.sim.layout import Holding

    counts = np.full(stage.devices, stage.each, np.int32)
    return Holding(stage.x, stage.y, Population("dealt", stage.rows.astype(np.int32), counts, 0), passes)
