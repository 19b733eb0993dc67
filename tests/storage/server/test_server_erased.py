"""What the server erases is gone from its database and from the write-ahead log beside it, while it runs.

Review 2, privacy finding 11, looked for on the server. The tests read the bytes of all files.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from server_builders import NOW, check_in, key, name, prepare
from test_server_rounds import PUBLISHED, end, go_on, mask, open_one

from crowdml.storage.server import Store
from crowdml.storage.server.looks import Terms, attach, detach


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "server.db"


def found(home: Path, *wanted: bytes) -> list[bytes]:
    """Those of the wanted bytes that are in some file of the server."""
    data = [file.read_bytes() for file in home.parent.iterdir() if file.is_file()]
    return [each for each in wanted if any(each in one for one in data)]


def body_of(device: int, seq: int) -> bytes:
    return b"%d:%d:....." % (device, seq)


def test_bodies_behind_a_snapshot_are_in_no_file(home):
    with Store(home, serving=True) as store:
        task = prepare(store)
        for seq in range(1, 5):
            store.append(task, [check_in(device, seq, size=400) for device in range(3)])
        head = store.head(task)
        bodies = [body_of(device, seq) for device in range(3) for seq in range(1, 5)]
        assert found(home, *bodies) == bodies
        store.snapshot(task, head.index, head.chain, b"state")
        store.reduce(task, head.index)
        assert found(home, *bodies) == [body_of(device, 4) for device in range(3)]  # their signed statements


def test_of_a_device_that_withdrew_nothing_is_in_any_file(home):
    with Store(home, serving=True) as store:
        task = prepare(store)
        store.append(task, [check_in(device, 1, size=400) for device in range(2)])
        head = store.head(task)
        store.snapshot(task, head.index, head.chain, b"state")  # no replay needs what is behind it
        wanted = [key(0), body_of(0, 1), key(1), body_of(1, 1)]
        assert found(home, *wanted) == wanted
        assert store.withdraw(name(0), NOW)
        assert found(home, *wanted) == wanted[2:]


def test_of_a_round_that_is_over_no_vector_is_in_any_file(home):
    with Store(home, serving=True) as store:
        task = prepare(store)
        row = go_on(store, task, open_one(store, task), "mask", sharers=b"\xe0", publication=PUBLISHED)
        mask(store, task, 1, 0, 1, 2)
        vectors = [body_of(device, 1) for device in range(3)]
        assert found(home, *vectors, b"roster") == [*vectors, b"roster"]
        end(store, task, row, survived=3)
        assert found(home, *vectors) == []


def test_private_rows_that_are_taken_away_are_in_no_file(home):
    rows = np.arange(40, dtype="<f4").tobytes()
    other = np.arange(100, 140, dtype="<f4").tobytes()
    with Store(home, serving=True) as store:
        task = prepare(store)
        terms = Terms("rows.csv", None, None)
        attach(store, task, 20, 1, rows, terms, NOW)
        assert found(home, rows) == [rows]
        attach(store, task, 20, 1, other, terms, NOW)
        assert found(home, rows, other) == [other]
        detach(store, task)
        assert found(home, rows, other) == []


def test_a_log_that_cannot_be_cut_while_somebody_reads_is_cut_the_next_time(home):
    with Store(home, serving=True) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1, size=400)])
        with store.reading() as connection:
            connection.exec_driver_sql("select count(*) from body").fetchall()
            store.append(task, [check_in(1, 1, size=400)])
            assert not store.cut_log()
            store.append(task, [check_in(0, 2, size=400)])  # and nobody waits for it
        assert store.cut_log()
        assert home.with_name("server.db-wal").stat().st_size == 0


def test_a_server_that_was_killed_cuts_its_log_when_it_starts_again(home, tmp_path):
    killed = tmp_path / "killed"
    with Store(home, serving=True) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1, size=400)])
        with store.writing() as connection:
            connection.exec_driver_sql("update device set public_key = null where number = 1")
        killed.mkdir()
        for file in tmp_path.glob("server.db*"):
            shutil.copy(file, killed)
        assert found(killed / "server.db", key(0)) == [key(0)]
    with Store(killed / "server.db", serving=True):
        assert found(killed / "server.db", key(0)) == []
