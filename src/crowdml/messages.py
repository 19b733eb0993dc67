"""Messages: what may travel. Not what any message means.

Every field of a message is `Public` (it depends on no sample but through releases), a `Release`, or, with masks, a
`Masked` value; `@message` checks that when the class is made. `seal` checks the values just before they become bytes:
nothing Private, and every Release came through this device's door in this step.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

from crowdml.arrays import struct
from crowdml.errors import LeakError, ProtocolError
from crowdml.privacy.door import Door
from crowdml.privacy.private import RECEIVED, Masked, Private, Release
from crowdml.records import record

T = TypeVar("T")

PUBLIC = "depends on no sample but through releases"
Public = Annotated[T, PUBLIC]

Address = str
SERVER: Address = "server"

KINDS: dict[str, type] = {}
"""Every message by its kind, such as 'sgd/gradient/1'."""
KIND, LONGEST_KIND = re.compile(r"[a-z][a-z0-9_]*(?:/[a-z0-9_]+)*/[1-9][0-9]*"), 64
"""'sgd/gradient/1': protocol, message, version."""
OURS = frozenset({"admm", "crowdml", "gram", "local", "proportions", "secagg", "secprobe", "sgd"})
"""How kinds of crowdml's own begin, imported or not: a plug-in has others."""


@dataclass_transform(frozen_default=True)
def message(kind: str) -> Callable[[type[T]], type[T]]:
    """Declare a message of this kind. Refuses at import a field that could carry a sample."""

    def decorate(cls: type[T]) -> type[T]:
        _check_kind(kind, cls)
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if (_is_public(hint) and not _hides(hint)) or _is(Release, hint) or _is(Masked, hint):
                continue
            raise LeakError(
                f"{cls.__name__}.{name} is declared {getattr(hint, '__name__', hint)}, so nothing would say whether it "
                "depends on a sample. Declare it Release[...] (it comes from `ctx.release`), Masked[...] (from "
                "`ctx.masked`) or Public[...] (it depends on no sample but through releases)."
            )
        made = struct(cls)
        KINDS[kind] = made
        made.kind = kind  # pyright: ignore[reportAttributeAccessIssue]  a class attribute, not a field
        return made

    return decorate


def _check_kind(kind: str, cls: type) -> None:
    """Refuse a kind that could not travel, or that another message has."""
    if not KIND.fullmatch(kind) or len(kind) > LONGEST_KIND:
        raise ProtocolError(
            f"{cls.__name__} has the kind {kind!r}: say protocol/message/version in small letters, digits and _, at "
            f"most {LONGEST_KIND} characters, such as 'votes/weights/1'."
        )
    if kind.split("/")[0] in OURS and cls.__module__.split(".")[0] != "crowdml":
        raise ProtocolError(f"{cls.__name__} has the kind {kind!r}, and crowdml's own begin so. Begin it otherwise.")
    if kind in KINDS:
        raise ProtocolError(f"Two messages call themselves {kind!r}: {KINDS[kind].__name__} and {cls.__name__}.")


def forget(kinds: Iterable[str]) -> None:
    """Take back the kinds that a plug-in declared before its import failed, so that it can be tried again."""
    for kind in kinds:
        del KINDS[kind]
    _held.cache_clear()
    _declared.cache_clear()


def _is_public(hint: Any) -> bool:
    return get_origin(hint) is Annotated and PUBLIC in get_args(hint)


def _hides(hint: Any) -> bool:
    """Whether a type has something in it that does not travel as it is: `Public[Private[...]]` is a contradiction."""
    inner = (get_origin(hint), *get_args(hint))
    return any(each in (Private, Release, Masked) or (each is not None and _hides(each)) for each in inner)


def _is(kind: type, hint: Any) -> bool:
    """kind[...], or kind[...] | None where the task decides whether the field is there."""
    if get_origin(hint) in (Union, UnionType):
        (hint, *more) = [one for one in get_args(hint) if one is not type(None)]
        return not more and get_origin(hint) is kind
    return get_origin(hint) is kind


@record
class Envelope:
    """What is signed and sent: the exact bytes. `seq` counts a device's messages of a task from 1."""

    task: bytes
    sender: Address
    to: frozenset[Address]
    seq: int
    kind: str
    body: bytes


_PLAIN = frozenset({type(None), bool, int, float, str, bytes, np.bool_, np.int32, np.int64, np.float32, np.float64})


def inspect(message: Any, door: Door) -> None:
    """Refuse a message that would leak: the seal's checks, without the bytes (the compiled simulator has none)."""
    kind: str = getattr(type(message), "kind", "")
    if KINDS.get(kind) is not type(message):
        raise LeakError(f"A {type(message).__name__} is no message. Declare what travels with @message(kind).")
    for name, where, holds, optional in _declared(kind):
        value = getattr(message, name)
        if holds is Masked and isinstance(value, Masked):
            _refuse_stranger(value, where, door)
        else:
            _refuse_leaks(value, where, door)
        if holds is None or isinstance(value, holds) or (value is None and optional):
            continue
        raise LeakError(
            f"{where} is a {holds.__name__}, and holds a {type(value).__name__} that did not come through the door. "
            f"Let the value out with `ctx.{holds.__name__.lower()}(row, private)`, which noises and charges it."
        )


