"""The Crowd-ML library of 2017 as published, and what a run of it really costs. Simulation alone.

Hamm, Luken & Xie 2017, Algorithm 1: local steps from the published weights on minibatches, and the weights themselves
sent with noise of a stated deviation, for which the paper gives no epsilon. Nothing here is a mechanism of ours: the
noise is floating-point noise (R5), no gradient is clipped unless `clip` asks for it, check-ins of an older round count
without being heard (L9), and no handler, door or ledger is involved. What holds and what does not:
docs/papers/hamm2017.md; the sound form: docs/protocols/local_updates.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.errors import TaskError
from crowdml.models import Model
from crowdml.privacy.calibration import gdp_epsilon
from crowdml.privacy.losses import ZCDP, Total

WARNING = "per communication; invalid for λ>1; not sample-level for S_d>1; noise type Laplace assumes L1."
"""Printed wherever this is run (review, section 5)."""

NONE, LAPLACE, GAUSSIAN, GAMMA = "none", "laplace", "gaussian", "l2-gamma"
ROUNDS, PATH = "rounds", "path"
SCHEDULES = ("constant", "1/t", "1/sqrt(t)")
CONSTANT, GEOMETRIC, BY_STEP, BY_RATE = "constant", "geometric", "step", "rate"


@dataclass(frozen=True)
class Published:
    """The paper's parameters; the defaults are those of Fig. 2."""

    c0: float
    deviation: float
    """Standard deviation of the noise in each coordinate, of whatever kind; the first one where it falls."""
    noise: str = GAUSSIAN
    rounds: int = 1000
    local_steps: int = 10
    """S_d. The experiment's "S_d = 0" is 1: with none a device would send back what it got (L11)."""
    minibatch: int = 100
    server_batch: int = 1
    schedule: str = "1/sqrt(t)"
    counter: str = ROUNDS
    """t of the steps: the server's rounds (section 4.2), or Algorithm 1's own S_d (t_d - 1) + s_d ("path")."""
    l2: float = 0.0
    clamp: float | None = None
    """Section 3.2.2: every element of a mean gradient to [-c, c]."""
    bound: float | None = None
    """Section 3.2.2: every weight to [-bound, bound], after each step."""
    clip: float | None = None
    """What the paper did not do: each sample's gradient to this l2 norm."""
    stale: float = 0.0
    """Chance that a check-in is of an older round: it counts towards B_s, and is not in W."""
    falling: str = CONSTANT
    """Section 2.3: deviation "constant", times `ratio` each round ("geometric"), proportional to the step from the same
    first one ("step"), or times eta itself ("rate"), as if it were added to a gradient.
    """
    ratio: float = 1.0
    trusted: bool = False
    """Section 3.2: "if the server is trusted", a B_s-th of the noise, whatever |W| is."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("noise", self.noise, (NONE, LAPLACE, GAUSSIAN, GAMMA)),
            ("schedule", self.schedule, SCHEDULES),
            ("counter", self.counter, (ROUNDS, PATH)),
            ("falling", self.falling, (CONSTANT, GEOMETRIC, BY_STEP, BY_RATE)),
        ):
            if value not in known:
                raise TaskError(f"{name} = {value!r}: choose one of {', '.join(known)}.")
        if self.local_steps < 1:
            raise TaskError(f"local_steps = {self.local_steps}: a device that takes no step sends nothing new (L11).")

    def rates(self, first: float = 1.0) -> Array:
        """[T, S_d]: the size of every step of one device that makes all check-ins, in units of c0."""
        t = np.arange(self.rounds, dtype=np.float64)[:, None]
        if self.counter == PATH:
            t = t * self.local_steps + np.arange(self.local_steps)
        t = np.broadcast_to(t + first, (self.rounds, self.local_steps))
        return {"constant": np.ones_like(t), "1/t": 1 / t, "1/sqrt(t)": 1 / np.sqrt(t)}[self.schedule]

    @property
    def deviations(self) -> Array:
        """[T]: the noise of each round, of one coordinate."""
        t = np.arange(self.rounds, dtype=np.float64)
        shape = {
            CONSTANT: np.ones_like(t),
            GEOMETRIC: self.ratio**t,
            BY_STEP: self.rates()[:, 0] / self.rates()[0, 0],
            BY_RATE: self.c0 * self.rates()[:, 0],
        }[self.falling]
        return self.deviation * shape / (self.server_batch if self.trusted else 1)


# --- what it costs ---


@dataclass(frozen=True)
class Cost:
    """Epsilon at `delta` of a whole run for one device that makes all check-ins, and for one of its samples.

    Infinite: nothing bounds what may leave, so there is no privacy at all.
    """

    device: float
    sample: float
    delta: float


def reaches(settings: Published, dimension: int) -> Array:
    """[T, S_d]: the longest that each step's change may be in the l2 norm; infinite without a clip or a clamp."""
    rates = settings.c0 * settings.rates()
    lengths = [math.inf]
    if settings.clip is not None:
        lengths.append(settings.clip)
    if settings.clamp is not None:
        lengths.append(settings.clamp * math.sqrt(dimension))
    return rates * min(lengths)


