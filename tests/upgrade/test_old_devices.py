"""Folders of devices that version 0.1 wrote: today's code reads them, goes on with them and verifies them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from old_data import FACTS, TASKS, Old, Serving, go_on, goes_on, moved, readings, rows, serving, source, transcript

from crowdml.cli import cli
from crowdml.device.client import Client
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder, consent_to
from crowdml.device.joining import fetch_task
from crowdml.device.learning import recall
from crowdml.errors import CrowdmlError, LedgerError
from crowdml.price import Price
from crowdml.storage import Ledger
from crowdml.storage.server.looks import Validation, validations
from crowdml.task import Task
from crowdml.wire.envelopes import open_signed

FOLDERS = sorted(FACTS["devices"])
DELTA = 1e-6


def crowdml(*words: object) -> dict[str, Any]:
    """Run a command in this process; what it says as JSON."""
    done = CliRunner().invoke(cli, [*map(str, words), "--json", "-"], prog_name="crowdml")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def facts_of(home: Folder, ledger: Ledger) -> dict[str, Any]:
    """What today's code reads of one device, in the form of facts.json."""
    top = ledger.dearest_sample(DELTA)
    rounds = {task[:12]: ledger.round(bytes.fromhex(task)) for task in home.consents()}
    return {
        "id": home.key(ledger.device if home.is_fleet else None).id,
        "charges": len(ledger.charges()),
        "samples": ledger.samples_given(),
        "serial": ledger.next_serial(),
        "unsent": len(ledger.resend()),
        "waiting": sum(len(ledger.waiting(bytes.fromhex(task))) for task in home.consents()),
        "receipts": len(ledger.receipts()),
        "sample": pytest.approx(0.0 if top is None else top[1].epsilon(DELTA)),
        "device": pytest.approx(ledger.device_total().epsilon(DELTA)),
        "device_alone": pytest.approx(ledger.device_total(alone=True).epsilon(DELTA)),
        "sources": dict(ledger.sources()),
        "round": {task: [at.number, at.body is not None] for task, at in rounds.items() if at is not None} or None,
    }


def before(name: str, number: int = 0) -> dict[str, Any]:
    return FACTS["devices"][name][str(number)]


# --- read ---


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_reads_as_version_0_1_read_it(old: Old, name: str):
    """Charges, totals, what waits, receipts, places in sources, and the round under way."""
    home = old.device(name)
    with home.ledger() as book:
        for number, said in FACTS["devices"][name].items():
            assert said == facts_of(home, book.of(int(number)))
    shown = crowdml("ledger", "--folder", home.path)
    if not home.is_fleet:
        assert (shown["samples"], len(shown["charges"])) == (before(name)["samples"], before(name)["charges"])
        assert shown["epsilon_device"] == pytest.approx(before(name)["device"])


@pytest.mark.parametrize("name", ["sensing", "recovered", "fleet", "masked", "masked-fleet", "corner-0", "loose"])
def test_receipts_hold_against_the_old_journal_and_its_transcript(old: Old, server: Serving, name: str):
    home = moved(old.device(name), server.address)
    (task,) = (each.name for each in home.consents().values())
    said = crowdml("ledger", "--verify", "--folder", home.path, "--transcript", transcript(task))
    receipts = sum(each["receipts"] for each in FACTS["devices"][name].values())
    assert (said["holds"], said["server_asked"]) == (True, True)
    assert [(each["receipts"], each["in_chain"]) for each in said["tasks"]] == [(receipts, receipts)]


# --- go on ---


def test_a_device_sends_its_unsent_message_as_it_is_goes_on_within_the_owners_budget_and_leaves(
    old: Old, server: Serving
):
    home, entries = old.device("device"), server.entries("activity")
    with home.ledger() as ledger:
        (unsent,) = ledger.resend()
    _, summary = go_on(home, server.address, "activity", lambda _, task: source(task, rows(task, 600, 1)), most=2)
    sent = [open_signed(body) for _, body in server.hub.store.tail(TASKS["activity"], entries)]
    assert (summary.check_ins, summary.repeated, summary.refused) == (2, 0, 0)
    assert sent[0].data == unsent.body
    assert [each.envelope.seq for each in sent] == [4, 5]
    with home.ledger() as ledger:
        after = facts_of(home, ledger)
    assert after["charges"] == before("device")["charges"] + 3  # of the fifth check-in alone
    assert after["samples"] == before("device")["samples"] + 20
    assert after["sources"] == {"csv:rows.csv:0/1": 100}
    _, summary = go_on(home, server.address, "activity", lambda _, task: source(task, rows(task, 600, 1)))
    assert (summary.check_ins, summary.endings) == (20, {"budget": 1})  # 500 samples in all
    left = crowdml("leave", "--folder", moved(home, server.address).path, "--yes")
    assert left == {"left": True, "server_told": True}
    assert not home.path.exists()


