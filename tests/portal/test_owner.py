"""The page of a device's owner: entered by the device's own link, shown to nobody else, and left for good."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from crowd import Crowd, make_study, open_crowd, price
from device import Device
from test_public import words_of

from crowdml.wire.requests import owner_link


@pytest.fixture
def mine(crowd: Crowd) -> Device:
    """A device that has given a little."""
    device = crowd.device()
    for _ in range(3):
        crowd.check_in(device)
    return device


def form_of(text: str) -> str:
    found = re.search(r'name="form" value="([0-9a-f]{64})"', text)
    assert found is not None
    return found[1]


def test_a_link_opens_the_page_and_does_not_stay_in_the_address_bar(crowd: Crowd, mine: Device):
    page = crowd.browser().get(crowd.owner_address(mine))
    assert (page.status, page.address) == (200, f"{crowd.base}/device")
    assert page.headers["cache-control"] == "no-store"
    assert mine.key.id in page.text


def test_the_session_is_a_cookie_for_this_page_alone(crowd: Crowd, mine: Device):
    answer = crowd.running.line().ask("GET", crowd.owner_address(mine))
    assert answer.status == 303
    cookie = answer.headers["set-cookie"]
    for word in ("HttpOnly", "SameSite=strict", "Path=/device", "Max-Age=900"):
        assert word in cookie
    assert "Secure" not in cookie, "this server speaks plain HTTP"


def test_the_page_says_what_was_given_when_and_what_it_cost_in_both_totals(crowd: Crowd, mine: Device):
    text = crowd.browser().get(crowd.owner_address(mine)).text
    seen = words_of(text)
    priced = price(crowd.task)
    assert f"Most exposed sample ε = {priced.sample_epsilon():.3g}" in seen
    assert f"Whole device ε = {priced.device_epsilon(3):.3g}" in seen
    assert "Samples given 60" in seen
    assert "1,940 of 2,000" in seen
    assert f'href="{crowd.path}"' in text
    for given in crowd.running.hub.store.given(mine.key.id):
        assert given.chain.hex() in text
    assert f"3 3 ε = {priced.device_epsilon(3):.3g}" in seen, "the third check-in, at the third place in the journal"
    assert "3 journal entries" in seen
    assert "made at the start" in seen, "the invitation that it used"


def test_costs_are_told_by_study_and_over_all_of_them(tmp_path: Path):
    other = make_study("other", "Another study", epsilon="{ gradient = 0.5 }", stop="")
    with open_crowd(tmp_path / "data", other) as crowd:
        device = crowd.device()
        crowd.check_in(device)
        crowd.check_in(device, task=other, seq=1)
        seen = words_of(crowd.browser().get(crowd.owner_address(device)).text)
        for task in (crowd.task, other):
            priced = price(task)
            shown = (
                f"{task.title} 1 20 1,980 of 2,000 ε = {priced.sample_epsilon():.3g} ε = {priced.device_epsilon():.3g}"
            )
            assert shown in seen


def test_a_device_that_gave_nothing_has_a_page_too(crowd: Crowd):
    seen = words_of(crowd.browser().get(crowd.owner_address(crowd.device())).text)
    assert "has not given anything yet" in seen


def test_links_that_are_old_forged_or_anothers_open_nothing(crowd: Crowd, mine: Device):
    other = crowd.device()
    now = int(time.time())
    good = crowd.owner_address(mine)
    for address in (
        crowd.owner_address(mine, at=now - 1000),
        crowd.owner_address(mine, at=now + 1000),
        f"/device/{mine.key.id}?{owner_link(other.key, now, 900)}",
        good.replace("for=900", "for=800"),
        f"/device/{mine.key.id}",
        f"/device/{'0' * 32}?{owner_link(mine.key, now, 900)}",
        "/device/nobody",
    ):
        reader = crowd.browser()
        page = reader.get(address)
        assert page.status == 401, address
        assert "crowdml ledger --web" in page.text
        assert len(reader.jar) == 0
    assert crowd.running.line().ask("GET", "/device").slug == "authorization"


def test_a_session_that_was_tampered_with_is_none(crowd: Crowd, mine: Device):
    line, other = crowd.running.line(), crowd.device()
    token = line.ask("GET", crowd.owner_address(mine)).headers["set-cookie"].partition(";")[0]
    assert line.ask("GET", "/device", headers={"Cookie": token}).status == 200
    name, _, value = token.partition("=")
    device, ends, mark = value.split(".")
    for forged in (
        f"{other.key.id}.{ends}.{mark}",
        f"{device}.{int(ends) + 9}.{mark}",
        f"{device}.{ends}.",
        "x",
        "a.b.c",
    ):
        assert line.ask("GET", "/device", headers={"Cookie": f"{name}={forged}"}).status == 401


def test_withdrawing_asks_first_and_says_what_cannot_be_undone(crowd: Crowd, mine: Device):
    reader = crowd.browser()
    reader.get(crowd.owner_address(mine))
    seen = words_of(reader.get("/device/withdraw").text)
    for fact in ("This cannot be undone", "stays in the model", "under a hash", "crowdml leave", "No, go back"):
        assert fact in seen, fact
    assert crowd.running.hub.store.device(mine.key.id).withdrawn_at is None


def test_withdrawing_erases_the_device_and_ends_the_session(crowd: Crowd, mine: Device):
    reader = crowd.browser()
    reader.get(crowd.owner_address(mine))
    done = reader.post("/device/withdraw", form=form_of(reader.get("/device/withdraw").text))
    assert "Your device has withdrawn" in done.text
    known = crowd.running.hub.store.device(mine.key.id)
    assert known is not None
    assert (known.withdrawn_at is not None, known.public_key, known.enrolled_at) == (True, None, None)
    assert reader.get("/device").status == 401
    assert mine.send(crowd.task, mine.envelope(crowd.task, 4)).slug == "withdrawn"
    assert crowd.browser().get(crowd.owner_address(mine)).status == 401, "a new link opens nothing either"


@pytest.mark.parametrize("form", ["", "0" * 64])
def test_a_form_from_elsewhere_changes_nothing(crowd: Crowd, mine: Device, form: str):
    reader = crowd.browser()
    reader.get(crowd.owner_address(mine))
    for path in ("/device/withdraw", "/device/close"):
        page = reader.post(path, form=form)
        assert page.status == 403
        assert "This form is too old" in page.text
    assert crowd.running.hub.store.device(mine.key.id).withdrawn_at is None
    assert reader.get("/device").status == 200


def test_the_form_of_one_session_is_none_in_another(crowd: Crowd, mine: Device):
    first, second = crowd.browser(), crowd.browser()
    stolen = form_of(first.get(crowd.owner_address(mine)).text)
    second.get(crowd.owner_address(crowd.device()))
    assert second.post("/device/withdraw", form=stolen).status == 403


def test_an_owner_closes_the_page_for_good(crowd: Crowd, mine: Device):
    reader = crowd.browser()
    page = reader.get(crowd.owner_address(mine))
    assert reader.post("/device/close", form=form_of(page.text)).address == f"{crowd.base}/"
    assert reader.get("/device").status == 401


def test_a_revoked_device_still_shows_its_owner_everything(crowd: Crowd, mine: Device):
    crowd.running.hub.store.revoke(mine.key.id, "2026-01-01T00:00:00+00:00")
    page = crowd.browser("de").get(crowd.owner_address(mine))
    assert page.status == 200
    assert "gesperrt" in page.text


def test_a_form_is_bounded_and_of_one_kind(crowd: Crowd, mine: Device):
    line = crowd.running.line()
    token = line.ask("GET", crowd.owner_address(mine)).headers["set-cookie"].partition(";")[0]
    kind = {"Content-Type": "application/x-www-form-urlencoded", "Cookie": token}
    assert line.ask("POST", "/device/withdraw", b"a=" + b"x" * 100_000, kind).slug == "too-large"
    assert line.ask("POST", "/device/withdraw", b"&".join(b"a=1" for _ in range(999)), kind).slug == "bad-request"
    assert line.ask("POST", "/device/withdraw", b"\xff", kind).slug == "bad-request"
    assert (
        line.ask("POST", "/device/withdraw", b"{}", {**kind, "Content-Type": "application/json"}).slug == "media-type"
    )


def test_a_link_opens_one_session_and_only_the_browser_that_has_it_may_follow_it_again(crowd: Crowd, mine: Device):
    link, owner, thief = crowd.owner_address(mine), crowd.browser(), crowd.browser()
    assert crowd.running.line().ask("HEAD", link).headers.get("set-cookie") is None, "a look ahead opens nothing"
    assert owner.get(link).status == 200
    page = thief.get(link)
    assert (page.status, len(thief.jar)) == (401, 0)
    assert "crowdml ledger --web" in page.text
    assert thief.get(link.replace("for=900", "for=0900")).status == 401
    assert owner.get(link).status == 200
    assert thief.get(crowd.owner_address(mine)).status == 200, "another link opens another session"
