"""The places of a task and the letters between them: the server relays what devices say to their peers, as it is.

A device claims one place of the task's public list. Its check-ins are addressed to the places that the task says, and
to nobody else; each is journalled and counted as ever, and kept as a letter for who stands there. The server adds
nothing to a letter, and nobody has to believe it: who reads one checks the sender's key, id and signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crowdml.messages import SERVER, Address
from crowdml.protocol import Protocol, address_of
from crowdml.storage.server import Claim, Declined, Entry, JournalRow, Standing, Store
from crowdml.task import Task
from crowdml.wire.envelopes import Signed
from crowdml.wire.letters import Mailbox, few
from crowdml.wire.problems import Problem

__all__ = ["PlaceFigures", "Relay", "relay_of"]

TO_SERVER = frozenset((SERVER,))


@dataclass(frozen=True)
class PlaceFigures:
    """A place as the portal shows it: how much was said there, and when last. Nothing of what was said."""

    place: int
    name: str
    lat: float
    lon: float
    is_held: bool
    letters: int
    bytes: int
    last_at: str | None


class Relay:
    """The relay of one task. Changed in the server's writing thread; read anywhere."""

    def __init__(self, store: Store, task: Task, peers: Sequence[tuple[int, ...]], keep: int, head: int) -> None:
        self.store, self.task, self.keep = store, task, keep
        self.peers = tuple(peers) or ((),) * len(task.places)
        self._to = tuple(frozenset(map(address_of, others)) or TO_SERVER for others in self.peers)
        found = store.standings(task.hash)
        self.places: dict[str, int] = {each.device: each.place for each in found if each.device is not None}
        """Where each device stands."""
        self._newest = {each.place: each.newest for each in found}
        self.head = head
        """Entries of the journal whose letters can be read."""
        self.handed = 0
        """Bytes of letters that were read since the server started."""

    @property
    def most_recipients(self) -> int:
        return max(map(len, self._to))

    # --- in the writing thread ---

    def claim(self, place: int, device: str) -> bool:
        """Let a device stand at a place, durably; whether that is new."""
        if not 0 <= place < len(self.task.places):
            raise Problem("not-found", f"The task lists {len(self.task.places)} places, from 0.")
        became: Claim = self.store.claim(self.task.hash, place, device)
        if became == "unknown":
            raise Problem("unknown-device", f"Device {device} is not, or no longer, enrolled here.")
        if became == "taken":
            raise Problem("place-taken", f"Another device stands at place {place}.")
        if became == "elsewhere":
            held = self.places.get(device)
            raise Problem("place-held", f"This device stands at place {held} already.", held=held)
        self.places = {name: at for name, at in self.places.items() if at != place} | {device: place}
        return became == "new"

    def flaw(self, signed: Signed, message: Any) -> Problem | None:
        """What is wrong with where a check-in says that it comes from, and to whom it goes."""
        held = self.places.get(signed.envelope.sender)
        if held is None:
            return Problem("wrong-place", "The sender holds no place of this task. Claim one first.")
        if int(message.place) != held:
            return Problem(
                "wrong-place", f"The message is from place {int(message.place)}, and its sender stands at {held}."
            )
        if signed.envelope.to != self._to[held]:
            return Problem(
                "wrong-recipient", f"From place {held} one writes to {_shown(self._to[held])}, to all of them."
            )
        return None

    def post(self, rows: Sequence[JournalRow]) -> list[Entry | Declined]:
        """Journal check-ins that have no flaw, and keep them as letters: one transaction."""
        places = [self.places[row.device] for row in rows]
        entries = self.store.post(self.task.hash, rows, places, self.keep if self.has_peers else 0)
        for entry, place in zip(entries, places, strict=True):
            if isinstance(entry, Entry) and entry.is_new:
                self._newest[place] = entry.index
                self.head = entry.index  # after `_newest`: who reads that this is there finds it
        return entries

    # --- anywhere ---

    @property
    def has_peers(self) -> bool:
        return any(self.peers)

    def place_of(self, device: str) -> int:
        place = self.places.get(device)
        if place is None:
            raise Problem("no-place", f"Device {device} holds no place of this task.")
        return place

    def is_empty(self, place: int, after: int) -> bool:
        """Whether nothing was written to this place after that entry: known without the store."""
        return all(self._newest.get(other, 0) <= after for other in self.peers[place])

    def read(self, place: int, after: int) -> Mailbox:
        """What was written to who stands here after that entry of the journal, as much as goes into an answer."""
        head = self.head
        if self.is_empty(place, after):
            return Mailbox(head)
        found = self.store.letters(self.task.hash, self.peers[place], after, head)
        letters = few(found)
        self.handed += sum(len(letter.signed) for letter in letters)
        return Mailbox(letters[-1].index if len(letters) < len(found) else head, letters)

    def figures(self) -> list[PlaceFigures]:
        """Every place of the task, in the order of its list."""
        said: dict[int, Standing] = {each.place: each for each in self.store.standings(self.task.hash)}
        nobody = Standing(0, None, 0, 0, None, 0)
        return [
            PlaceFigures(
                number,
                where.name,
                float(where.lat),
                float(where.lon),
                here.device is not None,
                here.letters,
                here.bytes,
                here.last_at,
            )
            for number, where in enumerate(self.task.places)
            for here in (said.get(number, nobody),)
        ]


def relay_of(store: Store, task: Task, protocol: Protocol, head: int) -> Relay | None:
    """The relay of a task whose check-ins say where they come from; None of any other."""
    if protocol.peers is None or not task.places or task.masking is not None:
        return None
    return Relay(store, task, protocol.peers(task), protocol.keeps(task), head)


def _shown(to: frozenset[Address]) -> str:
    names = sorted(to)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
