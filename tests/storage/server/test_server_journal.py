"""The journal: once, in order, chained; reduced behind snapshots; exported without identities."""

from __future__ import annotations

import hashlib
import sqlite3
import tempfile
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_builders import NOW, TASK, check_in, key, name, prepare

from crowdml.storage.server import Declined, Entry, Publication, Store, StoreError, journal
from crowdml.storage.server.journal import PAGE, kept_versions
from crowdml.wire.envelopes import open_signed
from crowdml.wire.receipts import chain_next, chain_start


def test_appended_check_ins_get_the_next_indexes_and_links_of_the_chain(url):
    rows = [check_in(0, 1), check_in(1, 1), check_in(0, 2)]
    with Store(url) as store:
        task = prepare(store)
        answers = store.append(task, rows)
        chain = chain_start(task)
        for index, (row, answer) in enumerate(zip(rows, answers, strict=True), start=1):
            chain = chain_next(chain, task, row.device, row.seq, row.hash)
            assert answer == Entry(row.device, row.seq, index, row.hash, chain, True)
    with Store(url) as store:
        assert [data for _, data in store.tail(task)] == [row.signed for row in rows]
        assert store.head(task) == store.verify_chain(task)
        assert {device: last.seq for device, last in store.last_seq(task).items()} == {name(0): 2, name(1): 1}
        assert store.entry(task, name(1), 1).index == 2
        assert store.entry(task, name(2), 1) is None


def test_the_same_bytes_again_are_answered_with_the_first_entry(url):
    with Store(url) as store:
        task = prepare(store)
        first = store.append(task, [check_in(0, 1), check_in(1, 1), check_in(0, 2)])
        again = store.append(task, [check_in(0, 2), check_in(0, 1), check_in(2, 1), check_in(2, 1)])
        assert [(each.index, each.is_new) for each in again] == [(3, False), (1, False), (4, True), (4, False)]
        assert [each.chain for each in again[:2]] == [first[2].chain, first[0].chain]
        assert store.head(task).index == 4


def test_other_bytes_under_a_used_seq_and_gaps_change_nothing(url):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1)])
        answers = store.append(
            task, [check_in(0, 1, "other"), check_in(0, 3), check_in(1, 2), check_in(0, 2), check_in(0, 2, "other")]
        )
        assert [getattr(each, "reason", "new") for each in answers] == [
            "other-bytes",
            "gap",
            "gap",
            "new",
            "other-bytes",
        ]
        assert [each.expected for each in answers if isinstance(each, Declined)] == [2, 2, 1, 3]
        assert store.head(task).index == 2


def test_devices_that_are_unknown_revoked_or_withdrawn_append_nothing(url):
    with Store(url) as store:
        task = prepare(store, devices=3)
        store.revoke(name(0), NOW)
        store.withdraw(name(1), NOW)
        answers = store.append(task, [check_in(0, 1), check_in(1, 1), check_in(9, 1), check_in(2, 1)])
        assert [getattr(each, "reason", "new") for each in answers] == ["revoked", "withdrawn", "unknown", "new"]
        assert store.head(task).index == 1


def test_tasks_have_journals_of_their_own(url):
    with Store(url) as store:
        one = prepare(store)
        other = store.add_task(b"another", "other", NOW)
        store.append(one, [check_in(0, 1), check_in(0, 2)])
        store.append(other, [check_in(0, 1, task=other)])
        assert store.head(one).index == 2
        assert store.head(other).index == 1
        assert open_signed(store.statement(name(0))).envelope.task == other
        store.append(one, [check_in(0, 3)])
        assert open_signed(store.statement(name(0))).statement.samples == 30


@pytest.mark.parametrize("seq", [0, -1, 2**63])
def test_a_seq_that_no_device_has_is_refused(seq):

    with Store("sqlite://") as store:
        task = prepare(store)
        with pytest.raises(StoreError, match=f"a check-in of seq {seq} .* Nothing was written"):
            store.append(task, [check_in(0, 1)._replace(seq=seq)])


