"""Peers on the same samples: each in a process of its own, and in an interpreter of its own where it needs one.

`pip install pfl torch`, `pip install "flwr[simulation]"` or `pip install fedjax` beside this package is enough; a peer
that cannot live here (FedJAX wants jax 0.4) has its interpreter named by CROWDML_PEER_PYTHON_FEDJAX, and so on. A peer
that is not there, breaks or takes too long is a row without a value and with the reason. Nothing of it is left running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SCRIPTS = Path(__file__).parent / "peer_scripts"
FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


@dataclass(frozen=True)
class Peer:
    """A framework: its script here, the module that says whether it is installed, and how long it may take."""

    name: str
    module: str
    script: str
    arguments: tuple[str, ...] = ()
    seconds: float = 120.0

    @property
    def variable(self) -> str:
        return f"CROWDML_PEER_PYTHON_{self.module.upper()}"

    @property
    def python(self) -> str:
        return os.environ.get(self.variable, sys.executable)


PEERS = (
    Peer("pfl, NumPy model", "pfl", "run_pfl.py", ("numpy",)),
    Peer("pfl, PyTorch model", "pfl", "run_pfl.py", ("torch",)),
    Peer("FedJAX", "fedjax", "run_fedjax.py"),
    Peer("Flower", "flwr", "run_flower.py", ("40",), seconds=240.0),
)


def measure(progress: Callable[[str], None], x: Any, y: Any, devices: int, peers: Any = PEERS) -> list[dict[str, Any]]:
    """A row for each peer: device updates a second in steady state, rounds of 10 of the devices, as its script says."""
    with tempfile.TemporaryDirectory(prefix="crowdml-peers-") as folder:
        data = Path(folder) / "samples.npz"
        held = len(x) // devices
        np.savez(
            data,
            x=np.asarray(x)[: held * devices].reshape(devices, held, -1),
            y=np.asarray(y)[: held * devices].reshape(devices, held),
        )
        rows: list[dict[str, Any]] = []
        for peer in peers:
            progress(peer.name)
            rows.append(_row(peer, data, Path(folder)))
        return rows


def _row(peer: Peer, data: Path, folder: Path) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": f"{peer.name}, rounds of 10",
        "value": None,
        "unit": "updates/s",
        "low": None,
        "high": None,
    }
    try:
        missing = subprocess.run(
            [peer.python, "-c", FIND, peer.module], check=False, capture_output=True, timeout=60
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        return row | {"note": f"{peer.variable} names an interpreter that does not run: {error}"}
    if missing:
        return row | {
            "note": f"not installed; install {peer.module!r}, or name an interpreter that has it in {peer.variable}"
        }
    command = [peer.python, str(SCRIPTS / peer.script), str(data), *peer.arguments]
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
             "FLWR_HOME": str(folder / "flwr"), "RAY_TMPDIR": str(folder), "JAX_PLATFORMS": "cpu"}  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | quiet
    with subprocess.Popen(
        command, env=environment, cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            said, complained = process.communicate(timeout=peer.seconds)
        except subprocess.TimeoutExpired:
            _end(process.pid)
            process.communicate()
            return row | {"note": f"stopped after {peer.seconds:g} s without a result"}
        finally:
            _end(process.pid)
    try:
        found = json.loads(said.strip().rsplit("\n", 1)[-1])
        rates = sorted(float(rate) for rate in found["rates"])
    except (ValueError, KeyError, TypeError):
        last = (complained.strip() or "no output").rsplit("\n", 1)[-1]
        return row | {"note": f"exit code {process.returncode}: {last[:200]}"}
    return row | {
        "value": rates[len(rates) // 2],
        "low": rates[0],
        "high": rates[-1],
        "note": f"{found['version']}; first round after {found['start']:.1f} s; accuracy {found['accuracy']:.2f}",
    }


def _end(group: int) -> None:
    """Whatever the peer started goes with it."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
