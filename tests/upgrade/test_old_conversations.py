"""Recorded conversations of version 0.1: its devices with today's server, its server's answers to today's devices."""

from __future__ import annotations

import asyncio
import hashlib
import io
import socket
import time

import pytest
from old_data import FACTS, TASKS, Exchange, Old, PassingClock, answering, conversations, goes_on, rows, serving, source

from crowdml.device.client import Client
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder, consent_to
from crowdml.device.joining import choose_task, fetch_task, list_tasks
from crowdml.price import Price

SAID = conversations()


def of(who: str) -> list[Exchange]:
    return [each for each in SAID if each.who == who]


def asked(line: io.BufferedRWPair, said: Exchange) -> tuple[int, bytes]:
    """Send a recorded request as it was, byte for byte; the answer's status and body."""
    line.write(said.request.encode("latin-1") + said.request_body)
    line.flush()
    status, size = int(line.readline().split()[1]), 0
    while (head := line.readline().lower()) != b"\r\n":
        if head.startswith(b"content-length:"):
            size = int(head.partition(b":")[2])
    return status, line.read(size)


def test_todays_server_answers_recorded_devices_as_version_0_1_did(old: Old, monkeypatch: pytest.MonkeyPatch):
    """Enrolment, check-outs, check-ins and a whole round under masks. Requests are signed with their time, so the
    server's clock stands where it stood then."""
    monkeypatch.setattr(time, "time", lambda: float(SAID[0].at))
    with (
        serving(old.server("server-before")) as server,
        socket.create_connection(("127.0.0.1", server.port), 20) as connection,
        connection.makefile("rwb") as line,
    ):
        for said in SAID:
            status, body = asked(line, said)
            assert status == said.status, f"{said.who}: {said.line}: {body[:300]!r}"
            if said.line.endswith(("/check-in", "/publication", "/devices")):
                assert body == said.answer_body, f"{said.who}: {said.line}"  # receipts, with their places and the chain
        server.wait_for(lambda: server.entries("together") == 6)  # five vectors, and their total
        publication = server.get(f"/v1/tasks/{TASKS['together'].hex()}/publication")
    assert hashlib.sha256(publication).hexdigest() == FACTS["tasks"]["together"]["publication"]


def test_todays_device_joins_by_the_answers_of_version_0_1(old: Old):
    key = old.device("device").path / "key.pem"
    home = Folder(old.path / "anew")
    home.make()
    (home.path / "key.pem").write_bytes(key.read_bytes())
    (home.path / "key.pem").chmod(0o600)

    async def join() -> None:
        async with answering(of("device")) as (address, _):
            client = Client(address)
            chosen = choose_task(await list_tasks(client), "activity")
            task, protocol = await fetch_task(client, bytes.fromhex(chosen.hash))
            home.accept(task, consent_to(Price.of(protocol, task)))
            await Fleet(home, client, task, protocol).enrol(FACTS["code"], None)
            await client.close()

    asyncio.run(join())
    before = old.device("device")
    assert home.server is not None
    assert before.server is not None
    assert home.server.key == before.server.key
    ours, theirs = (each.consents()[TASKS["activity"].hex()] for each in (home, before))
    assert (ours.epsilon_sample, ours.epsilon_device) == (theirs.epsilon_sample, theirs.epsilon_device)


def test_an_unsent_message_of_version_0_1_is_settled_by_the_receipt_of_version_0_1(old: Old):
    home = old.device("device-unsent")

    async def whole():
        async with answering(of("device")) as (address, heard):
            given = goes_on(home, address, "activity", lambda _, task: source(task, rows(task, 200, 1)), most=1)
            return *(await given), heard

    _, summary, heard = asyncio.run(whole())
    asked_for = f"GET /v1/devices/{home.key().id}/statement"  # devices of version 0.1 did not ask: it gets 404
    assert (summary.check_ins, heard) == (1, [asked_for, of("device")[-1].line])
    with home.ledger() as ledger:
        assert ledger.resend() == ()
        assert len(ledger.receipts()) == FACTS["devices"]["device-unsent"]["0"]["receipts"] + 1
        assert len(ledger.charges()) == FACTS["devices"]["device-unsent"]["0"]["charges"]


def test_a_device_that_drew_with_version_0_1_finishes_its_round_by_the_answers_of_version_0_1(old: Old):
    home, clock = old.device("masked-drawn"), PassingClock(of("masked")[-1].at)

    async def whole():
        async with answering(of("masked")) as (address, heard):
            given = goes_on(
                home, address, "together", lambda _, task: source(task, rows(task, 20, 10)), most=1, clock=clock.clock
            )
            return *(await given), heard

    _, summary, heard = asyncio.run(asyncio.wait_for(whole(), 30))
    posted = [each.line for each in of("masked") if each.line.startswith("POST ")]
    assert summary.check_ins == 1
    assert [line for line in heard if line.startswith("POST ")] == posted[-3:]  # the vector, agreement, reveal
    with home.ledger() as ledger:
        standing = ledger.round(TASKS["together"])
        assert standing is not None
        assert (standing.number, standing.body) == (1, None)
        assert len(ledger.charges()) == FACTS["devices"]["masked-drawn"]["0"]["charges"]
