"""The grid: whatever the rows are, replacing one moves the integer sum by at most twice the clip (review, R8)."""

from fractions import Fraction
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crowdml.arrays import Outer
from crowdml.privacy.grid import COUNTS, FINEST, LARGEST_CLIP, Grid

NORMS = {"l1": 1, "l2": 2}
BAD = (np.nan, np.inf, -np.inf, 1e30, -1e30, 3.4e38, -3.4e38, 1e-42, -1e-42, 1e15, 0.0, -0.0, 1.0, -1.0)
BOTH = pytest.mark.parametrize("engine", ["numpy", "jax"])
EACH = pytest.mark.parametrize("norm", NORMS)


@cache
def compiled(step, norm, clip):
    return jax.jit(lambda rows: Grid(step).sum(rows, norm=norm, clip=clip))


def total(engine, rows, norm, clip, step=Fraction(1, 16)):
    rows = np.asarray(rows)
    rows = rows if rows.dtype.kind == "i" else rows.astype(np.float32)
    found = compiled(step, norm, clip)(rows) if engine == "jax" else Grid(step).sum(rows, norm=norm, clip=clip)
    assert found.dtype == np.int32
    return np.asarray(found).astype(np.int64)


def moved(engine, first, second, norm, clip, **more):
    return np.linalg.norm(
        (total(engine, first, norm, clip, **more) - total(engine, second, norm, clip, **more)).ravel(), NORMS[norm]
    )


def adversaries(clip, shape, step=Fraction(1, 16)):
    """Rows that try to move a sum far: vertices, opposite signs, kinks of the clip, rounding, and what is no number."""
    size = int(np.prod(shape))
    bound = clip * float(step)
    rng = np.random.default_rng(clip)
    rows = [sign * bound * np.eye(size)[k] for sign in (1, -1) for k in range(size)]
    rows += [sign * np.full(size, bound / part) for sign in (1, -1) for part in (size, np.sqrt(size), 1)]
    rows += [scale * rows[k] for scale in (1 - 1e-7, 1 + 1e-7, 1 + 1e-3, 1e6, 1e30) for k in range(0, len(rows), 2)]
    rows += [rng.normal(size=size) * scale for scale in (bound / 9, bound, 1e3, 1e12, 1e30) for _ in range(4)]
    rows += [np.where(np.arange(size) == k, bad, bound / 2) for bad in BAD for k in (0, size - 1)]
    rows += [np.full(size, bad) for bad in BAD]
    nearly = bound * np.eye(size)[0] + float(step) * np.eye(size)[1]  # its norm in float32 is the clip, and it is above
    rows += [nearly, -nearly]
    with np.errstate(over="ignore"):
        return np.asarray(rows).astype(np.float32).reshape(-1, *shape)


@BOTH
@EACH
@pytest.mark.parametrize(("clip", "shape"), [(1, (3,)), (7, (5,)), (1000, (4, 3)), (8193, (50,)), (LARGEST_CLIP, (6,))])
def test_replacing_an_adversarial_row_moves_the_sum_by_at_most_twice_the_clip_and_nearly_by_that(
    engine, norm, clip, shape
):
    rows = adversaries(clip, shape)
    one_by_one = np.stack([total(engine, row[None], norm, clip) for row in rows]).reshape(len(rows), -1)
    far = np.linalg.norm(one_by_one[:, None] - one_by_one[None, :], NORMS[norm], axis=2)
    assert far.max() <= 2 * clip
    assert far.max() >= 0.9 * 2 * clip
    assert np.linalg.norm(one_by_one, NORMS[norm], axis=1).max() <= clip


@BOTH
@EACH
def test_other_rows_of_the_batch_do_not_change_how_far_one_row_moves_it(engine, norm):
    rows = adversaries(50, (4,))
    company = rows[7:12]
    alone = total(engine, rows[:1], norm, 50) - total(engine, rows[1:2], norm, 50)
    together = total(engine, [rows[0], *company], norm, 50) - total(engine, [rows[1], *company], norm, 50)
    np.testing.assert_array_equal(alone, together)


entries = st.one_of(
    st.floats(-20, 20, width=32), st.sampled_from([float(np.float32(bad)) for bad in BAD]), st.floats(width=32)
)


