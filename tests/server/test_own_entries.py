"""What the server does of itself: rounds that close by time, timers, and what its own door lets out of its own rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gathered_task import gathered_plugin, make  # noqa: F401  a fixture

from crowdml.errors import DataError, LeakError, ProtocolError
from crowdml.messages import SERVER, Envelope, encode
from crowdml.privacy.door import OwnDoor, Recorded
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.privacy.private import RECEIVED, Private, Release, Rows, Unseen
from crowdml.protocol import Gathered, Publish, Role, Step, Wake
from crowdml.protocols import find
from crowdml.server.fold import Fold, uploads_in
from crowdml.server.gathering import CLOSED, WOKEN, Own, pack_own, read_own
from crowdml.server.hub import Hub
from crowdml.server.runner import TaskRunner
from crowdml.server.transcript import replay, write_transcript
from crowdml.server.validation import OwnRows, keep_rows
from crowdml.storage.server import Store
from crowdml.storage.server.journal import task_number
from crowdml.storage.server.looks import Terms, validations
from crowdml.storage.server.schema import body
from crowdml.task import Task
from crowdml.turn import device_turn, first_turn, server_turn
from crowdml.wire.envelopes import open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.packing import pack
from crowdml.wire.problems import Problem
from crowdml.wire.statements import Statement

START = datetime(2025, 1, 31, 12, tzinfo=UTC)
SERVER_KEY = Key.from_secret(bytes(32))


@dataclass
class Alone:
    """A task's runner on a database, without sockets; time passes when the test says so."""

    store: Store
    task: Task
    noise: Any = field(default_factory=Silence)
    seconds: float = 0.0
    booted: float = 0.0
    every: int = 1000

    def __post_init__(self) -> None:
        if not self.store.tasks():
            self.store.invite(bytes(32), START.isoformat(), uses=100)
        self.store.add_task(self.task.canonical, self.task.name, START.isoformat(), "running")
        self.start()

    def start(self) -> TaskRunner:
        """Begin anew, as after a crash: nothing but the database is left, and the clock that counts starts at zero."""
        self.booted = self.seconds
        self.runner = TaskRunner(
            self.store, self.task.canonical, SERVER_KEY, self.now, clock=lambda: self.seconds - self.booted,
            noise=self.noise, snapshot_every=self.every,
        )  # fmt: skip
        return self.runner

    def now(self) -> str:
        return (START + timedelta(seconds=self.seconds)).isoformat()

    def give(self, device: int, value: int, version: int, seq: int = 1) -> Any:
        key = Key.from_secret(bytes([device + 1]) * 32)
        self.store.enrol(bytes(32), key.public, self.now(), [self.task.hash])
        made = find(self.task).contribution(Release(np.full((2, 2), value, np.int32), RECEIVED), np.int32(version))
        to = frozenset((SERVER,))
        envelope = Envelope(self.task.hash, key.id, to, seq, "test_median/sums/1", encode(made))
        (answer,) = self.runner.accept([open_signed(sign(envelope, Statement(("pure 1",), seq, ("pure 1",)), key))])
        return answer

    def ring(self) -> None:
        assert self.runner.closing.is_due()
        self.runner.closing.ring()

    def replayed(self, path: Path) -> bytes:
        with path.open("wb") as file:
            write_transcript(self.store, self.task.hash, file)
        return replay(path).body

    @property
    def events(self) -> list[tuple[str, str]]:
        return [(each.kind, each.detail) for each in self.store.events()]


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "server.sqlite") as opened:
        yield opened


# --- by time ---


def test_a_round_closes_by_time_with_what_it_has(store, tmp_path):
    alone = Alone(store, make(size=5, minimum=2, seconds=60))
    alone.give(0, 3, 0), alone.give(1, 5, 0)
    assert not alone.runner.closing.is_due()
    alone.seconds = 61
    alone.ring()
    assert (alone.runner.offer.version, alone.runner.index) == (1, 3)
    assert alone.replayed(tmp_path / "told") == alone.runner.offer.body
    late = alone.give(2, 9, 0)
    assert isinstance(late, Problem)
    assert (late.status, late.slug) == (409, "round-over")


