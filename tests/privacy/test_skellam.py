"""Shares of Skellam noise: calibration, law of a share and of a sum, adversarial neighbours, audits, refusals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import jax
import numpy as np
import pytest
from audits import FIVE_SIGMA, Stream, audited_mu, correlation, misfit
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crowdml.errors import GuaranteeError
from crowdml.privacy.calibration import ORDERS, rho_for, skellam_loss, skellam_variance
from crowdml.privacy.grid import Grid
from crowdml.privacy.laws import DiscreteGaussian, Skellam
from crowdml.privacy.losses import ZCDP, Filter, Renyi, Total, exact
from crowdml.privacy.mechanisms import GaussianStable, SkellamCount, SkellamStable, SkellamSum, l1_of, root_up
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.privacy.private import Rows
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.privacy.sensitivity import L1, L2, Observer

DELTA = 1e-6
ROWS = Rows(0, 5)
STEP = Grid(Fraction(1, 16))
WIDTH = 4
SUM = SkellamSum(40, Fraction(900), 7, STEP, ROWS, WIDTH, "a sum")
ERRORS = SkellamCount(L1(Fraction(1)), Fraction(3), 7, ROWS, 1, "a count")
LABELS = SkellamCount(L1(Fraction(2)), Fraction(6), 7, ROWS, WIDTH, "counts")
STABLE = SkellamStable(Fraction(2), Fraction(10), 4000, Fraction(900), 7, STEP, ROWS, WIDTH, "a vector")
ALL = (SUM, ERRORS, LABELS, STABLE)
NAMES = [f"{row.kind} {row.length}" for row in ALL]


def value(loss: Renyi, order: int) -> Fraction:
    return loss.values[loss.orders.index(order)]


def source(kind: str, label: str):
    if kind == "system":
        return SystemSource(Stream(label))
    return SeededSource(stream(int.from_bytes(label.encode()[-4:], "big"), 1, 2))


# Calibration


@pytest.mark.parametrize(
    ("order", "l2", "l1", "variance", "expected"), [(8, 1, 1, 100, "0.040525"), (2, 4, 10, 400, "0.04016875")]
)
def test_the_divergences_of_the_review(order, l2, l1, variance, expected):
    found = value(skellam_loss(Fraction(l2), Fraction(l1), Fraction(variance)), order)
    assert Fraction(expected) <= found <= Fraction(expected) * (1 + Fraction(1, 2**29))


@pytest.mark.parametrize(("scale", "epsilon"), [(10, 1.683), (100, 1.137), (1000, 1.084), (10_000, 1.079)])
def test_what_rounding_and_the_grid_cost_admm_over_twenty_rounds(scale, epsilon):
    """Review, section 1: d = 105, T = 20, sigma = 18.8933 times the sensitivity 2, rounding paid."""
    l2 = 2 * scale + root_up(Fraction(105))
    loss = skellam_loss(l2, l1_of(l2, 105), (scale * Fraction("37.786677")) ** 2)
    assert Total.of([loss]).scaled(20).epsilon(DELTA) == pytest.approx(epsilon, abs=6e-4)


def test_every_order_is_charged_what_the_formula_says_rounded_up():
    l2, l1, v = Fraction(7), Fraction(11), Fraction(50)
    loss = skellam_loss(l2, l1, v)
    assert loss.orders == ORDERS
    for order, found in zip(loss.orders, loss.values, strict=True):
        first, second = ((2 * order - 1) * l2**2 + 6 * l1) / (4 * v**2), 3 * l1 / (2 * v)
        exactly = order * l2**2 / (2 * v) + min(first, second)
        assert exactly <= found <= exactly * (1 + Fraction(1, 2**29))


@pytest.mark.parametrize("variance", [0.05, 0.3, 1.0, 7.0, 100.0])
@pytest.mark.parametrize("shift", [1, 2, 5, 17])
def test_no_divergence_of_shifted_noise_is_above_what_is_charged(variance, shift):
    """The theorem, held against the sum itself in one dimension, small variances too: those of single shares."""
    loss = skellam_loss(Fraction(shift), Fraction(shift), Fraction(str(variance)))
    for order in (2, 3, 8, 32, 128):
        reach = int(200 + 60 * math.sqrt(variance) + 6 * order * shift)
        ratio, logs = 0.0, np.zeros(reach + shift + 1)
        for k in range(reach + shift + 200, 0, -1):
            ratio = 1 / (2 * k / variance + ratio)
            if k <= reach + shift:
                logs[k] = math.log(ratio)
        logs = np.cumsum(logs)
        logs -= math.log(2 * np.exp(logs[1:]).sum() + 1)
        z = np.arange(-reach, reach + 1)
        terms = order * logs[np.abs(z - shift)] + (1 - order) * logs[np.abs(z)]
        true = (terms.max() + math.log(np.exp(terms - terms.max()).sum())) / (order - 1)
        assert true <= float(value(loss, order)) * (1 + 1e-9)


@pytest.mark.parametrize(("epsilon", "uses"), [(1, 1), (10, 1), (Fraction(1, 10), 1), (1, 20), (10, 5)])
def test_the_variance_is_enough_for_all_uses_and_hardly_more(epsilon, uses):
    l2 = Fraction(16_384)
    l1, budget = l1_of(l2, 510), Fraction(epsilon)
    variance = skellam_variance(l2, l1, budget, DELTA, uses)
    plan = Total.of([skellam_loss(l2, l1, variance)]).scaled(uses)
    assert plan.epsilon(DELTA) <= epsilon
    spent, filter_ = Total(), Filter.of(budget, DELTA, plan)
    for _ in range(uses):
        assert filter_.allows(spent, skellam_loss(l2, l1, variance))
        spent = spent + skellam_loss(l2, l1, variance)
    less = Total.of([skellam_loss(l2, l1, variance * Fraction(9_999, 10_000))]).scaled(uses)
    assert less.epsilon(DELTA) > epsilon


def test_on_a_fine_grid_the_variance_is_that_of_a_gaussian_but_for_integer_orders():
    """Review: sigma / sensitivity 4.530877 at (1, 1e-6), and 20.263 for twenty uses."""
    l2 = Fraction(2**15)
    for uses, ratio in ((1, 4.530877), (20, 20.263)):
        sigma = math.sqrt(skellam_variance(l2, l1_of(l2, 100), Fraction(1), DELTA, uses))
        assert sigma / float(l2) == pytest.approx(ratio, rel=1e-4)


@pytest.mark.parametrize(("honest", "zcdp"), [(50, 8.7), (100, 13.2), (1000, 59.4)])
def test_what_collusion_costs_is_the_price_of_ones_own_share(honest, zcdp):
    """Review, R11, by zCDP; at integer orders from 2 on a large epsilon comes out a little larger."""
    l2 = Fraction(16_384)
    variance = skellam_variance(l2, l1_of(l2, 510), Fraction(1), DELTA) / honest
    row = SkellamSum(8192, variance, honest, STEP, ROWS, 510, "a sum")
    assert Total.of([row.loss]).epsilon(DELTA) == pytest.approx(1, abs=1e-6)
    gaussian = Total.of([ZCDP(rho_for(1, DELTA) * honest)]).epsilon(DELTA)
    assert gaussian == pytest.approx(zcdp, abs=0.06)
    assert gaussian <= Total.of([row.alone]).epsilon(DELTA) <= gaussian * 1.05


@pytest.mark.parametrize("row", ALL, ids=NAMES)
def test_a_row_is_charged_for_the_honest_shares_and_alone_for_its_own(row):
    assert row.observer is Observer.AGGREGATE
    for paid, left in ((row.loss, row.alone), (row.device_loss, row.device_alone)):
        assert all(a < b for a, b in zip(paid.values, left.values, strict=True))
    one = replace(row, variance=row.honest * row.variance, honest=1)
    assert (one.loss, one.device_loss) == (row.loss, row.device_loss) == (one.alone, one.device_alone)
    more = replace(row, honest=row.honest + 1)
    assert all(a < b for a, b in zip(more.loss.values, row.loss.values, strict=True))
    assert more.alone == row.alone


def test_each_kind_is_charged_at_its_own_sensitivities():
    v = SUM.honest * SUM.variance
    assert SUM.sensitivity == L2(Fraction(80))
    assert SUM.loss == skellam_loss(Fraction(80), Fraction(161), v)  # sqrt(4) * 80, rounded up
    assert SUM.device_loss == skellam_loss(Fraction(400), Fraction(801), v)
    v = ERRORS.honest * ERRORS.variance
    assert ERRORS.loss == skellam_loss(Fraction(1), Fraction(1), v)
    assert ERRORS.device_loss == skellam_loss(Fraction(5), Fraction(5), v)
    v = LABELS.honest * LABELS.variance
    assert LABELS.loss == skellam_loss(root_up(Fraction(2)), Fraction(2), v)
    assert LABELS.device_loss == skellam_loss(root_up(Fraction(50)), Fraction(10), v)
    l2 = Fraction(2 * 16 + 2)
    assert STABLE.sensitivity == L2(l2)
    assert STABLE.loss == skellam_loss(l2, l1_of(l2, 4), STABLE.honest * STABLE.variance)


@given(st.fractions(0, 10**12))
@settings(max_examples=200, deadline=None)
def test_roots_are_rounded_up_and_never_far(x):
    assert x <= root_up(x) ** 2
    assert root_up(x) == 0 or (root_up(x) - Fraction(1, 2**19)) ** 2 < x or root_up(x) <= Fraction(1, 2**19)


def test_a_root_that_is_exact_stays_exact():
    assert [root_up(Fraction(n)) for n in (0, 1, 4, 10**10)] == [0, 1, 2, 10**5]
    assert root_up(Fraction(1, 4)) == Fraction(1, 2)


@given(arrays(np.int64, st.integers(1, 30), elements=st.integers(-50, 50)))
@settings(max_examples=200, deadline=None)
def test_integers_move_in_l1_by_no_more_than_their_l2_allows(moved):
    square = int((moved * moved).sum())
    assert np.abs(moved).sum() <= l1_of(root_up(Fraction(square)), len(moved))


@pytest.mark.parametrize(("cells", "samples"), [(1, 4), (2, 4), (3, 4), (4, 3)])
def test_counts_move_by_no_more_than_they_are_charged_for_whatever_is_replaced(cells, samples):
    """All batches of so many samples, each in one cell or in none, against all others."""
    places = [
        np.eye(cells + 1, cells, dtype=int)[list(each)] for each in itertools.product(range(cells + 1), repeat=samples)
    ]
    counts = np.unique([place.sum(0) for place in places], axis=0)
    far = (counts[:, None] - counts[None]).reshape(-1, cells)
    row = SkellamCount(L1(Fraction(min(2, cells))), Fraction(1), 1, Rows(0, samples), cells, "counts")
    l1 = row.sensitivity.bound * samples
    assert np.abs(far).sum(1).max() == l1
    assert (far**2).sum(1).max() == l1 * samples
    assert row.device_loss == skellam_loss(root_up(l1 * samples), l1, Fraction(1))


def test_the_noise_of_a_single_count_keeps_its_exact_delta():
    """No bound in between: the hockey stick of Skellam noise shifted by the sensitivity, summed up."""
    clip = 8
    variance = skellam_variance(Fraction(2 * clip), Fraction(2 * clip), Fraction(1), DELTA)
    law, shift = Skellam(variance), 2 * clip
    z = np.arange(-4000, 4001)
    here, moved = law.pmf(z), law.pmf(z - shift)
    delta = np.maximum(0, here - math.e * moved).sum()
    assert DELTA / 30 < delta <= DELTA


# Distribution


@pytest.mark.parametrize("kind", ["system", "seeded"])
@pytest.mark.parametrize("row", ALL, ids=NAMES)
def test_a_share_has_the_law_that_the_table_says(row, kind):
    wide = replace(row, length=100_000, **({} if row is not ERRORS else {"sensitivity": L1(Fraction(2))}))
    rows = np.zeros((1 if row is STABLE else 5, 100_000))
    values = wide.draw(rows, source(kind, f"share {row.kind} {row.length}"))
    assert values.dtype == np.int32
    assert misfit(values, Skellam(row.variance)) < 1


def added_up(kind: str, shares: int, variance: Fraction, n: int, label: str):
    row = replace(SUM, variance=variance, length=n)
    said = [row.draw(np.zeros((5, n)), source(kind, f"{label}{i:4}")).astype(np.int64) for i in range(shares)]
    return np.stack(said)


@pytest.mark.parametrize("kind", ["system", "seeded"])
@pytest.mark.parametrize("variance", [Fraction(3, 7), Fraction(900)])
def test_the_shares_of_the_fewest_honest_devices_add_up_to_the_noise_that_is_charged(kind, variance):
    """Ten devices of which 30 % vanish, and none of the seven others colludes: exactly h_min shares are in the sum."""
    n = 12_743
    said = added_up(kind, 10, variance, n, "sum ")
    alive = said[:7]  # h_min = 7
    total = alive.sum(0)
    assert misfit(total, Skellam(7 * variance)) < 1
    assert abs(total.std() / math.sqrt(7 * variance) - 1) * math.sqrt(2 * n) < FIVE_SIGMA * 1.2
    assert correlation(said[0], said[1]) < FIVE_SIGMA
    everyone = said.sum(0)  # nobody vanished: more noise than is charged, never less
    assert misfit(everyone, Skellam(10 * variance)) < 1


@pytest.mark.parametrize("sigma", [2**12, 2**15])
def test_the_simulator_draws_large_shares_as_devices_do(sigma):
    variance, n = Fraction(sigma) ** 2, 100_000
    like = np.zeros(n, np.int32)
    for kind in ("system", "seeded"):
        values = source(kind, f"large {sigma}").skellam(variance, like).astype(np.float64)
        assert abs(values.std() / sigma - 1) * math.sqrt(2 * n) < FIVE_SIGMA
        assert abs(values.mean()) / sigma * math.sqrt(n) < FIVE_SIGMA
        assert misfit(values, Skellam(variance)) < 1


# Sensitivity

VALUES = (np.nan, np.inf, -np.inf, 3.4e38, -1e30, 1e-42, 0.0, -1.0, 0.5, 1.0, 2.0, 2.5, -2.5, 1e6)


def adversaries(width: int):
    rows = [one * np.eye(width)[k] for one in VALUES if np.isfinite(one) for k in range(width)]
    rows += [np.where(np.arange(width) == 0, one, other) for one in VALUES for other in VALUES]
    with np.errstate(over="ignore"):
        return np.asarray(rows).astype(np.float32)


@pytest.mark.parametrize("row", [SUM, ERRORS, LABELS], ids=NAMES[:3])
def test_adversarial_neighbours_move_a_share_by_its_sensitivities_and_nearly_by_those(row):
    others = np.ones((4, row.length), np.float32)
    said = np.stack([row.draw(np.stack([one, *others]), Silence()) for one in adversaries(row.length)]).astype(np.int64)
    moved = (said[:, None] - said[None]).reshape(-1, row.length)
    if row is SUM:
        l2, l1 = row.sensitivity.bound, l1_of(row.sensitivity.bound, row.length)
    else:
        l2, l1 = root_up(row.sensitivity.bound), row.sensitivity.bound
    assert (moved**2).sum(1).max() <= l2**2
    assert math.sqrt((moved**2).sum(1).max()) >= 0.9 * l2
    assert np.abs(moved).sum(1).max() <= l1
    assert np.abs(said).max() <= row.bound


@pytest.mark.parametrize("row", [SUM, ERRORS, LABELS], ids=NAMES[:3])
def test_replacing_all_samples_moves_a_share_by_what_the_device_is_charged_for(row):
    few = adversaries(row.length)[::7]
    said = np.stack([row.draw(np.stack([one] * 5), Silence()) for one in few]).astype(np.int64)
    moved = (said[:, None] - said[None]).reshape(-1, row.length)
    most = (5 * row.sensitivity.bound) ** 2 if row is SUM else 25 * row.sensitivity.bound
    assert 0.8 * most <= (moved**2).sum(1).max() <= most


def test_a_rounded_vector_moves_by_its_stability_and_the_root_of_its_length_and_nearly_by_that():
    """Both worlds are rounded, each by half a step at most: a step an entry, together."""
    row = replace(STABLE, stability=Fraction(1, 200), length=64)
    step = float(STEP.step)
    here, there = np.full((1, 64), 0.4999), np.full((1, 64), 0.5001)
    assert np.linalg.norm(here - there) * step <= row.stability
    moved = row.draw(here * step, Silence()) - row.draw(there * step, Silence())
    assert np.linalg.norm(moved) == 8
    assert 0.9 * row.sensitivity.bound <= np.linalg.norm(moved) <= row.sensitivity.bound


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_neighbours_within_the_stability_move_a_rounded_vector_by_no_more_than_is_charged(data):
    length = data.draw(st.integers(1, 12))
    row = replace(STABLE, length=length, limit=data.draw(st.sampled_from([3, 50, 4000])))
    floats = st.floats(-1e3, 1e3, width=32)
    here = data.draw(arrays(np.float64, (1, length), elements=floats))
    towards = data.draw(arrays(np.float64, (1, length), elements=st.floats(-1, 1)))
    size = np.linalg.norm(towards)
    there = here + towards * (float(row.stability) * (1 - 1e-9) / max(1.0, size))
    moved = row.draw(here, Silence()).astype(np.int64) - row.draw(there, Silence())
    assert (moved**2).sum() <= row.sensitivity.bound**2
    assert np.abs(moved).sum() <= l1_of(row.sensitivity.bound, length)


def test_a_vector_is_held_within_its_reach_and_so_is_its_price_whatever_moved_it():
    row = replace(STABLE, limit=3, stability=Fraction(1000), device_stability=Fraction(1000))
    far = row.draw(np.full((1, 4), 1e30), Silence()).astype(np.int64) - row.draw(np.full((1, 4), -1e30), Silence())
    assert far.tolist() == [6, 6, 6, 6]
    assert row.sensitivity.bound == 12 == np.linalg.norm(far)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("row", ALL, ids=NAMES)
def test_what_is_no_number_is_said_as_zero_with_the_same_noise(row, bad):
    key = stream(3, 4, 5)
    rows = np.full((1 if row is STABLE else 5, row.length), bad, np.float32)
    said = row.draw(rows, SeededSource(key))
    np.testing.assert_array_equal(said, row.draw(np.zeros_like(rows), SeededSource(key)))
    assert said.dtype == np.int32


@pytest.mark.parametrize("row", ALL, ids=NAMES)
def test_a_contribution_with_one_broken_number_counts_as_zero(row):
    rows = np.ones((1 if row is STABLE else 5, row.length), np.float32)
    rows[:, 0] = np.nan
    assert not row.draw(rows, Silence()).any()


def test_a_vector_with_all_its_noise_pays_for_rounding_too():
    row = GaussianStable(Fraction(2), Fraction(10), 4000, Fraction(1, 8), STEP, ROWS, WIDTH, "a vector")
    assert row.sensitivity == STABLE.sensitivity
    assert row.sigma**2 >= row.sensitivity.bound**2 / (2 * row.rho)
    assert row.loss == ZCDP(Fraction(1, 8))
    assert row.device_loss == ZCDP(Fraction(1, 8) * Fraction(10 * 16 + 2, 2 * 16 + 2) ** 2)
    rows = np.array([[0.49, 1e9, 0.0, -1.0]])
    assert row.draw(rows, Silence()).tolist() == STABLE.draw(rows, Silence()).tolist() == [8, 4000, 0, -16]
    n = 50_000
    values = replace(row, length=n).draw(np.zeros((1, n)), SystemSource(Stream("stable")))
    assert misfit(values, DiscreteGaussian(replace(row, length=n).sigma)) < 1
    with pytest.raises(GuaranteeError, match="prices 4 entries"):
        row.draw(np.zeros((1, 5)), Silence())
    with pytest.raises(GuaranteeError, match="no more than the second"):
        replace(row, stability=Fraction(11))


# Audits


def test_an_audit_of_a_cohort_s_sum_finds_no_more_than_its_mu_and_finds_what_is_missing():
    """mu = l2 / sigma of the sum of h_min shares; with the noise of half as many it would be sqrt(2) of that."""
    honest, clip, runs = 5, 500, 100_000
    variance = Fraction((2 * clip) ** 2, honest)  # mu = 1
    row = SkellamSum(clip, variance, honest, STEP, ROWS, 3, "a sum")
    low, high = np.zeros((5, 3)), np.zeros((5, 3))
    low[0, 0], high[0, 0] = -1e6, 1e6

    def sums(rows, shares, seed):
        keys = stream(seed, np.arange(runs)[:, None], np.arange(shares))
        one, others = jax.numpy.asarray(rows), jax.numpy.zeros((5, 3))

        def total(keys):
            said = [row.draw(one if i == 0 else others, SeededSource(keys[i])) for i in range(shares)]
            return sum(each[0] for each in said)

        return np.asarray(jax.jit(jax.vmap(total))(keys))

    def audit(shares, seed):
        on, off = (int((sums(rows, shares, seed + i) >= 0).sum()) for i, rows in enumerate((high, low)))
        return audited_mu(on, off, runs)

    assert 0.95 < audit(honest, 90) <= 1
    assert audit(1, 92) == pytest.approx(math.sqrt(5), abs=0.06)  # if everyone else colludes: what `alone` is charged


# Refusals


def test_a_vector_of_another_length_than_the_table_prices_is_refused():
    for row in ALL:
        with pytest.raises(GuaranteeError, match=rf"prices {row.length} entries, and this value has {row.length + 1}"):
            row.draw(np.zeros((1 if row is STABLE else 5, row.length + 1)), Silence())


@pytest.mark.parametrize(
    ("row", "change", "said"),
    [
        (SUM, {"variance": Fraction(0)}, "variance above 0"),
        (SUM, {"honest": 0}, "0 honest devices"),
        (LABELS, {"length": 0}, "0 entries"),
        (SUM, {"clip": 46_000, "covers": Rows(0, 50_000)}, "32 bits do not hold"),
        (SUM, {"variance": Fraction(2**52)}, "32 bits do not hold"),
        (LABELS, {"sensitivity": L1(Fraction(1))}, "Counts in 4 cells move by 2"),
        (ERRORS, {"sensitivity": L1(Fraction(1, 2))}, "move by 1"),
        (STABLE, {"stability": Fraction(0)}, "above 0"),
        (STABLE, {"device_stability": Fraction(1)}, "no more than the second"),
        (STABLE, {"limit": 0}, "outside 1 to"),
        (STABLE, {"limit": 2**24 + 1}, "outside 1 to"),
    ],
)
def test_a_row_that_would_prove_nothing_is_refused(row, change, said):
    with pytest.raises(GuaranteeError, match=said):
        replace(row, **change)


@pytest.mark.parametrize(
    ("l2", "l1", "epsilon", "delta"),
    [(0, 1, 1, DELTA), (1, 0, 1, DELTA), (1, 1, 0, DELTA), (1, 1, 1, 0.0), (1, 1, 0.001, DELTA)],
)
def test_noise_that_nothing_finite_gives_is_refused(l2, l1, epsilon, delta):
    with pytest.raises(GuaranteeError):
        skellam_variance(Fraction(l2), Fraction(l1), exact(epsilon), delta)


def test_the_least_epsilon_that_its_orders_reach_is_named_and_a_little_more_is_found():
    with pytest.raises(GuaranteeError, match=r"no Skellam noise is known to give less than 0\.0011.*Raise epsilon"):
        skellam_variance(Fraction(1), Fraction(1), Fraction(1, 1000), DELTA)
    variance = skellam_variance(Fraction(1), Fraction(1), Fraction(12, 10_000), DELTA)
    assert Total.of([skellam_loss(Fraction(1), Fraction(1), variance)]).epsilon(DELTA) <= 0.0012
