"""Crowd-ML: asynchronous SGD with locally private gradients.

Hamm et al., ICDCS 2015, Algorithms 1 and 2. A sample serves one check-in and is dropped, so a sample loses what its own
check-in costs (parallel composition, Appendix A). Privacy review, section 2.

Where we differ, and why:
- l2 geometry and discrete Gaussian noise by default; l1 and discrete Laplace, the paper's (10), by a word in the task.
- The sample count n_s is not sent: a check-in always uses `batch` samples, so the count is public (H4).
- Sums on a grid travel, not averages of floats (R5, R8); the server divides by the public batch size.
- lambda * w is public, so the server adds it. A convex model starts from zero weights, not from random ones; a
  perceptron, from the public ones of its seed, and each of its gradients is held to `protocol.clip`.
- The counts take the noise they need: the error count has sensitivity 1, and all label counts together 2 (H5). The
  paper's exponents epsilon/2 come with `as_published`, where each label is also charged on its own.
- With `[masking]` the same sums leave under masks, each device with a share of the noise: the server hears a cohort's
  total and makes one step of it. Five passes are charged as five (`privacy.uses`).
- A held-out share (Remark 2) is the first rows of the batch, chosen before any sample is seen; a sample then pays for
  the gradient or for the error count, not for both; every sample pays for the labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, namespace, struct
from crowdml.errors import TaskError
from crowdml.messages import SERVER, Public, message
from crowdml.models import Model, read_model
from crowdml.privacy.calibration import gaussian_sigma, laplace_scale, rho_for, skellam_variance
from crowdml.privacy.grid import COUNTS, Grid
from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace
from crowdml.privacy.mechanisms import (
    CountLaplace,
    Exposed,
    GridGaussian,
    GridLaplace,
    Mechanism,
    SkellamCount,
    SkellamSum,
    l1_of,
    root_up,
)
from crowdml.privacy.private import Masked, Private, Release, Rows
from crowdml.privacy.sensitivity import L1, Observer
from crowdml.protocol import (
    Context,
    Field,
    Noisy,
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
from crowdml.protocols.parts import FINEST_CLIP, choose_grid, longest, pin_grid, so_many
from crowdml.task import StopRule, Task, between, choose, positive, read_section, show

PUBLIC_REACH = 10.0
"""How far the public step rule lets the weights travel: see `public_step`."""
MOMENTUM = 0.9
"""Of `update = "momentum"`: how much of the last step goes on."""


@dataclass(frozen=True)
class Schedule:
    """`{ schedule = "1/sqrt(t)", c = 30.0 }`: the server's step size, eq. (5)."""

    c: Fraction
    schedule: str = "1/sqrt(t)"

    def __post_init__(self) -> None:
        choose("protocol.step.schedule", self.schedule, ("1/sqrt(t)", "1/t", "constant"))
        positive("protocol.step.c", self.c)


@dataclass(frozen=True)
class Settings:
    """The `[protocol]` table of a task."""

    batch: int
    step: Schedule
    buffer: int = 0
    radius: Fraction = Fraction(1000)
    held_out: int = 0
    update: str = "sgd"
    clip: Fraction | None = None
    kind: str = "sgd"

    def __post_init__(self) -> None:
        between("protocol.batch", self.batch, 1, 100_000)
        if self.buffer:
            between("protocol.buffer", self.buffer, self.batch, 10_000_000)
        between("protocol.held_out", self.held_out, 0, self.batch - 1)
        positive("protocol.radius", self.radius)
        if self.clip is not None:
            positive("protocol.clip", self.clip)
        choose("protocol.update", self.update, ("sgd", "adagrad", "rmsprop", "momentum", "average"))

    @property
    def capacity(self) -> int:
        """B: the paper names no default; ten batches ride out a short outage."""
        return self.buffer or 10 * self.batch


