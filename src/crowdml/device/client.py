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
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from crowdml.errors import CrowdmlError
from crowdml.wire.problems import LARGEST_PROBLEM, Problem

__all__ = ["Answer", "Client", "Limits", "Unreachable"]

T = TypeVar("T")

LARGEST_HEAD = 65_536
LONGEST_RETRY = 7 * 86_400
"""Seconds: what a server may ask a device to wait in one answer."""


class Unreachable(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """The server did not answer, or not in HTTP. Nothing is known about what it did: send the same bytes again."""


@dataclass(frozen=True)
class Limits:
    """Seconds to connect, between two pieces of an answer, for a whole request; connections; bytes of an answer."""

    connect: float = 10.0
    read: float = 30.0
    total: float = 60.0
    connections: int = 8
    largest: int = 64 * 2**20


@dataclass(frozen=True)
class Answer:
    """Status below 400. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False

    def close(self) -> None:
        self.writer.close()


class _Stale(Exception):  # noqa: N818  # a signal inside this module
    """The server had closed this kept connection before it read the request."""


class Client:
    """Keeps connections to one server open. `ca`: a file of certificates to trust instead of the system's."""

    def __init__(self, url: str, *, ca: Path | str | None = None, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise CrowdmlError(f"{url!r} is no address of a server. Write one like https://study.example:8443.")
        try:
            port = parts.port
        except ValueError as error:
            raise CrowdmlError(f"{url!r} has no usable port: {error}.") from error
        self.host, self.port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        self.url = f"{parts.scheme}://{parts.netloc}{self.prefix}"
        self._authority = parts.netloc.rpartition("@")[2]
        self._tls = _trust(ca) if parts.scheme == "https" else None
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
            try:
                async with asyncio.timeout(self.limits.total):
                    answer = await self._exchange(method, path, body, headers or {}, largest or self.limits.largest)
            except TimeoutError as error:
                raise Unreachable(f"{self.url} took more than {self.limits.total:g} s to answer.") from error
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
            connection = self._idle.pop()
            connection.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await connection.writer.wait_closed()

    async def _exchange(self, method: str, path: str, body: bytes, headers: Mapping[str, str], largest: int) -> Answer:
        head = _head(method, self.prefix + path, self._authority, body, headers)
        while True:
            connection = await self._connection()
            try:
                answer, reusable = await self._once(connection, method, head + body, largest)
            except _Stale:
                connection.close()
                continue
            except BaseException:
                connection.close()
                raise
            if reusable:
                connection.used = True
                self._idle.append(connection)
            else:
                connection.close()
            return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.close()
        try:
            async with asyncio.timeout(self.limits.connect):
                reader, writer = await asyncio.open_connection(
                    self.host, self.port, ssl=self._tls, limit=LARGEST_HEAD, happy_eyeballs_delay=0.25
                )
        except TimeoutError as error:
            raise Unreachable(f"{self.url} did not answer within {self.limits.connect:g} s.") from error
        except ssl.SSLError as error:
            raise Unreachable(
                f"{self.url} has no certificate that we trust ({error.reason or error}). "
                "Nothing was sent. Name the server's own authority with --ca."
            ) from error
        except OSError as error:
            raise Unreachable(f"{self.url} cannot be reached: {error.strerror or error}.") from error
        return _Connection(reader, writer)

    async def _once(self, connection: _Connection, method: str, data: bytes, largest: int) -> tuple[Answer, bool]:
        """One request on one connection; whether the connection may serve another."""
        try:
            connection.writer.write(data)
            await connection.writer.drain()
            self.bytes_up += len(data)
            first = await self._within(connection.reader.readuntil(b"\r\n\r\n"))
        except asyncio.LimitOverrunError as error:
            raise Unreachable(f"{self.url} sent more than {LARGEST_HEAD} bytes of headers.") from error
        except (OSError, asyncio.IncompleteReadError, ssl.SSLError) as error:
            partial = getattr(error, "partial", b"")
            if connection.used and not partial and not isinstance(error, TimeoutError):
                raise _Stale from error
            raise Unreachable(f"{self.url} closed the connection before it answered.") from error
        version, status, headers = self._parse(first)
        try:
            body, framed = await self._body(connection.reader, method, status, headers, largest)
        except (OSError, asyncio.IncompleteReadError, ssl.SSLError) as error:
            raise Unreachable(f"{self.url} closed the connection within its answer.") from error
        self.bytes_down += len(first) + len(body)
        said = headers.get("connection", "").lower()
        keep = said != "close" if version == "HTTP/1.1" else said == "keep-alive"
        return Answer(status, headers, body), framed and keep

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
        self, reader: asyncio.StreamReader, method: str, status: int, headers: Mapping[str, str], largest: int
    ) -> tuple[bytes, bool]:
        """The body, and whether its end was marked."""
        if method == "HEAD" or status in (204, 304) or status < 200:
            return b"", True
        most = min(largest, LARGEST_PROBLEM) if status >= 400 else largest
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return await self._chunks(reader, most), True
        length = headers.get("content-length")
        if length is not None:
            if not (length.isascii() and length.isdigit()):
                raise Unreachable(f"{self.url} sent a malformed length.")
            self._bounded(int(length), most)
            return await self._within(reader.readexactly(int(length))), True
        pieces, size = [], 0
        while piece := await self._within(reader.read(65_536)):
            size += len(piece)
            self._bounded(size, most)
            pieces.append(piece)
        return b"".join(pieces), False

    async def _chunks(self, reader: asyncio.StreamReader, most: int) -> bytes:
        pieces, size = [], 0
        while True:
            line = await self._within(reader.readuntil(b"\r\n"))
            try:
                length = int(line.split(b";")[0].strip(), 16)
            except ValueError as error:
                raise Unreachable(f"{self.url} sent a malformed chunk.") from error
            size += length
            self._bounded(size, most)
            if length <= 0:
                while await self._within(reader.readuntil(b"\r\n")) != b"\r\n":
                    pass
                return b"".join(pieces)
            pieces.append(await self._within(reader.readexactly(length)))
            await self._within(reader.readexactly(2))

    def _bounded(self, size: int, most: int) -> None:
        if size > most:
            raise Unreachable(f"{self.url} answered with {size:,} bytes or more; a device reads at most {most:,}.")

    async def _within(self, reading: Awaitable[T]) -> T:
        async with asyncio.timeout(self.limits.read):
            return await reading


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
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _problem(answer: Answer) -> Problem:
    """The refusal, with the seconds of its Retry-After."""
    problem = Problem.decode(answer.status, answer.body)
    seconds = answer.headers.get("retry-after", "")
    if seconds.isascii() and seconds.isdigit():
        problem.extra["retry_after"] = min(int(seconds), LONGEST_RETRY)
    return problem
