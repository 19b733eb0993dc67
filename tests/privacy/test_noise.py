"""The device's noise: its distribution at many draws, and its exactness where 63 bits do not decide.

Entropy is fixed here (a SHAKE-256 stream), so a test that passes goes on passing. Thresholds are set for a false alarm
once in a million streams (review, section 7).
"""

import ast
import dataclasses
import hashlib
import math
import os
from fractions import Fraction
from functools import cache
from itertools import accumulate
from pathlib import Path

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from crowdml.errors import CrowdmlError, TaskError
from crowdml.privacy import laws, noise
from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace, Geometric, Skellam
from crowdml.privacy.noise import FEW, Silence, SystemSource, _tabled

ALARM = 1e-6
FIVE_SIGMA = float(stats.norm.isf(ALARM / 2))
LAWS = [
    *(DiscreteLaplace(scale) for scale in (Fraction(1, 3), Fraction(2), Fraction(301, 3), Fraction(2**15))),
    *(DiscreteGaussian(sigma) for sigma in (Fraction(1, 2), Fraction(22, 7), Fraction(200), Fraction(2**15))),
    *(Skellam(variance) for variance in (Fraction(1, 4), Fraction(10), Fraction(40_000), Fraction(2**30))),
]


class Stream:
    """Uniform bytes that depend on a label only."""

    def __init__(self, label):
        self.label, self.calls = label, 0

    def __call__(self, count):
        self.calls += 1
        return hashlib.shake_256(f"{self.label}/{self.calls}".encode()).digest(count)


