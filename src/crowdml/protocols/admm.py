"""Consensus learning by proximal rounds: Guo and Gong's ADMM in the form that its guarantee holds for.

Guo and Gong, "Practical Collaborative Learning for Crowdsensing in the Internet of Things with Differential Privacy",
sections IV and V. A device minimises its own loss near a public centre and says how far it went, under masks; the
server averages a cohort and makes the consensus step (11) with its regulariser in closed form. Privacy review, section
1, `gg.sound`; how much one sample moves the answer is proved in docs/protocols/admm.md.

Where we differ, and why:
- The proximal centre is public, the same for everybody, and there are no duals: lambda_i is private state that no
  sensitivity covers (G3), and a second vector of differences would let the server subtract cohorts until one device is
  left (G1, G2). One vector a round leaves: w_i - v.
- (12) is not minimised but approached by a fixed number of gradient steps from the public centre: a solver that may
  fail or stop early tells by it (G5). So the loss must be smooth: logistic, softmax, Huber's, and the hinge rounded
  over a public width. The plain hinge and the squared loss are for as-published runs (G4, G5).
- Integers with shares of Skellam noise, rounding paid (G12); noise for the fewest honest survivors (G7); the total over
  all the rounds that a device takes part in is what is promised, not one iteration (G6).
- The server may go further than the average (`relaxation`) and keep its way (`momentum`): both are post-processing.
- Without `[masking]` each update has all its noise itself and anyone may look: the local variant of section V-B, whose
  noise in a sum of m devices is sqrt(m) times as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Annotated, Any

import numpy as np

from crowdml.arrays import LARGEST_NUMBER, Array, Integers, Samples, finite_or_zero, namespace, struct
from crowdml.channels import contribution
from crowdml.errors import TaskError
from crowdml.features.norms import shorten
from crowdml.messages import Public, message
from crowdml.models import Model, read_model
from crowdml.privacy.grid import COUNTS, Grid
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.private import Private, Release, Rows
from crowdml.privacy.rows import stable_row
from crowdml.protocol import Context, Protocol, Publish, Role, Step, Tally, device_role, stop_after
from crowdml.settings import Between, Positive, between, read_kind, show
from crowdml.shape import Shape, deviation_of_mean, short
from crowdml.task import Task

MISUSED = {
    "svm": "the plain hinge is not smooth: one replaced sample moved the answer 17.6 times as far as claimed (G5). "
    'Take model.kind = "smooth-svm", or run it as published in the simulator',
    "least-squares": "the squared loss has no bound on its slope, so Lemma 1 fails: 8.17 where 0.2 is claimed (G4). "
    'Take model.kind = "linear" (Huber\'s loss), or run it as published in the simulator',
    "cnn": "a network's loss is neither convex nor smooth, so local steps are not stable (G5). "
    "Take it to a protocol that clips each sample's gradient",
    "mlp": "a perceptron's loss is neither convex nor smooth, so local steps are not stable (G5). "
    "Take it to a protocol that clips each sample's gradient",
}


@dataclass(frozen=True)
class Settings:
    """The `[protocol]` table of a task."""

    batch: Annotated[int, Between(1, 100_000)]
    rho: Annotated[Fraction, Positive()]
    local_steps: Annotated[int, Between(1, 1000)] = 10
    local_rate: Annotated[Fraction, Positive()] | None = None
    relaxation: Annotated[Fraction, Positive()] = Fraction(1)
    momentum: Annotated[Fraction, Between(0, 0.99)] = Fraction(0)
    barrier: Annotated[int, Between(1, 1_000_000)] = 1
    delay: Annotated[int, Between(0, 2**31 - 1)] | None = None
    radius: Annotated[Fraction, Between(1e-6, 1e6)] = Fraction(1000)
    buffer: int = 0
    kind: str = "admm"

    def __post_init__(self) -> None:
        if self.buffer:
            between("protocol.buffer", self.buffer, self.batch, 10_000_000)


@dataclass(frozen=True)
class Plan:
    """What a task fixes once and for all: read by handlers, never written."""

    settings: Settings
    model: Model
    table: Mapping[str, Mechanism]
    grid: Grid
    l1: float
    l2: float
    rate: float
    """eta of the local steps, at most 1 / (L + rho)."""
    stability: float
    """How far one replaced sample can move w_i - v in the l2 norm, in exact arithmetic."""
    bound: float
    """On |x|: longer samples are brought to it."""

    @cached_property
    def rho(self) -> float:
        return float(self.settings.rho)

    @property
    def solved(self) -> float:
        """1 - (1 - eta rho)^K: how far K steps go towards the minimum of (12)."""
        return solved(self.rate, self.rho, self.settings.local_steps)

    @cached_property
    def shrinkage(self) -> float:
        """The weight of the regulariser of a mean loss in (11), after a round that goes `relaxation` times as far."""
        return float(self.settings.relaxation) * self.solved / self.rho * self.settings.batch


def solved(rate: float, rho: float, steps: int) -> float:
    """1 - (1 - rate rho)^steps, also where rate rho is tiny."""
    return -math.expm1(steps * math.log1p(-rate * rho)) if rate * rho < 1 else 1.0


def stability_of(gradient_bound: float, rho: float, rate: float, steps: int) -> float:
    """How far one replaced sample moves K gradient steps on l(D; w) + rho/2 |w - v|^2 from v, in the l2 norm.

    (2 G / rho) (1 - (1 - rate rho)^K), for a convex loss whose slope is at most G and 1 - rate rho >= 0 with rate <=
    1 / (L + rho): each step brings two runs closer by 1 - rate rho and the replaced sample parts them by 2 G rate.
    Never more than Lemma 1's 2 G / rho, which is for the exact minimum.
    """
    return 2 * gradient_bound / rho * solved(rate, rho, steps)


@lru_cache(maxsize=256)
def plan(task: Task) -> Plan:
    """Read the task; refuse what this protocol cannot run."""
    settings = read_kind(Settings, task.protocol, "protocol")
    if task.privacy.unit != "sample":
        raise TaskError(
            f'privacy.unit = "{task.privacy.unit}": admm protects a "sample". '
            "What its rounds cost a whole device is quoted beside that."
        )
    if task.as_published:
        raise TaskError(
            "as_published = true: admm as published keeps private duals and says two vectors, which no door lets out. "
            "`crowdml reproduce guo/fig4` runs it, with its warning; leave the line out for the sound form."
        )
    kind = str(task.model["kind"])
    penalties = {name: task.model.get(name, 0) for name in ("l1", "l2")}
    for name, value in penalties.items():
        if not isinstance(value, (int, float, Fraction)) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise TaskError(f"model.{name} = {show(value)}: a number, 0 or more.")
    if kind in MISUSED:
        raise TaskError(f"model.kind = {kind!r}: {MISUSED[kind]}.")
    model = read_model(task.model, task.features.dimension, task.classes, task.labels.bound, tuple(penalties))
    if task.features.norm.kind != "l2":
        raise TaskError('features.norm.kind = "l1": the sensitivity of admm is in the l2 norm. Say "l2".')
    if task.privacy.mechanism != "none":
        for name in sorted(set(task.privacy.epsilon) - {"update"}):
            raise TaskError(f"privacy.epsilon.{name}: admm lets out update, and nothing else.")
        if "update" not in task.privacy.epsilon:
            raise TaskError("privacy.epsilon.update is missing: what a sample pays in all the rounds that use it.")
    if task.stop.error is not None:
        raise TaskError(f"stop.error = {float(task.stop.error):g}: nobody counts errors in admm; stop by stop.steps.")
    if task.masking is not None and settings.barrier != 1:
        raise TaskError(
            f"protocol.barrier = {settings.barrier}: under masks masking.minimum is the barrier. Leave this one out."
        )
    return _plan(task, settings, model, l1=float(penalties["l1"]), l2=float(penalties["l2"]))


def _plan(task: Task, settings: Settings, model: Model, *, l1: float, l2: float) -> Plan:
    bound = float(task.features.norm.bound)
    smooth = model.smoothness(bound)
    if smooth is None:
        raise TaskError(
            f"model.kind = {task.model['kind']!r}: its loss is not smooth, so local steps are not stable (G5)."
        )
    steepest = settings.batch * smooth
    rho = float(settings.rho)
    largest = 1 / (steepest + rho)
    rate = largest if settings.local_rate is None else float(settings.local_rate)
    if rate > largest * (1 + 1e-9):
        raise TaskError(
            f"protocol.local_rate = {rate:g}: local steps are stable up to 1 / (L + rho) = {largest:g}, where L = "
            f"{steepest:g} is the smoothness of {settings.batch} samples' loss (G5). Lower it, or leave it out."
        )
    gradient_bound = model.gradient_bound("l2", bound)
    stability = stability_of(gradient_bound, rho, rate, settings.local_steps)
    row = stable_row(
        task, "update", stability=stability, device_stability=settings.batch * stability,
        float_error=_float_error(settings, model, bound, rate), shape=model.shape, covers=Rows(0, settings.batch),
        promise="where the model would go from here",
    )  # fmt: skip
    return Plan(settings, model, {"update": row}, row.grid, l1, l2, rate, stability, bound)


def _float_error(settings: Settings, model: Model, bound: float, rate: float) -> Fraction:
    """How far float64 may carry two runs of the local steps apart beyond exact arithmetic, in the l2 norm.

    A step adds the rounding of a sum over the batch, of scores x.w and of w itself: below 2^-50 of (entries + batch)
    times the largest number in it, for each entry; steps contract, so the errors of all steps at most add up.
    """
    length = math.prod(model.shape)
    pull = settings.batch * model.gradient_bound("l2", bound) * rate * settings.local_steps
    largest = (float(settings.radius) + pull) * (1 + bound) + pull
    each = 2.0**-50 * (length + settings.batch + 8) * largest * math.sqrt(length)
    return Fraction(2 * settings.local_steps * each)


def mechanisms(task: Task) -> Mapping[str, Mechanism]:
    """Everything that may leave, and at what price: one vector a round."""
    return plan(task).table


# --- what travels ---


@message("admm/centre/1")
class Centre:
    """The publication: the proximal centre, which is the model, and how many rounds made it."""

    weights: Public[Array]
    version: Public[Integers]


@contribution("admm/update/1", masked="admm/masked/1", total="admm/total/1")
class Update:
    """What a device says of a round: how far it would go from the centre."""

    update: Release[Integers]
    version: Public[Integers]


# --- the device: Algorithm 2 ---


def contribute(task: Task, batch: Private[Samples], centre: Centre) -> Mapping[str, Private[Any]]:
    """One update, before its noise; nothing of it is kept for the next round (review, R1)."""
    fixed = plan(task)
    return {"update": batch.map(lambda samples: local_update(fixed, centre.weights, samples)[None])}


def local_update(fixed: Plan, weights: Array, batch: Samples) -> Array:
    """w_i - v after K gradient steps on l(D_i; w) + rho/2 |w - v|^2 from v, flat: (12) with a public centre.

    Replacing one sample moves it by at most `fixed.stability`: samples are brought into the ball and the centre into
    its own first, so no publication takes the loss where it is not convex. In float64 on a device, for float32 would
    cost grid steps.
    """
    xp = namespace(weights, batch.x)
    wide = np.float64 if xp is np else xp.float32
    centre = bring(weights.astype(wide), float(fixed.settings.radius))
    x = finite_or_zero(batch.x.astype(wide), most=LARGEST_NUMBER, rows=True)
    held = Samples(shorten(x, fixed.bound, axis=-1), batch.y)
    moved = xp.zeros_like(centre)
    for _ in range(fixed.settings.local_steps):
        slope = fixed.model.gradient_sum(centre + moved, held) + fixed.rho * moved
        moved = moved - fixed.rate * slope
    return moved.reshape(-1)


def bring(weights: Array, radius: float) -> Array:
    """Finite, and within the ball of this radius: whatever the server published, and on the server itself."""
    return shorten(finite_or_zero(weights, most=LARGEST_NUMBER), radius)


# --- the server: Algorithm 1 ---


@struct
class Consensus:
    """The server's state. Everything in it is post-processing of releases."""

    weights: Array
    velocity: Array
    rounds: Integers
    devices: Integers
    """Updates behind all rounds."""
    waiting: Array
    """The sum of the updates that wait for the barrier (local variant only)."""
    heard: Integers