def test_a_task_that_is_not_here_is_said(url):
    with Store(url) as store, pytest.raises(StoreError, match=f"no task {TASK.hex()[:12]} in this database"):
        store.append(TASK, [check_in(0, 1)])


def test_a_batch_that_fails_leaves_nothing_of_itself(url):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1)])
        with store.writing() as connection:  # a body where the next one must go
            connection.execute(sa.text("insert into body values (1, 3, :body)"), {"body": b"in the way"})
        with pytest.raises(StoreError, match="refused"):
            store.append(task, [check_in(0, 2), check_in(0, 3), check_in(0, 4)])
        assert store.head(task).index == 1
        assert store.last_seq(task)[name(0)].seq == 1
        store.verify_chain(task)


@pytest.mark.parametrize(
    "statement",
    [
        "update journal set seq = 9",
        "update journal set hash = chain",
        "update journal set statement = hash",
        'update journal set "index" = 7',
        "delete from journal",
        'update body set "index" = 9',
        "update task set name = 'other'",
    ],
)
def test_entries_bodies_and_tasks_cannot_be_edited(url, statement):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1)])
        with pytest.raises(StoreError, match="is never"), store.writing() as connection:
            connection.execute(sa.text(statement))
        store.verify_chain(task)


TAMPER = {
    "a hash": 'update journal set hash = zeroblob(32) where "index" = 2',
    "a chain": 'update journal set chain = zeroblob(32) where "index" = 2',
    "a seq": 'update journal set seq = 7 where "index" = 4',
    "a device": 'update journal set device = 3 where "index" = 2',
    "a body": "update body set signed = cast(replace(signed, '.', ',') as blob) where \"index\" = 3",
    "an entry gone": 'delete from journal where "index" = 2',
    "a last entry": "update latest set seq = seq + 1",
    "a last entry gone": "delete from latest where device = 1",
    "a snapshot's chain": "update snapshot set chain = zeroblob(32)",
}


@pytest.mark.parametrize("what", TAMPER)
def test_the_chain_finds_what_was_changed_behind_its_back(tmp_path, what):
    with Store(tmp_path / "server.db") as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1), check_in(1, 1), check_in(0, 2, size=50), check_in(1, 2)])
        store.snapshot(task, 4, store.head(task).chain, b"state")
        store.check()
    tampered = sqlite3.connect(tmp_path / "server.db")
    for trigger in ("journal_is_append_only", "journal_is_never_deleted", "body_is_never_edited"):
        tampered.execute(f"drop trigger {trigger}")
    assert tampered.execute(TAMPER[what]).rowcount > 0
    tampered.commit()
    tampered.close()
    with Store(tmp_path / "server.db") as store, pytest.raises(StoreError, match=r"cannot be trusted: .* journal"):
        store.verify_chain(task)


def test_any_flipped_byte_of_a_body_is_found(tmp_path):
    with Store(tmp_path / "server.db") as store:
        task = prepare(store)
        row = check_in(0, 1, "the one", size=300)
        store.append(task, [row])
        for place in range(0, len(row.signed), 41):
            flipped = bytearray(row.signed)
            flipped[place] ^= 1
            with store.writing() as connection:
                connection.execute(sa.text("drop trigger if exists body_is_never_edited"))
                connection.execute(sa.text("update body set signed = :data"), {"data": bytes(flipped)})
            with pytest.raises(StoreError, match="has a body of another hash"):
                store.verify_chain(task)


def test_a_snapshot_must_stand_on_the_journal(url):
    with Store(url) as store:
        task = prepare(store)
        start = store.head(task)
        store.snapshot(task, 0, start.chain, b"born")
        (entry,) = store.append(task, [check_in(0, 1)])
        with pytest.raises(StoreError, match="has another chain there"):
            store.snapshot(task, 1, start.chain, b"state")
        with pytest.raises(StoreError, match="has no such entry"):
            store.snapshot(task, 2, entry.chain, b"state")
        store.snapshot(task, 1, entry.chain, b"state", b"published")
        store.snapshot(task, 1, entry.chain, b"state", b"published")  # again: nothing changes
        with pytest.raises(StoreError, match="the fold did not repeat itself"):
            store.snapshot(task, 1, entry.chain, b"another state")
        found = store.last_snapshot(task)
        assert (found.index, found.chain, found.state, found.published) == (1, entry.chain, b"state", b"published")
        assert store.last_snapshot(task, upto=0).state == b"born"


