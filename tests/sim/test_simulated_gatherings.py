"""Gathered rounds in the simulator: both engines, under masks, in time; devices that lie; timers."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from plugged import MEDIANS, SIGNS, no_plugins_left

from crowdml import Crowd
from crowdml.arrays import Samples
from crowdml.channels import Stacked
from crowdml.datasets.populations import iid
from crowdml.errors import ProtocolError, TaskError
from crowdml.privacy.mechanisms import CountLaplace
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1
from crowdml.protocol import Gathered, Step, Wake, Woken
from crowdml.protocols import find
from crowdml.sim.studies import simulate
from crowdml.sim.trial import Trial, laid_out, run_trial
from crowdml.sim.world import Delay
from crowdml.task import parse
from crowdml.turn import Tamper, server_turn

TEXT = """
name = "medians"
[features]
dimension = 4
norm = {{ kind = "l2", bound = 1.0 }}
[labels]
classes = ["a", "b", "c"]
[model]
kind = "softmax"
[protocol]
kind = "medians"
batch = 5
rate = 4.0
uploads = {uploads}
minimum = 3
{more}
[privacy]
{privacy}
"""
GAUSSIAN = 'mechanism = "discrete-gaussian"\nepsilon = { gradient = 8.0 }'
MASKED = 'mechanism = "skellam"\nepsilon = { gradient = 8.0 }\n[masking]\ncohort = 6\nminimum = 5\ncolluders = 1\n'
LATE = Delay("exponential", 20.0)


@pytest.fixture(autouse=True, scope="module")
def plugged() -> Generator[None]:
    with no_plugins_left(MEDIANS, SIGNS):
        yield


def samples(rows: int = 300):
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, rows).astype(np.int32)
    x = rng.normal(size=(rows, 4)).astype(np.float32) + 3 * np.eye(3, 4, dtype=np.float32)[y]
    return x / np.linalg.norm(x, axis=1, keepdims=True), y


X, Y = samples()


def make(privacy: str = GAUSSIAN, uploads: int = 7, more: str = "", stop: str = ""):
    return parse(TEXT.format(privacy=privacy, uploads=uploads, more=more) + stop)


def trial(task: Any, devices: int = 20, **settings: Any) -> Trial:
    return Trial(task, iid(len(Y), devices, 1), 5, **{"points": 4, **settings})


@pytest.mark.parametrize("privacy", [GAUSSIAN, MASKED], ids=["alone", "masked"])
def test_both_engines_gather_the_same_rounds(privacy: str):
    task = make(privacy, uploads=7 if privacy == GAUSSIAN else 3)
    fast, slow = (run_trial(trial(task, engine=engine), X, Y) for engine in ("compiled", "events"))
    assert laid_out(trial(task), Y).engine == "compiled"
    assert fast.heard == slow.heard == int(fast.state.version) == (8 if privacy == GAUSSIAN else 3)
    np.testing.assert_array_equal(fast.points, slow.points)
    np.testing.assert_allclose(fast.weights, slow.weights, atol=2e-3)  # a few grid steps apart: NumPy and JAX
    for name in ("device", "trip", "samples", "version", "counted"):
        np.testing.assert_array_equal(getattr(fast.schedule, name), getattr(slow.schedule, name))
    assert np.mean(find(task).predict(task, slow.model, X) == Y) > 0.6


def test_the_server_hears_a_round_as_one_event_with_every_upload_in_it(monkeypatch: pytest.MonkeyPatch):
    heard: list[Gathered] = []

    def listen(protocol: Any, task: Any, state: Any, event: Any, **more: Any) -> Any:
        heard.append(event)
        return server_turn(protocol, task, state, event, **more)

    monkeypatch.setattr("crowdml.sim.run.server_turn", listen)
    run_trial(trial(make(MASKED, uploads=3), dropout=0.1, engine="events"), X, Y)
    assert [int(each.round) for each in heard] == [0, 1, 2]
    for each in heard:
        assert isinstance(each.uploads, Stacked)
        assert each.uploads.array("gradient").shape == (3, 12)
        assert set(each.uploads.devices.tolist()) <= {5, 6}  # the survivors of its cohorts


def test_an_abandoned_cohort_fills_no_round_and_has_paid():
    task = make(MASKED, uploads=3)
    laid: Any = laid_out(trial(task, dropout=0.25), Y)
    assert 0 < laid.layout.summed.sum() < len(laid.layout)
    fast, slow = (run_trial(trial(task, dropout=0.25, engine=engine), X, Y) for engine in ("compiled", "events"))
    assert fast.heard == slow.heard == laid.layout.summed.sum() // 3
    assert len(slow.schedule) == len(fast.schedule) == laid.layout.there.sum()
    np.testing.assert_allclose(fast.model, slow.model, atol=2e-3)


@pytest.mark.parametrize("engine", ["compiled", "events"])
def test_a_stop_ends_gathered_rounds_and_the_bill(engine: str):
    task = make(stop="[stop]\nsteps = 3\n")
    study = simulate(task, X, Y, devices=20, seed=[1], engine=engine)
    assert study.runs[0].stopped is not None
    assert study.runs[0].stopped.sentence == "3 rounds have been closed"
    assert (study.rounds, study.check_ins, study.unit) == (3, 3 * 7, "rounds")


# In time


def test_late_uploads_are_paid_for_and_not_heard_and_nobody_gives_twice_to_a_round():
    task = make(uploads=4)
    run = run_trial(trial(task, delay=LATE), X, Y)
    late = ~np.asarray(run.schedule.counted)
    assert late.any()
    assert run.heard == int(run.state.version) > 2
    heard = run.schedule.heard
    assert (np.bincount(heard.version)[: run.heard] == 4).all()
    pairs = list(zip(run.schedule.device.tolist(), run.schedule.version.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)
    charged = [len(each) for each in run.passages.values()]
    assert sum(charged) == len(run.schedule)  # what is on its way when samples end is paid for, too


def test_who_is_in_the_open_round_waits_for_the_next_and_is_charged_nothing():
    """Three devices cannot fill a round of four: each gives once, and then no more."""
    run = run_trial(trial(make(uploads=4), devices=3, delay=LATE), X, Y)
    assert run.heard == len(run.schedule.heard) == 0
    assert sorted(run.schedule.device.tolist()) == [0, 1, 2]


def test_a_round_closes_by_time_with_the_fewest_that_it_may_have():
    task = make(uploads=15, more="seconds = 30.0")
    laid = laid_out(trial(task, devices=5, delay=LATE), Y)
    assert laid.engine == "events"
    run = laid.run(X, Y, laid.looks(laid.length))
    sizes = np.bincount(run.schedule.heard.version)[: run.heard]
    assert run.heard > 2
    assert (sizes >= 3).all()
    assert (sizes < 15).all()


def waking(monkeypatch: pytest.MonkeyPatch, on: Any, kind: type, after: float) -> list[float]:
    """Let a role ask to be woken when it hears of this kind, and again whenever it rings; when it rang."""
    handler, rung = on[kind], list[float]()

    def then_wait(task: Any, state: Any, event: Any, ctx: Any) -> Any:
        step = handler(task, state, event, ctx)
        return Step(step.state, (*step.effects, Wake(after, "later")))

    def ring(task: Any, state: Any, event: Any, ctx: Any) -> Any:
        assert event.tag == "later"
        rung.append(float(ctx.now))
        return Step(state, (Wake(after, "later"),))

    monkeypatch.setitem(on, kind, then_wait)
    monkeypatch.setitem(on, Woken, ring)
    return rung


def test_the_server_is_woken_after_the_time_that_it_asked_for_and_the_run_ends(monkeypatch: pytest.MonkeyPatch):
    task = make(uploads=5)
    rung = waking(monkeypatch, find(task).server.on, Gathered, 7.0)
    run = run_trial(trial(task), X, Y)
    assert run.heard == int(run.state.version) > 5
    assert len(rung) > 5
    assert (np.diff(rung) >= 7).all()  # a later timer takes the place of one that has not rung


def test_a_device_is_woken_until_nobody_has_anything_to_say(monkeypatch: pytest.MonkeyPatch):
    task = make(uploads=5)
    on = find(task).device.on
    (hears,) = (kind for kind in on if kind.__name__ == "Weights")
    rung = waking(monkeypatch, on, hears, 2.5)
    run = run_trial(trial(task, devices=6), X, Y)
    assert run.heard > 0
    assert len(rung) > len(run.schedule)
    assert rung == sorted(rung)


def test_cohorts_that_keep_step_refuse_a_timer(monkeypatch: pytest.MonkeyPatch):
    task = make(MASKED, uploads=3)
    waking(monkeypatch, find(task).server.on, Gathered, 7.0)
    with pytest.raises(ProtocolError, match="asks to be woken after 7 s, and simulated cohorts"):
        run_trial(trial(task), X, Y)


# A plug-in in scikit-learn's shape


@pytest.mark.parametrize("engine", ["compiled", "events"])
@pytest.mark.parametrize("name", ["signs", "medians"])
def test_a_plug_in_learns_as_a_crowd_does(name: str, engine: str):
    crowd = Crowd(protocol=name, epsilon=8.0, devices=30, rate=0.5, bounds=False, seed=1, engine=engine).fit(X, Y)
    assert crowd.score(X, Y) > 0.5
    assert 7.9 < crowd.epsilon_sample_ <= 8
    assert crowd.study_.engine == engine


# The server's own door


def looking(monkeypatch: pytest.MonkeyPatch, task: Any) -> Any:
    """The task's server counts in each round how many of its own rows have the first label, and says so by its step."""
    protocol = find(task)
    close, row = protocol.server.on[Gathered], CountLaplace(L1(Fraction(1)), Fraction(1), Rows(0, 30), "how many")

    def look(task: Any, state: Any, event: Any, ctx: Any) -> Any:
        step = close(task, state, event, ctx)
        first = ctx.release("first", ctx.rows.map(lambda rows: (rows.y == 0).astype(np.int32)[:, None]))
        return Step(replace(step.state, weights=step.state.weights + first.value.sum()), step.effects)

    monkeypatch.setitem(protocol.server.on, Gathered, look)
    looks = replace(protocol, server_mechanisms=lambda task: {"first": row})
    for place in ("events", "compiled", "layout", "trial"):
        monkeypatch.setattr(f"crowdml.sim.{place}.find", lambda task: looks)
    return looks


