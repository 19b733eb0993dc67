"""Forms and headers that no browser of ours sends: each gets an answer, and none becomes a server's error."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator

import pytest
from crowd import Crowd, open_crowd
from desk import Desk, log_in, set_up, token_of

from crowdml.server.portal import forms

URLENCODED = "application/x-www-form-urlencoded"
TASK = "name = 'x'\n"


def multipart(desk: Desk, path: str, body: bytes, kind: str = "multipart/form-data; boundary=B") -> int:
    """Send these bytes as a form of the page that is shown; the status of the answer."""
    request = urllib.request.Request(desk.browser.base + path, body, {"Content-Type": kind}, method="POST")
    desk.page = desk.browser._ask(request, {})
    return desk.page.status


def parts(**fields: str) -> bytes:
    return b"".join(
        f'--B\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    )


@pytest.fixture(scope="module")
def seat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Crowd, Desk]]:
    """A server, and its operator at a browser; tests that share it change nothing."""
    with open_crowd(tmp_path_factory.mktemp("odd") / "data") as opened:
        yield opened, set_up(opened)


@pytest.mark.parametrize("origin", ["http://[", "http://]:1", "http://[::1", "null", "http://", "\u00e9", "http://a b"])
def test_an_origin_that_is_none_is_refused_like_any_other(seat: tuple[Crowd, Desk], origin: str):
    """Review 2, network finding L3: a stranger's login with `Origin: http://[` was a 500."""
    line = seat[0].running.line()
    raw = line.ask("POST", "/operator/login", b"name=a", {"Content-Type": URLENCODED, "Origin": origin})
    assert (raw.status, raw.slug) == (403, "form-token")


def test_a_login_name_that_no_operator_has_is_a_wrong_name_and_no_error_of_the_database(crowd: Crowd):
    """Review 2, network finding L4: on PostgreSQL a NUL in a text was a 503."""
    for name in ("\0", "anna\0", "\x1b[2J", "\u202e"):
        assert log_in(crowd, name=name).page.status == (400 if "\0" in name else 403)


def test_texts_with_control_characters_are_refused_by_their_field_or_find_nothing(crowd: Crowd):
    """Review 2, network finding L4: a device search, an invitation's label, the name of an operator to remove."""
    desk = set_up(crowd)
    for search in ("%00", "%1b%5B2J", "a%00b"):
        page = desk.get(f"/operator/devices?search={search}")
        assert page.status == 200
        assert "\0" not in page.text
        assert "\x1b" not in page.text
    desk.get("/operator/invitations/new")
    form = {"number": "1", "uses": "1", "ends": "1d", "rate": "", "task": "all", "local": "yes"}
    assert desk.post("/operator/invitations/new", label="a\x1bb", **form).status == 422
    assert "control character" in desk.text
    assert "U+001B" in desk.text
    assert desk.post("/operator/invitations/new", label="a\0b", **form).status == 400
    desk.get("/operator/settings")
    assert desk.post("/operator/settings/operators/remove", name="a\0").status == 400
    desk.get("/operator/settings")
    assert desk.post("/operator/settings/operators", name="b\0", new="x" * 20).status == 400
    labels = [each.label for each in crowd.running.hub.store.invitations()]
    assert not [label for label in labels if label.startswith("a")], "nothing was made"


@pytest.mark.parametrize("ends", ["9999-12-31", "9999-12-31T23:59:59+00:00", "9999-12-31T23:59-14:00", "0001-01-01"])
def test_an_invitation_that_ends_where_the_calendar_does_is_refused_by_its_field(seat: tuple[Crowd, Desk], ends: str):
    """Review 2, network finding L6: `9999-12-31` was a 500 (OverflowError)."""
    desk = seat[1]
    desk.get("/operator/invitations/new")
    page = desk.post(
        "/operator/invitations/new", number="1", uses="1", ends=ends, rate="", task="all", label="", local="yes"
    )
    assert page.status == 422
    assert "within ten years" in page.text


