"""`crowdml bench`: speed, as ratios."""

from __future__ import annotations

from importlib import import_module

import click

from crowdml.cli.output import Report, json_option, make_table
from crowdml.errors import UnknownName
from crowdml.texts import did_you_mean


@click.command(short_help="Measure crowdml against hand-written loops.")
@click.argument("name", required=False)
@click.option("--plot", "plot_path", default=None, help="Also draw a plot (benchmarks `scale` and `secagg`).")
@json_option
def bench(name: str | None, plot_path: str | None, json_path: str | None) -> None:
    """Measure crowdml against hand-written loops and installed peers in one run. Without NAME, list the benchmarks."""
    from crowdml.bench import NAMES, WHAT, run

    report = Report(json_path, plot_path)
    if name is None:
        table = make_table("benchmark", "what it measures", numbers=False)
        for each, what in WHAT.items():
            table.add_row(each, what)
        report.print(table)
        report.finish({"benchmarks": list(NAMES)})
        return
    if name not in NAMES:
        near = did_you_mean(name, NAMES)
        raise UnknownName(f"no benchmark is called {name!r}.{near} There are {', '.join(NAMES)}.")
    draw = getattr(import_module(f"crowdml.bench.{name}"), "plot", None)
    if plot_path is not None and draw is None:
        raise UnknownName(f"the benchmark {name!r} has no plot; `scale` and `secagg` have one.")
    report.aside.print(f"Measuring {name}...")
    result = run(name, lambda text: report.aside.print(f"  {text}"))
    rows = make_table("what", "value", "unit", "low", "high", title=str(result.get("id", name)), wrap=True)
    for row in result.get("rows", []):
        rows.add_row(row["name"], *_shown(row, "value"), row["unit"], *_shown(row, "low"), *_shown(row, "high"))
    report.print(rows)
    for row in result.get("rows", []):
        if row.get("note"):
            report.print(f"{row['name']}: {row['note']}")
    ratios = make_table("ratio", "value", "goal", "holds", wrap=True)
    for ratio in result.get("ratios", []):
        holds = "" if ratio.get("holds") is None else "yes" if ratio["holds"] else "NO"
        ratios.add_row(ratio["name"], *_shown(ratio, "value"), *_shown(ratio, "goal"), holds)
    report.print(ratios)
    report.plotted(lambda path: draw(result, path))  # pyright: ignore[reportOptionalCall]  refused above where there is none
    report.finish(result)


def _shown(row: dict[str, object], key: str) -> tuple[str]:
    value = row.get(key)
    return (f"{value:,.4g}" if isinstance(value, (int, float)) and abs(value) < 1e4 else
            f"{value:,.0f}" if isinstance(value, (int, float)) else "",)  # fmt: skip