def test_the_server_looks_at_rows_of_its_own_through_a_door_with_the_same_noise_on_both_engines(
    monkeypatch: pytest.MonkeyPatch,
):
    task, rows = make(uploads=9), Samples(X[:30], Y[:30])
    looking(monkeypatch, task)
    fast, slow = (run_trial(trial(task, engine=engine, server_rows=rows), X, Y) for engine in ("compiled", "events"))
    np.testing.assert_allclose(fast.model, slow.model, atol=2e-3)
    quiet = run_trial(trial(task, server_rows=rows, noise=False), X, Y)
    assert quiet.model.mean() == pytest.approx(quiet.heard * (Y[:30] == 0).sum(), abs=3)
    looks = [replace(trial(task, engine="events", server_rows=rows), seed=seed) for seed in (5, 6, 7)]
    off = [run_trial(each, X, Y).model.mean() - quiet.model.mean() for each in looks]
    assert max(map(abs, off)) > 0.5  # the door adds noise of its own, which differs from seed to seed
    assert len({round(float(each)) for each in off}) > 1
    with pytest.raises(TaskError, match="releases first from rows of the server's, and this trial gives it none"):
        run_trial(trial(task), X, Y)


# Devices that lie


def backwards(row: str, steps: Any) -> Any:
    return -100 * steps


