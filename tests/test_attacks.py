"""Devices that lie as populations: what each attack says, who lies, and the same lies in both engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.attacks import ATTACKS, TOGETHER, Attackers, make_attack
from crowdml.channels import Stacked
from crowdml.datasets.populations import iid
from crowdml.errors import TaskError
from crowdml.protocols import find
from crowdml.sim.trial import Trial, laid_out, run_trial
from crowdml.sim.world import Delay
from crowdml.task import parse
from crowdml.turn import colluded

sys.path.insert(0, str(Path(__file__).parent / "cli"))
from cli_runner import crowdml

TEXT = """
name = "attacked"
features = { dimension = 4, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b", "c"] }
model = { kind = "softmax" }
[protocol]
kind = "sgd"
batch = 5
step = { c = 2.0 }
combine = { rule = "RULE", uploads = 10, f = 3 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 4.0 }
delta = 1e-5
"""
TASK = parse(TEXT.replace("RULE", "mean"))
MASKED = parse(TEXT.replace("RULE", "median").replace("discrete-gaussian", "skellam")
               + "[masking]\ncohort = 5\nminimum = 5\ncolluders = 0\n")  # fmt: skip


def samples(rows: int = 300):
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, rows).astype(np.int32)
    x = rng.normal(size=(rows, 4)).astype(np.float32) + 3 * np.eye(3, 4, dtype=np.float32)[y]
    return x / np.linalg.norm(x, axis=1, keepdims=True), y


X, Y = samples()
ROW = find(TASK).mechanisms(TASK)["gradient"]


def trial(task: Any, attack: str | None, share: float = 0.3, **more: Any) -> Trial:
    liars: Any = {} if attack is None else Attackers(share, attack)
    return Trial(task, iid(len(Y), 20, 1), 5, **{"points": 2, "liars": liars, "engine": "events", **more})


def test_the_first_devices_of_an_order_lie():
    assert list(Attackers(0.25, "sign-flip").of(TASK, [3, 1, 0, 2])) == [3]
    assert list(Attackers(0.5, "sign-flip").of(TASK, [3, 1, 0, 2])) == [3, 1]


def test_who_lies_is_drawn_by_the_seed():
    people, liars = iid(len(Y), 20, 1), Attackers(0.25, "sign-flip")
    drawn = [set(laid_out(Trial(TASK, people, seed, liars=liars), Y).liars) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(each) == 5 and each <= set(range(20)) for each in drawn)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_changes_the_model_and_not_what_anybody_pays(attack: str):
    honest, lied = (run_trial(trial(TASK, each), X, Y) for each in (None, attack))
    assert np.abs(honest.model - lied.model).max() > 1e-3
    np.testing.assert_array_equal(honest.schedule.samples, lied.schedule.samples)


@pytest.mark.parametrize(("attack", "masked"), [("scaling", True), ("alie", False), ("mimic", False)])
def test_both_engines_have_the_same_lies(attack: str, masked: bool):
    task = MASKED if masked else TASK
    fast, slow = (run_trial(trial(task, attack, engine=engine, passes=3), X, Y) for engine in ("compiled", "events"))
    assert fast.heard == slow.heard > 0
    np.testing.assert_allclose(fast.weights, slow.weights, atol=5e-3)


def test_liars_collude_in_rounds_that_are_late_too():
    late = {"delay": Delay.parse("exponential:20")}
    honest, lied = (run_trial(trial(TASK, each, **late), X, Y) for each in (None, "inner-product"))
    assert honest.heard == lied.heard > 0
    assert np.abs(honest.model - lied.model).max() > 1e-3


def test_a_liar_says_nothing_that_the_server_would_refuse():
    low, high = ROW.reach
    steps = np.array([0, 3, -7, high, low, high // 2], np.int32)
    for attack in ("sign-flip", "scaling", "gaussian"):
        said = make_attack(attack, TASK).say("gradient", steps)
        assert low <= said.min() <= said.max() <= high
    assert make_attack("sign-flip", TASK).say("gradient", steps)[:3].tolist() == [0, -3, 7]
    assert make_attack("scaling", TASK).say("gradient", steps)[:3].tolist() == [0, 30, -70]


def test_labels_are_flipped_all_or_the_first_class_alone():
    batch = Samples(np.ones((4, 4), np.float32), np.array([0, 1, 2, 0], np.int32))
    assert make_attack("label-flip", TASK).sense(batch).y.tolist() == [2, 1, 0, 2]
    assert make_attack("target-flip", TASK).sense(batch).y.tolist() == [1, 1, 2, 1]
    assert not make_attack("gaussian", TASK).sense(batch).x.any()


def together(attack: str, said: Any, lies: Any) -> Any:
    uploads = Stacked({"gradient": said}, np.ones(len(said), np.int32))
    return colluded(uploads, {make_attack(attack, TASK): lies}).array("gradient")


def test_liars_who_know_all_say_one_thing_and_honest_uploads_stay():
    said = np.random.default_rng(1).integers(-999, 999, (10, 4, 3)).astype(np.int32)
    lies = np.isin(np.arange(10), (0, 4, 7))
    honest = said[~lies].astype(float)
    expected = {
        "mimic": said[1],
        "inner-product": -honest.mean(0),
        "alie": honest.mean(0) - 0.18001 * honest.std(0),  # Baruch et al.: 10 // 2 + 1 - 3 = 3 supporters, z of 4 / 7
    }
    for attack in TOGETHER:
        after = together(attack, said, lies)
        np.testing.assert_array_equal(after[~lies], said[~lies])
        np.testing.assert_allclose(after[lies], np.broadcast_to(expected[attack], (3, 4, 3)), atol=1)


def test_what_cannot_be_is_refused_by_a_sentence():
    with pytest.raises(TaskError, match="attack 'alie' needs rounds of single uploads"):
        run_trial(trial(MASKED, "alie"), X, Y)
    with pytest.raises(TaskError, match="attack = 'aly': choose one of sign-flip"):
        Attackers(0.1, "aly")
    with pytest.raises(TaskError, match=r"liars = 1\.5: a share of the devices"):
        Attackers(1.5, "alie")


def test_simulate_lets_a_share_of_the_crowd_lie(tmp_path: Path):
    path = tmp_path / "task.toml"
    path.write_text(TEXT.replace("RULE", "median"))
    told = ["simulate", str(path), "--data", "synthetic", "--devices", "20", "--seed", "1", "--engine", "events"]
    done = crowdml(*told, "--liars", "0.2", "--attack", "scaling", "--json", "-")
    assert json.loads(done.out)["liars"] == {"devices": 4, "attack": "scaling"}
    refused = crowdml(*told, "--liars", "0.2")
    assert refused.code == 1
    assert "--liars says how many devices lie, and --attack what they do. Name both." in " ".join(refused.err.split())
