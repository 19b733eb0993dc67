"""The ring Z_2^32 or Z_2^64: signed integers as its elements, their sum, and when a sum can be read back.

Only in a finite ring is a mask uniform and does it cancel exactly (review, G12). An element is an unsigned integer, a
vector little-endian bytes; -1 is 2^bits - 1.
"""

from __future__ import annotations

import numpy as np

from crowdml.arrays import Array, Integers
from crowdml.errors import TaskError
from crowdml.secagg.refusals import Refused

BITS = (32, 64)


def element(bits: int) -> np.dtype:
    """The type of an element: little-endian on every machine, as it travels."""
    if bits not in BITS:
        raise TaskError(f"A ring has 32 or 64 bits, not {bits}.")
    return np.dtype(f"<u{bits // 8}")


def encode(values: Integers, bits: int) -> Array:
    """Signed integers as elements. A value outside -2^(bits-1) .. 2^(bits-1) - 1 wraps round, as the ring does.

    Nothing raises on a value: a refusal would tell something about it. `check_sum` rules wrapping out beforehand.
    """
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        raise TaskError(f"The ring takes integers; this is {values.dtype}. Bring it to the grid first.")
    return values.astype(np.int64).astype(element(bits))


def decode(elements: Array, bits: int) -> Integers:
    """Elements as the signed integers nearest to zero: int64 in -2^(bits-1) .. 2^(bits-1) - 1."""
    return np.asarray(elements, element(bits)).astype(f"u{bits // 8}").view(f"i{bits // 8}").astype(np.int64)


def to_bytes(elements: Array) -> bytes:
    """As it travels: little-endian, without a header."""
    return elements.tobytes()


def from_bytes(data: bytes, bits: int, length: int) -> Array:
    """`length` elements; a view of `data` that cannot be written to."""
    wanted = length * bits // 8
    if len(data) != wanted:
        raise Refused(f"A vector of {length:,} elements of {bits} bits has {wanted:,} bytes; this has {len(data):,}.")
    return np.frombuffer(data, element(bits))


def check_sum(bits: int, *, contributions: int, bound: int, slack: int) -> None:
    """Refuse a ring in which the sum of so many contributions of at most `bound`, and `slack` of noise, could wrap."""
    element(bits)
    largest = contributions * bound + slack
    if min(contributions, bound, slack) < 0 or largest >= 2 ** (bits - 1):
        raise TaskError(
            f"{contributions:,} contributions of at most {bound:,} grid steps with {slack:,} of noise sum up to "
            f"{largest:,}, and a ring of {bits} bits reads back less than {2 ** (bits - 1):,}. "
            "Take 64 bits, a coarser grid, or a smaller cohort."
        )
