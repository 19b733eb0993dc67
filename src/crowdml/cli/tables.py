"""The options of every command that takes a table of somebody's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from crowdml.datasets.tables import Columns


def column_options(columns: Columns) -> list[str]:
    """The words of a command line that say the same."""
    given = {"--label": columns.label, "--device": columns.device, "--public": columns.public, "--test": columns.test}
    words = [word for option, value in given.items() if value is not None for word in (option, value)]
    return words + [word for each in columns.ignore for word in ("--ignore", each)]


def table_options() -> Callable[[Any], Any]:
    """Options that say what the columns of a table are, given to the command as `columns`."""
    options = [
        click.option(
            "--label",
            metavar="COLUMN",
            help="With a file: the column of labels. Default: by its name, or else the last one.",
        ),
        click.option("--device", metavar="COLUMN", help="With a file: the column that says which device holds a row."),
        click.option(
            "--ignore", metavar="COLUMN", multiple=True, help="With a file: a column to leave out. Repeatable."
        ),
        click.option("--public", metavar="FILE", help="With a file: another one, with rows that no device holds."),
        click.option("--test", metavar="FILE|SHARE", help="With a file: rows to test on. Default: 0.2 of its rows."),
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def run(
            label: str | None,
            device: str | None,
            ignore: tuple[str, ...],
            public: str | None,
            test: str | None,
            **others: Any,
        ) -> None:
            from crowdml.datasets.tables import Columns

            command(columns=Columns(label, device, ignore, None, test, public), **others)

        for option in reversed(options):
            run = option(run)
        return run

    return decorate
