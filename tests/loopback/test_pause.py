"""A task that is paused: devices wait, nothing is charged, lost or counted twice; a restart changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from loopback import QuickClock, joined, rows, run, serving, small_task
from process import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_runner import crowdml  # found by the line above

from crowdml.device.folder import Folder
from crowdml.protocols import settled
from crowdml.storage.server import Store
from crowdml.task import parse

DEVICES, EACH = 4, 6

TEXT = """
name = "paused"
title = "Sums of a cohort"
collects = "rows of numbers"
features = { dimension = 4, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b", "c"] }
model = { kind = "softmax" }
protocol = { kind = "sgd", batch = 5, step = { c = 1.0 } }
MASKING
[privacy]
mechanism = "MECHANISM"
epsilon = { gradient = 1.0 }
delta = 1e-6
budget = { epsilon = 1.5, samples = 1000 }
"""
PLAIN = TEXT.replace("MASKING", "").replace("MECHANISM", "discrete-gaussian")
MASKED = TEXT.replace("MASKING", "masking = { cohort = 5, minimum = 5, window = 1, lease = 3 }").replace(
    "MECHANISM", "skellam"
)


def soon(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    ends = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends
        threading.Event().wait(0.01)


def test_devices_wait_while_a_task_is_paused_and_each_batch_is_counted_once(tmp_path: Path) -> None:
    task, clock, ended = small_task("pauses"), QuickClock(), []
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "fleet", task)

        def take_part() -> None:
            given = rows(DEVICES * EACH * 5)
            ended.append(run(home, server.address, server.code, task, given, devices=DEVICES, time_=clock))

        crowd = threading.Thread(target=take_part)
        crowd.start()
        soon(lambda: server.check_ins(task) >= DEVICES)
        server.call(server.hub.change(task.hash, "pause"))
        stood, slept = server.check_ins(task), len(clock.slept)
        soon(lambda: len(clock.slept) > slept + 5 * DEVICES)
        assert server.check_ins(task) == stood
        with home.ledger() as ledger:
            given = sum(ledger.of(number).next_seq(task.hash) for number in range(DEVICES))
        assert stood <= given <= stood + DEVICES, "whoever has not charged waits before it does"
        server.call(server.hub.change(task.hash, "resume"))
        crowd.join(60)
        ((_, summary),) = ended
        assert summary.check_ins == DEVICES * EACH
        entries = [(entry.device, entry.seq) for entry in server.hub.store.entries(task.hash)]
    assert len(entries) == len(set(entries)) == DEVICES * EACH
    with home.ledger() as ledger:
        assert [ledger.of(number).next_seq(task.hash) for number in range(DEVICES)] == [EACH] * DEVICES


# --- real processes ---


def write_rows(path: Path, count: int) -> Path:
    chance = Random(5)
    lines = [
        ",".join([*(f"{chance.uniform(-0.5, 0.5):.4f}" for _ in range(4)), chance.choice("abc")]) for _ in range(count)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def rests(count: Callable[[], int], seconds: float = 12.0) -> None:
    """Until it has not moved for so long."""
    last, since = count(), time.monotonic()
    while time.monotonic() < since + seconds:
        threading.Event().wait(0.05)
        if (now := count()) != last:
            last, since = now, time.monotonic()


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["one by one", "in cohorts"])
def test_a_server_is_paused_restarted_and_resumed_and_its_fleet_loses_nothing(tmp_path: Path, masked: bool) -> None:
    server = Server(tmp_path)
    path = tmp_path / "paused.toml"
    path.write_text(MASKED if masked else PLAIN)
    task = settled(parse(path.read_text()))
    code = server.start("--task", str(path), "--invite", "100")["code"]
    devices, each = (5, 10) if masked else (8, 190)
    source = write_rows(tmp_path / "rows.csv", devices * each * 5)
    address, fleet = f"http://127.0.0.1:{server.port}", tmp_path / "fleet"
    words = ("fleet", address, code, "--devices", str(devices), "--source", f"csv:{source}", "--folder", str(fleet))
    told = tmp_path / "told.txt"
    with told.open("w") as file:
        crowd = subprocess.Popen(
            [sys.executable, "-m", "crowdml.cli", *words, "--yes", "--json", str(tmp_path / "summary.json")],
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    folder = ("--folder", str(server.data), "--json", "-")

    try:
        with Store(server.where) as store:
            soon(lambda: store.head(task.hash).index >= 2 * devices)
            if masked:
                soon(lambda: any(kept.row.phase == "mask" for kept in store.open_rounds(task.hash)))
            assert crowdml("task", "pause", task.name, *folder).json["state"] == "paused"
            rests(lambda: store.head(task.hash).index)
            assert server.stop() == 0
            stood = store.head(task.hash).index
            under = [kept.row.number for kept in store.open_rounds(task.hash) if kept.row.phase != "advertise"]
            server.start()
            rests(lambda: store.head(task.hash).index)  # longer than a device waits before it asks again
            assert store.head(task.hash).index == stood, "nothing is taken while it is paused, a restart or not"
            assert crowd.poll() is None, "devices wait"
            assert crowdml("task", "resume", task.name, *folder).json["state"] == "running"
        assert crowd.wait(timeout=180) == 0, told.read_text()
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["check_ins"] == devices * each, "every batch was taken"
        with Store(server.where) as store:
            store.check()
            entries = [(entry.device, entry.seq) for entry in store.entries(task.hash)]
            assert len(entries) == len(set(entries)), "and none twice"
            kinds = [event.kind for event in store.events(task=task.hash) if event.kind in ("paused", "running")]
            assert kinds[:2] == ["running", "paused"]
            ended = {row.number: row for row in store.rounds(task.hash, 500)}
            assert all(ended[number].phase == "summed" for number in under), "a round goes on where it stood"
            lost = [row for row in ended.values() if row.phase == "abandoned" and row.survived]
            assert not lost
        with Folder(fleet).ledger() as whole:
            assert all(whole.of(number).next_seq(task.hash) == each for number in range(devices))
    finally:
        if crowd.poll() is None:
            crowd.kill()
        server.stop()
    assert "Traceback" not in server.log.read_text()
