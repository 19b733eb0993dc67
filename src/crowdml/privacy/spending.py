"""What a device has spent, and whether it may spend more: the algebra of the ledger, without a file.

A `Charge` is what one release costs on one span of samples. The charges of one step are a `Step`, all of a task's (or
of a device's) are a `Spent`, and a `History` has both for every task: it says no where a budget does not allow a step.
Where charges are kept is not its business: in a list (`Listed`), or in the tables of a device's file.

A sample pays the sum of the charges that cover it, a device the sum of all. Nothing is ever refunded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from fractions import Fraction
from functools import cached_property, lru_cache
from operator import ge
from typing import Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TypeVar

from crowdml.errors import LedgerError
from crowdml.privacy.budget import Allowance, Budget, shortfall, spent
from crowdml.privacy.losses import ZCDP, Filter, Loss, Pure, Renyi, Total, Unbounded
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.privacy.spans import Coverage, Priced, Span, covered, dearest, front, undominated
from crowdml.records import record

P = ParamSpec("P")
T = TypeVar("T")

NOTHING_SENT = "Nothing was charged and nothing was sent."
LAST_SERIAL = 2**62 - 1
MOST_REMEMBERED = 1024
"""Steps, and pairs of totals, that are worked out once."""
USUAL_STEP = 64
"""Spans of a step that is worth remembering: what has more is a whole ledger, and is asked about once."""


@record
class Charge:
    """One release's loss on one span of samples: who is protected, from whom, under which neighbours (review, R0).

    `loss` is that of one sample of the span, `device_loss` that of all of them replaced at once. Where the release
    protects all of a device's data (`replace-device`) the two are the same.

    What is seen as an aggregate alone has `loss` as long as enough of the others are honest. `alone` and
    `device_alone` are what it costs if none of them is (review, R11); for other observers they are the loss itself.
    """

    task: bytes  # SHA-256 of the task file
    mechanism: str  # the row of the protocol's table
    loss: Loss
    device_loss: Loss
    observer: Observer
    adjacency: Adjacency
    first_sample: int  # serials, both included
    last_sample: int
    charged_at: str  # UTC, ISO 8601
    alone: Loss | None = None
    device_alone: Loss | None = None

    def __post_init__(self) -> None:
        if len(self.task) != 32:
            raise LedgerError(
                f"a charge names its task by 32 bytes, the SHA-256 of its file, and these are {len(self.task)}. "
                f"{NOTHING_SENT} Pass the task's hash."
            )
        if not 0 <= self.first_sample <= self.last_sample <= LAST_SERIAL:
            raise LedgerError(
                f"a charge covers serials {self.first_sample} to {self.last_sample}: no such span. {NOTHING_SENT} "
                "Pass the first and the last serial of the part, both included."
            )
        if self.adjacency is Adjacency.REPLACE_DEVICE and self.loss != self.device_loss:
            raise LedgerError(
                f"a replace-device charge protects all samples at once, and it names two losses: {self.loss} and "
                f"{self.device_loss}. {NOTHING_SENT} Pass the same loss for both."
            )
        if not _covers(self.device_loss, self.loss):
            raise LedgerError(
                f"a charge costs one sample {self.loss} and the device {self.device_loss}, and to replace all samples "
                f"is to replace this one too. {NOTHING_SENT} Pass a device loss that is at least that of a sample."
            )
        _check_alone(self)
        if not _is_utc(self.charged_at):
            raise LedgerError(
                f"a charge was made at {self.charged_at!r}, which is no UTC time in ISO 8601. {NOTHING_SENT} "
                "Pass one like '2025-01-31T12:00:00+00:00'."
            )

    @property
    def unit(self) -> Literal["sample", "device"]:
        """What the guarantee protects: one sample, or all samples of a device."""
        return "device" if self.adjacency is Adjacency.REPLACE_DEVICE else "sample"

    def loss_if(self, *, alone: bool) -> Loss:
        """The loss of a sample; with `alone`, if everyone else colludes."""
        return self.alone if alone and self.alone is not None else self.loss

    def device_loss_if(self, *, alone: bool) -> Loss:
        """The loss of all samples replaced at once; with `alone`, if everyone else colludes."""
        return self.device_alone if alone and self.device_alone is not None else self.device_loss

    @property
    def scope(self) -> Literal["release"]:
        """What the loss covers: this release. Totals are computed from charges, and never stored as one."""
        return "release"


def _check_alone(charge: Charge) -> None:
    """A masked release names what it costs if everyone else colludes, which is no less; nothing else names it."""
    alone, device_alone = charge.alone, charge.device_alone
    if charge.observer is not Observer.AGGREGATE:
        if alone is not None or device_alone is not None:
            raise LedgerError(
                f"a charge seen by {charge.observer.value} names what it costs if everyone else colludes, and nobody "
                f"else stands in for it. {NOTHING_SENT} Leave it out."
            )
    elif alone is None or device_alone is None:
        raise LedgerError(
            "a charge of an aggregate does not say what it costs if everyone else colludes (review, R11). "
            f"{NOTHING_SENT} Pass `alone` and `device_alone` of its mechanism."
        )
    elif not (_covers(alone, charge.loss) and _covers(device_alone, charge.device_loss)):
        raise LedgerError(
            f"a charge costs {charge.loss} with honest others and {alone} with none, which is less. {NOTHING_SENT} "
            "Pass `alone` and `device_alone` of its mechanism."
        )
    elif not _covers(device_alone, alone):
        raise LedgerError(
            f"a charge costs one sample {alone} and the device {device_alone} if everyone else colludes, and to "
            f"replace all samples is to replace this one too. {NOTHING_SENT} Pass a device loss that is at least that."
        )


def _is_utc(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        return False


def _covers(whole: Loss, one: Loss) -> bool:
    """Whether the loss of all samples replaced at once is at least that of one, where both can be compared."""
    match whole, one:
        case Pure(), Pure():
            return whole.epsilon >= one.epsilon
        case ZCDP(), ZCDP():
            return whole.rho >= one.rho
        case Renyi(), Renyi() if whole.orders == one.orders:
            return all(map(ge, whole.values, one.values))
        case Renyi(), Renyi():
            total = Total.of([one])
            each = [(value, _renyi_at(total, order)) for order, value in zip(whole.orders, whole.values, strict=True)]
            return all(least is None or value >= least for value, least in each)
        case _:
            return isinstance(whole, Unbounded) or not isinstance(one, Unbounded)


# Where charges are kept


class Charges(Protocol):
    """The charges of one device, wherever they are kept. With `alone`, what they cost if everyone else colludes."""

    def add(self, charges: Sequence[Charge]) -> None:
        """Keep these, too."""
        ...

    def spans(self, task: bytes | None) -> Iterable[Span]:
        """What each charge of the task covers; of all tasks, where none is named."""
        ...

    def device_total(self, task: bytes | None, *, alone: bool = False) -> Total:
        """The sum of their losses, as if all samples of each were replaced."""
        ...

    def between(self, task: bytes | None, first: int, last: int, *, alone: bool = False) -> Iterable[Priced]:
        """The charges that meet serials first to last, cut to them."""
        ...


class Listed:
    """Charges in a list: a reader's own copy, a device without a disk."""

    def __init__(self, charges: Iterable[Charge] = ()) -> None:
        self._charges = list(charges)

    def add(self, charges: Sequence[Charge]) -> None:
        self._charges.extend(charges)

    def spans(self, task: bytes | None) -> Iterable[Span]:
        return [(charge.first_sample, charge.last_sample) for charge in self._of(task)]

    def device_total(self, task: bytes | None, *, alone: bool = False) -> Total:
        return Total.of(charge.device_loss_if(alone=alone) for charge in self._of(task))

    def between(self, task: bytes | None, first: int, last: int, *, alone: bool = False) -> Iterable[Priced]:
        return [
            (max(first, charge.first_sample), min(last, charge.last_sample), times(charge.loss_if(alone=alone), 1))
            for charge in self._of(task)
            if charge.first_sample <= last and charge.last_sample >= first
        ]

    def _of(self, task: bytes | None) -> Iterable[Charge]:
        return (charge for charge in self._charges if task in (None, charge.task))


