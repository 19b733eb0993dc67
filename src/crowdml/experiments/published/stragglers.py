"""Rounds with a partial barrier and a bounded delay, among devices of very different speed that join and leave.

Guo and Gong, section IV and Algorithm 1: the server goes on as soon as `barrier` devices are ready, but waits for one
that has been left out `delay` - 1 times in a row. A device computes on the centre that it read when it last took part.
Timing depends on no value (review, R3), so an event queue lays the whole run out first; then one compiled loop runs the
protocol's own handlers over it. Masks are left out: they cancel.

Where we differ: a cohort has exactly `barrier` devices, the overdue first and then those who have waited longest; who
else is ready waits for the next. A device takes part as often as its budget allows and then retires (a privacy filter).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.errors import TaskError
from crowdml.messages import masked_steps, total
from crowdml.privacy.noise import Silence
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocol import Protocol
from crowdml.protocols import find
from crowdml.sim.layout import Holding
from crowdml.sim.pytrees import compile_alike, register
from crowdml.sim.world import uniform
from crowdml.task import Task
from crowdml.turn import check_in, first_turn, server_turn

SPEED, SLOW, JITTER, COMES, GOES = range(32, 37)
"""What a random number is for, beside those of `world` and `cohorts`."""

JOINED, READY = range(2)

TOGETHER = 25
"""Trials in one compiled loop: they share the samples, so that a local step of all of them is one product."""


@dataclass(frozen=True)
class Pace:
    """How long devices take for an update, in units of a typical one, and when they are there."""

    slow: float = 0.1
    """Share of stragglers."""
    factor: float = 10.0
    """How many times as long these take."""
    jitter: float = 0.5
    """Spread of one device's own times: exponential, this share of its mean."""
    joining: float = 0.0
    """Devices join evenly over this time; one in two is there from the start where it is above 0."""
    leaving: float = 0.0
    """Share of devices that leave for good, at an even time over `horizon`."""
    horizon: float = 100.0

    def __post_init__(self) -> None:
        for name in ("slow", "leaving"):
            if not 0 <= getattr(self, name) < 1:
                raise TaskError(f"{name} = {getattr(self, name)}: a share, at least 0 and below 1.")
        if self.factor < 1 or not 0 <= self.jitter <= 1:
            raise TaskError(f"factor = {self.factor}, jitter = {self.jitter}: at least 1, and between 0 and 1.")

    def times(self, seed: int, device: int, trip: int) -> float:
        """How long a device takes for its n-th update."""
        typical = 0.5 + float(uniform(seed, device, 0, SPEED)[0])
        if uniform(seed, device, 0, SLOW)[0] < self.slow:
            typical *= self.factor
        u = float(uniform(seed, device, trip, JITTER)[0])
        return typical * (1 - self.jitter - self.jitter * np.log(u))

    def joins(self, seed: int, device: int) -> float:
        u = float(uniform(seed, device, 0, COMES)[0])
        return max(0.0, self.joining * (2 * u - 1)) if self.joining else 0.0

    def leaves(self, seed: int, device: int) -> float:
        u = float(uniform(seed, device, 0, GOES)[0])
        return u / self.leaving * self.horizon if u < self.leaving else float("inf")


@dataclass(frozen=True)
class Layout:
    """Which devices close which round, and with what: R rounds of s devices each."""

    device: Array  # [R, s]
    trip: Array  # [R, s] the device's how-many-th
    version: Array  # [R, s] rounds that had been closed when it read its centre
    time: Array  # [R]

    def __len__(self) -> int:
        return len(self.device)

    @property
    def staleness(self) -> Array:
        """Rounds between the reading of a centre and the closing of the round that it served, [R, s]."""
        return np.arange(len(self))[:, None] - self.version

    def first(self, count: int) -> Layout:
        return Layout(self.device[:count], self.trip[:count], self.version[:count], self.time[:count])


def synchronous(devices: int, rounds: int) -> Layout:
    """Everybody in every round, each as long as one unit: s = n, or tau = 1."""
    everyone = np.tile(np.arange(devices, dtype=np.int32), (rounds, 1))
    number = np.repeat(np.arange(rounds, dtype=np.int32)[:, None], devices, axis=1)
    return Layout(everyone, number, number, np.arange(1.0, rounds + 1))


