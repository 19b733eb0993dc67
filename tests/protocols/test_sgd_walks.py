"""A crowd learns through all layers: task, table, door, schedule, handlers."""

import numpy as np
from tasks import SGD, toml

from crowdml.datasets.populations import iid
from crowdml.sim import compiled
from crowdml.sim.layout import Holding, lay_out
from crowdml.sim.world import World
from crowdml.task import parse

TASK = toml(
    SGD,
    features={"dimension": 8},
    protocol={"batch": 10, "step": {"c": 5.0}},
    privacy={"epsilon": {"gradient": 8.0, "errors": 0.5, "labels": 0.5}},
)


def test_a_small_crowd_learns_privately():
    rng = np.random.default_rng(3)
    y = rng.integers(0, 3, 6000).astype(np.int32)
    x = (np.eye(8, dtype=np.float32)[y] + 0.2 * rng.normal(size=(6000, 8))).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    holding = Holding(x, y, iid(6000, 100, 5))
    schedule = lay_out(World(100, 60), seed=7, batch=10, capacity=100)
    (run,) = compiled.run(parse(TASK), holding, [schedule], [7])
    assert ((x @ run.model).argmax(1) == y).mean() > 0.9
