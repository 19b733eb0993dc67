"""SecProbe as Zhao et al. (2020) publish it, for the simulator alone: it does not keep what it promises (see WARNING).

Algorithms 1 to 3. Participants train a network with one hidden layer on a perturbed loss, upload its weights, and the
server averages K of M uploads that the exponential mechanism chose by their score on its validation rows.

- Functional mechanism: the loss is cut after its second order in the scores (eq. 12 for numbers, 17 for classes) and
  its coefficients get Laplace noise of scale Delta / epsilon (Lemmas 3 and 4). Once, as in line 4 of Algorithm 3, or in
  each iteration, as section III-D counts.
- The noise is in the coefficients of the last layer's weights alone, so the gradient of the hidden layer has none (Z1).
  `train_hidden` False leaves that layer as it was drawn.
- Scores: the share of right classes, or eq. (6) with min for the printed max (Z6). Delta u as printed: 1/2 and 1.
- A participant leaves once its own error is small (Algorithm 3, line 10); how often it spoke tells on its data (R3).

Where the paper is silent: the step is 0.01 on the *sum* of a minibatch, as eq. (8) to (17) are sums (on the mean the
network learns next to nothing in their rounds), 0.001 for classes, where the cut loss would run away; and weights are
held within 1e6, for a perturbed loss may have no minimum (Z4). M uploads are drawn at a round's start. Noise is in
floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array
from crowdml.errors import TaskError

WARNING = "training W1 has no differential privacy; epsilon is per epoch; selection hides nothing."
LARGEST = 1e6
"""The largest size of a weight."""
Weights = tuple[Any, Any]
"""The hidden layer [d, b] and the last one [b, c], c = 1 for numbers."""


@dataclass(frozen=True)
class Network:
    """A hidden layer of ReLU units, held at 1 with `clipped`, and sigmoid outputs: one, or one for each class.

    `truncated`: trained on the loss cut after its second order; else on the squared error or the logistic loss.
    """

    dimension: int
    hidden: int
    classes: int | None
    clipped: bool = True
    truncated: bool = True

    @property
    def outputs(self) -> int:
        return self.classes or 1

    @property
    def sensitivity(self) -> float:
        """Delta of Lemma 3, b/2 + b^2/8, or of Lemma 4, M (b + b^2/4): in l1, for replacing one sample."""
        b = self.hidden
        return b / 2 + b * b / 8 if self.classes is None else self.classes * (b + b * b / 4)

    @property
    def reach(self) -> float:
        """Delta u as printed: 1 for eq. (6), 1/2 for a share of right classes (Lemma 2)."""
        return 1.0 if self.classes is None else 0.5

    def start(self, seed: int) -> Weights:
        """Weights from N(0, 1): the seed that all participants share."""
        first, last = jax.random.split(jax.random.PRNGKey(seed))
        return (
            jax.random.normal(first, (self.dimension, self.hidden)),
            jax.random.normal(last, (self.hidden, self.outputs)),
        )

    def units(self, weights: Weights, x: Array) -> Any:
        h = jnp.maximum(x @ weights[0], 0)
        return jnp.minimum(h, 1) if self.clipped else h

    def predict(self, weights: Weights, x: Array) -> Any:
        """Numbers within [0, 1], or the class with the largest output."""
        g = self.units(weights, x) @ weights[1]
        return jax.nn.sigmoid(g[:, 0]) if self.classes is None else g.argmax(axis=1)

    def loss(self, weights: Weights, x: Array, y: Array) -> Any:
        """Sum over a minibatch; constants left out where it is cut."""
        g = self.units(weights, x) @ weights[1]
        target = y[:, None] if self.classes is None else jax.nn.one_hot(y, self.classes)
        if self.classes is None:
            cut = (1 - 2 * target) / 4 * g + g * g / 16
            return (cut if self.truncated else (jax.nn.sigmoid(g) - target) ** 2).sum()
        return ((0.5 - target) * g + g * g / 8 if self.truncated else jax.nn.softplus(g) - target * g).sum()

    def quality(self, weights: Weights, x: Array, y: Array) -> Any:
        """The score by which the server chooses: 1 is best."""
        said = self.predict(weights, x)
        return relative_score(said, y) if self.classes is None else (said == y).mean()


def relative_score(said: Array, y: Array) -> Any:
    """Eq. (6) with min: the mean of 1 - |min(z, 3y) - y| / y. Within [-1, 1] for z >= 0 and y > 0."""
    return (1 - abs(jnp.minimum(said, 3 * y) - y) / y).mean()


def relative_error(said: Array, y: Array) -> Any:
    """Eq. (18), MRE."""
    return (abs(said - y) / y).mean()


@dataclass(frozen=True)
class Published:
    """A run: `uploads` M of the crowd in each of the rounds, `keep` K of them averaged.

    `epsilon` is the paper's: of the functional mechanism in every epoch. None: no noise in the loss. `selection` is
    that of each round's choice, as printed; None: the best K.
    """

    rounds: int
    iterations: int
    uploads: int
    keep: int
    epsilon: float | None = 1.0
    selection: float | None = 1.0
    minibatch: int = 128
    rate: float = 0.01
    train_hidden: bool = True
    noise: Literal["once", "iteration"] = "once"
    leave_at: float | None = None
    """The error on a participant's own rows at which it leaves."""

    def epochs(self, held: int, devices: int) -> int:
        """How often a sample is read: what a claim per epoch has to be multiplied by (Z3)."""
        return math.ceil(self.rounds * self.uploads / devices * self.iterations * self.minibatch / held)

    def total(self, held: int, devices: int) -> float | None:
        """A sample's honest total by basic composition. None where there is no bound: without noise, with
        `train_hidden` (Z1), and where one noise is kept while the batches change (Z2)."""
        if self.epsilon is None or self.train_hidden or self.noise == "once":
            return None
        return self.epsilon * self.epochs(held, devices)


