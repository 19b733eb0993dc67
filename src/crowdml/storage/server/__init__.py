"""The server's store on SQLite or PostgreSQL: one schema, a hash-chained journal, migrations at start.

Needs the extra `crowdml[server]`. SQL lives here and nowhere else.
"""

from crowdml.storage.server.database import StoreError, UnwrittenError, file_hash, restore
from crowdml.storage.server.journal import (
    Contribution,
    Declined,
    Entry,
    Head,
    JournalRow,
    Last,
    Publication,
    Reduced,
    Snapshot,
)
from crowdml.storage.server.letters import Claim, Standing
from crowdml.storage.server.rounds import OpenRound, RoundMessage, RoundRow
from crowdml.storage.server.store import (
    Counts,
    Device,
    Enrolment,
    EnrolmentRefused,
    Event,
    Given,
    Invitation,
    Point,
    Session,
    State,
    Store,
    StoredTask,
)

__all__ = [
    "Claim",
    "Contribution",
    "Counts",
    "Declined",
    "Device",
    "Enrolment",
    "EnrolmentRefused",
    "Entry",
    "Event",
    "Given",
    "Head",
    "Invitation",
    "JournalRow",
    "Last",
    "OpenRound",
    "Point",
    "Publication",
    "Reduced",
    "RoundMessage",
    "RoundRow",
    "Session",
    "Snapshot",
    "Standing",
    "State",
    "Store",
    "StoreError",
    "StoredTask",
    "UnwrittenError",
    "file_hash",
    "restore",
]  # fmt: skip
