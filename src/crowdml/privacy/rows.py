"""Rows of a protocol's table with the task's noise, whatever the channel is.

A protocol says what leaves and what bounds it, and the task says which noise hides it: under `[masking]` each device
adds a share of Skellam noise to a cohort's sum, else all of the noise itself; with `privacy.mechanism = "none"` the
plain value leaves, in the simulator alone.

- `sum_row`: contributions added up, one a sample or one of the device, each no longer than a bound;
- `count_row`: counts, in which a sample is in one cell at most;
- `stable_row`: one vector that all samples make together, and one sample moves by no more than a proven bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from crowdml.errors import ProtocolError, TaskError
from crowdml.privacy.calibration import gaussian_sigma, laplace_scale, rho_for, round_down, skellam_variance
from crowdml.privacy.grid import COARSEST, FINEST, Grid, Norm
from crowdml.privacy.mechanisms import (
    FURTHEST,
    CountLaplace,
    Exposed,
    GaussianStable,
    GridGaussian,
    GridLaplace,
    Mechanism,
    Scheduled,
    SkellamCount,
    SkellamStable,
    SkellamSum,
    Stable,
    l1_of,
    root_up,
)
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1, Adjacency, Observer
from crowdml.records import record
from crowdml.task import Task

__all__ = ["FINEST_CLIP", "Promise", "check_table", "count_row", "noise_norm", "pin_grid", "stable_row", "sum_row"]

LARGEST_NOISE = 2**15
"""In grid steps: the standard deviation of the noise that one device draws at once (design, decision 1)."""
FINEST_CLIP = 2**13
"""In grid steps: a finer grid than this many steps a clip gains nothing that the noise does not hide."""
FINE = 256
"""Rounding costs sqrt(entries) grid steps. The bound is at least this many times as much: rounding adds below 0.4 %."""
COARSE = 16
"""The least number of times: where noise asks for a coarser grid than this leaves, the task is refused."""


@record
class Promise:
    """What the owner reads of a row: where it has all its noise, in a cohort's sum, and without any noise."""

    alone: str
    summed: str
    plain: str

    @staticmethod
    def blurred(what: str) -> Promise:
        """A vector: `what` is "how the model should change"."""
        return Promise(
            f"{what}, blurred with noise",
            f"{what}, as part of a cohort's sum that is blurred with noise",
            f"{what}, as it is: anyone can work back to samples",
        )

    @staticmethod
    def counted(what: str) -> Promise:
        """Counts: `what` is "how often each label occurred"."""
        return Promise(f"about {what}", f"about {what}, over a cohort", f"{what}, exactly")

    def of(self, task: Task) -> str:
        if task.privacy.mechanism == "none":
            return self.plain
        return self.alone if task.masking is None else self.summed


def check_table(table: Any) -> None:
    """Refuse what is no table of rows by their names."""
    if not isinstance(table, Mapping) or not all(isinstance(each, Mechanism) for each in table.values()):
        what = type(table).__name__ if not isinstance(table, Mapping) else "dict of other things"
        raise ProtocolError(f'`mechanisms` gives a {what}, and has to give a dict of rows: {{"votes": sum_row(...)}}')


def noise_norm(task: Task) -> Norm:
    """The norm in which the task's noise hides a vector: a sum's `bound` is in it."""
    return "l1" if task.privacy.mechanism == "discrete-laplace" and task.masking is None else "l2"


def sum_row(
    task: Task,
    name: str,
    *,
    bound: float,
    shape: tuple[int, ...],
    covers: Rows,
    promise: str | Promise,
    whole: bool = False,
    releases: int | None = None,
    shares: Sequence[Fraction] | None = None,
) -> Mechanism:
    """The sum of vectors of this shape, one a sample (or one in all: `whole`), each no longer than `bound`.

    The noise is worth `privacy.epsilon.NAME` in all `releases` that use a sample (as many as `privacy.uses`), or a
    device where the task protects devices. `shares`: what each check-in of a device gives of its value (`Scheduled`).
    """
    privacy, length = task.privacy, math.prod(shape)
    said = (Promise.blurred(promise) if isinstance(promise, str) else promise).of(task)
    if privacy.mechanism == "none":
        return _exposed(task, covers, said, whole=whole)
    _check_row(task, name, hides_device=whole and releases is not None, shares=shares)
    releases = privacy.uses if releases is None else releases
    unit = Adjacency.REPLACE_DEVICE if privacy.unit == "device" else Adjacency.REPLACE_SAMPLE
    if task.masking is not None:
        honest = task.masking.honest

        def share(clip: int) -> Fraction:
            return _share(task, privacy.epsilon[name], Fraction(2 * clip), l1_of(Fraction(2 * clip), length), releases)

        rough = Fraction(math.isqrt(math.ceil(share(FINEST_CLIP))) + 1, FINEST_CLIP)
        grid, clip = _choose_grid(task, name, bound, rough)
        return SkellamSum(clip, share(clip), honest, grid, covers, length, said, whole=whole, adjacency=unit)
    if privacy.mechanism == "discrete-laplace":
        each = _rounded(privacy.epsilon[name] / worth(shares, releases, 1), shares)
        grid, clip = _choose_grid(task, name, bound, laplace_scale(Fraction(2), each))
        row = GridLaplace(clip, each, grid, covers, said, whole=whole, adjacency=unit)
    else:
        rho = _rounded(rho_for(privacy.epsilon[name], privacy.delta) / worth(shares, releases, 2), shares)
        grid, clip = _choose_grid(task, name, bound, gaussian_sigma(Fraction(2), rho))
        row = GridGaussian(clip, rho, grid, covers, said, whole=whole, adjacency=unit)
    return row if shares is None else Scheduled.over(row, shares)


