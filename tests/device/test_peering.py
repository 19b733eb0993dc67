"""Letters that devices bring each other themselves: over real sockets, to a real device, beside a real relay."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from loopback import LoopbackServer, QuickClock, serving, small_task
from neighbours import STREET, Scribe, Watched, at_place, readings, stand

from crowdml.cli import cli
from crowdml.device.client import Unreachable
from crowdml.device.folder import Folder
from crowdml.device.learning import recall
from crowdml.device.letters import MOST_WAITING, TRUSTED_FOR, Correspondence, HeardNumbers, Post
from crowdml.device.peering import (
    BURST,
    LARGEST_HEAD,
    LONGEST_REST,
    MOST_OF_ONE,
    PATH,
    Peering,
    parse_listen,
    parse_peers,
)
from crowdml.device.sources import LiveSource
from crowdml.errors import CrowdmlError
from crowdml.protocol import Context
from crowdml.protocols import find
from crowdml.wire.envelopes import open_signed

PROTOCOL = find(STREET)
BATCH = 8
HERE = ("127.0.0.1", 0)
GOOD, OTHER, NEW = Scribe(2), Scribe(2), Scribe(0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LoopbackServer]:
    with serving(tmp_path / "server", STREET) as server:
        yield server


def post(place: int = 1, marks: Post | None = None, near: Scribe | None = None) -> tuple[Correspondence, Any]:
    """The letters of a device, which the server told that `GOOD` stands at its place, and `near` where it is given."""
    state = PROTOCOL.device.start(STREET, Context(me="f" * 32, place=place)).state
    made = Correspondence(STREET, PROTOCOL, "f" * 32, place, marks or Post())
    made.stand({each.place: each.key.id for each in (GOOD, near) if each is not None})
    return made, state


@dataclass
class Told:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def slug(self) -> str:
        return json.loads(self.body)["type"].removeprefix("/problems/")


async def say(port: int, data: bytes, *, end: bool = False) -> Told:
    """These bytes to a port, as anybody could send them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in rest)
    assert int(headers["content-length"]) == len(body)
    return Told(int(first.split(" ")[1]), headers, body)


def request(
    body: bytes, key: str = "00" * 32, *, method: str = "POST", path: str = PATH, length: str | None = None
) -> bytes:
    size = str(len(body)) if length is None else length
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\nCrowdml-Key: {key}\r\n\r\n".encode() + body
    )


def brought_by(scribe: Scribe, *arguments: Any, **changes: Any) -> bytes:
    return request(scribe.letter(*arguments, **changes).signed, scribe.key.public.hex())


# --- a live street ---


@dataclass
class Neighbour:
    """A device in a loop of its own that listens, and waits for samples until it is let go."""

    folder: Path
    server: LoopbackServer
    place: int
    let_go: threading.Event = field(default_factory=threading.Event)
    time_: QuickClock = field(default_factory=QuickClock)

    async def __aenter__(self) -> Neighbour:
        self.client = Watched(self.server.address)
        self.fleet = at_place(self.folder, self.place, self.client, self.time_)
        self.fleet.listen = HERE
        await self.fleet.enrol(self.server.code, None)
        self.task = asyncio.create_task(self.fleet.run(lambda _: LiveSource(self._values, STREET, 100)))
        await until(lambda: self.fleet.peering is not None)
        assert self.fleet.peering is not None
        self.peering = self.fleet.peering
        return self

    def _values(self) -> Iterator[Any]:
        self.let_go.wait(30)
        yield from ()

    @property
    def post(self) -> Post:
        letters = self.fleet.runners[0].letters
        assert letters is not None
        return letters.post

    async def ends(self) -> Any:
        self.let_go.set()
        return await asyncio.wait_for(self.task, 30)

    async def __aexit__(self, *_: object) -> None:
        self.let_go.set()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.client.close()


@dataclass
class Eventful(QuickClock):
    """A time in which something happens whenever somebody sleeps."""

    between: Callable[[], object] = lambda: None

    async def sleep(self, seconds: float) -> None:
        self.between()
        await super().sleep(seconds)


async def until(true: Any) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.005)


