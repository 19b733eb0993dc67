"""What benchmarks say, at sizes that take seconds. How fast anything is, is not asserted here."""

import os
import sys
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from crowdml import bench
from crowdml.arrays import Samples
from crowdml.bench import gpu, hand_written, noise, peers, proportions, rounds, scale, sim
from crowdml.bench.timing import Rate, bound, ratio
from crowdml.datasets.populations import Population, iid
from crowdml.errors import UnknownName
from crowdml.models import make_model
from crowdml.models.softmax import Softmax
from crowdml.privacy.grid import Grid
from crowdml.privacy.laws import DiscreteLaplace
from crowdml.sim import compiled
from crowdml.sim.layout import Holding, meet


def check_form(result: dict, name: str, keys: set[str]):
    assert result["id"] == f"bench/{name}"
    for row in result["rows"]:
        assert {"name", "value", "unit", "low", "high"} <= set(row)
        assert row["value"] is not None or row["note"]
    assert {each["key"] for each in result["ratios"]} == keys
    for each in result["ratios"]:
        assert {"key", "name", "value", "unit", "goal", "holds"} <= set(each)
        assert each["value"] > 0
        assert isinstance(each["holds"], bool) == (each["goal"] is not None)


def test_sim_prints_ours_the_loops_by_hand_and_both_ratios(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sim, "DEVICES", 50)
    result = sim.measure(lambda _: None, repeats=1, rows=1_000, with_peers=False)
    check_form(result, "sim", {"clean", "noisy", "clean-b20", "noisy-b20", "by-sample", "clean-b20-sum"})
    assert {each["measure"] for each in result["ratios"]} <= {"wall", "cpu"}
    names = {row["name"] for row in result["rows"]}
    for kind in ("clean", "noisy"):
        assert {f"ours, {kind}", f"hand-written scan, {kind}", f"NumPy loop, {kind}", f"ours, {kind}, b=20"} <= names
        assert f"hand-written scan by sample, {kind}, b=20" in names


def test_the_loop_by_hand_that_goes_by_sample_clips_and_truncates_each_one_as_the_grid_does():
    x, y = sim.samples(20)
    one, limit = (x[None], y[None], np.zeros(1, np.int32)), 700
    moved = np.asarray(hand_written.scan(2, 20.0, 1e9, None, unroll=1, clip=limit)(*one)[0])
    gradients = Softmax(sim.DIMENSION, sim.CLASSES).gradients(np.zeros(moved.shape, np.float32), Samples(x, y))
    steps = Grid(Fraction(1, 2048)).sum(gradients, norm="l1", clip=limit)
    assert abs(gradients * 2048).sum((1, 2)).min() > limit
    assert np.abs(moved * -2048 - steps).max() <= 2  # the factor is rounded otherwise
    assert np.abs(moved).max() * 2048 > 20


def test_rounds_prints_ours_the_scan_by_hand_and_both_ratios():
    result = rounds.measure(lambda _: None, repeats=1, rounds=2, with_peers=False)
    check_form(result, "rounds", {"plain", "clipped"})
    assert [row["name"] for row in result["rows"]] == [
        "hand-written scan", "ours, plain", "ours, clipped", "ours, noisy"
    ]  # fmt: skip


@pytest.mark.slow
def test_gpu_runs_small_without_an_accelerator_says_so_and_holds_nobody_to_a_goal(tmp_path: Path):
    sizes = gpu.Sizes(devices=30, cohorts=3, trials=3, check_ins=32, networks=4, rounds=1)
    result = gpu.measure(lambda _: None, repeats=1, sizes=sizes)
    assert {each["key"] for each in result["ratios"]} == {"million", "million-in-cohorts", "trials", "mlp"}
    assert all(each["value"] > 0 for each in result["ratios"])
    if jax.default_backend() == "cpu":
        assert {each["holds"] for each in result["ratios"]} == {None}
        assert "no accelerator" in result["work"]
    gpu.plot(result, tmp_path / "gpu.svg")
    assert "<svg" in (tmp_path / "gpu.svg").read_text()


