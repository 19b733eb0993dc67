"""Findings H1 to H11 of the privacy review on Hamm et al. 2015, each shown on the core.

What each says, and where the sound form differs from the published one: docs/protocols/sgd.md.
"""

import math
from dataclasses import fields
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from audits import FIVE_SIGMA, Stream
from bench import device, samples, sensed, task_text
from ledgers import sample_total

from crowdml.arrays import Samples
from crowdml.buffer import Buffer
from crowdml.errors import BudgetExhausted
from crowdml.features import Pca
from crowdml.price import Price
from crowdml.privacy.losses import Total
from crowdml.privacy.mechanisms import RandomisedResponse
from crowdml.privacy.noise import SystemSource
from crowdml.privacy.private import Rows
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.privacy.sensitivity import Adjacency
from crowdml.protocols import find, sgd
from crowdml.protocols.sgd import Gradient, Params, claimed_epsilon, mechanisms, plan
from crowdml.storage import Budget, Charge, Ledger
from crowdml.task import parse

CLASSES = '["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]'


def published(epsilon, **more):
    """The paper's form: l1 features, Laplace noise, ten classes."""
    values = {"norm": "l1", "mechanism": "discrete-laplace", "classes": CLASSES, "dimension": 50, "batch": 20, **more}
    return parse("as_published = true\n" + task_text(epsilon=epsilon, **values))


def sound(epsilon, **more):
    values = {"norm": "l1", "mechanism": "discrete-laplace", "classes": CLASSES, "dimension": 50, "batch": 20, **more}
    return parse(task_text(epsilon=epsilon, **values))


def said(task, batch, weights, noise=None):
    bench = device(sgd.protocol, task, noise)
    bench.hears(sensed(batch))
    return bench.hears(Params(weights, np.int32(0))).messages[0]


def test_h1_the_gradient_moves_by_four_over_b_and_by_no_more():
    """|g - g'|_1 <= 4 / b for |x|_1 <= 1, uniformly in w; a search attains it."""
    task = sound("{ gradient = 1.0 }", dimension=4, classes='["a", "b", "c"]', batch=5)
    step = float(plan(task).grid.step)
    rng = np.random.default_rng(1)
    company = samples(2, count=4, norm=1)
    found = 0.0
    for size in (0.0, 1.0, 100.0, 1e6):
        weights = (size * rng.normal(size=(4, 3))).astype(np.float32)
        sums = []
        for corner in (1, -1):
            for axis in range(4):
                for label in range(3):
                    x = np.concatenate([corner * np.eye(4, dtype=np.float32)[axis][None], company.x])
                    batch = Samples(x, np.concatenate([[label], company.y]))
                    sums.append(said(task, batch, weights).gradient.value.astype(float).ravel() * step / 5)
        sums = np.asarray(sums)
        found = max(found, np.abs(sums[:, None] - sums[None]).sum(2).max())
    limit = 4 / 5
    rounding = 2 * step / 5  # the clip is rounded up to a grid step
    assert found <= limit + rounding
    assert found >= 0.999 * limit
    row = mechanisms(task)["gradient"]
    assert float(row.sensitivity.bound) * step / 5 == pytest.approx(limit, rel=1e-3)


def test_h2_five_passes_cost_five():
    task = published("{ gradient = 10.0 }")
    quoted = Price.of(find(task), task)
    assert claimed_epsilon(task) == 10
    assert quoted.sample_epsilon(uses=5) == 50
    with Ledger(":memory:") as ledger:
        serials = ledger.take_serials(20)
        for turn in range(5):  # the same samples in each pass
            charges = [charge(task, entry.name, entry.mechanism, serials.start) for entry in quoted.rows]
            ledger.charge(task.hash, charges, [Budget(Fraction(50), 1e-6, 60)], outbox={turn: b"pass"})
        assert sample_total(ledger, serials.start).epsilon(1e-6) == 50
        assert ledger.samples_given() == 20
        with pytest.raises(BudgetExhausted, match=r"costs sample .*ε=10, and ε=0 of 50 is left"):
            ledger.charge(task.hash, charges, [Budget(Fraction(50), 1e-6, 60)], outbox={5: b"pass"})


def label_triggered(labels, batch=1):
    """Section V-B: keep a sample when its label differs from the last one."""
    kept = [now for before, now in pairwise(labels) if now != before]
    return check_ins(kept, batch)


def check_ins(labels, batch):
    buffer, shape = Buffer(batch, 10 * batch), []
    for serial, label in enumerate(labels):
        buffer.add(serial, np.ones(4), label)
        while buffer.ready:
            buffer.take()
            shape.append(serial)
    return shape


