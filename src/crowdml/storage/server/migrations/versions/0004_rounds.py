"""Rounds of masking: what devices said in them, sums under masks, and what a device signed last."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from crowdml.storage.server.migrations import Number, create_table

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    create_table(
        "round",
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.Column("number", Number, nullable=False),
        sa.Column("phase", sa.Text, nullable=False),
        sa.Column("cause", sa.Text, nullable=False),
        sa.Column("why", sa.Text, nullable=False),
        sa.Column("opened_at", sa.Text, nullable=False),
        sa.Column("fixed_at", sa.Text),
        sa.Column("ended_at", sa.Text),
        sa.Column("devices", Number, nullable=False),
        sa.Column("shared", Number, nullable=False),
        sa.Column("survived", Number, nullable=False),
        sa.Column("roster", sa.LargeBinary, nullable=False),
        sa.Column("sharers", sa.LargeBinary, nullable=False),
        sa.Column("survivors", sa.LargeBinary, nullable=False),
        sa.Column("version", Number),
        sa.Column("kind", sa.Text),
        sa.Column("publication", sa.LargeBinary),
        sa.PrimaryKeyConstraint("task", "number"),
    )
    create_table(
        "round_message",
        sa.Column("task", Number, nullable=False),
        sa.Column("round", Number, nullable=False),
        sa.Column("device", Number, sa.ForeignKey("device.number"), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("index", Number),
        sa.PrimaryKeyConstraint("task", "round", "device", "kind"),
    )
    op.create_index("round_message_index", "round_message", ["task", "round", "index"])
    create_table(
        "round_sum",
        sa.Column("task", Number, nullable=False),
        sa.Column("round", Number, nullable=False),
        sa.Column("folded", Number, nullable=False),
        sa.Column("sum", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("task", "round"),
    )
    create_table(
        "statement",
        sa.Column("device", Number, sa.ForeignKey("device.number"), primary_key=True),
        sa.Column("signed", sa.LargeBinary, nullable=False),
    )
