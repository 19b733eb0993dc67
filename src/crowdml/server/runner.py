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
from crowdml.protocol import Context, Protocol, Publish, Step, Stop, advance
from crowdml.protocols import find, refusal
from crowdml.secagg import server as masking
from crowdml.secagg.messages import Advert, Masked
from crowdml.secagg.server import ServerRound
from crowdml.secagg.terms import Terms, terms_of
from crowdml.server.relay import relay_of
from crowdml.server.rounds import Rounds
from crowdml.server.sizes import check_masked
from crowdml.storage.server import Entry, JournalRow, Publication, Refused, RoundMessage, RoundRow, Snapshot, Store
from crowdml.task import Task, from_canonical
from crowdml.wire.envelopes import Signed, open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import chain_next, chain_start, sign_receipts
from crowdml.wire.statements import Statement, is_plausible, totals_fell
from crowdml.wire.states import pack_state, unpack_state
from crowdml.wire.validate import decode_message, decode_messages

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


class Fold:
    """A task's state: the protocol's server handlers over check-ins, in order. No clock, no noise, no store."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.protocol = find(task)
        self.expected = self.protocol.expected(task)
        step = self.protocol.server.start(task, Context(me=SERVER))
        self.state: Any = step.state
        self.message = published(step)
        self.reason: str | None = None
        """Why the task stopped by its own rule; None while it goes on."""

    def resume(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot."""
        self.state = unpack_state(self.state, snapshot.state)
        self.message = None
        *_, self.reason = msgpack.unpackb(snapshot.published)

    def read(self, kind: str, body: bytes) -> Any:
        """The message behind the bytes, if this task hears it and it is as the task says."""
        return decode_message(kind, body, self.expected)

    def read_many(self, bodies: Sequence[tuple[str, bytes]]) -> list[Any]:
        """The message behind each kind and body, or the Problem with it."""
        return decode_messages(bodies, self.expected)

    def apply(self, message: Any, sender: str) -> None:
        step = advance(self.protocol.server, self.task, self.state, message, Context(me=SERVER, sender=sender))
        self.state = step.state
        self.message = published(step) or self.message
        for effect in step.effects:
            if isinstance(effect, Stop) and (effect.when is None or bool(effect.when)):
                self.reason = effect.reason

    @property
    def weights(self) -> Any:
        """The model as it stands."""
        return np.asarray(self.protocol.model(self.task, self.state))


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
    ) -> None:
        self.store, self.key, self.now, self.snapshot_every = store, key, now, snapshot_every
        self.task: Task = from_canonical(canonical)
        if self.task.as_published:
            raise TaskError(f"task {self.task.name!r} runs as published: that is for the simulator alone.")
        self.fold = Fold(self.task)
        self.refusal = refusal(self.task)
        """Why devices may not take part, of a task that an earlier version accepted: it has ended, and can be read."""
        self.index, self.chain = 0, chain_start(self.task.hash)
        self.offer = self._offer()
        self._reduced = 0
        """Up to where this process has reduced; at first it goes through all, for another may have been killed."""
        self.totals = 0
        """Cohorts that were added up: the server's own entries."""
        self.unsummed: list[ServerRound] = []
        """Rounds whose shares are all here: to be summed up, which may take seconds, and finished."""
        self.is_masked = self.task.masking is not None and self.fold.protocol.masked is not None
        self._catch_up()
        self.rounds = self._make_rounds(clock) if self.is_masked else None
        self.relay = relay_of(store, self.task, self.fold.protocol, self.index)

    def _make_rounds(self, clock: Callable[[], float]) -> Rounds:
        assert self.task.masking is not None
        terms = masked_terms(self.task, self.fold.protocol)
        return Rounds(
            self.store, self.task.hash, self.task.masking, terms, offer=self._published, now=self.now, clock=clock
        )

    def _published(self) -> Publication:
        return Publication(self.offer.version, self.offer.kind, self.offer.body)

    @property
    def reason(self) -> str | None:
        """Why the task has ended: by its own rule, or because devices may not take part in it. None: it has not."""
        return self.fold.reason or (None if self.refusal is None else self.refusal.reason)

    @property
    def check_ins(self) -> int:
        """What devices gave: the journal without the server's own entries."""
        return self.index - self.totals

    def _catch_up(self) -> None:
        """The state from the last snapshot and every body since. No noise is drawn; the bits are those of before."""
        hash_ = self.task.hash
        snapshot = self.store.last_snapshot(hash_)
        if snapshot is not None:
            self.fold.resume(snapshot)
            self.index, self.chain = snapshot.index, snapshot.chain
            version, kind, body, _ = msgpack.unpackb(snapshot.published)
            self.offer = Offer(version, kind, body, self.index, self.chain)
        self.snapshot_at = self.index
        if self.is_masked:
            self._catch_up_totals()
            return
        for index, data in self.store.tail(hash_, self.index):
            signed = open_signed(data)
            envelope = signed.envelope
            self.fold.apply(self.fold.read(envelope.kind, envelope.body), envelope.sender)
            self.index = index
            self.chain = chain_next(self.chain, hash_, envelope.sender, envelope.seq, signed.hash)
        if self.index > self.snapshot_at:
            self.offer = self._offer()

    def _catch_up_totals(self) -> None:
        """The same of a masked task: bodies of masked check-ins may be gone, and nothing is folded over them."""
        for _, data in self.store.totals(self.task.hash, self.index):
            envelope = open_signed(data).envelope
            self.fold.apply(self.fold.read(envelope.kind, envelope.body), SERVER)
        head = self.store.head(self.task.hash)
        self.index, self.chain = head.index, head.chain
        self.totals = self.store.totals_count(self.task.hash)
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
        received = self.now()
        receipts: list[bytes] = []
        entries = self._append([JournalRow.of(batch[place], received) for place in places])
        fresh: list[Entry] = []
        for place, entry in zip(places, entries, strict=True):
            if isinstance(entry, Refused):
                answers[place] = problem_of(entry)
            elif entry.is_new:
                self.fold.apply(found[place], entry.device)
                answers[place] = len(fresh)
                fresh.append(entry)
        if fresh:
            self.index, self.chain = fresh[-1].index, fresh[-1].chain
            self.offer = self._offer()
            receipts = sign_receipts(self.task.hash, fresh, self.key)
        for place, entry in zip(places, entries, strict=True):
            if isinstance(entry, Entry):
                answers[place] = (202, receipts[answers[place]]) if entry.is_new else (200, self.receipt(entry))
        return answers

    def _append(self, rows: Sequence[JournalRow]) -> list[Entry | Refused]:
        return self.store.append(self.task.hash, rows) if self.relay is None else self.relay.post(rows)

    # --- a masked task ---

    def accept_rounds(self, batch: Sequence[Signed], posted: Sequence[bool]) -> list[Answer]:
        """The same for a masked task: check-ins are masked vectors, and what was `posted` to a round is told its view.

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
            if isinstance(entry, Refused):
                answers[place] = problem_of(entry)
            elif entry.is_new:
                rounds.fold(entry.device, vector, entry.index, len(batch[place].data))
                fresh.append(entry)
        if fresh:
            self.index, self.chain = fresh[-1].index, fresh[-1].chain
            self.offer = self._offer()
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
        self.unsummed += self.rounds.advance(None if steps is None else steps - self.totals)
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

        def row(ended: RoundRow) -> JournalRow:
            envelope = Envelope(
                self.task.hash, self.key.id, TO_SERVER, self.totals + 1, message.kind, encode(message)
            )  # fmt: skip
            return JournalRow.of(open_signed(sign(envelope, NO_TOTALS, self.key)), self.now())

        entry = self.rounds.finish(before, closed, row)
        if entry is None:
            return False
        self.totals += 1
        self.index, self.chain = entry.index, entry.chain
        self.fold.apply(message, SERVER)
        self.offer = self._offer()
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
        offer = self.offer
        offered = pack([offer.version, offer.kind, offer.body, self.fold.reason])
        self.store.snapshot(self.task.hash, self.index, self.chain, pack_state(self.fold.state), offered)
        self.store.publish(self.task.hash, Publication(offer.version, offer.kind, offer.body))
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


def problem_of(refused: Refused) -> Problem:
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


def published(step: Step[Any]) -> Any:
    for effect in step.effects:
        if isinstance(effect, Publish) and (effect.when is None or bool(effect.when)):
            return effect.message
    return None
