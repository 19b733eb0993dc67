"""The store when its process is killed, the disk is full, the database goes away, or two open it at once."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from server_builders import TASK, check_in, name, prepare

import crowdml
from crowdml.storage.server import Store, StoreError
from crowdml.storage.server.schema import HEAD

CHILD = Path(__file__).with_name("server_child.py")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="kill -9 and file size limits are POSIX")


def start(*arguments: str) -> subprocess.Popen[str]:
    source = str(Path(crowdml.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, str(CHILD), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def kill_repeatedly(url: str, kills: int, seed: int) -> None:
    """Every acknowledged entry is there as it was acknowledged, once; the rest is whole."""
    moments = random.Random(seed)
    acknowledged: dict[int, tuple[str, int, str, str]] = {}
    for _ in range(kills):
        process = start("appends", url)
        lines = [process.stdout.readline() for _ in range(moments.randrange(1, 60))]
        try:
            process.wait(timeout=moments.uniform(0.0, 0.02))
        except subprocess.TimeoutExpired:
            process.kill()
        lines += process.communicate()[0].splitlines(keepends=True)
        assert process.returncode == -9
        for line in lines:
            if line.endswith("\n"):
                index, device, seq, digest, chain = line.split()
                assert int(index) not in acknowledged, "an index was given twice"
                acknowledged[int(index)] = device, int(seq), digest, chain
        with Store(url) as store:
            head = store.verify_chain(TASK)
            assert head.index >= max(acknowledged)
            for index, (device, seq, digest, chain) in acknowledged.items():
                entry = store.entry(TASK, device, seq)
                assert (entry.index, entry.hash.hex(), entry.chain.hex()) == (index, digest, chain)
            found = store.last_snapshot(TASK)
            begin = 0 if found is None else found.index
            assert found is None or found.state == b"state after %d" % begin
            assert [index for index, _ in store.tail(TASK, begin)] == list(range(begin + 1, head.index + 1))
            started, contributions = store.export_transcript(TASK)
            assert len(list(contributions)) == head.index - (0 if started is None else started.index)
            store.check()
    assert len(acknowledged) > kills


def test_a_journal_survives_a_few_kills_at_random_moments(url):
    kill_repeatedly(url, kills=3, seed=1)


@pytest.mark.kill
@pytest.mark.parametrize("seed", [2, 3])
def test_a_journal_survives_many_kills_at_random_moments(url, seed):
    kill_repeatedly(url, kills=15, seed=seed)


@pytest.mark.kill
def test_letters_and_their_entries_survive_kills_together(url):
    moments, last = random.Random(4), 0
    for _ in range(3):
        process = start("posts", url)
        last = max(int(process.stdout.readline()) for _ in range(moments.randrange(1, 60)))
        process.kill()
        rest = process.communicate()[0].splitlines(keepends=True)
        last = max([last, *(int(line) for line in rest if line.endswith("\n"))])
        with Store(url) as store:
            head = store.verify_chain(TASK).index
            assert head >= last
            assert head % 5 == 0, "a batch is there whole"
            kept = [letter.index for letter in store.letters(TASK, range(5), 0, head)]
            assert kept == list(range(max(1, head - 14), head + 1)), "three of each place, and none without its entry"
            assert [each.letters for each in store.standings(TASK)] == [head // 5] * 5
            store.check()


def test_a_full_disk_is_one_sentence_leaves_whole_batches_and_passes_when_there_is_room_again(tmp_path):
    path = tmp_path / "server.db"
    output, _ = start("full", str(path)).communicate(timeout=60)
    done, _, sentence = output.partition(" ")
    assert f"the database {path} could not be written: " in sentence
    assert "Nothing was written. Free some space" in sentence
    assert sentence.count("\n") == 1
    assert int(done) > 1
    with Store(path) as store:
        assert store.check() == {TASK: 5 * (int(done) + 2)}


def test_a_disk_too_full_for_a_new_database_is_said(tmp_path):
    output, _ = start("born", str(tmp_path / "server.db")).communicate(timeout=60)
    assert "could not be written" in output
    with Store(tmp_path / "server.db") as store:  # with room again, the schema is made
        prepare(store)


def test_several_processes_that_open_a_new_database_at_once_make_its_schema_once(url):
    children = [start("opens", url) for _ in range(3)]
    assert [child.stdout.readline() for child in children] == ["ready\n"] * 3
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    assert [child.communicate(timeout=60)[0] for child in children] == [f"{TASK.hex()}\n"] * 3
    assert [child.returncode for child in children] == [0] * 3
    with Store(url) as store, store.reading() as connection:
        assert connection.exec_driver_sql("select version_num from alembic_version").fetchall() == [(HEAD,)]
        assert len(store.tasks()) == 1


@pytest.mark.postgres
def test_a_database_that_goes_away_is_said_and_used_again_when_it_is_back(postgresql, postgresql_url):
    import psycopg

    with Store(postgresql_url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1)])

        def cut() -> None:
            with psycopg.connect(postgresql, autocommit=True) as other:
                mine = (store.url.database,)
                other.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", mine)

        def write_half() -> None:
            with store.writing() as connection:
                cursor = connection.connection.cursor()
                cursor.execute("update device set last_index = 99")
                cut()
                cursor.execute("select 1")

        cut()
        with pytest.raises(StoreError, match=r"is away: .* to append it again is safe"):
            store.append(task, [check_in(0, 2)])
        (entry,) = store.append(task, [check_in(0, 2)])
        assert entry.index == 2
        with pytest.raises(StoreError, match="is away"):
            write_half()
        assert store.last_seq(task)[name(0)].seq == 2
        assert store.statement(name(0)) is not None
