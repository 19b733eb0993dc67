"""The compiled engine: the protocol's own handlers and the event schedule, as one compiled loop.

A step of the loop is one check-in: the device's turn on the weights it read, then the server's. Weights that are still
on their way lie in a ring, as long as the stalest check-in is late. What is fed in is the schedule itself, in chunks,
so memory does not grow with the run, and padded to a power of two, so that few lengths are compiled; which rows and
keys that means is worked out where the loop runs, and the samples lie there, once for all trials. Trials run side by
side: a thread each on a CPU, and on an accelerator all in one `vmap`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.datasets.populations import DrawnPopulation
from crowdml.messages import SERVER
from crowdml.privacy.noise import Silence
from crowdml.privacy.seeded import SeededSource, halves, streams
from crowdml.protocol import Context, Protocol, advance
from crowdml.protocols import find
from crowdml.sim.crowd import Holding, Run, published, refuse_masked, rows_of, small_releases, stops, turn
from crowdml.sim.pytrees import compile_alike, kept_apart, register
from crowdml.sim.schedule import Schedule
from crowdml.task import Task

CHUNK, TOGETHER = 1 << 16, 1 << 22
"""Samples that are gathered at once: for one trial, and for all that run in one `vmap`."""
STRIDE, UNROLLED = 64, 16
"""Check-ins after which an accelerator reports to its host, and those that it has in one turn of its loop."""

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
) -> Sequence[Run]:
    """One `Run` for each schedule. `points` are the numbers of check-ins after which the model is looked at.

    `together` puts all trials into one `vmap`; they must then have equally many check-ins. By default it does so on an
    accelerator, where one trial alone would leave most of it idle.
    """
    protocol = find(task)
    refuse_masked(task)
    register()
    stale = max((schedule.stalest for schedule in schedules), default=0)
    ring = 1 if stale == 0 else 1 << stale.bit_length()
    pairs = list(zip(schedules, seeds, strict=True))
    if together is None:
        together = jax.default_backend() != "cpu" and len({len(schedule) for schedule in schedules}) == 1
    groups = [pairs] if together else [[pair] for pair in pairs]
    drawn = holding.population if isinstance(holding.population, DrawnPopulation) else None
    loop = _loop(protocol, task, ring, noise, keep_said, together, drawn)

    def one(group: list[tuple[Schedule, int]]) -> Sequence[Run]:
        return _trials(loop, protocol, task, holding, group, ring, points, tick)

    if len(groups) == 1:
        return one(groups[0])
    if workers <= 1:
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
) -> Sequence[Run]:
    """One trial, or several of the same length with a leading axis on everything."""
    schedules = [schedule for schedule, _ in group]
    count = len(schedules[0])
    if any(len(schedule) != count for schedule in schedules):
        raise ValueError(
            f"Trials in one vmap have equally many check-ins; these have {[len(each) for each in schedules]}."
        )
    start = protocol.server.start(task, Context(me=SERVER))
    carry: Any = jax.device_put((start.state, published(start), np.int32(0)))  # all in one go
    if loop.together:
        carry = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (len(group), *leaf.shape)), carry)
    state, first, ended = carry
    carry = state, jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (ring, *leaf.shape)), first), ended
    seeds = halves([seed for _, seed in group])
    longest = max(1, min(CHUNK, TOGETHER // len(group)) // protocol.batch(task))
    ends = sorted({min(int(point), count) for point in points} | {count})
    cuts = sorted({0, *ends, *(at for low, end in itertools.pairwise([0, *ends]) for at in range(low, end, longest))})
    blocks = list(itertools.pairwise(cuts))
    looked: list[Array] = []
    said: list[dict[str, Array]] = []
    with ThreadPoolExecutor(1) as ahead:  # one block is fed while another is computed, and no more
        own, which = _distinct(schedules)
        feeds = [ahead.submit(_fed, own, which, *block) for block in blocks[:1]]
        for number, (at, upto) in enumerate(blocks):
            feed = feeds.pop().result()
            feeds += [ahead.submit(_fed, own, which, *block) for block in blocks[number + 1 : number + 2]]
            jax.block_until_ready(carry)
            carry, heard = loop.compiled(carry, feed, seeds, np.int32(at), np.int32(upto - at), holding.pool)
            if heard is not None:
                said.append({name: np.asarray(part)[: upto - at] for name, part in heard.items()})
            tick((upto - at) * len(group))
            if upto in ends:
                looked.append(protocol.model(task, carry[0]))
    looked, last = jax.device_get((looked, (carry[0], carry[2])))  # what is on its way stays there
    weights = np.stack(looked)
    heard = {name: np.concatenate([part[name] for part in said]) for name in said[0]} if said else {}
    return Runs(task, group, np.asarray(ends), weights, last, heard, loop)


@dataclass(frozen=True)
class Runs(Sequence[Run]):
    """The trials of a loop, each taken out of their arrays when it is asked for: of thousands that takes a while."""

    task: Task
    group: list[tuple[Schedule, int]]
    points: Array
    weights: Array
    last: Any
    said: dict[str, Array]
    loop: Loop

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        schedule, seed = self.group[number]
        weights, last, said = self.weights, self.last, self.said
        if self.loop.together:
            weights, last = weights[:, number], jax.tree.map(lambda leaf: leaf[number], last)
            said = {name: part[:, number] for name, part in said.items()}
        state, ended = last
        stopped = self.loop.reasons[int(ended) - 1] if int(ended) else None
        return Run(self.task, seed, schedule, self.points, weights, state, stopped, said)


def _distinct(schedules: Sequence[Schedule]) -> tuple[list[Schedule], Array | None]:
    """Each schedule once, and which of them a trial has: many trials may differ in their noise alone."""
    own = {id(each): each for each in schedules}
    if len(own) == len(schedules):
        return list(schedules), None
    place = {name: number for number, name in enumerate(own)}
    return list(own.values()), np.array([place[id(each)] for each in schedules], np.int32)


def _fed(schedules: Sequence[Schedule], which: Array | None, start: int, stop: int) -> Any:
    """The feed, where the loop runs."""
    return jax.device_put((_feed(schedules, start, stop), which))


def _feed(schedules: Sequence[Schedule], start: int, stop: int) -> tuple[Array, ...]:
    """Check-ins `start` to `stop` of each trial as they are laid out, [T, K] each, padded to a power of two."""
    count = stop - start
    over = (1 << (count - 1).bit_length()) - count
    fed: list[Array] = []
    for name in ("device", "trip", "samples", "version"):
        whole = np.concatenate([getattr(schedule, name)[start:stop] for schedule in schedules])
        whole = whole.reshape(len(schedules), count, *whole.shape[1:]).astype(np.int32, copy=False)
        padding = ((0, 0), (0, over), (0, 0))[: whole.ndim]
        fed.append(np.pad(whole, padding, mode="edge") if over else whole)  # the last again: it is not used
    return tuple(fed)


@dataclass(frozen=True)
class Loop:
    """The compiled loop, and the reasons to stop that it may report: number k is `reasons[k - 1]`."""

    compiled: Any
    reasons: list[str]
    together: bool


def _same(state: Any, publication: Any) -> dict[int, int]:
    """Which leaves of the server's state are leaves of what it offers: the very same objects."""
    offered = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(publication))}
    return {n: offered[id(leaf)] for n, leaf in enumerate(jax.tree.leaves(state)) if id(leaf) in offered}


