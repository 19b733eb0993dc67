"""Which training rows each device holds.

Randomness is an argument: a generator, or the integer seed of one. There is no default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.errors import DataError

Rows = NDArray[np.int32]
Chance = np.random.Generator | int

HELD, FEWEST, MOST = 10, 5, 1000
"""Rows of a device where nobody says how many devices there are, and the fewest and the most devices then."""
FEW = 0.25
"""The share of devices that may stay silent where they hold different numbers of rows, for they hold too few."""


def usual_devices(rows: int) -> int:
    """How many devices hold these rows where nobody says so."""
    return max(1, min(rows, MOST, max(FEWEST, rows // HELD)))


def usually_held(counts: NDArray[Any]) -> int:
    """How many rows a device holds, of a crowd with these numbers of rows: most of the devices have as many."""
    return max(1, int(np.quantile(counts, FEW)))


@dataclass(frozen=True)
class Population:
    """M devices and the rows of a training set that each holds, in the order in which it senses them.

    rows [M, n]: device i holds rows[i, : counts[i]], and no row belongs to two devices. Where counts[i] < n, the rest
    of the line repeats the device's own last row, so that a mistaken read never touches another device's sample.
    `dropped` rows of the training set belong to nobody, so that counts are equal where that is promised.
    """

    kind: str
    rows: Rows
    counts: Rows
    dropped: int

    @property
    def devices(self) -> int:
        return len(self.counts)

    def held_by(self, device: int) -> Rows:
        return self.rows[device, : self.counts[device]]


@dataclass(frozen=True)
class DrawnPopulation:
    """Any number of devices over a pool of rows, with replacement, and nothing stored.

    The row of sample `serial` on `device` is a hash of (seed, device, serial): the same question always has the same
    answer, in any order, on NumPy and on JAX. Two devices may hold the same row, so a guarantee measured on the pool's
    own rows does not follow; it is for speed and scale.
    """

    pool: int
    devices: int
    per_device: int
    seed: int

    def rows(self, device: Any, serial: Any) -> Any:
        """Integer arrays device, serial (of shapes that broadcast) -> int32 row numbers from 0 to pool - 1.

        Uniform up to 2^-32 * pool in relative terms, as 32 hashed bits are reduced modulo the pool.
        """
        with np.errstate(over="ignore"):  # words wrap round; NumPy would warn about it for single ones
            word = _mixed(_word(device) ^ np.uint32(_fold(self.seed)))
            word = _mixed(word + _word(serial) * np.uint32(0x9E3779B9))
        return (word % np.uint32(self.pool)).astype(np.int32)

    def held_by(self, device: int) -> Rows:
        """All rows of one device, [per_device]."""
        return self.rows(np.full(self.per_device, device), np.arange(self.per_device))


def iid(rows: int, devices: int, chance: Chance, *, equal: bool = True) -> Population:
    """Deal a random permutation of the rows out to the devices.

    With `equal`, each has rows // devices of them and the remainder belongs to nobody; otherwise the first devices
    have one more.
    """
    _enough(rows, devices)
    order = _generator(chance).permutation(rows).astype(np.int32)
    if equal:
        held = rows // devices
        return _equal("iid", order[: held * devices].reshape(devices, held), rows)
    return _ragged("iid", np.array_split(order, devices), rows)


def by_class(labels: NDArray[Any], devices: int, chance: Chance, *, classes_per_device: int = 2) -> Population:
    """Each device holds samples of at most `classes_per_device` classes, an equal number of samples on each.

    Every class is shuffled and cut into shards of one size, the largest that gives each device its shards; shards are
    dealt out at random, so a device may get one class twice. What does not fill a shard belongs to nobody. On a device
    the shards are mixed, in random order.
    """
    _enough(len(labels), devices)
    if classes_per_device < 1:
        raise DataError(f"devices with {classes_per_device} classes cannot be made; each must hold at least 1.")
    rng = _generator(chance)
    shards = devices * classes_per_device
    names, sizes = np.unique(labels, return_counts=True)
    size = next((s for s in range(len(labels) // shards, 0, -1) if (sizes // s).sum() >= shards), 0)
    if size == 0:
        raise DataError(
            f"{len(labels)} rows cannot give {devices} devices {classes_per_device} classes each; "
            f"at most {len(labels) // classes_per_device} devices are possible."
        )
    cut = [
        rng.permutation(np.flatnonzero(labels == name))[: count // size * size]
        for name, count in zip(names, sizes, strict=True)
    ]
    pieces = np.concatenate(cut).reshape(-1, size)
    dealt = pieces[rng.permutation(len(pieces))[:shards]].reshape(devices, classes_per_device * size)
    return _equal("by_class", rng.permuted(dealt, axis=1).astype(np.int32), len(labels))


def by_user(groups: NDArray[Any] | None, users: Sequence[int] | None = None) -> Population:
    """One device per person, in the order of `users` (all, by id, when None); its rows keep the order of time."""
    if groups is None:
        raise DataError(
            "this data set does not say whose its rows are, so devices by user cannot be made; use iid or by_class."
        )
    known = np.unique(groups)
    chosen = known if users is None else np.asarray(users)
    strangers = np.setdiff1d(chosen, known)
    if len(chosen) == 0 or len(strangers) or len(np.unique(chosen)) < len(chosen):
        raise DataError(
            f"users {list(map(int, chosen))} cannot be made devices: each must be one of the {len(known)} users "
            f"{int(known[0])} to {int(known[-1])}, once."
        )
    return _ragged("by_user", [np.flatnonzero(groups == user).astype(np.int32) for user in chosen], len(groups))


def drawn(pool: int, devices: int, per_device: int, seed: int) -> DrawnPopulation:
    """A population of any size whose rows are computed when asked for; see `DrawnPopulation`."""
    if not (1 <= pool < 2**31 and 1 <= devices < 2**31 and 1 <= per_device < 2**31):
        raise DataError(
            f"{devices} devices with {per_device} rows of a pool of {pool} cannot be drawn; each must be 1 to 2^31-1."
        )
    return DrawnPopulation(pool, devices, per_device, seed)


def _generator(chance: Chance) -> np.random.Generator:
    return chance if isinstance(chance, np.random.Generator) else np.random.default_rng(chance)


def _enough(rows: int, devices: int) -> None:
    if not 1 <= devices <= rows:
        raise DataError(
            f"{rows} rows cannot be dealt out to {devices} devices: each needs one. Ask for 1 to {rows} devices."
        )


def _equal(kind: str, rows: Rows, total: int) -> Population:
    counts = np.full(len(rows), rows.shape[1], np.int32)
    return Population(kind, rows, counts, total - rows.size)


def _ragged(kind: str, held: Sequence[Rows], total: int) -> Population:
    counts = np.array([len(own) for own in held], np.int32)
    longest = int(counts.max())
    rows = np.stack([np.pad(own, (0, longest - len(own)), mode="edge") for own in held])
    return Population(kind, rows, counts, total - int(counts.sum()))


def _word(value: Any) -> Any:
    return (value if hasattr(value, "astype") else np.asarray(value)).astype(np.uint32)


def _fold(seed: int) -> int:
    """Any integer seed as 32 bits, near and far seeds apart alike."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0])


def _mixed(word: Any) -> Any:
    """A bijection of 32-bit words where each input bit moves about half of the output bits (lowbias32's constants)."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> np.uint32(15))) * np.uint32(0x846CA68B)
    return word ^ (word >> np.uint32(16))
