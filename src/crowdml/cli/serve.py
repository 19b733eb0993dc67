"""`crowdml serve`: the server, in one process and one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from crowdml.cli.output import Report, json_option


@click.command()
@click.option("--folder", default="crowdml-server", show_default=True, type=click.Path(path_type=Path),
              help="Where the server keeps everything.")  # fmt: skip
@click.option(
    "--database", default=None, help="A database elsewhere: postgresql://... instead of SQLite in the folder."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", default=8080, show_default=True, help="The port to listen on; 0 picks a free one.")
@click.option("--task", "tasks", multiple=True, help="A task to host: a file, or the name of one that is shipped.")
@click.option("--invite", default=0, show_default=True, help="Print an invitation for so many devices.")
@click.option("--certificate", nargs=2, default=None, type=click.Path(path_type=Path),
              help="TLS: the files of the certificate chain and of its key.")  # fmt: skip
@json_option
def serve(
    folder: Path,
    database: str | None,
    host: str,
    port: int,
    tasks: tuple[str, ...],
    invite: int,
    certificate: tuple[Path, Path] | None,
    json_path: str | None,
) -> None:
    """Run a server until it is stopped; what it acknowledged survives any stop."""
    from crowdml.cli.task import find_task
    from crowdml.server.serve import Started, log_plainly, run
    from crowdml.server.serve import serve as make

    report = Report(json_path)

    def tell(started: Started) -> None:
        report.line(f"Serving {', '.join(started.tasks) or 'no task yet'} at {started.address}")
        if started.code is not None:
            report.line(f"A device joins with: crowdml join {started.address} {started.code}")
        result: dict[str, Any] = {"address": started.address, "tasks": list(started.tasks), "code": started.code}
        report.finish(result)

    log_plainly()
    run(
        make(
            folder,
            database=database,
            host=host,
            port=port,
            tasks=[find_task(name) for name in tasks],
            invite=invite,
            certificate=certificate,
            started=tell,
        )
    )
