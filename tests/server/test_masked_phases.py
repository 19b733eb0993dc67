"""Rounds by a clock of the test's own, without HTTP: cohorts, deadlines, restarts, and sums that are refused."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from masked_device import MaskedDevice, Room, make_masked, through, total_of

from crowdml.messages import decode
from crowdml.pace import MOVING, poll_wait
from crowdml.secagg import device as core
from crowdml.secagg.messages import Masked, encode, open_message
from crowdml.server import rounds as server_rounds
from crowdml.server.runner import Fold
from crowdml.storage.server import Store, restore
from crowdml.wire.envelopes import open_signed
from crowdml.wire.rounds import open_view

DOCS = Path(__file__).parents[2] / "docs" / "secagg.md"


def weights(room: Room) -> Any:
    return room.runner.fold.weights


def totals(room: Room) -> list[Any]:
    snapshot = room.store.oldest_snapshot(room.task.hash)
    kept = room.store.totals(room.task.hash, 0 if snapshot is None else snapshot.index)
    envelopes = [open_signed(data).envelope for _, data in kept]
    return [decode(envelope.kind, envelope.body) for envelope in envelopes]


def folded(room: Room, *sums: Any) -> Any:
    fold = Fold(room.task)
    for each in sums:
        fold.apply(each, "server")
    return fold.weights


def to_phase(room: Room, devices: list[MaskedDevice], phase: str) -> int:
    number = room.rounds.newest
    for each in devices:
        assert each.advertise(number).status == 202
    through(devices, lambda: room.rounds.active[number].phase == phase)
    return number


def stall(room: Room) -> None:
    """A cohort that is under way waits so long for its devices that no other one waits for it."""
    room.clock.now += MOVING * poll_wait(len(room.rounds.seen)) + 1


# --- cohorts ---


def test_a_full_cohort_closes_at_once_and_the_next_round_opens():
    room = Room(make_masked(cohort=5, minimum=4))
    devices = room.devices(6)
    views = [open_view(each.advertise(1).body) for each in devices[:5]]
    assert [view.phase for view in views] == ["advertise"] * 4 + ["share"]
    assert (views[0].why, views[4].kind) == ("1 of 4 to 5 devices are here", "secagg/cohort/1")
    assert devices[5].look().round == 2
    assert devices[0].look().round == 1, "it is in that one"


def test_a_window_that_ends_with_too_few_stays_open_and_asks_for_less_each_time():
    room = Room(make_masked(cohort=20, minimum=12, window=60.0))
    devices = room.devices(13)
    for each in devices:
        each.advertise(1)

    def phase_after(seconds: float) -> str:
        for each in devices:
            each.look(1)
        room.wait(seconds)
        return room.rounds.active[1].phase

    assert phase_after(59.0) == "advertise"
    assert phase_after(1.0) == "advertise", "14 would be enough: the minimum and a quarter of the room above it"
    assert phase_after(60.0) == "share", "now 13 are"


def test_one_device_above_the_minimum_is_waited_for_so_that_one_that_vanishes_costs_no_round():
    room = Room(make_masked(cohort=5, minimum=4, window=60.0, lease=30.0))
    devices = room.devices(5)

    def phase_after_windows(many: int) -> str:
        for _ in range(many):
            room.clock.now += 59.0
            for each in devices[:4]:
                each.look(1)
            room.wait(1.0)
        return room.rounds.active[1].phase

    for each in devices[:4]:
        each.advertise(1)
    assert phase_after_windows(1 + server_rounds.server.PATIENCE) == "advertise"
    devices[4].advertise(1)
    assert room.rounds.active[1].phase == "share"
    for each in devices[:4]:
        assert each.step().status == 202
    room.wait(30.0)
    through(devices[:4], lambda: 1 in room.rounds.ended)
    assert (room.rounds.ended[1].phase, room.rounds.ended[1].survived) == ("summed", 4)


def test_a_crowd_of_the_bare_minimum_gets_its_round_after_some_windows():
    room = Room(make_masked(cohort=5, minimum=4, window=60.0, lease=600.0))
    for each in room.devices(4):
        each.advertise(1)
    for _ in range(1 + server_rounds.server.PATIENCE):
        room.wait(60.0)
    assert room.rounds.active[1].phase == "advertise"
    room.wait(60.0)
    assert room.rounds.active[1].phase == "share"


def test_a_cohort_is_walked_once_a_second_and_when_it_is_about_to_be_fixed():
    room = Room(make_masked(cohort=20, minimum=12, window=60.0))
    devices, walks = room.devices(20), []

    class Seen(dict[str, float]):
        def get(self, *args: Any) -> Any:
            walks.append(room.clock.now)
            return super().get(*args)

    room.rounds.seen = Seen(room.rounds.seen)
    for each in devices[:10]:
        assert each.advertise(1).status == 202
    assert not walks, "nobody was there at the first look, and it was at this very moment"
    room.wait(1.0)
    for each in devices[10:19]:
        assert each.advertise(1).status == 202
    assert len(walks) == 10, "one look at those ten"
    assert devices[19].advertise(1).status == 202
    assert len(walks) == 30, "and one at all twenty"
    assert room.rounds.active[1].phase == "share"


def test_a_window_that_ends_with_enough_closes_with_those_who_are_there():
    room = Room(make_masked(cohort=20, minimum=12, window=60.0))
    for each in room.devices(14):
        each.advertise(1)
    room.wait(60.0)
    assert (room.rounds.active[1].phase, room.rounds.active[1].row.devices) == ("share", 14)


def test_a_device_that_is_silent_for_a_lease_is_left_out_and_comes_back_by_asking():
    room = Room(make_masked(cohort=8, minimum=6, window=100.0, lease=20.0))
    devices = room.devices(8)
    for each in devices[:7]:
        each.advertise(1)
    room.wait(50.0)
    for each in devices[:5]:
        each.look(1)
    room.wait(50.0 - 20.0)
    for each in devices[:6]:
        each.look(1)
    room.wait(20.0)
    assert room.rounds.active[1].phase == "advertise", "one of seven was not heard of for a lease, and seven are needed"
    assert len(room.rounds.active[1].state.adverts) == 6
    for each in devices[:7]:
        each.look(1)
    room.wait(1.0)
    assert devices[7].advertise(1).status == 202
    assert room.rounds.active[1].phase == "share", "all eight are there"
    assert devices[6].step().status == 202


def test_who_was_left_out_of_the_cohort_is_told_so():
    room = Room(make_masked(cohort=10, minimum=7, window=100.0, lease=20.0))
    devices = room.devices(10)
    for each in devices[:9]:
        each.advertise(1)
    room.wait(90.0)
    for each in devices[:8]:
        each.look(1)
    room.wait(10.0)
    assert room.rounds.active[1].row.devices == 8
    view = devices[8].look(1)
    assert (view.phase, view.why) == ("abandoned", "the round went on without this device")
    assert devices[8].look().round == 2
    assert devices[9].look(1).phase == "abandoned"


def test_an_evicted_place_is_free_for_another():
    room = Room(make_masked(cohort=5, minimum=5, window=100.0, lease=10.0, steps=1))
    devices = room.devices(6)
    for each in devices[:4]:
        each.advertise(1)
    room.wait(50.0)
    for each in devices[1:4]:
        each.look(1)
    devices[4].advertise(1)
    assert devices[5].advertise(1).status == 202
    assert set(room.rounds.active[1].state.adverts) == {each.id for each in devices[1:]}


def test_no_more_rounds_are_begun_than_the_stop_rule_can_use():
    room = Room(make_masked(cohort=5, minimum=4, steps=1))
    devices = room.devices(10)
    for each in devices[:5]:
        each.advertise(1)
    for each in devices[5:]:
        each.advertise(2)
    assert [each.phase for each in room.rounds.active.values()] == ["share", "advertise"]
    for each in devices[:2]:
        each.step()
    room.wait(600.0)
    assert room.rounds.ended[1].cause == "shares"
    assert room.rounds.active[2].phase == "share", "the first was abandoned, so the second may go on"


# --- deadlines ---


@pytest.mark.parametrize(
    ("phase", "answer", "ends"),
    [
        ("share", 4, "mask"),
        ("share", 3, "shares"),
        ("mask", 4, "agree"),
        ("mask", 3, "survivors"),
        ("agree", 4, "reveal"),
        ("agree", 3, "agreements"),
        ("reveal", 4, "summed"),
        ("reveal", 3, "secrets"),
    ],
)
def test_a_phase_closes_at_its_deadline_with_those_who_answered(phase: str, answer: int, ends: str):
    room = Room(make_masked(cohort=5, minimum=4, lease=30.0))
    devices = room.devices(5)
    before = weights(room)
    number = to_phase(room, devices, phase)
    for each in devices[:answer]:
        assert each.step().status == 202
    room.wait(29.0)
    assert room.rounds.active[number].phase == phase
    room.wait(1.0)
    if ends in ("mask", "agree", "reveal"):
        assert room.rounds.active[number].phase == ends
        assert devices[4].look(number).phase == "abandoned"
        assert devices[4].look().round == number + 1
        return
    row = room.rounds.ended[number]
    if ends == "summed":
        assert row.phase == "summed"
        assert (weights(room) == folded(room, *totals(room))).all()
    else:
        assert (row.phase, row.cause, bool(row.why)) == ("abandoned", ends, True)
        assert (weights(room) == before).all()
        assert devices[0].look(number).why == row.why
    assert room.store.counts().bodies == (1 if ends == "summed" else 0), "of the vectors only hashes stay"


def test_a_message_after_its_phase_is_over_is_refused_and_changes_nothing():
    room = Room(make_masked(cohort=5, minimum=4, lease=30.0))
    devices = room.devices(5)
    number = to_phase(room, devices, "mask")
    for each in devices[:4]:
        each.step()
    view = devices[4].look(number)
    room.wait(30.0)
    head = room.store.head(room.task.hash)
    late = devices[4].hear(view)
    assert (late.status, late.slug) == (410, "round-over")
    assert room.store.head(room.task.hash) == head
    through(devices[:4], lambda: number in room.rounds.ended)
    again = devices[4].check_in()
    assert (again.status, again.slug) == (410, "round-over")
    assert int(totals(room)[0].devices) == 4
    wanted = total_of(devices[:4], number)
    assert (totals(room)[0].gradient.value == wanted["gradient"]).all()
    assert devices[4].inner.seq == 0, "its seq is not used up"
    assert len(room.runner.repeated(open_signed(devices[0].sent)) or ()) == 0, "a reveal is no check-in"


def test_repeats_of_every_message_are_the_same_and_other_bytes_are_refused():
    room = Room(make_masked(cohort=5, minimum=4))
    devices = room.devices(5)
    number = room.rounds.newest
    for each in devices:
        each.advertise(number)
        assert each.post(each.sent).status == 200
    for phase in ("share", "mask", "agree", "reveal"):
        assert room.rounds.active[number].phase == phase
        for each in devices[:-1]:
            assert each.step().status == 202
            kept = each.sent
            again = each.send() if phase == "mask" else each.post(kept)
            assert again.status == 200
        assert devices[-1].step().status == 202
        if phase == "mask":
            assert devices[-1].send().status == 200, "also when the phase is over: it is in the journal"
    assert number in room.rounds.ended
    assert int(totals(room)[0].devices) == 5


def test_a_device_that_says_something_else_in_a_phase_stays_at_what_it_said():
    room = Room(make_masked(cohort=5, minimum=4))
    devices = room.devices(5)
    number = to_phase(room, devices, "mask")
    each = devices[0]
    each.step()
    sent = open_message("secagg/masked/1", open_signed(each.sent).envelope.body)
    assert isinstance(sent, Masked)
    other = encode(Masked(sent.round, sent.view, bytes(len(sent.body))))
    each.sent = each.envelope("secagg/masked/1", other, 2)
    head = room.store.head(room.task.hash)
    answer = each.send()
    assert (answer.status, answer.slug) == (409, "round-refused")
    assert room.store.head(room.task.hash) == head
    through(devices, lambda: number in room.rounds.ended)
    assert (totals(room)[0].gradient.value == total_of(devices, number)["gradient"]).all()


# --- several rounds, restarts ---


def test_two_rounds_at_once_end_in_two_totals_and_the_later_one_may_end_first():
    room = Room(make_masked(cohort=5, minimum=4))
    first, second = room.devices(5), [room.device(number) for number in range(5, 10)]
    to_phase(room, first, "mask")
    stall(room)
    to_phase(room, second, "mask")
    through(second, lambda: 2 in room.rounds.ended)
    through(first, lambda: 1 in room.rounds.ended)
    heard = totals(room)
    assert [int(each.version) for each in heard] == [0, 0], "both worked with the first publication"
    assert (heard[0].gradient.value == total_of(second, 2)["gradient"]).all()
    assert (heard[1].gradient.value == total_of(first, 1)["gradient"]).all()
    assert (weights(room) == folded(room, *heard)).all()
    third = [room.device(number) for number in range(10, 15)]
    to_phase(room, third, "mask")
    assert third[0].look(3).publication is not None
    assert third[0].look(3).publication[0] == 2


def test_everybody_in_a_cohort_works_with_the_same_publication():
    room = Room(make_masked(cohort=5, minimum=4))
    first, second = room.devices(5), [room.device(number) for number in range(5, 10)]
    number = to_phase(room, first, "mask")
    first[0].step()
    stall(room)
    room.run(second)
    assert room.runner.offer.version == 1
    seen = [each.look(number).publication for each in first[1:]]
    assert [each[0] for each in seen if each is not None] == [0] * 4
    through(first, lambda: number in room.rounds.ended)
    assert [int(each.version) for each in totals(room)] == [0, 0]


def share(room: Room, devices: list[MaskedDevice]) -> int:
    """A round whose shares are all in."""
    number = to_phase(room, devices, "share")
    for each in devices:
        each.step()
    return number


def test_a_cohort_whose_shares_are_in_reads_the_total_that_was_under_way():
    room = Room(make_masked(cohort=5, minimum=4))
    first, second, third = (room.devices(15)[at : at + 5] for at in (0, 5, 10))
    to_phase(room, first, "mask")
    share(room, second)
    share(room, third)
    assert [room.rounds.active[number].phase for number in (2, 3)] == ["share", "share"]
    assert second[0].step() is None, "it has answered, and waits"
    for cohort, number in ((first, 1), (second, 2), (third, 3)):
        through(cohort, lambda number=number: number in room.rounds.ended)
    assert [int(each.version) for each in totals(room)] == [0, 1, 2]


def test_no_cohort_waits_for_one_whose_devices_left():
    room = Room(make_masked(cohort=5, minimum=4))
    first, second = room.devices(10)[:5], room.devices(10)[5:]
    to_phase(room, first, "mask")
    share(room, second)
    assert not room.rounds.is_due()
    stall(room)
    assert room.rounds.is_due(), "without a message from anybody"
    room.wait(0.0)
    assert second[0].look(2).publication[0] == 0


def test_a_cohort_waits_a_lease_at_most_for_the_total_of_another():
    room = Room(make_masked(cohort=5, minimum=4, lease=2.0))
    first, second = room.devices(10)[:5], room.devices(10)[5:]
    to_phase(room, first, "mask")
    room.wait(1.0)
    share(room, second)
    room.wait(0.9)
    through(first, lambda: room.rounds.active[1].phase == "agree")
    room.wait(1.0)
    assert (room.rounds.active[1].phase, room.rounds.active[2].phase) == ("agree", "share")
    room.wait(0.2)
    assert (room.rounds.active[1].phase, room.rounds.active[2].phase) == ("agree", "mask")


def test_a_cohort_that_waits_goes_on_after_a_restart():
    room = Room(make_masked(cohort=5, minimum=4))
    first, second = room.devices(10)[:5], room.devices(10)[5:]
    to_phase(room, first, "mask")
    share(room, second)
    room.restart()
    for cohort, number in ((first, 1), (second, 2)):
        through(cohort, lambda number=number: number in room.rounds.ended)
    assert [int(each.version) for each in totals(room)] == [0, 1]


@pytest.mark.parametrize("seed", range(6))
def test_a_restart_after_any_message_goes_on_where_it_was(seed: int, tmp_path: Path):
    """Devices and a server that is made anew from its store after every few messages; some devices vanish."""
    rng = random.Random(seed)
    room = Room(make_masked(cohort=7, minimum=6, lease=30.0), Store(tmp_path / "server.db"))
    devices = room.devices(7)
    missing = devices[3] if seed % 2 else None
    for each in devices:
        assert each.advertise(1).status == 202
        room.restart()
    for _ in range(200):
        if 1 in room.rounds.ended:
            break
        order = [each for each in devices if not (each is missing and room.rounds.active[1].phase != "share")]
        rng.shuffle(order)
        silent = True
        for each in order:
            answer = each.step()
            silent = silent and answer is None
            assert answer is None or answer.status in (200, 202)
            if rng.random() < 0.4:
                before = room.rounds.active.get(1)
                room.restart()
                after = room.rounds.active.get(1)
                assert (before is None) == (after is None)
                if before is not None and after is not None:
                    assert after.state == before.state
                    assert after.publication == before.publication
            if 1 in room.rounds.ended:
                break
        room.wait(30.0 if silent else 0.0)
    (heard,) = totals(room)
    wanted = total_of([each for each in devices if each is not missing], 1)
    assert (heard.gradient.value == wanted["gradient"]).all()
    assert (heard.labels.value == wanted["labels"]).all()
    room.restart()
    assert (weights(room) == folded(room, heard)).all()
    assert room.runner.offer.version == 1
    assert room.store.verify_chain(room.task.hash).index == room.runner.index


def test_a_restart_gives_an_open_phase_its_whole_time_again():
    room = Room(make_masked(cohort=5, minimum=4, lease=30.0))
    devices = room.devices(5)
    number = to_phase(room, devices, "share")
    for each in devices[:4]:
        each.step()
    room.wait(29.0)
    room.clock.now = 5.0  # another machine, or a day later: the monotonic clock begins anew
    room.restart()
    room.wait(29.0)
    assert room.rounds.active[number].phase == "share"
    room.wait(1.0)
    assert room.rounds.active[number].phase == "mask"


def test_after_a_pause_every_phase_waits_for_the_devices_that_were_told_to_stay_away():
    room = Room(make_masked(cohort=5, minimum=4, lease=3.0))
    devices = room.devices(5)
    number = to_phase(room, devices, "share")
    devices[0].step()
    devices[1].step()
    room.rounds.renew(10.0)  # the pause is over; two devices have shared, and look again in up to ten seconds
    for each in devices[2:]:
        each.step()
    assert room.rounds.active[number].phase == "mask"
    for each in devices[2:]:
        each.step()
    room.wait(12.0)
    assert room.rounds.active[number].phase == "mask", "ten seconds to come back, and three to answer"
    through(devices, lambda: number in room.rounds.ended)
    assert room.rounds.ended[number].survived == 5


def test_after_an_outage_every_phase_waits_for_devices_whose_pauses_grew_with_it():
    room = Room(make_masked(cohort=5, minimum=4, lease=3.0))
    devices = room.devices(5)
    number = to_phase(room, devices, "mask")
    devices[0].step()
    room.clock.wall += 5.0  # the server was away so long: the last pause of a device is at most twice as long
    room.restart()
    room.wait(12.0)
    assert room.rounds.active[number].phase == "mask", "ten seconds to come back, and three to answer"
    through(devices, lambda: number in room.rounds.ended)
    assert room.rounds.ended[number].survived == 5


def test_after_a_day_without_a_server_no_phase_waits_longer_than_a_devices_longest_pause():
    room = Room(make_masked(cohort=5, minimum=4, lease=3.0))
    devices = room.devices(5)
    number = to_phase(room, devices, "share")
    for each in devices[:4]:
        each.step()
    room.clock.wall += 86_400.0
    room.restart()
    room.wait(302.0)
    assert room.rounds.active[number].phase == "share"
    room.wait(1.0)
    assert room.rounds.active[number].phase == "mask"


@pytest.mark.parametrize("jump", [-86_400.0, 86_400.0])
def test_a_clock_that_jumps_closes_nothing_and_keeps_nothing_open(jump: float):
    room = Room(make_masked(cohort=5, minimum=4, lease=30.0))
    devices = room.devices(5)
    number = to_phase(room, devices, "share")
    for each in devices[:4]:
        each.step()
    room.clock.wall += jump
    room.wait(29.0)
    assert room.rounds.active[number].phase == "share"
    room.wait(1.0)
    assert room.rounds.active[number].phase == "mask"
    through(devices[:4], lambda: number in room.rounds.ended)
    assert room.rounds.ended[number].phase == "summed"


def test_numbers_of_rounds_never_come_again():
    room = Room(make_masked(cohort=5, minimum=4, lease=30.0))
    devices = room.devices(5)
    number = to_phase(room, devices, "share")
    room.wait(30.0)
    assert number in room.rounds.ended
    newest = room.rounds.newest
    room.restart()
    assert room.rounds.newest == newest == 2
    assert devices[0].look().round == 2


def test_devices_go_on_after_an_older_backup_was_restored_once_and_again(tmp_path: Path):
    task = make_masked(cohort=5, minimum=4, lease=30.0)
    room = Room(task, Store(tmp_path / "server.db"))
    devices = room.devices(5)
    room.run(devices)
    devices[0].advertise(2)
    room.store.backup(tmp_path / "copy.db")
    for each in devices[1:]:
        each.advertise(2)
    through(devices, lambda: 2 in room.rounds.ended)
    room.run(devices)
    for again in range(2):
        room.store.close()
        restore(tmp_path / "copy.db", tmp_path / f"restored-{again}.db")
        room.store = Store(tmp_path / f"restored-{again}.db")
        room.restart()
        number = room.rounds.newest
        assert number > max(each.after for each in devices) + 100
        assert (room.rounds.ended[2].cause, room.rounds.ended[2].devices) == ("restored", 1)
        assert devices[0].look().round == number
        for each in devices:
            each.inner.seq = 1  # what it hears with its 409
        room.run(devices)
        room.run(devices)
        assert [room.rounds.ended[each].phase for each in (1, 2, number, number + 1)] == (
            ["summed", "abandoned", "summed", "summed"]
        )
        assert (totals(room)[-1].gradient.value == total_of(devices, number + 1)["gradient"]).all()
        assert [row.number for row in room.store.rounds(task.hash)] == [number + 2, number + 1, number, 2, 1]
        room.restart()
        assert room.rounds.newest == number + 2
    room.store.close()


# --- sums that are not as the task says ---


def random_elements(device: MaskedDevice, seed: int) -> None:
    """What it sends from now on: uniform elements of the ring, which nobody can tell from a mask."""
    check_in = device.check_in

    def lie():
        assert device.state is not None
        sent = open_message("secagg/masked/1", device.state.sent)
        assert isinstance(sent, Masked)
        noise = np.random.default_rng(seed).bytes(len(sent.body))
        state, device.state = device.state, None
        device.sent = device.envelope(
            "secagg/masked/1", encode(Masked(sent.round, sent.view, noise)), device.inner.seq + 1
        )
        device.state = state
        return device.send()

    assert check_in is not None
    device.check_in = lie  # pyright: ignore[reportAttributeAccessIssue]


def test_of_three_cohorts_a_bad_one_is_dropped_and_the_model_is_that_of_the_two_good_ones():
    room = Room(make_masked(cohort=5, minimum=4))
    devices = room.devices(15)
    random_elements(devices[7], 3)
    for at in (0, 5, 10):
        to_phase(room, devices[at : at + 5], "mask")
        stall(room)
    for at in (0, 5, 10):
        through(devices[at : at + 5], lambda at=at: at // 5 + 1 in room.rounds.ended)
    assert [room.rounds.ended[number].cause for number in (1, 2, 3)] == ["", "bound", ""]
    assert "somebody sent what the task does not allow" in room.rounds.ended[2].why
    heard = totals(room)
    assert [(each.gradient.value == total_of(devices[at : at + 5], number)["gradient"]).all()
            for each, at, number in zip(heard, (0, 10), (1, 3), strict=True)] == [True, True]  # fmt: skip
    assert (weights(room) == folded(room, *heard)).all()
    assert room.rounds.counts == {"summed": 2, "bound": 1}


def test_who_spoils_rounds_is_found_by_the_query_of_the_docs():
    room = Room(make_masked(cohort=5, minimum=4))
    devices = room.devices(8)
    random_elements(devices[6], 3)
    for chosen in ((0, 1, 2, 3, 4), (2, 3, 4, 5, 6), (1, 2, 3, 4, 7), (0, 1, 5, 6, 7), (0, 2, 3, 6, 7)):
        room.run([devices[each] for each in chosen])
        room.clock.now += 1.0
    assert room.rounds.counts == {"summed": 2, "bound": 3}
    query = re.search(r"```sql\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert query is not None
    with room.store.reading() as connection:
        rows = connection.exec_driver_sql(query[1]).fetchall()
    assert rows[0] == (devices[6].id, 3, 0), "in every spoilt round, and in no summed one"
    assert all(row[1:] != (3, 0) for row in rows[1:])


def test_who_reveals_wrong_shares_is_named_to_the_operator_and_to_no_device():
    room = Room(make_masked(cohort=5, minimum=4))
    devices = room.devices(5)
    number = to_phase(room, devices, "reveal")
    liar = devices[2]
    view = open_view(liar.ask(number).body)
    liar.state = core.reveal(liar.terms, liar.state, open_message(view.kind, view.body))
    sent = open_message("secagg/reveal/1", liar.state.sent)
    liar.state = replace(liar.state, sent=encode(replace(sent, shares=bytes(byte ^ 1 for byte in sent.shares))))
    assert liar.post().status == 202
    through(devices, lambda: number in room.rounds.ended)
    told = {event.kind: event.detail for event in room.store.events(task=room.task.hash)}
    assert told["round summed"] == f"round {number}: 5 of 5 devices"
    assert f"device {liar.id} revealed wrong shares of" in told["wrong shares"]
    assert not any(each.id in told["wrong shares"] for each in devices if each is not liar)
    assert not any(liar.id in open_view(each.ask(number).body).why for each in devices)


@pytest.mark.slow
def test_one_device_of_a_thousand_that_sends_random_elements_is_refused_and_the_model_is_unchanged():
    room = Room(make_masked(cohort=1000, minimum=990))
    devices = room.devices(1000)
    random_elements(devices[500], 1)
    before = weights(room)
    number = room.rounds.newest
    for each in devices:
        each.advertise(number)
    for phase in ("share", "mask", "agree", "reveal"):
        assert room.rounds.active[number].phase == phase
        for each in devices:
            assert each.step().status == 202
    assert room.rounds.ended[number].cause == "bound"
    assert (weights(room) == before).all()
    assert room.runner.offer.version == 0
    assert devices[0].look().round == number + 1


# --- what lies on disk ---


def test_bodies_go_when_the_sum_that_has_them_is_kept_and_a_restart_has_the_same_sum(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(server_rounds, "LOOSE", 1000)
    room = Room(make_masked(cohort=9, minimum=7), Store(tmp_path / "server.db"))
    devices = room.devices(9)
    number = to_phase(room, devices, "mask")
    most = 0
    for each in devices[:-1]:
        each.step()
        most = max(most, room.store.counts().bodies)
        state = room.rounds.active[number].state
        room.restart()
        assert room.rounds.active[number].state == state
    assert 1 <= most <= 3
    through(devices, lambda: number in room.rounds.ended)
    assert (totals(room)[0].gradient.value == total_of(devices, number)["gradient"]).all()
    room.store.check()


def test_a_snapshot_in_the_middle_of_a_round_loses_nothing(tmp_path: Path):
    room = Room(make_masked(cohort=5, minimum=4), Store(tmp_path / "server.db"))
    devices = room.devices(5)
    for number in (1, 2, 3):
        to_phase(room, devices, "mask")
        for each in devices[:3]:
            each.step()
        room.runner.take_snapshot()
        room.restart()
        through(devices, lambda number=number: number in room.rounds.ended)
        assert (totals(room)[-1].gradient.value == total_of(devices, number)["gradient"]).all()
        for each in devices:
            each.forget()
    room.runner.take_snapshot()
    kept = weights(room)
    room.restart()
    assert (weights(room) == kept).all()
    assert room.runner.totals == 3
    room.store.check()


# --- pace ---


def test_a_crowd_is_asked_to_look_four_hundred_times_a_second_in_all():
    room = Room(make_masked(cohort=5, minimum=4, window=60.0))
    device = room.device(0)
    assert device.look().wait == 150
    for count, wait in ((400, 1000), (1000, 2500), (100_000, 5000)):
        room.clock.now += 1.0
        room.rounds.seen = dict.fromkeys(map(str, range(count - 1)), room.clock.now)
        device.look()
        room.runner.advance()
        assert device.look().wait == wait
    room.wait(60.0 - 3.0 - 0.05)
    assert device.look().wait <= 250, "no longer than to the deadline"
