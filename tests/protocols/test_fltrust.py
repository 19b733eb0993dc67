"""The rule "fltrust" in tasks: rounds of updates, weighed by how far they go along the server's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from plugged import no_plugins_left

from crowdml.arrays import Samples
from crowdml.attacks import Attackers
from crowdml.channels import Close, Gathered, Stacked, combined, weigh_uploads
from crowdml.datasets.populations import iid
from crowdml.errors import TaskError
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.protocols import find, local_updates, rehearse, remarks_on, settled, sgd
from crowdml.rooted import fltrust
from crowdml.sim.trial import Trial, run_trial
from crowdml.task import Task, parse
from crowdml.turn import check_in, first_turn

TEXT = """
name = "trusted"
features = { dimension = 5, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b", "c"] }
model = { kind = "softmax" }
[protocol]
kind = "KIND"
batch = 20
SETTINGS
combine = { rule = "RULE", uploads = 20, rows = 60 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { ROW = 8.0 }
delta = 1e-6
"""
SETTINGS = {"sgd": "step = { c = 5.0 }", "local_updates": "local_steps = 3\nrate = { c = 2.0 }"}
ROW = {"sgd": "gradient", "local_updates": "update"}
KINDS = tuple(SETTINGS)


def make(kind: str, rule: str = "fltrust", **changes: Any) -> Task:
    text = TEXT.replace("KIND", kind).replace("RULE", rule).replace("SETTINGS", SETTINGS[kind])
    text = text if rule == "fltrust" else text.replace(", rows = 60", "")
    return settled(parse(text.replace("ROW", ROW[kind])).with_(**changes))


def samples(rows: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, rows).astype(np.int32)
    x = rng.normal(size=(rows, 5)).astype(np.float32) + 3 * np.eye(3, 5, dtype=np.float32)[y]
    return x / np.linalg.norm(x, axis=1, keepdims=True), y


X, Y = samples(4800, 1)
OTHERS, ROWS = samples(2000, 2), Samples(*samples(60, 3))


def error(kind: str, rule: str, attack: str | None, share: float) -> float:
    task = make(kind, rule)
    liars: Any = {} if attack is None else Attackers(share, attack)
    own = ROWS if rule == "fltrust" else None
    trial = Trial(task, iid(len(Y), 60, 1), 5, points=1, engine="events", liars=liars, server_rows=own)
    found = find(task).predict(task, run_trial(trial, X, Y).model, OTHERS[0])
    return float((found != OTHERS[1]).mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("attack", "share"), [("sign-flip", 0.6), ("scaling", 0.6), ("label-flip", 0.7)])
def test_a_majority_of_liars_turns_no_model_round(kind: str, attack: str, share: float):
    alone, lied, mean = (
        error(kind, "fltrust", None, 0),
        error(kind, "fltrust", attack, share),
        error(kind, "mean", attack, share),
    )
    assert alone < 0.15
    assert lied < min(alone + 0.15, mean - 0.1)


@dataclass
class Held:
    """Rows of the server's own at its door; without them, as in a replay, nothing can be computed of any."""

    value: Any

    def map(self, f: Any) -> Held:
        return self if self.value is None else Held(f(self.value))


class Ctx:
    """The server's own door, which notes what passed it; with `replayed`, one that lets out what it once did."""

    def __init__(self, rows: Samples | None, replayed: dict[str, Any] | None = None) -> None:
        self.rows, self.passed, self.replays = Held(rows), dict(replayed or {}), replayed is not None

    def release(self, name: str, private: Held) -> Any:
        if not self.replays:
            self.passed[name] = np.rint(np.asarray(private.value)[0] * 2**24).astype(np.int64)
        return SimpleNamespace(value=self.passed[name])


def round_of(task: Task, count: int = 20) -> tuple[Any, Gathered, Close]:
    """The server's first state, a round of uploads without noise in steps, and what closes it."""
    protocol, first = find(task), first_turn(find(task), task)
    said = []
    for device in range(count):
        batch = Samples(X[20 * device : 20 * device + 20], Y[20 * device : 20 * device + 20])
        made = check_in(protocol, task, batch, first.published, noise=SystemSource(), me=str(device)).message
        said.append(getattr(made, ROW[task.protocol["kind"]]).value)
    uploads = Stacked({ROW[task.protocol["kind"]]: np.stack(said)}, np.ones(count, np.int32))
    close = protocol.server.on[Gathered]
    assert isinstance(close, Close)
    return first.state, Gathered(0, uploads), close


@pytest.mark.parametrize("kind", KINDS)
def test_the_weights_are_those_of_the_plain_form(kind: str):
    task = make(kind)
    state, event, close = round_of(task)
    door = Ctx(ROWS)
    found = weigh_uploads(close, task, state, event, door)
    own = np.asarray(close.updated(task, state, ROWS)[ROW[kind]]).reshape(-1)
    rows = event.uploads.array(ROW[kind]).reshape(20, -1).astype(np.float64)
    np.testing.assert_allclose(found, fltrust(rows, own.astype(np.float64)), rtol=1e-5, atol=1e-9)
    total = combined(close.made, task, event, close.rows, found)
    value = getattr(total, ROW[kind]).value / 20
    assert np.linalg.norm(value) <= np.linalg.norm(own) * 1.01 + np.sqrt(value.size)  # whole steps


@pytest.mark.parametrize("kind", KINDS)
def test_what_of_root_rows_passes_the_door_is_a_cosine_each_and_one_length(kind: str):
    """A replay, which has no rows, ends in the same weights."""
    task = make(kind)
    state, event, close = round_of(task)
    door = Ctx(ROWS)
    found = weigh_uploads(close, task, state, event, door)
    assert {name: each.shape for name, each in door.passed.items()} == {"scores": (20,), "length": (1,)}
    assert (abs(door.passed["scores"]) <= 2**24).all()
    again = weigh_uploads(close, task, state, event, Ctx(None, door.passed))
    assert again is not None
    assert found is not None
    assert again.tolist() == found.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_own_update_is_what_a_device_with_these_rows_would_give(kind: str):
    task = make(kind)
    batch = Samples(ROWS.x[:20], ROWS.y[:20])
    first = first_turn(find(task), task)
    made = check_in(find(task), task, batch, first.published, noise=Silence(), me="0").message
    own = {"sgd": sgd.own_update, "local_updates": local_updates.own_update}[kind](task, first.state, batch)
    theirs = getattr(made, ROW[kind]).value.reshape(-1)
    np.testing.assert_allclose(own[ROW[kind]].reshape(-1), theirs, atol=21)  # each sample was cut to whole steps


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_of_root_rows_are_clipped_as_those_of_devices_are(clip: float | None):
    task = make("sgd") if clip is None else make("sgd", protocol={"clip": clip})
    state = first_turn(find(task), task).state
    own = sgd.own_update(task, state, ROWS)["gradient"] * float(sgd.plan(task).grid.step) / 20
    assert np.linalg.norm(own) <= (0.5 if clip else 2**0.5)


def test_where_no_upload_points_along_the_round_adds_nothing():
    task = make("sgd")
    state, _, close = round_of(task)
    own = np.asarray(sgd.own_update(task, state, ROWS)["gradient"])
    against = Stacked({"gradient": np.repeat(np.rint(-own)[None], 20, 0).astype(np.int64)}, np.ones(20, np.int32))
    found = weigh_uploads(close, task, state, Gathered(0, against), Ctx(ROWS))
    assert found is not None
    assert not found.any()
    assert not combined(close.made, task, Gathered(0, against), close.rows, found).gradient.value.any()
    same = Stacked({"gradient": -against.rows["gradient"] * 1000}, np.ones(20, np.int32))
    found = weigh_uploads(close, task, state, Gathered(0, same), Ctx(ROWS))
    assert found is not None
    np.testing.assert_allclose(found, 1 / 20 / 1000, rtol=1e-4)  # brought to the length of the server's own


def test_an_update_without_direction_is_refused():
    task = make("sgd")
    state, event, close = round_of(task)
    nothing = Samples(0 * ROWS.x, ROWS.y)
    with pytest.raises(TaskError, match=r"no direction, and FLTrust compares uploads with it\. Name other public rows"):
        weigh_uploads(close, task, state, event, Ctx(nothing))


def test_a_study_is_told_what_it_costs_before_it_starts():
    told = " ".join(remarks_on(make("sgd")))
    assert "up to 60 rows of the server's own give an update of its own" in told
    assert "crowdml task validate --public" in told
    assert "Its noise is up to 1.77 times that of the mean" in told


@pytest.mark.parametrize("kind", ["gram", "secprobe"])
def test_a_protocol_without_updates_is_refused(kind: str):
    text = TEXT.replace("KIND", kind).replace("RULE", "fltrust").replace("SETTINGS", "").replace("ROW", "moments")
    text = text.replace("softmax", "ridge").replace("discrete-gaussian", "skellam")
    text += "" if kind == "secprobe" else "[masking]\ncohort = 3\nminimum = 3\ncolluders = 0\n"
    with pytest.raises(TaskError, match=f"update of the server's own, and {kind} has none. It is for sgd"):
        find(parse(text)).gathers(parse(text))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("", r"combine\.rows is missing: fltrust has to know how many rows"),
        (", rows = 9, f = 1", r"combine\.f = 1: fltrust rates single uploads as they are"),
        (", rows = 9, keep = 2", r"combine\.keep = 2: a setting of 'multi-krum' or 'top'"),
    ],
)
def test_settings_of_other_rules_are_refused(more: str, says: str):
    text = TEXT.replace("KIND", "sgd").replace("RULE", "fltrust").replace("SETTINGS", SETTINGS["sgd"])
    with pytest.raises(TaskError, match=says):
        settled(parse(text.replace("ROW", "gradient").replace(", rows = 60", more)))


