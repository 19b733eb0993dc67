"""Clusters, the labels that proportions give them, and the vote."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crowdml.errors import DataError, UnknownName
from crowdml.models import clusters
from crowdml.models.clusters import (
    SOLVERS,
    Voters,
    assign,
    class_shares,
    fit,
    k_means,
    likeness_of,
    members,
    moments,
    predict,
    search_labels,
    trust,
    verdicts,
)

EDGES = np.array([5, 30, 60, 150])


def series(rng: np.random.Generator, level: float, days: int = 30) -> np.ndarray:
    """Counts of a quarter of an hour with two rush hours a day: made up."""
    hour = np.arange(96) / 4
    day = 0.05 + 0.5 * np.exp(-(((hour - 13) / 4.5) ** 2))
    day += 0.9 * np.exp(-(((hour - 8.3) / 1.3) ** 2)) + 0.8 * np.exp(-(((hour - 17.3) / 1.8) ** 2))
    return rng.poisson(level * day * np.exp(0.15 * rng.normal(size=(days, 1)))).ravel()


def windows_and_labels(values: np.ndarray, batch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = np.lib.stride_tricks.sliding_window_view(values, 6)
    x = x[: len(x) // batch * batch]
    y = np.searchsorted(EDGES, x[:, 5], side="right")
    counts = (y.reshape(-1, batch, 1) == np.arange(5)).sum(axis=1)
    return x[:, :5].astype(np.float64), y, counts


def city(seed: int, batch: int, peers: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A device's windows and labels, and the counts of it and its peers, [1 + peers, h, classes]."""
    rng = np.random.default_rng(seed)
    held = [windows_and_labels(series(rng, level), batch) for level in rng.uniform(60, 140, 1 + peers)]
    return held[0][0], held[0][1], np.array([counts for _, _, counts in held])


def inertia(centres: np.ndarray, x: np.ndarray) -> float:
    return float(((x - centres[assign(centres, x)]) ** 2).sum())


def searched(inside: Any, q: Any, *, restarts: int, seed: int, weights: Any = None) -> np.ndarray:
    """One label a cluster by the search, for one model."""
    weights = np.ones(len(inside)) if weights is None else np.asarray(weights, float)
    return search_labels(*moments(inside, np.asarray(q)[None], weights[None]), restarts, seed)[0]


def shares_of(centres: Any, inside: Any, q: Any, *, batch: int, variance: float, weights: Any = None) -> np.ndarray:
    """The share of each class in each cluster, for one model."""
    weights = np.ones((1, len(inside))) if weights is None else np.asarray(weights, float)[None]
    gram, cross = moments(inside, np.asarray(q)[None], weights)
    noise = np.full(1, variance / batch**2)
    return class_shares(gram, cross, weights.sum(axis=1), noise, batch, likeness_of(centres, inside))[0]


def loss(labels, inside: np.ndarray, q: np.ndarray) -> float:
    share = inside / inside.sum(axis=1, keepdims=True)
    return float(((share @ np.eye(q.shape[1])[list(labels)] - q) ** 2).mean())


# --- clusters ---


@pytest.mark.parametrize("k", [2, 16])
def test_clusters_are_as_tight_as_those_of_scikit_learn(k):
    cluster = pytest.importorskip("sklearn.cluster")
    x, _, _ = city(1, 32)
    theirs = cluster.KMeans(k, n_init=3, random_state=0).fit(x)
    assert inertia(k_means(x, k, seed=1, starts=3), x) <= 1.03 * theirs.inertia_


def test_each_row_goes_to_its_nearest_centre():
    rng = np.random.default_rng(2)
    centres, x = rng.normal(size=(7, 3)) + 1000, rng.normal(size=(500, 3)) + 1000
    far = ((x[:, None] - centres[None]) ** 2).sum(-1)
    assert (assign(centres, x) == far.argmin(axis=1)).all()


def test_centres_are_the_means_of_their_members():
    x, _, _ = city(3, 32)
    centres = k_means(x, 16, seed=5, iterations=200)
    nearest = assign(centres, x)
    np.testing.assert_allclose(centres, [x[nearest == j].mean(axis=0) for j in range(16)], rtol=1e-9)


def test_a_seed_decides_everything_and_more_starts_are_never_worse():
    x, _, _ = city(4, 32)
    assert (k_means(x, 16, seed=1, starts=2) == k_means(x, 16, seed=1, starts=2)).all()
    found = [inertia(k_means(x, 16, seed=1, starts=starts), x) for starts in (1, 2, 4)]
    assert found == sorted(found, reverse=True)
    assert len({inertia(k_means(x, 16, seed=seed), x) for seed in range(8)}) > 1


