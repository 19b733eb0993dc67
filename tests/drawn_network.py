"""A small extractor with weights of chance, as a file and as a task that names it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from crowdml.features.extractor import FORMAT
from crowdml.safetensors import pack_tensors
from crowdml.task import Task, parse

SIDE, FILTERS, HIDDEN = 8, (2, 3), 5

TEXT = """
name = "{name}"
title = "Which picture is this?"
collects = "pictures"
features = {{ dimension = {hidden}, norm = {{ kind = "l2", bound = 1.0 }}, extractor = {{ sha256 = "{sha256}", pixels = 36 }} }}
labels = {{ classes = ["a", "b", "c"] }}
model = {{ kind = "softmax" }}
protocol = {{ kind = "sgd", batch = 5, step = {{ c = 1.0 }} }}
[privacy]
mechanism = "discrete-gaussian"
epsilon = {{ gradient = 1.0 }}
delta = 1e-6
budget = {{ epsilon = 1.0, samples = 1000 }}
"""  # noqa: E501


def tensors(seed: int = 1, *, hidden: int = HIDDEN, side: int = SIDE) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    shapes = {
        "weights.0": (3, 3, 1, FILTERS[0]), "biases.0": (FILTERS[0],),
        "weights.1": (3, 3, *FILTERS), "biases.1": (FILTERS[1],),
        "weights.2": (FILTERS[1] * (side // 4) ** 2, hidden), "biases.2": (hidden,), "centre": (hidden,),
    }  # fmt: skip
    return {name: 0.5 * chance.normal(size=shape) for name, shape in shapes.items()}


def network_file(seed: int = 1, **changes: Any) -> bytes:
    return pack_tensors({**tensors(seed), **changes}, {"format": FORMAT, "side": str(SIDE)}, "F16")


def named_by(data: bytes, name: str = "pictures", hidden: int = HIDDEN) -> Task:
    """A task on pictures of 6 by 6 pixels that names this file."""
    return parse(TEXT.format(name=name, sha256=hashlib.sha256(data).hexdigest(), hidden=hidden))
