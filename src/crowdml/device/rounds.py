"""A device's part in the rounds of a masked task: it looks, advertises, shares, draws, checks in, agrees, reveals.

`crowdml.secagg.device` decides what is said; this drives it over HTTP. The order is the promise: what a step says, and
the number of its round, are on disk before a byte is sent, in one transaction with the ledger where noise was drawn;
what is sent are those bytes until they are acknowledged. A device that is killed at any moment goes on from the disk
with the same keys, or its part in that round is over. Nothing of a round is kept in memory while others are waited for.

No noise is drawn before the cohort is fixed and its shares are held: until then a round costs nothing, and the batch
goes to the next one. After it the charge stays, whatever becomes of the round.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from crowdml.device.marks import Mark
from crowdml.errors import CrowdmlError
from crowdml.messages import SERVER, Envelope
from crowdml.secagg import device
from crowdml.secagg.device import ADVERTISED, AGREED, MASKED, REVEALED, SHARED, DeviceRound
from crowdml.secagg.messages import (
    Advert,
    Agreement,
    Agreements,
    Cohort,
    Held,
    Reveal,
    Shares,
    Survivors,
    binary,
    decode,
    encode,
    open_message,
)
from crowdml.secagg.messages import Masked as MaskedMessage
from crowdml.secagg.refusals import Refused
from crowdml.secagg.terms import Terms
from crowdml.storage import Ledger, Round
from crowdml.wire.envelopes import open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.problems import Problem
from crowdml.wire.rounds import PHASES, RoundView, open_view, publication_hash
from crowdml.wire.statements import Statement

if TYPE_CHECKING:
    from crowdml.device.commits import Commits
    from crowdml.device.member import Clock

__all__ = ["MASKED_KIND", "Asks", "Draw", "Lied", "OwnRounds", "Publication", "drawn", "has_said", "kept"]

MASKED_KIND = MaskedMessage.kind
MOST_REFUSALS = 3
"""Rounds in a row that a device may have to leave before it stops: the server lies, or one of the two is broken."""
LEAP = 2**21
"""How far a round may lie above the device's last one, or above the milliseconds since 1970: a server that was restored
counts on from those. A number beyond would keep this device out of every later round."""
SHORTEST_WAIT, LONGEST_WAIT = 0.02, 3600.0
"""Seconds between two looks, whatever the server asks for."""

SAID = {ADVERTISED: "advertise", SHARED: "share", MASKED: "mask", AGREED: "agree", REVEALED: "reveal"}
"""In which phase of the round the server hears what a device said last."""
HEARS = {ADVERTISED: "share", SHARED: "mask", MASKED: "agree", AGREED: "reveal"}
"""In which phase it is told what it waits for."""
KINDS = {ADVERTISED: Advert.kind, SHARED: Shares.kind, AGREED: Agreement.kind, REVEALED: Reveal.kind}
"""What a device posts to a round; its masked vector is a check-in."""
DRAWN = (MASKED, AGREED, REVEALED)

Publication = tuple[int, str, bytes]
"""Version, kind and body: what a cohort works with."""
Asks = Callable[..., Awaitable[bytes]]
"""(method, path, body) -> the answer's body, from a server that is asked until it answers; a refusal is a Problem."""


