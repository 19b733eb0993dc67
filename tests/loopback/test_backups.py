"""Backups that were changed: what `restore` tells by itself, and what it tells by the hash that `backup` printed."""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from device import make_task, serving

from crowdml.server.checks import check_store
from crowdml.server.limits import Limits
from crowdml.storage.server import Store, StoreError, file_hash, restore

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
from cli_runner import crowdml, refused

TASK = make_task()
MANY = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6, snapshot_every=20)


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a server with two snapshots, check-ins before, between and after them, and a device that withdrew."""
    folder = tmp_path_factory.mktemp("backups")
    with serving(folder / "data", TASK, limits=MANY) as server:
        devices = [server.device() for _ in range(3)]
        for number in range(45):
            gradient = np.full((8, 2), number, np.int32)
            assert devices[number % 3].check_in(TASK, gradient=gradient).status == 202
        server.run(server.hub.withdraw(devices[2].key.id))
        made = crowdml("backup", str(folder / "copy"), "--folder", str(folder / "data"), "--json", "-")
        assert made.json["sha256"] == file_hash(folder / "copy")
        assert f"sha256 {made.json['sha256']}" in made.err
    return folder / "copy"


def check(path: Path) -> None:
    with Store(path) as store:
        check_store(store)


def changed(backup: Path, path: Path, *statements: str) -> Path:
    path.write_bytes(backup.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    return path


def test_a_backup_is_only_read_and_restores_by_the_hash_that_was_printed(backup: Path, tmp_path: Path):
    """Review 2, network finding L13."""
    digest = file_hash(backup)
    for again in range(2):
        done = crowdml("restore", str(backup), "--sha256", digest.upper(), "--folder", str(tmp_path / f"{again}"))
        assert done.code == 0, done.err
        assert "45 check-ins" in done.out
    assert file_hash(backup) == digest
    assert [path.name for path in sorted((tmp_path / "0").iterdir())] == ["server.sqlite"]
    said = refused("restore", str(backup), "--sha256", "0" * 64, "--folder", str(tmp_path / "other"))
    assert f"has the SHA-256 {digest}, and not the one that was asked for" in said
    assert not (tmp_path / "other").exists()


def test_a_bit_that_was_flipped_anywhere_is_told_by_the_hash(backup: Path, tmp_path: Path):
    """Review 2, network finding L13: 16 of 25 backups with flipped bits were taken."""
    digest, whole = file_hash(backup), backup.read_bytes()
    for place in np.random.default_rng(1).integers(0, 8 * len(whole), 50).tolist():
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        (tmp_path / "copy").write_bytes(data)
        with pytest.raises(StoreError, match="it is another file, or it was changed"):
            restore(tmp_path / "copy", tmp_path / "new", sha256=digest)
        assert [path.name for path in tmp_path.iterdir()] == ["copy"]


FLAWS = {
    "another key of the server": (
        "update setting set value = zeroblob(32) where name = 'server-key'",
        "the server's key is not the one that it served with",
    ),
    "keys of zeros": ("update device set public_key = zeroblob(32)", "the key of device .* is another one"),
    "a device without its key": ("update device set public_key = null", "the key of device .* is another one"),
    "a publication of a byte": (
        "update publication set body = x'00'",
        "version 40 of task 'count-one' is not what its snapshot published",
    ),
    "a publication of the future": (
        "insert into publication values (1, 99, 'sgd/params/1', x'00')",
        "published version 99, and no snapshot has it",
    ),
    "a trigger": (
        "create trigger quiet after insert on journal begin delete from event; end",
        "its trigger 'quiet' is not as this version makes it",
    ),
    "a trigger that is gone": ("drop trigger journal_is_never_deleted", "trigger 'journal_is_never_deleted'"),
    "a table": ("create table more (x integer)", "its table 'more' is not as this version makes it"),
    "what a snapshot published": (
        'update snapshot set published = (select published from snapshot order by "index" limit 1)',
        "is not what its snapshot published|published version 40, and no snapshot has it",
    ),
    "a body that a restart needs": ('delete from body where "index" = 31', "entry 31 .* was reduced"),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_backup_that_was_changed_by_hand_is_not_put_in_place(backup: Path, tmp_path: Path, flaw: str):
    """Review 2, network finding L13: each of these was taken."""
    statement, said = FLAWS[flaw]
    copy = changed(backup, tmp_path / "copy", statement)
    with pytest.raises(StoreError, match=said) as caught:
        restore(copy, tmp_path / "new", check=check)
    assert "partial" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_a_snapshot_that_was_changed_with_its_hash_and_publication_is_not_where_the_check_ins_lead(
    backup: Path, tmp_path: Path
):
    """Review 2, network finding L13: a state whose own hash fits is folded again."""
    with Store(changed(backup, tmp_path / "read")) as store:
        first = store.oldest_snapshot(TASK.hash)
        assert first is not None
        newest = store.last_snapshot(TASK.hash)
        assert newest is not None
        assert (first.index, newest.index) == (20, 40)
    copy = changed(
        backup,
        tmp_path / "copy",
        'update snapshot set (state, state_hash) = (select state, state_hash from snapshot where "index" = 20) '
        'where "index" = 40',
    )
    with pytest.raises(StoreError, match="lead to another model than its newest snapshot has"):
        restore(copy, tmp_path / "new", check=check)


def test_a_database_in_use_is_no_backup(tmp_path: Path):
    with serving(tmp_path / "data", TASK) as server:
        server.device()
        with pytest.raises(StoreError, match="is a database in use, and no backup"):
            restore(tmp_path / "data" / "server.sqlite", tmp_path / "new")
