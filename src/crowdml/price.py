"""What a task costs those who take part: one `Price`, made from the protocol's own table before anything runs.

`task check`, the portal, the API, a device's consent and the simulator all print this one: `plain` is its form in JSON,
`table`, `note` and `sentences` are its forms in words. Pages in several languages put the same numbers into their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from functools import cached_property
from operator import attrgetter
from typing import Any

from crowdml.errors import TaskError
from crowdml.privacy.losses import Loss, Renyi, Total
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.odds import Odds, odds
from crowdml.privacy.private import Rows
from crowdml.protocol import Protocol
from crowdml.records import record
from crowdml.task import Task
from crowdml.texts import count_text, epsilon_text, number_text

ROUNDING = 1 + Fraction(1, 10**9)
"""A total that is rounded up may exceed its budget by this factor."""

NOISES = {"sigma": "σ = {} steps", "scale": "scale {} steps", "share": "a share of σ = {} steps"}
"""Noise in words, by the parameter of its law."""


@record
class Epsilons:
    """What the most expensive sample and the whole device pay; `..._alone`: if everyone else colludes."""

    sample: float = 0.0
    device: float = 0.0
    sample_alone: float = 0.0
    device_alone: float = 0.0

    @property
    def plain(self) -> dict[str, float]:
        return {
            "epsilon_sample": self.sample,
            "epsilon_device": self.device,
            "epsilon_sample_alone": self.sample_alone,
            "epsilon_device_alone": self.device_alone,
        }

    def text(self, delta: float) -> str:
        """'sample ε 1, device ε 155 (δ 10⁻⁶)': both totals always together; under masks also if everyone colludes."""
        if math.isinf(self.sample):
            return "no privacy"
        said = f"sample ε {number_text(self.sample, 4)}, device ε {number_text(self.device, 4)}"
        said += f" (δ {number_text(delta)})" if delta else ""
        if self.sample_alone > self.sample:
            alone = f"{number_text(self.sample_alone, 4)} and {number_text(self.device_alone, 4)}"
            said += f"; if everyone else colludes {alone}"
        return said


@record
class PricedRow:
    """A row of the table with its four losses: of one sample and of the device, each also if everyone else colludes."""

    name: str
    mechanism: Mechanism
    loss: Loss
    device_loss: Loss
    alone: Loss
    """More than `loss` where the row leaves under masks (review, R11)."""
    device_alone: Loss

    @staticmethod
    def of(name: str, row: Mechanism) -> PricedRow:
        return PricedRow(name, row, row.loss, row.device_loss, row.alone, row.device_alone)

    def total(self, check_ins: int, which: str = "loss") -> Total:
        """What so many check-ins cost at the most, in the loss of this name."""
        if self.mechanism.scheduled:
            return self.mechanism.total(check_ins, attrgetter(which))
        return Total.of([getattr(self, which)]).scaled(check_ins)

    def epsilons(self, delta: float) -> Epsilons:
        """What one release costs by itself, whatever its noise proves: the numbers that people compare."""
        losses = self.loss, self.device_loss, self.alone, self.device_alone
        return Epsilons(*(Total.of([each]).epsilon(delta) for each in losses))

    @property
    def noise(self) -> str:
        law = self.mechanism.law
        return "none" if law is None else NOISES[law.parameter].format(number_text(law.steps, 4))

    @property
    def loss_text(self) -> str:
        """The loss in one line: the values of all orders would fill a page."""
        if isinstance(self.loss, Renyi):
            values = dict(zip(self.loss.orders, self.loss.values, strict=True))
            shown = ", ".join(f"{number_text(float(values[order]))} at {order}" for order in (2, 8, 32))
            return f"Rényi at {len(values)} orders: {shown}, ..."
        kind, _, number = str(self.loss).partition(" ")
        return f"{kind} {number_text(float(Fraction(number)), 4)}" if number else kind

    @property
    def parameters(self) -> list[tuple[str, float | int]]:
        """What fixes the mechanism, by the names of the portal's catalogue."""
        mechanism, law = self.mechanism, self.mechanism.law
        found: list[tuple[str, float | int]] = []
        if mechanism.clipped is not None:
            name = "clip_whole" if mechanism.whole else "clip"
            found += [(name, float(mechanism.clipped * mechanism.grid.step)), ("grid", float(mechanism.grid.step))]
        if law is not None:
            found.append((law.parameter, law.size))
            if law.honest is not None:
                found += [("sum", law.size_in_sum), ("honest", law.honest)]
        return [*found, ("covers", mechanism.covers.size)]

    def plain(self, delta: float) -> dict[str, Any]:
        law, sensitivity = self.mechanism.law, self.mechanism.sensitivity
        return {
            "row": self.name,
            "mechanism": self.mechanism.kind,
            "sensitivity": f"{type(sensitivity).__name__} {sensitivity.bound}",
            "adjacency": sensitivity.adjacency.value,
            "noise": self.noise,
            "noise_steps": None if law is None else float(law.steps),
            "noise_unit": None if law is None else float(law.unit),
            "grid": float(self.mechanism.grid.step),
            "loss": str(self.loss),
            "epsilon": self.epsilons(delta).sample,
            "observer": self.mechanism.observer.value,
            "promise": self.mechanism.promise,
        }


