"""The plots of `demo` and `simulate`: accuracy over check-ins, both totals in the title; and of a city, by place."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

INK, GREY = "#222222", "#666666"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito: told apart by most colour-blind readers


@dataclass(frozen=True)
class Curve:
    """Trials [T, n] of one crowd over x [n] check-ins, and levels to compare with: (name, accuracy)."""

    title: str
    x: Any
    trials: Any
    levels: tuple[tuple[str, float], ...] = ()
    chance: float | None = None
    simulated: tuple[Any, Any] | None = None
    """Check-ins [m] and trials [S, m] of simulated crowds, for the spread of one real run."""
    x_label: str = "check-ins"
    y_label: str = "accuracy"


def draw(path: Path, heading: str, curves: list[Curve]) -> None:
    """One panel a curve: the first trial as a line, the range of all trials as a band, comparisons as levels."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(max(7.2, 5.6 * len(curves)), 4.9), layout="constrained")
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11, color=INK)
    for place, curve in enumerate(curves, start=1):
        axes = figure.add_subplot(1, len(curves), place)
        x, trials = curve.simulated or (curve.x, curve.trials)
        count, what = len(trials), "simulated" if curve.simulated else "trials"
        one = "the crowd, this run" if curve.simulated or count == 1 else "the first of them"
        if count > 1:
            low, high = trials.min(0), trials.max(0)
            axes.fill_between(x, low, high, color=COLOURS[0], alpha=0.15, lw=0, label=f"lowest to highest of {count}")
            axes.plot(x, trials.mean(0), color=COLOURS[0], lw=1, ls=(0, (4, 2)), label=f"mean of {count} {what}")
        axes.plot(curve.x, curve.trials[0], color=COLOURS[0], lw=2, marker="o", ms=3.5, label=one)
        for (name, level), colour in zip(curve.levels, COLOURS[1:], strict=False):
            axes.axhline(level, color=colour, lw=1.6, label=f"{name}: {level:.2f}")
        if curve.chance is not None:
            axes.axhline(curve.chance, color=GREY, lw=1, ls=":", label=f"chance: {curve.chance:.2f}")
        axes.set_title(curve.title, loc="left", fontsize=10.5, color=INK)
        axes.set(xlabel=curve.x_label, ylabel=f"{curve.y_label} on test samples" if place == 1 else "", ylim=(0, 1.03))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(color="#E4E4E4", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(0, -0.14), ncol=2)
    figure.savefig(path, dpi=140)


def draw_city(
    path: Path, heading: str, scores: list[tuple[str, float]], shares: list[tuple[str, float, float]]
) -> None:
    """How often each device was right, by place; and the crowd's share of each class, with how far noise takes it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.2, max(3.4, 1.6 + 0.26 * len(scores))), layout="constrained")
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11, color=INK)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    counted, off = [(name, share) for name, share, _ in shares], [each[2] for each in shares]
    for axes, rows, reach, title in (
        (left, scores, None, "predicted right, before it came: what only its owner sees"),
        (right, counted, off, "how often, by noisy counts, at 95 % confidence"),
    ):
        names, values = [name for name, _ in rows], [value for _, value in rows]
        axes.barh(names, values, xerr=reach, color=COLOURS[0], height=0.62, error_kw={"ecolor": INK, "capsize": 3})
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10.5, color=INK)
        axes.set_xlim(0, 1 if reach is None else None)
        axes.grid(axis="x", color="#E4E4E4", lw=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=8.5)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)


def draw_shares(path: Path, heading: str, title: str, rows: list[tuple[str, float, float, float]]) -> None:
    """Each class's share by noisy counts, how far noise takes it, and the true share, which a simulator knows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, max(3.2, 1.9 + 0.34 * len(rows))), layout="constrained")
    figure.suptitle(heading, x=0.01, ha="left", fontsize=11, color=INK)
    axes = figure.add_subplot()
    names, shares, reach, true = zip(*rows, strict=True)
    axes.barh(names, shares, color=COLOURS[0], height=0.62, alpha=0.75, label="by noisy counts")
    axes.errorbar(shares, names, xerr=reach, fmt="none", ecolor=INK, capsize=3, label="95 % of the noise")
    axes.scatter(true, names, marker="D", s=26, color=COLOURS[1], zorder=3, label="true, in this simulation")
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10.5, color=INK)
    axes.set_xlabel("share of the samples")
    axes.grid(axis="x", color="#E4E4E4", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(0, -0.22), ncol=3)
    figure.savefig(path, dpi=140)
