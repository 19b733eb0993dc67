"""What operators ask of the store: their accounts, batches of invitations, drafts of tasks, and how the crowd fares.

Functions over a `Store`; each is one transaction. The caller passes the time: there is no clock in here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from crowdml.storage.server.database import NOTHING_WRITTEN, StoreError, utc
from crowdml.storage.server.journal import task_number
from crowdml.storage.server.schema import (
    SERVER_NUMBER,
    admission,
    device,
    invitation,
    journal,
    operator,
    session,
    setting,
    task,
)
from crowdml.storage.server.store import IS_DEVICE, Device, Store, read_devices
from crowdml.wire.statements import Statement, open_statement

# Operators


def first_operator(store: Store, name: str, password: str, at: str) -> bool:
    """Add an operator if there is none; whether it was added. Of two at once, one is the first."""
    with store.writing() as connection:
        if connection.execute(sa.select(operator.c.name).limit(1)).first() is not None:
            return False
        connection.execute(operator.insert().values(name=name, password=password, created_at=utc(at)))
        return True


def remove_operator(store: Store, name: str, *, last: bool = False) -> bool:
    """Remove an operator, whose sessions end; whether there was one. The last one stays, unless `last`."""
    with store.writing() as connection:
        names = list(connection.execute(sa.select(operator.c.name)).scalars())
        if name not in names:
            return False
        if len(names) == 1 and not last:
            raise StoreError(f"{name!r} is the last operator. {NOTHING_WRITTEN} Add another one first.")
        connection.execute(session.delete().where(session.c.operator == name))
        connection.execute(operator.delete().where(operator.c.name == name))
        return True


def extend_session(store: Store, token_hash: bytes, ends_at: str) -> None:
    """Let a session end later; one that was closed stays closed."""
    store.change(session.update().where(session.c.token_hash == token_hash).values(ends_at=utc(ends_at)))


def end_other_sessions(store: Store, name: str, keep: bytes, known: str, password: str) -> bool:
    """A new password (its argon2 hash) instead of `known`: every other session of this operator ends with it.

    In one transaction; False, and nothing is changed, where another password holds by now.
    """
    with store.writing() as connection:
        here = (operator.c.name == name) & (operator.c.password == known)
        if not connection.execute(operator.update().where(here).values(password=password)).rowcount:
            return False
        others = (session.c.operator == name) & (session.c.token_hash != keep)
        connection.execute(session.delete().where(others))
        return True


# Settings by their beginning: drafts of tasks


def settings_like(store: Store, prefix: str) -> dict[str, bytes]:
    """Every setting whose name begins so, without that beginning."""
    query = sa.select(setting.c.name, setting.c.value).where(setting.c.name.startswith(prefix, autoescape=True))
    return {row.name.removeprefix(prefix): row.value for row in store.read(query.order_by(setting.c.name))}


def remove_setting(store: Store, name: str) -> bool:
    """Forget a setting; whether there was one."""
    return store.change(setting.delete().where(setting.c.name == name)) > 0


# Invitations


def end_sheet(store: Store, code_hashes: Sequence[bytes], at: str) -> int:
    """Let nobody in any more by these codes; how many had not ended yet."""
    here = invitation.c.code_hash.in_(list(code_hashes))
    open_ = invitation.c.ends_at.is_(None) | (invitation.c.ends_at > utc(at))
    return store.change(invitation.update().where(here, open_).values(ends_at=utc(at)))


# Devices and their totals


@dataclass(frozen=True)
class DeviceRow:
    """A device as operators see it: when it was last heard, and what it said to have spent by then."""

    device: Device
    last_at: str | None
    statement: Statement | None


def find_devices(store: Store, search: str = "", *, after: str = "", limit: int = 50) -> list[DeviceRow]:
    """Devices whose id begins with `search`, or that used an invitation whose label has it; a page, by their ids."""
    query = (
        sa.select(device, journal.c.received_at, journal.c.statement)
        .join(journal, (journal.c.task == device.c.last_task) & (journal.c.index == device.c.last_index), isouter=True)
        .where(device.c.id > after, IS_DEVICE)
    )
    if search:
        by_label = (
            sa.select(admission.c.device)
            .join(invitation, invitation.c.number == admission.c.invitation)
            .where(invitation.c.label.icontains(search, autoescape=True))
        )
        begins = device.c.id.startswith(search.lower(), autoescape=True)
        query = query.where(begins | device.c.number.in_(by_label))
    with store.reading() as connection:
        rows = connection.execute(query.order_by(device.c.id).limit(limit)).all()
        found = read_devices(connection, rows)
    return [DeviceRow(each, row.received_at, _statement(row.statement)) for each, row in zip(found, rows, strict=True)]


def spent_statements(store: Store, most: int = 2_000) -> tuple[int, list[Statement]]:
    """How many devices have given something, and the last totals of up to `most` of them.

    Ids are hashes of keys, so the first by id are as good as drawn by chance.
    """
    gave = device.c.last_index.is_not(None) & device.c.withdrawn_at.is_(None) & IS_DEVICE
    query = (
        sa.select(journal.c.statement)
        .join(device, (journal.c.task == device.c.last_task) & (journal.c.index == device.c.last_index))
        .where(gave)
        .order_by(device.c.id)
        .limit(most)
    )
    with store.reading() as connection:
        many = connection.execute(sa.select(sa.func.count()).select_from(device).where(gave)).scalar_one()
        found = list(connection.execute(query).scalars())
    return many, [each for each in map(_statement, found) if each is not None]


def _statement(packed: bytes | None) -> Statement | None:
    return None if packed is None else open_statement(packed)


# How fast check-ins come


def index_before(store: Store, hash_: bytes, time: str) -> int:
    """How many entries of a task had arrived before `time`: a few reads, for they lie in order of arrival."""
    with store.reading() as connection:
        number = task_number(connection, hash_)

        def arrival(index: int) -> str | None:
            here = (journal.c.task == number) & (journal.c.index == index)
            return connection.execute(sa.select(journal.c.received_at).where(here)).scalar()

        last = sa.select(sa.func.max(journal.c.index)).where(journal.c.task == number)
        low, high, limit = 0, int(connection.execute(last).scalar() or 0), utc(time)
        while low < high:
            middle = (low + high + 1) // 2
            found = arrival(middle)
            low, high = (middle, high) if found is not None and found < limit else (low, middle - 1)
        return low


def latest_arrival(store: Store, hash_: bytes) -> str | None:
    """When the last check-in of a task came."""
    query = (
        sa.select(journal.c.received_at)
        .join(task, task.c.number == journal.c.task)
        .where(task.c.hash == hash_)
        .order_by(journal.c.index.desc())
        .limit(1)
    )
    return store.read_value(query)


def recent_devices(store: Store, hash_: bytes, after_index: int, most: int = 20_000) -> int:
    """How many different devices gave the check-ins after `after_index`, looking at the last `most` of them."""
    with store.reading() as connection:
        number = task_number(connection, hash_)
        rows: Any = (
            sa.select(journal.c.device)
            .where(journal.c.task == number, journal.c.index > after_index, journal.c.device != SERVER_NUMBER)
            .order_by(journal.c.index.desc())
            .limit(most)
            .subquery()
        )
        return connection.execute(sa.select(sa.func.count(sa.distinct(rows.c.device)))).scalar_one()
