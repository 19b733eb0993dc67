"""A network trained by local updates on a live server: it learns, survives kills, stops where it diverges, exports."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from device import Device, Line
from loopback import joined, run, serving
from process import Server

from crowdml.device.folder import Folder
from crowdml.messages import decode
from crowdml.models import make_model
from crowdml.protocols import settled
from crowdml.server.export import export_model, model_file, onnx_file
from crowdml.server.transcript import replay, write_transcript
from crowdml.storage.server import Store
from crowdml.task import parse

TEXT = """
name = "{name}"
title = "Which corner is this?"
collects = "rows of numbers"
[features]
dimension = 4
norm = {{ kind = "l2", bound = 1.0 }}
[labels]
classes = ["a", "b", "c"]
[model]
kind = "mlp"
hidden = [8]
seed = 3
[protocol]
kind = "local_updates"
batch = 10
minibatch = 5
local_steps = 4
rate = {{ c = {rate} }}
clip = 1.0
server_batch = 3
stale = "{stale}"
optimiser = "{optimiser}"
server_rate = {server_rate}
[privacy]
mechanism = "discrete-gaussian"
unit = "device"
epsilon = {{ update = {epsilon} }}
delta = 1e-6
budget = {{ epsilon = 1e4, samples = {samples} }}
"""


def text(
    name: str = "corners", *, rate: float = 1.0, stale: str = "weigh", optimiser: str = "average",
    server_rate: float = 1.0, epsilon: float = 5000.0, samples: int = 200,
) -> str:  # fmt: skip
    return TEXT.format(name=name, rate=rate, stale=stale, optimiser=optimiser, server_rate=server_rate,
                       epsilon=epsilon, samples=samples)  # fmt: skip


def corners(count: int, seed: int = 1) -> list[tuple[Any, int]]:
    """Two corners of a square are one class and the others another, so that no straight line parts them."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        label = int(rng.integers(3))
        sign = rng.choice([-1.0, 1.0])
        centre = {0: (sign, sign, 0.0, 0.2), 1: (sign, -sign, 0.0, 0.2), 2: (0.0, 0.0, 0.8, 0.2)}[label]
        made.append((0.55 * np.asarray(centre) + 0.05 * rng.normal(size=4), label))
    return made


def accuracy(weights: np.ndarray[Any, Any]) -> float:
    rows = corners(400, seed=9)
    model = make_model("mlp", 4, 3, hidden=[8], seed=3)
    said = model.predict(weights, np.stack([x for x, _ in rows]).astype(np.float32))
    return float((said == [y for _, y in rows]).mean())


def transcript(store: Store, task: bytes, path: Path) -> Any:
    with path.open("wb") as file:
        return write_transcript(store, task, file)


def test_a_network_learns_from_devices_that_take_their_own_steps_and_its_journal_leads_to_the_same_bits(tmp_path: Path):
    task = settled(parse(text()))
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        _, summary = run(home, server.address, server.code, task, corners(1200), devices=6)
        assert summary.check_ins == 120
        runner = server.hub.find(task.hash)
        weights, published = np.array(runner.fold.weights), bytes(runner.offer.body)
    assert accuracy(make_model("mlp", 4, 3, hidden=[8], seed=3).start()) < 0.4
    assert accuracy(weights) > 0.7  # as a rule 0.98 or more; check-ins of a busy machine are older when they come
    with Store(str(tmp_path / "server" / "server.sqlite")) as store:
        transcript(store, task.hash, tmp_path / "transcript")
        exported = export_model(store, task.hash)
    again = replay(tmp_path / "transcript")
    assert again.body == published
    np.testing.assert_array_equal(again.weights, weights)
    np.testing.assert_array_equal(exported.weights, weights)
    check_exports(exported)


def check_exports(exported: Any) -> None:
    """Safetensors hold the weights, layer by layer; ONNX says what the model says."""
    held = model_file(exported)
    size = int.from_bytes(held[:8], "little")
    header = json.loads(held[8 : 8 + size])
    assert header["weights.0"]["shape"] == [4, 8]
    np.testing.assert_array_equal(np.frombuffer(held[8 + size :], "<f4"), exported.weights)
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(onnx_file(exported))
    x = np.stack([x for x, _ in corners(300, seed=5)]).astype(np.float32)
    (said, *_) = session.run(None, {session.get_inputs()[0].name: x})
    model = make_model("mlp", 4, 3, hidden=[8], seed=3)
    expected = model.predict(exported.weights, x)
    names = np.asarray(exported.task.labels.classes)
    assert (np.asarray(said) == (names[expected] if np.asarray(said).dtype.kind in "OU" else expected)).mean() > 0.99


