"""`crowdml simulate`: any task on a simulated crowd."""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.numbers import Number, Whole
from crowdml.cli.output import Report, epsilon_text, json_option, make_table, size_text
from crowdml.cli.task import SHIPPED_DATA, naming
from crowdml.errors import DataError, TaskError
from crowdml.task import find_task
from crowdml.texts import number_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from crowdml.datasets import Dataset
    from crowdml.sim.estimator import Study
    from crowdml.task import Task


@click.command(short_help="Run a task on a crowd of simulated devices.")
@click.argument("task", metavar="TASK")
@click.option("--data", "data_name", metavar="NAME", help="The data set; without it the task's own.")
@click.option(
    "--devices",
    type=Whole(1, 10**7),
    metavar="M",
    help="How many devices; without it as many as fill one check-in each.",
)
@click.option("--trials", type=Whole(1, 10**6), metavar="N", default=1, help="How many, for a spread. Default: 1.")
@click.option(
    "--seed",
    type=Whole(0, 2**63 - 1),
    metavar="S",
    help="Repeats a run; without it a fresh one, which is shown.",
)
@click.option("--delay", metavar="D", default="0", help="Of each leg, in samples of the crowd: 100, exponential:100.")
@click.option(
    "--dropout",
    type=Number(0, 1, below=True),
    metavar="P",
    default=0.0,
    help="Masked tasks: the share of a cohort that vanishes. Default: 0.",
)
@click.option("--engine", type=click.Choice(["compiled", "events"]), default="compiled", help="The same bits.")
@click.option(
    "--passes",
    type=Whole(1, 1000),
    metavar="N",
    default=None,
    help="Over the samples; each one costs again. Default: the task's privacy.uses.",
)
@click.option("--population", type=click.Choice(["iid", "by_class", "by_user"]), help="Who holds which samples.")
@click.option(
    "--progress", "counted", is_flag=True, help="Say on stderr how far it is, a line at a time: for programs."
)
@click.option("--plot", "plot_path", metavar="PATH", help="Draw accuracy over check-ins or rounds: .png, .svg, .pdf.")
@json_option
def simulate(
    task: str,
    data_name: str | None,
    devices: int | None,
    trials: int,
    seed: int | None,
    delay: str,
    dropout: float,
    engine: str,
    passes: int | None,
    population: str | None,
    counted: bool,
    plot_path: str | None,
    json_path: str | None,
) -> None:
    """Run TASK (a file, or a shipped name) on a crowd of simulated devices.

    Its epsilons are those of the plan; where a stop rule ended it earlier, what was paid so far stands below them.
    """
    report = Report(json_path, plot_path)
    found = find_task(task)

    from crowdml.protocol import check_budget
    from crowdml.protocols import find

    if int(found.protocol.get("peers", 0)):
        _city(
            report,
            found,
            data_name,
            seed,
            trials,
            counted,
            (devices, population, passes, dropout or None, delay != "0"),
        )
        return
    passes = found.privacy.uses if passes is None else passes
    with naming(task):
        check_budget(find(found), found, passes)
    data = _load(found, data_name, seed, devices)
    if found.model["kind"] == "histogram":
        _counts(report, found, data, devices, population, seed, trials, dropout, counted, passes, delay)
        return

    from crowdml.sim.estimator import simulate as run
    from crowdml.sim.estimator import spread_out
    from crowdml.sim.world import Delay

    late = Delay.parse(delay)
    seed, seeds = _seeds(seed, trials)
    kind, many = _crowd(found, data, population, devices)
    with _followed(report, found, counted) as (expect, tick):
        study = run(
            found,
            data.x_train,
            data.y_train,
            lambda each: spread_out(kind, data.y_train, many, each, data.groups),
            seeds=seeds,
            passes=passes,
            delay=late,
            dropout=dropout,
            engine=engine,
            expect=expect,
            tick=tick,
        )
    curve = study.accuracy(data.x_test, data.y_test)
    result = _result(found, data, study, curve, seed, engine, kind, passes)
    _show(report, found, data, study, result)
    report.plotted(lambda path: _plot(path, found, study, curve))
    report.finish(_marked(report, found, result))


