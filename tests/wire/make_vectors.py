"""Writes spec/: the JSON schemas of what travels, and test vectors for a device in any language.

    python tests/wire/make_vectors.py            (`make_vectors.build()` is the same as {name: text}, for the tests)

Bytes are hex. Keys are those of no device. Nothing is drawn but from bytes that are written
beside it (`device_vectors.py`): elsewhere `Silence` stands where noise would be.
"""

from __future__ import annotations

import hashlib
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import device_vectors
import machine_vectors
import msgpack
import numpy as np
import sensing_vectors

from crowdml.arrays import Samples
from crowdml.messages import KINDS, SERVER, Envelope, encode
from crowdml.price import Price
from crowdml.privacy.door import Door
from crowdml.privacy.losses import Total
from crowdml.privacy.mechanisms import GridGaussian, GridLaplace
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import RECEIVED, Private, Release, Rows
from crowdml.protocol import Context, Send
from crowdml.protocols import sgd
from crowdml.protocols.proportions import Proportions
from crowdml.secagg import device as masker
from crowdml.secagg import server as summer
from crowdml.secagg.messages import encode as pack_secagg
from crowdml.secagg.messages import open_message
from crowdml.secagg.terms import RingField as MaskedField
from crowdml.secagg.terms import Terms
from crowdml.task import Task, parse
from crowdml.wire.envelopes import LARGEST_BODY, LARGEST_ENVELOPE, open_signed, pack_envelope, sign
from crowdml.wire.keys import Key
from crowdml.wire.letters import MOST_LETTER_BYTES, MOST_LETTERS, Letter, Mailbox, pack_held
from crowdml.wire.packing import pack
from crowdml.wire.problems import PROBLEMS, Problem
from crowdml.wire.receipts import MOST_STEPS, STEP, Receipt, chain_next, chain_start, open_receipt, sign_receipts
from crowdml.wire.requests import (
    ENROL_PREFIX,
    OWNER_PREFIX,
    REQUEST_PREFIX,
    SKEW,
    Enrolled,
    authorize,
    enrol,
    owner_link,
)
from crowdml.wire.rounds import LARGEST_VIEW, PHASES, RoundView, publication_hash
from crowdml.wire.statements import Statement, totals_fell

SPEC = Path(__file__).resolve().parents[2] / "spec"
DEVICE, OTHER, SERVER_KEY = (Key.from_secret(bytes([n]) * 32) for n in (1, 2, 3))

GAUSSIAN = """
name = "vector-gaussian"
[features]
dimension = 3
norm = { kind = "l2", bound = 1.0 }
[labels]
classes = ["a", "b", "c", "d"]
[model]
kind = "softmax"
[protocol]
kind = "sgd"
batch = 5
held_out = 2
step = { c = 1.0 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 0.9, errors = 0.05, labels = 0.05 }
delta = 1e-6
budget = { epsilon = 1.0, samples = 100 }
"""
LAPLACE = """
name = "vector-laplace"
[features]
dimension = 2
norm = { kind = "l1", bound = 2.0 }
[labels]
classes = ["no", "yes"]
[model]
kind = "softmax"
[protocol]
kind = "sgd"
batch = 3
step = { c = 1.0 }
[privacy]
mechanism = "discrete-laplace"
epsilon = { gradient = 2.0, labels = 0.5 }
delta = 0.0
"""
TASKS = {"gaussian": parse(GAUSSIAN), "laplace": parse(LAPLACE)}

# Eighths, so that JSON is exact; the last sample of each task lies outside the ball of its norm, and is clipped.
X3 = np.array([[1, 0, 2], [-3, 4, 0], [2, -5, 1], [0, 7, -2], [24, -8, 16]], np.float32) / 8
X2 = np.array([[3, -5], [8, 1], [-40, 24]], np.float32) / 8
BATCHES = {"gaussian": Samples(X3, np.array([0, 3, 1, 2, 0])), "laplace": Samples(X2, np.array([1, 0, 1]))}
WEIGHTS = {
    "zero": {name: np.zeros(sgd.plan(task).model.shape, np.float32) for name, task in TASKS.items()},
    "eighths": {
        "gaussian": np.arange(-5, 7, dtype=np.float32).reshape(3, 4) / 8,
        "laplace": np.array([[5, -3], [-2, 9]], np.float32) / 8,
    },
}


