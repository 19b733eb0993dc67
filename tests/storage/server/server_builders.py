"""Tasks, devices and check-ins for the tests of the server's store. Signatures are not the store's business."""

from __future__ import annotations

import hashlib

from crowdml.messages import SERVER, Envelope
from crowdml.storage.server import JournalRow, Store
from crowdml.wire.envelopes import open_signed, pack_envelope
from crowdml.wire.keys import device_id
from crowdml.wire.statements import Statement

NOW = "2025-01-31T12:00:00.000000+00:00"
LATER = "2025-01-31T13:30:00.000000+00:00"
CODE = hashlib.sha256(b"code").digest()
TASK = hashlib.sha256(b"a task").digest()


def key(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def name(number: int) -> str:
    return device_id(key(number))


def prepare(store: Store, devices: int = 3) -> bytes:
    """A running task and some enrolled devices."""
    task = store.add_task(b"a task", "digits", NOW, "running")
    store.invite(CODE, NOW, uses=devices, label="crowd")
    for number in range(devices):
        store.enrol(CODE, key(number), NOW)
    return task


def check_in(
    device: int, seq: int, text: str = "", size: int = 0, at: str = NOW, task: bytes = TASK, samples: int | None = None
) -> JournalRow:
    """A check-in whose body says who and what; `text` makes other bytes of it."""
    body = f"{device}:{seq}:{text}".encode().ljust(size, b".")
    envelope = Envelope(task, name(device), frozenset({SERVER}), seq, "sgd/gradient/1", body)
    data = bytes(64) + pack_envelope(
        envelope, Statement(("zcdp 1/10",), 10 * seq if samples is None else samples, ("pure 1/10",))
    )
    return JournalRow.of(open_signed(data), at)
