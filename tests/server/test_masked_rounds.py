"""Rounds of masking over real HTTP: what is heard, told, refused and kept, and that the model hears sums alone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import MSGPACK, Running, make_task, serving
from masked_device import MaskedDevice, crowd, make_masked, through, total_of
from real_postgresql import fresh_database

from crowdml.messages import SERVER, Envelope, decode, encode, total
from crowdml.secagg.device import advertise
from crowdml.secagg.messages import Advert, Masked, open_message
from crowdml.secagg.messages import encode as pack_secagg
from crowdml.server import rounds as server_rounds
from crowdml.server.export import export_model
from crowdml.server.hub import utc_now
from crowdml.server.limits import Limits
from crowdml.server.runner import Fold
from crowdml.server.sizes import largest_masked, largest_message
from crowdml.server.transcript import replay, write_transcript
from crowdml.storage.server import Store, UnwrittenError, restore
from crowdml.wire.envelopes import open_signed, sign
from crowdml.wire.problems import PROBLEMS
from crowdml.wire.rounds import open_view
from crowdml.wire.statements import Statement

MANY = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6)
TASK, UNMASKED = make_masked("http"), make_task("unmasked")
PATH = f"/v1/tasks/{TASK.hash.hex()}"


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def one_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with contextlib.ExitStack() as stack:
        database = None
        if request.param == "postgresql":
            database = stack.enter_context(fresh_database(request.getfixturevalue("postgresql"), "rounds"))
        folder = tmp_path_factory.mktemp("server")
        yield stack.enter_context(serving(folder, TASK, UNMASKED, limits=MANY, database=database))


@pytest.fixture
def server(one_server: Running) -> Iterator[Running]:
    """The server of this module. A test's rounds end with it: the next one's would wait for their totals."""
    yield one_server
    rounds = one_server.hub.rounds(TASK.hash)

    def end() -> None:
        for under in list(rounds.active.values()):
            if under.phase != "advertise":
                rounds.abandon(under.state, "failed", "the test is over")

    one_server.hub._writer.submit(end).result(20)


def soon(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def play(server: Running, task: Any = TASK) -> tuple[int, list[MaskedDevice]]:
    """One whole round; its number, and who was in it."""
    chosen = crowd(server, task, 5)
    rounds = server.hub.rounds(task.hash)
    number = rounds.newest
    for each in chosen:
        assert each.advertise(number).status == 202
    through(chosen, lambda: number in rounds.ended)
    for each in chosen:
        each.forget()
    return number, chosen


def to_phase(server: Running, phase: str, task: Any = TASK, many: int = 5) -> tuple[int, list[MaskedDevice]]:
    devices = crowd(server, task, many)
    number = server.hub.rounds(task.hash).newest
    assert not server.hub.rounds(task.hash).active[number].state.adverts
    for each in devices:
        assert each.advertise(number).status == 202
    through(devices, lambda: server.hub.rounds(task.hash).active[number].phase == phase)
    return number, devices


def totals(store: Store, task: Any = TASK) -> list[Any]:
    snapshot = store.oldest_snapshot(task.hash)
    kept = store.totals(task.hash, 0 if snapshot is None else snapshot.index)
    envelopes = [open_signed(data).envelope for _, data in kept]
    return [decode(envelope.kind, envelope.body) for envelope in envelopes]


# --- a round ---


def test_a_round_over_http_ends_in_one_entry_of_the_server_that_has_the_sum(server: Running) -> None:
    runner = server.hub.runners[TASK.hash]
    before, counted = runner.offer.version, len(totals(server.hub.store))
    number, devices = play(server)
    wanted = total_of(devices, number)
    *_, (_, data) = server.hub.store.totals(TASK.hash)
    signed = open_signed(data)
    assert signed.verify(server.hub.key.public)
    assert signed.envelope.seq == counted + 1
    heard = decode(signed.envelope.kind, signed.envelope.body)
    assert (heard.gradient.value == wanted["gradient"]).all()
    assert (heard.labels.value == wanted["labels"]).all()
    assert (int(heard.devices), int(heard.version)) == (5, before)
    fold = Fold(TASK)
    for each in totals(server.hub.store):
        fold.apply(each, "server")
    assert np.array_equal(runner.fold.weights, fold.weights)
    assert runner.offer.version == before + 1
    assert devices[0].look().round == number + 1
    assert devices[0].look(number).phase == "summed"


def test_of_the_vectors_only_hashes_stay_and_receipts_still_verify(server: Running) -> None:
    number, devices = to_phase(server, "mask")
    sent = {}
    for each in devices:
        answer = each.step()
        assert answer is not None
        sent[each.id] = each.sent, answer
    through(devices, lambda: number in server.hub.rounds(TASK.hash).ended)
    store = server.hub.store
    bodies = [data for _, data in store.totals(TASK.hash)]
    assert store.counts().bodies == len(bodies)
    for each in devices:
        data, answer = sent[each.id]
        assert answer.receipt.verify(server.hub.key.public)
        again = each.inner.send(TASK, data)
        assert (again.status, again.body) == (200, answer.body), "the same receipt, long after the body is gone"
        entry = store.entry(TASK.hash, each.id, answer.receipt.seq)
        assert entry is not None
        assert entry.hash == open_signed(data).hash
    store.check()


def test_the_last_envelope_of_a_device_is_what_it_said_after_its_vector(server: Running) -> None:
    number, devices = to_phase(server, "agree")
    devices[0].step()
    agreed = devices[0].sent
    through(devices[1:], lambda: server.hub.rounds(TASK.hash).active[number].phase == "reveal")
    through(devices[1:], lambda: number in server.hub.rounds(TASK.hash).ended or devices[1].step() is None)
    answer = devices[0].inner.signed("GET", f"/v1/devices/{devices[0].id}/statement")
    assert answer.body == agreed
    assert open_signed(answer.body).verify(devices[0].inner.key.public)
    assert asyncio.run(server.hub.write(lambda: server.hub.store.statement(devices[1].id))) == devices[1].sent
    server.run(server.hub.withdraw(devices[0].id))
    assert server.hub.store.statement(devices[0].id) is None


# --- refusals ---


def state_of(server: Running) -> Any:
    head = server.hub.store.head(TASK.hash)
    offer = server.hub.runners[TASK.hash].offer
    return head.index, head.chain, offer.version, offer.body


@pytest.mark.parametrize("kind", ["sgd/total/1", "sgd/gradient/1", "sgd/masked/1", "secagg/advert/1", "secagg/held/1"])
def test_a_device_of_a_masked_task_checks_in_nothing_but_masked_vectors(server: Running, kind: str) -> None:
    (device,) = crowd(server, TASK, 1)
    state = state_of(server)
    sums = {each.tag: np.full(each.length, 9, np.int64) for each in device.terms.fields}
    forged = encode(total("sgd/total/1", sums, devices=5, version=0))
    answer = device.inner.send(TASK, device.envelope(kind, forged, 1))
    assert (answer.status, answer.slug) == (422, "wrong-kind")
    assert state_of(server) == state


@pytest.mark.parametrize("kind", ["sgd/total/1", "secagg/masked/1", "secagg/held/1", "sgd/gradient/1"])
def test_nothing_but_messages_of_a_round_is_posted_to_one(server: Running, kind: str) -> None:
    (device,) = crowd(server, TASK, 1)
    answer = device.post(device.envelope(kind, b"\x80", server.hub.rounds(TASK.hash).newest))
    assert (answer.status, answer.slug) == (422, "wrong-kind")


def advert(device: MaskedDevice, **changes: Any) -> bytes:
    from crowdml.secagg import device as core

    view = device.look()
    made = open_message("secagg/advert/1", core.advertise(device.terms, view.round, device.inner.key, after=0).sent)
    assert isinstance(made, Advert)
    return pack_secagg(replace(made, **changes))


@pytest.mark.parametrize(
    ("changes", "slug"),
    [
        ({"pair": bytes(32)}, "round-refused"),  # of low order
        ({"seal": bytes([1]) + bytes(31)}, "round-refused"),
        ({"signature": bytes(64)}, "round-refused"),
        ({"commitment": bytes(32)}, "round-refused"),  # not what was signed
        ({"public": bytes(32)}, "round-refused"),
        ({"round": 10**9}, "wrong-message"),
    ],
)
def test_an_advert_that_is_not_what_its_device_signed_is_refused(server: Running, changes: Any, slug: str) -> None:
    (device,) = crowd(server, TASK, 1)
    number = server.hub.rounds(TASK.hash).newest
    answer = device.post(device.envelope("secagg/advert/1", advert(device, **changes), number))
    assert (answer.status, answer.slug) == (PROBLEMS[slug].status, slug)
    assert device.id not in server.hub.rounds(TASK.hash).active[number].state.adverts


def test_an_advert_with_smaller_totals_than_the_last_check_in_is_refused(tmp_path: Path) -> None:
    """Review 2, privacy finding 2: a device with an older ledger hears of it before it draws a second time."""
    task = make_masked("fallen")
    with serving(tmp_path, task, limits=MANY) as server:
        number, (first, *_) = play(server, task)
        view = first.look()
        assert view.round == number + 1
        first.inner.seq = 0
        less = Statement(("zcdp 1/11",), 1, ("zcdp 1/10",))
        state = advertise(first.terms, view.round, first.inner.key, after=number)
        envelope = Envelope(task.hash, first.id, frozenset((SERVER,)), view.round, Advert.kind, state.sent)
        answer = first.post(sign(envelope, less, first.inner.key))
        assert (answer.status, answer.slug) == (409, "totals-fell")
        assert first.begin(view.round).status == 202


def test_other_refusals_of_a_round_have_each_their_problem(server: Running) -> None:
    (device,) = crowd(server, TASK, 1)
    newest = server.hub.rounds(TASK.hash).newest
    body = advert(device)

    def slug(data: bytes) -> str:
        return device.post(data).slug

    assert slug(device.envelope("secagg/advert/1", b"\x80", newest)) == "malformed"
    assert slug(b"nothing") == "malformed"
    assert slug(device.envelope("secagg/advert/1", body, newest)[:-1] + b"\x00") in ("malformed", "signature")
    later = pack_secagg(replace(_advert(body), round=newest + 1))
    assert slug(device.envelope("secagg/advert/1", later, newest + 1)) == "round-refused"
    shares = pack_secagg(open_message("secagg/shares/1", pack_secagg(_shares(newest))))
    assert slug(device.envelope("secagg/shares/1", shares, newest)) == "round-refused"
    moved = device.inner.line.ask("POST", f"/v1/tasks/{UNMASKED.hash.hex()}/round", b"x")
    assert (moved.status, moved.slug) == (404, "not-found")
    assert device.inner.line.ask("POST", f"/v1/tasks/{'0' * 64}/round", b"x").slug == "unknown-task"
    too_large = device.inner.line.ask("POST", device.path, bytes(largest_message(device.terms) + 1))
    assert too_large.slug == "too-large"
    most = largest_masked(device.terms)
    assert device.inner.line.ask("POST", f"{PATH}/check-in", bytes(most + 1)).slug == "too-large"


def _advert(body: bytes) -> Advert:
    found = open_message("secagg/advert/1", body)
    assert isinstance(found, Advert)
    return found


def _shares(number: int) -> Any:
    from crowdml.secagg.messages import Shares

    return Shares(number, b"")


def test_a_look_at_a_round_is_for_devices_that_joined_and_signed(server: Running) -> None:
    (device,) = crowd(server, TASK, 1)
    line = device.inner.line
    assert line.ask("GET", device.path).slug == "authorization"
    assert device.inner.signed("GET", device.path, now=1.0).slug == "clock"
    assert device.ask(0).slug == "round-over"
    assert device.ask(10**9).slug == "round-over"
    assert device.inner.signed("GET", f"{device.path}?round=x").slug == "bad-request"
    assert device.inner.signed("GET", f"{device.path}?round=1&round=2").slug == "bad-request"
    assert device.inner.signed("GET", f"/v1/tasks/{UNMASKED.hash.hex()}/round").slug == "not-found"
    assert line.ask("PUT", device.path).slug == "method"
    server.run(server.hub.revoke(device.id))
    assert device.ask().slug == "revoked"


def test_a_vector_of_one_who_is_no_sharer_or_of_another_view_or_length_is_refused(server: Running) -> None:
    number, devices = to_phase(server, "mask")
    (stranger,) = crowd(server, TASK, 1)
    state = state_of(server)
    view = server.hub.rounds(TASK.hash).active[number].state
    size, seen = devices[0].terms.size, bytes(32)

    def send(device: MaskedDevice, message: Masked) -> str:
        return device.inner.send(TASK, device.envelope("secagg/masked/1", pack_secagg(message), 1)).slug

    assert send(stranger, Masked(number, seen, bytes(size))) == "round-refused"
    assert send(devices[0], Masked(number, seen, bytes(size))) == "round-refused"
    assert send(devices[0], Masked(number, seen, bytes(size - 4))) == "round-refused"
    assert send(devices[0], Masked(number + 1, seen, bytes(size))) == "round-refused"
    assert send(devices[0], Masked(10**9, seen, bytes(size))) == "round-refused"
    assert devices[0].inner.send(TASK, devices[0].envelope("secagg/masked/1", b"\xc0", 1)).slug == "malformed"
    assert state_of(server) == state
    assert server.hub.rounds(TASK.hash).active[number].state == view
    for each in devices:
        each.step()
    through(devices, lambda: number in server.hub.rounds(TASK.hash).ended)


# --- a task's life ---


def test_a_task_stops_after_its_totals_and_its_open_rounds_are_abandoned(tmp_path: Path) -> None:
    task = make_masked("stops", steps=2)
    with serving(tmp_path, task, limits=MANY) as server:
        play(server, task)
        play(server, task)
        rounds = server.hub.rounds(task.hash)
        soon(lambda: server.hub.states[task.hash] == "stopped" and not rounds.active)
        assert rounds.ended[3].cause == "stopped"
        (device,) = crowd(server, task, 1)
        assert (device.ask().status, device.ask().slug) == (410, "task-stopped")
        assert server.hub.runners[task.hash].reason == "2 cohorts have been added up"
        assert rounds.counts == {"summed": 2}, "nobody came to the third"
        server.hub._writer.submit(server.hub.store.set_state, task.hash, "running", utc_now()).result(20)  # a command
        server.hub._writer.submit(server.hub._follow).result(20)
        assert (server.hub.states[task.hash], rounds.newest) == ("stopped", 3), "no round is opened after the end"
    with serving(tmp_path, limits=MANY) as server:
        assert server.hub.rounds(task.hash).counts == {"summed": 2}
        assert server.hub.states[task.hash] == "stopped"
        assert server.hub.runners[task.hash].totals == 2
        assert not server.hub.rounds(task.hash).active


def test_a_paused_task_keeps_its_rounds_and_goes_on_with_them(tmp_path: Path) -> None:
    task = make_masked("pauses")
    with serving(tmp_path, task, limits=MANY) as server:
        number, devices = to_phase(server, "mask", task)
        server.run(server.hub.change(task.hash, "pause"))
        assert (devices[0].ask().status, devices[0].ask().slug) == (503, "task-paused")
        server.run(server.hub.change(task.hash, "resume"))
        through(devices, lambda: number in server.hub.rounds(task.hash).ended)
        assert totals(server.hub.store, task)[0].devices == 5
        number, devices = to_phase(server, "mask", task)
        server.run(server.hub.change(task.hash, "stop"))
        assert server.hub.rounds(task.hash).ended[number].cause == "stopped"
        assert server.hub.store.counts().bodies == 1


def test_a_masked_task_is_exported_replayed_backed_up_and_restored(tmp_path: Path) -> None:
    task = make_masked("kept")
    with serving(tmp_path / "one", task, limits=replace(MANY, snapshot_every=7)) as server:
        for _ in range(4):
            play(server, task)
        number, devices = to_phase(server, "mask", task)
        for each in devices[:3]:
            each.step()
        weights = server.hub.runners[task.hash].fold.weights
        with (tmp_path / "transcript").open("wb") as file:
            done = write_transcript(server.hub.store, task.hash, file)
        assert np.array_equal(replay(tmp_path / "transcript").weights, weights)
        assert done.version == 4
        exported = export_model(server.hub.store, task.hash)
        assert np.array_equal(exported.weights, weights)
        assert exported.devices == 23
        server.hub.store.backup(tmp_path / "copy.sqlite")
        open_ones = server.hub.rounds(task.hash).active
        assert [row.number for row in server.hub.store.rounds(task.hash, 3)] == [6, 5, 4]
    (tmp_path / "two").mkdir()
    restore(tmp_path / "copy.sqlite", tmp_path / "two" / "server.sqlite")
    with serving(tmp_path / "two", limits=MANY) as server:
        server.hub.store.check()
        assert np.array_equal(server.hub.runners[task.hash].fold.weights, weights)
        rounds = server.hub.rounds(task.hash)
        assert rounds.active[number].state == open_ones[number].state
        for each in devices:
            each.inner.line = server.line()
        through(devices, lambda: number in rounds.ended)
        assert (totals(server.hub.store, task)[-1].gradient.value == total_of(devices, number)["gradient"]).all()


def test_duplicates_and_old_messages_in_any_order_change_no_sum(server: Running) -> None:
    """Whatever a device has said, it says again and again, in any order, between the messages of all others."""
    number, devices = to_phase(server, "share")
    order, before = random.Random(7), server.hub.runners[TASK.hash].index
    said: list[tuple[MaskedDevice, bytes]] = [(each, each.sent) for each in devices]

    def again() -> None:
        for device, data in order.choices(said, k=4):
            if open_signed(data).envelope.kind == "secagg/masked/1":
                answer = device.inner.send(TASK, data)
            else:
                answer = device.inner.line.ask("POST", device.path, data, {"Content-Type": MSGPACK})
            assert answer.status in (200, 410), answer.body

    for _ in range(40):
        order.shuffle(devices)
        for each in devices:
            if each.step() is not None:
                said.append((each, each.sent))
            again()
        if number in server.hub.rounds(TASK.hash).ended:
            break
    again()
    assert server.hub.rounds(TASK.hash).ended[number].phase == "summed"
    assert server.hub.runners[TASK.hash].index == before + 5 + 1
    assert (totals(server.hub.store)[-1].gradient.value == total_of(devices, number)["gradient"]).all()


# --- for people ---


def test_rounds_are_counted_listed_and_told_as_events(server: Running) -> None:
    before = server.hub.rounds(TASK.hash).counts.get("summed", 0)
    number, _ = play(server)
    text = server.line().ask("GET", "/metrics").body.decode()
    assert f'crowdml_rounds{{task="{TASK.hash.hex()[:12]}",ended="summed"}} {before + 1}' in text
    assert f'crowdml_round_survivors{{task="{TASK.hash.hex()[:12]}"}}' in text
    newest, last, *_ = server.hub.round_figures(TASK.hash)
    assert (newest.number, newest.phase) == (number + 1, "advertise")
    assert (last.number, last.phase, last.devices, last.shared, last.survived) == (number, "summed", 5, 5, 5)
    assert last.seconds >= 0
    assert server.hub.round_figures(UNMASKED.hash) == []
    told = [event for event in server.hub.store.events(task=TASK.hash) if event.kind == "round summed"]
    assert told[0].detail == f"round {number}: 5 of 5 devices"
    devices = server.hub.store.devices(limit=10_000)
    assert server.hub.key.id not in {device.id for device in devices}, "the server is no device"
    assert server.hub.key.id not in server.hub.keys


def test_an_honest_device_that_asks_as_it_is_told_is_never_refused_for_its_rate(tmp_path: Path) -> None:
    task = make_masked("rates")
    with serving(tmp_path, task) as server:  # with the limits as they are
        play(server, task)
        (device,) = crowd(server, task, 1)
        slugs = {device.ask().status for _ in range(60)}
        assert slugs == {200}
        assert open_view(device.ask().body).wait >= 150


# --- faults ---


def test_a_message_whose_write_failed_midway_is_there_once_and_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store raises before, or after, the transaction is on disk: nobody knows which, and it does not matter."""
    task = make_masked("faulty")
    with serving(tmp_path, task, limits=MANY) as server:
        store, count = server.hub.store, 0
        take, end = store.take, store.end_round

        def faulty(work: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **named: Any) -> Any:
                nonlocal count
                count += 1
                if count % 3 == 0:
                    raise UnwrittenError("the database could not be written: a test says so")
                done = work(*arguments, **named)
                if count % 3 == 1:
                    raise UnwrittenError("the database could not be written: a test says so")
                return done

            return run

        monkeypatch.setattr(store, "take", faulty(take))
        monkeypatch.setattr(store, "end_round", faulty(end))
        devices = crowd(server, task, 5)

        def insist(ask: Callable[[], Any]) -> Any:
            for _ in range(20):
                answer = ask()
                if answer is None or answer.status < 500:
                    return answer
            raise AssertionError("it is never taken")

        for each in devices:
            each.advertise(1)
            assert insist(lambda each=each: each.post(each.sent)).status in (200, 202)
        for _ in range(300):
            rounds = server.hub.rounds(task.hash)
            if 1 in rounds.ended:
                break
            for each in devices:
                answer = each.step()
                if answer is not None and answer.status >= 500:
                    is_vector = open_signed(each.sent).envelope.kind == "secagg/masked/1"
                    again = each.send if is_vector else lambda each=each: each.post(each.sent)
                    answer = insist(again)
                assert answer is None or answer.status in (200, 202), answer.body
        soon(lambda: 1 in server.hub.rounds(task.hash).ended)
        assert count > 12
        (heard,) = totals(store, task)
        assert (heard.gradient.value == total_of(devices, 1)["gradient"]).all()
        assert server.hub.runners[task.hash].offer.version == 1
        store.check()


def test_vectors_of_megabytes_are_taken_and_the_disk_holds_a_few_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_rounds, "LOOSE", 8 * 2**20)
    task = make_masked("large", cohort=9, minimum=8, dimension=600_000)
    with serving(tmp_path, task, limits=MANY) as server:
        number, devices = to_phase(server, "mask", task, many=9)
        assert devices[0].terms.size > Limits().body
        most = 0
        for each in devices:
            answer = each.step()
            assert answer is not None
            assert answer.status == 202
            most = max(most, server.hub.store.counts().bodies)
        assert most <= 2, "they go as soon as the sum that has them is kept"
        through(devices, lambda: number in server.hub.rounds(task.hash).ended)
        assert (totals(server.hub.store, task)[0].gradient.value == total_of(devices, number)["gradient"]).all()
        size = server.hub.store.size()
    assert size < 12 * devices[0].terms.size, "two bodies, the sum, the total, and the log of these"
