"""After an outage: everyone who is registered comes back in the same second, and the server lives."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import numpy as np
import pytest
from process import Server
from returning import TASK, TEXT, come_back, give, join, total

from crowdml.messages import decode
from crowdml.protocols.sgd import plan
from crowdml.storage.server import Store

WIDE = ("--address-connections", "4096")  # all come from one address here


def play(folder: Path, devices: int, sockets: int) -> None:
    """The power fails where a server and all its devices are, and returns; says how long they waited.

    The server takes no check-in before that, for it has no room on its disk: so everyone has one that waits.
    """
    server = Server(folder)
    file = folder / "returning.toml"
    file.write_text(TEXT)
    server.start("--task", str(file))
    server.stop()
    crowd = join(folder / "devices", server.data / "server.sqlite", f"http://127.0.0.1:{server.port}", devices)
    server.start(*WIDE, "--free-space", "1e9")
    asyncio.run(give(crowd, sockets))
    server.kill()
    sealed = crowd.sealed()
    assert len(sealed) == devices
    server.start(*WIDE)
    heard, summary = asyncio.run(come_back(crowd, sockets, limit=600))
    line = server.line()
    metrics = line.ask("GET", "/metrics").body.decode()
    answer = line.ask("GET", f"/v1/tasks/{TASK.hash.hex()}/publication")
    line.close()
    assert server.stop() == 0
    print(
        f"{devices:,} devices over {sockets} sockets drained in {summary.seconds:.0f} s, load average "
        f"{os.getloadavg()[0]:.1f}, answers {dict(heard.statuses)}; accepted, as the devices saw it: p50 "
        f"{1e3 * heard.percentile(0.5):.0f} ms, p99 {1e3 * heard.percentile(0.99):.0f} ms; as the server did: "
        f"{within(metrics)}"
    )
    assert set(heard.statuses) <= {200, 202, 404, 503}
    assert heard.statuses[404] == devices, "each asks for its last message first, and the server has none yet"
    assert heard.unexplained == 0, "a 503 without Retry-After"
    assert summary.endings == {"limit": devices}, "each had its message taken before the ten minutes were over"
    assert summary.check_ins == devices == crowd.receipts()
    assert crowd.sealed() == []
    weights = decode(answer.headers["crowdml-kind"], answer.body).weights
    assert np.array_equal(weights / float(plan(TASK).grid.step), -total(sealed)), "each is counted once, to the bit"
    with Store(server.data / "server.sqlite") as store:
        last = store.last_seq(TASK.hash)
        assert len(last) == devices
        assert {each.seq for each in last.values()} == {1}
    assert "Traceback" not in server.log.read_text()


def within(metrics: str) -> str:
    """The share of accepted check-ins that were answered within each bound."""
    found = {bound: int(n) for bound, n in re.findall(r'crowdml_check_in_seconds_bucket\{le="(.*)"\} (\d+)', metrics)}
    return ", ".join(
        f"{100 * found[each] / max(1, found['+Inf']):.1f} % within {each} s" for each in ("0.2", "0.5", "1.0")
    )


def test_a_crowd_that_returns_at_once_is_taken_whole(tmp_path: Path) -> None:
    play(tmp_path, devices=400, sockets=200)


@pytest.mark.slow
def test_thousands_of_devices_return_at_once_and_are_drained(tmp_path: Path) -> None:
    """How long it takes is printed, not asserted, but for the ten minutes: other tests share the machine.

    Fifty thousand want a machine of their own for a quarter of an hour: `CROWDML_OUTAGE_DEVICES=50000`.
    """
    play(tmp_path, int(os.environ.get("CROWDML_OUTAGE_DEVICES", "10000")), sockets=400)
