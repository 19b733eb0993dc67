"""Forms: fields as browsers send them, bounded before they are read."""

from __future__ import annotations

from urllib.parse import parse_qsl

from starlette.requests import Request

from crowdml.wire.problems import Problem

__all__ = ["read_form"]

LARGEST = 64 * 1024
MOST_FIELDS = 200


async def read_form(request: Request, limit: int = LARGEST) -> dict[str, str]:
    """The fields of an application/x-www-form-urlencoded body; of a name that comes twice, the last."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise Problem("media-type", "A form is sent as application/x-www-form-urlencoded.")
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise Problem("too-large", f"At most {limit:,} bytes are read here.", limit=limit)
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError as error:
        raise Problem("bad-request", "The form could not be read.") from error
