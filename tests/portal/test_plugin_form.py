"""The form for a new task knows the settings of an installed protocol from its Settings class alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crowd import Crowd
from desk import set_up
from plugged import SIGNS, no_plugins_left

from crowdml.protocols import PROTOCOLS
from crowdml.server.portal.task_form import check_text, defaults, fields, flaws_of, task_text, values_of

FILLED = {"name": "corners", "labels.classes": "a\nb", "features.dimension": "4", "protocol.kind": "signs",
          "protocol.rate": "0.5", "privacy.epsilon.votes": "1.0"}  # fmt: skip


@pytest.fixture(autouse=True)
def signs() -> Iterator[None]:
    with no_plugins_left(SIGNS):
        yield


def test_a_plugins_settings_are_fields_with_the_docstrings_as_their_help():
    rate, votes, batch = (fields()[key] for key in ("protocol.rate", "privacy.epsilon.votes", "protocol.batch"))
    assert rate.help == "How far the first vote moves a weight. The t-th vote moves it by rate / sqrt(t)."
    assert rate.kind == "number"
    assert not rate.optional
    assert votes.help == "Which way each weight should go, added up over the batch."
    assert rate.when == votes.when == ("protocol.kind", ("signs",))
    assert batch.whole
    assert batch.when == ("protocol.kind", ("sgd", "local_updates", "signs"))
    assert ("signs", "signs (plug-in)") in fields()["protocol.kind"].choices


def test_a_task_of_a_plugin_is_made_by_the_form_and_pinned():
    text, flaws = task_text({**defaults(), **FILLED})
    assert not flaws
    task = check_text(text)
    assert task.protocol["kind"] == "signs"
    assert task.protocol["plugin"].startswith("sha256:")
    assert set(task.privacy.epsilon) == {"votes"}
    assert values_of(task)["protocol.rate"] == "0.5"


def test_what_is_wrong_with_a_plugins_setting_stands_beside_its_field():
    flaws = flaws_of({**defaults(), **FILLED, "protocol.rate": "-1", "protocol.batch": "0"})
    assert flaws["protocol.rate"].endswith("protocol.rate = -1: must be above 0.")
    assert "must lie between 1 and 100000" in flaws["protocol.batch"]


def test_the_settings_of_an_optional_table_may_be_left_empty(tmp_path: Path):
    file, declared = tmp_path / "firm.py", 'by rate / sqrt(t)."""\n'
    text = SIGNS.read_text().replace(declared, f"{declared}    combine: cm.Combine | None = None\n")
    file.write_text(text.replace("signs", "firm"))
    filled = {**FILLED, "protocol.kind": "firm"}
    with no_plugins_left(file):
        assert fields()["protocol.combine.rule"].optional
        assert "combine" not in check_text(task_text({**defaults(), **filled})[0]).protocol
        chosen = {"protocol.combine.rule": "median", "protocol.combine.uploads": "7"}
        made = check_text(task_text({**defaults(), **filled, **chosen})[0])
        assert made.protocol["combine"] == {"rule": "median", "uploads": 7}


def test_without_plugins_the_form_is_what_it_was():
    PROTOCOLS._named.clear()
    assert fields()["protocol.batch"].when is None
    assert "protocol.rate" not in fields()


def test_a_study_with_a_plugin_goes_from_the_form_to_a_page_that_says_what_to_install(crowd: Crowd):
    desk = set_up(crowd)
    assert "signs (plug-in)" in desk.get("/operator/tasks/new").text
    assert 'data-is="signs"' in desk.text
    draft = desk.post("/operator/tasks/new", **{**defaults(), **FILLED})
    assert draft.status == 200, draft.text
    assert "which way to go" in draft.text
    path = draft.address.removeprefix(desk.browser.base)
    assert desk.post(f"{path}/start", local="yes").status == 200
    hosted = next(each for each in crowd.running.hub.hosted() if each.task.name == "corners")
    page = crowd.browser().get(f"/studies/{hosted.task.hash.hex()[:12]}").text
    assert "--plugin FILE.py" in page
    assert hosted.task.protocol["plugin"] in page
