"""Losses: what the noise of a release proves, and how losses add up. Plain formulas, exact fractions.

A release charges what its noise proves (`Pure`, `ZCDP`, `Renyi`). Losses on overlapping spans add to a `Total`.
An (epsilon, delta) pair is computed from a total and never stored: pairs do not compose well.

The conversion used everywhere (Canonne, Kamath, Steinke 2020): a mechanism whose Renyi divergence
of order a > 1 is at most r is (epsilon, delta)-DP with

    epsilon = r + ln(1 / (a delta)) / (a - 1) + ln(1 - 1 / a).

Neighbours and observer are those of the mechanism that made the charge: this module only adds.
Proofs: docs/proofs/composition.md.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from numbers import Rational

from crowdml.errors import GuaranteeError
from crowdml.exact import LARGEST, read_exact
from crowdml.records import record

ZERO = Fraction(0)
SAFETY = 1e-12  # relative to the terms of a float formula of a few operations, whose own error is below 1e-14


def exact(number: Fraction | int | float | str) -> Fraction:
    """A setting as the fraction that its writer meant: the float 0.1 is 1/10, not the binary number beside it."""
    try:
        if isinstance(number, str):
            return read_exact(number)
        return Fraction(str(number)) if isinstance(number, float) else Fraction(number)
    except (ValueError, TypeError) as error:
        shown = repr(number) if len(repr(number)) <= 60 else f"{repr(number)[:60]}..."
        raise GuaranteeError(
            f"{shown} is not a finite number between {1 / LARGEST:g} and {LARGEST:g} in size. Write it as 0.1 or "
            "'1/10'."
        ) from error


def _non_negative(name: str, value: object) -> Fraction:
    if not isinstance(value, Rational):
        raise GuaranteeError(
            f"{name} is {value!r}, and a loss is exact. Write Fraction('0.1'), or exact(0.1) for a setting."
        )
    fraction = Fraction(value)
    if fraction < 0:
        raise GuaranteeError(f"{name} is {fraction}, and no release gives privacy back. Use 0 or more.")
    return fraction


@record
class Pure:
    """epsilon-DP: on neighbours, no probability differs by more than a factor exp(epsilon). No delta."""

    epsilon: Fraction

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _non_negative("epsilon", self.epsilon))

    def __str__(self) -> str:
        return f"pure {self.epsilon}"


@record
class ZCDP:
    """rho-zCDP (Bun and Steinke 2016): on neighbours, the Renyi divergence of each order a > 1 is at most rho * a."""

    rho: Fraction

    def __post_init__(self) -> None:
        object.__setattr__(self, "rho", _non_negative("rho", self.rho))

    def __str__(self) -> str:
        return f"zcdp {self.rho}"


@record
class Renyi:
    """Renyi DP (Mironov 2017) at some integer orders: the divergence of order `orders[i]` is at most `values[i]`.

    Orders rise from 2 or more. Values never fall, as the divergence never falls with its order; so the value of the
    next order in the list also holds at an order between two of them.
    """

    orders: tuple[int, ...]
    values: tuple[Fraction, ...]

    def __post_init__(self) -> None:
        values = tuple(_non_negative("a Renyi value", value) for value in self.values)
        object.__setattr__(self, "values", values)
        if not self.orders or len(self.orders) != len(values):
            raise GuaranteeError(
                f"{len(self.orders)} orders and {len(values)} values: a Renyi loss has one value for each order, and "
                "at least one order."
            )
        if self.orders[0] < 2 or any(low >= high for low, high in pairwise(self.orders)):
            raise GuaranteeError(f"orders {self.orders}: a Renyi loss has rising integer orders, 2 or more.")
        if any(low > high for low, high in pairwise(values)):
            raise GuaranteeError(
                "a Renyi value falls as its order rises, and the divergence cannot. Replace each value by the least of "
                "those at its order and above."
            )

    def __str__(self) -> str:
        return "renyi " + ",".join(f"{order}:{value}" for order, value in zip(self.orders, self.values, strict=True))


@record
class Unbounded:
    """No guarantee at all: no noise, or a published form that proves nothing. Its epsilon is infinite."""

    def __str__(self) -> str:
        return "unbounded"


Loss = Pure | ZCDP | Renyi | Unbounded

_NUMBER = r"[0-9]+(?:/0*[1-9][0-9]*)?"
_RENYI = rf"[0-9]+:{_NUMBER}(?:,[0-9]+:{_NUMBER})*"
_PATTERN = re.compile(rf"pure ({_NUMBER})|zcdp ({_NUMBER})|renyi ({_RENYI})|unbounded")


def parse_loss(text: str) -> Loss:
    """The loss that `str` wrote: 'pure 1/10', 'zcdp 3/1000', 'renyi 2:1/50,3:3/50' or 'unbounded'. Exact."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise GuaranteeError(
            f"{text!r} is not a loss. A loss reads 'pure 1/10', 'zcdp 3/1000', 'renyi 2:1/50,3:3/50' or 'unbounded'."
        )
    pure, zcdp, renyi = match.groups()
    if pure is not None:
        return Pure(Fraction(pure))
    if zcdp is not None:
        return ZCDP(Fraction(zcdp))
    if renyi is not None:
        pairs = [pair.split(":") for pair in renyi.split(",")]
        return Renyi(tuple(int(order) for order, _ in pairs), tuple(Fraction(value) for _, value in pairs))
    return Unbounded()


