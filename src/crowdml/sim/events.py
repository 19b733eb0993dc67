"""The event engine: any channel, one handler call an event, every message sealed into its bytes and opened again.

`run` is a queue of events in time. It drives devices the way a runner drives a real one: samples enter a buffer, a full
batch becomes `Sensed`, a check-out is answered from the last publication, the answer is heard later, the check-in
arrives later still. `run_rounds` has cohorts, and rounds of uploads, that keep step: device after device on NumPy, sums
in 64 bits, masks left out (they cancel). `exchange` has peers that keep step. Slow and plain; the compiled engine is
held against it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax
import numpy as np

from crowdml.arrays import Array, Integers, Samples
from crowdml.buffer import Buffer
from crowdml.channels import Stacked, stacked
from crowdml.errors import ProtocolError, TaskError
from crowdml.messages import Envelope, decode, seal, summed
from crowdml.price import Price
from crowdml.privacy.door import Door, Passage
from crowdml.privacy.noise import Silence, Source
from crowdml.privacy.private import Stamp
from crowdml.privacy.seeded import SeededSource, halves, stream, streams
from crowdml.protocol import Gathered, Protocol, Rule, Sensed, Wake, Woken, place_of
from crowdml.protocols import find
from crowdml.sim.layout import Holding, Rounds, Schedule
from crowdml.sim.pytrees import compile_alike, register
from crowdml.sim.run import Run, Tick, close_turn, small_releases
from crowdml.sim.world import World
from crowdml.task import Task
from crowdml.turn import (
    Outcome,
    Tamper,
    check_in,
    colluded,
    device_turn,
    first_device_turn,
    first_turn,
    letter_turn,
    server_turn,
)
from crowdml.wire.envelopes import pack_envelope
from crowdml.wire.keys import SIGNATURE_SIZE
from crowdml.wire.statements import Statement

Backend = Literal["numpy", "jax"]
Liars = Mapping[int, Tamper]
"""Devices that lie, by their number."""

ANSWER, HEAR, ARRIVE, WAKE, CLOSE = range(5)
SENSE = 1 << 60  # sorts a device's sensing after everything else of that moment
TIMER = 1 << 59
SERVER = -1  # sorts what the server does by itself before what devices do


# --- in time ---


@dataclass
class Device:
    """One device's runtime in the simulator: its buffer, its protocol state, and the releases it made."""

    buffer: Buffer
    state: Any
    trips: int = 0
    busy: bool = False
    gave: int = -1
    """The round that it gave its last upload to."""
    serials: tuple[int, ...] = ()
    passages: list[tuple[tuple[int, ...], list[Passage]]] = field(default_factory=list)


class Steps:
    """The two turns that compute, on NumPy: a device answers a publication, the server applies what it heard."""

    def __init__(self, task: Task, noise: bool, liars: Liars, seed: int, rows: Samples | None) -> None:
        self.protocol, self.task, self.noise, self.liars = find(task), task, noise, liars
        self.seed, self.rows = halves(seed), rows

    def hear(self, state: Any, publication: Any, key: Array, trip: Any, name: int, now: float) -> Outcome:
        return self._turn(state, publication, key, trip, me=str(name), now=now, tamper=self.liars.get(name))

    def _turn(self, state: Any, publication: Any, key: Array, trip: Any, **told: Any) -> Outcome:
        source = _source(self.noise, key)
        return device_turn(self.protocol, self.task, state, publication, noise=source, trip=trip, **told)

    def apply(self, state: Any, event: Any, number: Any, sender: Any = None, now: float = 0.0) -> Outcome:
        if isinstance(event, (Gathered, Woken)):
            own: Any = {"seed": self.seed, "number": number, "noise": self.noise, "rows": self.rows, "now": now}
            return close_turn(self.protocol, self.task, state, event, **own)
        return server_turn(self.protocol, self.task, state, event, sender=sender, now=now)


