"""A figure as data: curves with their honest privacy, the paper's claims beside our numbers, and how to draw it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.errors import CrowdmlError
from crowdml.task import LARGEST_DELTA

MAIN = "main"
SOUND = "sound"


class FigureError(CrowdmlError):
    """A figure that cannot be written: a curve of odd lengths, or a number that is none."""


@dataclass(frozen=True)
class PrivacyLabel:
    """What a curve costs one `unit`: `epsilon` is the honest total at `delta`, passes included; None without noise.

    `claimed` is what the paper says it costs, None where it says nothing. `as_published`: made on the paper's
    preprocessing or by its formulas, with hyper-parameters chosen by the test error, for reproducing it only.
    `not_covered` names what saw private or evaluation rows and is in no epsilon: "pca" that was fitted on them,
    "tuning" by scores on them; "float-noise", whose formula holds for real numbers and not for floats; and
    "hidden-layer", trained on exact gradients (SecProbe), which no epsilon covers.
    """

    unit: str = "sample"
    epsilon: float | None = None
    claimed: float | None = None
    delta: float = 0.0
    as_published: bool = False
    not_covered: tuple[str, ...] = ()
    silent: bool = False
    """Nothing is sent, so there is nothing to pay for."""
    claimed_delta: float = 0.0
    """At which delta the paper makes its claim, where that is another than `delta`."""

    @property
    def delta_too_large(self) -> bool:
        """Whether a promise at such a delta says nothing: devices refuse it, and only simulations show it."""
        claimed = self.claimed_delta if self.claimed is not None else 0.0
        return max(self.delta, claimed) > LARGEST_DELTA

    def __post_init__(self) -> None:
        if self.epsilon is not None and not (0 < self.epsilon < math.inf):
            raise FigureError(f"an epsilon of {self.epsilon} is no number for a label; without noise it is None.")

    def cell(self, whose: str = "") -> str:
        """For a table: the honest total, the claim where it differs, and what no epsilon covers.

        `whose` stands behind the number where a table has units of several kinds.
        """
        nothing = "none, nothing is sent" if self.silent else "none"
        text = nothing if self.epsilon is None else f"{self.epsilon:.4g}{whose}"
        text += f", δ = {_small(self.delta)}" if self.delta and self.epsilon is not None else ""
        text += "" if self.claimed == self.epsilon else self._claim
        text += ", as published" if self.as_published else ""
        return text + (f"; not covered: {', '.join(self.not_covered)}" if self.not_covered else "")

    @property
    def words(self) -> str:
        """For a legend: the honest total, and the claim where it differs."""
        if self.epsilon is None:
            return "nothing is sent" if self.silent else "no privacy"
        honest = f"ε = {self.epsilon:.4g}"
        if self.delta:
            honest += f", δ = {_small(self.delta)}"
        return honest + self._claim

    @property
    def _claim(self) -> str:
        if self.claimed is None:
            return ""
        at = f" at δ = {_small(self.claimed_delta)}" if self.claimed_delta else ""
        return f" (claimed {self.claimed:.4g}{at}{', too large' if self.delta_too_large else ''})"


@dataclass(frozen=True)
class Series:
    """One curve: x [n], y [n] the mean over trials, low and high [n] their range, or empty where nothing varies."""

    key: str
    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    privacy: PrivacyLabel = PrivacyLabel()
    panel: str = MAIN
    """Where it is drawn: the key of a panel, or of several, with blanks between."""
    marks: bool = False
    """Draw each point: for values at a few places."""
    line: bool = True
    """Draw the line: not for measurements that lie on a law's."""
    ink: int | None = None
    """Which colour and mark, by number, for series of different names that show one method; else one for each name."""

    def __post_init__(self) -> None:
        lengths = {len(self.x), len(self.y), len(self.low) or len(self.x), len(self.high) or len(self.x)}
        if len(lengths) != 1 or not self.x:
            raise FigureError(f"series {self.key!r} has {len(self.x)} x and {len(self.y)} y; they must be as many.")
        if not all(math.isfinite(value) for value in (*self.x, *self.y, *self.low, *self.high)):
            raise FigureError(f"series {self.key!r} holds a number that is not finite; JSON has no word for it.")

    @property
    def last(self) -> float:
        return self.y[-1]

    def to_json(self) -> dict[str, Any]:
        paid = ("unit", "epsilon", "claimed", "delta", "as_published", "not_covered", "delta_too_large")
        return {**_plain(self, "key", "name", "x", "y", "low", "high"), "privacy": _plain(self.privacy, *paid)}