def _marked(report: Report, task: Task, result: dict[str, Any]) -> dict[str, Any]:
    """The result, marked where its delta voids the promise; people read why no device takes part in such a task."""
    from crowdml.protocols import is_delta_too_large, refusal

    refused = refusal(task)
    if refused is not None:
        report.print(f"Simulated only, for no device takes part in this task: {refused.sentence}")
    result["delta_too_large"] = is_delta_too_large(task)
    for line in result["series"]:
        line["privacy"] |= {"unit": task.privacy.unit, "delta_too_large": result["delta_too_large"]}
    return result


def _city(
    report: Report,
    task: Task,
    data_name: str | None,
    seed: int | None,
    trials: int,
    counted: bool,
    others: tuple[Any, ...],
) -> None:
    """Devices that teach each other stand at the task's places: options about who they are have no meaning."""

    from crowdml.cli.city import simulate_city
    from crowdml.protocol import check_budget
    from crowdml.protocols import find

    if any(others):
        raise TaskError(
            f"task {task.name!r}: its devices stand at its {len(task.places)} places, each reading counts once and all "
            "keep one pace; --devices, --population, --passes, --dropout and --delay do not go with that."
        )
    check_budget(find(task), task, 1)
    seed, seeds = _seeds(seed, trials)
    with _followed(report, task, counted) as (expect, tick):
        name = data_name or SHIPPED_DATA.get(task.name)
        result = simulate_city(report, task, data=name, seed=seed, seeds=seeds, expect=expect, tick=tick)
    report.finish(_marked(report, task, result))


def _counts(
    report: Report,
    task: Task,
    data: Dataset,
    devices: int | None,
    population: str | None,
    seed: int | None,
    trials: int,
    dropout: float,
    counted: bool,
    passes: int,
    delay: str,
) -> None:
    """A crowd that only counts: there is no model to look at, and nobody waits for one."""

    from crowdml.cli.counting import simulate_counts

    if passes != 1 or delay != "0":
        raise TaskError(
            f"task {task.name!r} counts each sample once, and nobody waits for what is published; --passes and --delay "
            "do not go with that."
        )
    seed, seeds = _seeds(seed, trials)
    kind, many = _crowd(task, data, population, devices)
    with _followed(report, task, counted) as (expect, tick):
        result = simulate_counts(
            report,
            task,
            data,
            population=kind,
            devices=many,
            dropout=dropout,
            seed=seed,
            seeds=seeds,
            expect=expect,
            tick=tick,
        )
    report.finish(_marked(report, task, result))


def _seeds(seed: int | None, trials: int) -> tuple[int, list[int]]:
    """The seed, a fresh one where none was named, and one of it for each trial."""
    import numpy as np

    seed = secrets.randbits(32) if seed is None else seed
    return seed, [int(word) for word in np.random.SeedSequence(seed).generate_state(trials)]


