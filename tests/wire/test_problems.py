"""Problems: every slug says what happened and what to do, and travels as RFC 9457 says."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crowdml.errors import CrowdmlError
from crowdml.wire.problems import PROBLEMS, Problem


@pytest.mark.parametrize("slug", PROBLEMS)
def test_every_problem_has_a_status_a_title_and_one_sentence_of_help(slug):
    row = PROBLEMS[slug]
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", slug)
    assert 400 <= row.status < 600
    assert re.fullmatch(r"[A-Z].*[^.]", row.title)
    assert re.fullmatch(r"[A-Z](?:[^.]|\.(?! ))*\.", row.help)


def test_a_problem_travels_as_rfc_9457_says():
    problem = Problem("seq-gap", "Seq 9 arrived, and 7 is next.", expected=7)
    assert json.loads(problem.encode()) == {
        "type": "/problems/seq-gap",
        "title": "Messages are missing before this one",
        "status": 409,
        "detail": "Seq 9 arrived, and 7 is next.",
        "expected": 7,
    }
    again = Problem.decode(409, problem.encode())
    assert again.members() == problem.members()
    assert isinstance(problem, CrowdmlError)
    assert str(problem) == problem.detail


def test_an_extra_member_does_not_hide_a_standard_one():
    with pytest.raises(ValueError, match="members of every problem"):
        Problem("busy", "Busy.", **{"status": 200})


def test_retry_after_is_whole_seconds():
    assert Problem("busy", "Busy.", retry_after=30).retry_after == 30
    assert Problem("busy", "Busy.").retry_after is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["type", "title", "status", "detail", "slug", "self", "retry_after", "expected"]) | st.text(
    max_size=8
)


@given(st.integers(100, 599), st.binary(max_size=100) | st.dictionaries(names, json_values, max_size=5))
def test_a_device_makes_a_problem_of_any_answer(status, body):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    problem = Problem.decode(status, data)
    assert problem.slug in PROBLEMS
    assert problem.detail
    json.loads(problem.encode())


def test_a_deeply_nested_answer_is_a_problem_too():
    assert Problem.decode(503, b"[" * 60_000).slug == "busy"
