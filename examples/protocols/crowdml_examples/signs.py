"""Sign votes: each sample votes on which way every weight should go, and the server follows the majority.

Bernstein et al., signSGD with majority vote (2018). A vote has one entry of +1 or -1 per weight, so its norm is known
before any sample is seen, and nothing has to be clipped. With [masking] the server hears only the votes of cohorts.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import numpy as np

from crowdml import plugin as cm


@dataclass(frozen=True)
class Settings:
    batch: Annotated[int, cm.Between(1, 100_000)]
    """How many samples vote in a check-in."""
    rate: Annotated[Fraction, cm.Positive()]
    """How far the first vote moves a weight. The t-th vote moves it by rate / sqrt(t)."""


@cm.message("signs/weights/1")
class Weights:
    weights: cm.Public[cm.Array]
    version: cm.Public[cm.Integers]


@cm.contribution("signs/votes/1", masked="signs/masked/1", total="signs/total/1")
class Votes:
    votes: cm.Release[cm.Integers]
    """Which way each weight should go, added up over the batch."""
    version: cm.Public[cm.Integers]


def mechanisms(task):
    shape, covers = cm.model_of(task).shape, cm.Rows(0, cm.settings_of(task, Settings).batch)
    bound = math.prod(shape) if cm.noise_norm(task) == "l1" else math.sqrt(math.prod(shape))
    return {"votes": cm.sum_row(task, "votes", bound=bound, shape=shape, covers=covers, promise="which way to go")}


def votes(task, batch, public):
    model = cm.model_of(task)
    return {"votes": batch.map(lambda each: cm.namespace(each.x).sign(model.gradients(public.weights, each)))}


def start(task, ctx):
    first = Weights(cm.model_of(task).start(), np.int32(0))
    return cm.Step(first, (cm.Publish(first),))


def follow(task, state, heard, ctx):
    xp, version = cm.namespace(heard.votes.value, state.weights), state.version + 1
    rate = float(cm.settings_of(task, Settings).rate) / xp.sqrt(version.astype(xp.float32))
    majority = xp.sign(heard.votes.value).reshape(state.weights.shape).astype(xp.float32)
    after = Weights(state.weights - rate * majority, version)
    return cm.Step(after, (cm.Publish(after), *cm.stop_after(task.stop.steps, version, "vote", "been counted")))


protocol = cm.Protocol(
    "signs",
    device=cm.device_role(Votes, Weights, votes),
    server=cm.Role(start, cm.heard_by(Votes, follow)),
    mechanisms=mechanisms,
    model=lambda task, state: state.weights,
    contribution=Votes,
    settings=Settings,
)
