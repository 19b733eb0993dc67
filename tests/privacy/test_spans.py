"""Spans by themselves, against serials counted one by one."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from crowdml.privacy.losses import ZCDP, Pure, Renyi, Total
from crowdml.privacy.spans import _stretches, _Sums, covered, dearest, front, undominated

SPAN = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair)))
TOTALS = st.sampled_from(
    [
        Total.of([Pure(Fraction(1, 3))]),
        Total.of([ZCDP(Fraction(1, 7))]),
        Total.of([Pure(Fraction(1)), ZCDP(Fraction(1, 9))]),
        Total.of([Renyi((2, 4), (Fraction(1, 5), Fraction(1, 2)))]),
        Total.of([Renyi((3, 9), (Fraction(1, 8), Fraction(1)))]),
    ]
)


@given(st.lists(SPAN, max_size=20), SPAN)
def test_a_coverage_counts_each_serial_once(spans, asked):
    serials = {serial for first, last in spans for serial in range(first, last + 1)}
    coverage = covered(spans)
    assert coverage.size == len(serials)
    assert {serial for first, last in coverage for serial in range(first, last + 1)} == serials
    assert coverage.missing(*asked) == len(set(range(asked[0], asked[1] + 1)) - serials)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(SPAN, TOTALS), max_size=25))
def test_stretches_carry_the_total_of_every_serial_and_the_dearest_is_among_them(spans):
    priced = [(first, last, total) for (first, last), total in spans]
    by_serial = {
        serial: Total.of(total for first, last, total in priced if first <= serial <= last) for serial in range(61)
    }
    sums = _Sums()
    found = [(serial, sums.totals[number]) for serial, number in _stretches(priced, sums)]
    assert all(by_serial[serial] == total for serial, total in found)
    assert {total for _, total in found} | {Total()} == set(by_serial.values()) | {Total()}
    top = dearest(front(priced), lambda total: total.epsilon(1e-6))
    assert (top is None) == (not priced)
    if top is not None:
        assert by_serial[top[0]] == top[1]
        assert top[1].epsilon(1e-6) == max(total.epsilon(1e-6) for total in set(by_serial.values()))


def test_without_spans_there_is_no_dearest_sample():
    assert dearest(front([]), lambda total: total.epsilon(1e-6)) is None


def test_only_totals_that_no_other_dominates_are_kept():
    low, high = Total(zcdp=Fraction(1, 9)), Total(zcdp=Fraction(1, 8))
    mixed = Total(pure=Fraction(1), squares=Fraction(1, 2))
    assert undominated([(1, low), (2, high), (3, mixed), (4, Total())]) == [(3, mixed), (2, high)]
    assert undominated([(1, high), (2, high)]) == [(1, high)]
