"""Short ways to a charge and a budget, for the tests of the ledger and for the processes that they kill."""

from __future__ import annotations

from fractions import Fraction

from crowdml.privacy.losses import ZCDP, Loss, Pure, group
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.storage import Budget, Charge

TASK, OTHER = b"t" * 32, b"o" * 32
TENTH = Pure(Fraction(1, 10))
NOON = "2025-01-31T12:00:00+00:00"
PLENTY = Budget(Fraction(10**6), 1e-6, 10**9)


def charge(
    first: int, last: int, loss: Loss = TENTH, *, task: bytes = TASK, row: str = "gradient", device: Loss | None = None
) -> Charge:
    everything = group(loss, last - first + 1) if device is None else device
    return Charge(task, row, loss, everything, Observer.ANYONE, Adjacency.REPLACE_SAMPLE, first, last, NOON)


def masked(first: int, last: int, rho: int = 1, *, task: bytes = TASK, times: int = 50) -> Charge:
    size = last - first + 1
    one, all_ = ZCDP(Fraction(rho, 100)), ZCDP(Fraction(rho * size * size, 100))
    alone, device_alone = ZCDP(one.rho * times), ZCDP(all_.rho * times)
    return Charge(
        task, "gradient", one, all_, Observer.AGGREGATE, Adjacency.REPLACE_SAMPLE, first, last, NOON,
        alone, device_alone,
    )  # fmt: skip
