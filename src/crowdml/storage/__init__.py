"""Storage: the device's ledger and outbox on SQLite. SQL lives here and nowhere else."""

from crowdml.storage.budget import Allowance, Budget
from crowdml.storage.ledger import Batch, Charge, Ledger, Outgoing, Price, Round, Sent, Waiting

__all__ = ["Allowance", "Batch", "Budget", "Charge", "Ledger", "Outgoing", "Price", "Round", "Sent", "Waiting"]
