"""How a server and its tasks fare, as an operator sees it: pace, staleness, refusals, and what the crowd has spent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from statistics import median, median_low
from typing import Any

from markupsafe import Markup

from crowdml.server.gathering import OWN
from crowdml.server.hub import Hosted, Hub
from crowdml.server.plot_points import Moment
from crowdml.server.portal.figures import Figures
from crowdml.server.portal.studies import charts_of, find_price
from crowdml.server.sifting import FARTHEST, Sifted
from crowdml.storage.server import Counts, Store, StoredTask
from crowdml.storage.server.operating import index_before, latest_arrival, recent_devices, spent_statements
from crowdml.texts import count_text, number_text
from crowdml.wire.envelopes import open_signed
from crowdml.wire.problems import PROBLEMS
from crowdml.wire.statements import Statement, total_of

DELTA = 1e-6
LOOKED_AT = 200
"""How many of the last check-ins have their staleness measured, if their bodies are still kept."""
LATE = "round-over"
FRESH = 15.0
"""Seconds for which the crowd's totals are not added up again."""


# --- one task ---


@dataclass(frozen=True)
class Staleness:
    """Updates between a check-out and the arrival of its check-in, over the last so many."""

    over: int
    middle: float
    most: int


@dataclass(frozen=True)
class Lately:
    """How a task went in the last minutes and in the last hour."""

    last_at: str | None
    per_minute: float
    hour: int
    active: int
    """Devices that gave something in the last hour."""
    staleness: Staleness | None


def lately(hub: Hub, hosted: Hosted) -> Lately:
    """In a thread: a few short reads."""
    store, hash_ = hub.store, hosted.task.hash
    now = datetime.fromisoformat(hub.clock())
    then = [(now - timedelta(minutes=ago)).isoformat() for ago in (5, 60)]
    places = [index_before(store, hash_, each) for each in then]
    five, hour = (place - store.totals_count(hash_, place) for place in places)
    given = max(hosted.check_ins, hour)
    return Lately(
        latest_arrival(store, hash_),
        (given - five) / 5,
        given - hour,
        recent_devices(store, hash_, places[1]) if given > hour else 0,
        _staleness(hub, store, hash_, given),
    )


def _staleness(hub: Hub, store: Store, hash_: bytes, index: int) -> Staleness | None:
    runner = hub.runners.get(hash_)
    if runner is None or not index or runner.rounds is not None or runner.fold.gathering is not None:
        return None  # a round works with one version
    late: list[int] = []
    for place, data in store.kept_bodies(hash_, max(0, index - LOOKED_AT)):
        envelope = open_signed(data).envelope
        if envelope.kind in OWN:
            continue
        version = getattr(runner.fold.read(envelope.kind, envelope.body), "version", None)
        if version is not None:
            own = store.totals_count(hash_, place) if runner.own else 0
            late.append(max(0, place - 1 - own - int(version)))
        if len(late) >= LOOKED_AT:
            break
    return Staleness(len(late), float(median(late)), max(late)) if late else None


# --- the crowd's budgets ---


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal width; `edges` has one more than `counts`."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    middle: float
    most: float
    least: float

    @property
    def is_one(self) -> bool:
        """Whether all values are the same, to what people read: then there is nothing to spread."""
        return self.most - self.least <= 0.005 * self.most


@dataclass(frozen=True)
class Spent:
    """What devices said to have spent, over all tasks. `looked_at` of the `devices` that gave something."""

    devices: int
    looked_at: int
    sample: Histogram | None
    device: Histogram | None
    samples: Histogram | None


@lru_cache(8192)
def epsilon_of(losses: tuple[str, ...]) -> float:
    """The epsilon of a stated total at the usual delta."""
    return total_of(losses).epsilon(DELTA)


def spent(store: Store) -> Spent:
    """In a thread."""
    devices, found = spent_statements(store)
    return Spent(
        devices,
        len(found),
        _histogram([epsilon_of(each.dearest) for each in found]),
        _histogram([epsilon_of(each.device) for each in found]),
        _histogram([float(each.samples) for each in found]),
    )


def said(statement: Statement | None) -> tuple[float, float, int] | None:
    """A statement's epsilon of the dearest sample, of the device, and its samples."""
    if statement is None:
        return None
    return epsilon_of(statement.dearest), epsilon_of(statement.device), statement.samples


def _histogram(values: Sequence[float], bins: int = 12) -> Histogram | None:
    finite = [value for value in values if value != float("inf")]
    if not finite:
        return None
    high = max(finite) or 1.0
    counts = [0] * bins
    for value in finite:
        counts[min(bins - 1, int(bins * (value / high)))] += 1
    edges = tuple(high * (place / bins) for place in range(bins + 1))
    return Histogram(edges, tuple(counts), median_low(finite), high, min(finite))


# --- the whole server ---


@dataclass(frozen=True)
class Refusal:
    """A reason, how often since the start, and what it means."""

    slug: str
    count: int
    title: str
    help: str


@dataclass(frozen=True)
class Row:
    """A task on the dashboard."""

    hosted: Hosted
    stored: StoredTask | None
    lately: Lately
    figures: Figures

    @property
    def id(self) -> str:
        return self.hosted.task.hash.hex()[:12]

    @property
    def counts_errors(self) -> bool:
        return "error" in charts_of(self.hosted.task)


@dataclass(frozen=True)
class Health:
    counts: Counts
    active: int
    free: int | None
    is_full: bool
    refusals: tuple[Refusal, ...]
    late: int
    """How often a device missed a phase of its round: nobody's fault, and no refusal."""
    spent: Spent


