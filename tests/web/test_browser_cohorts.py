"""Browsers in masked rounds with Python's server, alone and beside Python's devices: sums come out exactly."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from crowdml.secagg import device as masker
from crowdml.secagg import sealed
from crowdml.secagg import server as summer
from crowdml.secagg.masks import derive
from crowdml.secagg.messages import encode, open_message
from crowdml.secagg.terms import RingField, Terms
from crowdml.wire.keys import Key

pytestmark = pytest.mark.browser

ROUND = 7
FIELDS = (RingField("gradient", 5, 32, 10**6, 10), RingField("moments", 4, 64, 10**12, 10))
TERMS = Terms(bytes(range(32)), FIELDS, smallest=6, largest=8, survivors=6, colluders=0)
HASH = hashlib.sha256(b"a publication").digest()
NONCE = bytes(12)


@pytest.fixture
def letters_of_browsers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python seals its letters as browsers do, with AES-256-GCM under the same key."""

    def seal(secret: bytes, salt: bytes, sender: str, holder: str, content: bytes) -> bytes:
        return AESGCM(derive(secret, salt, "seal", sender, holder)).encrypt(NONCE, content, None)

    def unseal(secret: bytes, salt: bytes, sender: str, holder: str, letter: bytes) -> bytes | None:
        try:
            return AESGCM(derive(secret, salt, "seal", sender, holder)).decrypt(NONCE, letter, None)
        except InvalidTag:
            return None

    monkeypatch.setattr(sealed, "seal", seal)
    monkeypatch.setattr(sealed, "unseal", unseal)


class Browser:
    """A device in the page."""

    def __init__(self, page: Any, key: Key, secret: bytes) -> None:
        self.page, self.id = page, key.id
        fields = [{"tag": each.tag, "length": each.length, "bits": each.bits} for each in TERMS.fields]
        terms = {"task": TERMS.task.hex(), "fields": fields, "smallest": TERMS.smallest, "largest": TERMS.largest,
                 "survivors": TERMS.survivors, "colluders": TERMS.colluders}  # fmt: skip
        found, self.said = self.call("begin", terms, ROUND, secret.hex())
        assert found == key.id

    def call(self, name: str, *values: Any) -> Any:
        run = "async ([name, values]) => (await import('/tests/web/cohort.js'))[name](...values)"
        return self.page.evaluate(run, [name, list(values)])

    def hear(self, message: Any, vectors: Any) -> None:
        plain = {tag: vector.tolist() for tag, vector in vectors.items()}
        self.said = self.call("hear", self.id, message.kind, encode(message).hex(), HASH.hex(), plain)

    @property
    def sent(self) -> bytes:
        return bytes.fromhex(self.said)


class Board:
    """A device of Python."""

    def __init__(self, key: Key) -> None:
        self.key, self.id = key, key.id
        self.state = masker.advertise(TERMS, ROUND, key, after=ROUND - 1)

    def hear(self, message: Any, vectors: Any) -> None:
        steps = {
            "secagg/cohort/1": lambda: masker.share(TERMS, self.state, message),
            "secagg/held/1": lambda: masker.mask(TERMS, masker.hold(TERMS, self.state, message, HASH), vectors),
            "secagg/survivors/1": lambda: masker.agree(TERMS, self.state, self.key, message),
            "secagg/agreements/1": lambda: masker.reveal(TERMS, self.state, message),
        }
        self.state = steps[message.kind]()

    @property
    def sent(self) -> bytes:
        return self.state.sent


@pytest.mark.parametrize("browsers", [8, 4], ids=["browsers alone", "four browsers and four boards"])
@pytest.mark.parametrize("missing", [0, 2])
def test_a_cohort_unmasks_to_the_exact_sum(page: Any, letters_of_browsers: None, browsers: int, missing: int):
    """The last devices vanish before they mask, browsers and boards among them where there are both."""
    crowd: dict[str, Browser | Board] = {}
    for n in range(8):
        secret = hashlib.sha256(f"{browsers} {missing} {n}".encode()).digest()
        key = Key.from_secret(secret)
        crowd[key.id] = Browser(page, key, secret) if n % 2 == 0 or browsers == 8 else Board(key)
    draw = np.random.default_rng(browsers)
    vectors = {
        one: {"gradient": draw.integers(-(10**6), 10**6, 5), "moments": draw.integers(-(10**12), 10**12, 4)}
        for one in crowd
    }
    here = summer.begin(ROUND)
    gone = sorted(crowd)[8 - missing :]
    for kind in ("secagg/advert/1", "secagg/shares/1", "secagg/masked/1", "secagg/agreement/1", "secagg/reveal/1"):
        if kind == "secagg/masked/1":
            for one in gone:
                del crowd[one]
        for one in sorted(crowd):
            here = summer.hear(TERMS, here, one, open_message(kind, crowd[one].sent))
        here = summer.close(TERMS, here, HASH)
        for one in sorted(crowd):
            if (message := summer.tell(TERMS, here, one)) is not None:
                crowd[one].hear(message, vectors[one])
    assert here.phase == "summed"
    for tag, total in summer.sums(TERMS, here).items():
        assert total.tolist() == sum(vectors[one][tag] for one in crowd).tolist()
