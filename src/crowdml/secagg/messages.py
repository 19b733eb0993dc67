"""What travels in a round of masking, and what is kept of it: frozen dataclasses, each with one encoding.

A set of devices is a bitmap over the cohort, which is sorted by id; lists over neighbours are in the same order.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

from crowdml.arrays import Array
from crowdml.secagg.refusals import Refused
from crowdml.wire.keys import PUBLIC_SIZE, SIGNATURE_SIZE, Key, verify
from crowdml.wire.packing import LARGEST_INTEGER, Reader, pack
from crowdml.wire.problems import Problem

LARGEST = 2**30
"""Bytes that are read of one message or state; what carries it has limits of its own."""

T = TypeVar("T")


def binary(exactly: int | None = None) -> Any:
    """A field of bytes."""
    return dataclasses.field(metadata={"form": "binary", "exactly": exactly})


def number() -> Any:
    """A field that is a whole number from 0."""
    return dataclasses.field(metadata={"form": "number"})


def text() -> Any:
    """A field of text."""
    return dataclasses.field(metadata={"form": "text"})


def table(*, named: bool = False) -> Any:
    """A field that maps devices, by their index in the cohort or by name, to bytes."""
    return dataclasses.field(metadata={"form": "table", "named": named})


def encode(record: Any) -> bytes:
    """msgpack, a map with sorted keys: the same record always gives the same bytes."""
    return pack({field.name: _plain(getattr(record, field.name)) for field in dataclasses.fields(record)})


def decode(cls: type[T], data: bytes) -> T:
    """What `encode` made. Anything else is refused, and so is another encoding of the same."""
    reader = Reader(data, f"The {getattr(cls, 'kind', cls.__name__)}", limit=LARGEST)
    try:
        fields = sorted(dataclasses.fields(cls), key=lambda field: field.name)  # pyright: ignore[reportArgumentType]
        reader.map(len(fields))
        values: dict[str, Any] = {}
        for field in fields:
            reader.key(field.name)
            values[field.name] = _read(reader, field.name, field.metadata)
        reader.end()
    except Problem as problem:
        raise Refused(problem.detail) from problem
    return cls(**values)


def _plain(value: Any) -> Any:
    return [[index, value[index]] for index in sorted(value)] if isinstance(value, Mapping) else value


def _read(reader: Reader, name: str, form: Mapping[str, Any]) -> Any:
    if form["form"] == "binary":
        return reader.binary(name, LARGEST, exactly=form["exactly"])
    if form["form"] == "number":
        return reader.integer(name, 0, LARGEST_INTEGER)
    if form["form"] == "text":
        return reader.text(name, 4096)
    found: dict[Any, bytes] = {}
    for _ in range(reader.array(name, 2**20)):
        reader.array(name, 2)
        index = reader.text(name, 32) if form["named"] else reader.integer(name, 0, LARGEST_INTEGER)
        if found and index <= next(reversed(found)):
            reader.fail(f"{name} must be sorted")
        found[index] = reader.binary(name, LARGEST)
    return found


def bitmap(chosen: Array) -> bytes:
    """Booleans [devices] as bits, the first device in the highest bit of the first byte."""
    return np.packbits(np.asarray(chosen, bool)).tobytes()


def members(data: bytes, devices: int) -> Array:
    """Booleans [devices]. A bitmap of another length, or with bits beyond the last device, is refused."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8)).astype(bool)
    if len(data) != (devices + 7) // 8 or bits[devices:].any():
        raise Refused(f"This is not a bitmap of {devices} devices.")
    return bits[:devices]


@dataclass(frozen=True)
class Advert:
    """Device to server, to its neighbours: this round's keys, under the device's own signature.

    `pair` agrees on masks and is rebuilt if the device goes missing; `seal` agrees on the encryption of shares and
    never is. `commitment` is the hash of the seed of its self-mask. Who rebuilds a secret checks it against these.
    """

    kind: ClassVar[str] = "secagg/advert/1"
    round: int = number()
    public: bytes = binary(PUBLIC_SIZE)
    pair: bytes = binary(32)
    seal: bytes = binary(32)
    commitment: bytes = binary(32)
    signature: bytes = binary(SIGNATURE_SIZE)

    @staticmethod
    def make(task: bytes, round: int, key: Key, pair: bytes, seal: bytes, commitment: bytes) -> Advert:  # noqa: A002
        signature = key.sign(_advert_bytes(task, round, pair, seal, commitment))
        return Advert(round, key.public, pair, seal, commitment, signature)

    def verify(self, task: bytes) -> bool:
        """Whether the device with the key `public` signed this for this task and round."""
        signed = _advert_bytes(task, self.round, self.pair, self.seal, self.commitment)
        return verify(self.public, self.signature, signed)

    @property
    def hash(self) -> bytes:
        return hashlib.sha256(encode(self)).digest()

    @property
    def body(self) -> bytes:
        """What a cohort says of it beside its entry in the roster."""
        return self.pair + self.seal + self.commitment + self.signature

    @staticmethod
    def from_body(round: int, public: bytes, body: bytes) -> Advert:  # noqa: A002
        return Advert(round, public, body[:32], body[32:64], body[64:96], body[96:])