def test_a_round_with_too_few_uploads_stays_open_and_the_operator_is_told_once(store):
    alone = Alone(store, make(size=5, minimum=2, seconds=60))
    alone.give(0, 3, 0)
    alone.seconds = 61
    alone.ring()
    assert not alone.runner.closing.is_due()
    assert alone.runner.offer.version == 0
    ((_, detail),) = [each for each in alone.events if each[0] == "round waits"]
    assert detail == (
        "round 0 has 1 of at least 2 uploads after 60 s: it stays open until they are in. Invite more devices, or stop "
        "the task"
    )
    alone.give(1, 3, 0)
    alone.ring()
    assert alone.runner.offer.version == 1


def test_a_round_that_closes_by_number_alone_and_never_fills_is_told_of_after_an_hour(store, caplog):
    alone = Alone(store, make(size=2))
    alone.give(0, 3, 0)
    alone.seconds = 3599
    assert not alone.runner.closing.is_due()
    alone.seconds = 3600
    alone.ring()
    assert not alone.runner.closing.is_due()
    said = "round 0 has 1 of at least 2 uploads after 3600 s: it stays open until they are in."
    assert f"task median: {said}" in caplog.text
    assert [detail.startswith(said) for kind, detail in alone.events if kind == "round waits"] == [True]
    assert alone.runner.closing.now().closes_at is None
    alone.give(1, 3, 0)
    assert alone.runner.offer.version == 1


@pytest.mark.parametrize("snapshot", [False, True])
def test_the_time_of_a_round_goes_on_over_a_restart(store, snapshot):
    alone = Alone(store, make(size=5, minimum=1, seconds=60))
    alone.give(0, 3, 0)
    alone.seconds = 50
    if snapshot:
        alone.runner.take_snapshot()
    closing = alone.start().closing
    assert not closing.is_due()
    now = closing.now()
    assert now is not None
    assert now.text(alone.now()) == "round 0: 1 of 5 uploads, closes at 5 or at 12:01 UTC"
    alone.seconds = 61
    alone.ring()
    assert alone.runner.offer.version == 1


def test_a_crash_between_the_last_upload_and_the_close_ends_in_the_same_close(store, monkeypatch):
    alone = Alone(store, make(size=2))
    alone.give(0, 3, 0)
    monkeypatch.setattr(type(alone.runner.closing), "close_full", lambda self: None)
    alone.give(1, 5, 0)
    assert alone.runner.offer.version == 0
    monkeypatch.undo()
    alone.start()
    assert alone.runner.closing.room == 0
    alone.ring()
    assert (alone.runner.offer.version, alone.runner.index) == (1, 3)
    assert float(alone.runner.fold.weights[0, 0]) == 4 * float(alone.task.privacy.grid)


def test_uploads_beyond_a_round_that_come_together_are_for_no_round(store):
    """The one that fills the round closes it before the next is looked at."""
    alone = Alone(store, make(size=1))
    task, signed = alone.task, []
    for device in range(3):
        key = Key.from_secret(bytes([device + 1]) * 32)
        store.enrol(bytes(32), key.public, alone.now(), [task.hash])
        made = find(task).contribution(Release(np.full((2, 2), 1, np.int32), RECEIVED), np.int32(0))
        envelope = Envelope(task.hash, key.id, frozenset((SERVER,)), 1, "test_median/sums/1", encode(made))
        signed.append(open_signed(sign(envelope, Statement(("pure 1",), 1, ("pure 1",)), key)))
    first, *others = alone.runner.accept(signed)
    assert first[0] == 202
    assert [each.slug for each in others] == ["round-over"] * 2
    assert (alone.runner.offer.version, alone.runner.check_ins) == (1, 1)


