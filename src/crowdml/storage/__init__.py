"""Storage: the device's ledger and outbox on SQLite. SQL lives here and nowhere else."""

from crowdml.storage.budget import Allowance, Budget
from crowdml.storage.ledger import Added, Batch, Charge, Ledger, Outgoing, Round, Sent, Waiting

__all__ = ["Added", "Allowance", "Batch", "Budget", "Charge", "Ledger", "Outgoing", "Round", "Sent", "Waiting"]
