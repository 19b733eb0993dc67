"""Turns: the one place where a protocol's handlers are called, for the simulator, the device, the server and the tests.

A device's turn has a door of its own: what it lets out is on the door, to be charged, and every message has been
inspected before anybody encodes it. A shell carries out the rest of the outcome. It asks for the publication, sends,
publishes, sets a timer or stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, namespace
from crowdml.channels import Stacked
from crowdml.errors import ProtocolError
from crowdml.messages import SERVER, Address, altered, inspect
from crowdml.privacy.door import Door, Passage, Recorded
from crowdml.privacy.noise import Silence, Source
from crowdml.privacy.private import Private, Rows, Stamp
from crowdml.protocol import (
    CheckOut,
    Context,
    Effect,
    Protocol,
    Publish,
    Rule,
    Send,
    Sensed,
    Stop,
    Wake,
    Woken,
    advance,
)
from crowdml.records import record
from crowdml.task import Task

__all__ = [
    "Outcome", "Tamper", "check_in", "colluded", "device_turn", "first_device_turn", "first_turn", "letter_turn",
    "server_turn",
]  # fmt: skip


def _as_sensed(batch: Samples) -> Samples:
    return batch


def _as_let_out(row: str, steps: Array) -> Array:
    return steps


TIMERS = "seconds are finite and not negative; a tag has at most 200 characters, and none begins with 'crowdml/'."
MOST_WAKES = 16
"""How often a device may be woken within one check-in of a simulator."""


@record
class Tamper:
    """A device that lies: what it does to the samples it sensed, and to each row that it says, after the door.

    The ledger and the messages' shapes are those of an honest device, as a liar's would be.
    """

    sense: Callable[[Samples], Samples] = _as_sensed
    say: Callable[[str, Array], Array] = _as_let_out
    collude: Callable[[str, Array, Array], Array] | None = None
    """What all devices that lie in this way say in a round of uploads, once they know the row of all of them [M, ...]
    and which are theirs [M]: one value for all. Only a simulator can ask this."""
    still: Any = False
    """Whether the device adds no noise. Its own samples are then unprotected; the ledger is charged as if it had."""
    first: int = 0
    """It lies in so many of its first check-ins, and is honest after that. 0: it always lies."""

    def sensed(self, batch: Samples, trip: Any) -> Samples:
        """The samples as it changes them for this check-in."""
        lied = self.sense(batch)
        return lied if not self.first else Samples(*(self._while(trip, *pair) for pair in _pairs(lied, batch)))

    def said(self, row: str, steps: Array, trip: Any) -> Array:
        """A row as it says it in this check-in."""
        lied = self.say(row, steps)
        return lied if not self.first else self._while(trip, lied, steps)

    def _while(self, trip: Any, lied: Array, true: Array) -> Array:
        xp = namespace(true, trip)
        return xp.where(xp.asarray(trip) < self.first, lied, true).astype(true.dtype)


def colluded(uploads: Stacked, ways: Mapping[Tamper, Array]) -> Stacked:
    """A round of uploads after devices have colluded: each way to lie, and which uploads are of such devices [M]."""
    rows = dict(uploads.rows)
    for tamper, lies in ways.items():
        collude = tamper.collude
        if collude is None:
            continue
        for row, said in uploads.rows.items():
            xp, theirs = namespace(said, lies), lies.reshape(-1, *(1,) * (said.ndim - 1))
            rows[row] = xp.where(theirs, xp.asarray(collude(row, said, lies)).astype(said.dtype), rows[row])
    return Stacked(rows, uploads.devices)


def _pairs(lied: Samples, true: Samples) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return (lied.x, true.x), (lied.y, true.y)


@record
class Stilled:
    """The noise of a source, or none of it: whether a device of compiled code adds any is known in its loop alone."""

    source: Source
    still: Any

    def _kept(self, drawn: Array) -> Integers:
        return drawn * namespace(drawn, self.still).where(self.still, 0, 1).astype(drawn.dtype)

    def discrete_laplace(self, scale: Fraction, like: Array) -> Integers:
        return self._kept(self.source.discrete_laplace(scale, like))

    def discrete_gaussian(self, sigma: Fraction, like: Array) -> Integers:
        return self._kept(self.source.discrete_gaussian(sigma, like))

    def skellam(self, variance: Fraction, like: Array) -> Integers:
        return self._kept(self.source.skellam(variance, like))

    def uniform_below(self, n: int, like: Array) -> Integers:
        return self.source.uniform_below(n, like)


@record
class Outcome:
    """What one event brought about: the next state, and what the shell has to carry out."""

    state: Any
    effects: tuple[Effect, ...]
    door: Door | None = None

    @property
    def asks(self) -> bool:
        """Whether the device checks out: it wants the publication."""
        return any(isinstance(effect, CheckOut) for effect in self.effects)

    @property
    def said(self) -> tuple[tuple[frozenset[Address], Any], ...]:
        """Each message that leaves, and to whom."""
        sent = [effect for effect in self.effects if isinstance(effect, Send) and _holds(effect.when)]
        return tuple((frozenset((each.to,)) if isinstance(each.to, str) else each.to, each.message) for each in sent)

    @property
    def message(self) -> Any:
        """The one message that a device says in a turn."""
        said = self.said
        if len(said) != 1:
            names = [type(each).__name__ for _, each in said]
            raise ProtocolError(f"a turn says one message, and this one says {names}. Nothing was sent.")
        return said[0][1]

    @property
    def published(self) -> Any:
        """What the next check-out is answered with, if this step changed it."""
        return next((e.message for e in self.effects if isinstance(e, Publish) and _holds(e.when)), None)

    @property
    def stops(self) -> tuple[Stop, ...]:
        """Every rule that may end the task, whether or not it does now: compiled code asks each of them."""
        return tuple(effect for effect in self.effects if isinstance(effect, Stop))

    @property
    def stopped(self) -> Rule | None:
        """The rule that ends the task now."""
        return next((stop.rule for stop in self.stops if _holds(stop.when)), None)

    @property
    def wakes(self) -> tuple[Wake, ...]:
        return tuple(effect for effect in self.effects if isinstance(effect, Wake))

    @property
    def passages(self) -> list[Passage]:
        """What went through the door in this turn: the ledger is charged for it."""
        return [] if self.door is None else self.door.passages


def _holds(when: Any) -> bool:
    return when is None or bool(when)


def device_turn(
    protocol: Protocol,
    task: Task,
    state: Any,
    event: Any,
    *,
    noise: Source | None,
    me: Any,
    sender: Any = SERVER,
    trip: Any = 0,
    place: Any = -1,
    now: Any = 0.0,
    stamp: Stamp | None = None,
    tamper: Tamper | None = None,
) -> Outcome:
    """A device hears one event: samples that it sensed, a publication, a peer's message, or its timer.

    `trip` is how many check-ins of this task it made before, `place` where it stands in the task's list of places.
    Without `noise` there is no door, and nothing can leave. Every message of the outcome has been inspected: nothing
    leaks, and all that was released came through this door.
    """
    if noise is None:
        door, ctx = None, Context(me, sender, now, trip=trip, place=place)
    else:
        drawn = noise if tamper is None or tamper.still is False else Stilled(noise, tamper.still)
        door = Door(protocol.mechanisms(task), drawn, stamp or Stamp("this step"), trip=trip)
        ctx = Context(me, sender, now, door.release, door.masked, trip, place)
    if tamper is not None and isinstance(event, Sensed):
        event = Sensed(event.batch.map_rows(lambda batch: tamper.sensed(batch, trip)))
    step = advance(protocol.device, task, state, event, ctx)
    _check(step.effects, "device", (Publish,))
    effects = step.effects if tamper is None else tuple(_tampered(effect, tamper, trip) for effect in step.effects)
    for effect in effects:
        if isinstance(effect, Send):
            inspect(effect.message, door or Door({}, Silence()))
    return Outcome(step.state, effects, door)


def _tampered(effect: Effect, tamper: Tamper, trip: Any) -> Effect:
    if not isinstance(effect, Send):
        return effect
    return Send(effect.to, altered(effect.message, lambda row, steps: tamper.said(row, steps, trip)), effect.when)


def check_in(
    protocol: Protocol,
    task: Task,
    batch: Samples,
    publication: Any,
    *,
    noise: Source,
    me: Any,
    trip: Any = 0,
    place: Any = -1,
    now: Any = 0.0,
    state: Any = None,
    tamper: Tamper | None = None,
) -> Outcome:
    """A device's whole check-in: it has sensed a batch, checks out, and hears the publication.

    If it lets nothing out, says nothing and asks to be woken, it is woken at once. Without a `state` it begins as a
    device does that has heard nothing yet.
    """
    if state is None:
        state = first_device_turn(protocol, task, me=me, trip=trip, place=place)
    named: Mapping[str, Any] = {"me": me, "trip": trip, "place": place, "now": now, "tamper": tamper}
    sensed = Sensed(Private(batch, Rows(0, protocol.batch(task))))
    waiting = device_turn(protocol, task, state, sensed, noise=None, **named)
    if not waiting.asks:
        raise ProtocolError(f"protocol {protocol.name!r} does not check out when it has sensed, and a check-in does.")
    turn = device_turn(protocol, task, waiting.state, publication, noise=noise, **named)
    for _ in range(MOST_WAKES):
        if not turn.wakes or turn.passages or any(isinstance(effect, Send) for effect in turn.effects):
            break
        turn = device_turn(protocol, task, turn.state, Woken(turn.wakes[0].tag), noise=noise, **named)
    return turn


def first_device_turn(protocol: Protocol, task: Task, *, me: Any, trip: Any = 0, place: Any = -1) -> Any:
    """A device's start: the state of one that has sensed and heard nothing. It has no effects; one is refused."""
    step = protocol.device.start(task, Context(me, trip=trip, place=place))
    if step.effects:
        raise ProtocolError(
            f"the device of protocol {protocol.name!r} starts with {_names(step.effects)}: its start gives a state "
            "alone, and the first effects come when it senses. Return them from a handler. Nothing was sent."
        )
    return step.state


