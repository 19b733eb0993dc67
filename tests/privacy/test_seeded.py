"""The simulator's noise: the same laws, drawn fast; independent over lanes, draws, steps, devices and seeds.

Seeds are fixed, thresholds are for a false alarm once in a million (review, section 7).
"""

import math
from fractions import Fraction
from functools import cache

import jax
import numpy as np
import pytest
from audits import ALARM, FIVE_SIGMA, correlation, misfit, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace, Skellam
from crowdml.privacy.seeded import SeededSource, _alias, stream

SCALES = [Fraction(1), Fraction(30), Fraction(819), Fraction(2978), Fraction(2**15)]
LAWS = [
    *(DiscreteLaplace(scale) for scale in (Fraction(1, 3), *SCALES)),
    *(DiscreteGaussian(sigma) for sigma in (Fraction(1, 2), *SCALES)),
    *(Skellam(scale**2) for scale in SCALES),
]
MANY = 1_000_000


@cache
def words(seed=1, device=2, step=3, count=MANY):
    """The raw hash behind the draws."""
    return SeededSource(stream(seed, device, step))._words(np, np.empty(count))


# The law


def exact_law(law):
    """What the alias table really draws: P(|X| = k) for each k that it can give."""
    table = _alias(law)
    cells = 1 << table.bits
    stay = (table.entries >> table.bits) / 2.0 ** (31 - table.bits)
    alias = table.entries & np.uint32(cells - 1)
    mass = stay / cells
    np.add.at(mass, alias, (1 - stay) / cells)
    return np.repeat(mass / table.width, table.width), table.width


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_table_is_as_close_to_its_law_as_the_module_says(law):
    mass, width = exact_law(law)
    assert mass.sum() == pytest.approx(1, abs=1e-12)
    true = law.pmf(np.arange(len(mass)))
    true[1:] *= 2
    distance = (np.abs(mass - true).sum() + (1 - true.sum())) / 2
    assert distance < (2.0**-16 if width == 1 else 2.0**-12)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_draws_fill_forty_equiprobable_cells_as_their_law_says(law):
    values = sample(SeededSource(stream(11, 5, 7)), law, np.empty(MANY))
    assert values.dtype == np.int32
    assert misfit(values, law) < 1


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_mean_and_variance_are_those_of_the_law(law):
    values = sample(SeededSource(stream(12, 5, 7)), law, np.empty(MANY)).astype(float)
    variance = float(law.variance)
    assert abs(values.mean()) * math.sqrt(MANY / variance) < FIVE_SIGMA
    kurtosis = float((values**4).mean()) / variance**2
    assert abs((values**2).mean() / variance - 1) * math.sqrt(MANY / kurtosis) < FIVE_SIGMA


@pytest.mark.parametrize(
    "law", [DiscreteLaplace(Fraction(3)), DiscreteGaussian(Fraction(3)), Skellam(Fraction(9))], ids=str
)
def test_every_small_value_comes_as_often_as_its_law_says(law):
    values = sample(SeededSource(stream(13, 5, 7)), law, np.empty(MANY))
    k = np.arange(-8, 9)
    mass = law.pmf(k)
    seen = np.array([(values == j).sum() for j in k])
    assert np.all(np.abs(seen - MANY * mass) < (FIVE_SIGMA + 1) * np.sqrt(MANY * mass))


