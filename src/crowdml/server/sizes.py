"""How large messages of a task may be, and whether a server takes them: from the task alone, before any array is made.

Without the server's own libraries, so that a task file can be checked where no server is installed.
"""

from __future__ import annotations

from crowdml.errors import TaskError
from crowdml.protocol import Protocol
from crowdml.secagg.sealed import SEALED_SIZE
from crowdml.secagg.terms import Terms, terms_of
from crowdml.task import Task
from crowdml.wire.envelopes import LARGEST_AROUND, LARGEST_BODY
from crowdml.wire.validate import Expected, largest_body

LARGEST_CHECK_IN = 4 * 2**20
"""Bytes of a check-in without masks that a server takes, where its operator says nothing else."""
ADDRESS = 8
"""Bytes of the longest place in an envelope's `to`."""
AROUND_VECTOR = 128
"""Bytes that a masked message has around its vector, at most."""


def check_sizes(task: Task, protocol: Protocol, most: int = LARGEST_CHECK_IN) -> None:
    """Refuse a task none of whose check-ins would be taken: devices would be charged for nothing."""
    if protocol.is_masked(task):
        check_masked(task, terms_of(task, protocol.mechanisms(task)))
        return
    size = largest_check_in(protocol.expected(task), len(task.places))
    if size > most:
        raise TaskError(
            f"task {task.name!r}: a check-in has up to {size:,} bytes, and a server takes at most {most:,}. "
            "Let it learn fewer weights: fewer features, classes or hidden units."
        )


def check_masked(task: Task, terms: Terms) -> None:
    """Refuse a task whose masked vectors no envelope carries."""
    if terms.size + AROUND_VECTOR > LARGEST_BODY:
        raise TaskError(
            f"task {task.name!r}: a masked vector of this task has {terms.size:,} bytes, and an envelope carries "
            f"{LARGEST_BODY:,}. Mask fewer entries."
        )


def largest_check_in(expected: Expected, recipients: int = 0) -> int:
    """Bytes of the largest check-in without masks that could be as expected, with its signature."""
    return LARGEST_AROUND + ADDRESS * recipients + largest_body(expected)


def largest_message(terms: Terms) -> int:
    """Bytes of the largest envelope of a round: shares for everybody else."""
    return LARGEST_AROUND + min(LARGEST_BODY, 1024 + (terms.largest - 1) * SEALED_SIZE)


def largest_masked(terms: Terms) -> int:
    """Bytes of a masked check-in, whole."""
    return LARGEST_AROUND + AROUND_VECTOR + terms.size