def contribution(name: str, weights: str) -> tuple[Any, sgd.Gradient]:
    """What a device would send, but for the noise."""
    task, batch = TASKS[name], BATCHES[name]
    door = Door(sgd.mechanisms(task), Silence())
    params = sgd.Params(WEIGHTS[weights][name], 7)
    context = Context(DEVICE.id, SERVER, release=door.release)
    (send,) = sgd.device.on[sgd.Params](task, Private(batch, Rows(0, len(batch))), params, context).effects
    assert isinstance(send, Send)
    return params, send.message


def array(value: Any) -> Any:
    """An array for reading."""
    value = np.asarray(value)
    little = value.dtype.newbyteorder("<").str
    return {"dtype": little, "shape": list(value.shape), "values": value.ravel().tolist()}


def readable(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name in sorted(get_type_hints(type(message))):
        value = getattr(message, name)
        value = value.value if isinstance(value, Release) else value
        plain[name] = value if value is None or isinstance(value, int) else array(value)
    return plain


def keys() -> Any:
    secrets = [bytes([n]) * 32 for n in (1, 2, 3)]
    return [
        {
            "secret": secret.hex(),
            "public": key.public.hex(),
            "id": key.id,
            "signature_of_hello": key.sign(b"hello").hex(),
        }
        for secret, key in ((secret, Key.from_secret(secret)) for secret in secrets)
    ]


def statement(name: str, check_ins: int) -> Statement:
    """A device's totals after so many check-ins of one task, each sample used once."""
    task = TASKS[name]
    dearest = Price.of(sgd.protocol, task).sample() if check_ins else Total()
    device = Price.of(sgd.protocol, task).device(check_ins)
    return Statement.of(device, check_ins * sgd.protocol.batch(task), dearest)


def check_in(name: str, seq: int, **changes: Any) -> tuple[Envelope, Statement]:
    body = encode(contribution(name, "eighths")[1])
    fields = {"task": TASKS[name].hash, "sender": DEVICE.id, "to": frozenset({SERVER}), "seq": seq,
              "kind": "sgd/gradient/1", "body": body}  # fmt: skip
    return Envelope(**{**fields, **changes}), statement(name, seq)


def shown(envelope: Envelope, statement: Statement) -> dict[str, Any]:
    return {
        "body": envelope.body.hex(),
        "kind": envelope.kind,
        "sender": envelope.sender,
        "seq": envelope.seq,
        "statement": statement.plain(),
        "task": envelope.task.hex(),
        "to": sorted(envelope.to),
    }


def envelopes() -> Any:
    made = {
        "a first check-in": check_in("gaussian", 1),
        "a later one": check_in("gaussian", 300),
        "pure losses alone": check_in("laplace", 2),
        "a whole loss, and one of zero": (check_in("laplace", 3)[0], Statement(("pure 2", "zcdp 0"), 40, ("pure 0",))),
        "an empty body to two peers": check_in(
            "laplace", 70_000, body=b"", kind="proportions/shares/1", to=frozenset({OTHER.id, SERVER_KEY.id})
        ),
    }
    valid: list[Any] = []
    for name, (envelope, totals) in made.items():
        data = sign(envelope, totals, DEVICE)
        valid.append({
            "name": name, "secret": (b"\x01" * 32).hex(), "envelope": shown(envelope, totals),
            "packed": data[64:].hex(), "signed": data.hex(), "hash": open_signed(data).hash.hex(),
        })  # fmt: skip
    first, totals = made["a first check-in"]
    packed = pack_envelope(first, totals)
    plain = msgpack.unpackb(packed)

    def our(plain: Any) -> bytes:
        packed = plain if isinstance(plain, bytes) else bytes(msgpack.packb(plain) or b"")
        return DEVICE.sign(b"crowdml/envelope/1" + packed) + packed

    bad = {
        "keys in another order": our(dict(reversed(plain.items()))),
        "a key too many": our({**plain, "zzz": 0}),
        "a seq of 0": our({**plain, "seq": 0}),
        "a seq that is a float": our({**plain, "seq": 1.0}),
        "a seq in a longer form than needed": our(packed.replace(b"\xa3seq\x01", b"\xa3seq\xcc\x01")),
        "a sender in capitals": our({**plain, "sender": DEVICE.id.upper()}),
        "a task in hex": our({**plain, "task": first.task.hex()}),
        "recipients that are not sorted": our({**plain, "to": ["server", DEVICE.id]}),
        "nobody to read it": our({**plain, "to": []}),
        "a loss that is not in lowest terms": our(
            {**plain, "statement": {**plain["statement"], "device": ["pure 2/4"]}}
        ),
        "bytes after the end": our(packed + b"\xc0"),
        "nothing but a signature": our(packed)[:64],
        "the last byte missing": our(packed)[:-1],
    }
    flipped = bytearray(our(packed))
    flipped[70] ^= 1
    forged = {
        "a bit of the signature flipped": bytes([flipped[0] ^ 1]) + our(packed)[1:],
        "a digit of the body flipped": _flip_body(our(packed), first.body),
        "signed without the prefix": DEVICE.sign(packed) + packed,
        "signed by another device": OTHER.sign(b"crowdml/envelope/1" + packed) + packed,
    }
    return {
        "prefix": "crowdml/envelope/1",
        "largest_body": LARGEST_BODY,
        "largest_envelope": LARGEST_ENVELOPE,
        "valid": valid,
        "malformed": [{"name": name, "signed": data.hex(), "problem": _slug(data)} for name, data in bad.items()],
        "forged": [
            {"name": name, "signed": data.hex(), "public": DEVICE.public.hex()} for name, data in forged.items()
        ],
    }


def _flip_body(data: bytes, body: bytes) -> bytes:
    at = data.index(body) + len(body) - 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _slug(data: bytes) -> str:
    try:
        open_signed(data)
    except Problem as problem:
        return problem.slug
    raise AssertionError("A vector that should be refused is not.")


def receipts() -> Any:
    """A journal of seven check-ins: three committed together, then one alone, then three."""
    task = TASKS["gaussian"].hash
    chain, links = chain_start(task), []
    who = [
        (DEVICE.id, 1),
        (OTHER.id, 1),
        (DEVICE.id, 2),
        (DEVICE.id, 3),
        (OTHER.id, 2),
        (OTHER.id, 3),
        (DEVICE.id, 2**40),
    ]
    for index, (device, seq) in enumerate(who, 1):
        hash_ = hashlib.sha256(f"{device} {seq}".encode()).digest()
        chain = chain_next(chain, task, device, seq, hash_)
        links.append(Receipt(task, device, seq, index, hash_, chain))
    rows: list[Any] = []
    for first, last in ((0, 3), (3, 4), (4, 7)):
        for data in sign_receipts(task, links[first:last], SERVER_KEY):
            receipt = open_receipt(data)
            rows.append({
                "device": receipt.device, "seq": receipt.seq, "index": receipt.index, "hash": receipt.hash.hex(),
                "chain": receipt.chain.hex(), "path": receipt.path.hex(), "signature": receipt.signature.hex(),
                "encoded": data.hex(),
            })  # fmt: skip
    return {
        "journal_prefix": "crowdml/journal/1",
        "receipts_prefix": "crowdml/receipts/1",
        "server_key": SERVER_KEY.public.hex(),
        "task": task.hex(),
        "chain_0": chain_start(task).hex(),
        "receipts": rows,
    }


def requests() -> Any:
    now = 1_800_000_000
    asked = [
        ("GET", f"/v1/devices/{DEVICE.id}/statement", b""),
        ("GET", f"/v1/tasks/{TASKS['gaussian'].hash.hex()}/chain?from=0&to=3", b""),
        ("POST", f"/v1/devices/{DEVICE.id}/withdraw", b"\x80"),
    ]
    tasks = tuple(sorted(task.hash.hex() for task in TASKS.values()))
    enrolments: list[Any] = []
    for code, wanted in (("C0DE-for-one", ()), ("AB12", tasks)):
        body, signature = enrol(DEVICE, code, wanted)
        enrolments.append({"code": code, "tasks": list(wanted), "body": body.hex(), "signature": signature})
    answer = Enrolled(DEVICE.id, SERVER_KEY.public, tasks)
    return {
        "secret": (b"\x01" * 32).hex(),
        "skew": SKEW,
        "request_prefix": REQUEST_PREFIX.decode(),
        "enrol_prefix": ENROL_PREFIX.decode(),
        "owner_prefix": OWNER_PREFIX.decode(),
        "authorization": [
            {"method": method, "target": target, "body": body.hex(), "seconds": now,
             "header": authorize(DEVICE, method, target, body, now=now)}
            for method, target, body in asked
        ],
        "enrolment": enrolments,
        "enrolled": {"device": DEVICE.id, "server_key": SERVER_KEY.public.hex(), "tasks": list(tasks),
                     "encoded": answer.encode().hex()},
        "owner_link": [
            {"device": DEVICE.id, "at": now, "for": lasts, "query": owner_link(DEVICE, now, lasts)}
            for lasts in (1, 900)
        ],
    }  # fmt: skip


def messages() -> Any:
    return [
        {"task": name, "kind": message.kind, "fields": readable(message), "body": encode(message).hex()}
        for name in TASKS
        for message in contribution(name, "eighths")
    ]


def rounds() -> Any:
    """A round of five devices of which one vanishes before it masks: every message of it, and the views around them."""
    fields = (MaskedField("gradient", 3, 32, 1000, 10), MaskedField("counts", 2, 64, 1000, 10))
    terms = Terms(TASKS["gaussian"].hash, fields, smallest=4, largest=5, survivors=4, colluders=0)
    secrets = [bytes([n]) * 32 for n in range(11, 16)]
    crowd = {key.id: (secret, key) for secret, key in ((each, Key.from_secret(each)) for each in secrets)}
    roots = {one: hashlib.sha256(b"root " + secret).digest() for one, (secret, _) in crowd.items()}
    vectors = {
        one: {"gradient": np.array([n, -n, 1000 - n]), "counts": np.array([n, n * n])}
        for n, one in enumerate(sorted(crowd), 1)
    }
    said: list[Any] = []
    views: list[Any] = []
    here = summer.begin(7)
    there: dict[str, masker.DeviceRound] = {}
    gone = sorted(crowd)[2]
    offered = (3, "sgd/params/1", b"\x80")
    hashed = publication_hash(*offered)

    def deliver(kind: str) -> None:
        nonlocal here
        for one in sorted(there):
            said.append({"from": one, "to": SERVER, "kind": kind, "body": there[one].sent.hex()})
            here = summer.hear(terms, here, one, open_message(kind, there[one].sent))
        here = summer.close(terms, here, hashed)

    def tell(step: Any) -> None:
        for one in sorted(there):
            message = summer.tell(terms, here, one)
            assert message is not None
            body = pack_secagg(message)
            said.append({"from": SERVER, "to": one, "kind": message.kind, "body": body.hex()})
            if one == sorted(there)[0]:
                published = offered if here.phase == "mask" else None
                view(RoundView(7, here.phase, message.kind, body, 30_000, 150, published))
            there[one] = step(one, there[one], message)

    def view(made: RoundView) -> None:
        version, kind, body = made.publication or (None, None, b"")
        shown = None if version is None else {"version": version, "kind": kind, "body": body.hex()}
        views.append({
            "round": made.round, "phase": made.phase, "kind": made.kind, "body": made.body.hex(), "closes": made.closes,
            "wait": made.wait, "publication": shown, "why": made.why, "encoded": made.encode().hex(),
        })  # fmt: skip

    view(RoundView(7, "advertise", closes=60_000, wait=5_000, why="0 of 4 to 5 devices are here"))
    for one, (_, key) in sorted(crowd.items()):
        there[one] = masker.advertise(terms, 7, key, after=6, entropy=lambda size, one=one: roots[one][:size])
    deliver("secagg/advert/1")
    tell(lambda one, state, message: masker.share(terms, state, message))
    deliver("secagg/shares/1")
    tell(lambda one, state, message: masker.mask(terms, masker.hold(terms, state, message, hashed), vectors[one]))
    del there[gone]
    deliver("secagg/masked/1")
    tell(lambda one, state, message: masker.agree(terms, state, crowd[one][1], message))
    deliver("secagg/agreement/1")
    tell(lambda one, state, message: masker.reveal(terms, state, message))
    deliver("secagg/reveal/1")
    assert here.phase == "summed"
    view(RoundView(7, "summed"))
    view(RoundView(7, "abandoned", why="3 devices survived; 4 are needed"))
    return {
        "task": terms.task.hex(), "round": 7, "smallest": 4, "largest": 5, "survivors": 4, "colluders": 0,
        "fields": [
            {"tag": each.tag, "length": each.length, "bits": each.bits, "bound": each.bound, "slack": each.slack}
            for each in fields
        ],
        "devices": [
            {"secret": crowd[one][0].hex(), "id": one, "root": roots[one].hex(),
             "vectors": {tag: vector.tolist() for tag, vector in vectors[one].items()}}
            for one in sorted(crowd)
        ],
        "missing": gone, "publication_hash": hashed.hex(), "messages": said,
        "sum": {tag: found.tolist() for tag, found in summer.sums(terms, here).items()},
        "largest_view": LARGEST_VIEW, "views": views,
    }  # fmt: skip


def letters() -> Any:
    """A letter from the device at place 2 to its peers, and the mailbox of who stands at place 4."""
    key = Key.from_secret(bytes([21]) * 32)
    said = Proportions(Release(np.array([3, -1, 9], np.int32), RECEIVED), np.int32(2), np.int32(0))
    to = frozenset(("@0", "@1", "@4", "@17"))
    envelope = Envelope(TASKS["laplace"].hash, key.id, to, 1, "proportions/counts/1", encode(said))
    signed = sign(envelope, Statement(("pure 1/10",), 8, ("pure 1/10",)), key)
    box = Mailbox(9, (Letter(7, key.public, signed),))
    return {
        "most_letters": MOST_LETTERS, "most_bytes": MOST_LETTER_BYTES, "place": 2,
        "letter": {"index": 7, "secret": (bytes([21]) * 32).hex(), "key": key.public.hex(), "sender": key.id,
                   "to": sorted(to), "counts": [3, -1, 9], "batch": 0, "body": envelope.body.hex(),
                   "signed": signed.hex()},
        "last": box.last, "encoded": box.encode().hex(), "empty": Mailbox(9).encode().hex(),
        "held": {"places": [[2, key.id], [17, DEVICE.id]], "encoded": pack_held({17: DEVICE.id, 2: key.id}).hex()},
    }  # fmt: skip


def protocol_sgd() -> Any:
    """From a task to integers: everything that a device computes before the noise, and the noise it then draws."""
    cases: list[Any] = []
    for name, task in TASKS.items():
        fixed = sgd.plan(task)
        gradient = fixed.table["gradient"]
        assert isinstance(gradient, GridGaussian | GridLaplace)
        expected = sgd.protocol.expected(task)["sgd/gradient/1"]
        rows: dict[str, Any] = {}
        for row, mechanism in fixed.table.items():
            noise = (
                {"law": "discrete-gaussian", "sigma": str(mechanism.sigma)}
                if isinstance(mechanism, GridGaussian)
                else {"law": "discrete-laplace", "scale": str(getattr(mechanism, "scale", Fraction(0)))}
            )
            rows[row] = {
                "first": mechanism.covers.start, "stop": mechanism.covers.stop, "noise": noise,
                "loss": str(mechanism.loss), "device_loss": str(mechanism.device_loss),
                "shape": list(expected[row].shape), "low": expected[row].low, "high": expected[row].high,
            }  # fmt: skip
        runs: list[Any] = []
        for weights in WEIGHTS:
            params, sums = contribution(name, weights)
            _check_margins(task, params.weights, BATCHES[name])
            runs.append({"weights": array(params.weights), "version": params.version, "without_noise": readable(sums)})
        cases.append({
            "name": name, "task": task.canonical.decode(), "hash": task.hash.hex(),
            "grid": str(gradient.grid.step), "clip": gradient.clip,
            "norm": "l2" if isinstance(gradient, GridGaussian) else "l1",
            "rows": rows,
            "statement": {"after_1": statement(name, 1).plain(), "after_3": statement(name, 3).plain()},
            "x": array(BATCHES[name].x), "y": BATCHES[name].y.tolist(), "runs": runs,
        })  # fmt: skip
    return cases


def _check_margins(task: Task, weights: Any, batch: Samples) -> None:
    """No entry may lie so near to a whole number that another machine's `exp` could truncate it otherwise."""
    fixed = sgd.plan(task)
    gradient = fixed.table["gradient"]
    assert isinstance(gradient, GridGaussian | GridLaplace)
    used = batch[gradient.covers.start : gradient.covers.stop]
    exact = Samples(used.x.astype(np.float64), used.y)
    rows = fixed.model.gradients(weights.astype(np.float64), exact) / float(gradient.grid.step)
    size = np.abs(rows).sum((1, 2)) if isinstance(gradient, GridLaplace) else np.sqrt((rows**2).sum((1, 2)))
    scaled = rows * np.minimum(1, gradient.clip / size)[:, None, None]
    apart = np.abs(scaled - np.round(scaled))
    assert ((apart > 1e-3) | (apart == 0)).all(), "Choose other samples: a vector must be the same on every machine."


FALLS: dict[str, tuple[Statement, Statement]] = {
    "the same": (Statement(("pure 1",), 10, ("pure 1/10",)), Statement(("pure 1",), 10, ("pure 1/10",))),
    "more of everything": (Statement(("zcdp 1/3",), 10, ("zcdp 1/30",)), Statement(("zcdp 2/5",), 11, ("zcdp 1/29",))),
    "fewer samples": (Statement(("pure 1",), 10, ("pure 1/10",)), Statement(("pure 1",), 9, ("pure 1/10",))),
    "a smaller device total": (
        Statement(("pure 1",), 10, ("pure 1/10",)),
        Statement(("pure 99/100",), 10, ("pure 1",)),
    ),
    "a smaller dearest sample": (
        Statement(("pure 1",), 10, ("pure 1/10",)),
        Statement(("pure 9",), 20, ("pure 1/11",)),
    ),
    "a kind is gone": (Statement(("pure 1", "zcdp 1"), 10, ("zcdp 1",)), Statement(("zcdp 9",), 20, ("zcdp 1",))),
    "a kind of zero is gone": (Statement(("pure 1", "renyi 2:0,4:0"), 1, ()), Statement(("pure 1",), 1, ())),
    "a new kind": (Statement(("pure 1",), 10, ("pure 1",)), Statement(("pure 1", "zcdp 1"), 20, ("pure 1", "zcdp 1"))),
    "unbounded is gone": (Statement(("unbounded",), 10, ()), Statement(("pure 9",), 20, ())),
    "a smaller order": (Statement(("renyi 2:1,4:3",), 1, ()), Statement(("renyi 2:1,4:2",), 2, ())),
    "an order between two": (Statement(("renyi 2:1,8:3",), 1, ()), Statement(("renyi 2:2,4:3",), 2, ())),
    "an order between two, smaller": (Statement(("renyi 2:1,8:3",), 1, ()), Statement(("renyi 2:2,4:2",), 2, ())),
    "fewer orders": (Statement(("renyi 2:1,8:3",), 1, ()), Statement(("renyi 2:1",), 2, ())),
}
"""An earlier and a later statement of one device."""


def statements() -> Any:
    """Pairs of packed statements, and whether the totals of the later one fell."""
    packed = {name: tuple(pack(each.plain()) for each in pair) for name, pair in FALLS.items()}
    return [
        {"name": name, "before": before.hex(), "now": now.hex(), "fell": totals_fell(before, now)}
        for name, (before, now) in packed.items()
    ]


def problems() -> Any:
    example = Problem("seq-gap", "Seq 9 arrived, and 7 is next.", expected=7)
    return {
        "example": {"status": example.status, "body": example.encode().decode()},
        "problems": {
            slug: {"type": f"/problems/{slug}", "status": row.status, "title": row.title, "help": row.help}
            for slug, row in sorted(PROBLEMS.items())
        },
    }


# --- schemas: the JSON form of what travels; on the wire it is msgpack, and bytes are bytes ---


def hexes(size: int | None = None) -> dict[str, Any]:
    return {"type": "string", "pattern": "^[0-9a-f]*$" if size is None else f"^[0-9a-f]{{{2 * size}}}$"}


def record(title: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": title, "type": "object",
        "properties": properties, "required": sorted(properties), "additionalProperties": False, **more,
    }  # fmt: skip


ARRAY = {
    "type": "object",
    "description": "On the wire: [dtype, shape, little-endian bytes in row-major order].",
    "properties": {
        "dtype": {"enum": ["<i4", "<f4"]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "values": {"type": "array", "items": {"type": "number"}},
    },
    "required": ["dtype", "shape", "values"],
    "additionalProperties": False,
}
ADDRESS = {"type": "string", "pattern": "^([0-9a-f]{32}|server|@(0|[1-9][0-9]{0,5}))$"}
DEVICE_ID = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
WHOLE = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
LOSSES = {"type": "array", "maxItems": 4, "items": {"type": "string", "maxLength": 4096}}


def schemas() -> dict[str, Any]:
    statement_schema = record(
        "statement", {"dearest": LOSSES, "device": LOSSES, "samples": {"type": "integer", "minimum": 0}}
    )
    del statement_schema["$schema"]
    tasks = {"type": "array", "maxItems": 64, "items": hexes(32)}
    found = {
        "envelope": record("envelope", {
            "body": hexes(), "kind": {"type": "string", "maxLength": 64}, "sender": DEVICE_ID, "seq": WHOLE,
            "statement": statement_schema, "task": hexes(32),
            "to": {"type": "array", "items": ADDRESS, "minItems": 1, "maxItems": 1024, "uniqueItems": True},
        }),
        "receipt": record("receipt", {
            "chain": hexes(32), "device": DEVICE_ID, "hash": hexes(32), "index": WHOLE,
            "path": {"type": "string", "pattern": f"^(0[01][0-9a-f]{{{2 * STEP - 2}}}){{0,{MOST_STEPS}}}$"},
            "seq": WHOLE, "signature": hexes(64), "task": hexes(32),
        }),
        "enrolment": record(
            "enrolment",
            {"code": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"}, "key": hexes(32), "tasks": tasks},
            required=["code", "key"],
        ),
        "enrolled": record("enrolled", {"device": DEVICE_ID, "server_key": hexes(32), "tasks": tasks}),
        "round-view": record("round-view", {
            "body": hexes(), "closes": {"type": "integer", "minimum": 0}, "kind": {"type": "string", "maxLength": 64},
            "phase": {"enum": list(PHASES)},
            "publication": {"anyOf": [{"type": "null"}, {
                "type": "object", "properties": {"version": {"type": "integer", "minimum": 0},
                                                 "kind": {"type": "string", "maxLength": 64}, "body": hexes()},
                "required": ["body", "kind", "version"], "additionalProperties": False,
                "description": "On the wire: [] or [version, kind, body].",
            }]},
            "round": WHOLE, "wait": {"type": "integer", "minimum": 0}, "why": {"type": "string", "maxLength": 1024},
        }),
        "mailbox": record("mailbox", {
            "last": {"type": "integer", "minimum": 0},
            "letters": {"type": "array", "maxItems": MOST_LETTERS, "items": {
                "type": "object", "properties": {"index": WHOLE, "key": hexes(32), "signed": hexes()},
                "required": ["index", "key", "signed"], "additionalProperties": False,
                "description": "On the wire: [index, key, signed].",
            }},
        }),
        "problem": record("problem", {
            "type": {"enum": [f"/problems/{slug}" for slug in sorted(PROBLEMS)]}, "title": {"type": "string"},
            "status": {"type": "integer", "minimum": 400, "maximum": 599}, "detail": {"type": "string"},
        }, additionalProperties={"type": ["string", "number", "boolean"]}),
    }  # fmt: skip
    for message in contribution("gaussian", "eighths"):
        found[message.kind.replace("/", "-")] = _message_schema(message)
    return found


def _message_schema(message: Any) -> dict[str, Any]:
    """From the class: which fields, which may be nil; from an example: which are arrays."""
    properties: dict[str, Any] = {}
    for name, hint in sorted(get_type_hints(KINDS[message.kind], include_extras=True).items()):
        value = getattr(message, name)
        released = any(get_origin(part) is Release for part in (hint, *get_args(hint)))
        schema = ARRAY if released or not isinstance(value, int) else {"type": "integer", "minimum": 0}
        properties[name] = {"anyOf": [schema, {"type": "null"}]} if type(None) in get_args(hint) else schema
    return record(message.kind, properties)


def build() -> dict[str, str]:
    """Every file of spec/ by its name."""
    vectors = {
        "keys": keys(), "envelopes": envelopes(), "receipts": receipts(), "requests": requests(),
        "messages": messages(), "rounds": rounds(), "letters": letters(), "sgd": protocol_sgd(), "problems": problems(),
        "statements": statements(), "machine": machine_vectors.build(), **device_vectors.build(),
        **sensing_vectors.build(),
    }  # fmt: skip
    files = {f"vectors/{name}.json": value for name, value in vectors.items()}
    files |= {f"schemas/{name}.json": value for name, value in schemas().items()}
    return {name: json.dumps(value, indent=1, ensure_ascii=False) + "\n" for name, value in files.items()}


def main() -> None:
    files = build()
    for name, text in files.items():
        path = SPEC / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for path in SPEC.rglob("*.json"):
        if path.relative_to(SPEC).as_posix() not in files:
            path.unlink()
    sys.stderr.write(f"Wrote {len(files)} files to spec/.\n")


if __name__ == "__main__":
    main()
