"""A device and a real server: what is charged, sent, acknowledged and refused."""

from __future__ import annotations

import asyncio
import dataclasses
from fractions import Fraction
from pathlib import Path

import msgpack
import numpy as np
import pytest
import sqlalchemy as sa
from ledgers import sample_ceiling
from loopback import QuickClock, joined, rows, run, serving, small_task, take_part

from crowdml.device.client import Client
from crowdml.device.commits import Commits
from crowdml.device.files import Share
from crowdml.device.fleet import Fleet
from crowdml.device.folder import GIVEN, LEDGER, Folder, OwnerBudget, consent_to, readable_task
from crowdml.device.joining import withdraw
from crowdml.device.machine import Machine
from crowdml.device.marks import Mark
from crowdml.device.member import Clock, Member, Patience, chance, statement_after
from crowdml.device.sources import LiveSource, deal_sources, open_source
from crowdml.errors import CrowdmlError, DataError, LedgerError, ProtocolError, TaskError
from crowdml.price import Price
from crowdml.privacy.losses import Pure
from crowdml.privacy.noise import SystemSource
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.protocol import CheckOut, Role, Sensed, Step
from crowdml.protocols import find, sgd
from crowdml.storage import Budget, Charge, Ledger
from crowdml.storage.server.schema import device as device_table
from crowdml.wire.envelopes import open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack
from crowdml.wire.receipts import open_receipt
from crowdml.wire.statements import Statement

TASK = small_task()
SHORT = small_task("short", samples=10)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), TASK, SHORT) as server:
        yield server


def charged_messages(folder: Path) -> tuple[int, int, int]:
    """Charges, messages, and messages that wait."""
    with Ledger(folder / LEDGER, must_exist=True) as ledger:
        task = ledger.charges()[0].task
        return len(ledger.charges()), ledger.next_seq(task), len(ledger.resend())


def test_each_check_in_is_charged_once_acknowledged_once_and_has_a_receipt_of_the_server(server, tmp_path):
    before = server.check_ins(TASK)
    home = joined(tmp_path, TASK)
    fleet, summary = run(home, server.address, server.code, TASK, rows(23))
    assert (summary.check_ins, summary.endings) == (4, {"source": 1})
    assert server.check_ins(TASK) == before + 4
    assert charged_messages(tmp_path) == (8, 4, 0)
    with home.ledger() as ledger:
        receipts = [open_receipt(data) for data in ledger.receipts()]
        assert [receipt.seq for receipt in receipts] == [1, 2, 3, 4]
        assert all(receipt.verify(bytes.fromhex(home.server.key)) for receipt in receipts)
        assert len(ledger.waiting(TASK.hash)) == 0  # the other three rows wait in their file
        assert (ledger.sources(), ledger.next_serial()) == ({"rows 0": 20}, 20)
        statement = open_signed(server.hub.store.statement(fleet.all_keys()[0][1].id)).statement
        assert statement == Statement.of(ledger.device_total(), ledger.samples_given(), sample_ceiling(ledger))
    assert summary.epsilon_sample == pytest.approx(1.5, abs=1e-6)


def test_the_files_of_a_device_are_for_its_owner_alone(server, tmp_path):
    home = joined(tmp_path / "device", TASK)
    run(home, server.address, server.code, TASK, rows(5))
    assert home.path.stat().st_mode & 0o077 == 0
    files = [path for path in home.path.rglob("*") if path.is_file()]
    assert {"key.pem", "ledger.sqlite", "device.json", "consent.json"} <= {path.name for path in files}
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_nothing_leaves_a_device_before_it_has_checked_out(server, tmp_path, monkeypatch):
    """A door that stands too early would be drawn at and not charged."""

    def early(task, state, event, ctx):
        ctx.release("gradient", event.batch.map(lambda batch: batch.x))
        return Step(event.batch, (CheckOut(),))

    home = joined(tmp_path, TASK)
    device = Role(sgd.device.start, {**sgd.device.on, Sensed: early})
    monkeypatch.setattr(sgd, "protocol", dataclasses.replace(sgd.protocol, device=device))
    find.cache_clear()
    try:
        with pytest.raises(ProtocolError, match="There is no door in this step"):
            run(home, server.address, server.code, TASK, rows(5))
    finally:
        find.cache_clear()
    with home.ledger() as ledger:
        assert ledger.charges() == ()


