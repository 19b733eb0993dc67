"""A small HTTP/1.1 client on asyncio and h11: what a device says to its server, and nothing else.

Bounded in time, in bytes and in connections. Every request that a device makes may be repeated: so one that meets a
connection which the server had already closed is sent once more, on a new one. Redirects are not followed: a device
talks to the server that its owner named.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crowdml.addresses import read_address
from crowdml.errors import CrowdmlError
from crowdml.records import record
from crowdml.wire.problems import LARGEST_PROBLEM, Problem

if TYPE_CHECKING:
    import h11

LARGEST_HEAD = 65_536
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG")
"""What OpenSSL says of an answer that is not TLS: it differs by version, and by what came."""
TLS_ALERT = b"\x15\x03"
LONGEST_RETRY = 7 * 86_400
"""Seconds: what a server may ask a device to wait in one answer."""
_TOO_LONG = f"sent more than {LARGEST_HEAD} bytes of headers"
_CLOSED = ("peer ", "can't handle event type ConnectionClosed")
"""How h11's sentences begin where a connection ended too early."""
_FLAWS = {
    "Receive buffer": _TOO_LONG,
    "illegal header line": "sent a malformed header",
    "bad Content-Length": "sent a malformed length",
    "conflicting Content-Length": "sent a malformed length",
    "illegal chunk header": "sent a malformed chunk",
    "malformed chunk footer": "sent a malformed chunk",
    "peer ": "closed the connection within its answer",
}
"""How h11's sentences begin, and what we say: anything else is no HTTP/1.1."""


