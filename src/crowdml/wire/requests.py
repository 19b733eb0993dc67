"""Requests: the signed Authorization header, enrolment, and the owner's link. The clock is an argument.

    Authorization: Crowdml <device id> <unix seconds> <base64url signature>

over b"crowdml/request/1\\n", method, path with query, seconds and the SHA-256 of the body in hex, each on its line. It
holds for 300 seconds to either side. Within them a request can be repeated by whoever saw it: the routes that take it
are reads, or change nothing the second time.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from typing import NoReturn

from crowdml.records import record
from crowdml.wire.keys import ID, PUBLIC_SIZE, SIGNATURE_SIZE, Key, device_id, is_sound, verify
from crowdml.wire.packing import Reader, pack
from crowdml.wire.problems import Problem

SKEW = 300
"""Seconds that a device's clock may differ from the server's."""
SCHEME = "Crowdml"
REQUEST_PREFIX = b"crowdml/request/1\n"
ENROL_PREFIX = b"crowdml/enrol/1"
OWNER_PREFIX = b"crowdml/owner/1\n"
LONGEST_LINK = 900
"""Seconds that an owner's link may hold."""
EARLY_LINK = 60
"""Seconds before its time at which a link holds already: for a device whose clock is a little ahead."""
LONGEST_CODE = 128
MOST_TASKS = 64
LARGEST_CHECK = 1024
"""Bytes of the question what a code admits to."""
LARGEST_ENROLMENT = 256 + LONGEST_CODE + MOST_TASKS * 66
CODE = re.compile(r"[A-Za-z0-9_-]{1,128}")
TASK = re.compile(r"[0-9a-f]{64}")
_SECONDS = re.compile(r"0|[1-9][0-9]{0,14}")
_BASE64 = re.compile(r"[A-Za-z0-9_-]{86}")


# --- the Authorization header ---


@record
class Authorization:
    """A parsed header: who says to have signed the request, when, and the signature."""

    device: str
    seconds: int
    signature: bytes

    def check(self, public: bytes, method: str, target: str, body: bytes = b"", *, now: float) -> None:
        """Refuse, unless the device whose key is `public` signed this request within `SKEW` seconds of `now`.

        `target` is the path with its query, exactly as it stands in the request line.
        """
        if abs(now - self.seconds) > SKEW:
            raise Problem(
                "clock",
                f"The request was signed {now - self.seconds:+.0f} seconds ago by the server's clock; "
                f"{SKEW} are allowed to either side.",
                now=int(now),
            )
        signed = _request(method, target, self.seconds, body)
        if len(public) != PUBLIC_SIZE or device_id(public) != self.device or not verify(public, self.signature, signed):
            raise Problem("signature", f"The signature of {method} is not by the key of device {self.device}.")


def authorize(key: Key, method: str, target: str, body: bytes = b"", *, now: float) -> str:
    """The value of the Authorization header for this request."""
    seconds = int(now)
    return f"{SCHEME} {key.id} {seconds} {_base64(key.sign(_request(method, target, seconds, body)))}"


def parse_authorization(header: str | None) -> Authorization:
    """What the header says; whether it is true, `Authorization.check` says."""
    if not header:
        raise Problem("authorization", "The request has no Authorization header, and this path needs one.")
    parts = header.split(" ") if len(header) <= 256 else []
    if len(parts) != 4 or parts[0] != SCHEME:
        _refuse_header("it must read 'Crowdml <device id> <unix seconds> <base64url signature>'")
    _, device, seconds, signature = parts
    if not ID.fullmatch(device):
        _refuse_header("the device id must be 32 hex digits in lower case")
    if not _SECONDS.fullmatch(seconds):
        _refuse_header("the time must be whole seconds since 1970")
    return Authorization(device, int(seconds), _signature(signature, "authorization"))


def _refuse_header(why: str) -> NoReturn:
    raise Problem("authorization", f"The Authorization header is refused: {why}.")


def _request(method: str, target: str, seconds: int, body: bytes) -> bytes:
    lines = f"{method.upper()}\n{target}\n{seconds}\n{hashlib.sha256(body).hexdigest()}"
    return REQUEST_PREFIX + lines.encode("utf-8", errors="surrogateescape")


# --- enrolment ---


@record
class Enrolment:
    """What a new device sends: an invitation code, its public key, the tasks to join (none: all it is invited to)."""

    code: str
    key: bytes
    tasks: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        return device_id(self.key)


@record
class Enrolled:
    """The server's answer: the device's id, the server's own key, and the hashes of the tasks it joined."""

    device: str
    server_key: bytes
    tasks: tuple[str, ...]

    def encode(self) -> bytes:
        return pack({"device": self.device, "server_key": self.server_key, "tasks": sorted(self.tasks)})