@dataclass(frozen=True)
class Course:
    """What a run published: the weights after `looks` rounds, [E, d, b] and [E, b, c]; and who took part."""

    hidden: Array
    last: Array
    chosen: Array
    """[T, K]: places of participants; -1 where fewer than K were left."""
    present: Array
    """[T]: how many had not left before the round."""

    @property
    def weights(self) -> list[Weights]:
        return list(zip(self.hidden, self.last, strict=True))


def odds(scores: Array, epsilon: float, keep: int, reach: float) -> Array:
    """The chance of each participant in the first of `keep` draws, eq. (7)."""
    tilt = np.asarray(scores, np.float64) * epsilon / (2 * keep * reach)
    weight = np.exp(tilt - tilt.max())
    return weight / weight.sum()


def learn(
    net: Network,
    plan: Published,
    x: Array,
    y: Array,
    validation: tuple[Array, Array],
    seed: int,
    *,
    liars: Array | None = None,
    looks: Sequence[int] = (),
) -> Course:
    """x [N, J, d], y [N, J]: participants. `liars` [N] bool upload weights that are uniform in [0, 1] (Fig. 10)."""
    if not 1 <= plan.keep <= plan.uploads <= len(y):
        raise TaskError(f"K = {plan.keep} of M = {plan.uploads} uploads of N = {len(y)}: K <= M <= N has to hold.")
    if plan.minibatch > y.shape[1]:
        raise TaskError(f"minibatch = {plan.minibatch}: a participant holds {y.shape[1]} samples.")
    lying = np.zeros(len(y), bool) if liars is None else np.asarray(liars, bool)
    at = np.asarray(looks or (plan.rounds,)) - 1
    told = _loop(net, plan)(
        jax.random.PRNGKey(seed), net.start(seed), jnp.asarray(x), jnp.asarray(y),
        jnp.asarray(validation[0]), jnp.asarray(validation[1]), jnp.asarray(lying),
    )  # fmt: skip
    (hidden, last), chosen, present = told
    return Course(np.asarray(hidden[at]), np.asarray(last[at]), np.asarray(chosen), np.asarray(present))


def noise_of(net: Network, epsilon: float | None, key: Any) -> tuple[Any, Any]:
    """Laplace noise for the coefficients of w_p, [b, c], and of w_p w_q, [b, b, c], ordered pairs as Lemma 3 counts."""
    b, c = net.hidden, net.outputs
    if epsilon is None:
        return jnp.zeros((b, c)), jnp.zeros((b, b, c))
    one, two = jax.random.split(key)
    scale = net.sensitivity / epsilon
    return scale * jax.random.laplace(one, (b, c)), scale * jax.random.laplace(two, (b, b, c))


