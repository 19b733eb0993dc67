"""A ledger that went back in time is noticed, and gives nothing more: its samples would be given twice.

Review 2, privacy findings 2 and 8. What can be noticed: a ledger behind its own `given.log`, at the start; a whole
folder that was copied or put back, before its first draw, when the server shows a message that the ledger does not
know.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
from loopback import LoopbackServer, QuickClock, joined, rows, run, serving, small_task
from masked_server import masked_task

from crowdml.device.client import Client, Unreachable
from crowdml.device.commits import Commits
from crowdml.device.fleet import Fleet
from crowdml.device.folder import GIVEN, LEDGER, Folder, consent_to
from crowdml.device.marks import Mark, Marks, read_marks
from crowdml.device.rounds import OwnRounds, kept
from crowdml.device.sources import FileSource
from crowdml.errors import DataError, LedgerError
from crowdml.price import Price
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
    home.accept(SECOND, consent_to(Price.of(find(SECOND), SECOND)))
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


# --- before the first draw: the server shows a message that the ledger does not know ---


def put_folder_back(home: Folder, copy: Path) -> None:
    shutil.rmtree(home.path)
    shutil.copytree(copy, home.path)


def charges(home: Folder) -> int:
    with home.ledger() as ledger:
        return len(ledger.charges())


class Between(Client):
    """The way to a server, on which somebody may answer in its place, and everything that is asked is noted."""

    asked: ClassVar[list[str]] = []
    answers: ClassVar[dict[str, list[Exception | None]]] = {}
    """By the end of a path: what comes in the place of its next answers; None: the server's own."""

    async def request(self, method: str, path: str, body: bytes = b"", *more: Any, **options: Any) -> Any:
        last = path.rpartition("/")[2]
        self.asked.append(last)
        if self.answers.get(last) and (instead := self.answers[last].pop(0)) is not None:
            raise instead
        return await super().request(method, path, body, *more, **options)


@pytest.fixture
def between(monkeypatch):
    monkeypatch.setattr("loopback.Client", Between)
    monkeypatch.setattr(Between, "asked", [])
    monkeypatch.setattr(Between, "answers", {})
    return Between


def nothing_there() -> Problem:
    return Problem("not-found", "This device has not checked in yet.")


def test_a_whole_folder_that_was_put_back_gives_nothing_to_any_task(server, tmp_path):
    """Review 3, privacy finding 1: it gave all of its rows again to a second task, which nobody noticed."""
    home = joined(tmp_path / "device", TASK)
    home.accept(SECOND, consent_to(Price.of(find(SECOND), SECOND)))
    run(home, server.address, server.code, TASK, rows(10))
    shutil.copytree(home.path, tmp_path / "copy")
    run(home, server.address, None, TASK, rows(40))
    for task, code in ((SECOND, server.code), (TASK, None)):
        put_folder_back(home, tmp_path / "copy")
        before = charges(home)
        _, summary = run(home, server.address, code, task, rows(40))
        assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
        assert "signed when it had given 40 samples, and its ledger, which knows of 10, does not" in summary.reason
        assert "this folder is a copy" in summary.reason
        assert charges(home) == before, "nothing was drawn"
        _, summary = run(home, server.address, code, task, rows(40))  # for good
        assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
        assert "What this device has given is not known" in summary.reason
    assert len(journal_of(server, home)) == 8


def test_a_folder_from_before_its_first_message_is_noticed_too(server, tmp_path):
    home = joined(tmp_path / "device", TASK)
    run(home, server.address, server.code, TASK, [])
    shutil.copytree(home.path, tmp_path / "copy")
    run(home, server.address, None, TASK, rows(10))
    put_folder_back(home, tmp_path / "copy")
    _, summary = run(home, server.address, server.code, TASK, rows(10))
    assert (summary.check_ins, summary.endings, charges(home)) == (0, {"budget": 1}, 0)


