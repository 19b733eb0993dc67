"""What the tests ask a ledger about all of its samples, and no command does."""

from __future__ import annotations

from crowdml.privacy.losses import Total
from crowdml.storage import Ledger


def sample_total(ledger: Ledger, serial: int) -> Total:
    """What this sample has paid, over all tasks."""
    with ledger._transaction("deferred"):
        return ledger._history.spent().sample(serial)


def sample_ceiling(ledger: Ledger) -> Total:
    """A total that is at least every sample's in every part, and so at every delta. That of none is no loss."""
    with ledger._transaction("deferred"):
        return ledger._history.spent().ceiling
