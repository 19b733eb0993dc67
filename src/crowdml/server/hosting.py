"""How the state of a hosted task may change: one table for the command line, the hub and the portal."""

from __future__ import annotations

from collections.abc import Callable

from crowdml.errors import CrowdmlError
from crowdml.storage.server import State

__all__ = ["CHANGES", "ChangeError", "next_state", "useful_changes"]

CHANGES: dict[str, tuple[State, tuple[State, ...]]] = {
    "start": ("running", ("draft", "running", "paused", "stopped")),
    "resume": ("running", ("running", "paused")),
    "pause": ("paused", ("running", "paused")),
    "stop": ("stopped", ("draft", "running", "paused", "stopped")),
}
"""What an operator may ask for: the state that it leads to, and the states that it may begin from. The state that it
leads to is one of them, so asking twice does no harm."""


class ChangeError(CrowdmlError):
    """A change of state that the table does not have, or that a task's own rule forbids."""


def next_state(change: str, name: str, state: State, why_ended: Callable[[], str | None]) -> State:
    """The state that a change of task `name` leads to. `why_ended` is asked only where a task that stands may go on."""
    to, begins = CHANGES[change]
    why = why_ended() if to not in (state, "stopped") and state in ("paused", "stopped") else None
    if why is not None:
        raise ChangeError(f"Task {name} has ended: {why}. Change something in it to run it again.")
    if state not in begins:
        stands = "is stopped" if state == "stopped" else "has not begun"
        raise ChangeError(
            f"Task {name} {stands}, so there is nothing to {change}. Start it first: with `crowdml task start {name}`, "
            "or on its page."
        )
    return to


def useful_changes(state: State) -> list[str]:
    """The changes that do something in this state, for buttons: of two that lead to the same state the closer one."""
    found = {to: change for change, (to, begins) in CHANGES.items() if state in begins and to != state}
    return list(found.values())
