"""The page of a device's owner: what the device gave, when, what it cost, what is kept, and how to withdraw.

Entered by a link that the device signs (`crowdml ledger --web`). The link opens a session of 15 minutes: a cookie that
the server can check and nobody else can make. There is no account and no table of sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from crowdml.price import Epsilons, Price
from crowdml.privacy.odds import odds
from crowdml.server.histograms import is_histogram
from crowdml.server.hub import Hub
from crowdml.server.portal.cache import kept
from crowdml.server.portal.forms import read_form
from crowdml.server.portal.pages import language, redirect, render
from crowdml.server.portal.public import contact
from crowdml.server.portal.studies import Study, price_of, studies
from crowdml.storage.server import Device, Given
from crowdml.task import Task
from crowdml.wire.envelopes import open_signed
from crowdml.wire.keys import ID
from crowdml.wire.packing import Reader
from crowdml.wire.problems import Problem
from crowdml.wire.requests import open_owner_link
from crowdml.wire.statements import LARGEST_STATEMENT, Statement

COOKIE = "crowdml-owner"
LASTS = 900
"""Seconds of a session."""
SECRET = "owner-session-key"
SESSION_PREFIX, FORM_PREFIX = b"crowdml/owner-session/1\n", b"crowdml/owner-form/1\n"
MOST_SHOWN, NEWEST = 100, 10
"""Check-ins in the list, the newest; and those of them that show at once."""
PRIVATE = {"Cache-Control": "no-store"}


@dataclass(frozen=True)
class Owner:
    """The owner who is here, of a device that has not withdrawn, until `ends`."""

    device: Device
    token: str
    ends: int
    form: str
    """What every form of this session carries: another site cannot know it."""


@dataclass(frozen=True)
class Part:
    """What a device gave to one study."""

    task: Task
    study: Study | None
    price: Price
    check_ins: int
    paid: Epsilons

    @property
    def samples(self) -> int:
        return -(-self.check_ins // self.task.privacy.uses) * self.price.batch

    @property
    def is_histogram(self) -> bool:
        return is_histogram(self.task)

    @property
    def left(self) -> int | None:
        """Samples that the task's budget still allows, if all was given that was charged."""
        budget = self.task.privacy.budget
        return None if budget is None else max(0, budget.samples - self.samples)


@dataclass(frozen=True)
class Entry:
    """A check-in in the list; `statement` is what the device had given in all when it signed this."""

    given: Given
    title: str
    statement: Statement | None


# --- the session ---


async def _secret(request: Request) -> bytes:
    hub: Hub = request.app.state.hub

    async def make() -> bytes:
        def work() -> bytes:
            held = hub.store.setting(SECRET)
            if held is None:
                held = secrets.token_bytes(32)
                hub.store.set_setting(SECRET, held)
            return held

        return await hub.write(work)

    return await kept(request).owner_secret(make)


def _mark(secret: bytes, prefix: bytes, text: str) -> str:
    return hmac.new(secret, prefix + text.encode(), hashlib.sha256).hexdigest()


async def enter(request: Request) -> Response:
    """GET /device/{device}?at=&for=&signature=: a link that the device signed; it opens one session and is gone."""
    hub: Hub = request.app.state.hub
    name, query = request.path_params["device"], request.query_params
    known = await asyncio.to_thread(hub.store.device, name) if ID.fullmatch(name) else None
    public = b"" if known is None or known.public_key is None else known.public_key
    at, lasts, now = query.get("at", ""), query.get("for", ""), time.time()
    open_owner_link(public, name, at, lasts, query.get("signature"), now=now)  # 401
    if request.method == "HEAD":
        return redirect("/device")
    if not kept(request).open_once(name, int(at), int(lasts), now):
        with contextlib.suppress(Problem):
            if (await _owner(request)).device.id == name:  # the same browser once more
                return redirect("/device")
        raise Problem("authorization", "This link was opened already. Make another: `crowdml ledger --web`.")
    text = f"{name}.{int(time.time()) + LASTS}"
    token = f"{text}.{_mark(await _secret(request), SESSION_PREFIX, text)}"
    response = redirect("/device")
    response.set_cookie(
        COOKIE, token, LASTS, path="/device", httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )
    return response


