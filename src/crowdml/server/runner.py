"""A task on the server: its state is a fold of the protocol's handlers over the journal.

Verify, validate, journal, apply, answer. A whole batch is journalled in one transaction before any of it is applied, so
an acknowledged check-in is durable, and a restart that folds the journal from the last snapshot ends in the same bits.
Devices of a masked task check in vectors under masks, which nothing is folded over: `crowdml.server.rounds` adds them
up, and the fold hears the totals, which are entries of the server's own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from crowdml.errors import TaskError
from crowdml.messages import SERVER, Envelope, encode, total
from crowdml.privacy.noise import Source, SystemSource
from crowdml.protocol import Protocol
from crowdml.protocols import refusal
from crowdml.secagg import server as masking
from crowdml.secagg.messages import Advert, Masked
from crowdml.secagg.server import ServerRound
from crowdml.secagg.terms import Terms, terms_of
from crowdml.server.closing import Closing
from crowdml.server.fold import Fold, uploads_in
from crowdml.server.gathering import RELEASED, Own, pack_own
from crowdml.server.relay import relay_of
from crowdml.server.rounds import CohortRounds
from crowdml.server.sizes import check_masked
from crowdml.storage.server import Declined, Entry, JournalRow, Publication, RoundMessage, Store
from crowdml.storage.server.looks import Look, add_look
from crowdml.task import Task, from_canonical
from crowdml.wire.envelopes import Signed, open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import chain_next, chain_start, sign_receipts
from crowdml.wire.statements import Statement, is_plausible, totals_fell
from crowdml.wire.states import pack_state

Answer = tuple[int, bytes] | Problem
"""A status (202 new, 200 already here) with the bytes of a receipt or of a view of a round, or why it was refused."""


@dataclass(frozen=True)
class Offer:
    """What a check-out is answered with."""

    version: int
    kind: str
    body: bytes
    index: int
    """Entries of the journal behind it."""
    chain: bytes
    """The journal's chain there: what every receipt up to `index` is bound to."""


