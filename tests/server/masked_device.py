"""Devices of a masked task that step by hand: `crowdml.secagg.device` over real HTTP, vectors of a test's choice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from device import MSGPACK, Answer, Device, Running

from crowdml.messages import SERVER, Envelope
from crowdml.protocols import find, settled
from crowdml.secagg import device as core
from crowdml.secagg import server as core_server
from crowdml.secagg.device import DeviceRound
from crowdml.secagg.messages import open_message
from crowdml.secagg.terms import Terms, terms_of
from crowdml.server.runner import TaskRunner
from crowdml.storage.server import Store
from crowdml.task import Task, parse
from crowdml.wire.envelopes import open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.problems import Problem
from crowdml.wire.requests import parse_authorization
from crowdml.wire.rounds import RoundView, open_view, publication_hash
from crowdml.wire.statements import Statement

TEXT = """
name = "masked-{name}"
title = "A masked task whose weights show every total"
features = {{ dimension = {dimension}, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["a", "b"] }}
model = {{ kind = "softmax" }}
protocol = {{ kind = "sgd", batch = 1, step = {{ schedule = "constant", c = 1.0 }}, radius = 1e9 }}
privacy = {{ mechanism = "skellam", epsilon = {{ gradient = 1.0, labels = 1.0 }}, delta = 1e-6 }}
stop = {{ steps = {steps} }}
masking = {{ cohort = {cohort}, minimum = {minimum}, colluders = 0, window = {window}, lease = {lease} }}
"""
KIND = {"advertised": "secagg/advert/1", "shared": "secagg/shares/1", "agreed": "secagg/agreement/1",
        "revealed": "secagg/reveal/1"}  # fmt: skip


def make_masked(
    name: str = "one", *, cohort: int = 5, minimum: int = 4, steps: int = 1_000_000, window: float = 600.0,
    lease: float = 600.0, dimension: int = 4,
) -> Task:  # fmt: skip
    return settled(parse(masked_text(name, cohort, minimum, steps, window, lease, dimension)))


def masked_text(
    name: str, cohort: int, minimum: int, steps: int = 1_000_000, window: float = 600.0, lease: float = 600.0,
    dimension: int = 4,
) -> str:  # fmt: skip
    return TEXT.format(
        name=name, steps=steps, cohort=cohort, minimum=minimum, window=window, lease=lease, dimension=dimension
    )


def terms(task: Task) -> Terms:
    return terms_of(task, find(task).mechanisms(task))


@dataclass
class MaskedDevice:
    """Takes part in one round after another. `vectors` are what it masks: at first small numbers of its own."""

    inner: Device
    task: Task
    number: int
    state: DeviceRound | None = None
    after: int = 0
    sent: bytes = b""
    """Its last signed envelope."""
    seqs: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The vectors that it masked in each round."""

    def __post_init__(self) -> None:
        self.terms = terms(self.task)
        self.path = f"/v1/tasks/{self.task.hash.hex()}/round"

    @property
    def id(self) -> str:
        return self.inner.key.id

    def vectors(self, round: int) -> dict[str, Any]:  # noqa: A002
        rng = np.random.default_rng([self.number, round])
        return {each.tag: rng.integers(-3, 4, each.length) for each in self.terms.fields}

    def look(self, round: int | None = None) -> RoundView:  # noqa: A002
        answer = self.ask(round)
        assert answer.status == 200, answer.body
        return open_view(answer.body)

    def ask(self, round: int | None = None) -> Answer:  # noqa: A002
        return self.inner.signed("GET", self.path if round is None else f"{self.path}?round={round}")

    def envelope(self, kind: str, body: bytes, seq: int) -> bytes:
        to = Envelope(self.task.hash, self.id, frozenset((SERVER,)), seq, kind, body)
        return sign(to, Statement(("zcdp 1/10",), max(1, self.inner.seq), ("zcdp 1/10",)), self.inner.key)

    def post(self, data: bytes | None = None) -> Answer:
        """What it has to say in this phase, to the round."""
        if data is None:
            assert self.state is not None
            data = self.envelope(KIND[self.state.phase], self.state.sent, self.state.round)
        self.sent = data
        return self.inner.line.ask("POST", self.path, data, {"Content-Type": MSGPACK})

    def advertise(self, round: int | None = None) -> Answer:  # noqa: A002
        view = self.look(round)
        assert view.phase == "advertise"
        return self.begin(view.round)

    def begin(self, round: int) -> Answer:  # noqa: A002
        self.state = core.advertise(self.terms, round, self.inner.key, after=self.after)
        self.after = round
        return self.post()

    def step(self, vectors: dict[str, Any] | None = None) -> Answer | None:
        """Look, and answer what is asked; None where nothing is, or the task has stopped."""
        assert self.state is not None
        answer = self.ask(self.state.round)
        if answer.status == 410 and answer.slug == "task-stopped":
            return None
        assert answer.status == 200, answer.body
        view = open_view(answer.body)
        if not view.body:
            return None
        return self.hear(view, vectors)

    def hear(self, view: RoundView, vectors: dict[str, Any] | None = None) -> Answer:
        state, message = self.state, open_message(view.kind, view.body)
        assert state is not None
        match view.kind:
            case "secagg/cohort/1":
                self.state = core.share(self.terms, state, message)  # pyright: ignore[reportArgumentType]
            case "secagg/held/1":
                assert view.publication is not None
                hashed = publication_hash(*view.publication)
                held = core.hold(self.terms, state, message, hashed)  # pyright: ignore[reportArgumentType]
                mine = self.seqs[view.round] = self.vectors(view.round) if vectors is None else vectors
                self.state = core.mask(self.terms, held, mine)
                return self.check_in()
            case "secagg/survivors/1":
                self.state = core.agree(self.terms, state, self.inner.key, message)  # pyright: ignore[reportArgumentType]
            case "secagg/agreements/1":
                self.state = core.reveal(self.terms, state, message)  # pyright: ignore[reportArgumentType]
            case _:
                raise AssertionError(view.kind)
        return self.post()

    def check_in(self) -> Answer:
        """Its masked vector."""
        assert self.state is not None
        self.sent = self.envelope("secagg/masked/1", self.state.sent, self.inner.seq + 1)
        return self.send()

    def send(self) -> Answer:
        answer = self.inner.send(self.task, self.sent)
        if answer.status in (200, 202):
            self.inner.seq = max(self.inner.seq, answer.receipt.seq)
        return answer

    def forget(self) -> None:
        self.state = None


