"""One HTTP connection: bounded before the first handler runs, and refused in the one shape of all errors.

uvicorn parses; what it leaves open is closed here: a head that never ends, in size or in time, a peer that takes no
answers or holds many bodies half sent, and too many connections, in all and of one address. TLS begins here too, so
that a connection is counted as soon as it is accepted: of handshakes under way the oldest gives way to a new one.
Check-outs and check-ins, the hot paths of a large crowd, are answered from here without ASGI where nothing about the
request is unusual. Whatever is (a chunked body, a pipeline, a proxy's headers, a closed task) goes the common way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from crowdml.server.limits import Limits, Queue, source
from crowdml.wire.problems import CONTENT_TYPE, Problem

if TYPE_CHECKING:
    from crowdml.server.app import Front

log = logging.getLogger("crowdml.server")

LARGEST_HEAD = 16_384
"""Bytes of a request line and its headers, and of what stands between and after the chunks of a body."""
MOST_AHEAD = 64
"""Requests that may wait on a connection for the answer to one before them."""
LEAST_TAKEN = 512
"""Bytes a second that a peer takes at least while answers wait for it."""
HOT = b"/v1/tasks/"
Header = tuple[bytes, bytes]
Answered = Callable[[tuple[int, bytes] | Problem], None]


class _Refused(Exception):  # noqa: N818  no error: the parser stops here
    """The connection is refused already: nothing more of it is parsed."""


@dataclass(eq=False, slots=True)
class Peer:
    """What one address has open here."""

    connections: int = 0
    held: int = 0
    """Bytes of requests that are not complete."""
    shaking: dict[Any, None] = field(default_factory=dict)
    """Connections whose TLS handshake is under way, the oldest first."""


class _Nothing:
    """Where uvicorn would wake its handler: there is none."""

    def set(self) -> None: ...


class _Begun:
    """A coroutine that has run up to what it waits for: before anything is read, TLS has taken the transport over."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._steps = work.__await__()
        self._first = next(self._steps)

    def __await__(self) -> Generator[Any, Any, Any]:
        yield self._first
        return (yield from self._steps)


class Exchange:
    """A request and its answer without ASGI; it stands where uvicorn keeps its own."""

    __slots__ = ("came", "disconnected", "keep_alive", "message_event", "method", "parts", "response_complete", "task")

    def __init__(self, task: bytes, method: str, came: float) -> None:
        self.task, self.method, self.parts, self.response_complete = task, method, list[bytes](), False
        self.came = came
        self.keep_alive, self.disconnected, self.message_event = True, False, _NOTHING


_NOTHING = _Nothing()
TOO_LARGE = Problem("headers-too-large", f"At most {LARGEST_HEAD:,} bytes of headers are read here.")


def _in_kernel(transport: Any) -> int:
    """Bytes that were handed to the system and that the peer has not acknowledged; 0 where no system says."""
    try:
        from fcntl import ioctl
        from termios import TIOCOUTQ

        found = ioctl(transport.get_extra_info("socket").fileno(), TIOCOUTQ, bytes(4))
    except (ImportError, OSError, AttributeError, ValueError):
        return 0
    return struct.unpack("i", found)[0]


def packed_head(status: int, headers: list[Header]) -> bytes:
    lines = [STATUS_LINE[status]]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    return b"".join((*lines, b"\r\n"))


def _reset(transport: Any) -> None:
    """End a connection now, and have the system forget what it still had to send."""
    try:
        where = transport.get_extra_info("socket")
        where.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except (OSError, AttributeError, ValueError):
        pass  # then the system ends it in its own time
    transport.abort()