def test_an_upload_that_comes_twice_in_one_batch_counts_once_and_both_get_a_receipt(store):
    alone = Alone(store, make(size=4))
    key = Key.from_secret(bytes([1]) * 32)
    store.enrol(bytes(32), key.public, alone.now(), [alone.task.hash])
    signed = []
    for value, seq in ((1, 1), (1, 1), (9, 2)):
        made = find(alone.task).contribution(Release(np.full((2, 2), value, np.int32), RECEIVED), np.int32(0))
        to = Envelope(alone.task.hash, key.id, frozenset((SERVER,)), seq, "test_median/sums/1", encode(made))
        signed.append(open_signed(sign(to, Statement(("pure 1",), seq, ("pure 1",)), key)))
    first, again, other = alone.runner.accept(signed)
    assert (first[0], again[0], other.slug) == (202, 200, "round-over")
    assert (alone.runner.check_ins, alone.runner.closing.room) == (1, 3)


def test_a_reduction_spares_the_uploads_of_an_open_round_whose_devices_went_on_elsewhere(store):
    alone, other = Alone(store, make("one", size=4)), Alone(store, make("other", size=9))
    for device in (0, 1):
        alone.give(device, 4, 0)
        other.give(device, 4, 0)  # so its upload is not the last body of the device
    alone.runner.take_snapshot()
    alone.give(2, 4, 0)
    alone.runner.take_snapshot()
    assert len(list(store.bodies_at(alone.task.hash, [1, 2]))) == 2
    alone.start()
    alone.give(3, 4, 0)
    assert alone.runner.offer.version == 1


# --- timers ---


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("snapshot", [False, True])
def test_a_handler_that_asked_to_be_woken_is_woken_once_also_after_a_restart(store, tmp_path, restart, snapshot):
    alone = Alone(store, make(size=1, wake=30))
    alone.give(0, 1, 0)
    assert not alone.runner.closing.is_due()
    if snapshot:
        alone.runner.take_snapshot()
    if restart:
        alone.start()
    alone.seconds = 31
    alone.ring()
    assert not alone.runner.closing.is_due()
    assert int(alone.runner.fold.state.woken) == 1
    before = alone.runner.fold.state
    again = alone.start()
    assert int(again.fold.state.woken) == 1
    assert (again.fold.state.weights == before.weights).all()
    assert not again.closing.is_due()
    assert alone.replayed(tmp_path / "told") == alone.runner.offer.body


def test_a_timer_of_the_server_runs_out_after_a_second_at_the_soonest(store):
    alone = Alone(store, make(size=1, wake=0.01))
    alone.give(0, 1, 0)
    alone.seconds = 0.9
    assert not alone.runner.closing.is_due()
    alone.seconds = 1.0
    alone.ring()
    assert int(alone.runner.fold.state.woken) == 1


# --- closes that the protocol cannot make ---


def with_combine(monkeypatch, task: Task, combine: Any) -> None:
    from crowdml.protocols.registry import PROTOCOLS

    ours = find(task)
    changed = replace(ours, server=Role(ours.server.start, {**ours.server.on, Gathered: combine}))
    plugin = PROTOCOLS._named["test_median"]
    monkeypatch.setitem(PROTOCOLS._named, "test_median", replace(plugin, value=changed))
    find.cache_clear()


def test_a_close_that_publishes_no_later_version_is_refused_by_a_sentence_and_changes_nothing(store, monkeypatch):
    task = make(size=1)
    with_combine(monkeypatch, task, lambda task, state, event, ctx: Step(state))
    try:
        alone = Alone(store, task)
        assert alone.give(0, 1, 0)[0] == 202
        assert alone.runner.closing.failure is not None
        assert "closed round 0 and published nothing: devices wait for a later version" in alone.runner.closing.failure
        assert (alone.runner.index, alone.runner.offer.version) == (1, 0)
        answer = alone.give(1, 1, 0)
        assert answer.slug == "task-paused"
    finally:
        find.cache_clear()


# --- the server's own door ---


