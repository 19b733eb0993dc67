"""`crowdml ledger`: what this device has given, what it cost, and whether the server keeps its word about it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.budget import budget_text
from crowdml.cli.numbers import MANY, Number, Whole
from crowdml.cli.output import OutputError, Report, json_option, make_table
from crowdml.texts import count_text, epsilon_text, local_time, number_text, one_line

if TYPE_CHECKING:
    from crowdml.device.client import Client
    from crowdml.device.folder import Folder, Server
    from crowdml.device.verification import Verified
    from crowdml.storage import Charge

FILE = "ledger.sqlite"
"""The ledger's name in a device's folder."""
LINK_LASTS = 600
"""Seconds within which the owner's link can be opened, once."""


@click.command(short_help="Show what this device has spent.")
@click.option(
    "--folder",
    default="crowdml-device",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The device's folder, or its ledger file.",
)
@click.option(
    "--delta", default=1e-6, type=Number(0, 1), show_default=True, help="The delta at which totals are computed."
)
@click.option("--last", default=20, type=Whole(0, MANY), show_default=True, help="How many charges to show.")
@click.option("--web", is_flag=True, help="Print a link to the owner's page. It works once, within ten minutes.")
@click.option("--no-open", is_flag=True, help="With --web: do not open a browser.")
@click.option("--verify", is_flag=True, help="Check the server's receipts: its signature, and its chain if it answers.")
@click.option(
    "--transcript",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With --verify: also look for this device's check-ins in this transcript.",
)
@json_option
def ledger(
    folder: Path,
    delta: float,
    last: int,
    web: bool,
    no_open: bool,
    verify: bool,
    transcript: Path | None,
    json_path: str | None,
) -> None:
    """Show what this device has spent: the totals of a sample and of the device, and its charges, newest first."""
    report = Report(json_path)
    if web and verify:
        raise click.UsageError("--web and --verify are two questions; ask them one after the other.")
    if transcript is not None and not verify:
        raise click.UsageError("--transcript goes with --verify.")
    if web:
        _web(report, folder, no_open)
    elif verify:
        _verify(report, folder, transcript)
    else:
        _show(report, folder, delta, last)


def _show(report: Report, folder: Path, delta: float, last: int) -> None:
    from crowdml.device.folder import Folder
    from crowdml.privacy.losses import Total
    from crowdml.storage.device.ledger import Ledger, paid_in

    path = _path(folder)
    home = Folder(path.parent)
    names = _titles(home)
    with Ledger(path, must_exist=True) as book:
        charges, given = book.charges(), book.samples_given()
        paid = paid_in([book], delta)
        said, found = budget_text(home.budget, [book], home.path)
    masked = any(charge.alone is not None for charge in charges)
    report.print(
        f"Any one sample has paid at most ε = {epsilon_text(paid.sample)}, the device as a whole ε = "
        f"{epsilon_text(paid.device)} "
        f"(δ = {number_text(delta)}), in {count_text(len(charges), 'charge')} on {count_text(given, 'sample')}"
        f"{', with no more colluders than the studies say' if masked else ''}."
    )
    if masked:
        report.print(
            f"If everyone else colludes: any one sample at most ε = {epsilon_text(paid.sample_alone)}, "
            f"the device as a whole ε = {epsilon_text(paid.device_alone)}."
        )
    report.print(said)
    price = "ε of a sample" + "\nif all collude" * masked
    for task in dict.fromkeys(charge.task for charge in charges[:last]):  # newest first
        title = names.get(task, f"Task {task.hex()[:12]}")
        table = make_table("when", "what", "samples", price, "seen by", title=title, numbers=False)
        for charge in charges[:last]:
            if charge.task == task:
                once = epsilon_text(Total.of([charge.loss]).epsilon(delta))
                alone = epsilon_text(Total.of([charge.alone or charge.loss]).epsilon(delta))
                table.add_row(
                    local_time(charge.charged_at),
                    charge.mechanism,
                    f"{charge.first_sample}-{charge.last_sample}",
                    once + f"\n{alone}" * masked,
                    charge.observer.value,
                )
        report.print(table)
    if len(charges) > last:
        report.print(f"... and {len(charges) - last:,} older ones (--last {len(charges)} shows all).")
    report.finish(
        {
            "path": str(path),
            "delta": delta,
            **paid.plain,
            "samples": given,
            "budget": found,
            "charges": [{**_plain(charge), "title": names.get(charge.task)} for charge in charges],
        }
    )


def _web(report: Report, folder: Path, no_open: bool) -> None:
    """A link that the device signs: whoever opens it within its time is taken for the owner."""
    from crowdml.wire.requests import owner_link

    home, server = _joined(folder)
    if home.is_fleet:
        raise OutputError(f"{folder} is of a fleet, and an owner's page is of one device. Name a device's --folder.")
    key = home.key()
    at = int(time.time())
    link = f"{server.url}/device/{key.id}?{owner_link(key, at, LINK_LASTS)}"
    report.line(link)
    report.print(
        f"It opens once, within the next {LINK_LASTS // 60} minutes. Whoever opens it sees what this device gave and "
        "can withdraw it: show it to nobody. To look again later, make another one."
    )
    away = _away(home, server)
    if away is not None:
        report.line(f"The server does not answer now, and the page is there when it does: {away}")
    opened = False if no_open or away is not None else _open(link)
    report.finish(
        {"link": link, "at": at, "for": LINK_LASTS, "device": key.id, "opened": opened, "server_answers": away is None}
    )


