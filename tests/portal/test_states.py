"""Which changes of a task's state are allowed: the same by the command line, in the hub and on the operator's page."""

from __future__ import annotations

import html
from itertools import product
from pathlib import Path

import pytest
from cli_runner import crowdml
from crowd import Crowd
from desk import set_up
from device import make_task

from crowdml.server.hosting import CHANGES, ChangeError, useful_changes
from crowdml.server.hub import utc_now
from crowdml.server.serve import DATABASE
from crowdml.storage.server import State, Store

STATES: tuple[State, ...] = ("draft", "running", "paused", "stopped")
VERBS = ("start", "resume", "pause", "stop")
LEADS_TO = {
    **{(state, "start"): "running" for state in STATES},
    **{(state, "stop"): "stopped" for state in STATES},
    **{(state, "resume"): "running" for state in ("running", "paused")},
    **{(state, "pause"): "paused" for state in ("running", "paused")},
}
"""Every other pair is refused."""
PAIRS = list(product(STATES, VERBS))


def sentence(name: str, state: str, verb: str) -> str:
    stands = "has not begun" if state == "draft" else "is stopped"
    return f"Task {name} {stands}, so there is nothing to {verb}. Start it first"


def put(crowd: Crowd, state: State) -> None:
    hub, hash_ = crowd.running.hub, crowd.task.hash

    def work() -> None:
        hub.store.set_state(hash_, state, utc_now())
        hub.states[hash_] = state

    hub._writer.submit(work).result(20)


def test_the_table_names_what_an_operator_can_ask_for():
    assert tuple(CHANGES) == VERBS


def test_the_hub_allows_the_changes_of_the_table_and_no_others(crowd: Crowd):
    hub, hash_ = crowd.running.hub, crowd.task.hash
    for state, verb in PAIRS:
        put(crowd, state)
        if (state, verb) in LEADS_TO:
            assert crowd.running.run(hub.change(hash_, verb, "by a test")) == LEADS_TO[state, verb]
        else:
            with pytest.raises(ChangeError, match=sentence(crowd.task.name, state, verb)):
                crowd.running.run(hub.change(hash_, verb))
        assert hub.states[hash_] == LEADS_TO.get((state, verb), state), (state, verb)
        stored = hub.store.task(hash_)
        assert stored is not None
        assert stored.state == hub.states[hash_]


def test_the_operators_page_allows_the_same_changes_and_has_a_button_for_each_that_does_something(crowd: Crowd):
    desk, path = set_up(crowd), f"/operator/tasks/{crowd.task.hash.hex()[:12]}"
    for state, verb in PAIRS:
        put(crowd, state)
        page = desk.get(path).text
        shown = {name for name in VERBS if f'name="to" value="{name}"' in page}
        assert shown == set(useful_changes(state)), state
        answer = desk.post(f"{path}/state", to=verb)
        assert answer.status == (200 if (state, verb) in LEADS_TO else 409), (state, verb)
        if (state, verb) not in LEADS_TO:
            assert sentence(crowd.task.name, state, verb) in html.unescape(answer.text)
        assert crowd.running.hub.states[crowd.task.hash] == LEADS_TO.get((state, verb), state), (state, verb)


def test_the_command_line_allows_the_same_changes_in_the_same_words(tmp_path: Path):
    task = make_task()
    with Store(tmp_path / DATABASE) as store:
        store.add_task(task.canonical, task.name, utc_now())
    for state, verb in PAIRS:
        with Store(tmp_path / DATABASE) as store:
            store.set_state(task.hash, state, utc_now())
        answer = crowdml("task", verb, task.name, "--folder", str(tmp_path))
        assert answer.code == (0 if (state, verb) in LEADS_TO else 1), (state, verb, answer.err)
        if (state, verb) not in LEADS_TO:
            assert sentence(task.name, state, verb) in " ".join(answer.err.split())
        with Store(tmp_path / DATABASE) as store:
            stored = store.task(task.hash)
            assert stored is not None
            assert stored.state == LEADS_TO.get((state, verb), state), (state, verb)


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        ("draft", ["start", "stop"]),
        ("running", ["pause", "stop"]),
        ("paused", ["resume", "stop"]),
        ("stopped", ["start"]),
    ],
)
def test_a_button_is_there_for_each_change_that_does_something(state: State, changes: list[str]):
    assert useful_changes(state) == changes
