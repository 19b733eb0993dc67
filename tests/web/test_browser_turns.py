"""The browser's tables and check-ins beside Python's, on the tasks that are shipped and on batches that are drawn."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from crowdml import protocols
from crowdml.arrays import Samples
from crowdml.features.norms import normalise
from crowdml.messages import decode, encode
from crowdml.price import Price
from crowdml.privacy.noise import Silence
from crowdml.protocols import local_updates, sgd
from crowdml.task import Task, find_task, parse
from crowdml.turn import check_in
from crowdml.wire.statements import losses_of

LOCAL = """
name = "beside"
[features]
dimension = 6
norm = { kind = "l2", bound = 1.0 }
[labels]
classes = ["a", "b", "c"]
[model]
kind = "softmax"
l2 = 0.01
[protocol]
kind = "local_updates"
batch = 12
minibatch = 3
local_steps = 10
rate = { c = 0.5, schedule = "1/sqrt(t)", counter = "path" }
"""
ALONE = """
[privacy]
mechanism = "discrete-gaussian"
epsilon = { update = 2.0 }
delta = 1e-6
uses = 2
budget = { epsilon = 2.0, samples = 600 }
"""
MASKED = """
[privacy]
mechanism = "skellam"
epsilon = { update = 2.0 }
delta = 1e-7
[masking]
cohort = 20
minimum = 15
colluders = 2
"""
TASKS = {
    **{
        name: find_task(name)
        for name in ("activity", "demo", "digits", "digits-gram", "digits-masked", "digits-mlp", "mnist")
    },
    "local, a sample": parse(LOCAL + ALONE),
    "local, like the steps": parse(LOCAL + 'noise = { schedule = "weights" }\n' + ALONE),
    "local, a device": parse(LOCAL + "clip = 0.5\n" + ALONE + 'unit = "device"\n'),
    "local, noise that shrinks": parse(
        LOCAL + 'clip = 0.5\nnoise = { schedule = "geometric", ratio = 0.95 }\n' + ALONE + 'unit = "device"\n'
    ),
    "gram, a device, with cosines": parse(
        LOCAL.partition("[model]")[0]
        + """
[model]
kind = "ridge"
[protocol]
kind = "gram"
batch = 5
map = { kind = "cosine", seed = 4, features = 20, width = 0.5 }
"""
        + MASKED.replace("update", "moments").replace("[masking]", 'unit = "device"\n[masking]')
    ),
    "local, masked": parse(LOCAL.replace('"path"', '"steps"') + MASKED),
}
NAMES = pytest.mark.parametrize("name", TASKS)


@NAMES
@pytest.mark.parametrize("trip", [0, 7])
def test_a_table_is_that_of_python(engine: Any, name: str, trip: int):
    task = TASKS[name]
    protocol = protocols.find(task)
    table = protocol.mechanisms(task)
    found = engine("turning.js", "planned", task.canonical.decode(), trip)
    assert list(found["rows"]) == list(table)
    for row, mine in found["rows"].items():
        python, priced = table[row], table[row].at(trip)
        assert python.law is not None
        assert mine["step"] == str(python.grid.step)
        assert mine["covers"] == [python.covers.start, python.covers.stop]
        assert mine["levels"] == python.check_ins
        assert mine["width"] >= python.law.steps * (1 - 1e-12)
        assert mine["width"] == pytest.approx(python.law.steps, rel=1e-5)
        if python.clipped is not None:
            assert mine["bound"] == python.clipped
        if mine["width"] == pytest.approx(python.law.steps, rel=1e-14):
            both = (priced.loss, priced.device_loss, python.alone, python.device_alone)
            assert mine["losses"] == [str(each) for each in (both if task.masking else both[:2])] + (
                [] if task.masking else [None, None]
            )
    assert found["sample"] == list(losses_of(Price.of(protocol, task).sample(task.privacy.uses)))


def offer(task: Task, draw: np.random.Generator) -> Any:
    if task.protocol["kind"] == "sgd":
        shape = sgd.plan(task).model.shape
        return sgd.Params(draw.normal(size=shape).astype(np.float32), np.int32(3))
    shape = local_updates.plan(task).model.shape
    return local_updates.Weights(draw.normal(size=shape).astype(np.float32), np.int32(3), np.int32(9))


@pytest.mark.parametrize("name", [name for name in TASKS if TASKS[name].masking is None])
def test_before_its_noise_no_entry_is_further_than_a_step_from_pythons(engine: Any, name: str):
    task, draw = TASKS[name], np.random.default_rng(8)
    protocol = protocols.find(task)
    batch = protocol.batch(task)
    x = normalise(draw.normal(size=(batch, task.features.dimension)), "l2", float(task.features.norm.bound))
    y, offered = draw.integers(0, task.classes or 1, batch), offer(task, draw)
    python = check_in(protocol, task, Samples(x, y), offered, noise=Silence(), me="0" * 32, trip=1).message
    body = engine("turning.js", "silent", task.canonical.decode(), x.tolist(), y.tolist(), encode(offered).hex(), 1)
    mine = decode(python.kind, bytes.fromhex(body))
    for row in protocol.mechanisms(task):
        one, other = getattr(mine, row).value, getattr(python, row).value
        assert one.shape == other.shape
        assert np.abs(one.astype(int) - other).max() <= 1
        assert np.abs(other).max() > 0


@pytest.mark.slow
@pytest.mark.browser
def test_a_check_in_of_the_activity_task_is_quick(page: Any):
    """64 features, 3 classes, 20 samples, with all its noise; the bench's limit is 20 ms."""
    task, draw = TASKS["activity"], np.random.default_rng(8)
    x = normalise(draw.normal(size=(20, 64)), "l2", float(Fraction(1)))
    given = [task.canonical.decode(), x.tolist(), draw.integers(0, 3, 20).tolist(), encode(offer(task, draw)).hex(), 50]
    took = page.evaluate("async (given) => (await import('/tests/web/turning.js')).turnTimes(...given)", given)
    assert took < 20