@pytest.mark.parametrize(
    "address", ["http://[", "http://a b;rm -rf ~", "https://x:99999", "http://`id`", "http://a$(b)"]
)
def test_an_address_that_no_command_can_carry_is_refused_by_its_field(seat: tuple[Crowd, Desk], address: str):
    """Review 2, network findings L6 and L11: `http://[` was a 500; the other stood unquoted in join commands."""
    desk = seat[1]
    desk.get("/operator/settings")
    page = desk.post("/operator/settings", institution="", contact="", address=address)
    assert page.status == 422
    assert "is no address" in page.text or "no usable port" in page.text


def test_an_address_of_an_older_version_that_no_command_can_carry_is_passed_over(crowd: Crowd):
    """Review 2, network finding L11: what an older version kept does not reach a participant's shell either."""
    store = crowd.running.hub.store
    store.set_setting("public-address", b"http://a b;rm -rf ~")
    page = crowd.browser().get(f"/join/{crowd.running.started.code}")
    assert page.status == 200
    assert "rm -rf" not in page.text
    assert crowd.base in page.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (".".join("a" for _ in range(3000)) + " = 1", "parts with dots between"),
        ("x = 0x" + "f" * 300_000, "bits: at most"),
        ("x = " + "[" * 5000, "not a task file"),
        ("x = 1e99999999", "not between 1e-30 and 1e+30"),
    ],
    ids=["dotted", "hex", "lists", "exponent"],
)
def test_a_task_file_that_would_exhaust_a_parser_is_refused_beside_it(seat: tuple[Crowd, Desk], text: str, said: str):
    """Review 2, network finding L6: deep keys were a RecursionError, and a number of 300 kB a ValueError."""
    desk = seat[1]
    desk.get("/operator/tasks/file")
    page = desk.post("/operator/tasks/file", text=text)
    assert page.status == 422
    assert said in page.text


def test_a_number_of_a_form_with_thousands_of_digits_is_refused_by_its_field(seat: tuple[Crowd, Desk]):
    desk = seat[1]
    desk.get("/operator/tasks/new")
    page = desk.post("/operator/tasks/new", **{"name": "x", "protocol.radius": "9" * 5000 + ".5"})
    assert page.status == 422
    assert "is no number" in page.text


def test_a_form_within_a_form_is_one_field_and_read_in_one_pass(seat: tuple[Crowd, Desk]):
    """Review 2, network finding L6: nested multipart held the event loop for seconds, then a 500.

    Every byte of the form is in at most one field, so the time depends on the length alone, whatever it holds.
    """
    desk = seat[1]
    desk.get("/operator/tasks/file")
    inner = "".join(f"Content-Type: multipart/mixed; boundary=b{at}\r\n\r\n--b{at}\r\n" for at in range(4000))
    body = parts(**{"form-token": token_of(desk.page), "text": inner}) + b"--B--\r\n"
    assert len(body) > 170_000
    read = forms._multipart(body, " boundary=B")
    assert read["text"] == inner
    assert multipart(desk, "/operator/tasks/file", body) == 422
    assert "not a task file" in desk.text


def test_a_file_of_a_form_is_read_as_browsers_send_it(seat: tuple[Crowd, Desk]):
    desk = seat[1]
    desk.get("/operator/tasks/file")
    file = (
        '--B\r\nContent-Disposition: form-data; name="file"; filename="a; name=x.toml"\r\n'
        f"Content-Type: application/toml\r\n\r\n{TASK}\r\n"
    ).encode()
    body = parts(**{"form-token": token_of(desk.page)}) + file + b"--B--\r\n"
    assert multipart(desk, "/operator/tasks/file", body, 'multipart/form-data; boundary="B"') == 422
    assert "features is missing" in desk.text


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", "multipart/form-data; boundary=B"),
        (b"--B", "multipart/form-data; boundary=B"),
        (b"--B\r\n\r\n--B--", "multipart/form-data; boundary=B"),
        (b"x--B--", "multipart/form-data; boundary=B"),
        (b"--B--", "multipart/form-data"),
        (parts(**{f"f{at}": "" for at in range(201)}) + b"--B--", "multipart/form-data; boundary=B"),
    ],
    ids=["empty", "open", "no-head", "preamble", "no-boundary", "many"],
)
def test_a_multipart_form_that_is_not_whole_is_a_bad_request(seat: tuple[Crowd, Desk], body: bytes, kind: str):
    desk = seat[1]
    desk.get("/operator/tasks/file")
    assert multipart(desk, "/operator/tasks/file", body, kind) == 400