def test_a_snapshot_whose_state_was_changed_is_refused(url):
    with Store(url) as store:
        task = prepare(store)
        store.snapshot(task, 0, store.head(task).chain, b"state")
        with store.writing() as connection:
            connection.execute(sa.text("update snapshot set state = :state"), {"state": b"other"})
        with pytest.raises(StoreError, match="state is not what was written"):
            store.last_snapshot(task)


def test_without_a_snapshot_nothing_is_reduced(url):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, seq) for seq in range(1, 5)])
        assert store.reduce(task, 4).bodies == 0
        assert len(list(store.tail(task))) == 4


def test_a_check_in_whose_totals_fell_is_refused_within_a_batch_too(url):
    """Review 2, privacy finding 2. Each is compared with the device's entry before it, whichever batch that was in."""
    with Store(url) as store:
        task = prepare(store)
        rows = [check_in(0, 1, samples=10), check_in(0, 2, samples=9), check_in(1, 1, samples=5), check_in(0, 2)]
        answers = store.append(task, rows)
        assert [type(each).__name__ for each in answers] == ["Entry", "Declined", "Entry", "Entry"]
        assert answers[1] == Declined(name(0), 2, "fell", 2)
        assert store.append(task, [check_in(0, 3, samples=19)]) == [Declined(name(0), 3, "fell", 3)]
        assert [each.is_new for each in store.append(task, [check_in(0, 1, samples=10)])] == [False]
        assert set(store.statements(task, {name(0), name(1), name(2)})) == {name(0), name(1)}


def test_reduced_bodies_are_gone_but_for_each_devices_signed_statement(url):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1), check_in(1, 1), check_in(0, 2), check_in(0, 3)])
        store.snapshot(task, 4, store.head(task).chain, b"four")
        store.append(task, [check_in(0, 4)])
        reduced = store.reduce(task, 5)
        assert (reduced.index, reduced.bodies) == (4, 3)  # entry 2 is the last of device 1
        assert store.counts().bodies == 2
        assert open_signed(store.statement(name(1))).envelope.seq == 1
        assert [index for index, _ in store.tail(task, 4)] == [5]
        with pytest.raises(StoreError, match=r"entry 1 .* was reduced"):
            list(store.tail(task))
        assert [index for index, _ in store.kept_bodies(task)] == [2, 5]
        assert store.verify_chain(task).index == 5
        assert store.append(task, [check_in(0, 1)])[0].index == 1, "a reduced entry still answers its repetition"
        store.append(task, [check_in(1, 2)])
        assert store.counts().bodies == 2, "entry 2 is nobody's last any more"
        assert store.reduce(task, 6).bodies == 0


def test_statements_are_reduced_but_for_each_devices_last_in_the_task(url):
    """Review 2, network finding L1: statements stayed for ever, up to 32 kB of each check-in."""
    with Store(url) as store:
        task = prepare(store)

        def said() -> list[int]:
            with store.reading() as connection:
                rows = connection.execute(sa.text('select "index" from journal where statement is not null'))
                return sorted(row[0] for row in rows)

        store.append(task, [check_in(0, 1), check_in(1, 1), check_in(0, 2), check_in(0, 3)])
        store.snapshot(task, 4, store.head(task).chain, b"four")
        assert said() == [1, 2, 3, 4]
        store.reduce(task, 4)
        assert said() == [2, 4]
        store.append(task, [check_in(0, 4), check_in(0, 5), check_in(2, 1)])
        assert said() == [2, 5, 6, 7], "entry 4 was kept as the last of its device, and is so no more"
        assert store.append(task, [check_in(1, 2, samples=9)]) == [Declined(name(1), 2, "fell", 2)], "entry 2 is known"
        store.append(task, [check_in(1, 2)])
        store.snapshot(task, 8, store.head(task).chain, b"eight")
        store.reduce(task, 8, after=4)
        assert said() == [6, 7, 8]
        assert set(store.statements(task, {name(each) for each in range(3)})) == {name(0), name(1), name(2)}
        assert [each.statement is None for each in store.given(name(0))] == [False, True, True, True, True]
        assert store.verify_chain(task).index == 8