def _capped(settings: Published, moves: Array, dimension: int) -> Array:
    """Bounded weights are never further apart than their box is wide."""
    return moves if settings.bound is None else np.minimum(moves, 2 * settings.bound * math.sqrt(dimension))


def real_cost(settings: Published, *, dimension: int, samples: int, takes_turns: int = 1, delta: float = 1e-5) -> Cost:
    """Epsilon of all T releases at `delta`: of one of `takes_turns` devices in turn, and of a sample it holds (L8).

    A device: replacing its data moves round t by 2 C sum_s eta(t, s), whatever the path was (L3). A sample is used once
    a pass over the `samples` of all devices, in one step; all later steps of that check-in may differ as far as two
    devices' (L5), and the next begins at public weights. Gaussian noise composes exactly (mu^2 adds). Laplace noise of
    each coordinate is compared by zCDP: |Delta_2|^2 / deviation^2, or by the l1 norm, sqrt(d) times the l2 one.
    """
    turn = np.arange(0, settings.rounds, takes_turns)
    reach, sigma = reaches(settings, dimension), settings.deviations
    whole = _capped(settings, 2 * reach.sum(1), dimension)
    device = _compose(settings.noise, whole[turn], sigma[turn], dimension, delta)
    return Cost(device, _sample_cost(settings, reach, whole, sigma, dimension, samples, delta), delta)


