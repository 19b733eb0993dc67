"""A device gets the public file that its task names: from its server, once, and never another one."""

from __future__ import annotations

import asyncio
import urllib.request
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import numpy as np
import pytest
from drawn_network import named_by, network_file
from loopback import LoopbackServer, joined, run, serving

from crowdml import artefacts
from crowdml.device.client import Client, Unreachable
from crowdml.device.folder import Folder
from crowdml.device.joining import fetch_artefacts
from crowdml.errors import CrowdmlError, DataError, TaskError
from crowdml.features.extractor import network

FILE = network_file()
TASK = named_by(FILE)
(SHA256,) = TASK.artefacts


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Server and devices share this process: what the one has in memory the others must not find there."""
    known: dict[str, bytes] = {}
    monkeypatch.setattr(artefacts, "_KNOWN", known)
    network.cache_clear()
    return known


def forget(known: dict[str, bytes]) -> None:
    known.clear()
    network.cache_clear()


def fetch(server: LoopbackServer, home: Folder, task: Any = TASK) -> None:
    async def ask() -> None:
        client = Client(server.address)
        try:
            await fetch_artefacts(client, home, task)
        finally:
            await client.close()

    asyncio.run(ask())


def kept(home: Folder) -> list[str]:
    folder = home.path / "artefacts"
    return sorted(each.name for each in folder.iterdir()) if folder.exists() else []


@pytest.fixture
def server(tmp_path: Path, nothing_known: dict[str, bytes]):
    artefacts.admit(FILE, SHA256, "the test's file")
    with serving(tmp_path / "server", TASK) as running:
        forget(nothing_known)
        yield running


def test_it_is_fetched_checked_kept_and_used(server, tmp_path, nothing_known):
    home = joined(tmp_path / "home", TASK)
    fetch(server, home)
    assert kept(home) == [f"{SHA256}.safetensors"]
    assert (home.path / "artefacts" / f"{SHA256}.safetensors").stat().st_mode & 0o777 == 0o600
    assert nothing_known[SHA256] == FILE
    chance = np.random.default_rng(1)
    samples = [(chance.random(36), int(chance.integers(3))) for _ in range(10)]
    _, summary = run(home, server.address, server.code, TASK, samples)
    assert summary.check_ins == 2
    assert server.check_ins(TASK) == 2


def test_it_is_asked_for_once(server, tmp_path, nothing_known):
    home = joined(tmp_path / "home", TASK)
    fetch(server, home)
    forget(nothing_known)
    server.hub.artefacts.clear()
    fetch(server, home)
    assert nothing_known[SHA256] == FILE


@pytest.mark.parametrize("there", [FILE[:-1], b"", b"\x00" * (2**20 + 2)])
def test_a_file_in_the_folder_that_is_another_one_is_fetched_again(server, tmp_path, there):
    home = joined(tmp_path / "home", TASK)
    fetch(server, home)
    path = home.path / "artefacts" / f"{SHA256}.safetensors"
    path.write_bytes(there)
    forget(artefacts._KNOWN)
    fetch(server, home)
    assert path.read_bytes() == FILE


@pytest.mark.parametrize(
    ("sent", "error", "why"),
    [
        (network_file(2), DataError, f"has the SHA-256 .*, and the task names {SHA256[:12]}"),
        (FILE + b" ", DataError, "nothing was sent"),
        (b"", DataError, "has the SHA-256 e3b0c44298fc"),
        (bytes(2**20 + 1), Unreachable, "a device reads at most 1,048,576"),
    ],
)
def test_another_file_than_the_task_names_is_refused_and_nothing_of_it_is_kept(server, tmp_path, sent, error, why):
    server.hub.artefacts[SHA256] = sent
    home = joined(tmp_path / "home", TASK)
    with pytest.raises(error, match=why):
        fetch(server, home)
    assert kept(home) == []
    assert not artefacts.is_here(SHA256)


def test_a_server_without_it_is_named_in_the_sentence(server, tmp_path):
    server.hub.artefacts.clear()
    with pytest.raises(CrowdmlError, match=f"does not have the artefact {SHA256[:12]} that its task names. Nothing"):
        fetch(server, joined(tmp_path / "home", TASK))


def test_a_file_that_does_not_fit_the_task_is_refused_before_anything_is_sensed(server, tmp_path):
    with pytest.raises(TaskError, match=r"makes 5 features of a picture\. Say 5\."):
        fetch(server, joined(tmp_path / "home", TASK), named_by(FILE, hidden=6))


# --- the server ---


def ask(server: LoopbackServer, sha256: str, **headers: str) -> tuple[int, bytes, Any]:
    request = urllib.request.Request(f"{server.address}/v1/artefacts/{sha256}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read(), answer.headers
    except HTTPError as refused:
        return refused.code, refused.read(), refused.headers


def test_the_server_gives_it_to_whoever_knows_its_hash_and_no_other(server):
    status, body, headers = ask(server, SHA256)
    assert (status, body) == (200, FILE)
    assert headers["ETag"] == f'"{SHA256}"'
    assert "immutable" in headers["Cache-Control"]
    assert ask(server, SHA256, **{"If-None-Match": f'"x", "{SHA256}"'})[:2] == (304, b"")
    assert ask(server, SHA256, **{"If-None-Match": '"x"'})[0] == 200
    for other in ("0" * 64, SHA256.upper(), SHA256[:-1], "x"):
        assert ask(server, other)[0] == 404


def test_a_server_that_starts_again_has_it_without_being_given_it(server, tmp_path, nothing_known):
    server.stop()
    forget(nothing_known)
    server.start()
    assert ask(server, SHA256)[:2] == (200, FILE)
