"""Rounds of uploads and timers on a device: it gives once a round, and is woken when its protocol asked to be."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from crowdml.protocol import Wake

__all__ = ["Timers", "wait_for_round"]

SOONEST = 1.0
"""Seconds: no timer runs out sooner, so that a protocol that always asks to be woken leaves time for other work."""


async def wait_for_round(
    gave: int | None,
    look: Callable[[], Awaitable[int]],
    rest: Callable[[int], Awaitable[None]],
    tell: Callable[[str], None],
    draws: Callable[[int, int], bool] | None = None,
) -> int:
    """Until a round is open that this device did not give to and for which it is drawn. Nothing is charged meanwhile.

    `look` reads which round is open, and `rest` lets time pass, longer after each look. `draws` says whether a device
    that found a round open at so many looks is drawn for it; without it every device is. The round; -1: any.
    """
    looks, seen, found = 0, 0, -1
    while gave is not None or draws is not None:
        before, found = found, await look()
        seen = seen + 1 if found == before else 0
        if found != gave and (draws is None or found < 0 or draws(found, seen)):
            return found
        if not looks:
            why = f"gave to round {gave}" if found == gave else f"is not drawn for round {found}"
            tell(f"waiting, uncharged: this device {why}, which is open until enough others gave")
        await rest(looks)
        looks += 1
    return -1


class Timers:
    """What a device's protocol asked to be woken for: a tag, and when, by the device's clock."""

    def __init__(self, kept: Mapping[str, float] | None = None) -> None:
        self.due: dict[str, float] = dict(kept or {})

    def set(self, wakes: Iterable[Wake], now: float) -> list[str]:
        """Set a timer for each; the tags. One with the same tag takes the place of the earlier one."""
        asked = {wake.tag: now + max(SOONEST, float(wake.after)) for wake in wakes}
        self.due.update(asked)
        return list(asked)

    def left(self, now: float, among: Iterable[str] | None = None) -> float | None:
        """Seconds until the first of them runs out, or the first `among` these; None: nobody waits for one."""
        tags = self.due.keys() if among is None else self.due.keys() & set(among)
        return min((max(0.0, self.due[tag] - now) for tag in tags), default=None)

    def take(self, now: float) -> str | None:
        """The tag of a timer that ran out, the earliest first; it is heard once. None: none has."""
        tag = min((tag for tag, due in self.due.items() if due <= now), key=self.due.__getitem__, default=None)
        if tag is not None:
            del self.due[tag]
        return tag
