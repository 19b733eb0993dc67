"""`crowdml task`: look at a task file before anybody runs it. What a server does with one is in `cli/hosting.py`."""

from __future__ import annotations

import shlex
from collections.abc import Generator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.numbers import Number, Whole
from crowdml.cli.output import OutputError, Report, json_option, make_table, plugin_option, size_text, whole_file
from crowdml.cli.tables import column_options, table_options
from crowdml.errors import DataError, PluginError, TaskError
from crowdml.task import find_task, shipped, shipped_text
from crowdml.texts import did_you_mean, epsilon_text, number_text

if TYPE_CHECKING:
    from crowdml.datasets.tables import Columns
    from crowdml.shape import Shape
    from crowdml.task import Task


SHIPPED_DATA = {
    "admm-adult": "adult",
    "demo": "digits",
    "digits-cnn": "digits",
    "digits-gram": "digits",
    "digits-masked": "digits",
    "digits-mlp": "digits",
    "gram-mnist": "mnist-pixels",
    "mnist-cnn": "mnist-pixels",
    "robust-digits": "digits",
    "traffic": "scats",
}
"""What a shipped task is simulated on, where no data set has its name."""


def usual_data(task: Task) -> str:
    """The data set that a task was made for, or that has its name."""
    from crowdml.datasets import NAMES

    name = SHIPPED_DATA.get(task.name) or (task.name if task.name in NAMES else None)
    if name is None:
        raise DataError(
            f"task {task.name!r} names no data set; say --data, a file with a table or one of {', '.join(NAMES)}."
        )
    return name


SEEN_BY = {"aggregate": "whoever sees a cohort's sum", "devices": "other devices, with the server trusted"}
"""An observer in words, where its own name says too little."""


@contextmanager
def naming(given: str) -> Generator[None]:
    """Put a task file's name before what is wrong in it, also where a protocol finds it out, and not the parser."""
    try:
        yield
    except TaskError as error:
        if not Path(given).is_file() or str(error).startswith(given):
            raise
        raise TaskError(f"{given}: {error}") from error


@click.group(short_help="Write, check, start, pause, stop and export tasks.")
def task() -> None:
    """Write, check and list tasks; start, pause, stop and export them on a server."""


@task.command("list")
@click.option(
    "--folder", default=None, type=click.Path(path_type=Path), help="A server's folder: list the tasks that it hosts."
)
@click.option("--database", default=None, help="A server's database: postgresql://...")
@plugin_option
@json_option
def list_(folder: Path | None, database: str | None, json_path: str | None) -> None:
    """List the shipped tasks, or those that a server hosts."""
    from crowdml.price import Price
    from crowdml.protocols import find, settled

    report = Report(json_path)
    if folder is not None or database is not None:
        _list_hosted(report, folder, database)
        return
    table = make_table("task", "title", "classes", "sample ε", numbers=False)
    rows: list[dict[str, Any]] = []
    for name in shipped():
        each = find_task(name)
        price = Price.of(find(each), each)
        cost = price.sample_epsilon(each.privacy.uses)
        rows.append({"name": name, "title": each.title, "hash": settled(each).hash.hex(), "epsilon": cost})
        table.add_row(name, each.title, str(each.classes or "number"), epsilon_text(cost))
    report.print(table)
    report.finish({"tasks": rows})