@dataclass(frozen=True)
class Plan:
    """What a task fixes once and for all: read by handlers, never written."""

    settings: Settings
    model: Model
    table: Mapping[str, Mechanism]
    grid: Grid
    l2: float
    masked: bool
    """Whether check-ins leave under masks, and the server hears the totals of cohorts."""

    @property
    def used(self) -> int:
        """Samples in the gradient: the batch less its held-out share."""
        return self.settings.batch - self.settings.held_out

    @cached_property
    def share(self) -> float:
        """Of one sample in a mean gradient."""
        return 1 / self.used

    @cached_property
    def c(self) -> float:
        return float(self.settings.step.c)

    @cached_property
    def radius(self) -> float:
        return float(self.settings.radius)


@lru_cache(maxsize=256)
def plan(task: Task) -> Plan:
    """Read the task; refuse what this protocol cannot run."""
    settings = read_section(Settings, task.protocol, "protocol")
    if task.privacy.unit != "sample":
        raise TaskError(
            f'privacy.unit = "{task.privacy.unit}": sgd protects a "sample". '
            "What its check-ins cost a whole device is quoted beside that."
        )
    l2 = task.model.get("l2", 0)
    if not isinstance(l2, (int, float, Fraction)) or isinstance(l2, bool) or l2 < 0:
        raise TaskError(f"model.l2 = {show(l2)}: a number, 0 or more.")
    model = read_model(task.model, task.features.dimension, task.classes, task.labels.bound)
    wanted = {"gradient", "errors", "labels"}
    if task.privacy.mechanism != "none":
        for name in sorted(set(task.privacy.epsilon) - wanted):
            raise TaskError(f"privacy.epsilon.{name}: sgd lets out {', '.join(sorted(wanted))}, and nothing else.")
        if "gradient" not in task.privacy.epsilon:
            raise TaskError("privacy.epsilon.gradient is missing: what a sample pays for the gradient in one check-in.")
    table, grid = _table(task, settings, model)
    if task.stop.error is not None and "errors" not in table:
        raise TaskError(
            f"stop.error = {float(task.stop.error):g}: nobody counts errors in this task. Give the count a price in "
            "privacy.epsilon.errors, or stop by stop.steps."
        )
    return Plan(settings, model, table, grid, float(l2), task.masking is not None)


def mechanisms(task: Task) -> Mapping[str, Mechanism]:
    """Everything that may leave, and at what price. Counts without an epsilon in the task do not leave at all."""
    return plan(task).table


def _table(task: Task, settings: Settings, model: Model) -> tuple[Mapping[str, Mechanism], Grid]:
    privacy, norm = task.privacy, task.features.norm
    everything, held_out = Rows(0, settings.batch), Rows(0, settings.held_out or settings.batch)
    used = Rows(settings.held_out, settings.batch)
    blurred = "how the model should change, blurred with noise"
    if privacy.mechanism == "none":
        seen = Observer.ANYONE if task.masking is None else Observer.AGGREGATE
        exposed = Exposed(
            L1(Fraction(0)), used, "how the model should change, as it is: anyone can work back to samples", seen
        )
        counts = {
            "errors": Exposed(L1(Fraction(0)), held_out, "how often the model was wrong here, exactly", seen),
            "labels": Exposed(L1(Fraction(0)), everything, "how often each label occurred, exactly", seen),
        }
        return {"gradient": exposed, **counts}, COUNTS
    if task.masking is not None:
        return _masked_table(task, settings, model)
    epsilon = {row: each / privacy.uses for row, each in privacy.epsilon.items()}
    if privacy.mechanism == "discrete-laplace":
        if norm.kind != "l1":
            raise TaskError(
                'privacy.mechanism = "discrete-laplace" needs features.norm.kind = "l1": its noise is '
                'calibrated to the l1 norm. Say "l1", or take "discrete-gaussian".'
            )
        bound = longest(model, "l1", float(norm.bound), settings.clip)
        noise_per_clip = laplace_scale(Fraction(2), epsilon["gradient"])
        grid, clip = choose_grid("gradient", bound, noise_per_clip, privacy.grid)
        gradient: Mechanism = GridLaplace(clip, epsilon["gradient"], grid, used, blurred)  # eq. (10)
    else:
        bound = longest(model, "l2", float(norm.bound), settings.clip)
        rho = rho_for(privacy.epsilon["gradient"], privacy.delta) / privacy.uses
        grid, clip = choose_grid("gradient", bound, gaussian_sigma(Fraction(2), rho), privacy.grid)
        gradient = GridGaussian(clip, rho, grid, used, blurred)
    table: dict[str, Mechanism] = {"gradient": gradient}
    if "errors" in epsilon:  # eq. (11); the paper's exponent epsilon/2 proves half of what it charges (H5)
        proved = epsilon["errors"] / 2 if task.as_published else epsilon["errors"]
        table["errors"] = CountLaplace(L1(Fraction(1)), proved, held_out, "about how often the model was wrong here")
    if "labels" in epsilon:  # eq. (12); as published this epsilon is charged for each label, and all cost it once
        table["labels"] = CountLaplace(
            L1(Fraction(2)), epsilon["labels"], everything, "about how often each label occurred"
        )
    return table, grid


