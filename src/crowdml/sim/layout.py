"""Layouts: who holds which samples, who checks in when or meets whom. All of it is public, and known before a run.

Timing depends on no value (review, R3), so the whole run can be laid out before any weight is computed: check-ins one
by one as a `Schedule`, cohorts and rounds that keep step as `Rounds`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array
from crowdml.datasets.populations import DrawnPopulation, Population, by_class, by_user, iid
from crowdml.errors import DataError, TaskError
from crowdml.protocols import find
from crowdml.sim.world import World, uniform
from crowdml.task import Task

Ints = np.ndarray[Any, np.dtype[np.int32]]

POPULATIONS = ("iid", "by_class", "by_user")
ORDER, VANISHED = 16, 17
"""What a random number is for, beside those of `world`."""


# --- who holds which samples ---


def spread_out(kind: str, y: Array, devices: int, seed: int, groups: Array | None = None) -> Population:
    """Rows dealt out to devices: 'iid', 'by_class' (at most two classes a device) or 'by_user' (one a person)."""
    if kind == "iid":
        return iid(len(y), devices, seed)
    if kind == "by_class":
        return by_class(y, devices, seed)
    if kind == "by_user":
        return by_user(groups)
    raise TaskError(f"population {kind!r}: choose one of {', '.join(POPULATIONS)}.")


@dataclass(frozen=True)
class Holding:
    """The samples of a crowd: x [n, d], y [n], and which rows each device senses, in order; again in each pass."""

    x: Array
    y: Array
    population: Population | DrawnPopulation
    passes: int = 1

    def rows(self, device: Array, sample: Array) -> Array:
        """Row numbers of the samples that devices sense as their n-th, passes counted on."""
        if isinstance(self.population, DrawnPopulation):
            return self.population.rows(device, sample % self.population.per_device)
        return self.population.rows[device, sample % self.population.counts[device]]

    @cached_property
    def placed(self) -> tuple[Array, ...]:
        """The samples where compiled loops run, copied there once: x [M, n, d], y [M, n] and counts [M], device after
        device, so that a batch is one piece of memory; or of a drawn crowd the pool, x [n, d] and y [n]."""
        if isinstance(self.population, DrawnPopulation):
            return jnp.asarray(self.x), jnp.asarray(self.y)
        rows = self.population.rows
        return jnp.asarray(self.x[rows]), jnp.asarray(self.y[rows]), jnp.asarray(self.population.counts)

    @cached_property
    def pool(self) -> tuple[Array, ...]:
        """The samples where compiled loops run, x [n, d] and y [n], and whose they are, for `rows_of`."""
        samples = jnp.asarray(self.x), jnp.asarray(self.y)
        if isinstance(self.population, DrawnPopulation):
            return samples
        return *samples, jnp.asarray(self.population.rows), jnp.asarray(self.population.counts)

    @property
    def devices(self) -> int:
        return self.population.devices

    @property
    def counts(self) -> Array:
        """Samples that each device senses in all."""
        if isinstance(self.population, DrawnPopulation):
            return np.full(self.devices, self.population.per_device * self.passes)
        return self.population.counts * self.passes


def rows_of(pool: tuple[Array, ...], drawn: DrawnPopulation | None, device: Array, sample: Array) -> Array:
    """`Holding.rows` in a compiled loop, of a `Holding.pool`."""
    if drawn is not None:
        return drawn.rows(device, sample % drawn.per_device)
    _, _, table, counts = pool
    return table.at[device, sample % counts[device]].get(mode="promise_in_bounds")


def given(population: Population, batch: int, cap: int | None, passes: int) -> tuple[Population, Array]:
    """The crowd with no more samples on a device than the cap, and how many each senses, passes included.

    With several passes these are whole batches, so that none wraps round. A device with less than a batch gives none.
    """
    most = population.counts if cap is None else np.minimum(population.counts, cap)
    counts = most // batch * batch if passes > 1 else most
    gives = counts >= batch
    if not gives.any():
        raise DataError(
            f"a check-in takes {batch} samples and each of {population.devices} devices gives "
            f"{int(most.max(initial=0))} at most, so nobody would check in. Use fewer devices, or lower "
            "protocol.batch."
        )
    held = np.where(gives, counts, population.counts).astype(np.int32)
    return replace(population, counts=held), np.where(gives, counts, 0) * passes


# --- check-ins one by one ---


@dataclass(frozen=True)
class Schedule:
    """Check-ins in the order in which they arrive at the server: N of them, b samples each."""

    device: Ints  # [N]
    trip: Ints  # [N] the device's how-many-th, from 0
    samples: Ints  # [N, b] which of the device's sensed samples
    version: Ints  # [N] check-ins (in rounds: rounds) that had been applied when the weights were read
    time: np.ndarray[Any, np.dtype[np.float64]]  # [N] of arrival
    dropped: int
    """Samples that met a full buffer and were not collected."""
    counted: Array | None = field(default_factory=lambda: None)  # [N]; no attribute of the class, for `Paid`
    """Whether the server's state holds it; None: it holds all. Those who vanished or came too late have paid too."""

    def __len__(self) -> int:
        return len(self.device)

    @property
    def staleness(self) -> Ints:
        """Updates between the reading of the weights and the arrival of the check-in."""
        return np.arange(len(self), dtype=np.int32) - self.version

    @cached_property
    def stalest(self) -> int:
        return int(self.staleness.max(initial=0))

    def only(self, those: Any) -> Schedule:
        """Some of the check-ins: a slice, or a mask [N]."""
        names = ("device", "trip", "samples", "version", "time", "counted")
        parts = ((name, getattr(self, name)) for name in names)
        cut: Any = {name: None if part is None else part[those] for name, part in parts}
        return Schedule(dropped=self.dropped, **cut)

    def first(self, count: int) -> Schedule:
        """The schedule up to a stop."""
        return self.only(slice(0, count))

    def sent(self, last: int) -> Schedule:
        """The first so many check-ins, with those who had read the weights before the last: they are paid for too."""
        heard = np.arange(len(self)) < last
        return replace(self, counted=heard).only(heard | (self.version < last))

    @property
    def heard(self) -> Schedule:
        """The check-ins that the server's state holds."""
        return self if self.counted is None else self.only(self.counted)


