"""The ledger of validation in the store: a charge with its value or neither, and never two for one version."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from server_builders import LATER, NOW, prepare

from crowdml.privacy.losses import Pure
from crowdml.storage.server import Store, StoreError, restore
from crowdml.storage.server.looks import Look, Terms, add_look, attach, detach, looks_of, rows_of, validations
from crowdml.storage.server.row_hashes import KEY, counted, earlier_hash, hash_rows
from crowdml.storage.server.schema import look, setting, validation, validation_rows


def rows_as(*x: int, labels: int = 0) -> bytes:
    """Rows of two features as they are stored; the first of them names the row."""
    features = [[float(each), 0.5] for each in x]
    return np.asarray(features, "<f4").tobytes() + np.full(len(x), labels, "<f4").tobytes()


DATA, OTHER = rows_as(1, 2), rows_as(3, 4)
TENTH = Fraction(1, 10)


def charged(budget: str = "0.3", every: int = 1) -> Terms:
    return Terms("rows.csv", TENTH, Fraction(budget), every)


PUBLIC = Terms("rows.csv", None, None)


def put(store: Store, task: bytes, terms: Terms, data: bytes = DATA, *, new_rows: bool = False) -> int:
    return attach(store, task, len(data) // 12, 2, data, terms, NOW, new_rows=new_rows).rows


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
        rows = put(store, task, PUBLIC, OTHER)
        assert add_look(store, task, rows, drawn(1, epsilon=None)) is not None
        assert add_look(store, task, rows, drawn(2)) is None, "terms have changed meanwhile"
        with pytest.raises(StoreError, match="no charge can take that back"):
            put(store, task, charged(), OTHER)


def test_a_row_with_another_label_is_the_same_row(url):
    """As a task whose classes stand in another order reads the same file."""
    with Store(url) as store:
        one, two = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        rows = put(store, one, charged())
        assert add_look(store, one, rows, drawn(1)) is not None
        again = put(store, two, charged(), rows_as(1, 2, labels=7))
        assert again != rows
        assert validations(store)[two].spent == TENTH
        for task in (one, two):
            detach(store, task)
        with pytest.raises(StoreError, match="2 of these rows were attached as charged ones"):
            put(store, one, PUBLIC, rows_as(2, 1, labels=7))


def test_public_rows_may_have_other_labels_in_another_task(url):
    with Store(url) as store:
        one, two = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        assert put(store, one, PUBLIC) != put(store, two, PUBLIC, rows_as(1, 2, labels=1))


def test_a_public_set_with_one_private_row_is_refused_and_a_private_set_with_a_public_one(url):
    """Review 2, privacy finding 7: 99 of 100 charged rows were taken as public, and counted exactly."""
    with Store(url) as store:
        task = prepare(store, 1)
        put(store, task, charged(), rows_as(*range(100)))
        detach(store, task)
        for some in (range(99), range(99, 200)):
            many = len(set(some) & set(range(100)))
            with pytest.raises(StoreError, match=f"{many} of these rows (was|were) attached as charged ones"):
                put(store, task, PUBLIC, rows_as(*some))
        put(store, task, PUBLIC, rows_as(*range(100, 200)))
        with pytest.raises(StoreError, match="1 of these rows was looked at as public ones, exactly"):
            put(store, task, charged(), rows_as(*range(199, 300)))


def test_a_row_has_one_budget_in_all_the_sets_that_it_is_in(url):
    """Review 2, privacy finding 7: 98, 97 and 96 of 100 charged rows got a whole new budget each."""
    with Store(url) as store:
        one, two = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        whole = put(store, one, charged("0.3"), rows_as(*range(100)))
        assert add_look(store, one, whole, drawn(1)) is not None
        most = put(store, two, charged("0.3"), rows_as(*range(2, 150)))
        assert [validations(store)[task].spent for task in (one, two)] == [TENTH, TENTH]
        assert add_look(store, two, most, drawn(1)) is not None
        assert add_look(store, one, whole, drawn(2)) is not None
        assert [validations(store)[task].left for task in (one, two)] == [0, 0]
        assert [validations(store)[task].spent for task in (one, two)] == [3 * TENTH] * 2
        assert [add_look(store, one, whole, drawn(3)), add_look(store, two, most, drawn(2))] == [None, None]
        few = put(store, two, charged("0.3"), rows_as(*range(100, 150)))
        assert validations(store)[two].spent == TENTH, "these were in one look alone"
        detach(store, one)
        detach(store, two)
        last = put(store, one, charged("0.5"), rows_as(99, 1000))
        assert (validations(store)[one].spent, validations(store)[one].left) == (3 * TENTH, 2)
        assert len({whole, most, few, last}) == 4


def test_a_look_for_one_task_keeps_what_another_promises_of_the_same_row(url):
    with Store(url) as store:
        one, two = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        put(store, one, charged("0.1"), rows_as(1, 2))
        rows = put(store, two, charged("5"), rows_as(2, 3))
        assert add_look(store, two, rows, drawn(1)) is not None
        assert validations(store)[two].left == 0
        assert add_look(store, two, rows, drawn(2)) is None
        detach(store, one)
        assert validations(store)[two].left == 49


def test_a_row_that_is_there_several_times_loses_as_often(url):
    with Store(url) as store:
        task = prepare(store, 1)
        rows = put(store, task, charged("0.7"), rows_as(1, 1, 1, 2))
        assert validations(store)[task].left == 2
        kept = [add_look(store, task, rows, drawn(version)) for version in (1, 2, 3)]
        assert [each is not None for each in kept] == [True, True, False]
        assert validations(store)[task].spent == 6 * TENTH
        with pytest.raises(StoreError, match=r"there 3 times, so that a look would cost it ε = 0\.3, and the budget"):
            put(store, task, charged("0.2"), rows_as(5, 5, 5))


def test_hashes_of_rows_need_the_servers_key(tmp_path: Path):
    one, two = (hash_rows(bytes([key]) * 32, DATA, 2, 2) for key in (1, 2))
    assert not counted(one.rows).keys() & counted(two.rows).keys()
    assert one.whole != two.whole
    with Store(tmp_path / "one.sqlite") as first, Store(tmp_path / "two.sqlite") as second:
        keys = {store.setting(KEY) for store in (first, second)}
        put(first, prepare(first, 1), charged())
        with first.reading() as connection:
            stored = connection.execute(sa.select(validation_rows.c.row_hashes)).scalar()
        assert stored == hash_rows(first.setting(KEY) or b"", DATA, 2, 2).rows
    assert len(keys) == 2
    assert all(key is not None and len(key) == 32 for key in keys)
    signs = [hash_rows(bytes(32), np.asarray([zero, 1, 0], "<f4").tobytes(), 1, 2).rows for zero in (0.0, -0.0)]
    assert signs[0] == signs[1], "there is one zero"


def as_version_6(store: Store, sets: list[tuple[str, bytes, bool]], names: dict[int, str] | None = None) -> None:
    """Take the database back to where sets were known as a whole, with these: their kind, rows, and whether kept.

    `names`: what the rows of a set are called that tasks are validated on, by the number of set and task.
    """
    with store.writing() as connection:
        connection.exec_driver_sql("alter table validation_rows drop column row_hashes")
        connection.exec_driver_sql("alter table validation_rows drop column patterns")
        connection.execute(sa.delete(setting).where(setting.c.name == KEY))
        connection.exec_driver_sql("drop table own_charge")
        connection.exec_driver_sql("update alembic_version set version_num = '0006'")
        table = sa.table("validation_rows", *map(sa.column, ("number", "hash", "kind", "count", "dimension", "data")))
        for number, (kind, data, kept) in enumerate(sets, 1):
            values = {"hash": earlier_hash(data, len(data) // 12, 2), "kind": kind, "count": len(data) // 12}
            made = table.insert().values(number=number, dimension=2, data=data if kept else None, **values)
            connection.execute(made)
            if kind == "charged":
                charge = {"version": number, "at": NOW, "value": 1, "step": "1", "loss": str(Pure(TENTH))}
                connection.execute(look.insert().values(task=1, rows=number, **charge))
        for number, name in (names or {}).items():
            terms = {"name": name, "every": 1, "attached_at": NOW, "epsilon": "1/10", "budget": "1"}
            connection.execute(validation.insert().values(task=number, rows=number, **terms))
        if connection.dialect.name == "postgresql":  # a sequence that numbers given by hand did not move
            connection.exec_driver_sql(f"select setval('validation_rows_number_seq', {len(sets)})")


def test_rows_that_an_earlier_version_kept_are_known_one_by_one_and_their_charges_add_up(url):
    """Review 2, privacy finding 7."""
    with Store(url) as store:
        task = prepare(store, 1)
        as_version_6(store, [("charged", rows_as(1, 2, 3), True), ("charged", rows_as(2, 3, 4), True)])
    with Store(url) as store:
        with pytest.raises(StoreError, match="1 of these rows was attached as charged ones"):
            put(store, task, PUBLIC, rows_as(4, 5))
        assert put(store, task, charged("1"), rows_as(3, 2, 1)) == 1, "the same set"
        assert validations(store)[task].spent == 2 * TENTH
        detach(store, task)
        put(store, task, charged("1"), rows_as(4, 5))
        assert validations(store)[task].spent == TENTH


def test_beside_rows_that_an_earlier_version_erased_no_others_are_taken_until_they_are_known(url):
    """Review 2, privacy finding 7."""
    with Store(url) as store:
        task = prepare(store, 1)
        as_version_6(store, [("charged", rows_as(1, 2, 3), False), ("public", rows_as(7), False)])
    with Store(url) as store:
        for terms, many in ((PUBLIC, "1 set"), (charged(), "2 sets")):
            with pytest.raises(
                StoreError, match=f"an earlier version looked at {many} of rows without noting them one by one"
            ):
                put(store, task, terms, rows_as(8, 9))
        put(store, task, charged(), rows_as(8, 9), new_rows=True)
        assert put(store, task, PUBLIC, rows_as(7), new_rows=True) == 2
        assert put(store, task, charged("1"), rows_as(2, 1, 3)) == 1, "the same set"
        assert validations(store)[task].spent == TENTH
        put(store, task, charged("1"), rows_as(3, 9))
        assert validations(store)[task].spent == TENTH
        with pytest.raises(StoreError, match="1 of these rows was looked at as public ones"):
            put(store, task, charged("1"), rows_as(7, 9))


def test_rows_that_are_scaled_for_two_tasks_are_known_by_what_was_read(url):
    """Review 3, rows 3."""
    read = rows_as(1, 2)[:16]
    with Store(url) as store:
        one, two = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        first = attach(store, one, 2, 2, rows_as(7, 8), charged(), NOW, read=read)
        assert add_look(store, one, first.rows, drawn(1)) is not None
        with pytest.raises(StoreError, match="2 of these rows were attached as charged ones"):
            attach(store, two, 2, 2, rows_as(5, 6), PUBLIC, NOW, read=read)
        with pytest.raises(StoreError, match="2 of these rows were attached as charged ones"):
            put(store, two, PUBLIC, rows_as(1, 2))
        second = attach(store, two, 2, 2, rows_as(5, 6), charged(), NOW, read=read)
        assert (second.spent, second.rows != first.rows) == (TENTH, True)
        assert rows_of(store, first.rows) == rows_as(7, 8), "each task has its own numbers of the rows"
        assert put(store, two, charged(), rows_as(7, 8)) != first.rows, "other rows, which look alike when scaled"


def test_private_rows_of_a_data_set_that_an_earlier_version_kept_are_not_looked_at_until_attached_again(url):
    """Review 3, rows 3: what was kept are rows as each task scales them, and nobody can compare those."""
    read = rows_as(1, 2)[:16]
    with Store(url) as store:
        one, two = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        file = store.add_task(b"a third", "third", NOW, "running")
        sets = [("charged", rows_as(*some), True) for some in ((7, 8), (5, 6), (3, 4))]
        as_version_6(store, sets, {1: "digits", 2: "digits", 3: "own.csv"})
    with Store(url) as store:
        assert [validations(store)[task].halted for task in (one, two, file)] == ["scaled", "scaled", None]
        assert add_look(store, one, 1, drawn(9)) is None
        assert add_look(store, file, 3, drawn(9)) is not None
        with pytest.raises(StoreError, match="looked at 2 sets of rows without noting them one by one"):
            put(store, file, PUBLIC, rows_as(20, 21))
        with pytest.raises(StoreError, match="looked at 1 set of rows without noting them one by one"):
            attach(store, one, 2, 2, rows_as(7, 8), charged("1"), NOW, read=read)
        found = attach(store, two, 2, 2, rows_as(5, 6), charged("1"), NOW, read=read)
        assert (found.rows, found.halted, found.spent) == (2, None, 2 * TENTH), "both sets' looks were at these rows"
        found = attach(store, one, 2, 2, rows_as(7, 8), charged("1"), NOW, read=read)
        assert (found.rows, found.halted, found.spent) == (1, None, 2 * TENTH)


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
        put(store, task, PUBLIC, OTHER)
        assert rows_of(store, rows) is None, "others have taken their place"


def test_a_restored_server_looks_at_no_private_rows_before_its_operator_says_so(tmp_path: Path):
    with Store(tmp_path / "server.sqlite") as store:
        task, second = prepare(store, 1), store.add_task(b"another", "other", NOW, "running")
        rows = put(store, task, charged())
        put(store, second, PUBLIC, OTHER)
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