def _sample_cost(
    settings: Published, reach: Array, whole: Array, sigma: Array, dimension: int, samples: int, delta: float
) -> float:
    """Cost of the sample in the worst place of a pass."""
    if not np.isfinite(reach).all():
        return math.inf
    each, check_in = settings.minibatch, settings.minibatch * settings.local_steps
    if samples < check_in:  # one check-in uses it twice
        return _compose(settings.noise, whole, sigma, dimension, delta)
    after = reach[:, ::-1].cumsum(1)[:, ::-1] - reach  # of the steps that follow
    moves = _capped(settings, 2 * (reach / each + after), dimension)
    a_round = check_in * settings.server_batch
    passes = -(-settings.rounds * a_round // samples)
    place = np.arange(0, min(samples, settings.rounds * a_round))[:, None] + samples * np.arange(passes)
    used = place < settings.rounds * a_round
    number = np.where(used, place // a_round, 0)
    step = place % check_in // each
    moved, noise = np.where(used, moves[number, step], 0.0), sigma[number]
    worst = int(((moved / noise) ** 2).sum(1).argmax()) if (noise > 0).all() else 0
    return _compose(settings.noise, moved[worst], noise[worst], dimension, delta)


def _compose(noise: str, moves: Array, sigma: Array, dimension: int, delta: float) -> float:
    if not moves.any():
        return 0.0
    if noise == NONE or not np.isfinite(moves).all() or not (sigma > 0).all():
        return math.inf
    squares = float(((moves / sigma) ** 2).sum())
    if noise == GAUSSIAN:
        return gdp_epsilon(math.sqrt(squares), delta)
    if noise == LAPLACE:  # b = sigma / sqrt(2)
        rho, pure = squares, math.sqrt(2 * dimension) * float((moves / sigma).sum())
    else:  # pure moves / scale each, scale = sigma / sqrt(d + 1)
        rho, pure = (dimension + 1) * squares / 2, math.sqrt(dimension + 1) * float((moves / sigma).sum())
    return min(pure, Total.of([ZCDP(Fraction(rho))]).epsilon(delta))


# --- the run ---


@dataclass(frozen=True)
class Course:
    """One trial: the model [E, *shape] after `rounds` [E], and |W| of every round [T]."""

    rounds: Array
    weights: Array
    heard: Array


def run(settings: Published, model: Model, x: Array, y: Array, seeds: Sequence[int], *, looks: int = 1) -> list[Course]:
    """Algorithm 1 on samples x [n, d], y [n] that the crowd holds together; one course a seed, looked at `looks` times.

    Samples come in an order drawn once a trial, minibatch after minibatch, and again when all were used.
    """
    if settings.rounds % looks:
        raise TaskError(f"looks = {looks}: {settings.rounds} rounds are cut into equal stretches. Choose a divisor.")
    shape = (looks, settings.rounds // looks)
    order = np.stack([np.random.default_rng([seed, 1]).permutation(len(y)) for seed in seeds]).astype(np.int32)
    keys = jnp.stack([jax.random.split(jax.random.PRNGKey(seed), settings.rounds) for seed in seeds])
    rates = (settings.c0 * settings.rates()).astype(np.float32).reshape(*shape, -1)
    number = np.arange(settings.rounds, dtype=np.int32).reshape(shape)
    told = _loop(_shape_of(settings), model)(
        jnp.asarray(x),
        jnp.asarray(y),
        (rates, settings.deviations.astype(np.float32).reshape(shape), number),
        jnp.asarray(order),
        keys.reshape(len(seeds), *shape, -1),
    )
    weights, heard = map(np.asarray, told)
    at = shape[1] * np.arange(1, looks + 1)
    return [Course(at, weights[trial], heard[trial].reshape(-1)) for trial in range(len(seeds))]


def _shape_of(settings: Published) -> Published:
    """The settings that a compiled loop depends on: the rest are its arguments."""
    names = ("noise", "local_steps", "minibatch", "server_batch", "l2", "clamp", "bound", "clip", "stale")
    return Published(1.0, 1.0, **{name: getattr(settings, name) for name in names})


def drawn(noise: str, key: Array, shape: tuple[int, ...]) -> Array:
    """Noise whose coordinates have deviation 1; of "l2-gamma" the whole vector is drawn at once."""
    if noise == GAUSSIAN:
        return jax.random.normal(key, shape)
    if noise == LAPLACE:
        return jax.random.laplace(key, shape) / math.sqrt(2)
    if noise == NONE:
        return jnp.zeros(shape)
    size = math.prod(shape)
    one, other = jax.random.split(key)
    way = jax.random.normal(one, shape)
    radius = jax.random.gamma(other, float(size)) / math.sqrt(size + 1)
    return radius * way / jnp.sqrt((way * way).sum())


@lru_cache(maxsize=32)
def _loop(settings: Published, model: Model) -> Any:
    size, steps = settings.minibatch, settings.local_steps

    def slope(w: Array, batch: Samples) -> Array:
        if settings.clip is not None:
            g = model.clipped_sum(w, batch, settings.clip) / size
        else:
            g = model.gradient_sum(w, batch) / size
        g = g + settings.l2 * w
        return g if settings.clamp is None else jnp.clip(g, -settings.clamp, settings.clamp)

    def check_in(x: Array, y: Array, order: Array, weights: Array, rates: Array, first: Array) -> Array:
        """Where a device gets to by its local steps, (7)."""

        def step(w: Array, feed: Any) -> Any:
            rate, number = feed
            rows = order[(first + number * size + jnp.arange(size)) % order.shape[0]]
            w = w - rate * slope(w, Samples(x[rows], y[rows]))
            return (w if settings.bound is None else jnp.clip(w, -settings.bound, settings.bound)), None

        return jax.lax.scan(step, weights, (rates, jnp.arange(steps)))[0]

    def one_round(x: Array, y: Array, order: Array, weights: Array, feed: Any) -> Any:
        (rates, deviation, number), key = feed
        devices = settings.server_batch
        first = (number * devices + jnp.arange(devices)) * steps * size
        keys = jax.random.split(key, devices + 1)
        current = jax.random.uniform(keys[0], (devices,)) >= settings.stale

        def device(start: Array, key: Array) -> Array:
            at = check_in(x, y, order, weights, rates, start)
            return at + deviation * drawn(settings.noise, key, weights.shape)

        said = jax.lax.map(lambda pair: device(*pair), (first, keys[1:]))
        heard = current.sum()
        kept = jnp.where(current.reshape(-1, *(1,) * weights.ndim), said, 0)
        return kept.sum(0) / heard, heard  # 0 / 0 where nobody was of this round, as printed (L9)

    def whole(x: Array, y: Array, feed: Any, order: Array, keys: Array) -> Any:
        def stretch(weights: Array, part: Any) -> Any:
            weights, heard = jax.lax.scan(lambda w, f: one_round(x, y, order, w, f), weights, part)
            return weights, (weights, heard)

        return jax.lax.scan(stretch, jnp.asarray(model.start()), (feed, keys))[1]

    return jax.jit(jax.vmap(whole, in_axes=(None, None, None, 0, 0)))
