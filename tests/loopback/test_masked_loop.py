"""Masked tasks end to end: real `serve`, `fleet`, `join`, `ledger` and `leave`, in processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from process import Server

from crowdml.device.folder import Folder
from crowdml.storage.server import Store

TASK = """
name = "masked"
title = "Sums of a cohort"
collects = "rows of numbers"
features = {{ dimension = 4, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["a", "b", "c"] }}
model = {{ kind = "softmax" }}
protocol = {{ kind = "sgd", batch = 5, step = {{ c = 1.0 }} }}
masking = {{ cohort = 5, minimum = 4, window = {window}, lease = {lease} }}
[privacy]
mechanism = "skellam"
epsilon = {{ gradient = 1.0, labels = 0.5 }}
delta = 1e-6
uses = 2
budget = {{ epsilon = 1.5, samples = 10000 }}
"""
ROWS = 2
"""Of the table."""
pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are killed")


def write_rows(path: Path, count: int, seed: int = 1) -> Path:
    numbers = Random(seed)
    lines = [
        ",".join([*(f"{numbers.uniform(-0.5, 0.5):.4f}" for _ in range(4)), numbers.choice("abc")])
        for _ in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def started(server: Server, *, window: float = 5.0, lease: float = 20.0) -> str:
    """The code of an invitation to the masked task."""
    path = server.folder / "masked.toml"
    path.write_text(TASK.format(window=window, lease=lease))
    return server.start("--task", str(path), "--invite", "100")["code"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "crowdml.cli", *words]


def spawn(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, aside = process.communicate(timeout=180)
    assert process.returncode == 0, said + aside
    return json.loads(said)


def done(*words: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(command(*words), capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def test_masked_devices_join_take_part_verify_and_leave(tmp_path):
    server = Server(tmp_path)
    code, address = started(server), f"http://127.0.0.1:{server.port}"
    many, one = write_rows(tmp_path / "many.csv", 40), write_rows(tmp_path / "one.csv", 10, seed=2)
    device, fleet = tmp_path / "device", tmp_path / "fleet"
    try:
        crowd = spawn("fleet", address, code, "--devices", "4", "--source", f"csv:{many}", "--folder", str(fleet),
                      "--yes", "--json", "-")  # fmt: skip
        joined = spawn("join", address, code, "--source", f"csv:{one}", "--folder", str(device), "--yes")
        shown, aside = joined.communicate(timeout=180)
        assert joined.returncode == 0, shown + aside
        summary = finished(crowd)
        text = " ".join((shown + aside).split())
        assert "All of it leaves under masks" in text
        assert "The price with at most 0 colluders" in text
        assert "in all the 2 check-ins in which it serves" in text
        assert "If everyone else colludes, or the server made them up: a sample ε =" in text
        assert "waiting for the cohort: " in text
        assert "devices are here" in text
        assert summary["check_ins"] == 16
        assert summary["epsilon_sample_alone"] > summary["epsilon_sample"] > 0
        assert summary["endings"] == {"source": 4}

        with Store(server.where) as store:
            (task,) = (each.hash for each in store.tasks())
            deadline = time.monotonic() + 60
            while sum(row.phase == "summed" for row in store.rounds(task, 100)) < 4 and time.monotonic() < deadline:
                time.sleep(0.05)  # the devices have revealed; the server adds up
            assert sorted(row.phase for row in store.rounds(task, 100)) == ["advertise"] + ["summed"] * 4

        told = json.loads(done("ledger", "--folder", str(device), "--json", "-").stdout)
        assert told["epsilon_sample_alone"] > told["epsilon_sample"] > 0
        assert told["epsilon_device_alone"] > told["epsilon_device"]
        assert len(told["charges"]) == ROWS * 4
        assert {charge["observer"] for charge in told["charges"]} == {"aggregate"}
        assert "If everyone else colludes" in " ".join(done("ledger", "--folder", str(device)).stdout.split())
        verified = json.loads(done("ledger", "--folder", str(device), "--verify", "--json", "-").stdout)
        assert verified["holds"]
        assert verified["server_asked"], verified
        assert [(each["receipts"], each["in_chain"]) for each in verified["tasks"]] == [(4, 4)]
        done("leave", "--folder", str(device), "--yes")
        assert not device.exists()
    finally:
        server.stop()


def check_ledgers(folder: Path, task: bytes, devices: int) -> int:
    """Each message has its charges, each batch served twice at most. How many messages were ever sealed."""
    written = 0
    with Folder(folder).ledger() as whole:
        for number in range(devices):
            ledger = whole.of(number)
            sealed, charges = ledger.next_seq(task), ledger.charges(task)
            assert len(charges) == ROWS * sealed
            spans = [(each.first_sample, each.last_sample) for each in charges if each.mechanism == "gradient"]
            served = [sum(a <= serial <= b for a, b in spans) for serial in range(ledger.next_serial())]
            assert max(served, default=0) <= 2
            written += sealed
    return written


def wait_for_more(server: Server, entries: int, seconds: float) -> None:
    """Until the journal has so many entries more, or the time is over."""
    until = time.monotonic() + seconds
    with Store(server.where) as store:
        (task,) = (each.hash for each in store.tasks())
        target = store.head(task).index + entries
        while store.head(task).index < target and time.monotonic() < until:
            time.sleep(0.05)


def kill_both(tmp_path: Path, kills: int, seed: int) -> None:
    """A server and a fleet that are killed in turn, at any moment, and come back."""
    server, moments = Server(tmp_path), Random(seed)
    code, address = started(server, window=1.0, lease=2.0), f"http://127.0.0.1:{server.port}"
    rows, fleet = write_rows(tmp_path / "rows.csv", 5 * 6 * 4), tmp_path / "fleet"
    words = ("fleet", address, code, "--devices", "6", "--source", f"csv:{rows}", "--folder", str(fleet), "--yes",
             "--seconds", "25", "--json", "-")  # fmt: skip
    crowd = spawn(*words)
    try:
        for turn in range(kills):
            wait_for_more(server, moments.randrange(12), seconds=moments.uniform(1.0, 8.0))
            if turn % 2:
                server.kill()
                server.start()
            else:
                if crowd.poll() is None:
                    os.kill(crowd.pid, signal.SIGKILL)
                crowd.communicate()
                crowd = spawn(*words)
        if crowd.wait(180):  # the server was away when it came: it says so, and the owner tries again
            _, aside = crowd.communicate()
            assert "cannot be reached" in aside or "closed the connection" in aside, aside
            crowd = spawn(*words)
        summary = finished(crowd)
        assert set(summary["endings"]) <= {"source", "time"}  # the last few may be too few for a cohort
        with Store(server.where) as store:
            (task,) = (each.hash for each in store.tasks())
            rounds, taken = store.rounds(task, 1000), store.head(task).index
        summed = [row for row in rounds if row.phase == "summed"]
        assert summed
        assert taken - len(summed) <= check_ledgers(fleet, task, 6)
    finally:
        if crowd.poll() is None:
            crowd.kill()
        server.stop()


@pytest.mark.kill
@pytest.mark.parametrize("seed", [1, 2])
def test_a_masked_server_and_its_fleet_survive_kills_at_any_moment(tmp_path, seed):
    kill_both(tmp_path, kills=8, seed=seed)
