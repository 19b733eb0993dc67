"""The command `crowdml`: parse, call, print.

Results go to stdout, everything else to stderr. An error is one line on stderr and exit code 1; a wrong command line is
exit code 2, an interrupt 130. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from crowdml import __version__
from crowdml.cli.bench import bench
from crowdml.cli.budget import budget
from crowdml.cli.compare import compare
from crowdml.cli.data import data
from crowdml.cli.demo import demo
from crowdml.cli.device import fleet, join, leave, predict
from crowdml.cli.hosting import backup, replay, restore
from crowdml.cli.ledger import ledger
from crowdml.cli.operator import invitation, invite, operator
from crowdml.cli.output import close_quietly, say_error
from crowdml.cli.reproduce import reproduce
from crowdml.cli.serve import serve
from crowdml.cli.simulate import simulate
from crowdml.cli.task import task
from crowdml.errors import CrowdmlError
from crowdml.plugins import blaming
from crowdml.texts import one_line

INTERRUPTED = 130


class Commands(click.Group):
    """A group that ends every run with the exit code and the one line that were promised."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride]
        extra["standalone_mode"] = False
        sys.exit(self._code(args, prog_name, extra))

    def _code(self, args: Sequence[str] | None, prog_name: str | None, extra: dict[str, Any]) -> int:
        try:
            with warnings.catch_warnings(), blaming("a plug-in failed", "Mend it, or ask its authors.", alone=True):
                warnings.showwarning = _say_warning
                code = super().main(args, prog_name, **extra)
            sys.stdout.flush()
            return code if isinstance(code, int) else 0
        except click.ClickException as error:
            if nearest := getattr(error, "possibilities", None):  # best first, and click would sort them by name
                setattr(error, "possibilities", nearest[:1])  # noqa: B010  # a Final, of exceptions for two things
            error.show()
            return error.exit_code
        except (click.Abort, KeyboardInterrupt) as stopped:
            why = stopped.__cause__ if isinstance(stopped, click.Abort) else stopped  # click wraps an interrupt
            said = str(why) if isinstance(why, KeyboardInterrupt) else ""
            say_error(said or "interrupted; nothing was left half-written.")
            return INTERRUPTED
        except CrowdmlError as error:
            say_error(str(error))
        except BrokenPipeError:  # the reader of our output went away: nothing to say, and nobody to say it to
            close_quietly()
        except (FileExistsError, NotADirectoryError) as error:
            name = str(error.filename).removesuffix("/")
            say_error(
                f"{name} is there and is no folder. Nothing was done. Name another place, such as another --folder."
            )
        except OSError as error:
            close_quietly()
            place = f"{error.filename}: " if error.filename else ""
            say_error(f"{place}{error.strerror or error}. Nothing was left half-written. Check the disk and try again.")
        except ModuleNotFoundError as error:
            say_error(f"{error.name} is not installed, and this command needs it; run `pip install 'crowdml[all]'`.")
        return 1


def _say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    click.echo(f"crowdml: note: {one_line(str(message))}", err=True)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="crowdml")
def cli() -> None:
    """Private learning by crowds of devices: every sample stays where it was sensed.

    Every command takes --json PATH; with '-', stdout carries that one JSON object and nothing else.
    """


for command in (
    demo,
    serve,
    operator,
    invite,
    invitation,
    backup,
    restore,
    replay,
    simulate,
    compare,
    reproduce,
    task,
    data,
    ledger,
    join,
    fleet,
    predict,
    leave,
    budget,
    bench,
):
    cli.add_command(command)


def main() -> NoReturn:
    """The entry point of the installed command."""
    cli.main(prog_name="crowdml")