def test_statements_of_a_store_from_before_are_erased_in_steps(url, monkeypatch):
    """Review 2, network finding L1: entries that an earlier version reduced have theirs."""
    monkeypatch.setattr(journal, "STEP", 3)
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, seq) for seq in range(1, 11)])
        store.snapshot(task, 10, store.head(task).chain, b"ten")
        with store.writing() as connection:
            connection.execute(sa.text("update snapshot set verified = 1"))
        store.append(task, [check_in(0, 11)])
        store.snapshot(task, 11, store.head(task).chain, b"eleven")
        store.reduce(task, 11, after=10)
        assert [each.statement is None for each in store.given(name(0))] == [False] + [True] * 10


def test_a_journal_that_was_changed_is_not_reduced(tmp_path):
    with Store(tmp_path / "server.db") as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1), check_in(0, 2), check_in(0, 3)])
        store.snapshot(task, 3, store.head(task).chain, b"three")
        with store.writing() as connection:
            connection.execute(sa.text("drop trigger journal_is_append_only"))
            connection.execute(sa.text('update journal set hash = zeroblob(32) where "index" = 1'))
        with pytest.raises(StoreError, match=r"entry 1 .* does not continue the chain"):
            store.reduce(task, 3)
        assert store.counts().bodies == 3


def test_a_long_tail_comes_whole_and_in_order(url):
    many = 2 * PAGE + 7
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, seq) for seq in range(1, many + 1)])
        assert [index for index, _ in store.tail(task)] == list(range(1, many + 1))
        store.snapshot(task, many, store.head(task).chain, b"all")
        assert store.reduce(task, many).bodies == many - 1


def test_a_transcript_has_no_identity_and_no_time(url):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(2, 1), check_in(0, 1), check_in(2, 2)])
        start, contributions = store.export_transcript(task)
        found = list(contributions)
        assert start is None
        assert [(each.index, each.sender, each.body) for each in found] == [
            (1, 1, b"2:1:"),
            (2, 2, b"0:1:"),
            (3, 1, b"2:2:"),
        ]
        text = repr(found)
        assert not any(name(number) in text or repr(key(number)) in text for number in range(3))
        assert NOW[:10] not in text


actions = st.lists(
    st.one_of(
        st.tuples(
            st.just("append"), st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 1)), min_size=1, max_size=6)
        ),
        st.tuples(st.just("snapshot"), st.none()),
        st.tuples(st.just("reduce"), st.integers(0, 40)),
        st.tuples(st.just("reopen"), st.none()),
    ),
    max_size=14,
)


def fold(state: bytes, index: int, signed: bytes) -> bytes:
    """Stands for the server's state: it depends on every body and on their order."""
    return hashlib.sha256(state + index.to_bytes(8, "big") + signed).digest()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(actions)
