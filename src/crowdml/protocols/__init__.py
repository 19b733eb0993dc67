"""The protocols: one pure module each. None imports another; what several are made of is in `parts`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module

from crowdml.errors import TaskError
from crowdml.privacy.losses import Pure, Unbounded
from crowdml.protocol import Protocol, check_budget
from crowdml.records import record
from crowdml.task import LARGEST_DELTA, Task
from crowdml.texts import did_you_mean, digits_below


class _Protocols(Mapping[str, Protocol]):
    """Each is imported when it is asked for: a device needs one of them, and starts faster without the others."""

    names = ("admm", "gram", "local_updates", "proportions", "sgd")

    def __getitem__(self, name: str) -> Protocol:
        if name not in self.names:
            raise KeyError(name)
        return import_module(f"crowdml.protocols.{name}").protocol

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self.names


PROTOCOLS = _Protocols()
"""Every protocol by its name in task files."""


@lru_cache(maxsize=256)
def find(task: Task) -> Protocol:
    """The protocol that this task asks for, after it has checked the task: once, for that takes milliseconds."""
    kind = task.protocol["kind"]
    if kind not in PROTOCOLS:
        near = did_you_mean(kind, PROTOCOLS)
        raise TaskError(f"protocol.kind = {kind!r}: choose one of {', '.join(PROTOCOLS)}.{near}")
    protocol = PROTOCOLS[kind]
    if task.masking is not None and protocol.masked is None:
        raise TaskError(
            f"[masking] with protocol.kind = {kind!r}: its server needs single check-ins, and under masks it would "
            "hear sums alone. Leave [masking] out, or choose another protocol."
        )
    protocol.check(task)
    check_budget(protocol, task)
    return protocol


@record
class Refusal:
    """Why devices may not take part in a task that the simulator runs."""

    kind: str
    """For programs: "delta", "windows" or "noise"."""
    sentence: str
    """For people: what is wrong, with its key and numbers, and what to do."""

    @property
    def reason(self) -> str:
        """The sentence as the end of another one: why a task has ended."""
        return self.sentence.removesuffix(".")


@lru_cache(maxsize=256)
def refusal(task: Task) -> Refusal | None:
    """Why no server hosts this task and no device gives to it, though `find` accepts it; None where they may.

    `find` serves the simulator, exports, replays and ledgers as well: they read what earlier versions accepted.
    """
    return _overlapping(task) or _uncertain(task) or _undrawable(task)


def check_for_devices(task: Task) -> Protocol:
    """The protocol of a task in which devices may take part; any other task is refused."""
    protocol, refused = find(task), refusal(task)
    if refused is not None:
        raise TaskError(f"task {task.name!r}: {refused.sentence}")
    return protocol


def _overlapping(task: Task) -> Refusal | None:
    """A sample has one serial in the ledger, and a reading that is in many samples would pay under each of them."""
    if task.features.kind != "windows" or find(task).overlaps:
        return None
    many = task.features.dimension + 1
    return Refusal(
        "windows",
        f'features.kind = "windows" with protocol.kind = {task.protocol["kind"]!r}: each reading would be in up to '
        f"{many} samples that leave, and the price is that of one. Only protocol.kind = 'proportions' keeps windows "
        'on the device. Cut windows that do not overlap, and give them as features.kind = "vector".',
    )


def delta_ceiling(task: Task) -> float | None:
    """The most that `privacy.delta` may be where devices take part; None where nothing is promised at all.

    Where every row is pure, a delta is in no promise for one check-in; totals of several are converted at it all the
    same, and one that is large would void them.
    """
    losses = [row.loss for row in find(task).mechanisms(task).values()]
    if all(isinstance(loss, Unbounded) for loss in losses):
        return None
    return LARGEST_DELTA if all(isinstance(loss, Pure) for loss in losses) else task.largest_delta


def is_delta_too_large(task: Task) -> bool:
    """Whether the task's delta is above its ceiling: the simulator runs it, and marks what comes of it."""
    most = delta_ceiling(task)
    return most is not None and task.privacy.delta > most


def _uncertain(task: Task) -> Refusal | None:
    if not is_delta_too_large(task):
        return None
    return Refusal(
        "delta",
        f"privacy.delta = {task.privacy.delta:g}: a promise may fail with this probability, so it may be at most "
        f"{_ceiling(task)}. Lower it, for a little more noise; only `crowdml simulate` runs more.",
    )


def _ceiling(task: Task) -> str:
    """The largest delta in words: where it comes from, and a number that is not rounded up."""
    most = delta_ceiling(task)
    if most is None or most == LARGEST_DELTA:
        return f"{LARGEST_DELTA:g}"
    devices = task.masking.cohort if task.masking is not None else len(task.places)
    budget = task.privacy.budget
    samples = "" if budget is None or task.privacy.unit == "device" else f" x {budget.samples:,} samples"
    return f"1/(10 x {devices:,} devices{samples}) = {digits_below(most)}"


def _undrawable(task: Task) -> Refusal | None:
    """A device would charge nothing and fail at every draw."""
    for name, row in find(task).mechanisms(task).items():
        law = row.law
        if law is not None and not law.is_drawable:
            return Refusal(
                "noise",
                f"privacy.epsilon.{name} = {task.privacy.epsilon[name]} asks for noise of {law.steps:,.0f} grid "
                f"steps, and a device draws at most {law.most:,}. Raise it"
                f"{' or lower privacy.uses' if task.privacy.uses > 1 else ''}.",
            )
    return None


def settled(task: Task) -> Task:
    """The task as it is published and pinned: checked, and with what its protocol chose (the grid) written in."""
    return find(task).settle(task)