def publish_initial(task: Task, ctx: Context) -> Step[Consensus]:
    zeros, none = np.zeros(plan(task).model.shape, np.float32), np.int32(0)
    return Step(Consensus(zeros, zeros, none, none, zeros, none), (Publish(Centre(zeros, none)),))


def apply_total(task: Task, state: Consensus, total: Any, ctx: Context) -> Step[Consensus]:
    """A cohort's sum closes a round."""
    fixed = plan(task)
    xp = namespace(total.update.value, state.weights)
    devices = xp.asarray(total.devices).astype(xp.int32)
    mean = fixed.grid.decode(total.update.value) / devices.astype(xp.float32)
    on_time = _on_time(fixed, xp, state, total.version)
    return _close(task, fixed, xp, state, mean.reshape(state.weights.shape), devices, on_time)


def apply_update(task: Task, state: Consensus, update: Update, ctx: Context) -> Step[Consensus]:
    """The local variant: updates add up until `barrier` of them are there, and then close a round."""
    fixed = plan(task)
    xp = namespace(update.update.value, state.weights)
    on_time = _on_time(fixed, xp, state, update.version)
    value = update.update.value
    value = value if fixed.grid is COUNTS else fixed.grid.decode(value)
    added = state.waiting + xp.where(on_time, value.reshape(state.weights.shape), 0).astype(xp.float32)
    heard = state.heard + on_time.astype(xp.int32)
    full = heard >= fixed.settings.barrier
    waiting = replace(state, waiting=xp.where(full, 0, added).astype(xp.float32), heard=xp.where(full, 0, heard))
    mean = added / xp.maximum(heard, 1).astype(xp.float32)
    return _close(task, fixed, xp, waiting, mean, heard, full)


