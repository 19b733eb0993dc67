"""Which entries were committed together: their receipts have one signature, and are given again as they were."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("journal", sa.Column("place", sa.Integer, nullable=False, server_default="0"))
