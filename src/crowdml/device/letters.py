"""What a device hears of its peers: letters that its server relays, or that peers bring themselves; whom it believes.

Nobody who carries a letter is believed. It is heard if the key that came with it is that of the sender's id and signed
these bytes; if it is of this task and written to where this device stands; if the place that it says it is from is one
whose words this device hears; if the same key spoke from there before, or nobody did; and if what it says has the type,
the shape and the range that the task gives it. Any other is left aside and counted, for the owner alone, and nothing
else changes: not the state, not who is believed, and not what comes after it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from typing import Any, Literal

from crowdml.messages import Address
from crowdml.protocol import Protocol, address_of
from crowdml.records import record
from crowdml.task import Task
from crowdml.turn import letter_turn
from crowdml.wire.envelopes import LARGEST_AROUND, LONGEST_ADDRESS, MOST_RECIPIENTS, Signed
from crowdml.wire.keys import device_id
from crowdml.wire.letters import Letter
from crowdml.wire.problems import Problem
from crowdml.wire.validate import decode_message, largest_body

Flaw = Literal["malformed", "forged", "other-task", "not-for-us", "stranger", "other-key", "contents"]
Arrival = Literal["taken", "again", "full", "unknown", "refused"]
"""What becomes of a letter that its sender brings itself."""
SENTENCES: Mapping[Flaw, str] = {
    "malformed": "it is no signed envelope",
    "forged": "its sender did not sign it",
    "other-task": "it is of another task",
    "not-for-us": "it is not written to where this device stands",
    "stranger": "it is from a place that this device does not hear",
    "other-key": "another device spoke from that place before",
    "contents": "it does not say what the task has its devices say",
}
REMEMBERED = 128
"""How many of a place's last letters are told from those already heard; an older letter is not heard."""
TRUSTED_FOR = 3600.0
"""Seconds for which the server's word on who stands where is enough to hear a peer that brings its letters itself."""
MOST_WAITING = 32
"""Letters of one place that were brought and that no turn has heard yet: more are not taken."""


@record
class HeardNumbers:
    """Which numbers of one sender were heard: the newest, and a bit for each of the `wide` up to it, its own lowest."""

    newest: int = 0
    bits: int = 0

    def has(self, number: int, wide: int) -> bool:
        """Whether it was heard, or is too old to tell."""
        behind = self.newest - number
        return behind >= wide or (behind >= 0 and bool(self.bits >> behind & 1))

    def add(self, number: int, wide: int) -> HeardNumbers:
        ahead = number - self.newest
        if ahead <= 0:
            return HeardNumbers(self.newest, self.bits | 1 << -ahead)
        return HeardNumbers(number, ((self.bits << ahead) & ((1 << wide) - 1) | 1) if ahead < wide else 1)

    @property
    def packed(self) -> bytes:
        return self.bits.to_bytes((self.bits.bit_length() + 7) // 8)

    @classmethod
    def of(cls, newest: int, packed: bytes) -> HeardNumbers:
        return cls(newest, int.from_bytes(packed))


@record
class Post:
    """What became of all letters so far. It is on disk beside the state, and written with it."""

    after: int = 0
    """The entry of the server's journal up to which its mailbox was read."""
    heard: int = 0
    size: int = 0
    """Bytes of those that were heard."""
    refused: Mapping[str, int] = field(default_factory=dict)
    keys: Mapping[int, bytes] = field(default_factory=dict)
    """The first key that was heard from each place: from then on no other is believed there."""
    marks: Mapping[int, HeardNumbers] = field(default_factory=dict)
    """Which letters of each place were heard: one that comes on two ways is heard once, restarts or not."""

    def plain(self) -> dict[str, Any]:
        keys = [[place, key] for place, key in sorted(self.keys.items())]
        refused = [[why, times] for why, times in sorted(self.refused.items())]
        marks = [[place, mark.newest, mark.packed] for place, mark in sorted(self.marks.items())]
        counts = {"after": self.after, "heard": self.heard, "size": self.size}
        return {**counts, "keys": keys, "marks": marks, "refused": refused}

    @classmethod
    def of(cls, plain: Mapping[str, Any] | None) -> Post:
        if plain is None:
            return cls()
        marks = {place: HeardNumbers.of(newest, packed) for place, newest, packed in plain["marks"]}
        return cls(plain["after"], plain["heard"], plain["size"], dict(plain["refused"]), dict(plain["keys"]), marks)


class _Refused(Exception):  # noqa: N818  # a signal inside this module
    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw)
        self.flaw: Flaw = flaw


