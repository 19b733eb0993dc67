"""`crowdml demo`: a small run of the real thing, with its server process, its devices and its kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runner import refused

from crowdml.channels import combining
from crowdml.cli.demo import panel
from crowdml.cli.demo_runs import Beside, result_of
from crowdml.datasets import blobs
from crowdml.datasets.table import spec_of
from crowdml.demo import loop, stages
from crowdml.demo.compare import Simulated
from crowdml.demo.loop import View
from crowdml.demo.proof import prove
from crowdml.demo.simulated import laid_out_in_time, work_of
from crowdml.demo.stages import moments, scaled, set_stage
from crowdml.errors import DataError
from crowdml.protocols import settled
from crowdml.task import find_task

KEYS = [
    "accuracy", "epsilon_sample", "epsilon_device", "delta", "devices", "check_ins", "acknowledged",
    "lost", "counted_twice", "bytes_up", "bytes_down", "restarts", "seconds",
]  # fmt: skip


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "crowdml.cli", "demo", "--plot", "demo.png", *options]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "TMPDIR": str(folder), "COLUMNS": "100"}


def run(folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        command("--json", "-", *options),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1, "stdout carries one JSON object and nothing else"
    return json.loads(done.stdout), done.stderr


def test_a_small_demo_kills_its_server_and_loses_nothing(tmp_path: Path) -> None:
    found, said = run(tmp_path, "--devices", "10", "--seconds", "1", "--trials", "0")
    assert list(found)[: len(KEYS)] == KEYS
    assert (found["devices"], found["rounds"]) == (10, 8)
    assert found["check_ins"] == found["acknowledged"] >= found["survivors"] == 24
    assert (found["lost"], found["counted_twice"], found["unsigned"], found["restarts"]) == (0, 0, 0, 1)
    assert found["same_bits"] is True
    assert found["epsilon_sample"] <= 4 < found["epsilon_sample_alone"] < found["epsilon_device"]
    assert found["bytes_up"] > 0
    assert found["bytes_down"] > 0
    assert "Killed the server with -9" in said
    assert "bit for bit" in said
    assert "Traceback" not in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo.png"], "nothing else stays behind"


@pytest.mark.slow
def test_several_runs_stand_beside_where_nine_of_ten_simulated_ones_end(tmp_path: Path) -> None:
    found, said = run(tmp_path, "--runs", "2", "--devices", "10", "--seconds", "1", "--trials", "19")
    assert list(found) == ["runs", "inside", "width"]
    assert [list(each) for each in found["runs"]] == [["accuracy", "low", "high", "inside"]] * 2
    assert "Real runs beside simulated ones" in said
    assert list(tmp_path.iterdir()) == [], "nothing stays behind"


@pytest.mark.slow
def test_several_runs_of_a_fleet_stand_beside_the_simulated_world_of_a_fleet(tmp_path: Path) -> None:
    found, said = run(tmp_path, "--task", "digits", "--runs", "1", "--devices", "10", "--trials", "19")
    assert [list(each) for each in found["runs"]] == [["accuracy", "low", "high", "inside"]]
    assert "19 simulated crowds" in said
    assert list(tmp_path.iterdir()) == [], "nothing stays behind"


def test_the_json_of_several_runs_counts_those_inside_and_the_mean_width() -> None:
    found = result_of([Beside(0.7, 0.6, 0.8), Beside(0.9, 0.6, 0.8), Beside(0.6, 0.6, 0.7)])
    assert [each["inside"] for each in found["runs"]] == [True, False, True]
    assert found["inside"] == 2
    assert found["width"] == pytest.approx(0.5 / 3)


def test_nine_of_ten_further_trials_fall_into_the_interval() -> None:
    ends = np.arange(19)[:, None]  # of 20 that are drawn alike, one is below the lowest and one above the highest of 19
    assert Simulated(np.arange(1), ends).interval == (0, 18)


@pytest.mark.parametrize("options", [("--task", "traffic"), ("--keep",), ("--trials", "0")])
def test_several_runs_refuse_what_they_do_not_have(options: tuple[str, ...]) -> None:
    assert f"leave out {' '.join(options)}" in refused("demo", "--runs", "2", *options)


def test_runs_of_a_fleet_have_no_sensors_and_a_single_demo_shows_its_own_tasks_alone() -> None:
    assert "leave out --seconds" in refused("demo", "--runs", "2", "--task", "digits", "--seconds", "3")
    assert "the demo shows demo, admm-adult, gram-mnist, robust-digits, traffic" in refused("demo", "--task", "digits")


def test_how_long_a_device_works_is_measured_by_how_long_rounds_take() -> None:
    stage = set_stage("demo", find_task("demo"), None, 1)
    for work in (0.005, 0.015):
        took = laid_out_in_time(stage, 6.0, 1, work, 1).took
        assert took is not None
        assert work_of(stage, 6.0, 1, took.tolist()) == pytest.approx(work, rel=0.1)


@pytest.mark.slow
def test_the_whole_demo_learns_ten_digits_while_devices_and_its_server_are_killed(tmp_path: Path) -> None:
    found, said = run(tmp_path)
    assert (found["devices"], found["lost"], found["counted_twice"], found["restarts"]) == (100, 0, 0, 1)
    assert found["rounds"] == 8
    assert found["devices_killed"] == 5
    assert found["same_bits"] is True
    assert found["accuracy"] > 0.5  # 0.75 on average
    unmasked, masked = found["simulated_unmasked"]["accuracy"], found["simulated"]["accuracy"]
    assert unmasked < masked < found["centralised"]
    assert found["alone"] < found["accuracy"]
    assert "5 devices were killed with -9" in said


@pytest.mark.slow
def test_a_small_crowd_with_liars_ends_in_one_round_though_devices_and_its_server_are_killed(tmp_path: Path) -> None:
    found, said = run(tmp_path, "--task", "robust-digits", "--devices", "20", "--seconds", "1", "--trials", "1")
    assert list(found)[: len(KEYS)] == KEYS
    assert (found["devices"], found["devices_killed"], found["restarts"], found["rounds"]) == (20, 2, 1, 1)
    assert found["check_ins"] == found["acknowledged"] == found["survivors"] == 18
    assert (found["lost"], found["counted_twice"], found["unsigned"], found["same_bits"]) == (0, 0, 0, True)
    assert found["liars"] == {"devices": 6, "attack": stages.LIES}
    assert found["without_liars"]["trials"] == 1
    assert found["epsilon_sample"] <= 8
    assert "6 of them lie" in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo.png"], "nothing else stays behind"


@pytest.mark.slow
def test_the_whole_crowd_learns_though_three_in_ten_of_its_devices_lie(tmp_path: Path) -> None:
    """Three runs: the mean is within three points of the 42 honest devices alone, by the same rule."""
    accuracies: list[tuple[float, float]] = []
    for seed in ("1", "2", "3"):
        (tmp_path / seed).mkdir()
        found, _ = run(tmp_path / seed, "--task", "robust-digits", "--trials", "5", "--seed", seed)
        assert (found["devices"], found["liars"]["devices"], found["devices_killed"]) == (60, 18, 2)
        assert (found["lost"], found["counted_twice"], found["same_bits"]) == (0, 0, True)
        assert found["epsilon_sample"] <= 8
        assert found["accuracy"] >= 0.6
        accuracies.append((found["accuracy"], found["without_liars"]["accuracy"]))
    lied, alone = (sum(each) / 3 for each in zip(*accuracies, strict=True))
    assert lied >= alone - 0.03, accuracies


def test_three_in_ten_devices_lie_in_three_ways_and_none_of_those_that_are_killed() -> None:
    stage = set_stage("robust-digits", find_task("robust-digits"), None, 1)
    assert stage.rows.shape == (60, 23)
    assert (stage.doomed, len(stage.liars), max(stage.liars) < 58) == (2, 18, True)
    assert len(set(map(id, stage.liars.values()))) == len(stage.lies.split(",")) == 3
    by = combining(stage.task)
    assert by is not None
    assert (by.uploads, by.minimum, by.seconds) == (58, None, None)
    assert (by.f, by.stands(58)) == (20, 20)  # as docs/robust.md says: a third of the devices, and 18 of them lie
    with pytest.raises(DataError, match="19 devices of task 'robust-digits'"):
        set_stage("robust-digits", find_task("robust-digits"), 19, 1)


def test_a_crowd_that_can_fill_no_further_cohort_ends_the_demo_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "IDLE", 1.0)
    stage = set_stage("demo", find_task("demo"), 10, 1)
    assert stage.task.masking is not None
    masking = replace(stage.task.masking, cohort=6, minimum=6)
    task = settled(replace(stage.task, masking=masking, privacy=replace(stage.task.privacy, uses=1)))
    said: list[str] = []
    crowd = loop.DemoCrowd(tmp_path, replace(stage, task=task), 0.5, 1, say=said.append)
    try:
        outcome = asyncio.run(crowd.run())
    finally:
        crowd.stop()
    assert (outcome.rounds, outcome.proof.lost, outcome.proof.counted_twice) == (1, 0, 0)
    assert any("ends with 1 of 8 cohorts" in line for line in said)


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_demo_takes_its_server_and_its_folder_with_it(tmp_path: Path, how: signal.Signals) -> None:
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    child = subprocess.Popen(
        [sys.executable, "-c", heed, *command("--seconds", "600", "--devices", "20")],
        cwd=tmp_path,
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    while "Portal:" not in (line := child.stderr.readline()):
        assert line, "it ended before it began"
    (folder,) = tmp_path.glob("crowdml-demo-*")
    child.send_signal(how)
    _, rest = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith("crowdml-demo")]
    assert not _processes_of(folder)


def _processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name this folder."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    return [line.decode(errors="replace") for line in lines if str(folder).encode() in line]


def test_more_devices_than_digits_are_refused_with_both_numbers() -> None:
    with pytest.raises(DataError, match=r"120 devices .* 1,680 samples, and there are 1,437"):
        set_stage("demo", find_task("demo"), 120, 1)
    assert "cannot be written" in refused("demo", "--json", "/dev/null/x.json")


def test_digits_are_dealt_out_without_one_that_two_devices_hold() -> None:
    stage = set_stage("demo", find_task("demo"), None, 1)
    assert stage.rows.shape == (100, 14)
    assert len(set(stage.rows.reshape(-1).tolist())) == 1400
    assert stage.doomed == 5


def test_mnists_devices_are_as_many_as_its_rows_allow_where_nobody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = spec_of("mnist-pixels").rows[0]
    made = blobs(rows=rows, features=1, classes=10, seed=1, normalise="none")
    monkeypatch.setattr(stages, "load", lambda name, normalise: made)
    stage = set_stage("gram-mnist", find_task("gram-mnist"), None, 1)
    assert stage.rows.shape == (996, 60)
    assert rows == 996 * 60
    assert stage.task.masking is not None
    assert stage.task.masking.cohort == 996


@pytest.mark.parametrize("devices", [6, 10, 30, 57, 100, 102])
def test_a_crowd_of_another_size_has_terms_that_devices_accept(devices: int) -> None:
    from crowdml.protocols import find
    from crowdml.secagg.terms import terms_of

    task = set_stage("demo", find_task("demo"), devices, 1).task
    terms = terms_of(task, find(task).mechanisms(task))
    assert 3 <= terms.smallest <= terms.largest <= devices
    assert scaled(task.masking, 1.0) is task.masking


def test_devices_sense_their_last_digits_evenly_over_the_time() -> None:
    found = moments(10, 4, 5.0, seed=3)
    assert all(len(each) == 4 and each == sorted(each) for each in found)
    assert sorted(each[-1] for each in found) == [0.5 * (number + 1) for number in range(10)]


@pytest.mark.parametrize("state", ["starting", "serving", "killed with -9"])
def test_the_live_view_shows_progress_prices_and_the_portals_address(state: str) -> None:
    import io

    from rich.console import Console

    prices = {"epsilon_sample": 4.0, "epsilon_sample_alone": 23.67, "epsilon_device": 134.3, "delta": 1e-6}
    seen = View(
        state,
        13.0,
        100,
        100,
        gone=5,
        acknowledged=53,
        waiting=6,
        rounds=3,
        of_rounds=8,
        abandoned=1,
        survivors=90,
        accuracy=0.83,
        **prices,
        bytes_up=94_000,
        bytes_down=101_000,
        restarts=0,
        asked_again=7,
        address="http://127.0.0.1:1/",
    )
    console = Console(file=io.StringIO(), width=80)  # review 2, users: at 80 columns it lost a word
    console.print(panel(seen))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    shown = (
        "3 of 8",
        "0.83 on held-out samples",
        "23.67",
        "134.3",
        "94 kB, 101 kB",
        state,
        "http://127.0.0.1:1/",
        "6 not yet",
        "5 killed",
    )
    for part in (*shown, "on held-out samples", "90   1 rounds abandoned"):
        assert part in text
    assert "…" not in text


def test_the_proof_sees_a_check_in_that_is_lost_and_one_that_is_counted_twice(tmp_path: Path) -> None:
    """On a journal of our own: a receipt that names another place is lost, and so is one for other bytes."""
    from dataclasses import replace

    import numpy as np

    from crowdml.messages import SERVER, encode
    from crowdml.privacy.losses import Total
    from crowdml.privacy.private import RECEIVED, Release
    from crowdml.protocols import settled
    from crowdml.protocols.sgd import Gradient
    from crowdml.server.runner import TaskRunner
    from crowdml.storage.server import Store
    from crowdml.wire.envelopes import Envelope, open_signed, sign
    from crowdml.wire.keys import Key
    from crowdml.wire.problems import Problem
    from crowdml.wire.receipts import open_receipt
    from crowdml.wire.statements import Statement

    server, device, now = Key.generate(), Key.generate(), "2026-01-01T00:00:00+00:00"
    task = settled(find_task("digits"))  # its check-ins stand alone, so that one is enough
    with Store(tmp_path / "server.sqlite") as store:
        store.add_task(task.canonical, task.name, now, "running")
        store.invite(b"c" * 32, uses=1, at=now)
        store.enrol(b"c" * 32, device.public, now)
        runner = TaskRunner(store, task.canonical, server, lambda: now)
        (fields,) = runner.fold.expected.values()
        made = {
            name: np.zeros(fields[name].shape, np.int32) for name in ("gradient", "errors", "labels") if name in fields
        }
        released = {name: Release(value, RECEIVED) for name, value in made.items()}
        message = Gradient(released["gradient"], released.get("errors"), released.get("labels"), np.int32(0))
        envelope = Envelope(task.hash, device.id, frozenset((SERVER,)), 1, "sgd/gradient/1", encode(message))
        data = sign(envelope, Statement.of(Total(), 4, Total()), device)
        (answer,) = runner.accept([open_signed(data)])
        assert not isinstance(answer, Problem)
        status, receipt = answer
        published = runner.offer.body
    assert status == 202
    good = open_receipt(receipt)
    rest = (server.public, published, tmp_path / "transcript")
    proof = prove(tmp_path / "server.sqlite", task, [good], *rest)
    assert proof.holds
    assert (proof.journalled, proof.acknowledged) == (1, 1)
    for forged in (replace(good, index=2), replace(good, hash=b"x" * 32), replace(good, seq=2)):
        broken = prove(tmp_path / "server.sqlite", task, [good, forged], *rest)
        assert (broken.lost, broken.unsigned, broken.holds) == (1, 1, False)
    assert not prove(tmp_path / "server.sqlite", task, [good], rest[0], published + b"x", *rest[2:]).same_bits


def test_a_server_that_cannot_start_is_one_sentence_with_its_last_words(tmp_path: Path) -> None:
    import asyncio
    import socket

    from crowdml.demo.process import ServerFailed, ServerProcess

    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = ServerProcess(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(ServerFailed, match=r"did not start. Its last words: .*could not listen on"):
            asyncio.run(server.start())
    server.stop()
    assert server.process is None


@pytest.mark.slow
def test_a_city_of_processes_goes_on_when_two_are_killed_and_one_comes_back(tmp_path: Path) -> None:
    found, said = run(tmp_path, "--task", "traffic", "--devices", "6", "--seconds", "4")
    assert list(found)[: len(KEYS)] == KEYS
    assert (found["devices"], found["devices_killed"], found["devices_back"]) == (6, 2, 1)
    assert (found["lost"], found["counted_twice"], found["unsigned"], found["same_bits"]) == (0, 0, 0, True)
    assert 4 * 20 <= found["check_ins"] <= 6 * 20
    assert 0 <= found["check_ins"] - found["acknowledged"] <= 1  # who is gone may have died before its last receipt
    assert (found["epsilon_sample"], found["epsilon_device"]) == (1, 20 * 32)
    assert found["letters"] > 4 * 3 * 10
    assert sum(each["share"] for each in found["labels"]) == pytest.approx(1, abs=0.2)
    assert "is back, on the same folder" in said
    assert [entry.name for entry in tmp_path.iterdir()] == ["demo.png"], "nothing else stays behind"


def test_a_city_has_the_first_places_of_its_task_and_readings_for_so_many_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from crowdml.demo.city import set_scene

    monkeypatch.setattr("crowdml.demo.city.locate", lambda file: None)  # as where nobody has the data
    task = find_task("traffic")
    scene = set_scene(task, 12, 1)
    assert scene.task.places == task.places[:12]
    assert scene.values.shape == (12, 20 * 32 + 5)
    assert scene.data == "made up"
    for devices in (3, 107):
        with pytest.raises(DataError, match="has 106 places, and each device learns from 3 others"):
            set_scene(task, devices, 1)


def test_the_terminals_of_a_city_fit_a_narrow_screen() -> None:
    from io import StringIO

    from rich.console import Console

    from crowdml.cli.demo_city import terminals
    from crowdml.demo.city import Sight

    line = "next: 150 and more (3 of 4 votes) · right 76% of 416 so far · heard 12 letters, 3.46 kB"
    shown = Console(file=StringIO(), width=80)
    name = "Offramp Eastern Fwy E of Bulleen Rd"
    shown.print(terminals([Sight(name, "at work", line), Sight(name, "killed with -9", line), Sight(name, "starting")]))
    assert isinstance(shown.file, StringIO)
    lines = [text.rstrip() for text in shown.file.getvalue().splitlines() if text.strip()]
    assert [text.split("…   ")[1] for text in lines] == [
        "next: 150 and more (3 of 4 votes)    right 76%",
        "killed with -9",
        "starting",
    ]


CROWDED = """
import asyncio, os, signal, sys
from crowdml.demo.process import heed_signals, run_until_signal