def enrol(key: Key, code: str, tasks: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """The body of POST /v1/devices, and its Crowdml-Signature header."""
    plain: dict[str, object] = {"code": code, "key": key.public}
    if tasks:
        plain["tasks"] = sorted(tasks)
    body = pack(plain)
    return body, _base64(key.sign(_enrolment(body)))


def open_enrolment(body: bytes, signature: str | None) -> Enrolment:
    """A well-formed enrolment that is signed by the key which it names; anything else is refused."""
    reader = Reader(body, "The enrolment", limit=LARGEST_ENROLMENT)
    keys = reader.any_map(3)
    code = reader.key("code").text("code", LONGEST_CODE)
    if not CODE.fullmatch(code):
        reader.fail("code must be letters, digits, '-' and '_'")
    public = reader.key("key").binary("key", PUBLIC_SIZE, exactly=PUBLIC_SIZE)
    tasks: tuple[str, ...] = ()
    if keys == 3:
        tasks = _read_tasks(reader.key("tasks"))
    elif keys != 2:
        reader.fail("expected the keys code, key and perhaps tasks")
    reader.end()
    if not is_sound(public):
        raise Problem("malformed", "The key is of small order or not in its one encoding: anybody could sign for it.")
    if not signature:
        raise Problem("signature", "The enrolment has no Crowdml-Signature header.")
    if not verify(public, _signature(signature, "signature"), _enrolment(body)):
        raise Problem("signature", "The enrolment is not signed by the key that it names.")
    return Enrolment(code, public, tasks)


def open_enrolled(body: bytes) -> Enrolled:
    """The server's answer, if its structure is right."""
    reader = Reader(body, "The answer to the enrolment", limit=LARGEST_ENROLMENT)
    reader.map(3)
    device = reader.key("device").text("device", 32)
    if not ID.fullmatch(device):
        reader.fail("device must be a device id: 32 hex digits in lower case")
    server_key = reader.key("server_key").binary("server_key", PUBLIC_SIZE, exactly=PUBLIC_SIZE)
    tasks = _read_tasks(reader.key("tasks"))
    reader.end()
    return Enrolled(device, server_key, tasks)


def check_code(code: str) -> bytes:
    """The body of POST /v1/invitations/check."""
    return json.dumps({"code": code}).encode()


def open_code(body: bytes) -> str:
    """The code that somebody asks about; a body that says anything else is refused."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    code = asked.get("code") if isinstance(asked, dict) and len(asked) == 1 else None
    if not isinstance(code, str) or not CODE.fullmatch(code):
        raise Problem("malformed", "Send a JSON object with `code` alone: letters, digits, '-' and '_'.")
    return code


def _read_tasks(reader: Reader) -> tuple[str, ...]:
    tasks = tuple(reader.text("a task", 64) for _ in range(reader.array("tasks", MOST_TASKS)))
    if not all(TASK.fullmatch(task) for task in tasks):
        reader.fail("a task is the 64 hex digits of its hash, in lower case")
    if list(tasks) != sorted(set(tasks)):
        reader.fail("tasks must be sorted, each once")
    return tasks


def _enrolment(body: bytes) -> bytes:
    return ENROL_PREFIX + hashlib.sha256(body).digest()


# --- the owner's link ---


def owner_link(key: Key, at: int, lasts: int = LONGEST_LINK) -> str:
    """The query of a link to the owner's page, `/device/<device id>?<query>`, that holds for `lasts` seconds from `at`.

    Whoever has the link is taken for the device's owner until it ends: it is shown to its owner and to nobody else.
    """
    if not 1 <= lasts <= LONGEST_LINK or at < 0:
        raise ValueError(f"A link holds for 1 to {LONGEST_LINK} seconds from a time after 1970; not {lasts} from {at}.")
    return f"at={at}&for={lasts}&signature={_base64(key.sign(_link(key.id, at, lasts)))}"


def open_owner_link(
    public: bytes, device: str, at: str | None, lasts: str | None, signature: str | None, *, now: float
) -> int:
    """The second at which this link ends, if the device whose key is `public` signed it and it holds at `now`.

    `at`, `lasts` and `signature` are the values of `at`, `for` and `signature` as they stand in the query. Raises
    `Problem`: 401 `authorization` for what is no link, `clock` for one that holds no more or not yet, `signature`.
    """
    if not at or not lasts or not signature or not (_SECONDS.fullmatch(at) and _SECONDS.fullmatch(lasts)):
        raise Problem("authorization", "This is no link of a device. Make one with `crowdml ledger --web`.")
    begins, ends = int(at) - EARLY_LINK, int(at) + int(lasts)
    if not 1 <= int(lasts) <= LONGEST_LINK:
        raise Problem("authorization", f"A link holds for 1 to {LONGEST_LINK} seconds, and this one says {lasts}.")
    given = _signature(signature, "authorization")
    known = len(public) == PUBLIC_SIZE and device_id(public) == device
    if not known or not verify(public, given, _link(device, int(at), int(lasts))):
        raise Problem("signature", "The link is not signed by the key of this device.")
    if not begins <= now < ends:
        when = f"ended {now - ends:.0f} seconds ago" if now >= ends else f"begins in {begins - now:.0f} seconds"
        raise Problem("clock", f"The link {when}, by the server's clock. Make a new one.", now=int(now))
    return ends


def _link(device: str, at: int, lasts: int) -> bytes:
    return OWNER_PREFIX + f"{device}\n{at}\n{lasts}".encode()


def _base64(data: bytes) -> str:
    """URL-safe, without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _signature(text: str, slug: str) -> bytes:
    try:
        data = base64.urlsafe_b64decode(text + "==") if _BASE64.fullmatch(text) else b""
    except (binascii.Error, ValueError):
        data = b""
    if len(data) != SIGNATURE_SIZE or _base64(data) != text:
        raise Problem(slug, "A signature is 64 bytes as base64url without padding: 86 characters.")
    return data