def test_after_a_restart_no_row_of_the_source_is_read_again_and_those_that_wait_are_used(server, tmp_path):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(23))
    _, summary = run(home, server.address, None, TASK, rows(23))
    assert summary.check_ins == 0
    _, summary = run(home, server.address, None, TASK, rows(25))
    assert summary.check_ins == 1
    with home.ledger() as ledger:
        assert ledger.samples_given() == 25


def test_the_tasks_own_budget_stops_the_device_with_a_sentence(server, tmp_path):
    home = joined(tmp_path, SHORT)
    _, summary = run(home, server.address, server.code, SHORT, rows(100))
    assert (summary.check_ins, summary.endings) == (2, {"budget": 1})
    assert "10 are left of what the task itself may take" in summary.reason
    assert charged_messages(tmp_path) == (4, 2, 0)


def test_the_owners_budget_stops_the_device_before_the_tasks(server, tmp_path):
    home = joined(tmp_path, TASK)
    home.set_budget(OwnerBudget("2", 7))
    _, summary = run(home, server.address, server.code, TASK, rows(100))
    assert (summary.check_ins, summary.endings) == (1, {"budget": 1})
    assert "2 of 7 are left of your budget for all tasks" in summary.reason


def test_an_owner_who_caps_the_device_is_obeyed(server, tmp_path):
    home = joined(tmp_path, TASK)
    home.set_budget(OwnerBudget("2", 100, "1/100"))
    _, summary = run(home, server.address, server.code, TASK, rows(100))
    assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
    with home.ledger() as ledger:
        assert ledger.charges() == ()


def test_a_task_that_was_not_accepted_is_not_run(server, tmp_path):
    home = joined(tmp_path, TASK)
    with pytest.raises(TaskError, match="not what the owner of this device accepted"):
        run(home, server.address, server.code, SHORT, rows(5))


def test_bytes_that_do_not_have_the_hash_that_was_asked_for_are_no_task():
    with pytest.raises(TaskError, match="was asked for"):
        readable_task(SHORT.canonical, TASK.hash)


def test_a_task_without_noise_or_as_published_runs_on_no_device():
    published = TASK.with_(as_published=True)
    with pytest.raises(TaskError, match="only the simulator"):
        readable_task(published.canonical, published.hash)
    bare = TASK.with_(privacy=dataclasses.replace(TASK.privacy, mechanism="none", budget=None))
    with pytest.raises(TaskError, match="without noise"):
        readable_task(bare.canonical, bare.hash)


def test_a_server_that_is_away_is_asked_later_and_later_and_nothing_is_lost(tmp_path):
    task = small_task("away")
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        run(home, server.address, server.code, task, rows(5))
        server.stop()
        time_ = QuickClock()

        async def outage():
            device = asyncio.create_task(take_part(home, server.address, None, task, rows(25), time_=time_))
            while sum(time_.slept) < 100:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(server.start)
            return await device

        _, summary = asyncio.run(outage())
        assert summary.check_ins == 4
        assert max(time_.slept) <= 10.0
        assert server.check_ins(task) == 5


def test_a_lost_ledger_begins_from_the_statement_that_the_device_signed(server, tmp_path):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(20))
    with home.ledger() as ledger:
        before = (ledger.device_total().epsilon(1e-6), ledger.samples_given(), ledger.dearest_sample(1e-6)[1].zcdp)
    (home.path / LEDGER).unlink()
    with pytest.raises(LedgerError, match="not known"):
        home.ledger()
    _, summary = run(home, server.address, None, TASK, rows(10, seed=2), new_data=True)
    assert (summary.check_ins, summary.refused) == (2, 0)
    with home.ledger() as ledger:
        assert ledger.samples_given() == before[1] + 10
        assert ledger.dearest_sample(1e-6)[1].zcdp == before[2]
        assert ledger.device_total().epsilon(1e-6) > before[0]
        assert {charge.mechanism for charge in ledger.charges()} == {"recovered", "gradient", "labels"}


