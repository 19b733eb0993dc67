"""Cohorts in time: devices come when they have a batch, and several cohorts are under way at once, as on a live server.

A round goes through the phases of `crowdml.secagg.server`. Its cohort is fixed when it is full or its window is over,
it reads the weights that are published when its shares are in, and a phase that waits for a device which vanished takes
its whole lease. So a cohort misses the totals of the others that are under way. Which cohorts there are, and what each
read, depends on public timing alone: all of it is laid out before any weight is computed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.errors import TaskError
from crowdml.pace import MOVING
from crowdml.protocols import find
from crowdml.secagg.server import enough_devices
from crowdml.sim.layout import VANISHED, Holding, Rounds
from crowdml.sim.world import World, uniform
from crowdml.task import Task

ADVERTISE, SHARE, MASK, AGREE, REVEAL = range(5)
ASK, SAY, DUE = range(3)
"""What happens in an event: a device looks at its round, what it says arrives, the time of a phase is over."""
MOST_FRUITLESS = 100
"""Rounds in a row without a draw after which a run ends: its messages take longer than a lease."""
LEGS = 32
"""What a random number is for, beside those of `world` and `layout`: this and the phase."""


@dataclass
class Cohort:
    """One round under way. `trips`: its devices, and which check-in of each it would be."""

    phase: int = ADVERTISE
    windows: int = 0
    trips: dict[int, int] = field(default_factory=dict)
    waits_for: set[int] = field(default_factory=set)
    """Devices that have not answered in this phase."""
    said: set[int] = field(default_factory=set)
    """Devices that answered in this phase."""
    there: set[int] = field(default_factory=set)
    """Devices that drew their noise."""
    alive: set[int] = field(default_factory=set)
    """Devices whose masked vectors are in the sum."""
    read: int = 0
    """Totals that were in the weights that it read."""
    held: float | None = None
    """Until when it waits at most, once its shares are in, for a total that is under way."""
    moves: float = 0.0
    """Until when others wait for it: a phase that takes longer waits for a device that left."""
    fixed: float = 0.0
    took: float = 0.0


def meet_in_time(
    task: Task,
    holding: Holding,
    world: World,
    seed: int,
    *,
    dropout: float = 0.0,
    lost: Collection[int] = (),
    rounds: int | None = None,
) -> Rounds:
    """The cohorts of a masked task in a world, whose time is in seconds where it has windows and leases.

    A device serves with each batch as often as `Holding.passes` says before it takes the next, as a live one does, and
    its sensor waits where its buffer is full. `dropout`: the chance that a device vanishes from a round after it drew
    its noise. `lost`: devices that vanish for good in the first round that they share secrets in. `rounds`: sums after
    which the task stops; None: `stop.steps`.
    """
    masking = task.masking
    if masking is None or find(task).gathers(task) is not None:
        raise TaskError(
            f"task {task.name!r} {'has no [masking]' if masking is None else 'gathers the totals of several cohorts'}: "
            "only cohorts whose sums are heard one by one overlap. Leave out the delay and the world."
        )
    batch = find(task).batch(task)
    crowd = _Crowd(task, world, seed, dropout, set(lost), holding.passes, task.stop.steps if rounds is None else rounds)
    trips = holding.counts // holding.passes // batch * holding.passes
    crowd.go(trips)
    if not crowd.ended:
        if crowd.fruitless:
            raise TaskError(
                f"{crowd.fruitless} rounds ended before anybody drew noise: messages take longer than masking.lease = "
                f"{float(masking.lease):g}. Take smaller delays, or a longer lease."
            )
        raise TaskError(
            f"{holding.devices} devices with {int(trips.sum())} check-ins make no cohort of at least masking.minimum = "
            f"{masking.minimum}."
        )
    shape = len(crowd.ended), masking.cohort
    device, trip = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    there, alive = np.zeros(shape, bool), np.zeros(shape, bool)
    for row, cohort in enumerate(crowd.ended):
        for place, each in enumerate(sorted(cohort.there)):
            device[row, place], trip[row, place] = each, cohort.trips[each]
            there[row, place], alive[row, place] = True, each in cohort.alive
    first = (trip // holding.passes * batch).astype(np.int32)
    read = np.array([cohort.read for cohort in crowd.ended], np.int32)
    took = np.array([cohort.took for cohort in crowd.ended])
    return Rounds(device, trip, first, there, alive, masking.minimum, read=read, took=took)


class _Crowd:
    """The crowd and its server under way."""

    def __init__(
        self, task: Task, world: World, seed: int, dropout: float, lost: set[int], passes: int, last: int | None
    ) -> None:
        assert task.masking is not None
        self.masking, self.world, self.seed, self.dropout, self.lost = task.masking, world, seed, dropout, lost
        self.passes, self.batch, self.last = passes, find(task).batch(task), last
        self.window, self.lease = float(task.masking.window), float(task.masking.lease)
        self.events: list[tuple[float, int, int, int, Any]] = []
        self.count = self.ahead = self.sums = 0
        self.free = 0.0
        """When the process that runs all devices has done the work at hand."""
        self.trips: dict[int, int] = {}
        self.tries: Counter[int] = Counter()
        """How many rounds each device came to."""
        self.fruitless = 0
        """Rounds in a row in which nobody drew."""
        self.most: Array = np.zeros(0, int)
        self.open, self.outside = Cohort(), list[int]()
        """The round that devices may come to, and those who found it full."""
        self.flying: list[Cohort] = []
        self.ended: list[Cohort] = []

    def push(self, time: float, what: int, device: int, cohort: Cohort, phase: int) -> None:
        self.count += 1
        self.ahead += what != DUE
        heapq.heappush(self.events, (time, self.count, what, device, (cohort, phase)))

    def go(self, most: Array) -> None:
        """Until the task has its last sum, or nobody comes any more."""
        self.most = most
        for device in np.flatnonzero(most).tolist():
            self.trips[device] = 0
            self.come(device, 0.0)
        self.push(self.window, DUE, -1, self.open, ADVERTISE)
        while self.events and not self.over:
            now, _, what, device, (cohort, phase) = heapq.heappop(self.events)
            if what == DUE:
                self.due(cohort, phase, now)
                continue
            self.ahead -= 1
            if what == ASK:
                done = now
                if self.world.work:
                    done = self.free = max(now, self.free) + self.world.work
                if self.world.check_in.size:
                    done += float(self.world.check_in.of(self.chance([device], phase, LEGS + 8))[0])
                self.push(done, SAY, device, cohort, phase)
            else:
                self.hear(device, cohort, phase, now)

    @property
    def over(self) -> bool:
        """Whether the task has its last sum, or no round comes to one."""
        return self.fruitless >= MOST_FRUITLESS or (self.last is not None and self.sums >= self.last)

    def chance(self, devices: Sequence[int], phase: int, leg: int) -> Any:
        tries = [self.tries[device] for device in devices]
        return uniform(self.seed, np.asarray(devices), np.asarray(tries), leg + phase)

    def ask(self, devices: Sequence[int], cohort: Cohort, phase: int, now: float) -> None:
        """Devices look at their round, each when it next asks."""
        late = (
            self.world.request.of(self.chance(devices, phase, LEGS))
            if self.world.request.size
            else [0.0] * len(devices)
        )
        for device, each in zip(devices, late, strict=True):
            self.push(now + float(each), ASK, device, cohort, phase)

    def come(self, device: int, now: float) -> None:
        """A device has a batch, or will have one, and comes to the round that is open then."""
        if device not in self.trips or self.trips[device] >= self.most[device]:
            return
        last_sample = (self.trips[device] // self.passes + 1) * self.batch - 1
        sensed = float(np.asarray(self.world.sensed(self.seed, device, last_sample)).reshape(-1)[0])
        if sensed < np.inf:
            self.tries[device] += 1
            self.ask([device], self.open, ADVERTISE, max(now, sensed))

    def hear(self, device: int, cohort: Cohort, phase: int, now: float) -> None:
        if phase == ADVERTISE:
            if len(self.open.trips) >= self.masking.cohort:
                self.outside.append(device)
                return
            self.open.trips[device] = self.trips[device]
            self.fix_if_ready(now)
            return
        if phase == MASK:
            cohort.there.add(device)
        if phase == MASK and self.vanishes(device):
            self.drop_out(device, now)
            return
        if cohort.phase != phase:  # too late: what it drew stays charged
            self.leave(device, now, drew=phase >= MASK)
            return
        cohort.waits_for.discard(device)
        cohort.said.add(device)
        if phase == REVEAL:
            self.leave(device, now, drew=True)
        if not cohort.waits_for:
            self.close(cohort, now)

    def vanishes(self, device: int) -> bool:
        if device in self.lost or not self.dropout:
            return device in self.lost
        return float(uniform(self.seed, device, self.trips[device], VANISHED)[0]) < self.dropout

    def drop_out(self, device: int, now: float) -> None:
        """It said nothing after it drew: it is gone for good, or comes back with its next check-in."""
        if device in self.lost:
            del self.trips[device]
        else:
            self.leave(device, now + self.lease, drew=True)

    def leave(self, device: int, now: float, *, drew: bool) -> None:
        """The device's part in a round is over. What it drew for is used; else its batch serves in the next round."""
        self.trips[device] += drew
        self.come(device, now)

    # --- the server ---

    @property
    def wanted(self) -> bool:
        """Whether the task can use another sum beside those that are under way."""
        return self.last is None or len(self.flying) < self.last - self.sums

    def fix_if_ready(self, now: float) -> None:
        if len(self.open.trips) >= self.masking.cohort and self.wanted:
            self.fix(now)

    def fix(self, now: float) -> None:
        cohort, self.open, outside, self.outside = self.open, Cohort(), self.outside, []
        self.push(now + self.window, DUE, -1, self.open, ADVERTISE)
        self.flying.append(cohort)
        if outside:
            self.ask(outside, self.open, ADVERTISE, now)
        cohort.fixed = now
        self.begin(cohort, SHARE, set(cohort.trips), now)

    def begin(self, cohort: Cohort, phase: int, devices: set[int], now: float) -> None:
        cohort.phase, cohort.waits_for, cohort.said = phase, set(devices), set()
        cohort.moves = now + MOVING * self.world.request.size
        self.push(now + self.lease, DUE, -1, cohort, phase)
        self.ask(sorted(devices), cohort, phase, now)

    def due(self, cohort: Cohort, phase: int, now: float) -> None:
        if cohort.phase != phase or (phase == ADVERTISE and cohort is not self.open):
            return
        if phase != ADVERTISE:
            self.close(cohort, now)
            return
        least = enough_devices(self.masking.minimum, self.masking.cohort, cohort.windows)
        if len(cohort.trips) >= least and self.wanted:
            self.fix(now)
            return
        cohort.windows += self.wanted
        if self.ahead or self.flying or len(cohort.trips) >= self.masking.minimum:
            self.push(now + self.window, DUE, -1, cohort, ADVERTISE)

    def close(self, cohort: Cohort, now: float) -> None:
        """The next phase with those who answered, or the end."""
        if cohort.phase == SHARE and self.is_held(cohort, now):
            return
        answered = set(cohort.said)
        if cohort.phase == MASK:
            cohort.alive = answered
        if len(answered) < self.masking.minimum or cohort.phase == REVEAL:
            self.end(cohort, now, summed=cohort.phase == REVEAL and len(answered) >= self.masking.minimum)
            return
        if cohort.phase == SHARE:
            cohort.read = self.sums
        self.begin(cohort, cohort.phase + 1, answered, now)

    def is_held(self, cohort: Cohort, now: float) -> bool:
        """Whether a cohort whose shares are in waits for a total that is under way, as on a live server."""
        is_late = cohort.held is not None and cohort.held <= now
        moving = [each.moves for each in self.flying if MASK <= each.phase <= REVEAL and each.moves > now]
        if is_late or not moving:
            return False
        cohort.held = cohort.held or now + self.lease
        self.push(min(cohort.held, *moving), DUE, -1, cohort, SHARE)
        return True

    def end(self, cohort: Cohort, now: float, *, summed: bool) -> None:
        """The total is published, or the round is abandoned and whoever is in it comes again."""
        waiting, drew, cohort.phase = cohort.said if cohort.phase < REVEAL else set(), cohort.phase >= MASK, REVEAL + 1
        cohort.took = now - cohort.fixed
        self.flying.remove(cohort)
        if summed:
            self.sums += 1
        else:
            cohort.alive = set()
        self.fruitless = 0 if cohort.there else self.fruitless + 1
        if cohort.there:
            self.ended.append(cohort)
        for device in sorted(waiting):
            self.leave(device, now, drew=drew)
        for each in [each for each in self.flying if each.phase == SHARE and each.held is not None]:
            self.close(each, now)
        self.fix_if_ready(now)
