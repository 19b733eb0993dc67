"""Rows of validation are known one by one: keyed hashes of each, and which sets share which rows.

Rows that are still kept are hashed here, and what they lost in several sets adds up from now on. Of sets whose rows
were erased nobody knows the rows: their hash of the whole stays, and new rows are refused beside them until the same
file is given once more, or the operator says that no row of it is among the new ones (`task validate --new-rows`).
"""

from __future__ import annotations

import json
import secrets

import sqlalchemy as sa
from alembic import op

from crowdml.storage.server.row_hashes import KEY, counted, hash_rows, patterns

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("validation_rows", sa.Column("row_hashes", sa.LargeBinary))
    op.add_column("validation_rows", sa.Column("patterns", sa.Text))
    connection, key = op.get_bind(), secrets.token_bytes(32)
    setting = sa.table("setting", sa.column("name", sa.Text), sa.column("value", sa.LargeBinary))
    connection.execute(setting.insert().values(name=KEY, value=key))
    rows = sa.table(
        "validation_rows",
        *(sa.column(name, sa.LargeBinary) for name in ("hash", "data", "row_hashes")),
        *(sa.column(name, sa.BigInteger) for name in ("number", "count", "dimension")),
        *(sa.column(name, sa.Text) for name in ("kind", "patterns")),
    )
    sets = {}
    for each in connection.execute(sa.select(rows).where(rows.c.data.is_not(None))).all():
        hashed = hash_rows(key, each.data, each.count, each.dimension)
        found = {"hash": hashed.whole, "row_hashes": hashed.rows}
        connection.execute(rows.update().where(rows.c.number == each.number).values(found))
        if each.kind == "charged":
            sets[int(each.number)] = counted(hashed.rows)
    for number in sets:
        text = json.dumps([sorted(pattern.items()) for pattern in patterns(number, sets)])
        connection.execute(rows.update().where(rows.c.number == number).values(patterns=text))
