"""The operator's pages about people: invitations, devices, who runs the server, and one's own password."""

from __future__ import annotations

import base64
import re
from typing import Any

from markupsafe import Markup
from starlette.responses import Response

from crowdml.server.invitations import (
    AUTHORITY,
    PUBLIC_ADDRESS,
    BadInvitation,
    batch_csv,
    check_address,
    make_batch,
    only_here,
    parse_end,
    public_address,
    qr_svg,
    sheets,
    terms,
)
from crowdml.server.operators import BadOperator
from crowdml.server.portal.health import said
from crowdml.server.portal.public import CONTACT
from crowdml.server.portal.visits import Visit, store_words, visited
from crowdml.storage.server import StoreError
from crowdml.storage.server.operating import end_sheet, find_devices, remove_setting
from crowdml.storage.server.operating import remove_operator as remove_from_store
from crowdml.texts import hidden_control, one_line
from crowdml.wire.keys import ID
from crowdml.wire.problems import Problem

PAGE = 50
ALL = "all"
"""Stands in the form for every task, also those to come."""
MOST_AT_ONCE = 500
"""Invitations of one form; the command line makes more."""


# --- invitations ---


@visited
async def invitations(visit: Visit) -> Response:
    """GET /operator/invitations: those that were made, newest first. Their codes are not known here."""
    found = await visit.read(sheets, visit.store)
    now = visit.hub.clock()
    return visit.page(
        "invitations.html", sheets=found[:200], left=max(0, len(found) - 200), names=_names(visit), now=now
    )


@visited
async def invite(visit: Visit) -> Response:
    """GET, POST /operator/invitations/new: codes, which this one answer shows and nobody keeps."""
    if visit.request.method != "POST":
        running = [each.task.hash.hex() for each in visit.hub.hosted() if each.state == "running"]
        wanted = visit.request.query_params.get("task", running[0] if len(running) == 1 else "")
        form = {"number": "20", "uses": "1", "ends": "30d", "rate": "", "label": "", "task": wanted}
        return await _invite_page(visit, form, {})
    form = {"number": "", "uses": "", "ends": "", "rate": "", "label": "", "task": "", **visit.form}
    try:
        batch = await _make(visit, form)
    except BadInvitation as error:
        return await _invite_page(visit, form, {error.about: str(error)}, 422)
    data = base64.b64encode(batch_csv(batch).encode()).decode()
    cards = [(card, Markup(qr_svg(card.url))) for card in batch.cards]
    return visit.page(
        "sheet.html",
        batch=batch,
        cards=cards,
        only_here=only_here(batch.address),
        csv=f"data:text/csv;charset=utf-8;base64,{data}",
        terms=terms(batch.uses, batch.rate, batch.ends_at),
    )


async def _invite_page(visit: Visit, form: dict[str, str], flaws: dict[str, str], status: int = 200) -> Response:
    tasks = [each for each in visit.hub.hosted() if each.state != "stopped"]
    address = await _address(visit)
    here = only_here(address)
    return visit.page("invite.html", status, form=form, flaws=flaws, tasks=tasks, address=address, only_here=here)


async def _address(visit: Visit) -> str:
    """Where the cards lead to."""
    return await visit.read(public_address, visit.store) or str(visit.request.base_url).rstrip("/")


async def _make(visit: Visit, form: dict[str, str]) -> Any:
    store, now = visit.store, visit.hub.clock()
    number, uses = _count(form, "number", 1), _count(form, "uses", 1)
    rate = _count(form, "rate", 1) if form.get("rate", "").strip() else None
    if number > MOST_AT_ONCE:
        raise BadInvitation(
            f"At most {MOST_AT_ONCE} at once here; `crowdml invite {store_words(visit.store)}` makes more.", "number"
        )
    tasks = [each.task.hash for each in visit.hub.hosted() if each.task.hash.hex() == form.get("task")]
    if form.get("task") != ALL and not tasks:
        raise BadInvitation("Choose one of the tasks, or all of them.", "task")
    address = await _address(visit)
    if only_here(address) and form.get("local") != "yes":
        raise BadInvitation(
            f"No other device reaches {address}. Say in the settings where people reach this server, or tick the box.",
            "local",
        )
    ends_at, label = parse_end(form.get("ends", ""), now), form.get("label", "")
    return await visit.hub.write(
        lambda: make_batch(
            store,
            now,
            address,
            number=number,
            uses=uses,
            ends_at=ends_at,
            rate=rate,
            tasks=tasks,
            label=label,
            by=visit.name,
        )
    )


def _count(form: dict[str, str], name: str, least: int) -> int:
    given = form.get(name, "").strip().replace(",", "")
    if not given.isdecimal() or len(given) > 9 or int(given) < least:
        raise BadInvitation(f"{given[:20]!r} is no whole number from {least}.", name)
    return int(given)


@visited
async def end_invitations(visit: Visit) -> Response:
    """POST /operator/invitations/{sheet}/end."""
    wanted = visit.request.path_params["sheet"]
    found = [each for each in await visit.read(sheets, visit.store) if each.id == wanted]
    if not found:
        raise Problem("not-found", "There are no such invitations.")
    await visit.hub.write(end_sheet, visit.store, found[0].code_hashes, visit.hub.clock())
    await visit.record("invitation-ended", repr(found[0].label))
    return visit.go("/operator/invitations", "ended")


def _names(visit: Visit) -> dict[bytes, str]:
    return {each.task.hash: each.task.name for each in visit.hub.hosted()}