def _masked_table(task: Task, settings: Settings, model: Model) -> tuple[Mapping[str, Mechanism], Grid]:
    """Every row as a share of Skellam noise, calibrated to the fewest honest devices of a cohort."""
    privacy, masking = task.privacy, task.masking
    assert masking is not None
    if task.as_published:
        raise TaskError("as_published = true with [masking]: the paper has no masks. Leave one of the two out.")
    honest, epsilon, length = masking.honest, privacy.epsilon, math.prod(model.shape)
    bound = longest(model, "l2", float(task.features.norm.bound), settings.clip)

    def share(l2: Fraction, l1: Fraction, row: str) -> Fraction:
        return skellam_variance(l2, l1, epsilon[row], privacy.delta, privacy.uses) / honest

    rough = share(Fraction(2 * FINEST_CLIP), l1_of(Fraction(2 * FINEST_CLIP), length), "gradient")
    grid, clip = choose_grid("gradient", bound, Fraction(math.isqrt(math.ceil(rough)) + 1, FINEST_CLIP), privacy.grid)
    l2 = Fraction(2 * clip)
    used, everything = Rows(settings.held_out, settings.batch), Rows(0, settings.batch)
    held_out = Rows(0, settings.held_out or settings.batch)
    blurred = "how the model should change, as part of a cohort's sum that is blurred with noise"
    variance = share(l2, l1_of(l2, length), "gradient")
    table: dict[str, Mechanism] = {"gradient": SkellamSum(clip, variance, honest, grid, used, length, blurred)}
    if "errors" in epsilon:
        variance = share(Fraction(1), Fraction(1), "errors")
        about = "about how often the model was wrong, over a cohort"
        table["errors"] = SkellamCount(L1(Fraction(1)), variance, honest, held_out, 1, about)
    if "labels" in epsilon:
        variance = share(root_up(Fraction(2)), Fraction(2), "labels")
        about = "about how often each label occurred, over a cohort"
        table["labels"] = SkellamCount(L1(Fraction(2)), variance, honest, everything, model.cells, about)
    return table, grid


def public_step(task: Task) -> Fraction:
    """The constant c of the step c / sqrt(t), from the task alone: no sample is looked at, so nothing is tuned (R4).

    c = 10 / sqrt(E), where E is the mean square of what one check-in adds: the square of the gradient's bound, plus
    the energy of the noise over all weights. So the k-th step moves the weights by 10 / sqrt(k) at most on average.
    With masks it is what the mean over the smallest cohort adds.
    Ten is a round number, checked on made-up blobs and on MNIST's public images: 3 and 30 are not far from it.
    """
    fixed = plan(task)
    bound = longest(fixed.model, "l2", float(task.features.norm.bound), fixed.settings.clip)
    noise = (_deviation(fixed.table["gradient"]) / fixed.used) ** 2 / (task.masking.minimum if task.masking else 1)
    energy = bound**2 + math.prod(fixed.model.shape) * noise
    return Fraction(f"{PUBLIC_REACH / math.sqrt(energy):.4g}")


