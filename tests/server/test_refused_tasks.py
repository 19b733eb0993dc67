"""A task that earlier versions accepted and devices refuse: a server shows it as ended, and all of it is still read."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))

from cli_runner import crowdml, refused  # found by the line above
from device import TEXT, Device, Line, make_task, serving

from crowdml.errors import TaskError
from crowdml.protocols import refusal, settled
from crowdml.server.export import export_model, model_card
from crowdml.server.hub import Hub, code_hash
from crowdml.server.runner import TaskRunner
from crowdml.server.serve import DATABASE
from crowdml.server.transcript import replay, write_transcript
from crowdml.storage.server import Store
from crowdml.task import Task, parse
from crowdml.wire.envelopes import open_signed
from crowdml.wire.keys import Key

NOW = "2026-11-01T00:00:00+00:00"


def old_task(delta: str = "0.1") -> Task:
    return settled(parse(TEXT.replace("1e-6", delta).format(name="old", steps=1_000_000)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a version without a ceiling left: a running task with delta = 0.1, and three check-ins of one device."""
    task, device = old_task(), Device(Line("", 0))
    place = tmp_path / "server"
    place.mkdir(mode=0o700)
    with Store(place / DATABASE) as store:
        hash_ = store.add_task(task.canonical, task.name, NOW, "running")
        store.invite(code_hash("one"), NOW, uses=1, ends_at=None, rate=None, tasks=(hash_,), label="")
        store.enrol(code_hash("one"), device.key.public, NOW)
        runner = TaskRunner(store, task.canonical, Key.generate(), lambda: NOW)
        answers = runner.accept([open_signed(device.envelope(task, seq)) for seq in (1, 2, 3)])
        assert [answer[0] for answer in answers] == [202, 202, 202]
    return place


def test_a_server_starts_with_a_task_that_is_refused_by_now_and_shows_it_as_ended(folder: Path) -> None:
    """Review 2, privacy finding 1: the ceiling of delta must not take a server away from its other studies."""
    task, other = old_task(), make_task()
    why = refusal(task)
    assert why is not None
    with serving(folder, other, task) as running:  # named at the start, too: it is here already
        line = running.line()
        listed = {each["name"]: each for each in json.loads(line.ask("GET", "/v1/tasks").body)["tasks"]}
        assert listed["count-old"]["state"] == "stopped"
        assert listed["count-old"]["reason"] == why.reason
        assert (listed["count-one"]["state"], listed["count-one"]["reason"]) == ("running", None)
        page = line.ask("GET", f"/studies/{task.hash.hex()[:12]}", headers={"Accept-Language": "en"}).body.decode()
        assert "the chance δ that its promise fails is larger than devices accept" in page
        assert "nobody can join it any more" in page
        answer = running.device().check_in(task)
        assert (answer.status, answer.slug) == (410, "task-stopped")
        assert "privacy.delta = 0.1" in answer.problem["detail"]
        assert running.device().check_in(other).status == 202
    with Store(folder / DATABASE) as store:
        assert store.task(task.hash).state == "stopped"
        assert [each.detail for each in store.events(task=task.hash, limit=5) if each.kind == "stopped"] == [why.reason]


def test_export_and_replay_read_a_task_that_is_refused_by_now(folder: Path, tmp_path: Path) -> None:
    task = old_task()
    with Store(folder / DATABASE) as store:
        model = export_model(store, task.hash)
        assert (model.check_ins, model.version) == (3, 3)
        assert "δ = 0.1" in model_card(model, "model.safetensors")
        with (tmp_path / "old.transcript").open("wb") as file:
            write_transcript(store, task.hash, file)
    assert replay(tmp_path / "old.transcript").check_ins == 3


def test_the_list_of_a_server_says_why_a_task_ended_before_the_server_has_started_again(folder: Path) -> None:
    (row,) = crowdml("task", "list", "--folder", str(folder), "--json", "-").json["tasks"]
    assert (row["state"], row["check_ins"]) == ("stopped", 3)
    assert row["why"].startswith("privacy.delta = 0.1")
    assert "count-old is stopped: privacy.delta = 0.1" in crowdml("task", "list", "--folder", str(folder)).out


@pytest.mark.parametrize("verb", ["start", "resume"])
def test_a_task_that_is_refused_by_now_cannot_be_run_again(folder: Path, verb: str) -> None:
    with Store(folder / DATABASE) as store:
        store.set_state(old_task().hash, "paused", NOW)
    said = refused("task", verb, "count-old", "--folder", str(folder))
    assert "privacy.delta = 0.1" in said
    assert "at most 1e-05" in said


def test_a_paused_task_that_is_refused_by_now_has_ended_too(folder: Path) -> None:
    with Store(folder / DATABASE) as store:
        store.set_state(old_task().hash, "paused", NOW)
    with Store(folder / DATABASE, serving=True) as store:
        hub = Hub.open(store)
        assert hub.states[old_task().hash] == "stopped"


def test_a_server_does_not_begin_to_host_a_task_that_devices_refuse(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"privacy.delta = 0.1"), serving(tmp_path / "new", old_task()):
        pass
    file = tmp_path / "old.toml"
    file.write_text(TEXT.replace("1e-6", "0.1").format(name="old", steps=10))
    assert "privacy.delta = 0.1" in refused("task", "check", str(file))
    with serving(tmp_path / "other", make_task()):
        pass
    assert "privacy.delta = 0.1" in refused("task", "start", str(file), "--folder", str(tmp_path / "other"))