# --- devices ---


@visited
async def devices(visit: Visit) -> Response:
    """GET /operator/devices: by id or by the label of an invitation, a page at a time."""
    query = visit.request.query_params
    search = one_line(query.get("search", ""))[:80]  # as lists show it: a database takes no NUL
    after = query.get("after", "") if re.fullmatch(r"[0-9a-f]{0,32}", query.get("after", "")) else ""
    found = await visit.read(lambda: find_devices(visit.store, search, after=after, limit=PAGE + 1))
    more = found[PAGE - 1].device.id if len(found) > PAGE else ""
    rows = [(each, said(each.statement)) for each in found[:PAGE]]
    return visit.page("devices.html", rows=rows, search=search, after=after, more=more, known=len(visit.hub.keys))


@visited
async def device(visit: Visit) -> Response:
    """GET /operator/devices/{device}: what the server knows of it, and the question before it is revoked."""
    name = visit.request.path_params["device"]
    found = await visit.read(lambda: find_devices(visit.store, name, limit=1)) if ID.fullmatch(name) else []
    if not found or found[0].device.id != name:
        raise Problem("not-found", "No such device here.")
    tasks = await visit.read(visit.store.tasks_of, name)
    return visit.page("device.html", row=found[0], spent=said(found[0].statement), tasks=tasks, names=_names(visit))


@visited
async def revoke(visit: Visit) -> Response:
    """POST /operator/devices/{device}/revoke: nothing more is taken from it. What it gave stays."""
    name = visit.request.path_params["device"]
    if not ID.fullmatch(name) or not await visit.hub.revoke(name):
        raise Problem("not-found", "No such device here.")
    await visit.record("revoked", name)
    return visit.go(f"/operator/devices/{name}", "revoked")


# --- settings ---


@visited
async def settings(visit: Visit) -> Response:
    """GET, POST /operator/settings: who runs this server, and where people reach it."""
    if visit.request.method != "POST":
        return await _settings_page(visit, {}, {})
    name, lines = visit.form.get("institution", "").strip(), visit.form.get("contact", "").strip()
    address, flaws = visit.form.get("address", "").strip(), {}
    if len(name) > 120 or "\n" in name:
        flaws["institution"] = "At most 120 characters, in one line."
    if len(lines) > 1000:
        flaws["contact"] = "At most 1,000 characters."
    for about, text in (("institution", name), ("contact", lines)):
        if control := hidden_control(text.replace("\r\n", "\n")):
            flaws[about] = f"There is a control character in it, {control}: take it out."
    if lines and not name:
        flaws["institution"] = "Say who that is."
    try:
        address = check_address(address) if address else ""
    except BadInvitation as error:
        flaws["address"] = str(error)
    if flaws:
        return await _settings_page(visit, dict(visit.form), flaws, 422)

    def work() -> None:
        for key, value in ((CONTACT, f"{name}\n{lines}".strip()), (PUBLIC_ADDRESS, address)):
            visit.store.set_setting(key, value.encode()) if value else remove_setting(visit.store, key)

    await visit.hub.write(work)
    await visit.record("settings", "contact and address")
    return visit.go("/operator/settings", "saved")


async def _settings_page(visit: Visit, form: dict[str, str], flaws: dict[str, str], status: int = 200) -> Response:
    def read() -> tuple[str, str, list[str], bool]:
        kept = (visit.store.setting(CONTACT) or b"").decode(errors="replace")
        address = (visit.store.setting(PUBLIC_ADDRESS) or b"").decode()
        return kept, address, visit.store.operators(), bool(visit.store.setting(AUTHORITY))

    kept, address, names, has_authority = await visit.read(read)
    first, _, rest = kept.partition("\n")
    values = {"institution": first, "contact": rest, "address": address, **form}
    listening = str(visit.request.base_url).rstrip("/")
    return visit.page(
        "settings.html", status, form=values, flaws=flaws, names=names, listening=listening, has_authority=has_authority
    )


@visited
async def change_password(visit: Visit) -> Response:
    """POST /operator/settings/password."""
    new = visit.form.get("password", "")
    try:
        if new != visit.form.get("again"):
            raise BadOperator("The two passwords differ.", "again")
        await visit.operators.change_password(visit.session, visit.form.get("old", ""), new)
    except BadOperator as error:
        return await _settings_page(visit, {}, {error.about: str(error)}, 422)
    return visit.go("/operator/settings", "password")


@visited
async def add_operator(visit: Visit) -> Response:
    """POST /operator/settings/operators: another operator, with a password to hand over."""
    name = visit.form.get("name", "")
    try:
        await visit.operators.add(visit.session, name, visit.form.get("new", ""))
    except BadOperator as error:
        about = "new" if error.about == "password" else "name"
        return await _settings_page(visit, {"name": name}, {about: str(error)}, 422)
    return visit.go("/operator/settings", "added")


@visited
async def remove_operator(visit: Visit) -> Response:
    """POST /operator/settings/operators/remove: another one; nobody removes the last."""
    name = visit.form.get("name", "")
    if name == visit.name:
        raise Problem("conflict", "Nobody removes oneself. Ask another operator.")
    try:
        gone = await visit.hub.write(remove_from_store, visit.store, name)
    except StoreError as error:
        raise Problem("conflict", "The last operator stays.") from error
    if not gone:
        raise Problem("not-found", "There is no such operator.")
    await visit.record("operator", f"removed operator {name}")
    return visit.go("/operator/settings", "removed")