class Script:
    """The words that a test dictates, one after the other."""

    def __init__(self, *words):
        self.words = list(words)

    def __call__(self, count):
        return b"".join(self.words.pop(0).to_bytes(8, "little") for _ in range(count // 8))


def draw(law, count, label=""):
    return sample(SystemSource(Stream(f"{law} {label}")), law, np.empty(count))


def sample(source, law, like):
    match law:
        case DiscreteLaplace(scale):
            return source.discrete_laplace(scale, like)
        case DiscreteGaussian(sigma):
            return source.discrete_gaussian(sigma, like)
        case Skellam(variance):
            return source.skellam(variance, like)


# Scale


@pytest.mark.parametrize("scale", [Fraction(50), Fraction(2**15)])
def test_mean_absolute_laplace_noise_is_the_scale(scale):
    n = 25_485  # finds an error of 5 % with probability 0.999
    ratio = np.abs(draw(DiscreteLaplace(scale), n, "scale").astype(float)).mean() / float(scale)
    assert abs(ratio - 1) * math.sqrt(n) < FIVE_SIGMA


@pytest.mark.parametrize("sigma", [Fraction(50), Fraction(2**15)])
def test_sample_deviation_of_gaussian_noise_is_sigma(sigma):
    n = 12_743
    ratio = draw(DiscreteGaussian(sigma), n, "scale").std() / float(sigma)
    assert abs(ratio - 1) * math.sqrt(2 * n) < FIVE_SIGMA


@pytest.mark.parametrize("variance", [Fraction(2500), Fraction(2**30), 3 * Fraction(2**30) + 1])
def test_sample_variance_of_skellam_noise_is_its_variance_even_beyond_one_draw(variance):
    n = 12_743
    ratio = draw(Skellam(variance), n, "scale").std() / math.sqrt(variance)
    assert abs(ratio - 1) * math.sqrt(2 * n) < FIVE_SIGMA


# Shape


def cells(law, count=40):
    """Right ends of about `count` equiprobable cells, and the probability of each; the last one has no end."""
    k = np.arange(-law.tail(60), law.tail(60) + 1)
    inside = np.cumsum(law.pmf(k))
    ends = np.unique(np.searchsorted(inside, np.arange(1, count) / count))
    return k[ends], np.diff(inside[ends], prepend=0, append=1)


def chi_square(values, law):
    ends, mass = cells(law)
    good = mass * len(values) > 5
    seen = np.bincount(np.searchsorted(ends, values), minlength=len(mass))
    expected = mass * len(values)
    seen, expected = (np.append(x[good], x[~good].sum()) for x in (seen, expected))
    seen, expected = seen[expected > 0], expected[expected > 0]
    return ((seen - expected) ** 2 / expected).sum(), stats.chi2.isf(ALARM, len(seen) - 1)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_noise_fills_forty_equiprobable_cells_as_its_law_says(law):
    statistic, limit = chi_square(draw(law, 100_000, "shape"), law)
    assert statistic < limit


@pytest.mark.parametrize(
    "law", [DiscreteLaplace(Fraction(2)), DiscreteGaussian(Fraction(22, 7)), Skellam(Fraction(10))], ids=str
)
def test_noise_takes_every_value_and_either_parity_as_often_as_its_law_says(law):
    n = 100_000
    values = draw(law, n, "support")
    k = np.arange(-law.tail(12), law.tail(12) + 1)
    mass = law.pmf(k)
    seen = np.array([(values == j).sum() for j in k])
    assert np.all(np.abs(seen - n * mass) < 6 * np.sqrt(n * mass))
    every = np.arange(-law.tail(60), law.tail(60) + 1)
    odd = law.pmf(every[every % 2 != 0]).sum()
    assert abs((values % 2 != 0).mean() - odd) * math.sqrt(n / (odd * (1 - odd))) < FIVE_SIGMA


def test_laplace_zero_is_not_counted_twice():
    values = draw(DiscreteLaplace(Fraction(1)), 100_000, "zero")
    zero = math.tanh(0.5)  # 0.46; 0.63 if either sign had its own
    assert abs((values == 0).mean() - zero) * math.sqrt(1e5 / (zero * (1 - zero))) < FIVE_SIGMA


def test_shares_of_skellam_noise_add_up_to_the_law_of_their_sum():
    shares = draw(Skellam(Fraction(7, 3)), (30, 100_000), "shares")
    statistic, limit = chi_square(shares.sum(axis=0), Skellam(Fraction(70)))
    assert statistic < limit


# Independence


def correlation(a, b):
    return float(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a))


@pytest.mark.parametrize("law", [law for law in LAWS if float(law.variance) > 3], ids=str)
def test_neighbouring_draws_and_coordinates_are_uncorrelated(law):
    source = SystemSource(Stream(f"{law} independence"))
    first, second = (sample(source, law, np.empty(100_000)).astype(float) for _ in range(2))
    table = first.reshape(-1, 4)
    found = [correlation(first[1:], first[:-1]), correlation(first, second), correlation(np.abs(first), np.abs(second))]
    found += [correlation(np.abs(first[1:]), np.abs(first[:-1]))]
    found += [correlation(table[:, i], table[:, j]) for i in range(4) for j in range(i)]
    assert max(map(abs, found)) < 5.5


def test_sign_and_magnitude_are_independent():
    for law in (DiscreteLaplace(Fraction(40)), DiscreteGaussian(Fraction(40)), Skellam(Fraction(1600))):
        values = draw(law, 100_000, "sign")
        values = values[values != 0]
        assert abs(correlation(np.sign(values), np.abs(values))) < FIVE_SIGMA


# Exactness: every draw is the smallest k with U < F(k), for the whole binary expansion of U


@cache
def cumulative(law):
    """F(0), F(1), ... of |X| (of X for a geometric law), to about 200 digits."""
    with mpmath.workdps(220):
        match law:
            case Geometric(scale, below):
                rate = mpmath.mpf(scale.denominator) / scale.numerator
                mass = [mpmath.exp(-rate * k) for k in range(below or int(450 * scale) + 20)]
            case DiscreteGaussian(sigma):
                rate = mpmath.mpf(sigma.denominator) ** 2 / (2 * sigma.numerator**2)
                mass = [mpmath.exp(-rate * k * k) * (1 if k == 0 else 2) for k in range(300)]
            case Skellam(variance):
                v = mpmath.mpf(variance.numerator) / variance.denominator
                mass = [mpmath.besseli(k, v) * (1 if k == 0 else 2) for k in range(300)]
        total = mpmath.fsum(mass)
        inside = [part / total for part in accumulate(mass)]
        return [*inside[:-1], mpmath.mpf(1)]


def inverse(law, number, bits):
    """The smallest k with number / 2^bits < F(k), by mpmath."""
    with mpmath.workdps(220):
        uniform = mpmath.mpf(number) / mpmath.mpf(2) ** bits
        return next(k for k, f in enumerate(cumulative(law)) if uniform < f)


def words(number, bits, sign=0):
    """The words that spell a number of `bits` = 63 + 64 j bits: 63 of them and a sign, then 64 at a time."""
    rest = bits - 63
    first = (number >> rest) << 1 | sign
    return [first, *((number >> shift) % 2**64 for shift in range(rest - 64, -1, -64))]


SYMMETRIC = [DiscreteGaussian(Fraction(22, 7)), DiscreteGaussian(Fraction(2, 5)), Skellam(Fraction(10))]


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("law", SYMMETRIC, ids=str)
def test_a_draw_that_ties_with_a_threshold_is_decided_by_its_later_bits(law, sign):
    for k in (0, 1, 2):
        with mpmath.workdps(220):
            threshold = int(mpmath.floor(cumulative(law)[k] * mpmath.mpf(2) ** 255))
        for number, expected in [(threshold - 5, k), (threshold + 5, k + 1)]:
            assert inverse(law, number, 255) == expected
            script = Script(*words(number, 255, sign))
            assert sample(SystemSource(script), law, np.empty(())) == (-expected if sign else expected)
            assert not script.words  # 63, 127 and 191 bits left it open: all four words were needed


@pytest.mark.parametrize("law", [*SYMMETRIC, Geometric(Fraction(7, 2)), Geometric(Fraction(7, 2), below=8)], ids=str)
def test_draws_on_either_side_of_each_threshold_fall_on_its_side(law):
    cuts = law.thresholds(63)
    near = {cut + step for cut in cuts for step in range(-2, 4)} | {2**63 - 1}
    numbers = [number for number in sorted(near) if 0 <= number < 2**63][::3]
    found = [int(SystemSource(Script(2 * number, 0, 0, 0))._draw(_tabled(law), 1)[0][0]) for number in numbers]
    assert found == [inverse(law, number, 63) for number in numbers]


@pytest.mark.parametrize("law", [*SYMMETRIC, Geometric(Fraction(7, 2)), Geometric(Fraction(7, 2), below=8)], ids=str)
def test_many_draws_are_decided_as_one_is(law):
    cuts = law.thresholds(63)
    near = sorted({cut + step for cut in cuts for step in range(-2, 4)} | {0, 1, 2**63 - 1})
    numbers = [number for number in near if 0 <= number < 2**63]
    many = (numbers * (1 + FEW // len(numbers)))[: max(len(numbers), FEW + 1)]
    script = Script(*(2 * number for number in many), *[0] * 4 * len(many))
    found, _ = SystemSource(script)._draw(_tabled(law), len(many))
    assert found.tolist() == [inverse(law, number, 63) for number in many]


def test_ties_in_the_middle_of_a_vector_leave_the_other_draws_alone():
    law = DiscreteGaussian(Fraction(22, 7))
    with mpmath.workdps(220):
        threshold = int(mpmath.floor(cumulative(law)[3] * mpmath.mpf(2) ** 127))
    low, high = words(threshold - 9, 127), words(threshold + 9, 127, sign=1)
    script = Script(0, low[0], 2**62, high[0], 1, low[1], high[1])
    values = SystemSource(script).discrete_gaussian(law.sigma, np.empty(5))
    assert values.tolist() == [0, 3, inverse(law, 2**61, 63), -4, 0]
    assert not script.words


@pytest.mark.parametrize("law", SYMMETRIC, ids=str)
def test_a_draw_beyond_the_table_is_found_further_out(law):
    inside = len(law.thresholds(63)) - 1
    for number in (2**127 - 2**64, 2**127 - 2**40, 2**127 - 2**20, 2**191 - 2**50, 2**191 - 2**30):
        bits = 127 if number < 2**127 else 191
        script = Script(*words(number, bits))
        found = int(sample(SystemSource(script), law, np.empty(())))
        assert found == inverse(law, number, bits)
        assert not script.words
    assert found > inside


@given(st.sampled_from(SYMMETRIC), st.integers(0, 2**127 - 1), st.integers(0, 1))
@settings(max_examples=150, deadline=None)
def test_each_draw_inverts_the_distribution_function_at_its_uniform_number(law, number, sign):
    found = int(sample(SystemSource(Script(*words(number, 127, sign), 0, 0)), law, np.empty(())))
    assert found == (-1) ** sign * inverse(law, number, 127)


@given(st.fractions(Fraction(1, 5), 200), st.lists(st.integers(0, 2**63 - 2**40), min_size=3, max_size=3))
@settings(max_examples=40, deadline=None)
def test_laplace_noise_is_made_of_three_exact_geometric_draws(scale, numbers):
    m = noise._block(scale)
    parts = Geometric(scale / m), Geometric(scale, below=m), Geometric(scale, below=2)
    high, low, negative = (inverse(part, number, 63) for part, number in zip(parts, numbers, strict=True))
    expected = -1 - (m * high + low) if negative else m * high + low
    script = Script(*(2 * n for n in numbers))  # none is so close to one that 63 bits would not do
    assert SystemSource(script).discrete_laplace(scale, np.empty(())) == expected


def test_a_tie_in_each_part_of_laplace_noise_is_decided_by_its_later_bits():
    scale = Fraction(7, 2)
    m = noise._block(scale)
    parts = Geometric(scale / m), Geometric(scale, below=m), Geometric(scale, below=2)
    for part, moved in enumerate([m, 1, -1]):  # one block, one place, or the other side
        with mpmath.workdps(220):
            threshold = int(mpmath.floor(cumulative(parts[part])[0] * mpmath.mpf(2) ** 127))
        for number, expected in ((threshold - 5, 0), (threshold + 5, moved)):
            script = Script(*(w for i in range(3) for w in (words(number, 127) if i == part else [0])))
            assert SystemSource(script).discrete_laplace(scale, np.empty(())) == expected
            assert not script.words


# Uniform choices


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000])
def test_a_uniform_choice_is_uniform(n):
    seen = np.bincount(SystemSource(Stream(f"uniform {n}")).uniform_below(n, np.empty(100_000)), minlength=n)
    assert len(seen) == n
    assert ((seen - 1e5 / n) ** 2 / (1e5 / n)).sum() <= stats.chi2.isf(ALARM, max(1, n - 1))


def test_words_that_would_favour_small_numbers_are_drawn_again():
    assert 2**64 % 3 == 1
    script = Script(2**64 - 1, 2**64 - 2, 2**64 - 1, 7)
    assert SystemSource(script).uniform_below(3, np.empty(2)).tolist() == [1, 2]
    assert not script.words


@pytest.mark.parametrize("n", [0, -1, 2**31 + 1])
def test_a_choice_among_an_impossible_number_is_refused(n):
    with pytest.raises(TaskError, match=r"nothing was drawn"):
        SystemSource().uniform_below(n, np.empty(3))


# The oracle


@pytest.mark.parametrize("law", [DiscreteLaplace(Fraction(5, 2)), DiscreteGaussian(Fraction(13, 4))], ids=str)
def test_noise_is_distributed_like_that_of_opendp(law):
    dp = pytest.importorskip("opendp.prelude", reason="opendp is missing: the noise was NOT compared with its oracle")
    dp.enable_features("contrib")
    n = 20_000
    domain = dp.vector_domain(dp.atom_domain(T=int))
    if isinstance(law, DiscreteLaplace):
        oracle = dp.m.make_laplace(domain, dp.l1_distance(T=int), scale=float(law.scale))
    else:
        oracle = dp.m.make_gaussian(domain, dp.l2_distance(T=float), scale=float(law.sigma))
    ends, _ = cells(law)
    ours, theirs = (
        np.bincount(np.searchsorted(ends, values), minlength=len(ends) + 1)
        for values in (draw(law, n, "opendp"), np.array(oracle([0] * n)))
    )
    assert ((ours - theirs) ** 2 / (ours + theirs)).sum() < stats.chi2.isf(ALARM, len(ends))


# What a device gets


def test_entropy_comes_from_the_operating_system_and_there_is_no_seed():
    assert [field.name for field in dataclasses.fields(SystemSource)] == ["entropy"]
    assert SystemSource().entropy is os.urandom
    like = np.empty(64)
    assert SystemSource().discrete_gaussian(Fraction(1000), like).tolist() != (
        SystemSource().discrete_gaussian(Fraction(1000), like).tolist()
    )


@pytest.mark.parametrize("module", [laws, noise])
def test_no_generator_but_the_operating_system_is_imported(module):
    source = Path(module.__file__).read_text()
    names = {alias.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert not {
        name for name in names if name and name.split(".")[0] in {"random", "secrets", "jax", "scipy", "mpmath"}
    }
    attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert not attributes & {"random", "default_rng", "RandomState", "seed"}


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_noise_is_int32_and_shaped_like_its_argument(shape):
    for source in (SystemSource(), Silence()):
        for law in (DiscreteLaplace(Fraction(9)), DiscreteGaussian(Fraction(9)), Skellam(Fraction(9))):
            values = sample(source, law, np.empty(shape))
            assert (values.shape, values.dtype) == (shape, np.int32)
        values = source.uniform_below(9, np.empty(shape))
        assert (values.shape, values.dtype) == (shape, np.int32)


def test_silence_is_silent():
    assert not any(sample(Silence(), law, np.empty(100)).any() for law in LAWS)
    assert not Silence().uniform_below(5, np.empty(100)).any()


def test_too_little_entropy_stops_the_draw():
    with pytest.raises(CrowdmlError, match=r"gave 3 bytes where 80 were asked for\. No noise was drawn"):
        SystemSource(lambda _: b"abc").discrete_gaussian(Fraction(3), np.empty(10))


def test_noise_beyond_what_a_device_draws_is_refused():
    source, like = SystemSource(), np.empty(1)
    with pytest.raises(TaskError, match=r"sigma is 32769 grid steps.*coarser grid"):
        source.discrete_gaussian(Fraction(32769), like)
    with pytest.raises(TaskError, match=r"scale is 1\.04858e\+06 grid steps.*coarser grid"):
        source.discrete_laplace(Fraction(2**20 + 1), like)
    with pytest.raises(TaskError, match=r"variance is .* grid steps.*coarser grid"):
        source.skellam(Fraction(2**41), like)


@pytest.mark.parametrize("law", [DiscreteLaplace(Fraction(1, 10**9)), DiscreteGaussian(Fraction(1, 10**9))], ids=str)
def test_a_tiny_scale_gives_zeros_without_complaint(law):
    assert not draw(law, 1000).any()
