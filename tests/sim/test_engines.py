"""The two engines run the same handlers over the same events (style, section 5)."""

from typing import Any

import numpy as np
import pytest
from tasks import SGD, toml

from crowdml.datasets.populations import by_user, iid
from crowdml.sim import compiled, events
from crowdml.sim.layout import Holding, lay_out
from crowdml.sim.world import Delay, World
from crowdml.task import parse

MECHANISMS = [("none", "l2"), ("discrete-gaussian", "l2"), ("discrete-laplace", "l1")]

WORLDS = {
    "at once": World(9, 24),
    "late": World(
        9, 24, request=Delay("uniform", 7.0), check_out=Delay("exponential", 20.0), check_in=Delay("pareto", 15.0)
    ),
    "rough": World(
        9, 24, request=Delay("constant", 1.0), check_in=Delay("uniform", 90.0), failing=0.4, retry=11.0,
        joining=50.0, leaving=0.3, away=0.3, cycle=40.0,
    ),
}  # fmt: skip


def make(
    mechanism: str = "none",
    norm: str = "l2",
    stop: dict[str, Any] | None = None,
    radius: float = 100.0,
    **protocol: Any,
):
    rng = np.random.default_rng(11)
    y = rng.integers(0, 3, 216).astype(np.int32)
    x = rng.normal(size=(216, 6)).astype(np.float32) + np.eye(3, 6, dtype=np.float32)[y]
    x /= np.linalg.norm(x, axis=1, ord=1 if norm == "l1" else 2, keepdims=True)
    told = toml(
        SGD,
        features={"dimension": 6, "norm": {"kind": norm, "bound": 1.0}},
        model={"l2": 0.001},
        protocol={"batch": 4, "held_out": 1, "step": {"c": 2.0}, "radius": radius, **protocol},
        privacy={"mechanism": mechanism, "epsilon": {"gradient": 4.0, "errors": 1.0, "labels": 1.0}},
        stop=stop,
    )
    return parse(told), Holding(x, y, iid(216, 9, 5))


@pytest.mark.parametrize("capacity", [4, 5, 40])
@pytest.mark.parametrize("world", WORLDS)
def test_the_schedule_is_what_the_event_queue_meets(world: str, capacity: int):
    task, holding = make()
    laid = lay_out(WORLDS[world], seed=3, batch=4, capacity=capacity, most_trips=5)
    met = events.run(task, holding, WORLDS[world], seed=3, capacity=capacity, most_trips=5).schedule
    assert len(laid) > 20
    for name in ("device", "trip", "samples", "version", "time"):
        np.testing.assert_array_equal(getattr(laid, name), getattr(met, name), err_msg=name)
    assert laid.dropped >= met.dropped  # the queue stops looking once nothing more can arrive


def test_devices_with_unlike_numbers_of_samples_stop_when_theirs_are_used():
    groups = np.repeat([0, 1, 2], [4, 9, 12])
    population = by_user(groups)
    world = World(3, 12, counts=population.counts)
    laid = lay_out(world, seed=1, batch=4, capacity=40)
    assert np.bincount(laid.device).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("world", "mechanism", "norm"),
    [("at once", *MECHANISMS[0]), *(("late", *each) for each in MECHANISMS), ("rough", *MECHANISMS[1])],
)
def test_without_noise_both_engines_on_jax_are_equal_bit_for_bit(world: str, mechanism: str, norm: str):
    task, holding = make(mechanism, norm)
    laid = lay_out(WORLDS[world], seed=3, batch=4, capacity=40)
    (fast,) = compiled.run(task, holding, [laid], [3], noise=False, points=[5, 20])
    slow = events.run(task, holding, WORLDS[world], seed=3, capacity=40, noise=False, points=[5, 20], backend="jax")
    np.testing.assert_array_equal(fast.points, slow.points)
    np.testing.assert_array_equal(fast.weights, slow.weights)


