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
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, namespace, struct
from crowdml.errors import TaskError
from crowdml.messages import SERVER, Public, message
from crowdml.models import Model, read_model
from crowdml.privacy.grid import COUNTS, Grid
from crowdml.privacy.laws import DiscreteGaussian
from crowdml.privacy.mechanisms import (
    Exposed,
    GaussianStable,
    Mechanism,
    SkellamStable,
)
from crowdml.privacy.private import Masked, Private, Release, Rows
from crowdml.privacy.sensitivity import L1
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
from crowdml.protocols.parts import into_ball, pin_grid, so_many, stable_row
from crowdml.task import Task, between, positive, read_section, show

MISUSED = {
    "svm": "the plain hinge is not smooth: one replaced sample moved the answer 17.6 times as far as claimed (G5). "
    'Take model.kind = "smooth-svm", or run it as published in the simulator',
    "least-squares": "the squared loss has no bound on its slope, so Lemma 1 fails: 8.17 where 0.2 is claimed (G4). "
    'Take model.kind = "linear" (Huber\'s loss), or run it as published in the simulator',
    "mlp": "a perceptron's loss is neither convex nor smooth, so local steps are not stable (G5). "
    "Take it to a protocol that clips each sample's gradient",
}


@dataclass(frozen=True)
class Settings:
    """The `[protocol]` table of a task."""

    batch: int
    rho: Fraction
    local_steps: int = 10
    local_rate: Fraction | None = None
    relaxation: Fraction = Fraction(1)
    momentum: Fraction = Fraction(0)
    barrier: int = 1
    delay: int | None = None
    radius: Fraction = Fraction(1000)
    buffer: int = 0
    kind: str = "admm"

    def __post_init__(self) -> None:
        between("protocol.batch", self.batch, 1, 100_000)
        positive("protocol.rho", self.rho)
        between("protocol.local_steps", self.local_steps, 1, 1000)
        if self.local_rate is not None:
            positive("protocol.local_rate", self.local_rate)
        positive("protocol.relaxation", self.relaxation)
        between("protocol.momentum", self.momentum, 0, 0.99)
        between("protocol.barrier", self.barrier, 1, 1_000_000)
        if self.delay is not None:
            between("protocol.delay", self.delay, 0, 2**31 - 1)
        between("protocol.radius", self.radius, 1e-6, 1e6)
        if self.buffer:
            between("protocol.buffer", self.buffer, self.batch, 10_000_000)

    @property
    def capacity(self) -> int:
        """Samples that wait on a device: a round uses them all, and another one uses the same again."""
        return self.buffer or self.batch


@dataclass(frozen=True)
class Plan:
    """What a task fixes once and for all: read by handlers, never written."""

    settings: Settings
    model: Model
    table: Mapping[str, Mechanism]
    grid: Grid
    l1: float
    l2: float
    masked: bool
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
    settings = read_section(Settings, task.protocol, "protocol")
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
    masked = task.masking is not None
    if task.privacy.mechanism == "none":
        covers = Rows(0, settings.batch)
        plain = "where the model would go from here, as it is: anyone can work back to samples"
        table: Mapping[str, Mechanism] = {"update": Exposed(L1(Fraction(0)), covers, plain)}
        return Plan(settings, model, table, COUNTS, l1, l2, False, rate, stability, bound)
    row = stable_row(
        task, "update", Rows(0, settings.batch), math.prod(model.shape), stability=stability,
        device_stability=settings.batch * stability, float_error=_float_error(settings, model, bound, rate),
        releases=task.privacy.uses, promise=_promise,
    )  # fmt: skip
    return Plan(settings, model, {"update": row}, row.grid, l1, l2, masked, rate, stability, bound)


def _promise(masked: bool) -> str:
    whole = "as part of a cohort's sum that is " if masked else ""
    return f"where the model would go from here, {whole}blurred with noise"


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


@message("admm/masked/1")
class MaskedUpdate:
    """What a device says of a round, under masks: how far it would go from the centre."""

    update: Masked[Integers]


@message("admm/total/1")
class UpdateTotal:
    """What the server hears of a cohort."""

    update: Release[Integers]
    devices: Public[Integers]
    version: Public[Integers]


@message("admm/update/1")
class Update:
    """The same of one device, with all its noise: the local variant."""

    update: Release[Integers]
    version: Public[Integers]


# --- the device: Algorithm 2 ---


def contribute(task: Task, waiting: Private[Samples] | None, centre: Centre, ctx: Context) -> Step[Any]:
    """Answer a publication with one update; nothing of it is kept for the next round (review, R1)."""
    if waiting is None:  # a late or repeated answer
        return Step(None)
    fixed = plan(task)
    moved = waiting.map(lambda batch: local_update(fixed, centre.weights, batch)[None])
    if fixed.masked:
        return Step(None, (Send(SERVER, MaskedUpdate(ctx.masked("update", moved))),))
    if "none" in {row.kind for row in fixed.table.values()}:  # contributions of an exposed row are its samples'
        moved = waiting.map(lambda batch: _spread(local_update(fixed, centre.weights, batch), len(batch)))
    return Step(None, (Send(SERVER, Update(ctx.release("update", moved), centre.version)),))


