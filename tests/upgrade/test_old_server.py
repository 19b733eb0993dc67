"""A server's folder, backup, transcripts and model of version 0.1: today's code serves, restores and reads them."""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
import urllib.request
from fractions import Fraction
from http.cookiejar import CookieJar
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from old_data import FACTS, HERE, TASKS, Old, Serving, go_on, rows, serving, source, transcript

from crowdml.cli import cli
from crowdml.errors import CrowdmlError
from crowdml.server.export import export_model, model_file, onnx_file
from crowdml.server.hub import utc_now
from crowdml.server.transcript import replay, write_transcript
from crowdml.server.validation import OwnRows, keep_rows, unpack_rows
from crowdml.storage.server.looks import Terms, detach, looks_of, rows_of, validations
from crowdml.task import from_canonical

NAMES = sorted(TASKS)


def crowdml(*words: object) -> dict[str, Any]:
    done = CliRunner().invoke(cli, [*map(str, words), "--json", "-"], prog_name="crowdml")
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def about(name: str) -> dict[str, Any]:
    return FACTS["tasks"][name]


# --- open ---


def test_the_journals_are_whole(old: Old):
    with old.store() as store:
        assert store.check() == {TASKS[name]: about(name)["entries"] for name in NAMES}
        assert store.operators() == ["operator"]


def test_every_task_is_served_where_it_stood(server: Serving):
    listed = server.listed()
    assert sorted(listed) == NAMES
    for name in NAMES:
        assert listed[name]["hash"] == TASKS[name].hex()
        body = server.get(f"/v1/tasks/{TASKS[name].hex()}/publication")
        assert hashlib.sha256(body).hexdigest() == about(name)["publication"], name
        assert server.get(f"/studies/{TASKS[name].hex()[:12]}"), name
    assert {listed[name]["state"] for name in NAMES if name != "loose"} == {"running"}


def test_the_operator_logs_in_and_sees_every_task(server: Serving):
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))

    def page(path: str, form: dict[str, str] | None = None) -> str:
        data = None if form is None else urllib.parse.urlencode(form).encode()
        return browser.open(server.address + path, data, timeout=20).read().decode()

    token = re.search(r'name="form-token" value="([^"]*)"', page("/operator/login"))
    assert token is not None
    said = page("/operator/login", {"form-token": token[1], "name": "operator", "password": FACTS["password"]})
    assert "Overview" in said
    for name in NAMES:
        assert name in page(f"/operator/tasks/{TASKS[name].hex()[:12]}")


def test_commands_work_beside_the_old_folder(old: Old):
    folder = old.server()
    listed = {each["name"]: each for each in crowdml("task", "list", "--folder", folder)["tasks"]}
    assert sorted(listed) == NAMES
    assert crowdml("task", "pause", "activity", "--folder", folder)["state"] == "paused"
    assert crowdml("task", "resume", "activity", "--folder", folder)["state"] == "running"
    assert crowdml("task", "stop", "together", "--folder", folder)["state"] == "stopped"
    assert crowdml("operator", "list", "--folder", folder)["operators"] == ["operator"]
    crowdml("invite", "--task", "activity", "--folder", folder)
    crowdml("backup", old.path / "again.sqlite", "--folder", folder)
    again = crowdml("restore", old.path / "again.sqlite", "--folder", old.path / "again")
    assert again["check_ins"] == {TASKS[name].hex(): about(name)["entries"] for name in NAMES}


# --- replay and export ---


@pytest.mark.parametrize("name", NAMES)
def test_an_old_transcript_and_one_of_the_old_folder_lead_to_what_was_published(old: Old, name: str):
    assert replay(transcript(name)).hash == about(name)["publication"]
    with old.store() as store, (old.path / "transcript").open("wb") as file:
        write_transcript(store, TASKS[name], file)
    again = replay(old.path / "transcript")
    assert (again.hash, again.version) == (about(name)["publication"], about(name)["version"])