def _away(home: Folder, server: Server) -> str | None:
    """Why the server does not answer; None if it does."""
    import asyncio

    from crowdml.device.client import Client, Limits, Unreachable
    from crowdml.wire.problems import Problem

    async def ask() -> None:
        client = Client(server.url, ca=home.authority, limits=Limits(connect=3.0, read=3.0, total=5.0, connections=1))
        try:
            await client.request("GET", "/healthz")
        finally:
            await client.close()

    try:
        asyncio.run(ask())
    except (Unreachable, Problem) as error:
        return str(error)
    return None


def _open(link: str) -> bool:
    """Open a browser where one is at hand; on a board without a screen there is none."""
    import os
    import sys
    import webbrowser

    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        return webbrowser.open(link)
    except webbrowser.Error:
        return False


def _verify(report: Report, folder: Path, transcript: Path | None) -> None:
    import asyncio

    from crowdml.device.client import Client, Unreachable
    from crowdml.device.member import Clock
    from crowdml.device.verification import check_chain, check_receipts, check_transcript, together
    from crowdml.errors import CrowdmlError
    from crowdml.wire.problems import Problem

    home, server = _joined(folder)
    with home.ledger() as book:
        keys = [(number, home.key(number)) for number in book.devices()] if home.is_fleet else [(0, home.key())]
        each = [
            (key, check_receipts(book.of(number).sent(), key.id, bytes.fromhex(server.key))) for number, key in keys
        ]
    results = [result for _, found in each for result in found]
    unasked: str | None = None

    async def ask(client: Client) -> None:
        try:
            for key, found in each:
                for result in found:
                    await check_chain(client, key, result, Clock())
        finally:
            await client.close()

    if results:
        try:
            asyncio.run(ask(Client(server.url, ca=home.authority)))
        except (Unreachable, Problem) as error:
            unasked = str(error)
    if transcript is not None:
        check_transcript(transcript, results)
        if all(result.in_transcript is None for result in results):
            raise OutputError(f"{transcript} is of a task that this device has given nothing to.")
    shown = together(results) if home.is_fleet else results
    names = _titles(home)
    for result in shown:
        _say(report, result, names.get(result.task, f"Task {result.task.hex()[:12]}"), unasked)
    if not results:
        report.line("This device has sent nothing, so there is no receipt.")
    holds = all(result.holds for result in results)
    whose = {"devices": len(keys)} if home.is_fleet else {"device": keys[0][1].id}
    report.finish(
        {
            "holds": holds,
            **whose,
            "server_asked": unasked is None and bool(results),
            "tasks": [_found(result) for result in shown],
        }
    )
    if not holds:
        raise CrowdmlError(
            "The server's receipts do not hold. Keep this folder as it is, for it is the evidence, and ask whoever "
            "runs the study."
        )


def _say(report: Report, result: Verified, name: str, unasked: str | None) -> None:
    count = len(result.receipts)
    report.line(f"{name}: {count_text(count, 'receipt')} for {count_text(result.sent, 'message')}.")
    if count and result.holds:
        report.line(" - The server signed each, for these very bytes, at places that rise.")
    if result.unhashed:
        report.line(
            f" - {count_text(result.unhashed, 'receipt')} for messages whose hash was not kept: checked on arrival."
        )
    if result.in_chain is not None and result.head is not None:
        report.line(f" - {result.in_chain} of {count} are in the journal's chain as the server shows it now.")
        report.line(f" - Its head is {result.head[1]} at place {result.head[0]}: others must see the same.")
    elif unasked is not None:
        report.line(f" - The chain was not looked at: {unasked}")
    if result.under_masks:
        report.line(" - The transcript has the sums of cohorts; what one device said under masks is in none.")
    elif result.in_transcript is not None:
        report.line(f" - {count_text(result.in_transcript, 'message')} found at the right place of the transcript. "
                    "`crowdml replay` tells whether it leads to the published weights.")  # fmt: skip
    for flaw in result.flaws:
        report.line(f" - WRONG: {flaw}")


def _found(result: Verified) -> dict[str, Any]:
    return {
        "task": result.task.hex(),
        "sent": result.sent,
        "receipts": len(result.receipts),
        "unhashed": result.unhashed,
        "in_chain": result.in_chain,
        "head": None if result.head is None else {"index": result.head[0], "chain": result.head[1]},
        "in_transcript": result.in_transcript,
        "under_masks": result.under_masks,
        "flaws": result.flaws,
    }


def _titles(home: Folder) -> dict[bytes, str]:
    """What the studies that the owner accepted are called."""
    return {bytes.fromhex(hash_): one_line(each.title or each.name) for hash_, each in home.consents().items()}


def _joined(folder: Path) -> tuple[Folder, Server]:
    from crowdml.device.folder import Folder

    home = Folder(folder)
    server = home.server
    if server is None:
        raise OutputError(f"{folder} has joined no server. Name the device's --folder.")
    return home, server


def _path(folder: Path) -> Path:
    from crowdml.errors import LedgerError

    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise LedgerError(
            f"there is no ledger {path}: this device has given nothing, or it lies elsewhere. Name its --folder."
        )
    return path


def _plain(charge: Charge) -> dict[str, Any]:
    return {
        "task": charge.task.hex(),
        "mechanism": charge.mechanism,
        "loss": str(charge.loss),
        "device_loss": str(charge.device_loss),
        "alone": str(charge.alone or charge.loss),
        "device_alone": str(charge.device_alone or charge.device_loss),
        "unit": charge.unit,
        "adjacency": charge.adjacency.value,
        "observer": charge.observer.value,
        "scope": charge.scope,
        "first_sample": charge.first_sample,
        "last_sample": charge.last_sample,
        "charged_at": charge.charged_at,
    }
