"""The server is killed with -9 at random moments under load. What it acknowledged counts exactly once.

Each device has four entries of the weights to itself, and its check-in s adds 1, s, s^2 mod 997 and a random number to
them. So a check-in that is lost, or counted twice, or swapped for another, shows in the weights. The weights are exact:
whole steps of the grid, far below 2^24.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import Answer, Device, make_task
from process import Server, journal

from crowdml.messages import decode, encode
from crowdml.server.runner import Fold
from crowdml.storage.server import Store
from crowdml.task import Task
from crowdml.wire.receipts import Receipt

DEVICES = 4
TASK = make_task()
PATH = f"/v1/tasks/{TASK.hash.hex()}"


def effect(number: int, seq: int) -> np.ndarray[Any, Any]:
    """What check-in `seq` of device `number` adds to the weights, in steps of the grid."""
    gradient = np.zeros((DEVICES, 4), np.int32)
    gradient[number] = 1, seq, seq * seq % 997, random.Random(f"{number}/{seq}").randrange(1000)
    return gradient.reshape(8, 2)


@dataclass
class Sender:
    """A device that checks in without end: the same bytes until they are acknowledged."""

    number: int
    device: Device
    gate: threading.Event
    stop: threading.Event
    receipts: list[Receipt] = field(default_factory=list)
    repeats: int = 0
    wrong: list[Answer] = field(default_factory=list)

    def run(self) -> None:
        seq = 0
        while not self.stop.is_set():
            seq += 1
            data = self.device.envelope(TASK, seq, gradient=effect(self.number, seq))
            answer = self._deliver(data)
            if answer is None:
                return
            self.receipts.append(answer.receipt)
            self.repeats += answer.status == 200

    def _deliver(self, data: bytes) -> Answer | None:
        while True:
            self.gate.wait()
            try:
                answer = self.device.send(TASK, data)
            except OSError:  # it was killed; nobody knows whether it has the check-in
                if self.stop.is_set():
                    return None
                continue
            except Exception as error:  # half an answer
                assert "http.client" in type(error).__module__, error  # noqa: PT017
                continue
            if answer.status in (200, 202):
                return answer
            if answer.status != 503:
                self.wrong.append(answer)
                return None


def kill_many_times(folder: Path, kills: int, seed: int, database: str | None = None) -> tuple[int, int]:
    chance = random.Random(seed)
    server = Server(folder, database=database)
    options = ("--snapshot-every", "150")
    code = server.start("--task", str(server.write_task()), "--invite", str(DEVICES), *options)["code"]
    gate, stop = threading.Event(), threading.Event()
    senders = [Sender(number, Device(server.line()), gate, stop) for number in range(DEVICES)]
    assert [sender.device.enrol(code).status for sender in senders] == [201] * DEVICES
    names = {sender.device.key.id: sender.number for sender in senders}
    threads = [threading.Thread(target=sender.run, daemon=True) for sender in senders]
    for thread in threads:
        thread.start()
    fold = Fold(TASK)  # runs through without a break
    folded = 0
    pause = threading.Event()
    try:
        for _ in range(kills):
            gate.set()
            pause.wait(chance.uniform(0.02, 0.6))
            gate.clear()
            server.kill()
            while chance.random() < 0.2:  # killed while it starts, too
                server.spawn(*options)
                pause.wait(chance.uniform(0.0, 2.0))
                server.kill()
            server.start(*options)
            folded = _fold_on(fold, folded, server, names)
            _hold_against(fold, server)
        gate.set()
        pause.wait(0.3)
    finally:
        stop.set()
        gate.set()
        for thread in threads:
            thread.join(60)
        server.stop()
    assert not any(thread.is_alive() for thread in threads)
    assert [sender.wrong for sender in senders] == [[]] * DEVICES
    _count(server, senders, names)
    return sum(len(sender.receipts) for sender in senders), sum(sender.repeats for sender in senders)


def _fold_on(fold: Fold, folded: int, server: Server, names: dict[str, int]) -> int:
    """Apply what is new in the journal to the one fold that was never interrupted."""
    for index, name, seq in journal(server, TASK.hash, folded):
        assert index == folded + 1
        folded = index
        fold.apply(fold.read("sgd/gradient/1", _body(names[name], seq)), name)
    return folded


def _body(number: int, seq: int) -> bytes:
    from crowdml.privacy.private import RECEIVED, Release
    from crowdml.protocols.sgd import Gradient

    return encode(Gradient(Release(effect(number, seq), RECEIVED), None, None, np.int32(0)))


def _hold_against(fold: Fold, server: Server) -> None:
    line = server.line()
    published = line.ask("GET", f"{PATH}/publication").body
    line.close()
    assert published == encode(fold.message), "a restart ends in other bits than a run without a break"


def _count(server: Server, senders: list[Sender], names: dict[str, int]) -> None:
    """Acknowledged: exactly once. Not acknowledged: at most once. Both in the journal and in the weights."""
    entries = journal(server, TASK.hash)
    places = {(names[name], seq): index for index, name, seq in entries}
    assert len(places) == len(entries)
    counted = [max((seq for number, seq in places if number == sender.number), default=0) for sender in senders]
    for sender, most in zip(senders, counted, strict=True):
        for receipt in sender.receipts:
            assert places[sender.number, receipt.seq] == receipt.index
        assert len(sender.receipts) <= most <= len(sender.receipts) + 1
    assert server.start()["tasks"] == [TASK.name]
    line = server.line()
    answer = line.ask("GET", f"{PATH}/publication")
    line.close()
    weights = decode(answer.headers["crowdml-kind"], answer.body).weights.astype(np.float64)
    expected = sum(
        effect(number, seq).astype(np.int64) for number, most in enumerate(counted) for seq in range(1, most + 1)
    )
    assert np.array_equal(weights / step(TASK), -np.asarray(expected))
    assert server.stop() == 0
    with Store(server.where) as store:
        assert store.check() == {TASK.hash: len(entries)}
    assert "Traceback" not in server.log.read_text()


def step(task: Task) -> float:
    from crowdml.protocols.sgd import plan

    return float(plan(task).grid.step)


def test_a_server_that_is_killed_a_few_times_loses_nothing(tmp_path: Path) -> None:
    acknowledged, _ = kill_many_times(tmp_path, kills=4, seed=1)
    assert acknowledged > 50


@pytest.mark.postgres
def test_a_server_on_postgresql_that_is_killed_a_few_times_loses_nothing(tmp_path: Path, postgresql_url: str) -> None:
    acknowledged, _ = kill_many_times(tmp_path, kills=4, seed=3, database=postgresql_url)
    assert acknowledged > 20


@pytest.mark.kill
def test_a_server_that_is_killed_thirty_times_under_load_loses_nothing_and_counts_nothing_twice(tmp_path: Path) -> None:
    acknowledged, repeated = kill_many_times(tmp_path, kills=32, seed=2)
    assert acknowledged > 500
    assert repeated > 0, "no kill fell between the journal and the answer: load more"
