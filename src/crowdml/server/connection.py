"""One HTTP connection: bounded before the first handler runs, and refused in the one shape of all errors.

uvicorn parses; what it leaves open is closed here: a head that never ends, in size or in time, and too many at once.
Check-outs and check-ins, the hot paths of a large crowd, are answered from here without ASGI where nothing about the
request is unusual. Whatever is (a chunked body, a pipeline, a proxy's headers, a closed task) goes the common way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from crowdml.server.limits import Limits
from crowdml.wire.problems import CONTENT_TYPE, Problem

log = logging.getLogger("crowdml.server")

LARGEST_HEAD = 16_384
"""Bytes of a request line and its headers that may come before they are complete."""
HOT = b"/v1/tasks/"
Header = tuple[bytes, bytes]
Answered = Callable[[tuple[int, bytes] | Problem], None]


class Front(Protocol):
    """What a connection asks before it goes the common way."""

    def look_up(self, method: bytes, url: bytes, headers: list[Header]) -> bytes | None:
        """The task's hash, if this is a check-out or a check-in with nothing unusual about it."""
        ...

    def check_out(self, hash_: bytes, headers: list[Header], address: str, common: list[Header]) -> bytes:
        """The whole answer."""
        ...

    def begin_check_in(self, address: str) -> None:
        """Whether a body may come: raises a Problem if not."""
        ...

    def check_in(self, hash_: bytes, data: bytes, address: str, done: Answered) -> None:
        """Take a body; `done` is told the answer later. Raises a Problem."""
        ...

    def head(self, status: int, size: int, common: list[Header]) -> bytes:
        """The head of the answer to a check-in."""
        ...

    def refusal(self, error: Exception, method: str, path: str) -> tuple[int, list[Header], bytes]:
        """Status, headers and body of what is answered to an error, counted and logged."""
        ...


class _Nothing:
    """Where uvicorn would wake its handler: there is none."""

    def set(self) -> None: ...


class Exchange:
    """A request and its answer without ASGI; it stands where uvicorn keeps its own."""

    __slots__ = ("disconnected", "keep_alive", "message_event", "method", "parts", "response_complete", "task")

    def __init__(self, task: bytes, method: str) -> None:
        self.task, self.method, self.parts, self.response_complete = task, method, list[bytes](), False
        self.keep_alive, self.disconnected, self.message_event = True, False, _NOTHING


_NOTHING = _Nothing()


