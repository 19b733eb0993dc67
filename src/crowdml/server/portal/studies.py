"""A study as people see it: a hosted task, its price in full, and how it stands."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from dataclasses import dataclass

from starlette.requests import Request

from crowdml.price import Price
from crowdml.privacy.losses import ZCDP, Loss, Pure, Renyi
from crowdml.protocols import find
from crowdml.protocols.registry import plugins_of
from crowdml.server.histograms import is_histogram
from crowdml.server.hub import Hosted, Hub
from crowdml.server.portal.cache import kept
from crowdml.server.portal.figures import CHARTS, LOOKS, Figures
from crowdml.server.portal.words import Words
from crowdml.server.rounds import RoundFigures
from crowdml.storage.server import State
from crowdml.task import Task
from crowdml.wire.problems import Problem

SHORTEST = 12
"""Hex digits of a task's hash in an address."""
COUNTED = {"error": {"errors"}, "labels": {"labels", "counts"}}
"""What a plot needs a study's devices to let out: one of these rows of its mechanisms."""


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
    """The cohorts of a masked task; None for any other."""
    runner = hub.runners.get(task.hash)
    if runner is None or runner.rounds is None:
        return None
    counts = runner.rounds.counts
    known = hub.round_figures(task.hash)
    over = tuple(each for each in known if each.phase in ("summed", "abandoned") and each.devices)
    abandoned = sum(many for how, many in counts.items() if how != "summed")
    return Cohorts(counts.get("summed", 0), abandoned, over)


ENDINGS = frozenset({"steps", "error", "diverged", "delta", "windows", "noise"})
"""Rules that the catalogue of words has a sentence for."""


@dataclass(frozen=True)
class Study:
    """`closed`: only devices that joined may read what it publishes, so how it goes is not shown here."""

    task: Task
    state: State
    closed: bool
    rule: str | None
    """The name of the rule that ended it."""
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
    def plugins(self) -> tuple[str, ...]:
        """What a device has to have installed besides crowdml."""
        return plugins_of(self.task)

    @property
    def ended_by(self) -> str:
        """Which rule ended it, by its name in the catalogue of words; "rule" for one that is not in it."""
        return "plainly" if self.rule is None else self.rule if self.rule in ENDINGS else "rule"

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
                found = _PRICES[task.hash] = Price.of(find(task), task)
                _ = found.plain  # every total, now and in this thread
                if len(_PRICES) > MOST_PRICES:
                    _PRICES.popitem(last=False)
    return found


async def find_price(task: Task) -> Price:
    """`price_of` for the event loop: a price that is not known yet is worked out in a thread."""
    found = _PRICES.get(task.hash)
    return await asyncio.to_thread(price_of, task) if found is None else found


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
    return Study(hosted.task, hosted.state, closed, hosted.ended_by, hosted.check_ins, figures, price)
