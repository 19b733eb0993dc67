"""The event queue: exact asynchrony, one handler call an event, every message sealed into its bytes and opened again.

It drives devices the way a runner drives a real one: samples enter a buffer, a full batch becomes `Sensed`, a
check-out is answered from the last publication, the answer is heard later, the check-in arrives later still. Slow and
plain; the compiled engine is held against it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np

from crowdml.arrays import Array
from crowdml.buffer import Buffer
from crowdml.messages import SERVER, Envelope, decode, seal
from crowdml.privacy.door import Door, Passage
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import Stamp
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocol import CheckOut, Context, Protocol, Send, Sensed, Step, advance
from crowdml.protocols import find
from crowdml.sim.crowd import Holding, Run, published, refuse_masked, small_releases, stops
from crowdml.sim.pytrees import compile_alike, register
from crowdml.sim.schedule import Schedule
from crowdml.sim.world import World
from crowdml.task import Task

Backend = Literal["numpy", "jax"]

ANSWER, HEAR, ARRIVE = range(3)
SENSE = 1 << 60  # sorts a device's sensing after everything else of that moment


@dataclass
class Device:
    """One device's runtime in the simulator: its buffer, its protocol state, and the releases it made."""

    buffer: Buffer
    state: Any
    trips: int = 0
    busy: bool = False
    serials: tuple[int, ...] = ()
    passages: list[tuple[tuple[int, ...], list[Passage]]] = field(default_factory=list)


class Steps:
    """The two handler calls that compute, on NumPy: a device answers a publication, the server applies a check-in."""

    def __init__(self, protocol: Protocol, task: Task, noise: bool) -> None:
        self.protocol, self.task, self.noise = protocol, task, noise

    def door(self, key: Array, trip: Any, stamp: Stamp | None = None) -> Door:
        source = SeededSource(key) if self.noise else Silence()
        return Door(self.protocol.mechanisms(self.task), source, stamp or Stamp("this step"), trip=trip)

    def hear(self, state: Any, publication: Any, key: Array, ctx: Context) -> tuple[Step[Any], Door]:
        door = self.door(key, ctx.trip)
        ctx = replace(ctx, release=door.release, masked=door.masked)
        return advance(self.protocol.device, self.task, state, publication, ctx), door

    def apply(self, state: Any, message: Any, ctx: Context) -> Step[Any]:
        return advance(self.protocol.server, self.task, state, message, ctx)


class CompiledSteps(Steps):
    """The same two calls on JAX, each compiled by itself. A compiled step leaves one stamp on all that it lets out."""

    def __init__(self, protocol: Protocol, task: Task, noise: bool) -> None:
        super().__init__(protocol, task, noise)
        self.stamp = Stamp("this compiled step")
        self.passages: list[Passage] = []
        self._hear = compile_alike(self._trace_hear)
        self._apply = compile_alike(
            lambda state, message: super(CompiledSteps, self).apply(state, message, Context(me=SERVER))
        )

    def _trace_hear(self, state: Any, publication: Any, key: Array, trip: Any) -> Step[Any]:
        door = self.door(key, trip, self.stamp)
        ctx = Context(me="", release=door.release, trip=trip)
        step = advance(self.protocol.device, self.task, state, publication, ctx)
        self.passages = door.passages
        return step

    def hear(self, state: Any, publication: Any, key: Array, ctx: Context) -> tuple[Step[Any], Door]:
        step = self._hear(state, publication, key, ctx.trip)
        door = self.door(key, ctx.trip, self.stamp)
        door.passages.extend(replace(each, trip=ctx.trip) for each in self.passages)
        return step, door

    def apply(self, state: Any, message: Any, ctx: Context) -> Step[Any]:
        return self._apply(state, message)


@dataclass
class Crowd:
    """A run under way."""

    task: Task
    protocol: Protocol
    holding: Holding
    world: World
    seed: int
    most_trips: int | None
    steps: Steps
    devices: dict[int, Device] = field(default_factory=dict)
    queue: list[tuple[float, int, int, int, Any]] = field(default_factory=list)
    dropped: int = 0

    def push(self, time: Any, device: int, trip: int, leg: int, load: Any = None) -> None:
        heapq.heappush(self.queue, (float(np.asarray(time).reshape(-1)[0]), device, trip, leg, load))


