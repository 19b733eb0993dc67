"""Forms: fields as browsers send them, bounded before they are read.

Both encodings are read in one pass over the bytes: no part of a form has parts of its own, and the time depends on its
length alone.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from starlette.requests import Request

from crowdml.wire.problems import Problem

LARGEST = 64 * 1024
MOST_FIELDS = 200
LARGEST_HEAD = 2048
"""Bytes of the headers of one field in a multipart form."""
URLENCODED, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
NO_TEXT = "\N{REPLACEMENT CHARACTER}"
"""Stands for bytes of a file that are no character of a text."""
_BOUNDARY = re.compile(r"""(?i:boundary)=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))""")
_NAME = re.compile(rb"""(?im)^content-disposition:[ \t]*form-data;(?:[^\r\n]*?;)?[ \t]*name="([^"\r\n]*)\"""")
_FILE = re.compile(rb"""(?im)^content-disposition:[^\r\n]*;[ \t]*filename="([^"\r\n]*)\"""")


@dataclass(frozen=True)
class Upload:
    """A file as a browser sent it. `name` is what the file is called there, without folders."""

    name: str
    data: bytes


async def read_form(request: Request, limit: int = LARGEST, *, files: bool = False) -> dict[str, str]:
    """The fields of a form; of a name that comes twice, the last. `files`: also multipart, each file read as text."""
    said = request.headers.get("content-type", "")
    kind, _, parameters = said.partition(";")
    kind = kind.strip().lower()
    if kind != URLENCODED and not (files and kind == MULTIPART):
        raise Problem("media-type", f"A form is sent as {URLENCODED}{f' or {MULTIPART}' if files else ''}.")
    body = await _read_body(request, limit)
    try:
        found = _multipart(body, parameters) if kind == MULTIPART else _urlencoded(body)
    except ValueError as error:
        raise Problem("bad-request", "The form could not be read.") from error
    _refuse_nul(found)
    return found


async def read_upload(request: Request, limit: int) -> tuple[dict[str, str], dict[str, Upload]]:
    """The fields and the files of a form, taken apart in a thread: it may be large."""
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != MULTIPART:
        return await read_form(request), {}
    body = await _read_body(request, limit)
    try:
        parts = await asyncio.to_thread(_parts, body, parameters)
    except ValueError as error:
        raise Problem("bad-request", "The form could not be read.") from error
    fields = {name: value.decode("utf-8", errors="replace") for name, file, value in parts if file is None}
    _refuse_nul(fields)
    files = {name: Upload(re.split(r"[/\\]", file)[-1], value) for name, file, value in parts if file is not None}
    return fields, files


async def _read_body(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise Problem("too-large", f"At most {limit:,} bytes are read here.", limit=limit)
    return bytes(body)


def _refuse_nul(found: dict[str, str]) -> None:
    if any("\0" in text for pair in found.items() for text in pair):
        raise Problem("bad-request", "There is a NUL character in this form: take it out. Nothing was changed.")


def _urlencoded(body: bytes) -> dict[str, str]:
    return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS))


def _multipart(body: bytes, parameters: str) -> dict[str, str]:
    """The parts of a multipart form as text, a file too. What is no text in a file becomes `NO_TEXT`."""
    found: dict[str, str] = {}
    for name, file, value in _parts(body, parameters):
        text = value.decode("utf-8", errors="replace")
        found[name] = text if file is None else text.replace("\0", NO_TEXT)
    return found


def _parts(body: bytes, parameters: str) -> list[tuple[str, str | None, bytes]]:
    """Name, file name and bytes of each part of a multipart form, one level of them. One without a name is dropped."""
    match = _BOUNDARY.search(parameters)
    if match is None:
        raise ValueError("no boundary")
    mark = b"\r\n--" + (match[1] or match[2]).encode("latin-1")
    before, *parts = (b"\r\n" + body).split(mark, MOST_FIELDS + 2)
    if len(parts) > MOST_FIELDS + 1:
        raise ValueError(f"more than {MOST_FIELDS} fields")
    if before or not parts or not parts[-1].startswith(b"--"):
        raise ValueError("no whole form")
    found: list[tuple[str, str | None, bytes]] = []
    for part in parts[:-1]:
        line, _, rest = part.partition(b"\r\n")
        head, blank, value = rest.partition(b"\r\n\r\n")
        if line.strip() or not blank or len(head) > LARGEST_HEAD:
            raise ValueError("a part without its headers")
        if name := _NAME.search(head):
            file = _FILE.search(head)
            called = None if file is None else file[1].decode("utf-8", errors="replace")
            found.append((name[1].decode("utf-8", errors="replace"), called, value))
    return found
