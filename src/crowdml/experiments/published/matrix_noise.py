"""Correlated noise over rounds, for a server that is trusted with every update (DP-FTRL). Simulation alone.

The server publishes after each round the sum of all updates so far, A x with A the lower triangle of ones. With A = B C
it adds noise to C x and publishes B (C x + z): noise of round t takes back some of that of earlier rounds, so sums over
many rounds have less of it (Kairouz et al. 2021; Choquette-Choo et al. 2023). Whoever draws z knows every earlier z:
so a server must be trusted with it. No device holds the noise of its cohort's earlier rounds, so the same is refused
for masked cohorts and for noise that devices add themselves (review, section 6).

Guarantee, in real numbers (the noise here is floating-point noise, R5): rho-zCDP against other devices for replacing
one device that takes part once and moves its round's sum by at most `moved` in the l2 norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array
from crowdml.errors import GuaranteeError, TaskError
from crowdml.privacy.losses import ZCDP
from crowdml.privacy.sensitivity import Observer

__all__ = ["KINDS", "Factorisation", "factorise", "require_trusted"]


@dataclass(frozen=True)
class Factorisation:
    """A = B C over so many rounds. `encode` is C [k, T], `decode` is B [T, k]."""

    kind: str
    rounds: int
    encode: Array
    decode: Array
    bands: int
    """Rounds that one row of C spans: those further apart share no noise."""

    def sensitivity(self, participations: int = 1, separation: int = 0) -> float:
        """How far one device moves C x in the l2 norm if it moves each of its rounds by 1.

        Once: the longest column. Several times, at least `separation` rounds apart: columns that share no row are
        orthogonal, and any others add up at the worst.
        """
        longest = float(np.sqrt((self.encode**2).sum(0)).max())
        if participations < 1:
            raise TaskError(f"participations = {participations}: a device that is charged takes part once or more.")
        apart = participations == 1 or separation >= self.bands
        return longest * (math.sqrt(participations) if apart else participations)

    @cached_property
    def error(self) -> float:
        """Root mean square noise of the T sums at one loss, for one participation: |B|_F / sqrt(T) times C's."""
        return float(np.sqrt((self.decode**2).sum() / self.rounds)) * self.sensitivity()

    @cached_property
    def increments(self) -> Array:
        """[T, k]: A^-1 B, what is added to the update of each round."""
        return np.diff(self.decode, axis=0, prepend=0.0)

    def sigma(self, moved: float, rho: float, *, participations: int = 1, separation: int = 0) -> float:
        """Deviation of each entry of z for rho-zCDP, for updates that one device moves by `moved`."""
        if not (moved > 0 and rho > 0):
            raise GuaranteeError(f"moved = {moved:g} at rho = {rho:g}: both must be above 0.")
        return self.sensitivity(participations, separation) * moved / math.sqrt(2 * rho)

    def loss(self, moved: float, sigma: float, *, participations: int = 1, separation: int = 0) -> ZCDP:
        """What noise of this deviation proves."""
        return ZCDP(Fraction((self.sensitivity(participations, separation) * moved / sigma) ** 2 / 2))

    def noise(self, key: Array, length: int, sigma: float, *, observer: Observer) -> Array:
        """[T, length]: what a trusted server adds to the sum of each round."""
        require_trusted(observer)
        z = sigma * jax.random.normal(key, (self.decode.shape[1], length))
        return jnp.asarray(self.increments, jnp.float32) @ z


def require_trusted(observer: Observer) -> None:
    """Refuse correlated noise where no one may hold it."""
    if observer is Observer.AGGREGATE:
        raise GuaranteeError(
            "correlated noise under masks: the noise of a round depends on that of earlier rounds, which no device of "
            "the cohort holds. A server that adds it has to be trusted: use independent shares, or observer DEVICES."
        )
    if observer is Observer.ANYONE:
        raise GuaranteeError(
            "correlated noise on devices: a device that takes part once has no earlier noise to take back, and the "
            "server must not see its update without noise. Use independent noise, or observer DEVICES."
        )


def _triangle(rounds: int) -> Array:
    return np.tril(np.ones((rounds, rounds)))


def independent(rounds: int) -> Factorisation:
    """Fresh noise in every round: C = 1."""
    return Factorisation("independent", rounds, np.eye(rounds), _triangle(rounds), 1)


def _root(rounds: int) -> Array:
    """First column of the square root of A: binomials (-1)^k (-1/2 over k), 1, 1/2, 3/8, ..."""
    k = np.arange(1, rounds)
    return np.concatenate([[1.0], np.cumprod((2 * k - 1) / (2 * k))])


def _toeplitz(column: Array) -> Array:
    rounds = len(column)
    lag = np.subtract.outer(np.arange(rounds), np.arange(rounds))
    return np.where(lag >= 0, column[np.abs(lag)], 0.0)


def square_root(rounds: int) -> Factorisation:
    """B = C = the square root of A (Fichtenberger, Henzinger, Upadhyay 2023): within a constant of the best."""
    root = _toeplitz(_root(rounds))
    return Factorisation("square-root", rounds, root, root, rounds)


def banded(rounds: int, bands: int | None = None) -> Factorisation:
    """C = the first `bands` (16) bands of the square root, B = A C^-1: for devices that come back after so many."""
    bands = min(16, rounds) if bands is None else bands
    if not 1 <= bands <= rounds:
        raise TaskError(f"bands = {bands}: at least 1 and at most the {rounds} rounds.")
    encode = _toeplitz(np.where(np.arange(rounds) < bands, _root(rounds), 0.0))
    decode = np.linalg.solve(encode.T, _triangle(rounds).T).T
    return Factorisation("banded", rounds, encode, decode, bands)


def tree(rounds: int) -> Factorisation:
    """A binary tree over the rounds (Dwork et al. 2010; Kairouz et al. 2021): a sum is of the fewest whole nodes."""
    height = max(1, rounds - 1).bit_length() if rounds > 1 else 0
    rows: list[Array] = []
    place: dict[tuple[int, int], int] = {}
    for level in range(height + 1):
        for start in range(0, rounds, 1 << level):
            place[level, start] = len(rows)
            rows.append(((np.arange(rounds) >= start) & (np.arange(rounds) < start + (1 << level))).astype(float))
    decode = np.zeros((rounds, len(rows)))
    for end in range(1, rounds + 1):
        start = 0
        for level in range(height, -1, -1):
            if end >> level & 1:
                decode[end - 1, place[level, start]] = 1.0
                start += 1 << level
    used = decode.any(0)  # a node that ends after the last round is never asked for
    return Factorisation("tree", rounds, np.stack(rows)[used], decode[:, used], rounds)


KINDS: dict[str, Callable[[int], Factorisation]] = {
    "independent": independent,
    "square-root": square_root,
    "banded": banded,
    "tree": tree,
}


def factorise(kind: str, rounds: int) -> Factorisation:
    if kind not in KINDS:
        raise TaskError(f"correlated noise {kind!r}: choose one of {', '.join(KINDS)}.")
    if rounds < 1:
        raise TaskError(f"rounds = {rounds}: at least 1.")
    return KINDS[kind](rounds)
