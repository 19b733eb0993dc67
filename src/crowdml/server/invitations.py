"""Invitations in batches: codes that are shown once and kept nowhere, as CSV and as sheets to print.

The store has the hash of a code, and nothing else of it.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape

from crowdml.addresses import BadAddress, read_address
from crowdml.errors import FormError
from crowdml.protocols.registry import plugins_of
from crowdml.server.codes import new_code
from crowdml.server.hub import code_hash
from crowdml.server.spreadsheets import csv_text
from crowdml.server.tls import is_loopback
from crowdml.storage.server import Invitation, Store
from crowdml.task import Task, from_canonical
from crowdml.texts import hidden_control

ADDRESS, PUBLIC_ADDRESS, AUTHORITY = "address", "public-address", "tls-authority"
"""Settings: where the server listens, where people reach it if that is elsewhere, and its own authority in PEM."""
CODE = "CODE"
"""Stands in a command for a code that is not made yet."""
MOST = 10_000
LONGEST_LABEL = 80
LONGEST_OPEN = timedelta(days=3660)
"""How long an invitation may stay open, if it ends at all."""
_SPAN = re.compile(r"(\d{1,5})\s*([hdw])")
_PLACE = re.compile(r"(.*) (\d+) of (\d+)")


class BadInvitation(FormError):  # noqa: N818  # reads as the sentence it raises
    """An invitation that cannot be made. `about` is the field that it stands next to."""


@dataclass(frozen=True)
class Card:
    """One invitation, while its code is still known."""

    label: str
    code: str
    url: str
    command: str


@dataclass(frozen=True)
class Batch:
    """What was asked for, and its cards: all that there will ever be of the codes."""

    title: str
    address: str
    uses: int
    rate: int | None
    ends_at: str | None
    cards: tuple[Card, ...]


def public_address(store: Store) -> str | None:
    """Where devices reach this server: what an operator said, else where it listened last.

    An older version kept addresses that no command can carry; such a one is passed over.
    """
    for setting in (PUBLIC_ADDRESS, ADDRESS):
        with contextlib.suppress(BadAddress):
            return str(read_address((store.setting(setting) or b"").decode(errors="replace")))
    return None


def check_address(text: str) -> str:
    """An address that people can follow, without what does not belong there."""
    try:
        return str(read_address(text))
    except BadAddress as error:
        raise BadInvitation(str(error), "address") from error


def title_of(store: Store, tasks: Sequence[bytes]) -> str:
    """What a card says it is for: the title of its only task; of several, or of all, their names."""
    found = [each for each in store.tasks() if each.hash in tasks or not tasks]
    if len(found) == 1:
        task = from_canonical(found[0].canonical)
        return task.title or task.name
    return ", ".join(each.name for each in found[:4]) if tasks else "Take part in our studies"


def join_command(address: str, code: str, *, trust: str = "", task: str = "", wants: Task | None = None) -> str:
    """What an owner types to join with this code. `task`: which one, where the code admits to several. `wants`: the
    task whose place and plug-in files the owner names as well.
    """
    which = f" --task {task}" if task else ""
    if wants is not None:
        which += " --plugin FILE.py" * sum(pin.startswith("sha256:") for pin in plugins_of(wants))
    where = " --place PLACE" if wants is not None and wants.places else ""
    return f"crowdml join {address}/join/{code}{trust}{which} --source csv:FILE{where}"


def join_commands(address: str, code: str, tasks: Sequence[tuple[Task, str]], *, trust: str = "") -> list[str]:
    """One command for each of these tasks that can be joined with this code; `--task` stands where it is needed.

    Where none can be joined yet there is one command, for the task that will come.
    """
    opened = [task for task, state in tasks if state != "stopped"]
    running = [task for task, state in tasks if state == "running"]
    names = [task.name for task in opened]

    def which(task: Task) -> str:
        if [task] in (opened, running):
            return ""
        return task.name if names.count(task.name) == 1 else task.hash.hex()[:12]

    found = [join_command(address, code, trust=trust, task=which(task), wants=task) for task in opened]
    return found or [join_command(address, code, trust=trust)]


def only_here(address: str) -> bool:
    """Whether only the server's own machine can follow this address."""
    with contextlib.suppress(BadAddress):
        return is_loopback(read_address(address).host)
    return False