def attach(alone: Alone, budget: str = "10") -> None:
    x, y = np.arange(14, dtype=np.float32).reshape(7, 2), np.asarray([0, 0, 0, 1, 1, 1, 1], np.float32)
    terms = Terms("own.csv", Fraction(1), Fraction(budget))
    keep_rows(alone.store, alone.task, OwnRows(x, y, x), terms, alone.now())


def spent(alone: Alone) -> Fraction:
    return validations(alone.store)[alone.task.hash].spent


def test_what_the_servers_door_lets_out_is_charged_once_and_never_drawn_again(store, tmp_path):
    alone = Alone(store, make(size=1, peek=7), noise=SystemSource())
    attach(alone)
    alone.give(0, 1, 0)
    assert alone.runner.closing.failure is None
    seen, body = int(alone.runner.fold.state.seen), alone.runner.offer.body
    assert spent(alone) == 1
    for _ in range(3):
        alone.noise = Silence()
        assert int(alone.start().fold.state.seen) == seen
    assert alone.runner.offer.body == body
    assert spent(alone) == 1
    assert alone.replayed(tmp_path / "told") == body
    alone.give(0, 1, 1, seq=2)
    assert spent(alone) == 2


def test_the_door_is_told_the_true_rows_and_draws_with_the_servers_noise(store):
    alone = Alone(store, make(size=1, peek=7))
    attach(alone)
    alone.give(0, 1, 0)
    assert int(alone.runner.fold.state.seen) == 3


def test_where_the_rows_cannot_pay_nothing_is_drawn_and_the_task_waits_for_its_operator(store):
    alone = Alone(store, make(size=1, peek=7))
    attach(alone, budget="1")
    alone.give(0, 1, 0)
    alone.give(0, 1, 1, seq=2)
    assert alone.runner.offer.version == 1
    assert alone.runner.closing.failure is not None
    assert (
        "have lost ε = 1, and another ε = 1 is above their budget. Nothing was drawn." in alone.runner.closing.failure
    )
    assert spent(alone) == 1


def test_a_protocol_that_looks_at_rows_needs_some(store):
    alone = Alone(store, make(size=1, peek=7))
    alone.give(0, 1, 0)
    assert alone.runner.closing.failure is not None
    assert "this task has none. Attach them" in alone.runner.closing.failure


def test_a_charge_that_cannot_be_written_takes_its_value_with_it(store, monkeypatch):
    alone = Alone(store, make(size=1, peek=7))
    attach(alone)

    def fail(*_: Any) -> None:
        raise DataError("the disk is full.")

    monkeypatch.setattr("crowdml.server.closing.charge_rows", fail)
    alone.give(0, 1, 0)
    assert (alone.runner.index, alone.runner.offer.version, store.head(alone.task.hash).index) == (1, 0, 1)
    assert int(alone.runner.fold.state.seen) == 0


def test_a_replay_that_asks_for_another_row_than_the_journal_has_says_so(store):
    alone = Alone(store, make(size=1, peek=7))
    attach(alone)
    alone.give(0, 1, 0)
    fold = Fold(alone.task, uploads_in(store, alone.task.hash))
    envelope = open_signed(next(iter(store.bodies_at(alone.task.hash, [1])))).envelope
    fold.hear(1, envelope.kind, envelope.body, envelope.sender)
    with pytest.raises(ProtocolError, match=r"asks the server's door for row 'first', and its journal has \['other'\]"):
        fold.hear(2, CLOSED, pack_own(CLOSED, Own(0, (1,), released={"other": np.zeros(1, np.int64)})), SERVER)
    with pytest.raises(ProtocolError, match="closes round 0 with 0 uploads, and round 0 is open with 1"):
        fold.hear(2, CLOSED, pack_own(CLOSED, Own(0, ())), SERVER)


def test_rows_that_are_not_there_are_never_computed_on():
    absent = Unseen()

    def never(_: Any) -> Any:
        raise AssertionError("a replay looks at no row")

    _, other = absent.map(never).map_rows(never).split(3)
    released = Recorded({"first": np.asarray([4])}).release("first", other.map(never))
    assert released.value.tolist() == [4]


