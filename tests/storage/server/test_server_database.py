"""Opening, migrating, refusing, backing up and restoring the server's database."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from server_builders import NOW, TASK, check_in, name, prepare

from crowdml.storage.server import Store, StoreError, restore
from crowdml.storage.server import database as module
from crowdml.storage.server.schema import HEAD, metadata

needs_posix = pytest.mark.skipif(os.name != "posix", reason="file modes and locks are POSIX")


def made(path: Path, entries: int = 3) -> Path:
    with Store(path) as store:
        task = prepare(store)
        store.append(task, [check_in(0, seq, size=2000) for seq in range(1, entries + 1)])
    return path


def test_the_migrations_make_the_schema_that_the_code_uses(url):
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with Store(url) as store, store.reading() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_the_newest_migration_is_the_one_that_the_code_knows():
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory(str(Path(module.__file__).with_name("migrations")))
    assert scripts.get_heads() == [HEAD]
    numbers = sorted(script.revision for script in scripts.walk_revisions())
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]


def test_a_migration_that_fails_leaves_nothing_of_itself(url, monkeypatch, alembics_upgrade):
    from alembic import command, op

    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(command, "upgrade", alembics_upgrade)
        patch.setattr(op, "create_index", fail)
        with pytest.raises(StoreError, match="the power went"):
            Store(url)
    engine = sa.create_engine(module._url(url))
    assert sa.inspect(engine).get_table_names() == []
    engine.dispose()
    with Store(url) as store:
        prepare(store)


def test_a_database_of_a_newer_version_is_refused_and_left_alone(url):
    with Store(url) as store, store.writing() as connection:
        connection.exec_driver_sql("update alembic_version set version_num = '0099'")
    with pytest.raises(StoreError, match=f"at migration 0099, and this version knows {HEAD}"):
        Store(url)


def test_a_database_without_the_record_of_its_migrations_is_refused(url):
    with Store(url) as store, store.writing() as connection:
        connection.exec_driver_sql("drop table alembic_version")
    with pytest.raises(StoreError, match="no record of any migration"):
        Store(url)


def test_a_database_that_lost_a_table_is_refused(url):
    with Store(url) as store, store.writing() as connection:
        connection.exec_driver_sql("drop table latest")
    with pytest.raises(StoreError, match="the table 'latest' is gone"):
        Store(url)


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "server.db"
    path.write_bytes(b"this is a diary, and it is long enough to be a database" * 100)
    with pytest.raises(StoreError, match=r"cannot be trusted: file is not a database\. Nothing was written"):
        Store(path)
    assert path.read_bytes().startswith(b"this is a diary")


def test_damaged_pages_are_found_by_a_check(tmp_path):
    path = made(tmp_path / "server.db", entries=200)
    content = bytearray(path.read_bytes())
    for page in range(len(content) // 2 // 4096 * 4096, len(content), 4096):
        content[page : page + 300] = os.urandom(300)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="cannot be trusted"), Store(path) as store:
        store.check()


def test_a_database_cut_short_is_refused(tmp_path):
    path = made(tmp_path / "server.db", entries=200)
    path.write_bytes(path.read_bytes()[: 20 * 4096])
    with pytest.raises(StoreError, match="cannot be trusted"), Store(path) as store:
        store.check()


def test_a_database_that_left_only_its_log_is_not_begun_anew(tmp_path):
    (tmp_path / "server.db-wal").write_bytes(b"entries not yet in the file")
    with pytest.raises(StoreError, match=r"is not there, though .*-wal is"):
        Store(tmp_path / "server.db")


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(StoreError, match="could not be written: No such file or directory"):
        Store(tmp_path / "nowhere" / "server.db")


@pytest.mark.parametrize("url", ["mysql://localhost/x", "postgresql//nonsense://", "oracle://x"])
def test_a_database_of_another_kind_is_refused(url):
    with pytest.raises(StoreError, match="names no database that this server knows"):
        Store(url)


def test_a_postgresql_that_is_not_there_is_said_without_its_password():
    with pytest.raises(StoreError, match="is away") as caught:
        Store("postgresql://ada:sesame@127.0.0.1:9/nowhere")
    assert "sesame" not in str(caught.value)


@needs_posix
def test_a_second_store_in_one_process_leaves_the_first_its_locks(tmp_path):
    """Closing a plain handle drops a process's locks: another process then takes the log away under open stores."""
    path = made(tmp_path / "server.sqlite")
    where = {**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[3])}

    def elsewhere(then: str) -> str:
        code = f"from crowdml.storage.server import Store; store = Store({str(path)!r}); {then}; store.close()"
        run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=where)
        return run.stdout

    with Store(path) as first:
        Store(path).close()
        elsewhere("pass")
        first.set_setting("kept", b"yes")
        assert elsewhere("print(store.setting('kept'))") == "b'yes'\n"