# What they add up to


class Totals(NamedTuple):
    """What a device signs with each message: its total, how many samples it gave, and what bounds each one's total."""

    device: Total
    samples: int
    dearest: Total


@record
class Refusal:
    """Why a step is not allowed: the cap that it breaks, and of which budget. `words`: what it costs, what is left."""

    cap: Literal["budget", "samples", "sample", "device"]
    """`budget`: none was given. `samples`: how many are given in all. `sample`, `device`: what one may pay."""
    budget: Budget | None = None
    words: str = ""


class Spent:
    """What the charges of one task, or of all, add up to. It reads what it is asked for, and then keeps it."""

    def __init__(self, charges: Charges, task: bytes | None = None, *, alone: bool = False) -> None:
        self._charges, self._task, self._alone = charges, task, alone

    @cached_property
    def device(self) -> Total:
        """What all releases together cost if all samples that this device ever gave are replaced."""
        return self._charges.device_total(self._task, alone=self._alone)

    @cached_property
    def given(self) -> Coverage:
        """The samples that any release has used."""
        return covered(self._charges.spans(self._task))

    @cached_property
    def front(self) -> Sequence[tuple[int, Total]]:
        """Samples and their totals that no other total dominates: the dearest is among them, at any delta.

        Totals only grow, and only under new charges: `add` looks where those lie.
        """
        return self._front_between(0, LAST_SERIAL)

    @cached_property
    def ceiling(self) -> Total:
        """A total that is at least every sample's in every part, and so at every delta. That of none is no loss."""
        return ceiling(total for _, total in self.front)

    def sample(self, serial: int) -> Total:
        """What this sample has paid."""
        return Total.of(total for _, _, total in self._between(serial, serial))

    def dearest(self, delta: float) -> tuple[int, Total] | None:
        """The serial of a sample whose total is the greatest at this delta, and that total. None before any charge."""
        return dearest(self.front, lambda total: epsilon_of(total, delta))

    def allowance(self, budget: Budget) -> Allowance:
        """What is left of a budget. A fresh sample has all of its epsilon; the dearest one, what is said here."""
        used = dearest(self.front, lambda total: spent(budget.sample_filter, total))
        left = budget.epsilon - spent(budget.sample_filter, used[1] if used else Total())
        device_left = None
        if budget.device_filter is not None:
            device_left = max(0.0, float(budget.device_filter.epsilon - spent(budget.device_filter, self.device)))
        return Allowance(max(0.0, float(left)), max(0, budget.samples - self.given.size), device_left)

    def after(self, charges: Sequence[Charge], samples: int) -> Totals:
        """The totals once these charges on `samples` samples are added."""
        if not charges:
            return Totals(self.device, self.given.size, self.ceiling)
        step, start = placed(charges)
        spans = step.spans_at(start)
        new, own = self._new(spans), step.ceiling
        if new < samples:  # some were charged before: what those paid adds to this
            met = [each for span in spans for each in self._between(*span)]
            own = ceiling(total for _, total in _front_of_shape(_shape([*met, *step.priced_at(start)])[1]))
        return Totals(_sum_of_two(self.device, step.device), self.given.size + new, _ceiling_of_two(self.ceiling, own))

    def refusal(self, budget: Budget, step: Step, start: int) -> Refusal | None:
        """Why this budget does not allow a step whose first sample has serial `start`; None if it does."""
        spans = step.spans_at(start)
        new, samples_left = self._new(spans), max(0, budget.samples - self.given.size)
        if new > samples_left:
            words = f"gives {new} new samples, and {samples_left} of {budget.samples} are left"
            return Refusal("samples", budget, words)

        if new == step.size:  # then no charge meets them
            before: list[Priced] = []
            top, allowed = step.verdict(budget.sample_filter)
        else:
            before = [priced for span in spans for priced in self._between(*span)]
            start, shape = _shape([*before, *step.priced_at(start)])
            top, allowed = _verdict(shape, budget.sample_filter)
        if not allowed:
            serial, total = top[0] + start, top[1]
            paid = Total.of(each for first, last, each in before if first <= serial <= last)
            return Refusal("sample", budget, f"costs sample {serial} {shortfall(budget.sample_filter, paid, total)}")

        cap = budget.device_filter
        if cap is not None and not cap.allows(self.device, step.device):
            words = f"costs the device {shortfall(cap, self.device, self.device + step.device)}"
            return Refusal("device", budget, words)
        return None

    def add(self, step: Step, start: int) -> None:
        """Bring what was read up to date with charges that were added: as if it were read again."""
        known, spans = vars(self), step.spans_at(start)
        is_fresh = self._new(spans) == step.size
        if "device" in known:
            self.device = _sum_of_two(self.device, step.device)
        if "front" in known:
            if is_fresh:
                found = [(serial + start, total) for serial, total in step.front]
            else:
                found = self._front_between(spans[0][0], spans[-1][1])
            kept = [total for _, total in self.front]
            if any(total not in kept for _, total in found):
                self.front = undominated([*found, *self.front])
                known.pop("ceiling", None)
        for first, last in spans:
            self.given.add(first, last)

    def _new(self, spans: Iterable[Span]) -> int:
        """How many samples of these spans were never given."""
        return sum(self.given.missing(first, last) for first, last in spans)

    def _between(self, first: int, last: int) -> Iterable[Priced]:
        return self._charges.between(self._task, first, last, alone=self._alone)

    def _front_between(self, first: int, last: int) -> Sequence[tuple[int, Total]]:
        start, shape = _shape(self._between(first, last))
        return [(serial + start, total) for serial, total in _front_of_shape(shape)]


