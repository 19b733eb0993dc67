"""Findings L1 to L11 of the privacy review on the Crowd-ML library of 2017: shown on it, and on `local_updates`.

What each says: docs/papers/hamm2017.md.
"""

import math
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from local_bench import local_task, make_batch, publication, said

from crowdml.arrays import Samples
from crowdml.errors import TaskError
from crowdml.experiments.published.local_updates import (
    GAMMA,
    GAUSSIAN,
    LAPLACE,
    NONE,
    PATH,
    WARNING,
    Published,
    drawn,
    reaches,
    real_cost,
    run,
)
from crowdml.messages import SERVER
from crowdml.models import Logistic, Softmax, make_model
from crowdml.price import Price
from crowdml.privacy.calibration import analytic_sigma, gdp_epsilon, laplace_scale
from crowdml.privacy.grid import COUNTS
from crowdml.privacy.losses import ZCDP, Total
from crowdml.privacy.noise import SystemSource
from crowdml.privacy.sensitivity import L1, L2, Adjacency
from crowdml.protocol import Context, advance
from crowdml.protocols import find
from crowdml.protocols.local_updates import Plan, Rate, Settings, first_count, local_update, plan, stability_of

ROOT = Path(__file__).resolve().parent.parent
NETWORK = 10_285
"""Weights of the paper's 50-75-75-10."""
TEN = Settings(batch=1000, minibatch=100, local_steps=10, rate=Rate(Fraction(1, 10)))


def reach(settings: Settings, l2: float) -> float:
    """H: how far a device moves w for an update of length 1."""
    return float(Plan(settings, Logistic(2), {}, COUNTS, l2, 1.0, False, 1.0).reach(np, 1)[0])


def path(slope, start: float, steps: int, rate: float) -> float:
    """Plain subgradient steps on one weight, (7)."""
    w = start
    for _ in range(steps):
        w -= rate * slope(w)
    return w


# --- the paper's own formulas ---


def gamma_deviation(sensitivity: float, epsilon: float, dimension: int, *, factor: float = 2.0) -> float:
    """rms of a coordinate of (6): radius Gamma(d, factor S / epsilon), uniform direction.

    The paper prints e^(-epsilon |eta| / 2S), a factor of 2; e^(-epsilon |eta| / S) would do (L1).
    """
    return math.sqrt(dimension + 1) * factor * sensitivity / epsilon


def sensitivity_11(l2: float, local_steps: int, rate: float, radius: float = 1.0) -> float:
    """(11), literally: (2 / lambda) S_d eta max|x|. Neither an upper bound (lambda > 1) nor near one (L4)."""
    return 2 / l2 * local_steps * rate * radius


# --- L1, L2: the law of the noise ---


def test_l1_the_printed_density_loses_half_of_epsilon_and_is_twice_as_wide():
    sensitivity, epsilon = 0.2, 1.0

    def log_ratio(scale, at, shift):  # of e^(-|eta| / scale) for two centres `shift` apart
        return abs(np.linalg.norm(at) - np.linalg.norm(at - shift)) / scale

    shift = np.array([sensitivity, 0.0])
    points = np.random.default_rng(1).normal(size=(2000, 2)) * 3
    printed = max(log_ratio(2 * sensitivity / epsilon, at, shift) for at in [*points, 2 * shift])
    sound = max(log_ratio(sensitivity / epsilon, at, shift) for at in [*points, 2 * shift])
    assert printed == pytest.approx(epsilon / 2)
    assert sound == pytest.approx(epsilon)


def test_l1_mean_radius_of_both_forms_is_what_the_review_says_and_the_simulator_draws():
    """d = 510, S = 0.2, epsilon = 1: 204 as published, 102 sound."""
    import jax

    d = 510
    way = np.asarray(jax.vmap(lambda key: drawn(GAMMA, key, (d,)))(jax.random.split(jax.random.PRNGKey(3), 400)))
    for factor, mean in ((2.0, 204.0), (1.0, 102.0)):
        radius = np.linalg.norm(gamma_deviation(0.2, 1.0, d, factor=factor) * way, axis=1)
        assert radius.mean() == pytest.approx(mean, rel=0.01)
    assert laplace_scale(Fraction(1, 5), Fraction(1)) == Fraction(1, 5)  # ours: S / epsilon, no 2


