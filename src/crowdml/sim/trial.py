"""A trial: one run of a task on a simulated crowd, as a value that can be pickled and run anywhere (`run_trial`).

Two engines run the protocol's own handlers: `events` takes any channel, `compiled` those with a layout of fixed size
and handlers that can be traced. Both draw the same noise from the trial's seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from crowdml import plugins
from crowdml.arrays import Array, Samples
from crowdml.attacks import Attackers
from crowdml.channels import Channel
from crowdml.datasets.populations import DrawnPopulation, Population
from crowdml.errors import DataError, ProtocolError, TaskError
from crowdml.plugins import blaming, explained, failed_at
from crowdml.protocol import Protocol
from crowdml.protocols import find
from crowdml.protocols.registry import load_plugin
from crowdml.sim import compiled, events
from crowdml.sim.cohorts import meet_in_time
from crowdml.sim.fleet import fleet_world
from crowdml.sim.layout import Holding, Rounds, Schedule, given, lay_out, meet, refuse_repeats, spread_out
from crowdml.sim.run import Run, Tick
from crowdml.sim.world import LIES, Delay, World, uniform
from crowdml.task import Task
from crowdml.turn import Tamper

ENGINES = ("compiled", "events")


@dataclass(frozen=True)
class Deal:
    """Rows dealt out by the trial's seed: 'iid', 'by_class' or 'by_user', where `groups` say whose each row is."""

    kind: str = "iid"
    devices: int = 1000
    groups: Array | None = None


@dataclass(frozen=True)
class Trial:
    """One run of a task on a simulated crowd: everything but the samples. It can be pickled."""

    task: Task
    people: Population | DrawnPopulation | Deal
    """Which device holds which rows."""
    seed: int
    """The seed of the deal, the timing and the noise."""
    passes: int | None = None
    """Passes over the samples; None: the task's `privacy.uses`."""
    delay: Delay = field(default_factory=Delay)
    """How long each leg of a trip takes. Cohorts keep step without one, and overlap with one; peers keep step."""
    world: World | Literal["fleet"] | None = None
    """When devices sense and how long messages take, where that is more than a delay; "fleet": as in a live fleet."""
    dropout: float = 0.0
    """The chance that a device of a cohort vanishes after it drew its noise."""
    engine: str = "compiled"
    """'compiled' where it can run the task, and else events; or 'events'."""
    points: int | tuple[int, ...] = 40
    """How often the model is looked at, or after which check-ins; where there are rounds, after which rounds."""
    noise: bool = True
    liars: Mapping[int, Tamper] | Attackers = field(default_factory=dict)
    """Devices that lie, by their number, and what they do, or a share of all. Their functions must be importable to be
    pickled."""

    server_rows: Samples | None = None
    """What the server holds itself, for a protocol that releases something of it through a door of the server's."""

    def __reduce__(self) -> Any:
        return _restored, (tuple(plugins.FILES), vars(self))


def _restored(files: tuple[Path, ...], values: Mapping[str, Any]) -> Trial:
    """A trial in another process, with the plug-ins that were loaded from files where it came from."""
    for file in files:
        if file not in plugins.FILES:
            load_plugin(file)
    return Trial(**values)


def run_trial(trial: Trial, x: Array, y: Array, tick: Tick = lambda _: None) -> Run:
    """Run a trial on rows x [n, d], y [n]. Nothing is written anywhere, so a trial that is killed leaves nothing."""
    laid = laid_out(trial, y)
    return laid.run(x, y, laid.looks(laid.length), tick)


