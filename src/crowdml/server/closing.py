"""What the server does of itself in a task: it closes rounds of uploads and wakes the protocol when a timer runs out.

Each is an entry of the server's own, durable before anybody hears of it. What its own door lets out meanwhile, from
rows of the operator's, is in that entry, with its charge: after a crash nothing is drawn again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

from crowdml.arrays import Samples
from crowdml.channels import combining
from crowdml.errors import CrowdmlError, DataError, ProtocolError
from crowdml.features.bounds import prepared
from crowdml.privacy.door import Door, OwnDoor
from crowdml.privacy.private import Private, Rows, Unseen
from crowdml.server.gathering import CLOSE, CLOSED, RELEASED, WOKEN, Own, pack_own, seconds_left
from crowdml.server.validation import check_fitting, kind_of_rows, unpack_rows
from crowdml.storage.server import StoreError
from crowdml.storage.server.database import utc
from crowdml.storage.server.looks import charge_rows, check_allowed, rows_of, validations
from crowdml.texts import count_text
from crowdml.turn import Outcome
from crowdml.wire.envelopes import Signed
from crowdml.wire.problems import Problem

if TYPE_CHECKING:
    from crowdml.server.runner import TaskRunner

__all__ = ["Closing", "RoundNow", "Scored"]

SOONEST = 1.0
"""Seconds: no timer of a protocol runs out sooner, so that one that always asks to be woken leaves time for others."""

KINDS = {"public": "public", "charged": "private"}

FRESH = 5.0
"""Seconds for which a task counts as just begun: nobody can have looked at its first round long before."""

LONG = 3600.0
"""Seconds after which the operator is told of a round that closes by number alone and is not full yet."""

log = logging.getLogger("crowdml.server")


@dataclass(frozen=True)
class Scored:
    """How the uploads of a closed round did on public rows of the operator's, without saying whose they were."""

    number: int
    scores: tuple[float, ...]
    """From the lowest on."""
    taken: int
    rule: str = "top"

    def text(self) -> str:
        """'Round 3, on public rows: ...' with the lowest, the median and the highest score."""
        low, middle, high = self.scores[0], median(self.scores), self.scores[-1]
        many = count_text(len(self.scores), "upload")
        left = len(self.scores) - self.taken
        if self.rule == "fltrust":
            return (
                f"Round {self.number:,}, cosines with an update made of public rows: {low:.3f} to {high:.3f}, half of "
                f"them above {middle:.3f}. {left:,} of {many} were left out, for they go against it."
            )
        return (
            f"Round {self.number:,}, rated on public rows: {low:.3f} to {high:.3f}, half of them above {middle:.3f}. "
            f"{left:,} of {many} were left out, for others did better."
        )


@dataclass(frozen=True)
class RoundNow:
    """The open round of a gathered task, for people to look at."""

    number: int
    uploads: int
    size: int
    minimum: int
    opened_at: str
    closes_at: str | None
    """When it closes by time; None: by number alone."""
    scored: Scored | None = None
    """How the uploads of the last round did on public rows, where a rule rates them. For the operator alone."""

    def text(self, now: str) -> str:
        """'round 3: 7 of 10 uploads, closes at 10 or at 14:05 UTC'."""
        said = f"round {self.number:,}: {self.uploads:,} of {count_text(self.size, 'upload')}, closes at {self.size:,}"
        if self.closes_at is None:
            waited = _since(self.opened_at, now)
            return f"{said}; it has been waiting for {waited}: if no more devices give, invite more, or stop the task"
        if self.closes_at <= now:
            return f"{said} or as soon as {self.minimum:,} are in, for its time is over: invite more devices, or stop"
        return f"{said} or at {self.closes_at[11:16]} UTC"

    def plain(self) -> dict[str, Any]:
        """For JSON that anyone may read. Scores are not in it: whoever lies would learn how well a lie does."""
        return {"number": self.number, "uploads": self.uploads, "size": self.size, "minimum": self.minimum,
                "opened_at": self.opened_at, "closes_at": self.closes_at}  # fmt: skip


