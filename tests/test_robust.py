"""Robust rules: against byzfl and qora, by their own properties, on NumPy and on JAX, and what they refuse."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crowdml.errors import TaskError
from crowdml.robust import (
    RULES,
    Combine,
    _nearest,
    _products,
    bucket_ranks,
    clip_around,
    combine_blocks,
    combine_rows,
    distances_from,
    krum_scores,
    remarks,
    rules_for,
    shares_of,
    weiszfeld,
)

BYZFL: dict[str, Any] = json.loads((Path(__file__).parent / "oracles" / "robust_byzfl.json").read_text())
ROWS, F, FOUND = (
    np.array(BYZFL["rows"]),
    int(BYZFL["f"]),
    {name: np.array(each) for name, each in BYZFL["found"].items()},
)


def by(rule: str, uploads: int = 15, f: int | None = 2, **more: Any) -> Combine:
    return Combine(rule, uploads, f, **more)


EVERY = [by(rule, before=before) for rule in RULES for before in (None, "nnm")] + [
    by(rule, before="bucketing", f=1) for rule in RULES
]
ROBUST = [each for each in EVERY if each.rule != "mean"]


def named(each: Combine) -> str:
    return f"{each.before or 'alone'}-{each.rule}"


def drawn(count: int = 15, width: int = 9, seed: int = 1):
    return np.random.default_rng(seed).normal(size=(count, width)) + 3


# Against others


@pytest.mark.parametrize("name", ["mean", "median", "trimmed-mean", "krum", "nnm-median", "nnm-trimmed-mean"])
def test_a_rule_is_equal_to_byzfl(name: str):
    rule = name.removeprefix("nnm-")
    found = combine_rows(ROWS, Combine(rule, len(ROWS), F, before="nnm" if rule != name else None))
    np.testing.assert_allclose(found, FOUND[name], rtol=1e-12)


def test_multi_krum_is_equal_to_byzfl():
    found = combine_rows(ROWS, Combine("multi-krum", len(ROWS), F, keep=len(ROWS) - F - 1))
    np.testing.assert_allclose(found, FOUND["multi-krum"], rtol=1e-12)


def test_mixing_is_equal_to_byzfl():
    mixed = _nearest(_products(lambda: (ROWS,), True), F) @ ROWS
    np.testing.assert_allclose(mixed, FOUND["nnm"], rtol=1e-12)


def test_steps_from_the_origin_are_equal_to_byzfl():
    """Ours start at the coordinate-wise median and take their radius from the rows; theirs do neither."""
    products = _products(lambda: (ROWS,), False)
    np.testing.assert_allclose(weiszfeld(products, 3, 0.1) @ ROWS, FOUND["geometric-median"], rtol=1e-9)
    np.testing.assert_allclose(clip_around(products, 3, 2.5) @ ROWS, FOUND["centred-clipping"], rtol=1e-9)
    np.testing.assert_allclose(clip_around(products, 1, 2.5) @ ROWS, FOUND["clipping"].mean(0), rtol=1e-9)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (("median", 0.0), by("median")),
        (("trimmed_mean", 0.2), by("trimmed-mean", f=3)),
        (("krum:4", 0.0), by("krum", f=4)),
        (("multi_krum:4:5", 0.0), by("multi-krum", f=4, keep=5)),
        (("fedavg", 0.0), by("mean", f=None)),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_a_rule_is_equal_to_qora(theirs: tuple[str, float], ours: Combine):
    """On integers below a common largest one: qora computes distances in 16 bits, with an exponent for each row."""
    qora = pytest.importorskip("qora", reason="a part of the extra `dev`")
    for seed in range(5):
        rows = np.rint(1000 * drawn(seed=seed)).astype(np.float32)
        rows[:, 0] = 8191
        made = qora.ByzantineAggregator(*theirs).aggregate([row[None] for row in rows])
        np.testing.assert_allclose(combine_rows(rows, ours), np.asarray(made)[0], rtol=2e-6)


def bulyan_by_hand(rows: Any, f: int) -> Any:
    left, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * f - 2:
        scores = []
        for i in left:
            apart = sorted(float(((rows[i] - rows[j]) ** 2).sum()) for j in left if j != i)
            scores.append(sum(apart[: len(left) - f - 2]))
        chosen.append(left.pop(int(np.argmin(scores))))
    made = []
    for column in rows[chosen].T:
        middle = np.median(column)
        made.append(np.mean(sorted(column, key=lambda each: abs(each - middle))[: len(chosen) - 2 * f]))
    return np.array(made)


@pytest.mark.parametrize("f", [0, 1, 2, 3])
def test_bulyan_is_equal_to_its_plain_form(f: int):
    rows = drawn(16)
    np.testing.assert_allclose(combine_rows(rows, by("bulyan", 16, f)), bulyan_by_hand(rows, f), rtol=1e-12)


def test_krum_adds_up_the_distances_to_the_nearest_others():
    rows = np.array([0.0, 1, 3, 7, 50])[:, None]
    squares = np.where(np.eye(5, dtype=bool), -1, (rows - rows.T) ** 2)
    np.testing.assert_array_equal(krum_scores(squares, 1), [1 + 9, 1 + 4, 4 + 9, 16 + 36, 43**2 + 47**2])


def test_the_geometric_median_minimises_the_sum_of_distances():
    rows = drawn(15, 3)
    rows[:4] += 30
    point = combine_rows(rows, by("geometric-median"))

    def far(at: Any) -> float:
        return float(np.linalg.norm(rows - at, axis=1).sum())

    moves = np.random.default_rng(3).normal(size=(50, 3))
    assert all(far(point) < far(point + 0.05 * move) for move in moves)


def test_clipping_holds_long_rows_to_the_median_length():
    rows = np.array([[1.0, 0], [0, 2], [0, 100]])
    np.testing.assert_allclose(combine_rows(rows, by("clipped-mean", 3, 1)), [1 / 3, 4 / 3])


# Properties


@pytest.mark.parametrize("rule", EVERY, ids=named)
def test_numpy_and_jax_agree(rule: Combine):
    rows = drawn().astype(np.float32)
    rows[:2] *= 30
    ranks = bucket_ranks(3, 15)
    compiled = jax.jit(lambda each, order: combine_rows(each, rule, order))(jnp.asarray(rows), jnp.asarray(ranks))
    np.testing.assert_allclose(compiled, combine_rows(rows, rule, ranks), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("rule", [each for each in EVERY if each.before != "bucketing"], ids=named)
def test_the_order_of_uploads_does_not_matter(rule: Combine):
    rows = drawn()
    order = np.random.default_rng(2).permutation(15)
    np.testing.assert_allclose(combine_rows(rows[order], rule), combine_rows(rows, rule), rtol=1e-9)


@pytest.mark.parametrize("rule", ROBUST, ids=named)
def test_lies_of_any_size_move_the_result_by_a_bounded_amount(rule: Combine):
    """As far as the honest rows are apart, about: the largest lies move it no further than large ones."""
    rows = drawn()
    centre, apart = rows.mean(0), np.linalg.norm(rows - rows.mean(0), axis=1).max()
    for size, spread in itertools.product((-1e8, -1e5, -1e2, 1e2, 1e5, 1e8), (0, 1)):  # on one point, or not
        lied = rows.copy()
        lied[: rule.lies] = size * (1 + spread * np.arange(rule.lies)[:, None])
        assert np.linalg.norm(combine_rows(lied, rule) - centre) < 3 * apart, size


def test_the_mean_is_moved_as_far_as_a_liar_likes():
    rows = drawn()
    rows[0] = 1e8
    assert combine_rows(rows, by("mean", f=None)).max() > 1e6


@pytest.mark.parametrize("rule", EVERY, ids=named)
def test_blocks_of_columns_give_what_the_whole_gives(rule: Combine):
    rows = drawn()
    blocks = combine_blocks(lambda: (rows[:, :2], rows[:, 2:7], rows[:, 7:]), 15, rule)
    np.testing.assert_allclose(blocks, combine_rows(rows, rule), rtol=1e-9)


@pytest.mark.parametrize("rule", EVERY, ids=named)
def test_a_row_that_is_not_finite_counts_as_zero(rule: Combine):
    rows = drawn()
    zero, broken = rows.copy(), rows.copy()
    zero[4] = 0
    broken[4, 2] = np.nan
    np.testing.assert_array_equal(combine_rows(broken, rule), combine_rows(zero, rule))


@pytest.mark.parametrize("rule", EVERY, ids=named)
def test_equal_uploads_stay_as_they_are(rule: Combine):
    np.testing.assert_allclose(combine_rows(np.tile([2.0, -3.0, 0.0], (15, 1)), rule), [2, -3, 0], atol=1e-12)


def test_buckets_change_from_round_to_round_and_are_the_same_on_jax():
    ranks = [bucket_ranks(number, 20) for number in range(3)]
    assert all(sorted(each) == list(range(20)) for each in ranks)
    assert not any((a == b).all() for a, b in itertools.combinations(ranks, 2))
    np.testing.assert_array_equal(jax.jit(lambda number: bucket_ranks(number, 20))(jnp.int32(2)), ranks[2])


@pytest.mark.parametrize("rule", EVERY, ids=named)
def test_noise_grows_by_what_is_said(rule: Combine):
    """Over rounds of noise alone, within a quarter; Krum takes a row that lies among others, which is shorter."""
    rng = np.random.default_rng(5)
    made = np.stack([combine_rows(rng.normal(size=(15, 100)), rule) for _ in range(60)])
    over = made.var() * 15 / rule.inflation(15)
    least = 0.5 if rule.rule in ("krum", "bulyan") or rule.before == "nnm" else 0.75
    assert least < over < 1.25


# What cannot be


@pytest.mark.parametrize(
    ("rule", "told"),
    [
        ({"rule": "krum", "uploads": 6, "f": 2}, r"krum needs at least 2f \+ 3 = 7 for f = 2, and a round may close"),
        ({"rule": "bulyan", "uploads": 10, "f": 2}, r"bulyan needs at least 4f \+ 3 = 11"),
        ({"rule": "median", "uploads": 4, "f": 2}, r"median needs at least 2f \+ 1 = 5"),
        ({"rule": "krum", "uploads": 9, "f": 1, "minimum": 4}, "a round may close with 4 uploads"),
        ({"rule": "krum", "uploads": 8, "f": 1, "before": "bucketing"}, "with 4 buckets of 8 uploads"),
        ({"rule": "krum", "uploads": 9}, "combine.f is missing: krum has to know"),
        ({"rule": "median", "before": "nnm", "uploads": 9}, "combine.f is missing: nnm has to know"),
        ({"rule": "multi-krum", "uploads": 9, "f": 2, "keep": 8}, "combine.keep = 8: at most 7"),
        (
            {"rule": "krum", "uploads": 9, "f": 2, "keep": 3},
            "combine.keep = 3: a setting of 'multi-krum' or 'top' or 'exponential' alone",
        ),
        ({"rule": "median", "uploads": 9, "bucket": 3}, "combine.bucket = 3: a setting of 'bucketing' alone"),
        ({"rule": "median", "uploads": 9, "minimum": 10}, "combine.minimum = 10: at most"),
        ({"rule": "median", "uploads": 9, "seconds": 30}, r"minimum is missing: after .*seconds = 30 a round closes"),
        ({"rule": "krum", "uploads": 5000, "f": 2}, "compares uploads two by two, and takes at most 4,096"),
    ],
)
def test_what_a_rule_cannot_do_is_refused_by_a_sentence(rule: dict[str, Any], told: str):
    with pytest.raises(TaskError, match=told):
        Combine(**rule)


def test_fewer_rows_than_a_rule_needs_are_refused():
    with pytest.raises(TaskError, match=r"krum needs at least 2f \+ 3 = 7"):
        combine_rows(drawn(6), by("krum"))


def test_the_rules_that_stand_f_lies_are_named():
    assert rules_for(7, 2) == ("clipped-mean", "median", "trimmed-mean", "krum", "multi-krum", "geometric-median",
                               "centred-clipping")  # fmt: skip
    assert "bulyan" in rules_for(11, 2)
    assert rules_for(2, 1) == ()


def test_under_masks_the_price_of_small_cohorts_is_told():
    told = " ".join(remarks(Combine("median", 50, 20), 20))
    assert "up to 20 of 50 cohorts may have a liar" in told
    assert "Cohorts of 20 stand a share of about 2.52 % liars" in told  # 1 - 0.6^(1/20)
    assert "about 8.9 times that of one sum over all 1,000 devices" in told  # sqrt(50 pi / 2)
    assert "cohorts of about 1/α devices are best" in told
    assert "masks" not in " ".join(remarks(Combine("median", 50, 20), None))


# What an upload counts


LINEAR = [each for each in EVERY if each.rule in ("mean", "krum", "multi-krum", "geometric-median")]


@pytest.mark.parametrize("each", LINEAR, ids=named)
def test_what_uploads_count_is_what_the_result_is_made_of(each: Combine):
    rows, ranks = drawn(), bucket_ranks(np.int64(4), 15)
    shares = shares_of(lambda: (rows,), 15, each, ranks)
    assert shares is not None
    assert shares.sum() == pytest.approx(15)
    np.testing.assert_allclose(shares @ rows / 15, combine_rows(rows, each, ranks), rtol=1e-9)


@pytest.mark.parametrize("rule", ["clipped-mean", "centred-clipping", "geometric-median"])
def test_an_upload_that_is_far_off_counts_less(rule: str):
    rows = drawn()
    rows[3] *= 1000
    shares = shares_of(lambda: (rows,), 15, by(rule))
    assert shares is not None
    assert 0 < shares[3] < 0.05 < 0.5 < np.delete(shares, 3).min()


def test_uploads_that_a_rule_leaves_out_count_nothing():
    rows = drawn()
    rows[[2, 9]] += 1000
    for rule, kept in (("krum", 1), ("multi-krum", 11), ("bulyan", 9)):
        shares = shares_of(lambda: (rows,), 15, by(rule))
        assert shares is not None
        assert (shares > 0).sum() == kept
        assert shares[2] == shares[9] == 0


def test_rules_that_look_at_each_column_leave_no_upload_out_as_a_whole():
    for rule in ("median", "trimmed-mean"):
        assert shares_of(lambda: (drawn(),), 15, by(rule)) is None


def test_distances_from_a_point_are_the_same_in_blocks():
    rows, point = drawn(width=7), np.arange(7.0)
    whole = np.linalg.norm(rows - point, axis=1)
    np.testing.assert_allclose(distances_from(lambda: (rows[:, :3], rows[:, 3:]), point), whole)
