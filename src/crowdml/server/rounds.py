"""The rounds of a masked task on the server: deadlines, storage and views around `crowdml.secagg.server`.

One round is open for devices to come; others are under way. What a device said is in the store before it is answered,
and a phase is there before anybody is told of it: a server that is killed at any moment goes on where it was. Durations
are of the monotonic clock; a phase that was open when the server stopped gets its whole time again.

Everything that changes a round runs in the writing thread. `view` may be asked anywhere: rounds are values, and the
table of them is replaced, never edited.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from crowdml.errors import CrowdmlError
from crowdml.pace import MOVING, SHORTEST_WAIT, poll_wait
from crowdml.secagg import server
from crowdml.secagg.cohort import read_roster
from crowdml.secagg.messages import Advert, Agreement, Masked, Reveal, Shares, encode, members, open_message
from crowdml.secagg.refusals import Refused
from crowdml.secagg.server import ADVERTISE, AGREE, MASK, PHASES, REVEAL, SHARE, SUMMED, ServerRound
from crowdml.secagg.terms import Terms
from crowdml.storage.server import JournalRow, OpenRound, Publication, RoundMessage, RoundRow, Store
from crowdml.task import Masking
from crowdml.wire.envelopes import Signed, open_signed
from crowdml.wire.problems import Problem
from crowdml.wire.rounds import RoundView, publication_hash

log = logging.getLogger("crowdml.server")

PHASE_OF = {
    Advert.kind: server.ADVERTISE,
    Shares.kind: server.SHARE,
    Masked.kind: server.MASK,
    Agreement.kind: server.AGREE,
    Reveal.kind: server.REVEAL,
}
LOOSE = 32 * 2**20
"""Bytes of masked bodies that may lie on disk beside the sum that has them: then the sum is kept, and they go."""
RECENT = 1000
"""Ended rounds that are remembered for those who ask."""
SIFTING = 1.0
"""Seconds between two looks at who of an open cohort is still there; one that is about to be fixed is looked at."""
LATELY = 10.0
"""Seconds in which a device was heard of that is there now."""
LONGEST_RETURN = 300.0
"""Seconds after which every device has asked again, however long the server was away: the cap of a device's pauses."""


@dataclass(frozen=True, eq=False)
class Under:
    """A round under way."""

    state: ServerRound
    row: RoundRow
    deadline: float
    publication: Publication | None = None
    asleep: Mapping[str, bytes] = field(default_factory=dict)
    """Adverts of devices that were not heard of for a lease, while the cohort is open: they may come back."""
    windows: int = 0
    """How many windows closed with too few devices."""
    last: int = 0
    """The journal's entry of the last vector in the sum."""
    loose: int = 0
    """Bytes of bodies that no kept sum has."""
    is_held: bool = False
    """Whether its shares are in, and it waits for a total that is under way: it is to read the newest weights."""
    is_closing: bool = False
    """It is being summed: nothing more is heard."""

    @property
    def phase(self) -> str:
        return self.state.phase


@dataclass(frozen=True)
class RoundFigures:
    """A round for people to look at. `seconds`: since it was opened, or from then to its end."""

    number: int
    phase: str
    devices: int
    shared: int
    survived: int
    cause: str
    why: str
    opened_at: str
    seconds: float
    version: int | None


Active = Mapping[int, Under]


