"""Masked rounds, compiled: cohort after cohort takes its turn on one publication, and the server steps on their sum.

Masks are left out: they cancel, and tests/sim/test_cohorts.py holds a round against the real ones. Everything else is
the protocol's own: the device's handler runs for each device of a cohort, side by side, and adds its own share of the
noise; the sum of the survivors' integers is what the server's handler hears.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.datasets.populations import DrawnPopulation
from crowdml.errors import TaskError
from crowdml.messages import SERVER, masked_steps, total
from crowdml.privacy.noise import Silence
from crowdml.privacy.seeded import SeededSource, halves, streams
from crowdml.protocol import Context, Protocol, advance
from crowdml.protocols import find
from crowdml.secagg.terms import fields_of
from crowdml.sim.crowd import Holding, Run, published, stops, turn
from crowdml.sim.pytrees import compile_alike, kept_apart, register
from crowdml.sim.schedule import Schedule
from crowdml.sim.world import uniform
from crowdml.task import Task

CHUNK = 1 << 20
"""Check-ins that are fed at once."""
ALONE = 1 << 13
"""Numbers in a device's samples and its model: above this many, a CPU takes one device after another.

There a product for many devices at once is slower than as many products. Below it, starting each turn costs more.
"""
ROOM = 1 << 22
"""Such numbers of all devices that a CPU computes side by side: what its caches hold."""
PARTS = 24
"""Of an accelerator's memory in bytes: one of them for every such number."""
ORDER, VANISHED = 16, 17
"""What a random number is for, beside those of `world`."""


@dataclass(frozen=True)
class Rounds:
    """Who is in which round: R rounds of m places each."""

    device: Array  # [R, m]
    trip: Array  # [R, m] the device's how-many-th
    first: Array  # [R, m] the first of the samples that it takes, passes counted on; the next ones follow
    there: Array  # [R, m] whether the place was taken
    alive: Array  # [R, m] whether its message arrived

    def __len__(self) -> int:
        return len(self.device)

    @cached_property
    def in_order(self) -> bool:
        """Whether devices 0, 1, 2, ... meet in every round, and all their messages arrive."""
        places = np.arange(self.device.shape[1], dtype=np.int32)
        return bool(self.alive.all()) and bool((self.device == places).all())


