"""Spans of serials: what the samples under many overlapping spans have paid, and how many samples there are.

A span is a pair of serials, both included. Nothing here reads a file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction

from crowdml.privacy.losses import Total

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


def stretches(spans: Iterable[Priced]) -> Iterator[tuple[int, Total]]:
    """The first serial and the total of each stretch of serials that were charged alike. Exact.

    n spans cost O(n log n) additions however they overlap: a span is added once to each of the O(log n) halves,
    quarters, ... of the line that it covers whole.
    """
    cluster: list[Priced] = []
    end = -1
    for span in sorted(spans, key=lambda span: span[0]):
        if cluster and span[0] > end:
            yield from _cluster(cluster)
            cluster = []
        cluster.append(span)
        end = max(end, span[1])
    if cluster:
        yield from _cluster(cluster)


def _cluster(spans: Sequence[Priced]) -> Iterator[tuple[int, Total]]:
    points = sorted({first for first, _, _ in spans} | {last + 1 for _, last, _ in spans})
    yield from _halves(spans, Total(), points, 0, len(points) - 1)


def _halves(
    spans: Sequence[Priced], total: Total, points: Sequence[int], low: int, high: int
) -> Iterator[tuple[int, Total]]:
    """Stretches from points[low] up to points[high]; `total` is what every sample in there has paid already."""
    start, stop = points[low], points[high]
    partial: list[Priced] = []
    for span in spans:
        if span[0] <= start and span[1] >= stop - 1:
            total = total + span[2]
        else:
            partial.append(span)
    if not partial:
        yield start, total
        return
    middle = (low + high) // 2
    cut = points[middle]
    yield from _halves([span for span in partial if span[0] < cut], total, points, low, middle)
    yield from _halves([span for span in partial if span[1] >= cut], total, points, middle, high)


def dearest(spans: Iterable[Priced], cost: Callable[[Total], Fraction | float]) -> tuple[int, Total] | None:
    """A serial whose total costs most, and that total; the lowest such serial of equal totals. None without spans.

    `cost` must never fall when a loss is added. So only totals that no other one dominates need be costed.
    """
    first_serials: dict[Total, int] = {}
    for serial, total in stretches(spans):
        first_serials.setdefault(total, serial)
    front: list[Total] = []
    for total in sorted(first_serials, key=_size, reverse=True):
        if not any(_dominates(other, total) for other in front):
            front.append(total)
    if not front:
        return None
    top = max(front, key=cost)
    return first_serials[top], top


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
