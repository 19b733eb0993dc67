"""Who holds which rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crowdml.datasets import by_class, by_user, drawn, iid
from crowdml.errors import DataError

LABELS = np.random.default_rng(11).integers(10, size=6000)


def held(population):
    return np.concatenate([population.held_by(device) for device in range(population.devices)])


@given(st.integers(1, 300), st.integers(1, 40), st.booleans(), st.integers(0, 2**32))
def test_iid_devices_hold_every_row_once_but_for_the_stated_remainder(rows, devices, equal, seed):
    if devices > rows:
        with pytest.raises(DataError, match="cannot be dealt out"):
            iid(rows, devices, seed)
        return
    population = iid(rows, devices, seed, equal=equal)
    own = held(population)
    assert len(np.unique(own)) == len(own) == rows - population.dropped
    assert own.min() >= 0
    assert own.max() < rows
    assert population.dropped == (rows % devices if equal else 0)
    assert np.ptp(population.counts) <= (0 if equal else 1)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 100), st.integers(1, 4), st.integers(0, 2**32))
def test_by_class_gives_each_device_few_classes_and_no_row_twice(devices, most, seed):
    population = by_class(LABELS, devices, seed, classes_per_device=most)
    own = held(population)
    assert len(np.unique(own)) == len(own) == len(LABELS) - population.dropped
    assert np.ptp(population.counts) == 0
    assert all(len(np.unique(LABELS[population.held_by(device)])) <= most for device in range(devices))


def test_by_class_is_skewed_where_iid_is_not_and_drops_little():
    def largest_share(population):
        counts = [np.bincount(LABELS[population.held_by(device)], minlength=10) for device in range(100)]
        return np.mean([count.max() / count.sum() for count in counts])

    skewed = by_class(LABELS, 100, 1)
    assert largest_share(skewed) >= 0.5
    assert largest_share(iid(len(LABELS), 100, 1)) < 0.3
    assert skewed.dropped < 0.1 * len(LABELS)


def test_by_class_mixes_the_classes_of_a_device_in_time():
    population = by_class(LABELS, 20, 2)
    changes = [np.count_nonzero(np.diff(LABELS[population.held_by(device)])) for device in range(20)]
    assert np.median(changes) > 20


def test_by_user_gives_each_person_a_device_with_its_rows_in_order():
    groups = np.array([7, 7, 5, 7, 9, 5, 9, 9, 9])
    population = by_user(groups)
    assert [population.held_by(device).tolist() for device in range(3)] == [[2, 5], [0, 1, 3], [4, 6, 7, 8]]
    assert population.rows[0].tolist() == [2, 5, 5, 5]  # the rest repeats the device's own last row
    assert population.dropped == 0
    some = by_user(groups, users=[9, 7])
    assert [some.held_by(device).tolist() for device in range(2)] == [[4, 6, 7, 8], [0, 1, 3]]
    assert some.dropped == 2


@pytest.mark.parametrize("users", [[], [7, 7], [8]])
def test_users_that_are_none_twice_or_unknown_are_refused(users):
    with pytest.raises(DataError, match="users"):
        by_user(np.array([5, 7, 9]), users=users)


def test_data_without_users_has_no_population_by_user():
    with pytest.raises(DataError, match="use iid or by_class"):
        by_user(None)


def test_the_same_seed_gives_the_same_population_and_another_another():
    for make in (lambda seed: iid(500, 20, seed), lambda seed: by_class(LABELS, 20, seed)):
        assert (make(1).rows == make(1).rows).all()
        assert (make(1).rows != make(2).rows).any()
    assert (iid(500, 20, np.random.default_rng(1)).rows == iid(500, 20, 1).rows).all()


def test_a_million_devices_are_drawn_when_asked_and_not_before():
    crowd = drawn(60_000, 1_000_000, 60, seed=4)
    last = crowd.held_by(999_999)
    assert last.shape == (60,)
    assert last.dtype == np.int32
    assert (crowd.rows(np.array([999_999]), np.array([17])) == last[17]).all()
    assert (drawn(60_000, 1_000_000, 60, seed=5).held_by(999_999) != last).any()


@pytest.mark.parametrize("lines", ["over devices", "over serials", "over both"])
def test_drawn_rows_are_uniform_over_the_pool(lines):
    crowd = drawn(1000, 1_000_000, 100_000, seed=12)
    n = 100_000
    device, serial = {
        "over devices": (np.arange(n), np.zeros(n, int)),
        "over serials": (np.zeros(n, int), np.arange(n)),
        "over both": (np.arange(n) // 300, np.arange(n) % 300),
    }[lines]
    counts = np.bincount(crowd.rows(device, serial), minlength=1000)
    chi2 = ((counts - n / 1000) ** 2 / (n / 1000)).sum()
    assert abs(chi2 - 999) < 5 * np.sqrt(2 * 999)  # five standard deviations, both ways: even is as wrong as uneven


def test_neighbouring_devices_do_not_hold_the_same_rows():
    crowd = drawn(60_000, 1000, 60, seed=3)
    device, serial = np.divmod(np.arange(60_000), 60)
    rows = crowd.rows(device, serial).reshape(1000, 60)
    same = [np.isin(rows[i], rows[i + 1]).mean() for i in range(999)]
    assert np.mean(same) < 0.005  # 60 of 60,000 by chance: 0.001
    correlation = np.corrcoef(rows[:-1].ravel(), rows[1:].ravel())[0, 1]
    assert abs(correlation) < 5 / np.sqrt(rows.size)


def test_drawn_rows_are_the_same_under_jax():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    crowd = drawn(60_000, 1000, 60, seed=9)
    device, serial = np.divmod(np.arange(6000), 60)
    assert (np.asarray(crowd.rows(jnp.asarray(device), jnp.asarray(serial))) == crowd.rows(device, serial)).all()
    assert int(jax.jit(crowd.rows)(7, 3)) == int(crowd.rows(7, 3)) == crowd.held_by(7)[3]


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 2**31)])
def test_an_impossible_drawn_population_is_refused(sizes):
    with pytest.raises(DataError, match="cannot be drawn"):
        drawn(*sizes, seed=1)


def test_more_classes_than_rows_allow_are_refused_with_what_is_possible():
    with pytest.raises(DataError, match="at most 50 devices"):
        by_class(np.arange(100) % 3, 80, 1)
    with pytest.raises(DataError, match="at least 1"):
        by_class(LABELS, 10, 1, classes_per_device=0)
