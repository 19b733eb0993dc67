"""A server in a thread, and devices that sign by hand: they send what they are told, not what a task would compute."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from crowdml.messages import SERVER, Envelope, encode
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocols import settled
from crowdml.protocols.sgd import Gradient
from crowdml.server.hub import Hub
from crowdml.server.limits import Limits
from crowdml.server.serve import Started, serve
from crowdml.server.serve import run as run_server
from crowdml.task import Task, parse
from crowdml.wire.envelopes import sign
from crowdml.wire.keys import Key
from crowdml.wire.receipts import Receipt, open_receipt
from crowdml.wire.requests import authorize, enrol
from crowdml.wire.statements import Statement

T = TypeVar("T")

MSGPACK = "application/msgpack"

TEXT = """
name = "count-{name}"
title = "A task whose weights show every check-in"
features = {{ dimension = 8, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["a", "b"] }}
model = {{ kind = "softmax" }}
protocol = {{ kind = "sgd", batch = 1, step = {{ schedule = "constant", c = 1.0 }}, radius = 1e9 }}
privacy = {{ mechanism = "discrete-gaussian", epsilon = {{ gradient = 1.0 }}, delta = 1e-6 }}
stop = {{ steps = {steps} }}
"""


def make_task(name: str = "one", steps: int = 1_000_000) -> Task:
    """Weights are minus the grid's step times the sum of all gradients that were counted: nothing else moves them."""
    return settled(parse(TEXT.format(name=name, steps=steps)))


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def problem(self) -> dict[str, Any]:
        assert self.headers["content-type"] == "application/problem+json"
        found = json.loads(self.body)
        assert found["status"] == self.status
        return found

    @property
    def slug(self) -> str:
        return self.problem["type"].removeprefix("/problems/")

    @property
    def receipt(self) -> Receipt:
        return open_receipt(self.body)


@dataclass
class Line:
    """A connection that is kept."""

    host: str
    port: int
    _kept: http.client.HTTPConnection | None = None

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        if self._kept is None:
            self._kept = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            self._kept.request(method, path, body, headers or {})
            found = self._kept.getresponse()
            answer = Answer(found.status, {name.lower(): value for name, value in found.getheaders()}, found.read())
        except BaseException:
            self.close()
            raise
        if answer.headers.get("connection") == "close":
            self.close()
        return answer

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None


@dataclass
class Device:
    """Signs whatever it is told to."""

    line: Line
    key: Key = field(default_factory=Key.generate)
    seq: int = 0

    def enrol(self, code: str) -> Answer:
        body, signature = enrol(self.key, code)
        return self.line.ask("POST", "/v1/devices", body, {"Crowdml-Signature": signature, "Content-Type": MSGPACK})

    def envelope(self, task: Task, seq: int | None = None, **changes: Any) -> bytes:
        """A signed check-in. `gradient` is its array, `statement` its totals; the others are fields of the envelope."""
        if seq is None:
            seq = self.seq + 1
        gradient = changes.pop("gradient", None)
        array = np.zeros((8, 2), np.int32) if gradient is None else np.asarray(gradient)
        version = changes.pop("version", np.int32(0))
        statement = changes.pop("statement", Statement(("zcdp 1/10",), seq, ("zcdp 1/10",)))
        body = encode(Gradient(Release(array, RECEIVED), None, None, version))
        fields: dict[str, Any] = {"task": task.hash, "sender": self.key.id, "to": frozenset((SERVER,)), "seq": seq,
                                  "kind": "sgd/gradient/1", "body": body, **changes}  # fmt: skip
        return sign(Envelope(**fields), statement, self.key)

    def send(self, task: Task, data: bytes) -> Answer:
        path = f"/v1/tasks/{task.hash.hex()}/check-in"
        return self.line.ask("POST", path, data, {"Content-Type": MSGPACK})

    def check_in(self, task: Task, seq: int | None = None, **changes: Any) -> Answer:
        answer = self.send(task, self.envelope(task, seq, **changes))
        if answer.status == 202:
            self.seq = answer.receipt.seq
        return answer

    def signed(self, method: str, path: str, body: bytes = b"", now: float | None = None) -> Answer:
        header = authorize(self.key, method, path, body, now=time.time() if now is None else now)
        return self.line.ask(method, path, body or None, {"Authorization": header})


@dataclass
class Running:
    """A server that runs in a thread of this process."""

    started: Started
    thread: threading.Thread
    lines: list[Line] = field(default_factory=list)

    @property
    def hub(self) -> Hub:
        return self.started.hub

    def line(self) -> Line:
        host, _, port = self.started.address.partition("://")[2].partition(":")
        self.lines.append(Line(host, int(port)))
        return self.lines[-1]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run something on the server's own loop."""
        assert self.hub._worker is not None
        return asyncio.run_coroutine_threadsafe(work, self.hub._worker.get_loop()).result(60)

    def device(self) -> Device:
        """A new device, enrolled."""
        device = Device(self.line())
        assert self.started.code is not None
        assert device.enrol(self.started.code).status == 201
        return device

    def state(self, task: Task) -> tuple[bytes, int, bytes]:
        """What a refusal must not change: what is published, and the journal's head."""
        head = self.hub.store.head(task.hash)
        return self.hub.runners[task.hash].offer.body, head.index, head.chain


@contextlib.contextmanager
def serving(
    folder: Path,
    *tasks: Task,
    limits: Limits | None = None,
    invite: int = 1000,
    database: str | None = None,
    tls_local: bool = False,
) -> Iterator[Running]:
    """Serve until the end of the block; the server drains, and a failure of it fails the test."""
    ready: list[Started] = []
    failed: list[BaseException] = []
    listening = threading.Event()

    def tell(started: Started) -> None:
        ready.append(started)
        listening.set()

    def run() -> None:
        try:
            work = serve(
                folder, database=database, port=0, tasks=tasks, invite=invite, limits=limits, started=tell,
                tls_local=tls_local,
            )  # fmt: skip
            run_server(work)
        except BaseException as error:
            failed.append(error)
        finally:
            listening.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert listening.wait(30)
    if failed:
        raise failed[0]
    running = Running(ready[0], thread)
    try:
        yield running
    finally:
        for line in running.lines:
            line.close()
        running.started.stop()
        thread.join(30)
    assert not thread.is_alive()
    assert not failed