@pytest.mark.parametrize(("mechanism", "norm", "clip"), [("none", "l2", 9.0), ("discrete-laplace", "l1", 0.5)])
def test_batches_that_are_added_up_by_their_factors_are_equal_on_both_engines(mechanism: str, norm: str, clip: float):
    """Eight samples and more go another way through compiled code; a clip of 0.5 shortens most of them."""
    task, holding = make(mechanism, norm, batch=12, clip=clip)
    laid = lay_out(WORLDS["late"], seed=3, batch=12, capacity=40)
    (fast,) = compiled.run(task, holding, [laid], [3], noise=False)
    for backend, tolerance in (("jax", 0.0), ("numpy", 1e-3)):
        slow = events.run(task, holding, WORLDS["late"], seed=3, capacity=40, noise=False, backend=backend)
        np.testing.assert_allclose(fast.weights, slow.weights, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("mechanism", "norm"), MECHANISMS)
def test_with_noise_both_engines_draw_the_same_integers(mechanism: str, norm: str):
    task, holding = make(mechanism, norm)
    world = WORLDS["late"]
    laid = lay_out(world, seed=3, batch=4, capacity=40)
    (fast,) = compiled.run(task, holding, [laid], [3], keep_said=True)
    for backend in ("jax", "numpy"):
        slow = events.run(task, holding, world, seed=3, capacity=40, keep_said=True, backend=backend)
        np.testing.assert_array_equal(fast.said["labels"], slow.said["labels"], err_msg=backend)
        # Weights are floats and round in each engine's own way; a sum near a grid line may fall one step off on NumPy.
        np.testing.assert_allclose(fast.weights, slow.weights, rtol=0, atol=1e-3 if backend == "numpy" else 1e-5)


def test_with_weights_on_the_edge_of_the_ball_the_engines_agree_to_the_last_bits():
    # A compiler adds the squares of the norm in its own order, so the projection may differ by a rounding.
    task, holding = make("none", radius=0.5)
    laid = lay_out(WORLDS["late"], seed=3, batch=4, capacity=40)
    (fast,) = compiled.run(task, holding, [laid], [3], noise=False)
    slow = events.run(task, holding, WORLDS["late"], seed=3, capacity=40, noise=False, backend="jax")
    assert np.linalg.norm(fast.model) > 0.49
    np.testing.assert_allclose(fast.weights, slow.weights, rtol=0, atol=1e-6)


def test_numpy_agrees_with_jax_before_the_grid():
    task, holding = make("none")
    world = WORLDS["late"]
    jax_run = events.run(task, holding, world, seed=3, capacity=40, backend="jax")
    numpy_run = events.run(task, holding, world, seed=3, capacity=40, backend="numpy")
    np.testing.assert_allclose(jax_run.weights, numpy_run.weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("stop", [{"steps": 17}, {"error": 0.6}])
def test_both_engines_stop_at_the_same_check_in_for_the_same_reason(stop: dict[str, Any]):
    task, holding = make("none", stop=stop)
    world = WORLDS["late"]
    laid = lay_out(world, seed=3, batch=4, capacity=40)
    (fast,) = compiled.run(task, holding, [laid], [3])
    slow = events.run(task, holding, world, seed=3, capacity=40, backend="jax")
    assert fast.stopped == slow.stopped
    assert fast.stopped is not None
    assert int(fast.state.steps) == int(slow.state.steps) < len(laid)
    np.testing.assert_array_equal(fast.model, slow.model)


def test_trials_together_are_the_trials_one_by_one():
    task, holding = make("discrete-gaussian", stop={"steps": 40})
    laid = [lay_out(World(9, 24, request=Delay("uniform", 9.0)), seed=seed, batch=4, capacity=40) for seed in (1, 2, 3)]
    apart = compiled.run(task, holding, laid, [1, 2, 3], points=[7, 30], keep_said=True)
    together = compiled.run(task, holding, laid, [1, 2, 3], points=[7, 30], keep_said=True, together=True)
    for one, other in zip(apart, together, strict=True):
        assert one.stopped == other.stopped
        assert one.stopped.sentence == "40 check-ins have arrived"
        assert int(one.state.steps) == int(other.state.steps)
        np.testing.assert_array_equal(one.said["labels"], other.said["labels"])
        np.testing.assert_allclose(one.weights, other.weights, rtol=0, atol=1e-5)
