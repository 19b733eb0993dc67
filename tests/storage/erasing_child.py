"""A device's life in its ledger: samples come and go, rounds begin and end. Its parent kills it.

python erasing_child.py PATH FIRST    from step FIRST on; each step says its number when all of it is committed
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from ledger_builders import PLENTY, TASK, charge

from crowdml.storage import Batch, Ledger, Round

KINDS = (b"sample", b"advertised", b"drawn", b"message", b"state", b"batch")
KEPT_BATCHES = 2


def secret(kind: bytes, step: int, part: int = 0) -> bytes:
    """Bytes that are found again: of one page, or of many."""
    assert kind in KINDS
    return (b"<%s %06d>" % (kind, step)) * (1, 7, 40, 900)[(step + part) % 4]


def live(ledger: Ledger, first: int) -> Iterator[int]:
    """Steps without end. After each nothing of it is needed but its state and its batch."""
    step = first
    while True:
        ledger.keep_round(TASK, Round(step + 1, secret(b"advertised", step)))
        serials = ledger.keep(TASK, [secret(b"sample", step, part) for part in range(5)], source="x", taken=5 * step)
        number = ledger.next_seq(TASK)
        ledger.charge(
            TASK,
            [charge(serials[0], serials[-1])],
            [PLENTY],
            outbox={number: secret(b"message", step)},
            state=secret(b"state", step),
            given=serials,
            round_=Round(step + 1, secret(b"drawn", step)),
            remember=Batch(step, secret(b"batch", step)),
            batches=KEPT_BATCHES,
        )
        ledger.acknowledge(TASK, number, b"receipt")
        ledger.keep_round(TASK, Round(step + 1, None))
        yield step
        step += 1


if __name__ == "__main__":
    with Ledger(sys.argv[1]) as ledger:
        for done in live(ledger, int(sys.argv[2])):
            os.write(1, b"%d\n" % done)
