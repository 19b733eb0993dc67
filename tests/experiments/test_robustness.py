"""The figure of robust rules: lies about moments are what devices with such samples would sum, and whose they are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from crowdml.experiments.robustness import (
    CROWD_HELD_OUT,
    CROWD_SEEN,
    HELD_OUT,
    SEEN,
    Digits,
    Lies,
    Piece,
    Result,
    _line,
    crowd_sums,
    quick_digits,
    roots_of,
    run_piece,
    silo_lies,
)

ROWS = np.arange(300)


@cache
def digits() -> Digits:
    return quick_digits()


@cache
def own() -> Any:
    return digits().moments(ROWS)[None]


def relabelled(order: Any) -> Any:
    """The moments of the same rows with other labels, computed from samples."""
    made = digits()
    data = made.data
    changed = np.asarray(order)[data.y_train]
    other = replace(made, data=replace(data, y_train=changed))
    return other.moments(ROWS)


def test_a_flipped_label_is_that_of_the_samples():
    lies, root = Lies(digits()), roots_of(digits(), 240)
    flip, roll = lies.simple("label-flip", root), lies.simple("roll", root)
    assert flip is not None
    assert roll is not None
    np.testing.assert_allclose(flip(own())[0], relabelled(np.arange(10)[::-1]), atol=1e-9)
    np.testing.assert_allclose(roll(own())[0], relabelled(np.roll(np.arange(10), 1)), atol=1e-9)


def test_counts_come_from_the_constant_feature_and_the_sum_stays():
    lies, root = Lies(digits()), roots_of(digits(), 240)
    expected = np.bincount(digits().data.y_train[ROWS], minlength=10)
    np.testing.assert_allclose(lies.counts(own())[0], expected, atol=1e-6)
    for name in ("unreliable", "backdoor", "target-flip", "half-flip", "tenth-roll", "two-swapped", "blurred-roll"):
        way = lies.simple(name, root)
        assert way is not None
        assert lies.counts(way(own())).sum() == pytest.approx(300, rel=0.05), name


def test_what_root_rows_do_not_see_changes_no_score_of_theirs():
    root = roots_of(digits(), 240)
    way = Lies(digits()).simple("orthogonal", root)
    assert way is not None
    middle = digits().width * (digits().width + 1) // 2
    before, after = (each[0, middle:].reshape(-1, 10) for each in (own(), way(own())))
    assert np.abs(root.features @ (after - before)).max() < 0.2 * np.abs(root.features @ before).max()


@pytest.mark.parametrize("name", [*SEEN, *HELD_OUT])
def test_every_attack_on_silos_says_something(name: str):
    made, root = digits(), roots_of(digits(), 240)
    exact = np.stack([made.moments(each) for each in np.split(ROWS, 3)])
    noise = np.random.default_rng(1).normal(size=(4, made.length))
    ways = silo_lies(name, made, root, exact, exact + noise[:3], noise)
    assert all(each.shape == noise.shape and np.isfinite(each).all() for each in ways)
    assert len(ways) == (3 if name.endswith("-search") else 1)


@pytest.mark.parametrize("name", [*CROWD_SEEN, *CROWD_HELD_OUT])
def test_only_cohorts_with_a_liar_are_spoiled(name: str):
    made, root = digits(), roots_of(digits(), 240)
    exact = np.stack([made.moments(each) for each in np.split(ROWS, 12)])
    met, lying = np.arange(12).reshape(4, 3), np.isin(np.arange(12), (4, 5, 6))
    sums = crowd_sums(name, made, root, exact, met, lying, np.random.default_rng(1), 1.0)
    true = exact[met].sum(1)
    spoiled = np.abs(sums - true).max(1) > 1e-6
    expected = {"none": [False] * 4}.get(name, [True, False, False, False] if name.startswith("sybil") else
                                         [False, True, True, False])  # fmt: skip
    assert spoiled.tolist() == expected


def test_a_line_shows_the_worst_seed_of_the_worst_attack_and_its_mean():
    pieces = [Piece("silos", "iid", seed) for seed in (0, 1)]
    errors = {("a", 0): 0.1, ("a", 1): 0.3, ("b", 0): 0.25, ("b", 1): 0.24}
    results = tuple(Result(pieces[seed], "default", 0.6, attack, error, 0.0, 0.0)
                    for (attack, seed), error in errors.items())  # fmt: skip
    line = _line("silos-default", results)
    assert line.series.y == (0.3,)
    assert line.series.low == (0.2,)
    assert line.privacy.delta_too_large


def test_a_piece_is_the_same_each_time():
    piece = Piece("silos", "iid", 3, 20.0, shares=(0.0, 0.6), attacks=("label-flip",))
    first, second = (run_piece(piece, digits()) for _ in range(2))
    assert [each.error for each in first] == [each.error for each in second]
    assert [each.share for each in first] == [0.0, 0.6]