def _turns(body: Any, count: Any, carry: Any) -> Any:
    """`carry = body(i, carry)` for i below `count`.

    An accelerator that does not know how many turns there are reports to its host after each: there `STRIDE` turns of
    a known number stand within one of the unknown.
    """
    if jax.default_backend() == "cpu":
        return jax.lax.fori_loop(0, count, body, carry)
    strides = count // STRIDE

    def stride(number: Any, carry: Any) -> Any:
        return jax.lax.fori_loop(0, STRIDE, lambda i, so_far: body(number * STRIDE + i, so_far), carry, unroll=UNROLLED)

    carry = jax.lax.fori_loop(0, strides, stride, carry)
    return jax.lax.fori_loop(strides * STRIDE, count, body, carry)


@lru_cache(maxsize=32)
def _loop(
    protocol: Protocol,
    task: Task,
    ring: int,
    noise: bool,
    keep_said: bool,
    together: bool,
    drawn: DrawnPopulation | None,
) -> Loop:
    names: list[str] = []
    told: dict[int, int] = {}
    start = protocol.server.start(task, Context(me=SERVER))
    first = _same(start.state, published(start))

    def check_in(state: Any, ended: Any, read: Any, last: Any, feed: Any, now: Any) -> Any:
        """A device's turn on what it `read`, and the server's, who offers `last` now: -> state, ended, news, said."""
        x, y, key, trip = feed
        source = SeededSource(key) if noise else Silence()
        message, _ = turn(protocol, task, Samples(x, y), read, source, me=0, trip=trip)
        message = kept_apart(message)  # as on the wire: neither side is compiled into the other
        step = advance(protocol.server, task, state, message, Context(me=SERVER, sender=0, now=now))
        step = kept_apart(step)
        after, news, reasons = step.state, published(step), stops(step)
        if reasons:  # a stopped task changes no more
            after, news = jax.tree.map(lambda old, new: jnp.where(ended > 0, old, new), (state, last), (after, news))
            names[:] = [reason.reason for reason in reasons]
            for number, reason in enumerate(reasons, start=1):
                ended = jnp.where((ended == 0) & jnp.asarray(reason.when), number, ended)
        told.clear()
        told.update(_same(after, news))
        return after, ended, news, small_releases(message) if keep_said else None

    each = jax.vmap(check_in, in_axes=(0, 0, 0, 0, 0, None)) if together else check_in

    def step(carry: Any, feed: Any, now: Any) -> Any:
        """One check-in of each trial. Publications lie in a ring, [ring, T, ...]: a step writes one in one piece."""
        state, offered, ended = carry
        *feed, late = feed
        everyone = (jnp.arange(len(late)),) if together else ()
        read = jax.tree.map(lambda leaf: leaf.at[late, *everyone].get(mode="promise_in_bounds"), offered)
        last = jax.tree.map(lambda leaf: leaf[now & (ring - 1)], offered)
        state, ended, news, heard = each(state, ended, read, last, feed, now)
        place = (now + 1) & (ring - 1)
        put = jax.lax.dynamic_update_index_in_dim
        offered = jax.tree.map(lambda leaf, new: put(leaf, new, place, 0), offered, news)
        return (state, offered, ended), heard

    def block(carry: Any, feed: Any, seeds: Any, start: Any, count: Any, pool: Any) -> Any:
        """The first `count` check-ins of the feed, and what they said, in a buffer as long as the feed.

        All its samples are gathered at once: within the loop that took a third of a step on a CPU. Check-ins come
        first, then trials, so that what a step needs lies in one piece.
        """
        feed, which = feed
        device, trip, samples, version = (
            jnp.swapaxes(leaf if which is None else leaf.at[which].get(mode="promise_in_bounds"), 0, 1) for leaf in feed
        )
        rows = rows_of(pool, drawn, device[..., None], samples)
        keys = streams(seeds, device, trip)
        x, y = (leaf.at[rows].get(mode="promise_in_bounds") for leaf in pool[:2])
        fed = (x, y, keys, trip, version & (ring - 1))
        if not together:
            fed = jax.tree.map(lambda leaf: leaf[:, 0], fed)
        _, shapes = jax.eval_shape(step, carry, jax.tree.map(lambda leaf: leaf[0], fed), start)
        room = jax.tree.map(lambda leaf: jnp.zeros((len(device), *leaf.shape), leaf.dtype), shapes)
        twice = dict(told.items() & first.items())  # the server has it in its state, and offers it: kept once
        form = jax.tree.structure(carry[0])

        def rest(carry: Any) -> Any:
            state, offered, ended = carry
            return [leaf for number, leaf in enumerate(jax.tree.leaves(state)) if number not in twice], offered, ended

        def whole(carry: Any, now: Any) -> Any:
            kept, offered, ended = carry
            others, news = iter(kept), jax.tree.leaves(offered)
            state = [
                news[twice[number]][now & (ring - 1)] if number in twice else next(others)
                for number in range(form.num_leaves)
            ]
            return form.unflatten(state), offered, ended

        def body(i: Any, so_far: Any) -> Any:
            carry, said = so_far
            carry, heard = step(whole(carry, start + i), jax.tree.map(lambda leaf: leaf[i], fed), start + i)
            return rest(carry), jax.tree.map(lambda all_of, one: all_of.at[i].set(one), said, heard)

        carry, said = _turns(body, count, (rest(carry), room))
        return whole(carry, start + count), said

    return Loop(compile_alike(block), names, together)
