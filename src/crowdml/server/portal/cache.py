"""What the portal keeps in memory between requests: figures, pictures, pages, open live pages. All bounded."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from crowdml.channels import combining
from crowdml.server.hub import Hub
from crowdml.server.plot_points import read_moments
from crowdml.server.portal.figures import Figures, draw, work_out
from crowdml.server.portal.words import Words
from crowdml.server.sifting import ROUNDS, Sifted, sift_rounds
from crowdml.server.validation import watched
from crowdml.task import Task
from crowdml.wire.problems import Problem

FRESH = 1.0
"""Seconds for which figures are not read again."""
DRAWN = 10.0
"""Seconds for which a picture is not drawn again, however often it is asked for."""
MOST_PICTURES, MOST_PAGES = 256, 128
MOST_LINKS = 10_000
"""Most owners' links that are opened in a quarter of an hour."""


@dataclass
class PortalCache:
    """One for each server."""

    hub: Hub
    streams: Counter[str] = field(default_factory=Counter[str])
    """Open live pages by address."""
    _figures: dict[bytes, tuple[float, Figures]] = field(default_factory=dict)
    _pictures: OrderedDict[tuple[Any, ...], tuple[float, int, bytes]] = field(default_factory=OrderedDict)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    _drawing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _pages: OrderedDict[tuple[str, ...], tuple[object, str]] = field(default_factory=OrderedDict)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closed: tuple[float, frozenset[bytes]] = (float("-inf"), frozenset())
    _sifted: dict[bytes, dict[int, Sifted]] = field(default_factory=dict)
    _sifting: asyncio.Lock = field(default_factory=asyncio.Lock)
    secret: bytes | None = None
    """Secret of the owners' sessions; see `owner`."""
    _opened: dict[tuple[str, int, int], float] = field(default_factory=dict)
    """Links of owners that were opened, and when they end by themselves."""

    async def figures(self, task: Task) -> Figures:
        """The figures of a task, at most a second old."""
        held = self._figures.get(task.hash)
        if held is None or time.monotonic() - held[0] > FRESH:
            async with self._reading:
                held = self._figures.get(task.hash)
                if held is None or time.monotonic() - held[0] > FRESH:
                    found = await asyncio.to_thread(self._read, task, None if held is None else held[1])
                    held = self._figures[task.hash] = time.monotonic(), found
        return held[1]

    def _read(self, task: Task, before: Figures | None) -> Figures:
        """In a thread: the figures as they are now; the very ones of before where nothing is new."""
        moments, seen = read_moments(self.hub.store, task.hash), watched(self.hub.store, task)
        devices = self.hub.store.participants(task.hash)
        if before is not None and moments and before.moments[-1:] == (moments[-1],) and before.watched == seen:
            return before if before.devices == devices else replace(before, devices=devices)
        return work_out(task, moments, seen, devices)

    async def sifted(self, task: Task) -> list[Sifted]:
        """What the rule of a gathered task made of its last rounds; each is worked out once."""
        runner = self.hub.runners.get(task.hash)
        if runner is None or combining(task) is None:
            return []
        async with self._sifting:
            known = self._sifted.get(task.hash, {})
            found = await asyncio.to_thread(sift_rounds, runner, known)
            self._sifted[task.hash] = dict(sorted(known.items())[-ROUNDS:])
        return found

    async def page(self, key: tuple[str, ...], shown: object, make: Callable[[], str]) -> str:
        """The page of this name, made anew only where `shown`, all that can be seen on it, is not what it was.

        It is made in a thread: a long page would hold up every check-in for as long as it takes.
        """
        found = self._pages.get(key)
        if found is None or found[0] != shown:
            async with self._writing:
                found = self._pages.get(key)
                if found is None or found[0] != shown:
                    found = self._pages[key] = shown, await asyncio.to_thread(make)
        self._pages.move_to_end(key)
        if len(self._pages) > MOST_PAGES:
            self._pages.popitem(last=False)
        return found[1]

    async def closed(self, task: Task) -> bool:
        """Whether only devices that joined may read what the task publishes; at most a second old."""
        if time.monotonic() - self._closed[0] > FRESH:
            found = await asyncio.to_thread(self.hub.store.tasks)
            self._closed = time.monotonic(), frozenset(each.hash for each in found if each.closed)
        return task.hash in self._closed[1]

    async def picture(self, task: Task, name: str, said: Words, theme: str, kind: str) -> bytes:
        """A plot, drawn once for each moment and at most every `DRAWN` seconds."""
        figures = await self.figures(task)
        key = task.hash, name, said.language, theme, kind

        def held() -> bytes | None:
            at, index, data = self._pictures.get(key, (0.0, -1, b""))
            return data if index == figures.index or (data and time.monotonic() - at < DRAWN) else None

        found = held()
        if found is None:
            async with self._drawing:
                found = held()
                if found is None:
                    found = await asyncio.to_thread(draw, name, figures, said, theme, kind)
                    self._pictures[key] = time.monotonic(), figures.index, found
                    self._pictures.move_to_end(key)
                    if len(self._pictures) > MOST_PICTURES:
                        self._pictures.popitem(last=False)
        return found

    def open_once(self, device: str, at: int, lasts: int, now: float) -> bool:
        """Whether this owner's link is opened for the first time since the server started; from now on it is not.

        A link is forgotten when it no longer holds. Only devices make links that get here, so they are few.
        """
        link = device, at, lasts
        if self._opened.get(link, 0.0) > now:
            return False
        if len(self._opened) >= MOST_LINKS:
            self._opened = {each: ends for each, ends in self._opened.items() if ends > now}
        if len(self._opened) >= MOST_LINKS:
            raise Problem("busy", "Many owners look at their devices at once.", retry_after=60)
        self._opened[link] = at + lasts
        return True

    async def owner_secret(self, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """The secret behind owners' sessions, read or made once."""
        if self.secret is None:
            self.secret = await make()
        return self.secret


def kept(request: Request) -> PortalCache:
    """What this server's portal keeps."""
    state = request.app.state
    if not hasattr(state, "kept"):
        state.kept = PortalCache(state.hub)
    return state.kept
