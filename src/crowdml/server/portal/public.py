"""Pages that anyone may read: which studies run here, and what each of them asks of a device."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import segno
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from crowdml.addresses import BadAddress, read_address
from crowdml.server.export import thinned
from crowdml.server.hub import Hosted, Hub, code_hash, utc_now
from crowdml.server.invitations import join_command, join_commands, public_address, trust_words
from crowdml.server.portal import assets
from crowdml.server.portal import figures as charts
from crowdml.server.portal.cache import kept
from crowdml.server.portal.live import error_now
from crowdml.server.portal.pages import answer, code, language, page_text, render
from crowdml.server.portal.phone import parts
from crowdml.server.portal.places import Places, place_map, places_of
from crowdml.server.portal.studies import Study, cohorts_of, find_study, shown_loss, studies
from crowdml.storage.server import State
from crowdml.wire.problems import Problem
from crowdml.wire.requests import CODE

PICTURES = {"svg": "image/svg+xml", "png": "image/png"}
PICTURE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"
"""The policy of a plot that is opened by itself: it has styles of its own and nothing else."""
CONTACT = "contact"
"""The setting in which the operator says who runs this server: a name, then lines with addresses."""
LINK = re.compile(r"https?://[^\s<>\"]+|[\w.+-]+@[\w-]+(?:\.[\w-]+)+")


ORDER: tuple[State, ...] = ("running", "paused", "stopped", "draft")
"""The order of studies on the first page."""


@dataclass(frozen=True)
class Contact:
    """The people who run the server."""

    name: str
    lines: tuple[Markup, ...]


async def home(request: Request) -> Response:
    """GET /: the studies of this server, those that run first."""
    found = sorted(await studies(request), key=lambda study: ORDER.index(study.state))
    runs, said = await contact(request), language(request)

    def make() -> str:
        return page_text(said, "/", "home.html", studies=found, contact=runs)

    return answer(request, await kept(request).page(("home", said.language), (found, runs), make))


async def study(request: Request) -> Response:
    """GET /studies/{study}: one study."""
    found = await find_study(request, request.path_params["study"])
    hub: Hub = request.app.state.hub
    said = language(request)
    cohorts = None if found.closed else cohorts_of(hub, found.task)

    def read() -> tuple[str, Place, Contact | None, Places | None]:
        places = None if found.closed else places_of(hub, found.task)
        return assets.guards(), _place(request), _contact(hub), places

    guards, where, runs, places = await asyncio.to_thread(read)
    command = where.command(said("study.join.code"), found, hub.hosted())

    def make() -> str:
        address = where.address + found.path
        return page_text(
            said,
            found.path,
            "study.html",
            study=found,
            guards=guards,
            price=found.price,
            watched=found.figures.watched,
            shown_loss=lambda loss: shown_loss(loss, said),
            masking=found.task.masking,
            cohorts=cohorts,
            places=places,
            place_map=place_map,
            place_states={name: said(f"study.places.state.{name}") for name in ("alive", "silent", "free")},
            error_now=error_now(found, said),
            drawn=[name for name in charts.CHARTS if not found.closed and charts.can_draw(name, found.figures)],
            thinned=thinned,
            contact=runs,
            address=address,
            qr=qr(address),
            where=where,
            help_command=code("crowdml join --help"),
            join_command=command,
        )

    shown = found, cohorts, places, runs, where, command
    return answer(request, await kept(request).page(("study", found.id, said.language), shown, make))


async def figures(request: Request) -> Response:
    """GET /studies/{study}/figures.json: what the plots show, for the charts in the page."""
    found = await _open_study(request)
    data = json.dumps(found.figures.plain(), ensure_ascii=False, allow_nan=False)
    headers = {"Cache-Control": "no-cache", "ETag": f'"{found.figures.index}"', "X-Content-Type-Options": "nosniff"}
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(data, headers=headers, media_type="application/json")


async def plot(request: Request) -> Response:
    """GET /studies/{study}/plots/{name}.{kind}: a plot as a picture; `?theme=dark` for dark pages."""
    found = await _open_study(request)
    name, _, kind = request.path_params["file"].rpartition(".")
    if name not in charts.CHARTS or kind not in PICTURES or not charts.can_draw(name, found.figures):
        raise Problem("not-found", "There is no such plot, or nothing to see on it yet.")
    theme = "dark" if request.query_params.get("theme") == "dark" else "light"
    data = await kept(request).picture(found.task, name, language(request), theme, kind)
    headers = {
        "Cache-Control": "no-cache, max-age=10",
        "Content-Security-Policy": PICTURE_POLICY,
        "Vary": "Accept-Language, Cookie",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(data, headers=headers, media_type=PICTURES[kind])


async def join(request: Request) -> Response:
    """GET /join/{code}: the page behind a QR code. It tells which studies the code is for, and uses nothing up."""
    hub: Hub = request.app.state.hub
    text = request.path_params["code"]
    found = None
    if CODE.fullmatch(text):
        found = await asyncio.to_thread(hub.store.invitation, code_hash(text))
    if found is None:
        return render(request, "no-invitation.html", 404, why="unknown", contact=await contact(request))
    over = "ended" if found.ends_at is not None and found.ends_at <= utc_now() else "used-up"
    if over == "ended" or found.used >= found.uses:
        return render(request, "no-invitation.html", 410, why=over, contact=await contact(request))
    invited = [each for each in await studies(request) if not found.tasks or each.task.hash in found.tasks]
    where = await place(request)
    return render(
        request,
        "join.html",
        headers={"Cache-Control": "no-store"},
        studies=invited,
        invitation=found,
        where=where,
        commands=where.commands(text, invited),
        code_text=text,
        **parts(request),
        address=where.address + request.url.path,
        qr=qr(where.address + request.url.path),
        contact=await contact(request),
    )


# --- what pages share ---


async def _open_study(request: Request) -> Study:
    """The study in the path, if anyone may see how it goes."""
    found = await find_study(request, request.path_params["study"])
    if found.closed:
        raise Problem("not-found", "Only devices that joined this study may see how it goes.")
    return found


@dataclass(frozen=True)
class Place:
    """Where devices reach this server, and what a join command needs besides that to trust it."""

    address: str
    trust: str

    def commands(self, code: str, invited: Sequence[Study]) -> list[str]:
        """How to join each of these studies with this code; one that is stopped cannot be joined."""
        tasks = [(each.task, each.state) for each in invited]
        return join_commands(self.address, code, tasks, trust=self.trust)

    def command(self, code: str, study: Study, hosted: Sequence[Hosted]) -> str:
        """How to join this study of those that the server hosts, with a code that may admit to all of them."""
        opened = [each for each in hosted if each.state != "stopped"]
        task = study.task.name if len(opened) > 1 else ""
        return join_command(self.address, code, trust=self.trust, task=task, wants=study.task)


async def place(request: Request) -> Place:
    """What the operator said, else where the server said that it listens: never what the request says of itself."""
    return await asyncio.to_thread(_place, request)


def _place(request: Request) -> Place:
    hub: Hub = request.app.state.hub
    return Place(public_address(hub.store) or _reached(request), trust_words(hub.store))


def _reached(request: Request) -> str:
    """Where this request came to; a server that never listened knows nothing better."""
    try:
        return str(read_address(f"{request.url.scheme}://{request.url.netloc}"))
    except BadAddress as error:
        raise Problem("bad-request", "The Host of this request is no name of a server.") from error


@lru_cache(256)
def qr(text: str) -> Markup:
    """The address as a QR code: an image inside the page, black on white in every theme."""
    return Markup(segno.make(text, error="m").svg_data_uri(scale=4, border=2, dark="#000", light="#fff"))


async def contact(request: Request) -> Contact | None:
    """The people who run this server, if its operator named them. Addresses become links."""
    return await asyncio.to_thread(_contact, request.app.state.hub)


def _contact(hub: Hub) -> Contact | None:
    said = hub.store.setting(CONTACT)
    lines = [line.strip() for line in (said or b"").decode(errors="replace").splitlines() if line.strip()]
    return Contact(lines[0], tuple(map(_linked, lines[1:]))) if lines else None


def _linked(line: str) -> Markup:
    shown, at = Markup(""), 0
    for found in LINK.finditer(line):
        to = found[0] if found[0].startswith("http") else f"mailto:{found[0]}"
        shown += line[at : found.start()] + Markup('<a href="{}" rel="noreferrer">{}</a>').format(to, found[0])
        at = found.end()
    return shown + line[at:]