def test_the_second_copy_of_a_folder_stops_for_good_and_the_first_goes_on(server, tmp_path):
    home = joined(tmp_path / "one", TASK)
    run(home, server.address, server.code, TASK, rows(10))
    shutil.copytree(home.path, tmp_path / "two")
    copy = Folder(tmp_path / "two")
    run(home, server.address, None, TASK, rows(15))  # apart by one message: the same number, other bytes
    before = journal_of(server, home)
    for reason in ("had given 15 samples", "What this device has given is not known"):
        _, summary = run(copy, server.address, None, TASK, rows(20))
        assert (summary.check_ins, summary.endings) == (0, {"budget": 1})
        assert reason in summary.reason
    assert journal_of(server, home) == before
    assert run(home, server.address, None, TASK, rows(20))[1].check_ins == 1


def test_a_device_that_the_server_never_knew_asks_nothing_and_one_that_is_restarted_asks_once(
    server, tmp_path, between
):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(10))
    assert "statement" not in between.asked
    between.asked.clear()
    assert run(home, server.address, None, TASK, rows(20))[1].check_ins == 2
    assert between.asked == ["statement", *["publication", "check-in"] * 2]


def test_a_device_asks_before_it_sends_what_waits(server, tmp_path, between):
    """Also where it has drawn in a round: a copy would agree in it a second time."""
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(10))
    kill_at(home, server, "charged", rows(15))
    between.asked.clear()
    assert run(home, server.address, None, TASK, rows(15))[1].check_ins == 1
    assert between.asked == ["statement", "check-in"]


def test_a_device_that_cannot_ask_waits_and_draws_nothing_meanwhile(server, tmp_path, between):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(10))
    between.asked.clear()
    between.answers["statement"] = [Unreachable("nobody is there"), Problem("busy", "Later.")]
    assert run(home, server.address, None, TASK, rows(15))[1].check_ins == 1
    assert between.asked == [*["statement"] * 3, "publication", "check-in"]
    between.answers["statement"] = [Problem("clock", "The clock is off.")]  # nobody knows: nothing is drawn
    before = charges(home)
    assert run(home, server.address, None, TASK, rows(20))[1].endings == {"refused": 1}
    assert charges(home) == before


# --- at a 409: a number, which anyone on the way may have written ---


def test_a_copy_that_both_folders_go_on_from_stops_for_good_at_a_409(server, tmp_path, between):
    """Both are under way: when the second asked, the server had nothing that it does not know."""
    home = joined(tmp_path / "one", TASK)
    run(home, server.address, server.code, TASK, rows(10))
    shutil.copytree(home.path, tmp_path / "two")
    copy = Folder(tmp_path / "two")
    run(home, server.address, None, TASK, rows(15))
    before = journal_of(server, home)
    between.answers["statement"] = [nothing_there()]
    _, summary = run(copy, server.address, None, TASK, rows(20))
    assert (summary.check_ins, summary.endings, copy.exhausted) == (0, {"budget": 1}, {0})
    assert "had given 15 samples" in summary.reason
    assert journal_of(server, home) == before


def test_a_number_that_no_signed_message_proves_ends_the_run_and_not_for_good(server, tmp_path, between):
    """Review 3, privacy finding 4: one unsigned answer made a device exhausted for good."""
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(10))
    between.answers["check-in"] = [Problem("seq-gap", "No.", expected=10**18)]
    _, summary = run(home, server.address, None, TASK, rows(20))
    assert (summary.check_ins, summary.endings, home.exhausted) == (0, {"refused": 1}, frozenset())
    assert f"says that it has {10**18 - 1} messages of this device for this task, and its ledger knows of 2" in (
        summary.reason
    )
    assert run(home, server.address, None, TASK, rows(20))[1].check_ins == 2
    assert [seq for seq, _ in journal_of(server, home)] == [1, 2, 3, 4]


