"""Devices that stand at places and write to one another by hand, over real HTTP."""

from __future__ import annotations

from typing import Any

import numpy as np
from device import Answer, Device

from crowdml.messages import SERVER, encode
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocol import address_of
from crowdml.protocols import find
from crowdml.protocols.proportions import Proportions
from crowdml.task import Task
from crowdml.wire.letters import Mailbox, open_held, open_mailbox


def path_of(task: Task, rest: str) -> str:
    return f"/v1/tasks/{task.hash.hex()}{rest}"


def claim(device: Device, place: int, task: Task) -> Answer:
    return device.signed("POST", path_of(task, f"/places/{place}"))


def letter(device: Device, place: int, task: Task, counts: Any = (3, 2, 1), **changes: Any) -> bytes:
    """A check-in from `place`; `to`, `batch`, `dtype` and fields of the envelope can be made to differ."""
    batch = changes.pop("batch", device.seq)
    array = np.array(counts, changes.pop("dtype", np.int32))
    peers = find(task).peers
    assert peers is not None
    names = peers(task)
    to = frozenset(map(address_of, names[place])) if names and 0 <= place < len(names) else frozenset((SERVER,))
    body = encode(Proportions(Release(array, RECEIVED), np.int32(place), np.int32(batch)))
    fields = {"to": to, "kind": "proportions/counts/1", "body": body, **changes}
    return device.envelope(task, **fields)


def say(device: Device, place: int, task: Task, **changes: Any) -> Answer:
    answer = device.send(task, letter(device, place, task, **changes))
    if answer.status == 202:
        device.seq = answer.receipt.seq
    return answer


def held(device: Device, task: Task) -> dict[int, str]:
    answer = device.signed("GET", path_of(task, "/places"))
    assert answer.status == 200, answer.body
    return open_held(answer.body)


def mailbox(device: Device, after: int | None, task: Task) -> Mailbox:
    answer = device.signed("GET", path_of(task, "/mailbox" if after is None else f"/mailbox?after={after}"))
    assert (answer.status, answer.headers["cache-control"]) == (200, "no-store")
    return open_mailbox(answer.body)
