"""Rules that look at root rows: the tests of one upload, the groups, and the rules of others, against plain forms."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.channels import Stacked
from crowdml.datasets import load
from crowdml.errors import TaskError
from crowdml.models.ridge import predict, solve
from crowdml.privacy.moments import split
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import secprobe
from crowdml.rooted import (
    REASONS,
    Candidate,
    Distance,
    Root,
    Stratum,
    _best,
    _candidate,
    _joined,
    _whitened,
    choose_group,
    flatten,
    fltrust,
    group,
    largest_of_noise,
    prepare,
    refuse_uploads,
    top,
    views,
    zeno,
)
from crowdml.second_moments import group_uploads, moment_rows
from crowdml.task import parse

FEATURES, CLASSES, SAMPLES, NOISE = 24, 3, 400, 3.0
MIDDLE = FEATURES * (FEATURES + 1) // 2


def samples(count: int, chance: np.random.Generator, only: tuple[int, ...] = (0, 1, 2)) -> tuple[Any, Any]:
    """Features of norm one with a constant, and their classes."""
    y = chance.choice(only, count)
    x = chance.normal(size=(count, FEATURES - 1)) + 3.0 * np.eye(CLASSES, FEATURES - 1)[y]
    x *= math.sqrt(0.99) / np.linalg.norm(x, axis=1, keepdims=True)
    return np.concatenate([x, np.full((count, 1), 0.1)], axis=1), y


def moments(x: Any, y: Any) -> Any:
    return np.concatenate([flatten(x.T @ x), (x.T @ np.eye(CLASSES)[y]).reshape(-1)])


def noise(count: int, chance: np.random.Generator, deviation: float = NOISE) -> Any:
    drawn = deviation * chance.normal(size=(count, MIDDLE + FEATURES * CLASSES))
    drawn[:, FEATURES:MIDDLE] /= math.sqrt(2)
    return drawn


def uploads(count: int, seed: int, *, only: Any = None, lie: Any = lambda x, y: (x, y)) -> Any:
    chance = np.random.default_rng(seed)
    own = [samples(SAMPLES, chance, (0, 1, 2) if only is None else only[i % len(only)]) for i in range(count)]
    return np.stack([moments(*lie(*each)) for each in own]) + noise(count, chance)


def root(rows: int = 90, seed: int = 7) -> Root:
    x, y = samples(rows, np.random.default_rng(seed))
    return Root(x, np.eye(CLASSES)[y], True)


ROOT = root()
HONEST = uploads(12, 1)
TEST = samples(4000, np.random.default_rng(99))


def rolled(x: Any, y: Any) -> Any:
    return x, (y + 1) % CLASSES


def half_rolled(x: Any, y: Any) -> Any:
    return x, np.where(np.arange(len(y)) % 2 == 0, (y + 1) % CLASSES, y)


def slightly_rolled(x: Any, y: Any) -> Any:
    return x, np.where(np.arange(len(y)) % 5 == 0, (y + 1) % CLASSES, y)


def reasons(rows: Any, deviation: float = NOISE) -> list[str]:
    made = prepare(rows, np.full(len(rows), SAMPLES), deviation, ROOT)
    return [REASONS[each] for each in refuse_uploads(made, ROOT)]


def chosen(rows: Any) -> Any:
    return choose_group(rows, np.full(len(rows), SAMPLES), NOISE, ROOT, 0.35)


def error(rows: Any) -> float:
    weights = solve(*split(rows.sum(0), FEATURES, CLASSES), NOISE * math.sqrt(len(rows)))
    return float((predict(weights, TEST[0], CLASSES) != TEST[1]).mean())


# --- one upload ---


def test_honest_uploads_pass_whatever_classes_they_hold():
    for only in (None, [(0, 1), (1, 2), (2, 0)], [(0,), (1,), (2,)]):
        assert set(reasons(uploads(300, 5, only=only))) == {"accepted"}


@pytest.mark.parametrize("factor", [0.0, 0.6, 1.4])
def test_an_upload_with_other_noise_than_its_own_is_left_out(factor: float):
    chance = np.random.default_rng(3)
    clean = np.stack([moments(*samples(SAMPLES, chance)) for _ in range(6)])
    drawn = noise(6, chance, 25.0)
    assert set(reasons(clean + drawn, 25.0)) == {"accepted"}
    assert set(reasons(clean + factor * drawn, 25.0)) <= {"noise", "labels"}
    drawn[:, :MIDDLE] *= factor  # it has its noise where labels are summed, and there alone
    assert set(reasons(clean + drawn, 25.0)) <= {"noise", "labels"}


def test_what_an_upload_adds_up_to_is_public():
    assert set(reasons(-HONEST)) == {"size"}
    assert set(reasons(1.5 * HONEST)) == {"size"}
    shifted = HONEST.copy()
    shifted[:, MIDDLE:] *= 0.5  # labels of half of the samples
    assert set(reasons(shifted)) <= {"labels", "counts"}
    more = HONEST.copy()
    more[:, MIDDLE:].reshape(-1, FEATURES, CLASSES)[:, 3] += 120.0  # and not where features are summed
    assert set(reasons(more)) <= {"labels", "noise"}


def test_labels_add_up_to_what_the_constant_says():
    made = prepare(HONEST, np.full(12, SAMPLES), NOISE, ROOT)
    assert not refuse_uploads(made, ROOT).any()
    apart = HONEST.copy()
    apart[:, MIDDLE:] += np.repeat(np.where(np.arange(FEATURES) % 2, 20.0, -20.0), CLASSES)  # labels of no sample
    assert set(reasons(apart)) == {"labels"}


def test_of_copies_the_first_stays():
    twice = np.concatenate([HONEST[:3], HONEST[:1], HONEST[:1]])
    assert reasons(twice) == ["accepted"] * 3 + ["copy"] * 2


def test_a_number_that_is_not_finite_leaves_its_upload_out_alone():
    broken = HONEST.copy()
    broken[2, 5] = np.nan
    assert reasons(broken) == ["accepted"] * 2 + ["not finite"] + ["accepted"] * 9
    assert chosen(broken).weights.tolist() == [1.0] * 2 + [0.0] + [1.0] * 9


def test_nothing_is_taken_where_nothing_passes():
    found = chosen(-HONEST)
    assert not found.weights.any()
    assert (found.error, found.groups) == (math.inf, 0)


def test_uploads_of_other_sizes_have_other_noise():
    chance = np.random.default_rng(21)
    sizes = np.array([100, 400, 900] * 6)
    rows = np.stack([moments(*samples(size, chance)) for size in sizes])
    rows = rows + noise(18, chance) * np.sqrt(sizes / 100)[:, None] * 5
    found = choose_group(rows, sizes, 5 * NOISE * np.sqrt(sizes / 100), ROOT, 0.35)
    assert found.weights.sum() == 18
    wrong = choose_group(rows, sizes, np.full(18, 10 * NOISE), ROOT, 0.35)
    assert {REASONS[each] for each in wrong.reasons[2::3]} <= {"noise", "labels"}  # they have half as much again


# --- groups ---


def test_without_a_lie_everybody_is_in_the_sum():
    found = chosen(HONEST)
    assert found.weights.tolist() == [1.0] * 12
    assert found.groups == 1
    by_class = chosen(uploads(12, 5, only=[(0, 1), (1, 2), (2, 0)]))
    assert by_class.weights.tolist() == [1.0] * 12


@pytest.mark.parametrize("liars", [4, 18, 108])
@pytest.mark.parametrize("lie", [rolled, half_rolled])
def test_the_honest_group_is_found_among_any_number_of_liars(lie: Any, liars: int):
    both = np.concatenate([HONEST, uploads(liars, 4, lie=lie)])
    found = chosen(both)
    assert found.weights[12:].sum() == 0
    assert found.weights[:12].sum() >= 11
    assert error(both[found.weights > 0]) <= error(HONEST) + 0.02
    left_out = {REASONS[each] for each in found.reasons[12:]}
    assert left_out <= {"another group", "counts", "noise"}


def test_liars_who_split_into_camps_are_left_out_too():
    both = np.concatenate([HONEST, uploads(20, 4, lie=half_rolled),
                           uploads(20, 6, lie=lambda x, y: (x, np.where(y == 0, 1, y)))])  # fmt: skip
    found = chosen(both)
    assert found.weights[12:].sum() == 0
    assert found.weights[:12].sum() >= 11


def test_a_group_that_repeats_the_root_rows_is_left_out():
    chance, few = np.random.default_rng(13), root(30, seed=3)
    one = moments(few.features, few.labels.argmax(1)) * SAMPLES / len(few.features)
    both = np.concatenate([HONEST, one + noise(40, chance)])
    made = prepare(both, np.full(52, SAMPLES), NOISE, few)
    honest, copies = (Distance.of(each, made, few) for each in (np.arange(12), np.arange(12, 52)))
    assert not honest.repeats
    assert copies.repeats
    assert 0.5 < honest.ratio < 2
    alone = choose_group(both[12:], np.full(40, SAMPLES), NOISE, few, 0.35)
    assert {REASONS[each] for each in alone.reasons} == {"root rows"}
    assert not alone.weights.any()
    assert math.isinf(alone.error)


def test_the_result_is_a_sum_of_uploads_and_root_rows_choose_alone():
    both = np.concatenate([HONEST, uploads(18, 4, lie=half_rolled)])
    found = chosen(both)
    assert set(found.weights) <= {0.0, 1.0}
    again = choose_group(both, np.full(30, SAMPLES), NOISE, root(seed=8), 0.35)
    np.testing.assert_array_equal(again.weights, found.weights)  # other root rows, the same sum


def candidate(place: int, error: float, ratio: float, count: float) -> Candidate:
    return Candidate(np.array([place]), error, Distance(ratio, 0.01, False), count)


def test_of_groups_that_root_rows_cannot_tell_apart_the_nearest_wins_and_then_the_larger():
    groups = [candidate(0, 0.05, 2.0, 20.0), candidate(1, 0.06, 2.1, 90.0), candidate(2, 0.03, 4.0, 99.0)]
    assert _best(groups, 240, True) is groups[2]  # 0.03 is less than the others by more than chance, 0.011
    groups[2] = candidate(2, 0.05, 4.0, 99.0)
    assert _best(groups, 240, True) is groups[1]  # as near as the first, and larger
    groups[1] = candidate(1, 0.07, 2.1, 90.0)
    assert _best(groups, 240, True) is groups[0]


def test_groups_that_know_different_classes_are_joined():
    rows = np.concatenate([uploads(4, 1, only=[(0, 1)]), uploads(4, 2, only=[(2,)])])
    made = prepare(rows, np.full(8, SAMPLES), NOISE, ROOT)
    groups = [_candidate(np.arange(4), made, ROOT, 0.35), _candidate(np.arange(4, 8), made, ROOT, 0.35)]
    (both,) = _joined(groups, made, ROOT, 0.35)
    assert both.members.tolist() == list(range(8))
    assert both.error < min(each.error for each in groups)
    wrong = uploads(4, 3, lie=rolled)
    made = prepare(np.concatenate([HONEST[:4], wrong]), np.full(8, SAMPLES), NOISE, ROOT)
    groups = [_candidate(np.arange(4), made, ROOT, 0.35), _candidate(np.arange(4, 8), made, ROOT, 0.35)]
    assert _joined(groups, made, ROOT, 0.35) == []


def test_models_are_tried_on_variations_too_and_on_nothing_else():
    x, y = rolled(*samples(60, np.random.default_rng(8)))
    labels = np.eye(CLASSES)[y]
    more = Root(ROOT.features, ROOT.labels, True, tried=(x, labels))
    weights = solve(*split(HONEST.sum(0), FEATURES, CLASSES), NOISE)
    own = ROOT.error(weights) * len(ROOT.features)
    wrong = float((predict(weights, x, CLASSES) != y).sum())
    assert more.error(weights) == pytest.approx((own + wrong) / (len(ROOT.features) + 60))
    assert more.error(weights) > ROOT.error(weights) + 0.3
    np.testing.assert_array_equal(more.facts[0].gram, ROOT.facts[0].gram)


def test_a_group_of_two_opinions_is_split():
    rows = np.concatenate([HONEST, uploads(12, 4, lie=slightly_rolled)])
    made = prepare(rows, np.full(24, SAMPLES), NOISE, ROOT)
    parts = group(np.arange(24), made.scaled, views(made, ROOT))
    assert len(parts) >= 2
    assert any((part < 12).all() for part in parts)


def test_noise_alone_is_one_group():
    chance = np.random.default_rng(2)
    for rows, columns in ((20, 200), (50, 2000), (20, 5140)):
        sizes = [np.linalg.norm(chance.normal(size=(rows, columns)), 2) ** 2 for _ in range(60)]
        assert max(sizes) < largest_of_noise(rows, columns) < 1.25 * np.mean(sizes)


def test_numbers_are_grouped_as_classes_are():
    chance = np.random.default_rng(8)
    slope = chance.normal(size=FEATURES)

    def upload(sign: float) -> Any:
        x, _ = samples(SAMPLES, chance)
        y = np.clip(sign * 0.3 * (x @ slope), -1, 1)
        drawn = NOISE * chance.normal(size=MIDDLE + FEATURES)
        drawn[FEATURES:MIDDLE] /= math.sqrt(2)
        return np.concatenate([flatten(x.T @ x), x.T @ y]) + drawn

    rows = np.stack([upload(1.0) for _ in range(10)] + [upload(-1.0) for _ in range(15)])
    x, _ = samples(90, chance)
    own = Root(x, np.clip(0.3 * (x @ slope), -1, 1)[:, None], False)
    found = choose_group(rows, np.full(25, SAMPLES), NOISE, own, 0.35)
    assert found.weights[10:].sum() == 0
    assert found.weights[:10].sum() >= 9


def test_with_many_rows_for_each_feature_a_half_bad_upload_is_taken_where_it_helps():
    chance = np.random.default_rng(21)
    slope = chance.normal(size=FEATURES)

    def upload(bad: float) -> Any:
        x, _ = samples(SAMPLES, chance)
        y = np.clip(0.3 * (x @ slope), -1, 1)
        spoiled = chance.random(SAMPLES) < bad
        x[spoiled, : FEATURES - 1] = chance.random((spoiled.sum(), FEATURES - 1)) / math.sqrt(FEATURES)
        drawn = 8 * NOISE * chance.normal(size=MIDDLE + FEATURES)
        drawn[FEATURES:MIDDLE] /= math.sqrt(2)
        return np.concatenate([flatten(x.T @ x), x.T @ y]) + drawn

    rows = np.stack([upload(0.0) for _ in range(10)] + [upload(0.3) for _ in range(30)])
    rows = np.concatenate([rows, SAMPLES * chance.random((6, MIDDLE + FEATURES))])
    x, _ = samples(4000, chance)
    y = np.clip(0.3 * (x @ slope), -1, 1)[:, None]
    found = {count: choose_group(rows, np.full(46, SAMPLES), 8 * NOISE, Root(x[:count], y[:count], False), 0.35)
             for count in (9 * FEATURES, 4000)}  # fmt: skip
    assert found[4000].weights[40:].sum() == 0
    assert "score" not in {REASONS[each] for each in found[9 * FEATURES].reasons}

    def off(weights: Any) -> float:
        solved = solve(*split(rows[weights > 0].sum(0), FEATURES, 1), 8 * NOISE * math.sqrt(weights.sum()), 0.35)
        return float(((x @ solved - y) ** 2).mean())

    assert off(found[4000].weights) <= off(found[9 * FEATURES].weights)


# --- honest crowds in much noise, and many root rows ---

DIGITS = """
name = "noisy-digits"
features = { dimension = 64, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"] }
model = { kind = "ridge" }
[protocol]
kind = "secprobe"
batch = 20
combine = { rule = "grouping", uploads = 60, rows = 200 }
[privacy]
mechanism = "skellam"
epsilon = { moments = EPSILON }
delta = 1e-6
"""


def crowd_of(epsilon: float, seed: int) -> Any:
    """What `group_uploads` says of 60 honest uploads of 20 digits each, with the noise that devices draw."""
    task, data = parse(DIGITS.replace("EPSILON", str(epsilon))), load("digits", normalise="l2")
    fixed = secprobe.plan(task)
    order = np.random.default_rng(seed).permutation(len(data.y_train))
    rows = Samples(data.x_train[order[:200]], data.y_train[order[:200]])
    steps = []
    for number in range(60):
        mine = order[200 + 20 * number : 220 + 20 * number]
        exact = fixed.mechanism.moments(moment_rows(fixed, Samples(data.x_train[mine], data.y_train[mine])))
        steps.append(exact + fixed.mechanism.noise(SeededSource(stream(seed, number, 0)), 1))
    return group_uploads(fixed, Stacked({"moments": np.stack(steps)}, np.ones(60, np.int32)), rows)


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("seed", range(4))
def test_an_honest_crowd_in_much_noise_is_taken_whole(epsilon: float, seed: int):
    assert crowd_of(epsilon, seed).tolist() == [1.0] * 60


def test_what_many_root_rows_tell_is_what_their_pairs_tell():
    x, labels = ROOT.features, ROOT.labels
    found, pairs, same = Stratum.of(x, labels), x @ x.T, labels @ labels.T
    others = len(x) * (len(x) - 1)
    products, squares = pairs * same, pairs**2
    assert found.size == pytest.approx((products.sum() - products.trace()) / others)
    assert found.cross_spread == pytest.approx(products.trace() / len(x) - found.size)
    expected = squares.trace() / len(x) - (squares.sum() - squares.trace()) / others
    assert found.gram_spread == pytest.approx(expected)
    along = products.sum(1) / len(x) / found.size
    assert found.wobble == pytest.approx(along.std(ddof=1) / math.sqrt(len(x)))


@pytest.mark.parametrize("known", [3, 30])
def test_known_directions_are_whitened_whether_they_are_few_or_many(known: int):
    chance = np.random.default_rng(known)
    seen, along = chance.normal(size=(5, 12)), chance.normal(size=(known, 12))
    expected = seen @ np.linalg.inv(np.eye(12) + along.T @ along) @ seen.T
    np.testing.assert_allclose(_whitened(seen, along), expected, atol=1e-9)


def test_ten_thousand_root_rows_make_no_matrix_of_their_pairs():
    own = root(10_000)
    tracemalloc.start()
    found = choose_group(HONEST, np.full(12, SAMPLES), NOISE, own, 0.35)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.weights.sum() == 12
    assert most < 8 * 10_000**2 / 4


def test_whoever_sends_what_one_honest_device_could_a_hundred_times_hides_no_class():
    honest = uploads(12, 2, only=[(0, 1), (1, 2), (2, 0)])
    chance = np.random.default_rng(6)
    alike = moments(*samples(SAMPLES, chance, (0,))) + noise(108, chance)
    both = np.concatenate([honest, alike])
    found = chosen(both)
    assert found.weights[12:].sum() <= 30
    assert error(both[found.weights > 0]) <= error(honest) + 0.02


def test_what_a_rule_cannot_do_is_refused_by_a_sentence():
    with pytest.raises(TaskError, match="uploads without noise"):
        choose_group(HONEST, np.full(12, SAMPLES), 0.0, ROOT, 0.35)
    with pytest.raises(TaskError, match=r"they must be of one task, which has 372\."):
        choose_group(HONEST[:, :50], np.full(12, SAMPLES), NOISE, ROOT, 0.35)
    with pytest.raises(TaskError, match="of class 0 there are 0 root rows"):
        Root(ROOT.features[:4], np.eye(CLASSES)[[1, 1, 2, 2]], True)
    with pytest.raises(TaskError, match="not finite"):
        Root(ROOT.features * np.nan, ROOT.labels, True)
    with pytest.raises(TaskError, match="90 root rows with 3 labels"):
        Root(ROOT.features, ROOT.labels[:3], True)
    with pytest.raises(TaskError, match="keep = 4 of 3 uploads"):
        top(np.ones(3), 4)
    with pytest.raises(TaskError, match="a score is not finite"):
        top(np.array([1.0, np.nan]), 1)
    with pytest.raises(TaskError, match="own update is zero"):
        fltrust(np.ones((3, 2)), np.zeros(2))
    with pytest.raises(TaskError, match=r"rate = 0, rho"):
        zeno(np.ones(2), np.ones(2), rate=0, rho=1, slack=0)


# --- rules of others ---


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_the_best_by_score_count_and_the_first_of_equals(xp: Any):
    scores = xp.asarray(np.array([0.5, 0.9, 0.5, 0.1], np.float32))
    np.testing.assert_allclose(top(scores, 2), [0.5, 0.5, 0, 0])


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_fltrust_is_equal_to_its_plain_form(xp: Any):
    chance = np.random.default_rng(1)
    rows, own = chance.normal(size=(6, 5)).astype(np.float32), chance.normal(size=5).astype(np.float32)
    trust, scaled = [], []
    for row in rows:
        cosine = row @ own / (np.linalg.norm(row) * np.linalg.norm(own))
        trust.append(max(cosine, 0.0))
        scaled.append(row * np.linalg.norm(own) / np.linalg.norm(row))
    expected = sum(t * row for t, row in zip(trust, scaled, strict=True)) / sum(trust)
    found = fltrust(xp.asarray(rows), xp.asarray(own))
    np.testing.assert_allclose(np.asarray(found) @ rows, expected, rtol=1e-4, atol=1e-5)
    huge = fltrust(xp.asarray(rows * np.array([1, 1000, 1, 1, 1, 1], np.float32)[:, None]), xp.asarray(own))
    np.testing.assert_allclose(np.asarray(huge)[[0, 2, 3, 4, 5]], np.asarray(found)[[0, 2, 3, 4, 5]], rtol=1e-4)
    assert np.linalg.norm(np.asarray(huge)[1] * 1000 * rows[1]) <= np.linalg.norm(own) + 1e-4


@pytest.mark.parametrize("xp", [np, jnp], ids=["numpy", "jax"])
def test_zeno_takes_what_goes_the_way_of_the_servers_gradient(xp: Any):
    own = xp.asarray(np.array([3.0, 4.0], np.float32))
    taken, scaled = zeno(xp.asarray(np.array([30.0, 40.0], np.float32)), own, rate=0.1, rho=0.01, slack=0.0)
    assert bool(taken)
    np.testing.assert_allclose(scaled, [3, 4], rtol=1e-5)  # 0.1 * 25 - 0.01 * 25 = 2.25 >= 0
    assert not bool(zeno(-own, own, rate=0.1, rho=0.01, slack=0.0)[0])
    assert not bool(zeno(own, own, rate=0.1, rho=0.11, slack=0.0)[0])  # 2.5 - 2.75 < 0
    assert bool(zeno(own, own, rate=0.1, rho=0.11, slack=3.0)[0])  # and >= -0.3
