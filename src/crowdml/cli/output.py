"""What every command shares: where its words go, its JSON, its files, its progress bars."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from crowdml.cli.plain import PlainConsole, PlainProgress, PlainTable
from crowdml.errors import CrowdmlError
from crowdml.texts import harmless, one_line
from crowdml.texts import size_text as size_text  # what commands print

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

PLOTS = (".png", ".svg", ".pdf")

json_option = click.option(
    "--json", "json_path", metavar="PATH", help="Write the result as one JSON object; '-' means stdout."
)


def _load_plugins(_: click.Context, __: click.Parameter, paths: tuple[Path, ...]) -> None:
    if paths:
        from crowdml.protocols.registry import load_plugin

        for path in paths:
            load_plugin(path)


def _read_artefacts(_: click.Context, __: click.Parameter, paths: tuple[Path, ...]) -> None:
    from crowdml.artefacts import read_file

    for path in paths:
        read_file(path)


def _files_option(name: str, metavar: str, read: Callable[..., None], help_: str) -> Callable[[Any], Any]:
    """An option that names files, as often as it is given: they are read before the command runs."""
    file = click.Path(path_type=Path)
    return click.option(name, multiple=True, metavar=metavar, type=file, expose_value=False, callback=read, help=help_)


plugin_option = _files_option(
    "--plugin",
    "FILE.py",
    _load_plugins,
    "Run this file, which defines a protocol, a model or a feature map that tasks may name: for trying one.",
)
artefact_option = _files_option(
    "--artefact",
    "FILE",
    _read_artefacts,
    "A public file that the task names by its SHA-256, such as an extractor's weights.",
)


class OutputError(CrowdmlError):
    """A result cannot be written where it was asked for."""


@dataclass(frozen=True)
class Report:
    """Where a command's words go: results to stdout, or to stderr where stdout carries the JSON."""

    json_path: str | None
    plot_path: str | None = None

    def __post_init__(self) -> None:
        """Refuse a place that cannot be written before anything is computed."""
        for path in (self.json_path, self.plot_path):
            if path is not None and path != "-":
                check_place(Path(path))
        if self.plot_path is not None and Path(self.plot_path).suffix not in PLOTS:
            raise OutputError(f"{self.plot_path}: the ending says the format of a plot; use one of {', '.join(PLOTS)}.")

    @cached_property
    def console(self) -> Console:
        """For results."""
        return _console(stderr=self.json_path == "-")

    @cached_property
    def aside(self) -> Console:
        """For everything that is no result: progress, and how a run can be repeated."""
        return _console(stderr=True)

    def print(self, part: Any) -> None:
        """A table, or prose, which is broken into lines where the terminal ends. It says what it says: no markup."""
        self.console.print(harmless(part) if isinstance(part, str) else part)

    def heading(self, text: str, after: str = "") -> None:
        """A line that begins in bold; either part may be the words of another."""
        first, rest = one_line(text), one_line(after)
        if not has_rich():
            self.console.print(f"{first}  {rest}".rstrip())
            return
        from rich.text import Text

        self.console.print(Text.assemble((first, "bold"), f"  {rest}" if rest else ""))

    def line(self, text: str) -> None:
        """One line whatever its length: what somebody may want to copy."""
        self.console.print(harmless(text), soft_wrap=True)

    def note(self, text: str) -> None:
        """One line beside the result, such as what a device waits for."""
        self.aside.print(harmless(text), soft_wrap=True)

    def progress(self) -> Progress:
        """Bars on stderr, where a terminal is there; silent otherwise."""
        if not has_rich():
            return cast("Progress", PlainProgress())
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        return Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self.aside,
            disable=not self.aside.is_terminal,
            transient=True,
        )

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the JSON, where it was asked for."""
        if self.json_path is None:
            return
        text = json.dumps(plain(result), ensure_ascii=False, allow_nan=False)
        if self.json_path == "-":
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        else:
            with whole_file(Path(self.json_path)) as draft:
                draft.write_text(text + "\n", encoding="utf-8")

    def plotted(self, draw: Callable[[Path], object]) -> None:
        """Let `draw` write the plot, where it was asked for."""
        if self.plot_path is not None:
            with whole_file(Path(self.plot_path)) as draft:
                draw(draft)
            self.line(f"Plot: {self.plot_path}")


@cache
def has_rich() -> bool:
    """Whether tables and bars can be drawn; a device does without."""
    return find_spec("rich") is not None


def _console(*, stderr: bool) -> Console:
    if not has_rich():
        return cast("Console", PlainConsole(stderr=stderr))
    from rich.console import Console

    # No markup and no emoji: in the words of a study and in a fingerprint, [bold] and :AB: are what they are.
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def make_table(*columns: str, title: str | None = None, numbers: bool = True, wrap: bool = False) -> Table:
    """A plain table that reads well on dark and on light: the terminal's own colours.

    `wrap`: where it is too wide the texts of the first column are broken, and no other word or number.
    """
    if not has_rich():
        return cast("Table", PlainTable(columns, title, numbers))
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold", header_style="bold"
    )
    for place, name in enumerate(columns):
        stays = not wrap if place == 0 else wrap
        table.add_column(name, justify="right" if numbers and place else "left", overflow="fold", no_wrap=stays)
    return table


def check_place(path: Path) -> None:
    """Make the folder; refuse a path that is a folder, or one that cannot be written."""
    if path.is_dir():
        raise OutputError(f"{path} is a folder. Name a file in it.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritten(path, error) from None
    if not os.access(path.parent, os.W_OK):
        raise OutputError(
            f"{path} cannot be written: no permission for {path.parent}. Nothing was done. Name another place."
        )


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """A draft beside `path` that takes its name when it is complete: a file is there whole, or not at all."""
    draft: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
        os.close(handle)
        draft = Path(name)
        yield draft
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        mask = os.umask(0)
        os.umask(mask)
        draft.chmod(0o666 & ~mask)
        draft.replace(path)
    except OSError as error:
        raise _unwritten(path, error) from None
    finally:
        if draft is not None:
            draft.unlink(missing_ok=True)


def _unwritten(path: Path, error: OSError) -> OutputError:
    advice = "Free some space, or name another place." if error.errno == errno.ENOSPC else "Name another place."
    return OutputError(f"{path} cannot be written ({error.strerror or error}). Nothing is there half-written. {advice}")


def plain(value: Any) -> Any:
    """What JSON can say: no NumPy, no infinity (null: no guarantee)."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (bool, int, str)) or value is None:
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    number = float(value)
    return number if math.isfinite(number) else None


def say_error(sentence: str) -> None:
    click.echo(f"crowdml: {one_line(sentence)}", err=True)


def close_quietly() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain about a broken one."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return