def lay_out(world: World, *, seed: int, batch: int, capacity: int, most_trips: int | None = None) -> Schedule:
    """The schedule of a world. `most_trips` is what a device's budget allows.

    Devices do not wait for one another, so all of them are laid out at once, one event of each a turn;
    `tests/sim/test_schedule.py` holds it against the event queue, event by event.
    """
    everyone = np.arange(world.devices)
    possible = world.samples // batch
    trips = possible if most_trips is None else min(possible, most_trips)
    accepted: Ints | None = None  # [M, samples] which sample a device took as its n-th; None while all took all
    held = np.zeros(world.devices, np.int64)  # accepted so far
    taken = np.zeros(world.devices, np.int64)
    following = np.zeros(world.devices, np.int64)  # the next sample to sense
    trip = np.zeros(world.devices, np.int64)
    busy_until = np.full(world.devices, np.inf)
    next_sample = world.sensed(seed, everyone, following)
    left = world.left(seed, everyone) if world.leaving else None
    rows: list[tuple[Any, ...]] = []
    dropped = 0
    live = everyone
    while live.size:
        hears = busy_until[live] <= next_sample[live]
        now = np.where(hears, busy_until[live], next_sample[live])
        heard = live[hears]
        busy_until[heard] = np.inf
        sensing = live[~hears]
        fits = held[sensing] - taken[sensing] < capacity
        keep = sensing[fits]
        if accepted is None and keep.size < sensing.size:
            accepted = np.tile(np.arange(world.samples, dtype=np.int32), (world.devices, 1))
        if accepted is not None:
            accepted[keep, held[keep]] = following[keep]
        held[keep] += 1
        dropped += int(sensing.size - keep.size)
        following[sensing] += 1
        next_sample[sensing] = world.sensed(seed, sensing, following[sensing])
        starts = np.isinf(busy_until[live]) & (held[live] - taken[live] >= batch) & (trip[live] < trips)
        if left is not None:
            starts &= now <= left[live]
        going = live[starts]
        if going.size:
            answered, received, arrived = world.trip(seed, going, trip[going], now[starts])
            rows.append(
                (going.astype(np.int32), trip[going].astype(np.int32), taken[going].astype(np.int32), answered, arrived)
            )
            taken[going] += batch
            trip[going] += 1
            busy_until[going] = received
        live = live[np.isfinite(busy_until[live]) | np.isfinite(next_sample[live])]
    laid = _in_order(rows, accepted, batch, dropped)
    return replace(laid, samples=world.sample(laid.device[:, None], laid.samples))


