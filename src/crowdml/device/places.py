"""Where a device stands, of a task that lists places: its owner says so once."""

from __future__ import annotations

from crowdml.errors import TaskError
from crowdml.protocol import Protocol
from crowdml.task import Task
from crowdml.texts import did_you_mean, one_line


def needs_place(task: Task, protocol: Protocol) -> bool:
    """Whether what a device of this task says is from a place of its list."""
    return protocol.peers is not None and bool(task.places) and task.masking is None


def find_place(task: Task, protocol: Protocol, wanted: str | None, known: int | None) -> int:
    """The place that an owner named, by its name or its number; or the one where this device stands already.

    -1 for a task without places.
    """
    if not needs_place(task, protocol):
        if wanted is not None:
            raise TaskError(f"--place {wanted}: task {task.name!r} has no places. Nothing was sent. Leave it out.")
        return -1
    names = [place.name for place in task.places]
    if wanted is None:
        if known is not None:
            return known
        raise TaskError(
            f"Task {task.name!r} wants to know where this device stands, and its list is public. Nothing was sent. "
            f"Say --place with one of: {_listed(names)}."
        )
    if wanted in names:
        found = names.index(wanted)
    elif wanted.isascii() and wanted.isdecimal() and int(wanted) < len(names):
        found = int(wanted)
    else:
        near = did_you_mean(wanted, names)
        raise TaskError(
            f"--place {wanted}: there is no such place.{near} Nothing was sent. The task lists {_listed(names)}."
        )
    if known is not None and found != known:
        raise TaskError(
            f"--place {wanted}: this device stands at {one_line(names[known])!r}, and stays there: its peers know it "
            "by that place. Nothing was sent. Leave --place out, or use another --folder for another device."
        )
    return found


def _listed(names: list[str]) -> str:
    shown = [f"{number} {one_line(name)}" for number, name in enumerate(names)]
    return "; ".join(shown if len(shown) <= 200 else [*shown[:199], f"... {len(shown) - 1} {one_line(names[-1])}"])