class CompiledSteps(Steps):
    """`Steps` on JAX, each call compiled by itself. A compiled step leaves one stamp on all that it lets out."""

    def __init__(self, task: Task, noise: bool, liars: Liars, seed: int, rows: Samples | None) -> None:
        super().__init__(task, noise, liars, seed, rows)
        self.stamp = Stamp("this compiled step")
        self.passages: list[Passage] = []
        self._hear: dict[Tamper | None, Any] = {}
        self._apply = compile_alike(self._trace_apply)

    def _trace_hear(self, tamper: Tamper | None, state: Any, publication: Any, key: Array, trip: Any) -> Any:
        turn = self._turn(state, publication, key, trip, me="", tamper=tamper, stamp=self.stamp)
        self.passages = turn.passages
        return turn.state, turn.effects

    def hear(self, state: Any, publication: Any, key: Array, trip: Any, name: int, now: float) -> Outcome:
        tamper = self.liars.get(name)
        if tamper not in self._hear:
            self._hear[tamper] = compile_alike(lambda *told: self._trace_hear(tamper, *told))
        state, effects = self._hear[tamper](state, publication, key, trip)
        passed = [replace(each, trip=trip) for each in self.passages]
        return Outcome(state, effects, Door(self.protocol.mechanisms(self.task), Silence(), self.stamp, passed, trip))

    def _trace_apply(self, state: Any, event: Any, number: Any) -> Any:
        turn = super().apply(state, event, number)
        return turn.state, turn.effects

    def apply(self, state: Any, event: Any, number: Any, sender: Any = None, now: float = 0.0) -> Outcome:
        return Outcome(*self._apply(state, event, number))


def _source(noise: bool, key: Array) -> Source:
    return SeededSource(key) if noise else Silence()


