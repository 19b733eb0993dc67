"""The browser's rows and public maps beside those of crowdml.features."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from crowdml.features.bounds import prepared
from crowdml.features.maps import MapSettings, make_map
from crowdml.task import Bound, Features


def as_json(x: Any) -> list[list[float | str]]:
    """JSON has no NaN and no infinity: as JavaScript writes them."""
    names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
    return [[names.get(str(value), value) for value in row] for row in np.asarray(x, float).tolist()]


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("bounds", [None, ("-1/2", "3"), (("0", "-1", "2", "0"), ("1", "1", "2", "1/3"))], ids=str)
def test_rows_are_prepared_as_in_python(engine: Any, norm: str, bounds: Any):
    draw = np.random.default_rng(2)
    x = draw.normal(size=(30, 4)) * 10.0 ** draw.integers(-8, 8, (30, 1))
    x[2], x[3, 1], x[4, 2], x[5, 0] = 0, np.nan, np.inf, -np.inf
    low, high = bounds or (None, None)
    lists = [None if each is None else [each] if isinstance(each, str) else list(each) for each in (low, high)]
    exact = [None if each is None else tuple(map(Fraction, each)) for each in lists]
    one = [None if each is None else each[0] if len(each) == 1 else each for each in exact]
    features = Features(4, Bound(norm, Fraction(3, 2)), low=one[0], high=one[1])
    asked = {"low": lists[0], "high": lists[1], "norm": norm, "bound": "3/2"}
    found = np.array(engine("learning.js", "prepared", asked, as_json(x)))
    np.testing.assert_allclose(found, prepared(features, x), rtol=2e-7, atol=0)
    assert (np.linalg.norm(found, ord=1 if norm == "l1" else 2, axis=1) <= 1.5).all()


@pytest.mark.parametrize(
    "settings",
    [
        MapSettings(),
        MapSettings(constant=Fraction(0)),
        MapSettings("cosine", seed=5, features=16),
        MapSettings("cosine", seed=2**40 + 1, features=300, width=Fraction(1, 4), constant=Fraction(1, 2)),
    ],
    ids=str,
)
def test_public_maps_give_the_features_of_python(engine: Any, settings: MapSettings):
    x = np.random.default_rng(3).normal(size=(12, 9)).astype(np.float32)
    x[1], x[2, 3] = 0, np.nan
    given = {
        "kind": settings.kind, "seed": settings.seed or 0, "features": settings.features,
        "width": str(settings.width), "constant": str(settings.constant),
    }  # fmt: skip
    found = np.array(engine("learning.js", "mapped", given, as_json(x)))
    wanted = make_map(settings, 9)(x)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6)
    assert (np.linalg.norm(found, axis=1) <= 1).all()
