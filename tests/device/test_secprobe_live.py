"""SecProbe over HTTP: devices with ledgers of their own, a server with rows of its own, a restart in between."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loopback import joined, run, serving

from crowdml.protocols import find, settled
from crowdml.server.transcript import replay, write_transcript
from crowdml.server.validation import OwnRows, keep_rows
from crowdml.storage.server.looks import Terms, validations
from crowdml.task import parse

TEXT = """
name = "live-probe"
features = {{ dimension = 3, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["a", "b", "c"] }}
model = {{ kind = "ridge" }}
[protocol]
kind = "secprobe"
batch = 10
{map}
combine = {{ {combine} }}
[privacy]
{privacy}
delta = 1e-6
budget = {{ epsilon = {epsilon}, samples = 300 }}
"""
MOMENTS = ("", 'mechanism = "skellam"\nepsilon = { moments = 100.0 }', "100.0")
PERTURBED = (
    'map = { kind = "layers", seed = 1, features = 8, constant = 0.0 }',
    'mechanism = "discrete-laplace"\nepsilon = { moments = 1000.0 }',
    "1000.0",
)
DRAWN = 'rule = "exponential", uploads = 3, keep = 2, rows = 30, epsilon = 0.25'


def rows(count: int, seed: int) -> list[tuple[Any, int]]:
    rng = np.random.default_rng(seed)
    labels = [number // 3 % 3 for number in range(count)]  # of three devices, which get every third row, each has all
    found = [np.eye(3)[label] + rng.normal(0, 0.2, 3) for label in labels]
    return [(each / np.linalg.norm(each), label) for each, label in zip(found, labels, strict=True)]


@pytest.mark.parametrize("form", [MOMENTS, PERTURBED], ids=["moments", "perturbed loss"])
def test_a_crowd_learns_live_and_its_server_chooses_by_rows_of_its_own(tmp_path: Path, form: tuple[str, str, str]):
    given, privacy, epsilon = form
    task = settled(parse(TEXT.format(map=given, combine=DRAWN, privacy=privacy, epsilon=epsilon)))
    with serving(tmp_path / "server", task) as server:
        own = rows(30, 9)
        x = np.asarray([each for each, _ in own], np.float32)
        held = OwnRows(x, np.asarray([label for _, label in own], np.float32), x)
        terms = Terms("own.csv", Fraction(1, 4), Fraction(5), every=1000)
        keep_rows(server.hub.store, task, held, terms, "2025-01-31T12:00:00+00:00")
        home = joined(tmp_path / "home", task)
        _, summary = run(home, server.address, server.code, task, rows(60, 1), devices=3)
        assert (summary.check_ins, summary.endings) == (6, {"source": 3})
        runner = server.hub.find(task.hash)
        assert (runner.offer.version, runner.closing.failure) == (2, None)
        assert validations(server.hub.store)[task.hash].spent >= Fraction(1, 2)
        said = find(task).predict(task, runner.fold.weights, x)
        if form is MOMENTS:  # the noise of the perturbed loss leaves three devices nothing to learn (Z4)
            assert (said == held.y).mean() > 0.8
        offered = runner.offer.body
        with (tmp_path / "told").open("wb") as file:
            write_transcript(server.hub.store, task.hash, file)
        assert replay(tmp_path / "told").body == offered
        server.stop()
        server.start()
        assert server.hub.find(task.hash).offer.body == offered
        with home.ledger() as ledger:
            assert len(ledger.charges()) >= 2
