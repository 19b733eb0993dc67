"""The operator's pages: how everything fares, and each task with what can be done to it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable
from typing import IO, Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from crowdml.channels import combining
from crowdml.errors import TaskError
from crowdml.protocols import find
from crowdml.server import export, transcript
from crowdml.server.histograms import is_histogram
from crowdml.server.hosting import CHANGES, ChangeError, useful_changes
from crowdml.server.hub import Hosted
from crowdml.server.invitations import AUTHORITY
from crowdml.server.portal import drafts, entrance, people
from crowdml.server.portal.cache import kept
from crowdml.server.portal.figures import CHARTS, can_draw
from crowdml.server.portal.health import Row, bars, distances, health, lately, rows, scores, steps
from crowdml.server.portal.places import place_map, places_of
from crowdml.server.portal.public import PICTURE_POLICY
from crowdml.server.portal.studies import cohorts_of, find_price
from crowdml.server.portal.validating import BadRows, RowsForm, attach_rows, remove_rows
from crowdml.server.portal.visits import HEADERS, Visit, uploaded, visited
from crowdml.server.portal.words import words
from crowdml.server.sifting import WHY, left_out_most
from crowdml.server.validation import check_validated
from crowdml.wire.problems import Problem

BINARY = "application/octet-stream"


def routes() -> list[BaseRoute]:
    """Every page under /operator, and the local authority's certificate."""
    pages: list[tuple[str, str, Callable[[Request], Any]]] = [
        ("/operator", "GET", dashboard),
        ("/operator/login", "GET POST", entrance.log_in),
        ("/operator/setup", "GET POST", entrance.set_up),
        ("/operator/logout", "POST", entrance.log_out),
        ("/operator/tasks/new", "GET POST", drafts.by_form),
        ("/operator/tasks/file", "GET POST", drafts.by_file),
        ("/operator/drafts/{draft}", "GET", drafts.page),
        ("/operator/drafts/{draft}/start", "POST", drafts.start),
        ("/operator/drafts/{draft}/discard", "POST", drafts.discard),
        ("/operator/drafts/{draft}/simulate", "POST", drafts.simulate),
        ("/operator/drafts/{draft}/simulate/own", "POST", drafts.simulate_own),
        ("/operator/drafts/{draft}/cancel", "POST", drafts.cancel),
        ("/operator/tasks/{task}", "GET", task),
        ("/operator/tasks/{task}/state", "POST", change_state),
        ("/operator/tasks/{task}/closed", "POST", change_closed),
        ("/operator/tasks/{task}/validate", "POST", validate),
        ("/operator/tasks/{task}/validate/off", "POST", stop_validating),
        ("/operator/tasks/{task}/{file}", "GET", download),
        ("/operator/invitations", "GET", people.invitations),
        ("/operator/invitations/new", "GET POST", people.invite),
        ("/operator/invitations/{sheet}/end", "POST", people.end_invitations),
        ("/operator/devices", "GET", people.devices),
        ("/operator/devices/{device}", "GET", people.device),
        ("/operator/devices/{device}/revoke", "POST", people.revoke),
        ("/operator/settings", "GET POST", people.settings),
        ("/operator/settings/password", "POST", people.change_password),
        ("/operator/settings/operators", "POST", people.add_operator),
        ("/operator/settings/operators/remove", "POST", people.remove_operator),
        ("/ca.pem", "GET", authority),
    ]
    return [Route(path, handler, methods=methods.split()) for path, methods, handler in pages]


@visited
async def dashboard(visit: Visit) -> Response:
    """GET /operator: every task, the crowd, refusals, the disk, and what happened lately."""
    found = await rows(visit.hub, kept(visit.request).figures)
    return visit.page(
        "dashboard.html",
        rows=found,
        health=await health(visit.request.app.state),
        aside=list(visit.hub.aside.values()),
        events=await visit.read(lambda: visit.store.events(limit=15)),
        names={row.hosted.task.hash: row.hosted.task.name for row in found}
        | {hash_: each.name for hash_, each in visit.hub.aside.items()},
        drafts=await visit.read(drafts.all_drafts, visit.store),
        bars=bars,
    )


