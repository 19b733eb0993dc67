"""SecProbe: rounds of uploads, of which the server takes those that do well on rows of its own.

Zhao et al., IEEE TDSC 2020, Algorithms 1 to 3, in the forms that have a guarantee (privacy review, section 4). A device
releases once, of public features and labels, the noisy second moments (SP-A) or the noisy coefficients of its loss
(SP-C, the functional mechanism, where `privacy.mechanism = "discrete-laplace"`). Whoever has them solves for weights as
often as they like, which is post-processing: that is all of the paper's local training. The server gathers M uploads,
combines them by the rule of `protocol.combine`, adds what comes of it to the rounds before, and publishes the weights
that all of it gives. With `rule = "exponential"` it rates each upload on private rows of its own and draws K of M by
the exponential mechanism, through its own door: charged to these rows, journalled, and not drawn again in a replay.

Where we differ, and why:
- Hidden layers are fixed and public (`protocol.map`). Trained on the perturbed loss, as published, they leak x (Z1).
- Noise is drawn once for all samples of a batch, and each sample is in one. Published budgets are per epoch (Z3).
- The exponential mechanism hides a row of the server's, at 1/d: uploads are releases, so it costs no sample anything,
  and it hides no participant's quality, which the average shows anyway (Z7, Z8). `top` on public rows needs no noise.
- A device leaves when it likes, and not when its own error is small: the number of its messages would tell (R3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, struct
from crowdml.channels import contribution, heard_by
from crowdml.errors import TaskError
from crowdml.features.maps import MapSettings
from crowdml.messages import Public, message
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.private import Private, Release
from crowdml.protocol import Context, Protocol, Publish, Role, Step, Tally, device_role, stop_after
from crowdml.robust import Combine
from crowdml.second_moments import (
    Regression,
    check_prices,
    group_uploads,
    moment_rows,
    moments_row,
    polynomial_row,
    predictions,
    read_ridge,
    scores,
    solve_moments,
)
from crowdml.settings import Between, read_kind
from crowdml.shape import Shape
from crowdml.task import Task


@dataclass(frozen=True)
class Settings:
    """The `[protocol]` table of a task."""

    batch: Annotated[int, Between(1, 100_000)]
    """The samples that a device gives, all in one release."""
    combine: Combine
    """How a round of uploads becomes one: "exponential", "top", or a robust rule."""
    map: MapSettings = field(default_factory=MapSettings)
    positive: bool = False
    """Features and labels below zero count as zero: the sensitivity is then 2 instead of sqrt(4.5)."""
    kind: str = "secprobe"


@dataclass(frozen=True)
class Plan:
    """What a task fixes once and for all: read by handlers, never written."""

    settings: Settings
    regression: Regression[Any]

    @property
    def mechanism(self) -> Any:
        return self.regression.mechanism


@lru_cache(maxsize=256)
def plan(task: Task) -> Plan:
    """Read the task; refuse what this protocol cannot run."""
    settings = read_kind(Settings, task.protocol, "protocol")
    c = read_ridge(task)
    if task.masking is not None:
        raise TaskError(
            '[masking] with protocol.kind = "secprobe": its server rates the upload of each device, and under masks it '
            'would hear sums alone. Leave [masking] out, or take protocol.kind = "gram".'
        )
    check_prices(task)
    said = "how features and labels go together here, blurred with noise"
    if task.privacy.mechanism == "skellam":
        row = moments_row(task, settings.map, batch=settings.batch, positive=settings.positive, promise=said)
    elif task.privacy.mechanism == "discrete-laplace":
        if settings.positive:
            raise TaskError("protocol.positive is for moments with Skellam noise: units lie in [0, 1]. Leave it out.")
        row = polynomial_row(task, settings.map, batch=settings.batch, promise=said)
    else:
        raise TaskError(
            f'privacy.mechanism = "{task.privacy.mechanism}": secprobe adds all of the noise to a device\'s own '
            'moments, which is "skellam", or to the coefficients of its loss, which is "discrete-laplace".'
        )
    regression = Regression(settings.map, row, task.features.dimension, task.classes, float(task.labels.bound), c)
    return Plan(settings, regression)


def mechanisms(task: Task) -> Mapping[str, Mechanism]:
    """Everything that may leave a device, and at what price: one row."""
    return {"moments": plan(task).mechanism}


# --- what travels ---


@message("secprobe/model/1")
class Fitted:
    """The publication: weights for the task's features, and how many rounds made them (none at first)."""

    weights: Public[Array]
    version: Public[Integers]


