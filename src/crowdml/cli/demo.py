"""`crowdml demo`: the whole loop on this machine, with a real server and real devices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.numbers import Number, Whole
from crowdml.cli.output import OutputError, Report, json_option, make_table, size_text
from crowdml.errors import CrowdmlError
from crowdml.task import find_task
from crowdml.texts import epsilon_text, number_text
from crowdml.verdict import Verdict, verdict

if TYPE_CHECKING:
    from crowdml.demo.compare import Comparison, Simulated
    from crowdml.demo.loop import Outcome, View
    from crowdml.demo.process import ServerProcess
    from crowdml.demo.stages import Stage

WHY = {
    "demo": (
        "A device holds fourteen digits, of few kinds: alone it cannot learn the others; the crowd can.",
        "Noise for a cohort's sum is enough noise, where each device would have to add all of it without masks: that "
        "is the gap between the two simulated crowds, at the same ε.",
        "Step and clip follow public rules (docs/task.md) and look at no digit. How many devices there are was settled "
        "by people who had seen these digits, and so was the split by class: no ε covers that.",
    ),
    "admm-adult": (
        "Guo and Gong's ADMM in its sound form: one masked vector a device and round (docs/protocols/admm.md).",
    ),
    "gram-mnist": (
        "One masked release a device: second moments of public features. The model is solved for from their sum, free "
        "of charge (docs/protocols/gram.md).",
    ),
    "robust-digits": (
        "Three in ten devices lie, by turns in three ways (docs/robust.md). A rule looks for the uploads that are "
        "close together, and the portal shows its operator what it left out.",
        "Each device adds all of its noise itself, and gives once. The map of pictures and the ridge were chosen on "
        "digits that are drawn by code.",
    ),
}


SHOWN = (*WHY, "traffic")
"""Tasks that the demo shows."""


class NotKept(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """The demo's server broke its promise."""

    def __init__(self) -> None:
        super().__init__("What was acknowledged is not what was counted: see the table above. Please report this.")


@click.command(short_help="Watch a server and 100 devices learn on this machine.")
@click.option("--keep", is_flag=True, help="Keep serving until Ctrl-C, and print an operator's login.")
@click.option(
    "--task",
    "name",
    metavar="TASK",
    default="demo",
    show_default=True,
    help="What the crowd learns: demo, ten digits; admm-adult, incomes of people; gram-mnist, MNIST in one slow round "
    "(these two need their data); robust-digits, ten digits though devices lie; traffic, what comes next on twelve "
    "roads, from each other. With --runs: any task that has a data set.",
)
@click.option(
    "--devices",
    type=Whole(6, 10_000),
    metavar="N",
    default=None,
    help="Number of devices; the size of cohorts follows.  [default: 100; 996 for gram-mnist, 60 for robust-digits, 12 "
    "for traffic]",
)
@click.option(
    "--seconds",
    type=Number(0, 3600),
    metavar="S",
    default=None,
    help="How long the devices take to sense their samples.  [default: 6; 30 for traffic]",
)
@click.option(
    "--trials",
    type=Whole(0, 1000),
    metavar="N",
    default=None,
    help="Number of simulated crowds to compare the real run with; 0 for none.  [default: 10; 59 with --runs]",
)
@click.option(
    "--runs",
    type=Whole(1, 1000),
    metavar="N",
    default=None,
    help="Run it N times, each with other samples on each device, beside the interval where nine of ten simulated runs "
    "end.",
)
@click.option("--seed", type=Whole(0, 2**32 - 1), metavar="S", default=1, show_default=True, help="Who holds what.")
@click.option("--plot", "plot_path", metavar="PATH", default="out/demo.png", show_default=True, help="Plot file.")
@json_option
def demo(
    keep: bool,
    name: str,
    devices: int | None,
    seconds: float | None,
    trials: int | None,
    runs: int | None,
    seed: int,
    plot_path: str,
    json_path: str | None,
) -> None:
    """Watch a server and a hundred devices learn over HTTP under masks; two kill -9 on the way lose nothing."""
    from crowdml.demo.compare import beside, compare, simulate
    from crowdml.demo.loop import DemoCrowd
    from crowdml.demo.process import heed_signals, in_own_folder, run_until_signal
    from crowdml.demo.stages import set_stage

    report = Report(json_path, plot_path)
    heed_signals()  # whichever comes, the server and the folder go
    began = time.perf_counter()
    if runs is not None:
        _refuse_runs(name, seconds, trials, keep=keep)
    elif name not in SHOWN:
        raise OutputError(f"--task {name}: the demo shows {', '.join(SHOWN)}. Say --runs N for a fleet of any task.")
    if name == "traffic":
        from crowdml.cli.demo_city import demo_city

        demo_city(report, find_task(name), devices or 12, 30.0 if seconds is None else seconds, seed, keep=keep)
        return
    seconds = 6.0 if seconds is None else seconds
    if runs is not None:
        from crowdml.cli.demo_runs import demo_runs, run_demo, run_fleet_of
        from crowdml.cli.task import usual_data

        trials, found = trials or 59, find_task(name)
        one = partial(run_demo, devices, seconds, trials)
        if name != "demo":
            one = partial(run_fleet_of, found, usual_data(found), devices, trials)
        demo_runs(report, runs, one, trials, seed)
        return
    trials = 10 if trials is None else trials
    stage = set_stage(name, find_task(name), devices, seed)
    report.aside.print(
        f"A server, and {stage.devices:,} devices with {stage.each} {stage.what} each, which stay there. The server "
        + (
            f"sees one blurred sum of each device, and {len(stage.liars)} of them lie ({stage.lies})."
            if stage.lies
            else "sees blurred sums over cohorts, and no device's own part."
        ),
        soft_wrap=True,
    )
    with in_own_folder(lambda folder: DemoCrowd(folder, stage, seconds, seed)) as crowd:
        with beside() as pool:
            asked = pool.submit(compare, stage, seed, trials)
            with watched(report, partial(panel, unit=stage.unit), _Lines(report, stage.unit).show, transient=True) as (
                crowd.show,
                crowd.say,
            ):
                outcome = run_until_signal(crowd.run())
            with report.aside.status("Comparing with one place, alone, and simulated crowds ..."):
                as_fast = pool.submit(simulate, stage, seconds, seed, trials, outcome.proof.took)
                compared = replace(asked.result(), masked=as_fast.result())
        _show(report, outcome, compared)
        report.plotted(lambda path: _plot(path, outcome, compared))
        report.finish(_result(outcome, compared, seed, time.perf_counter() - began))
        if not outcome.proof.holds:
            raise NotKept
        if keep:
            keep_serving(report, crowd.server)


