"""Letters between devices on one network, without the server: the same signed bytes, brought by their sender itself.

    POST /v1/letters    the signed envelope; the sender's public key in hex under Crowdml-Key

A device that listens believes such a letter as it believes a relayed one, and only from a key that the server's relay
has introduced: anybody on the network could be the first to speak from a place. It asks the server who stands at the
places of its peers whenever it reads its mail, and hears nobody whom the server has not named within the last hour: so
a device that was revoked is not heard on this way either. What a letter says is a release, for anyone to see, so
nothing here is secret and plain HTTP is enough. All letters go through the server as well: this way is shorter, and a
peer that is away costs nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from crowdml.device.client import Client, Limits, Unreachable, whole_number
from crowdml.device.letters import Arrival, Correspondence
from crowdml.device.member import Clock
from crowdml.errors import CrowdmlError
from crowdml.records import record
from crowdml.task import Task
from crowdml.wire.keys import PUBLIC_SIZE
from crowdml.wire.letters import Letter
from crowdml.wire.problems import CONTENT_TYPE, Problem

Answer = tuple[int, bytes]
"""The status of an answer, and the bytes of all of it."""
PATH = "/v1/letters"
LARGEST_HEAD = 8192
SECONDS = 10.0
"""For one letter, from the first byte to the last."""
MOST_CONNECTIONS, MOST_OF_ONE = 32, 4
"""Open at once: in all, and from one address."""
RATE, BURST = 5.0, 40.0
"""Letters a second from one address, and how many at once."""
MOST_ADDRESSES = 1024
MOST_DROPPED = 2**20
"""Bytes of a refused request that are read, so that its sender sees the answer."""
LONGEST_REST = 600.0
"""Seconds: a peer that is away is left alone for 1, 2, 4, ... of them, at most so long."""


@record(frozen=False)
class _Peer:
    """Where a peer listens, and until when it is left alone."""

    client: Client
    failures: int = 0
    rests: float = 0.0
    under_way: asyncio.Task[None] | None = None


class Peering:
    """One device's own door to its neighbours: what it brings them, and what they bring."""

    def __init__(
        self,
        letters: Correspondence,
        public: bytes,
        *,
        listen: tuple[str, int] | None = None,
        peers: Mapping[int, str] | None = None,
        clock: Clock | None = None,
        seconds: float = SECONDS,
    ) -> None:
        self.letters, self.public, self.listen = letters, public, listen
        self.clock, self.seconds = clock or Clock(), seconds
        limits = Limits(connect=2.0, read=5.0, total=5.0, connections=1, largest=65_536)
        self._peers = {place: _Peer(Client(url, limits=limits)) for place, url in (peers or {}).items()}
        self._server: asyncio.Server | None = None
        self._open: Counter[str] = Counter()
        self._spent: dict[str, tuple[float, float]] = {}
        self.answers: Counter[int] = Counter()
        """How many letters that came were answered with which status."""
        self.carried = 0
        """Letters of this device that a peer took."""
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> Peering:
        if self.listen is not None:
            host, port = self.listen
            self.letters.listens = True
            try:
                self._server = await asyncio.start_server(self._serve, host, port, limit=LARGEST_HEAD)
            except OSError as error:
                raise CrowdmlError(
                    f"--listen {host}:{port}: {error.strerror or error}. Nothing was sent. Name another port."
                ) from error
            except UnicodeError as error:
                raise CrowdmlError(f"--listen {host}:{port}: {host!r} is no name of a machine.") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        under_way = [peer.under_way for peer in self._peers.values() if peer.under_way is not None]
        for task in (*self._tasks, *under_way):
            task.cancel()
        await asyncio.gather(*self._tasks, *under_way, return_exceptions=True)
        for peer in self._peers.values():
            await peer.client.close()

    @property
    def size(self) -> tuple[int, int]:
        """Bytes sent to peers, and read from them in answer."""
        clients = [peer.client for peer in self._peers.values()]
        return sum(each.bytes_up for each in clients), sum(each.bytes_down for each in clients)

    @property
    def port(self) -> int:
        """Where it listens: of port 0, the one that the system chose."""
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    # --- what this device brings ---

    def carry(self, data: bytes) -> None:
        """Bring these bytes, which the server has acknowledged, to every peer that is there. It does not wait."""
        for peer in self._peers.values():
            busy = peer.under_way is not None and not peer.under_way.done()
            if not busy and self.clock.now() >= peer.rests:
                peer.under_way = asyncio.get_running_loop().create_task(self._bring(peer, data))

    async def _bring(self, peer: _Peer, data: bytes) -> None:
        headers = {"Content-Type": "application/msgpack", "Crowdml-Key": self.public.hex()}
        try:
            await peer.client.request("POST", PATH, data, headers, largest=65_536)
            peer.failures = 0
            self.carried += 1
        except Problem:  # it is there and did not want it: the relay has it too
            peer.failures = 0
        except Unreachable:
            peer.rests = self.clock.now() + min(LONGEST_REST, 2.0**peer.failures)
            peer.failures = min(peer.failures + 1, 30)

    # --- what peers bring ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = str((writer.get_extra_info("peername") or ("?",))[0])
        crowded = self._open.total() >= MOST_CONNECTIONS or self._open[address] >= MOST_OF_ONE
        self._open[address] += not crowded
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with asyncio.timeout(2 * self.seconds):
                if crowded:
                    answer = _answer("busy", "Too many connections are open.", retry_after=1)
                else:
                    answer = await self._within_time(reader, address)
                status, data = answer
                self.answers[status] += 1
                writer.write(data)
                await writer.drain()
                if not crowded:  # what it still sends is read and dropped, or it might not see the answer
                    await _drop(writer, reader)
        except (OSError, TimeoutError):  # it went away, or will not go: nothing to say, and nobody to say it to
            pass
        except asyncio.CancelledError:  # the device ends; asyncio would show whose letter it did not wait for
            pass
        finally:
            self._open -= Counter({address: int(not crowded)})
            self._tasks.discard(task)
            writer.close()

    async def _within_time(self, reader: asyncio.StreamReader, address: str) -> Answer:
        try:
            async with asyncio.timeout(self.seconds):
                return await self._hear(reader, address)
        except TimeoutError:
            return _answer("too-slow", f"A letter has {self.seconds:g} s.")

    async def _hear(self, reader: asyncio.StreamReader, address: str) -> Answer:
        """One request, read within its bounds; the letter in it is believed or it is not."""
        import h11  # with the first letter, so that importing a device does not wait for it

        http = h11.Connection(h11.SERVER, LARGEST_HEAD)

        async def event() -> Any:
            while (found := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await reader.read(LARGEST_HEAD))
            return found

        try:
            request: h11.Request = await event()
        except h11.RemoteProtocolError as error:
            return _UNMEASURED if "Content-Length" in str(error) else _NO_REQUEST
        if sum(len(name) + len(value) for name, value in request.headers) + len(request.target) > LARGEST_HEAD:
            return _NO_REQUEST
        headers = {name: value.decode("latin-1") for name, value in request.headers}
        if request.target.decode() != PATH:
            return _answer("not-found", f"A device takes letters at {PATH}, and nothing else.")
        if request.method != b"POST":
            return _answer("method", f"{PATH} takes POST alone.")
        length, key = whole_number(headers.get(b"content-length", "")), headers.get(b"crowdml-key", "")
        if b"transfer-encoding" in headers or length is None:
            return _UNMEASURED
        if length > (limit := self.letters.largest):
            return _answer("too-large", f"A letter of this task has at most {limit:,} bytes.", limit=limit)
        if not self._within_rate(address):
            return _answer("too-many", f"An address may bring {RATE:g} letters a second.", retry_after=1)
        try:
            public, body = bytes.fromhex(key) if len(key) == 2 * PUBLIC_SIZE else b"", b""
            while isinstance(found := await event(), h11.Data):
                body += found.data
        except (ValueError, h11.RemoteProtocolError):
            return _answer("bad-request", "The key is not in hex, or the letter ended early.")
        return _ANSWERS[self.letters.bring(Letter(0, public, body))]

    def _within_rate(self, address: str) -> bool:
        """A bucket for each address; who fills the list of them is no neighbour of ours."""
        now = self.clock.now()
        left, then = self._spent.pop(address, (BURST, now))
        left = min(BURST, left + max(0.0, now - then) * RATE)
        self._spent[address] = (max(0.0, left - 1), now)
        if len(self._spent) > MOST_ADDRESSES:
            del self._spent[next(iter(self._spent))]
        return left >= 1


