"""The protocols: one pure module each. None imports another; what several are made of is in `parts`."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from crowdml.channels import Channel, Gathering, combining
from crowdml.errors import ProtocolError, TaskError
from crowdml.plugins import blaming
from crowdml.price import check_budget
from crowdml.privacy.losses import Pure, Unbounded
from crowdml.privacy.rows import check_table
from crowdml.protocol import Gathered, Protocol
from crowdml.protocols.registry import PROTOCOLS as PROTOCOLS
from crowdml.protocols.registry import check_plugins as check_plugins
from crowdml.protocols.registry import plugins_of, with_plugins
from crowdml.records import record
from crowdml.task import LARGEST_DELTA, Task
from crowdml.texts import count_text, did_you_mean, digits_below, size_text


@lru_cache(maxsize=256)
def find(task: Task) -> Protocol:
    """The protocol that this task asks for, after it has checked the task: once, for that takes milliseconds."""
    kind = task.protocol["kind"]
    protocol = PROTOCOLS.pinned(task.protocol, "protocol")
    if protocol is None:
        near = did_you_mean(kind, PROTOCOLS)
        raise TaskError(
            f"protocol.kind = {kind!r}: choose one of {', '.join(PROTOCOLS)}, or install the plug-in that has it.{near}"
        )
    if task.masking is not None and protocol.masked is None:
        raise TaskError(
            f"[masking] with protocol.kind = {kind!r}: its server needs single check-ins, and under masks it would "
            "hear sums alone. Leave [masking] out, or choose another protocol."
        )
    ours = kind in PROTOCOLS.ours
    with blaming(f"protocol.kind = {kind!r} failed", "Mend the plug-in.", alone=ours, kept=TaskError):
        if not ours:
            _check_rows(protocol, task)
        protocol.check(task)
        if not ours:
            _check_answers(protocol, task)
        check_budget(protocol, task)
    return protocol


def _check_rows(protocol: Protocol, task: Task) -> None:
    """Refuse prices that do not belong to the rows of a plug-in's contribution; ours have sentences of their own."""
    rows, priced = {name: optional for name, _, optional in protocol.rows()}, task.privacy.epsilon
    if not rows or task.privacy.mechanism == "none":
        return
    for name in sorted(set(priced) - set(rows)):
        raise TaskError(
            f"privacy.epsilon.{name}: {protocol.name} lets out {', '.join(rows)}, and nothing else."
            f"{did_you_mean(name, rows)}"
        )
    for name in [name for name, optional in rows.items() if not optional and name not in priced]:
        raise TaskError(f"privacy.epsilon.{name} is missing: what a sample pays for it, such as {{ {name} = 1.0 }}.")


def _check_answers(protocol: Protocol, task: Task) -> None:
    """Refuse what a plug-in answers of a task, where nobody could use it."""
    table, rows = protocol.mechanisms(task), {name: optional for name, _, optional in protocol.rows()}
    check_table(table)
    for name in [name for name in table if rows and name not in rows]:
        raise ProtocolError(
            f"`mechanisms` has a row {name!r}, and its contribution has the fields {', '.join(rows)}. Declare "
            f"{name!r} there as Release[...], or take the row out"
        )
    for name in [name for name, optional in rows.items() if not optional and name not in table]:
        raise ProtocolError(
            f"its contribution has the field {name!r}, and `mechanisms` the rows {', '.join(table)}. Add a row "
            f"{name!r}, or declare the field Release[...] | None"
        )
    batch, capacity, channel = protocol.batch(task), protocol.capacity(task), protocol.channel(task)
    if type(channel) is not Channel:
        raise ProtocolError(f"`channel` gives {channel!r}, and has to give a Channel")
    if not 1 <= batch <= capacity:
        raise ProtocolError(f"a batch has {batch} samples and a buffer holds {capacity}: at least 1, in this order")
    protocol.gathers(task)
    if task.privacy.mechanism != "none":
        protocol.expected(task)


