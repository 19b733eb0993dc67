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
from functools import cached_property, lru_cache
from itertools import takewhile
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, fold, namespace, struct
from crowdml.errors import TaskError
from crowdml.messages import SERVER, Public, message
from crowdml.models import Model, read_model
from crowdml.privacy.calibration import gaussian_sigma, laplace_scale, rho_for, round_down, skellam_variance
from crowdml.privacy.grid import COUNTS, Grid
from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace
from crowdml.privacy.mechanisms import (
    Exposed,
    GaussianStable,
    GridGaussian,
    GridLaplace,
    Mechanism,
    Scheduled,
    SkellamSum,
    l1_of,
)
from crowdml.privacy.private import Masked, Private, Release, Rows
from crowdml.privacy.sensitivity import L1, Adjacency, Observer
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
from crowdml.protocols.parts import FINEST_CLIP, choose_grid, into_ball, longest, pin_grid, so_many, stable_row
from crowdml.task import Task, between, choose, positive, read_section, show

RADIUS = 1000.0
"""Where samples pay by stability, a device begins no further from zero: what floats lose is bounded by it."""
LARGEST_WEIGHT = 1e9
"""Weights beyond this are as good as infinite: the task stops."""
BETAS = (0.9, 0.99)
"""Of Adam on the server."""

BLURRED = "where the model would go from here, blurred with noise"
IN_A_SUM = "where the model would go from here, in a cohort's sum that is blurred with noise"

LEAST_SHARE = Fraction(1, FINEST_CLIP)
"""Of an update: a smaller one is nothing on the finest grid, and there a schedule ends."""
MOST_CHECK_INS = 2**16
"""Of a schedule."""

ADAPTIVE = ("adagrad", "rmsprop")
COUNTERS = ("rounds", "check-ins", "trips", "steps", "path")


@dataclass(frozen=True)
class Rate:
    """`{ schedule = "1/sqrt(t)", c = 0.5, counter = "rounds" }`: the size of a device's own steps.

    t counts from 1: the server's rounds (t_s), the check-ins it has taken (s_s), the device's own check-ins ("trips",
    t_d), the steps within one (s_d), or all steps of the device, S_d (t_d - 1) + s_d, as Algorithm 1 does ("path").
    """

    c: Fraction
    schedule: str = "constant"
    counter: str = "rounds"

    def __post_init__(self) -> None:
        choose("protocol.rate.schedule", self.schedule, ("constant", "1/t", "1/sqrt(t)", *ADAPTIVE))
        choose("protocol.rate.counter", self.counter, COUNTERS)
        positive("protocol.rate.c", self.c)


@dataclass(frozen=True)
class Noise:
    """`{ schedule = "geometric", ratio = 1.05 }`: how the noise changes from one check-in of a device to the next.

    "constant": an update always has the same noise, and so the weights have noise in proportion to the step.
    "geometric": `ratio` times as much in every check-in. "weights": the weights have always the same noise, and the
    update has the more of it the shorter the steps get.
    """

    schedule: str = "constant"
    ratio: Fraction | None = None

    def __post_init__(self) -> None:
        choose("protocol.noise.schedule", self.schedule, ("constant", "geometric", "weights"))
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

    batch: int
    rate: Rate
    minibatch: int = 0
    local_steps: int = 1
    clip: Fraction | None = None
    update_clip: Fraction | None = None
    server_batch: int = 1
    stale: str = "refuse"
    optimiser: str = "average"
    server_rate: Fraction = Fraction(1)
    momentum: Fraction = Fraction(9, 10)
    buffer: int = 0
    noise: Noise = Noise()
    kind: str = "local_updates"

    def __post_init__(self) -> None:
        between("protocol.batch", self.batch, 1, 1_000_000)
        if self.minibatch and (self.minibatch < 1 or self.batch % self.minibatch):
            raise TaskError(
                f"protocol.minibatch = {self.minibatch}: a batch of {self.batch} samples is cut into minibatches of "
                "one size. Choose a divisor of it."
            )
        between("protocol.local_steps", self.local_steps, 1, 1000)
        for name in ("clip", "update_clip"):
            if getattr(self, name) is not None:
                positive(f"protocol.{name}", getattr(self, name))
        between("protocol.server_batch", self.server_batch, 1, 1_000_000)
        choose("protocol.stale", self.stale, ("refuse", "weigh"))
        choose("protocol.optimiser", self.optimiser, ("average", "momentum", "adam"))
        positive("protocol.server_rate", self.server_rate)
        between("protocol.momentum", self.momentum, 0, 0.999)
        if self.buffer:
            between("protocol.buffer", self.buffer, self.batch, 10_000_000)

    @property
    def size(self) -> int:
        """B_d."""
        return self.minibatch or self.batch

    @property
    def capacity(self) -> int:
        """Samples that wait on a device."""
        return self.buffer or self.batch


