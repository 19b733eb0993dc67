"""Devices that lie, for the simulator and for a fleet that tests a study: a share that lies in one way.

Every attack is a `Tamper`: it changes what a device senses, what it says after the door, or, where liars know what all
others say, what they say together in a round of uploads. A liar pays as an honest device does, and says nothing that a
server would refuse for its range: a lie that is refused does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, namespace
from crowdml.errors import TaskError
from crowdml.protocols import find
from crowdml.settings import choose
from crowdml.task import Task
from crowdml.turn import Tamper

__all__ = ["ATTACKS", "Attackers", "make_attack"]

TIMES = 10
"""How many times as much liars say that scale something."""

ATTACKS: Mapping[str, str] = {
    "sign-flip": "says the opposite of what it should say",
    "scaling": f"flips its labels as in label-flip, and says {TIMES} times what comes of that",
    "gaussian": f"says {TIMES} times the noise of an honest device, and nothing of its samples",
    "label-flip": "turns the order of the classes round, or the sign of a number, in all its labels",
    "target-flip": "calls samples of the first class the second class",
    "alie": "says, with the other liars, what is just near enough to the mean of honest uploads to be taken for one",
    "inner-product": "says, with the other liars, the opposite of the mean of honest uploads",
    "mimic": "says, with the other liars, what the first honest device of the round says",
}
"""Each attack, and what a device does that attacks so."""
TOGETHER = ("alie", "inner-product", "mimic")
"""Attacks of liars who know what all devices of a round say."""


@dataclass(frozen=True)
class Attackers:
    """A share of a crowd that lies in one way."""

    share: float
    attack: str

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise TaskError(f"liars = {self.share:g}: a share of the devices, from 0 to 1.")
        choose("attack", self.attack, tuple(ATTACKS))

    def count(self, devices: int) -> int:
        """How many of so many devices lie."""
        return round(self.share * devices)

    def of(self, task: Task, order: Sequence[int] | Integers) -> dict[int, Tamper]:
        """The devices that lie, and what they do: the first of all devices in this order, which the caller drew."""
        tamper = make_attack(self.attack, task)
        return {int(device): tamper for device in order[: self.count(len(order))]}


def make_attack(name: str, task: Task) -> Tamper:
    """What a device does that attacks a task in this way."""
    if name in TOGETHER:
        if find(task).gathers(task) is None or task.masking is not None:
            raise TaskError(
                f"attack {name!r} needs rounds of single uploads: its liars know what all devices of a round say. Name "
                "a rule in protocol.combine, and no [masking]."
            )
        with_all: Mapping[str, Callable[..., Array]] = {"alie": alie, "inner-product": against, "mimic": copied}
        return Tamper(collude=partial(_together, _ranges(task), with_all[name]))
    flip = partial(flipped, task.classes, name == "target-flip")
    if name in ("label-flip", "target-flip"):
        return Tamper(sense=flip)
    say = partial(_times, _ranges(task), -1 if name == "sign-flip" else TIMES)
    return Tamper(say=say) if name == "sign-flip" else Tamper(nothing if name == "gaussian" else flip, say)


def _ranges(task: Task) -> dict[str, tuple[int, int]]:
    """What the server takes of each row; nothing is refused where there is no noise."""
    if task.privacy.mechanism == "none":
        return {}
    (fields,) = find(task).expected(task).values()
    return {row: (max(field.low, -(2**31) + 1), min(field.high, 2**31 - 1)) for row, field in fields.items()}


def _times(ranges: Mapping[str, tuple[int, int]], times: int, row: str, steps: Array) -> Array:
    """So many times the row, within what the server takes."""
    xp = namespace(steps)
    if row not in ranges:
        return times * steps
    low, high = ranges[row]
    return xp.clip(steps, -(-low // abs(times)), high // abs(times)) * times


# --- samples ---


def nothing(batch: Samples) -> Samples:
    return Samples(0 * batch.x, batch.y)


def flipped(classes: int | None, first_alone: bool, batch: Samples) -> Samples:
    """The batch with other labels."""
    xp = namespace(batch.y)
    if classes is None:
        return Samples(batch.x, batch.y if first_alone else -batch.y)
    other = xp.where(batch.y == 0, 1, batch.y) if first_alone else classes - 1 - batch.y
    return Samples(batch.x, other.astype(batch.y.dtype))


# --- together ---


def _together(ranges: Mapping[str, tuple[int, int]], attack: Any, row: str, said: Array, lies: Array) -> Array:
    """What all liars of a round say of a row: said [M, ...], lies [M] -> [...], within what the server takes."""
    xp = namespace(said, lies)
    found = attack(said.astype(np.float64 if xp is np else xp.float32), lies)
    low, high = ranges.get(row, (-(2**31) + 1, 2**31 - 1))
    return xp.clip(xp.rint(found), low, high) if row in ranges else found


def _honest(said: Array, lies: Array) -> tuple[Array, Array]:
    """The mean and the standard deviation of what honest devices say."""
    weight = (~lies / (~lies).sum()).reshape(-1, *(1,) * (said.ndim - 1))
    mean = (weight * said).sum(0)
    return mean, namespace(said).sqrt((weight * (said - mean) ** 2).sum(0))


def alie(said: Array, lies: Array) -> Array:
    """Baruch et al. 2019: the mean less z standard deviations; z is as large as lets most uploads be further off.

    With f of M lies, M // 2 + 1 - f honest uploads have to be beyond the lie for it to be in the majority.
    """
    xp, count = namespace(said, lies), len(said)
    table = np.array([_furthest(count, f) for f in range(count + 1)], np.float32)
    mean, spread = _honest(said, lies)
    return mean - xp.asarray(table)[lies.sum()] * spread


def _furthest(count: int, f: int) -> float:
    honest, needed = count - f, count // 2 + 1 - f
    if honest < 1 or needed < 1:
        return 3.0  # a majority of lies needs nobody
    return max(0.0, NormalDist().inv_cdf(min(0.999, max(0.5, (honest - needed) / honest))))


def against(said: Array, lies: Array) -> Array:
    """Xie et al. 2020: the opposite of the mean of honest uploads."""
    return -_honest(said, lies)[0]


def copied(said: Array, lies: Array) -> Array:
    """Karimireddy et al. 2022: one honest device speaks for all liars, and counts too much."""
    return said[namespace(said, lies).argmin(lies)]
