"""The example protocols, installed with pip: a server that is killed with -9, devices, pages, export and replay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugged import EXAMPLES, SIGNS, no_plugins_left
from process import Server, journal

from crowdml.datasets import blobs
from crowdml.protocols import settled
from crowdml.storage.server import Store
from crowdml.task import Task, find_task

pytestmark = [pytest.mark.kill, pytest.mark.usefixtures("at_hand")]

TASK = """
name = "{name}"
title = "Which corner?"
features = {{ dimension = 4, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["a", "b", "c"] }}
model = {{ kind = "softmax" }}
protocol = {{ kind = "{kind}", batch = 5, rate = 0.5{more} }}
privacy = {{ mechanism = "{noise}", epsilon = {{ {row} = 8.0 }}, budget = {{ epsilon = 8.0, samples = 200 }} }}
stop = {{ steps = {steps} }}
"""
MASKS = "masking = { cohort = 3, minimum = 3, window = 1.0, lease = 5.0 }\n"
DEVICES = 10
"""Enough for three cohorts of three at once: a device gives one upload in a round."""
CASES = {
    "signs": ("signs", "", "votes", False, 60),
    "signs-masked": ("signs", "", "votes", True, 8),
    "medians": ("medians", ", uploads = 5, minimum = 3", "gradient", False, 6),
    "medians-masked": ("medians", ", uploads = 3, minimum = 3", "gradient", True, 3),
}
"""Each task: its protocol, its own settings, its row, whether it is masked, and the steps after which it ends."""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples as pip installs them, without a network."""
    folder = tmp_path_factory.mktemp("examples")
    source, target = folder / "source", folder / "installed"
    shutil.copytree(EXAMPLES, source)  # pip builds in it
    words = ["install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-build-isolation", "--no-deps"]
    command = [sys.executable, "-m", "pip", *words, "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def at_hand(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process and those it starts find the examples."""
    paths = [str(installed), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    monkeypatch.syspath_prepend(str(installed))
    with no_plugins_left():
        yield


def crowdml(*words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crowdml.cli", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert not check or done.returncode == 0, done.stderr
    return done


def write_tasks(folder: Path) -> dict[str, Path]:
    files = {}
    for name, (kind, more, row, masked, steps) in CASES.items():
        noise = "skellam" if masked else "discrete-gaussian"
        text = TASK.format(name=name, kind=kind, more=more, row=row, noise=noise, steps=steps)
        files[name] = folder / f"{name}.toml"
        files[name].write_text((MASKS if masked else "") + text)
    return files


def write_samples(folder: Path) -> Path:
    data, path = blobs(rows=DEVICES * 200, features=4, classes=3, seed=1, normalise="none"), folder / "samples.csv"
    lines = [
        ",".join([*(f"{x:.4f}" for x in row), "abc"[label]])
        for row, label in zip(data.x_train, data.y_train, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def wait_until(holds: object, seconds: float = 60.0) -> None:
    assert callable(holds)
    pause, end = threading.Event(), time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "this did not happen in time"
        pause.wait(0.05)


def state_of(server: Server, task: Task) -> str:
    with Store(server.where) as store:
        found = store.task(task.hash)
        return "" if found is None else found.state


def test_example_protocols_survive_a_kill_of_the_server_and_are_replayed_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    files, samples, server = write_tasks(tmp_path), write_samples(tmp_path), Server(tmp_path)
    tasks = {name: settled(find_task(str(file))) for name, file in files.items()}
    assert {task.protocol["plugin"] for task in tasks.values()} == {"crowdml-examples 1.0"}
    options = [word for file in files.values() for word in ("--task", str(file))]
    code = server.start(*options, "--invite", str(DEVICES * len(tasks)))["code"]
    fleets = [
        subprocess.Popen(
            [sys.executable, "-m", "crowdml.cli", "fleet", f"http://127.0.0.1:{server.port}", code, "--task", name,
             "--devices", str(DEVICES), "--source", f"csv:{samples}", "--yes", "--folder", name, "--json", "-"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in tasks
    ]  # fmt: skip
    try:
        wait_until(lambda: all(len(journal(server, task.hash)) >= 2 for task in tasks.values()))
        server.kill()
        kept = {name: journal(server, task.hash) for name, task in tasks.items()}
        server.start()
        for fleet, name in zip(fleets, tasks, strict=True):
            out, said = fleet.communicate(timeout=120)
            assert fleet.returncode == 0, said
            assert json.loads(out)["check_ins"] > 0
            assert journal(server, tasks[name].hash)[: len(kept[name])] == kept[name]
        assert any(len(journal(server, task.hash)) > len(kept[name]) for name, task in tasks.items())
        wait_until(lambda: all(state_of(server, task) == "stopped" for task in tasks.values()))
        for task in tasks.values():
            page = server.line().ask("GET", f"/studies/{task.hash.hex()[:12]}", None, {"Accept": "text/html"})
            assert page.status == 200
            assert b"Which corner?" in page.body
    finally:
        for fleet in fleets:
            fleet.kill()
        server.stop()
    for name in tasks:
        written = ("--model", f"{name}.safetensors", "--onnx", f"{name}.onnx", "--transcript", f"{name}.zip")
        crowdml("task", "export", name, "--folder", server.data, *written)
        assert "exactly as published" in crowdml("replay", f"{name}.zip").stdout


def test_a_device_and_a_server_without_the_plugin_refuse_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    file, samples, server = write_tasks(tmp_path)["signs"], write_samples(tmp_path), Server(tmp_path)
    code = server.start("--task", str(file), "--invite", "5")["code"]
    join = ("join", f"http://127.0.0.1:{server.port}", code, "--source", f"csv:{samples}", "--yes", "--folder", "mine")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path.endswith("/src")))
    try:
        refused = crowdml(*join, check=False)
        assert refused.returncode == 1
        assert "needs the plug-in crowdml-examples 1.0, which is not here" in refused.stderr
        assert "run `pip install crowdml-examples==1.0`" in refused.stderr
        assert not (tmp_path / "mine").exists()
        other = crowdml(*join, "--plugin", SIGNS, check=False)
        assert other.returncode == 1
        assert "made with the plug-in crowdml-examples 1.0, and sha256:" in other.stderr
    finally:
        server.stop()
    server.start()  # it serves what else there is, and says what is missing
    try:
        answer = json.loads(server.line().ask("GET", "/v1/tasks").body)
        assert answer["tasks"] == []
        (aside,) = answer["aside"]
        assert aside["name"] == "signs"
        assert aside["reason"].startswith("protocol.kind = 'signs' needs the plug-in crowdml-examples 1.0")
    finally:
        server.stop()
    assert "task signs is put aside: protocol.kind = 'signs' needs the plug-in" in server.log.read_text()
