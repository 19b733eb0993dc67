"""`admm` and `gram` over real HTTP: a real server, a fleet of real devices with their ledgers, and real masks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from urllib.request import urlopen

import numpy as np
import pytest
from process import Server

from crowdml.device.folder import Folder
from crowdml.messages import decode
from crowdml.protocols.admm import Centre
from crowdml.protocols.gram import Fitted
from crowdml.storage.server import Store

HEAD = """
name = "masked"
title = "Sums of a cohort"
collects = "rows of numbers"
features = { dimension = 4, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b"] }
masking = { cohort = 5, minimum = 5, window = 5.0, lease = 60.0 }
"""
ADMM = f"""{HEAD}
model = {{ kind = "logistic" }}
protocol = {{ kind = "admm", batch = 5, rho = 2.0 }}
[privacy]
mechanism = "skellam"
epsilon = {{ update = 10.0 }}
delta = 1e-6
uses = 2
budget = {{ epsilon = 10.0, samples = 5 }}
[stop]
steps = 2
"""
GRAM = f"""{HEAD}
model = {{ kind = "ridge" }}
protocol = {{ kind = "gram", batch = 5 }}
[privacy]
mechanism = "skellam"
epsilon = {{ moments = 10.0 }}
delta = 1e-6
budget = {{ epsilon = 10.0, samples = 5 }}
[stop]
steps = 1
"""
pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are started")


def write_rows(path: Path, count: int) -> Path:
    numbers = Random(1)
    rows = [[numbers.uniform(-0.5, 0.5) for _ in range(4)] for _ in range(count)]
    path.write_text("".join(",".join([*(f"{x:.4f}" for x in row), "ab"[row[0] > 0]]) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("text", "rounds", "published", "row"), [(ADMM, 2, Centre, "update"), (GRAM, 1, Fitted, "moments")]
)
def test_a_fleet_learns_under_masks_and_each_device_pays_what_was_promised(tmp_path, text, rounds, published, row):
    server, fleet = Server(tmp_path), tmp_path / "fleet"
    path = tmp_path / "task.toml"
    path.write_text(text)
    code = server.start("--task", str(path), "--invite", "100")["code"]
    address = f"http://127.0.0.1:{server.port}"
    rows = write_rows(tmp_path / "rows.csv", 25)
    try:
        words = ("fleet", address, code, "--devices", "5", "--source", f"csv:{rows}", "--folder", str(fleet), "--yes")
        ended = subprocess.run(
            [sys.executable, "-m", "crowdml.cli", *words, "--json", "-"],
            capture_output=True, text=True, check=False, timeout=180,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stdout + ended.stderr
        summary = json.loads(ended.stdout)
        assert summary["check_ins"] == 5 * rounds
        assert summary["epsilon_sample"] == pytest.approx(10, rel=1e-3)
        assert summary["epsilon_sample_alone"] > summary["epsilon_sample"]
        with Store(server.where) as store:
            (task,) = (each.hash for each in store.tasks())
            met = store.rounds(task, 100)
        assert sum(each.phase == "summed" for each in met) == rounds
        with Folder(fleet).ledger() as whole:
            charges = [charge for number in range(5) for charge in whole.of(number).charges(task)]
        assert [charge.mechanism for charge in charges] == [row] * 5 * rounds
        assert {(charge.first_sample, charge.last_sample) for charge in charges} == {(0, 4)}
        with urlopen(f"{address}/v1/tasks/{task.hex()}/publication", timeout=30) as answer:
            publication = decode(published.kind, answer.read())
        assert publication.version == rounds
        assert np.isfinite(publication.weights).all()
        assert publication.weights.any()
    finally:
        server.stop()
