"""Logs: what a line has, and what it never has."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from crowdml.server.logs import Json, refused, shown_path


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/join/k7qd-3m9x-05tz-w2nb-h8ce", "/join/***"),
        ("/join/k7qd/more", "/join/***/more"),
        ("/join/", "/join/"),
        ("/join//k7qd-3m9x-05tz-w2nb-h8ce", "/join//***"),
        ("//join/k7qd-3m9x-05tz-w2nb-h8ce", "//join/***"),
        ("/JOIN/k7qd-3m9x-05tz-w2nb-h8ce", "/JOIN/***"),
        ("/en/join/K7QD-3M9X-05TZ-W2NB-H8CE/", "/en/join/***/"),
        ("/jion/k7qd-3m9x-05tz-w2nb-h8ce", "/jion/***"),
        ("/k7qd-3m9x-05tz-w2nb-h8ce", "/***"),
        ("/operator//setup/a-token", "/operator//setup/***"),
        ("/v1/devices/0123456789abcdef0123456789abcdef", "/v1/devices/0123456789abcdef0123456789abcdef"),
        ("/joined/x", "/joined/x"),
        ("/v1/tasks", "/v1/tasks"),
        ("/a\nb\x1b[31m", "/a\\nb\\x1b[31m"),
        ("/" + "x" * 500, "/" + "x" * 119),
    ],
)
def test_a_path_is_one_short_line_without_a_code(path: str, shown: str):
    assert shown_path(path) == shown


def test_a_refusal_is_one_line_with_its_fields(caplog: pytest.LogCaptureFixture):
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/join/secret",
        "crowdml.request": "abc",
        "query_string": b"token=x",
    }
    with caplog.at_level(logging.INFO, logger="crowdml.server"):
        refused(scope, 404, "not-found")
    (record,) = caplog.records
    said = json.loads(Json().format(record))
    assert {name: said[name] for name in ("request", "method", "path", "status", "problem")} == {
        "request": "abc",
        "method": "GET",
        "path": "/join/***",
        "status": 404,
        "problem": "not-found",
    }
    assert said["message"] == "request abc: GET /join/***: 404 not-found"
    assert said["level"] == "info"
    assert said["time"].endswith("+00:00")


def test_a_mistake_of_ours_has_its_traceback_in_the_same_line():
    try:
        raise ValueError("a mistake")
    except ValueError:
        record = logging.LogRecord("crowdml.server", logging.ERROR, __file__, 1, "it %s", ("broke",), sys.exc_info())
    line = Json().format(record)
    assert "\n" not in line
    assert "ValueError: a mistake" in json.loads(line)["traceback"]