def lay_out(
    pace: Pace, devices: int, *, seed: int, barrier: int, delay: int | None, rounds: int, uses: int | None = None
) -> Layout:
    """The event queue. `delay` is tau (None: no bound), `uses` how often a device's budget lets it take part.

    It ends after `rounds`, or when too few devices are left that may still take part.
    """
    if not 1 <= barrier <= devices or (delay is not None and delay < 1):
        raise TaskError(
            f"barrier = {barrier} of {devices} devices, delay = {delay}: both are at least 1, and s at most n."
        )
    queue: list[tuple[float, int, int, int]] = []  # time, device, what, version that it computes on
    for name in range(devices):
        heapq.heappush(queue, (pace.joins(seed, name), name, JOINED, 0))
    trips = np.zeros(devices, np.int64)
    left_out = np.zeros(devices, np.int64)
    present: set[int] = set()
    ready: dict[int, tuple[float, int]] = {}  # when, and the version of its centre; in the order of readiness
    rows: list[tuple[list[int], list[int], list[int], float]] = []
    leaves = np.array([pace.leaves(seed, name) for name in range(devices)])

    def retired(name: int) -> bool:
        return uses is not None and trips[name] >= uses

    def set_out(name: int, now: float) -> None:
        done = now + pace.times(seed, name, int(trips[name]))
        if not retired(name):
            heapq.heappush(queue, (done, name, READY, len(rows)))

    def close(now: float) -> bool:
        """One round, if both conditions of section IV are met."""
        for name in [name for name in ready if leaves[name] <= now]:
            ready.pop(name)
        waited_for = [] if delay is None else [
            name for name in present
            if left_out[name] >= delay - 1 and not retired(name) and leaves[name] > now
        ]  # fmt: skip
        if len(ready) < barrier or any(name not in ready for name in waited_for):
            return False
        order = sorted(ready, key=lambda name: (name not in waited_for, ready[name][0], name))
        cohort = sorted(order[:barrier])
        rows.append((cohort, [int(trips[name]) for name in cohort], [ready[name][1] for name in cohort], now))
        left_out[:] += 1
        for name in cohort:
            ready.pop(name)
            left_out[name] = 0
            trips[name] += 1
            set_out(name, now)
        return True

    while queue and len(rows) < rounds:
        now, name, what, version = heapq.heappop(queue)
        if what == JOINED:
            present.add(name)
            left_out[name] = 0
            set_out(name, now)
        elif leaves[name] > now:
            ready[name] = (now, version)
        while len(rows) < rounds and close(now):
            pass
    device, trip, version_of, time = zip(*rows, strict=True) if rows else ((), (), (), ())
    shape = (len(rows), barrier)
    return Layout(
        np.asarray(device, np.int32).reshape(shape),
        np.asarray(trip, np.int32).reshape(shape),
        np.asarray(version_of, np.int32).reshape(shape),
        np.asarray(time, np.float64),
    )


@dataclass(frozen=True)
class Course:
    """One trial: the model after each round, [R, *shape], and when that was."""

    weights: Array
    time: Array


def run(task: Task, holding: Holding, layout: Layout, seeds: Sequence[int], *, noise: bool = True) -> list[Course]:
    """The protocol's own handlers along the layout, compiled; one `Course` a seed. All of a device's samples are its
    batch in every round.
    """
    protocol = find(task)
    if task.masking is None or protocol.masked is None:
        raise TaskError(f"task {task.name!r}: rounds with a barrier are for masked tasks; add [masking].")
    if layout.device.shape[1] < task.masking.minimum:
        raise TaskError(
            f"a cohort of {layout.device.shape[1]} is smaller than masking.minimum = {task.masking.minimum}: its noise "
            "would not be enough, and devices refuse it."
        )
    register()
    batch = protocol.batch(task)
    rows = holding.rows(np.arange(holding.devices)[:, None], np.arange(batch))
    x, y = jnp.asarray(holding.x[rows]), jnp.asarray(holding.y[rows])
    loop = _loop(protocol, task, noise)
    start = first_turn(protocol, task)
    offered = start.published
    history = jax.tree.map(lambda leaf: jnp.zeros((len(layout) + 1, *np.shape(leaf)), jnp.asarray(leaf).dtype), offered)
    history = jax.tree.map(lambda room, leaf: room.at[0].set(leaf), history, offered)
    state = jax.tree.map(jnp.asarray, start.state)
    number = np.arange(len(layout), dtype=np.int32)
    found: list[Course] = []
    for first in range(0, len(seeds), TOGETHER):
        keys = np.stack([stream(seed, layout.device, layout.trip) for seed in seeds[first : first + TOGETHER]])
        weights = loop(state, history, x, y, (layout.device, layout.version, number), keys)
        found.extend(Course(each, layout.time) for each in np.asarray(weights))
    return found


@lru_cache(maxsize=32)
def _loop(protocol: Protocol, task: Task, noise: bool) -> Any:
    assert protocol.masked is not None
    hears: Any = protocol.masked[1]

    def whole(state: Any, history: Any, x: Array, y: Array, feed: Any, keys: Array) -> Array:
        def one_round(carry: Any, given: Any) -> Any:
            state, history = carry
            (device, version, number), keys = given

            def says(who: Array, read: Array, key: Array) -> dict[str, Array]:
                source = SeededSource(key) if noise else Silence()
                centre = jax.tree.map(lambda room: room[read], history)
                return masked_steps(
                    check_in(protocol, task, Samples(x[who], y[who]), centre, noise=source, me=0).message
                )

            said = jax.vmap(says)(device, version, keys)
            sums = jax.lax.optimization_barrier({name: each.sum(0) for name, each in said.items()})
            count = jnp.int32(device.shape[0])
            heard = total(hears.kind, sums, devices=count, version=version.min())
            turn = server_turn(protocol, task, state, heard)
            history = jax.tree.map(lambda room, new: room.at[number + 1].set(new), history, turn.published)
            return (turn.state, history), protocol.model(task, turn.state)

        return jax.lax.scan(one_round, (state, history), (feed, keys))[1]

    return compile_alike(jax.vmap(whole, in_axes=(None, None, None, None, None, 0)))  # trials share the samples
