"""A visit of an operator: who it is, what the form says, and how it is answered.

`visited` stands in front of every operator page: it lets in those who are logged in, and takes a form only with its
token. What changes something is a POST, and becomes an event with the operator's name.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from crowdml.server.hub import Hub
from crowdml.server.operators import FORM_FIELD, LoginNeeded, Operators, operators_of
from crowdml.server.portal import pages
from crowdml.server.portal.forms import Upload, read_form, read_upload
from crowdml.server.portal.words import words
from crowdml.storage.server import Session, Store, StoreError
from crowdml.texts import epsilon_text, number_text
from crowdml.wire.problems import Problem

log = logging.getLogger("crowdml.server")

HEADERS = {
    **pages.HEADERS,
    "Referrer-Policy": "same-origin",  # a browser names the origin of a form only so; nothing leaves for another site
    "Cache-Control": "no-store",
}
LARGEST_FORM = 512 * 1024
LARGEST_UPLOAD = 32 * 2**20
"""Bytes of a form with rows in it; the command line takes larger files."""
READS = ("GET", "HEAD")
"""Methods that change nothing: whatever else comes is a form, and has its token."""

NOTICES = {
    "started": "The task runs. Devices with an invitation may join now.",
    "running": "The task runs again.",
    "paused": "The task is paused: devices wait, and keep what they have charged.",
    "stopped": "The task is stopped. Its model stays.",
    "closed": "Only devices that joined may read what the task publishes.",
    "opened": "Everybody may read what the task publishes.",
    "discarded": "The draft is gone.",
    "revoked": "The device is revoked: nothing more is taken from it.",
    "ended": "The invitations have ended. Devices that joined stay.",
    "saved": "Saved.",
    "password": "Your password is changed; your other sessions have ended.",
    "added": "The operator is added.",
    "removed": "The operator is removed.",
    "cancelled": "The simulation was cancelled.",
    "validated": "The server evaluates the model on these rows from now on.",
    "unvalidated": "Nobody looks any more, and the rows are erased. What was charged stays in the ledger.",
}
"""What a page says after a form was taken, by the word in its address."""


def render(
    request: Request, template: str, session: Session | None, status: int = 200, csrf: str = "", **values: Any
) -> Response:
    """An operator's page; in English, whatever the browser prefers."""
    token = session.csrf if session is not None else csrf
    text = pages.page_text(
        words("en"),
        request.url.path,
        f"operator/{template}",
        moment=moment,
        epsilon=epsilon_text,
        size=size,
        switches=[],
        request=request,
        path=request.url.path,
        operator=None if session is None else session.operator,
        form_token=Markup('<input type="hidden" name="{}" value="{}">').format(FORM_FIELD, token),
        notice=NOTICES.get(request.query_params.get("done", "")),
        **values,
    )
    return Response(text, status, HEADERS, media_type="text/html")


def moment(at: str | None) -> Markup:
    """A time on an operator's page. Where scripts run, it says how long ago that was."""
    return Markup("never") if at is None else words("en").moment(at, relative=True)


def size(count: float | None) -> str:
    if count is None:
        return "not ours to see"
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{number_text(count)} {unit}"
        count /= 1000
    return ""


def store_words(store: Store) -> str:
    """What a command on the server's own machine needs to find this server's data."""
    if store.path is not None:
        return f"--folder {shlex.quote(str(store.path.resolve().parent))}"
    return f"--database {shlex.quote(store.name)}"


@dataclass
class Visit:
    """A request of an operator who is logged in."""

    request: Request
    session: Session
    form: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Upload] = field(default_factory=dict)

    @property
    def hub(self) -> Hub:
        return self.request.app.state.hub

    @property
    def store(self) -> Store:
        return self.hub.store

    @property
    def operators(self) -> Operators:
        return operators_of(self.request)

    @property
    def name(self) -> str:
        return self.session.operator

    def page(self, template: str, status: int = 200, **values: Any) -> Response:
        return render(self.request, template, self.session, status, store_words=store_words(self.store), **values)

    def go(self, to: str, done: str = "") -> Response:
        """See other, after a form."""
        return pages.redirect(f"{to}?{urlencode({'done': done})}" if done else to)

    async def record(self, kind: str, detail: str = "", task: bytes | None = None) -> None:
        """An event with the operator's name. It comes after the deed, so a full disk costs the event alone."""
        said = f"{self.name}: {detail}" if detail else f"by {self.name}"
        try:
            await self.hub.write(self.store.record, kind, self.hub.clock(), said, task)
        except StoreError as error:
            log.error("no event %s of %s: %s", kind, self.name, error)

    async def read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Something that reads the store, in a thread."""
        return await asyncio.to_thread(work, *arguments)


Handler = Callable[[Visit], Awaitable[Response]]


def visited(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """The handler for those who are logged in; whatever may change something has a token of their session."""
    return _guarded(handler, files=False)


def uploaded(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """As `visited`, for a form with files, which may be larger."""
    return _guarded(handler, files=True)


def _guarded(handler: Handler, *, files: bool) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        operators = operators_of(request)
        try:
            session = await operators.require(request)
        except LoginNeeded as needed:
            if request.method not in READS:
                raise Problem("login", str(needed)) from needed
            return pages.redirect(f"/operator/login?next={quote(request.url.path)}")
        visit = Visit(request, session)
        if request.method not in READS:
            if files:
                visit.form, visit.files = await read_upload(request, LARGEST_UPLOAD)
            else:
                visit.form = await read_form(request, LARGEST_FORM, files=True)
            operators.check_form(request, visit.form.get(FORM_FIELD, ""), session)
        return await handler(visit)

    handle.__doc__ = handler.__doc__
    return handle
