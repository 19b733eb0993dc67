"""Bad requests by the thousand, made by hypothesis: no 5xx, no change of state, one line in the log, no traceback.

Envelopes are signed by an enrolled device whatever they say, so that refusals come from deep inside and not from the
signature alone. Their seq leaves a gap, so that none can be right by chance.
"""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

import numpy as np
import pytest
from device import Device, Line, Running, make_task, serving
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crowdml.server.limits import Limits
from crowdml.server.openapi import OPERATIONS
from crowdml.wire.envelopes import PREFIX, _open_quickly, _open_strictly
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack

TASK = make_task("fuzz")
HASH = TASK.hash.hex()
FAR = 1000
KEY = Key.from_secret(bytes(32))
LIMITS = Limits(device_rate=1e9, device_burst=1e9, address_rate=1e9, address_burst=1e9, slow=2.0)


@dataclass
class Bad:
    """A request that nobody should send."""

    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]


@dataclass
class Target:
    running: Running
    device: Device
    records: list[logging.LogRecord]


class Keep(logging.Handler):
    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__(logging.INFO)
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    records: list[logging.LogRecord] = []
    handler, log = Keep(records), logging.getLogger("crowdml.server")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    with serving(tmp_path_factory.mktemp("fuzz"), TASK, limits=LIMITS) as running:
        device = running.device()
        assert device.check_in(TASK).status == 202
        yield Target(running, device, records)
        assert device.check_in(TASK).status == 202, "after all of this it still serves"
    log.removeHandler(handler)
    log.setLevel(before)


# --- what is sent ---

words = st.text("abcdefghijklmnopqrstuvwxyz0123456789-_.%/", max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=40)
    | st.binary(max_size=80),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip
dtypes = st.sampled_from(["<i4", ">i4", "<i8", "<f4", "<f8", "|O", "|b1", "<U4", "<M8[s]", "<i4,<i4", "", "i4"])
arrays = st.tuples(dtypes, st.lists(st.integers(0, 2**40), max_size=5), st.binary(max_size=80)).map(list)
right = ["<i4", [8, 2], np.zeros((8, 2), np.int32).tobytes()]
wild = ["<i4", [8, 2], np.full((8, 2), 2**31 - 1, np.int32).tobytes()]
messages = st.fixed_dictionaries(
    {
        "errors": st.none() | arrays | plain,
        "gradient": st.sampled_from([right, wild]) | arrays | plain,
        "labels": st.none() | arrays | plain,
        "version": st.integers(-(2**63), 2**64 - 1) | plain,
    }
)


