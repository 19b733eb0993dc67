"""What a device hears of its peers: letters that its server relays, or that peers bring themselves; whom it believes.

Nobody who carries a letter is believed. It is heard if the key that came with it is that of the sender's id and signed
these bytes; if it is of this task and written to where this device stands; if the place that it says it is from is one
whose words this device hears; if the same key spoke from there before, or nobody did; and if what it says has the type,
the shape and the range that the task gives it. Any other is left aside and counted, for the owner alone, and nothing
else changes: not the state, not who is believed, and not what comes after it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any, Literal

from crowdml.messages import Address
from crowdml.protocol import Context, Protocol, address_of, advance
from crowdml.records import record
from crowdml.task import Task
from crowdml.wire.envelopes import Signed
from crowdml.wire.letters import Letter
from crowdml.wire.problems import Problem
from crowdml.wire.validate import decode_message

__all__ = ["Correspondence", "Flaw", "Post"]

Flaw = Literal["malformed", "forged", "other-task", "not-for-us", "stranger", "other-key", "contents"]
SENTENCES: Mapping[Flaw, str] = {
    "malformed": "it is no signed envelope",
    "forged": "its sender did not sign it",
    "other-task": "it is of another task",
    "not-for-us": "it is not written to where this device stands",
    "stranger": "it is from a place that this device does not hear",
    "other-key": "another device spoke from that place before",
    "contents": "it does not say what the task has its devices say",
}
REMEMBERED = 4096
"""Letters by their hash, so that one which comes on two ways is counted once."""
MOST_WAITING = 256
"""Letters that peers brought and nobody has looked at: more are not taken."""


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
    """Of each place, the first key that was heard from there: no other is, from then on."""

    def plain(self) -> dict[str, Any]:
        keys = [[place, key] for place, key in sorted(self.keys.items())]
        refused = [[why, times] for why, times in sorted(self.refused.items())]
        return {"after": self.after, "heard": self.heard, "keys": keys, "refused": refused, "size": self.size}

    @classmethod
    def of(cls, plain: Mapping[str, Any] | None) -> Post:
        if plain is None:
            return cls()
        return cls(plain["after"], plain["heard"], plain["size"], dict(plain["refused"]), dict(plain["keys"]))


class _Refused(Exception):  # noqa: N818  # a signal inside this module
    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw)
        self.flaw: Flaw = flaw


class Correspondence:
    """One device's letters of one task: which of them reach its handlers."""

    def __init__(self, task: Task, protocol: Protocol, me: Address, place: int, post: Post) -> None:
        self.task, self.protocol, self.me, self.place, self.post = task, protocol, me, place, post
        self.peers = frozenset(() if protocol.peers is None else protocol.peers(task)[place])
        self._brought: list[Letter] = []
        """By peers themselves, not looked at yet."""
        self._here = address_of(place)
        self._expected = protocol.expected(task)
        self._seen: dict[bytes, None] = {}

    def bring(self, letter: Letter) -> bool:
        """Take a letter that a peer brought; false where too many wait."""
        if len(self._brought) >= MOST_WAITING:
            return False
        self._brought.append(letter)
        return True

    def take(self) -> list[Letter]:
        """Those that were brought since the last time."""
        taken, self._brought = self._brought, []
        return taken

    def hear(self, state: Any, letters: Iterable[Letter], now: float) -> tuple[Any, int, tuple[Flaw, ...]]:
        """The state once these letters were heard, how many were, and the flaws that were met for the first time."""
        before, heard = self.post, 0
        for letter in letters:
            digest = hashlib.sha256(letter.signed).digest()
            if digest in self._seen:
                continue
            try:
                signed, message = self._believed(letter)
            except _Refused as refused:
                times = self.post.refused.get(refused.flaw, 0) + 1
                self.post = replace(self.post, refused={**self.post.refused, refused.flaw: times})
                continue
            sender, place = signed.envelope.sender, int(message.place)
            state = advance(
                self.protocol.device, self.task, state, message, Context(self.me, sender, now, place=self.place)
            ).state
            heard += 1
            keys = self.post.keys if place in self.post.keys else {**self.post.keys, place: letter.key}
            self.post = replace(
                self.post, heard=self.post.heard + 1, size=self.post.size + len(letter.signed), keys=keys
            )
            self._seen[digest] = None
            if len(self._seen) > REMEMBERED:
                del self._seen[next(iter(self._seen))]
        return state, heard, tuple(flaw for flaw in SENTENCES if flaw in {*self.post.refused} - {*before.refused})

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
