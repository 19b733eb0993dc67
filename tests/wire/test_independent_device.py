"""The device of examples/ against a live server: it enrols, learns, goes on after a restart, and its receipts hold."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tasks import SGD, toml

from crowdml.wire.problems import Problem

pytest.importorskip("uvicorn")
ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "examples" / "independent_client.py"

TASK = toml(
    SGD,
    name="three-heaps",
    protocol={"batch": 50, "step": {"c": 8.0}},
    privacy={"epsilon": {"gradient": 4.0, "errors": 0.5, "labels": 0.5}, "budget": {"epsilon": 5.0, "samples": 300}},
)
SERVE = """
import asyncio, json, sys
from pathlib import Path
from crowdml.server.serve import serve
from crowdml.task import parse
say = lambda it: print(json.dumps([it.address, it.code]), flush=True)
asyncio.run(serve(Path(sys.argv[1]), port=0, tasks=[parse(sys.argv[2])], invite=2, started=say))
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """The address of a server of its own, and a code."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", SERVE, str(tmp_path / "server"), TASK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            address, code = json.loads(process.stdout.readline())
            yield address, code
        finally:
            process.terminate()
            process.wait(20)


def heaps(count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Three heaps of samples: class, and four features within the unit ball."""
    random = np.random.default_rng(5)
    y = np.arange(count) % 3
    x = np.eye(4)[y] * 0.8 + random.normal(0, 0.05, (count, 4))
    return np.column_stack([y, x / np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True))])


def run(address: str, code: str, folder: Path, check_ins: int) -> subprocess.CompletedProcess[str]:
    samples = folder / "samples.csv"
    np.savetxt(samples, heaps(400), delimiter=",")
    command = [sys.executable, str(CLIENT), address, code, str(samples), str(folder / "state.json"), str(check_ins)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_it_enrols_learns_and_goes_on_where_it_stopped(server: tuple[str, str], tmp_path: Path):
    address, code = server
    first = run(address, code, tmp_path, 2)
    assert first.returncode == 0, first.stderr
    assert re.findall(r"check-in (\d+) is number (\d+)", first.stdout) == [("1", "1"), ("2", "2")]
    assert json.loads(first.stdout.splitlines()[-1])["samples"] == 100

    again = run(address, code, tmp_path, 100)  # its task's budget ends at 300 samples
    assert again.returncode == 0, again.stderr
    assert re.findall(r"check-in (\d+) is number (\d+)", again.stdout) == [(str(n), str(n)) for n in range(3, 7)]

    state = json.loads((tmp_path / "state.json").read_text())
    with urllib.request.urlopen(f"{address}/v1/tasks/{state['task']}/publication") as answer:
        params = msgpack.unpackb(answer.read())
        assert answer.headers["Crowdml-Kind"] == "sgd/params/1"
    assert params["version"] == 6
    weights = np.frombuffer(params["weights"][2], "<f4").reshape(4, 3)
    table = heaps(300)
    assert np.mean((table[:, 1:] @ weights).argmax(1) != table[:, 0]) < 0.2  # by chance: 0.67

    before = (tmp_path / "state.json").read_bytes()
    spent = run(address, code, tmp_path, 100)
    assert spent.returncode == 0
    assert "is number" not in spent.stdout
    assert (tmp_path / "state.json").read_bytes() == before


def test_a_resent_check_in_has_the_same_receipt_and_a_changed_one_is_refused(server: tuple[str, str], tmp_path: Path):
    address, code = server
    names = load()
    folder_state = tmp_path / "state.json"
    sent: list[tuple[bytes, bytes]] = []
    ask = names["ask"]

    def watched(url: str, body: bytes | None = None, **headers: str):
        answer = ask(url, body, **headers)
        if url.endswith("/check-in") and body is not None:
            sent.append((body, answer[1]))
        return answer

    names["ask"] = watched
    names["take_part"](address, code, heaps(60), folder_state, 1)
    ((envelope, receipt),) = sent
    state = json.loads(folder_state.read_text())
    path = f"{address}/v1/tasks/{state['task']}/check-in"
    assert ask(path, envelope, **{"Content-Type": "application/msgpack"})[1] == receipt

    key = names["Key"](bytes.fromhex(state["secret"]))
    fields = msgpack.unpackb(envelope[64:])
    other = key.envelope({**fields, "statement": {**fields["statement"], "samples": 51}})
    refused = post(path, other)
    assert (refused.slug, refused.extra) == ("seq-conflict", {"expected": 2})
    gap = post(path, key.envelope({**fields, "seq": 5}))
    assert (gap.slug, gap.extra) == ("seq-gap", {"expected": 2})
    assert post(path, envelope[:-1] + bytes([envelope[-1] ^ 1])).status == 400
    assert post(path, bytes([envelope[0] ^ 1]) + envelope[1:]).slug == "signature"


def load() -> dict[str, object]:
    """The example's functions; its last lines run it, and stay out."""
    text = CLIENT.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    exec(compile(text[: text.index("\nif sys.argv")], str(CLIENT), "exec"), names)
    return names


def post(url: str, body: bytes) -> Problem:
    request = urllib.request.Request(url, body, {"Content-Type": "application/msgpack"})
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request)
    assert caught.value.headers["Content-Type"] == "application/problem+json"
    return Problem.decode(caught.value.code, caught.value.read())


@pytest.mark.parametrize("path", [b"\2" + 32 * b"h", b"\1" + 31 * b"h", b"\1" + 32 * b"h" + b"\0"])
def test_the_independent_device_refuses_a_path_that_is_not_made_of_whole_steps_to_one_side_or_the_other(path: bytes):
    """Even one that leads to what the server signed."""
    names: dict[str, Any] = {}
    exec(CLIENT.read_text().partition("if sys.argv[1:2]")[0], names)
    key, pack = Ed25519PrivateKey.generate(), names["pack"]
    receipt = {"device": 32 * "a", "seq": 1}
    root = sha256(b"\0" + pack(receipt)).digest()
    for at in range(0, len(path), 33):
        other = path[at + 1 : at + 33]
        root = sha256(b"\1" + (root + other if path[at] else other + root)).digest()
    data = pack({**receipt, "path": path, "signature": key.sign(b"crowdml/receipts/1" + root)})
    with pytest.raises((struct.error, IndexError)):
        names["open_receipt"](data, key.public_key().public_bytes_raw())
