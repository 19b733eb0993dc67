"""A fleet that tests a study of one's own: some of its devices lie, and pay as honest ones do."""

from __future__ import annotations

import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import joined, run, serving

from crowdml.attacks import SIMULATED, Attackers, nothing
from crowdml.demo.stages import set_stage
from crowdml.device.fleet import Fleet
from crowdml.errors import TaskError
from crowdml.messages import decode
from crowdml.protocols import settled
from crowdml.server.sifting import sift_rounds
from crowdml.task import find_task, parse
from crowdml.wire.envelopes import open_signed

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_runner import crowdml, refused

TEXT = """
name = "lied-to"
features = { dimension = 2, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b"] }
model = { kind = "softmax" }
[protocol]
kind = "sgd"
batch = 4
step = { c = 1.0 }
combine = { rule = "median", uploads = 5 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 50.0 }
delta = 1e-5
budget = { epsilon = 50.0, samples = 4 }
"""
TASK = parse(TEXT)
MASKED = parse(TEXT.replace("discrete-gaussian", "skellam").replace("uploads = 5", "uploads = 1")
               + "[masking]\ncohort = 5\nminimum = 5\ncolluders = 0\nwindow = 2.0\n")  # fmt: skip
SAMPLES: list[tuple[Any, int]] = [(np.array([1.0, 0.0], np.float32), 0)] * 20


def gave(folder: Path, task: Any, attack: str | None, **more: Any) -> tuple[Fleet, list[Any], list[int], Any]:
    """A fleet of five: the gradient that each device says, what it paid, and what was published."""
    liars = {} if attack is None else Attackers(0.4, attack).live(task, 5)
    with serving(folder / "server", task) as server:
        home = joined(folder / "home", task)
        fleet, _ = run(home, server.address, server.code, task, SAMPLES, devices=5, liars=liars, **more)
        runner = server.hub.find(task.hash)
        heard = [open_signed(data).envelope for _, data in server.hub.store.kept_bodies(task.hash, 0)]
        said = {each.sender: decode(each.kind, each.body) for each in heard if each.kind == "sgd/gradient/1"}
        found = [said.get(key.id) for _, key in fleet.all_keys()]
        with home.ledger() as ledger:
            paid = [len(ledger.of(number).charges()) for number in range(5)]
        return fleet, [each.gradient.value for each in found if each is not None], paid, runner.fold.state.weights


def test_liars_of_a_fleet_say_something_else_and_pay_like_the_others(tmp_path: Path):
    fleet, said, paid, weights = gave(tmp_path, TASK, "sign-flip,gaussian")
    assert len(fleet.liars) == 2
    flipped, noisy = fleet.liars
    honest = [steps for number, steps in enumerate(said) if number not in fleet.liars]
    assert all(steps[0, 0] < 0 for steps in honest), "a sample of class a moves its weight up"
    assert said[flipped][0, 0] > 0
    assert not (said[noisy] % 10).any()
    assert all((steps % 10).any() for steps in honest)
    assert paid == [paid[0]] * 5 != [0] * 5
    assert weights[0, 0] > 0, "the median of three honest uploads and two lies"


def test_liars_of_a_fleet_are_the_same_after_a_restart_and_attack_by_turns():
    first, again = (Attackers(0.3, "sign-flip, label-flip,gaussian").live(TASK, 60) for _ in range(2))
    assert list(first) == list(again)
    assert sorted(first) != list(range(18))
    ways = [sum(tamper is way for tamper in first.values()) for way in set(first.values())]
    assert sorted(ways) == [6, 6, 6]


def test_a_liar_under_masks_changes_the_sum_of_its_cohort(tmp_path: Path):
    *_, paid, weights = gave(tmp_path / "honest", MASKED, None)
    *_, paid_by_liars, moved = gave(tmp_path / "lied", MASKED, "sign-flip")
    assert paid == paid_by_liars != [0] * 5
    assert weights[0, 0] > 3 * moved[0, 0], "three of five pull up, and two down"


def test_a_share_and_a_way_to_lie_that_are_not_there_are_refused():
    with pytest.raises(TaskError, match=r"attack = 'gausian': choose one of sign-flip.*Did you mean 'gaussian'"):
        Attackers(0.3, "sign-flip,gausian")
    outside = crowdml("fleet", "http://127.0.0.1:1/join/x", "--source", "csv:x", "--liars", "1.3", "--attack", "late")
    assert outside.code == 2
    assert "'--liars': 1.3 is not in the range 0<=x<=1." in outside.err


@pytest.mark.parametrize("attack", SIMULATED)
def test_what_only_a_simulation_can_have_is_refused_live(attack: str):
    for task in (TASK, MASKED):
        with pytest.raises(TaskError, match=rf"attack '{attack}' is for simulations: .*\. Nothing was sent\."):
            Attackers(0.3, f"sign-flip,{attack}").live(task, 10)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--liars", "0.3"), "--liars says how many devices lie, and --attack what they do. Name both."),
        (("--attack", "gaussian"), "--liars says how many devices lie, and --attack what they do. Name both."),
        (("--liars", "0.3", "--attack", "gaussian,"), "attack = '': choose one of sign-flip"),
        (("--liars", "0.3", "--attack", "alie"), "attack 'alie' is for simulations"),
    ],
)
def test_a_fleet_refuses_lies_that_cannot_be_before_anything_is_sent(tmp_path: Path, options: Any, sentence: str):
    rows = tmp_path / "rows.csv"
    rows.write_text("1,0,a\n" * 20)
    with serving(tmp_path / "server", TASK) as server:
        folder = ("--folder", str(tmp_path / "fleet"), "--yes", "--devices", "5")
        said = refused("fleet", server.address, server.code, "--source", f"csv:{rows}", *folder, *options)
        assert sentence in " ".join(said.split())
        assert server.hub.store.devices() == []


def test_a_study_whose_server_learns_no_model_has_no_liars():
    from crowdml.attacks import read_attackers

    with pytest.raises(TaskError, match="for tasks whose server learns a model"):
        read_attackers(find_task("traffic"), 0.3, "gaussian")


def test_a_round_over_http_leaves_liars_out_and_learns_as_if_they_were_not_there(tmp_path: Path):
    """The stage of `crowdml demo --task robust-digits` without its kills, and with less noise than lies can hide in."""
    stage = set_stage("robust-digits", find_task("robust-digits"), 20, 1)
    assert stage.task.privacy.budget is not None
    most = replace(stage.task.privacy.budget, epsilon=Fraction(60))
    far = replace(stage.task.privacy, epsilon={"moments": Fraction(60)}, budget=most)
    stage = replace(stage, task=settled(replace(stage.task, privacy=far)))
    task, there = stage.task, 18
    samples = [pair for turn in zip(*map(stage.held_by, range(there)), strict=True) for pair in turn]
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "home", task)
        fleet, summary = run(home, server.address, server.code, task, samples, devices=there, liars=stage.liars)
        runner = server.hub.find(task.hash)
        (sifted,) = sift_rounds(runner)
        assert len(fleet.liars) == 6
        loud = {number for number, tamper in stage.liars.items() if tamper.sense is nothing}
        noisy = {key.id for number, key in fleet.all_keys() if number in loud}
        assert summary.check_ins == sifted.uploads == there
        assert len(noisy) == 2
        assert noisy <= set(sifted.outside)
        assert stage.accuracy(runner.fold.state.weights) > 0.6, "a mean of all has below 0.5"