@dataclass(frozen=True)
class Plan:
    """What a task fixes once and for all: read by handlers, never written."""

    settings: Settings
    model: Model
    table: Mapping[str, Mechanism]
    grid: Grid
    l2: float
    masked: bool
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

    @cached_property
    def c(self) -> float:
        return float(self.settings.rate.c)

    @property
    def largest_rate(self) -> float:
        """Of all steps: they never grow."""
        return self.c

    def rates(self, xp: Any, count: Any) -> Array:
        """[S_d]: the sizes of a check-in's steps, whose counter stands at `count` in the first; of its first column
        where they adapt themselves."""
        settings, kind = self.settings, xp.float32 if xp is not np else np.float64
        along = xp.arange(settings.local_steps).astype(kind)
        still = settings.rate.counter not in ("steps", "path")
        t = xp.asarray(count).astype(kind) + (xp.zeros_like(along) if still else along)
        schedule = settings.rate.schedule
        if schedule == "1/t":
            return self.c / t
        return self.c / xp.sqrt(t) if schedule == "1/sqrt(t)" else xp.full_like(t, self.c)

    def reach(self, xp: Any, count: Any) -> tuple[Array, Array]:
        """H and the shrinking: after its steps a device is at `shrinking * start - H * u`, u the update it gives."""
        rates = self.rates(xp, count)
        left = xp.cumprod((1 - self.l2 * rates)[::-1])[::-1]  # what is left of the weights before each step
        after = xp.concatenate([left[1:], xp.ones_like(left[:1])])
        return (rates * after).sum(), left[0]


@lru_cache(maxsize=256)
def plan(task: Task) -> Plan:
    """Read the task; refuse what this protocol cannot run."""
    settings = read_section(Settings, task.protocol, "protocol")
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
    if task.masking is not None:
        if settings.server_batch != 1:
            raise TaskError(
                f"protocol.server_batch = {settings.server_batch}: under masks a cohort is the server's batch. Leave "
                "this one out."
            )
        if settings.rate.counter not in ("rounds", "steps"):
            raise TaskError(
                f'protocol.rate.counter = "{settings.rate.counter}": under masks the server hears a sum, so all '
                'devices of a cohort take equal steps. Say "rounds" or "steps".'
            )
        if settings.noise.schedule != "constant":
            raise TaskError(
                f'protocol.noise.schedule = "{settings.noise.schedule}": under masks the server hears a sum of devices '
                "that are at unlike check-ins, and could not tell their shares apart. Leave the line out."
            )
    return _plan(task, settings, model, float(l2))


def _plan(task: Task, settings: Settings, model: Model, l2: float) -> Plan:
    privacy, masked = task.privacy, task.masking is not None
    bound = float(task.features.norm.bound)
    if privacy.mechanism == "none":
        clip = math.inf if settings.clip is None else longest(model, "l2", bound, settings.clip)
        covers = Rows(0, settings.batch)
        plain = "where the model would go from here, as it is: anyone can work back to samples"
        seen = Observer.AGGREGATE if masked else Observer.ANYONE
        table: Mapping[str, Mechanism] = {"update": Exposed(L1(Fraction(0)), covers, plain, seen, whole=True)}
        return Plan(settings, model, table, COUNTS, l2, masked, clip, False, bound)
    clip = longest(model, "l2", bound, settings.clip)
    stability = None if privacy.unit == "device" else _stability(task, settings, model, l2)
    shares = None if settings.noise.schedule == "constant" else schedule_of(task, settings, model, l2)
    if stability is None:
        row: Mechanism = _clipped_row(task, settings, model, clip, shares)
    else:
        row = _stable_row(task, settings, model, stability, shares)
    return Plan(settings, model, {"update": row}, row.grid, l2, masked, clip, stability is not None, bound)


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
    shape, none = Plan(settings, model, {}, COUNTS, l2, False, 0.0, False, 0.0), np.int32(0)

    def reach(trip: int) -> float:
        return float(shape.reach(np, first_count(shape, none, none, trip))[0])

    first = reach(0)
    return lambda trip: _short(reach(trip) / first)


