"""The compiled engine: the protocol's own handlers and the event schedule, as one compiled loop.

A step of the loop is one check-in: the device's turn on the weights it read, then the server's. Weights that are still
on their way lie in a ring, as long as the stalest check-in is late. What is fed in says which samples, keys and weights
a check-in uses, in chunks, so memory does not grow with the run, and padded to a power of two, so that few lengths are
compiled; the samples themselves lie beside the loop, once for all trials. Trials run side by side: a thread each on a
CPU, and on an accelerator all in one `vmap`.
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
from crowdml.sim.crowd import Holding, Run, published, refuse_masked, small_releases, stops, turn
from crowdml.sim.pytrees import compile_alike, register
from crowdml.sim.schedule import Schedule
from crowdml.task import Task

CHUNK, TOGETHER = 1 << 16, 1 << 24
"""Samples that are gathered at once: for one trial, and for all that run in one `vmap`."""

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
    together: bool | None = None,
    tick: Tick = lambda _: None,
) -> list[Run]:
    """One `Run` for each schedule. `points` are the numbers of check-ins after which the model is looked at.

    `together` puts all trials into one `vmap`; they must then have equally many check-ins. By default it does so on an
    accelerator, where one trial alone would leave most of it idle.
    """
    protocol = find(task)
    refuse_masked(task)
    register()
    stale = max((int(schedule.staleness.max(initial=0)) for schedule in schedules), default=0)
    ring = 1 if stale == 0 else 1 << stale.bit_length()
    pairs = list(zip(schedules, seeds, strict=True))
    if together is None:
        together = jax.default_backend() != "cpu" and len({len(schedule) for schedule in schedules}) == 1
    groups = [pairs] if together else [[pair] for pair in pairs]
    loop = _loop(protocol, task, ring, noise, keep_said, together)

    def one(group: list[tuple[Schedule, int]]) -> list[Run]:
        return _trials(loop, protocol, task, holding, group, ring, points, tick)

    if workers <= 1 or len(groups) == 1:
        return [each for group in groups for each in one(group)]
    with ThreadPoolExecutor(workers) as pool:
        return [each for done in pool.map(one, groups) for each in done]


def _trials(
    loop: Loop,
    protocol: Protocol,
    task: Task,
    holding: Holding,
    group: list[tuple[Schedule, int]],
    ring: int,
    points: Sequence[int],
    tick: Tick,
) -> list[Run]:
    """One trial, or several of the same length with a leading axis on everything."""
    schedules = [schedule for schedule, _ in group]
    count = len(schedules[0])
    if any(len(schedule) != count for schedule in schedules):
        raise ValueError(
            f"Trials in one vmap have equally many check-ins; these have {[len(each) for each in schedules]}."
        )
    start = protocol.server.start(task, Context(me=SERVER))
    offered = jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (ring, *np.shape(leaf))), published(start))
    carry = jax.tree.map(jnp.asarray, (start.state, offered, np.int32(0)))
    pool = jnp.asarray(holding.x), jnp.asarray(holding.y)
    if loop.together:
        carry = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(group), *leaf.shape)), carry)
    keys = [stream(seed, schedule.device, schedule.trip) for schedule, seed in group]
    longest = max(1, min(CHUNK, TOGETHER // len(group)) // protocol.batch(task))
    ends = sorted({min(int(point), count) for point in points} | {count})
    looked: list[Array] = []
    said: list[dict[str, Array]] = []
    axis = int(loop.together)  # of the check-ins
    at = 0
    for end in ends:
        while at < end:
            upto = min(end, at + longest)
            feeds = [_feed(holding, each, key, ring, at, upto) for each, key in zip(schedules, keys, strict=True)]
            feed = tuple(np.stack(leaves) for leaves in zip(*feeds, strict=True)) if loop.together else feeds[0]
            jax.block_until_ready(carry)  # one block of samples waits while another is used, and no more
            carry, heard = loop.compiled(carry, feed, upto - at, pool)
            if heard is not None:
                said.append({name: np.asarray(part).take(np.arange(upto - at), axis) for name, part in heard.items()})
            tick((upto - at) * len(group))
            at = upto
        looked.append(np.asarray(protocol.model(task, carry[0])))
    weights, last = np.stack(looked), jax.tree.map(np.asarray, carry)
    heard = {name: np.concatenate([part[name] for part in said], axis) for name in said[0]} if said else {}
    return [
        _run_of(
            task,
            schedule,
            seed,
            np.asarray(ends),
            weights[:, number] if loop.together else weights,
            jax.tree.map(lambda leaf, n=number: leaf[n] if loop.together else leaf, last),
            {name: part[number] if loop.together else part for name, part in heard.items()},
            loop.reasons,
        )
        for number, (schedule, seed) in enumerate(group)
    ]


def _feed(holding: Holding, schedule: Schedule, keys: Array, ring: int, start: int, stop: int) -> tuple[Array, ...]:
    """What check-ins `start` to `stop` need, padded to a power of two by repeating the last."""
    wanted = np.minimum(np.arange(1 << (stop - start - 1).bit_length()) + start, stop - 1)
    rows = holding.rows(schedule.device[wanted][:, None], schedule.samples[wanted])
    return (
        rows.astype(np.int32),
        keys[wanted],
        schedule.trip[wanted].astype(np.int32),
        schedule.version[wanted] & (ring - 1),
        wanted.astype(np.int32),
    )


def _run_of(
    task: Task, schedule: Schedule, seed: int, points: Array, weights: Array, carry: Any, said: Any, reasons: list[str]
) -> Run:
    state, _, ended = carry
    stopped = reasons[int(ended) - 1] if int(ended) else None
    return Run(task, seed, schedule, points, weights, state, stopped, said)


@dataclass(frozen=True)
class Loop:
    """The compiled loop, and the reasons to stop that it may report: number k is `reasons[k - 1]`."""

    compiled: Any
    reasons: list[str]
    together: bool


@lru_cache(maxsize=32)
def _loop(protocol: Protocol, task: Task, ring: int, noise: bool, keep_said: bool, together: bool) -> Loop:
    names: list[str] = []

    def check_in(carry: Any, feed: Any) -> Any:
        state, offered, ended = carry
        x, y, key, trip, late, now = feed
        read = jax.tree.map(lambda leaf: leaf[0] if ring == 1 else leaf[late], offered)
        source = SeededSource(key) if noise else Silence()
        message, _ = turn(protocol, task, Samples(x, y), read, source, me=0, trip=trip)
        message = jax.lax.optimization_barrier(message)  # as on the wire: neither side is compiled into the other
        step = advance(protocol.server, task, state, message, Context(me=SERVER, sender=0, now=now))
        step = jax.lax.optimization_barrier(step)
        after, news, reasons = step.state, published(step), stops(step)
        if reasons:  # a stopped task changes no more
            last = jax.tree.map(lambda leaf: leaf[0] if ring == 1 else leaf[now & (ring - 1)], offered)
            after, news = jax.tree.map(lambda old, new: jnp.where(ended > 0, old, new), (state, last), (after, news))
            names[:] = [reason.reason for reason in reasons]
            for number, reason in enumerate(reasons, start=1):
                ended = jnp.where((ended == 0) & jnp.asarray(reason.when), number, ended)
        if ring == 1:
            offered = jax.tree.map(lambda leaf: leaf[None], news)
        else:
            place = (now + 1) & (ring - 1)  # within the ring, so nothing need be asked about bounds
            put = jax.lax.dynamic_update_index_in_dim
            offered = jax.tree.map(lambda leaf, new: put(leaf, new, place, 0), offered, news)
        return (after, offered, ended), small_releases(message) if keep_said else None

    def block(carry: Any, feed: Any, count: Any, pool: Any) -> Any:
        """The first `count` check-ins of the feed, and what they said, in a buffer as long as the feed.

        All its samples are gathered at once: within the loop that took a third of a step on a CPU.
        """
        feed = (*(leaf.at[feed[0]].get(mode="promise_in_bounds") for leaf in pool), *feed[1:])
        _, shapes = jax.eval_shape(check_in, carry, jax.tree.map(lambda leaf: leaf[0], feed))
        room = jax.tree.map(lambda leaf: jnp.zeros((feed[-1].shape[0], *leaf.shape), leaf.dtype), shapes)

        def body(i: Any, so_far: Any) -> Any:
            carry, said = so_far
            carry, heard = check_in(carry, jax.tree.map(lambda leaf: leaf[i], feed))
            return carry, jax.tree.map(lambda all_of, one: all_of.at[i].set(one), said, heard)

        return jax.lax.fori_loop(0, count, body, (carry, room))

    block = jax.vmap(block, in_axes=(0, 0, None, None)) if together else block
    compiled = compile_alike(block)
    return Loop(compiled, names, together)