def test_l2_laplace_noise_for_an_l2_sensitivity_is_short_by_root_d():
    """A shift of l2 norm S over all coordinates: its l1 norm is sqrt(d) S, and so is the loss."""
    d, sensitivity, epsilon = 500, 1.0, 1.0
    shift = np.full(d, sensitivity / math.sqrt(d))
    assert np.linalg.norm(shift) == pytest.approx(sensitivity)
    loss = np.abs(shift).sum() / (sensitivity / epsilon)  # at any point beyond the shift in every coordinate
    assert loss == pytest.approx(math.sqrt(d) * epsilon)


def test_l2_the_l2_law_costs_22_a_coordinate_where_gaussian_noise_costs_4():
    assert gamma_deviation(1.0, 1.0, 500, factor=1.0) == pytest.approx(22.4, abs=0.05)
    assert analytic_sigma(1.0, 1e-6) == pytest.approx(4.22, abs=0.005)


def test_l2_ours_takes_laplace_noise_for_an_l1_sensitivity_alone():
    with pytest.raises(TaskError, match="L2"):
        plan(local_task(mechanism="discrete-laplace"))
    steps = "minibatch = 2\nlocal_steps = 3\nrate = { c = 0.5 }\n"
    laplace = plan(local_task(mechanism="discrete-laplace", protocol=steps + "update_clip = 2.0")).table["update"]
    gaussian = plan(local_task()).table["update"]
    assert isinstance(laplace.sensitivity, L1)
    assert isinstance(gaussian.sensitivity, L2)


# --- L3, L4, L5: how far data move what leaves ---


def test_l3_gradients_at_one_w_say_nothing_of_two_paths():
    """A tilt of 1e-4 at any one w; ten steps over a kink end 0.2 apart."""
    tilt = 1e-4
    ends = [path(lambda w, side=side: math.copysign(1.0, w + side * 1e-9) + side * tilt, 0.0, 11, 0.1)
            for side in (-1, 1)]  # fmt: skip
    same_w = 2 * tilt * 11 * 0.1
    assert abs(ends[0] - ends[1]) > 800 * same_w


@pytest.mark.parametrize(("l2", "moved"), [(0.01, 1.991024), (0.1, 1.912358), (1.0, 1.302643), (0.0, 2.0)])
def test_l3_ours_is_twice_the_clip_along_the_whole_path(l2, moved):
    assert 2 * reach(TEN, l2) == pytest.approx(moved, abs=1e-6)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model", ['kind = "softmax"', 'kind = "mlp"\nhidden = [4]\nseed = 5'])
def test_l3_ours_bounds_the_update_of_any_two_devices_in_grid_steps(model, seed):
    steps = "minibatch = 2\nlocal_steps = 3\nrate = { c = 5.0 }\nclip = 0.5"
    task = local_task(model=model, protocol=steps, unit="device")
    row = plan(task).table["update"]
    weights = np.random.default_rng(seed).normal(size=plan(task).model.shape) * 3
    ends = [said(task, make_batch(task, seed=number), publication(weights)).update.value for number in (seed, seed + 9)]
    assert np.linalg.norm(ends[0].astype(float) - ends[1]) <= float(row.sensitivity.bound)
    assert row.sensitivity.adjacency is Adjacency.REPLACE_DEVICE


def test_l4_equation_11_is_100_times_too_much_for_small_lambda():
    assert sensitivity_11(0.01, 10, 0.1) == pytest.approx(200)
    assert 2 * reach(TEN, 0.01) == pytest.approx(1.991, abs=0.001)


def test_l4_equation_11_is_10_times_too_little_for_lambda_10():
    """One step of logistic regression far on the wrong side, slopes of 1 and -1: 2 eta apart, and 0.2 eta claimed."""
    l2, rate, at = 10.0, 0.05, 30.0
    slopes = [float(Logistic(1).gradient_sum(np.array([at]), Samples(np.array([[x]]), np.array([y])))[0])
              for x, y in ((1.0, 0), (-1.0, 1))]  # fmt: skip
    ends = [(1 - rate * l2) * at - rate * slope for slope in (slopes[0], -slopes[1])]
    assert abs(ends[0] - ends[1]) == pytest.approx(2 * rate, rel=1e-6)
    assert sensitivity_11(l2, 1, rate) == pytest.approx(0.2 * rate)
    one = Settings(batch=1, rate=Rate(Fraction(rate)))
    assert 2 * reach(one, l2) >= abs(ends[0] - ends[1]) * (1 - 1e-9)


