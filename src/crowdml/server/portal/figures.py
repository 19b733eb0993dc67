"""Figures: what a study's plots show, and the plots themselves as SVG and PNG.

Error rate and label shares come from noisy counts alone, so whoever looks at them learns no more about a sample than
the devices' releases say: computing on is free. An interval holds what the noise and the choice of samples leave
open, together about 95 %. Where it is wider than everything that is possible, no number is shown.
"""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from crowdml.protocol import Noisy
from crowdml.server.estimates import REACH, Estimate, judged, share_of
from crowdml.server.plot_points import Moment
from crowdml.server.portal.words import Words
from crowdml.server.validation import Watched
from crowdml.task import Task
from crowdml.texts import number_text
from crowdml.verdict import Verdict

SHARP = 0.05
"""Half the width that a window of check-ins aims at, as far as the noise goes."""
DAY = 24 * 3600


@dataclass(frozen=True)
class Error:
    """The error rate over a window of check-ins that ends at `check_ins`."""

    check_ins: int
    window: int
    rate: Estimate


@dataclass(frozen=True)
class Figures:
    """Everything that a study's plots show, as of its last moment."""

    moments: tuple[Moment, ...]
    errors: tuple[Error, ...]
    labels: tuple[tuple[str, Estimate], ...]
    needed: int | None
    """Check-ins after which the noise leaves the error rate open by 10 points of a hundred; None: nobody counts."""
    watched: Watched | None = None
    """How the model does on the operator's own rows; None: nobody looks."""
    devices: int = 0
    """Those that gave something and are still in. The curve over time has everybody who gave something."""
    verdict: Verdict | None = None
    """What the last error rate is worth; None where there is none, or the noise hides it."""

    @property
    def index(self) -> int:
        """Rises with everything new: check-ins, and looks at the operator's own rows."""
        looks = 0 if self.watched is None else len(self.watched.shown)
        return looks + (self.moments[-1].index if self.moments else 0)

    @property
    def shown(self) -> tuple[Error, ...]:
        """Errors that are not hidden."""
        return tuple(each for each in self.errors if not each.rate.hidden)

    def plain(self) -> dict[str, Any]:
        """For the interactive charts."""
        return {
            "index": self.index,
            "error": _series([each.check_ins for each in self.shown], [each.rate.clipped for each in self.shown]),
            "labels": _series([name for name, _ in self.labels], [share.clipped for _, share in self.labels]),
            "check-ins": {
                "x": [each.at for each in self.moments],
                "y": [each.tally.check_ins for each in self.moments],
            },
            "devices": {"x": [each.at for each in self.moments], "y": [each.devices for each in self.moments]},
            **({} if self.watched is None else {self.watched.measure: _series(*looks_at(self.watched))}),
        }


def looks_at(watched: Watched) -> tuple[list[int], list[Estimate]]:
    """Versions of a model, and how well each did: an accuracy within [0, 1], or a distance."""
    figures = [each.figure for each in watched.shown]
    is_share = watched.measure == "accuracy"
    return [each.version for each in watched.shown], [each.clipped if is_share else each for each in figures]


def _series(x: Sequence[Any], y: Sequence[Estimate]) -> dict[str, Any]:
    return {
        "x": list(x),
        "y": [each.value for each in y],
        "low": [each.low for each in y],
        "high": [each.high for each in y],
    }


def work_out(task: Task, moments: Sequence[Moment], watched: Watched | None = None, devices: int = 0) -> Figures:
    """The figures behind these moments, oldest first. `devices`: how many are in now."""
    if not moments:
        return Figures((), (), (), None, watched, devices)
    last = moments[-1].tally
    labels: tuple[tuple[str, Estimate], ...] = ()
    if last.labels is not None and last.labels.samples:
        names = task.labels.classes or _bins(task, len(last.labels.counts))
        labels = tuple((name, share_of(last.labels, place)) for place, name in enumerate(names))
    needed, errors = _needed(last.errors, 0.1, last.check_ins), _errors(moments)
    found = judged(task, errors[-1].rate.rest, _majority(labels)) if errors else None
    return Figures(tuple(moments), errors, labels, needed, watched, devices, found)


def _majority(labels: Sequence[tuple[str, Estimate]]) -> float | None:
    """The share of the most common class among the crowd's samples, where its noisy counts tell."""
    most = max((share for _, share in labels), key=lambda share: share.value, default=None)
    return most.clipped.value if most is not None and (most.high - most.low) / 2 <= SHARP else None