class History:
    """What a device has spent, over all tasks and in each, and what its budgets still allow.

    `charges` are changed by this history alone; where somebody else changes them, make another history.
    """

    def __init__(self, charges: Charges | None = None) -> None:
        self._charges: Charges = Listed() if charges is None else charges
        self._spent: dict[bytes | None, Spent] = {}

    def spent(self, task: bytes | None = None, *, alone: bool = False) -> Spent:
        """What was spent on a task, or on all; with `alone`, what that costs if everyone else colludes."""
        if alone:  # asked for now and then: nothing is remembered
            return Spent(self._charges, task, alone=True)
        found = self._spent.get(task)
        if found is None:
            found = self._spent[task] = Spent(self._charges, task)
        return found

    def refusal(
        self, task: bytes, charges: Sequence[Charge], budgets: Iterable[Budget], *, at: int | None = None
    ) -> Refusal | None:
        """Why the budgets do not all allow this task these charges as one step; None if they do.

        `at` moves the charges: as if the first of their samples had that serial. A budget of another task says
        nothing. Without any budget nothing is allowed.
        """
        stray = next((charge for charge in charges if charge.task != task), None)
        if stray is not None:
            raise LedgerError(
                f"a step of task {task_name(task)} holds a charge of task {task_name(stray.task)}. {NOTHING_SENT} "
                "Write each task's step by itself."
            )
        step, start = placed(charges)
        held = [budget for budget in budgets if budget.task in (None, task)]
        if not held:
            return Refusal("budget")
        found = (self.spent(budget.task).refusal(budget, step, start if at is None else at) for budget in held)
        return next((refusal for refusal in found if refusal is not None), None)

    def add(self, task: bytes, charges: Sequence[Charge]) -> None:
        """Add the charges of a step that was allowed."""
        self._charges.add(charges)
        step, start = placed(charges)
        for whose, found in self._spent.items():
            if whose in (None, task):
                found.add(step, start)