def _short(share: float) -> Fraction:
    """Rounded down to a short fraction: shares are added up exactly."""
    return Fraction(math.floor(min(share, 1.0) * 2**20), 2**20)


def worth(task: Task, settings: Settings, shares: tuple[Fraction, ...] | None, power: int) -> Fraction:
    """How many times the price of a whole update one unit pays for its check-ins, at the most.

    A share costs its square in zCDP, itself in pure epsilon. A device pays for all its check-ins, and a sample for the
    dearest of them that could use it.
    """
    if shares is None:
        return Fraction(releases(task, settings))
    times = len(shares) if task.privacy.unit == "device" else task.privacy.uses
    return sum((share**power for share in sorted(shares, reverse=True)[:times]), Fraction(0))


def _stable_row(
    task: Task, settings: Settings, model: Model, stability: float, shares: tuple[Fraction, ...] | None
) -> Mechanism:
    bound, times = float(task.features.norm.bound), worth(task, settings, shares, 2)
    row = stable_row(
        task, "update", Rows(0, settings.batch), math.prod(model.shape), stability=stability,
        device_stability=2 * model.gradient_bound("l2", bound), float_error=_float_error(settings, model, bound),
        releases=releases(task, settings) if shares is None else math.ceil(times),
        promise=lambda masked: IN_A_SUM if masked else BLURRED,
    )  # fmt: skip
    if shares is None or not isinstance(row, GaussianStable):
        return row
    whole = rho_for(task.privacy.epsilon["update"], task.privacy.delta)
    row = replace(row, rho=Fraction(1))
    unit = Scheduled.over(row, shares).total(task.privacy.uses).zcdp  # rounding costs every share as much
    return Scheduled.over(replace(row, rho=round_down(whole / unit)), shares)


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
    shape = Plan(settings, model, {}, COUNTS, l2, False, 0.0, True, bound)
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


def _clipped_row(
    task: Task, settings: Settings, model: Model, clip: float, shares: tuple[Fraction, ...] | None
) -> Mechanism:
    """The update as ONE clipped contribution: all samples of the device together move it by 2 clips (R8)."""
    privacy, masking = task.privacy, task.masking
    length, covers = math.prod(model.shape), Rows(0, settings.batch)
    most = clip if settings.update_clip is None else min(clip, float(settings.update_clip))
    epsilon = privacy.epsilon["update"]
    unit = Adjacency.REPLACE_DEVICE if privacy.unit == "device" else Adjacency.REPLACE_SAMPLE
    if masking is not None:
        times = releases(task, settings)

        def share(steps: int) -> Fraction:
            l2 = Fraction(2 * steps)
            return skellam_variance(l2, l1_of(l2, length), epsilon, privacy.delta, times) / masking.honest

        rough = Fraction(math.isqrt(math.ceil(share(FINEST_CLIP))) + 1, FINEST_CLIP)
        grid, steps = choose_grid("update", most, rough, privacy.grid)
        return SkellamSum(
            steps, share(steps), masking.honest, grid, covers, length, IN_A_SUM, whole=True, adjacency=unit
        )
    if privacy.mechanism == "discrete-laplace":
        if settings.update_clip is None:
            raise TaskError(
                'protocol.update_clip is missing: "discrete-laplace" noise is calibrated to the l1 norm (L2), and this '
                "says how long an update may be in it."
            )
        most, each = float(settings.update_clip), epsilon / worth(task, settings, shares, 1)
        each = each if shares is None else round_down(each)
        grid, steps = choose_grid("update", most, laplace_scale(Fraction(2), each), privacy.grid)
        laplace = GridLaplace(steps, each, grid, covers, BLURRED, whole=True, adjacency=unit)
        return laplace if shares is None else Scheduled.over(laplace, shares)
    rho = rho_for(epsilon, privacy.delta) / worth(task, settings, shares, 2)
    rho = rho if shares is None else round_down(rho)
    grid, steps = choose_grid("update", most, gaussian_sigma(Fraction(2), rho), privacy.grid)
    gaussian = GridGaussian(steps, rho, grid, covers, BLURRED, whole=True, adjacency=unit)
    return gaussian if shares is None else Scheduled.over(gaussian, shares)


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