def test_a_letter_that_comes_from_its_sender_and_through_the_relay_is_heard_once(
    server: LoopbackServer, tmp_path: Path
):
    async def whole() -> None:
        scribe = Scribe(1)
        await scribe.join(server)
        async with Neighbour(tmp_path / "device", server, 0) as device:
            port = device.peering.port
            told = await say(port, brought_by(scribe, 0))
            assert (told.status, told.slug) == (409, "conflict")  # nobody introduced it yet
            await scribe.check_in(server, scribe.letter(0).signed)
            await until(lambda: device.post.heard == 1)
            device.client.instead = lambda method, path: _closed(path)  # from here on the relay is away
            told = await say(port, brought_by(scribe, 1))
            assert told.status == 202
            await until(lambda: device.post.heard == 2)
            told = await say(port, brought_by(scribe, 1))
            assert told.status == 200
            await scribe.check_in(server, scribe.letter(1).signed)
            await scribe.check_in(server, scribe.letter(2).signed)
            device.client.instead = lambda method, path: None
            await until(lambda: device.post.heard == 3)
            summary = await device.ends()
        assert (summary.letters.heard, summary.letters.brought, summary.letters.turned_away) == (3, 1, 1)
        assert summary.letters.bytes == sum(len(scribe.letter(batch).signed) for batch in range(3))
        assert summary.letters.refused == {}

    asyncio.run(whole())
    with Folder(tmp_path / "device").ledger() as ledger:
        _, heard, state = recall(ledger, STREET, PROTOCOL)
    assert heard.heard == 3
    assert state.batches[0].tolist() == [0, 1, 2, -1, -1, -1]


