"""Words and tables where `rich` is not installed: on a board, it and what it brings would be a third of the size."""

from __future__ import annotations

import textwrap
from itertools import zip_longest
from typing import Any

import click

WIDTH = 100


class PlainTable:
    """Columns of texts, the first to the left, the others as `numbers` says."""

    def __init__(self, columns: tuple[str, ...], title: str | None, numbers: bool) -> None:
        self.title, self.numbers = title, numbers
        self.rows: list[tuple[str, ...]] = [columns]

    def add_row(self, *cells: str) -> None:
        self.rows.append(cells)

    def __str__(self) -> str:
        split = [list(zip_longest(*(cell.split("\n") for cell in row), fillvalue="")) for row in self.rows]
        columns = zip_longest(*(line for row in split for line in row), fillvalue="")
        widths = [max(map(len, column)) for column in columns]
        lines = [] if self.title is None else [self.title, ""]
        for number, row in enumerate(split):
            for line in row:
                padded = [
                    cell.rjust(width) if self.numbers and place else cell.ljust(width)
                    for place, (cell, width) in enumerate(zip(line, widths, strict=False))
                ]
                lines.append("  ".join(padded).rstrip())
            if number == 0 and any(self.rows[0]):
                lines.append("-" * (sum(widths) + 2 * (len(widths) - 1)))
        return "\n".join(lines)


class PlainConsole:
    """Prints to stdout or stderr. It is no terminal that anything could be drawn on twice."""

    is_terminal = False

    def __init__(self, *, stderr: bool) -> None:
        self._stderr = stderr

    def print(self, part: Any = "", *, soft_wrap: bool = False, **_: Any) -> None:
        text = str(part)
        if not soft_wrap and not isinstance(part, PlainTable):
            text = "\n".join(textwrap.fill(line, WIDTH) for line in text.split("\n"))
        click.echo(text, err=self._stderr)


class PlainProgress:
    """Says nothing."""

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def add_task(self, *_: Any, **__: Any) -> int:
        return 0

    def advance(self, *_: Any, **__: Any) -> None:
        return

    update = advance