def _refuse_runs(name: str, seconds: float | None, trials: int | None, *, keep: bool) -> None:
    """Refuse what several runs do not have."""
    given = {
        "--task traffic": name == "traffic",
        "--keep": keep,
        "--trials 0": trials == 0,
        "--seconds": name != "demo" and seconds is not None,
    }
    for what, is_given in given.items():
        if is_given:
            raise OutputError(f"--runs holds runs of task {name} against simulated ones: leave out {what}.")


# --- while it runs ---


@contextmanager
def watched(
    report: Report, draw: Callable[[Any], Any], otherwise: Callable[[Any], None], *, transient: bool
) -> Generator[tuple[Callable[[Any], None], Callable[[str], None]]]:
    """How to show a view, and how to say a line: drawn live where a terminal is there; else `otherwise` hears of it."""
    if not report.aside.is_terminal:
        yield otherwise, lambda text: report.aside.print(text, soft_wrap=True)
        return
    from rich.live import Live

    with Live(console=report.aside, refresh_per_second=8, transient=transient) as live:
        yield (
            lambda view: live.update(draw(view)),
            lambda text: live.console.print(text, soft_wrap=True, highlight=False),
        )


class _Lines:
    """A line when all are enrolled, and with every cohort that was added up."""

    def __init__(self, report: Report, unit: str) -> None:
        self._report, self._unit, self._enrolled, self._rounds = report, unit, 0, 0

    def show(self, view: View) -> None:
        if view.enrolled == view.devices and self._enrolled < view.devices:
            self._line(f"{view.seconds:.0f} s: {view.enrolled:,} devices are enrolled")
        if view.rounds > self._rounds:
            accuracy = "" if view.accuracy is None else f", accuracy {view.accuracy:.2f}"
            self._line(f"{view.seconds:.0f} s: {view.rounds} of {view.of_rounds} {self._unit} added up{accuracy}")
        self._enrolled, self._rounds = view.enrolled, max(view.rounds, self._rounds)

    def _line(self, text: str) -> None:
        self._report.aside.print(text, soft_wrap=True)