def lay_out(task: Task, holding: Holding, seed: int, *, rounds: int | None = None, dropout: float = 0.0) -> Rounds:
    """A public plan: the crowd in an order of its own for each trip, cut into cohorts. Nothing of it is a sample.

    A device takes part as often as it has whole batches, in every pass anew: no batch holds a sample twice. Nor does a
    cohort hold a device twice, for then one sum would hold a sample twice and be charged as two. A cohort that is too
    small for the task does not meet.
    """
    masking, batch = task.masking, find(task).batch(task)
    if masking is None:
        raise TaskError(f"task {task.name!r} has no [masking]: its devices check in one by one.")
    held = holding.counts // holding.passes
    met = _meetings((held // batch) * holding.passes, masking.cohort, seed)
    met = [_sorted(*each) for each in met if len(each[0]) >= masking.minimum][:rounds]
    if not met:
        raise TaskError(
            f"{holding.devices} devices with {int((held // batch).sum())} batches make no cohort of at least "
            f"masking.minimum = {masking.minimum}."
        )
    device = np.stack([np.resize(each, masking.cohort) for each, _ in met])
    trip = np.stack([np.resize(each, masking.cohort) for _, each in met])
    there = np.arange(masking.cohort) < np.array([len(each) for each, _ in met])[:, None]
    a_pass, place = np.divmod(trip, np.maximum(held // batch, 1)[device])
    first = a_pass * held[device] + place * batch
    alive = there & (uniform(seed, device, trip, VANISHED) >= dropout) if dropout else there
    return Rounds(device.astype(np.int32), trip.astype(np.int32), first.astype(np.int32), there, alive)


def _meetings(trips: Array, cohort: int, seed: int) -> list[tuple[Array, Array]]:
    """Devices and their trips, cohort after cohort. Who is left over from one trip meets with others from the next."""
    met: list[tuple[Array, Array]] = []
    waiting, since = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for trip in range(int(trips.max(initial=0))):
        present = np.flatnonzero(trips > trip)
        order = present[np.argsort(uniform(seed, present, trip, ORDER), kind="stable")]
        if len(waiting):
            more = order[~np.isin(order, waiting)][: cohort - len(waiting)]
            met.append((np.append(waiting, more), np.append(since, np.full(len(more), trip))))
            order = order[~np.isin(order, more)]
        full = len(order) // cohort * cohort
        met += [(each, np.full(cohort, trip)) for each in order[:full].reshape(-1, cohort)]
        waiting, since = order[full:], np.full(len(order) - full, trip)
    return [*met, (waiting, since)] if len(waiting) else met


def _sorted(device: Array, trip: Array) -> tuple[Array, Array]:
    """A cohort in the order in which its devices lie: a sum does not ask for another, and memory is read in it."""
    order = np.argsort(device)
    return device[order], trip[order]


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
    plans: Sequence[Rounds] | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> list[Run]:
    """One `Run` for each seed; `points` are the numbers of rounds after which the model is looked at.

    `plans` are what `lay_out` made for the seeds, where that has been done. A round with fewer survivors than the
    task's minimum is abandoned: the model stays, and its devices have paid.
    """
    protocol = find(task)
    register()
    drawn = holding.population if isinstance(holding.population, DrawnPopulation) else None
    crowd, batch = holding.placed, protocol.batch(task)

    def one(number: int) -> Run:
        seed = seeds[number]
        laid = lay_out(task, holding, seed, rounds=rounds, dropout=dropout) if plans is None else plans[number]
        everyone = drawn is None and crowd[0].shape[:2] == (laid.device.shape[1], batch) and laid.in_order
        loop = _loop(protocol, task, noise, drawn, everyone)
        return _trial(loop, crowd, protocol, task, seed, laid, points, tick)

    if workers <= 1 or len(seeds) == 1:
        return [one(number) for number in range(len(seeds))]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, range(len(seeds))))


def _trial(
    loop: Loop,
    crowd: tuple[Any, ...],
    protocol: Protocol,
    task: Task,
    seed: int,
    laid: Rounds,
    points: Sequence[int],
    tick: Callable[[int], None],
) -> Run:
    batch = protocol.batch(task)
    start = protocol.server.start(task, Context(me=SERVER))
    carry = jax.device_put((start.state, published(start), np.int32(0), np.int32(0)))  # all in one go
    longest = max(1, CHUNK // laid.device.shape[1])
    ends = sorted({min(int(point), len(laid)) for point in points} | {len(laid)})
    looked: list[Array] = []
    at = 0
    for end in ends:
        while at < end:
            upto = min(end, at + longest)
            feed = jax.device_put(_feed(laid, at, upto, loop))
            carry = loop.compiled(carry, feed, halves(seed), np.int32(upto - at), crowd)
            tick(upto - at)
            at = upto
        looked.append(protocol.model(task, carry[0]))
    looked, (state, _, ended, done) = jax.device_get((looked, carry))
    schedule = paid(laid, batch, int(done))
    stopped = loop.reasons[int(ended) - 1] if int(ended) else None
    return Run(task, seed, schedule, np.asarray(ends), np.stack(looked), state, stopped)


def paid(laid: Rounds, batch: int, rounds: int) -> Schedule:
    """What the first so many rounds cost: a check-in for each device that was there, survivor or not, summed or not."""

    def write() -> Schedule:
        taken = laid.there[:rounds].reshape(-1)
        device, trip, first = (each[:rounds].reshape(-1)[taken] for each in (laid.device, laid.trip, laid.first))
        samples = first[:, None] + np.arange(batch, dtype=np.int32)
        round_of = np.repeat(np.arange(rounds, dtype=np.int32), laid.device.shape[1])[taken]
        return Schedule(device, trip, samples, round_of, round_of.astype(np.float64), 0)

    return Paid(write)


class Paid(Schedule):
    """A schedule that is written down when it is asked for.

    Of a million devices with sixty samples each it has a quarter of a gigabyte, and takes longer than their rounds.
    """

    def __init__(self, write: Callable[[], Schedule]) -> None:
        self.__dict__["_write"] = write

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self.__dict__.update(vars(self.__dict__["_write"]()))
        return self.__dict__[name]


def _feed(laid: Rounds, start: int, stop: int, loop: Loop) -> tuple[Array, ...]:
    """What rounds `start` to `stop` need, [rounds, blocks, width] each, padded to a power of two by repeating the last.

    Places that fill the last block up are nobody's: their message does not arrive. Of everyone only the trip is asked.
    """
    if loop.everyone:
        return (laid.trip[start:stop, 0],)
    width = loop.width
    over = -laid.device.shape[1] % width
    more = (1 << (stop - start - 1).bit_length()) - (stop - start)

    def padded(each: Array, last: Array) -> Array:
        each = np.concatenate([each, np.broadcast_to(last, (len(each), over))], 1) if over else each
        return np.pad(each, ((0, more), (0, 0)), mode="edge") if more else each

    parts = [padded(each[start:stop], each[start:stop, -1:]) for each in (laid.device, laid.trip, laid.first)]
    parts.append(padded(laid.alive[start:stop], np.zeros((1, 1), bool)))
    return tuple(part.reshape(len(part), -1, width) for part in parts)


@dataclass(frozen=True)
class Loop:
    """The compiled loop, and the reasons to stop that it may report: number k is `reasons[k - 1]`."""

    compiled: Any
    reasons: list[str]
    width: int
    """Devices whose turns are computed side by side."""
    everyone: bool
    """Whether these are all that there are, so that their samples are used where they lie."""


@lru_cache(maxsize=32)
def _loop(protocol: Protocol, task: Task, noise: bool, drawn: DrawnPopulation | None, everyone: bool) -> Loop:
    names: list[str] = []
    masking = task.masking
    assert masking is not None
    assert protocol.masked is not None
    hears: Any = protocol.masked[1]
    low = _low_bits(protocol, task)
    batch = protocol.batch(task)
    width = _width(protocol, task, masking.cohort)
    everyone = everyone and width == masking.cohort > 1

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

    def one_round(carry: Any, feed: Any, seed: Any, crowd: Any) -> Any:
        state, offered, ended, done = carry

        def says(device: Array, trip: Array, batch: Samples, alive: Any = True) -> dict[str, Any]:
            source = SeededSource(streams(seed, device, trip)) if noise else Silence()
            message, _ = turn(protocol, task, batch, offered, source, me=0, trip=trip)
            steps = masked_steps(message)
            return {name: _split(jnp.where(alive, each, 0), low[name]) for name, each in steps.items()}

        def one(device: Array, trip: Array, first: Array, alive: Array) -> dict[str, Any]:
            return says(device, trip, sensed(crowd, device, first), alive)

        def added(said: Any) -> Any:
            return jax.tree.map(lambda leaf: leaf.sum(0, dtype=leaf.dtype), said)

        def block(so_far: Any, some: Any) -> Any:
            # a product over a batch of one is not as fast as a product
            said = one(*(each[0] for each in some)) if width == 1 else added(jax.vmap(one)(*some))
            return jax.tree.map(jnp.add, so_far, said), None

        if everyone:
            everybody, (x, y, _) = jnp.arange(width, dtype=jnp.int32), crowd
            split = added(jax.vmap(says, in_axes=(0, None, 0))(everybody, feed[0], Samples(x, y)))
            devices = jnp.int32(width)
        else:
            shapes = jax.eval_shape(one, *(each[0, 0] for each in feed))
            nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            split, _ = jax.lax.scan(block, nothing, feed)
            devices = feed[-1].sum().astype(jnp.int32)
        sums = {name: _whole(each, low[name]) for name, each in split.items()}
        sums = kept_apart(sums)  # as on the wire: neither side is compiled into the other
        heard = total(hears.kind, sums, devices=jnp.maximum(devices, 1), version=offered.version)
        step = advance(protocol.server, task, state, heard, Context(me=SERVER))
        after, news, reasons = step.state, published(step), stops(step)
        held = (devices < masking.minimum) | (ended > 0)
        after, news = jax.tree.map(lambda old, new: jnp.where(held, old, new), (state, offered), (after, news))
        names[:] = [reason.reason for reason in reasons]
        done = done + (ended == 0)
        for number, reason in enumerate(reasons, start=1):
            ended = jnp.where(~held & jnp.asarray(reason.when), number, ended)
        return after, news, ended, done

    def rounds(carry: Any, feed: Any, seed: Any, count: Any, crowd: Any) -> Any:
        """The first `count` rounds of the feed."""
        return jax.lax.fori_loop(
            0, count, lambda i, so_far: one_round(so_far, jax.tree.map(lambda leaf: leaf[i], feed), seed, crowd), carry
        )

    return Loop(compile_alike(rounds), names, width, everyone)


def _width(protocol: Protocol, task: Task, cohort: int) -> int:
    """How many devices have their turns side by side: as memory goes; or one alone, where that keeps a CPU busy."""
    start = protocol.server.start(task, Context(me=SERVER))
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
