"""What pages load: style sheets and ES modules of ours, and plotly's script out of its installed package.

An address carries the hash of what is behind it, so a browser keeps it for ever. Everything is read and compressed
once, when it is first asked for.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from crowdml.wire.problems import Problem

TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "png": "image/png"}
PLOTLY = "plotly.min.js"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")
GUARD = re.compile(r'document\.getElementById\("([0-9a-f]{64})"\)')
IMMUTABLE = "public, max-age=31536000, immutable"


@dataclass(frozen=True)
class Asset:
    data: bytes
    small: bytes
    """Compressed with gzip."""
    tag: str
    type: str


@lru_cache(64)
def read(name: str) -> Asset | None:
    """The asset of this name; None where there is none. A name is one file, never a path."""
    kind = TYPES.get(name.rpartition(".")[2])
    if kind is None or not NAME.fullmatch(name):
        return None
    home = files("plotly.package_data") if name == PLOTLY else files(__package__ or "") / "static"
    found = home / name
    if not found.is_file():
        return None
    data = found.read_bytes()
    return Asset(data, gzip.compress(data, 6, mtime=0), hashlib.sha256(data).hexdigest()[:16], kind)


@lru_cache(1)
def guards() -> str:
    """Ids of the style elements that plotly would add: where an element has the id, it adds none.

    So a page that has them all needs no inline style. They are sheets of maps, which no page here draws.
    """
    found = read(PLOTLY)
    return " ".join(sorted(set(GUARD.findall(found.data.decode())))) if found is not None else ""


def address(name: str) -> str:
    """Where a page finds an asset."""
    found = read(name)
    if found is None:
        raise KeyError(f"There is no asset {name!r}.")
    return f"/static/{name}?v={found.tag}"


async def serve(request: Request) -> Response:
    """GET /static/{name}: for ever under the address that pages use, else as long as it is asked whether it changed."""
    found = await asyncio.to_thread(read, request.path_params["name"])
    if found is None:
        raise Problem("not-found", "There is no such file.")
    tag = f'"{found.tag}"'
    headers = {
        "ETag": tag,
        "Cache-Control": IMMUTABLE if request.query_params.get("v") == found.tag else "no-cache",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.small, headers={**headers, "Content-Encoding": "gzip"}, media_type=found.type)
    return Response(found.data, headers=headers, media_type=found.type)