@visited
async def task(visit: Visit) -> Response:
    """GET /operator/tasks/{task}: one task, its health and its files."""
    return await _task_page(visit, _hosted(visit), RowsForm())


async def _task_page(visit: Visit, hosted: Hosted, rows_form: RowsForm, status: int = 200) -> Response:
    hash_ = hosted.task.hash
    stored = await visit.read(visit.store.task, hash_)
    figures = await kept(visit.request).figures(hosted.task)
    row = Row(hosted, stored, await visit.read(lately, visit.hub, hosted), figures)
    sifted = await kept(visit.request).sifted(hosted.task)
    return visit.page(
        "task.html",
        status,
        rows_form=rows_form,
        row=row,
        hosted=hosted,
        task=hosted.task,
        price=await find_price(hosted.task),
        changes=useful_changes(hosted.state),
        cohorts=cohorts_of(visit.hub, hosted.task),
        rounds=[each for each in visit.hub.round_figures(hash_, 12) if each.devices or each.phase != "abandoned"],
        gathered=await visit.read(visit.hub.round_now, hash_),
        sifted=sifted,
        left_out=left_out_most(sifted),
        combine=combining(hosted.task),
        why=WHY,
        canonical=hosted.task.canonical.decode(),
        events=await visit.read(lambda: visit.store.events(task=hash_, limit=15)),
        names={hash_: hosted.task.name},
        is_histogram=is_histogram(hosted.task),
        can_validate=not is_histogram(hosted.task) and hosted.task.features.kind != "windows",
        is_counting=is_histogram(hosted.task) and not find(hosted.task).keeps(hosted.task),
        remarks=find(hosted.task).remarks(hosted.task) if is_histogram(hosted.task) else (),
        places=await visit.read(places_of, visit.hub, hosted.task),
        handed=visit.hub.handed(hash_),
        place_map=place_map,
        watched=figures.watched,
        drawn=[name for name in ("error", "labels") if can_draw(name, figures)],
        now=visit.hub.clock(),
        steps=steps,
        distances=distances,
        scores=scores,
    )


@visited
async def change_state(visit: Visit) -> Response:
    """POST /operator/tasks/{task}/state: start, resume, pause or stop."""
    hosted, change = _hosted(visit), visit.form.get("to", "")
    if change not in CHANGES:
        raise Problem("invalid-form", f"Ask a task to {', '.join(CHANGES)}.")
    try:
        state = await visit.hub.change(hosted.task.hash, change, f"by {visit.name}")
    except ChangeError as error:
        raise Problem("conflict", str(error)) from error
    return visit.go(f"/operator/tasks/{_id(hosted)}", state)


@uploaded
async def validate(visit: Visit) -> Response:
    """POST /operator/tasks/{task}/validate: look at the model with rows that the form brings."""
    hosted = _hosted(visit)
    try:
        check_validated(hosted.task)
        await attach_rows(visit, hosted.task)
    except BadRows as error:
        return await _task_page(visit, hosted, RowsForm(dict(visit.form), {error.about: str(error)}), 422)
    except TaskError as error:
        raise Problem("conflict", str(error)) from error
    return visit.go(f"/operator/tasks/{_id(hosted)}", "validated")


@visited
async def stop_validating(visit: Visit) -> Response:
    """POST /operator/tasks/{task}/validate/off: look no more, and erase the rows."""
    hosted = _hosted(visit)
    await remove_rows(visit, hosted.task)
    return visit.go(f"/operator/tasks/{_id(hosted)}", "unvalidated")


@visited
async def change_closed(visit: Visit) -> Response:
    """POST /operator/tasks/{task}/closed: whether only devices that joined may read what it publishes."""
    hosted, closed = _hosted(visit), visit.form.get("closed") == "yes"
    await visit.hub.set_closed(hosted.task.hash, closed)
    await visit.record("closed" if closed else "opened", task=hosted.task.hash)
    return visit.go(f"/operator/tasks/{_id(hosted)}", "closed" if closed else "opened")


