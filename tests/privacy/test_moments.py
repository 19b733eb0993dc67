"""SkellamGram: sensitivity in exact integers, two variances, what is charged, and what is drawn."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from audits import Stream
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crowdml.errors import GuaranteeError
from crowdml.privacy.calibration import skellam_loss
from crowdml.privacy.grid import Grid
from crowdml.privacy.laws import Skellam
from crowdml.privacy.losses import Total
from crowdml.privacy.mechanisms import l1_of
from crowdml.privacy.moments import SkellamGram, join, moments_loss, moments_move, moments_variance, split
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.privacy.private import Rows
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.privacy.sensitivity import Adjacency, Observer

S = 64
ROW = SkellamGram(S, 5, 3, Fraction(10**6), 7, Grid(Fraction(1, S)), Rows(0, 4), "moments")
POSITIVE = replace(ROW, positive=True)
NUMBER = replace(ROW, labels=1)


def size(row, moved):
    """The norm in which the sensitivity is stated: squares off the diagonal count twice."""
    above = row.features * (row.features - 1) // 2
    weights = np.ones(row.length)
    weights[row.features : row.features + above] = 2
    return math.sqrt((weights * moved.astype(np.float64) ** 2).sum())


def one(row, h, y):
    return row.moments(np.concatenate([h, y])[None, :])


FLOATS = st.floats(-2, 2, width=32) | st.sampled_from([0.0, 1.0, -1.0, 1e30, -1e30, math.nan, math.inf])


@given(arrays(np.float32, (2, 8), elements=FLOATS), st.booleans())
@settings(max_examples=300, deadline=None)
def test_replacing_a_sample_moves_the_moments_by_at_most_the_sensitivity(pair, positive):
    row = POSITIVE if positive else ROW
    moved = row.moments(pair[:1]) - row.moments(pair[1:])
    assert size(row, moved) <= float(row.sensitivity.bound)


def test_the_sensitivity_is_attained_at_half_opposite_features_with_one_label():
    first, other = np.zeros(5), np.zeros(5)
    first[0], other[0], other[1] = 1.0, -0.5, math.sqrt(0.75)
    label = np.array([1.0, 0.0, 0.0])
    moved = one(ROW, first, label) - one(ROW, other, label)
    assert 0.97 * math.sqrt(4.5) * S**2 < size(ROW, moved) <= float(ROW.sensitivity.bound)
    assert float(ROW.sensitivity.bound) == pytest.approx(math.sqrt(4.5) * S**2, rel=1e-6)


def test_numbers_as_labels_attain_the_same_with_opposite_signs():
    first, other = np.zeros(5), np.zeros(5)
    first[0], other[0], other[1] = 1.0, 0.5, math.sqrt(0.75)
    moved = one(NUMBER, first, np.ones(1)) - one(NUMBER, other, -np.ones(1))
    assert 0.97 * math.sqrt(4.5) * S**2 < size(NUMBER, moved) <= float(NUMBER.sensitivity.bound)


def test_without_negative_entries_it_is_two_and_attained():
    first, other = np.eye(5)[0], np.eye(5)[1]
    moved = one(POSITIVE, first, np.eye(3)[0]) - one(POSITIVE, other, np.eye(3)[1])
    assert size(POSITIVE, moved) == 2 * S**2 == POSITIVE.sensitivity.bound
    below = one(POSITIVE, -first, np.eye(3)[0])
    assert not below.any()


def test_all_samples_of_a_device_move_them_by_as_many_times_as_much():
    whole = replace(ROW, adjacency=Adjacency.REPLACE_DEVICE)
    assert whole.sensitivity.bound == 4 * ROW.sensitivity.bound
    assert whole.sensitivity.adjacency is Adjacency.REPLACE_DEVICE
    assert whole.device_loss == moments_loss(
        4 * moments_move(S, False), l1_of(4 * moments_move(S, False), ROW.length), 7 * ROW.variance
    )


def test_moments_are_exact_products_of_truncated_integers():
    rng = np.random.default_rng(3)
    rows = rng.uniform(-0.4, 0.4, size=(4, 8)).astype(np.float32)
    h, y = ROW.steps(rows[:, :5]), ROW.steps(rows[:, 5:])
    assert (h == np.trunc(rows[:, :5].astype(np.float64) * S)).all()
    wanted = [sum(int(a[i]) * int(a[i]) for a in h) for i in range(5)]
    wanted += [sum(int(a[i]) * int(a[j]) for a in h) for i in range(5) for j in range(i + 1, 5)]
    wanted += [sum(int(a[i]) * int(b[k]) for a, b in zip(h, y, strict=True)) for i in range(5) for k in range(3)]
    assert ROW.moments(rows).tolist() == wanted
    assert len(wanted) == ROW.length


@given(arrays(np.float32, (4, 8), elements=FLOATS))
@settings(max_examples=200, deadline=None)
def test_no_row_of_integers_is_longer_than_the_clip_and_no_entry_beyond_the_bound(rows):
    steps = ROW.steps(rows[:, :5])
    assert ((steps * steps).sum(axis=1) <= S * S).all()
    assert np.abs(ROW.moments(rows)).max() <= ROW.bound == 4 * S * S


def test_what_is_longer_than_the_clip_is_shrunk_to_it_and_not_lost():
    steps = ROW.steps(np.full((1, 5), 10.0))
    assert steps.tolist() == [[28] * 5]  # 64 / sqrt(5), toward zero


def test_joined_and_split_again_they_are_the_same():
    rng = np.random.default_rng(1)
    half = rng.integers(-9, 9, (5, 5))
    gram, cross = half + half.T, rng.integers(-9, 9, (5, 3))
    back = split(join(gram, cross), 5, 3)
    assert (back[0] == gram).all()
    assert (back[1] == cross).all()


def deviations(row, draws):
    above = row.features * (row.features - 1) // 2
    parts = np.split(draws, [row.features, row.features + above], axis=1)
    return [float(part.astype(np.float64).std()) for part in parts]


@pytest.mark.parametrize("kind", ["system", "seeded"])
def test_noise_off_the_diagonal_has_half_the_variance(kind):
    source = SystemSource(Stream("gram")) if kind == "system" else SeededSource(stream(3, 1, 1))
    wide = replace(ROW, features=60, labels=20)
    draws = np.stack([wide.draw(np.zeros((4, 80)), source) for _ in range(25)])
    diagonal, above, cross = deviations(wide, draws)
    assert diagonal == pytest.approx(1000, rel=0.1)  # 1,500 draws: sd 1.8 %
    assert above == pytest.approx(1000 / math.sqrt(2), rel=0.02)  # 44,250 draws
    assert cross == pytest.approx(1000, rel=0.03)


def test_the_noise_of_a_cohort_at_once_has_the_law_of_the_sum_of_its_shares():
    wide = replace(ROW, features=60, labels=20)
    source = SeededSource(stream(5, 1, 1))
    whole = np.stack([wide.noise(source, shares=50) for _ in range(10)])
    shares = np.stack([sum(wide.noise(source) for _ in range(50)) for _ in range(10)])
    for at_once, summed, wanted in zip(deviations(wide, whole), deviations(wide, shares), (1, 0.5, 1), strict=True):
        assert at_once == pytest.approx(math.sqrt(50e6 * wanted), rel=0.12)
        assert summed == pytest.approx(math.sqrt(50e6 * wanted), rel=0.12)
    kurtosis = [float(((each / each.std()) ** 4).mean()) for each in (whole[:, 60:1830], shares[:, 60:1830])]
    assert kurtosis == pytest.approx([3, 3], abs=0.2)


def test_a_large_variance_is_drawn_in_parts_that_add_up_to_it():
    wide = replace(ROW, features=40, variance=Fraction(2**36))
    draws = wide.noise(SeededSource(stream(7, 1, 1)))[40:820].astype(np.float64)
    assert draws.std() == pytest.approx(2**18 / math.sqrt(2), rel=0.13)  # 780 draws: sd 2.5 %


def test_the_loss_takes_the_smaller_variance_beyond_the_gaussian_term():
    l2, l1, variance = Fraction(3), Fraction(9), Fraction(50)
    found = dict(zip(moments_loss(l2, l1, variance).orders, moments_loss(l2, l1, variance).values, strict=True))
    for order in (2, 8, 64):
        excess = min((((2 * order - 1) * 9 + 54) / (4 * 25**2)), 27 / 50)
        assert float(found[order]) == pytest.approx(order * 9 / 100 + excess, rel=1e-8)
    assert all(a >= b for a, b in zip(moments_loss(l2, l1, variance).values, skellam_loss(l2, l1, variance).values,
                                      strict=True))  # fmt: skip


def exact_divergence(shift, variance, order):
    """Of Skellam noise moved by an integer, by summing its probabilities: what the bound must not fall below."""
    k = np.arange(-140, 141)
    mass = Skellam(variance).pmf(k).astype(np.float64)
    moved = Skellam(variance).pmf(k - shift).astype(np.float64)
    logs = order * np.log(moved) + (1 - order) * np.log(mass)
    return float(np.logaddexp.reduce(logs)) / (order - 1)


@pytest.mark.parametrize("order", [2, 4, 8])
def test_the_loss_is_no_less_than_the_divergence_of_what_is_drawn(order):
    row = SkellamGram(2, 2, 1, Fraction(60), 1, Grid(Fraction(1, 2)), Rows(0, 1), "moments")
    rng = np.random.default_rng(2)
    charged = dict(zip(row.loss.orders, row.loss.values, strict=True))[order]
    for _ in range(40):
        pair = rng.normal(size=(2, 3)) * 2
        moved = row.moments(pair[:1]) - row.moments(pair[1:])
        variances = (Fraction(60), Fraction(60), Fraction(30), Fraction(60), Fraction(60))
        spent = sum(exact_divergence(int(m), v, order) for m, v in zip(moved, variances, strict=True))
        assert spent <= float(charged) + 1e-9


@pytest.mark.parametrize(("epsilon", "sigma"), [("0.1", 39.46392), ("1", 4.530877), ("10", 0.569936)])
def test_the_variance_pays_for_epsilon_and_hardly_more_than_a_gaussian_needs(epsilon, sigma):
    l2 = moments_move(256, False)
    l1 = l1_of(l2, 535_040)
    variance = moments_variance(l2, l1, Fraction(epsilon), 1e-6)
    assert Total.of([moments_loss(l2, l1, variance)]).epsilon(1e-6) <= float(epsilon)
    assert math.sqrt(variance) / float(l2) == pytest.approx(sigma, rel=0.02)  # review, R9: of zCDP


def test_shares_of_the_honest_pay_for_the_sum_and_one_alone_for_much_less():
    assert ROW.observer is Observer.AGGREGATE
    epsilon = Total.of([ROW.loss]).epsilon(1e-6)
    assert Total.of([replace(ROW, honest=1).loss]).epsilon(1e-6) == Total.of([ROW.alone]).epsilon(1e-6) > 2 * epsilon
    assert Total.of([ROW.device_alone]).epsilon(1e-6) > Total.of([ROW.device_loss]).epsilon(1e-6) > 3 * epsilon


def test_what_is_not_finite_counts_as_zero_and_is_noised_all_the_same():
    rows = np.full((4, 8), np.nan)
    assert not ROW.draw(rows, Silence()).any()
    assert ROW.draw(rows, SystemSource()).any()
    rows = np.ones((4, 8))
    rows[:, 0] = np.nan
    assert not ROW.draw(rows, Silence()).any()  # a sample with one broken feature has none


def test_a_value_of_another_shape_than_was_priced_is_refused():
    with pytest.raises(GuaranteeError, match="prices 5 features"):
        ROW.moments(np.zeros((4, 9)))


@pytest.mark.parametrize("changes", [{"honest": 0}, {"variance": Fraction(0)}, {"clip": 2**26}, {"features": 0}])
def test_a_row_that_proves_nothing_is_refused(changes):
    with pytest.raises(GuaranteeError):
        replace(ROW, **changes)


def test_a_device_as_the_unit_has_one_loss_and_can_be_charged() -> None:
    """A ledger refuses a replace-device charge that names two losses."""
    from crowdml.device.member import charges_of
    from crowdml.privacy.door import Passage
    from crowdml.protocols import gram, settled
    from crowdml.task import find_task

    task = find_task("gram-mnist")
    whole = settled(task.with_(privacy=replace(task.privacy, unit="device", grid=None)))
    row = gram.mechanisms(whole)["moments"]
    assert row.loss == row.device_loss
    assert isinstance(row, SkellamGram)
    assert row.alone == row.device_alone
    (charge,) = charges_of(whole, [Passage("moments", row, row.covers)], 0, "2026-01-01T00:00:00+00:00")
    assert charge.unit == "device"