def test_after_a_lost_ledger_an_older_statement_of_the_same_device_leaves_it_exhausted(server, tmp_path):
    """A server that hands back an early statement would roll the totals back: each is signed by the device itself."""
    home = joined(tmp_path, TASK)
    fleet, _ = run(home, server.address, server.code, TASK, rows(20))
    who, last = fleet.all_keys()[0][1].id, server.check_ins(TASK)
    hash_ = open_signed(server.hub.store.statement(who)).hash.hex()
    assert home.marked()[0].last == Mark(4, 20, hash_, task=TASK.hash.hex())
    (home.path / LEDGER).unlink()
    with server.hub.store.writing() as connection:
        connection.execute(sa.update(device_table).where(device_table.c.id == who).values(last_index=last - 1))
    assert open_signed(server.hub.store.statement(who)).statement.samples == 15
    for _ in range(2):
        _, summary = run(home, server.address, None, TASK, rows(10, seed=2), new_data=True)
        assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
    with home.ledger() as ledger:
        assert ledger.charges() == ()


def test_a_mark_is_on_disk_after_the_message_is_and_a_line_cut_short_does_not_count(tmp_path):
    home, task = Folder(tmp_path), TASK.hash.hex()
    first, second = Mark(1, 5, "aa", 0, task), Mark(2, 10, "bb", 0, task)

    def last() -> dict[int, Mark]:
        return {device: marked.last for device, marked in home.marked().items()}

    with home.marks() as marks, Ledger(":memory:") as ledger:
        commit = Commits(ledger, 0.0, marks)
        assert asyncio.run(commit(last, [(3, first)])) == {}  # a mark that the ledger does not know would be a lie
        assert last() == {3: first}
    with home.marks() as marks:
        for _ in range(20_000):
            marks.add(3, second)
            marks.add(4, first)
        marks.flush()
        marks.add(4, second)
        marks.flush()
    path = tmp_path / GIVEN
    assert (last(), len(path.read_bytes().splitlines())) == ({3: second, 4: second}, 2)
    assert path.stat().st_mode & 0o077 == 0
    whole = path.read_bytes()
    path.write_bytes(whole + b"[3, 9, 9")
    assert last() == {3: second, 4: second}


@pytest.mark.parametrize("window", [0.0, 0.001])
def test_what_the_ledger_refused_leaves_no_mark(tmp_path, window):
    """A mark that no ledger knows would make the next start take the ledger for an older copy."""
    home, mark = Folder(tmp_path), Mark(1, 5, "aa", 0, TASK.hash.hex())

    def refuse() -> None:
        raise LedgerError("no")

    async def both(commit: Commits) -> list[object]:
        return await asyncio.gather(commit(refuse, [(3, mark)]), commit(lambda: 7, [(4, mark)]), return_exceptions=True)

    with home.marks() as marks, Ledger(tmp_path / LEDGER) as ledger:
        refused, done = asyncio.run(both(Commits(ledger, window, marks)))
    assert isinstance(refused, LedgerError)
    assert (done, list(home.marked())) == (7, [4])


def test_after_a_lost_ledger_no_row_that_may_have_been_given_is_read_until_the_owner_says_it_is_new(server, tmp_path):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(20))
    (home.path / LEDGER).unlink()
    for _ in range(2):
        _, summary = run(home, server.address, None, TASK, rows(40))
        assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
        assert "may have been given before" in summary.reason
    _, summary = run(home, server.address, None, TASK, rows(10, seed=2), new_data=True)
    assert summary.check_ins == 2
    _, summary = run(home, server.address, None, TASK, rows(15, seed=2))  # the place in it is known from now on
    assert summary.check_ins == 1
    with home.ledger() as ledger:
        assert ledger.samples_given() == 20 + 15


def test_after_a_lost_ledger_a_source_without_a_place_is_refused_at_every_start(server, tmp_path):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(20))
    (home.path / LEDGER).unlink()

    def live(new_data: bool):
        async def whole():
            client = Client(server.address)
            fleet = Fleet(home, client, TASK, find(TASK), clock=QuickClock().clock, new_data=new_data)
            try:
                return await fleet.run(lambda _: LiveSource(lambda: rows(10, seed=2), TASK, 10))
            finally:
                await client.close()

        return asyncio.run(whole())

    assert (live(False).endings, live(True).check_ins, live(False).endings) == ({"budget": 1}, 2, {"budget": 1})


