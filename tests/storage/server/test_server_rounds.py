"""Rounds in the store: what was said in one comes back, bodies go with sums, and the chain stays whole."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
from server_builders import NOW, check_in, key, name, prepare

from crowdml.storage.server import Entry, JournalRow, Publication, RoundMessage, RoundRow, Store, StoreError
from crowdml.storage.server import rounds as store_rounds
from crowdml.storage.server.operating import find_devices, recent_devices, spent_statements
from crowdml.wire.envelopes import open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.statements import Statement

SERVER_KEY = Key.from_secret(bytes([9]) * 32)
PUBLISHED = Publication(3, "sgd/params/1", b"weights")


def total(task: bytes, seq: int, body: bytes = b"sum") -> JournalRow:
    from crowdml.messages import SERVER, Envelope

    envelope = Envelope(task, SERVER_KEY.id, frozenset((SERVER,)), seq, "sgd/total/1", body)
    return JournalRow.of(open_signed(sign(envelope, Statement((), 0, ()), SERVER_KEY)), NOW)


def open_one(store: Store, task: bytes, number: int = 1) -> RoundRow:
    store.open_round(task, number, NOW)
    return RoundRow(number, "advertise", NOW)


def go_on(store: Store, task: bytes, row: RoundRow, phase: str, **more: Any) -> RoundRow:
    row = replace(row, phase=phase, fixed_at=NOW, devices=3)
    named: dict[str, Any] = {"roster": b"roster", "sharers": b"", "survivors": b"", "publication": None, **more}
    store.change_round(task, row, **named)
    return row


def mask(store: Store, task: bytes, number: int, *devices: int, seq: int = 1) -> list[Entry]:
    rows = [check_in(device, seq, size=500) for device in devices]
    answers = store.take(task, rows, [(number, hashlib.sha256(row.signed).digest()) for row in rows], [])
    assert all(isinstance(answer, Entry) for answer in answers)
    return answers  # pyright: ignore[reportReturnType]


def end(store: Store, task: bytes, row: RoundRow, phase: str = "summed", seq: int = 1, **more: Any) -> Entry | None:
    ended = replace(row, phase=phase, ended_at=NOW, **more)
    return store.end_round(task, ended, total(task, seq) if phase == "summed" else None)


def test_a_round_comes_back_with_all_that_was_said_in_it(url):
    with Store(url) as store:
        task = prepare(store)
        row = open_one(store, task)
        said = [RoundMessage(1, name(device), "secagg/advert/1", b"advert %d" % device) for device in range(3)]
        assert store.take(task, [], [], said) == []
        row = go_on(store, task, row, "share")
        store.take(task, [], [], [RoundMessage(1, name(0), "secagg/shares/1", b"shares")])
        row = go_on(store, task, row, "mask", sharers=b"\xe0", publication=PUBLISHED)
        entries = mask(store, task, 1, 0, 2)
    with Store(url) as store:
        (found,) = store.open_rounds(task)
        assert (found.row.number, found.row.phase, found.row.devices) == (1, "mask", 3)
        assert (found.roster, found.sharers, found.survivors) == (b"roster", b"\xe0", b"")
        assert found.publication == PUBLISHED
        kinds = sorted((device, kind) for device, kind, _ in found.said)
        assert kinds == sorted(
            [(name(device), "secagg/advert/1") for device in range(3)]
            + [(name(0), "secagg/shares/1"), (name(0), "secagg/masked/1"), (name(2), "secagg/masked/1")]
        )
        assert [(at, who) for at, who, _ in store.masked_bodies(task, 1, 0)] == [
            (entries[0].index, name(0)),
            (entries[1].index, name(2)),
        ]
        assert [at for at, _, _ in store.masked_bodies(task, 1, entries[0].index)] == [entries[1].index]
        assert store.last_round(task) == 1


def test_bodies_go_with_the_sum_that_has_them_and_the_chain_stays_whole(url):
    with Store(url) as store:
        task = prepare(store, devices=4)
        row = go_on(store, task, open_one(store, task), "mask", sharers=b"\xf0", publication=PUBLISHED)
        first, second = mask(store, task, 1, 0, 1)
        store.keep_sums(task, [(1, first.index, b"sum of one")])
        assert store.counts().bodies == 1
        (found,) = store.open_rounds(task)
        assert (found.folded, found.sum) == (first.index, b"sum of one")
        assert [at for at, _, _ in store.masked_bodies(task, 1, found.folded)] == [second.index]
        with pytest.raises(StoreError, match="is in no sum"):
            list(store.masked_bodies(task, 1, 0))
        store.keep_sums(task, [(1, second.index, b"sum of two")])
        assert store.open_rounds(task)[0].sum == b"sum of two"
        (third,) = mask(store, task, 1, 2)
        entry = end(store, task, row, survived=3)
        assert entry is not None
        assert (entry.device, entry.seq, entry.index) == (SERVER_KEY.id, 1, third.index + 1)
        assert store.counts().bodies == 1, "the total's"
        assert [at for at, _ in store.totals(task)] == [entry.index]
        assert store.totals_count(task) == 1
        assert store.open_rounds(task) == []
        assert store.check() == {task: 4}
        assert store.entry(task, name(0), 1) is not None


def test_an_abandoned_round_leaves_its_row_and_the_entries_of_its_vectors(url):
    with Store(url) as store:
        task = prepare(store)
        row = go_on(store, task, open_one(store, task), "mask", sharers=b"\xe0", publication=PUBLISHED)
        mask(store, task, 1, 0, 1)
        assert end(store, task, row, "abandoned", cause="survivors", why="2 devices survived; 3 are needed") is None
        store.open_round(task, 2, NOW)
        newest, last = store.rounds(task)
        assert (newest.number, newest.phase, last.phase, last.cause) == (2, "advertise", "abandoned", "survivors")
        assert store.round_counts(task) == {"survivors": 1}
        assert store.counts().bodies == 0
        assert store.check() == {task: 2}
        assert store.head(task).index == 2


def test_a_vector_that_is_sent_again_is_kept_once(url):
    with Store(url) as store:
        task = prepare(store)
        go_on(store, task, open_one(store, task), "mask", sharers=b"\xe0", publication=PUBLISHED)
        row = check_in(0, 1)
        notes = [(1, b"h" * 32)]
        (first,), (again,) = store.take(task, [row], notes, []), store.take(task, [row], notes, [])
        assert isinstance(first, Entry)
        assert isinstance(again, Entry)
        assert (first.is_new, again.is_new, again.index) == (True, False, first.index)
        assert len(store.open_rounds(task)[0].said) == 1


def test_the_server_is_in_the_journal_and_in_no_list_of_devices(url):
    with Store(url) as store:
        task = prepare(store)
        before = store.counts().devices
        row = go_on(store, task, open_one(store, task), "mask", sharers=b"\xe0", publication=PUBLISHED)
        mask(store, task, 1, 0)
        end(store, task, row)
        assert store.counts().devices == before == 3
        assert store.device(SERVER_KEY.id) is None
        assert SERVER_KEY.id not in store.active_keys()
        assert {each.id for each in store.devices()} == {name(device) for device in range(3)}
        assert {each.device.id for each in find_devices(store)} == {name(device) for device in range(3)}
        assert store.contributors(task) == recent_devices(store, task, 0) == spent_statements(store)[0] == 1
        assert set(store.last_seq(task)) == {name(0)}
        assert not store.revoke(SERVER_KEY.id, NOW)
        assert not store.withdraw(SERVER_KEY.id, NOW)


def test_the_last_statement_is_what_a_device_said_after_its_vector(url):
    with Store(url) as store:
        task = prepare(store)
        row = go_on(store, task, open_one(store, task), "mask", sharers=b"\xe0", publication=PUBLISHED)
        mask(store, task, 1, 0, 1)
        first, signed = store.statement(name(0)), check_in(0, 1, "agreed").signed
        store.take(task, [], [], [RoundMessage(1, name(0), "secagg/agreement/1", b"agreed", signed)])
        assert first != store.statement(name(0)) == signed
        end(store, task, row)
        assert store.statement(name(0)) == signed
        assert store.statement(name(1)) is None, "its vector is gone, and it said nothing since"
        store.open_round(task, 2, NOW)
        mask(store, task, 2, 0, seq=2)
        assert store.statement(name(0)) == check_in(0, 2, size=500).signed, "the vector is later"
        store.take(task, [], [], [RoundMessage(2, name(0), "secagg/agreement/1", b"agreed", b"again")])
        store.withdraw(name(0), NOW)
        assert store.statement(name(0)) is None


def test_the_last_statement_is_a_check_in_of_another_task_that_came_after_the_round(url):
    """Review 3, privacy finding 1: what was said in a round hid every later check-in of another task."""
    with Store(url) as store:
        task = prepare(store)
        other = store.add_task(b"another", "other", NOW)
        row = go_on(store, task, open_one(store, task), "mask", sharers=b"\xe0", publication=PUBLISHED)
        mask(store, task, 1, 0)
        signed = check_in(0, 1, "agreed").signed
        store.take(task, [], [], [RoundMessage(1, name(0), "secagg/agreement/1", b"agreed", signed)])
        end(store, task, row)
        later = check_in(0, 1, task=other, samples=20)
        store.append(other, [later])
        assert store.statement(name(0)) == later.signed


def test_devices_that_are_left_out_are_forgotten_and_the_next_round_opens_with_the_cohort(url):
    with Store(url) as store:
        task = prepare(store)
        row = open_one(store, task)
        store.take(task, [], [], [RoundMessage(1, name(one), "secagg/advert/1", b"a") for one in range(3)])
        go_on(store, task, row, "share", without=(name(1),), then_open=2, at=NOW)
        first, second = store.open_rounds(task)
        assert {device for device, _, _ in first.said} == {name(0), name(2)}
        assert (second.row.number, second.row.phase, second.said) == (2, "advertise", ())


def test_old_rounds_are_forgotten_and_those_under_way_stay(url, monkeypatch):
    monkeypatch.setattr(store_rounds, "MOST_ROUNDS", 3)
    with Store(url) as store:
        task = prepare(store)
        kept = open_one(store, task, 1)
        for number in range(2, 9):
            row = open_one(store, task, number)
            end(store, task, row, "abandoned", cause="devices")
        numbers = [row.number for row in store.rounds(task)]
        assert numbers[0] == 8
        assert numbers[-1] == kept.number
        assert len(numbers) <= 5


def test_a_total_that_is_not_the_next_of_the_server_changes_nothing(url):
    with Store(url) as store:
        task = prepare(store)
        row = go_on(store, task, open_one(store, task), "mask", sharers=b"\xe0", publication=PUBLISHED)
        mask(store, task, 1, 0)
        with pytest.raises(StoreError, match="is not the next entry"):
            end(store, task, row, seq=2)
        assert len(store.open_rounds(task)) == 1
        assert store.counts().bodies == 1
        assert key(0) == store.active_keys()[name(0)]
