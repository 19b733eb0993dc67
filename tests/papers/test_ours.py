"""Our own frontier on all of MNIST: what gram reaches there, and that everything else stands beside it.

At a reduced size: one trial, where `make figures` has three; a trial differs from the mean by a few of 5,000 images.
"""

from __future__ import annotations

from functools import cache

import pytest

from crowdml.experiments.figure import Figure
from crowdml.experiments.registry import listing, reproduce

READY = {line.id for line in listing() if line.state == "ready"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("ours/mnist-frontier" not in READY, reason="MNIST is not in $CROWDML_DATA"),
]

KEYS = ("gram-sample", "gram-device-10000", "gram-device-50000", "sgd-masked", "sgd-local", "hamm2015", "no-privacy")


@cache
def made(id_: str = "ours/mnist-frontier") -> Figure:
    return reproduce(id_, trials=1)


def at(key: str, epsilon: float) -> float:
    series = made()[key]
    return series.y[series.x.index(epsilon)]


def test_every_curve_has_the_epsilons_0_1_1_and_10() -> None:
    for key in KEYS:
        assert {0.1, 1.0, 10.0} <= set(made()[key].x), key
    assert made()["central-sota"].x == (2.93,)


@pytest.mark.parametrize(("epsilon", "most"), [(10.0, 0.032), (3.0, 0.03), (1.0, 0.05), (0.1, 0.125)])
def test_gram_reaches_its_targets_on_evaluation_rows_and_on_all_test_rows(epsilon: float, most: float) -> None:
    assert at("gram-sample", epsilon) <= most
    claim = made().claim(f"gram-e{epsilon:g}")
    assert claim.ours <= most
    assert claim.holds


def test_whole_devices_are_protected_at_a_price_that_more_devices_pay() -> None:
    assert at("gram-device-50000", 1.0) <= 0.05
    assert at("gram-device-50000", 1.0) < at("gram-device-10000", 1.0) <= 0.11
    assert made()["gram-device-10000"].privacy.unit == "device"


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0])
def test_one_release_is_better_than_every_other_way_to_learn(epsilon: float) -> None:
    for key in ("sgd-masked", "sgd-local", "hamm2015"):
        assert at("gram-sample", epsilon) < at(key, epsilon), key


def test_the_rule_and_the_map_stand_on_public_rows() -> None:
    assert all(claim.holds for claim in made("ours/gram-tuning").claims)
