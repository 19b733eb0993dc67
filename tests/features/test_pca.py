"""Principal components: against scikit-learn, with fixed signs, and dependent on the fitted rows alone."""

from __future__ import annotations

import numpy as np
import pytest

from crowdml.errors import DataError
from crowdml.features import Pca

ROWS = np.random.default_rng(5).standard_normal((400, 12)) @ np.diag(np.arange(12, 0, -1.0)) + 3


def test_components_are_those_of_scikit_learn_up_to_sign():
    theirs = pytest.importorskip("sklearn.decomposition").PCA(5, svd_solver="full").fit(ROWS)
    ours = Pca.fit(ROWS, 5)
    np.testing.assert_allclose(np.abs(ours.components.T), np.abs(theirs.components_), atol=1e-8)
    np.testing.assert_allclose(ours.mean, theirs.mean_)
    np.testing.assert_allclose(ours.variance * 400 / 399, theirs.explained_variance_)


def test_the_largest_entry_of_every_component_is_positive():
    components = Pca.fit(ROWS, 12).components
    assert (components[np.abs(components).argmax(axis=0), range(12)] > 0).all()
    np.testing.assert_allclose(components.T @ components, np.eye(12), atol=1e-10)


def test_fitting_twice_gives_the_same_bits_and_negated_rows_the_same_components():
    assert Pca.fit(ROWS, 4).components.tobytes() == Pca.fit(ROWS.copy(), 4).components.tobytes()
    np.testing.assert_allclose(Pca.fit(-ROWS, 4).components, Pca.fit(ROWS, 4).components, atol=1e-10)


def test_transform_centres_projects_and_is_the_same_in_blocks():
    pca = Pca.fit(ROWS, 3)
    many = np.tile(ROWS, (50, 1))
    np.testing.assert_allclose(pca.transform(many), (many - pca.mean) @ pca.components, rtol=1e-5, atol=1e-5)
    assert pca.transform(ROWS[:0]).shape == (0, 3)


@pytest.mark.parametrize("dimension", [0, 13])
def test_an_impossible_dimension_is_refused_with_what_is_possible(dimension):
    with pytest.raises(DataError, match="1 to 12"):
        Pca.fit(ROWS, dimension)


def test_non_finite_rows_and_rows_of_another_width_are_refused():
    with pytest.raises(DataError, match="not finite"):
        Pca.fit(np.where(ROWS > 20, np.nan, ROWS), 2)
    with pytest.raises(DataError, match="12 features"):
        Pca.fit(ROWS, 2).transform(ROWS[:, :5])


def test_sharpened_rows_have_norm_one_at_most_and_end_in_the_constant():
    pca = Pca.fit(ROWS, 5)
    wild = np.vstack([ROWS * 1e6, np.zeros(12), pca.mean, np.full(12, np.nan)])
    found = pca.sharpen(wild, power=0.25, floor=0.01, constant=0.3).astype(np.float64)
    assert found.shape == (403, 6)
    assert (np.sqrt((found**2).sum(1)) <= 1).all()
    np.testing.assert_allclose(np.sqrt((found[:400] ** 2).sum(1)), 1, atol=1e-6)
    np.testing.assert_array_equal(found[:, 5], np.float32(0.3))
    np.testing.assert_array_equal(found[401:, :5], 0)  # the mean itself, and what is not finite


def test_sharpening_tones_down_what_varies_much():
    pca = Pca.fit(ROWS, 12)
    spread = [
        pca.sharpen(ROWS, power=power, floor=1e-9, constant=0.1)[:, :12].std(axis=0) for power in (0.0, 0.25, 0.5)
    ]
    ratios = [each.max() / each.min() for each in spread]
    assert ratios[0] > 2 * ratios[1] > 2 * ratios[2]
    assert ratios[2] == pytest.approx(1, abs=0.15)
