"""A ledger that went back in time is noticed, and gives nothing more: its samples would be given twice.

Review 2, privacy findings 2 and 8. What can be noticed: a ledger behind its own `given.log`, at the start; a whole
folder that was copied or put back, when the server has messages that the ledger does not know.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from loopback import LoopbackServer, QuickClock, joined, rows, run, serving, small_task
from masked_server import masked_task

from crowdml.device.client import Client
from crowdml.device.fleet import Fleet
from crowdml.device.folder import GIVEN, LEDGER, Folder, offer
from crowdml.device.marks import Mark, Marks, read_marks
from crowdml.device.rounds import Rounds, kept
from crowdml.device.runner import Commits
from crowdml.device.sources import FileSource
from crowdml.errors import LedgerError
from crowdml.protocols import find
from crowdml.secagg.device import advertise
from crowdml.secagg.terms import terms_of
from crowdml.storage import Ledger
from crowdml.wire.envelopes import open_signed
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import open_receipt
from crowdml.wire.statements import open_statement

TASK, SECOND = small_task("first"), small_task("second")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), TASK, SECOND) as server:
        yield server


def journal_of(server: LoopbackServer, home: Folder) -> list[tuple[int, int]]:
    """Number and samples of each check-in that the server has of this device, oldest first."""
    given = server.hub.store.given(home.key().id, 100)
    found = [(each.seq, each.statement) for each in given]
    return [(seq, open_statement(said).samples) for seq, said in reversed(found)]


def put_back(home: Folder, copy: bytes) -> None:
    (home.path / LEDGER).write_bytes(copy)


# --- at the start: behind its own mark ---


def test_a_ledger_that_was_put_back_from_a_copy_is_refused_and_the_signed_statement_goes_on(server, tmp_path):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(10))
    copy = (home.path / LEDGER).read_bytes()
    run(home, server.address, None, TASK, rows(30))
    before = journal_of(server, home)
    put_back(home, copy)
    for _ in range(2):
        with pytest.raises(
            LedgerError, match=r"does not know check-in 6, .* given 30 samples, and it knows of 10"
        ) as error:
            run(home, server.address, None, TASK, rows(40))
        assert "`crowdml join` then asks the server" in str(error.value)
        assert "backup" not in str(error.value)
    assert journal_of(server, home) == before
    (home.path / LEDGER).unlink()  # as it says
    _, summary = run(home, server.address, None, TASK, rows(10, seed=7), new_data=True)
    assert summary.check_ins == 2
    assert journal_of(server, home)[len(before) :] == [(7, 35), (8, 40)]


def test_a_copy_from_before_the_last_check_in_of_the_same_samples_is_noticed_too(server, tmp_path):
    """Samples that serve again do not raise the number of samples: the check-in itself must be known."""
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(10))
    path = home.path / GIVEN
    line = json.loads(path.read_text().splitlines()[-1])
    path.write_text(path.read_text() + json.dumps([*line[:3], "ab" * 32, *line[4:]]) + "\n")
    with pytest.raises(LedgerError, match=r"does not know check-in 2"):
        run(home, server.address, None, TASK, rows(20))


def test_the_last_check_in_of_any_task_must_be_known(server, tmp_path):
    home = joined(tmp_path, TASK)
    home.accept(SECOND, offer(SECOND, find(SECOND)))
    run(home, server.address, server.code, TASK, rows(10))
    copy = (home.path / LEDGER).read_bytes()
    run(home, server.address, server.code, SECOND, rows(20))
    run(home, server.address, None, TASK, rows(10))  # nothing new: it only looks
    put_back(home, copy)
    with pytest.raises(LedgerError, match=r"older than `given\.log`"):
        run(home, server.address, None, TASK, rows(20))


def test_a_device_that_was_killed_between_its_ledger_and_its_mark_goes_on(server, tmp_path):
    """The mark comes second, and the message is sent after both: so no crash looks like an older copy."""
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(10))
    marked = (home.path / GIVEN).read_bytes()
    told = kill_at(home, server, "charged", rows(15))
    assert told[-1] == "charged"
    (home.path / GIVEN).write_bytes(marked)
    _, summary = run(home, server.address, None, TASK, rows(15))
    assert summary.check_ins == 1
    last = open_signed(server.hub.store.statement(home.key().id))
    assert home.marked()[0].last.hash == last.hash.hex()  # so that a lost ledger is recovered from it
    (home.path / LEDGER).unlink()
    _, summary = run(home, server.address, None, TASK, rows(10, seed=3), new_data=True)
    assert summary.check_ins == 2


class Killed(BaseException):
    """As if the process ended here: nothing after it is written or sent."""


def kill_at(home: Folder, server: LoopbackServer, moment: str, samples: list[Any]) -> list[str]:
    told: list[str] = []

    def tell(text: str) -> None:
        told.append(text)
        if text == moment:
            raise Killed

    async def part() -> None:
        client = Client(server.address)
        found, protocol = home.accepted(TASK.hash)
        fleet = Fleet(home, client, found, protocol, clock=QuickClock().clock)
        fleet.tell = tell
        try:
            await fleet.run(lambda _: FileSource("rows 0", samples, found))
        finally:
            await client.close()

    with pytest.raises(Killed):
        asyncio.run(part())
    return told


def as_version_0_1(home: Folder) -> None:
    """The same marks as the first version wrote them: without the task, and without the kind of message."""
    path = home.path / GIVEN
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps([*line[:4], *filter(None, line[4:5])]) + "\n" for line in lines))


def test_marks_of_version_0_1_are_read_and_an_older_ledger_is_noticed_by_its_samples(server, tmp_path):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(10))
    copy = (home.path / LEDGER).read_bytes()
    run(home, server.address, None, TASK, rows(20))
    as_version_0_1(home)
    assert run(home, server.address, None, TASK, rows(25))[1].check_ins == 1
    as_version_0_1(home)
    put_back(home, copy)
    with pytest.raises(LedgerError, match="given 25 samples, and it knows of 10"):
        run(home, server.address, None, TASK, rows(30))


# --- at a 409: the server knows more than the ledger ---


def test_the_second_copy_of_a_folder_stops_for_good_and_the_first_goes_on(server, tmp_path):
    home = joined(tmp_path / "one", TASK)
    run(home, server.address, server.code, TASK, rows(10))
    shutil.copytree(home.path, tmp_path / "two")
    copy = Folder(tmp_path / "two")
    run(home, server.address, None, TASK, rows(15))  # apart by one message: the same number, other bytes
    before = journal_of(server, home)
    _, summary = run(copy, server.address, None, TASK, rows(20))
    assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
    assert "The server has 3 messages of this device for this task, and its ledger knows of 2." in summary.reason
    assert "this folder is a copy" in summary.reason
    _, summary = run(copy, server.address, None, TASK, rows(20))
    assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
    assert "What this device has given is not known" in summary.reason
    assert journal_of(server, home) == before
    assert run(home, server.address, None, TASK, rows(20))[1].check_ins == 1


def test_a_whole_folder_that_was_put_back_stops_at_its_first_message(server, tmp_path):
    home = joined(tmp_path / "device", TASK)
    run(home, server.address, server.code, TASK, rows(10))
    shutil.copytree(home.path, tmp_path / "copy")
    run(home, server.address, None, TASK, rows(40))
    shutil.rmtree(home.path)
    shutil.copytree(tmp_path / "copy", home.path)
    _, summary = run(home, server.address, None, TASK, rows(40))
    assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
    assert "The server has 8 messages of this device for this task, and its ledger knows of 2." in summary.reason
    assert len(journal_of(server, home)) == 8


def test_a_server_that_was_restored_asks_for_a_smaller_number_and_the_device_goes_on(tmp_path):
    task = small_task("restored")
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        run(home, server.address, server.code, task, rows(10))
        server.stop()
        shutil.copytree(server.folder, tmp_path / "backup")
        server.start()
        run(home, server.address, None, task, rows(25))
        server.stop()
        shutil.rmtree(server.folder)
        shutil.copytree(tmp_path / "backup", server.folder)
        server.start()
        _, summary = run(home, server.address, None, task, rows(35))
        # the first message answers a version that this server never published; its number serves again
        assert summary.endings == {"source": 1}
        assert summary.check_ins >= 1
        with home.ledger() as ledger:
            assert [open_receipt(each).seq for each in ledger.receipts()][:6] == [1, 2, 3, 4, 5, 3]


def test_after_a_lost_ledger_a_device_learns_its_number_in_another_task_from_the_server(server, tmp_path):
    home = joined(tmp_path, TASK)
    home.accept(SECOND, offer(SECOND, find(SECOND)))
    run(home, server.address, server.code, TASK, rows(15))
    run(home, server.address, server.code, SECOND, rows(25))
    (home.path / LEDGER).unlink()
    # The statement is of the second task: of the first no number is known.
    for task, most, fresh in ((TASK, 4, rows(5, seed=2)), (SECOND, 3, rows(10, seed=2))):
        _, summary = run(home, server.address, None, task, fresh, new_data=True)
        assert summary.endings == {"source": 1}
        with home.ledger() as ledger:
            assert open_receipt(ledger.last_receipt(task.hash)).seq == most


def test_a_message_of_another_task_that_waited_may_come_with_smaller_totals(server, tmp_path):
    """Sealed before those of the second task, and sent after them: nobody went back in time."""
    home = joined(tmp_path, TASK)
    home.accept(SECOND, offer(SECOND, find(SECOND)))
    run(home, server.address, server.code, TASK, rows(10))
    kill_at(home, server, "charged", rows(15))
    run(home, server.address, server.code, SECOND, rows(35))
    _, summary = run(home, server.address, None, TASK, rows(15))
    assert (summary.check_ins, summary.endings) == (1, {"source": 1})
    assert [samples for _, samples in journal_of(server, home)] == [5, 10, 20, 25, 30, 35, 15]


class Answering(Client):
    """The way to a server that refuses every check-in with one problem."""

    problem: Problem

    async def request(self, method: str, path: str, body: bytes = b"", *more: Any, **options: Any) -> Any:
        if path.endswith("/check-in"):
            raise self.problem
        return await super().request(method, path, body, *more, **options)


def test_a_device_whose_totals_fell_stops_for_good(server, tmp_path, monkeypatch):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(5))
    Answering.problem = Problem("totals-fell", "Seq 2 comes with smaller totals than the check-in before it.")
    monkeypatch.setattr("loopback.Client", Answering)
    _, summary = run(home, server.address, None, TASK, rows(15))
    assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
    assert "smaller totals" in summary.reason
    monkeypatch.undo()
    assert run(home, server.address, None, TASK, rows(15))[1].endings == {"budget": 1}


# --- rounds ---


def open_marks(path: Path) -> Marks:
    return Marks(path, path.write_bytes)


def test_the_highest_round_of_each_task_is_kept_whatever_is_marked_after_it(tmp_path):
    """Finding 8: one message without a round, or of another task, made the mark forget the round."""
    path = tmp_path / GIVEN
    one, two = "aa" * 32, "bb" * 32
    marks = open_marks(path)
    lines = [
        Mark(1, 5, "01", 7, one),
        Mark(7, 5, "02", 7, one, is_check_in=False),
        Mark(1, 9, "03", 3, two),
        Mark(2, 5, "04", 6, one),
        Mark(3, 12, "05", 0, "cc" * 32),
    ]
    for mark in lines:
        marks.add(0, mark)
    marks.flush()
    marks.close()
    for _ in range(2):
        found = read_marks(path)[0]
        assert (found.round(one), found.round(two), found.round("cc" * 32)) == (7, 3, 0)
        assert (found.last, found.check_in) == (lines[-1], lines[-1])
        marks = open_marks(path)  # and written anew
        marks.close()
    assert len(path.read_text().splitlines()) == 3


def test_an_older_ledger_leaves_its_round_although_another_task_was_marked_since(tmp_path):
    task = masked_task()
    terms, home = terms_of(task, find(task).mechanisms(task)), Folder(tmp_path)
    key = home.key()
    with home.marks() as marks, Ledger(tmp_path / LEDGER) as ledger:
        ledger.keep_round(task.hash, kept(advertise(terms, 7, key, after=0), b""))
        marks.add(0, Mark(1, 5, "01" * 32, 7, task.hash.hex()))
        marks.add(0, Mark(4, 9, "02" * 32, 0, "bb" * 32))
        marks.flush()
        nothing: Any = None
        made = Rounds(
            key, ledger, terms, "/v1/tasks/x", ask=nothing, statement=nothing, commit=Commits(ledger, 0.0, marks),
            gate=nothing, clock=nothing, ready=nothing, chance=nothing, tell=nothing,
        )  # fmt: skip
        assert not made.drawn
        assert (ledger.round(task.hash).number, ledger.round(task.hash).body) == (7, None)
