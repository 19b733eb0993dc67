"""The protocols: one pure module each. None imports another."""

from __future__ import annotations

from crowdml.errors import TaskError
from crowdml.protocol import Protocol, check_budget
from crowdml.protocols import admm, gram, sgd
from crowdml.task import Task

PROTOCOLS: dict[str, Protocol] = {"admm": admm.protocol, "gram": gram.protocol, "sgd": sgd.protocol}
"""Every protocol by its name in task files."""


def find(task: Task) -> Protocol:
    """The protocol that this task asks for, after it has checked the task."""
    kind = task.protocol["kind"]
    if kind not in PROTOCOLS:
        raise TaskError(f"protocol.kind = {kind!r}: choose one of {', '.join(PROTOCOLS)}.")
    protocol = PROTOCOLS[kind]
    if task.masking is not None and protocol.masked is None:
        raise TaskError(
            f"[masking] with protocol.kind = {kind!r}: its server needs single check-ins, and under masks it would "
            "hear sums alone. Leave [masking] out, or choose another protocol."
        )
    protocol.check(task)
    check_budget(protocol, task)
    return protocol


def settled(task: Task) -> Task:
    """The task as it is published and pinned: checked, and with what its protocol chose (the grid) written in."""
    return find(task).settle(task)
