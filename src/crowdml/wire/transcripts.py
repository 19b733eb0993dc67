"""The file format of transcripts: `crowdml task export --transcript` writes it, `replay` and `ledger --verify` read it.

msgpack objects, one after another (docs/protocol.md, "Transcripts"):

    {"format": "crowdml/transcript/1", "snapshot": nil or {"index", "published", "state"}, "task": canonical JSON}
    [index, sender, kind, body]                              one for each check-in since the snapshot, in order
    {"body", "check_ins", "kind", "version"}                 what the server had published at the end

Whoever hands a transcript over is not believed: every part is checked for its types before anybody computes with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import msgpack

from crowdml.records import record

FORMAT = "crowdml/transcript/1"
LARGEST_PART = 64 * 2**20
LONGEST_TEXT = 4096
MOST_MEMBERS = 8


class BadTranscript(ValueError):  # noqa: N818  # reads as the sentence it raises
    """Bytes that are no transcript. The text says why, without the file's name."""


@record
class Start:
    """The snapshot that a transcript begins from. `index`: how many entries of the journal it holds."""

    index: int
    state: bytes
    published: bytes


@record
class Published:
    """What a snapshot says was published, and why the task had stopped by then; None: it had not."""

    version: int
    kind: str
    body: bytes
    reason: str | None


@record
class Entry:
    """One check-in, or one total of a masked task. Senders are numbered as they appear."""

    index: int
    sender: int
    kind: str
    body: bytes


@record
class End:
    """What the server had published after the last entry."""

    check_ins: int
    version: int
    kind: str
    body: bytes


def read_transcript(file: BinaryIO) -> tuple[bytes, Start | None, Iterator[Entry | End]]:
    """The task's canonical bytes, the snapshot, and the rest part by part. Raises `BadTranscript`, then or later."""
    parts = _parts(file)
    header = next(parts, None)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise BadTranscript(f"it does not begin with {FORMAT!r}")
    _, begin, task = _members(header, format=str, snapshot=(dict, type(None)), task=bytes)
    start = None if begin is None else Start(**dict(zip(("index", "state", "published"), _start(begin), strict=True)))
    return task, start, _rest(parts)


def read_published(data: bytes) -> Published:
    """The publication in a snapshot."""
    try:
        version, kind, body, rule, *more = msgpack.unpackb(data, max_array_len=5, max_map_len=MOST_MEMBERS)
        (pending,) = more or (None,)
        reason = rule[1] if isinstance(rule, list) else rule
    except (msgpack.UnpackException, ValueError, TypeError, IndexError) as error:
        raise BadTranscript("its snapshot has no publication") from error
    _check((version, int), (kind, str), (body, bytes), (reason, (str, type(None))), (pending, (bytes, type(None))))
    return Published(version, kind, body, reason)


def _start(found: dict[Any, Any]) -> list[Any]:
    return _members(found, index=int, state=bytes, published=bytes)


def _rest(parts: Iterator[Any]) -> Iterator[Entry | End]:
    for found in parts:
        part = _part(found)
        yield part
        if isinstance(part, End) and next(parts, parts) is not parts:
            raise BadTranscript("something follows after its end")


def _part(found: Any) -> Entry | End:
    if isinstance(found, dict):
        return End(*_members(found, check_ins=int, version=int, kind=str, body=bytes))
    if not isinstance(found, list) or len(found) != 4:
        raise BadTranscript("a part of it is neither a check-in nor its end")
    _check(*zip(found, (int, int, str, bytes), strict=True))
    return Entry(*found)


def _members(found: dict[Any, Any], **types: Any) -> list[Any]:
    if found.keys() != types.keys():
        raise BadTranscript(f"a part of it lacks one of {', '.join(types)}, or has more")
    _check(*((found[name], kind) for name, kind in types.items()))
    return [found[name] for name in types]


def _check(*members: tuple[Any, Any]) -> None:
    for value, kind in members:
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            raise BadTranscript("a part of it has a member of a wrong type")


def _parts(file: BinaryIO) -> Iterator[Any]:
    unpacker = msgpack.Unpacker(
        file,
        max_buffer_size=LARGEST_PART,
        max_str_len=LONGEST_TEXT,
        max_array_len=MOST_MEMBERS,
        max_map_len=MOST_MEMBERS,
        max_ext_len=0,
    )
    try:
        yield from unpacker
    except (msgpack.UnpackException, ValueError, TypeError) as error:
        raise BadTranscript(f"its bytes cannot be read ({type(error).__name__})") from error
