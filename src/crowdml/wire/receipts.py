"""Receipts: what a device holds in its hand after a check-in, and the hash chain that binds them to the journal.

chain_0 = SHA-256(b"crowdml/journal/1" + task)
chain_n = SHA-256(chain_(n-1) + task + device + seq as 8 bytes big endian + hash of the signed envelope)

Whoever has a receipt can later tell whether the journal still holds this check-in at this place: the chain's head
stands in every publication, and every change of what came before changes it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from crowdml.wire.envelopes import HASH_SIZE
from crowdml.wire.keys import ID, SIGNATURE_SIZE, Key, verify
from crowdml.wire.packing import LARGEST_INTEGER, Reader, pack

__all__ = ["LARGEST_RECEIPT", "Receipt", "chain_next", "chain_start", "open_receipt"]

JOURNAL_PREFIX = b"crowdml/journal/1"
RECEIPT_PREFIX = b"crowdml/receipt/1"
LARGEST_RECEIPT = 512


def chain_start(task: bytes) -> bytes:
    """The chain before the first check-in of a task."""
    return hashlib.sha256(JOURNAL_PREFIX + task).digest()


def chain_next(chain: bytes, task: bytes, device: str, seq: int, hash: bytes) -> bytes:  # noqa: A002  the wire's word
    """The chain after one more check-in."""
    return hashlib.sha256(chain + task + device.encode() + seq.to_bytes(8, "big") + hash).digest()


@dataclass(frozen=True)
class Receipt:
    """The server says: this check-in is the `index`-th of the task's journal (from 1), and `chain` its chain there."""

    task: bytes
    device: str
    seq: int
    index: int
    hash: bytes
    chain: bytes
    signature: bytes = b""

    def sign(self, key: Key) -> Receipt:
        """With the server's own key."""
        signature = key.sign(RECEIPT_PREFIX + b"\x86" + b"".join(self._parts()))
        return Receipt(self.task, self.device, self.seq, self.index, self.hash, self.chain, signature)

    def verify(self, public: bytes) -> bool:
        """Whether the server whose key is `public` signed this."""
        return verify(public, self.signature, RECEIPT_PREFIX + b"\x86" + b"".join(self._parts()))

    def answers(self, task: bytes, device: str, seq: int, hash: bytes) -> bool:  # noqa: A002  the wire's word
        """Whether it is the receipt for this check-in and no other."""
        return (self.task, self.device, self.seq, self.hash) == (task, device, seq, hash)

    def encode(self) -> bytes:
        """As it travels: msgpack, with the signature."""
        first, last = self._parts()
        return b"\x87" + first + b"\xa9signature" + pack(self.signature) + last

    def _parts(self) -> tuple[bytes, bytes]:
        """The packed members, sorted, before and after the place of the signature: what is signed, less its length."""
        first = (
            b"\xa5chain" + pack(self.chain) + b"\xa6device" + pack(self.device) + b"\xa4hash" + pack(self.hash)
            + b"\xa5index" + pack(self.index) + b"\xa3seq" + pack(self.seq)
        )  # fmt: skip
        return first, b"\xa4task" + pack(self.task)


def open_receipt(data: bytes) -> Receipt:
    """What the bytes say, if their structure is right; whether the signature is, `Receipt.verify` says."""
    reader = Reader(data, "The receipt", limit=LARGEST_RECEIPT)
    reader.map(7)
    reader.key("chain")
    chain = reader.binary("chain", HASH_SIZE, exactly=HASH_SIZE)
    reader.key("device")
    device = reader.text("device", 32)
    if not ID.fullmatch(device):
        reader.fail("device must be a device id: 32 hex digits in lower case")
    reader.key("hash")
    hash_ = reader.binary("hash", HASH_SIZE, exactly=HASH_SIZE)
    reader.key("index")
    index = reader.integer("index", 1, LARGEST_INTEGER)
    reader.key("seq")
    seq = reader.integer("seq", 1, LARGEST_INTEGER)
    reader.key("signature")
    signature = reader.binary("signature", SIGNATURE_SIZE, exactly=SIGNATURE_SIZE)
    reader.key("task")
    task = reader.binary("task", HASH_SIZE, exactly=HASH_SIZE)
    reader.end()
    return Receipt(task, device, seq, index, hash_, chain, signature)