class Unreachable(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """The server did not answer, or not in HTTP. Nothing is known about what it did: send the same bytes again."""


@record
class Limits:
    """Seconds to connect, between two pieces of an answer, for a whole request; connections; bytes of an answer."""

    connect: float = 10.0
    read: float = 30.0
    total: float = 60.0
    connections: int = 8
    largest: int = 64 * 2**20


@record
class Answer:
    """Status below 400. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Connection(asyncio.Protocol):
    """One connection, and the HTTP that is read from it. Between two requests a server has nothing to say."""

    def __init__(self) -> None:
        import h11  # with the first connection, so that importing a device does not wait for it

        self.http = h11.Connection(h11.CLIENT, LARGEST_HEAD)
        self.used = self.busy = self.ended = False
        self.came = 0
        """Bytes since the last request was sent."""
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        return not self.ended and self._transport is not None and not self._transport.is_closing()

    @property
    def unread(self) -> bytes:
        """Bytes that came and belong to no event yet."""
        return self.http.trailing_data[0]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            self.close()
            return
        self.came += len(data)
        self.http.receive_data(data)
        self._wake()

    def eof_received(self) -> None:
        self.ended = True
        self.http.receive_data(b"")
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.eof_received()

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self.busy, self.came = True, 0
        self._transport.write(data)

    def renew(self) -> bool:
        """Whether the connection may serve another request, and is ready for it."""
        import h11

        if self.ended or self.unread or {self.http.our_state, self.http.their_state} != {h11.DONE}:
            return False
        self.http.start_next_cycle()
        self.busy, self.used = False, True
        return True

    async def more(self, seconds: float) -> None:
        """Wait for another piece, or for the end; `TimeoutError` where none came in time."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._waiter
        finally:
            self._waiter = None

    def close(self) -> None:
        self.ended = True
        if self._transport is not None:
            self._transport.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Stale(Exception):  # noqa: N818  # a signal inside this module
    """The server had closed this kept connection before it read the request."""


class Client:
    """Keeps connections to one server open. `ca`: a file of certificates to trust instead of the system's."""

    def __init__(self, url: str, *, ca: Path | str | None = None, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        where = read_address(url if "://" in url else f"http://{url}")
        self.host, self.port, self.prefix = where.host, where.port, where.path
        self.url, self._authority = str(where), where.authority
        self._tls = _trust(ca) if where.scheme == "https" else None
        self._idle: deque[_Connection] = deque()
        self._slots = asyncio.Semaphore(self.limits.connections)
        self.bytes_up = self.bytes_down = 0

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        largest: int | None = None,
    ) -> Answer:
        """One request and its answer. Raises `Problem` for a refusal and `Unreachable` where there was no answer."""
        async with self._slots:
            answer = await self._exchange(method, path, body, headers or {}, largest or self.limits.largest)
        if answer.status >= 400:
            raise _problem(answer)
        if answer.status >= 300 and answer.status != 304:
            raise Unreachable(
                f"{self.url} answered {answer.status} and sent us elsewhere; a device follows no redirect. "
                "Name the address where the server itself answers."
            )
        return answer

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()
        await asyncio.sleep(0)  # a transport lets go of its socket in the next turn of the loop

    async def _exchange(self, method: str, path: str, body: bytes, headers: Mapping[str, str], largest: int) -> Answer:
        request = _request(method, self.prefix + path, self._authority, body, headers)
        deadline = asyncio.get_running_loop().time() + self.limits.total
        while True:
            connection = await self._connection(deadline)
            try:
                answer = await self._once(connection, request, body, largest, deadline)
            except _Stale:
                connection.close()
                continue
            except BaseException:
                connection.close()
                raise
            if connection.renew():
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    async def _connection(self, deadline: float) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        seconds = min(self.limits.connect, deadline - loop.time())
        try:
            async with asyncio.timeout(seconds):
                _, connection = await loop.create_connection(
                    _Connection, self.host, self.port, ssl=self._tls, happy_eyeballs_delay=0.25
                )
        except TimeoutError as error:
            raise Unreachable(f"{self.url} did not answer within {seconds:g} s.") from error
        except ssl.SSLError as error:
            if error.reason in NO_TLS:
                raise Unreachable(
                    f"{self.url}: there is no TLS on this port. Nothing was sent. "
                    f"If the server is meant to be without it, try {self._other_scheme()}."
                ) from error
            raise Unreachable(
                f"{self.url} has no certificate that we trust ({error.reason or error}). "
                "Nothing was sent. Name the server's own authority with --ca."
            ) from error
        except OSError as error:
            raise Unreachable(f"{self.url} cannot be reached: {error.strerror or error}.") from error
        except UnicodeError as error:
            raise Unreachable(f"{self.url} cannot be reached: {self.host!r} is no name of a machine.") from error
        return connection

    async def _once(
        self, connection: _Connection, request: h11.Request, body: bytes, largest: int, deadline: float
    ) -> Answer:
        """One request on one connection."""
        import h11

        http = connection.http
        data = http.send(request) + (http.send(h11.Data(body)) if body else b"") + http.send(h11.EndOfMessage())
        connection.write(data)
        self.bytes_up += len(data)
        try:
            while not isinstance(event := await self._event(connection, deadline), h11.Response):
                pass
        except h11.RemoteProtocolError as error:
            raise self._unanswered(connection, error) from error
        if connection.came - len(connection.unread) > LARGEST_HEAD:
            raise Unreachable(f"{self.url} {_TOO_LONG}.")
        status, answer = event.status_code, bytearray()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        most = min(largest, LARGEST_PROBLEM) if status >= 400 else largest
        if status not in (204, 304):
            self._bounded(whole_number(headers.get("content-length", "0")) or 0, most)
        try:
            while isinstance(event := await self._event(connection, deadline), h11.Data):
                answer += event.data
                self._bounded(len(answer), most)
        except h11.RemoteProtocolError as error:
            raise Unreachable(f"{self.url} {_flaw(error)}.") from error
        self.bytes_down += connection.came - len(connection.unread)
        return Answer(status, headers, bytes(answer))

    async def _event(self, connection: _Connection, deadline: float) -> Any:
        """The next piece of the answer, as h11 reads it. A `RemoteProtocolError` where it is none, or was cut short."""
        import h11

        while (event := connection.http.next_event()) is h11.NEED_DATA:
            await self._more(connection, deadline)
        return event

    def _unanswered(self, connection: _Connection, error: h11.RemoteProtocolError) -> Exception:
        """There is no answer in HTTP: as from a server that waits for TLS, or from one that had closed before."""
        if connection.used and not connection.came:
            return _Stale()
        speaks_tls = connection.unread.startswith(TLS_ALERT)
        if not speaks_tls and not str(error).startswith(_CLOSED):
            return Unreachable(f"{self.url} {_flaw(error)}.")
        said = f"{self.url} closed the connection before it answered."
        if self._tls is not None or connection.used:
            return Unreachable(said)
        if speaks_tls:
            return Unreachable(f"{self.url}: this port speaks TLS. Try {self._other_scheme()}.")
        return Unreachable(f"{said} If it speaks TLS, try {self._other_scheme()}.")

    def _other_scheme(self) -> str:
        return ("https" if self._tls is None else "http") + self.url[self.url.index(":") :]

    async def _more(self, connection: _Connection, deadline: float) -> None:
        left = deadline - asyncio.get_running_loop().time()
        try:
            if left <= 0:  # who sends without end would always be a little earlier than the timer
                raise TimeoutError
            await connection.more(min(self.limits.read, left))
        except TimeoutError as error:
            seconds = f"{self.limits.read:g} s to go on" if self.limits.read < left else f"{self.limits.total:g} s"
            raise Unreachable(f"{self.url} took more than {seconds} to answer.") from error

    def _bounded(self, size: int, most: int) -> None:
        if size > most:
            raise Unreachable(f"{self.url} answered with {size:,} bytes or more; a device reads at most {most:,}.")


def _trust(ca: Path | str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise CrowdmlError(f"The file of certificates {ca} cannot be used: {error}.") from error


def _request(method: str, target: str, authority: str, body: bytes, headers: Mapping[str, str]) -> h11.Request:
    import h11

    listed = [("Host", authority)]
    if body or method in ("POST", "PUT"):
        listed.append(("Content-Length", str(len(body))))
    listed += headers.items()
    try:
        return h11.Request(method=method, target=target, headers=listed)
    except (h11.LocalProtocolError, UnicodeEncodeError) as error:
        if any(set("\r\n") & {*text} for pair in (("", target), *listed) for text in pair):
            raise CrowdmlError("A request may have no line break in its path or headers.") from error
        raise CrowdmlError(f"{target} at {authority} is no address of a server: write it in plain letters.") from error


def _flaw(error: h11.RemoteProtocolError) -> str:
    """What is wrong with an answer, in our words."""
    said = str(error)
    return next((ours for theirs, ours in _FLAWS.items() if said.startswith(theirs)), "does not speak HTTP/1.1")


def _problem(answer: Answer) -> Problem:
    """The refusal, with the seconds of its Retry-After."""
    problem = Problem.decode(answer.status, answer.body)
    said = whole_number(answer.headers.get("retry-after", ""))
    seconds = problem.retry_after if said is None else said
    if seconds is not None:
        problem.extra["retry_after"] = min(seconds, LONGEST_RETRY)
    return problem


def whole_number(text: str) -> int | None:
    """The number in a header that another wrote, if it is one of at most 18 digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
