"""`crowdml simulate`: any task on a simulated crowd."""

from __future__ import annotations

import secrets
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from crowdml.cli.numbers import Number, Whole
from crowdml.cli.output import Report, artefact_option, json_option, make_table, plugin_option, size_text
from crowdml.cli.tables import table_options
from crowdml.cli.task import SHIPPED_DATA, naming, usual_data
from crowdml.errors import DataError, TaskError
from crowdml.task import find_task
from crowdml.texts import count_text, epsilon_text, number_text

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from crowdml.arrays import Samples
    from crowdml.datasets import Dataset
    from crowdml.datasets.tables import Columns
    from crowdml.sim.studies import Study
    from crowdml.task import Task


@click.command(short_help="Run a task on a crowd of simulated devices.")
@click.argument("task", metavar="TASK")
@click.option("--data", "data_name", metavar="NAME|FILE", help="A data set, or a table: .csv, .csv.gz, .npz, .parquet.")
@table_options()
@click.option(
    "--devices",
    type=Whole(1, 10**7),
    metavar="M",
    help="Number of devices. Default: as many as have samples for one check-in.",
)
@click.option("--trials", type=Whole(1, 10**6), metavar="N", default=1, help="Number of trials. Default: 1.")
@click.option(
    "--seed", type=Whole(0, 2**63 - 1), metavar="S", help="Repeats a run. Default: a new one, which is printed."
)
@click.option("--delay", metavar="D", default="0", help="Message delay, in samples of the crowd: 100, exponential:100.")
@click.option(
    "--world",
    type=click.Choice(["fleet"]),
    help="fleet: the timing of a live `crowdml fleet`. Default: samples come evenly, messages take --delay.",
)
@click.option(
    "--dropout",
    type=Number(0, 1, below=True),
    metavar="P",
    default=0.0,
    help="Masked tasks: the share of each cohort that drops out. Default: 0.",
)
@click.option("--engine", type=click.Choice(["compiled", "events"]), default="compiled", help="Both draw equal noise.")
@click.option(
    "--passes",
    type=Whole(1, 1000),
    metavar="N",
    default=None,
    help="Passes over the samples; each one costs again. Default: the task's privacy.uses.",
)
@click.option("--liars", type=Number(0, 1), metavar="P", help="The share of the devices that lies, as --attack says.")
@click.option(
    "--attack",
    metavar="NAMES",
    help="What liars do: sign-flip, alie... Several, with commas between, take turns. An unknown name lists all.",
)
@click.option("--population", type=click.Choice(["iid", "by_class", "by_user"]), help="Who holds which samples.")
@click.option("--progress", "counted", is_flag=True, help="Print progress on stderr line by line, for programs.")
@click.option("--plot", "plot_path", metavar="PATH", help="Draw accuracy over check-ins or rounds: .png, .svg, .pdf.")
@artefact_option
@plugin_option
@json_option
def simulate(
    task: str,
    data_name: str | None,
    columns: Columns,
    devices: int | None,
    trials: int,
    seed: int | None,
    delay: str,
    world: Literal["fleet"] | None,
    dropout: float,
    engine: str,
    passes: int | None,
    liars: float | None,
    attack: str | None,
    population: str | None,
    counted: bool,
    plot_path: str | None,
    json_path: str | None,
) -> None:
    """Run TASK (a file, or a shipped name) on a crowd of simulated devices.

    The epsilons are those of the whole plan. If a stop rule ended the run earlier, "paid so far" is below them.
    """
    report = Report(json_path, plot_path)
    found = find_task(task)

    from crowdml.attacks import read_attackers
    from crowdml.price import check_budget
    from crowdml.protocols import find, rehearse

    with naming(task):
        rehearse(found)
    attackers = read_attackers(found, liars, attack)
    if int(found.protocol.get("peers", 0)):
        _city(
            report,
            found,
            data_name,
            seed,
            trials,
            counted,
            (devices, population, passes, dropout or None, delay != "0", world),
        )
        return
    passes = found.privacy.uses if passes is None else passes
    with naming(task):
        check_budget(find(found), found, passes)
    named, seed = seed, secrets.randbits(32) if seed is None else seed
    data = _load(found, data_name, named, devices, columns, seed)
    if found.model["kind"] == "histogram":
        _counts(report, found, data, devices, population, seed, trials, dropout, counted, passes, delay, world)
        return

    from crowdml.sim.studies import simulate as run
    from crowdml.sim.trial import Deal

    kind, many = _crowd(found, data, population, devices)
    expected = _outlook(found, data, many)
    with _followed(report, found, counted, expected) as (expect, tick):
        study = run(
            found,
            data.x_train,
            data.y_train,
            devices=Deal(kind, many, data.groups),
            test=(data.x_test, data.y_test),
            trials=trials,
            seed=seed,
            passes=passes,
            delay=delay,
            world=world,
            dropout=dropout,
            engine=engine,
            liars=attackers,
            expect=expect,
            tick=tick,
        )
    tested = cast("Samples", study.test)  # as devices prepare rows
    curve = (study.accuracy if found.classes else study.r2)(tested.x, tested.y)
    result = {**_result(found, data, study, curve, study.seed, kind, passes), "outlook": expected}
    result |= {"world": world, "assumed": _assumed(found, world, delay, dropout)}
    if attackers is not None:
        result["liars"] = {"devices": attackers.count(study.population.devices), "attack": attackers.attack}
        result["liars"] |= _backdoor(found, study, tested) if "backdoor" in attackers.names else {}
    _show(report, found, data, study, result)
    report.plotted(lambda path: _plot(path, found, study, curve))
    report.finish(_marked(report, found, result))


