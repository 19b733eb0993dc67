"""The Crowd-ML library of 2017: devices take several steps of their own between two check-ins.

Hamm, Luken & Xie 2017, Algorithm 1. A device checks the weights out, takes S_d steps on minibatches of B_d of its
samples, and checks in where it got to; the server waits for B_s of them and moves. Privacy review, section 5.

Where we differ, and why:
- What leaves is the update u, the mean of the clipped gradients along the device's own path, and not w: the public
  rest (where the device began, the steps, the shrinking by lambda) is worked out on both sides. So |u| <= clip whatever
  the path was (L3), the noise shrinks with the steps, and the first check-in costs what the last one does.
- A device always begins at the published weights; no momentum, and no squares of gradients outlive a check-in (R1).
- `privacy.unit = "device"` charges what a whole device pays for all its check-ins (L8); "sample" charges by the
  stability of convex, smooth losses whose steps are short enough, 2 C eta / B_d for each step that uses the sample
  (L5). Where that does not hold (a network, a kink, a clip below the slope) one sample can bend the path as far as all
  of them: it pays so.
- The server moves when B_s check-ins of this round are there; those of an older round do not count, and do not stand
  in for others as in Algorithm 1, which may divide by zero (L9). Or they count, by age (Nguyen et al. 2022).
- Noise that changes over a device's check-ins is always the same noise, on a public share of the update: each
  check-in is charged its own price, and the server weighs what it hears by what the noise left of it.
- Weights that are no longer finite stop the task, and the last good ones stay published.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from itertools import takewhile
from typing import Annotated, Any

import numpy as np

from crowdml.arrays import LARGEST_NUMBER, Array, Integers, Samples, finite_or_zero, fold, is_usable, namespace, struct
from crowdml.channels import NUMBER, Field, contribution, fields_heard, heard_by, let_out
from crowdml.errors import TaskError
from crowdml.features.norms import shorten
from crowdml.messages import SERVER, Public, message
from crowdml.models import Model, longest_gradient, read_model
from crowdml.privacy.grid import COUNTS, Grid
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.private import Private, Release, Rows
from crowdml.privacy.rows import FINEST_CLIP, Promise, noise_norm, stable_row, sum_row
from crowdml.protocol import (
    Context,
    Protocol,
    Publish,
    Role,
    Rule,
    Send,
    Sensed,
    Step,
    Stop,
    Tally,
    check_out,
    stop_after,
    wait,
)
from crowdml.robust import Combine
from crowdml.settings import Between, OneOf, Positive, between, read_kind, show
from crowdml.shape import Shape, deviation_of_mean, short
from crowdml.task import Task

RADIUS = 1000.0
"""Where samples pay by stability, a device begins no further from zero: what floats lose is bounded by it."""
BETAS = (0.9, 0.99)
"""Decay rates of the server's Adam: first and second moment."""

GOES = Promise(
    "where the model would go from here, blurred with noise",
    "where the model would go from here, in a cohort's sum that is blurred with noise",
    "where the model would go from here, as it is: anyone can work back to samples",
)
LEAST_SHARE = Fraction(1, FINEST_CLIP)
"""A schedule ends at this share of an update: a smaller one rounds to zero on the finest grid."""
MOST_CHECK_INS = 2**16
"""The most check-ins that a schedule may have."""

ADAPTIVE = ("adagrad", "rmsprop")
COUNTERS = ("rounds", "check-ins", "trips", "steps", "path")


@dataclass(frozen=True)
class Rate:
    """`{ schedule = "1/sqrt(t)", c = 0.5, counter = "rounds" }`: the size of a device's own steps.

    t counts from 1: the server's rounds (t_s), the check-ins it has taken (s_s), the device's own check-ins ("trips",
    t_d), the steps within one (s_d), or all steps of the device, S_d (t_d - 1) + s_d, as Algorithm 1 does ("path").
    """

    c: Annotated[Fraction, Positive()]
    schedule: Annotated[str, OneOf("constant", "1/t", "1/sqrt(t)", *ADAPTIVE)] = "constant"
    counter: Annotated[str, OneOf(*COUNTERS)] = "rounds"


