"""Coordinate-wise medians: a round of gradients, some of which may be lies, moves every weight by its median.

Yin et al., Byzantine-robust distributed learning (2018). A round is gathered first, and then looked at as a whole: each
upload is one device's noisy gradient. With [masking] it is the mean of a cohort, so a liar spoils its own cohort alone.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import numpy as np

from crowdml import plugin as cm


@dataclass(frozen=True)
class Settings:
    batch: Annotated[int, cm.Between(1, 100_000)]
    """How many samples an upload uses."""
    rate: Annotated[Fraction, cm.Positive()]
    """How far the first round moves the weights along the median. The t-th moves them by rate / sqrt(t)."""
    uploads: Annotated[int, cm.Between(3, 10_000)] = 11
    """How many uploads close a round. Fewer than half of them may be lies."""
    minimum: Annotated[int, cm.Between(3, 10_000)] = 5
    """The fewest uploads with which a round closes when its time is over."""
    seconds: Annotated[Fraction, cm.Positive()] | None = None
    """After how many seconds a round closes with what is there. Without it, a round waits for all its uploads."""

    def __post_init__(self):
        if self.minimum > self.uploads:
            raise cm.TaskError(f"protocol.minimum = {self.minimum}: at most protocol.uploads = {self.uploads}.")


@cm.message("medians/weights/1")
class Weights:
    weights: cm.Public[cm.Array]
    version: cm.Public[cm.Integers]


@cm.contribution("medians/gradient/1", masked="medians/masked/1", total="medians/total/1")
class Gradient:
    gradient: cm.Release[cm.Integers]
    """How the model should change, added up over the batch."""
    version: cm.Public[cm.Integers]


def mechanisms(task):
    model, covers = cm.model_of(task), cm.Rows(0, cm.settings_of(task, Settings).batch)
    bound = model.gradient_bound(cm.noise_norm(task), float(task.features.norm.bound))
    return {"gradient": cm.sum_row(task, "gradient", bound=bound, shape=model.shape, covers=covers,
                                   promise="how the model should change")}  # fmt: skip


def gathering(task):
    settings = cm.settings_of(task, Settings)
    return cm.Gathering(settings.uploads, settings.minimum, settings.seconds and float(settings.seconds))


def gradients(task, batch, public):
    model = cm.model_of(task)
    return {"gradient": batch.map(lambda samples: model.gradients(public.weights, samples))}


def start(task, ctx):
    first = Weights(cm.model_of(task).start(), np.int32(0))
    return cm.Step(first, (cm.Publish(first),))


def close(task, state, gathered, ctx):
    settings, uploads, version = cm.settings_of(task, Settings), gathered.uploads, state.version + 1
    xp, grid = cm.namespace(state.weights, uploads.devices), protocol.mechanisms(task)["gradient"].grid
    samples = (settings.batch * uploads.devices)[:, None]
    medians = [xp.median(grid.decode(some) / samples, axis=0) for _, some in uploads.columns("gradient")]
    rate = float(settings.rate) / xp.sqrt(version.astype(xp.float32))
    weights = state.weights - rate * xp.concatenate(medians).reshape(state.weights.shape)
    after = Weights(weights.astype(xp.float32), version)
    return cm.Step(after, (cm.Publish(after), *cm.stop_after(task.stop.steps, version, "round", "been closed")))


protocol = cm.Protocol(
    "medians",
    device=cm.device_role(Gradient, Weights, gradients),
    server=cm.Role(start, {cm.Gathered: close}),
    mechanisms=mechanisms,
    model=lambda task, state: state.weights,
    contribution=Gradient,
    settings=Settings,
    channel=lambda task: cm.Channel.GATHERED,
    gathering=gathering,
)
