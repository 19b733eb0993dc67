"""The browser's noise: the laws it follows, and the integers that Python draws from the same bytes."""

from __future__ import annotations

import hashlib
import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from test_noise import LAWS, chi_square

from crowdml.privacy.laws import DiscreteGaussian, DiscreteLaplace, Geometric, Skellam
from crowdml.privacy.noise import SystemSource
from crowdml.protocols import sgd
from crowdml.task import find_task

NAMES = {DiscreteLaplace: "discreteLaplace", DiscreteGaussian: "discreteGaussian", Skellam: "skellam"}
OURS = {DiscreteLaplace: "discrete_laplace", DiscreteGaussian: "discrete_gaussian", Skellam: "skellam"}


def parameter(law: Any) -> Fraction:
    return getattr(law, {DiscreteLaplace: "scale", DiscreteGaussian: "sigma", Skellam: "variance"}[type(law)])


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_browsers_noise_fills_forty_equiprobable_cells_as_its_law_says(engine: Any, law: Any):
    found = engine("drawing.js", "draws", NAMES[type(law)], str(parameter(law)), 50_000, None)
    statistic, limit = chi_square(np.array(found["values"]), law)
    assert statistic < limit


@pytest.mark.parametrize("law", [*LAWS, Skellam(3 * Fraction(2**30) + 1)], ids=str)
def test_python_and_the_browser_draw_the_same_integers_from_the_same_bytes(engine: Any, law: Any):
    data = random.Random(str(law)).randbytes(24 * 20_000 + 1024)
    used = 0

    def entropy(size: int) -> bytes:
        nonlocal used
        used += size
        return data[used - size : used]

    wanted = getattr(SystemSource(entropy), OURS[type(law)])(parameter(law), np.empty(5_000))
    found = engine("drawing.js", "draws", NAMES[type(law)], str(parameter(law)), 5_000, data.hex())
    assert found == {"values": wanted.tolist(), "used": used}


@pytest.mark.parametrize(
    ("name", "law", "bits"),
    [
        ("discreteGaussian", DiscreteGaussian(sgd.plan(find_task("activity")).table["gradient"].sigma), 63),
        ("discreteGaussian", DiscreteGaussian(Fraction(3000, 7)), 127),
        ("skellam", Skellam(Fraction(10**7)), 63),
        ("skellam", Skellam(Fraction(49, 4)), 191),
        ("geometric", Geometric(Fraction(20_001, 2)), 63),
        ("geometric", Geometric(Fraction(20_001, 2), below=512), 127),
    ],
    ids=str,
)
def test_a_table_is_pythons_to_the_last_unit(engine: Any, name: str, law: Any, bits: int):
    wanted = law.thresholds(bits)
    given = str(law.scale) if isinstance(law, Geometric) else str(parameter(law))
    digest = hashlib.sha256("\n".join(map(str, wanted)).encode()).hexdigest()
    assert engine("drawing.js", "table", name, given, getattr(law, "below", None), bits) == [len(wanted), digest]


@pytest.mark.slow
@pytest.mark.browser
def test_the_table_of_the_activity_task_and_its_draws_are_quick(page: Any):
    sigma = sgd.plan(find_task("activity")).table["gradient"].sigma
    found = page.evaluate("async (s) => (await import('/tests/web/drawing.js')).times(s, 10_000)", str(sigma))
    assert found["table"] < 3000
    assert found["draws"] < 200
