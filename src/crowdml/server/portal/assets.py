"""What pages load: style sheets and ES modules of ours, and plotly's script out of its installed package.

An address carries the hash of what is behind it, so a browser keeps it for ever. Everything is read and compressed
once, when it is first asked for.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import posixpath
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
    return _asset(found.read_bytes(), kind)


def _asset(data: bytes, kind: str) -> Asset:
    return Asset(data, gzip.compress(data, 9, mtime=0), hashlib.sha256(data).hexdigest()[:16], kind)


WEB = "web"
MODULE = re.compile(r"(?:(?P<tag>[0-9a-f]{16})/)?(?P<folder>device|phone)/(?P<name>[a-z_]{1,40}\.js)")
"""A module of the browser's device, under the version of all of them or under none."""
WORKER = "worker.js"
WORKER_POLICY = "default-src 'none'; script-src 'self'; connect-src 'self'"
"""What a Worker may do: load modules of this server, and ask this server."""


@lru_cache(1)
def modules() -> dict[str, Asset]:
    """Every module of the package's web folder, by folder and name."""
    found: dict[str, Asset] = {}
    for folder in ("device", "phone"):
        for each in sorted((files("crowdml") / WEB / folder).iterdir(), key=lambda each: each.name):
            if each.name.endswith(".js"):
                found[f"{folder}/{each.name}"] = _asset(each.read_bytes(), TYPES["js"])
    return found


@lru_cache(1)
def version() -> str:
    """One tag for all modules: they import each other by relative addresses, so they have one version."""
    digest = hashlib.sha256("".join(f"{name} {each.tag}\n" for name, each in modules().items()).encode())
    return digest.hexdigest()[:16]


IMPORT = re.compile(r'^(?:import|export)\b[^"]*?\bfrom "(\.{1,2}/[a-z_/]+\.js)";$', re.MULTILINE)
"""A static import of another module, by its relative address."""


@lru_cache(8)
def needed(*names: str) -> tuple[str, ...]:
    """These modules and all that they import, directly or not: what a page asks for before its scripts do."""
    found: dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = None
            here = name.partition("/")[0]
            asked = IMPORT.findall(modules()[name].data.decode())
            waiting += [posixpath.normpath(posixpath.join(here, each)) for each in asked]
    return tuple(sorted(found))


def module(name: str) -> str:
    """Where a page finds a module, such as `phone/page.js`: for ever."""
    if name not in modules():
        raise KeyError(f"There is no module {name!r}.")
    return f"/{WEB}/{version()}/{name}"


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
    return _answer(request, found, lasts=request.query_params.get("v") == found.tag)


async def serve_module(request: Request) -> Response:
    """GET /web/{folder}/{name}, or /web/{version}/{folder}/{name}: for ever under the version that is here."""
    asked = MODULE.fullmatch(request.path_params["path"])
    known = await asyncio.to_thread(modules)
    found = None if asked is None else known.get(f"{asked['folder']}/{asked['name']}")
    if asked is None or found is None:
        raise Problem("not-found", "There is no such module.")
    answer = _answer(request, found, lasts=asked["tag"] == version())
    if asked["name"] == WORKER:
        answer.headers["Content-Security-Policy"] = WORKER_POLICY
    return answer


def _answer(request: Request, found: Asset, *, lasts: bool) -> Response:
    tag = f'"{found.tag}"'
    headers = {
        "ETag": tag,
        "Cache-Control": IMMUTABLE if lasts else "no-cache",
        "Vary": "Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
    }
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(found.small, headers={**headers, "Content-Encoding": "gzip"}, media_type=found.type)
    return Response(found.data, headers=headers, media_type=found.type)
