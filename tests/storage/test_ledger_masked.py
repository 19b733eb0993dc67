"""What the ledger keeps of masked releases: the second number, the device's round, batches that serve again."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_builders import OTHER, PLENTY, TASK, TENTH, charge, masked
from ledgers import sample_ceiling

from crowdml.errors import BudgetExhausted, LedgerError
from crowdml.privacy.losses import ZCDP, Pure, Renyi, Total, Unbounded
from crowdml.storage import Budget, Ledger, Round

DELTA = 1e-6


@pytest.fixture
def ledger():
    with Ledger(":memory:") as book:
        yield book


# --- the second number ---


def test_both_totals_have_a_second_number_if_everyone_else_colludes(ledger):
    ledger.take_serials(20)
    ledger.charge(TASK, [masked(0, 9), masked(5, 9)], [PLENTY])
    ledger.charge(TASK, [charge(10, 19)], [PLENTY])
    serial, total = ledger.dearest_sample(DELTA, alone=True)
    assert 5 <= serial <= 9
    assert total == Total.of([ZCDP(Fraction(50, 100))] * 2)
    assert ledger.dearest_sample(DELTA)[1] == Total.of([ZCDP(Fraction(1, 100))] * 2)
    assert ledger.device_total(alone=True).zcdp == 50 * ledger.device_total().zcdp
    assert ledger.device_total(alone=True).pure == ledger.device_total().pure == 1


def test_where_nothing_was_masked_both_numbers_are_one(ledger):
    ledger.take_serials(10)
    ledger.charge(TASK, [charge(0, 9)], [PLENTY])
    assert ledger.dearest_sample(DELTA, alone=True) == ledger.dearest_sample(DELTA)
    assert ledger.device_total(alone=True) == ledger.device_total()
    assert Ledger(":memory:").dearest_sample(DELTA, alone=True) is None


def test_another_sample_may_be_the_dearest_if_everyone_else_colludes(ledger):
    ledger.take_serials(2)
    local = replace(charge(1, 1), loss=ZCDP(Fraction(1, 10)), device_loss=ZCDP(Fraction(1)))
    ledger.charge(TASK, [masked(0, 0, 1), local], [PLENTY])
    assert ledger.dearest_sample(DELTA)[0] == 1
    assert ledger.dearest_sample(DELTA, alone=True)[0] == 0


def test_budgets_count_the_first_number(ledger):
    ledger.take_serials(10)
    budget = Budget(Fraction(1), DELTA, 10)
    ledger.charge(TASK, [masked(0, 9)], [budget])
    assert ledger.dearest_sample(DELTA, alone=True)[1].epsilon(DELTA) > 1
    with pytest.raises(BudgetExhausted):
        ledger.charge(TASK, [masked(0, 9, 50)], [budget])


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19), st.integers(1, 5), st.booleans()), max_size=8))
@settings(max_examples=40, deadline=None)
def test_the_second_number_is_the_plain_sum_over_the_charges(spans):
    with Ledger(":memory:") as ledger:
        ledger.take_serials(20)
        written = []
        for a, b, rho, is_masked in spans:
            first, last = min(a, b), max(a, b)
            written.append(masked(first, last, rho) if is_masked else charge(first, last))
            ledger.charge(TASK, written[-1:], [PLENTY])
        found = ledger.dearest_sample(DELTA, alone=True)
        totals = [
            Total.of([each.alone or each.loss for each in written if each.first_sample <= serial <= each.last_sample])
            for serial in range(20)
        ]
        most = max(total.epsilon(DELTA) for total in totals)
        assert (found[1].epsilon(DELTA) if found else 0.0) == most
        assert ledger.device_total(alone=True) == Total.of([each.device_alone or each.device_loss for each in written])


def test_a_masked_charge_without_its_second_number_promises_nothing(ledger):
    """As one would read that was written before the number was kept."""
    ledger.take_serials(5)
    ledger.charge(TASK, [masked(0, 4)], [PLENTY])
    ledger._connection.execute("drop trigger charge_is_never_edited")
    ledger._connection.execute("update charge set device_alone = null, alone = null")
    assert ledger.charges()[0].alone == Unbounded()
    assert ledger.device_total(alone=True).unbounded
    assert ledger.dearest_sample(DELTA, alone=True)[1].unbounded
    assert not ledger.device_total().unbounded


# --- the round ---


def test_a_round_is_kept_and_only_grows(ledger):
    assert ledger.round(TASK) is None
    ledger.keep_round(TASK, Round(3, b"advertised"))
    ledger.keep_round(TASK, Round(3, b"shared"))
    assert ledger.round(TASK) == Round(3, b"shared")
    assert ledger.round(OTHER) is None
    assert ledger.of(1).round(TASK) is None
    with pytest.raises(LedgerError, match="each round once"):
        ledger.keep_round(TASK, Round(2, b"an older one"))
    ledger.keep_round(TASK, Round(3, None))
    with pytest.raises(LedgerError, match="each round once"):
        ledger.keep_round(TASK, Round(3, b"once more"))
    ledger.keep_round(TASK, Round(4, b"advertised"))
    assert ledger.round(TASK) == Round(4, b"advertised")


def test_a_round_is_written_with_its_charges_or_not_at_all(ledger):
    ledger.take_serials(5)
    ledger.keep_round(TASK, Round(1, b"shared"))
    with pytest.raises(BudgetExhausted):
        ledger.charge(
            TASK, [masked(0, 4)], [Budget(Fraction(1), DELTA, 0)], outbox={0: b"m"}, round_=Round(1, b"drawn")
        )
    assert ledger.round(TASK) == Round(1, b"shared")
    assert ledger.resend() == ()
    ledger.charge(TASK, [masked(0, 4)], [PLENTY], outbox={0: b"m"}, round_=Round(1, b"drawn"))
    assert ledger.round(TASK) == Round(1, b"drawn")
    assert [each.body for each in ledger.resend()] == [b"m"]


@pytest.mark.parametrize(
    "statement",
    [
        "delete from round",
        "update round set number = 1",
        "insert or replace into round (device, task, number, body) select device, task, 1, x'00' from round",
    ],
)
def test_a_round_cannot_be_forgotten_by_hand(ledger, statement):
    ledger.keep_round(TASK, Round(2, b"drawn"))
    with pytest.raises(Exception, match="each round once"):
        ledger._connection.execute(statement)


# --- batches that serve again ---


def test_samples_of_a_source_wait_here_once_they_have_served(ledger):
    ledger.charge(
        TASK, [charge(0, 1)], [PLENTY], take=range(2), source="rows", taken=2, keep=[b"one", b"two"], state=b"1 of 2"
    )
    assert [(each.serial, each.body) for each in ledger.waiting(TASK)] == [(0, b"one"), (1, b"two")]
    ledger.charge(TASK, [charge(0, 1)], [PLENTY], given=[0, 1], state=b"2 of 2")
    assert ledger.waiting(TASK) == ()
    assert ledger.samples_given() == 2
    assert ledger.dearest_sample(DELTA)[1] == Total.of([TENTH] * 2)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_a_statement_over_samples_that_serve_again_is_exact(before, a, b):
    """At least what any sample has paid, and no more than the ledger itself says when the step is written."""
    with Ledger(":memory:") as ledger:
        ledger.take_serials(10)
        for first, last in before:
            ledger.charge(TASK, [charge(min(first, last), max(first, last))], [PLENTY])
        step = [charge(min(a, b), max(a, b)), charge(min(a, b), max(a, b), Renyi((2, 3), (Fraction(1), Fraction(2))),
                                                     device=Renyi((2, 3), (Fraction(9), Fraction(9))))]  # fmt: skip
        device, samples, dearest = ledger.after(step, max(a, b) - min(a, b) + 1)
        ledger.charge(TASK, step, [PLENTY])
        assert (device, samples, dearest) == (ledger.device_total(), ledger.samples_given(), sample_ceiling(ledger))


def test_pure_losses_still_add_over_uses(ledger):
    ledger.take_serials(2)
    for _ in range(5):
        ledger.charge(TASK, [charge(0, 1, Pure(Fraction(1, 5)))], [Budget(Fraction(1), DELTA, 2)])
    with pytest.raises(BudgetExhausted):
        ledger.charge(TASK, [charge(0, 1, Pure(Fraction(1, 5)))], [Budget(Fraction(1), DELTA, 2)])
