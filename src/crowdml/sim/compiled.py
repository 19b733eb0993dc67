"""The compiled engine: the protocol's own handlers and the layout of a run, as one compiled loop.

One by one, a step of the loop is one check-in: the device's turn on the weights it read, then the server's. Weights
that are still on their way lie in a ring, as long as the stalest check-in is late. What is fed in is the schedule
itself, in chunks, so memory does not grow with the run, and padded to a power of two, so that few lengths are compiled;
which rows and keys that means is worked out where the loop runs, and the samples lie there, once for all trials. Trials
run side by side: a thread each on a CPU, and on an accelerator all in one `vmap`.

In rounds, a step is a round: its devices take their turns on one publication, side by side, and the server hears their
sum, or all that they said at once (GATHERED). Masks are left out: they cancel, and tests/sim/test_cohorts.py holds a
round against the real ones. Everything else is the protocol's own: each device adds its own share of the noise.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.channels import Channel, Stacked, combining
from crowdml.datasets.populations import DrawnPopulation
from crowdml.errors import ProtocolError
from crowdml.messages import masked_steps, total
from crowdml.privacy.noise import Silence
from crowdml.privacy.seeded import SeededSource, halves, streams
from crowdml.protocol import Gathered, Protocol, Rule
from crowdml.protocols import find
from crowdml.secagg.terms import fields_of
from crowdml.sim.events import Liars
from crowdml.sim.layout import Holding, Rounds, Schedule, rows_of
from crowdml.sim.pytrees import compile_alike, kept_apart, register
from crowdml.sim.run import Run, Tick, close_turn, releases, small_releases
from crowdml.task import Task
from crowdml.turn import Tamper, check_in, colluded, first_turn, server_turn

CHUNK, TOGETHER = 1 << 16, 1 << 22
"""Samples that are gathered at once: for one trial, and for all that run in one `vmap`."""
STRIDE, UNROLLED = 64, 16
"""Check-ins after which an accelerator reports to its host, and those that it has in one turn of its loop."""
FED = 1 << 20
"""Check-ins of rounds that are fed at once."""
ALONE = 1 << 13
"""Numbers in a device's samples and its model: above this many, a CPU takes one device after another.

There a product for many devices at once is slower than as many products. Below it, starting each turn costs more.
"""
ROOM = 1 << 22
"""Numbers, of all devices together, that a CPU computes side by side: what its caches hold."""
PARTS = 24
"""Bytes of an accelerator's memory to allow for each number that it computes side by side with others."""


def rates_uploads(task: Task) -> bool:
    """Whether a rule tries single uploads on rows of the server's own, which NumPy does one after the other."""
    by = combining(task)
    return by is not None and by.rooted


def can_run(task: Task) -> bool:
    """Whether this engine runs the task: its channel has a layout of fixed size, and its handlers can be traced."""
    protocol, gathering = find(task), find(task).gathers(task)
    fixed = protocol.channel(task) is not Channel.RELAYED and (gathering is None or gathering.seconds is None)
    return fixed and protocol.traced and not protocol.waits and not rates_uploads(task)


