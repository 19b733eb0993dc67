"""What the ledger promises: two totals, budgets, and charge before send."""

from __future__ import annotations

import re
import sqlite3
import tempfile
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_builders import NOON, OTHER, PLENTY, TASK, TENTH, charge
from ledgers import sample_ceiling, sample_total
from oracles import allows

from crowdml.errors import BudgetExhausted, LedgerError
from crowdml.privacy.losses import ZCDP, Pure, Renyi, Total, Unbounded
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.storage import Allowance, Budget, Charge, Ledger

DELTA = 1e-6
RHO = ZCDP(Fraction(1, 6))
RENYI = Renyi((2, 4, 16), (Fraction(1, 50), Fraction(1, 25), Fraction(1, 5)))


@pytest.fixture
def ledger():
    with Ledger(":memory:") as ledger:
        yield ledger


def check_in(ledger: Ledger, budget: Budget = PLENTY, *, samples: int = 20, loss=TENTH, task: bytes = TASK) -> None:
    span = ledger.take_serials(samples)
    ledger.charge(task, [charge(span[0], span[-1], loss, task=task)], [budget], outbox={ledger.next_seq(task): b"x"})


def test_a_hundred_fresh_check_ins_leave_the_dearest_sample_raise_the_device_and_stop_at_the_sample_cap(ledger):
    budget = Budget(Fraction(1, 10), DELTA, samples=2000)
    check_in(ledger, budget)
    _, dearest = ledger.dearest_sample(DELTA)
    device = [ledger.device_total().epsilon(DELTA)]
    for _ in range(99):
        check_in(ledger, budget)
        device.append(ledger.device_total().epsilon(DELTA))
        assert ledger.dearest_sample(DELTA)[1] == dearest == Total.of([TENTH])
    assert all(low < high for low, high in pairwise(device))
    assert ledger.samples_given() == 2000
    assert ledger.device_total().pure == 200  # 100 check-ins x 20 samples x 1/10
    with pytest.raises(BudgetExhausted, match=r"gives 20 new samples, and 0 of 2000 are left"):
        check_in(ledger, budget)
    assert len(ledger.charges()) == len(ledger.resend()) == 100


def test_five_uses_of_one_span_cost_five_and_the_sixth_is_refused_at_a_budget_of_five(ledger):
    ledger.take_serials(20)
    for use in range(1, 6):
        ledger.charge(TASK, [charge(0, 19)], [Budget(Fraction(1, 2), DELTA, 20)])
        assert sample_total(ledger, 7).pure == Fraction(use, 10)
    with pytest.raises(BudgetExhausted):
        ledger.charge(TASK, [charge(0, 19)], [Budget(Fraction(1, 2), DELTA, 20)])
    assert sample_total(ledger, 7).pure == Fraction(1, 2)
    assert ledger.samples_given() == 20


def test_five_zcdp_uses_of_one_span_cost_five_rho_and_no_more_than_the_filter_allows(ledger):
    ledger.take_serials(1)
    rho = Fraction(3, 1000)
    budget = Budget(Fraction(1), DELTA, 1)
    uses = 0
    while allows(Total.of([ZCDP(uses * rho)]), ZCDP(rho), 1, DELTA):
        ledger.charge(TASK, [charge(0, 0, ZCDP(rho))], [budget])
        uses += 1
    assert uses >= 5
    assert sample_total(ledger, 0) == Total(zcdp=uses * rho)
    with pytest.raises(BudgetExhausted):
        ledger.charge(TASK, [charge(0, 0, ZCDP(rho))], [budget])


def test_parts_of_one_check_in_cost_each_sample_only_what_used_it(ledger):
    ledger.take_serials(10)
    step = [charge(2, 9, ZCDP(Fraction(1, 8))), charge(0, 1, TENTH, row="errors"), charge(2, 9, TENTH, row="labels")]
    assert ledger.after(step, 10) == (
        Total.of([ZCDP(Fraction(8)), Pure(Fraction(2, 10)), Pure(Fraction(8, 10))]),
        10,
        Total.of([ZCDP(Fraction(1, 8)), TENTH]),
    )
    ledger.charge(TASK, step, [PLENTY])
    assert sample_total(ledger, 0) == Total.of([TENTH])
    assert sample_total(ledger, 9) == Total.of([ZCDP(Fraction(1, 8)), TENTH])
    assert ledger.dearest_sample(DELTA) == (2, Total.of([ZCDP(Fraction(1, 8)), TENTH]))
    assert ledger.after(step, 10).samples == 10
    assert [charge.mechanism for charge in ledger.charges()] == ["labels", "errors", "gradient"]


