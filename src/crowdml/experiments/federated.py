"""What local updates are compared with: one compiled runner, and what each baseline lets a server do with the updates.

- plain federated averaging (McMahan et al. 2017): no privacy.
- CSDP (Geyer, Klein & Nabi 2017): a trusted server clips each device's update to a public bound, adds Gaussian noise
  to the sum, and publishes the mean. Here by zCDP for replacing a device, for as many rounds as one takes part in: no
  claim rests on who was drawn, and the bound is public, where theirs is the median of private norms.
- DSSGD (Shokri & Shmatikov 2015): devices take turns and upload a share of their gradients' entries, chosen by the
  sparse vector technique and noised. Their epsilon is *of one uploaded entry*; a device pays it for every entry of all
  turns, and `Dssgd.epsilon` says so.
- devices alone, and all samples in one place.

Nothing here is a mechanism of ours: floating-point noise (R5), a trusted server, no ledger.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.errors import TaskError
from crowdml.experiments.published.matrix_noise import factorise
from crowdml.models import Model
from crowdml.privacy.calibration import rho_for
from crowdml.privacy.losses import ZCDP, Total
from crowdml.privacy.sensitivity import Observer


@dataclass(frozen=True)
class Recipe:
    """What all methods share: T rounds of m devices, each of which takes S_d steps of B_d samples."""

    rounds: int
    cohort: int
    local_steps: int
    minibatch: int
    rate: float
    server_rate: float = 1.0

    def cohorts(self, devices: int, seed: int) -> Array:
        """[T, m]: the crowd in an order of its own, pass after pass, cut into cohorts; who is left over sits out.

        So a device is in a cohort once, in a pass at most once, and in at most `uses` rounds.
        """
        a_pass = self._a_pass(devices)
        chance = np.random.default_rng([seed, 3])
        met = [
            chance.permutation(devices)[: a_pass * self.cohort].reshape(a_pass, self.cohort)
            for _ in range(self.uses(devices))
        ]
        return np.concatenate(met)[: self.rounds].astype(np.int32)

    def uses(self, devices: int) -> int:
        """The most rounds that one device takes part in."""
        return -(-self.rounds // self._a_pass(devices))

    def _a_pass(self, devices: int) -> int:
        if self.cohort > devices:
            raise TaskError(f"cohort = {self.cohort}: there are {devices} devices.")
        return devices // self.cohort


NEXT = 1
"""Rounds between two of one device, at the least: it may be the last of a pass and the first of the next."""


# --- what leaves, and what the server does with it ---


@dataclass(frozen=True)
class Average:
    """Plain federated averaging: the server sees every update."""

    def device(self, moved: Array, key: Array) -> Array:
        return moved

    def noise(self, rounds: int, length: int, seed: int) -> Array:
        return np.zeros((rounds, 1), np.float32)


@dataclass(frozen=True)
class Csdp:
    """Updates clipped to `clip`, and Gaussian noise of deviation `sigma` on their sum, added by the server.

    `correlated`: the noise of rounds takes back that of earlier ones ("square-root", "banded", "tree"), for devices
    that take part once.
    """

    clip: float
    sigma: float
    correlated: str = "independent"

    def device(self, moved: Array, key: Array) -> Array:
        return moved * jnp.minimum(1.0, self.clip / jnp.maximum(jnp.sqrt((moved * moved).sum()), 1e-30))

    def noise(self, rounds: int, length: int, seed: int) -> Array:
        made = factorise(self.correlated, rounds)
        return np.asarray(made.noise(jax.random.PRNGKey(seed), length, self.sigma, observer=Observer.DEVICES))

    def loss(self, plan: Recipe, devices: int) -> ZCDP:
        """Loss of replacing one device in all its rounds: each moves its sum by 2 clips."""
        made = factorise(self.correlated, plan.rounds)
        return made.loss(2 * self.clip, self.sigma, participations=plan.uses(devices), separation=NEXT)

    def epsilon(self, plan: Recipe, devices: int, delta: float) -> float:
        return Total.of([self.loss(plan, devices)]).epsilon(delta)


def csdp_for(
    epsilon: float, delta: float, plan: Recipe, devices: int, *, clip: float, correlated: str = "independent"
) -> Csdp:
    """The least noise for a device's total."""
    rho = float(rho_for(epsilon, delta))
    made = factorise(correlated, plan.rounds)
    sigma = made.sigma(2 * clip, rho, participations=plan.uses(devices), separation=NEXT)
    return Csdp(clip, sigma, correlated)