def run(
    task: Task,
    holding: Holding,
    laid: Sequence[Schedule | Rounds],
    seeds: Sequence[int],
    *,
    points: Sequence[int] = (),
    noise: bool = True,
    keep_said: bool = False,
    workers: int = 2,
    together: bool | None = None,
    liars: Liars | None = None,
    server_rows: Samples | None = None,
    tick: Tick = lambda _: None,
) -> Sequence[Run]:
    """One `Run` for each layout. `points` are the numbers of check-ins, or rounds, after which the model is looked at.

    `together` puts all trials of check-ins into one `vmap`; they must then have equally many. By default it does so on
    an accelerator, where one trial alone would leave most of it idle. A cohort with fewer survivors than the task's
    minimum is abandoned: the model stays, and its devices have paid.
    """
    protocol = find(task)
    in_rounds = isinstance(laid[0], Rounds) if laid else task.masking is not None
    if in_rounds != (protocol.channel(task) is not Channel.ONE_BY_ONE):
        how = "meet in cohorts, which `layout.meet` lays out" if task.masking else "do not meet"
        raise ProtocolError(f"task {task.name!r} is {'' if task.masking else 'not '}masked: its devices {how}.")
    if in_rounds and any(each.read is not None for each in laid if isinstance(each, Rounds)):
        raise ProtocolError("cohorts that are under way at the same time run event by event: `events.run_rounds`.")
    register()
    drawn = holding.population if isinstance(holding.population, DrawnPopulation) else None
    lies = Lies.of(liars or {}, holding.devices)
    pairs: Any = list(zip(laid, seeds, strict=True))
    if in_rounds:
        groups = [[pair] for pair in pairs]

        def one(group: Any) -> Sequence[Run]:
            laid_out, seed = group[0]
            return [
                _rounds_trial(protocol, task, holding, drawn, laid_out, seed, points, noise, lies, server_rows, tick)
            ]

    else:
        stale = max((schedule.stalest for schedule, _ in pairs), default=0)
        ring = 1 if stale == 0 else 1 << stale.bit_length()
        if together is None:
            together = jax.default_backend() != "cpu" and len({len(schedule) for schedule, _ in pairs}) == 1
        groups = [pairs] if together else [[pair] for pair in pairs]
        loop = _loop(protocol, task, ring, noise, keep_said, together, drawn, lies.kinds)

        def one(group: Any) -> Sequence[Run]:
            return _trials(loop, protocol, task, holding, group, ring, points, lies, tick)

    if len(groups) == 1:
        return one(groups[0])
    if workers <= 1:
        return [each for group in groups for each in one(group)]
    with ThreadPoolExecutor(workers) as pool:
        return [each for done in pool.map(one, groups) for each in done]


@dataclass(frozen=True)
class Lies:
    """Devices that lie: each way once, and which of them a device has [M], 0 for honest ones; None where all are."""

    kinds: tuple[Tamper, ...]
    of_device: Array | None

    @staticmethod
    def of(liars: Liars, devices: int) -> Lies:
        if not liars:
            return Lies((), None)
        kinds = tuple(dict.fromkeys(liars.values()))
        whose = np.zeros(devices, np.int32)
        for device, tamper in liars.items():
            whose[device] = 1 + kinds.index(tamper)
        return Lies(kinds, whose)


def _lying(kinds: tuple[Tamper, ...], which: Any, trip: Any) -> Tamper | None:
    """What a device does whose way to lie is only known in the loop: all of them are computed, and one is taken."""
    if not kinds:
        return None

    def taken(honest: Any, others: list[Any]) -> Any:
        return jax.tree.map(lambda *each: jax.lax.select_n(which, *(jnp.asarray(one) for one in each)), honest, *others)

    return Tamper(
        lambda batch: taken(batch, [kind.sensed(batch, trip) for kind in kinds]),
        lambda row, steps: taken(steps, [kind.said(row, steps, trip).astype(steps.dtype) for kind in kinds]),
        still=jnp.asarray([False, *(kind.still for kind in kinds)])[which]
        if any(kind.still for kind in kinds)
        else False,
    )


# --- one by one ---


