"""Guo and Gong's ADMM with private duals: as published, and with noise-free duals at its price. Simulation alone.

Algorithms 1 and 2: a device keeps w_i and lambda_i, and says two masked vectors, the differences of its noisy w_i and
of its lambda_i. Nothing here is a mechanism of ours: the noise is floating-point noise (R5), the duals are private
state (R1), and no handler, door or ledger is involved. What holds and what does not: docs/protocols/admm.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.errors import TaskError
from crowdml.experiments.published.stragglers import Layout
from crowdml.models import Model
from crowdml.privacy.calibration import classical_sigma, gdp_epsilon

WARNING = (
    "ε is per iteration at δ = 1e-3; the total for T iterations is μ = √T·Δ/σ. Asynchronous cohorts expose single "
    "devices. No claim for squared loss."
)
"""Printed wherever this is run (review, section 1)."""

NOISY, CLEAN = "noisy", "clean"


@dataclass(frozen=True)
class Published:
    """The paper's parameters. `sigma` is the noise of a cohort's sum; each device adds sigma / sqrt(gamma s)."""

    rho: float
    beta: float
    """Weight of r(w) = |w|^2 / 2 beside the loss of all samples of all devices, (9)."""
    sigma: float
    gamma: float = 1.0
    solver: int = 100
    """Gradient steps of (12), from the last w_i: the paper takes the minimum itself."""
    duals: str = NOISY
    """"noisy": lambda_i follows what was sent, as published; "clean": it never sees the noise (review, section 1)."""
    local: bool = False
    """Section V-B's comparison: every device adds all the noise itself, as if nothing were masked."""

    def __post_init__(self) -> None:
        if self.duals not in (NOISY, CLEAN):
            raise TaskError(f"duals = {self.duals!r}: choose {NOISY!r} (as published) or {CLEAN!r}.")

    def share(self, cohort: int) -> float:
        """Standard deviation of one device's noise."""
        return self.sigma if self.local else self.sigma / math.sqrt(self.gamma * cohort)


def published_sigma(epsilon: float, delta: float, rho: float) -> float:
    """sqrt(2 ln(1.25 / delta)) 2 / (rho epsilon): the paper's noise of one iteration's sum, for 2/rho."""
    return classical_sigma(epsilon, delta, as_published=True) * 2 / rho


def total_epsilon(epsilon: float, rounds: int, *, claimed_delta: float = 1e-3, delta: float = 1e-6) -> float:
    """What T synchronous iterations cost in all at `delta`, if Lemma 1's condition is granted (G3, G6).

    Exact for continuous Gaussian noise; the paper names `epsilon` and claims it for one iteration at `claimed_delta`.
    """
    mu = math.sqrt(rounds) / classical_sigma(epsilon, claimed_delta, as_published=True)
    return gdp_epsilon(mu, delta)


def dual_price(rounds: int) -> float:
    """How many times the noise of `rounds` releases of sensitivity 2/rho the noise-free duals need: their k-th has
    sensitivity 2k/rho (by induction), so sqrt(sum of k^2 / rounds), 11.98 for 20.
    """
    return math.sqrt(sum(k * k for k in range(1, rounds + 1)) / rounds)


@dataclass(frozen=True)
class Transcript:
    """One trial: the models [R, d], and the two sums that the server decrypts in each round, [R, d] each."""

    weights: Array
    moves: Array  # sum over the cohort of w~_new - w~_old
    duals: Array  # sum over the cohort of w~_new - w0
    time: Array
    local: Array
    """What no server sees: every device's w_i after its last update, without noise [n, d]. For measuring attacks."""


def run(
    settings: Published, model: Model, x: Array, y: Array, layout: Layout, seeds: Sequence[int]
) -> list[Transcript]:
    """Algorithms 1 and 2 along a layout, on x [n, J, d] and y [n, J]; one transcript a seed.

    Noise-free duals are for everybody in every round: otherwise nothing is proved of them.
    """
    devices = x.shape[0]
    if settings.duals == CLEAN and layout.device.shape[1] != devices:
        raise TaskError("noise-free duals are for synchronous rounds alone: let every device take part in each.")
    loop = _loop(settings.solver, settings.duals, model, devices, x.shape[1])
    sizes = np.array([settings.rho, settings.beta, settings.share(layout.device.shape[1])], np.float32)
    number = np.arange(len(layout), dtype=np.int32)
    keys = np.stack([np.asarray(jax.random.split(jax.random.PRNGKey(seed), len(layout))) for seed in seeds])
    told = loop(jnp.asarray(x), jnp.asarray(y), (layout.device, layout.version, number), sizes, keys, len(layout))
    weights, moves, duals, local = map(np.asarray, told)
    return [Transcript(weights[i], moves[i], duals[i], layout.time, local[i]) for i in range(len(seeds))]


