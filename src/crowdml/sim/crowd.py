"""What both engines share: who holds which sample, one device's turn, and what a run gives back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.datasets.populations import DrawnPopulation, Population
from crowdml.errors import ProtocolError
from crowdml.messages import inspect
from crowdml.privacy.door import Door
from crowdml.privacy.noise import Source
from crowdml.privacy.private import Private, Release, Rows
from crowdml.protocol import CheckOut, Context, Protocol, Publish, Send, Sensed, Step, Stop, advance
from crowdml.sim.schedule import Schedule
from crowdml.task import Task


@dataclass(frozen=True)
class Holding:
    """The samples of a crowd: x [n, d], y [n], and which rows each device senses, in order; again in each pass."""

    x: Array
    y: Array
    population: Population | DrawnPopulation
    passes: int = 1

    def rows(self, device: Array, sample: Array) -> Array:
        """Row numbers of the samples that devices sense as their n-th, passes counted on."""
        if isinstance(self.population, DrawnPopulation):
            return self.population.rows(device, sample % self.population.per_device)
        return self.population.rows[device, sample % self.population.counts[device]]

    @cached_property
    def placed(self) -> tuple[Array, ...]:
        """The samples where compiled loops run, copied there once: x [M, n, d], y [M, n] and counts [M], device after
        device, so that a batch is one piece of memory; or of a drawn crowd the pool, x [n, d] and y [n]."""
        if isinstance(self.population, DrawnPopulation):
            return jnp.asarray(self.x), jnp.asarray(self.y)
        rows = self.population.rows
        return jnp.asarray(self.x[rows]), jnp.asarray(self.y[rows]), jnp.asarray(self.population.counts)

    @cached_property
    def pool(self) -> tuple[Array, ...]:
        """The samples where compiled loops run, x [n, d] and y [n], and whose they are, for `rows_of`."""
        samples = jnp.asarray(self.x), jnp.asarray(self.y)
        if isinstance(self.population, DrawnPopulation):
            return samples
        return *samples, jnp.asarray(self.population.rows), jnp.asarray(self.population.counts)

    @property
    def devices(self) -> int:
        return self.population.devices

    @property
    def counts(self) -> Array:
        """Samples that each device senses in all."""
        if isinstance(self.population, DrawnPopulation):
            return np.full(self.devices, self.population.per_device * self.passes)
        return self.population.counts * self.passes


def rows_of(pool: tuple[Array, ...], drawn: DrawnPopulation | None, device: Array, sample: Array) -> Array:
    """`Holding.rows` in a compiled loop, of a `Holding.pool`."""
    if drawn is not None:
        return drawn.rows(device, sample % drawn.per_device)
    _, _, table, counts = pool
    return table.at[device, sample % counts[device]].get(mode="promise_in_bounds")


def turn(
    protocol: Protocol, task: Task, batch: Samples, publication: Any, noise: Source, me: Any, trip: Any = 0
) -> tuple[Any, Door]:
    """A device's whole turn: it has sensed a batch, checks out, hears the publication, and says one message."""
    door = Door(protocol.mechanisms(task), noise, trip=trip)
    ctx = Context(me=me, release=door.release, masked=door.masked, trip=trip)
    role = protocol.device
    state = role.start(task, ctx).state
    private = Private(batch, Rows(0, protocol.batch(task)))
    waiting = advance(role, task, state, Sensed(private), ctx)
    if not any(isinstance(effect, CheckOut) for effect in waiting.effects):
        raise ProtocolError(
            f"protocol {protocol.name!r} does not check out when it has sensed; use the event queue for it."
        )
    answer = advance(role, task, waiting.state, publication, ctx)
    messages = [effect.message for effect in answer.effects if isinstance(effect, Send)]
    if len(messages) != 1:
        raise ProtocolError(
            f"protocol {protocol.name!r} says {len(messages)} messages a turn; use the event queue for it."
        )
    inspect(messages[0], door)
    return messages[0], door


def refuse_masked(task: Task) -> None:
    if task.masking is not None:
        raise ProtocolError(f"task {task.name!r} is masked: its devices meet in cohorts, which `cohorts.run` plays.")


def published(step: Step[Any]) -> Any:
    """What the server offers after this step, if the step changed it."""
    for effect in step.effects:
        if isinstance(effect, Publish):
            if effect.when is not None:
                raise ProtocolError(
                    "a publication that depends on a value is not simulated yet: publish in every step."
                )
            return effect.message
    return None


def stops(step: Step[Any]) -> list[Stop]:
    return [effect for effect in step.effects if isinstance(effect, Stop)]


def small_releases(message: Any) -> dict[str, Array]:
    """The counts among a message's releases: fields of at most 64 integers."""
    found = {entry.name: getattr(message, entry.name) for entry in fields(message)}
    return {name: each.value for name, each in found.items() if isinstance(each, Release) and each.value.size <= 64}


@dataclass(frozen=True)
class Run:
    """One trial: the model at each point where it was looked at, and how it came about."""

    task: Task
    seed: int
    schedule: Schedule
    points: Array  # [E] check-ins applied when the model was looked at
    weights: Array  # [E, *shape]
    state: Any
    """The server's last state."""
    stopped: str | None = None
    """Why the task ended before the samples did."""
    said: Mapping[str, Array] = field(default_factory=dict)
    """The small releases of each check-in, by field [N, ...], where the engine was asked to keep them."""

    passages: Mapping[int, Any] = field(default_factory=dict)
    """Of each device, what went through its door and from which samples, where the engine ran its doors one by one."""

    @property
    def model(self) -> Array:
        return self.weights[-1]