def _trials(
    loop: Loop,
    protocol: Protocol,
    task: Task,
    holding: Holding,
    group: list[tuple[Schedule, int]],
    ring: int,
    points: Sequence[int],
    lies: Lies,
    tick: Tick,
) -> Sequence[Run]:
    """One trial, or several of the same length with a leading axis on everything."""
    schedules = [schedule for schedule, _ in group]
    count = len(schedules[0])
    if any(len(schedule) != count for schedule in schedules):
        raise ValueError(
            f"Trials in one vmap have equally many check-ins; these have {[len(each) for each in schedules]}."
        )
    start = first_turn(protocol, task)
    carry: Any = jax.device_put((start.state, start.published, np.zeros(2, np.int32)))  # all in one go
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
            carry, heard = loop.compiled(
                carry, feed, seeds, np.int32(at), np.int32(upto - at), holding.pool, lies.of_device
            )
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
        state, (rule, heard) = last[0], last[1].tolist()
        stopped = self.loop.rules[rule - 1] if rule else None
        heard = heard if rule else len(schedule)
        return Run(self.task, seed, schedule, self.points, weights, state, stopped, said, heard=heard)


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
    """The compiled loop, and the rules to stop that it may report: number k is `rules[k - 1]`."""

    compiled: Any
    rules: list[Rule]
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
    kinds: tuple[Tamper, ...],
) -> Loop:
    rules: list[Rule] = []
    told: dict[int, int] = {}
    start = first_turn(protocol, task)
    first = _same(start.state, start.published)

    def one(state: Any, ended: Any, read: Any, last: Any, feed: Any, now: Any) -> Any:
        """A device's turn on what it `read`, and the server's, who offers `last` now: -> state, ended, news, said.

        `ended` is the rule that stopped the task, and after how many check-ins.
        """
        x, y, key, trip, which = feed
        source = SeededSource(key) if noise else Silence()
        lies = _lying(kinds, which, trip)
        message = check_in(protocol, task, Samples(x, y), read, noise=source, me=0, trip=trip, tamper=lies).message
        message = kept_apart(message)  # as on the wire: neither side is compiled into the other
        turn = server_turn(protocol, task, state, message, sender=0, now=now)
        after, news, whens = kept_apart((turn.state, turn.published, [stop.when for stop in turn.stops]))
        if whens:  # a stopped task changes no more
            after, news = jax.tree.map(lambda old, new: jnp.where(ended[0] > 0, old, new), (state, last), (after, news))
            rules[:] = [stop.rule for stop in turn.stops]
            for number, when in enumerate(whens, start=1):
                ended = jnp.where((ended[0] == 0) & jnp.asarray(when), jnp.stack([number, now + 1]), ended)
        told.clear()
        told.update(_same(after, news))
        return after, ended, news, small_releases(message) if keep_said else None

    each = jax.vmap(one, in_axes=(0, 0, 0, 0, 0, None)) if together else one

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

    def block(carry: Any, feed: Any, seeds: Any, start: Any, count: Any, pool: Any, liars: Any) -> Any:
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
        which = None if liars is None else liars[device]
        fed = (x, y, keys, trip, which, version & (ring - 1))
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

    return Loop(compile_alike(block), rules, together)


# --- in rounds ---


