"""Asking a server for its chain, where it is busy and where it wants to know who asks."""

from __future__ import annotations

import asyncio

import pytest
from loopback import QuickClock

from crowdml.device.client import Client
from crowdml.device.verification import ATTEMPTS, _read
from crowdml.wire.keys import Key
from crowdml.wire.problems import Problem


def asked(slugs: list[str], time: QuickClock) -> tuple[bytes | str, list[bool]]:
    """A server on a real socket says these problems, one after the other, and then answers. What `_read` found in the
    end, and whether each of its requests was signed."""
    signed: list[bool] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            at = len(signed)
            signed.append(b"authorization:" in head.lower())
            status, body, more = 200, b"the chain", ""
            if at < len(slugs):
                problem = Problem(slugs[at], "not now", retry_after=2)
                status, body, more = problem.status, problem.encode(), "Retry-After: 2\r\n"
            writer.write(f"HTTP/1.1 {status} x\r\n{more}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()

    async def whole() -> bytes | str:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            return (await _read(client, Key.generate(), "/chain", time.clock)).body
        except Problem as problem:
            return problem.slug
        finally:
            await client.close()
            server.close()

    return asyncio.run(whole()), signed


def test_a_server_that_is_busy_is_asked_again_when_it_says():
    time = QuickClock()
    assert asked(["busy", "closed", "busy"], time) == (b"the chain", [False, False, True, True])
    assert time.slept == [2, 2]


@pytest.mark.parametrize("slugs", [["busy"] * ATTEMPTS, ["busy"] * (ATTEMPTS - 1) + ["closed"], ["unknown-task"]])
def test_a_server_that_stays_busy_or_refuses_is_not_asked_for_ever(slugs: list[str]):
    found, requests = asked(slugs, QuickClock())
    assert found == slugs[-1]
    assert len(requests) == len(slugs)
