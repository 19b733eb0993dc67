"""Storage: the device's ledger and outbox on SQLite. SQL lives here and nowhere else."""

from crowdml.storage.budget import Allowance, Budget
from crowdml.storage.ledger import Charge, Ledger, Outgoing, Price, Round, Sent, Waiting

__all__ = ["Allowance", "Budget", "Charge", "Ledger", "Outgoing", "Price", "Round", "Sent", "Waiting"]