def _list_hosted(report: Report, folder: Path | None, database: str | None) -> None:
    from crowdml.cli.hosting import open_store
    from crowdml.protocols import refusal
    from crowdml.server.validation import watched
    from crowdml.task import from_canonical

    cells: list[tuple[str, ...]] = []
    said: list[str] = []
    rows: list[dict[str, Any]] = []
    with open_store(folder or Path("crowdml-server"), database) as store:
        for each in store.tasks():
            check_ins = store.head(each.hash).index - store.totals_count(each.hash)
            devices = len(store.last_seq(each.hash))
            ended = [one.detail for one in store.events(task=each.hash, limit=1000) if one.kind == "stopped"]
            found = from_canonical(each.canonical)
            try:
                refused, seen = refusal(found), watched(store, found)
                state = each.state if refused is None else "stopped"  # as a server shows it
                why = ended[0] if ended and each.state == "stopped" else None if refused is None else refused.reason
            except PluginError as error:
                state, why, seen = "aside", str(error), None
            rows.append({"name": each.name, "hash": each.hash.hex(), "state": state, "why": why,
                         "closed": each.closed, "check_ins": check_ins, "devices": devices,
                         "validation": None if seen is None else seen.plain()})  # fmt: skip
            whom = "who joined" if each.closed else "anyone"
            figure = "" if seen is None else seen.short(open_=False)
            cells.append((each.name, each.hash.hex()[:8], state, whom, f"{check_ins:,}", f"{devices:,}", figure))
            if why:
                said.append(f"{each.name} is {state if state == 'stopped' else 'put aside'}: {why.rstrip('.')}.")
            if seen is not None:
                stands = seen.said(stopped=state == "stopped")
                worth = "" if seen.verdict is None else f" {seen.verdict.sentence}"
                said.append(f"{each.name} on {seen.found.terms.name}: {seen.text()}.{worth} {seen.promise()} {stands}")
    columns = (
        "task",
        "hash",
        "state",
        "read by",
        "check-ins",
        "devices",
        *(("own data",) if any(row[-1] for row in cells) else ()),
    )
    table = make_table(*columns, numbers=False, wrap=True)
    for row in cells:
        table.add_row(*row[: len(columns)])
    report.print(table)
    for line in said:
        report.print(line)
    report.finish({"tasks": rows})


@task.command()
@click.argument("file_or_name", metavar="TASK")
@click.option("--devices", type=Whole(1, 10**7), metavar="N", help="Devices that you expect: are they enough?")
@click.option("--held", type=Whole(1, 10**7), metavar="M", help="Samples of each. Default: those of the budget.")
@plugin_option
@json_option
def check(file_or_name: str, devices: int | None, held: int | None, json_path: str | None) -> None:
    """Check TASK (a file, or a shipped name) and print its price.

    Tells whether a crowd is too small for it, too.
    """
    from crowdml.price import check_budget
    from crowdml.protocols import check_for_devices, check_plugins, find, remarks_on, settled
    from crowdml.server.sizes import check_sizes
    from crowdml.suggest import expected_crowd

    report = Report(json_path)
    check_plugins()
    with naming(file_or_name):
        found = settled(find_task(file_or_name))  # as it would be published: that is what its hash names
        price = check_budget(check_for_devices(found), found)
        if not found.as_published and found.privacy.mechanism != "none":  # those run in the simulator alone
            check_sizes(found, find(found))
    crowd = expected_crowd(found, devices, held)
    result: dict[str, Any] = {
        "name": found.name,
        "hash": found.hash.hex(),
        "as_published": found.as_published,
        "model": _model(found),
        "masking": _masking(found),
        **_outlook(found, crowd),
        **price.plain,
    }
    report.heading(found.name, found.title)
    if found.as_published:
        report.print("As published: a paper's own formulas, for the simulator only.")
    if result["model"] is not None:
        report.print(f"Learns: {result['model']}")
    leaves = make_table(
        "leaves", "mechanism", "sensitivity", "noise", "a sample's ε", title="What a check-in lets out", numbers=False
    )
    for row in result["rows"]:
        leaves.add_row(row["row"], row["mechanism"], _moved(row), row["noise"], epsilon_text(row["epsilon"]))
    report.print(leaves)
    for row in result["rows"]:
        seen_by = SEEN_BY.get(row["observer"], row["observer"])
        report.print(f" {row['row']}: {row['promise']}; visible to {seen_by}")
    costs = make_table("after", "a sample's ε", "the device's ε", title="What it costs")
    for after, *epsilons in price.table:
        costs.add_row(after, *map(epsilon_text, epsilons))
    report.print(costs)
    report.print(price.note)
    if result["masking"] is not None:
        _show_masking(report, result["masking"])
    for remark in remarks_on(found):
        report.print(remark)
    _show_outlook(report, found, crowd, result["outlook"], asked=devices is not None or held is not None)
    report.line(f"sha256 {found.hash.hex()}")
    report.finish(result)


