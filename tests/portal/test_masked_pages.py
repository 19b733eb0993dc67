"""A study under masks, as its pages show it: what the server learns, both epsilons, and how the rounds went."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from cli_runner import crowdml
from crowd import Crowd, open_crowd
from desk import set_up
from masked_device import crowd as masked_crowd
from masked_device import make_masked, through
from test_public import words_of

from crowdml.price import Price
from crowdml.protocols import find
from crowdml.server.portal.health import lately

TASK = make_masked("pages", cohort=5, minimum=4)


def one_round(crowd: Crowd) -> None:
    """Five devices, of which one goes after it has shared its secrets: four are in the sum."""
    rounds = crowd.running.hub.runners[TASK.hash].rounds
    assert rounds is not None
    before = rounds.counts.get("summed", 0)
    devices = masked_crowd(crowd.running, TASK, 5)
    for each in devices:
        each.advertise()
    through(devices, lambda: rounds.counts.get("summed", 0) > before)


def test_a_study_under_masks_says_what_the_server_learns_and_what_colluders_leave(tmp_path: Path):
    with open_crowd(tmp_path / "data", TASK) as crowd:
        path = f"/studies/{TASK.hash.hex()[:12]}"
        seen = words_of(crowd.browser().get(path).text)
        assert "the server learns that sum over 4 to 5 devices, and nothing about any single one" in seen
        assert "Cohorts added up 0 Rounds abandoned 0" in seen
        priced = Price.of(find(TASK), TASK)
        for epsilon in (priced.sample_epsilon(), priced.sample_epsilon(alone=True)):
            assert re.search(rf"ε = {epsilon:.3g}\b", seen), epsilon
        assert "If everyone else colludes" in seen
        german = words_of(crowd.browser().get(f"{path}?lang=de").text)
        assert "Wenn alle anderen sich absprechen" in german
        assert "Der Server erfährt diese Summe über 4 bis 5 Geräte" in german


def test_the_pages_show_cohorts_and_survivors(tmp_path: Path):
    with open_crowd(tmp_path / "data", TASK) as crowd:
        one_round(crowd)
        path = f"/studies/{TASK.hash.hex()[:12]}"
        assert "Cohorts added up 1 Rounds abandoned 0 Devices in the sums 5 of 5" in words_of(
            crowd.browser().get(path).text
        )
        desk = set_up(crowd)
        page = words_of(desk.browser.get(f"/operator/tasks/{TASK.hash.hex()[:12]}").text)
        assert "1 cohort added up, 0 rounds abandoned." in page
        assert re.search(r"Round Phase Cohort Shared Survived Seconds Why not .*1 summed 5 5 5", page)
        assert "if everyone else colludes" in page


def test_a_total_of_the_server_is_nowhere_shown_as_a_check_in(tmp_path: Path):
    with open_crowd(tmp_path / "data", TASK) as crowd:
        one_round(crowd)
        hub, name = crowd.running.hub, TASK.hash.hex()[:12]
        hosted = next(each for each in hub.hosted() if each.task == TASK)
        assert hub.store.head(TASK.hash).index == 6, "five vectors, and their total"
        assert hosted.check_ins == 5
        now = lately(hub, hosted)
        assert (now.hour, now.per_minute, now.active) == (5, 1.0, 5)
        crowd.point()
        for page in ("/", f"/studies/{name}"):
            assert "Check-ins 5 " in words_of(crowd.browser().get(page).text), page
        listed = json.loads(crowd.browser().get("/v1/tasks").text)["tasks"]
        assert [each["check_ins"] for each in listed if each["name"] == TASK.name] == [5]
        assert f'crowdml_check_ins{{task="{name}"}} 5\n' in crowd.browser().get("/metrics").text
        assert json.loads(crowd.browser().get(f"/studies/{name}/figures.json").text)["check-ins"]["y"][-1] == 5
        desk = set_up(crowd)
        for page in ("/operator", f"/operator/tasks/{name}"):
            assert "Check-ins 5 " in words_of(desk.get(page).text), page
    rows = crowdml("task", "list", "--folder", str(tmp_path / "data"), "--json", "-").json["tasks"]
    assert [(each["check_ins"], each["devices"]) for each in rows if each["name"] == TASK.name] == [(5, 5)]
    with open_crowd(tmp_path / "data", TASK) as again:
        hosted = next(each for each in again.running.hub.hosted() if each.task == TASK)
        assert hosted.check_ins == 5, "after a restart as before"


def test_a_device_that_was_too_late_for_a_round_is_no_refusal(tmp_path: Path):
    with open_crowd(tmp_path / "data", TASK) as crowd:
        one_round(crowd)
        late = masked_crowd(crowd.running, TASK, 1)[0]
        assert late.begin(1).slug == "round-over"
        seen = words_of(set_up(crowd).get("/operator").text)
        assert "Refusals since the start None." in seen
        assert "1 time a device was too late for a round" in seen


def test_a_study_without_masks_speaks_of_none(busy: Crowd):
    seen = words_of(busy.browser().get(busy.path).text)
    assert "colludes" not in seen
    assert "Cohorts" not in seen


def test_a_round_that_somebody_spoilt_is_shown_with_its_reason_and_who_dealt_wrong_shares_by_name(tmp_path: Path):
    """One device seals its shares with a key that it did not advertise: nobody can open them, or take its mask off."""
    with open_crowd(tmp_path / "data", TASK) as crowd:
        rounds = crowd.running.hub.runners[TASK.hash].rounds
        assert rounds is not None
        devices = masked_crowd(crowd.running, TASK, 5)
        dealer = devices[3]
        for each in devices:
            each.advertise()
        assert dealer.state is not None
        dealer.state = replace(dealer.state, root=bytes(32))  # other secrets than its advert says
        through(devices, lambda: bool(rounds.counts))
        page = words_of(set_up(crowd).get(f"/operator/tasks/{TASK.hash.hex()[:12]}").text)
        assert "0 cohorts added up, 1 round abandoned." in page
        assert re.search(r"1 abandoned 5 5 5 [0-9.,]+ the secrets of 1 devices did not come back", page)
        assert f"device {dealer.id} dealt shares that 4 neighbours could not open" in page
        study = words_of(crowd.browser().get(f"/studies/{TASK.hash.hex()[:12]}").text)
        assert "Cohorts added up 0 Rounds abandoned 1" in study
        assert dealer.id not in study
