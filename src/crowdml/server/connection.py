"""One HTTP connection: bounded before the first handler runs, and refused in the one shape of all errors.

uvicorn parses; what it leaves open is closed here: a head that never ends, in size or in time, and too many at once.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from crowdml.server.limits import Limits
from crowdml.wire.problems import CONTENT_TYPE, Problem

log = logging.getLogger("crowdml.server")

LARGEST_HEAD = 16_384
"""Bytes of a request line and its headers that may come before they are complete."""


def connection_class(limits: Limits) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes of each connection, within these limits."""

    class Connection(HttpToolsProtocol):
        _head = 0
        _open = False
        _late: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            self.access_log = False  # uvicorn's lines have the query: `logs` writes ours, without
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self._refuse(Problem("busy", f"{limits.connections} connections are open already.", retry_after=5))
                return
            self._late = self.loop.call_later(limits.slow, self._too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._in_time()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if not self._open:
                return
            if self._late is None:  # a request has begun and is not complete
                self._late = self.loop.call_later(limits.slow, self._too_slow)
            if self._head:
                self._head += len(data)
                if self._head > LARGEST_HEAD:
                    self._refuse(
                        Problem("headers-too-large", f"At most {LARGEST_HEAD:,} bytes of headers are read here.")
                    )

        def on_message_begin(self) -> None:
            self._head, self._open = 1, True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head = 0
            self._in_time()  # the body has its own time
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            self._open = False
            self._in_time()
            super().on_message_complete()

        def send_400_response(self, msg: str) -> None:
            self._answer(Problem("bad-request", "This is no HTTP request that can be read."))

        def _unsupported_upgrade_warning(self) -> None:
            """Nothing: the request is answered as if it had asked for no upgrade."""

        def _in_time(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _too_slow(self) -> None:
            self._late = None
            self._refuse(Problem("too-slow", f"The request did not arrive within {limits.slow:g} seconds."))

        def _refuse(self, problem: Problem) -> None:
            log.info("connection of %s: %d %s", (self.client or ("?",))[0], problem.status, problem.slug)
            self._answer(problem)

        def _answer(self, problem: Problem) -> None:
            body = problem.encode()
            lines = [f"content-type: {CONTENT_TYPE}", f"content-length: {len(body)}", "connection: close"]
            if problem.retry_after is not None:
                lines.append(f"retry-after: {problem.retry_after}")
            if not self.transport.is_closing():
                self.transport.write(STATUS_LINE[problem.status] + "\r\n".join((*lines, "", "")).encode() + body)
                self.transport.close()

    return Connection