def test_a_task_and_its_owner_each_have_a_budget_and_the_first_stops_it(ledger):
    owner = Budget(Fraction(3, 10), DELTA, 100)
    tasks = {task: Budget(Fraction(2, 10), DELTA, 100, task=task) for task in (TASK, OTHER)}
    ledger.take_serials(10)
    for _ in range(2):
        ledger.charge(TASK, [charge(0, 9)], [owner, tasks[TASK]])
    with pytest.raises(BudgetExhausted, match="of what the task itself may take"):
        ledger.charge(TASK, [charge(0, 9)], [owner, tasks[TASK]])
    ledger.charge(OTHER, [charge(0, 9, task=OTHER)], [owner, tasks[OTHER]])
    with pytest.raises(BudgetExhausted, match="of your budget for all tasks"):
        ledger.charge(OTHER, [charge(0, 9, task=OTHER)], [owner, tasks[OTHER]])
    assert ledger.allowance(owner) == Allowance(0.0, 90, None)
    assert ledger.allowance(tasks[OTHER]) == Allowance(0.1, 90, None)


def test_an_owner_may_also_cap_the_device(ledger):
    budget = Budget(Fraction(1), DELTA, 1000, device_epsilon=Fraction(5))
    check_in(ledger, budget)
    check_in(ledger, budget)
    assert ledger.allowance(budget) == Allowance(0.9, 960, 1.0)
    with pytest.raises(BudgetExhausted) as refusal:
        check_in(ledger, budget)
    assert "costs the device ε=2, and ε=1 of 5 is left" in str(refusal.value)
    assert ledger.device_total().pure == 4


def test_a_plan_that_fits_its_budget_is_allowed_to_its_end(ledger):
    step = [ZCDP(Fraction(1, 41)), Pure(Fraction(1, 20)), Pure(Fraction(1, 20))]
    plan = Total.of(step)
    budget = Budget(plan.epsilon(DELTA), DELTA, 20, task=TASK, plan=plan)
    ledger.take_serials(20)
    ledger.charge(TASK, [charge(0, 19, loss) for loss in step], [budget])
    with pytest.raises(BudgetExhausted):
        ledger.charge(TASK, [charge(0, 19, Pure(Fraction(1, 1000)))], [budget])


def test_a_refusal_says_the_cost_what_is_left_and_what_to_do_and_writes_nothing(ledger):
    budget = Budget(Fraction(1, 4), DELTA, 20)
    ledger.take_serials(20)
    ledger.charge(TASK, [charge(0, 19)], [budget], outbox={0: b"first"}, state=b"one")
    with pytest.raises(BudgetExhausted) as refusal:
        ledger.charge(TASK, [charge(5, 5, Pure(Fraction(1, 3)))], [budget], outbox={1: b"second"}, state=b"two")
    assert str(refusal.value) == (
        "This check-in costs sample 5 ε=0.3334, and ε=0.15 of 0.25 is left of your budget for all "
        "tasks. Nothing was sent. Raise it with `crowdml budget set`, or leave the task."
    )
    assert len(ledger.charges()) == 1
    assert [message.body for message in ledger.resend()] == [b"first"]
    assert ledger.state(TASK) == b"one"


@pytest.mark.parametrize("rho", [Fraction(1, 40), Fraction(1, 7), Fraction(2)])
def test_the_cost_in_a_refusal_always_exceeds_what_it_says_is_left(ledger, rho):
    ledger.take_serials(3)
    budget = Budget(Fraction(2), DELTA, 3)
    with pytest.raises(BudgetExhausted) as refusal:  # noqa: PT012  any of them may be the one
        for _ in range(1000):
            ledger.charge(TASK, [charge(0, 2, ZCDP(rho))], [budget])
    cost, left = re.findall(r"ε=([0-9.]+)", str(refusal.value))
    assert Fraction(cost) > Fraction(left)


def test_what_has_no_guarantee_is_refused_by_every_budget(ledger):
    ledger.take_serials(1)
    with pytest.raises(BudgetExhausted, match="costs sample 0 ε=infinity"):
        ledger.charge(TASK, [charge(0, 0, Unbounded())], [PLENTY])


