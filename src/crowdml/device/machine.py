"""A device's life without I/O: where it stands and what it heard lead to where it stands next, and what is to be done.

`Machine.advance` takes a `Life`, an event and a `Moment`, and returns the next `Life` and effects. A shell carries the
effects out (device/runner.py): it writes to the ledger, asks the server, waits, and tells the owner. Only the last
effect of a step has an answer, which is the next event. Time, chance, noise and what the ledger says are arguments.

The order is the promise. Whether the budgets allow a step is asked before noise is drawn (`Afford`); its charges, its
sealed messages and its state are one `Write`, and no `Ask` follows before the shell says `Written`; and what is sent
are those bytes, until the server has acknowledged them with a receipt that its pinned key signed (device/sending.py).

What a device is doing is a stack of phases in its `Life`. A phase hears events until it is done; then the phase below
hears what came of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from datetime import UTC, datetime
from typing import Any, Literal
from typing import Protocol as Interface

import msgpack
import numpy as np

from crowdml.arrays import Samples
from crowdml.channels import Channel
from crowdml.device.client import Answer, whole_number
from crowdml.device.marks import Mark
from crowdml.device.member import Ending, EndingKind, Member, Patience, charges_of, losses_of, statement_after
from crowdml.device.timers import Timers
from crowdml.errors import ProtocolError
from crowdml.messages import KINDS, Envelope, decode, seal
from crowdml.plugins import blaming
from crowdml.privacy.door import Passage
from crowdml.privacy.noise import Source
from crowdml.privacy.private import Private
from crowdml.protocol import Protocol
from crowdml.records import record
from crowdml.storage import Charge, Ledger, Outgoing, Round
from crowdml.task import Task
from crowdml.turn import Outcome, Tamper, device_turn, first_device_turn, first_turn
from crowdml.wire.envelopes import sign
from crowdml.wire.problems import Problem
from crowdml.wire.states import pack_state, unpack_state

# --- what a machine hears ---


@record
class Moment:
    """What a shell knows when an event comes: the time, a number drawn from [0, 1), and the ledger, to be read."""

    now: float
    chance: float
    books: Ledger

    @property
    def utc(self) -> str:
        return datetime.fromtimestamp(self.now, UTC).isoformat()


@record
class Answered:
    """The server answered what was asked."""

    answer: Answer


@record
class TurnedDown:
    """The server refused what was asked."""

    problem: Problem


@record
class Silent:
    """There was no answer. Nothing is known about what the server did."""

    why: str


@record
class Written:
    """What was to be written is on disk."""


@record
class Waited:
    """The time that was to be waited is over."""


@record
class Begun:
    """A phase is on top of the stack for the first time."""


@record
class Done:
    """The phase above is done, and this came of it."""

    value: Any = None


Event = Answered | TurnedDown | Silent | Written | Waited | Begun | Done

# --- what a machine wants done ---


@record
class Ask:
    """Ask the server once. `signed`: the request says who asks. Answer: `Answered`, `TurnedDown` or `Silent`."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    signed: bool = False


@record
class Wait:
    """Let so many seconds pass. `why`: a server that is asked again, a round that is not this device's, or a timer.

    While it waits for a round, a device of a fleet leaves its place at work to others.
    """

    seconds: float
    why: Literal["retry", "round", "timer"] = "retry"


@record
class Tell:
    """A line for the device's owner."""

    text: str


@record
class Serving:
    """A batch that is under way: its serials, and in how many check-ins it has served."""

    serials: tuple[int, ...]
    batch: Private[Samples]
    served: int = 0


@record
class Sealed:
    """A message that waits for its receipt: its place in the outbox, and what the receipt must say."""

    waiting: Outgoing
    seq: int
    digest: bytes
    content: bytes = b""
    mark: Mark | None = None


@record
class Write:
    """Write to the ledger, all of it or nothing. The shell adds what it keeps of sources, letters and predictions."""

    standing: Mapping[str, Any]
    charges: Sequence[Charge] = ()
    sealed: Sequence[Sealed] = ()
    used: Serving | None = None
    """The batch that this step used; None: it used none."""
    again: bool = False
    """Whether that batch serves again: then it waits on."""
    dropped: tuple[int, ...] = ()
    """Serials of waiting samples that are never given."""
    done: tuple[int, ...] = ()
    """Places in the outbox whose bytes are forgotten."""
    round_: Round | None = None