def test_few_draws_at_each_of_many_steps_have_the_law_too():
    """As in a run: three lanes, then the next step of the next device."""
    law = DiscreteGaussian(Fraction(30))
    keys = stream(4, np.repeat(np.arange(1000), 200), np.tile(np.arange(200), 1000))
    values = np.asarray(
        jax.jit(jax.vmap(lambda key: SeededSource(key).discrete_gaussian(law.sigma, np.empty(3))))(keys)
    )
    assert misfit(values, law) < 1
    flat = values.astype(float)
    pairs = [
        (flat[:, 0], flat[:, 1]),
        (flat[:, 1], flat[:, 2]),
        (flat[1:, 0], flat[:-1, 0]),
        (flat[200:, 0], flat[:-200, 0]),
    ]
    assert max(correlation(a, b) for a, b in pairs) < FIVE_SIGMA + 0.5
    assert max(correlation(abs(a), abs(b)) for a, b in pairs) < FIVE_SIGMA + 0.5


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, 2**30])
def test_choices_are_even(n):
    values = SeededSource(stream(1, 1, n)).uniform_below(n, np.empty(200_000))
    assert values.min() >= 0
    assert values.max() < n
    parts = min(n, 40)
    seen = np.bincount((values.astype(np.int64) * parts) // n, minlength=parts)
    assert ((seen - 2e5 / parts) ** 2 / (2e5 / parts)).sum() <= stats.chi2.isf(ALARM, max(1, parts - 1))


# Independence


def neighbours():
    """Sources that differ in one word, by one or by one bit."""
    base = (7, 8, 9)
    for place in range(3):
        for change in (1, 2, 3, 1 << 8, 1 << 16, 1 << 31):
            other = list(base)
            other[place] ^= change
            yield base, tuple(other)
    yield (0, 0, 0), (0, 0, 1)
    yield (0, 1, 0), (1, 0, 0)
    yield (0, 1, 0), (0, 0, 1)


@pytest.mark.parametrize(("one", "other"), list(neighbours()))
def test_neighbouring_streams_are_independent(one, other):
    law = DiscreteGaussian(Fraction(2978))
    first, second = (
        SeededSource(stream(*key)).discrete_gaussian(law.sigma, np.empty(60_000)).astype(float) for key in (one, other)
    )
    assert not np.array_equal(first, second)
    found = [correlation(first, second), correlation(abs(first), abs(second)), correlation(first[1:], second[:-1])]
    assert max(found) < FIVE_SIGMA + 0.6
    same = (words(*one, 60_000) == words(*other, 60_000)).sum()
    assert same <= 2


def test_the_draws_of_a_step_are_independent():
    source = SeededSource(stream(7, 8, 9))
    draws = np.stack([source.discrete_laplace(Fraction(819), np.empty(100_000)) for _ in range(5)]).astype(float)
    found = [correlation(draws[i], draws[j]) for i in range(5) for j in range(i)]
    found += [correlation(abs(draws[i]), abs(draws[j])) for i in range(5) for j in range(i)]
    assert max(found) < FIVE_SIGMA + 0.6


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 7, 8, 10, 16, 50, 64, 500, 512, 1024, 65536])
def test_lanes_are_uncorrelated_at_any_distance(lag):
    noise = SeededSource(stream(21, 22, 23)).discrete_gaussian(Fraction(819), np.empty(MANY)).astype(float)
    assert correlation(noise[lag:], noise[:-lag]) < FIVE_SIGMA + 0.6
    assert correlation(abs(noise[lag:]), abs(noise[:-lag])) < FIVE_SIGMA + 0.6


def test_signs_and_magnitudes_are_independent():
    values = SeededSource(stream(31, 32, 33)).discrete_laplace(Fraction(819), np.empty(MANY)).astype(float)
    values = values[values != 0]
    assert correlation(np.sign(values), abs(values)) < FIVE_SIGMA
    assert correlation(np.sign(values)[1:], np.sign(values)[:-1]) < FIVE_SIGMA


def test_bits_are_balanced_and_pairs_of_bits_independent():
    n = 100_000
    bits = np.ascontiguousarray(np.unpackbits(words(count=n).view(np.uint8).reshape(-1, 4), axis=1).T) * 2.0 - 1
    assert np.all(np.abs(bits.mean(1)) * math.sqrt(n) < FIVE_SIGMA + 0.6)
    together, following = bits @ bits.T, bits[:, 1:] @ bits[:, :-1].T
    np.fill_diagonal(together, 0)
    assert max(np.abs(together).max(), np.abs(following).max()) / math.sqrt(n) < FIVE_SIGMA + 1.1


