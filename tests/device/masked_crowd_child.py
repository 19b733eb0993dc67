"""Devices of a masked task that vanish, return and die: helpers of the tests, and the process that is killed.

    python masked_crowd_child.py FOLDER ADDRESS TASK BATCHES WAITS MOMENT LOG

Runs the device of FOLDER until its source ends, and kills itself before the MOMENT-th of its SQL statements, requests
or steps (0: never). Every vector that it masks is written to LOG first, for the test that knows the sum.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from loopback import QuickClock, rows

from crowdml.device import client as client_module
from crowdml.device.client import Client, Limits
from crowdml.device.commits import Commits
from crowdml.device.folder import Folder
from crowdml.device.member import Ending, Patience, terms
from crowdml.device.runner import Runner
from crowdml.device.sources import FileSource
from crowdml.secagg import device as masking
from crowdml.storage import Ledger
from crowdml.task import Task, from_canonical

Vectors = dict[tuple[str, int], dict[str, Any]]
"""What each device masked in each round, noise included: the last it said, which is the one that was kept."""


def spy_on_masks(note: Callable[[str, int, dict[str, Any]], None]) -> Callable[[], None]:
    """Hear what is masked, before anybody else; returns what ends it."""
    real = masking.mask

    def mask(terms_: Any, state: Any, vectors: Any) -> Any:
        note(state.me, state.round, {tag: np.array(each) for tag, each in vectors.items()})
        return real(terms_, state, vectors)

    masking.mask = mask

    def end() -> None:
        masking.mask = real

    return end


class Vanished(BaseException):
    """The device is gone: its process was shut down at this step."""


class Crowd:
    """Devices of one folder, each a runner of its own that can be stopped at a step and started again."""

    def __init__(self, home: Folder, address: str, task: Task, *, batches: int = 1, waits: bool = True) -> None:
        self.home, self.task, self.batches, self.waits = home, task, batches, waits
        self.client = Client(address, limits=Limits(connections=64))
        self.ledger = home.ledger()
        found, self.protocol = home.accepted(task.hash)
        self.member = terms(home, found, self.protocol)
        self.gate = asyncio.Semaphore(2)
        self.said: dict[int, list[str]] = {}

    def id(self, number: int) -> str:
        return self.home.key(number).id

    def of(self, number: int) -> Ledger:
        return self.ledger.of(number)

    def runner(self, number: int, step: Callable[[str], None] = lambda _: None, **options: Any) -> Runner:
        source = FileSource(f"rows {number}", rows(5 * self.batches, seed=number), self.task)
        source.waits = self.waits
        said = self.said.setdefault(number, [])

        def tell(text: str) -> None:
            said.append(text)
            step(text)

        return Runner(
            self.member(self.home.key(number), self.ledger.of(number)), self.task, self.protocol, self.client, source,
            commit=Commits(self.ledger), gate=self.gate, clock=QuickClock().clock, patience=Patience(0.05, 0.5),
            tell=tell, **options,
        )  # fmt: skip

    async def run(self, number: int, vanish: str | None = None, **options: Any) -> Ending | None:
        """To its end; None where it vanished at the step of this name."""

        def step(text: str) -> None:
            if text == vanish:
                raise Vanished

        try:
            return await self.runner(number, step, **options).run()
        except Vanished:
            return None

    async def close(self) -> None:
        await self.client.close()
        self.ledger.close()


def drawn_in(ledger: Ledger, task: Task) -> int:
    """How often a device has drawn noise and kept it, by its charges: those of one row of the table."""
    return sum(charge.mechanism == "gradient" for charge in ledger.charges(task.hash))


# --- the process that is killed ---


def main(folder: str, address: str, task_file: str, batches: str, waits: str, moment: str, log: str) -> None:
    left = int(moment)

    def step(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def note(me: str, number: int, vectors: dict[str, Any]) -> None:
        with Path(log).open("a") as file:
            file.write(json.dumps([me, number, {tag: each.tolist() for tag, each in vectors.items()}]) + "\n")

    spy_on_masks(note)
    real = client_module.Client._once

    async def once(self: Any, *arguments: Any) -> Any:
        step()
        answer = await real(self, *arguments)
        step()
        return answer

    client_module.Client._once = once

    async def whole() -> Ending | None:
        task = from_canonical(Path(task_file).read_bytes())
        crowd = Crowd(Folder(folder), address, task, batches=int(batches), waits=waits == "waits")
        crowd.ledger._connection.set_trace_callback(step)
        return await crowd.runner(0, step).run()

    print(asyncio.run(whole()))


if __name__ == "__main__":
    main(*sys.argv[1:])