@BOTH
@EACH
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_replacing_any_row_moves_the_sum_by_at_most_twice_the_clip(engine, norm, data):
    batch = data.draw(arrays(np.float32, (4, 6), elements=entries))
    other = batch.copy()
    other[data.draw(st.integers(0, 3))] = data.draw(arrays(np.float32, 6, elements=entries))
    clip = data.draw(st.sampled_from([1, 37, 8193]))
    assert moved(engine, batch, other, norm, clip) <= 2 * clip


@BOTH
@EACH
@pytest.mark.parametrize("dimension", [3, 500, 20_000])
def test_the_clip_holds_in_many_dimensions_where_sums_of_floats_round(engine, norm, dimension):
    rng = np.random.default_rng(dimension)
    rows = rng.normal(size=(16, dimension)).astype(np.float32) * np.logspace(-2, 9, 16)[:, None]
    for row in rows:
        assert np.linalg.norm(total(engine, row[None], norm, 8193, step=Fraction(1, 4096)), NORMS[norm]) <= 8193


@BOTH
def test_entries_are_truncated_toward_zero_and_nothing_is_rounded_up(engine):
    row = np.array([[0.99, -0.99, 1.0, -1.0, 1.51, -1.51, 2.999, -2.999, 1e-42, -1e-42]])
    assert total(engine, row, "l1", 1000, step=Fraction(1)).tolist() == [0, 0, 1, -1, 1, -1, 2, -2, 0, 0]


@BOTH
@EACH
@given(arrays(np.float32, (1, 5), elements=st.floats(-40, 40, width=32)))
@settings(max_examples=40, deadline=None)
def test_truncation_never_raises_the_size_of_an_entry(engine, norm, row):
    exact = row.astype(np.float64) * 16
    size = np.linalg.norm(exact.ravel(), NORMS[norm])
    exact *= min(1.0, 100 / max(size, 1e-300))
    steps = total(engine, row, norm, 100)
    assert np.all(np.abs(steps) <= np.abs(exact) * (1 + 1e-6))
    assert np.all(np.abs(steps - exact) < 1 + 1e-3) or not steps.any()
    assert np.all(steps * exact >= 0)


@EACH
@given(arrays(np.float32, (4, 6), elements=st.floats(-40, 40, width=32)))
@settings(max_examples=40, deadline=None)
def test_numpy_and_jax_agree_to_one_step_an_entry_and_row(norm, rows):
    first, second = (np.stack([total(engine, row[None], norm, 300) for row in rows]) for engine in ("numpy", "jax"))
    close = np.abs(first - second) <= 1
    dropped = (first == 0).all(1) | (second == 0).all(1)  # a norm on the edge may pass the check on one side alone
    assert np.all(close.all(1) | dropped)


@BOTH
@EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_a_row_with_an_entry_that_is_no_number_counts_as_zero_and_says_nothing(engine, norm, bad):
    rows = np.array([[1.0, bad, 2.0], [1.0, 3.0, 2.0]], np.float32)
    with np.errstate(all="raise"):
        assert total(engine, rows, norm, 1000).tolist() == [16, 48, 32]


@BOTH
@EACH
def test_counts_are_not_scaled_and_a_row_above_the_clip_counts_as_zero(engine, norm):
    rows = np.array([[1, 0, 0], [0, 2, 0], [2**31 - 1, -(2**31), 0], [2, 2, 2]], np.int32)
    assert total(engine, rows, norm, 2, step=Fraction(1)).tolist() == [1, 2, 0]


@BOTH
@EACH
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "bool"])
@pytest.mark.parametrize("clip", [1, 300, LARGEST_CLIP])
def test_integers_of_any_type_stay_within_the_clip_where_their_norm_would_wrap_round(engine, norm, dtype, clip):
    least, most = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    ends = [(most, most), (least, least), (most, least), (min(most, clip),) * 2, (1, 0), (min(most, 2**15),) * 2]
    rows = np.array([pair * 4 for pair in ends]).astype(dtype)
    for row in rows:
        given = jax.numpy.asarray(row[None]) if engine == "jax" else row[None]
        found = np.asarray(COUNTS.sum(given, norm=norm, clip=clip)).astype(np.int64)
        assert np.linalg.norm(found, NORMS[norm]) <= clip


