"""Rules that look at public root rows: which uploads of second moments to trust, however many of them are lies.

The default rule, `choose_group`, asks no number of liars. It knows the noise of an upload, and that honest uploads sum
moments of samples like the root rows:

1. Each upload is tested by itself: for what its samples add up to, its noise, and for being a copy of another.
2. What is left of an upload after the root rows' class means is compared with the others. A group is split in two while
   its spread is larger than the known noise explains, as a matrix of noise alone has no singular value beyond the sum
   of the roots of its sides.
3. The model of each group is solved, and tried on the root rows and on variations of them. The least error wins; groups
   join the best one as long as that lowers the error. Of groups that the rows cannot tell apart, the one that is
   nearest to the root rows wins, and of those the larger.

Root rows score and choose. None of their labels is in the model: the result is a sum of uploads. Uploads are released
and root rows are public, so all of this is post-processing and costs nobody anything. Arrays in, arrays out; NumPy, as
moments are multiplied in 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from crowdml.arrays import Array, Integers, namespace
from crowdml.errors import TaskError
from crowdml.models.ridge import predict, solve
from crowdml.privacy.moments import split
from crowdml.robust import FEWEST_ROWS as FEWEST
from crowdml.robust import cosines, trusted

__all__ = ["REASONS", "Chosen", "Root", "choose_group", "fltrust", "prepare", "refuse_uploads", "top", "zeno"]

DEVIATIONS = 5.0
"""Standard deviations of its known noise by which what an upload adds up to may be off."""
EXCESS = 6.0
"""How many times as far (squared) from the root rows an honest upload may be as chance takes these from the crowd: they
need not be drawn from it. The first 240 images of MNIST are up to 3.9 times as far from devices of two classes."""
NEARLY = 1.25
"""Groups are as far from the root rows as each other up to this factor, and what noise makes of it."""
LEAST_EXCESS = 0.5
"""A group that is nearer to the root rows than this share of what chance allows, by `SURE` standard deviations of its
noise, repeats them: another crowd's is at 1, and farther where it is of other people."""
SURE = 3.0
MANY = 10
"""Root rows for each feature, from which on the best uploads by score are tried, too, where labels are numbers."""
EDGE = 4.0
"""How many fluctuations of noise's largest singular value a group may be spread beyond its mean."""
MOST_GROUPS = 32
"""Splits end here: each group is solved for, and liars could ask for many."""
COLUMNS = 4096
"""Numbers of each upload that are compared at once."""
MOST_SPREAD = 2000
"""Root rows that tell along what samples differ, evenly from each class: more of them take long and tell no more."""

REASONS: tuple[str, ...] = ("accepted", "not finite", "size", "labels", "counts", "noise", "copy", "another group",
                            "root rows", "score")  # fmt: skip
"""Why an upload is not in the result, by number: 0 of those that are."""


@dataclass(frozen=True, eq=False)
class Root:
    """Public rows as an upload's device would give them: features [R, d] of norm at most one, as the mechanism rounds
    them, and labels [R, C], a 1 in the place of the class, or one number."""

    features: Array
    labels: Array
    classes: bool
    constant: bool = True
    """Whether the last feature is the map's constant: then the sums of labels are known twice."""
    tried: tuple[Array, Array] | None = None
    """More public rows and their labels, on which models are tried and nothing else: variations of the others, such as
    pictures a little bent. With more of them than features, a lie finds no direction in which none of them looks."""

    def __post_init__(self) -> None:
        if len(self.features) != len(self.labels) or len(self.features) < FEWEST:
            raise TaskError(
                f"{len(self.features)} root rows with {len(self.labels)} labels: there must be as many, at least "
                f"{FEWEST}."
            )
        if not (np.isfinite(self.features).all() and np.isfinite(self.labels).all()):
            raise TaskError("a root row holds a number that is not finite: name other public rows.")
        few = [place for place, rows in enumerate(self.strata) if len(rows) < FEWEST]
        if few:
            raise TaskError(
                f"of class {few[0]} there are {len(self.strata[few[0]])} root rows: a rule that looks at root rows "
                f"needs at least {FEWEST} of each class. Name more public rows."
            )

    @property
    def width(self) -> int:
        return self.features.shape[1]

    @cached_property
    def strata(self) -> list[Integers]:
        """The rows of each class; all of them where labels are numbers."""
        if not self.classes:
            return [np.arange(len(self.features))]
        whose = self.labels.argmax(1)
        return [np.flatnonzero(whose == each) for each in range(self.labels.shape[1])]

    @cached_property
    def facts(self) -> list[Stratum]:
        """What the rows of each class tell of its moments."""
        return [Stratum.of(self.features[rows], self.labels[rows]) for rows in self.strata]

    @cached_property
    def trials(self) -> tuple[Array, Array]:
        """The rows on which models are tried, and their labels."""
        if self.tried is None:
            return self.features, self.labels
        return np.concatenate([self.features, self.tried[0]]), np.concatenate([self.labels, self.tried[1]])

    def error(self, weights: Array) -> float:
        """The share of these rows that a model takes for another class, or the mean square of what it is off."""
        features, labels = self.trials
        if self.classes:
            return float((predict(weights, features, weights.shape[1]) != labels.argmax(1)).mean())
        return float(((features @ weights - labels) ** 2).mean())