class Lied(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """The server led this device into rounds that it had to leave, again and again."""


class _Over(Exception):  # noqa: N818  # a signal inside this module
    """This device's part in the round is over."""


Draw = Callable[[Publication, DeviceRound], Awaitable[bool]]
"""Compute on the publication, draw, mask, and write all of it in one transaction: then check in. Whether the server
took it."""


@dataclass(frozen=True)
class _Kept:
    """What lies on disk of a round: where this device stands in it, and what it said last, signed and sealed."""

    state: bytes = binary()
    said: bytes = binary()


def kept(state: DeviceRound, said: bytes) -> Round:
    """For the ledger: `said` is what was signed of the last thing that this device said."""
    return Round(state.round, encode(_Kept(state.encode(), said)))


def drawn(state: DeviceRound) -> Round:
    """What is kept of a round once noise was drawn: all but the masked vector, which the outbox has."""
    return kept(replace(state, sent=b""), b"")


def has_said(body: bytes, kind: str) -> bool:
    """Whether a device that keeps this of a round has said a message of this kind in it, or what comes after it."""
    try:
        phase = DeviceRound.decode(decode(_Kept, body).state).phase
    except Refused:  # another release of this software wrote it: that round is over for this device
        return True
    order = list(SAID)
    return order.index(phase) >= next(order.index(each) for each in order if KINDS.get(each) == kind)


class OwnRounds:
    """The rounds of one device and one masked task."""

    def __init__(
        self,
        key: Key,
        ledger: Ledger,
        terms: Terms,
        path: str,
        *,
        ask: Asks,
        statement: Callable[[], Statement],
        commit: Commits,
        gate: asyncio.Semaphore,
        clock: Clock,
        ready: Callable[[], Awaitable[None]],
        chance: Callable[[], float],
        tell: Callable[[str], None],
    ) -> None:
        self.terms = terms
        self._key, self._ledger, self._path = key, ledger, f"{path}/round"
        self._ask, self._statement, self._commit, self._gate = ask, statement, commit, gate
        self._clock, self._ready, self._chance, self._tell = clock, ready, chance, tell
        self._refusals = 0
        self._said = False
        """Whether the server acknowledged, to this process, what the device said last."""
        self._told = ""
        found = ledger.round(terms.task)
        self._last = 0 if found is None else found.number
        try:
            self._phase = None if found is None or found.body is None else self._state()[0].phase
        except Refused:  # another release of this software wrote it: that round is over for this device
            ledger.keep_round(terms.task, Round(self._last, None))
            self._phase = None
        if self._is_behind():
            # A second draw would wear the same masks, and a second agreement might name other survivors: so this
            # round is over for this device.
            ledger.keep_round(terms.task, Round(self._last, None))
            self._phase = None

    def _is_behind(self) -> bool:
        """Whether `given.log` knows of a draw, an agreement or a reveal in this round that the ledger does not."""
        if self._phase not in DRAWN:
            return self._phase is not None and self._marked_round() >= self._last
        marked = self._commit.marked(self._ledger.device)
        mark = None if marked is None else marked.highest.get(self.terms.task.hex())
        if mark is None or mark.round != self._last or mark.is_check_in or self._phase == REVEALED:
            return False
        return self._phase == MASKED or mark.hash != hashlib.sha256(self._state()[1]).hexdigest()

    def _marked_round(self) -> int:
        """The highest round of this task in which `given.log` knows of a draw; 0: it knows of none.

        Marks of version 0.1 name no task: theirs may be of this one.
        """
        marked = self._commit.marked(self._ledger.device)
        return 0 if marked is None else max(marked.round(self.terms.task.hex()), marked.round(""))

    @property
    def drawn(self) -> bool:
        """Whether this device has drawn noise in a round that is not over for it."""
        return self._phase in DRAWN

    async def finish(self) -> None:
        """After a restart: go on with a round in which this device has drawn."""
        if self.drawn:
            await self._mark_again()
            await self._follow(None)

    async def _mark_again(self) -> None:
        """Mark what the device says next, where a crash came between the ledger and the mark.

        Only where the last mark is of the same round: a later message of another task stays the last.
        """
        marked = self._commit.marked(self._ledger.device)
        if marked is None or (marked.last.task, marked.last.round) != (self.terms.task.hex(), self._last):
            return
        state, said = self._state()
        if said and marked.last.hash != hashlib.sha256(said).hexdigest():
            await self._commit(lambda: None, self._marks(state, said, open_signed(said).statement))

    def _marks(self, state: DeviceRound, said: bytes, statement: Statement) -> list[tuple[int, Mark]]:
        digest = hashlib.sha256(said).hexdigest()
        mark = Mark(state.round, statement.samples, digest, state.round, self.terms.task.hex(), is_check_in=False)
        return [(self._ledger.device, mark)]

    async def contribute(self, draw: Draw) -> None:
        """Take part in rounds until this device has drawn in one, and has done its part in that."""
        while not await self._follow(draw):
            pass

    async def _follow(self, draw: Draw | None) -> bool:
        """One round, to the end of this device's part in it: whether it drew.

        The gate is held while the device computes and sends, and not while it waits for others.
        """
        try:
            while True:
                if self._phase is None:
                    await self._ready()
                async with self._gate:
                    view = await self._look()
                    if view.body and view.phase == SAID.get(self._phase or ""):
                        self._said = False  # it asks for what it acknowledged: it hears it once more a look
                    wait = view.wait
                    while (answer := await self._step(view, draw)) is not None:
                        view, wait = answer, answer.wait
                pause = wait / 1000 * (0.5 + self._chance())  # spread, so that a cohort does not ask at once
                await self._clock.sleep(min(LONGEST_WAIT, max(SHORTEST_WAIT, pause)))
        except _Over as over:
            drew = await self._leave()
            if str(over):
                self._say_aloud(str(over))
        except Refused as refused:
            drew = await self._leave()
            self._refusals += 1
            aloud = f"{refused} This device takes no further part in this round."
            if self._refusals > MOST_REFUSALS:
                raise Lied(f"Round {self._last}: {aloud} It was the {self._refusals}th round in a row.") from refused
            self._say_aloud(aloud)
        return drew

    async def _leave(self) -> bool:
        """Drop what was kept of the round; whether noise was drawn in it."""
        phase, self._phase, self._said = self._phase, None, False
        if phase is not None:
            await self._commit(partial(self._ledger.keep_round, self.terms.task, Round(self._last, None)))
        return phase in DRAWN

    # --- one look, one step ---

    async def _look(self) -> RoundView:
        path = self._path if self._phase is None else f"{self._path}?round={self._last}"
        try:
            return _read(await self._ask("GET", path))
        except Problem as problem:
            self._end(problem)

    async def _step(self, view: RoundView, draw: Draw | None) -> RoundView | None:
        """Do what this view asks for; the view that came back, or None where there is nothing to do but wait."""
        phase = self._phase
        if phase is None:
            return await self._begin(view)
        if view.round != self._last:
            raise Refused(f"The server speaks of round {view.round} to a device in round {self._last}.")
        self._progress(view)
        if view.phase == SAID[phase]:
            return await self._say() if phase in KINDS and not self._said else None
        if view.phase != HEARS.get(phase):
            if PHASES.index(view.phase) < PHASES.index(SAID[phase]):
                raise Refused(f"Round {view.round} went back to {view.phase!r}, which was over.")
            raise _Over(self._ending(view))
        if not view.body:
            raise _Over(f"the round goes on without this device{_because(view.why)}")
        return await self._hear(view, draw)

    async def _begin(self, view: RoundView) -> RoundView | None:
        if view.phase != "advertise" or view.round == self._last:  # its part in that one is over
            return None
        if view.round < self._last:  # a server that was restored from an older copy, or one that lies: no keys for it
            self._say_aloud(f"the server is at round {view.round} again; this device waits for one after its last")
            return None
        if view.round > max(self._last, int(self._clock.now() * 1000)) + LEAP:
            self._say_aloud(f"the server offers round {view.round}, which no server has come to; this device waits")
            return None
        state = device.advertise(self.terms, view.round, self._key, after=self._last)
        await self._keep(state)
        self._progress(view)
        return await self._say()

    async def _hear(self, view: RoundView, draw: Draw | None) -> RoundView | None:
        (state, _), message = self._state(), open_message(view.kind, view.body)
        if isinstance(message, Cohort):
            await self._keep(device.share(self.terms, state, message))
        elif isinstance(message, Held):
            if draw is None or view.publication is None:
                raise Refused("The server names no publication for this cohort.")
            held = device.hold(self.terms, state, message, publication_hash(*view.publication))
            if not await draw(view.publication, held):
                self._phase = MASKED
                raise _Over("the server did not take this device's part; what was drawn stays charged")
            self._phase, self._said = MASKED, True
            return await self._look()
        elif isinstance(message, Survivors):
            await self._keep(device.agree(self.terms, state, self._key, message))
        elif isinstance(message, Agreements):
            await self._keep(device.reveal(self.terms, state, message))
        else:
            raise Refused(f"A server does not send a {message.kind}.")
        return await self._say()

    # --- the disk, then the wire ---

    def _state(self) -> tuple[DeviceRound, bytes]:
        """Where this device stands, and the bytes that it said last."""
        found = self._ledger.round(self.terms.task)
        body = None if found is None else found.body
        assert body is not None, "a round with a phase is on disk"
        found = decode(_Kept, body)
        return DeviceRound.decode(found.state), found.said

    async def _keep(self, state: DeviceRound) -> None:
        """On disk when this returns, and only then is it said.

        It is signed once, with the totals of this moment: what is sent again are the same bytes (R2). What a device
        says after its draw the server keeps when its masked vector is gone: so it is marked as the last that it said,
        for the day on which the ledger is lost.
        """
        statement = self._statement()
        said = self._sealed(state, statement)
        marks = self._marks(state, said, statement) if state.phase in DRAWN else []
        await self._commit(partial(self._ledger.keep_round, self.terms.task, kept(state, said)), marks)
        self._last, self._phase, self._said = state.round, state.phase, False

    async def _say(self) -> RoundView:
        """Send what the device said last: the same bytes each time."""
        state, said = self._state()
        try:
            answer = await self._ask("POST", self._path, said)
        except Problem as problem:
            if problem.slug == "round-refused" and state.phase != ADVERTISED:  # a full cohort is nobody's fault
                raise Refused(f"The server refused what this device said: {problem.detail}") from problem
            self._end(problem)
        self._said = True
        self._tell(state.phase)
        if state.phase == REVEALED:
            self._refusals = 0
            raise _Over
        return _read(answer)

    def _sealed(self, state: DeviceRound, statement: Statement) -> bytes:
        kind, to = KINDS[state.phase], frozenset((SERVER,))
        return sign(Envelope(self.terms.task, self._key.id, to, state.round, kind, state.sent), statement, self._key)

    def _end(self, problem: Problem) -> NoReturn:
        if problem.slug in ("round-over", "round-refused") and self._phase is not None:
            raise _Over(problem.detail) from problem
        raise problem

    # --- for people ---

    def _ending(self, view: RoundView) -> str:
        if view.phase == "abandoned":
            return f"it was abandoned{_because(view.why)}"
        return f"it went on to {view.phase!r} without this device" if view.phase != "summed" else "it is over"

    def _progress(self, view: RoundView) -> None:
        if view.phase == "advertise":
            least, most = self.terms.smallest, self.terms.largest
            here = view.why or f"{least:,} to {most:,} devices"
            self._say_aloud(f"waiting for the cohort: {here}")

    def _say_aloud(self, text: str) -> None:
        """Once, though it is seen again at every look."""
        line = f"round {self._last}: {text}"
        if line != self._told:
            self._told = line
            self._tell(line)


def _read(data: bytes) -> RoundView:
    try:
        return open_view(data)
    except Problem as problem:
        raise Refused(f"The server's view of the round cannot be read: {problem.detail}") from problem


def _because(why: str) -> str:
    from crowdml.texts import one_line

    return f": {one_line(why)}" if why else ""
