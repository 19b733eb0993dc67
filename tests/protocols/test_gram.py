"""gram: one masked release, in conversation; what it costs a sample and a device; and what a server learns from it."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from tasks import MOMENTS, toml

from crowdml.arrays import Samples
from crowdml.errors import LeakError, TaskError
from crowdml.messages import SERVER, inspect, masked_steps, total
from crowdml.price import Price
from crowdml.privacy.door import Door
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import Private, Rows
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.privacy.sensitivity import Adjacency
from crowdml.protocol import Context, Publish, Send, Sensed, Stop, advance
from crowdml.protocols import find, gram, settled
from crowdml.secagg.terms import terms_of
from crowdml.second_moments import label_rows, moment_rows, predictions, solve_moments
from crowdml.task import Masking, Privacy, find_task, parse

TEXT = toml(
    MOMENTS,
    features={"dimension": 3},
    labels={"classes": ["a", "b"]},
    protocol={"batch": 10},
    privacy={"epsilon": {"moments": 1.0}},
    masking={"cohort": 200, "minimum": 150, "colluders": 10},
)
TASK = parse(TEXT)


def samples(seed, count=10):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 3)).astype(np.float32)
    return Samples(x, (x[:, 0] > 0.3 * x[:, 1]).astype(np.int32))


def says(task, batch, noise):
    """What a device says to a publication, and what it charged."""
    door = Door(gram.mechanisms(task), noise)
    ctx = Context(me="device", release=door.release, masked=door.masked)
    waiting = advance(gram.device, task, None, Sensed(Private(batch, Rows(0, len(batch)))), ctx).state
    start = gram.server.start(task, Context(me=SERVER))
    (offer,) = (each.message for each in start.effects if isinstance(each, Publish))
    step = advance(gram.device, task, waiting, offer, ctx)
    (send,) = (each for each in step.effects if isinstance(each, Send))
    inspect(send.message, door)
    assert advance(gram.device, task, step.state, offer, ctx).effects == ()
    return masked_steps(send.message), [passage.row for passage in door.passages]


def learns(task, sums, devices, state=None):
    state = gram.server.start(task, Context(me=SERVER)).state if state is None else state
    heard = total("gram/total/1", sums, devices=np.int32(devices), version=np.int32(0))
    return advance(gram.server, task, state, heard, Context(me=SERVER))


def test_a_device_says_its_moments_once_and_charges_one_row():
    said, charged = says(TASK, samples(1), Silence())
    assert charged == ["moments"]
    row = gram.mechanisms(TASK)["moments"]
    batch = samples(1)
    h = row.steps(gram.plan(TASK).map(batch.x))
    assert said["moments"].tolist()[:4] == (h * h).sum(axis=0).tolist()
    assert said["moments"].shape == (row.length,) == (4 * 5 // 2 + 4 * 2,)


def test_moments_do_not_leave_for_anyone_to_see():
    door = Door(gram.mechanisms(TASK), Silence())
    with pytest.raises(LeakError, match="share of the noise"):
        door.release("moments", Private(np.zeros((10, 6)), Rows(0, 10)))


def test_the_server_learns_from_a_cohort_and_stops_after_it():
    crowd = [says(TASK, samples(seed), SeededSource(stream(1, seed, 0)))[0] for seed in range(150)]
    step = learns(TASK, {"moments": sum(said["moments"] for said in crowd)}, 150)
    published, stop = step.effects
    assert isinstance(stop, Stop)
    assert bool(stop.when)
    assert int(published.message.version) == 1
    fresh = samples(999, 2000)
    assert (predictions(gram.plan(TASK), published.message.weights, fresh.x) != fresh.y).mean() < 0.1


def test_cohorts_add_up_and_their_number_costs_its_root_in_noise():
    crowd = [samples(seed) for seed in range(20)]
    each = [says(TASK, batch, Silence())[0]["moments"] for batch in crowd]
    first = learns(TASK, {"moments": sum(each[:10])}, 10)
    second = learns(TASK, {"moments": sum(each[10:])}, 10, first.state)
    whole = learns(TASK, {"moments": sum(each)}, 20)
    assert (second.state.moments == whole.state.moments).all()
    assert (second.state.weights == whole.state.weights).all()
    assert gram.price_of_cohorts(16) == 4.0


def test_a_task_says_what_several_cohorts_and_missing_devices_would_cost():
    first, second = find(TASK).remarks(TASK)
    assert "sqrt(K) times the noise, 2 times for 4 cohorts and 10 times for 100" in first
    assert "140 honest devices of 200 costs 1.20 times" in second
    assert "18 numbers" in second


def test_each_of_several_cohorts_has_all_of_the_noise():
    smaller = TASK.with_(masking=Masking(50, 40, 3))
    one, four = (gram.mechanisms(task)["moments"] for task in (TASK, smaller))
    noise = [row.variance * row.honest / row.clip**4 for row in (one, four)]
    assert float(noise[0] / noise[1]) == pytest.approx(1, rel=1e-3)


@pytest.mark.parametrize("epsilon", ["0.1", "1", "10"])
def test_a_sample_pays_the_epsilon_of_the_task_and_no_more(epsilon):
    task = TASK.with_(privacy=Privacy("skellam", {"moments": Fraction(epsilon)}, 1e-6))
    paid = Price.of(find(task), task).sample_epsilon()
    assert 0.97 * float(epsilon) < paid <= float(epsilon)


def test_a_device_pays_the_epsilon_of_a_task_that_protects_devices():
    task = TASK.with_(privacy=Privacy("skellam", {"moments": Fraction(1)}, 1e-6, unit="device"))
    price, row = Price.of(find(task), task), gram.mechanisms(task)["moments"]
    assert 0.97 < price.device_epsilon() <= 1
    assert price.sample_epsilon() == price.device_epsilon(), "one guarantee, for all of its samples at once"
    assert row.sensitivity.adjacency is Adjacency.REPLACE_DEVICE
    assert float(row.sensitivity.bound) == pytest.approx(10 * math.sqrt(4.5) * row.clip**2, rel=1e-6)


def test_positive_features_need_less_noise():
    positive = TASK.with_(protocol={"positive": True})
    ratio = gram.mechanisms(positive)["moments"].sensitivity.bound / gram.mechanisms(TASK)["moments"].sensitivity.bound
    assert float(ratio) == pytest.approx(2 / math.sqrt(4.5), rel=1e-6)


def test_numbers_as_labels_are_held_to_their_bound():
    text = TEXT.replace('classes = ["a", "b"]', 'kind = "number"\nbound = 50.0')
    task = parse(text)
    rows = label_rows(gram.plan(task), np.array([25.0, -50.0, 51.0, np.nan, np.inf]))
    assert rows[:, 0].tolist() == [0.5, -1.0, 0.0, 0.0, 0.0]
    crowd = [samples(seed) for seed in range(150)]
    truth = np.array([20.0, -10.0, 5.0])
    sums = 0
    for batch in crowd:
        x = batch.x / np.maximum(1, np.linalg.norm(batch.x, axis=1, keepdims=True))
        sums = sums + says(task, Samples(x, x @ truth), Silence())[0]["moments"]
    quiet = replace(gram.plan(task), c=1e-6)
    weights = solve_moments(quiet, sums, 0)
    fresh = samples(7, 100).x / 10
    found = gram.plan(task).map(fresh).astype(np.float64) @ weights[:, 0] * 50
    assert np.abs(found - fresh @ truth).max() < 0.5


def test_a_label_out_of_range_counts_as_none():
    rows = label_rows(gram.plan(TASK), np.array([0, 1, 2, -1]))
    assert rows.tolist() == [[1, 0], [0, 1], [0, 0], [0, 0]]


def test_the_grid_is_written_into_the_published_task_and_chosen_again_by_nobody():
    published = settled(TASK)
    assert published.privacy.grid == gram.mechanisms(TASK)["moments"].grid.step
    assert gram.mechanisms(published) == gram.mechanisms(TASK)
    assert settled(published) == published


def test_the_ring_holds_the_sum_of_the_largest_cohort():
    terms = terms_of(TASK, gram.mechanisms(TASK))
    (field,) = terms.fields
    assert field.tag == "moments"
    assert field.length == 18
    shipped = find_task("gram-mnist")
    assert terms_of(shipped, gram.mechanisms(shipped)).fields[0].bits == 64


def test_a_total_that_no_crowd_could_have_is_beyond_what_is_expected():
    fields = gram.protocol.expected(TASK)["gram/total/1"]
    row = gram.mechanisms(TASK)["moments"]
    assert fields["moments"].high >= 200 * row.bound
    assert fields["moments"].high < 2**40
    assert fields["devices"].low == 150


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kind = "ridge"', 'kind = "softmax"', "model.kind"),
        ('kind = "ridge"', 'kind = "ridge"\nc = 0.0', "model.c"),
        ('kind = "ridge"', 'kind = "ridge"\nl2 = 1.0', "model.l2"),
        ("epsilon = { moments = 1.0 }", "epsilon = { gradient = 1.0 }", "moments"),
        ("epsilon = { moments = 1.0 }", "epsilon = { moments = 1.0 }\nuses = 2", "privacy.uses"),
        ("epsilon = { moments = 1.0 }", "epsilon = { moments = 1.0 }\ngrid = 0.3", "privacy.grid"),
        ("steps = 1", "error = 0.1", "stop.error"),
        ("batch = 10", 'batch = 10\nmap = { kind = "convolution", seed = 1 }', "square pictures"),
        ("batch = 10", 'batch = 10\nmap = { kind = "cosine", seed = 1, features = 4096 }', "at most 4096"),
    ],
)
def test_a_task_that_gram_cannot_run_is_refused_by_its_key(old, new, said):
    with pytest.raises(TaskError, match=said):
        find(parse(TEXT.replace(old, new)))


def test_without_masks_it_is_refused():
    text = TEXT[: TEXT.index("[masking]")].replace('"skellam"', '"discrete-gaussian"')
    with pytest.raises(TaskError, match=r"needs \[masking\]"):
        find(parse(text))


def test_a_compiled_simulation_is_refused_in_words():
    jax = pytest.importorskip("jax")
    with pytest.raises(TaskError, match="are not compiled"):
        jax.jit(lambda x: moment_rows(gram.plan(TASK), Samples(x, np.zeros(10))))(np.zeros((10, 3)))


def test_neighbours_through_a_whole_step_move_what_is_said_by_at_most_the_sensitivity():
    row = gram.mechanisms(TASK)["moments"]
    weights = np.concatenate([np.ones(4), np.full(6, 2.0), np.ones(8)])
    worst = 0.0
    for seed in range(200):
        batch = samples(seed)
        other = Samples(batch.x.copy(), batch.y.copy())
        other.x[3], other.y[3] = -10 * batch.x[3], 1 - batch.y[3] if seed % 2 else batch.y[3]
        moved = says(TASK, batch, Silence())[0]["moments"] - says(TASK, other, Silence())[0]["moments"]
        worst = max(worst, math.sqrt((weights * moved.astype(np.float64) ** 2).sum()))
    assert worst <= float(row.sensitivity.bound)


def test_a_crowd_on_the_seeded_source_has_the_noise_that_was_priced():
    row = gram.mechanisms(TASK)["moments"]
    empty = Samples(np.full((10, 3), np.nan, np.float32), np.full(10, -1, np.int32))
    shares = [says(TASK, empty, SeededSource(stream(1, n, 0)))[0]["moments"] for n in range(400)]
    constant = 10 * int(row.steps(gram.plan(TASK).map(empty.x))[0, 3]) ** 2
    noise = np.stack(shares).astype(np.float64)
    noise[:, 3] -= constant
    assert noise[:, :4].std() == pytest.approx(math.sqrt(row.variance), rel=0.1)
    assert noise[:, 4:10].std() == pytest.approx(math.sqrt(row.variance / 2), rel=0.1)


def test_the_shipped_task_is_priced_as_it_says():
    task = find_task("gram-mnist")
    price = Price.of(find(task), task)
    assert 0.99 < price.sample_epsilon() <= 1
    assert price.sample_epsilon(alone=True) > 20
    assert gram.mechanisms(task)["moments"].length == 513 * 514 // 2 + 513 * 10
