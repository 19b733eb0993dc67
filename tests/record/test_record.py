"""The code against the record of what must not change: hashes, prices, wire kinds, states and messages.

An intended change of one of them is a change that users see: say so in CHANGELOG.md, and run `make.py` again.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import make

from crowdml.messages import OURS

CLOSE, ELSEWHERE = 1e-6, 1e-3
"""Relative to the largest number among those compared; the second on a machine that rounds otherwise."""


@cache
def recorded(part: str) -> Any:
    return json.loads((make.HERE / f"{part}.json").read_text("utf-8"))


@cache
def rounds_alike() -> bool:
    """Whether this machine rounds like the one that made the record.

    If not, a float that differs in its last bit may end in another integer of a grid, and so in other bytes. Hashes of
    tasks, prices, kinds and sizes are compared all the same, and states to 1e-3.
    """
    return make.machine() == recorded("machine")["rounds like"]


def entries(part: str) -> Any:
    return pytest.mark.parametrize("name", recorded(part))


def agree(old: Any, new: Any, where: str = "") -> list[str]:
    """Where two entries differ. Exact, but for lists of floats, which agree to 1e-6 of the largest among them."""
    if not rounds_alike() and where.endswith("/exact"):
        return []
    if not rounds_alike() and "/said/" in where:
        old, new = (each.rpartition(" ")[0] for each in (old, new))
    if isinstance(old, dict) and isinstance(new, dict):
        gone = [f"{where}/{name} is gone" for name in old if name not in new]
        return gone + [line for name in old if name in new for line in agree(old[name], new[name], f"{where}/{name}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        if not where.endswith("/floats"):
            pairs = enumerate(zip(old, new, strict=True))
            return [line for number, (a, b) in pairs for line in agree(a, b, f"{where}/{number}")]
        room = (CLOSE if rounds_alike() else ELSEWHERE) * max(1.0, *map(abs, old), 0.0)
        if all(abs(a - b) <= room for a, b in zip(old, new, strict=True)):
            return []
    return [] if old == new else [f"{where} was {old}, and is {new}"]


def check(part: str, name: str) -> None:
    found = agree(recorded(part)[name], make.summary(part, name))
    if found:
        shown = "\n".join(f"  {line[:400]}" for line in found[:5])
        pytest.fail(f"{part} of {name!r} changed in {len(found)} places. `make record` shows where.\n{shown}", False)


@entries("facts")
def test_a_task_has_its_hash_price_mechanisms_and_expected_fields(name: str):
    check("facts", name)


@entries("turns")
def test_devices_and_server_say_and_keep_the_same_in_the_same_turns(name: str):
    check("turns", name)


@entries("engines")
def test_an_engine_ends_in_the_same_state(name: str):
    check("engines", name)


@entries("studies")
def test_a_study_ends_with_the_same_models_and_the_same_costs(name: str):
    check("studies", name)


@entries("kinds")
def test_every_kind_of_message_has_its_fields_and_bytes(name: str):
    check("kinds", name)


def test_a_kind_of_message_that_is_new_has_to_be_recorded():
    every = set(make.driver.kinds())  # imports all protocols; other tests declare kinds of their own
    ours = {kind for kind in every if kind.split("/")[0] in OURS}
    assert set(recorded("kinds")["messages"]) == ours


@pytest.mark.parametrize("part", make.PARTS)
def test_every_case_is_in_the_record(part: str):
    assert list(recorded(part)) == make.names(part)


def test_a_shipped_task_that_is_new_has_to_be_recorded():
    assert {f"shipped {name}" for name in make.driver.shipped()} <= set(recorded("facts"))
