"""What strangers may do with connections: hold many, send halves, never read, never end. Over real sockets.

Bounds are set small, and a test waits for what the server does; nothing here depends on how long that takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import MSGPACK, Device, Running, make_task, serving

from crowdml.messages import encode
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocols import settled
from crowdml.protocols.sgd import Gradient, protocol
from crowdml.server.limits import Limits, Queue, Turns, source
from crowdml.server.portal.live import MOST_OF_ONE
from crowdml.server.serve import _listen
from crowdml.task import parse
from crowdml.wire.validate import largest_body

TASK = make_task("connections")
PATH = f"/v1/tasks/{TASK.hash.hex()}"
LARGE = settled(
    parse("""
name = "large"
title = "A task whose publication fills a socket"
features = { dimension = 4000, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b", "c", "d", "e"] }
model = { kind = "softmax" }
protocol = { kind = "sgd", batch = 1, step = { schedule = "constant", c = 1.0 }, radius = 1e9 }
privacy = { mechanism = "discrete-gaussian", epsilon = { gradient = 1.0 }, delta = 1e-6 }
stop = { steps = 1000 }
""")
)
SHORT = 0.2
"""Seconds in place of the thirty that a server has for what is slow."""
TRIES = 2_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("connections"), TASK) as running:
        yield running


@contextmanager
def connected(server: Running, small: bool = False) -> Generator[socket.socket]:
    """A connection; a small one has hardly room for what it does not read."""
    where = server.line()
    with socket.socket() as line:
        if small:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(20)
        line.connect((where.host, where.port))
        yield line


def everything(line: socket.socket) -> bytes:
    """All that comes until the server ends the connection."""
    said = b""
    try:
        while piece := line.recv(65536):
            said += piece
    except ConnectionResetError:
        pass
    return said


def said_to(server: Running, data: bytes) -> bytes:
    with connected(server) as line:
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        return everything(line)


def sent_until_refused(line: socket.socket, block: bytes, most: int = 64 * 2**20) -> int:
    """Send and never read, until the server ends the connection or says something: the bytes sent until then."""
    sent = 0
    while sent < most:
        try:
            if select.select([line], [], [], 0)[0]:
                break
            line.sendall(block)
        except OSError:
            break
        sent += len(block)
    return sent


def wait_for_reset(line: socket.socket) -> None:
    """Until the server has cut the connection; what it sent before stays unread."""
    poll = select.poll()
    poll.register(line, 0)
    assert poll.poll(20_000), "the connection was not cut"


def until(holds: Callable[[], bool]) -> None:
    assert any(holds() for _ in range(TRIES))


# --- heads and trailers ---

CHUNKED = b"POST /v1/devices HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "block"),
    [
        (b"0\r\n", b"".join(b"x%05d: y\r\n" % each for each in range(5000))),
        (b"0\r\nx: ", b"a" * 65536),
        (b"5\r\nabcde\r\n0\r\nx: ", b"a" * 65536),
        (b"1;x=", b"a" * 65536),
    ],
    ids=["many trailers", "a trailer without end", "a trailer without end after a chunk", "an extension without end"],
)
def test_what_comes_after_and_between_chunks_is_bounded(server: Running, begin: bytes, block: bytes) -> None:
    with connected(server) as line:
        line.sendall(CHUNKED + begin)
        assert sent_until_refused(line, block) < 32 * 2**20
        said = everything(line)
    assert not said or said.startswith(b"HTTP/1.1 431 ")  # nothing if the reset came first


def test_trailers_are_not_taken_for_headers_and_small_chunks_are_no_head(server: Running) -> None:
    device = server.device()
    data = device.envelope(TASK)
    chunks = b"".join(b"1\r\n" + data[at : at + 1] + b"\r\n" for at in range(len(data)))
    head = (
        f"POST {PATH}/check-in HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    )
    with connected(server) as line:
        line.sendall(head + chunks + b"0\r\nHost: y\r\nExpect: 100-continue\r\n\r\n")
        assert everything(line).startswith(b"HTTP/1.1 202 ")
    with connected(server) as line:  # many chunks that are small, and together larger than a head
        line.sendall(CHUNKED)
        for _ in range(40):
            line.sendall(b"1;%s\r\nx\r\n" % (b"e" * 1000))
        line.sendall(b"0\r\n\r\n")
        assert line.recv(12) == b"HTTP/1.1 400"


def test_a_head_that_comes_in_one_piece_is_bounded_too(server: Running) -> None:
    long = b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n"
    many = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 5_000 + b"\r\n"
    path = b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    for head in (long, many, path):
        assert said_to(server, head).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    "head",
    [
        "GET {} HTTP/1.1\r\n\r\n",
        "GET {} HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n",
        "GET {}\r\n\r\n",
        "GET {} HTTP/0.9\r\nHost: x\r\n\r\n",
        "GET {} HTTP/2.0\r\nHost: x\r\n\r\n",
    ],
)
@pytest.mark.parametrize("path", ["/healthz", f"{PATH}/publication"])
def test_a_request_names_its_host_once_and_speaks_http_1(server: Running, head: str, path: str) -> None:
    said = said_to(server, head.format(path).encode())
    assert said.startswith(b"HTTP/1.1 400 ")
    assert json.loads(said.partition(b"\r\n\r\n")[2])["type"] == "/problems/bad-request"


def test_short_answers_are_sent_at_once_on_any_event_loop() -> None:
    """Without it every answer waits 40 ms for an acknowledgement where there is no uvloop, which sets it by itself."""
    with (
        closing(_listen("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname(), 10),
        closing(listening.accept()[0]) as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_http_1_0_needs_no_host(server: Running) -> None:
    assert said_to(server, b"GET /healthz HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


# --- peers that do not read ---


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_peer_that_never_reads_its_answers_is_cut_off(tmp_path: Path, tls: bool) -> None:
    with serving(tmp_path, LARGE, limits=Limits(slow=SHORT), tls_local=tls, invite=0) as server:
        one = f"GET /v1/tasks/{LARGE.hash.hex()}/publication HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        with connected(server, small=True) as line:
            speaking = line
            if tls:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
                speaking = context.wrap_socket(line)
            try:
                for _ in range(200):
                    speaking.sendall(one * 20)
            except OSError:
                return  # cut off already
            wait_for_reset(speaking)


@pytest.mark.parametrize("more", ["", "Connection: close\r\n"])
def test_a_peer_that_does_not_take_a_long_answer_is_cut_off(tmp_path: Path, more: str) -> None:
    with serving(tmp_path, LARGE, limits=Limits(slow=SHORT, idle=SHORT)) as server:
        with connected(server, small=True) as line:
            line.sendall(f"GET /static/plotly.min.js HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode())
            wait_for_reset(line)
        assert server.line().ask("GET", "/healthz").status == 200


def test_a_peer_that_reads_slowly_gets_its_answer_whole(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(slow=SHORT)) as server, connected(server, small=True) as line:
        line.sendall(b"GET /static/plotly.min.js HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        said = bytearray()
        while piece := line.recv(4096):
            said += piece
        head, _, body = bytes(said).partition(b"\r\n\r\n")
        (size,) = [each.split(b": ")[1] for each in head.split(b"\r\n") if each.lower().startswith(b"content-length")]
        assert len(body) == int(size)


def test_no_more_requests_wait_on_a_connection_than_are_allowed(server: Running) -> None:
    said = said_to(server, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 200)
    assert b"HTTP/1.1 429 " in said
    few = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 20
    with connected(server) as line:
        line.sendall(few)
        seen = b""
        while seen.count(b"HTTP/1.1 200 ") < 20:
            seen += line.recv(65536)


def test_a_live_page_ends_with_its_connection_though_another_request_waits_behind_it(tmp_path: Path) -> None:
    page = f"/studies/{TASK.hash.hex()[:12]}/live"
    with serving(tmp_path, TASK) as server:
        for _ in range(MOST_OF_ONE):
            with connected(server) as line:
                line.sendall(f"GET {page} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b"200 OK" in line.recv(65536)
        until(lambda: server.line().ask("HEAD", page).status == 200)


# --- peers that hold connections ---


def test_what_is_no_request_does_not_keep_a_connection(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(idle=SHORT)) as server:
        for path in ("/healthz", f"{PATH}/publication"):
            with connected(server) as line:
                line.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert line.recv(12) == b"HTTP/1.1 200"
                line.sendall(b"\r\n")
                everything(line)  # to its end


def test_one_address_has_so_many_connections_and_gets_another_when_it_closes_one(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(address_connections=3)) as server:
        lines = [server.line() for _ in range(3)]
        assert all(line.ask("GET", "/healthz").status == 200 for line in lines)
        answer = server.line().ask("GET", "/healthz")
        assert (answer.status, answer.slug, answer.headers["retry-after"]) == (503, "busy", "5")
        lines[0].close()
        until(lambda: server.line().ask("GET", "/healthz").status == 200)
        assert lines[1].ask("GET", "/healthz").status == 200


def test_a_proxy_has_more_connections_than_one_address(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(address_connections=1, behind_proxy=True)) as server:
        assert all(server.line().ask("GET", "/healthz").status == 200 for _ in range(5))


def test_an_address_may_not_say_that_it_is_another(tmp_path: Path) -> None:
    for path in ("/healthz", f"{PATH}/publication"):
        with serving(
            tmp_path / path[1:4], TASK, limits=Limits(address_rate=0.001, address_burst=3), invite=0
        ) as server:
            found = [
                server.line().ask("GET", path, headers={"X-Forwarded-For": f"10.0.0.{each}"}).status
                for each in range(4)
            ]
            assert found == [200, 200, 200, 429]


def test_behind_a_proxy_each_address_counts_and_of_ipv6_each_network(tmp_path: Path) -> None:
    limits = Limits(address_rate=0.001, address_burst=2, behind_proxy=True)
    with serving(tmp_path, TASK, limits=limits, invite=0) as server:

        def ask(address: str) -> int:
            return server.line().ask("GET", "/healthz", headers={"X-Forwarded-For": address}).status

        assert [ask(f"10.0.0.{each}") for each in range(4)] == [200] * 4
        assert [ask(f"2001:db8:0:1::{each}") for each in range(3)] == [200, 200, 429]
        assert ask("2001:db8:0:2::1") == 200


def test_live_pages_are_counted_by_network(tmp_path: Path) -> None:
    page = f"/studies/{TASK.hash.hex()[:12]}/live"
    with serving(tmp_path, TASK, limits=Limits(behind_proxy=True), invite=0) as server:
        lines: list[socket.socket] = []
        try:
            for each in range(MOST_OF_ONE + 1):
                where = server.line()
                lines.append(socket.create_connection((where.host, where.port), timeout=20))
                asked = f"GET {page} HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 2001:db8:0:1::{each:x}\r\n\r\n"
                lines[-1].sendall(asked.encode())
                assert lines[-1].recv(12) == (b"HTTP/1.1 200" if each < MOST_OF_ONE else b"HTTP/1.1 503")
        finally:
            for line in lines:
                line.close()


def test_a_source_is_an_address_or_the_network_of_one() -> None:
    assert source("192.0.2.1") == "192.0.2.1"
    assert source("2001:db8:1:2:3:4:5:6") == source("2001:db8:1:2::") == "2001:db8:1:2::/64"
    assert source("2001:db8:1:3::1") != source("2001:db8:1:2::1")
    assert source("::ffff:192.0.2.1") == "192.0.2.1"
    assert source("fe80::1%eth0") == "fe80::/64"
    assert source("what:ever") == "what:ever"
    assert source("") == ""


# --- bodies ---


def test_a_check_in_is_no_larger_than_its_task_needs(server: Running) -> None:
    device = server.device()
    long = f"POST {PATH}/check-in HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n".encode()
    assert said_to(server, long + bytes(1000)).startswith(b"HTTP/1.1 413 ")
    answer = device.line.ask("POST", f"{PATH}/check-in", bytes(100_000), {"Content-Type": MSGPACK})
    assert (answer.status, answer.slug) == (413, "too-large")
    assert answer.problem["limit"] < 40_000
    assert device.check_in(TASK).status == 202


def test_the_largest_body_is_that_of_the_largest_message() -> None:
    gradient = Release(np.zeros((8, 2), np.int32), RECEIVED)
    assert largest_body(protocol.expected(TASK)) == len(encode(Gradient(gradient, None, None, np.uint64(2**64 - 1))))


def half_sent(server: Running, size: int) -> socket.socket:
    where = server.line()
    line = socket.create_connection((where.host, where.port), timeout=20)
    line.sendall(f"POST {PATH}/check-in HTTP/1.1\r\nHost: x\r\nContent-Length: 12000\r\n\r\n".encode() + bytes(size))
    return line


def test_requests_half_sent_are_bounded_and_whole_ones_pass(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(bodies=75_000)) as server:
        device = server.device()
        lines = [half_sent(server, 10_000) for _ in range(8)]
        try:
            refused, _, _ = select.select(lines, [], [], 20)
            assert refused[0].recv(12) == b"HTTP/1.1 503"
            assert device.check_in(TASK).status == 202
        finally:
            for line in lines:
                line.close()

        def is_waited_for() -> bool:
            """Whether there is room again: then the rest is read, and is no envelope."""
            with half_sent(server, 11_999) as line:
                try:
                    line.sendall(b"x")
                    return line.recv(12) == b"HTTP/1.1 400"
                except OSError:
                    return False

        until(is_waited_for)


def test_check_ins_whose_bodies_come_together_wait_no_more_than_allowed(tmp_path: Path) -> None:
    with serving(tmp_path, TASK, limits=Limits(waiting=2)) as server:
        devices = [server.device() for _ in range(6)]
        go_on, stands = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            go_on.wait(60)

        assert server.hub._worker is not None
        blocked = asyncio.run_coroutine_threadsafe(server.hub.write(stand), server.hub._worker.get_loop())
        assert stands.wait(20)
        lines = [_posted(server, device) for device in devices]
        try:
            answered, waiting = set[Any](), set(lines)
            while len(answered) < 3:  # one may be in the writer's hand, two wait
                ready, _, _ = select.select(list(waiting), [], [], 20)
                assert ready, "they all wait"
                for line in ready:
                    assert line.recv(65536).startswith(b"HTTP/1.1 503 ")
                answered |= set(ready)
                waiting -= set(ready)
            go_on.set()
            assert waiting
            assert all(line.recv(65536).startswith((b"HTTP/1.1 202 ", b"HTTP/1.1 503 ")) for line in waiting)
        finally:
            go_on.set()
            blocked.result(20)
            for line in lines:
                line.close()
        assert server.hub._waiting_bytes == 0


def _posted(server: Running, device: Device) -> socket.socket:
    data, where = device.envelope(TASK), server.line()
    line = socket.create_connection((where.host, where.port), timeout=20)
    line.sendall(f"POST {PATH}/check-in HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    return line


# --- files ---


@contextmanager
def process(folder: Path, files: tuple[int, int], *options: str) -> Generator[tuple[subprocess.Popen[str], Any]]:
    """`crowdml serve` in a process that may open so many files: soft, hard."""
    command = [sys.executable, "-m", "crowdml.cli", "serve", "--folder", str(folder / "data"), "--port", "0"]
    limited = f'ulimit -S -n {files[0]} && ulimit -H -n {files[1]} && exec "$@"'
    with (folder / "log").open("w") as stderr:
        running = subprocess.Popen(
            ["sh", "-c", limited, "sh", *command, "--json", "-", *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    assert running.stdout is not None
    try:
        yield running, json.loads(running.stdout.readline())
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(30)
        running.stdout.close()


def test_a_server_with_few_files_takes_few_connections_and_says_so(tmp_path: Path) -> None:
    with process(tmp_path, (160, 160)) as (_, said):
        host, _, port = said["address"].partition("://")[2].partition(":")
        lines = [socket.create_connection((host, int(port)), timeout=20) for _ in range(32)]
        try:
            for line in lines:
                line.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
                assert line.recv(12) == b"HTTP/1.1 200"
            for _ in range(200):  # each is told, and none is left waiting
                with socket.create_connection((host, int(port)), timeout=20) as more:
                    assert more.recv(12) == b"HTTP/1.1 503"
        finally:
            for line in lines:
                line.close()
    assert "32 connections are taken instead of 10000" in (tmp_path / "log").read_text()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="the limit of another process is read on Linux alone")
def test_a_server_raises_its_limit_of_files_as_far_as_it_needs(tmp_path: Path) -> None:
    with process(tmp_path, (160, 700), "--connections", "500") as (running, _):
        assert resource.prlimit(running.pid, resource.RLIMIT_NOFILE) == (628, 700)  # pyright: ignore[reportAttributeAccessIssue]
    assert "connections are taken" not in (tmp_path / "log").read_text()


# --- how long a check-in waits ---


def test_what_is_read_has_waited_as_long_as_the_loop_was_busy() -> None:
    turns = Turns()
    assert turns.waited(now=5.0) == 0, "a loop that was idle reads at once"
    assert turns.read(now=10.0), "the first of a turn wants to know when the next begins"
    assert not turns.read(now=10.1)
    assert turns.waited(now=10.3) == pytest.approx(0.3), "the last of many that came together"
    assert turns.turned(), "something was read: look at the next turn too"
    assert not turns.read(now=10.4)
    assert turns.waited(now=10.5) == pytest.approx(0.5), "it may have come when the turn before began"
    assert turns.turned()
    assert not turns.turned(), "nothing was read meanwhile: the loop goes to sleep"
    assert turns.waited(now=99.0) == 0
    assert turns.read(now=99.0)


def test_a_check_in_waits_before_it_is_read_and_until_the_writer_comes() -> None:
    queue = Queue(speed=100.0, clock=lambda: 10.25)
    assert queue.wait(50) == 0.5
    queue.turns.read(now=10.0)
    assert queue.wait(50) == 0.75


def test_one_slow_batch_does_not_rule_what_is_thought_of_the_writer() -> None:
    queue = Queue(speed=400.0)
    queue.took(60, 30.0)
    assert queue.speed == pytest.approx(360)
    for _ in range(100):
        queue.took(60, 0.6)
    assert queue.speed == pytest.approx(100, rel=0.01), "one that stays slow is believed"


def test_what_lies_between_two_batches_counts_while_many_wait() -> None:
    now = [100.0]
    queue = Queue(speed=400.0, clock=lambda: now[0])
    queue.took(300, 0.5)
    assert queue.speed == 600, "nobody waited meanwhile"
    now[0] += 0.1
    queue.wait(40)
    now[0] += 0.9
    queue.took(300, 0.5)
    assert queue.speed == 300, "they waited a second for those 300"
    now[0] += 3600
    queue.wait(40)
    now[0] += 1.0
    queue.took(300, 0.6)
    assert queue.speed == 300, "an hour in which nobody came is not held against it"


def test_how_long_accepted_check_ins_took_is_counted(tmp_path: Path) -> None:
    with serving(tmp_path, TASK) as server:
        device = server.device()
        assert device.check_in(TASK).status == 202
        assert device.check_in(TASK, seq=9).status == 409, "a refusal does not count"
        text = server.line().ask("GET", "/metrics").body.decode()
    assert "# TYPE crowdml_check_in_seconds histogram\n" in text
    assert 'crowdml_check_in_seconds_bucket{le="+Inf"} 1\n' in text
    assert "crowdml_check_in_seconds_count 1\n" in text
