"""What an operator does beside a server that runs: export, replay, back up, restore, start and stop tasks."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device import Device, Running, make_task, serving

from crowdml.messages import decode
from crowdml.server.limits import Limits

sys.path.insert(0, str(Path(__file__).parent.parent / "cli"))
from cli_runner import crowdml, refused

TASK = make_task()
PATH = f"/v1/tasks/{TASK.hash.hex()}"
MANY = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6, snapshot_every=20)


def give(device: Device, many: int) -> None:
    for _ in range(many):
        assert device.check_in(TASK, gradient=np.full((8, 2), device.seq + 1, np.int32)).status == 202


def published(server: Running) -> bytes:
    return server.line().ask("GET", f"{PATH}/publication").body


@pytest.mark.parametrize("check_ins", [0, 7, 65])
def test_a_transcript_replays_to_the_bits_that_were_published_and_names_nobody(tmp_path: Path, check_ins: int) -> None:
    with serving(tmp_path / "data", TASK, limits=MANY) as server:
        devices = [server.device() for _ in range(3)]
        for place in range(check_ins):
            give(devices[place % 3], 1)
        args = ("--folder", str(tmp_path / "data"), "--transcript", str(tmp_path / "told"), "--json", "-")
        told = crowdml("task", "export", TASK.name, *args).json
        out = tmp_path / "publication"
        answer = crowdml("replay", str(tmp_path / "told"), "--out", str(out), "--json", "-").json
        assert out.read_bytes() == published(server)
        assert (answer["version"], answer["check_ins"]) == (check_ins, check_ins)
        assert answer["publication"] == told["publication"]
        assert answer["first"] == told["first"] == (check_ins // 20 - 1) * 20 * (check_ins >= 40)
    raw = (tmp_path / "told").read_bytes()
    for device in devices:
        assert device.key.id.encode() not in raw
        assert device.key.public not in raw
    assert b"20" + b"26-" not in raw


def test_a_transcript_that_was_changed_or_cut_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path / "data", TASK, limits=MANY) as server:
        give(server.device(), 5)
        told = tmp_path / "told"
        crowdml("task", "export", TASK.name, "--folder", str(tmp_path / "data"), "--transcript", str(told))
    whole = told.read_bytes()
    cut = tmp_path / "cut"
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        cut.write_bytes(whole[:size])
        assert "no whole transcript" in refused("replay", str(cut))
    cut.write_bytes(whole + b"\x01")
    assert "follows after its end" in refused("replay", str(cut))
    three = np.full((8, 2), 3, "<i4").tobytes()
    assert whole.count(three) == 1
    cut.write_bytes(whole.replace(three, np.full((8, 2), 4, "<i4").tobytes()))
    assert "not what happened" in refused("replay", str(cut))
    assert "no transcript" in refused("replay", str(tmp_path / "none"))


def test_a_model_is_exported_with_a_card_whose_five_lines_load_it_and_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "data", TASK, limits=MANY) as server:
        give(server.device(), 3)
        give(server.device(), 2)
        args = ("--folder", str(tmp_path / "data"), "--model", str(tmp_path / "m.safetensors"), "--json", "-")
        said = crowdml("task", "export", TASK.name, *args).json
        weights = decode("sgd/params/1", published(server)).weights
    assert (said["check_ins"], said["devices"], said["version"]) == (5, 2, 5)
    assert said["epsilon_sample"] == pytest.approx(1, abs=1e-6)
    assert said["epsilon_device"] > 1.5
    card = (tmp_path / "m.md").read_text()
    for word in (
        "unit | sample",
        "replace-sample",
        "anyone",
        "a sample's ε | 1 ",
        "accountant",
        "2 devices",
        "never seen",
    ):
        assert word in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(code.strip().splitlines()) == 5
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, found)
    assert np.array_equal(found["weights"], weights)
    assert printed.getvalue().strip() in ("['a']", "['b']")


def test_a_file_that_is_no_backup_is_refused_and_no_folder_is_left(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text('name = "city"\n')
    for file, said in (("study.toml", "is no backup of a crowdml server"), ("absent", "there is no backup")):
        assert said in refused("restore", str(tmp_path / file), "--folder", str(tmp_path / "deep" / "re0"))
    (tmp_path / "mine").mkdir()
    refused("restore", str(tmp_path / "study.toml"), "--folder", str(tmp_path / "mine"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mine", "study.toml"]


def test_what_is_one_is_not_said_as_many(tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    with serving(tmp_path / "data", TASK, limits=MANY) as server:
        give(server.device(), 1)
        crowdml("backup", str(tmp_path / "copy"), "--folder", data)
        files = ("--model", str(tmp_path / "m.safetensors"), "--transcript", str(tmp_path / "told"))
        said = crowdml("task", "export", TASK.name, "--folder", data, *files).out
    assert "1 entry of the journal up to" in " ".join(said.split())
    card = next(tmp_path.glob("m*.md")).read_text()
    assert "| 1 check-in of 1 device |" in card
    assert "(1 check-in)" in card
    back = crowdml("restore", str(tmp_path / "copy"), "--folder", str(tmp_path / "again")).out
    assert "Restored 1 task with 1 check-in to" in " ".join(back.split())


def test_a_backup_is_taken_while_check_ins_come_in_and_restores_to_a_server_that_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path / "data", TASK, limits=MANY) as server:
        device, busy = server.device(), server.device()
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                give(busy, 1)

        thread = threading.Thread(target=work)
        thread.start()
        give(device, 30)
        kept = crowdml("backup", str(tmp_path / "copy"), "--folder", str(tmp_path / "data"), "--json", "-").json
        give(device, 5)
        stop.set()
        thread.join(30)
        assert kept["bytes"] > 0
        assert "already there" in refused("backup", str(tmp_path / "copy"), "--folder", str(tmp_path / "data"))
    back = crowdml("restore", str(tmp_path / "copy"), "--folder", str(tmp_path / "again"), "--json", "-").json
    count = back["check_ins"][TASK.hash.hex()]
    assert count >= 30
    assert "is there" in refused("restore", str(tmp_path / "copy"), "--folder", str(tmp_path / "again"))
    with serving(tmp_path / "again", TASK, limits=MANY, invite=0) as server:
        assert server.state(TASK)[1] == count
        told = tmp_path / "told"
        crowdml("task", "export", TASK.name, "--folder", str(tmp_path / "again"), "--transcript", str(told))
        answer = crowdml("replay", str(told), "--out", str(tmp_path / "bits"), "--json", "-")
        assert (tmp_path / "bits").read_bytes() == published(server)
        assert answer.json["check_ins"] == count
        device.line = server.line()
        assert device.check_in(TASK, seq=31).status == 202, "the copy had 30 of this device"


def test_tasks_start_and_stop_beside_a_server_that_runs(tmp_path: Path) -> None:
    other = make_task("two")
    from device import TEXT

    file = tmp_path / "two.toml"
    file.write_text(TEXT.format(name="two", steps=1_000_000))
    folder = ("--folder", str(tmp_path / "data"), "--json", "-")
    with serving(tmp_path / "data", TASK, limits=MANY) as server:
        device = server.device()
        give(device, 1)
        assert crowdml("task", "stop", TASK.name, *folder).json["state"] == "stopped"
        assert crowdml("task", "start", str(file), *folder).json["hash"] == other.hash.hex()
        _until(lambda: other.hash in server.hub.runners and server.hub.states[TASK.hash] == "stopped")
        assert device.check_in(TASK).slug == "task-stopped"
        assert device.check_in(other, seq=1).status == 202
        assert crowdml("task", "start", TASK.name, *folder).json["state"] == "running"
        _until(lambda: server.hub.states[TASK.hash] == "running")
        assert device.check_in(TASK, seq=2).status == 202
    assert "called 'none'" in refused("task", "stop", "none", *folder)
    assert "no server" in refused("task", "stop", "x", "--folder", str(tmp_path / "nowhere"), "--json", "-")
    assert json.loads(crowdml("task", "pause", TASK.name, *folder).out)["state"] == "paused"


def _until(holds: Any) -> None:
    """Wait for something that another thread does every second."""
    ends = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < ends
        threading.Event().wait(0.05)
