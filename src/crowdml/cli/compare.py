"""`crowdml compare`: every protocol that fits a table, side by side at one price."""

from __future__ import annotations

import secrets
import shlex
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.numbers import Number, Whole
from crowdml.cli.output import Report, json_option, make_table, plugin_option, size_text
from crowdml.cli.tables import column_options, table_options
from crowdml.errors import DataError
from crowdml.texts import count_text, epsilon_text, number_text, one_line

if TYPE_CHECKING:
    from crowdml.datasets import Dataset
    from crowdml.datasets.tables import Columns
    from crowdml.sim.compare import Comparison, Plan, Row


@click.command(short_help="Compare all protocols on a table.")
@click.option("--data", "name", metavar="FILE|NAME", required=True, help="A table, or the name of a data set.")
@table_options()
@click.option("--bounds", metavar="LOW,HIGH|FILE", help="Public bounds of the columns: numbers, or a file.")
@click.option(
    "--epsilon",
    "epsilons",
    type=Number(1e-6, 1e6),
    metavar="E",
    multiple=True,
    default=(1.0,),
    help="The total of a sample. Repeatable: each is compared. Default: 1.",
)
@click.option(
    "--delta",
    type=Number(1e-15, 1e-5),
    metavar="D",
    help="Default: 1e-6, or less in a crowd with more than 100,000 rows.",
)
@click.option(
    "--devices",
    type=Whole(1, 10**7),
    metavar="M",
    multiple=True,
    help="Number of devices. Repeatable. Default: as many as have ten rows each, from 5 to 1000.",
)
@click.option(
    "--protocols",
    metavar="NAME,...",
    multiple=True,
    help="Only these, separated by commas or each with its own option. Default: all that fit.",
)
@click.option("--masked/--alone", default=None, help="Only with masks, or only without. Default: both.")
@click.option("--trials", type=Whole(1, 1000), metavar="N", default=3, help="Number of trials of each. Default: 3.")
@click.option(
    "--seed", type=Whole(0, 2**63 - 1), metavar="S", help="Repeats a comparison. Default: a new one, printed."
)
@click.option("--plot", "plot_path", metavar="PATH", help="Draw the comparison: .png, .svg, .pdf.")
@plugin_option
@json_option
def compare(
    name: str,
    columns: Columns,
    bounds: str | None,
    epsilons: tuple[float, ...],
    delta: float | None,
    devices: tuple[int, ...],
    protocols: tuple[str, ...],
    masked: bool | None,
    trials: int,
    seed: int | None,
    plot_path: str | None,
    json_path: str | None,
) -> None:
    """Run every protocol that fits a table, alone and under masks, at the same total for a sample.

    The settings of each are those that `task new` would choose. Nothing is tuned by the scores.
    """
    report = Report(json_path, plot_path)
    seed = secrets.randbits(32) if seed is None else seed

    from crowdml.datasets import is_table
    from crowdml.sim.compare import plan

    data, public = _load(name, columns, bounds, seed)
    made = plan(
        data.x_train,
        data.y_train,
        epsilon=epsilons,
        delta=delta,
        devices=list(devices) or None,
        groups=data.groups if not devices or columns.device else None,
        protocols=[each.strip() for word in protocols for each in word.split(",") if each.strip()] or None,
        masked=masked,
        test=(data.x_test, data.y_test),
        trials=trials,
        seed=seed,
        names=data.classes,
        columns=data.names or [f"{place + 1}" for place in range(data.x_train.shape[1])],
        **public,
    )
    _tell_before(report, data, made)
    rows, stopped = _run(report, made)
    found = made.comparison(rows)
    _show(report, data, found)
    if stopped:
        missing = len(made.cells) - len(rows)
        raise KeyboardInterrupt(f"interrupted: {missing} of {len(made.cells)} runs are missing above.")
    if is_table(name):
        report.line(f"Next: {_command(name, columns, bounds, delta, found)}")
    report.note(f"Again: --seed {seed}")
    report.plotted(found.plot)
    report.finish(found.plain())


def _run(report: Report, made: Plan) -> tuple[list[Row], bool]:
    """The rows, and whether somebody interrupted before all were there."""
    rows: list[Row] = []
    with report.progress() as progress:
        bar = progress.add_task("without privacy", total=len(made.cells))
        try:
            _ = made.baselines
            for cell in made.cells:
                crowd = f"{cell.shape.devices:,} devices, ε {number_text(cell.epsilon)}"
                progress.update(bar, description=f"{cell.name}, {crowd}")
                rows.append(made.run(cell))
                progress.advance(bar)
        except KeyboardInterrupt:
            if not rows:
                raise
            return rows, True
    return rows, False


