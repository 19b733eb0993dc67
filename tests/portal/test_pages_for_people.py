"""What people meet on the pages: phones, commands to copy, prices, empty plots. Review 2, users: see each test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from crowd import Crowd, make_study, open_crowd
from desk import PASSWORD, set_up, sit_down
from screens import DESKTOP, chromium, window
from test_portal_figures import moments
from test_public import words_of

from crowdml.cli.ledger import LINK_LASTS
from crowdml.privacy.odds import odds
from crowdml.server.portal.health import steps
from crowdml.server.portal.pages import unbroken
from crowdml.server.portal.visits import store_words
from crowdml.server.portal.words import LANGUAGES, words

TOUCH: dict[str, Any] = {"has_touch": True, "is_mobile": True}
PHONE = 390, 844


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        if found is None:
            pytest.skip("there is no Chromium here")
        yield found


def test_the_price_stands_before_how_it_goes_and_how_it_learns(busy: Crowd):
    """Review 2, owner finding 6: on a phone the price began at 3,959 px of 5,819."""
    for language in LANGUAGES:
        text = busy.browser(language).get(busy.path).text
        places = [text.index(f'id="{name}"') for name in ("leaves", "price", "join", "goes", "learns")]
        assert places == sorted(places)


def test_a_study_of_one_check_in_gives_its_price_once(tmp_path: Path):
    """Review 2, owner finding 15: "One check-in" and "Its only check-in" with the same numbers."""
    once = make_study("once", budget=", budget = { epsilon = 2.0, samples = 20 }")
    with open_crowd(tmp_path / "data", once) as crowd:
        text = crowd.browser().get(f"/studies/{once.hash.hex()[:12]}").text
        assert text.count(">Its only check-in<") == 1
        assert ">One check-in<" not in text
        assert ">One check-in<" in crowd.browser().get(crowd.path).text


@pytest.mark.parametrize(("epsilon", "strength"), [("0.5", "strong"), ("2", "fair"), ("4", "weak"), ("9", "none")])
def test_a_price_stands_on_a_scale_with_the_odds_beside_it(tmp_path: Path, epsilon: str, strength: str):
    """Review 2, owner finding 8: an epsilon alone reads like money."""
    task = make_study("scaled", epsilon=f"{{ gradient = {epsilon} }}", budget="", stop="")
    with open_crowd(tmp_path / "data", task) as crowd:
        for language in LANGUAGES:
            said, found = words(language), odds(float(epsilon), 1e-6)
            for path in (f"/studies/{task.hash.hex()[:12]}", f"/join/{crowd.running.started.code}"):
                text = crowd.browser(language).get(path).text
                assert f'class="{strength} here"' in text
                assert said(f"study.strength.{strength}") in text
                assert said.percent(found.shown) in text


def test_a_plot_that_waits_is_no_warning(crowd: Crowd):
    """Review 2, owner finding 15: empty charts in warning orange."""
    text = crowd.browser().get(crowd.path).text
    assert text.count('class="waits"') == 4
    assert 'class="notice small"' not in text


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_device_link_is_said_to_work_once_and_as_long_as_it_does(language: str):
    """Review 2, owner finding 11: the command said 10 minutes, the page 15, and neither said once."""
    said = words(language)("error.link.text")
    assert f"{LINK_LASTS // 60} Minuten" in said or f"{LINK_LASTS // 60} minutes" in said
    assert "once" in said or "einmal" in said


def test_no_line_of_a_command_ends_inside_a_code_or_an_option():
    """Review 2, owner finding 14. What is copied is the command as it is."""
    command = "crowdml join http://127.0.0.1:8000/join/k7qd-3m9x-05tz-w2nb-h8ce --ca ca.pem --source csv:FILE"
    shown = unbroken(command)
    assert '/join/<span class="whole-line">k7qd-3m9x-05tz-w2nb-h8ce</span>' in shown
    assert '<span class="whole-line">--source</span>' in shown
    assert shown.striptags() == command


@pytest.mark.browser
@pytest.mark.parametrize("locale", ["en-GB", "de-DE"])
def test_a_phone_is_offered_to_take_part_first_and_may_send_the_page_on(busy: Crowd, browser: Any, locale: str):
    """Review 2, owner finding 1 and 15: pip install at the end of a QR code, and a QR code of the page on a phone."""
    path = f"/join/{busy.running.started.code}"
    with window(browser, busy.base, PHONE, locale=locale, **TOUCH) as opened:
        page = opened.page
        opened.open(path)
        notice = page.locator(".on-phone")
        assert notice.is_visible()
        offer = page.locator("button[data-join]")
        assert offer.inner_text() == (
            "Take part with this phone" if locale == "en-GB" else "Mit diesem Telefon teilnehmen"
        )
        assert offer.bounding_box()["y"] < page.locator("#how").bounding_box()["y"]
        link = notice.locator("a").get_attribute("href")
        assert link.startswith("mailto:?subject=")
        assert unquote(link).endswith(f"body={busy.base}{path}")
        assert page.locator(".qr").is_hidden()
        opened.open(busy.path)
        assert page.locator(".on-phone").is_visible()
        assert page.locator(".qr").is_hidden()
    with window(browser, busy.base, DESKTOP, locale=locale) as opened:
        for where in (path, busy.path):
            opened.open(where)
            assert opened.page.locator(".on-phone").is_hidden()
            assert opened.page.locator(".qr").is_visible()


@pytest.mark.browser
def test_a_command_is_copied_by_a_button_and_its_code_stays_on_one_line(busy: Crowd, browser: Any):
    """Review 2, owner finding 14."""
    for size, options in ((DESKTOP, {}), (PHONE, TOUCH)):
        with window(browser, busy.base, size, permissions=["clipboard-read", "clipboard-write"], **options) as opened:
            page = opened.page
            opened.open(f"/join/{busy.running.started.code}")
            line = page.locator(".to-copy").last
            line.get_by_role("button", name="Copy").click()
            line.get_by_role("button", name="Copied").wait_for()
            copied = page.evaluate("navigator.clipboard.readText()")
            assert copied == line.locator("pre").text_content()
            assert copied.startswith(f"crowdml join {busy.base}")
            lines = "each => new Set([...each.getClientRects()].map(box => box.top)).size"
            code_ = line.locator(".whole-line", has_text=busy.running.started.code)
            assert code_.evaluate(lines) == 1
    with window(browser, busy.base, java_script_enabled=False) as opened:
        opened.open(f"/join/{busy.running.started.code}")
        assert opened.page.locator(".copy").last.is_hidden()


# --- operators ---


def test_the_curve_of_check_ins_ends_now_and_is_flat_since_the_last():
    """Review 2, operator finding 10: 17 minutes of silence looked like growth."""
    seen = moments([0.5, 0.5, 0.5])
    first, last = (datetime.fromisoformat(each.at) for each in (seen[0], seen[-1]))
    silent = (last + 3 * (last - first)).isoformat()
    path = re.search(r' d="([^"]*)"', steps(seen, silent, "x", width=404))
    assert path is not None
    across = [float(each) for each in re.findall(r"H([0-9.]+)", path[1])]
    assert across[-1] == 402
    assert across[-2] == pytest.approx(2 + 400 / 4, abs=0.1)
    early = (first - timedelta(hours=1)).isoformat()  # a clock that was set back
    assert steps(seen, early, "x", width=404).count("402") > 0


def test_an_operator_sees_the_plots_that_participants_see_and_the_ends_of_the_curve(busy: Crowd):
    """Review 2, operator finding 10."""
    desk = sit_down(busy, "onlooker")
    page = f"/operator/tasks/{busy.task.hash.hex()[:12]}"
    text = desk.get(page).text
    for name in ("error", "labels"):
        assert f'src="{page}/{name}.svg' in text
        assert desk.get(f"{page}/{name}.svg").headers["content-type"] == "image/svg+xml"
    assert "<span>now</span>" in text
    assert re.search(r'id="model" data-refresh', text), "its version follows"


def test_cards_that_only_this_machine_can_follow_are_made_only_after_a_warning(crowd: Crowd):
    """Review 2, operator finding 11: "The cards lead to http://127.0.0.1:18280" was grey small print."""
    desk, form = set_up(crowd), {"number": "1", "uses": "1", "ends": "1d", "task": "all", "label": "Class 7b"}
    text = desk.get("/operator/invitations/new").text
    assert re.search(r"The cards would lead to <strong>http://127[^<]*</strong>, which only this machine reaches", text)
    before = len(crowd.running.hub.store.invitations())
    refused = desk.post("/operator/invitations/new", **form)
    assert refused.status == 422
    assert 'id="flaw-local"' in refused.text
    assert len(crowd.running.hub.store.invitations()) == before
    made = desk.post("/operator/invitations/new", **form, local="yes")
    assert made.status == 200
    assert "which only this machine reaches" in made.text
    crowd.running.hub.store.set_setting("public-address", b"https://study.example")
    assert 'name="local"' not in desk.get("/operator/invitations/new").text
    assert "only this machine" not in desk.post("/operator/invitations/new", **form).text


def test_an_invitation_is_for_the_task_that_one_came_from_and_for_all_only_where_that_is_chosen(tmp_path: Path):
    """Review 2, operator finding 11: the default was all tasks, also later ones."""
    other = make_study("other", "Another one")

    def chosen(text: str) -> list[str]:
        return re.findall(r'<option value="([^"]*)" selected', text)

    with open_crowd(tmp_path / "data", other) as crowd:
        desk = set_up(crowd)
        assert chosen(desk.get(f"/operator/invitations/new?task={other.hash.hex()}").text) == [other.hash.hex()]
        assert chosen(desk.get("/operator/invitations/new").text) == []
        page = desk.post("/operator/invitations/new", number="1", uses="1", ends="1d", task="", local="yes")
        assert "Choose one of the tasks, or all of them." in page.text
        crowd.running.run(crowd.running.hub.change(other.hash, "pause", "by a test"))
        assert chosen(desk.get("/operator/invitations/new").text) == [crowd.task.hash.hex()]


def test_a_command_for_the_servers_own_machine_names_its_folder(crowd: Crowd):
    """Review 2, operator finding 8: as printed it failed, "there is no server in crowdml-server"."""
    text = words_of(set_up(crowd).get(f"/operator/tasks/{crowd.task.hash.hex()[:12]}").text)
    command = f"crowdml task validate {crowd.task.name} FILE.csv --public {store_words(crowd.running.hub.store)} "
    assert command in text


@pytest.mark.browser
def test_what_leaves_keeps_all_its_columns_on_a_desktop(tmp_path: Path, browser: Any):
    """Review 2, operator finding 14: at 1280 px the last column was cut off."""
    with open_crowd(tmp_path / "data") as crowd, window(browser, crowd.base, (1280, 800)) as opened:
        set_up(crowd)
        opened.open("/operator/login")
        opened.page.fill("[name=name]", "anna")
        opened.page.fill("[name=password]", PASSWORD)
        opened.page.click("button[type=submit]")
        opened.open(f"/operator/tasks/{crowd.task.hash.hex()[:12]}")
        opened.page.get_by_text("What leaves with every check-in").click()
        part = opened.page.get_by_role("region", name="What leaves")
        assert part.evaluate("each => each.scrollWidth <= each.clientWidth")