@message("local/update/1")
class Update:
    """A check-in: the mean of the clipped gradients along the device's path, and where its counter stood."""

    update: Release[Integers]
    version: Public[Integers]
    count: Public[Integers]


@message("local/scheduled/1")
class ScheduledUpdate:
    """A check-in under noise that changes: a share of the update, and the check-in that says which."""

    update: Release[Integers]
    version: Public[Integers]
    count: Public[Integers]
    trip: Public[Integers]


@message("local/masked/1")
class MaskedUpdate:
    """A check-in of a masked task."""

    update: Masked[Integers]


@message("local/total/1")
class UpdateTotal:
    """What the server hears of a cohort."""

    update: Release[Integers]
    devices: Public[Integers]
    version: Public[Integers]


# --- the device ---


def contribute(task: Task, waiting: Private[Samples] | None, public: Weights, ctx: Context) -> Step[Any]:
    """Answer a check-out with one update; nothing of it is kept for the next one (R1)."""
    if waiting is None:  # a late or repeated answer
        return Step(None)
    fixed = plan(task)
    count = first_count(fixed, public.version, public.taken, ctx.trip)

    def moved(batch: Samples) -> Array:
        return local_update(fixed, public.weights, batch, count)[None]

    if fixed.masked:
        return Step(None, (Send(SERVER, MaskedUpdate(ctx.masked("update", waiting.map(moved)))),))
    released = ctx.release("update", waiting.map(moved))
    row = fixed.table["update"]
    if not isinstance(row, Scheduled):
        return Step(None, (Send(SERVER, Update(released, public.version, count)),))
    trip = namespace(public.version).asarray(ctx.trip).astype(np.int32)
    said = Send(SERVER, ScheduledUpdate(released, public.version, count, trip))
    check_ins = len(row.levels)
    made = f"This device has made the {check_ins:,} check-in{'s' if check_ins > 1 else ''} of its noise schedule."
    return Step(None, (said, Stop(made, trip + 1 >= check_ins)))


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
    start = xp.where(abs(weights) <= LARGEST_WEIGHT, weights, 0).astype(wide)  # false for NaN
    if fixed.stable:
        start = start * (RADIUS / xp.maximum(xp.sqrt((start * start).sum()), RADIUS))
    x = into_ball(batch.x.astype(wide), fixed.bound) if fixed.stable else batch.x
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


@struct
class Averaging:
    """The server's state. Everything in it is post-processing of releases."""

    weights: Array
    velocity: Array
    """Of momentum and Adam."""
    squares: Array
    """Of Adam."""
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
    if isinstance(update, ScheduledUpdate) and isinstance(row, Scheduled):
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


def apply_total(task: Task, state: Averaging, total: UpdateTotal, ctx: Context) -> Step[Averaging]:
    """A cohort's sum is a round."""
    fixed = plan(task)
    xp = namespace(total.update.value, state.weights)
    devices = xp.asarray(total.devices).astype(xp.int32)
    count = first_count(fixed, xp.asarray(total.version), 0, 0)
    mean = _moved(fixed, xp, state, total.update.value, count, devices.astype(xp.float32))
    current = xp.asarray(state.rounds == total.version) | (fixed.settings.stale == "weigh")
    return _close(task, fixed, xp, state, mean, devices, current)


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
    good = (abs(moved) <= LARGEST_WEIGHT).all()  # false for NaN
    goes = happens & good
    after = replace(
        state,
        weights=xp.where(goes, moved, state.weights).astype(xp.float32),
        velocity=xp.where(goes, velocity, state.velocity).astype(xp.float32),
        squares=xp.where(goes, squares, state.squares).astype(xp.float32),
        rounds=(state.rounds + goes.astype(xp.int32)).astype(xp.int32),
        taken=(state.taken + xp.where(goes, devices, 0)).astype(xp.int32),
    )
    effects: list[Any] = [Publish(Weights(after.weights, after.rounds, after.taken))]
    if task.stop.steps is not None:
        effects.append(Stop(so_many(task.stop.steps, "round", "been made"), after.rounds >= task.stop.steps))
    diverged = "the weights were no longer finite: the steps are too long, and the last good weights stay published"
    effects.append(Stop(diverged, happens & ~good))
    return Step(after, tuple(effects))


