"""Every figure by name, with the data that it needs and whether that is here."""

from __future__ import annotations

import difflib
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from crowdml.datasets import catalogue
from crowdml.errors import DataError, TaskError, UnknownName
from crowdml.experiments.figure import Figure

T = TypeVar("T")

Progress = Callable[[str, int, int], None]
"""What is computed now; how many parts of the figure are done; of how many."""
Make = Callable[..., Figure]


class Parts:
    """Counts the parts of a figure for the progress display."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __call__(self, what: str) -> None:
        self.progress(what, self.done, self.total)
        self.done += 1

    def each(self, values: Iterable[T], what: str) -> Iterator[T]:
        """These values in turn, each of them a part: `what` says what is computed, with a place for the value."""
        for value in values:
            self(what.format(value))
            yield value


@dataclass(frozen=True)
class FigureSpec:
    """One figure. `data` names what it needs at full size; a quick run makes do with data that is always here."""

    id: str
    title: str
    data: tuple[str, ...]
    made_by: str
    """Module and function, within this package."""
    full: str = ""
    """What a run with `--full` has more, for an accelerator; empty where the usual run is all of it."""

    @property
    def function(self) -> Make:
        """function(quick, trials, progress) -> Figure, with `full` as a fourth argument where there is more to run.
        Imported when asked for: listing figures needs no JAX."""
        module, name = self.made_by.split(".")
        return getattr(importlib.import_module(f"crowdml.experiments.{module}"), name)


_MNIST = ("mnist-as-published", "mnist")
FIGURES: dict[str, FigureSpec] = {
    spec.id: spec
    for spec in (
        FigureSpec("hamm2015/fig3", "Activity recognition on seven devices", ("activity",), "hamm2015.fig3"),
        FigureSpec("hamm2015/fig4", "Digits, without privacy or delay", _MNIST, "hamm2015.fig4"),
        FigureSpec("hamm2015/fig5", "Digits with privacy, by minibatch size", _MNIST, "hamm2015.fig5"),
        FigureSpec("hamm2015/fig6", "Digits with privacy and delays", _MNIST, "hamm2015.fig6"),
        FigureSpec("hamm2015/fig7", "Objects, without privacy or delay", ("cifar10",), "hamm2015.fig7"),
        FigureSpec("hamm2015/fig8", "Objects with privacy, by minibatch size", ("cifar10",), "hamm2015.fig8"),
        FigureSpec("hamm2015/fig9", "Objects with privacy and delays", ("cifar10",), "hamm2015.fig9"),
        FigureSpec("hamm2015/scalability", "Bytes, load, staleness and noise", _MNIST, "hamm2015.scalability"),
        FigureSpec(
            "hamm2015/tuning", "How the hyper-parameters were chosen", (*_MNIST, "cifar10", "activity"), "tuning.tuning"
        ),
        FigureSpec("guo/fig3", "The benefit of learning together", ("adult",), "guo.fig3"),
        FigureSpec("guo/fig4", "Accuracy and privacy", ("adult", "adult-as-published"), "guo.fig4"),
        FigureSpec("guo/async", "Time to accuracy among stragglers", ("adult",), "guo.asynchronous"),
        FigureSpec("guo/rounds", "Rounds and bytes to accuracy", ("adult",), "guo.rounds"),
        FigureSpec("guo/tuning", "How the hyper-parameters of admm were chosen", ("adult",), "guo.tuning"),
        FigureSpec("hamm2017/fig2", "A network under noise of a stated deviation", _MNIST, "hamm2017.fig2"),
        FigureSpec("hamm2017/devices", "Eighty devices, about ten at a time", ("mnist",), "hamm2017.devices"),
        FigureSpec("zhao/table1", "What cutting the loss costs", ("census", "mnist"), "zhao.table1"),
        FigureSpec(
            "zhao/table2",
            "Rounds by the iterations of a round",
            ("census",),
            "zhao.table2",
            "193 rounds at I = 1,000, and as many rounds with noise as without",
        ),
        FigureSpec("zhao/fig4", "Convergence on census income", ("census",), "zhao.fig4", "200 rounds"),
        FigureSpec("zhao/fig5", "Convergence on digits", ("mnist",), "zhao.fig5", "200 rounds"),
        FigureSpec(
            "zhao/fig6",
            "Convergence on objects, for SVHN",
            ("cifar10",),
            "zhao.fig6",
            "200 rounds of 30, 60 and 100 participants",
        ),
        FigureSpec("zhao/fig7", "The effect of parallelism", ("census",), "zhao.fig7", "100 rounds"),
        FigureSpec("zhao/fig8", "What the validation rows do not cover", ("census",), "zhao.fig8", "100 rounds"),
        FigureSpec(
            "zhao/fig9",
            "Unreliable participants",
            ("census",),
            "unreliable.fig9",
            "100 rounds, five trials of each, and P at R = 0.3 and 0.7, too",
        ),
        FigureSpec(
            "zhao/fig10",
            "Malicious participants",
            ("census",),
            "unreliable.fig10",
            "100 rounds, and five trials of each",
        ),
        FigureSpec(
            "zhao/fig11",
            "Error over epsilon, half unreliable",
            ("census", "mnist"),
            "unreliable.fig11",
            "100 rounds, and five trials",
        ),
        FigureSpec("sachweh/fig2", "Label proportions by batch size and by clusters", ("scats",), "sachweh.fig2"),
        FigureSpec("sachweh/fig3", "Label proportions over epsilon", ("scats",), "sachweh.fig3"),
        FigureSpec(
            "ours/mnist-frontier", "Digits: error over the total epsilon", ("mnist-pixels", *_MNIST), "ours.frontier"
        ),
        FigureSpec(
            "ours/gram-tables",
            "One masked release on Adult and on census income",
            ("adult", "adult-as-published"),
            "tables.tables",
        ),
        FigureSpec("ours/gram-tuning", "How gram's rule and map were chosen", ("mnist-pixels",), "ours.tuning"),
        FigureSpec(
            "ours/local-updates-frontier",
            "A network's accuracy over a device's total epsilon",
            ("mnist",),
            "frontiers.frontier",
        ),
        FigureSpec(
            "ours/local-tuning",
            "How the settings of networks that protect devices were chosen",
            ("mnist", "mnist-pixels"),
            "local_tuning.tuning",
        ),
        FigureSpec("ours/activity", "Activity on ten people who are no devices", ("activity",), "activity.activity"),
        FigureSpec("ours/compare", "Every protocol on six tables", ("adult", "activity"), "compare.compare"),
        FigureSpec(
            "ours/defaults", "How the rules for defaults were found", ("activity", "adult"), "defaults.defaults"
        ),
        FigureSpec(
            "ours/robustness",
            "Worst error over the share of liars",
            ("mnist-pixels",),
            "robustness.robustness",
            "all rules against all attacks, seeds and shares",
        ),
        FigureSpec("ours/protocols", "Every protocol on the same digits", ("mnist",), "frontiers.protocols"),
        FigureSpec(
            "ours/masked-tuning",
            "How the settings of masked cohorts were chosen",
            ("mnist", "mnist-pixels"),
            "masked.tuning",
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
    full: str = ""
    """What `--full` adds."""


def listing() -> list[Listing]:
    """Every figure and whether its data is here; looks at places, reads no file."""
    found = {info.name for info in catalogue() if info.found}
    lines: list[Listing] = []
    for spec in FIGURES.values():
        missing = tuple(name for name in spec.data if name not in found)
        lines.append(
            Listing(spec.id, spec.title, spec.data, "data missing" if missing else "ready", missing, spec.full)
        )
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
    full: bool = False,
    trials: int | None = None,
    progress: Progress | None = None,
) -> Figure:
    """Make a figure at the paper's size, or what two cores can do of it in minutes; a small one for a look or a test
    with `quick`; with `full` what an accelerator can do, where that is more.

    Raises `UnknownName`, and `DataError` before anything is computed where data is missing.
    """
    spec = find_figure(id)
    if trials is not None and trials < 1:
        raise TaskError(f"trials = {trials}: a figure needs at least 1.")
    if full and quick:
        raise TaskError("a quick run and a full one: choose one of the two.")
    if full and not spec.full:
        raise TaskError(f"{id} has no --full: what it runs without is all of it.")
    if not quick:
        missing = next(line.missing for line in listing() if line.id == id)
        if missing:
            raise DataError(
                f"{id} needs the data {' and '.join(map(repr, missing))}, which is neither in $CROWDML_DATA nor in the "
                f"cache; run `crowdml data fetch {missing[0]}`, or take a quick run, which needs none."
            )
    started = time.perf_counter()
    more = {"full": True} if full else {}
    figure = spec.function(quick, trials, progress or _silent, **more)
    title = f"{figure.title}: a quick run, too small to judge a paper by" if quick else figure.title
    return replace(figure, title=title, seconds=time.perf_counter() - started)


def _silent(*_: Any) -> None:
    pass
