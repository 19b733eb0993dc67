"""The browser's calibration and conversions beside those of crowdml.privacy."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Any

import pytest

from crowdml.privacy.calibration import gaussian_sigma, rho_for, skellam_loss, skellam_variance
from crowdml.privacy.losses import ZCDP, Filter, Loss, Pure, Renyi, Total
from crowdml.wire.statements import losses_of

DELTAS = (1e-4, 1e-5, 1e-6, 1e-9, 3e-7)


def test_no_rho_is_above_pythons_and_nearly_all_are_the_same(engine: Any):
    drawn = random.Random(1)
    cases = [(Fraction(round(10 ** drawn.uniform(-2, 1.3), 4)).limit_denominator(10**4), delta)
             for delta in DELTAS for _ in range(80)]  # fmt: skip
    cases = [case for case in cases if case[0]]
    found = [
        Fraction(text) for text in engine("pricing.js", "rhos", [[str(epsilon), delta] for epsilon, delta in cases])
    ]
    wanted = [rho_for(epsilon, delta) for epsilon, delta in cases]
    assert all(mine <= python for mine, python in zip(found, wanted, strict=True))
    assert all(mine >= python * (1 - Fraction(2, 10**9)) for mine, python in zip(found, wanted, strict=True))
    assert sum(mine == python for mine, python in zip(found, wanted, strict=True)) >= len(cases) - 2


def test_sigmas_are_pythons_to_the_digit(engine: Any):
    drawn = random.Random(2)
    cases = [(Fraction(drawn.randint(1, 10**6), drawn.randint(1, 99)), Fraction(drawn.randint(1, 10**9), 2**33))
             for _ in range(300)]  # fmt: skip
    found = engine("pricing.js", "sigmas", [[str(each) for each in case] for case in cases])
    assert found == [str(gaussian_sigma(*case)) for case in cases]


def test_no_share_of_skellam_noise_is_below_pythons(engine: Any):
    cases = [(Fraction(l2), Fraction(l1), Fraction(epsilon), delta, uses) for l2, l1, epsilon, delta, uses in (
        (5794, 80000, "1", 1e-6, 1), (5794, 80000, "9/10", 1e-6, 5), (2, 2, "1/2", 1e-5, 1), (100, 900, "8", 1e-6, 40),
        (16384, 10**6, "1/20", 1e-4, 2))]  # fmt: skip
    found = engine(
        "pricing.js", "skellams", [[str(l2), str(l1), str(e), delta, uses] for l2, l1, e, delta, uses in cases]
    )
    for (l2, l1, epsilon, delta, uses), (variance, loss) in zip(cases, found, strict=True):
        python = skellam_variance(l2, l1, epsilon, delta, uses)
        assert python <= Fraction(variance) <= python * (1 + Fraction(1, 10**5))
        assert loss == str(skellam_loss(l2, l1, Fraction(variance)))


def some_losses(drawn: random.Random) -> list[Loss]:
    made: list[Loss] = [Pure(Fraction(drawn.randint(1, 40), 100)) for _ in range(drawn.randint(0, 3))]
    made += [ZCDP(Fraction(drawn.randint(1, 90), 1000)) for _ in range(drawn.randint(0, 3))]
    for _ in range(drawn.randint(0, 2)):
        rate, orders = drawn.randint(9, 12), sorted(drawn.sample([2, 3, 4, 8, 16, 32, 64], drawn.randint(1, 5)))
        made.append(Renyi(tuple(orders), tuple(Fraction(order * rate, 3000) for order in orders)))
    return made


def test_totals_cost_and_are_allowed_as_in_python(engine: Any):
    drawn, cases = random.Random(3), list[tuple[list[Loss], float, Fraction]]()
    while len(cases) < 150:
        delta = drawn.choice([0.0, *DELTAS])
        cases.append((some_losses(drawn), delta, Fraction(drawn.randint(1, 40), 10)))
    asked = [[[str(loss) for loss in losses], delta, str(budget)] for losses, delta, budget in cases]
    allowed = 0
    for (losses, delta, budget), found in zip(cases, engine("pricing.js", "verdicts", asked), strict=True):
        total = Total.of(losses)
        epsilon = total.epsilon(delta)
        assert found["losses"] == list(losses_of(total))
        assert (found["epsilon"] or math.inf) == pytest.approx(epsilon or math.inf, rel=1e-12)
        if abs(epsilon - float(budget)) > 1e-6:  # nearer than that the last digit of a logarithm may decide
            assert found["planned"] == Filter.of(budget, delta, total).allows(Total(), total)
        assert found["allowed"] == Filter.of(budget, delta).allows(Total(), total)
        allowed += found["allowed"]
    assert 20 < allowed < 130