def test_entries_of_the_servers_own_are_read_as_they_were_written():
    own = Own(3, (1, 5, 9), released={"first": np.arange(6).reshape(2, 3)})
    found = read_own(CLOSED, pack_own(CLOSED, own))
    assert (found.number, found.entries) == (3, (1, 5, 9))
    assert found.released is not None
    assert (found.released["first"] == np.arange(6).reshape(2, 3)).all()
    for wrong in (b"", b"\x80", pack_own(CLOSED, own)[:-1]):
        with pytest.raises(Problem):
            read_own(CLOSED, wrong)
    huge = pack({"entries": [], "released": {"first": [[2**32] * 7 + [0], b""]}, "round": 0})
    with pytest.raises(Problem, match="at most 268,435,456 entries"):
        read_own(CLOSED, huge)


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (CLOSED, Own(0, (5, 1))),
        (CLOSED, Own(0, (1,), released={f"row {i}": np.zeros(1, np.int64) for i in range(16)})),
        (WOKEN, Own(tag="x" * 1025)),
    ],
)
def test_an_entry_that_could_not_be_read_again_is_not_written(kind, own):
    with pytest.raises(Problem):
        pack_own(kind, own)


@pytest.mark.parametrize(
    "wake", [Wake(1, "crowdml/close"), Wake(1, "x" * 201), Wake(-1, "x"), Wake(float("inf"), "x"), Wake(np.nan, "x")]
)
def test_a_timer_that_the_server_could_not_keep_is_refused_when_a_turn_asks_for_it(wake):
    task = make()
    made = replace(find(task), server=Role(lambda *_: Step(None, (wake,)), {int: lambda *_: Step(None, (wake,))}))
    for turn in (lambda: server_turn(made, task, None, 3), lambda: first_turn(made, task)):
        with pytest.raises(ProtocolError, match="the server asks to be woken after"):
            turn()


# --- the same bits, live and in a replay ---


def test_the_servers_door_gives_a_handler_what_a_replay_gives_it():
    table = find(make(peek=7)).server_mechanisms(make(peek=7))
    door, rows = OwnDoor(table, Silence()), Unseen(Private(np.ones((7, 1), np.int32), Rows(0, 7)))
    live = door.release("first", rows).value
    journal = read_own(CLOSED, pack_own(CLOSED, Own(0, (1,), released=door.drawn))).released
    assert journal is not None
    for found in (
        live,
        Recorded(journal).release("first", Unseen()).value,
        Recorded(door.drawn).release("first", rows).value,
    ):
        assert (found.dtype, found.shape, found.tolist()) == (np.int64, live.shape, live.tolist())
        with pytest.raises(ValueError, match="read-only"):
            found[...] = 0


def test_a_servers_handler_cannot_tell_live_rows_from_those_of_a_replay():
    for rows in (Unseen(), Unseen(Private(np.ones((7, 1)), Rows(0, 7)))):
        for each in (rows, rows.map_rows(lambda x: x), *rows.split(3), rows.map(lambda x: x)):
            with pytest.raises(LeakError, match="not told which rows it has"):
                each.part  # noqa: B018


# --- a handler that draws and then fails ---


@pytest.mark.parametrize("error", [ValueError, ProtocolError])
def test_what_a_handler_drew_before_it_failed_is_charged_and_not_shown(store, tmp_path, monkeypatch, error):
    task = make(size=1, peek=7)
    combine, fails = find(task).server.on[Gathered], [True]

    def draw_and_fail(task: Task, state: Any, event: Any, ctx: Any) -> Any:
        step = combine(task, state, event, ctx)
        if fails:
            raise error(f"drew {step.state.seen}")
        return step

    with_combine(monkeypatch, task, draw_and_fail)
    try:
        alone = Alone(store, task)
        attach(alone)
        alone.give(0, 1, 0)
        assert alone.runner.closing.failure == f"protocol 'test_median' failed with {error.__name__}"
        assert (spent(alone), alone.runner.offer.version, alone.runner.index) == (1, 0, 2)
        alone.start()
        fails.clear()
        alone.ring()
        assert (spent(alone), alone.runner.offer.version, alone.runner.index) == (2, 1, 3)
        assert alone.replayed(tmp_path / "told") == alone.start().offer.body
    finally:
        find.cache_clear()


