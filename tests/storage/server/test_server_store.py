"""Tasks, invitations, devices, operators, sessions, events and numbers."""

from __future__ import annotations

import threading
from itertools import pairwise

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_builders import CODE, LATER, NOW, TASK, check_in, key, name, prepare

from crowdml.storage.server import EnrolmentRefused, Session, Store, StoreError
from crowdml.storage.server.operating import end_sheet


def refused(store: Store, code: bytes, number: int, at: str = NOW) -> EnrolmentRefused:
    with pytest.raises(EnrolmentRefused) as caught:
        store.enrol(code, key(number), at)
    return caught.value


def test_a_task_is_found_by_the_hash_of_its_bytes_and_added_once(url):
    with Store(url) as store:
        assert store.add_task(b"a task", "digits", NOW) == store.add_task(b"a task", "again", LATER) == TASK
        store.set_state(TASK, "running", LATER)
        found = store.task(TASK)
        assert (found.name, found.canonical, found.state) == ("digits", b"a task", "running")
        assert (found.created_at, found.changed_at) == (NOW, LATER)
        assert store.tasks("running") == store.tasks() == [found]
        assert store.tasks("draft") == []
        assert store.task(bytes(32)) is None


def test_a_state_that_no_task_has_is_refused(url):
    with Store(url) as store:
        store.add_task(b"a task", "digits", NOW)
        with pytest.raises(StoreError, match="a task cannot be 'broken'"):
            store.set_state(TASK, "broken", NOW)  # pyright: ignore[reportArgumentType]
        assert store.task(TASK).state == "draft"


def test_a_task_may_be_closed_to_those_it_did_not_invite(url):
    with Store(url) as store:
        store.add_task(b"a task", "digits", NOW)
        assert not store.task(TASK).closed
        store.set_closed(TASK, True, LATER)
        assert store.task(TASK).closed


def test_the_points_of_a_plot_are_thinned_and_keep_their_first_and_last(url):
    with Store(url) as store:
        store.add_task(b"a task", "digits", NOW)
        for index in range(1, 1_003):
            store.add_point(TASK, index, NOW, b"%d" % index)
        store.add_point(TASK, 1_002, NOW, b"again")
        found = store.points(TASK)
        assert 200 <= len(found) <= 400
        assert (found[0].index, found[-1].index, found[-1].figures) == (1, 1_002, b"again")
        places = [each.index for each in found]
        assert places == sorted(set(places))
        gaps = [after - before for before, after in pairwise(places)]
        assert max(gaps) <= 2 * (1_002 / len(places) + 1), "they stay spread over the whole life of the task"


def test_an_invitation_is_looked_up_by_its_code_and_is_not_used_by_that(url):
    with Store(url) as store:
        store.add_task(b"a task", "digits", NOW)
        store.invite(b"c" * 32, NOW, uses=2, tasks=[TASK], label="sheet")
        for _ in range(3):
            found = store.invitation(b"c" * 32)
            assert (found.used, found.uses, found.tasks, found.label) == (0, 2, (TASK,), "sheet")
        assert store.invitation(b"d" * 32) is None


@pytest.mark.parametrize("time", ["yesterday", "2025-01-31T12:00:00", ""])
def test_a_time_that_is_no_utc_time_is_refused(time):
    with Store("sqlite://") as store, pytest.raises(StoreError, match="is no UTC time in ISO 8601"):
        store.add_task(b"a task", "digits", time)


def test_times_are_kept_in_utc_and_sort_as_text():
    with Store("sqlite://") as store:
        store.add_task(b"a task", "digits", "2025-01-31T13:00:00+01:00")
        assert store.task(TASK).created_at == NOW


def test_a_device_enrols_once_however_often_it_asks(url):
    with Store(url) as store:
        task = store.add_task(b"a task", "digits", NOW)
        store.invite(CODE, NOW, ends_at=LATER, tasks=[task], label="ward 7")
        first = store.enrol(CODE, key(0), NOW)
        again = store.enrol(CODE, key(0), "2026-01-01T00:00:00Z")  # it has ended; the answer is still the first
        assert (first.device, first.is_new, first.tasks) == (name(0), True, (task,))
        assert (again.device, again.is_new, again.tasks) == (name(0), False, (task,))
        assert store.invitations()[0].used == 1
        found = store.device(name(0))
        assert (found.public_key, found.enrolled_at, found.invitations, found.is_active) == (
            key(0),
            NOW,
            ("ward 7",),
            True,
        )
        assert store.active_keys() == {name(0): key(0)}