def test_a_message_that_the_old_server_has_is_not_counted_twice(old: Old):
    home = old.device("device-unsent")
    with serving(old.server()) as server:
        _, summary = go_on(home, server.address, "activity", lambda _, task: source(task, rows(task, 200, 1)), most=1)
        assert server.entries("activity") == FACTS["tasks"]["activity"]["entries"]
    assert (summary.check_ins, summary.repeated) == (1, 1)


def test_an_older_copy_of_an_old_ledger_is_refused_before_anything_is_sent(old: Old):
    """The marks of version 0.1 say no task, and tell all the same that the ledger does not know the last message."""
    home, earlier = old.device("device"), old.device("device-unsent")
    (home.path / "ledger.sqlite").write_bytes((earlier.path / "ledger.sqlite").read_bytes())
    nowhere = "http://127.0.0.1:9"
    with pytest.raises(LedgerError, match=r"older than `given\.log`"):
        go_on(home, nowhere, "activity", lambda _, task: source(task, rows(task, 200, 1)))


def test_samples_that_wait_in_the_folder_are_given_and_the_source_is_not_read_again(old: Old, server: Serving):
    home = old.device("sensing")
    _, summary = go_on(home, server.address, "activity", lambda _, task: source(task, rows(task, 50, 60)))
    assert (summary.check_ins, summary.endings) == (1, {"source": 1})
    with home.ledger() as ledger:
        assert len(ledger.waiting(TASKS["activity"])) == 10
        assert ledger.charges()[0].first_sample >= 20
        assert ledger.next_serial() == 50


def test_a_recovered_ledger_goes_on_with_its_totals_and_asks_before_it_reads_another_source(old: Old, server: Serving):
    home = old.device("recovered")
    assert (home.recovered, home.exhausted) == ({0}, frozenset())

    def known(_: int, task: Task) -> Any:
        return source(task, rows(task, 40, 31), "csv:new.csv:0/1")

    _, summary = go_on(home, server.address, "activity", known)
    assert (summary.check_ins, summary.endings) == (1, {"source": 1})
    with home.ledger() as ledger:
        assert ledger.samples_given() == before("recovered")["samples"] + 20
        assert ledger.device_total().epsilon(DELTA) > before("recovered")["device"]
        assert "recovered" in {charge.mechanism for charge in ledger.charges()}
    _, summary = go_on(home, server.address, "activity", lambda _, task: source(task, rows(task, 40, 30)))
    assert (summary.check_ins, summary.endings) == (0, {"budget": 1})


def test_a_ledger_that_is_lost_after_the_update_begins_from_the_old_statement(old: Old):
    home = old.device("sensing")
    with home.ledger() as ledger:
        total = ledger.device_total().epsilon(DELTA)
    (home.path / "ledger.sqlite").unlink()

    async def recover(address: str) -> None:
        client = Client(address)
        (await Fleet(home, client, *home.accepted(TASKS["activity"])).open_ledger()).close()
        await client.close()

    with serving(old.server()) as server:
        asyncio.run(recover(server.address))
    assert (home.recovered, home.exhausted) == ({0}, frozenset())
    with home.ledger() as ledger:
        assert ledger.samples_given() == 20
        assert ledger.device_total().epsilon(DELTA) >= total * (1 - 1e-9)


def test_a_fleet_goes_on_and_the_next_look_at_old_charged_rows_is_charged_on_top(old: Old, server: Serving):
    home = old.device("fleet")
    _, summary = go_on(
        home,
        server.address,
        "digits012",
        lambda number, task: source(task, rows(task, 28, 20 + number), f"csv:rows.csv:{number}/3"),
    )
    assert (summary.devices, summary.check_ins, summary.refused) == (3, 1, 0)
    with home.ledger() as book:
        assert [len(book.of(number).receipts()) for number in range(3)] == [1, 1, 1]
        assert [len(book.of(number).charges()) for number in range(3)] == [1, 1, 1]

    def seen() -> Validation:
        return validations(server.hub.store)[TASKS["digits012"]]

    server.wait_for(lambda: seen().spent == Fraction(3, 2))
    assert seen().left == 3
    before_it = FACTS["tasks"]["digits012"]["entries"]
    server.wait_for(lambda: server.entries("digits012") == before_it + 2)  # a check-in, and the server's look