def test_h3_sampling_when_the_label_changes_shows_in_the_number_of_check_ins():
    """SSSS gives no sample and SWSS two: neighbours differ with certainty: no epsilon. By clock they agree."""
    still, walked = [0, 0, 0, 0], [0, 1, 0, 0]
    assert (len(label_triggered(still)), len(label_triggered(walked))) == (0, 2)
    assert check_ins(still, 1) == check_ins(walked, 1)
    assert check_ins(still, 2) == check_ins(walked, 2)


def test_h4_the_number_of_samples_does_not_travel():
    """n_s is always b, so it is public; and no field of a check-in says it."""
    assert {entry.name for entry in fields(Gradient)} == {"gradient", "errors", "labels", "version"}
    task = sound("{ gradient = 1.0, errors = 1.0, labels = 1.0 }", dimension=4, classes='["a", "b", "c"]', batch=5)
    buffer = Buffer(5, 50)
    for serial in range(33):  # many more wait than a batch takes
        buffer.add(serial, np.full(4, 0.2), 0)
    serials, batch = buffer.take()
    assert len(serials) == 5
    assert batch.part == Rows(0, 5)
    sizes = set()
    for seed in (1, 2):
        bench = device(sgd.protocol, task, SystemSource(Stream(f"h4 {seed}")))
        bench.hears(sensed(samples(seed, norm=1)))
        (envelope,) = bench.hears(Params(np.zeros((4, 3), np.float32), np.int32(0))).envelopes
        sizes.add(len(envelope.body))
    assert len(sizes) == 1


def test_h5_counts_cost_half_of_what_the_paper_charges_and_all_labels_together_cost_one():
    """Total epsilon_g + epsilon_e / 2 + epsilon_y, not epsilon_g + epsilon_e + C epsilon_y."""
    task = published("{ gradient = 1.0, errors = 0.2, labels = 0.3 }")
    assert claimed_epsilon(task) == pytest.approx(1 + 0.2 + 10 * 0.3)
    assert Price.of(find(task), task).sample_epsilon() == pytest.approx(1 + 0.1 + 0.3, abs=1e-12)
    ours = sound("{ gradient = 1.0, errors = 0.2, labels = 0.3 }")
    assert mechanisms(ours)["errors"].scale * 2 == mechanisms(task)["errors"].scale
    assert mechanisms(ours)["labels"].scale == mechanisms(task)["labels"].scale
    assert Price.of(find(ours), ours).sample_epsilon() == pytest.approx(1.5)
    split = sound("{ gradient = 1.0, errors = 0.2, labels = 0.3 }", held_out=5)
    assert Price.of(find(split), split).sample_epsilon() == pytest.approx(1.3)


def test_h6_the_energy_of_the_noise_has_the_factor_c_that_eq_13_leaves_out():
    """E|z|^2 = 32 D C / (b epsilon)^2, measured on the mechanism."""
    epsilon, b, d, c = 1.0, 20, 50, 10
    task = sound(f"{{ gradient = {epsilon} }}")
    row, step = mechanisms(task)["gradient"], float(plan(task).grid.step)
    energy = []
    for turn in range(100):
        noise = row.draw(np.zeros((b, d, c), np.float32), SeededSource(stream(1, 2, turn))).astype(float) * step / b
        energy.append((noise**2).sum())
    predicted = 32 * d * c / (b * epsilon) ** 2
    spread = math.sqrt(5 / (100 * d * c))  # the square of a Laplace variable has variance 5 of its mean squared
    assert abs(np.mean(energy) / predicted - 1) < FIVE_SIGMA * spread + 2e-3
    assert np.mean(energy) > 9 * predicted / c  # eq. (13) predicts a tenth


def test_h7_randomised_response_keeps_more_labels_than_the_paper_s_baseline():
    """epsilon_y = 5, ten classes: (16) keeps a label with probability 0.575, k-ary randomised response with 0.943."""
    fair = RandomisedResponse(10, Fraction(5), Rows(0, 1), "a label")
    assert float(fair.keep) == pytest.approx(0.943, abs=5e-4)
    halved = RandomisedResponse(10, Fraction(5, 2), Rows(0, 1), "a label")  # what the exponent epsilon / 2 keeps
    assert float(halved.keep) == pytest.approx(0.575, abs=5e-4)
    labels = np.arange(100_000) % 10
    kept = fair.draw(labels, SystemSource(Stream("h7"))) == labels
    assert abs(kept.mean() - 0.9428) < FIVE_SIGMA * math.sqrt(0.9428 * 0.0572 / 1e5) + 5e-5


