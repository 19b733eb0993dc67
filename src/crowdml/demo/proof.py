"""Shows that nothing was lost: what devices hold in their hands, against the journal, against the published weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from crowdml.server.fold import Fold, uploads_in
from crowdml.server.gathering import CLOSED, read_own
from crowdml.server.transcript import replay, write_transcript
from crowdml.storage.server import Store
from crowdml.task import Task
from crowdml.wire.envelopes import open_signed
from crowdml.wire.receipts import Receipt


@dataclass(frozen=True)
class Proof:
    """`lost`: receipts whose check-in is not in the journal at the place that they name. `counted_twice`: entries of
    the journal beyond the first of one check-in. `unsigned`: receipts that the server's key did not sign."""

    journalled: int
    acknowledged: int
    lost: int
    counted_twice: int
    unsigned: int
    same_bits: bool
    """Whether the journal folded again, from nothing, gives the publication that the server offers, byte for byte."""
    sha256: str
    """Hash of the publication."""
    survivors: int
    """Devices in the sums that were published, or in the rounds of uploads that were closed."""
    cohort: int
    """Devices in the cohorts of those sums, or in those rounds."""
    accuracy: tuple[float, ...]
    """On samples that no device holds, before any cohort was added up, after the first, and so on; or nothing."""

    took: tuple[float, ...] = ()
    """Seconds from the moment that each cohort was fixed to its sum."""

    @property
    def holds(self) -> bool:
        return not (self.lost or self.counted_twice or self.unsigned) and self.same_bits


def prove(
    database: Path,
    task: Task,
    receipts: Sequence[Receipt],
    server_key: bytes,
    published: bytes,
    transcript: Path,
    accuracy: Callable[[Any], float] | None = None,
) -> Proof:
    """Hold the three against one another. The chain of hashes over the journal is verified on the way."""
    with Store(database) as store:
        store.verify_chain(task.hash)
        whole = [(entry.device, entry.seq, entry.hash, entry.index) for entry in store.entries(task.hash)]
        with transcript.open("wb") as file:
            write_transcript(store, task.hash, file)
        totals = dict(store.totals(task.hash))
        summed = [row for row in store.rounds(task.hash, 1_000_000) if row.phase == "summed"]
        gathered = 0
        for data in totals.values() if task.masking is None else ():
            envelope = open_signed(data).envelope
            gathered += len(read_own(CLOSED, envelope.body).entries) if envelope.kind == CLOSED else 0
        curve = () if accuracy is None else tuple(_curve(store, task, accuracy))
    entries = [entry for entry in whole if entry[-1] not in totals]  # those of devices
    again = replay(transcript)
    return Proof(
        journalled=len(entries),
        acknowledged=len(receipts),
        lost=len({(each.device, each.seq, each.hash, each.index) for each in receipts} - set(entries)),
        counted_twice=_beyond_first((device, seq) for device, seq, *_ in entries),
        unsigned=sum(not each.verify(server_key) for each in receipts),
        same_bits=again.body == published,
        sha256=again.hash,
        survivors=gathered + sum(row.survived for row in summed),
        cohort=gathered + sum(row.devices for row in summed),
        accuracy=curve,
        took=tuple(_seconds(row.fixed_at, row.ended_at) for row in summed if row.fixed_at and row.ended_at),
    )


def _seconds(begin: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def _beyond_first(things: Iterable[tuple[str, int]]) -> int:
    return sum(count - 1 for count in Counter(things).values())


def _curve(store: Store, task: Task, accuracy: Callable[[Any], float]) -> list[float]:
    """The accuracy before the first version, and of each version that the journal leads to."""
    fold = Fold(task, uploads_in(store, task.hash))
    found, version = [accuracy(fold.weights)], fold.version
    entries = store.totals(task.hash) if task.masking is not None else store.tail(task.hash)
    for index, data in entries:
        envelope = open_signed(data).envelope
        fold.hear(index, envelope.kind, envelope.body, envelope.sender)
        if fold.version != version:
            version = fold.version
            found.append(accuracy(fold.weights))
    return found