def letter_turn(
    protocol: Protocol, task: Task, state: Any, message: Any, *, me: Any, sender: Any, place: Any, now: Any = 0.0
) -> Any:
    """A device hears a peer's letter: the state with what it learned. It has no effects; one is refused."""
    turn = device_turn(protocol, task, state, message, noise=None, me=me, sender=sender, place=place, now=now)
    if turn.effects:
        raise ProtocolError(
            f"protocol {protocol.name!r} answers a peer's letter with {_names(turn.effects)}: a device that hears one "
            "learns from it, and speaks at its next check-in. Nothing was sent."
        )
    return turn.state


def first_turn(protocol: Protocol, task: Task) -> Outcome:
    """The server's start: the first state, and what it offers before anybody has checked in."""
    step = protocol.server.start(task, Context(SERVER))
    _check(step.effects, "server", (CheckOut, Send))
    return Outcome(step.state, step.effects)


def server_turn(
    protocol: Protocol,
    task: Task,
    state: Any,
    event: Any,
    *,
    sender: Any = None,
    now: Any = 0.0,
    door: Door | Recorded | None = None,
    rows: Private[Samples] | None = None,
) -> Outcome:
    """The server hears one event: a check-in, a cohort's total, a closed round, or its timer.

    `door` is the server's own, for a protocol that releases something (`server_mechanisms`) from `rows`, which are the
    server's. A replay gives it a door that knows what was released.
    """
    ctx = Context(SERVER, sender, now, rows=rows, predict=lambda after, x: _said(protocol, task, after, x))
    if door is not None:
        ctx = replace(ctx, release=door.release)
    step = advance(protocol.server, task, state, event, ctx)
    _check(step.effects, "server", (CheckOut, Send))
    return Outcome(step.state, step.effects, None if isinstance(door, Recorded) else door)


def _said(protocol: Protocol, task: Task, state: Any, x: Array) -> Array:
    return protocol.predict(task, protocol.model(task, state), x)


def _check(effects: tuple[Effect, ...], role: str, others: tuple[type, ...]) -> None:
    """Refuse an effect that this role cannot have, and a timer that nobody could keep: nobody would carry them out."""
    for wake in [effect for effect in effects if isinstance(effect, Wake)]:
        timed = namespace(wake.after) is not np or 0 <= wake.after < np.inf  # compiled code sets no timer
        if not timed or len(wake.tag) > 200 or wake.tag.startswith("crowdml/"):
            raise ProtocolError(f"the {role} asks to be woken after {wake.after} s as {wake.tag[:30]!r}: {TIMERS}")
    wrong = [effect for effect in effects if isinstance(effect, others)]
    if wrong:
        raise ProtocolError(
            f"the {role} returns {_names(wrong)}, which it cannot do: devices check out and send, the server "
            "publishes. Nothing was sent."
        )


def _names(effects: Iterable[Effect]) -> str:
    """`Publish and Wake`"""
    return " and ".join(sorted({type(effect).__name__ for effect in effects}))
