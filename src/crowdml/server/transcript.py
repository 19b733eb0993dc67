"""Transcripts: what anyone may see of a task, enough to rebuild its published weights bit for bit.

The file (`crowdml.wire.transcripts`) has the task, the oldest snapshot kept, every body since in the journal's order,
and what the server published at the end. No identity, no time, no signature: senders are numbered as they appear. The
bodies of a masked task are the server's totals: what one device sent was never known to anybody.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np

from crowdml.errors import CrowdmlError, DataError
from crowdml.messages import SERVER, encode
from crowdml.server.fold import Fold, uploads_in
from crowdml.server.gathering import CLOSED, OWN, Bodies
from crowdml.storage.server import Snapshot, Store
from crowdml.task import from_canonical
from crowdml.wire.transcripts import FORMAT, BadTranscript, End, Entry, Start, read_published, read_transcript

IN_MEMORY = 2**26
"""Bytes of a round's uploads that a replay holds in memory."""


@dataclass(frozen=True)
class Replayed:
    """Where a transcript ends: the publication that its check-ins lead to."""

    name: str
    task: bytes
    first: int
    """Entries of the journal before the transcript begins: they are in its snapshot."""
    check_ins: int
    version: int
    kind: str
    body: bytes
    weights: Any
    reason: str | None

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.body).hexdigest()


def write_transcript(store: Store, task: bytes, file: BinaryIO) -> Replayed:
    """Export a task while it may be served; where it ended."""
    stored = store.task(task)
    if stored is None:
        raise DataError(f"There is no task {task.hex()[:12]} in {store.name}.")
    head = store.head(task)
    folding = _Folding(stored.canonical, uploads_in(store, task))
    snapshot, contributions = store.export_transcript(task, folding.begin, masked=folding.is_masked)
    start = (
        None
        if snapshot is None
        else {"index": snapshot.index, "state": snapshot.state, "published": snapshot.published}
    )
    _write(file, {"format": FORMAT, "task": stored.canonical, "snapshot": start})
    for each in contributions:
        if each.index > head.index:
            break
        _write(file, [each.index, each.sender, each.kind, each.body])
        folding.apply(each.index, each.sender, each.kind, each.body)
    done = folding.done()
    _write(file, {"check_ins": done.check_ins, "version": done.version, "kind": done.kind, "body": done.body})
    return done


def replay(path: Path) -> Replayed:
    """Fold a transcript again, and refuse one whose end is not where its check-ins lead."""
    try:
        with path.open("rb") as file:
            return _replay(file, path)
    except FileNotFoundError as error:
        raise DataError(f"There is no transcript {path}. `crowdml task export --transcript` writes one.") from error


def _replay(file: BinaryIO, path: Path) -> Replayed:
    def broken(why: str) -> DataError:
        return DataError(f"{path} is no whole transcript: {why}. Export it again with `crowdml task export`.")

    try:
        task, start, parts = read_transcript(file)
        done, end = _fold(task, start, parts)
        next(parts, None)  # which refuses whatever follows the end
    except CrowdmlError:
        raise
    except BadTranscript as error:
        raise broken(str(error)) from error
    except Exception as error:  # handlers trust a state that they wrote themselves, and this one came from elsewhere
        raise broken(f"its snapshot or a check-in is not as its task has it ({type(error).__name__})") from error
    if (end.check_ins, end.version, end.kind, end.body) != (done.check_ins, done.version, done.kind, done.body):
        other = hashlib.sha256(end.body).hexdigest()
        raise DataError(
            f"{path}: its check-ins lead to version {done.version} with SHA-256 {done.hash}, and it says version "
            f"{end.version} with {other}. It is not what happened."
        )
    return done


def _fold(task: bytes, start: Start | None, parts: Iterator[Entry | End]) -> tuple[Replayed, End]:
    # Numbers of nobody's making may overflow; the end is compared in any case.
    with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY) as spool, np.errstate(all="ignore"):
        uploads = _Uploads(spool)
        folding = _Folding(task, uploads)
        if start is not None:
            folding.begin(Snapshot(start.index, b"", start.state, start.published))
        for part in parts:
            if isinstance(part, End):
                return folding.done(), part
            if folding.fold.gathering is not None and part.kind not in OWN:
                uploads.add(part)
            folding.apply(part.index, part.sender, part.kind, part.body)
            if part.kind == CLOSED:
                uploads.clear()
    raise BadTranscript("its end is missing")


class _Uploads:
    """The bodies of the round that is open in a transcript: in memory while they are few, else in a file."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._where: dict[int, tuple[str, int, int]] = {}

    def add(self, part: Entry) -> None:
        self._where[part.index] = part.kind, self._file.seek(0, 2), len(part.body)
        self._file.write(part.body)

    def clear(self) -> None:
        self._where.clear()
        self._file.truncate(0)

    def __call__(self, places: Sequence[int]) -> Iterator[tuple[str, bytes]]:
        for place in places:
            if place not in self._where:
                raise BadTranscript(f"the upload at entry {place}, which a round has, is missing")
            kind, at, size = self._where[place]
            self._file.seek(at)
            yield kind, self._file.read(size)


class _Folding:
    """The fold over a transcript, from its snapshot."""

    def __init__(self, canonical: bytes, uploads: Bodies) -> None:
        self.fold = Fold(from_canonical(canonical), uploads)
        self.index = self.first = 0
        self.before: set[int] = set()
        self.offered: tuple[int, str, bytes] | None = None

    @property
    def is_masked(self) -> bool:
        return self.fold.task.masking is not None

    def begin(self, snapshot: Snapshot) -> Sequence[int]:
        """Start from a snapshot; the entries before it that its open round has."""
        found = read_published(snapshot.published)
        self.fold.resume(snapshot)
        self.offered = found.version, found.kind, found.body
        self.index = self.first = snapshot.index
        self.before = set(self.fold.pending.open)
        return tuple(self.fold.pending.open)

    def apply(self, index: int, sender: int, kind: str, body: bytes) -> None:
        if index in self.before:
            return
        if index <= self.index or (index > self.index + 1 and not self.is_masked):
            raise BadTranscript(f"entry {index} follows entry {self.index}")
        self.fold.hear(index, kind, body, SERVER if self.is_masked else str(sender))
        self.index = index

    def done(self) -> Replayed:
        task, message = self.fold.task, self.fold.message
        if message is not None:
            self.offered = int(message.version), message.kind, encode(message)
        assert self.offered is not None
        version, kind, body = self.offered
        weights = np.asarray(self.fold.weights)
        return Replayed(
            task.name, task.hash, self.first, self.index, version, kind, body, weights, self.fold.reason
        )  # fmt: skip


def _write(file: BinaryIO, part: Any) -> None:
    file.write(msgpack.packb(part) or b"")