def test_weights_that_are_no_longer_finite_stop_the_task_and_the_last_good_ones_stay_published(tmp_path: Path):
    task = settled(parse(text("explodes", rate=1e6, server_rate=1e6)))
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        run(home, server.address, server.code, task, corners(1200), devices=6)
        runner = server.hub.find(task.hash)
        assert runner.reason is not None
        assert "no longer finite" in runner.reason
        weights = decode(runner.offer.kind, runner.offer.body).weights
        assert np.isfinite(weights).all()
        assert abs(weights).max() <= 1e9
        listed = {each["name"]: each for each in json.loads(asked(server.address, "/v1/tasks"))["tasks"]}
        assert listed["explodes"]["state"] == "stopped"
        assert "because its model diverged" in asked(server.address, f"/studies/{task.hash.hex()[:12]}")
        late = Device(Line("127.0.0.1", server.port))
        assert late.enrol(server.code).status == 201
        answer = late.signed("GET", f"/v1/tasks/{task.hash.hex()}/publication")
        np.testing.assert_array_equal(decode(answer.headers["crowdml-kind"], answer.body).weights, weights)
        refused = late.check_in(task)
        assert refused.slug == "task-stopped"
        assert "no longer finite" in refused.problem["detail"]


def asked(address: str, path: str) -> str:
    with urllib.request.urlopen(address + path, timeout=20) as answer:
        return answer.read().decode()


# --- killed ---


def spawn(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "crowdml.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def kill_many_times(tmp_path: Path, kills: int, seed: int) -> None:
    """A fleet checks updates of a network in, and the server is killed under it, at any moment."""
    server, chance = Server(tmp_path), Random(seed)
    path = tmp_path / "corners.toml"
    path.write_text(text(samples=400, epsilon=10_000.0))
    code = server.start("--task", str(path), "--invite", "100", "--snapshot-every", "40")["code"]
    address, rows, fleet = f"http://127.0.0.1:{server.port}", tmp_path / "rows.csv", tmp_path / "fleet"
    devices, each = 6, 40
    lines = [",".join([*(f"{number:.5f}" for number in x), "abc"[y]]) for x, y in corners(devices * each * 10)]
    rows.write_text("\n".join(lines) + "\n")
    words = ("fleet", address, code, "--devices", str(devices), "--source", f"csv:{rows}", "--folder", str(fleet),
             "--yes", "--json", "-")  # fmt: skip
    crowd = spawn(*words)
    try:
        for _ in range(kills):
            wait_for_more(server, chance.randrange(1, 25))
            server.kill()
            server.start("--snapshot-every", "40")
        said, aside = crowd.communicate(timeout=300)
        assert crowd.returncode == 0, said + aside
        summary = json.loads(said)
        assert summary["check_ins"] == devices * each, "every batch was taken, and none twice"
        with Store(server.where) as store:
            store.check()
            (task,) = (found.hash for found in store.tasks())
            entries = [(entry.device, entry.seq) for entry in store.entries(task)]
            done = transcript(store, task, tmp_path / "transcript")
            exported = export_model(store, task)
        assert len(entries) == len(set(entries)) == devices * each
        with Folder(fleet).ledger() as whole:
            assert all(whole.of(number).next_seq(task) == each for number in range(devices))
        line = server.line()
        answer = line.ask("GET", f"/v1/tasks/{task.hex()}/publication")
        line.close()
        assert answer.body == done.body
    finally:
        if crowd.poll() is None:
            crowd.kill()
        server.stop()
    again = subprocess.run(
        [sys.executable, "-m", "crowdml.cli", "replay", str(tmp_path / "transcript"), "--json", "-"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(again.stdout)["publication"] == done.hash == hashlib.sha256(answer.body).hexdigest()
    assert int(done.check_ins) == devices * each
    assert accuracy(exported.weights) > 0.7
    check_exports(exported)
    assert "Traceback" not in server.log.read_text()


def wait_for_more(server: Server, entries: int, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    with Store(server.where) as store:
        (task,) = (each.hash for each in store.tasks())
        target = store.head(task).index + entries
        while store.head(task).index < target and time.monotonic() < until:
            time.sleep(0.02)


@pytest.mark.kill
@pytest.mark.skipif(os.name != "posix", reason="processes are killed")
def test_a_server_that_is_killed_six_times_loses_no_update_and_counts_none_twice(tmp_path: Path):
    kill_many_times(tmp_path, kills=6, seed=1)
