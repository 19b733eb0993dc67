"""How operators come in, and how nobody else does: over real HTTP, with the real store."""

from __future__ import annotations

import logging
import re
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import quote

import pytest
from argon2 import PasswordHasher
from crowd import Crowd, open_crowd
from desk import PASSWORD, Desk, log_in, set_up, token_of
from device import Line

from crowdml.server import operators
from crowdml.server.hub import utc_now
from crowdml.server.operators import BadOperator, check_name, check_password, hash_password

FORM = "application/x-www-form-urlencoded"
PAGES = (
    "/operator",
    "/operator/tasks/new",
    "/operator/tasks/file",
    "/operator/invitations",
    "/operator/invitations/new",
    "/operator/devices",
    "/operator/settings",
)


def later(crowd: Crowd, **by: float) -> None:
    """Let the server's clock show a later time."""
    moment = (datetime.fromisoformat(utc_now()) + timedelta(**by)).isoformat(timespec="microseconds")
    crowd.running.hub.clock = lambda: moment


def raw(crowd: Crowd) -> Line:
    return crowd.running.line()


# --- the first account ---


def test_the_printed_address_makes_the_first_operator_once(crowd: Crowd):
    setup = crowd.running.started.setup
    assert setup is not None
    desk = set_up(crowd)
    assert "Overview" in desk.text
    assert crowd.running.hub.store.operators() == ["anna"]
    again = crowd.browser().get(setup.removeprefix(crowd.base))
    assert again.address.endswith("/operator/login"), "the address is void"


def test_a_used_or_wrong_set_up_token_makes_nobody(crowd: Crowd):
    setup = crowd.running.started.setup
    assert setup is not None
    token = setup.partition("token=")[2]
    browser = crowd.browser()
    page = browser.get("/operator/setup?token=wrong")
    assert page.status == 403
    assert 'name="password"' not in page.text
    browser.get("/operator/login")
    desk = Desk(browser, browser.get(setup.removeprefix(crowd.base)))
    fields = {"name": "eve", "password": PASSWORD, "again": PASSWORD}
    kept = token_of(desk.page)
    wrong = browser.post("/operator/setup", **{"form-token": kept, "token": "x" * 32, **fields})
    assert wrong.status == 403
    assert crowd.running.hub.store.operators() == []
    set_up(crowd)
    used = browser.post("/operator/setup", **{"form-token": kept, "token": token, **fields})
    assert used.status == 403
    assert crowd.running.hub.store.operators() == ["anna"]


def test_an_operator_who_was_added_on_the_machine_makes_the_printed_address_void(crowd: Crowd):
    setup = crowd.running.started.setup
    assert setup is not None
    browser = crowd.browser()
    page = browser.get(setup.removeprefix(crowd.base))
    crowd.running.hub.store.set_operator("bert", hash_password(PASSWORD), utc_now())
    fields = {"form-token": token_of(page), "token": setup.partition("token=")[2], "name": "eve"}
    answer = browser.post("/operator/setup", **fields, password=PASSWORD, again=PASSWORD)
    assert answer.status == 403
    assert "Somebody has set this server up already" in answer.text
    assert crowd.running.hub.store.operators() == ["bert"]


def test_a_restart_before_set_up_prints_a_new_token_and_the_old_one_is_void(tmp_path: Path):
    with open_crowd(tmp_path / "data") as first:
        old = first.running.started.setup
    with open_crowd(tmp_path / "data") as second:
        new = second.running.started.setup
        assert old is not None
        assert new is not None
        tokens = [each.partition("token=")[2] for each in (old, new)]
        assert tokens[0] != tokens[1]
        assert second.browser().get(f"/operator/setup?token={tokens[0]}").status == 403
        set_up(second)
        kept = second.running.hub.store.setting(operators.SETUP)
        assert kept is None
    with open_crowd(tmp_path / "data") as third:
        assert third.running.started.setup is None


def test_the_store_has_neither_the_set_up_token_nor_a_session_token_nor_a_password(tmp_path: Path):
    with open_crowd(tmp_path / "data") as crowd:
        assert crowd.running.started.setup is not None
        token = crowd.running.started.setup.partition("token=")[2]
        desk = set_up(crowd)
        secrets = (token, desk.cookie, desk.cookie.partition(".")[0], PASSWORD)
    files = list((tmp_path / "data").glob("server.sqlite*"))
    assert files
    for file in files:
        data = file.read_bytes()
        assert not [secret for secret in secrets if secret.encode() in data]


