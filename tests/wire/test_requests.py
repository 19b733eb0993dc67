"""The Authorization header, enrolment and the owner's link."""

import base64
from urllib.parse import parse_qsl

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crowdml.wire.keys import Key
from crowdml.wire.problems import Problem
from crowdml.wire.requests import (
    Enrolled,
    Enrolment,
    authorize,
    enrol,
    open_enrolled,
    open_enrolment,
    open_owner_link,
    owner_link,
    parse_authorization,
)

KEY, OTHER = Key.from_secret(bytes(range(32))), Key.from_secret(bytes(32))
NOW, PATH = 1_800_000_000, f"/v1/tasks/{'0' * 64}/mailbox?after=7"
HEADER = authorize(KEY, "GET", PATH, now=NOW)
TASK = "ab" * 32


def slug(act) -> str:
    with pytest.raises(Problem) as caught:
        act()
    assert 400 <= caught.value.status < 500
    return caught.value.slug


def test_a_signed_request_is_admitted():
    parse_authorization(HEADER).check(KEY.public, "GET", PATH, now=NOW)
    header = authorize(KEY, "POST", PATH, b"body", now=NOW + 0.9)
    parse_authorization(header).check(KEY.public, "POST", PATH, b"body", now=NOW)


@pytest.mark.parametrize("now", [NOW - 300, NOW + 300])
def test_a_clock_may_be_five_minutes_off(now):
    parse_authorization(HEADER).check(KEY.public, "GET", PATH, now=now)


@pytest.mark.parametrize("now", [NOW - 301, NOW + 301, 0, 1e12])
def test_a_clock_that_is_further_off_is_refused_and_told_the_time(now):
    with pytest.raises(Problem) as caught:
        parse_authorization(HEADER).check(KEY.public, "GET", PATH, now=now)
    assert (caught.value.slug, caught.value.extra) == ("clock", {"now": int(now)})


@pytest.mark.parametrize(
    ("method", "target", "body"),
    [("POST", PATH, b""), ("GET", PATH + "0", b""), ("GET", PATH, b"x"), ("GET", PATH.split("?")[0], b"")],
)
def test_a_header_holds_for_its_own_request_alone(method, target, body):
    header = parse_authorization(HEADER)
    assert slug(lambda: header.check(KEY.public, method, target, body, now=NOW)) == "signature"


def test_a_header_holds_for_its_own_device_alone():
    assert slug(lambda: parse_authorization(HEADER).check(OTHER.public, "GET", PATH, now=NOW)) == "signature"
    stolen = HEADER.replace(KEY.id, OTHER.id)
    assert slug(lambda: parse_authorization(stolen).check(OTHER.public, "GET", PATH, now=NOW)) == "signature"
    assert slug(lambda: parse_authorization(stolen).check(KEY.public, "GET", PATH, now=NOW)) == "signature"


def test_the_time_in_a_header_is_signed():
    later = HEADER.replace(str(NOW), str(NOW + 1))
    assert slug(lambda: parse_authorization(later).check(KEY.public, "GET", PATH, now=NOW)) == "signature"


@pytest.mark.parametrize(
    "header",
    [None, "", "Crowdml", "Bearer x", HEADER.lower(), HEADER + " ", HEADER + "=", HEADER[:-1],
     HEADER.replace(" ", "  ", 1),
     HEADER.replace(str(NOW), "-5"), HEADER.replace(str(NOW), "1e9"), HEADER.replace(str(NOW), "٣"), "Crowdml " * 1000,
     HEADER.replace(str(NOW), "0" + str(NOW)), HEADER.replace(KEY.id, KEY.id.upper())],
)  # fmt: skip
def test_a_header_that_is_not_ours_is_refused(header):
    assert slug(lambda: parse_authorization(header)) == "authorization"


@given(st.text(max_size=200))
def test_no_text_in_the_header_raises_anything_but_a_problem(header):
    assert slug(lambda: parse_authorization(header)) == "authorization"


@given(st.text(max_size=120), st.text(max_size=120), st.text(max_size=120))
def test_no_parts_of_a_header_raise_anything_but_a_problem(device, seconds, signature):
    assert slug(lambda: parse_authorization(f"Crowdml {device} {seconds} {signature}")) == "authorization"


@given(st.integers(0, len(HEADER) - 1), st.characters(min_codepoint=32, max_codepoint=126))
def test_a_mutated_header_never_verifies(at, letter):
    mutated = HEADER[:at] + letter + HEADER[at + 1 :]
    if mutated != HEADER:
        with pytest.raises(Problem):
            parse_authorization(mutated).check(KEY.public, "GET", PATH, now=NOW)


# --- enrolment ---


@pytest.mark.parametrize("tasks", [(), (TASK,), (TASK, "0" * 64)])
def test_an_enrolment_is_opened_as_it_was_made(tasks):
    body, signature = enrol(KEY, "C0DE-for_one", tasks)
    assert open_enrolment(body, signature) == Enrolment("C0DE-for_one", KEY.public, tuple(sorted(tasks)))
    assert open_enrolment(body, signature).device == KEY.id