def test_the_round_of_all_written_by_hand_ends_where_ours_does():
    rng = np.random.default_rng(2)
    x = rng.normal(size=(30, gpu.HELD, 50)).astype(np.float32)
    x /= np.linalg.norm(x, axis=-1, keepdims=True)
    y = rng.integers(0, 10, (30, gpu.HELD)).astype(np.int32)
    table = np.arange(30 * gpu.HELD, dtype=np.int32).reshape(30, -1)
    holding = Holding(x.reshape(-1, 50), y.reshape(-1), Population("iid", table, np.full(30, gpu.HELD, np.int32), 0))
    (ours,) = compiled.run(gpu.work(30), holding, [meet(gpu.work(30), holding, 1)], [1], noise=False)
    by_hand = hand_written.round_of_all(rate=1.0, clip=1.0, sigma=0.0)
    found = by_hand(jnp.zeros((50, 10)), jnp.asarray(x), jnp.asarray(y), jnp.int32(1))
    np.testing.assert_allclose(ours.model, found, atol=2 / 4096)  # ours is on the grid


def test_the_rounds_written_by_hand_end_where_ours_do():
    x, y = sim.samples(40_000)
    holding = Holding(x * 10, y, iid(len(x), 40, 0))
    task, table = rounds.work("plain"), holding.population.rows
    laid = meet(task, holding, 1, rounds=3)
    (ours,) = compiled.run(task, holding, [laid], [1])
    who = laid.device
    shape = (40, rounds.STEPS, rounds.BATCH)
    by_hand = hand_written.scan_of_rounds((50, 75, 75, 10), rounds.RATE)
    model = make_model("mlp", 50, 10, hidden=[75, 75], seed=1)
    theirs = by_hand(model.start(), holding.x[table].reshape(*shape, 50), y[table].reshape(shape), who)
    np.testing.assert_allclose(ours.model, theirs, atol=2e-4)
    assert abs(ours.model - model.start()).max() > 0.01


def test_proportions_prints_what_a_device_and_a_city_need():
    result = proportions.measure(lambda _: None, repeats=1, sizes=(4, 6))
    check_form(result, "proportions", {"node-seconds", "city-seconds", "linear"})
    assert [point["devices"] for point in result["points"]] == [4, 6]
    assert all(0.4 < point["right"] <= 1 and point["check_in_bytes"] > 200 for point in result["points"])


def test_noise_prints_milliseconds_for_each_law():
    check_form(
        noise.measure(lambda _: None, repeats=1, count=50), "noise", {"laplace", "gaussian", "skellam", "exponential"}
    )


@pytest.mark.slow
def test_scale_prints_time_and_memory_for_each_number_of_devices_and_plots_them(tmp_path: Path):
    result = scale.measure(lambda _: None, sizes=(200, 400))
    check_form(result, "scale", {"linear", "memory"})
    assert [point["check_ins"] for point in result["points"]] == [200, 400]
    scale.plot(result, tmp_path / "scale.png")
    assert (tmp_path / "scale.png").stat().st_size > 10_000


def test_an_unknown_benchmark_is_refused_with_those_that_exist():
    with pytest.raises(UnknownName, match="noise, sim, rounds, scale"):
        bench.run("speed")


def test_a_ratio_is_the_median_over_turns_of_the_steadier_clock():
    ours = Rate(100.0, walls=(2.0, 9.0, 2.2), cpus=(2.0, 2.0, 2.0))
    limit = Rate(100.0, walls=(1.0, 1.0, 1.0), cpus=(1.0, 1.2, 1.1))
    found = ratio("clean", "ours / limit", ours, limit, 0.5)
    assert found["measure"] == "cpu"
    assert found["value"] == pytest.approx(0.55)
    assert found["holds"]
    assert found["by_wall"] == pytest.approx(1 / 2.2)


def test_a_bound_holds_up_to_its_goal():
    assert bound("laplace", "", 10.0, "ms", 10.0)["holds"]
    assert not bound("laplace", "", 10.1, "ms", 10.0)["holds"]


# --- peers ---


def row_of(peer: peers.Peer) -> dict:
    x, y = sim.samples(100)
    (row,) = peers.measure(lambda _: None, x, y, 10, peers=(peer,))
    return row


def test_a_peer_that_is_missing_is_a_row_with_a_note():
    row = row_of(peers.Peer("Nobody", "no_such_peer", "run_pfl.py"))
    assert row["value"] is None
    assert "CROWDML_PEER_PYTHON_NO_SUCH_PEER" in row["note"]