def _on_time(fixed: Plan, xp: Any, state: Consensus, version: Integers) -> Array:
    """Bounded delay: whether an answer to the centre of that version still counts."""
    age = xp.asarray(state.rounds - version)
    return age <= (2**31 - 1 if fixed.settings.delay is None else fixed.settings.delay)


def _close(
    task: Task, fixed: Plan, xp: Any, state: Consensus, mean: Array, devices: Integers, happens: Array
) -> Step[Consensus]:
    """(11): move by the mean update, relaxed and with momentum, then the closed form of the regulariser."""
    settings = fixed.settings
    velocity = float(settings.momentum) * state.velocity + float(settings.relaxation) * mean
    moved = bring(consensus(xp, state.weights + velocity, fixed), float(settings.radius))
    after = replace(
        state,
        weights=xp.where(happens, moved, state.weights).astype(xp.float32),
        velocity=xp.where(happens, velocity, state.velocity).astype(xp.float32),
        rounds=(state.rounds + happens.astype(xp.int32)).astype(xp.int32),
        devices=(state.devices + xp.where(happens, devices, 0)).astype(xp.int32),
    )
    stops = stop_after(task.stop.steps, after.rounds, "round", "been added up")
    return Step(after, (Publish(Centre(after.weights, after.rounds)), *stops))