class Correspondence:
    """One device's letters of one task: which of them reach its handlers."""

    def __init__(
        self, task: Task, protocol: Protocol, me: Address, place: int, post: Post, now: Callable[[], float] = time.time
    ) -> None:
        self.task, self.protocol, self.me, self.place, self.post, self.now = task, protocol, me, place, post, now
        self.peers = frozenset(() if protocol.peers is None else protocol.peers(task)[place])
        self.arrived: Callable[[], None] = lambda: None
        """Called when a peer brought a letter that is believed, the first since the last `take`."""
        self.listens = False
        """Whether peers may bring letters themselves: then the server is asked who stands at their places."""
        self._held: tuple[float, Mapping[int, str]] = (-math.inf, {})
        """When the server last said who stands at the places of peers, and who does."""
        self._brought: dict[bytes, tuple[int, Letter]] = {}
        """By hash, with the place that each is from: no turn has heard them yet."""
        self._here = address_of(place)
        self._expected = protocol.expected(task)
        self._wide = max(REMEMBERED, protocol.keeps(task))

    @property
    def largest(self) -> int:
        """Bytes of the longest letter that could be believed."""
        return LARGEST_AROUND + MOST_RECIPIENTS * (LONGEST_ADDRESS + 2) + largest_body(self._expected)

    def stand(self, held: Mapping[int, str]) -> None:
        """The server says now who stands at the places of peers: by place, the id of the device."""
        self._held = (self.now(), held)

    def _stands(self, place: int, sender: Address) -> bool:
        """Whether the server said within the last hour that this device stands there: it has not been revoked since.

        The answer can only keep letters out, which the server could do in any case: nobody is believed for it.
        """
        at, held = self._held
        return 0 <= self.now() - at <= TRUSTED_FOR and held.get(place) == sender

    def bring(self, letter: Letter) -> Arrival:
        """A peer brought this letter itself: keep it for the next turn, if the relay has introduced its sender's key
        and the server still says that it stands there.

        Anybody on a network could be the first to speak from a place; the server asks for an invitation, and knows who
        was revoked.
        """
        try:
            signed, message = self._believed(letter)
        except _Refused:
            return "refused"
        place, digest = int(message.place), hashlib.sha256(letter.signed).digest()
        if place not in self.post.keys or not self._stands(place, signed.envelope.sender):
            return "unknown"
        if digest in self._brought or self._was_heard(place, signed):
            return "again"
        if sum(where == place for where, _ in self._brought.values()) >= MOST_WAITING:
            return "full"
        self._brought[digest] = (place, letter)
        if len(self._brought) == 1:
            self.arrived()
        return "taken"

    @property
    def has_brought(self) -> bool:
        return bool(self._brought)

    def take(self) -> list[Letter]:
        """Those that were brought since the last time, from senders that the server has not taken away since."""
        taken, self._brought = self._brought, {}
        return [letter for place, letter in taken.values() if self._stands(place, device_id(letter.key))]

    def hear(self, state: Any, letters: Iterable[Letter], now: float) -> tuple[Any, int, tuple[Flaw, ...]]:
        """The state once these letters were heard, how many were, and the flaws that were met for the first time."""
        before, heard = self.post, 0
        for letter in letters:
            try:
                signed, message = self._believed(letter)
            except _Refused as refused:
                times = self.post.refused.get(refused.flaw, 0) + 1
                self.post = replace(self.post, refused={**self.post.refused, refused.flaw: times})
                continue
            sender, place = signed.envelope.sender, int(message.place)
            if self._was_heard(place, signed):
                continue
            named: Mapping[str, Any] = {"me": self.me, "sender": sender, "place": self.place, "now": now}
            state = letter_turn(self.protocol, self.task, state, message, **named)
            heard += 1
            marks = self.post.marks.get(place, HeardNumbers()).add(signed.envelope.seq, self._wide)
            self.post = replace(
                self.post,
                heard=self.post.heard + 1,
                size=self.post.size + len(letter.signed),
                keys={**self.post.keys, place: letter.key},
                marks={**self.post.marks, place: marks},
            )
        return state, heard, tuple(flaw for flaw in SENTENCES if flaw in {*self.post.refused} - {*before.refused})

    def _was_heard(self, place: int, signed: Signed) -> bool:
        return place in self.post.marks and self.post.marks[place].has(signed.envelope.seq, self._wide)

    def _believed(self, letter: Letter) -> tuple[Signed, Any]:
        try:
            signed = letter.open()
        except Problem as problem:
            raise _Refused("forged" if problem.slug == "signature" else "malformed") from problem
        envelope = signed.envelope
        if envelope.task != self.task.hash:
            raise _Refused("other-task")
        if self._here not in envelope.to or envelope.sender == self.me:
            raise _Refused("not-for-us")
        try:
            message = decode_message(envelope.kind, envelope.body, self._expected)
        except Problem as problem:
            raise _Refused("contents") from problem
        if type(message) not in self.protocol.device.on:
            raise _Refused("contents")
        place = int(message.place)
        if place not in self.peers:
            raise _Refused("stranger")
        if self.post.keys.get(place, letter.key) != letter.key:
            raise _Refused("other-key")
        return signed, message
