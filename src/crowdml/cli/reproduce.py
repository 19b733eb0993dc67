"""`crowdml reproduce`: the papers' figures, with their claims beside our numbers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.numbers import Whole
from crowdml.cli.output import OutputError, Report, check_place, json_option, make_table, whole_file
from crowdml.texts import count_text

if TYPE_CHECKING:
    from crowdml.experiments.figure import Figure


@click.command(short_help="Reproduce figures of the papers.")
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--quick", is_flag=True, help="A small, quick run.")
@click.option("--full", is_flag=True, help="All that the list names under --full: for an accelerator.")
@click.option("--trials", type=Whole(1, 10_000), help="Number of trials. Default: the figure's own.")
@click.option("--all", "everything", is_flag=True, help="Make every figure.")
@click.option(
    "--out", metavar="DIR", type=click.Path(path_type=Path), help="Folder for the plot, JSON and tables of each figure."
)
@json_option
def reproduce(
    ids: tuple[str, ...],
    quick: bool,
    full: bool,
    trials: int | None,
    everything: bool,
    out: Path | None,
    json_path: str | None,
) -> None:
    """Reproduce figures of the papers by name, e.g. hamm2015/fig4. Without a name, list them and the data they need."""
    from crowdml.experiments.registry import FIGURES, find_figure, listing
    from crowdml.experiments.registry import reproduce as make

    report = Report(json_path)
    if out is not None:
        if out.is_file():
            raise OutputError(f"--out {out} is a file. Name a folder.")
        check_place(out / "figure.json")
    chosen = list(FIGURES) if everything else [find_figure(each).id for each in ids]
    if not chosen:
        table = make_table("figure", "what", "state", numbers=False)
        lines = listing()
        for line in lines:
            table.add_row(line.id, line.title, f"needs {', '.join(line.missing)}" if line.missing else line.state)
        report.print(table)
        report.print("With --full, for an accelerator; the other figures run all of theirs without:")
        for line in [line for line in lines if line.full]:
            report.print(f" {line.id}: {line.full}")
        if any(line.missing for line in lines):
            report.print("Data: `crowdml data fetch NAME`, or set CROWDML_DATA. A --quick run needs none.")
        report.finish({"figures": [vars(line) for line in lines]})
        return
    made: list[dict[str, Any]] = []
    for id_ in chosen:
        with report.progress() as progress:
            bar = progress.add_task(id_, total=None)

            def hear(
                text: str, done: int, total: int, bar: Any = bar, id_: str = id_, progress: Any = progress
            ) -> None:
                progress.update(bar, description=f"{id_}: {text}", completed=done, total=total)

            more = full and (not everything or bool(FIGURES[id_].full))
            figure = make(id_, quick, full=more, trials=trials, progress=hear)
        _show(report, figure)
        made.append(figure.to_json() | ({"quick": True} if quick else {}) | ({"full": True} if more else {}))
        if out is not None:
            _keep(report, figure, made[-1], out)
    report.finish(made[0] if len(made) == 1 else {"figures": made})


def _show(report: Report, figure: Figure) -> None:
    report.heading(figure.id, figure.title)
    alike = len({panel.y_label for panel in figure.panels}) == 1
    title = figure.y_label if alike else None
    table = make_table("series", "ends at", "sample ε", "claimed", title=title, wrap=True)
    panels, shown = {panel.key: panel for panel in figure.panels}, ""
    for series in sorted(figure.series, key=lambda each: list(panels).index(each.panel.split()[0])):
        label, panel = series.privacy, series.panel.split()[0]
        if len(panels) > 1 and panel != shown:  # several panels may have a series of the same name
            unit = "" if alike else f" ({panels[panel].y_label})"
            table.add_row(f"{panels[panel].title}{unit}:", "", "", "")
            shown = panel
        honest = "-" if label.epsilon is None else f"{label.epsilon:.4g}"
        claimed = "" if label.claimed is None else f"{label.claimed:.4g}"
        name = f"{series.name}{', as published' if label.as_published else ''}"
        name += f" (not covered: {', '.join(label.not_covered)})" if label.not_covered else ""
        table.add_row(name, f"{series.last:.4g}", honest, claimed)
    report.print(table)
    claims = make_table("claim", "paper", "ours", "holds", wrap=True)
    for claim in figure.claims:
        paper = "" if claim.paper is None else f"{claim.paper:.4g}"
        claims.add_row(claim.text, paper, f"{claim.ours:.4g}", "yes" if claim.holds else "NO")
    if figure.claims:
        report.print(claims)
    for note in figure.notes:
        report.print(f"- {note}")
    report.print(f"{count_text(figure.trials, 'trial')}, {figure.seconds:.1f} s; data: {figure.data}.")


def _keep(report: Report, figure: Figure, result: dict[str, Any], out: Path) -> None:
    import json

    texts = {".json": json.dumps(result, ensure_ascii=False, allow_nan=False) + "\n", ".md": figure.to_markdown()}
    for ending in (".json", ".md", ".png"):
        target = out / f"{figure.id}{ending}"
        with whole_file(target) as draft:
            if ending in texts:
                draft.write_text(texts[ending], encoding="utf-8")
            else:
                figure.plot(draft)
        report.line(f"Wrote {target}")