def consensus(xp: Any, weights: Array, fixed: Plan) -> Array:
    """argmin over w of t (l1 |w|_1 + l2/2 |w|^2) + 1/2 |w - weights|^2: the elastic net shrinks, then scales."""
    t = fixed.shrinkage
    shrunk = xp.sign(weights) * xp.maximum(abs(weights) - t * fixed.l1, 0) if fixed.l1 else weights
    return shrunk / (1 + t * fixed.l2)


# --- what nobody chose ---


def advise(task: Task, shape: Shape | None) -> Task:
    """The task with a pull `rho`, a relaxation and momentum, where it names no `rho`: public rules (R4).

    One local step a round, of the length that is stable for `rho` = the smoothness of the batch; the server goes so
    much further that all rounds together travel as far as noise allows.
    """
    if shape is None or "rho" in task.protocol:
        return task
    batch = int(task.protocol["batch"])
    model = read_model(task.model, task.features.dimension, task.classes, task.labels.bound, ("l1", "l2"))
    smooth = model.smoothness(float(task.features.norm.bound)) or 1.0
    barrier = {} if task.masking is not None else {"barrier": min(shape.devices, 1_000_000)}
    chosen = {"local_steps": 1, "momentum": shape.momentum, **barrier, "rho": short(batch * smooth), **task.protocol}
    if "relaxation" in chosen:
        return task.with_(protocol=chosen)
    fixed = plan(task.with_(protocol=chosen))
    together = task.masking.cohort if task.masking is not None else fixed.settings.barrier
    check_ins = shape.check_ins(task, batch)
    row, each = fixed.table["update"], fixed.rate * batch
    c = shape.longest_step(
        noise=deviation_of_mean(row.noise_variance, check_ins) * float(row.grid.step) / each,
        rounds=max(1, check_ins // min(together, shape.devices)),
        momentum=float(fixed.settings.momentum),
        smoothness=smooth,
    )
    return task.with_(protocol={**chosen, "relaxation": short(c / each)})


def uses(task: Task, shape: Shape) -> int:
    """Enough for the planned rounds of everybody."""
    together = shape.devices if task.masking is None else min(task.masking.cohort, shape.devices)
    return max(1, math.ceil(shape.rules.rounds * together / shape.devices))


device = device_role(Update, Centre, contribute)
server = Role(start=publish_initial, on={Update.total: apply_total, Update: apply_update})
protocol = Protocol(
    "admm",
    device,
    server,
    mechanisms,
    model=lambda task, state: state.weights,  # the centre itself
    shapes=lambda task: {"update": (math.prod(plan(task).model.shape),)},
    progress=lambda task, state: Tally(int(state.devices)),
    contribution=Update,
    settings=Settings,
    advise=advise,
    uses=uses,
)
