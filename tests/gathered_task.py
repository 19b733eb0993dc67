"""Tasks of the gathered protocol of the tests (gathered_protocol.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from plugged import no_plugins_left

from crowdml.protocols import settled
from crowdml.task import Task, parse

PLUGIN = Path(__file__).parent / "gathered_protocol.py"
TEXT = """
name = "{name}"
features = {{ dimension = 2, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["a", "b"] }}
model = {{ kind = "softmax" }}
protocol = {{ kind = "test_median", size = {size}, {more} }}
stop = {{ steps = {steps} }}
"""
ALONE = """
[privacy]
mechanism = "discrete-gaussian"
epsilon = { sums = 1.0 }
delta = 1e-6
budget = { epsilon = 1.0, samples = 100 }
"""
MASKED = """
[privacy]
mechanism = "skellam"
epsilon = { sums = 1.0 }
delta = 1e-6
budget = { epsilon = 1.0, samples = 100 }
[masking]
cohort = 3
minimum = 3
colluders = 0
window = 0.2
"""


@pytest.fixture(scope="module", autouse=True)
def gathered_plugin() -> Iterator[None]:
    """The plug-in of these tasks, for the file of tests that imports this fixture: others must not see it."""
    with no_plugins_left(PLUGIN):
        yield


def text(name: str = "median", size: int = 3, steps: int = 1000, *, masked: bool = False, **more: Any) -> str:
    said = ", ".join(f"{key} = {value}" for key, value in more.items()) or "batch = 1"
    return TEXT.format(name=name, size=size, steps=steps, more=said) + (MASKED if masked else ALONE)


def make(name: str = "median", size: int = 3, steps: int = 1000, *, masked: bool = False, **more: Any) -> Task:
    """A task of the plug-in, which has to be loaded."""
    return settled(parse(text(name, size, steps, masked=masked, **more)))
