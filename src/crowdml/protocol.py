"""Protocols: two tables of pure handlers and one table of what may leave. Not a line about a particular one.

A handler takes (task, state, event, context) and returns a `Step`: the next state and the effects that the shell shall
carry out. It raises on no value and branches on no value; its shapes do not grow. So one handler serves one NumPy
device, or ten thousand in a compiled loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from math import ceil, isqrt
from typing import Any, Generic, TypeVar

from crowdml.arrays import Array, Integers, Samples
from crowdml.errors import ProtocolError, TaskError
from crowdml.messages import Address, check_pair
from crowdml.privacy.losses import Loss, Total
from crowdml.privacy.mechanisms import Mechanism, Scheduled, paid
from crowdml.privacy.private import Masked, Private, Release
from crowdml.records import record
from crowdml.task import Task
from crowdml.texts import number_text

S = TypeVar("S")


# Events, besides the messages themselves.
@record
class Sensed:
    """A device's buffer holds a full batch."""

    batch: Private[Samples]


@record
class Woken:
    tag: str


# Effects. One that depends on a value carries `when`, a boolean array: its structure never changes.
@record
class CheckOut:
    """Read the publication. The runner answers from the last one, so it can be cached; a failure is retried."""


@record
class Send:
    to: Address | frozenset[Address]
    message: Any
    when: Array | None = None


@record
class Publish:
    """What the next check-out returns."""

    message: Any
    when: Array | None = None


@record
class Wake:
    after: float
    tag: str


@record
class Stop:
    reason: str
    when: Array | None = None


Effect = CheckOut | Send | Publish | Wake | Stop


@record
class Step(Generic[S]):
    """What a handler returns."""

    state: S
    effects: tuple[Effect, ...] = ()


def _shut(row: str, private: Private[Any]) -> Release[Integers]:
    raise ProtocolError(f"There is no door in this step, so nothing can leave as {row!r}: the server holds no samples.")


def _shut_masked(row: str, private: Private[Any]) -> Masked[Integers]:
    raise ProtocolError(f"There is no door in this step, so nothing can leave as {row!r}, masked or not.")


@record
class Context:
    """What the shell hands to a handler: who, when, and the door, for anyone to see (`release`) or under masks."""

    me: Address | Array
    sender: Address | Array | None = None
    now: float | Array = 0.0
    release: Callable[[str, Private[Any]], Release[Integers]] = _shut
    masked: Callable[[str, Private[Any]], Masked[Integers]] = _shut_masked
    trip: int | Integers = 0
    """How many check-ins of this task the device made before: public, for the server counts them too."""
    place: int | Integers = -1
    """Where in the task's public list of places this device stands; -1: nowhere."""


Handler = Callable[[Task, Any, Any, Context], Step[Any]]


@record(eq=False)
class Role:
    """One side of a protocol: its first step, and a handler for each type of event."""

    start: Callable[[Task, Context], Step[Any]]
    on: Mapping[type, Handler]


@record
class Field:
    """What a message's array must look like: NumPy's little-endian name of its type, its shape, its least and most."""

    dtype: str
    shape: tuple[int, ...]
    low: int
    high: int


def total_fields(table: Mapping[str, Any], task: Task) -> dict[str, Field]:
    """What the total of a cohort looks like: each row of the table as a flat vector, and how many survived.

    An honest sum leaves the public bound by more than six standard deviations of a cohort's noise once in 10^9 entries.
    """
    masking = task.masking
    if masking is None or task.privacy.mechanism == "none":
        raise TaskError("a sum without noise or masks: the simulator runs such a task, a server does not.")
    fields = {"devices": Field("<i4", (), masking.minimum, masking.cohort)}
    for name, row in table.items():
        reach = masking.cohort * row.bound + SIGMAS * (isqrt(ceil(masking.cohort * row.variance)) + 1)
        fields[name] = Field("<i8", (row.length,), -reach, reach)
    return fields


SIGMAS = 6
"""Standard deviations of a cohort's noise by which an entry of an honest sum may leave the public bound."""


@record
class Noisy:
    """Sums of noisy counts: `counts` over `samples` samples, and the `variance` that the noise gave to each of them.

    All three add up, so the difference of two moments is the same thing for the check-ins between them.
    """

    counts: tuple[int, ...]
    samples: int
    variance: float


@record
class Kept:
    """The samples of the last batches that a device gave: x [h, b, d], y [h, b], and the number of each batch [h]."""

    x: Array
    y: Array
    numbers: Integers


@record
class Tally:
    """How a task goes, from releases alone: mistakes (one count), and labels (a count for each cell), since its start.

    None where the task lets no such count out.
    """

    check_ins: int
    errors: Noisy | None = None
    labels: Noisy | None = None


def _untold(task: Task, state: Any) -> Tally | None:
    return None


def _unremarkable(task: Task) -> tuple[str, ...]:
    return ()