def smooth_of(model: Model, batch: int) -> float | None:
    each = model.smoothness(1.0)
    return None if each is None else batch * each


@lru_cache(maxsize=32)
def _loop(solver: int, duals: str, model: Model, devices: int, batch: int) -> Any:
    """Compiled once for every rho, beta and noise."""
    steep = smooth_of(model, batch)

    def solve(rho: Array, x: Array, y: Array, start: Array, centre: Array) -> Array:
        """(12): accelerated gradient steps, or subgradient steps where the loss has a kink."""

        def slope(w: Array) -> Array:
            return model.gradient_sum(w, Samples(x, y)) + rho * (w - centre)

        if steep is None:

            def kinked(k: Any, w: Array) -> Array:
                return w - slope(w) / (rho * (k + 2.0))

            return jax.lax.fori_loop(0, solver, kinked, start)
        rate, root = 1 / (steep + rho), jnp.sqrt((steep + rho) / rho)
        carry_on = (root - 1) / (root + 1)

        def smooth(_: Any, pair: tuple[Array, Array]) -> tuple[Array, Array]:
            old, ahead = pair
            new = ahead - rate * slope(ahead)
            return new, new + carry_on * (new - old)

        return jax.lax.fori_loop(0, solver, smooth, (start, start))[0]

    def one_round(x: Array, y: Array, sizes: Array, carry: Any, feed: Any) -> Any:
        rho, beta, share = sizes
        exact, said, lam, mean, mean_lam, history = carry
        (device, version, number), key = feed
        w0 = history[version]
        solved = jax.vmap(partial(solve, rho))(x[device], y[device], exact[device], w0 - lam[device])
        noise = share * jax.random.normal(key, solved.shape)
        new = solved + noise
        move, dual = new - said[device], new - w0
        kept = solved - w0 if duals == CLEAN else dual
        said, lam, exact = said.at[device].set(new), lam.at[device].add(kept), exact.at[device].set(solved)
        moves, turned = move.sum(0), dual.sum(0)
        mean, mean_lam = mean + moves / devices, mean_lam + turned / devices
        w0 = devices * rho * (mean + mean_lam) / (devices * rho + beta)  # (11) with r = |w|^2 / 2
        return (exact, said, lam, mean, mean_lam, history.at[number + 1].set(w0)), (w0, moves, turned)

    def whole(x: Array, y: Array, feed: Any, sizes: Array, keys: Array, rounds: int) -> Any:
        zeros, one = jnp.zeros((devices, x.shape[2])), jnp.zeros(x.shape[2])
        start = (zeros, zeros, zeros, one, one, jnp.zeros((rounds + 1, x.shape[2])))
        carry, (weights, moves, turned) = jax.lax.scan(lambda c, f: one_round(x, y, sizes, c, f), start, (feed, keys))
        return weights, moves, turned, carry[0]

    together = jax.vmap(whole, in_axes=(None, None, None, None, 0, None))  # trials share the samples: one product
    return jax.jit(together, static_argnums=5)


def difference_out(moves: Array, duals: Array, centres: Array, cohort: int) -> Array:
    """The attack of G1 on two rounds: what the server learns of the one device that only the first of them had.

    Sums of two cohorts of equal size that share all but one device each; the newcomer has said nothing before. From
    the second round sum w~_new = duals + s w0, and less `moves` that is sum w~_old over the *new* cohort: a second sum
    of old noisy values, and the newcomer's is zero. `centres` [2, d] are the w0 that each cohort computed on.
    """
    first = duals[0] + cohort * centres[0]
    old_of_second = duals[1] + cohort * centres[1] - moves[1]
    return first - old_of_second
