"""A bench for conversations: one role of a protocol, events by hand, what it says and what that cost."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from crowdml.arrays import Samples
from crowdml.messages import Envelope, decode, seal
from crowdml.privacy.door import Door, Passage
from crowdml.privacy.noise import Silence, Source
from crowdml.privacy.private import Private, Rows
from crowdml.protocol import Context, Protocol, Publish, Role, Send, Sensed, Step, Stop, advance
from crowdml.task import Task

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

    step: Step[Any]
    envelopes: tuple[Envelope, ...]
    passages: tuple[Passage, ...]

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
        return [type(effect).__name__ for effect in self.step.effects]

    @property
    def published(self) -> Any:
        return next((effect.message for effect in self.step.effects if isinstance(effect, Publish)), None)

    @property
    def stopped(self) -> list[str]:
        return [e.reason for e in self.step.effects if isinstance(e, Stop) and (e.when is None or bool(e.when))]


@dataclass
class Bench:
    """One role of a protocol. Every event has its own door; what passed it is in `ledger`, oldest first."""

    protocol: Protocol
    role: Role
    task: Task
    noise: Source = field(default_factory=Silence)
    ledger: list[Passage] = field(default_factory=list)
    seq: int = 0

    def __post_init__(self) -> None:
        self.first = self.role.start(self.task, Context(me="bench"))
        self.state = self.first.state

    @property
    def published(self) -> Any:
        """What the role offered before it heard anything."""
        return next(effect.message for effect in self.first.effects if isinstance(effect, Publish))

    def hears(self, event: Any, **context: Any) -> Answer:
        door = Door(self.protocol.mechanisms(self.task), self.noise)
        ctx = replace(Context(me="bench", release=door.release), **context)
        step = advance(self.role, self.task, self.state, event, ctx)
        self.state = step.state
        self.ledger.extend(door.passages)
        sealed: list[Envelope] = []
        for effect in step.effects:
            if isinstance(effect, Send):
                self.seq += 1
                to = frozenset((effect.to,)) if isinstance(effect.to, str) else effect.to
                sealed.append(seal(self.task.hash, "bench", to, self.seq, effect.message, door))
        return Answer(step, tuple(sealed), tuple(door.passages))


def device(protocol: Protocol, task: Task, noise: Source | None = None) -> Bench:
    return Bench(protocol, protocol.device, task, noise or Silence())


def server(protocol: Protocol, task: Task) -> Bench:
    return Bench(protocol, protocol.server, task)
