"""`crowdml budget`: what a device's owner permits over all tasks, and what is left of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from crowdml.cli.device import FOLDER, folder_option
from crowdml.cli.numbers import Number, Whole
from crowdml.cli.output import OutputError, Report, json_option
from crowdml.texts import count_text, epsilon_text, number_text, one_line

if TYPE_CHECKING:
    from crowdml.device.folder import Folder, OwnerBudget
    from crowdml.storage import Ledger

LARGEST_EPSILON = 1_000_000
"""More protects nothing, and is a slip of the hand."""


@click.group()
def budget() -> None:
    """Show or set the owner's budget, which holds over all tasks."""


@budget.command("show")
@folder_option
@json_option
def show(folder: Path, json_path: str | None) -> None:
    """Show the owner's budget, and what is left of it."""
    from crowdml.device.folder import Folder

    report, home = Report(json_path), Folder(folder)
    chosen = home.budget
    if chosen is None and not home.joined:
        raise OutputError(f"There is no device in {folder}, and no budget. Name the device's --folder.")
    if home.joined and not home.lost:
        with home.ledger() as ledger:
            numbers = ledger.devices() or (0,)
            said, found = budget_text(chosen, [ledger.of(number) for number in numbers], folder)
    else:
        said, found = budget_text(chosen, (), folder)
    report.print(said)
    report.finish({"folder": str(folder), "budget": found})


def budget_text(
    chosen: OwnerBudget | None, ledgers: list[Ledger] | tuple[()], folder: Path
) -> tuple[str, dict[str, Any] | None]:
    """The owner's budget in a sentence or two, with what the devices of a folder have left of it; and for a program."""
    if chosen is None:
        command = _command(folder, epsilon="1", samples=2000)
        return (
            "You have set no budget of your own, so only each study's own budget applies. Set one with, for example, "
            f"`{command}`."
        ), None
    left = [each.allowance(chosen.budget) for each in ledgers]
    device = None if chosen.device_epsilon is None else float(chosen.budget.device_epsilon or 0)
    samples = min((each.samples for each in left), default=chosen.samples)
    capped = [each.device_epsilon for each in left if each.device_epsilon is not None]
    device_left = device if device is None else max(0.0, min(capped, default=device))
    least = " of the device that gave most" if len(ledgers) > 1 else ""
    cap = "the device as a whole is not capped"
    if device is not None and device_left is not None:
        paid = max((each.device_total().epsilon(chosen.delta) for each in ledgers), default=0.0)
        why = ""
        if device - device_left > paid * (1 + 1e-6):
            why = (
                f": the budget counts {epsilon_text(device - device_left)} as used where {epsilon_text(paid)} was paid"
                ", because it must hold whatever is asked next"
            )
        cap = f"the device as a whole at most ε = {epsilon_text(device)} ({epsilon_text(device_left)} left{why})"
    said = (
        f"Your budget over all studies: any one sample pays at most ε = {epsilon_text(float(chosen.budget.epsilon))}; "
        f"at most {count_text(chosen.samples, 'sample')} ({samples:,} left{least}); {cap}. "
        f"All at δ = {number_text(chosen.delta)}."
    )
    return said, {
        "epsilon": float(chosen.budget.epsilon),
        "samples": chosen.samples,
        "device_epsilon": device,
        "delta": chosen.delta,
        "samples_left": samples,
        "device_epsilon_left": device_left,
    }


@budget.command("set")
@folder_option
@click.option("--epsilon", help="Total epsilon that any one sample may cost, such as 1/2. Default: unchanged.")
@click.option("--samples", type=Whole(0, 10**12), help="Total number of samples to give. Default: unchanged.")
@click.option(
    "--device-epsilon", help="Total epsilon of the device, for all its samples together; 'none' for no limit."
)
@click.option(
    "--delta",
    type=Number(0, 1),
    default=None,
    help="The delta of both epsilons: at most 1e-5 and at most 1/(10 x samples). Default: 1e-6, or less.",
)
@click.option("--before-joining", is_flag=True, help="Set the budget in a folder whose device has not joined yet.")
@json_option
def set_(
    folder: Path,
    epsilon: str | None,
    samples: int | None,
    device_epsilon: str | None,
    delta: float | None,
    before_joining: bool,
    json_path: str | None,
) -> None:
    """Set what this device may give, over all tasks, from its next start on. What it gave before is not taken back.

    Options that you leave out keep their values.
    """
    from crowdml.device.folder import Folder

    report, home = Report(json_path), Folder(folder)
    if not home.joined and not before_joining:
        raise OutputError(
            f"There is no device in {folder}: nothing has joined from there. Nothing was changed. Name the device's "
            "--folder, or say --before-joining where it will join later."
        )
    if home.budget is None and (epsilon is None or samples is None):
        missing = " and ".join(
            name for name, value in (("--epsilon", epsilon), ("--samples", samples)) if value is None
        )
        command = _command(
            folder,
            epsilon=epsilon or "1",
            samples=2000 if samples is None else samples,
            device_epsilon=device_epsilon,
            delta=delta,
            before_joining=before_joining,
        )
        raise OutputError(f"There is no budget yet, so say {missing}, too: {command}. Nothing was changed.")
    chosen = _changed(home.budget, epsilon, samples, device_epsilon, delta)
    _ = chosen.to_give_under()  # one that cannot be kept is refused before anything is made
    with home.locked():
        home.set_budget(chosen)
        spent = _reached(home, chosen) if home.joined and not home.lost else ()
    whole = chosen.budget.device_epsilon
    cap = "" if whole is None else f", and the device at most ε = {epsilon_text(float(whole))}"
    report.print(
        f"Over all tasks any one sample may cost at most ε = {epsilon_text(float(chosen.budget.epsilon))}, at most "
        f"{count_text(chosen.samples, 'sample')} are given{cap} (δ = {number_text(chosen.delta)}). "
        f"That is kept in {folder}."
    )
    for sentence in spent:
        report.print(sentence)
    report.finish(
        {
            "epsilon": chosen.epsilon,
            "samples": chosen.samples,
            "device_epsilon": chosen.device_epsilon,
            "delta": chosen.delta,
            "folder": str(folder),
            "spent": bool(spent),
        }
    )