@dataclass(frozen=True)
class Noise:
    """`{ schedule = "geometric", ratio = 1.05 }`: how the noise changes from one check-in of a device to the next.

    "constant": an update always has the same noise, and so the weights have noise in proportion to the step.
    "geometric": `ratio` times as much in every check-in. "weights": the weights have always the same noise, and the
    update has the more of it the shorter the steps get.
    """

    schedule: Annotated[str, OneOf("constant", "geometric", "weights")] = "constant"
    ratio: Fraction | None = None

    def __post_init__(self) -> None:
        if (self.ratio is not None) != (self.schedule == "geometric"):
            raise TaskError(
                f'protocol.noise.ratio with protocol.noise.schedule = "{self.schedule}": "geometric" has one, by which '
                "the noise grows (or, below 1, shrinks) in every check-in, and nothing else has."
            )
        if self.ratio is not None and not Fraction(1, 10) <= self.ratio <= 10:
            raise TaskError(f"protocol.noise.ratio = {float(self.ratio):g}: from 0.1 to 10.")


@dataclass(frozen=True)
class Settings:
    """The `[protocol]` table of a task."""

    batch: Annotated[int, Between(1, 1_000_000)]
    rate: Rate
    minibatch: int = 0
    local_steps: Annotated[int, Between(1, 1000)] = 1
    clip: Annotated[Fraction, Positive()] | None = None
    update_clip: Annotated[Fraction, Positive()] | None = None
    server_batch: Annotated[int, Between(1, 1_000_000)] = 1
    stale: Annotated[str, OneOf("refuse", "weigh")] = "refuse"
    optimiser: Annotated[str, OneOf("average", "momentum", "adam")] = "average"
    server_rate: Annotated[Fraction, Positive()] = Fraction(1)
    momentum: Annotated[Fraction, Between(0, 0.999)] = Fraction(9, 10)
    buffer: int = 0
    noise: Noise = Noise()
    combine: Combine | None = None
    kind: str = "local_updates"

    def __post_init__(self) -> None:
        if self.minibatch and (self.minibatch < 1 or self.batch % self.minibatch):
            raise TaskError(
                f"protocol.minibatch = {self.minibatch}: a batch of {self.batch} samples is cut into minibatches of "
                "one size. Choose a divisor of it."
            )
        if self.buffer:
            between("protocol.buffer", self.buffer, self.batch, 10_000_000)

    @property
    def size(self) -> int:
        """B_d."""
        return self.minibatch or self.batch


@dataclass(frozen=True)
class Plan:
    """What a task fixes once and for all: read by handlers, never written."""

    settings: Settings
    model: Model
    table: Mapping[str, Mechanism]
    grid: Grid
    l2: float
    clip: float
    """C: no sample's gradient is longer. Infinite without noise: nothing is clipped unless the task says so."""
    stable: bool
    """Whether a sample pays by stability: then nothing is clipped, and steps are computed in float64."""
    bound: float
    """On |x|: longer samples are brought to it where they pay by stability."""

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped one by one. A model's own bound holds by itself; the door clips the update."""
        return self.settings.clip is not None and not self.stable

    def rates(self, xp: Any, count: Any) -> Array:
        """[S_d]: the sizes of a check-in's steps, whose counter stands at `count` in the first; of its first column
        where they adapt themselves."""
        settings, kind = self.settings, xp.float32 if xp is not np else np.float64
        along = xp.arange(settings.local_steps).astype(kind)
        still = settings.rate.counter not in ("steps", "path")
        t = xp.asarray(count).astype(kind) + (xp.zeros_like(along) if still else along)
        c, schedule = float(settings.rate.c), settings.rate.schedule
        if schedule == "1/t":
            return c / t
        return c / xp.sqrt(t) if schedule == "1/sqrt(t)" else xp.full_like(t, c)

    def reach(self, xp: Any, count: Any) -> tuple[Array, Array]:
        """H and the shrinking: after its steps a device is at `shrinking * start - H * u`, u the update it gives."""
        rates = self.rates(xp, count)
        left = xp.cumprod((1 - self.l2 * rates)[::-1])[::-1]  # what is left of the weights before each step
        after = xp.concatenate([left[1:], xp.ones_like(left[:1])])
        return (rates * after).sum(), left[0]


