"""The rule "grouping" in tasks: gram over cohorts' sums and secprobe over single uploads, with public root rows."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.attacks import Attackers
from crowdml.channels import Close, Gathered, Stacked, combined, combining, weigh_uploads
from crowdml.datasets.populations import iid
from crowdml.errors import TaskError
from crowdml.privacy.mechanisms import FromPublic
from crowdml.protocols import find, gram, remarks_on, secprobe
from crowdml.robust import Combine
from crowdml.second_moments import root_of, seen_from, solve_moments
from crowdml.sim.trial import Trial, run_trial
from crowdml.task import parse

TEXT = """
name = "grouped"
features = { dimension = 5, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b", "c"] }
model = { kind = "ridge" }
[protocol]
kind = "KIND"
batch = 40
combine = { rule = "RULE", uploads = UPLOADS, rows = 60 }
[privacy]
mechanism = "skellam"
epsilon = { moments = 4.0 }
delta = 1e-6
"""
MASKS = "[masking]\ncohort = 5\nminimum = 5\ncolluders = 0\n"


def make(kind: str, rule: str = "grouping") -> Any:
    text = TEXT.replace("KIND", kind).replace("RULE", rule).replace("UPLOADS", "24" if kind == "gram" else "60")
    text = text if rule == "grouping" else text.replace(", rows = 60", "")
    return parse(text + (MASKS if kind == "gram" else ""))


def samples(rows: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, rows).astype(np.int32)
    x = rng.normal(size=(rows, 5)).astype(np.float32) + 3 * np.eye(3, 5, dtype=np.float32)[y]
    return x / np.linalg.norm(x, axis=1, keepdims=True), y


X, Y = samples(4800, 1)
OTHERS, ROWS = samples(2000, 2), Samples(*samples(60, 3))


def error(kind: str, rule: str, attack: str | None, share: float) -> float:
    task, devices = make(kind, rule), 120 if kind == "gram" else 60
    liars: Any = {} if attack is None else Attackers(share, attack)
    rows = ROWS if rule == "grouping" else None
    trial = Trial(task, iid(len(Y), devices, 1), 5, points=1, engine="events", liars=liars, server_rows=rows)
    found = find(task).predict(task, run_trial(trial, X, Y).model, OTHERS[0])
    return float((found != OTHERS[1]).mean())


@pytest.mark.parametrize(("kind", "attack", "share"), [
    ("gram", "sybil", 0.6), ("gram", "scaling", 0.2), ("secprobe", "label-flip", 0.8), ("secprobe", "gaussian", 0.6),
])  # fmt: skip
def test_liars_cost_little_though_they_are_many(kind: str, attack: str, share: float):
    alone, lied = error(kind, "grouping", None, 0), error(kind, "grouping", attack, share)
    assert alone < 0.2
    assert lied < alone + 0.06
    assert error(kind, "median", attack, share) > lied + 0.1 or attack == "gaussian"


def test_without_a_lie_the_rule_is_the_sum_of_everybody():
    assert error("gram", "grouping", None, 0) == pytest.approx(error("gram", "mean", None, 0), abs=0.002)


def test_the_sum_has_the_devices_that_were_taken_and_no_others():
    task = make("gram")
    length = gram.plan(task).mechanism.length
    rows = np.arange(4)[:, None] * np.ones((1, length), np.int64)
    uploads = Stacked({"moments": rows}, np.array([5, 4, 5, 3], np.int32))
    total = combined(gram.Moments, task, Gathered(0, uploads), None, np.array([0.0, 1.0, 0.0, 1.0]))
    assert int(total.devices) == 7
    np.testing.assert_array_equal(total.moments.value, np.full(length, 1 + 3))


def test_what_is_known_of_root_rows_passes_the_door_and_is_the_choice_alone():
    task, passed = make("gram"), []

    class Ctx:
        rows = ROWS

        def release(self, name: str, rows: Any) -> Any:
            passed.append((name, rows))
            return type("Released", (), {"value": np.array([1 << 24, 0, 1 << 24])})

    class Rows:
        def map(self, f: Any) -> Any:
            return f(ROWS)

    context, seen = Ctx(), []
    context.rows = Rows()  # type: ignore[assignment]
    length = gram.plan(task).mechanism.length
    uploads = Stacked({"moments": np.zeros((24, length), np.int64)}, np.full(24, 5, np.int32))

    def grouped(task: Any, uploads: Any, rows: Samples) -> Any:
        seen.append(rows)
        return np.zeros(uploads.count)

    found = weigh_uploads(Close(gram.Moments, None, grouped=grouped), task, None, Gathered(0, uploads), context)
    assert found is not None
    assert found.tolist() == [1.0, 0.0, 1.0]  # what the door let out, as in a replay, and not what was computed
    assert [name for name, _ in passed] == ["taken"]
    assert passed[0][1].shape == (1, 24)
    assert isinstance(find(task).server_mechanisms(task)["taken"], FromPublic)


def test_a_study_is_told_what_it_costs_before_it_starts():
    told = " ".join(remarks_on(make("gram")))
    assert "crowdml task validate --public" in told
    assert "Where 20.0% of the devices lie, about a third of the cohorts of 5 has no liar." in told
    assert "about 4.9 times that of one sum over all 120 devices" in told
    assert "about sqrt(2.7 n α) times" in told


def test_a_study_is_told_where_noise_hides_lies_and_what_would_be_enough():
    hidden = " ".join(remarks_on(parse(SECPROBE.replace("batch = 40", "batch = 20").replace("4.0", "1.0"))))
    row = secprobe.plan(parse(SECPROBE.replace("batch = 40", "batch = 20").replace("4.0", "1.0"))).mechanism
    enough = math.ceil(15 * math.sqrt(3 * float(row.variance)) / row.clip**2)
    assert enough > 20
    assert "hides a lie about all of its samples: it sums 20" in hidden
    assert f"{enough} samples of each device would be enough, or an epsilon about" in hidden
    shown = " ".join(remarks_on(parse(SECPROBE.replace("batch = 40", f"batch = {enough}").replace("4.0", "1.0"))))
    assert "hides no lie about all of its samples" in shown
    assert "To close a round the server needs about" in shown
    cohort = " ".join(remarks_on(make("gram")))
    row = gram.plan(make("gram")).mechanism
    assert seen_from(row, 5) == pytest.approx(15 * math.sqrt(3 * 5 * float(row.variance)) / row.clip**2)
    assert "The noise of one cohort hides no lie" in cohort


def test_models_of_pictures_are_tried_on_variations_of_them_too():
    text = PICTURES.replace(
        "MAP", 'map = { kind = "convolution", seed = 1, filters = 8, size = 3, pool = 3, keep = 20 }'
    )
    rows = Samples(np.random.default_rng(1).random((30, 64), np.float32), np.arange(30, dtype=np.int32) % 3)
    own = root_of(secprobe.plan(parse(text)), rows)
    assert own.tried is not None
    assert len(own.trials[0]) == 9 * 30
    np.testing.assert_array_equal(own.trials[1][30:60], own.labels)
    assert own.tried[0].shape[1] == own.width
    plain = root_of(secprobe.plan(parse(PICTURES.replace("MAP", ""))), rows)
    assert plain.tried is None


@pytest.mark.parametrize(("rows", "says"), [
    (5, r"combine\.rows = 5: grouping needs at least 2 rows of each of 3 classes, so 6 or more"),
    (20_001, r"combine\.rows = 20,001: grouping takes at most 20,000"),
])  # fmt: skip
def test_rows_that_cannot_work_are_refused_before_a_device_pays(rows: int, says: str):
    with pytest.raises(TaskError, match=says):
        combining(parse(GRAM.replace("UPLOADS, rows = 60", f"24, rows = {rows}")))


def test_a_round_that_closes_by_time_has_the_noise_of_the_uploads_that_came():
    by = Combine("top", uploads=100, keep=10, rows=5, minimum=20, seconds=Fraction(60))
    asked = ((20, 1, 1), (140, 2, 1), (400, 1, 5))
    assert [by.came(*each) for each in asked] == [20, 70, 80]
    rule = 'rule = "top", uploads = 100, keep = 10, rows = 60, minimum = 20, seconds = 60'
    task = parse(SECPROBE.replace('rule = "grouping", uploads = 60, rows = 60', rule))
    fixed, moments = secprobe.plan(task), np.arange(fixed_length(task))
    state = secprobe.protocol.server.start(task, None).state
    total = type("Total", (), {"moments": type("M", (), {"value": moments}), "devices": np.int32(20)})
    found = secprobe.SOLVER.fit(task, state, total, None).state.weights
    np.testing.assert_allclose(found, solve_moments(fixed, moments, 20 * 20 / 10).astype(np.float32))


def fixed_length(task: Any) -> int:
    return secprobe.plan(task).mechanism.length


def test_what_cannot_be_is_refused_by_a_sentence():
    with pytest.raises(TaskError, match="it groups second moments with Skellam noise, which only protocols with a row"):
        find(parse(SGD)).gathers(parse(SGD))
    with pytest.raises(TaskError, match=r"combine\.rows is missing: grouping has to know how many rows"):
        gram.plan(parse(GRAM.replace("UPLOADS, rows = 60", "24")))
    with pytest.raises(TaskError, match=r"combine\.f = 3: grouping rates single uploads as they are"):
        gram.plan(parse(GRAM.replace("UPLOADS", "24, f = 3")))


SECPROBE = TEXT.replace("KIND", "secprobe").replace("RULE", "grouping").replace("UPLOADS", "60")
PICTURES = SECPROBE.replace("dimension = 5", "dimension = 64").replace("batch = 40", "batch = 40\nMAP")
GRAM = TEXT.replace("KIND", "gram").replace("RULE", "grouping") + MASKS
SGD = """
name = "plain"
features = { dimension = 5, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b", "c"] }
model = { kind = "softmax" }
[protocol]
kind = "sgd"
batch = 5
step = { c = 2.0 }
combine = { rule = "grouping", uploads = 10, rows = 9 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 4.0 }
delta = 1e-5
"""