def test_another_share_of_a_file_that_was_read_is_refused(server, tmp_path):
    home = joined(tmp_path / "device", TASK)
    path = tmp_path / "rows.csv"
    path.write_text("0,0,0,0.5,a\n" * 20)

    def share(index: int, of: int):
        async def whole():
            client = Client(server.address)
            fleet = Fleet(home, client, TASK, find(TASK), clock=QuickClock().clock)
            try:
                await fleet.enrol(server.code, None)
                return await fleet.run(lambda _: open_source(f"csv:{path}", TASK, Share(index, of)))
            finally:
                await client.close()

        return asyncio.run(whole())

    assert share(0, 2).check_ins == 2
    for other in ((0, 1), (1, 2), (0, 4)):
        with pytest.raises(DataError, match="was read as share 0/2, and share"):
            share(*other)
    assert share(0, 2).check_ins == 0


def test_a_fleet_of_another_size_over_the_same_file_is_refused(server, tmp_path):
    """Row 3 of ten devices is device 3's, and row 3 of five as well; row 13 would go to another."""
    home = joined(tmp_path / "device", TASK)
    path = tmp_path / "rows.csv"
    path.write_text("0,0,0,0.5,a\n" * 100)

    def fleet(devices: int):
        async def whole():
            client = Client(server.address)
            crowd = Fleet(home, client, TASK, find(TASK), devices, False, QuickClock().clock)
            readers = deal_sources(f"csv:{path}", TASK, devices)
            try:
                await crowd.enrol(server.code, None)
                return await crowd.run(lambda number: readers[number])
            finally:
                await client.close()

        return asyncio.run(whole())

    assert fleet(5).check_ins == 20
    with pytest.raises(DataError, match="share 0/10"):
        fleet(10)
    assert fleet(5).check_ins == 0


def test_a_lost_ledger_counts_against_the_budget_of_the_task(server, tmp_path):
    home = joined(tmp_path, SHORT)
    run(home, server.address, server.code, SHORT, rows(100))
    (home.path / LEDGER).unlink()
    _, summary = run(home, server.address, None, SHORT, rows(100, seed=2), new_data=True)
    assert (summary.check_ins, summary.endings) == (0, {"budget": 1})


def test_a_lost_ledger_without_a_statement_leaves_the_device_exhausted(server, tmp_path):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, [])
    (home.path / LEDGER).unlink()
    _, summary = run(home, server.address, None, TASK, rows(10), new_data=True)
    assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
    _, summary = run(home, server.address, None, TASK, rows(10), new_data=True)
    assert summary.check_ins == 0


def test_a_message_that_the_server_refuses_for_good_stays_charged_and_its_number_is_used_again(server, tmp_path):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(5))
    key, before = home.key(), server.check_ins(TASK)
    with home.ledger() as ledger:
        good = open_signed(server.hub.store.statement(key.id))
        bad = dataclasses.replace(good.envelope, seq=2, body=b"\x80")
        ledger.charge(
            TASK.hash, [], [], outbox={ledger.next_seq(TASK.hash): sign(bad, good.statement, key)},
            state=b"\x82\xa3seq\x02\xa5state\xc0",
        )  # fmt: skip
    _, summary = run(home, server.address, None, TASK, rows(10))
    assert (summary.check_ins, summary.refused) == (1, 1)
    assert server.check_ins(TASK) == before + 1


def test_a_device_whose_message_is_too_large_says_so_and_charges_nothing_more_until_it_is_taken(tmp_path):
    """Review 2, network finding M2: it charged one batch after another, and each was answered with 413."""
    task = small_task("large")
    with serving(tmp_path / "server", task) as server:
        home, limits = joined(tmp_path / "device", task), server.hub.limits
        server.hub.limits = dataclasses.replace(limits, body=100)
        for code in (server.code, None):
            _, summary = run(home, server.address, code, task, rows(10))
            assert (summary.check_ins, summary.refused, summary.endings) == (0, 1, {"refused": 1})
            assert "At most 100 bytes are read here" in summary.reason
            assert charged_messages(home.path) == (2, 1, 1)
        server.hub.limits = limits
        _, summary = run(home, server.address, None, task, rows(10))
        assert (summary.check_ins, summary.endings) == (2, {"source": 1})
        assert charged_messages(home.path) == (4, 2, 0)


