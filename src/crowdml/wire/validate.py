"""Validation: a message's fields against what the task says they are. Nothing in the bytes decides a type or a size.

`decode_message` reads the body with the expected dtype, shape and length in hand and refuses any other before an array
is made; then every number must lie within its range.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import numpy as np

from crowdml.messages import KINDS, received
from crowdml.privacy.private import Release
from crowdml.protocol import Field
from crowdml.wire.envelopes import LARGEST_BODY
from crowdml.wire.packing import Reader, binary_head, pack
from crowdml.wire.problems import Problem

Expected = Mapping[str, Mapping[str, Field]]
"""For each kind that may arrive, each field that must be there. A field of the message that is not listed is nil."""


def validate(message: Any, expected: Expected) -> None:
    """Refuse a message with a field of another dtype, shape or range than expected."""
    kind = str(message.kind)
    fields = _fields(kind, expected)
    for entry in dataclasses.fields(message):
        value = getattr(message, entry.name)
        _check(kind, entry.name, value.value if isinstance(value, Release) else value, fields.get(entry.name))


def largest_body(expected: Expected) -> int:
    """Bytes of the longest body that could be as expected: a whole number takes nine at most."""
    layouts = [_layout(kind, fields)[1] for kind, fields in expected.items() if kind in KINDS]
    return max((sum(len(piece.fixed) + (9 if piece.size is None else piece.size) for piece in each)
                for each in layouts), default=0)  # fmt: skip


def decode_message(kind: str, body: bytes, expected: Expected) -> Any:
    """The message behind the bytes, exactly as expected; what was released is a Release, stamped as received."""
    (found,) = decode_messages([(kind, body)], expected)
    if isinstance(found, Problem):
        raise found
    return found


def decode_messages(bodies: Sequence[tuple[str, bytes]], expected: Expected) -> list[Any]:
    """What `decode_message` makes of each kind and body, or the Problem that it would raise: whole arrays at once."""
    answers: list[Any] = [None] * len(bodies)
    by_kind: dict[str, list[int]] = {}
    for place, (kind, _) in enumerate(bodies):
        by_kind.setdefault(kind, []).append(place)
    for kind, places in by_kind.items():
        try:
            found = _decode_many(kind, [bodies[place][1] for place in places], expected)
        except Problem as problem:  # nobody hears this kind
            found = [problem] * len(places)
        for place, answer in zip(places, found, strict=True):
            answers[place] = answer
    return answers


def _decode_many(kind: str, bodies: list[bytes], expected: Expected) -> list[Any]:
    fields = _fields(kind, expected)
    names, pieces = _layout(kind, fields)
    read = [_read(body, pieces) for body in bodies]
    rows = [place for place, found in enumerate(read) if found is not None]
    fits = [True] * len(bodies)
    columns: dict[str, Any] = {}
    for piece in pieces:
        if not piece.name:
            continue
        low, high = fields[piece.name].low, fields[piece.name].high
        found = [values[piece.name] for values in read if values is not None]
        if piece.dtype is None:
            columns[piece.name] = found
            within = [low <= value <= high for value in found]
        else:
            whole = np.frombuffer(b"".join(found), piece.dtype).reshape(len(found), math.prod(piece.shape))
            columns[piece.name] = whole.reshape(len(found), *piece.shape)
            if not whole.size:
                continue
            with np.errstate(invalid="ignore"):  # NaN lies in no range
                within = ((whole.min(1) >= low) & (whole.max(1) <= high)).tolist()
        for place, holds in zip(rows, within, strict=True):
            fits[place] = fits[place] and holds
    answers: list[Any] = []
    at = -1
    for place, body in enumerate(bodies):
        if read[place] is None:
            answers.append(_problem_of(lambda body=body: _explain(kind, body, fields)))
            continue
        at += 1
        message = received(kind, {name: columns[name][at] if name in columns else None for name in names})
        answers.append(
            message if fits[place] else _problem_of(lambda message=message: validate(message, expected)) or message
        )
    return answers


def _problem_of(check: Callable[[], None]) -> Problem | None:
    try:
        check()
    except Problem as problem:
        return problem
    return None


@dataclass(frozen=True, eq=False)
class _Piece:
    """Bytes that the task fixes, and the field that follows them: an array of so many bytes, or (None) a whole number.

    The last one has no field.
    """

    fixed: bytes
    size: int | None
    name: str = ""
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()


_LAYOUTS: dict[tuple[str, int], tuple[Mapping[str, Field], tuple[str, ...], tuple[_Piece, ...]]] = {}
"""By kind and by the identity of the fields, which are kept so that it stays theirs."""


def _layout(kind: str, fields: Mapping[str, Field]) -> tuple[tuple[str, ...], tuple[_Piece, ...]]:
    """The body, but for its numbers: types, shapes and lengths are the task's, and so is their one encoding."""
    found = _LAYOUTS.get((kind, id(fields)))
    if found is not None and found[0] is fields:
        return found[1:]
    pieces: list[_Piece] = []
    releases = _releases(kind)
    fixed = bytes([0x80 | len(releases)])
    for name, released in releases.items():
        field = fields.get(name)
        fixed += pack(name)
        if field is None:
            fixed += pack(None)
        elif field.shape or released:
            dtype = _dtype(field.dtype)
            size = dtype.itemsize * math.prod(field.shape)
            head = (
                b"\x93" + pack(dtype.str) + pack(list(field.shape)) + binary_head(size)
            )  # three, of which the last is long
            pieces.append(_Piece(fixed + head, size, name, dtype, tuple(field.shape)))
            fixed = b""
        elif np.dtype(field.dtype).kind in "iu":
            pieces.append(_Piece(fixed, None, name))
            fixed = b""
        else:
            raise TypeError(f"{kind} field {name!r}: a single public number on the wire is whole, not {field.dtype}.")
    if len(_LAYOUTS) >= 256:
        _LAYOUTS.clear()
    layout = tuple(releases), (*pieces, _Piece(fixed, 0))
    _LAYOUTS[kind, id(fields)] = fields, *layout
    return layout


