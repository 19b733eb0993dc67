"""SecProbe's figures: what is spoiled, what a constant has, whom root rows leave out, which label a curve has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from crowdml.experiments import unreliable, zhao
from crowdml.experiments.figure import PrivacyLabel
from crowdml.experiments.published.secprobe import Published
from crowdml.protocols import gram
from crowdml.second_moments import label_rows


@pytest.fixture(scope="module")
def case() -> zhao.Case:
    return zhao.census_case(True, 1, 1)


def test_no_constant_has_a_smaller_mre_on_the_public_rows_than_the_one_of_the_line(case: zhao.Case) -> None:
    tested = replace(case.plain, x_test=case.plain.x_public, y_test=case.plain.y_public)
    found = replace(case, plain=tested).constant
    tried = [case.score_on(np.full(len(tested.y_test), each), tested.y_test) for each in np.linspace(0.05, 1, 400)]
    assert found <= min(tried) + 1e-9
    assert found == pytest.approx(min(tried), abs=1e-3)
    digits = zhao.digits_case(True, 1, 1)
    assert digits.constant == pytest.approx((digits.plain.y_test == np.bincount(digits.plain.y_public).argmax()).mean())


def test_a_measure_is_worse_if_an_mre_is_larger_and_an_accuracy_smaller(case: zhao.Case) -> None:
    digits = zhao.digits_case(True, 1, 1)
    assert case.worse(0.3, 0.2) == pytest.approx(0.1)
    assert digits.worse(0.3, 0.2) == pytest.approx(-0.1)
    assert case.score_on(np.array([0.3, 0.5]), np.array([0.2, 0.5])) == pytest.approx(0.25)
    assert digits.score_on(np.array([1, 2]), np.array([1, 1])) == 0.5


def test_the_first_round_at_a_threshold_counts_and_one_more_than_all_stands_for_never() -> None:
    told = np.array([0.5, 0.2, 0.3, 0.1])
    assert zhao.reached(told, 0.2) == 2
    assert zhao.reached(told, 0.05) == 5


def test_z1_a_trained_hidden_layer_has_no_epsilon_and_a_kept_one_pays_for_every_epoch() -> None:
    plan = Published(152, 100, 30, 30)
    assert zhao.published_label(plan, 8333, 30) == PrivacyLabel(
        as_published=True, not_covered=("hidden-layer", "float-noise")
    )
    kept = zhao.published_label(replace(plan, train_hidden=False, noise="iteration"), 8333, 30)
    assert (kept.epsilon, kept.claimed) == (234, 1.0)
    once = zhao.published_label(replace(plan, train_hidden=False, noise="once"), 8333, 30)  # Z2
    assert once == PrivacyLabel(as_published=True, not_covered=("float-noise",))
    assert zhao.published_label(replace(plan, epsilon=None), 8333, 30) == PrivacyLabel(as_published=True)


def test_a_share_of_participants_is_spoiled_in_a_part_of_its_rows() -> None:
    x, y = np.full((10, 20, 3), 7.0, np.float32), np.full((10, 20), 7.0, np.float32)
    told, labels = unreliable.spoiled(x, y, 0.3, 0.25, 1)
    bad = (told != 7).all(2)
    assert np.array_equal(bad, labels != 7)
    assert sorted(bad.sum(1)) == [0] * 7 + [5] * 3
    assert 0 <= told[bad].min() < told[bad].max() <= 1
    assert 0.05 <= labels[bad].min() < labels[bad].max() <= 1
    assert (x == 7).all()
    _, classes = unreliable.spoiled(x, np.tile(np.arange(20) % 4, (10, 1)), 1.0, 1.0, 1)
    assert set(classes.ravel()) == {0, 1, 2, 3}


def test_moments_are_those_of_each_participant_and_an_upload_has_noise_of_its_own(case: zhao.Case) -> None:
    x, y = case.shares(4, 1)
    fixed = gram.plan(zhao.make_task(case.sharp, 4, 1.0))
    exact = zhao.moments_of(fixed, case.features(x), y)
    rows = np.concatenate([fixed.map(case.features(x[2])), label_rows(fixed, y[2])], axis=1)
    assert np.array_equal(exact[2], fixed.mechanism.moments(rows))
    many = [unreliable.uploads_of(case, fixed, x, y, seed) - exact for seed in range(60)]
    spread = np.std(np.stack(many)[..., -fixed.mechanism.features :])
    assert spread == pytest.approx(np.sqrt(4 * float(fixed.mechanism.variance)), rel=0.05)  # all of the noise, each


def test_root_rows_leave_out_random_uploads_and_no_order_of_uploads_matters(case: zhao.Case) -> None:
    x, y = case.shares(12, 1)
    fixed = gram.plan(zhao.make_task(case.sharp, 12, 1000.0))
    honest, lied = (unreliable.uploads_of(case, fixed, x, y, 1, liars) for liars in (0, 6))
    assert (honest != lied).any(1).sum() == 6

    def score(uploads: np.ndarray, rule=unreliable.by_root_rows) -> float:
        return case.score(zhao.held_predictions(fixed, rule(case, fixed, uploads), case.sharp.x_test))

    clean = score(honest, unreliable.everybody)
    assert score(lied) <= clean + 0.02
    assert score(lied, unreliable.everybody) > clean + 0.05
    assert score(lied[::-1]) == pytest.approx(score(lied))


def test_special_rows_are_with_special_participants_alone(case: zhao.Case) -> None:
    ends = tuple(np.quantile(case.plain.x_train[:, 0], [0.25, 0.75]))
    parts = {name: zhao.split_by(case, 0, ends, name == "special") for name in ("usual", "special")}
    x, y = zhao.special_crowd(parts, 10, 3, 1)
    outside = (x[..., 0] <= ends[0]) | (x[..., 0] >= ends[1])
    assert outside[-3:].all()
    assert not outside[:-3].any()
    assert len(parts["usual"].plain.y_test) + len(parts["special"].plain.y_test) == len(case.plain.y_test)
    assert y.shape == x.shape[:2]
