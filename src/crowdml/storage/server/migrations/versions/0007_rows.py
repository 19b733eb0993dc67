"""Rows of validation are known one by one: keyed hashes of each, and which sets share which rows.

Rows of files that are still kept are hashed here, and what they lost in several sets adds up from now on. Of sets whose
rows were erased nobody knows the rows: their hash of the whole stays, and new rows are refused beside them until the
same file is given once more, or the operator says that no row of it is among the new ones (`task validate --new-rows`).

Rows of a data set were kept as their task scales them, and are known by what was read: so they count as erased ones
here, and private ones are looked at no more until the operator attaches the data set again.
"""

from __future__ import annotations

import json
import secrets

import sqlalchemy as sa
from alembic import op

from crowdml.storage.server.row_hashes import KEY, counted, hash_rows, patterns

revision = "0007"
down_revision = "0006"

FILES = (".csv", ".npz")
"""What the name of a file ends in: rows of anything else came from a data set."""


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
    validation = sa.table(
        "validation", sa.column("rows", sa.BigInteger), *(sa.column(name, sa.Text) for name in ("name", "halted"))
    )
    named = connection.execute(sa.select(validation.c.rows, validation.c.name)).all()
    scaled = {each.rows for each in named if not each.name.endswith(FILES)}
    private = sa.select(rows.c.number).where(rows.c.kind == "charged", rows.c.number.in_(scaled))
    connection.execute(validation.update().where(validation.c.rows.in_(private)).values(halted="scaled"))
    sets = {}
    for each in connection.execute(sa.select(rows).where(rows.c.data.is_not(None))).all():
        if each.number in scaled:
            continue
        hashed = hash_rows(key, each.data, int(each._mapping["count"]), each.dimension)
        found = {"hash": hashed.whole, "row_hashes": hashed.rows}
        connection.execute(rows.update().where(rows.c.number == each.number).values(found))
        if each.kind == "charged":
            sets[int(each.number)] = counted(hashed.rows)
    for number in sets:
        text = json.dumps([sorted(pattern.items()) for pattern in patterns(number, sets)])
        connection.execute(rows.update().where(rows.c.number == number).values(patterns=text))
