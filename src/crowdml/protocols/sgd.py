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
- With `combine` the gradients of a round are gathered, and a robust rule makes one step of them (`robust.py`).
- A held-out share (Remark 2) is the first rows of the batch, chosen before any sample is seen; a sample then pays for
  the gradient or for the error count, not for both; every sample pays for the labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Annotated, Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, namespace, struct
from crowdml.channels import combining, contribution, heard_by
from crowdml.errors import TaskError
from crowdml.features.norms import shorten
from crowdml.messages import Public, message
from crowdml.models import Model, longest_gradient, read_model, sample_gradients
from crowdml.privacy.grid import Grid
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.private import Private, Release, Rows
from crowdml.privacy.rows import Promise, count_row, noise_norm, sum_row
from crowdml.protocol import Context, Noisy, Protocol, Publish, Role, Rule, Step, Stop, Tally, device_role, stop_after
from crowdml.robust import Combine
from crowdml.settings import Between, OneOf, Positive, between, read_kind, show
from crowdml.shape import Shape, deviation_of_mean, short
from crowdml.task import StopRule, Task

PUBLIC_REACH = 10.0
"""How far the public step rule lets the weights travel: see `public_step`."""
MOST_USES = 8
"""The most uses of a sample without masks, where nobody says how many."""
CHANGE, LABELS = "how the model should change", "how often each label occurred"
WRONG = Promise(
    "about how often the model was wrong here",
    "about how often the model was wrong, over a cohort",
    "how often the model was wrong here, exactly",
)


@dataclass(frozen=True)
class Schedule:
    """`{ schedule = "1/sqrt(t)", c = 30.0 }`: the server's step size, eq. (5)."""

    c: Annotated[Fraction, Positive()]
    schedule: Annotated[str, OneOf("1/sqrt(t)", "1/t", "constant")] = "1/sqrt(t)"


@dataclass(frozen=True)
class Settings:
    """The `[protocol]` table of a task."""

    batch: Annotated[int, Between(1, 100_000)]
    step: Schedule
    buffer: int = 0
    radius: Annotated[Fraction, Positive()] = Fraction(1000)
    held_out: int = 0
    update: Annotated[str, OneOf("sgd", "adagrad", "rmsprop", "momentum", "average")] = "sgd"
    clip: Annotated[Fraction, Positive()] | None = None
    momentum: Annotated[Fraction, Between(0, 0.99)] = Fraction(9, 10)
    """The share of the last step that `update = "momentum"` carries over."""
    combine: Combine | None = None
    kind: str = "sgd"

    def __post_init__(self) -> None:
        if self.buffer:
            between("protocol.buffer", self.buffer, self.batch, 10_000_000)
        between("protocol.held_out", self.held_out, 0, self.batch - 1)


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


@lru_cache(maxsize=256)
def plan(task: Task) -> Plan:
    """Read the task; refuse what this protocol cannot run."""
    settings = read_kind(Settings, task.protocol, "protocol")
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
    table = _table(task, settings, model)
    if task.stop.error is not None and "errors" not in table:
        raise TaskError(
            f"stop.error = {float(task.stop.error):g}: nobody counts errors in this task. Give the count a price in "
            "privacy.epsilon.errors, or stop by stop.steps."
        )
    return Plan(settings, model, table, table["gradient"].grid, float(l2), task.masking is not None)


def mechanisms(task: Task) -> Mapping[str, Mechanism]:
    """Everything that may leave, and at what price. Counts without an epsilon in the task do not leave at all."""
    return plan(task).table


def _table(task: Task, settings: Settings, model: Model) -> Mapping[str, Mechanism]:
    epsilon, norm, plain = task.privacy.epsilon, noise_norm(task), task.privacy.mechanism == "none"
    if task.as_published and task.masking is not None and not plain:
        raise TaskError("as_published = true with [masking]: the paper has no masks. Leave one of the two out.")
    if norm == "l1" and task.features.norm.kind != "l1":
        raise TaskError(
            'privacy.mechanism = "discrete-laplace" needs features.norm.kind = "l1": its noise is '
            'calibrated to the l1 norm. Say "l1", or take "discrete-gaussian".'
        )
    longest = math.inf if plain else longest_gradient(model, norm, float(task.features.norm.bound), settings.clip)
    used, tested = Rows(settings.held_out, settings.batch), Rows(0, settings.held_out or settings.batch)
    everything = Rows(0, settings.batch)
    table = {  # eq. (10)
        "gradient": sum_row(task, "gradient", bound=longest, shape=model.shape, covers=used, promise=CHANGE)
    }
    if plain or "errors" in epsilon:  # eq. (11); the paper's exponent epsilon/2 proves half of what it charges (H5)
        proved = epsilon["errors"] / 2 if task.as_published and not plain else None
        table["errors"] = count_row(task, "errors", cells=1, covers=tested, promise=WRONG, epsilon=proved)
    if plain or "labels" in epsilon:  # eq. (12); as published it is charged for each label, and all cost it once
        table["labels"] = count_row(task, "labels", cells=model.cells, covers=everything, promise=LABELS)
    return table


