"""Gram: one masked release of second moments, and any linear model for free. Our own protocol.

Each device sums, over a public number of its samples, the products of public features (`features/maps.py`) with each
other and with the label, in integers, and gives that sum once, under masks, with its share of the noise. The server
learns the crowd's noisy moments (G, B) and nothing else. Whatever it solves for, with whatever ridge and however often,
is post-processing: it costs no more. Privacy review, section 4, SP-A; R8 to R11.

Why it is as it is:
- One release a sample: no rounds to compose, no step size to tune, no gradient that must be clipped.
- One cohort of everybody. K cohorts cost sqrt(K) in noise, as each sum must have all of the noise (`price_of_cohorts`),
  so a task is one slow round with a window of hours, and devices that return go on where they were.
- Samples become integers first and are multiplied afterwards (R8), so the sensitivity, sqrt(4.5) clips squared, holds
  for what is sent. Off the diagonal the noise has half the variance: each such product stands for two entries of G.
- The ridge follows from the noise by a public rule, and the eigenvalues of G are treated with the known noise
  (`models/ridge.py`): nothing is tuned on samples (R4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, struct
from crowdml.errors import TaskError
from crowdml.features.maps import FeatureMap, MapSettings, make_map
from crowdml.messages import SERVER, Public, message
from crowdml.models.ridge import RULE, predict, solve
from crowdml.privacy.grid import Grid
from crowdml.privacy.mechanisms import Mechanism, l1_of
from crowdml.privacy.moments import SkellamGram, moments_variance, reach, split
from crowdml.privacy.private import Masked, Private, Release, Rows
from crowdml.privacy.sensitivity import Adjacency
from crowdml.protocol import (
    Context,
    Field,
    Protocol,
    Publish,
    Role,
    Send,
    Sensed,
    Step,
    Stop,
    Tally,
    check_out,
    total_fields,
    wait,
)
from crowdml.protocols.parts import so_many
from crowdml.task import Task, between, read_section

FINEST_CLIP = 2**9
"""In grid steps: features of norm one on a finer grid gain nothing that the noise does not hide."""
LARGEST_SHARE = 2**16
"""In grid steps: the standard deviation of a device's share of the noise, which it draws in up to 4 parts."""
MOST_FEATURES = 4096


@dataclass(frozen=True)
class Settings:
    """The `[protocol]` table of a task."""

    batch: int
    """m: the samples that a device gives, all in one release."""
    map: MapSettings = field(default_factory=MapSettings)
    positive: bool = False
    """Features and labels below zero count as zero: the sensitivity is then 2 instead of sqrt(4.5)."""
    kind: str = "gram"

    def __post_init__(self) -> None:
        between("protocol.batch", self.batch, 1, 100_000)


@dataclass(frozen=True)
class Plan:
    """What a task fixes once and for all: read by handlers, never written. The map is made when it is first used."""

    settings: Settings
    mechanism: SkellamGram
    dimension: int
    classes: int | None
    label_bound: float
    c: float

    @property
    def map(self) -> FeatureMap:
        return make_map(self.settings.map, self.dimension)


@lru_cache(maxsize=256)
def plan(task: Task) -> Plan:
    """Read the task; refuse what this protocol cannot run."""
    settings = read_section(Settings, task.protocol, "protocol")
    model = {key: value for key, value in task.model.items() if key != "kind"}
    if task.model["kind"] != "ridge":
        raise TaskError(f'model.kind = {task.model["kind"]!r}: gram solves for "ridge", and nothing else.')
    c = model.pop("c", Fraction(RULE))
    if not isinstance(c, (int, Fraction)) or isinstance(c, bool) or not 0 < c <= 1000:
        raise TaskError(f"model.c = {c!r}: a number above 0, up to 1000; the ridge is c sigma sqrt(features).")
    for name in model:
        raise TaskError(f"model.{name}: the ridge model has c, and no such setting.")
    if task.masking is None or task.privacy.mechanism != "skellam":
        raise TaskError(
            'protocol.kind = "gram" lets a sum over a crowd out and no device\'s own moments: it needs [masking] and '
            'privacy.mechanism = "skellam".'
        )
    if set(task.privacy.epsilon) != {"moments"}:
        raise TaskError(
            "privacy.epsilon has to name `moments`, and nothing else: what a "
            f"{task.privacy.unit} pays for its one release."
        )
    if task.privacy.uses != 1:
        raise TaskError(f"privacy.uses = {task.privacy.uses}: gram takes each sample's moments once. Leave it out.")
    if task.stop.error is not None:
        raise TaskError("stop.error: nobody counts errors in this protocol. Stop by stop.steps.")
    mechanism = _mechanism(task, settings)
    bound = float(task.labels.bound)
    return Plan(settings, mechanism, task.features.dimension, task.classes, bound, float(c))