def _changed(
    old: OwnerBudget | None, epsilon: str | None, samples: int | None, device_epsilon: str | None, delta: float | None
) -> OwnerBudget:
    """The budget with what its owner said; what was left out stays. A first budget has both numbers."""
    from crowdml.device.folder import OwnerBudget
    from crowdml.task import largest_delta

    if old is not None and all(each is None for each in (epsilon, samples, device_epsilon, delta)):
        raise OutputError("Say what to change: --epsilon, --samples, --device-epsilon or --delta. Nothing was changed.")
    many = samples if samples is not None else old.samples if old is not None else 0
    most = largest_delta(max(1, many))
    cap = None if old is None else old.device_epsilon
    if device_epsilon is not None:
        cap = None if device_epsilon.strip().lower() == "none" else _epsilon("--device-epsilon", device_epsilon)
    return OwnerBudget(
        _epsilon("--epsilon", epsilon) if epsilon is not None else old.epsilon if old is not None else "0",
        many,
        cap,
        delta if delta is not None else min(1e-6, most) if old is None else min(old.delta, most),
    )


def _epsilon(option: str, text: str) -> str:
    """An epsilon as its owner typed it, exactly."""
    from crowdml.exact import read_exact

    try:
        found = read_exact(text)
    except ValueError:
        found = None
    if found is None or not 0 <= found <= LARGEST_EPSILON:
        raise OutputError(
            f"{option} {one_line(text)[:40]!r} is not a number from 0 to {LARGEST_EPSILON:,}. Write it as 1, 0.5 or "
            "1/2. Nothing was changed."
        )
    return str(found)


def _command(
    folder: Path,
    *,
    epsilon: str,
    samples: int,
    device_epsilon: str | None = None,
    delta: float | None = None,
    before_joining: bool = False,
) -> str:
    """`crowdml budget set` with these options, to be pasted."""
    import shlex

    words = ["crowdml", "budget", "set", "--epsilon", epsilon, "--samples", str(samples)]
    words += [] if device_epsilon is None else ["--device-epsilon", device_epsilon]
    words += [] if delta is None else ["--delta", str(delta)]
    words += ["--before-joining"] * before_joining
    words += [] if folder == Path(FOLDER) else ["--folder", str(folder)]
    return shlex.join(words)


def _reached(home: Folder, chosen: OwnerBudget) -> tuple[str, ...]:
    """In sentences, what of a budget the devices of a folder have spent already; none where all have some left.

    Samples that paid more than the new ε stop nothing: fresh ones may pay all of it. A study whose check-in costs a
    sample more gets nothing more.
    """
    with home.ledger() as ledger:
        each_of = [ledger.of(number) for number in ledger.devices() or (0,)]
        left, given = [each.allowance(chosen.budget) for each in each_of], max(each.samples_given() for each in each_of)
        tops = [each.dearest_sample(chosen.delta) for each in each_of]
    whose = "This device" if len(left) == 1 else f"{{}} of {len(left)} devices"
    said: list[str] = []
    most = float(chosen.budget.epsilon) * (1 + 1e-9)
    paid = max((top[1].epsilon(chosen.delta) for top in tops if top is not None), default=0.0)
    if paid > most:
        said.append(
            f"Samples that were given have paid up to ε = {epsilon_text(paid)} already. That is more, and cannot be "
            "taken back. The budget holds for future samples."
        )
    if many := sum(not each.samples for each in left):
        verb = "has" if many == 1 else "have"
        said.append(f"{whose.format(many)} {verb} given {given:,} samples already: no more is given under this budget.")
    elif many := sum(each.device_epsilon is not None and each.device_epsilon <= 0 for each in left):
        verb = "has" if many == 1 else "have"
        said.append(f"{whose.format(many)} {verb} paid as much in all already: no more is given under this budget.")
    said += [
        f"A check-in of {one_line(each.title or each.name)!r} costs a sample ε = {epsilon_text(each.epsilon_sample)}: "
        "that study gets nothing more under this budget."
        for each in home.consents().values()
        if each.uses == 1 and chosen.delta <= each.delta and each.epsilon_sample > most
    ]
    return tuple(said)
