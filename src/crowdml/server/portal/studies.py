"""A study as people see it: a hosted task, its price in full, and how it stands."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import OrderedDict
from dataclasses import dataclass

from starlette.requests import Request

from crowdml.privacy.losses import ZCDP, Loss, Pure, Renyi, Total
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.odds import Odds, odds
from crowdml.protocol import Quote, affordable, quote
from crowdml.protocols import find, refusal
from crowdml.server.histograms import is_histogram
from crowdml.server.hub import Hosted, Hub
from crowdml.server.portal.figures import CHARTS, LOOKS, Figures
from crowdml.server.portal.kept import kept
from crowdml.server.portal.words import Words
from crowdml.server.rounds import RoundFigures
from crowdml.storage.server import State
from crowdml.task import Task
from crowdml.wire.problems import Problem

__all__ = [
    "Cohorts",
    "Price",
    "Row",
    "Study",
    "charts_of",
    "cohorts_of",
    "find_price",
    "find_study",
    "price_of",
    "shown_loss",
    "studies",
]

SHORTEST = 12
"""Hex digits of a task's hash in an address."""
COUNTED = {"error": {"errors"}, "labels": {"labels", "counts"}}
"""What a plot needs a study's devices to let out: one of these rows of its mechanisms."""


@dataclass(frozen=True)
class Row:
    """Something that leaves a device: its mechanism with every parameter, and what one release costs."""

    name: str
    mechanism: Mechanism
    parameters: tuple[tuple[str, float | int | str], ...]
    """By their names in the catalogue."""
    loss: Loss
    sample: float
    device: float
    sample_alone: float
    """If everyone else colludes: more than `sample` where it leaves under masks."""
    device_alone: float

    @property
    def adjacency(self) -> str:
        return self.mechanism.sensitivity.adjacency.value

    @property
    def observer(self) -> str:
        return self.mechanism.observer.value


@dataclass(frozen=True)
class Price:
    """What a study costs a device: its dearest sample and everything it gives, once and over the whole budget."""

    quote: Quote
    rows: tuple[Row, ...]
    batch: int
    check_ins: int | None
    """How many the task's budget allows; None: it has no budget."""
    sample: float
    """The dearest sample's, in all its uses."""
    sample_once: float
    """In one check-in."""
    device: float
    device_all: float | None
    sample_alone: float
    """If everyone else colludes; the same where nothing leaves under masks."""
    device_alone: float
    device_all_alone: float | None

    @property
    def delta(self) -> float:
        return self.quote.delta

    @property
    def odds(self) -> Odds:
        """How often a guess about one sample can be right, after all check-ins in which it served."""
        return odds(self.sample, self.delta)

    @property
    def odds_alone(self) -> Odds:
        """The odds of that guess if everyone else colludes."""
        return odds(self.sample_alone, self.delta)

    @property
    def odds_device(self) -> Odds:
        """How often a guess about all samples of a device can be right, after one check-in."""
        return odds(self.device, self.delta)

    @property
    def odds_device_all(self) -> Odds:
        """The odds of a guess about all samples of a device, after all check-ins; without a budget they never end."""
        return odds(math.inf if self.device_all is None else self.device_all, self.delta)

    def device_after(self, check_ins: int) -> float:
        """The device's total after so many check-ins."""
        return self.quote.device_epsilon(check_ins) if check_ins else 0.0

    def device_alone_after(self, check_ins: int) -> float:
        """The same if everyone else colludes."""
        return self.quote.device_epsilon_alone(check_ins) if check_ins else 0.0


@dataclass(frozen=True)
class Cohorts:
    """How the rounds of a masked study went: cohorts that were added up, devices in them and in the sums."""

    summed: int
    abandoned: int
    recent: tuple[RoundFigures, ...]
    """The newest rounds that are over."""

    @property
    def survived(self) -> int:
        return sum(each.survived for each in self.recent if each.phase == "summed")

    @property
    def devices(self) -> int:
        return sum(each.devices for each in self.recent if each.phase == "summed")


def cohorts_of(hub: Hub, task: Task) -> Cohorts | None:
    """Of a masked task; None of any other."""
    runner = hub.runners.get(task.hash)
    if runner is None or runner.rounds is None:
        return None
    counts = runner.rounds.counts
    known = hub.round_figures(task.hash)
    over = tuple(each for each in known if each.phase in ("summed", "abandoned") and each.devices)
    abandoned = sum(many for how, many in counts.items() if how != "summed")
    return Cohorts(counts.get("summed", 0), abandoned, over)


