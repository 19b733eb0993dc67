"""A live server combines a closed round by the task's robust rule; a restart and a replay end in the same bits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import Answer, Device, serving
from masked_device import Room, masked_text

from crowdml.channels import Gathered, stacked
from crowdml.messages import encode
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocols import find, settled
from crowdml.server.limits import Limits
from crowdml.server.transcript import replay, write_transcript
from crowdml.task import parse
from crowdml.turn import first_turn, server_turn

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_runner import crowdml

TEXT = """
name = "krums"
features = { dimension = 2, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b"] }
model = { kind = "softmax" }
[protocol]
kind = "sgd"
batch = 2
step = { c = 1.0 }
combine = { rule = "multi-krum", before = "bucketing", uploads = 10, f = 1 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 1.0, errors = 1.0 }
delta = 1e-5
[stop]
steps = 2
"""
TASK = settled(parse(TEXT))


def uploads(version: int) -> list[Any]:
    """Nine alike and a lie, as large as a device may send."""
    drawn, made = np.random.default_rng(version), find(TASK).contribution
    steps = drawn.integers(-9000, 9000, (10, 2, 2)).astype(np.int32)
    steps[version] = find(TASK).expected(TASK)["sgd/gradient/1"]["gradient"].high
    mistakes = drawn.integers(0, 3, (10, 1)).astype(np.int32)
    return [made(Release(each, RECEIVED), Release(count, RECEIVED), None, np.int32(version))
            for each, count in zip(steps, mistakes, strict=True)]  # fmt: skip


def give(device: Device, message: Any) -> Answer:
    return device.check_in(TASK, kind="sgd/gradient/1", body=encode(message))


@pytest.mark.parametrize("every", [1000, 1])
def test_a_round_is_combined_and_a_restart_and_a_replay_end_in_the_same_bits(tmp_path: Path, every: int):
    limits = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6, snapshot_every=every)
    with serving(tmp_path, TASK, limits=limits) as server:
        devices = [server.device() for _ in range(10)]
        for device, message in zip(devices, uploads(0), strict=True):
            assert give(device, message).status == 202
        for device, message in zip(devices[:6], uploads(1), strict=False):
            assert give(device, message).status == 202
    with serving(tmp_path, TASK, limits=limits) as server:
        for device, message in list(zip(devices, uploads(1), strict=True))[6:]:
            assert give(Device(server.line(), device.key, device.seq), message).status == 202
        runner = server.hub.runners[TASK.hash]
        state, offered = runner.fold.state, runner.offer.body
        assert runner.fold.rule is not None
        assert runner.fold.rule.sentence == "2 rounds have been closed"
        with (tmp_path / "told").open("wb") as file:
            write_transcript(server.hub.store, TASK.hash, file)
    assert replay(tmp_path / "told").body == offered
    by_hand = first_turn(find(TASK), TASK).state
    for version in range(2):
        by_hand = server_turn(find(TASK), TASK, by_hand, Gathered(version, stacked(uploads(version)))).state
    np.testing.assert_array_equal(state.weights, by_hand.weights)
    assert int(state.counted) == 20
    assert int(state.errors) == sum(int(each.errors.value[0]) for version in range(2) for each in uploads(version))
    assert np.abs(state.weights).max() < 1, "the lie alone would move them by more"


def test_a_round_whose_weights_are_no_longer_finite_ends_the_task_and_the_last_good_ones_stay(tmp_path: Path):
    far = TEXT.replace('kind = "sgd"', 'kind = "local_updates"').replace("step = {", "server_rate = 1e30\nrate = {")
    far = far.replace("{ gradient = 1.0, errors = 1.0 }", "{ update = 1.0 }").replace(
        'rule = "multi-krum", before = "bucketing", uploads = 10, f = 1', 'rule = "median", uploads = 3'
    )
    task = settled(parse(far))
    made = find(task).contribution(Release(np.full(4, 9000, np.int32), RECEIVED), np.int32(0), np.int32(1))
    with serving(tmp_path, task) as server:
        for _ in range(3):
            assert server.device().check_in(task, kind="local/update/1", body=encode(made)).status == 202
        fold = server.hub.runners[task.hash].fold
        assert fold.rule is not None
        assert (fold.rule.name, fold.version) == ("diverged", 0)
        assert not fold.weights.any()


def test_check_prints_the_rule_and_what_it_stands(tmp_path: Path):
    (tmp_path / "task.toml").write_text(TEXT)
    said = " ".join(crowdml("task", "check", str(tmp_path / "task.toml")).out.split())
    assert "Rounds are combined by multi-krum after bucketing: up to 1 of 10 uploads may be lies." in said
    assert "Rules that stand 1 of 5 buckets: clipped-mean, median, trimmed-mean, krum, multi-krum" in said
    (tmp_path / "bad.toml").write_text(TEXT.replace("uploads = 10", "uploads = 8"))
    refused = crowdml("task", "check", str(tmp_path / "bad.toml"))
    assert refused.code == 1
    assert "multi-krum needs at least 2f + 3 = 5 for f = 1" in " ".join(refused.err.split())


def test_cohorts_under_masks_are_combined_and_one_that_has_a_liar_does_not_count():
    text = masked_text("robust", 3, 3, window=0.2).replace(
        "radius = 1e9", 'radius = 1e9, combine = { rule = "median", uploads = 3, f = 1 }'
    )
    room = Room(settled(parse(text)))
    devices = room.devices(9)
    own = devices[0].vectors(1)
    lies = {devices[0].number: {**own, "gradient": own["gradient"] + 100_000}}
    for start in (0, 3, 6):
        assert room.runner.offer.version == 0
        room.run(devices[start : start + 3], lies)
    assert room.runner.offer.version == 1
    sums = [sum(each.seqs[number + 1]["gradient"].astype(np.int64) for each in devices[3 * number : 3 * number + 3])
            for number in range(3)]  # fmt: skip
    assert np.min(sums[0]) > 90_000 > 90 > np.abs(sums[1:]).max()
    grid = float(room.task.privacy.grid)
    np.testing.assert_allclose(
        room.runner.fold.state.weights.reshape(-1), -np.median(sums, axis=0) / 3 * grid, rtol=1e-5
    )
