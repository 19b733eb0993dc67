"""The lottery of a gathered round at check-in: who is not drawn yet is refused, and no honest device ever is."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.channels import Gathering
from crowdml.device.runner import Patience
from crowdml.messages import SERVER, Envelope, encode
from crowdml.privacy.noise import Silence
from crowdml.protocols import find, settled
from crowdml.server.runner import TaskRunner
from crowdml.storage.server import Store
from crowdml.task import Task, parse
from crowdml.turn import check_in
from crowdml.wire.envelopes import open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.problems import Problem
from crowdml.wire.statements import Statement

START = datetime(2025, 1, 31, 12, tzinfo=UTC)
SERVER_KEY = Key.from_secret(bytes(32))
KEYS = [Key.from_secret(bytes([1, number]) * 16) for number in range(60)]
TASK = settled(
    parse("""
name = "drawn"
features = { dimension = 2, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b"] }
model = { kind = "softmax" }
[protocol]
kind = "sgd"
batch = 2
step = { c = 1.0 }
combine = { rule = "mean", uploads = 3, minimum = 3, seconds = 600, drawn = 0.1 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 1.0 }
delta = 1e-6
budget = { epsilon = 20.0, samples = 20 }
""")
)


@dataclass
class Server:
    """A task's runner on a database, with a clock that the test moves."""

    store: Store
    time: float = 100.0
    put_back: float = 0.0
    """By how much its calendar was put back; its other clock goes on."""
    seqs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store.invite(bytes(32), START.isoformat(), uses=1000)
        self.store.add_task(TASK.canonical, TASK.name, self.now(), "running")
        for key in KEYS:
            self.store.enrol(bytes(32), key.public, self.now(), [TASK.hash])
        self.start()

    def start(self) -> TaskRunner:
        told: Any = {"noise": Silence(), "clock": lambda: self.time}
        self.runner = TaskRunner(self.store, TASK.canonical, SERVER_KEY, self.now, **told)
        return self.runner

    def now(self) -> str:
        return (START + timedelta(seconds=self.time - self.put_back)).isoformat()

    def give(self, key: Key) -> Any:
        batch = Samples(np.eye(2, dtype=np.float32), np.arange(2, dtype=np.int32))
        made = check_in(find(TASK), TASK, batch, self.runner.fold.message, noise=Silence(), me=key.id).message
        seq = self.seqs.get(key.id, 0) + 1
        envelope = Envelope(TASK.hash, key.id, frozenset((SERVER,)), seq, made.kind, encode(made))
        (answer,) = self.runner.accept([open_signed(sign(envelope, Statement(("pure 1",), seq, ("pure 1",)), key))])
        self.seqs[key.id] = seq if not isinstance(answer, Problem) else seq - 1
        return answer


@pytest.fixture
def server(tmp_path: Path):
    with Store(tmp_path / "server.sqlite") as store:
        yield Server(store)


def gathering() -> Gathering:
    found = find(TASK).gathers(TASK)
    assert found is not None
    return found


def drawn(number: int, looks: int = 0) -> list[Key]:
    return [key for key in KEYS if gathering().draws(TASK, number, key.id, looks)]


def others(number: int, looks: int = 0) -> list[Key]:
    here = drawn(number, looks)
    return [key for key in KEYS if key not in here]


@pytest.mark.parametrize("number", [0, 1])
def test_who_is_not_drawn_for_the_open_round_and_does_not_wait_is_refused(server: Server, number: int):
    if number:
        server.time += 10_000  # a round later: everybody is drawn for the first by now
        for key in KEYS[:3]:
            assert server.give(key)[0] == 202
        assert server.runner.offer.version == 1
    for key in others(number):
        answer = server.give(key)
        assert isinstance(answer, Problem)
        assert (answer.slug, answer.status) == ("round-over", 409)
        assert f"is not drawn for round {number}, which is open: look again" in str(answer)
    assert server.runner.closing.senders == set()
    for key in drawn(number)[:2]:
        assert server.give(key)[0] == 202


def test_it_widens_with_time_as_fast_as_a_device_may_look_again(server: Server):
    later = next(key for key in others(0) if key in drawn(0, 1))
    last = next(key for key in others(0, 2))
    assert isinstance(server.give(later), Problem)
    server.time += 0.5
    assert server.give(later)[0] == 202
    server.time += 0.9
    assert isinstance(server.give(last), Problem)
    server.time += 10.0  # four looks more: 16 times the chance
    assert server.give(last)[0] == 202


def test_a_receipt_is_given_again_to_who_was_drawn_whatever_round_is_open(server: Server):
    (first, *_) = drawn(0)
    assert server.give(first)[0] == 202
    server.seqs[first.id] -= 1
    assert server.give(first)[0] == 200


@pytest.mark.parametrize("put_back", [0.0, 3600.0, -3600.0])
def test_no_clock_that_was_put_back_refuses_who_waited(server: Server, put_back: float):
    """The calendar jumps while a round is open, and over a restart: who looked again and again is taken."""
    (key, *_) = others(0, 2)
    server.time += 7.0
    server.put_back = put_back
    assert server.give(key)[0] == 202
    (key, *_) = others(0, 2)[1:]
    server.start()
    assert server.give(key)[0] == 202, "a round that was open before is open to everybody"


def test_no_honest_device_is_ahead_of_the_server():
    """A device that waits as short as it may, between looks of which the first one is at once."""
    for patience in (Patience(), Patience(1.0, 300.0)):
        waited = 0.0
        for looks in range(12):
            assert gathering().looks_within(waited) >= looks
            waited += 0.5 * min(patience.cap, patience.first * 2.0**looks)
    assert gathering().looks_within(0.0) == 0
    assert gathering().looks_within(-5.0) == 0
    assert gathering().looks_within(float("inf")) == 64


def test_a_task_without_a_lottery_takes_whoever_comes(tmp_path: Path):
    assert Gathering(3).drawn is None
    task: Task = TASK.with_(protocol={"combine": {"rule": "mean", "uploads": 3}})
    with Store(tmp_path / "server.sqlite") as store:
        store.add_task(task.canonical, task.name, START.isoformat(), "running")
        runner = TaskRunner(store, task.canonical, SERVER_KEY, START.isoformat)
        assert runner.closing._is_drawn("anybody")
