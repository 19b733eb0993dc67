"""What several protocols are made of: the finest grid that fits, a row that is priced by stability, the pinned grid."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from crowdml.arrays import Array, namespace
from crowdml.errors import TaskError
from crowdml.models import Model, Norm
from crowdml.privacy.calibration import rho_for, skellam_variance
from crowdml.privacy.grid import COARSEST, FINEST, Grid
from crowdml.privacy.mechanisms import FURTHEST, GaussianStable, SkellamStable, l1_of, root_up
from crowdml.privacy.private import Rows
from crowdml.task import Task

__all__ = ["FINEST_CLIP", "LARGEST_NOISE", "choose_grid", "into_ball", "longest", "pin_grid", "so_many", "stable_row"]

LARGEST_NOISE = 2**15
"""In grid steps: the deviation of the noise that one device draws at once (design, decision 1)."""
FINEST_CLIP = 2**13
"""In grid steps: a finer grid than this many steps a clip gains nothing that the noise does not hide."""
FINE = 256
"""Rounding costs sqrt(entries) grid steps; the bound is at least so many times as much: less than half a hundredth."""
COARSE = 16
"""The same, at the least: where noise asks for a coarser grid than this leaves, the task is refused."""


def longest(model: Model, norm: Norm, bound: float, clip: Fraction | None) -> float:
    """How long a sample's gradient may be: the model's own bound, or the task's `protocol.clip` where that is less."""
    if clip is not None and not model.bounded:
        return float(clip)
    own = model.gradient_bound(norm, bound)
    return own if clip is None else min(own, float(clip))


def choose_grid(row: str, bound: float, noise_per_clip: Fraction, wanted: Fraction | None) -> tuple[Grid, int]:
    """The finest useful grid whose noise stays within LARGEST_NOISE steps, and the clip in its steps, rounded up.

    For sums of contributions no longer than `bound`; `wanted` is the task's own grid.
    """
    most = int(LARGEST_NOISE / noise_per_clip)
    if most < 1:
        raise TaskError(
            f"privacy.epsilon.{row} is so small that noise of {float(noise_per_clip):g} clips would leave the grid "
            f"of {LARGEST_NOISE} steps. Raise it."
        )

    def clip(step: Fraction) -> int:
        return int(np.ceil(bound / float(step) * (1 + 1e-6)))

    step = Fraction(1)
    while bound / step < min(FINEST_CLIP, most) / 2:
        step /= 2
    while bound / step > FINEST_CLIP or clip(step) > most:
        step *= 2
    if wanted is not None:
        _check_power(wanted, float(step))
        if wanted < step:
            raise TaskError(f"privacy.grid = {float(wanted):g}: too fine for this noise; {float(step):g} or coarser.")
        step = wanted
    if not FINEST <= step <= COARSEST:
        raise TaskError(
            f"features.norm.bound makes gradients as long as {bound:g}, and no grid of 2^-64 to 2^64 fits them. "
            "Scale the features."
        )
    return Grid(step), clip(step)


def stable_row(
    task: Task,
    row: str,
    covers: Rows,
    length: int,
    *,
    stability: float,
    device_stability: float,
    float_error: Fraction,
    releases: int,
    promise: Callable[[bool], str],
) -> SkellamStable | GaussianStable:
    """One vector that `stability` bounds, on the finest useful grid whose noise a device still draws.

    Under masks with a share of Skellam noise, else with discrete Gaussian noise; for `releases` uses of a sample
    together. What floats may add to the bound, and rounding to the grid, are paid.

    Where even the coarsest grid needs more noise than a device draws at once, a Skellam share is drawn in parts; a task
    that needs so much Gaussian noise is for the simulator alone (`crowdml.protocols.refusal`).
    """
    privacy, masking = task.privacy, task.masking
    root, epsilon = root_up(Fraction(length)), privacy.epsilon[row]
    if masking is None and privacy.mechanism != "discrete-gaussian":
        raise TaskError(
            f'privacy.mechanism = "{privacy.mechanism}": without [masking] an update needs "discrete-gaussian" noise.'
        )

    def at(step: Fraction) -> SkellamStable | GaussianStable:
        slack = float_error + step / 2**10
        one = Fraction(stability * (1 + 1e-9)) + slack
        everything = max(one, Fraction(device_stability * (1 + 1e-9)) + slack)
        reach, said = math.ceil(everything / 2 / step) + 1, promise(masking is not None)
        if masking is None:
            rho = rho_for(epsilon, privacy.delta) / releases
            return GaussianStable(one, everything, reach, rho, Grid(step), covers, length, said)
        l2 = one / step + root
        share = skellam_variance(l2, l1_of(l2, length), epsilon, privacy.delta, releases) / masking.honest
        return SkellamStable(one, everything, reach, share, masking.honest, Grid(step), covers, length, said)

    finest = Fraction(stability) / (FINE * root)
    step = Fraction(2) ** math.floor(math.log2(finest))
    if privacy.grid is not None:
        step = privacy.grid
        _check_power(step, 2.0 ** round(math.log2(finest)))
        if Fraction(stability) / step < COARSE * root:
            raise TaskError(
                f"privacy.grid = {float(step):g}: rounding to it costs more than a {COARSE}th of the sensitivity "
                f"{stability:g}; {float(Fraction(stability) / (COARSE * root)):g} or finer."
            )
    if not FINEST * 2**20 <= step <= COARSEST / 2**20:
        raise TaskError(f"one sample moves an update by {stability:g}, and no grid fits that. Scale the features.")
    while True:
        wide = math.ceil(Fraction(device_stability) / 2 / step) + 2 > FURTHEST
        found = None if wide else at(step)
        if found is not None and (privacy.grid is not None or _deviation(found) <= LARGEST_NOISE):
            return found
        step *= 2
        if privacy.grid is not None or Fraction(stability) / step < COARSE * root:
            if found is not None:
                return found
            raise TaskError(
                f"protocol.batch = {covers.size}: an update of so many samples has more than {FURTHEST} steps of "
                "the coarsest grid that its rounding allows. Lower it."
            )


def _check_power(wanted: Fraction, example: float) -> None:
    if wanted <= 0 or (wanted.numerator * wanted.denominator).bit_count() != 1:
        raise TaskError(f"privacy.grid = {float(wanted):g}: a power of two, such as {example:g}.")


def _deviation(row: SkellamStable | GaussianStable) -> float:
    """Of one device's noise, in grid steps."""
    return math.sqrt(row.variance) if isinstance(row, SkellamStable) else float(row.sigma)


def into_ball(x: Array, bound: float) -> Array:
    """Rows no longer than the bound in the l2 norm; one with an entry that is not finite is the zero sample."""
    xp = namespace(x)
    usable = (abs(x) <= 1e9).all(axis=-1, keepdims=True)
    whole = xp.where(usable, x, 0)
    size = xp.sqrt((whole * whole).sum(axis=-1, keepdims=True))
    return whole * (bound / xp.maximum(size, bound))


def pin_grid(task: Task, grid: Grid) -> Task:
    """The task with its grid written in, so that no other implementation has to make the same choice."""
    if task.privacy.mechanism == "none" or task.privacy.grid is not None:
        return task
    return task.with_(privacy=replace(task.privacy, grid=grid.step))


def so_many(count: int, thing: str, done: str) -> str:
    """'3 cohorts have been added up', '1 cohort has been added up': why a task stops."""
    return f"{count} {thing} has {done}" if count == 1 else f"{count} {thing}s have {done}"
