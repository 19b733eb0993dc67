"""Devices that lie as populations: what each attack says, who lies, and the same lies in both engines."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.attacks import ATTACKS, Attackers, make_attack, mark, opened, unreliable
from crowdml.channels import Stacked
from crowdml.datasets.populations import iid
from crowdml.errors import TaskError
from crowdml.protocols import find
from crowdml.robust import Combine, combine_rows
from crowdml.sim.trial import Trial, laid_out, run_trial
from crowdml.sim.world import Delay
from crowdml.task import parse
from crowdml.turn import colluded, first_turn

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
    task = MASKED if attack == "sybil" else TASK
    honest, lied = (run_trial(trial(task, each), X, Y) for each in (None, attack))
    assert np.abs(honest.model - lied.model).max() > 1e-3
    np.testing.assert_array_equal(honest.schedule.samples, lied.schedule.samples)


@pytest.mark.parametrize(
    ("attack", "masked"),
    [
        ("scaling", True),
        ("alie", False),
        ("mimic", False),
        ("unreliable", False),
        ("late", False),
        ("no-noise", False),
        ("no-noise", True),
        ("backdoor", False),
        ("min-max", False),
        ("alie-search", False),
        ("sybil", True),
    ],
)
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
    for attack in expected:
        after = together(attack, said, lies)
        np.testing.assert_array_equal(after[~lies], said[~lies])
        np.testing.assert_allclose(after[lies], np.broadcast_to(expected[attack], (3, 4, 3)), atol=1)


def test_min_max_goes_as_far_as_honest_uploads_are_from_each_other():
    said = np.random.default_rng(2).integers(-999, 999, (12, 5)).astype(np.int32)
    lies = np.arange(12) < 4
    lie, honest = together("min-max", said, lies)[0].astype(float), said[4:].astype(float)
    most = max(np.linalg.norm(a - b) for a in honest for b in honest)
    assert max(np.linalg.norm(lie - a) for a in honest) == pytest.approx(most, rel=0.01)
    away = (honest.mean(0) - lie) / honest.std(0)
    assert away.min() > 0.2
    assert away == pytest.approx(np.full(5, away.mean()), rel=0.02)


def test_a_line_search_moves_the_rule_at_least_as_far_as_the_attack_that_it_scales():
    said = np.random.default_rng(4).integers(-999, 999, (10, 6)).astype(np.int32)
    lies = np.arange(10) < 3
    by, honest = Combine("median", 10), said[3:].mean(0)
    task = parse(TEXT.replace("RULE", "median"))

    def moved(attack: str) -> float:
        uploads = Stacked({"gradient": said}, np.ones(10, np.int32))
        after = colluded(uploads, {make_attack(attack, task): lies}).array("gradient")
        return float(np.linalg.norm(combine_rows(after, by) - honest))

    for attack in ("alie", "inner-product"):
        assert moved(f"{attack}-search") >= moved(attack)
    assert moved("alie-search") > moved("alie")


def test_an_unreliable_device_has_noise_in_so_many_of_its_samples():
    x = np.random.default_rng(5).normal(size=(2000, 6)).astype(np.float32)
    batch = Samples(x, np.zeros(2000, np.int32))
    after = unreliable(0.6, batch)
    changed = (after.x != x).any(axis=1)
    assert 0.55 < changed.mean() < 0.65
    np.testing.assert_allclose(np.linalg.norm(after.x, axis=1), np.linalg.norm(x, axis=1), rtol=1e-5)
    cosines = (after.x * x).sum(1)[changed] / (x**2).sum(1)[changed]
    assert abs(cosines.mean()) < 0.05
    np.testing.assert_array_equal(unreliable(0.6, batch).x, after.x)  # the same sample is bad each time


def test_random_weights_are_from_0_to_1_and_ring_elements_are_anywhere():
    steps, (low, high) = np.arange(4000, dtype=np.int32), ROW.reach
    one = 1 / float(ROW.law.unit)
    weights = make_attack("random", TASK).say("gradient", steps)
    assert weights.min() >= 0
    assert weights.max() <= one
    assert abs(weights.mean() / one - 0.5) < 0.02
    anywhere = make_attack("ring", TASK).say("gradient", steps).astype(float)
    assert low <= anywhere.min() < 0.98 * low
    assert 0.98 * high < anywhere.max() <= high


def test_a_device_that_adds_no_noise_says_its_gradient_as_it_is_and_is_charged():
    for engine in ("events", "compiled"):
        loud, still = (trial(TASK, each, 1.0, engine=engine, noise=True) for each in (None, "no-noise"))
        silent = run_trial(replace(loud, noise=False), X, Y)
        np.testing.assert_allclose(run_trial(still, X, Y).model, silent.model, atol=1e-5)
        assert np.abs(run_trial(loud, X, Y).model - silent.model).max() > 1e-2


def test_a_late_starter_is_honest_after_its_first_check_ins():
    late = make_attack("late", TASK)
    batch = Samples(np.ones((4, 4), np.float32), np.zeros(4, np.int32))
    assert [bool(late.sensed(batch, trip).x.any()) for trip in range(4)] == [False, False, True, True]


def test_a_backdoor_is_nine_pixels_in_the_corner_of_a_picture():
    x = np.random.default_rng(6).random((1, 64)).astype(np.float32)
    changed = (mark(x) != x).reshape(8, 8)
    assert changed[5:, 5:].sum() >= 8
    assert not changed[:5].any()
    assert not changed[:, :5].any()
    batch = Samples(np.repeat(x, 500, 0) + np.arange(500, dtype=np.float32)[:, None] / 1e4, np.full(500, 2, np.int32))
    after = make_attack("backdoor", TASK).sense(batch)
    marked = (after.x != batch.x).any(axis=1)
    assert 0.4 < marked.mean() < 0.6
    np.testing.assert_array_equal(after.y, np.where(marked, 0, 2))


def test_sybils_fill_whole_cohorts():
    laid = laid_out(trial(MASKED, "sybil", 0.5), Y)
    rounds, lies = laid.layout, set(laid.liars)
    share = [np.mean([int(each) in lies for each in row]) for row in rounds.device[:4]]  # type: ignore[union-attr]
    assert sorted(share) == [0.0, 0.0, 1.0, 1.0]


def test_what_cannot_be_is_refused_by_a_sentence():
    with pytest.raises(TaskError, match="attack 'alie' needs rounds of single uploads"):
        run_trial(trial(MASKED, "alie"), X, Y)
    with pytest.raises(TaskError, match="attack 'sybil' fills cohorts"):
        make_attack("sybil", TASK)
    with pytest.raises(TaskError, match="attack = 'aly': choose one of sign-flip"):
        Attackers(0.1, "aly")
    with pytest.raises(TaskError, match=r"liars = 1\.5: a share of the devices"):
        Attackers(1.5, "alie")


@pytest.mark.parametrize("name", ["unreliable:0", "unreliable:1.5", "unreliable:", "unreliable:x", "late:0.5"])
def test_a_part_that_is_none_is_refused(name: str):
    with pytest.raises(TaskError, match=re.escape(f"attack {name!r}: 'unreliable' alone has a number")):
        Attackers(0.1, name)


@pytest.mark.parametrize(("name", "share"), [("unreliable:0.2", 0.2), ("unreliable", 0.6), ("unreliable:1", 1.0)])
def test_the_part_of_an_unreliable_device_that_is_noise_can_be_said(name: str, share: float):
    assert Attackers(0.5, f"late,{name}").names[1] == name
    x = np.random.default_rng(1).normal(size=(4000, 4)).astype(np.float32)
    lied = make_attack(name, TASK).sense(Samples(x, np.zeros(4000, np.int32)))
    assert (lied.x != x).any(1).mean() == pytest.approx(share, abs=0.03)


def test_a_backdoor_opens_as_often_as_marked_samples_of_other_classes_are_taken_for_the_first():
    tested = Samples(np.eye(4, dtype=np.float32)[np.arange(40) % 2], (np.arange(40) % 2).astype(np.int32))
    weights = np.zeros(find(TASK).model(TASK, first_turn(find(TASK), TASK).state).shape, np.float32)
    learnt = weights if weights.shape[0] == 3 else weights.T  # [class, feature]
    learnt[1, 1] = 1.0
    assert opened(TASK, weights, tested) == (0.0, 0.0)
    learnt[0, 2] = 5.0  # the mark is in the last three features
    assert opened(TASK, weights, tested) == (1.0, 0.0)
    learnt[0, 1] = 9.0
    assert opened(TASK, weights, tested) == (1.0, 1.0)


def test_simulate_prints_how_often_a_backdoor_opens(tmp_path: Path):
    path = tmp_path / "task.toml"
    path.write_text(TEXT.replace("RULE", "mean"))
    told = ["simulate", str(path), "--data", "synthetic", "--devices", "20", "--seed", "1", "--engine", "events"]
    done = crowdml(*told, "--liars", "0.4", "--attack", "late,backdoor", "--json", "-")
    found = json.loads(done.out)["liars"]
    assert found["attack"] == "late,backdoor"
    assert 0 <= found["backdoor"]["unmarked"] <= 1
    assert 0 <= found["backdoor"]["success"] <= 1
    shown = " ".join(crowdml(*told, "--liars", "0.4", "--attack", "backdoor").out.split())
    assert "marked samples of others taken for 'a'" in shown
    assert "(without the mark" in shown


def test_simulate_lets_a_share_of_the_crowd_lie(tmp_path: Path):
    path = tmp_path / "task.toml"
    path.write_text(TEXT.replace("RULE", "median"))
    told = ["simulate", str(path), "--data", "synthetic", "--devices", "20", "--seed", "1", "--engine", "events"]
    done = crowdml(*told, "--liars", "0.2", "--attack", "scaling", "--json", "-")
    assert json.loads(done.out)["liars"] == {"devices": 4, "attack": "scaling"}
    refused = crowdml(*told, "--liars", "0.2")
    assert refused.code == 1
    assert "--liars says how many devices lie, and --attack what they do. Name both." in " ".join(refused.err.split())