class Queue:
    """A run under way: the events to come, the devices, and the server."""

    def __init__(self, holding: Holding, world: World, steps: Steps, seed: int, capacity: int) -> None:
        self.task, self.holding, self.world, self.steps, self.seed = steps.task, holding, world, steps, seed
        self.protocol, self.gathering = steps.protocol, steps.protocol.gathers(steps.task)
        self.most_trips: int | None = None
        self.keep_said = False
        self.events: list[tuple[float, int, int, int, Any]] = []
        self.ahead = 0
        """Events to come that are no timers: after the last one no timer is set any more."""
        self.timers: dict[tuple[int, str], int] = {}
        self.set_timers = 0
        self.dropped = self.heard = self.turns = 0
        self.rows: list[tuple[int, int, tuple[int, ...], int, float, bool]] = []
        self.said: list[dict[str, Array]] = []
        self.uploads: list[Any] = []
        self.senders: list[int] = []
        self.overdue = False
        self.parked: list[tuple[int, int, tuple[Any, Any], float]] = []
        self.stopped: Rule | None = None
        self.wanted: set[int] = set()
        self.looked: dict[int, Array] = {}
        first = first_turn(self.protocol, self.task)
        self.state, self.publication = first.state, first.published
        self.devices: dict[int, Device] = {}
        for name in range(world.devices):
            start = first_device_turn(self.protocol, self.task, me=str(name))
            self.devices[name] = Device(Buffer(self.protocol.batch(self.task), capacity), start)
            self.push(world.sensed(seed, name, 0), name, SENSE, 0, 0)
        self.set(SERVER, first.wakes, 0.0)
        self.open_round(0.0)

    def push(self, time: Any, device: int, trip: int, leg: int, load: Any = None) -> None:
        when = float(np.asarray(time).reshape(-1)[0])
        self.ahead += leg < WAKE and when < np.inf
        heapq.heappush(self.events, (when, device, trip, leg, load))

    def set(self, whose: int, wakes: Sequence[Wake], now: float, leg: int = WAKE) -> None:
        """Set timers. Once devices have nothing more to say none is set, or a clock that sets itself would never end.

        A second is a unit of the world's time.
        """
        for wake in wakes if self.ahead else ():
            self.set_timers += 1
            self.timers[whose, wake.tag] = self.set_timers
            self.push(now + wake.after, whose, TIMER + self.set_timers, leg, wake.tag)

    def open_round(self, now: float) -> None:
        if self.gathering is not None and self.gathering.seconds is not None:
            self.set(SERVER, [Wake(self.gathering.seconds, "this round closes")], now, CLOSE)

    def go(self, tick: Tick) -> None:
        while self.events and self.events[0][0] < np.inf and self.stopped is None:
            now, name, trip, leg, load = heapq.heappop(self.events)
            if leg >= WAKE:
                if self.timers.get((name, load)) == trip - TIMER:
                    self.woken(name, leg, load, now)
                continue
            self.ahead -= 1
            device = self.devices[name]
            if trip == SENSE:
                self.sense(name, device, load, now)
            elif leg == ANSWER:
                self.answer(name, device, trip, load, now)
            elif leg == HEAR:
                self.hear(name, device, trip, load, now)
            else:
                self.arrive(name, trip, load, now)
                tick(1)
        self.looked[self.heard] = np.asarray(self.protocol.model(self.task, self.state))

    def sense(self, name: int, device: Device, sample: int, now: float) -> None:
        which = int(self.world.sample(name, np.asarray(sample)))
        row = int(self.holding.rows(np.asarray(name), np.asarray(which)))
        if not device.buffer.add(which, self.holding.x[row], self.holding.y[row]):
            self.dropped += 1
        self.push(self.world.sensed(self.seed, name, sample + 1), name, SENSE, 0, sample + 1)
        self.set_out(name, device, now)

    def set_out(self, name: int, device: Device, now: float) -> None:
        """Start a trip if there is a batch, nothing else is under way, and the budget allows it."""
        spent = self.most_trips is not None and device.trips >= self.most_trips
        gone = bool(self.world.leaving) and now > float(self.world.left(self.seed, name)[0])
        if device.busy or spent or gone or not device.buffer.ready:
            return
        device.serials, batch = device.buffer.take()
        self.tell(name, device, Sensed(batch), now)

    def tell(self, name: int, device: Device, event: Any, now: float) -> None:
        """A device hears of samples or of its timer, and may check out."""
        told: Any = {"noise": None, "me": str(name), "now": now, "tamper": self.steps.liars.get(name)}
        turn = device_turn(self.protocol, self.task, device.state, event, **told)
        device.state = turn.state
        self.set(name, turn.wakes, now)
        if turn.asks and not device.busy:
            answered, received, arrived = self.world.trip(self.seed, name, device.trips, np.asarray([now]))
            self.push(answered, name, device.trips, ANSWER, (received, arrived))
            device.trips += 1
            device.busy = True

    def answer(self, name: int, device: Device, trip: int, load: tuple[Any, Any], now: float) -> None:
        """A check-out has no handler: the last publication answers it. Who is in the open round waits for the next."""
        if self.gathering is not None and (device.gave == self.heard or not self.is_drawn(name)):
            self.parked.append((name, trip, load, now))
            return
        received, arrived = load
        self.push(received, name, trip, HEAR, (self.publication, self.heard, arrived))

    def is_drawn(self, name: int) -> bool:
        """Whether a device may give to the open round: it is drawn, or the round's time is over."""
        gathering = self.gathering
        return gathering is None or self.overdue or gathering.draws(self.task, self.heard, str(name))

    def hear(self, name: int, device: Device, trip: int, load: Any, now: float) -> None:
        publication, version, arrived = load
        key = streams(self.steps.seed, np.array([name]), np.array([trip]))[0]
        turn = self.steps.hear(device.state, publication, key, np.int32(trip), name, now)
        assert isinstance(turn.door, Door)
        device.state, device.busy, device.gave = turn.state, False, version
        device.passages.append((device.serials, list(turn.passages)))
        self.set(name, turn.wakes, now)
        for to, message in turn.said:
            envelope: Envelope = seal(self.task.hash, str(name), to, trip + 1, message, turn.door)
            self.push(arrived, name, trip, ARRIVE, (envelope, device.serials, version))
        self.set_out(name, device, now)

    def arrive(self, name: int, trip: int, load: tuple[Envelope, tuple[int, ...], int], now: float) -> None:
        envelope, serials, version = load
        message = decode(envelope.kind, envelope.body)
        late = self.gathering is not None and version != self.heard
        self.rows.append((name, trip, serials, version, now, not late))
        if late:  # the round is over: paid for, and not heard
            return
        if self.keep_said:
            self.said.append({key: np.asarray(value) for key, value in small_releases(message).items()})
        if self.gathering is None:
            self.apply(message, envelope.sender, now)
            return
        self.uploads.append(message)
        self.senders.append(name)
        if len(self.uploads) >= (self.gathering.minimum if self.overdue else self.gathering.size):
            self.close(now)

    def close(self, now: float) -> None:
        """The server hears the uploads of a round, and those who waited for the next one are answered."""
        event = Gathered(np.int32(self.heard), _closed(self.uploads, self.senders, self.steps.liars))
        self.uploads, self.senders, self.overdue = [], [], False
        self.ask_again(now)
        self.apply(event, None, now)
        self.open_round(now)

    def ask_again(self, now: float) -> None:
        """Those who wait ask once more which round is open."""
        waited, self.parked = self.parked, []
        for name, trip, (received, arrived), since in waited:
            self.push(now, name, trip, ANSWER, (received + (now - since), arrived + (now - since)))

    def apply(self, event: Any, sender: Any, now: float) -> None:
        after = self.steps.apply(self.state, event, np.uint32(self.turns), sender, now)
        self.turns += 1
        self.state, self.stopped = after.state, after.stopped
        self.publication = self.publication if after.published is None else after.published
        self.set(SERVER, after.wakes, now)
        if not isinstance(event, Woken):
            self.heard += 1
        if self.heard in self.wanted:
            self.looked[self.heard] = np.asarray(self.protocol.model(self.task, self.state))

    def woken(self, name: int, leg: int, tag: str, now: float) -> None:
        if leg == CLOSE:
            assert self.gathering is not None
            self.overdue = True
            if len(self.uploads) >= self.gathering.minimum:
                self.close(now)
            elif self.gathering.drawn is not None:  # others may take the places of those who did not come
                self.ask_again(now)
        elif name == SERVER:
            self.apply(Woken(tag), None, now)
        else:
            self.tell(name, self.devices[name], Woken(tag), now)

    def met(self, batch: int) -> Schedule:
        """What arrived; of a gathered task also what was on its way when it ended, for it was paid for."""
        rows = list(self.rows)
        for when, name, trip, leg, load in sorted(self.events, key=lambda event: event[:4]):
            if self.gathering is not None and leg in (HEAR, ARRIVE):
                serials, version = load[1:] if leg == ARRIVE else (self.devices[name].serials, load[1])
                rows.append((name, trip, serials, version, when, False))
        device, trip, serials, version, time, counted = zip(*rows, strict=True) if rows else ((),) * 6
        closed = np.asarray(version) < self.heard  # the last round may never have closed
        return Schedule(
            np.asarray(device, np.int32),
            np.asarray(trip, np.int32),
            np.asarray(serials, np.int32).reshape(-1, batch),
            np.asarray(version, np.int32),
            np.asarray(time, np.float64),
            self.dropped,
            np.asarray(counted, bool) & (closed | (self.gathering is None)),
        )