def panel(view: View, unit: str = "cohorts") -> Any:
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
    table.add_column(no_wrap=True, min_width=46)
    if view.enrolled < view.devices and not view.rounds:
        table.add_row("devices enrolled", _bar(ProgressBar, Table, view.enrolled, view.devices))
    else:
        table.add_row(f"{unit} added up", _bar(ProgressBar, Table, view.rounds, view.of_rounds))
    table.add_row("accuracy so far", "-" if view.accuracy is None else _bar_of(ProgressBar, Table, view.accuracy))
    table.add_row("ε of a sample, at most", f"{epsilon_text(view.epsilon_sample)}   at δ = {number_text(view.delta)}")
    table.add_row("  if all others collude", f"{epsilon_text(view.epsilon_sample_alone)}")
    table.add_row("ε of a device, at most", f"{epsilon_text(view.epsilon_device)}")
    gone = Text(f"{view.gone} killed with -9", style="bold red") if view.gone else Text("-")
    table.add_row("devices lost", gone)
    abandoned = f"   {view.abandoned} rounds abandoned" if view.abandoned else ""
    table.add_row("devices in the sums", f"{view.survivors:,}{abandoned}")
    waiting = f"   {view.waiting} not yet acknowledged" if view.waiting else ""
    table.add_row("check-ins", f"{view.acknowledged:,}{waiting}")
    table.add_row("bytes up, down", f"{size_text(view.bytes_up)}, {size_text(view.bytes_down)}")
    table.add_row("server", Text(view.server, style=styles.get(view.server, "bold yellow")))
    table.add_row("restarts", str(view.restarts))
    table.add_row("portal", Text.assemble((view.address, "underline")))
    title = f"crowdml demo  {view.seconds:.0f} s"
    return Panel(Group(table), title=title, title_align="left", box=box.ROUNDED, expand=False, padding=(1, 2))


def _bar(bar: Any, grid: Any, done: int, total: int) -> Any:
    return _beside(bar, grid, done / max(1, total), f"{done} of {total}")


def _bar_of(bar: Any, grid: Any, share: float) -> Any:
    return _beside(bar, grid, share, f"{share:.2f} on held-out samples")


def _beside(bar: Any, grid: Any, share: float, text: str) -> Any:
    line = grid.grid(padding=(0, 2))
    line.add_row(bar(total=1.0, completed=share, width=20), text)
    return line


def keep_serving(report: Report, server: ServerProcess) -> None:
    """Serve on until an interrupt, which is how it is meant to end."""
    report.line(f"The server goes on at {server.url}/ until Ctrl-C; then everything of this run is erased.")
    report.line(f"Operator: {server.url}/operator  name {server.login.name}, password {server.login.password}")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(0.5)
            server.check()


# --- in the end ---


def _show(report: Report, outcome: Outcome, beside: Comparison) -> None:
    summary, stage, compared = outcome.summary, outcome.stage, beside.real
    table = make_table("", "", title=f"Accuracy on {stage.what} that no device holds")
    table.add_row("this crowd, over HTTP", f"{outcome.proof.accuracy[-1]:.2f}")
    for name, simulated in (("simulated", beside.masked), ("  without masks", beside.unmasked)):
        if simulated is not None:
            last = simulated.last
            spread = f"{last.mean():.2f}  ({last.min():.2f} to {last.max():.2f})"
            table.add_row(f"{name}, mean of {len(last)}" if name == "simulated" else f"{name}, at the same ε", spread)
    if beside.honest is not None:
        last, honest = beside.honest.last, stage.devices - len(stage.liars)
        spread = f"{last.mean():.2f}  ({last.min():.2f} to {last.max():.2f})"
        table.add_row(f"the {honest} honest ones alone, mean of {len(last)}", spread)
    table.add_row(f"all {stage.what} in one place, no privacy", f"{compared.central:.2f}")
    table.add_row("a device alone, nothing sent", f"{compared.alone:.2f}")
    table.add_row("the most common class alone", f"{compared.chance:.2f}")
    table.add_section()
    table.add_row("ε of the most expensive sample", epsilon_text(summary.epsilon_sample))
    table.add_row("  if everyone else colludes", epsilon_text(summary.epsilon_sample_alone))
    table.add_row("ε of the most expensive device", epsilon_text(summary.epsilon_device))
    table.add_row("  if everyone else colludes", epsilon_text(summary.epsilon_device_alone))
    table.add_row("δ of all", number_text(summary.delta))
    table.add_row(f"devices, {stage.what} each", f"{stage.devices:,}, {stage.each}")
    table.add_row("bytes up, with HTTP", size_text(summary.bytes_up))
    table.add_row("bytes down", size_text(summary.bytes_down))
    report.print(table)
    report.print(_verdict(outcome, beside).sentence)
    report.print(_proof_table(outcome))
    for text in WHY[stage.task.name]:
        report.console.print(text)
        report.console.print()