def test_a_copy_is_not_obeyed_where_the_server_hides_what_it_has(server, tmp_path, between):
    home = joined(tmp_path / "device", TASK)
    run(home, server.address, server.code, TASK, rows(10))
    shutil.copytree(home.path, tmp_path / "copy")
    run(home, server.address, None, TASK, rows(15))
    put_folder_back(home, tmp_path / "copy")
    between.answers["statement"] = [nothing_there() for _ in range(4)]
    for _ in range(2):
        _, summary = run(home, server.address, None, TASK, rows(30))
        assert (summary.check_ins, summary.endings) == (0, {"refused": 1})
        assert "says that it has 3 messages of this device for this task, and its ledger knows of 2" in summary.reason
        with home.ledger() as ledger:
            assert ledger.samples_given() == 15, "one batch was drawn, and it waits"


def test_a_smaller_number_that_was_a_lie_makes_nobody_forget_what_the_server_took(server, tmp_path, between):
    """Review 3, privacy finding 4: the device then took the honest number for that of a copy."""
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(25))
    between.answers["check-in"] = [Problem("seq-conflict", "No.", expected=1)]
    _, summary = run(home, server.address, None, TASK, rows(35))
    assert (summary.check_ins, summary.endings) == (2, {"source": 1})
    assert [seq for seq, _ in journal_of(server, home)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_number_that_is_true_is_none(server, tmp_path, between):
    """Review 3, privacy finding 7: true is an int, and was taken for 1."""
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(10))
    between.answers["check-in"] = [Problem("seq-conflict", "No.", expected=True)]
    assert run(home, server.address, None, TASK, rows(15))[1].endings == {"refused": 1}
    with home.ledger() as ledger:
        assert [open_signed(each.body).envelope.seq for each in ledger.resend()] == [3]


def test_a_device_goes_on_when_a_newer_database_follows_an_older_one(tmp_path, between):
    """Review 3, privacy finding 4: its ledger has the receipts of both, and it was taken for a copy."""
    task = small_task("to-and-fro")

    def swap(server: LoopbackServer, keep: Path, use: Path) -> None:
        server.stop()
        shutil.copytree(server.folder, keep)
        shutil.rmtree(server.folder)
        shutil.copytree(use, server.folder)
        server.start()

    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        run(home, server.address, server.code, task, rows(10))
        server.stop()
        shutil.copytree(server.folder, tmp_path / "older")
        server.start()
        run(home, server.address, None, task, rows(25))
        swap(server, tmp_path / "newer", tmp_path / "older")
        assert run(home, server.address, None, task, rows(35))[1].endings == {"source": 1}
        swap(server, tmp_path / "unused", tmp_path / "newer")
        between.answers["statement"] = [None, nothing_there()]  # at the 409 its own receipts tell
        _, summary = run(home, server.address, None, task, rows(45))
        assert (summary.endings, home.exhausted) == ({"source": 1}, frozenset())
        assert summary.check_ins == 2
        assert [each.seq for each in server.hub.store.given(home.key().id, 100)] == [7, 6, 5, 4, 3, 2, 1]


def test_a_server_that_was_restored_asks_for_a_smaller_number_and_the_device_goes_on(tmp_path, between):
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
        between.answers["statement"] = [None, nothing_there()]  # at the 409 its own receipts tell
        _, summary = run(home, server.address, None, task, rows(35))
        # the first message answers a version that this server never published; its number serves again
        assert summary.endings == {"source": 1}
        assert summary.check_ins >= 1
        with home.ledger() as ledger:
            assert [open_receipt(each).seq for each in ledger.receipts()][:6] == [1, 2, 3, 4, 5, 3]


def test_after_a_lost_ledger_a_device_learns_its_number_in_another_task_from_the_server(server, tmp_path):
    home = joined(tmp_path, TASK)
    home.accept(SECOND, consent_to(Price.of(find(SECOND), SECOND)))
    run(home, server.address, server.code, TASK, rows(15))
    run(home, server.address, server.code, SECOND, rows(25))
    (home.path / LEDGER).unlink()
    # The statement is of the second task: of the first no number is known.
    for task, most, fresh in ((TASK, 4, rows(5, seed=2)), (SECOND, 3, rows(10, seed=2))):
        _, summary = run(home, server.address, None, task, fresh, new_data=True)
        assert summary.endings == {"source": 1}
        with home.ledger() as ledger:
            assert open_receipt(ledger.receipts(task.hash)[-1]).seq == most