@needs_posix
def test_only_the_owner_may_read_the_database(tmp_path):
    with Store(tmp_path / "server.db") as store:
        prepare(store)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("server.db", "server.db-wal", "server.db-shm"), 0o600)


def test_sqlite_is_written_through_to_the_disk(tmp_path):
    with Store(tmp_path / "server.db") as store, store.writing() as connection:
        found = [
            connection.exec_driver_sql(f"pragma {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        ]
    assert found == ["wal", 2, 1, 30_000]


@pytest.mark.postgres
def test_postgresql_is_written_through_to_the_disk(postgresql_url):
    with Store(postgresql_url) as store, store.reading() as connection:
        assert connection.exec_driver_sql("show synchronous_commit").scalar() == "on"


@needs_posix
def test_one_process_serves_from_a_database_at_a_time(url):
    with Store(url, serving=True) as first:
        with pytest.raises(StoreError, match="another server runs on the database"):
            Store(url, serving=True)
        with Store(url) as reader:  # a command may look
            prepare(reader)
        assert first.task(TASK) is not None
    with Store(url, serving=True):
        pass


def test_a_database_held_by_a_foreign_writer_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BUSY_SECONDS", 0)
    path = made(tmp_path / "server.db")
    with Store(path) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("begin immediate")
        with pytest.raises(StoreError, match="in use by another process"):
            store.append(TASK, [check_in(1, 1)])
        other.close()
        assert store.append(TASK, [check_in(1, 1)])[0].index == 4


def test_readers_in_other_threads_do_not_wait_for_the_writer(tmp_path):
    with Store(made(tmp_path / "server.db")) as store:
        found: list[int] = []
        with store.writing() as connection:
            connection.execute(sa.text("delete from latest"))
            thread = threading.Thread(target=lambda: found.append(len(store.last_seq(TASK))))
            thread.start()
            thread.join(timeout=20)
            connection.execute(sa.text("insert into latest select 1, 1, 3, 3, zeroblob(32)"))
        assert found == [1]


@needs_posix
def test_a_backup_taken_while_others_write_is_one_moment_of_the_database(tmp_path):
    path = made(tmp_path / "server.db", entries=50)
    enough = threading.Event()
    with Store(path) as store:
        seq = 50

        def write() -> None:
            nonlocal seq
            while not enough.is_set():
                store.append(TASK, [check_in(0, seq + 1, size=2000)])
                seq += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            sizes = [store.backup(tmp_path / f"copy-{number}.db") for number in range(3)]
        finally:
            enough.set()
            thread.join()
        assert store.check() == {TASK: seq}
    lengths = []
    for number, size in enumerate(sizes):
        copy = tmp_path / f"copy-{number}.db"
        assert copy.stat().st_size == size
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        restore(copy, tmp_path / f"back-{number}.db")
        with Store(tmp_path / f"back-{number}.db") as back:
            lengths.append(back.check()[TASK])
            (entry,) = back.append(TASK, [check_in(0, lengths[-1] + 1)])
            assert entry.is_new
            assert back.device(name(0)).is_active
    assert 50 <= lengths[0] <= lengths[1] <= lengths[2] <= seq
    assert not list(tmp_path.glob("*.partial*"))


def test_neither_backup_nor_restore_writes_over_a_file(tmp_path):
    path = made(tmp_path / "server.db")
    with Store(path) as store:
        store.backup(tmp_path / "copy.db")
        with pytest.raises(StoreError, match="is already there"):
            store.backup(tmp_path / "copy.db")
    with pytest.raises(StoreError, match="Move it away before you restore"):
        restore(tmp_path / "copy.db", path)
    with pytest.raises(StoreError, match="there is no backup"):
        restore(tmp_path / "nothing.db", tmp_path / "new.db")


def test_what_is_no_backup_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "study.toml").write_text('name = "city"\n')
    (tmp_path / "empty").touch()
    with contextlib.closing(sqlite3.connect(tmp_path / "other.db")) as other:
        other.execute("create table sums (x integer)")
        other.commit()
    for file in ("study.toml", "empty", "other.db"):
        before = (tmp_path / file).read_bytes()
        with pytest.raises(StoreError, match=rf"{file} is no backup of a crowdml server\. Nothing was written\."):
            restore(tmp_path / file, tmp_path / "new.db")
        assert (tmp_path / file).read_bytes() == before
    assert not (tmp_path / "new.db").exists()


def test_a_damaged_backup_is_not_put_in_place(tmp_path):
    with Store(made(tmp_path / "server.db", entries=100)) as store:
        store.backup(tmp_path / "copy.db")
    content = bytearray((tmp_path / "copy.db").read_bytes())
    content[40 * 4096 : 60 * 4096] = os.urandom(20 * 4096)
    (tmp_path / "copy.db").write_bytes(content)
    with pytest.raises(StoreError, match="cannot be trusted"):
        restore(tmp_path / "copy.db", tmp_path / "new.db")
    assert not (tmp_path / "new.db").exists()


@pytest.mark.postgres
def test_the_tool_that_copies_postgresql_is_named(postgresql_url, tmp_path):
    with Store(postgresql_url) as store:
        assert store.free_space() is None
        assert store.size() > 0
        with pytest.raises(StoreError, match="pg_dump"):
            store.backup(tmp_path / "copy.db")


def test_a_database_in_memory_forgets_and_has_no_copy(tmp_path):
    with Store("sqlite://") as store:
        prepare(store)
        assert store.counts().devices == 3
        with pytest.raises(StoreError, match="in memory has no copy"):
            store.backup(tmp_path / "copy.db")
    with Store("sqlite://") as store:
        assert store.tasks() == []


def test_the_disk_says_how_much_is_free(tmp_path):
    with Store(tmp_path / "server.db") as store:
        assert store.free_space() > 0
        assert store.size() > 4096


def test_opening_what_is_up_to_date_does_not_import_alembic(tmp_path):
    import subprocess
    import sys

    path = made(tmp_path / "server.db")
    code = (
        "import sys; from crowdml.storage.server import Store; Store(sys.argv[1]).close(); "
        "print('alembic' in sys.modules)"
    )
    source = str(Path(module.__file__).parents[3])
    found = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": source},
        check=True,
    )
    assert found.stdout == "False\n"


