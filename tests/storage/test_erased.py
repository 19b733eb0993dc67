"""What is erased is gone from every file, at once: samples that were given, secrets of a round, messages, old states.

Review 2, privacy finding 11: a write-ahead log kept them, 58 rounds later too, and after `kill -9`. The tests read the
bytes of all files, as somebody who seizes the device would.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from erasing_child import KEPT_BATCHES, KINDS, live
from ledger_builders import PLENTY, TASK, charge

import crowdml
from crowdml.storage import Ledger, Round

MARKER = re.compile(rb"<(" + rb"|".join(KINDS) + rb") (\d{6})>")
needs_posix = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


def found_in(folder: Path) -> set[tuple[str, int]]:
    """The kind and the step of every marker in any file."""
    files = [file for file in folder.iterdir() if file.is_file()]
    return {(kind.decode(), int(step)) for file in files for kind, step in MARKER.findall(file.read_bytes())}


def kept_after(step: int) -> set[tuple[str, int]]:
    batches = range(max(0, step + 1 - KEPT_BATCHES), step + 1)
    return {("state", step)} | {("batch", each) for each in batches}


def test_after_each_step_of_a_device_nothing_that_it_erased_is_in_any_file(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for step in islice(live(ledger, 0), 40):
            assert found_in(tmp_path) == kept_after(step)
    assert found_in(tmp_path) == kept_after(39)


def test_of_many_devices_in_one_file_nothing_that_one_erased_stays(tmp_path):
    """Their rows lie between one another, so pages are split and joined."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        order = [(device, step) for device in range(6) for step in range(8)]
        random.Random(5).shuffle(order)
        lives = [live(ledger.of(device), 100 * device) for device in range(6)]
        last: dict[int, int] = {}
        for device, _ in order:
            last[device] = next(lives[device])
            kept = {(kind, at) for step in last.values() for kind, at in kept_after(step)}
            assert found_in(tmp_path) <= kept


@needs_posix
def test_a_device_that_is_killed_leaves_nothing_of_the_steps_that_were_over(tmp_path):
    path, first, chance = tmp_path / "ledger.sqlite", 0, random.Random(11)
    for _ in range(3):
        over = kill_after(path, first, chance.randrange(5, 25), chance)
        last = {"state": over - 1, "batch": over - KEPT_BATCHES}  # the next step may be under way
        assert [each for each in found_in(tmp_path) if each[1] <= last.get(each[0], over)] == []
        with Ledger(path) as ledger:
            found = ledger.round(TASK)
            assert found is not None
            first = found.number  # rounds count from 1
            ledger.keep_round(TASK, Round(found.number, None))
            for each in ledger.waiting(TASK):
                ledger.discard([each.serial])


def kill_after(path: Path, first: int, steps: int, chance: random.Random) -> int:
    """Kill a child at some moment after so many steps; the last one that it said was over."""
    source = [str(Path(crowdml.__file__).parents[1]), str(Path(__file__).parent)]
    child = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("erasing_child.py")), str(path), str(first)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(source)},
    )
    assert child.stdout is not None
    for _ in range(steps):
        assert child.stdout.readline()
    for _ in range(chance.randrange(20_000)):  # some moment within a step
        pass
    child.send_signal(signal.SIGKILL)
    said = child.stdout.read().splitlines()
    child.wait()
    return int(said[-1]) if said else first + steps - 1


def test_a_ledger_of_version_0_1_loses_its_old_log_when_it_is_opened(tmp_path):
    """Its write-ahead log has samples and secrets that were erased long ago."""
    before, home = tmp_path / "before", tmp_path / "home"
    before.mkdir()
    with Ledger(before / "ledger.sqlite") as ledger:
        ledger._connection.execute("pragma journal_mode = wal").fetchall()
        for _ in islice(live(ledger, 0), 5):
            pass
        shutil.copytree(before, home)  # as a kill leaves it
    assert {kind for kind, step in found_in(home) if step == 1} == {kind.decode() for kind in KINDS}
    with Ledger(home / "ledger.sqlite") as ledger:
        assert found_in(home) == kept_after(4)
        assert len(ledger.charges()) == 5
        span = ledger.take_serials(5)
        ledger.charge(TASK, [charge(span[0], span[-1])], [PLENTY])
    assert not (home / "ledger.sqlite-wal").exists()