class CohortRounds:
    """The rounds of one task. `offer` says what is published now; `clock` is monotonic, `now` writes the time down.

    `given`, where totals are uploads of a gathered round: the devices in totals of the round that is open now.
    """

    def __init__(
        self,
        store: Store,
        task: bytes,
        masking: Masking,
        terms: Terms,
        *,
        offer: Callable[[], Publication],
        now: Callable[[], str],
        clock: Callable[[], float],
        given: set[str] | None = None,
    ) -> None:
        self.store, self.task, self.masking, self.terms = store, task, masking, terms
        self.offer, self.now, self.clock, self.given = offer, now, clock, given
        self.window, self.lease = float(masking.window), float(masking.lease)
        self.seen: dict[str, float] = {}
        """When each device was last heard of."""
        self.crowd, self._counted = 1, -math.inf
        self._sifted = -math.inf
        self.survived = 0
        """Devices in the sums of this process's time."""
        kept = store.open_rounds(task)
        begins = clock()
        self._back = begins + _return_time(kept, now())
        """When the devices are back that had to wait while the task was not served."""
        self.active: Active = {each.row.number: self._restore(each, begins) for each in kept}
        self.newest = store.last_round(task)
        self.ended: dict[int, RoundRow] = {
            row.number: row for row in reversed(store.rounds(task, RECENT)) if row.number not in self.active
        }
        self.counts = store.round_counts(task)
        """Rounds that ended and to which some device came: 'summed', and abandoned ones by their cause."""

    # --- from disk ---

    def _restore(self, kept: OpenRound, begins: float) -> Under:
        """A round as it was. Its phase gets its whole time again, or none if nobody is waited for."""
        said: dict[str, dict[str, bytes]] = {kind: {} for kind in PHASE_OF}
        for device, kind, data in kept.said:
            said[kind][device] = data
        state = replace(
            server.begin(kept.row.number),
            phase=kept.row.phase,
            adverts=said[Advert.kind],
            roster=kept.roster,
            sharers=kept.sharers,
            survivors=kept.survivors,
            publication=_hash(kept.publication),
        )
        under = Under(state, kept.row, self._deadline(state.phase), kept.publication)
        if state.phase == ADVERTISE:
            self.seen.update(dict.fromkeys(state.adverts, self._back))
            first = dict(list(state.adverts.items())[: self.terms.largest])
            asleep = {device: data for device, data in state.adverts.items() if device not in first}
            return replace(under, state=replace(state, adverts=first), asleep=asleep)
        roster = read_roster(self.terms, state.round, state.roster)
        place = {device: index for index, device in enumerate(roster.ids)}

        def by_place(kind: str, read: Callable[[bytes], bytes]) -> dict[int, bytes]:
            return {place[device]: read(data) for device, data in said[kind].items()}

        state = replace(
            state,
            shares=by_place(Shares.kind, lambda data: _opened(Shares, data).sealed),
            masked=by_place(Masked.kind, bytes),
            agreements=by_place(Agreement.kind, lambda data: _opened(Agreement, data).signature),
            reveals=by_place(Reveal.kind, bytes),
        )
        if state.sharers:
            body, last, loose = kept.sum or bytes(self.terms.size), kept.folded, 0
            for index, device, data in self.store.masked_bodies(self.task, state.round, kept.folded):
                vector = _opened(Masked, open_signed(data).envelope.body).body
                if hashlib.sha256(vector).digest() != state.masked[place[device]]:
                    raise self.store.corrupt(f"a masked vector of round {state.round} is not what was acknowledged")
                body, last, loose = server.add(self.terms, body, vector), index, loose + len(data)
            under = replace(under, last=last, loose=loose)
            state = replace(state, body=body)
        return replace(under, state=state, deadline=begins if server.is_complete(self.terms, state) else under.deadline)

    def _length(self, phase: str) -> float:
        return self.window if phase == ADVERTISE else self.lease

    def _deadline(self, phase: str) -> float:
        """When a phase that begins now is over: its whole time, once the devices that were told to wait are back."""
        return max(self.clock(), self._back) + self._length(phase)

    # --- what devices say ---

    def hear(self, active: Active, signed: Signed) -> tuple[Active, RoundMessage | None]:
        """The rounds after a device's message, and what is to be kept of it: None if it is here already.

        Nothing is changed: the caller keeps the message, and then takes the rounds over.
        """
        envelope = signed.envelope
        if envelope.kind not in PHASE_OF or envelope.kind == Masked.kind:
            raise Problem("wrong-kind", f"{envelope.kind!r} is no message of a round.")
        message = _read(envelope.kind, envelope.body)
        if message.round != envelope.seq:
            raise Problem("wrong-message", f"The message is of round {message.round}, its seq is {envelope.seq}.")
        under, sender = self._under(active, envelope.seq), envelope.sender
        self.seen[sender] = self.clock()
        if isinstance(message, Advert) and under.phase == ADVERTISE:
            self._refuse_second(active, envelope.seq, sender)
            under = self._sift(under)
        before = under.asleep.get(sender)
        if before is not None and under.phase == ADVERTISE and before != envelope.body:
            raise Problem("round-refused", f"This device sent other keys before in round {envelope.seq}.")
        try:
            state = server.hear(self.terms, under.state, sender, message)
        except Refused as refused:
            raise self._late(under, envelope.kind, refused) from refused
        if state is under.state:
            return {**active, envelope.seq: under}, None
        asleep = under.asleep
        if before is not None:
            asleep = {device: data for device, data in asleep.items() if device != sender}
        after = {**active, envelope.seq: replace(under, state=state, asleep=asleep)}
        if before is not None:
            return after, None
        tells = signed.data if envelope.kind in (Agreement.kind, Reveal.kind) else None
        return after, RoundMessage(envelope.seq, sender, envelope.kind, envelope.body, tells)

    def _refuse_second(self, active: Active, number: int, device: str) -> None:
        """Refuse a device that gave to the open round of uploads already, or may still give to it in another cohort."""
        if self.given is None:
            return
        version = self.offer().version
        cohorts = (each for each in active.values() if each.publication is None or each.publication.version == version)
        if device in self.given or any(server.may_be_summed(self.terms, each.state, device) for each in cohorts):
            raise Problem(
                "round-refused",
                f"Round {number} of masking gives to round {version} of the task, and this device has done so already "
                "in another cohort. Nothing was charged: it may give again when that round is closed.",
            )

    def check(self, signed: Signed) -> Masked:
        """The masked vector in a check-in that a round would take. Raises a Problem of any other."""
        envelope = signed.envelope
        if envelope.kind != Masked.kind:
            raise Problem(
                "wrong-kind", f"{envelope.kind!r} is not heard here; devices of this task send {Masked.kind}."
            )
        message = _read(envelope.kind, envelope.body)
        assert isinstance(message, Masked)
        under = self._under(self.active, message.round)
        self.seen[envelope.sender] = self.clock()
        try:
            is_new = server.can_mask(self.terms, under.state, envelope.sender, message)
        except Refused as refused:
            raise self._late(under, envelope.kind, refused) from refused
        if not is_new:
            raise Problem("round-refused", f"The vector of this device in round {message.round} is here already.")
        return message

    def fold(self, device: str, message: Masked, index: int, size: int) -> None:
        """Add a vector that is in the journal at `index`."""
        under = self.active[message.round]
        state = server.hear(self.terms, under.state, device, message)
        self._put(replace(under, state=state, last=index, loose=under.loose + size))

    def adopt(self, active: Active) -> None:
        """What `hear` made of the rounds is on disk now."""
        self.active = dict(active)

    def _under(self, active: Active, number: int) -> Under:
        under = active.get(number)
        if under is None or under.is_closing:
            known = number <= self.newest
            raise Problem(
                "round-over" if known else "round-refused", f"Round {number} is {'over' if known else 'not open'}."
            )
        return under

    @staticmethod
    def _late(under: Under, kind: str, refused: Refused) -> Problem:
        late = PHASES.index(under.phase) > PHASES.index(PHASE_OF[kind])
        return Problem("round-over" if late else "round-refused", str(refused))

    def _put(self, under: Under) -> None:
        self.active = {**self.active, under.state.round: under}

    # --- what a device is told ---

    def view(self, device: str, number: int | None = None) -> RoundView:
        """What this device is told now: of this round, or of the one that it is in, or else of the open one."""
        now, active = self.clock(), self.active
        self.seen[device] = now
        if number is None:
            mine = (each for each in active.values() if server.takes_part(self.terms, each.state, device))
            under = next(mine, None) or active.get(self.newest)
            if under is None:
                raise Problem("busy", "No round is open yet.", retry_after=1)
        else:
            under = active.get(number)
        if under is None:
            row = self.ended.get(number or 0)
            if row is None:
                raise Problem("round-over", f"Round {number} is over, or never was.")
            return RoundView(row.number, row.phase, why=row.why)
        state = under.state
        closes = math.ceil(max(0.0, under.deadline - now) * 1000)
        told = RoundView(state.round, state.phase, closes=closes, wait=math.ceil(self._wait(under, now) * 1000))
        if under.phase == ADVERTISE:
            here = f"{len(state.adverts):,} of {self.terms.smallest:,} to {self.terms.largest:,} devices are here"
            return replace(told, why=here)
        if not server.takes_part(self.terms, state, device):
            return RoundView(state.round, server.ABANDONED, why="the round went on without this device")
        if under.is_closing or server.has_answered(self.terms, state, device):
            return told
        message = server.tell(self.terms, state, device)
        assert message is not None, "who takes part and has not answered is told something"
        told = replace(told, kind=message.kind, body=encode(message))
        published = under.publication
        if under.phase != MASK or published is None:
            return told
        return replace(told, publication=(published.version, published.kind, published.body))

    def _wait(self, under: Under, now: float) -> float:
        """Seconds until a device shall ask again: so that the crowd asks `POLLS` times a second in all."""
        return max(SHORTEST_WAIT, min(poll_wait(self.crowd), under.deadline - now + SHORTEST_WAIT))

    # --- phases ---

    def open(self) -> None:
        """See that a round is open for devices to come, with a number above all that devices may have seen.

        A round that was open in a backup may have gone on after it: it ends here.
        """
        for under in list(self.active.values()):
            if under.phase == ADVERTISE and under.state.round < self.newest:
                self._end(under, server.abandon(under.state, "restored", "the server was restored from a backup"))
        if self.active.get(self.newest) is None:
            number, at = self.newest + 1, self.now()
            self.store.open_round(self.task, number, at)
            self._begin(number, at)

    def _begin(self, number: int, at: str) -> None:
        row = RoundRow(number, ADVERTISE, at)
        self._put(Under(server.begin(number), row, self._deadline(ADVERTISE)))
        self.newest = number

    def is_due(self) -> bool:
        """Whether the time of some phase is over."""
        now = self.clock()
        free = not self._is_summing(now)
        return any(
            (each.deadline <= now or (each.is_held and free)) and not each.is_closing for each in self.active.values()
        )

    def advance(self, left: int | None) -> list[ServerRound]:
        """Close what is complete or late. What remains is to sum up the rounds that are returned, anywhere, and to
        `finish` each. `left`: how many more sums the task can use, None: any number."""
        now = self.clock()
        if now - self._counted >= 1.0:
            self._count(now)
        ready: list[ServerRound] = []
        for number in sorted(self.active):
            while (under := self.active.get(number)) is not None and not under.is_closing:
                if under.phase == ADVERTISE:
                    flying = sum(each.phase != ADVERTISE for each in self.active.values())
                    wanted = left is None or flying < left
                    is_full = wanted and len(under.state.adverts) >= self.terms.largest
                    under = self._sift(under, at_once=is_full or under.deadline <= now)
                    self._put(under)
                    if not self._is_cohort(under, now, wanted):
                        break
                elif not self._is_over(under, now):
                    break
                if under.phase == REVEAL:
                    self._put(replace(under, is_closing=True))
                    ready.append(under.state)
                    break
                self._close(under)
        if sum(each.loose for each in self.active.values()) > LOOSE:
            self.keep_sums()
        return ready

    def _is_over(self, under: Under, now: float) -> bool:
        """Whether a phase is to be closed now: everybody has answered, or its time is over.

        A cohort whose shares are in waits while another one moves towards its total, for a lease at most: the weights
        that it reads then have that total in them.
        """
        is_late = under.deadline <= now
        if not (is_late or under.is_held or server.is_complete(self.terms, under.state)):
            return False
        if under.phase != SHARE or (under.is_held and is_late) or not self._is_summing(now):
            return True
        if not under.is_held:
            self._put(replace(under, is_held=True, deadline=self._deadline(SHARE)))
        return False

    def _is_summing(self, now: float) -> bool:
        """Whether some cohort has read the publication and will soon change it. One that waits for a device which left
        may take a lease; gathered totals change nothing before their round closes."""
        since = now - MOVING * poll_wait(self.crowd)
        return self.given is None and any(
            each.phase in (MASK, AGREE, REVEAL) and (each.is_closing or each.deadline - self.lease > since)
            for each in self.active.values()
        )

    def _is_cohort(self, under: Under, now: float, wanted: bool) -> bool:
        """Whether the cohort is to be fixed now: it is full, or its window is over and enough devices are there."""
        here, least, most = len(under.state.adverts), self.terms.smallest, self.terms.largest
        if here >= most and wanted:
            return True
        if now < under.deadline:
            return False
        if here >= server.enough_devices(least, most, under.windows) and wanted:
            return True
        self._put(replace(under, deadline=now + self.window, windows=under.windows + wanted))
        return False

    def _sift(self, under: Under, *, at_once: bool = False) -> Under:
        """Put devices aside that were not heard of for a lease; those that are back come in while there is room.

        It walks the whole cohort: once in `SIFTING` seconds, unless `at_once`.
        """
        now = self.clock()
        if not at_once and now - self._sifted < SIFTING:
            return under
        self._sifted = now
        since = now - max(self.lease, 3 * poll_wait(self.crowd))
        present = {device for device in (*under.state.adverts, *under.asleep) if self.seen.get(device, since) >= since}
        adverts = {device: data for device, data in under.state.adverts.items() if device in present}
        for device, data in under.asleep.items():
            if device in present and len(adverts) < self.terms.largest:
                adverts[device] = data
        if adverts.keys() == under.state.adverts.keys():
            return under
        everyone = {**under.state.adverts, **under.asleep}
        asleep = {device: data for device, data in everyone.items() if device not in adverts}
        return replace(under, state=replace(under.state, adverts=adverts), asleep=asleep)

    def _close(self, under: Under) -> None:
        """The next phase of a round, on disk before anybody hears of it."""
        was, published = under.phase, under.publication
        if was == SHARE:
            published = self.offer()
        state = server.close(self.terms, under.state, _hash(published))
        if state.phase == server.ABANDONED:
            self._end(under, state)
            return
        at, size = self.now(), len(state.adverts)
        row = replace(
            under.row, phase=state.phase, fixed_at=at if was == ADVERTISE else under.row.fixed_at, devices=size
        )
        if state.sharers:
            row = replace(row, shared=_many(state.sharers, size), survived=_many(state.survivors, size))
        if published is not None:
            row = replace(row, version=published.version)
        opens = self.newest + 1 if was == ADVERTISE else None
        self.store.change_round(
            self.task,
            row,
            roster=state.roster,
            sharers=state.sharers,
            survivors=state.survivors,
            publication=published if state.phase == MASK else None,
            without=tuple(under.asleep),
            then_open=opens,
            at=at,
        )
        deadline = self._deadline(state.phase)
        self._put(
            replace(under, state=state, row=row, deadline=deadline, publication=published, asleep={}, is_held=False)
        )
        if opens is not None:
            self._begin(opens, at)

    def finish(self, before: ServerRound, closed: ServerRound, total: Callable[[RoundRow], JournalRow]) -> Any:
        """Take over what `server.close` made of a round that `advance` returned; the journal's entry of its total.

        None if it has none, or if these rounds do not know it: the journal was folded again meanwhile.
        """
        under = self.active.get(before.round)
        if under is None or under.state is not before:
            return None
        if closed.phase != SUMMED:
            self._end(under, closed)
            return None
        row = self._last_row(under, closed)
        entry = self.store.end_round(
            self.task, row, total(row), _told(row, closed), keep_devices=self.given is not None
        )
        self._forget(row)
        if self.given is not None:
            ids = read_roster(self.terms, before.round, before.roster).ids
            self.given.update(ids[index] for index in before.masked)
        return entry

    def abandon(self, before: ServerRound, cause: str, why: str) -> None:
        """End a round without a sum."""
        self._end(self.active[before.round], server.abandon(before, cause, why))

    def abandon_all(self, why: str) -> None:
        """The task was stopped: nothing more is summed."""
        for under in list(self.active.values()):
            self._end(under, server.abandon(under.state, "stopped", why))

    def _end(self, under: Under, closed: ServerRound) -> None:
        row = self._last_row(under, closed)
        self.store.end_round(self.task, row, told=_told(row, closed))
        self._forget(row)

    def _last_row(self, under: Under, closed: ServerRound) -> RoundRow:
        row = replace(under.row, phase=closed.phase, cause=closed.cause, why=closed.why, ended_at=self.now())
        if under.phase == ADVERTISE:
            return replace(row, devices=len(under.state.adverts))
        survived = len(under.state.masked) if under.state.sharers else 0
        shared = len(under.state.shares) if not under.state.sharers else row.shared
        return replace(row, shared=shared, survived=survived)

    def _forget(self, row: RoundRow) -> None:
        self.active = {number: each for number, each in self.active.items() if number != row.number}
        if row.devices:
            what = row.cause or "summed"
            self.counts[what] = self.counts.get(what, 0) + 1
        self.survived += row.survived if row.phase == SUMMED else 0
        ended = {**self.ended, row.number: row}
        if len(ended) > RECENT:
            del ended[min(ended)]
        self.ended = ended

    def keep_sums(self) -> None:
        """Write down the sums under masks: the bodies behind them go."""
        loose = [each for each in self.active.values() if each.loose]
        if loose:
            self.store.keep_sums(self.task, [(each.state.round, each.last, each.state.body) for each in loose])
            for each in loose:
                self._put(replace(self.active[each.state.round], loose=0))

    def renew(self, away: float = 0.0) -> None:
        """Give every phase its whole time again, those to come included: the task was not served for a while, and its
        devices come back within `away` seconds."""
        self._back = self.clock() + away
        self.seen.update(dict.fromkeys(self.seen, self._back))
        self.active = {
            number: replace(each, deadline=self._deadline(each.phase)) for number, each in self.active.items()
        }

    def _count(self, now: float) -> None:
        seen = list(self.seen.items())  # in one go: another thread may add to it
        self.crowd, self._counted = max(1, sum(now - then < LATELY for _, then in seen)), now
        for device, then in seen:
            if now - then > max(600.0, 2 * self.lease):
                self.seen.pop(device, None)

    # --- for people ---

    def figures(self, limit: int = 50) -> list[RoundFigures]:
        """The newest rounds, those under way included."""
        now = datetime.fromisoformat(self.now())
        rows: Iterable[RoundRow] = [each.row for each in self.active.values()]
        rows = sorted((*rows, *self.ended.values()), key=lambda row: row.number, reverse=True)[:limit]
        return [self._figures(row, now) for row in rows]

    def _figures(self, row: RoundRow, now: datetime) -> RoundFigures:
        ended = now if row.ended_at is None else datetime.fromisoformat(row.ended_at)
        seconds = (ended - datetime.fromisoformat(row.opened_at)).total_seconds()
        devices, shared, survived = row.devices, row.shared, row.survived
        under = self.active.get(row.number)
        if under is not None:
            state = under.state
            devices = devices or len(state.adverts)
            shared, survived = shared or len(state.shares), survived or len(state.masked)
        return RoundFigures(
            row.number, row.phase, devices, shared, survived, row.cause, row.why, row.opened_at, seconds, row.version
        )  # fmt: skip