def connection_class(
    limits: Limits, front: Front | None = None, queue: Queue | None = None, tls: ssl.SSLContext | None = None
) -> type[HttpToolsProtocol]:
    """The class that uvicorn makes of each connection, within these limits.

    `queue` hears what is read and when. With `tls` a connection begins with a handshake; uvicorn hears of it after.
    """

    peers: dict[str, Peer] = {}
    queue = queue or Queue()
    turns = queue.turns
    everybody = Peer()
    handshakes = set[asyncio.Task[None]]()
    proxies = frozenset(limits.proxies)

    def turn(loop: asyncio.AbstractEventLoop) -> None:
        if turns.turned():
            loop.call_soon(turn, loop)

    class Connection(HttpToolsProtocol):
        _head = 0
        """Bytes of the head so far, while it comes; then 0."""
        _fields = 0
        """Bytes of header fields and trailer fields."""
        _hosts = 0
        _between = 0
        """Bytes of a chunked body that are none of its content, since the last that was; 0 of any other body."""
        _has_come = False
        _open = False
        _held = 0
        _late: asyncio.TimerHandle | None = None
        _idle: asyncio.TimerHandle | None = None
        _watch: asyncio.TimerHandle | None = None
        _unsent = -1
        _answered = 0.0
        _running: Any = None
        _source = ""
        _peer = everybody
        _made = False
        _plain: Any = None
        """The transport under TLS, while the handshake is under way."""
        _early = b""
        """What came with the end of the handshake."""

        def connection_made(self, transport: Any) -> None:
            if tls is not None and transport.get_extra_info("sslcontext") is None:
                self._begin_handshake(transport, tls)
                return
            self._made = True
            self.access_log = False  # uvicorn's lines have the query: `logs` writes ours, without
            self.timeout_keep_alive: Any = limits.idle
            super().connection_made(transport)
            self._source = source(self.client[0]) if self.client else ""
            self._peer = peers.setdefault(self._source, Peer())
            self._peer.connections += 1
            self._watch = self.loop.call_later(limits.slow, self._look_whether_taken)
            if len(self.connections) > limits.connections:
                self._refuse(Problem("busy", f"{limits.connections} connections are open already.", retry_after=5))
                return
            if self._peer.connections > limits.address_connections and self._source not in proxies:
                most = limits.address_connections
                self._refuse(Problem("busy", f"{most} connections of your address are open already.", retry_after=5))
                return
            self._late = self.loop.call_later(limits.slow, self._too_slow)

        def connection_lost(self, exc: Exception | None) -> None:
            if not self._made:  # it ended before its handshake did
                return
            self._in_time()
            for timer in (self._idle, self._watch):
                if timer is not None:
                    timer.cancel()
            self._idle = self._watch = None
            self._let_go()
            self._peer.connections -= 1
            self._forget_peer()
            running, self._running = self._running, None
            if running is not None and not running.response_complete:  # uvicorn tells the last of a pipeline alone
                running.disconnected = True
                running.message_event.set()
            self.pipeline.clear()
            super().connection_lost(exc)
            self._unset_keepalive_if_required()

        def data_received(self, data: bytes) -> None:
            if not self._made:
                self._early += data
                return
            if self.transport.is_closing():
                return
            if turns.read(time.monotonic()):
                self.loop.call_soon(turn, self.loop)
            parser: Any = self.parser
            try:
                parser.feed_data(data)
            except httptools.HttpParserUpgrade:
                pass  # the request is answered as if it had asked for no upgrade
            except httptools.HttpParserError:
                self.send_400_response("")
                return
            if not self._open or self.transport.is_closing():
                return
            if self._late is None:  # a request has begun and is not complete
                self._late = self.loop.call_later(limits.slow, self._too_slow)
            if self._head:
                self._head += len(data)
            elif self._between:
                self._between = 1 if self._has_come else self._between + len(data)
                self._has_come = False
            if self._head > LARGEST_HEAD or self._between > LARGEST_HEAD:
                self._refuse(TOO_LARGE)
                return
            self._hold(len(data))

        def on_message_begin(self) -> None:
            if self.timeout_keep_alive_task is not None:  # what is no request keeps no connection
                self._unset_keepalive_if_required()
            self._head, self._fields, self._hosts, self._between, self._open = 1, 0, 0, 0, True
            self.url, self.headers, self.expect_100_continue = b"", [], False

        def on_header(self, name: bytes, value: bytes) -> None:
            self._fields += len(name) + len(value) + 4
            if self._fields > LARGEST_HEAD:
                self._stop(TOO_LARGE)
            if not self._head:
                return  # a trailer: nobody asks for one
            name = name.lower()
            if name == b"host":
                self._hosts += 1
            elif name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

        def on_headers_complete(self) -> None:
            self._head = 0
            if self._late is not None:
                self._in_time()  # the body has its own time
            if self._fields + len(self.url) > LARGEST_HEAD:
                self._stop(TOO_LARGE)
            if self._hosts != 1:
                self._look_at_host()
            if front is not None and self.url.startswith(HOT) and self._goes_quickly(front):
                return
            self._go_the_common_way()

        def _look_at_host(self) -> None:
            """HTTP/1.1 names its host once; what is older may leave it out."""
            parser: Any = self.parser
            if self._hosts > 1 or parser.get_http_version() != "1.0":
                self._stop(Problem("bad-request", "A request names the host that it is for, once."))

        def _go_the_common_way(self) -> None:
            parser: Any = self.parser
            if parser.get_http_version() not in ("1.1", "1.0"):
                self._stop(Problem("bad-request", "HTTP/1.1 is spoken here."))
            if len(self.pipeline) >= MOST_AHEAD:
                self._stop(Problem("too-many", f"{MOST_AHEAD} requests of this connection wait.", retry_after=1))
            url, headers, expects = self.url, self.headers, self.expect_100_continue
            self._between = 1 if any(name == b"transfer-encoding" for name, _ in headers) else 0
            super().on_message_begin()
            self.url, self.expect_100_continue = url, expects
            self.headers += headers
            super().on_headers_complete()

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self._running = cycle
            super()._start_asgi_task(cycle, app)

        def on_body(self, body: bytes) -> None:
            cycle: Any = self.cycle
            if type(cycle) is not Exchange:
                self._has_come = True
                super().on_body(body)
            elif not cycle.response_complete:
                cycle.parts.append(body)

        def on_message_complete(self) -> None:
            self._open = False
            if self._held:
                self._let_go()
            if self._late is not None:
                self._in_time()
            cycle: Any = self.cycle
            if type(cycle) is not Exchange:
                super().on_message_complete()
            elif not cycle.response_complete:
                self._take(cycle)

        # --- before the first byte of HTTP ---

        def _begin_handshake(self, transport: Any, tls: ssl.SSLContext) -> None:
            """Let TLS begin, for so long; where many handshakes are under way, the oldest is given up for this one."""
            self._plain = transport
            self._source = source((transport.get_extra_info("peername") or ("",))[0])
            self._peer = peers.setdefault(self._source, Peer())
            if len(self._peer.shaking) >= limits.address_handshakes and self._source not in proxies:
                next(iter(self._peer.shaking))._give_up()
            if len(everybody.shaking) >= limits.handshakes:
                next(iter(everybody.shaking))._give_up()
            for each in (self._peer, everybody):
                each.shaking[self] = None
            begun = _Begun(
                self.loop.start_tls(transport, self, tls, server_side=True, ssl_handshake_timeout=limits.handshake)
            )
            task = self.loop.create_task(self._shake_hands(begun))
            handshakes.add(task)
            task.add_done_callback(handshakes.discard)

        async def _shake_hands(self, begun: _Begun) -> None:
            secure: Any = None
            with contextlib.suppress(OSError):  # of which TLS errors and a time that is over are some
                secure = await begun
            was_given_up = self not in everybody.shaking
            self._end_handshake()
            if was_given_up or secure is None or secure.is_closing():
                self._plain.abort()
                return
            self.connection_made(secure)
            early, self._early = self._early, b""
            if early:
                self.data_received(early)

        def _give_up(self) -> None:
            log.info("connection of %s: its handshake gave way to newer ones", self._source or "?")
            self._end_handshake()
            _reset(self._plain)

        def _end_handshake(self) -> None:
            for each in (self._peer, everybody):
                each.shaking.pop(self, None)
            self._forget_peer()

        def _forget_peer(self) -> None:
            if not self._peer.connections and not self._peer.shaking:
                peers.pop(self._source, None)

        # --- without ASGI ---

        def _goes_quickly(self, front: Front) -> bool:
            """Begin or give the answer to a check-out or check-in; False if it has to go the common way."""
            parser: Any = self.parser
            before = self.cycle
            if before is not None and not before.response_complete:  # a pipeline
                return False
            if self.flow.write_paused:  # it does not take its answers: ASGI waits until it does
                return False
            if self.expect_100_continue or parser.should_upgrade() or not parser.should_keep_alive():
                return False
            method = parser.get_method()
            task = front.look_up(method, self.url, self.headers)
            if task is None or parser.get_http_version() != "1.1":
                return False
            now = time.monotonic()
            self.cycle: Any = Exchange(task, method.decode(), now - turns.waited(now))
            try:
                if method == b"GET":
                    said = front.check_out(task, self.headers, self._source, self.server_state.default_headers)
                    self.transport.write(said)
                    self._finish(self.cycle)
                else:
                    front.begin_check_in(self._source)
            except Exception as error:
                self._fail(self.cycle, error)
            return True

        def _take(self, exchange: Exchange) -> None:
            data = exchange.parts[0] if len(exchange.parts) == 1 else b"".join(exchange.parts)
            exchange.parts.clear()
            assert front is not None
            try:
                front.check_in(exchange.task, data, self._source, lambda answer: self._say(exchange, answer))
            except Exception as error:
                self._fail(exchange, error)

        def _say(self, exchange: Exchange, answer: tuple[int, bytes] | Problem) -> None:
            if isinstance(answer, Problem):
                self._fail(exchange, answer)
                return
            assert front is not None
            status, receipt = answer
            queue.answered(time.monotonic() - exchange.came)
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
                closing = [] if exchange.keep_alive else [(b"connection", b"close")]
                head = packed_head(status, [*self.server_state.default_headers, *headers, *closing])
                self.transport.write(head + body)
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

        # --- peers that take nothing, and those that send halves ---

        def resume_writing(self) -> None:
            self._unsent = -1
            super().resume_writing()

        def _look_whether_taken(self) -> None:
            """Cut a peer off that does not take what waits for it: nothing is written meanwhile, so it should shrink.

            A connection that is being closed ends here too, if the peer does not let it end.
            """
            self._watch = self.loop.call_later(limits.slow, self._look_whether_taken)
            before, self._unsent = self._unsent, -1
            if self.flow.write_paused or self.transport.is_closing():
                self._unsent = self.transport.get_write_buffer_size() + _in_kernel(self.transport)
                if before >= 0 and before - self._unsent < min(LEAST_TAKEN * limits.slow, max(before, 1)):
                    log.info("connection of %s: it took nothing", self._source or "?")
                    _reset(self.transport)

        def _hold(self, size: int) -> None:
            """Count bytes of a request that is not complete; refuse it where there are too many of them."""
            if self.cycle is not None and self.cycle.response_complete and not self._head:
                return  # answered already: its body is not kept
            self._held += size
            self._peer.held += size
            everybody.held += size
            is_much = self._peer.held > limits.bodies // 2 and self._source not in proxies
            if is_much or everybody.held > limits.bodies:
                self._let_go()
                self._refuse(Problem("busy", "Too many requests are half sent already.", retry_after=5))

        def _let_go(self) -> None:
            self._peer.held -= self._held
            everybody.held -= self._held
            self._held = 0

        # --- refused before anybody reads it ---

        def send_400_response(self, msg: str) -> None:
            self._answer(Problem("bad-request", "This is no HTTP request that can be read."))

        def _in_time(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _too_slow(self) -> None:
            self._late = None
            if not self.transport.is_closing():
                self._refuse(Problem("too-slow", f"The request did not arrive within {limits.slow:g} seconds."))

        def _stop(self, problem: Problem) -> NoReturn:
            """Refuse from within the parser."""
            self._refuse(problem)
            raise _Refused

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