@record(eq=False)
class Protocol:
    """`mechanisms` is the privacy plan: quote, ledger, the owner's sentence, docs and audit all read it."""

    name: str
    device: Role
    server: Role
    mechanisms: Callable[[Task], Mapping[str, Mechanism]]
    check: Callable[[Task], object]
    """Refuse a task that this protocol cannot run, with a TaskError that names the key."""
    batch: Callable[[Task], int]
    """How many samples a `Sensed` batch has: public, and always the same."""
    model: Callable[[Task, Any], Array]
    """The weights to use, from the server's state."""
    settle: Callable[[Task], Task]
    """The task with what the protocol chose for it written in (the grid): the form that is published and pinned."""
    expected: Callable[[Task], Mapping[str, Mapping[str, Field]]]
    """For each kind of message that the server hears, what its fields look like; anything else is refused."""
    progress: Callable[[Task, Any], Tally | None] = _untold
    """From the server's state, what plots may show; None where a protocol counts nothing."""
    remarks: Callable[[Task], tuple[str, ...]] = _unremarkable
    """Sentences on the price of a task, for who is about to start one: `crowdml task check` prints them."""
    masked: tuple[type, type] | None = None
    """What one device says under masks (every field `Masked`), and what the server hears of a cohort: the same fields
    added up, `devices` (the survivors) and `version` (of the publication that the cohort used)."""
    peers: Callable[[Task], Sequence[tuple[int, ...]]] | None = None
    """For each place of the task, the places that a device there writes to and hears from: the server relays what they
    say (`address_of` them, and of nobody else). None, or none of them: all that is said is said to the server."""
    keeps: Callable[[Task], int] = lambda task: 0
    """Of how many batches a device keeps the samples that it gave: `learn` needs them, and they never leave."""
    learn: Callable[[Task, Any, Kept, int], Any] | None = None
    """What a device makes for itself of its own samples and of what it heard (its state): `models.clusters.Voters`, and
    they never leave. None where devices use what the server publishes."""
    overlaps: bool = False
    """Whether samples may share a reading (`features.kind = "windows"`): only where features never leave a device, and
    each reading is the label of one sample. Elsewhere replacing a reading would change many samples at once."""

    def __post_init__(self) -> None:
        if self.masked is not None:
            check_pair(*self.masked)


def place_of(address: Address) -> int:
    """The place that `@17` names; -1 where it names none."""
    digits = address[1:]
    return int(digits) if address[:1] == "@" and digits.isascii() and digits.isdecimal() else -1


def address_of(place: int) -> Address:
    """A device by where it stands in the task's list of places, whoever it is: that is how peers write to it."""
    return f"@{place}"


def wait(task: Task, ctx: Context) -> Step[None]:
    """How a device begins that has nothing to say before it has sensed."""
    return Step(None)


def check_out(task: Task, waiting: Private[Samples] | None, event: Sensed, ctx: Context) -> Step[Any]:
    """A batch is full: hold it, and ask for the publication. The runner retries a check-out that fails."""
    return Step(event.batch, (CheckOut(),))


def advance(role: Role, task: Task, state: Any, event: Any, ctx: Context) -> Step[Any]:
    """One step of one role: find the handler for this event and call it."""
    handler = role.on.get(type(event))
    if handler is None:
        heard = ", ".join(kind.__name__ for kind in role.on)
        raise ProtocolError(f"Nobody here hears {type(event).__name__}; this role hears {heard}.")
    return handler(task, state, event, ctx)


@record
class QuotedRow:
    """A row of the table, priced."""

    row: str
    mechanism: Mechanism
    loss: Loss
    device_loss: Loss
    alone: Loss
    """If everyone else colludes (review, R11): the loss itself, but for a row that leaves under masks."""
    device_alone: Loss


@record
class Quote:
    """What a check-in costs before any runs: to its dearest sample, and to the device if all samples were replaced.

    Which sample is the dearest depends on how often samples serve and at which delta one asks, so the totals of all
    positions in the batch are kept and compared when asked. Where check-ins cost unlike (`Scheduled`), these totals are
    of the dearest one, and several cost what the dearest so many of the schedule do.
    """

    rows: tuple[QuotedRow, ...]
    positions: tuple[Total, ...]
    device: Total
    delta: float
    positions_alone: tuple[Total, ...]
    """If everyone else colludes (review, R11); the same where nothing leaves under masks."""
    device_alone: Total

    def sample(self, uses: int = 1) -> Total:
        """What the dearest sample loses after it was used in `uses` check-ins."""
        if self._scheduled:
            return dearest(positions(self._table, uses=uses), self.delta)
        return dearest(self.positions, self.delta, uses)

    def sample_epsilon(self, uses: int = 1) -> float:
        """A sample's total after it was used in `uses` check-ins."""
        return self.sample(uses).epsilon(self.delta)

    def device_epsilon(self, check_ins: int = 1) -> float:
        """The device's total after `check_ins`."""
        return self._of_device(self.device, check_ins, lambda row: row.device_loss).epsilon(self.delta)

    def sample_epsilon_alone(self, uses: int = 1) -> float:
        """A sample's total if everyone else colludes."""
        if self._scheduled:
            return dearest(positions(self._table, alone, uses), self.delta).epsilon(self.delta)
        return dearest(self.positions_alone, self.delta, uses).epsilon(self.delta)

    def device_epsilon_alone(self, check_ins: int = 1) -> float:
        """The device's total if everyone else colludes."""
        return self._of_device(self.device_alone, check_ins, device_alone).epsilon(self.delta)

    @property
    def _table(self) -> dict[str, Mechanism]:
        return {row.row: row.mechanism for row in self.rows}

    @property
    def _scheduled(self) -> bool:
        return any(isinstance(row.mechanism, Scheduled) for row in self.rows)

    def _of_device(self, once: Total, check_ins: int, loss: Callable[[Mechanism], Loss]) -> Total:
        if not self._scheduled:
            return once.scaled(check_ins)
        return Total.of(paid(row.mechanism, check_ins, loss) for row in self.rows)


