"""Clusters of a device's own windows, labelled by proportions: k-means, two ways to label, and a vote. NumPy alone.

Stolpe, Morik, ECML PKDD 2011 (LLPC) and Sachweh, Boiar, Liebig 2021: windows are clustered once; each model gives every
cluster the label that makes the proportions of its batches come out as a device said they are; c + 1 models vote.

Nothing here leaves a device, and nothing may: clusters, labels and predictions come from raw windows, so that each of
them published would be a release without noise (review, P6). Proportions heard from peers are releases: post-processing
them is free. All w values of a window have one unit, so they are clustered as they are, without a scale of their own.

Where we differ: a search takes the best of all single changes instead of the first that helps, for all starts at once
and always as many turns, and its cost does not depend on the number of batches. `class_shares` solves for the share of
each class in a cluster, with the known variance of the noise, instead of for one label a cluster.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from crowdml.arrays import Array, Integers, finite_or_zero
from crowdml.errors import DataError, UnknownName
from crowdml.models.proportions import Rule, project, proportions
from crowdml.records import record

Solver = Literal["search", "shares"]
SOLVERS: tuple[Solver, ...] = ("search", "shares")


# --- clusters ---


def k_means(x: Array, k: int, *, seed: int, starts: int = 1, iterations: int = 40) -> Array:
    """Centres [k, w] of x [n, w], finite and n at least 1: the best of several starts, by the sum of squared distances.

    Each start is k-means++ with the best of several candidates a place (Arthur, Vassilvitskii 2007), then Lloyd's
    steps: always as many, for how long a device takes must not depend on its windows (review, R3). A centre that
    nothing is nearest to stays where it is; where x has fewer than k distinct rows, some centres are equal, and the
    first of them has the members.
    """
    x = np.asarray(x, dtype=np.float64)
    middle = x.mean(axis=0)
    points = _with_ones(x - middle)  # near zero, where products lose least
    best, least = np.zeros((k, x.shape[1])), np.inf
    for start in range(starts):
        centres, inertia = _lloyd(points, _spread_out(points, k, _uniform(seed, start, k, CANDIDATES)), iterations)
        if inertia < least:
            best, least = centres, inertia
    return best + middle


CANDIDATES = 5
"""Points tried for each next centre of a start; 2 + log k, as is usual, for k near 16."""


def assign(centres: Array, x: Array) -> Integers:
    """The nearest centre of each row: centres [k, w], x [n, w] -> [n] int32, the first of equals."""
    centres, x = np.asarray(centres, dtype=np.float64), np.asarray(x, dtype=np.float64)
    middle = centres.mean(axis=0)
    return _nearest(_with_ones(x - middle), centres - middle).astype(np.int32)


def members(assignment: Integers, batches: int, k: int) -> Integers:
    """How many samples of each batch are in each cluster: assignment [h b], batch after batch -> [h, k] int32."""
    cells = np.asarray(assignment).reshape(batches, -1) + k * np.arange(batches)[:, None]
    return np.bincount(cells.ravel(), minlength=batches * k).reshape(batches, k).astype(np.int32)


def _with_ones(x: Array) -> Array:
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def _nearest(points: Array, centres: Array) -> Array:
    """points [n, w + 1], ones last; |x - c|^2 = |x|^2 - 2 (x.c - |c|^2 / 2): the largest bracket, in one product."""
    halves = (centres * centres).sum(axis=1, keepdims=True) / -2
    return (points @ np.concatenate([centres, halves], axis=1).T).argmax(axis=1)


def _lloyd(points: Array, centres: Array, iterations: int) -> tuple[Array, float]:
    """Lloyd's steps from these centres [k, w] over points [n, w + 1]: the last centres, and the sum of squares."""
    k, columns = len(centres), np.ascontiguousarray(points[:, :-1].T)
    nearest = _nearest(points, centres)
    for _ in range(iterations):
        sizes = np.bincount(nearest, minlength=k)
        sums = np.stack([np.bincount(nearest, column, k) for column in columns], axis=1)
        centres = np.where(sizes[:, None] > 0, sums / np.maximum(sizes, 1)[:, None], centres)
        nearest = _nearest(points, centres)
    return centres, float(((columns.T - centres[nearest]) ** 2).sum())


