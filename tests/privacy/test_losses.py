"""Losses compose exactly, read back as they were written, and never claim less than they prove."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import allows

from crowdml.errors import GuaranteeError
from crowdml.privacy.calibration import rho_for
from crowdml.privacy.losses import ZCDP, Filter, Loss, Pure, Renyi, Total, Unbounded, exact, group, parse_loss

FRACTIONS = st.fractions(min_value=0, max_value=20, max_denominator=10_000)
SMALL = st.fractions(min_value=Fraction(1, 10_000), max_value=Fraction(1, 4), max_denominator=10_000)
DELTAS = st.floats(min_value=1e-12, max_value=0.1)


@st.composite
def renyi_losses(draw: st.DrawFn) -> Renyi:
    orders = sorted(draw(st.sets(st.integers(2, 64), min_size=1, max_size=5)))
    return Renyi(tuple(orders), tuple(sorted(draw(FRACTIONS) for _ in orders)))


LOSSES = st.one_of(FRACTIONS.map(Pure), FRACTIONS.map(ZCDP), renyi_losses(), st.just(Unbounded()))
TOTALS = st.lists(LOSSES, max_size=4).map(Total.of)


@given(LOSSES)
def test_a_loss_reads_back_as_it_was_written(loss: Loss) -> None:
    assert parse_loss(str(loss)) == loss


def test_losses_are_written_exactly_as_the_ledger_keeps_them() -> None:
    assert str(Pure(Fraction(1, 10))) == "pure 1/10"
    assert str(ZCDP(Fraction(3, 1000))) == "zcdp 3/1000"
    assert str(Renyi((2, 3), (Fraction(1, 50), Fraction(3, 50)))) == "renyi 2:1/50,3:3/50"
    assert str(Unbounded()) == "unbounded"


@pytest.mark.parametrize(
    "text",
    ["", "pure", "pure 0.1", "pure -1", "pure 1/0", "pure 1/10 ", "zcdp nan", "renyi 2:1,", "renyi 3:1,2:1", "gdp 1"],
)
def test_a_text_that_is_no_loss_is_refused(text: str) -> None:
    with pytest.raises(GuaranteeError):
        parse_loss(text)


def test_a_loss_takes_no_float_and_nothing_negative() -> None:
    with pytest.raises(GuaranteeError, match="exact"):
        Pure(0.1)  # pyright: ignore[reportArgumentType]  # that is the mistake
    with pytest.raises(GuaranteeError, match="gives privacy back"):
        ZCDP(Fraction(-1, 2))


@pytest.mark.parametrize(
    ("orders", "values"),
    [((), ()), ((2, 3), (Fraction(1),)), ((1, 2), (Fraction(1),) * 2), ((2, 3), (Fraction(2), Fraction(1)))],
)
def test_a_renyi_loss_that_cannot_be_is_refused(orders: tuple[int, ...], values: tuple[Fraction, ...]) -> None:
    with pytest.raises(GuaranteeError):
        Renyi(orders, values)


@given(TOTALS, TOTALS, TOTALS)
def test_composition_is_associative_and_commutative(a: Total, b: Total, c: Total) -> None:
    assert (a + b) + c == a + (b + c)
    assert a + b == b + a
    assert a + Total() == a


@given(TOTALS, st.integers(0, 6))
def test_scaling_a_total_equals_adding_it_so_often(total: Total, n: int) -> None:
    assert total.scaled(n) == Total.of([total] * n)


@given(TOTALS, DELTAS, DELTAS)
def test_epsilon_never_rises_with_delta(total: Total, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert total.epsilon(high) <= total.epsilon(low) * (1 + 1e-9)
    assert total.epsilon(low) <= total.epsilon(0.0)


@given(TOTALS, LOSSES, DELTAS)
def test_one_more_loss_never_lowers_epsilon(total: Total, loss: Loss, delta: float) -> None:
    assert (total + loss).epsilon(delta) >= total.epsilon(delta) * (1 - 1e-9)


@given(TOTALS, DELTAS, st.floats(1.001, 1e4))
@settings(max_examples=50)
def test_epsilon_is_the_least_bound_over_all_orders_and_not_below_it(total: Total, delta: float, order: float) -> None:
    """In 60 digits: no order gives less than what is returned, and the order that was used gives no more."""

    def bound(divergence: Fraction, a: float) -> mpmath.mpf:
        conversion = mpmath.log(1 / (mpmath.mpf(a) * delta)) / (mpmath.mpf(a) - 1) + mpmath.log(1 - 1 / mpmath.mpf(a))
        return max(mpmath.mpf(0), mpmath.mpf(divergence.numerator) / divergence.denominator + conversion)

    if total.unbounded:
        return
    as_zcdp = Total(zcdp=total.squares + total.zcdp, orders=total.orders, values=total.values)
    divergence = as_zcdp.divergence(Fraction(order))
    with mpmath.workdps(60):
        if divergence is not None:
            assert total.epsilon(delta) <= bound(divergence, order) * (1 + mpmath.mpf(10) ** -9) + 1e-9
        (ours, used), _ = total._ways(delta)
        divergence = as_zcdp.divergence(Fraction(used))
        assert divergence is not None
        assert ours >= bound(divergence, used)


@given(st.lists(FRACTIONS.map(Pure), min_size=1, max_size=5))
def test_pure_losses_add_up_and_need_no_delta(losses: list[Pure]) -> None:
    total = Total.of(losses)
    assert exact(total.epsilon(0.0)) >= sum(loss.epsilon for loss in losses)
    assert total.epsilon(0.0) == pytest.approx(float(sum(loss.epsilon for loss in losses)))


def test_a_total_of_nine_tenths_prints_as_that() -> None:
    assert Total.of([Pure(exact(0.9))]).epsilon(0.0) == 0.9


def test_without_delta_only_pure_losses_have_an_epsilon() -> None:
    assert Total.of([Pure(Fraction(1)), ZCDP(Fraction(1, 100))]).epsilon(0.0) == math.inf
    assert Total.of([Renyi((2,), (Fraction(1, 100),))]).epsilon(0.0) == math.inf
    assert Total().epsilon(0.0) == 0.0


def test_many_small_pure_losses_cost_less_as_zcdp_than_added() -> None:
    """The zCDP of 100 releases of 0.1 (review, section 0: advanced composition gives 6.3082)."""
    assert Total.of([Pure(Fraction(1, 10))]).scaled(100).epsilon(1e-6) == pytest.approx(5.2215344, abs=1e-6)


def test_a_mixture_costs_at_most_its_pure_part_and_the_rest_apart() -> None:
    gradient, counts = ZCDP(rho_for(0.9, 1e-6)), [Pure(exact(0.05))] * 2
    assert Total.of([gradient, *counts]).epsilon(1e-6) < 1.0
    large = Total.of([ZCDP(rho_for(0.1, 1e-6)), Pure(exact(0.9))])
    assert large.epsilon(1e-6) == pytest.approx(1.0, abs=1e-7)


def test_an_unbounded_loss_makes_the_total_infinite() -> None:
    total = Total.of([Pure(Fraction(1, 10)), Unbounded()])
    assert total.epsilon(1e-6) == math.inf
    assert total.epsilon(0.0) == math.inf
    assert not allows(Total(), Unbounded(), 100.0, 1e-6)


def test_renyi_losses_of_different_orders_use_the_next_order_that_both_have() -> None:
    total = Total.of([Renyi((2, 8), (Fraction(1), Fraction(2))), Renyi((4, 16), (Fraction(10), Fraction(20)))])
    assert total.orders == (2, 4, 8)
    assert total.values == (Fraction(11), Fraction(12), Fraction(22))


def test_a_zcdp_loss_written_as_renyi_costs_about_the_same() -> None:
    orders = tuple(range(2, 65))
    renyi = Renyi(orders, tuple(Fraction(order, 50) for order in orders))
    zcdp = Total.of([ZCDP(Fraction(1, 50))]).epsilon(1e-6)
    assert zcdp <= Total.of([renyi]).epsilon(1e-6) <= 1.001 * zcdp


@given(FRACTIONS, st.integers(0, 100))
def test_replacing_k_samples_costs_k_epsilon_or_k_squared_rho(value: Fraction, k: int) -> None:
    assert group(Pure(value), k) == Pure(k * value)
    assert group(ZCDP(value), k) == ZCDP(k * k * value)


def test_replacing_k_samples_of_a_renyi_loss_asks_the_mechanism() -> None:
    with pytest.raises(GuaranteeError, match="sensitivity"):
        group(Renyi((2,), (Fraction(1),)), 3)
    assert group(Unbounded(), 3) == Unbounded()


@pytest.mark.parametrize("delta", [-1e-9, 1.0, math.nan])
def test_a_delta_that_is_no_probability_is_refused(delta: float) -> None:
    with pytest.raises(GuaranteeError, match="delta"):
        Total().epsilon(delta)


# The filter


def test_a_filter_allows_pure_losses_up_to_their_exact_sum() -> None:
    nine = Total.of([Pure(exact(0.1))]).scaled(9)
    assert allows(nine, Pure(exact(0.1)), 1.0, 0.0)
    assert not allows(nine, Pure(exact(0.1) + Fraction(1, 10**12)), 1.0, 0.0)
    assert not allows(Total(), ZCDP(Fraction(1, 10**6)), 1.0, 0.0)


@given(SMALL, st.floats(0.05, 8.0), st.floats(1e-9, 1e-3))
@settings(max_examples=50)
def test_a_filter_of_zcdp_losses_stops_where_their_sum_leaves_the_budget(
    rho: Fraction, epsilon: float, delta: float
) -> None:
    most = rho_for(epsilon, delta)
    assert allows(Total(), ZCDP(most), epsilon, delta)
    assert not allows(Total(), ZCDP(most * (1 + Fraction(1, 10**8))), epsilon, delta)
    releases = math.floor(most / rho)
    assert allows(Total(), Total.of([ZCDP(rho)]).scaled(releases), epsilon, delta)


@example(Total.of([Renyi((2, 3), (Fraction(0), Fraction(1)))]), Renyi((2,), (Fraction(0),)), 1.0, 9.787e-4)
@given(TOTALS, LOSSES, st.floats(0.05, 8.0), st.floats(1e-9, 1e-3))
@settings(max_examples=100)
def test_what_a_filter_allows_never_costs_more_than_its_budget(
    total: Total, loss: Loss, epsilon: float, delta: float
) -> None:
    if allows(total, loss, epsilon, delta):
        after = total + loss
        assert after.epsilon(delta) <= epsilon * (1 + 1e-9)
        assert allows(Total(), total, epsilon, delta)  # the order of the releases does not matter


@given(st.lists(st.one_of(SMALL.map(Pure), SMALL.map(ZCDP)), min_size=1, max_size=4), st.floats(1e-9, 1e-3))
@settings(max_examples=50)
def test_a_filter_made_for_a_plan_allows_that_plan(losses: list[Loss], delta: float) -> None:
    plan = Total.of(losses)
    assert Filter.of(plan.epsilon(delta) * (1 + 1e-11), delta, plan).allows(Total(), plan)


def test_a_filter_keeps_its_order_whatever_is_released() -> None:
    """The least epsilon over all orders is 1 here, but at the order fixed for zCDP losses the mixture costs more."""
    mixture = Total.of([ZCDP(rho_for(0.1, 1e-6)), Pure(exact(0.9) - Fraction(1, 10**6))])
    assert mixture.epsilon(1e-6) < 1.0
    assert not Filter.of(1.0, 1e-6).allows(Total(), mixture)
    assert Filter.of(1.0, 1e-6, plan=mixture).allows(Total(), mixture)


def test_a_filter_has_a_finite_budget() -> None:
    with pytest.raises(GuaranteeError, match="no budget"):
        Filter.of(math.inf, 1e-6)