def test_a_round_that_was_under_way_is_summed(old: Old, server: Serving):
    """Of five devices one had sent its vector, two had drawn and not sent, two had not drawn. Nobody draws twice."""
    one, crowd, entries = old.device("masked"), old.device("masked-fleet"), FACTS["tasks"]["together"]["entries"]

    async def both() -> Any:
        return await asyncio.gather(
            goes_on(one, server.address, "together", lambda _, task: source(task, rows(task, 5, 10))),
            goes_on(
                crowd,
                server.address,
                "together",
                lambda number, task: source(task, rows(task, 5, 11 + number), f"csv:rows.csv:{number}/4"),
            ),
        )

    ((_, single), (_, many)) = asyncio.run(asyncio.wait_for(both(), 60))
    server.wait_for(lambda: server.entries("together") == entries + 5)  # four more vectors, and the total
    summed = {each.number: each for each in server.hub.round_figures(TASKS["together"])}[2]
    assert (summed.phase, summed.survived) == ("summed", 5)
    assert (single.check_ins, many.check_ins) == (1, 3)
    with one.ledger() as ledger, crowd.ledger() as book:
        for each in (ledger, *(book.of(number) for number in range(4))):
            assert len(each.charges()) == 4  # two rows of the table in each of two rounds
            assert each.resend() == ()
            assert len(each.receipts()) == 2


def test_a_revoked_device_is_told_so(old: Old, server: Serving):
    home = old.device("revoked")
    _, summary = go_on(home, server.address, "activity", lambda _, task: source(task, rows(task, 40, 41)))
    assert (summary.check_ins, summary.endings) == (0, {"revoked": 1})


def test_a_letter_that_was_never_sent_arrives_and_is_heard(old: Old, server: Serving):
    heard = {}
    for place in (2, 0):
        home = old.device(f"corner-{place}")
        with home.ledger() as ledger:
            heard[place] = recall(ledger, *home.accepted(TASKS["street"]))[1].heard
        given = readings(8 * 3 + 3, place)
        _, summary = go_on(home, server.address, "street", lambda _, task, given=given: source(task, given))
        assert (summary.check_ins, summary.refused, summary.letters.refused) == (int(place == 2), 0, {})
    assert summary.letters.heard > heard[0]
    assert crowdml("predict", "--folder", old.device("corner-0").path)["next"] in ("quiet", "busy", "full")


def test_an_old_invitation_lets_a_new_device_in(tmp_path: Path, server: Serving):
    home = Folder(tmp_path / "new")
    home.make()

    async def join() -> None:
        client = Client(server.address)
        task, protocol = await fetch_task(client, TASKS["activity"])
        home.accept(task, consent_to(Price.of(protocol, task)))
        await Fleet(home, client, task, protocol).enrol(FACTS["code"], None)
        await client.close()

    asyncio.run(join())
    _, summary = go_on(home, server.address, "activity", lambda _, task: source(task, rows(task, 20, 70)))
    assert summary.check_ins == 1


# --- the owner ---


def read_before(home: Folder, path: Path) -> None:
    """Let the old ledger know its file by where this test has it: a ledger names files by their whole path."""
    with contextlib.closing(sqlite3.connect(home.path / "ledger.sqlite")) as opened, opened as connection:
        connection.execute("update source set name = ? where name = 'csv:rows.csv:0/1'", (f"csv:{path}:0/1",))


