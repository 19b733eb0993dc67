"""Conversations with a real server over real HTTP: each answer that docs/protocol.md promises, and what changed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import json
import logging
import re
import socket
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import Device, Running, make_task, serving
from real_postgresql import fresh_database

from crowdml.messages import decode
from crowdml.price import Price
from crowdml.protocols import find
from crowdml.server import portal
from crowdml.server.limits import Limits, Population, Queue, Rates
from crowdml.server.openapi import OPERATIONS
from crowdml.server.serve import CannotServe, serve
from crowdml.storage.server import StoreError, UnwrittenError
from crowdml.task import from_canonical
from crowdml.wire.envelopes import open_signed
from crowdml.wire.keys import Key, device_id
from crowdml.wire.packing import pack
from crowdml.wire.problems import PROBLEMS, Problem
from crowdml.wire.receipts import chain_next, chain_start
from crowdml.wire.statements import Statement

TASK, OTHER = make_task("one"), make_task("two")
PATH = f"/v1/tasks/{TASK.hash.hex()}"
MANY = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6)


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with contextlib.ExitStack() as stack:
        database = None
        if request.param == "postgresql":
            database = stack.enter_context(fresh_database(request.getfixturevalue("postgresql"), "conversations"))
        folder = tmp_path_factory.mktemp("server")
        yield stack.enter_context(serving(folder, TASK, OTHER, limits=MANY, database=database))


@pytest.fixture
def device(server: Running) -> Device:
    return server.device()


def ones(value: int = 1) -> np.ndarray[Any, Any]:
    return np.full((8, 2), value, np.int32)


def weights(server: Running) -> np.ndarray[Any, Any]:
    answer = server.line().ask("GET", f"{PATH}/publication")
    return decode(answer.headers["crowdml-kind"], answer.body).weights


# --- check-in ---


def test_a_new_check_in_is_accepted_counted_and_answered_with_a_receipt(server: Running, device: Device) -> None:
    before = weights(server)
    data = device.envelope(TASK, gradient=ones(64))
    answer = device.send(TASK, data)
    assert answer.status == 202
    receipt = answer.receipt
    assert receipt.verify(server.hub.key.public)
    assert receipt.answers(TASK.hash, device.key.id, 1, hashlib.sha256(data).digest())
    assert (weights(server) < before).all()
    assert answer.headers["crowdml-next"] == "0", "so few devices need not wait"


def test_the_same_bytes_again_get_the_same_receipt_and_count_once(server: Running, device: Device) -> None:
    data = device.envelope(TASK, gradient=ones())
    first = device.send(TASK, data)
    state = server.state(TASK)
    again = device.send(TASK, data)
    assert (first.status, again.status) == (202, 200)
    assert first.body == again.body
    assert server.state(TASK) == state


def test_other_bytes_under_a_used_seq_are_a_conflict(server: Running, device: Device) -> None:
    device.check_in(TASK)
    state = server.state(TASK)
    answer = device.check_in(TASK, seq=1, gradient=ones())
    assert (answer.status, answer.slug, answer.problem["expected"]) == (409, "seq-conflict", 2)
    assert server.state(TASK) == state


def test_a_gap_is_refused_and_names_the_seq_that_is_expected(server: Running, device: Device) -> None:
    device.check_in(TASK)
    state = server.state(TASK)
    answer = device.check_in(TASK, seq=5)
    assert (answer.status, answer.slug, answer.problem["expected"]) == (409, "seq-gap", 2)
    assert server.state(TASK) == state


def test_a_check_in_whose_totals_fell_is_refused_and_changes_nothing(server: Running, device: Device) -> None:
    """Review 2, privacy finding 2: such a device goes on from an older copy of its ledger."""
    said = Statement(("zcdp 2",), 20, ("zcdp 1/10",))
    first = device.envelope(TASK, statement=said)
    assert device.send(TASK, first).status == 202
    state = server.state(TASK)
    for less in (
        dataclasses.replace(said, samples=19),
        dataclasses.replace(said, device=("zcdp 1",)),
        dataclasses.replace(said, dearest=()),
    ):
        answer = device.check_in(TASK, seq=2, statement=less)
        assert (answer.status, answer.slug) == (409, "totals-fell")
        assert "expected" not in answer.problem, "no device may take it for a matter of numbers"
    assert server.state(TASK) == state
    assert device.check_in(TASK, seq=2, statement=dataclasses.replace(said, samples=21)).status == 202
    assert device.send(TASK, first).status == 200, "what was taken is taken, whatever came since"
    assert device.check_in(OTHER, seq=1, statement=dataclasses.replace(said, samples=1)).status == 202, (
        "it may have waited"
    )


def test_seqs_are_counted_for_each_task_apart(device: Device) -> None:
    assert device.check_in(TASK, seq=1).status == 202
    assert device.check_in(OTHER, seq=1).status == 202
    assert device.check_in(TASK, seq=2).status == 202


def test_receipts_chain_from_the_first_check_in_to_the_head_that_is_published(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=MANY) as server:
        devices = [server.device() for _ in range(3)]
        receipts = [devices[place % 3].check_in(TASK).receipt for place in range(7)]
        chain = chain_start(TASK.hash)
        for place, receipt in enumerate(receipts, 1):
            chain = chain_next(chain, TASK.hash, receipt.device, receipt.seq, receipt.hash)
            assert (receipt.index, receipt.chain) == (place, chain)
        headers = server.line().ask("GET", f"{PATH}/publication").headers
        assert (headers["crowdml-index"], headers["crowdml-chain"]) == ("7", chain.hex())


def fields(**changes: Any) -> dict[str, Any]:
    return changes


@pytest.mark.parametrize(
    ("changes", "slug"),
    [
        (fields(gradient=np.zeros((8, 3), np.int32)), "wrong-message"),
        (fields(gradient=np.zeros(16, np.int32)), "wrong-message"),
        (fields(gradient=np.zeros((8, 2), np.int64)), "wrong-message"),
        (fields(gradient=np.zeros((8, 2), np.float32)), "wrong-message"),
        (fields(gradient=np.full((8, 2), 2**31 - 1, np.int32)), "wrong-message"),
        (fields(gradient=np.full((8, 2), -(2**31), np.int32)), "wrong-message"),
        (fields(version=-1), "wrong-message"),
        (fields(version=2**31), "wrong-message"),
        (fields(version=10**6), "stale"),
        (fields(version=1.5), "malformed"),
        (fields(kind="sgd/params/1"), "wrong-kind"),
        (fields(kind="sgd/gradient/2"), "wrong-kind"),
        (fields(to=frozenset(("0" * 32,))), "wrong-recipient"),
        (fields(to=frozenset(("0" * 32, "server"))), "wrong-recipient"),
        (fields(body=b""), "malformed"),
        (fields(body=b"\x80"), "malformed"),
        (fields(body=b"\xc1" * 40), "malformed"),
        (fields(statement=Statement((f"pure 1{80 * '0'}",), 1, ("pure 1",))), "wrong-message"),
        (fields(statement=Statement(("pure 1",), 1, (f"zcdp {999 * '9'}/2",))), "wrong-message"),
        (fields(statement=Statement(("pure 1",), 1, (f"renyi 2:1/3,3:1{307 * '0'}",))), "wrong-message"),
    ],
)
def test_a_message_that_is_not_as_the_task_says_is_refused_and_changes_nothing(
    server: Running, device: Device, changes: dict[str, Any], slug: str
) -> None:
    state = server.state(TASK)
    answer = device.check_in(TASK, **changes)
    assert (answer.slug, answer.status) == (slug, PROBLEMS[slug].status)
    assert server.state(TASK) == state
    assert device.check_in(TASK).status == 202, "its seq was not used up"


def test_an_envelope_for_another_task_of_this_server_is_refused_at_this_path(server: Running, device: Device) -> None:
    states = server.state(TASK), server.state(OTHER)
    answer = device.send(TASK, device.envelope(OTHER))
    assert (answer.status, answer.slug) == (422, "wrong-task")
    assert (server.state(TASK), server.state(OTHER)) == states


def test_forged_signatures_are_refused(server: Running, device: Device) -> None:
    data = device.envelope(TASK)
    state = server.state(TASK)
    forged = [
        bytes(64) + data[64:],
        data[:63] + bytes([data[63] ^ 1]) + data[64:],
        data[:-1] + bytes([data[-1] ^ 1]),
        Key.generate().sign(data[64:]) + data[64:],
    ]
    slugs = [device.send(TASK, each).slug for each in forged]
    assert slugs[:2] == ["signature", "signature"]
    assert slugs[2] in ("signature", "malformed")
    assert slugs[3] == "signature"
    assert server.state(TASK) == state


def test_a_stranger_is_refused(server: Running) -> None:
    state = server.state(TASK)
    answer = Device(server.line()).check_in(TASK)
    assert (answer.status, answer.slug) == (401, "unknown-device")
    assert server.state(TASK) == state


def test_a_revoked_device_is_refused_and_what_it_gave_stays(server: Running, device: Device) -> None:
    device.check_in(TASK, gradient=ones())
    assert asyncio.run(server.hub.revoke(device.key.id))
    state = server.state(TASK)
    assert (device.check_in(TASK).status, device.check_in(TASK).slug) == (403, "revoked")
    assert server.state(TASK) == state
    assert device.enrol(server.started.code or "").slug == "revoked"


def test_a_device_withdraws_is_forgotten_and_gone(server: Running, device: Device) -> None:
    device.check_in(TASK, gradient=ones())
    state = server.state(TASK)
    path = f"/v1/devices/{device.key.id}/withdraw"
    answer = device.signed("POST", path)
    assert (answer.status, json.loads(answer.body)["withdrawn"]) == (200, True)
    assert server.state(TASK) == state
    assert (device.check_in(TASK).status, device.check_in(TASK).slug) == (410, "withdrawn")
    assert device.enrol(server.started.code or "").slug == "withdrawn"
    assert device.signed("GET", f"/v1/devices/{device.key.id}/statement").slug == "withdrawn"
    assert server.state(TASK) == state


def test_what_a_device_hears_of_a_store_that_fails_does_not_depend_on_its_sentence(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=MANY) as server:
        assert server.hub.unwritten(UnwrittenError("no room is left")).slug == "full"
        assert server.hub.unwritten(StoreError("it could not be written, for it is away")).slug == "busy"


@pytest.mark.parametrize("change", ["withdraw", "revoke"])
def test_a_device_whose_leaving_could_not_be_written_is_still_here(tmp_path: Path, change: str) -> None:
    with serving(tmp_path, TASK, limits=MANY) as server:
        device = server.device()
        with sqlite3.connect(tmp_path / "server.sqlite") as other:
            other.execute("create trigger broken before update on device begin select raise(abort, 'no'); end")
        with pytest.raises(StoreError):
            server.run(getattr(server.hub, change)(device.key.id))
        with sqlite3.connect(tmp_path / "server.sqlite") as other:
            other.execute("drop trigger broken")
        assert device.key.id in server.hub.keys
        assert device.check_in(TASK).status == 202


def test_a_device_that_was_invited_to_one_task_is_refused_by_another(server: Running) -> None:
    code = asyncio.run(server.hub.invite(tasks=(OTHER.hash,)))
    device = Device(server.line())
    assert device.enrol(code).status == 201
    state = server.state(TASK)
    assert (device.check_in(TASK).status, device.check_in(TASK).slug) == (403, "not-joined")
    assert server.state(TASK) == state
    assert device.check_in(OTHER).status == 202


def test_a_device_that_comes_too_often_waits_and_then_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(device_rate=0.001, device_burst=3)) as server:
        device, other = server.device(), server.device()
        assert [device.check_in(TASK).status for _ in range(4)] == [202, 202, 202, 429]
        state = server.state(TASK)
        answer = device.check_in(TASK)
        assert answer.slug == "too-many"
        assert int(answer.headers["retry-after"]) > 60
        assert server.state(TASK) == state
        assert other.check_in(TASK).status == 202


def test_a_forger_cannot_use_up_the_rate_of_another_device(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(device_rate=0.001, device_burst=2)) as server:
        device = server.device()
        data = device.envelope(TASK)
        for _ in range(5):
            assert device.send(TASK, bytes(64) + data[64:]).slug == "signature"
        assert device.send(TASK, data).status == 202


def test_an_address_that_asks_too_much_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(address_rate=0.001, address_burst=8)) as server:
        device = server.device()
        for _ in range(20):  # what is authentic is counted by device
            assert device.check_in(TASK).status == 202
        statuses = [server.line().ask("GET", f"{PATH}/publication").status for _ in range(8)]
        assert statuses[:7] == [200] * 7
        assert statuses[-1] == 429
        assert device.check_in(TASK).slug == "too-many"


def test_a_bucket_lets_through_its_rate_even_to_one_who_never_waits() -> None:
    rates = Rates(rate=2.0, burst=1.0)
    waits = [_wait(rates, tick / 100) for tick in range(1001)]
    assert 19 <= waits.count(0) <= 21
    assert set(waits) == {0, 1}


def _wait(rates: Rates, now: float) -> int:
    try:
        rates.take("hasty", now)
    except Problem as problem:
        return problem.retry_after or -1
    return 0


def test_a_full_disk_is_507_and_reading_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, TASK) as server:
        device = server.device()
        first = device.envelope(TASK)
        assert device.send(TASK, first).status == 202
    with serving(tmp_path, TASK, limits=Limits(free_space=2**62), invite=0) as server:
        device.line = server.line()
        state = server.state(TASK)
        answer = device.check_in(TASK, seq=2)
        assert (answer.status, answer.slug) == (507, "full")
        assert int(answer.headers["retry-after"]) > 0
        assert device.send(TASK, first).status == 200, "what was acknowledged stays so"
        assert server.line().ask("GET", f"{PATH}/publication").status == 200
        assert server.line().ask("GET", "/readyz").status == 507
        assert Device(server.line()).enrol("x").status == 507
        assert server.state(TASK) == state


def test_a_task_stops_by_its_rule_and_stays_stopped_after_a_restart(tmp_path: Path) -> None:
    short = make_task("short", steps=3)
    with serving(tmp_path, short) as server:
        device = server.device()
        sent = [device.envelope(short, seq=seq) for seq in (1, 2, 3, 4)]
        assert [device.send(short, data).status for data in sent] == [202, 202, 202, 410]
        state = server.state(short)
        headers = server.line().ask("GET", f"/v1/tasks/{short.hash.hex()}/publication").headers
        assert headers["crowdml-state"] == "stopped"
        assert device.send(short, sent[2]).status == 200, "a lost answer can still be had"
    with serving(tmp_path, short, invite=0) as server:
        device.line = server.line()
        answer = device.send(short, sent[3])
        assert (answer.status, answer.slug) == (410, "task-stopped")
        assert "3 check-ins" in answer.problem["detail"]
        assert server.state(short) == state


def test_a_paused_task_asks_to_come_back_and_goes_on_when_it_is_resumed(tmp_path: Path) -> None:
    with serving(tmp_path, TASK) as server:
        device = server.device()
        asyncio.run(server.hub.change(TASK.hash, "pause"))
        answer = device.check_in(TASK)
        assert (answer.status, answer.slug, answer.headers["retry-after"]) == (503, "task-paused", "5")
        asyncio.run(server.hub.change(TASK.hash, "resume"))
        assert device.check_in(TASK).status == 202


# --- bounds on bodies and connections ---


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: Running) -> None:
    state = server.state(TASK)
    with socket.create_connection((server.line().host, server.line().port), timeout=60) as line:
        line.sendall(f"POST {PATH}/check-in HTTP/1.1\r\nHost: x\r\nContent-Length: {2**40}\r\n\r\n".encode())
        assert line.recv(100).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection((server.line().host, server.line().port), timeout=60) as line:
        line.sendall(f"POST {PATH}/check-in HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        _send_until_refused(line)
    assert server.state(TASK) == state


def _send_until_refused(line: socket.socket) -> None:
    """Send chunks until the server has had enough of them. It says 413, unless the reset comes first."""
    chunk = b"40000\r\n" + bytes(0x40000) + b"\r\n"
    sent, answer = 0, b""
    line.settimeout(0.05)
    while not answer and sent < 64 * 2**20:
        try:
            line.sendall(chunk)
            sent += len(chunk)
            answer = line.recv(100)
        except TimeoutError:
            continue
        except OSError:
            break
    assert not answer or answer.startswith(b"HTTP/1.1 413 ")
    assert sent < 32 * 2**20


def test_a_slow_sender_is_not_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(slow=0.2)) as server:
        where = server.line()
        for begun in (f"POST {PATH}/check-in HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc", "GET /v1/tas", ""):
            with socket.create_connection((where.host, where.port), timeout=60) as line:
                line.sendall(begun.encode())
                said = b"".join(iter(lambda: line.recv(65536), b""))
                assert said.startswith(b"HTTP/1.1 408 ")
                assert b"application/problem+json" in said
        assert server.state(TASK)[1] == 0


def test_a_head_without_end_is_refused(server: Running) -> None:
    where = server.line()
    with socket.create_connection((where.host, where.port), timeout=60) as line:
        line.sendall(b"GET /v1/tasks HTTP/1.1\r\nX-Long: ")
        said = b""
        for _ in range(100):
            try:
                line.sendall(bytes([65]) * 4096)
            except OSError:
                break
        try:
            said = line.recv(65536)
        except OSError:
            return  # reset: refused as well
        assert said.startswith(b"HTTP/1.1 431 ")


def test_what_is_no_http_is_a_problem_too(server: Running) -> None:
    where = server.line()
    for bad in (b"\x16\x03\x01\x02\x00\x01\x00", b"NONSENSE\r\n\r\n", b"GET /%ff\xff HTTP/1.1\r\n\r\n"):
        with socket.create_connection((where.host, where.port), timeout=60) as line:
            line.sendall(bad)
            said = b"".join(iter(lambda: line.recv(65536), b""))
            assert said.startswith(b"HTTP/1.1 400 ")
            assert json.loads(said.partition(b"\r\n\r\n")[2])["type"] == "/problems/bad-request"


def test_more_connections_than_allowed_are_told_to_come_back(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(connections=3)) as server:
        lines = [server.line() for _ in range(3)]
        assert all(line.ask("GET", "/healthz").status == 200 for line in lines)
        answer = server.line().ask("GET", "/healthz")
        assert (answer.status, answer.slug, answer.headers["retry-after"]) == (503, "busy", "5")


# --- check-out, tasks, statements ---


def test_a_check_out_that_is_up_to_date_costs_no_body(server: Running, device: Device) -> None:
    device.check_in(TASK)
    first = device.line.ask("GET", f"{PATH}/publication")
    same = device.line.ask("GET", f"{PATH}/publication", headers={"If-None-Match": first.headers["etag"]})
    assert (same.status, same.body) == (304, b"")
    device.check_in(TASK)
    newer = device.line.ask("GET", f"{PATH}/publication", headers={"If-None-Match": first.headers["etag"]})
    assert newer.status == 200
    assert int(newer.headers["crowdml-version"]) == int(first.headers["crowdml-version"]) + 1
    assert device.line.ask("HEAD", f"{PATH}/publication").status == 200


def test_versions_that_are_kept_never_change_and_others_are_said_to_be_gone(tmp_path: Path) -> None:
    with serving(tmp_path, TASK) as server:
        device = server.device()
        assert device.line.ask("GET", f"{PATH}/publications/0").status == 200
        for _ in range(3):
            device.check_in(TASK, gradient=ones())
        now = device.line.ask("GET", f"{PATH}/publication")
        assert device.line.ask("GET", f"{PATH}/publications/3").body == now.body
        assert device.line.ask("GET", f"{PATH}/publications/2").slug == "version-gone"
        assert device.line.ask("GET", f"{PATH}/publications/4").slug == "unknown-version"
        for odd in ("x", "-1", "1.0", "9" * 30, "²"):
            assert device.line.ask("GET", f"{PATH}/publications/{odd.encode().hex()}x").slug == "unknown-version"
    with serving(tmp_path, TASK, invite=0) as server:  # a stop takes a snapshot, and keeps its version
        device.line = server.line()
        device.check_in(TASK, gradient=ones())
        kept = device.line.ask("GET", f"{PATH}/publications/3")
        assert (kept.status, kept.body) == (200, now.body)
        assert "immutable" in kept.headers["cache-control"]


def test_a_task_is_served_as_the_bytes_that_its_name_hashes(server: Running) -> None:
    answer = server.line().ask("GET", PATH)
    assert hashlib.sha256(answer.body).digest() == TASK.hash
    assert from_canonical(answer.body) == TASK
    assert "immutable" in answer.headers["cache-control"]
    listed = json.loads(server.line().ask("GET", "/v1/tasks").body)["tasks"]
    assert [each["hash"] for each in listed] == [TASK.hash.hex(), OTHER.hash.hex()]
    assert listed[0]["price"]["sample_epsilon"] == pytest.approx(1.0, abs=1e-6)
    assert listed[0]["price"] == Price.of(find(TASK), TASK).plain


def test_a_device_gets_its_last_signed_statement_back_and_nobody_elses(server: Running, device: Device) -> None:
    path = f"/v1/devices/{device.key.id}/statement"
    assert device.signed("GET", path).slug == "not-found"
    data = device.envelope(TASK)
    device.send(TASK, data)
    answer = device.signed("GET", path)
    assert answer.body == data
    assert open_signed(answer.body).statement.samples == 1
    assert server.device().signed("GET", path).slug == "forbidden"
    assert device.line.ask("GET", path).slug == "authorization"
    assert device.signed("GET", path, now=time.time() - 301).slug == "clock"
    assert Device(server.line()).signed("GET", path).slug == "unknown-device"


def test_enrolling_needs_an_invitation_with_uses_left(server: Running) -> None:
    code = asyncio.run(server.hub.invite(uses=1))
    device, late = Device(server.line()), Device(server.line())
    assert [device.enrol(code).status for _ in range(2)] == [201, 200]
    assert (late.enrol(code).status, late.enrol(code).slug) == (403, "invitation")
    assert (late.enrol("no-such-code").status, late.enrol("no-such-code").slug) == (403, "invitation")
    assert late.check_in(TASK).slug == "unknown-device"


# --- every path ---


@pytest.mark.parametrize(
    ("method", "path", "slug"),
    [
        ("GET", "/nothing", "not-found"),
        ("GET", "/v1", "not-found"),
        ("GET", "/v1/tasks/", "not-found"),
        ("GET", "/v1/tasks/abc", "unknown-task"),
        ("GET", f"/v1/tasks/{'0' * 64}", "unknown-task"),
        ("GET", f"/v1/tasks/{TASK.hash.hex().upper()}", "unknown-task"),
        ("GET", f"/v1/tasks/{'0' * 64}/publication", "unknown-task"),
        ("POST", f"/v1/tasks/{'0' * 64}/check-in", "unknown-task"),
        ("POST", "/v1/tasks/%00/check-in", "unknown-task"),
        ("GET", f"{PATH}/check-in", "method"),
        ("POST", f"{PATH}/publication", "method"),
        ("DELETE", PATH, "method"),
        ("PUT", "/v1/devices", "method"),
        ("POST", "/healthz", "method"),
        ("GET", "/problems/none", "not-found"),
        ("POST", f"{PATH}/check-in", "malformed"),
        ("POST", "/v1/devices", "malformed"),
    ],
)
def test_what_is_not_there_is_a_problem_in_the_one_shape(server: Running, method: str, path: str, slug: str) -> None:
    answer = server.line().ask(method, path)
    assert (answer.slug, answer.status) == (slug, PROBLEMS[slug].status)
    assert answer.headers["crowdml-request"]


def test_every_problem_has_a_page_and_the_description_knows_every_path(server: Running) -> None:
    line = server.line()
    for slug in PROBLEMS:
        assert json.loads(line.ask("GET", f"/problems/{slug}").body)["help"]
    described = json.loads(line.ask("GET", "/openapi.json").body)
    assert described["openapi"].startswith("3.1")
    pages = {getattr(route, "path", "") for route in portal.routes()}
    routes = {
        (method.lower(), route.path)
        for route in _routes(server)
        for method in route.methods or ()
        if method != "HEAD" and route.path not in pages
    }
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}


def _routes(server: Running) -> list[Any]:
    from crowdml.server.app import Front, make_app

    front = make_app(server.hub)
    assert isinstance(front, Front)
    return list(front.app.routes)


def test_a_refusal_is_one_line_in_the_log_whatever_the_path_says(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="crowdml.server"):
        server.line().ask("GET", "/%0AWARNING%20forged%1b[31m")
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert re.search(r"request [0-9a-f]{12}: GET /\\nWARNING", record.getMessage())
    assert record.exc_info is None


def test_metrics_count_check_ins_and_refusals(server: Running, device: Device) -> None:
    device.check_in(TASK)
    device.check_in(TASK, seq=9)
    text = device.line.ask("GET", "/metrics").body.decode()
    assert re.search(r"^crowdml_check_ins\{task=\"[0-9a-f]{12}\"\} [1-9]", text, re.MULTILINE)
    assert re.search(r"^crowdml_refusals\{problem=\"seq-gap\"\} [1-9]", text, re.MULTILINE)


# --- starting, failing, starting again ---


def test_a_restart_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    with serving(tmp_path, TASK) as server:
        device = server.device()
        for value in range(1, 8):
            device.check_in(TASK, gradient=ones(value))
        state, key = server.state(TASK), server.hub.key.public
    with serving(tmp_path, TASK, invite=0) as server:
        assert server.state(TASK) == state
        assert server.hub.key.public == key
        device.line = server.line()
        assert device.check_in(TASK).receipt.index == 8


def test_a_second_server_does_not_start_on_the_same_folder_nor_on_the_same_port(tmp_path: Path) -> None:
    with serving(tmp_path / "a", TASK) as server:
        with pytest.raises(Exception, match="another server"):
            asyncio.run(serve(tmp_path / "a", port=0))
        with pytest.raises(CannotServe, match="could not listen"):
            asyncio.run(serve(tmp_path / "b", port=server.line().port))


def test_a_store_that_fails_is_503_or_507_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    with serving(tmp_path, TASK) as server:
        device = server.device()
        device.check_in(TASK, gradient=ones())
        state = server.state(TASK)
        with sqlite3.connect(tmp_path / "server.sqlite") as other:  # somebody makes the journal unwritable
            other.execute("create trigger broken before insert on journal begin select raise(abort, 'broken'); end")
        answer = device.check_in(TASK, gradient=ones())
        assert answer.slug == "busy"
        assert 2 <= int(answer.headers["retry-after"]) <= 5
        assert server.state(TASK) == state
        with sqlite3.connect(tmp_path / "server.sqlite") as other:
            other.execute("drop trigger broken")
        assert device.check_in(TASK, gradient=ones()).receipt.index == 2


@pytest.mark.postgres
def test_who_was_answered_while_a_connection_to_the_database_dropped_comes_back_in_seconds(
    tmp_path: Path, postgresql: str
) -> None:
    """Review 2, network finding L9: they were sent away for a minute, though the next statement works."""
    import psycopg

    with fresh_database(postgresql, "dropped") as url, serving(tmp_path, TASK, database=url) as server:
        device = server.device()
        with psycopg.connect(postgresql, autocommit=True) as other:
            other.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = 'dropped'")
        answer = device.check_in(TASK, gradient=ones())
        if answer.status == 503:  # unless a page or the watcher met the dead connections first
            assert 2 <= int(answer.headers["retry-after"]) <= 5
            answer = device.check_in(TASK, gradient=ones())
        assert answer.status == 202


# --- closed tasks, weak keys, readiness ---


def test_a_closed_task_is_read_by_devices_that_joined_it_alone(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, OTHER, limits=MANY) as server:
        device = server.device()
        code = server.run(server.hub.invite(tasks=(OTHER.hash,)))
        stranger = Device(server.line())
        assert stranger.enrol(code).status == 201
        server.run(server.hub.set_closed(TASK.hash, True))
        device.check_in(TASK)
        line = server.line()
        assert line.ask("GET", f"/v1/tasks/{OTHER.hash.hex()}/publication").status == 200
        listed = {each["hash"]: each["closed"] for each in json.loads(line.ask("GET", "/v1/tasks").body)["tasks"]}
        assert listed == {TASK.hash.hex(): True, OTHER.hash.hex(): False}
        for path in (PATH, f"{PATH}/publication", f"{PATH}/publications/0", f"{PATH}/publications/1"):
            assert (line.ask("GET", path).status, line.ask("GET", path).slug) == (401, "closed")
            assert stranger.signed("GET", path).slug == "not-joined"
            assert device.signed("GET", path, now=0).slug == "clock"
        assert device.signed("GET", f"{PATH}/publication").status == 200
        assert "private" in device.signed("GET", PATH).headers["cache-control"]
        assert stranger.check_in(TASK).slug == "not-joined"


@pytest.mark.parametrize("y", [0, 1, 2**255 - 20, 2**255 - 19, 2**255 - 18, 2**256 - 1])
def test_a_key_for_which_anybody_could_sign_is_not_enrolled(server: Running, y: int) -> None:
    public = y.to_bytes(32, "little")
    body = pack({"code": server.started.code, "key": public})
    forged = base64.urlsafe_b64encode(public + bytes(32)).rstrip(b"=").decode()  # holds for a key of order 1
    headers = {"Crowdml-Signature": forged, "Content-Type": "application/msgpack"}
    answer = server.line().ask("POST", "/v1/devices", body, headers)
    assert (answer.status, answer.slug) == (400, "malformed")
    assert device_id(public) not in server.hub.keys


def test_a_server_that_has_no_room_says_so_and_stays_readable(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=MANY) as server:
        device = server.device()
        assert server.line().ask("GET", "/readyz").status == 200
        first = device.envelope(TASK)
        assert device.send(TASK, first).status == 202
        server.hub.limits = dataclasses.replace(MANY, free_space=2**62)
        assert (server.line().ask("GET", "/readyz").status, device.check_in(TASK, seq=2).status) == (507, 507)
        assert device.send(TASK, first).status == 200
        assert server.line().ask("GET", f"{PATH}/publication").status == 200


def test_check_ins_that_would_wait_too_long_are_refused_each_with_a_later_place() -> None:
    queue = Queue(speed=100.0)
    assert queue.wait(50) == 0.5
    places = [queue.later(1000.0, crowd=10_000) for _ in range(800)]
    assert places == sorted(places)
    assert places[0] == 2
    assert places[-1] in (11, 12), "800 places at 80 a second, after the first"
    assert max(queue.later(1000.0, crowd=100) for _ in range(1000)) <= 4, "no longer than all who are registered take"
    queue.took(300, 1.0)
    assert queue.speed == 300


def test_the_window_comes_from_the_devices_that_are_there() -> None:
    population = Population(span=60)
    assert population.size(5000, now=0) == 5000, "nobody was seen yet: all may come"
    for number in range(10):
        population.saw(str(number), now=1)
    assert population.size(5000, now=30) == 5000
    assert population.size(5000, now=61) == 10
    population.saw("0", now=62)
    assert population.size(5000, now=100) == 10
    assert population.size(5000, now=122) == 1
    assert population.size(5000, now=500) == 0
