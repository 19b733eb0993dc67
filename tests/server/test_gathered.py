"""Gathered rounds: uploads wait in the journal until their round closes, and the protocol hears all of them at once."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import Answer, Device, Running, serving
from gathered_task import PLUGIN, gathered_plugin, make, text  # noqa: F401  a fixture
from masked_device import MaskedDevice, Room, crowd, through
from plugged import no_plugins_left

from crowdml.messages import encode
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocols import settled
from crowdml.server.export import export_model, model_card
from crowdml.server.limits import Limits
from crowdml.server.transcript import replay, write_transcript
from crowdml.storage.server import Store
from crowdml.task import Task, parse

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_runner import crowdml

MANY = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6, snapshot_every=1000)


with no_plugins_left(PLUGIN):
    TASK = make()


def sums_of(task: Task) -> type:
    from crowdml.protocols import find

    return find(task).contribution


def give(device: Device, task: Task, value: int, version: int, **more: Any) -> Answer:
    """An upload whose numbers are all `value`."""
    made = sums_of(task)(Release(np.full((2, 2), value, np.int32), RECEIVED), np.int32(version))
    return device.check_in(task, kind="test_median/sums/1", body=encode(made), **more)


def published(server: Running, task: Task) -> tuple[int, Any]:
    runner = server.hub.runners[task.hash]
    return runner.offer.version, runner.fold.state.weights


def in_steps(server: Running, task: Task) -> float:
    """The first weight, in steps of the grid."""
    step = float(task.privacy.grid)
    return float(published(server, task)[1][0, 0]) / step


def test_a_round_closes_with_its_last_upload_and_the_server_hears_all_of_them(tmp_path: Path):
    with serving(tmp_path, TASK, limits=MANY) as server:
        devices = [server.device() for _ in range(3)]
        for device, value in zip(devices, (1, 5, 100), strict=True):
            assert published(server, TASK)[0] == 0
            assert give(device, TASK, value, 0).status == 202
        assert published(server, TASK)[0] == 1
        assert in_steps(server, TASK) == 5
        runner = server.hub.runners[TASK.hash]
        assert (runner.index, runner.check_ins, runner.own) == (4, 3, 1)


def test_an_upload_after_the_close_is_refused_with_409_and_uses_no_number(tmp_path: Path):
    with serving(tmp_path, TASK, limits=MANY) as server:
        late, *devices = [server.device() for _ in range(4)]
        for device in devices:
            give(device, TASK, 1, 0)
        answer = give(late, TASK, 9, 0)
        assert (answer.status, answer.slug) == (409, "round-over")
        assert give(late, TASK, 9, 1).status == 202
        assert server.hub.runners[TASK.hash].check_ins == 4


def test_a_second_upload_of_a_device_in_one_round_is_refused_and_the_same_bytes_get_their_receipt_again(tmp_path: Path):
    with serving(tmp_path, TASK, limits=MANY) as server:
        one, two, three = (server.device() for _ in range(3))
        assert give(one, TASK, 1, 0).status == 202
        answer = give(one, TASK, 2, 0)
        assert (answer.status, answer.slug) == (409, "round-over")
        again = give(one, TASK, 1, 0, seq=1)
        assert again.status == 200
        give(two, TASK, 1, 0), give(three, TASK, 1, 0)
        assert give(one, TASK, 1, 0, seq=1).status == 200, "its round is over, and it is in the journal"
        assert server.hub.runners[TASK.hash].check_ins == 3


@pytest.mark.parametrize("every", [1000, 2, 1])
def test_a_restart_in_the_middle_of_a_round_goes_on_with_the_uploads_that_it_had(tmp_path: Path, every: int):
    limits = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6, snapshot_every=every)
    with serving(tmp_path, TASK, limits=limits) as server:
        devices = [server.device() for _ in range(3)]
        for round_ in range(3):
            for device in devices[: 2 if round_ == 2 else 3]:
                assert give(device, TASK, 1 + round_, round_).status == 202
    with serving(tmp_path, TASK, limits=limits) as server:
        again = [Device(server.line(), each.key, each.seq) for each in devices]
        assert give(again[0], TASK, 7, 2).slug == "round-over"
        assert give(again[2], TASK, 3, 2).status == 202
        assert published(server, TASK)[0] == 3
        assert in_steps(server, TASK) == 6
        with (tmp_path / "told").open("wb") as file:
            done = write_transcript(server.hub.store, TASK.hash, file)
        offered = server.hub.runners[TASK.hash].offer.body
    assert done.body == offered
    told = replay(tmp_path / "told")
    assert told.body == offered
    assert told.check_ins == 12


def test_reduction_spares_the_uploads_of_an_open_round(tmp_path: Path):
    task, other = make("spared", size=9), make("other", size=9)
    limits = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6, snapshot_every=1)
    with serving(tmp_path, task, other, limits=limits) as server:
        devices = [server.device() for _ in range(9)]
        for device in devices[:8]:
            assert give(device, task, 4, 0).status == 202
        for device in devices[:8]:  # whose last body was spared as that, and is so no more
            assert give(device, other, 4, 0, seq=1).status == 202
        assert [len(bytes(each)) > 0 for each in server.hub.store.bodies_at(task.hash, range(1, 9))] == [True] * 8
        assert give(devices[8], task, 4, 0).status == 202
        assert published(server, task)[0] == 1
        assert in_steps(server, task) == 4
        for device in devices[:4]:
            assert give(device, task, 4, 1, seq=2).status == 202
        kept = dict(server.hub.store.kept_bodies(task.hash))
        assert not {1, 2, 3, 4} & kept.keys(), "the round is closed, and no snapshot that is kept has it open"


def test_check_says_when_a_round_closes_and_what_memory_it_takes(tmp_path: Path):
    path = tmp_path / "task.toml"
    path.write_text(text("checked", size=1000, minimum=10, seconds=60))
    said = " ".join(crowdml("task", "check", str(path), "--plugin", str(PLUGIN)).out.split())
    assert "A round closes when 1,000 uploads are in, or after 60 s with at least 10." in said
    assert "A device gives once a round, so with fewer than 10 devices no round ever closes." in said
    assert "at once needs 16 kB of memory, one that reads blocks of 256 4.1 kB." in said


def test_check_says_how_many_devices_a_round_of_cohorts_needs_and_names_no_block_larger_than_a_round(tmp_path: Path):
    path = tmp_path / "task.toml"
    path.write_text(text("cohorts", size=7, masked=True))
    said = " ".join(crowdml("task", "check", str(path), "--plugin", str(PLUGIN)).out.split())
    assert "A round closes when 7 cohorts are in. A device gives once a round, so with fewer than 21 devices" in said
    assert "at once needs 224 bytes of memory." in said


def test_the_open_round_is_in_the_api_on_the_operators_page_and_in_the_card_of_the_model(tmp_path: Path):
    with serving(tmp_path, TASK, limits=MANY) as server:
        give(server.device(), TASK, 1, 0)
        (listed,) = json.loads(server.line().ask("GET", "/v1/tasks").body)["tasks"]
        assert (listed["round"]["number"], listed["round"]["uploads"], listed["round"]["size"]) == (0, 1, 3)
        assert listed["round"]["closes_at"] is None
        found = server.hub.round_now(TASK.hash)
        assert found is not None
        later = (datetime.fromisoformat(found.opened_at) + timedelta(hours=3)).isoformat()
        assert found.text(later) == (
            "round 0: 1 of 3 uploads, closes at 3; it has been waiting for 3 hours: if no more devices give, invite "
            "more, or stop the task"
        )
        assert "gathered in rounds of 3 uploads" in model_card(
            export_model(server.hub.store, TASK.hash), "x.safetensors"
        )


def test_a_transcript_that_ends_after_the_task_stopped_by_its_rule_is_read(tmp_path: Path):
    task = make("stops", size=1, steps=1)
    with serving(tmp_path, task, limits=MANY) as server:
        assert give(server.device(), task, 1, 0).status == 202
    with Store(tmp_path / "server.sqlite") as store, (tmp_path / "told").open("wb") as file:
        write_transcript(store, task.hash, file)
    assert replay(tmp_path / "told").reason == "1 round has been closed"


# --- under masks ---


def meet(server: Running, devices: list[MaskedDevice]) -> None:
    """One cohort of these devices, from its adverts to its total."""
    rounds = server.hub.rounds(devices[0].task.hash)
    number = rounds.newest
    for each in devices:
        assert each.begin(number).status == 202
    through(devices, lambda: number in rounds.ended)
    server.run(server.hub.write(lambda: None))  # once the total is applied
    assert rounds.ended[number].phase == "summed", rounds.ended[number].why


def tries(device: MaskedDevice, number: int) -> Answer:
    """The answer to an advert of a device that forgets which rounds it was in."""
    return MaskedDevice(device.inner, device.task, device.number).begin(number)


def test_a_device_in_a_total_of_the_open_round_gets_into_no_other_cohort_of_it(tmp_path: Path):
    """An honest device waits; one that lies could be in every total that a median is taken of."""
    task = make("liar", size=2, masked=True)
    with serving(tmp_path, task, limits=MANY) as server:
        devices, rounds = crowd(server, task, 6), server.hub.rounds(task.hash)
        meet(server, devices[:3])
        answer = tries(devices[0], rounds.newest)
        assert (answer.status, answer.slug) == (409, "round-refused")
        assert "gives to round 0 of the task, and this device has done so already" in answer.problem["detail"]
        meet(server, devices[3:])
        assert published(server, task)[0] == 1
        assert tries(devices[0], rounds.newest).status == 202, "the next round is open"
        with (tmp_path / "told").open("wb") as file:
            write_transcript(server.hub.store, task.hash, file)
        assert replay(tmp_path / "told").body == server.hub.runners[task.hash].offer.body


def test_a_device_in_a_cohort_under_way_gets_into_no_other_one_for_the_same_round_also_after_a_restart():
    """Also not a survivor that falls silent: its vector is in the sum."""
    larger = text("twice", size=2, masked=True).replace("cohort = 3\nminimum = 3", "cohort = 5\nminimum = 4")
    room = Room(settled(parse(larger)))
    liar, *others = everyone = room.devices(5)
    for each in everyone:
        assert each.begin(1).status == 202
    for phase, steps in (("share", everyone), ("mask", everyone), ("agree", others), ("reveal", others)):
        room.restart()
        assert room.rounds.active[1].phase == phase
        assert tries(liar, 2).slug == "round-refused"
        for each in steps:
            each.step()
        if phase == "agree":
            room.wait(31)
    room.restart()
    assert room.rounds.ended[1].phase == "summed"
    assert tries(liar, 2).slug == "round-refused"


def test_a_device_whose_cohort_came_to_nothing_gets_into_the_next_one():
    room = Room(make("again", size=3, minimum=1, seconds=10, masked=True))
    devices = room.devices(6)
    for each in devices[:3]:
        assert each.begin(1).status == 202
    for each in devices[:3]:
        each.step()
    room.run(devices[3:])
    assert tries(devices[0], 3).slug == "round-refused"
    room.clock.now += 10
    room.runner.closing.ring()
    assert (room.runner.offer.version, room.rounds.active[1].phase) == (1, "mask")
    assert tries(devices[0], 3).status == 202, "its cohort is for a round that is over"
    room.wait(31)
    assert room.rounds.ended[1].phase == "abandoned"
    assert [tries(each, 3).status for each in devices[1:3]] == [202, 202]
