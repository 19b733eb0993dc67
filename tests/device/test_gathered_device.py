"""Devices of a gathered task: each gives once a round, and who waits for the next one is charged nothing."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import LoopbackServer, QuickClock, joined, run, serving, take_part

from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder
from crowdml.device.runner import Runner
from crowdml.device.timers import Timers
from crowdml.errors import ProtocolError
from crowdml.privacy.private import Private
from crowdml.protocol import CheckOut, Role, Rule, Step, Stop, Wake, Woken
from crowdml.protocols import PROTOCOLS, find, settled
from crowdml.server.runner import TaskRunner
from crowdml.server.transcript import replay, write_transcript
from crowdml.storage.server import restore
from crowdml.task import Task, parse
from crowdml.turn import first_turn
from crowdml.wire.problems import Problem

sys.path.insert(0, str(Path(__file__).parents[1]))
from gathered_task import gathered_plugin, make, text  # noqa: F401  a fixture


def rows(n: int) -> list[tuple[Any, int]]:
    rng = np.random.default_rng(3)
    return [(rng.normal(size=2), int(rng.integers(2))) for _ in range(n)]


def charged(home: Folder) -> int:
    with home.ledger() as ledger:
        return len(ledger.charges())


class Enough(Exception):  # noqa: N818  the test has seen enough
    """A device has waited for as long as the test wants to see it wait."""


class Waiting(QuickClock):
    """A clock on which nobody waits for long."""

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        if len(self.slept) > 5:
            raise Enough


class Short(QuickClock):
    """A clock that is right, on which sleep is short and a crowd does not wait forever."""

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0.02)
        if len(self.slept) > 8000:
            raise Enough


def at_version(version: int, server: LoopbackServer, task: Task) -> TaskRunner:
    """The task, once it has published this version: the server sums a cohort up after it answered its devices."""
    runner = server.hub.find(task.hash)
    for _ in range(2000):
        if server.call(server.hub.write(lambda: runner.offer.version)) >= version:
            break
    assert runner.offer.version == version
    return runner


def waits(home: Folder, server: Any, task: Task, samples: list[tuple[Any, int]], code: str | None = None) -> None:
    with pytest.raises(Enough):
        run(home, server.address, code, task, samples, time_=Waiting())


def test_a_crowd_learns_round_by_round_and_its_transcript_leads_to_the_same_bits(tmp_path: Path):
    task = make("crowd", size=3, batch=2)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "home", task)
        _, summary = run(home, server.address, server.code, task, rows(24), devices=3)
        assert (summary.check_ins, summary.endings) == (12, {"source": 3})
        runner = server.hub.find(task.hash)
        assert (runner.offer.version, runner.check_ins, runner.own) == (4, 12, 4)
        with (tmp_path / "told").open("wb") as file:
            write_transcript(server.hub.store, task.hash, file)
        assert replay(tmp_path / "told").body == runner.offer.body
        figures = runner.closing.now()
        assert figures is not None
        assert figures.text(figures.opened_at).startswith(
            "round 4: 0 of 3 uploads, closes at 3; it has been waiting for"
        )


def test_a_device_gives_once_a_round_and_waits_for_the_next_one_uncharged_also_after_a_restart(tmp_path: Path):
    task = make("patient", size=2)
    with serving(tmp_path / "server", task) as server:
        one, other = joined(tmp_path / "one", task), joined(tmp_path / "other", task)
        waits(one, server, task, rows(3), server.code)
        assert charged(one) == 1
        waits(one, server, task, rows(3))
        assert (charged(one), server.hub.find(task.hash).check_ins) == (1, 1)
        run(other, server.address, server.code, task, rows(1))
        assert server.hub.find(task.hash).offer.version == 1
        waits(one, server, task, rows(3))
        assert (charged(one), server.hub.find(task.hash).check_ins) == (2, 3)


def test_an_upload_that_comes_too_late_stays_charged_is_dropped_and_the_device_goes_on(tmp_path: Path, monkeypatch):
    task = make("late", size=1)
    with serving(tmp_path / "server", task) as server:
        one, other = joined(tmp_path / "one", task), joined(tmp_path / "other", task)
        run(other, server.address, server.code, task, [])
        write, raced = Runner._write, list[int]()

        async def race(self: Runner, *arguments: Any) -> Any:
            sealed = await write(self, *arguments)
            if not raced:
                raced.append(1)
                await take_part(other, server.address, None, task, rows(1))
            return sealed

        monkeypatch.setattr(Runner, "_write", race)
        fleet, summary = run(one, server.address, server.code, task, rows(2))
        assert (charged(one), summary.check_ins, summary.endings) == (2, 1, {"source": 1})
        assert fleet.runners[0].counts.problems["round-over"] == 1
        with one.ledger() as ledger:
            assert not ledger.resend()
        assert server.hub.find(task.hash).check_ins == 2


def test_a_device_that_waits_for_a_round_lets_others_of_its_fleet_work(tmp_path: Path, monkeypatch):
    """A fleet lets few devices work at once: one that waits for a round is not one of them."""
    monkeypatch.setattr(Fleet, "at_work", 1)
    task = make("gate", size=4)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "home", task)
        _, summary = run(home, server.address, server.code, task, rows(8), devices=4)
        assert (summary.check_ins, server.hub.find(task.hash).offer.version) == (8, 2)


def test_under_masks_the_totals_of_cohorts_are_the_uploads(tmp_path: Path):
    task = make("masked", size=2, masked=True)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "home", task)
        _, summary = run(home, server.address, server.code, task, rows(12), devices=6)
        assert (summary.check_ins, summary.endings) == (12, {"source": 6})
        runner = at_version(2, server, task)
        assert (runner.offer.version, runner.check_ins, runner.totals, runner.own) == (2, 12, 4, 6)
        with (tmp_path / "told").open("wb") as file:
            write_transcript(server.hub.store, task.hash, file)
        assert replay(tmp_path / "told").body == runner.offer.body
        body = runner.offer.body
    with serving(tmp_path / "server", task) as server:
        assert server.hub.find(task.hash).offer.body == body


def test_a_device_whose_cohort_came_to_no_total_gives_to_the_open_round_again_and_pays_again(tmp_path, monkeypatch):
    """Too few devices are left for another cohort otherwise: nobody could ever close the round."""
    total, abandoned = TaskRunner._total, list[int]()

    def first_fails(self: TaskRunner, *rounds: Any) -> Any:
        if abandoned:
            return total(self, *rounds)
        abandoned.append(1)
        return Problem("wrong-message", "the total is not what the task says")

    monkeypatch.setattr(TaskRunner, "_total", first_fails)
    task = make("again", size=1, masked=True)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "home", task)
        _, summary = run(home, server.address, server.code, task, rows(6), devices=3, time_=Short())
        assert (summary.check_ins, summary.endings) == (6, {"source": 3})
        runner = at_version(1, server, task)
        assert (runner.offer.version, runner.totals) == (1, 1)


def test_a_device_whose_vector_came_too_late_for_its_cohort_gives_to_the_open_round_again(tmp_path, monkeypatch):
    """The round needs two cohorts of five, and there are nine devices: without this one it would never close."""
    larger = text("late-vector", size=2, steps=1, masked=True).replace("window = 0.2", "window = 600")
    task = settled(parse(larger.replace("cohort = 3\nminimum = 3", "cohort = 5\nminimum = 4")))
    write, late = Runner._write, list[Runner]()

    async def hold_back(self: Runner, *arguments: Any) -> Any:
        sealed = await write(self, *arguments)
        if not late:
            late.append(self)
            rounds = server.hub.rounds(task.hash)
            while len(rounds.active[1].state.masked) < 4:
                await asyncio.sleep(0.01)
            out_of_time = server.hub.write(lambda: rounds._put(replace(rounds.active[1], deadline=0.0)))
            await asyncio.to_thread(server.call, out_of_time)
            while 1 in rounds.active:  # the others sum up without it
                await asyncio.sleep(0.01)
        return sealed

    monkeypatch.setattr(Runner, "_write", hold_back)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "home", task)
        run(home, server.address, server.code, task, rows(18), devices=9, time_=Short())
        runner = at_version(1, server, task)
        assert (runner.offer.version, runner.totals, runner.check_ins) == (1, 2, 9)
        assert (late[0].counts.check_ins, late[0].life.trips) == (1, 2), "what was drawn stays charged"


@pytest.mark.parametrize("masked", [False, True])
def test_a_device_gives_again_to_a_server_that_was_restored_and_forgot_what_it_gave(
    tmp_path: Path, monkeypatch, masked: bool
):
    begin, told = Runner.__init__, list[str]()
    monkeypatch.setattr(Runner, "__init__", lambda self, *a, **more: begin(self, *a, **{**more, "tell": told.append}))
    task = make("forgot", size=2 if masked else 6, masked=masked)  # of two cohorts it knows that one was not summed
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "home", task)
        run(home, server.address, server.code, task, [], devices=6)
        server.hub.store.backup(tmp_path / "copy")
        run(home, server.address, None, task, rows(12), devices=6, most=1)
        at_version(1, server, task)
        server.stop()
        server.folder = tmp_path / "again"
        server.folder.mkdir()
        restore(tmp_path / "copy", server.folder / "server.sqlite")
        server.start()
        run(home, server.address, None, task, rows(12), devices=6, time_=Short())
        assert charged(home) == 2, "of the first device"
        at_version(1, server, task)
    assert told.count("what this device gave to round 0 is in no sum of it: it gives again, and pays again") == 6


# --- timers ---


def test_a_timer_runs_out_after_a_second_at_the_soonest():
    timers, tags = Timers().set([Wake(0, "now"), Wake(5, "later")], 10.0)
    assert (timers.due, tags) == ({"now": 11.0, "later": 15.0}, ("now", "later"))


def with_device(monkeypatch: pytest.MonkeyPatch, task: Task, on: dict[type, Any]) -> None:
    """The protocol with other handlers for its device."""
    ours, plugin = find(task), PROTOCOLS._named["test_median"]
    changed = replace(ours, device=Role(ours.device.start, {**ours.device.on, **on}))
    monkeypatch.setitem(PROTOCOLS._named, "test_median", replace(plugin, value=changed))
    find.cache_clear()


@pytest.fixture
def forgetful():
    yield
    find.cache_clear()


def test_a_device_is_woken_when_its_protocol_asked_for_it_and_what_it_lets_out_then_is_charged_and_sent(
    tmp_path: Path, monkeypatch, forgetful
):
    task = make("woken", size=1)
    publication = type(first_turn(find(task), task).published)
    contribute = find(task).device.on[publication]
    heard: list[str] = []

    def later(task, batch, model, ctx):
        return Step((batch, model), (Wake(30, "draw"),))

    def draw(task, state, event, ctx):
        heard.extend([event.tag] if ctx.me != "rehearsal" else [])
        if event.tag == "after":  # of the batch before
            return Step(state)
        step = contribute(task, *state, ctx)
        return Step(step.state, (*step.effects, Wake(5, "after")))

    with_device(monkeypatch, task, {publication: later, Woken: draw})
    with serving(tmp_path / "server", task) as server:
        home, clock = joined(tmp_path / "home", task), QuickClock()
        _, summary = run(home, server.address, server.code, task, rows(2), time_=clock)
        assert (summary.check_ins, charged(home), server.hub.find(task.hash).offer.version) == (2, 2, 2)
    assert heard == ["draw", "after", "draw", "after"]
    assert clock.ahead > 60


def test_a_timer_of_a_device_survives_its_restart_and_may_end_its_work(tmp_path: Path, monkeypatch, forgetful):
    task = make("ends", size=1)
    publication = type(first_turn(find(task), task).published)
    contribute = find(task).device.on[publication]

    def give(task, batch, model, ctx):
        step = contribute(task, batch, model, ctx)
        return Step(step.state, (*step.effects, Wake(1000, "end")))

    with_device(monkeypatch, task, {publication: give, Woken: lambda *_: Step(None, (Stop(Rule("own", "enough")),))})
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "home", task)
        _, summary = run(home, server.address, server.code, task, rows(1), most=1)
        assert summary.endings == {"limit": 1}
        _, summary = run(home, server.address, None, task, rows(1))
        assert (summary.endings, summary.reason) == ({"stopped": 1}, "enough")


def test_what_a_timer_says_without_a_batch_is_refused_before_it_is_drawn_for_nothing(
    tmp_path: Path, monkeypatch, forgetful
):
    task = make("nothing", size=1)
    publication = type(first_turn(find(task), task).published)
    contribute, kept = find(task).device.on[publication], list[Any]()

    def give(task, batch, model, ctx):
        kept.append((batch, model))
        step = contribute(task, batch, model, ctx)
        return Step(step.state, (*step.effects, Wake(1, "again")))

    def again(task, state, event, ctx):
        return contribute(task, *kept[0], ctx)

    with_device(monkeypatch, task, {publication: give, Woken: again})
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "home", task)
        with pytest.raises(ProtocolError, match="no batch is under way: there is no sample to charge"):
            run(home, server.address, server.code, task, rows(1))
        assert (charged(home), server.hub.find(task.hash).check_ins) == (1, 1)


@pytest.mark.parametrize("draws", [False, True])
def test_a_timer_that_asks_for_the_publication_keeps_its_state_and_its_timers_and_lets_nothing_out(
    tmp_path: Path, monkeypatch, forgetful, draws: bool
):
    task = make("asks", size=1)
    publication = type(first_turn(find(task), task).published)
    contribute, kept, heard = find(task).device.on[publication], list[Any](), list[Any]()

    def give(task, batch, model, ctx):
        if not isinstance(batch, Private):  # between two batches
            heard.append(batch)
            return Step(None)
        kept.append((batch, model))
        step = contribute(task, batch, model, ctx)
        return Step(step.state, (*step.effects, Wake(1, "ask")))

    def ask(task, state, event, ctx):
        if event.tag == "after":
            heard.append("after")
            return Step(state)
        if draws:
            contribute(task, *kept[-1], ctx)
        return Step("asked", (CheckOut(), Wake(5, "after")))

    with_device(monkeypatch, task, {publication: give, Woken: ask})
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "home", task)
        if draws:
            with pytest.raises(ProtocolError, match="there is no sample to charge"):
                run(home, server.address, server.code, task, rows(1))
        else:
            run(home, server.address, server.code, task, rows(1))
    assert heard == ([] if draws else ["asked", "after"])
