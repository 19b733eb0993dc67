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

from crowdml.bench.timing import plain_row

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "peers"
"""In a checkout: the package itself ships no script for a framework of others."""
FIND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"


@dataclass(frozen=True)
class Peer:
    """A framework: its script in benchmarks/peers, the module that shows it is installed, and how long it may take."""

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
    name, unit = f"{peer.name}, rounds of 10", "updates/s"
    found = ask(peer, (str(data), *peer.arguments), folder)
    if isinstance(found, str):
        return plain_row(name, None, unit) | {"note": found}
    rates = sorted(found["rates"])
    note = f"{found['version']}; first round after {found['start']:.1f} s; accuracy {found['accuracy']:.2f}"
    return plain_row(name, rates[len(rates) // 2], unit, rates[0], rates[-1]) | {"note": note}


def ask(peer: Peer, arguments: tuple[str, ...], folder: Path) -> dict[str, Any] | str:
    """What the peer's script says, as JSON in its last line; a note that says why, where there is no such line."""
    try:
        missing = subprocess.run(
            [peer.python, "-c", FIND, peer.module], check=False, capture_output=True, timeout=60
        ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{peer.variable} names an interpreter that does not run: {error}"
    if missing:
        return f"not installed; install {peer.module!r}, or name an interpreter that has it in {peer.variable}"
    if not (SCRIPTS / peer.script).exists():
        return "its script is in benchmarks/peers of the repository; run the benchmark in a checkout"
    command = [peer.python, str(SCRIPTS / peer.script), *arguments]
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
            return f"stopped after {peer.seconds:g} s without a result"
        finally:
            _end(process.pid)
    try:
        return dict(json.loads(said.strip().rsplit("\n", 1)[-1]))
    except (ValueError, TypeError):
        last = (complained.strip() or "no output").rsplit("\n", 1)[-1]
        return f"exit code {process.returncode}: {last[:200]}"


def _end(group: int) -> None:
    """Whatever the peer started goes with it."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