def crowd(server: Running, task: Task, many: int) -> list[MaskedDevice]:
    return [MaskedDevice(server.device(), task, number) for number in range(many)]


def through(
    devices: Iterable[MaskedDevice], until: Callable[[], bool], vectors: dict[int, dict[str, Any]] | None = None
) -> None:
    """Everybody steps, again and again, until it is so."""
    everyone = list(devices)
    for _ in range(400):
        if until():
            return
        for each in everyone:
            if each.state is None:
                continue
            given = None if vectors is None else vectors.get(each.number)
            answer = each.step(given)
            assert answer is None or answer.status in (200, 202), answer.body
    raise AssertionError("the round does not go on")


@dataclass
class Clock:
    """Seconds that a test moves."""

    now: float = 1000.0
    wall: float = 0.0
    """Seconds by which the clock on the wall has jumped."""

    def __call__(self) -> float:
        return self.now

    def utc(self) -> str:
        return (datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.now + self.wall)).isoformat(
            timespec="microseconds"
        )


@dataclass
class Room:
    """A runner without HTTP: devices hand it what they signed. `restart` is what a kill leaves: the store alone."""

    task: Task
    store: Store = field(default_factory=lambda: Store("sqlite://"))
    clock: Clock = field(default_factory=Clock)
    key: Key = field(default_factory=lambda: Key.from_secret(bytes([9]) * 32))

    def __post_init__(self) -> None:
        self.store.add_task(self.task.canonical, self.task.name, self.clock.utc(), "running")
        self.store.invite(b"c" * 32, self.clock.utc(), uses=100_000)
        self.restart()

    def restart(self) -> None:
        self.runner = TaskRunner(self.store, self.task.canonical, self.key, self.clock.utc, clock=self.clock)
        assert self.runner.rounds is not None
        self.rounds = self.runner.rounds
        self.rounds.open()

    def device(self, number: int) -> MaskedDevice:
        key = Key.from_secret(hashlib.sha256(b"device %d" % number).digest())
        self.store.enrol(b"c" * 32, key.public, self.clock.utc())
        return MaskedDevice(Device(DirectLine(self), key), self.task, number)  # pyright: ignore[reportArgumentType]

    def devices(self, many: int) -> list[MaskedDevice]:
        return [self.device(number) for number in range(many)]

    def accept(self, data: bytes, *, posted: bool) -> Any:
        (answer,) = self.runner.accept_rounds([open_signed(data)], [posted])
        self.sum_up()
        return answer

    def sum_up(self) -> None:
        """What the hub does beside its writing thread."""
        for state in self.runner.take_unsummed():
            self.runner.finish(state, core_server.close(self.rounds.terms, state))
        self.runner.advance()

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        if self.rounds.is_due():
            self.runner.advance()
            self.sum_up()

    def run(self, devices: Iterable[MaskedDevice], vectors: dict[int, dict[str, Any]] | None = None) -> None:
        """One round, from its adverts to its end."""
        chosen = list(devices)
        number = self.rounds.newest
        for each in chosen:
            assert each.advertise(number).status == 202
        through(chosen, lambda: number in self.rounds.ended, vectors)
        for each in chosen:
            each.forget()


@dataclass
class DirectLine:
    """Stands where a device has its connection."""

    room: Room

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        path, _, query = path.partition("?")
        try:
            if method == "GET":
                device = parse_authorization((headers or {})["Authorization"]).device
                found: Any = 200, self.room.rounds.view(device, int(query[6:]) if query else None).encode()
            else:
                found = self.room.accept(body or b"", posted=path.endswith("/round"))
        except Problem as problem:
            found = problem
        if isinstance(found, Problem):
            return Answer(found.status, {"content-type": "application/problem+json"}, found.encode())
        return Answer(found[0], {"content-type": MSGPACK}, found[1])


def total_of(devices: Iterable[MaskedDevice], round: int) -> dict[str, Any]:  # noqa: A002
    chosen = [each.seqs[round] for each in devices]
    return {tag: sum(each[tag] for each in chosen) for tag in chosen[0]}


__all__ = ["Clock", "MaskedDevice", "Room", "crowd", "make_masked", "terms", "through", "total_of"]
