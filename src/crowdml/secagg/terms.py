"""The terms of masking: what a task fixes in public, so that devices can hold the server to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from crowdml.errors import TaskError
from crowdml.privacy.mechanisms import Share
from crowdml.privacy.sensitivity import Observer
from crowdml.secagg import ring
from crowdml.secagg.graph import COMPLETE, GraphPlan, plan
from crowdml.task import Task

MOST_DEVICES = 65_536
"""Most devices of a cohort with real masks: each device reads a list of all. A simulated one may be larger."""


@dataclass(frozen=True)
class RingField:
    """One vector of the masked message. Entries of one device's contribution are at most `bound` in magnitude before
    noise; `slack` is what the noise of a whole cohort may add to an entry (six sigma)."""

    tag: str
    length: int
    bits: int
    bound: int
    slack: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.length * self.bits // 8


@dataclass(frozen=True)
class Terms:
    """A cohort has `smallest` to `largest` devices; of any, `survivors` must remain, and `colluders` may lie.

    Refused when made: a threshold that is not safe (2t > n + colluders) or that the survivors do not reach, fewer than
    two honest survivors, and a ring in which the sum of the largest cohort could wrap round.
    """

    task: bytes
    fields: tuple[RingField, ...]
    smallest: int
    largest: int
    survivors: int
    colluders: int
    security: int = 40
    correctness: int = 30
    complete: int = COMPLETE

    def __post_init__(self) -> None:
        if len(self.task) != 32:
            raise TaskError(f"A task is known by a hash of 32 bytes; this has {len(self.task)}.")
        tags = [field.tag for field in self.fields]
        if not tags or len(set(tags)) != len(tags) or not all(tags):
            raise TaskError(f"Masked vectors need tags, each its own; these are {tags}. One mask must not serve two.")
        for field in self.fields:
            if field.length < 1:
                raise TaskError(f"The masked vector {field.tag!r} has {field.length} entries; it needs at least one.")
            ring.check_sum(field.bits, contributions=self.largest, bound=field.bound, slack=field.slack)
        if not 3 <= self.smallest <= self.largest <= MOST_DEVICES:
            raise TaskError(
                f"A cohort has 3 to {MOST_DEVICES:,} devices, the smallest no more than the largest; "
                f"these terms say {self.smallest:,} to {self.largest:,}."
            )
        if self.security < 1 or self.correctness < 1:
            raise TaskError("Security and correctness are numbers of bits, at least 1.")
        if self.honest < 2 or self.colluders < 0:
            raise TaskError(
                f"{self.survivors} survivors with {self.colluders} colluders among them leave {self.honest} honest: "
                "the sum would be that device's own. Ask for more survivors, or tolerate fewer colluders."
            )
        if self.survivors > self.smallest:
            raise TaskError(f"{self.survivors} devices cannot survive in a cohort of {self.smallest}.")
        if self._plan(self.largest) is None:
            least = (self.largest + self.colluders) // 2 + 2
            raise TaskError(
                f"A cohort of {self.largest} with {self.colluders} colluders needs a threshold t with 2t > "
                f"{self.largest + self.colluders}, so t = {least - 1} others of at least {least} survivors; "
                f"the terms say {self.survivors}. Ask for more survivors, or tolerate fewer colluders."
            )

    @property
    def honest(self) -> int:
        """h_min: the fewest honest devices whose noise is in a published sum. Noise is calibrated to it."""
        return self.survivors - self.colluders

    @property
    def size(self) -> int:
        """Bytes of a masked body."""
        return sum(field.size for field in self.fields)

    def plan(self, devices: int) -> GraphPlan:
        """What a cohort of this size must keep to: the same for every device and for the server."""
        if not self.smallest <= devices <= self.largest:
            raise ValueError(f"A cohort of this task has {self.smallest} to {self.largest} devices, not {devices}.")
        found = self._plan(devices)
        assert found is not None, "a plan for the largest cohort is one for every smaller one"
        return found

    def _plan(self, devices: int) -> GraphPlan | None:
        return plan(
            devices,
            self.colluders,
            self.survivors,
            security=self.security,
            correctness=self.correctness,
            complete=self.complete,
        )


def terms_of(task: Task, table: Mapping[str, Any]) -> Terms:
    """The terms of a masked task."""
    fields, masking = fields_of(task, table), task.masking
    assert masking is not None
    return Terms(task.hash, fields, masking.minimum, masking.cohort, masking.minimum, masking.colluders)


def fields_of(task: Task, table: Mapping[str, Any]) -> tuple[RingField, ...]:
    """One for each row of the protocol's table that the aggregate alone may see.

    The ring has 32 bits where the sum of the largest cohort fits with its noise, else 64.
    """
    masking = task.masking
    rows = {name: row for name, row in table.items() if row.observer is Observer.AGGREGATE}
    if masking is None or not rows or len(rows) < len(table):
        raise TaskError(
            f"task {task.name!r}: masks need [masking] in the task and a protocol that says sums alone; "
            f"{sorted(set(table) - set(rows)) or 'nothing'} would be said without."
        )
    return tuple(_field(name, cast(Share, row), masking.cohort) for name, row in rows.items())


def _field(tag: str, row: Share, cohort: int) -> RingField:
    slack = row.slack_of_sum(cohort)
    bits = 32 if cohort * row.bound + 2 * slack < 2**31 else 64
    return RingField(tag, row.length, bits, row.bound, slack)
