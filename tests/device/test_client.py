"""The small HTTP client against servers that answer byte by byte what a test says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from crowdml.device.client import LONGEST_RETRY, Client, Limits, Unreachable
from crowdml.errors import CrowdmlError
from crowdml.wire.problems import Problem

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nETag: "1"\r\n\r\nhi'


async def request_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next((line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), b":0")
    return head + await reader.readexactly(int(length.split(b":")[1]))


def talk(server: Talk, ask: Callable[[Client], Awaitable[object]], limits: Limits | None = None) -> object:
    async def whole() -> object:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await server(reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        listening = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        client = Client(f"http://127.0.0.1:{port}/base/", limits=limits)
        try:
            return await ask(client)
        finally:
            await client.close()
            listening.close()

    return asyncio.run(whole())


def answering(*answers: bytes) -> Talk:
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await request_of(reader)
            writer.write(answer)
            await writer.drain()

    return server


def get(path: str = "/x", **options: int) -> Callable[[Client], Awaitable[object]]:
    return lambda client: client.request("GET", path, **options)


def test_a_request_carries_its_path_host_headers_and_body():
    seen: list[bytes] = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request_of(reader))
        writer.write(OK)
        await writer.drain()

    answer = talk(server, lambda client: client.request("POST", "/v1/x?y=1", b"body", {"X-A": "b"}))
    assert seen[0].startswith(b"POST /base/v1/x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"X-A: b\r\n" in seen[0]
    assert seen[0].endswith(b"\r\n\r\nbody")
    assert (answer.status, answer.body, answer.headers["etag"]) == (200, b"hi", '"1"')


def test_one_connection_serves_many_requests():
    connections = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        await answering(OK, OK, OK)(reader, writer)

    async def ask(client: Client) -> None:
        for _ in range(3):
            await client.request("GET", "/x")

    talk(server, ask)
    assert len(connections) == 1


def test_a_kept_connection_that_the_server_closed_is_replaced_and_the_request_sent_again():
    connections = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        await answering(OK)(reader, writer)
        if len(connections) == 1:
            await request_of(reader)  # read, and closed without an answer

    async def ask(client: Client) -> object:
        await client.request("GET", "/x")
        return await client.request("GET", "/x")

    assert talk(server, ask).body == b"hi"
    assert len(connections) == 2


def test_chunks_are_put_together_and_a_body_without_length_ends_with_the_connection():
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nT: 1\r\n\r\n"
    assert talk(answering(chunked), get()).body == b"abcde"
    assert talk(answering(b"HTTP/1.0 200 OK\r\n\r\nall of it"), get()).body == b"all of it"


def test_not_modified_has_no_body():
    answer = talk(answering(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n"), get())
    assert (answer.status, answer.body) == (304, b"")


def test_an_answer_that_only_says_to_go_on_is_not_the_answer():
    assert talk(answering(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK), get()).body == b"hi"


def test_a_connection_on_which_a_server_speaks_unasked_is_not_used_again():
    connections = []

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        await request_of(reader)
        writer.write(OK + OK)
        await writer.drain()
        await reader.read()

    async def ask(client: Client) -> None:
        for _ in range(2):
            await client.request("GET", "/x")

    talk(server, ask)
    assert len(connections) == 2


def test_a_problem_is_raised_with_its_members_and_the_seconds_to_wait():
    body = b'{"type":"/problems/seq-gap","title":"t","status":409,"detail":"Send 3.","expected":3}'
    head = b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\nRetry-After: 7\r\n\r\n" % len(body)
    with pytest.raises(Problem) as refusal:
        talk(answering(head + body), get())
    assert (refusal.value.slug, refusal.value.extra["expected"], refusal.value.retry_after) == ("seq-gap", 3, 7)


def test_an_error_that_is_no_problem_becomes_the_nearest_one():
    with pytest.raises(Problem) as refusal:
        talk(answering(b"HTTP/1.1 503 Away\r\nContent-Length: 6\r\nRetry-After: soon\r\n\r\n<html>"), get())
    assert (refusal.value.status, refusal.value.retry_after) == (503, None)


@pytest.mark.parametrize(
    ("header", "body", "seconds"),
    [
        (b"9" * 5000, b"{}", None),
        (b"999999999999", b"{}", LONGEST_RETRY),
        (b"soon", b'{"type": "/problems/busy", "retry_after": 1' + b"0" * 400 + b"}", LONGEST_RETRY),
    ],
)
def test_a_server_asks_for_so_long_a_wait_at_most_and_no_number_of_its_own_is_too_long_to_read(
    header: bytes, body: bytes, seconds: int | None
):
    head = b"HTTP/1.1 503 Away\r\nContent-Length: %d\r\nRetry-After: %s\r\n\r\n" % (len(body), header)
    with pytest.raises(Problem) as refusal:
        talk(answering(head + body), get())
    assert refusal.value.retry_after == seconds


@pytest.mark.parametrize(
    ("piece", "why"),
    [
        (b"X: y\r\n", "more than 65536 bytes of headers"),  # trailers have the bounds of a head
        (b"1;" + b"a" * 60_000 + b"\r\nx\r\n", r"more than 0\.2 s"),
    ],
    ids=["trailers", "chunks"],
)
def test_an_answer_that_never_ends_is_given_up(piece: bytes, why: str):
    ended = False

    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal ended
        await request_of(reader)
        start = b"0\r\n" if piece.startswith(b"X") else b""
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + start)
        until = asyncio.get_running_loop().time() + 5
        with contextlib.suppress(asyncio.CancelledError):
            while asyncio.get_running_loop().time() < until:
                writer.write(piece * (1_000_000 // len(piece)))
                await writer.drain()
            ended = True

    with pytest.raises(Unreachable, match=why):
        talk(server, get(), Limits(total=0.2))
    assert not ended


@pytest.mark.parametrize("url", ["http://..:80", f"http://{'a' * 70}.b", "http://127.0.0.1:1/\u20ac"])
def test_a_name_that_no_machine_can_have_is_said_in_a_sentence(url: str):
    async def ask() -> None:
        client = Client(url)
        await client.request("GET", "/x")

    with pytest.raises(CrowdmlError, match=r"no name of a machine|no address of a server"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "before it answered"),
        (b"SSH-2.0\r\n\r\n", "does not speak"),
        (b"HTTP/1.1 abc\r\n\r\n", "does not speak"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "malformed header"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "malformed length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n", "malformed length"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n", "at most 100"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi", "within its answer"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 101, "at most 100"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "malformed chunk"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + b"x" * 101, "at most 100"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n", "bytes of headers"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx", "within its answer"),
        (b"HTTP/1.1 20", "before it answered"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\nContent-Length: 0\r\n\r\n", "no redirect"),
    ],
)
def test_what_is_no_answer_is_said_in_a_sentence(answer, why):
    with pytest.raises(Unreachable, match=why):
        talk(answering(answer), get(largest=100))


def test_a_server_that_says_nothing_is_given_up_after_the_time_allowed():
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    for limits in (Limits(read=0.05), Limits(total=0.05)):
        with pytest.raises(Unreachable):
            talk(server, get(), limits)


def test_a_server_that_is_not_there_is_said_to_be_unreachable():
    async def ask() -> None:
        await Client("http://127.0.0.1:1").request("GET", "/")

    with pytest.raises(Unreachable, match="cannot be reached"):
        asyncio.run(ask())


def test_https_to_a_server_without_tls_says_so_and_names_the_other_address():
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async def ask(client: Client) -> None:
        await Client(client.url.replace("http://", "https://")).request("GET", "/")

    with pytest.raises(Unreachable, match=r"there is no TLS on this port\. Nothing was sent\. .* try http://127") as no:
        talk(plain, ask)
    assert "certificate" not in str(no.value)


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (b"", r"closed the connection before it answered\. If it speaks TLS, try https://127"),
        (b"\x15\x03\x01\x00\x02\x02\x46", r"this port speaks TLS\. Try https://127"),
    ],
)
def test_http_to_a_port_with_tls_names_the_other_address(said, sentence):
    async def server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(64)
        writer.write(said)
        await writer.drain()

    with pytest.raises(Unreachable, match=sentence):
        talk(server, get())


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:notaport", "http://x/?q=1"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(CrowdmlError):
        Client(url)


def test_a_header_cannot_smuggle_in_another():
    with pytest.raises(CrowdmlError, match="no line break"):
        talk(answering(OK), lambda client: client.request("GET", "/x", headers={"A": "b\r\nC: d"}))