def test_a_device_whose_message_is_not_as_the_task_says_charges_nothing_more(server, tmp_path):
    """Review 2, network finding M2: of 422 as of 413."""
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(5))
    key, before = home.key(), server.check_ins(TASK)
    with home.ledger() as ledger:
        good = open_signed(server.hub.store.statement(key.id))
        bad = dataclasses.replace(good.envelope, seq=2, kind="sgd/other/1")
        ledger.charge(
            TASK.hash, [], [], outbox={ledger.next_seq(TASK.hash): sign(bad, good.statement, key)},
            state=b"\x82\xa3seq\x02\xa5state\xc0",
        )  # fmt: skip
    _, summary = run(home, server.address, None, TASK, rows(10))
    assert (summary.check_ins, summary.endings) == (0, {"refused": 1})
    assert "'sgd/other/1' is not heard here" in summary.reason
    assert server.check_ins(TASK) == before
    assert charged_messages(tmp_path) == (2, 2, 1)


def test_a_message_about_a_version_that_a_restored_server_never_published_is_dropped_and_the_device_goes_on(
    server, tmp_path
):
    """A server that is put back from a backup says 422, too, and takes the next message."""
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(5))
    key, before = home.key(), server.check_ins(TASK)
    with home.ledger() as ledger:
        good = open_signed(server.hub.store.statement(key.id))
        said = msgpack.unpackb(good.envelope.body)
        bad = dataclasses.replace(good.envelope, seq=2, body=pack({**said, "version": 10**6}))
        ledger.charge(
            TASK.hash, [], [], outbox={ledger.next_seq(TASK.hash): sign(bad, good.statement, key)},
            state=b"\x82\xa3seq\x02\xa5state\xc0",
        )  # fmt: skip
    _, summary = run(home, server.address, None, TASK, rows(10))
    assert (summary.check_ins, summary.refused, summary.problems) == (1, 1, {"stale": 1})
    assert server.check_ins(TASK) == before + 1


def test_a_receipt_that_another_server_signed_acknowledges_nothing(server, tmp_path):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, [])
    values = home._read("device.json")
    values["server"]["key"] = "00" * 32
    home._write("device.json", values)
    _, summary = run(home, server.address, None, TASK, rows(5))
    assert (summary.check_ins, summary.endings) == (0, {"refused": 1})
    assert "not signed by the server that this device joined" in summary.reason
    assert charged_messages(tmp_path) == (2, 1, 1)


def test_a_server_with_another_key_is_another_server(server, tmp_path):
    home = joined(tmp_path / "device", TASK)
    run(home, server.address, server.code, TASK, [])
    with serving(tmp_path / "other", TASK) as other, pytest.raises(CrowdmlError, match="knows its server by"):
        run(home, other.address, other.code, TASK, rows(5))


def test_a_stopped_task_a_withdrawn_device_and_a_revoked_one_end_cleanly(tmp_path):
    task = small_task("ending")
    with serving(tmp_path / "server", task) as server:
        homes = [joined(tmp_path / name, task) for name in "abc"]
        for home in homes:
            run(home, server.address, server.code, task, rows(5))

        async def leave():
            client = Client(server.address)
            await withdraw(client, homes[0].key(), Clock())
            await withdraw(client, homes[0].key(), Clock())
            await client.close()

        asyncio.run(leave())
        server.call(server.hub.revoke(homes[1].key().id))
        assert run(homes[0], server.address, None, task, rows(10))[1].endings == {"withdrawn": 1}
        assert run(homes[1], server.address, None, task, rows(10))[1].endings == {"revoked": 1}
        server.call(server.hub.change(task.hash, "stop"))
        assert run(homes[2], server.address, None, task, rows(10))[1].endings == {"stopped": 1}
        assert charged_messages(homes[2].path) == (2, 1, 0)


