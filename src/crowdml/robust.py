"""Robust rules: the uploads of a closed round become one, though some of them are lies. Pure functions of arrays.

What a rule reads has left its devices already, with its noise, so a rule costs no sample anything: it is
post-processing. Rows are uploads [M, d]. A round may be too large for memory, so a rule goes through blocks of columns:
first for the products of all rows with each other [M, M], if it asks for distances, and then for the result. NumPy
computes in float64, JAX in float32.

- median, trimmed mean: Yin et al. 2018. Krum, Multi-Krum: Blanchard et al. 2017. Bulyan: El Mhamdi et al. 2018.
- Geometric median by smoothed Weiszfeld steps: Pillutla et al. 2022. Centred clipping: Karimireddy et al. 2021.
- Before a rule: bucketing (Karimireddy et al. 2022), nearest-neighbour mixing (NNM, Allouah et al. 2023).

Where we differ, and why:
- Bulyan chooses M - 2f - 2 uploads, not M - 2f: so each choice by Krum still has the 2f + 3 uploads that Krum needs.
- Clipping takes the median length as its radius, and centred clipping starts at the coordinate-wise median: nothing is
  tuned, and fewer than half of the uploads can move neither far.
- Buckets are drawn by a public hash of the round's number: f lies are in at most f buckets whatever the order is, and
  a replay draws the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any

import numpy as np

from crowdml.arrays import Array, Integers, finite_or_zero, fold, namespace
from crowdml.errors import TaskError
from crowdml.settings import Between, OneOf, Positive
from crowdml.texts import count_text, percent_text

__all__ = [
    "ROOTED", "RULES", "Combine", "bucket_ranks", "combine_blocks", "combine_rows", "cosines", "distances_from",
    "rules_for", "shares_of", "trusted",
]  # fmt: skip

WEISZFELD_STEPS, CLIPPING_STEPS = 32, 3
SMOOTHING = 1e-6
"""A geometric median counts nobody as nearer than this part of the median distance."""
MOST_COMPARED = 4096
"""Uploads that are compared two by two: their products take 128 MiB."""
NUMBERS = 1 << 24
"""Numbers of a block of columns."""
FEWEST_ROWS, MOST_ROWS = 2, 20_000
"""Root rows of each class that `grouping` needs, so that they have a spread, and of all that it takes: with so many a
round takes some seconds, most of them for the features of pictures."""

CHEAPEST = (
    "For a share α of liars among n devices, cohorts of about 1/α devices are best, and their noise is about "
    "sqrt(2.7 n α) times that of one sum."
)
"""What `task check` says of cohorts under every rule."""

RULES: Mapping[str, tuple[int, int]] = {
    "mean": (2, 1),
    "clipped-mean": (2, 1),
    "median": (2, 1),
    "trimmed-mean": (2, 1),
    "krum": (2, 3),
    "multi-krum": (2, 3),
    "bulyan": (4, 3),
    "geometric-median": (2, 1),
    "centred-clipping": (2, 1),
}
"""Each rule, and the fewest uploads with which it stands f lies: a f + b. Only the mean stands none."""

RATING = ("top", "exponential")
"""Rules that rate uploads on rows of the server's own: `top` takes the best on public rows, and `exponential` draws by
the exponential mechanism, for a charge to private ones."""
ROOTED = (*RATING, "grouping", "fltrust")
"""Rules that ask for rows of the server's own: `grouping` tests uploads of second moments, groups them, and takes the
group that does best on public rows; `fltrust` weighs updates by how far they go along the server's own, which public
rows give (`crowdml.rooted`)."""

COUNTING = ("trimmed-mean", "krum", "multi-krum", "bulyan")
"""Rules that ask how many uploads may be lies."""
BY_COLUMN = ("mean", "median", "trimmed-mean")
"""Rules that ask for no distances."""


class RuleName(OneOf):
    """The rules that a task can name, and a sentence on one that is known and cannot be named."""

    def check(self, where: str, value: Any) -> None:
        if value in ("zeno", "zeno++"):
            raise TaskError(
                f"{where} = {value!r}: Zeno++ decides on single check-ins by rows of the server's own, and a server "
                'applies those without any. Gather rounds, and take "fltrust" or "top".'
            )
        super().check(where, value)


@dataclass(frozen=True)
class Combine:
    """How a closed round of uploads becomes one, such as { rule = "median", uploads = 11 }."""

    rule: Annotated[str, RuleName(*RULES, *ROOTED)]
    """The rule: docs/robust.md has what each of them costs and stands."""
    uploads: Annotated[int, Between(1, 1_000_000)]
    """How many uploads close a round; under masks, how many cohorts."""
    f: Annotated[int, Between(0, 1_000_000)] | None = None
    """How many of them may be lies."""
    before: Annotated[str, OneOf("nnm", "bucketing")] | None = None
    """What is done to the uploads first: mixing each with its nearest ones, or means of buckets."""
    keep: Annotated[int, Between(1, 1_000_000)] | None = None
    """How many uploads Multi-Krum averages, M - f - 2 without it, or a rule that rates uploads."""
    bucket: Annotated[int, Between(2, 1_000_000)] | None = None
    """How many uploads bucketing puts into a bucket. Without it, 2."""
    minimum: Annotated[int, Between(1, 1_000_000)] | None = None
    """The fewest uploads with which a round closes when its time is over. Without it, all of them."""
    seconds: Annotated[Fraction, Positive()] | None = None
    """After how many seconds a round closes with what is there. Without it, a round waits for all its uploads."""
    drawn: Annotated[Fraction, Between(Fraction(1, 1_000_000), 1)] | None = None
    """The share of all devices that a public lottery draws for a round; the others wait for the next. Without it,
    whoever comes first is in it."""
    rows: Annotated[int, Between(1, 1_000_000)] | None = None
    """How many rows of its own the server has at most, on which it rates uploads."""
    epsilon: Annotated[Fraction, Positive()] | None = None
    """What a row of the server's own pays for each round that the exponential mechanism draws."""
    least: Annotated[Fraction, Positive()] | None = None
    """The least that a label counts where ratings of numbers divide by it."""

    def __post_init__(self) -> None:
        where = "protocol.combine"
        if self.fewest > self.uploads:
            raise TaskError(f"{where}.minimum = {self.fewest}: at most {where}.uploads = {self.uploads}.")
        if self.f is None and (self.rule in COUNTING or self.before == "nnm"):
            asks = self.rule if self.rule in COUNTING else self.before
            raise TaskError(f"{where}.f is missing: {asks} has to know how many of the uploads may be lies.")
        if self.seconds is not None and self.minimum is None:
            raise TaskError(
                f"{where}.minimum is missing: after {where}.seconds = {float(self.seconds):g} a round closes with at "
                "least so many uploads."
            )
        if self.drawn is not None and self.seconds is None:
            raise TaskError(
                f"{where}.seconds is missing: a round for which a share of {float(self.drawn):.3g} is drawn may lack "
                "some of them. Say after how long it takes others, or fewer."
            )
        settings: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
            ("keep", self.keep, ("multi-krum", *RATING)), ("bucket", self.bucket, ("bucketing",)),
            ("rows", self.rows, ROOTED), ("epsilon", self.epsilon, ("exponential",)), ("least", self.least, RATING),
        )  # fmt: skip
        for key, value, of in settings:
            if value is not None and self.rule not in of and self.before not in of:
                said = float(value) if isinstance(value, Fraction) else value
                raise TaskError(
                    f"{where}.{key} = {said:g}: a setting of {' or '.join(map(repr, of))} alone. Leave it out."
                )
        if self.rooted:
            self._check_rooted(where)
        if self.compares and self.uploads > MOST_COMPARED:
            asks = self.before if self.rule in BY_COLUMN else self.rule
            raise TaskError(
                f"{where}.uploads = {self.uploads:,}: {asks} compares uploads two by two, and takes at most "
                f"{MOST_COMPARED:,}. Take fewer, or a median."
            )
        self.check(self.fewest)

    def _check_rooted(self, where: str) -> None:
        needed = {"keep": self.keep, "rows": self.rows} if self.rule in RATING else {"rows": self.rows}
        needed |= {"epsilon": self.epsilon} if self.rule == "exponential" else {}
        helps = {"keep": "how many uploads it takes", "rows": "how many rows of its own the server has",
                 "epsilon": "what a row of the server's own pays for a round"}  # fmt: skip
        for key in [key for key, value in needed.items() if value is None]:
            raise TaskError(f"{where}.{key} is missing: {self.rule} has to know {helps[key]}.")
        if self.rule == "grouping" and (self.rows or 0) > MOST_ROWS:
            raise TaskError(
                f"{where}.rows = {self.rows:,}: grouping takes at most {MOST_ROWS:,}, so that a round closes in "
                "seconds. Name fewer: a few thousand tell all that it asks."
            )
        if self.before is not None or self.f is not None:
            key, value = ("before", self.before) if self.before is not None else ("f", self.f)
            raise TaskError(f"{where}.{key} = {value!r}: {self.rule} rates single uploads as they are. Leave it out.")

    @property
    def rooted(self) -> bool:
        """Whether it asks for rows of the server's own."""
        return self.rule in ROOTED

    @property
    def lies(self) -> int:
        return self.f or 0

    @property
    def fewest(self) -> int:
        """The fewest uploads that a round closes with."""
        return self.uploads if self.minimum is None else self.minimum

    @property
    def compares(self) -> bool:
        """Whether it asks for the distances between uploads."""
        return self.rule not in (*BY_COLUMN, *RATING, "fltrust") or self.before == "nnm"

    def check_rows(self, classes: int | None) -> None:
        """Refuse too few rows for a task with so many classes, or with numbers."""
        least = FEWEST_ROWS * (classes or 1)
        if self.rule == "grouping" and (self.rows or 0) < least:
            what = "rows" if classes is None else f"rows of each of {classes} classes"
            raise TaskError(
                f"protocol.combine.rows = {self.rows}: grouping needs at least {FEWEST_ROWS} {what}, so {least} or "
                "more."
            )

    def rows_of(self, uploads: int) -> int:
        """How many rows the rule itself has: buckets are fewer than uploads."""
        return -(-uploads // (self.bucket or 2)) if self.before == "bucketing" else uploads

    def kept(self, uploads: int) -> int:
        """K of Multi-Krum."""
        return self.keep or self.rows_of(uploads) - self.lies - 2

    def check(self, uploads: int) -> None:
        """Refuse so many uploads where the rule cannot do what it says with them."""
        if self.rooted:
            if self.rule in RATING and self.kept(uploads) > uploads:
                raise TaskError(
                    f"protocol.combine.keep = {self.keep}: a round may close with {uploads} uploads, and no more than "
                    "these can be taken. Lower it, or raise protocol.combine.minimum."
                )
            return
        times, more = RULES[self.rule]
        rows, needs = self.rows_of(uploads), times * self.lies + more
        if rows < needs:
            formula = f"{times}f + {more} = {needs}"
            what = f"{uploads} uploads" if rows == uploads else f"{rows} buckets of {uploads} uploads"
            raise TaskError(
                f"protocol.combine: {self.rule} needs at least {formula} for f = {self.lies}, and a round may close "
                f"with {what}. Gather more, or lower f."
            )
        if self.rule == "multi-krum" and self.kept(uploads) > rows - self.lies:
            raise TaskError(
                f"protocol.combine.keep = {self.keep}: at most {rows - self.lies}, for f = {self.lies} of {rows} may "
                "be lies."
            )

    def stands(self, uploads: int) -> int:
        """The most lies among so many uploads for which the rule's result stays bounded.

        Of `grouping`: where the noise of one upload hides no lie (`second_moments.remark_on_noise`).
        """
        if self.rule == "mean" or self.rule in RATING:
            return 0
        if self.rule in ("grouping", "fltrust"):
            return uploads - 1
        times, more = RULES[self.rule]
        most = max(0, (self.rows_of(uploads) - more) // times)
        return most if self.f is None else min(most, self.f)

    def came(self, devices: int, rounds: int, each: int) -> int:
        """How many uploads of up to `each` devices a round had on average, where so many devices gave in so many
        rounds. A round that closes by time has fewer than `uploads`."""
        return min(self.uploads, max(self.fewest, -(-devices // (max(1, rounds) * each))))

    def inflation(self, uploads: int) -> float:
        """The variance of the noise in the result over that in the mean of all uploads, about, without any lie."""
        rows, f = self.rows_of(uploads), self.lies
        if self.before == "nnm":  # rows that are mixed of nearly the same ones
            return uploads / (uploads - f)
        if self.rule == "fltrust":  # where noise decides the angles, which half of them lie above a right one
            return math.pi
        if self.rule == "median":
            return math.pi / 2 if rows > 2 else 1.0
        if self.rule == "trimmed-mean":
            return _trimmed(rows, f)
        if self.rule == "krum":
            return float(rows)
        if self.rule == "multi-krum" or self.rule in RATING:
            return rows / self.kept(uploads)
        if self.rule == "bulyan":
            return rows / (rows - 2 * f - 2) * (math.pi / 2 if f else 1.0)
        return 1.0


def _trimmed(rows: int, f: int) -> float:
    """The variance of a trimmed mean of Gaussian numbers over that of their mean, for many of them."""
    if f == 0:
        return 1.0
    from statistics import NormalDist  # it takes a device longer to import than all of this file

    share, law = f / rows, NormalDist()
    far = law.inv_cdf(1 - share)
    inner = 1 - 2 * share
    return (inner - 2 * far * law.pdf(far) + 2 * share * far**2) / inner**2


def rules_for(uploads: int, f: int) -> tuple[str, ...]:
    """The rules that stand f lies among so many uploads."""
    return tuple(rule for rule, (times, more) in RULES.items() if rule != "mean" and uploads >= times * f + more)


# --- a round ---

Blocks = Callable[[], Iterable[Array]]
"""Goes through the columns of all rows: [M, width] after [M, width]."""


def combine_rows(rows: Array, by: Combine, ranks: Integers | None = None) -> Array:
    """[M, d] -> [d]. A row with a number that is not finite counts as zero."""
    sound = finite_or_zero(rows, rows=True)
    return combine_blocks(lambda: (sound,), len(rows), by, ranks)


def combine_blocks(blocks: Blocks, count: int, by: Combine, ranks: Integers | None = None) -> Array:
    """The uploads by this rule, [d]: `blocks` gives finite numbers of `count` rows, some columns after the others.

    `ranks` [M] say in which order buckets are filled (`bucket_ranks`); without them, in the order of the rows.
    """
    by.check(count)
    first, (mixing, weights, chosen) = by.rule != "clipped-mean", _seen(blocks, count, by, ranks)
    done: list[Array] = []
    for block in blocks():
        xp = namespace(block)
        rows = block.astype(_wide(xp))
        centre = xp.median(rows, axis=0) if first and weights is not None else 0.0
        rows = rows - centre if mixing is None else _dot(mixing, rows - centre)
        if weights is not None:
            done.append(centre + _dot(weights, rows))
        elif chosen is not None:
            done.append(near_median(rows[chosen], len(chosen) - 2 * by.lies))
        elif by.rule == "trimmed-mean":
            done.append(trimmed_mean(rows, by.lies))
        else:
            done.append(xp.median(rows, axis=0) if by.rule == "median" else rows.mean(0))
    return done[0] if len(done) == 1 else namespace(*done).concatenate(done)


def _seen(
    blocks: Blocks, count: int, by: Combine, ranks: Integers | None
) -> tuple[Array | None, Array | None, Integers | None]:
    """What a rule sees in all columns together: how rows are mixed first, and then what each counts, or which stay."""
    products = (
        _products(blocks, by.rule != "clipped-mean") if by.compares else None
    )  # which knows the origin: no change
    mixing: Array | None = None
    if by.before == "nnm":
        mixing = _nearest(products, by.lies)
    elif by.before == "bucketing":
        mixing = _buckets(np.arange(count) if ranks is None else ranks, by.bucket or 2)
    if products is not None and mixing is not None:
        products = _dot(_dot(mixing, products), mixing.T)
    if by.rule == "bulyan":
        return mixing, None, _bulyan(products, by.lies)
    return mixing, None if by.rule in BY_COLUMN else _weights(by, products, count), None


def shares_of(blocks: Blocks, count: int, by: Combine, ranks: Integers | None = None) -> Array | None:
    """[M]: what each upload counts in the result, beside 1 in a mean of all; 0 of one that is left out.

    None of a rule that looks at each column by itself: it drops numbers, and no upload as a whole.
    """
    by.check(count)
    if by.rule in BY_COLUMN and by.rule != "mean":
        return None
    mixing, weights, chosen = _seen(blocks, count, by, ranks)
    rows = by.rows_of(count)
    counts = np.full(rows, 1 / rows) if weights is None else np.asarray(weights)
    if chosen is not None:
        counts = np.isin(np.arange(rows), np.asarray(chosen)) / len(chosen)
    return count * (counts if mixing is None else counts @ np.asarray(mixing))


def distances_from(blocks: Blocks, point: Array) -> Array:
    """[M]: how far each row is from a point [d]."""
    total, done = 0.0, 0
    for block in blocks():
        total = total + ((block - point[done : done + block.shape[1]]) ** 2).sum(1)
        done += block.shape[1]
    return np.sqrt(total)


def block_width(count: int) -> int:
    """How many columns of so many uploads are in memory at once."""
    return max(1, NUMBERS // max(1, count))


def bucket_ranks(number: Any, count: int) -> Integers:
    """[M]: where each upload of a round stands in an order that everybody can work out from the round's number."""
    xp = namespace(number)
    word = xp.arange(count).astype(xp.uint32) + xp.asarray(number).astype(xp.uint32).reshape(-1) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        word = (word ^ (word >> shift)) * np.uint32(factor)
    return _order(_order(word))


def _wide(xp: Any) -> Any:
    return np.float64 if xp is np else xp.float32


def _order(values: Array, axis: int = -1) -> Integers:
    """The places of the values from the least on; equal ones stay in their order."""
    xp = namespace(values)
    return np.argsort(values, axis=axis, kind="stable") if xp is np else xp.argsort(values, axis=axis, stable=True)


def _dot(left: Array, right: Array) -> Array:
    """A product with all digits of its numbers: an accelerator would leave out some of them."""
    xp = namespace(left, right)
    return left @ right if xp is np else xp.matmul(left, right, precision="highest")


# --- column by column ---


def trimmed_mean(rows: Array, f: int) -> Array:
    """The mean of each column without its f lowest and its f highest numbers."""
    return namespace(rows).sort(rows, axis=0)[f : len(rows) - f].mean(0)


def near_median(rows: Array, keep: int) -> Array:
    """The mean of those `keep` numbers of each column that are nearest to its median."""
    xp = namespace(rows)
    order = _order(abs(rows - xp.median(rows, axis=0)), axis=0)[:keep]
    return xp.take_along_axis(rows, order, axis=0).mean(0)


# --- by distances ---


def _products(blocks: Blocks, centred: bool) -> Array:
    """[M, M]: rows times rows, each less the coordinate-wise median, so that a common part takes no digits."""
    total: Any = 0.0
    for block in blocks():
        xp = namespace(block)
        rows = block.astype(_wide(xp))
        rows = rows - xp.median(rows, axis=0) if centred else rows
        total = total + _dot(rows, rows.T)
    return total


def _squares(products: Array) -> Array:
    """[M, M]: squared distances; a row is below all others from itself."""
    xp, own = namespace(products), products.diagonal()
    apart = xp.maximum(own[:, None] + own[None] - 2 * products, 0)
    return xp.where(xp.eye(len(own), dtype=bool), -1, apart)


def krum_scores(squares: Array, f: int) -> Array:
    """[M]: the squared distances of each row to the M - f - 2 nearest others, added up. The least is the best."""
    return namespace(squares).sort(squares, axis=1)[:, 1 : len(squares) - f - 1].sum(1)


def _weights(by: Combine, products: Array, count: int) -> Array:
    """[M]: what each row counts in the result, as seen from the centre that products have."""
    xp, rows = namespace(products), len(products)
    if by.rule in ("krum", "multi-krum"):
        keep = 1 if by.rule == "krum" else by.kept(count)
        order = _order(krum_scores(_squares(products), by.lies))
        return (_order(order) < keep) / keep
    if by.rule == "clipped-mean":
        lengths = xp.sqrt(products.diagonal())
        return _held(lengths, xp.median(lengths)) / rows
    if by.rule == "geometric-median":
        return weiszfeld(products, WEISZFELD_STEPS)
    return clip_around(products, CLIPPING_STEPS)


def _held(lengths: Array, radius: Any) -> Array:
    """[M]: by what rows of these lengths are shortened to the radius."""
    xp = namespace(lengths)
    return xp.minimum(1.0, radius / xp.maximum(lengths, xp.asarray(radius)).clip(1e-30))


def _lengths(products: Array, weights: Array) -> Array:
    """[M]: how far each row is from the point that has these weights."""
    xp, along = namespace(products), _dot(products, weights)
    return xp.sqrt(xp.maximum(products.diagonal() - 2 * along + _dot(weights, along), 0))


def weiszfeld(products: Array, steps: int, smoothing: float | None = None) -> Array:
    """[M]: the weights of the geometric median after so many steps from the centre; nobody is nearer than
    `smoothing`, or without one than `SMOOTHING` of the median distance."""
    xp = namespace(products)

    def step(_: Any, weights: Array) -> Array:
        far = _lengths(products, weights)
        least = xp.maximum(SMOOTHING * xp.median(far), 1e-30) if smoothing is None else smoothing
        pull = 1 / xp.maximum(far, least)
        return pull / pull.sum()

    return fold(step, xp.zeros_like(products[0]), steps, like=products)


def clip_around(products: Array, steps: int, radius: float | None = None) -> Array:
    """[M]: the weights of centred clipping after so many steps from the centre, with this radius, or without one the
    median distance."""
    xp, rows = namespace(products), len(products)

    def step(_: Any, weights: Array) -> Array:
        far = _lengths(products, weights)
        held = _held(far, xp.median(far) if radius is None else radius)
        return weights * (1 - held.mean()) + held / rows

    return fold(step, xp.zeros_like(products[0]), steps, like=products)


def _bulyan(products: Array, f: int) -> Integers:
    """[M - 2f - 2]: the rows that Krum chooses one after the other, each from those that are left."""
    xp, squares = namespace(products), _squares(products)
    rows = len(squares)
    places, order = xp.arange(rows), _order(squares, axis=1)[:, 1:]  # a row is the first of its own
    apart = xp.take_along_axis(squares, order, axis=1)

    def choose(number: Any, left: Array) -> Array:
        there = left[order]
        near = there & (xp.cumsum(there, axis=1) <= rows - number - f - 2)
        scores = xp.where(near, apart, 0).sum(1)
        return left & (places != xp.argmin(xp.where(left, scores, xp.inf)))

    left = fold(choose, places >= 0, rows - 2 * f - 2, like=products)
    return _order(left)[: rows - 2 * f - 2]


def _nearest(products: Array, f: int) -> Array:
    """[M, M]: the mean of each row and the M - f - 1 nearest others."""
    squares = _squares(products)
    keep = len(squares) - f
    ranks = _order(_order(squares, axis=1), axis=1)
    return (ranks < keep) / keep


def _buckets(ranks: Integers, size: int) -> Array:
    """[buckets, M]: the mean of each bucket of rows; the last may have fewer."""
    xp = namespace(ranks)
    inside = ranks[None] // size == xp.arange(-(-len(ranks) // size))[:, None]
    return inside / inside.sum(1, keepdims=True)


# --- by the angle with an update of the server's own ---


def cosines(products: Array, lengths: Array, own: Any) -> Array:
    """[M]: of the angles between uploads and the server's own update, from their products with it and their lengths."""
    return products / namespace(products).maximum(lengths * own, 1e-30)


def trusted(angles: Array, lengths: Array, own: Any) -> Array:
    """[M]: FLTrust's weights of uploads with these cosines and lengths, for an own update of length `own`."""
    xp = namespace(angles, lengths)
    trust = xp.maximum(angles, 0)
    return trust * own / xp.maximum(lengths, 1e-30) / xp.maximum(trust.sum(), 1e-30)


# --- what whoever starts a study should know ---


def memory_of(by: Combine, numbers: int, width: int = 0) -> int:
    """About how many bytes a round of uploads of so many numbers takes at its close, as measured: most rules read some
    columns of all uploads at once, and `grouping` all of them, beside `width` numbers for each of its rows."""
    whole, pairs = by.uploads * numbers, by.uploads**2
    if by.rule == "grouping":
        return 40 * whole + 48 * pairs + 32 * min(by.rows or 0, 2000) * width
    rated = 4 * by.uploads * (by.rows or 0) if by.rule == "exponential" else 0
    return 40 * min(whole, NUMBERS) + (64 * pairs if by.compares else 0) + rated


def remarks(by: Combine, cohort: int | None) -> tuple[str, ...]:
    """What the rule stands and costs; under masks uploads are the sums of cohorts of so many devices."""
    each, bad = ("upload", "be lies") if cohort is None else ("cohort", "have a liar")
    stands, more = by.stands(by.fewest), math.sqrt(by.inflation(by.uploads))
    if by.rule == "grouping":
        return _grouping_remarks(by, each, cohort)
    if by.rule == "fltrust":
        return _fltrust_remarks(by, each, cohort)
    if by.rooted:
        return _rooted_remarks(by, each, more)
    named = by.rule if by.before is None else f"{by.rule} after {by.before}"
    rows, f = by.rows_of(by.fewest), max(1, by.lies)
    told = [
        f"Rounds are combined by {named}: up to {stands} of {by.fewest} {each}s may {bad}. Its noise is about "
        f"{more:.2f} times that of the mean of {count_text(by.uploads, each)}. It reads what was released, so no "
        "sample pays for it.",
        f"Rules that stand {f} of {rows} {each if rows == by.fewest else 'bucket'}s: {', '.join(rules_for(rows, f))}.",
    ]
    if cohort is not None:
        told += _masked_remarks(by, cohort, stands)
    return tuple(told)


def _rooted_remarks(by: Combine, each: str, more: float) -> tuple[str, ...]:
    """Which rows of the server's own a rule asks for, what it charges them, and what it cannot do."""
    rows, how = count_text(by.rows or 0, "row"), f"{by.keep:,} of {count_text(by.uploads, each)}"
    if by.rule == "top":
        told = (
            f"Each round takes the {how} that do best on up to {rows} of the server's own, which are public: attach "
            "them with `crowdml task validate --public`. Private rows are refused, for nothing hides them here."
        )
    else:
        epsilon = float(by.epsilon or 0)
        told = (
            f"Each round draws {how} by the exponential mechanism, on up to {rows} of the server's own: attach them "
            f"with `crowdml task validate --epsilon ... --budget ...`. A row of the server's pays ε = {epsilon:g} a "
            f"round, and R rounds cost it R times as much. No sample of a device pays for that."
        )
    return (
        f"{told} The noise is about {more:.2f} times that of the mean of {count_text(by.uploads, each)}.",
        "A score is no shield: an upload that does well on rows which it can guess is taken, whatever else it does.",
    )


def _fltrust_remarks(by: Combine, each: str, cohort: int | None) -> tuple[str, ...]:
    """What FLTrust takes of the server's rows, and what noise does to it."""
    rows, under = count_text(by.rows or 0, "row"), () if cohort is None else (CHEAPEST,)
    return (
        f"Rounds of {count_text(by.uploads, each)} are combined by fltrust: up to {rows} of the server's own give an "
        f"update of its own. A{'n' if each == 'upload' else ''} {each} counts by the cosine of its angle with that, "
        "nothing beyond a right angle, at the length of it. Rows are public: attach them with `crowdml task validate "
        "--public`. Private rows are refused, for nothing hides them here. No sample pays for it.",
        "The result is never longer than the server's own update, however many lie. Its noise is up to "
        f"{math.sqrt(by.inflation(by.uploads)):.2f} times that of the mean, beside the same signal. Where noise "
        "outweighs an upload it has nearly a right angle with everything, and a lie along the server's own update "
        "counts more than any honest one.",
        *under,
    )


def _grouping_remarks(by: Combine, each: str, cohort: int | None) -> tuple[str, ...]:
    """What the default rule looks at, and under masks what small cohorts cost."""
    rows = count_text(by.rows or 0, "row")
    told = [
        f"Rounds of {count_text(by.uploads, each)} are combined by grouping: each {each} is tested for its known noise "
        f"and its sums, those that pass are grouped, and the group whose model has the least error on up to {rows} of "
        f"the server's own is taken. It asks no number of liars. Rows are public: attach them with "
        "`crowdml task validate --public`. No sample pays for it."
    ]
    if cohort is not None:
        over, devices = math.sqrt(by.uploads), by.uploads * cohort
        told += [
            f"Under masks no rule sees a single upload, and one liar spoils its cohort. Where {1 / cohort:.1%} of the "
            f"devices lie, about a third of the cohorts of {cohort} has no liar. The noise is about {over:.1f} "
            f"times that of one sum over all {devices:,} devices, and sqrt(3) times as much where a third is taken.",
            CHEAPEST,
        ]
    return tuple(told)


def _masked_remarks(by: Combine, cohort: int, stands: int) -> list[str]:
    """Under masks one lie spoils its whole cohort: how many liars that allows, and what small cohorts cost."""
    over = math.sqrt(by.uploads * by.inflation(by.uploads))
    share = 1 - (1 - stands / by.fewest) ** (1 / cohort)
    return [
        f"Under masks no rule sees a single upload: rules combine the sums of cohorts, and one liar spoils its cohort. "
        f"Cohorts of {cohort} stand a share of about {percent_text(share, 2)} liars. The noise is about {over:.1f} "
        f"times that of one sum over all {by.uploads * cohort:,} devices.",
        CHEAPEST,
    ]