# The charges of one step


class Step:
    """The charges of a step, as if its first sample had serial 0. Check-ins of a task look alike: worked out once."""

    def __init__(self, charges: Sequence[Charge]) -> None:
        self.losses = tuple((charge.loss, charge.device_loss) for charge in charges)  # alive, so that no id is reused
        self.shape = _shape(map(_priced, charges))[1]
        coverage = covered((first, last) for first, last, _ in self.shape)
        self.spans, self.size = tuple(coverage), coverage.size
        self.front = _front_of_shape(self.shape)
        self.ceiling = ceiling(total for _, total in self.front)
        self.device = Total.of(loss for _, loss in self.losses)
        self._verdicts: dict[int, tuple[Filter, tuple[tuple[int, Total], bool]]] = {}

    def spans_at(self, start: int) -> list[Span]:
        """What it covers, disjoint and in order, where its first sample has serial `start`."""
        return [(start + first, start + last) for first, last in self.spans]

    def priced_at(self, start: int) -> list[Priced]:
        """Its charges, where its first sample has serial `start`."""
        return [(start + first, start + last, total) for first, last, total in self.shape]

    def verdict(self, sample_filter: Filter) -> tuple[tuple[int, Total], bool]:
        """The sample that is dearest to the filter, and whether the filter allows what the step costs it."""
        found = self._verdicts.get(id(sample_filter))
        if found is None:
            if len(self._verdicts) >= MOST_REMEMBERED:
                self._verdicts.clear()
            found = self._verdicts[id(sample_filter)] = sample_filter, _verdict(self.shape, sample_filter)
        return found[1]


_steps: dict[tuple[tuple[int, int, int, int], ...], Step] = {}


