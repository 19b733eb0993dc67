"""A task on the server: its state is a fold of the protocol's handlers over the journal.

Verify, validate, journal, apply, answer. A whole batch is journalled in one transaction before any of it is applied, so
an acknowledged check-in is durable, and a restart that folds the journal from the last snapshot ends in the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from crowdml.errors import TaskError
from crowdml.messages import SERVER, encode
from crowdml.protocol import Context, Publish, Step, Stop, advance
from crowdml.protocols import find
from crowdml.storage.server import Entry, JournalRow, Publication, Refused, Store
from crowdml.task import Task, from_canonical
from crowdml.wire.envelopes import Signed, open_signed
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem
from crowdml.wire.receipts import Receipt
from crowdml.wire.validate import decode_message

SNAPSHOT_EVERY = 2_000
"""Check-ins between snapshots: what a restart has to fold again."""

Answer = tuple[int, bytes] | Problem
"""A status (202 new, 200 already here) with the receipt's bytes, or why it was refused."""


@dataclass(frozen=True)
class Offer:
    """What a check-out is answered with."""

    version: int
    kind: str
    body: bytes


class TaskRunner:
    """One task. Everything here runs in the server's one writing thread."""

    def __init__(self, store: Store, canonical: bytes, key: Key, now: Callable[[], str]) -> None:
        self.store, self.key, self.now = store, key, now
        self.task: Task = from_canonical(canonical)
        if self.task.as_published:
            raise TaskError(f"task {self.task.name!r} runs as published: that is for the simulator alone.")
        self.protocol = find(self.task)
        self.expected = self.protocol.expected(self.task)
        self.reason: str | None = None
        self._fold()

    def _fold(self) -> None:
        """The state from the last snapshot and every body since. No noise is drawn; the bits are those of before."""
        step = self.protocol.server.start(self.task, Context(me=SERVER))
        self.state, message = step.state, published(step)
        hash_ = self.task.hash
        snapshot = self.store.last_snapshot(hash_)
        self.index = self.snapshot_at = 0
        if snapshot is not None:
            self.state = unpack_state(self.state, snapshot.state)
            self.index = self.snapshot_at = snapshot.index
            self.offer = Offer(*msgpack.unpackb(snapshot.published))
        else:
            self.offer = offer_of(message)
        for index, data in self.store.tail(hash_, self.index):
            signed = open_signed(data)
            step = self._advance(decode_message(signed.envelope.kind, signed.envelope.body, self.expected), signed)
            self.index = index
            self._publish(step)

    def _advance(self, message: Any, signed: Signed) -> Step[Any]:
        ctx = Context(me=SERVER, sender=signed.envelope.sender)
        step = advance(self.protocol.server, self.task, self.state, message, ctx)
        self.state = step.state
        for effect in step.effects:
            if isinstance(effect, Stop) and (effect.when is None or bool(effect.when)):
                self.reason = effect.reason
        return step

    def _publish(self, step: Step[Any]) -> None:
        message = published(step)
        if message is not None:
            self.offer = offer_of(message)

    def validate(self, signed: Signed) -> Any:
        """The message inside, if this task hears it and it is as the task says."""
        envelope = signed.envelope
        if envelope.task != self.task.hash:
            raise Problem("wrong-task", "The envelope names another task than the path.")
        if envelope.to != frozenset((SERVER,)):
            raise Problem("wrong-recipient", "A check-in is addressed to the server alone.")
        message = decode_message(envelope.kind, envelope.body, self.expected)
        if int(getattr(message, "version", 0)) > self.offer.version:
            raise Problem(
                "stale", f"Version {message.version} was never published; the newest is {self.offer.version}."
            )
        return message

    def accept(self, batch: Sequence[Signed]) -> list[Answer]:
        """Validate, journal and apply a batch whose signatures are verified; an answer for each, durable."""
        answers: list[Answer | None] = [None] * len(batch)
        messages: dict[int, Any] = {}
        for place, signed in enumerate(batch):
            try:
                messages[place] = self.validate(signed)
            except Problem as problem:
                answers[place] = problem
        received = self.now()
        places = list(messages)
        entries = self.store.append(self.task.hash, [JournalRow.of(batch[place], received) for place in places])
        last: Step[Any] | None = None
        for place, entry in zip(places, entries, strict=True):
            if isinstance(entry, Refused):
                answers[place] = refusal(entry)
                continue
            if entry.is_new:
                last = self._advance(messages[place], batch[place])
                self.index = entry.index
            answers[place] = (202 if entry.is_new else 200, self.receipt(entry))
        if last is not None:
            self._publish(last)
            if self.index - self.snapshot_at >= SNAPSHOT_EVERY or self.reason is not None:
                self.take_snapshot()
        return [answer for answer in answers if answer is not None]

    def receipt(self, entry: Entry) -> bytes:
        receipt = Receipt(self.task.hash, entry.device, entry.seq, entry.index, entry.hash, entry.chain)
        return receipt.sign(self.key).encode()

    def take_snapshot(self) -> None:
        """Keep the state, so that a restart is quick; bodies behind the snapshot before this one are reduced."""
        if self.index == self.snapshot_at:
            return
        head = self.store.head(self.task.hash)
        before, self.snapshot_at = self.snapshot_at, head.index
        offered = pack([self.offer.version, self.offer.kind, self.offer.body])
        self.store.snapshot(self.task.hash, head.index, head.chain, pack_state(self.state), offered)
        self.store.publish(self.task.hash, Publication(self.offer.version, self.offer.kind, self.offer.body))
        if before:
            self.store.reduce(self.task.hash, before)


def refusal(refused: Refused) -> Problem:
    """Why the journal did not take a check-in, as it travels."""
    if refused.reason == "other-bytes":
        return Problem(
            "seq-conflict", f"Seq {refused.seq} was acknowledged with other bytes.", expected=refused.expected
        )
    if refused.reason == "gap":
        return Problem("seq-gap", f"Seq {refused.seq} came before {refused.expected}.", expected=refused.expected)
    slug = {"unknown": "unknown-device", "revoked": "revoked", "withdrawn": "withdrawn"}[refused.reason]
    return Problem(slug, f"Device {refused.device} is not, or no longer, enrolled here.")


def published(step: Step[Any]) -> Any:
    for effect in step.effects:
        if isinstance(effect, Publish) and (effect.when is None or bool(effect.when)):
            return effect.message
    return None


def offer_of(message: Any) -> Offer:
    return Offer(int(message.version), message.kind, encode(message))


def pack_state(state: Any) -> bytes:
    """A role's state as bytes: the same codec as messages."""
    return encode(state)


def unpack_state(like: Any, data: bytes) -> Any:
    """The state behind the bytes, in the types and shapes of `like`."""
    fields = msgpack.unpackb(data)
    found: dict[str, Any] = {}
    for entry in dataclasses.fields(like):
        model = np.asarray(getattr(like, entry.name))
        plain = fields[entry.name]
        array = np.frombuffer(plain[2], np.dtype(plain[0])) if isinstance(plain, list) else np.asarray(plain)
        value = array.astype(model.dtype).reshape(model.shape)
        found[entry.name] = value if model.ndim else value[()]
    return type(like)(**found)
