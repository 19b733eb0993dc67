"""A city of devices that teach each other: batch after batch, every message sealed into its bytes and opened again.

Devices sense the same hours, so they take turns: each says its counts of a batch, the server counts and relays, and
peers hear them before the next batch. Handlers are those of the devices and of the server; what a device learns at the
end it learns by itself, so that part runs on as many processes as are given.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, finite_samples
from crowdml.errors import TaskError
from crowdml.features.norms import into_ball
from crowdml.features.series import label, look_ahead
from crowdml.messages import SERVER, Envelope, decode, seal
from crowdml.models.clusters import Voters, predict
from crowdml.privacy.door import Door
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import Private, Rows
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocol import Context, Kept, Protocol, Publish, Send, Sensed, Stop, advance, place_of, quote
from crowdml.protocols import find
from crowdml.task import Task
from crowdml.wire.envelopes import pack_envelope
from crowdml.wire.keys import SIGNATURE_SIZE
from crowdml.wire.statements import Statement

__all__ = ["City", "commonest", "exchange", "learn", "right", "samples", "simulate"]


@dataclass(frozen=True)
class City:
    """What came of it."""

    task: Task
    states: tuple[Any, ...]
    """Of each device, at its place: what it heard."""
    kept: tuple[Kept, ...]
    """Of each device: its own windows and labels, which never leave it."""
    server: Any
    """The server's state: the noisy histogram of all."""
    said: Integers
    """[places] bytes that each device sent, as they are on the wire, signature and statement included."""
    heard: Integers
    """[places] bytes that each device was sent by the relay."""
    check_ins: Integers
    """[places] batches that each device gave."""
    voters: tuple[Voters | None, ...] = ()
    """What each device learned; None where it gave no batch."""


def simulate(
    task: Task,
    values: Array,
    *,
    seed: int,
    noise: bool = True,
    leaving: Mapping[int, int] | None = None,
    workers: int = 1,
    tick: Callable[[int], None] = lambda _: None,
) -> City:
    """Exchange, then learn: values [places, n], the readings of each place in the order of the task's list.

    `leaving`: places whose device is gone from that batch on. It learns from what it has until then.
    """
    city = exchange(task, values, seed=seed, noise=noise, leaving=leaving, tick=tick)
    voters = learn(task, city.states, city.kept, seed=seed, workers=workers, tick=tick)
    return replace(city, voters=voters)


def samples(task: Task, values: Array) -> tuple[Array, Array]:
    """The windows [m, w] and labels [m] that a device cuts from its readings [n]."""
    features = task.features
    x, target = look_ahead(values, features.dimension, features.horizon)
    y = label(target, [float(edge) for edge in task.labels.bins])
    norm: Any = features.norm.kind
    return into_ball(finite_samples(x, y).x, norm, float(features.norm.bound)), y