class TaskRunner:
    """One task. Everything here runs in the server's one writing thread."""

    def __init__(
        self,
        store: Store,
        canonical: bytes,
        key: Key,
        now: Callable[[], str],
        *,
        snapshot_every: int = 2_000,
        clock: Callable[[], float] = time.monotonic,
        noise: Source | None = None,
    ) -> None:
        self.store, self.key, self.now, self.snapshot_every = store, key, now, snapshot_every
        self.task: Task = from_canonical(canonical)
        if self.task.as_published:
            raise TaskError(f"task {self.task.name!r} runs as published: that is for the simulator alone.")
        self.clock, self.noise = clock, noise or SystemSource()
        self.fold = Fold(self.task, uploads_in(store, self.task.hash))
        self.refusal = refusal(self.task)
        """Why devices may not take part, of a task that an earlier version accepted: it has ended, and can be read."""
        self.index, self.chain = 0, chain_start(self.task.hash)
        self.offer = self._offer()
        self._reduced = 0
        """Up to where this process has reduced; at first it goes through all, for another may have been killed."""
        self.own = store.totals_count(self.task.hash)
        """Entries of the server's own: cohorts' totals, and what `crowdml.server.gathering` lists."""
        self.unsummed: list[ServerRound] = []
        """Rounds whose shares are all here: to be summed up, which may take seconds, and finished."""
        self.is_masked = self.fold.protocol.is_masked(self.task)
        self._open_before: list[int] = []
        self._catch_up()
        self.closing = Closing(self)
        self.rounds = self._make_rounds(clock) if self.is_masked else None
        self.relay = relay_of(store, self.task, self.fold.protocol, self.index)

    def _make_rounds(self, clock: Callable[[], float]) -> CohortRounds:
        assert self.task.masking is not None
        terms = masked_terms(self.task, self.fold.protocol)
        return CohortRounds(
            self.store, self.task.hash, self.task.masking, terms, offer=self._published, now=self.now, clock=clock,
            given=None if self.fold.gathering is None else self.closing.senders,
        )  # fmt: skip

    def _published(self) -> Publication:
        return Publication(self.offer.version, self.offer.kind, self.offer.body)

    @property
    def reason(self) -> str | None:
        """Why the task has ended: by its own rule, or because devices may not take part in it. None: it has not."""
        return self.fold.reason or (None if self.refusal is None else self.refusal.reason)

    @property
    def ended_by(self) -> str | None:
        """The name of the rule that ended the task, or of why devices may not take part; None: it goes on."""
        if self.fold.rule is not None:
            return self.fold.rule.name
        return None if self.refusal is None else self.refusal.kind

    @property
    def check_ins(self) -> int:
        """What devices gave: the journal without the server's own entries."""
        return self.index - self.own

    @property
    def totals(self) -> int:
        """Cohorts that were added up."""
        return self.own - self.fold.pending.beside

    def _catch_up(self) -> None:
        """The state from the last snapshot and every body since. No noise is drawn; the bits are those of before."""
        hash_ = self.task.hash
        snapshot = self.store.last_snapshot(hash_)
        if snapshot is not None:
            self.fold.resume(snapshot)
            self.index, self.chain = snapshot.index, snapshot.chain
            version, kind, body, *_ = msgpack.unpackb(snapshot.published)
            self.offer = Offer(version, kind, body, self.index, self.chain)
            self._open_before = list(self.fold.pending.open)
        self.snapshot_at = self.index
        if self.is_masked:
            self._catch_up_totals()
            return
        for index, data in self.store.tail(hash_, self.index):
            signed = open_signed(data)
            envelope = signed.envelope
            self.fold.hear(index, envelope.kind, envelope.body, envelope.sender)
            self.index = index
            self.chain = chain_next(self.chain, hash_, envelope.sender, envelope.seq, signed.hash)
        if self.index > self.snapshot_at:
            self.offer = self._offer()

    def _catch_up_totals(self) -> None:
        """Fold the totals of a masked task. Bodies of masked check-ins may be gone, and nothing is folded over them."""
        for index, data in self.store.totals(self.task.hash, self.index):
            envelope = open_signed(data).envelope
            self.fold.hear(index, envelope.kind, envelope.body, SERVER)
        head = self.store.head(self.task.hash)
        self.index, self.chain = head.index, head.chain
        self.offer = self._offer()

    def _offer(self) -> Offer:
        message = self.fold.message
        if message is None:  # nothing was published since the snapshot
            return dataclasses.replace(self.offer, index=self.index, chain=self.chain)
        return Offer(int(message.version), message.kind, encode(message), self.index, self.chain)

    def validate(self, batch: Sequence[Signed]) -> list[Any]:
        """The message inside each, if this task hears it and it is as the task says; else the Problem."""
        found = self.fold.read_many([(signed.envelope.kind, signed.envelope.body) for signed in batch])
        newest = self.offer.version
        for place, (signed, message) in enumerate(zip(batch, found, strict=True)):
            flaw = self._flaw(signed)
            if flaw is not None:
                found[place] = flaw
            elif not isinstance(message, Problem) and int(getattr(message, "version", 0)) > newest:
                found[place] = Problem(
                    "stale", f"Version {message.version} was never published; the newest is {newest}."
                )
            elif self.relay is not None and not isinstance(message, Problem):
                found[place] = self.relay.flaw(signed, message) or message
        return found

    def _flaw(self, signed: Signed) -> Problem | None:
        """What is wrong with an envelope, whatever it holds."""
        if signed.envelope.task != self.task.hash:
            return Problem("wrong-task", "The envelope names another task than the path.")
        if self.relay is None and signed.envelope.to != TO_SERVER:
            return Problem("wrong-recipient", "A check-in is addressed to the server alone.")
        if not (is_plausible(signed.statement.device) and is_plausible(signed.statement.dearest)):
            return Problem("wrong-message", "The statement names a loss that no device comes to.")
        return None

    def accept(self, batch: Sequence[Signed]) -> list[Answer]:
        """Validate, journal and apply a batch whose signatures are verified; an answer for each, durable."""
        if self.rounds is not None:
            return self.accept_rounds(batch, [False] * len(batch))
        found = self.validate(batch)
        answers: list[Any] = [each if isinstance(each, Problem) else None for each in found]
        places = [place for place, answer in enumerate(answers) if answer is None]
        while places:
            later: list[int] = []
            if self.fold.gathering is not None:
                places, later = self.closing.choose(batch, found, places, answers)
            self._take(batch, found, places, answers)
            if self.fold.gathering is not None:
                self.closing.close_full()
            places = later
        return answers

    def _take(self, batch: Sequence[Signed], found: list[Any], places: list[int], answers: list[Any]) -> None:
        """Journal and apply the check-ins at these places of the batch, and fill in their answers."""
        received = self.now()
        receipts: list[bytes] = []
        entries = self._append([JournalRow.of(batch[place], received) for place in places])
        fresh: list[Entry] = []
        for place, entry in zip(places, entries, strict=True):
            if isinstance(entry, Declined):
                answers[place] = problem_of(entry)
            elif entry.is_new:
                self.fold.apply(found[place], entry.device, entry.index)
                answers[place] = len(fresh)
                fresh.append(entry)
        if fresh:
            self._moved(fresh[-1])
            if self.fold.gathering is not None:
                self.closing.senders.update(entry.device for entry in fresh)
            receipts = sign_receipts(self.task.hash, fresh, self.key)
        for place, entry in zip(places, entries, strict=True):
            if isinstance(entry, Entry):
                answers[place] = (202, receipts[answers[place]]) if entry.is_new else (200, self.receipt(entry))

    def _moved(self, entry: Entry) -> None:
        """The journal ends here, and is applied up to here."""
        self.index, self.chain = entry.index, entry.chain
        self.offer = self._offer()

    def own_row(self, kind: str, body: bytes) -> JournalRow:
        """The next entry of the server's own, signed."""
        envelope = Envelope(self.task.hash, self.key.id, TO_SERVER, self.own + 1, kind, body)
        return JournalRow.of(open_signed(sign(envelope, NO_TOTALS, self.key)), self.now())

    def append_own(self, kind: str, body: bytes, take: Callable[[int], None], also: Any = None) -> None:
        """Journal an entry of the server's own; once it is durable, `take` applies it. `also` writes with it."""
        entry = self.store.append_own(self.task.hash, self.own_row(kind, body), also)
        take(entry.index)
        self._moved_by_own(entry)

    def _moved_by_own(self, entry: Entry) -> None:
        self.own += 1
        self.fold.pending.beside += 1
        self._moved(entry)

    def keep_look(self, rows: int, seen: Look) -> Look | None:
        """Keep a look at the operator's rows; one that is charged is an entry of the journal, in the same transaction.

        What to show of its version; None where the budget does not allow it.
        """
        own = Own(seen.version, tag=str(seen.loss), released={"look": np.asarray(seen.value)})
        row, entries = self.own_row(RELEASED, pack_own(RELEASED, own)), list[Entry]()

        def journal(connection: Any) -> None:
            entries.append(self.store.append_own_in(connection, self.task.hash, row))

        kept = add_look(self.store, self.task.hash, rows, seen, None if seen.loss is None else journal)
        for entry in entries:
            self._moved_by_own(entry)
        return kept

    def _append(self, rows: Sequence[JournalRow]) -> list[Entry | Declined]:
        return self.store.append(self.task.hash, rows) if self.relay is None else self.relay.post(rows)

    # --- a masked task ---

    def accept_rounds(self, batch: Sequence[Signed], posted: Sequence[bool]) -> list[Answer]:
        """`accept` for a masked task: check-ins are masked vectors, and a `posted` message gets its round's view.

        One transaction keeps all of it; then phases that are complete are closed, and then everybody is answered.
        """
        rounds = self.rounds
        assert rounds is not None
        answers: list[Any] = [self._flaw(signed) for signed in batch]
        self._refuse_fallen(batch, answers)
        active, said = rounds.active, list[RoundMessage]()
        vectors: dict[int, Masked] = {}
        reserved: set[tuple[int, str]] = set()
        for place, (signed, is_posted) in enumerate(zip(batch, posted, strict=True)):
            if answers[place] is not None:
                continue
            try:
                if is_posted:
                    active, kept = rounds.hear(active, signed)
                    said += [] if kept is None else [kept]
                    answers[place] = 200 if kept is None else 202
                    continue
                vector = rounds.check(signed)
                mine = (vector.round, signed.envelope.sender)
                if mine in reserved:
                    raise Problem("round-refused", "Another vector of this device came at the same time.")
                reserved.add(mine)
                vectors[place] = vector
            except Problem as problem:
                answers[place] = problem
        received = self.now()
        rows = [JournalRow.of(batch[place], received) for place in vectors]
        hashes = [(vector.round, hashlib.sha256(vector.body).digest()) for vector in vectors.values()]
        entries = self.store.take(self.task.hash, rows, hashes, said) if rows or said else []
        rounds.adopt(active)
        fresh: list[Entry] = []
        for (place, vector), entry in zip(vectors.items(), entries, strict=True):
            if isinstance(entry, Declined):
                answers[place] = problem_of(entry)
            elif entry.is_new:
                rounds.fold(entry.device, vector, entry.index, len(batch[place].data))
                fresh.append(entry)
        if fresh:
            self._moved(fresh[-1])
            receipts = dict(
                zip((each.index for each in fresh), sign_receipts(self.task.hash, fresh, self.key), strict=True)
            )
            for place, entry in zip(vectors, entries, strict=True):
                if isinstance(entry, Entry) and entry.is_new:
                    answers[place] = (202, receipts[entry.index])
        self.advance()
        for place, (signed, is_posted) in enumerate(zip(batch, posted, strict=True)):
            answer = answers[place]
            if isinstance(answer, int):
                answers[place] = self._told(answer, signed)
            elif not is_posted and (answer is None or isinstance(answer, Problem)):
                answers[place] = self.repeated(signed) or answer  # it is in the journal, though its round is over
        return answers

    def _refuse_fallen(self, batch: Sequence[Signed], answers: list[Any]) -> None:
        """Refuse an advert of a device whose totals fell: before it draws a second time."""
        adverts = [place for place, signed in enumerate(batch) if signed.envelope.kind == Advert.kind]
        if not adverts:
            return
        before = self.store.statements(self.task.hash, {batch[place].envelope.sender for place in adverts})
        for place in adverts:
            said = before.get(batch[place].envelope.sender)
            if answers[place] is None and said is not None and totals_fell(said, batch[place].said):
                answers[place] = Problem("totals-fell", "The device comes with smaller totals than its last check-in.")

    def _told(self, status: int, signed: Signed) -> Answer:
        assert self.rounds is not None
        try:
            return status, self.rounds.view(signed.envelope.sender, signed.envelope.seq).encode()
        except Problem as problem:
            return problem

    def advance(self) -> list[ServerRound]:
        """Close the phases that are complete or late. The rounds that are ready to be summed wait in `unsummed`."""
        if self.rounds is None:
            return []
        steps = self.task.stop.steps
        left = None if steps is None else steps - self.totals
        if self.fold.gathering is not None:
            left = self.closing.room  # one that is summed after the close would be too late
        self.unsummed += self.rounds.advance(left)
        return self.unsummed

    def finish(self, before: ServerRound, closed: ServerRound) -> bool:
        """Journal the total of a round, if it has one, and apply it; whether the task went on by it."""
        assert self.rounds is not None
        message: Any = None
        if closed.phase == masking.SUMMED:
            message = self._total(before, closed)
            if isinstance(message, Problem):
                self.rounds.abandon(before, "bound", message.detail)
                return False
            if self.fold.gathering is not None and (late := self.closing.flaw(message)) is not None:
                self.rounds.abandon(before, "late", late.detail)
                return False

        entry = self.rounds.finish(before, closed, lambda ended: self.own_row(message.kind, encode(message)))
        if entry is None:
            return False
        self.own += 1
        self.fold.apply(message, SERVER, entry.index)
        self._moved(entry)
        if self.fold.gathering is not None:
            self.closing.close_full()
        return True

    def _total(self, before: ServerRound, closed: ServerRound) -> Any:
        """What the protocol's server hears of a cohort, as the task says it; a Problem if it is not."""
        assert self.rounds is not None
        under, (_, hears) = self.rounds.active.get(before.round), self.fold.protocol.masked or (None, None)
        assert hears is not None
        version = 0 if under is None or under.publication is None else under.publication.version
        kind = str(hears.kind)  # pyright: ignore[reportAttributeAccessIssue]  every message has one
        fields = self.fold.expected[kind]
        sums = {
            tag: found.astype(fields[tag].dtype).reshape(fields[tag].shape)
            for tag, found in masking.sums(self.rounds.terms, closed).items()
        }
        said = total(kind, sums, devices=len(before.masked), version=version)
        try:
            return self.fold.read(kind, encode(said))
        except Problem as problem:
            return problem

    def take_unsummed(self) -> list[ServerRound]:
        """The rounds to be summed up; who takes them finishes each."""
        waiting, self.unsummed = self.unsummed, []
        return waiting

    @property
    def is_due(self) -> bool:
        """Whether a snapshot should be taken, once the answers are given: nobody waits for it."""
        moved = self.index - self.snapshot_at
        return moved >= self.snapshot_every or (moved > 0 and self.reason is not None)

    def repeated(self, signed: Signed) -> Answer | None:
        """The first answer to a check-in that is in the journal already; None of any other."""
        entry = self.store.entry(self.task.hash, signed.envelope.sender, signed.envelope.seq)
        return (200, self.receipt(entry)) if entry is not None and entry.hash == signed.hash else None

    def receipt(self, entry: Entry) -> bytes:
        """The receipt that was given when the entry was made: of the same commit, so with the same path."""
        together, place = self.store.together(self.task.hash, entry.index)
        return sign_receipts(self.task.hash, together, self.key)[place]

    def take_snapshot(self) -> None:
        """Keep the state, so that a restart is quick; bodies behind the snapshot before this one are reduced."""
        if self.index == self.snapshot_at:
            return
        if self.rounds is not None:
            self.rounds.keep_sums()  # first: a body that is reduced must be in a sum that is kept
        before, self.snapshot_at = self.snapshot_at, self.index
        offer, rule = self.offer, None if self.fold.rule is None else self.fold.rule.plain()
        pending, open_ = self.fold.pending.pack(), list(self.fold.pending.open)
        offered = pack([offer.version, offer.kind, offer.body, rule, *([] if pending is None else [pending])])
        spare, self._open_before = {*self._open_before, *open_}, open_
        self.store.snapshot(self.task.hash, self.index, self.chain, pack_state(self.fold.state), offered, spare)
        self.store.publish(self.task.hash, self._published())
        if before:
            self._reduced = self.store.reduce(self.task.hash, before, self._reduced).index


TO_SERVER = frozenset((SERVER,))
NO_TOTALS = Statement((), 0, ())
"""The server has no samples."""


def masked_terms(task: Task, protocol: Protocol) -> Terms:
    """The terms of a masked task, if vectors of that size can be sent."""
    terms = terms_of(task, protocol.mechanisms(task))
    check_masked(task, terms)
    return terms


def problem_of(refused: Declined) -> Problem:
    """Why the journal did not take a check-in, as it travels."""
    if refused.reason == "other-bytes":
        return Problem(
            "seq-conflict", f"Seq {refused.seq} was acknowledged with other bytes.", expected=refused.expected
        )
    if refused.reason == "gap":
        return Problem("seq-gap", f"Seq {refused.seq} came before {refused.expected}.", expected=refused.expected)
    if refused.reason == "fell":
        return Problem("totals-fell", f"Seq {refused.seq} comes with smaller totals than the check-in before it.")
    slug = {"unknown": "unknown-device", "revoked": "revoked", "withdrawn": "withdrawn"}[refused.reason]
    return Problem(slug, f"Device {refused.device} is not, or no longer, enrolled here.")
