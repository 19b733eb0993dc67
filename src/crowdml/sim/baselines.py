"""Scores that cost no privacy or have none, to set a crowd's beside: a constant guess, and all rows in one place."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from sklearn.linear_model import LinearRegression, LogisticRegression

from crowdml.arrays import Array
from crowdml.verdict import share_of_majority

WEAK = 100.0
"""The inverse strength C of the penalty of the model without privacy: rows are no longer than one, so it is weak."""


def baselines(x: Array, y: Array, x_test: Array, y_test: Array, *, classes: bool) -> tuple[float, float]:
    """Always the most common class (or the mean), and a linear model without privacy: both on the test rows.

    Rows are as a device prepares them. Scores are accuracies, or R² where labels are numbers.
    """
    x, x_test = x.astype(np.float64), x_test.astype(np.float64)
    if classes:
        model: Any = LogisticRegression(C=WEAK, max_iter=2000).fit(x, y)
        return share_of_majority(y_test, y), float(model.score(x_test, y_test))
    off = (y_test - y.mean()) ** 2
    constant = 1 - float(off.mean()) / max(float(np.var(y_test)), 1e-30)
    return constant, float(cast("Any", LinearRegression().fit(x, y)).score(x_test, y_test))
