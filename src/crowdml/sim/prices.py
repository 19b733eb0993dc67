"""The price of a task before it runs, held against the task's own budget. No JAX: `crowdml task check` needs none."""

from __future__ import annotations

from fractions import Fraction

from crowdml.errors import TaskError
from crowdml.privacy.losses import exact
from crowdml.protocol import Quote, quote
from crowdml.protocols import find
from crowdml.task import Task


def check_budget(task: Task, passes: int = 1) -> Quote:
    """The price of a task; a plan that overspends the task's own budget is refused."""
    protocol = find(task)
    price, batch = quote(protocol, task), protocol.batch(task)
    budget = task.privacy.budget
    if passes < 1:
        raise TaskError(f"passes = {passes}: a crowd goes over its samples at least once.")
    if budget is None or task.privacy.mechanism == "none":
        return price
    cost = price.sample_epsilon(passes)
    if exact(cost) > budget.epsilon * (1 + Fraction(1, 10**9)):
        uses = "one check-in" if passes == 1 else f"{passes} check-ins (one a pass)"
        raise TaskError(
            f"task {task.name!r}: a sample pays ε={cost:g} for {uses}, and privacy.budget.epsilon = "
            f"{float(budget.epsilon):g} is all that it may pay. Lower privacy.epsilon"
            f"{' or the passes' if passes > 1 else ''}, or raise the budget."
        )
    if budget.samples < batch:
        raise TaskError(
            f"task {task.name!r}: a check-in takes {batch} samples, and privacy.budget.samples = "
            f"{budget.samples} is all that a device may give. Lower protocol.batch, or raise the budget."
        )
    return price