def test_neighbouring_words_fill_the_square_evenly():
    """The serial test, over a million words: pairs and triples of neighbouring lanes."""
    high = (words() >> np.uint32(28)).astype(np.int64)
    pairs = np.bincount(high[0::2] * 16 + high[1::2], minlength=256)
    assert ((pairs - MANY / 512) ** 2 / (MANY / 512)).sum() < stats.chi2.isf(ALARM, 255)
    cut = high[: MANY // 3 * 3].reshape(-1, 3) >> 1
    triples = np.bincount(cut @ np.array([64, 8, 1]), minlength=512)
    assert ((triples - len(cut) / 512) ** 2 / (len(cut) / 512)).sum() < stats.chi2.isf(ALARM, 511)
    low = (words() & np.uint32(15)).astype(np.int64)
    pairs = np.bincount(low[0::2] * 16 + low[1::2], minlength=256)
    assert ((pairs - MANY / 512) ** 2 / (MANY / 512)).sum() < stats.chi2.isf(ALARM, 255)


def test_flipping_a_bit_of_any_word_moves_half_of_the_bits_of_the_noise():
    base = words(7, 8, 9, 20_000)
    for place in range(3):
        for bit in range(32):
            key = [7, 8, 9]
            key[place] ^= 1 << bit
            moved = np.unpackbits((base ^ words(*key, 20_000)).view(np.uint8)).mean()
            assert abs(moved - 0.5) < (FIVE_SIGMA + 0.6) / 2 / math.sqrt(640_000)


def test_no_two_streams_of_a_large_crowd_are_equal():
    devices, steps = np.arange(10_000), np.arange(25)
    keys = np.concatenate([stream(seed, devices[:, None], steps).reshape(-1, 2) for seed in (0, 1)])
    whole = keys[:, 0].astype(np.uint64) << np.uint64(32) | keys[:, 1]
    assert len(np.unique(whole)) == len(whole)


def test_words_of_one_draw_are_all_different():
    assert (
        len(np.unique(words(count=200_000))) == 200_000
    )  # a bijection of the lanes, so no two lanes share their noise


# The same integers everywhere


@pytest.mark.parametrize("law", [LAWS[0], LAWS[5], LAWS[8], LAWS[11], LAWS[13]], ids=str)
def test_numpy_and_jax_draw_the_same_integers(law):
    key = stream(5, 6, 7)

    def twice(key):
        source = SeededSource(key)
        return sample(source, law, np.empty((50, 10))), sample(source, law, np.empty((3,)))

    for plain, compiled in zip(twice(key), jax.jit(twice)(key), strict=True):
        np.testing.assert_array_equal(plain, np.asarray(compiled))
        assert compiled.dtype == plain.dtype == np.int32


def test_numpy_and_jax_choose_the_same():
    key = stream(5, 6, 7)
    for n in (2, 9, 2**30):
        plain, compiled = (
            run(key)
            for f in [lambda key, n=n: SeededSource(key).uniform_below(n, np.empty(1000))]
            for run in (f, jax.jit(f))
        )
        np.testing.assert_array_equal(plain, np.asarray(compiled))


@given(st.integers(0, 2**32 - 1), st.integers(0, 10**6), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_stream_made_for_a_whole_run_is_that_of_each_step(seed, device, step):
    run = stream(seed, np.array([device, device + 1]), np.array([step, step]))
    assert run.shape == (2, 2)
    np.testing.assert_array_equal(run[0], stream(seed, device, step))
    np.testing.assert_array_equal(run[1], stream(seed, device + 1, step))


def test_a_source_starts_over_where_its_key_is_the_same_and_nowhere_else():
    first, again = SeededSource(stream(1, 2, 3)), SeededSource(stream(1, 2, 3))
    like, scale = np.empty(100), Fraction(819)
    one = first.discrete_laplace(scale, like)
    np.testing.assert_array_equal(one, again.discrete_laplace(scale, like))
    assert not np.array_equal(one, first.discrete_laplace(scale, like))