@dataclass(frozen=True)
class Dssgd:
    """A device uploads `share` of its update's entries, each bounded to [-bound, bound] (their Figs. 1 and 12).

    Without `per_parameter` the largest ones, as they are. With it, entries in random order whose noisy size passes a
    noisy threshold, with noise for an epsilon of `per_parameter` *an uploaded entry*.
    """

    share: float
    bound: float = 1.0
    per_parameter: float | None = None
    threshold: float = 1e-4

    def uploaded(self, length: int) -> int:
        """c: the most entries of one turn."""
        return max(1, math.ceil(self.share * length))

    def epsilon(self, plan: Recipe, devices: int, length: int) -> float:
        """What one device really pays, pure: for every entry of every turn."""
        if self.per_parameter is None:
            return math.inf
        return self.per_parameter * self.uploaded(length) * plan.uses(devices)

    def device(self, moved: Array, key: Array) -> Array:
        flat = jnp.clip(moved.reshape(-1), -self.bound, self.bound)
        most = self.uploaded(flat.shape[0])
        if self.per_parameter is None:
            least = jax.lax.top_k(jnp.abs(flat), most)[0][-1]
            return jnp.where(jnp.abs(flat) >= least, flat, 0).reshape(moved.shape)
        return self._noisy(flat, key, most).reshape(moved.shape)

    def _noisy(self, flat: Array, key: Array, most: int) -> Array:
        """Epsilon of a turn: 8/9 of it finds the entries, 1/9 noises them; each entry moves by at most 2 bounds."""
        assert self.per_parameter is not None
        turn = self.per_parameter * most
        find, tell = 2 * most * 2 * self.bound / (8 / 9 * turn), 2 * most * 2 * self.bound / (2 / 9 * turn)
        one, two, three, four = jax.random.split(key, 4)
        size = flat.shape[0]
        order = jax.random.permutation(one, size)
        hurdle = find * jax.random.laplace(two, (most + 1,))  # drawn anew after each upload
        blur = 2 * find * jax.random.laplace(three, (size,))

        def look(found: Array, feed: Any) -> Any:
            entry, noise = feed
            over = (jnp.abs(entry) + noise >= self.threshold + hurdle[found]) & (found < most)
            return found + over, over

        _, over = jax.lax.scan(look, jnp.int32(0), (flat[order], blur))
        chosen = jnp.zeros(size, bool).at[order].set(over)
        told = jnp.clip(flat + tell * jax.random.laplace(four, (size,)), -self.bound, self.bound)
        return jnp.where(chosen, told, 0)

    def noise(self, rounds: int, length: int, seed: int) -> Array:
        return np.zeros((rounds, 1), np.float32)


Rule = Average | Csdp | Dssgd


# --- the runner ---


def shares(x: Array, y: Array, devices: int, seed: int) -> tuple[Array, Array]:
    """x [n, J, d], y [n, J]: rows dealt out evenly, the rest of them to nobody."""
    held = len(y) // devices
    rows = np.random.default_rng([seed, 2]).permutation(len(y))[: devices * held].reshape(devices, held)
    return x[rows], y[rows]


