"""The public extractor that comes with the package: trained on digits that code draws, with nobody's pictures in it.

`crowdml data extractor FILE` runs this. The network is the model `cnn`, and its layers up to the hidden one are
what devices use. The same seed draws the same digits and takes the same steps; floats add up in another order on
another machine, so a file made again does as well but has another hash. The shipped one is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.experiments.drawn import SIDE, draw_digits
from crowdml.features.extractor import FORMAT, upright
from crowdml.models import Cnn
from crowdml.safetensors import pack_tensors

DRAWINGS, PASSES, BATCH, SEED = 59_760, 8, 128, 1
STEP, DECAY = 1e-3, 1e-4
"""Of Adam: the first step size, which falls to 0 along a cosine, and how much of each weight a step takes away."""
CENTRED = 2_000
"""Drawings whose mean is the centre."""
MODEL = Cnn(SIDE * SIDE, 10, seed=SEED)

Tell = Callable[[int, int], None]


def drawings(count: int, seed: int = SEED) -> Samples:
    """Drawn digits as the extractor's network sees them, at norm one."""
    x, y = draw_digits(count, np.random.default_rng([seed, count]))
    parts = [upright(x[at : at + 1000], SIDE).reshape(-1, SIDE * SIDE) for at in range(0, count, 1000)]
    return Samples(np.concatenate(parts) / np.float32(SIDE), y)


def train(count: int = DRAWINGS, passes: int = PASSES, model: Cnn = MODEL, tell: Tell = lambda done, of: None) -> Array:
    """The weights of the model after so many passes over so many drawings."""
    known = drawings(count, model.seed)
    chance = np.random.default_rng([model.seed, 1])
    steps = passes * (count // BATCH)
    weights = jnp.asarray(model.start())
    first, second = jnp.zeros_like(weights), jnp.zeros_like(weights)
    order = np.empty(0, np.intp)
    for step in range(steps):
        if len(order) < BATCH:
            order = chance.permutation(count)
        rows, order = order[:BATCH], order[BATCH:]
        shift = tuple(chance.integers(-1, 2, 2))
        x = np.roll(known.x[rows].reshape(-1, SIDE, SIDE), shift, (1, 2)).reshape(len(rows), -1)
        weights, first, second = _adam(model, weights, first, second, step, steps, x, known.y[rows])
        if step % 50 == 49 or step == steps - 1:
            tell(step + 1, steps)
    return np.asarray(weights)


@partial(jax.jit, static_argnums=0)
def _adam(model: Cnn, weights: Array, first: Array, second: Array, step: Any, steps: Any, x: Array, y: Array) -> Any:
    slope = model.gradient_sum(weights, Samples(x, y)) / len(x)
    first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope * slope
    moved = (first / (1 - 0.9 ** (step + 1.0))) / (jnp.sqrt(second / (1 - 0.999 ** (step + 1.0))) + 1e-8)
    size = STEP * 0.5 * (1 + jnp.cos(jnp.pi * step / steps))
    return weights - size * (moved + DECAY * weights), first, second


def pack(model: Cnn, weights: Array, centred: Samples) -> bytes:
    """The extractor's file: the layers up to the hidden one, and that one's mean on drawings."""
    layers = model.layers(weights)[:-1]
    tensors = {}
    for place, (kernel, biases) in enumerate(layers):
        tensors |= {f"weights.{place}": kernel, f"biases.{place}": biases}
    hidden = _hidden(model, weights, centred.x)
    metadata = {"format": FORMAT, "side": str(model.side), "made": "trained on digits drawn by code"}
    return pack_tensors({**tensors, "centre": hidden.mean(axis=0)}, metadata, "F16")


def _hidden(model: Cnn, weights: Array, x: Array) -> Array:
    """What the hidden layer says of pictures, [n, hidden]."""
    matrix, biases = model.layers(weights)[-2]
    parts = [model.enters_head(weights, x[at : at + 250]) for at in range(0, len(x), 250)]
    return np.maximum(np.concatenate(parts) @ matrix + biases, 0)


def make(count: int = DRAWINGS, passes: int = PASSES, tell: Tell = lambda done, of: None) -> bytes:
    """Train and pack: the file, byte by byte."""
    weights = train(count, passes, tell=tell)
    return pack(MODEL, weights, drawings(CENTRED, SEED + 1))