def check_ins_until(task: Task, versions: Any, trips: Any, rounds: int) -> int:
    """How many check-ins arrive until the server has made so many rounds, or all of them.

    Of each, in the order they arrive: after how many of them its weights were read, and the device's how-many-th it is.
    """
    fixed = plan(task)
    row, weigh = fixed.table["update"], fixed.settings.stale == "weigh"
    made, heard = [0], 0
    for version, trip in zip(versions, trips, strict=True):
        given = not isinstance(row, Scheduled) or trip < len(row.levels)
        heard += given and (weigh or made[version] == made[-1])
        full = heard >= fixed.settings.server_batch
        made.append(made[-1] + full)
        heard = 0 if full else heard
        if made[-1] == rounds:
            break
    return len(made) - 1


def remarks(task: Task) -> tuple[str, ...]:
    """Who pays by what: for who is about to start a study."""
    fixed = plan(task)
    if task.privacy.mechanism == "none":
        return ()
    row = fixed.table["update"]
    noted: tuple[str, ...] = ()
    if isinstance(row, Scheduled):
        first, last = (1 / row.share(trip) for trip in (0, len(row.levels) - 1))
        noted = (
            f"Over the {len(row.levels):,} check-ins of a device its noise goes from {first:.3g} to {last:.3g} times "
            "the least of it, each check-in at its own price.",
        )
    if task.privacy.unit == "device":
        times = len(row.levels) if isinstance(row, Scheduled) else releases(task, fixed.settings)
        return (f"A device pays this in all, for {times:,} check-in{'s' if times > 1 else ''}.", *noted)
    if fixed.stable:
        return ("A sample pays by the stability of a convex, smooth loss under short steps (L5).", *noted)
    return (
        *noted,
        "One sample can bend this model's path as far as all samples of the device together (L5), so it pays as much "
        'as the device. privacy.unit = "device" promises more for the same noise.',
    )


def expected(task: Task) -> Mapping[str, Mapping[str, Field]]:
    """What the server may hear. Noise beyond its bound has a chance below 2^-64, so no honest device is refused."""
    fixed = plan(task)
    version, row = {"version": Field("<i4", (), 0, 2**31 - 1)}, fixed.table["update"]
    if fixed.masked:
        return {"local/total/1": {**version, **total_fields(fixed.table, task)}}
    scheduled = isinstance(row, Scheduled)
    row = row.row if isinstance(row, Scheduled) else row
    if isinstance(row, GaussianStable):
        far = row.reach + DiscreteGaussian(row.sigma).tail(64)
    elif isinstance(row, GridGaussian):
        far = row.clip + DiscreteGaussian(row.sigma).tail(64)
    elif isinstance(row, GridLaplace):
        far = row.clip + DiscreteLaplace(row.scale).tail(64)
    else:
        raise TaskError("row 'update' has no noise: the simulator runs such a task, a server does not.")
    entries = (math.prod(fixed.model.shape),)
    count = Field("<i4", (), 1, 2**31 - 1)
    fields = {**version, "count": count, "update": Field("<i4", entries, -far, far)}
    if scheduled:
        return {"local/scheduled/1": {**fields, "trip": Field("<i4", (), 0, 2**31 - 1)}}
    return {"local/update/1": fields}


device = Role(start=wait, on={Sensed: check_out, Weights: contribute})
server = Role(start=publish_initial, on={Update: apply_update, ScheduledUpdate: apply_update, UpdateTotal: apply_total})
protocol = Protocol(
    "local_updates",
    device,
    server,
    mechanisms,
    check=plan,
    batch=lambda task: plan(task).settings.batch,
    model=lambda task, state: state.weights,
    settle=lambda task: pin_grid(task, plan(task).grid),
    expected=expected,
    progress=lambda task, state: Tally(int(state.taken)),
    masked=(MaskedUpdate, UpdateTotal),
    remarks=remarks,
)