def _refuse_leaks(value: Any, where: str, door: Door) -> None:
    if type(value) in _PLAIN or (type(value) is np.ndarray and value.dtype.kind in "iuf"):
        return  # holds nothing else
    if isinstance(value, Private):
        raise LeakError(
            f"{where} holds a Private value. Let it out with `ctx.release(row, private)`, which noises and charges it."
        )
    if isinstance(value, Masked):
        raise LeakError(f"{where} holds a Masked value and is not declared so. Declare it Masked[...].")
    if isinstance(value, Release):
        _refuse_stranger(value, where, door)
        _refuse_leaks(value.value, where, door)
    elif isinstance(value, Mapping):
        for pair in value.items():
            _refuse_leaks(pair, where, door)
    elif isinstance(value, np.ndarray) and value.dtype.kind == "O":
        raise LeakError(f"{where} holds an array of objects, which the seal cannot look into. Send arrays of numbers.")
    elif isinstance(value, (list, tuple, set, frozenset)):
        for inner in value:
            _refuse_leaks(inner, where, door)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            _refuse_leaks(getattr(value, field.name), where, door)


def _refuse_stranger(value: Release[Any] | Masked[Any], where: str, door: Door) -> None:
    if value._stamp is not door.stamp:
        raise LeakError(
            f"{where} holds a {type(value).__name__} that did not come through this device's door in this step "
            f"(its stamp says: {value._stamp.where}). Each step draws and charges its own releases; "
            "to send the same value again, resend the same bytes."
        )


def seal(task: bytes, sender: Address, to: frozenset[Address], seq: int, message: Any, door: Door) -> Envelope:
    """Make the bytes of a message, after the last check that nothing in it leaks."""
    inspect(message, door)
    return Envelope(task, sender, to, seq, message.kind, encode(message))


def encode(message: Any) -> bytes:
    """msgpack with sorted keys; an array is [type, shape, little-endian bytes].

    The size of what was released depends on its shape alone: a release is an array even where it is a single number.
    """
    fields = {field.name: _plain(getattr(message, field.name)) for field in dataclasses.fields(message)}
    return bytes(msgpack.packb(dict(sorted(fields.items()))) or b"")


def decode(kind: str, body: bytes) -> Any:
    """The message behind the bytes. What was released stays a Release, stamped as received."""
    plain = msgpack.unpackb(body)
    return received(kind, {name: _array(each) if isinstance(each, list) else each for name, each in plain.items()})


def received(kind: str, fields: dict[str, Any]) -> Any:
    """The message of fields that were read from the wire. What was released stays a Release, stamped as received."""
    if _held(kind, Masked):
        raise LeakError(f"{kind} leaves under masks alone: nobody hears one device's, only a cohort's total.")
    for name in _held(kind, Release):
        if fields[name] is not None:
            fields[name] = Release(fields[name], RECEIVED)
    return KINDS[kind](**fields)


def total(kind: str, sums: Mapping[str, Any], **public: Any) -> Any:
    """What the server hears of a cohort: a message of `kind` whose releases are sums, each an array or None."""
    return received(kind, {**dict.fromkeys(_held(kind, Release)), **sums, **public})


def summed(kind: str, said: Sequence[Any], version: Any) -> Any:
    """What the server hears of a cohort whose devices said this under masks, which cancel: sums in 64 bits."""
    sums: dict[str, Any] = {}
    for message in said:
        for name, steps in masked_steps(message).items():
            sums[name] = sums.get(name, 0) + steps.astype(np.int64)
    return total(kind, sums, devices=np.int32(len(said)), version=version)


def masked_steps(message: Any) -> dict[str, Any]:
    """What a message says under masks: the integers of each field that is there, flat, for the channel alone."""
    found = {name: getattr(message, name) for name in _held(message.kind, Masked)}
    return {name: value._summand.reshape(-1) for name, value in found.items() if value is not None}


def altered(message: Any, alter: Callable[[str, Any], Any]) -> Any:
    """The message with every row in it changed by `alter(name, value)`: what a device says that lies."""
    rows = {**_held(message.kind, Release), **_held(message.kind, Masked)}
    given = {name: getattr(message, name) for name in rows if getattr(message, name) is not None}
    return dataclasses.replace(
        message, **{name: each.map(lambda value, name=name: alter(name, value)) for name, each in given.items()}
    )


def releases_of(hints: Mapping[str, Any], what: type = Release) -> dict[str, bool]:
    """The fields that hold releases, by their declared types, and whether each may be left out."""
    return {name: get_origin(hint) is not what for name, hint in hints.items() if _is(what, hint)}


@cache
def _held(kind: str, what: type) -> dict[str, bool]:
    """The fields of a kind that hold releases, or masked values, and whether each may be left out."""
    return releases_of(get_type_hints(KINDS[kind], include_extras=True), what)


@cache
def _declared(kind: str) -> tuple[tuple[str, str, type | None, bool], ...]:
    """Each field of a kind: its name, its name in errors, what it holds (None: public), and whether it may be None."""
    held = {name: (what, optional) for what in (Release, Masked) for name, optional in _held(kind, what).items()}
    fields = [(field.name, held.get(field.name, (None, True))) for field in dataclasses.fields(KINDS[kind])]
    return tuple((name, f"{kind} field {name!r}", holds, optional) for name, (holds, optional) in fields)


def _plain(value: Any) -> Any:
    if isinstance(value, Release):
        return _packed(np.asarray(value.value))
    if isinstance(value, Masked):
        raise LeakError("A Masked value has no bytes of its own: the channel puts masks on it and sends those.")
    if isinstance(value, (bool, int, float, str, bytes)) or value is None:
        return value
    array = np.asarray(value)
    if array.ndim == 0:
        return array.item()
    return _packed(array)


def _packed(array: np.ndarray[Any, Any]) -> list[Any]:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, list(little.shape), little.tobytes()]


def _array(plain: list[Any]) -> Any:
    dtype, shape, data = plain
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
