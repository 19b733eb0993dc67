"""Second moments of public features and labels, as several protocols release and solve them.

A device's samples become rows of features and labels, a mechanism sums their products with noise, and whoever has such
a release solves ridge regression from it as often as they like: that is post-processing. Privacy review, section 4,
SP-A.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, TypeVar

import numpy as np

from crowdml.arrays import Array, Integers, Samples, finite_or_zero, struct
from crowdml.channels import combining
from crowdml.errors import TaskError
from crowdml.features.maps import FeatureMap, MapSettings, make_map, map_length
from crowdml.features.pictures import variations
from crowdml.models.ridge import RULE, solve_each
from crowdml.privacy.grid import Grid
from crowdml.privacy.mechanisms import l1_of
from crowdml.privacy.moments import Products, SkellamGram, moments_move, moments_variance
from crowdml.privacy.noise import WIDEST
from crowdml.privacy.polynomials import PolynomialLaplace, coefficients_move
from crowdml.privacy.private import Private, Rows
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.protocol import Context, Publish, Step, stop_after
from crowdml.records import record
from crowdml.rooted import Root, choose_group
from crowdml.task import Task

__all__ = [
    "Learned", "Regression", "Solver", "check_prices", "group_uploads", "label_rows", "moment_rows", "moments_row",
    "polynomial_row", "predictions", "read_ridge", "remark_on_noise", "root_of", "scores", "seen_from",
    "solve_by_rules", "solve_moments", "target_rows",
]  # fmt: skip

FINEST_CLIP = 2**9
"""In grid steps: features of norm one on a finer grid gain nothing that the noise does not hide."""
LARGEST_SHARE = 2**16
"""In grid steps: the standard deviation of a device's share of a cohort's noise, which it draws in up to 4 parts."""
LARGEST_OWN = 2**18
"""In grid steps: the standard deviation where a device adds all of the noise, which it draws in up to 64 parts."""
MOST_FEATURES = 4096


R = TypeVar("R", bound=Products, covariant=True)


@dataclass(frozen=True)
class Regression(Generic[R]):
    """What a task fixes of a ridge regression on public features. The map is made when it is first used."""

    map_settings: MapSettings
    mechanism: R
    dimension: int
    classes: int | None
    label_bound: float
    c: float

    @property
    def has_constant(self) -> bool:
        """Whether the last feature is the map's constant."""
        return bool(self.map_settings.constant)

    @property
    def map(self) -> FeatureMap:
        return make_map(self.map_settings, self.dimension)

    def features(self, x: Array) -> Array:
        """x [n, dimension] -> [n, features]: what the mechanism multiplies, and weights belong to: features of norm one
        at most, or units of the last public layer, each in [0, 1]."""
        found = self.map(x)
        return np.clip(found * math.sqrt(self.map.length), 0, 1) if self.mechanism.takes_units else found


def moment_rows(fixed: Regression[Any], batch: Samples) -> Array:
    """One row a sample, [b, features + labels]: what the mechanism clips, truncates and multiplies."""
    try:
        x, y = np.asarray(batch.x), np.asarray(batch.y)
    except TypeError:  # a tracer has no values
        raise TaskError(
            "moments are not compiled: their integers need 64 bits and maps are NumPy's. `crowdml simulate` runs such "
            "a task device after device."
        ) from None
    labels = 1 - 2 * target_rows(fixed, y) if fixed.mechanism.takes_units else label_rows(fixed, y)
    return np.concatenate([fixed.features(x), labels], axis=1)


def label_rows(fixed: Regression[Any], y: Array) -> Array:
    """Labels [b] as rows of norm at most one: a 1 in the place of the class, or a number over its bound.

    A label out of the public range counts as none: a row of zeros.
    """
    if fixed.classes is not None:
        return (y[:, None] == np.arange(fixed.classes)).astype(np.float32)
    scaled = finite_or_zero(y).astype(np.float64) / fixed.label_bound
    return np.where(np.abs(scaled) <= 1, scaled, 0.0)[:, None].astype(np.float32)


def target_rows(fixed: Regression[Any], y: Array) -> Array:
    """Labels [b] as y in [0, 1] of each output: 1 in the place of the class, or a number halfway up at zero.

    A label out of the public range is halfway everywhere, and moves no linear coefficient.
    """
    rows = label_rows(fixed, y)
    if fixed.classes is None:
        return (1 + rows) / 2
    return np.where(rows.any(axis=1, keepdims=True), rows, 0.5)