@pytest.mark.parametrize("x", [np.zeros((1, 5)), np.full((40, 5), 7.0), np.repeat(np.eye(5) * 100, 8, axis=0)])
def test_fewer_distinct_rows_than_clusters_leave_nothing_over(x):
    centres = k_means(x, 8, seed=3)
    assert np.isfinite(centres).all()
    assert inertia(centres, x) == pytest.approx(0, abs=1e-9)
    equal = [np.flatnonzero((centres == centre).all(axis=1))[0] for centre in centres]
    assert set(assign(centres, x).tolist()) <= set(equal)  # the first of equal centres has the members


@given(arrays(np.int64, st.sampled_from([6, 12, 24]), elements=st.integers(0, 4)), st.sampled_from([1, 2, 3, 6]))
def test_members_are_counted_in_their_batch(assignment, batches):
    by_hand = [[int((part == j).sum()) for j in range(5)] for part in np.split(assignment, batches)]
    assert members(assignment, batches, 5).tolist() == by_hand


# --- labels ---


def test_a_search_mostly_ends_where_trying_all_labellings_does_and_never_below_it():
    rng = np.random.default_rng(0)
    k, classes, batches, hits = 6, 3, 12, 0
    every = np.eye(classes)[list(itertools.product(range(classes), repeat=k))]
    for trial in range(60):
        inside = rng.multinomial(20, rng.dirichlet(np.ones(k)), batches)
        q = inside / 20 @ np.eye(classes)[rng.integers(0, classes, k)] + 0.05 * rng.normal(size=(batches, classes))
        best = ((inside / 20 @ every - q) ** 2).mean(axis=(1, 2)).min()
        found = loss(searched(inside, q, restarts=10, seed=trial), inside, q)
        assert found >= best - 1e-12
        hits += found <= best + 1e-9
    assert hits >= 55


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(2, 9))
def test_no_single_change_improves_what_a_search_found(seed, classes, k):
    rng = np.random.default_rng(seed)
    inside = rng.multinomial(16, rng.dirichlet(np.ones(k)), 15)
    q = rng.dirichlet(np.ones(classes), 15)
    found = searched(inside, q, restarts=1, seed=seed)
    reached = loss(found, inside, q)
    for cluster, other in itertools.product(range(k), range(classes)):
        changed = np.where(np.arange(k) == cluster, other, found)
        assert loss(changed, inside, q) >= reached - 1e-9 or inside[:, cluster].sum() == 0


def test_exact_proportions_of_pure_clusters_give_their_labels_back():
    rng = np.random.default_rng(5)
    truth = rng.integers(0, 4, 8)
    inside = np.array([rng.multinomial(32, rng.dirichlet(np.full(8, 0.5))) for _ in range(60)])
    q = inside / 32 @ np.eye(4)[truth]
    assert (searched(inside, q, restarts=20, seed=1) == truth).all()
    apart = 100 * np.eye(8)
    assert (shares_of(apart, inside, q, batch=32, variance=0.0).argmax(axis=1) == truth).all()


def test_batches_without_weight_say_nothing():
    rng = np.random.default_rng(6)
    inside = rng.multinomial(32, rng.dirichlet(np.ones(8)), 40)
    q = rng.dirichlet(np.ones(3), 40)
    heard = np.arange(40) % 3 > 0
    lies = np.where(heard[:, None], q, 1e6)
    few = searched(inside[heard], q[heard], restarts=5, seed=2)
    assert (searched(inside, lies, restarts=5, seed=2, weights=heard) == few).all()
    one = np.zeros((8, 1))  # clusters in one place: how many are in each does not matter for how alike they are
    some = shares_of(one, inside[heard], q[heard], batch=32, variance=5.0)
    np.testing.assert_allclose(shares_of(one, inside, lies, batch=32, variance=5.0, weights=heard), some, atol=1e-6)


def test_a_cluster_that_no_batch_tells_of_has_the_largest_class():
    inside = np.array([[4, 4, 0], [2, 6, 0]])
    q = np.array([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]])
    assert searched(inside, q, restarts=4, seed=1).tolist() == [0, 1, 1]
    apart = np.array([[0.0], [100.0], [-500.0]])
    assert shares_of(apart, inside, q, batch=8, variance=0.0).argmax(axis=1).tolist() == [0, 1, 1]


def test_a_cluster_that_no_batch_tells_of_takes_after_the_nearest():
    inside = np.array([[4, 4, 0], [2, 6, 0], [1, 7, 0]])
    q = inside[:, :2] / 8
    for nearest, label in ((0.0, 0), (100.0, 1)):
        centres = np.array([[0.0], [100.0], [nearest]])
        assert shares_of(centres, inside, q, batch=8, variance=0.0).argmax(axis=1).tolist() == [0, 1, label]


