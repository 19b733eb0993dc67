"""Numbers and times as people read them. Review 2, users: operator 7 and 13, owner 7 and 15."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from crowd import Crowd, make_study
from desk import set_up
from hypothesis import given
from hypothesis import strategies as st
from screens import chromium, window
from test_operator_pages import DIGITS, drafted, instead

from crowdml.price import Price
from crowdml.protocols import find
from crowdml.server.estimates import Estimate
from crowdml.server.portal.simulation import has_jax
from crowdml.server.portal.words import LANGUAGES, words
from crowdml.texts import number_text


@given(st.floats(-3, 4), st.floats(0, 3), st.sampled_from(LANGUAGES))
def test_an_estimate_is_shown_within_0_and_100_percent_or_as_too_noisy_to_tell(
    value: float, deviation: float, language: str
):
    """Review 2, operator finding 7: "Error as the server would see it 107.0 % ± 22.4 %"."""
    said, found = words(language), Estimate.around(value, deviation)
    text = str(said.estimate(found))
    if found.low <= 0 and found.high >= 1:
        assert text == said("number.noisy")
    else:
        shown = [float(each.replace(",", ".")) for each in re.findall(r"-?[0-9]+(?:[.,][0-9]+)?", text)]
        assert len(shown) == 3
        assert all(0 <= each <= 100 for each in shown)


def result(error: float, deviation: float) -> dict[str, Any]:
    """What a simulation prints whose devices counted errors."""
    return {"devices": 15, "accuracy": 0.3, "accuracy_low": 0.2, "accuracy_high": 0.4, "trials": 2, "check_ins": 60,
            "crowd_says": {"error": error, "error_sd": deviation}, "epsilon_sample": 1.0, "epsilon_device": 26_053.4,
            "data": "digits012", "seed": 1, "seconds": 3.0, "silent_devices": 0}  # fmt: skip


@pytest.mark.skipif(not has_jax(), reason="the simulator needs JAX")
@pytest.mark.parametrize(
    ("error", "deviation", "said"),
    [(1.07, 0.224, "100.0% (between 59.5% and 100.0%)"), (0.5, 0.9, "too noisy to tell")],
)
def test_the_error_of_a_simulated_crowd_is_never_more_than_all_and_no_price_has_an_exponent(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch, error: float, deviation: float, said: str
):
    """Review 2, operator finding 7 and owner finding 7: 107.0 %, 2.605e+04."""
    desk = set_up(crowd)
    path = drafted(desk, DIGITS)
    instead(monkeypatch, f"print({json.dumps(json.dumps(result(error, deviation)))})")
    desk.post(f"{path}/simulate", data="digits012", devices="15", trials="2")
    while "Simulating 15 devices" in desk.get(path).text:
        time.sleep(0.05)  # it is another process: nothing here can be waited for
    assert said in desk.text
    assert "1, 26,053" in desk.text


@given(st.floats(-1e6, 1e6), st.integers(1, 6))
def test_a_number_has_no_exponent_of_computers(value: float, digits: int):
    assert "e" not in number_text(value, digits)


def test_no_price_on_an_operators_page_has_an_exponent_of_computers():
    """Review 2, owner finding 7: the noise of a small epsilon is a large number of steps."""
    study = make_study(epsilon="{ gradient = 0.002 }", stop="")
    found = Price.of(find(study), study)
    assert not [row for row in found.rows if re.search(r"e[+-]", row.noise + row.loss_text)]
    assert re.search(r"\d,\d{3} steps", found.rows[0].noise)


def test_a_draft_is_listed_by_its_title_and_not_by_a_hash(crowd: Crowd):
    desk = set_up(crowd)
    path = drafted(desk, DIGITS)
    text = desk.get("/operator").text
    assert f'<a href="{path}">{DIGITS["title"]}</a>' in text
    assert f"{path.rpartition('/')[2]}, by" not in text


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        if found is None:
            pytest.skip("there is no Chromium here")
        yield found


@pytest.mark.browser
def test_times_are_the_readers_own_where_scripts_run_and_utc_where_they_do_not(busy: Crowd, browser: Any):
    """Review 2, operator finding 13 and owner finding 15."""
    for language, shown in (("en-GB", "14:05"), ("de-DE", "14:05")):
        with window(browser, busy.base, locale=language, timezone_id="Asia/Kathmandu") as opened:
            opened.open("/")
            opened.page.evaluate(
                """document.querySelector("main").insertAdjacentHTML("beforeend",
                   '<time datetime="2026-01-02T08:20:00+00:00">x</time>')"""
            )
            opened.page.wait_for_function("document.querySelector('main time').textContent !== 'x'")
            assert shown in opened.page.locator("main time").inner_text()
    with window(browser, busy.base, java_script_enabled=False) as opened:
        opened.open(busy.owner_address(busy.devices[0]))
        assert "UTC" in opened.page.locator("time").first.inner_text()


@pytest.mark.browser
def test_an_operators_lists_say_how_long_ago_and_the_date_on_hover(busy: Crowd, browser: Any):
    with window(browser, busy.base, timezone_id="Asia/Kathmandu") as opened:
        opened.open("/")
        opened.page.evaluate(
            """document.querySelector("main").insertAdjacentHTML("beforeend",
               `<time data-relative datetime="${new Date(Date.now() - 7.5e6).toISOString()}">x</time>`)"""
        )
        opened.page.wait_for_function("document.querySelector('main time').textContent === '2 hours ago'")
        assert re.search(r"\d{4}", opened.page.locator("main time").get_attribute("title"))
