"""Roles, steps, and what a check-in costs before any runs."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from bench import masked_text, task_text

from crowdml.errors import ProtocolError, TaskError
from crowdml.privacy.grid import COUNTS
from crowdml.privacy.losses import Pure
from crowdml.privacy.mechanisms import CountLaplace, Exposed, GridLaplace
from crowdml.privacy.private import Private, Rows
from crowdml.privacy.sensitivity import L1
from crowdml.protocol import (
    Context,
    Quote,
    Role,
    Sensed,
    Step,
    Woken,
    advance,
    affordable,
    alone,
    check_budget,
    dearest,
    device_alone,
    positions,
    quote,
)
from crowdml.protocols import PROTOCOLS, find, sgd
from crowdml.task import parse


def row(epsilon, start, stop):
    return GridLaplace(8, Fraction(epsilon), COUNTS, Rows(start, stop), "a sum")


def laplace_task(epsilon, budget="", **more):
    text = task_text(norm="l1", mechanism="discrete-laplace", epsilon=epsilon, **more)
    return parse(text + f"\n[privacy.budget]\n{budget}" if budget else text)


def test_a_step_goes_to_the_handler_of_its_event():
    role = Role(start=lambda task, ctx: Step(0), on={Woken: lambda task, state, event, ctx: Step((state, event.tag))})
    assert advance(role, None, 5, Woken("noon"), Context(me="d")).state == (5, "noon")


def test_an_event_that_a_role_does_not_hear_is_a_bug_with_a_name():
    role = Role(start=lambda task, ctx: Step(0), on={Woken: lambda task, state, event, ctx: Step(0)})
    with pytest.raises(ProtocolError, match="Nobody here hears Sensed; this role hears Woken"):
        advance(role, None, 0, Sensed(Private(np.ones((2, 2)), Rows(0, 2))), Context(me="d"))


def test_a_step_without_a_door_lets_nothing_out():
    with pytest.raises(ProtocolError, match="There is no door in this step, so nothing can leave as 'sum'"):
        Context(me="server").release("sum", Private(np.ones((2, 2)), Rows(0, 2)))


# Price


def test_rows_that_cover_the_same_sample_add_and_disjoint_ones_do_not():
    assert dearest(positions({"a": row(1, 0, 4), "b": row(2, 0, 4)}), 1e-6).pure == 3
    assert dearest(positions({"a": row(1, 0, 4), "b": row(2, 4, 8)}), 1e-6).pure == 2
    assert dearest(positions({"a": row(1, 0, 5), "b": row(2, 4, 8)}), 1e-6).pure == 3
    assert dearest(positions({"a": row(1, 0, 8), "b": row(2, 2, 4), "c": row(3, 6, 7)}), 1e-6).pure == 4
    assert dearest(positions({}), 1e-6).pure == 0


def test_the_price_is_that_of_the_dearest_sample_by_hand():
    rng = np.random.default_rng(0)
    for _ in range(50):
        table = {}
        for name in range(4):
            start = int(rng.integers(0, 9))
            table[str(name)] = row(int(rng.integers(1, 9)), start, int(rng.integers(start + 1, 11)))
        by_hand = max(sum(m.epsilon for m in table.values() if m.covers.start <= k < m.covers.stop) for k in range(11))
        assert dearest(positions(table), 1e-6).pure == by_hand


def test_a_quote_has_a_row_for_everything_that_may_leave_and_runs_no_handler():
    task = laplace_task("{ gradient = 1.0, errors = 0.25, labels = 0.5 }")
    silent = dataclasses.replace(sgd.protocol, device=Role(None, {}), server=Role(None, {}))
    quoted = quote(silent, task)
    assert {entry.row: entry.loss for entry in quoted.rows} == {
        "gradient": Pure(Fraction(1)), "errors": Pure(Fraction(1, 4)), "labels": Pure(Fraction(1, 2)),
    }  # fmt: skip
    assert quoted.sample_epsilon() == 1.75
    assert quoted.device_epsilon() == 5 * 1.75
    assert all(entry.mechanism.promise for entry in quoted.rows)


def test_uses_of_a_sample_and_check_ins_of_a_device_add():
    quoted = quote(sgd.protocol, laplace_task("{ gradient = 1.0 }"))
    assert [quoted.sample_epsilon(uses) for uses in (1, 2, 5)] == [1, 2, 5]
    assert [quoted.device_epsilon(times) for times in (1, 2)] == [5, 10]


def test_without_noise_the_price_is_infinite():
    task = parse(task_text(mechanism="none"))
    assert quote(find(task), task).sample_epsilon() == np.inf
    assert quote(find(task), task).device_epsilon() == np.inf
    assert all(isinstance(m, Exposed) for m in sgd.mechanisms(task).values())


# Budgets


def test_a_task_whose_check_in_overspends_its_budget_is_refused():
    with pytest.raises(TaskError, match=r"a sample pays ε = 1 for one check-in, and privacy.budget.epsilon = 0.5 is"):
        find(laplace_task("{ gradient = 1.0 }", "epsilon = 0.5\nsamples = 100"))
    with pytest.raises(TaskError, match=r"a check-in takes 5 samples, and privacy\.budget\.samples = 4"):
        find(laplace_task("{ gradient = 1.0 }", "epsilon = 1.0\nsamples = 4"))


def test_a_budget_affords_check_ins_by_samples_and_uses():
    task = laplace_task("{ gradient = 1.0 }", "epsilon = 3.0\nsamples = 23")
    check_budget(sgd.protocol, task)
    assert affordable(sgd.protocol, task) == 4  # fresh samples: 23 // 5
    assert affordable(sgd.protocol, task, uses=2) == 8
    assert affordable(sgd.protocol, task, uses=9) == 12  # a sample serves three times at most
    assert affordable(sgd.protocol, laplace_task("{ gradient = 1.0 }")) is None


def test_a_protocol_that_nobody_knows_is_refused():
    with pytest.raises(TaskError, match=r"protocol.kind = 'sgdd': choose one of .*sgd"):
        find(parse(task_text().replace('kind = "sgd"', 'kind = "sgdd"')))
    assert set(PROTOCOLS) >= {"sgd"}


def test_every_row_of_the_table_covers_rows_of_the_batch_and_protects_against_anyone():
    for held_out in (0, 2):
        task = laplace_task("{ gradient = 1.0, errors = 0.25, labels = 0.5 }", held_out=held_out)
        for mechanism in find(task).mechanisms(task).values():
            assert mechanism.covers.within(Rows(0, find(task).batch(task)))
        counts = find(task).mechanisms(task)
        assert isinstance(counts["errors"], CountLaplace)
        assert counts["errors"].sensitivity == L1(Fraction(1))
        assert counts["labels"].sensitivity == L1(Fraction(2))


def test_which_sample_is_dearest_depends_on_the_uses_and_on_delta():
    often = parse(
        task_text(mechanism="discrete-gaussian", norm="l2", held_out=2, epsilon="{ gradient = 1.0, errors = 0.95 }")
    )
    assert quote(find(often), often).sample_epsilon() == pytest.approx(1.0)
    assert quote(find(often), often).sample_epsilon(5) == pytest.approx(4.75)  # the held-out samples, not the others
    rare = parse(
        task_text(mechanism="discrete-gaussian", norm="l2", held_out=2, epsilon="{ gradient = 1.0, errors = 0.75 }")
    )
    rare = rare.with_(privacy=dataclasses.replace(rare.privacy, delta=1e-12))
    assert quote(find(rare), rare).sample_epsilon() == pytest.approx(1.0)


def test_a_device_level_unit_is_refused_where_nobody_gives_it():
    task = parse(task_text())
    with pytest.raises(TaskError, match=r'privacy\.unit = "device".*"sample"'):
        find(task.with_(privacy=dataclasses.replace(task.privacy, unit="device")))


# Under masks (review, R11)


def masked_task(budget="", **more):
    text = masked_text(epsilon="{ gradient = 1.0 }", **more)
    return parse(text + f"\n[privacy.budget]\n{budget}" if budget else text)


def test_a_masked_quote_has_both_prices():
    task = masked_task()
    price = quote(find(task), task)
    (gradient,) = price.rows
    assert gradient.alone == alone(gradient.mechanism) == gradient.mechanism.alone
    assert gradient.device_alone == device_alone(gradient.mechanism) == gradient.mechanism.device_alone
    assert price.sample_epsilon() == pytest.approx(1.0, abs=1e-6)
    assert 1 < price.sample_epsilon() * 2 < price.sample_epsilon_alone() < price.device_epsilon_alone()
    assert price.device_epsilon() < price.device_epsilon_alone()


def test_without_masks_collusion_costs_nothing_more():
    task = parse(task_text())
    price = quote(find(task), task)
    assert price.sample_epsilon_alone(3) == price.sample_epsilon(3)
    assert price.device_epsilon_alone(3) == price.device_epsilon(3)
    assert all((row.loss, row.device_loss) == (row.alone, row.device_alone) for row in price.rows)


@pytest.mark.parametrize("build", [masked_task, lambda **more: parse(task_text(epsilon="{ gradient = 1.0 }"))])
def test_all_uses_of_a_sample_together_cost_what_the_task_says(build):
    once = build()
    often = once.with_(privacy=dataclasses.replace(once.privacy, uses=5))
    price = quote(find(often), often)
    assert price.sample_epsilon(5) == pytest.approx(1.0, abs=1e-6)
    assert price.sample_epsilon(5) <= 1.0
    assert price.sample_epsilon(1) < 0.6
    assert check_budget(find(often), often).sample_epsilon(5) == price.sample_epsilon(5)


def test_a_budget_is_held_against_all_uses():
    fits = masked_task("epsilon = 1.0\nsamples = 20")
    fits = fits.with_(privacy=dataclasses.replace(fits.privacy, uses=5))
    assert affordable(find(fits), fits) == 5 * 4
    assert affordable(find(fits), fits, uses=7) == 5 * 4  # the budget pays for five
    assert affordable(find(fits), fits, uses=2) == 2 * 4
    with pytest.raises(TaskError, match=r"for 6 check-ins.*privacy.budget.epsilon = 1"):
        check_budget(find(fits), fits, 6)
    tight = dataclasses.replace(fits.privacy.budget, epsilon=Fraction(1, 2))
    tight = fits.with_(privacy=dataclasses.replace(fits.privacy, budget=tight))
    with pytest.raises(TaskError, match=r"for 5 check-ins.*privacy.budget.epsilon = 0.5"):
        find(tight)


def test_a_hundred_thousand_uses_are_counted_without_pricing_each(monkeypatch):
    task = masked_task("epsilon = 1.0\nsamples = 20")
    task = task.with_(privacy=dataclasses.replace(task.privacy, uses=100_000))
    asked = []
    original = Quote.sample_epsilon
    monkeypatch.setattr(Quote, "sample_epsilon", lambda self, uses=1: asked.append(uses) or original(self, uses))
    protocol = find(task)
    asked.clear()
    assert affordable(protocol, task) == 400_000
    assert len(asked) < 20


def test_the_floor_refuses_a_task_that_leaves_too_little_if_everyone_else_colludes():
    loose = quote(find(masked_task()), masked_task()).sample_epsilon_alone()
    find(masked_task(more=f"floor = {loose + 0.01:.2f}"))
    with pytest.raises(TaskError, match=r"if everyone else colludes a sample pays ε = .*masking.floor = 1.5"):
        find(masked_task(more="floor = 1.5"))


def test_the_floor_counts_all_uses():
    task = masked_task()
    often = task.with_(privacy=dataclasses.replace(task.privacy, uses=3))
    left = quote(find(often), often).sample_epsilon_alone(3)
    assert left > quote(find(often), often).sample_epsilon_alone(1)
    floored = dataclasses.replace(often.masking, floor=Fraction(f"{left - 0.01:.2f}"))
    with pytest.raises(TaskError, match=r"masking\.floor"):
        find(often.with_(masking=floored))


def test_a_protocol_that_needs_single_check_ins_is_refused_under_masks(monkeypatch):
    single = dataclasses.replace(sgd.protocol, masked=None)
    monkeypatch.setattr(sgd, "protocol", single)
    find.cache_clear()  # this task has been looked at before
    with pytest.raises(TaskError, match=r"\[masking\] with protocol.kind = 'sgd': its server needs single check-ins"):
        find(masked_task())


def test_a_step_without_a_door_lets_nothing_out_under_masks_either():
    with pytest.raises(ProtocolError, match="nothing can leave as 'sum', masked or not"):
        Context(me="server").masked("sum", Private(np.ones((2, 2)), Rows(0, 2)))
