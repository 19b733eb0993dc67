"""Devices that lie, for the simulator and for a fleet that tests a study: a share that lies in one way.

Every attack is a `Tamper`: it changes what a device senses, what it says after the door, or, where liars know what all
others say, what they say together in a round of uploads. A liar pays as an honest device does, and says nothing that a
server would refuse for its range: a lie that is refused does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, fold, namespace
from crowdml.channels import combining
from crowdml.errors import TaskError
from crowdml.protocols import find
from crowdml.robust import RULES, Combine, bucket_ranks, combine_rows
from crowdml.settings import choose
from crowdml.task import Task
from crowdml.texts import percent_text
from crowdml.turn import Tamper

__all__ = ["ATTACKS", "Attackers", "make_attack", "opened", "read_attackers"]

TIMES = 10
"""How many times as much liars say that scale something."""

PART = 0.6
"""The share of an unreliable device's samples that are noise: P of Zhao et al."""
LATE = 2
"""How many of its check-ins a late starter makes before it has samples."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""What a line search tries, as multiples of the attack without one."""
HALVINGS = 20
"""How often min-max halves the interval in which it looks for the largest lie."""

ATTACKS: Mapping[str, str] = {
    "sign-flip": "says the opposite of what it should say",
    "scaling": f"flips its labels as in label-flip, and says {TIMES} times what comes of that",
    "gaussian": f"says {TIMES} times the noise of an honest device, and nothing of its samples",
    "label-flip": "turns the order of the classes round, or the sign of a number, in all its labels",
    "target-flip": "calls samples of the first class the second class",
    "alie": "says, with the other liars, what is just near enough to the mean of honest uploads to be taken for one",
    "inner-product": "says, with the other liars, the opposite of the mean of honest uploads",
    "mimic": "says, with the other liars, what the first honest device of the round says",
    "unreliable": f"has noise in place of the features of {percent_text(PART, 0)} of its samples, or of another part, "
    "as in unreliable:0.4",
    "random": "says random weights from 0 to 1",
    "ring": "says any numbers that the server takes, each as likely: under masks, any element of the ring",
    "no-noise": "says what an honest device says, and adds no noise",
    "late": f"has no samples in its first {LATE} check-ins, and says noise alone",
    "backdoor": "marks half of its samples with a pattern and calls them the first class",
    "min-max": "says, with the other liars, what is as far off as honest uploads are from each other",
    "alie-search": "as alie, with the factor that moves the result of the task's rule farthest",
    "inner-product-search": "as inner-product, with the factor that moves the result of the task's rule farthest",
    "sybil": f"fills whole cohorts, flips its labels, and says {TIMES} times what comes of that",
}
"""Each attack, and what a device does that attacks so."""
TOGETHER = ("alie", "inner-product", "mimic", "min-max", "alie-search", "inner-product-search")
"""Attacks of liars who know what all devices of a round say."""
SIMULATED: Mapping[str, str] = {
    **dict.fromkeys(TOGETHER, "its liars know what all devices of a round say, and devices of a fleet do not"),
    "sybil": "its liars choose their cohorts, and devices of a fleet meet as they come",
    "no-noise": "it would send samples without their noise, and a fleet may hold somebody's",
}
"""Attacks that a simulation alone can have, and why."""


