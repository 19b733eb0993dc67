"""`protocol.combine`: rounds of sgd, local_updates, gram and a plug-in that a robust rule combines, in both engines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crowdml.channels import Channel, Gathered, Stacked, combined
from crowdml.datasets.populations import iid
from crowdml.errors import TaskError
from crowdml.protocol import Gathering
from crowdml.protocols import find, remarks_on, settled
from crowdml.protocols.gram import plan
from crowdml.protocols.sgd import Gradient, public_step
from crowdml.second_moments import solve_moments
from crowdml.sim.trial import Trial, run_trial
from crowdml.task import parse
from crowdml.turn import Tamper, first_turn, server_turn

sys.path.insert(0, str(Path(__file__).parents[1]))
from plugged import SIGNS, no_plugins_left

TEXT = """
name = "combined"
features = {{ dimension = 4, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["a", "b", "c"] }}
model = {{ kind = "{model}" }}
protocol = {{ kind = "{kind}", {combine}{more}batch = 5 }}
[privacy]
mechanism = "{noise}"
epsilon = {{ {row} = 4.0 }}
delta = 1e-5
{masking}
"""
KINDS = {
    "sgd": ("softmax", "gradient", "step = { c = 2.0 }, "),
    "local_updates": ("softmax", "update", "rate = { c = 1.0 }, local_steps = 2, "),
    "gram": ("ridge", "moments", ""),
    "signs": ("softmax", "votes", "rate = 0.3, "),
}
MASKING = "[masking]\ncohort = 6\nminimum = 5\ncolluders = 1"


def text(kind: str = "sgd", rule: str | None = '{ rule = "median", uploads = 7, f = 2 }', *, masked: bool = False,
         more: str = "") -> str:  # fmt: skip
    model, row, own = KINDS[kind]
    noise, masking = ("skellam", MASKING) if masked else ("discrete-gaussian", "")
    combine = "" if rule is None else f"combine = {rule}, "
    return TEXT.format(model=model, kind=kind, row=row, more=own + more, combine=combine, noise=noise, masking=masking)


def make(*told: Any, **more: Any):
    return parse(text(*told, **more))


def samples(rows: int = 600):
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, rows).astype(np.int32)
    x = rng.normal(size=(rows, 4)).astype(np.float32) + 3 * np.eye(3, 4, dtype=np.float32)[y]
    return x / np.linalg.norm(x, axis=1, keepdims=True), y


X, Y = samples()


def accuracy(task: Any, run: Any) -> float:
    return float(np.mean(find(task).predict(task, run.model, X) == Y))


def trial(task: Any, devices: int = 20, **more: Any) -> Trial:
    return Trial(task, iid(len(Y), devices, 1), 5, **{"points": 4, **more})


def test_the_key_makes_a_task_gather_and_without_it_nothing_changes():
    task = make(rule='{ rule = "median", uploads = 9, minimum = 5, seconds = 30 }')
    assert find(task).channel(task) is Channel.GATHERED
    assert find(task).gathers(task) == Gathering(9, 5, 30.0)
    assert make(masked=True) != make()
    assert find(make(masked=True)).channel(make(masked=True)) is Channel.GATHERED
    for kind in ("sgd", "local_updates"):
        assert find(make(kind, None)).channel(make(kind, None)) is Channel.ONE_BY_ONE
        assert find(make(kind, None, masked=True)).channel(make(kind, None, masked=True)) is Channel.SUMMED


RULES = [
    ("sgd", '{ rule = "median", uploads = 7 }', False),
    ("sgd", '{ rule = "krum", before = "bucketing", uploads = 10, f = 1 }', False),
    ("sgd", '{ rule = "trimmed-mean", before = "nnm", uploads = 5, f = 1 }', True),
    ("local_updates", '{ rule = "geometric-median", uploads = 7 }', False),
    ("local_updates", '{ rule = "multi-krum", uploads = 5, f = 1 }', True),
]


@pytest.mark.parametrize(("kind", "rule", "masked"), RULES)
def test_both_engines_combine_the_same_rounds(kind: str, rule: str, masked: bool):
    task = make(kind, rule, masked=masked)
    fast, slow = (run_trial(trial(task, engine=engine), X, Y) for engine in ("compiled", "events"))
    size = find(task).gathers(task).size * (6 if masked else 1)
    assert fast.heard == slow.heard == 120 // size
    np.testing.assert_allclose(fast.weights, slow.weights, atol=5e-3)
    assert accuracy(task, slow) > 0.6


@pytest.mark.parametrize("kind", ["sgd", "local_updates"])
def test_a_round_that_the_mean_combines_moves_by_the_mean_of_its_uploads(kind: str):
    """As one masked cohort does that has the same sum: rows that are not combined by a rule add up."""
    task, alike = make(kind, '{ rule = "mean", uploads = 3 }'), make(kind, None, masked=True)
    protocol, row = find(task), KINDS[kind][1]
    state = first_turn(protocol, task).state
    shape = (3, 4, 3) if kind == "sgd" else (3, 12)
    steps = np.random.default_rng(1).integers(-9999, 9999, shape).astype(np.int32)
    uploads = Stacked({row: steps}, np.ones(3, np.int32))
    made = combined(protocol.contribution, task, Gathered(0, uploads))
    np.testing.assert_array_equal(getattr(made, row).value, steps.sum(0).reshape(-1))
    assert (int(made.devices), int(made.version)) == (3, 0)
    after = server_turn(protocol, task, state, Gathered(0, uploads))
    fixed = server_turn(find(alike), alike, state, made).state.weights
    step = float(settled(task).privacy.grid / settled(alike).privacy.grid)
    np.testing.assert_allclose(after.state.weights, step * fixed, rtol=1e-5)
    assert int(after.published.version) == 1


def test_the_means_of_cohorts_are_combined_whatever_their_size_is():
    """The total is that of all devices: 5 + 6 + 4 of them, each with the median of what a device of a cohort gave."""
    task = make("sgd", '{ rule = "median", uploads = 3 }', masked=True)
    sums = np.array([[5 * 100], [6 * 40], [4 * -(10**6)]]) * np.ones((1, 12), np.int64)
    made = combined(Gradient, task, Gathered(2, Stacked({"gradient": sums}, np.array([5, 6, 4], np.int32))))
    np.testing.assert_array_equal(made.gradient.value, np.full(12, 15 * 40))
    assert (int(made.devices), int(made.version)) == (15, 2)


def test_counts_add_up_and_only_the_gradient_is_combined():
    task = parse(text().replace("epsilon = { gradient = 4.0 }", "epsilon = { gradient = 4.0, errors = 1.0 }"))
    uploads = Stacked({"gradient": np.zeros((7, 4, 3), np.int32), "errors": np.arange(7, dtype=np.int32)[:, None]},
                      np.ones(7, np.int32))  # fmt: skip
    after = server_turn(find(task), task, first_turn(find(task), task).state, Gathered(0, uploads))
    assert (int(after.state.errors), int(after.state.counted)) == (21, 7)


def backwards(row: str, steps: Any) -> Any:
    return -20 * steps


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "multi-krum", "geometric-median", "centred-clipping"])
def test_a_robust_rule_learns_where_a_fifth_of_the_devices_lie_and_the_mean_does_not(rule: str):
    liars = {device: Tamper(say=backwards) for device in range(4)}
    found = {}
    for each in ("mean", rule):
        task = make(rule=f'{{ rule = "{each}", uploads = 15, f = 4 }}')
        found[each] = accuracy(task, run_trial(trial(task, liars=liars, engine="events"), X, Y))
    assert found["mean"] < 0.4
    assert found[rule] > 0.6


def test_gram_takes_the_median_of_cohorts_and_knows_the_noise_of_it():
    text_, liars = text("gram", masked=True), {0: Tamper(say=backwards)}
    robust, plain = parse(text_), parse(text_.replace('"median"', '"mean"'))
    rounds = {name: run_trial(trial(task, 60, liars=liars), X, Y) for name, task in (("r", robust), ("p", plain))}
    assert rounds["r"].heard == rounds["p"].heard == 2
    assert accuracy(robust, rounds["r"]) > 0.85 > 0.75 > accuracy(plain, rounds["p"])
    state = rounds["r"].state
    expected = solve_moments(plan(robust), state.moments, 84 * np.pi / 2)
    np.testing.assert_allclose(state.weights, expected, rtol=1e-6)


def test_a_crowd_that_fills_no_round_of_cohorts_is_refused_by_a_sentence():
    with pytest.raises(TaskError, match=r"20 devices meet in 3 cohorts.* 'combined' takes 7\. Take more devices"):
        run_trial(Trial(make("gram", masked=True), iid(100, 20, 1), 5), X[:100], Y[:100])


def test_a_plug_in_declares_the_key_and_its_handler_hears_the_combined_round(tmp_path: Path):
    file = tmp_path / "signs.py"
    file.write_text(_with_combine(SIGNS.read_text()))
    with no_plugins_left(file):
        task = make("signs", '{ rule = "median", uploads = 7 }')
        liars = {0: Tamper(say=backwards)}
        fast, slow = (run_trial(trial(task, engine=each, liars=liars), X, Y) for each in ("compiled", "events"))
        np.testing.assert_allclose(fast.weights, slow.weights, atol=5e-3)
        assert accuracy(task, slow) > 0.6


def _with_combine(source: str) -> str:
    head, tail = source.split('by rate / sqrt(t)."""\n', 1)
    return f'{head}by rate / sqrt(t)."""\n    combine: cm.Combine | None = None\n{tail}'


