"""The operator's page of a gathered task: what the rule left out of each round and why, and for nobody else."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crowd import Crowd, open_crowd
from desk import set_up
from device import Device
from test_public import words_of
from test_root_rows import BEST, DRAWN, Server, make

from crowdml.messages import encode
from crowdml.privacy.private import RECEIVED, Release
from crowdml.protocols import find, settled
from crowdml.server.portal.health import scores
from crowdml.server.sifting import Sifted, left_out_most, sift_rounds
from crowdml.storage.server import Store
from crowdml.task import parse
from crowdml.wire.keys import Key

TEXT = """
name = "sifted"
title = "Which way do people go?"
features = { dimension = 3, norm = { kind = "l2", bound = 1.0 } }
labels = { classes = ["a", "b"] }
model = { kind = "softmax" }
[protocol]
kind = "sgd"
batch = 2
step = { c = 1.0 }
combine = { rule = "RULE", uploads = 12, f = 3 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 1.0, errors = 1.0 }
delta = 1e-5
"""
TASK = settled(parse(TEXT.replace("RULE", "multi-krum")))
MEDIAN = settled(parse(TEXT.replace("RULE", "median").replace('"sifted"', '"in-the-middle"')))


def give_round(task: Any, devices: list[Device], number: int, liars: int = 2) -> None:
    """A round of twelve uploads, of which the first ones are lies, as far off as a device may send."""
    drawn, made = np.random.default_rng(number), find(task).contribution
    (expected,) = find(task).expected(task).values()
    steps = drawn.integers(-900, 900, (12, 3, 2)).astype(np.int32)
    steps[:liars] = expected["gradient"].high
    for device, each in zip(devices, steps, strict=True):
        message = made(Release(each, RECEIVED), Release(np.ones(1, np.int32), RECEIVED), None, np.int32(number))
        assert device.check_in(task, kind="sgd/gradient/1", body=encode(message)).status == 202


def page_of(crowd: Crowd, task: Any) -> str:
    return set_up(crowd).browser.get(f"/operator/tasks/{task.hash.hex()[:12]}").text


def test_the_operator_sees_what_was_left_out_of_each_round_and_why_and_can_revoke(tmp_path: Path):
    with open_crowd(tmp_path / "data", TASK) as crowd:
        devices = [crowd.running.device() for _ in range(12)]
        for number in range(3):
            give_round(TASK, devices, number, liars=2 if number else 0)
        desk = set_up(crowd)
        path = f"/operator/tasks/{TASK.hash.hex()[:12]}"
        shown = desk.get(path).text
        seen = words_of(shown)
        assert "What the rule left out" in seen
        assert "Multi-Krum leaves out those with the largest distances to their nearest others." in seen
        table = re.search(r"Round Closed Uploads Left out .*", seen)
        assert table is not None
        assert len(re.findall(r"\b12 5 0\b", table[0])) == 3, "12 - f - 2 are kept of each round: five are left out"
        counted = dict(left_out_most(sift_rounds(crowd.running.hub.runners[TASK.hash])))
        assert all(counted[device.key.id] >= 2 for device in devices[:2])
        assert f'href="/operator/devices/{devices[0].key.id}"' in shown
        assert "Being left out proves nothing." in seen
        desk.get(f"/operator/devices/{devices[0].key.id}")
        assert desk.post(f"/operator/devices/{devices[0].key.id}/revoke").status == 200
        public = crowd.browser().get(f"/studies/{TASK.hash.hex()[:12]}").text
        owner = crowd.browser().get(crowd.owner_address(devices[0])).text if hasattr(crowd, "owner_address") else ""
        assert "left out" not in words_of(public) + words_of(owner)
        assert devices[1].key.id[:12] not in public + owner


def test_what_was_left_out_is_counted_from_the_uploads(tmp_path: Path):
    with open_crowd(tmp_path / "data", TASK) as crowd:
        devices = [crowd.running.device() for _ in range(12)]
        for number in range(2):
            give_round(TASK, devices, number)
        runner, known = crowd.running.hub.runners[TASK.hash], dict[int, Sifted]()
        newest, first = sift_rounds(runner, known)
        assert (newest.number, first.number) == (1, 0)
        assert (newest.uploads, newest.left_out, newest.less) == (12, 5, 0)
        assert {device.key.id for device in devices[:2]} <= set(newest.outside)
        assert sorted(newest.distances)[-2] > 5 * sorted(newest.distances)[-3]
        assert sum(newest.spread) == 12
        assert newest.spread[-1] == 2, "both lies are farther off than four times the median"
        assert sum(newest.spread[3:5]) >= 1, "the median distance is 1"
        assert sift_rounds(runner, known) == [newest, first]
        assert [known[place] for place in sorted(known)] == [first, newest]
        give_round(TASK, devices, 2)
        assert [each.number for each in sift_rounds(runner, known)] == [2, 1, 0]


def test_a_median_leaves_out_no_upload_as_a_whole(tmp_path: Path):
    with open_crowd(tmp_path / "data", MEDIAN) as crowd:
        devices = [crowd.running.device() for _ in range(12)]
        seen = words_of(page_of(crowd, MEDIAN))
        assert "What the rule left out" not in seen, "no round was closed yet"
        give_round(MEDIAN, devices, 0)
        (only,) = sift_rounds(crowd.running.hub.runners[MEDIAN.hash])
        assert (only.left_out, only.less, only.outside) == (None, None, ())
        assert len(only.distances) == 12


def test_rounds_whose_uploads_are_gone_are_not_shown(tmp_path: Path):
    from crowdml.server.limits import Limits

    many: Any = {"device_rate": 1e6, "device_burst": 1e6, "address_rate": 1e6, "address_burst": 1e6}
    with open_crowd(tmp_path / "data", TASK, limits=Limits(**many, snapshot_every=1)) as crowd:
        devices = [crowd.running.device() for _ in range(12)]
        for number in range(3):
            give_round(TASK, devices, number)
        assert len(sift_rounds(crowd.running.hub.runners[TASK.hash])) <= 3


@pytest.mark.parametrize("rule", [BEST, DRAWN])
def test_scores_on_public_rows_are_shown_and_those_on_private_rows_are_not(tmp_path: Path, rule: str):
    with Store(tmp_path / "server.sqlite") as store:
        server = Server(store, make(rule))
        server.attach(*([None, None] if rule == BEST else []))
        server.round(0, lies=(0, 3))
        (only,) = sift_rounds(server.runner)
    assert (only.uploads, only.left_out, only.distances) == (4, 2, ())
    if rule == BEST:
        liars = {Key.from_secret(bytes([each + 1]) * 32).id for each in (0, 3)}
        assert set(only.outside) == liars
        assert max(only.scores[0], only.scores[3]) < min(only.scores[1], only.scores[2]) <= 1
        assert sum(only.score_counts) == 4
        assert "scores of 4 uploads" in scores(only, "upload")
    else:
        assert (only.scores, len(only.outside)) == ((), 2)


if __name__ == "__main__":  # a picture of the page, for people: python tests/portal/test_left_out.py FOLDER
    import tempfile

    from screens import DESKTOP, PHONE, chromium, window

    with tempfile.TemporaryDirectory() as data, open_crowd(Path(data) / "data", TASK) as crowd, chromium() as browser:
        devices = [crowd.running.device() for _ in range(12)]
        for number in range(6):
            give_round(TASK, devices, number, liars=number % 4)
        cookie = set_up(crowd).cookie
        for look, size, dark in (("light", DESKTOP, False), ("dark", DESKTOP, True), ("phone", PHONE, False)):
            with window(browser, crowd.base, size, dark=dark) as opened:
                opened.page.context.add_cookies([{"name": "crowdml-operator", "value": cookie, "url": crowd.base}])
                opened.open(f"/operator/tasks/{TASK.hash.hex()[:12]}")
                for each in opened.page.locator("section[aria-labelledby=sifted] details").all():
                    each.evaluate("each => each.open = true")
                opened.page.locator("section[aria-labelledby=sifted]").screenshot(path=f"{sys.argv[1]}/{look}.png")
                print(look, *opened.complaints, *opened.outside)
