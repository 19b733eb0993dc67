"""A verdict stands beside every accuracy and error rate, and a crowd too small for its price is told so."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from crowd import Crowd, open_crowd
from desk import set_up, sit_down
from test_portal_figures import TASK, moments
from test_validation_pages import CHARGED, PUBLIC, look

from crowdml.server.export import export_model, model_card
from crowdml.server.portal.figures import work_out
from crowdml.server.portal.live import numbers
from crowdml.server.portal.studies import Study, price_of
from crowdml.server.portal.words import words
from crowdml.server.validation import watched
from crowdml.task import shipped_text
from crowdml.verdict import Verdict, verdict


def plain(text: str) -> str:
    """The words of a page."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).replace("\u00a0", " ").split())


@pytest.mark.parametrize(("error", "level"), [(0.66, "chance"), (0.49, "majority"), (0.1, "learned")])
def test_the_crowds_error_rate_is_weighed_beside_chance_and_the_class_that_it_counted_most(error: float, level: str):
    found = work_out(TASK, moments([error] * 20, each=400)).verdict
    assert found is not None
    known = dict(found.numbers)
    assert (found.level, known["chance"], known["majority"]) == (level, pytest.approx(1 / 3), pytest.approx(0.5))
    assert known["accuracy"] == pytest.approx(1 - error)


def test_an_error_rate_that_noise_hides_has_no_verdict_and_shares_that_it_blurs_no_majority():
    assert work_out(TASK, moments([0.4], each=1, variance=800.0)).verdict is None
    blurred = work_out(TASK, moments([0.1], each=20, variance=100.0)).verdict
    assert blurred is not None
    assert "majority" not in dict(blurred.numbers)


@pytest.mark.parametrize("language", ["en", "de"])
@pytest.mark.parametrize(
    "found",
    [
        verdict(0.12, classes=10),
        verdict(0.61, classes=2, majority=0.6),
        verdict(0.9, classes=2, majority=0.6),
        verdict(0.9, classes=2),
        verdict(0.7, classes=2, no_privacy=0.9),
        verdict(0.9, classes=2, no_privacy=0.9),
    ],
)
def test_both_languages_say_every_level_with_its_numbers(language: str, found: Verdict):
    said = words(language).verdict(found)
    shown = {"chance", "majority"} if found.level == "learned" else {found.level, "no_privacy"} - {"far", "near"}
    for name in ("accuracy", *shown):
        assert name not in dict(found.numbers) or words(language).percent(dict(found.numbers)[name]) in said
    assert (words(language)("verdict.helps") in said) == found.is_poor
    assert words(language).verdict(None) == ""


def test_a_study_says_what_its_error_rate_is_worth_in_the_readers_language(busy: Crowd):
    text = plain(busy.browser().get(busy.path).text)
    assert re.search(r"The model is right \d+\.\d% of the time\. A guess would be right 33\.3% of the time", text)
    assert re.search(r"Das Modell liegt in \d+,\d % der Fälle richtig\.", plain(busy.browser("de").get(busy.path).text))
    desk = sit_down(busy, "verdicts")
    assert re.search(r"Error rate .*chance 67%", plain(desk.get("/operator").text))
    own = plain(desk.get(f"/operator/tasks/{busy.task.hash.hex()[:12]}").text)
    assert re.search(r"Accuracy, by that [\d.]+%: chance is 33\.3%", own)


def test_a_live_page_hears_the_verdict_as_text():
    figures = work_out(TASK, moments([0.66] * 20, each=400))
    study = Study(TASK, "running", False, None, 8000, figures, price_of(TASK))
    said = numbers(study, words("de"))["verdict"].replace("\u00a0", " ")
    assert said.startswith("Das Modell liegt in 34,0 % der Fälle richtig. Das ist kaum besser als zu raten (33,3 %).")
    assert json.loads(json.dumps(said)) == said


def test_public_rows_tell_their_most_common_class_and_private_ones_nothing_but_their_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("crowdml.server.portal.cache.FRESH", -1.0)
    with open_crowd(tmp_path) as crowd:
        store, desk = crowd.running.hub.store, set_up(crowd)
        page = f"/operator/tasks/{crowd.task.hash.hex()[:12]}"
        card = model_card(export_model(store, crowd.task.hash))
        assert "Nobody tried how often this model is right. Chance is 33.3 %." in card
        look(crowd, PUBLIC, 1)
        seen = watched(store, crowd.task)
        assert seen is not None
        assert seen.verdict is not None
        labels = np.random.default_rng(1)
        labels.normal(size=(50, 64))
        share = np.bincount(labels.integers(3, size=50)).max() / 50
        assert dict(seen.verdict.numbers)["majority"] == share
        assert seen.verdict.sentence.replace(" %", "%") in plain(desk.get(page).text)
        assert plain(words("en").verdict(seen.verdict)) in plain(crowd.browser().get(crowd.path).text)
        card = model_card(export_model(store, crowd.task.hash))
        assert seen.verdict.sentence in card
        assert f"| the most common class alone | {100 * share:.1f} % |" in card
        assert seen.plain()["verdict"] == seen.verdict.plain
        look(crowd, CHARGED, 2)
        seen = watched(store, crowd.task)
        assert seen is not None
        assert seen.verdict is not None
        assert set(dict(seen.verdict.numbers)) == {"accuracy", "chance"}


def test_a_draft_whose_crowd_is_too_small_for_its_price_says_so_before_it_starts(crowd: Crowd):
    desk = set_up(crowd)
    small = "25 devices with 14 samples each: This crowd is small for its price"
    for epsilon, told in (("4.0", False), ("0.1", True)):
        desk.get("/operator/tasks/file")
        text = shipped_text("digits-masked").replace("gradient = 4.0", f"gradient = {epsilon}")
        assert (small in plain(desk.post("/operator/tasks/file", text=text).text)) == told
