"""Totals of a device only grow: a statement that names less than an earlier one comes from an older ledger.

Review 2, privacy finding 2.
"""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_vectors import FALLS, SPEC

from crowdml.privacy.losses import ZCDP, Loss, Pure, Renyi, Total, Unbounded
from crowdml.privacy.spending import ceiling
from crowdml.wire.packing import pack
from crowdml.wire.statements import Statement, totals_fell

FELL = {
    "fewer samples",
    "a smaller device total",
    "a smaller dearest sample",
    "a kind is gone",
    "unbounded is gone",
    "a smaller order",
    "an order between two, smaller",
}


@pytest.mark.parametrize("name", FALLS)
def test_a_statement_fell_where_any_part_of_it_is_smaller(name: str):
    before, now = (pack(each.plain()) for each in FALLS[name])
    assert totals_fell(before, now) == (name in FELL)


def test_the_vectors_of_statements_hold():
    for row in json.loads((SPEC / "vectors" / "statements.json").read_text(encoding="utf-8")):
        assert totals_fell(bytes.fromhex(row["before"]), bytes.fromhex(row["now"])) == row["fell"]


fractions = st.fractions(min_value=0, max_value=3, max_denominator=50)
losses: st.SearchStrategy[Loss] = st.one_of(
    fractions.map(Pure),
    fractions.map(ZCDP),
    st.just(Unbounded()),
    st.tuples(
        st.lists(st.integers(2, 9), min_size=1, max_size=4, unique=True), st.lists(fractions, min_size=4, max_size=4)
    ).map(lambda pair: Renyi(tuple(sorted(pair[0])), tuple(sorted(pair[1]))[: len(pair[0])])),
)


@given(st.lists(st.tuples(losses, st.integers(1, 4)), min_size=2, max_size=6), st.integers(1, 5))
def test_no_ledger_that_only_grows_ever_falls(charges: list[tuple[Loss, int]], until: int):
    """Each charge is on a sample of its own or on the first one again, with losses of any kinds and orders."""

    def after(n: int) -> bytes:
        device, samples = Total(), dict[int, Total]()
        for place, (loss, serial) in enumerate(charges[:n]):
            device += loss
            samples[serial if place % 2 else 0] = samples.get(serial if place % 2 else 0, Total()) + loss
        return pack(Statement.of(device, len(samples), ceiling(samples.values())).plain())

    until = min(until, len(charges) - 1)
    assert not totals_fell(after(until), after(len(charges)))
    if Fraction(0) < sum((Total.of([loss]).pure for loss, _ in charges[until:]), Fraction(0)):
        assert totals_fell(after(len(charges)), after(until))
