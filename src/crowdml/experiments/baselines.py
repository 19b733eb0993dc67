"""What Crowd-ML is compared with: everything in one place, or everybody alone. Plain functions.

Hamm et al. 2015, sections IV-A and V-C, Appendix C. Softmax regression without an intercept throughout, weights [d, c],
as in the crowd.

Where we differ: the paper's (16) spends half of its label budget, so the k-ary randomised response that spends all of
it stands beside it (review, H7). Nothing here is a mechanism of ours: the noise is floating-point noise in a
simulation, as the paper's is, and no device draws it (R5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.datasets import Dataset
from crowdml.datasets.populations import Population
from crowdml.models import Model


@dataclass(frozen=True)
class Perturbed:
    """Samples as a central server would receive them, each noised once on its device: reading them again is free."""

    x: Array
    y: Array
    epsilon: float
    """The honest total for one sample."""


def label_epsilon(epsilon_y: float, *, fair: bool) -> float:
    """What perturbing a label costs: all of epsilon_y, or, with the halved exponent of (16), half of it."""
    return epsilon_y if fair else epsilon_y / 2


def kept_labels(epsilon_y: float, classes: int, *, fair: bool) -> float:
    """The chance that a label stays as it is: e^a / (e^a + C - 1), a = epsilon_y, or epsilon_y / 2 as published."""
    return 1 / (1 + (classes - 1) * math.exp(-label_epsilon(epsilon_y, fair=fair)))


def perturb(x: Array, y: Array, classes: int, epsilon: float, chance: np.random.Generator, *, fair: bool) -> Perturbed:
    """Eq. (15) and (16) with epsilon_x = epsilon_y = epsilon / 2: x [n, d] with |x|_1 <= 1, y [n].

    Features take Laplace noise of scale 2 / epsilon_x in each coordinate (sensitivity 2, replace-one).
    """
    half = epsilon / 2
    noisy = (x + chance.laplace(0.0, 2 / half, x.shape)).astype(np.float32)
    kept = chance.random(len(y)) < kept_labels(half, classes, fair=fair)
    other = (y + chance.integers(1, classes, len(y))) % classes
    return Perturbed(noisy, np.where(kept, y, other).astype(np.int32), half + label_epsilon(half, fair=fair))


def errors(weights: Array, x: Array, y: Array) -> Array:
    """Share of (x, y) that each model [..., d, c] gets wrong, [...]; the first of equal scores wins."""
    flat = np.asarray(weights).reshape(-1, *np.shape(weights)[-2:])
    told = jnp.asarray(x)
    labels = jnp.asarray(y)
    return np.asarray([_errors(jnp.asarray(part), told, labels) for part in flat]).reshape(np.shape(weights)[:-2])


@jax.jit
def _errors(weights: Array, x: Array, y: Array) -> Array:
    return jnp.mean(jnp.argmax(x @ weights, axis=-1) != y)


def public_only(model: Model, data: Dataset, *, steps: int = 1000, rates: Sequence[float] = (4.0, 1.0, 0.25)) -> float:
    """Error on the test rows of the same model from the public rows alone, by so many steps on all of them, no noise.

    What a server has before anybody takes part: a crowd that does not beat it was not needed. Of the rates, the one
    with the least loss on the public rows.
    """
    public = Samples(data.x_public, data.y_public)
    found: list[tuple[float, float]] = []
    for rate in rates:
        weights = model.start()
        for _ in range(steps):
            weights = weights - rate / len(data.y_public) * model.gradient_sum(weights, public)
        wrong = np.asarray(model.predict(weights, data.x_test)) != data.y_test
        found.append((float(np.mean(model.losses(weights, public))), float(wrong.mean())))
    return min(found)[1]


def batch(x: Array, y: Array, classes: int, *, l2: float = 0.0, iterations: int = 200) -> Array:
    """Centralised batch training: the minimiser of the mean loss + l2 / 2 |w|^2, by L-BFGS, weights [d, c].

    Features are scaled to a like variance inside, for the solver's sake; the penalty is on the weights as they are.
    """
    from scipy.optimize import minimize  # an extra of the simulator

    scale = np.sqrt((np.asarray(x, np.float64) ** 2).mean(0)) + 1e-12
    scaled, labels = jnp.asarray(np.asarray(x) / scale, jnp.float32), jnp.asarray(y)
    shape = (x.shape[1], classes)
    scale32 = jnp.asarray(scale, jnp.float32)

    def value(flat: Any) -> tuple[float, Any]:
        loss, slope = _risk(jnp.asarray(flat, jnp.float32).reshape(shape), scaled, labels, scale32, l2)
        return float(loss), np.asarray(slope, np.float64).ravel()

    found = minimize(value, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options={"maxiter": iterations})
    return (found.x.reshape(shape) / scale[:, None]).astype(np.float32)


@jax.jit
def _risk(weights: Array, x: Array, y: Array, scale: Array, l2: Array) -> tuple[Array, Array]:
    def risk(w: Array) -> Array:
        scores = x @ w
        of_label = jnp.take_along_axis(scores, y[:, None], axis=1)[:, 0]
        true = w / scale[:, None]
        return jnp.mean(jax.nn.logsumexp(scores, axis=1) - of_label) + l2 / 2 * (true * true).sum()

    return jax.value_and_grad(risk)(weights)


def central_sgd(
    x: Array, y: Array, classes: int, order: Array, *, c: float, radius: float, looks: int
) -> tuple[Array, Array]:
    """Centralised SGD, eq. (3) and (5), over the rows `order` [N, b] -> looks [E], evenly spaced, weights [E, d, c]."""
    part = max(1, len(order) // looks)
    whole = order[: part * looks].reshape(looks, part, order.shape[1])
    start = (jnp.zeros((x.shape[1], classes), jnp.float32), jnp.float32(0))
    _, weights = _sgd(start, jnp.asarray(x), jnp.asarray(y), jnp.asarray(whole), c, radius)
    return part * np.arange(1, looks + 1), np.asarray(weights)


@jax.jit
def _sgd(start: Any, x: Array, y: Array, order: Array, c: Array, radius: Array) -> Any:
    def stretch(state: Any, rows: Array) -> Any:
        state, _ = jax.lax.scan(partial(_step, x, y, c, radius), state, rows)
        return state, state[0]

    return jax.lax.scan(stretch, start, order)


def _step(x: Array, y: Array, c: Array, radius: Array, state: Any, rows: Array) -> Any:
    """w <- project(w - c / sqrt(t) * mean gradient)."""
    weights, t = state
    mine, labels = x[rows], y[rows]
    residual = jax.nn.softmax(mine @ weights) - jax.nn.one_hot(labels, weights.shape[1])
    stepped = weights - c / jnp.sqrt(t + 1) * (mine.T @ residual) / rows.shape[0]
    size = jnp.sqrt((stepped * stepped).sum())
    return (stepped * jnp.minimum(1.0, radius / jnp.maximum(size, 1e-30)), t + 1), None


def decentralised(
    x: Array, y: Array, classes: int, population: Population, *, c: float, radius: float, passes: int, looks: Array
) -> Array:
    """Every device learns alone from its own samples by SGD with b = 1: weights [E, M, d, c] after `looks` [E] samples
    of each device; passes repeat its samples in order.
    """
    held = population.rows.shape[1]
    order = jnp.asarray(np.tile(population.rows, (1, passes))[:, :, None])
    ends = [int(look) for look in looks]
    if ends[-1] > held * passes:
        raise ValueError(f"A device has {held * passes} samples with its passes, so no model after {ends[-1]}.")
    weights = jnp.zeros((population.devices, x.shape[1], classes), jnp.float32)
    steps = jnp.zeros(population.devices, jnp.float32)
    told, labels = jnp.asarray(x), jnp.asarray(y)
    found: list[Array] = []
    at = 0
    for end in ends:
        weights, steps = _alone(weights, steps, told, labels, order[:, at:end], c, radius)
        found.append(np.asarray(weights))
        at = end
    return np.stack(found)


@jax.jit
def _alone(weights: Array, steps: Array, x: Array, y: Array, order: Array, c: Array, radius: Array) -> Any:
    def one(state: Any, rows: Array) -> Any:
        return jax.vmap(partial(_step, x, y, c, radius))(state, rows)

    state, _ = jax.lax.scan(one, (weights, steps), jnp.swapaxes(order, 0, 1))
    return state


def alone_errors(weights: Array, x: Array, y: Array, dealt: Array) -> Array:
    """Mean over devices of the error of weights [E, M, d, c] on the test rows `dealt` [M, k] to each, [E]."""
    mine, labels = jnp.asarray(x)[dealt], jnp.asarray(y)[dealt]
    return np.asarray([_alone_errors(jnp.asarray(part), mine, labels) for part in weights])


@jax.jit
def _alone_errors(weights: Array, x: Array, y: Array) -> Array:
    return jnp.mean(jnp.argmax(jnp.einsum("mkd,mdc->mkc", x, weights), axis=-1) != y)