def solve_moments(fixed: Regression[Any], moments: Integers, shares: float) -> Array:
    """Weights [features, labels] from summed moments that hold `shares` shares of noise, by the public rule."""
    return solve_by_rules(fixed, moments, shares, (fixed.c,))[0]


def solve_by_rules(fixed: Regression[Any], moments: Integers, shares: float, rules: Sequence[float]) -> list[Array]:
    """The weights that each c in `rules` gives for the same summed moments."""
    gram, cross, deviation = fixed.mechanism.equations(moments, shares)
    return solve_each(gram, cross, deviation, rules)


def scores(fixed: Regression[Any], weights: Array, x: Array) -> Array:
    """x [n, dimension] -> a score for each class [n, c], or numbers [n]."""
    found = np.asarray(fixed.features(x), np.float64) @ np.asarray(weights, np.float64)
    return found if fixed.classes is not None else found[:, 0] * fixed.label_bound


def predictions(fixed: Regression[Any], weights: Array, x: Array) -> Array:
    """x [n, dimension] -> [n]: class indices (the lowest of equals), or numbers."""
    found = scores(fixed, weights, x)
    return found if fixed.classes is None else found.argmax(axis=1).astype(np.int32)


def read_ridge(task: Task) -> float:
    """c of the ridge, `model.c`; refuse a task with another model, or one that nothing hides or that gives it twice."""
    name = task.protocol["kind"]
    model = {key: value for key, value in task.model.items() if key != "kind"}
    if task.model["kind"] != "ridge":
        raise TaskError(f'model.kind = {task.model["kind"]!r}: {name} solves for "ridge", and nothing else.')
    c = model.pop("c", Fraction(RULE))
    if not isinstance(c, (int, Fraction)) or isinstance(c, bool) or not 0 < c <= 1000:
        raise TaskError(f"model.c = {c!r}: a number above 0, up to 1000; the ridge is c sigma sqrt(features).")
    for key in model:
        raise TaskError(f"model.{key}: the ridge model has c, and no such setting.")
    if task.privacy.mechanism == "none":
        raise TaskError(
            f'privacy.mechanism = "none": {name} always adds noise. Give an epsilon, or take another protocol.'
        )
    return float(c)


def check_prices(task: Task) -> None:
    """Refuse prices of anything but the one release that each sample is in."""
    name = task.protocol["kind"]
    if set(task.privacy.epsilon) != {"moments"}:
        raise TaskError(
            "privacy.epsilon has to name `moments`, and nothing else: what a "
            f"{task.privacy.unit} pays for its one release."
        )
    if task.privacy.uses != 1:
        raise TaskError(f"privacy.uses = {task.privacy.uses}: {name} takes each sample's moments once. Leave it out.")
    if task.stop.error is not None:
        raise TaskError("stop.error: nobody counts errors in this protocol. Stop by stop.steps.")


def moments_row(task: Task, settings: MapSettings, *, batch: int, positive: bool, promise: str) -> SkellamGram:
    """The moments of so many samples with the task's noise, on the finest useful grid: a share of it under masks, and
    all of it where a device's own moments leave."""
    privacy, masking = task.privacy, task.masking
    features, labels = map_length(settings, task.features.dimension), task.classes or 1
    if features > MOST_FEATURES:
        raise TaskError(
            f"protocol.map makes {features} features; {task.protocol['kind']} takes at most {MOST_FEATURES}."
        )
    samples = batch if privacy.unit == "device" else 1
    length = features * (features + 1) // 2 + features * labels
    honest, largest = (1, LARGEST_OWN) if masking is None else (masking.honest, LARGEST_SHARE)

    def share(clip: int) -> Fraction:
        l2 = samples * moments_move(clip, positive)
        return moments_variance(l2, l1_of(l2, length), privacy.epsilon["moments"], privacy.delta) / honest

    clip = _chosen_clip(task, FINEST_CLIP, lambda clip: share(clip) <= largest**2)
    adjacency = Adjacency.REPLACE_DEVICE if privacy.unit == "device" else Adjacency.REPLACE_SAMPLE
    seen = Observer.ANYONE if masking is None else Observer.AGGREGATE
    grid, covers = Grid(Fraction(1, clip)), Rows(0, batch)
    return SkellamGram(clip, features, labels, share(clip), honest, grid, covers, promise, positive, adjacency, seen)


