"""A server of a masked task is killed with -9 at random moments of its rounds. Every acknowledged vector is in exactly
one total, every total is the exact sum of those that are journalled, and the task goes on."""

from __future__ import annotations

import http.client
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import Answer, Device, Line
from masked_device import MaskedDevice, make_masked, masked_text
from process import Server

from crowdml.messages import decode
from crowdml.server.runner import Fold
from crowdml.storage.server import Store
from crowdml.wire.envelopes import open_signed

DEVICES = 8
SETTINGS = {"cohort": 6, "minimum": 5, "window": 1.0, "lease": 4.0}
TASK = make_masked("killed", **SETTINGS)


class Stopped(Exception):  # noqa: N818
    pass


@dataclass
class PatientLine(Line):
    """Asks the same until somebody answers."""

    stop: threading.Event = field(default_factory=threading.Event)

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        while not self.stop.is_set():
            try:
                answer = super().ask(method, path, body, headers)
            except (OSError, http.client.HTTPException):
                self.stop.wait(0.02)
                continue
            if answer.status != 503:
                return answer
            self.stop.wait(0.05)
        raise Stopped


@dataclass
class Member:
    """A device that takes part in round after round; it vanishes from some of them."""

    device: MaskedDevice
    chance: random.Random
    stop: threading.Event
    gave: dict[int, int] = field(default_factory=dict)
    """Of each seq that was sent: its round."""
    acknowledged: set[int] = field(default_factory=set)
    wrong: list[Any] = field(default_factory=list)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                self.once()
        except Stopped:
            pass
        except Exception as error:
            self.wrong.append(repr(error))

    def once(self) -> None:
        device = self.device
        if device.state is None:
            view = device.look()
            if view.phase != "advertise" or view.round <= device.after:
                self.stop.wait(0.05)
                return
            answer = device.begin(view.round)
            if answer.status not in (200, 202):
                self._left(answer)
            return
        view = device.look(device.state.round)
        if view.is_over or self.chance.random() < 0.0005:
            device.forget()
            return
        if not view.body:
            self.stop.wait(0.05)
            return
        if view.kind == "secagg/held/1":
            self.gave[device.inner.seq + 1] = view.round
        answer = device.hear(view)
        if answer.status not in (200, 202):
            self._left(answer)
        elif view.kind == "secagg/held/1":
            self.acknowledged.add(device.inner.seq)

    def _left(self, answer: Answer) -> None:
        if answer.status not in (409, 410) or not answer.slug.startswith("round-"):
            self.wrong.append(answer)
        self.device.forget()


def kill_in_rounds(folder: Path, kills: int, seed: int, database: str | None = None) -> int:
    chance, stop = random.Random(seed), threading.Event()
    server = Server(folder, database=database)
    path = server.folder / "masked.toml"
    path.write_text(masked_text("killed", **SETTINGS))
    code = server.start("--task", str(path), "--invite", str(DEVICES))["code"]
    members = []
    for number in range(DEVICES):
        device = Device(PatientLine("127.0.0.1", server.port, stop=stop))
        assert device.enrol(code).status == 201
        members.append(Member(MaskedDevice(device, TASK, number), random.Random(seed * 100 + number), stop))
    threads = [threading.Thread(target=member.run, daemon=True) for member in members]
    for thread in threads:
        thread.start()
    pause = threading.Event()
    try:
        for _ in range(kills):
            pause.wait(chance.uniform(0.05, 1.5))
            server.kill()
            server.start()
        before, ends = summed(server), time.monotonic() + 60
        while summed(server) < before + 2 and time.monotonic() < ends:  # it goes on
            pause.wait(0.2)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        server.stop()
    assert [member.wrong for member in members] == [[]] * DEVICES
    return count(server, members)


def summed(server: Server) -> int:
    with Store(server.where) as store:
        return store.round_counts(TASK.hash).get("summed", 0)


def count(server: Server, members: list[Member]) -> int:
    names = {member.device.id: member for member in members}
    with Store(server.where) as store:
        store.check()
        entries = [each for each in store.entries(TASK.hash) if each.device in names]
        heard = [decode(each.kind, each.body) for each in
                 (open_signed(data).envelope for _, data in store.totals(TASK.hash))]  # fmt: skip
        rows = [row for row in store.rounds(TASK.hash, 100_000) if row.phase == "summed"]
    given: dict[int, list[Any]] = {}
    for entry in entries:
        member = names[entry.device]
        number = member.gave[entry.seq]
        given.setdefault(number, []).append(member.device.seqs[number])
    for member in members:
        kept = {entry.seq for entry in entries if names[entry.device] is member}
        assert member.acknowledged <= kept, "what was acknowledged is in the journal"
    assert len(heard) == len(rows)
    for row, total in zip(sorted(rows, key=lambda row: str(row.ended_at)), heard, strict=True):
        vectors = given[row.number]
        assert int(total.devices) == row.survived == len(vectors)
        for tag in ("gradient", "labels"):
            assert (getattr(total, tag).value == sum(each[tag] for each in vectors)).all(), "nothing lost, or twice"
    fold = Fold(TASK)
    for total in heard:
        fold.apply(total, "server")
    server.start()
    line = server.line()
    answer = line.ask("GET", f"/v1/tasks/{TASK.hash.hex()}/publication")
    line.close()
    assert server.stop() == 0
    assert np.array_equal(decode(answer.headers["crowdml-kind"], answer.body).weights, fold.weights)
    assert "Traceback" not in server.log.read_text()
    return len(heard)


@pytest.mark.kill
def test_rounds_go_on_after_the_server_is_killed_a_few_times(tmp_path: Path) -> None:
    assert kill_in_rounds(tmp_path, kills=2, seed=1) >= 2


@pytest.mark.slow
def test_rounds_go_on_after_the_server_is_killed_twelve_times_and_nothing_is_lost_or_counted_twice(
    tmp_path: Path,
) -> None:
    assert kill_in_rounds(tmp_path, kills=12, seed=2) >= 4


@pytest.mark.postgres
def test_rounds_on_postgresql_go_on_after_the_server_is_killed(tmp_path: Path, postgresql_url: str) -> None:
    assert kill_in_rounds(tmp_path, kills=3, seed=3, database=postgresql_url) >= 2
