"""Mechanisms: calibration (the formula), distribution (many draws), sensitivity (adversarial neighbours), and audits.

A mechanism runs whole, from contributions to integers. Thousands of runs at once are a `vmap` over the keys of the
simulator's source; the device's source draws as many lanes of one release.
"""

import math
from dataclasses import replace
from fractions import Fraction

import jax
import mpmath
import numpy as np
import pytest
from audits import ALARM, FIVE_SIGMA, Stream, audited_epsilon, audited_mu, misfit
from bench import task_text
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from crowdml.errors import GuaranteeError, TaskError
from crowdml.privacy.calibration import rho_for
from crowdml.privacy.grid import COUNTS, Grid
from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace, Skellam
from crowdml.privacy.losses import ZCDP, Pure, Total, Unbounded
from crowdml.privacy.mechanisms import (
    KINDS,
    CountLaplace,
    Exposed,
    FromPublic,
    GaussianStable,
    GridGaussian,
    GridLaplace,
    RandomisedResponse,
    Selection,
    SkellamCount,
    SkellamStable,
    SkellamSum,
)
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.privacy.private import Rows
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.privacy.sensitivity import L1, L2, Adjacency, Observer
from crowdml.protocols.sgd import mechanisms, plan
from crowdml.task import parse

ROWS = Rows(0, 5)
STEP = Grid(Fraction(1, 16))
LAPLACE = GridLaplace(40, Fraction(2), STEP, ROWS, "a sum")
GAUSSIAN = GridGaussian(40, Fraction(1, 8), STEP, ROWS, "a sum")
ERRORS = CountLaplace(L1(Fraction(1)), Fraction(1), ROWS, "a count")
LABELS = CountLaplace(L1(Fraction(2)), Fraction(1), ROWS, "counts")
RESPONSE = RandomisedResponse(10, Fraction(5), ROWS, "labels")
EXPOSED = Exposed(L1(Fraction(0)), ROWS, "the sum as it is")
SHARES = (  # tests/privacy/test_skellam.py draws them
    SkellamSum(40, Fraction(900), 7, STEP, ROWS, 4, "a sum"),
    SkellamCount(L1(Fraction(2)), Fraction(6), 7, ROWS, 4, "counts"),
    SkellamStable(Fraction(2), Fraction(10), 4000, Fraction(900), 7, STEP, ROWS, 4, "a vector"),
)
STABLE = GaussianStable(Fraction(2), Fraction(10), 4000, Fraction(1, 8), STEP, ROWS, 4, "a vector")  # there too
TABLE = (LAPLACE, GAUSSIAN, ERRORS, LABELS, RESPONSE, EXPOSED, STABLE, *SHARES)
NOISY = (LAPLACE, GAUSSIAN, ERRORS, LABELS)
SOURCES = ("system", "seeded")


def source(kind, label):
    if kind == "system":
        return SystemSource(Stream(label))
    return SeededSource(stream(int.from_bytes(label.encode()[-4:], "big"), 1, 2))


def law(mechanism):
    return DiscreteGaussian(mechanism.sigma) if hasattr(mechanism, "sigma") else DiscreteLaplace(mechanism.scale)


def runs(mechanism, contributions, count, seed=5):
    """The whole mechanism, `count` times on the same contributions, each with noise of its own."""
    rows = jax.numpy.asarray(contributions)
    keys = stream(seed, np.arange(count), 0)
    return np.asarray(jax.jit(jax.vmap(lambda key: mechanism.draw(rows, SeededSource(key))))(keys))


def test_every_mechanism_is_tested_here():
    of_the_server = {Selection, FromPublic}  # tests/privacy/test_selection.py
    assert {type(mechanism) for mechanism in TABLE} | of_the_server == set(KINDS)


def test_every_mechanism_says_its_guarantee():
    for mechanism in TABLE:
        assert mechanism.observer is (Observer.AGGREGATE if mechanism in SHARES else Observer.ANYONE)
        assert mechanism.sensitivity.adjacency is Adjacency.REPLACE_SAMPLE
        assert mechanism.promise
        assert mechanism.kind
    assert len({type(m).__name__: m.kind for m in TABLE}.values()) == len({m.kind for m in TABLE})
    for cls in KINDS:
        text = cls.__doc__ or ""
        assert "Guarantee:" in text or "no guarantee" in text
        assert cls in (Exposed, FromPublic) or "docs/proofs/" in text


