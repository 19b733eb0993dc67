"""Checks of the ledger that no other test would miss: `make mutants-deep` took each away, and every test was green."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from ledger_builders import OTHER, PLENTY, TASK, charge

from crowdml.errors import LedgerError
from crowdml.storage import Budget, Ledger

DELTA = 1e-6


@pytest.fixture
def ledger():
    with Ledger(":memory:") as ledger:
        yield ledger


def give(ledger: Ledger, task: bytes = TASK, samples: int = 5) -> range:
    span = ledger.take_serials(samples)
    ledger.charge(task, [charge(span[0], span[-1], task=task)], [PLENTY])
    return span


def test_what_one_task_is_charged_does_not_count_against_another_that_was_asked_about_before(ledger: Ledger):
    """Totals are remembered: a charge is added to those of its own task and of all tasks together, and to no other."""
    own, others = (Budget(Fraction(1), DELTA, 100, task=task) for task in (TASK, OTHER))
    before = ledger.allowance(others)
    give(ledger)
    assert ledger.allowance(others) == before
    assert ledger.allowance(own).samples == 95
    assert ledger.allowance(own).epsilon < before.epsilon


def test_a_device_of_a_file_has_one_ledger_whoever_asks_for_it(ledger: Ledger):
    """Two views with a memory each would not see one another's charges, and each allow the whole budget."""
    assert ledger.of(3) is ledger.of(3)
    assert ledger.of(0) is ledger
    with pytest.raises(LedgerError, match="numbered from 0"):
        ledger.of(-1)


def test_a_negative_number_of_serials_is_not_taken(ledger: Ledger):
    with pytest.raises(LedgerError, match="-1 serials cannot be taken"):
        ledger.take_serials(-1)
    assert ledger.next_serial() == 0


def lose_counter(ledger: Ledger) -> None:
    """Take the counter away behind the triggers that guard it, which stand again afterwards."""
    run = ledger._connection.execute
    guards = run("select name, sql from sqlite_master where type = 'trigger' and tbl_name = 'serial'").fetchall()
    for name, _ in guards:
        run(f"drop trigger {name}")
    run("delete from serial")
    for _, sql in guards:
        run(sql)


@pytest.mark.parametrize("device", [0, 2])
def test_a_ledger_whose_counter_of_serials_is_gone_is_not_trusted(tmp_path: Path, device: int):
    """It would number samples from 0 again, and what they pay would be lost among what others paid."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        give(ledger.of(device))
        lose_counter(ledger)
    with Ledger(path) as ledger, pytest.raises(LedgerError, match="counter of serials is gone"):
        ledger.of(device).take_serials(1)


def test_a_new_ledger_whose_counter_is_gone_is_not_trusted_either(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        lose_counter(ledger)
    with Ledger(path) as ledger, pytest.raises(LedgerError, match="counter of serials is gone"):
        ledger.next_serial()


def test_a_file_with_a_damaged_page_is_not_trusted_though_it_opens(tmp_path: Path):
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        for _ in range(200):
            give(ledger)
        root = ledger._connection.execute("select rootpage from sqlite_master where name = 'charge'").fetchone()[0]
        size = ledger._connection.execute("pragma page_size").fetchone()[0]
    with path.open("r+b") as file:
        file.seek((root - 1) * size + 8)
        file.write(bytes(64))
    with pytest.raises(LedgerError, match="cannot be trusted"):
        Ledger(path)


def test_the_hash_of_what_a_message_says_is_kept_beside_that_of_its_bytes(ledger: Ledger):
    span = ledger.take_serials(1)
    sealed = {"outbox": {0: b"signed"}, "contents": {0: b"c" * 32}}
    ledger.charge(TASK, [charge(span[0], span[-1])], [PLENTY], **sealed)
    assert ledger.sent()[0].content == b"c" * 32


def test_a_number_that_was_passed_over_was_never_written(ledger: Ledger):
    span = ledger.take_serials(1)
    ledger.charge(TASK, [charge(span[0], span[-1])], [PLENTY], outbox={3: b"later"})
    with pytest.raises(LedgerError, match="never written here"):
        ledger.acknowledge(TASK, 1)
    ledger.charge(TASK, [], [], outbox={1: b"now"})
    with pytest.raises(LedgerError, match="was written before"):
        ledger.charge(TASK, [], [], outbox={1: b"again"})


def test_a_step_that_fails_among_others_leaves_nothing_of_itself(ledger: Ledger):
    """Its charges are in before its message is refused: inside `together` they go without the others' going."""
    ledger.take_serials(2)
    ledger.charge(TASK, [], [], outbox={0: b"first"})
    with ledger.together():
        ledger.charge(TASK, [charge(0, 0)], [PLENTY])
        with pytest.raises(LedgerError, match="was written before"):
            ledger.charge(TASK, [charge(1, 1)], [PLENTY], outbox={0: b"again"})
    assert [each.first_sample for each in ledger.charges()] == [0]
    assert ledger.samples_given() == 1
