"""A street of `crowdml join` processes that teach each other through a real server, some of them killed on the way."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from neighbours import readings
from process import Server
from proportions_task import ROW

import crowdml
from crowdml.device.folder import Folder
from crowdml.device.learning import recall
from crowdml.messages import decode
from crowdml.protocols import find
from crowdml.protocols.proportions import plan
from crowdml.storage.server import Store
from crowdml.task import Task, parse
from crowdml.wire.envelopes import Signed, open_signed

BATCH, WINDOW = 8, 3


class Street:
    """A server, and a device process at each place."""

    def __init__(self, folder: Path, places: int, batches: int) -> None:
        self.folder, self.places, self.batches = folder, places, batches
        listed = "\n".join(
            f'[[places]]\nname = "corner {place}"\nlat = 0.0\nlon = {(place + place * place) / 1000:.3f}'
            for place in range(places)
        )
        text = ROW.format(peers=2, epsilon=1.0, places=listed)
        self.task: Task = parse(text)
        (folder / "street.toml").write_text(text)
        values = [readings(batches * BATCH + WINDOW, place) for place in range(places)]
        (folder / "street.csv").write_text("\n".join(",".join(map(str, row)) for row in zip(*values, strict=True)))
        self.values = values
        self.server = Server(folder)
        started = self.server.start("--task", str(folder / "street.toml"), "--invite", str(places))
        self.address, self.code = started["address"], started["code"]

    def join(self, place: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "crowdml.cli", "join", self.address, self.code, "--source", "csv:street.csv",
             "--shard", f"{place}/{self.places}", "--place", f"corner {place}", "--folder", f"device{place}", "--yes",
             "--json", f"result{place}.json"],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(Path(crowdml.__file__).parents[1]), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip

    def result(self, place: int) -> dict[str, Any]:
        return json.loads((self.folder / f"result{place}.json").read_text())

    def knows(self, place: int) -> Any:
        with Folder(self.folder / f"device{place}").ledger() as ledger:
            return recall(ledger, self.task, find(self.task))

    def journal(self) -> list[Signed]:
        with Store(self.server.where) as store:
            return [open_signed(body) for _, body in store.tail(self.task.hash)]

    def predict(self, place: int) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "crowdml.cli", "predict", "--folder", f"device{place}"],
            cwd=self.folder, capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return done.stdout


def lines(device: subprocess.Popen[str], count: int) -> list[str]:
    """So many predictions from its terminal."""
    assert device.stderr is not None
    found: list[str] = []
    for line in device.stderr:
        found += [line] if line.startswith("next: ") else []
        if len(found) == count:
            return found
    raise AssertionError(f"it ended after {found}")


def run(folder: Path, places: int, batches: int, *, gone: int, back: int) -> Street:
    """Everybody joins; two are killed midway, and one of them comes back."""
    street = Street(folder, places, batches)
    devices = {place: street.join(place) for place in range(places)}
    try:
        for place in (gone, back):
            lines(devices[place], 3)
            devices[place].kill()  # SIGKILL: nothing is flushed
            devices[place].communicate(timeout=60)
        devices[back] = street.join(back)
        for place, device in devices.items():
            _, said = device.communicate(timeout=240)
            assert place == gone or device.returncode == 0, said
    finally:
        for device in devices.values():
            device.kill()
            device.wait(60)
        street.server.stop()
    check(street, gone)
    return street


def check(street: Street, gone: int) -> None:
    letters, nearest, linked = street.journal(), plan(street.task).nearest, plan(street.task).correspondents
    said = [decode(each.envelope.kind, each.envelope.body) for each in letters]
    told = {(int(each.place), int(each.batch)): each.counts.value.tolist() for each in said}
    assert len(told) == len(said)  # no batch was counted twice
    batches = Counter(int(each.place) for each in said)
    whole = [place for place in range(street.places) if place != gone]
    assert {place: batches[place] for place in whole} == dict.fromkeys(whole, street.batches)  # and none was lost
    assert 3 <= batches[gone] <= street.batches
    for place in whole:
        heard = street.result(place)["letters"]
        assert (heard["refused"], heard["next"] in street.task.labels.classes) == ({}, True)
        learner, post, state = street.knows(place)
        assert learner.score.guessed >= (street.batches - 2) * BATCH  # a kill may come before anything was learned
        assert (heard["heard"], heard["bytes"]) == (post.heard, post.size)
        assert 200 * post.heard <= post.size <= 500 * post.heard
        assert set(post.keys) <= set(linked[place])
        for peer, numbers, counts in zip(nearest[place], state.batches.tolist(), state.counts.tolist(), strict=True):
            for number, count in zip(numbers, counts, strict=True):
                assert number < 0 or told[int(peer), number] == count  # what is kept is what was said
    everything = b"".join(
        path.read_bytes() for path in [*street.server.data.rglob("*"), street.server.log] if path.is_file()
    )
    for values in street.values:
        for one, next_ in pairwise(values):  # the four bytes of one float turn up by chance in a few megabytes
            assert struct.pack("<2f", one, next_) not in everything
            assert struct.pack("<d", one) not in everything
    assert b"street" in everything


def test_three_devices_teach_each_other_and_one_that_was_killed_comes_back(tmp_path: Path):
    street = run(tmp_path, 3, 6, gone=2, back=1)
    assert "would be a release that nobody charged" in " ".join(street.predict(0).split())


@pytest.mark.slow
def test_twelve_devices_go_on_predicting_when_two_are_killed_and_one_comes_back(tmp_path: Path):
    street = run(tmp_path, 12, 20, gone=7, back=4)
    heard = {place: street.result(place)["letters"]["heard"] for place in range(12) if place != 7}
    assert max(heard.values()) >= 3, "one that is done before its peers begin hears nobody; the last hears them all"
