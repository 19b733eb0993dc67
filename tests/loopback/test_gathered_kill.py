"""A server of gathered rounds is killed with -9 again and again. What it acknowledged is in one round, once."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
from device import Answer, Device
from gathered_task import PLUGIN, gathered_plugin, make, text  # noqa: F401  a fixture
from plugged import no_plugins_left
from process import Server, journal

from crowdml.messages import decode, encode
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocols import find
from crowdml.server.gathering import CLOSED, read_own
from crowdml.server.transcript import replay, write_transcript
from crowdml.storage.server import Store
from crowdml.wire.envelopes import open_signed

with no_plugins_left(PLUGIN):
    TASK = make("killed", size=3)
ROUNDS, KILLS = 12, 8


def bodies(device: Device, seq: int, version: int, value: int) -> bytes:
    made = find(TASK).contribution(Release(np.full((2, 2), value, np.int32), RECEIVED), np.int32(version))
    return device.envelope(TASK, seq, kind="test_median/sums/1", body=encode(made))


def deliver(server: Server, device: Device, data: bytes, chance: random.Random, kills: list[int]) -> Answer:
    """The same bytes until they are answered; now and then the server is killed right after they were sent."""
    while True:
        try:
            if len(kills) < KILLS and chance.random() < 0.3:
                kills.append(1)
                device.line._kept = None
                device.line.ask("GET", "/healthz")  # a connection
                assert device.line._kept is not None
                headers = {"Content-Type": "application/msgpack"}
                device.line._kept.request("POST", f"/v1/tasks/{TASK.hash.hex()}/check-in", data, headers)
                time.sleep(chance.uniform(0, 0.01))
                server.kill()
                server.start("--plugin", str(PLUGIN))
                device.line.close()
            return device.send(TASK, data)
        except OSError:
            device.line.close()


@pytest.mark.kill
def test_nothing_acknowledged_is_lost_or_in_two_rounds(tmp_path: Path):
    server, chance, kills = Server(tmp_path), random.Random(5), list[int]()
    task = tmp_path / "task.toml"
    task.write_text(text("killed", size=3))
    code = server.start("--plugin", str(PLUGIN), "--task", str(task), "--invite", "10")["code"]
    devices = [Device(server.line()) for _ in range(3)]
    values: dict[int, list[int]] = {}
    try:
        for device in devices:
            assert device.enrol(code).status == 201
        for version in range(ROUNDS):
            for number, device in enumerate(devices):
                value = 100 * version + 10 * number
                values.setdefault(version, []).append(value)
                data = bodies(device, version + 1, version, value)
                answer = deliver(server, device, data, chance, kills)
                assert answer.status in (200, 202), answer.body
        published = devices[0].line.ask("GET", f"/v1/tasks/{TASK.hash.hex()}/publication")
    finally:
        for device in devices:
            device.line.close()
        server.stop()
    assert len(kills) == KILLS
    assert len(journal(server, TASK.hash)) == 4 * ROUNDS
    step = float(TASK.privacy.grid)
    expected = sum(sorted(each)[1] for each in values.values()) * step
    model = decode("test_median/model/1", published.body)
    assert float(model.weights[0, 0]) == expected
    with Store(server.where) as store:
        with (tmp_path / "told").open("wb") as file:
            write_transcript(store, TASK.hash, file)
        closes = [open_signed(data).envelope for _, data in store.totals(TASK.hash)]
        rounds = [read_own(CLOSED, each.body) for each in closes]
    assert replay(tmp_path / "told").body == published.body
    assert [each.number for each in rounds] == list(range(ROUNDS))
    assert sorted(place for each in rounds for place in each.entries) == sorted(
        index for index, device, _ in journal(server, TASK.hash) if device in {each.key.id for each in devices}
    )