def slope(net: Network, weights: Weights, x: Array, y: Array, noise: tuple[Any, Any] | None) -> Weights:
    """The gradient of the perturbed loss. The noise has no part in that of the hidden layer."""
    hidden, last = jax.grad(lambda both: net.loss(both, x, y))(weights)
    if noise is None:
        return hidden, last
    linear, square = noise
    w = weights[1]
    return hidden, last + linear + jnp.einsum("pqc,qc->pc", square + square.transpose(1, 0, 2), w)


@lru_cache(maxsize=64)
def _loop(net: Network, plan: Published) -> Any:
    def train(weights: Weights, x: Array, y: Array, trip: Array, key: Any) -> Weights:
        fixed = noise_of(net, plan.epsilon, key) if plan.noise == "once" and plan.epsilon is not None else None

        def step(both: Weights, number: Array) -> Any:
            count = trip * plan.iterations + number
            rows = (count * plan.minibatch + jnp.arange(plan.minibatch)) % y.shape[0]
            drawn = fixed
            if plan.noise == "iteration" and plan.epsilon is not None:
                drawn = noise_of(net, plan.epsilon, jax.random.fold_in(key, count))
            moved = slope(net, both, x[rows], y[rows], drawn)
            after = [jnp.clip(w - plan.rate * s, -LARGEST, LARGEST) for w, s in zip(both, moved, strict=True)]
            return (after[0] if plan.train_hidden else both[0], after[1]), None

        return jax.lax.scan(step, weights, jnp.arange(plan.iterations))[0]

    def whole(key: Any, first: Weights, x: Array, y: Array, rows: Array, labels: Array, lying: Array) -> Any:
        crowd = y.shape[0]
        secrets = jax.random.split(jax.random.fold_in(key, 1), crowd)  # line 4: one noise for all rounds

        def one_round(state: Any, secret: Any) -> Any:
            weights, trips, present = state
            draw, choose, lie = jax.random.split(secret, 3)
            luck = jnp.where(present, jax.random.uniform(draw, (crowd,)), -1)
            who = jax.lax.top_k(luck, plan.uploads)[1]
            there = present[who]
            made = jax.vmap(train, (None, 0, 0, 0, 0))(weights, x[who], y[who], trips[who], secrets[who])
            keys = jax.random.split(lie, plan.uploads)
            fake = jax.vmap(lambda k: tuple(jax.random.uniform(k, w.shape) for w in weights))(keys)
            false = lying[who]
            sent = tuple(jnp.where(false[:, None, None], f, m) for f, m in zip(fake, made, strict=True))
            best = _chosen(sent, rows, labels, there, choose)
            kept = there[best].astype(jnp.float32)
            count = kept.sum()
            mean = tuple(
                jnp.where(count > 0, (m[best] * kept[:, None, None]).sum(0) / jnp.maximum(count, 1), w)
                for m, w in zip(sent, weights, strict=True)
            )
            leaves = jnp.zeros(plan.uploads, bool)
            if plan.leave_at is not None:
                leaves = jax.vmap(lambda w, xs, ys: _own_error(net, w, xs, ys))(made, x[who], y[who]) <= plan.leave_at
            after = present.at[who].set(there & ~leaves), trips.at[who].add(1)
            named = jnp.where(there[best], who[best], -1)
            return (mean, after[1], after[0]), (mean, named, present.sum())

        start = first, jnp.zeros(crowd, jnp.int32), jnp.ones(crowd, bool)
        return jax.lax.scan(one_round, start, jax.random.split(jax.random.fold_in(key, 2), plan.rounds))[1]

    def _chosen(sent: Any, rows: Array, labels: Array, there: Array, key: Any) -> Array:
        """Places among the uploads. Adding Gumbel noise and taking the largest K is K draws by eq. (7)."""
        if plan.keep == plan.uploads:
            return jnp.arange(plan.uploads)
        scores = jax.lax.map(lambda w: net.quality(w, rows, labels), sent)
        if plan.selection is not None:
            gumbel = jax.random.gumbel(key, scores.shape)
            scores = scores * plan.selection / (2 * plan.keep * net.reach) + gumbel
        return jax.lax.top_k(jnp.where(there, scores, -jnp.inf), plan.keep)[1]

    return jax.jit(whole)


def _own_error(net: Network, weights: Weights, x: Array, y: Array) -> Any:
    said = net.predict(weights, x)
    return relative_error(said, y) if net.classes is None else (said != y).mean()
