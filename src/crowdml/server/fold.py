"""A task's state on the server: a fold of the protocol's handlers over the journal. No clock, no noise, no database."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from crowdml.arrays import Integers, Samples
from crowdml.errors import ProtocolError
from crowdml.messages import SERVER
from crowdml.privacy.door import Door, Recorded
from crowdml.privacy.private import Private, Unseen
from crowdml.protocol import Gathered, Rule, Woken
from crowdml.protocols import find, gathering_of
from crowdml.server.gathering import CLOSED, OWN, WOKEN, Bodies, Journalled, Pending, read_own
from crowdml.storage.server import Snapshot, Store
from crowdml.task import Task
from crowdml.turn import Outcome, first_turn, server_turn
from crowdml.wire.envelopes import open_signed
from crowdml.wire.states import unpack_state
from crowdml.wire.validate import decode_message, decode_messages

__all__ = ["Fold", "uploads_in"]


def uploads_in(store: Store, task: bytes) -> Bodies:
    """Reads uploads of a task from its journal."""

    def read(places: Sequence[int]) -> Iterator[tuple[str, bytes]]:
        for data in store.bodies_at(task, places):
            envelope = open_signed(data).envelope
            yield envelope.kind, envelope.body

    return read


class Fold:
    """The protocol's server handlers over the entries of a journal, in order. `bodies` reads the uploads of a round."""

    def __init__(self, task: Task, bodies: Bodies | None = None) -> None:
        self.task, self.bodies = task, bodies
        self.protocol = find(task)
        self.expected = self.protocol.expected(task)
        self.gathering = gathering_of(task)
        self.pending = Pending()
        self.state: Any = None
        self.message: Any = None
        """What was published since the start or the snapshot; None: nothing."""
        self.version = 0
        self.rule: Rule | None = None
        """Why the task stopped by its own rule; None while it goes on."""
        self.scored: tuple[int, Integers] | None = None
        """The last round whose uploads were rated on public rows, and their scores in grid steps, since the start."""
        self.take(first_turn(self.protocol, task), 0)

    def resume(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot."""
        self.state = unpack_state(self.state, snapshot.state)
        self.message = None
        self.version, _, _, rule, *more = msgpack.unpackb(snapshot.published)
        self.rule, self.pending = Rule.read(rule), Pending.read(more[0] if more else None)

    def read(self, kind: str, body: bytes) -> Any:
        """The message behind the bytes, if this task hears it and it is as the task says."""
        return decode_message(kind, body, self.expected)

    def read_many(self, bodies: Sequence[tuple[str, bytes]]) -> list[Any]:
        """The message behind each kind and body, or the Problem with it."""
        return decode_messages(bodies, self.expected)

    # --- one entry after another ---

    def hear(self, index: int, kind: str, body: bytes, sender: str) -> None:
        """Go on by an entry of the journal, whoever wrote it. Nothing is drawn."""
        if kind not in OWN:
            self.apply(self.read(kind, body), sender, index)
            return
        own = read_own(kind, body)
        self.pending.beside += 1
        if kind == CLOSED:
            if (own.number, list(own.entries)) != (self.version, self.pending.open):
                raise ProtocolError(
                    f"entry {index} closes round {own.number} with {len(own.entries)} uploads, and round "
                    f"{self.version} is open with {len(self.pending.open)}: this is not the journal of this task."
                )
            self.take_closed(self.closed(Recorded(own.released or {}), Unseen()), index)
            self.note_scores(own.number, own.released or {})
        elif kind == WOKEN:
            self.take_woken(self.woken(own.tag, Recorded(own.released or {}), Unseen()), index, own.tag)

    def apply(self, message: Any, sender: str, index: int = 0) -> None:
        """Hear a check-in or a cohort's total, at this place of the journal. A gathered one waits for its round."""
        if self.gathering is None:
            self.take(server_turn(self.protocol, self.task, self.state, message, sender=sender), index)
        else:
            self.pending.open.append(index)

    def closed(self, door: Door | Recorded | None, rows: Private[Samples] | None) -> Outcome:
        """What it leads to that the open round closes here. Nothing is changed: see `take_closed`."""
        assert self.bodies is not None, "who folds a gathered task says where its uploads are"
        uploads = Journalled(tuple(self.pending.open), self.bodies, self.read_many)
        turn = self._turn(Gathered(self.version, uploads), door, rows)
        newer = None if turn.published is None else int(turn.published.version)
        if turn.stopped is None and (newer is None or newer <= self.version):
            raise ProtocolError(
                f"protocol {self.protocol.name!r} closed round {self.version} and published "
                f"{'nothing' if newer is None else f'version {newer}'}: devices wait for a later version, so every "
                "close publishes one."
            )
        return turn

    def take_closed(self, turn: Outcome, index: int) -> None:
        """The round was closed by this entry, and the next one is open."""
        self.pending.open, self.pending.opened = [], index
        self.take(turn, index)

    def note_scores(self, number: int, released: Mapping[str, Integers]) -> None:
        """Keep the scores of a round for its operator. What private rows come to is a choice, and has no scores."""
        row = self.protocol.server_mechanisms(self.task).get("scores")
        if row is not None and row.public and "scores" in released:
            self.scored = number, released["scores"]

    def woken(self, tag: str, door: Door | Recorded | None, rows: Private[Samples] | None) -> Outcome:
        """What it leads to that this timer ran out. Nothing is changed: see `take_woken`."""
        turn = self._turn(Woken(tag), door, rows)
        if self.gathering is not None and turn.published is not None:
            raise ProtocolError(
                f"protocol {self.protocol.name!r} publishes when a timer runs out, while round {self.version} is open: "
                "its uploads would answer a version that is gone. A gathered task publishes when a round closes."
            )
        return turn

    def take_woken(self, turn: Outcome, index: int, tag: str) -> None:
        """The timer ran out with this entry."""
        self.pending.wakes.pop(tag, None)
        self.take(turn, index)

    def _turn(self, event: Any, door: Door | Recorded | None, rows: Private[Samples] | None) -> Outcome:
        return server_turn(self.protocol, self.task, self.state, event, sender=SERVER, door=door, rows=rows)

    def take(self, turn: Outcome, index: int) -> None:
        """Take over what an entry led to."""
        self.state, published = turn.state, turn.published
        if published is not None:
            self.message, self.version = published, int(published.version)
        self.rule = turn.stopped or self.rule
        for wake in turn.wakes:
            self.pending.wakes[wake.tag] = index, float(wake.after)

    # --- how it stands ---

    @property
    def reason(self) -> str | None:
        """Why the task stopped by its own rule, as a sentence; None while it goes on."""
        return None if self.rule is None else self.rule.sentence

    @property
    def weights(self) -> Any:
        """The model as it stands."""
        return np.asarray(self.protocol.model(self.task, self.state))
