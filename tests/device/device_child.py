"""A device that dies, again and again: for the test that looks at what it leaves behind.

    python device_child.py ADDRESS CODE FOLDER TASK KILLS SEED WAITS

Joins, then for each kill forks a device that kills itself before a random one of its SQL statements, requests or steps.
After each death the ledger is opened and held against the server's last signed statement. The last device lives on.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

from loopback import QuickClock, joined, rows, take_part

from crowdml.device import client as client_module
from crowdml.device import folder as folder_module
from crowdml.device.client import Client
from crowdml.device.folder import Folder
from crowdml.device.joining import _statement
from crowdml.storage import Ledger
from crowdml.task import Task, from_canonical

BATCH, CHARGES = 5, 2
STEPS = 160
"""About as many as a device takes for its four batches."""


class Death:
    """Counts what a device does, and kills it before the n-th."""

    def __init__(self, n: int) -> None:
        self.left = n

    def step(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def live(home: Folder, address: str, task: Task, samples: int, waits: bool, death: Death | None) -> None:
    if death is not None:
        real_open, real_once = folder_module.Folder.ledger, client_module.Client._once

        def open_ledger(self: Folder) -> Ledger:
            ledger = real_open(self)
            ledger._connection.set_trace_callback(death.step)
            return ledger

        async def once(self, *arguments):
            death.step()
            answer = await real_once(self, *arguments)
            death.step()
            return answer

        folder_module.Folder.ledger, client_module.Client._once = open_ledger, once

    async def whole() -> None:
        await take_part(home, address, None, task, rows(samples), waits=waits, time_=QuickClock())

    asyncio.run(whole())


def look(home: Folder, address: str, task: Task) -> None:
    """What the server has was charged; each message has its charges, each charge its message."""

    async def ask() -> int:
        client = Client(address)
        signed = await _statement(client, home.key(), QuickClock().clock)
        await client.close()
        return 0 if signed is None else signed.envelope.seq

    seen = asyncio.run(ask())
    with home.ledger() as ledger:
        written, charges = ledger.next_seq(task.hash), ledger.charges()
        assert len(charges) == CHARGES * written, (len(charges), written)
        assert ledger.samples_given() == BATCH * written
        assert seen <= written, f"the server has message {seen}, and {written} were charged"
        assert len(ledger.resend()) <= 1
        assert written - len(ledger.resend()) <= seen, "a message was taken for acknowledged that the server lacks"
        waiting = {sample.serial for sample in ledger.waiting(task.hash)}
        given = {serial for charge in charges for serial in range(charge.first_sample, charge.last_sample + 1)}
        assert not waiting & given, "a sample that was given waits to be given again"


def main(address: str, code: str, folder: str, task_file: str, kills: int, seed: int, waits: bool) -> None:
    task = from_canonical(Path(task_file).read_bytes())
    home = joined(Path(folder), task)
    asyncio.run(take_part(home, address, code, task, rows(BATCH), waits=waits))
    moments, died = random.Random(seed), 0
    samples = BATCH
    for _ in range(kills):
        samples += 4 * BATCH
        child = os.fork()
        if child == 0:
            try:
                live(home, address, task, samples, waits, Death(moments.randrange(1, STEPS)))
                os._exit(0)
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
        moments.random()
        moments.randrange(1, STEPS)
        _, status = os.waitpid(child, 0)
        assert status == 0 or os.WIFSIGNALED(status), status
        died += status != 0
        look(home, address, task)
    live(home, address, task, samples, waits, None)
    look(home, address, task)
    with home.ledger() as ledger:
        print(died, ledger.next_seq(task.hash), samples // BATCH, len(ledger.resend()), flush=True)


if __name__ == "__main__":
    address, code, folder, task_file, kills, seed, waits = sys.argv[1:]
    main(address, code, folder, task_file, int(kills), int(seed), waits == "waits")