def positions(
    table: Mapping[str, Mechanism], loss: Callable[[Mechanism], Loss] = lambda row: row.loss, uses: int = 1
) -> tuple[Total, ...]:
    """What `uses` check-ins cost each sample of a batch: rows that cover the same sample add, disjoint ones do not."""
    rows = [(row.covers, paid(row, uses, loss)) for row in table.values()]
    edges = sorted({covers.start for covers, _ in rows})
    covering = [[lost for covers, lost in rows if covers.start <= edge < covers.stop] for edge in edges]
    return tuple(dict.fromkeys(Total.of(losses) for losses in covering))


def alone(mechanism: Mechanism) -> Loss:
    """What a release costs a sample if everyone else colludes: a share of noise protects less than the sum's."""
    return getattr(mechanism, "alone", None) or mechanism.loss


def device_alone(mechanism: Mechanism) -> Loss:
    """The same with all the samples replaced at once."""
    return getattr(mechanism, "device_alone", None) or mechanism.device_loss


def dearest(totals: Iterable[Total], delta: float, uses: int = 1) -> Total:
    """The total with the largest epsilon at `delta` once each was paid `uses` times."""
    scaled = [total.scaled(uses) for total in totals]
    return max(scaled, key=lambda total: total.epsilon(delta), default=Total.of([]))


def check_budget(protocol: Protocol, task: Task, uses: int | None = None) -> Quote:
    """The price of a task. Refused: a plan that overspends the task's budget when samples serve `uses` times, and one
    that leaves too little if everyone else colludes. Samples serve as often as the task says, where nobody says more.
    """
    uses = task.privacy.uses if uses is None else uses
    if uses < 1:
        raise TaskError(f"passes = {uses}: a crowd goes over its samples at least once.")
    priced, batch, budget = quote(protocol, task), protocol.batch(task), task.privacy.budget
    if task.masking is not None and task.masking.floor is not None and task.privacy.mechanism != "none":
        left = priced.sample_epsilon_alone(uses)
        if left > task.masking.floor:
            raise TaskError(
                f"task {task.name!r}: if everyone else colludes a sample pays ε = {number_text(left, 4)}, and "
                f"masking.floor = {float(task.masking.floor):g} is all that it may. Lower "
                "privacy.epsilon or masking.minimum, or raise the floor."
            )
    if budget is None or task.privacy.mechanism == "none":
        return priced
    cost = priced.sample_epsilon(uses)
    if cost > budget.epsilon * (1 + Fraction(1, 10**9)):
        times = "one check-in" if uses == 1 else f"{uses} check-ins (one a pass)"
        raise TaskError(
            f"task {task.name!r}: a sample pays ε = {number_text(cost, 4)} for {times}, and privacy.budget.epsilon = "
            f"{float(budget.epsilon):g} is all that it may pay. Lower privacy.epsilon"
            f"{' or the passes' if uses > 1 else ''}, or raise the budget."
        )
    if batch > budget.samples:
        raise TaskError(
            f"task {task.name!r}: a check-in takes {batch} samples, and privacy.budget.samples = {budget.samples} "
            "is all that a device may give. Lower protocol.batch, or raise the budget."
        )
    return priced


def affordable(protocol: Protocol, task: Task, *, uses: int | None = None) -> int | None:
    """How many check-ins the task's budget allows a device whose samples may serve `uses` times; None: no budget."""
    budget, uses = task.privacy.budget, task.privacy.uses if uses is None else uses
    if budget is None:
        return None
    priced = quote(protocol, task)
    limit = budget.epsilon * (1 + Fraction(1, 10**9))
    paid, beyond = 0, uses + 1
    while beyond - paid > 1:
        middle = (paid + beyond) // 2
        paid, beyond = (middle, beyond) if priced.sample_epsilon(middle) <= limit else (paid, middle)
    return paid * (budget.samples // protocol.batch(task))


def quote(protocol: Protocol, task: Task) -> Quote:
    """The table, priced; no handler runs."""
    table = protocol.mechanisms(task)
    rows = tuple(
        QuotedRow(name, row, row.loss, row.device_loss, alone(row), device_alone(row)) for name, row in table.items()
    )
    device, left = Total.of([row.device_loss for row in rows]), Total.of([row.device_alone for row in rows])
    return Quote(rows, positions(table), device, task.privacy.delta, positions(table, alone), left)
