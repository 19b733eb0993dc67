"""The graph: regular, symmetric, drawn by all; k and t against exact probabilities; and what a cut would take."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from bench import masked_text
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_crowd import Crowd, terms
from scipy import stats

from crowdml.errors import TaskError
from crowdml.secagg import device
from crowdml.secagg.graph import GRINDING, circle, neighbours_on, plan, tail
from crowdml.secagg.terms import RingField
from crowdml.server.hub import check_hosted
from crowdml.task import parse


def exact_tail(total: int, marked: int, drawn: int, least: int) -> Fraction:
    hits = range(max(least, 0), min(marked, drawn) + 1)
    return Fraction(sum(comb(marked, hit) * comb(total - marked, drawn - hit) for hit in hits), comb(total, drawn))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_tails_are_those_of_the_hypergeometric_law(data: st.DataObject):
    total = data.draw(st.integers(1, 200))
    marked, drawn = data.draw(st.integers(0, total)), data.draw(st.integers(0, total))
    least = data.draw(st.integers(0, drawn + 1))
    found = tail(total, marked, drawn, least)
    assert found == exact_tail(total, marked, drawn, least)
    assert float(found) == pytest.approx(stats.hypergeom(total, marked, drawn).sf(least - 1), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("devices", "colluders", "survivors"), [(300, 15, 240), (1000, 50, 800), (1000, 100, 700), (2000, 40, 1800)]
)
def test_k_and_t_hold_what_they_state_by_exact_probabilities(devices: int, colluders: int, survivors: int):
    found = plan(devices, colluders, survivors)
    assert found is not None
    assert not found.complete
    k, t = found.neighbours, found.threshold
    too_many = 2 * t - (k + 1)  # colluders around one device with which 2t > k + 1 + c fails
    one_side = t - k // 2  # on one side, with which t > k/2 + c fails
    insecure = exact_tail(devices - 1, colluders, k, too_many) + 2 * exact_tail(
        devices - 1, colluders, k // 2, one_side
    )
    assert devices * insecure <= Fraction(1, 2 ** (40 + GRINDING))
    failing = exact_tail(devices - 1, devices - survivors, k, k - t + 1)
    assert devices * failing <= Fraction(1, 2**30)
    assert 2 * found.quorum > devices + colluders


def test_fewer_neighbours_would_not_do():
    found = plan(1000, 50, 800)
    assert found is not None
    for k in range(found.neighbours - 40, found.neighbours, 2):
        fits = [
            t
            for t in range(k // 2 + 1, k + 1)
            if tail(999, 200, k, k - t + 1) <= Fraction(1, 1000 * 2**30)
            and tail(999, 50, k, 2 * t - (k + 1)) <= Fraction(1, 1000 * 2 ** (41 + GRINDING))
            and tail(999, 50, k // 2, t - k // 2) <= Fraction(1, 1000 * 2 ** (42 + GRINDING))
        ]
        assert not fits


@pytest.mark.parametrize(
    ("devices", "colluders", "survivors", "threshold"),
    [(100, 0, 70, 51), (100, 10, 70, 56), (100, 37, 70, 69), (8, 1, 6, 5), (3, 0, 3, 2)],
)
def test_the_threshold_of_a_complete_graph_is_the_least_with_2t_above_n_plus_colluders(
    devices: int, colluders: int, survivors: int, threshold: int
):
    found = plan(devices, colluders, survivors)
    assert found is not None
    assert found.complete
    assert (found.threshold, found.quorum, found.neighbours) == (threshold, threshold, devices - 1)
    assert 2 * threshold > devices + colluders >= 2 * (threshold - 1)


@pytest.mark.parametrize(("devices", "colluders", "survivors"), [(100, 40, 70), (8, 1, 5), (8, 6, 8), (10, 0, 11)])
def test_a_cohort_without_a_safe_threshold_has_no_plan(devices: int, colluders: int, survivors: int):
    assert plan(devices, colluders, survivors) is None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(3, 60), st.data())
def test_terms_that_hold_for_the_smallest_cohort_hold_for_every_larger_one(smallest: int, data: st.DataObject):
    survivors = data.draw(st.integers(2, smallest))
    colluders = data.draw(st.integers(0, survivors - 2))
    try:
        found = terms(smallest, 4 * smallest, survivors, colluders)
    except TaskError:
        return
    size = data.draw(st.integers(smallest, 4 * smallest))
    here = found.plan(size)
    assert 2 * here.quorum > size + colluders * size // smallest
    assert not here.complete or here.threshold == here.quorum
    assert here.quorum < here.survivors
    assert here.survivors - colluders * size // smallest >= found.honest


def test_terms_that_cannot_hold_are_refused_when_they_are_made():
    with pytest.raises(TaskError, match="2t >"):
        terms(100, survivors=60, colluders=30)
    with pytest.raises(TaskError, match="leave 1 honest"):
        terms(8, survivors=6, colluders=5)
    with pytest.raises(TaskError, match="coarser grid"):
        terms(fields=(RingField("v", 3, 32, 2**28, 0),))
    with pytest.raises(TaskError, match="each its own"):
        terms(fields=(RingField("v", 3, 32, 1, 0), RingField("v", 3, 32, 1, 0)))
    with pytest.raises(TaskError, match="3 to"):
        terms(2, survivors=2, colluders=0)
    with pytest.raises(TaskError, match="entries"):
        terms(fields=(RingField("v", 0, 32, 1, 0),))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(5, 60), st.integers(1, 20), st.binary(min_size=32, max_size=32))
def test_the_graph_is_regular_symmetric_and_without_loops(devices: int, half: int, seed: bytes):
    k = min(2 * half, devices - 1)
    found = neighbours_on(circle([str(one) for one in range(devices)], seed), k)
    assert found.shape == (devices, k)
    edges = {(one, int(other)) for one in range(devices) for other in found[one]}
    assert len(edges) == devices * k
    assert all((other, one) in edges and one != other for one, other in edges)
    assert (np.diff(found, axis=1) > 0).all()


def components(found: np.ndarray, alive: np.ndarray) -> int:
    left, count = set(np.flatnonzero(alive).tolist()), 0
    while left:
        count, waiting = count + 1, [left.pop()]
        while waiting:
            near = set(found[waiting.pop()].tolist()) & left
            left -= near
            waiting += near
    return count


@pytest.mark.parametrize("trial", range(40))
def test_whoever_is_called_missing_the_honest_survivors_are_connected_or_a_self_mask_stays(trial: int):
    """The server names the missing after it has seen the circle: runs of neighbours, the cheapest way to cut it."""
    n, colluders = 120, 6
    made = plan(n, colluders, 100, complete=0)
    assert made is not None
    assert not made.complete
    rng = np.random.default_rng(trial)
    order = circle([str(one) for one in range(n)], trial.to_bytes(4, "big"))
    found = neighbours_on(order, made.neighbours)
    bad = np.zeros(n, bool)
    bad[rng.choice(n, colluders, replace=False)] = True
    missing = np.zeros(n, bool)
    run = made.neighbours // 2 + int(rng.integers(-3, 3))
    for start in rng.integers(0, n, 2):
        missing[order[(start + np.arange(run)) % n]] = True
    honest = ~bad & ~missing
    shares = (honest | bad)[found].sum(1)  # of each device's seed that the server can get
    rebuilt = shares[honest] >= made.threshold
    assert components(found, honest) == 1 or not rebuilt.all()


def test_sparse_graphs_of_honest_survivors_stay_connected_under_chance():
    made = plan(1000, 50, 800)
    assert made is not None
    for trial in range(3):
        found = neighbours_on(circle([str(one) for one in range(1000)], bytes([trial])), made.neighbours)
        alive = np.zeros(1000, bool)
        alive[np.random.default_rng(trial).choice(1000, 750, replace=False)] = True
        assert components(found, alive) == 1


def test_every_advert_moves_the_order_of_the_circle():
    crowd = Crowd(terms(48, survivors=44, complete=0), 48)
    crowd.go_to("share")
    other = Crowd(terms(48, survivors=44, complete=0), 48)
    other.advertise()
    last = other.ids[-1]
    other.devices[last] = device.advertise(other.terms, 1, other.keys[last], after=0)
    other.deliver()
    other.close()
    assert crowd.roster.ids == other.roster.ids
    assert (crowd.roster.neighbours != other.roster.neighbours).mean() > 0.5


def test_no_server_hosts_a_cohort_that_is_only_simulated():
    task = parse(masked_text(cohort=65_537, minimum=65_537))
    with pytest.raises(TaskError, match="3 to 65,536 devices"):
        check_hosted(task)