def test_a_mechanism_says_how_far_an_honest_entry_can_lie():
    """Five contributions of up to 40 steps, or one of them; five counts; a vector held within 4000 steps; and noise."""
    honest = {LAPLACE: (-200, 200), replace(GAUSSIAN, whole=True): (-40, 40), LABELS: (0, 5), STABLE: (-4000, 4000)}
    for row, (low, high) in honest.items():
        tail = law(row).tail(64)
        assert row.reach == (low - tail, high + tail)
    assert RESPONSE.reach == (0, 9)
    assert SHARES[0].reach == tuple(sign * (200 + Skellam(Fraction(900)).tail(64)) for sign in (-1, 1))
    with pytest.raises(TaskError, match="has no noise"):
        _ = EXPOSED.reach


def test_the_sum_of_a_cohort_reaches_all_bounds_and_six_deviations_of_its_noise():
    for row, bound in zip(SHARES, (200, 5, 4000), strict=True):
        noise = 6 * (math.isqrt(11 * int(row.variance)) + 1)
        assert (row.bound, row.slack_of_sum(11), row.reach_of_sum(11)) == (bound, noise, 11 * bound + noise)
    assert LABELS.reach_of_sum(11) == 11 * LABELS.reach[1]


def test_a_mechanism_states_the_variance_of_its_noise():
    for row in (*NOISY, STABLE):
        assert row.noise_variance == law(row).variance == row.law.variance
        assert row.law.deviation == pytest.approx(math.sqrt(law(row).variance) * float(row.grid.step))
    assert [row.noise_variance for row in SHARES] == [900, 6, 900]
    assert EXPOSED.noise_variance == RESPONSE.noise_variance == 0


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.kind)
def test_a_row_without_a_schedule_is_the_same_in_every_check_in(row):
    assert (row.scheduled, row.check_ins, row.at(3), row.share(3)) == (False, None, row, 1)
    assert row.total(4) == Total.of([row.loss]).scaled(4)
    assert (row.alone == row.loss) is (row not in SHARES)
    assert (row.device_alone == row.device_loss) is (row not in SHARES)


# Calibration


def test_the_scale_of_a_sum_is_twice_the_clip_over_epsilon():
    assert LAPLACE.sensitivity == L1(Fraction(80))
    assert LAPLACE.scale == Fraction(40) == 2 * LAPLACE.clip / LAPLACE.epsilon
    assert LAPLACE.loss == Pure(Fraction(2))
    assert LAPLACE.device_loss == Pure(Fraction(10))


def test_sigma_of_a_sum_proves_its_rho_and_hardly_more():
    assert GAUSSIAN.sensitivity == L2(Fraction(80))
    assert GAUSSIAN.sigma**2 >= Fraction(80) ** 2 / (2 * GAUSSIAN.rho)
    assert GAUSSIAN.sigma**2 <= Fraction(80) ** 2 / (2 * GAUSSIAN.rho) * (1 + Fraction(1, 10**8))
    assert GAUSSIAN.loss == ZCDP(Fraction(1, 8))
    assert GAUSSIAN.device_loss == ZCDP(Fraction(25, 8))


@given(st.integers(1, 46_000), st.fractions(Fraction(1, 10_000), 100))
@settings(max_examples=40, deadline=None)
def test_no_rounding_makes_noise_smaller_than_the_formula(clip, price):
    laplace, gaussian = replace(LAPLACE, clip=clip, epsilon=price), replace(GAUSSIAN, clip=clip, rho=price)
    assert laplace.scale * price >= 2 * clip
    assert 2 * price * gaussian.sigma**2 >= (2 * clip) ** 2


def test_counts_take_sensitivity_over_epsilon():
    assert ERRORS.scale == 1
    assert LABELS.scale == 2
    assert (ERRORS.loss, LABELS.loss) == (Pure(Fraction(1)), Pure(Fraction(1)))


