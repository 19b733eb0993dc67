"""The ledger when processes are killed, the disk is full, or the file is not what it was."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest
from ledger_builders import PLENTY, TASK, charge
from ledgers import sample_total

import crowdml
from crowdml.errors import LedgerError
from crowdml.storage import Budget, Ledger
from crowdml.storage.migrations import migrations

CHILD = Path(__file__).with_name("ledger_child.py")
needs_posix = pytest.mark.skipif(os.name != "posix", reason="kill -9 and file size limits are POSIX")


def start(*arguments: str) -> subprocess.Popen[str]:
    source = str(Path(crowdml.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, str(CHILD), *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )


def finish(*arguments: str) -> str:
    process = start(*arguments)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output


def assert_whole(ledger: Ledger) -> dict[int, tuple[int, int]]:
    """Each message has its two charges on its own span, each charge its message; the state is that of the last step."""
    charges = Counter((each.first_sample, each.last_sample) for each in ledger.charges())
    waiting = {message.seq: message.body.split(b" ")[:3] for message in ledger.resend()}
    spans = {seq: (int(first), int(last)) for seq, (_, first, last) in waiting.items()}
    steps = ledger.next_seq(TASK)
    assert len(charges) == steps
    assert set(charges.values()) <= {2}
    assert set(spans.values()) <= set(charges)
    assert len(set(spans.values())) == len(spans)
    serials = sorted(serial for first, last in charges for serial in range(first, last + 1))
    assert len(serials) == len(set(serials)) == ledger.samples_given() == 5 * steps
    assert ledger.next_serial() > max(serials, default=-1)
    state = ledger.state(TASK)
    assert (state is None) == (steps == 0)
    if state is not None:
        seq, first, last = map(int, state.split())
        assert seq == steps - 1
        assert charges[first, last] == 2
    return spans


def kill_repeatedly(path: Path, kills: int, seed: int) -> None:
    moments = random.Random(seed)
    charged: dict[int, tuple[int, int]] = {}
    acknowledged: set[int] = set()
    for _ in range(kills):
        process = start("steps", str(path))
        lines = [process.stdout.readline() for _ in range(moments.randrange(12))]
        try:
            process.wait(timeout=moments.uniform(0.0, 0.006))
        except subprocess.TimeoutExpired:
            process.kill()
        lines += process.communicate()[0].splitlines()
        assert process.returncode == -9
        for line in lines:
            match line.split():
                case ["charged", seq, first, last]:
                    assert int(seq) not in charged, "a sequence number came twice"
                    charged[int(seq)] = int(first), int(last)
                case ["acknowledged", seq]:
                    acknowledged.add(int(seq))
                case _:
                    raise AssertionError(line)
        with Ledger(path) as ledger:
            spans = assert_whole(ledger)
            kept = Counter((each.first_sample, each.last_sample) for each in ledger.charges())
        assert all(kept[span] == 2 for span in charged.values()), "a charge that was committed is gone or doubled"
        assert not acknowledged & set(spans)
        for seq, span in spans.items():
            assert charged.setdefault(seq, span) == span  # committed, and killed before it could say so
    assert charged


@needs_posix
def test_a_ledger_survives_a_few_kills_at_random_moments(tmp_path):
    kill_repeatedly(tmp_path / "ledger.db", kills=5, seed=1)


@needs_posix
@pytest.mark.kill
@pytest.mark.parametrize("seed", [2, 3])
def test_a_ledger_survives_many_kills_at_random_moments(tmp_path, seed):
    kill_repeatedly(tmp_path / "ledger.db", kills=15, seed=seed)


def look_behind_each_statement(folder: Path, every: int) -> None:
    finish("statements", str(folder), str(every))
    steps_left = []
    for home in sorted(folder.iterdir(), key=lambda home: int(home.name)):
        with Ledger(home / "ledger.db") as ledger:
            assert_whole(ledger)
            steps_left.append(ledger.next_seq(TASK))
            span = ledger.take_serials(5)  # and it goes on
            ledger.charge(TASK, [charge(span[0], span[-1])], [PLENTY], outbox={ledger.next_seq(TASK): b"more"})
    assert steps_left == sorted(steps_left)
    assert set(steps_left) == {0, 1, 2}


@needs_posix
def test_a_kill_before_every_fifth_statement_from_birth_on_leaves_whole_steps(tmp_path):
    look_behind_each_statement(tmp_path, every=5)


@needs_posix
@pytest.mark.kill
def test_a_kill_before_any_statement_from_birth_on_leaves_whole_steps(tmp_path):
    look_behind_each_statement(tmp_path, every=1)


def test_files_cut_between_any_two_writes_of_a_step_hold_the_step_whole_or_not_at_all(tmp_path):
    """SQLite keeps the old pages in `-journal` until the new ones are in the file: a crash leaves some of both."""
    path, log = tmp_path / "ledger.db", tmp_path / "ledger.db-journal"
    left: list[tuple[bytes, bytes]] = []

    def copy(_: str) -> None:
        left.append((path.read_bytes(), log.read_bytes()))

    with Ledger(path) as ledger:
        ledger.take_serials(10)
        ledger.charge(TASK, [charge(0, 4)], [PLENTY], outbox={0: b"a" * 90_000}, state=b"one" * 9000)
        before = path.read_bytes()
        ledger._connection.execute("pragma cache_size = 1")  # then pages go to the file long before the commit
        ledger._connection.set_trace_callback(copy)
        two = b"two" * 9000
        ledger.charge(TASK, [charge(5, 9), charge(5, 9)], [PLENTY], outbox={1: b"b" * 90_000}, state=two, done=[0])
        ledger._connection.set_trace_callback(None)
        copy("after")
        assert left[-2][0] not in (before, left[-1][0])  # some of its pages, and not all
        assert left[-1][1] == b""
    whole = left[-2][1]
    cut = [(before, whole[:size]) for size in range(0, len(whole), 4099)]
    found = []
    for number, (data, journal) in enumerate([*cut, *left]):
        home = tmp_path / str(number)
        home.mkdir()
        (home / "ledger.db").write_bytes(data)
        (home / "ledger.db-journal").write_bytes(journal)
        with Ledger(home / "ledger.db") as made:
            found.append((len(made.charges()), [len(each.body) for each in made.resend()], made.state(TASK)))
    assert found[:-1] == [(1, [90_000], b"one" * 9000)] * (len(found) - 1)
    assert found[-1] == (3, [90_000], two)
    assert len(found) > 10


@needs_posix
def test_a_full_disk_is_one_sentence_writes_no_half_a_step_and_passes_when_there_is_room_again(tmp_path):
    path = tmp_path / "ledger.db"
    done, _, sentence = finish("full", str(path)).partition(" ")
    assert f"the ledger {path} could not be written: " in sentence
    assert "Nothing was charged and nothing was sent. Free some space" in sentence
    assert int(done) > 1
    with Ledger(path) as ledger:
        assert_whole(ledger)
        assert ledger.next_seq(TASK) == int(done) + 5


@needs_posix
def test_a_disk_too_full_for_a_new_ledger_is_left_as_it_was(tmp_path):
    sentence, files = finish("born", str(tmp_path / "ledger.db")).splitlines()
    assert "could not be written" in sentence
    assert files == ""


def test_a_database_at_its_largest_size_is_a_full_disk(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.take_serials(1)
        pages = ledger._connection.execute("pragma page_count").fetchone()[0]
        ledger._connection.execute(f"pragma max_page_count = {pages + 2}")
        with pytest.raises(LedgerError, match="database or disk is full"):
            ledger.charge(TASK, [charge(0, 0)], [PLENTY], outbox={0: b"x" * 100_000}, state=b"s")
        assert (ledger.charges(), ledger.resend(), ledger.state(TASK)) == ((), (), None)
        ledger._connection.execute("pragma max_page_count = 1000000")
        ledger.charge(TASK, [charge(0, 0)], [PLENTY], outbox={0: b"x" * 100_000}, state=b"s")
        assert len(ledger.charges()) == 1


def made(path: Path) -> Path:
    with Ledger(path) as ledger:
        ledger.take_serials(20)
        ledger.charge(TASK, [charge(0, 19)], [PLENTY])
    return path


def edit(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "ledger.db"
    path.write_bytes(b"these are not the charges you are looking for" * 100)
    with pytest.raises(LedgerError, match=r"cannot be trusted: file is not a database\. Nothing was sent\. Move"):
        Ledger(path)
    assert path.read_bytes().startswith(b"these are not")


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "ledger.db"
    path.touch()
    with pytest.raises(LedgerError, match="no record of any migration"):
        Ledger(path)


def test_a_ledger_with_a_damaged_page_is_refused(tmp_path):
    path = made(tmp_path / "ledger.db")
    content = bytearray(path.read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 200] = os.urandom(200)
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="cannot be trusted"):
        Ledger(path)


def test_a_ledger_cut_short_is_refused(tmp_path):
    path = made(tmp_path / "ledger.db")
    path.write_bytes(path.read_bytes()[: 2 * 4096])
    with pytest.raises(LedgerError, match="Nothing was sent"):
        Ledger(path)


def test_a_ledger_from_a_newer_version_is_refused(tmp_path):
    path = made(tmp_path / "ledger.db")
    edit(path, "insert into migration values (99, '0099_future')")
    with pytest.raises(LedgerError, match=f"at migration 99, and this one knows {len(migrations())}"):
        Ledger(path)


def test_a_ledger_without_the_record_of_a_migration_is_refused(tmp_path):
    path = made(tmp_path / "ledger.db")
    edit(path, "drop trigger migration_is_never_deleted", "delete from migration where number = 2")
    with pytest.raises(LedgerError, match="lacks the record of a migration"):
        Ledger(path)


def test_a_ledger_that_lost_a_trigger_is_refused(tmp_path):
    path = made(tmp_path / "ledger.db")
    edit(path, "drop trigger charge_is_never_deleted")
    with pytest.raises(LedgerError, match="tables and triggers"):
        Ledger(path)


@pytest.mark.parametrize("loss", ["pure minus one", "", "pure -1", "zcdp 1e-3", "pure " + "9" * 5000])
def test_a_loss_that_cannot_be_read_is_refused_wherever_it_matters(tmp_path, loss):
    with Ledger(made(tmp_path / "ledger.db")) as ledger:
        ledger._connection.execute(
            "insert into charge select id + 1, task, mechanism, ?, ?, unit, adjacency, observer, scope, first_sample, "
            "last_sample, level, charged_at, device, alone, device_alone from charge",
            (loss, loss),
        )
        budget = Budget(Fraction(1), 1e-6, 100)
        for ask in (
            lambda: ledger.charge(TASK, [charge(3, 3)], [budget], outbox={0: b"x"}),
            lambda: ledger.check(TASK, [charge(3, 3)], [budget]),
            lambda: sample_total(ledger, 3),
            lambda: ledger.dearest_sample(1e-6),
            ledger.device_total,
            ledger.charges,
        ):
            with pytest.raises(LedgerError, match="cannot be trusted: a charge holds the loss"):
                ask()
        assert ledger.resend() == ()


def test_a_lost_ledger_is_not_begun_anew_where_one_must_exist(tmp_path):
    with pytest.raises(LedgerError, match="is not there: what this device has given is not known"):
        Ledger(tmp_path / "ledger.db", must_exist=True)
    assert list(tmp_path.iterdir()) == []


def test_a_lost_ledger_that_left_its_log_is_not_begun_anew(tmp_path):
    (tmp_path / "ledger.db-wal").write_bytes(b"charges not yet in the file")
    with pytest.raises(LedgerError, match=r"though .*ledger\.db-wal is"):
        Ledger(tmp_path / "ledger.db")


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(LedgerError, match="could not be written: No such file or directory"):
        Ledger(tmp_path / "nowhere" / "ledger.db")


def test_a_ledger_in_use_by_another_process_is_said(tmp_path):
    path = made(tmp_path / "ledger.db")
    with Ledger(path) as ledger:
        ledger._connection.execute("pragma busy_timeout = 0")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("begin immediate")
        with pytest.raises(LedgerError, match="in use by another process"):
            ledger.take_serials(1)
        other.close()
        ledger.take_serials(1)


@needs_posix
def test_only_the_owner_may_read_a_ledger(tmp_path):
    path = made(tmp_path / "ledger.db")
    path.chmod(0o644)
    with Ledger(path) as ledger:
        ledger.take_serials(1)
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("ledger.db", "ledger.db-journal"), 0o600)


def test_a_ledger_is_written_through_to_the_disk(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        settings = [
            ledger._connection.execute(f"pragma {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    assert settings == ["truncate", 2, 1]


def test_an_older_ledger_is_brought_up_to_date_and_keeps_its_charges(tmp_path, monkeypatch):
    from crowdml.storage import migrations as module

    path = made(tmp_path / "ledger.db")
    note = "create table note (text text not null) strict;\n"
    later = (*migrations(), module.Migration(len(migrations()) + 1, "9999_note", note))
    module._expected_schema.cache_clear()
    monkeypatch.setattr(module, "migrations", lambda: later)
    try:
        with Ledger(path) as ledger:
            assert len(ledger.charges()) == 1
            assert module.recorded(ledger._connection)[-1] == (len(later), "9999_note")
    finally:
        module._expected_schema.cache_clear()


def test_a_migration_that_fails_leaves_nothing_of_itself(tmp_path):
    from crowdml.storage import migrations as module

    connection = sqlite3.connect(made(tmp_path / "ledger.db"), isolation_level=None)
    before = module.schema(connection)
    broken = module.Migration(
        6, "0006_broken", "create table note (text text) strict;\ninsert into nowhere values (1);\n"
    )
    with pytest.raises(sqlite3.OperationalError):
        module.apply(connection, (broken,))
    assert module.schema(connection) == before
    assert module.recorded(connection)[-1][0] == len(migrations())
    connection.close()


def test_the_migrations_are_numbered_from_one_without_a_gap():
    assert [migration.number for migration in migrations()] == list(range(1, len(migrations()) + 1))