def run(
    task: Task,
    holding: Holding,
    world: World,
    *,
    seed: int,
    capacity: int,
    points: Sequence[int] = (),
    most_trips: int | None = None,
    noise: bool = True,
    keep_said: bool = False,
    backend: Backend = "numpy",
    tick: Callable[[int], None] = lambda _: None,
) -> Run:
    """One trial, event by event. The schedule that it met is in the `Run`."""
    protocol = find(task)
    refuse_masked(task)
    batch = protocol.batch(task)
    register()
    steps = (CompiledSteps if backend == "jax" else Steps)(protocol, task, noise)
    crowd = Crowd(task, protocol, holding, world, seed, most_trips, steps)
    start = protocol.server.start(task, Context(me=SERVER))
    state, publication = start.state, published(start)
    for name in range(world.devices):
        crowd.devices[name] = Device(Buffer(batch, capacity), protocol.device.start(task, Context(me=str(name))).state)
        crowd.push(world.sensed(seed, name, 0), name, SENSE, 0, 0)
    applied = 0
    rows: list[tuple[int, int, tuple[int, ...], int, float]] = []
    looked: dict[int, Array] = {}
    said: list[dict[str, Array]] = []
    wanted = {int(point) for point in points}
    stopped: str | None = None
    while crowd.queue and crowd.queue[0][0] < np.inf and stopped is None:
        now, name, trip, leg, load = heapq.heappop(crowd.queue)
        device = crowd.devices[name]
        if trip == SENSE:
            _sense(crowd, name, device, load, now)
        elif leg == ANSWER:  # check-out has no handler: the last publication answers it
            received, arrived = load
            crowd.push(received, name, trip, HEAR, (publication, applied, arrived))
        elif leg == HEAR:
            _hear(crowd, name, device, trip, load, now)
        else:
            envelope, serials, version = load
            message = decode(envelope.kind, envelope.body)
            if keep_said:
                said.append({key: np.asarray(value) for key, value in small_releases(message).items()})
            after = steps.apply(state, message, Context(me=SERVER, sender=envelope.sender, now=now))
            state, publication = after.state, published(after) or publication
            applied += 1
            rows.append((name, trip, serials, version, now))
            tick(1)
            stopped = next((stop.reason for stop in stops(after) if stop.when is None or bool(stop.when)), None)
            if applied in wanted:
                looked[applied] = np.asarray(protocol.model(task, state))
    looked[applied] = np.asarray(protocol.model(task, state))
    return Run(
        task=task,
        seed=seed,
        schedule=_met(rows, batch, crowd.dropped),
        points=np.asarray(sorted(looked)),
        weights=np.stack([looked[point] for point in sorted(looked)]),
        state=jax.tree.map(np.asarray, state),
        stopped=stopped,
        said={key: np.stack([each[key] for each in said]) for key in said[0]} if said else {},
        passages={name: device.passages for name, device in crowd.devices.items() if device.passages},
    )


def _sense(crowd: Crowd, name: int, device: Device, sample: int, now: float) -> None:
    row = int(crowd.holding.rows(np.asarray(name), np.asarray(sample)))
    if not device.buffer.add(sample, crowd.holding.x[row], crowd.holding.y[row]):
        crowd.dropped += 1
    crowd.push(crowd.world.sensed(crowd.seed, name, sample + 1), name, SENSE, 0, sample + 1)
    _set_out(crowd, name, device, now)


def _set_out(crowd: Crowd, name: int, device: Device, now: float) -> None:
    """Start a trip if there is a batch, nothing else is under way, and the budget allows it."""
    spent = crowd.most_trips is not None and device.trips >= crowd.most_trips
    gone = bool(crowd.world.leaving) and now > float(crowd.world.left(crowd.seed, name)[0])
    if device.busy or spent or gone or not device.buffer.ready:
        return
    device.serials, batch = device.buffer.take()
    step = advance(crowd.protocol.device, crowd.task, device.state, Sensed(batch), Context(me=str(name), now=now))
    device.state = step.state
    if any(isinstance(effect, CheckOut) for effect in step.effects):
        answered, received, arrived = crowd.world.trip(crowd.seed, name, device.trips, np.asarray([now]))
        crowd.push(answered, name, device.trips, ANSWER, (received, arrived))
        device.trips += 1
        device.busy = True


def _hear(crowd: Crowd, name: int, device: Device, trip: int, load: Any, now: float) -> None:
    publication, version, arrived = load
    ctx = Context(me=str(name), sender=SERVER, now=now, trip=np.int32(trip))
    step, door = crowd.steps.hear(device.state, publication, stream(crowd.seed, name, trip), ctx)
    device.state, device.busy = step.state, False
    device.passages.append((device.serials, list(door.passages)))
    for effect in step.effects:
        if isinstance(effect, Send):
            to = frozenset((effect.to,)) if isinstance(effect.to, str) else effect.to
            envelope: Envelope = seal(crowd.task.hash, str(name), to, trip + 1, effect.message, door)
            crowd.push(arrived, name, trip, ARRIVE, (envelope, device.serials, version))
    _set_out(crowd, name, device, now)


def _met(rows: list[tuple[int, int, tuple[int, ...], int, float]], batch: int, dropped: int) -> Schedule:
    device, trip, serials, version, time = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return Schedule(
        np.asarray(device, np.int32),
        np.asarray(trip, np.int32),
        np.asarray(serials, np.int32).reshape(-1, batch),
        np.asarray(version, np.int32),
        np.asarray(time, np.float64),
        dropped,
    )
