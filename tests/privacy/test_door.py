"""The door: one way out, by a row of the table, noised once, noted for the ledger."""

from fractions import Fraction

import numpy as np
import pytest
from ledgers import sample_total

from crowdml.errors import LeakError
from crowdml.messages import encode
from crowdml.privacy.door import Door
from crowdml.privacy.grid import Grid
from crowdml.privacy.losses import Pure
from crowdml.privacy.mechanisms import CountLaplace, GridLaplace, SkellamStable, SkellamSum
from crowdml.privacy.noise import Silence
from crowdml.privacy.private import Masked, Private, Release, Rows
from crowdml.privacy.sensitivity import L1, Adjacency, Observer
from crowdml.protocols.sgd import Gradient
from crowdml.storage import Budget, Charge, Ledger

TABLE = {
    "sum": GridLaplace(8, Fraction(1, 2), Grid(Fraction(1, 4)), Rows(2, 6), "a sum"),
    "count": CountLaplace(L1(Fraction(1)), Fraction(1, 10), Rows(0, 2), "a count"),
}


def batch():
    return Private(np.linspace(-1, 1, 18).reshape(6, 3), Rows(0, 6))


def door(noise=None):
    return Door(TABLE, noise or Silence())


def test_what_passes_the_door_is_a_release_and_a_passage():
    here = door()
    head, rest = batch().split(2)
    released = here.release("sum", rest)
    assert isinstance(released, Release)
    assert released.value.dtype == np.int32
    counted = here.release("count", head.map(lambda rows: (rows[:, :1] > -2).astype(np.int32)))
    assert counted.value.tolist() == [2]
    assert [(p.row, p.part, p.mechanism) for p in here.passages] == [
        ("sum", Rows(2, 6), TABLE["sum"]),
        ("count", Rows(0, 2), TABLE["count"]),
    ]


def test_a_row_that_is_not_in_the_table_is_refused():
    with pytest.raises(LeakError, match=r"Nothing may leave as 'mean'.*rows \['count', 'sum'\].*Add a row"):
        door().release("mean", batch())


@pytest.mark.parametrize("raw", [np.ones((4, 3)), 3, [1.0], None, "text"])
def test_a_raw_value_does_not_pass_the_door(raw):
    with pytest.raises(LeakError, match=rf"takes a Private value.*this is a {type(raw).__name__}.*Public field"):
        door().release("sum", raw)


def test_a_release_does_not_pass_the_door_a_second_time():
    here = door()
    released = here.release("sum", batch().split(2)[1])
    with pytest.raises(LeakError, match=r"takes a Private value.*this is a Release"):
        here.release("sum", released)


@pytest.mark.parametrize("part", [Rows(0, 6), Rows(1, 6), Rows(2, 7), Rows(0, 2)])
def test_rows_that_the_table_does_not_cover_are_refused(part):
    value = Private(np.ones((part.size, 3)), part)
    with pytest.raises(
        LeakError, match=rf"'sum' covers rows 2 to 5.*priced for.*came from rows {part}.*Split the batch"
    ):
        door().release("sum", value)


def test_fewer_rows_than_the_table_covers_may_pass_and_are_charged_as_such():
    here = door()
    here.release("sum", batch().split(2)[1].split(1)[1])
    assert here.passages[0].part == Rows(3, 6)


@pytest.mark.parametrize(
    "mixed", [lambda rows: np.concatenate([rows, rows]), lambda rows: rows[:1], lambda rows: rows.sum(0)]
)
def test_a_value_that_has_not_one_row_a_sample_is_refused(mixed):
    here = door()
    with pytest.raises(LeakError, match=r"one row for each of the 4 samples.*bounds each row"):
        here.release("sum", batch().split(2)[1].map(mixed))
    assert not here.passages


def test_a_refused_value_leaves_no_passage_and_draws_no_noise():
    class Loud:
        def __getattr__(self, name):
            raise AssertionError("noise was drawn")

    here = Door(TABLE, Loud())
    for row, value in (("mean", batch()), ("sum", batch()), ("sum", 3)):
        with pytest.raises(LeakError):
            here.release(row, value)
    assert here.passages == []


def test_a_row_is_let_out_once_a_step_since_it_is_priced_once():
    here = door()
    here.release("sum", batch().split(2)[1])
    with pytest.raises(LeakError, match=r"'sum' was let out already in this step.*priced for one"):
        here.release("sum", batch().split(2)[1])


