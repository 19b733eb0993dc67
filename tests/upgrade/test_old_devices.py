"""Folders of devices that version 0.1 wrote: today's code reads them, goes on with them and verifies them."""

from __future__ import annotations

import asyncio
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from old_data import FACTS, TASKS, Old, Serving, go_on, goes_on, moved, readings, rows, serving, source, transcript

from crowdml.cli import cli
from crowdml.device.client import Client
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder, offer
from crowdml.device.joining import fetch_task
from crowdml.device.learning import recall
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
    assert server.entries("digits012") == FACTS["tasks"]["digits012"]["entries"] + 1
    with home.ledger() as book:
        assert [len(book.of(number).receipts()) for number in range(3)] == [1, 1, 1]
        assert [len(book.of(number).charges()) for number in range(3)] == [1, 1, 1]

    def seen() -> Validation:
        return validations(server.hub.store)[TASKS["digits012"]]

    server.wait_for(lambda: seen().spent == Fraction(3, 2))
    assert seen().left == 3


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
        home.accept(task, offer(task, protocol))
        await Fleet(home, client, task, protocol).enrol(FACTS["code"], None)
        await client.close()

    asyncio.run(join())
    _, summary = go_on(home, server.address, "activity", lambda _, task: source(task, rows(task, 20, 70)))
    assert summary.check_ins == 1
