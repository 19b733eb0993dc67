"""Storage: the device's ledger and outbox on SQLite. SQL lives here and nowhere else."""

from crowdml.privacy.budget import Allowance, Budget
from crowdml.privacy.spending import Charge
from crowdml.storage.device.ledger import Batch, Ledger, Outgoing, Round, Sent, Waiting

__all__ = ["Allowance", "Batch", "Budget", "Charge", "Ledger", "Outgoing", "Round", "Sent", "Waiting"]