def _errors(moments: Sequence[Moment]) -> tuple[Error, ...]:
    """At each moment, the error rate over the check-ins of a window before it; from the start where there are fewer."""
    last = moments[-1].tally
    if last.errors is None or not last.errors.samples:
        return ()
    window = max(_needed(last.errors, SHARP, last.check_ins) or 0, last.check_ins // 20)
    found: list[Error] = []
    begin = 0
    for each in moments:
        now = each.tally
        if now.errors is None or not now.check_ins:
            continue
        while begin + 1 < len(moments) and moments[begin + 1].tally.check_ins <= now.check_ins - window:
            begin += 1
        start = moments[begin].tally
        far = start.errors is not None and start.check_ins <= now.check_ins - window
        between = _less(now.errors, start.errors) if far and start.errors is not None else now.errors
        since = now.check_ins - (start.check_ins if far else 0)
        if between.samples:
            found.append(Error(now.check_ins, since, share_of(between, 0)))
    return tuple(found)


def _less(now: Noisy, before: Noisy) -> Noisy:
    counts = tuple(a - b for a, b in zip(now.counts, before.counts, strict=True))
    return Noisy(counts, now.samples - before.samples, now.variance - before.variance)


def _needed(noisy: Noisy | None, half: float, check_ins: int) -> int | None:
    """Check-ins after which the noise alone leaves an interval of `half` to either side."""
    if noisy is None or not check_ins:
        return None
    samples, variance = noisy.samples / check_ins, noisy.variance / check_ins
    return math.ceil(variance * (REACH / (half * samples)) ** 2)


def _bins(task: Task, cells: int) -> tuple[str, ...]:
    """Names of the equal intervals that a number's range is counted in."""
    low, high = task.labels.ends
    edges = [low + (high - low) * place / cells for place in range(cells + 1)]
    return tuple(f"{number_text(low)} … {number_text(high)}" for low, high in pairwise(edges))


# --- drawing ---

Axes = Any  # matplotlib's, which is imported when the first plot is drawn

THEMES = {
    "light": {"ink": "#1b2624", "quiet": "#566461", "line": "#d8dfdc", "accent": "#0b6b64", "back": "#ffffff"},
    "dark": {"ink": "#e6edeb", "quiet": "#a3b3af", "line": "#2f3b38", "accent": "#5fcabf", "back": "#18201e"},
}


def _draw_error(axes: Axes, figures: Figures, said: Words, look: dict[str, str]) -> None:
    x, rates = [each.check_ins for each in figures.shown], [each.rate.clipped for each in figures.shown]
    low, high = [each.low for each in rates], [each.high for each in rates]
    axes.fill_between(x, low, high, color=look["accent"], alpha=0.18, linewidth=0)
    axes.plot(x, [each.value for each in rates], color=look["accent"], linewidth=2)
    axes.set_ylim(0.0, max(0.1, *high))
    axes.yaxis.set_major_formatter(lambda value, _: said.percent(value, 0))
    axes.xaxis.set_major_formatter(lambda value, _: said.number(round(value)))
    axes.set_xlabel(said("chart.axis.check-ins"))


def _draw_looks(axes: Axes, figures: Figures, said: Words, look: dict[str, str]) -> None:
    assert figures.watched is not None
    is_share = figures.watched.measure == "accuracy"
    x, shown = looks_at(figures.watched)
    y, low, high = [each.value for each in shown], [each.low for each in shown], [each.high for each in shown]
    if figures.watched.found.terms.epsilon is not None:
        axes.fill_between(x, low, high, color=look["accent"], alpha=0.18, linewidth=0)
    axes.plot(x, y, color=look["accent"], linewidth=2, marker="o", markersize=4 if len(x) <= 60 else 0)
    axes.set_ylim(*reach_of(low, high, is_share=is_share))
    axes.yaxis.set_major_formatter(lambda value, _: said.percent(value, 0) if is_share else said.number(value))
    axes.xaxis.set_major_formatter(lambda value, _: said.number(round(value)) if value == round(value) else "")
    axes.set_xlabel(said("chart.axis.versions"))


def reach_of(low: Sequence[float], high: Sequence[float], *, is_share: bool) -> tuple[float, float]:
    """From where to where a curve is drawn: from nothing to a little above it; a share to 100 % at most."""
    least, most = min(0.0, *low, 0.0), max(high)
    return (0.0, 1.0) if is_share else (least, most * 1.08 or 1.0)


def _draw_labels(axes: Axes, figures: Figures, said: Words, look: dict[str, str]) -> None:
    names = [name if len(name) <= 18 else f"{name[:17]}…" for name, _ in figures.labels]
    shares = [share.clipped for _, share in figures.labels]
    place = list(range(len(names)))
    reach = [[each.value - each.low for each in shares], [each.high - each.value for each in shares]]
    axes.barh(place, [each.value for each in shares], color=look["accent"], alpha=0.35, height=0.6)
    axes.errorbar(
        [each.value for each in shares], place, xerr=reach, fmt="o", color=look["accent"], markersize=4, capsize=3
    )
    axes.set_yticks(place, names)
    axes.invert_yaxis()
    axes.set_xlim(0.0, max(0.1, *(each.high for each in shares)))
    axes.xaxis.set_major_formatter(lambda value, _: said.percent(value, 0))
    axes.grid(visible=False, axis="y")


def _over_time(value: Callable[[Moment], int]) -> Callable[[Axes, Figures, Words, dict[str, str]], None]:
    def draw(axes: Axes, figures: Figures, said: Words, look: dict[str, str]) -> None:
        from matplotlib.dates import AutoDateLocator, DateFormatter
        from matplotlib.ticker import MaxNLocator

        x: Any = [datetime.fromisoformat(each.at) for each in figures.moments]
        y = [value(each) for each in figures.moments]
        axes.fill_between(x, 0, y, step="post", color=look["accent"], alpha=0.12, linewidth=0)
        axes.step(x, y, where="post", color=look["accent"], linewidth=2)  # nothing is known between two moments
        axes.set_ylim(0, max(1, *y) * 1.08)
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_formatter(lambda value, _: said.number(round(value)))
        span = (x[-1] - x[0]).total_seconds()
        axes.xaxis.set_major_locator(AutoDateLocator(minticks=2, maxticks=4))
        axes.xaxis.set_major_formatter(
            DateFormatter("%H:%M:%S" if span < 600 else "%H:%M" if span < 2 * DAY else "%Y-%m-%d")
        )
        axes.set_xlabel("UTC")

    return draw


CHARTS: dict[str, Callable[[Axes, Figures, Words, dict[str, str]], None]] = {
    "accuracy": _draw_looks,
    "distance": _draw_looks,
    "error": _draw_error,
    "labels": _draw_labels,
    "check-ins": _over_time(lambda moment: moment.tally.check_ins),
    "devices": _over_time(lambda moment: moment.devices),
}
"""Every plot by its name in addresses."""


LOOKS = ("accuracy", "distance")
"""Plots of how the model does on the operator's own rows: a task has one of them, where somebody looks."""


def can_draw(name: str, figures: Figures) -> bool:
    """Whether there is something to see yet."""
    if name in LOOKS:
        return figures.watched is not None and figures.watched.measure == name and bool(figures.watched.shown)
    if name == "error":
        return len(figures.shown) > 0
    if name == "labels":
        return any(not share.hidden for _, share in figures.labels)
    return len(figures.moments) > 1


def _size(name: str, figures: Figures) -> tuple[float, float]:
    """Inches, as wide as the place on the page: there all text has the same size."""
    if name == "labels":
        return 6.4, min(8.0, 0.42 * len(figures.labels) + 0.9)
    return (6.4, 2.7) if name in ("error", *LOOKS) else (3.3, 2.4)


_ONE_AT_A_TIME = threading.Lock()
"""matplotlib is not made for several threads."""


def draw(name: str, figures: Figures, said: Words, theme: str, kind: str) -> bytes:
    """One plot as `kind`, svg or png. Takes a tenth of a second or two: call it in a thread."""
    with _ONE_AT_A_TIME:
        import matplotlib as mpl
        from matplotlib.figure import Figure

        look = THEMES[theme]
        settings: Any = {
            "svg.fonttype": "none", "svg.hashsalt": "crowdml", "font.family": ["sans-serif"], "font.size": 11,
            "font.sans-serif": ["DejaVu Sans"], "text.color": look["ink"], "axes.labelcolor": look["quiet"],
            "xtick.color": look["quiet"], "ytick.color": look["quiet"], "axes.edgecolor": look["line"],
            "grid.color": look["line"], "axes.axisbelow": True, "text.parse_math": False,
        }  # fmt: skip
        with mpl.rc_context(settings):
            figure = Figure(figsize=_size(name, figures), layout="constrained")
            axes = figure.add_subplot()
            axes.set_facecolor("none")  # of the page, which may be dark
            axes.grid(visible=True, linewidth=0.8)
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(length=0)
            CHARTS[name](axes, figures, said, look)
            written = io.BytesIO()
            metadata = {"Date": None} if kind == "svg" else {"Software": None}
            back = "none" if kind == "svg" else look["back"]
            figure.savefig(written, format=kind, facecolor=back, dpi=200, metadata=metadata)
            return written.getvalue()