@record
class Acknowledge:
    """Write that the server has a message, and its receipt."""

    message: Sealed
    receipt: bytes


@record
class Exhaust:
    """Write, for good, that nobody knows what this device has given."""


Effect = Ask | Wait | Tell | Write | Acknowledge | Exhaust


# --- where a device stands ---


@record
class Tally:
    """What happened so far, for people: no sample is in it."""

    check_ins: int = 0
    repeated: int = 0
    """Acknowledgements that the server gave before: the first did not arrive."""
    refused: int = 0
    retries: int = 0
    check_outs: int = 0
    unchanged: int = 0


@record
class Life:
    """Where a device stands with a task."""

    state: Any
    """Of the protocol."""
    seq: int = 0
    """The number of the last message that was sealed; the server counts from 1."""
    trips: int = 0
    """Check-ins that were charged: which share of a schedule comes next. The server numbers messages, and could have
    one given twice if it numbered these."""
    serving: Serving | None = None
    gave: int | None = None
    """The round of uploads that this device gave to last."""
    drawn_for: int = -1
    """The round for which the lottery drew this device, as it found it when it looked."""
    timers: Timers = field(default_factory=Timers)
    is_compared: bool = False
    """Whether the ledger was held against the last message that the server has of this device."""
    offer: tuple[str, Any] | None = None
    """The publication that was read last, and its tag."""
    not_before: float = 0.0
    """When the server wants to see this device next."""
    refused_in_a_row: int = 0
    signs_reads: bool = False
    tally: Tally = field(default_factory=Tally)
    doing: tuple[Phase, ...] = ()
    ending: Ending | None = None
    """Why it is over. None: it goes on."""
    result: Any = None
    """What came of the phase that was done last."""

    def counted(self, **more: int) -> Life:
        """With so many more of these in the tally."""
        now = {name: getattr(self.tally, name) + number for name, number in more.items()}
        return replace(self, tally=replace(self.tally, **now))


@record
class Move:
    """One step of one phase: the next life, what is to be done, and what is heard next without waiting."""

    life: Life
    effects: tuple[Effect, ...] = ()
    event: Event | None = None


class Phase(Interface):
    """What a device is doing."""

    def step(self, machine: Machine, life: Life, event: Event, at: Moment) -> Move:
        """Hear one event."""
        ...


def stay(life: Life, phase: Phase, *effects: Effect) -> Move:
    """Go on with this phase, which takes the place of the one on top."""
    return Move(replace(life, doing=(*life.doing[:-1], phase)), effects)


def push(life: Life, phase: Phase, above: Phase, *effects: Effect) -> Move:
    """Go on with this phase once the one above it is done."""
    return Move(replace(life, doing=(*life.doing[:-1], phase, above)), effects, Begun())


def pop(life: Life, value: Any = None, *effects: Effect) -> Move:
    """This phase is done."""
    return Move(replace(life, doing=life.doing[:-1]), effects, Done(value))


def end(life: Life, kind: EndingKind, sentence: str, *effects: Effect) -> Move:
    """Nothing more is done in this life."""
    return Move(replace(life, doing=(), ending=Ending(kind, sentence)), effects)


def end_at(life: Life, problem: Problem) -> Move:
    """The server will not have this device, this task or this message: waiting does not help."""
    return end(life, *final(problem))


def final(problem: Problem) -> tuple[EndingKind, str]:
    kinds: dict[str, EndingKind] = {"task-stopped": "stopped", "withdrawn": "withdrawn", "revoked": "revoked"}
    return kinds.get(problem.slug, "refused"), f"{problem.title}: {problem.detail} {problem.help}"


@record(frozen=False)
class Offers:
    """The publication that was read last, by its bytes: devices of one process that are offered the same read it once.

    Each of them asks for it by itself; what is shared is the work of decoding.
    """

    body: bytes = b""
    message: Any = None


