"""Spans of serials: what the samples under many overlapping spans have paid, and how many samples there are.

A span is a pair of serials, both included. Nothing here reads a file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

from crowdml.privacy.losses import Total

Span = tuple[int, int]  # first serial, last serial, both included
Priced = tuple[int, int, Total]  # first serial, last serial, what each sample between them paid


class Coverage:
    """A set of serials, kept as disjoint spans that do not touch. `size` is the number of serials in it."""

    def __init__(self) -> None:
        self.size = 0
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._lasts, strict=True)

    def add(self, first: int, last: int) -> None:
        i, j = bisect_left(self._lasts, first - 1), bisect_right(self._firsts, last + 1)  # those met or touched
        merged_first, merged_last = min([first, *self._firsts[i:j]]), max([last, *self._lasts[i:j]])
        self.size += (
            merged_last
            - merged_first
            - sum(b - a for a, b in zip(self._firsts[i:j], self._lasts[i:j], strict=True))
            + 1
            - (j - i)
        )
        self._firsts[i:j], self._lasts[i:j] = [merged_first], [merged_last]

    def missing(self, first: int, last: int) -> int:
        """How many serials of this span are not in the set."""
        i, j = bisect_left(self._lasts, first), bisect_right(self._firsts, last)
        met = zip(self._firsts[i:j], self._lasts[i:j], strict=True)
        return last - first + 1 - sum(min(b, last) - max(a, first) + 1 for a, b in met)


def covered(spans: Iterable[tuple[int, int]]) -> Coverage:
    coverage = Coverage()
    for first, last in spans:
        coverage.add(first, last)
    return coverage


class _Sums:
    """Totals by number, each sum of two worked out once: many samples have paid the same few totals."""

    def __init__(self) -> None:
        self.totals: list[Total] = [Total()]
        self._numbers: dict[Total, int] = {Total(): 0}
        self._by_identity: dict[int, int] = {}
        self._sums: dict[tuple[int, int], int] = {}

    def number(self, total: Total) -> int:
        """The number of a total that somebody else keeps alive."""
        number = self._by_identity.get(id(total))
        if number is None:
            number = self._by_identity[id(total)] = self._number(total)
        return number

    def add(self, one: int, other: int) -> int:
        number = self._sums.get((one, other))
        if number is None:
            number = self._sums[one, other] = self._number(self.totals[one] + self.totals[other])
        return number

    def _number(self, total: Total) -> int:
        number = self._numbers.setdefault(total, len(self.totals))
        if number == len(self.totals):
            self.totals.append(total)
        return number


_Numbered = tuple[int, int, int]  # first serial, last serial, the number of what each sample between them paid


def _stretches(spans: Sequence[Priced], sums: _Sums) -> Iterator[tuple[int, int]]:
    """The first serial and the number of the total of each stretch of serials that were charged alike. Exact.

    n spans cost O(n log n) additions however they overlap: a span is added once to each of the O(log n) halves,
    quarters, ... of the line that it covers whole.
    """
    cluster: list[_Numbered] = []
    end = -1
    for first, last, total in sorted(spans, key=lambda span: span[0]):
        if cluster and first > end:
            yield from _cluster(cluster, sums)
            cluster = []
        cluster.append((first, last, sums.number(total)))
        end = max(end, last)
    if cluster:
        yield from _cluster(cluster, sums)


def _cluster(spans: Sequence[_Numbered], sums: _Sums) -> Iterator[tuple[int, int]]:
    points = sorted({first for first, _, _ in spans} | {last + 1 for _, last, _ in spans})
    return _halves(spans, 0, points, 0, len(points) - 1, sums)


def _halves(
    spans: Sequence[_Numbered], paid: int, points: Sequence[int], low: int, high: int, sums: _Sums
) -> Iterator[tuple[int, int]]:
    """Stretches from points[low] up to points[high]; `paid` is what every sample in there has paid already."""
    start, stop = points[low], points[high]
    partial: list[_Numbered] = []
    for span in spans:
        if span[0] <= start and span[1] >= stop - 1:
            paid = sums.add(paid, span[2])
        else:
            partial.append(span)
    if not partial:
        yield start, paid
        return
    middle = (low + high) // 2
    cut = points[middle]
    yield from _halves([span for span in partial if span[0] < cut], paid, points, low, middle, sums)
    yield from _halves([span for span in partial if span[1] >= cut], paid, points, middle, high, sums)


def front(spans: Iterable[Priced]) -> list[tuple[int, Total]]:
    """Serials and totals that no other total dominates, one serial for each: the dearest sample is among them.

    So it is under every cost that never falls when a loss is added, at any delta and by any filter.
    """
    spans, sums = list(spans), _Sums()
    serials: dict[int, int] = {}
    for serial, number in _stretches(spans, sums):
        serials.setdefault(number, serial)
    return undominated((serial, sums.totals[number]) for number, serial in serials.items())


def undominated(samples: Iterable[tuple[int, Total]]) -> list[tuple[int, Total]]:
    kept: list[tuple[int, Total]] = []
    for serial, total in sorted(samples, key=lambda sample: _size(sample[1]), reverse=True):
        if not any(_dominates(other, total) for _, other in kept):
            kept.append((serial, total))
    return kept


def dearest(
    samples: Sequence[tuple[int, Total]], cost: Callable[[Total], Fraction | float]
) -> tuple[int, Total] | None:
    """The serial and the total that cost most; None of none."""
    return max(samples, key=lambda sample: cost(sample[1]), default=None)


def _size(total: Total) -> tuple[bool, int, int]:
    divergence = total.zcdp + total.squares + sum(total.values)
    return (
        total.unbounded,
        (divergence.numerator << 64) // divergence.denominator,
        (total.pure.numerator << 64) // total.pure.denominator,
    )


def _dominates(one: Total, other: Total) -> bool:
    """Whether `one` is at least `other` in every part, so that it costs no less under any conversion."""
    return (
        one.zcdp >= other.zcdp
        and one.squares >= other.squares
        and one.pure >= other.pure
        and one.unbounded >= other.unbounded
        and (
            not other.orders
            or (one.orders == other.orders and all(a >= b for a, b in zip(one.values, other.values, strict=True)))
        )
    )
