"""Rows that a server validates tasks on, and the ledger of its looks at them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from crowdml.storage.server.migrations import Number, create_table, guard

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    create_table(
        "validation_rows",
        sa.Column("number", Number, primary_key=True),
        sa.Column("hash", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("count", Number, nullable=False),
        sa.Column("dimension", Number, nullable=False),
        sa.Column("data", sa.LargeBinary),
        sa.CheckConstraint("kind in ('public', 'charged')", name="validation_kind"),
    )
    create_table(
        "validation",
        sa.Column("task", Number, sa.ForeignKey("task.number"), primary_key=True),
        sa.Column("rows", Number, sa.ForeignKey("validation_rows.number"), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("epsilon", sa.Text),
        sa.Column("budget", sa.Text),
        sa.Column("every", Number, nullable=False),
        sa.Column("attached_at", sa.Text, nullable=False),
        sa.Column("halted", sa.Text),
    )
    create_table(
        "look",
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.Column("rows", Number, sa.ForeignKey("validation_rows.number"), nullable=False),
        sa.Column("version", Number, nullable=False),
        sa.Column("at", sa.Text, nullable=False),
        sa.Column("value", Number, nullable=False),
        sa.Column("step", sa.Text, nullable=False),
        sa.Column("loss", sa.Text),
        sa.PrimaryKeyConstraint("task", "rows", "version"),
    )
    op.create_index("look_rows", "look", ["rows"])
    guard("look_is_never_edited", "update on look", "a charge is never edited")
    guard("look_is_never_deleted", "delete on look", "a charge is never deleted")
