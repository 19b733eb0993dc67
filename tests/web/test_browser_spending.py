"""The browser's ledger beside Python's, on histories that are drawn."""

from __future__ import annotations

import random
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from crowdml.privacy.budget import Budget
from crowdml.privacy.losses import ZCDP, Loss, Pure, Renyi, group
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.privacy.spending import Charge, History
from crowdml.wire.statements import Statement

TASKS = (b"\1" * 32, b"\2" * 32)


def drawn_loss(drawn: random.Random) -> Loss:
    kind = drawn.random()
    if kind < 0.5:
        return Pure(Fraction(drawn.randint(1, 9), 50))
    if kind < 0.8:
        return ZCDP(Fraction(drawn.randint(1, 9), 1000))
    orders = sorted(drawn.sample([2, 4, 8, 16, 32], drawn.randint(1, 4)))
    return Renyi(tuple(orders), tuple(Fraction(order, 700) for order in orders))


def drawn_step(drawn: random.Random) -> tuple[bytes, list[tuple[int, int, Loss, Loss]]]:
    start, parts = drawn.randint(0, 60), list[tuple[int, int, Loss, Loss]]()
    for _ in range(drawn.randint(1, 3)):
        first = start + drawn.randint(0, 5)
        last, loss = first + drawn.randint(0, 9), drawn_loss(drawn)
        parts.append((first, last, loss, loss if isinstance(loss, Renyi) else group(loss, last - first + 1)))
    return drawn.choice(TASKS), parts


def drawn_budget(drawn: random.Random) -> Budget:
    device = None if drawn.random() < 0.6 else Fraction(drawn.randint(5, 60))
    task = drawn.choice((None, None, *TASKS))
    delta = 0.0 if drawn.random() < 0.2 else 1e-6
    return Budget(Fraction(drawn.randint(5, 40), 10), delta, drawn.randint(20, 80), device, task)


@pytest.mark.parametrize("seed", range(12))
def test_budgets_and_statements_are_those_of_python(engine: Any, seed: int):
    drawn, caps = random.Random(seed), Counter[str | None]()
    for _ in range(8):
        budgets = [drawn_budget(drawn) for _ in range(drawn.randint(1, 3))]
        steps = [drawn_step(drawn) for _ in range(20)]
        asked = [
            {"epsilon": str(each.epsilon), "delta": each.delta, "samples": each.samples,
             "device": None if each.device_epsilon is None else str(each.device_epsilon),
             "task": None if each.task is None else each.task.hex()}
            for each in budgets
        ]  # fmt: skip
        plain = [[task.hex(), [[first, last, str(loss), str(device)] for first, last, loss, device in parts]]
                 for task, parts in steps]  # fmt: skip
        kept = History()
        for (task, parts), found in zip(steps, engine("ledgers.js", "verdicts", asked, plain), strict=True):
            charges = [
                Charge(task, "row", loss, device, Observer.ANYONE, Adjacency.REPLACE_SAMPLE, first, last,
                       "2025-01-31T12:00:00+00:00")
                for first, last, loss, device in parts
            ]  # fmt: skip
            refusal = kept.refusal(task, charges, budgets)
            cap = None if refusal is None else refusal.cap
            if refusal is None:
                kept.add(task, charges)
            place = None if refusal is None or refusal.budget is None else budgets.index(refusal.budget)
            assert (found["cap"], found["budget"]) == (cap, place)
            assert found["statement"] == Statement.of(*kept.spent().after([], 0)).plain()
            caps[cap] += 1
    assert caps[None] > 10
    assert len(caps) > 2


@pytest.mark.slow
def test_a_long_ledger_is_read_and_added_to_in_time(engine: Any):
    took = engine("ledgers.js", "times", 5_000)
    assert took["read"] < 5_000
    assert took["step"] < 200