@lru_cache(maxsize=256)
def plan(task: Task) -> Plan:
    """Read the task; refuse what this protocol cannot run."""
    settings = read_kind(Settings, task.protocol, "protocol")
    if task.as_published:
        raise TaskError(
            "as_published = true: the paper adds noise of a stated deviation and names no epsilon. `crowdml reproduce "
            "hamm2017/fig2` runs it, with its warning and its real price; leave the line out for the sound form."
        )
    l2 = task.model.get("l2", 0)
    if not isinstance(l2, (int, float, Fraction)) or isinstance(l2, bool) or l2 < 0:
        raise TaskError(f"model.l2 = {show(l2)}: a number, 0 or more.")
    if l2 * settings.rate.c > 1:
        raise TaskError(
            f"model.l2 = {show(l2)} with protocol.rate.c = {float(settings.rate.c):g}: their product is at most 1, or "
            "a step overshoots zero. Lower one of them."
        )
    model = read_model(task.model, task.features.dimension, task.classes, task.labels.bound)
    if task.privacy.mechanism != "none":
        for name in sorted(set(task.privacy.epsilon) - {"update"}):
            raise TaskError(f"privacy.epsilon.{name}: local_updates lets out update, and nothing else.")
        if "update" not in task.privacy.epsilon:
            raise TaskError(
                f"privacy.epsilon.update is missing: what a {task.privacy.unit} pays in all the check-ins that use it."
            )
    if task.stop.error is not None:
        raise TaskError(f"stop.error = {float(task.stop.error):g}: nobody counts errors here; stop by stop.steps.")
    if task.masking is not None or settings.combine is not None:
        _check_together(settings, "under masks" if task.masking is not None else "with protocol.combine")
    return _plan(task, settings, model, float(l2))


def _check_together(settings: Settings, when: str) -> None:
    """Refuse what does not go with a sum of several devices' updates, or with a rule that combines them."""
    if settings.server_batch != 1:
        whole = "a cohort is the server's batch" if settings.combine is None else "protocol.combine.uploads says it"
        raise TaskError(f"protocol.server_batch = {settings.server_batch}: {when} {whole}. Leave this one out.")
    if settings.rate.counter not in ("rounds", "steps"):
        raise TaskError(
            f'protocol.rate.counter = "{settings.rate.counter}": {when} the server hears a sum, so all '
            'devices of a cohort take equal steps. Say "rounds" or "steps".'
        )
    if settings.noise.schedule != "constant":
        raise TaskError(
            f'protocol.noise.schedule = "{settings.noise.schedule}": {when} the server hears a sum of devices '
            "that are at unlike check-ins, and could not tell their shares apart. Leave the line out."
        )
    if settings.combine is not None and settings.stale != "refuse":
        raise TaskError(
            f'protocol.stale = "{settings.stale}": {when} a round takes uploads of its own weights alone. Leave the '
            "line out."
        )


def _plan(task: Task, settings: Settings, model: Model, l2: float) -> Plan:
    privacy, bound = task.privacy, float(task.features.norm.bound)
    clips, plain = settings.clip is not None, privacy.mechanism == "none"
    clip = math.inf if plain and not clips else longest_gradient(model, "l2", bound, settings.clip)
    stability = None if plain or privacy.unit == "device" else _stability(task, settings, model, l2)
    constant = plain or settings.noise.schedule == "constant"
    shares = None if constant else schedule_of(task, settings, model, l2)
    times = privacy.uses
    if privacy.unit == "device" and not plain:
        times = releases(task, settings) if shares is None else len(shares)
    covers = Rows(0, settings.batch)
    if stability is None:  # ONE clipped contribution: all samples of the device together move it by 2 clips (R8)
        row = sum_row(
            task, "update", bound=_longest_update(task, settings, clip), shape=model.shape, covers=covers,
            promise=GOES, whole=True, releases=times, shares=shares,
        )  # fmt: skip
    else:
        row = stable_row(
            task, "update", stability=stability, device_stability=2 * model.gradient_bound("l2", bound),
            float_error=_float_error(settings, model, bound), shape=model.shape, covers=covers,
            promise=GOES, releases=times, shares=shares,
        )  # fmt: skip
    return Plan(settings, model, {"update": row}, row.grid, l2, clip, stability is not None, bound)


def _longest_update(task: Task, settings: Settings, clip: float) -> float:
    """How long an update may be in the norm of the task's noise."""
    if noise_norm(task) == "l2":
        return clip if settings.update_clip is None else min(clip, float(settings.update_clip))
    if settings.update_clip is None:
        raise TaskError(
            'protocol.update_clip is missing: "discrete-laplace" noise is calibrated to the l1 norm (L2), and this '
            "says how long an update may be in it."
        )
    return float(settings.update_clip)


def releases(task: Task, settings: Settings) -> int:
    """How many check-ins one unit pays for: those that use a sample, or all that a device's budget lets it make."""
    if task.privacy.unit == "sample":
        return task.privacy.uses
    most = _most_check_ins(task, settings)
    if most is None:
        raise TaskError(
            'privacy.budget is missing: with privacy.unit = "device" privacy.epsilon.update is for all check-ins of a '
            "device together, and privacy.budget.samples says how many they are."
        )
    return most


