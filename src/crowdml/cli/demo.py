"""`crowdml demo`: the whole loop on this machine, with a real server and real devices."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.output import Report, epsilon_text, json_option, make_table, size_text
from crowdml.cli.task import find_task
from crowdml.errors import CrowdmlError

if TYPE_CHECKING:
    from crowdml.demo.compare import Compared, Comparison, Simulated
    from crowdml.demo.loop import Crowd, Outcome, View

TASK = "demo"
WHY = (
    "No device holds more than two kinds of digit, and four digits in all: alone it cannot learn the others; the crowd "
    "can.",
    "Ten digits do worse at the same price, nearer to chance: 3.3 times as many weights, each as noisy, and no more "
    "digits of a kind to learn them from. Noise that each device adds on its own wants thousands of devices; with "
    "1,437 digits in all there are 47.",
    "Step and clip follow public rules (docs/task.md) and look at no digit. The mean picture of digits 3 to 9, which "
    "this demo takes as public, is taken off every picture of a 0, 1 or 2. How many devices there are was settled by "
    "people who had seen these digits, and so was the split by class: no ε covers that.",
)


class NotKept(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """The demo's server broke its promise."""


@click.command(short_help="Watch the whole loop on this machine.")
@click.option("--keep", is_flag=True, help="Go on serving until Ctrl-C, and show an operator's login.")
@click.option(
    "--devices", type=click.IntRange(1, 107), metavar="N", default=100, show_default=True, help="How many devices."
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, 3600),
    metavar="S",
    default=20.0,
    show_default=True,
    help="How long the devices take to sense their digits.",
)
@click.option(
    "--trials",
    type=click.IntRange(0, 1000),
    metavar="N",
    default=10,
    show_default=True,
    help="Simulated crowds for the spread beside the real run; 0: none.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), metavar="S", default=1, show_default=True, help="Who holds what."
)
@click.option("--plot", "plot_path", metavar="PATH", default="out/demo.png", show_default=True, help="The plot.")
@json_option
def demo(
    keep: bool, devices: int, seconds: float, trials: int, seed: int, plot_path: str, json_path: str | None
) -> None:
    """Watch the whole loop: a server, a hundred devices that learn over HTTP, a kill -9 halfway, nothing lost."""
    from crowdml.demo.compare import comparing
    from crowdml.demo.loop import Crowd
    from crowdml.protocols import settled

    report = Report(json_path, plot_path)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also then the server goes, and the folder
    began = time.perf_counter()
    task = settled(find_task(TASK))
    report.aside.print(
        f"A server, and {devices} devices that learn to tell digits apart over HTTP. Every digit stays on its device."
    )
    with tempfile.TemporaryDirectory(prefix="crowdml-demo-", ignore_cleanup_errors=True) as folder:
        crowd = Crowd(Path(folder), task, devices, seconds, seed)
        try:
            with comparing(task, find_task("digits"), devices, crowd.each, seed, trials) as compared:
                with _shown(report) as (crowd.show, crowd.say):
                    outcome = asyncio.run(crowd.run())
                with report.aside.status("Comparing with one place, alone, and simulated crowds ..."):
                    beside = compared()
            _show(report, outcome, beside)
            report.plotted(lambda path: _plot(path, outcome, beside))
            report.finish(_result(outcome, beside, seed, time.perf_counter() - began))
            if not outcome.proof.holds:
                raise NotKept("What was acknowledged is not what was counted: see the table above. Please report this.")
            if keep:
                _keep(report, crowd)
        finally:
            crowd.server.stop()


# --- while it runs ---


@contextmanager
def _shown(report: Report) -> Generator[tuple[Callable[[View], None], Callable[[str], None]]]:
    """A live panel where a terminal is there; else a line now and then."""
    if not report.aside.is_terminal:
        yield _Lines(report).show, lambda text: report.aside.print(text, soft_wrap=True)
        return
    from rich.live import Live

    with Live(console=report.aside, refresh_per_second=8, transient=True) as live:
        yield (
            lambda view: live.update(panel(view)),
            lambda text: live.console.print(text, soft_wrap=True, highlight=False),
        )


