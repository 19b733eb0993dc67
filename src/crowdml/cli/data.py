"""`crowdml data`: which data sets there are, and fetching them."""

from __future__ import annotations

from dataclasses import asdict

import click

from crowdml.cli.output import Report, json_option, make_table


@click.group()
def data() -> None:
    """List and fetch data sets."""


@data.command("list")
@json_option
def list_(json_path: str | None) -> None:
    """List the data sets, and where each one is."""
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
    """Bring the files of data sets into the cache folder."""
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