def connection_class(limits: Limits, front: Front | None = None) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes of each connection, within these limits."""

    class Connection(HttpToolsProtocol):
        _head = 0
        _open = False
        _late: asyncio.TimerHandle | None = None
        _idle: asyncio.TimerHandle | None = None
        _answered = 0.0

        def connection_made(self, transport: Any) -> None:
            self.access_log = False  # uvicorn's lines have the query: `logs` writes ours, without
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self._refuse(Problem("busy", f"{limits.connections} connections are open already.", retry_after=5))
                return
            self._late = self.loop.call_later(limits.slow, self._too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            self._in_time()
            if self._idle is not None:
                self._idle.cancel()
                self._idle = None
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self.timeout_keep_alive_task is not None:
                self._unset_keepalive_if_required()
            parser: Any = self.parser
            try:
                parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                pass  # the request is answered as if it had asked for no upgrade
            except httptools.HttpParserError:
                self.send_400_response("")
                return
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
            self.url, self.headers, self.expect_100_continue = b"", [], False

        def on_headers_complete(self) -> None:
            self._head = 0
            if self._late is not None:
                self._in_time()  # the body has its own time
            if front is not None and self.url.startswith(HOT) and self._goes_quickly(front):
                return
            url, headers, expects = self.url, self.headers, self.expect_100_continue
            super().on_message_begin()
            self.url, self.expect_100_continue = url, expects
            self.headers += headers
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            cycle: Any = self.cycle
            if type(cycle) is not Exchange:
                super().on_body(body)
            elif not cycle.response_complete:
                cycle.parts.append(body)

        def on_message_complete(self) -> None:
            self._open = False
            if self._late is not None:
                self._in_time()
            cycle: Any = self.cycle
            if type(cycle) is not Exchange:
                super().on_message_complete()
            elif not cycle.response_complete:
                self._take(cycle)

        # --- without ASGI ---

        def _goes_quickly(self, front: Front) -> bool:
            """Begin or give the answer to a check-out or check-in; False if it has to go the common way."""
            parser: Any = self.parser
            before = self.cycle
            if before is not None and not before.response_complete:  # a pipeline
                return False
            if self.expect_100_continue or parser.should_upgrade() or not parser.should_keep_alive():
                return False
            method = parser.get_method()
            task = front.look_up(method, self.url, self.headers)
            if task is None or parser.get_http_version() != "1.1":
                return False
            self.cycle: Any = Exchange(task, method.decode())
            address = self.client[0] if self.client else ""
            try:
                if method == b"GET":
                    said = front.check_out(task, self.headers, address, self.server_state.default_headers)
                    self.transport.write(said)
                    self._finish(self.cycle)
                else:
                    front.begin_check_in(address)
            except Exception as error:
                self._fail(self.cycle, error)
            return True

        def _take(self, exchange: Exchange) -> None:
            data = exchange.parts[0] if len(exchange.parts) == 1 else b"".join(exchange.parts)
            exchange.parts.clear()
            assert front is not None
            try:
                front.check_in(
                    exchange.task,
                    data,
                    self.client[0] if self.client else "",
                    lambda answer: self._say(exchange, answer),
                )
            except Exception as error:
                self._fail(exchange, error)

        def _say(self, exchange: Exchange, answer: tuple[int, bytes] | Problem) -> None:
            if isinstance(answer, Problem):
                self._fail(exchange, answer)
                return
            assert front is not None
            status, receipt = answer
            if not self.transport.is_closing():
                head = front.head(status, len(receipt), self.server_state.default_headers)
                if not exchange.keep_alive:
                    head = head[:-2] + b"connection: close\r\n\r\n"
                self.transport.write(head + receipt)
            self._finish(exchange)

        def _fail(self, exchange: Exchange, error: Exception) -> None:
            assert front is not None
            status, headers, body = front.refusal(error, exchange.method, self.url.decode("latin-1"))
            if not self.transport.is_closing():
                lines = [STATUS_LINE[status]]
                for name, value in (*self.server_state.default_headers, *headers):
                    lines += (name, b": ", value, b"\r\n")
                if not exchange.keep_alive:
                    lines.append(b"connection: close\r\n")
                self.transport.write(b"".join((*lines, b"\r\n", body)))
            self._finish(exchange)

        def _finish(self, exchange: Exchange) -> None:
            """The answer is given: the next request of a pipeline, or a connection that waits, for so long."""
            exchange.response_complete = True
            if self.transport.is_closing():
                return
            if not exchange.keep_alive:
                self.transport.close()
            elif self.pipeline:
                self.on_response_complete()
            else:
                self.server_state.total_requests += 1
                self._answered = self.loop.time()
                if self._idle is None:  # one timer for many requests
                    self._idle = self.loop.call_later(self.timeout_keep_alive, self._look_whether_idle)

        def _look_whether_idle(self) -> None:
            self._idle = None
            is_busy = self._open or (self.cycle is not None and not self.cycle.response_complete)
            left = self.timeout_keep_alive - (0 if is_busy else self.loop.time() - self._answered)
            if left > 0.01:
                self._idle = self.loop.call_later(left, self._look_whether_idle)
            elif self.timeout_keep_alive_task is None:  # else uvicorn watches it already
                self.timeout_keep_alive_handler()

        # --- refused before anybody reads it ---

        def send_400_response(self, msg: str) -> None:
            self._answer(Problem("bad-request", "This is no HTTP request that can be read."))

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
