"""Live pages: server-sent events while a page is open. Bounded in number, never silent for long, ended by a stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from crowdml.server.hub import Hub
from crowdml.server.limits import source
from crowdml.server.portal.cache import PortalCache, kept
from crowdml.server.portal.pages import language
from crowdml.server.portal.studies import Study, find_study
from crowdml.server.portal.words import Words
from crowdml.wire.problems import Problem

EVERY = 1.0
"""Seconds between looks at a study."""
HEARTBEAT = 15
"""Looks without news after which a line is sent all the same, so that nobody between takes the page for dead."""
MOST, MOST_OF_ONE = 256, 16
"""Live pages at once: in all, and of one address."""
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
RETRY = b"retry: 5000\n\n"
"""Milliseconds after which a browser comes back by itself."""


def error_now(study: Study, said: Words) -> str:
    """The last error estimate in words, or why there is none."""
    figures = study.figures
    if not figures.errors:
        return said("live.error.wait" if "error" in study.charts else "live.error.none")
    return said.estimate(figures.errors[-1].rate)


def numbers(study: Study, said: Words) -> dict[str, Any]:
    """What changes on a study's page, as it is shown there."""
    found: dict[str, Any] = {
        "state": study.state,
        "state_text": str(said(f"state.{study.state}")),
        "check_ins": said.number(study.check_ins),
        "devices": said.number(study.figures.devices),
    }
    if not study.closed:
        found |= {"error": str(error_now(study, said)), "index": study.figures.index}
        found["verdict"] = said.verdict(study.figures.verdict).unescape()
    return found


async def live(request: Request) -> Response:
    """GET /studies/{study}/live: the numbers of a study, again whenever they change."""
    name = request.path_params["study"]
    await find_study(request, name)
    said, open_pages = language(request), kept(request)
    address = source(request.client.host) if request.client else ""
    if open_pages.streams.total() >= MOST or open_pages.streams[address] >= MOST_OF_ONE:
        raise Problem("busy", f"{MOST} live pages are open already, or {MOST_OF_ONE} of yours.", retry_after=60)

    if request.method == "HEAD":
        return Response(headers=HEADERS, media_type=Stream.media_type)

    async def look() -> bytes:
        return json.dumps(numbers(await find_study(request, name), said), ensure_ascii=False).encode()

    return Stream(open_pages, request.app.state.hub, address, look)


class Stream(Response):
    """An event whenever `look` sees something new, until the browser goes or the server stops."""

    media_type = "text/event-stream"

    def __init__(self, pages: PortalCache, hub: Hub, address: str, look: Callable[[], Any]) -> None:
        super().__init__(headers=HEADERS)
        self.raw_headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
        self.pages, self.hub, self.address, self.look = pages, hub, address, look

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.pages.streams[self.address] += 1
        gone = asyncio.create_task(_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async with contextlib.aclosing(self._events(gone)) as events:
                async for event in events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            self.pages.streams[self.address] -= 1
            self.pages.streams += type(self.pages.streams)()  # drops addresses at zero

    async def _events(self, gone: asyncio.Task[None]) -> AsyncGenerator[bytes]:
        yield RETRY
        before, quiet = b"", 0
        ending = asyncio.create_task(self.hub.ending.wait())
        try:
            while True:
                try:
                    seen = await self.look()
                except Exception as error:  # the answer has begun: it can only end
                    if not isinstance(error, Problem):
                        raise
                    return
                if seen != before:
                    before, quiet = seen, 0
                    yield b"data: " + seen + b"\n\n"
                elif (quiet := quiet + 1) % HEARTBEAT == 0:
                    yield b": still here\n\n"
                done, _ = await asyncio.wait({gone, ending}, timeout=EVERY, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    return
        finally:
            ending.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
