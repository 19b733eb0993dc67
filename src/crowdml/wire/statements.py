"""Statements: a device's running totals, signed with each envelope.

The server's mirror hands the last one back to a device that lost its ledger. A total is written as losses merged by
kind, exact: 'pure 3/10' stands for any pure losses of that sum. Their squares are not kept, so what is read back is the
same total or a dearer one, never a cheaper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from crowdml.errors import GuaranteeError
from crowdml.privacy.losses import ZCDP, Loss, Pure, Renyi, Total, Unbounded, parse_loss
from crowdml.wire.packing import LARGEST_INTEGER, Reader
from crowdml.wire.problems import Problem

__all__ = ["LARGEST_STATEMENT", "Statement", "losses_of", "total_of"]

LONGEST_LOSS = 4096
"""Bytes of a loss text: a Renyi loss has a fraction for each order."""
MOST_LOSSES = 4
"""A total has at most one loss of each kind."""
LARGEST_STATEMENT = 2 * MOST_LOSSES * (LONGEST_LOSS + 3) + 64


@dataclass(frozen=True)
class Statement:
    """What the device has given in its life, over all its tasks.

    `device`: as if all its samples were replaced. `dearest`: the dearest of its samples. `samples`: how many samples
    it gave. Losses are texts, sorted, at most one of a kind.
    """

    device: tuple[str, ...]
    samples: int
    dearest: tuple[str, ...]

    @staticmethod
    def of(device: Total, samples: int, dearest: Total) -> Statement:
        return Statement(losses_of(device), samples, losses_of(dearest))

    @property
    def device_total(self) -> Total:
        return total_of(self.device)

    @property
    def dearest_total(self) -> Total:
        return total_of(self.dearest)

    def plain(self) -> dict[str, Any]:
        """As it is packed and shown."""
        return {"dearest": list(self.dearest), "device": list(self.device), "samples": self.samples}

    @staticmethod
    def read(reader: Reader) -> Statement:
        reader.map(3)
        reader.key("dearest")
        dearest = _read_losses(reader, "statement.dearest")
        reader.key("device")
        device = _read_losses(reader, "statement.device")
        reader.key("samples")
        return Statement(device, reader.integer("statement.samples", 0, LARGEST_INTEGER), dearest)


def losses_of(total: Total) -> tuple[str, ...]:
    """A total as sorted texts, one for each kind of loss that it has."""
    losses: list[Loss] = []
    if total.pure:
        losses.append(Pure(total.pure))
    if total.zcdp:
        losses.append(ZCDP(total.zcdp))
    if any(total.values):
        losses.append(Renyi(total.orders, total.values))
    if total.unbounded:
        losses.append(Unbounded())
    return tuple(sorted(str(loss) for loss in losses))


def total_of(texts: tuple[str, ...]) -> Total:
    """The total that the texts stand for."""
    return Total.of(_loss(text) for text in texts)


def _read_losses(reader: Reader, name: str) -> tuple[str, ...]:
    texts = tuple(reader.text(name, LONGEST_LOSS) for _ in range(reader.array(name, MOST_LOSSES)))
    kinds = [_loss(text).__class__.__name__.lower() for text in texts]
    if any(first >= second for first, second in pairwise(kinds)):
        reader.fail(f"{name} must be sorted and have at most one loss of each kind")
    return texts


@lru_cache(maxsize=1024)
def _loss(text: str) -> Loss:
    try:
        loss = parse_loss(text)
        exact = str(loss) == text
    except (GuaranteeError, ValueError, ZeroDivisionError) as error:
        raise Problem("malformed", f"The statement is refused: {error}") from error
    if not exact:
        raise Problem("malformed", "The statement is refused: a loss is written in lowest terms, such as 'pure 1/10'.")
    return loss