ADVERT_BODY = 32 + 32 + 32 + SIGNATURE_SIZE


def _advert_bytes(task: bytes, round: int, pair: bytes, seal: bytes, commitment: bytes) -> bytes:  # noqa: A002
    return b"crowdml/secagg/advert/1" + pack([task, round, pair, seal, commitment])


def seed_commitment(seed: bytes) -> bytes:
    """The hash that binds a device to the seed of its self-mask, and says nothing of a seed that is uniform."""
    return hashlib.sha256(b"crowdml/secagg/seed/1" + seed).digest()


@dataclass(frozen=True)
class Cohort:
    """Server to device: who takes part, fixed from here on. `roster` has for each device its public key and the hash of
    its advert; `adverts` are the bodies of the receiver's neighbours."""

    kind: ClassVar[str] = "secagg/cohort/1"
    round: int = number()
    roster: bytes = binary()
    adverts: bytes = binary()


@dataclass(frozen=True)
class Shares:
    """Device to server: for each neighbour its shares of the two secrets, sealed."""

    kind: ClassVar[str] = "secagg/shares/1"
    round: int = number()
    sealed: bytes = binary()


@dataclass(frozen=True)
class Held:
    """Server to device: who delivered shares, and what those neighbours sealed for the receiver."""

    kind: ClassVar[str] = "secagg/held/1"
    round: int = number()
    sharers: bytes = binary()
    sealed: bytes = binary()


@dataclass(frozen=True)
class Masked:
    """Device to server: its vectors under masks, and the hash of what it was shown before."""

    kind: ClassVar[str] = "secagg/masked/1"
    round: int = number()
    view: bytes = binary(32)
    body: bytes = binary()


@dataclass(frozen=True)
class Survivors:
    """Server to device: whose masked vectors are in the sum."""

    kind: ClassVar[str] = "secagg/survivors/1"
    round: int = number()
    survivors: bytes = binary()


@dataclass(frozen=True)
class Agreement:
    """Device to server, to all survivors: its signature under the list that it was shown."""

    kind: ClassVar[str] = "secagg/agreement/1"
    round: int = number()
    signature: bytes = binary(SIGNATURE_SIZE)


@dataclass(frozen=True)
class Agreements:
    """Server to device: who signed, and the signatures."""

    kind: ClassVar[str] = "secagg/agreements/1"
    round: int = number()
    signers: bytes = binary()
    signatures: bytes = binary()


@dataclass(frozen=True)
class Reveal:
    """Device to server: for each neighbour that delivered shares one share, of its seed if it survived and of its pair
    key if not. `held` is a bitmap over them; a share that could not be opened is left out."""

    kind: ClassVar[str] = "secagg/reveal/1"
    round: int = number()
    held: bytes = binary()
    shares: bytes = binary()


Message = Advert | Cohort | Shares | Held | Masked | Survivors | Agreement | Agreements | Reveal

KINDS: dict[str, type[Message]] = {
    cls.kind: cls for cls in (Advert, Cohort, Shares, Held, Masked, Survivors, Agreement, Agreements, Reveal)
}


def open_message(kind: str, data: bytes) -> Message:
    """The message of this kind in these bytes."""
    if kind not in KINDS:
        raise Refused(f"No message of masking is called {kind!r}.")
    return decode(KINDS[kind], data)


def survivors_bytes(task: bytes, round: int, view: bytes, survivors: bytes) -> bytes:  # noqa: A002
    """What a device signs when it agrees to a list of survivors."""
    return b"crowdml/secagg/survivors/1" + pack([task, round, view, survivors])