def test_l5_one_sample_of_10000_moves_w_by_0_2_where_0_0002_is_claimed():
    """N samples of |w|, S_d = 10, eta = 0.1: at the kink one sample's sign decides the first step, and all others
    follow it from then on. An SVM with both labels at the kink does the same.
    """
    count, steps, rate = 10_000, 10, 0.1

    def slope(first):  # sample 0 has the subgradient `first` at 0, the others 0
        return lambda w: float(np.sign(w)) if w else first / count

    moved = abs(path(slope(1), 0.0, steps, rate) - path(slope(-1), 0.0, steps, rate))
    assert moved == pytest.approx(0.19998, abs=1e-8)
    assert steps * rate * 2 / count == pytest.approx(0.0002)


def test_l5_the_same_on_an_svm_with_both_labels_at_the_kink():
    """All samples but one at the margin of their label, at w = (0, 1): that one chooses which label pushes, and all do.

    A tenth, where 0.0002 is claimed: the push also carries w off the kink.
    """
    count, steps, rate = 10_000, 10, 0.1
    svm = make_model("svm", 2, 2)
    x = np.tile([[1.0, 1.0], [1.0, -1.0]], (count // 2, 1))
    y = np.tile([1, 0], count // 2)
    ends = []
    for first in (1.0, -1.0):
        rows = np.vstack([[[first, 0.0]], x[1:]])
        w = np.array([0.0, 1.0])
        for _ in range(steps):
            w = w - rate * svm.gradient_sum(w, Samples(rows, y)) / count
        ends.append(w)
    assert np.linalg.norm(ends[0] - ends[1]) == pytest.approx(0.1, abs=0.001)
    assert svm.smoothness(1.0) is None
    assert stability_of(TEN, svm, 1.0, 0.0) is None  # ours: no claim for a sample ...


def test_l5_ours_charges_a_sample_as_the_device_where_steps_are_not_stable_and_says_so():
    model, labels = 'kind = "svm"', 'classes = ["a", "b"]'
    task = local_task(model=model, labels=labels)
    whole = plan(local_task(model=model, labels=labels, unit="device")).table["update"]
    one = plan(task).table["update"]
    assert one.sensitivity.bound == whole.sensitivity.bound  # ... so it pays as much as all of them
    assert any("L5" in line for line in find(task).remarks(task))


def test_l5_a_clipped_network_may_move_by_1_80_and_a_smooth_convex_loss_by_0_002():
    still = Published(0.1, 1.0, rounds=1, schedule="constant", clip=1.0)
    one = reaches(still, NETWORK)[0]
    assert 2 * (one[0] / 100 + one[1:].sum()) == pytest.approx(1.80, abs=0.005)
    assert stability_of(TEN, Logistic(5), 1.0, 0.0) * reach(TEN, 0.0) == pytest.approx(0.002)


def test_l5_a_sample_pays_for_the_steps_that_follow_its_own():
    """One round of ten steps: the sample of the first one moves nine others, by as much as a device does in them."""
    one = real_cost(Published(0.1, 1.0, rounds=1, schedule="constant", clip=1.0), dimension=9, samples=1000)
    assert one.device == pytest.approx(gdp_epsilon(2.0, 1e-5))
    assert one.sample == pytest.approx(gdp_epsilon(1.802, 1e-5))


@pytest.mark.parametrize("seed", range(5))
def test_l5_ours_holds_for_a_replaced_sample_of_a_smooth_convex_loss(seed):
    """The worst of random neighbours, through all local steps, in exact arithmetic up to floats."""
    model = Softmax(4, 3)
    settings = Settings(batch=20, minibatch=5, local_steps=8, rate=Rate(Fraction(1)))
    bound = stability_of(settings, model, 1.0, 0.1)
    assert bound is not None
    fixed = Plan(settings, model, {}, COUNTS, 0.1, 2.0, True, 1.0)
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(20, 4))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    other = x.copy()
    other[0] = -x[0]
    y, count = rng.integers(0, 3, 20), first_count(fixed, np.int32(0), np.int32(0), 0)
    start = rng.normal(size=(4, 3))
    moved = [local_update(fixed, start, Samples(rows, y), count) for rows in (x, other)]
    assert np.linalg.norm(moved[0] - moved[1]) <= bound


# --- L6, L7: networks ---


class Steep:
    """A model whose gradient is huge in every weight, its sign that of the sample."""

    shape = (NETWORK,)

    def start(self):
        return np.zeros(self.shape, np.float32)

    def gradient_sum(self, weights, batch):
        return batch.x.sum() * 1000 + 0 * weights


def test_l6_a_clamp_bounds_every_element_and_the_l2_norm_grows_with_root_d():
    """Two devices of opposite data: 2 c in every element, 202.8 c in the l2 norm and 20 570 c in the l1 norm."""
    assert make_model("mlp", 50, 10, hidden=(75, 75), seed=1).shape == (NETWORK,)
    settings = Published(1.0, 0.0, NONE, rounds=1, local_steps=1, minibatch=1, schedule="constant", clamp=1.0)
    ends = []
    for side in (1.0, -1.0):
        (course,) = run(settings, Steep(), np.array([[side]], np.float32), np.zeros(1, np.int32), [1])
        ends.append(course.weights[-1].astype(np.float64))
    apart = ends[0] - ends[1]
    assert np.abs(apart).max() == pytest.approx(2.0)
    assert np.linalg.norm(apart) == pytest.approx(202.8, abs=0.05)
    assert np.abs(apart).sum() == pytest.approx(20_570)
    assert 2 * reaches(settings, NETWORK)[0, 0] == pytest.approx(202.8, abs=0.05)


def test_l6_ours_clips_the_length_so_the_number_of_weights_does_not_matter():
    steps = "minibatch = 2\nlocal_steps = 3\nrate = { c = 0.5 }\nclip = 1.0"
    bounds = [
        plan(local_task(model=f'kind = "mlp"\nhidden = [{wide}]\nseed = 1', protocol=steps, unit="device"))
        .table["update"].sensitivity.bound
        for wide in (2, 200)
    ]  # fmt: skip
    assert bounds[0] == bounds[1]


def test_l7_bounded_weights_bound_no_gradient_of_a_relu_network():
    """All weights 1: "the product of weights from the top layer" is 1, and a component is many times that."""
    network = make_model("mlp", 50, 10, hidden=(75, 75), seed=1)
    ones = np.ones(network.shape)
    x = np.full((1, 50), 1 / math.sqrt(50))
    ones = ones + np.linspace(0, 1e-3, len(ones))  # so that the scores differ
    assert np.abs(network.gradients(ones, Samples(x, np.array([0])))).max() > 100
    squared = make_model("mlp", 50, 10, hidden=(75,), seed=1, top="squared")
    far = [np.abs(squared.gradients(scale * np.ones(squared.shape), Samples(x, np.array([0])))).max()
           for scale in (1, 10)]  # fmt: skip
    assert far[1] > 50 * far[0]  # squared error: the top delta has no bound at all


def test_l7_ours_has_no_such_bound_and_clips():
    network = make_model("mlp", 50, 10, hidden=(75, 75), seed=1)
    with pytest.raises(TaskError, match=re.escape("protocol.clip")):
        network.gradient_bound("l2", 1.0)
    x = np.full((1, 50), 1 / math.sqrt(50))
    ones = np.ones(network.shape) + np.linspace(0, 1e-3, network.shape[0])
    assert np.linalg.norm(network.clipped_sum(ones, Samples(x, np.array([0])), 1.0)) <= 1 + 1e-6


# --- L8: releases compose ---


@pytest.mark.parametrize(
    ("c0", "deviation", "by_rounds", "by_path"),
    [(0.1, 10.0, 2.20, 0.70), (0.1, 1.0, 37.6, 9.61), (1.0, 1.0, 1730, 269)],
)
def test_l8_a_thousand_releases_cost_what_the_review_says_if_gradients_had_been_clipped(
    c0, deviation, by_rounds, by_path
):
    for counter, epsilon in (("rounds", by_rounds), (PATH, by_path)):
        settings = Published(c0, deviation, GAUSSIAN, counter=counter, clip=1.0)
        cost = real_cost(settings, dimension=NETWORK, samples=60_000)
        assert cost.device == pytest.approx(epsilon, rel=0.005)
        assert cost.sample < cost.device
    alone = real_cost(Published(c0, deviation, rounds=1, clip=1.0), dimension=NETWORK, samples=60_000)
    assert alone.device < by_rounds / 1.5  # one communication, which is all that the paper counts


def test_l8_without_a_clip_there_is_no_privacy_at_any_noise():
    for noise in (LAPLACE, GAUSSIAN):
        cost = real_cost(Published(0.1, 1e6, noise), dimension=NETWORK, samples=60_000)
        assert (cost.device, cost.sample) == (math.inf, math.inf)
    assert real_cost(Published(10.0, 1e-3, clip=1.0), dimension=NETWORK, samples=60_000).device > 1e6


def test_l8_laplace_noise_of_one_deviation_costs_up_to_twice_the_zcdp_of_gaussian_noise():
    costs = {
        noise: real_cost(Published(0.1, 10.0, noise, clip=1.0), dimension=NETWORK, samples=60_000).device
        for noise in (GAUSSIAN, LAPLACE)
    }
    assert costs[GAUSSIAN] < costs[LAPLACE] < 2 * costs[GAUSSIAN]
    moves = 2 * reaches(Published(0.1, 10.0, clip=1.0), NETWORK).sum(1)
    rho = float(((moves / 10.0) ** 2).sum())  # (Delta / b)^2 / 2 each, b = s.d. / sqrt(2)
    assert costs[LAPLACE] == pytest.approx(Total.of([ZCDP(Fraction(rho))]).epsilon(1e-5))
    one = real_cost(
        Published(1.0, math.sqrt(2), LAPLACE, rounds=1, local_steps=1, schedule="constant", clip=0.01),
        dimension=4,
        samples=1000,
    )
    assert one.device <= 0.02 * 2 * (1 + 1e-9)  # pure: 2 C sqrt(d) / b


def test_l8_adagrad_makes_a_full_step_of_any_gradient_so_equation_10_is_void():
    tiny, c0 = 1e-6, 0.1
    step = c0 * tiny / math.sqrt(tiny**2)
    assert step == pytest.approx(c0)  # 10^5 times eta |g|
    adaptive = 'minibatch = 2\nlocal_steps = 3\nrate = {{ c = 0.5, schedule = "{}" }}'
    for schedule in ("adagrad", "rmsprop"):
        with pytest.raises(TaskError, match="L8"):
            plan(local_task(protocol=adaptive.format(schedule)))
        row = plan(local_task(protocol=adaptive.format(schedule), unit="device")).table["update"]
        clip = plan(local_task(unit="device")).table["update"]
        assert row.sensitivity.bound == clip.sensitivity.bound  # the door clips the update itself


def test_l8_ours_promises_the_total_of_all_check_ins_of_a_device():
    task = local_task(unit="device", epsilon=2.0, samples=60, uses=1)  # ten check-ins of six samples
    price = Price.of(find(task), task)
    assert price.device_epsilon(10) <= 2.0 * (1 + 1e-9) < price.device_epsilon(11)
    assert "per communication" in WARNING


# --- L9: W ---


def small(seed=1, count=60):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 4)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True), rng.integers(0, 3, count).astype(np.int32)