async def _owner(request: Request) -> Owner:
    """The owner who is here; 401 where there is no session, or no longer."""
    hub: Hub = request.app.state.hub
    token = request.cookies.get(COOKIE, "")
    text, _, mark = token.rpartition(".")
    name, _, ends = text.partition(".")
    secret = await _secret(request)
    genuine = hmac.compare_digest(mark.encode(), _mark(secret, SESSION_PREFIX, text).encode())
    if not genuine or time.time() >= int(ends):
        raise Problem("authorization", "There is no session, or no longer. Make a link: `crowdml ledger --web`.")
    found = await asyncio.to_thread(hub.store.device, name)
    if found is None or found.withdrawn_at is not None:
        raise Problem("withdrawn", "This device has withdrawn; nothing is left to show.")
    return Owner(found, token, int(ends), _mark(secret, FORM_PREFIX, token))


# --- pages ---


async def page(request: Request) -> Response:
    """GET /device: everything that the server knows of this device."""
    hub: Hub = request.app.state.hub
    owner = await _owner(request)

    def read() -> tuple[dict[bytes, int], list[Given], bytes | None]:
        name = owner.device.id
        return hub.store.seqs(name), hub.store.given(name, MOST_SHOWN), hub.store.statement(name)

    counts, given, signed = await asyncio.to_thread(read)
    shown = {each.task.hash: each for each in await studies(request)}
    parts = [await asyncio.to_thread(_part, hub, hash_, shown.get(hash_), count) for hash_, count in counts.items()]
    delta = min((part.price.delta for part in parts), default=1e-6)
    titles = {part.task.hash: part.task.title or part.task.name for part in parts}
    return render(
        request,
        "owner.html",
        headers=PRIVATE,
        owner=owner,
        parts=parts,
        statement=open_signed(signed).statement if signed is not None else None,
        delta=delta,
        entries=[Entry(each, titles[each.task], _statement(each)) for each in given],
        check_ins=sum(counts.values()),
        newest=NEWEST,
        odds=odds,
        closes=language(request).clock(datetime.fromtimestamp(owner.ends, UTC)),
        contact=await contact(request),
    )


def _part(hub: Hub, hash_: bytes, study: Study | None, check_ins: int) -> Part:
    task = hub.find(hash_).task
    price = price_of(task)
    return Part(task, study, price, check_ins, price.after(check_ins))


def _statement(given: Given) -> Statement | None:
    if given.statement is None:
        return None
    return Statement.read(Reader(given.statement, "The statement", limit=LARGEST_STATEMENT))


async def withdrawing(request: Request) -> Response:
    """GET /device/withdraw: what withdrawing does and what it cannot undo, before it is done."""
    owner = await _owner(request)
    return render(request, "withdraw.html", headers=PRIVATE, owner=owner)


async def withdraw(request: Request) -> Response:
    """POST /device/withdraw: forget this device. What it gave stays in the model."""
    hub: Hub = request.app.state.hub
    owner = await _checked(request)
    await hub.withdraw(owner.device.id)
    response = render(request, "withdrawn.html", headers=PRIVATE)
    response.delete_cookie(COOKIE, path="/device")
    return response


async def leave(request: Request) -> Response:
    """POST /device/close: end the session."""
    await _checked(request)
    response = redirect("/")
    response.delete_cookie(COOKIE, path="/device")
    return response


async def _checked(request: Request) -> Owner:
    """The owner who sent this form, if it is a form of theirs."""
    owner = await _owner(request)
    form = await read_form(request)
    if not hmac.compare_digest(form.get("form", "").encode(), owner.form.encode()):
        raise Problem("form-token", "The form does not belong to this session.")
    return owner