def run(
    task: Task,
    holding: Holding,
    world: World,
    *,
    seed: int,
    capacity: int | None = None,
    points: Sequence[int] = (),
    most_trips: int | None = None,
    noise: bool = True,
    keep_said: bool = False,
    backend: Backend = "numpy",
    liars: Liars | None = None,
    server_rows: Samples | None = None,
    tick: Tick = lambda _: None,
) -> Run:
    """One trial, event by event, of check-ins or uploads one by one. The schedule that it met is in the `Run`."""
    protocol = find(task)
    if task.masking is not None:
        raise ProtocolError(f"task {task.name!r} is masked: its devices meet in cohorts, which `run_rounds` plays.")
    register()
    steps = (CompiledSteps if backend == "jax" else Steps)(task, noise, liars or {}, seed, server_rows)
    capacity = world.capacity(protocol.capacity(task) if capacity is None else capacity)
    queue = Queue(holding, world, steps, seed, capacity)
    queue.most_trips, queue.keep_said, queue.wanted = most_trips, keep_said, {int(point) for point in points}
    queue.go(tick)
    said, looked = queue.said, queue.looked
    return Run(
        task=task,
        seed=seed,
        schedule=queue.met(protocol.batch(task)),
        points=np.asarray(sorted(looked)),
        weights=np.stack([looked[point] for point in sorted(looked)]),
        state=jax.tree.map(np.asarray, queue.state),
        stopped=queue.stopped,
        said={key: np.stack([each[key] for each in said]) for key in said[0]} if said else {},
        passages={name: device.passages for name, device in queue.devices.items() if device.passages},
        heard=queue.heard,
    )


# --- in step: cohorts, and rounds of uploads ---


