"""The prices on the page of consent: the browser computes them itself, and refuses a page that says another one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "wire"))

from device_vectors import TURNS  # noqa: E402  # found by the line above

from crowdml.price import Price  # noqa: E402
from crowdml.protocols import find  # noqa: E402
from crowdml.task import parse  # noqa: E402

ACTIVITY = (TESTS.parent / "src/crowdml/tasks/activity.toml").read_text(encoding="utf-8")
TASKS = [*TURNS.values(), ACTIVITY, ACTIVITY.replace("delta = 1e-6", "delta = 1e-6\nuses = 3")]


def test_a_browser_computes_the_price_that_the_page_of_consent_says(engine: Any):
    tasks = [parse(text) for text in TASKS]
    tasks = [each for each in tasks if each.masking is None and each.privacy.budget is not None]
    assert len(tasks) > 6
    for task, shown in zip(
        tasks, engine("shown.js", "prices", [each.canonical.decode() for each in tasks]), strict=True
    ):
        whole = Price.of(find(task), task).whole
        assert shown["sample"] == pytest.approx(whole.sample, rel=1e-6), task.name
        assert shown["device"] == pytest.approx(whole.device, rel=1e-6), task.name