def placed(charges: Sequence[Charge]) -> tuple[Step, int]:
    """The step that these charges make, and the first serial that it covers.

    Steps are found by the identity of their losses, which a step keeps alive: to compare fractions would cost more
    than it saves.
    """
    start = min([charge.first_sample for charge in charges])
    key = tuple(
        [
            (charge.first_sample - start, charge.last_sample - start, id(charge.loss), id(charge.device_loss))
            for charge in charges
        ]
    )
    step = _steps.get(key)
    if step is None:
        step = Step(charges)
        if len(charges) <= USUAL_STEP:
            if len(_steps) >= MOST_REMEMBERED:
                _steps.clear()
            _steps[key] = step
    return step, start


def _priced(charge: Charge) -> Priced:
    return charge.first_sample, charge.last_sample, times(charge.loss, 1)


Shape = tuple[Priced, ...]
"""Spans from 0 on. Check-ins of one task look alike, so what is worked out of one serves for the next."""


def _shape(spans: Iterable[Priced]) -> tuple[int, Shape]:
    """Where the spans begin, and the spans moved to 0."""
    spans = tuple(spans)
    start = min((first for first, _, _ in spans), default=0)
    return start, tuple((first - start, last - start, total) for first, last, total in spans)


def _remembered(work: Callable[Concatenate[Shape, P], T]) -> Callable[Concatenate[Shape, P], T]:
    """Remember the answers for small shapes, those of a check-in: a whole ledger is asked about once."""
    remembered = lru_cache(maxsize=4096)(work)

    def ask(shape: Shape, *rest: P.args, **named: P.kwargs) -> T:
        return remembered(shape, *rest, **named) if len(shape) <= USUAL_STEP else work(shape, *rest, **named)

    return ask


@_remembered
def _front_of_shape(shape: Shape) -> tuple[tuple[int, Total], ...]:
    return tuple(front(shape))


@_remembered
def _verdict(shape: Shape, sample_filter: Filter) -> tuple[tuple[int, Total], bool]:
    """The sample of the shape that is dearest to the filter, and whether the filter allows what it paid."""
    top = dearest(_front_of_shape(shape), lambda total: spent(sample_filter, total)) or (0, Total())
    return top, sample_filter.allows(Total(), top[1])


def ceiling(totals: Iterable[Total]) -> Total:
    """The least total that is at least each of these in every part: it costs no less than any of them, at any delta."""
    least = Total()
    for total in totals:
        if least.orders == total.orders:
            reached = list(zip(least.orders, map(max, least.values, total.values), strict=True))
        else:
            orders = tuple(sorted({*least.orders, *total.orders}))
            pairs = [(order, _renyi_at(least, order), _renyi_at(total, order)) for order in orders]
            reached = [(order, max(a, b)) for order, a, b in pairs if a is not None and b is not None]
        least = Total(
            max(least.pure, total.pure),
            max(least.squares, total.squares),
            max(least.zcdp, total.zcdp),
            tuple(order for order, _ in reached),
            tuple(value for _, value in reached),
            least.unbounded or total.unbounded,
        )
    return least


def _renyi_at(total: Total, order: int) -> Fraction | None:
    """Its Renyi losses at an order: those of the next one listed. None beyond the last, where nothing is known."""
    if not total.orders:
        return Fraction(0)
    return next((value for listed, value in zip(total.orders, total.values, strict=True) if listed >= order), None)


def _by_identity(work: Callable[[Total, Total], Total]) -> Callable[[Total, Total], Total]:
    """Remember the answers for totals that are the same objects: a device asks about the same few at every step."""
    found: dict[tuple[int, int], tuple[Total, Total, Total]] = {}  # which it keeps alive, so that no id is reused

    def ask(one: Total, other: Total) -> Total:
        known = found.get((id(one), id(other)))
        if known is None:
            if len(found) >= MOST_REMEMBERED:
                found.clear()
            known = found[id(one), id(other)] = one, other, work(one, other)
        return known[2]

    return ask


_ceiling_of_two = _by_identity(lambda one, other: ceiling([one, other]))
_sum_of_two = _by_identity(lambda one, other: one + other)


@lru_cache(maxsize=4096)
def epsilon_of(total: Total, delta: float) -> float:
    """`total.epsilon(delta)`, remembered: a device asks about the same few totals at every step."""
    return total.epsilon(delta)


@lru_cache(maxsize=4096)
def times(loss: Loss, count: int) -> Total:
    """The total of so many equal losses, remembered."""
    return Total.of([loss]).scaled(count)


def task_name(task: bytes) -> str:
    """The first digits of a task's hash, for a sentence."""
    return task.hex()[:12]
