"""Guo and Gong's figures: the second axis, which says what the first one costs, and what sound rounds prepare with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from crowdml.datasets import blobs
from crowdml.experiments import guo
from crowdml.experiments.figure import MAIN, Claim, Figure, FigureError, Panel, Second, Series
from crowdml.experiments.plot import draw
from crowdml.experiments.published.admm import total_epsilon

CLAIMED = guo.PER_ITERATION
HONEST = tuple(total_epsilon(epsilon, guo.ROUNDS) for epsilon in CLAIMED)
AXIS = Second("total ε", CLAIMED, HONEST)


def test_the_second_axis_says_what_each_epsilon_of_an_iteration_costs_in_all() -> None:
    np.testing.assert_allclose(AXIS.above(np.array(CLAIMED)), HONEST)
    np.testing.assert_allclose(AXIS.below(np.array(HONEST)), CLAIMED)
    between = np.geomspace(0.005, 2, 20)
    np.testing.assert_allclose(AXIS.below(AXIS.above(between)), between)
    exact = [total_epsilon(epsilon, guo.ROUNDS) for epsilon in between]
    np.testing.assert_allclose(AXIS.above(between), exact, rtol=0.1)
    assert dict(zip(CLAIMED, HONEST, strict=True))[0.1] == pytest.approx(0.4755, abs=1e-4)  # G6
    assert dict(zip(CLAIMED, HONEST, strict=True))[1.0] == pytest.approx(5.930, abs=1e-3)


@pytest.mark.parametrize("means", [(1.0,), (1.0, 1.0), (2.0, 1.0), (0.0, 1.0)])
def test_a_second_axis_that_does_not_rise_is_refused(means: tuple[float, ...]) -> None:
    with pytest.raises(FigureError, match="rising"):
        Second("total", (0.1, 1.0), means)


def test_a_figure_with_a_second_axis_is_drawn_with_its_numbers(tmp_path) -> None:
    curve = Series("one", "one", CLAIMED, tuple(np.linspace(0.7, 0.8, len(CLAIMED))), marks=True)
    panel = Panel(MAIN, "Two axes", "ε of one iteration", "accuracy", "log", second=AXIS)
    figure = Figure("guo/fig4", "Two", "synthetic", 1, (curve,), (Claim("a", "b", 0.0, True),), (panel,))
    drawn = draw(figure, tmp_path / "two.svg").read_text()
    assert "<!-- total ε -->" in drawn
    for total in HONEST:
        assert f"<!-- {total:.3g} -->" in drawn  # matplotlib notes the text beside its outlines
    plain = draw(replace(figure, panels=(replace(panel, second=None),)), tmp_path / "one.svg").read_text()
    assert "<!-- total ε -->" not in plain


def test_sharpening_looks_at_public_rows_alone_and_at_no_label() -> None:
    data = blobs(rows=400, features=6, classes=2, seed=1, normalise="l2")
    found = guo.sharpened(data)
    assert found.features == data.features
    assert max(np.linalg.norm(each.astype(np.float64), axis=1).max() for each in (found.x_train, found.x_test)) <= 1
    others = replace(data, x_train=data.x_train[::-1] * 0.5, x_test=data.x_test[:3], y_public=1 - data.y_public)
    np.testing.assert_array_equal(guo.sharpened(others).x_public, found.x_public)
    np.testing.assert_array_equal(guo.sharpened(others).x_test, found.x_test[:3])