def _spread(update: Array, count: int) -> Array:
    """One row a sample that adds up to the update."""
    xp = namespace(update)
    return xp.concatenate([update[None], xp.zeros((count - 1, *update.shape), update.dtype)])


def local_update(fixed: Plan, weights: Array, batch: Samples) -> Array:
    """w_i - v after K gradient steps on l(D_i; w) + rho/2 |w - v|^2 from v, flat: (12) with a public centre.

    Replacing one sample moves it by at most `fixed.stability`: samples are brought into the ball and the centre into
    its own first, so no publication takes the loss where it is not convex. In float64 on a device, for float32 would
    cost grid steps.
    """
    xp = namespace(weights, batch.x)
    wide = np.float64 if xp is np else xp.float32
    centre = bring(xp, weights.astype(wide), float(fixed.settings.radius))
    held = Samples(into_ball(batch.x.astype(wide), fixed.bound), batch.y)
    moved = xp.zeros_like(centre)
    for _ in range(fixed.settings.local_steps):
        slope = fixed.model.gradient_sum(centre + moved, held) + fixed.rho * moved
        moved = moved - fixed.rate * slope
    return moved.reshape(-1)


def bring(xp: Any, weights: Array, radius: float) -> Array:
    """Finite, and within the ball of this radius: whatever the server published, and on the server itself."""
    whole = xp.where(abs(weights) <= 1e9, weights, 0)  # false for NaN
    size = xp.sqrt((whole * whole).sum())
    return whole * (radius / xp.maximum(size, radius))


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
    """Of the local variant: the updates that wait for the barrier, added up."""
    heard: Integers


def publish_initial(task: Task, ctx: Context) -> Step[Consensus]:
    zeros, none = np.zeros(plan(task).model.shape, np.float32), np.int32(0)
    return Step(Consensus(zeros, zeros, none, none, zeros, none), (Publish(Centre(zeros, none)),))


def apply_total(task: Task, state: Consensus, total: UpdateTotal, ctx: Context) -> Step[Consensus]:
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
    moved = bring(xp, consensus(xp, state.weights + velocity, fixed), float(settings.radius))
    after = replace(
        state,
        weights=xp.where(happens, moved, state.weights).astype(xp.float32),
        velocity=xp.where(happens, velocity, state.velocity).astype(xp.float32),
        rounds=(state.rounds + happens.astype(xp.int32)).astype(xp.int32),
        devices=(state.devices + xp.where(happens, devices, 0)).astype(xp.int32),
    )
    effects: list[Any] = [Publish(Centre(after.weights, after.rounds))]
    if task.stop.steps is not None:
        effects.append(Stop(so_many(task.stop.steps, "round", "been added up"), after.rounds >= task.stop.steps))
    return Step(after, tuple(effects))


def consensus(xp: Any, weights: Array, fixed: Plan) -> Array:
    """argmin over w of t (l1 |w|_1 + l2/2 |w|^2) + 1/2 |w - weights|^2: the elastic net shrinks, then scales."""
    t = fixed.shrinkage
    shrunk = xp.sign(weights) * xp.maximum(abs(weights) - t * fixed.l1, 0) if fixed.l1 else weights
    return shrunk / (1 + t * fixed.l2)


def model_weights(task: Task, state: Consensus) -> Array:
    """The model is the centre itself."""
    return state.weights


def tally(task: Task, state: Consensus) -> Tally:
    """Nothing is counted but updates."""
    return Tally(int(state.devices))


def expected(task: Task) -> Mapping[str, Mapping[str, Field]]:
    """What the server may hear. Noise beyond its bound has a chance below 2^-64, so no honest device is refused."""
    fixed = plan(task)
    version = {"version": Field("<i4", (), 0, 2**31 - 1)}
    row = fixed.table["update"]
    if isinstance(row, SkellamStable):
        return {"admm/total/1": {**version, **total_fields(fixed.table, task)}}
    if not isinstance(row, GaussianStable):
        raise TaskError("row 'update' has no noise: the simulator runs such a task, a server does not.")
    far = row.reach + DiscreteGaussian(row.sigma).tail(64)
    return {"admm/update/1": {**version, "update": Field("<i4", (row.length,), -far, far)}}


device = Role(start=wait, on={Sensed: check_out, Centre: contribute})
server = Role(start=publish_initial, on={UpdateTotal: apply_total, Update: apply_update})
protocol = Protocol(
    "admm",
    device,
    server,
    mechanisms,
    check=plan,
    batch=lambda task: plan(task).settings.batch,
    model=model_weights,
    settle=lambda task: pin_grid(task, plan(task).grid),
    expected=expected,
    progress=tally,
    masked=(MaskedUpdate, UpdateTotal),
)
