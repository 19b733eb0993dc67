"""The public lottery that draws devices for a round of uploads: who waits, live and in the simulator."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from crowdml.channels import Gathering
from crowdml.datasets import load
from crowdml.device.asking import CheckOut
from crowdml.device.giving import Contribute, Lost, NextRound
from crowdml.device.machine import Begun, Done, Machine, Moment, Tell, Waited
from crowdml.device.member import Member
from crowdml.errors import TaskError
from crowdml.privacy.noise import Silence
from crowdml.protocols import find
from crowdml.sim.studies import simulate
from crowdml.sim.world import Delay
from crowdml.storage import Ledger
from crowdml.task import Task, parse
from crowdml.wire.keys import Key

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
    """How often a device rested until it took part, and what it said. What it gave is not lost."""
    task, seen, told, rested = make(), iter(rounds), list[str](), 0
    with Ledger(":memory:") as ledger:
        machine = Machine(Member(Key.generate(), ledger, bytes(32), ()), task, find(task), noise=Silence())
        machine.is_drawn, machine.draws = draws is not None, draws or (lambda number, looks: True)
        life, event, at = machine.wake(ledger), Begun(), Moment(0.0, 0.5, ledger)
        life = replace(life, gave=gave, doing=(NextRound(),))
        while True:
            move = life.doing[-1].step(machine, life, event, at)
            life = move.life
            told += [effect.text for effect in move.effects if isinstance(effect, Tell)]
            if not life.doing:
                return rested, told
            if isinstance(life.doing[-1], NextRound):
                rested, event = rested + 1, Waited()
                continue
            event = Done(False) if isinstance(life.doing[-1], Lost) else Done(SimpleNamespace(version=next(seen)))
            life = replace(life, doing=life.doing[:-1])


def test_a_device_waits_for_a_round_for_which_it_is_drawn():
    draws = lambda number, looks: number == 2 or looks == 3  # noqa: E731
    assert waits(None, [1, 1, 2], draws) == (
        2, ["waiting, uncharged: this device is not drawn for round 1, which is open until enough others gave"],
    )  # fmt: skip
    assert waits(2, [2, 2, 3, 3, 3, 3], draws)[0] == 5  # it gave to round 2, and is drawn for 3 at the fourth look
    assert waits(None, [], None) == (0, [])
    assert waits(4, [4, 5], None)[0] == 1


def test_a_device_that_looked_before_a_round_closed_waits_to_be_drawn_for_the_next():
    """It was drawn for round 4, and round 5 is open now: the server would refuse what it paid for."""
    task = make()
    with Ledger(":memory:") as ledger:
        machine = Machine(Member(Key.generate(), ledger, bytes(32), ()), task, find(task), noise=Silence())
        at = Moment(0.0, 0.5, ledger)
        giving: Any = Contribute(None)
        life = replace(machine.wake(ledger), drawn_for=4, doing=(giving,))
        move = giving.step(machine, life, Done(SimpleNamespace(version=5)), at)
        assert [type(each) for each in move.life.doing] == [Contribute, NextRound]
        machine.draws = lambda number, looks: True
        looked = move.life.doing[-1].step(machine, move.life, Done(SimpleNamespace(version=5)), at)
        assert (looked.life.drawn_for, looked.life.doing) == (5, (giving,))
        again = giving.step(machine, looked.life, looked.event, at)
        assert [type(each) for each in again.life.doing] == [Contribute, CheckOut]


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