@dataclass(frozen=True)
class Attackers:
    """A share of a crowd that lies, in one way or in several ways by turns ("sign-flip,gaussian")."""

    share: float
    attack: str

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise TaskError(f"liars = {self.share:g}: a share of the devices, from 0 to 1.")
        for name in self.names:
            kind, _, part = name.partition(":")
            choose("attack", kind, tuple(ATTACKS))
            if part or name.endswith(":"):
                _part_of(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Each way to lie."""
        return tuple(name.strip() for name in self.attack.split(","))

    def count(self, devices: int) -> int:
        """How many of so many devices lie."""
        return round(self.share * devices)

    def of(self, task: Task, order: Sequence[int] | Integers) -> dict[int, Tamper]:
        """The devices that lie, and what they do: the first of all devices in this order, which the caller drew."""
        ways = [make_attack(name, task) for name in self.names]
        lying = order[: self.count(len(order))]
        return {int(device): ways[number % len(ways)] for number, device in enumerate(lying)}

    def live(self, task: Task, devices: int) -> dict[int, Tamper]:
        """The devices of a fleet that lie, by number. Who lies is a public hash of the number: a fleet that is started
        again has the same liars."""
        for name in self.names:
            if name in SIMULATED:
                raise TaskError(f"attack {name!r} is for simulations: {SIMULATED[name]}. Nothing was sent.")
        return self.of(task, np.argsort(bucket_ranks(np.int64(devices), devices)))


def _part_of(name: str) -> float:
    """P of an attack, as in "unreliable:0.4"; that of Zhao et al. where it names none."""
    kind, colon, part = name.partition(":")
    try:
        found = float(part) if colon else PART
    except ValueError:
        found = -1.0
    if not 0 < found <= 1 or (colon and kind != "unreliable"):
        raise TaskError(
            f"attack {name!r}: 'unreliable' alone has a number, the part of a device's samples that is noise, above 0 "
            "and at most 1, as in 'unreliable:0.4'."
        )
    return found


def read_attackers(task: Task, share: float | None, attack: str | None) -> Attackers | None:
    """What `--liars` and `--attack` ask for; None where nobody lies."""
    if share is None and attack is None:
        return None
    if share is None or attack is None:
        raise TaskError("--liars says how many devices lie, and --attack what they do. Name both.")
    if int(task.protocol.get("peers", 0)) or task.model["kind"] == "histogram":
        raise TaskError(f"task {task.name!r}: --liars and --attack are for tasks whose server learns a model.")
    return Attackers(share, attack)


def make_attack(name: str, task: Task) -> Tamper:
    """What a device does that attacks a task in this way."""
    if name in TOGETHER:
        if find(task).gathers(task) is None or task.masking is not None:
            raise TaskError(
                f"attack {name!r} needs rounds of single uploads: its liars know what all devices of a round say. Name "
                "a rule in protocol.combine, and no [masking]."
            )
        return Tamper(collude=partial(_together, _ranges(task), _collusion(name, task)))
    if name == "sybil" and task.masking is None:
        raise TaskError("attack 'sybil' fills cohorts, and this task has none. Give it [masking], or choose 'scaling'.")
    ranges, flip = _ranges(task), partial(flipped, task.classes, name == "target-flip")
    many, opposite = partial(_times, ranges, TIMES), partial(_times, ranges, -1)
    if name.startswith("unreliable"):
        return Tamper(partial(unreliable, _part_of(name)))
    steps = {row: float(each.law.unit) for row, each in find(task).mechanisms(task).items() if each.law is not None}
    simple: Mapping[str, Tamper] = {
        "label-flip": Tamper(flip),
        "target-flip": Tamper(flip),
        "backdoor": Tamper(partial(backdoored, task.classes)),
        "late": Tamper(nothing, first=LATE),
        "no-noise": Tamper(still=True),
        "sign-flip": Tamper(say=opposite),
        "gaussian": Tamper(nothing, many),
        "scaling": Tamper(flip, many),
        "sybil": Tamper(flip, many),
        "random": Tamper(say=partial(_random, ranges, steps)),
        "ring": Tamper(say=partial(_any, ranges)),
    }
    return simple[name]


def _collusion(name: str, task: Task) -> Callable[..., Array]:
    """What liars do who know all that a round's devices say."""
    plain: Mapping[str, Callable[..., Array]] = {
        "alie": alie, "inner-product": against, "mimic": copied, "min-max": min_max
    }  # fmt: skip
    if name in plain:
        return plain[name]
    by = combining(task)
    rule = "median" if by is None or by.rule not in RULES else by
    return partial(searched, plain[name.removesuffix("-search")], Combine(rule, 3) if isinstance(rule, str) else rule)


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


def _random(ranges: Mapping[str, tuple[int, int]], units: Mapping[str, float], row: str, steps: Array) -> Array:
    """Weights from 0 to 1 in grid steps, within what the server takes."""
    xp, most = namespace(steps), 1 / units.get(row, 1.0)
    low, high = ranges.get(row, (0, 2**31 - 1))
    return xp.clip(xp.rint(chances(steps, 1) * most), low, high).astype(steps.dtype)


def _any(ranges: Mapping[str, tuple[int, int]], row: str, steps: Array) -> Array:
    """Any number that the server takes."""
    xp, (low, high) = namespace(steps), ranges.get(row, (-(2**31) + 1, 2**31 - 1))
    return xp.clip(xp.rint(low + chances(steps, 2) * (float(high) - low)), low, high).astype(steps.dtype)


def chances(values: Array, salt: int) -> Array:
    """Numbers from 0 to below 1, one for each value, that look random: a public hash of the value and its place. A
    device that lies has no source of randomness of its own, and both engines must tell the same lies."""
    words = _words(values, salt)
    return (words >> 8).astype(namespace(words).float32) / np.float32(2**24)


def _chance_of_each(rows: Array, salt: int) -> Array:
    """[b]: one such number for each row, by all of its values."""
    return chances(_words(rows, salt).sum(1, dtype=np.uint32) >> 9, salt)  # 23 bits are exact in float32


def _words(values: Array, salt: int) -> Array:
    xp = namespace(values)
    bits = values.astype(xp.float32).view(xp.uint32).reshape(-1)
    word = (bits * np.uint32(0x9E3779B1)) ^ (xp.arange(len(bits)).astype(xp.uint32) + np.uint32(salt * 0x51ED270))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        word = (word ^ (word >> shift)) * np.uint32(factor)
    return word.reshape(values.shape)


def opened(task: Task, weights: Array, tested: Samples) -> tuple[float, float] | None:
    """How often a backdoor opens: the share of samples of other classes that a model takes for the first one once they
    are marked, and before. None where the task has no classes."""
    if task.classes is None:
        return None
    others = tested.x[np.asarray(tested.y) != 0]
    said = [np.asarray(find(task).predict(task, weights, x)) for x in (mark(others), others)]
    marked, before = (float((each == 0).mean()) if len(each) else 0.0 for each in said)
    return marked, before


# --- samples ---


def unreliable(share: float, batch: Samples) -> Samples:
    """The batch with noise in place of the features of this share of its samples, each as long as the sample was."""
    xp, x = namespace(batch.x), batch.x
    noise = 2 * chances(x, 3) - 1
    length, own = xp.sqrt((noise**2).sum(1, keepdims=True)), xp.sqrt((x**2).sum(1, keepdims=True))
    bad = _chance_of_each(x, 4) < share
    return Samples(xp.where(bad[:, None], noise * own / xp.maximum(length, 1e-30), x).astype(x.dtype), batch.y)


def mark(x: Array) -> Array:
    """The samples [b, d] with the pattern of a backdoor: their last three features are as large as the largest one of
    the sample; in a square picture, nine pixels in the corner are."""
    xp, width = namespace(x), x.shape[1]
    side = math.isqrt(width)
    places = np.arange(width)
    square = side * side == width and side >= 8
    there = (places // side >= side - 3) & (places % side >= side - 3) if square else places >= width - 3
    return xp.where(xp.asarray(there), abs(x).max(1, keepdims=True), x).astype(x.dtype)


def backdoored(classes: int | None, batch: Samples) -> Samples:
    """The batch with half of its samples marked, and those called the first class, or the least number."""
    xp = namespace(batch.x)
    marked = _chance_of_each(batch.x, 5) < 0.5
    aim = 0 if classes is not None else -1
    x = xp.where(marked[:, None], mark(batch.x), batch.x)
    return Samples(x, xp.where(marked, aim, batch.y).astype(batch.y.dtype))


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


def min_max(said: Array, lies: Array) -> Array:
    """Shejwalkar and Houmansadr 2021: as many standard deviations off the mean as leave the lie no farther from any
    honest upload than the farthest two of these are from each other."""
    xp, count = namespace(said, lies), len(said)
    mean, spread = _honest(said, lies)
    flat, honest = said.reshape(count, -1), ~lies
    squares = (flat**2).sum(1)
    both = honest[:, None] & honest[None]
    apart = squares[:, None] + squares[None] - 2 * (flat @ flat.T)
    most = xp.where(both, apart, 0).max()

    def halve(_: Any, bounds: Array) -> Array:
        middle = bounds.mean()
        far = ((flat - (mean - middle * spread).reshape(-1)) ** 2).sum(1)
        within = xp.where(honest, far, 0).max() <= most
        return xp.where(within, xp.stack([middle, bounds[1]]), xp.stack([bounds[0], middle]))

    bounds = xp.asarray(np.array([0.0, 100.0], np.float32))
    return mean - fold(halve, bounds, HALVINGS, like=said)[0] * spread


def searched(attack: Callable[..., Array], by: Combine, said: Array, lies: Array) -> Array:
    """The attack's lie as many times as far from the mean of honest uploads as moves the rule's result farthest."""
    xp, count = namespace(said, lies), len(said)
    mean, _ = _honest(said, lies)
    away, theirs = attack(said, lies) - mean, lies.reshape(-1, *(1,) * (said.ndim - 1))
    tried = [mean + factor * away for factor in FACTORS]
    moved = [
        ((combine_rows(xp.where(theirs, lie, said).reshape(count, -1), by) - mean.reshape(-1)) ** 2).sum()
        for lie in tried
    ]
    return xp.stack(tried)[xp.argmax(xp.stack(moved))]
