"""A city of peers in the simulator: what is said, what is heard, what each device makes of it."""

from __future__ import annotations

import numpy as np
import pytest
from proportions_task import histogram, street

from crowdml.errors import ProtocolError, TaskError
from crowdml.models.clusters import predict
from crowdml.protocol import Step, Wake
from crowdml.protocols import proportions
from crowdml.sim import cities


def readings(places: int, days: int = 12, seed: int = 1) -> np.ndarray:
    """Counts that rise and fall once a day, and a little with the week: [places, 24 days]."""
    rng = np.random.default_rng(seed)
    hour = np.arange(24 * days)
    level = 35 + 30 * np.sin(hour * np.pi / 12) + 10 * np.sin(hour * np.pi / 84)
    return np.maximum(rng.normal(level * rng.uniform(0.8, 1.2, (places, 1)), 4), 0)


TASK = street(5, peers=2, epsilon=2.0)
CITY = cities.simulate(TASK, readings(5), seed=3)


def test_everybody_gives_every_full_batch_and_hears_the_same_batches_of_its_nearest():
    given = (24 * 12 - 3) // 8
    assert CITY.check_ins.tolist() == [given] * 5
    from_place: dict[int, list[list[list[int]]]] = {}
    for state, nearest in zip(CITY.states, proportions.near(TASK, 2).tolist(), strict=True):
        for peer, other in enumerate(nearest):
            assert sorted(state.batches[peer].tolist()) == list(range(given - 6, given))  # the ring has room for six
            from_place.setdefault(other, []).append(state.counts[peer].tolist())
    assert max(map(len, from_place.values())) > 1
    assert all(each == said[0] for said in from_place.values() for each in said)  # review, P4: the same to everybody
    assert int(CITY.server.batches) == CITY.check_ins.sum()


def test_without_noise_a_device_hears_its_peers_exact_counts():
    city = cities.exchange(TASK, readings(5), seed=3, noise=False)
    nearest = int(proportions.near(TASK, 2)[0, 0])
    number = int(city.check_ins[0]) - 1
    y = city.kept[nearest].y[-1]
    assert city.states[0].counts[0, number % 6].tolist() == np.bincount(y, minlength=3).tolist()
    assert city.server.counts.sum() == city.check_ins.sum() * 8


def test_timers_of_a_server_and_answers_to_letters_are_refused_and_not_lost(monkeypatch: pytest.MonkeyPatch):
    server, device = proportions.protocol.server.on, proportions.protocol.device.on
    hears, reads = server[proportions.Proportions], device[proportions.Proportions]
    waits = lambda *told: Step(hears(*told).state, (Wake(1.0, "later"),))  # noqa: E731
    monkeypatch.setitem(server, proportions.Proportions, waits)
    with pytest.raises(ProtocolError, match="asks to be woken after 1 s, and simulated cohorts and peers keep step"):
        cities.exchange(TASK, readings(5), seed=3)
    monkeypatch.setitem(server, proportions.Proportions, hears)
    answers = lambda *told: Step(reads(*told).state, (Wake(1.0, "later"),))  # noqa: E731
    monkeypatch.setitem(device, proportions.Proportions, answers)
    with pytest.raises(ProtocolError, match="answers a peer's letter with Wake"):
        cities.exchange(TASK, readings(5), seed=3)


def test_what_is_sent_has_one_size_whatever_the_labels_are():
    quiet = cities.exchange(TASK, np.zeros((5, 24 * 12)), seed=9)
    assert quiet.said.tolist() == CITY.said.tolist()
    assert quiet.heard.tolist() == CITY.heard.tolist()
    assert 150 < quiet.said[0] / quiet.check_ins[0] < 600


def test_a_seed_decides_everything_however_many_processes_work():
    again = cities.learn(TASK, CITY.states, CITY.kept, seed=3, workers=2)
    for one, two in zip(CITY.voters, again, strict=True):
        assert (one.labels == two.labels).all()
        assert (one.centres == two.centres).all()
    other = cities.exchange(TASK, readings(5), seed=4)
    assert (other.server.counts != CITY.server.counts).any()


def test_devices_predict_better_than_the_commonest_label():
    task = street(5, peers=2, epsilon=8.0)
    task = task.with_(protocol={**task.protocol, "memory": 128}, model={"kind": "clusters", "k": 12, "restarts": 3})
    city = cities.simulate(task, readings(5, days=30), seed=1)
    later = readings(5, days=30, seed=2)
    _, y = cities.samples(task, later.ravel())
    assert cities.right(task, city.voters, later).mean() > np.bincount(y).max() / len(y) + 0.1


def test_who_is_gone_neither_says_nor_hears_and_the_others_go_on():
    city = cities.simulate(TASK, readings(5), seed=3, leaving={2: 10, 4: 0})
    assert city.check_ins.tolist() == [35, 35, 10, 35, 0]
    assert city.heard[4] == city.said[4] == 0
    assert city.states[2].batches.max() < 10
    nearest = proportions.near(TASK, 2).tolist()
    for place in (0, 1, 3):
        gone = [peer for peer, other in enumerate(nearest[place]) if other in (2, 4)]
        assert gone or place == 0
        assert (city.voters[place].labels[1:][gone] == -1).all()  # what it said of its last batches is too old
        assert (predict(city.voters[place], city.kept[place].x[-1]) >= 0).all()
    assert city.voters[4] is None  # it has learned nothing
    assert np.isnan(cities.right(TASK, city.voters, readings(5))).tolist() == [False] * 4 + [True]


def test_a_city_needs_peers_and_readings_of_every_place():
    with pytest.raises(TaskError, match="no peers"):
        cities.exchange(histogram(), readings(5), seed=1)
    with pytest.raises(TaskError, match="readings of 4"):
        cities.exchange(TASK, readings(4), seed=1)


def test_a_task_says_how_clusters_get_labels():
    search = TASK.with_(model={**TASK.model, "solver": "search"})
    voters = cities.learn(search, CITY.states, CITY.kept, seed=3)
    assert any((one.labels != two.labels).any() for one, two in zip(voters, CITY.voters, strict=True))
    with pytest.raises(TaskError, match="shares, search"):
        cities.exchange(TASK.with_(model={**TASK.model, "solver": "guess"}), readings(5), seed=1)


def test_weighing_votes_by_own_labels_changes_nothing_that_a_device_says():
    """P6: own labels and the weights that come of them stay where they are."""
    weighted = TASK.with_(protocol={**TASK.protocol, "vote": "weighted"})
    city = cities.simulate(weighted, readings(5), seed=3)
    assert (city.server.counts == CITY.server.counts).all()
    assert city.said.tolist() == CITY.said.tolist()
    for one, other in zip(city.voters, CITY.voters, strict=True):
        assert (one.labels == other.labels).all()
        assert other.weights is None
        assert one.weights is not None
        assert one.weights.shape == one.labels.shape
    with pytest.raises(TaskError, match=r"protocol\.vote = 'loudest'"):
        proportions.plan(TASK.with_(protocol={**TASK.protocol, "vote": "loudest"}))