def test_nobody_enrols_with_a_key_that_is_not_theirs():
    body, _ = enrol(KEY, "code")
    other_body, signature = enrol(OTHER, "code")
    assert slug(lambda: open_enrolment(body, signature)) == "signature"
    assert slug(lambda: open_enrolment(body, None)) == "signature"
    assert slug(lambda: open_enrolment(body, "x" * 86)) == "signature"
    assert slug(lambda: open_enrolment(other_body[:-1], signature)) == "malformed"


GOOD = {"code": "code", "key": KEY.public}


@pytest.mark.parametrize(
    "plain",
    [{}, [], {"key": KEY.public, "code": "code"}, {**GOOD, "tasks": [1]}, {**GOOD, "tasks": ["short"]},
     {**GOOD, "more": 1},
     {**GOOD, "code": ""}, {**GOOD, "code": "two words"}, {**GOOD, "code": "x" * 200}, {**GOOD, "key": b"short"},
     {**GOOD, "key": KEY.public.hex()}, {**GOOD, "tasks": [TASK, TASK]}, {**GOOD, "tasks": [TASK, "0" * 64]},
     {**GOOD, "tasks": [TASK.upper()]}, {**GOOD, "tasks": {}}, {"code": "code"}, {"code": 5, "key": KEY.public}],
)  # fmt: skip
def test_an_enrolment_has_one_form(plain):
    assert slug(lambda: open_enrolment(msgpack.packb(plain) or b"", "x" * 86)) == "malformed"


@given(st.binary(max_size=200), st.none() | st.text(max_size=100))
def test_no_bytes_enrol_anybody(body, signature):
    assert slug(lambda: open_enrolment(body, signature)) in ("malformed", "signature")


def test_the_answer_to_an_enrolment_travels_unchanged():
    answer = Enrolled(KEY.id, OTHER.public, ("0" * 64, TASK))
    assert open_enrolled(answer.encode()) == answer


@given(st.binary(max_size=200))
def test_no_bytes_are_an_answer_but_those_of_one(body):
    assert slug(lambda: open_enrolled(body)) == "malformed"


# --- the owner's link ---


LINK = owner_link(KEY, NOW, 600)


def follow(query: str, *, now: float = NOW, device: str = KEY.id, public: bytes = KEY.public) -> int:
    values = dict(parse_qsl(query))
    return open_owner_link(public, device, values.get("at"), values.get("for"), values.get("signature"), now=now)


def test_the_bytes_of_a_link_are_those_of_the_protocol():
    values = dict(parse_qsl(LINK))
    assert list(values) == ["at", "for", "signature"]
    assert (values["at"], values["for"]) == (str(NOW), "600")
    signed = KEY.sign(f"crowdml/owner/1\n{KEY.id}\n{NOW}\n600".encode())
    assert base64.urlsafe_b64decode(values["signature"] + "==") == signed


@pytest.mark.parametrize("now", [NOW - 60, NOW, NOW + 599.9])
def test_a_link_holds_from_a_minute_before_its_time_until_its_end(now):
    assert follow(LINK, now=now) == NOW + 600


@pytest.mark.parametrize("now", [NOW - 61, NOW + 600, 0, 1e12])
def test_a_link_that_holds_no_more_or_not_yet_is_refused_and_told_the_time(now):
    with pytest.raises(Problem) as caught:
        follow(LINK, now=now)
    assert (caught.value.slug, caught.value.extra) == ("clock", {"now": int(now)})


def test_a_link_holds_for_its_own_device_alone():
    assert slug(lambda: follow(LINK, device=OTHER.id, public=OTHER.public)) == "signature"
    assert slug(lambda: follow(LINK, device=OTHER.id)) == "signature"
    assert slug(lambda: follow(LINK, public=OTHER.public)) == "signature"
    assert slug(lambda: follow(LINK, public=b"")) == "signature"


def test_the_times_in_a_link_are_signed():
    assert slug(lambda: follow(LINK.replace(str(NOW), str(NOW + 1)))) == "signature"
    assert slug(lambda: follow(LINK.replace("for=600", "for=900"))) == "signature"


def test_a_signed_request_is_no_link_and_a_link_no_request():
    signature = HEADER.split(" ")[3]
    assert slug(lambda: follow(f"at={NOW}&for=600&signature={signature}")) == "signature"


@pytest.mark.parametrize(
    "query",
    ["", "at=1", LINK.replace("signature", "sign"), LINK[:-1], LINK + "=", LINK.replace(str(NOW), "-5"),
     LINK.replace(str(NOW), "٣"), LINK.replace("for=600", "for=901"), LINK.replace("for=600", "for=0"),
     LINK.replace("for=600", "for=0600")],
)  # fmt: skip
def test_a_query_that_is_no_link_is_refused(query):
    assert slug(lambda: follow(query)) == "authorization"


@pytest.mark.parametrize(("at", "lasts"), [(NOW, 0), (NOW, 901), (-1, 60)])
def test_no_link_is_made_that_no_server_takes(at, lasts):
    with pytest.raises(ValueError, match="900 seconds"):
        owner_link(KEY, at, lasts)


@given(st.none() | st.text(max_size=100), st.none() | st.text(max_size=20), st.none() | st.text(max_size=100))
def test_no_text_in_a_link_raises_anything_but_a_problem(at, lasts, signature):
    assert slug(lambda: open_owner_link(KEY.public, KEY.id, at, lasts, signature, now=NOW)) in (
        "authorization", "signature"
    )  # fmt: skip
