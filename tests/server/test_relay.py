"""Places and letters over real HTTP: who may stand where, what is relayed to whom, and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from device import Answer, Device, Running, serving
from proportions_task import histogram, street
from real_postgresql import fresh_database
from relay_device import claim as claim_place
from relay_device import held as read_held
from relay_device import letter, path_of
from relay_device import mailbox as read_mailbox
from relay_device import say as say_at

from crowdml.messages import SERVER
from crowdml.protocol import address_of
from crowdml.protocols import find
from crowdml.server.limits import Limits
from crowdml.task import Task
from crowdml.wire.envelopes import open_signed
from crowdml.wire.keys import Key
from crowdml.wire.letters import MOST_LETTERS, Letter, Mailbox, few, open_mailbox
from crowdml.wire.packing import LARGEST_INTEGER
from crowdml.wire.problems import Problem

TASK = street()
COUNTING = histogram()
PEERS = find(TASK).peers
assert PEERS is not None
CORRESPONDENTS = PEERS(TASK)
MANY = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6)


def claim(device: Device, place: int, task: Task = TASK) -> Answer:
    return claim_place(device, place, task)


def say(device: Device, place: int, task: Task = TASK, **changes: Any) -> Answer:
    return say_at(device, place, task, **changes)


def held(device: Device, task: Task = TASK) -> dict[int, str]:
    return read_held(device, task)


def mailbox(device: Device, after: int | None = None, task: Task = TASK) -> Mailbox:
    return read_mailbox(device, after, task)


@contextlib.contextmanager
def a_street(
    folder: Path, limits: Limits = MANY, database: str | None = None
) -> Iterator[tuple[Running, list[Device]]]:
    """A server, and a device at each of the five places."""
    with serving(folder, TASK, COUNTING, limits=limits, database=database) as server:
        devices = [server.device() for _ in TASK.places]
        assert [claim(device, place).status for place, device in enumerate(devices)] == [201] * 5
        yield server, devices


Street = tuple[Running, list[Device]]


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Street]:
    with contextlib.ExitStack() as stack:
        database = None
        if request.param == "postgresql":
            database = stack.enter_context(fresh_database(request.getfixturevalue("postgresql"), "relay"))
        yield stack.enter_context(a_street(tmp_path_factory.mktemp("relay"), database=database))


# --- places ---


def test_a_place_is_claimed_once_by_one_device_which_keeps_it(shared: Street) -> None:
    server, devices = shared
    again = claim(devices[2], 2)
    assert (again.status, json.loads(again.body)) == (200, {"place": 2, "name": "corner 2"})
    other = claim(devices[2], 3)
    assert (other.status, other.slug, other.problem["held"]) == (409, "place-held", 2)
    taken = claim(server.device(), 2)
    assert (taken.status, taken.slug) == (409, "place-taken")


@pytest.mark.parametrize("place", ["5", "99", "-1", "x", "01234567890", "", "1/2", "²"])
def test_a_place_that_the_task_does_not_list_cannot_be_claimed(shared: Street, place: str) -> None:
    device = shared[0].device()
    answer = device.signed("POST", path_of(TASK, f"/places/{quote(place)}"))
    assert (answer.status, answer.slug) == (404, "not-found")


def test_who_is_not_enrolled_or_does_not_sign_claims_and_reads_nothing(shared: Street) -> None:
    server, _ = shared
    stranger = Device(server.line(), Key.generate())
    for method, rest in (("POST", "/places/0"), ("GET", "/mailbox")):
        assert stranger.signed(method, path_of(TASK, rest)).slug == "unknown-device"
        assert stranger.line.ask(method, path_of(TASK, rest)).slug == "authorization"
        assert stranger.signed(method, path_of(TASK, rest), now=0).slug == "unknown-device"


def test_tasks_without_places_have_neither_claims_nor_mailboxes(shared: Street) -> None:
    device = shared[0].device()
    assert claim(device, 0, COUNTING).slug == "not-found"
    assert device.signed("GET", path_of(COUNTING, "/mailbox")).slug == "not-found"
    assert device.signed("GET", path_of(COUNTING, "/places")).slug in ("not-found", "no-place")
    assert say(device, -1, COUNTING, counts=(7, 8, 5)).status == 202


def test_the_place_of_a_device_that_was_revoked_or_withdrew_is_free_and_so_are_its_letters(tmp_path: Path) -> None:
    with a_street(tmp_path) as (server, devices):
        for place in (0, 1):
            assert say(devices[place], place).status == 202
        assert [letter.index for letter in mailbox(devices[2]).letters] == [1, 2]
        first = held(devices[2])
        assert (first[0], first[1]) == (devices[0].key.id, devices[1].key.id)
        assert set(first) <= set(server.hub.relay(TASK.hash).peers[2])
        server.run(server.hub.revoke(devices[0].key.id))
        assert held(devices[2]) == {place: name for place, name in first.items() if place != 0}
        assert [letter.index for letter in mailbox(devices[2]).letters] == [2], "nothing of a revoked device goes out"
        assert devices[1].signed("POST", f"/v1/devices/{devices[1].key.id}/withdraw").status == 200
        assert mailbox(devices[2]) == Mailbox(2)
        assert not {0, 1} & set(held(devices[2]))
        for place in (0, 1):
            heir = server.device()
            assert claim(heir, place).status == 201
            assert say(heir, place).status == 202
        assert [letter.index for letter in mailbox(devices[2]).letters] == [3, 4]
        assert {0, 1} <= set(held(devices[2]))
        assert claim(devices[0], 0).slug == "revoked"


# --- check-ins ---


def test_what_is_said_is_counted_receipted_and_relayed_as_the_bytes_that_were_signed(tmp_path: Path) -> None:
    with a_street(tmp_path) as (server, devices):
        assert mailbox(devices[0]) == Mailbox(0)
        answers = [say(devices[place], place, counts=(place, 1, 2)) for place in (0, 1, 2, 3, 4)]
        assert [answer.status for answer in answers] == [202] * 5
        for place, device in enumerate(devices):
            box = mailbox(device)
            senders = [letter.open().envelope.sender for letter in box.letters]
            assert senders == [devices[other].key.id for other in CORRESPONDENTS[place]]
            assert all(address_of(place) in letter.open().envelope.to for letter in box.letters)
            assert box.last == 5
            assert mailbox(device, box.last) == Mailbox(5), "nothing is new"
            assert [letter.index for letter in mailbox(device, 2).letters] == [
                other + 1 for other in CORRESPONDENTS[place] if other + 1 > 2
            ]
        again = devices[0].send(TASK, mailbox(devices[1]).letters[0].signed)
        assert (again.status, again.body) == (200, answers[0].body), "the same bytes are the same entry"
        assert len(mailbox(devices[1]).letters) == len(CORRESPONDENTS[1]), "and the same letter"
        assert server.hub.runners[TASK.hash].fold.state.counts.tolist() == [10, 5, 10]
        metrics = server.line().ask("GET", "/metrics").body.decode()
        handed = server.hub.relay(TASK.hash).handed
        assert handed > 0
        assert f'crowdml_letter_bytes{{task="{TASK.hash.hex()[:12]}"}} {handed}' in metrics


@pytest.mark.parametrize(
    ("changes", "slug"),
    [
        ({"place": 3}, "wrong-place"),
        ({"place": 0}, "wrong-place"),
        ({"place": 5}, "wrong-message"),
        ({"place": -1}, "wrong-message"),
        ({"to": frozenset((SERVER,))}, "wrong-recipient"),
        ({"to": frozenset(("@0", "@1", "@3"))}, "wrong-recipient"),
        ({"to": frozenset(("@0", "@1", "@3", "@4", SERVER))}, "wrong-recipient"),
        ({"to": frozenset(("@0", "@1", "@2", "@3", "@4"))}, "wrong-recipient"),
        ({"to": frozenset(("0" * 32,))}, "wrong-recipient"),
        ({"counts": (1, 2)}, "wrong-message"),
        ({"counts": (1, 2, 3, 4)}, "wrong-message"),
        ({"counts": ((1, 2, 3),)}, "wrong-message"),
        ({"counts": (-200, 2, 3)}, "wrong-message"),
        ({"counts": (200, 2, 3)}, "wrong-message"),
        ({"counts": (1, 2, 3), "dtype": np.int64}, "wrong-message"),
        ({"counts": (1.5, 2, 3), "dtype": np.float32}, "wrong-message"),
        ({"batch": -1}, "wrong-message"),
        ({"kind": "sgd/gradient/1"}, "wrong-kind"),
    ],
)
def test_a_bad_peer_is_refused_and_nothing_is_counted_or_relayed(
    shared: Street, changes: dict[str, Any], slug: str
) -> None:
    server, devices = shared
    before, box = server.state(TASK), mailbox(devices[1])
    answer = say(devices[2], **{"place": 2, **changes})
    assert answer.slug == slug
    assert (server.state(TASK), mailbox(devices[1])) == (before, box)
    assert say(devices[2], 2).status == 202, "and what it says next is taken"


def test_a_device_without_a_place_says_and_reads_nothing(shared: Street) -> None:
    server, _ = shared
    device, before = server.device(), server.state(TASK)
    assert say(device, 0).slug == "wrong-place"
    answer = device.signed("GET", path_of(TASK, "/mailbox"))
    assert (answer.status, answer.slug) == (409, "no-place")
    assert server.state(TASK) == before


def test_a_forged_sender_is_refused_by_the_server_and_by_who_reads_a_letter(shared: Street) -> None:
    server, devices = shared
    before = server.state(TASK)
    forger = Device(server.line(), devices[2].key)
    data = forger.envelope(TASK, 99, to=frozenset(("@0", "@1", "@3", "@4")), kind="proportions/counts/1")
    assert forger.send(TASK, bytes([data[0] ^ 1]) + data[1:]).slug == "signature"
    assert server.state(TASK) == before
    assert say(devices[2], 2).status == 202
    true = mailbox(devices[1]).letters[-1]
    assert true.open().envelope.sender == devices[2].key.id
    for lie in (
        Letter(true.index, devices[3].key.public, true.signed),  # another's key
        Letter(true.index, true.key, true.signed[:80] + bytes([true.signed[80] ^ 1]) + true.signed[81:]),
        Letter(true.index, bytes(32), true.signed),
    ):
        with pytest.raises(Problem):
            lie.open()


def test_who_floods_is_stopped_and_the_others_are_heard(tmp_path: Path) -> None:
    limits = Limits(device_rate=0.001, device_burst=5, address_rate=1e6, address_burst=1e6)
    with a_street(tmp_path, limits) as (_, devices):
        answers = [say(devices[0], 0) for _ in range(30)]
        assert [answer.status for answer in answers] == [202] * 5 + [429] * 25
        assert answers[-1].slug == "too-many"
        assert say(devices[1], 1).status == 202
        looks = [devices[0].signed("GET", path_of(TASK, "/mailbox")) for _ in range(30)]
        assert looks[0].status == 200
        assert looks[-1].slug == "too-many", "one claim and 19 looks are let in at once"
        assert len(mailbox(devices[2]).letters) == 6


# --- what is kept ---


def test_of_each_place_the_newest_letters_are_kept_and_older_ones_make_room(tmp_path: Path) -> None:
    with a_street(tmp_path) as (server, devices):
        for _ in range(9):
            assert say(devices[0], 0).status == 202
        assert say(devices[1], 1).status == 202
        kept = mailbox(devices[2]).letters
        assert [letter.index for letter in kept] == [4, 5, 6, 7, 8, 9, 10], "memory = 6, and one of another place"
        with server.hub.store.reading() as connection:
            assert connection.exec_driver_sql("select count(*) from letter").scalar() == 7


def test_letters_and_places_survive_a_restart_and_the_reduction_of_the_journal(tmp_path: Path) -> None:
    limits = Limits(snapshot_every=2, device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6)
    with a_street(tmp_path, limits) as (server, devices):
        for number in range(8):
            assert say(devices[number % 2], number % 2).status == 202
        before = mailbox(devices[2])
        assert len(before.letters) == 8
    with serving(tmp_path, limits=limits) as server:
        for device in devices:
            device.line = server.line()
        assert server.hub.store.counts().bodies < 8
        assert mailbox(devices[2]) == before
        assert claim(devices[2], 2).status == 200
        assert claim(devices[2], 3).problem["held"] == 2
        assert say(devices[2], 2).status == 202
        assert [place.letters for place in server.hub.relay(TASK.hash).figures()] == [4, 4, 1, 0, 0]


def test_a_mailbox_is_read_in_answers_of_bounded_size(shared: Street) -> None:
    relay = shared[0].hub.relay(TASK.hash)
    letters = [Letter(index, bytes(32), b"x" * size) for index, size in enumerate([10] * 300 + [2**21, 5], 1)]
    assert [letter.index for letter in few(letters)] == list(range(1, MOST_LETTERS + 1))
    assert [letter.index for letter in few(letters[299:])] == [300], "the next one is too large to come with it"
    assert [letter.index for letter in few(letters[300:])] == [301], "and comes alone"
    assert few([]) == ()
    assert open_mailbox(Mailbox(400, few(letters)).encode()) == Mailbox(400, few(letters))
    assert relay.keep == 6


def test_a_long_mailbox_is_read_bit_by_bit_with_nothing_left_out(tmp_path: Path) -> None:
    task = street(3, peers=1).with_(protocol={**TASK.protocol, "peers": 1, "memory": 1000})
    with serving(tmp_path, task, limits=MANY) as server:
        devices = [server.device() for _ in range(2)]
        assert [claim(device, place, task).status for place, device in enumerate(devices)] == [201, 201]
        accept = server.hub.runners[task.hash].accept
        batch = [open_signed(letter(devices[0], 0, task, seq=seq)) for seq in range(1, MOST_LETTERS + 11)]
        answers = server.run(server.hub.write(accept, batch))
        assert all(not isinstance(answer, Problem) for answer in answers)
        first = mailbox(devices[1], task=task)
        assert (len(first.letters), first.last) == (MOST_LETTERS, MOST_LETTERS)
        rest = mailbox(devices[1], first.last, task)
        assert (len(rest.letters), rest.last) == (10, MOST_LETTERS + 10)


def test_a_device_that_was_told_of_an_entry_beyond_all_others_finds_its_way_back(tmp_path: Path) -> None:
    """As by somebody between it and its server, or before the server was restored from a backup."""
    with a_street(tmp_path) as (_, devices):
        assert say(devices[0], 0).status == 202
        told = mailbox(devices[1], LARGEST_INTEGER)
        assert told == Mailbox(1)
        assert say(devices[0], 0).status == 202
        assert [letter.index for letter in mailbox(devices[1], told.last).letters] == [2]


@pytest.mark.parametrize("after", ["x", "-1", "1&after=2", "9" * 30, str(LARGEST_INTEGER + 1), ""])
def test_an_entry_is_a_whole_number(shared: Street, after: str) -> None:
    answer = shared[1][0].signed("GET", path_of(TASK, f"/mailbox?after={after}"))
    assert (answer.status, answer.slug) == (400, "bad-request")