def sgd_gradient(norm, mechanism, epsilon, batch):
    task = parse(
        task_text(norm=norm, mechanism=mechanism, batch=batch, dimension=50, epsilon=f"{{ gradient = {epsilon} }}")
    )
    return mechanisms(task)["gradient"], float(plan(task).grid.step)


@pytest.mark.parametrize(("batch", "epsilon", "scale"), [(20, 10.0, 0.02), (20, 1.0, 0.2), (1, 0.1, 40.0)])
def test_laplace_scales_of_the_review_as_averages(batch, epsilon, scale):
    row, step = sgd_gradient("l1", "discrete-laplace", epsilon, batch)
    found = float(row.scale) * step / batch
    assert scale <= found <= scale * (1 + 4 / row.clip)
    assert row.loss == Pure(Fraction(str(epsilon)))


@pytest.mark.parametrize(
    ("batch", "epsilon", "ratio"), [(20, 10.0, 0.569936), (20, 1.0, 4.530877), (1, 0.1, 39.46392), (60, 1.0, 4.530877)]
)
def test_gaussian_sigmas_on_the_zcdp_ledger_as_averages(batch, epsilon, ratio):
    """2 sqrt(2) / b for softmax on l2 features; the analytic sigmas of the review are 5 to 9 % smaller (R9)."""
    row, step = sgd_gradient("l2", "discrete-gaussian", epsilon, batch)
    sigma = 2 * math.sqrt(2) / batch * ratio
    found = float(row.sigma) * step / batch
    assert sigma * (1 - 1e-6) <= found <= sigma * (1 + 4 / row.clip)
    assert row.loss == ZCDP(rho_for(Fraction(str(epsilon)), 1e-6))


@pytest.mark.parametrize(
    ("as_published", "alpha", "zero", "variance"),
    [("false", 0.367879, 0.462117, 1.841347), ("true", 0.606531, 0.244919, 7.835396)],
)
def test_error_counts_of_the_review_sound_and_as_published(as_published, alpha, zero, variance):
    text = f"as_published = {as_published}\n" + task_text(epsilon="{ gradient = 1.0, errors = 1.0, labels = 1.0 }")
    table = mechanisms(parse(text))
    row = table["errors"]
    assert math.exp(-1 / row.scale) == pytest.approx(alpha, abs=5e-7)
    assert DiscreteLaplace(row.scale).pmf(np.array([0]))[0] == pytest.approx(zero, abs=5e-7)
    assert DiscreteLaplace(row.scale).variance == pytest.approx(variance, abs=5e-7)
    assert math.exp(-1 / table["labels"].scale) == pytest.approx(0.606531, abs=5e-7)
    assert row.loss == Pure(Fraction(1, 2) if as_published == "true" else Fraction(1))  # what the noise proves
    assert table["labels"].loss == Pure(Fraction(1))


