"""Masked rounds, compiled: cohort after cohort takes its turn on one publication, and the server steps on their sum.

Masks are left out: they cancel, and tests/sim/test_cohorts.py holds a round against the real ones. Everything else is
the protocol's own: the device's handler runs for each device of a cohort, side by side, and adds its own share of the
noise; the sum of the survivors' integers is what the server's handler hears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.errors import ProtocolError, TaskError
from crowdml.messages import SERVER, masked_steps, total
from crowdml.privacy.noise import Silence
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocol import Context, Protocol, advance
from crowdml.protocols import find
from crowdml.sim.crowd import Holding, Run, published, stops, turn
from crowdml.sim.pytrees import compile_alike, register
from crowdml.sim.schedule import Schedule
from crowdml.sim.world import uniform
from crowdml.task import Task

CHUNK = 1 << 18
"""Samples that are gathered at once."""
ORDER, VANISHED = 16, 17
"""What a random number is for, beside those of `world`."""


@dataclass(frozen=True)
class Rounds:
    """Who is in which round: R rounds of m places each."""

    device: Array  # [R, m]
    trip: Array  # [R, m] the device's how-many-th
    there: Array  # [R, m] whether the place was taken
    alive: Array  # [R, m] whether its message arrived

    def __len__(self) -> int:
        return len(self.device)


def lay_out(task: Task, holding: Holding, seed: int, *, rounds: int | None = None, dropout: float = 0.0) -> Rounds:
    """A public plan: the crowd in an order of its own for each trip, cut into cohorts. Nothing of it is a sample.

    A device takes part as often as it has batches. A cohort at the end that is too small for the task does not meet.
    """
    masking, batch = task.masking, find(task).batch(task)
    if masking is None:
        raise TaskError(f"task {task.name!r} has no [masking]: its devices check in one by one.")
    trips = holding.counts // batch
    pairs: list[tuple[Array, Array]] = []
    for trip in range(int(trips.max(initial=0))):
        present = np.flatnonzero(trips > trip)
        order = np.argsort(uniform(seed, present, trip, ORDER), kind="stable")
        pairs.append((present[order], np.full(len(present), trip)))
    device = np.concatenate([each for each, _ in pairs]) if pairs else np.zeros(0, np.int64)
    trip = np.concatenate([each for _, each in pairs]) if pairs else np.zeros(0, np.int64)
    count = len(device) // masking.cohort + (len(device) % masking.cohort >= masking.minimum)
    count = count if rounds is None else min(count, rounds)
    if count < 1:
        raise TaskError(
            f"{len(device)} check-ins of {holding.devices} devices make no cohort of at least {masking.minimum}."
        )
    places = np.arange(count * masking.cohort)
    there = (places < len(device)).reshape(count, -1)
    taken = np.minimum(places, len(device) - 1).reshape(count, -1)
    alive = there
    if dropout:
        alive = there & (uniform(seed, device[taken], trip[taken], VANISHED) >= dropout)
    return Rounds(device[taken].astype(np.int32), trip[taken].astype(np.int32), there, alive)


def run(
    task: Task,
    holding: Holding,
    seeds: Sequence[int],
    *,
    rounds: int | None = None,
    dropout: float = 0.0,
    points: Sequence[int] = (),
    noise: bool = True,
    workers: int = 2,
    tick: Callable[[int], None] = lambda _: None,
) -> list[Run]:
    """One `Run` for each seed; `points` are the numbers of rounds after which the model is looked at.

    A round with fewer survivors than the task's minimum is abandoned: the model stays, and its devices have paid.
    """
    protocol = find(task)
    if protocol.masked is None:
        raise ProtocolError(f"protocol {protocol.name!r} says nothing that could be summed under masks.")
    register()
    loop = _loop(protocol, task, noise)

    def one(seed: int) -> Run:
        return _trial(loop, protocol, task, holding, seed, rounds, dropout, points, tick)

    if workers <= 1 or len(seeds) == 1:
        return [one(seed) for seed in seeds]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, seeds))


def _trial(
    loop: Loop,
    protocol: Protocol,
    task: Task,
    holding: Holding,
    seed: int,
    rounds: int | None,
    dropout: float,
    points: Sequence[int],
    tick: Callable[[int], None],
) -> Run:
    laid = lay_out(task, holding, seed, rounds=rounds, dropout=dropout)
    batch, cohort = protocol.batch(task), laid.device.shape[1]
    start = protocol.server.start(task, Context(me=SERVER))
    carry = jax.tree.map(jnp.asarray, (start.state, published(start), np.int32(0)))
    longest = max(1, CHUNK // (batch * cohort))
    ends = sorted({min(int(point), len(laid)) for point in points} | {len(laid)})
    looked: list[Array] = []
    at = 0
    for end in ends:
        while at < end:
            upto = min(end, at + longest)
            carry = loop.compiled(carry, _feed(holding, laid, seed, batch, at, upto), upto - at)
            tick(upto - at)
            at = upto
        looked.append(np.asarray(protocol.model(task, carry[0])))
    state, _, ended = jax.tree.map(np.asarray, carry)
    taken = laid.there.reshape(-1)
    device, trip = laid.device.reshape(-1)[taken], laid.trip.reshape(-1)[taken]
    samples = trip[:, None] * batch + np.arange(batch, dtype=np.int32)
    round_of = np.repeat(np.arange(len(laid), dtype=np.int32), cohort)[taken]
    schedule = Schedule(device, trip, samples, round_of, round_of.astype(np.float64), 0)
    stopped = loop.reasons[int(ended) - 1] if int(ended) else None
    return Run(task, seed, schedule, np.asarray(ends), np.stack(looked), state, stopped)


def _feed(holding: Holding, laid: Rounds, seed: int, batch: int, start: int, stop: int) -> tuple[Array, ...]:
    """What rounds `start` to `stop` need, padded to a power of two by repeating the last."""
    wanted = np.minimum(np.arange(1 << (stop - start - 1).bit_length()) + start, stop - 1)
    device, trip = laid.device[wanted], laid.trip[wanted]
    rows = holding.rows(device[..., None], trip[..., None] * batch + np.arange(batch))
    keys = stream(seed, device, trip)
    return holding.x[rows], holding.y[rows], keys, laid.alive[wanted]


@dataclass(frozen=True)
class Loop:
    """The compiled loop, and the reasons to stop that it may report: number k is `reasons[k - 1]`."""

    compiled: Any
    reasons: list[str]


@lru_cache(maxsize=32)
def _loop(protocol: Protocol, task: Task, noise: bool) -> Loop:
    names: list[str] = []
    masking = task.masking
    assert masking is not None
    assert protocol.masked is not None
    hears: Any = protocol.masked[1]

    def one_round(carry: Any, feed: Any) -> Any:
        state, offered, ended = carry
        x, y, keys, alive = feed

        def says(x: Array, y: Array, key: Array) -> dict[str, Array]:
            source = SeededSource(key) if noise else Silence()
            message, _ = turn(protocol, task, Samples(x, y), offered, source, me=0)
            return masked_steps(message)

        said = jax.vmap(says)(x, y, keys)
        sums = {name: jnp.where(alive[:, None], each, 0).sum(0) for name, each in said.items()}
        devices = alive.sum().astype(jnp.int32)
        sums = jax.lax.optimization_barrier(sums)  # as on the wire: neither side is compiled into the other
        heard = total(hears.kind, sums, devices=jnp.maximum(devices, 1), version=offered.version)
        step = advance(protocol.server, task, state, heard, Context(me=SERVER))
        after, news, reasons = step.state, published(step), stops(step)
        held = (devices < masking.minimum) | (ended > 0)
        after, news = jax.tree.map(lambda old, new: jnp.where(held, old, new), (state, offered), (after, news))
        names[:] = [reason.reason for reason in reasons]
        for number, reason in enumerate(reasons, start=1):
            ended = jnp.where(~held & jnp.asarray(reason.when), number, ended)
        return after, news, ended

    def block(carry: Any, feed: Any, count: Any) -> Any:
        """The first `count` rounds of the feed."""
        return jax.lax.fori_loop(
            0, count, lambda i, so_far: one_round(so_far, jax.tree.map(lambda leaf: leaf[i], feed)), carry
        )

    return Loop(compile_alike(block), names)
