"""For the portal: whether a task is closed to those it did not invite, and how its plots went."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from crowdml.storage.server.migrations import Number, create_table

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("task", sa.Column("closed", sa.Integer, nullable=False, server_default="0"))
    create_table(
        "point",
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.Column("index", Number, nullable=False),
        sa.Column("at", sa.Text, nullable=False),
        sa.Column("figures", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("task", "index"),
    )