def _in_order(rows: list[tuple[Any, ...]], accepted: Ints | None, batch: int, dropped: int) -> Schedule:
    if not rows:
        none = np.zeros(0, np.int32)
        return Schedule(none, none, np.zeros((0, batch), np.int32), none, np.zeros(0), dropped)
    device, trip, first, answered, arrived = (np.concatenate(column) for column in zip(*rows, strict=True))
    count = len(device)
    # One order for both kinds of event at the server, ties included: (time, device, trip, request before arrival).
    order = np.lexsort(
        (
            np.repeat(np.array([0, 1], np.int8), count),
            np.concatenate([trip, trip]),
            np.concatenate([device, device]),
            np.concatenate([answered, arrived]),
        )
    )
    is_arrival = order >= count
    applied = np.cumsum(is_arrival)
    version = np.empty(count, np.int32)
    version[order[~is_arrival]] = applied[~is_arrival]
    arrivals = order[is_arrival] - count
    taken = first[arrivals][:, None] + np.arange(batch, dtype=np.int32)
    return Schedule(
        device[arrivals],
        trip[arrivals],
        taken if accepted is None else accepted[device[arrivals][:, None], taken],
        version[arrivals],
        arrived[arrivals],
        dropped,
    )


def refuse_repeats(schedule: Schedule, *, batch: int, capacity: int, passes: int) -> None:
    """Refuse several passes over a buffer that overflows, for batches of more than one sample.

    The samples that were turned away shift what follows, and a batch could then hold one sample twice, from two passes.
    Replacing it would move the sum by twice its sensitivity, and no charge here speaks of that.
    """
    if passes > 1 and batch > 1 and schedule.dropped:
        raise TaskError(
            f"passes = {passes} and protocol.buffer = {capacity}: with these delays {schedule.dropped} samples met a "
            f"full buffer, so a batch of {batch} could hold one sample twice, at more than its price. Take a larger "
            "protocol.buffer, smaller delays, or one pass."
        )


# --- rounds that keep step ---