def _outlook(found: Task, shape: Shape | None) -> dict[str, Any]:
    """Whether the crowd that is expected is too small for the task, or for its price, in a sentence."""
    from crowdml.suggest import outlook, too_few

    crowd = shape and {"devices": shape.devices, "held": shape.held}
    if shape is not None and (reason := too_few(found, shape)) is not None:
        return {"crowd": crowd, "outlook": reason}
    told = shape and outlook(found, shape)
    return {"crowd": crowd, "outlook": told and told.sentence}


def _show_outlook(report: Report, found: Task, shape: Shape | None, told: str | None, *, asked: bool) -> None:
    """The outlook of this crowd; of one that is large enough only where somebody asked."""
    from crowdml.suggest import has_outlook

    if not has_outlook(found) and told is None:
        if asked:
            report.print("No rule tells whether a crowd is too small for this task.")
    elif shape is None:
        report.print(
            "The task does not say how many devices there will be. With --devices N, and --held M for the samples of "
            "each, this command tells whether the crowd is too small for its price."
        )
    elif asked or told is not None:
        report.print(f"{shape.text}: {told or 'This crowd is large enough for its price.'}")


def _show_masking(report: Report, terms: dict[str, Any]) -> None:
    graph = (
        "every pair of devices shares a mask"
        if terms["complete"]
        else f"each device shares masks with {terms['neighbours']} others"
    )
    report.print(
        f"Cohorts of {terms['minimum']} to {terms['cohort']}: {graph}, and any {terms['threshold']} shares recover a "
        "secret. "
        f"At least {terms['minimum']} survive, {terms['honest']} of them honest: the noise is calibrated to those."
    )
    report.print(
        f"A device sends {size_text(terms['bytes'])} of masked numbers a round, in a ring of "
        f"{' and '.join(str(bits) for bits in terms['bits'])} bits, and its keys and shares."
    )


def _masking(found: Task) -> dict[str, Any] | None:
    """The terms that devices hold the server to; refused here, by key, if no safe ones exist."""
    from crowdml.errors import TaskError
    from crowdml.protocols import find
    from crowdml.secagg.terms import terms_of

    masking = found.masking
    if masking is None or found.privacy.mechanism == "none":
        return None
    try:
        terms = terms_of(found, find(found).mechanisms(found))
    except TaskError as error:
        raise TaskError(f"masking.minimum = {masking.minimum}, masking.cohort = {masking.cohort}: {error}") from error
    plan = terms.plan(masking.cohort)
    return {
        "cohort": masking.cohort,
        "minimum": masking.minimum,
        "colluders": masking.colluders,
        "honest": masking.honest,
        "window": float(masking.window),
        "lease": float(masking.lease),
        "floor": None if masking.floor is None else float(masking.floor),
        "complete": plan.complete,
        "neighbours": plan.neighbours,
        "threshold": plan.threshold,
        "bits": sorted({field.bits for field in terms.fields}),
        "bytes": terms.size,
    }


def _model(found: Task) -> str | None:
    """What is learnt, with its size; None where the protocol solves for a model of its own (gram)."""
    from crowdml.models import KINDS, describe_model, read_model

    kind = str(found.model["kind"])
    if kind not in KINDS:
        return None
    penalties = ("l1", "l2")
    made = read_model(found.model, found.features.dimension, found.classes, found.labels.bound, penalties)
    return describe_model(kind, made)


def _moved(row: dict[str, Any]) -> str:
    """The sensitivity of a row for people: the norm and its bound, rounded. JSON has the exact fraction."""
    norm, bound = row["sensitivity"].split()
    return f"{norm} {number_text(float(Fraction(bound)), 6)}"