@pytest.mark.parametrize(("norm", "mechanism"), [("l1", "discrete-laplace"), ("l2", "discrete-gaussian")])
@given(
    bound=st.sampled_from(["0.001", "0.3", "1.0", "7.0", "512.0", "1024.0"]),
    power=st.integers(-14, 6),
    part=st.floats(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_a_device_can_draw_the_noise_of_every_task_that_is_accepted(norm, mechanism, bound, power, part):
    price = f"{{ gradient = {part * 2.0**power:.12f} }}"
    text = task_text(norm=norm, mechanism=mechanism, epsilon=price).replace("bound = 1.0", f"bound = {bound}")
    try:
        row = mechanisms(parse(text))["gradient"]
    except TaskError as error:
        assert "privacy.epsilon.gradient is so small" in str(error)  # noqa: PT017  # either is fine, nothing else is
        return
    assert (row.sigma if norm == "l2" else row.scale) <= 2**15
    assert row.clip * row.grid.step >= plan(parse(text)).model.gradient_bound(norm, float(bound))


@pytest.mark.parametrize("epsilon", ["0.000123", "0.125"])
def test_a_clip_that_rounds_up_does_not_take_the_noise_off_the_grid(epsilon):
    text = task_text(norm="l1", mechanism="discrete-laplace", epsilon=f"{{ gradient = {epsilon} }}")
    for bound in ("1.0", "1024.0"):
        row = mechanisms(parse(text.replace("bound = 1.0", f"bound = {bound}")))["gradient"]
        assert row.draw(np.zeros((5, 4, 3)), SystemSource(Stream("drawn"))).shape == (4, 3)


# Distribution


def many(mechanism, kind):
    """Many noises of a release of zeros: lanes of one release, or releases of a single count."""
    if mechanism is not ERRORS:
        return mechanism.draw(np.zeros((5, 100_000)), source(kind, f"{mechanism.kind} {mechanism.sensitivity}"))
    if kind == "seeded":
        return runs(ERRORS, np.zeros((5, 1)), 100_000)
    noise = source(kind, "errors")
    return np.concatenate([ERRORS.draw(np.zeros((5, 1)), noise) for _ in range(5_000)])


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("mechanism", NOISY, ids=lambda m: f"{m.kind} {float(m.sensitivity.bound)}")
def test_noise_of_a_release_has_the_law_that_its_loss_asks_for(mechanism, kind):
    values = many(mechanism, kind)
    n = values.size
    assert values.dtype == np.int32
    assert misfit(values, law(mechanism)) < 1
    sd = math.sqrt(law(mechanism).variance)
    assert abs(values.std() / sd - 1) < FIVE_SIGMA * math.sqrt(6 / n) / 2  # kurtosis of a Laplace at most


@pytest.mark.parametrize("kind", SOURCES)
def test_the_mean_absolute_noise_of_a_laplace_sum_is_its_scale(kind):
    n = 25_485  # finds an error of 5 % with probability 0.999
    wide = replace(LAPLACE, clip=4000)
    values = np.abs(wide.draw(np.zeros((5, n)), source(kind, "mean absolute")).astype(float))
    assert abs(values.mean() / float(wide.scale) - 1) * math.sqrt(n) < FIVE_SIGMA


@pytest.mark.parametrize("kind", SOURCES)
def test_the_deviation_of_a_gaussian_sum_is_its_sigma(kind):
    n = 12_743
    wide = replace(GAUSSIAN, clip=4000)
    values = wide.draw(np.zeros((5, n)), source(kind, "deviation")).astype(float)
    assert abs(values.std() / float(wide.sigma) - 1) * math.sqrt(2 * n) < FIVE_SIGMA


@pytest.mark.parametrize("kind", SOURCES)
def test_two_releases_share_no_noise(kind):
    noise = source(kind, "twice")
    first, second = (GAUSSIAN.draw(np.zeros((5, 50_000)), noise).astype(float) for _ in range(2))
    assert abs(np.corrcoef(first, second)[0, 1]) * math.sqrt(50_000) < FIVE_SIGMA
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) * math.sqrt(50_000) < FIVE_SIGMA


@pytest.mark.parametrize("mechanism", NOISY, ids=lambda m: f"{m.kind} {float(m.sensitivity.bound)}")
def test_noise_is_added_to_the_sum_after_the_rows_were_clipped(mechanism):
    rows = np.zeros((5, 1 if mechanism is ERRORS else 4))
    rows[:, 0] = 1e6
    values = runs(mechanism, rows, 20_000)
    clean = mechanism.draw(rows, Silence())
    assert clean[0] == 5 * getattr(mechanism, "clip", 1)
    sd = math.sqrt(law(mechanism).variance)
    assert np.all(np.abs(values.mean(0) - clean) < FIVE_SIGMA * sd / math.sqrt(20_000))
    assert np.all(np.abs(values.std(0) / sd - 1) < 0.06)
    assert misfit(values - clean, law(mechanism)) < 1


# Sensitivity

VALUES = (np.nan, np.inf, -np.inf, 3.4e38, -1e30, 1e-42, 0.0, -1.0, 0.5, 1.0, 2.0, 2.5, -2.5, 1e6)


def adversaries(width):
    rows = [value * np.eye(width)[k] for value in VALUES if np.isfinite(value) for k in range(width)]
    rows += [np.where(np.arange(width) == 0, value, other) for value in VALUES for other in VALUES]
    with np.errstate(over="ignore"):
        return np.asarray(rows).astype(np.float32)


@pytest.mark.parametrize("mechanism", NOISY, ids=lambda m: f"{m.kind} {float(m.sensitivity.bound)}")
def test_adversarial_neighbours_move_a_release_by_at_most_its_sensitivity_and_nearly_by_that(mechanism):
    width = 1 if mechanism is ERRORS else 4
    others = np.ones((4, width), np.float32)
    sums = np.stack([mechanism.draw(np.stack([row, *others]), Silence()) for row in adversaries(width)]).astype(
        np.int64
    )
    norm = 2 if isinstance(mechanism.sensitivity, L2) else 1
    far = np.linalg.norm(sums[:, None] - sums[None], norm, axis=2).max()
    assert far <= mechanism.sensitivity.bound
    assert far >= 0.9 * mechanism.sensitivity.bound


@pytest.mark.parametrize("mechanism", NOISY, ids=lambda m: f"{m.kind} {float(m.sensitivity.bound)}")
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_generated_neighbours_move_a_release_by_at_most_its_sensitivity(mechanism, data):
    width = 1 if mechanism is ERRORS else 3
    entries = st.one_of(st.sampled_from(VALUES[4:]), st.floats(width=32))
    first = data.draw(arrays(np.float32, (5, width), elements=entries))
    second = first.copy()
    second[data.draw(st.integers(0, 4))] = data.draw(arrays(np.float32, width, elements=entries))
    moved = mechanism.draw(first, Silence()).astype(float) - mechanism.draw(second, Silence())
    assert np.linalg.norm(moved, 2 if isinstance(mechanism.sensitivity, L2) else 1) <= mechanism.sensitivity.bound


@pytest.mark.parametrize("mechanism", NOISY, ids=lambda m: f"{m.kind} {float(m.sensitivity.bound)}")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_what_is_no_number_is_released_as_zero_with_the_same_noise(mechanism, bad):
    key = stream(3, 4, 5)
    rows = np.full((5, 1 if mechanism is ERRORS else 3), bad, np.float32)
    said = mechanism.draw(rows, SeededSource(key))
    np.testing.assert_array_equal(said, mechanism.draw(np.zeros_like(rows), SeededSource(key)))
    assert said.dtype == np.int32


def test_counts_in_several_cells_need_a_sensitivity_of_two():
    with pytest.raises(GuaranteeError, match=r"Counts in 3 cells move by 2.*the table says 1.*Put L1\(2\)"):
        ERRORS.draw(np.zeros((5, 3)), Silence())
    with pytest.raises(GuaranteeError, match="A count moves by at least 1; a sensitivity of 1/2 is too small"):
        replace(ERRORS, sensitivity=L1(Fraction(1, 2)))


# Randomised response


@pytest.mark.parametrize(("classes", "epsilon", "keep"), [(10, 5, 0.942826), (2, 1, 0.731059), (3, "0.1", 0.355913)])
def test_randomised_response_keeps_a_label_as_often_as_its_formula_says(classes, epsilon, keep):
    row = replace(RESPONSE, classes=classes, epsilon=Fraction(epsilon))
    assert float(row.keep) == pytest.approx(keep, abs=2e-6)
    n = 100_000
    for kind in SOURCES:
        said = row.draw(np.full(n, 1), source(kind, f"response {classes}"))
        seen = np.bincount(said, minlength=classes)
        expected = np.full(classes, n * (1 - keep) / (classes - 1))
        expected[1] = n * keep
        assert ((seen - expected) ** 2 / expected).sum() < stats.chi2.isf(ALARM, classes - 1)


@given(st.integers(2, 1000), st.fractions(Fraction(1, 1000), 64))
@settings(max_examples=60, deadline=None)
def test_no_answer_of_randomised_response_is_likelier_than_epsilon_allows(classes, epsilon):
    row = replace(RESPONSE, classes=classes, epsilon=epsilon)
    other = (1 - row.keep) / (classes - 1)
    with mpmath.workdps(50):
        limit = mpmath.exp(mpmath.mpf(epsilon.numerator) / epsilon.denominator)
        for ratio in (row.keep / other, other / row.keep):
            assert mpmath.mpf(ratio.numerator) / ratio.denominator <= limit


def test_randomised_response_that_thirty_bits_cannot_prove_is_refused():
    for classes, epsilon in ((1, 1), (2, 65), (2, "1e-7"), (10**6, "1e-6")):
        with pytest.raises(GuaranteeError, match=rf"over {classes} classes at epsilon .*30 bits"):
            replace(RESPONSE, classes=classes, epsilon=Fraction(epsilon))


@pytest.mark.parametrize("label", [-1, 10, np.nan, 1e30, -np.inf])
def test_a_label_that_does_not_exist_is_answered_as_label_zero(label):
    key = stream(1, 2, 3)
    said = RESPONSE.draw(np.array([label]), SeededSource(key))
    assert said == RESPONSE.draw(np.array([0]), SeededSource(key))


# Audits (review, section 7)

AUDITED = 100_000


def test_the_review_s_audit_vector():
    assert audited_epsilon(50_000, 18_394, AUDITED) == pytest.approx(0.967695, abs=5e-7)


def audit_sum(mechanism, seed):
    """The event "at least f(D')" on two neighbours that are as far apart as they can be."""
    low, high = np.zeros((5, 3)), np.zeros((5, 3))
    low[0, 0], high[0, 0] = -1e6, 1e6
    cut = mechanism.draw(high, Silence())[0]
    on, off = (runs(mechanism, rows, AUDITED, seed + i)[:, 0] >= cut for i, rows in enumerate((high, low)))
    return audited_epsilon(int(on.sum()), int(off.sum()), AUDITED)


def test_an_audit_of_a_laplace_sum_finds_no_more_than_it_claims_and_finds_halved_noise():
    honest = replace(LAPLACE, epsilon=Fraction(1), clip=500)
    assert 0.94 < audit_sum(honest, 20) <= 1
    assert audit_sum(replace(honest, epsilon=Fraction(2)), 30) == pytest.approx(1.95, abs=0.05)


def test_an_audit_of_counts_finds_no_more_than_they_claim():
    one, none = np.zeros((5, 1)), np.zeros((5, 1))
    one[0] = 1
    on, off = (int((runs(ERRORS, rows, AUDITED, 40 + i)[:, 0] >= 1).sum()) for i, rows in enumerate((one, none)))
    assert 0.94 < audited_epsilon(on, off, AUDITED) <= 1
    left, right = np.zeros((5, 3)), np.zeros((5, 3))
    left[0, 0] = right[0, 2] = 1
    said = [runs(LABELS, rows, AUDITED, 50 + i) for i, rows in enumerate((left, right))]
    on, off = (int(((value[:, 0] >= 1) & (value[:, 2] <= 0)).sum()) for value in said)
    assert 0.9 < audited_epsilon(on, off, AUDITED) <= 1


def test_an_audit_of_randomised_response_finds_no_more_than_it_claims():
    row = replace(RESPONSE, classes=2, epsilon=Fraction(1))
    on, off = (int((runs(row, np.full(1, label), AUDITED, 60 + label) == 0).sum()) for label in (0, 1))
    assert 0.94 < audited_epsilon(on, off, AUDITED) <= 1


def test_an_audit_of_a_gaussian_sum_finds_no_more_than_its_mu_and_finds_halved_noise():
    low, high = np.zeros((5, 3)), np.zeros((5, 3))
    low[0, 0], high[0, 0] = -1e6, 1e6

    def audit(mechanism, seed):
        on, off = (
            int((runs(mechanism, rows, AUDITED, seed + i)[:, 0] >= 0).sum()) for i, rows in enumerate((high, low))
        )
        return audited_mu(on, off, AUDITED)

    honest = replace(GAUSSIAN, rho=Fraction(1, 2), clip=500)  # mu = 1
    assert 0.95 < audit(honest, 70) <= 1
    assert audit(replace(honest, rho=2), 80) == pytest.approx(1.97, abs=0.03)


# Without noise


def test_what_is_exposed_says_so_and_costs_everything():
    rows = np.arange(6.0).reshape(3, 2)
    assert EXPOSED.draw(rows, Silence()).tolist() == [6.0, 9.0]
    assert EXPOSED.loss == EXPOSED.device_loss == Unbounded()
    assert EXPOSED.kind == "none"
    assert COUNTS.step == 1
