"""Timers on a device: its protocol asked to be woken, after so many seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from crowdml.protocol import Wake
from crowdml.records import record

SOONEST = 1.0
"""Seconds: no timer runs out sooner, so that a protocol that always asks to be woken leaves time for other work."""


@record
class Timers:
    """What a device's protocol asked to be woken for: a tag, and when, by the device's clock."""

    due: Mapping[str, float] = field(default_factory=dict)

    def set(self, wakes: Iterable[Wake], now: float) -> tuple[Timers, tuple[str, ...]]:
        """With a timer for each; and the tags. One with the same tag takes the place of the earlier one."""
        asked = {wake.tag: now + max(SOONEST, float(wake.after)) for wake in wakes}
        return (Timers({**self.due, **asked}) if asked else self), tuple(asked)

    def left(self, now: float, among: Iterable[str] | None = None) -> float | None:
        """Seconds until the first of them runs out, or the first `among` these; None: nobody waits for one."""
        tags = self.due.keys() if among is None else self.due.keys() & set(among)
        return min((max(0.0, self.due[tag] - now) for tag in tags), default=None)

    def take(self, now: float) -> tuple[Timers, str | None]:
        """Without the timer that ran out first, and its tag, so that it is heard once. None: none has run out."""
        tag = min((tag for tag, due in self.due.items() if due <= now), key=self.due.__getitem__, default=None)
        if tag is None:
            return self, None
        return Timers({each: due for each, due in self.due.items() if each != tag}), tag