@task.command(short_help="Write a task file to edit, or one that fits a table.")
@click.argument("path", metavar="FILE.toml")
@click.option("--from", "like", metavar="NAME", help="The shipped task to start from. Default: activity.")
@click.option("--data", metavar="FILE", help="A table that the task shall fit: .csv, .csv.gz, .npz, .parquet.")
@table_options()
@click.option("--bounds", metavar="LOW,HIGH|FILE", help="Public bounds of the columns: numbers, or a file.")
@click.option("--protocol", metavar="NAME", help="With --data. Default: by the number of devices.")
@click.option("--masked/--alone", default=None, help="With --data: masks, or none. Default: by the number of devices.")
@click.option("--epsilon", type=Number(1e-6, 1e6), metavar="E", help="With --data: a sample's total. Default: 1.")
@click.option(
    "--delta", type=Number(1e-15, 1e-5), metavar="D", help="With --data. Default: 1e-6, or less for many rows."
)
@click.option(
    "--devices",
    type=Whole(1, 10**7),
    metavar="N",
    help="With --data: how many. Default: as many as have ten rows each, from 5 to 1000.",
)
@json_option
def new(
    path: str,
    like: str | None,
    data: str | None,
    columns: Columns,
    bounds: str | None,
    protocol: str | None,
    masked: bool | None,
    epsilon: float | None,
    delta: float | None,
    devices: int | None,
    json_path: str | None,
) -> None:
    """Write a task file to edit: a copy of a shipped task, or with --data one that fits a table."""
    from crowdml.errors import UnknownName

    report = Report(json_path)
    target = Path(path)
    if target.suffix != ".toml":
        raise OutputError(f"{path}: a task file ends in .toml.")
    if target.exists():
        raise OutputError(f"{path} is already there and was left as it is. Name another file, or delete it first.")
    made = {"bounds": bounds, "protocol": protocol, "epsilon": epsilon, "delta": delta, "devices": devices}
    if data is not None:
        if like is not None:
            raise OutputError("--from copies a shipped task, and --data writes one for a table. Name one of them.")
        made["epsilon"] = 1.0 if epsilon is None else epsilon
        _new_for_table(report, target, data, columns, {**made, "masked": masked})
        return
    given = [f"--{key}" for key, value in made.items() if value is not None] + column_options(columns)[::2]
    given += [] if masked is None else ["--masked" if masked else "--alone"]
    if given:
        listed = " and ".join(filter(None, (", ".join(given[:-1]), given[-1])))
        raise OutputError(
            f"{listed} {'fits' if len(given) == 1 else 'fit'} a task to a table, and no table is named. Add --data "
            "FILE, or leave that out and edit the file."
        )
    like = like or "activity"
    if like not in shipped():
        near = did_you_mean(like, shipped())
        raise UnknownName(f"no shipped task is called {like!r}.{near} There are {', '.join(shipped())}.")
    with whole_file(target) as draft:
        draft.write_text(shipped_text(like), encoding="utf-8")
    report.line(f"Wrote {path}. Edit it, then run `crowdml task check {path}`.")
    report.finish({"path": path, "from": like})


def _new_for_table(report: Report, target: Path, data: str, columns: Columns, made: dict[str, Any]) -> None:
    from crowdml.cli.task_of_table import summary, task_name, task_of_table
    from crowdml.protocols import settled

    written = task_of_table(data, columns, name=task_name(str(target)), **made)
    with whole_file(target) as draft:
        draft.write_text(written.text, encoding="utf-8")
    report.line(f"Wrote {target}: {summary(written)}.")
    for note in written.notes:
        report.print(note)
    command = ["crowdml", "simulate", str(target), "--data", data, *column_options(columns)]
    report.line(f"Next: {shlex.join(command)}")
    report.finish({"path": str(target), "data": data, "hash": settled(written.task).hash.hex(),
                   "protocol": written.task.protocol["kind"], "notes": written.notes})  # fmt: skip
