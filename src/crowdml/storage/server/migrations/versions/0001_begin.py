"""The first schema: tasks, devices, the journal with its bodies and snapshots, invitations, operators, events."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from crowdml.storage.server.migrations import Number, create_table, guard

revision = "0001"
down_revision = None


def upgrade() -> None:
    create_table(
        "setting", sa.Column("name", sa.Text, primary_key=True), sa.Column("value", sa.LargeBinary, nullable=False)
    )
    create_table(
        "task",
        sa.Column("number", Number, primary_key=True),
        sa.Column("hash", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("canonical", sa.LargeBinary, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.Column("changed_at", sa.Text, nullable=False),
        sa.CheckConstraint("state in ('draft', 'running', 'paused', 'stopped')", name="task_state"),
    )
    create_table(
        "device",
        sa.Column("number", Number, primary_key=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("public_key", sa.LargeBinary),
        sa.Column("enrolled_at", sa.Text),
        sa.Column("revoked_at", sa.Text),
        sa.Column("withdrawn_at", sa.Text),
        sa.Column("last_task", Number),
        sa.Column("last_index", Number),
    )
    create_table(
        "journal",
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.Column("index", Number, nullable=False),
        sa.Column("device", Number, sa.ForeignKey("device.number"), nullable=False),
        sa.Column("seq", Number, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.Column("statement", sa.LargeBinary),
        sa.Column("received_at", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("task", "index"),
        sa.UniqueConstraint("task", "device", "seq", name="journal_once"),
        sqlite_with_rowid=False,
    )
    create_table(
        "body",
        sa.Column("task", Number, nullable=False),
        sa.Column("index", Number, nullable=False),
        sa.Column("signed", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("task", "index"),
    )
    create_table(
        "latest",
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.Column("device", Number, sa.ForeignKey("device.number"), nullable=False),
        sa.Column("seq", Number, nullable=False),
        sa.Column("index", Number, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("task", "device"),
        sqlite_with_rowid=False,
    )
    create_table(
        "snapshot",
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.Column("index", Number, nullable=False),
        sa.Column("chain", sa.LargeBinary, nullable=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
        sa.Column("state_hash", sa.LargeBinary, nullable=False),
        sa.Column("published", sa.LargeBinary, nullable=False),
        sa.Column("verified", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("task", "index"),
        sa.CheckConstraint("verified in (0, 1)", name="snapshot_verified"),
    )
    create_table(
        "publication",
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.Column("version", Number, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("task", "version"),
    )
    create_table(
        "invitation",
        sa.Column("number", Number, primary_key=True),
        sa.Column("code_hash", sa.LargeBinary, nullable=False, unique=True),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("uses", Number, nullable=False),
        sa.Column("used", Number, nullable=False),
        sa.Column("rate", Number),
        sa.Column("ends_at", sa.Text),
        sa.Column("created_at", sa.Text, nullable=False),
        sa.CheckConstraint("used >= 0 and used <= uses", name="invitation_uses"),
    )
    create_table(
        "invitation_task",
        sa.Column("invitation", Number, sa.ForeignKey("invitation.number"), nullable=False),
        sa.Column("task", Number, sa.ForeignKey("task.number"), nullable=False),
        sa.PrimaryKeyConstraint("invitation", "task"),
    )
    create_table(
        "admission",
        sa.Column("id", Number, primary_key=True),
        sa.Column("invitation", Number, sa.ForeignKey("invitation.number"), nullable=False),
        sa.Column("device", Number, sa.ForeignKey("device.number")),
        sa.Column("at", sa.Text, nullable=False),
        sa.UniqueConstraint("invitation", "device", name="admission_once"),
    )
    op.create_index("admission_rate", "admission", ["invitation", "at"])
    op.create_index("admission_device", "admission", ["device"])
    create_table(
        "withdrawn",
        sa.Column("hash", sa.LargeBinary, primary_key=True),
        sa.Column("statement", sa.LargeBinary),
        sa.Column("withdrawn_at", sa.Text, nullable=False),
    )
    create_table(
        "operator",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("password", sa.Text, nullable=False),
        sa.Column("created_at", sa.Text, nullable=False),
    )
    create_table(
        "session",
        sa.Column("token_hash", sa.LargeBinary, primary_key=True),
        sa.Column("csrf", sa.Text, nullable=False),
        sa.Column("operator", sa.Text, sa.ForeignKey("operator.name"), nullable=False),
        sa.Column("ends_at", sa.Text, nullable=False),
    )
    create_table(
        "event",
        sa.Column("id", Number, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("at", sa.Text, nullable=False),
        sa.Column("task", Number, sa.ForeignKey("task.number")),
        sa.Column("detail", sa.Text, nullable=False),
    )
    op.create_index("event_task", "event", ["task", "id"])
    if op.get_bind().dialect.name != "sqlite":
        op.execute(sa.text(REFUSE))
    guard("journal_is_append_only", "update on journal", "a journal entry is never edited", when=CHANGED)
    guard("journal_is_never_deleted", "delete on journal", "a journal entry is never deleted")
    guard("body_is_never_edited", "update on body", "a body is never edited")
    fixed = "update of number, hash, name, canonical, created_at on task"
    guard("task_is_immutable", fixed, "a task is never edited")


CHANGED = """
    new.task <> old.task or new."index" <> old."index" or new.device <> old.device or new.seq <> old.seq
    or new.hash <> old.hash or new.chain <> old.chain or new.received_at <> old.received_at
    or new.statement is not null
"""

REFUSE = """create function crowdml_refuse() returns trigger language plpgsql as
    $$ begin raise exception '%', tg_argv[0] using errcode = 'integrity_constraint_violation'; end $$"""
