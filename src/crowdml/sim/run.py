"""What a trial gives back, whichever engine ran it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.errors import TaskError
from crowdml.privacy.door import Door
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import Private, Release, Rows, Stamp
from crowdml.privacy.seeded import SeededSource, streams
from crowdml.protocol import Protocol, Rule
from crowdml.sim.layout import Schedule
from crowdml.task import Task
from crowdml.turn import Outcome, server_turn

Tick = Callable[[int], None]
"""Hears how many more check-ins or rounds were done."""


@dataclass(frozen=True)
class Run:
    """One trial: the model at each point where it was looked at, and how it came about."""

    task: Task
    seed: int
    schedule: Schedule
    """What was paid for."""
    points: Array  # [E] check-ins or rounds heard when the model was looked at
    weights: Array  # [E, *shape]
    state: Any
    """The server's last state."""
    stopped: Rule | None = None
    """Why the task ended before the samples did."""
    said: Mapping[str, Array] = field(default_factory=dict)
    """The small releases of each check-in, by field [N, ...], where the engine was asked to keep them."""
    passages: Mapping[int, Any] = field(default_factory=dict)
    """What went through each device's door and from which samples, where the engine ran its doors one by one."""
    heard: int = 0
    """Check-ins, or rounds, that the server heard until it stopped."""

    @property
    def model(self) -> Array:
        return self.weights[-1]


def close_turn(
    protocol: Protocol,
    task: Task,
    state: Any,
    event: Any,
    *,
    seed: Array,
    number: Any,
    noise: bool,
    rows: Samples | None,
    now: float = 0.0,
) -> Outcome:
    """The server's turn on a closed round or its timer, with a door of its own where the protocol releases something
    from `rows` of the server's. The noise of its turn of this `number` comes from the halves of the seed."""
    table = protocol.server_mechanisms(task)
    if not table:
        return server_turn(protocol, task, state, event, now=now)
    if rows is None:
        raise TaskError(
            f"task {task.name!r} releases {', '.join(table)} from rows of the server's, and this trial gives it none: "
            "say `server_rows`."
        )
    nobody = np.full(1, 2**32 - 1, np.uint32)  # no device has this number
    key = streams(seed, nobody, number.reshape(1))[0]
    public = all(row.public for row in table.values())
    door = Door(table, SeededSource(key) if noise else Silence(), Stamp("the server's step"), public=public)
    return server_turn(protocol, task, state, event, now=now, door=door, rows=Private(rows, Rows(0, len(rows.y))))


def releases(message: Any) -> dict[str, Array]:
    """What a message let out, by field."""
    found = {entry.name: getattr(message, entry.name) for entry in fields(message)}
    return {name: each.value for name, each in found.items() if isinstance(each, Release)}


def small_releases(message: Any) -> dict[str, Array]:
    """The counts among a message's releases: fields of at most 64 integers."""
    return {name: value for name, value in releases(message).items() if value.size <= 64}