def _mechanism(task: Task, settings: Settings) -> SkellamGram:
    privacy, masking = task.privacy, task.masking
    assert masking is not None
    features, labels = map_length(settings.map, task.features.dimension), task.classes or 1
    if features > MOST_FEATURES:
        raise TaskError(f"protocol.map makes {features} features; gram takes at most {MOST_FEATURES}.")
    samples = settings.batch if privacy.unit == "device" else 1
    length = features * (features + 1) // 2 + features * labels

    def share(clip: int) -> Fraction:
        l2 = samples * reach(clip, settings.positive)
        return moments_variance(l2, l1_of(l2, length), privacy.epsilon["moments"], privacy.delta) / masking.honest

    clip = FINEST_CLIP
    while clip > 1 and share(clip) > LARGEST_SHARE**2:
        clip //= 2
    if privacy.grid is not None:
        wanted = 1 / privacy.grid
        if wanted.denominator != 1 or wanted.numerator & (wanted.numerator - 1) or wanted > clip:
            raise TaskError(
                f"privacy.grid = {float(privacy.grid):g}: a power of two from {1 / clip:g}, the finest for this noise, "
                "to 1."
            )
        clip = int(wanted)
    return SkellamGram(
        clip,
        features,
        labels,
        share(clip),
        masking.honest,
        Grid(Fraction(1, clip)),
        Rows(0, settings.batch),
        "how features and labels go together, summed over a crowd and blurred with noise",
        settings.positive,
        Adjacency.REPLACE_DEVICE if privacy.unit == "device" else Adjacency.REPLACE_SAMPLE,
    )


def map_length(settings: MapSettings, dimension: int) -> int:
    """How many features a map gives, without making it: a price is asked for more often than a feature."""
    extra = 1 if settings.constant else 0
    if settings.kind == "identity":
        return dimension + extra
    if settings.kind == "cosine":
        return settings.features + extra
    side = math.isqrt(dimension)
    places = (side - settings.size + 1) // settings.pool if side * side == dimension else 0
    length = 2 * settings.filters * max(places, 0) ** 2
    if places < 1 or settings.keep > length:
        make_map(settings, dimension)  # says why not
    return (settings.keep or length) + extra


def mechanisms(task: Task) -> Mapping[str, Mechanism]:
    """Everything that may leave, and at what price: one row."""
    return {"moments": plan(task).mechanism}


def price_of_cohorts(cohorts: int) -> float:
    """How much more noise the moments of a crowd have when it is summed in so many cohorts instead of one."""
    return math.sqrt(cohorts)


def remarks(task: Task) -> tuple[str, ...]:
    """What a cohort that is not everybody would cost, and how large a message is."""
    row, masking = plan(task).mechanism, task.masking
    assert masking is not None
    spare = math.sqrt(masking.cohort / masking.honest)
    return (
        f"One cohort of everybody: K separate sums have sqrt(K) times the noise, {price_of_cohorts(4):g} times for 4 "
        f"cohorts and {price_of_cohorts(100):g} times for 100.",
        f"Noise for {masking.honest} honest devices of {masking.cohort} costs {spare:.2f} times what all of them would "
        f"need; a device sends {row.length:,} numbers once.",
    )


# --- what travels ---


@message("gram/model/1")
class Fitted:
    """The publication: weights for the task's features, and how many cohorts made them (none at first)."""

    weights: Public[Array]
    version: Public[Integers]


@message("gram/masked/1")
class Moments:
    """A device's one check-in: its second moments with its share of the noise, under masks."""

    moments: Masked[Integers]


@message("gram/total/1")
class MomentsTotal:
    """What the server hears: the moments of a cohort's survivors, summed."""

    moments: Release[Integers]
    devices: Public[Integers]
    version: Public[Integers]


# --- the device ---


def contribute(task: Task, waiting: Private[Samples] | None, fitted: Fitted, ctx: Context) -> Step[Any]:
    """Give the moments of the batch, once. What was published before is not looked at."""
    if waiting is None:  # a late or repeated answer
        return Step(None)
    fixed = plan(task)
    moments = ctx.masked("moments", waiting.map(lambda batch: rows(fixed, batch)))
    return Step(None, (Send(SERVER, Moments(moments)),))


