"""What a device is told of a round of masking: how far it is, and what this device has to know now.

The answer to GET and POST /v1/tasks/{hash}/round, a msgpack map with sorted keys: body, closes, kind, phase,
publication, round, wait, why. What `body` says, `crowdml.secagg` knows; here it is bytes.
"""

from __future__ import annotations

import hashlib

from crowdml.messages import LONGEST_KIND
from crowdml.records import record
from crowdml.wire.packing import LARGEST_INTEGER, Reader, pack

PHASES = ("advertise", "share", "mask", "agree", "reveal", "summed", "abandoned")
ENDED = ("summed", "abandoned")
KINDS = ("secagg/advert/1", "secagg/shares/1", "secagg/agreement/1", "secagg/reveal/1")
"""What a device posts to a round. Its masked vector, `secagg/masked/1`, is a check-in."""
LONGEST_WHY = 1024
LARGEST_VIEW = 64 * 2**20
"""Bytes: a cohort's keys, or a device's letters, and a publication."""
LONGEST_TIME = 10**12
"""Milliseconds."""


@record
class RoundView:
    """Where `round` is, as one device sees it.

    `body` is a message of this `kind` for the device, empty where there is none: it answered already, or nothing is
    asked of it. `closes` and `wait` are milliseconds: until the phase's deadline, and until the device shall ask again.
    `publication` is (version, kind, body) while devices mask: what everybody in this cohort works with.
    """

    round: int
    phase: str
    kind: str = ""
    body: bytes = b""
    closes: int = 0
    wait: int = 0
    publication: tuple[int, str, bytes] | None = None
    why: str = ""

    @property
    def is_over(self) -> bool:
        return self.phase in ENDED

    def encode(self) -> bytes:
        return pack(
            {
                "body": self.body,
                "closes": self.closes,
                "kind": self.kind,
                "phase": self.phase,
                "publication": list(self.publication or ()),
                "round": self.round,
                "wait": self.wait,
                "why": self.why,
            }
        )


def open_view(data: bytes) -> RoundView:
    """What the bytes say, if their structure is right."""
    reader = Reader(data, "The view of a round", limit=LARGEST_VIEW)
    reader.map(8)
    body = reader.key("body").binary("body", LARGEST_VIEW)
    closes = reader.key("closes").integer("closes", 0, LONGEST_TIME)
    kind = reader.key("kind").text("kind", LONGEST_KIND)
    phase = reader.key("phase").text("phase", 16)
    if phase not in PHASES:
        reader.fail(f"phase must be one of {', '.join(PHASES)}")
    reader.key("publication")
    publication = _read_publication(reader)
    number = reader.key("round").integer("round", 1, LARGEST_INTEGER)
    wait = reader.key("wait").integer("wait", 0, LONGEST_TIME)
    why = reader.key("why").text("why", LONGEST_WHY)
    reader.end()
    return RoundView(number, phase, kind, body, closes, wait, publication, why)


def publication_hash(version: int, kind: str, body: bytes) -> bytes:
    """What the masks of a cohort are bound to of the publication that it works with."""
    return hashlib.sha256(b"crowdml/secagg/publication/1" + pack([version, kind, body])).digest()


def _read_publication(reader: Reader) -> tuple[int, str, bytes] | None:
    size = reader.array("publication", 3)
    if size not in (0, 3):
        reader.fail("publication must be empty, or version, kind and body")
    if not size:
        return None
    version = reader.integer("the publication's version", 0, LARGEST_INTEGER)
    kind = reader.text("the publication's kind", LONGEST_KIND)
    return version, kind, reader.binary("the publication's body", LARGEST_VIEW)