def _backdoor(task: Task, study: Study, tested: Samples) -> dict[str, Any]:
    """How often a backdoor opens at the end of a run, and how often by chance: means over trials."""
    from crowdml.attacks import opened

    pairs = [opened(task, run.model, tested) for run in study.runs]
    found = [pair for pair in pairs if pair is not None]
    if not found:
        return {}
    success, unmarked = (sum(each) / len(found) for each in zip(*found, strict=True))
    return {"backdoor": {"success": success, "unmarked": unmarked}}


def _outlook(task: Task, data: Dataset, devices: int) -> str | None:
    """What is to be expected of a crowd that is too small for its price; None of one that is not."""
    from crowdml.suggest import expected_crowd, outlook

    shape = expected_crowd(task, devices, max(1, len(data.y_train) // devices))
    told = shape and outlook(task, shape)
    return told and told.sentence


def _assumed(task: Task, world: str | None, delay: str, dropout: float) -> str | None:
    """What the run assumes of the crowd's timing; None of a task that no device takes part in."""
    from crowdml.protocols import refusal, settled
    from crowdml.suggest import assumed

    if task.as_published or task.privacy.mechanism == "none" or refusal(settled(task)) is not None:
        return None
    return assumed(task, world=world, delay=delay, dropout=dropout)


def _marked(report: Report, task: Task, result: dict[str, Any]) -> dict[str, Any]:
    """The result, marked where its delta voids the promise; people read why no device takes part in such a task."""
    from crowdml.protocols import is_delta_too_large, refusal, settled

    refused = refusal(settled(task))
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
    from crowdml.price import check_budget
    from crowdml.protocols import find
    from crowdml.sim.studies import trial_seeds

    if any(others):
        raise TaskError(
            f"task {task.name!r}: its devices stand at its {len(task.places)} places, each reading counts once and all "
            "keep one pace; --devices, --population, --passes, --dropout, --delay and --world do not go with that."
        )
    check_budget(find(task), task, 1)
    seed = secrets.randbits(32) if seed is None else seed
    seeds = trial_seeds(seed, trials)
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
    seed: int,
    trials: int,
    dropout: float,
    counted: bool,
    passes: int,
    delay: str,
    world: str | None,
) -> None:
    """A crowd that only counts: there is no model to look at, and nobody waits for one."""

    from crowdml.cli.counting import simulate_counts

    if passes != 1 or delay != "0" or world:
        raise TaskError(
            f"task {task.name!r} counts each sample once, and nobody waits for what is published; --passes, --delay "
            "and --world do not go with that."
        )
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
            trials=trials,
            expect=expect,
            tick=tick,
        )
    report.finish(_marked(report, task, result))


