"""Where the devices of a task stand, for people to look at: who is there, who fell silent, and how much was said.

From the public list of places and from when each of them last checked in; nothing of what was said there. A place is
silent if its last letter is much older than is usual among the others: devices that sense once a day are not dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from math import cos, radians
from statistics import median

import numpy as np
from markupsafe import Markup

from crowdml.server.hub import Hub
from crowdml.server.relay import PlaceFigures
from crowdml.task import Task

PATIENCE = 10.0
"""Seconds by which a letter may be older than the newest one, whatever the others do."""
OFTEN = 4.0
"""Times as old as in the middle, beyond which a letter is old."""
MOST_LINKED, MOST_NAMED, MOST_MOVED = 80, 1_000, 200
"""Places on a map that shows who writes to whom; one whose dots say their names; one whose dots make room."""
WIDE, HIGH, EDGE = 640.0, 420.0, 14.0


@dataclass(frozen=True)
class PlaceRow:
    """`state` is `alive`, `silent` (it said something once) or `free` (nobody stands there, or never said a word)."""

    figures: PlaceFigures
    state: str
    peers: int


@dataclass(frozen=True)
class Places:
    """Every place of a task, in the order of its list."""

    rows: tuple[PlaceRow, ...]
    links: tuple[tuple[int, int], ...]
    """Pairs that write to each other, each once; none where there are too many to see."""

    def count(self, state: str) -> int:
        return sum(row.state == state for row in self.rows)

    @property
    def held(self) -> int:
        return sum(row.figures.is_held for row in self.rows)

    @property
    def letters(self) -> int:
        return sum(row.figures.letters for row in self.rows)

    @property
    def kilobytes(self) -> float:
        """Messages that devices sent."""
        return sum(row.figures.bytes for row in self.rows) / 1000

    @property
    def relayed(self) -> float:
        """Kilobytes that are there for peers to read: what each device sent, once for each of its peers."""
        return sum(row.figures.bytes * row.peers for row in self.rows) / 1000

    @property
    def heard(self) -> tuple[PlaceRow, ...]:
        """Those that said something, those that were heard of last first."""
        found = [row for row in self.rows if row.figures.letters]
        return tuple(sorted(found, key=lambda row: row.figures.last_at or "", reverse=True))


def places_of(hub: Hub, task: Task) -> Places | None:
    """In a thread: one short read. None of a task whose devices have no places."""
    runner = hub.runners.get(task.hash)
    if runner is None or runner.relay is None:
        return None
    found, relay = runner.relay.figures(), runner.relay
    at = {each.place: datetime.fromisoformat(each.last_at) for each in found if each.last_at is not None}
    newest = max(at.values(), default=None)
    ages = {} if newest is None else {place: (newest - when).total_seconds() for place, when in at.items()}
    late = max(PATIENCE, OFTEN * median(ages.values())) if ages else PATIENCE
    linked = relay.peers if len(found) <= MOST_LINKED else ()
    links = {(min(place, other), max(place, other)) for place, others in enumerate(linked) for other in others}
    return Places(
        tuple(PlaceRow(each, _state(each, ages.get(each.place), late), len(relay.peers[each.place])) for each in found),
        tuple(sorted(links)),
    )


def _state(place: PlaceFigures, age: float | None, late: float) -> str:
    if not place.letters:
        return "free"
    return "alive" if place.is_held and age is not None and age <= late else "silent"


def place_map(places: Places, title: str, states: dict[str, str]) -> Markup:
    """Dots where the places are, north above: filled for those that are alive, a ring for silent ones, small for free.

    Longitudes are drawn as wide as they are in the middle of the map. Dots that would cover each other stand side by
    side: those of one junction are a few metres apart.
    """
    where = tuple((row.figures.lat, row.figures.lon) for row in places.rows)
    shown = tuple((row.figures.name, row.state) for row in places.rows)
    return _drawn(where, shown, places.links, title, tuple(states.items()))


@lru_cache(maxsize=16, typed=True)
def _drawn(
    where: tuple[tuple[float, float], ...],
    shown: tuple[tuple[str, str], ...],
    links: tuple[tuple[int, int], ...],
    title: str,
    said: tuple[tuple[str, str], ...],
) -> Markup:
    """Drawn once for all who look, until somebody comes or falls silent: thousands of dots take a tenth of a second."""
    size = 7.0 if len(where) <= 40 else 5.0 if len(where) <= 300 else 3.0
    at, states = _side_by_side(_spots(where), 2 * size + 2), dict(said)
    named = len(at) <= MOST_NAMED
    lines = Markup("").join(
        Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}"/>').format(*at[one], *at[other])
        for one, other in links
    )
    dots = Markup("").join(
        Markup('<circle class="{s}" cx="{x:.1f}" cy="{y:.1f}" r="{r:g}">{t}</circle>').format(
            s=state,
            x=x,
            y=y,
            r=size / 2 if state == "free" else size,
            t=Markup("<title>{}: {}</title>").format(name, states[state]) if named else "",
        )
        for (name, state), (x, y) in zip(shown, at, strict=True)
    )
    high = max((y for _, y in at), default=0.0) + EDGE
    return Markup(
        '<svg class="map" viewBox="0 0 {w:g} {h:.0f}" role="img" aria-label="{t}"><g class="links">{l}</g>{d}</svg>'
    ).format(w=WIDE, h=high, t=title, l=lines, d=dots)


def _spots(where: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Latitude and longitude as x and y inside the map."""
    south, north = min(lat for lat, _ in where), max(lat for lat, _ in where)
    west, east = min(lon for _, lon in where), max(lon for _, lon in where)
    narrow = cos(radians((south + north) / 2))
    wide, tall = (east - west) * narrow, north - south
    scale = min((WIDE - 2 * EDGE) / wide if wide else 1e9, (HIGH - 2 * EDGE) / tall if tall else 1e9)
    scale = 0.0 if scale == 1e9 else scale
    left = (WIDE - wide * scale) / 2
    return tuple((left + (lon - west) * narrow * scale, EDGE + (north - lat) * scale) for lat, lon in where)


@lru_cache(maxsize=32)
def _side_by_side(spots: tuple[tuple[float, float], ...], apart: float) -> tuple[tuple[float, float], ...]:
    """Moved away from each other, a little at a time, where two are closer than `apart`; always in the same way."""
    if not 1 < len(spots) <= MOST_MOVED:
        return spots
    at = np.array(spots)
    turn = np.arange(len(at)) * 2.4  # radians: no two in the same direction, so that equal ones part
    at = at + 0.01 * np.stack([np.cos(turn), np.sin(turn)], axis=1)
    for _ in range(100):
        between = at[:, None] - at[None]
        far = np.hypot(between[..., 0], between[..., 1])
        np.fill_diagonal(far, np.inf)
        if far.min() >= apart - 0.5:
            break
        push = np.clip(apart - far, 0, None) / 2 / np.maximum(far, 1e-9)
        at = at + (between * push[..., None]).sum(1) * 0.5
        at = np.clip(at, EDGE, (WIDE - EDGE, np.inf))
    return tuple((float(x), float(y)) for x, y in at)