# --- a journal that cannot be folded ---


def two_tasks(store: Store) -> tuple[Task, Task]:
    """Two tasks with a closed round each."""
    for name in ("one", "other"):
        Alone(store, make(name, size=1)).give(0, 1, 0)
    return make("one", size=1), make("other", size=1)


def fail_for(monkeypatch, task: Task) -> None:
    """From now on the protocol cannot close a round of this task."""
    combine = find(task).server.on[Gathered]

    def fails(of: Task, state: Any, event: Any, ctx: Any) -> Any:
        if of.name == task.name:
            raise ValueError("what a device gave")
        return combine(of, state, event, ctx)

    with_combine(monkeypatch, task, fails)


@pytest.mark.parametrize("damage", ["handler", "entry"])
def test_a_task_whose_journal_cannot_be_folded_is_put_aside_and_the_others_are_served(
    store, monkeypatch, caplog, damage
):
    one, other = two_tasks(store)
    if damage == "entry":
        with store.writing() as connection:
            number = task_number(connection, one.hash)
            connection.execute(body.delete().where(body.c.task == number, body.c.index == 2))
            connection.execute(body.insert().values(task=number, index=2, signed=b"\x00"))
    else:
        fail_for(monkeypatch, one)
    try:
        hub = Hub.open(store)
    finally:
        find.cache_clear()
    assert [each.task.name for each in hub.hosted()] == ["other"]
    assert [(each.name, each.state) for each in hub.aside.values()] == [("one", "running")]
    why = hub.aside[one.hash].why
    assert why == "its protocol failed with ValueError" or damage == "entry"
    assert f"task one is put aside: {why}. The other tasks are served; mend this and restart the server" in caplog.text
    assert ("put aside", f"{why}. Mend this, and restart the server") in [(e.kind, e.detail) for e in store.events()]
    with pytest.raises(Problem, match=r"cannot be served now") as told:
        hub.find(one.hash)
    assert told.value.slug == "task-paused"
    hub._follow()
    assert caplog.text.count("task one is put aside") == 1
    assert hub.find(other.hash).offer.version == 1


def test_a_task_that_fails_while_it_is_served_is_put_aside_once_its_journal_cannot_be_folded_again(store, monkeypatch):
    one, other = two_tasks(store)
    hub = Hub.open(store)
    fail_for(monkeypatch, one)
    try:
        hub._doubtful.update((one.hash, other.hash))
        hub._follow()
    finally:
        find.cache_clear()
    assert (list(hub.aside), list(hub.runners), hub._doubtful) == ([one.hash], [other.hash], set())


def test_an_effect_that_a_role_cannot_have_is_refused():
    from crowdml.messages import SERVER as TO
    from crowdml.protocol import CheckOut, Context, Protocol, Send

    task = make()
    ours = find(task)
    model = ours.server.start(task, Context(TO)).effects[0].message  # pyright: ignore
    for effect, word in ((CheckOut(), "CheckOut"), (Send("someone", model), "Send")):
        made: Protocol = replace(ours, server=Role(ours.server.start, {int: lambda *_, e=effect: Step(None, (e,))}))
        with pytest.raises(ProtocolError, match=f"the server returns {word}"):
            server_turn(made, task, None, 3)
    made = replace(ours, device=Role(ours.device.start, {int: lambda *_: Step(None, (Publish(model), Wake(1, "x")))}))
    with pytest.raises(ProtocolError, match="the device returns Publish"):
        device_turn(made, task, None, 3, noise=None, me="me")
