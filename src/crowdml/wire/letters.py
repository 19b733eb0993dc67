"""What a device finds in its mailbox: envelopes that peers signed, as the server relays them, and places it may claim.

The answer to GET /v1/tasks/{hash}/mailbox, a msgpack map with sorted keys: last, letters. A letter is [index, key,
signed]: its entry in the journal, the sender's public key and the envelope's exact bytes. Who sent it is for the reader
to check (`Letter.open`): the server that relays it is not believed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from crowdml.records import record
from crowdml.task import MOST_PLACES
from crowdml.wire.envelopes import LARGEST_ENVELOPE, Signed, open_signed
from crowdml.wire.keys import ID, PUBLIC_SIZE, is_sound
from crowdml.wire.packing import LARGEST_INTEGER, Reader, pack
from crowdml.wire.problems import Problem

MOST_LETTERS = 256
"""Letters in one answer."""
MOST_LETTER_BYTES = 2**20
"""Bytes of the envelopes in one answer, unless the first alone has more."""
LARGEST_HELD = 64 + 40 * MOST_PLACES
LARGEST_MAILBOX = 64 + MOST_LETTERS * (PUBLIC_SIZE + 24) + max(MOST_LETTER_BYTES, LARGEST_ENVELOPE)


@record
class Letter:
    """An envelope as it was relayed. `index` is its entry in the journal, `key` what is said to be its sender's."""

    index: int
    key: bytes
    signed: bytes

    def open(self) -> Signed:
        """What it says, if the device whose id it names signed it with `key`; a Problem if not."""
        found = open_signed(self.signed)
        if not is_sound(self.key) or not found.verify(self.key):
            raise Problem("signature", "The letter is not signed by the key of its sender.")
        return found


@record
class Mailbox:
    """Letters in the order of the journal. Every entry up to `last` was looked at: ask again after it."""

    last: int
    letters: tuple[Letter, ...] = ()

    def encode(self) -> bytes:
        return pack({"last": self.last, "letters": [[one.index, one.key, one.signed] for one in self.letters]})


def few(letters: Iterable[Letter]) -> tuple[Letter, ...]:
    """As many of the first ones as fit into one answer."""
    found: list[Letter] = []
    size = 0
    for letter in letters:
        size += len(letter.signed)
        if found and (size > MOST_LETTER_BYTES or len(found) >= MOST_LETTERS):
            break
        found.append(letter)
    return tuple(found)


def open_mailbox(data: bytes) -> Mailbox:
    """What the bytes say, if their structure is right; who a letter is from, `Letter.open` finds out."""
    reader = Reader(data, "The mailbox", limit=LARGEST_MAILBOX)
    reader.map(2)
    last = reader.key("last").integer("last", 0, LARGEST_INTEGER)
    reader.key("letters")
    letters: list[Letter] = []
    for _ in range(reader.array("letters", MOST_LETTERS)):
        if reader.array("a letter", 3) != 3:
            reader.fail("a letter must be [index, key, signed]")
        after = letters[-1].index + 1 if letters else 1
        index = reader.integer("the index of a letter", after, max(after, last))
        key = reader.binary("the key of a letter", PUBLIC_SIZE, exactly=PUBLIC_SIZE)
        letters.append(Letter(index, key, reader.binary("the envelope of a letter", LARGEST_ENVELOPE)))
    reader.end()
    return Mailbox(last, tuple(letters))


def pack_held(held: Mapping[int, str]) -> bytes:
    """The answer to GET /v1/tasks/{hash}/places: who stands at the places that a device hears, a map with `held`."""
    return pack({"held": [[place, held[place]] for place in sorted(held)]})


def open_held(data: bytes) -> dict[int, str]:
    """By place, the id of the device that stands there."""
    reader = Reader(data, "The list of places", limit=LARGEST_HELD)
    reader.map(1)
    reader.key("held")
    found: dict[int, str] = {}
    for _ in range(reader.array("held", MOST_PLACES)):
        if reader.array("a place", 2) != 2:
            reader.fail("a place must be [number, device]")
        place = reader.integer("the number of a place", max(found, default=-1) + 1, MOST_PLACES - 1)
        found[place] = reader.text("the device at a place", 32)
        if not ID.fullmatch(found[place]):
            reader.fail("the device at a place must be a device id: 32 hex digits in lower case")
    reader.end()
    return found
