"""The browser's gradients beside those of crowdml.models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.models import make_model

TABLES = [
    ("softmax", 4, 3, {}),
    ("softmax", 4, 3, {"bias": True}),
    ("logistic", 5, 2, {}),
    ("logistic", 5, 2, {"bias": True}),
    ("svm", 5, 2, {"bias": True}),
    ("mlp", 4, 3, {"hidden": [5]}),
    ("mlp", 4, 3, {"hidden": [5, 4], "activation": "tanh", "top": "squared"}),
    ("mlp", 4, 3, {"hidden": [3, 3], "activation": "sigmoid"}),
]


@pytest.mark.parametrize(("kind", "dimension", "classes", "settings"), TABLES, ids=str)
def test_gradients_mistakes_and_bounds_are_those_of_python(
    engine: Any, kind: str, dimension: int, classes: int, settings: Any
):
    model, draw = make_model(kind, dimension, classes, **settings), np.random.default_rng(5)
    weights = draw.normal(size=model.shape)
    x, y = draw.normal(size=(20, dimension)), np.resize([*range(classes), -1, classes], 20)
    x[3, 1], x[4, 0], x[5] = np.nan, np.inf, 0
    weights.flat[0] = 0.0
    found = engine(
        "learning.js", "learned", {"kind": kind, **settings}, dimension, classes, weights.ravel().tolist(),
        [[value if np.isfinite(value) else str(value).replace("inf", "Infinity").replace("nan", "NaN") for value in row]
         for row in x.tolist()],
        y.tolist(), 1.5,
    )  # fmt: skip
    samples = Samples(x, y)
    with np.errstate(invalid="ignore"):
        wanted = np.asarray(model.gradients(weights, samples)).reshape(20, -1)
    assert tuple(found["shape"]) == model.shape
    np.testing.assert_allclose(np.array(found["gradients"]), wanted, rtol=1e-9, atol=1e-12)
    assert found["mistakes"] == model.mistakes(weights, samples).tolist()
    cells = model.label_cells(samples)
    assert found["labels"] == [int(row.argmax()) if row.any() else -1 for row in cells]
    assert found["smoothness"] == pytest.approx(model.smoothness(1.5))
    if model.bounded:
        assert found["bounds"] == pytest.approx([model.gradient_bound("l1", 1.5), model.gradient_bound("l2", 1.5)])
    else:
        assert found["bounds"] is None


@pytest.mark.browser
@pytest.mark.parametrize(
    ("table", "classes", "word"),
    [
        ({"kind": "cnn", "filters": [4], "hidden": [5]}, 3, "cnn"),
        ({"kind": "softmax", "width": 1}, 3, "width"),
        ({"kind": "svm"}, 3, "two classes"),
        ({"kind": "mlp", "hidden": []}, 3, "hidden"),
        ({"kind": "mlp", "hidden": [3], "tolerance": 1}, 3, "tolerance"),
    ],
)
def test_a_model_that_a_browser_does_not_know_is_refused(page: Any, table: Any, classes: int, word: str):
    run = """async ([table, classes]) => {
      const { makeModel } = await import('/src/crowdml/web/device/models.js');
      try { makeModel(table, 4, classes); return null } catch (error) { return [error.slug, error.message] }
    }"""
    slug, message = page.evaluate(run, [table, classes])
    assert slug == "invalid-task"
    assert word in message
