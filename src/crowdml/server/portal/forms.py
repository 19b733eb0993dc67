"""Forms: fields as browsers send them, bounded before they are read.

Both encodings are read in one pass over the bytes: no part of a form has parts of its own, and the time depends on its
length alone.
"""

from __future__ import annotations

import re
from urllib.parse import parse_qsl

from starlette.requests import Request

from crowdml.wire.problems import Problem

__all__ = ["read_form"]

LARGEST = 64 * 1024
MOST_FIELDS = 200
LARGEST_HEAD = 2048
"""Bytes of the headers of one field in a multipart form."""
URLENCODED, MULTIPART = "application/x-www-form-urlencoded", "multipart/form-data"
_BOUNDARY = re.compile(r"""(?i:boundary)=(?:"([^"\r\n]{1,70})"|([^\s;,"]{1,70}))""")
_NAME = re.compile(rb"""(?im)^content-disposition:[ \t]*form-data;(?:[^\r\n]*?;)?[ \t]*name="([^"\r\n]*)\"""")


async def read_form(request: Request, limit: int = LARGEST, *, files: bool = False) -> dict[str, str]:
    """The fields of a form; of a name that comes twice, the last. `files`: also multipart, each file read as text."""
    said = request.headers.get("content-type", "")
    kind, _, parameters = said.partition(";")
    kind = kind.strip().lower()
    if kind != URLENCODED and not (files and kind == MULTIPART):
        raise Problem("media-type", f"A form is sent as {URLENCODED}{f' or {MULTIPART}' if files else ''}.")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise Problem("too-large", f"At most {limit:,} bytes are read here.", limit=limit)
    try:
        found = _multipart(bytes(body), parameters) if kind == MULTIPART else _urlencoded(bytes(body))
    except ValueError as error:
        raise Problem("bad-request", "The form could not be read.") from error
    for name, value in found.items():
        if "\0" in name or "\0" in value:
            raise Problem("bad-request", "There is a NUL character in this form: take it out. Nothing was changed.")
    return found


def _urlencoded(body: bytes) -> dict[str, str]:
    return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS))


def _multipart(body: bytes, parameters: str) -> dict[str, str]:
    """The parts of a multipart form, one level of them. A part without a name is passed over."""
    match = _BOUNDARY.search(parameters)
    if match is None:
        raise ValueError("no boundary")
    mark = b"\r\n--" + (match[1] or match[2]).encode("latin-1")
    before, *parts = (b"\r\n" + body).split(mark, MOST_FIELDS + 2)
    if len(parts) > MOST_FIELDS + 1:
        raise ValueError(f"more than {MOST_FIELDS} fields")
    if before or not parts or not parts[-1].startswith(b"--"):
        raise ValueError("no whole form")
    found: dict[str, str] = {}
    for part in parts[:-1]:
        line, _, rest = part.partition(b"\r\n")
        head, blank, value = rest.partition(b"\r\n\r\n")
        if line.strip() or not blank or len(head) > LARGEST_HEAD:
            raise ValueError("a part without its headers")
        if name := _NAME.search(head):
            found[name[1].decode("utf-8", errors="replace")] = value.decode("utf-8", errors="replace")
    return found