class Machine:
    """What does not change in a device's life with one task, and the rules of that life."""

    def __init__(
        self,
        member: Member,
        task: Task,
        protocol: Protocol,
        *,
        noise: Source,
        patience: Patience | None = None,
        offers: Offers | None = None,
        place: int = -1,
        tamper: Tamper | None = None,
    ) -> None:
        self.member, self.task, self.protocol, self.place, self.tamper = member, task, protocol, place, tamper
        self.noise, self.patience = noise, patience or Patience()
        self.path = f"/v1/tasks/{task.hash.hex()}"
        self.table = protocol.mechanisms(task)
        self.batch, self.uses = protocol.batch(task), task.privacy.uses
        self.is_masked = protocol.is_masked(task)
        self.gathers, self._gathering = protocol.channel(task) is Channel.GATHERED, protocol.gathers(task)
        self.is_drawn = self._gathering is not None and self._gathering.drawn is not None
        """Whether a lottery draws the devices of a round."""
        self._scheduled = any(row.scheduled for row in self.table.values())
        self.losses = None if self._scheduled else {name: losses_of(row) for name, row in self.table.items()}
        self._first = self.price(0, datetime.now(UTC).isoformat())
        self.dearest_at = min((charge.first_sample for charge in self._first), default=0)
        self._pattern = _published(protocol, task)
        self._offers = offers or Offers()

    def wake(self, books: Ledger, *, is_new: bool = False) -> Life:
        """Where this device stands by its ledger. `is_new`: the server never knew it, and has no message of it."""
        state = first_device_turn(self.protocol, self.task, me=self.member.key.id, place=self.place)
        kept = read_standing(books.state(self.task.hash))
        seq: int = kept.get("seq", 0)
        trips: int = kept.get("trips", seq)
        if self._scheduled and self.member.recovered and "trips" not in kept:  # as many as those samples allowed
            trips = max(trips, books.next_serial() * self.uses // self.batch)
        if kept.get("state") is not None:
            state = unpack_state(state, kept["state"])
        timers = Timers(kept.get("wakes") or {})
        return Life(state, seq, trips, gave=kept.get("gave"), timers=timers, is_compared=is_new)

    def begin(self, life: Life, phase: Phase, at: Moment) -> tuple[Life, tuple[Effect, ...]]:
        """Begin a phase. It is done when nothing is left to do: `Life.result` is what came of it."""
        return self.advance(replace(life, doing=(*life.doing, phase), result=None), Begun(), at)

    def advance(self, life: Life, event: Event | None, at: Moment) -> tuple[Life, tuple[Effect, ...]]:
        """Hear one event: the next life, and what is to be done. Its last effect alone has an answer."""
        effects: list[Effect] = []
        while event is not None and life.doing:
            move = life.doing[-1].step(self, life, event, at)
            life, event = move.life, move.event
            effects += move.effects
        return replace(life, result=event.value) if isinstance(event, Done) else life, tuple(effects)

    # --- computing ---

    def hear(self, life: Life, event: Any, noise: Source | None, now: float) -> Outcome:
        """One turn of this device: what it hears, and the noise for what it answers; without noise nothing leaves."""
        with blaming(f"protocol {self.protocol.name!r} failed", "Nothing was sent.", alone=True, quotes=False):
            return device_turn(
                self.protocol, self.task, life.state, event,
                noise=noise, me=self.member.key.id, trip=life.trips, place=self.place, now=now, tamper=self.tamper,
            )  # fmt: skip

    def round_of(self, life: Life, messages: Sequence[Any]) -> int | None:
        """The round that these are for; where nothing is said, the one that this device gave to last."""
        return int(messages[0].version) if self.gathers and messages else life.gave

    def draws(self, number: int, looks: int) -> bool:
        """Whether this device is drawn for a round that it found open at so many looks."""
        gathering = self._gathering
        return gathering is None or gathering.draws(self.task, number, self.member.key.id, looks)

    # --- charging ---

    def price(self, trip: int, utc: str) -> list[Charge]:
        """The dearest form of a step, the whole table, at the device's check-in number `trip`."""
        rows = [Passage(name, mechanism, mechanism.covers, trip) for name, mechanism in self.table.items()]
        return charges_of(self.task, rows, 0, utc, self.losses)

    def dearest(self, trip: int, utc: str) -> list[Charge]:
        """What the next step may cost at the most."""
        return self._first if self.losses is not None else self.price(trip, utc)

    def sealed_messages(self, turn: Outcome) -> list[Envelope]:
        """What a turn says, encoded; numbered when it is written."""
        assert turn.door is not None
        me, door = self.member.key.id, turn.door
        return [seal(self.task.hash, me, to, 0, message, door) for to, message in turn.said]

    def charged(
        self, life: Life, turn: Outcome, now: Serving, envelopes: Sequence[Envelope], round_: Round | None, at: Moment
    ) -> tuple[Life, Write]:
        """One step: its charges, sealed messages and state; its samples wait no more, or serve again.

        With masks also where the device stands in its round. The life is that after the write.
        """
        books, seq, sealed = at.books, life.seq, list[Sealed]()
        charges = charges_of(self.task, turn.passages, now.serials[0], at.utc, self.losses)
        with books.reading():
            statement = statement_after(books, charges, len(now.serials))
            number = books.next_seq(self.task.hash)
        for envelope in envelopes:
            seq += 1
            data = sign(replace(envelope, seq=seq), statement, self.member.key)
            place = Outgoing(self.task.hash, number + len(sealed), data)
            sealed.append(newly_sealed(place, seq, envelope.body, statement.samples, round_))
        again = replace(now, served=now.served + 1) if now.served + 1 < self.uses else None
        trips = life.trips + bool(turn.passages)
        after = replace(life, state=turn.state, seq=seq, trips=trips, serving=again)
        write = Write(self.standing(after), charges, sealed, now, again is not None, round_=round_)
        return after, write

    def standing(self, life: Life) -> Mapping[str, Any]:
        """Where the protocol stands, as it is kept on disk, and how often the batch has served that serves again.

        Its samples are in the ledger's `waiting`, not here.
        """
        made: dict[str, Any] = {"seq": life.seq, "trips": life.trips}
        made["state"] = None if life.state is None else pack_state(life.state)
        if life.serving is not None and life.serving.served:
            made |= {"first": life.serving.serials[0], "served": life.serving.served}
        if life.gave is not None:
            made["gave"] = life.gave
        if life.timers.due:
            made["wakes"] = dict(life.timers.due)
        return made

    # --- what the server offers ---

    def understood(self, kind: str, body: bytes) -> Any:
        """The publication in these bytes; a ValueError where it is not of the kind and shapes that the task gives it.

        Nothing else reaches a handler.
        """
        if kind == self._pattern.kind and body == self._offers.body:
            return self._offers.message
        if kind != self._pattern.kind:
            raise ValueError(f"it is of kind {kind[:64]!r}")
        try:
            message = decode(kind, body)
            for entry in dataclasses.fields(message):
                ours, theirs = (np.asarray(getattr(each, entry.name)) for each in (self._pattern, message))
                if ours.shape != theirs.shape or not _same_type(ours, theirs):
                    raise ValueError(f"{entry.name} has another shape or type than the task says")
                if not np.isfinite(theirs).all():
                    raise ValueError(f"{entry.name} has numbers that are not finite")
        except (TypeError, KeyError, msgpack.exceptions.UnpackException) as error:
            raise ValueError(str(error)) from error
        self._offers.body, self._offers.message = body, message
        return message


def windowed(life: Life, answer: Answer, at: Moment) -> Life:
    """Come back around the moment that the server named, spread by half of it to either side."""
    seconds = whole_number(answer.headers.get("crowdml-next", ""))
    if seconds is None:
        return life
    return replace(life, not_before=at.now + min(seconds, 86_400) * (0.5 + at.chance))


def newly_sealed(place: Outgoing, seq: int, body: bytes, samples: int, round_: Round | None) -> Sealed:
    """A message that was just signed: `body` is what it says, `samples` how many its device has given with it."""
    digest = sha256(place.body)
    mark = Mark(seq, samples, digest.hex(), 0 if round_ is None else round_.number, place.task.hex())
    return Sealed(place, seq, digest, sha256(body), mark)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def read_standing(data: bytes | None) -> dict[str, Any]:
    """What is kept on disk of a task: `seq`, `trips` and `gave` as in `Life`; `state`, of the protocol; `first` and
    `served`, the first serial of the batch that serves again and how often it has; `post` and `own`, what became of
    letters and of predictions; `wakes`, timers and when they run out."""
    return {} if data is None else msgpack.unpackb(data)


def _published(protocol: Protocol, task: Task) -> Any:
    """What the server first offers: every later publication has its kind and shapes."""
    message = first_turn(protocol, task).published
    if message is None or type(message) not in KINDS.values():
        raise ProtocolError(f"protocol {protocol.name!r} offers nothing at its start, so no device can check out.")
    return message


def _same_type(ours: Any, theirs: Any) -> bool:
    """Arrays travel with their type, which must be ours to the bit; a lone number without, and must fit into ours."""
    if ours.ndim:
        return theirs.dtype == ours.dtype.newbyteorder("<")
    return ours.dtype.kind == theirs.dtype.kind and bool(theirs.astype(ours.dtype) == theirs)