def _crowd(task: Task, data: Dataset, population: str | None, devices: int | None) -> tuple[str, int]:
    """The kind of population and its number of devices. By default: the people of the data, or one check-in each."""
    from crowdml.protocols import find

    kind = population or ("by_user" if data.groups is not None and devices is None else "iid")
    if devices is None and kind == "by_user" and data.groups is not None:
        return kind, len(set(data.groups.tolist()))
    return kind, devices if devices is not None else max(1, len(data.y_train) // find(task).batch(task))


@contextmanager
def _followed(
    report: Report, task: Task, counted: bool, told: str | None = None
) -> Generator[tuple[Callable[[int], None], ...]]:
    """A bar for people and lines for programs: how much is expected, and how much of it is done. `told` is said before
    the run, once nothing refuses it."""
    counter = _Counter(counted)
    with report.progress() as progress:
        bar = progress.add_task(task.name, total=None)

        def expect(total: int) -> None:
            if told is not None:
                report.print(told)
                counter.tell(told)
            counter.total = total
            progress.update(bar, total=total)

        def tick(done: int) -> None:
            counter.advance(done)
            progress.advance(bar, done)

        yield expect, tick


@dataclass
class _Counter:
    """Lines for a program that waits: 'outlook This crowd is small ...', then 'progress 300 of 1200', at most five a
    second."""

    counts: bool
    total: int = 0
    done: int = 0
    said: float = 0.0

    def tell(self, sentence: str) -> None:
        if self.counts:
            click.echo(f"outlook {sentence}", err=True)

    def advance(self, many: int) -> None:
        self.done += many
        now = time.monotonic()
        if self.counts and (now - self.said > 0.2 or self.done >= self.total):
            self.said = now
            click.echo(f"progress {self.done} of {self.total}", err=True)


def _load(task: Task, name: str | None, named: int | None, devices: int | None, columns: Columns, seed: int) -> Dataset:
    """The task's data. `named`: the seed that somebody named; `seed`: that of the run.

    Rows of a named data set are on the sphere of the task's norm, unless it has bounds. Synthetic data takes the
    task's shape, and has what the devices may give, from 10,000 to 200,000 rows.
    """
    from dataclasses import replace

    from crowdml.datasets import blobs, is_table, load
    from crowdml.datasets.table import spec_of
    from crowdml.features import normalise

    name = name or usual_data(task)
    if is_table(name):
        kind = "class" if task.classes else "number"
        columns = replace(columns, kind=kind, classes=task.labels.classes)
        data = load(name, normalise="none", seed=seed, columns=columns)
        data = data.recoded(task.labels.classes, task.labels.ends)
    elif task.labels.kind != "class":
        if name == "synthetic" or spec_of(name).classes:
            raise TaskError(
                f"task {task.name!r} predicts a number, and data set {name!r} has classes. Name a file with --data, or "
                "--data census."
            )
        data = load(name, normalise="none", columns=columns).recoded((), task.labels.ends)
    elif name == "synthetic" and task.classes is not None:
        from crowdml.protocols import find

        budget = task.privacy.budget
        each = find(task).batch(task) if budget is None else budget.samples
        rows = min(max(10_000, (devices or 0) * each), 200_000)
        data = blobs(rows=rows, features=task.features.width, classes=task.classes, seed=named or 0, normalise="none")
    else:
        data = load(name, normalise="none", columns=columns)
    if task.classes is not None and len(data.classes) != task.classes:
        raise DataError(
            f"task {task.name!r} has {task.classes} classes and data set {name!r} has {len(data.classes)} "
            f"({', '.join(data.classes)}). Change labels.classes, or name other data."
        )
    if data.features != task.features.width:
        many = "Leave columns out with --ignore" if data.features > task.features.width else "Leave fewer columns out"
        raise DataError(
            f"task {task.name!r} takes rows of {count_text(task.features.width, 'number')} and data set {name!r} has "
            f"{count_text(data.features, 'feature')}. {many if is_table(name) else 'Change features.dimension'}, or "
            "name other data."
        )
    if is_table(name) and devices is not None and devices > (rows := len(data.y_train)):
        raise DataError(
            f"{name} has {count_text(rows, 'row')} for devices: too few for {devices:,} of them. Say --devices {rows} "
            "or fewer."
        )
    if is_table(name) or task.features.low is not None:
        return data  # the simulator prepares rows as devices do
    norm, bound = ("l1" if task.features.norm.kind == "l1" else "l2"), float(task.features.norm.bound)
    return replace(data, x_train=normalise(data.x_train, norm, bound), x_test=normalise(data.x_test, norm, bound))


def _result(
    task: Task, data: Dataset, study: Study, curve: Any, seed: int, population: str, passes: int
) -> dict[str, Any]:
    import numpy as np

    from crowdml.protocols import settled

    several, measure = len(curve) > 1, "accuracy" if task.classes else "r2"
    ends, tested = (curve[:, -1].mean(), curve[:, -1].min(), curve[:, -1].max()), cast("Samples", study.test)
    distance = {} if task.classes else {"mean_absolute_error": study.distance(tested.x, tested.y)[:, -1].mean()}
    staleness = study.runs[0].schedule.staleness if study.rounds is None else np.zeros(1)
    stopped = study.runs[0].stopped
    privacy = {
        "unit": "sample",
        "epsilon": study.planned.sample,
        "epsilon_alone": study.planned.sample_alone,
        "claimed": study.claimed,
        "delta": task.privacy.delta,
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
        "engine": study.engine,
        "passes": passes,
        **{f"{measure}{which}": value for which, value in zip(("", "_low", "_high"), ends, strict=True)},
        **distance,
        **_verdict(task, tested.y, data.y_train, curve[:, -1]),
        "public_only": _public_only(task, data, study),
        **study.planned.plain,
        "epsilon_server_row": study.server_row,
        "paid_so_far": {"epsilon_sample": study.paid.sample, "epsilon_device": study.paid.device},
        "claimed": study.claimed,
        "delta": task.privacy.delta,
        "as_published": task.as_published,
        "check_ins": study.check_ins,
        "rounds": study.rounds,
        "abandoned": study.abandoned,
        "bytes_up": study.bytes_up,
        "bytes_down": study.bytes_down,
        "staleness": {"mean": float(staleness.mean()), "max": int(staleness.max())},
        "crowd_says": study.crowd_says,
        "stopped": stopped and stopped.sentence,
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


def _verdict(task: Task, labels: Any, held: Any, ends: Any) -> dict[str, Any]:
    """What the accuracy or R² is worth, beside chance and always saying the devices' most common class."""
    from crowdml.verdict import share_of_majority, verdict

    majority, masked = share_of_majority(labels, held) if task.classes else None, task.masking is not None
    found = verdict(
        float(ends.mean()), classes=task.classes, majority=majority, spread=float(ends.std()), masked=masked
    )
    beside = {"chance": 1 / task.classes, "majority": majority} if task.classes else {}
    return {**beside, "verdict": found.plain}


def _show(report: Report, task: Task, data: Dataset, study: Study, result: dict[str, Any]) -> None:
    several = result["trials"] > 1
    measure = "accuracy" if task.classes else "r2"
    spread = f"  ({result[f'{measure}_low']:.3f} to {result[f'{measure}_high']:.3f} over {result['trials']} trials)"
    table = make_table("", "", title=": ".join(filter(None, (task.name, task.title))), numbers=False)
    table.show_header = False
    table.add_row("accuracy" if task.classes else "R²", f"{result[measure]:.3f}{spread if several else ''}")
    if task.classes:
        table.add_row("  the most common class alone", f"{result['majority']:.3f}")
    else:
        table.add_row("mean absolute error", number_text(result["mean_absolute_error"]))
    if result["public_only"] is not None:
        table.add_row("  from the public rows alone", f"{result['public_only']:.3f}")
    says = study.crowd_says
    if says is not None:
        table.add_row(
            "as the server saw it", f"{1 - says['error']:.2f} ± {says['error_sd']:.2f} over the whole run, noisy counts"
        )
    table.add_row("ε of the most expensive sample", epsilon_text(study.planned.sample) + _claim(study))
    table.add_row("ε of the most expensive device", epsilon_text(study.planned.device))
    if task.masking is not None:
        left = epsilon_text(study.planned.sample_alone), epsilon_text(study.planned.device_alone)
        table.add_row("  tolerated colluders", f"{task.masking.colluders} in a cohort")
        table.add_row("  if everyone else colludes", f"{left[0]} and {left[1]}")
    if result["stopped"] is not None:
        paid = epsilon_text(study.paid.sample), epsilon_text(study.paid.device)
        table.add_row("  paid so far", f"{paid[0]} and {paid[1]}")
    if study.server_row is not None:
        table.add_row("ε of a row of the server's own", f"{epsilon_text(study.server_row)}, in {study.rounds:,} rounds")
    table.add_row("δ", number_text(task.privacy.delta))
    table.add_row("devices", f"{study.population.devices:,} ({result['population']})")
    if "liars" in result:
        table.add_row("  of them lie", f"{result['liars']['devices']:,} ({result['liars']['attack']})")
    if "backdoor" in result.get("liars", {}):
        door, first = result["liars"]["backdoor"], task.labels.classes[0]
        told = f"{door['success']:.1%} (without the mark {door['unmarked']:.1%})"
        table.add_row(f"  marked samples of others taken for {first!r}", told)
    table.add_row(
        "check-ins", f"{study.check_ins:,}{'' if result['stopped'] is None else ', stopped: ' + result['stopped']}"
    )
    if study.rounds is None:
        table.add_row(
            "staleness", f"{result['staleness']['mean']:.1f} updates on average, {result['staleness']['max']} at most"
        )
    elif task.masking is not None:
        size = f"up to {task.masking.cohort} devices, at least {task.masking.minimum} of them to the end"
        table.add_row("rounds", f"{study.rounds:,}, {study.abandoned} abandoned: {size}")
    else:
        heard = len(study.runs[0].schedule.heard)
        lost = f"; {study.check_ins - heard:,} came too late" if study.check_ins > heard else ""
        table.add_row("rounds", f"{study.rounds:,}, with {heard:,} uploads in all{lost}")
    table.add_row("sent up, down", f"{size_text(study.bytes_up)}, {size_text(study.bytes_down)}")
    table.add_row("seconds", f"{study.seconds:.1f}")
    report.print(table)
    report.print(result["verdict"]["sentence"])
    if result["world"] is None and result["assumed"] is not None:
        report.print(result["assumed"])
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
    for remark in (*data.remarks, *_clipped(task, data)):
        report.print(remark)
    report.print(f"Data: {data.note}")
    report.aside.print(f"Again: --seed {result['seed']}")


def _public_only(task: Task, data: Dataset, study: Study) -> float | None:
    """What ridge regression, on the task's own features if its server solves one, makes of the public rows alone, on
    the test rows; None where there are none."""
    import numpy as np

    from crowdml.features import prepared
    from crowdml.models.ridge import predict, solve
    from crowdml.protocols import find

    if not len(data.y_public):
        return None
    tested = cast("Samples", study.test)
    public, regression = prepared(task.features, data.x_public), find(task).regression
    if regression is not None:
        x, test = (regression(task).features(rows).astype(np.float64) for rows in (public, tested.x))
    else:
        x, test = (np.append(rows, np.ones((len(rows), 1)), 1) for rows in (public, tested.x))
    y = data.y_public[:, None] == np.arange(task.classes) if task.classes else data.y_public[:, None]
    said = predict(solve(x.T @ x, x.T @ y.astype(np.float64), 0.0), test, task.classes)
    if task.classes:
        return float(np.mean(said == tested.y))
    return float(1 - np.mean((said - tested.y) ** 2) / max(float(np.var(tested.y)), 1e-30))


def _clipped(task: Task, data: Dataset) -> Generator[str]:
    """A sentence where numbers of devices' rows lie outside the task's bounds."""
    from crowdml.features import outside

    beyond = outside(task.features, data.x_train)
    if beyond.any():
        most = int(beyond.sum(axis=0).argmax())
        name = data.names[most] if data.names else str(most + 1)
        yield (
            f"{data.name}: {int(beyond.any(axis=1).sum()):,} of {len(beyond):,} rows have a number outside "
            f"features.low and features.high, most often in column {name!r} ({int(beyond[:, most].sum()):,} rows). It "
            "is clipped to the bound. Name wider bounds in the task, if these are wrong."
        )


def _claim(study: Study) -> str:
    return "" if study.claimed is None else f" (as published; claimed {epsilon_text(study.claimed)})"


def _plot(path: Any, task: Task, study: Study, curve: Any) -> None:
    from crowdml.cli.charts import Curve, draw
    from crowdml.sim.studies import describe_price

    title = f"{study.population.devices:,} devices · {describe_price(study)}"
    label, chance = ("accuracy", 1 / task.classes) if task.classes else ("R²", None)
    drawn = Curve(title, study.points, curve, chance=chance, x_label=study.unit, y_label=label)
    draw(path, f"{task.name}: {task.title}", [drawn])
