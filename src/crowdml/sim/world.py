"""The world of a simulation: when devices sense, how long messages take, who is away. Public timing, no sample in it.

Time is counted in samples of the whole crowd: a device senses one sample every M units, so a delay of 1000 means that
the crowd sensed 1000 samples meanwhile (the paper's Delta). Every random number is a hash of (seed, device, trip, leg):
it does not matter in which order, or in which engine, it is asked for.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from crowdml.errors import TaskError

Floats = np.ndarray[Any, np.dtype[np.float64]]

SENSED, REQUEST, CHECK_OUT, CHECK_IN, FAILED, JOINED, LEFT, PERIOD, PHASE = range(9)
"""What a random number is for: the last word of its hash."""
LIES = 0x1135
"""The word for who lies: no leg of a trip."""


def uniform(seed: int, device: Any, trip: Any, leg: int) -> Floats:
    """Numbers in (0, 1): splitmix64 over the four words, 53 bits of it. Each word is mixed in before the next."""
    word: Any = np.zeros(1, np.uint64)
    for part in (np.uint64(seed & (2**64 - 1)), device, trip, leg):
        word = (word ^ np.asarray(part).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
    return ((word >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


LONGEST_DELAY = 1e12
"""In samples of the whole crowd; far beyond any run."""


@dataclass(frozen=True)
class Delay:
    """How long a leg of a trip takes: `kind` of distribution with its `size`, in samples of the whole crowd."""

    kind: str = "uniform"
    size: float = 0.0

    KINDS = ("uniform", "constant", "exponential", "pareto")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise TaskError(f"delay {self.kind!r}: choose one of {', '.join(self.KINDS)}, as in 'exponential:100'.")
        if not 0 <= self.size <= LONGEST_DELAY:
            raise TaskError(
                f"delay {self.size:g}: a time between 0 and {LONGEST_DELAY:g}, in samples of the whole crowd."
            )

    @classmethod
    def parse(cls, text: str) -> Delay:
        """'100' is uniform on [0, 100], as in the paper; 'exponential:100' has that mean, and so on."""
        kind, _, size = text.rpartition(":")
        try:
            return cls(kind or "uniform", float(size))
        except ValueError as error:
            raise TaskError(
                f"delay {text!r}: write a number, or KIND:NUMBER with a kind of {', '.join(cls.KINDS)}."
            ) from error

    def of(self, u: Floats) -> Floats:
        """The delay at quantile u."""
        if self.kind == "uniform":
            return self.size * u
        if self.kind == "exponential":
            return -self.size * np.log(u)
        if (
            self.kind == "pareto"
        ):  # Lomax with two finite moments short of one: a phone network's long tail, mean `size`
            return self.size * (u**-0.5 - 1)
        return np.full_like(u, self.size)

    @property
    def largest(self) -> float:
        return self.size if self.kind in ("uniform", "constant") else float("inf")


@dataclass(frozen=True)
class World:
    """The devices of a simulated world and their connections. By default each device is always there, without delay."""

    devices: int
    samples: int
    """Samples that each device senses in all, passes included; the most, where `counts` says less for some."""
    _: KW_ONLY
    counts: Any = None
    """Samples of each device [M], where they differ."""
    request: Delay = field(default_factory=Delay)
    check_out: Delay = field(default_factory=Delay)
    check_in: Delay = field(default_factory=Delay)
    failing: float = 0.0
    """Chance that a check-out fails; the device keeps collecting and retries after `retry`."""
    retry: float = 0.0
    joining: float = 0.0
    """Devices join evenly over this time."""
    leaving: float = 0.0
    """Share of devices that leave for good, at an even time over the run."""
    away: float = 0.0
    """Share of the time that a device is away: it neither senses nor talks, and goes on when it returns."""
    cycle: float = 0.0
    """Mean time from one return to the next."""
    work: float = 0.0
    """How long a device works on what it hears of its cohort, in one process for all of them: one after the other."""
    waits: bool = False
    """Whether samples stay at their source until a device reads them, as rows of a file do: no buffer loses one."""

    def __post_init__(self) -> None:
        if self.devices < 1 or self.samples < 1:
            raise TaskError(f"{self.devices} devices with {self.samples} samples each: both must be at least 1.")
        for name in ("failing", "leaving", "away"):
            if not 0 <= getattr(self, name) < 1:
                raise TaskError(f"{name} = {getattr(self, name)}: a share, at least 0 and below 1.")
        if self.failing and not self.retry > 0:
            raise TaskError("failing needs retry: how long a device waits before it tries again.")

    @property
    def horizon(self) -> float:
        """When the last sample is sensed, if nobody is away."""
        return self.joining + float(self.devices) * self.samples

    def awake(self, seed: int, device: Any, time: Floats) -> Floats:
        """The time itself, or the device's next return if it is away then."""
        if not self.away:
            return time
        cycle = (self.cycle or 10.0 * self.devices) * (0.5 + uniform(seed, device, 0, PERIOD))
        phase = uniform(seed, device, 0, PHASE)
        turns = time / cycle + phase
        inside = turns % 1.0
        return np.where(inside < 1 - self.away, time, (np.floor(turns) + 1 - phase) * cycle)

    def sensed(self, seed: int, device: Any, sample: Any) -> Floats:
        """When a device senses its n-th sample; infinite if it has left by then or has no more."""
        u = uniform(seed, device, sample, SENSED)
        joined = self.joining * uniform(seed, device, 0, JOINED) if self.joining else 0.0
        time = self.awake(seed, device, joined + self.devices * (np.asarray(sample) + u))
        over = np.asarray(sample) >= (self.samples if self.counts is None else np.asarray(self.counts)[device])
        if self.leaving:
            over = over | (time > self.left(seed, device))
        return np.where(over, np.inf, time)

    def sample(self, device: Any, number: Any) -> Any:
        """Which of its samples a device senses as its n-th, passes counted on."""
        return number

    def capacity(self, buffer: int) -> int:
        """How many samples may wait on a device whose buffer holds so many."""
        return max(buffer, self.samples) if self.waits else buffer

    def left(self, seed: int, device: Any) -> Floats:
        """When a device leaves; infinite for those that stay."""
        u = uniform(seed, device, 0, LEFT)
        return np.where(u < self.leaving, u / max(self.leaving, 1e-300) * self.horizon, np.inf)

    def trip(self, seed: int, device: Any, trip: Any, start: Floats) -> tuple[Floats, Floats, Floats]:
        """When the server answers the check-out, when the device has the answer, when the server has the check-in."""
        asked = start
        if self.failing:
            u = uniform(seed, device, trip, FAILED)
            asked = start + self.retry * np.floor(np.log(u) / np.log(self.failing))
        asked = self.awake(seed, device, asked)
        answered = asked + self.request.of(uniform(seed, device, trip, REQUEST))
        received = self.awake(seed, device, answered + self.check_out.of(uniform(seed, device, trip, CHECK_OUT)))
        arrived = received + self.check_in.of(uniform(seed, device, trip, CHECK_IN))
        return answered, received, arrived
