"""What protocols let out through the server's own door: a charge on rows of the operator's, with its journal entry."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from crowdml.storage.server.migrations import Number, create_table, guard

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    create_table(
        "own_charge",
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.Column("index", Number, nullable=False),
        sa.Column("row", sa.Text, nullable=False),
        sa.Column("rows", Number, sa.ForeignKey("validation_rows.number"), nullable=False),
        sa.Column("at", sa.Text, nullable=False),
        sa.Column("loss", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("task", "index", "row"),
    )
    op.create_index("own_charge_rows", "own_charge", ["rows"])
    guard("own_charge_is_never_edited", "update on own_charge", "a charge is never edited")
    guard("own_charge_is_never_deleted", "delete on own_charge", "a charge is never deleted")
