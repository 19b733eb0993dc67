"""Envelopes: signed as the exact bytes, and read without trust.

On the wire: 64 bytes of Ed25519 signature over b"crowdml/envelope/1" and the envelope; then the envelope, a msgpack map
with sorted keys: body, kind, sender, seq, statement, task, to. An envelope has one encoding: any other is refused.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

import msgpack

from crowdml.messages import SERVER, Envelope
from crowdml.wire.keys import ID, SIGNATURE_SIZE, Key, device_id, verify
from crowdml.wire.packing import LARGEST_INTEGER, Reader, pack
from crowdml.wire.problems import Problem
from crowdml.wire.statements import LARGEST_STATEMENT, Statement

__all__ = ["HASH_SIZE", "KIND", "LARGEST_ENVELOPE", "Signed", "open_signed", "pack_envelope", "sign"]

PREFIX = b"crowdml/envelope/1"
HASH_SIZE = 32
LARGEST_BODY = 16 * 2**20
LONGEST_KIND = 64
LONGEST_ADDRESS = 32
MOST_RECIPIENTS = 1024
LARGEST_ENVELOPE = LARGEST_BODY + LARGEST_STATEMENT + MOST_RECIPIENTS * (LONGEST_ADDRESS + 2) + 512
"""Bytes, with the signature. A server may take less: `open_signed(data, limit=...)`."""
KIND = re.compile(r"[a-z][a-z0-9_]*(?:/[a-z0-9_]+)*/[1-9][0-9]*")
"""'sgd/gradient/1': protocol, message, version."""


@dataclass(frozen=True)
class Signed:
    """An envelope as it arrived. `data` is everything, signature first; nobody has verified it yet but by `verify`."""

    envelope: Envelope
    statement: Statement
    data: bytes

    def verify(self, public: bytes) -> bool:
        """Whether the sender's key is `public`, and signed these bytes."""
        if len(public) != 32 or device_id(public) != self.envelope.sender:
            return False
        return verify(public, self.data[:SIGNATURE_SIZE], PREFIX + self.data[SIGNATURE_SIZE:])

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of all bytes: in the receipt and in the journal's chain."""
        return hashlib.sha256(self.data).digest()


def pack_envelope(envelope: Envelope, statement: Statement) -> bytes:
    """The bytes that are signed, less their prefix."""
    return pack(
        {
            "body": envelope.body,
            "kind": envelope.kind,
            "sender": envelope.sender,
            "seq": envelope.seq,
            "statement": statement.plain(),
            "task": envelope.task,
            "to": sorted(envelope.to),
        }
    )


def sign(envelope: Envelope, statement: Statement, key: Key) -> bytes:
    """The bytes to send. They are the message: resend them as they are until they are acknowledged."""
    if envelope.sender != key.id:
        raise ValueError(f"The envelope says sender {envelope.sender!r}, and the key is that of {key.id}.")
    packed = pack_envelope(envelope, statement)
    data = key.sign(PREFIX + packed) + packed
    open_signed(data)  # what nobody would read must not be charged and sent
    return data


def open_signed(data: bytes, *, limit: int = LARGEST_ENVELOPE) -> Signed:
    """What the bytes say, if their structure is right; whether the signature is, `Signed.verify` says."""
    if len(data) > limit:
        raise Problem("too-large", f"The envelope has {len(data):,} bytes; at most {limit:,} are read.", limit=limit)
    if len(data) <= SIGNATURE_SIZE:
        raise Problem(
            "malformed",
            f"A signed envelope has more than {SIGNATURE_SIZE} bytes, signature first; this has {len(data)}.",
        )
    packed = data[SIGNATURE_SIZE:]
    return Signed(*(_open_quickly(packed) or _open_strictly(packed)), data)


def _open_strictly(packed: bytes) -> tuple[Envelope, Statement]:
    reader = Reader(packed, "The envelope", limit=LARGEST_ENVELOPE)
    reader.map(7)
    reader.key("body")
    body = reader.binary("body", LARGEST_BODY)
    reader.key("kind")
    kind = reader.text("kind", LONGEST_KIND)
    if not KIND.fullmatch(kind):
        reader.fail("kind must read as protocol/message/version, such as 'sgd/gradient/1'")
    reader.key("sender")
    sender = reader.text("sender", LONGEST_ADDRESS)
    if not ID.fullmatch(sender):
        reader.fail("sender must be a device id: 32 hex digits in lower case")
    reader.key("seq")
    seq = reader.integer("seq", 1, LARGEST_INTEGER)
    reader.key("statement")
    statement = Statement.read(reader)
    reader.key("task")
    task = reader.binary("task", HASH_SIZE, exactly=HASH_SIZE)
    reader.key("to")
    to = _read_recipients(reader)
    reader.end()
    return Envelope(task, sender, to, seq, kind, body), statement


def _open_quickly(packed: bytes) -> tuple[Envelope, Statement] | None:
    """What the strict reader would find, by msgpack's own parser; None wherever that is not certain.

    Every type, size and form is looked at, and packing it again must give the same bytes: so nothing passes here that
    the strict reader refuses. It reads what this does not, and says what is wrong with it.
    """
    try:
        plain = msgpack.unpackb(packed)
        if type(plain) is not dict or msgpack.packb(plain) != packed:
            return None
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    if tuple(plain) != _NAMES:
        return None
    body, kind, sender, seq, statement, task, to = plain.values()
    if (
        type(body) is not bytes
        or len(body) > LARGEST_BODY
        or type(kind) is not str
        or len(kind) > LONGEST_KIND
        or not KIND.fullmatch(kind)
        or type(sender) is not str
        or not ID.fullmatch(sender)
        or type(seq) is not int
        or not 1 <= seq <= LARGEST_INTEGER
        or type(task) is not bytes
        or len(task) != HASH_SIZE
        or to != _TO_SERVER
    ):
        return None
    said = Statement.of_plain(statement)
    return None if said is None else (Envelope(task, sender, _SERVER, seq, kind, body), said)


_NAMES = ("body", "kind", "sender", "seq", "statement", "task", "to")
_TO_SERVER = [SERVER]
_SERVER = frozenset((SERVER,))


def _read_recipients(reader: Reader) -> frozenset[str]:
    count = reader.array("to", MOST_RECIPIENTS)
    to: list[str] = []
    for _ in range(count):
        address = reader.text("an address in `to`", LONGEST_ADDRESS)
        if address != SERVER and not ID.fullmatch(address):
            reader.fail("an address in `to` must be 'server' or a device id")
        if to and address <= to[-1]:
            reader.fail("the addresses in `to` must be sorted, each once")
        to.append(address)
    if not to:
        reader.fail("`to` names nobody")
    return frozenset(to)
