"""Messages and states as bytes: one encoding each, and nothing else is read."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masked_crowd import Crowd, refused, terms

from crowdml.secagg import server
from crowdml.secagg.device import DeviceRound
from crowdml.secagg.messages import KINDS, Reveal, Survivors, bitmap, decode, encode, members, open_message
from crowdml.secagg.refusals import Refused
from crowdml.secagg.server import ServerRound


def test_every_message_of_a_round_comes_back_from_its_bytes():
    crowd = Crowd(terms(), 8)
    told = []
    while crowd.server.phase != "reveal":
        crowd.go_to({"advertise": "share", "share": "mask", "mask": "agree", "agree": "reveal"}[crowd.server.phase])
        told.append(server.tell(crowd.terms, crowd.server, crowd.ids[0]))
    crowd.go_to("summed")
    said = [open_message(kind, data) for (one, kind), data in crowd.log.items() if one == crowd.ids[0]]
    assert {message.kind for message in [*told, *said]} == set(KINDS)
    for message in [*told, *said]:
        assert open_message(message.kind, encode(message)) == message


@pytest.mark.parametrize("phase", ["advertise", "share", "mask", "agree", "reveal", "summed", "abandoned"])
def test_the_servers_state_comes_back_from_its_bytes(phase: str):
    crowd = Crowd(terms(), 8 if phase != "abandoned" else 4)
    crowd.go_to(phase)
    assert ServerRound.decode(crowd.server.encode()) == crowd.server


def test_states_show_no_secret_when_they_are_printed():
    crowd = Crowd(terms(), 8)
    crowd.go_to("mask")
    crowd.tell()
    state = crowd.devices[crowd.ids[0]]
    assert repr(state) == f"DeviceRound({crowd.ids[0]}, round 1, masked)"
    assert repr(crowd.server) == "ServerRound(round 1, mask)"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(KINDS)), st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused(kind: str, data: bytes):
    try:
        message = open_message(kind, data)
    except Refused:
        return
    assert encode(message) == data


def test_other_encodings_unknown_kinds_and_more_bytes_are_refused():
    good = encode(Survivors(1, b"\x80"))
    assert open_message("secagg/survivors/1", good) == Survivors(1, b"\x80")
    others = [
        {"survivors": b"\x80", "round": 1},  # not sorted
        {"round": -1, "survivors": b""},
        {"round": 1, "survivors": "x"},
        {"round": 1},
    ]
    for bad in (good + b"\0", good[:-1], b"", *map(msgpack.packb, others)):
        refused(lambda bad=bad: open_message("secagg/survivors/1", bad))
    assert "secagg/gossip/1" in refused(lambda: open_message("secagg/gossip/1", good))
    refused(lambda: DeviceRound.decode(good))
    refused(lambda: decode(Reveal, good))


def test_bitmaps_have_one_form():
    chosen = [True, False, True, False, False, False, False, False, True]
    assert members(bitmap(chosen), 9).tolist() == chosen
    for bad in (b"", b"\xa0", b"\xa0\xc0", b"\xa0\x80\x00"):
        refused(lambda bad=bad: members(bad, 9))
