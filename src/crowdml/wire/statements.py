"""Statements: a device's running totals, signed with each envelope.

The server's mirror hands the last one back to a device that lost its ledger. A total is written as losses merged by
kind, exact: 'pure 3/10' stands for any pure losses of that sum. Their squares are not kept, so what is read back is the
same total or a dearer one, never a cheaper.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgpack

from crowdml.privacy.losses import Renyi, Total, Unbounded, parse_loss
from crowdml.records import record
from crowdml.wire.packing import LARGEST_INTEGER, POSITIVE, Reader
from crowdml.wire.problems import Problem

LONGEST_LOSS = 4096
"""Bytes of a Renyi loss, which has a fraction for each order: 2,714 of a device that gave to every shipped masked task
a million times."""
LONGEST_FRACTION = 1024
"""Bytes of any other loss, which is one fraction: 35 of that device."""
_FRACTION = re.compile(r"(0|[1-9][0-9]{0,999})(?:/([1-9][0-9]{0,999}))?")
_ORDER = re.compile(r"[1-9][0-9]{0,8}")
MOST_LOSSES = 4
"""A total has at most one loss of each kind."""
USUAL_STATEMENT = 512
"""Bytes: what is longer is rare, and is read without being remembered."""
MOST_DIGITS = 80
"""Digits of a device's loss: 10^30 for each of 10^12 check-ins, as much as a task can cost, is far below."""
LARGEST_STATEMENT = 2 * (LONGEST_LOSS + (MOST_LOSSES - 1) * LONGEST_FRACTION + 3 * MOST_LOSSES) + 64
"""Bytes. A device that gave to every shipped masked task has 5,029."""


@record
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
    def of_packed(data: bytes) -> Statement | None:
        """What `read` would find in these bytes and nothing after them; None wherever that is not certain."""
        found = _STATEMENT.fullmatch(data) if len(data) <= USUAL_STATEMENT else None
        if found is None:
            return None
        losses, samples = found.groups()
        read = _losses_before(losses)
        number = samples[0] if len(samples) == 1 else int.from_bytes(samples[1:], "big")
        return None if read is None else Statement(read[1], number, read[0])

    @staticmethod
    def read(reader: Reader) -> Statement:
        reader.map(3)
        dearest = _read_losses(reader.key("dearest"), "statement.dearest")
        device = _read_losses(reader.key("device"), "statement.device")
        return Statement(device, reader.key("samples").integer("statement.samples", 0, LARGEST_INTEGER), dearest)


def open_statement(data: bytes) -> Statement:
    """The statement behind its own bytes, as the journal keeps them."""
    reader = Reader(data, "The statement", limit=LARGEST_STATEMENT)
    said = Statement.read(reader)
    reader.end()
    return said


def totals_fell(before: bytes, now: bytes) -> bool:
    """Whether a packed statement names less than an earlier one of the same device. Nothing is ever refunded, so then
    the device goes on from an older copy of its ledger."""
    if before == now:
        return False
    earlier, later = (_unpacked(data) for data in (before, now))
    return (
        later.samples < earlier.samples or _fell(earlier.device, later.device) or _fell(earlier.dearest, later.dearest)
    )


def _unpacked(data: bytes) -> Statement:
    """The statement in bytes that were read before: they are what they should be, so nothing is checked again."""
    found: dict[str, Any] = msgpack.unpackb(data)
    return Statement(tuple(found["device"]), found["samples"], tuple(found["dearest"]))


def _fell(before: tuple[str, ...], now: tuple[str, ...]) -> bool:
    """Whether any kind of loss is smaller now. One of zero may be left out: it says the same."""
    if before == now:
        return False
    later = {text.partition(" ")[0]: text for text in now}
    for text in before:
        kind = text.partition(" ")[0]
        found = later.get(kind)
        if kind == "unbounded":
            if found is None:
                return True
            continue
        earlier = _values(text)
        if found is None:
            if any(above for _, above, _ in earlier):
                return True
            continue
        place = 0
        for order, above, below in _values(found):
            while place < len(earlier) and earlier[place][0] < order:
                place += 1  # at an order that is not listed a total has the value of the next one that is
            if place < len(earlier) and above * earlier[place][2] < earlier[place][1] * below:
                return True
    return False


