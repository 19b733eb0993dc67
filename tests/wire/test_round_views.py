"""The view of a round: one encoding, and nothing else is read. The vectors of a whole round are what the core makes."""

from __future__ import annotations

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from make_vectors import SPEC

from crowdml.secagg import server
from crowdml.secagg.messages import KINDS, open_message
from crowdml.secagg.messages import encode as pack_secagg
from crowdml.secagg.terms import RingField, Terms
from crowdml.wire.problems import Problem
from crowdml.wire.rounds import PHASES, RoundView, open_view, publication_hash

VECTORS = json.loads((SPEC / "vectors" / "rounds.json").read_text(encoding="utf-8"))
times = st.integers(0, 10**12)
published = st.none() | st.tuples(st.integers(0, 2**63 - 1), st.text(max_size=20), st.binary(max_size=50))
views = st.builds(
    RoundView, st.integers(1, 2**63 - 1), st.sampled_from(PHASES), st.text(max_size=16), st.binary(max_size=300), times,
    times, published, st.text(max_size=250),
)  # fmt: skip
GOOD = msgpack.unpackb(RoundView(3, "mask", "secagg/held/1", b"x", 10, 150, (4, "sgd/params/1", b"y"), "").encode())


@given(views)
def test_a_view_comes_back_as_it_was_sent(view):
    assert open_view(view.encode()) == view
    assert open_view(view.encode()).encode() == view.encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "masked"},
        {"phase": 3},
        {"round": 0},
        {"round": -1},
        {"wait": -1},
        {"wait": 1.5},
        {"closes": 10**13},
        {"publication": [1]},
        {"publication": [1, "kind", "body"]},
        {"publication": None},
        {"body": "text"},
        {"why": "y" * 2000},
        {"zzz": 1},
    ],
)
def test_what_is_no_view_is_refused(changes):
    with pytest.raises(Problem):
        open_view(bytes(msgpack.packb({**GOOD, **changes}) or b""))


def test_keys_in_another_order_and_bytes_after_the_end_are_refused():
    packed = bytes(msgpack.packb(GOOD) or b"")
    assert open_view(packed).round == 3
    for data in (packed + b"\xc0", packed[:-1], bytes(msgpack.packb(dict(reversed(GOOD.items()))) or b"")):
        with pytest.raises(Problem):
            open_view(data)


def test_the_vectors_of_a_round_lead_to_its_sum_and_every_message_has_one_encoding():
    fields = tuple(RingField(**each) for each in VECTORS["fields"])
    named = {name: VECTORS[name] for name in ("smallest", "largest", "survivors", "colluders")}
    terms = Terms(bytes.fromhex(VECTORS["task"]), fields, **named)
    state = server.begin(VECTORS["round"])
    shown = next(open_view(bytes.fromhex(row["encoded"])).publication for row in VECTORS["views"] if row["publication"])
    assert shown is not None
    offered = publication_hash(*shown)
    assert offered.hex() == VECTORS["publication_hash"]
    phase = {"secagg/advert/1": "advertise", "secagg/shares/1": "share", "secagg/masked/1": "mask",
             "secagg/agreement/1": "agree", "secagg/reveal/1": "reveal"}  # fmt: skip
    for row in VECTORS["messages"]:
        message = open_message(row["kind"], bytes.fromhex(row["body"]))
        assert pack_secagg(message).hex() == row["body"]
        if row["from"] == "server":
            if phase.get(row["kind"]) is None and state.phase != _tells(row["kind"]):
                state = server.close(terms, state, offered)
            assert server.tell(terms, state, row["to"]) == message
        else:
            if state.phase != phase[row["kind"]]:
                state = server.close(terms, state, offered)
            state = server.hear(terms, state, row["from"], message)
    state = server.close(terms, state)
    assert {tag: found.tolist() for tag, found in server.sums(terms, state).items()} == VECTORS["sum"]
    assert {row["kind"] for row in VECTORS["messages"]} == set(KINDS)


def _tells(kind: str) -> str:
    return {"secagg/cohort/1": "share", "secagg/held/1": "mask", "secagg/survivors/1": "agree",
            "secagg/agreements/1": "reveal"}[kind]  # fmt: skip


def test_the_views_of_the_vectors_are_read_as_they_say():
    for row in VECTORS["views"]:
        found = open_view(bytes.fromhex(row["encoded"]))
        assert (found.round, found.phase, found.kind, found.body.hex()) == (
            row["round"],
            row["phase"],
            row["kind"],
            row["body"],
        )
        assert (found.publication is None) == (row["publication"] is None)
