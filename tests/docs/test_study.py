"""The second half of the tutorial, from an empty folder to an exported model: every command, in its order, for real."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from pages import PAGES, ROOT

TUTORIAL = next(page for page in PAGES if page.name.endswith("tutorial.md"))
PASSWORD = "four words are long enough"


@pytest.mark.slow
def test_every_command_of_the_tutorial_runs_from_a_new_server_to_an_exported_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    base = [sys.executable, "-m", "crowdml.cli"]

    def run(command: str) -> str:
        done = subprocess.run(
            [*base, *shlex.split(command)[1:]],
            env=environment,
            input=f"{PASSWORD}\n",
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    run("crowdml task new study.toml --from digits012")
    _write_samples()
    commands = [
        line.replace("8080", port)
        for block in TUTORIAL.blocks
        if block.language == "sh"
        for line in block.text.strip().splitlines()
    ]
    assert commands[0].startswith("crowdml serve")
    with Path("log.txt").open("wb") as log:
        server = subprocess.Popen(
            [*base, *shlex.split(commands[0])[1:]], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert server.stdout is not None
        said = [server.stdout.readline() for _ in range(3)]
        assert "Serving no task yet" in said[0], Path("log.txt").read_text()
        assert f"http://127.0.0.1:{port}/operator/setup" in said[2]
        told = {}
        for command in commands[1:]:
            which = {"join": "mine", "fleet": "pilot"}.get(command.split()[1], "")
            told[" ".join(command.split()[1:3])] = run(command.replace(" CODE ", f" {_code(which)} "))
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert "357.4" in told["ledger --folder"]
    assert "exactly as published" in told["replay digits.transcript"]
    assert not Path("my-device").exists()
    printed = []
    for block in TUTORIAL.blocks:
        if block.language == "py":
            assert len(block.text.strip().splitlines()) == 5
            with redirect_stdout(io.StringIO()) as out:
                exec(block.text, {})
            printed.append(out.getvalue())
    assert printed[0] == printed[1]
    assert len(np.fromstring(printed[0].strip().strip("[]"), sep=" ")) == 28
    card = Path("digits.md").read_text()
    for word in (
        "16 check-ins of 16 devices",
        "unit | sample",
        "observer | anyone",
        "digits.safetensors",
        "digits.onnx",
    ):
        assert word in card
    assert json.loads(run("crowdml task list --folder study --json -"))["tasks"][0]["state"] == "stopped"


def _write_samples() -> None:
    """What the tutorial's Python writes, with its own lines."""
    from crowdml.datasets import load

    (block,) = [each for each in TUTORIAL.blocks if each.language == "python" and "mine.csv" in each.text]
    exec(block.text, {"digits": load("digits012", normalise="none")})


def _code(which: str) -> str:
    if not which:
        return "CODE"
    with Path(f"{which}-code.csv").open(newline="") as file:
        return next(csv.DictReader(file))["code"]