def run_rounds(
    task: Task,
    holding: Holding,
    laid: Rounds,
    *,
    seed: int,
    points: Sequence[int] = (),
    noise: bool = True,
    liars: Liars | None = None,
    server_rows: Samples | None = None,
    tick: Tick = lambda _: None,
) -> Run:
    """One trial of rounds that `layout.meet` laid out, on NumPy; `points` are the numbers of rounds after which the
    model is looked at. A cohort with fewer survivors than the task's minimum is abandoned, and has paid."""
    protocol, gathering = find(task), find(task).gathers(task)
    total: Any = protocol.masked[1] if task.masking is not None and protocol.masked is not None else None
    turns = _InStep(protocol, task, holding, laid, seed, noise, liars or {})
    steps = Steps(task, noise, {}, seed, server_rows)
    start = first_turn(protocol, task)
    _refuse_timers(protocol, start.wakes)
    state, offers = start.state, [start.published]
    ends = sorted({min(int(point), laid.length) for point in points} | {laid.length})
    looked: list[Array] = [np.asarray(protocol.model(task, state))] if ends[0] == 0 else []
    stopped: Rule | None = None
    done, uploads = 0, list[Any]()
    for number in range(len(laid)):
        event: Any = None
        offered = offers[-1 if laid.read is None else int(laid.read[number])]
        if stopped is None and laid.summed[number]:
            said = turns.said(number, offered)
            heard = said if total is None else [summed(total.kind, said, offered.version)]
            uploads += heard
            if gathering is None:
                (event,), uploads = heard, []
            elif len(uploads) == gathering.size:
                senders = laid.device[number][laid.alive[number]].tolist() if task.masking is None else []
                event, uploads = Gathered(np.int32(done), _closed(uploads, senders, liars or {})), []
        done += bool(laid.closes[number]) and stopped is None
        if event is not None:
            turn = steps.apply(state, event, np.uint32(done - 1))
            _refuse_timers(protocol, turn.wakes)
            state, stopped = turn.state, turn.stopped
            news = offers[-1] if turn.published is None else turn.published
            offers = [news] if laid.read is None else [*offers, news]
        if laid.closes[number]:
            tick(1)
            if int(laid.round_of[number]) + 1 in ends:
                looked.append(np.asarray(protocol.model(task, state)))
    paid = laid.paid(protocol.batch(task), None if done == laid.length else done)
    return Run(task, seed, paid, np.asarray(ends), np.stack(looked), state, stopped, heard=done)


def _closed(messages: Sequence[Any], senders: Sequence[int], liars: Liars) -> Stacked:
    """The uploads of a round, those of liars who collude in place of what they would have said."""
    ways = [liars.get(each) for each in senders]
    return colluded(stacked(messages), {each: np.array([way == each for way in ways]) for each in ways if each})


def _refuse_timers(protocol: Protocol, wakes: Sequence[Wake]) -> None:
    if wakes:
        raise ProtocolError(
            f"protocol {protocol.name!r} asks to be woken after {wakes[0].after:g} s, and simulated cohorts and peers "
            "keep step: no time passes between them. Run it on a live server."
        )


@dataclass(frozen=True)
class _InStep:
    """Devices that take their turns on one publication."""

    protocol: Protocol
    task: Task
    holding: Holding
    laid: Rounds
    seed: int
    noise: bool
    liars: Liars

    def said(self, number: int, offered: Any) -> list[Any]:
        """What the survivors of a cohort say, device after device. Who vanished paid all the same."""
        found: list[Any] = []
        laid, holding = self.laid, self.holding
        keys = stream(self.seed, laid.device[number], laid.trip[number])
        for place in np.flatnonzero(laid.alive[number]):
            device, trip, first = (each[number, place] for each in (laid.device, laid.trip, laid.first))
            rows = holding.rows(device, first + np.arange(self.protocol.batch(self.task)))
            turn = check_in(
                self.protocol, self.task, Samples(holding.x[rows], holding.y[rows]), offered,
                noise=_source(self.noise, keys[place]), me=int(device), trip=trip, tamper=self.liars.get(int(device)),
            )  # fmt: skip
            _refuse_timers(self.protocol, turn.wakes)
            assert isinstance(turn.door, Door)
            message = turn.message
            if self.task.masking is None:
                sealed = seal(self.task.hash, str(device), turn.said[0][0], int(trip) + 1, message, turn.door)
                message = decode(sealed.kind, sealed.body)
            found.append(message)
        return found


# --- in step: peers ---


