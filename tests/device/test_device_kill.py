"""kill -9 of a device between any two steps: acknowledged exactly once, and never a send without a charge."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from loopback import serving, small_task

import crowdml
from crowdml.wire.envelopes import open_signed

CHILD = Path(__file__).with_name("device_child.py")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="kill -9 and fork are POSIX")


def kill_repeatedly(tmp_path: Path, kills: int, seed: int, source: str) -> None:
    task = small_task("killed", samples=10**6)
    (tmp_path / "task.json").write_bytes(task.canonical)
    paths = [str(Path(crowdml.__file__).parents[1]), str(CHILD.parent), os.environ.get("PYTHONPATH", "")]
    with serving(tmp_path / "server", task) as server:
        done = subprocess.run(
            [sys.executable, str(CHILD), server.address, server.code, str(tmp_path / "device"),
             str(tmp_path / "task.json"), str(kills), str(seed), source],
            capture_output=True, text=True, check=False, timeout=500,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        died, written, batches, waiting = map(int, done.stdout.split())
        assert died >= kills // 2
        assert (written, waiting) == (batches, 0)  # no sample was lost, none was given twice
        assert server.check_ins(task) == written
        journal = list(server.hub.store.tail(task.hash, 0))
        assert [open_signed(data).envelope.seq for _, data in journal] == list(range(1, written + 1))
        assert server.hub.find(task.hash).offer.version == written


@pytest.mark.parametrize("source", ["waits", "passes"])
def test_a_device_survives_a_few_kills_between_any_two_steps(tmp_path, source):
    kill_repeatedly(tmp_path, kills=12, seed=1, source=source)


@pytest.mark.kill
@pytest.mark.parametrize("source", ["waits", "passes"])
@pytest.mark.parametrize("seed", [2, 3])
def test_a_device_survives_many_kills_between_any_two_steps(tmp_path, seed, source):
    """Samples that wait at their source until they are charged, and samples that pass by and wait on disk."""
    kill_repeatedly(tmp_path, kills=100, seed=seed, source=source)
