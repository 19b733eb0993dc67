"""Pictures over real HTTP: a server that is given an extractor, and devices that fetch it, each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any
from urllib.request import urlopen

import pytest
from drawn_network import HIDDEN, TEXT, named_by, network_file
from process import Server

from crowdml import artefacts
from crowdml.errors import DataError
from crowdml.server.hub import check_hosted

FILE = network_file(3)
TASK = named_by(FILE)
(SHA256,) = TASK.artefacts
pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are started")


def write(folder: Path) -> tuple[Path, Path, Path]:
    """The task, its artefact and some pictures, as files."""
    task, file, rows = folder / "task.toml", folder / "network.safetensors", folder / "rows.csv"
    task.write_text(TEXT.format(name="pictures", sha256=SHA256, hidden=HIDDEN))
    file.write_bytes(FILE)
    chance = Random(1)
    lines = [[*(f"{chance.random():.3f}" for _ in range(36)), chance.choice("abc")] for _ in range(40)]
    rows.write_text("".join(",".join(line) + "\n" for line in lines))
    return task, file, rows


def crowdml(*words: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crowdml.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


def test_devices_fetch_the_extractor_and_learn_and_a_backup_and_an_export_have_it(tmp_path):
    server = Server(tmp_path)
    task, file, rows = write(tmp_path)
    code = server.start("--task", str(task), "--artefact", str(file), "--invite", "100")["code"]
    address = f"http://127.0.0.1:{server.port}"
    try:
        fleet = tmp_path / "fleet"
        words = ("--devices", 4, "--source", f"csv:{rows}", "--folder", fleet, "--yes", "--json", "-")
        ended = crowdml("fleet", address, code, *words)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert json.loads(ended.stdout)["check_ins"] == 8
        assert (fleet / "artefacts" / f"{SHA256}.safetensors").read_bytes() == FILE
        made = crowdml("backup", tmp_path / "copy.sqlite", "--folder", server.data)
        assert made.returncode == 0, made.stderr
    finally:
        server.stop()
    restored = Server(tmp_path / "other")
    restored.folder.mkdir()
    assert crowdml("restore", tmp_path / "copy.sqlite", "--folder", restored.data).returncode == 0
    restored.start()  # without --artefact
    try:
        with urlopen(f"http://127.0.0.1:{restored.port}/v1/artefacts/{SHA256}", timeout=30) as answer:
            assert answer.read() == FILE
    finally:
        restored.stop()
    for change in ("stop", "start"):
        assert crowdml("task", change, "pictures", "--folder", restored.data).returncode == 0
    model = tmp_path / "out" / "model.safetensors"
    model.parent.mkdir()
    done = crowdml("task", "export", "pictures", "--model", model, "--folder", restored.data)
    assert done.returncode == 0, done.stderr
    assert (model.parent / f"{SHA256}.safetensors").read_bytes() == FILE
    card = model.with_suffix(".md").read_text()
    assert f"5, made of pictures of 36 pixels by the public extractor `{SHA256[:12]}`" in card
    code = card.split("```python\n")[1].split("```")[0]
    said = subprocess.run([sys.executable, "-c", code], cwd=model.parent, capture_output=True, text=True, check=True)
    assert said.stdout.strip() in ("['a']", "['b']", "['c']")


def test_a_server_refuses_a_task_whose_extractor_it_lacks_or_has_another_of(tmp_path):
    server = Server(tmp_path)
    task, file, _ = write(tmp_path)
    server.data.mkdir()
    file.write_bytes(network_file(4))
    for words in ((), ("--artefact", file)):
        refused = crowdml("serve", "--folder", server.data, "--port", server.port, "--task", task, *words)
        assert refused.returncode == 1
        assert f"The artefact {SHA256[:12]} that the task names is not here" in " ".join(refused.stderr.split())
    missing = crowdml("serve", "--folder", server.data, "--artefact", tmp_path / "none")
    assert missing.returncode == 1
    assert "cannot be read" in missing.stderr


def test_no_server_hosts_what_it_lacks(monkeypatch):
    monkeypatch.setattr(artefacts, "_KNOWN", {})
    with pytest.raises(DataError, match=f"{SHA256[:12]} that the task names is not here"):
        check_hosted(TASK)