def group(loss: Loss, k: int) -> Loss:
    """The loss of the same release when k of its samples are replaced at once, one after the other.

    Pure: k epsilon. ZCDP: k^2 rho, exact for the mechanisms here, whose sensitivity grows k-fold (in general group
    privacy of zCDP, Bun and Steinke 2016). A Renyi loss has no such rule of its own.
    """
    if k < 0:
        raise GuaranteeError(f"{k} samples cannot be replaced. Use 0 or more.")
    match loss:
        case Pure(epsilon):
            return Pure(k * epsilon)
        case ZCDP(rho):
            return ZCDP(k * k * rho)
        case Renyi():
            if k == 1:
                return loss
            raise GuaranteeError(
                f"the Renyi loss of {k} samples does not follow from that of one. Ask the mechanism for its loss at "
                f"{k} times its sensitivity, and charge that to the device."
            )
        case Unbounded():
            return loss


def _conversion(order: float, delta: float) -> tuple[float, float]:
    """c(a) = ln(1 / (a delta)) / (a - 1) + ln(1 - 1 / a), and a bound on its float error."""
    first, second = -(math.log(order) + math.log(delta)) / (order - 1.0), math.log1p(-1.0 / order)
    return first + second, SAFETY * (abs(math.log(delta)) / (order - 1.0) + abs(first) + abs(second))


