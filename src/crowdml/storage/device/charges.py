"""The charges of one device in its file: SQL, for the algebra of `crowdml.privacy.spending`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from crowdml.errors import GuaranteeError
from crowdml.privacy.losses import Loss, Total, Unbounded, parse_loss
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.privacy.spans import Priced, Span
from crowdml.privacy.spending import Charge, times
from crowdml.storage.device.file import LedgerFile


class ChargeTable:
    """The rows of one device. What is asked must be asked within a transaction, or be one question."""

    def __init__(self, file: LedgerFile, device: int) -> None:
        self._file, self._device = file, device

    def add(self, charges: Sequence[Charge]) -> None:
        rows = [(*_row(charge), self._device) for charge in charges]
        self._file.connection.executemany(_INSERT_CHARGE, rows)

    def spans(self, task: bytes | None) -> Iterable[Span]:
        return self._ask(f"select first_sample, last_sample {_OF}", task)

    def device_total(self, task: bytes | None, *, alone: bool = False) -> Total:
        column = _DEVICE_ALONE if alone else "device_loss"
        rows = self._ask(f"select {column}, count(*) {_OF} group by 1", task)
        return Total.of([self._total(loss, count) for loss, count in rows])

    def between(self, task: bytes | None, first: int, last: int, *, alone: bool = False) -> Iterable[Priced]:
        question = _OVERLAPPING.format(loss=_ALONE if alone else "loss")
        for loss, a, b, count in self._ask(question, task, first=first, last=last):
            yield a, b, self._total(loss, count)

    def listed(self, task: bytes | None) -> tuple[Charge, ...]:
        """Each charge as it was made, newest first."""
        rows = self._file.read(
            "select task, mechanism, loss, device_loss, observer, adjacency, first_sample, last_sample, "
            "charged_at, alone, device_alone "
            "from charge where device = ? and task = coalesce(?, task) order by id desc",
            self._device,
            task,
        )
        return tuple(self._charge(row) for row in rows)

    def is_empty(self) -> bool:
        return not self._file.read("select 1 from charge where device = ? limit 1", self._device)

    def any_masked(self) -> bool:
        """Whether a charge has a second number at all: where none has, the first is both."""
        wanted = "select 1 from charge where device = ? and observer = 'aggregate' limit 1"
        return bool(self._file.read(wanted, self._device))

    def _ask(self, question: str, task: bytes | None, **values: int) -> list[tuple[Any, ...]]:
        named = {"task": task, "device": self._device, **values}
        return self._file.connection.execute(question, named).fetchall()

    def _loss(self, text: str) -> Loss:
        try:
            return _parse(text)
        except (GuaranteeError, ValueError) as error:  # not a loss, or one too long to read
            raise self._file.corrupt(f"a charge holds the loss {text!r}") from error

    def _total(self, text: str, count: int) -> Total:
        return times(self._loss(text), count)

    def _charge(self, row: tuple[Any, ...]) -> Charge:
        task, mechanism, loss, device_loss, observer, adjacency, first, last, charged_at, alone, device_alone = row
        if alone is None and observer == Observer.AGGREGATE.value:
            alone = device_alone = str(Unbounded())  # from before it was kept
        return Charge(
            task,
            mechanism,
            self._loss(loss),
            self._loss(device_loss),
            Observer(observer),
            Adjacency(adjacency),
            first,
            last,
            charged_at,
            None if alone is None else self._loss(alone),
            None if device_alone is None else self._loss(device_alone),
        )


_INSERT_CHARGE = """
insert into charge (task, mechanism, loss, device_loss, unit, adjacency, observer, scope,
                    first_sample, last_sample, level, charged_at, alone, device_alone, device)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

_ALONE = "coalesce(alone, iif(observer = 'aggregate', 'unbounded', loss))"
_DEVICE_ALONE = "coalesce(device_alone, iif(observer = 'aggregate', 'unbounded', device_loss))"
"""What a charge costs if everyone else colludes: where that was not kept, nothing is promised."""

_OF = "from charge where device = :device and (:task is null or task = :task)"

# Each level that occurs, then a range of the index in each: a span of that level which meets the serials begins no
# more than 2^level before them.
_OVERLAPPING = """
with recursive present (level) as (
    select min(level) from charge where device = :device
    union all
    select (select min(level) from charge where device = :device and level > present.level)
    from present where present.level is not null
)
select {loss}, max(first_sample, :first), min(last_sample, :last), count(*)
from present cross join charge on charge.level = present.level
where device = :device and first_sample between :first - (1 << present.level) and :last and last_sample >= :first
  and (:task is null or task = :task)
group by 1, 2, 3
"""


def _row(charge: Charge) -> tuple[Any, ...]:
    return (
        charge.task,
        charge.mechanism,
        str(charge.loss),
        str(charge.device_loss),
        charge.unit,
        charge.adjacency.value,
        charge.observer.value,
        charge.scope,
        charge.first_sample,
        charge.last_sample,
        (charge.last_sample - charge.first_sample).bit_length(),
        charge.charged_at,
        None if charge.alone is None else str(charge.alone),
        None if charge.device_alone is None else str(charge.device_alone),
    )


_parse = lru_cache(maxsize=4096)(parse_loss)