def test_shares_are_shares_and_nearer_to_the_truth_than_what_is_drawn_from_noise_alone():
    x, y, counts = city(7, 32)
    centres = k_means(x, 16, seed=1)
    nearest = assign(centres, x)
    inside = members(nearest, len(counts[0]), 16)
    truth = np.array([(y[nearest == j, None] == np.arange(5)).mean(axis=0) for j in range(16)])
    sizes = np.bincount(nearest, minlength=16) / len(x)
    found = shares_of(centres, inside, counts[0] / 32, batch=32, variance=0.0)
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(axis=1), 1)
    assert sizes @ abs(found - truth).sum(axis=1) < 0.4  # of at most 2
    hidden = shares_of(centres, inside, counts[0] / 32, batch=32, variance=1e9)
    np.testing.assert_allclose(hidden, np.tile(counts[0].sum(axis=0) / len(x), (16, 1)), atol=1e-3)


# --- the vote ---


def test_the_vote_is_that_of_most_models_then_the_own_then_the_smallest_label():
    labels = np.array([
        [0, 3, 3, 1, 0],
        [2, 3, 1, 2, 1],
        [2, 0, 2, 2, 1],
        [1, 0, -1, 4, 0],
    ], np.int32)  # fmt: skip
    assert verdicts(Voters(np.zeros((5, 1)), labels)).tolist() == [2, 3, 3, 2, 0]
    tied = np.array([[0], [3], [3], [1], [1]], np.int32)
    assert verdicts(Voters(np.zeros((1, 1)), tied)).tolist() == [1]
    assert verdicts(Voters(np.zeros((5, 1)), labels[:1])).tolist() == labels[0].tolist()


def test_a_weighted_vote_follows_the_models_that_fit_the_devices_own_labels():
    """Three peers agree, and are wrong here: in cluster 0 the device's labels say so; in cluster 1 it has none."""
    labels = np.array([[0, 0], [1, 1], [1, 1], [1, 1]], np.int32)
    own = np.array([[40, 3], [0, 0]])
    weights = trust(labels, own)
    assert verdicts(Voters(np.zeros((2, 1)), labels)).tolist() == [1, 1]
    assert verdicts(Voters(np.zeros((2, 1)), labels, weights)).tolist() == [0, 1]
    rate = np.sqrt(8 * np.log(4) / 43)
    np.testing.assert_allclose(weights[:, 0], [1] + [np.exp(-37 * rate)] * 3)
    np.testing.assert_allclose(weights[:, 1], 1)


def test_a_peer_that_was_not_heard_has_no_weight_whatever_the_own_labels_are():
    labels = np.array([[1, 1], [-1, -1]], np.int32)
    assert trust(labels, np.array([[0, 9], [9, 0]])).tolist() == [[1, 1], [0, 0]]


def test_own_labels_that_are_unknown_weigh_nothing():
    x, y, counts = city(8, 32)
    there, unknown = np.ones((3, len(counts[0])), bool), np.full(len(x), -1)
    known = {"k": 16, "restarts": 5, "seed": 1, "variance": 0.0}
    plain = fit(x, counts[0], counts[1:], there, **known)
    blind = fit(x, counts[0], counts[1:], there, y=unknown, **known)
    weighed = fit(x, counts[0], counts[1:], there, y=y[: len(x)], **known)
    assert (blind.weights == 1).all()
    assert (predict(blind, x) == predict(plain, x)).all()
    assert (predict(weighed, x) == y[: len(x)]).mean() > (predict(plain, x) == y[: len(x)]).mean()


@pytest.mark.parametrize("solver", SOLVERS)
def test_peers_that_were_not_heard_have_no_vote_and_the_own_model_always_has_one(solver):
    x, _, counts = city(8, 32)
    there = np.ones((3, len(counts[0])), bool)
    there[1] = False
    some = fit(x, counts[0], counts[1:], there, k=16, restarts=5, seed=1, variance=0.0, solver=solver)
    assert (some.labels[2] == -1).all()
    assert (some.labels[[0, 1, 3]] >= 0).all()
    without = fit(x, counts[0], counts[[1, 3]], there[[0, 2]], k=16, restarts=5, seed=1, variance=0.0, solver=solver)
    assert (predict(some, x) == predict(without, x)).all()
    alone = fit(x, counts[0], counts[:0], there[:0], k=16, restarts=5, seed=1, variance=0.0, solver=solver)
    deaf = fit(x, counts[0], counts[1:], there & False, k=16, restarts=5, seed=1, variance=0.0, solver=solver)
    assert (predict(alone, x) == predict(deaf, x)).all()


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_device_learns_from_proportions(solver):
    x, y, counts = city(9, 16)
    heard = np.repeat(counts[:1], 3, axis=0)  # peers that see what it sees
    voters = fit(x, counts[0], heard, np.ones((3, len(counts[0])), bool), k=16, restarts=10, seed=1, variance=0.0,
                 solver=solver)  # fmt: skip
    most = np.bincount(y).max() / len(y)
    assert (predict(voters, x) == y).mean() > most + 0.2