def tensors(data: bytes) -> Any:
    """The numbers of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    json.loads(data[8 : 8 + size])
    return np.frombuffer(data[8 + size :], "<f4")


def test_a_model_is_exported_from_the_old_folder_as_it_was(old: Old):
    with old.store() as store:
        model = export_model(store, TASKS["activity"])
    assert hashlib.sha256(np.asarray(model.weights, "<f4").tobytes()).hexdigest() == FACTS["model"]["weights"]
    kept = (HERE / "model" / "activity.safetensors").read_bytes()
    np.testing.assert_array_equal(tensors(kept), tensors(model_file(model)))
    onnxruntime = pytest.importorskip("onnxruntime")
    x = np.random.default_rng(5).normal(size=(20, 64, 3)).astype(np.float32)  # windows of acceleration
    said = []
    for data in ((HERE / "model" / "activity.onnx").read_bytes(), onnx_file(model)):
        session = onnxruntime.InferenceSession(data)
        said.append([np.asarray(each) for each in session.run(None, {session.get_inputs()[0].name: x})])
    for ours, theirs in zip(*said, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", NAMES)
def test_every_task_of_the_old_folder_is_exported(old: Old, name: str):
    folder = old.server()
    said = crowdml("task", "export", name, "--model", old.path / "model.safetensors", "--folder", folder)
    assert said["version"] == about(name)["version"]


# --- a backup ---


def test_an_old_backup_is_restored_and_goes_on(old: Old):
    said = crowdml("restore", old.backup(), "--folder", old.path / "restored")
    assert said["check_ins"] == {TASKS[name].hex(): about(name)["entries"] for name in NAMES}
    assert said["halted"] == [TASKS["digits012"].hex()]
    with serving(old.path / "restored") as server:
        _, summary = go_on(
            old.device("device"), server.address, "activity", lambda _, task: source(task, rows(task, 200, 1)), most=1
        )
        assert server.entries("activity") == about("activity")["entries"] + 1
        assert min(each.number for each in server.hub.round_figures(TASKS["together"])[:1]) > 1_000_000
    assert (summary.check_ins, summary.repeated) == (1, 0)


# --- validation ---


def kept_rows(store: Any) -> OwnRows:
    found = validations(store)[TASKS["digits012"]]
    data = rows_of(store, found.rows)
    assert data is not None
    samples = unpack_rows(data, found.count, found.dimension)
    return OwnRows(samples.x, samples.y, samples.x)


def test_charged_rows_keep_what_looks_at_them_have_cost(old: Old):
    with old.store() as store:
        for name in ("digits012", "loose"):
            found, said = validations(store)[TASKS[name]], about(name)["validation"]
            assert (str(found.spent), found.left, found.count) == (said["spent"], said["left"], said["rows"])
            assert [[look.version, look.value, str(look.step)] for look in looks_of(store, found)] == said["looks"]


def test_old_charged_rows_stay_charged_when_they_are_attached_again(old: Old):
    with old.store() as store:
        samples = kept_rows(store)
        stored = store.task(TASKS["digits012"])
        assert stored is not None
        task = from_canonical(stored.canonical)
        assert detach(store, task.hash)
        with pytest.raises(CrowdmlError, match="charged"):
            keep_rows(store, task, samples, Terms("public.csv", None, None, 1), utc_now())
        again = keep_rows(store, task, samples, Terms("again.csv", Fraction(1, 2), Fraction(3), 1), utc_now())
        assert (again.spent, again.left) == (1, 4)


def test_a_public_set_with_one_old_charged_row_is_refused(old: Old):
    """Review 2, privacy: an old set is known by the hash of the whole, and its rows are still there to be hashed."""
    with old.store() as store:
        samples = kept_rows(store)
        stored = store.task(TASKS["digits012"])
        assert stored is not None
        task = from_canonical(stored.canonical)
        rng = np.random.default_rng(8)
        x = np.concatenate([samples.x[:1], rng.normal(size=(9, 64)).astype(np.float32)])
        mixed = OwnRows(x, np.concatenate([samples.y[:1], np.zeros(9, np.float32)]), x)
        with pytest.raises(CrowdmlError):
            keep_rows(store, task, mixed, Terms("public.csv", None, None, 1), utc_now())


# --- a delta that promises nothing ---


def test_a_task_with_a_large_delta_is_shown_as_ended_with_the_reason(server: Serving):
    """The server starts all the same. Other tests here read the task's ledger, export its model and replay it."""
    listed = server.listed()
    assert (listed["loose"]["state"], listed["activity"]["state"]) == ("stopped", "running")
    page = server.get(f"/studies/{TASKS['loose'].hex()[:12]}").decode()
    assert "This study was ended: the chance δ that its promise fails is larger than devices accept." in page
    reason = server.hub.find(TASKS["loose"]).reason
    assert reason is not None
    assert "delta" in reason