def test_an_owner_joins_again_by_command_where_the_file_was_left_and_opens_the_device_page(old: Old):
    """What the owner accepted is not asked again, and the budget that was set is kept until another is. A file in which
    version 0.1 counted rows in another way than by lines is refused: a row could be given twice."""
    home, path = old.device("device"), (old.path / "rows.csv").resolve()
    read_before(home, path)
    task, _ = home.accepted(TASKS["activity"])
    lines = [",".join([*map(str, x), task.labels.classes[y]]) for x, y in rows(task, 100, 1)]
    heading = ",".join([*(f"bin {number}" for number in range(64)), "label"])
    words = ("--folder", home.path, "--source", f"csv:{path}")
    with serving(old.server()) as server:
        path.write_text("\n".join([*lines[:40], "", *lines[40:]]) + "\n")
        refused = CliRunner().invoke(cli, ["join", server.address, FACTS["code"], *map(str, words)])
        assert (refused.exit_code, "could be given twice" in refused.stderr) == (1, True), refused.stderr
        path.write_bytes("".join(f"{line}\r\n" for line in (heading, *lines)).encode())
        said = crowdml("join", server.address, FACTS["code"], *words)
        assert (said["check_ins"], said["refused"]) == (1, 0)
        assert server.entries("activity") == FACTS["tasks"]["activity"]["entries"] + 2  # the unsent one went first
        link = crowdml("ledger", "--web", "--no-open", "--folder", home.path)["link"]
        assert home.key().id[:8] in server.get(link.removeprefix(server.address)).decode()
    with home.ledger() as ledger:
        assert max(ledger.sources().values()) == 100
        assert ledger.samples_given() == before("device")["samples"] + 20
    assert home.budget is not None
    assert (home.budget.epsilon, home.budget.samples) == ("2", 500)
    crowdml("budget", "set", "--epsilon", "3", "--samples", "600", "--folder", home.path)
    assert (home.budget.epsilon, home.budget.samples) == ("3", 600)


# --- rounds of a server that was restored or gave them up ---


async def all_five(one: Folder, crowd: Folder, address: str, *, rows_each: int, most: int | None = None) -> list[Any]:
    """What the device of `masked` and the four of `masked-fleet` did, on this many rows each."""
    first, others = await asyncio.gather(
        goes_on(one, address, "together", lambda _, task: source(task, rows(task, rows_each, 10)), most=most),
        goes_on(
            crowd,
            address,
            "together",
            lambda number, task: source(task, rows(task, rows_each, 11 + number), f"csv:rows.csv:{number}/4"),
            most=most,
        ),
    )
    return [first[1], others[1]]


def charges_of(one: Folder, crowd: Folder) -> list[int]:
    """How many charges each of the five has; nothing of theirs is left to be sent."""
    with one.ledger() as ledger, crowd.ledger() as book:
        each = (ledger, *(book.of(number) for number in range(4)))
        assert all(found.resend() == () for found in each)
        return [len(found.charges()) for found in each]


def test_devices_finish_their_round_on_a_restored_server_and_meet_again_in_rounds_far_above(old: Old):
    crowdml("restore", old.backup(), "--folder", old.path / "restored")
    one, crowd = old.device("masked"), old.device("masked-fleet")
    with serving(old.path / "restored") as server:
        asyncio.run(asyncio.wait_for(all_five(one, crowd, server.address, rows_each=10), 60))
        server.wait_for(lambda: len(summed(server)) == 4)
        assert summed(server)[:2] == [1, 2]
        assert min(summed(server)[2:]) > 1_000_000
    assert charges_of(one, crowd) == [8] * 5  # two rows of the table in each of four rounds


def summed(server: Serving) -> list[int]:
    figures = server.hub.round_figures(TASKS["together"])
    return sorted(each.number for each in figures if each.phase == "summed" and each.survived == 5)


def test_devices_leave_an_old_round_that_the_server_gave_up_and_what_they_drew_stays_charged(old: Old):
    folder, one, crowd = old.server(), old.device("masked"), old.device("masked-fleet")
    crowdml("task", "stop", "together", "--folder", folder)
    with serving(folder):
        pass  # it gives up the rounds of a task that is stopped
    crowdml("task", "start", "together", "--folder", folder)
    with serving(folder) as server:
        done = asyncio.run(asyncio.wait_for(all_five(one, crowd, server.address, rows_each=10, most=2), 60))
        server.wait_for(lambda: len(summed(server)) == 3)
        assert 2 not in summed(server)
    assert [each.check_ins for each in done] == [2, 8]
    assert charges_of(one, crowd) == [8, 8, 6, 6, 8]  # two rounds more for each, beside what was drawn in vain


# --- a delta that promises nothing ---


def test_a_device_of_a_task_with_a_large_delta_gives_nothing_more(old: Old, server: Serving):
    """Its owner reads why; what it gave stays in the ledger, which other tests here read."""
    home, entries = old.device("loose"), server.entries("loose")
    with contextlib.suppress(CrowdmlError):
        go_on(home, server.address, "loose", lambda _, task: source(task, rows(task, 40, 50)))
    assert server.entries("loose") == entries
    with home.ledger() as ledger:
        assert len(ledger.charges()) == before("loose")["charges"]
