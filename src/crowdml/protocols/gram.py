"""Gram: one masked release of second moments, and any linear model for free. Our own protocol.

Each device sums, over a public number of its samples, the products of public features (`features/maps.py`) with each
other and with the label, in integers, and gives that sum once, under masks, with its share of the noise. The server
learns the crowd's noisy moments (G, B) and nothing else. Whatever it solves for, with whatever ridge and however often,
is post-processing: it costs no more. Privacy review, section 4, SP-A; R8 to R11.

Why it is as it is:
- One release a sample: no rounds to compose, no step size to tune, no gradient that must be clipped.
- One cohort of everybody. K cohorts cost sqrt(K) in noise, as each sum must have all of the noise (`price_of_cohorts`),
  so a task is one slow round with a window of hours, and devices that return go on where they were.
- Where some devices lie, `combine` gathers the sums of several small cohorts, and a robust rule makes one of them.
- Samples become integers first and are multiplied afterwards (R8), so the sensitivity, sqrt(4.5) clips squared, holds
  for what is sent. Off the diagonal the noise has half the variance: each such product stands for two entries of G.
- The ridge follows from the noise by a public rule, and the eigenvalues of G are treated with the known noise
  (`models/ridge.py`): nothing is tuned on samples (R4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, finite_or_zero, struct
from crowdml.channels import combining, contribution, heard_by
from crowdml.errors import TaskError
from crowdml.features.maps import FeatureMap, MapSettings, make_map, map_length
from crowdml.messages import Public, message
from crowdml.models.ridge import RULE, solve_each
from crowdml.privacy.grid import Grid
from crowdml.privacy.mechanisms import Mechanism, l1_of
from crowdml.privacy.moments import SkellamGram, moments_move, moments_variance, split
from crowdml.privacy.private import Private, Release, Rows
from crowdml.privacy.sensitivity import Adjacency
from crowdml.protocol import Context, Protocol, Publish, Role, Step, Tally, device_role, stop_after
from crowdml.robust import Combine
from crowdml.settings import Between, read_kind
from crowdml.shape import Shape, short
from crowdml.task import Task

FINEST_CLIP = 2**9
"""In grid steps: features of norm one on a finer grid gain nothing that the noise does not hide."""
LARGEST_SHARE = 2**16
"""In grid steps: the standard deviation of a device's share of the noise, which it draws in up to 4 parts."""
MOST_FEATURES = 4096


@dataclass(frozen=True)
class Settings:
    """The `[protocol]` table of a task."""

    batch: Annotated[int, Between(1, 100_000)]
    """m: the samples that a device gives, all in one release."""
    map: MapSettings = field(default_factory=MapSettings)
    positive: bool = False
    """Features and labels below zero count as zero: the sensitivity is then 2 instead of sqrt(4.5)."""
    combine: Combine | None = None
    """A robust rule for rounds of several cohorts' sums."""
    kind: str = "gram"


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
    settings = read_kind(Settings, task.protocol, "protocol")
    model = {key: value for key, value in task.model.items() if key != "kind"}
    if task.model["kind"] != "ridge":
        raise TaskError(f'model.kind = {task.model["kind"]!r}: gram solves for "ridge", and nothing else.')
    c = model.pop("c", Fraction(RULE))
    if not isinstance(c, (int, Fraction)) or isinstance(c, bool) or not 0 < c <= 1000:
        raise TaskError(f"model.c = {c!r}: a number above 0, up to 1000; the ridge is c sigma sqrt(features).")
    for name in model:
        raise TaskError(f"model.{name}: the ridge model has c, and no such setting.")
    if task.privacy.mechanism == "none":
        raise TaskError(
            'privacy.mechanism = "none": gram always adds noise. Give an epsilon, or take another protocol.'
        )
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
        l2 = samples * moments_move(clip, settings.positive)
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


@contribution(None, masked="gram/masked/1", total="gram/total/1")
class Moments:
    """A device's one check-in: its second moments with its share of the noise, under masks."""

    moments: Release[Integers]


