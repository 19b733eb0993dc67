"""Findings Z1 to Z10 of the privacy review on SecProbe, each shown: on what was published, and on the sound form.

What each says: docs/protocols/secprobe.md. Z1 is also a page to run, docs/attacks/trained-layers.md.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import jax
import numpy as np
import pytest

from crowdml.errors import TaskError
from crowdml.messages import KINDS
from crowdml.privacy.mechanisms import Selection
from crowdml.privacy.polynomials import coefficients_move
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1
from crowdml.protocols import find, secprobe
from crowdml.ratings import rate_numbers
from crowdml.robust import Combine, combine_rows
from crowdml.task import Task, parse

TASK = """
name = "probe"
features = {{ dimension = 6, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["a", "b"] }}
model = {{ kind = "ridge" }}
{more}
[protocol]
kind = "secprobe"
batch = 5
combine = {{ rule = "exponential", uploads = 30, keep = 15, rows = 10000, epsilon = 1.0 }}
[privacy]
mechanism = "skellam"
epsilon = {{ moments = 1.0 }}
delta = 1e-6
"""


def make(more: str = "") -> Task:
    return parse(TASK.format(more=more))


def loss(weights: Any, noise: Any, x: Any, y: Any) -> Any:
    """Eq. (12) with noise on the coefficients of W2, summed over a batch."""
    first, last = weights
    h = jax.numpy.clip(x @ first, 0, 1)
    s = h @ last
    clean = ((1 - 2 * y) / 4 * s + s * s / 16).sum()
    return clean + noise[0] @ last + last @ noise[1] @ last


def network(b: int = 40, d: int = 6) -> Any:
    rng = np.random.default_rng(5)
    weights = tuple(rng.normal(size=shape).astype(np.float32) for shape in ((d, b), (b,)))

    def noise(seed: int) -> Any:
        drawn, scale = np.random.default_rng(seed), b / 2 + b * b / 8
        return tuple(drawn.laplace(0, scale, shape).astype(np.float32) for shape in ((b,), (b, b)))

    x = rng.random((8, d), np.float32)
    return weights, noise, x, rng.random(8, np.float32)


# --- Z1, Z2: what noise on the last layer's coefficients does not hide ---


def test_z1_the_gradient_of_the_first_layer_has_no_noise_and_shows_a_sample():
    weights, noise, x, y = network()
    slopes = [jax.grad(loss)(weights, noise(seed), x, y) for seed in (1, 2)]
    first, last = ([np.asarray(each[part]) for each in slopes] for part in (0, 1))
    assert (first[0] == first[1]).all()
    assert not np.allclose(last[0], last[1], rtol=0.5)
    neighbour = x.copy()
    neighbour[3] = 1 - x[3]
    assert not (np.asarray(jax.grad(loss)(weights, noise(1), neighbour, y)[0]) == first[0]).all()
    (alone, _) = jax.grad(loss)(weights, noise(1), x[:1], y[:1])
    found = np.linalg.svd(np.asarray(alone, np.float64))[0][:, 0]
    assert abs(found @ x[0]) / np.linalg.norm(x[0]) == pytest.approx(1, abs=1e-4)


def test_z1_the_sound_form_trains_no_hidden_layer_and_releases_one_thing():
    assert list(secprobe.mechanisms(make())) == ["moments"]
    assert {kind for kind in KINDS if kind.startswith("secprobe/")} == {
        "secprobe/model/1", "secprobe/moments/1", "secprobe/masked/1", "secprobe/total/1",
    }  # fmt: skip
    assert not hasattr(secprobe.Settings(5, Combine("mean", 3)), "hidden")


def test_z2_one_noise_for_two_losses_shows_their_difference_in_the_clear():
    weights, noise, x, y = network()
    kept = noise(1)

    def coefficients(first: Any, batch: Any, labels: Any) -> Any:
        h = np.clip(batch @ first, 0, 1)
        return (1 - 2 * labels) @ h / 4 + kept[0], h.T @ h / 16 + kept[1]

    old, new = (coefficients(each, x, y) for each in (weights[0], weights[0] + 0.1))
    h, later = (np.clip(x @ each, 0, 1) for each in (weights[0], weights[0] + 0.1))
    np.testing.assert_allclose(new[1] - old[1], (later.T @ later - h.T @ h) / 16, atol=1e-4)


# --- Z3: per epoch ---


def epochs(rounds: int, iterations: int, held: int = 8333, batch: int = 128) -> float:
    """How often a sample is read, where 60 participants hold 500,000."""
    return rounds * iterations * batch / held


def test_z3_table_ii_reads_each_sample_in_two_hundred_epochs():
    counted = {each: epochs(rounds, each) for each, rounds in ((20, 443), (100, 152), (1000, 193))}
    assert counted[20] == pytest.approx(136, abs=1)
    assert counted[100] == pytest.approx(233, abs=1)
    assert counted[1000] == pytest.approx(2965, abs=1)
    assert secprobe.plan(make()).mechanism.covers == Rows(0, 5)
    assert make().privacy.uses == 1  # ours: one release, whatever is done with it
    with pytest.raises(TaskError, match=r"privacy\.uses = 3: secprobe takes each sample's moments once"):
        find(parse(TASK.format(more="") + "uses = 3\n"))


def test_z3_the_total_of_so_many_epochs_by_the_best_accountant():
    """Laplace noise at epsilon 1, 233 times: 233 by adding up, 141 by privacy loss distributions."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    once = pld.from_laplace_mechanism(1.0, value_discretization_interval=1e-3)
    assert once.self_compose(233).get_epsilon_for_delta(1e-6) == pytest.approx(141, abs=1)