def test_l9_check_ins_that_count_without_being_heard_divide_by_zero():
    settings = Published(0.5, 0.0, NONE, rounds=40, local_steps=1, minibatch=5, server_batch=2, stale=0.5)
    (course,) = run(settings, Softmax(4, 3), *small(), [3], looks=40)
    assert {0, 1, 2} == set(course.heard.tolist())
    first = int(np.flatnonzero(course.heard == 0)[0])
    assert np.isfinite(course.weights[:first]).all()
    assert np.isnan(course.weights[first:]).all()


def test_l9_a_twentieth_of_the_noise_is_not_enough_where_one_weight_was_heard():
    """B_s = 20: noise for 1/20, and where |W| = 1 the only device in the mean has all of the sensitivity."""
    whole = Published(0.1, 10.0, rounds=100, server_batch=20, clip=1.0)
    claimed = real_cost(whole, dimension=10, samples=10**6).device
    short = Published(0.1, 10.0, rounds=100, server_batch=20, clip=1.0, trusted=True)
    assert short.deviations[0] == pytest.approx(whole.deviations[0] / 20)
    assert real_cost(short, dimension=10, samples=10**6).device > 20 * claimed


def test_l9_ours_waits_for_so_many_of_this_round_and_nothing_is_divided_by_zero():
    task = local_task(protocol="minibatch = 2\nlocal_steps = 3\nrate = { c = 0.5 }\nserver_batch = 2")
    protocol = find(task)
    state = protocol.server.start(task, Context(me=SERVER)).state
    heard = []
    for number in range(4):
        old = number == 2  # the round has moved on by then
        current = publication(np.asarray(state.weights), 0 if old else int(state.rounds))
        update = said(task, make_batch(task, seed=number), current)
        state = advance(protocol.server, task, state, update, Context(me=SERVER, sender="d")).state
        heard.append((int(state.rounds), int(state.heard)))
        assert np.isfinite(state.weights).all()
    assert heard == [(0, 1), (1, 0), (1, 0), (1, 1)]


