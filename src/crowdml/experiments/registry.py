"""Every figure by name, with the data that it needs and whether that is here."""

from __future__ import annotations

import difflib
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from crowdml.datasets import catalogue
from crowdml.errors import DataError, TaskError, UnknownName
from crowdml.experiments.figure import Figure

Progress = Callable[[str, int, int], None]
"""What is computed now; how many parts of the figure are done; of how many."""
Make = Callable[[bool, int | None, Progress], Figure]


@dataclass(frozen=True)
class FigureSpec:
    """One figure. `data` names what it needs at full size; a quick run makes do with data that is always here."""

    id: str
    title: str
    data: tuple[str, ...]
    module: str
    name: str

    @property
    def function(self) -> Make:
        """function(quick, trials, progress) -> Figure. Imported when asked for: listing figures needs no JAX."""
        return getattr(importlib.import_module(self.module), self.name)


_HAMM = "crowdml.experiments.hamm2015"
_MNIST = ("mnist-as-published", "mnist")
_GUO = "crowdml.experiments.guo"
_LIBRARY = "crowdml.experiments.hamm2017"
_SACHWEH = "crowdml.experiments.sachweh"

FIGURES: dict[str, FigureSpec] = {
    spec.id: spec
    for spec in (
        FigureSpec("hamm2015/fig3", "Activity recognition on seven devices", ("activity",), _HAMM, "fig3"),
        FigureSpec("hamm2015/fig4", "Digits, without privacy or delay", _MNIST, _HAMM, "fig4"),
        FigureSpec("hamm2015/fig5", "Digits with privacy, by minibatch size", _MNIST, _HAMM, "fig5"),
        FigureSpec("hamm2015/fig6", "Digits with privacy and delays", _MNIST, _HAMM, "fig6"),
        FigureSpec("hamm2015/fig7", "Objects, without privacy or delay", ("cifar10",), _HAMM, "fig7"),
        FigureSpec("hamm2015/fig8", "Objects with privacy, by minibatch size", ("cifar10",), _HAMM, "fig8"),
        FigureSpec("hamm2015/fig9", "Objects with privacy and delays", ("cifar10",), _HAMM, "fig9"),
        FigureSpec("hamm2015/scalability", "Bytes, load, staleness and noise", _MNIST, _HAMM, "scalability"),
        FigureSpec(
            "hamm2015/tuning",
            "How the hyper-parameters were chosen",
            (*_MNIST, "cifar10", "activity"),
            "crowdml.experiments.tuning",
            "tuning",
        ),
        FigureSpec("guo/fig3", "The benefit of learning together", ("adult",), _GUO, "fig3"),
        FigureSpec("guo/fig4", "Accuracy and privacy", ("adult", "adult-as-published"), _GUO, "fig4"),
        FigureSpec("guo/async", "Time to accuracy among stragglers", ("adult",), _GUO, "asynchronous"),
        FigureSpec("guo/rounds", "Rounds and bytes to accuracy", ("adult",), _GUO, "rounds"),
        FigureSpec("guo/tuning", "How the hyper-parameters of admm were chosen", ("adult",), _GUO, "tuning"),
        FigureSpec("hamm2017/fig2", "A network under noise of a stated deviation", _MNIST, _LIBRARY, "fig2"),
        FigureSpec("hamm2017/devices", "Eighty devices, about ten at a time", ("mnist",), _LIBRARY, "devices"),
        FigureSpec("sachweh/fig2", "Label proportions by batch size and by clusters", ("scats",), _SACHWEH, "fig2"),
        FigureSpec("sachweh/fig3", "Label proportions over epsilon", ("scats",), _SACHWEH, "fig3"),
        FigureSpec(
            "ours/mnist-frontier",
            "Digits: error over the total epsilon",
            ("mnist-pixels", *_MNIST),
            "crowdml.experiments.ours",
            "frontier",
        ),
        FigureSpec(
            "ours/gram-tables",
            "One masked release on Adult and on census income",
            ("adult", "adult-as-published"),
            "crowdml.experiments.tables",
            "tables",
        ),
        FigureSpec(
            "ours/gram-tuning",
            "How gram's rule and map were chosen",
            ("mnist-pixels",),
            "crowdml.experiments.ours",
            "tuning",
        ),
        FigureSpec(
            "ours/local-updates-frontier",
            "A network's accuracy over a device's total epsilon",
            ("mnist",),
            "crowdml.experiments.frontiers",
            "frontier",
        ),
        FigureSpec(
            "ours/protocols",
            "Every protocol on the same digits",
            ("mnist",),
            "crowdml.experiments.frontiers",
            "protocols",
        ),
        FigureSpec(
            "ours/masked-tuning",
            "How the settings of masked cohorts were chosen",
            ("mnist",),
            "crowdml.experiments.masked",
            "tuning",
        ),
    )
}


@dataclass(frozen=True)
class Listing:
    """One line of `crowdml reproduce`: `state` is "ready", or "data missing" with the names in `missing`."""

    id: str
    title: str
    data: tuple[str, ...]
    state: str
    missing: tuple[str, ...]


def listing() -> list[Listing]:
    """Every figure and whether its data is here; looks at places, reads no file."""
    found = {info.name for info in catalogue() if info.found}
    lines: list[Listing] = []
    for spec in FIGURES.values():
        missing = tuple(name for name in spec.data if name not in found)
        lines.append(Listing(spec.id, spec.title, spec.data, "data missing" if missing else "ready", missing))
    return lines


def find_figure(id: str) -> FigureSpec:  # noqa: A002  # the word of the design for a figure's name
    """The figure of that name; an unknown one is answered with near matches."""
    if id in FIGURES:
        return FIGURES[id]
    short = {name.rpartition("/")[2]: name for name in FIGURES}
    near = difflib.get_close_matches(id, FIGURES, n=3, cutoff=0.5)
    near = near or [short[name] for name in difflib.get_close_matches(id.rpartition("/")[2], short, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UnknownName(f"no figure is called {id!r}; {hint}known are {', '.join(FIGURES)}.")


def reproduce(
    id: str,  # noqa: A002
    quick: bool = False,
    *,
    trials: int | None = None,
    progress: Progress | None = None,
) -> Figure:
    """Make a figure at the paper's size, or a small one for a look or a test with `quick`.

    Raises `UnknownName`, and `DataError` before anything is computed where data is missing.
    """
    spec = find_figure(id)
    if trials is not None and trials < 1:
        raise TaskError(f"trials = {trials}: a figure needs at least 1.")
    if not quick:
        missing = next(line.missing for line in listing() if line.id == id)
        if missing:
            raise DataError(
                f"{id} needs the data {' and '.join(map(repr, missing))}, which is neither in $CROWDML_DATA nor in the "
                f"cache; run `crowdml data fetch {missing[0]}`, or take a quick run, which needs none."
            )
    started = time.perf_counter()
    figure = spec.function(quick, trials, progress or _silent)
    title = f"{figure.title}: a quick run, too small to judge a paper by" if quick else figure.title
    return replace(figure, title=title, seconds=time.perf_counter() - started)


def _silent(*_: Any) -> None:
    pass
