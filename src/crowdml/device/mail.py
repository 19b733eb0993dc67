"""A device's mailbox: when it looks for letters of its peers, and what it makes of those that it heard."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from crowdml.device.client import Client, Unreachable
from crowdml.device.member import Clock, chance
from crowdml.wire.keys import Key
from crowdml.wire.problems import Problem

if TYPE_CHECKING:
    from crowdml.device.learning import Learner
    from crowdml.device.letters import Correspondence
    from crowdml.wire.letters import Letter

MOST_PAGES = 16
"""Answers of a mailbox that are read in a row: then the device's own work goes on."""
LOOK, LONGEST_LOOK = 1.0, 60.0
"""Seconds between two looks into the mailbox while samples are waited for: they double while nothing comes."""


class Mail:
    """What one device hears of its peers, and learns from it. Without `letters` nobody writes to it.

    `state` is where its protocol stands, `keep` writes another, `latest` is the newest window of its source.
    """

    def __init__(
        self,
        letters: Correspondence | None,
        learner: Learner | None,
        *,
        key: Key,
        client: Client,
        path: str,
        clock: Clock,
        state: Callable[[], Any],
        keep: Callable[[Any], Awaitable[None]],
        latest: Callable[[], Any],
        problems: Counter[str],
        tell: Callable[[str], None],
    ) -> None:
        self.letters, self.learner, self.look = letters, learner, LOOK
        self._key, self._client, self._path, self._clock = key, client, path, clock
        self._state, self._keep, self._latest, self._problems, self._tell = state, keep, latest, problems, tell
        self._read_by = 0.0
        """When the mailbox is read again, though letters come on another way."""

    @property
    def is_due(self) -> bool:
        return self._clock.now() >= self._read_by

    async def hear(self, *, anew: bool = True, mail: bool = True) -> int:
        """Hear what peers brought and what is in the mailbox; how many letters were heard. Then, or where there is
        something else, learn anew.

        What fails here stops nobody: the next look finds what this one did not.
        """
        heard = await self._hear_brought()
        heard += await self._read_mail() if mail else 0
        if self.learner is not None and (heard or anew):
            self.look = LOOK
            await asyncio.to_thread(self.learner.learn, self._state())
            if text := self._outlook():
                self._tell(text)
        return heard

    async def look_again(self) -> None:
        """A look while the device waits: rarer and rarer while nothing comes."""
        before = self.look
        if not await self.hear(anew=False):
            self.look = min(LONGEST_LOOK, 2 * before) * (0.75 + 0.25 * chance())

    async def _hear_brought(self) -> int:
        if self.letters is None:
            return 0
        return await self._hear_letters(self.letters.take(), self.letters.post.after)

    async def _read_mail(self) -> int:
        if self.letters is None:
            return 0
        from crowdml.wire.letters import open_mailbox

        heard, self._read_by = 0, self._clock.now() + LONGEST_LOOK
        if self.letters.listens:
            await self._ask_who_stands(self.letters)
        for _ in range(MOST_PAGES):
            path = f"{self._path}/mailbox?after={self.letters.post.after}"
            try:
                box = open_mailbox(await self._ask_once(path))
            except Unreachable:
                break
            except Problem as problem:
                self._problems[problem.slug] += 1
                if problem.slug != "too-many":
                    self._tell(f"the mailbox could not be read: {problem}")
                break
            heard += await self._hear_letters(box.letters, box.last)
            if not box.letters:
                break
        return heard

    async def _ask_who_stands(self, letters: Correspondence) -> None:
        """Ask the server which devices stand at the places of peers: no other may bring its letters itself."""
        from crowdml.wire.letters import open_held

        try:
            letters.stand(open_held(await self._ask_once(f"{self._path}/places")))
        except Unreachable:
            return
        except Problem as problem:
            self._problems[problem.slug] += 1
            if problem.slug != "too-many":
                self._tell(f"the server does not say who stands at the places of peers: {problem}")

    async def _ask_once(self, path: str) -> bytes:
        from crowdml.wire.letters import LARGEST_MAILBOX
        from crowdml.wire.requests import authorize

        header = authorize(self._key, "GET", self._client.prefix + path, now=self._clock.now())
        headers = {"Authorization": header}
        return (await self._client.request("GET", path, headers=headers, largest=LARGEST_MAILBOX)).body

    async def _hear_letters(self, letters: Sequence[Letter], after: int) -> int:
        """Those that are believed reach the handlers; the state and how far was read are written as one."""
        from crowdml.device.letters import SENTENCES

        post = self.letters
        assert post is not None
        state, heard, flaws = post.hear(self._state(), letters, self._clock.now())
        post.post = replace(post.post, after=after)
        for flaw in flaws:
            self._tell(f"a letter was left aside: {SENTENCES[flaw]}. Others like it are counted.")
        if letters:
            await self._keep(state)
        return heard

    def _outlook(self) -> str:
        """For the owner's eyes: what comes next, how often that was right, and who was heard."""
        from crowdml.device.learning import outlook

        assert self.learner is not None
        forecast = self.learner.forecast(self._latest())
        return outlook(
            self.learner.task, forecast, self.learner.score, None if self.letters is None else self.letters.post
        )