@dataclass(frozen=True, eq=False)
class Stratum:
    """Means of moments over the root rows of one class, and how far chance takes them from the crowd's."""

    cross: Array  # [d, C]
    gram: Array  # [d, d]
    size: float
    """The squared norm of the crowd's mean of features times labels, without bias."""
    cross_spread: float
    gram_spread: float
    """The squared distance of one sample's moments from their mean, in the norm of the noise."""
    rows: int
    wobble: float
    """The standard deviation of a count of the class by projection, over the count, from the chance of root rows."""

    @staticmethod
    def of(h: Array, y: Array) -> Stratum:
        rows, others = len(h), len(h) * (len(h) - 1)
        cross, gram, lengths = h.T @ y, h.T @ h, (h**2).sum(1)
        single = float((lengths * (y**2).sum(1)).sum())  # of a row with itself
        size = max((float((cross**2).sum()) - single) / others, 1e-3 * single / rows)
        cross_spread = max(single / rows - size, 1e-9)
        single = float((lengths**2).sum())
        gram_spread = max(single / rows - (float((gram**2).sum()) - single) / others, 1e-9)
        along = ((h @ cross) * y).sum(1) / rows / size
        wobble = float(along.std(ddof=1)) / math.sqrt(rows)
        return Stratum(cross / rows, gram / rows, size, cross_spread, gram_spread, rows, wobble)


@dataclass(frozen=True, eq=False)
class WhitenedUploads:
    """Uploads of second moments in whitened form, as `prepare` makes them."""

    moments: Array  # [M, L], in units of one sample
    samples: Array  # [M]
    deviation: Array
    """[M]: the standard deviation of an upload's noise on the diagonal, in the same units."""
    counts: Array  # [M, K]: how many samples of each stratum an upload seems to have
    cross: Array  # [M, d C] less what root rows explain, over the noise
    gram: Array  # [M, d (d + 1) / 2], likewise
    finite: Array  # [M]

    @property
    def scaled(self) -> Array:
        """[M, K]: counts in units of each upload's own noise."""
        return self.counts / self.deviation[:, None]


def prepare(moments: Array, samples: Array, deviation: Array | float, root: Root) -> WhitenedUploads:
    """Uploads [M, L] less what the root rows' class means explain of each of them, in units of the noise."""
    d, labels = root.width, root.labels.shape[1]
    length = d * (d + 1) // 2
    if moments.ndim != 2 or moments.shape[1] != length + d * labels:
        raise TaskError(
            f"uploads of {moments.shape[1:]} numbers, and root rows with {d} features and {labels} labels: they must "
            f"be of one task, which has {length + d * labels}."
        )
    deviation = np.broadcast_to(np.asarray(deviation, np.float64), len(moments))
    if not (deviation > 0).all():
        raise TaskError("uploads without noise: their noise is what this rule tests. Take another rule.")
    finite = np.isfinite(moments).all(1)
    moments = moments if finite.all() else np.where(finite[:, None], moments, 0.0)
    cross, gram = moments[:, length:], moments[:, :length]
    facts = root.facts
    means = np.stack([each.cross.reshape(-1) for each in facts])
    if root.classes:
        counts = cross @ means.T / np.array([each.size for each in facts])
    else:
        counts = np.asarray(samples, np.float64)[:, None]
    scale = _scale(d)
    flat = np.stack([flatten(each.gram) for each in facts])
    left, rest = counts @ means, counts @ flat  # a round may be large: no array of its size is made twice
    np.subtract(cross, left, out=left)
    np.subtract(gram, rest, out=rest)
    left /= deviation[:, None]
    rest *= scale
    rest /= deviation[:, None]
    return WhitenedUploads(moments, np.asarray(samples, np.float64), deviation, counts, left, rest, finite)


