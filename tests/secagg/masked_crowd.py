"""A crowd that masks: real devices and a real server of the core, every state and message as bytes in between."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from crowdml.secagg import device, server
from crowdml.secagg.cohort import Roster, read_roster
from crowdml.secagg.device import DeviceRound
from crowdml.secagg.messages import KINDS, Message, encode, open_message
from crowdml.secagg.refusals import Refused
from crowdml.secagg.server import ServerRound
from crowdml.secagg.terms import RingField, Terms
from crowdml.wire.keys import Key

TASK, MODEL = hashlib.sha256(b"a task").digest(), hashlib.sha256(b"a model").digest()
FIELDS = (RingField("gradient", 5, 32, 1000, 10), RingField("counts", 2, 64, 1000, 10))
KIND = {
    "advertise": "secagg/advert/1",
    "share": "secagg/shares/1",
    "mask": "secagg/masked/1",
    "agree": "secagg/agreement/1",
    "reveal": "secagg/reveal/1",
}


def terms(smallest=8, largest=None, survivors=6, colluders=1, fields=FIELDS, **more) -> Terms:
    return Terms(TASK, fields, smallest, largest or smallest, survivors, colluders, **more)


def coins(*words: object) -> Callable[[int], bytes]:
    """Entropy that a test can have twice."""
    return lambda size: hashlib.shake_256(repr(words).encode()).digest(size)


def travel(message: Message) -> Message:
    """Through its bytes."""
    return open_message(message.kind, encode(message))


@dataclass
class Crowd:
    terms: Terms
    count: int
    seed: int = 0
    round: int = 1
    devices: dict[str, DeviceRound] = field(default_factory=dict)
    log: dict[tuple[str, str], bytes] = field(default_factory=dict)
    shown: dict[str, bytes] = field(default_factory=dict)
    """Hashes of the publications that devices were shown, where it is not MODEL."""

    def __post_init__(self) -> None:
        self.keys = {
            key.id: key for key in (Key.from_secret(coins("key", self.seed, one)(32)) for one in range(self.count))
        }
        self.ids = sorted(self.keys)
        rng = np.random.default_rng(self.seed)
        self.vectors = {
            one: {field.tag: rng.integers(-field.bound, field.bound + 1, field.length) for field in self.terms.fields}
            for one in self.ids
        }
        self.server = server.begin(self.round)

    @property
    def roster(self) -> Roster:
        return read_roster(self.terms, self.round, self.server.roster)

    def advertise(self, ids: Iterable[str] | None = None) -> None:
        for one in self.ids if ids is None else ids:
            self.devices[one] = device.advertise(
                self.terms, self.round, self.keys[one], after=self.round - 1, entropy=coins(self.seed, self.round, one)
            )

    def answer(self, one: str, message: Message) -> None:
        """A device hears and steps; it has been killed and restarted before, and will be again."""
        state = DeviceRound.decode(self.devices[one].encode())
        self.devices[one] = self.step(one, state, travel(message))

    def step(self, one: str, state: DeviceRound, message: Message) -> DeviceRound:
        match message.kind:
            case "secagg/cohort/1":
                return device.share(self.terms, state, message)
            case "secagg/held/1":
                held = device.hold(self.terms, state, message, self.shown.get(one, MODEL))
                return device.mask(self.terms, DeviceRound.decode(held.encode()), self.vectors[one])
            case "secagg/survivors/1":
                return device.agree(self.terms, state, self.keys[one], message)
            case "secagg/agreements/1":
                return device.reveal(self.terms, state, message)
        raise AssertionError(message.kind)

    def tell(self, ids: Iterable[str] | None = None) -> None:
        """The server tells these devices what it has for them, and they step."""
        for one in list(self.devices) if ids is None else ids:
            message = server.tell(self.terms, self.server, one)
            if message is not None:
                self.answer(one, message)

    def deliver(self, ids: Iterable[str] | None = None) -> None:
        """What these devices have to say in this phase arrives."""
        for one in list(self.devices) if ids is None else ids:
            message = open_message(KIND[self.server.phase], self.devices[one].sent)
            self.log[one, message.kind] = self.devices[one].sent
            self.server = server.hear(self.terms, self.server, one, message)

    def close(self) -> None:
        self.server = ServerRound.decode(server.close(self.terms, self.server, MODEL).encode())

    def go_to(self, phase: str, missing: Iterable[str] = ()) -> None:
        """Everybody plays along until the server is at `phase`; `missing` deliver no masked vector."""
        order = list(KIND)
        while self.server.phase != phase:
            here = self.server.phase
            assert here in order, self.server
            if here == "advertise":
                self.advertise()
            else:
                self.tell()
            gone = set(missing) if order.index(here) >= order.index("mask") else set()
            self.deliver([one for one in self.devices if one not in gone])
            self.close()

    def expected(self, survivors: Iterable[str]) -> dict[str, np.ndarray]:
        chosen = list(survivors)
        return {
            field.tag: sum(self.vectors[one][field.tag] for one in chosen).astype(np.int64)
            for field in self.terms.fields
        }

    def agrees_with(self, survivors: Iterable[str]) -> bool:
        found, wanted = server.sums(self.terms, self.server), self.expected(survivors)
        return all((found[tag] == wanted[tag]).all() for tag in wanted)


def refused(call: Callable[[], object]) -> str:
    """The sentence of the refusal that must come."""
    try:
        call()
    except Refused as refusal:
        return str(refusal)
    raise AssertionError("it was not refused")


assert set(KIND.values()) < set(KINDS)
