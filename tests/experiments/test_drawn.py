"""Digits drawn by code: what settings of figures on MNIST are chosen on, with no row of a device among them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from crowdml.datasets import Dataset, blobs
from crowdml.experiments import drawn, local_tuning, tuning
from crowdml.experiments.crowds import Size
from crowdml.experiments.figure import MAIN
from crowdml.experiments.frontiers import LocalChoice


def fake_mnist(name: str, features: int) -> Dataset:
    """A data set in MNIST's form whose every row of a device or a test would be seen at once: it is not finite."""
    made = blobs(rows=300, features=features, classes=10, seed=1, normalise="none")
    nothing = np.full_like(made.x_train, np.nan)
    return replace(made, name=name, x_train=nothing, x_test=nothing[: len(made.x_test)])


@pytest.fixture
def no_mnist(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"mnist": 6, "mnist-pixels": 784}
    monkeypatch.setattr(drawn, "load", lambda name, normalise: fake_mnist(name, sizes[name]))


def test_drawings_are_pictures_of_all_ten_digits_and_the_same_for_the_same_seed() -> None:
    pictures, labels = drawn.draw_digits(300, np.random.default_rng(3))
    again, _ = drawn.draw_digits(300, np.random.default_rng(3))
    assert pictures.tobytes() == again.tobytes()
    assert pictures.shape == (300, 784)
    assert pictures.min() == 0
    assert pictures.max() == 1
    assert set(labels.tolist()) == set(range(10))
    assert (pictures.sum(axis=1) > 10).all()


def test_drawings_of_one_digit_are_nearer_to_its_mean_than_to_that_of_another() -> None:
    x, y = drawn.draw_digits(1200, np.random.default_rng(4))
    means = np.stack([x[:800][y[:800] == digit].mean(axis=0) for digit in range(10)])
    nearest = ((x[800:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == y[800:]).mean() > 0.6


@pytest.mark.parametrize("name", ["mnist", "mnist-pixels"])
@pytest.mark.usefixtures("no_mnist")
def test_a_crowd_of_drawings_has_no_row_of_a_device_or_a_test(name: str) -> None:
    crowd = drawn.drawn_crowd(name, "l2", train=40, test=20)
    assert (crowd.x_train.shape[0], crowd.x_test.shape[0]) == (40, 20)
    assert np.isfinite(crowd.x_train).all()
    assert np.isfinite(crowd.x_test).all()
    assert not {row.tobytes() for row in crowd.x_train} & {row.tobytes() for row in crowd.x_test}


@pytest.mark.usefixtures("no_mnist")
def test_settings_of_mnist_are_tried_on_drawings_and_on_nothing_of_mnists(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(name: str, norm: str) -> Dataset:
        return drawn.drawn_crowd(name, norm, train=40, test=20)  # type: ignore[arg-type]

    monkeypatch.setattr(tuning, "drawn_crowd", few)
    crowd, tried = tuning.trial_crowds(fake_mnist("mnist", 6), Size(devices=4))
    assert crowd.name == "drawn-digits"
    assert len(tried) == tuning.FOLDS
    for trial in tried:
        assert trial.population.rows.shape == (4, 10)
        assert trial.x.tobytes() == crowd.x_test.tobytes()


def test_one_setting_of_a_network_is_tried_at_a_time_and_a_clip_leaves_the_servers_step_as_long() -> None:
    choice = LocalChoice(rounds=40, steps=4, rate=2.0, clip=0.1, server_rate=5.0)
    tried = local_tuning.Tried("key", "name", choice, lambda settings: settings)
    for axis in local_tuning.AXES:
        assert tried.varied(axis, 1.0) == choice
        name = "server_rate" if axis == MAIN else axis
        other = tried.varied(axis, 0.5)
        assert getattr(other, name) == getattr(choice, name) / 2
        if axis != "clip":
            assert replace(other, **{name: getattr(choice, name)}) == choice
    assert tried.varied("clip", 2.0).server_rate * tried.varied("clip", 2.0).clip == choice.server_rate * choice.clip