def _check_row(task: Task, name: str, *, hides_device: bool = False, shares: Sequence[Fraction] | None = None) -> None:
    """Refuse a row without a price, and noise that hides one sample where a task protects devices, which give many."""
    if name not in task.privacy.epsilon:
        raise TaskError(
            f"row {name!r} has no price: privacy.epsilon names {', '.join(task.privacy.epsilon)}. Add one, or, where "
            "the contribution has no field of this name, take the row out of `mechanisms`."
        )
    if task.masking is None and task.privacy.mechanism == "skellam":
        raise TaskError(
            'privacy.mechanism = "skellam" is the noise of many devices together and needs [masking]. Add it, or take '
            '"discrete-gaussian".'
        )
    if shares is not None and task.masking is not None:
        raise TaskError(
            f"row {name!r} has `shares`, and under masks the server hears a sum of devices that are at unlike "
            "check-ins: it could not tell their shares apart. Leave them out, or leave [masking] out."
        )
    if task.privacy.unit == "device" and not hides_device:
        raise TaskError(
            f'privacy.unit = "device": the noise of {name} hides a "sample". For a device, let one vector leave that '
            "all its samples made (`sum_row` with `whole`), and say for how many check-ins in all (`releases`)."
        )


def count_row(
    task: Task, name: str, *, cells: int, covers: Rows, promise: str | Promise, epsilon: Fraction | None = None
) -> Mechanism:
    """Counts in so many cells; each sample adds one to a single cell, or to none.

    The noise is Laplace's or a share of Skellam's, which suit counts best; all `privacy.uses` of a sample together are
    worth `epsilon` (`privacy.epsilon.NAME`).
    """
    privacy, moved = task.privacy, Fraction(min(cells, 2))  # a replaced sample leaves a cell and enters another
    said = (Promise.counted(promise) if isinstance(promise, str) else promise).of(task)
    if privacy.mechanism == "none":
        return _exposed(task, covers, said)
    _check_row(task, name)
    epsilon = privacy.epsilon[name] if epsilon is None else epsilon
    if task.masking is not None:
        variance = _share(task, epsilon, root_up(moved), moved, privacy.uses)
        return SkellamCount(L1(moved), variance, task.masking.honest, covers, cells, said)
    return CountLaplace(L1(moved), epsilon / privacy.uses, covers, said)


def stable_row(
    task: Task,
    name: str,
    *,
    stability: float,
    device_stability: float,
    float_error: Fraction,
    shape: tuple[int, ...],
    covers: Rows,
    promise: str | Promise,
    releases: int | None = None,
    shares: Sequence[Fraction] | None = None,
) -> Mechanism:
    """One vector of this shape, which one sample moves by `stability` and all of them by `device_stability` (l2 norm).

    It lies on the finest useful grid whose noise a device still draws; what floats may add to the bounds, and rounding
    to the grid, are paid. `releases` and `shares` are those of `sum_row`. Where even the coarsest grid needs more noise
    than a device draws at once, a Skellam share is drawn in parts; a task that needs so much Gaussian noise is for the
    simulator alone (`crowdml.protocols.refusal`).
    """
    privacy, masking, length = task.privacy, task.masking, math.prod(shape)
    said = (Promise.blurred(promise) if isinstance(promise, str) else promise).of(task)
    if privacy.mechanism == "none":
        return _exposed(task, covers, said, whole=True)
    _check_row(task, name, shares=shares)
    if masking is None and privacy.mechanism != "discrete-gaussian":
        raise TaskError(
            f'privacy.mechanism = "{privacy.mechanism}": without [masking] an update needs "discrete-gaussian" noise.'
        )
    releases = privacy.uses if releases is None else releases
    times = math.ceil(worth(shares, releases, 2))

    def at(step: Fraction) -> Stable:
        slack = float_error + step / 2**10
        one = Fraction(stability * (1 + 1e-9)) + slack
        everything = max(one, Fraction(device_stability * (1 + 1e-9)) + slack)
        limit = math.ceil(everything / 2 / step) + 1
        if masking is None:
            rho = rho_for(privacy.epsilon[name], privacy.delta) / times
            return GaussianStable(one, everything, limit, rho, Grid(step), covers, length, said)
        l2 = one / step + root_up(Fraction(length))
        variance = _share(task, privacy.epsilon[name], l2, l1_of(l2, length), times)
        return SkellamStable(one, everything, limit, variance, masking.honest, Grid(step), covers, length, said)

    row = _finest(task, at, stability, device_stability, length, covers)
    if shares is None or not isinstance(row, GaussianStable):  # under masks there are no shares
        return row
    unit = Scheduled.over(replace(row, rho=Fraction(1)), shares).total(releases).zcdp  # rounding costs all as much
    return Scheduled.over(replace(row, rho=round_down(rho_for(privacy.epsilon[name], privacy.delta) / unit)), shares)