@dataclass(frozen=True)
class Study:
    """`closed`: only devices that joined may read what it publishes, so how it goes is not shown here."""

    task: Task
    state: State
    closed: bool
    reason: str | None
    check_ins: int
    figures: Figures
    price: Price

    @property
    def id(self) -> str:
        return self.task.hash.hex()[:SHORTEST]

    @property
    def title(self) -> str:
        return self.task.title or self.task.name

    @property
    def path(self) -> str:
        return f"/studies/{self.id}"

    @property
    def ended_by(self) -> str:
        """Which rule ended it, by its name in the catalogue: a protocol gives its reason to operators, in English."""
        if self.reason is None:
            return "plainly"
        refused = refusal(self.task)
        if refused is not None and self.reason == refused.reason:
            return refused.kind
        if "no longer finite" in self.reason:
            return "diverged"
        stop = self.task.stop
        if stop.steps is not None and self.reason.startswith(f"{stop.steps} "):
            return "steps"
        return "error" if stop.error is not None and "error" in self.reason else "rule"

    @property
    def is_histogram(self) -> bool:
        return is_histogram(self.task)

    @property
    def keeps(self) -> int:
        """Batches of samples that a device keeps, to learn from for itself."""
        return find(self.task).keeps(self.task)

    @property
    def person(self) -> int:
        """In how many measurements a person may be, as the task says."""
        return int(self.task.protocol.get("person", 1))

    @property
    def charts(self) -> tuple[str, ...]:
        """The plots that there are or will be: of looks at the operator's rows, of what devices count, of devices."""
        seen = self.figures.watched
        return ((seen.measure,) if seen is not None else ()) + charts_of(self.task)


def charts_of(task: Task) -> tuple[str, ...]:
    rows = {each.name for each in price_of(task).rows}
    return tuple(name for name in CHARTS if name not in LOOKS and (name not in COUNTED or COUNTED[name] & rows))


MOST_PRICES = 4096
_PRICES: OrderedDict[bytes, Price] = OrderedDict()
"""The price of each task by its hash: a masked one takes tens of milliseconds, and it never changes."""
_PRICING = threading.Lock()


def price_of(task: Task) -> Price:
    """The price of a task, worked out once in the life of this process, whoever asks for it."""
    found = _PRICES.get(task.hash)
    if found is None:
        with _PRICING:
            found = _PRICES.get(task.hash)
            if found is None:
                found = _PRICES[task.hash] = _work_out(task)
                if len(_PRICES) > MOST_PRICES:
                    _PRICES.popitem(last=False)
    return found


async def find_price(task: Task) -> Price:
    """`price_of` for the event loop: a price that is not known yet is worked out in a thread."""
    found = _PRICES.get(task.hash)
    return await asyncio.to_thread(price_of, task) if found is None else found


def _work_out(task: Task) -> Price:
    protocol = find(task)
    priced, allowed = quote(protocol, task), affordable(protocol, task)
    rows = tuple(
        Row(
            each.row,
            each.mechanism,
            tuple(_parameters(each.mechanism)),
            each.loss,
            Total.of([each.loss]).epsilon(priced.delta),
            Total.of([each.device_loss]).epsilon(priced.delta),
            Total.of([each.alone]).epsilon(priced.delta),
            Total.of([each.device_alone]).epsilon(priced.delta),
        )
        for each in priced.rows
    )
    return Price(
        priced,
        rows,
        protocol.batch(task),
        allowed,
        priced.sample_epsilon(task.privacy.uses),
        priced.sample_epsilon(),
        priced.device_epsilon(),
        None if not allowed else priced.device_epsilon(allowed),
        priced.sample_epsilon_alone(task.privacy.uses),
        priced.device_epsilon_alone(),
        None if not allowed else priced.device_epsilon_alone(allowed),
    )


def _parameters(mechanism: Mechanism) -> list[tuple[str, float | int | str]]:
    found: list[tuple[str, float | int | str]] = []
    if getattr(mechanism, "clip", None) is not None:
        name = "clip_whole" if getattr(mechanism, "whole", False) else "clip"
        found.append((name, float(getattr(mechanism, "clip") * mechanism.grid.step)))  # noqa: B009
        found.append(("grid", float(mechanism.grid.step)))
    law = mechanism.law
    if law is not None:
        found.append((law.parameter, law.size))
    if law is not None and law.honest is not None:
        found += [("sum", law.size_in_sum), ("honest", law.honest)]
    found.append(("covers", mechanism.covers.size))
    return found


def shown_loss(loss: Loss, said: Words) -> str:
    """A loss as the literature writes it."""
    if isinstance(loss, Pure):
        return said("study.exact.pure", value=said.number(float(loss.epsilon), 4))
    if isinstance(loss, ZCDP):
        return said("study.exact.zcdp", value=said.number(float(loss.rho), 4))
    if isinstance(loss, Renyi):
        values = dict(zip(loss.orders, loss.values, strict=True))
        shown = "; ".join(f"{order}: {said.number(float(values[order]), 3)}" for order in (2, 8, 32) if order in values)
        return said("study.exact.renyi", values=shown)
    return str(loss)


async def studies(request: Request) -> list[Study]:
    """Every study that people may know of: all but drafts."""
    hub: Hub = request.app.state.hub
    return [await _study(request, each) for each in hub.hosted() if each.state != "draft"]


async def find_study(request: Request, name: str) -> Study:
    """The study whose hash begins with these digits, twelve of them or more; 404."""
    hub: Hub = request.app.state.hub
    if SHORTEST <= len(name) <= 64:
        for each in hub.hosted():
            if each.state != "draft" and each.task.hash.hex().startswith(name):
                return await _study(request, each)
    raise Problem("unknown-task", "No such study here.")


async def _study(request: Request, hosted: Hosted) -> Study:
    held = kept(request)
    figures, closed = await held.figures(hosted.task), await held.closed(hosted.task)
    price = await find_price(hosted.task)
    return Study(hosted.task, hosted.state, closed, hosted.reason, hosted.check_ins, figures, price)