@record
class Price:
    """What check-ins cost: the most expensive sample, and the device as if all its samples were replaced.

    Which sample is the most expensive depends on how often samples serve and on delta, so totals are compared when
    asked for. Where check-ins cost differently (`Scheduled`), n of them cost what the n most expensive ones do.
    """

    task: Task
    batch: int
    """Samples in a check-in."""
    rows: tuple[PricedRow, ...]
    delta: float

    @staticmethod
    def of(protocol: Protocol, task: Task) -> Price:
        """The protocol's table, priced; no handler runs."""
        rows = tuple(PricedRow.of(name, row) for name, row in protocol.mechanisms(task).items())
        return Price(task, protocol.batch(task), rows, task.privacy.delta)

    def sample(self, uses: int = 1, *, alone: bool = False) -> Total:
        """What the most expensive sample loses in `uses` check-ins."""
        which = "alone" if alone else "loss"
        totals = positions((row.mechanism.covers, row.total(uses, which)) for row in self.rows)
        return max(totals, key=lambda total: total.epsilon(self.delta), default=Total())

    def device(self, check_ins: int = 1, *, alone: bool = False) -> Total:
        """What the device loses in `check_ins`, as if all its samples were replaced."""
        which = "device_alone" if alone else "device_loss"
        return Total.of(row.total(check_ins, which) for row in self.rows)

    def sample_epsilon(self, uses: int = 1, *, alone: bool = False) -> float:
        return self.sample(uses, alone=alone).epsilon(self.delta)

    def device_epsilon(self, check_ins: int = 1, *, alone: bool = False) -> float:
        return self.device(check_ins, alone=alone).epsilon(self.delta)

    def after(self, check_ins: int, uses: int | None = None) -> Epsilons:
        """All four after `check_ins` of a device whose samples serve `uses` times; as often as the task says."""
        if not check_ins:
            return Epsilons()
        uses = min(check_ins, self.task.privacy.uses) if uses is None else uses
        return Epsilons(
            self.sample_epsilon(uses),
            self.device_epsilon(check_ins),
            self.sample_epsilon(uses, alone=True),
            self.device_epsilon(check_ins, alone=True),
        )

    def affordable(self, uses: int | None = None) -> int | None:
        """How many check-ins the task's budget allows a device whose samples may serve `uses` times; None: no budget.

        A task without noise promises nothing, so its budget limits samples only.
        """
        budget, uses = self.task.privacy.budget, self.task.privacy.uses if uses is None else uses
        if budget is None:
            return None
        limit = budget.epsilon * ROUNDING
        paid, beyond = 0, uses + 1
        if self.task.privacy.mechanism == "none" or self.sample_epsilon(uses) <= limit:
            paid = uses
        while beyond - paid > 1:
            middle = (paid + beyond) // 2
            paid, beyond = (middle, beyond) if self.sample_epsilon(middle) <= limit else (paid, middle)
        return paid * (budget.samples // self.batch)

    @cached_property
    def check_ins(self) -> int | None:
        """How many check-ins the task's budget allows a device; None: it has no budget."""
        return self.affordable()

    @cached_property
    def once(self) -> Epsilons:
        """What one check-in costs."""
        return self.after(1)

    @cached_property
    def whole(self) -> Epsilons:
        """What all check-ins cost that the budget allows. Without one: a sample in all its uses, a device in one."""
        return self.after(self.check_ins or 1, self.task.privacy.uses)

    @property
    def colluders(self) -> int | None:
        """Devices of a cohort that may collude before the price rises; None: nothing leaves under masks."""
        return None if self.task.masking is None else self.task.masking.colluders

    def odds(self, epsilon: float) -> Odds:
        """How often a guess can be right after what costs `epsilon`."""
        return odds(epsilon, self.delta)

    @property
    def odds_of_unit(self) -> Odds:
        """The odds of a guess about what the task protects, in the end; a device without a budget never ends giving."""
        if self.task.privacy.unit == "sample":
            return self.odds(self.whole.sample)
        return self.odds(math.inf if self.check_ins is None else self.whole.device)

    @cached_property
    def lines(self) -> tuple[tuple[int, str, Epsilons], ...]:
        """So many check-ins, in numbers and in words, and their price: the first, the tenth, and the last one."""
        most = self.check_ins
        steps = [each for each in (1, 10) if most is None or each < most]
        said = [(each, count_text(each, "check-in")) for each in steps]
        if most is not None:
            said.append((most, f"all {count_text(most, 'check-in')}" if most > 1 else "its only check-in"))
        known = {1: self.once, most: self.whole}
        return tuple((count, after, known.get(count) or self.after(count)) for count, after in said)

    @property
    def table(self) -> list[tuple[str, float, float]]:
        """Check-ins in words, a sample's ε and the device's; under masks a last line: if everyone else colludes."""
        rows = [(after, paid.sample, paid.device) for _, after, paid in self.lines]
        if self.colluders is not None:
            _, after, paid = self.lines[-1]
            rows.append((f"{after}, if everyone else colludes", paid.sample_alone, paid.device_alone))
        return rows

    @property
    def note(self) -> str:
        """What the numbers of the table compare, and whom they are meant against."""
        said = (
            f"At δ = {number_text(self.delta)}. A sample's ε compares with any one sample replaced; the device's, with "
            "all of them replaced at once."
        )
        if self.colluders is None:
            return said
        return (
            f"{said} Against whoever sees the sums over cohorts, with at most {count_text(self.colluders, 'colluder')} "
            "in each; the last line is what a device's own share of the noise still proves."
        )

    @property
    def sentences(self) -> list[str]:
        """The whole price for the owner of a device, before they decide."""
        most, uses, delta = self.check_ins, self.task.privacy.uses, number_text(self.delta)
        times = "a check-in" if most is None else f"{self.lines[-1][1]}{' it may make' if most > 1 else ''}"
        serves = "" if uses == 1 else f" in all the {uses:,} check-ins in which it serves"
        sample, device, sample_alone, device_alone = (
            f"ε = {epsilon_text(each)}"
            for each in (self.whole.sample, self.whole.device, self.whole.sample_alone, self.whole.device_alone)
        )
        condition = "" if self.colluders is None else f" with at most {count_text(self.colluders, 'colluder')}"
        said = [
            f"The price{condition}, at δ = {delta}: any one sample loses at most {sample}{serves}; the device, as if "
            f"all its samples were replaced, {device} after {times}.",
            self.odds(self.whole.sample).sentence,
        ]
        if self.colluders is None:
            return said
        return [
            "All of it leaves under masks: as long as nobody breaks X25519 or AES, the server sees the sum over a "
            "cohort, and no device's own values. A colluder is a device that works with the server, or is curious "
            "about the others.",
            *said,
            f"If everyone else colludes, or the server made them up: a sample {sample_alone}, "
            f"the device {device_alone}.",
        ]

    @cached_property
    def plain(self) -> dict[str, Any]:
        """The price in JSON. `sample_epsilon` and `device_epsilon` are of one check-in; `device` has more of them."""
        budget, rows = self.task.privacy.budget, [row.plain(self.delta) for row in self.rows]
        return {
            "unit": self.task.privacy.unit,
            "adjacency": ", ".join(sorted({row["adjacency"] for row in rows})),
            "delta": self.delta,
            "batch": self.batch,
            "uses": self.task.privacy.uses,
            "sample_epsilon": self.once.sample,
            "device_epsilon": self.once.device,
            "epsilon_sample": self.whole.sample,
            "epsilon_sample_alone": self.whole.sample_alone,
            "budget": None if budget is None else {"epsilon": float(budget.epsilon), "samples": budget.samples},
            "device": [
                {
                    "check_ins": count,
                    "after": after,
                    "epsilon": paid.device,
                    "epsilon_alone": paid.device_alone,
                    "epsilon_sample": paid.sample,
                    "epsilon_sample_alone": paid.sample_alone,
                }
                for count, after, paid in self.lines
            ],
            "rows": rows,
        }


def positions(rows: Iterable[tuple[Rows, Total]]) -> tuple[Total, ...]:
    """What each sample of a batch pays: rows that cover the same sample add, disjoint ones do not."""
    rows = list(rows)
    edges = sorted({covers.start for covers, _ in rows})
    covering = [[lost for covers, lost in rows if covers.start <= edge < covers.stop] for edge in edges]
    return tuple(dict.fromkeys(Total.of(losses) for losses in covering))


def check_budget(protocol: Protocol, task: Task, uses: int | None = None) -> Price:
    """The price of a task. Refused: a plan that overspends the task's budget when samples serve `uses` times, and one
    that leaves too little if everyone else colludes. Samples serve as often as the task says, where nobody says more.
    """
    uses = task.privacy.uses if uses is None else uses
    if uses < 1:
        raise TaskError(f"passes = {uses}: a crowd goes over its samples at least once.")
    price, budget = Price.of(protocol, task), task.privacy.budget
    if task.masking is not None and task.masking.floor is not None and task.privacy.mechanism != "none":
        left = price.sample_epsilon(uses, alone=True)
        if left > task.masking.floor:
            raise TaskError(
                f"task {task.name!r}: if everyone else colludes a sample pays ε = {number_text(left, 4)}, and "
                f"masking.floor = {float(task.masking.floor):g} is all that it may. Lower "
                "privacy.epsilon or masking.minimum, or raise the floor."
            )
    if budget is None or task.privacy.mechanism == "none":
        return price
    cost = price.sample_epsilon(uses)
    if cost > budget.epsilon * ROUNDING:
        times = "one check-in" if uses == 1 else f"{uses} check-ins (one a pass)"
        raise TaskError(
            f"task {task.name!r}: a sample pays ε = {number_text(cost, 4)} for {times}, and privacy.budget.epsilon = "
            f"{float(budget.epsilon):g} is all that it may pay. Lower privacy.epsilon"
            f"{' or the passes' if uses > 1 else ''}, or raise the budget."
        )
    if price.batch > budget.samples:
        raise TaskError(
            f"task {task.name!r}: a check-in takes {price.batch} samples, and privacy.budget.samples = "
            f"{budget.samples} is all that a device may give. Lower protocol.batch, or raise the budget."
        )
    return price