class _Lines:
    """A line whenever another quarter of the crowd was acknowledged."""

    def __init__(self, report: Report) -> None:
        self._report, self._said = report, 0

    def show(self, view: View) -> None:
        quarter = 4 * view.acknowledged // view.devices
        if quarter > self._said:
            self._said = quarter
            accuracy = "" if view.accuracy is None else f", accuracy {view.accuracy:.2f}"
            self._report.aside.print(
                f"{view.seconds:.0f} s: {view.acknowledged} of {view.devices} check-ins acknowledged{accuracy}",
                soft_wrap=True,
            )


def panel(view: View) -> Any:
    """The live view: how far, how good, at what price, and how the server does."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    styles = {"serving": "bold green", "killed with -9": "bold red"}
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="dim", min_width=23)
    table.add_column(no_wrap=True, min_width=52)
    if view.enrolled < view.devices:
        table.add_row("devices enrolled", _bar(ProgressBar, Table, view.enrolled, view.devices))
    else:
        table.add_row("check-ins", _bar(ProgressBar, Table, view.acknowledged, view.devices))
    table.add_row("accuracy so far", "-" if view.accuracy is None else _bar_of(ProgressBar, Table, view.accuracy))
    table.add_row("ε of the dearest sample", f"{epsilon_text(view.epsilon_sample)}   at δ = {view.delta:g}")
    table.add_row("ε of the dearest device", f"{epsilon_text(view.epsilon_device)}")
    table.add_row("bytes up, down", f"{size_text(view.bytes_up)}, {size_text(view.bytes_down)}")
    waiting = f"   {view.waiting} charged and not yet acknowledged" if view.waiting else ""
    table.add_row("asked again", f"{view.asked_again}{waiting}")
    table.add_row("server", Text(view.server, style=styles.get(view.server, "bold yellow")))
    table.add_row("restarts", str(view.restarts))
    table.add_row("portal", Text.assemble((view.address, "underline")))
    title = f"crowdml demo  {view.seconds:.0f} s"
    return Panel(Group(table), title=title, title_align="left", box=box.ROUNDED, expand=False, padding=(1, 2))


def _bar(bar: Any, grid: Any, done: int, total: int) -> Any:
    return _beside(bar, grid, done / max(1, total), f"{done} of {total}")


def _bar_of(bar: Any, grid: Any, share: float) -> Any:
    return _beside(bar, grid, share, f"{share:.2f} on held-out digits")


def _beside(bar: Any, grid: Any, share: float, text: str) -> Any:
    line = grid.grid(padding=(0, 2))
    line.add_row(bar(total=1.0, completed=share, width=24), text)
    return line


def _keep(report: Report, crowd: Crowd) -> None:
    """Serve on until an interrupt, which is how it is meant to end."""
    report.line(f"The server goes on at {crowd.server.url}/ until Ctrl-C; then everything of this run is erased.")
    report.line(f"Operator: {crowd.server.url}/operator  name {crowd.login.name}, password {crowd.login.password}")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(0.5)
            crowd.server.check()


# --- in the end ---


def _show(report: Report, outcome: Outcome, beside: Comparison) -> None:
    compared, three, ten = beside.real, beside.three, beside.ten
    summary, devices, each = outcome.summary, outcome.summary.devices, outcome.each
    real = (compared, epsilon_text(summary.epsilon_sample), epsilon_text(summary.epsilon_device), f"{devices}, {each}")
    columns = [real]
    if ten is not None:
        prices = epsilon_text(ten.epsilon_sample), epsilon_text(ten.epsilon_device)
        columns.append((ten.compared, *prices, f"{ten.devices}, {ten.each}"))
    both = [three, ten] if three is not None and ten is not None else []
    table = make_table(
        "", *("digits 0 to 2", "ten digits")[: len(columns)], title="Accuracy on digits that no device holds"
    )
    table.add_row("this crowd, over HTTP", f"{outcome.proof.accuracy[-1]:.2f}")
    if three is not None:
        table.add_row(f"mean of {len(three.last)} simulated", *(f"{each.last.mean():.2f}" for each in both))
        table.add_row("lowest to highest", *(f"{each.last.min():.2f} to {each.last.max():.2f}" for each in both))
    for name, of in (
        ("all digits in one place, no privacy", lambda each: each.central),
        ("each device alone, nothing sent", lambda each: each.alone),
        ("  were the digits dealt out evenly", lambda each: each.alone_evenly),
        ("chance", lambda each: each.chance),
    ):
        table.add_row(name, *(f"{of(column[0]):.2f}" for column in columns))
    table.add_section()
    for place, name in enumerate(("ε of the dearest sample", "ε of the dearest device", "devices, digits each"), 1):
        table.add_row(name, *(str(column[place]) for column in columns))
    table.add_row("δ of both", *(f"{summary.delta:g}" for _ in columns))
    table.add_row("bytes up, with HTTP", size_text(summary.bytes_up))
    table.add_row("bytes down", size_text(summary.bytes_down))
    report.print(table)
    report.print(_proof_table(outcome))
    for text in WHY if ten is not None else WHY[::2]:
        report.console.print(text)
        report.console.print()


def _proof_table(outcome: Outcome) -> Any:
    proof = outcome.proof
    table = make_table("", "", title="Nothing was lost" if proof.holds else "SOMETHING IS WRONG")
    for name, value in (
        ("server killed with -9 and started again", f"{outcome.restarts} time, {outcome.away:.1f} s away"),
        ("receipts that devices hold", f"{proof.acknowledged}"),
        ("  signed by the server", f"{proof.acknowledged - proof.unsigned}"),
        ("  not in the journal: lost", f"{proof.lost}"),
        ("entries of the journal, chain verified", f"{proof.journalled}"),
        ("  counted twice", f"{proof.counted_twice}"),
        ("journal folded again = published weights", "bit for bit" if proof.same_bits else "NO"),
        ("sha256 of the publication", f"{proof.sha256[:16]}..."),
    ):
        table.add_row(name, value)
    return table


def _result(outcome: Outcome, beside: Comparison, seed: int, seconds: float) -> dict[str, Any]:
    compared, three, ten = beside.real, beside.three, beside.ten
    summary, proof = outcome.summary, outcome.proof
    return {
        "accuracy": proof.accuracy[-1],
        "epsilon_sample": summary.epsilon_sample,
        "epsilon_device": summary.epsilon_device,
        "delta": summary.delta,
        "devices": summary.devices,
        "check_ins": proof.journalled,
        "acknowledged": proof.acknowledged,
        "lost": proof.lost,
        "counted_twice": proof.counted_twice,
        "bytes_up": summary.bytes_up,
        "bytes_down": summary.bytes_down,
        "restarts": outcome.restarts,
        "seconds": seconds,
        "learning_seconds": outcome.seconds,
        "away_seconds": outcome.away,
        "asked_again": summary.retries,
        "unsigned": proof.unsigned,
        "same_bits": proof.same_bits,
        "publication": proof.sha256,
        "seed": seed,
        **_compared(compared),
        "simulated": None if three is None else _simulated(three),
        "ten_digits": None if ten is None else {**_simulated(ten), **_compared(ten.compared)},
    }


def _compared(compared: Compared) -> dict[str, float]:
    return {"centralised": compared.central, "alone": compared.alone, "alone_dealt_evenly": compared.alone_evenly}


def _simulated(simulated: Simulated) -> dict[str, Any]:
    last = simulated.last
    return {"trials": len(last), "accuracy": last.mean(), "accuracy_low": last.min(), "accuracy_high": last.max()}


def _plot(path: Any, outcome: Outcome, beside: Comparison) -> None:
    import numpy as np

    from crowdml.cli.charts import Curve, draw

    def levels(of: Compared) -> tuple[tuple[str, float], ...]:
        return ("all in one place, no privacy", of.central), ("each device alone", of.alone)

    compared, three, ten = beside.real, beside.three, beside.ten
    summary, curve = outcome.summary, np.asarray(outcome.proof.accuracy)
    sample, device = epsilon_text(summary.epsilon_sample), epsilon_text(summary.epsilon_device)
    curves = [
        Curve(
            f"Digits 0 to 2: {summary.devices} devices over HTTP, {outcome.each} digits each, device ε {device}",
            np.arange(len(curve)),
            curve[None],
            levels(compared),
            compared.chance,
            None if three is None else (three.points, three.accuracy),
        )
    ]
    if ten is not None:
        spent = epsilon_text(ten.epsilon_device)
        title = f"Ten digits, simulated: {ten.devices} devices, {ten.each} digits each, device ε {spent}"
        curves.append(Curve(title, ten.points, ten.accuracy, levels(ten.compared), ten.compared.chance))
    draw(path, f"A crowd learns: sample ε {sample}, δ {summary.delta:g}", curves)
