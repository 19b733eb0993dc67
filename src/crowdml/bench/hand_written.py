"""The limit: Crowd-ML's loop written by hand, for one model, one batch size and one noise. Nothing general, no guards.

It does the work of the paper's Fig. 4 and no more: read the weights that a device had from a ring, softmax gradient of
its samples, error and label counts, projected step, put the weights into the ring. With noise: truncate to a grid, add
500 + 1 + 10 discrete Laplace values from a hash. What ours does on top is what makes it private and general: it clips
each sample, checks the integers, survives non-finite input, and sends what it computed as messages between handlers.

How it was made fast is in docs/performance.md: weights as [classes, features], one vector of noise a step, two steps an
iteration of the loop, an update of the ring that asks no question about bounds.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

U = np.uint32
GRID = 2048.0
"""Steps of the grid in 1."""


def scan(
    ring: int,
    c: float,
    radius: float,
    scale: float | None,
    classes: int = 10,
    unroll: int = 2,
    clip: float | None = None,
) -> Any:
    """A jitted function of x [N, b, d], y [N, b], version [N] -> weights [d, classes], errors, label counts [classes].

    `ring` is a power of two above the largest staleness; `scale`, in grid steps, is that of the gradient's noise. With
    `clip`, in grid steps, each sample's gradient is clipped in the l1 norm and truncated before they are added up: the
    norm of an outer product is the product of two norms.
    """

    def step(carry: Any, feed: Any) -> Any:
        weights, offered, errors, labels = carry
        x, y, version, t, rate = feed
        batch, size = x.shape[0], weights.size
        read = jax.lax.dynamic_index_in_dim(offered, version & (ring - 1), keepdims=False)
        scores = read @ x.T  # [classes, b]
        odds = jnp.exp(scores - scores.max(0))
        hot = jnp.arange(classes)[:, None] == y
        slope = odds / odds.sum(0) - hot  # [classes, b]
        if clip is not None:
            lengths = abs(x).sum(1) * abs(slope).sum(0) * GRID
            scaled = slope * (GRID * jnp.minimum(1.0, clip / lengths))
            steps = (scaled[:, :, None] * x).astype(jnp.int32).sum(1)
            gradient = steps.astype(jnp.float32) * (1 / GRID)
        else:
            gradient = slope @ x if batch > 1 else slope * x
        wrong = (scores.argmax(0) != y).sum(dtype=jnp.int32)
        counts = hot.sum(1, dtype=jnp.int32)
        if scale is not None:
            scales = np.repeat(np.array([scale, 10.0, 20.0], np.float32), [size, 1, classes])
            noise = laplace(t, scales)
            steps = (gradient * GRID).astype(jnp.int32) + noise[:size].reshape(gradient.shape)
            gradient = steps.astype(jnp.float32) * (1 / GRID)
            wrong = wrong + noise[size]
            counts = counts + noise[size + 1 :]
        moved = weights - rate * gradient
        moved = moved * jnp.minimum(1.0, radius * jax.lax.rsqrt((moved * moved).sum()))
        offered = jax.lax.dynamic_update_index_in_dim(offered, moved, (t + 1) & (ring - 1), 0)
        return (moved, offered, errors + wrong, labels + counts), None

    def run(x: Any, y: Any, version: Any) -> Any:
        count, batch, features = x.shape
        zeros = jnp.zeros((classes, features), jnp.float32)
        start = (zeros, jnp.zeros((ring, *zeros.shape), jnp.float32), jnp.int32(0), jnp.zeros(classes, jnp.int32))
        t = jnp.arange(count, dtype=jnp.int32)
        feed = (x, y, version, t, c / batch / jnp.sqrt(t.astype(jnp.float32) + 1))
        (weights, _, errors, labels), _ = jax.lax.scan(step, start, feed, unroll=unroll)
        return weights.T, errors, labels

    return jax.jit(run)


def laplace(t: Any, scales: np.ndarray[Any, np.dtype[np.float32]]) -> Any:
    """Discrete Laplace noise of step t, one value a scale: a fair sign and the floor of an exponential variable.

    A counter hash gives 23 bits of uniform in (0, 1], a polynomial its logarithm, all in float32. floor(scale E) is
    geometric; its zero counts for both signs, so zero comes twice as often as the discrete Laplace law has it. At
    scales of hundreds of steps that is next to nothing, and the work is the same.
    """
    word = (jnp.arange(scales.size, dtype=jnp.uint32) * U(0x9E3779B9)) ^ (t.astype(jnp.uint32) * U(0x85EBCA6B))
    word = (word ^ (word >> U(16))) * U(0x7FEB352D)
    word = (word ^ (word >> U(15))) * U(0x846CA68B)
    word = word ^ (word >> U(16))
    u = ((word >> U(9)) + U(1)).astype(jnp.float32) * (1 / 8388608.0)
    steps = (-scales * log(u)).astype(jnp.int32)
    return jnp.where((word & U(1)) == 1, steps, -steps)


def log(u: Any) -> Any:
    """Logarithm of u in (0, 1], float32, by the exponent and a polynomial on the mantissa (error below 2e-6)."""
    bits = jax.lax.bitcast_convert_type(u, jnp.int32)
    exponent = ((bits >> 23) - 127).astype(jnp.float32)
    f = jax.lax.bitcast_convert_type((bits & 0x7FFFFF) | 0x3F800000, jnp.float32) - 1.0
    value = jnp.float32(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        value = value * f + jnp.float32(coefficient)
    return value * f + exponent * jnp.float32(np.log(2))


def _fit() -> tuple[float, ...]:
    """Coefficients of log(1 + f) / f on [0, 1], degree 7, at Chebyshev points."""
    nodes = np.cos(np.pi * (np.arange(8) + 0.5) / 8) * 0.5 + 0.5
    return tuple(np.polyfit(nodes, np.log1p(nodes) / nodes, 7))


COEFFICIENTS = _fit()


def numpy_loop(x: Any, y: Any, version: Any, *, ring: int, c: float, radius: float, scale: float | None) -> Any:
    """A hand-written loop at b = 1 in plain NumPy, a Python loop: x [N, 1, d], y [N, 1], version [N] -> as `scan`."""
    rng = np.random.default_rng(0)
    classes, (count, _, features) = 10, x.shape
    offered = np.zeros((ring, features, classes), np.float32)
    weights, errors, labels = offered[0].copy(), 0, np.zeros(classes, np.int64)
    stay = {each: -np.expm1(-1 / each) for each in (scale, 10.0, 20.0) if each is not None}

    def noise(each: float, size: Any = None) -> Any:
        return rng.geometric(stay[each], size) - rng.geometric(stay[each], size)

    for t in range(count):
        row, label = x[t, 0], int(y[t, 0])
        scores = row @ offered[version[t] & (ring - 1)]
        residual = np.exp(scores - scores.max())
        residual /= residual.sum()
        residual[label] -= 1
        gradient = np.outer(row, residual)
        wrong, label_noise = int(scores.argmax() != label), 0
        if scale is not None:
            steps = (gradient * GRID).astype(np.int32) + noise(scale, gradient.shape)
            gradient = steps.astype(np.float32) * np.float32(1 / GRID)
            wrong, label_noise = wrong + noise(10.0), noise(20.0, classes)
        weights = weights - np.float32(c / np.sqrt(t + 1)) * gradient
        size = np.sqrt((weights * weights).sum())
        if size > radius:
            weights *= radius / size
        offered[(t + 1) & (ring - 1)] = weights
        errors += wrong
        labels[label] += 1
        labels += label_noise
    return weights, errors, labels


def scan_of_rounds(widths: tuple[int, ...], rate: float) -> Any:
    """A jitted function of weights [P], x [M, S, b, d], y [M, S, b], device [R, m] -> weights [P] after R rounds.

    Federated averaging of a ReLU network with softmax on top, nothing else: scans over rounds, over the devices of a
    round and over the steps of a device, layers as arrays of their own. No clipping, no guard, nothing checked. Of the
    forms that were tried this one is the fastest on a CPU (docs/performance.md).
    """
    step = local_step(widths, rate)

    def run(weights: Any, x: Any, y: Any, device: Any) -> Any:
        layers = layers_of(widths, weights)

        def one_round(layers: Any, cohort: Any) -> Any:
            def one(total: Any, number: Any) -> Any:
                moved, _ = jax.lax.scan(step, layers, (x[number], y[number]))
                return jax.tree.map(lambda all_of, each: all_of + each * (1 / cohort.size), total, moved), None

            return jax.lax.scan(one, jax.tree.map(jnp.zeros_like, layers), cohort)[0], None

        layers, _ = jax.lax.scan(one_round, layers, device)
        return jnp.concatenate([part.reshape(-1) for layer in layers for part in layer])

    return jax.jit(run)


def rounds_side_by_side(widths: tuple[int, ...], rate: float, rounds: int) -> Any:
    """A jitted function of weights [P], x [M, S, b, d], y [M, S, b] -> weights [P] after rounds of all M devices.

    As `scan_of_rounds`, for an accelerator: the devices of a round side by side, in one `vmap`.
    """
    step = local_step(widths, rate)

    def run(weights: Any, x: Any, y: Any) -> Any:
        def one_round(layers: Any, _: Any) -> Any:
            moved = jax.vmap(lambda x, y: jax.lax.scan(step, layers, (x, y))[0])(x, y)
            return jax.tree.map(lambda each: each.mean(0), moved), None

        layers, _ = jax.lax.scan(one_round, layers_of(widths, weights), length=rounds)
        return jnp.concatenate([part.reshape(-1) for layer in layers for part in layer])

    return jax.jit(run)


def layers_of(widths: tuple[int, ...], weights: Any) -> list[tuple[Any, Any]]:
    """Weights [P] as a matrix and biases for each layer."""
    layers, at = [], 0
    for into, out in itertools.pairwise(widths):
        biases = at + into * out
        layers.append((weights[at:biases].reshape(into, out), weights[biases : biases + out]))
        at = biases + out
    return layers


def local_step(widths: tuple[int, ...], rate: float) -> Any:
    """A step of `scan` on a minibatch: layers, (x [b, d], y [b]) -> layers."""

    def step(layers: Any, feed: Any) -> Any:
        x, y = feed
        entering = [x]
        for matrix, biases in layers[:-1]:
            entering.append(jnp.maximum(entering[-1] @ matrix + biases, 0))
        scores = entering[-1] @ layers[-1][0] + layers[-1][1]
        odds = jnp.exp(scores - scores.max(1, keepdims=True))
        slope = (odds / odds.sum(1, keepdims=True) - (y[:, None] == jnp.arange(widths[-1]))) * (1 / len(x))
        after = []
        for (matrix, biases), a in zip(layers[::-1], entering[::-1], strict=True):
            after.append((matrix - rate * (a.T @ slope), biases - rate * slope.sum(0)))
            slope = jnp.where(a > 0, slope @ matrix.T, 0)  # of the features nobody asks: it is not computed
        return after[::-1], None

    return step


def round_of_all(*, rate: float, clip: float, sigma: float, classes: int = 10) -> Any:
    """A jitted function of weights [d, c], x [M, n, d], y [M, n], round -> weights after a round of all M devices.

    A device's mean softmax gradient, brought into the l2 ball of radius `clip`, with Gaussian noise of `sigma` in
    float32 from a hash; the mean over the crowd moves the weights. No grid, no guard, and nothing is looked up: devices
    lie in the order in which they are taken.
    """

    def run(weights: Any, x: Any, y: Any, number: Any) -> Any:
        devices, held = y.shape
        scores = x @ weights
        odds = jnp.exp(scores - scores.max(-1, keepdims=True))
        slope = (odds / odds.sum(-1, keepdims=True) - (y[..., None] == jnp.arange(classes))) * (1 / held)
        gradient = jnp.einsum("mnd,mnc->mdc", x, slope)
        squares = (gradient * gradient).sum((1, 2), keepdims=True)
        gradient = gradient * jnp.minimum(1, clip * jax.lax.rsqrt(squares))
        return weights - rate / devices * (gradient + sigma * normal(gradient.shape, number)).sum(0)

    return jax.jit(run)


def pass_in_cohorts(*, rate: float, clip: float, sigma: float, cohorts: int, classes: int = 10) -> Any:
    """A jitted function of weights, x [M, n, d], y [M, n] -> weights after as many rounds as there are cohorts, each of
    which moves them: what a crowd under masks does. Written out, which was as fast as a `scan` and no slower."""
    one = round_of_all(rate=rate, clip=clip, sigma=sigma, classes=classes)

    def run(weights: Any, x: Any, y: Any) -> Any:
        size = len(x) // cohorts
        for number in range(cohorts):
            some = slice(number * size, (number + 1) * size)
            weights = one(weights, x[some], y[some], jnp.int32(number))
        return weights

    return jax.jit(run)


def normal(shape: tuple[int, ...], stream: Any) -> Any:
    """Gaussian noise in float32: a counter hash gives 23 bits, and the inverse of the error function the rest."""
    word = jnp.arange(int(np.prod(shape)), dtype=jnp.uint32) * U(0x9E3779B9) ^ stream.astype(jnp.uint32) * U(0x85EBCA6B)
    word = (word ^ (word >> U(16))) * U(0x7FEB352D)
    word = (word ^ (word >> U(15))) * U(0x846CA68B)
    word = word ^ (word >> U(16))
    even = ((word >> U(9)).astype(jnp.float32) + 0.5) * (1 / 4194304.0) - 1  # within (-1, 1)
    return (np.float32(np.sqrt(2)) * jax.lax.erf_inv(even)).reshape(shape)


def scan_of_trials(ring: int, c: float, radius: float, scale: float, classes: int = 10, unroll: int = 4) -> Any:
    """`scan` for T trials at once and one sample a check-in: x [n, d], y [n], rows [N, T], version [N, T] -> weights,
    errors and label counts of each trial. The sample's row is read in the loop, from a pool that all trials share."""

    def run(x: Any, y: Any, rows: Any, version: Any) -> Any:
        count, trials = rows.shape
        features = x.shape[1]
        size = classes * features
        scales = np.repeat(np.array([scale, 10.0, 20.0], np.float32), [size, 1, classes])
        scales = np.broadcast_to(scales, (trials, scales.size)).reshape(-1)
        everyone = jnp.arange(trials)

        def step(carry: Any, feed: Any) -> Any:
            offered, errors, labels = carry
            row, late, t, rate = feed
            weights = jax.lax.dynamic_index_in_dim(offered, t & (ring - 1), keepdims=False)
            one, label = x[row], y[row]
            read = offered[late & (ring - 1), everyone]  # [T, c, d]
            scores = (read * one[:, None, :]).sum(-1)
            odds = jnp.exp(scores - scores.max(-1, keepdims=True))
            hot = label[:, None] == jnp.arange(classes)
            gradient = (odds / odds.sum(-1, keepdims=True) - hot)[..., None] * one[:, None, :]
            noise = laplace(t, scales).reshape(trials, -1)
            steps = (gradient * GRID).astype(jnp.int32) + noise[:, :size].reshape(gradient.shape)
            moved = weights - rate * (steps.astype(jnp.float32) * (1 / GRID))
            moved = moved * jnp.minimum(1.0, radius * jax.lax.rsqrt((moved * moved).sum((1, 2), keepdims=True)))
            errors = errors + (scores.argmax(-1) != label) + noise[:, size]
            labels = labels + hot.astype(jnp.int32) + noise[:, size + 1 :]
            offered = jax.lax.dynamic_update_index_in_dim(offered, moved, (t + 1) & (ring - 1), 0)
            return (offered, errors, labels), None

        zeros = jnp.zeros((trials, classes, features), jnp.float32)
        none = jnp.zeros(trials, jnp.int32), jnp.zeros((trials, classes), jnp.int32)
        t = jnp.arange(count, dtype=jnp.int32)
        feed = (rows, version, t, c / jnp.sqrt(t.astype(jnp.float32) + 1))
        start = (jnp.zeros((ring, *zeros.shape), jnp.float32), *none)
        (offered, errors, labels), _ = jax.lax.scan(step, start, feed, unroll=unroll)
        return jnp.swapaxes(offered[count & (ring - 1)], 1, 2), errors, labels

    return jax.jit(run)
