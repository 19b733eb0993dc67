"""What tasks are validated on, and the ledger of looks at it. Functions over a `Store`; each is one transaction.

A look at charged rows is one row of a table that is only added to: its charge and the value that was drawn for it, so
neither is ever there without the other, and a version that was looked at is not drawn for again. Charges belong to the
rows, whichever task they were looked at for. Rows are known one by one (row_hashes.py): a row that is in several sets
loses to looks at each of them, and the dearest row of a set decides whether a budget allows another look.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from crowdml.errors import BudgetExhausted
from crowdml.privacy.losses import Loss, Pure, parse_loss
from crowdml.storage.server.database import NOTHING_WRITTEN, StoreError, insert, utc
from crowdml.storage.server.journal import task_number
from crowdml.storage.server.row_hashes import KEY, Hashed, Pattern, counted, earlier_hash, hash_rows, patterns
from crowdml.storage.server.schema import look, own_charge, setting, task, validation, validation_rows
from crowdml.storage.server.store import Store
from crowdml.texts import count_text

__all__ = [
    "Kind", "Look", "Terms", "Validation", "add_look", "attach", "charge_rows", "check_allowed", "detach", "looks_of",
    "rows_of", "validations",
]  # fmt: skip

Kind = Literal["public", "charged"]


@dataclass(frozen=True)
class Terms:
    """On which terms the server looks. `epsilon` of one look and `budget` of all of them: None of public rows."""

    name: str
    epsilon: Fraction | None
    budget: Fraction | None
    every: int = 1
    """Versions between two looks, at least."""

    @property
    def kind(self) -> Kind:
        return "public" if self.epsilon is None else "charged"


@dataclass(frozen=True)
class Validation:
    """What a task is validated on now."""

    task: bytes
    rows: int
    """The number of the rows, which are in `rows_of`."""
    count: int
    dimension: int
    terms: Terms
    attached_at: str
    halted: str | None
    spent: Fraction
    """What the dearest of these rows has lost to all looks, over all tasks and all sets that it is in."""
    newest: int | None
    """The newest version of this task that was looked at."""
    most: int | None = None
    """How many more looks a row allows that is in these rows several times, or that another task has a budget for."""

    @property
    def left(self) -> int | None:
        """How many more looks the budget allows; None: as many as you like."""
        if self.terms.epsilon is None or self.terms.budget is None:
            return None
        own = max(0, int((self.terms.budget - self.spent) / self.terms.epsilon))
        return own if self.most is None else min(own, self.most)


@dataclass(frozen=True)
class Look:
    """What a look at a version came to: `value` steps over all rows, noise included where it was charged for."""

    version: int
    at: str
    value: int
    step: Fraction
    loss: Pure | None


def attach(
    store: Store,
    of: bytes,
    count: int,
    dimension: int,
    data: bytes,
    terms: Terms,
    at: str,
    *,
    read: bytes | None = None,
    new_rows: bool = False,
) -> Validation:
    """Validate a task on these rows from now on, instead of those before. Looks that there were stay, as charges do.

    `data` is what the model is tried on. `read` holds the features as they were read, where those in `data` are scaled.
    `new_rows`: the operator says that none of them is in a set whose rows nobody knows (migration 0007).
    """
    with store.reading() as connection:
        key = _key(connection)
    hashed = hash_rows(key, data, count, dimension, read)
    with store.writing() as connection:  # by itself: it stays where the rows are refused for the sake of another set
        _learn(connection, hashed, data, count, dimension)
    with store.writing() as connection:
        number = task_number(connection, of)
        here = sa.select(validation_rows.c.number).where(validation_rows.c.hash == hashed.whole)
        known = connection.execute(here).scalar()
        charged = _check_shared(connection, hashed, terms)
        if not new_rows:
            _check_unknown(connection, terms)
        if known is None:
            known_by = {"hash": hashed.whole, "row_hashes": hashed.rows, "kind": terms.kind}
            rows = int(insert(connection, validation_rows, **known_by, count=count, dimension=dimension, data=data))
        else:
            rows = int(known)
            connection.execute(validation_rows.update().where(validation_rows.c.number == rows).values(data=data))
        if terms.kind == "charged":
            _note_patterns(connection, rows, {**charged, rows: counted(hashed.rows)})
        connection.execute(validation.delete().where(validation.c.task == number))
        paid = {
            "epsilon": None if terms.epsilon is None else str(terms.epsilon),
            "budget": None if terms.budget is None else str(terms.budget),
        }
        agreed = {"name": terms.name, "every": terms.every, "attached_at": utc(at)}
        insert(connection, validation, task=number, rows=rows, **agreed, **paid)
        _erase_unused(connection)
        found = _read(connection, number)[0]
        _check_copies(connection, found)
    store.cut_log()  # of the rows before these
    return found


def _key(connection: Connection) -> bytes:
    key = connection.execute(sa.select(setting.c.value).where(setting.c.name == KEY)).scalar()
    if key is None:
        raise StoreError(f"the database lacks the key that rows are known by. {NOTHING_WRITTEN} Restore a backup.")
    return key


def _learn(connection: Connection, hashed: Hashed, data: bytes, count: int, dimension: int) -> None:
    """If these rows are a set that was known as a whole alone, note each of its rows."""
    unknown = validation_rows.c.row_hashes.is_(None)
    if connection.execute(sa.select(validation_rows.c.number).where(unknown).limit(1)).scalar() is None:
        return
    earlier = (validation_rows.c.hash == earlier_hash(data, count, dimension)) & unknown
    found = {"hash": hashed.whole, "row_hashes": hashed.rows}
    connection.execute(validation_rows.update().where(earlier).values(found))


def _check_shared(connection: Connection, hashed: Hashed, terms: Terms) -> dict[int, Counter[bytes]]:
    """Refuse a row that is here as private and would be public, or the other way round. All charged sets, counted."""
    mine, charged = counted(hashed.rows), dict[int, Counter[bytes]]()
    query = sa.select(validation_rows.c.number, validation_rows.c.kind, validation_rows.c.row_hashes)
    for row in connection.execute(query.where(validation_rows.c.row_hashes.is_not(None))):
        theirs = counted(row.row_hashes)
        shared = len(mine.keys() & theirs.keys())
        if shared and row.kind != terms.kind:
            many = f"{shared:,} of these rows {'was' if shared == 1 else 'were'}"
            raise StoreError(
                f"{many} attached as charged ones, and to make them public would void what was promised. "
                f"{NOTHING_WRITTEN} Name other rows, or an epsilon."
                if row.kind == "charged"
                else f"{many} looked at as public ones, exactly, and no charge can take that back. "
                f"{NOTHING_WRITTEN} Name other rows, or say --public."
            )
        if row.kind == "charged":
            charged[int(row.number)] = theirs
    return charged


def _check_unknown(connection: Connection, terms: Terms) -> None:
    """Refuse rows beside a set whose own rows nobody knows one by one: one of them may be among these."""
    unknown = validation_rows.c.row_hashes.is_(None)
    if terms.kind == "public":
        unknown &= validation_rows.c.kind == "charged"
    many = connection.execute(sa.select(sa.func.count()).select_from(validation_rows).where(unknown)).scalar() or 0
    if many:
        raise StoreError(
            f"an earlier version looked at {count_text(many, 'set')} of rows without noting them one by one: nobody "
            "can tell whether these have one of them. These were not attached. Attach each of those files or data sets "
            "once more with the terms that it had, or say --new-rows if no row of these was in them."
        )


def _note_patterns(connection: Connection, rows: int, charged: dict[int, Counter[bytes]]) -> None:
    """Write down which charged sets the rows of this one, and of each that shares one with it, are in."""
    for number, theirs in charged.items():
        if charged[rows].keys() & theirs.keys():
            found = json.dumps([sorted(pattern.items()) for pattern in patterns(number, charged)])
            here = validation_rows.c.number == number
            connection.execute(validation_rows.update().where(here).values(patterns=found))


def _check_copies(connection: Connection, found: Validation) -> None:
    """Refuse rows of which one is there so often that its budget allows no look at all."""
    epsilon, budget = found.terms.epsilon, found.terms.budget
    times = max(pattern.get(found.rows, 1) for pattern in _patterns(connection, found.rows))
    if epsilon is not None and budget is not None and times > 1 and times * epsilon > budget:
        raise StoreError(
            f"one of these rows is there {times} times, so that a look would cost it ε = {float(times * epsilon):g}, "
            f"and the budget is {float(budget):g}. {NOTHING_WRITTEN} Leave its copies out."
        )


def detach(store: Store, of: bytes) -> bool:
    """Look no more; whether there was something to look at. Rows that no other task is validated on are erased."""
    with store.writing() as connection:
        number = task_number(connection, of)
        gone = connection.execute(validation.delete().where(validation.c.task == number)).rowcount
        _erase_unused(connection)
    store.cut_log()
    return gone > 0


def _erase_unused(connection: Connection) -> None:
    used = sa.select(validation.c.rows)
    connection.execute(validation_rows.update().where(validation_rows.c.number.not_in(used)).values(data=None))


def validations(store: Store) -> dict[bytes, Validation]:
    """What each task is validated on, of those that are."""
    with store.reading() as connection:
        return {each.task: each for each in _read(connection)}


def _read(connection: Connection, number: int | None = None) -> list[Validation]:
    newest = (
        sa.select(sa.func.max(look.c.version))
        .where(look.c.task == validation.c.task, look.c.rows == validation.c.rows)
        .scalar_subquery()
    )
    query = (
        sa.select(validation, task.c.hash, validation_rows.c.count.label("many"), validation_rows.c.dimension,
                  newest.label("newest"))
        .join(task, task.c.number == validation.c.task)
        .join(validation_rows, validation_rows.c.number == validation.c.rows)
        .order_by(validation.c.task)
    )  # fmt: skip
    found = connection.execute(query if number is None else query.where(validation.c.task == number)).all()
    return [
        Validation(
            row.hash,
            row.rows,
            row.many,
            row.dimension,
            Terms(row.name, _fraction(row.epsilon), _fraction(row.budget), row.every),
            row.attached_at,
            row.halted,
            max(_spent(connection, _patterns(connection, row.rows))),
            row.newest,
            None if row.epsilon is None else _looks_left(connection, row.rows, Fraction(row.epsilon)),
        )
        for row in found
    ]


def _fraction(text: str | None) -> Fraction | None:
    return None if text is None else Fraction(text)


def _patterns(connection: Connection, rows: int) -> list[Pattern]:
    text = connection.execute(sa.select(validation_rows.c.patterns).where(validation_rows.c.number == rows)).scalar()
    return [{rows: 1}] if text is None else [dict(pairs) for pairs in json.loads(text)]


def _spent(connection: Connection, found: list[Pattern]) -> list[Fraction]:
    """What a row of each pattern has lost. Pure losses add, whoever the looks were for."""
    numbers = {number for pattern in found for number in pattern}
    of_set = dict.fromkeys(numbers, Fraction(0))
    for table in (look, own_charge):
        query = sa.select(table.c.rows, table.c.loss, sa.func.count()).where(table.c.rows.in_(numbers))
        charged = query.where(table.c.loss.is_not(None)).group_by(table.c.rows, table.c.loss)
        for rows, loss, many in connection.execute(charged):
            of_set[rows] += many * _loss(loss).epsilon
    return [sum((times * of_set[number] for number, times in pattern.items()), Fraction(0)) for pattern in found]


def _looks_left(connection: Connection, rows: int, epsilon: Fraction) -> int:
    """How many more looks of this epsilon every row of a set allows, by the smallest budget that it has in any task."""
    found = _patterns(connection, rows)
    query = sa.select(validation.c.rows, validation.c.budget).where(validation.c.budget.is_not(None))
    budgets = [(int(row.rows), Fraction(row.budget)) for row in connection.execute(query)]
    left: list[int] = []
    for pattern, spent in zip(found, _spent(connection, found), strict=True):
        allowed = min((budget for number, budget in budgets if number in pattern), default=Fraction(0))
        left.append(max(0, int((allowed - spent) / (epsilon * pattern[rows]))))
    return min(left)


def _loss(text: str) -> Pure:
    found = parse_loss(text)
    assert isinstance(found, Pure)
    return found


def rows_of(store: Store, number: int) -> bytes | None:
    """The rows themselves, float32: all x, then all y. None where they were erased."""
    return store.read_value(sa.select(validation_rows.c.data).where(validation_rows.c.number == number))


def looks_of(store: Store, found: Validation) -> list[Look]:
    """Every look at these rows for this task, by version."""
    query = sa.select(look).join(task, task.c.number == look.c.task).where(task.c.hash == found.task)
    return [_look(row) for row in store.read(query.where(look.c.rows == found.rows).order_by(look.c.version))]


def _look(row: Any) -> Look:
    loss = None if row.loss is None else _loss(row.loss)
    return Look(row.version, row.at, row.value, Fraction(row.step), loss)


def add_look(
    store: Store, of: bytes, rows: int, seen: Look, journal: Callable[[Connection], object] | None = None
) -> Look | None:
    """Keep a look with its charge, durably, before anybody is shown it; what to show of this version.

    `journal` writes its entry of the journal, in the same transaction. A version that was looked at shows what it
    showed. None, and nothing is kept: the budget does not allow it, or the task is no longer validated on these rows.
    """
    with store.writing() as connection:
        number = task_number(connection, of)
        here = (look.c.task == number) & (look.c.rows == rows)
        before = connection.execute(sa.select(look).where(here, look.c.version == seen.version)).first()
        if before is not None:
            return _look(before)
        found = [each for each in _read(connection, number) if each.rows == rows and each.halted is None]
        if not found or (found[0].terms.kind == "charged") != (seen.loss is not None):
            return None
        if seen.loss is not None and not _looks_left(connection, rows, seen.loss.epsilon):
            return None
        loss = None if seen.loss is None else str(seen.loss)
        shown = {"version": seen.version, "at": utc(seen.at), "value": seen.value, "step": str(seen.step)}
        insert(connection, look, task=number, rows=rows, loss=loss, **shown)
        if journal is not None:
            journal(connection)
        return seen


def check_allowed(connection: Connection, rows: int, losses: Sequence[Loss]) -> None:
    """Refuse to let something out of these rows at this price, unless the budget of every one of them allows it."""
    if not all(isinstance(loss, Pure) for loss in losses):
        raise BudgetExhausted("the server's own door charges pure losses alone, and a row of its table has another.")
    price = sum((_loss(str(loss)).epsilon for loss in losses), Fraction(0))
    if price and not _looks_left(connection, rows, price):
        spent = max(_spent(connection, _patterns(connection, rows)))
        raise BudgetExhausted(
            f"the operator's rows have lost ε = {float(spent):g}, and another ε = {float(price):g} is above their "
            "budget. Nothing was drawn. Attach other rows with `crowdml task validate`, or stop the task."
        )


def charge_rows(connection: Connection, of: int, index: int, rows: int, at: str, losses: Mapping[str, Loss]) -> None:
    """Write down what the entry `index` of task number `of` let out of these rows, if their budget allows it."""
    check_allowed(connection, rows, list(losses.values()))
    for row, loss in losses.items():
        insert(connection, own_charge, task=of, index=index, row=row, rows=rows, at=utc(at), loss=str(loss))