def admitted(store: Store, tasks: Sequence[bytes]) -> list[tuple[Task, str]]:
    """The tasks that an invitation to `tasks` admits to now, with their states; to none: all of the server's."""
    return [(from_canonical(each.canonical), each.state) for each in store.tasks() if not tasks or each.hash in tasks]


def trust_words(store: Store) -> str:
    """What a join command needs besides address and code: nothing, or the local authority's file."""
    return " --ca ca.pem" if store.setting(AUTHORITY) and not store.setting(PUBLIC_ADDRESS) else ""


def parse_end(text: str, now: str) -> str | None:
    """'30d', '12h', '2w', a date or a time: when an invitation ends. Nothing: never."""
    text = text.strip()
    if text.lower() in ("", "never"):
        return None
    start = datetime.fromisoformat(now)
    match = _SPAN.fullmatch(text.lower())
    if match is not None:
        end = start + timedelta(hours=int(match[1]) * {"h": 1, "d": 24, "w": 168}[match[2]])
    else:
        try:
            end = datetime.fromisoformat(text)
        except ValueError:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise BadInvitation(f"{shown!r} is no end: say 30d, 12h, 2w, or a date like 2030-01-31.", "ends") from None
        if end.tzinfo is None:
            end = end.replace(tzinfo=start.tzinfo)
    whole_day = timedelta(days=1 if match is None and len(text) == 10 else 0)
    if not timedelta() < end - start + whole_day <= LONGEST_OPEN:  # a difference: a sum would leave the calendar
        raise BadInvitation(f"{text!r}: an invitation ends after now, and within ten years.", "ends")
    return (end + whole_day).astimezone(start.tzinfo).isoformat(timespec="microseconds")


def make_batch(
    store: Store,
    now: str,
    address: str,
    *,
    number: int = 1,
    uses: int = 1,
    ends_at: str | None = None,
    rate: int | None = None,
    tasks: Sequence[bytes] = (),
    label: str = "",
    title: str = "",
    by: str = "",
) -> Batch:
    """Make so many invitations in one transaction."""
    if not 1 <= number <= MOST:
        raise BadInvitation(f"{number} invitations: between 1 and {MOST:,} at once.", "number")
    if not 1 <= uses <= 1_000_000:
        raise BadInvitation(f"{uses} uses: between 1 and 1,000,000 for each code.", "uses")
    if rate is not None and not 1 <= rate <= 1_000_000:
        raise BadInvitation(f"{rate} devices an hour: at least 1, or nothing for no limit.", "rate")
    label = " ".join(label.split()) or "invitation"
    if len(label) > LONGEST_LABEL:
        raise BadInvitation(f"A label has at most {LONGEST_LABEL} characters.", "label")
    if control := hidden_control(label):
        raise BadInvitation(f"There is a control character in the label, {control}: take it out.", "label")
    address = check_address(address)
    ended = [each.name for each in map(store.task, tasks) if each is not None and each.state == "stopped"]
    if ended:
        raise BadInvitation(f"The task {ended[0]!r} is stopped: nobody can join it. No invitation was made.", "task")
    trust = trust_words(store)
    commands = join_commands(address, CODE, admitted(store, tasks), trust=trust)
    command = commands[0] if len(commands) == 1 else join_command(address, CODE, trust=trust, task="TASK")
    cards = [_card(label, place, number, address, command) for place in range(1, number + 1)]
    codes = [(code_hash(card.code), card.label) for card in cards]
    store.invite_many(codes, now, uses=uses, ends_at=ends_at, rate=rate, tasks=tasks)
    many = "1 invitation" if number == 1 else f"{number} invitations"
    store.record("invited", now, f"{by}: {many}, {label!r}".removeprefix(": "), tasks[0] if len(tasks) == 1 else None)
    return Batch(title or title_of(store, tasks) or label, address, uses, rate, ends_at, tuple(cards))


def _card(label: str, place: int, number: int, address: str, command: str) -> Card:
    code = new_code()
    name = label if number == 1 else f"{label} {place} of {number}"
    return Card(name, code, f"{address}/join/{code}", command.replace(f"/join/{CODE} ", f"/join/{code} "))


# --- as files ---


def batch_csv(batch: Batch) -> str:
    """Label, code, address and command of each."""
    cards = ((card.label, card.code, card.url, card.command) for card in batch.cards)
    return csv_text(("label", "code", "url", "command"), cards)


