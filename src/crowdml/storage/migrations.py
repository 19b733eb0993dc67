"""Numbered SQL files, forward only: each runs in one transaction with the record that it ran."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from functools import cache

from crowdml.errors import ASK_FOR_STATEMENT, LedgerError
from crowdml.records import record


@record
class Migration:
    number: int
    name: str
    sql: str

    def statements(self) -> Iterator[str]:
        """One by one: `executescript` would commit the transaction that it is called in."""
        statement = ""
        for line in self.sql.splitlines(keepends=True):
            statement += line
            if sqlite3.complete_statement(statement):
                yield statement
                statement = ""


@cache
def migrations() -> tuple[Migration, ...]:
    """Those of the device's store, in order: 1, 2, 3, ... without a gap."""
    from importlib import resources  # with the first ledger

    folder = resources.files("crowdml.storage") / "device"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return tuple(
        Migration(int(file.name.split("_")[0]), file.name.removesuffix(".sql"), file.read_text(encoding="utf-8"))
        for file in files
    )


def recorded(connection: sqlite3.Connection) -> list[tuple[int, str]]:
    """The migrations that this file says it has seen; none where it keeps no such list."""
    kept = connection.execute("select 1 from sqlite_schema where type = 'table' and name = 'migration'").fetchone()
    return connection.execute("select number, name from migration order by number").fetchall() if kept else []


def apply(connection: sqlite3.Connection, pending: tuple[Migration, ...]) -> None:
    for migration in pending:
        connection.execute("begin immediate")
        try:
            for statement in migration.statements():
                connection.execute(statement)
            connection.execute("insert into migration (number, name) values (?, ?)", (migration.number, migration.name))
            connection.execute("commit")
        except BaseException:
            if connection.in_transaction:
                connection.execute("rollback")
            raise


def bring_up_to_date(connection: sqlite3.Connection, where: str) -> None:
    """Run what is missing. Refuse a file whose record is absent, has a gap, or is ahead of this version."""
    ours, theirs = migrations(), recorded(connection)
    refused = "Nothing was sent."
    if not theirs:
        raise LedgerError(
            f"{where} has no record of any migration: it is not a ledger, or its record is lost. {refused} "
            f"Give the path of this device's ledger. If this was one: {ASK_FOR_STATEMENT}"
        )
    last = theirs[-1][0]
    if last > ours[-1].number:
        raise LedgerError(
            f"{where} was written by a newer version: it is at migration {last}, and this one knows {ours[-1].number}. "
            f"{refused} Install the version that wrote it, or a later one."
        )
    if theirs != [(migration.number, migration.name) for migration in ours[:last]]:
        raise LedgerError(
            f"{where} lacks the record of a migration: it has {[number for number, _ in theirs]}, and 1 to {last} are "
            f"expected. {refused} {ASK_FOR_STATEMENT}"
        )
    apply(connection, ours[last:])
    if schema(connection) != _expected_schema():
        raise LedgerError(
            f"{where} does not have the tables and triggers that its migrations make. {refused} {ASK_FOR_STATEMENT}"
        )


def schema(connection: sqlite3.Connection) -> frozenset[tuple[str, str, str]]:
    rows = connection.execute("select type, name, sql from sqlite_schema where name not like 'sqlite\\_%' escape '\\'")
    return frozenset(rows.fetchall())


@cache
def _expected_schema() -> frozenset[tuple[str, str, str]]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        apply(connection, migrations())
        return schema(connection)
    finally:
        connection.close()