def _deviation(gradient: Mechanism) -> float:
    """Standard deviation of the noise on one entry, in the gradient's own unit; of one device's share under masks."""
    if isinstance(gradient, SkellamSum):
        return math.sqrt(gradient.variance) * float(gradient.grid.step)
    if isinstance(gradient, GridGaussian):
        return float(gradient.sigma * gradient.grid.step)
    if isinstance(gradient, GridLaplace):
        return math.sqrt(2) * float(gradient.scale * gradient.grid.step)
    return 0.0


def claimed_epsilon(task: Task) -> float:
    """What the paper says a sample pays in all: epsilon_g + epsilon_e + C epsilon_y, once, however many passes."""
    epsilon = task.privacy.epsilon
    each = epsilon.get("gradient", 0) + epsilon.get("errors", 0) + (task.classes or 0) * epsilon.get("labels", 0)
    return float(each)


# --- what travels ---


@message("sgd/params/1")
class Params:
    """The publication: weights, and how many check-ins made them."""

    weights: Public[Array]
    version: Public[Integers]


@message("sgd/gradient/1")
class Gradient:
    """A check-in: sums over the batch, on the grid."""

    gradient: Release[Integers]
    errors: Release[Integers] | None
    labels: Release[Integers] | None
    version: Public[Integers]


@message("sgd/masked/1")
class MaskedGradient:
    """A check-in of a masked task: the same sums, under masks."""

    gradient: Masked[Integers]
    errors: Masked[Integers] | None
    labels: Masked[Integers] | None


@message("sgd/total/1")
class GradientTotal:
    """What the server hears of a cohort: the sums over its survivors."""

    gradient: Release[Integers]
    errors: Release[Integers] | None
    labels: Release[Integers] | None
    devices: Public[Integers]
    version: Public[Integers]


# --- the device: Device Routines 1 to 3 (the buffer is the shell's) ---


def contribute(task: Task, waiting: Private[Samples] | None, params: Params, ctx: Context) -> Step[Any]:
    """Answer a check-out with one noisy gradient sum and noisy counts (Device Routines 2 and 3)."""
    if waiting is None:  # a late or repeated answer
        return Step(None)
    fixed = plan(task)
    model, weights = fixed.model, params.weights
    held_out, used = waiting.split(fixed.settings.held_out)
    tested = held_out if fixed.settings.held_out else used
    let_out: Any = ctx.masked if fixed.masked else ctx.release
    gradient = let_out("gradient", used.map(lambda batch: model.gradients(weights, batch)))
    errors = labels = None
    if "errors" in fixed.table:
        errors = let_out("errors", tested.map(lambda batch: model.mistakes(weights, batch)[:, None]))
    if "labels" in fixed.table:
        labels = let_out("labels", waiting.map(model.label_cells))
    if fixed.masked:
        return Step(None, (Send(SERVER, MaskedGradient(gradient, errors, labels)),))
    return Step(None, (Send(SERVER, Gradient(gradient, errors, labels, params.version)),))


# --- the server: Server Routines 1 and 2 ---


@struct
class Learning:
    """The server's state. Everything in it is post-processing of releases.

    Counts add up in int64, so that no crowd and no liar wraps them; JAX, without 64 bits, adds them in int32.
    """

    weights: Array
    memory: Array  # of the update rule: squares (adagrad, rmsprop), velocity (momentum), or the average of the weights
    steps: Integers
    counted: Integers
    """Check-ins behind the steps: as many, but for masked cohorts, whose survivors are counted."""
    errors: Integers
    labels: Integers


