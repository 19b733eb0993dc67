"""The pages of participants and owners in a real Chromium."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crowd import Crowd, open_crowd
from playwright.sync_api import expect
from relay_device import claim, say
from screens import DESKTOP, PHONE, Window, charts_are_drawn, chromium, window
from test_places_pages import MOODS, STREETS, fill

pytestmark = pytest.mark.browser

LOOKS = {
    "desktop": (DESKTOP, False, "en-GB"),
    "desktop-dark": (DESKTOP, True, "de-DE"),
    "phone": (PHONE, False, "de-DE"),
    "phone-dark": (PHONE, True, "en-GB"),
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        if found is None:
            pytest.skip("NO CHROMIUM ON THIS MACHINE: not one page was looked at in a browser")
        yield found


def pages(crowd: Crowd) -> dict[str, str]:
    return {
        "home": "/",
        "study": crowd.path,
        "join": f"/join/{crowd.running.started.code}",
        "no-invitation": "/join/nothing",
        "device": crowd.owner_address(crowd.devices[0]),
        "withdraw": "/device/withdraw",
        "not-found": "/nothing",
    }


def is_clean(opened: Window) -> None:
    """No complaint of the browser (a violated policy is one) but that a page was not found; nothing from elsewhere."""
    assert [said for said in opened.complaints if "Failed to load resource" not in said] == []
    assert opened.outside == []


def violations(page: Any) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]})
    return [f"{each['id']}: {each['nodes'][0]['html'][:160]}" for each in found.response["violations"]]


def is_as_wide_as_the_window(page: Any) -> None:
    wide = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide[0] <= wide[1], f"the page is {wide[0]} px wide in a window of {wide[1]}"


@pytest.mark.parametrize("look", LOOKS)
def test_every_page_is_accessible_fits_its_window_and_keeps_its_policy(busy: Crowd, browser: Any, look: str):
    size, dark, language = LOOKS[look]
    with window(browser, busy.base, size, dark=dark, locale=language, bypass_csp=False) as opened:
        for name, path in pages(busy).items():
            opened.open(path)
            if name == "study":
                charts_are_drawn(opened.page)
                opened.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
            is_as_wide_as_the_window(opened.page)
            is_clean(opened)
    # axe adds a script of its own, which the policy forbids: so it runs in a window that lets it in
    with window(browser, busy.base, size, dark=dark, locale=language, bypass_csp=True) as opened:
        for name, path in pages(busy).items():
            opened.open(path)
            if name == "study":
                charts_are_drawn(opened.page)
                opened.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
            assert violations(opened.page) == [], name


def test_a_page_is_complete_without_scripts(busy: Crowd, browser: Any):
    with window(browser, busy.base, java_script_enabled=False) as opened:
        opened.open(busy.path)
        for name in ("error", "labels", "check-ins", "devices"):
            picture = opened.page.locator(f"[data-chart={name}] img")
            picture.scroll_into_view_if_needed()
            assert picture.is_visible()
            assert picture.get_attribute("alt")
        assert opened.page.get_by_text("The numbers and plots on this page are updated").is_hidden()
        is_clean(opened)


def test_without_scripts_the_pictures_follow_the_theme(busy: Crowd, browser: Any):
    for dark in (False, True):
        with window(browser, busy.base, dark=dark, java_script_enabled=False) as opened:
            asked: list[str] = []
            opened.page.on("request", lambda request, asked=asked: asked.append(request.url))
            opened.open(busy.path)
            opened.page.locator("[data-chart=error] img").scroll_into_view_if_needed()
            opened.page.wait_for_load_state("networkidle")
            pictures = [url for url in asked if "/plots/error.svg" in url]
            assert pictures
            assert all(("theme=dark" in url) == dark for url in pictures)


def test_charts_become_interactive_where_scripts_run_and_follow_the_theme(busy: Crowd, browser: Any):
    with window(browser, busy.base) as opened:
        asked: list[str] = []
        opened.page.on("request", lambda request: asked.append(request.url))
        opened.open(busy.path)
        charts_are_drawn(opened.page)
        assert sum("plotly.min.js" in url for url in asked) == 1
        assert opened.page.locator("#charts picture").count() == 0
        assert opened.page.locator("#charts .main-svg").count() >= 4
        tick = opened.page.locator("[data-chart=error] .xtick text").first
        light = tick.evaluate("each => each.style.fill")
        opened.page.emulate_media(color_scheme="dark")
        expect(tick).not_to_have_css("fill", light)
        is_clean(opened)


@pytest.mark.parametrize("look", LOOKS)
def test_pages_of_a_study_with_places_are_accessible_and_their_map_follows(tmp_path: Path, browser: Any, look: str):
    size, dark, language = LOOKS[look]
    with open_crowd(tmp_path / "data", STREETS, MOODS) as crowd:
        city = fill(crowd, rounds=3)
        with window(browser, crowd.base, size, dark=dark, locale=language, bypass_csp=True) as opened:
            for task in (STREETS, MOODS):
                opened.open(city.path(task))
                charts_are_drawn(opened.page)
                opened.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
                is_as_wide_as_the_window(opened.page)
                assert violations(opened.page) == [], task.name
        with window(browser, crowd.base, size, dark=dark, locale=language) as opened:
            opened.open(city.path())
            place = opened.page.locator("#places")
            expect(place.locator("circle.free")).to_have_count(1)
            heir = crowd.running.device()
            assert claim(heir, 11, STREETS).status == 201
            assert say(heir, 11, STREETS).status == 202
            expect(place.locator("circle.free")).to_have_count(0, timeout=20_000)
            is_clean(opened)


def test_numbers_and_charts_follow_the_study_while_the_page_is_open(crowd: Crowd, browser: Any):
    device = crowd.device()
    with window(browser, crowd.base) as opened:
        opened.open(crowd.path)
        assert opened.page.locator("[data-live=check_ins]").inner_text() == "0"
        opened.page.locator("#charts").scroll_into_view_if_needed()
        for _ in range(40):
            crowd.check_in(device)
        expect(opened.page.locator("[data-live=check_ins]")).to_have_text("40", timeout=20_000)
        expect(opened.page.locator("[data-live=devices]")).to_have_text("1", timeout=20_000)
        expect(opened.page.locator("[data-live=error]")).to_have_text(re.compile(r"^25\.0%"), timeout=20_000)
        opened.page.wait_for_selector("[data-chart=labels] .main-svg")
        is_clean(opened)


def test_the_state_of_a_study_follows_too(crowd: Crowd, browser: Any):
    with window(browser, crowd.base, locale="de-DE") as opened:
        opened.open(crowd.path)
        crowd.running.hub.store.set_state(crowd.task.hash, "paused", "2026-01-01T00:00:00+00:00")
        opened.page.wait_for_selector(".badge.paused")
        assert opened.page.locator(".badge").inner_text() == "Pausiert"


def test_an_owner_goes_the_whole_way_from_the_link_to_the_withdrawal(crowd: Crowd, browser: Any):
    device = crowd.device()
    for _ in range(12):
        crowd.check_in(device)
    with window(browser, crowd.base, PHONE) as opened:
        opened.open(crowd.owner_address(device))
        page = opened.page
        assert page.url == f"{crowd.base}/device"
        assert "signature" not in page.url
        page.get_by_text("Older check-ins").click()
        assert page.locator("table.reflows").last.locator("tbody tr").count() == 2
        page.get_by_role("link", name="Deutsch").click()
        assert page.get_by_role("heading", name="Ihr Gerät", exact=True).is_visible()
        page.get_by_role("link", name="English").click()
        page.get_by_role("link", name=re.compile("Withdraw this device")).click()
        page.get_by_role("link", name="No, go back").click()
        page.get_by_role("link", name=re.compile("Withdraw this device")).click()
        page.get_by_role("button", name="Withdraw now").click()
        assert page.get_by_role("heading", name="Your device has withdrawn").is_visible()
        opened.open("/device")
        assert page.get_by_role("heading", name=re.compile("This link does not work")).is_visible()
        is_clean(opened)


def test_the_keyboard_reaches_the_content_at_once(busy: Crowd, browser: Any):
    with window(browser, busy.base) as opened:
        opened.open("/")
        opened.page.keyboard.press("Tab")
        assert opened.page.evaluate("document.activeElement.className") == "skip"
        opened.page.keyboard.press("Enter")
        assert opened.page.evaluate("document.activeElement.id") == "main"


def test_on_paper_the_qr_code_stays_and_what_only_works_on_a_screen_goes(busy: Crowd, browser: Any):
    with window(browser, busy.base) as opened:
        opened.open(f"/join/{busy.running.started.code}")
        opened.page.emulate_media(media="print")
        assert opened.page.locator(".qr img").is_visible()
        assert opened.page.locator("footer").is_hidden()