def test_an_invitation_ends_by_its_uses_its_end_and_its_rate(url):
    with Store(url) as store:
        assert refused(store, CODE, 0).reason == "unknown-code"
        store.invite(CODE, NOW, uses=2)
        store.enrol(CODE, key(0), NOW)
        store.enrol(CODE, key(1), NOW)
        assert refused(store, CODE, 2).reason == "used-up"
        store.invite(b"e" * 32, NOW, uses=9, ends_at=LATER)
        assert refused(store, b"e" * 32, 2, LATER).reason == "ended"
        store.enrol(b"e" * 32, key(2), NOW)
        assert end_sheet(store, [b"e" * 32], NOW) == 1
        assert refused(store, b"e" * 32, 3).reason == "ended"
        store.invite(b"r" * 32, NOW, uses=9, rate=2)
        store.enrol(b"r" * 32, key(4), "2025-01-31T12:00:00Z")
        store.enrol(b"r" * 32, key(5), "2025-01-31T12:20:00Z")
        fast = refused(store, b"r" * 32, 6, "2025-01-31T12:50:00Z")
        assert fast.reason == "too-fast"
        assert fast.retry_after == 601
        store.enrol(b"r" * 32, key(6), "2025-01-31T13:00:01Z")
        assert [each.used for each in store.invitations()] == [3, 1, 2]
        assert store.device(name(3)) is None


def test_a_device_may_use_a_second_invitation_for_its_tasks(url):
    with Store(url) as store:
        one, other = store.add_task(b"a task", "one", NOW), store.add_task(b"other", "other", NOW)
        store.invite(CODE, NOW, tasks=[one])
        store.invite(b"2" * 32, NOW, tasks=[other])
        store.invite(b"*" * 32, NOW, label="everything")
        assert store.enrol(CODE, key(0), NOW).tasks == (one,)
        second = store.enrol(b"2" * 32, key(0), NOW)
        assert (second.is_new, second.tasks) == (False, (one, other))
        assert store.enrol(b"*" * 32, key(1), NOW).tasks == (one, other)
        third = store.add_task(b"third", "third", NOW)
        assert store.tasks_of(name(1)) == (one, other, third)
        assert store.tasks_of(name(0)) == (one, other)
        assert store.tasks_of(name(9)) == ()


def test_an_invitation_that_adds_no_task_to_an_enrolled_device_is_not_used_up(url):
    """Review 2, network gap 2: an enrolled key used up another invitation, and was refused where that was full."""
    with Store(url) as store:
        one, other = store.add_task(b"a task", "one", NOW), store.add_task(b"other", "other", NOW)
        store.invite(CODE, NOW, tasks=[one, other], label="both")
        store.invite(b"1" * 32, NOW, tasks=[one], label="one")
        store.invite(b"*" * 32, NOW, label="everything", uses=2)
        store.invite(b"+" * 32, NOW, label="everything again")

        def used() -> dict[str, int]:
            return {each.label: each.used for each in store.invitations()}

        store.enrol(CODE, key(0), NOW)
        again = store.enrol(b"1" * 32, key(0), NOW)
        assert (again.is_new, again.tasks) == (False, (one, other))
        store.enrol(b"1" * 32, key(1), NOW)
        assert store.enrol(b"1" * 32, key(0), NOW).tasks == (one, other), "it is full, and still answered"
        assert used() == {"both": 1, "one": 1, "everything": 0, "everything again": 0}
        store.enrol(b"*" * 32, key(0), NOW)  # tasks that come later are new to it
        store.enrol(b"+" * 32, key(0), NOW)
        store.enrol(b"1" * 32, key(0), NOW)
        assert used() == {"both": 1, "one": 1, "everything": 1, "everything again": 0}
        assert refused(store, b"1" * 32, 2).reason == "used-up", "a stranger is not answered"