def test_without_a_budget_nothing_is_allowed(ledger):
    ledger.take_serials(1)
    for budgets in ([], [Budget(Fraction(1), DELTA, 1, task=OTHER)]):
        with pytest.raises(BudgetExhausted, match="No budget was given"):
            ledger.charge(TASK, [charge(0, 0)], budgets)
    assert ledger.charges() == ()


def test_check_refuses_as_charge_does_and_writes_nothing(ledger):
    ledger.take_serials(20)
    ledger.check(TASK, [charge(0, 19)], [PLENTY])
    assert ledger.charges() == ()
    with pytest.raises(BudgetExhausted):
        ledger.check(TASK, [charge(0, 19)], [Budget(Fraction(1, 11), DELTA, 20)])


def test_two_charges_of_one_step_are_checked_together(ledger):
    ledger.take_serials(2)
    with pytest.raises(BudgetExhausted):
        ledger.charge(TASK, [charge(0, 1), charge(0, 1, row="labels")], [Budget(Fraction(1, 10), DELTA, 2)])
    assert ledger.charges() == ()


def test_resending_the_same_bytes_is_free_and_drawing_again_is_a_second_charge(ledger):
    ledger.take_serials(20)
    ledger.charge(TASK, [charge(0, 19)], [PLENTY], outbox={0: b"noisy gradient"})
    once = sample_total(ledger, 0)
    for _ in range(10):
        assert [(message.seq, message.body) for message in ledger.resend(TASK)] == [(0, b"noisy gradient")]
    assert sample_total(ledger, 0) == once
    with pytest.raises(LedgerError, match="message 0 was written before"):
        ledger.charge(TASK, [charge(0, 19)], [PLENTY], outbox={0: b"drawn again"})
    assert sample_total(ledger, 0) == once
    ledger.charge(TASK, [charge(0, 19)], [PLENTY], outbox={ledger.next_seq(TASK): b"drawn again"})
    assert sample_total(ledger, 0) == once.scaled(2)


def test_an_acknowledged_message_is_forgotten_and_its_number_is_not(ledger):
    ledger.charge(TASK, [], [], outbox={0: b"a", 1: b"b"}, state=b"s")
    ledger.charge(OTHER, [], [], outbox={0: b"c"})
    ledger.acknowledge(TASK, 0)
    ledger.acknowledge(TASK, 0)
    assert [(message.task, message.seq, message.body) for message in ledger.resend()] == [
        (TASK, 1, b"b"),
        (OTHER, 0, b"c"),
    ]
    assert ledger.next_seq(TASK) == 2
    with pytest.raises(LedgerError, match="never written here"):
        ledger.acknowledge(TASK, 7)
    with pytest.raises(LedgerError, match="message 0 was written before"):
        ledger.charge(TASK, [], [], outbox={0: b"a"})


def test_serials_are_per_device_and_never_handed_out_twice(tmp_path):
    taken: list[int] = []
    for n in (3, 0, 5):
        with Ledger(tmp_path / "ledger.db") as ledger:
            assert ledger.next_serial() == len(taken)
            taken += ledger.take_serials(n)
    assert taken == list(range(8))


def test_two_open_ledgers_of_one_file_see_each_others_charges(tmp_path):
    budget = Budget(Fraction(1, 10), DELTA, 20)
    with Ledger(tmp_path / "ledger.db") as one, Ledger(tmp_path / "ledger.db") as other:
        assert (one.samples_given(), other.samples_given()) == (0, 0)
        check_in(one, budget)
        assert other.samples_given() == 20
        assert other.dearest_sample(DELTA) == (0, Total.of([TENTH]))
        with pytest.raises(BudgetExhausted):
            check_in(other, budget)
        with pytest.raises(BudgetExhausted):
            other.charge(TASK, [charge(0, 19)], [budget])


def test_a_charge_of_serials_that_were_never_handed_out_is_refused(ledger):
    ledger.take_serials(5)
    with pytest.raises(LedgerError, match="covers serial 5, and 5 is the next to be handed out"):
        ledger.charge(TASK, [charge(0, 5)], [PLENTY])


def test_a_charge_of_another_task_is_refused(ledger):
    ledger.take_serials(5)
    with pytest.raises(LedgerError, match="Write each task's step by itself"):
        ledger.charge(TASK, [charge(0, 4, task=OTHER)], [PLENTY])