# --- Z4, Z5: the formulas ---


def test_z4_the_noise_of_lemma_3_leaves_a_loss_without_a_minimum():
    scale = 840 / 1.0
    rng, b = np.random.default_rng(2), 80
    h = rng.random((128, b))
    clean = h.T @ h / 16
    upper = np.triu(rng.laplace(0, scale, (b, b)))
    noisy = clean + (upper + upper.T) / 2
    values = np.linalg.eigvalsh(noisy)
    assert np.linalg.eigvalsh(clean)[-1] < 300
    assert values[0] < -5000
    assert 0.4 < (values < 0).mean() < 0.6


def test_z5_lemma_3_holds_for_units_in_the_unit_interval_and_is_no_sum_over_classes():
    assert Fraction(coefficients_move(1, 80, 1), 16) == 840
    assert 2 * (0.25 * 80 + 80 * 80 / 16) == 840
    assert Fraction(coefficients_move(1, 128, 10), 8) < 42240 == 10 * (128 + 128**2 // 4)


def test_z5_a_polynomial_of_second_order_saturates_through_the_sigmoid():
    """The minimum of (1 - 2y) s / 4 + s^2 / 16 is at s = 4y - 2."""
    for y, said in ((0.0, 0.12), (1.0, 0.88)):
        s = 4 * y - 2
        assert 1 / (1 + math.exp(-s)) == pytest.approx(said, abs=0.005)
        assert 0.5 + s / 4 == y  # how ours reads it


# --- Z6 to Z8: scores and choice ---


def test_z6_eq_6_needs_min():
    y = np.full(3, 0.1)
    said = np.array([0.0, 0.1, 1.0])
    printed = 1 - np.abs((np.maximum(said, 3 * y) - y) / y)
    np.testing.assert_allclose(printed, [-1, -1, -8])
    np.testing.assert_allclose(rate_numbers(said, y, 0.05), [0, 1, -1])


def odds(scores: Any, gamma: float) -> Any:
    weight = np.exp(gamma * (np.asarray(scores) - max(scores)))
    return weight / weight.sum()


def test_z7_a_participants_own_data_moves_a_whole_column_of_scores():
    """Replacing what one participant holds moves its score by up to d steps, and its upload is in the average."""
    row = secprobe_row()
    rows = np.ones((50, 4))
    other = rows.copy()
    other[:, 2] = 0
    assert np.abs(row.scores(rows) - row.scores(other)).max() == 50 > row.sensitivity.bound
    uploads = np.eye(4)
    moved = uploads.copy()
    moved[2] = 7
    by = Combine("mean", 4)
    assert not np.allclose(combine_rows(uploads, by), combine_rows(moved, by))


def secprobe_row(as_published: bool = False) -> Selection:
    task = make("as_published = true" if as_published else "")
    return find(task).server_mechanisms(task)["chosen"]  # type: ignore[return-value]


def test_z8_as_published_the_best_are_chosen_hardly_more_often_than_the_worst():
    """epsilon = 1, K = 15, 10,000 rows: 1.07 times, where one is always right and the other never. Of accuracies 0.95
    and 0.60, half and half, the worse half is chosen in 49.3 % of the draws; with a sensitivity of 1/d never."""
    published, sound = secprobe_row(True), secprobe_row()
    assert published.sensitivity == L1(Fraction(5000))
    assert sound.sensitivity == L1(Fraction(1))
    best, worst = odds([10_000, 0], float(published.gamma))
    assert best / worst == pytest.approx(1.07, abs=0.005)
    scores = [9500] * 15 + [6000] * 15
    shares = Counter[bool]()
    rng = np.random.default_rng(1)
    for _ in range(400):  # peeling by the Gumbel trick, in floats: this is a look at what was published
        keys = float(published.gamma) * np.array(scores) + rng.gumbel(size=30)
        shares.update((np.argsort(-keys)[:15] >= 15).tolist())
    assert shares[True] / 6000 == pytest.approx(0.493, abs=0.02)
    assert odds(scores, float(sound.gamma))[15:].sum() < 1e-40


# --- Z9, Z10: composition, and lies ---


def test_z9_draws_add_up_and_so_do_rounds():
    row = secprobe_row()
    assert row.gamma == Fraction(1, 2 * 15)  # epsilon / K each
    assert row.loss.epsilon * 152 == 152
    assert find(make()).mechanisms(make())["moments"].loss != row.loss  # two guarantees, of two kinds of neighbours


def test_z10_an_average_stands_no_lie_and_task_check_says_so():
    rows = np.zeros((30, 2))
    rows[0] = 1e9
    assert np.linalg.norm(combine_rows(rows, Combine("mean", 30))) > 1e7
    assert np.linalg.norm(combine_rows(rows, Combine("median", 30))) == 0
    by = make().protocol["combine"]
    assert Combine(by["rule"], 30, keep=15, rows=10000, epsilon=Fraction(1)).stands(30) == 0