@dataclass
class Steady(QuickClock):
    """A time that goes on as the machine's does, and does not wait."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0.005)


def test_a_device_that_was_revoked_is_no_longer_heard_by_a_peer_that_listens(server: LoopbackServer, tmp_path: Path):
    """Issue 11, section 4: who listened heard a revoked device for as long as it could reach it."""

    async def whole() -> None:
        scribe = Scribe(1)
        await scribe.join(server)
        await scribe.check_in(server, scribe.letter(0).signed)
        async with Neighbour(tmp_path / "device", server, 0, time_=Steady()) as device:
            await until(lambda: device.post.heard == 1)
            assert (await say(device.peering.port, brought_by(scribe, 1))).status == 202
            await until(lambda: device.post.heard == 2)
            assert await asyncio.to_thread(server.call, server.hub.revoke(scribe.key.id))
            letters = device.fleet.runners[0].letters
            assert letters is not None
            await until(lambda: not letters._stands(1, scribe.key.id))  # it asks again at its next look
            told = await say(device.peering.port, brought_by(scribe, 2))
            assert (told.status, told.slug) == (409, "conflict")
            summary = await device.ends()
        assert (summary.letters.heard, summary.letters.brought, summary.letters.turned_away) == (2, 1, 1)

    asyncio.run(whole())


def test_a_letter_that_waited_when_its_sender_was_revoked_is_not_heard():
    letters, state = post()
    letters.hear(state, [GOOD.letter(0)], 0.0)
    assert letters.bring(GOOD.letter(1)) == "taken"
    letters.stand({})
    assert letters.take() == []
    assert letters.bring(GOOD.letter(2)) == "unknown"
    letters.stand({GOOD.place: OTHER.key.id})  # another device took the place over
    assert letters.bring(GOOD.letter(2)) == "unknown"


def test_the_word_of_the_server_on_who_stands_where_holds_for_an_hour():
    letters, state = post()
    letters.hear(state, [GOOD.letter(0)], 0.0)
    said = letters.now()
    for later, answer in ((TRUSTED_FOR, "taken"), (TRUSTED_FOR + 1, "unknown"), (-1.0, "unknown")):
        letters, state = post()
        letters.hear(state, [GOOD.letter(0)], 0.0)
        letters.now = lambda: said
        letters.stand({GOOD.place: GOOD.key.id})
        letters.now = lambda moment=said + later: moment
        assert letters.bring(GOOD.letter(1)) == answer


def _closed(path: str) -> Exception | None:
    return Unreachable("away") if "mailbox" in path else None


def test_a_device_brings_what_the_server_acknowledged_and_nothing_else(server: LoopbackServer, tmp_path: Path):
    """The same bytes as in the journal, so nothing that was not charged."""
    came: list[bytes] = []

    async def listens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        came.append(await reader.readexactly(length))
        journalled = [body for _, body in server.hub.store.tail(STREET.hash)]
        assert came[-1] in journalled
        writer.write(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def whole() -> tuple[Any, Any]:
        heard = await asyncio.start_server(listens, *HERE)
        port = heard.sockets[0].getsockname()[1]
        async with heard:
            return await stand(
                tmp_path / "device",
                server,
                0,
                readings(4 * BATCH + 3),
                peers={1: f"http://127.0.0.1:{port}", 2: "http://127.0.0.1:9"},
            )

    fleet, summary = asyncio.run(whole())
    assert 1 <= len(came) <= 4
    assert summary.check_ins == 4
    assert summary.letters.carried == len(came)
    assert summary.bytes_up == fleet.client.bytes_up + fleet.peering.size[0] > fleet.client.bytes_up
    with Folder(tmp_path / "device").ledger() as ledger:
        charged = ledger.charges()
    assert len(charged) == 4
    assert all(open_signed(each).envelope.task == STREET.hash for each in came)


def test_a_peer_that_is_away_is_left_alone_for_growing_rests_and_costs_nothing():
    async def whole() -> None:
        quick, (letters, _) = QuickClock(), post()
        async with Peering(letters, bytes(32), peers={2: "http://127.0.0.1:9"}, clock=quick.clock) as door:
            peer, rests = door._peers[2], []
            for _ in range(14):
                door.carry(b"x")
                assert peer.under_way is not None
                await peer.under_way
                tried = peer.under_way
                rests.append(peer.rests - quick.now())
                door.carry(b"x")
                assert peer.under_way is tried  # left alone
                quick.ahead += rests[-1]
        assert [round(rest) for rest in rests] == [min(2**each, LONGEST_REST) for each in range(14)]
        assert door.carried == 0

    asyncio.run(whole())


# --- who is turned away ---


KEY = GOOD.key.public.hex()
TURNED_AWAY = {
    "garbage": (request(b"\x00" * 100, KEY), 422, "wrong-message"),
    "nothing": (request(b"", KEY), 422, "wrong-message"),
    "no http": (b"\x16\x03\x01 hello\r\n\r\n", 400, "bad-request"),
    "no host": (f"POST {PATH} HTTP/1.1\r\nContent-Length: 0\r\n\r\n".encode(), 400, "bad-request"),
    "an endless head": (b"POST " + b"a" * (2 * LARGEST_HEAD), 400, "bad-request"),
    "a head that is too long": (request(b"", "0" * LARGEST_HEAD), 400, "bad-request"),
    "another path": (request(b"", KEY, path="/v1/tasks"), 404, "not-found"),
    "another method": (request(b"", KEY, method="GET"), 405, "method"),
    "no length": (f"POST {PATH} HTTP/1.1\r\nHost: x\r\nCrowdml-Key: {KEY}\r\n\r\n".encode(), 411, "length-required"),
    "chunks": (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
        411,
        "length-required",
    ),
    "a negative length": (request(b"", KEY, length="-1"), 411, "length-required"),
    "too long": (request(b"", KEY, length="1000000"), 413, "too-large"),
    "too long, and sent": (request(b"x" * 300_000, KEY), 413, "too-large"),
    "no key": (request(GOOD.letter(1).signed, ""), 422, "wrong-message"),
    "a key that is none": (request(GOOD.letter(1).signed, "zz" * 32), 400, "bad-request"),
    "a forged sender": (request(GOOD.letter(1).signed, OTHER.key.public.hex()), 422, "wrong-message"),
    "a changed byte": (request(GOOD.letter(1).signed[:-1] + b"\x00", KEY), 422, "wrong-message"),
    "another key for a place that is known": (brought_by(OTHER, 1), 422, "wrong-message"),
    "a place that nobody introduced": (brought_by(NEW, 1), 409, "conflict"),
    "a place that is no peer": (brought_by(Scribe(4), 1, to=frozenset(("@1",))), 422, "wrong-message"),
    "to somebody else": (brought_by(GOOD, 1, to=frozenset(("@0",))), 422, "wrong-message"),
    "another task": (brought_by(GOOD, 1, task=b"t" * 32), 422, "wrong-message"),
    "another shape": (brought_by(GOOD, 1, counts=(1, 2)), 422, "wrong-message"),
    "beyond the noise": (brought_by(GOOD, 1, counts=(-10_000, 2, 3)), 422, "wrong-message"),
}


@pytest.mark.parametrize("name", TURNED_AWAY)
def test_what_is_no_letter_to_this_device_gets_a_clear_status_and_changes_nothing(name: str):
    data, status, slug = TURNED_AWAY[name]

    async def whole() -> None:
        letters, state = post(near=NEW)  # which the server knows, and this device has not heard
        state, *_ = letters.hear(state, [GOOD.letter(0)], 0.0)
        before = letters.post
        async with Peering(letters, bytes(32), listen=HERE) as door:
            told = await say(door.port, data)
            assert (told.status, told.slug) == (status, slug)
            assert told.headers["content-type"] == "application/problem+json"
            assert (letters.post, letters.has_brought) == (before, False)
            good = await say(door.port, brought_by(GOOD, 1))
            assert good.status == 202
        assert dict(door.answers) == {status: 1, 202: 1}

    asyncio.run(whole())


def test_who_stops_within_a_letter_is_not_waited_for():
    async def whole() -> None:
        letters, state = post()
        letters.hear(state, [GOOD.letter(0)], 0.0)
        async with Peering(letters, bytes(32), listen=HERE, seconds=0.05) as door:
            whole = brought_by(GOOD, 1)
            for cut in (10, len(whole) - 3):
                told = await say(door.port, whole[:cut])
                assert (told.status, told.slug) == (408, "too-slow")
                told = await say(door.port, whole[:cut], end=True)
                assert told.status == 400
            assert not letters.has_brought

    asyncio.run(whole())


def test_one_address_opens_so_many_connections_and_brings_so_many_letters_and_others_are_heard():
    async def whole() -> None:
        letters, state = post()
        letters.hear(state, [GOOD.letter(0)], 0.0)
        async with Peering(letters, bytes(32), listen=HERE, clock=QuickClock().clock) as door:
            held = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(MOST_OF_ONE)]
            await until(lambda: door._open.total() == MOST_OF_ONE)
            told = await say(door.port, b"")
            assert (told.status, told.headers["retry-after"]) == (503, "1")
            for _, writer in held:
                writer.close()
            await until(lambda: door._open.total() == 0)
            statuses = [await say(door.port, request(b"junk", KEY)) for _ in range(int(BURST) + 10)]
            assert {each.status for each in statuses} == {422, 429}
            door._spent.clear()  # as from another address
            good = await say(door.port, brought_by(GOOD, 1))
            assert good.status == 202

    asyncio.run(whole())


def test_a_peer_that_brings_letters_without_end_keeps_nobody_elses_in_the_mailbox(
    server: LoopbackServer, tmp_path: Path
):
    async def whole() -> None:
        loud, other = Scribe(0), Scribe(2)
        for each in (loud, other):
            await each.join(server)
        await loud.check_in(server, loud.letter(0).signed)
        async with Neighbour(tmp_path / "device", server, 1, time_=(time_ := Eventful())) as device:
            await until(lambda: 0 in device.post.keys)
            letters, said = device.fleet.runners[0].letters, itertools.count(1)
            assert letters is not None
            time_.between = lambda: letters.bring(loud.letter(next(said)))
            await until(lambda: device.post.heard > 10)
            await other.check_in(server, other.letter(0).signed)
            await until(lambda: 2 in device.post.keys)

    asyncio.run(whole())


def test_a_device_that_ends_while_somebody_holds_its_door_open_says_nothing_of_it():
    said: list[Any] = []

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: said.append(what))
        letters, _ = post()
        async with Peering(letters, bytes(32), listen=HERE) as door:
            _, writer = await asyncio.open_connection("127.0.0.1", door.port)
            await until(lambda: door._open.total() == 1)
        writer.close()
        await asyncio.sleep(0)

    asyncio.run(whole())
    assert not said


def test_a_peer_that_brings_many_letters_fills_its_own_shelf_and_no_others():
    letters, state = post(near=(near := Scribe(0)))
    letters.hear(state, [GOOD.letter(0), near.letter(0)], 0.0)
    woken: list[None] = []
    letters.arrived = lambda: woken.append(None)
    answers = [letters.bring(GOOD.letter(batch)) for batch in range(1, MOST_WAITING + 3)]
    assert answers == ["taken"] * MOST_WAITING + ["full"] * 2
    assert letters.bring(near.letter(1)) == "taken"
    assert letters.bring(near.letter(1)) == "again"
    assert len(woken) == 1  # heard together
    _, heard, flaws = letters.hear(state, letters.take(), 0.0)
    assert (heard, flaws) == (MOST_WAITING + 1, ())
    assert letters.bring(GOOD.letter(1)) == "again"
    assert not letters.has_brought


def test_what_was_heard_from_its_sender_is_not_heard_again_from_the_relay_after_a_restart():
    letters, state = post()
    state, *_ = letters.hear(state, [GOOD.letter(0)], 0.0)
    assert letters.bring(GOOD.letter(3)) == "taken"
    state, *_ = letters.hear(state, letters.take(), 0.0)
    again, _ = post(marks=Post.of(letters.post.plain()))
    assert again.post == letters.post
    relayed = [GOOD.letter(batch) for batch in range(5)]
    state, heard, _ = again.hear(state, relayed, 0.0)
    assert (heard, again.post.heard) == (3, 5)  # 1, 2 and 4: those between are heard though they came later
    assert state.batches[1].tolist() == [0, 1, 2, 3, 4, -1]


def test_marks_tell_what_was_heard_up_to_their_width_and_numbers_from_afar_cost_nothing():
    marks = HeardNumbers()
    for number in (5, 3, 2**62, 2**62 + 2):
        assert not marks.has(number, 8)
        marks = marks.add(number, 8)
        assert marks.has(number, 8)
    assert not marks.has(2**62 + 1, 8)
    assert marks.has(2**62 - 6, 8)  # too old to tell
    assert not marks.has(2**62 - 5, 8)
    assert marks.bits < 2**8
    assert HeardNumbers.of(marks.newest, marks.packed) == marks


# --- options ---


def test_addresses_are_read_and_only_peers_are_written_to():
    assert parse_listen("192.168.1.7:8790") == ("192.168.1.7", 8790)
    assert parse_listen("[::1]:0") == ("::1", 0)
    near = frozenset((0, 2))
    names = [place.name for place in STREET.places]
    assert parse_peers((f"{names[2]}=http://h:1", "0=http://g:2"), STREET, near) == {2: "http://h:1", 0: "http://g:2"}
    for text in ("8790", "host:", ":1", "h:65536", "h:x", f"h:{'9' * 5000}"):
        with pytest.raises(CrowdmlError, match="write HOST:PORT"):
            parse_listen(text)
    for text in ("http://h:1", f"{names[4]}=http://h:1", "9=http://h:1", "=http://h:1", f"{'9' * 5000}=http://h:1"):
        with pytest.raises(CrowdmlError, match=f"The peers of this place are {names[0]}, {names[2]}"):
            parse_peers((text,), STREET, near)
    with pytest.raises(CrowdmlError, match="is no address"):
        parse_peers(("0=ftp://h",), STREET, near)


def test_a_port_that_is_taken_is_said_before_anything_is_sent():
    async def whole() -> None:
        letters, _ = post()
        async with Peering(letters, bytes(32), listen=HERE) as first:
            with pytest.raises(CrowdmlError, match="Name another port"):
                async with Peering(letters, bytes(32), listen=("127.0.0.1", first.port)):
                    pass
        with pytest.raises(CrowdmlError, match="no name of a machine"):
            async with Peering(letters, bytes(32), listen=("..", 0)):
                pass

    asyncio.run(whole())


def join(server: LoopbackServer, folder: Path, lines: Any, *options: str) -> Result:
    """The command in this process, in a folder of its own."""
    (folder / "source.csv").write_text("\n".join(map(str, lines)))
    given = ["--source", f"csv:{folder / 'source.csv'}", "--folder", str(folder / "device"), "--yes", *options]
    return CliRunner().invoke(cli, ["join", server.address, server.code, *given], prog_name="crowdml")


def test_join_says_where_it_listens_and_counts_what_was_brought(server: LoopbackServer, tmp_path: Path):
    options = ("--place", "corner 0", "--listen", "127.0.0.1:0", "--peer", "1=http://127.0.0.1:9", "--json", "-")
    done = join(server, tmp_path, readings(BATCH + 3), *options)
    assert done.exit_code == 0, done.stderr
    assert "Peers may bring letters to 127.0.0.1:" in done.stderr
    told = json.loads(done.stdout)
    assert told["check_ins"] == 1
    assert [told["letters"][name] for name in ("brought", "turned_away", "carried")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--listen", "8790"), "write HOST:PORT"),
        (("--peer", "corner 4=http://127.0.0.1:9"), "The peers of this place are corner 1, corner 2"),
    ],
)
def test_a_wrong_address_is_said_before_the_server_hears_of_a_device(
    server: LoopbackServer, tmp_path: Path, options: tuple[str, str], sentence: str
):
    before = len(server.hub.keys)
    done = join(server, tmp_path, range(20), "--place", "0", *options)
    assert (done.exit_code, len(server.hub.keys)) == (1, before)
    assert sentence in done.stderr


def test_devices_without_peers_do_not_listen(tmp_path: Path):
    with serving(tmp_path / "server", small_task(samples=20)) as other:
        done = join(other, tmp_path, ["0.1,0.2,0.3,0.4,a"] * 5, "--listen", "127.0.0.1:0")
    assert done.exit_code == 1
    assert "have no peers. Leave them out." in done.stderr