def test_many_threads_use_an_invitation_no_more_often_than_it_says(url):
    with Store(url) as store:
        store.invite(CODE, NOW, uses=5)
        outcomes: list[str] = []

        def ask(number: int) -> None:
            try:
                store.enrol(CODE, key(number), NOW)
                outcomes.append("in")
            except EnrolmentRefused as error:
                outcomes.append(error.reason)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["in"] * 5 + ["used-up"] * 7
        assert len(store.devices()) == store.invitations()[0].used == 5


@pytest.mark.parametrize(("uses", "rate"), [(0, None), (1, 0)])
def test_an_invitation_for_nobody_is_refused(uses, rate):
    with Store("sqlite://") as store, pytest.raises(StoreError, match="lets nobody in"):
        store.invite(CODE, NOW, uses=uses, rate=rate)


def test_a_code_is_an_invitation_once():
    with Store("sqlite://") as store:
        store.invite(CODE, NOW)
        with pytest.raises(StoreError, match="an invitation already"):
            store.invite(CODE, NOW)


def test_a_revoked_device_stays_revoked_and_known(url):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1)])
        assert store.revoke(name(0), NOW)
        assert store.revoke(name(0), LATER)
        assert not store.revoke(name(9), NOW)
        assert store.device(name(0)).revoked_at == NOW
        assert name(0) not in store.active_keys()
        assert refused(store, CODE, 0).reason == "revoked"
        assert store.head(task).index == 1


def test_a_device_that_withdraws_leaves_its_totals_under_a_hash_and_its_entries(url):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1), check_in(0, 2), check_in(1, 1)])
        store.snapshot(task, 3, store.head(task).chain, b"state")
        store.reduce(task, 3)
        assert store.spent_before(name(0)) is None
        assert store.withdraw(name(0), LATER)
        assert store.withdraw(name(0), LATER)
        assert not store.withdraw(name(9), LATER)
        found = store.device(name(0))
        assert (found.public_key, found.enrolled_at, found.invitations) == (None, None, ())
        assert found.withdrawn_at == LATER
        assert msgpack.unpackb(store.spent_before(name(0)))["samples"] == 20
        assert store.statement(name(0)) is None
        assert store.spent_before(name(1)) is None
        assert store.counts().bodies == 1, "no body of a device that withdrew stays behind a snapshot"
        assert refused(store, CODE, 0).reason == "withdrawn"
        assert store.verify_chain(task).index == 3
        with store.reading() as connection:
            kept = connection.exec_driver_sql("select device, statement is null from journal").fetchall()
            hashes = connection.exec_driver_sql("select hash from withdrawn").fetchall()
        assert sorted(map(tuple, kept)) == [(1, True), (1, True), (2, False)]
        assert name(0).encode() not in hashes[0][0]


def test_the_bodies_of_a_device_that_withdrew_serve_replay_until_they_are_reduced(url):
    with Store(url) as store:
        task = prepare(store)
        store.append(task, [check_in(0, 1), check_in(1, 1)])
        store.withdraw(name(0), NOW)
        assert len(list(store.tail(task))) == 2
        store.snapshot(task, 2, store.head(task).chain, b"state")
        assert store.reduce(task, 2).bodies == 1


def test_devices_come_a_page_at_a_time(url):
    with Store(url) as store:
        prepare(store, devices=7)
        first = store.devices(limit=4)
        rest = store.devices(after=first[-1].id, limit=4)
        assert [each.id for each in first + rest] == sorted(name(number) for number in range(7))


def test_a_session_ends_at_its_time_and_with_a_new_password(url):
    with Store(url) as store:
        assert store.operator_password("ada") is None
        store.set_operator("ada", "argon2 one", NOW)
        store.open_session(Session(b"t" * 32, "csrf", "ada", LATER), NOW)
        assert store.session(b"t" * 32, NOW).operator == "ada"
        assert store.session(b"t" * 32, LATER) is None
        assert store.session(b"u" * 32, NOW) is None
        store.open_session(Session(b"u" * 32, "csrf", "ada", LATER), NOW)
        store.close_session(b"u" * 32)
        assert store.session(b"u" * 32, NOW) is None
        store.set_operator("ada", "argon2 two", LATER)
        assert store.session(b"t" * 32, NOW) is None
        assert (store.operators(), store.operator_password("ada")) == (["ada"], "argon2 two")