def _rounds_trial(
    protocol: Protocol,
    task: Task,
    holding: Holding,
    drawn: DrawnPopulation | None,
    laid: Rounds,
    seed: int,
    points: Sequence[int],
    noise: bool,
    lies: Lies,
    own: Samples | None,
    tick: Tick,
) -> Run:
    batch, crowd, places = protocol.batch(task), holding.placed, laid.device.shape[1]
    summed = protocol.channel(task) is Channel.SUMMED
    everyone = summed and drawn is None and crowd[0].shape[:2] == (places, batch) and laid.in_order and not lies.kinds
    loop = _rounds_loop(protocol, task, noise, drawn, everyone, lies.kinds)
    start = first_turn(protocol, task)
    carry = jax.device_put((start.state, start.published, np.int32(0), np.int32(0)))  # all in one go
    longest = max(1, FED // (places * laid.gathered))
    ends = sorted({min(int(point), laid.length) for point in points} | {laid.length})
    looked: list[Array] = []
    at = 0
    for end in ends:
        while at < end:
            upto = min(end, at + longest)
            feed = jax.device_put(_rounds_feed(laid, at, upto, loop))
            carry = loop.compiled(carry, feed, halves(seed), np.int32(upto - at), crowd, lies.of_device, own)
            tick(upto - at)
            at = upto
        looked.append(protocol.model(task, carry[0]))
    looked, (state, _, ended, done) = jax.device_get((looked, carry))
    done, stopped = int(done), loop.rules[int(ended) - 1] if int(ended) else None
    paid = laid.paid(batch, None if done == laid.length else done)
    return Run(task, seed, paid, np.asarray(ends), np.stack(looked), state, stopped, heard=done)


def _rounds_feed(laid: Rounds, start: int, stop: int, loop: RoundsLoop) -> tuple[Array, ...]:
    """What rounds `start` to `stop` need, [rounds, blocks, width] each, padded to a power of two by repeating the last.

    Places that fill the last block up are nobody's: their message does not arrive. Of everyone only the trip is asked.
    Where totals of cohorts are gathered these are [rounds, cohorts, blocks, width], of those that were summed.
    """
    if loop.everyone:
        return (laid.trip[start:stop, 0],)
    width, several = loop.width, laid.gathered
    over = -laid.device.shape[1] % width
    more = (1 << (stop - start - 1).bit_length()) - (stop - start)
    those = slice(start, stop)
    if several > 1:
        those = np.flatnonzero(laid.summed)[start * several : stop * several]

    def padded(each: Array, last: Array) -> Array:
        each = np.concatenate([each, np.broadcast_to(last, (len(each), over))], 1) if over else each
        each = each.reshape(stop - start, several, -1, width)
        return np.pad(each, ((0, more), (0, 0), (0, 0), (0, 0)), mode="edge") if more else each

    parts = [padded(each[those], each[those, -1:]) for each in (laid.device, laid.trip, laid.first)]
    parts.append(padded(laid.alive[those], np.zeros((1, 1), bool)))
    return tuple(parts if several > 1 else (part[:, 0] for part in parts))


@dataclass(frozen=True)
class RoundsLoop:
    """The compiled loop of rounds, and the rules to stop that it may report: number k is `rules[k - 1]`."""

    compiled: Any
    rules: list[Rule]
    width: int
    """Devices whose turns are computed side by side."""
    everyone: bool
    """Whether these are all that there are, so that their samples are used where they lie."""


@lru_cache(maxsize=32)
def _rounds_loop(
    protocol: Protocol,
    task: Task,
    noise: bool,
    drawn: DrawnPopulation | None,
    everyone: bool,
    kinds: tuple[Tamper, ...],
) -> RoundsLoop:
    rules: list[Rule] = []
    masking, batch = task.masking, protocol.batch(task)
    gathering = protocol.gathers(task)
    size = 1 if gathering is None else gathering.size
    places, minimum = (size, size) if masking is None else (masking.cohort, masking.minimum)
    low = {} if masking is None else _low_bits(protocol, task)
    width = _width(protocol, task, places)
    everyone = everyone and width == places > 1

    def sensed(crowd: Any, device: Array, first: Array) -> Samples:
        """The batch that a device senses from its `first`-th sample on. It lies within one pass."""
        if drawn is not None:
            rows = drawn.rows(device, (first + jnp.arange(batch, dtype=jnp.int32)) % drawn.per_device)
            return Samples(crowd[0][rows], crowd[1][rows])
        x, y, counts = crowd
        if x.shape[1] == batch:  # nobody has more than this one
            return Samples(*(leaf.at[device].get(mode="promise_in_bounds") for leaf in (x, y)))
        begin = first % counts[device]
        piece = jax.lax.dynamic_slice(x, (device, begin, 0), (1, batch, x.shape[-1]))
        return Samples(piece[0], jax.lax.dynamic_slice(y, (device, begin), (1, batch))[0])

    def one_round(carry: Any, feed: Any, seed: Any, crowd: Any, liars: Any, own: Any) -> Any:
        state, offered, ended, done = carry

        def message(device: Array, trip: Array, samples: Samples) -> Any:
            source = SeededSource(streams(seed, device, trip)) if noise else Silence()
            lies = _lying(kinds, None if liars is None else liars[device], trip)
            return check_in(protocol, task, samples, offered, noise=source, me=0, trip=trip, tamper=lies).message

        def says(device: Array, trip: Array, samples: Samples, alive: Any = True) -> dict[str, Any]:
            steps = masked_steps(message(device, trip, samples))
            return {name: _split(jnp.where(alive, each, 0), low[name]) for name, each in steps.items()}

        def one(device: Array, trip: Array, first: Array, alive: Array) -> dict[str, Any]:
            return says(device, trip, sensed(crowd, device, first), alive)

        def added(said: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf.sum(0, dtype=leaf.dtype), said)

        def block(so_far: Any, some: Any) -> Any:
            # a product over a batch of one is not as fast as a product
            said = one(*(each[0] for each in some)) if width == 1 else added(jax.vmap(one)(*some))
            return jax.tree.map(jnp.add, so_far, said), None

        def of_everyone() -> tuple[Any, Any]:
            everybody, (x, y, _) = jnp.arange(width, dtype=jnp.int32), crowd
            split = added(jax.vmap(says, in_axes=(0, None, 0))(everybody, feed[0], Samples(x, y)))
            return split, jnp.int32(width)

        def of_cohort(cohort: Any) -> tuple[Any, Any]:
            shapes = jax.eval_shape(one, *(each[0, 0] for each in cohort))
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            split, _ = jax.lax.scan(block, nothing, cohort)
            return split, cohort[-1].sum().astype(jnp.int32)

        def heard_of(split: Any, devices: Any) -> Any:
            """The total of a cohort, as the server hears it: neither side is compiled into the other."""
            assert protocol.masked is not None
            hears: Any = protocol.masked[1]
            sums = kept_apart({name: _whole(each, low[name]) for name, each in split.items()})
            return total(hears.kind, sums, devices=jnp.maximum(devices, 1), version=offered.version)

        def upload(device: Array, trip: Array, first: Array, alive: Array) -> dict[str, Array]:
            return releases(message(device, trip, sensed(crowd, device, first)))

        if masking is None:  # places beyond the round's size are nobody's
            said = jax.lax.map(lambda some: jax.vmap(upload)(*some), feed)
            rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[:size], said)
            uploads = Stacked(kept_apart(rows), jnp.ones(size, jnp.int32))
            if any(kind.collude is not None for kind in kinds):
                ways = liars[feed[0].reshape(-1)[:size]]
                uploads = colluded(uploads, {kind: ways == number for number, kind in enumerate(kinds, start=1)})
            heard, held = Gathered(done, uploads), ended > 0
        elif gathering is not None:
            rows = jax.lax.map(lambda cohort: releases(heard_of(*of_cohort(cohort))), feed)
            heard, held = Gathered(done, Stacked(kept_apart(rows), feed[-1].sum((1, 2)).astype(jnp.int32))), ended > 0
        else:
            split, devices = of_everyone() if everyone else of_cohort(feed)
            heard, held = heard_of(split, devices), (devices < minimum) | (ended > 0)
        if gathering is None:
            turn = server_turn(protocol, task, state, heard)
        else:
            turn = close_turn(protocol, task, state, heard, seed=seed, number=done, noise=noise, rows=own)
        after, news = turn.state, offered if turn.published is None else turn.published
        after, news = jax.tree.map(lambda old, new: jnp.where(held, old, new), (state, offered), (after, news))
        rules[:] = [stop.rule for stop in turn.stops]
        done = done + (ended == 0)
        for number, stop in enumerate(turn.stops, start=1):
            ended = jnp.where(~held & jnp.asarray(stop.when), number, ended)
        return after, news, ended, done

    def rounds(carry: Any, feed: Any, seed: Any, count: Any, crowd: Any, liars: Any, own: Any) -> Any:
        """The first `count` rounds of the feed."""

        def body(i: Any, so_far: Any) -> Any:
            return one_round(so_far, jax.tree.map(lambda leaf: leaf[i], feed), seed, crowd, liars, own)

        return jax.lax.fori_loop(0, count, body, carry)

    return RoundsLoop(compile_alike(rounds), rules, width, everyone)