@pytest.mark.parametrize(
    ("name", "password", "again", "said"),
    [
        ("", PASSWORD, PASSWORD, "A name has"),
        ("an na", PASSWORD, PASSWORD, "A name has"),
        ("anna", "short", "short", "5 characters"),
        ("anna", "a" * 30, "a" * 30, "easy to guess"),
        ("annasophie", "annasophie123", "annasophie123", "easy to guess"),
        ("anna", PASSWORD, "another one", "differ"),
    ],
)
def test_a_poor_name_or_password_is_said_next_to_its_field_and_the_name_is_kept(
    crowd: Crowd, name: str, password: str, again: str, said: str
):
    setup = crowd.running.started.setup
    assert setup is not None
    browser = crowd.browser()
    page = browser.get(setup.removeprefix(crowd.base))
    fields = {"form-token": token_of(page), "token": setup.partition("token=")[2]}
    answer = browser.post("/operator/setup", **fields, name=name, password=password, again=again)
    assert answer.status == 422
    assert said in answer.text
    assert 'aria-invalid="true"' in answer.text
    assert f'value="{name}"' in answer.text
    assert password not in answer.text.replace("easy to guess", "")
    assert crowd.running.hub.store.operators() == []


# --- log in and out ---


def test_every_page_asks_for_a_login_and_comes_back_to_itself(crowd: Crowd):
    set_up(crowd)
    for path in PAGES:
        browser = crowd.browser()
        asked = browser.get(path)
        assert 'class="flaw"' not in asked.text
        assert "/operator/login" in asked.address
        desk = Desk(browser, asked)
        action = re.search(r'action="([^"]+)"', asked.text)
        assert action is not None
        assert desk.post(action[1], name="anna", password=PASSWORD).address == crowd.base + path


def test_a_login_leads_nowhere_but_to_operator_pages(crowd: Crowd):
    set_up(crowd)
    for to in ("https://evil.example/", "//evil.example", "/\\evil", "/device", "javascript:alert(1)"):
        browser = crowd.browser()
        desk = Desk(browser, browser.get(f"/operator/login?next={quote(to)}"))
        action = re.search(r'action="([^"]+)"', desk.text)
        assert action is not None
        assert desk.post(action[1], name="anna", password=PASSWORD).address == f"{crowd.base}/operator"


def test_a_wrong_password_and_an_unknown_name_are_answered_alike(crowd: Crowd):
    set_up(crowd)
    wrong, unknown = log_in(crowd, password="wrong wrong wrong"), log_in(crowd, name="nobody")
    assert wrong.page.status == unknown.page.status == 403
    assert "This name and password do not belong together." in wrong.text

    def shape(desk: Desk) -> str:
        return re.sub(r'value="[^"]*"', "", desk.text)

    assert shape(wrong) == shape(unknown)
    assert not wrong.cookie
    assert not unknown.cookie


def test_an_unknown_name_costs_a_hash_too(crowd: Crowd, monkeypatch: pytest.MonkeyPatch):
    """Constant work: whoever measures time learns no names. Counted, not timed."""
    set_up(crowd)
    looked: list[str] = []
    real = operators._hasher.verify

    def verify(hashed: str, password: str) -> bool:
        looked.append(hashed.split("$")[3])
        return real(hashed, password)

    class Counting:
        def __getattr__(self, name: str) -> object:
            return verify if name == "verify" else getattr(real.__self__, name)

    monkeypatch.setattr(operators, "_hasher", Counting())
    log_in(crowd, password="wrong wrong wrong")
    log_in(crowd, name="nobody")
    assert len(looked) == 2
    assert looked[0] == looked[1], "with the same parameters"


def test_log_out_ends_the_session_on_the_server(crowd: Crowd):
    desk = set_up(crowd)
    cookie = desk.cookie
    assert desk.post("/operator/logout").address.endswith("/operator/login")
    assert not desk.cookie
    answer = raw(crowd).ask("GET", "/operator", headers={"Cookie": f"crowdml-operator={cookie}"})
    assert answer.status == 303
    assert answer.headers["location"].startswith("/operator/login")


