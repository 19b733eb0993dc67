"""`crowdml operator` and `crowdml invite`: who runs a server, and who may join its tasks. Both work beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.hosting import open_store, store_options
from crowdml.cli.numbers import MANY, Whole
from crowdml.cli.output import OutputError, Report, check_place, make_table, whole_file
from crowdml.cli.serve import ONLY_HERE
from crowdml.texts import local_time, one_line

if TYPE_CHECKING:
    from crowdml.storage.server import Store


@click.group()
def operator() -> None:
    """Manage the accounts that may log in to the server's portal."""


@operator.command("add")
@click.argument("name")
@store_options
def add(name: str, folder: Path, database: str | None, json_path: str | None) -> None:
    """Add the operator NAME. The password is asked for, or read from the first line of stdin."""
    from crowdml.server.hub import utc_now
    from crowdml.server.operators import check_name

    report, who = Report(json_path), check_name(name)
    with open_store(folder, database) as store:
        if who in store.operators():
            raise OutputError(f"There is an operator {who} already. Change the password: crowdml operator password.")
        store.set_operator(who, _new_password(who), utc_now())
        store.record("operator", utc_now(), f"{who} was added by the command line")
    report.line(f"Operator {who} may log in.")
    report.finish({"name": who})


@operator.command("password")
@click.argument("name")
@store_options
def password(name: str, folder: Path, database: str | None, json_path: str | None) -> None:
    """Give the operator NAME a new password, and end their sessions."""
    from crowdml.server.hub import utc_now

    report = Report(json_path)
    with open_store(folder, database) as store:
        who = _known(store, name)
        store.set_operator(who, _new_password(who), utc_now())
        store.record("operator", utc_now(), f"{who} got a new password by the command line")
    report.line(f"Operator {who} has a new password. Open sessions have ended.")
    report.finish({"name": who})


@operator.command("list")
@store_options
def list_(folder: Path, database: str | None, json_path: str | None) -> None:
    """List the operators."""
    report = Report(json_path)
    with open_store(folder, database) as store:
        names = store.operators()
    for name in names:
        report.line(name)
    if not names:
        report.line("There is no operator yet: `crowdml serve` prints a set-up address, or run `crowdml operator add`.")
    report.finish({"operators": names})


@operator.command("remove")
@click.argument("name")
@store_options
def remove(name: str, folder: Path, database: str | None, json_path: str | None) -> None:
    """Remove the operator NAME and end their sessions. The last operator cannot be removed."""
    from crowdml.server.hub import utc_now
    from crowdml.storage.server.operating import remove_operator

    report = Report(json_path)
    with open_store(folder, database) as store:
        who = _known(store, name)
        remove_operator(store, who)
        store.record("operator", utc_now(), f"{who} was removed by the command line")
    report.line(f"Operator {who} is removed.")
    report.finish({"name": who})


def _known(store: Store, name: str) -> str:
    who = name.strip().lower()
    if who not in store.operators():
        raise OutputError(f"There is no operator {who!r}. There are: {', '.join(store.operators()) or 'none yet'}.")
    return who


def _new_password(name: str) -> str:
    """The argon2 hash of what is typed, twice, or of the first line of stdin."""
    from crowdml.server.operators import check_password, hash_password

    if sys.stdin.isatty():
        given = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        given = sys.stdin.readline().rstrip("\r\n")
    return hash_password(check_password(given, name))


# --- invitations ---