def _width(protocol: Protocol, task: Task, cohort: int) -> int:
    """How many devices have their turns side by side: as memory goes; or one alone, where that keeps a CPU busy."""
    start = first_turn(protocol, task)
    floats = protocol.batch(task) * task.features.dimension + int(np.size(protocol.model(task, start.state)))
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and floats > ALONE:
        return 1
    blocks = -(-cohort // max(1, (ROOM if on_cpu else _memory() // PARTS) // floats))
    return -(-cohort // blocks)  # as even as can be: what fills a block up is computed in vain


def _memory() -> int:
    """Bytes that an accelerator has for us."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 1 << 32)


def _low_bits(protocol: Protocol, task: Task) -> dict[str, int]:
    """For each row, how many bits of its numbers are added up apart; 0 where sums fit 32: on the wire such have 64.

    As many as the sum over a cohort has room for in 32.
    """
    assert task.masking is not None
    rows = protocol.mechanisms(task)
    if task.privacy.mechanism == "none":
        return dict.fromkeys(rows, 0)
    apart = 32 - (task.masking.cohort - 1).bit_length()
    return {field.tag: min(16, apart) if field.bits > 32 else 0 for field in fields_of(task, rows)}


def _split(each: Array, low: int) -> tuple[Array, ...]:
    """What is added up over the cohort. JAX has no 64 bits here: of a wide sum, the upper and the lower ones apart."""
    return (each >> low, (each & ((1 << low) - 1)).astype(jnp.uint32)) if low else (each,)


def _whole(sums: tuple[Array, ...], low: int) -> Array:
    """The sum; a wide one as a float32, in which it is used."""
    if len(sums) == 1:
        return sums[0]
    return sums[0].astype(jnp.float32) * (1 << low) + sums[1].astype(jnp.float32)
