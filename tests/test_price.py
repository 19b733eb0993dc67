"""What a check-in costs before any runs: samples, devices, budgets, and what is left under masks."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
from bench import masked_text, task_text

from crowdml.device.folder import consent_to
from crowdml.errors import TaskError
from crowdml.price import Price, check_budget
from crowdml.privacy.grid import COUNTS
from crowdml.privacy.losses import Pure
from crowdml.privacy.mechanisms import CountLaplace, Exposed, GridLaplace
from crowdml.privacy.private import Rows
from crowdml.privacy.sensitivity import L1
from crowdml.protocol import Role
from crowdml.protocols import PROTOCOLS, find, sgd
from crowdml.task import parse
from crowdml.texts import number_text


def row(epsilon, start, stop):
    return GridLaplace(8, Fraction(epsilon), COUNTS, Rows(start, stop), "a sum")


def laplace_task(epsilon, budget="", **more):
    text = task_text(norm="l1", mechanism="discrete-laplace", epsilon=epsilon, **more)
    return parse(text + f"\n[privacy.budget]\n{budget}" if budget else text)


def total_of(table):
    protocol = dataclasses.replace(sgd.protocol, mechanisms=lambda task: table)
    return Price.of(protocol, laplace_task("{ gradient = 1.0 }")).sample().pure


def test_rows_that_cover_the_same_sample_add_and_disjoint_ones_do_not():
    assert total_of({"a": row(1, 0, 4), "b": row(2, 0, 4)}) == 3
    assert total_of({"a": row(1, 0, 4), "b": row(2, 4, 8)}) == 2
    assert total_of({"a": row(1, 0, 5), "b": row(2, 4, 8)}) == 3
    assert total_of({"a": row(1, 0, 8), "b": row(2, 2, 4), "c": row(3, 6, 7)}) == 4
    assert total_of({}) == 0


def test_the_price_is_that_of_the_dearest_sample_by_hand():
    rng = np.random.default_rng(0)
    for _ in range(50):
        table = {}
        for name in range(4):
            start = int(rng.integers(0, 9))
            table[str(name)] = row(int(rng.integers(1, 9)), start, int(rng.integers(start + 1, 11)))
        by_hand = max(sum(m.epsilon for m in table.values() if m.covers.start <= k < m.covers.stop) for k in range(11))
        assert total_of(table) == by_hand


def test_a_quote_has_a_row_for_everything_that_may_leave_and_runs_no_handler():
    task = laplace_task("{ gradient = 1.0, errors = 0.25, labels = 0.5 }")
    silent = dataclasses.replace(sgd.protocol, device=Role(None, {}), server=Role(None, {}))
    quoted = Price.of(silent, task)
    assert {entry.name: entry.loss for entry in quoted.rows} == {
        "gradient": Pure(Fraction(1)), "errors": Pure(Fraction(1, 4)), "labels": Pure(Fraction(1, 2)),
    }  # fmt: skip
    assert quoted.sample_epsilon() == 1.75
    assert quoted.device_epsilon() == 5 * 1.75
    assert all(entry.mechanism.promise for entry in quoted.rows)


def test_uses_of_a_sample_and_check_ins_of_a_device_add():
    quoted = Price.of(sgd.protocol, laplace_task("{ gradient = 1.0 }"))
    assert [quoted.sample_epsilon(uses) for uses in (1, 2, 5)] == [1, 2, 5]
    assert [quoted.device_epsilon(times) for times in (1, 2)] == [5, 10]


def test_without_noise_the_price_is_infinite():
    task = parse(task_text(mechanism="none"))
    assert Price.of(find(task), task).sample_epsilon() == np.inf
    assert Price.of(find(task), task).device_epsilon() == np.inf
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
    assert Price.of(sgd.protocol, task).affordable() == 4  # fresh samples: 23 // 5
    assert Price.of(sgd.protocol, task).affordable(2) == 8
    assert Price.of(sgd.protocol, task).affordable(9) == 12  # a sample serves three times at most
    assert Price.of(sgd.protocol, laplace_task("{ gradient = 1.0 }")).affordable() is None


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
    assert Price.of(find(often), often).sample_epsilon() == pytest.approx(1.0)
    assert Price.of(find(often), often).sample_epsilon(5) == pytest.approx(4.75)  # the held-out samples, not the others
    rare = parse(
        task_text(mechanism="discrete-gaussian", norm="l2", held_out=2, epsilon="{ gradient = 1.0, errors = 0.75 }")
    )
    rare = rare.with_(privacy=dataclasses.replace(rare.privacy, delta=1e-12))
    assert Price.of(find(rare), rare).sample_epsilon() == pytest.approx(1.0)


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
    price = Price.of(find(task), task)
    (gradient,) = price.rows
    assert gradient.alone == gradient.mechanism.alone
    assert gradient.device_alone == gradient.mechanism.device_alone
    assert price.sample_epsilon() == pytest.approx(1.0, abs=1e-6)
    assert 1 < price.sample_epsilon() * 2 < price.sample_epsilon(alone=True) < price.device_epsilon(alone=True)
    assert price.device_epsilon() < price.device_epsilon(alone=True)


def test_without_masks_collusion_costs_nothing_more():
    task = parse(task_text())
    price = Price.of(find(task), task)
    assert price.sample_epsilon(3, alone=True) == price.sample_epsilon(3)
    assert price.device_epsilon(3, alone=True) == price.device_epsilon(3)
    assert all((row.loss, row.device_loss) == (row.alone, row.device_alone) for row in price.rows)


@pytest.mark.parametrize("build", [masked_task, lambda **more: parse(task_text(epsilon="{ gradient = 1.0 }"))])
def test_all_uses_of_a_sample_together_cost_what_the_task_says(build):
    once = build()
    often = once.with_(privacy=dataclasses.replace(once.privacy, uses=5))
    price = Price.of(find(often), often)
    assert price.sample_epsilon(5) == pytest.approx(1.0, abs=1e-6)
    assert price.sample_epsilon(5) <= 1.0
    assert price.sample_epsilon(1) < 0.6
    assert check_budget(find(often), often).sample_epsilon(5) == price.sample_epsilon(5)


def test_a_budget_is_held_against_all_uses():
    fits = masked_task("epsilon = 1.0\nsamples = 20")
    fits = fits.with_(privacy=dataclasses.replace(fits.privacy, uses=5))
    assert Price.of(find(fits), fits).affordable() == 5 * 4
    assert Price.of(find(fits), fits).affordable(7) == 5 * 4  # the budget pays for five
    assert Price.of(find(fits), fits).affordable(2) == 2 * 4
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
    original = Price.sample_epsilon
    monkeypatch.setattr(Price, "sample_epsilon", lambda self, uses=1: asked.append(uses) or original(self, uses))
    protocol = find(task)
    asked.clear()
    assert Price.of(protocol, task).affordable() == 400_000
    assert len(asked) < 20


def test_the_floor_refuses_a_task_that_leaves_too_little_if_everyone_else_colludes():
    loose = Price.of(find(masked_task()), masked_task()).sample_epsilon(alone=True)
    find(masked_task(more=f"floor = {loose + 0.01:.2f}"))
    with pytest.raises(TaskError, match=r"if everyone else colludes a sample pays ε = .*masking.floor = 1.5"):
        find(masked_task(more="floor = 1.5"))


def test_the_floor_counts_all_uses():
    task = masked_task()
    often = task.with_(privacy=dataclasses.replace(task.privacy, uses=3))
    left = Price.of(find(often), often).sample_epsilon(3, alone=True)
    assert left > Price.of(find(often), often).sample_epsilon(1, alone=True)
    floored = dataclasses.replace(often.masking, floor=Fraction(f"{left - 0.01:.2f}"))
    with pytest.raises(TaskError, match=r"masking\.floor"):
        find(often.with_(masking=floored))


# Its forms


@pytest.mark.parametrize("task", [laplace_task("{ gradient = 1.0 }", "epsilon = 3.0\nsamples = 23"), masked_task(),
                                  laplace_task("{ gradient = 1.0 }")], ids=["budget", "masked", "open"])  # fmt: skip
def test_every_form_of_a_price_has_the_same_numbers(task):
    price = Price.of(find(task), task)
    whole, made = price.whole, price.check_ins or 1
    assert whole == price.after(made)
    consent = consent_to(price)
    assert (consent.epsilon_sample, consent.epsilon_device) == (whole.sample, whole.device)
    assert (consent.check_ins, consent.delta, consent.colluders) == (price.check_ins, price.delta, price.colluders)
    shown = [number_text(each, 4) for each in (whole.sample, whole.device)]
    left = [number_text(each, 4) for each in (whole.sample_alone, whole.device_alone)]
    (said,) = [each for each in price.sentences if each.startswith("The price")]
    assert said.count("ε = ") == 2
    assert all(f"ε = {each}" in said for each in shown)
    if task.masking is not None:
        assert f"a sample ε = {left[0]}, the device ε = {left[1]}." in price.sentences[-1]
        assert (consent.epsilon_sample_alone, consent.epsilon_device_alone) == (whole.sample_alone, whole.device_alone)
        last = price.lines[-1][2]
        assert price.table[-1][1:] == (last.sample_alone, last.device_alone)
    assert [(line["epsilon_sample"], line["epsilon"]) for line in price.plain["device"]] == [
        (paid.sample, paid.device) for _, _, paid in price.lines
    ]
    assert price.plain["device"][0]["epsilon"] == price.plain["device_epsilon"] == price.once.device
    assert whole.text(price.delta).startswith(f"sample ε {shown[0]}, device ε {shown[1]}")


def test_a_price_is_told_for_the_first_the_tenth_and_the_last_check_in():
    def told(budget):
        task = laplace_task("{ gradient = 1.0 }", budget)
        return [(count, after) for count, after, _ in Price.of(find(task), task).lines]

    assert told("epsilon = 3.0\nsamples = 5") == [(1, "its only check-in")]
    assert told("epsilon = 3.0\nsamples = 20") == [(1, "1 check-in"), (4, "all 4 check-ins")]
    assert told("epsilon = 3.0\nsamples = 5000")[1:] == [(10, "10 check-ins"), (1000, "all 1,000 check-ins")]
    assert told("") == [(1, "1 check-in"), (10, "10 check-ins")]


def test_a_task_without_noise_is_priced_for_all_samples_of_its_budget():
    task = parse(task_text(mechanism="none") + "\n[privacy.budget]\nepsilon = 1.0\nsamples = 50")
    price = Price.of(find(task), task)
    assert price.check_ins == 10
    assert price.table[-1] == ("all 10 check-ins", np.inf, np.inf)
    assert "ε = none: no noise" in " ".join(price.sentences)
    assert price.whole.text(price.delta) == "no privacy"