@pytest.mark.slow
def test_a_million_entries_open_and_tell_every_devices_last_seq_without_being_read(tmp_path):
    """Counted in thousands of SQLite's steps, not in seconds: reading a million entries takes several for each."""
    path = tmp_path / "server.db"
    devices, each = 10_000, 100
    with Store(path) as store:
        store.add_task(b"a task", "digits", NOW)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma synchronous = off")
        connection.executemany(
            "insert into device (number, id) values (?, ?)", ((n + 1, f"{n:032x}") for n in range(devices))
        )
        connection.executemany(
            'insert into journal (task, "index", device, seq, hash, chain, statement, received_at) '
            "values (1, ?, ?, ?, ?, ?, ?, ?)",
            (
                (i + 1, i % devices + 1, i // devices + 1, bytes(32), bytes(32), bytes(100), NOW)
                for i in range(devices * each)
            ),
        )
        connection.execute('insert into latest select task, device, seq, "index", hash from journal where seq = 100')
        connection.commit()
    thousands: list[None] = []

    def count(connection: sqlite3.Connection, _: object) -> None:
        connection.set_progress_handler(lambda: thousands.append(None), 1000)

    sa.event.listen(sa.Engine, "connect", count)
    try:
        with Store(path) as store:
            assert len(store.last_seq(TASK)) == devices
            assert store.head(TASK).index == devices * each
    finally:
        sa.event.remove(sa.Engine, "connect", count)
    assert 0 < len(thousands) < 1000
