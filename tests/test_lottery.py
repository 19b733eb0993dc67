"""The public lottery that draws devices for a round of uploads: who waits, live and in the simulator."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crowdml.channels import Gathering
from crowdml.datasets import load
from crowdml.device.gathering import wait_for_round
from crowdml.device.runner import Runner
from crowdml.errors import TaskError
from crowdml.protocols import find
from crowdml.sim.studies import simulate
from crowdml.sim.world import Delay
from crowdml.task import Task, parse

TEXT = """
name = "drawn"
features = {{ dimension = 64, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"] }}
model = {{ kind = "softmax" }}
[protocol]
kind = "sgd"
batch = 5
step = {{ c = 5.0 }}
combine = {{ rule = "mean", uploads = 6, {more} }}
[privacy]
mechanism = "{noise}"
epsilon = {{ gradient = 8.0 }}
{masks}
"""
TIMED = "minimum = 3, seconds = 200, drawn = 0.3"


def make(more: str = TIMED, masks: str = "") -> Task:
    return parse(TEXT.format(more=more, masks=masks, noise="skellam" if masks else "discrete-gaussian"))


def drawn(number: int, looks: int = 0, share: Fraction = Fraction(3, 10)) -> set[str]:
    gathering, task = Gathering(6, 3, 200.0, share), make()
    return {name for name in map(str, range(2000)) if gathering.draws(task, number, name, looks)}


def test_a_share_of_the_devices_is_drawn_others_for_each_round():
    first, second = drawn(0), drawn(1)
    assert first == drawn(0)
    for each in (first, second):
        assert len(each) == pytest.approx(600, abs=90)
    assert len(first & second) == pytest.approx(180, abs=60)
    assert len(drawn(0, share=Fraction(1))) == 2000


def test_a_device_that_finds_a_round_open_again_and_again_is_drawn_in_the_end():
    once, twice, later = (drawn(0, looks) for looks in (0, 1, 2))
    assert once < twice < later
    assert len(twice) == pytest.approx(1200, abs=90)
    assert len(later) == 2000


def waits(gave: int | None, rounds: list[int], draws: Any) -> tuple[int, list[str]]:
    """How often a device rested until it took part, and what it said."""
    seen, told, rested = iter(rounds), list[str](), list[int]()

    async def look() -> int:
        return next(seen)

    async def rest(looks: int) -> None:
        rested.append(looks)

    asyncio.run(wait_for_round(gave, look, rest, told.append, draws))
    return len(rested), told


def test_a_device_waits_for_a_round_for_which_it_is_drawn():
    draws = lambda number, looks: number == 2 or looks == 3  # noqa: E731
    assert waits(None, [1, 1, 2], draws) == (
        2, ["waiting, uncharged: this device is not drawn for round 1, which is open until enough others gave"],
    )  # fmt: skip
    assert waits(2, [2, 2, 3, 3, 3, 3], draws)[0] == 5  # it gave to round 2, and is drawn for 3 at the fourth look
    assert waits(None, [], None) == (0, [])
    assert waits(4, [4, 5], None)[0] == 1


def test_simulated_devices_that_are_not_drawn_wait_for_the_next_round():
    digits = load("digits", normalise="l2")
    task = make()
    study = simulate(task, digits.x_train, digits.y_train, devices=60, seed=[2], delay=Delay("exponential", 5.0))
    schedule, gathering = study.runs[0].schedule, find(task).gathers(task)
    assert gathering is not None
    there = schedule.counted
    names, rounds = schedule.device[there], schedule.version[there]
    assert study.runs[0].heard > 10
    by_lot = [gathering.draws(task, int(number), str(name)) for name, number in zip(names, rounds, strict=True)]
    assert np.mean(by_lot) > 0.9  # but for rounds whose time was over


@pytest.mark.parametrize(
    ("more", "masks", "says"),
    [
        ("drawn = 0.3", "", r"protocol\.combine\.seconds is missing: a round for which a share of 0\.3 is drawn"),
        (TIMED.replace("0.3", "1.5"), "", r"combine\.drawn"),
        (TIMED, "[masking]\ncohort = 5\nminimum = 4\n", r"protocol\.combine\.drawn with \[masking\]"),
    ],
)
def test_a_lottery_that_makes_no_sense_is_refused(more: str, masks: str, says: str):
    with pytest.raises(TaskError, match=says):
        find(make(more, masks)).gathers(make(more, masks))


@pytest.mark.parametrize(("found", "given", "rests"), [([4], 4, 0), ([5, 5], 5, 0), ([5, 5, 6], 6, 1)])
def test_a_device_that_looked_before_a_round_closed_waits_to_be_drawn_for_the_next(
    found: list[int], given: int, rests: int
):
    """It was drawn for round 4, or is for 5 at once, or for 6 alone: the server would refuse what it paid for."""
    offered, rested = iter(found), list[int]()

    async def check_out() -> Any:
        return SimpleNamespace(version=next(offered))

    async def rest(looks: int) -> None:
        rested.append(looks)

    draws = lambda number, looks: number == given  # noqa: E731
    device: Any = SimpleNamespace(
        _check_out=check_out, _rest=rest, _lottery=draws, _drawn_for=4, _gave=3, tell=lambda _: None
    )
    published = asyncio.run(Runner._publication(device))
    assert (published.version, device._drawn_for, len(rested)) == (given, given, rests)
