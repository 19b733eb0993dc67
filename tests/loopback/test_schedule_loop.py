"""Noise that changes over check-ins, on a live server: a real device's ledger holds the price of each."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_bench import local_task
from loopback import QuickClock, joined, run, serving

from crowdml.device.client import Answer, Client
from crowdml.device.fleet import Fleet
from crowdml.device.folder import LEDGER, Folder, OwnerBudget
from crowdml.device.member import Patience
from crowdml.device.sources import FileSource
from crowdml.price import Price
from crowdml.privacy.losses import Total
from crowdml.privacy.mechanisms import Scheduled
from crowdml.protocols import find, settled
from crowdml.task import Task
from crowdml.wire.problems import Problem

GROWING = 'rate = {{ c = 0.5 }}\nserver_batch = 2\nnoise = {{ schedule = "geometric", ratio = {} }}'


def scheduled_task(ratio: float, *, budget: float = 4.0, check_ins: int = 8) -> Task:
    task = local_task(
        dimension=4, batch=5, protocol=GROWING.format(ratio), unit="device", epsilon=4.0, budget=budget,
        samples=5 * check_ins,
    )  # fmt: skip
    return settled(task)


def rows(count: int, seed: int = 1) -> list[tuple[np.ndarray, int]]:
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=4) / 4, int(rng.integers(3))) for _ in range(count)]


def test_a_device_s_ledger_holds_the_price_of_every_check_in_of_its_schedule(tmp_path: Path):
    task = scheduled_task(1.3)
    row = find(task).mechanisms(task)["update"]
    assert isinstance(row, Scheduled)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        _, summary = run(home, server.address, server.code, task, rows(200), devices=2)
        assert summary.check_ins == 16
        state = server.hub.find(task.hash).fold.state
        assert int(state.rounds) == 8
        assert np.isfinite(state.weights).all()
    with home.ledger() as whole:
        for number in range(2):
            charges = sorted(whole.of(number).charges(task.hash), key=lambda charge: charge.first_sample)
            assert [charge.loss for charge in charges] == [row.at(trip).loss for trip in range(8)]
            assert whole.of(number).device_total() == Total.of(row.at(trip).device_loss for trip in range(8))
            assert 3.9 < whole.of(number).device_total().epsilon(1e-6) <= 4.0
    assert charges[7].loss.rho < charges[0].loss.rho / 30
    assert Price.of(find(task), task).device_epsilon(8) == whole_epsilon(row)


def whole_epsilon(row: Scheduled) -> float:
    return row.total(8).epsilon(1e-6)


def test_a_device_that_stops_and_returns_goes_on_in_its_schedule(tmp_path: Path):
    """Within an owner's budget for the device that the schedule just fits: no later one may cost like the first."""
    task = scheduled_task(1.3)
    row = find(task).mechanisms(task)["update"]
    assert isinstance(row, Scheduled)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        home.set_budget(OwnerBudget("1000", 1000, "4"))
        run(home, server.address, server.code, task, rows(60), most=3)
        _, summary = run(home, server.address, None, task, rows(60), most=100)
        assert summary.check_ins == 5
    with home.ledger() as ledger:
        charges = sorted(ledger.charges(task.hash), key=lambda charge: charge.first_sample)
        left = row.total(8).zcdp - sum((charge.loss.rho for charge in charges), Fraction(0))
    assert [charge.loss for charge in charges] == [row.at(trip).loss for trip in range(8)]
    assert left == 0


def test_noise_that_shrinks_costs_most_at_the_end(tmp_path: Path):
    task = scheduled_task(0.8)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        _, summary = run(home, server.address, server.code, task, rows(60))
    assert summary.check_ins == 8
    with home.ledger() as ledger:
        losses = [charge.loss.rho for charge in sorted(ledger.charges(task.hash), key=lambda each: each.first_sample)]
    assert losses == sorted(losses)
    assert losses[-1] > 15 * losses[0]


NO = Problem("malformed", "No.")


class Refusing(Client):
    """The way to a server that will not have most check-ins, or has each of them numbered anew."""

    answers: tuple[Problem, ...] = ()
    asked = 0

    async def request(self, method: str, path: str, body: bytes = b"", *more: Any, **options: Any) -> Answer:
        if path.endswith("/check-in"):
            self.asked += 1
            if self.asked % (len(self.answers) + 1):
                raise self.answers[self.asked % (len(self.answers) + 1) - 1]
        return await super().request(method, path, body, *more, **options)


def run_refused(home: Folder, server: Any, task: Task, answers: tuple[Problem, ...], count: int) -> None:
    async def taken_part() -> None:
        client = Refusing(server.address)
        client.answers = answers
        found, protocol = home.accepted(task.hash)
        fleet = Fleet(home, client, found, protocol, 1, True, QuickClock().clock, Patience(0.1, 10.0))
        try:
            await fleet.enrol(server.code, None)
            await fleet.run(lambda number: FileSource("rows", rows(count), found))
        finally:
            await client.close()

    asyncio.run(taken_part())


@pytest.mark.parametrize(
    "answers", [(NO, NO, NO), (Problem("seq-gap", "Another number.", expected=1), NO)], ids=["refused", "numbered anew"]
)
def test_no_answer_of_a_server_has_a_share_of_the_schedule_given_twice(tmp_path: Path, answers: tuple[Problem, ...]):
    task = scheduled_task(1.3)
    row = find(task).mechanisms(task)["update"]
    assert isinstance(row, Scheduled)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        run_refused(home, server, task, answers, 60)
    with home.ledger() as ledger:
        charges = sorted(ledger.charges(task.hash), key=lambda charge: charge.first_sample)
    assert len(charges) >= 4
    assert [charge.loss for charge in charges] == [row.at(trip).loss for trip in range(len(charges))]


def test_after_a_lost_ledger_no_share_of_the_schedule_is_given_again(tmp_path: Path):
    """The server took two of four, which the last message's number tells, and the samples that it names do not."""
    task = scheduled_task(1.3)
    row = find(task).mechanisms(task)["update"]
    assert isinstance(row, Scheduled)
    with serving(tmp_path / "server", task) as server:
        home = joined(tmp_path / "device", task)
        run_refused(home, server, task, (NO,), 20)
        (home.path / LEDGER).unlink()
        run(home, server.address, None, task, rows(60, seed=2), new_data=True)
    with home.ledger() as ledger:
        recovered, *charges = sorted(ledger.charges(task.hash), key=lambda charge: charge.first_sample)
        assert recovered.mechanism == "recovered"
        assert [charge.loss for charge in charges] == [row.at(trip).loss for trip in range(4, 8)]
        assert ledger.device_total().epsilon(1e-6) <= 4.0