def gathering_of(task: Task) -> Gathering | None:
    """When the rounds of a gathered task close; None of any other task."""
    protocol = find(task)
    found = protocol.gathers(task)
    if found is not None and (
        Gathered not in protocol.server.on or any("version" not in each for each in protocol.expected(task).values())
    ):
        raise ProtocolError(
            f"protocol {protocol.name!r} gathers uploads: its server needs a handler of Gathered, and each of its "
            "messages a field `version`, the publication that it answers."
        )
    return found


def remarks_on(task: Task) -> tuple[str, ...]:
    """Sentences for whoever is about to start a task: its protocol's own, and what a round of uploads takes."""
    protocol, found = find(task), gathering_of(task)
    if found is None or task.privacy.mechanism == "none":
        return protocol.remarks(task)
    fields = [field for kind in protocol.expected(task).values() for field in kind.values()]
    each = sum(int(field.dtype[2:]) * math.prod(field.shape) for field in fields if field.shape)
    size = count_text(found.size, "upload" if task.masking is None else "cohort")
    late = "" if found.seconds is None else f", or after {found.seconds:g} s with at least {found.minimum:,}"
    needs = found.minimum if found.seconds is not None else found.size
    needs *= 1 if task.masking is None else task.masking.minimum
    by, rule, width = combining(task), tuple[str, ...](), 0
    if by is not None:
        from crowdml.robust import memory_of, remarks  # not at a device's start

        rule = remarks(by, None if task.masking is None else task.masking.cohort)
        if by.rule == "grouping":
            from crowdml.second_moments import remark_on_noise

            moments: Any = protocol.mechanisms(task)["moments"]
            rule, width = (*rule, *remark_on_noise(task, moments)), 2 * moments.features * moments.labels
        numbers = sum(math.prod(field.shape) for field in fields if field.shape)
        memory = f"To close a round the server needs about {size_text(memory_of(by, numbers, width))} of memory."
    else:
        blocks = f", one that reads blocks of 256 {size_text(256 * each)}" if found.size > 256 else ""
        memory = f"A rule that reads all uploads at once needs {size_text(found.size * each)} of memory{blocks}."
    return (
        *protocol.remarks(task),
        *rule,
        f"A round closes when {size} are in{late}. A device gives once a round, so with fewer than "
        f"{count_text(needs, 'device')} no round ever closes. {memory}",
    )


@record
class Refusal:
    """Why devices may not take part in a task that the simulator runs."""

    kind: str
    """For programs: "plugin", "delta", "windows" or "noise"."""
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
    return _unpinned(task) or _overlapping(task) or _uncertain(task) or _undrawable(task)


def check_for_devices(task: Task) -> Protocol:
    """The protocol of a task in which devices may take part; any other task is refused."""
    protocol, refused = find(task), refusal(task)
    if refused is not None:
        raise TaskError(f"task {task.name!r}: {refused.sentence}")
    gathering_of(task)
    rehearse(task)
    return protocol


def rehearse(task: Task) -> None:
    """Refuse a task whose plug-ins would fail in its first check-ins; ours need no rehearsal."""
    if plugins_of(with_plugins(task)):
        from crowdml.protocols import rehearsal  # turns, for plug-ins alone

        rehearsal.rehearse(find(task), task)


def _unpinned(task: Task) -> Refusal | None:
    """Server and devices could run unlike code under one name."""
    pinned = with_plugins(task)
    if pinned is task:
        return None
    where = "protocol" if pinned.protocol != task.protocol else "model"
    return Refusal(
        "plugin",
        f"the task uses a plug-in and does not say which: {where}.plugin is missing. Start it with `crowdml "
        "task start` or in the portal: they write it.",
    )


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
    """The task as it is published and pinned: checked, and with what its protocol chose (the grid) written in, and the
    plug-ins that it uses."""
    return with_plugins(find(task).settle(task))
