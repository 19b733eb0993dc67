"""Alembic's environment and the numbered migrations of the server's database. Forward only."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

Number = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def create_table(name: str, *parts: Any, **options: Any) -> None:
    """A new table, whose columns hold values of their own types alone: on SQLite, too."""
    op.create_table(name, *parts, sqlite_strict=True, **options)


def guard(trigger: str, before: str, sentence: str, *, when: str = "") -> None:
    """A trigger that refuses with this sentence what would come after `before`, such as "delete on journal"."""
    if op.get_bind().dialect.name == "sqlite":
        condition, refuse = f" when {when}" if when else "", f"begin select raise(abort, '{sentence}'); end"
    else:
        condition = " for each row" + (f" when ({when})" if when else "")
        refuse = f"execute function crowdml_refuse('{sentence}')"
    op.execute(sa.text(f"create trigger {trigger} before {before}{condition}\n    {refuse}"))
