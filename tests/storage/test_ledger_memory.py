"""The batches that a device keeps to learn from: written with the charge, bounded, and forgotten when they are old."""

from __future__ import annotations

from fractions import Fraction

import pytest
from ledger_builders import OTHER, PLENTY, TASK, charge

from crowdml.errors import BudgetExhausted
from crowdml.storage import Batch, Budget, Ledger


def give(ledger: Ledger, number: int, body: bytes, *, batches: int = 3, task: bytes = TASK) -> None:
    span = ledger.take_serials(2)
    ledger.charge(task, [charge(span[0], span[-1], task=task)], [PLENTY], remember=Batch(number, body), batches=batches)


def test_the_last_batches_are_kept_in_order_and_older_ones_are_gone(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        for number in range(6):
            give(ledger, number, b"batch %d" % number)
        give(ledger, 0, b"of another task", task=OTHER)
        ledger.of(1).charge(TASK, [], [], remember=Batch(9, b"of another device"), batches=3)
    with Ledger(tmp_path / "ledger.db") as ledger:
        assert ledger.remembered(TASK) == tuple(Batch(number, b"batch %d" % number) for number in (3, 4, 5))
        assert ledger.remembered(OTHER) == (Batch(0, b"of another task"),)
        assert ledger.of(1).remembered(TASK) == (Batch(9, b"of another device"),)
    for name in tmp_path.iterdir():
        assert b"batch 1" not in name.read_bytes()  # nothing of it stays in the file


def test_a_number_that_serves_again_takes_the_place_of_what_was_not_taken():
    with Ledger(":memory:") as ledger:
        for number, body in ((4, b"a"), (5, b"refused"), (5, b"b"), (6, b"c")):
            give(ledger, number, body)
        assert [each.body for each in ledger.remembered(TASK)] == [b"a", b"b", b"c"]
        give(ledger, 5, b"after a server that forgot")
        assert [each.number for each in ledger.remembered(TASK)] == [4, 5]


def test_a_step_that_a_budget_refuses_keeps_no_batch():
    with Ledger(":memory:") as ledger:
        ledger.take_serials(2)
        with pytest.raises(BudgetExhausted):
            ledger.charge(TASK, [charge(0, 1)], [Budget(Fraction(1), 1e-6, 1)], remember=Batch(0, b"x"), batches=3)
        assert ledger.remembered(TASK) == ()