def _read(body: bytes, pieces: tuple[_Piece, ...]) -> dict[str, Any] | None:
    """The fields of a body that is laid out like this, with nothing after it: bytes of arrays, and whole numbers.

    None of any other. Whole numbers must be in their shortest form.
    """
    values: dict[str, Any] = {}
    at, end = 0, len(body)
    for piece in pieces:
        if not body.startswith(piece.fixed, at):
            return None
        at += len(piece.fixed)
        if not piece.name:
            continue
        if piece.size is None:
            if at < end and body[at] < 0x80:
                values[piece.name] = body[at]
                at += 1
                continue
            reader = Reader(body[at : at + 9], "A whole number", limit=9)
            try:
                values[piece.name] = reader.integer("it", -(2**63), 2**64 - 1)
            except Problem:
                return None
            at += reader.at
            continue
        if at + piece.size > end:
            return None
        values[piece.name] = body[at : at + piece.size]
        at += piece.size
    return values if at == end else None


def _explain(kind: str, body: bytes, fields: Mapping[str, Field]) -> NoReturn:
    """Read the body slowly, to say what is wrong with it."""
    releases = _releases(kind)
    reader = Reader(body, f"The body of {kind}", limit=LARGEST_BODY)
    reader.map(len(releases))
    for name, released in releases.items():
        reader.key(name)
        field = fields.get(name)
        if field is None:
            if not reader.nil():
                raise _wrong(kind, name, "is not part of this task and must be nil")
        elif reader.nil():
            raise _wrong(kind, name, "is part of this task and must not be nil")
        elif field.shape or released:
            _read_array(reader, kind, name, field)
        else:
            reader.integer(name, -(2**63), 2**64 - 1)
    reader.end()
    reader.fail("it is not laid out as this kind of message")


def _fields(kind: str, expected: Expected) -> Mapping[str, Field]:
    if kind not in expected or kind not in KINDS:
        raise Problem("wrong-kind", f"{kind!r} is not heard here; this task hears {', '.join(sorted(expected))}.")
    return expected[kind]


@lru_cache(maxsize=256)
def _releases(kind: str) -> dict[str, bool]:
    """The fields of a message in the order of the wire, and whether each is a Release."""
    hints = get_type_hints(KINDS[kind], include_extras=True)
    return {
        name: any(get_origin(hint) is Release for hint in (hints[name], *get_args(hints[name])))
        for name in sorted(hints)
    }


@lru_cache(maxsize=1024)
def _dtype(name: str) -> np.dtype[Any]:
    """Little-endian, as everything on the wire."""
    return np.dtype(name).newbyteorder("<")


def _read_array(reader: Reader, kind: str, name: str, field: Field) -> None:
    """[dtype, shape, bytes], each exactly as expected."""
    dtype = _dtype(field.dtype)
    if reader.array(name, 3) != 3:
        raise _wrong(kind, name, "must be [dtype, shape, bytes]")
    said = reader.text(f"the dtype of {name}", 8)
    if said != dtype.str:
        raise _wrong(kind, name, f"must have dtype {dtype.str!r}, and has {said!r}")
    shape = tuple(
        reader.integer(f"the shape of {name}", 0, 2**32) for _ in range(reader.array(f"the shape of {name}", 8))
    )
    if shape != tuple(field.shape):
        raise _wrong(kind, name, f"must have shape {list(field.shape)}, and has {list(shape)}")
    size = dtype.itemsize * math.prod(field.shape)
    reader.binary(name, size, exactly=size)


def _check(kind: str, name: str, value: Any, field: Field | None) -> None:
    if field is None:
        if value is not None:
            raise _wrong(kind, name, "is not part of this task and must be nil")
        return
    dtype = _dtype(field.dtype)
    if isinstance(value, int) and not isinstance(value, bool) and not field.shape and dtype.kind in "iu":
        low = high = value
    elif isinstance(value, (np.ndarray, np.generic)):
        if value.dtype != dtype or value.shape != tuple(field.shape):
            raise _wrong(
                kind,
                name,
                f"must be {dtype.str} of shape {list(field.shape)}, "
                f"and is {value.dtype.str} of shape {list(value.shape)}",
            )
        if not value.size:
            return
        low, high = value.min().item(), value.max().item()  # NaN if any entry is
    else:
        raise _wrong(kind, name, f"must be {dtype.str} of shape {list(field.shape)}, and is {type(value).__name__}")
    if not (field.low <= low and high <= field.high):
        raise _wrong(kind, name, f"must lie between {field.low} and {field.high}, and goes from {low} to {high}")


def _wrong(kind: str, name: str, why: str) -> Problem:
    return Problem("wrong-message", f"{kind}: {name} {why}.", field=name)