signal.signal(signal.SIGINT, signal.default_int_handler)
steps = asked = 0

async def device(number):
    global steps, asked
    while True:
        steps += 1
        if number == 3 and not asked and steps > 300:
            asked = steps
            os.kill(os.getpid(), signal.SIGTERM)
        sum(range(100))
        await asyncio.sleep(0)

async def devices():
    await asyncio.gather(*map(device, range(100)))

async def crowd():
    learning = asyncio.create_task(devices())
    try:
        await asyncio.wait({learning})
    finally:
        learning.cancel()
        await asyncio.gather(learning, return_exceptions=True)

try:
    if sys.argv[1] == "ours":
        heed_signals()
        run_until_signal(crowd())
    else:  # what asyncio does by itself with an interrupt
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        asyncio.run(crowd())
except KeyboardInterrupt:
    print(steps - asked)
"""


@pytest.mark.parametrize("how", ["ours", "asyncio's"])
def test_no_device_takes_another_step_once_a_signal_has_come(tmp_path: Path, how: str) -> None:
    """Issue 11, section 4: `demo --task admm-adult` took two minutes to end under load.

    Left to asyncio, an interrupt waits behind every device that is ready, each of which works for a while: that is
    what this process counts. A second signal ended the demo at once, and now the first one does.
    """
    done = subprocess.run(
        [sys.executable, "-c", CROWDED, how],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    taken = int(done.stdout)
    assert (taken == 0) if how == "ours" else (taken > 90), done.stderr