# --- L10: the public code ---


def ios_noise(u, scale):
    """What jihunhamm/Crowd-ML e6d8ed3 computes on iOS: the inverse of Laplace's law with exp for log."""
    return -scale / math.sqrt(2) * np.sign(u) * np.exp(1 - 2 * np.abs(u))


def test_l10_the_ios_sampler_has_bounded_support_and_epsilon_is_infinite():
    u = np.concatenate([np.linspace(-0.5, 0.5, 100_001), np.random.default_rng(1).uniform(-0.5, 0.5, 10_000)])
    size = np.abs(ios_noise(u[u != 0], 1.0))
    assert size.min() == pytest.approx(0.707, abs=1e-3)
    assert size.max() == pytest.approx(1.922, abs=1e-3)
    # Queries 0 and 1, noise of scale 1: what the first one says, the second cannot.
    seen = 0.0 + ios_noise(-0.25, 1.0)
    assert abs(seen - 1.0) < 0.707
    ours = np.abs(SystemSource().discrete_laplace(Fraction(16), like=np.zeros(4000, np.int64)))
    assert ours.max() > 2 * 16  # no bound, and values at the middle
    assert ours.min() == 0


class JavaRandom:
    """java.util.Random: 48 bits of state, of which every word shows 32."""

    A, C, MASK = 0x5DEECE66D, 0xB, (1 << 48) - 1

    def __init__(self, state):
        self.state = state

    def word(self):
        self.state = (self.state * self.A + self.C) & self.MASK
        return self.state >> 16


