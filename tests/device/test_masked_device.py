"""Devices in rounds of masking, over real HTTP: what they say, what they refuse, what they charge."""

from __future__ import annotations

import asyncio

from loopback import QuickClock, rows
from masked_server import RoundServer, masked_home, masked_task, rounds_of

from crowdml.device.client import Client, Limits
from crowdml.device.fleet import Fleet
from crowdml.device.folder import Folder
from crowdml.device.runner import Patience
from crowdml.device.sources import FileSource
from crowdml.task import Task


async def take_rounds(home: Folder, server: RoundServer, task: Task, *, devices=5, batches=1, waits=True, **options):
    client = Client(server.address, limits=Limits(connections=64))
    found, protocol = home.accepted(task.hash)
    fleet = Fleet(home, client, found, protocol, devices, devices == 1, QuickClock().clock, Patience(0.05, 1.0))

    def source(number: int) -> FileSource:
        made = FileSource(f"rows {number}", rows(5 * batches, seed=number), found)
        made.waits = waits
        return made

    try:
        return fleet, await fleet.run(source, **options)
    finally:
        await client.close()


def test_a_cohort_of_five_sums_once(tmp_path):
    task = masked_task()

    async def whole():
        async with rounds_of(task) as server:
            fleet, summary = await take_rounds(masked_home(tmp_path, task, server), server, task)
            return server, fleet, summary

    server, fleet, summary = asyncio.run(whole())
    assert server.summed == [1]
    assert summary.check_ins == 5
    assert server.survivors(1) == {key.id for _, key in fleet.all_keys()}
