"""The tutorial for authors: its file is the example's, and its commands run from an empty folder to a replay."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pages import PAGES, ROOT
from plugged import SIGNS, no_plugins_left
from test_examples import run_python

from crowdml.cli import cli

PAGE = next(page for page in PAGES if page.name.endswith("write-a-protocol.md"))
COMMANDS = [line for block in PAGE.blocks if block.language == "sh" for line in block.text.strip().splitlines()]


def test_the_blocks_of_the_page_make_the_file_of_the_example():
    blocks = [block.text.strip() for block in PAGE.blocks if block.language == "py"]
    assert "\n\n\n".join(blocks) + "\n" == SIGNS.read_text(encoding="utf-8")


def _write(folder: Path) -> None:
    (folder / "signs.py").write_text(SIGNS.read_text(encoding="utf-8"), encoding="utf-8")
    task = next(block.text for block in PAGE.blocks if block.language == "toml" and block.text.startswith("name ="))
    (folder / "votes.toml").write_text(task, encoding="utf-8")


def test_the_task_of_the_page_is_checked_and_simulated_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    _write(tmp_path)
    for command in COMMANDS[:2]:
        with no_plugins_left():
            done = CliRunner().invoke(cli, shlex.split(command)[1:])
        assert done.exit_code == 0, done.output
        assert "votes" in done.output
    accuracy = re.search(r"accuracy +(0\.\d+)", done.output)
    assert accuracy is not None
    assert 0.7 < float(accuracy[1]) < 0.95


@pytest.mark.slow
def test_the_study_of_the_page_runs_live_under_masks_and_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    _write(tmp_path)
    run_python(PAGE, slow=False)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    base = [sys.executable, "-m", "crowdml.cli"]
    serve, *rest = COMMANDS[2:]
    with Path("log.txt").open("wb") as log:
        words = [*base, *shlex.split(serve.replace("8080", port))[1:]]
        server = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        said = server.stdout.readline() + server.stdout.readline()
        link = re.search(r"http\S+/join/\S+", said)
        assert link is not None, said + Path("log.txt").read_text()
        for command in rest:
            words = [*base, *shlex.split(command.replace("LINK", link[0]))[1:]]
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=120)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        assert "exactly as published" in done.stdout
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)