def _chosen_clip(task: Task, finest: int, fits: Callable[[int], bool]) -> int:
    """How many grid steps a clip has: the most, by powers of two, whose noise `fits`, or what the task's grid says."""
    clip, grid = finest, task.privacy.grid
    while clip > 1 and not fits(clip):
        clip //= 2
    if grid is None:
        return clip
    wanted = 1 / grid
    if wanted.denominator != 1 or wanted.numerator & (wanted.numerator - 1) or wanted > clip:
        raise TaskError(
            f"privacy.grid = {float(grid):g}: a power of two from {1 / clip:g}, the finest for this noise, to 1."
        )
    return int(wanted)


FINEST_UNIT = 2**6
"""In grid steps: units of at most one on a finer grid gain nothing that the noise does not hide."""


def polynomial_row(task: Task, settings: MapSettings, *, batch: int, promise: str) -> PolynomialLaplace:
    """The coefficients of the loss of so many samples, perturbed, on the finest grid whose noise a device draws."""
    privacy, labels = task.privacy, task.classes or 1
    if settings.kind != "layers" or settings.constant:
        raise TaskError(
            'privacy.mechanism = "discrete-laplace": the functional mechanism takes public units between 0 and 1. Say '
            'protocol.map = { kind = "layers", seed = 1, features = 80, constant = 0.0 }.'
        )
    features, samples = map_length(settings, task.features.dimension), batch if privacy.unit == "device" else 1
    epsilon = privacy.epsilon["moments"]

    def fits(clip: int) -> bool:
        scale = samples * coefficients_move(clip, features, labels) / epsilon
        return scale <= WIDEST and 4 * batch * clip**2 + 45 * scale < 2**31

    if not fits(1):
        raise TaskError(
            f"privacy.epsilon.moments = {float(epsilon):g}: the coefficients of {features} units and {labels} outputs "
            f"would need noise of {float(samples * coefficients_move(1, features, labels) / epsilon):,.0f} steps of "
            f"the coarsest grid, and a device draws at most {WIDEST:,}. Take fewer units, or raise it."
        )
    clip = _chosen_clip(task, FINEST_UNIT, fits)
    adjacency = Adjacency.REPLACE_DEVICE if privacy.unit == "device" else Adjacency.REPLACE_SAMPLE
    grid, covers = Grid(Fraction(1, clip)), Rows(0, batch)
    return PolynomialLaplace(clip, features, labels, epsilon, grid, covers, promise, adjacency)


@struct
class Learned:
    """Server state: what all rounds so far came to, and the weights that it gave."""

    moments: Integers  # int64
    devices: Integers
    rounds: Integers
    weights: Array


@record(eq=False)
class Solver:
    """The handlers of a protocol whose devices give second moments once, and whose server solves for the weights."""

    plan: Callable[[Task], Regression[Any]]
    fitted: Callable[[Array, Integers], Any]
    """The publication: weights for the task's features, and how many rounds made them (none at first)."""

    def contribute(self, task: Task, batch: Private[Samples], published: Any) -> Mapping[str, Private[Any]]:
        """The moments of the batch, before their noise, once. What was published before is not looked at."""
        fixed = self.plan(task)
        return {"moments": batch.map(lambda samples: moment_rows(fixed, samples))}

    def publish_initial(self, task: Task, ctx: Context) -> Step[Learned]:
        """Everybody begins with the same weights, zeros, and with the same public features."""
        row = self.plan(task).mechanism
        weights, none = np.zeros((row.features, row.labels), np.float32), np.int32(0)
        state = Learned(np.zeros(row.length, np.int64), none, none, weights)
        return Step(state, (Publish(self.fitted(weights, none)),))

    def fit(self, task: Task, state: Learned, total: Any, ctx: Context) -> Step[Learned]:
        """Add the moments of a cohort, or of a round that a rule combined, to those before, and solve."""
        fixed, by = self.plan(task), combining(task)
        moments = state.moments + np.asarray(total.moments.value, np.int64)
        devices, rounds = np.int32(state.devices + total.devices), np.int32(state.rounds + 1)
        each = 1 if task.masking is None else task.masking.cohort
        inflation = 1.0 if by is None else by.inflation(by.came(int(devices), int(rounds), each))
        weights = solve_moments(fixed, moments, int(devices) * inflation).astype(np.float32)
        after = Learned(moments, devices, rounds, weights)
        heard = ("cohort", "been added up") if by is None else ("round", "been closed")
        stops = stop_after(task.stop.steps, rounds, *heard)
        return Step(after, (Publish(self.fitted(weights, rounds)), *stops))

    def try_alone(self, task: Task, state: Learned, upload: Any, ctx: Context) -> Step[Learned]:
        """The model of one upload by itself, which the server rates: what its device would have learnt of it."""
        moments = np.asarray(upload.moments.value, np.int64)
        weights = solve_moments(self.plan(task), moments, int(upload.devices)).astype(np.float32)
        return Step(Learned(moments, state.devices, state.rounds, weights))

    def take_group(self, task: Task, uploads: Any, rows: Samples) -> Array:
        """[M]: which uploads of a round the rule "grouping" takes, on public rows of the server's."""
        return group_uploads(self.plan(task), uploads, rows)

    def predict(self, task: Task, weights: Array, x: Array) -> Array:
        return predictions(self.plan(task), weights, x)

    def scores(self, task: Task, weights: Array, x: Array) -> Array:
        return scores(self.plan(task), weights, x)