def publish_initial(task: Task, ctx: Context) -> Step[Learning]:
    model = plan(task).model
    weights, zeros = model.start(), np.zeros(model.shape, np.float32)
    none = np.int32(0)
    counts = np.int64(0), np.zeros(model.cells, np.int64)  # 2^31 counts below 2^31 fit
    state = Learning(weights, zeros, none, none, *counts)
    return Step(state, (Publish(Params(weights, none)),))


def apply(task: Task, state: Learning, gradient: Gradient, ctx: Context) -> Step[Learning]:
    """One update, eq. (3): a step along the noisy gradient, projected to the ball of radius R; counts add up."""
    return _apply(task, state, gradient, 1)


def apply_total(task: Task, state: Learning, total: GradientTotal, ctx: Context) -> Step[Learning]:
    """The same with a cohort's total: the mean over the samples of its survivors, who are counted in public."""
    return _apply(task, state, total, total.devices)


def _apply(task: Task, state: Learning, gradient: Gradient | GradientTotal, devices: Any) -> Step[Learning]:
    fixed = plan(task)
    xp = namespace(gradient.gradient.value, state.weights)
    mean = fixed.grid.decode(gradient.gradient.value) * fixed.share
    if fixed.masked:
        mean = (mean / xp.asarray(devices).astype(xp.float32)).reshape(state.weights.shape)
    if fixed.l2:
        mean = mean + fixed.l2 * state.weights
    steps = state.steps + 1
    weights, memory = _update(fixed, xp, state, mean, steps.astype(xp.float32))
    weights = _project(xp, weights, fixed.radius)
    if fixed.settings.update == "average":
        memory = state.memory + (weights - state.memory) / steps.astype(xp.float32)
    errors = state.errors if gradient.errors is None else state.errors + gradient.errors.value[0]
    labels = state.labels if gradient.labels is None else state.labels + gradient.labels.value
    counted = (state.counted + devices).astype(xp.int32)
    after = Learning(weights, memory, steps, counted, errors, labels)
    return Step(after, (Publish(Params(weights, steps)), *_stops(task.stop, fixed, after)))


def _update(fixed: Plan, xp: Any, state: Learning, mean: Array, t: Array) -> tuple[Array, Array]:
    """The paper's update, or a later one (Remark 3): all are post-processing, devices do not notice."""
    c, schedule, update = fixed.c, fixed.settings.step.schedule, fixed.settings.update
    rate = c / xp.sqrt(t) if schedule == "1/sqrt(t)" else c / t if schedule == "1/t" else c
    if update == "adagrad":
        memory = state.memory + mean * mean
        return state.weights - c / (xp.sqrt(memory) + 1e-8) * mean, memory
    if update == "rmsprop":
        memory = 0.9 * state.memory + 0.1 * mean * mean
        return state.weights - rate / (xp.sqrt(memory) + 1e-8) * mean, memory
    if update == "momentum":
        memory = MOMENTUM * state.memory + mean
        return state.weights - rate * memory, memory
    return state.weights - rate * mean, state.memory


def _project(xp: Any, weights: Array, radius: float) -> Array:
    """To the ball of radius R, eq. (3). Within it the factor is exactly 1."""
    size = xp.sqrt((weights * weights).sum())
    return weights * (radius / xp.maximum(size, radius))


def _stops(rule: StopRule, fixed: Plan, state: Learning) -> tuple[Stop, ...]:
    """T_max, or the error rho on the noisy counts (Algorithm 2). Structure depends on the task alone."""
    stops: list[Stop] = []
    if rule.steps is not None:
        heard = ("cohort", "been added up") if fixed.masked else ("check-in", "arrived")
        stops.append(Stop(so_many(rule.steps, *heard), state.steps >= rule.steps))
    if rule.error is not None and "errors" in fixed.table:
        low = state.errors <= float(rule.error) * state.counted * tested_samples(fixed)
        stops.append(Stop(f"the crowd's error is at most {float(rule.error):g}", low))
    return tuple(stops)


def tested_samples(fixed: Plan) -> int:
    """Samples behind one error count."""
    return fixed.table["errors"].covers.size