def _most_check_ins(task: Task, settings: Settings) -> int | None:
    """T_d: as many as the samples that a device may give allow."""
    budget = task.privacy.budget
    if budget is None:
        return None
    return task.privacy.uses * max(1, budget.samples // settings.batch)


def schedule_of(task: Task, settings: Settings, model: Model, l2: float) -> tuple[Fraction, ...]:
    """What share of an update each check-in of a device gives: its noise is the inverse of that, and the least one 1.

    It ends with the device's budget, or where a share is as good as nothing. One that does neither is refused: nothing
    bounds what it would cost in all.
    """
    most, noise = _most_check_ins(task, settings), settings.noise
    at = _geometric(noise.ratio, most) if noise.ratio is not None else _like_the_steps(settings, model, l2)
    if (most is None or most > MOST_CHECK_INS) and at(MOST_CHECK_INS) >= LEAST_SHARE:
        many = "without end" if most is None else f"{most:,} times"
        raise TaskError(
            f"protocol.noise.schedule = {show(noise.schedule)}: a device would check in {many}, and nothing bounds the "
            f"total of so many: this noise grows too slowly. Set privacy.budget.samples so that there are at most "
            f"{MOST_CHECK_INS:,}, or let it grow faster."
        )
    shares = (at(trip) for trip in range(MOST_CHECK_INS if most is None else most))
    return tuple(takewhile(lambda share: share >= LEAST_SHARE, shares))


def _geometric(ratio: Fraction, most: int | None) -> Callable[[int], Fraction]:
    last, base = 0, float(ratio)
    if ratio < 1:
        if most is None:
            raise TaskError(
                f"protocol.noise.ratio = {base:g}: noise that shrinks in every check-in has no finite total without a "
                "last one. Say how many there are by privacy.budget.samples, or let it grow."
            )
        last = most - 1
        if base**last < LEAST_SHARE:
            raise TaskError(
                f"protocol.noise.ratio = {base:g}: over the {most:,} check-ins of privacy.budget.samples noise would "
                f"begin at more than {FINEST_CLIP:,} times its last, and hide all of the first updates. Bring the "
                "ratio nearer to 1, or lower the budget."
            )
    return lambda trip: _short(base ** (last - trip))


def _like_the_steps(settings: Settings, model: Model, l2: float) -> Callable[[int], Fraction]:
    if settings.rate.counter not in ("trips", "path", "steps"):
        raise TaskError(
            f'protocol.rate.counter = "{settings.rate.counter}" with protocol.noise.schedule = "weights": how long the '
            'steps of a device will be depends on others then, and so would its price. Say "trips" or "path".'
        )
    shape, none = Plan(settings, model, {}, COUNTS, l2, 0.0, False, 0.0), np.int32(0)

    def reach(trip: int) -> float:
        return float(shape.reach(np, first_count(shape, none, none, trip))[0])

    first = reach(0)
    return lambda trip: _short(reach(trip) / first)


def _short(share: float) -> Fraction:
    """Rounded down to a short fraction: shares are added up exactly."""
    return Fraction(math.floor(min(share, 1.0) * 2**20), 2**20)


def stability_of(settings: Settings, model: Model, bound: float, l2: float) -> float | None:
    """How far one replaced sample moves the update u in the l2 norm (L5); None where nothing bounds that but a clip.

    A step on a convex, L-smooth loss brings two paths no further apart if eta <= 2 / (L + lambda); the step that uses
    the sample parts them by 2 G eta / B_d. u is the path over H, so the largest sum of shares eta / H over the steps
    that use one minibatch counts. It is largest in the first check-in: later steps are shorter, which lets H / eta
    grow, and along a path more even.
    """
    if settings.clip is not None and float(settings.clip) < _slope(model, bound):
        return None  # a clipped loss is not convex
    smooth = model.smoothness(bound) if model.convex else None
    if smooth is None or settings.rate.schedule in ADAPTIVE or settings.update_clip is not None:
        return None
    c = float(settings.rate.c)
    if settings.local_steps > 1 and c * (smooth + l2) > 2:  # one step has no path to bend
        return None
    shape = Plan(settings, model, {}, COUNTS, l2, 0.0, True, bound)
    rates, (reach, _) = shape.rates(np, 1), shape.reach(np, 1)
    parts = settings.batch // settings.size
    most = max(float(rates[first::parts].sum()) for first in range(min(parts, settings.local_steps)))
    return 2 * _slope(model, bound) * most / (settings.size * float(reach))


def _slope(model: Model, bound: float) -> float:
    return model.gradient_bound("l2", bound) if model.bounded else math.inf


def _stability(task: Task, settings: Settings, model: Model, l2: float) -> float | None:
    bound = float(task.features.norm.bound)
    found = stability_of(settings, model, bound, l2) if task.features.norm.kind == "l2" else None
    if found is None and settings.rate.schedule in ADAPTIVE and model.convex:
        raise TaskError(
            f'protocol.rate.schedule = "{settings.rate.schedule}": steps that follow the data void the price of a '
            'sample (L8). Take "1/sqrt(t)", or protect whole devices: privacy.unit = "device".'
        )
    if task.privacy.mechanism == "discrete-laplace":
        return None  # rounding a stable update is priced in the l2 norm
    return found


def _float_error(settings: Settings, model: Model, bound: float) -> Fraction:
    """How far float64 may carry two updates apart beyond exact arithmetic, in the l2 norm.

    A mean gradient carries the rounding of scores x.w and of a sum over a minibatch: below 2^-50 of (entries + B_d)
    times the largest number in it, for each entry. u is a mean of them, along a path that they and the rounding of w
    move: no step parts two paths, eta L <= 2, so S_d steps move the last gradient by at most 2 S_d + L S_d as much.
    """
    length, smooth = math.prod(model.shape), model.smoothness(bound) or 0.0
    each = 2.0**-50 * (length + settings.size + 8) * math.sqrt(length) * (1 + bound) ** 2 * (1 + RADIUS)
    return Fraction(2 * (1 + (2 + smooth) * settings.local_steps) * each)


def mechanisms(task: Task) -> Mapping[str, Mechanism]:
    """Everything that may leave, and at what price: one vector a check-in."""
    return plan(task).table


# --- what travels ---


@message("local/weights/1")
class Weights:
    """The publication: the weights, the rounds that made them, and the check-ins that these took."""

    weights: Public[Array]
    version: Public[Integers]
    taken: Public[Integers]


@contribution("local/update/1", masked="local/masked/1", total="local/total/1")
class Update:
    """A check-in: the mean of the clipped gradients along the device's path, and where its counter stood."""

    update: Release[Integers]
    version: Public[Integers]
    count: Public[Integers]


@contribution("local/scheduled/1")
class ScheduledUpdate:
    """A check-in under noise that changes: a share of the update, and the check-in that says which."""

    update: Release[Integers]
    version: Public[Integers]
    count: Public[Integers]
    trip: Public[Integers]


# --- the device ---


def contribute(task: Task, waiting: Private[Samples] | None, public: Weights, ctx: Context) -> Step[Any]:
    """Answer a check-out with one update; nothing of it is kept for the next one (R1)."""
    if waiting is None:  # a late or repeated answer
        return Step(None)
    fixed = plan(task)
    count = first_count(fixed, public.version, public.taken, ctx.trip)

    def moved(batch: Samples) -> Array:
        return local_update(fixed, public.weights, batch, count)[None]

    row, rows = fixed.table["update"], {"update": waiting.map(moved)}
    if (check_ins := row.check_ins) is None:
        said = let_out(Update, task, ctx, rows, version=public.version, count=count)
        return Step(None, (Send(SERVER, said),))
    trip = namespace(public.version).asarray(ctx.trip).astype(np.int32)
    said = let_out(ScheduledUpdate, task, ctx, rows, version=public.version, count=count, trip=trip)
    made = f"This device has made the {check_ins:,} check-in{'s' if check_ins > 1 else ''} of its noise schedule."
    rule = Rule("schedule", made, (("check-ins", check_ins),))
    return Step(None, (Send(SERVER, said), Stop(rule, trip + 1 >= check_ins)))


def first_count(fixed: Plan, version: Integers, taken: Integers, trip: Any) -> Integers:
    """The counter of the rate at the first local step of a check-in: 1 or more, whatever the server published.

    One below zero would have steps that climb the loss, which part two paths as far as they go.
    """
    xp = namespace(version)
    counter = fixed.settings.rate.counter
    now = {"rounds": version, "check-ins": taken, "trips": trip, "steps": version * 0,
           "path": trip * fixed.settings.local_steps}[counter]  # fmt: skip
    return xp.clip(xp.asarray(now), 0, 2**31 - 2).astype(xp.int32) + xp.int32(1)


def local_update(fixed: Plan, weights: Array, batch: Samples, count: Integers) -> Array:
    """u, flat: the sum of rate * gradient along S_d steps from the published weights, their public part aside, over H.

    Where samples pay by stability, all is brought into its ball first, so that no publication takes the loss where it
    is not convex, and computed in float64 on a device, for float32 would cost grid steps.
    """
    xp = namespace(weights, batch.x)
    settings, model = fixed.settings, fixed.model
    wide = np.float64 if xp is np and fixed.stable else xp.float32
    start, x = finite_or_zero(weights, most=LARGEST_NUMBER).astype(wide), batch.x
    if fixed.stable:
        x = shorten(finite_or_zero(x.astype(wide), most=LARGEST_NUMBER, rows=True), fixed.bound, axis=-1)
        start = shorten(start, RADIUS)
    rates = fixed.rates(xp, count).astype(wide)
    reach, _ = fixed.reach(xp, count)
    parts, adaptive = settings.batch // settings.size, settings.rate.schedule in ADAPTIVE
    held = Samples(x.reshape(parts, settings.size, *x.shape[1:]), batch.y.reshape(parts, settings.size))

    def step(number: Any, path: tuple[Array, ...]) -> tuple[Array, ...]:
        given, kept, *squares = path
        at = kept * start - given
        part = Samples(held.x[number % parts], held.y[number % parts])  # minibatches take turns
        if fixed.clips:
            slope = model.clipped_sum(at, part, fixed.clip) / settings.size
        else:
            slope = model.gradient_sum(at, part) / settings.size
        if adaptive:
            old, new = (1.0, 1.0) if settings.rate.schedule == "adagrad" else (0.9, 0.1)
            squares = [old * squares[0] + new * slope * slope]
            slope = slope / (xp.sqrt(squares[0]) + 1e-8)
        left = 1 - fixed.l2 * rates[number]
        return left * given + rates[number] * slope, left * kept, *squares

    none, whole = xp.zeros_like(start), xp.ones_like(rates[0])
    given, *_ = fold(step, (none, whole, none) if adaptive else (none, whole), settings.local_steps, like=start)
    return (given / reach.astype(wide)).reshape(-1)


# --- the server ---


DIVERGED = Rule(
    "diverged", "the weights were no longer finite: the steps are too long, and the last good weights stay published"
)


@struct
class Averaging:
    """The server's state. Everything in it is post-processing of releases."""

    weights: Array
    velocity: Array
    """First moment, kept by momentum and Adam."""
    squares: Array
    """Second moment, kept by Adam."""
    rounds: Integers
    taken: Integers
    """Check-ins behind all rounds."""
    waiting: Array
    """Updates of this round, each times its H and its weight, added up."""
    heard: Integers
    weighed: Array
    """The weights of these: 1 each, where all have the same noise."""


def publish_initial(task: Task, ctx: Context) -> Step[Averaging]:
    first = plan(task).model.start()
    zeros, none = np.zeros_like(first), np.int32(0)
    state = Averaging(first, zeros, zeros, none, none, zeros, none, np.float32(0))
    return Step(state, (Publish(Weights(first, none, none)),))


def apply_update(task: Task, state: Averaging, update: Update | ScheduledUpdate, ctx: Context) -> Step[Averaging]:
    """Updates add up until B_s of them are there, and then the server moves (Algorithm 1).

    Where their noise is unlike each counts by the inverse of its variance, the square of its share; one that has none
    stands in for nobody.
    """
    fixed = plan(task)
    xp = namespace(update.update.value, state.weights)
    age = xp.maximum(xp.asarray(state.rounds - update.version), 0)
    current = age == 0
    weigh = fixed.settings.stale == "weigh"
    counts = xp.ones_like(current) if weigh else current
    by_age = 1 / xp.sqrt(1 + age.astype(xp.float32)) if weigh else current.astype(xp.float32)
    given, row = xp.ones_like(by_age), fixed.table["update"]
    if isinstance(update, ScheduledUpdate):
        given = xp.asarray(row.share(update.trip))
        counts = counts & (given > 0)
    moved = _moved(fixed, xp, state, update.update.value, update.count, xp.where(given > 0, given, 1))
    added = state.waiting + xp.where(counts, by_age * given**2 * moved, 0).astype(xp.float32)
    weighed = (state.weighed + xp.where(counts, given**2, 0)).astype(xp.float32)
    heard = (state.heard + counts.astype(xp.int32)).astype(xp.int32)
    full = heard >= fixed.settings.server_batch
    mean = added / xp.where(weighed > 0, weighed, 1)
    waiting = replace(
        state,
        waiting=xp.where(full, 0, added).astype(xp.float32),
        heard=xp.where(full, 0, heard).astype(xp.int32),
        weighed=xp.where(full, 0, weighed).astype(xp.float32),
    )
    return _close(task, fixed, xp, waiting, mean, heard, full)


def apply_total(task: Task, state: Averaging, total: Any, ctx: Context) -> Step[Averaging]:
    """The sum of a cohort, or a round that a rule combined, is a round of the server."""
    fixed = plan(task)
    xp = namespace(total.update.value, state.weights)
    devices = xp.asarray(total.devices).astype(xp.int32)
    count = first_count(fixed, xp.asarray(total.version), 0, 0)
    mean = _moved(fixed, xp, state, total.update.value, count, devices.astype(xp.float32))
    current = xp.asarray(state.rounds == total.version) | (fixed.settings.stale == "weigh")
    return _close(task, fixed, xp, state, mean, devices, current)


def own_update(task: Task, state: Averaging, samples: Samples) -> Mapping[str, Array]:
    """The update of a device that holds these samples and takes each of its steps on all of them, in grid steps and
    without noise: rules compare with it."""
    fixed = plan(task)
    whole = replace(fixed, settings=replace(fixed.settings, batch=len(samples), minibatch=0, buffer=0))
    count = first_count(fixed, state.rounds, state.taken, np.int32(0))
    return {"update": local_update(whole, state.weights, samples, count) / float(fixed.grid.step)}


def _moved(fixed: Plan, xp: Any, state: Averaging, value: Array, count: Integers, part: Any = 1) -> Array:
    """How far the mean device went: H u, and what the regulariser took of the weights it began with.

    `part`: how many devices' updates the value is, or what share of one.
    """
    reach, left = (each.astype(xp.float32) for each in fixed.reach(xp, count))
    update = value if fixed.grid is COUNTS else fixed.grid.decode(value)
    update = (update / part).reshape(state.weights.shape)
    return reach * update + (1 - left) * state.weights if fixed.l2 else reach * update


def _close(
    task: Task, fixed: Plan, xp: Any, state: Averaging, mean: Array, devices: Integers, happens: Array
) -> Step[Averaging]:
    """One round of the server: the mean movement through its optimiser, which is free post-processing."""
    settings = fixed.settings
    rate, keep = float(settings.server_rate), float(settings.momentum)
    velocity, squares = state.velocity, state.squares
    if settings.optimiser == "momentum":
        velocity = keep * velocity + mean
        step = velocity
    elif settings.optimiser == "adam":
        t = (state.rounds + 1).astype(xp.float32)
        velocity, squares = BETAS[0] * velocity + (1 - BETAS[0]) * mean, BETAS[1] * squares + (1 - BETAS[1]) * mean**2
        step = velocity / (1 - BETAS[0] ** t) / (xp.sqrt(squares / (1 - BETAS[1] ** t)) + 1e-6)
    else:
        step = mean
    moved = (state.weights - rate * step).astype(xp.float32)
    good = is_usable(moved, LARGEST_NUMBER).all()
    goes = happens & good
    after = replace(
        state,
        weights=xp.where(goes, moved, state.weights).astype(xp.float32),
        velocity=xp.where(goes, velocity, state.velocity).astype(xp.float32),
        squares=xp.where(goes, squares, state.squares).astype(xp.float32),
        rounds=(state.rounds + goes.astype(xp.int32)).astype(xp.int32),
        taken=(state.taken + xp.where(goes, devices, 0)).astype(xp.int32),
    )
    stops = (*stop_after(task.stop.steps, after.rounds, "round", "been made"), Stop(DIVERGED, happens & ~good))
    return Step(after, (Publish(Weights(after.weights, after.rounds, after.taken)), *stops))


def check_ins_until(task: Task, versions: Any, trips: Any, rounds: int) -> int:
    """How many check-ins arrive until the server has made so many rounds, or all of them.

    Of each, in the order they arrive: after how many of them its weights were read, and the device's how-many-th it is.
    """
    fixed = plan(task)
    row, weigh = fixed.table["update"], fixed.settings.stale == "weigh"
    made, heard = [0], 0
    for version, trip in zip(versions, trips, strict=True):
        given = row.check_ins is None or trip < row.check_ins
        heard += given and (weigh or made[version] == made[-1])
        full = heard >= fixed.settings.server_batch
        made.append(made[-1] + full)
        heard = 0 if full else heard
        if made[-1] == rounds:
            break
    return len(made) - 1


def remarks(task: Task) -> tuple[str, ...]:
    """What each participant pays, shown before a study starts."""
    fixed = plan(task)
    if task.privacy.mechanism == "none":
        return ()
    row = fixed.table["update"]
    noted: tuple[str, ...] = ()
    if row.check_ins is not None:
        first, last = (1 / row.share(trip) for trip in (0, row.check_ins - 1))
        noted = (
            f"Over the {row.check_ins:,} check-ins of a device its noise goes from {first:.3g} to {last:.3g} times "
            "the least of it, each check-in at its own price.",
        )
    if task.privacy.unit == "device":
        times = row.check_ins or releases(task, fixed.settings)
        return (f"A device pays this in all, for {times:,} check-in{'s' if times > 1 else ''}.", *noted)
    if fixed.stable:
        return ("A sample pays by the stability of a convex, smooth loss under short steps (L5).", *noted)
    return (
        *noted,
        "One sample can bend this model's path as far as all samples of the device together (L5), so it pays as much "
        'as the device. privacy.unit = "device" promises more for the same noise.',
    )


def expected(task: Task) -> Mapping[str, Mapping[str, Field]]:
    """What an update, or a cohort's total, may hold."""
    fixed = plan(task)
    scheduled = fixed.table["update"].scheduled
    public = {"version": NUMBER, "count": Field("<i4", (), 1, 2**31 - 1), **({"trip": NUMBER} if scheduled else {})}
    shapes = {"update": (math.prod(fixed.model.shape),)}
    return fields_heard(ScheduledUpdate if scheduled else Update, task, fixed.table, shapes, **public)


# --- what nobody chose ---

MOST_LOCAL_STEPS = 20


def advise(task: Task, shape: Shape | None) -> Task:
    """The task with rate, local steps and the server's batch, where it names no rate: public rules (R4).

    As many local steps as all rounds need to travel as far as noise allows, each as long as the price of a sample by
    stability lets it be (L5).
    """
    if shape is None or "rate" in task.protocol:
        return task
    model = read_model(task.model, task.features.dimension, task.classes, task.labels.bound)
    smooth = model.smoothness(float(task.features.norm.bound))
    longest = 1 / smooth if smooth else 1.0
    whole = task.masking is not None or "combine" in task.protocol
    alone = {} if whole else {"server_batch": shape.devices}
    chosen = {**alone, "rate": {"c": short(longest)}, **task.protocol}
    fixed = plan(task.with_(protocol=chosen))
    check_ins = shape.check_ins(task, fixed.settings.batch)
    together = task.masking.cohort if task.masking is not None else fixed.settings.server_batch
    together *= 1 if fixed.settings.combine is None else fixed.settings.combine.uploads
    rounds = max(1, check_ins // min(together, shape.devices))
    row = fixed.table["update"]
    deviation = deviation_of_mean(row.noise_variance, check_ins) * float(row.grid.step)
    far = shape.longest_step(noise=deviation, rounds=rounds, momentum=0.0, smoothness=1e-3)
    steps = int(task.protocol.get("local_steps", min(MOST_LOCAL_STEPS, max(1, math.ceil(far / longest)))))
    rate = {"c": short(min(longest, far / steps))}
    return task.with_(protocol={**chosen, "local_steps": steps, "rate": rate})


def uses(task: Task, shape: Shape) -> int:
    """Enough for the planned rounds of everybody."""
    together = shape.devices if task.masking is None else min(task.masking.cohort, shape.devices)
    return max(1, math.ceil(shape.rules.rounds * together / shape.devices))


device = Role(start=wait, on={Sensed: check_out, Weights: contribute})
server = Role(
    start=publish_initial,
    on={**heard_by(Update, apply_total, updated=own_update), Update: apply_update, ScheduledUpdate: apply_update},
)
protocol = Protocol(
    "local_updates",
    device,
    server,
    mechanisms,
    model=lambda task, state: state.weights,
    expected=expected,
    progress=lambda task, state: Tally(int(state.taken)),
    contribution=Update,
    remarks=remarks,
    check_ins_until=check_ins_until,
    settings=Settings,
    advise=advise,
    uses=uses,
)
