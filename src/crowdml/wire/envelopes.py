"""Envelopes: signed as the exact bytes, and read without trust.

On the wire: 64 bytes of Ed25519 signature over b"crowdml/envelope/1" and the envelope; then the envelope, a msgpack map
with sorted keys: body, kind, sender, seq, statement, task, to. An envelope has one encoding: any other is refused.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import field
from functools import cached_property

from crowdml.messages import KIND, LONGEST_KIND, SERVER, Envelope
from crowdml.records import record
from crowdml.wire.keys import ID, SIGNATURE_SIZE, Key, device_id, verify
from crowdml.wire.packing import LARGEST_INTEGER, POSITIVE, Reader, pack
from crowdml.wire.problems import Problem
from crowdml.wire.statements import LARGEST_STATEMENT, Statement

PREFIX = b"crowdml/envelope/1"
HASH_SIZE = 32
LARGEST_BODY = 16 * 2**20
LONGEST_ADDRESS = 32
MOST_RECIPIENTS = 1024
LARGEST_AROUND = LARGEST_STATEMENT + 512
"""Bytes of an envelope to one recipient, with the signature and without the body."""
LARGEST_ENVELOPE = LARGEST_BODY + LARGEST_AROUND + MOST_RECIPIENTS * (LONGEST_ADDRESS + 2)
"""Bytes, with the signature. A server may take less: `open_signed(data, limit=...)`."""
PLACE = re.compile(r"@(?:0|[1-9][0-9]{0,5})")
"""Whoever stands at this place of the task's list."""


@record
class Signed:
    """An envelope as it arrived. `data` is everything, signature first; nobody has verified it yet but by `verify`."""

    envelope: Envelope
    statement: Statement
    data: bytes
    said: bytes = field(default=b"", compare=False, repr=False)
    """The statement's own bytes."""

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
    return _open_quickly(data) or _open_strictly(data)


def _open_strictly(data: bytes) -> Signed:
    reader = Reader(data[SIGNATURE_SIZE:], "The envelope", limit=LARGEST_ENVELOPE)
    reader.map(7)
    body = reader.key("body").binary("body", LARGEST_BODY)
    kind = reader.key("kind").text("kind", LONGEST_KIND)
    if not KIND.fullmatch(kind):
        reader.fail("kind must read as protocol/message/version, such as 'sgd/gradient/1'")
    sender = reader.key("sender").text("sender", LONGEST_ADDRESS)
    if not ID.fullmatch(sender):
        reader.fail("sender must be a device id: 32 hex digits in lower case")
    seq = reader.key("seq").integer("seq", 1, LARGEST_INTEGER)
    reader.key("statement")
    begins = reader.at
    statement = Statement.read(reader)
    said = data[SIGNATURE_SIZE + begins : SIGNATURE_SIZE + reader.at]
    task = reader.key("task").binary("task", HASH_SIZE, exactly=HASH_SIZE)
    to = _read_recipients(reader.key("to"))
    reader.end()
    return Signed(Envelope(task, sender, to, seq, kind, body), statement, data, said)


def _open_quickly(data: bytes) -> Signed | None:
    """What the strict reader would find in an envelope to the server, in one look; None wherever that is not certain.

    The pattern allows nothing that the strict reader refuses: each length, each form of a number and each key is in it.
    That one reads what this does not, and says what is wrong with it.
    """
    if not data.startswith(_BODY, SIGNATURE_SIZE):
        return None
    at = SIGNATURE_SIZE + len(_BODY)
    width = _WIDTHS.get(data[at : at + 1], 0)
    size, begins = int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width
    if not width or not _LEAST[width] <= size <= LARGEST_BODY:
        return None
    rest = _REST.match(data, begins + size)
    if rest is None:
        return None
    length, kind, sender, seq, said, task = rest.groups()
    statement = Statement.of_packed(said)
    if statement is None or length[0] - 0xA0 != len(kind):
        return None
    number = seq[0] if len(seq) == 1 else int.from_bytes(seq[1:], "big")
    body = data[begins : begins + size]
    return Signed(Envelope(task, sender.decode(), _SERVER, number, kind.decode(), body), statement, data, said)


_SERVER = frozenset((SERVER,))
_BODY = b"\x87" + pack("body")
_WIDTHS = {b"\xc4": 1, b"\xc5": 2, b"\xc6": 4}
_LEAST = {1: 0, 2: 256, 4: 65536}
_REST = re.compile(
    rb"\xa4kind([\xa1-\xbf])(" + KIND.pattern.encode() + rb")\xa6sender\xd9\x20([0-9a-f]{32})\xa3seq(" + POSITIVE
    + rb")\xa9statement(.*)\xa4task\xc4\x20(.{32})\xa2to\x91\xa6server\Z",
    re.DOTALL,
)  # fmt: skip


def _read_recipients(reader: Reader) -> frozenset[str]:
    count = reader.array("to", MOST_RECIPIENTS)
    to: list[str] = []
    for _ in range(count):
        address = reader.text("an address in `to`", LONGEST_ADDRESS)
        if address != SERVER and not ID.fullmatch(address) and not PLACE.fullmatch(address):
            reader.fail("an address in `to` must be 'server', a device id, or a place such as '@17'")
        if to and address <= to[-1]:
            reader.fail("the addresses in `to` must be sorted, each once")
        to.append(address)
    if not to:
        reader.fail("`to` names nobody")
    return frozenset(to)