def _spread_out(points: Array, k: int, chance: Array) -> Array:
    """k-means++: each next centre far from those there are, the best of the candidates that chance [k, tries] names."""
    x = points[:, :-1]
    squares = (x * x).sum(axis=1)
    found = [int(chance[0, 0] * len(x))]
    left = np.maximum(squares + squares[found[0]] - 2 * (x @ x[found[0]]), 0)
    for place in range(1, k):
        share = np.cumsum(left)
        tried = np.minimum(np.searchsorted(share, chance[place] * share[-1], side="right"), len(x) - 1)
        remain = np.minimum(np.maximum(squares + squares[tried, None] - 2 * (x[tried] @ x.T), 0), left)
        best = int(remain.sum(axis=1).argmin())
        found.append(int(tried[best]))
        left = remain[best]
    return x[found]


def _uniform(seed: int, stream: int, *shape: int) -> Array:
    """Numbers in [0, 1) for a public seed, the same on every machine: a hash of (seed, stream, place), 53 bits each.

    Not noise: nothing that must be private rests on it.
    """
    place = np.arange(np.prod(shape, dtype=np.int64), dtype=np.uint64)
    word = np.zeros_like(place)
    for more in (np.full_like(place, seed & (2**64 - 1)), np.full_like(place, stream), place):
        word = (word ^ more) + np.uint64(0x9E3779B97F4A7C15)
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word ^= word >> np.uint64(31)
    return ((word >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(shape)


# --- labels ---


def moments(members: Array, given: Array, weights: Array) -> tuple[Array, Array]:
    """All that a loss needs of the batches: M^T W M [models, k, k] and M^T W Q [models, k, classes].

    members [h, k]; given proportions [models, h, classes]; weights [models, h], 0 for a batch that was not heard.
    """
    share = members / np.maximum(np.asarray(members).sum(axis=1, keepdims=True), 1)
    scale = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
    weighted = share.T * scale[:, None, :]
    return weighted @ share, weighted @ given


def turns(k: int) -> int:
    """Single changes that a search of k clusters makes, from the task alone. Made-up searches ended after 1.5 k at most
    (k from 4 to 128); one that would go on has labels all the same, and nearly as good."""
    return 2 * k + 8


def search_labels(gram: Array, cross: Array, restarts: int, seed: int) -> Integers:
    """One label a cluster for each model, [models, k], from its `moments`: the best of `restarts` starts, all at once.

    The loss is the mean over batches and classes of (given - implied)^2, implied = members / batch summed over the
    clusters of a class. From each random start the best single change is made until none helps.

    With Z the labels as a matrix [k, classes], the loss is tr Z'GZ - 2 tr Z'A and a constant. Moving cluster j from
    class a to d changes it by 2 (T[j, d] - T[j, a] + G[j, j]), T = GZ - A: all changes cost k x classes numbers. All
    starts take `turns(k)` turns, also those in which nothing helps any more: how long a device takes must not depend
    on its windows (review, R3).
    """
    models, k, classes = cross.shape
    runs = models * restarts
    drawn = (_uniform(seed, 1 << 32, restarts, k) * classes).astype(np.int64)
    labels = np.tile(drawn, (models, 1))  # each model has the same starts
    gram_of = np.repeat(np.arange(models), restarts)
    slope = gram[gram_of] @ (labels[:, :, None] == np.arange(classes)).astype(np.float64) - cross[gram_of]
    own = np.diagonal(gram, axis1=1, axis2=2)[gram_of]
    least = 1e-12 * np.maximum(own.max(axis=1), 1e-300)
    every, rows = np.arange(runs), np.arange(k)
    for _ in range(turns(k)):
        now = np.take_along_axis(slope, labels[:, :, None], axis=2)
        change = (slope - now + own[:, :, None]).reshape(runs, -1)
        best = change.argmin(axis=1)
        helps = change[every, best] < -least
        cluster = best // classes
        before = labels[every, cluster]
        to = np.where(helps, best % classes, before)
        pull = gram[gram_of, cluster] * helps[:, None]  # nothing where nothing helps: taken away and added, it stays
        slope[every, :, before] -= pull
        slope[every, :, to] += pull
        labels[every, cluster] = to
    ends = every[:, None]
    loss = (slope[ends, rows, labels] - cross[gram_of[:, None], rows, labels]).sum(axis=1).reshape(models, restarts)
    chosen = loss.argmin(axis=1) + restarts * np.arange(models)
    usual = cross.sum(axis=1).argmax(axis=1)  # rows of M sum to one: the largest class of all
    seen = np.diagonal(gram, axis1=1, axis2=2) > 0
    return np.where(seen, labels[chosen], usual[:, None]).astype(np.int32)  # no batch says anything of the others


WITHIN = 0.3
"""Part of the labels' variance that is left within clusters. Anything from 0.1 to 1 does as well (made-up traffic)."""
REACH = 0.7
"""How far one cluster tells of another, over the spread of the windows. On made-up traffic 0.5 to 1 are alike, and one
to five points better at every epsilon from 0.1 up than clusters that tell nothing of each other."""
ALONE = 0.001
"""Part of a share's variance that no other cluster tells of: it also keeps clusters in one place apart."""
STEPS = 100
"""Steps of projected gradient. On made-up traffic 4,000 move a share by 0.07 at most, and 3 labels in a thousand."""


def likeness_of(centres: Array, members: Array) -> Array:
    """How much alike the shares of two clusters are before any is known, [k, k]: more so the nearer they are."""
    centres, sizes = np.asarray(centres, dtype=np.float64), np.asarray(members).sum(axis=0)
    middle = sizes @ centres / max(1, sizes.sum())
    width = sizes @ ((centres - middle) ** 2).sum(axis=1) / max(1, sizes.sum())
    apart = ((centres[:, None] - centres[None]) ** 2).sum(axis=2)
    return np.exp(-apart / (2 * REACH**2 * max(width, 1e-12))) + ALONE * np.eye(len(centres))


def class_shares(gram: Array, cross: Array, heard: Array, noise: Array, batch: int, likeness: Array) -> Array:
    """The share of each class in each cluster, P [models, k, classes] with rows on the simplex: least squares with the
    noise taken in, |Q - M P|^2 h / v + |P - mean|^2 / t at its least. A cluster's label is its largest share.

    gram and cross are `moments` of proportions as they came, counts / batch: rows that were projected or shrunk are
    biased, and sums over batches do not mend that. heard [models] counts the batches, noise [models] is the variance of
    a heard proportion's noise.

    v is the variance of a proportion, from its noise and from what differs within a cluster; t that of a share between
    clusters as if each had one label, mean (1 - mean). Both come from releases and the task. The second length is that
    of a Gaussian process: clusters that are near each other have shares that are alike, as `likeness` [k, k] says.
    Accelerated projected gradient (Beck, Teboulle 2009) from the solution without the constraint.
    """
    mean = project(cross.sum(axis=1))  # rows of M sum to one
    between = np.maximum((mean * (1 - mean)).mean(axis=1), 1e-9)
    weight = ((noise + WITHIN * between / batch) / (between * np.maximum(heard, 1)))[:, None, None]
    prior = weight * np.linalg.inv(likeness)
    curve = gram + prior
    pull = cross + prior.sum(axis=2, keepdims=True) * mean[:, None, :]
    step = 1 / np.linalg.eigvalsh(curve)[:, -1, None, None]
    shares = ahead = project(np.linalg.solve(curve, pull))
    pace = 1.0
    for _ in range(STEPS):
        last, shares = shares, project(ahead - step * (curve @ ahead - pull))
        faster = (1 + (1 + 4 * pace * pace) ** 0.5) / 2
        ahead = shares + (pace - 1) / faster * (shares - last)
        pace = faster
    return shares


# --- the vote ---


@record
class Voters:
    """One device's models: all have its clusters, and each labels them by the proportions of one device.

    centres [k, w]; labels [models, k] int32, its own model first; a row of -1 stands for a peer that was not heard;
    weights [models, k] of their votes on each cluster, or None where every vote counts the same.
    """

    centres: Array
    labels: Integers
    weights: Array | None = None


def verdicts(voters: Voters) -> Integers:
    """The label with most votes for each cluster, [k] int32. Of equals the device's own, or else the smallest."""
    cast = voters.labels[:, :, None] == np.arange(voters.labels.max() + 1)
    votes = (cast if voters.weights is None else cast * voters.weights[:, :, None]).sum(axis=0)
    ahead = votes == votes.max(axis=1, keepdims=True)
    own = voters.labels[0]
    kept = np.take_along_axis(ahead, own[:, None], axis=1)[:, 0]
    return np.where(kept, own, ahead.argmax(axis=1)).astype(np.int32)


def trust(labels: Integers, own: Integers) -> Array:
    """Weights [models, k] of votes by the device's own labels: own [k, classes] counts them in each cluster.

    labels [models, k], -1 for a peer that was not heard, which gets no weight. In a cluster with n own labels a model
    that names r of them weighs e^(eta (r - best)), eta = sqrt(8 log(models) / n): the weights of Hedge (Freund and
    Schapire 1997), with which the vote follows whichever model fits this device best, cluster by cluster, and a model
    that fits as well keeps its say. Where a device has no labels, all weigh the same.
    """
    right = np.where(labels < 0, 0, np.take_along_axis(own, np.maximum(labels, 0).T, axis=1).T)
    rate = np.sqrt(8 * np.log(max(2, len(labels))) / np.maximum(own.sum(axis=1), 1))
    return np.where(labels < 0, 0.0, np.exp(rate * (right - right.max(axis=0))))


def predict(voters: Voters, x: Array) -> Integers:
    """The vote on the cluster of each row: x [n, w] -> [n] int32. A row that is not finite counts as zeros."""
    return verdicts(voters)[assign(voters.centres, _finite(x))]


def _finite(x: Array) -> Array:
    """Rows as a buffer keeps them."""
    x = np.asarray(x, dtype=np.float64)
    return finite_or_zero(x, rows=True)


STARTS = 3
"""Starts of k-means in `fit`: the sum of squares ends within some 2 % of that of ten starts, in a third of the time."""


def fit(
    x: Array,
    counts: Array,
    heard: Array,
    there: Array,
    *,
    k: int,
    restarts: int,
    seed: int,
    variance: float,
    solver: Solver = "shares",
    rule: Rule = "raw",
    y: Integers | None = None,
) -> Voters:
    """c + 1 models of one device from its own windows, its own counts, and what it heard of its c peers.

    x [h b, w], batch after batch, h at least 1; counts [h, classes] of its own labels, exact; heard [c, h, classes]
    noisy counts in the same batches; there [c, h] where they came. A peer with no batch has no model. `variance` is
    that of the noise on one heard count. `rule` treats what was heard, before a search. y [h b], the device's own
    labels (-1: unknown), weigh the votes; without them every vote counts the same.
    """
    counts, heard, there = np.asarray(counts), np.asarray(heard), np.asarray(there, dtype=bool)
    if not len(counts):
        raise DataError("this device has given no batch yet, so it has no windows to cluster; one is enough.")
    batches, batch = len(counts), len(x) // len(counts)
    x = _finite(x)
    centres = k_means(x, k, seed=seed, starts=STARTS)
    cells = assign(centres, x)
    inside = members(cells, batches, k)
    given = np.zeros((1 + len(heard), *counts.shape))
    given[0] = counts / batch
    for peer, those in enumerate(there):
        given[1 + peer, those] = proportions(heard[peer, those], batch, variance, rule)
    weights = np.concatenate([np.ones((1, batches)), there])
    came = weights.sum(axis=1)
    gram, cross = moments(inside, given, weights)
    if solver == "search":
        labels = search_labels(gram, cross, restarts, seed)
    elif solver == "shares":
        noise = np.full(len(given), variance / batch**2)
        noise[0] = 0
        labels = class_shares(gram, cross, came, noise, batch, likeness_of(centres, inside)).argmax(axis=2)
    else:
        raise UnknownName(f"no way to label clusters is called {solver!r}; there are {', '.join(SOLVERS)}.")
    labels = np.where(came[:, None] > 0, labels, -1).astype(np.int32)
    return Voters(centres, labels, None if y is None else trust(labels, _own(cells, y, k, counts.shape[1])))


def _own(cells: Integers, y: Integers, k: int, classes: int) -> Integers:
    """How often a device's windows in each cluster have each of its own labels: [k, classes]."""
    known = (np.asarray(y) >= 0) & (np.asarray(y) < classes)
    return np.bincount(cells[known] * classes + np.asarray(y)[known], minlength=k * classes).reshape(k, classes)