@visited
async def download(visit: Visit) -> Response:
    """GET /operator/tasks/{task}/{file}: the model, its card, the task itself, the transcript, or a plot."""
    hosted, file = _hosted(visit), visit.request.path_params["file"]
    hash_, name = hosted.task.hash, hosted.task.name
    if file.removesuffix(".svg") in CHARTS:
        return await _plot(visit, hosted, file.removesuffix(".svg"))
    if file == "task.json":
        return _attached(hosted.task.canonical, f"{name}.json", "application/json")
    if file == "transcript":
        return await _transcript(visit, hash_, name)
    makers: dict[str, tuple[str, str, Callable[[export.Exported], bytes]]] = {
        "model.safetensors": (f"{name}.safetensors", BINARY, export.model_file),
        "card.md": (f"{name}.md", "text/markdown", lambda model: _card(model, name)),
        "model.onnx": (f"{name}.onnx", BINARY, export.onnx_file),
        "histogram.json": (f"{name}.json", "application/json", lambda model: export.table_file(model, ".json")),
        "histogram.csv": (f"{name}.csv", "text/csv", lambda model: export.table_file(model, ".csv")),
    }
    without = "model.onnx" if is_histogram(hosted.task) else "histogram."
    if file not in makers or file.startswith(without):
        raise Problem("not-found", "There is no such file of this task.")
    called, kind, make = makers[file]

    def work() -> bytes:
        return make(export.export_model(visit.store, hash_))

    data = await asyncio.to_thread(work)
    await visit.record("downloaded", file, hash_)
    return _attached(data, called, kind)


async def _plot(visit: Visit, hosted: Hosted, name: str) -> Response:
    """The picture of the study's page; closed studies have it here, too."""
    held = kept(visit.request)
    if not can_draw(name, await held.figures(hosted.task)):
        raise Problem("not-found", "There is nothing to see on this plot yet.")
    theme = "dark" if visit.request.query_params.get("theme") == "dark" else "light"
    data = await held.picture(hosted.task, name, words("en"), theme, "svg")
    return Response(data, 200, {**HEADERS, "Content-Security-Policy": PICTURE_POLICY}, media_type="image/svg+xml")


def _card(model: export.Exported, name: str) -> bytes:
    others = (".json", ".csv") if is_histogram(model.task) else (".onnx",)
    return export.model_card(model, f"{name}.safetensors", *(name + each for each in others)).encode()


async def _transcript(visit: Visit, hash_: bytes, name: str) -> Response:
    """A transcript as large as it is, from a file that has no name: whatever becomes of the answer, nothing stays."""

    def write() -> tuple[IO[bytes], int]:
        file = tempfile.TemporaryFile()  # noqa: SIM115  closed when it is sent
        try:
            transcript.write_transcript(visit.store, hash_, file)
            size = file.tell()
            file.seek(0)
        except BaseException:
            file.close()
            raise
        return file, size

    file, size = await asyncio.to_thread(write)

    async def parts() -> AsyncGenerator[bytes]:
        with file:
            while part := await asyncio.to_thread(file.read, 2**18):
                yield part

    await visit.record("downloaded", "transcript", hash_)
    headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}.transcript"'}
    return StreamingResponse(parts(), 200, {**HEADERS, **headers}, media_type=BINARY)


def _attached(data: bytes, name: str, kind: str) -> Response:
    """A file to keep. A task's name has nothing in it that a header would mind."""
    headers = {**HEADERS, "Content-Disposition": f'attachment; filename="{name}"'}
    return Response(data, 200, headers, media_type=kind)


def _hosted(visit: Visit) -> Hosted:
    """The task whose hash begins with what the path says, twelve digits or more."""
    name = visit.request.path_params["task"]
    for each in visit.hub.hosted():
        if len(name) >= 12 and each.task.hash.hex().startswith(name):
            return each
    raise Problem("unknown-task", "No such task here.")


def _id(hosted: Hosted) -> str:
    return hosted.task.hash.hex()[:12]


async def authority(request: Request) -> Response:
    """GET /ca.pem: the local authority of this server, for those who compare its fingerprint before they trust it."""
    found = await asyncio.to_thread(request.app.state.hub.store.setting, AUTHORITY)
    if not found:
        raise Problem("not-found", "This server has no authority of its own.")
    headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": 'attachment; filename="crowdml-ca.pem"'}
    return Response(found, 200, headers, media_type="application/x-x509-ca-cert")
