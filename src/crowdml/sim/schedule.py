"""The schedule: which check-in arrives when, from which samples, and how old its weights are.

Timing depends on no value (review, R3), so the whole run can be laid out before any weight is computed. Devices do not
wait for one another, so all of them are laid out at once, one event of each a turn. `tests/sim/test_schedule.py` holds
it against the event queue, event by event.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from crowdml.sim.world import World

Ints = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Schedule:
    """Check-ins in the order in which they arrive at the server: N of them, b samples each."""

    device: Ints  # [N]
    trip: Ints  # [N] the device's how-many-th, from 0
    samples: Ints  # [N, b] which of the device's sensed samples
    version: Ints  # [N] check-ins that had been applied when the weights were read
    time: np.ndarray[Any, np.dtype[np.float64]]  # [N] of arrival
    dropped: int
    """Samples that met a full buffer and were not collected."""

    def __len__(self) -> int:
        return len(self.device)

    @property
    def staleness(self) -> Ints:
        """Updates between the reading of the weights and the arrival of the check-in."""
        return np.arange(len(self), dtype=np.int32) - self.version

    @cached_property
    def stalest(self) -> int:
        return int(self.staleness.max(initial=0))

    def first(self, count: int) -> Schedule:
        """The schedule up to a stop."""
        cut = slice(0, count)
        return Schedule(
            self.device[cut], self.trip[cut], self.samples[cut], self.version[cut], self.time[cut], self.dropped
        )


def lay_out(world: World, *, seed: int, batch: int, capacity: int, most_trips: int | None = None) -> Schedule:
    """The schedule of a world. `most_trips` is what a device's budget allows."""
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
    return _in_order(rows, accepted, batch, dropped)


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