def test_a_session_of_nobody_is_refused(url):
    with Store(url) as store, pytest.raises(StoreError, match="refused"):
        store.open_session(Session(b"t" * 32, "csrf", "nobody", LATER), NOW)


def test_events_come_newest_first_by_task_and_after_the_last_one_seen(url):
    with Store(url) as store:
        task = prepare(store)
        store.record("started", NOW, "the server started")
        seen = store.record("task-started", NOW, "digits runs", task)
        store.record("revoked", LATER, "a device")
        assert [each.kind for each in store.events()] == ["revoked", "task-started", "started"]
        assert [each.kind for each in store.events(after=seen)] == ["revoked"]
        (about,) = store.events(task=task)
        assert (about.task, about.detail, about.at) == (task, "digits runs", NOW)


def test_settings_are_kept(url):
    with Store(url) as store:
        assert store.setting("key") is None
        store.set_setting("key", b"one")
        store.set_setting("key", b"two")
        assert store.setting("key") == b"two"


def test_the_numbers_for_metrics(url):
    with Store(url) as store:
        task = prepare(store, devices=3)
        store.add_task(b"other", "other", NOW)
        store.append(task, [check_in(0, 1), check_in(1, 1)])
        store.revoke(name(1), NOW)
        store.withdraw(name(2), NOW)
        counts = store.counts()
        assert counts.tasks == {"draft": 1, "running": 1, "paused": 0, "stopped": 0}
        assert (counts.devices, counts.revoked, counts.withdrawn) == (3, 1, 1)
        assert (counts.entries, counts.bodies, counts.invitations) == (2, 2, 1)
        assert counts.bytes > 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([b"a" * 32, b"b" * 32])), max_size=15))
def test_used_counts_the_devices_that_an_invitation_let_in(asks):
    with Store("sqlite://") as store:
        for code in (b"a" * 32, b"b" * 32):
            store.invite(code, NOW, uses=3, tasks=[store.add_task(code, code[:1].decode(), NOW)])
        let_in: dict[bytes, set[int]] = {b"a" * 32: set(), b"b" * 32: set()}
        for number, code in asks:
            if len(let_in[code]) == 3 and number not in let_in[code]:
                assert refused(store, code, number).reason == "used-up"
            else:
                store.enrol(code, key(number), NOW)
                let_in[code].add(number)
        assert {each.code_hash: each.used for each in store.invitations()} == {c: len(s) for c, s in let_in.items()}
        assert {each.id for each in store.devices()} == {name(n) for n in let_in[b"a" * 32] | let_in[b"b" * 32]}


def test_an_owner_sees_what_a_device_gave_newest_first_until_it_withdraws(url):
    with Store(url) as store:
        prepare(store)
        store.append(TASK, [check_in(1, 1), check_in(2, 1)])
        store.append(TASK, [check_in(1, 2)])
        assert [(each.task, each.index, each.seq) for each in store.given(name(1))] == [(TASK, 3, 2), (TASK, 1, 1)]
        assert len(store.given(name(1), limit=1)) == 1
        assert store.seqs(name(1)) == {TASK: 2}
        assert store.contributors(TASK) == 2
        store.withdraw(name(1), LATER)
        assert store.given(name(1)) == []


def test_who_joined_what_is_the_same_for_all_at_once_as_for_each(url):
    with Store(url) as store:
        first = prepare(store, devices=2)
        second = store.add_task(b"another", "other", NOW, "running")
        store.invite(bytes(32), NOW, uses=3, tasks=[second])
        store.invite(bytes([1]) * 32, NOW, uses=3, tasks=[first, second])
        store.invite(bytes([2]) * 32, NOW, uses=3, tasks=[first])
        for number, codes in ((1, [0]), (2, [0]), (3, [1]), (4, [2]), (5, [0, 2])):
            for code in codes:
                store.enrol(bytes([code]) * 32, key(number), NOW)
        joined = store.joined()
        assert set(joined) == {name(number) for number in range(6)}
        assert joined == {each: frozenset(store.tasks_of(each)) for each in joined}
        store.withdraw(name(3), NOW)
        assert name(3) not in store.joined()
