"""Validation on the pages: the operator sees what it costs and how it stands, everybody the curve, nobody a row."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crowd import Crowd, open_crowd
from desk import PASSWORD, set_up
from screens import DESKTOP, PHONE, chromium, window

from crowdml.server.hub import utc_now
from crowdml.server.validation import OwnRows, keep_rows
from crowdml.storage.server.looks import Terms

CHARGED = Terms("patients-of-ward-7.csv", Fraction(1, 2), Fraction(1))
PUBLIC = Terms("shapes.csv", None, None)


def look(crowd: Crowd, terms: Terms, seed: int) -> None:
    """Attach rows, let a device check in, and look."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(50, 64)).astype(np.float32)
    rows = OwnRows(x, draw.integers(3, size=50).astype(np.float32), x)
    keep_rows(crowd.running.hub.store, crowd.task, rows, terms, utc_now())
    crowd.check_in(crowd.devices[0] if crowd.devices else crowd.device())
    crowd.running.run(crowd.running.hub.look())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are read again at every look at a page."""
    monkeypatch.setattr("crowdml.server.portal.cache.FRESH", -1.0)


def test_a_study_shows_accuracy_on_public_rows_and_says_whose_they_are(tmp_path: Path):
    with open_crowd(tmp_path) as crowd:
        look(crowd, PUBLIC, 1)
        text = crowd.browser().get(crowd.path).text
        assert "Accuracy on the operator&#39;s own data" in text
        assert "These rows belong to no participant." in text
        assert "50 rows of the operator&#39;s own data, which no device gave" in text
        assert "shapes.csv" not in text
        figures = json.loads(crowd.browser().get(f"{crowd.path}/figures.json").text)
        assert figures["accuracy"]["x"] == [1]
        assert figures["accuracy"]["low"] == figures["accuracy"]["y"]
        assert crowd.browser().get(f"{crowd.path}/plots/accuracy.svg").status == 200
        assert crowd.browser().get(f"{crowd.path}/plots/distance.svg").status == 404
        german = crowd.browser("de").get(crowd.path).text
        assert "Genauigkeit auf eigenen Daten der Verantwortlichen" in german
        assert "Sie gehören niemandem aus dieser Studie." in german


def test_private_rows_have_their_price_on_both_pages_and_the_operator_sees_how_it_stands(tmp_path: Path):
    with open_crowd(tmp_path) as crowd:
        desk, page = set_up(crowd), f"/operator/tasks/{crowd.task.hash.hex()[:12]}"
        assert f"crowdml task validate {crowd.task.name} FILE.csv" in desk.get(page).text
        look(crowd, CHARGED, 2)
        text = crowd.browser().get(crowd.path).text.replace("\u00a0", " ")
        assert "costs each row ε = 0.5; 0.5 of at most 1 is spent so far" in text
        assert "One more evaluation is allowed, and is kept for the end." in text
        assert "ward-7" not in text
        own = desk.get(page).text
        assert "Rows of patients-of-ward-7.csv" in own
        assert "This protects one row of the operator&#39;s own data from anyone who sees these figures" in own
        assert "One evaluation is left, and is kept for the end of the task." in own
        picture = desk.get(f"{page}/accuracy.svg")
        assert picture.status == 200
        assert picture.headers["content-type"] == "image/svg+xml"
        assert "/operator/login?" in crowd.browser().get(f"{page}/accuracy.svg").address


def test_how_a_closed_study_does_is_for_its_operator_alone(tmp_path: Path):
    with open_crowd(tmp_path) as crowd:
        desk, page = set_up(crowd), f"/operator/tasks/{crowd.task.hash.hex()[:12]}"
        crowd.running.run(crowd.running.hub.set_closed(crowd.task.hash, True))
        look(crowd, PUBLIC, 3)
        assert desk.get(f"{page}/accuracy.svg").status == 200
        assert "Validation</h2>" in desk.get(page).text
        assert "Accuracy on the operator" not in crowd.browser().get(crowd.path).text
        for path in ("plots/accuracy.svg", "figures.json"):
            assert crowd.browser().get(f"{crowd.path}/{path}").status == 404


@pytest.mark.browser
@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (PHONE, True)], ids=["desktop", "phone, dark"])
def test_the_form_shows_what_belongs_to_a_choice_and_the_page_of_looks_fits(
    tmp_path: Path, size: tuple[int, int], dark: bool
):
    with open_crowd(tmp_path) as crowd, chromium() as browser:
        if browser is None:
            pytest.skip("there is no Chromium here")
        set_up(crowd)
        look(crowd, CHARGED, 4)
        with window(browser, crowd.base, size, dark=dark) as opened:
            page = opened.page
            opened.open("/operator/login")
            page.fill("[name=name]", "anna")
            page.fill("[name=password]", PASSWORD)
            page.click("button[type=submit]")
            opened.open("/operator/tasks/new")
            keys = "model.hidden", "protocol.rate.c", "privacy.epsilon.update", "privacy.epsilon.gradient", "stop.error"
            fields = [page.locator(f"[id='{key}']") for key in keys]
            assert [each.is_visible() for each in fields] == [False, False, False, True, True]
            page.select_option("[id='model.kind']", "mlp")
            page.select_option("[id='protocol.kind']", "local_updates")
            assert [each.is_visible() for each in fields] == [True, True, True, False, False]
            fits(page)
            assert not violations(page)
            opened.open(f"/operator/tasks/{crowd.task.hash.hex()[:12]}")
            picture = page.locator(".validation img")
            picture.scroll_into_view_if_needed()
            page.wait_for_function("document.querySelector('.validation img').naturalWidth > 0")
            fits(page)
            assert not violations(page)
            assert opened.complaints == []
            assert opened.outside == []


def fits(page: Any) -> None:
    wide, room = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= room


def violations(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    return [each["id"] for each in Axe().run(page).response["violations"]]