@BOTH
def test_a_hundred_thousand_counts_stay_within_an_l1_clip(engine):
    row = np.full((1, 93_369), LARGEST_CLIP, np.int32)  # in int32 their sum is below zero
    assert abs(total(engine, row, "l1", LARGEST_CLIP, step=Fraction(1))).sum() <= LARGEST_CLIP


@BOTH
def test_a_row_that_only_floats_hold_for_short_enough_counts_as_zero(engine):
    row = np.array([[8193.0, 1.0]])  # 8193^2 + 1 is 8193^2 in float32
    assert total(engine, row, "l2", 8193, step=Fraction(1)).tolist() == [0, 0]
    assert total(engine, row[:, :1], "l2", 8193, step=Fraction(1)).tolist() == [8193]


@pytest.mark.parametrize(
    "step", [Fraction(3), Fraction(1, 3), Fraction(0), Fraction(-1, 2), Fraction(3, 4), Fraction(4, 3)]
)
def test_a_step_that_is_no_power_of_two_is_refused(step):
    with pytest.raises(ValueError, match=rf"A grid step is a power of two; {step} is not"):
        Grid(step)


@pytest.mark.parametrize("clip", [0, -1, LARGEST_CLIP + 1])
def test_a_clip_whose_square_would_overflow_is_refused(clip):
    with pytest.raises(ValueError, match=rf"A clip of {clip} grid steps is outside 1 to {LARGEST_CLIP}"):
        COUNTS.sum(np.ones((2, 2)), norm="l2", clip=clip)


@BOTH
def test_decoding_gives_the_numbers_of_the_grid(engine):
    steps = np.array([-3, 0, 5], np.int32)
    found = Grid(Fraction(1, 8)).decode(jax.numpy.asarray(steps) if engine == "jax" else steps)
    assert found.dtype == np.float32
    assert np.asarray(found).tolist() == [-0.375, 0.0, 0.625]


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_half_floats_and_entries_at_the_edge_of_an_integer_stay_within_the_clip(norm):
    for rows in (np.array([[30, 0, 0], [0, 0, 0]], np.float16), np.array([[6e4, -6e4, 6e4]], np.float16)):
        total = Grid(Fraction(1, 4096)).sum(rows, norm=norm, clip=4096)
        assert abs(total.astype(np.int64)).max() <= 4096


# --- rows by their factors ---


def total_of_factors(engine, left, right, norm, clip, step=Fraction(1, 16)):
    left, right = (np.asarray(each, np.float32) for each in (left, right))
    if engine == "jax":
        found = _compiled_factors(step, norm, clip)(left, right)
    else:
        found = Grid(step).sum(Outer(left, right), norm=norm, clip=clip)
    assert found.dtype == np.int32
    return np.asarray(found).astype(np.int64)


@cache
def _compiled_factors(step, norm, clip):
    return jax.jit(lambda left, right: Grid(step).sum(Outer(left, right), norm=norm, clip=clip))


def in_company(row, at=3):
    """Factors of eight rows: compiled code takes so many another way than few. All but one are zero."""
    return np.where(np.arange(8)[:, None] == at, row, 0)


@BOTH
@EACH
@pytest.mark.parametrize("clip", [30, 1000, LARGEST_CLIP])
def test_rows_by_their_factors_add_up_as_their_products_do(engine, norm, clip):
    rng = np.random.default_rng(clip)
    left, right = rng.normal(size=(12, 7)).astype(np.float32), rng.normal(size=(12, 5)).astype(np.float32)
    found = total_of_factors(engine, left, right, norm, clip)
    whole = left[:, :, None] * right[:, None, :]
    assert np.abs(found - total(engine, whole, norm, clip)).max() <= len(left)  # a step an entry and row
    if clip == LARGEST_CLIP:  # none is scaled
        np.testing.assert_array_equal(found, total(engine, whole, norm, clip))


