"""The baselines, and the findings of the review that concern them: H3, H6, H7, H8."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.datasets import blobs, iid
from crowdml.errors import TaskError
from crowdml.experiments import baselines
from crowdml.experiments.crowds import Choice, Size, devices_for, label, learn, looks, make_task
from crowdml.experiments.hamm2015 import when_label_changes
from crowdml.experiments.tuning import FOLDS, trial_crowds
from crowdml.models import make_model
from crowdml.price import Price
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import find
from crowdml.protocols.sgd import Params, plan
from crowdml.turn import check_in

DATA = blobs(rows=1200, features=6, classes=3, seed=1, normalise="l1")
MNIST_LIKE = blobs(rows=1200, features=50, classes=10, seed=1, normalise="l1")


def laplace_task(batch: int, data=MNIST_LIKE):
    return make_task(data, Choice(1.0, batch), epsilon=10.0, mechanism="discrete-laplace", as_published=True)


def test_h2_five_passes_cost_five_times_what_the_paper_claims() -> None:
    privacy = label(laplace_task(20), passes=5, as_published=True)
    assert (privacy.epsilon, privacy.claimed, privacy.delta) == (50.0, 10.0, 0.0)
    assert label(laplace_task(20), passes=1).epsilon == 10.0


def test_l1_a_label_that_says_no_delta_has_the_pure_total_however_many_passes() -> None:
    little = make_task(MNIST_LIKE, Choice(1.0, 20), epsilon=0.01, mechanism="discrete-laplace")
    privacy = label(little, passes=2000)
    assert (privacy.epsilon, privacy.delta) == (20.0, 0.0)
    assert Price.of(find(little), little).sample_epsilon(2000) < 3  # at delta = 1e-6


def test_m2_passes_over_a_buffer_that_overflows_are_refused_in_figures_too() -> None:
    size = Size(devices=20, passes=2, trials=1, looks=1, workers=1)
    with pytest.raises(TaskError, match=r"protocol\.buffer = 100"):
        learn(make_task(DATA, Choice(1.0, 10), epsilon=None), DATA, size, delay=10_000.0)


def test_h3_a_label_trigger_tells_labels_by_the_number_of_check_ins_and_a_public_clock_does_not() -> None:
    still, walk = np.array([0, 0, 0, 0]), np.array([0, 1, 0, 0])  # SSSS and SWSS: one sample replaced
    assert when_label_changes(still)[1:].sum() == 0
    assert when_label_changes(walk)[1:].sum() == 2
    every_window = np.ones(4, bool)  # by public clock the transcript has one shape
    assert every_window.sum() == len(still) == len(walk)


def test_h6_the_noise_of_a_check_in_has_the_factor_of_classes_that_eq_13_leaves_out() -> None:
    batch, d, c = 5, 50, 10
    task = laplace_task(batch)
    fixed = plan(task)
    zeros = np.zeros((d, c), np.float32)
    samples = Samples(MNIST_LIKE.x_train[:batch], MNIST_LIKE.y_train[:batch])
    exact = fixed.model.gradients(zeros, samples).sum(0) / batch
    noise = []
    for trip in range(400):
        source = SeededSource(stream(5, 0, trip))
        said = check_in(find(task), task, samples, Params(zeros, np.int32(0)), noise=source, me="device").message
        noise.append(((fixed.grid.decode(said.gradient.value) / batch - exact) ** 2).sum())
    printed, corrected = 32 * d / (batch * 10) ** 2, 32 * d * c / (batch * 10) ** 2
    assert np.mean(noise) == pytest.approx(corrected, rel=0.03)
    assert np.mean(noise) > 9 * printed


def test_h7_the_papers_label_perturbation_keeps_0_575_where_the_same_budget_keeps_0_943() -> None:
    assert baselines.kept_labels(5.0, 10, fair=False) == pytest.approx(math.exp(2.5) / (math.exp(2.5) + 9))
    assert round(baselines.kept_labels(5.0, 10, fair=False), 3) == 0.575
    assert round(baselines.kept_labels(5.0, 10, fair=True), 3) == 0.943
    rng = np.random.default_rng(7)
    x, y = np.zeros((40_000, 1), np.float32), rng.integers(0, 10, 40_000).astype(np.int32)
    for fair, kept in ((False, 0.5750), (True, 0.9428)):
        told = baselines.perturb(x, y, 10, 10.0, np.random.default_rng(8), fair=fair)
        assert (told.y == y).mean() == pytest.approx(kept, abs=5 * math.sqrt(0.25 / 40_000))
        wrong = told.y[told.y != y]
        assert np.bincount(wrong, minlength=10).min() > 0.8 * len(wrong) / 10


def test_h7_the_papers_label_perturbation_costs_half_of_what_it_is_charged() -> None:
    odds = baselines.kept_labels(5.0, 10, fair=False) / ((1 - baselines.kept_labels(5.0, 10, fair=False)) / 9)
    assert math.log(odds) == pytest.approx(2.5)
    rng = np.random.default_rng(1)
    x, y = DATA.x_train, DATA.y_train
    assert baselines.perturb(x, y, 3, 10.0, rng, fair=False).epsilon == 7.5
    assert baselines.perturb(x, y, 3, 10.0, rng, fair=True).epsilon == 10.0


def test_h8_all_of_a_devices_sixty_samples_cost_sixty_times_as_much() -> None:
    price = Price.of(find(laplace_task(20)), laplace_task(20))
    assert price.sample_epsilon(1) == pytest.approx(10.0)
    assert price.device_epsilon(3) == pytest.approx(600.0)  # three check-ins of 20: one pass


def test_perturbed_features_have_laplace_noise_of_scale_two_over_half_the_epsilon() -> None:
    x = np.zeros((20_000, 2), np.float32)
    told = baselines.perturb(x, np.zeros(20_000, np.int32), 2, 10.0, np.random.default_rng(3), fair=True)
    assert np.abs(told.x).mean() == pytest.approx(2 / 5, rel=5 / math.sqrt(40_000))


def test_batch_training_ends_where_the_gradient_is_zero() -> None:
    weights = baselines.batch(DATA.x_train, DATA.y_train, 3, l2=0.01)
    model = make_model("softmax", 6, 3)
    slope = model.gradients(weights, Samples(DATA.x_train, DATA.y_train)).mean(0) + 0.01 * weights
    assert np.abs(slope).max() < 1e-4


def test_central_sgd_is_the_paper_s_update_written_out() -> None:
    order = np.random.default_rng(2).integers(0, 1200, (12, 4))
    points, found = baselines.central_sgd(DATA.x_train, DATA.y_train, 3, order, c=5.0, radius=2.0, looks=3)
    model = make_model("softmax", 6, 3)
    weights = np.zeros((6, 3))
    seen = []
    for t, rows in enumerate(order, start=1):
        mean = model.gradients(weights, Samples(DATA.x_train[rows].astype(float), DATA.y_train[rows])).mean(0)
        weights = weights - 5.0 / math.sqrt(t) * mean
        weights = weights * min(1.0, 2.0 / max(np.linalg.norm(weights), 1e-30))
        if t in points:
            seen.append(weights)
    assert list(points) == [4, 8, 12]
    np.testing.assert_allclose(found, np.stack(seen), atol=1e-5)


def test_a_device_alone_learns_as_central_sgd_on_its_rows() -> None:
    population = iid(1200, 40, 3)
    alone = baselines.decentralised(
        DATA.x_train, DATA.y_train, 3, population, c=3.0, radius=100.0, passes=2, looks=np.array([30, 60])
    )
    order = np.tile(population.rows[7], 2)[:, None]
    _, central = baselines.central_sgd(DATA.x_train, DATA.y_train, 3, order, c=3.0, radius=100.0, looks=2)
    np.testing.assert_allclose(alone[:, 7], central, atol=1e-5)


def test_errors_of_models_and_of_devices_alone_agree() -> None:
    weights = np.random.default_rng(4).normal(size=(2, 5, 6, 3)).astype(np.float32)
    dealt = np.tile(np.arange(100), (5, 1))
    each = baselines.errors(weights, DATA.x_test[:100], DATA.y_test[:100])
    assert each.shape == (2, 5)
    together = baselines.alone_errors(weights, DATA.x_test, DATA.y_test, dealt)
    np.testing.assert_allclose(together, each.mean(1), atol=1e-6)


def test_a_crowd_uses_every_sample_once_a_pass_and_trials_differ() -> None:
    size = Size(devices=20, passes=2, trials=2, looks=4, workers=1)
    curves = learn(make_task(DATA, Choice(10.0, 10), epsilon=None), DATA, size)
    assert curves.samples.tolist() == [600, 1200, 1800, 2400]
    assert curves.weights.shape == (2, 4, 6, 3)
    assert not np.allclose(curves.weights[0], curves.weights[1])
    first, second = curves.schedules
    assert not np.array_equal(np.sort(first.time), np.sort(second.time))
    for schedule in curves.schedules:
        pairs = np.stack([np.repeat(schedule.device, 10), schedule.samples.ravel()], axis=1)
        assert len(np.unique(pairs, axis=0)) == len(pairs) == 2400


def test_looks_are_evenly_spaced_with_more_of_them_early_on_request() -> None:
    assert looks(100, 4) == [25, 50, 75, 100]
    assert looks(40, 2, early=True) == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 40]
    assert looks(3, 10) == [1, 2, 3]


def test_tuning_never_scores_a_public_row_that_its_crowd_learned_from() -> None:
    public, tried = trial_crowds(DATA, Size(devices=10))
    assert len(tried) == FOLDS
    for trial in tried:
        learned = {row.tobytes() for row in public.x_train[trial.population.rows.ravel()]}
        assert learned <= {row.tobytes() for row in DATA.x_public}
        assert not learned & {row.tobytes() for row in trial.x}
    assert np.concatenate([trial.x for trial in tried]).tobytes() == DATA.x_public.tobytes()


def test_rows_are_shared_evenly_by_as_many_devices_as_possible() -> None:
    rows = {count: replace(DATA, y_train=np.zeros(count, np.int32)) for count in (59_760, 60_000, 50_000)}
    assert [devices_for(data, 1000) for data in rows.values()] == [996, 1000, 1000]
    assert devices_for(rows[59_760], 10_000) == 9960


def test_public_only_learns_from_public_rows_and_from_nothing_else() -> None:
    model = make_model("softmax", DATA.features, len(DATA.classes))
    found = baselines.public_only(model, DATA, steps=50)
    assert found < 0.5
    assert found == baselines.public_only(model, replace(DATA, x_train=-DATA.x_train[:3]), steps=50)
    assert found != baselines.public_only(model, replace(DATA, y_public=(DATA.y_public + 1) % 3), steps=50)