def test_a_charge_comes_back_as_it_was_written(ledger):
    ledger.take_serials(100)
    written = [
        Charge(TASK, "a", TENTH, Pure(Fraction(1)), Observer.ANYONE, Adjacency.REPLACE_SAMPLE, 0, 9, NOON),
        Charge(
            TASK, "b", RHO, ZCDP(Fraction(3)), Observer.AGGREGATE, Adjacency.REPLACE_SAMPLE, 3, 3, NOON,
            alone=ZCDP(Fraction(2)), device_alone=ZCDP(Fraction(30)),
        ),
        Charge(OTHER, "c", RENYI, RENYI, Observer.DEVICES, Adjacency.REPLACE_DEVICE, 0, 99, "2025-01-31T12:00:00Z"),
    ]  # fmt: skip
    for each in written:
        ledger.charge(each.task, [each], [PLENTY])
    assert list(ledger.charges()) == written[::-1]
    assert list(ledger.charges(OTHER)) == written[2:]
    rows = ledger._connection.execute("select unit, adjacency, observer, scope from charge order by id").fetchall()
    assert rows == [
        ("sample", "replace-sample", "anyone", "release"),
        ("sample", "replace-sample", "aggregate", "release"),
        ("device", "replace-device", "devices", "release"),
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "update charge set loss = 'pure 0'",
        "delete from charge",
        "insert or replace into charge select * from charge",
        "update serial set next = 0",
        "delete from serial",
        "insert or replace into serial values (0, 0)",
        "delete from outbox",
        "update outbox set body = x'00'",
        "insert or replace into outbox values (0, (select hash from task), 0, x'00', 0, null, null, null)",
        "update task set hash = zeroblob(32)",
        "delete from task",
        "delete from migration",
        "update migration set number = 9",
    ],
)
def test_what_was_written_is_never_edited_deleted_or_replaced(ledger, statement):
    check_in(ledger)
    with pytest.raises(sqlite3.IntegrityError):
        ledger._connection.execute(statement)
    assert ledger.charges() == (charge(0, 19),)


LOSSES = st.sampled_from(
    [TENTH, Pure(Fraction(1, 3)), ZCDP(Fraction(1, 20)), RHO, RENYI, Renyi((3, 16), (Fraction(1, 9), Fraction(1, 3)))]
)
SPANS = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair)))
STEPS = st.lists(
    st.tuples(
        st.sampled_from([TASK, OTHER]),
        st.lists(st.tuples(SPANS, LOSSES), min_size=1, max_size=3),
        st.sampled_from([True, False, False]),
    ),
    max_size=12,
)


@settings(max_examples=25, deadline=None)
@given(STEPS)
def test_totals_over_overlapping_and_disjoint_spans_tasks_and_restarts_are_those_of_each_serial_by_itself(steps):
    owner = Budget(Fraction(3), DELTA, 35, device_epsilon=Fraction(40))
    limits = {task: Budget(Fraction(2), DELTA, 25, task=task) for task in (TASK, OTHER)}
    paid = {scope: {serial: [] for serial in range(41)} for scope in (None, TASK, OTHER)}
    device = {scope: Total() for scope in paid}

    def oracle_allows(scope, budget, charges):
        after = {serial: [*paid[scope][serial]] for serial in range(41)}
        for each in charges:
            for serial in range(each.first_sample, each.last_sample + 1):
                after[serial].append(each.loss)
        cost = Total.of(each.device_loss for each in charges)
        return (
            sum(map(bool, after.values())) <= budget.samples
            and all(
                budget.sample_filter.allows(Total(), Total.of(losses))
                for serial, losses in after.items()
                if losses != paid[scope][serial]
            )
            and (budget.device_filter is None or budget.device_filter.allows(device[scope], cost))
        )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.db"
        ledger = Ledger(path)
        ledger.take_serials(41)
        for task, parts, restart in steps:
            charges = [charge(*span, loss, task=task, device=loss) for span, loss in parts]
            expected = oracle_allows(None, owner, charges) and oracle_allows(task, limits[task], charges)
            try:
                ledger.charge(task, charges, [owner, limits[task]])
                allowed = True
            except BudgetExhausted:
                allowed = False
            assert allowed == expected
            if allowed:
                for scope in (None, task):
                    device[scope] += Total.of(each.device_loss for each in charges)
                    for each in charges:
                        for serial in range(each.first_sample, each.last_sample + 1):
                            paid[scope][serial].append(each.loss)
            if restart:
                ledger.close()
                ledger = Ledger(path, must_exist=True)
            totals = {serial: Total.of(losses) for serial, losses in paid[None].items()}
            top = ledger.dearest_sample(DELTA)
            greatest = max(total.epsilon(DELTA) for total in set(totals.values()))
            assert (0.0 if top is None else top[1].epsilon(DELTA)) == greatest
            assert top is None or totals[top[0]] == top[1]
            assert ledger.device_total() == device[None]
            assert ledger.samples_given() == sum(map(bool, paid[None].values()))
        assert {serial: sample_total(ledger, serial) for serial in range(41)} == {
            serial: Total.of(losses) for serial, losses in paid[None].items()
        }
        for budget in (owner, *limits.values()):
            assert ledger.allowance(budget).samples == budget.samples - sum(map(bool, paid[budget.task].values()))
        ledger.close()