def test_the_public_step_knows_the_noise_of_a_combined_round():
    alone, mean, krum = (
        make(rule=rule)
        for rule in (None, '{ rule = "mean", uploads = 100 }', '{ rule = "krum", uploads = 100, f = 1 }')
    )
    assert public_step(mean) > 1.5 * public_step(alone)
    assert public_step(krum) == public_step(alone)


def test_check_names_the_rules_that_stand_the_lies_and_the_price_of_cohorts():
    told = " ".join(remarks_on(settled(make(rule='{ rule = "krum", uploads = 9, f = 3 }'))))
    assert "Rounds are combined by krum: up to 3 of 9 uploads may be lies. Its noise is about 3.00 times" in told
    assert "Rules that stand 3 of 9 uploads: clipped-mean, median, trimmed-mean, krum" in told
    assert "A round closes when 9 uploads are in." in told
    masked = " ".join(remarks_on(settled(make("gram", masked=True))))
    assert "Under masks no rule sees a single upload" in masked
    assert "Cohorts of 6 stand a share of about 5.45 % liars" in masked


@pytest.mark.parametrize(
    ("kind", "rule", "more", "told"),
    [
        ("sgd", '{ rule = "cream", uploads = 7 }', "", "protocol.combine.rule = 'cream': choose one of mean"),
        ("sgd", '{ uploads = 7 }', "", "protocol.combine.rule is missing"),
        ("sgd", '{ rule = "median", uploads = 7, size = 3 }', "", "protocol.combine.size = 3: no such key"),
        ("sgd", '{ rule = "krum", uploads = 6, f = 2 }', "", r"krum needs at least 2f \+ 3 = 7 for f = 2"),
        ("sgd", '"median"', "", "protocol.combine = 'median': expected a table"),
        ("local_updates", '{ rule = "median", uploads = 7 }', "server_batch = 7, ", "combine.uploads says it"),
        ("local_updates", '{ rule = "median", uploads = 7 }', 'stale = "weigh", ', "uploads of its own weights alone"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_the_key_is_refused_by_a_sentence(kind: str, rule: str, more: str, told: str):
    with pytest.raises(TaskError, match=told):
        find(make(kind, rule, more=more))
