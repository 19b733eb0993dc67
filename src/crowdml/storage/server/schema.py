"""The server's tables: one schema for SQLite and PostgreSQL. The migrations make them; a test holds the two together.

Times are text, UTC in ISO 8601 with microseconds, so that they sort as they follow one another. A task and a device
have a short number for the tables that name them a million times.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.schema import SchemaItem

HEAD = "0008"
"""The newest migration: what this version of the library reads and writes."""

SERVER_NUMBER = 0
"""The server's own number among the devices: what it heard of a cohort stands in the journal as its own entry."""

Number = BigInteger().with_variant(Integer, "sqlite")

metadata = MetaData()


def _table(name: str, *parts: SchemaItem, **options: Any) -> Table:
    """A table of this schema, whose columns hold values of their own types alone: on SQLite, too."""
    return Table(name, metadata, *parts, sqlite_strict=True, **options)


setting = _table("setting", Column("name", Text, primary_key=True), Column("value", LargeBinary, nullable=False))

task = _table(
    "task",
    Column("number", Number, primary_key=True),
    Column("hash", LargeBinary, nullable=False, unique=True),  # SHA-256 of the canonical bytes
    Column("name", Text, nullable=False),
    Column("canonical", LargeBinary, nullable=False),
    Column("state", Text, nullable=False),
    Column("created_at", Text, nullable=False),
    Column("changed_at", Text, nullable=False),
    # 1: only devices that joined may read what it publishes
    Column("closed", Integer, nullable=False, server_default="0"),
    CheckConstraint("state in ('draft', 'running', 'paused', 'stopped')", name="task_state"),
)