def test_shares_win_over_a_search_at_equal_epsilon():
    """On made-up traffic alone: mean over 6 devices of the labels that were right, by peers' noisy proportions only."""
    right = dict.fromkeys(SOLVERS, 0.0)
    alpha = np.exp(-0.3 / 2)
    variance = 2 * alpha / (1 - alpha) ** 2
    for seed in range(6):
        x, y, counts = city(20 + seed, 32)
        rng = np.random.default_rng(seed)
        noisy = counts[1:] + rng.geometric(1 - alpha, counts[1:].shape) - rng.geometric(1 - alpha, counts[1:].shape)
        for solver in SOLVERS:
            voters = fit(x, counts[0], noisy, np.ones(noisy.shape[:2], bool), k=16, restarts=10, seed=1,
                         variance=variance, solver=solver)  # fmt: skip
            heard = Voters(voters.centres, voters.labels[1:])
            right[solver] += (predict(heard, x) == y).mean() / 6
    assert right["shares"] > right["search"] + 0.02


def test_fitting_is_a_function_of_its_arguments_and_forgives_what_is_not_finite():
    x, _, counts = city(10, 32)
    there = np.ones((3, len(counts[0])), bool)
    x[5, 2], x[700] = np.nan, np.inf
    pair = [fit(x, counts[0], counts[1:], there, k=16, restarts=5, seed=3, variance=1.0) for _ in range(2)]
    assert (pair[0].labels == pair[1].labels).all()
    assert (pair[0].centres == pair[1].centres).all()
    assert np.isfinite(pair[0].centres).all()
    broken = np.where(np.isfinite(x).all(axis=1, keepdims=True), x, 0)
    assert (predict(pair[0], x) == predict(pair[0], broken)).all()


def test_without_a_batch_there_is_nothing_to_learn_from():
    with pytest.raises(DataError, match="no batch yet"):
        fit(np.zeros((0, 5)), np.zeros((0, 3)), np.zeros((2, 0, 3)), np.zeros((2, 0)), k=4, restarts=1, seed=1,
            variance=0.0)  # fmt: skip


def test_an_unknown_solver_is_refused_with_those_that_exist():
    with pytest.raises(UnknownName, match="search, shares"):
        fit(np.zeros((4, 1)), np.full((1, 2), 2), np.zeros((0, 1, 2)), np.zeros((0, 1)), k=1, restarts=1, seed=1,
            variance=0.0, solver="guess")  # pyright: ignore[reportArgumentType]  # fmt: skip


def test_how_many_steps_are_taken_does_not_depend_on_the_windows(monkeypatch: pytest.MonkeyPatch):
    """R3: how long a device learns before its next check-in must not tell of its samples."""
    steps: list[int] = []
    nearest = clusters._nearest

    def counted(points: Any, centres: Any) -> Any:
        steps.append(len(points))
        return nearest(points, centres)

    monkeypatch.setattr(clusters, "_nearest", counted)
    rng = np.random.default_rng(4)
    for x in (rng.normal(size=(300, 5)), np.repeat([[0.0] * 5, [9.0] * 5], 150, axis=0)):  # settles at once
        k_means(x, 4, seed=1, starts=2)
    assert steps == [300] * len(steps)
    assert len(steps) == 2 * 2 * 41


def test_how_many_turns_a_search_takes_does_not_depend_on_the_windows(monkeypatch: pytest.MonkeyPatch):
    """Review 2, privacy finding 12: varied readings took 53 turns and constant ones 2."""
    turns: list[tuple[int, ...]] = []
    take = np.take_along_axis

    def counted(values: Any, *more: Any, **named: Any) -> Any:
        turns.append(values.shape)
        return take(values, *more, **named)

    monkeypatch.setattr(np, "take_along_axis", counted)
    rng = np.random.default_rng(5)
    varied = rng.multinomial(30, rng.dirichlet(np.ones(16)), size=40)
    constant = np.repeat([[30] + [0] * 15], 40, axis=0)
    for inside in (varied, constant):
        searched(inside, rng.dirichlet(np.ones(5), size=40), restarts=3, seed=1)
    assert turns == [(3, 16, 5)] * (2 * clusters.turns(16))


def test_a_search_that_has_ended_stays_where_it_is(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(6)
    for trial in range(20):
        inside = rng.multinomial(20, rng.dirichlet(np.ones(8)), size=30)
        given = rng.normal(size=(30, 4))
        usual = searched(inside, given, restarts=4, seed=trial)
        with monkeypatch.context() as patch:
            patch.setattr(clusters, "turns", lambda k: 40 * k)
            assert (searched(inside, given, restarts=4, seed=trial) == usual).all()