def test_whatever_happens_a_replay_from_any_snapshot_ends_in_the_state_of_the_uninterrupted_fold(script):
    """Appends with repetitions and gaps, snapshots, reductions and restarts, in any order."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder) / "server.db")
        try:
            task = prepare(store, devices=4)
            kept: list[bytes] = []
            states = [b"start"]
            seqs = [0, 0, 0, 0]
            for action, detail in script:
                match action:
                    case "append":
                        rows = [check_in(device, max(1, seqs[device] + 1 + shift)) for device, shift in detail]
                        for row, answer in zip(rows, store.append(task, rows), strict=True):
                            if isinstance(answer, Entry) and answer.is_new:
                                kept.append(row.signed)
                                states.append(fold(states[-1], len(kept), row.signed))
                                seqs[[name(n) for n in range(4)].index(row.device)] = row.seq
                    case "snapshot":
                        head = store.head(task)
                        assert head.index == len(kept)
                        store.snapshot(task, head.index, head.chain, states[-1])
                    case "reduce":
                        store.reduce(task, detail)
                    case _:
                        store.close()
                        store = Store(Path(folder) / "server.db")
                for found in (store.last_snapshot(task), store.oldest_snapshot(task)):
                    begin, state = (0, b"start") if found is None else (found.index, found.state)
                    tail = list(store.tail(task, begin))
                    assert [index for index, _ in tail] == list(range(begin + 1, len(kept) + 1))
                    for index, signed in tail:
                        state = fold(state, index, signed)
                    assert state == states[-1]
                assert store.verify_chain(task).index == len(kept)
                start, contributions = store.export_transcript(task)
                after = 0 if start is None else start.index
                assert [each.body for each in contributions] == [
                    open_signed(each).envelope.body for each in kept[after:]
                ]
                for device in range(4):
                    last = [data for data in kept if open_signed(data).envelope.sender == name(device)][-1:]
                    assert store.statement(name(device)) == (last[0] if last else None)
        finally:
            store.close()


@given(st.integers(1, 6), st.lists(st.integers(1, 40), max_size=60))
def test_thinning_again_and_again_is_thinning_once(keep, jumps):
    everything: list[int] = []
    kept: list[int] = []
    for jump in jumps:
        everything.append((everything[-1] if everything else 0) + jump)
        kept = kept_versions([*kept, everything[-1]], everything[-1], keep)
        assert kept == kept_versions(everything, everything[-1], keep)
        assert set(range(everything[-1] - keep + 1, everything[-1] + 1)) & set(everything) <= set(kept)


def test_a_thousand_versions_leave_few_and_the_last_ones_all():
    kept = kept_versions(range(1001), 1000, 16)
    assert kept[-16:] == list(range(985, 1001))
    assert len(kept) < 16 + 9 * 7
    assert 0 in kept


def test_versions_are_thinned_as_they_are_published_and_never_change(url):
    with Store(url) as store:
        task = prepare(store)
        assert store.last_publication(task) is None
        for version in range(40):
            store.publish(task, Publication(version, "sgd/params/1", b"%d" % version), keep=4)
        kept = [version for version in range(40) if store.publication(task, version) is not None]
        assert kept == kept_versions(range(40), 39, 4)
        assert store.last_publication(task) == Publication(39, "sgd/params/1", b"39")
        assert store.publication(task, 38).body == b"38"
        assert store.publication(task, 1) is None
        store.publish(task, Publication(39, "sgd/params/1", b"39"))
        with pytest.raises(StoreError, match=r"version 39 .* was published with other bytes"):
            store.publish(task, Publication(39, "sgd/params/1", b"other"))


def test_the_entries_of_one_commit_are_found_again_by_any_of_them(url):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1), check_in(1, 1), check_in(2, 1)])
        store.append(task, [check_in(0, 2)])
        store.append(task, [check_in(1, 2), check_in(0, 2), check_in(2, 2)])  # one of them is there already
        found = [store.together(task, index) for index in range(1, 7)]
        assert [([entry.index for entry in entries], place) for entries, place in found] == [
            ([1, 2, 3], 0), ([1, 2, 3], 1), ([1, 2, 3], 2), ([4], 0), ([5, 6], 0), ([5, 6], 1),
        ]  # fmt: skip
        assert found[1][0] == list(store.entries(task))[:3]
        with pytest.raises(StoreError, match="no entry 7"):
            store.together(task, 7)


def test_the_last_body_of_a_device_goes_as_soon_as_it_has_a_later_one(url):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1), check_in(1, 1), check_in(1, 2)])
        store.snapshot(task, 3, store.head(task).chain, b"state")
        assert store.reduce(task, 3).bodies == 1
        assert store.counts().bodies == 2, "the last of each device"
        assert store.statement(name(0)) == check_in(0, 1).signed
        store.append(task, [check_in(0, 2), check_in(0, 3)])
        assert store.counts().bodies == 3, "what replaced it is behind no snapshot yet"
        assert store.statement(name(0)) == check_in(0, 3).signed
        store.verify_chain(task)
