"""Draws a figure: one set of axes a panel, bands over trials, honest epsilon in the legend."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from crowdml.experiments.figure import Figure, Panel, Second, Series

# Okabe and Ito's colours: told apart by most colour-blind readers, and in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#222222", "#8C6D31", "#7F7F7F", "#8C1D40",
           "#5B4B9F", "#9A9A00", "#00A3A3")  # fmt: skip
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h", "d")
INK = "#222222"
EQUALS = "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}"
"""Keeps "ε = 1" on one line of a legend."""


def draw(figure: Figure, path: Path) -> Path:
    """Write the figure to `path`; returns it."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {
        "font.size": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "axes.titlesize": 11.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.grid": True,
        "grid.color": "#E4E4E4",
        "grid.linewidth": 0.8,
        "legend.fontsize": 8.8,
        "legend.frameon": False,
        "svg.hashsalt": figure.id,
    }
    with mpl.rc_context(style):
        count = len(figure.panels)
        columns = 2 if count in (2, 4) else min(count, 3)
        rows = -(-count // columns)
        entries = [_entries(figure, panel) for panel in figure.panels]
        most = [max(entries[first : first + columns]) for first in range(0, count, columns)]  # of each row of panels
        height = 5.4 * rows + 0.7 + 0.2 * sum(most)
        sheet, axes = plt.subplots(rows, columns, figsize=(6.6 * columns, height), squeeze=False)
        inks = inks_of(figure)
        for axis, panel in zip(axes.ravel(), figure.panels, strict=False):
            _draw_panel(axis, panel, [series for series in figure.series if panel.key in series.panel.split()], inks)
        for spare in axes.ravel()[count:]:
            spare.set_visible(False)
        wide = 62 * columns  # characters of a heading
        trials = f"{figure.trials} trials; bands: lowest to highest" if figure.trials > 1 else "one trial"
        heading = textwrap.wrap(f"{figure.id}: {figure.title}", wide)
        at: dict[str, Any] = {"ha": "left", "va": "top"}
        sheet.text(0.012, 1 - 0.1 / height, "\n".join(heading), fontsize=13.5, fontweight="bold", color=INK, **at)
        line = f"data: {figure.data}; {trials}. Dashed: as published, with the ε that it really costs."
        outside = dict.fromkeys(name for series in figure.series for name in series.privacy.not_covered)
        line += f" No ε covers: {', '.join(outside)} (JSON: which of them for which curve)." if outside else ""
        small, below = textwrap.wrap(line, wide * 3 // 2), 0.17 + 0.25 * len(heading)
        sheet.text(0.012, 1 - below / height, "\n".join(small), fontsize=9.5, color="#555555", **at)
        top = below + 0.06 + 0.18 * len(small)
        sheet.tight_layout(rect=(0, 0, 1, 1 - top / height), w_pad=2.5, h_pad=2.0)
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(sheet)
    return path


def _entries(figure: Figure, panel: Panel) -> int:
    """Lines of a panel's legend, which stands below it."""
    return sum(panel.key in series.panel.split() for series in figure.series)


def _on_law(series: Series) -> bool:
    """A computed line at the places of a measured one: the marks are the measurement's."""
    return not series.low and len(series.x) < 10


def inks_of(figure: Figure) -> dict[str, int]:
    """The colour of each series by its key: what has one name has one colour in all panels of a figure.

    Where a panel has several series of one name, the first of them agree, the second ones, and so on. A number that a
    series asks for (`ink`) is kept. No two series of a panel share a colour before all are taken.
    """
    inks = {series.key: series.ink for series in figure.series if series.ink is not None}
    known: dict[tuple[str, int], int] = {}
    for panel in figure.panels:
        shown = [series for series in figure.series if panel.key in series.panel.split()]
        used = {inks[series.key] for series in shown if series.key in inks}
        names = [series.name for series in shown]
        for place, series in enumerate(shown):
            method = series.name, names[:place].count(series.name)
            if series.key not in inks:
                wanted = known.get(method)
                numbers = range(len(COLOURS))
                free = [number for number in numbers if number not in used]
                fresh = [number for number in free if number not in known.values()]
                inks[series.key] = wanted if wanted in free else (fresh or free or [place])[0]
            used.add(inks[series.key])
            known.setdefault(method, inks[series.key])
    return inks


def _draw_panel(axis: Any, panel: Panel, curves: list[Series], inks: dict[str, int]) -> None:
    for series in curves:
        index = inks[series.key]
        colour = COLOURS[index % len(COLOURS)]
        dashed = series.privacy.as_published
        name = f"{series.name}{', as published' if dashed else ''}"
        name = f"{name}: {series.privacy.words}" if panel.priced else series.name
        every = max(1, len(series.x) // 6)
        axis.plot(
            series.x,
            series.y,
            color=colour,
            linestyle=((0, (5, 1.6)) if dashed else "-") if series.line else "none",
            linewidth=1.9,
            marker=MARKS[index % len(MARKS)]
            if series.marks or (len(series.x) > 2 and series.line and not _on_law(series))
            else None,
            markevery=1 if series.marks else (every // 2, every),
            markersize=5 if series.line else 7.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            label=textwrap.fill(name.replace(" = ", EQUALS), 66, subsequent_indent="  "),
            zorder=3 if series.line else 4,
        )
        if series.low:
            axis.fill_between(series.x, series.low, series.high, color=colour, alpha=0.16, linewidth=0, zorder=2)
    axis.set_title(panel.title)
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
    axis.set_xscale(panel.x_scale)
    axis.set_yscale(panel.y_scale)
    if panel.y_range is not None:
        axis.set_ylim(*panel.y_range)
    if panel.y_scale == "symlog":
        axis.set_ylim(bottom=0)
    if panel.x_scale == "linear":
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if panel.x_ticks:
        axis.set_xticks(panel.x_ticks, [f"{value:g}" for value in panel.x_ticks])
        axis.set_xticks([], minor=True)
    if panel.second is not None:
        _draw_second(axis, panel.second)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=1, handlelength=3.2, labelspacing=0.55)


def _draw_second(axis: Any, second: Second) -> None:
    """A second axis above, with what each place means there."""
    top = axis.secondary_xaxis("top", functions=(second.above, second.below))
    top.set_xscale("log")
    top.set_xlabel(second.label)
    top.set_xticks(second.means, [f"{value:.3g}" for value in second.means])
    top.set_xticks([], minor=True)
    top.spines["top"].set_visible(True)
    axis.title.set_y(1.0)
    axis.set_title(axis.get_title(loc="left"), pad=12)