def rows(fixed: Plan, batch: Samples) -> Array:
    """One row a sample, [b, features + labels]: what the mechanism clips, truncates and multiplies."""
    try:
        x, y = np.asarray(batch.x), np.asarray(batch.y)
    except TypeError:  # a tracer has no values
        raise TaskError(
            'protocol.kind = "gram" is not compiled: its integers need 64 bits and its maps are NumPy\'s. '
            "`crowdml simulate` runs it device after device."
        ) from None
    return np.concatenate([fixed.map(x), label_rows(fixed, y)], axis=1)


def label_rows(fixed: Plan, y: Array) -> Array:
    """Labels [b] as rows of norm at most one: a 1 in the place of the class, or a number over its bound.

    A label out of the public range counts as none: a row of zeros.
    """
    if fixed.classes is not None:
        return (y[:, None] == np.arange(fixed.classes)).astype(np.float32)
    scaled = np.where(np.isfinite(y), y, 0.0).astype(np.float64) / fixed.label_bound
    return np.where(np.abs(scaled) <= 1, scaled, 0.0)[:, None].astype(np.float32)


# --- the server ---


@struct
class Learned:
    """Server state: the moments of all cohorts so far, and the weights that they gave."""

    moments: Integers  # int64
    devices: Integers
    rounds: Integers
    weights: Array


def publish_initial(task: Task, ctx: Context) -> Step[Learned]:
    row = plan(task).mechanism
    weights, none = np.zeros((row.features, row.labels), np.float32), np.int32(0)
    state = Learned(np.zeros(row.length, np.int64), none, none, weights)
    return Step(state, (Publish(Fitted(weights, none)),))


def fit(task: Task, state: Learned, total: MomentsTotal, ctx: Context) -> Step[Learned]:
    """Add a cohort's moments to those of the cohorts before, and solve."""
    fixed = plan(task)
    moments = state.moments + np.asarray(total.moments.value, np.int64)
    devices, rounds = np.int32(state.devices + total.devices), np.int32(state.rounds + 1)
    weights = solve_moments(fixed, moments, int(devices)).astype(np.float32)
    after = Learned(moments, devices, rounds, weights)
    stops: tuple[Stop, ...] = ()
    if task.stop.steps is not None:
        stops = (Stop(so_many(task.stop.steps, "cohort", "been added up"), rounds >= task.stop.steps),)
    return Step(after, (Publish(Fitted(weights, rounds)), *stops))


def solve_moments(fixed: Plan, moments: Integers, shares: int) -> Array:
    """Weights [features, labels] from summed moments that hold `shares` shares of noise, by the public rule."""
    row = fixed.mechanism
    gram, cross = split(moments, row.features, row.labels)
    unit = row.clip**2  # of a product, in squared grid steps
    return solve(gram / unit, cross / unit, math.sqrt(shares * row.variance) / unit, fixed.c)


def predictions(task: Task, weights: Array, x: Array) -> Array:
    """x [n, dimension] -> [n]: class indices, or numbers within the label's bound times what the model says."""
    fixed = plan(task)
    found = predict(weights, fixed.map(x), fixed.classes)
    return found if fixed.classes is not None else found * fixed.label_bound


def settle(task: Task) -> Task:
    """The task with its grid written in, so that no other implementation has to make the same choice."""
    if task.privacy.grid is not None:
        return task
    return task.with_(privacy=replace(task.privacy, grid=plan(task).mechanism.grid.step))


def expected(task: Task) -> Mapping[str, Mapping[str, Field]]:
    """What a total may hold: an honest sum leaves its bound by six standard deviations once in 10^9 entries."""
    fields = {"version": Field("<i4", (), 0, 2**31 - 1)}
    return {"gram/total/1": {**fields, **total_fields(mechanisms(task), task)}}


device = Role(start=wait, on={Sensed: check_out, Fitted: contribute})
server = Role(start=publish_initial, on={MomentsTotal: fit})
protocol = Protocol(
    "gram",
    device,
    server,
    mechanisms,
    check=plan,
    batch=lambda task: plan(task).settings.batch,
    model=lambda task, state: state.weights,
    settle=settle,
    expected=expected,
    progress=lambda task, state: Tally(int(state.devices)),
    masked=(Moments, MomentsTotal),
    remarks=remarks,
)
