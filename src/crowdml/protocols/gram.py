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
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, struct
from crowdml.channels import combining, contribution, heard_by
from crowdml.errors import TaskError
from crowdml.features.maps import MapSettings
from crowdml.messages import Public, message
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.moments import SkellamGram
from crowdml.privacy.private import Private, Release
from crowdml.protocol import Context, Protocol, Publish, Role, Step, Tally, device_role, stop_after
from crowdml.robust import Combine
from crowdml.second_moments import (
    Regression,
    check_prices,
    group_uploads,
    moment_rows,
    moments_row,
    predictions,
    read_ridge,
    scores,
    solve_moments,
)
from crowdml.settings import Between, read_kind
from crowdml.shape import Shape, short
from crowdml.task import Task


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


@lru_cache(maxsize=256)
def plan(task: Task) -> Regression[SkellamGram]:
    """Read the task; refuse what this protocol cannot run."""
    settings = read_kind(Settings, task.protocol, "protocol")
    c = read_ridge(task)
    if task.masking is None or task.privacy.mechanism != "skellam":
        raise TaskError(
            'protocol.kind = "gram" lets a sum over a crowd out and no device\'s own moments: it needs [masking] and '
            'privacy.mechanism = "skellam".'
        )
    check_prices(task)
    said = "how features and labels go together, summed over a crowd and blurred with noise"
    row = moments_row(task, settings.map, batch=settings.batch, positive=settings.positive, promise=said)
    return Regression(settings.map, row, task.features.dimension, task.classes, float(task.labels.bound), c)


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
    return {"moments": batch.map(lambda samples: moment_rows(fixed, samples))}


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
    assert task.masking is not None
    shares = (
        int(devices)
        if by is None
        else int(devices) * by.inflation(by.came(int(devices), int(rounds), task.masking.cohort))
    )
    weights = solve_moments(fixed, moments, shares).astype(np.float32)
    after = Learned(moments, devices, rounds, weights)
    heard = ("cohort", "been added up") if by is None else ("round", "been closed")
    stops = stop_after(task.stop.steps, rounds, *heard)
    return Step(after, (Publish(Fitted(weights, rounds)), *stops))


def take_group(task: Task, uploads: Any, rows: Samples) -> Array:
    """[M]: which uploads of a round the rule "grouping" takes, on public rows of the server's."""
    return group_uploads(plan(task), uploads, rows)


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
server = Role(start=publish_initial, on=heard_by(Moments, fit, grouped=take_group))
protocol = Protocol(
    "gram",
    device,
    server,
    mechanisms,
    model=lambda task, state: state.weights,
    shapes=lambda task: {},  # nothing leaves but under masks
    progress=lambda task, state: Tally(int(state.devices)),
    contribution=Moments,
    predict=lambda task, weights, x: predictions(plan(task), weights, x),
    scores=lambda task, weights, x: scores(plan(task), weights, x),
    remarks=remarks,
    traced=False,  # moments are multiplied in 64 bits, and maps are NumPy's
    settings=Settings,
    fits=fits,
    advise=advise,
    usual_model=lambda shape: "ridge",
)
