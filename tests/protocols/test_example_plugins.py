"""The two protocols of `examples/protocols`: short files that do what their docstrings say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from plugged import MEDIANS, SIGNS, no_plugins_left

from crowdml.arrays import Samples
from crowdml.datasets import blobs
from crowdml.errors import LeakError, PluginError, TaskError
from crowdml.messages import decode, encode
from crowdml.privacy.noise import SystemSource
from crowdml.protocol import Sensed
from crowdml.protocols import check_for_devices, find, settled
from crowdml.protocols.registry import load_plugin
from crowdml.sim.trial import Deal, Trial, laid_out, run_trial
from crowdml.task import Masking, Privacy, StopRule, Task, parse
from crowdml.turn import Tamper, check_in, first_turn, server_turn

TEXT = """
name = "corners"
features = {{ dimension = 4, norm = {{ kind = "{norm}", bound = 1.0 }} }}
labels = {{ classes = ["a", "b", "c"] }}
model = {{ kind = "softmax" }}
protocol = {{ kind = "{kind}", batch = 5, rate = 0.5 }}
privacy = {{ mechanism = "{noise}", epsilon = {{ {row} = 1.0 }} }}
stop = {{ steps = 3 }}
"""


def task_of(kind: str = "signs", row: str = "votes", noise: str = "discrete-gaussian", **changes: object) -> Task:
    norm = "l1" if noise == "discrete-laplace" else "l2"
    task = parse(TEXT.format(kind=kind, row=row, noise=noise, norm=norm))
    return task.with_(**changes)


@pytest.fixture(autouse=True)
def examples() -> Iterator[None]:
    with no_plugins_left(SIGNS, MEDIANS):
        yield


def batch(seed: int = 0) -> Samples:
    chance = np.random.default_rng(seed)
    return Samples(chance.normal(size=(5, 4)).astype(np.float32), chance.integers(0, 3, 5).astype(np.int32))


def test_the_examples_are_as_short_as_they_promise():
    assert len(SIGNS.read_text().splitlines()) <= 70
    assert len(MEDIANS.read_text().splitlines()) <= 90


@pytest.mark.parametrize("noise", ["discrete-gaussian", "discrete-laplace"])
def test_no_vote_is_longer_than_its_row_allows_so_nothing_is_clipped(noise: str):
    task = settled(task_of(noise=noise))
    protocol = find(task)
    row, weights = protocol.mechanisms(task)["votes"], first_turn(protocol, task).published.weights
    votes = np.sign(np.ones_like(weights))
    size = np.abs(votes).sum() if noise == "discrete-laplace" else np.sqrt((votes**2).sum())
    assert size / float(row.grid.step) <= row.sensitivity.bound / 2


def test_a_check_in_of_votes_moves_every_weight_by_the_rate_and_the_task_ends_by_its_rule():
    task = settled(task_of())
    protocol = check_for_devices(task)
    turn = first_turn(protocol, task)
    for number in range(3):
        said = check_in(protocol, task, batch(number), turn.published, noise=SystemSource(), me="a").message
        assert said.kind == "signs/votes/1"
        before = turn.published.weights if number == 0 else turn.state.weights
        turn = server_turn(protocol, task, turn.state, decode(said.kind, encode(said)))
        moved = np.abs(turn.state.weights - before)
        assert np.isclose(moved, 0.5 / np.sqrt(number + 1)).mean() > 0.9  # a count of exactly 0 moves nothing
    assert turn.stopped is not None
    assert turn.stopped.sentence == "3 votes have been counted"


def test_votes_are_charged_once_and_a_repeated_publication_says_nothing():
    task = settled(task_of())
    protocol = find(task)
    public = first_turn(protocol, task).published
    done = check_in(protocol, task, batch(), public, noise=SystemSource(), me="a")
    assert [each.row for each in done.passages] == ["votes"]
    assert protocol.device.on[type(public)](task, done.state, public, None).effects == ()  # pyright: ignore
    assert Sensed in protocol.device.on


def test_settings_of_an_example_are_refused_by_their_limits():
    with pytest.raises(TaskError, match=r"protocol.rate = -1: must be above 0"):
        find(task_of(protocol={"rate": -1}))
    with pytest.raises(TaskError, match=r"protocol.speed = 3: no such key. Known here: batch, rate"):
        find(task_of(protocol={"speed": 3}))
    with pytest.raises(TaskError, match=r"privacy.epsilon.vote: signs lets out votes, and nothing else. Did you mean"):
        find(task_of(row="vote"))
    with pytest.raises(TaskError, match=r"privacy.epsilon.votes is missing"):
        find(task_of(privacy=Privacy("discrete-gaussian")))
    with pytest.raises(TaskError, match=r'privacy.unit = "device": the noise of votes hides a "sample"'):
        find(task_of(privacy=Privacy("discrete-gaussian", {"votes": 1}, unit="device")))
    with pytest.raises(TaskError, match=r"model 'softmax' has no setting 'l2'"):
        find(task_of(model={"l2": 1}))


# --- both engines, on every channel ---

CASES = {
    "one by one": ("signs", "votes", False),
    "summed": ("signs", "votes", True),
    "gathered": ("medians", "gradient", False),
    "gathered totals": ("medians", "gradient", True),
}


def channel_task(kind: str, row: str, masked: bool) -> Task:
    task = task_of(kind, row, stop=StopRule(4))
    task = task if kind == "signs" else task.with_(protocol={"uploads": 3, "minimum": 3})
    return task.with_(
        privacy=Privacy("skellam" if masked else "discrete-gaussian", {row: Fraction(8)}),
        masking=Masking(3, 3) if masked else None,
    )


@pytest.mark.parametrize("case", CASES)
def test_both_engines_run_an_example_to_the_same_weights(case: str):
    data, task = blobs(rows=300, features=4, classes=3, seed=1), channel_task(*CASES[case])
    trial = Trial(task, Deal(devices=12), seed=7)
    runs = [run_trial(replace(trial, engine=engine), data.x_train, data.y_train) for engine in ("compiled", "events")]
    assert laid_out(trial, data.y_train).engine == "compiled"
    assert np.allclose(runs[0].weights, runs[1].weights, rtol=0, atol=1e-6)  # compiled, a division rounds otherwise
    assert runs[0].stopped == runs[1].stopped


def test_a_minority_of_liars_moves_a_median_no_further_than_honest_devices_do():
    data, task = blobs(rows=600, features=4, classes=3, seed=1), channel_task("medians", "gradient", False)
    lie = Tamper(say=lambda row, steps: steps * 0 + 2**20)
    honest = Trial(task.with_(protocol={"uploads": 11}), Deal(devices=11), seed=7)
    before, after = (
        np.asarray(run_trial(each, data.x_train, data.y_train).weights)
        for each in (honest, replace(honest, liars=dict.fromkeys(range(3), lie)))
    )
    assert np.abs(before[-1]).max() < 10
    assert np.abs(after[-1]).max() < 10


# --- a plug-in that would fail on a device is refused before ---


def test_a_private_value_in_a_message_is_found_by_the_rehearsal_and_by_every_turn(tmp_path: Path):
    text = SIGNS.read_text().replace('"signs', '"broken')
    text = text.replace(
        "device=cm.device_role(Votes, Weights, votes)",
        "device=cm.Role(cm.wait, {cm.Sensed: cm.check_out, Weights: leak})",
    ).replace(
        "def start(",
        "def leak(task, waiting, public, ctx):\n"
        "    said = cm.let_out(Votes, task, ctx, votes(task, waiting, public), version=waiting)\n"
        "    return cm.Step(None, (cm.Send(cm.SERVER, said),))\n\n\ndef start(",
    )
    file = tmp_path / "broken.py"
    file.write_text(text)
    load_plugin(file)
    task = settled(task_of("broken"))
    with pytest.raises(PluginError, match=r"rehearsal.*broken/votes/1 field 'version' holds a Private value"):
        check_for_devices(task)
    protocol = find(task)
    with pytest.raises(LeakError, match="holds a Private value"):
        check_in(protocol, task, batch(), first_turn(protocol, task).published, noise=SystemSource(), me="a")
