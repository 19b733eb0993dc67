"""Both estimators pass scikit-learn's own checks: all of them, with no exception to list."""

from __future__ import annotations

from typing import Any

import pytest
from sklearn.utils.estimator_checks import check_estimator

from crowdml import Crowd, CrowdRegressor

NO_PANDAS = {"check_classifier_data_not_an_array", "check_regressor_data_not_an_array"}
ARRAY_API = {"check_array_api_input"}
"""What scikit-learn skips here: pandas is not installed, and arrays of other libraries are tried on request alone."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator",
    [
        Crowd(protocol="gram", seed=1),
        CrowdRegressor(protocol="gram", seed=1),
        pytest.param(Crowd(seed=1), marks=pytest.mark.slow),  # XLA compiles for each of many shapes
        pytest.param(CrowdRegressor(seed=1), marks=pytest.mark.slow),
        pytest.param(Crowd(epsilon=None, seed=1), marks=pytest.mark.slow),  # without noise it must be accurate, too
        pytest.param(CrowdRegressor(epsilon=None, seed=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_estimator_passes_the_checks_of_scikit_learn(estimator: Any):
    found = check_estimator(estimator, on_skip=None, on_fail=None)
    assert len(found) > 45
    assert not [(each["check_name"], each["exception"]) for each in found if each["status"] == "failed"]
    skipped = {each["check_name"] for each in found if each["status"] == "skipped"}
    assert skipped <= NO_PANDAS | ARRAY_API