def over_trials(
    key: str,
    name: str,
    x: Sequence[float] | Array,
    trials: Array,
    privacy: PrivacyLabel,
    *,
    panel: str = MAIN,
    marks: bool = False,
    ink: int | None = None,
) -> Series:
    """A series from trials [T, n]: mean, and the range over trials where there is more than one."""
    values = np.asarray(trials, np.float64)
    several = len(values) > 1
    return Series(
        key,
        name,
        numbers(x),
        numbers(values.mean(0)),
        numbers(values.min(0)) if several else (),
        numbers(values.max(0)) if several else (),
        privacy,
        panel,
        marks,
        ink=ink,
    )


def level(series: Series, x: Sequence[float]) -> Series:
    """A series of one point, drawn as a level line from x[0] to x[-1]: what does not learn step by step."""
    twice = {name: (getattr(series, name)[-1],) * 2 for name in ("y", "low", "high") if getattr(series, name)}
    return replace(series, x=(float(x[0]), float(x[-1])), **twice)


def level_at(
    value: float, key: str, name: str, x: Sequence[float], privacy: PrivacyLabel, panel: str, ink: int | None = None
) -> Series:
    """One number as a level line from x[0] to x[-1]."""
    return level(over_trials(key, name, [0.0], np.array([[value]]), privacy, panel=panel, ink=ink), x)


def numbers(values: Sequence[float] | Array) -> tuple[float, ...]:
    """Six decimals: errors are counts over ten thousand, and JSON stays readable."""
    return tuple(round(float(value), 6) for value in np.asarray(values).ravel())


@dataclass(frozen=True)
class Claim:
    """What the paper says, beside what we measured. `paper` is None where it gives no number."""

    key: str
    text: str
    ours: float
    holds: bool
    paper: float | None = None

    @staticmethod
    def near(key: str, text: str, ours: float, paper: float, *, within: float) -> Claim:
        """A number that holds where ours lies so near to it."""
        return Claim(key, text, ours, abs(ours - paper) <= within, paper=paper)

    @staticmethod
    def stands(series: Series, chosen: float, what: str, *, near: float = 0.01, right: bool = False) -> Claim:
        """Whether nothing on a grid is better than what was `chosen` by more than `near`: repeats of a run differ by as
        much. The series has the errors over the grid, or with `right` the accuracies; `what` names the setting."""
        here = series.y[int(np.argmin(np.abs(np.asarray(series.x) - chosen)))]
        behind = max(series.y) - here if right else here - min(series.y)
        text = f"{series.name}: {what} is within {near} of the best on its grid; ours is how far"
        return Claim(f"{series.key}-stands", text, behind, behind <= near)

    def to_json(self) -> dict[str, Any]:
        return {**_plain(self, "key", "text", "paper"), "ours": round(float(self.ours), 6), "holds": bool(self.holds)}


@dataclass(frozen=True)
class Second:
    """A second x axis, above: what the places `x` of the first one are there, `means`; both rise, above 0."""

    label: str
    x: tuple[float, ...]
    means: tuple[float, ...]

    def __post_init__(self) -> None:
        pairs = np.array([self.x, self.means]) if len(self.x) == len(self.means) else np.zeros((2, 0))
        if pairs.shape[1] < 2 or not (pairs > 0).all() or not (np.diff(pairs) > 0).all():
            raise FigureError(f"the second axis {self.label!r} needs as many x as meanings, two at least, rising.")

    def above(self, x: Array) -> Array:
        """From the axis below to the one above, straight between places on logarithmic axes, and beyond them."""
        return _log_straight(x, self.x, self.means)

    def below(self, means: Array) -> Array:
        return _log_straight(means, self.means, self.x)