@BOTH
@EACH
def test_a_row_by_its_factors_is_shortened_to_the_clip_and_not_dropped(engine, norm):
    left, right = in_company([3.0, -4.0]), in_company([1.0, 2.0, -2.0])
    found = total_of_factors(engine, left, right, norm, 100)
    assert 90 <= np.linalg.norm(found.ravel(), NORMS[norm]) <= 100
    assert (np.sign(found) == np.sign(np.outer([3, -4], [1, 2, -2]))).all()


@BOTH
@EACH
def test_a_row_by_its_factors_that_is_as_long_as_the_clip_is_taken_whole(engine, norm):
    left, right = in_company([0.0, 4.0]), in_company([0.0, 0.0, -2.0])
    np.testing.assert_array_equal(total_of_factors(engine, left, right, norm, 128), [[0, 0, 0], [0, 0, -128]])


@BOTH
def test_a_row_by_its_factors_that_only_floats_hold_for_short_enough_counts_as_zero(engine):
    left, right = in_company([8193.0, 1.0]), in_company([1.0, 0.0])  # |left| is 8193 in float32, and above it
    found = total_of_factors(engine, left, right, "l2", 8193, step=Fraction(1))
    assert np.linalg.norm(found.ravel()) <= 8193


@EACH
@pytest.mark.parametrize("width", [2, 60, 1990])
def test_an_accelerator_takes_narrow_rows_to_a_clip_that_no_rounding_leaves(norm, width, monkeypatch):
    rng, clip = np.random.default_rng(width), 30_000
    left, right = rng.uniform(0.5, 1, (400, width)).astype(np.float32), np.ones((400, 8), np.float32)
    left[:200] /= np.linalg.norm(left[:200], NORMS[norm], axis=1)[:, None] * np.linalg.norm(right[0], NORMS[norm])
    left[:200] *= clip / 2**15 * (1 + rng.uniform(-2e-7, 2e-7, (200, 1))).astype(np.float32)  # at the clip
    monkeypatch.setattr("crowdml.privacy.grid.compiled_for_cpu", lambda values: False)
    alone = jax.jit(jax.vmap(lambda a, b: Grid(Fraction(1, 2**15)).sum(Outer(a[None], b[None]), norm=norm, clip=clip)))
    found = np.asarray(alone(left, right)).astype(np.int64).reshape(400, -1)
    lengths = np.linalg.norm(found, NORMS[norm], axis=1)
    assert lengths.max() <= clip
    assert lengths[200:].min() >= 0.99 * clip - (1 if norm == "l2" else 8) * width  # shortened, and not dropped
    row = Outer(jax.numpy.asarray([[8193.0, 1.0]]), jax.numpy.ones((1, 1)))  # |left| is 8193 in float32, and above it
    assert np.linalg.norm(np.asarray(Grid(Fraction(1)).sum(row, norm=norm, clip=8193)).ravel(), NORMS[norm]) <= 8193


@BOTH
@EACH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_a_row_with_a_factor_that_is_no_number_counts_as_zero_and_says_nothing(engine, norm, bad):
    for left, right in (([1.0, bad], [1.0, 2.0]), ([1.0, 2.0], [bad, 1.0]), ([0.0, bad], [0.0, 1.0])):
        lefts, rights = in_company(np.float32(left)), in_company(np.float32(right))
        lefts[5], rights[5] = [1.0, 2.0], [3.0, 0.0]
        with np.errstate(all="raise"):
            found = total_of_factors(engine, lefts, rights, norm, 1000)
        np.testing.assert_array_equal(found, [[48, 0], [96, 0]])


@BOTH
@EACH
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_replacing_the_factors_of_any_row_moves_the_sum_by_at_most_twice_the_clip(engine, norm, data):
    left = data.draw(arrays(np.float32, (8, 3), elements=entries))
    right = data.draw(arrays(np.float32, (8, 2), elements=entries))
    others, at = (left.copy(), right.copy()), data.draw(st.integers(0, 7))
    for other in others:
        other[at] = data.draw(arrays(np.float32, other.shape[1], elements=entries))
    clip, step = data.draw(st.sampled_from([1, 37, 8193])), data.draw(st.sampled_from([Fraction(1, 16), FINEST]))
    first, second = (total_of_factors(engine, *each, norm, clip, step=step) for each in ((left, right), others))
    assert np.linalg.norm((first - second).ravel(), NORMS[norm]) <= 2 * clip