@dataclass(frozen=True)
class Progress:
    """Error rate and label shares over the crowd, eq. (14), with the standard deviation that the noise gives them."""

    check_ins: int
    error: float
    error_sd: float
    labels: tuple[float, ...]
    labels_sd: float


def progress(task: Task, check_ins: int, errors: float, labels: Array) -> Progress:
    """Eq. (14) from sums of noisy counts: over the crowd (from the state), or over one device's check-ins."""
    fixed = plan(task)
    seen = max(1, check_ins)

    def deviation(row: str) -> float:
        return float(np.sqrt(seen * _variance(fixed.table.get(row))))

    tested = seen * (tested_samples(fixed) if "errors" in fixed.table else fixed.settings.batch)
    counted = seen * fixed.settings.batch
    return Progress(
        check_ins,
        float(errors) / tested,
        deviation("errors") / tested,
        tuple(float(count) / counted for count in np.asarray(labels)),
        deviation("labels") / counted,
    )


def _variance(mechanism: Mechanism | None) -> float:
    """Of the noise in one count: 2 alpha / (1 - alpha)^2 for discrete Laplace noise with P(z) ~ alpha^|z|."""
    if isinstance(mechanism, SkellamCount):
        return float(mechanism.variance)
    if not isinstance(mechanism, CountLaplace):
        return 0.0
    alpha = float(np.exp(-1 / float(mechanism.scale)))
    return 2 * alpha / (1 - alpha) ** 2


def tally(task: Task, state: Learning) -> Tally:
    """The crowd's noisy counts so far; see `progress` for the rates that they give."""
    fixed = plan(task)
    seen = int(state.counted)

    def noisy(row: str, counts: Array) -> Noisy | None:
        mechanism = fixed.table.get(row)
        if mechanism is None:
            return None
        whole = tuple(int(count) for count in np.atleast_1d(np.asarray(counts)))
        return Noisy(whole, seen * mechanism.covers.size, seen * _variance(mechanism))

    return Tally(seen, noisy("errors", state.errors), noisy("labels", state.labels))


def model_weights(task: Task, state: Learning) -> Array:
    """The model: the last weights, or their average where the task says so."""
    return state.memory if plan(task).settings.update == "average" else state.weights


def expected(task: Task) -> Mapping[str, Mapping[str, Field]]:
    """What a check-in may hold. Noise beyond its bound has a chance below 2^-64, so no honest device is refused."""
    fixed = plan(task)
    shapes = {"gradient": fixed.model.shape, "errors": (1,), "labels": (fixed.model.cells,)}
    fields = {"version": Field("<i4", (), 0, 2**31 - 1)}
    if fixed.masked:
        return {"sgd/total/1": {**fields, **total_fields(fixed.table, task)}}
    for row, mechanism in fixed.table.items():
        if isinstance(mechanism, GridLaplace | GridGaussian):
            most = mechanism.covers.size * mechanism.clip
            low = -most
        elif isinstance(mechanism, CountLaplace):
            low, most = 0, mechanism.covers.size
        else:
            raise TaskError(f"row {row!r} has no noise: the simulator runs such a task, a server does not.")
        gaussian = isinstance(mechanism, GridGaussian)
        reach = (DiscreteGaussian(mechanism.sigma) if gaussian else DiscreteLaplace(mechanism.scale)).tail(64)
        fields[row] = Field("<i4", shapes[row], low - reach, most + reach)
    return {"sgd/gradient/1": fields}


device = Role(start=wait, on={Sensed: check_out, Params: contribute})
server = Role(start=publish_initial, on={Gradient: apply, GradientTotal: apply_total})
protocol = Protocol(
    "sgd",
    device,
    server,
    mechanisms,
    check=plan,
    batch=lambda task: plan(task).settings.batch,
    model=model_weights,
    settle=lambda task: pin_grid(task, plan(task).grid),
    expected=expected,
    progress=tally,
    masked=(MaskedGradient, GradientTotal),
)