def learn(model: Model, x: Array, y: Array, plan: Recipe, rule: Rule, seed: int, *, looks: Sequence[int] = ()) -> Array:
    """Weights [E, *shape] after `looks` rounds, or after all of them: devices x [n, J, d], y [n, J] under a rule.

    A device takes its minibatches in order, on from where it stopped, and begins each round at the published weights.
    """
    devices, length = len(y), math.prod(model.shape)
    if plan.minibatch > y.shape[1]:
        raise TaskError(f"minibatch = {plan.minibatch}: a device holds {y.shape[1]} samples.")
    cohort = plan.cohorts(devices, seed)
    trips = np.zeros(devices, np.int64)
    trip = np.zeros_like(cohort)
    for number, each in enumerate(cohort):
        trip[number] = trips[each]
        trips[each] += 1
    noise = rule.noise(plan.rounds, length, seed).astype(np.float32)
    keys = np.asarray(jax.random.split(jax.random.PRNGKey(seed + 1), plan.rounds))
    loop = _loop(plan, rule if not isinstance(rule, Csdp) else Csdp(rule.clip, 0.0), model)
    every = np.asarray(loop(jnp.asarray(x), jnp.asarray(y), (cohort, trip, keys, noise)))
    return every[[number - 1 for number in (looks or (plan.rounds,))]]


@lru_cache(maxsize=32)
def _loop(plan: Recipe, rule: Rule, model: Model) -> Any:
    def moved(weights: Array, x: Array, y: Array, trip: Array) -> Array:
        def step(w: Array, number: Array) -> Any:
            first = (trip * plan.local_steps + number) * plan.minibatch
            rows = (first + jnp.arange(plan.minibatch)) % y.shape[0]
            return w - plan.rate * model.gradient_sum(w, Samples(x[rows], y[rows])) / plan.minibatch, None

        return weights - jax.lax.scan(step, weights, jnp.arange(plan.local_steps))[0]

    def one_round(x: Array, y: Array, weights: Array, feed: Any) -> Any:
        cohort, trip, key, noise = feed
        keys = jax.random.split(key, plan.cohort)

        def device(total: Array, each: Any) -> Any:
            number, late, secret = each
            return total + rule.device(moved(weights, x[number], y[number], late), secret), None

        total, _ = jax.lax.scan(device, jnp.zeros_like(weights), (cohort, trip, keys))
        total = total + (noise.reshape(weights.shape) if noise.shape[0] > 1 else noise[0])
        weights = weights - plan.server_rate * total / plan.cohort
        return weights, weights

    def whole(x: Array, y: Array, feed: Any) -> Array:
        return jax.lax.scan(lambda w, f: one_round(x, y, w, f), jnp.asarray(model.start()), feed)[1]

    return jax.jit(whole)


def alone(model: Model, x: Array, y: Array, plan: Recipe) -> Array:
    """Weights [n, *shape] of devices that take all their steps by themselves, as many as one would in `plan`."""
    return np.asarray(_alone(plan, model)(jnp.asarray(x), jnp.asarray(y)))


@lru_cache(maxsize=32)
def _alone(plan: Recipe, model: Model) -> Any:
    def device(x: Array, y: Array) -> Array:
        def step(w: Array, number: Array) -> Any:
            rows = (number * plan.minibatch + jnp.arange(plan.minibatch)) % y.shape[0]
            return w - plan.rate * model.gradient_sum(w, Samples(x[rows], y[rows])) / plan.minibatch, None

        return jax.lax.scan(step, jnp.asarray(model.start()), jnp.arange(plan.rounds * plan.local_steps))[0]

    return jax.jit(lambda x, y: jax.lax.map(lambda pair: device(*pair), (x, y)))


def centralised(model: Model, x: Array, y: Array, plan: Recipe) -> Array:
    """Weights [*shape] of one device that holds everything, x [n, J, d], and takes as many steps as a whole cohort."""
    flat = x.reshape(1, -1, x.shape[-1]), y.reshape(1, -1)
    wide = Recipe(plan.rounds, 1, plan.local_steps, min(plan.minibatch * plan.cohort, flat[1].shape[1]), plan.rate)
    return alone(model, *flat, wide)[0]


def accuracy(model: Model, weights: Array, x: Array, y: Array) -> float:
    return float((np.asarray(model.predict(weights, x)) == y).mean())
