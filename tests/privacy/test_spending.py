"""The algebra of the ledger by itself: charges that cannot be, what they add up to, what a budget refuses."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_builders import NOON, OTHER, PLENTY, TASK, TENTH, charge, masked

from crowdml.errors import BudgetExhausted, GuaranteeError, LedgerError
from crowdml.privacy.budget import Budget
from crowdml.privacy.losses import ZCDP, Pure, Renyi, Total, Unbounded
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.privacy.spending import Charge, History, Listed, Spent, Totals, ceiling
from crowdml.storage import Ledger

DELTA = 1e-6

# --- charges and budgets that cannot be ---


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"task": b"short"}, "names its task by 32 bytes"),
        ({"first_sample": 3, "last_sample": 2}, "no such span"),
        ({"first_sample": -1}, "no such span"),
        ({"charged_at": "2025-01-31T12:00:00"}, "no UTC time"),
        ({"charged_at": "2025-01-31T12:00:00+01:00"}, "no UTC time"),
        ({"charged_at": "yesterday"}, "no UTC time"),
        ({"adjacency": Adjacency.REPLACE_DEVICE}, "names two losses"),
    ],
)
def test_an_impossible_charge_cannot_be_made(change, sentence):
    good = Charge(TASK, "a", TENTH, Pure(Fraction(2)), Observer.ANYONE, Adjacency.REPLACE_SAMPLE, 0, 2, NOON)
    with pytest.raises(LedgerError, match=sentence):
        replace(good, **change)


@pytest.mark.parametrize(
    "wrong", [{"epsilon": -1}, {"epsilon": float("inf")}, {"delta": 1.0}, {"samples": -1}, {"device_epsilon": -2}]
)
def test_an_impossible_budget_cannot_be_made(wrong):
    with pytest.raises(GuaranteeError):
        Budget(**({"epsilon": Fraction(1), "delta": DELTA, "samples": 10} | wrong))


@pytest.mark.parametrize(
    ("one", "device"),
    [
        (TENTH, Pure(Fraction(1, 11))),
        (ZCDP(Fraction(1, 10)), ZCDP(Fraction(1, 11))),
        (Renyi((2, 8), (Fraction(1), Fraction(3))), Renyi((2, 8), (Fraction(1), Fraction(2)))),
        (Unbounded(), TENTH),
    ],
)
def test_a_charge_costs_the_device_no_less_than_one_of_its_samples(one, device):
    with pytest.raises(LedgerError, match="replace this one too"):
        charge(0, 4, one, device=device)


@pytest.mark.parametrize("named", ["alone", "device_alone"])
def test_a_release_that_anyone_may_see_names_no_price_for_collusion(named: str):
    with pytest.raises(LedgerError, match="nobody else stands in for it"):
        replace(charge(0, 0), **{named: TENTH})


def renyi(*pairs: tuple[int, int]) -> Renyi:
    return Renyi(tuple(order for order, _ in pairs), tuple(Fraction(value, 10) for _, value in pairs))


@pytest.mark.parametrize(
    ("whole", "is_taken"),
    [
        (renyi((2, 1), (3, 2), (4, 2)), True),  # one sample pays 0.2 at order 4, and so at most that at order 3
        (renyi((2, 1), (3, 1), (4, 2)), False),
        (renyi((2, 1), (4, 2), (8, 9)), True),  # nothing is known of one sample at order 8
        (renyi((2, 1), (5, 1)), True),
        (renyi((2, 0), (5, 9)), False),
    ],
)
def test_losses_of_other_orders_are_compared_at_the_orders_of_the_device(whole: Renyi, is_taken: bool):
    one = renyi((2, 1), (4, 2))
    if is_taken:
        assert charge(0, 4, one, device=whole).device_loss == whole
    else:
        with pytest.raises(LedgerError):
            charge(0, 4, one, device=whole)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"alone": None}, "does not say what it costs"),
        ({"device_alone": None}, "does not say what it costs"),
        ({"alone": ZCDP(Fraction(1, 1000))}, "which is less"),
        ({"device_alone": ZCDP(Fraction(1, 1000))}, "which is less"),
        ({"alone": ZCDP(Fraction(10**6))}, "replace all samples"),
        ({"observer": Observer.ANYONE}, "Leave it out"),
    ],
)
def test_a_second_number_that_cannot_be_is_refused(change, sentence):
    with pytest.raises(LedgerError, match=sentence):
        replace(masked(0, 9), **change)


# --- what charges add up to ---


def test_a_ceiling_knows_nothing_at_an_order_that_one_of_its_totals_does_not_reach():
    low, high = Total.of([renyi((2, 1))]), Total.of([renyi((2, 3), (4, 5))])
    for totals in ([low, high], [high, low]):
        found = ceiling(totals)
        assert (found.orders, found.values) == ((2,), (Fraction(3, 10),))


def test_a_sample_pays_what_covers_it_and_a_device_pays_all():
    history = History()
    history.add(TASK, [charge(0, 9), charge(5, 9, ZCDP(Fraction(1, 8)))])
    history.add(OTHER, [charge(9, 12, task=OTHER)])
    everything = history.spent()
    assert [everything.sample(serial) for serial in (0, 5, 9, 12, 13)] == [
        Total.of([TENTH]),
        Total.of([TENTH, ZCDP(Fraction(1, 8))]),
        Total.of([TENTH, TENTH, ZCDP(Fraction(1, 8))]),
        Total.of([TENTH]),
        Total(),
    ]
    assert everything.dearest(DELTA) == (9, everything.sample(9))
    assert everything.device == Total.of([Pure(Fraction(1)), Pure(Fraction(4, 10)), ZCDP(Fraction(25, 8))])
    assert (everything.given.size, history.spent(OTHER).given.size) == (13, 4)


def test_a_history_without_charges_has_given_nothing():
    nothing = History().spent()
    assert nothing.after([], 0) == Totals(Total(), 0, Total())
    assert nothing.dearest(DELTA) is None


PARTS = st.tuples(
    st.integers(0, 25), st.integers(0, 12), st.sampled_from([TENTH, ZCDP(Fraction(1, 9)), "masked", "masked"])
)
STEPS = st.lists(
    st.tuples(st.sampled_from([TASK, OTHER]), st.lists(PARTS, min_size=1, max_size=3), st.integers(0, 63)), max_size=8
)


def charges_of(task, parts):
    return [
        masked(first, first + more, task=task) if loss == "masked" else charge(first, first + more, loss, task=task)
        for first, more, loss in parts
    ]


def asked(spent: Spent, which: int) -> list[object]:
    """What a history keeps once it was asked for: some of it, so that each is brought up to date without the others."""
    ways = [
        lambda: spent.device,
        lambda: spent.given.size,
        lambda: list(spent.given),
        lambda: (spent.dearest(DELTA) or (0, None))[1],
        lambda: spent.ceiling,
        lambda: spent.allowance(PLENTY),
    ]
    return [way() for bit, way in enumerate(ways) if which >> bit & 1]


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_what_a_history_has_kept_is_what_another_one_would_read(steps):
    made: list[Charge] = []
    history = History(Listed())
    for task, parts, which in steps:
        charges = charges_of(task, parts)
        samples = len({serial for each in charges for serial in range(each.first_sample, each.last_sample + 1)})
        expected = history.spent().after(charges, samples)
        history.add(task, charges)
        made += charges
        for scope in (None, TASK, OTHER):
            again = History(Listed(made)).spent(scope)
            assert asked(history.spent(scope), which) == asked(again, which)
            for serial in range(38):
                covering = [
                    each for each in made
                    if each.first_sample <= serial <= each.last_sample and scope in (None, each.task)
                ]  # fmt: skip
                assert again.sample(serial) == Total.of(each.loss for each in covering)
                others = Total.of(each.loss if each.alone is None else each.alone for each in covering)
                assert history.spent(scope, alone=True).sample(serial) == others
        everything = History(Listed(made)).spent()
        assert expected[:2] == (everything.device, everything.given.size)
        assert expected.dearest == everything.ceiling


# --- what a budget refuses ---


@settings(max_examples=60, deadline=None)
@given(STEPS)
def test_a_history_in_memory_and_one_on_disk_allow_the_same_steps_and_come_to_the_same_totals(steps):
    budgets = [
        Budget(Fraction(3), DELTA, 30, device_epsilon=Fraction(60)),
        Budget(Fraction(2), DELTA, 20, task=TASK),
        Budget(Fraction(3, 2), DELTA, 25, task=OTHER, device_epsilon=Fraction(40)),
    ]
    history = History()
    with Ledger(":memory:") as ledger:
        ledger.take_serials(40)
        for task, parts, _ in steps:
            charges = charges_of(task, parts)
            refusal = history.refusal(task, charges, budgets)
            if refusal is None:
                ledger.charge(task, charges, budgets)
                history.add(task, charges)
            else:
                with pytest.raises(BudgetExhausted) as caught:
                    ledger.charge(task, charges, budgets)
                words = {"samples": "new samples", "sample": "costs sample", "device": "costs the device"}
                assert words[refusal.cap] in str(caught.value)
            for alone in (False, True):
                here = history.spent(alone=alone)
                assert here.device == ledger.device_total(alone=alone)
                tops = here.dearest(DELTA), ledger.dearest_sample(DELTA, alone=alone)
                found = [0.0 if top is None else top[1].epsilon(DELTA) for top in tops]
                assert found[0] == found[1]  # which of two equals is left open
            assert history.spent().after([], 0) == ledger.after([], 0)
            assert [history.spent(each.task).allowance(each) for each in budgets] == [
                ledger.allowance(each) for each in budgets
            ]


def refused(charges, *budgets, before=(), at=None) -> str | None:
    """The cap that these charges of the task break, after those before."""
    history = History(Listed(before))
    refusal = history.refusal(TASK, charges, budgets, at=at)
    return None if refusal is None else refusal.cap


def test_each_cap_is_met_exactly_and_not_passed():
    for samples, cap in ((10, None), (9, "samples")):
        assert refused([charge(0, 9)], Budget(Fraction(1), DELTA, samples)) == cap
    for epsilon, cap in ((Fraction(2, 10), None), (Fraction(2, 10) - Fraction(1, 10**9), "sample")):
        assert refused([charge(0, 9), charge(5, 5)], Budget(epsilon, DELTA, 10)) == cap
        assert refused([charge(0, 9)], Budget(epsilon, DELTA, 30), before=[charge(9, 20)]) == cap
    for epsilon, cap in ((Fraction(1), None), (Fraction(1) - Fraction(1, 10**9), "device")):
        assert refused([charge(0, 9)], Budget(Fraction(1), DELTA, 10, device_epsilon=epsilon)) == cap


def test_the_first_budget_that_says_no_is_named_and_so_is_its_first_cap():
    owner = Budget(Fraction(1, 20), DELTA, 10, device_epsilon=Fraction(1, 20))
    of_task = Budget(Fraction(1, 20), DELTA, 5, task=TASK)
    history = History()
    found = history.refusal(TASK, [charge(0, 9)], [owner, of_task])
    assert (found.cap, found.budget) == ("sample", owner)
    found = history.refusal(TASK, [charge(0, 9)], [of_task, owner])
    assert (found.cap, found.budget) == ("samples", of_task)


def test_a_budget_of_another_task_says_nothing_and_without_one_nothing_is_allowed():
    none = Budget(Fraction(0), DELTA, 0, task=OTHER)
    assert refused([charge(0, 9)], none) == "budget"
    assert refused([charge(0, 9)]) == "budget"
    assert refused([charge(0, 9)], none, PLENTY) is None


def test_a_step_is_asked_about_where_its_samples_will_lie():
    budget = Budget(Fraction(1, 10), DELTA, 20)
    assert refused([charge(0, 9)], budget, before=[charge(0, 9)]) == "sample"
    assert refused([charge(0, 9)], budget, before=[charge(0, 9)], at=10) is None
    assert refused([charge(0, 9)], budget, before=[charge(0, 9)], at=9) == "sample"
    assert refused([charge(0, 9)], budget, before=[charge(0, 14)], at=15) == "samples"


def test_a_step_of_two_tasks_is_refused():
    with pytest.raises(LedgerError, match="holds a charge of task"):
        refused([charge(0, 9), charge(0, 9, task=OTHER)], PLENTY)