def test_a_fleet_keeps_every_device_apart_in_one_file(server, tmp_path):
    home, before = joined(tmp_path, TASK), server.check_ins(TASK)
    fleet, summary = run(home, server.address, server.code, TASK, rows(20 * 10), devices=20)
    assert (summary.check_ins, summary.endings) == (40, {"source": 20})
    assert server.check_ins(TASK) == before + 40
    assert len({key.id for _, key in fleet.all_keys()}) == 20
    with home.ledger() as ledger:
        for number in range(20):
            assert ledger.of(number).samples_given() == 10
            assert ledger.of(number).resend() == ()
            assert len(ledger.of(number).receipts()) == 2
    assert [path.name for path in tmp_path.glob("*.sqlite")] == ["ledger.sqlite"]


def test_two_processes_cannot_work_in_one_folder(tmp_path):
    home = Folder(tmp_path)
    with home.locked(), pytest.raises(CrowdmlError, match="Another process"), Folder(tmp_path).locked():
        pass


def test_back_off_grows_to_its_cap_and_is_spread_out():
    patience = Patience(1.0, 60.0)
    for failures, most in ((0, 1), (3, 8), (6, 60), (1000, 60)):
        pauses = [patience.pause(failures, chance=chance()) for _ in range(200)]
        assert min(pauses) >= most / 2
        assert max(pauses) <= most
        assert max(pauses) - min(pauses) > most / 4
    assert all(30 <= patience.pause(0, 30, chance=chance()) <= 31 for _ in range(100))


def test_what_an_owner_is_shown_is_computed_from_the_task():
    shown = consent_to(Price.of(find(SHORT), SHORT))
    assert shown.check_ins == 2
    assert shown.epsilon_sample == pytest.approx(1.5, abs=1e-6)
    assert shown.task == SHORT.hash.hex()
    assert len(shown.promises) == 2


def test_a_statement_names_the_totals_that_hold_once_its_charges_are_written():
    def charge(first: int, last: int) -> Charge:
        loss, whole = Pure(Fraction(1, 10)), Pure(Fraction(1, 10) * (last - first + 1))
        when = "2025-01-31T12:00:00+00:00"
        return Charge(TASK.hash, "x", loss, whole, Observer.ANYONE, Adjacency.REPLACE_SAMPLE, first, last, when)

    with Ledger(":memory:") as ledger:
        ledger.take_serials(10)
        plenty = Budget(Fraction(100), 1e-6, 1000)
        ledger.charge(TASK.hash, [charge(0, 4)], [plenty])
        fresh = statement_after(ledger, [charge(5, 9)], 5)
        assert fresh == Statement(("pure 1",), 10, ("pure 1/10",))
        again = statement_after(ledger, [charge(0, 4)], 5)
        assert again == Statement(("pure 1",), 5, ("pure 1/5",))


@pytest.mark.parametrize("dtype", ["<f2", "<f8", ">f4", "<i4"])
def test_weights_of_another_type_than_the_protocol_publishes_are_refused(tmp_path, dtype):
    """Coarser weights round scores to where no bound was proved; the shape alone does not show them."""
    weights = np.zeros((4, 3), dtype)
    assert understood(tmp_path, [dtype, [4, 3], weights.tobytes()]) == ("weights",)


def test_weights_of_another_shape_and_numbers_that_do_not_fit_are_refused(tmp_path):
    assert understood(tmp_path, ["<f4", [3, 4], bytes(48)]) == ("weights",)
    assert understood(tmp_path, ["<f4", [4, 3], bytes(48)], 2**40) == ("version",)
    assert understood(tmp_path, ["<f4", [4, 3], bytes(48)], 7) == ()


def understood(folder: Path, weights: list, version: int = 0) -> tuple[str, ...]:
    """The field for which a device refuses a publication; none where it takes it."""
    key = Key.generate()
    with Ledger(":memory:") as ledger:
        machine = Machine(Member(key, ledger, bytes(32), ()), TASK, find(TASK), noise=SystemSource())
        body = msgpack.packb({"weights": weights, "version": version})
        try:
            machine.understood("sgd/params/1", body)
        except ValueError as error:
            return tuple(name for name in ("weights", "version") if f"{name} has another" in str(error)) or (
                str(error),
            )
    return ()
