"""`crowdml ledger`: what this device has given, and what it cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.output import Report, epsilon_text, json_option, loss_text, make_table

if TYPE_CHECKING:
    from crowdml.storage.ledger import Charge

FILE = "ledger.sqlite"
"""The ledger's name in a device's folder."""


@click.command()
@click.option(
    "--folder",
    default="crowdml-device",
    show_default=True,
    type=click.Path(path_type=Path),
    help="The device's folder, or the file.",
)
@click.option("--delta", default=1e-6, show_default=True, help="At which delta the totals are said.")
@click.option("--last", default=20, show_default=True, help="How many charges to show.")
@json_option
def ledger(folder: Path, delta: float, last: int, json_path: str | None) -> None:
    """Show what this device has spent: both totals, and its charges, newest first."""
    from crowdml.errors import LedgerError
    from crowdml.storage.ledger import Ledger

    report = Report(json_path)
    path = folder / FILE if folder.is_dir() else folder
    if not path.is_file():
        raise LedgerError(
            f"there is no ledger {path}: this device has given nothing, or it lies elsewhere. Name its --folder."
        )
    with Ledger(path, must_exist=True) as book:
        charges, top, whole, given = (
            book.charges(),
            book.dearest_sample(delta),
            book.device_total(),
            book.samples_given(),
        )
    dearest = top[1].epsilon(delta) if top is not None else 0.0
    report.print(
        f"The dearest sample has paid ε = {epsilon_text(dearest)}, the device ε = {epsilon_text(whole.epsilon(delta))}"
    )
    report.print(f"(δ = {delta:g}), in {len(charges):,} charges on {given:,} samples.")
    table = make_table("when", "task", "what", "samples", "sample pays", "seen by", numbers=False)
    for charge in charges[:last]:
        table.add_row(
            charge.charged_at[:19].replace("T", " "),
            charge.task.hex()[:8],
            charge.mechanism,
            f"{charge.first_sample}-{charge.last_sample}",
            loss_text(charge.loss),
            charge.observer.value,
        )
    report.print(table)
    if len(charges) > last:
        report.print(f"... and {len(charges) - last:,} older ones (--last {len(charges)} shows all).")
    report.finish(
        {
            "path": str(path),
            "delta": delta,
            "epsilon_sample": dearest,
            "epsilon_device": whole.epsilon(delta),
            "samples": given,
            "charges": [_plain(charge) for charge in charges],
        }
    )


def _plain(charge: Charge) -> dict[str, Any]:
    return {
        "task": charge.task.hex(),
        "mechanism": charge.mechanism,
        "loss": str(charge.loss),
        "device_loss": str(charge.device_loss),
        "unit": charge.unit,
        "adjacency": charge.adjacency.value,
        "observer": charge.observer.value,
        "scope": charge.scope,
        "first_sample": charge.first_sample,
        "last_sample": charge.last_sample,
        "charged_at": charge.charged_at,
    }