# --- the device ---


def contribute(task: Task, batch: Private[Samples], fitted: Fitted) -> Mapping[str, Private[Any]]:
    """The moments of the batch, before their noise, once. What was published before is not looked at."""
    fixed = plan(task)
    return {"moments": batch.map(lambda samples: rows(fixed, samples))}


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
    scaled = finite_or_zero(y).astype(np.float64) / fixed.label_bound
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


def fit(task: Task, state: Learned, total: Any, ctx: Context) -> Step[Learned]:
    """Add the moments of a cohort, or of a round that a rule combined, to those before, and solve."""
    fixed, by = plan(task), combining(task)
    moments = state.moments + np.asarray(total.moments.value, np.int64)
    devices, rounds = np.int32(state.devices + total.devices), np.int32(state.rounds + 1)
    shares = int(devices) if by is None else int(devices) * by.inflation(by.uploads)
    weights = solve_moments(fixed, moments, shares).astype(np.float32)
    after = Learned(moments, devices, rounds, weights)
    heard = ("cohort", "been added up") if by is None else ("round", "been closed")
    stops = stop_after(task.stop.steps, rounds, *heard)
    return Step(after, (Publish(Fitted(weights, rounds)), *stops))


def solve_moments(fixed: Plan, moments: Integers, shares: float) -> Array:
    """Weights [features, labels] from summed moments that hold `shares` shares of noise, by the public rule."""
    return solve_by_rules(fixed, moments, shares, (fixed.c,))[0]


def solve_by_rules(fixed: Plan, moments: Integers, shares: float, rules: Sequence[float]) -> list[Array]:
    """The weights that each c in `rules` gives for the same summed moments."""
    row = fixed.mechanism
    gram, cross = split(moments, row.features, row.labels)
    unit = row.clip**2  # of a product, in squared grid steps
    return solve_each(gram / unit, cross / unit, math.sqrt(shares * row.variance) / unit, rules)


def scores(task: Task, weights: Array, x: Array) -> Array:
    """x [n, dimension] -> a score for each class [n, c], or numbers [n]."""
    fixed = plan(task)
    found = np.asarray(fixed.map(x), np.float64) @ np.asarray(weights, np.float64)
    return found if fixed.classes is not None else found[:, 0] * fixed.label_bound


def predictions(task: Task, weights: Array, x: Array) -> Array:
    """x [n, dimension] -> [n]: class indices (the lowest of equals), or numbers."""
    found = scores(task, weights, x)
    return found if task.classes is None else found.argmax(axis=1).astype(np.int32)


def fits(shape: Shape, masked: bool) -> str | None:
    """It has a masked form alone."""
    return None if masked else "gram lets a sum over a crowd out and no device's own moments: it needs masks."


def advise(task: Task, shape: Shape | None) -> Task:
    """The task with a large constant and a strong ridge where labels are numbers: their mean may be far from zero."""
    if shape is None or shape.classes is not None or "map" in task.protocol:
        return task
    constant = {"kind": "identity", "constant": short(shape.rules.constant_of_numbers)}
    model = {"c": short(shape.rules.ridge_of_numbers), **task.model}
    return task.with_(model=model, protocol={**task.protocol, "map": constant})


device = device_role(Moments, Fitted, contribute)
server = Role(start=publish_initial, on=heard_by(Moments, fit))
protocol = Protocol(
    "gram",
    device,
    server,
    mechanisms,
    model=lambda task, state: state.weights,
    shapes=lambda task: {},  # nothing leaves but under masks
    progress=lambda task, state: Tally(int(state.devices)),
    contribution=Moments,
    predict=predictions,
    scores=scores,
    remarks=remarks,
    traced=False,  # moments are multiplied in 64 bits, and maps are NumPy's
    settings=Settings,
    fits=fits,
    advise=advise,
    usual_model=lambda shape: "ridge",
)