VISIBLE = 15.0
"""A lie of an upload's own size shows from so many standard deviations of its noise times the root of the classes on.
On digits drawn by code, a majority of 60 % that flips or rolls its labels is left out at 17 of 10 classes and at 16 of
3, among 20, 40 and 100 uploads, and wins at 9 of 10 classes."""


def seen_from(row: SkellamGram, devices: int) -> float:
    """How many samples an upload of so many devices must sum, for a lie about all of them to stand out of its noise."""
    return VISIBLE * math.sqrt(row.labels * devices * float(row.variance)) / row.clip**2


def remark_on_noise(task: Task, row: SkellamGram) -> tuple[str, ...]:
    """For whoever is about to start a task with the rule "grouping": whether the noise of an upload hides a lie."""
    devices, each = (1, "upload") if task.masking is None else (task.masking.cohort, "cohort")
    samples, least = row.covers.size * devices, seen_from(row, devices)
    if samples >= least:
        return (
            f"The noise of one {each} hides no lie about all of its samples: {each}s of such liars are left out, even "
            "where they are the most. A lie about a small part of them may stay.",
        )
    if task.privacy.unit == "device":
        way = f"An epsilon about {least / samples:.2g} times as large would be enough"
    else:
        enough, times = math.ceil(least / devices), least / samples
        way = f"{enough:,} samples of each device would be enough, or an epsilon about {times:.2g} times as large"
    return (
        f"The noise of one {each} hides a lie about all of its samples: it sums {samples:,}, and the rule sees lies "
        f"from {math.ceil(least):,} on. Liars that are the most can win here, and fewer can do harm. {way}.",
    )


def root_of(fixed: Regression[Any], rows: Samples) -> Root:
    """Public rows as a rule looks at them: as a device's mechanism would round them. Where features are pictures,
    models are tried on variations of them, too (`features/pictures.py`)."""

    def made(x: Array, y: Array) -> tuple[Array, Array]:
        row, pairs = fixed.mechanism, moment_rows(fixed, Samples(x, y))
        h, labels = pairs[:, : row.features], pairs[:, row.features :]
        return row.steps(h) / row.clip, row.steps(labels) / row.clip

    x, y = np.asarray(rows.x), np.asarray(rows.y)
    more = None
    if fixed.map_settings.kind == "convolution" and fixed.classes is not None:
        bent, times = variations(x)
        more = made(bent, np.tile(y, times)) if times else None
    return Root(*made(x, y), fixed.classes is not None, fixed.has_constant, more)


def group_uploads(fixed: Regression[Any], uploads: Any, rows: Samples) -> Array:
    """[M]: 1 for each upload of a round that the rule "grouping" takes, on public root rows (`crowdml.rooted`); minus
    the number of the reason (`rooted.REASONS`) for each that it leaves out.

    None is taken where none passes the tests: the round then adds nothing.
    """
    row, devices = fixed.mechanism, np.asarray(uploads.devices, np.float64)
    deviation = np.sqrt(devices * float(row.variance)) / row.clip**2
    moments, first = np.empty((uploads.count, row.length)), 0
    for some in uploads.blocks("moments"):
        np.divide(some, row.clip**2, out=moments[first : first + len(some)])
        first += len(some)
    found = choose_group(moments, devices * row.covers.size, deviation, root_of(fixed, rows), fixed.c)
    return np.where(found.weights > 0, 1.0, -found.reasons.astype(np.float64))