def test_a_message_of_another_task_that_waited_may_come_with_smaller_totals(server, tmp_path):
    """Sealed before those of the second task, and sent after them: nobody went back in time."""
    home = joined(tmp_path, TASK)
    home.accept(SECOND, consent_to(Price.of(find(SECOND), SECOND)))
    run(home, server.address, server.code, TASK, rows(10))
    kill_at(home, server, "charged", rows(15))
    run(home, server.address, server.code, SECOND, rows(35))
    _, summary = run(home, server.address, None, TASK, rows(15))
    assert (summary.check_ins, summary.endings) == (1, {"source": 1})
    assert [samples for _, samples in journal_of(server, home)] == [5, 10, 20, 25, 30, 35, 15]


def test_a_device_whose_totals_fell_stops_and_for_good_where_a_signed_message_proves_it(server, tmp_path, between):
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(5))
    shutil.copytree(home.path, tmp_path / "copy")
    run(home, server.address, None, TASK, rows(10))
    fell = Problem("totals-fell", "Seq 3 comes with smaller totals than the check-in before it.")
    between.answers["check-in"] = [fell, fell]
    _, summary = run(home, server.address, None, TASK, rows(20))
    assert (summary.check_ins, summary.endings, home.exhausted) == (0, {"refused": 1}, frozenset())
    assert "smaller totals" in summary.reason
    copy = Folder(tmp_path / "copy")
    between.answers["statement"] = [nothing_there()]
    _, summary = run(copy, server.address, None, TASK, rows(20))
    assert (summary.check_ins, summary.endings, copy.exhausted) == (0, {"budget": 1}, {0})


# --- given.log itself ---


@pytest.mark.parametrize("damage", ["first line", "last line", "gone", "empty"])
def test_a_given_log_that_is_damaged_or_gone_is_doubt(server, tmp_path, damage):
    """Review 3, privacy finding 2: it was taken for one that knows nothing, and written anew."""
    home = joined(tmp_path, TASK)
    run(home, server.address, server.code, TASK, rows(10))
    path, before = home.path / GIVEN, charges(home)
    line = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes({"first line": b"[0, 1\n" + line, "last line": line + b"[0, 1\n", "empty": b""}[damage])
    for _ in range(2):
        with pytest.raises(LedgerError, match=r"given\.log.* is not known\. Nothing was sent\. Put the newest copy"):
            run(home, server.address, None, TASK, rows(20))
    assert charges(home) == before
    path.write_bytes(line + b"[0, 3, 15")  # cut short by a crash: that message was never sent
    assert run(home, server.address, None, TASK, rows(20))[1].check_ins == 2


def test_a_part_of_a_line_that_a_full_disk_took_garbles_no_later_line(tmp_path, monkeypatch):
    path = tmp_path / GIVEN
    marks, write = open_marks(path), os.write
    marks.add(0, Mark(1, 5, "01"))
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
    with pytest.raises(DataError, match="took a part of a line"):
        marks.flush()
    monkeypatch.undo()
    marks.add(1, Mark(1, 5, "02"))
    marks.flush()
    marks.close()
    assert {device: each.last.hash for device, each in read_marks(path).items()} == {0: "01", 1: "02"}


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
        made = OwnRounds(
            key, ledger, terms, "/v1/tasks/x", ask=nothing, statement=nothing, commit=Commits(ledger, 0.0, marks),
            gate=nothing, clock=nothing, ready=nothing, chance=nothing, tell=nothing,
        )  # fmt: skip
        assert not made.drawn
        assert (ledger.round(task.hash).number, ledger.round(task.hash).body) == (7, None)
