"""Places that devices hold, and the letters that the server relays between them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from crowdml.storage.server.migrations import Number, create_table

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    create_table(
        "place",
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.Column("place", Number, nullable=False),
        sa.Column("device", Number, sa.ForeignKey("device.number")),
        sa.Column("letters", Number, nullable=False),
        sa.Column("bytes", Number, nullable=False),
        sa.Column("last_at", sa.Text),
        sa.PrimaryKeyConstraint("task", "place"),
        sa.UniqueConstraint("task", "device", name="place_once"),
    )
    create_table(
        "letter",
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.Column("index", Number, nullable=False),
        sa.Column("place", Number, nullable=False),
        sa.Column("device", Number, sa.ForeignKey("device.number"), nullable=False),
        sa.Column("signed", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("task", "index"),
    )
    op.create_index("letter_place", "letter", ["task", "place", "index"])