class _Kept:
    """The last totals, for a dashboard that is loaded every few seconds by several people."""

    def __init__(self) -> None:
        self.at, self.spent = 0.0, None
        self.lock = asyncio.Lock()


async def health(state: Any) -> Health:
    """What the dashboard shows besides tasks. `state` is the application's."""
    hub: Hub = state.hub
    if not hasattr(state, "spent"):
        state.spent = _Kept()
    kept: Any = state.spent
    async with kept.lock:
        if kept.spent is None or time.monotonic() - kept.at > FRESH:
            kept.spent, kept.at = await asyncio.to_thread(spent, hub.store), time.monotonic()
    counts = await asyncio.to_thread(hub.store.counts)
    refusals = sorted(hub.counts.items(), key=lambda pair: -pair[1])
    return Health(
        counts,
        len(hub.keys),
        hub.store.free_space(),
        hub.is_full(),
        tuple(
            Refusal(slug, count, PROBLEMS[slug].title, PROBLEMS[slug].help)
            for slug, count in refusals
            if slug in PROBLEMS and slug != LATE
        ),
        hub.counts.get(LATE, 0),
        kept.spent,
    )


async def rows(hub: Hub, figures: Any) -> list[Row]:
    """Every task, those that run first. `figures` reads the plots of a task."""
    order = {"running": 0, "paused": 1, "draft": 2, "stopped": 3}
    stored = {each.hash: each for each in await asyncio.to_thread(hub.store.tasks)}
    found = sorted(hub.hosted(), key=lambda each: order[each.state])
    for each in found:
        await find_price(each.task)  # or the page would work it out, on the event loop
    return [
        Row(each, stored.get(each.task.hash), await asyncio.to_thread(lately, hub, each), await figures(each.task))
        for each in found
    ]


# --- small drawings ---


def steps(moments: Sequence[Moment], now: str, title: str, width: int = 640, height: int = 90) -> Markup:
    """Check-ins over time up to `now`: at each moment one step up, and flat since the last. The page has the labels."""
    at = [datetime.fromisoformat(each.at).timestamp() for each in moments]
    counts = [each.tally.check_ins for each in moments]
    ends = max(at[-1], datetime.fromisoformat(now).timestamp())
    wide, high = (ends - at[0]) or 1.0, counts[-1] or 1
    x = [f"{2 + (each - at[0]) / wide * (width - 4):.1f}" for each in (*at, ends)]
    y = [f"{height - 3 - count / high * (height - 6):.1f}" for count in counts]
    steps = "".join(f"H{right}V{up}" for right, up in zip(x[1:-1], y[1:], strict=True))
    return Markup(
        '<svg class="spark" viewBox="0 0 {w} {h}" preserveAspectRatio="none" role="img" aria-label="{t}"><path '
        'd="{d}" fill="none" stroke="currentColor" stroke-width="2" vector-effect="non-scaling-stroke"/></svg>'
    ).format(w=width, h=height, t=title, d=f"M{x[0]},{y[0]}{steps}H{x[-1]}")


def bars(found: Histogram, title: str) -> Markup:
    """A histogram. Its numbers stand below it; its title says what it shows."""
    said = [" to ".join(map(number_text, found.edges[place : place + 2])) for place in range(len(found.counts))]
    told = [f"{where}: {count_text(count, 'device')}" for where, count in zip(said, found.counts, strict=True)]
    return _boxes(found.counts, told, title, 320, 56)


def distances(round_: Sifted, what: str, width: int = 640, height: int = 72) -> Markup:
    """How far the uploads of a round are from its result, over the median distance."""
    edges = [*(f"{place / 4:g} to {(place + 1) / 4:g}" for place in range(4 * FARTHEST - 1)), f"{FARTHEST - 0.25:g} on"]
    told = [f"{where}: {count_text(count, what)}" for where, count in zip(edges, round_.spread, strict=True)]
    title = f"Round {round_.number}: distances from the result, over the median, of {count_text(round_.uploads, what)}"
    return _boxes(round_.spread, told, title, width, height)


def scores(round_: Sifted, what: str, width: int = 640, height: int = 72) -> Markup:
    """What the uploads of a round scored on public rows, from the least to the best."""
    low, high, counts = min(round_.scores), max(round_.scores), round_.score_counts
    step = (high - low) / len(counts)
    told = [
        f"{number_text(low + place * step)} to {number_text(low + (place + 1) * step)}: {count_text(count, what)}"
        for place, count in enumerate(counts)
    ]
    return _boxes(counts, told, f"Round {round_.number}: scores of {count_text(round_.uploads, what)}", width, height)


def _boxes(counts: Sequence[int], told: Sequence[str], title: str, width: int, height: int) -> Markup:
    most, step = max(counts) or 1, width / len(counts)
    boxes = Markup("").join(
        Markup(
            '<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="2" fill="currentColor"><title>{t}</title></rect>'
        ).format(
            x=f"{place * step + 1:.1f}",
            y=f"{height - max(1.5, count / most * (height - 4)):.1f}",
            w=f"{step - 2:.1f}",
            h=f"{max(1.5, count / most * (height - 4)):.1f}",
            t=said,
        )
        for place, (count, said) in enumerate(zip(counts, told, strict=True))
    )
    return Markup('<svg class="bars" viewBox="0 0 {w} {h}" role="img" aria-label="{t}">{b}</svg>').format(
        w=width, h=height, t=title, b=boxes
    )
