"""`crowdml data`: which data sets there are, fetching them, and a look at a table of one's own."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from crowdml.cli.numbers import Whole
from crowdml.cli.output import OutputError, Report, json_option, make_table, size_text, whole_file
from crowdml.texts import count_text, one_line

if TYPE_CHECKING:
    from crowdml.datasets.described import TableFacts


@click.group()
def data() -> None:
    """List and fetch data sets, and look at a table of your own."""


@data.command("list")
@json_option
def list_(json_path: str | None) -> None:
    """List the data sets, and which of them are here."""
    from crowdml.datasets import catalogue

    report = Report(json_path)
    table = make_table("name", "devices", "test", "public", "features", "classes", "state")
    rows = catalogue()
    for info in rows:
        state = "here" if info.found else "missing"
        numbers = (f"{count:,}" for count in (*info.rows, info.features, info.classes))
        table.add_row(info.name, *numbers, state)
    report.print(table)
    if any(not info.found for info in rows):
        report.print("Missing ones: `crowdml data fetch NAME`, or set CROWDML_DATA to the folder that holds them.")
    report.finish({"data": [asdict(info) for info in rows]})


@data.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--mirror", metavar="URL", help="A folder on the web that holds our prepared files.")
@json_option
def fetch(names: tuple[str, ...], mirror: str | None, json_path: str | None) -> None:
    """Download data sets into the cache folder."""
    from crowdml.datasets import fetch as fetch_data

    report = Report(json_path)
    fetched: list[dict[str, object]] = []
    with report.progress() as progress:
        for name in names:
            bars: dict[str, int] = {}

            def hear(file: str, done: int, total: int | None, bars: dict[str, int] = bars) -> None:
                if file not in bars:
                    bars[file] = progress.add_task(file, total=total)
                progress.update(bars[file], completed=done, total=total)  # pyright: ignore[reportArgumentType]

            paths = fetch_data(name, hear, mirror=mirror)
            fetched.append({"name": name, "files": [str(path) for path in paths]})
    for each in fetched:
        files = each["files"]
        report.line(f"{each['name']}: {', '.join(files) if isinstance(files, list) and files else 'needs no file'}")
    report.finish({"fetched": fetched})


@data.command(short_help="Show what stands in a table of your own.")
@click.argument("path", metavar="FILE")
@json_option
def show(path: str, json_path: str | None) -> None:
    """Show what stands in FILE (.csv, .csv.gz, .npz, .parquet), and which column looks like what."""
    from crowdml.datasets.described import described

    report = Report(json_path)
    found = described(path)
    table = make_table("column", "values", "missing", "lowest", "highest", "looks like", title=one_line(path))
    for column in found.columns:
        low, high = ("" if each is None else f"{each:,.4g}" for each in (column.low, column.high))
        missing = f"{column.missing:,}" if column.missing else ""
        table.add_row(one_line(column.name), f"{column.values:,}", missing, low, high, column.looks)
    report.print(table)
    *facts, command = _facts(found)
    for line in facts:
        report.print(line)
    report.line(command)  # in one piece, to be copied
    report.finish({**asdict(found), "missing": found.missing})


@data.command(short_help="Train a public extractor of pictures on digits drawn by code.")
@click.argument("path", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--drawings", type=Whole(256, 10**6), help="How many digits are drawn. Default: 59,760.")
@click.option("--passes", type=Whole(1, 1000), help="How often each of them is seen. Default: 8.")
@json_option
def extractor(path: Path, drawings: int | None, passes: int | None, json_path: str | None) -> None:
    """Train the extractor that comes with the package again, and write it to FILE.safetensors.

    Nobody's pictures are in it. Floats differ between machines, so the file's hash does, too.
    """
    import hashlib

    from crowdml.experiments.extractor import DRAWINGS, PASSES, make

    report = Report(json_path)
    if path.suffix != ".safetensors":
        raise OutputError(f"{path}: an extractor's file ends in .safetensors. Nothing was done.")
    with whole_file(path) as draft:
        with report.progress() as bar:
            shown = bar.add_task("steps", total=None)
            made = make(
                drawings or DRAWINGS,
                passes or PASSES,
                tell=lambda done, steps: bar.update(shown, completed=done, total=steps),
            )
        draft.write_bytes(made)
    sha256 = hashlib.sha256(made).hexdigest()
    report.line(f"Extractor: {path}, {size_text(len(made))}. A task names it by its sha256:")
    report.line(sha256)
    report.finish({"path": str(path), "bytes": len(made), "sha256": sha256})


def _facts(found: TableFacts) -> list[str]:
    """Sentences about the table, and the command to go on with."""
    said = [f"{count_text(found.rows, 'row')}, {count_text(len(found.columns), 'column')}."]
    if found.mark != ",":
        comma = " A comma in a number is its decimal mark." if found.mark == ";" else ""
        said.append(f"Its fields are separated by {found.mark!r}.{comma}")
    if found.kind == "class":
        shown = [f"{one_line(name)} {count:,}" for name, count in list(found.classes.items())[:10]]
        more = f" and {len(found.classes) - 10} more" if len(found.classes) > 10 else ""
        said.append(f"Classes in {found.label!r}: {', '.join(shown)}{more}.")
    else:
        said.append(f"{found.label!r} holds numbers: a task for it predicts a number.")
    if found.device is not None:
        said.append(f"{found.device!r} names {found.devices:,} devices.")
    if found.missing:
        gone = [f"{one_line(each.name)} (first: {each.first_missing})" for each in found.columns if each.missing]
        said.append(
            f"{count_text(found.missing, 'value')} missing, in {', '.join(gone[:5])}{' ...' * (len(gone) > 5)}. Fill "
            "them in, delete the rows, or leave the columns out."
        )
    for column in found.strays:
        rows, texts = count_text(column.texts, "row"), "a text" if column.texts == 1 else "texts"
        said.append(
            f"Column {one_line(column.name)!r} holds {texts} among numbers (in {rows}, first: {column.first_text}). "
            "Write numbers there, or delete the rows."
        )
    leave = found.looking("row id", "constant", "empty", "text", "category")
    if leave:
        said.append(f"No features as they are: {', '.join(map(one_line, leave))}. Leave them out with --ignore.")
    options = [f"--label {_quoted(found.label)}"]
    options += [] if found.device is None else [f"--device {_quoted(found.device)}"]
    options += [f"--ignore {_quoted(name)}" for name in leave]
    said.append(f"Next: crowdml task new my-task.toml --data {_quoted(found.path)} {' '.join(options)}")
    return said


def _quoted(name: str) -> str:
    import shlex

    return shlex.quote(one_line(name))
