"""The protocols: one pure module each. None imports another; what several are made of is in `parts`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module

from crowdml.errors import TaskError
from crowdml.protocol import Protocol, check_budget
from crowdml.task import Task


class _Protocols(Mapping[str, Protocol]):
    """Each is imported when it is asked for: a device needs one of them, and starts faster without the others."""

    names = ("admm", "gram", "local_updates", "proportions", "sgd")

    def __getitem__(self, name: str) -> Protocol:
        if name not in self.names:
            raise KeyError(name)
        return import_module(f"crowdml.protocols.{name}").protocol

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names


PROTOCOLS = _Protocols()
"""Every protocol by its name in task files."""


@lru_cache(maxsize=256)
def find(task: Task) -> Protocol:
    """The protocol that this task asks for, after it has checked the task: once, for that takes milliseconds."""
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