def flatten(gram: Array) -> Array:
    """A symmetric matrix as a vector: its diagonal, then what is above it row by row."""
    return np.concatenate([np.diagonal(gram), gram[np.triu_indices(len(gram), 1)]])


def _lengths(rows: Array) -> Array:
    """[M]: the squared length of each row."""
    return np.einsum("ml,ml->m", rows, rows)


def _sum(rows: Array, members: Integers) -> Array:
    """The sum of these rows, without a copy of them."""
    return np.bincount(members, minlength=len(rows)).astype(np.float64) @ rows


def _scale(d: int) -> Array:
    """By what entries are multiplied so that their noise is alike: off the diagonal it has half the variance."""
    return np.concatenate([np.ones(d), np.full(d * (d - 1) // 2, math.sqrt(2.0))])


# --- each upload by itself ---


def refuse_uploads(uploads: WhitenedUploads, root: Root) -> Integers:
    """[M]: 0 for an upload that may be honest, else the number of the reason why not, of `REASONS`.

    Each test knows the noise, so it asks for no honest neighbours.
    """
    d, labels, s = root.width, root.labels.shape[1], uploads.deviation
    samples, counts = uploads.samples, uploads.counts
    norms = (root.features**2).sum(1)
    trace = uploads.moments[:, :d].sum(1)
    spread = norms.std() * (1 / math.sqrt(len(norms)) + 1 / np.sqrt(samples))
    size = abs(trace - samples * norms.mean()) > DEVIATIONS * (s * math.sqrt(d) + samples * spread) + 0.01 * samples
    tests = [~uploads.finite, size]
    if root.classes and root.constant:
        tests.append(_mislabelled(uploads, root))
    else:
        tests.append(np.zeros(len(samples), bool))
    tests.append(_miscounted(uploads, root))
    spreads = np.array([[each.cross_spread, each.gram_spread] for each in root.facts])
    rows = np.array([each.rows for each in root.facts])
    away = (counts**2 / rows + np.maximum(counts, 0)) @ spreads / s[:, None] ** 2  # [M, 2] in units of the noise
    noisy = np.zeros(len(samples), bool)
    # What a count explains of the products of features brings the count's noise with it, mostly along one direction.
    blur = sum(float((flatten(each.gram) ** 2 * _scale(d) ** 2).sum()) / each.size for each in root.facts)
    blur *= float(root.classes)
    for part, free, excess, more in ((uploads.cross, d * labels, away[:, 0], 0.0),
                                     (uploads.gram, d * (d + 1) // 2, away[:, 1], blur)):  # fmt: skip
        energy = _lengths(part)
        chance = DEVIATIONS * np.sqrt(2 * free + 4 * excess + 4 * more + 2 * more**2)
        most = free + EXCESS * excess + more + chance + DEVIATIONS**2  # the tail of few squares is long
        noisy |= (energy < free - chance) | (energy > most)
    tests.append(noisy)
    found = np.zeros(len(samples), np.int64)
    for reason, failed in reversed(list(enumerate(tests, start=1))):
        found[failed] = reason
    return _copies(uploads, found)


def _mislabelled(uploads: WhitenedUploads, root: Root) -> Array:
    """Whether the sums of labels differ from what the constant feature says of the features' sum."""
    d, labels = root.width, root.labels.shape[1]
    k = float(root.features[0, -1])
    above = np.zeros((d, d), np.int64)
    above[np.triu_indices(d, 1)] = d + np.arange(d * (d - 1) // 2)
    cross = uploads.moments[:, d * (d + 1) // 2 :].reshape(-1, d, labels).sum(2)
    apart = uploads.moments[:, above[: d - 1, d - 1]] - k * cross[:, : d - 1]
    energy = (apart**2).sum(1) / (uploads.deviation**2 * (0.5 + k * k * labels))
    return abs(energy - (d - 1)) > DEVIATIONS * math.sqrt(2 * (d - 1))


def _miscounted(uploads: WhitenedUploads, root: Root) -> Array:
    """Whether a class has fewer samples than none, or all of them together other than the upload says."""
    if not root.classes:
        return np.zeros(len(uploads.samples), bool)
    own = uploads.deviation[:, None] / np.sqrt([each.size for each in root.facts])
    wobble = np.array([each.wobble for each in root.facts])
    unsure = own + abs(uploads.counts) * wobble
    total = np.sqrt((own**2 + (uploads.counts * wobble) ** 2).sum(1)) + 0.02 * uploads.samples
    return (uploads.counts < -DEVIATIONS * unsure).any(1) | (
        abs(uploads.counts.sum(1) - uploads.samples) > DEVIATIONS * total
    )


def _copies(uploads: WhitenedUploads, found: Integers) -> Integers:
    """The same reasons, and "copy" for all but the first of uploads that have noise in common: two honest ones are at
    least as far apart as their noise takes them."""
    there = np.flatnonzero(found == 0)
    free, products = 0, np.zeros((len(there), len(there)))
    for part in (uploads.cross, uploads.gram):
        free += part.shape[1]
        for start in range(0, part.shape[1], COLUMNS):
            some = part[there, start : start + COLUMNS]
            products += some @ some.T
    lengths = products.diagonal()
    apart = lengths[:, None] + lengths[None] - 2 * products
    alike = np.triu(apart < 2 * free - DEVIATIONS * math.sqrt(8 * free), 1)
    after, gone = found.copy(), np.zeros(len(there), bool)
    for place in range(len(there)):
        if not gone[place]:
            gone |= alike[place]
    after[there[gone]] = REASONS.index("copy")
    return after


# --- groups ---


@dataclass(frozen=True, eq=False)
class View:
    """Uploads in a space where noise has variance one: their products [M, M], the number of dimensions, and the part of
    a stratum's sampling error that one dimension has."""

    products: Array
    free: int
    prior: Array  # [K]


def views(uploads: WhitenedUploads, root: Root) -> list[View]:
    """Two looks at what is left of the uploads: all of it that a linear model reads, and its part along the root rows'
    class means, where the noise is that of a few numbers."""
    d, labels, s = root.width, root.labels.shape[1], float(np.median(uploads.deviation))
    means = np.concatenate([each.cross for each in root.facts], axis=1)
    basis = _orthonormal(means)
    gram, cross = (sum(each.rows * part for each, part in zip(root.facts, parts, strict=True))
                   for parts in ([f.gram for f in root.facts], [f.cross for f in root.facts]))  # fmt: skip
    share = float(np.median(uploads.samples)) / len(root.features)
    reads = _orthonormal(solve(share * gram, share * cross, s))
    scale = _scale(d)
    read = np.stack([split(np.append(row / scale, np.zeros(d)), d, 1)[0] @ reads for row in uploads.gram])
    seen = _coordinates(uploads.cross.reshape(-1, d, labels), read, basis, reads)
    blurred = np.stack([each.gram @ reads / math.sqrt(each.size) for each in root.facts])
    blurs = _coordinates(np.zeros((len(blurred), d, labels)), blurred, basis, reads)
    mine = [rows[_evenly(len(rows), MOST_SPREAD // len(root.strata))] for rows in root.strata]
    h, y = (each[np.concatenate(mine)] for each in (root.features, root.labels))
    rows = _coordinates(h[:, :, None] * y[:, None], h[:, :, None] * (h @ reads)[:, None], basis, reads)
    q = reads.shape[1]
    free = (d * labels + q * (q + 1) // 2 + (d - q) * q, basis.shape[1] * labels + q * (q + 1) // 2)
    return [_view(*each, [len(rows) for rows in mine], uploads, root)
            for each in zip(seen, rows, blurs, free, strict=True)]  # fmt: skip


def _evenly(count: int, most: int) -> Integers:
    """Places of at most so many rows, evenly among all of them."""
    return np.arange(count) if count <= most else np.linspace(0, count - 1, most).round().astype(np.int64)


def _coordinates(cross: Array, read: Array, basis: Array, reads: Array) -> tuple[Array, Array]:
    """Both looks at cross [n, d, C] and at gram times `reads` [n, d, q], each entry with noise of variance one and none
    with that of another: a symmetric matrix has the same law in any basis."""
    count, q = len(cross), reads.shape[1]
    inner = reads.T @ read
    outer = (read - reads @ inner) * math.sqrt(2.0)
    rows, columns = np.triu_indices(q)
    upper = inner[:, rows, columns] * np.where(rows == columns, 1.0, math.sqrt(2.0))
    low = np.concatenate([(basis.T @ cross).reshape(count, -1), upper], axis=1)
    return np.concatenate([cross.reshape(count, -1), upper, outer.reshape(count, -1)], axis=1), low


def _orthonormal(columns: Array) -> Array:
    left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return left[:, sizes > 1e-6 * sizes[0]]


def _view(
    seen: Array, rows: Array, blurs: Array, free: int, sizes: Sequence[int], uploads: WhitenedUploads, root: Root
) -> View:
    """`rows` are those of some root rows, so many of each stratum, one stratum after the other. `blurs` [K, L] are what
    the noise of a count moves along: counts are read from features times labels, and what they explain of the products
    of features has their noise."""
    prior, within, first = [], np.empty_like(rows), 0
    for size, stratum in zip(sizes, root.facts, strict=True):
        part = slice(first, first + size)
        within[part] = rows[part] - rows[part].mean(0)
        prior.append((within[part] ** 2).sum() / (size - 1) / stratum.rows / free)
        first += size
    # Uploads differ by their samples, too. That is no noise, and lies along what root rows differ by.
    many = float(np.median(uploads.samples / uploads.deviation**2)) / max(1, len(rows) - len(sizes))
    known = np.concatenate([math.sqrt(many) * within, blurs])
    return View(_whitened(seen, known), free, np.maximum(EXCESS * np.asarray(prior), 1e-12))


def _whitened(seen: Array, known: Array) -> Array:
    """[M, M]: products of rows [M, L] that have noise of variance one and, beside it, one along each row of `known`."""
    if len(known) < known.shape[1]:
        along = seen @ known.T
        inner = known @ known.T + np.eye(len(known))
        return seen @ seen.T - along @ np.linalg.solve(inner, along.T)
    inner = known.T @ known + np.eye(known.shape[1])
    return seen @ np.linalg.solve(inner, seen.T)


@dataclass(frozen=True, eq=False)
class Fit:
    """What a group's uploads have in common, per sample of each stratum: `of` [K, k] makes it of the members' rows."""

    members: Integers
    of: Array

    @staticmethod
    def make(members: Integers, counts: Array, view: View) -> Fit:
        mine = counts[members]
        return Fit(members, np.linalg.solve(mine.T @ mine + np.diag(1 / view.prior), mine.T))

    def left(self, counts: Array, view: View) -> Array:
        """[k, k]: products of what is left of the members."""
        keep = np.eye(len(self.members)) - counts[self.members] @ self.of
        return keep @ view.products[np.ix_(self.members, self.members)] @ keep.T

    def far(self, counts: Array, view: View) -> Array:
        """[M]: the squared distance of each upload from the group, less what the noise of the group adds to it; of a
        member, from the group without it."""
        weights = counts @ self.of  # [M, k]
        inner = view.products[:, self.members]
        apart = view.products.diagonal() - 2 * (weights * inner).sum(1)
        apart = apart + ((weights @ view.products[np.ix_(self.members, self.members)]) * weights).sum(1)
        spread, place = (weights**2).sum(1), np.arange(len(self.members))
        own = weights[self.members, place].clip(max=0.999)
        apart[self.members] /= (1 - own) ** 2
        spread[self.members] = (spread[self.members] - own**2) / (1 - own) ** 2
        return apart - view.free * spread


def largest_of_noise(rows: int, columns: int) -> float:
    """The largest squared singular value that a matrix of unit noise has, but for rare ones."""
    edge = math.sqrt(rows) + math.sqrt(columns)
    return edge**2 + EDGE * edge * (1 / math.sqrt(rows) + 1 / math.sqrt(columns)) ** (1 / 3)


def group(members: Integers, counts: Array, looks: Sequence[View]) -> list[Integers]:
    """Split a group in two, and its halves again, while its spread is more than the noise explains."""
    open_, done = [members], []
    while open_ and len(open_) + len(done) < MOST_GROUPS:
        here = open_.pop(0)
        halves = _halves(here, counts, looks)
        (done if halves is None else open_).extend([here] if halves is None else halves)
    return done + open_


def _halves(members: Integers, counts: Array, looks: Sequence[View]) -> list[Integers] | None:
    """The two parts of a group along its largest spread; None where that is noise."""
    if len(members) < 2:
        return None
    most, along = 1.0, None
    for view in looks:
        left = Fit.make(members, counts, view).left(counts, view)
        values, vectors = np.linalg.eigh(left)
        over = values[-1] / largest_of_noise(len(members), view.free)
        if over > most:
            most, along = over, vectors[:, -1]
    if along is None:
        return None
    order = np.argsort(along, kind="stable")
    line = along[order]
    before = np.arange(1, len(line))
    sums = np.cumsum(line)
    between = sums[:-1] ** 2 / before + (sums[-1] - sums[:-1]) ** 2 / (len(line) - before)
    cut = int(np.argmax(between)) + 1
    return [np.sort(members[order[:cut]]), np.sort(members[order[cut:]])]


def _settle(groups: list[Integers], counts: Array, view: View, times: int = 3) -> list[Integers]:
    """Each upload to the group that it is nearest to, a few times over."""
    everyone = np.sort(np.concatenate(groups))
    for _ in range(times):
        far = np.stack([Fit.make(each, counts, view).far(counts, view) for each in groups])
        nearest = far[:, everyone].argmin(0)
        groups = [everyone[nearest == place] for place in range(len(groups))]
        groups = [each for each in groups if len(each)]
    return groups


def _with_neighbours(groups: list[Integers], counts: Array, view: View) -> list[Integers]:
    """Each group with the uploads of others that are as near to it: they hold none of the classes in which the groups
    differ."""
    if len(groups) < 2:
        return []
    everyone = np.sort(np.concatenate(groups))
    far = np.stack([Fit.make(each, counts, view).far(counts, view) for each in groups])[:, everyone]
    near = far <= far.min(0) + 2
    return [everyone[each] for each in near if each.any()]


@dataclass(frozen=True)
class Distance:
    """How far a group's sum is from the root rows' means, squared, over what chance takes these from the crowd."""

    ratio: float
    unsure: float
    """Its standard deviation, from the noise of the uploads."""
    repeats: bool
    """Whether the sum is nearer to the root rows, in features times labels or in products of features, than another
    crowd's can be: liars who know the root rows send them, and then the model of their group has no error on these."""

    @staticmethod
    def of(members: Integers, uploads: WhitenedUploads, root: Root) -> Distance:
        """That of features times labels, or of products of features, whichever is farther."""
        counts, size = uploads.scaled[members].sum(0), len(members)
        found: list[tuple[float, float]] = []
        for part, spreads in (
            (uploads.cross, [each.cross_spread for each in root.facts]),
            (uploads.gram, [each.gram_spread for each in root.facts]),
        ):
            free, rows = part.shape[1], np.array([each.rows for each in root.facts])
            chance = max(float((counts**2 * spreads / rows).sum()), 1e-30)
            apart = float((_sum(part, members) ** 2).sum()) - size * free
            found.append((apart / chance, size * math.sqrt(2 * free) / chance))
        repeats = any(ratio + SURE * unsure < LEAST_EXCESS for ratio, unsure in found)
        return Distance(*max(found), repeats)


# --- the rule ---


@dataclass(frozen=True, eq=False)
class Chosen:
    """Which uploads a rule took, and why it left out the others."""

    weights: Array  # [M]: 1 for an upload that is in the sum
    reasons: Integers  # [M], of REASONS
    error: float
    """That of the model on root rows: it chose among groups, so it promises nothing for other rows. Infinite where
    nothing was taken."""
    groups: int
    """How many groups the uploads fall into."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A group, and what the root rows say of it."""

    members: Integers
    error: float
    distance: Distance
    samples: float


def _candidate(members: Integers, uploads: WhitenedUploads, root: Root, ridge: float) -> Candidate:
    """A group with its model's error on the rows on which models are tried."""
    gram, cross = split(_sum(uploads.moments, members), root.width, root.labels.shape[1])
    error = root.error(solve(gram, cross, math.sqrt((uploads.deviation[members] ** 2).sum()), ridge))
    distance = Distance.of(members, uploads, root)
    return Candidate(members, error, distance, float(uploads.samples[members].sum()))


def _joined(groups: Sequence[Candidate], uploads: WhitenedUploads, root: Root, ridge: float) -> list[Candidate]:
    """The best group, and with it the one that lowers the error most, as long as there is one: honest devices that hold
    few classes each fall into several groups, and a model of all of them knows every class."""
    found: list[Candidate] = []
    left = sorted(groups, key=lambda each: (each.error, -each.samples))
    here, left = (left[0], left[1:]) if left else (None, [])
    while here is not None and left:
        tried = [_candidate(np.sort(np.concatenate([here.members, each.members])), uploads, root, ridge)
                 for each in left]  # fmt: skip
        best = min(range(len(left)), key=lambda place: tried[place].error)
        if tried[best].error >= here.error:
            break
        here = tried[best]
        left.pop(best)
        found.append(here)
    return found


def _is_counted(uploads: WhitenedUploads, root: Root) -> bool:
    """Whether the noise of an upload's count of a class is below the count of an even share."""
    own = uploads.deviation[:, None] / np.sqrt([each.size for each in root.facts])
    return bool(np.median(own) < np.median(uploads.samples) / len(root.strata))


def _balanced(members: Integers, uploads: WhitenedUploads, root: Root, ridge: float) -> list[Candidate]:
    """Fewer and fewer uploads of one group, chosen so that classes are as common as among the root rows: whoever sends
    what an honest device of two classes could send, a hundred times, tells no lie and hides the other classes."""
    want = np.array([len(rows) for rows in root.strata]) / len(root.features)
    counts, left = uploads.counts[members].clip(min=0), np.ones(len(members), bool)
    order, have = list[int](), np.zeros(len(want))
    for _ in range(len(members)):
        after = have + counts
        off = ((after / np.maximum(after.sum(1, keepdims=True), 1e-30) - want) ** 2).sum(1)
        order.append(int(np.argmin(np.where(left, off, np.inf))))
        have, left[order[-1]] = after[order[-1]], False
    sizes = sorted({math.ceil(len(members) / 2 ** (step / 2)) for step in range(1, 12)} - {0, len(members)})
    return [_candidate(np.sort(members[order[:size]]), uploads, root, ridge) for size in sizes]


def _best(groups: Sequence[Candidate], rows: int, classes: bool) -> Candidate:
    """The group with the least error on the root rows. Of those that so few rows cannot tell from it, the one that is
    nearest to these rows, as a lie may stay where no root row looks; and of those that are as near, the larger."""
    least = min(each.error for each in groups)
    equal = [each for each in groups if each.error <= least + _unsure(least, rows, classes)]
    nearest = min(equal, key=lambda each: each.distance.ratio)
    near = [
        each
        for each in equal
        if each.distance.ratio - each.distance.unsure <= NEARLY * nearest.distance.ratio + nearest.distance.unsure
    ]
    return max(near, key=lambda each: (each.samples, -each.error, tuple(-each.members)))


def _unsure(error: float, rows: int, classes: bool) -> float:
    """The standard deviation of an error on so many rows, by chance."""
    return math.sqrt(error * (1 - error) / rows) if classes else error * math.sqrt(2 / rows)


def _preferred(tried: Sequence[Candidate], root: Root) -> Candidate | None:
    """The best of those that do not repeat the root rows, if there is one."""
    open_ = [each for each in tried if not each.distance.repeats]
    return _best(open_, len(root.trials[0]), root.classes) if open_ else None


def _best_by_score(members: Integers, uploads: WhitenedUploads, root: Root, ridge: float) -> list[Candidate]:
    """The best 1, 2, ... uploads by the error that the model of each alone has on the root rows.

    With many times more rows than features a model that is wrong anywhere is wrong on root rows, so a score may choose.
    It takes uploads of a device of which half of the samples are bad, where these lower the error in spite of that.
    """
    alone = [_candidate(members[place : place + 1], uploads, root, ridge).error for place in range(len(members))]
    order = members[np.argsort(alone, kind="stable")]
    return [_candidate(np.sort(order[: place + 1]), uploads, root, ridge) for place in range(len(order))]


def choose_group(moments: Array, samples: Array, deviation: Array | float, root: Root, ridge: float) -> Chosen:
    """The default rule: test uploads [M, L], group them, and take the group whose model does best on the root rows.

    `samples` [M] is how many each upload sums, `deviation` the standard deviation of its noise on the diagonal, in the
    units of a sample's moments, and `ridge` the c of the model's ridge. Nothing is taken where nothing passes.
    """
    uploads = prepare(np.asarray(moments, np.float64), np.asarray(samples), deviation, root)
    reasons = refuse_uploads(uploads, root)
    there = np.flatnonzero(reasons == 0)
    if not len(there):
        return Chosen(np.zeros(len(reasons)), reasons, math.inf, 0)
    looks = views(uploads, root)
    groups = group(there, uploads.scaled, looks)
    groups = _settle(groups, uploads.scaled, looks[0]) if len(groups) > 1 else groups
    alone = [_candidate(each, uploads, root, ridge) for each in groups]
    after = reasons.copy()
    for each in alone:
        if each.distance.repeats:
            after[each.members] = REASONS.index("root rows")
    alone = [each for each in alone if not each.distance.repeats]
    parts = [each.members for each in alone]
    more = [np.sort(np.concatenate(parts))] if len(parts) > 1 else []  # everybody, to begin with
    more += _with_neighbours(parts, uploads.scaled, looks[0])
    tried = [*alone, *(_candidate(each, uploads, root, ridge) for each in more)]
    tried += _joined(alone, uploads, root, ridge)
    best = _preferred(tried, root)
    if best is not None and root.classes and _is_counted(uploads, root):
        least = best.error - 2 * _unsure(best.error, len(root.trials[0]), True)  # fewer uploads have more noise
        fewer = _balanced(best.members, uploads, root, ridge)
        best = _preferred([best, *(each for each in fewer if each.error < least)], root)
    if not root.classes and len(root.trials[0]) >= MANY * root.width:
        strange = np.flatnonzero(reasons == REASONS.index("noise"))
        by_score = _preferred([*tried, *_best_by_score(np.union1d(there, strange), uploads, root, ridge)], root)
        if by_score is not best and by_score is not None:
            best, after[there] = by_score, REASONS.index("score")
    if best is None:
        return Chosen(np.zeros(len(reasons)), after, math.inf, len(groups))
    members = best.members
    others = np.setdiff1d(there, members)
    after[members], after[others[after[others] == 0]] = 0, REASONS.index("another group")
    weights = np.zeros(len(reasons))
    weights[members] = 1.0
    return Chosen(weights, after, best.error, len(groups))


# --- rules of others, for updates of any protocol ---


def top(scores: Array, keep: int) -> Array:
    """[M]: the weights of a mean of the `keep` uploads with the highest scores; of equals, those that came first.

    Whoever knows the root rows can say what scores well on them and is wrong elsewhere: `choose_group` does not rest on
    scores alone.
    """
    if not 1 <= keep <= len(scores):
        raise TaskError(f"keep = {keep} of {len(scores)} uploads: at least 1, and no more than there are.")
    xp = namespace(scores)
    if xp is np and not np.isfinite(scores).all():
        raise TaskError("a score is not finite: nothing can be chosen by it. Look at the rows that were scored.")
    order = np.argsort(-scores, kind="stable") if xp is np else xp.argsort(-scores, stable=True)
    place = np.argsort(order) if xp is np else xp.argsort(order)
    return (place < keep) / keep


def fltrust(rows: Array, own: Array) -> Array:
    """[M]: weights by FLTrust (Cao et al. 2021): uploads [M, d] count by their cosine with the server's own update [d],
    none below zero, each brought to the length of it. All zero where no upload points along it."""
    xp = namespace(rows, own)
    lengths, mine = xp.sqrt((rows**2).sum(1)), xp.sqrt((own**2).sum())
    if xp is np and not mine > 0:
        raise TaskError("the server's own update is zero, and FLTrust compares uploads with it. Name other root rows.")
    return trusted(cosines(rows @ own, lengths, mine), lengths, mine)


def zeno(row: Array, own: Array, *, rate: float, rho: float, slack: float) -> tuple[Array, Array]:
    """Zeno++ (Xie et al. 2020), for uploads one by one: whether to take an upload, and the upload at the length of the
    server's own gradient `own`, which may be a little old.

    It is taken where rate <own, row> - rho |row|^2 >= -rate slack.
    """
    if not (rate > 0 and rho >= 0 and slack >= 0):
        raise TaskError(f"Zeno++ with rate = {rate:g}, rho = {rho:g}, slack = {slack:g}: above 0, and at least 0.")
    xp = namespace(row, own)
    scaled = row * xp.sqrt((own**2).sum()) / xp.maximum(xp.sqrt((row**2).sum()), 1e-30)
    return rate * (own * scaled).sum() - rho * (scaled**2).sum() >= -rate * slack, scaled