def qr_svg(text: str) -> str:
    """A QR code as SVG in a page, with the border that scanners need. Dark on light whatever the page's colours."""
    import segno

    out = io.BytesIO()
    segno.make(text, error="m", micro=False).save(
        out,
        kind="svg",
        xmldecl=False,
        svgns=True,
        omitsize=True,
        border=4,
        dark="#000",
        light="#fff",
        svgclass=None,
        lineclass=None,
    )
    return out.getvalue().decode().strip()


SHEET_STYLE = """
@page { size: A4; margin: 12mm }
* { box-sizing: border-box }
body { font: 9pt/1.3 system-ui, sans-serif; margin: 0; color: #000; background: #fff }
.cards { display: grid; grid-template-columns: repeat(2, 1fr); gap: 6mm }
.card { border: .3mm dashed #777; padding: 5mm; break-inside: avoid; display: grid; height: 62mm; overflow: hidden;
        grid-template-columns: 30mm minmax(0, 1fr); gap: 4mm; align-items: start; overflow-wrap: anywhere }
.card svg { width: 30mm; height: 30mm }
.card h2 { font-size: 10.5pt; margin: 0 0 1.5mm }
.card p { margin: 0 0 1.5mm }
.card code { font: 600 8.5pt ui-monospace, monospace }
.card .small { font-size: 8pt; color: #333; margin: 0 }
@media screen { body { padding: 8mm; max-width: 200mm; margin: auto } }
"""


def sheet_html(batch: Batch) -> str:
    """One page to print on A4: eight cards a sheet, each with its QR code, its code in text, and where it leads."""
    cards = "\n".join(_card_html(batch, card) for card in batch.cards)
    title = escape(batch.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        f"<title>Invitations: {title}</title><style>{SHEET_STYLE}</style></head>\n"
        f'<body><main class="cards">\n{cards}\n</main></body></html>\n'
    )


def _card_html(batch: Batch, card: Card) -> str:
    return (
        f'<section class="card">{qr_svg(card.url)}<div><h2>{escape(batch.title)}</h2>'
        f"<p>Scan, or open<br>{escape(card.url)}</p><p>Code<br><code>{escape(card.code)}</code></p>"
        f'<p class="small">{escape(card.label)}<br>{escape(terms(batch.uses, batch.rate, batch.ends_at))}</p>'
        "</div></section>"
    )


def terms(uses: int, rate: int | None, ends_at: str | None) -> str:
    """'For one device, until 2030-01-31': what an invitation allows, in words."""
    said = "For one device" if uses == 1 else f"For {uses:,} devices"
    if rate is not None:
        said += f", at most {rate:,} an hour"
    return said + ("" if ends_at is None else f", until {datetime.fromisoformat(ends_at):%Y-%m-%d %H:%M} UTC")


# --- as a list ---


@dataclass(frozen=True)
class Sheet:
    """Invitations that were made at once, as a list shows them."""

    id: str
    label: str
    created_at: str
    ends_at: str | None
    rate: int | None
    number: int
    uses: int
    used: int
    tasks: tuple[bytes, ...]
    code_hashes: tuple[bytes, ...]

    def is_open(self, now: str) -> bool:
        return self.used < self.uses and (self.ends_at is None or self.ends_at > now)


def sheets(store: Store) -> list[Sheet]:
    """All invitations, newest first; those of one batch together."""
    groups: dict[tuple[str, str], list[Invitation]] = {}
    for each in store.invitations():
        match = _PLACE.fullmatch(each.label)
        groups.setdefault((each.created_at, match[1] if match else each.label), []).append(each)
    return [_sheet(label, found) for (_, label), found in groups.items()]


def _sheet(label: str, found: list[Invitation]) -> Sheet:
    first = found[-1]
    ends = [each.ends_at for each in found]
    return Sheet(
        id=first.code_hash.hex()[:16],
        label=label,
        created_at=first.created_at,
        ends_at=None if None in ends else max(str(end) for end in ends),
        rate=first.rate,
        number=len(found),
        uses=sum(each.uses for each in found),
        used=sum(each.used for each in found),
        tasks=first.tasks,
        code_hashes=tuple(each.code_hash for each in found),
    )
