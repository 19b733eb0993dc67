"""`crowdml serve`: the server, in one process and one folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.numbers import MANY, Number, Whole
from crowdml.cli.output import OutputError, Report, artefact_option, json_option, plugin_option

if TYPE_CHECKING:
    from crowdml.server.logs import Shape
    from crowdml.server.serve import Started

ONLY_HERE = (
    "Only this machine reaches {address}. For devices elsewhere say where they reach the server: in the portal's "
    "settings, or with `crowdml invite --address https://...`."
)
"""Said where an invitation leads to an address that no other machine can follow."""


@click.command(short_help="Run a server until it is stopped.")
@click.option("--folder", default="crowdml-server", show_default=True, type=click.Path(path_type=Path),
              help="The server's folder.")  # fmt: skip
@click.option("--database", default=None, help="URL of a database, postgresql://..., instead of SQLite in the folder.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=Whole(0, 65_535), default=8080, show_default=True,
              help="The port to listen on; 0 picks a free one.")  # fmt: skip
@click.option("--task", "tasks", multiple=True, help="A task to host: a file, or the name of a shipped task.")
@click.option(
    "--invite", default=0, type=Whole(0, 1_000_000), show_default=True, help="Print an invitation for N devices."
)
@click.option("--certificate", nargs=2, default=None, type=click.Path(path_type=Path),
              help="Use TLS with these two files: the certificate chain and its key.")  # fmt: skip
@click.option(
    "--tls-local", is_flag=True, help="Use TLS with an authority of this folder's own, which devices must trust."
)
@click.option("--log", "shape", type=click.Choice(["plain", "json"]), default="plain", show_default=True,
              help="Format of the log on stderr: plain text, or one JSON object per line.")  # fmt: skip
@click.option(
    "--address-rate",
    type=Number(0.1, MANY),
    default=None,
    show_default="1000",
    help="Unsigned requests per second from one address; a burst may be five times as many.",
)
@click.option("--connections", type=Whole(1, MANY), default=None, show_default="10000",
              help="Most connections at once.")  # fmt: skip
@click.option("--address-connections", type=Whole(1, MANY), default=None, show_default="256",
              help="Most connections at once from one address (IPv6: from one /64).")  # fmt: skip
@click.option(
    "--behind-proxy", is_flag=True, help="Trust X-Forwarded-For and X-Forwarded-Proto from a proxy on this machine."
)
@click.option(
    "--device-rate",
    type=Number(0.001, MANY),
    default=None,
    show_default="5",
    help="Check-ins per second from one device; a burst may be ten times as many.",
)
@click.option(
    "--pace",
    type=Number(0.1, MANY),
    default=None,
    show_default="500",
    help="Check-ins per second to ask of the whole crowd.",
)
@click.option("--snapshot-every", type=Whole(1, MANY), default=None, show_default="2000",
              help="Number of check-ins between two snapshots of a task.")  # fmt: skip
@click.option("--free-space", type=Number(0, 2**50), default=None, show_default="64",
              help="Refuse check-ins (507) while less than this many MiB are free on the disk.")  # fmt: skip
@artefact_option
@plugin_option
@json_option
def serve(
    folder: Path,
    database: str | None,
    host: str,
    port: int,
    tasks: tuple[str, ...],
    invite: int,
    certificate: tuple[Path, Path] | None,
    tls_local: bool,
    shape: Shape,
    address_rate: float | None,
    device_rate: float | None,
    free_space: float | None,
    json_path: str | None,
    **more: Any,
) -> None:
    """Run a server until it is stopped. Check-ins that it acknowledged survive even a kill -9."""
    from crowdml.protocols import settled
    from crowdml.server.limits import Limits
    from crowdml.server.logs import log_to_stderr
    from crowdml.server.serve import run
    from crowdml.server.serve import serve as make
    from crowdml.server.tls import is_loopback
    from crowdml.task import find_task

    report = Report(json_path)
    if tls_local and certificate is not None:
        raise OutputError("--tls-local makes a certificate and --certificate names one: choose one of them.")
    given: dict[str, Any] = {
        "address_rate": address_rate,
        "address_burst": address_rate and max(1, 5 * address_rate),
        "device_rate": device_rate,
        "device_burst": device_rate and max(1, 10 * device_rate),
        "free_space": None if free_space is None else int(free_space * 2**20),
        **more,
    }
    limits = Limits(**{name: value for name, value in given.items() if value is not None})

    def tell(started: Started) -> None:
        report.line(f"Serving {_states(started)} at {started.address}")
        if started.address.startswith("http://") and not is_loopback(host) and not limits.behind_proxy:
            report.line("No TLS: whoever shares the network can read passwords and codes. Add --tls-local.")
        local = started.local
        if local is not None:
            report.line(f"TLS by this folder's own authority: {local.authority}")
            report.line(f"  SHA-256 {local.fingerprint}")
            report.line(
                f"  Trust it where you browse: docs/tls.md. A device: crowdml join ... --ca {local.authority.name}"
            )
        if started.code is not None:
            _say_joining(report, started)
        if started.setup is not None:
            report.line("There is no operator yet. Make an account at this address:")
            report.line(f"  {started.setup}")
            report.line("It works until the account exists; a restart prints another.")
        else:
            report.line(f"Operators log in at {started.address}/operator")
        result: dict[str, Any] = {
            "address": started.address,
            "tasks": list(started.tasks),
            "code": started.code,
            "setup": started.setup,
            "authority": None if local is None else str(local.authority),
        }
        report.finish(result)

    log_to_stderr(shape)
    run(
        make(
            folder,
            database=database,
            host=host,
            port=port,
            tasks=[settled(find_task(name)) for name in tasks],
            invite=invite,
            certificate=certificate,
            tls_local=tls_local,
            limits=limits,
            started=tell,
        )
    )
    report.note("Stopped. What was acknowledged is kept in the folder; the same command goes on.")


def _states(started: Started) -> str:
    """The tasks by name, and what becomes of those that do not run."""
    hosted = started.hub.hosted()
    names = [each.task.name if each.state == "running" else f"{each.task.name} ({each.state})" for each in hosted]
    return ", ".join(names) or "no task yet"


def _say_joining(report: Report, started: Started) -> None:
    """The command by which a device joins, where people reach the server; one for each task, if there are several."""
    from crowdml.server.invitations import join_commands, only_here, public_address, trust_words

    store, local = started.hub.store, started.local
    address = public_address(store) or started.address
    trust = f" --ca {local.authority}" if local is not None and trust_words(store) else ""
    tasks = [(each.task, each.state) for each in started.hub.hosted()]
    commands = join_commands(address, started.code or "", tasks, trust=trust)
    if len(commands) == 1:
        report.line(f"A device joins with: {commands[0]}")
    else:
        report.line("A device joins one of the tasks with:")
        for command in commands:
            report.line(f"  {command}")
    if only_here(address):
        report.print(ONLY_HERE.format(address=address))