@pytest.mark.slow
def test_a_check_in_stays_cheap_after_a_hundred_thousand_charges(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.take_serials(1_000_000)
        fresh = [charge(first, first + 19) for first in range(0, 1_000_000, 20)]
        ledger.charge(TASK, fresh, [PLENTY])
        ledger.charge(TASK, fresh, [PLENTY])
        assert ledger.dearest_sample(DELTA)[1].pure == Fraction(2, 10)
        thousands: list[None] = []  # of SQLite's steps: one look at all charges takes some hundred of them
        ledger._connection.set_progress_handler(lambda: thousands.append(None), 1000)
        for first in range(1000, 1100):
            ledger.charge(TASK, [charge(first, first + 30)], [PLENTY])
            assert ledger.dearest_sample(DELTA)[1].pure == Fraction(2 + min(first - 999, 31), 10)
        assert 0 < len(thousands) < 3000
        assert ledger.device_total().pure == 200_000 + 310
        assert ledger.samples_given() == 1_000_000


def test_the_ledgers_of_two_devices_in_one_file_know_nothing_of_each_other(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as one:
        other = one.of(7)
        check_in(one)
        assert other.charges() == ()
        assert (other.next_serial(), other.next_seq(TASK), other.device_total(), other.resend()) == (0, 0, Total(), ())
        check_in(other)
        assert one.samples_given() == other.samples_given()
        assert one.device_total() == other.device_total()
        assert [message.seq for message in one.resend()] == [message.seq for message in other.resend()]
        other.acknowledge(TASK, 0, b"receipt")
        assert (len(one.resend()), other.resend(), other.receipts()) == (1, (), (b"receipt",))
        assert one.receipts() == ()


def test_of_steps_written_together_the_one_that_a_budget_refuses_leaves_the_others_whole(tmp_path):
    none = Budget(Fraction(1), 1e-6, 0)
    with Ledger(tmp_path / "ledger.sqlite") as one:
        other = one.of(1)
        for ledger in (one, other):
            ledger.take_serials(5)
        with one.together():
            one.charge(TASK, [charge(0, 4)], [PLENTY], outbox={0: b"kept"})
            with pytest.raises(BudgetExhausted):
                other.charge(TASK, [charge(0, 4)], [none], outbox={0: b"refused"})
        assert (len(one.resend()), len(other.resend())) == (1, 0)
        assert other.device_total() == Total()


def test_what_was_written_together_and_not_committed_is_forgotten_by_every_total(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as one:
        one.take_serials(5)
        with pytest.raises(KeyError), one.together():  # noqa: PT012  the block is what is undone
            one.charge(TASK, [charge(0, 4)], [PLENTY])
            assert one.samples_given() == 5
            raise KeyError
        assert one.samples_given() == 0
        assert one.device_total() == Total()


def test_a_sample_waits_until_a_step_gives_it_and_its_source_is_never_read_twice(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.keep(TASK, [b"a", b"b"], source="file", taken=2) == range(2)
        assert [(sample.serial, sample.body) for sample in ledger.waiting(TASK)] == [(0, b"a"), (1, b"b")]
        ledger.charge(TASK, [charge(0, 0)], [PLENTY], given=[0])
        assert [sample.serial for sample in ledger.waiting(TASK)] == [1]
        assert ledger.sources() == {"file": 2}
        with pytest.raises(LedgerError, match="read twice"):
            ledger.keep(TASK, [b"c"], source="file", taken=1)
        assert ledger.next_serial() == 2
        ledger.discard([1])
        assert ledger.waiting(TASK) == ()


def test_a_message_is_replaced_in_the_transaction_that_writes_its_successor(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.charge(TASK, [], [], outbox={0: b"first"})
        ledger.charge(TASK, [], [], outbox={1: b"again"}, done=[0])
        assert [(message.seq, message.body) for message in ledger.resend()] == [(1, b"again")]


def test_the_ceiling_of_samples_that_paid_differently_is_no_cheaper_than_any_of_them_at_any_delta(ledger):
    """At delta 1e-6 the zCDP sample is the dearer, at 0 the ceiling must not be that of either alone."""
    ledger.take_serials(4)
    renyi = [Renyi((2, 8), (Fraction(1, 10), Fraction(3, 10))), Renyi((4, 16), (Fraction(1, 20), Fraction(1)))]
    paid = [ZCDP(Fraction(1, 10)), Pure(Fraction(2)), *renyi]
    for serial, loss in enumerate(paid):
        ledger.charge(TASK, [charge(serial, serial, loss)], [Budget(Fraction(10**6), DELTA, 4)])
    ceiling = sample_ceiling(ledger)
    for delta in (0.0, 1e-12, DELTA, 1e-2, 0.5):
        assert all(ceiling.epsilon(delta) >= Total.of([loss]).epsilon(delta) for loss in paid)
    assert (ceiling.zcdp, ceiling.pure) == (Fraction(1, 10), 2)
    assert (ceiling.orders, ceiling.values) == ((2, 4, 8), (Fraction(1, 10), Fraction(3, 10), Fraction(1)))


# --- what is remembered ---


def asked(ledger: Ledger) -> tuple[object, ...]:
    """Everything that a ledger remembers."""
    return (
        ledger.next_serial(),
        ledger.next_seq(TASK),
        ledger.device_total(),
        ledger.samples_given(),
        sample_ceiling(ledger),
        (ledger.dearest_sample(1e-6) or (0, None))[1],
        ledger.allowance(PLENTY),
    )


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 6), st.integers(0, 2)), max_size=8))
def test_what_a_ledger_remembers_is_what_it_would_read(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("ledger") / "ledger.sqlite"
    with Ledger(path) as ledger:
        for turn, (back, size, kind) in enumerate(steps):
            first = max(0, ledger.next_serial() - back)
            take = range(ledger.next_serial(), first + size) if first + size > ledger.next_serial() else None
            charges = [charge(first, first + size - 1)] * kind
            ledger.charge(TASK, charges, [PLENTY], outbox={turn: b"body"}, take=take)
            with Ledger(path) as fresh:
                assert asked(ledger) == asked(fresh)


def test_what_another_connection_writes_is_seen_at_once(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as one, Ledger(tmp_path / "ledger.sqlite") as other:
        one.take_serials(5)
        one.charge(TASK, [charge(0, 4)], [PLENTY], outbox={0: b"first"})
        assert asked(other) == asked(one)
        other.take_serials(5)
        other.charge(TASK, [charge(5, 9)], [PLENTY], outbox={1: b"second"})
        assert (one.next_serial(), one.next_seq(TASK), one.samples_given()) == (10, 2, 10)
        with pytest.raises(LedgerError, match="10 is the next"):
            one.charge(TASK, [charge(5, 9)], [PLENTY], take=range(5, 10))


def test_a_step_that_is_refused_is_not_remembered(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.charge(TASK, [charge(0, 4)], [PLENTY], outbox={0: b"first"}, take=range(5))
        before = asked(ledger)
        with pytest.raises(LedgerError, match="written before"):
            ledger.charge(TASK, [charge(5, 9)], [PLENTY], outbox={0: b"other"}, take=range(5, 10), source="s", taken=5)
        assert (asked(ledger), ledger.sources()) == (before, {})


def test_the_step_that_charges_takes_its_serials_and_notes_the_place_in_its_source(tmp_path):
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.charge(TASK, [charge(0, 4)], [PLENTY], take=range(5), source="rows", taken=5)
        ledger.charge(TASK, [charge(5, 9)], [PLENTY], take=range(5, 10), source="rows", taken=10)
        assert (ledger.next_serial(), ledger.sources(), ledger.samples_given()) == (10, {"rows": 10}, 10)
        with pytest.raises(LedgerError, match="next to be handed out"):
            ledger.charge(TASK, [charge(10, 15)], [PLENTY], take=range(10, 15))
        with pytest.raises(LedgerError, match="10 is the next"):
            ledger.charge(TASK, [charge(0, 4)], [PLENTY], take=range(5))
        assert (ledger.next_serial(), ledger.samples_given()) == (10, 10)