@click.command()
@click.option(
    "--task", "names", multiple=True, metavar="NAME", help="The task to invite to, by name or hash. Default: all tasks."
)
@click.option(
    "--number",
    default=1,
    type=Whole(0, MANY),
    show_default=True,
    help="How many invitations, each with a code of its own.",
)
@click.option("--uses", default=1, type=Whole(0, MANY), show_default=True, help="How many devices may use each one.")
@click.option("--ends", default="30d", show_default=True, help="When they end: 30d, 12h, 2w, a date, or never.")
@click.option(
    "--rate", type=Whole(0, MANY), default=None, help="Most devices per hour for each invitation. Default: no limit."
)
@click.option("--label", default="", help="The name of the invitations in lists.")
@click.option("--address", default=None, help="The server's address for devices. Default: where it listened last.")
@click.option("--csv", "csv_path", metavar="PATH", default=None, help="Write a table: label, code, URL, command.")
@click.option("--sheet", "sheet_path", metavar="PATH.html", default=None, help="Write QR codes to print on A4.")
@store_options
def invite(
    names: tuple[str, ...],
    number: int,
    uses: int,
    ends: str,
    rate: int | None,
    label: str,
    address: str | None,
    csv_path: str | None,
    sheet_path: str | None,
    folder: Path,
    database: str | None,
    json_path: str | None,
) -> None:
    """Make invitations. Their codes are printed or written once, and kept nowhere."""
    from crowdml.server.export import find_hash
    from crowdml.server.hub import utc_now
    from crowdml.server.invitations import (
        admitted,
        batch_csv,
        check_address,
        make_batch,
        only_here,
        parse_end,
        public_address,
        sheet_html,
    )

    report, now = Report(json_path), utc_now()
    if sheet_path is not None and Path(sheet_path).suffix.lower() != ".html":
        raise OutputError(f"{sheet_path}: a sheet to print ends in .html. No invitation was made.")
    for path in (csv_path, sheet_path):
        if path is not None:
            check_place(Path(path))  # before a code exists
    with open_store(folder, database) as store:
        where = check_address(address) if address else public_address(store)
        if where is None:
            raise OutputError("The server has not run yet, so its address is not known. Say it with --address.")
        hashes = [find_hash(store, name) for name in names]
        opened = [task.name for task, state in admitted(store, hashes) if state != "stopped"]
        batch = make_batch(
            store,
            now,
            where,
            number=number,
            uses=uses,
            ends_at=parse_end(ends, now),
            rate=rate,
            tasks=hashes,
            label=label,
            by="the command line",
        )
    for path, text in ((csv_path, batch_csv), (sheet_path, sheet_html)):
        if path is not None:
            with whole_file(Path(path)) as draft:
                draft.write_text(text(batch), encoding="utf-8", newline="")
            Path(path).chmod(0o600)
            has = "a row with label, code, url and command" if path == csv_path else "a card with its QR code"
            report.print(f"Written: {path}, {has} for each invitation. Whoever reads it may join.")
    if csv_path is None and sheet_path is None and json_path != "-":
        for card in batch.cards:
            report.line(card.command)
    elif json_path != "-":
        report.print("A device joins with the code of its row or card in place of CODE:")
        report.line(f"  {batch.cards[0].command.replace(batch.cards[0].code, 'CODE')}")
        report.print("FILE has the label in its last column; where it has not, add --label COLUMN.")
    if json_path != "-" and len(opened) > 1:
        report.print(f"The code admits to {len(opened)} tasks: name one in place of TASK: {', '.join(opened)}.")
    if only_here(where):
        report.aside.print(ONLY_HERE.format(address=where))
    cards: list[dict[str, Any]] = [
        {"label": card.label, "code": card.code, "url": card.url, "command": card.command} for card in batch.cards
    ]
    report.finish({"uses": uses, "ends_at": batch.ends_at, "rate": rate, "invitations": cards})


@click.group()
def invitation() -> None:
    """List and end invitations."""


@invitation.command("list")
@store_options
def list_invitations(folder: Path, database: str | None, json_path: str | None) -> None:
    """List the invitations, newest first, one line for those made together. Codes are not kept."""
    from crowdml.server.hub import utc_now
    from crowdml.server.invitations import sheets

    report, now = Report(json_path), utc_now()
    with open_store(folder, database) as store:
        found, names = sheets(store), {each.hash: each.name for each in store.tasks()}
    table = make_table("label", "id", "codes", "used", "tasks", "ends", numbers=False, wrap=True)
    for each in found:
        tasks = ", ".join(names[hash_] for hash_ in each.tasks) or "all"
        end = "" if each.ends_at is None else local_time(each.ends_at)
        state = end if each.is_open(now) else "used up" if each.used >= each.uses else f"{end} (over)"
        table.add_row(one_line(each.label), each.id[:8], str(each.number), f"{each.used} of {each.uses}", tasks, state)
    report.print(table)
    rows = [
        {"id": each.id, "label": each.label, "number": each.number, "uses": each.uses, "used": each.used,
         "rate": each.rate, "ends_at": each.ends_at, "tasks": [hash_.hex() for hash_ in each.tasks],
         "open": each.is_open(now)}
        for each in found
    ]  # fmt: skip
    report.finish({"invitations": rows})


@invitation.command("end")
@click.argument("wanted", metavar="ID")
@store_options
def end(wanted: str, folder: Path, database: str | None, json_path: str | None) -> None:
    """End the invitations with this ID (see `crowdml invitation list`). Devices that joined stay."""
    from crowdml.server.hub import utc_now
    from crowdml.server.invitations import sheets
    from crowdml.storage.server.operating import end_sheet

    report = Report(json_path)
    with open_store(folder, database) as store:
        found = [each for each in sheets(store) if len(wanted) >= 6 and each.id.startswith(wanted.lower())]
        if len(found) != 1:
            raise OutputError(
                f"{len(found)} batches of invitations have the id {wanted!r}. See: crowdml invitation list."
            )
        many = end_sheet(store, found[0].code_hashes, utc_now())
        store.record("invitation-ended", utc_now(), f"the command line: {found[0].label!r}")
    report.line(f"{many} of {found[0].number} invitations ended now.")
    report.finish({"id": found[0].id, "ended": many})
