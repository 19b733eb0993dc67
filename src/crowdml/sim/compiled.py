"""The compiled engine: the protocol's own handlers and the event schedule, as one compiled loop.

A step of the loop is one check-in: the device's turn on the weights it read, then the server's. Weights that are still
on their way lie in a ring, as long as the stalest check-in is late. Samples are gathered outside the loop, in chunks,
so memory does not grow with the run. Trials run side by side: one thread each on a CPU, all in one `vmap` on a GPU.
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
from crowdml.messages import SERVER
from crowdml.privacy.noise import Silence
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocol import Context, Protocol, advance
from crowdml.protocols import find
from crowdml.sim.crowd import Holding, Run, published, small_releases, stops, turn
from crowdml.sim.pytrees import register
from crowdml.sim.schedule import Schedule
from crowdml.task import Task

CHUNK = 1 << 15
"""Check-ins whose samples are gathered at once."""

Tick = Callable[[int], None]


def run(
    task: Task,
    holding: Holding,
    schedules: Sequence[Schedule],
    seeds: Sequence[int],
    *,
    points: Sequence[int] = (),
    noise: bool = True,
    keep_said: bool = False,
    workers: int = 2,
    tick: Tick = lambda _: None,
) -> list[Run]:
    """One `Run` for each schedule. `points` are the numbers of check-ins after which the model is looked at."""
    protocol = find(task)
    register()
    stale = max((int(schedule.staleness.max(initial=0)) for schedule in schedules), default=0)
    ring = 1 if stale == 0 else 1 << stale.bit_length()
    loop = _loop(protocol, task, ring, noise, keep_said)

    def one(pair: tuple[Schedule, int]) -> Run:
        schedule, seed = pair
        return _trial(loop, protocol, task, holding, schedule, seed, ring, points, keep_said, tick)

    pairs = list(zip(schedules, seeds, strict=True))
    if workers <= 1 or len(pairs) == 1:
        return [one(pair) for pair in pairs]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, pairs))


def _trial(
    loop: Any,
    protocol: Protocol,
    task: Task,
    holding: Holding,
    schedule: Schedule,
    seed: int,
    ring: int,
    points: Sequence[int],
    keep_said: bool,
    tick: Tick,
) -> Run:
    start = protocol.server.start(task, Context(me=SERVER))
    state = jax.tree.map(jnp.asarray, start.state)
    offered = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (ring, *np.shape(leaf))), published(start))
    carry = (state, offered, jnp.int32(0))
    count = len(schedule)
    ends = sorted({min(int(point), count) for point in points} | {count})
    keys = stream(seed, schedule.device, schedule.trip)
    looked: list[Array] = []
    said: list[dict[str, Array]] = []
    at = 0
    for end in ends:
        while at < end:
            upto = min(end, at + CHUNK)
            cut = slice(at, upto)
            rows = holding.rows(schedule.device[cut][:, None], schedule.samples[cut])
            late = schedule.version[cut] & (ring - 1)
            feed = (holding.x[rows], holding.y[rows], keys[cut], late, np.arange(at, upto, dtype=np.int32))
            carry, heard = loop.compiled(carry, feed)
            if keep_said:
                said.append(heard)
            tick(upto - at)
            at = upto
        looked.append(np.asarray(protocol.model(task, carry[0])))
    ended = int(carry[2])
    whole = {name: np.concatenate([np.asarray(part[name]) for part in said]) for name in said[0]} if said else {}
    return Run(
        task=task,
        seed=seed,
        schedule=schedule,
        points=np.asarray(ends),
        weights=np.stack(looked),
        state=jax.tree.map(np.asarray, carry[0]),
        stopped=loop.reasons[ended - 1] if ended else None,
        said=whole,
    )


@dataclass(frozen=True)
class Loop:
    """The compiled loop, and the reasons to stop that it may report: number k is `reasons[k - 1]`."""

    compiled: Any
    reasons: list[str]


@lru_cache(maxsize=32)
def _loop(protocol: Protocol, task: Task, ring: int, noise: bool, keep_said: bool) -> Loop:
    names: list[str] = []

    def check_in(carry: Any, feed: Any) -> Any:
        state, offered, ended = carry
        x, y, key, late, now = feed
        read = jax.tree.map(lambda leaf: leaf[0] if ring == 1 else leaf[late], offered)
        source = SeededSource(key) if noise else Silence()
        message, _ = turn(protocol, task, Samples(x, y), read, source, me=0)
        message = jax.lax.optimization_barrier(message)  # as on the wire: neither side is compiled into the other
        step = advance(protocol.server, task, state, message, Context(me=SERVER, sender=0, now=now))
        step = jax.lax.optimization_barrier(step)
        after, news, reasons = step.state, published(step), stops(step)
        if reasons:  # a stopped task changes no more
            last = jax.tree.map(lambda leaf: leaf[0] if ring == 1 else leaf[now & (ring - 1)], offered)
            after, news = jax.tree.map(lambda old, new: jnp.where(ended > 0, old, new), (state, last), (after, news))
            names[:] = [reason.reason for reason in reasons]
            for number, reason in enumerate(reasons, start=1):
                ended = jnp.where((ended == 0) & reason.when, number, ended)
        if ring == 1:
            offered = jax.tree.map(lambda leaf: leaf[None], news)
        else:
            offered = jax.tree.map(lambda leaf, new: leaf.at[(now + 1) & (ring - 1)].set(new), offered, news)
        return (after, offered, ended), small_releases(message) if keep_said else None

    return Loop(jax.jit(lambda carry, feed: jax.lax.scan(check_in, carry, feed)), names)
