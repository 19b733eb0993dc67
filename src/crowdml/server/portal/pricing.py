"""What a task costs those who take part, as operators read it before they start it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from crowdml.protocol import check_budget
from crowdml.protocols import find, refusal
from crowdml.task import Task
from crowdml.texts import number_text

__all__ = ["Price", "price"]


NOISES = {"sigma": "σ = {} steps", "scale": "scale {} steps", "share": "a share of σ = {} steps"}
"""Noise in words, by the parameter of its law."""


@dataclass(frozen=True)
class Row:
    """One thing that leaves with every check-in."""

    name: str
    mechanism: str
    promise: str
    noise: str
    loss: str
    observer: str


@dataclass(frozen=True)
class Line:
    """Both totals after so many check-ins; a sample's grows while it serves in another.

    `..._alone`: if everyone else colludes, where something leaves under masks.
    """

    after: str
    sample: float
    device: float
    sample_alone: float
    device_alone: float


@dataclass(frozen=True)
class Price:
    """Everything at `delta`. `most` is what the budget allows a device; None: no budget."""

    rows: tuple[Row, ...]
    lines: tuple[Line, ...]
    delta: float
    batch: int
    most: int | None
    warnings: tuple[str, ...]
    colluders: int | None = None
    """That are tolerated in a cohort; None: nothing leaves under masks."""


def price(task: Task) -> Price:
    """The task's plan, priced; raises TaskError where it overspends its budget."""
    protocol = find(task)
    quoted, batch = check_budget(protocol, task), protocol.batch(task)
    budget = task.privacy.budget
    uses, masking = task.privacy.uses, task.masking
    most = None if budget is None else budget.samples // batch * uses
    steps = [(1, "1 check-in"), (10, "10 check-ins")]
    if most is not None:
        last = (most, f"all {most:,} check-ins" if most > 1 else "its only check-in")
        steps = [step for step in steps if step[0] < most] + [last]
    sample = quoted.sample_epsilon(uses)
    rows: list[Row] = []
    for each in quoted.rows:
        law = each.mechanism.law
        noise = "none" if law is None else NOISES[law.parameter].format(number_text(law.steps, 4))
        kind, _, number = str(each.loss).partition(" ")
        loss = f"{kind} {number_text(float(Fraction(number)))}" if number and ":" not in number else kind
        mechanism = each.mechanism
        rows.append(Row(each.row, mechanism.kind, mechanism.promise, noise, loss, mechanism.observer.value))
    lines = tuple(
        Line(
            text,
            quoted.sample_epsilon(min(many, uses)),
            quoted.device_epsilon(many),
            quoted.sample_epsilon_alone(min(many, uses)),
            quoted.device_epsilon_alone(many),
        )
        for many, text in steps
    )
    colluders = None if masking is None else masking.colluders
    warnings = tuple(_warnings(task, sample, most))
    return Price(tuple(rows), lines, task.privacy.delta, batch, most, warnings, colluders)


def _warnings(task: Task, sample: float, most: int | None) -> list[str]:
    """What somebody who has run many studies would say before it starts."""
    said: list[str] = []
    refused = refusal(task)
    if refused is not None:
        said.append(f"No server runs this: {refused.sentence}")
    if math.isinf(sample):
        said.append("There is no noise: this protects nobody, and no server runs it.")
    elif sample > 8:
        weak = f"ε = {number_text(sample)} for a sample is a weak guarantee."
        said.append(f"{weak} Studies of people usually stay at or below 4.")
    if most is None:
        said.append("There is no budget: a device gives until its owner's own budget stops it. Say how much is enough.")
    if task.protocol["kind"] == "sgd" and "errors" not in task.privacy.epsilon:
        said.append("No error count leaves, so nobody sees how well the model does while it learns.")
    if not task.purpose or not task.collects:
        said.append("Participants read purpose and collects before they join; without them they have little to go by.")
    return said
