"""`crowdml task`: look at a task file before anybody runs it. What a server does with one is in `cli/server.py`."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.output import OutputError, Report, epsilon_text, json_option, loss_text, make_table, whole_file

if TYPE_CHECKING:
    from crowdml.protocol import Quote, QuotedRow
    from crowdml.task import Task


def shipped() -> list[str]:
    """Names of the tasks that come with the package."""
    return sorted(
        entry.name[:-5] for entry in resources.files("crowdml.tasks").iterdir() if entry.name.endswith(".toml")
    )


def shipped_text(name: str) -> str:
    return resources.files("crowdml.tasks").joinpath(f"{name}.toml").read_text(encoding="utf-8")


def find_task(given: str) -> Task:
    """A task by its file, or by the name of one that is shipped."""
    from crowdml.errors import UnknownName
    from crowdml.task import load, parse

    if given in shipped() and not Path(given).is_file():
        return parse(shipped_text(given), f"the shipped task {given!r}")
    if not Path(given).exists() and "/" not in given and not given.endswith(".toml"):
        raise UnknownName(f"{given!r} is neither a file nor a shipped task; shipped are {', '.join(shipped())}.")
    return load(given)


@click.group(short_help="Write, check, start, stop and export tasks.")
def task() -> None:
    """Write, check and list tasks; start, stop and export them on a server."""


@task.command("list")
@click.option(
    "--folder", default=None, type=click.Path(path_type=Path), help="Of a server: list the tasks that it hosts instead."
)
@click.option("--database", default=None, help="A server's database elsewhere: postgresql://...")
@json_option
def list_(folder: Path | None, database: str | None, json_path: str | None) -> None:
    """List the tasks that are shipped, or those that a server hosts."""
    from crowdml.protocol import quote
    from crowdml.protocols import find

    report = Report(json_path)
    if folder is not None or database is not None:
        _list_hosted(report, folder, database)
        return
    table = make_table("task", "title", "classes", "sample ε", numbers=False)
    rows: list[dict[str, Any]] = []
    for name in shipped():
        each = find_task(name)
        price = quote(find(each), each)
        rows.append({"name": name, "title": each.title, "hash": each.hash.hex(), "epsilon": price.sample_epsilon()})
        table.add_row(name, each.title, str(each.classes or "number"), epsilon_text(price.sample_epsilon()))
    report.print(table)
    report.finish({"tasks": rows})


def _list_hosted(report: Report, folder: Path | None, database: str | None) -> None:
    from crowdml.cli.server import open_store

    table = make_table("task", "hash", "state", "read by", "check-ins", "devices", numbers=False)
    rows: list[dict[str, Any]] = []
    with open_store(folder or Path("crowdml-server"), database) as store:
        for each in store.tasks():
            check_ins, devices = store.head(each.hash).index, len(store.last_seq(each.hash))
            rows.append({"name": each.name, "hash": each.hash.hex(), "state": each.state, "closed": each.closed,
                         "check_ins": check_ins, "devices": devices})  # fmt: skip
            whom = "those who joined" if each.closed else "anyone"
            table.add_row(each.name, each.hash.hex()[:12], each.state, whom, f"{check_ins:,}", f"{devices:,}")
    report.print(table)
    report.finish({"tasks": rows})


@task.command()
@click.argument("file_or_name", metavar="TASK")
@json_option
def check(file_or_name: str, json_path: str | None) -> None:
    """Check TASK (a file, or a shipped name) and print its price."""
    from crowdml.protocol import check_budget
    from crowdml.protocols import find

    report = Report(json_path)
    found = find_task(file_or_name)
    price = check_budget(find(found), found)
    batch = find(found).batch(found)
    result = _priced(found, price, batch)
    report.heading(found.name, found.title)
    if found.as_published:
        report.print("As published: a paper's own formulas, for the simulator only.")
    leaves = make_table(
        "leaves", "mechanism", "sensitivity", "noise", "sample pays", title="What a check-in lets out", numbers=False
    )
    for row in result["rows"]:
        leaves.add_row(row["row"], row["mechanism"], row["sensitivity"], row["noise"], row["loss"])
    report.print(leaves)
    for row in result["rows"]:
        report.print(f" {row['row']}: {row['promise']}; for {row['observer']} to see")
    costs = make_table(
        "after", "a sample's ε", "the device's ε", title=f"What it costs, at δ = {found.privacy.delta:g}"
    )
    for line in result["device"]:
        costs.add_row(line["after"], epsilon_text(price.sample_epsilon()), epsilon_text(line["epsilon"]))
    report.print(costs)
    report.print("The device's total replaces all of its samples at once; a sample's, any single one.")
    report.line(f"sha256 {found.hash.hex()}")
    report.finish(result)


def _priced(found: Task, price: Quote, batch: int) -> dict[str, Any]:
    budget = found.privacy.budget
    steps = [(1, "1 check-in"), (10, "10 check-ins")]
    if budget is not None:
        most = budget.samples // batch
        steps = [step for step in steps if step[0] < most] + [
            (most, f"all {most} check-ins" if most > 1 else "its only check-in")
        ]
    return {
        "name": found.name,
        "hash": found.hash.hex(),
        "as_published": found.as_published,
        "delta": found.privacy.delta,
        "batch": batch,
        "epsilon_sample": price.sample_epsilon(),
        "budget": None if budget is None else {"epsilon": float(budget.epsilon), "samples": budget.samples},
        "device": [{"check_ins": n, "after": text, "epsilon": price.device_epsilon(n)} for n, text in steps],
        "rows": [_row(row) for row in price.rows],
    }


def _row(row: QuotedRow) -> dict[str, Any]:
    mechanism = row.mechanism
    scale, sigma = getattr(mechanism, "scale", None), getattr(mechanism, "sigma", None)
    noise = (
        f"sigma {float(sigma):.4g}"
        if sigma is not None
        else f"scale {float(scale):.4g}"
        if scale is not None
        else "none"
    )
    sensitivity = mechanism.sensitivity
    return {
        "row": row.row,
        "mechanism": mechanism.kind,
        "sensitivity": f"{type(sensitivity).__name__} {sensitivity.bound}",
        "adjacency": sensitivity.adjacency.value,
        "noise": noise,
        "grid": float(mechanism.grid.step),
        "loss": loss_text(row.loss),
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
        raise UnknownName(f"no shipped task is called {like!r}; there are {', '.join(shipped())}.")
    target = Path(path)
    if target.suffix != ".toml":
        raise OutputError(f"{path}: a task file ends in .toml.")
    if target.exists():
        raise OutputError(f"{path} is already there and was left as it is. Name another file, or delete it first.")
    with whole_file(target) as draft:
        draft.write_text(shipped_text(like), encoding="utf-8")
    report.line(f"Wrote {path}. Edit it, then run `crowdml task check {path}`.")
    report.finish({"path": path, "from": like})