def public_step(task: Task) -> Fraction:
    """The constant c of the step c / sqrt(t), from the task alone: no sample is looked at, so nothing is tuned (R4).

    c = 10 / sqrt(E), where E is the mean square of what one check-in adds: the square of the gradient's bound, plus
    the energy of the noise over all weights. So the k-th step moves the weights by 10 / sqrt(k) at most on average.
    With masks it is what the mean over the smallest cohort adds, and where a rule combines rounds, its result.
    Ten is a round number, checked on made-up blobs and on MNIST's public images: 3 and 30 are not far from it.
    """
    fixed = plan(task)
    bound = longest_gradient(fixed.model, "l2", float(task.features.norm.bound), fixed.settings.clip)
    row, devices, by = fixed.table["gradient"], task.masking.minimum if task.masking else 1, combining(task)
    devices = devices if by is None else devices * by.fewest / by.inflation(by.fewest)
    noise = row.noise_variance * float(row.grid.step / fixed.used) ** 2 / devices
    noise = 0.0 if by is not None and by.rule == "fltrust" else noise  # no longer than the server's own gradient
    energy = bound**2 + math.prod(fixed.model.shape) * noise
    return Fraction(f"{PUBLIC_REACH / math.sqrt(energy):.4g}")


def advise(task: Task, shape: Shape | None) -> Task:
    """The task with a step, and with the clip and the update that go with it, where it names no step.

    Where the crowd is known steps are equal, and as long as noise allows (`Shape.longest_step`), with momentum under
    masks, where there are few of them; else they are those of `public_step`.
    """
    if "step" in task.protocol:
        return task
    guess = task.with_(protocol={"step": {"c": Fraction(1)}})
    if shape is None or task.as_published:
        return task.with_(protocol={"step": {"c": public_step(guess)}})
    chosen = dict(task.protocol)
    bound, norm = float(task.features.norm.bound), noise_norm(task)
    model = read_model(task.model, task.features.dimension, task.classes, task.labels.bound)
    if task.privacy.mechanism != "none":
        chosen.setdefault(
            "clip", short(shape.rules.clip * model.gradient_bound(norm, bound)) if model.bounded else Fraction(1)
        )
    settings = plan(guess.with_(protocol=chosen)).settings
    rounds = max(1, shape.rounds(task, settings.batch) // (1 if settings.combine is None else settings.combine.uploads))
    if task.masking is not None:
        chosen.setdefault("update", "momentum")
        if chosen["update"] == "momentum":
            chosen.setdefault("momentum", shape.momentum_in(rounds))
    fixed = plan(guess.with_(protocol=chosen))
    longest = model.gradient_bound(norm, bound) if model.bounded else 1.0
    c = shape.longest_step(
        noise=_noise_in_mean(fixed, shape, task),
        rounds=rounds,
        momentum=float(fixed.settings.momentum) if fixed.settings.update == "momentum" else 0.0,
        smoothness=model.smoothness(bound) or 1.0,
        clipped=min(1.0, float(fixed.settings.clip or longest) / longest),
    )
    return task.with_(protocol={**chosen, "step": {"schedule": "constant", "c": short(c)}})


def _noise_in_mean(fixed: Plan, shape: Shape, task: Task) -> float:
    """The standard deviation of an entry of the mean gradient over all check-ins of a study."""
    row = fixed.table["gradient"]
    deviation = deviation_of_mean(row.noise_variance, shape.check_ins(task, fixed.settings.batch))
    return deviation * float(row.grid.step) / fixed.used


def uses(task: Task, shape: Shape) -> int:
    """As many as the planned steps of the server need: cohorts under masks, single check-ins without."""
    if task.as_published:
        return 1
    if task.masking is None:
        return min(MOST_USES, math.ceil(shape.rules.alone / shape.devices))
    fixed = plan(advise(task, shape))  # at the price of a single use, which is that of all uses
    smoothness = fixed.model.smoothness(float(task.features.norm.bound)) or 1.0
    steps = shape.single_steps(noise=_noise_in_mean(fixed, shape, task), smoothness=smoothness)
    return math.ceil(steps * min(task.masking.cohort, shape.devices) / shape.devices)


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


@contribution("sgd/gradient/1", masked="sgd/masked/1", total="sgd/total/1")
class Gradient:
    """A check-in: sums over the batch, on the grid."""

    gradient: Release[Integers]
    errors: Release[Integers] | None
    labels: Release[Integers] | None
    version: Public[Integers]


# --- the device: Device Routines 1 to 3 (the buffer is the shell's) ---


def contribute(task: Task, batch: Private[Samples], params: Params) -> Mapping[str, Private[Any]]:
    """One gradient sum and the counts of a batch, before their noise (Device Routines 2 and 3)."""
    fixed = plan(task)
    model, weights = fixed.model, params.weights
    held_out, used = batch.split(fixed.settings.held_out)
    tested = held_out if fixed.settings.held_out else used
    rows: dict[str, Private[Any]] = {"gradient": used.map(lambda batch: sample_gradients(model, weights, batch))}
    if "errors" in fixed.table:
        rows["errors"] = tested.map(lambda batch: model.mistakes(weights, batch)[:, None])
    if "labels" in fixed.table:
        rows["labels"] = batch.map(model.label_cells)
    return rows


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


def apply(task: Task, state: Learning, gradient: Any, ctx: Context) -> Step[Learning]:
    """One update, eq. (3): a step along the noisy gradient, projected to the ball of radius R; counts add up.

    The gradient of one device, or the total of a cohort or a combined round: then its mean over their samples.
    """
    fixed, devices = plan(task), gradient.devices
    xp = namespace(gradient.gradient.value, state.weights)
    mean = fixed.grid.decode(gradient.gradient.value) * (1 / fixed.used)
    if isinstance(gradient, Gradient.total):
        mean = (mean / xp.asarray(devices).astype(xp.float32)).reshape(state.weights.shape)
    if fixed.l2:
        mean = mean + fixed.l2 * state.weights
    steps = state.steps + 1
    weights, memory = _update(fixed, xp, state, mean, steps.astype(xp.float32))
    weights = shorten(weights, float(fixed.settings.radius))  # eq. (3)
    if fixed.settings.update == "average":
        memory = state.memory + (weights - state.memory) / steps.astype(xp.float32)
    errors = state.errors if gradient.errors is None else state.errors + gradient.errors.value[0]
    labels = state.labels if gradient.labels is None else state.labels + gradient.labels.value
    counted = (state.counted + devices).astype(xp.int32)
    after = Learning(weights, memory, steps, counted, errors, labels)
    return Step(after, (Publish(Params(weights, steps)), *_stops(task.stop, fixed, after)))


def own_update(task: Task, state: Learning, samples: Samples) -> Mapping[str, Array]:
    """What one device that held these samples would give, in grid steps and without noise: rules compare with it."""
    fixed, clip = plan(task), plan(task).settings.clip
    if clip is None:
        total = fixed.model.gradient_sum(state.weights, samples)
    else:
        total = fixed.model.clipped_sum(state.weights, samples, float(clip))
    return {"gradient": total * (fixed.used / len(samples) / float(fixed.grid.step))}


def _update(fixed: Plan, xp: Any, state: Learning, mean: Array, t: Array) -> tuple[Array, Array]:
    """The paper's update, or a later one (Remark 3): all are post-processing, devices do not notice."""
    c, schedule, update = float(fixed.settings.step.c), fixed.settings.step.schedule, fixed.settings.update
    rate = c / xp.sqrt(t) if schedule == "1/sqrt(t)" else c / t if schedule == "1/t" else c
    if update == "adagrad":
        memory = state.memory + mean * mean
        return state.weights - c / (xp.sqrt(memory) + 1e-8) * mean, memory
    if update == "rmsprop":
        memory = 0.9 * state.memory + 0.1 * mean * mean
        return state.weights - rate / (xp.sqrt(memory) + 1e-8) * mean, memory
    if update == "momentum":
        memory = float(fixed.settings.momentum) * state.memory + mean
        return state.weights - rate * memory, memory
    return state.weights - rate * mean, state.memory


def _stops(rule: StopRule, fixed: Plan, state: Learning) -> tuple[Stop, ...]:
    """T_max, or the error rho on the noisy counts (Algorithm 2). Structure depends on the task alone."""
    heard = ("cohort", "been added up") if fixed.masked else ("check-in", "arrived")
    heard = heard if fixed.settings.combine is None else ("round", "been closed")
    stops = stop_after(rule.steps, state.steps, *heard)
    if rule.error is None or "errors" not in fixed.table:
        return stops
    most = float(rule.error)
    low = state.errors <= most * state.counted * fixed.table["errors"].covers.size
    return (*stops, Stop(Rule("error", f"the crowd's error is at most {most:g}", (("error", most),)), low))


def tally(task: Task, state: Learning) -> Tally:
    """The crowd's noisy counts so far: over their samples, they are the rates of eq. (14)."""
    fixed = plan(task)
    seen = int(state.counted)

    def noisy(row: str, counts: Array) -> Noisy | None:
        mechanism = fixed.table.get(row)
        if mechanism is None:
            return None
        whole = tuple(int(count) for count in np.atleast_1d(np.asarray(counts)))
        return Noisy(whole, seen * mechanism.covers.size, seen * mechanism.noise_variance)

    return Tally(seen, noisy("errors", state.errors), noisy("labels", state.labels))


def model_weights(task: Task, state: Learning) -> Array:
    """The model: the last weights, or their average where the task says so."""
    return state.memory if plan(task).settings.update == "average" else state.weights


def shapes(task: Task) -> Mapping[str, tuple[int, ...]]:
    model = plan(task).model
    return {"gradient": model.shape, "errors": (1,), "labels": (model.cells,)}


device = device_role(Gradient, Params, contribute)
server = Role(start=publish_initial, on=heard_by(Gradient, apply, rows=("gradient",), updated=own_update))
protocol = Protocol(
    "sgd",
    device,
    server,
    mechanisms,
    model=model_weights,
    shapes=shapes,
    progress=tally,
    advise=advise,
    uses=uses,
    claims=claimed_epsilon,
    contribution=Gradient,
    settings=Settings,
)