@dataclass(frozen=True)
class Rounds:
    """Which devices meet: R cohorts, or rounds of uploads, with m places each."""

    device: Array  # [R, m]
    trip: Array  # [R, m] the device's how-many-th
    first: Array  # [R, m] the first of the samples that it takes, passes counted on; the next ones follow
    there: Array  # [R, m] whether the place was taken
    alive: Array  # [R, m] whether its message arrived
    minimum: int
    """A cohort with fewer survivors is abandoned."""
    gathered: int = 1
    """Cohorts that the server hears at once: 1, unless it gathers the totals of several."""
    read: Array | None = None  # [R]
    """Totals that were in the weights that each cohort read; None: all before it, for cohorts keep step."""
    took: Array | None = None  # [R]
    """The time from the moment that each cohort was fixed to its end, where cohorts are laid out in time."""

    def __len__(self) -> int:
        return len(self.device)

    @cached_property
    def in_order(self) -> bool:
        """Whether devices 0, 1, 2, ... meet in every round, and all their messages arrive."""
        places = np.arange(self.device.shape[1], dtype=np.int32)
        return bool(self.alive.all()) and bool((self.device == places).all())

    @cached_property
    def summed(self) -> Array:
        """[R]: whether enough survived."""
        return self.alive.sum(1) >= self.minimum

    @cached_property
    def round_of(self) -> Ints:
        """[R]: the round that each cohort belongs to. Where totals are gathered, abandoned cohorts fill no round."""
        if self.gathered == 1:
            return np.arange(len(self), dtype=np.int32)
        return ((np.cumsum(self.summed) - self.summed) // self.gathered).astype(np.int32)

    @cached_property
    def closes(self) -> Array:
        """[R]: whether a round is over with this cohort; one that is abandoned is a round of its own."""
        if self.gathered == 1:
            return np.ones(len(self), bool)
        return self.summed & (np.cumsum(self.summed) % self.gathered == 0)

    @property
    def length(self) -> int:
        """Rounds that close."""
        return int(self.closes.sum())

    def paid(self, batch: int, rounds: int | None = None) -> Schedule:
        """What the first so many rounds cost: a check-in for each device that was there, survivor or not, summed or
        not. Without `rounds`, all of them."""

        def write() -> Schedule:
            upto = len(self) if rounds is None else int((self.round_of < rounds).sum())
            taken = self.there[:upto].reshape(-1)
            device, trip, first = (each[:upto].reshape(-1)[taken] for each in (self.device, self.trip, self.first))
            samples = first[:, None] + np.arange(batch, dtype=np.int32)
            version = np.repeat(self.round_of[:upto], self.device.shape[1])[taken]
            counted = (self.alive & (self.summed & (self.round_of < self.length))[:, None])[:upto].reshape(-1)[taken]
            return Schedule(device, trip, samples, version, version.astype(np.float64), 0, counted)

        return Paid(write)


class Paid(Schedule):
    """A schedule that is written down when it is asked for.

    Of a million devices with sixty samples each it has a quarter of a gigabyte, and takes longer than their rounds.
    """

    def __init__(self, write: Callable[[], Schedule]) -> None:
        self.__dict__["_write"] = write

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.__dict__.update(vars(self.__dict__["_write"]()))
        return self.__dict__[name]

    def __reduce__(self) -> Any:
        names = ("device", "trip", "samples", "version", "time", "dropped", "counted")
        return Schedule, tuple(getattr(self, name) for name in names)


def meet(task: Task, holding: Holding, seed: int, *, rounds: int | None = None, dropout: float = 0.0) -> Rounds:
    """A public plan: the crowd in an order of its own for each trip, cut into cohorts. Nothing of it is a sample.

    A device takes part as often as it has whole batches, in every pass anew: no batch holds a sample twice. Nor does a
    cohort hold a device twice, for then one sum would hold a sample twice and be charged as two. A cohort that is too
    small for the task does not meet. Where uploads are gathered one by one, the devices of a round are its cohort.
    """
    protocol, masking = find(task), task.masking
    batch, gathering = protocol.batch(task), protocol.gathers(task)
    if masking is not None:
        cohort, minimum, least = masking.cohort, masking.minimum, "masking.minimum"
    elif gathering is not None:
        cohort, minimum, least = gathering.size, gathering.size, "a round's size"
    else:
        raise TaskError(f"task {task.name!r} has no [masking]: its devices check in one by one.")
    held = holding.counts // holding.passes
    met = _meetings((held // batch) * holding.passes, cohort, seed)
    met = [_sorted(*each) for each in met if len(each[0]) >= minimum][:rounds]
    if not met:
        raise TaskError(
            f"{holding.devices} devices with {int((held // batch).sum())} batches make no cohort of at least "
            f"{least} = {minimum}. Take more devices or smaller batches, or lower {least}."
        )
    device = np.stack([np.resize(each, cohort) for each, _ in met])
    trip = np.stack([np.resize(each, cohort) for _, each in met])
    there = np.arange(cohort) < np.array([len(each) for each, _ in met])[:, None]
    a_pass, place = np.divmod(trip, np.maximum(held // batch, 1)[device])
    first = a_pass * held[device] + place * batch
    alive = there & (uniform(seed, device, trip, VANISHED) >= dropout) if dropout else there
    several = gathering.size if masking is not None and gathering is not None else 1
    laid = (device.astype(np.int32), trip.astype(np.int32), first.astype(np.int32), there, alive)
    return Rounds(*laid, minimum, several)


def _meetings(trips: Array, cohort: int, seed: int) -> list[tuple[Array, Array]]:
    """Devices and their trips, cohort after cohort. Who is left over from one trip meets with others from the next."""
    met: list[tuple[Array, Array]] = []
    waiting, since = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for trip in range(int(trips.max(initial=0))):
        present = np.flatnonzero(trips > trip)
        order = present[np.argsort(uniform(seed, present, trip, ORDER), kind="stable")]
        if len(waiting):
            more = order[~np.isin(order, waiting)][: cohort - len(waiting)]
            met.append((np.append(waiting, more), np.append(since, np.full(len(more), trip))))
            order = order[~np.isin(order, more)]
        full = len(order) // cohort * cohort
        met += [(each, np.full(cohort, trip)) for each in order[:full].reshape(-1, cohort)]
        waiting, since = order[full:], np.full(len(order) - full, trip)
    return [*met, (waiting, since)] if len(waiting) else met


def _sorted(device: Array, trip: Array) -> tuple[Array, Array]:
    """A cohort in the order in which its devices lie: a sum does not ask for another, and memory is read in it."""
    order = np.argsort(device)
    return device[order], trip[order]