def _crowd(task: Task, data: Dataset, population: str | None, devices: int | None) -> tuple[str, int]:
    """Whose the samples are and how many devices there are, where nobody says: the people, or a check-in each."""
    from crowdml.protocols import find

    kind = population or ("by_user" if data.groups is not None and devices is None else "iid")
    return kind, devices if devices is not None else max(1, len(data.y_train) // find(task).batch(task))


@contextmanager
def _followed(report: Report, task: Task, counted: bool) -> Generator[tuple[Callable[[int], None], ...]]:
    """A bar for people and lines for programs: how much is expected, and how much of it is done."""
    counter = _Counter(counted)
    with report.progress() as progress:
        bar = progress.add_task(task.name, total=None)

        def expect(total: int) -> None:
            counter.total = total
            progress.update(bar, total=total)

        def tick(done: int) -> None:
            counter.advance(done)
            progress.advance(bar, done)

        yield expect, tick


@dataclass
class _Counter:
    """Lines for a program that waits: 'progress 300 of 1200', at most five a second."""

    counts: bool
    total: int = 0
    done: int = 0
    said: float = 0.0

    def advance(self, many: int) -> None:
        self.done += many
        now = time.monotonic()
        if self.counts and (now - self.said > 0.2 or self.done >= self.total):
            self.said = now
            click.echo(f"progress {self.done} of {self.total}", err=True)


def _load(task: Task, name: str | None, seed: int | None, devices: int | None) -> Dataset:
    """The task's data, its rows in the task's own ball.

    Synthetic data takes the task's shape, and has what the devices may give, from 10,000 to 200,000 rows.
    """
    from dataclasses import replace

    from crowdml.datasets import NAMES, blobs, load
    from crowdml.features import normalise

    name = name or SHIPPED_DATA.get(task.name) or (task.name if task.name in NAMES else None)
    if name is None:
        raise DataError(f"task {task.name!r} names no data set; say --data, one of {', '.join(NAMES)}.")
    if task.labels.kind != "class":
        raise TaskError(
            f"task {task.name!r} predicts a number, and every data set here has classes; use it from Python."
        )
    if name == "synthetic" and task.classes is not None:
        from crowdml.protocols import find

        budget = task.privacy.budget
        each = find(task).batch(task) if budget is None else budget.samples
        rows = min(max(10_000, (devices or 0) * each), 200_000)
        data = blobs(
            rows=rows, features=task.features.dimension, classes=task.classes, seed=seed or 0, normalise="none"
        )
    else:
        data = load(name, normalise="none")
    if len(data.classes) != task.classes:
        raise DataError(
            f"task {task.name!r} has {task.classes} classes and data set {name!r} has {len(data.classes)} "
            f"({', '.join(data.classes)}). Change labels.classes, or name other data."
        )
    if data.features != task.features.dimension:
        raise DataError(
            f"task {task.name!r} has features.dimension = {task.features.dimension} and data set {name!r} has "
            f"{data.features} features. Change the task, or name other data."
        )
    kind, bound = ("l1" if task.features.norm.kind == "l1" else "l2"), float(task.features.norm.bound)
    return replace(data, x_train=normalise(data.x_train, kind, bound), x_test=normalise(data.x_test, kind, bound))


def _result(
    task: Task, data: Dataset, study: Study, curve: Any, seed: int, engine: str, population: str, passes: int
) -> dict[str, Any]:
    import numpy as np

    from crowdml.protocols import settled

    last, several = curve[:, -1], len(curve) > 1
    staleness = study.runs[0].schedule.staleness if study.rounds is None else np.zeros(1)
    cost = study.cost
    privacy = {
        "unit": "sample",
        "epsilon": cost.epsilon_sample,
        "epsilon_alone": cost.alone_sample,
        "claimed": cost.claimed,
        "delta": cost.delta,
        "as_published": task.as_published,
    }
    return {
        "id": f"simulate/{task.name}",
        "task": settled(task).hash.hex(),
        "data": data.name,
        "devices": study.population.devices,
        "silent_devices": study.silent,
        "population": population,
        "trials": len(curve),
        "seed": seed,
        "engine": engine,
        "passes": passes,
        "accuracy": last.mean(),
        "accuracy_low": last.min(),
        "accuracy_high": last.max(),
        "epsilon_sample": cost.epsilon_sample,
        "epsilon_device": cost.epsilon_device,
        "epsilon_sample_alone": cost.alone_sample,
        "epsilon_device_alone": cost.alone_device,
        "paid_so_far": {"epsilon_sample": cost.paid_sample, "epsilon_device": cost.paid_device},
        "claimed": cost.claimed,
        "delta": cost.delta,
        "as_published": task.as_published,
        "check_ins": study.check_ins,
        "rounds": study.rounds,
        "abandoned": study.abandoned,
        "bytes_up": study.bytes_up,
        "bytes_down": study.bytes_down,
        "staleness": {"mean": float(staleness.mean()), "max": int(staleness.max())},
        "crowd_says": study.crowd_says,
        "stopped": study.runs[0].stopped,
        "seconds": study.seconds,
        "series": [
            {
                "key": "crowd",
                "unit": study.unit,
                "name": task.title or task.name,
                "x": study.points,
                "y": curve.mean(0),
                "low": curve.min(0) if several else [],
                "high": curve.max(0) if several else [],
                "privacy": privacy,
            }
        ],
    }


def _show(report: Report, task: Task, data: Dataset, study: Study, result: dict[str, Any]) -> None:
    several = result["trials"] > 1
    spread = f"  ({result['accuracy_low']:.3f} to {result['accuracy_high']:.3f} over {result['trials']} trials)"
    table = make_table("", "", title=f"{task.name}: {task.title}", numbers=False)
    table.show_header = False
    table.add_row("accuracy", f"{result['accuracy']:.3f}{spread if several else ''}")
    says = study.crowd_says
    if says is not None:
        table.add_row(
            "as the server saw it", f"{1 - says['error']:.2f} ± {says['error_sd']:.2f} over the whole run, noisy counts"
        )
    table.add_row("ε of the most expensive sample", epsilon_text(study.cost.epsilon_sample) + _claim(study))
    table.add_row("ε of the most expensive device", epsilon_text(study.cost.epsilon_device))
    if task.masking is not None:
        left = epsilon_text(study.cost.alone_sample), epsilon_text(study.cost.alone_device)
        table.add_row("  tolerated colluders", f"{task.masking.colluders} in a cohort")
        table.add_row("  if everyone else colludes", f"{left[0]} and {left[1]}")
    if result["stopped"] is not None:
        paid = epsilon_text(study.cost.paid_sample), epsilon_text(study.cost.paid_device)
        table.add_row("  paid so far", f"{paid[0]} and {paid[1]}")
    table.add_row("δ", number_text(study.cost.delta))
    table.add_row("devices", f"{study.population.devices:,} ({result['population']})")
    table.add_row(
        "check-ins", f"{study.check_ins:,}{'' if result['stopped'] is None else ', stopped: ' + result['stopped']}"
    )
    if study.rounds is None:
        table.add_row(
            "staleness", f"{result['staleness']['mean']:.1f} updates on average, {result['staleness']['max']} at most"
        )
    elif task.masking is not None:
        size = f"up to {task.masking.cohort} devices, {task.masking.minimum} of them at least to the end"
        table.add_row("rounds", f"{study.rounds:,}, {study.abandoned} abandoned: {size}")
    table.add_row("sent up, down", f"{size_text(study.bytes_up)}, {size_text(study.bytes_down)}")
    table.add_row("seconds", f"{study.seconds:.1f}")
    report.print(table)
    if task.stop.error is not None:
        report.print(
            "The ε above are those of the plan: every check-in that samples, passes and stop.steps allow. stop.error "
            "reads what was released, so a total taken when it stopped would be no guarantee."
        )
    if task.as_published:
        report.print("As published: a paper's own formulas. The ε above is what they really cost.")
    if tuple(data.classes) != task.labels.classes:
        report.print(
            f"The data calls its classes {', '.join(data.classes)}; the task, {', '.join(task.labels.classes)}."
        )
    if study.silent:
        report.print(f"{study.silent} devices hold less than one batch and gave nothing.")
    report.print(f"Data: {data.note}")
    report.aside.print(f"Again: --seed {result['seed']}")


def _claim(study: Study) -> str:
    return "" if study.cost.claimed is None else f" (as published; claimed {epsilon_text(study.cost.claimed)})"


def _plot(path: Any, task: Task, study: Study, curve: Any) -> None:
    from crowdml.cli.charts import Curve, draw
    from crowdml.sim.estimator import describe_cost

    title = f"{study.population.devices:,} devices · {describe_cost(study.cost)}"
    drawn = Curve(title, study.points, curve, chance=1 / (task.classes or 1), x_label=study.unit)
    draw(path, f"{task.name}: {task.title}", [drawn])
