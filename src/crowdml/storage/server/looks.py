"""What tasks are validated on, and the ledger of looks at it. Functions over a `Store`; each is one transaction.

A look at charged rows is one row of a table that is only added to: its charge and the value that was drawn for it, so
neither is ever there without the other, and a version that was looked at is not drawn for again. Charges belong to the
rows, whichever task they were looked at for.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from crowdml.privacy.losses import Pure, parse_loss
from crowdml.storage.server.database import NOTHING_WRITTEN, StoreError, utc
from crowdml.storage.server.journal import task_number
from crowdml.storage.server.schema import look, task, validation, validation_rows
from crowdml.storage.server.store import Store

__all__ = ["Kind", "Look", "Terms", "Validation", "add_look", "attach", "detach", "looks_of", "rows_of", "validations"]

Kind = Literal["public", "charged"]
FEATURES = 32
"""Bytes of the hash of rows that tell their features, whatever their labels are in a task."""


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
    """What one of these rows has lost to all looks, over all tasks."""
    newest: int | None
    """The newest version of this task that was looked at."""

    @property
    def left(self) -> int | None:
        """How many more looks the budget allows; None: as many as you like."""
        if self.terms.epsilon is None or self.terms.budget is None:
            return None
        return max(0, int((self.terms.budget - self.spent) / self.terms.epsilon))


@dataclass(frozen=True)
class Look:
    """What a look at a version came to: `value` steps over all rows, noise included where it was charged for."""

    version: int
    at: str
    value: int
    step: Fraction
    loss: Pure | None


def attach(
    store: Store, of: bytes, hash_: bytes, count: int, dimension: int, data: bytes, terms: Terms, at: str
) -> Validation:
    """Validate a task on these rows from now on, instead of those before. Looks that there were stay, as charges do."""
    with store.writing() as connection:
        number = task_number(connection, of)
        known = connection.execute(sa.select(validation_rows).where(validation_rows.c.hash == hash_)).first()
        if known is not None and known.kind != terms.kind:
            raise StoreError(
                "these rows were looked at as charged ones, and to make them public would void what was promised. "
                f"{NOTHING_WRITTEN} Name other rows, or an epsilon."
                if known.kind == "charged"
                else "these rows were looked at as public ones, exactly, and no charge can take that back. "
                f"{NOTHING_WRITTEN} Name other rows, or say --public."
            )
        _check_features(connection, hash_, terms)
        if known is None:
            made = connection.execute(
                validation_rows.insert().values(
                    hash=hash_, kind=terms.kind, count=count, dimension=dimension, data=data
                )
            )
            rows = int((made.inserted_primary_key or (0,))[0])
        else:
            rows = int(known.number)
            connection.execute(validation_rows.update().where(validation_rows.c.number == rows).values(data=data))
        connection.execute(validation.delete().where(validation.c.task == number))
        connection.execute(
            validation.insert().values(
                task=number,
                rows=rows,
                name=terms.name,
                epsilon=None if terms.epsilon is None else str(terms.epsilon),
                budget=None if terms.budget is None else str(terms.budget),
                every=terms.every,
                attached_at=utc(at),
            )
        )
        _erase_unused(connection)
        return _read(connection, number)[0]


def _check_features(connection: Connection, hash_: bytes, terms: Terms) -> None:
    """Refuse rows that are here with other labels: looks at those would not be charged to these, nor be exact."""
    for row in connection.execute(sa.select(validation_rows.c.hash, validation_rows.c.kind)):
        same = row.hash != hash_ and row.hash[:FEATURES] == hash_[:FEATURES]
        if same and "charged" in (row.kind, terms.kind):
            raise StoreError(
                "rows with the same features were attached with other labels, and what looks at those tell of them "
                f"would not be counted. {NOTHING_WRITTEN} Name other rows, or let the tasks name their labels alike."
            )


def detach(store: Store, of: bytes) -> bool:
    """Look no more; whether there was something to look at. Rows that no other task is validated on are erased."""
    with store.writing() as connection:
        number = task_number(connection, of)
        gone = connection.execute(validation.delete().where(validation.c.task == number)).rowcount
        _erase_unused(connection)
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
            _spent(connection, row.rows),
            row.newest,
        )
        for row in found
    ]


def _fraction(text: str | None) -> Fraction | None:
    return None if text is None else Fraction(text)


def _spent(connection: Connection, rows: int) -> Fraction:
    """Pure losses add, whoever the looks were for."""
    query = sa.select(look.c.loss, sa.func.count()).where(look.c.rows == rows, look.c.loss.is_not(None))
    total = Fraction(0)
    for loss, many in connection.execute(query.group_by(look.c.loss)):
        total += many * _loss(loss).epsilon
    return total


def _loss(text: str) -> Pure:
    found = parse_loss(text)
    assert isinstance(found, Pure)
    return found


def rows_of(store: Store, number: int) -> bytes | None:
    """The rows themselves, float32: all x, then all y. None where they were erased."""
    with store.reading() as connection:
        return connection.execute(sa.select(validation_rows.c.data).where(validation_rows.c.number == number)).scalar()


def looks_of(store: Store, found: Validation) -> list[Look]:
    """Every look at these rows for this task, by version."""
    query = sa.select(look).join(task, task.c.number == look.c.task).where(task.c.hash == found.task)
    with store.reading() as connection:
        rows = connection.execute(query.where(look.c.rows == found.rows).order_by(look.c.version)).all()
    return [_look(row) for row in rows]


def _look(row: Any) -> Look:
    loss = None if row.loss is None else _loss(row.loss)
    return Look(row.version, row.at, row.value, Fraction(row.step), loss)


def add_look(store: Store, of: bytes, rows: int, seen: Look) -> Look | None:
    """Keep a look with its charge, durably, before anybody is shown it; what to show of this version.

    A version that was looked at shows what it showed. None, and nothing is kept: the budget does not allow it, or the
    task is no longer validated on these rows.
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
        budget = found[0].terms.budget
        if seen.loss is not None and (budget is None or found[0].spent + seen.loss.epsilon > budget):
            return None
        connection.execute(
            look.insert().values(
                task=number,
                rows=rows,
                version=seen.version,
                at=utc(seen.at),
                value=seen.value,
                step=str(seen.step),
                loss=None if seen.loss is None else str(seen.loss),
            )
        )
        return seen
