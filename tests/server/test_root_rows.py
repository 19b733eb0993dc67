"""Rounds that are combined with rows of the server's own: private ones for a charge, public ones for none."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crowdml.arrays import Samples
from crowdml.errors import DataError, TaskError
from crowdml.messages import SERVER, Envelope, encode
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.protocols import find, remarks_on, settled
from crowdml.rooted import REASONS
from crowdml.server.gathering import CLOSED, read_own
from crowdml.server.runner import TaskRunner
from crowdml.server.sifting import BECAUSE, WHY, _counted, sift_rounds
from crowdml.server.transcript import replay, write_transcript
from crowdml.server.validation import OwnRows, keep_rows
from crowdml.storage.server import Store
from crowdml.storage.server.looks import Terms, detach, validations
from crowdml.task import Task, parse
from crowdml.turn import check_in
from crowdml.wire.envelopes import open_signed, sign
from crowdml.wire.keys import Key
from crowdml.wire.statements import Statement

START = datetime(2025, 1, 31, 12, tzinfo=UTC)
SERVER_KEY = Key.from_secret(bytes(32))
TEXT = """
name = "probe"
features = {{ dimension = 3, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {labels}
model = {{ kind = "ridge" }}
stop = {{ steps = 9 }}
[protocol]
kind = "secprobe"
batch = 30
map = {{ kind = "identity", constant = 0.0 }}
combine = {{ uploads = 4, keep = 2, rows = {rows}, {combine} }}
[privacy]
mechanism = "skellam"
epsilon = {{ moments = 4.0 }}
delta = 1e-6
budget = {{ epsilon = 4.0, samples = 300 }}
"""
DRAWN, BEST = 'rule = "exponential", epsilon = 0.5', 'rule = "top"'
CLASSES, NUMBERS = '{ classes = ["a", "b", "c"] }', '{ kind = "number" }'


def make(combine: str = DRAWN, labels: str = CLASSES, rows: int = 12) -> Task:
    return settled(parse(TEXT.format(combine=combine, labels=labels, rows=rows)))


def samples(count: int, seed: int) -> Samples:
    y = np.arange(count, dtype=np.int32) % 3
    x = np.eye(3, dtype=np.float32)[y] + np.random.default_rng(seed).normal(0, 0.1, (count, 3)).astype(np.float32)
    return Samples(x / np.linalg.norm(x, axis=1, keepdims=True), y)


@dataclass
class Server:
    """A task's runner on a database, without sockets."""

    store: Store
    task: Task
    noise: Any = field(default_factory=Silence)

    def __post_init__(self) -> None:
        if not self.store.tasks():
            self.store.invite(bytes(32), START.isoformat(), uses=100)
        self.store.add_task(self.task.canonical, self.task.name, START.isoformat(), "running")
        self.start()

    def start(self) -> TaskRunner:
        """Begin anew, as after a crash: nothing but the database is left."""
        self.runner = TaskRunner(self.store, self.task.canonical, SERVER_KEY, self.now, noise=self.noise)
        return self.runner

    def now(self) -> str:
        return (START + timedelta(seconds=1)).isoformat()

    def give(self, device: int, *, lie: bool = False, seq: int = 1, noise: Any = None) -> Any:
        """The check-in of a device, without noise where none is named; a liar turns its classes' order round."""
        key = Key.from_secret(bytes([device + 1]) * 32)
        self.store.enrol(bytes(32), key.public, self.now(), [self.task.hash])
        batch = samples(30, device)
        batch = Samples(batch.x, (2 - batch.y).astype(np.int32)) if lie else batch
        offered = self.runner.fold.message
        turn = check_in(find(self.task), self.task, batch, offered, noise=noise or Silence(), me=key.id)
        envelope = Envelope(self.task.hash, key.id, frozenset((SERVER,)), seq, turn.message.kind, encode(turn.message))
        (answer,) = self.runner.accept([open_signed(sign(envelope, Statement(("pure 1",), seq, ("pure 1",)), key))])
        return answer

    def round(self, number: int, lies: tuple[int, ...] = ()) -> None:
        for device in range(4):
            self.give(device, lie=device in lies, seq=number + 1)

    def attach(self, epsilon: str | None = "0.5", budget: str | None = "10", rows: int = 12) -> None:
        own = samples(rows, 99)
        paid = [None if each is None else Fraction(each) for each in (epsilon, budget)]
        keep_rows(
            self.store, self.task, OwnRows(own.x, own.y.astype(np.float32), own.x), Terms("own.csv", *paid), self.now()
        )

    @property
    def spent(self) -> Fraction:
        return validations(self.store)[self.task.hash].spent

    @property
    def released(self) -> list[dict[str, list[int]]]:
        """What the server's door let out, by entry of the journal."""
        entries = [open_signed(signed).envelope for _, signed in self.store.tail(self.task.hash)]
        found = [read_own(CLOSED, each.body) for each in entries if each.kind == CLOSED]
        return [{name: each.tolist() for name, each in (own.released or {}).items()} for own in found]

    def replayed(self, path: Path) -> bytes:
        with path.open("wb") as file:
            write_transcript(self.store, self.task.hash, file)
        return replay(path).body


@pytest.fixture
def store(tmp_path: Path):
    with Store(tmp_path / "server.sqlite") as opened:
        yield opened


def test_the_server_draws_once_charges_each_row_and_a_replay_draws_nothing(store: Store, tmp_path: Path):
    server = Server(store, make(), noise=SystemSource())
    server.attach()
    server.round(0, lies=(1,))
    assert server.runner.closing.failure is None
    ((chosen),) = [each["chosen"] for each in server.released]
    assert len(set(chosen)) == 2
    assert set(chosen) <= {0, 1, 2, 3}
    offered = server.runner.offer.body
    assert (server.runner.offer.version, server.spent) == (1, Fraction(1, 2))
    for _ in range(3):
        assert server.start().offer.body == offered
    assert server.spent == Fraction(1, 2)
    detach(store, server.task.hash)
    assert server.replayed(tmp_path / "told") == offered  # without the rows
    assert [each["chosen"] for each in server.released] == [chosen]


def test_without_noise_the_uploads_that_do_best_are_taken(store: Store):
    server = Server(store, make())
    server.attach()
    server.round(0, lies=(0, 2))
    assert server.released == [{"chosen": [1, 3]}]
    weights = server.runner.fold.weights
    assert (find(server.task).predict(server.task, weights, samples(30, 7).x) == samples(30, 7).y).all()
    server.round(1, lies=(1, 3))
    assert server.released[1] == {"chosen": [0, 2]}
    assert server.spent == 1


def test_public_rows_pay_nothing_and_their_scores_are_in_the_journal(store: Store, tmp_path: Path):
    server = Server(store, make(BEST), noise=SystemSource())
    server.attach(None, None)
    server.round(0, lies=(0, 2))
    assert server.runner.closing.failure is None
    scores = np.array(server.released[0]["scores"]) / 2**24
    assert scores.tolist() == [0.333, 1.0, 0.333, 1.0] or np.allclose(scores, [4 / 12, 1, 4 / 12, 1])
    assert server.spent == 0
    detach(store, server.task.hash)
    assert server.replayed(tmp_path / "told") == server.runner.offer.body


def test_scores_of_public_rows_are_for_the_operator_and_those_of_private_rows_for_nobody(store: Store):
    server = Server(store, make(BEST))
    server.attach(None, None)
    server.round(0, lies=(0, 2))
    for _ in range(2):
        now = server.runner.closing.now()
        assert now is not None
        assert now.scored is not None
        np.testing.assert_allclose(now.scored.scores, [4 / 12, 4 / 12, 1, 1], atol=1e-6)
        assert now.scored.text() == (
            "Round 0, rated on public rows: 0.333 to 1.000, half of them above 0.667. 2 of 4 uploads were left out, "
            "for others did better."
        )
        assert now.plain().keys() == {"number", "uploads", "size", "minimum", "opened_at", "closes_at"}, "anyone's"
        server.start()


def test_what_private_rows_come_to_is_shown_to_nobody(store: Store):
    server = Server(store, make())
    server.attach()
    server.round(0, lies=(0, 2))
    now = server.runner.closing.now()
    assert now is not None
    assert now.scored is None


@pytest.mark.parametrize("before", [True, False], ids=["before its entry is durable", "after it"])
def test_a_server_that_is_killed_between_scoring_and_publishing_publishes_one_choice(
    store: Store, monkeypatch: pytest.MonkeyPatch, before: bool
):
    """What was not durable was seen by nobody: it is drawn once more. What was durable is what is published."""
    server = Server(store, make(), noise=SystemSource())
    server.attach()
    for device in range(3):
        server.give(device)

    def die(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        if before:
            patched.setattr(server.runner, "append_own", die)
        else:
            patched.setattr(server.runner.fold, "take_closed", die)
        with pytest.raises(KeyboardInterrupt):
            server.give(3)
    journalled = server.released
    assert len(journalled) == (not before)
    server.start()
    if server.runner.closing.is_due():
        server.runner.closing.ring()
    assert (server.runner.offer.version, server.spent, len(server.released)) == (1, Fraction(1, 2), 1)
    assert journalled in ([], server.released)


def test_the_uploads_that_a_group_has_are_in_the_journal_and_a_replay_needs_no_rows(store: Store, tmp_path: Path):
    server = Server(store, settled(parse(TEXT.replace("keep = 2, ", "").format(
        combine='rule = "grouping"', labels=CLASSES, rows=12))))  # fmt: skip
    server.attach(None, None)
    for device in range(4):
        server.give(device, noise=SystemSource())
    assert server.runner.closing.failure is None
    assert server.released == [{"taken": [2**24] * 4}]
    offered = server.runner.offer.body
    assert server.runner.offer.version == 1
    detach(store, server.task.hash)
    assert server.start().offer.body == offered
    assert server.replayed(tmp_path / "told") == offered


UPDATES = """
name = "probe"
features = {{ dimension = 3, norm = {{ kind = "l2", bound = 1.0 }} }}
labels = {{ classes = ["a", "b", "c"] }}
model = {{ kind = "softmax" }}
stop = {{ steps = 9 }}
[protocol]
batch = 30
combine = {{ uploads = 4, rows = 12, rule = "fltrust" }}
{settings}
[privacy]
mechanism = "discrete-gaussian"
epsilon = {{ {row} = 4.0 }}
delta = 1e-6
budget = {{ epsilon = 4.0, samples = 300 }}
"""


@pytest.mark.parametrize(
    ("settings", "row"),
    [('kind = "sgd"\nstep = { c = 1.0 }', "gradient"), ('kind = "local_updates"\nrate = { c = 1.0 }', "update")],
)
def test_uploads_that_go_against_public_rows_are_left_out_and_a_replay_needs_no_rows(
    store: Store, tmp_path: Path, settings: str, row: str
):
    server = Server(store, settled(parse(UPDATES.format(settings=settings, row=row))))
    server.attach(None, None)
    server.round(0, lies=(1, 2))
    assert server.runner.closing.failure is None
    (released,) = server.released
    assert released.keys() == {"scores", "length"}
    cosines = np.array(released["scores"]) / 2**24
    assert (cosines[[0, 3]] > 0.9).all()
    assert (cosines[[1, 2]] < 0.5).all()
    now = server.runner.closing.now()
    assert now is not None
    assert now.scored is not None
    assert now.scored.text().startswith("Round 0, cosines with an update made of public rows: ")
    (sifted,) = sift_rounds(server.runner)
    assert sifted.left_out == 4 - now.scored.taken == int((cosines <= 0).sum())
    assert "go against an update" in WHY["fltrust"]
    weights, offered = server.runner.fold.weights, server.runner.offer.body
    assert (find(server.task).predict(server.task, weights, samples(30, 7).x) == samples(30, 7).y).all()
    detach(store, server.task.hash)
    assert server.start().offer.body == offered
    assert server.replayed(tmp_path / "told") == offered


def test_private_rows_weigh_no_updates(store: Store):
    server = Server(store, settled(parse(UPDATES.format(settings='kind = "sgd"\nstep = { c = 1.0 }', row="gradient"))))
    with pytest.raises(DataError, match="takes them without a charge, so they have to be public: say --public"):
        server.attach("0.5", "10")


def test_the_journal_says_why_an_upload_was_left_out_and_older_entries_are_read(store: Store, tmp_path: Path):
    server = Server(store, settled(parse(TEXT.replace("keep = 2, ", "").format(
        combine='rule = "grouping"', labels=CLASSES, rows=12))))  # fmt: skip
    server.attach(None, None)
    for device in range(4):
        server.give(device, noise=Loud() if device == 2 else SystemSource())
    ((taken),) = [each["taken"] for each in server.released]
    assert [each > 0 for each in taken] == [True, True, False, True]
    assert REASONS[-taken[2] // 2**24] in ("size", "labels", "counts", "noise")
    (only,) = sift_rounds(server.runner)
    assert only.left_out == 1
    assert only.reasons == ((BECAUSE[REASONS[-taken[2] // 2**24]], 1),)
    assert server.replayed(tmp_path / "told") == server.runner.offer.body
    assert _counted(np.array([1, 0, 1, 0])) == ()  # 0 of a server that wrote no reasons
    assert _counted(np.array([1, -5, -5, -6])) == ((BECAUSE["noise"], 2), (BECAUSE["copy"], 1))
    assert BECAUSE.keys() == set(REASONS[1:])


def test_an_operator_is_told_what_public_rows_lack(store: Store):
    server = Server(store, settled(parse(TEXT.replace("keep = 2, ", "").format(
        combine='rule = "grouping"', labels=CLASSES, rows=12))))  # fmt: skip
    with pytest.raises(DataError, match=r"^1 row of class 'a': task 'probe' groups uploads by public rows, and needs "
                                        r"at least 2 of each class\. Name more rows"):  # fmt: skip
        server.attach(None, None, rows=3)
    server.round(0)
    assert "this task has none. Attach them" in (server.runner.closing.failure or "")
    assert server.runner.offer.version == 0
    server.attach(None, None)
    server.runner.closing.renew(0)
    server.runner.closing.ring()
    assert server.runner.closing.failure is None
    assert server.runner.offer.version == 1


class Loud(SystemSource):
    """Noise that no honest device has: of one sign, and large."""

    def skellam(self, variance: Fraction, like: Any) -> Any:
        return super().skellam(variance, like) + round(6 * float(variance) ** 0.5)


@pytest.mark.parametrize("loud", [(), (3,), (0, 1, 2, 3)])
def test_an_operator_sees_whom_grouping_left_out(store: Store, loud: tuple[int, ...]):
    server = Server(store, settled(parse(TEXT.replace("keep = 2, ", "").format(
        combine='rule = "grouping"', labels=CLASSES, rows=12))))  # fmt: skip
    server.attach(None, None)
    for device in range(4):
        server.give(device, noise=Loud() if device in loud else SystemSource())
    (sifted,) = sift_rounds(server.runner)
    assert (sifted.uploads, sifted.left_out, sifted.scores) == (4, len(loud), ())
    assert set(sifted.outside) == {Key.from_secret(bytes([device + 1]) * 32).id for device in loud}
    assert "group" in WHY["grouping"]


def test_where_the_budget_is_spent_the_round_waits_and_nothing_is_drawn(store: Store):
    server = Server(store, make())
    server.attach(budget="0.5")
    server.round(0)
    server.round(1)
    assert (server.runner.offer.version, server.spent, len(server.released)) == (1, Fraction(1, 2), 1)
    assert "another ε = 0.5 is above their budget. Nothing was drawn" in (server.runner.closing.failure or "")


@pytest.mark.parametrize(
    ("combine", "terms", "rows", "says"),
    [
        (BEST, ("0.5", "10"), 12, "takes them without a charge, so they have to be public: say --public"),
        (DRAWN, (None, None), 12, "charges what it takes of them: say --epsilon and --budget"),
        (DRAWN, ("0.1", "0.4"), 12, "A budget of 0.4: a round of task 'probe' takes ε = 0.5 of it"),
        (DRAWN, ("0.5", "10"), 13, "13 rows: task 'probe' combines its rounds with at most 12 rows"),
    ],
    ids=["private rows of a rule without a price", "public rows of one with a price", "budget", "too many"],
)
def test_rows_that_the_rule_cannot_use_are_refused(
    store: Store, combine: str, terms: tuple[str | None, str | None], rows: int, says: str
):
    server = Server(store, make(combine))
    with pytest.raises(DataError, match=says):
        server.attach(*terms, rows=rows)
    server.round(0)
    assert "this task has none. Attach them with `crowdml task validate" in (server.runner.closing.failure or "")
    assert server.runner.offer.version == 0
    server.attach(*((None, None) if combine == BEST else ("0.5", "10")))
    server.runner.closing.renew(0)
    server.runner.closing.ring()
    assert server.runner.offer.version == 1  # the round was kept


def test_uploads_that_are_not_finite_numbers_of_a_model_are_rated_worst(store: Store):
    """Numbers: what a model says that overflows is rated as low as can be, and its upload is left out."""
    server = Server(store, make(BEST, NUMBERS))
    own = samples(12, 99)
    terms = Terms("own.csv", None, None)
    keep_rows(store, server.task, OwnRows(own.x, np.full(12, 0.5, np.float32), own.x), terms, server.now())
    server.round(0)
    assert all(-(2**24) <= each <= 2**24 for each in server.released[0]["scores"])


@pytest.mark.parametrize(
    ("combine", "says"),
    [
        ('rule = "exponential"', "protocol.combine.epsilon is missing: exponential has to know what a row"),
        ('rule = "top", epsilon = 1.0', "protocol.combine.epsilon = 1: a setting of 'exponential' alone"),
        ('rule = "top", f = 1', "protocol.combine.f = 1: top rates single uploads as they are"),
        ('rule = "top", before = "bucketing"', "protocol.combine.before = 'bucketing': top rates"),
        ('rule = "top", minimum = 1, seconds = 60', "protocol.combine.keep = 2: a round may close with 1 uploads"),
        ('rule = "median"', "protocol.combine.keep = 2: a setting of 'multi-krum' or 'top' or 'exponential' alone"),
    ],
)
def test_settings_that_a_rule_cannot_have_are_named(combine: str, says: str):
    with pytest.raises(TaskError, match=says):
        make(combine)


def test_task_check_says_what_rows_pay_and_what_no_score_can_do():
    told = " ".join(remarks_on(make()))
    assert "A row of the server's pays ε = 0.5 a round, and R rounds cost it R times as much." in told
    assert "No sample of a device pays for that. The noise is about 1.41 times that of the mean of 4 uploads" in told
    assert "`crowdml task validate --public`" in " ".join(remarks_on(make(BEST)))
