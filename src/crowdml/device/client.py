"""A small HTTP/1.1 client on asyncio: what a device says to its server, and nothing else.

Bounded in time, in bytes and in connections. Every request that a device makes may be repeated: so one that meets a
connection which the server had already closed is sent once more, on a new one. Redirects are not followed: a device
talks to the server that its owner named.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from crowdml.addresses import read_address
from crowdml.errors import CrowdmlError
from crowdml.records import record
from crowdml.wire.problems import LARGEST_PROBLEM, Problem

LARGEST_HEAD = 65_536
NO_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "PACKET_LENGTH_TOO_LONG")
"""What OpenSSL says of an answer that is not TLS: it differs by version, and by what came."""
TLS_ALERT = b"\x15\x03"
LONGEST_RETRY = 7 * 86_400
"""Seconds: what a server may ask a device to wait in one answer."""


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
    """One connection: what came and was not read yet. Between two requests a server has nothing to say."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.used = self.busy = self.ended = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def usable(self) -> bool:
        return not self.ended and self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self.busy:
            self.close()
        self.data += data
        self._wake()

    def eof_received(self) -> None:
        self.ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True
        self._wake()

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def more(self, seconds: float) -> None:
        """Wait for another piece; `EOFError` where none will come, `TimeoutError` where none came in time."""
        if self.ended:
            raise EOFError
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._waiter
        finally:
            self._waiter = None

    def take(self, size: int) -> bytes:
        taken = bytes(self.data[:size])
        del self.data[:size]
        return taken

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
        head = _head(method, self.prefix + path, self._authority, body, headers)
        deadline = asyncio.get_running_loop().time() + self.limits.total
        while True:
            connection = await self._connection(deadline)
            try:
                answer, reusable = await self._once(connection, method, head + body, largest, deadline)
            except _Stale:
                connection.close()
                continue
            except BaseException:
                connection.close()
                raise
            connection.busy = False
            if reusable and not connection.data:
                connection.used = True
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
        self, connection: _Connection, method: str, data: bytes, largest: int, deadline: float
    ) -> tuple[Answer, bool]:
        """One request on one connection; whether the connection may serve another."""
        connection.busy = True
        connection.write(data)
        self.bytes_up += len(data)
        try:
            first = await self._until(connection, b"\r\n\r\n", deadline)
        except EOFError as error:
            if connection.used and not connection.data:
                raise _Stale from error
            raise self._unanswered(connection) from error
        version, status, headers = self._parse(first)
        try:
            body, framed = await self._body(connection, method, status, headers, largest, deadline)
        except EOFError as error:
            raise Unreachable(f"{self.url} closed the connection within its answer.") from error
        self.bytes_down += len(first) + len(body)
        said = headers.get("connection", "").lower()
        keep = said != "close" if version == "HTTP/1.1" else said == "keep-alive"
        return Answer(status, headers, body), framed and keep

    def _unanswered(self, connection: _Connection) -> Unreachable:
        """It was closed without an answer in HTTP: as by a server that waits for TLS."""
        said = f"{self.url} closed the connection before it answered."
        if self._tls is not None or connection.used:
            return Unreachable(said)
        if connection.data.startswith(TLS_ALERT):
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

    async def _until(self, connection: _Connection, mark: bytes, deadline: float) -> bytes:
        """What comes up to the mark, and the mark."""
        while not 0 <= (at := connection.data.find(mark)) <= LARGEST_HEAD:
            if len(connection.data) > LARGEST_HEAD:
                raise Unreachable(f"{self.url} sent more than {LARGEST_HEAD} bytes of headers.")
            await self._more(connection, deadline)
        return connection.take(at + len(mark))

    async def _exactly(self, connection: _Connection, size: int, deadline: float) -> bytes:
        while len(connection.data) < size:
            await self._more(connection, deadline)
        return connection.take(size)

    def _parse(self, head: bytes) -> tuple[str, int, dict[str, str]]:
        lines = head.decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        code = rest[:3]
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit()):
            raise Unreachable(f"{self.url} does not speak HTTP/1.1.")
        headers: dict[str, str] = {}
        for line in lines[1:-2]:
            name, colon, value = line.partition(":")
            if not colon:
                raise Unreachable(f"{self.url} sent a malformed header.")
            headers[name.strip().lower()] = value.strip()
        return version, int(code), headers

    async def _body(
        self,
        connection: _Connection,
        method: str,
        status: int,
        headers: Mapping[str, str],
        largest: int,
        deadline: float,
    ) -> tuple[bytes, bool]:
        """The body, and whether its end was marked."""
        if method == "HEAD" or status in (204, 304) or status < 200:
            return b"", True
        most = min(largest, LARGEST_PROBLEM) if status >= 400 else largest
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return await self._chunks(connection, most, deadline), True
        length = headers.get("content-length")
        if length is not None:
            size = whole_number(length)
            if size is None:
                raise Unreachable(f"{self.url} sent a malformed length.")
            self._bounded(size, most)
            return await self._exactly(connection, size, deadline), True
        with contextlib.suppress(EOFError):
            while True:
                self._bounded(len(connection.data), most)
                await self._more(connection, deadline)
        self._bounded(len(connection.data), most)
        return connection.take(len(connection.data)), False

    async def _chunks(self, connection: _Connection, most: int, deadline: float) -> bytes:
        pieces: list[bytes] = []
        size = 0
        while True:
            line = await self._until(connection, b"\r\n", deadline)
            try:
                length = int(line.split(b";")[0].strip(), 16)
            except ValueError as error:
                raise Unreachable(f"{self.url} sent a malformed chunk.") from error
            size += length
            self._bounded(size, most)
            if length <= 0:
                while await self._until(connection, b"\r\n", deadline) != b"\r\n":
                    pass
                return b"".join(pieces)
            pieces.append(await self._exactly(connection, length, deadline))
            await self._exactly(connection, 2, deadline)

    def _bounded(self, size: int, most: int) -> None:
        if size > most:
            raise Unreachable(f"{self.url} answered with {size:,} bytes or more; a device reads at most {most:,}.")


def _trust(ca: Path | str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise CrowdmlError(f"The file of certificates {ca} cannot be used: {error}.") from error


def _head(method: str, target: str, authority: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {authority}"]
    if body or method in ("POST", "PUT"):
        lines.append(f"Content-Length: {len(body)}")
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise CrowdmlError("A request may have no line break in its path or headers.")
    try:
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    except UnicodeEncodeError as error:
        raise CrowdmlError(f"{target} at {authority} is no address of a server: write it in plain letters.") from error


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
