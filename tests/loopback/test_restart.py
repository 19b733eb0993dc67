"""A restart over a million check-ins: a synthetic journal behind a snapshot, then the real process."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from device import Answer, Device, make_task
from process import Server, free_port

from crowdml.messages import SERVER, Envelope, encode
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocols.sgd import Gradient
from crowdml.server.runner import Fold, TaskRunner
from crowdml.storage.server import Store
from crowdml.wire.envelopes import open_signed, pack_envelope
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack
from crowdml.wire.receipts import chain_next, chain_start
from crowdml.wire.statements import Statement
from crowdml.wire.states import pack_state

TASK = make_task()
NOW = "2025-01-31T12:00:00.000000+00:00"
STATEMENT = Statement(("zcdp 1/10",), 1, ("zcdp 1/10",))


def body(seq: int) -> bytes:
    gradient = np.full((8, 2), seq % 5, np.int32)
    return encode(Gradient(Release(gradient, RECEIVED), None, None, np.int32(0)))


def signed(device: str, seq: int) -> bytes:
    """As it would lie in the journal; its signature was verified when it came."""
    envelope = Envelope(TASK.hash, device, frozenset((SERVER,)), seq, "sgd/gradient/1", body(seq))
    return bytes(64) + pack_envelope(envelope, STATEMENT)


def fill(path: Path, check_ins: int, devices: int, tail: int) -> tuple[list[Key], bytes]:
    """A journal of so many entries, bodies for the last `tail`, and a snapshot before them; the publication."""
    keys = [Key.from_secret(bytes([1, number % 256, number // 256]) + bytes(29)) for number in range(devices)]
    with Store(path) as store:
        store.add_task(TASK.canonical, TASK.name, NOW, "running")
        store.invite(bytes(32), NOW, uses=devices)
        for key in keys:
            store.enrol(bytes(32), key.public, NOW)
    with closing(sqlite3.connect(path)) as opened, opened as connection:  # closed, so that its log is behind it
        number = dict(connection.execute("select id, number from device").fetchall())
        chain, fold = chain_start(TASK.hash), Fold(TASK)
        at, entries, bodies = chain, [], []
        last: dict[str, tuple[int, int, bytes]] = {}
        packed, fixed = pack(STATEMENT.plain()), bytes(32)
        for index in range(1, check_ins + 1):
            name, seq = keys[index % devices].id, (index - 1) // devices + 1
            if index > check_ins - tail:
                data = signed(name, seq)
                hash_ = open_signed(data).hash
                bodies.append((1, index, data))
                fold.apply(fold.read("sgd/gradient/1", body(seq)), name)
            else:
                hash_ = fixed
            chain = chain_next(chain, TASK.hash, name, seq, hash_)
            entries.append((1, index, number[name], seq, hash_, chain, packed, NOW))
            last[name] = seq, index, hash_
            if index == check_ins - tail:
                at = chain
        insert = 'insert into journal (task, "index", device, seq, hash, chain, statement, received_at)'
        connection.executemany(f"{insert} values (?, ?, ?, ?, ?, ?, ?, ?)", entries)
        connection.executemany('insert into body (task, "index", signed) values (?, ?, ?)', bodies)
        latest = [(1, number[name], *where) for name, where in last.items()]
        connection.executemany('insert into latest (task, device, seq, "index", hash) values (?, ?, ?, ?, ?)', latest)
    start = Fold(TASK)
    with Store(path) as store:
        offered = pack([0, "sgd/params/1", encode(start.message), None])
        store.snapshot(TASK.hash, check_ins - tail, at, pack_state(start.state), offered)
    with closing(sqlite3.connect(path)) as opened, opened as connection:
        connection.execute("update snapshot set verified = 1")  # a server verifies each stretch as it goes
    return keys, encode(fold.message)


def measure(folder: Path, check_ins: int, devices: int) -> float:
    server = Server(folder)
    server.data.mkdir()
    keys, published = fill(server.data / "server.sqlite", check_ins, devices, tail=1999)
    began = time.perf_counter()
    server.start()
    seconds = time.perf_counter() - began
    try:
        line = server.line()
        assert line.ask("GET", f"/v1/tasks/{TASK.hash.hex()}/publication").body == published
        answer = Device(line, keys[1]).check_in(TASK, seq=check_ins // devices + 1)
        assert (answer.status, answer.receipt.index) == (202, check_ins + 1)
        line.close()
    finally:
        server.stop()
    print(f"restart over {check_ins:,} check-ins: {seconds:.2f} s")
    return seconds


def test_a_restart_folds_from_the_last_snapshot(tmp_path: Path) -> None:
    measure(tmp_path, 6_000, 60)


@pytest.mark.slow
def test_a_restart_over_a_million_check_ins_ends_in_the_same_bits(tmp_path: Path) -> None:
    measure(tmp_path, 1_000_000, 1_000)  # its time is in `crowdml bench server`


def give(device: Device, many: int) -> list[Answer]:
    return [device.check_in(TASK, gradient=np.full((8, 2), device.seq + 1, np.int32)) for _ in range(many)]


@pytest.mark.parametrize("database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def test_a_server_that_was_stopped_and_one_that_was_killed_go_on_with_the_same_bits(
    tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue("postgresql_url") if database == "postgresql" else None
    server = Server(tmp_path, database=url)
    code = server.start("--task", str(server.write_task()), "--invite", "1", "--snapshot-every", "20")["code"]
    device = Device(server.line())
    assert device.enrol(code).status == 201
    path = f"/v1/tasks/{TASK.hash.hex()}/publication"
    for end in (server.stop, server.kill):
        data = device.envelope(TASK)
        first = device.send(TASK, data)
        device.seq += 1
        assert {answer.status for answer in give(device, 30)} == {202}
        published = device.line.ask("GET", path)
        device.line.close()
        end()
        server.start("--snapshot-every", "20")
        again = device.line.ask("GET", path)
        assert (again.body, again.headers["crowdml-chain"]) == (published.body, published.headers["crowdml-chain"])
        repeated = device.send(TASK, data)
        assert (repeated.status, repeated.body) == (200, first.body)
    device.line.close()
    assert server.stop() == 0


def test_below_the_free_space_limit_a_real_server_takes_nothing_new_and_stays_readable(tmp_path: Path) -> None:
    server = Server(tmp_path)
    code = server.start("--task", str(server.write_task()), "--invite", "2")["code"]
    device = Device(server.line())
    assert device.enrol(code).status == 201
    data = device.envelope(TASK)
    receipt = device.send(TASK, data)
    assert receipt.status == 202
    device.line.close()
    server.stop()
    server.start("--free-space", str(10**9))
    refused = device.send(TASK, device.envelope(TASK, 2))
    assert (refused.status, refused.slug) == (507, "full")
    assert int(refused.headers["retry-after"]) > 0
    assert Device(device.line).enrol(code).slug == "full"
    assert device.line.ask("GET", "/readyz").slug == "full"
    assert device.line.ask("GET", "/healthz").status == 200
    assert device.line.ask("GET", f"/v1/tasks/{TASK.hash.hex()}/publication").headers["crowdml-index"] == "1"
    assert (device.send(TASK, data).status, device.send(TASK, data).body) == (200, receipt.body)
    assert device.signed("GET", f"/v1/devices/{device.key.id}/statement").body == data
    device.line.close()
    server.stop()
    server.start()
    assert device.check_in(TASK, seq=2).status == 202, "there is room again"
    device.line.close()
    assert server.stop() == 0


def test_a_killed_server_starts_on_a_disk_that_takes_nothing_more_and_is_read(tmp_path: Path) -> None:
    """Review 2, network finding L14: it wrote its address first, and ended there."""
    server = Server(tmp_path)
    code = server.start("--task", str(server.write_task()), "--invite", "2")["code"]
    device = Device(server.line())
    assert device.enrol(code).status == 201
    data = device.envelope(TASK)
    receipt = device.send(TASK, data)
    path = f"/v1/tasks/{TASK.hash.hex()}/publication"
    published = device.line.ask("GET", path).body
    device.line.close()
    server.kill()
    server.can_write = False
    for port in (server.port, free_port()):  # an address that is known, and one that would have to be written
        server.port = port
        server.start()
        device.line = server.line()
        assert device.line.ask("GET", path).body == published
        assert device.line.ask("GET", "/v1/tasks").status == 200
        assert device.line.ask("GET", f"/studies/{TASK.hash.hex()[:12]}", headers={"Accept": "text/html"}).status == 200
        assert device.signed("GET", f"/v1/devices/{device.key.id}/statement").body == data
        assert (device.send(TASK, data).status, device.send(TASK, data).body) == (200, receipt.body)
        assert device.send(TASK, device.envelope(TASK, 2)).status in (503, 507)
        device.line.close()
        server.kill()
    server.can_write = True
    server.start()
    device.line = server.line()
    assert device.check_in(TASK, seq=2).receipt.index == 2, "there is room again"
    device.line.close()
    assert server.stop() == 0


def test_disk_stays_bounded_once_bodies_are_reduced(tmp_path: Path) -> None:
    """A check-in leaves its entry (id, seq, hashes, statement), and no body; what is erased is used again."""
    body = encode(Gradient(Release(np.zeros((8, 2), np.int32), RECEIVED), None, None, np.int32(0)))
    key, every, sizes = Key.generate(), 200, []
    with Store(tmp_path / "server.sqlite") as store:
        store.add_task(TASK.canonical, TASK.name, NOW, "running")
        store.invite(bytes(32), NOW, uses=1)
        store.enrol(bytes(32), key.public, NOW)
        runner = TaskRunner(store, TASK.canonical, Key.generate(), lambda: NOW, snapshot_every=every)
        for seq in range(1, 40 * every + 1, 50):
            envelopes = [
                Envelope(TASK.hash, key.id, frozenset((SERVER,)), each, "sgd/gradient/1", body)
                for each in range(seq, seq + 50)
            ]
            batch = [open_signed(bytes(64) + pack_envelope(each, STATEMENT)) for each in envelopes]
            assert all(answer[0] == 202 for answer in runner.accept(batch))
            if runner.is_due:
                runner.take_snapshot()
            with closing(sqlite3.connect(tmp_path / "server.sqlite")) as beside:
                beside.execute("pragma wal_checkpoint(truncate)").fetchall()
            sizes.append(store.size())
        counts = store.counts()
        assert counts.bodies <= 2 * every
        assert counts.snapshots <= 2
        assert counts.publications <= 64 + 32 * 8
        half = sizes[len(sizes) // 2]
        assert (sizes[-1] - half) / (20 * every) < 600, "bytes that a check-in leaves for good"