def pin_grid(task: Task, grid: Grid) -> Task:
    """The task with its grid written in, so that no other implementation has to make the same choice."""
    if task.privacy.mechanism == "none" or task.privacy.grid is not None:
        return task
    return task.with_(privacy=replace(task.privacy, grid=grid.step))


def worth(shares: Sequence[Fraction] | None, releases: int, power: int) -> Fraction:
    """How many times the price of a whole value one unit pays for its releases, at the most.

    A share costs its square in zCDP (power 2), itself in pure epsilon (power 1); the most expensive releases count.
    """
    if shares is None:
        return Fraction(releases)
    return sum((share**power for share in sorted(shares, reverse=True)[:releases]), Fraction(0))


def _rounded(loss: Fraction, shares: Sequence[Fraction] | None) -> Fraction:
    """The loss of a scheduled row as a short fraction: its check-ins are added up exactly."""
    return loss if shares is None else round_down(loss)


def _exposed(task: Task, covers: Rows, promise: str, *, whole: bool = False) -> Exposed:
    seen = Observer.ANYONE if task.masking is None else Observer.AGGREGATE
    return Exposed(L1(Fraction(0)), covers, promise, seen, whole=whole)


def _share(task: Task, epsilon: Fraction, l2: Fraction, l1: Fraction, releases: int) -> Fraction:
    """The variance of one device's share, in squared grid steps: the fewest honest devices of a cohort add enough."""
    masking = task.masking
    assert masking is not None
    return skellam_variance(l2, l1, epsilon, task.privacy.delta, releases) / masking.honest


def _choose_grid(task: Task, name: str, bound: float, noise_per_clip: Fraction) -> tuple[Grid, int]:
    """The finest useful grid whose noise stays within LARGEST_NOISE steps, and the clip in its steps, rounded up.

    For sums of contributions no longer than `bound`.
    """
    if not 0 < bound < math.inf:
        raise TaskError(f"row {name!r} has the bound {bound:g}: how long a contribution may be, a number above 0.")
    most, wanted = int(LARGEST_NOISE / noise_per_clip), task.privacy.grid
    if most < 1:
        raise TaskError(
            f"privacy.epsilon.{name} is so small that noise of {float(noise_per_clip):g} clips would leave the grid "
            f"of {LARGEST_NOISE} steps. Raise it."
        )

    def clip(step: Fraction) -> int:
        return math.ceil(bound / float(step) * (1 + 1e-6))

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


def _finest(
    task: Task, at: Callable[[Fraction], Stable], stability: float, device_stability: float, length: int, covers: Rows
) -> Stable:
    """The row on the finest useful grid whose noise a device draws at once, or on the coarsest that rounding allows."""
    root, wanted = root_up(Fraction(length)), task.privacy.grid
    finest = Fraction(stability) / (FINE * root)
    step = Fraction(2) ** math.floor(math.log2(finest))
    if wanted is not None:
        step = wanted
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
        if found is not None and (wanted is not None or found.law.steps <= LARGEST_NOISE):
            return found
        step *= 2
        if wanted is not None or Fraction(stability) / step < COARSE * root:
            if found is not None:
                return found
            raise TaskError(
                f"protocol.batch = {covers.size}: an update of so many samples has more than {FURTHEST} steps of "
                "the coarsest grid that its rounding allows. Lower it."
            )


def _check_power(wanted: Fraction, example: float) -> None:
    if wanted <= 0 or (wanted.numerator * wanted.denominator).bit_count() != 1:
        raise TaskError(f"privacy.grid = {float(wanted):g}: a power of two, such as {example:g}.")
