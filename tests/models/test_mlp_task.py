"""A task with a perceptron: its gradients are held to the task's clip, and it starts from its own public weights."""

from fractions import Fraction

import numpy as np
import pytest
from click.testing import CliRunner
from tasks import SGD, toml

from crowdml.cli import cli
from crowdml.errors import TaskError
from crowdml.price import Price
from crowdml.protocols import find, sgd
from crowdml.sim.studies import simulate
from crowdml.task import from_canonical, parse

TEXT = toml(
    SGD,
    features={"dimension": 2, "norm": {"kind": "l2", "bound": 1.5}},
    labels={"classes": ["same", "different"]},
    model={"kind": "mlp", "hidden": [8], "activation": "tanh"},
    protocol={"batch": 10, "step": {"c": 5.0}, "clip": 0.5},
    privacy={"epsilon": {"gradient": 8.0}},
)


def test_without_a_clip_it_is_refused_with_the_key_that_is_missing():
    with pytest.raises(TaskError, match=r"protocol\.clip"):
        find(parse(TEXT.replace("clip = 0.5", "")))


def test_the_noise_is_that_of_the_clip_whatever_the_features_are():
    for bound in ("1.5", "90.0"):
        task = parse(TEXT.replace("bound = 1.5", f"bound = {bound}"))
        row = Price.of(find(task), task).rows[0].mechanism
        assert float(row.clip * row.grid.step) == pytest.approx(0.5, rel=1e-3)
        assert row.sensitivity.bound == 2 * row.clip


def test_a_squared_loss_may_leave_too_once_it_is_clipped():
    text = TEXT.replace('hidden = [8]\nactivation = "tanh"', "").replace('"mlp"', '"least-squares"')
    text = text.replace('classes = ["same", "different"]', 'kind = "number"')
    assert sgd.plan(parse(text)).table["gradient"].clip > 0
    with pytest.raises(TaskError, match="grows with the weights"):
        sgd.plan(parse(text.replace("clip = 0.5", "")))


def test_the_first_publication_is_the_public_start_and_the_task_survives_its_canonical_form():
    task = parse(TEXT)
    again = from_canonical(task.canonical)
    assert again == task
    assert sgd.plan(again).model.hidden == (8,)
    step = sgd.publish_initial(task, None)
    np.testing.assert_array_equal(step.effects[0].message.weights, sgd.plan(task).model.start())
    assert not step.state.memory.any()
    assert sgd.public_step(task) < Fraction(20)


def test_a_simulated_crowd_learns_what_no_linear_model_can():
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (20_000, 2)).astype(np.float32)
    y = ((x[:, 0] > 0) ^ (x[:, 1] > 0)).astype(np.int32)
    study = simulate(parse(TEXT), x, y, devices=50, seed=[3])
    assert study.accuracy(x[:2000], y[:2000])[0][-1] > 0.85
    assert study.planned.sample == pytest.approx(8.0, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "Learns: mlp 2-8-2, tanh, softmax, 42 weights"),
        ({'kind = "mlp"': 'kind = "svm"\nbias = true', "hidden = [8]": "", 'activation = "tanh"': ""},
         "Learns: svm with a bias, 3 weights"),
    ],
)  # fmt: skip
def test_a_task_that_is_checked_says_what_it_learns(changes, line, tmp_path):
    text = TEXT
    for old, new in changes.items():
        text = text.replace(old, new)
    (tmp_path / "task.toml").write_text(text)
    said = CliRunner().invoke(cli, ["task", "check", str(tmp_path / "task.toml")])
    assert said.exit_code == 0, said.output
    assert line in said.output
