"""The second half of the tutorial, from an empty folder to an exported model: every command, in its order, for real."""

from __future__ import annotations

import csv
import io
import json
import os
import re
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

    run("crowdml task new study.toml --from digits-gram")
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
        told, waiting = {}, None
        for command in commands[1:]:
            name = command.split()[1]
            here = command.replace(" LINK ", f" {_link({'join': 'mine', 'fleet': 'pilot'}.get(name, ''))} ")
            if name == "join":  # waits for the others, as the page says
                waiting = subprocess.Popen([*base, *shlex.split(here)[1:]], env=environment)
                continue
            told[" ".join(command.split()[1:3])] = run(here)
            if name == "fleet":
                assert waiting is not None
                assert waiting.wait(120) == 0
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert "134.3" in told["ledger --folder"]
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
    assert float(printed[0].removeprefix("right: ")) >= 0.70  # the model works: simulated crowds have 0.79 to 0.85
    assert np.fromstring(re.sub(r"[][]", "", printed[2]), sep=" ").sum() == 346
    card = Path("digits.md").read_text()
    for word in (
        "60 check-ins of 60 devices",
        "unit | sample",
        "observer | aggregate",
        "digits.safetensors",
        "digits.onnx",
    ):
        assert word in card
    assert json.loads(run("crowdml task list --folder study --json -"))["tasks"][0]["state"] == "stopped"


def _write_samples() -> None:
    """What the tutorial's Python writes, with its own lines."""
    (block,) = [each for each in TUTORIAL.blocks if each.language == "python" and "mine.csv" in each.text]
    exec(block.text, {})


def _link(which: str) -> str:
    if not which:
        return "LINK"
    with Path(f"{which}-code.csv").open(newline="") as file:
        return next(csv.DictReader(file))["url"]