def test_a_peer_whose_interpreter_does_not_run_is_a_row_with_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("CROWDML_PEER_PYTHON_JSON", str(tmp_path / "python"))
    row = row_of(peers.Peer("Nowhere", "json", "run_pfl.py"))
    assert row["value"] is None
    assert "CROWDML_PEER_PYTHON_JSON" in row["note"]


def script(folder: Path, text: str) -> peers.Peer:
    path = folder / "peer.py"
    path.write_text(text)
    return peers.Peer("Script", "json", str(path), seconds=5.0)


def test_a_peer_that_breaks_is_a_row_with_its_last_words(tmp_path: Path):
    row = row_of(script(tmp_path, "raise SystemExit('out of clay')"))
    assert row["value"] is None
    assert "exit code 1" in row["note"]
    assert "out of clay" in row["note"]


def test_a_peer_that_hangs_is_stopped_with_all_that_it_started(tmp_path: Path):
    text = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    row = row_of(script(tmp_path, text))
    assert row["value"] is None
    assert "stopped after 5 s" in row["note"]
    child = int((tmp_path / "child").read_text())
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().split()[2] in "ZX" or not _alive(child)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_peer_that_answers_is_a_row_with_the_median(tmp_path: Path):
    text = (
        "import json, sys, numpy\n"
        "x = numpy.load(sys.argv[1])['x']\n"
        "assert x.shape == (10, 10, 50)\n"
        "print('noise before it')\n"
        "print(json.dumps({'rates': [3.0, 1.0, 2.0], 'start': 0.5, 'accuracy': 0.9, 'version': 'script 1'}))\n"
    )
    row = row_of(script(tmp_path, text))
    assert (row["value"], row["low"], row["high"]) == (2.0, 1.0, 3.0)
    assert "script 1" in row["note"]


# --- the loop by hand is an honest limit: it computes the right thing ---


def fed(rows: int, ring: int):
    x, y = sim.samples(rows)
    late = np.random.default_rng(1).integers(0, ring, rows)
    version = np.maximum(np.arange(rows) - late, 0).astype(np.int32)
    return x[:, None], y[:, None], version


def test_the_scan_by_hand_agrees_with_the_numpy_loop():
    x, y, version = fed(500, 8)
    settings = {"ring": 8, "c": 30.0, "radius": 20.0, "scale": None}
    weights, errors, labels = hand_written.scan(**settings)(x, y, version)
    expected, wrong, counts = hand_written.numpy_loop(x, y, version, **settings)
    np.testing.assert_allclose(weights, expected, atol=1e-3)
    assert np.linalg.norm(expected) == pytest.approx(20.0, rel=1e-3)  # the projection was at work
    assert int(errors) == wrong
    np.testing.assert_array_equal(labels, counts)


def test_the_scan_by_hand_learns():
    x, y, version = fed(6000, 8)
    weights, _, _ = hand_written.scan(8, 30.0, 200.0, None)(x, y, version)
    assert ((x[:, 0] @ np.asarray(weights)).argmax(1) == y[:, 0]).mean() > 0.95


@pytest.mark.parametrize("scale", [10.0, 819.4])
def test_noise_by_hand_follows_the_discrete_laplace_law_but_for_zero(scale: float):
    scales = np.full(500, scale, np.float32)
    draws = np.asarray(jax.vmap(lambda t: hand_written.laplace(t, scales))(jnp.arange(400, dtype=jnp.int32))).ravel()
    law = DiscreteLaplace(Fraction(scale).limit_denominator(10))
    edges = np.unique(np.round(scale * np.array([0, 0.2, 0.5, 1, 1.5, 2, 3, 5])).astype(int))
    mass = law.pmf(np.arange(1, edges[-1] + 1))
    for low, high in pairwise(edges):
        expected = mass[low:high].sum() / (1 + law.pmf(np.arange(1))[0])  # zero comes twice as often
        for side in (draws, -draws):
            share = ((side > low) & (side <= high)).mean()
            assert share == pytest.approx(expected, abs=5 * np.sqrt(expected / draws.size))


def test_the_logarithm_by_hand_is_close():
    u = np.linspace(1e-7, 1, 100_001, dtype=np.float32)
    np.testing.assert_allclose(hand_written.log(jnp.asarray(u)), np.log(u.astype(np.float64)), atol=2e-6)
