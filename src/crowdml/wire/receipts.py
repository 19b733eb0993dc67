"""Receipts: what a device holds in its hand after a check-in, and the hash chain that binds them to the journal.

chain_0 = SHA-256(b"crowdml/journal/1" + task)
chain_n = SHA-256(chain_(n-1) + task + device + seq as 8 bytes big endian + hash of the signed envelope)

Whoever has a receipt can later tell whether the journal still holds this check-in at this place: the chain's head
stands in every publication, and every change of what came before changes it.

The server signs once for all check-ins that it commits together: the root of a Merkle tree whose leaves are what the
receipts say (prefixes 0 for a leaf and 1 for a node, as in RFC 9162, so that none passes for the other). A receipt
carries its path to that root, so it is as good as one that was signed alone, and shows nothing of the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from crowdml.records import record
from crowdml.wire.envelopes import HASH_SIZE
from crowdml.wire.keys import ID, SIGNATURE_SIZE, Key, verify
from crowdml.wire.packing import LARGEST_INTEGER, Reader, pack

JOURNAL_PREFIX = b"crowdml/journal/1"
RECEIPTS_PREFIX = b"crowdml/receipts/1"
STEP = 1 + HASH_SIZE
"""Bytes of a step on a path: on which side the other hash stands, 0 left or 1 right, and that hash."""
MOST_STEPS = 20
LARGEST_RECEIPT = 512 + MOST_STEPS * STEP


def chain_start(task: bytes) -> bytes:
    """The chain before the first check-in of a task."""
    return hashlib.sha256(JOURNAL_PREFIX + task).digest()


def chain_next(chain: bytes, task: bytes, device: str, seq: int, hash: bytes) -> bytes:  # noqa: A002  the wire's word
    """The chain after one more check-in."""
    return hashlib.sha256(chain + task + device.encode() + seq.to_bytes(8, "big") + hash).digest()


class Link(Protocol):
    """What a receipt says of a check-in, beside its task."""

    @property
    def device(self) -> str: ...
    @property
    def seq(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def hash(self) -> bytes: ...
    @property
    def chain(self) -> bytes: ...


@record
class Receipt:
    """The server says: this check-in is the `index`-th of the task's journal (from 1), and `chain` its chain there."""

    task: bytes
    device: str
    seq: int
    index: int
    hash: bytes
    chain: bytes
    path: bytes = b""
    signature: bytes = b""

    def sign(self, key: Key) -> Receipt:
        """With the server's own key, alone: its path is empty."""
        return open_receipt(sign_receipts(self.task, [self], key)[0])

    def verify(self, public: bytes) -> bool:
        """Whether the server whose key is `public` signed the root that the path leads to."""
        if len(self.path) % STEP or len(self.path) > MOST_STEPS * STEP:
            return False
        root = _leaf(*_parts(self.task, self))
        for at in range(0, len(self.path), STEP):
            side, other = self.path[at], self.path[at + 1 : at + STEP]
            if side > 1:
                return False
            root = _node(root, other) if side else _node(other, root)
        return _signed_root(public, self.signature, root)

    def answers(self, task: bytes, device: str, seq: int, hash: bytes) -> bool:  # noqa: A002  the wire's word
        """Whether it is the receipt for this check-in and no other."""
        return (self.task, self.device, self.seq, self.hash) == (task, device, seq, hash)

    def encode(self) -> bytes:
        """As it travels: msgpack, with the path and the signature."""
        return _encode(*_parts(self.task, self), self.path, self.signature)


def sign_receipts(task: bytes, links: Sequence[Link], key: Key) -> list[bytes]:
    """The receipts of check-ins that were committed together, as they travel, under one signature."""
    parts = [_parts(task, link) for link in links]
    levels = [[_leaf(*each) for each in parts]]
    while len(levels[-1]) > 1:
        below = levels[-1]
        above = [_node(below[at], below[at + 1]) for at in range(0, len(below) - 1, 2)]
        levels.append(above if len(below) % 2 == 0 else [*above, below[-1]])  # one without a neighbour moves up
    signature = key.sign(RECEIPTS_PREFIX + levels[-1][0])
    paths = [b""]
    for level in reversed(levels[:-1]):
        last = len(level) - 1
        paths = [
            (b"\x00" + level[at - 1] if at % 2 else b"\x01" + level[at + 1] if at < last else b"") + paths[at // 2]
            for at in range(len(level))
        ]
    return [_encode(*part, path, signature) for part, path in zip(parts, paths, strict=True)]


def _parts(task: bytes, link: Link) -> tuple[bytes, bytes, bytes]:
    """The packed members, sorted, before and after the places of `path` and `signature`."""
    index, seq = link.index, link.seq
    return (
        b"\xa5chain\xc4\x20" + link.chain + b"\xa6device\xd9\x20" + link.device.encode() + b"\xa4hash\xc4\x20"
        + link.hash + b"\xa5index" + (bytes((index,)) if index < 0x80 else pack(index)),
        b"\xa3seq" + (bytes((seq,)) if seq < 0x80 else pack(seq)),
        b"\xa4task\xc4\x20" + task,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _signed_root(public: bytes, signature: bytes, root: bytes) -> bool:
    """Remembered: receipts that a fleet gets together have one root."""
    return verify(public, signature, RECEIPTS_PREFIX + root)


def _leaf(first: bytes, middle: bytes, last: bytes) -> bytes:
    return hashlib.sha256(b"\x00\x86" + first + middle + last).digest()


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


def _encode(first: bytes, middle: bytes, last: bytes, path: bytes, signature: bytes) -> bytes:
    return b"\x88" + first + b"\xa4path" + pack(path) + middle + b"\xa9signature" + pack(signature) + last


def open_receipt(data: bytes) -> Receipt:
    """What the bytes say, if their structure is right; whether the signature is, `Receipt.verify` says."""
    reader = Reader(data, "The receipt", limit=LARGEST_RECEIPT)
    reader.map(8)
    chain = reader.key("chain").binary("chain", HASH_SIZE, exactly=HASH_SIZE)
    device = reader.key("device").text("device", 32)
    if not ID.fullmatch(device):
        reader.fail("device must be a device id: 32 hex digits in lower case")
    hash_ = reader.key("hash").binary("hash", HASH_SIZE, exactly=HASH_SIZE)
    index = reader.key("index").integer("index", 1, LARGEST_INTEGER)
    path = reader.key("path").binary("path", MOST_STEPS * STEP)
    if len(path) % STEP or any(side > 1 for side in path[::STEP]):
        reader.fail(f"path must be steps of {STEP} bytes, each 0 or 1 and a hash")
    seq = reader.key("seq").integer("seq", 1, LARGEST_INTEGER)
    signature = reader.key("signature").binary("signature", SIGNATURE_SIZE, exactly=SIGNATURE_SIZE)
    task = reader.key("task").binary("task", HASH_SIZE, exactly=HASH_SIZE)
    reader.end()
    return Receipt(task, device, seq, index, hash_, chain, path, signature)