class Closing:
    """Opens and closes the rounds of one gathered task. Runs in the server's writing thread."""

    def __init__(self, runner: TaskRunner) -> None:
        self.runner, self.fold = runner, runner.fold
        self.gathering = self.fold.gathering
        self.failure: str | None = None
        """Why a round could not be closed, or a timer not be heard: the task waits for its operator."""
        self.senders: set[str] = set()
        """Devices whose upload the open round has; under masks, those in its totals."""
        if self.gathering is not None and runner.is_masked:
            self.senders = runner.store.devices_in_totals(runner.task.hash, self.fold.version)
        elif self.gathering is not None:
            self.senders = runner.store.senders_of(runner.task.hash, self.fold.pending.open)
        self._due: dict[tuple[str, int], float] = {}
        self._told = -1
        self._open_since = self._when_opened()

    # --- uploads ---

    @property
    def room(self) -> int:
        """How many more uploads the open round takes."""
        assert self.gathering is not None
        return max(0, self.gathering.size - len(self.fold.pending.open))

    def flaw(self, message: Any) -> Problem | None:
        """Why an upload is not of the open round."""
        version, now = int(message.version), self.fold.version
        if version == now:
            return None
        return _over(f"The upload is for round {version}, which is over; round {now} is open.")

    def _when_opened(self) -> float:
        """When the open round was opened, by the clock that does not jump. Of a round that was open before this process
        began that is not known: then its lottery counts as widened to everybody."""
        opened, runner = self.fold.pending.opened, self.runner
        if self.gathering is None or self.gathering.drawn is None or opened or self.fold.pending.open:
            return -math.inf
        since, now = runner.store.received_at(runner.task.hash, 0), runner.now()
        passed = (datetime.fromisoformat(now) - datetime.fromisoformat(since)).total_seconds() if now else math.inf
        return runner.clock() - passed if 0 <= passed <= FRESH else -math.inf

    def _is_drawn(self, device: str) -> bool:
        """Whether the lottery has drawn this device by now: an honest one that waits as the protocol says is never
        ahead of that."""
        gathering = self.gathering
        if gathering is None or gathering.drawn is None or self._open_since == -math.inf:
            return True
        looks = gathering.looks_within(self.runner.clock() - self._open_since)
        return gathering.draws(self.runner.task, self.fold.version, device, looks)

    def choose(
        self, batch: Sequence[Signed], found: Sequence[Any], places: Sequence[int], answers: list[Any]
    ) -> tuple[list[int], list[int]]:
        """Choose among the check-ins at these indices: those that the open round takes now, and those to decide once
        these are written, which are further ones of the same devices and those for which the round has no room.

        The others are answered. One that is in the journal already gets its receipt, though its round may be over.
        """
        now, later, names, room = list[int](), list[int](), set[str](), self.room
        for place in places:
            sender = batch[place].envelope.sender
            problem = self.flaw(found[place])
            if problem is None and sender in self.senders:
                problem = _over(f"This device gave to round {self.fold.version} already.")
            if problem is None and not self._is_drawn(sender):
                problem = _over(f"This device is not drawn for round {self.fold.version}, which is open: look again.")
            if problem is None and self.failure is not None:
                problem = Problem("task-paused", "The round cannot be closed. The operator was told.", retry_after=60)
            if problem is not None:
                answers[place] = self.runner.repeated(batch[place]) or problem
            elif len(now) < room and sender not in names:
                names.add(sender)
                now.append(place)
            else:
                later.append(place)
        return now, later

    # --- closing, and timers ---

    def close_full(self) -> None:
        """Close the open round if it is full."""
        if self.gathering is not None and not self.room:
            self._try(self._close)

    def is_due(self) -> bool:
        """Whether a round is to be closed now, or a timer ran out."""
        if self.failure is not None:
            return False
        return bool(self._due_now()) or (self.gathering is not None and not self.room)

    def ring(self) -> None:
        """Close the round if its time is over and enough is there; wake the protocol for every timer that ran out."""
        self.close_full()
        for tag, asked in self._due_now():
            if tag == CLOSE and self._is_enough:
                self._try(self._close)
            elif tag == CLOSE:
                self._tell_waiting()
            elif self.fold.pending.wakes.get(tag, (None,))[0] == asked:
                self._try(lambda tag=tag: self._wake(tag))

    def renew(self, seconds: float) -> None:
        """Give devices so many seconds to come back, after nobody could answer; a round that failed is tried again."""
        self.failure = None
        soonest = self.runner.clock() + seconds
        self._due = {each: max(due, soonest) for each, due in self._timers().items()}

    def _timers(self) -> dict[tuple[str, int], float]:
        """When each timer runs out, by its tag and the entry that asked for it."""
        asked = {(tag, index): max(SOONEST, after) for tag, (index, after) in self.fold.pending.wakes.items()}
        if self.gathering is not None:
            asked[CLOSE, self.fold.pending.opened] = self.gathering.seconds or LONG
        if asked.keys() != self._due.keys():
            self._due = {each: self._due.get(each) or self._begin(each[1], after) for each, after in asked.items()}
        return self._due

    def _begin(self, index: int, after: float) -> float:
        since = self.runner.store.received_at(self.runner.task.hash, index)
        return self.runner.clock() + seconds_left(since, after, self.runner.now())

    @property
    def _is_enough(self) -> bool:
        """Whether the open round closes when its time is over."""
        gathering = self.gathering
        return bool(gathering and gathering.seconds and len(self.fold.pending.open) >= gathering.minimum)

    def _due_now(self) -> list[tuple[str, int]]:
        """The timers that ran out and that something is to be done about: a round that waits is told of once."""
        now, idle = self.runner.clock(), None if self._is_enough else (CLOSE, self._told)
        return [each for each, due in self._timers().items() if due <= now and each != idle]

    def _tell_waiting(self) -> None:
        """Tell the operator of a round whose time is over and that has too few uploads."""
        assert self.gathering is not None
        self._told = self.fold.pending.opened
        seconds = self.gathering.seconds or LONG
        least = self.gathering.minimum if self.gathering.seconds else self.gathering.size
        detail = (
            f"round {self.fold.version} has {len(self.fold.pending.open)} of at least {count_text(least, 'upload')} "
            f"after {seconds:g} s: it stays open until they are in. Invite more devices, or stop the task"
        )
        log.warning("task %s: %s", self.runner.task.name, detail)
        self.runner.store.record("round waits", self.runner.now(), detail, self.runner.task.hash)

    def _try(self, act: Callable[[], None]) -> None:
        """What the protocol cannot do stops this task alone, and its operator is told why. A database that fails is
        another matter: then the journal is folded again."""
        try:
            act()
        except StoreError:
            raise
        except CrowdmlError as error:
            self.failure = str(error)
        except Exception as error:  # its text could hold a row
            self.failure = f"protocol {self.fold.protocol.name!r} failed with {type(error).__name__}"
        if self.failure is not None:
            log.error("task %s: round %d: %s", self.runner.task.name, self.fold.version, self.failure)

    def _close(self) -> None:
        own = Own(self.fold.version, tuple(self.fold.pending.open))
        self._act(CLOSED, own, self.fold.closed, self.fold.take_closed)
        self.senders.clear()
        self._open_since = self.runner.clock()

    def _wake(self, tag: str) -> None:
        self._act(WOKEN, Own(tag=tag), lambda door, rows: self.fold.woken(tag, door, rows),
                  lambda turn, index: self.fold.take_woken(turn, index, tag))  # fmt: skip

    def _act(
        self,
        kind: str,
        own: Own,
        turn: Callable[[Door | None, Private[Samples] | None], Outcome],
        take: Callable[[Outcome, int], None],
    ) -> None:
        """Run a turn of the server with its own door, if it has one; then its entry, what the door let out and its
        charge are durable together, and it is taken over."""
        runner, table = self.runner, self.fold.protocol.server_mechanisms(self.runner.task)
        if not table:
            made = turn(None, None)
            runner.append_own(kind, pack_own(kind, own), lambda index: take(made, index))
            return
        found = validations(runner.store).get(runner.task.hash)
        data = None if found is None else rows_of(runner.store, found.rows)
        wanted = kind_of_rows(table)
        if found is None or data is None or found.halted is not None or found.terms.kind != wanted:
            named = "--public" if wanted == "public" else "--epsilon"
            raise DataError(
                f"protocol {self.fold.protocol.name!r} lets out something from {KINDS[wanted]} rows of the operator's, "
                f"and this task has none. Attach them with `crowdml task validate {named}`, and resume the task."
            )
        check_fitting(runner.task, found.terms, found.count)
        with runner.store.reading() as connection:
            check_allowed(connection, found.rows, [row.loss for row in table.values()])
        door = OwnDoor(table, runner.noise, public=wanted == "public")
        held = unpack_rows(data, found.count, found.dimension)
        samples = Samples(prepared(runner.task.features, held.x), held.y)
        rows = Private(samples, Rows(0, found.count))

        def charge(connection: Any, number: int, entry: Any) -> None:
            priced = [each for each in door.passages if not each.mechanism.public]
            losses = {passage.row: passage.mechanism.loss for passage in priced}
            charge_rows(connection, number, entry.index, found.rows, runner.now(), losses)

        try:
            made = turn(door, Unseen(rows))
            body = pack_own(kind, replace(own, released=door.drawn))
        except StoreError:
            raise
        except Exception as error:  # its text could hold a row; what was drawn is charged, and nobody is shown it
            if door.passages:
                lost = Own(self.fold.version, tag=" + ".join(str(each.mechanism.loss) for each in door.passages))
                runner.append_own(RELEASED, pack_own(RELEASED, lost), lambda _: None, charge)
            if wanted == "public" and isinstance(error, CrowdmlError):
                raise  # it says what these rows lack
            raise ProtocolError(f"protocol {self.fold.protocol.name!r} failed with {type(error).__name__}") from None
        runner.append_own(kind, body, lambda index: take(made, index), charge)
        if kind == CLOSED:
            self.fold.note_scores(own.number, door.drawn)

    # --- for people ---

    def now(self) -> RoundNow | None:
        """The open round; None of a task that gathers nothing."""
        if self.gathering is None:
            return None
        due = None if self.gathering.seconds is None else self._timers().get((CLOSE, self.fold.pending.opened))
        left = None if due is None else timedelta(seconds=due - self.runner.clock())
        return RoundNow(
            self.fold.version,
            len(self.fold.pending.open),
            self.gathering.size,
            self.gathering.minimum,
            self.runner.store.received_at(self.runner.task.hash, self.fold.pending.opened),
            None if left is None else utc((datetime.fromisoformat(self.runner.now()) + left).isoformat()),
            self._scored(),
        )

    def _scored(self) -> Scored | None:
        fold, by = self.fold, combining(self.runner.task)
        if fold.scored is None or by is None:
            return None
        number, steps = fold.scored
        step = float(fold.protocol.server_mechanisms(fold.task)["scores"].grid.step)
        taken = int((steps > 0).sum()) if by.rule == "fltrust" else by.keep or len(steps)
        return Scored(number, tuple(sorted((steps * step).tolist())), taken, by.rule)


def _over(detail: str) -> Problem:
    return Problem("round-over", detail, status=409)


def _since(then: str, now: str) -> str:
    seconds = max(0.0, (datetime.fromisoformat(now) - datetime.fromisoformat(then)).total_seconds())
    units = (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1))
    unit, length = next((each for each in units if seconds >= each[1]), units[-1])
    return count_text(int(seconds / length), unit)
