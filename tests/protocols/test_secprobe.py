"""SecProbe: what leaves a device, what a round comes to, and crowds of which some lie."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.attacks import Attackers
from crowdml.channels import Gathered, Stacked
from crowdml.datasets import load
from crowdml.errors import DataError, TaskError
from crowdml.messages import decode, encode
from crowdml.price import Price
from crowdml.privacy.calibration import gdp_epsilon
from crowdml.privacy.moments import split
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.privacy.sensitivity import Observer
from crowdml.protocols import find, secprobe, settled
from crowdml.second_moments import target_rows
from crowdml.sim.run import close_turn
from crowdml.sim.studies import simulate
from crowdml.sim.trial import Deal
from crowdml.sim.world import Delay
from crowdml.task import Task, parse
from crowdml.turn import check_in, first_turn

TEXT = """
name = "probe"
features = {{ dimension = 64, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"] }}
model = {{ kind = "ridge" }}
[protocol]
kind = "secprobe"
batch = 20
combine = {{ {combine} }}
[privacy]
mechanism = "skellam"
epsilon = {{ moments = {epsilon} }}
delta = 1e-6
{more}
"""
DRAWN = 'rule = "exponential", uploads = 15, keep = 8, rows = 200, epsilon = 1.0'
BEST = 'rule = "top", uploads = 15, keep = 8, rows = 200'
MEAN = 'rule = "mean", uploads = 15'


def make(combine: str = DRAWN, epsilon: float = 40.0, more: str = "") -> Task:
    return parse(TEXT.format(combine=combine, epsilon=epsilon, more=more))


@pytest.fixture(scope="module")
def digits():
    return load("digits", normalise="l2")


def run(task: Task, digits: Any, **more: Any) -> Any:
    told: dict[str, Any] = {"devices": 60, "seed": [3], "points": 4, "test": (digits.x_test, digits.y_test)}
    return simulate(task, digits.x_train, digits.y_train, **{**told, **more})


# --- what leaves a device ---


def test_a_device_gives_its_moments_once_with_all_of_their_noise():
    task = settled(make(epsilon=1.0))
    row = secprobe.plan(task).mechanism
    assert row.observer is Observer.ANYONE
    assert (row.honest, row.kind) == (1, "skellam-gram")
    price = Price.of(find(task), task).sample()
    assert 0.99 < price.epsilon(1e-6) <= 1
    sigma = math.sqrt(row.variance) / row.clip**2  # review, SP-A: 8.961897 for a Gaussian of the same price
    assert 8.961897 < sigma < 1.08 * 8.961897
    assert gdp_epsilon(math.sqrt(4.5) / sigma, 1e-6) < 1


def test_an_upload_is_the_moments_of_the_batch_and_survives_the_wire(digits: Any):
    task = settled(make())
    batch = Samples(digits.x_train[:20], digits.y_train[:20])
    offered = first_turn(find(task), task).published
    said = check_in(find(task), task, batch, offered, noise=Silence(), me="x").message
    heard = decode(said.kind, encode(said)).moments.value
    row = secprobe.plan(task).mechanism
    assert heard.dtype == np.int32
    gram, cross = split(heard, row.features, row.labels)
    h = row.steps(secprobe.plan(task).map(batch.x))
    assert (gram == h.T @ h).all()
    assert (cross == row.clip * h.T @ np.eye(10)[batch.y]).all()
    field = find(task).expected(task)["secprobe/moments/1"]["moments"]
    loud = check_in(find(task), task, batch, offered, noise=SystemSource(), me="x").message.moments.value
    assert (loud.shape, field.dtype) == (field.shape, "<i4")
    assert field.low <= loud.min() <= loud.max() <= field.high
    assert np.std((loud - heard)[:65]) == pytest.approx(math.sqrt(row.variance), rel=0.4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"privacy": {"mechanism": "discrete-gaussian"}}, 'which is "skellam"'),
        ({"protocol": {"combine": None}}, r"protocol\.combine"),
        ({"model": {"kind": "softmax"}}, 'secprobe solves for "ridge"'),
    ],
)
def test_a_task_that_it_cannot_run_is_refused(change: dict[str, Any], says: str):
    task = make()
    if "privacy" in change:
        task = replace(task, privacy=replace(task.privacy, **change["privacy"]))
    else:
        task = task.with_(**change)
    with pytest.raises(TaskError, match=says):
        find(task)


def test_masks_are_refused_and_skellam_noise_of_one_device_is_of_this_protocol_alone():
    with pytest.raises(TaskError, match=r'under masks it would hear sums alone.*take protocol.kind = "gram"'):
        find(make(more="[masking]\ncohort = 5\nminimum = 4\n"))
    sgd = {"kind": "sgd", "batch": 5, "step": {"c": 1}}
    bare = replace(make(), protocol=sgd, model={"kind": "softmax"})
    with pytest.raises(TaskError, match="is the noise of many devices together and needs"):
        find(replace(bare, privacy=replace(bare.privacy, epsilon={"gradient": bare.privacy.epsilon["moments"]})))


# --- a round ---


def test_a_round_is_the_sum_of_what_was_chosen_as_if_everybody_had_said_it(digits: Any):
    task = settled(make('rule = "top", uploads = 4, keep = 2, rows = 50'))
    protocol, start = find(task), first_turn(find(task), task)
    said = []
    for device in range(4):
        y = digits.y_train[20 * device : 20 * device + 20]
        batch = Samples(digits.x_train[20 * device : 20 * device + 20], (9 - y) if device in (1, 2) else y)
        turn = check_in(protocol, task, batch, start.published, noise=Silence(), me="x")
        said.append(turn.message.moments.value)
    own = Samples(digits.x_train[500:550], digits.y_train[500:550])
    event = Gathered(0, Stacked({"moments": np.stack(said)}, np.ones(4, np.int32)))
    told: dict[str, Any] = {"seed": np.array([1, 2], np.uint32), "number": np.uint32(0), "noise": False}
    after = close_turn(protocol, task, start.state, event, rows=own, **told)
    assert (after.state.moments == 2 * (said[0].astype(np.int64) + said[3])).all()
    assert (int(after.state.devices), int(after.published.version)) == (4, 1)


def test_each_upload_is_rated_alone_whatever_the_rounds_before_came_to(digits: Any):
    task = settled(make('rule = "top", uploads = 2, keep = 1, rows = 50'))
    protocol, start = find(task), first_turn(find(task), task)
    seen = replace(start.state, moments=start.state.moments + 10**9)
    batch = Samples(digits.x_train[:20], digits.y_train[:20])
    upload = check_in(protocol, task, batch, start.published, noise=Silence(), me="x").message
    alone = [secprobe.SOLVER.try_alone(task, each, upload, None).state.weights for each in (start.state, seen)]  # type: ignore[arg-type]
    np.testing.assert_array_equal(*alone)
    assert (protocol.predict(task, alone[0], batch.x) == batch.y).mean() > 0.8


# --- crowds ---


def test_uploads_with_wrong_labels_are_left_out(digits: Any):
    liars = Attackers(0.4, "label-flip")
    honest, fooled, chosen, best = (
        run(make(rule), digits, liars=each).scores[0]
        for rule, each in ((MEAN, None), (MEAN, liars), (DRAWN, liars), (BEST, liars))
    )
    assert honest > 0.8
    assert fooled < honest - 0.1
    assert min(chosen, best) > fooled + 0.05


def test_it_runs_in_time_with_rounds_that_close_late(digits: Any):
    late = make(f"{BEST}, minimum = 8, seconds = 300")
    study = run(late, digits, delay=Delay("exponential", 50.0))
    assert study.engine == "events"
    assert study.runs[0].heard >= 2
    assert study.scores[0] > 0.7


def test_rows_are_set_apart_for_the_server_and_no_device_holds_them(digits: Any):
    study = run(make(), digits)
    rows = study.runs[0].schedule
    assert study.scores[0] > 0.8
    assert len(rows) * 20 <= len(digits.y_train) - 200
    assert run(make(), digits, devices=Deal("iid", 60)).runs[0].heard > 0  # as the command deals them
    own = digits.x_test[:200], digits.y_test[:200]
    assert run(make(), digits, own=own).scores[0] > 0.8
    with pytest.raises(DataError, match="sets 200 rows apart for its server, and there are 150 in all"):
        simulate(make(), digits.x_train[:150], digits.y_train[:150], devices=2)
    with pytest.raises(DataError, match="`devices` says whose each row is"):
        run(make(), digits, devices=np.arange(len(digits.y_train)) % 50)


def test_a_crowd_that_cannot_fill_a_round_is_told(digits: Any):
    with pytest.raises(TaskError, match="Take more devices"):
        run(make(), digits, devices=12)


def test_numbers_are_rated_in_their_own_unit():
    rng = np.random.default_rng(4)
    x = rng.normal(size=(900, 3)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = 60 + 30 * x[:, 0]
    text = (
        TEXT.replace("dimension = 64", "dimension = 3")
        .replace('labels = {{ classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"] }}',
                 'labels = {{ kind = "number", low = 0, high = 100 }}')
        .replace("batch = 20", 'batch = 20\nmap = {{ kind = "identity", constant = 0.7 }}')
    )  # fmt: skip
    task = parse(text.format(combine=BEST.replace("200", "100"), epsilon=50.0, more=""))
    liars = Attackers(0.3, "label-flip")
    good = simulate(task, x, y, devices=40, seed=[1], liars=liars, test=(x[:200], y[:200]))
    bad = simulate(task.with_(protocol={"combine": {"rule": "mean", "uploads": 15}}), x, y, devices=40, seed=[1],
                   liars=liars, test=(x[:200], y[:200]))  # fmt: skip
    assert good.scores[0] > bad.scores[0] + 0.05


# --- the functional mechanism ---

UNITS = 'batch = 20\nmap = {{ kind = "layers", seed = 1, features = 80, layers = {layers}, constant = 0.0 }}'


def perturbed(epsilon: float, layers: int = 1, more: str = "") -> Task:
    text = TEXT.replace('mechanism = "skellam"', 'mechanism = "discrete-laplace"')
    text = text.replace("batch = 20", UNITS.replace("{layers}", str(layers)))
    return parse(text.format(combine='rule = "mean", uploads = 20', epsilon=epsilon, more=more))


def test_the_functional_mechanism_learns_where_its_noise_leaves_something(digits: Any):
    seen = {each: run(perturbed(each), digits, seed=[1]).scores[0] for each in (10.0, 1_000.0, 100_000.0)}
    assert seen[10.0] < 0.4 < seen[1_000.0] < seen[100_000.0]
    assert seen[100_000.0] > 0.93
    assert run(perturbed(1_000.0, layers=2), digits).scores[0] > 0.4


def test_units_are_public_and_in_the_unit_interval_and_a_sample_pays_once():
    task = settled(perturbed(1.0, layers=2))
    fixed = secprobe.plan(task)
    h = fixed.features(np.random.default_rng(1).normal(size=(50, 64)) / 8)
    assert 0 <= h.min() < 0.05 < 0.95 < h.max() <= 1
    assert ((h > 0) & (h < 1)).mean() > 0.5
    row = secprobe.plan(task).mechanism
    assert row.sensitivity.bound / (8 * row.clip**2) == 80 * 10 + 80**2 / 4
    assert Price.of(find(task), task).sample().epsilon(1e-6) == pytest.approx(1)
    device = settled(replace(task, privacy=replace(task.privacy, unit="device", grid=None)))
    assert secprobe.plan(device).mechanism.device_loss == row.loss


def test_labels_that_nobody_knows_move_no_linear_coefficient():
    fixed = secprobe.plan(settled(perturbed(1.0)))
    rows = target_rows(fixed, np.array([3, -1]))
    assert rows[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 0]
    assert rows[1].tolist() == [0.5] * 10


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('kind = "layers"', 'kind = "cosine"', 'protocol.map = { kind = "layers"'),
        ("constant = 0.0", "constant = 0.1", "constant = 0.0 }"),
        ("moments = 1.0", "moments = 0.001", r"and a device draws at most 1,048,576\. Take fewer units"),
        ("batch = 20", "batch = 20\npositive = true", "protocol.positive is for moments"),
    ],
)
def test_a_perturbed_loss_that_cannot_be_drawn_is_refused(old: str, new: str, says: str):
    text = TEXT.replace('mechanism = "skellam"', 'mechanism = "discrete-laplace"')
    text = text.replace("batch = 20", UNITS.replace("{layers}", "1"))
    text = text.format(combine='rule = "mean", uploads = 20', epsilon=1.0, more="").replace(old, new)
    with pytest.raises(TaskError, match=says):
        find(parse(text))