@dataclass(frozen=True)
class Exchanged:
    """What peers told each other."""

    states: tuple[Any, ...]
    """The state of each device, by place: what it heard."""
    server: Any
    """The server's state."""
    said: Integers
    """[places] bytes that each device sent, as they are on the wire, signature and statement included."""
    heard: Integers
    """[places] bytes that each device was sent by the relay."""
    check_ins: Integers
    """[places] batches that each device gave."""
    stopped: Rule | None = None


def exchange(
    task: Task,
    holding: Holding,
    *,
    seed: int,
    noise: bool = True,
    leaving: Mapping[int, int] | None = None,
    liars: Liars | None = None,
    tick: Tick = lambda _: None,
) -> Exchanged:
    """Every batch of every device, said, counted, relayed and heard. A rest that fills no batch is not given.

    Devices sense the same hours, so they take turns: each says its part of a batch, the server hears and relays it, and
    peers hear it before the next batch. Device i is at place i. `leaving`: places whose device is gone from that batch
    on.
    """
    protocol, places, gone, lies = find(task), len(task.places), leaving or {}, liars or {}
    if protocol.peers is None or not protocol.peers(task):
        raise TaskError(f"task {task.name!r}: its devices have no peers; `crowdml simulate` runs it.")
    if holding.devices != places:
        raise TaskError(f"task {task.name!r} lists {places} places, and there are readings of {holding.devices}.")
    batch = protocol.batch(task)
    batches = [min(int(count) // batch, gone.get(place, int(count))) for place, count in enumerate(holding.counts)]
    rows = [holding.rows(np.int32(place), np.arange(count * batch)) for place, count in enumerate(batches)]
    cut = [(holding.x[those], holding.y[those]) for those in rows]
    keys = stream(seed, np.arange(places)[:, None], np.arange(max(batches, default=0))[None])
    names = [f"{place:032x}" for place in range(places)]
    states = [first_device_turn(protocol, task, me=each, place=place) for place, each in enumerate(names)]
    first = first_turn(protocol, task)
    _refuse_timers(protocol, first.wakes)
    state, offered, stopped = first.state, first.published, None
    sizes = _sizes(protocol, task)
    said, heard = np.zeros(places, np.int64), np.zeros(places, np.int64)
    trips = np.zeros(places, np.int32)
    for number in range(max(batches, default=0)):
        letters: list[tuple[Envelope, int]] = []
        for place in range(places):
            if number >= batches[place]:
                continue
            (x, y), those = cut[place], slice(number * batch, (number + 1) * batch)
            turn = check_in(
                protocol, task, Samples(x[those], y[those]), offered, state=states[place],
                me=names[place], noise=_source(noise, keys[place, number]), trip=number,
                place=place, tamper=lies.get(place),
            )  # fmt: skip
            assert isinstance(turn.door, Door)
            _refuse_timers(protocol, turn.wakes)
            states[place], trips[place] = turn.state, number + 1
            for to, message in turn.said:
                envelope = seal(task.hash, names[place], to, number + 1, message, turn.door)
                size = sizes(envelope)
                said[place] += size
                letters.append((envelope, size))
        for envelope, size in letters:
            message = decode(envelope.kind, envelope.body)
            after = server_turn(protocol, task, state, message, sender=envelope.sender)
            _refuse_timers(protocol, after.wakes)
            state, offered, stopped = after.state, after.published or offered, after.stopped
            for place in map(place_of, envelope.to):
                if 0 <= place < places and number < gone.get(place, number + 1):
                    heard[place] += size
                    named: Mapping[str, Any] = {"me": names[place], "sender": envelope.sender, "place": place}
                    states[place] = letter_turn(protocol, task, states[place], message, **named)
            if stopped is not None:
                return Exchanged(tuple(states), state, said, heard, trips, stopped)
        tick(len(letters))
    return Exchanged(tuple(states), state, said, heard, trips)


def _sizes(protocol: Protocol, task: Task) -> Callable[[Envelope], int]:
    """Bytes of a signed envelope. The statement that goes with it says what the device has paid so far."""
    priced, batch = Price.of(protocol, task), protocol.batch(task)
    known: dict[int, Statement] = {}

    def size(envelope: Envelope) -> int:
        count = envelope.seq
        if count not in known:
            known[count] = Statement.of(priced.device(count), count * batch, priced.sample())
        return SIGNATURE_SIZE + len(pack_envelope(envelope, known[count]))

    return size