def _log_straight(at: Array, x: Sequence[float], y: Sequence[float]) -> Array:
    u, v, w = np.log(x), np.log(y), np.log(np.maximum(np.asarray(at, np.float64), 1e-300))
    first, last = (v[1] - v[0]) / (u[1] - u[0]), (v[-1] - v[-2]) / (u[-1] - u[-2])
    beyond = np.where(w < u[0], first * (w - u[0]), 0.0) + np.where(w > u[-1], last * (w - u[-1]), 0.0)
    return np.exp(np.interp(w, u, v) + beyond)


@dataclass(frozen=True)
class Panel:
    """One set of axes. `x_scale` and `y_scale` as matplotlib names them."""

    key: str
    title: str
    x_label: str
    y_label: str
    x_scale: str = "linear"
    y_scale: str = "linear"
    y_range: tuple[float, float] | None = None
    priced: bool = True
    """Whether the legend says what each curve costs; bytes and delays have no price."""
    second: Second | None = None
    x_ticks: tuple[float, ...] = ()
    """Where the x axis has its numbers, written out; without them matplotlib chooses."""


@dataclass(frozen=True)
class Figure:
    """A reproduced figure. `notes` say what was done differently, and what the reader must know about privacy."""

    id: str
    title: str
    data: str
    trials: int
    series: tuple[Series, ...]
    claims: tuple[Claim, ...]
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    ends: str = "error at the end"
    """What the last value of a series is."""

    def __post_init__(self) -> None:
        keys = [series.key for series in self.series]
        if len(set(keys)) < len(keys):
            raise FigureError(f"{self.id}: two series have one key among {keys}.")

    def __getitem__(self, key: str) -> Series:
        """The series of that key."""
        return next(series for series in self.series if series.key == key)

    @property
    def x_label(self) -> str:
        return self.panels[0].x_label

    @property
    def y_label(self) -> str:
        return self.panels[0].y_label

    def claim(self, key: str) -> Claim:
        return next(claim for claim in self.claims if claim.key == key)

    def to_json(self) -> dict[str, Any]:
        """The shape of `crowdml reproduce --json`. Plain numbers, texts, lists: strict JSON."""
        return {
            "id": self.id,
            "seconds": round(self.seconds, 3),
            **_plain(self, "data", "trials"),
            "series": [series.to_json() for series in self.series],
            "claims": [claim.to_json() for claim in self.claims],
        }

    def to_markdown(self) -> str:
        """The two tables of docs/figures.md: the last value of each series with its cost, and the claims."""
        paid = dict.fromkeys(each.privacy.unit for each in self.series if each.privacy.epsilon is not None)
        units = list(paid or dict.fromkeys(each.privacy.unit for each in self.series))
        lines = [
            f"| key | {self.ends} | lowest to highest | ε of {' or '.join(f'a {unit}' for unit in units)} |",
            "|---|---|---|---|",
        ]
        for series in self.series:
            spread = f"{series.low[-1]:.3f} to {series.high[-1]:.3f}" if series.low else ""
            cost = series.privacy.cell(f" of a {series.privacy.unit}" if len(units) > 1 else "")
            lines.append(f"| `{series.key}` | {series.last:.3f} | {spread} | {cost} |")
        lines += ["", "| claim | paper | ours | holds |", "|---|---|---|---|"]
        for claim in self.claims:
            paper = "" if claim.paper is None else f"{claim.paper:g}"
            holds = "yes" if claim.holds else "**no**"
            lines.append(f"| `{claim.key}`: {_one_cell(claim.text)} | {paper} | {claim.ours:.3f} | {holds} |")
        return "\n".join(lines) + "\n"

    def plot(self, path: Path | str) -> Path:
        """Draw it into a file; the ending says the format (png, svg, pdf)."""
        from crowdml.experiments.plot import draw  # matplotlib is slow to import, and JSON needs none of it

        return draw(self, Path(path))


def _plain(thing: object, *names: str) -> dict[str, Any]:
    """These attributes as JSON has them: a tuple is a list there."""
    found = {name: getattr(thing, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _small(value: float) -> str:
    """A small number in few signs: '1e-6', '1.5e-4'."""
    return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")


def _one_cell(text: str) -> str:
    """A bar would end the cell."""
    return text.replace("|", "\\|")
