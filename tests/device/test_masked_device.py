"""Devices in rounds of masking, over real HTTP: what they say, what they refuse, what they charge.

The server is the one of masked_server.py, which shows everything and can lie; tests/loopback has the real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import QuickClock, joined, rows, run, serving, small_task
from masked_crowd_child import Crowd, Vectors, drawn_in, spy_on_masks
from masked_server import RoundServer, masked_home, masked_task, rounds_of

import crowdml
from crowdml.device.client import Client
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder, OwnerBudget
from crowdml.device.member import Patience
from crowdml.device.rounds import KINDS
from crowdml.device.runner import Runner
from crowdml.device.sources import FileSource
from crowdml.price import Price
from crowdml.privacy.losses import ZCDP
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.protocols import find
from crowdml.secagg import server as core
from crowdml.secagg.messages import Cohort, Survivors, encode
from crowdml.storage import Budget, Charge, Ledger
from crowdml.task import Task

DELTA = 1e-6
ROWS = 2
"""Of the table: gradient and labels."""
ENDED = (core.SUMMED, core.ABANDONED)
PHASES = ("advertised", "shared", "charged", "acknowledged", "agreed", "revealed")


@pytest.fixture
def vectors():
    heard: Vectors = {}

    def note(me: str, number: int, masked: dict[str, Any]) -> None:
        heard[me, number] = masked

    end = spy_on_masks(note)
    yield heard
    end()


def play(
    tmp_path: Path, task: Task, story: Callable[[RoundServer, Crowd], Awaitable[None]], **options: Any
) -> RoundServer:
    """Tell a story with a server and a crowd; then hold the sums, the ledgers and what was said against each other."""

    async def whole() -> RoundServer:
        async with rounds_of(task) as server:
            crowd = Crowd(masked_home(tmp_path, task, server), server.address, task, **options)
            try:
                await story(server, crowd)
                while any(each.roster and each.phase not in ENDED for each in server.rounds.values()):
                    await asyncio.sleep(0.01)  # those who were waited for are gone: until the lease is over
                for number in crowd.said:
                    check_ledger(server, crowd.of(number), crowd.id(number), task)
                return server
            finally:
                await crowd.close()

    server = asyncio.run(asyncio.wait_for(whole(), 60))
    check_words(server)
    return server


def check_words(server: RoundServer) -> None:
    """No device ever said a second thing in a round, and what was sent again are the same bytes (R2)."""
    said: dict[tuple[str, int, str], bytes] = {}
    for sender, number, kind, data in server.heard:
        assert said.setdefault((sender, number, kind), data) == data, f"two {kind} in round {number}"


def check_ledger(server: RoundServer, ledger: Ledger, device: str, task: Task) -> None:
    """Charged for each message that may have left, and for nothing else; a second number beside each charge."""
    written = ledger.next_seq(task.hash)
    charges = ledger.charges(task.hash)
    assert len(charges) == ROWS * written
    assert all(charge.alone is not None for charge in charges)
    assert sum(device in bodies for bodies in server.masked.values()) <= written
    standing = ledger.round(task.hash)
    begun = {number for sender, number, _, _ in server.heard if sender == device}
    assert standing is not None or not begun
    if standing is not None and begun:
        assert standing.number >= max(begun)


def check_sums(server: RoundServer, vectors: Vectors) -> None:
    """Every sum is exact, to the last unit."""
    for number in server.summed:
        for tag, found in server.sums(number).items():
            expected = sum(vectors[one, number][tag].astype(np.int64) for one in server.survivors(number))
            np.testing.assert_array_equal(found, expected)


async def everybody(crowd: Crowd, devices: int = 5, **vanish: str) -> list[Any]:
    return list(await asyncio.gather(*(crowd.run(n, vanish.get(f"d{n}")) for n in range(devices))))


# --- a round ---


def test_a_cohort_of_five_sums_once(tmp_path, vectors):
    async def story(server, crowd):
        endings = await everybody(crowd)
        assert {ending.kind for ending in endings} == {"source"}
        assert [crowd.said[0].count(word) for word in PHASES] == [1] * 6

    server = play(tmp_path, masked_task(), story)
    assert server.summed == [1]
    assert len(server.survivors(1)) == 5
    check_sums(server, vectors)


def test_a_fleet_waits_in_rounds_without_holding_the_gate(tmp_path, vectors):
    """One at work at a time and twenty in rounds at once: a gate that was held while waiting would never open."""
    task = masked_task(cohort=10, minimum=8)

    async def whole():
        async with rounds_of(task) as server:
            home, client = masked_home(tmp_path, task, server), Client(server.address)
            found, protocol = home.accepted(task.hash)
            fleet = Fleet(home, client, found, protocol, 20, single=False, clock=QuickClock().clock, at_work=1)
            fleet.patience = Patience(0.05, 1.0)
            summary = await fleet.run(lambda n: FileSource(f"rows {n}", rows(5, seed=n), found))
            await client.close()
            return server, summary

    server, summary = asyncio.run(asyncio.wait_for(whole(), 60))
    assert summary.check_ins == 20
    assert len(server.summed) == 2
    check_sums(server, vectors)
    assert summary.epsilon_sample_alone > summary.epsilon_sample > 0
    assert summary.epsilon_device_alone > summary.epsilon_device > 0


@pytest.mark.parametrize("phase", PHASES)
def test_a_device_that_vanishes_in_a_phase_leaves_an_exact_sum_and_pays_if_it_drew(tmp_path, vectors, phase):
    async def story(server, crowd):
        endings = await everybody(crowd, d4=phase)
        assert endings[4] is None
        assert drawn_in(crowd.of(4), server.task) == (phase not in ("advertised", "shared"))
        assert all(drawn_in(crowd.of(n), server.task) == 1 for n in range(4))

    server = play(tmp_path, masked_task(lease=2.0, window=2.0), story)
    assert server.summed
    assert (crowd_of(server) == 5) == (phase in ("acknowledged", "agreed", "revealed"))
    check_sums(server, vectors)


def crowd_of(server: RoundServer) -> int:
    return len(server.survivors(server.summed[0]))


@pytest.mark.parametrize("phase", PHASES)
def test_a_device_that_returns_goes_on_or_waits_for_the_next_round(tmp_path, vectors, phase):
    """It vanishes in a phase and returns at once, while the others wait for it: the same keys, the same bytes."""

    async def story(server, crowd):
        async def twice() -> Any:
            assert await crowd.run(4, phase) is None
            return await crowd.run(4)

        endings = await asyncio.gather(*(crowd.run(n) for n in range(4)), twice())
        assert {ending.kind for ending in endings} == {"source"}
        assert [drawn_in(crowd.of(n), server.task) for n in range(5)] == [1] * 5
        assert crowd.of(4).resend() == ()

    server = play(tmp_path, masked_task(), story)
    assert server.summed == [1]
    assert len(server.survivors(1)) == 5
    check_sums(server, vectors)


def test_a_device_that_returns_after_its_round_is_over_has_paid_and_goes_on(tmp_path, vectors):
    async def story(server, crowd):
        await everybody(crowd, d4="charged")  # on disk, and never sent
        assert server.summed[:1] == [1]
        await asyncio.gather(*(crowd.run(n) for n in range(5, 9)), crowd.run(4, most=1))
        assert drawn_in(crowd.of(4), server.task) == 2  # the late one stays charged
        assert crowd.of(4).resend() == ()
        assert crowd.runner(4).life.seq == 1  # the late number was never used
        assert "round-over" not in "".join(crowd.said[4])

    server = play(tmp_path, masked_task(lease=2.0, window=2.0), story, batches=2)
    check_sums(server, vectors)


def test_a_round_that_ends_before_the_draw_costs_nothing_and_the_batch_goes_to_the_next(tmp_path, vectors):
    async def story(server, crowd):
        tasks = [asyncio.create_task(crowd.run(n)) for n in range(3)]
        await asyncio.gather(crowd.run(3, "advertised"), crowd.run(4, "advertised"))
        while server.last.round < 2:
            await asyncio.sleep(0.01)
        assert server.rounds[1].phase == core.ABANDONED
        assert [drawn_in(crowd.of(n), server.task) for n in range(5)] == [0] * 5
        await asyncio.gather(*tasks, crowd.run(3), crowd.run(4))
        assert [drawn_in(crowd.of(n), server.task) for n in range(5)] == [1] * 5
        aloud = [text for text in crowd.said[0] if text.startswith("round 1: ")]
        assert "abandoned" in aloud[-1] or "over" in aloud[-1]  # by whether its shares came in time

    server = play(tmp_path, masked_task(lease=2.0), story)
    assert server.summed == [2]
    check_sums(server, vectors)


def test_a_round_that_is_abandoned_after_the_draw_is_not_refunded(tmp_path):
    async def story(server, crowd):
        endings = await everybody(crowd, d3="shared", d4="shared")
        assert [ending and ending.kind for ending in endings] == ["source"] * 3 + [None] * 2
        assert [drawn_in(crowd.of(n), server.task) for n in range(5)] == [1, 1, 1, 0, 0]

    server = play(tmp_path, masked_task(lease=2.0), story)
    assert server.rounds[1].phase == core.ABANDONED
    assert server.summed == []


def test_answers_that_are_lost_are_asked_for_again_with_the_same_bytes(tmp_path, vectors):
    lost: set[tuple[str, str]] = set()

    def lose(sender: str, kind: str) -> bool:
        new = (sender, kind) not in lost
        lost.add((sender, kind))
        return new

    async def story(server, crowd):
        server.lose = lose
        await everybody(crowd)
        assert len(lost) == 5 * 5

    server = play(tmp_path, masked_task(), story)
    assert server.summed == [1]
    check_sums(server, vectors)


@pytest.mark.parametrize(
    ("phase", "waits_in"), [("advertised", ""), ("shared", "advertised"), ("agreed", "acknowledged")]
)
def test_what_is_sent_again_is_what_was_signed_though_the_device_gave_more_since(tmp_path, vectors, phase, waits_in):
    """It is killed after it said this, and charged by another task, while one of the others keeps the phase open."""

    async def story(server, crowd):
        def sent() -> int:
            return sum(sender == crowd.id(0) and kind == KINDS[phase] for sender, _, kind, _ in server.heard)

        (serial,) = crowd.of(0).take_serials(1)
        others = [asyncio.create_task(crowd.run(n)) for n in range(1, 4)]
        late = [asyncio.create_task(crowd.run(4, waits_in))] if waits_in else []
        assert await crowd.run(0, phase) is None
        give_more(crowd.of(0), small_task("other").hash, serial)
        again, before = asyncio.create_task(crowd.run(0)), sent()
        while sent() == before:
            await asyncio.sleep(0.01)
        await asyncio.gather(*late)
        await asyncio.gather(again, crowd.run(4), *others)

    server = play(tmp_path, masked_task(), story)
    assert server.summed == [1]
    check_sums(server, vectors)


def give_more(ledger: Ledger, task: bytes, serial: int) -> None:
    loss, who, plenty = (
        ZCDP(Fraction(1, 10)),
        (Observer.ANYONE, Adjacency.REPLACE_SAMPLE),
        Budget(Fraction(9), DELTA, 99),
    )
    ledger.charge(
        task, [Charge(task, "gradient", loss, loss, *who, serial, serial, "2026-01-01T00:00:00+00:00")], [plenty]
    )


# --- a server that lies ---


def _smaller_round(view):
    return replace(view, round=max(1, view.round - 1)) if view.phase == "advertise" else view


def _cohort_of_one(view):
    if view.kind != Cohort.kind:
        return view
    from crowdml.secagg.messages import open_message

    message = open_message(view.kind, view.body)
    return replace(view, body=encode(replace(message, roster=message.roster[:64])))


def _back_again(view):
    return replace(view, phase="advertise", body=b"", kind="") if view.phase == "mask" else view


def _other_model(view):
    return replace(view, publication=(0, "sgd/params/1", b"\x80")) if view.publication else view


def _no_model(view):
    return replace(view, publication=None)


def _few_survivors(view):
    return view if view.kind != Survivors.kind else replace(view, body=encode(Survivors(view.round, b"\x80")))


def _garbage(view):
    return replace(view, body=b"garbage") if view.body else view


def _another_message(view):
    return replace(view, kind=Survivors.kind) if view.kind == Cohort.kind else view


LIES = {
    "a cohort of one": (_cohort_of_one, 0),
    "a phase again": (_back_again, 0),
    "a publication of another shape": (_other_model, 0),
    "no publication": (_no_model, 0),
    "too few survivors": (_few_survivors, 1),
    "garbage": (_garbage, 0),
    "another message": (_another_message, 0),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_told_to_the_owner_and_ends_that_round_alone(tmp_path, vectors, name):
    """The device of number 4 is lied to in its first round. It says why it left, and takes part in the next."""
    lie, costs = LIES[name]

    async def story(server, crowd):
        me, first = crowd.id(4), server.last.round
        server.lie = lambda device, view: lie(view) if (device, view.round) == (me, first) else view
        others = [asyncio.create_task(crowd.run(n)) for n in range(4)]
        mine = asyncio.create_task(crowd.run(4))
        await asyncio.gather(*others)
        aloud = [text for text in crowd.said[4] if "takes no further part in this round" in text]
        assert len(aloud) == 1
        assert aloud[0].startswith("round 1: ")
        assert drawn_in(crowd.of(4), server.task) == costs
        standing = crowd.of(4).round(server.task.hash)
        assert standing.body is None or standing.number > first
        others = [asyncio.create_task(crowd.run(n)) for n in range(5, 9)]
        ending, *_ = await asyncio.gather(mine, *others)
        assert ending.kind == "source"
        assert drawn_in(crowd.of(4), server.task) == 1

    server = play(tmp_path, masked_task(lease=2.0, window=3.0), story)
    check_sums(server, vectors)


def test_a_device_that_is_shown_another_model_than_its_cohort_is_in_no_sum(tmp_path, vectors):
    """It has the right shape, so the device works with it; its masks are then those of no one else."""

    async def story(server, crowd):
        me = crowd.id(4)
        version, kind, body = server.publication
        other = (version, kind, body[:-1] + bytes([body[-1] ^ 1]))
        server.lie = lambda device, view: (
            replace(view, publication=other) if device == me and view.publication else view
        )
        await asyncio.gather(*(crowd.run(n) for n in range(5)))
        assert any("did not take this device's part" in text for text in crowd.said[4])
        assert drawn_in(crowd.of(4), server.task) == 1

    server = play(tmp_path, masked_task(lease=2.0), story)
    assert server.summed == [1]
    assert len(server.survivors(1)) == 4
    check_sums(server, vectors)


def test_a_server_that_lies_in_round_after_round_loses_the_device(tmp_path):
    async def story(server, crowd):
        me = crowd.id(4)
        server.lie = lambda device, view: _cohort_of_one(view) if device == me else view
        others = [asyncio.create_task(crowd.run(n)) for n in range(4)]
        ending = await crowd.run(4)
        assert ending.kind == "refused"
        assert "in a row" in ending.reason
        assert drawn_in(crowd.of(4), server.task) == 0
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    play(tmp_path, masked_task(lease=0.5, window=0.5), story, batches=20)


def test_an_older_round_is_waited_out_and_nothing_is_said_in_it(tmp_path):
    async def story(server, crowd):
        await everybody(crowd)
        before = len(server.heard)
        me = crowd.id(0)
        server.rounds = {1: core.begin(1)}  # as if the server had lost its store, or played for time
        crowd.batches = 2
        crowd.of(0).keep_round(server.task.hash, replace(crowd.of(0).round(server.task.hash), number=7))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(crowd.run(0), 2)
        assert [each for each in server.heard[before:] if each[0] == me] == []
        assert crowd.of(0).round(server.task.hash).number == 7

    play(tmp_path, masked_task(), story)


def test_a_round_far_above_all_that_a_server_can_have_come_to_is_waited_out(tmp_path, vectors):
    """Whoever lies once about the number does not keep the device out of all later rounds."""

    async def story(server, crowd):
        me, looks = crowd.id(0), iter(range(3))
        server.lie = lambda device, view: (
            replace(view, round=2**62) if device == me and next(looks, None) is not None else view
        )
        await everybody(crowd)
        assert any("no server has come to" in text for text in crowd.said[0])
        assert next(looks, None) is None

    server = play(tmp_path, masked_task(), story)
    assert server.summed == [1]
    check_sums(server, vectors)


def test_devices_go_with_a_server_that_was_restored_and_numbers_by_the_time(tmp_path, vectors):
    async def story(server, crowd):
        await everybody(crowd)
        number = 1_000_000 + time.time_ns() // 1_000_000
        server.rounds[number] = core.begin(number)
        crowd.batches = 2
        await everybody(crowd)
        assert server.summed == [1, number]

    server = play(tmp_path, masked_task(), story)
    check_sums(server, vectors)


# --- samples that serve several times ---


def served(ledger: Ledger, task: Task) -> list[int]:
    """How often each sample that was given has been charged for the gradient."""
    spans = [
        (each.first_sample, each.last_sample) for each in ledger.charges(task.hash) if each.mechanism == "gradient"
    ]
    return [sum(first <= serial <= last for first, last in spans) for serial in range(ledger.next_serial())]


@pytest.mark.parametrize("waits", [True, False])
def test_a_batch_serves_as_often_as_the_task_says_each_time_charged(tmp_path, vectors, waits):
    async def story(server, crowd):
        await everybody(crowd)
        for number in range(5):
            ledger = crowd.of(number)
            assert served(ledger, server.task) == [3] * 10
            assert ledger.waiting(server.task.hash) == ()
            assert ledger.samples_given() == 10
            _, total = ledger.dearest_sample(DELTA)
            assert 1 < total.epsilon(DELTA) <= 1.5
            assert ledger.dearest_sample(DELTA, alone=True)[1].epsilon(DELTA) > total.epsilon(DELTA)

    server = play(tmp_path, masked_task(uses=3), story, batches=2, waits=waits)
    assert len(server.summed) == 6
    check_sums(server, vectors)


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("phase", ["advertised", "charged", "revealed"])
def test_after_a_restart_a_batch_serves_as_often_as_is_left(tmp_path, vectors, phase, waits):
    async def story(server, crowd):
        async def again_and_again() -> None:
            while await crowd.run(4, phase) is None:  # vanishes in every round
                if drawn_in(crowd.of(4), server.task) >= 3:
                    break
            await crowd.run(4)

        await asyncio.gather(*(crowd.run(n) for n in range(4)), again_and_again())
        assert served(crowd.of(4), server.task) == [3] * 5
        assert crowd.of(4).waiting(server.task.hash) == ()

    server = play(tmp_path, masked_task(uses=3), story, waits=waits)
    assert len(server.summed) == 3
    check_sums(server, vectors)


@pytest.mark.parametrize("waits", [True, False])
def test_a_batch_serves_several_times_without_masks_too_and_over_restarts(tmp_path, waits):
    task = small_task("several", samples=1000)
    task = task.with_(privacy=replace(task.privacy, uses=3, budget=replace(task.privacy.budget, epsilon=Fraction(10))))
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        run(home, server.address, server.code, task, rows(10), waits=waits, most=2)  # stops within the first batch
        for _ in range(3):
            run(home, server.address, None, task, rows(10), waits=waits, most=1)
        run(home, server.address, None, task, rows(10), waits=waits)
        assert server.check_ins(task) == 6
        with home.ledger() as ledger:
            assert served(ledger, task) == [3] * 10
            assert ledger.waiting(task.hash) == ()
            assert ledger.sources() == {"rows 0": 10}


def test_a_batch_whose_owner_allows_fewer_uses_makes_room_for_the_next(tmp_path):
    task = small_task("fewer", samples=1000)
    task = task.with_(privacy=replace(task.privacy, uses=3, budget=replace(task.privacy.budget, epsilon=Fraction(10))))
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        twice = Price.of(find(task), task).sample_epsilon(2)
        home.set_budget(OwnerBudget(str(Fraction(str(round(twice * 1.2, 3)))), 1000))
        run(home, server.address, server.code, task, rows(10))
        with home.ledger() as ledger:
            counted = served(ledger, task)
            assert len(counted) == 10
            assert set(counted) < {1, 2}


# --- kill -9 ---


def kill_in_rounds(tmp_path: Path, kills: int, seed: int, waits: str) -> None:
    """Four devices that live, and one that is killed again and again and restarted each time."""
    task = masked_task("killed", uses=2, lease=1.5, window=1.5, samples=20_000)
    here = Path(__file__)
    paths = [str(Path(crowdml.__file__).parents[1]), str(here.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    log, task_file, moments = tmp_path / "log", tmp_path / "task.json", random.Random(seed)
    task_file.write_bytes(task.canonical)
    log.write_text("")
    heard: Vectors = {}

    def note(me: str, number: int, masked: dict[str, Any]) -> None:
        heard[me, number] = masked

    async def child(server: RoundServer, folder: Path, batches: int, moment: int) -> int:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(here.with_name("masked_crowd_child.py")), str(folder), server.address, str(task_file),
            str(batches), waits, str(moment), str(log), env=environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        said, _ = await process.communicate()
        assert process.returncode in (0, -9), said.decode()
        return int(process.returncode == -9)

    async def whole() -> tuple[RoundServer, int]:
        async with rounds_of(task) as server:
            others = Crowd(masked_home(tmp_path / "others", task, server), server.address, task, batches=10**4)
            home = masked_home(tmp_path / "device", task, server)
            me = home.key(0).id
            living = [asyncio.create_task(others.run(n)) for n in range(4)]
            died, batches = 0, 1
            for _ in range(kills):
                died += await child(server, home.path, batches, moments.randrange(1, 160))
                with home.ledger() as ledger:
                    check_ledger(server, ledger, me, task)
                    assert max(served(ledger, task), default=0) <= 2
                    batches = ledger.samples_given() // 5 + 1
                living = [
                    each if not each.done() else asyncio.create_task(others.run(n)) for n, each in enumerate(living)
                ]
            assert await child(server, home.path, batches, 0) == 0
            with home.ledger() as ledger:
                check_ledger(server, ledger, me, task)
                assert served(ledger, task) == [2] * (5 * batches)
                assert ledger.resend() == ()
            for each in living:
                each.cancel()
            await asyncio.gather(*living, return_exceptions=True)
            await others.close()
            return server, died

    end = spy_on_masks(note)
    try:
        server, died = asyncio.run(whole())
    finally:
        end()
    for line in log.read_text().splitlines():
        me, number, masked = json.loads(line)
        heard[me, number] = {tag: np.array(each) for tag, each in masked.items()}
    check_words(server)
    check_sums(server, heard)
    assert server.summed
    assert died >= kills // 3


@pytest.mark.skipif(os.name != "posix", reason="kill -9 is POSIX")
@pytest.mark.kill
def test_a_device_survives_a_few_kills_in_rounds(tmp_path):
    kill_in_rounds(tmp_path, kills=6, seed=1, waits="waits")


@pytest.mark.kill
@pytest.mark.skipif(os.name != "posix", reason="kill -9 is POSIX")
@pytest.mark.parametrize("waits", ["waits", "passes"])
def test_a_device_survives_many_kills_in_rounds(tmp_path, waits):
    kill_in_rounds(tmp_path, kills=20, seed=2, waits=waits)


def test_the_runner_of_an_unmasked_task_has_no_rounds(tmp_path):
    with serving(tmp_path / "server", small_task()) as server:
        fleet, _ = run(joined(tmp_path / "device", small_task()), server.address, server.code, small_task(), rows(5))
        assert all(isinstance(runner, Runner) and runner._rounds is None for runner in fleet.runners)


def test_a_late_message_that_is_dropped_after_a_restart_does_not_forget_how_often_its_batch_served(tmp_path):
    async def story(server, crowd):
        await everybody(crowd, d4="charged")  # its first use is on disk, and never arrives in time
        assert served(crowd.of(4), server.task) == [1] * 5
        await asyncio.gather(*(crowd.run(n) for n in range(5, 9)), crowd.run(4))
        assert served(crowd.of(4), server.task) == [2] * 5

    play(tmp_path, masked_task(uses=2, lease=2.0, window=2.0), story)


def test_a_device_whose_clock_is_off_says_so_pays_nothing_and_goes_on_when_it_is_set(tmp_path):
    task = masked_task("clocks", window=30.0, lease=30.0)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        run(home, server.address, server.code, task, rows(25)[:0], devices=5)
        _, summary = run(home, server.address, None, task, rows(25), devices=5, time_=QuickClock(ahead=-9000.0))
        assert summary.endings == {"refused": 5}
        with home.ledger() as ledger:
            assert all(ledger.of(number).charges(task.hash) == () for number in range(5))
        run(home, server.address, None, task, rows(25), devices=5)
        latest = time.monotonic() + 30  # the server adds up after the last device was answered
        while not server.hub.rounds(task.hash).counts and time.monotonic() < latest:
            time.sleep(0.05)
        assert server.hub.rounds(task.hash).counts == {"summed": 1}


def test_a_masked_fleet_asks_before_it_draws_and_one_that_was_put_back_gives_nothing(tmp_path):
    """Review 3, privacy finding 1: the server shows what was said in the round, for the vectors are gone."""
    task, samples = masked_task("put-back", window=30.0, lease=30.0), rows(75)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        run(home, server.address, server.code, task, samples[:25], devices=5)
        shutil.copytree(home.path, tmp_path / "copy")
        assert run(home, server.address, None, task, samples[:50], devices=5)[1].check_ins == 5
        copy = Folder(tmp_path / "copy")

        def begun() -> list[int]:
            with copy.ledger() as ledger:
                return [ledger.of(number).round(task.hash).number for number in range(5)]

        before = begun()
        _, summary = run(copy, server.address, None, task, samples, devices=5)
        assert begun() == before, "none went into another round"
        assert (summary.check_ins, summary.endings) == (0, {"budget": 5})
        assert "had given 10 samples, and its ledger, which knows of 5" in summary.reason
        assert server.hub.rounds(task.hash).counts == {"summed": 2}


def test_a_lost_ledger_begins_from_what_was_signed_in_the_round_and_promises_no_second_number(tmp_path):
    """The server keeps no masked vector; the agreement and the reveal that came after it carry the totals."""
    task = masked_task("lost", window=30.0, lease=30.0)
    samples = rows(50)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        run(home, server.address, server.code, task, samples[:25], devices=5)
        with home.ledger() as ledger:
            before = [ledger.of(number).device_total().epsilon(DELTA) for number in range(5)]
        for path in home.path.glob("ledger.sqlite*"):
            path.unlink()
        fleet, _ = run(home, server.address, None, task, samples[25:], devices=5, new_data=True)
        assert (home.recovered, home.exhausted) == (frozenset(range(5)), frozenset())
        for number, runner in enumerate(fleet.runners):
            assert runner.counts.check_ins == 1
            with home.ledger() as ledger:
                mine = ledger.of(number)
                assert mine.device_total().epsilon(DELTA) >= before[number]
                assert mine.device_total(alone=True).unbounded
                assert mine.dearest_sample(DELTA, alone=True)[1].unbounded
                assert mine.round(task.hash).number >= 2
