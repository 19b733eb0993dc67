"""What operators ask of the store: accounts, drafts, batches of invitations, and how the crowd fares."""

from __future__ import annotations

import hashlib

import pytest
from server_builders import LATER, NOW, TASK, check_in, name, prepare

from crowdml.storage.server import Session, Store, StoreError
from crowdml.storage.server.operating import (
    end_other_sessions,
    end_sheet,
    extend_session,
    find_devices,
    first_operator,
    index_before,
    latest_arrival,
    recent_devices,
    remove_operator,
    remove_setting,
    settings_like,
    spent_statements,
)


def code(number: int) -> bytes:
    return hashlib.sha256(b"code %d" % number).digest()


def opened(store: Store, token: bytes, who: str = "anna") -> None:
    store.open_session(Session(token, "csrf", who, LATER), NOW)


def test_there_is_one_first_operator(url):
    with Store(url) as store:
        assert first_operator(store, "anna", "hash", NOW)
        assert not first_operator(store, "bert", "hash", NOW)
        assert store.operators() == ["anna"]


def test_the_last_operator_stays_and_others_go_with_their_sessions(url):
    with Store(url) as store:
        for who in ("anna", "bert"):
            store.set_operator(who, "hash", NOW)
            opened(store, who.encode(), who)
        assert remove_operator(store, "bert")
        assert store.session(b"bert", NOW) is None
        assert not remove_operator(store, "bert")
        with pytest.raises(StoreError, match="last operator"):
            remove_operator(store, "anna")
        assert store.session(b"anna", NOW) is not None


def test_a_session_is_extended_and_a_new_password_ends_the_others(url):
    with Store(url) as store:
        store.set_operator("anna", "old", NOW)
        for token in (b"one", b"two"):
            opened(store, token)
        extend_session(store, b"one", "2025-02-01T00:00:00+00:00")
        extend_session(store, b"closed", "2025-02-01T00:00:00+00:00")
        assert store.session(b"one", LATER) is not None
        assert store.session(b"closed", NOW) is None
        assert end_other_sessions(store, "anna", b"one", "old", "new")
        assert not end_other_sessions(store, "anna", b"two", "stale", "newer")
        assert store.session(b"one", NOW) is not None
        assert store.session(b"two", NOW) is None
        assert store.operator_password("anna") == "new"


def test_settings_are_found_by_their_beginning_alone(url):
    with Store(url) as store:
        for each in ("draft/a", "draft/b", "draft", "drafty/c", "d%/x"):
            store.set_setting(each, each.encode())
        assert settings_like(store, "draft/") == {"a": b"draft/a", "b": b"draft/b"}
        assert settings_like(store, "d%/") == {"x": b"d%/x"}
        assert remove_setting(store, "draft/a")
        assert not remove_setting(store, "draft/a")
        assert settings_like(store, "draft/") == {"b": b"draft/b"}


def test_invitations_are_added_all_or_none_and_ended_together(url):
    with Store(url) as store:
        prepare(store)
        many = [(code(number), f"sheet {number}") for number in range(3)]
        store.invite_many(many, NOW, uses=1, ends_at=None, rate=5, tasks=[TASK, TASK])
        added = [each for each in store.invitations() if each.label.startswith("sheet")]
        assert {(each.uses, each.rate, each.tasks) for each in added} == {(1, 5, (TASK,))}
        with pytest.raises(StoreError):
            store.invite_many([(code(7), "new"), (code(0), "twice")], NOW, uses=1, ends_at=None, rate=None, tasks=[])
        assert len([each for each in store.invitations() if each.label == "new"]) == 0
        with pytest.raises(StoreError, match="lets nobody in"):
            store.invite_many(many, NOW, uses=0, ends_at=None, rate=None, tasks=[])
        assert end_sheet(store, [code(0), code(1)], LATER) == 2
        assert end_sheet(store, [code(0), code(1), code(2)], LATER) == 1


def test_devices_are_found_by_id_and_by_label_with_what_they_last_said(url):
    with Store(url) as store:
        prepare(store, devices=5)
        store.append(TASK, [check_in(0, 1), check_in(0, 2, at=LATER), check_in(1, 1)])
        everyone = find_devices(store)
        ids = sorted(name(number) for number in range(5))
        assert [each.device.id for each in everyone] == ids
        assert [each.device.id for each in find_devices(store, after=ids[1], limit=2)] == ids[2:4]
        assert [each.device.id for each in find_devices(store, ids[3][:6].upper())] == [ids[3]]
        assert len(find_devices(store, "CROW")) == 5
        assert find_devices(store, "%") == find_devices(store, "nothing") == []
        (zero,) = find_devices(store, name(0))
        assert zero.last_at == LATER
        assert zero.statement is not None
        assert zero.statement.samples == 20
        (never,) = find_devices(store, name(4))
        assert (never.last_at, never.statement) == (None, None)


def test_totals_are_of_those_who_gave_and_did_not_withdraw(url):
    with Store(url) as store:
        prepare(store, devices=4)
        store.append(TASK, [check_in(0, 1), check_in(1, 1), check_in(1, 2), check_in(2, 1)])
        store.withdraw(name(2), LATER)
        many, said = spent_statements(store)
        assert many == 2
        assert sorted(each.samples for each in said) == [10, 20]
        assert spent_statements(store, most=1)[0] == 2
        assert len(spent_statements(store, most=1)[1]) == 1


def test_how_many_came_before_a_time_and_who_came_since(url):
    with Store(url) as store:
        prepare(store, devices=3)
        assert index_before(store, TASK, LATER) == 0
        assert latest_arrival(store, TASK) is None
        times = [f"2025-01-31T12:{minute:02}:00+00:00" for minute in range(9)]
        for place, at in enumerate(times):
            store.append(TASK, [check_in(place % 3, place // 3 + 1, at=at)])
        for place, at in enumerate(times):
            assert index_before(store, TASK, at) == place
        assert index_before(store, TASK, LATER) == 9
        assert latest_arrival(store, TASK) == "2025-01-31T12:08:00.000000+00:00"
        assert recent_devices(store, TASK, 0) == 3
        assert recent_devices(store, TASK, 7) == 2
        assert recent_devices(store, TASK, 0, most=1) == 1
