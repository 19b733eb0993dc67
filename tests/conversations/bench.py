"""A bench for conversations: one role of a protocol, events by hand, what it says and what that cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from crowdml.arrays import Samples
from crowdml.messages import Envelope, decode, seal
from crowdml.privacy.door import Passage
from crowdml.privacy.noise import Silence, Source
from crowdml.privacy.private import Private, Rows
from crowdml.protocol import Context, Protocol, Role, Sensed
from crowdml.task import Task
from crowdml.turn import Outcome, device_turn, server_turn

TASK = """
name = "bench"
[features]
dimension = {dimension}
norm = {{ kind = "{norm}", bound = 1.0 }}
[labels]
classes = {classes}
[model]
kind = "softmax"
{model}
[protocol]
kind = "sgd"
batch = {batch}
held_out = {held_out}
step = {{ schedule = "{schedule}", c = 2.0 }}
radius = {radius}
update = "{update}"
[privacy]
mechanism = "{mechanism}"
epsilon = {epsilon}
{stop}
"""

DEFAULTS: dict[str, Any] = {
    "dimension": 4,
    "norm": "l2",
    "classes": '["a", "b", "c"]',
    "model": "",
    "batch": 5,
    "held_out": 0,
    "schedule": "1/sqrt(t)",
    "radius": 100.0,
    "update": "sgd",
    "mechanism": "discrete-gaussian",
    "epsilon": "{ gradient = 1.0, errors = 0.5, labels = 0.5 }",
    "stop": "",
}


def task_text(**changes: Any) -> str:
    """A small task as TOML."""
    return TASK.format(**{**DEFAULTS, **changes})


MASKING = """
[masking]
cohort = {cohort}
minimum = {minimum}
colluders = {colluders}
{more}
"""


def masked_text(*, cohort: int = 6, minimum: int = 5, colluders: int = 1, more: str = "", **changes: Any) -> str:
    """The same under masks."""
    masking = MASKING.format(cohort=cohort, minimum=minimum, colluders=colluders, more=more)
    return task_text(**{"mechanism": "skellam", **changes}) + masking


def samples(seed: int, count: int = 5, dimension: int = 4, classes: int = 3, norm: int = 2) -> Samples:
    """Random samples on the sphere of this norm."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, dimension)).astype(np.float32)
    x /= np.linalg.norm(x, ord=norm, axis=1, keepdims=True)
    return Samples(x, rng.integers(0, classes, count).astype(np.int32))


def sensed(batch: Samples) -> Sensed:
    """What the shell tells a device whose buffer holds this batch."""
    return Sensed(Private(batch, Rows(0, len(batch))))


@dataclass(frozen=True)
class Answer:
    """What one event brought about."""

    turn: Outcome
    envelopes: tuple[Envelope, ...]

    @property
    def passages(self) -> tuple[Passage, ...]:
        return tuple(self.turn.passages)

    @property
    def kinds(self) -> list[str]:
        """Kinds of the messages that left."""
        return [envelope.kind for envelope in self.envelopes]

    @property
    def messages(self) -> list[Any]:
        """What the receiver reads: out of the bytes."""
        return [decode(envelope.kind, envelope.body) for envelope in self.envelopes]

    @property
    def effects(self) -> list[str]:
        return [type(effect).__name__ for effect in self.turn.effects]

    @property
    def published(self) -> Any:
        return self.turn.published

    @property
    def stopped(self) -> list[str]:
        return [stop.rule.sentence for stop in self.turn.stops if stop.when is None or bool(stop.when)]


@dataclass
class Bench:
    """One role of a protocol. Every event has its own turn; what passed its doors is in `ledger`, oldest first."""

    protocol: Protocol
    role: Role
    task: Task
    noise: Source = field(default_factory=Silence)
    ledger: list[Passage] = field(default_factory=list)
    seq: int = 0

    def __post_init__(self) -> None:
        step = self.role.start(self.task, Context(me="bench"))
        self.first = Outcome(step.state, step.effects)
        self.state = self.first.state

    @property
    def published(self) -> Any:
        """What the role offered before it heard anything."""
        return self.first.published

    def hears(self, event: Any, **context: Any) -> Answer:
        if self.role is self.protocol.server:
            turn = server_turn(self.protocol, self.task, self.state, event, **context)
        else:
            turn = device_turn(
                self.protocol, self.task, self.state, event, **{"noise": self.noise, "me": "bench", **context}
            )
        self.state = turn.state
        self.ledger.extend(turn.passages)
        sealed: list[Envelope] = []
        for to, message in turn.said:
            self.seq += 1
            sealed.append(seal(self.task.hash, "bench", to, self.seq, message, turn.door))
        return Answer(turn, tuple(sealed))


def device(protocol: Protocol, task: Task, noise: Source | None = None) -> Bench:
    return Bench(protocol, protocol.device, task, noise or Silence())


def server(protocol: Protocol, task: Task) -> Bench:
    return Bench(protocol, protocol.server, task)
