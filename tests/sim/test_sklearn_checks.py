"""Both estimators pass scikit-learn's own checks; docs/python.md lists the one that is skipped, with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sklearn.utils.estimator_checks import check_estimator

from crowdml import Crowd, CrowdRegressor

ARRAY_API = "check_array_api_input"
"""The check that scikit-learn skips: it tries arrays of other libraries on request alone."""
PAGE = Path(__file__).parents[2] / "docs" / "python.md"


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
    assert {each["check_name"] for each in found if each["status"] == "skipped"} == {ARRAY_API}
    assert f"`{ARRAY_API}`" in PAGE.read_text(encoding="utf-8")
