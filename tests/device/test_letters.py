"""Devices that hear each other: who is believed, what is kept, what is learned, and that nothing of it leaves."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import replace

import numpy as np
import pytest
from loopback import QuickClock, serving
from neighbours import STREET, Scribe, Watched, readings, stand, stands

from crowdml.device.client import Unreachable
from crowdml.device.learning import recall
from crowdml.device.letters import Correspondence, Post
from crowdml.device.mail import LONGEST_LOOK
from crowdml.device.places import find_place
from crowdml.device.sources import LiveSource
from crowdml.errors import CrowdmlError, ProtocolError, TaskError
from crowdml.messages import decode
from crowdml.protocol import Context
from crowdml.protocols import find
from crowdml.wire.envelopes import open_signed, sign
from crowdml.wire.letters import Letter, Mailbox
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem

PROTOCOL = find(STREET)
BATCH, WINDOW = 8, 3


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path / "server", STREET) as server:
        yield server


def post(place: int = 1, me: str = "f" * 32) -> tuple[Correspondence, object]:
    state = PROTOCOL.device.start(STREET, Context(me=me, place=place)).state
    return Correspondence(STREET, PROTOCOL, me, place, Post()), state


def kept(folder):
    from crowdml.device.folder import Folder

    with Folder(folder).ledger() as ledger:
        return recall(ledger, STREET, PROTOCOL)


# --- a live street ---


def test_devices_hear_what_their_nearest_said_and_each_letter_once(server, tmp_path):
    for place in (0, 1, 2):
        _, summary = stands(tmp_path / f"device{place}", server, place, readings(4 * BATCH + 3, place))
        assert (summary.check_ins, summary.endings) == (4, {"source": 1})
    stands(tmp_path / "device0", server, 0, readings(4 * BATCH + 3, 0))  # once more, with nothing new to give
    _, heard, state = kept(tmp_path / "device0")
    assert (heard.heard, dict(heard.refused)) == (8, {})
    assert state.batches.tolist() == [[0, 1, 2, 3, -1, -1]] * 2
    letters = [each.open() for each in server.hub.store.letters(STREET.hash, (1, 2), 0, 10**6)]
    told = [decode(each.envelope.kind, each.envelope.body) for each in letters]
    for row, place in enumerate((1, 2)):
        counts = [each.counts.value.tolist() for each in told if int(each.place) == place]
        assert state.counts[row, :4].tolist() == counts
    assert heard.size == sum(len(each.data) for each in letters)
    stands(tmp_path / "device0", server, 0, readings(4 * BATCH + 3, 0))
    assert kept(tmp_path / "device0")[1] == heard


def test_a_device_that_comes_back_knows_what_it_knew(server, tmp_path):
    for place in (1, 0):
        stands(tmp_path / f"device{place}", server, place, readings(4 * BATCH + 3, place))
    learner, heard, state = kept(tmp_path / "device0")
    assert [each.number for each in learner._held] == [0, 1, 2, 3]
    windows = np.array([readings(4 * BATCH + 3, 0)[i : i + 3] for i in range(4 * BATCH)], np.float32)
    np.testing.assert_array_equal(np.concatenate([each.x for each in learner._held]), windows)
    _, summary = stands(tmp_path / "device0", server, 0, readings(5 * BATCH + 3, 0))
    again, heard_again, state_again = kept(tmp_path / "device0")
    assert (again.seed, heard_again.keys) == (learner.seed, heard.keys)
    assert state_again.batches.tolist() == state.batches.tolist()
    assert again.score.guessed == learner.score.guessed + BATCH == 4 * BATCH
    assert summary.letters.guessed == again.score.guessed


def test_only_so_many_batches_of_own_samples_are_kept(server, tmp_path):
    stands(tmp_path / "device", server, 0, readings(9 * BATCH + 3))
    assert [each.number for each in kept(tmp_path / "device")[0]._held] == [3, 4, 5, 6, 7, 8]


def test_predictions_stay_with_the_owner_and_no_window_is_in_anything_that_left(server, tmp_path):
    told, client = [], Watched(server.address)
    values = readings(4 * BATCH + 3)
    _, summary = stands(tmp_path / "device", server, 0, values, client=client, tell=told.append)
    lines = [each for each in told if each.startswith("next: ")]
    assert len(lines) == 4
    assert "of 1 vote)" in lines[-1]
    assert f"right {100 * summary.letters.right / 24:.0f}% of 24 so far" in lines[-1]
    assert summary.letters.next in STREET.labels.classes
    everything = b"\n".join(client.said)
    for value in values:
        assert struct.pack("<f", value) not in everything
        assert struct.pack("<d", value) not in everything
        assert str(value).encode() not in everything


def test_while_samples_are_waited_for_the_mailbox_is_read_rarer_and_rarer(server, tmp_path):
    """And a batch that comes then is given at once."""

    async def whole() -> tuple[int, QuickClock]:
        quick, client, gate = QuickClock(), Watched(server.address), asyncio.Event()
        scribe = Scribe(1)
        await scribe.join(server)
        looks = []

        def looked(method: str, path: str) -> None:
            if "mailbox" in path:
                looks.append(path)
                if len(looks) == 8:  # of some more, its clock would be so far ahead that the server refuses it
                    gate.set()

        client.instead = looked
        import threading

        go = threading.Event()
        fleet_task = asyncio.create_task(
            stand(tmp_path / "device", server, 0, [], client=client, time_=quick, most=1, source=_live(go))
        )
        await asyncio.wait_for(gate.wait(), 30)
        await scribe.check_in(server, scribe.letter().signed)
        seen = len(looks)
        while len(looks) < seen + 2:  # one of them came after the letter
            await asyncio.sleep(0.005)
        go.set()
        _, summary = await asyncio.wait_for(fleet_task, 30)
        assert summary.check_ins == 1
        assert summary.letters.heard == 1
        return len(looks), quick

    looks, quick = asyncio.run(whole())
    naps = quick.slept[:10]
    assert naps[0] <= 1.0
    assert max(naps) > 8
    assert max(quick.slept) <= LONGEST_LOOK
    assert looks >= 10


def _live(go) -> object:
    def values():
        go.wait(30)
        yield from readings(BATCH + 3)

    return lambda task: LiveSource(values, task, 100)


# --- who is believed ---


GOOD, OTHER = Scribe(2), Scribe(2)
BAD = {
    "garbage": (Letter(1, GOOD.key.public, b"x" * 200), "malformed"),
    "nothing": (Letter(1, GOOD.key.public, b""), "malformed"),
    "a forged sender": (Letter(1, OTHER.key.public, GOOD.letter(5).signed), "forged"),
    "a changed byte": (Letter(1, GOOD.key.public, bytes(64) + GOOD.letter(5).signed[64:]), "forged"),
    "no key": (Letter(1, bytes(32), GOOD.letter(5).signed), "forged"),
    "another task": (GOOD.letter(task=b"t" * 32), "other-task"),
    "to somebody else": (GOOD.letter(to=frozenset(("@0", "@3"))), "not-for-us"),
    "to the server": (GOOD.letter(to=frozenset(("server",))), "not-for-us"),
    "a stranger": (Scribe(4).letter(to=frozenset(("@1",))), "stranger"),
    "its own place": (Scribe(1).letter(to=frozenset(("@1",))), "stranger"),
    "another shape": (GOOD.letter(counts=(1, 2)), "contents"),
    "floats": (GOOD.letter(counts=np.ones(3, np.float32)), "contents"),
    "wide integers": (GOOD.letter(counts=np.ones(3, np.int64)), "contents"),
    "negative beyond the noise": (GOOD.letter(counts=(-10_000, 2, 3)), "contents"),
    "more than a batch and the noise": (GOOD.letter(counts=(1, 2, 10_000)), "contents"),
    "a batch before the first": (
        GOOD.letter(body=GOOD.envelope().body.replace(b"batch\x00", b"batch\xff")),
        "contents",
    ),
    "another kind": (GOOD.letter(kind="proportions/counted/1"), "contents"),
    "a kind nobody knows": (GOOD.letter(kind="proportions/orders/1"), "contents"),
    "a total": (GOOD.letter(kind="proportions/total/1"), "contents"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_letter_is_left_aside_and_counted_and_changes_nothing_else(name):
    letter, flaw = BAD[name]
    mine, state = post()
    first = mine.hear(state, [GOOD.letter(0)], 0.0)
    assert first[1:] == (1, ())
    after, heard, flaws = mine.hear(first[0], [letter, GOOD.letter(1, (4, 4, 0)), letter], 0.0)
    assert (heard, flaws, mine.post.refused) == (1, (flaw,), {flaw: 2})
    assert after.batches.tolist() == [[-1] * 6, [0, 1, -1, -1, -1, -1]]
    assert after.counts[1, :2].tolist() == [[1, 2, 3], [4, 4, 0]]
    assert mine.post.keys == {2: GOOD.key.public}


def test_the_first_key_that_spoke_from_a_place_is_the_only_one_that_is_heard_from_there():
    mine, state = post()
    state, *_ = mine.hear(state, [GOOD.letter(0)], 0.0)
    state, heard, flaws = mine.hear(state, [OTHER.letter(1), OTHER.letter(2)], 0.0)
    assert (heard, flaws) == (0, ("other-key",))
    again = Correspondence(STREET, PROTOCOL, "f" * 32, 1, Post.of(mine.post.plain()))
    assert again.post == mine.post
    after, heard, flaws = again.hear(state, [OTHER.letter(1), GOOD.letter(1)], 0.0)
    assert (heard, flaws, again.post.refused) == (1, (), {"other-key": 3})
    assert after.batches[1].tolist() == [0, 1, -1, -1, -1, -1]


def test_a_device_does_not_hear_itself_and_hears_a_letter_that_comes_on_two_ways_once():
    mine, state = post(me=GOOD.key.id)
    assert mine.hear(state, [GOOD.letter()], 0.0)[1:] == (0, ("not-for-us",))
    mine, state = post()
    letter = GOOD.letter()
    state, heard, _ = mine.hear(state, [letter, replace(letter, index=7)], 0.0)
    assert (heard, mine.post.size) == (1, len(letter.signed))


def test_a_server_that_relays_bad_letters_and_floods_stops_nobody_and_loses_nothing(server, tmp_path):
    """A mailbox by hand, as no honest server would give it out."""
    good = [GOOD.letter(batch, index=900 + batch) for batch in range(2)]
    bad = [replace(letter, index=1 + index) for index, (letter, _) in enumerate(BAD.values())]
    flood = [replace(letter, index=100 + index) for index, letter in enumerate(bad * 10)]
    pages = iter([Mailbox(50, tuple(bad)), Mailbox(800, tuple(flood)), Mailbox(950, tuple(good))])

    def hostile(method: str, path: str) -> bytes | None:
        if "mailbox" not in path:
            return None
        return next(pages, Mailbox(960)).encode()

    told, client = [], Watched(server.address)
    client.instead = hostile
    _, summary = stands(tmp_path / "device", server, 1, readings(3 * BATCH + 3), client=client, tell=told.append)
    assert (summary.check_ins, summary.refused) == (3, 0)
    assert summary.letters.heard == 2
    assert sum(summary.letters.refused.values()) == 11 * len(BAD)
    told = [each for each in told if "left aside" in each]
    assert len(told) == len(summary.letters.refused)  # once for each flaw
    assert kept(tmp_path / "device")[2].batches[1, :2].tolist() == [0, 1]


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff" * 100,
        pack({"last": 1, "letters": [[1, b"short", b""]]}),
        pack({"last": -1, "letters": []}),
        Unreachable("it is away."),
        Problem("too-many", "Later."),
        Problem("no-place", "Nowhere."),
        Problem("internal", "Broken."),
    ],
)
def test_a_mailbox_that_cannot_be_read_stops_nobody(server, tmp_path, answer):
    client = Watched(server.address)
    client.instead = lambda method, path: answer if "mailbox" in path else None
    _, summary = stands(tmp_path / "device", server, 0, readings(2 * BATCH + 3), client=client)
    assert (summary.check_ins, summary.letters.heard) == (2, 0)


def test_a_number_that_no_message_can_have_ends_a_device_in_a_sentence(server, tmp_path):
    client = Watched(server.address)
    wanted = Problem("seq-gap", "Another number.", expected=10**30)
    client.instead = lambda method, path: wanted if path.endswith("/check-in") else None
    _, summary = stands(tmp_path / "device", server, 0, readings(BATCH + 3), client=client)
    assert (dict(summary.endings), summary.check_ins) == ({"refused": 1}, 0)


def test_an_honest_server_takes_no_letter_from_a_place_that_is_not_the_senders(server):
    scribe = Scribe(1)
    asyncio.run(scribe.join(server))
    for changes in ({"place": 2}, {"to": frozenset(("@0",))}, {"to": frozenset(("server",))}):
        data = sign(scribe.envelope(**changes), open_signed(scribe.letter().signed).statement, scribe.key)
        with pytest.raises(Problem) as refused:
            asyncio.run(scribe.check_in(server, data))
        assert refused.value.slug in ("wrong-place", "wrong-recipient")
    assert server.check_ins(STREET) == 0


# --- where a device stands ---


def test_a_place_is_named_by_its_name_or_its_number_and_kept_for_good():
    assert find_place(STREET, PROTOCOL, "corner 3", None) == 3
    assert find_place(STREET, PROTOCOL, "3", None) == 3
    assert find_place(STREET, PROTOCOL, None, 2) == 2
    assert find_place(STREET, PROTOCOL, "2", 2) == 2
    with pytest.raises(TaskError, match=r"Say --place with one of: 0 corner 0; 1 corner 1; .*; 4 corner 4\."):
        find_place(STREET, PROTOCOL, None, None)
    for wanted in ("5", "-1", "corner", "１"):
        with pytest.raises(TaskError, match=r"there is no such place\.( Did you mean .*\?)? Nothing was sent\."):
            find_place(STREET, PROTOCOL, wanted, None)
    with pytest.raises(TaskError, match=r"stands at 'corner 2', and stays there"):
        find_place(STREET, PROTOCOL, "1", 2)


def test_a_place_that_another_holds_and_a_second_place_are_refused_with_a_sentence(server, tmp_path):
    stands(tmp_path / "one", server, 1, readings(BATCH + 3))
    with pytest.raises(CrowdmlError, match=r"Another device stands at 'corner 1' \(place 1\)\. Nothing was sent\."):
        stands(tmp_path / "two", server, 1, readings(BATCH + 3))
    stands(tmp_path / "two", server, 2, readings(BATCH + 3))  # which chooses another
    with pytest.raises(CrowdmlError, match=r"stands at 'corner 2' already, and cannot stand at 'corner 3'"):
        stands(tmp_path / "two", server, 3, readings(BATCH + 3))
    assert server.check_ins(STREET) == 2


def test_a_device_without_a_place_says_nothing_in_a_task_of_places(server, tmp_path):
    with pytest.raises(ProtocolError, match="stands at one of its places"):
        stands(tmp_path / "device", server, -1, readings(BATCH + 3))
