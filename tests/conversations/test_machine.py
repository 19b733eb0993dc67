"""Conversations of a device's machine with the server's turn: no socket, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

import pytest
from bench import samples, task_text
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine_bench import DEVICE, Crash, Device, Server, refuses, silent, unheard, untouched

from crowdml.device.asking import CheckOut
from crowdml.device.client import Answer
from crowdml.device.machine import Answered, Ask, TurnedDown, Write, Written
from crowdml.device.member import Ending
from crowdml.messages import decode
from crowdml.privacy.noise import SystemSource
from crowdml.protocols import sgd
from crowdml.storage import Budget, Ledger
from crowdml.task import parse
from crowdml.turn import first_turn, server_turn
from crowdml.wire.envelopes import open_signed
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import open_receipt

TASK = parse(task_text())
PRICED = len(sgd.mechanisms(TASK))
CHECK_IN = ["GET statement", "GET publication", f"write {PRICED} charges, 1 messages", "POST check-in", "acknowledge"]
FIRST, SECOND = samples(1), samples(2)


@pytest.fixture
def server() -> Server:
    return Server(TASK)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with Ledger(":memory:") as made:
        yield made


@pytest.fixture
def device(server: Server, ledger: Ledger) -> Device:
    return Device(TASK, server, ledger, noise=SystemSource())


def test_a_check_in_asks_the_budgets_compares_charges_and_only_then_sends(server: Server, device: Device):
    assert device.give(FIRST) is None
    assert device.done == CHECK_IN
    assert device.told == ["sensed", "checked out", "charged", "sent", "acknowledged"]
    (said,) = server.journal
    envelope = open_signed(said).envelope
    heard = server_turn(
        sgd.protocol, TASK, first_turn(sgd.protocol, TASK).state, decode(envelope.kind, envelope.body)
    ).published
    assert (heard.weights == server.fold.message.weights).all()
    assert device.life.tally.check_ins == 1
    assert not device.ledger.resend()


def test_no_byte_is_sent_between_a_write_and_the_word_that_it_is_on_disk(device: Device):
    for batch in (FIRST, SECOND):
        device.give(batch)
    for at, effect in enumerate(device.log):
        if isinstance(effect, Write):
            assert isinstance(device.log[at + 1], Written)


def test_a_second_check_in_asks_only_for_the_publication_and_knows_the_tag(device: Device):
    device.give(FIRST)
    before = len(device.done)
    device.give(SECOND)
    assert device.done[before:] == CHECK_IN[1:]
    asked = [each for each in device.log if isinstance(each, Ask) and each.path.endswith("publication")]
    assert [each.headers for each in asked] == [{}, {"If-None-Match": '"0"'}]


def test_an_answer_that_was_lost_is_asked_for_with_the_same_bytes_and_counts_once(server: Server, device: Device):
    server.instead.extend((*untouched(2), unheard(server), silent))
    device.give(FIRST)
    assert len(set(device.sent)) == 1
    assert len(device.sent) == 3
    assert [each for each in device.done if each.startswith("wait")] == ["wait 0.75", "wait 1.5"]
    assert (len(server.journal), len(device.ledger.charges())) == (1, PRICED)
    assert (device.life.tally.check_ins, device.life.tally.repeated, device.life.tally.retries) == (1, 1, 2)


@pytest.mark.parametrize(
    ("answer", "waited"),
    [
        (refuses("busy", at="publication", retry_after=10), ["wait 10.5"]),
        (refuses("task-paused", at="publication", retry_after=10), ["wait 15"]),
        (lambda _: Answered(Answer(200, {"crowdml-state": "paused", "crowdml-next": "60"}, b"")), ["wait 60"]),
    ],
    ids=["busy", "paused", "paused at its check-out"],
)
def test_nothing_is_drawn_while_a_server_is_busy_or_a_task_is_paused(server: Server, device: Device, answer, waited):
    server.instead.extend((*untouched(1), answer))
    device.give(FIRST)
    assert device.done == [*CHECK_IN[:2], *waited, *CHECK_IN[1:]]


def test_a_stopped_task_is_said_before_anything_is_charged(server: Server, device: Device):
    server.instead.extend((*untouched(1), lambda _: Answered(Answer(200, {"crowdml-state": "stopped"}, b""))))
    assert device.give(FIRST) == Ending("stopped", "The task is stopped. Nothing more was sent.")
    assert device.ledger.charges() == ()


def test_a_publication_of_another_kind_is_refused_before_anything_is_drawn(server: Server, device: Device):
    server.instead.extend((*untouched(1), lambda _: Answered(Answer(200, {"crowdml-kind": "sgd/other/1"}, b""))))
    ending = device.give(FIRST)
    assert ending is not None
    assert ending.kind == "refused"
    assert "it is of kind 'sgd/other/1'. Nothing was sent." in ending.reason
    assert device.ledger.charges() == ()


def test_a_budget_that_does_not_allow_the_step_is_said_before_anything_is_asked(server: Server, ledger: Ledger):
    device = Device(TASK, server, ledger, budgets=(Budget(Fraction(1), 1e-6, 10_000),))
    ending = device.give(FIRST)
    assert ending is not None
    assert ending.kind == "budget"
    assert device.done == []


def test_without_a_budget_nothing_is_given(server: Server, ledger: Ledger):
    ending = Device(TASK, server, ledger, budgets=()).give(FIRST)
    assert ending is not None
    assert ending.reason.startswith("No budget was given")


def test_what_a_crash_left_in_the_outbox_goes_first_as_the_same_bytes(server: Server, device: Device):
    server.instead.extend((*untouched(2), silent))
    device.crash_at = 7  # as it waits to ask again
    with pytest.raises(Crash):
        device.give(FIRST)
    again = Device(TASK, server, device.ledger, noise=SystemSource())
    assert again.begin() is None
    assert again.done == ["GET statement", "POST check-in", "acknowledge"]
    assert again.sent == device.sent == server.journal
    assert len(device.ledger.charges()) == PRICED


def test_a_server_that_was_restored_gets_the_same_release_under_the_number_that_it_expects(
    server: Server, device: Device
):
    for seed in range(3):
        device.give(samples(seed))
    server.forget(1)
    assert device.give(FIRST) is None
    replaced = ["POST check-in", "GET statement", "write 0 charges, 1 messages", "POST check-in", "acknowledge"]
    assert device.done[-5:] == replaced
    first, second = (open_signed(each).envelope for each in device.sent[-2:])
    assert (first.seq, second.seq) == (4, 2)
    assert replace(first, seq=2) == second
    assert len(device.ledger.charges()) == 4 * PRICED
    assert device.life.seq == 2


def test_a_number_that_no_signed_message_proves_ends_the_run_and_the_message_waits(server: Server, device: Device):
    device.give(FIRST)
    server.instead.extend((*untouched(1), refuses("seq-gap", expected=9)))
    ending = device.give(SECOND)
    assert ending is not None
    assert ending.kind == "refused"
    assert "has 8 messages of this device for this task, and its ledger knows of 1" in ending.reason
    assert len(device.ledger.resend()) == 1


def test_a_message_that_the_ledger_does_not_know_exhausts_the_device(server: Server, device: Device):
    other = Device(TASK, server, noise=SystemSource())
    other.give(FIRST)
    ending = device.give(FIRST)
    assert ending is not None
    assert (ending.kind, device.done) == ("budget", ["GET statement", "exhaust"])
    assert device.ledger.charges() == ()


@pytest.mark.parametrize(
    ("slug", "status", "kind"),
    [
        ("withdrawn", None, "withdrawn"),
        ("revoked", None, "revoked"),
        ("task-stopped", None, "stopped"),
        ("too-large", None, "refused"),
        ("wrong-message", None, "refused"),
    ],
)
def test_a_refusal_that_waiting_does_not_change_ends_the_life_and_the_message_waits(
    server: Server, device: Device, slug: str, status: int | None, kind: str
):
    server.instead.extend((*untouched(2), refuses(slug)))
    ending = device.give(FIRST)
    assert ending is not None
    assert ending.kind == kind
    assert len(device.ledger.resend()) == 1
    assert len(device.ledger.charges()) == PRICED


@pytest.mark.parametrize("slug", ["stale", "bad-request"])
def test_a_message_that_this_server_will_never_take_is_dropped_and_stays_charged(
    server: Server, device: Device, slug: str
):
    server.instead.extend((*untouched(2), refuses(slug)))
    assert device.give(FIRST) is None
    assert device.done[-2:] == ["POST check-in", "write 0 charges, 0 messages"]
    assert not device.ledger.resend()
    assert (len(device.ledger.charges()), device.life.seq, device.life.trips) == (PRICED, 0, 1)
    device.give(SECOND)
    assert [open_signed(each).envelope.seq for each in server.journal] == [1]


def test_after_four_refusals_in_a_row_a_device_stops(server: Server, device: Device):
    endings = []
    for seed in range(4):
        server.instead.extend((*untouched(1 + (seed == 0)), refuses("stale")))
        endings.append(device.give(samples(seed)))
    assert endings[:3] == [None] * 3
    assert endings[3] is not None
    assert endings[3].reason.startswith("The server refused 4 messages in a row")


def test_totals_that_fell_are_held_against_the_message_with_the_larger_ones(server: Server, device: Device):
    device.give(FIRST)
    server.instead.extend((*untouched(1), refuses("totals-fell", "They fell.")))
    ending = device.give(SECOND)
    assert ending is not None
    assert ending.reason.startswith("They fell. The server shows no message that the ledger lacks.")
    assert device.done[-2:] == ["POST check-in", "GET statement"]


def test_a_receipt_that_another_server_signed_is_refused_and_the_message_waits(server: Server, device: Device):
    def forged(ask: Ask) -> Answered:
        heard = server.hear(ask)
        assert isinstance(heard, Answered)
        return Answered(Answer(202, {}, open_receipt(heard.answer.body).sign(DEVICE).encode()))

    server.instead.extend((*untouched(2), forged))
    ending = device.give(FIRST)
    assert ending is not None
    assert "is not signed by the server that this device joined. It stays in the outbox." in ending.reason
    assert len(device.ledger.resend()) == 1


def test_a_closed_task_is_read_with_a_signature_from_then_on(server: Server, device: Device):
    server.instead.extend((*untouched(1), refuses("closed", at="publication")))
    assert device.give(FIRST) is None
    device.give(SECOND)
    asked = [each.signed for each in device.log if isinstance(each, Ask) and each.path.endswith("publication")]
    assert asked == [False, True, True]


def test_a_life_is_a_value_that_no_event_changes(device: Device):
    first = device.machine.begin(device.life, CheckOut(), device._moment())
    answer = TurnedDown(Problem("busy", "Later.", retry_after=1))
    second = device.machine.advance(first[0], answer, device._moment())
    assert second[0].tally.retries == 1
    assert device.machine.begin(device.life, CheckOut(), device._moment()) == first
    assert device.machine.advance(first[0], answer, device._moment()) == second


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    power=st.lists(st.integers(0, 14), max_size=6),
    network=st.lists(st.sampled_from(["answered", "away", "unheard"]), max_size=30),
)
def test_whatever_breaks_every_charge_is_of_one_message_and_no_message_counts_twice(power, network):
    server = Server(TASK)
    ways = {"answered": lambda ask: None, "away": silent, "unheard": unheard(server)}
    server.instead.extend(ways[each] for each in network)
    with Ledger(":memory:") as ledger:
        sent: list[bytes] = []
        for crash_at in [*power, None]:
            device = Device(TASK, server, ledger, noise=SystemSource())
            device.crash_at = crash_at
            try:
                assert device.begin() is None
                for seed in (1, 2):
                    assert device.give(samples(seed)) is None
            except Crash:
                pass
            sent += device.sent
        sealed = ledger.sent(TASK.hash)
        assert len(ledger.charges()) == PRICED * len(sealed) == PRICED * len(server.journal)
        assert [open_signed(each).envelope.seq for each in server.journal] == list(range(1, len(sealed) + 1))
        assert set(sent) == set(server.journal)
        assert not ledger.resend()
        assert server.fold.version == len(server.journal)
