"""After an outage: everyone who is registered comes back in the same second, and the server lives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from device import make_task
from process import Server
from returning import drain, register, signed

from crowdml.messages import decode
from crowdml.protocols.sgd import plan
from crowdml.storage.server import Store

TASK = make_task()


def come_back(folder: Path, devices: int, sockets: int) -> None:
    """Kill a server that has so many devices, start it again, and let them all come; says how long they waited."""
    server = Server(folder)
    server.start("--task", str(server.write_task()))
    server.stop()
    keys = register_beside(server, devices)
    wide = ("--address-connections", "4096")  # all come from one address here
    server.start(*wide)
    server.kill()
    server.start(*wide)
    found = asyncio.run(drain(server.port, TASK, [signed(TASK, key) for key in keys], sockets, limit=600))
    line = server.line()
    answer = line.ask("GET", f"/v1/tasks/{TASK.hash.hex()}/publication")
    line.close()
    assert server.stop() == 0
    print(
        f"{devices:,} devices drained in {found.ended:.0f} s, p50 {1e3 * found.percentile(0.5):.0f} ms, "
        f"p99 {1e3 * found.percentile(0.99):.0f} ms, answers {dict(found.statuses)}"
    )
    assert set(found.statuses) <= {200, 202, 503}
    assert found.unexplained == 0, "a 503 without Retry-After"
    assert found.statuses[202] == devices
    weights = decode(answer.headers["crowdml-kind"], answer.body).weights
    assert np.array_equal(weights / float(plan(TASK).grid.step), np.full((8, 2), -devices))
    with Store(server.data / "server.sqlite") as store:
        last = store.last_seq(TASK.hash)
        assert {key.id for key in keys} == set(last)
        assert {each.seq for each in last.values()} == {1}
    assert "Traceback" not in server.log.read_text()
    assert found.ended < 600


def register_beside(server: Server, devices: int):
    for file in server.data.glob("server.sqlite*"):
        file.unlink()
    return register(server.data / "server.sqlite", TASK, devices)


def test_a_crowd_that_returns_at_once_is_taken_whole(tmp_path: Path) -> None:
    come_back(tmp_path, devices=1500, sockets=400)


@pytest.mark.slow
def test_fifty_thousand_devices_return_at_once_and_are_drained(tmp_path: Path) -> None:
    come_back(tmp_path, devices=50_000, sockets=400)  # its 99th percentile is printed: other tests share the machine