def test_a_login_never_takes_over_a_session_that_the_browser_brought(crowd: Crowd):
    """Session fixation: a planted cookie is no session, and a real one of before is ended."""
    set_up(crowd)
    planted = "A" * 43 + ".1800000000"
    line = raw(crowd)
    page = line.ask("GET", "/operator/login", headers={"Cookie": f"crowdml-operator={planted}"})
    form_cookie = page.headers["set-cookie"].partition(";")[0]
    token = re.search(r'name="form-token" value="([^"]+)"', page.body.decode())
    assert token is not None
    body = f"form-token={token[1]}&name=anna&password={PASSWORD.replace(' ', '+')}".encode()
    headers = {"Cookie": f"crowdml-operator={planted}; {form_cookie}", "Content-Type": FORM}
    answer = line.ask("POST", "/operator/login", body, headers)
    assert answer.status == 303
    assert planted not in answer.headers["set-cookie"]
    assert line.ask("GET", "/operator", headers={"Cookie": f"crowdml-operator={planted}"}).status == 303
    desk = log_in(crowd)
    before = desk.cookie
    fresh = crowd.browser().get("/operator/login")
    form = {"Cookie": f"crowdml-operator={before}"}
    again = line.ask("GET", "/operator/login", headers=form)
    assert again.status == 303, "who is logged in is not asked again"
    assert fresh.status == 200
    desk.browser.jar.clear()


def test_the_session_cookie_is_out_of_reach_of_scripts_other_sites_and_other_paths(crowd: Crowd):
    set_up(crowd)
    line = raw(crowd)
    page = line.ask("GET", "/operator/login")
    assert {"HttpOnly", "Path=/operator", "SameSite=strict"} <= set(page.headers["set-cookie"].split("; "))
    token = re.search(r'name="form-token" value="([^"]+)"', page.body.decode())
    assert token is not None
    body = f"form-token={token[1]}&name=anna&password={PASSWORD.replace(' ', '+')}".encode()
    headers = {"Cookie": page.headers["set-cookie"].partition(";")[0], "Content-Type": FORM}
    said = line.ask("POST", "/operator/login", body, headers).headers["set-cookie"].split("; ")
    assert said[0].startswith("crowdml-operator=")
    assert {"HttpOnly", "Path=/operator", "SameSite=strict"} <= set(said)
    assert "Secure" not in said, "this server has no TLS"
    assert not [part for part in said if part.lower().startswith(("expires", "max-age", "domain"))]


def test_a_session_ends_when_nobody_uses_it(crowd: Crowd):
    desk = set_up(crowd)
    later(crowd, hours=1)
    assert desk.get("/operator").address.endswith("/operator")
    later(crowd, hours=2.9)
    assert desk.get("/operator").address.endswith("/operator"), "it was used an hour after it began"
    later(crowd, hours=5)
    assert "/operator/login" in desk.get("/operator").address


def test_a_session_ends_after_twelve_hours_however_busy(crowd: Crowd):
    desk = set_up(crowd)
    for hours in range(1, 12):
        later(crowd, hours=hours)
        assert desk.get("/operator").address.endswith("/operator")
    later(crowd, hours=12.01)
    assert "/operator/login" in desk.get("/operator").address


def test_a_page_that_looks_again_by_itself_keeps_no_session_open(crowd: Crowd):
    desk = set_up(crowd)
    later(crowd, hours=1.5)
    assert desk.get("/operator", crowdml_live="1").status == 200
    later(crowd, hours=2.1)
    assert "/operator/login" in desk.get("/operator").address


def test_when_a_session_began_cannot_be_changed_in_its_cookie(crowd: Crowd):
    desk = set_up(crowd)
    secret, _, began = desk.cookie.partition(".")
    changed = f"{secret}.{int(began) + 3600}"
    assert raw(crowd).ask("GET", "/operator", headers={"Cookie": f"crowdml-operator={changed}"}).status == 303


@pytest.mark.parametrize("began", ["999999999999", "9999999999", "99999999999999", "0"])
def test_a_cookie_of_any_year_is_no_session(crowd: Crowd, began: str):
    cookie = f"crowdml-operator={'a' * 43}.{began}"
    assert raw(crowd).ask("GET", "/operator", headers={"Cookie": cookie}).status == 303


# --- forms ---


@pytest.mark.parametrize("token", ["", "wrong", "ä"])
def test_a_form_without_its_token_changes_nothing(crowd: Crowd, token: str):
    desk = set_up(crowd)
    desk.get("/operator/settings")
    answer = desk.post("/operator/settings", token=token, institution="Evil", contact="")
    assert answer.status == 403
    assert crowd.running.hub.store.setting("contact") is None


def test_the_token_of_another_session_does_not_fit(crowd: Crowd):
    first = set_up(crowd)
    second = log_in(crowd)
    second.get("/operator/settings")
    token = token_of(second.page)
    assert first.post("/operator/settings", token=token, institution="Evil", contact="").status == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
