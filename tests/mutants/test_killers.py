"""Tests that a mutant of table.py must not survive, where no other file of tests has one as quick: NumPy alone.

Sensitivities are searched for on adversarial neighbours, through the code that a device runs, and compared with the
noise that was asked for: not with the formula that the code itself used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from tasks import SGD, toml

from crowdml.arrays import Samples
from crowdml.buffer import Buffer
from crowdml.errors import GuaranteeError, LeakError
from crowdml.messages import Public, message, seal
from crowdml.models import make_model
from crowdml.price import Price
from crowdml.privacy.calibration import rho_for
from crowdml.privacy.door import Door
from crowdml.privacy.grid import Grid
from crowdml.privacy.losses import ZCDP, Pure, Total, exact
from crowdml.privacy.mechanisms import CountLaplace, GridGaussian, GridLaplace, RandomisedResponse
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import Private, Release, Rows
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.privacy.sensitivity import L1
from crowdml.protocol import Context, Send, Sensed, advance
from crowdml.protocols import find
from crowdml.protocols.sgd import Gradient, Params
from crowdml.task import parse

GRID = Grid(Fraction(1, 1024))
CLIP = 1000  # grid steps
SAMPLES = 4


def a_task(mechanism: str = "discrete-gaussian", held_out: int = 0):
    norm = "l1" if mechanism == "discrete-laplace" else "l2"
    return parse(
        toml(
            SGD,
            features={"dimension": 3, "norm": {"kind": norm, "bound": 1.0}},
            protocol={"batch": 4, "held_out": held_out},
            privacy={"mechanism": mechanism, "epsilon": {"gradient": 1.0, "errors": 0.25, "labels": 0.5}},
        )
    )


@dataclass
class Recorder:
    """Says the same number for every draw, and remembers what it was asked for."""

    says: int = 0
    asked: list[tuple[str, Fraction]] = field(default_factory=list)

    def _note(self, law, parameter, like):
        self.asked.append((law, Fraction(parameter)))
        return np.full(np.shape(like), self.says, np.int32)

    def discrete_laplace(self, scale, like):
        return self._note("laplace", scale, like)

    def discrete_gaussian(self, sigma, like):
        return self._note("gaussian", sigma, like)

    def skellam(self, variance, like):
        return self._note("skellam", variance, like)

    def uniform_below(self, n, like):
        return self._note("uniform", n, like) % n


def size(moved, norm):
    moved = np.asarray(moved, np.float64).ravel()
    return abs(moved).sum() if norm == "l1" else math.sqrt((moved * moved).sum())


def adversarial_rows(norm: str):
    """Contributions of one sample: vertices of the ball and far outside it, opposite signs, all that rounds badly."""
    edge = CLIP * float(GRID.step)
    rows = [sign * edge * scale * axis for axis in np.eye(3) for sign in (1, -1) for scale in (0.5, 1, 7, 1e6)]
    rows += [edge * np.array([0.57737, -0.57737, 0.57737]), edge * np.array([0.33366, 0.33366, -0.33366])]
    rows += [np.array([half, half, half]) * float(GRID.step) for half in (577.85, 333.75, -577.85)]
    rows += [np.array([bad, edge, 0.0]) for bad in (np.nan, np.inf, -np.inf, 3e38)]
    return rows


def largest_move(draw, norm: str) -> float:
    """How far replacing one of four samples moves a sum."""
    others = np.zeros((SAMPLES - 1, 3))
    sums = [np.asarray(draw(np.vstack([row[None], others])), np.int64) for row in adversarial_rows(norm)]
    return max(size(one - other, norm) for one, other in product(sums, sums))


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_sum_on_the_grid_moves_by_at_most_two_clips_and_can_do_it(norm):
    moved = largest_move(lambda rows: GRID.sum(rows, norm=norm, clip=CLIP), norm)
    assert moved <= 2 * CLIP
    assert moved >= 0.9 * 2 * CLIP


def test_the_grid_truncates_toward_zero_and_so_never_raises_a_norm():
    rows = np.array([[0.9, -0.9, 2.5], [-2.999, 0.499, 0.501]]) * float(GRID.step)
    assert GRID.sum(rows[:1], norm="l2", clip=CLIP).tolist() == [0, 0, 2]
    assert GRID.sum(rows[1:], norm="l2", clip=CLIP).tolist() == [-2, 0, 0]


def test_a_row_that_is_short_enough_reaches_the_sum_whole():
    row = np.array([[600.9, 700.9, 380.9]]) * float(GRID.step)  # 999.35 long; each entry rounded up, 1000.98
    assert GRID.sum(row, norm="l2", clip=CLIP).tolist() == [600, 700, 380]


def test_a_row_that_is_too_long_is_shortened_and_not_dropped():
    row = np.array([[3.0, -4.0, 0.0]]) * 2
    assert GRID.sum(row, norm="l2", clip=CLIP).tolist() == [600, -800, 0]


def test_a_row_that_floats_take_for_short_enough_counts_as_zero():
    row = np.array([[8193.0, 1.0]], np.float32)  # 8193^2 + 1 is 8193^2 in float32
    assert Grid(Fraction(1)).sum(row, norm="l2", clip=8193).tolist() == [0, 0]


def test_the_noise_of_a_grid_laplace_is_worth_its_epsilon_on_the_worst_neighbours():
    mechanism, source = GridLaplace(CLIP, Fraction(1, 3), GRID, Rows(0, SAMPLES), ""), Recorder()
    moved = largest_move(lambda rows: mechanism.draw(rows, source), "l1")
    (law, scale), *_ = source.asked
    assert law == "laplace"
    assert moved / float(scale) <= mechanism.loss.epsilon * (1 + 1e-9)
    assert moved / float(scale) >= 0.9 * mechanism.loss.epsilon


def test_the_noise_of_a_grid_gaussian_is_worth_its_rho_on_the_worst_neighbours():
    mechanism, source = GridGaussian(CLIP, Fraction(1, 50), GRID, Rows(0, SAMPLES), ""), Recorder()
    moved = largest_move(lambda rows: mechanism.draw(rows, source), "l2")
    (law, sigma), *_ = source.asked
    assert law == "gaussian"
    assert moved**2 / (2 * float(sigma) ** 2) <= mechanism.loss.rho * (1 + 1e-9)
    assert moved**2 / (2 * float(sigma) ** 2) >= 0.9 * mechanism.loss.rho


@pytest.mark.parametrize("kind", [GridLaplace, GridGaussian])
def test_noise_is_added_after_clipping(kind):
    mechanism = kind(CLIP, Fraction(1, 10), GRID, Rows(0, SAMPLES), "")
    rows = np.tile([3.0, -1.0, 0.25], (SAMPLES, 1))
    noisy, plain = mechanism.draw(rows, Recorder(says=123_456)), mechanism.draw(rows, Silence())
    assert (noisy - plain).tolist() == [123_456] * 3


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_an_entry_that_is_not_finite_counts_as_zero(bad):
    rows = np.array([[bad, 0.25, 0.0], [0.5, 0.0, 0.0]])
    assert GRID.sum(rows, norm="l2", clip=CLIP).tolist() == [512, 0, 0]


def test_no_gradient_is_longer_than_its_bound():
    batch = Samples(np.array([[1.0, 0.0, 0.0]]), np.array([1]))
    sure = np.zeros((3, 3))
    sure[0] = [50.0, -50.0, -50.0]  # of class 0
    softmax, linear = make_model("softmax", 3, 3), make_model("linear", 3, None, width=2.0)
    for model, weights, exact_size in (
        (softmax, sure, {"l1": 2, "l2": 2**0.5}),
        (linear, 9 * sure[0], {"l1": 2, "l2": 2}),
    ):
        for norm, found in exact_size.items():
            gradient = model.gradients(weights, batch)[0]
            assert size(gradient, norm) == pytest.approx(found)
            assert model.gradient_bound(norm, 1.0) == pytest.approx(found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", ["softmax", "logistic", "svm", "linear"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_published_weights_make_a_gradient_that_is_no_number(kind, bad):
    model = make_model(kind, 3, {"softmax": 3, "linear": None}.get(kind, 2))
    weights = np.full(model.shape, bad)
    batch = Samples(np.array([[0.5, -0.5, 0.0], [1.0, 0.0, 0.0]]), np.array([1, 0]))
    assert np.isfinite(model.gradients(weights, batch)).all()


# Counts and answers


def test_counts_in_several_cells_are_never_noised_for_one():
    mechanism = CountLaplace(L1(Fraction(1)), Fraction(1, 2), Rows(0, SAMPLES), "")
    with pytest.raises(GuaranteeError, match=r"3 cells move by 2"):
        mechanism.draw(np.eye(3)[[0, 1, 2, 0]], Silence())


@pytest.mark.parametrize("cells", [1, 3])
def test_the_noise_of_counts_is_worth_its_epsilon_on_the_worst_neighbours(cells):
    mechanism = CountLaplace(L1(Fraction(min(cells, 2))), Fraction(1, 2), Rows(0, SAMPLES), "")
    source = Recorder()
    ones = [np.eye(cells)[cell] for cell in range(cells)] + [np.zeros(cells), np.ones(cells), np.full(cells, 9.0)]
    sums = [np.asarray(mechanism.draw(np.vstack([one[None], np.zeros((3, cells))]), source)) for one in ones]
    moved = max(abs(a - b).sum() for a, b in product(sums, sums))
    assert moved / float(source.asked[0][1]) == mechanism.loss.epsilon


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_randomised_response_keeps_a_label_as_often_as_its_epsilon_allows(classes):
    mechanism = RandomisedResponse(classes, Fraction(3, 2), Rows(0, 1), "")
    odds = mechanism.keep / ((1 - mechanism.keep) / (classes - 1))
    assert math.exp(1.5) * (1 - 1e-6) <= odds <= math.exp(1.5)


def test_randomised_response_keeps_exactly_the_words_below_its_probability():
    mechanism = RandomisedResponse(3, Fraction(1), Rows(0, 1), "")
    edge = int(mechanism.keep * 2**30)
    for word, kept in ((0, True), (edge - 1, True), (edge, False), (2**30 - 1, False)):
        answer = mechanism.draw(np.array([1]), Recorder(says=word))
        assert (answer.tolist() == [1]) is kept


# Through a whole step of the protocol


def answer(task, batch: Samples, source, weights=None):
    """What a device says to this publication, and its door."""
    protocol = find(task)
    door = Door(protocol.mechanisms(task), source)
    ctx = Context(me="device", release=door.release)
    state = advance(protocol.device, task, None, Sensed(Private(batch, Rows(0, len(batch)))), ctx).state
    weights = np.zeros((3, 3), np.float32) if weights is None else weights
    step = advance(protocol.device, task, state, Params(weights, np.int32(0)), ctx)
    return step, door


def worst_batches(norm: str):
    """Batches that differ in one sample: vertices and signs, each label; the others are zero samples."""
    vectors = [sign * axis for axis in np.eye(3) for sign in (1.0, -1.0)]
    vectors += [np.array([sign * (0.95 if norm == "l1" else 0.998), 0.05, 0.0]) for sign in (1, -1)]
    for x, y in product(vectors, range(3)):
        yield Samples(np.vstack([x[None], np.zeros((3, 3))]).astype(np.float32), np.array([y, 0, 0, 0], np.int32))


@pytest.mark.parametrize(("mechanism", "norm"), [("discrete-laplace", "l1"), ("discrete-gaussian", "l2")])
def test_a_check_in_moves_by_no_more_than_its_noise_hides_and_by_nearly_that_much(mechanism, norm):
    task, sums, asked = a_task(mechanism), {"gradient": [], "errors": [], "labels": []}, []
    sure = (1000 * np.array([[0, 0, 0], [1, -1, -1], [0, 1, -1]])).astype(
        np.float32
    )  # class 0 on either side of x_0 = 0
    for batch, weights in product(worst_batches(norm), (sure, np.zeros((3, 3), np.float32))):
        source = Recorder()
        step, _ = answer(task, batch, source, weights)
        asked = source.asked
        for name, found in sums.items():
            found.append((weights is sure, np.asarray(getattr(step.effects[0].message, name).value, np.int64)))
    moved = {
        name: max(
            size(a - b, norm if name == "gradient" else "l1") for (u, a), (v, b) in product(found, found) if u == v
        )
        for name, found in sums.items()
    }
    table = find(task).mechanisms(task)
    (law, noise), (_, of_errors), (_, of_labels) = asked
    if law == "laplace":
        assert 0.9 * float(table["gradient"].loss.epsilon) <= moved["gradient"] / float(noise) <= 1.0
    else:
        spent = moved["gradient"] ** 2 / (2 * float(noise) ** 2)
        assert 0.9 * float(table["gradient"].loss.rho) <= spent <= float(table["gradient"].loss.rho) * (1 + 1e-9)
    assert moved["errors"] / float(of_errors) == 0.25
    assert moved["labels"] / float(of_labels) == 0.5


def test_a_sample_pays_for_everything_that_used_it():
    assert Price.of(find(a_task("discrete-laplace")), a_task("discrete-laplace")).sample_epsilon() == 1.75
    held_out = a_task("discrete-laplace", held_out=2)
    assert Price.of(find(held_out), held_out).sample() == Total.of(
        [row.loss for row in _rows(held_out, "gradient", "labels")]
    )


def _rows(task, *names):
    return [find(task).mechanisms(task)[name] for name in names]


def test_a_repeated_publication_is_not_answered_from_the_same_samples():
    task, protocol = a_task(), find(a_task())
    batch = next(iter(worst_batches("l2")))
    step, door = answer(task, batch, Silence())
    assert [type(effect) for effect in step.effects] == [Send]
    assert [passage.row for passage in door.passages] == ["gradient", "errors", "labels"]
    again = advance(
        protocol.device, task, step.state, Params(np.zeros((3, 3), np.float32), np.int32(1)), Context(me="device")
    )
    assert again.effects == ()


def test_what_a_device_does_has_the_same_shape_on_all_neighbours():
    task, protocol = a_task(), find(a_task())
    shapes = set()
    for batch in worst_batches("l2"):
        waiting = advance(protocol.device, task, None, Sensed(Private(batch, Rows(0, 4))), Context(me="device"))
        step, door = answer(task, batch, Silence())
        sealed = seal(task.hash, "device", frozenset(("server",)), 1, step.effects[0].message, door)
        shapes.add((tuple(type(effect).__name__ for effect in waiting.effects), len(step.effects), len(sealed.body)))
    assert len(shapes) == 1


# Composition


def test_releases_one_after_the_other_add_up():
    five = Total.of([Pure(Fraction(1, 10)), ZCDP(Fraction(1, 7))] * 5)
    assert (five.pure, five.squares, five.zcdp) == (Fraction(1, 2), Fraction(1, 40), Fraction(5, 7))
    assert Total.of([Pure(Fraction(1, 10)), ZCDP(Fraction(1, 7))]).scaled(5) == five


def test_a_rho_made_for_a_budget_is_within_it():
    for epsilon, delta in product(("0.01", "0.1", "0.9", "1", "4", "10"), (1e-9, 1e-6, 1e-5)):
        spent = Total.of([ZCDP(rho_for(Fraction(epsilon), delta))]).epsilon(delta)
        assert exact(spent) <= Fraction(epsilon)
        assert spent > float(Fraction(epsilon)) * (1 - 1e-8)


# What travels


def a_door():
    return Door({"count": CountLaplace(L1(Fraction(1)), Fraction(1), Rows(0, 2), "")}, Silence())


def released(door: Door) -> Release:
    return door.release("count", Private(np.ones((2, 1)), Rows(0, 2)))


def send(what, door: Door):
    return seal(bytes(32), "device", frozenset(("server",)), 1, Gradient(what, None, None, np.int32(0)), door)


def test_a_release_of_another_step_is_not_sealed():
    door, other = a_door(), a_door()
    assert send(released(door), door).kind == "sgd/gradient/1"
    with pytest.raises(LeakError, match="did not come through this device's door in this step"):
        send(released(other), door)


def test_a_private_value_is_not_sealed():
    with pytest.raises(LeakError, match="holds a Private value"):
        send(Private(np.ones(2), Rows(0, 2)), a_door())


def test_a_message_with_a_field_of_a_plain_type_cannot_be_declared():
    class Careless:
        gradient: Release[int]
        count: int
        version: Public[int]

    with pytest.raises(LeakError, match=r"Careless\.count"):
        message("test/careless/1")(Careless)


# What waits


def test_a_batch_always_has_as_many_samples_as_the_task_says_and_each_serves_once():
    buffer = Buffer(batch=3, capacity=9)
    for serial in range(8):
        buffer.add(serial, np.full(2, float(serial)), serial % 2)
    first, batch = buffer.take()
    assert (first, batch.part, len(batch._value)) == ((0, 1, 2), Rows(0, 3), 3)
    assert buffer.take()[0] == (3, 4, 5)
    assert len(buffer) == 2
    assert not buffer.ready


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_sample_that_is_not_finite_waits_as_the_zero_sample(bad):
    buffer = Buffer(batch=1, capacity=1)
    buffer.add(0, np.array([bad, 1.0]), 1)
    assert buffer.take()[1]._value.x.tolist() == [[0.0, 0.0]]


# The simulator's noise


def test_two_releases_of_a_step_never_share_their_noise():
    source = SeededSource(stream(1, 2, 3))
    first, second = (source.discrete_laplace(Fraction(1000), np.zeros(64, np.int32)) for _ in range(2))
    assert (first != second).sum() > 60


def test_seeded_noise_has_the_scale_that_it_was_asked_for():
    n = 25_485
    drawn = SeededSource(stream(5, 6, 7)).discrete_laplace(Fraction(200), np.zeros(n, np.int32))
    assert abs(abs(drawn.astype(float)).mean() / 200 - 1) * math.sqrt(n) < 4.9


def test_seeded_noise_is_zero_as_often_as_its_law_says():
    n, zero = 25_485, math.tanh(0.5)  # discrete Laplace of scale 1: (1 - e^-1) / (1 + e^-1)
    drawn = SeededSource(stream(5, 6, 7)).discrete_laplace(Fraction(1), np.zeros(n, np.int32))
    assert abs((drawn == 0).mean() - zero) < 4.9 * math.sqrt(zero * (1 - zero) / n)