def _values(text: str) -> list[tuple[int, int, int]]:
    """Order, numerator and denominator of each fraction in a loss that was read; a loss without orders has order 0."""
    found: list[tuple[int, int, int]] = []
    for pair in text.partition(" ")[2].split(","):
        order, _, value = pair.rpartition(":")
        above, _, below = value.partition("/")
        found.append((int(order or 0), int(above), int(below or 1)))
    return found


def losses_of(total: Total) -> tuple[str, ...]:
    """A total as sorted texts, one for each kind of loss that it has."""
    texts: list[str] = []
    if total.pure:
        texts.append(f"pure {total.pure}")
    if total.orders:  # even of zero: nothing is known beyond its last order
        texts.append(str(Renyi(total.orders, total.values)))
    if total.unbounded:
        texts.append(str(Unbounded()))
    if total.zcdp:
        texts.append(f"zcdp {total.zcdp}")
    return tuple(texts)


def total_of(texts: tuple[str, ...]) -> Total:
    """The total that the texts stand for."""
    return Total.of(parse_loss(text) for text in texts)


def _read_losses(reader: Reader, name: str) -> tuple[str, ...]:
    texts = tuple(reader.text(name, LONGEST_LOSS) for _ in range(reader.array(name, MOST_LOSSES)))
    if not all(is_exact(text) for text in texts):
        reader.fail(f"{name} must have losses in lowest terms, such as 'pure 1/10' or 'zcdp 3/1000'")
    if not _is_sorted(texts):
        reader.fail(f"{name} must be sorted and have at most one loss of each kind")
    if any(len(text) > LONGEST_FRACTION and not text.startswith("renyi") for text in texts):
        reader.fail(f"{name} has a fraction of more than {LONGEST_FRACTION:,} bytes")
    return texts


_STATEMENT = re.compile(rb"(.*\xa7samples)(\x00|" + POSITIVE + rb")", re.DOTALL)


@lru_cache(maxsize=4096)
def _losses_before(data: bytes) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """`dearest` and `device` of a statement's bytes up to `samples`. Devices that have given as much say the same."""
    reader = Reader(data, "The statement", limit=LARGEST_STATEMENT)
    try:
        reader.map(3)
        dearest = _read_losses(reader.key("dearest"), "statement.dearest")
        device = _read_losses(reader.key("device"), "statement.device")
        reader.key("samples")
        reader.end()
    except Problem:
        return None
    return dearest, device


def _is_sorted(texts: Sequence[str]) -> bool:
    """Each kind of loss at most once, in order."""
    return all(first < second for first, second in pairwise(text.partition(" ")[0] for text in texts))


def is_exact(text: str) -> bool:
    """Whether `parse_loss` reads the text and `str` writes it again. Cheap: it runs before anybody is authenticated."""
    kind, _, rest = text.partition(" ")
    if kind in ("pure", "zcdp"):
        return _fraction(rest) is not None
    if kind != "renyi":
        return text == "unbounded"
    last_order, last = 1, (0, 1)
    for pair in rest.split(","):
        order, _, value = pair.partition(":")
        found = _fraction(value)
        if not _ORDER.fullmatch(order) or int(order) <= last_order or found is None:
            return False
        if last[0] * found[1] > found[0] * last[1]:
            return False
        last_order, last = int(order), found
    return True


@lru_cache(maxsize=4096)
def is_plausible(texts: tuple[str, ...]) -> bool:
    """Whether losses that were read are of a size that a device can come to: a float holds each of them."""
    for text in texts:
        for pair in text.partition(" ")[2].split(","):
            above, _, below = pair.rpartition(":")[2].partition("/")
            if len(above) - len(below) > MOST_DIGITS:
                return False
    return True


def _fraction(text: str) -> tuple[int, int] | None:
    """Numerator and denominator, if the text is a fraction in lowest terms."""
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    above, below = int(match[1]), int(match[2] or 1)
    return (above, below) if match[2] is None or (below > 1 and math.gcd(above, below) == 1) else None