@contribution("secprobe/moments/1", masked="secprobe/masked/1", total="secprobe/total/1")
class Moments:
    """A device's upload: the second moments of a batch with all of their noise."""

    moments: Release[Integers]
    version: Public[Integers]


# --- the device ---


def contribute(task: Task, batch: Private[Any], fitted: Fitted) -> Mapping[str, Private[Any]]:
    """The moments of the batch, before their noise, once. What was published before is not looked at."""
    fixed = plan(task).regression
    return {"moments": batch.map(lambda samples: moment_rows(fixed, samples))}


# --- the server ---


@struct
class Learned:
    """Server state: what all rounds so far came to, and the weights that it gave."""

    moments: Integers  # int64
    devices: Integers
    rounds: Integers
    weights: Array


def publish_initial(task: Task, ctx: Context) -> Step[Learned]:
    """Everybody begins with the same weights, zeros, and with the same public features."""
    row = plan(task).mechanism
    weights, none = np.zeros((row.features, row.labels), np.float32), np.int32(0)
    return Step(Learned(np.zeros(row.length, np.int64), none, none, weights), (Publish(Fitted(weights, none)),))


def fit(task: Task, state: Learned, total: Any, ctx: Context) -> Step[Learned]:
    """Add what a rule made of a round to those before, and solve."""
    fixed, by = plan(task).regression, plan(task).settings.combine
    moments = state.moments + np.asarray(total.moments.value, np.int64)
    devices, rounds = np.int32(state.devices + total.devices), np.int32(state.rounds + 1)
    shares = int(devices) * by.inflation(by.came(int(devices), int(rounds), 1))
    weights = solve_moments(fixed, moments, shares).astype(np.float32)
    stops = stop_after(task.stop.steps, rounds, "round", "been closed")
    return Step(Learned(moments, devices, rounds, weights), (Publish(Fitted(weights, rounds)), *stops))


def try_alone(task: Task, state: Learned, upload: Any, ctx: Context) -> Step[Learned]:
    """The model of one upload by itself, which the server rates: what its device would have learnt of it."""
    moments = np.asarray(upload.moments.value, np.int64)
    weights = solve_moments(plan(task).regression, moments, int(upload.devices)).astype(np.float32)
    return Step(Learned(moments, state.devices, state.rounds, weights))


def take_group(task: Task, uploads: Any, rows: Samples) -> Array:
    """[M]: which uploads of a round the rule "grouping" takes, on public rows of the server's."""
    return group_uploads(plan(task).regression, uploads, rows)


def fits(shape: Shape, masked: bool) -> str | None:
    """It has no masked form, and nobody chooses a rule in a task's place."""
    if masked:
        return "secprobe rates the upload of each device, and under masks there is none."
    return "secprobe asks for a rule, protocol.combine, which a task has to choose."


device = device_role(Moments, Fitted, contribute)
server = Role(start=publish_initial, on=heard_by(Moments, fit, tried=try_alone, grouped=take_group))
protocol = Protocol(
    "secprobe",
    device,
    server,
    mechanisms,
    model=lambda task, state: state.weights,
    shapes=lambda task: {"moments": (plan(task).mechanism.length,)},
    progress=lambda task, state: Tally(int(state.devices)),
    contribution=Moments,
    predict=lambda task, weights, x: predictions(plan(task).regression, weights, x),
    scores=lambda task, weights, x: scores(plan(task).regression, weights, x),
    traced=False,  # moments are multiplied in 64 bits, and maps are NumPy's
    settings=Settings,
    fits=fits,
    usual_model=lambda shape: "ridge",
)