@pytest.mark.parametrize("name", ["zeno", "zeno++"])
def test_zeno_is_refused_by_a_sentence_that_says_why(name: str):
    text = TEXT.replace("KIND", "sgd").replace("RULE", name).replace("SETTINGS", SETTINGS["sgd"])
    with pytest.raises(TaskError, match=r"rule = 'zeno.*decides on single check-ins by rows of the server's own"):
        settled(parse(text.replace("ROW", "gradient")))


PLUGIN = """
import numpy as np
from crowdml import plugin as cm
from dataclasses import dataclass

@dataclass(frozen=True)
class Settings:
    batch: int
    combine: cm.Combine | None = None
    kind: str = "steps"

@cm.message("steps/model/1")
class Model:
    weights: cm.Public[cm.Array]
    version: cm.Public[cm.Integers]

@cm.contribution("steps/step/1", masked="steps/masked/1", total="steps/total/1")
class Sum:
    slope: cm.Release[cm.Integers]
    version: cm.Public[cm.Integers]

@cm.struct
class State:
    weights: cm.Array
    version: cm.Integers

def mechanisms(task):
    model, covers = cm.model_of(task), cm.Rows(0, cm.settings_of(task, Settings).batch)
    return {"slope": cm.sum_row(task, "slope", bound=model.gradient_bound("l2", 1.0), shape=model.shape,
                                covers=covers, promise="how the model should change")}

def rows(task, batch, model):
    return {"slope": batch.map(lambda held: cm.model_of(task).gradients(model.weights, held))}

def start(task, ctx):
    state = State(cm.model_of(task).start(), np.int32(0))
    return cm.Step(state, (cm.Publish(Model(state.weights, state.version)),))

def follow(task, state, total, ctx):
    step = mechanisms(task)["slope"].grid.decode(total.slope.value) / total.devices / 20
    after = State((state.weights - 5 * step.reshape(state.weights.shape)).astype(np.float32),
                  np.int32(state.version + 1))
    return cm.Step(after, (cm.Publish(Model(after.weights, after.version)),))

def own_update(task, state, held):
    step = float(mechanisms(task)["slope"].grid.step)
    return {"slope": cm.model_of(task).gradient_sum(state.weights, held) / len(held) * 20 / step}

protocol = cm.Protocol(
    "steps", cm.device_role(Sum, Model, rows), cm.Role(start, cm.heard_by(Sum, followUPDATED)), mechanisms,
    model=lambda task, state: state.weights, contribution=Sum, settings=Settings, traced=False)
"""


@pytest.mark.parametrize("says", [True, False], ids=["with updated", "without"])
def test_a_plug_in_takes_the_rule_if_it_says_what_its_own_update_is(tmp_path: Path, says: bool):
    file = tmp_path / "steps.py"
    file.write_text(PLUGIN.replace("followUPDATED", "follow, updated=own_update" if says else "follow"))
    text = TEXT.replace("KIND", "steps").replace("RULE", "fltrust").replace("SETTINGS", "").replace("ROW", "slope")
    with no_plugins_left(file):
        task = parse(text)
        if not says:
            with pytest.raises(TaskError, match=r"steps has none\. It is for sgd, .* plug-ins that say"):
                find(task).gathers(task)
            return
        rehearse(task)
        liars = Attackers(0.6, "sign-flip")
        trial = Trial(settled(task), iid(len(Y), 60, 1), 5, points=1, liars=liars, server_rows=ROWS)
        found = find(task).predict(task, run_trial(trial, X, Y).model, OTHERS[0])
        assert (found == OTHERS[1]).mean() > 0.7
