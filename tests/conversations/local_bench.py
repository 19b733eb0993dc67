"""Tasks with local updates, small enough for a test."""

from __future__ import annotations

import numpy as np

from crowdml.arrays import Samples
from crowdml.privacy.noise import Silence
from crowdml.protocols import find
from crowdml.protocols.local_updates import Weights
from crowdml.task import Task, parse
from crowdml.turn import check_in

TEXT = """
name = "local"
[features]
dimension = {dimension}
norm = {{ kind = "l2", bound = 1.0 }}
[labels]
{labels}
[model]
{model}
[protocol]
kind = "local_updates"
batch = {batch}
{protocol}
[privacy]
mechanism = "{mechanism}"
unit = "{unit}"
uses = {uses}
epsilon = {{ update = {epsilon} }}
budget = {{ epsilon = {budget}, samples = {samples} }}
{rest}
"""
THREE = 'classes = ["a", "b", "c"]'
MASKS = "[masking]\ncohort = 6\nminimum = 5\n"


def local_text(
    *,
    dimension: int = 3,
    labels: str = THREE,
    model: str = 'kind = "softmax"',
    batch: int = 6,
    protocol: str = "minibatch = 2\nlocal_steps = 3\nrate = { c = 0.5 }",
    mechanism: str = "discrete-gaussian",
    unit: str = "sample",
    uses: int = 1,
    epsilon: float = 2.0,
    budget: float = 1000.0,
    samples: int | None = None,
    rest: str = "",
) -> str:
    return TEXT.format(
        dimension=dimension, labels=labels, model=model, batch=batch, protocol=protocol, mechanism=mechanism,
        unit=unit, uses=uses, epsilon=epsilon, budget=budget, samples=samples or batch, rest=rest,
    )  # fmt: skip


def local_task(**changes) -> Task:
    return parse(local_text(**changes))


def make_batch(task: Task, seed: int = 0, size: int | None = None) -> Samples:
    """Samples in the unit ball."""
    rng = np.random.default_rng(seed)
    count = size or find(task).batch(task)
    x = rng.normal(size=(count, task.features.dimension))
    x /= np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True))
    y = rng.uniform(-1, 1, count) if task.classes is None else rng.integers(0, task.classes, count)
    return Samples(x.astype(np.float32), y)


def publication(weights: np.ndarray, version: int = 0, taken: int = 0) -> Weights:
    return Weights(weights.astype(np.float32), np.int32(version), np.int32(taken))


def said(task: Task, batch: Samples, public: Weights, *, noise=None, trip: int = 0):
    """The one message of a device's turn."""
    return check_in(find(task), task, batch, public, noise=noise or Silence(), me="device", trip=trip).message
