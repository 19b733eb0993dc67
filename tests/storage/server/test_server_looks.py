"""The ledger of validation in the store: a charge with its value or neither, and never two for one version."""

from __future__ import annotations

import hashlib
from fractions import Fraction
from pathlib import Path

import pytest
import sqlalchemy as sa
from server_builders import LATER, NOW, prepare

from crowdml.privacy.losses import Pure
from crowdml.storage.server import Store, StoreError, restore
from crowdml.storage.server.looks import Look, Terms, add_look, attach, detach, looks_of, rows_of, validations
from crowdml.storage.server.schema import look

ROWS = hashlib.sha256(b"rows").digest()
DATA = bytes(range(24))
TENTH = Fraction(1, 10)


def charged(budget: str = "0.3", every: int = 1) -> Terms:
    return Terms("rows.csv", TENTH, Fraction(budget), every)


PUBLIC = Terms("rows.csv", None, None)


def put(store: Store, task: bytes, terms: Terms, rows: bytes = ROWS, data: bytes = DATA) -> int:
    return attach(store, task, rows, 2, 2, data, terms, NOW).rows


def drawn(version: int, value: int = 1, epsilon: Fraction | None = TENTH) -> Look:
    return Look(version, LATER, value, Fraction(1), None if epsilon is None else Pure(epsilon))


def test_a_version_that_was_looked_at_shows_what_it_showed_and_is_charged_once(url):
    with Store(url) as store:
        task = prepare(store, 1)
        rows = put(store, task, charged())
        assert add_look(store, task, rows, drawn(4, 7)) == drawn(4, 7)
        assert add_look(store, task, rows, drawn(4, 99)) == drawn(4, 7)
    with Store(url) as store:
        assert add_look(store, task, rows, drawn(4, 99)) == drawn(4, 7), "after a restart too"
        found = validations(store)[task]
        assert (found.spent, found.newest, found.left) == (TENTH, 4, 2)
        assert looks_of(store, found) == [drawn(4, 7)]


def test_looks_end_when_the_budget_is_spent_exactly_and_a_larger_one_lets_them_go_on(url):
    with Store(url) as store:
        task = prepare(store, 1)
        rows = put(store, task, charged())
        kept = [add_look(store, task, rows, drawn(version)) for version in (1, 2, 3, 4)]
        assert [each is not None for each in kept] == [True, True, True, False]
        assert validations(store)[task].left == 0
        assert put(store, task, charged("0.4")) == rows, "the same rows, with what they have lost"
        assert (validations(store)[task].spent, validations(store)[task].left) == (3 * TENTH, 1)
        assert add_look(store, task, rows, drawn(4)) is not None
        assert add_look(store, task, rows, drawn(5)) is None
        assert [each.version for each in looks_of(store, validations(store)[task])] == [1, 2, 3, 4]


def test_rows_lose_to_all_tasks_together(url):
    with Store(url) as store:
        first, second = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        rows = put(store, first, charged("0.2"))
        assert put(store, second, charged("0.2")) == rows
        assert add_look(store, first, rows, drawn(1)) is not None
        assert add_look(store, second, rows, drawn(1)) is not None
        assert add_look(store, first, rows, drawn(2)) is None
        assert {found.spent for found in validations(store).values()} == {2 * TENTH}


def test_what_was_private_never_becomes_public_and_what_was_public_has_no_price(url):
    with Store(url) as store:
        task = prepare(store, 1)
        put(store, task, charged())
        with pytest.raises(StoreError, match="would void what was promised"):
            put(store, task, PUBLIC)
        detach(store, task)
        with pytest.raises(StoreError, match="would void what was promised"):
            put(store, task, PUBLIC)
        other = hashlib.sha256(b"other").digest()
        rows = put(store, task, PUBLIC, other)
        assert add_look(store, task, rows, drawn(1, epsilon=None)) is not None
        assert add_look(store, task, rows, drawn(2)) is None, "terms have changed meanwhile"
        with pytest.raises(StoreError, match="no charge can take that back"):
            put(store, task, charged(), other)


@pytest.mark.parametrize(
    ("first", "then"), [(charged(), charged()), (charged(), PUBLIC), (PUBLIC, charged())], ids=lambda terms: terms.kind
)
def test_the_same_features_with_other_labels_have_no_budget_of_their_own(url, first, then):
    """As a task whose classes stand in another order reads the same file."""
    with Store(url) as store:
        one, two = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        put(store, one, first, ROWS + b"labels")
        detach(store, one)
        with pytest.raises(StoreError, match="the same features were attached with other labels"):
            put(store, two, then, ROWS + b"others")
        assert not validations(store)
        put(store, two, first, ROWS + b"labels")


def test_public_rows_may_have_other_labels_in_another_task(url):
    with Store(url) as store:
        one, two = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        assert put(store, one, PUBLIC, ROWS + b"labels") != put(store, two, PUBLIC, ROWS + b"others")


def test_a_charge_is_neither_edited_nor_deleted(url):
    with Store(url) as store:
        task = prepare(store, 1)
        rows = put(store, task, charged())
        add_look(store, task, rows, drawn(1))
        for change in (look.update().values(value=2), look.update().values(loss=None), look.delete()):
            with pytest.raises(StoreError, match="a charge is never"), store.writing() as connection:
                connection.execute(change)
        assert validations(store)[task].spent == TENTH


def test_rows_that_nobody_looks_at_any_more_are_erased_and_their_charges_stay(url):
    with Store(url) as store:
        task, second = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        rows = put(store, task, charged())
        put(store, second, charged())
        add_look(store, task, rows, drawn(1))
        assert detach(store, task)
        assert not detach(store, task)
        assert rows_of(store, rows) == DATA, "the other task is validated on them"
        detach(store, second)
        assert rows_of(store, rows) is None
        assert validations(store) == {}
        assert add_look(store, task, rows, drawn(2)) is None
        put(store, task, charged())
        assert rows_of(store, rows) == DATA
        assert validations(store)[task].spent == TENTH
        put(store, task, PUBLIC, hashlib.sha256(b"other").digest(), b"other")
        assert rows_of(store, rows) is None, "others have taken their place"


def test_a_restored_server_looks_at_no_private_rows_before_its_operator_says_so(tmp_path: Path):
    with Store(tmp_path / "server.sqlite") as store:
        task, second = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        rows = put(store, task, charged())
        put(store, second, PUBLIC, hashlib.sha256(b"other").digest())
        add_look(store, task, rows, drawn(1))
        store.backup(tmp_path / "backup.sqlite")
        add_look(store, task, rows, drawn(2))
    restore(tmp_path / "backup.sqlite", tmp_path / "again.sqlite")
    with Store(tmp_path / "again.sqlite") as store:
        store.check()
        found = validations(store)
        assert (found[task].halted, found[second].halted) == ("restored", None)
        assert add_look(store, task, rows, drawn(2, 5)) is None
        assert rows_of(store, rows) == DATA, "a backup has the rows"
        put(store, task, charged("0.2"))
        assert validations(store)[task].halted is None
        assert add_look(store, task, rows, drawn(2, 5)) is not None
        with store.reading() as connection:
            assert connection.execute(sa.select(sa.func.count()).select_from(look)).scalar() == 2