def exchange(
    task: Task,
    values: Array,
    *,
    seed: int,
    noise: bool = True,
    leaving: Mapping[int, int] | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> City:
    """Every batch of every device, said, counted, relayed and heard. A rest that fills no batch is not given."""
    protocol, places, gone = find(task), len(task.places), leaving or {}
    if protocol.peers is None or not protocol.peers(task):
        raise TaskError(f"task {task.name!r}: its devices have no peers; `crowdml simulate` runs it.")
    if len(values) != places:
        raise TaskError(f"task {task.name!r} lists {places} places, and there are readings of {len(values)}.")
    batch = protocol.batch(task)
    cut = [samples(task, each) for each in values]
    batches = [min(len(y) // batch, gone.get(place, len(y))) for place, (_, y) in enumerate(cut)]
    keys = stream(seed, np.arange(places)[:, None], np.arange(max(batches, default=0))[None])
    role, table = protocol.device, protocol.mechanisms(task)
    ctx = [Context(me=f"{place:032x}", place=np.int32(place)) for place in range(places)]
    states = [role.start(task, each).state for each in ctx]
    first = protocol.server.start(task, Context(me=SERVER))
    state, offered = first.state, _published(first, None)
    sizes = _sizes(protocol, task)
    said, heard = np.zeros(places, np.int64), np.zeros(places, np.int64)
    trips = np.zeros(places, np.int32)
    for number in range(max(batches, default=0)):
        letters: list[tuple[Envelope, int]] = []
        for place in range(places):
            if number >= batches[place]:
                continue
            x, y = cut[place]
            those = slice(number * batch, (number + 1) * batch)
            door = Door(table, SeededSource(keys[place, number]) if noise else Silence(), trip=number)
            here = _with(ctx[place], door, number)
            sensed = Sensed(Private(Samples(x[those], y[those]), Rows(0, batch)))
            waiting = advance(role, task, states[place], sensed, here)
            step = advance(role, task, waiting.state, offered, here)
            states[place], trips[place] = step.state, number + 1
            for effect in step.effects:
                if isinstance(effect, Send):
                    to = frozenset((effect.to,)) if isinstance(effect.to, str) else effect.to
                    envelope = seal(task.hash, here.me, to, number + 1, effect.message, door)  # pyright: ignore[reportArgumentType]
                    size = sizes(envelope)
                    said[place] += size
                    letters.append((envelope, size))
        for envelope, size in letters:
            message = decode(envelope.kind, envelope.body)
            after = advance(protocol.server, task, state, message, Context(me=SERVER, sender=envelope.sender))
            state, offered = after.state, _published(after, offered)
            stopped = any(isinstance(effect, Stop) and (effect.when is None or bool(effect.when))
                          for effect in after.effects)  # fmt: skip
            for place in map(place_of, envelope.to):
                if 0 <= place < places and number < gone.get(place, number + 1):
                    heard[place] += size
                    states[place] = advance(role, task, states[place], message, ctx[place]).state
            if stopped:
                break
        else:
            tick(len(letters))
            continue
        break
    kept = tuple(_kept(task, protocol, *cut[place], int(trips[place])) for place in range(places))
    return City(task, tuple(states), kept, state, said, heard, trips)


def learn(
    task: Task,
    states: Sequence[Any],
    kept: Sequence[Kept],
    *,
    seed: int,
    workers: int = 1,
    tick: Callable[[int], None] = lambda _: None,
) -> tuple[Voters | None, ...]:
    """What each device learns for itself, from what it heard and its own windows. Deterministic, however many work."""
    each = partial(_learn_one, task, seed)
    work = list(zip(range(len(states)), states, kept, strict=True))
    found: list[Voters | None] = []
    if workers == 1:
        for one in work:
            found.append(each(one))
            tick(1)
        return tuple(found)
    # Not forked: a process that has threads of XLA does not survive it.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for voters in pool.map(each, work, chunksize=max(1, min(16, len(work) // (2 * workers)))):
            found.append(voters)
            tick(1)
    return tuple(found)


def right(task: Task, voters: Sequence[Voters | None], values: Array) -> Array:
    """The share of labels that each device predicts, [places], on readings [places, m] that it has not seen.

    NaN of a device that learned nothing.
    """
    shares: list[float] = []
    for one, readings in zip(voters, values, strict=True):
        x, y = samples(task, readings)
        shares.append(np.nan if one is None else float((predict(one, x) == y).mean()))
    return np.array(shares)


def commonest(task: Task, learned: Array, values: Array) -> Array:
    """The same share of whoever says the commonest label of the readings learned from: [places]."""
    shares: list[float] = []
    for before, readings in zip(learned, values, strict=True):
        (_, seen), (_, y) = samples(task, before), samples(task, readings)
        shares.append(float((y == np.bincount(seen).argmax()).mean()))
    return np.array(shares)


def _learn_one(task: Task, seed: int, one: tuple[int, Any, Kept]) -> Voters | None:
    place, state, kept = one
    learner = find(task).learn
    return learner(task, state, kept, seed + place) if learner is not None and len(kept.numbers) else None


def _kept(task: Task, protocol: Protocol, x: Array, y: Array, given: int) -> Kept:
    """The samples of the last batches that a device gave, as many as it keeps."""
    batch = protocol.batch(task)
    first = max(0, given - protocol.keeps(task))
    those = slice(first * batch, given * batch)
    return Kept(x[those].reshape(-1, batch, x.shape[1]), y[those].reshape(-1, batch), np.arange(first, given))


def _with(ctx: Context, door: Door, trip: int) -> Context:
    return Context(ctx.me, release=door.release, masked=door.masked, trip=np.int32(trip), place=ctx.place)


def _published(step: Any, before: Any) -> Any:
    return next((effect.message for effect in step.effects if isinstance(effect, Publish)), before)


def _sizes(protocol: Protocol, task: Task) -> Callable[[Envelope], int]:
    """Bytes of a signed envelope. The statement that goes with it says what the device has paid so far."""
    priced, batch = quote(protocol, task), protocol.batch(task)
    known: dict[int, Statement] = {}

    def size(envelope: Envelope) -> int:
        count = envelope.seq
        if count not in known:
            known[count] = Statement.of(priced.device.scaled(count), count * batch, priced.sample())
        return SIGNATURE_SIZE + len(pack_envelope(envelope, known[count]))

    return size