def test_no_refusal_shows_a_sample():
    secret = Private(np.full((6, 3), 0.123456789), Rows(0, 6))
    for row in ("mean", "sum"):
        with pytest.raises(LeakError) as caught:
            door().release(row, secret)
        assert "0.12345" not in str(caught.value)


# The door and the ledger: a passage becomes a charge when the runner binds its part to serials.

TASK = b"t" * 32
NOON = "2025-01-31T12:00:00+00:00"


def commit(ledger, here, first, budget, seq, body):
    """What a runner does with a step: bind each part to the serials of the batch, charge, then send."""
    charges = [
        Charge(
            TASK, p.row, p.mechanism.loss, p.mechanism.device_loss, p.mechanism.observer, Adjacency.REPLACE_SAMPLE,
            first + p.part.start, first + p.part.stop - 1, NOON,
        )
        for p in here.passages
    ]  # fmt: skip
    ledger.charge(TASK, charges, [budget], outbox={seq: body})


def test_passages_are_charged_to_the_serials_of_their_parts():
    budget = Budget(Fraction(10), 1e-6, 100)
    with Ledger(":memory:") as ledger:
        ledger.take_serials(100)  # samples that other tasks had
        for turn in range(3):
            serials = ledger.take_serials(6)
            here = door()
            head, rest = batch().split(2)
            said = here.release("sum", rest)
            here.release("count", head.map(lambda rows: rows[:, :1]))
            commit(ledger, here, serials.start, budget, turn, encode(Gradient(said, None, None, turn)))
        spans = {(c.mechanism, c.first_sample, c.last_sample) for c in ledger.charges(TASK)}
        assert spans == {
            (row, 100 + 6 * turn + start, 100 + 6 * turn + stop)
            for turn in range(3)
            for row, start, stop in (("count", 0, 1), ("sum", 2, 5))
        }
        assert [sample_total(ledger, 100 + k).pure for k in range(6)] == [Fraction(1, 10)] * 2 + [Fraction(1, 2)] * 4
        assert ledger.samples_given() == 18
        assert ledger.device_total().pure == 3 * (2 * Fraction(1, 10) + 4 * Fraction(1, 2))
        assert {c.observer for c in ledger.charges()} == {Observer.ANYONE}
        assert {type(c.loss) for c in ledger.charges()} == {Pure}
        assert len(ledger.resend(TASK)) == 3


# Under masks

SHARED = {
    **TABLE,
    "share": SkellamSum(8, Fraction(5), 3, Grid(Fraction(1, 4)), Rows(0, 6), 3, "a sum over a cohort"),
    "vector": SkellamStable(
        Fraction(1), Fraction(2), 100, Fraction(5), 3, Grid(Fraction(1, 4)), Rows(0, 6), 3, "one vector"
    ),
}


def test_what_leaves_under_masks_is_masked_and_noted_as_any_release_is():
    here = Door(SHARED, Silence())
    said = here.masked("share", batch())
    assert type(said) is Masked
    assert not isinstance(said, Release)
    assert said._stamp is here.stamp
    assert [(p.row, p.part) for p in here.passages] == [("share", Rows(0, 6))]


def test_a_share_of_noise_is_no_release():
    here = Door(SHARED, Silence())
    with pytest.raises(LeakError, match=r"'share' has only this device's share of the noise.*`ctx.masked"):
        here.release("share", batch())
    assert here.passages == []


def test_what_has_all_its_noise_does_not_leave_under_masks():
    here = Door(SHARED, Silence())
    with pytest.raises(LeakError, match=r"'sum' is for anyone to see, and has all its noise itself.*`ctx.release"):
        here.masked("sum", batch().split(2)[1])
    assert here.passages == []


def test_the_door_holds_masked_values_to_the_table_too():
    here = Door(SHARED, Silence())
    with pytest.raises(LeakError, match="Nothing may leave as 'mean'"):
        here.masked("mean", batch())
    with pytest.raises(LeakError, match="takes a Private value for 'share'"):
        here.masked("share", np.zeros((6, 3)))
    with pytest.raises(LeakError, match=r"one row for each of the 6 samples.*has 1 rows"):
        here.masked("share", batch().map(lambda rows: rows[:1]))
    here.masked("share", batch())
    with pytest.raises(LeakError, match="'share' was let out already"):
        here.masked("share", batch())


def test_a_vector_of_all_samples_has_one_row():
    here = Door(SHARED, Silence())
    with pytest.raises(LeakError, match="takes one row for all of the 6 samples"):
        here.masked("vector", batch())
    assert type(here.masked("vector", batch().map(lambda rows: rows.mean(0, keepdims=True)))) is Masked