def _read(kind: str, data: bytes) -> Any:
    try:
        return open_message(kind, data)
    except Refused as refused:
        raise Problem("malformed", str(refused)) from refused


def _opened(kind: type[Any], data: bytes) -> Any:
    """What the store has: it was read before it was kept."""
    try:
        return open_message(kind.kind, data)
    except Refused as refused:
        raise CrowdmlError(f"the store has a message of a round that cannot be read: {refused}") from refused


def _told(row: RoundRow, closed: ServerRound) -> list[tuple[str, str]]:
    """The events of its end: who was blamed, too, which devices are not told. One that nobody came to is no news."""
    if not row.devices:
        return []
    kind = "round summed" if row.phase == SUMMED else "round abandoned"
    what = f"round {row.number}: {row.survived} of {row.devices} devices{': ' + row.why if row.why else ''}"
    return [(kind, what), *([("wrong shares", f"round {row.number}: {closed.blamed}")] if closed.blamed else [])]


def _return_time(kept: Iterable[OpenRound], now: str) -> float:
    """Seconds until the devices of these rounds have found out that the server is back.

    A device's pauses double while nobody answers, so its last one is at most twice as long as the server was away; and
    the server was away no longer than since the last round was opened or fixed.
    """
    if not now:  # a replay, which waits for nobody
        return 0.0
    last = max((each.row.fixed_at or each.row.opened_at for each in kept), default=now)
    away = (datetime.fromisoformat(now) - datetime.fromisoformat(last)).total_seconds()
    return min(LONGEST_RETURN, max(0.0, 2 * away))


def _hash(published: Publication | None) -> bytes:
    return b"" if published is None else publication_hash(published.version, published.kind, published.body)


def _many(bitmap: bytes, devices: int) -> int:
    return int(members(bitmap, devices).sum()) if bitmap else 0