async def _drop(writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
    if writer.can_write_eof():
        writer.write_eof()
    left = MOST_DROPPED
    while left > 0 and (piece := await reader.read(65_536)):
        left -= len(piece)


def _answer(why: str, detail: str, **extra: int) -> Answer:
    """A refusal, in the one shape that refusals have."""
    problem = Problem(why, detail, **extra)
    more = {"Content-Type": CONTENT_TYPE}
    if problem.retry_after is not None:
        more["Retry-After"] = str(problem.retry_after)
    if why == "method":
        more["Allow"] = "POST"
    return _framed(problem.status, problem.encode(), more)


def _framed(status: int, body: bytes = b"", more: Mapping[str, str] | None = None) -> Answer:
    headers = {"Content-Length": str(len(body)), "Connection": "close", **(more or {})}
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    return status, ("\r\n".join(lines) + "\r\n\r\n").encode() + body


_NO_REQUEST = _answer("bad-request", f"This is no request with a head of at most {LARGEST_HEAD} bytes.")
_UNMEASURED = _answer("length-required", "Say Content-Length, and send the bytes as they are.")
_ANSWERS: Mapping[Arrival, Answer] = {
    "taken": _framed(202),
    "again": _framed(200),
    "full": _answer("busy", "Many letters from this place wait to be heard.", retry_after=1),
    "unknown": _answer(
        "conflict", "The server has not introduced this sender, or has not named it within the hour: it is heard there."
    ),
    "refused": _answer("wrong-message", "This is no letter that its sender signed to this device, as the task has it."),
}


def parse_listen(text: str) -> tuple[str, int]:
    """'192.168.1.7:8790', '[::1]:8790'."""
    host, colon, port = text.rpartition(":")
    number = whole_number(port)
    if colon and host and number is not None and number < 65_536:
        return host.strip("[]"), number
    raise CrowdmlError(f"--listen {text}: write HOST:PORT, such as 192.168.1.7:8790.")


def parse_peers(texts: tuple[str, ...], task: Task, near: frozenset[int]) -> dict[int, str]:
    """'High Street=http://192.168.1.8:8790': places by name or number. Only peers are written to."""
    names, found = [place.name for place in task.places], dict[int, str]()
    for text in texts:
        name, equals, url = text.rpartition("=")
        place = names.index(name) if name in names else whole_number(name)
        if not equals or place is None or place not in near:
            listed = ", ".join(names[each] for each in sorted(near))
            raise CrowdmlError(f"--peer {text}: write NAME=URL. The peers of this place are {listed}.")
        Client(url)  # which says what is wrong with an address
        found[place] = url
    return found
