"""Places and letters in the store: one device a place, one place a device, and nothing by halves."""

from __future__ import annotations

import pytest
import sqlalchemy as sa
from server_builders import LATER, NOW, check_in, key, name, prepare

from crowdml.storage.server import Declined, Entry, JournalRow, Store, StoreError
from crowdml.storage.server.schema import letter


def post(store: Store, task: bytes, *said: tuple[int, int], keep: int = 2, at: str = NOW) -> list[Entry | Declined]:
    """(device, seq) for each check-in; device n stands at place 10 + n."""
    rows = [check_in(device, seq, at=at) for device, seq in said]
    return store.post(task, rows, [10 + device for device, _ in said], keep)


def indices(store: Store, task: bytes, *places: int, after: int = 0, upto: int = 10**6) -> list[int]:
    return [each.index for each in store.letters(task, places, after, upto)]


def stand(store: Store, devices: int = 3) -> bytes:
    task = prepare(store, devices)
    assert [store.claim(task, 10 + number, name(number)) for number in range(devices)] == ["new"] * devices
    return task


def test_a_place_has_one_device_and_a_device_one_place_of_a_task(url):
    with Store(url) as store:
        task, other = prepare(store), store.add_task(b"another", "other", NOW, "running")
        assert [store.claim(task, 10 + number, name(number)) for number in (0, 1)] == ["new", "new"]
        assert store.claim(task, 10, name(0)) == "again"
        assert store.claim(task, 10, name(2)) == "taken"
        assert store.claim(task, 12, name(0)) == "elsewhere"
        assert store.claim(task, 12, name(7)) == "unknown"
        assert store.claim(other, 10, name(1)) == "new"
        assert [(each.place, each.device) for each in store.standings(task)] == [(10, name(0)), (11, name(1))]
    with Store(url) as store:
        assert store.claim(task, 10, name(2)) == "taken"
        with pytest.raises(StoreError, match="no task"):
            store.claim(bytes(32), 0, name(0))


def test_a_letter_is_written_with_its_entry_and_the_newest_of_each_place_stay(url):
    with Store(url) as store:
        task = stand(store)
        answers = post(store, task, (0, 1), (1, 1), (0, 2), (0, 4), (0, 3), (1, 1), (9, 1))
        assert [type(each).__name__ for each in answers] == ["Entry"] * 3 + ["Declined"] + ["Entry"] * 2 + ["Declined"]
        assert indices(store, task, 10) == [3, 4], "seqs 2 and 3; what was refused or here already is no letter"
        assert indices(store, task, 10, 11) == [2, 3, 4]
        assert indices(store, task, 10, 11, after=2, upto=3) == [3]
        assert indices(store, task, 12) == []
        (first, *_) = store.letters(task, (11,), 0, 10)
        assert (first.key, first.signed) == (key(1), check_in(1, 1).signed)
        post(store, task, (1, 2), at=LATER)
        rows = [(each.letters, each.bytes, each.last_at, each.newest) for each in store.standings(task)]
        size = len(check_in(0, 1).signed)
        assert rows == [(3, 3 * size, NOW, 4), (2, 2 * size, LATER, 5), (0, 0, None, 0)]
        store.check()


def test_a_task_that_keeps_no_letters_counts_them_all_the_same(url):
    with Store(url) as store:
        task = stand(store)
        post(store, task, (0, 1), keep=0)
        assert indices(store, task, 10) == []
        assert [each.letters for each in store.standings(task)] == [1, 0, 0]


def test_what_cannot_be_kept_as_a_letter_is_not_in_the_journal_either(url, monkeypatch):
    with Store(url) as store:
        task = stand(store)
        monkeypatch.setattr(letter, "insert", lambda: sa.text("insert into nowhere values (1)"))
        with pytest.raises(StoreError):
            post(store, task, (0, 1))
        assert store.head(task).index == 0
        assert indices(store, task, 10) == []


def test_who_is_revoked_or_withdraws_is_read_no_more_and_leaves_its_place(url):
    with Store(url) as store:
        task = stand(store, 4)
        post(store, task, (0, 1), (1, 1), (2, 1))
        store.revoke(name(0), LATER)
        store.withdraw(name(1), LATER)
        assert indices(store, task, 10, 11, 12) == [3]
        assert [(each.place, each.device, each.last_at) for each in store.standings(task)] == [
            (10, None, NOW), (11, None, None), (12, name(2), NOW), (13, name(3), None),
        ]  # fmt: skip
        with store.reading() as connection:
            assert list(connection.execute(sa.select(letter.c.place).order_by(letter.c.place)).scalars()) == [10, 12]
        assert store.claim(task, 10, name(0)) == "unknown"
        store.invite(bytes(32), NOW, uses=1)
        store.enrol(bytes(32), key(8), NOW)
        assert store.claim(task, 11, name(8)) == "new"
        assert store.claim(task, 10, name(8)) == "elsewhere"
        store.check()


def test_letters_do_not_depend_on_the_bodies_of_the_journal(url):
    with Store(url) as store:
        task = stand(store)
        for seq in (1, 2, 3):
            post(store, task, (0, seq), (1, seq))
        head = store.head(task)
        store.snapshot(task, head.index, head.chain, b"state")
        store.reduce(task, head.index)
        assert store.counts().bodies == 2
        assert indices(store, task, 10, 11) == [3, 4, 5, 6]
        store.check()


def test_a_letter_that_is_not_what_was_journalled_is_found(tmp_path):
    with Store(tmp_path / "server.db") as store:
        task = stand(store)
        post(store, task, (0, 1))
        with store.writing() as connection:
            connection.execute(letter.update().values(signed=b"other"))
        with pytest.raises(StoreError, match="letter of entry 1 is not the one that was journalled"):
            store.check()


def test_many_places_at_once_are_one_transaction_of_bounded_size(url):
    with Store(url) as store:
        task = prepare(store, 40)
        assert {store.claim(task, number, name(number)) for number in range(40)} == {"new"}
        for seq in range(1, 4):
            rows: list[JournalRow] = [check_in(number, seq) for number in range(40)]
            assert all(isinstance(answer, Entry) for answer in store.post(task, rows, range(40), 1))
        assert indices(store, task, *range(40)) == list(range(81, 121))