def _load(name: str, columns: Columns, bounds: str | None, seed: int) -> tuple[Dataset, dict[str, Any]]:
    """The data, and what is public about it: of a table what `task new` would say of it, with the same warnings."""
    from dataclasses import replace

    from crowdml.cli.task_of_table import PublicFacts
    from crowdml.datasets import is_table, load

    if not is_table(name):
        if bounds is not None:
            raise DataError(f"--bounds {bounds}: data set {name!r} has its own. Leave it out.")
        data = load(name, normalise="none", seed=seed if name == "synthetic" else None, columns=columns)
        x = data.x_public
        return data, {"bounds": (x.min(axis=0), x.max(axis=0)) if len(x) else None, "target": None}
    table = columns.table(name)
    table.check_kept(columns.test)
    found = PublicFacts.of(table, columns.public, bounds)
    data = columns.split(table, seed)
    if found.classes and len(set(data.y_train.tolist())) == 1:
        raise DataError(
            f"{name}: {count_text(len(data.y_train), 'row')} of one class are left besides those to test on, and a "
            "classifier needs two classes. Take a smaller share with --test, or bring more rows."
        )
    if found.classes:
        data = data.recoded(found.classes, (0.0, 0.0))
    data = replace(data, remarks=(*data.remarks, *found.notes, *found.warnings))
    crowd = None if table.devices is None else table.crowd(test=columns.test)
    return data, {"bounds": (found.low, found.high), "target": found.ends, "crowd": crowd}


def _tell_before(report: Report, data: Dataset, made: Plan) -> None:
    """What somebody should know before the runs: what no epsilon covers, and crowds too small for their price."""
    from crowdml.datasets import is_table

    changed = () if is_table(data.name) else made.changed  # of a file, its remarks have said it with line and column
    for sentence in (*data.remarks, *made.warnings, *changed, *made.notes):
        report.aside.print(sentence)
    for crowd in dict.fromkeys((cell.shape.devices, cell.epsilon) for cell in made.cells):
        small = [(cell.outlook, cell) for cell in made.cells if (cell.shape.devices, cell.epsilon) == crowd]
        small = [(found, cell) for found, cell in small if found is not None]
        if small:
            found, least = min(small, key=lambda each: each[0].noise)
            names = [f"{cell.protocol} ({'masked' if cell.masked else 'alone'})" for _, cell in small]
            first = f" {least.name} has the least noise." if len(small) > 1 else ""
            report.aside.print(
                f"At ε {number_text(crowd[1])} the noise may hide what {crowd[0]:,} devices know in {', '.join(names)}."
                f"{first} {found.sentence}"
            )


def _show(report: Report, data: Dataset, found: Comparison) -> None:
    grid = dict.fromkeys((row.devices, row.epsilon) for row in found.rows)
    for devices, epsilon in grid:
        part = found.at(devices, epsilon)
        title = f"{one_line(data.name)}: {devices:,} devices, ε at most {number_text(epsilon)} for a sample"
        report.print(_table(part, title))
        report.print(f"Best: {part.best.name}. {part.verdict}")
    report.print(f"Data: {data.note}")


def _table(found: Comparison, title: str) -> Any:
    table = make_table(
        "", found.measure, "range", "sample ε", "device ε", "sent up", "rounds", "s", title=title, wrap=True
    )
    table.padding = (0, 1, 0, 0)  # eight columns in a terminal of eighty
    for masked, name in ((False, "alone"), (True, "under masks")):
        rows = [row for row in found.rows if row.masked == masked]
        if rows:
            table.add_row(f"{name}:", *[""] * 7)
        for row in rows:
            table.add_row(
                f" {row.protocol}",
                f"{row.accuracy:.3f}",
                f"{row.low:.2f}{' to ' if row.low < 0 else '-'}{row.high:.2f}",
                epsilon_text(row.epsilon_sample),
                epsilon_text(row.epsilon_device),
                size_text(row.bytes_up),
                f"{row.rounds:,}",
                f"{row.seconds:.1f}",
            )
    table.add_row("common class" if found.classes else "always the mean", f"{found.majority:.3f}", *[""] * 6)
    table.add_row("without privacy", f"{found.no_privacy:.3f}", *[""] * 6)
    return table


def _command(name: str, columns: Columns, bounds: str | None, delta: float | None, found: Comparison) -> str:
    """The command that makes the task of the best row."""
    best = found.best
    words: list[Any] = ["crowdml", "task", "new", "my-task.toml", "--data", name, *column_options(columns)]
    words += [] if bounds is None else ["--bounds", bounds]
    words += ["--protocol", best.protocol, "--masked" if best.masked else "--alone", "--epsilon", f"{best.epsilon:g}"]
    words += [] if delta is None else ["--delta", f"{delta:g}"]
    words += [] if columns.device else ["--devices", best.devices]
    return shlex.join(str(word) for word in words)