def test_l10_androids_noise_is_known_to_whoever_sees_two_words_of_it():
    """65,536 guesses of the hidden 16 bits; ours come from the operating system."""
    source = JavaRandom(0x123456789ABC)
    one, two, three = source.word(), source.word(), source.word()
    found = []
    for low in range(1 << 16):
        guess = JavaRandom(one << 16 | low)
        if guess.word() == two:
            found.append(guess.word())
    assert found == [three]
    code = "import crowdml.privacy.noise as noise, inspect; print('urandom' in inspect.getsource(noise))"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "True"


def test_l10_the_average_that_divides_inside_the_loop_forgets_all_but_the_last_sample():
    size, shares = 10, np.zeros(10)
    for i in range(size):
        shares[i] += 1.0
        shares /= size  # inside the loop
    assert shares == pytest.approx([size ** -(size - i) for i in range(size)])
    assert shares[-1] > 0.9 * shares.sum()
    model, (x, y) = Softmax(4, 3), small(count=10)
    weights = np.random.default_rng(2).normal(size=(4, 3))
    ours = model.clipped_sum(weights, Samples(x.astype(float), y), 0.7)
    again = model.clipped_sum(weights, Samples(x[::-1].astype(float), y[::-1]), 0.7)
    assert np.allclose(ours, again)


def test_l10_laplace_scales_of_the_two_platforms_differ_by_root_2_and_ours_has_one():
    scale = 3.0
    android, ios = scale, scale / math.sqrt(2)
    assert android / ios == pytest.approx(math.sqrt(2))
    steps = "minibatch = 2\nlocal_steps = 3\nrate = { c = 0.5 }\nupdate_clip = 2.0"
    row = plan(local_task(mechanism="discrete-laplace", protocol=steps, unit="device")).table["update"]
    assert row.scale == laplace_scale(row.sensitivity.bound, row.epsilon)


# --- L11 ---


def test_l11_no_local_step_would_send_the_weights_back_so_it_is_refused():
    assert path(lambda w: 1.0, 0.5, 0, 0.1) == 0.5
    with pytest.raises(TaskError, match="L11"):
        Published(0.1, 1.0, local_steps=0)
    with pytest.raises(TaskError, match="local_steps"):
        plan(local_task(protocol="minibatch = 2\nlocal_steps = 0\nrate = { c = 0.5 }"))


@pytest.mark.parametrize("finding", range(1, 12))
def test_every_finding_of_the_library_of_2017_has_a_test_of_its_name(finding):
    pattern = re.compile(rf"^def test_l{finding}_", re.MULTILINE | re.IGNORECASE)
    assert any(pattern.search(path.read_text(encoding="utf-8")) for path in sorted(ROOT.rglob("test_*.py")))