def _verdict(outcome: Outcome, beside: Comparison) -> Verdict:
    """What the live crowd's accuracy is worth, beside the most common class and a model without privacy."""
    return verdict(
        outcome.proof.accuracy[-1],
        classes=outcome.stage.task.classes or 2,
        majority=beside.real.chance,
        no_privacy=beside.real.central,
        masked=outcome.stage.task.masking is not None,
    )


def _proof_table(outcome: Outcome) -> Any:
    proof = outcome.proof
    table = make_table("", "", title="Nothing was lost" if proof.holds else "SOMETHING IS WRONG")
    for name, value in (
        (f"{outcome.stage.unit} added up, and rounds abandoned", f"{outcome.rounds}, {outcome.abandoned}"),
        (f"devices in those {outcome.stage.unit}, and in the sums", f"{outcome.cohort:,}, {outcome.survivors:,}"),
        ("devices killed with -9", f"{outcome.killed}"),
        ("server killed with -9 and started again", f"{outcome.restarts} time, {outcome.away:.1f} s away"),
        ("receipts that devices hold", f"{proof.acknowledged}"),
        ("  signed by the server", f"{proof.acknowledged - proof.unsigned}"),
        ("  not in the journal: lost", f"{proof.lost}"),
        ("check-ins in the journal, chain verified", f"{proof.journalled}"),
        ("  counted twice", f"{proof.counted_twice}"),
        ("journal folded again = published weights", "bit for bit" if proof.same_bits else "NO"),
        ("sha256 of the publication", f"{proof.sha256[:16]}..."),
    ):
        table.add_row(name, value)
    return table


def _result(outcome: Outcome, beside: Comparison, seed: int, seconds: float) -> dict[str, Any]:
    summary, proof = outcome.summary, outcome.proof
    return {
        "accuracy": proof.accuracy[-1],
        "epsilon_sample": summary.epsilon_sample,
        "epsilon_device": summary.epsilon_device,
        "delta": summary.delta,
        "devices": outcome.stage.devices,
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
        "task": outcome.stage.task.name,
        "epsilon_sample_alone": summary.epsilon_sample_alone,
        "epsilon_device_alone": summary.epsilon_device_alone,
        "rounds": outcome.rounds,
        "abandoned": outcome.abandoned,
        "cohort_devices": outcome.cohort,
        "survivors": outcome.survivors,
        "devices_killed": outcome.killed,
        "verdict": _verdict(outcome, beside).plain,
        "centralised": beside.real.central,
        "alone": beside.real.alone,
        "simulated": _simulated(beside.masked),
        "simulated_unmasked": _simulated(beside.unmasked),
        **({"liars": _liars(outcome.stage), "without_liars": _simulated(beside.honest)} if outcome.stage.lies else {}),
    }


def _liars(stage: Stage) -> dict[str, Any]:
    return {"devices": len(stage.liars), "attack": stage.lies}


def _simulated(simulated: Simulated | None) -> dict[str, Any] | None:
    if simulated is None:
        return None
    last = simulated.last
    return {"trials": len(last), "accuracy": last.mean(), "accuracy_low": last.min(), "accuracy_high": last.max()}


def _plot(path: Any, outcome: Outcome, beside: Comparison) -> None:
    import numpy as np

    from crowdml.cli.charts import Curve, draw

    compared, stage, summary = beside.real, outcome.stage, outcome.summary
    curve = np.asarray(outcome.proof.accuracy)
    levels = [("all in one place, no privacy", compared.central), ("a device alone", compared.alone)]
    if beside.honest is not None:
        levels.append(("the honest ones alone", float(beside.honest.last.mean())))
    if beside.unmasked is not None:
        levels.append(("without masks, at the same ε", float(beside.unmasked.last.mean())))
    sample, alone = epsilon_text(summary.epsilon_sample), epsilon_text(summary.epsilon_sample_alone)
    how = f"{len(stage.liars)} of them lie" if stage.lies else "under masks"
    title = f"{stage.devices:,} devices over HTTP, {stage.each} {stage.what} each, {how}"
    masked = None if beside.masked is None else (beside.masked.points, beside.masked.accuracy)
    drawn = Curve(
        title, np.arange(len(curve)), curve[None], tuple(levels), compared.chance, masked, f"{stage.unit} added up"
    )
    draw(
        path,
        f"A crowd learns: sample ε {sample} ({alone} if everyone else colludes), δ {number_text(summary.delta)}",
        [drawn],
    )