def one_label(batch: Samples) -> Samples:
    return Samples(batch.x, 0 * batch.y)


@pytest.mark.parametrize("privacy", [GAUSSIAN, MASKED], ids=["alone", "masked"])
def test_liars_are_the_same_on_both_engines(privacy: str):
    task = make(privacy, uploads=7 if privacy == GAUSSIAN else 3)
    liars = {0: Tamper(say=backwards), 3: Tamper(sense=one_label), 7: Tamper(say=backwards)}
    fast, slow = (run_trial(trial(task, engine=engine, liars=liars), X, Y) for engine in ("compiled", "events"))
    honest = run_trial(trial(task), X, Y)
    np.testing.assert_allclose(fast.weights, slow.weights, atol=2e-3)
    assert np.abs(fast.model - honest.model).max() > 0.01
    np.testing.assert_array_equal(fast.schedule.samples, honest.schedule.samples)  # they pay as all do


def test_a_liar_who_is_nobody_is_refused():
    with pytest.raises(TaskError, match="device 20 lies, and there are devices 0 to 19"):
        run_trial(trial(make(), liars={20: Tamper(say=backwards)}), X, Y)


# What cannot be


def test_what_cannot_be_traced_is_refused_by_a_sentence(monkeypatch: pytest.MonkeyPatch):
    task = make()
    handler = find(task).server.on[Gathered]

    def looks_at_values(task: Any, state: Any, event: Any, ctx: Any) -> Any:
        assert float(event.uploads.array("gradient").sum()) is not None
        return handler(task, state, event, ctx)

    monkeypatch.setitem(find(task).server.on, Gathered, looks_at_values)
    with pytest.raises(ProtocolError, match=r"'medians' cannot be compiled: .* Take engine 'events'"):
        run_trial(trial(make(uploads=6)), X, Y)
    assert run_trial(trial(make(uploads=6), engine="events"), X, Y).heard > 0
