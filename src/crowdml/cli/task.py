"""`crowdml task`: look at a task file before anybody runs it. What a server does with one is in `cli/server.py`."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.output import (
    OutputError,
    Report,
    epsilon_text,
    json_option,
    loss_epsilon,
    make_table,
    size_text,
    whole_file,
)
from crowdml.errors import TaskError
from crowdml.task import find_task, shipped, shipped_text
from crowdml.texts import did_you_mean, number_text

if TYPE_CHECKING:
    from crowdml.protocol import Quote, QuotedRow
    from crowdml.task import Task


SHIPPED_DATA = {
    "admm-adult": "adult",
    "demo": "digits",
    "digits-gram": "digits",
    "digits-masked": "digits",
    "digits-mlp": "digits",
    "gram-mnist": "mnist-pixels",
    "traffic": "scats",
}
"""What a shipped task is simulated on, where no data set has its name."""


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
    "--folder", default=None, type=click.Path(path_type=Path), help="Of a server: list the tasks that it hosts instead."
)
@click.option("--database", default=None, help="A server's database elsewhere: postgresql://...")
@json_option
def list_(folder: Path | None, database: str | None, json_path: str | None) -> None:
    """List the tasks that are shipped, or those that a server hosts."""
    from crowdml.protocol import quote
    from crowdml.protocols import find, settled

    report = Report(json_path)
    if folder is not None or database is not None:
        _list_hosted(report, folder, database)
        return
    table = make_table("task", "title", "classes", "sample ε", numbers=False)
    rows: list[dict[str, Any]] = []
    for name in shipped():
        each = find_task(name)
        price = quote(find(each), each)
        cost = price.sample_epsilon(each.privacy.uses)
        rows.append({"name": name, "title": each.title, "hash": settled(each).hash.hex(), "epsilon": cost})
        table.add_row(name, each.title, str(each.classes or "number"), epsilon_text(cost))
    report.print(table)
    report.finish({"tasks": rows})


def _list_hosted(report: Report, folder: Path | None, database: str | None) -> None:
    from crowdml.cli.server import open_store
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
            refused = refusal(found)
            state = each.state if refused is None else "stopped"  # as a server shows it
            why = ended[0] if ended and each.state == "stopped" else None if refused is None else refused.reason
            seen = watched(store, found)
            rows.append({"name": each.name, "hash": each.hash.hex(), "state": state, "why": why,
                         "closed": each.closed, "check_ins": check_ins, "devices": devices,
                         "validation": None if seen is None else seen.plain()})  # fmt: skip
            whom = "who joined" if each.closed else "anyone"
            figure = "" if seen is None else seen.short(open_=False)
            cells.append((each.name, each.hash.hex()[:8], state, whom, f"{check_ins:,}", f"{devices:,}", figure))
            if why:
                said.append(f"{each.name} is stopped: {why}.")
            if seen is not None:
                stands = seen.said(stopped=state == "stopped")
                said.append(f"{each.name} on {seen.found.terms.name}: {seen.text()}. {seen.promise()} {stands}")
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
@json_option
def check(file_or_name: str, json_path: str | None) -> None:
    """Check TASK (a file, or a shipped name) and print its price."""
    from crowdml.protocol import check_budget
    from crowdml.protocols import check_for_devices, find, settled
    from crowdml.server.sizes import check_sizes

    report = Report(json_path)
    with naming(file_or_name):
        found = settled(find_task(file_or_name))  # as it would be published: that is what its hash names
        price = check_budget(check_for_devices(found), found)
        if not found.as_published and found.privacy.mechanism != "none":  # those run in the simulator alone
            check_sizes(found, find(found))
    batch = find(found).batch(found)
    result = _priced(found, price, batch)
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
    at, masked = f"at δ = {number_text(found.privacy.delta)}", found.masking is not None
    with_some = f", with at most {found.masking.colluders} colluders" if found.masking is not None else ""
    costs = make_table("after", "a sample's ε", "the device's ε", title=f"What it costs, {at}{with_some}")
    left = make_table("after", "a sample's ε", "the device's ε", title=f"And if everyone else colludes, {at}")
    for line in result["device"]:
        costs.add_row(line["after"], epsilon_text(line["epsilon_sample"]), epsilon_text(line["epsilon"]))
        alone = line["epsilon_sample_alone"], line["epsilon_alone"]
        left.add_row(line["after"], *(epsilon_text(each) for each in alone))
    report.print(costs)
    if masked:
        report.print(left)
    report.print(
        "The device's epsilon is for replacing all of its samples at once; a sample's epsilon, for replacing any one."
    )
    if result["masking"] is not None:
        _show_masking(report, result["masking"])
    for remark in find(found).remarks(found):
        report.print(remark)
    report.line(f"sha256 {found.hash.hex()}")
    report.finish(result)


def _show_masking(report: Report, terms: dict[str, Any]) -> None:
    graph = "everyone shares masks with everyone" if terms["complete"] else f"{terms['neighbours']} neighbours each"
    report.print(
        f"Cohorts of {terms['minimum']} to {terms['cohort']}: {graph}, {terms['threshold']} shares rebuild a secret. "
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


def _priced(found: Task, price: Quote, batch: int) -> dict[str, Any]:
    budget, uses = found.privacy.budget, found.privacy.uses
    steps = [(1, "1 check-in"), (10, "10 check-ins")]
    if budget is not None:
        most = budget.samples // batch * uses
        steps = [step for step in steps if step[0] < most] + [
            (most, f"all {most} check-ins" if most > 1 else "its only check-in")
        ]
    return {
        "name": found.name,
        "hash": found.hash.hex(),
        "as_published": found.as_published,
        "model": _model(found),
        "delta": found.privacy.delta,
        "batch": batch,
        "uses": uses,
        "epsilon_sample": price.sample_epsilon(uses),
        "epsilon_sample_alone": price.sample_epsilon_alone(uses),
        "budget": None if budget is None else {"epsilon": float(budget.epsilon), "samples": budget.samples},
        "device": [
            {
                "check_ins": n,
                "after": text,
                "epsilon": price.device_epsilon(n),
                "epsilon_alone": price.device_epsilon_alone(n),
                "epsilon_sample": price.sample_epsilon(min(n, uses)),
                "epsilon_sample_alone": price.sample_epsilon_alone(min(n, uses)),
            }
            for n, text in steps
        ],
        "masking": _masking(found),
        "rows": [_row(row, found.privacy.delta) for row in price.rows],
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


def _row(row: QuotedRow, delta: float) -> dict[str, Any]:
    mechanism = row.mechanism
    law, sensitivity = mechanism.law, mechanism.sensitivity
    return {
        "row": row.row,
        "mechanism": mechanism.kind,
        "sensitivity": f"{type(sensitivity).__name__} {sensitivity.bound}",
        "adjacency": sensitivity.adjacency.value,
        "noise": "none" if law is None else f"{law.parameter} {number_text(law.steps, 4)}",
        "noise_steps": None if law is None else float(law.steps),
        "noise_unit": None if law is None else float(law.unit),
        "grid": float(mechanism.grid.step),
        "loss": str(row.loss),
        "epsilon": loss_epsilon(row.loss, delta),
        "observer": mechanism.observer.value,
        "promise": mechanism.promise,
    }


@task.command()
@click.argument("path", metavar="FILE.toml")
@click.option(
    "--from", "like", metavar="NAME", default="activity", show_default=True, help="The shipped task to start from."
)
@json_option
def new(path: str, like: str, json_path: str | None) -> None:
    """Write a task file to edit, with every common key in it."""
    from crowdml.errors import UnknownName

    report = Report(json_path)
    if like not in shipped():
        near = did_you_mean(like, shipped())
        raise UnknownName(f"no shipped task is called {like!r}.{near} There are {', '.join(shipped())}.")
    target = Path(path)
    if target.suffix != ".toml":
        raise OutputError(f"{path}: a task file ends in .toml.")
    if target.exists():
        raise OutputError(f"{path} is already there and was left as it is. Name another file, or delete it first.")
    with whole_file(target) as draft:
        draft.write_text(shipped_text(like), encoding="utf-8")
    report.line(f"Wrote {path}. Edit it, then run `crowdml task check {path}`.")
    report.finish({"path": path, "from": like})