def broken(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with a piece cut out, put in, or changed."""
    return st.builds(
        lambda at, cut, put: data[:at] + put + data[at + cut :],
        st.integers(0, len(data)),
        st.integers(0, 40),
        st.binary(max_size=12),
    ).filter(lambda made: made != data)


@st.composite
def envelopes(draw: st.DrawFn, device: Device) -> bytes:
    right_ones: dict[str, Any] = {
        "body": pack({"errors": None, "gradient": right, "labels": None, "version": 0}),
        "kind": "sgd/gradient/1",
        "sender": device.key.id,
        "seq": FAR,
        "statement": {"dearest": ["zcdp 1/10"], "device": ["zcdp 1/10"], "samples": 3},
        "task": TASK.hash,
        "to": ["server"],
    }
    changes = {
        "body": st.binary(max_size=100) | messages.map(pack) | plain.map(pack) | plain,
        "kind": st.sampled_from(["sgd/params/1", "sgd/gradient/2", "", "a/1"]) | plain,
        "sender": st.text("0123456789abcdef", min_size=32, max_size=32) | plain,
        "seq": st.integers(FAR, 2**63 - 1) | st.integers(-(2**63), 0) | st.floats() | st.text(max_size=5),
        "statement": st.fixed_dictionaries(
            {"dearest": st.lists(st.text(max_size=12), max_size=3) | plain,
             "device": st.lists(st.sampled_from(["pure 1/10", "zcdp 2/20", "pure 1/0", "x"]), max_size=6),
             "samples": plain}
        ) | plain,
        "task": st.binary(min_size=32, max_size=32) | plain,
        "to": st.lists(st.sampled_from(["server", "0" * 32, "x"]), max_size=4) | plain,
    }  # fmt: skip
    for name in draw(st.sets(st.sampled_from(sorted(changes)), max_size=3)):
        right_ones[name] = draw(changes[name])
    for name in draw(st.sets(st.sampled_from(sorted(right_ones)), max_size=1)) if draw(st.booleans()) else ():
        del right_ones[name]
    packed = pack(right_ones)
    if draw(st.booleans()):
        packed = draw(broken(packed))
    return device.key.sign(PREFIX + packed) + packed


@st.composite
def requests(draw: st.DrawFn, device: Device) -> Bad:
    headers: dict[str, str] = {}
    if draw(st.booleans()):
        values = st.text('abcXYZ0123456789-_ ="*/\\', max_size=100) | st.just(f"Crowdml {device.key.id} 1 {'A' * 86}")
        name = st.sampled_from(
            ["Authorization", "Crowdml-Signature", "If-None-Match", "Content-Type", "Expect", "Range"]
        )
        headers[draw(name)] = draw(values).strip()
    if draw(st.integers(0, 2)):
        return Bad("POST", f"/v1/tasks/{HASH}/check-in", draw(envelopes(device) | st.binary(max_size=300)), headers)
    operation = draw(st.sampled_from(OPERATIONS))
    parts = {"task": HASH, "device": device.key.id, "version": "0", "slug": "full"}
    path = operation.path
    for name, value in parts.items():
        path = path.replace(f"{{{name}}}", draw(st.just(value) | words.filter(bool)))
    path = draw(st.just(path) | words.map(lambda tail: path + tail) | words.map(lambda tail: f"/{tail}"))
    method = draw(st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"]))
    enrolment = st.fixed_dictionaries({"code": st.text(max_size=20) | plain, "key": st.binary(max_size=33) | plain})
    body = None if method in ("GET", "HEAD") else draw(st.binary(max_size=200) | enrolment.map(pack))
    return Bad(method, path, body, headers)


# --- what must hold ---


def send(target: Target, bad: Bad) -> None:
    state = target.running.state(TASK)
    target.records.clear()
    try:
        answer = target.device.line.ask(bad.method, bad.path, bad.body, bad.headers)
    except (OSError, HTTPException, ValueError) as error:
        raise AssertionError(f"{bad}: {error!r}") from error
    assert answer.status < 500, (bad, answer)
    assert target.running.state(TASK) == state, bad
    lines = [each.getMessage() for each in target.records]
    assert len(lines) == 1 or (answer.status < 400 and not lines), (bad, lines)
    for record in target.records:
        assert record.exc_info is None
        assert "\n" not in record.getMessage()
    if answer.status >= 400 and bad.method != "HEAD":
        assert answer.problem["detail"]


def fuzz(target: Target, examples: int) -> None:
    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def each(data: st.DataObject) -> None:
        send(target, data.draw(requests(target.device)))

    each()


def test_bad_requests_are_refused_without_a_change(target: Target) -> None:
    fuzz(target, 500)


@pytest.mark.slow
def test_ten_thousand_bad_requests_are_refused_without_a_change(target: Target) -> None:
    fuzz(target, 10_000)


@given(
    junk=st.binary(max_size=200), head=st.sampled_from([b"", b"GET ", b"POST /v1/devices HTTP/1.1\r\n", b"\r\n\r\n"])
)
@settings(max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_bytes_that_are_no_http_are_refused_or_dropped(target: Target, head: bytes, junk: bytes) -> None:
    state = target.running.state(TASK)
    line = target.device.line
    with socket.create_connection((line.host, line.port), timeout=60) as raw:
        raw.sendall(head + junk + b"\r\n\r\n")
        raw.shutdown(socket.SHUT_WR)
        try:
            said = b"".join(iter(lambda: raw.recv(65536), b""))
        except ConnectionResetError:
            said = b""
    assert not said or (said.startswith(b"HTTP/1.1 ") and said[9:10] in b"24"), said
    if said and said[9:10] == b"4":
        assert json.loads(said.partition(b"\r\n\r\n")[2].partition(b"HTTP/1.1 ")[0])["detail"]
    assert target.running.state(TASK) == state


@given(st.data())
@settings(max_examples=300, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_what_the_quick_reader_of_envelopes_takes_the_strict_one_takes_for_the_same(data: st.DataObject) -> None:
    signed = data.draw(envelopes(Device(Line("", 0), KEY)))
    found = _open_quickly(signed)
    if found is not None:
        strictly = _open_strictly(signed)
        assert (found, found.said) == (strictly, strictly.said)