device = _table(
    "device",
    Column("number", Number, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    Column("public_key", LargeBinary),  # erased when the device withdraws
    Column("enrolled_at", Text),  # likewise
    Column("revoked_at", Text),
    Column("withdrawn_at", Text),
    Column("last_task", Number),  # its last check-in over all tasks: that body is its signed statement
    Column("last_index", Number),
)

journal = _table(
    "journal",
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    Column("index", Number, nullable=False),  # from 1, without a gap
    Column("device", Number, ForeignKey("device.number"), nullable=False),
    Column("seq", Number, nullable=False),
    Column("hash", LargeBinary, nullable=False),  # SHA-256 of the signed envelope
    Column("chain", LargeBinary, nullable=False),
    Column("statement", LargeBinary),  # the device's running totals; erased by `reduce`, but for its last in the task
    Column("received_at", Text, nullable=False),
    Column("place", Integer, nullable=False, server_default="0"),  # among the entries of one commit, from 0
    PrimaryKeyConstraint("task", "index"),
    UniqueConstraint("task", "device", "seq", name="journal_once"),
    sqlite_with_rowid=False,
)
"""Append-only by triggers. The one thing that may change is a statement, to null: of a device that withdrew, and of
entries that were reduced."""

body = _table(
    "body",
    Column("task", Number, nullable=False),
    Column("index", Number, nullable=False),
    Column("signed", LargeBinary, nullable=False),  # the signed envelope, exact bytes
    PrimaryKeyConstraint("task", "index"),
)
"""The bodies of journal entries, apart from them: written with an entry, never edited, deleted by `reduce` alone."""

latest = _table(
    "latest",
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    Column("device", Number, ForeignKey("device.number"), nullable=False),
    Column("seq", Number, nullable=False),
    Column("index", Number, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    PrimaryKeyConstraint("task", "device"),
    sqlite_with_rowid=False,
)
"""Each device's last entry in each task, kept in the transaction that appends: a restart reads these, not a million."""

snapshot = _table(
    "snapshot",
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    Column("index", Number, nullable=False),
    Column("chain", LargeBinary, nullable=False),
    Column("state", LargeBinary, nullable=False),
    Column("state_hash", LargeBinary, nullable=False),
    Column("published", LargeBinary, nullable=False),
    Column("verified", Integer, nullable=False),  # 1: the chain up to here was computed anew, and bodies may be gone
    PrimaryKeyConstraint("task", "index"),
    CheckConstraint("verified in (0, 1)", name="snapshot_verified"),
)

round_ = _table(
    "round",
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    Column("number", Number, nullable=False),  # rises by one, over abandoned rounds and restarts
    Column("phase", Text, nullable=False),
    Column("cause", Text, nullable=False),  # in a word, why it was abandoned; else ''
    Column("why", Text, nullable=False),
    Column("opened_at", Text, nullable=False),
    Column("fixed_at", Text),  # when the cohort was
    Column("ended_at", Text),
    Column("devices", Number, nullable=False),  # in the cohort
    Column("shared", Number, nullable=False),
    Column("survived", Number, nullable=False),
    Column("roster", LargeBinary, nullable=False),  # these three: empty before, and once it ended
    Column("sharers", LargeBinary, nullable=False),
    Column("survivors", LargeBinary, nullable=False),
    Column("version", Number),  # of the publication that this cohort works with
    Column("kind", Text),
    Column("publication", LargeBinary),  # its body, until the round ended
    PrimaryKeyConstraint("task", "number"),
)
"""Rounds of masking. What a device said in one lies in `round_message` while it lasts."""

round_message = _table(
    "round_message",
    Column("task", Number, nullable=False),
    Column("round", Number, nullable=False),
    Column("device", Number, ForeignKey("device.number"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),  # of a masked vector its hash
    Column("index", Number),  # of a masked vector, its entry in the journal
    PrimaryKeyConstraint("task", "round", "device", "kind"),
)
Index("round_message_index", round_message.c.task, round_message.c.round, round_message.c.index)

round_sum = _table(
    "round_sum",
    Column("task", Number, nullable=False),
    Column("round", Number, nullable=False),
    Column("folded", Number, nullable=False),  # the sum has every masked vector of this round up to this entry
    Column("sum", LargeBinary, nullable=False),
    PrimaryKeyConstraint("task", "round"),
)
"""Sums under masks, so that the bodies behind them can go while a round lasts."""

last_statement = _table(
    "statement",
    Column("device", Number, ForeignKey("device.number"), primary_key=True),
    Column("signed", LargeBinary, nullable=False),
)
"""What a device signed after its last check-in, where the body of that one is gone: its totals are in it."""

place = _table(
    "place",
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    Column("place", Number, nullable=False),  # in the task's list
    Column("device", Number, ForeignKey("device.number")),  # who holds it; null: it withdrew
    Column("letters", Number, nullable=False),  # check-ins from here, whoever made them
    Column("bytes", Number, nullable=False),  # of their envelopes
    Column("last_at", Text),  # when the last one came; erased when the device withdraws
    PrimaryKeyConstraint("task", "place"),
    UniqueConstraint("task", "device", name="place_once"),
)
"""Where devices stand, of tasks whose devices write to one another: a place has one device, and a device one place."""

letter = _table(
    "letter",
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    Column("index", Number, nullable=False),  # of its entry in the journal
    Column("place", Number, nullable=False),  # that it was written at
    Column("device", Number, ForeignKey("device.number"), nullable=False),
    Column("signed", LargeBinary, nullable=False),  # the signed envelope, exact bytes
    PrimaryKeyConstraint("task", "index"),
)
"""Check-ins that peers read: the newest of each place. Apart from the journal's bodies, which go by other rules."""
Index("letter_place", letter.c.task, letter.c.place, letter.c.index)

publication = _table(
    "publication",
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    Column("version", Number, nullable=False),
    Column("kind", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    PrimaryKeyConstraint("task", "version"),
)

point = _table(
    "point",
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    Column("index", Number, nullable=False),  # of the journal
    Column("at", Text, nullable=False),
    # msgpack: what the plots show at this moment; nothing of one device
    Column("figures", LargeBinary, nullable=False),
    PrimaryKeyConstraint("task", "index"),
)
"""How a task went, for its plots; thinned, so that a year of check-ins stays a few hundred points."""

validation_rows = _table(
    "validation_rows",
    Column("number", Number, primary_key=True),
    Column("hash", LargeBinary, nullable=False, unique=True),  # keyed, of all rows in any order
    Column("kind", Text, nullable=False),
    Column("count", Number, nullable=False),
    Column("dimension", Number, nullable=False),
    Column("data", LargeBinary),  # float32 little-endian: all x, then all y; erased when no task is validated on them
    Column("row_hashes", LargeBinary),  # keyed and sorted, 16 bytes for each row; null: not known (0007)
    Column("patterns", Text),  # which sets its rows are in, and how often (row_hashes.py), as JSON; null: in it alone
    CheckConstraint("kind in ('public', 'charged')", name="validation_kind"),
)
"""Rows that tasks are validated on. What was charged for looks at them is theirs for good, over all tasks."""

validation = _table(
    "validation",
    Column("task", Number, ForeignKey("task.number"), primary_key=True),
    Column("rows", Number, ForeignKey("validation_rows.number"), nullable=False),
    Column("name", Text, nullable=False),  # what the operator calls the rows
    Column("epsilon", Text),  # of one look; null: public
    Column("budget", Text),  # of all looks at the rows
    Column("every", Number, nullable=False),  # versions between two looks, at least
    Column("attached_at", Text, nullable=False),
    Column("halted", Text),  # why nobody looks, until the operator says so again
)
"""What each task is validated on now, and on which terms."""

look = _table(
    "look",
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    Column("rows", Number, ForeignKey("validation_rows.number"), nullable=False),
    Column("version", Number, nullable=False),
    Column("at", Text, nullable=False),
    Column("value", Number, nullable=False),  # mistakes, or distances in steps, over all rows; with noise where charged
    Column("step", Text, nullable=False),
    Column("loss", Text),  # what the look cost each row; null: public
    PrimaryKeyConstraint("task", "rows", "version"),
)
"""The ledger of validation, append-only by triggers: a charge, and the value that was drawn for it."""
Index("look_rows", look.c.rows)

own_charge = _table(
    "own_charge",
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    Column("index", Number, nullable=False),  # the journal's entry that has the value
    Column("row", Text, nullable=False),  # of the protocol's `server_mechanisms`
    Column("rows", Number, ForeignKey("validation_rows.number"), nullable=False),
    Column("at", Text, nullable=False),
    Column("loss", Text, nullable=False),
    PrimaryKeyConstraint("task", "index", "row"),
)
"""What protocols let out of charged rows through the server's own door, append-only by triggers."""
Index("own_charge_rows", own_charge.c.rows)

invitation = _table(
    "invitation",
    Column("number", Number, primary_key=True),
    Column("code_hash", LargeBinary, nullable=False, unique=True),
    Column("label", Text, nullable=False),
    Column("uses", Number, nullable=False),
    Column("used", Number, nullable=False),
    Column("rate", Number),  # enrolments an hour; null: as fast as they come
    Column("ends_at", Text),
    Column("created_at", Text, nullable=False),
    CheckConstraint("used >= 0 and used <= uses", name="invitation_uses"),
)

invitation_task = _table(
    "invitation_task",
    Column("invitation", Number, ForeignKey("invitation.number"), nullable=False),
    Column("task", Number, ForeignKey("task.number"), nullable=False),
    PrimaryKeyConstraint("invitation", "task"),
)

admission = _table(
    "admission",
    Column("id", Number, primary_key=True),
    Column("invitation", Number, ForeignKey("invitation.number"), nullable=False),
    Column("device", Number, ForeignKey("device.number")),  # null: it withdrew; the use stays used
    Column("at", Text, nullable=False),
    UniqueConstraint("invitation", "device", name="admission_once"),
)
Index("admission_rate", admission.c.invitation, admission.c.at)
Index("admission_device", admission.c.device)

withdrawn = _table(
    "withdrawn",
    Column("hash", LargeBinary, primary_key=True),  # SHA-256 of this server's salt and the device's id
    Column("statement", LargeBinary),  # what it had spent; null: it gave nothing
    Column("withdrawn_at", Text, nullable=False),
)

operator = _table(
    "operator",
    Column("name", Text, primary_key=True),
    Column("password", Text, nullable=False),  # argon2, with its salt and parameters
    Column("created_at", Text, nullable=False),
)

session = _table(
    "session",
    Column("token_hash", LargeBinary, primary_key=True),
    Column("csrf", Text, nullable=False),
    Column("operator", Text, ForeignKey("operator.name"), nullable=False),
    Column("ends_at", Text, nullable=False),
)

event = _table(
    "event",
    Column("id", Number, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("at", Text, nullable=False),
    Column("task", Number, ForeignKey("task.number")),
    Column("detail", Text, nullable=False),  # for people; never a sample, never a secret
)
Index("event_task", event.c.task, event.c.id)