def test_h8_a_device_of_sixty_samples_pays_sixty_times():
    task = published("{ gradient = 10.0 }")
    quoted = Price.of(find(task), task)
    assert quoted.sample_epsilon() == 10
    assert quoted.device_epsilon(check_ins=3) == 600  # three check-ins of 20 samples
    with Ledger(":memory:") as ledger:
        for turn in range(3):
            serials = ledger.take_serials(20)
            charges = [charge(task, entry.name, entry.mechanism, serials.start) for entry in quoted.rows]
            ledger.charge(task.hash, charges, [Budget(Fraction(10), 1e-6, 60)], outbox={turn: b"check-in"})
        dearest = ledger.dearest_sample(1e-6)
        assert dearest is not None
        assert dearest[1].epsilon(1e-6) == 10
        assert ledger.device_total().epsilon(1e-6) == 600


NOON = "2025-01-31T12:00:00+00:00"


def charge(task, row, mechanism, first):
    """A passage bound to the serials of its batch."""
    part = mechanism.covers
    return Charge(
        task.hash, row, mechanism.loss, mechanism.device_loss, mechanism.observer, Adjacency.REPLACE_SAMPLE,
        first + part.start, first + part.stop - 1, NOON,
    )  # fmt: skip


def check_in(task, noise):
    bench = device(sgd.protocol, task, noise)
    bench.hears(sensed(samples(1, norm=1)))
    answer = bench.hears(Params(np.zeros((4, 3), np.float32), np.int32(0)))
    return answer.envelopes[0].body, answer.passages


def test_h9_a_retry_sends_the_same_bytes_for_free_and_new_noise_is_a_second_charge():
    task = sound("{ gradient = 1.0 }", dimension=4, classes='["a", "b", "c"]', batch=5)
    entropy = Stream("h9")
    with Ledger(":memory:") as ledger:
        first = ledger.take_serials(5).start
        body, passages = check_in(task, SystemSource(entropy))
        charges = [charge(task, passage.row, passage.mechanism, first) for passage in passages]
        budget = Budget(Fraction(2), 1e-6, 100)
        ledger.charge(task.hash, charges, [budget], outbox={0: body})
        for _ in range(5):  # the network fails again and again
            assert [out.body for out in ledger.resend(task.hash)] == [body]
        assert sample_total(ledger, first).epsilon(1e-6) == 1
        fresh, passages = check_in(task, SystemSource(entropy))
        assert fresh != body
        charges = [charge(task, passage.row, passage.mechanism, first) for passage in passages]
        ledger.charge(task.hash, charges, [budget], outbox={1: fresh})
        assert sample_total(ledger, first) == Total.of([passages[0].mechanism.loss]).scaled(2)
        assert sample_total(ledger, first).epsilon(1e-6) == 2
        with pytest.raises(BudgetExhausted, match=r"ε=1, and ε=0 of 2 is left"):
            ledger.charge(task.hash, charges, [budget], outbox={2: b"again"})


@pytest.mark.parametrize("mechanism", ["discrete-gaussian", "discrete-laplace"])
@pytest.mark.parametrize("weight", [1000.0, 1e20, 1e38, np.inf, np.nan])
def test_h10_huge_weights_make_no_nan_that_tells_which_samples_are_large(mechanism, weight):
    """The softmax of Table I overflows at a weight of 1000: nan would pass through the noise and mark the sample."""
    norm = "l1" if mechanism == "discrete-laplace" else "l2"
    task = parse(task_text(norm=norm, mechanism=mechanism))
    weights = np.zeros((4, 3), np.float32)
    weights[0, 1] = weight
    batch = samples(1, norm=1 if norm == "l1" else 2)
    for x in (batch.x, batch.x * np.float32(1e30), np.full_like(batch.x, np.nan), np.full_like(batch.x, np.inf)):
        heard = said(task, Samples(x, batch.y), weights, SystemSource(Stream("h10")))
        for name in ("gradient", "errors", "labels"):
            value = getattr(heard, name).value
            assert value.dtype == np.int32
            assert value.shape == {"gradient": (4, 3), "errors": (1,), "labels": (3,)}[name]
            assert np.abs(value.astype(np.int64)).max() < 2**20


def test_h11_principal_components_of_public_rows_do_not_move_when_training_rows_do():
    """R4: fitted on the public rows alone; fitted on everything, as the paper does, one sample moves them."""
    rng = np.random.default_rng(0)
    public, private = rng.normal(size=(200, 12)), rng.normal(size=(300, 12))
    changed = private.copy()
    changed[0] = 40.0
    ours = [Pca.fit(public, 5) for _ in (private, changed)]
    np.testing.assert_array_equal(ours[0].components, ours[1].components)
    np.testing.assert_array_equal(ours[0].mean, ours[1].mean)
    kept = ours[0].transform(private)
    np.testing.assert_array_equal(kept[1:], ours[1].transform(changed)[1:])  # another sample's features are its own
    theirs = [Pca.fit(np.concatenate([public, rows]), 5).transform(private[1:]) for rows in (private, changed)]
    assert np.abs(theirs[0] - theirs[1]).max() > 0.1
