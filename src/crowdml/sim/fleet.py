"""The world of `crowdml fleet`: real devices in one process, whose rows lie in a file, and a server that they poll.

Its time is in seconds. What takes time there is in `crowdml.pace`, which the server and a fleet read, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.pace import AT_WORK, GROUP_WINDOW, SPEED, poll_wait
from crowdml.sim.world import CHECK_IN, Delay, Floats, World, uniform

WORK = 1 / SPEED
"""Seconds of one processor for a device's message."""


@dataclass(frozen=True)
class FleetWorld(World):
    """A fleet that checks in one by one, or meets in cohorts (`meet_in_time`).

    One by one its devices move together: at most `AT_WORK` are between check-out and receipt, all of these read the
    publication before the first of their charges is on disk, and the next ones start once their check-ins are in.
    """

    batch: int = 1
    passes: int = 1
    """How often a batch serves before a device takes the next one."""
    at: Any = None
    """When each device senses each of its samples [devices, samples]; None: all of them are there when it starts."""

    @cached_property
    def turns(self) -> Array:
        """[M, trips]: with how many groups before it a device makes each of its check-ins."""
        counts = np.full(self.devices, self.samples) if self.counts is None else np.asarray(self.counts)
        trips, group = counts // self.batch, min(self.devices, AT_WORK)
        found = np.zeros((self.devices, int(trips.max(initial=1))), np.int64)
        last, before = np.full(self.devices, -1), 0
        for trip in range(found.shape[1]):
            who = np.flatnonzero(trips > trip)
            last[who] = np.maximum(last[who] + 1, (before + np.arange(len(who))) // group)
            found[who, trip], before = last[who], before + len(who)
        return found

    @property
    def cycle_time(self) -> float:
        """Seconds from a check-out to the receipt that a device has on disk."""
        return 2 * GROUP_WINDOW + min(self.devices, AT_WORK) * WORK

    def sensed(self, seed: int, device: Any, sample: Any) -> Floats:
        if self.at is not None:
            return np.asarray(self.at)[device, sample].reshape(-1)
        held = self.samples if self.counts is None else np.asarray(self.counts)[device]
        return np.where(np.asarray(sample) >= held, np.inf, 0.0)

    def sample(self, device: Any, number: Any) -> Any:
        if self.passes == 1:
            return number
        held = (self.samples if self.counts is None else np.asarray(self.counts)[device]) // self.passes
        (batch, use), within = np.divmod(number // self.batch, self.passes), number % self.batch
        return (use * held + batch * self.batch + within).astype(np.int32)

    def trip(self, seed: int, device: Any, trip: Any, start: Floats) -> tuple[Floats, Floats, Floats]:
        """As for any world. A device hears the publication when its check-in is acknowledged: only then is it free."""
        cycle, moment = self.cycle_time, self.cycle_time / 8  # of a moment only the order counts
        began = cycle * np.maximum(self.turns[device, trip], np.floor(start / cycle))
        answered = np.maximum(start, began + moment)
        arrived = began + cycle + moment * uniform(seed, device, trip, CHECK_IN)
        return answered, arrived, arrived


def fleet_world(counts: Array, batch: int, passes: int) -> FleetWorld:
    """The world of a fleet whose devices have so many samples [M], passes included."""
    looks = Delay("uniform", poll_wait(len(counts)))
    return FleetWorld(
        len(counts), int(counts.max()), counts=counts, batch=batch, passes=passes, waits=True,
        request=looks, check_in=Delay("constant", GROUP_WINDOW), work=WORK,
    )  # fmt: skip
