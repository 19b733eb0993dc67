"""Gathered rounds on the operator's page: how the open one stands, and why a task waits for its operator."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from crowd import open_crowd
from desk import set_up
from gathered_task import gathered_plugin, make  # noqa: F401  a fixture
from test_gathered import give

from crowdml.protocols import PROTOCOLS, find


def test_the_operators_page_says_how_the_open_round_stands(tmp_path: Path):
    task, timed = make("rounds", size=10), make("timed", size=10, seconds=600)
    with open_crowd(tmp_path, task, timed) as crowd:
        desk = set_up(crowd)
        page = desk.get(f"/operator/tasks/{timed.hash.hex()[:12]}")
        assert re.search(r"Round 0: 0 of 10 uploads, closes at 10 or at \d\d:\d\d UTC\.", page.text)
        page = desk.get(f"/operator/tasks/{task.hash.hex()[:12]}")
        assert page.status == 200
        assert "Round 0: 0 of 10 uploads, closes at 10; it has been waiting for" in page.text


def test_a_server_without_the_plug_in_of_one_task_serves_the_others_and_says_what_to_install(tmp_path, monkeypatch):
    task = make("lacks", size=1)
    with open_crowd(tmp_path, task) as crowd:
        assert give(crowd.running.device(), task, 1, 0).status == 202
    monkeypatch.setattr(PROTOCOLS, "_named", {})
    find.cache_clear()
    with open_crowd(tmp_path) as crowd:
        listed = json.loads(crowd.running.line().ask("GET", "/v1/tasks").body)
        assert ([each["name"] for each in listed["tasks"]], [each["name"] for each in listed["aside"]]) == (
            [crowd.task.name], ["lacks"],
        )  # fmt: skip
        assert "test_median" in listed["aside"][0]["reason"]
        waits = crowd.running.line().ask("GET", f"/v1/tasks/{task.hash.hex()}/publication")
        assert (waits.status, waits.slug) == (503, "task-paused")
        page = html.unescape(set_up(crowd).get("/operator").text)
        assert f"Task lacks is put aside: {listed['aside'][0]['reason']}. Its journal is kept as it is" in page
    find.cache_clear()


def test_a_round_that_cannot_be_closed_pauses_its_task_and_the_operator_reads_why(tmp_path: Path):
    task = make("fails", size=1, peek=7)
    with open_crowd(tmp_path, task) as crowd:
        assert give(crowd.running.device(), task, 1, 0).status == 202
        assert crowd.running.hub.states[task.hash] == "paused"
        page = set_up(crowd).get(f"/operator/tasks/{task.hash.hex()[:12]}")
        assert "this task has none. Attach them with" in page.text