def test_a_form_that_another_site_sent_is_refused_even_with_its_token(crowd: Crowd, headers: dict[str, str]):
    desk = set_up(crowd)
    desk.get("/operator/settings")
    assert desk.post("/operator/settings", headers=headers, institution="Evil", contact="").status == 403
    assert crowd.running.hub.store.setting("contact") is None


def test_a_form_of_this_site_is_taken(crowd: Crowd):
    desk = set_up(crowd)
    desk.get("/operator/settings")
    said = {"Origin": crowd.base, "Sec-Fetch-Site": "same-origin"}
    assert (
        desk.post("/operator/settings", headers=said, institution="City of Example", contact="a@b.example").status
        == 200
    )
    assert crowd.running.hub.store.setting("contact") == b"City of Example\na@b.example"


def test_a_login_form_needs_its_own_token_too(crowd: Crowd):
    set_up(crowd)
    browser = crowd.browser()
    assert browser.post("/operator/login", name="anna", password=PASSWORD).status == 403
    desk = Desk(browser, browser.get("/operator/login"))
    assert desk.post("/operator/login", token="wrong", name="anna", password=PASSWORD).status == 403
    assert not desk.cookie


CHANGES = (
    "/operator/logout",
    "/operator/tasks/new",
    "/operator/tasks/file",
    "/operator/drafts/000000000000/start",
    "/operator/tasks/000000000000/state",
    "/operator/tasks/000000000000/closed",
    "/operator/tasks/000000000000/validate",
    "/operator/tasks/000000000000/validate/off",
    "/operator/invitations/new",
    "/operator/invitations/0000/end",
    "/operator/devices/0000/revoke",
    "/operator/settings",
    "/operator/settings/password",
    "/operator/settings/operators",
    "/operator/settings/operators/remove",
)


def test_nothing_changes_without_a_login_or_without_a_token(crowd: Crowd):
    line = raw(crowd)
    assert {line.ask("POST", path, b"", {"Content-Type": FORM}).status for path in CHANGES} == {401}
    headers = {"Content-Type": FORM, "Cookie": f"crowdml-operator={set_up(crowd).cookie}"}
    assert {line.ask("POST", path, b"x=1", headers).status for path in CHANGES} == {403}


def test_asking_for_the_head_of_a_page_changes_nothing_and_is_answered_like_the_page(crowd: Crowd):
    desk, store = set_up(crowd), crowd.running.hub.store
    store.set_setting("contact", b"City of Example")
    store.set_setting("public-address", b"https://study.example")
    headers = {"Cookie": f"crowdml-operator={desk.cookie}"}
    assert {path: raw(crowd).ask("HEAD", path, headers=headers).status for path in PAGES} == dict.fromkeys(PAGES, 200)
    assert store.setting("contact") == b"City of Example"
    assert store.setting("public-address") == b"https://study.example"
    assert {raw(crowd).ask("HEAD", path).status for path in (*PAGES, "/operator/login")} == {303, 200}
    assert raw(crowd).ask("HEAD", "/operator/setup").status == 303


# --- many attempts ---


def test_guessing_is_slowed_down_by_name_and_by_address(crowd: Crowd):
    set_up(crowd)
    answers = [log_in(crowd, password="wrong wrong wrong").page for _ in range(11)]
    assert [page.status for page in answers] == [403] * 10 + [429]
    assert "Too many attempts. Try again in" in answers[-1].text
    assert log_in(crowd).page.status == 429, "also with the right password, for now"
    others = (log_in(crowd, name=f"name{place}").page.status for place in range(60))
    assert 429 in others, "twenty attempts from one address, and a few more where the machine is slow"


def test_a_right_password_costs_no_attempt_of_its_name(crowd: Crowd):
    set_up(crowd)
    assert [log_in(crowd).page.status for _ in range(12)] == [200] * 12


# --- passwords and other operators ---


def test_a_new_password_ends_the_other_sessions_and_the_old_password(crowd: Crowd):
    desk, other = set_up(crowd), log_in(crowd)
    desk.get("/operator/settings")
    new = "four other words here"
    said = desk.post("/operator/settings/password", old=PASSWORD, password=new, again=new)
    assert "Your password is changed" in said.text
    assert desk.get("/operator").address.endswith("/operator")
    assert "/operator/login" in other.get("/operator").address
    assert log_in(crowd).page.status == 403
    assert log_in(crowd, password=new).page.status == 200