@dataclass(frozen=True)
class Laid:
    """A trial, laid out: who holds what, who checks in when or meets whom. Known before any weight is computed."""

    trial: Trial
    protocol: Protocol
    population: Population | DrawnPopulation
    passes: int
    sensed: Array
    """Samples that each device gives, passes included."""
    world: World
    layout: Schedule | Rounds
    engine: str
    """The engine that runs it."""

    @property
    def task(self) -> Task:
        return self.trial.task

    @property
    def liars(self) -> Mapping[int, Tamper]:
        """The devices that lie; `laid_out` drew them where a share does."""
        assert not isinstance(self.trial.liars, Attackers)
        return self.trial.liars

    @property
    def in_rounds(self) -> bool:
        """Whether the server hears rounds: then points and lengths count these."""
        return self.protocol.channel(self.task) in (Channel.SUMMED, Channel.GATHERED)

    @property
    def length(self) -> int:
        """How many check-ins, or rounds, there may be."""
        if isinstance(self.layout, Rounds):
            return self.layout.length
        gathering = self.protocol.gathers(self.task)  # in time: no more rounds than if each had the fewest uploads
        return len(self.layout) if gathering is None else max(1, len(self.layout) // gathering.minimum)

    def looks(self, length: int) -> Array:
        """When the model is looked at in a run of this length. Even stretches compile once; others would each."""
        points = self.trial.points
        if isinstance(points, tuple):
            return np.asarray(points)
        even = -(-length // points)
        return np.append(np.arange(even, length, even), length)

    @cached_property
    def planned(self) -> Schedule:
        """Every check-in that samples, passes and `stop.steps` allow: public values alone decide."""
        last, layout, batch = self.task.stop.steps, self.layout, self.protocol.batch(self.task)
        if isinstance(layout, Schedule):
            if last is None or self.in_rounds:
                return layout
            return layout.sent(self.protocol.check_ins_until(self.task, layout.version, layout.trip, last))
        if last is None:
            return layout.paid(batch)
        made = np.cumsum(layout.summed & layout.closes)  # who vanishes decides which rounds are summed
        count = int((made[layout.closes] < last).sum()) + 1
        return layout.paid(batch, None if count > layout.length else count)

    def run(self, x: Array, y: Array, looks: Array, tick: Tick = lambda _: None) -> Run:
        """The trial on these samples, looked at as often as `looks` says, however early it stops."""
        if x.shape[1] != self.task.features.dimension:
            raise DataError(
                f"task {self.task.name!r} wants features.dimension = {self.task.features.dimension}, and this data has "
                f"{x.shape[1]} features. Change the task, or name other data."
            )
        holding = Holding(x, y, self.population, self.passes)
        with blaming(f"protocol {self.protocol.name!r} failed", "Mend the plug-in.", alone=True):
            run = (self._compiled if self.engine == "compiled" else self._by_events)(holding, looks.tolist(), tick)
        if run.stopped is not None and isinstance(self.layout, Schedule) and not self.in_rounds:
            run = replace(run, schedule=self.layout.sent(run.heard))
        places = np.searchsorted(run.points, looks, side="left").clip(max=len(run.points) - 1)
        places[-1] = len(run.points) - 1  # its own end is the last look
        return replace(run, points=looks, weights=run.weights[places])

    def _compiled(self, holding: Holding, points: list[int], tick: Tick) -> Run:
        trial = self.trial
        try:
            (run,) = compiled.run(trial.task, holding, [self.layout], [trial.seed], points=points, noise=trial.noise,
                                  liars=self.liars, server_rows=trial.server_rows, tick=tick)  # fmt: skip
        except jax.errors.JAXTypeError as error:
            raise ProtocolError(
                f"protocol {self.protocol.name!r} cannot be compiled{failed_at(error)}: {explained(error)}. Take "
                "engine 'events', or say traced=False in its Protocol."
            ) from error
        return run

    def _by_events(self, holding: Holding, points: list[int], tick: Tick) -> Run:
        trial, task, layout = self.trial, self.trial.task, self.layout
        told: Any = {"seed": trial.seed, "noise": trial.noise, "liars": self.liars, "tick": tick}
        if isinstance(layout, Rounds):
            return events.run_rounds(task, holding, layout, points=points, server_rows=trial.server_rows, **told)
        if self.protocol.channel(task) is Channel.RELAYED:
            found = events.exchange(task, holding, **told)
            weights = np.asarray(self.protocol.model(task, found.server))[None]
            count = int(found.check_ins.sum())
            return Run(task, trial.seed, layout, np.asarray([count]), weights, found.server, found.stopped, heard=count)
        traced = self.protocol.traced and not self.protocol.waits and not compiled.rates_uploads(task)
        backend = "jax" if traced else "numpy"
        told |= {"points": points, "backend": backend, "server_rows": trial.server_rows}
        return events.run(task, holding, self.world, **told)


def laid_out(trial: Trial, y: Array) -> Laid:
    """Lay a trial out. A device gives no more samples than `privacy.budget.samples`, and none where it holds fewer than
    a check-in takes; several passes over a buffer that overflows are refused: no batch ever holds one sample twice.
    """
    task, people, seed = trial.task, trial.people, trial.seed
    protocol, channel = find(task), find(task).channel(task)
    batch, cap = protocol.batch(task), task.privacy.budget.samples if task.privacy.budget else None
    passes = task.privacy.uses if trial.passes is None else trial.passes
    _refuse(trial, channel)
    if isinstance(people, Deal):
        people = spread_out(people.kind, y, people.devices, seed, people.groups)
    if isinstance(people, DrawnPopulation):
        each = (people.per_device if cap is None else min(people.per_device, cap)) // batch * batch
        sensed: Array = np.full(people.devices, each * passes)
    else:
        people, sensed = given(people, batch, cap, passes)
    late = trial.delay
    if trial.world == "fleet":
        world: World = fleet_world(sensed, batch, passes)
    else:
        world = trial.world or World(
            people.devices, int(sensed.max()), counts=sensed, request=late, check_out=late, check_in=late
        )
    engine = "compiled" if trial.engine == "compiled" and compiled.can_run(task) else "events"
    in_time, gathering = channel is Channel.ONE_BY_ONE, protocol.gathers(task)
    if gathering is not None and task.masking is None:
        in_time = trial.world is not None or late != Delay() or gathering.seconds is not None or protocol.waits
        engine = "events" if in_time else engine
    layout: Schedule | Rounds
    if in_time:
        capacity = world.capacity(protocol.capacity(task))
        layout = lay_out(world, seed=seed, batch=batch, capacity=capacity)
        refuse_repeats(layout, batch=batch, capacity=capacity, passes=passes)
    elif channel is Channel.RELAYED:
        layout = _in_step(sensed // batch, batch)
    else:
        empty = np.zeros((1, 1), np.float32), np.zeros(1, np.int32)
        holding = Holding(*empty, people, passes)
        if task.masking is not None and (trial.world is not None or late != Delay()):
            layout, engine = meet_in_time(task, holding, world, seed, dropout=trial.dropout), "events"
        else:
            layout = meet(task, holding, seed, dropout=trial.dropout)
    if isinstance(layout, Rounds) and not layout.length:
        raise TaskError(
            f"{people.devices} devices meet in {len(layout)} cohorts, of which {int(layout.summed.sum())} have enough "
            f"survivors, and a round of task {task.name!r} takes {layout.gathered}. Take more devices, smaller cohorts "
            "or fewer of them for a round."
        )
    liars = trial.liars
    if isinstance(liars, Attackers):
        order = np.argsort(uniform(seed, np.arange(people.devices), 0, LIES))
        if liars.attack == "sybil" and isinstance(layout, Rounds):  # cohort after cohort
            order = np.fromiter(dict.fromkeys(layout.device[layout.there].tolist()), np.int64)
        liars = liars.of(task, order)
    _refuse_strangers(liars, people.devices)
    return Laid(replace(trial, liars=liars), protocol, people, passes, sensed, world, layout, engine)


def _refuse(trial: Trial, channel: Channel) -> None:
    task = trial.task
    if trial.engine not in ENGINES:
        raise TaskError(f"engine {trial.engine!r}: choose one of {', '.join(ENGINES)}.")
    if not 0 <= trial.dropout < 1:
        raise TaskError(f"dropout = {trial.dropout:g}: a share of the devices, from 0 to below 1.")
    if trial.dropout and task.masking is None:
        raise TaskError(f"dropout = {trial.dropout:g}: cohorts lose devices, and task {task.name!r} has no [masking].")
    if isinstance(trial.world, str) and trial.world != "fleet":
        raise TaskError(f"world {trial.world!r}: the only one with a name is 'fleet'.")
    if trial.delay != Delay() and trial.world is not None:
        raise TaskError("a world says how long messages take: leave out either the delay or the world.")
    if (trial.delay != Delay() or trial.world is not None) and channel is Channel.RELAYED:
        raise TaskError(
            f"task {task.name!r} relays: its peers take turns in step, so no message is late. Leave out the delay and "
            "the world."
        )


def _refuse_strangers(liars: Mapping[int, Tamper], devices: int) -> None:
    strangers = [device for device in liars if not 0 <= device < devices]
    if strangers:
        raise TaskError(f"device {strangers[0]} lies, and there are devices 0 to {devices - 1}. Name one of these.")


def _in_step(trips: Array, batch: int) -> Schedule:
    """Every batch of every device, number after number."""
    trip, device = np.nonzero(np.arange(int(trips.max(initial=0)))[:, None] < trips[None])
    before = np.searchsorted(trip, trip)
    samples = trip[:, None] * batch + np.arange(batch)
    device, number, samples, before = (each.astype(np.int32) for each in (device, trip, samples, before))
    return Schedule(device, number, samples, before, trip.astype(np.float64), 0)
