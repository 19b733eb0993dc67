"""The limit: Crowd-ML's loop written by hand in JAX, for one model, one batch size and one noise. Nothing general.

It does the work of the paper's Fig. 4 and no more: gather the weights that a device read from a ring, softmax gradient
of one sample, error and label counts, projected step, put the weights into the ring. With noise: truncate to a grid,
add 500 + 1 + 10 discrete Laplace values from a hash and a polynomial logarithm.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

U = np.uint32


def loop(ring: int, c: float, radius: float, scale: float | None, classes: int = 10) -> Any:
    """A jitted function of (x [N, d], y [N], late [N]) -> weights, errors, label counts."""

    def step(carry: Any, feed: Any) -> Any:
        weights, offered, errors, labels = carry
        x, y, late, t = feed
        read = offered[late & (ring - 1)]
        scores = x @ read
        top = scores.max()
        p = jnp.exp(scores - top)
        hot = jnp.arange(classes) == y
        gradient = x[:, None] * (p / p.sum() - hot)[None, :]
        wrong = (scores.argmax() != y).astype(jnp.int32)
        counts = hot.astype(jnp.int32)
        if scale is not None:
            steps = (gradient * 2048.0).astype(jnp.int32) + laplace(t, 0, gradient.size, scale).reshape(gradient.shape)
            gradient = steps.astype(jnp.float32) * (1 / 2048.0)
            wrong = wrong + laplace(t, 1, 1, 10.0)[0]
            counts = counts + laplace(t, 2, classes, 20.0)
        moved = weights - c / jnp.sqrt(t.astype(jnp.float32) + 1) * gradient
        size = jnp.sqrt((moved * moved).sum())
        moved = moved * jnp.minimum(1.0, radius / size)
        offered = offered.at[(t + 1) & (ring - 1)].set(moved)
        return (moved, offered, errors + wrong, labels + counts), None

    def run(x: Any, y: Any, late: Any) -> Any:
        zeros = jnp.zeros((x.shape[1], classes), jnp.float32)
        start = (zeros, jnp.broadcast_to(zeros, (ring, *zeros.shape)), jnp.int32(0), jnp.zeros(classes, jnp.int32))
        feed = (x, y, late, jnp.arange(x.shape[0], dtype=jnp.int32))
        (weights, _, errors, labels), _ = jax.lax.scan(step, start, feed)
        return weights, errors, labels

    return jax.jit(run)


def laplace(t: Any, draw: int, size: int, scale: float) -> Any:
    """Discrete Laplace by inverse CDF, from a counter hash: 23 bits of uniform, float32."""
    key = (t.astype(jnp.uint32) * U(3) + U(draw)) * U(0x85EBCA6B)
    word = (jnp.arange(size, dtype=jnp.uint32) * U(0x9E3779B9)) ^ key
    word = (word ^ (word >> U(16))) * U(0x7FEB352D)
    word = (word ^ (word >> U(15))) * U(0x846CA68B)
    word = word ^ (word >> U(16))
    u = ((word >> U(9)) + U(1)).astype(jnp.float32) * (1 / 8388608.0)
    steps = jnp.floor(-scale * log(u)).astype(jnp.int32)
    return jnp.where((word & U(1)) == 1, steps, -steps)


def log(u: Any) -> Any:
    """Natural logarithm of u in (0, 1], float32, by the exponent and a polynomial on the mantissa (error 3e-8)."""
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