def test_a_password_that_changes_while_it_is_looked_at_opens_no_session_and_stays_changed(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
):
    desk, store, new = set_up(crowd), crowd.running.hub.store, hash_password("four other words here")
    real = operators.Operators._verify

    def verify(self: operators.Operators, known: str | None, password: str) -> bool:
        right = real(self, known, password)
        store.set_operator("anna", new, utc_now())  # as `crowdml operator` does it, beside the server
        return right

    monkeypatch.setattr(operators.Operators, "_verify", verify)
    late = log_in(crowd)
    assert (late.page.status, late.cookie) == (403, "")
    assert "/operator/login" in desk.get("/operator").address
    monkeypatch.setattr(operators.Operators, "_verify", real)
    desk = log_in(crowd, password="four other words here")
    desk.get("/operator/settings")
    monkeypatch.setattr(operators.Operators, "_verify", verify)
    new = hash_password("a third set of words")
    changed = {"old": "four other words here", "password": "yet another few words", "again": "yet another few words"}
    assert desk.post("/operator/settings/password", **changed).status in (403, 422)
    assert store.operator_password("anna") == new


@pytest.mark.parametrize(
    ("old", "new", "again", "said"),
    [
        ("wrong wrong wrong", "four other words here", "four other words here", "not your password"),
        (PASSWORD, "short", "short", "at least 12"),
        (PASSWORD, "four other words here", "other", "differ"),
    ],
)
def test_a_password_is_not_changed_by_accident(crowd: Crowd, old: str, new: str, again: str, said: str):
    desk = set_up(crowd)
    desk.get("/operator/settings")
    answer = desk.post("/operator/settings/password", old=old, password=new, again=again)
    assert answer.status == 422
    assert said in answer.text
    assert log_in(crowd).page.status == 200


def test_operators_add_and_remove_one_another_but_never_themselves(crowd: Crowd):
    desk = set_up(crowd)
    desk.get("/operator/settings")
    assert "is added" in desk.post("/operator/settings/operators", name="Bert", new=PASSWORD).text
    other = log_in(crowd, name="bert")
    assert other.page.status == 200
    desk.get("/operator/settings")
    assert "already" in desk.post("/operator/settings/operators", name="bert", new=PASSWORD).text
    assert desk.post("/operator/settings/operators/remove", name="anna").status == 409
    desk.get("/operator/settings")
    assert "is removed" in desk.post("/operator/settings/operators/remove", name="bert").text
    assert "/operator/login" in other.get("/operator").address
    said = [event.detail for event in crowd.running.hub.store.events()]
    assert {"anna added operator bert", "anna: removed operator bert"} <= set(said)


def test_names_and_passwords_are_kept_in_one_form(servers_hasher: PasswordHasher):
    assert check_name(" Anna ") == "anna"
    assert check_password("ﬁve words that are ﬁne", "x") == "five words that are fine"
    for bad in ("", "a b", "ä", "x" * 65, "-anna", "a\n"):
        with pytest.raises(BadOperator):
            check_name(bad) if bad != "a\n" else check_name("a\nb")
    assert hash_password(PASSWORD) != hash_password(PASSWORD), "each has a salt of its own"
    assert servers_hasher.hash(PASSWORD).startswith("$argon2id$v=19$m=65536,t=3,p=1$")


# --- logs ---


def test_no_secret_is_in_any_log(crowd: Crowd, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        assert crowd.running.started.setup is not None
        token = crowd.running.started.setup.partition("token=")[2]
        code = crowd.running.started.code or ""
        desk = set_up(crowd)
        log_in(crowd, password="wrong and secret words")
        desk.get("/operator/invitations/new")
        form = token_of(desk.page)
        made = desk.post("/operator/invitations/new", number="2", uses="1", ends="1d", task="all", local="yes")
        codes = re.findall(r"Code<br><code>([^<]+)</code>", made.text)
        assert len(codes) == 2
        crowd.browser().get(f"/join/{codes[0]}")
        crowd.browser().get(f"/join/{code}/further")
        device = crowd.device()
        crowd.browser().get(crowd.owner_address(device))
        for secret in (token, code, form, desk.cookie, PASSWORD, "wrong and secret words", *codes):
            assert secret
            assert secret not in caplog.text
        assert "signature=" not in caplog.text
        assert "/join/***" in caplog.text
        lines = [record for record in caplog.records if getattr(record, "path", "") == "/operator/login"]
        assert lines
        assert {"request", "method", "path", "status", "milliseconds"} <= set(vars(lines[0]))