def _least(f: Callable[[float], float]) -> float:
    """The order a > 1 at which f is least: a coarse search over ln(a - 1), then a golden section.

    Every order gives a valid bound, so that a poor answer costs tightness and never soundness.
    """
    ratio = (math.sqrt(5.0) - 1.0) / 2.0

    def at(u: float) -> float:
        return f(1.0 + math.exp(u))

    grid = [-9.0 + 0.5 * i for i in range(92)]  # a - 1 from 1e-4 to 1e16
    middle = min(grid, key=at)
    low, high = middle - 0.5, middle + 0.5
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = at(left), at(right)
    for _ in range(60):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = at(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = at(right)
    return 1.0 + math.exp((low + high) / 2.0)


def _up(value: Fraction) -> float:
    """The float at or just above, where a float stands for the decimal number that it prints as (9/10 is 0.9)."""
    try:
        nearest = float(value)
    except OverflowError:
        return math.inf
    return nearest if exact(nearest) >= value else math.nextafter(nearest, math.inf)


@record
class Total:
    """The composition of any mix of losses, exact; the order in which they came does not matter.

    pure: sum of epsilon. squares: sum of epsilon^2 / 2 of the same releases, their zCDP (Bun and Steinke 2016).
    zcdp: sum of rho. orders, values: the sum of the Renyi losses; without orders there are none.
    """

    pure: Fraction = ZERO
    squares: Fraction = ZERO
    zcdp: Fraction = ZERO
    orders: tuple[int, ...] = ()
    values: tuple[Fraction, ...] = ()
    unbounded: bool = False

    @staticmethod
    def of(losses: Iterable[Loss | Total]) -> Total:
        total = Total()
        for loss in losses:
            total = total + loss
        return total

    def __add__(self, other: Loss | Total) -> Total:
        match other:
            case Pure(epsilon):
                other = Total(pure=epsilon, squares=epsilon * epsilon / 2)
            case ZCDP(rho):
                other = Total(zcdp=rho)
            case Renyi(orders, values):
                other = Total(orders=orders, values=values)
            case Unbounded():
                other = Total(unbounded=True)
            case Total():
                pass
        orders, values = _add_renyi(self, other)
        return Total(
            self.pure + other.pure,
            self.squares + other.squares,
            self.zcdp + other.zcdp,
            orders,
            values,
            self.unbounded or other.unbounded,
        )

    def scaled(self, n: int) -> Total:
        """The total of n such totals one after the other. Exact."""
        if n < 0:
            raise GuaranteeError(f"a total cannot be spent {n} times. Use 0 or more.")
        if n == 0:
            return Total()
        values = tuple(n * value for value in self.values)
        return Total(n * self.pure, n * self.squares, n * self.zcdp, self.orders, values, self.unbounded)

    @property
    def is_pure(self) -> bool:
        """Whether it is epsilon-DP with delta = 0 for some finite epsilon.

        A divergence of zero at one order says that neighbours look the same, so the values at higher orders, which are
        bounds, may be larger and mean nothing.
        """
        return not self.unbounded and self.zcdp == 0 and not any(self.values[:1])

    def divergence(self, order: Fraction) -> Fraction | None:
        """A bound on the Renyi divergence of this order, exact; None if there is none.

        Pure epsilon has min(epsilon, a epsilon^2 / 2) at each order a, so its sum has min(pure, a squares).
        """
        renyi = _at(self.orders, self.values, order)
        if self.unbounded or renyi is None:
            return None
        return min(self.pure, order * self.squares) + order * self.zcdp + renyi

    def epsilon(self, delta: float) -> float:
        """The least epsilon at this delta that the losses prove, rounded up; infinite if they prove none.

        The least of two ways: the pure losses as zCDP, converted with the rest; or their plain sum, and the rest
        converted alone (nothing, where all losses are pure). Each conversion is the least over all orders.
        It holds for releases fixed in advance; of an open-ended run say what its `Filter` guarantees (pure totals
        hold either way).
        """
        _check_delta(delta)
        if self.unbounded:
            return math.inf
        if delta == 0.0 or self == Total():
            return _up(self.pure) if self.is_pure else math.inf
        return min(self._ways(delta))[0]

    def _ways(self, delta: float) -> list[tuple[float, float]]:
        """(epsilon, order): all of it as Renyi divergence; the pure part as it is, and the rest so."""
        whole = _convert(self.squares + self.zcdp, self.orders, self.values, delta)
        if self.is_pure:
            return [whole, (_up(self.pure), whole[1])]
        rest, order = _convert(self.zcdp, self.orders, self.values, delta)
        return [whole, (math.nextafter(_up(self.pure) + rest, math.inf) if self.pure else rest, order)]


@lru_cache(maxsize=256)  # a plan is asked for its epsilon and, for a filter, for its order
def _convert(rho: Fraction, orders: tuple[int, ...], values: tuple[Fraction, ...], delta: float) -> tuple[float, float]:
    """The least epsilon of rho-zCDP and Renyi losses together, rounded up, and its order.

    Renyi values are constant from one listed order to the next, so the least is at a listed order, or where the rest
    of the formula has its own least.
    """

    def at(order: float) -> float:
        renyi = _at(orders, values, Fraction(order))
        if renyi is None:
            return math.inf
        value, error = _conversion(order, delta)
        return max(0.0, _up(Fraction(order) * rho + renyi) * (1.0 + SAFETY) + value + error)

    own = _own_order(_up(rho), delta)
    return min((at(order), order) for order in (*(float(order) for order in orders), own))


@lru_cache(maxsize=256)
def _own_order(slope: float, delta: float) -> float:
    """The order at which a divergence that grows by `slope` with its order is converted best."""
    return _least(lambda order: order * slope + _conversion(order, delta)[0])


def _at(orders: tuple[int, ...], values: tuple[Fraction, ...], order: Fraction | int) -> Fraction | None:
    """The value at the next listed order, which bounds the one asked for; zero without orders; None above the last."""
    if not orders:
        return ZERO
    place = bisect_left(orders, order)
    return values[place] if place < len(orders) else None


def _add_renyi(one: Total, other: Total) -> tuple[tuple[int, ...], tuple[Fraction, ...]]:
    """The sum of two step functions, on all orders of both up to the last that both reach."""
    if not one.orders or not other.orders:
        return one.orders + other.orders, one.values + other.values
    if one.orders == other.orders:
        return one.orders, tuple(a + b for a, b in zip(one.values, other.values, strict=True))
    last = min(one.orders[-1], other.orders[-1])
    orders = tuple(sorted({order for order in one.orders + other.orders if order <= last}))
    sums = [(_at(one.orders, one.values, order), _at(other.orders, other.values, order)) for order in orders]
    return orders, tuple(a + b for a, b in sums if a is not None and b is not None)


def _check_delta(delta: float) -> None:
    if not 0.0 <= delta < 1.0:
        raise GuaranteeError(f"delta is {delta!r}. Use 0 for pure losses, or a number far below 1 / samples, as 1e-6.")


@lru_cache(maxsize=256)
def _zcdp_order(epsilon: Fraction, delta: float) -> float:
    """The order at which a budget holds the largest rho."""
    return _least(lambda order: (_conversion(order, delta)[0] - float(epsilon)) / order)


@record
class Filter:
    """Says whether one more release keeps an open-ended, adaptive run (epsilon, delta)-DP. Fixed before the run.

    Guarantee: let each release, its loss and the decision to go on depend in any way on the releases before it. If
    every release was allowed, the whole run is (epsilon, delta)-DP for the samples whose totals were asked about, with
    the neighbours and observer of the charges.

    Two rules, and a release may pass either. (1) All losses are pure and their sum is at most epsilon: then the
    privacy loss never exceeds epsilon, on any path. (2) At one order a, fixed here and never chosen from what was
    released, the Renyi divergences sum to at most epsilon - c(a) (Feldman and Zrnic 2021); zCDP is charged a rho and
    pure losses min(epsilon, a epsilon^2 / 2). For zCDP losses alone rule (2) is "sum of rho at most `rho_for`".

    To allow what either of two filters allows is in general (epsilon, delta1 + delta2), and the least epsilon over
    all orders after the fact (`Total.epsilon`) is no filter at all. These two may be joined at no cost because rule
    (1) has delta = 0: a run that ends under it adds nothing to the hockey-stick divergence, and a run that ends under
    (2) was under (2) all along. Proof: docs/proofs/composition.md.
    """

    epsilon: Fraction
    delta: float
    order: Fraction | None  # of rule (2); None: rule (1) alone, which is all that delta = 0 permits

    @staticmethod
    def of(epsilon: Fraction | float, delta: float, plan: Total | None = None) -> Filter:
        """The filter of a budget. Its order is the best for zCDP losses, or for `plan` where that is known.

        `plan` must be public and fixed before the run: for example what one sample is to pay in all. A plan whose
        `epsilon(delta)` is within the budget is then always allowed.
        """
        _check_delta(delta)
        if epsilon == math.inf:
            raise GuaranteeError("a budget of infinite epsilon is no budget. Name a number, or do not ask a filter.")
        budget = _non_negative("epsilon", exact(epsilon))
        if delta == 0.0:
            return Filter(budget, delta, None)
        order = _zcdp_order(budget, delta) if plan is None or plan == Total() else min(plan._ways(delta))[1]
        return Filter(budget, delta, Fraction(order))

    @property
    def divergence(self) -> Fraction | None:
        """What rule (2) allows the divergences of its order to sum to, rounded down; None without an order."""
        if self.order is None:
            return None
        value, error = _conversion(float(self.order), self.delta)
        return self.epsilon - Fraction(value) - Fraction(error)

    def allows(self, total: Total, cost: Loss | Total) -> bool:
        """Whether a release that costs `cost` may follow releases that cost `total`."""
        after = total + cost
        if after.is_pure and after.pure <= self.epsilon:
            return True
        limit = self.divergence
        if self.order is None or limit is None:
            return False
        spent = after.divergence(self.order)
        return spent is not None and spent <= limit
