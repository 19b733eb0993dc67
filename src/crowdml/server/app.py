"""HTTP under /v1. Each handler reads like its own documentation: no SQL, no arithmetic.

Check-outs and check-ins are answered before the router: they are the hot paths of a large crowd.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crowdml.server import logs, portal
from crowdml.server.hub import Hub, price_of
from crowdml.server.limits import Rates
from crowdml.server.openapi import describe
from crowdml.server.runner import TaskRunner
from crowdml.storage.server import StoreError
from crowdml.wire.envelopes import open_signed
from crowdml.wire.problems import PROBLEMS, Problem
from crowdml.wire.requests import LARGEST_ENROLMENT, open_enrolment, parse_authorization

log = logging.getLogger("crowdml.server")

MSGPACK, JSON, PROBLEM = "application/msgpack", "application/json", "application/problem+json"
TASKS, PUBLICATION, CHECK_IN = "/v1/tasks/", "/publication", "/check-in"
NOTHING: Message = {"type": "http.response.body", "body": b""}
Header = tuple[bytes, bytes]


def make_app(hub: Hub) -> ASGIApp:
    """The whole server as one ASGI application."""

    @asynccontextmanager
    async def running(_: Starlette) -> AsyncGenerator[None]:
        hub.start()
        yield
        await hub.close()

    routes = [
        Route("/v1/devices", enrol, methods=["POST"]),
        Route("/v1/devices/{device}/statement", statement, methods=["GET"]),
        Route("/v1/devices/{device}/withdraw", withdraw, methods=["POST"]),
        Route("/v1/tasks", tasks, methods=["GET"]),
        Route("/v1/tasks/{task}", task, methods=["GET"]),
        Route("/v1/tasks/{task}/publication", in_front, methods=["GET"]),
        Route("/v1/tasks/{task}/publications/{version}", publication_version, methods=["GET"]),
        Route("/v1/tasks/{task}/check-in", in_front, methods=["POST"]),
        Route("/problems/{slug}", problem_page, methods=["GET"]),
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/healthz", health, methods=["GET"]),
        Route("/readyz", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        *portal.routes(),
    ]
    app = Starlette(routes=routes, lifespan=running)
    # No more around the router than this: what else goes wrong, `Front` answers in the one shape of all errors.
    app.middleware_stack = ExceptionMiddleware(app.router, {Problem: refuse, HTTPException: refuse_plainly})
    app.router.redirect_slashes = False
    app.state.hub = hub
    return Front(app, hub)


class Front:
    """In front of the router: check-outs and check-ins, request ids, one shape and one log line for every refusal."""

    def __init__(self, app: Starlette, hub: Hub) -> None:
        self.app, self.hub = app, hub
        self.addresses = Rates(hub.limits.address_rate, hub.limits.address_burst)
        self._heads: dict[bytes, tuple[Any, list[Header], list[Header]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            path: str = scope["path"]
            address = (scope.get("client") or ("",))[0]
            self.addresses.take(address, time.monotonic())
            if path.startswith(TASKS):
                if path.endswith(PUBLICATION) and scope["method"] in ("GET", "HEAD"):
                    await self._check_out(scope, path, send)
                    return
                if path.endswith(CHECK_IN) and scope["method"] == "POST":
                    await self._check_in(scope, receive, path, send)
                    self.addresses.give(address)
                    return
            scope["crowdml.request"] = secrets.token_hex(6)
            await self.app(scope, receive, logs.logged(scope, send))
        except Problem as problem:
            await note(problem, scope, self.hub)(scope, receive, send)
        except StoreError as error:
            log.error("%s: %s", _shown(scope), error)
            await note(self.hub.unwritten(error), scope, self.hub)(scope, receive, send)
        except ClientDisconnect:
            log.debug("%s: the peer went away", _shown(scope))
        except Exception:
            number = scope.setdefault("crowdml.request", secrets.token_hex(6))
            log.exception("request %s: %s failed", number, _shown(scope))
            problem = Problem("internal", "The server made a mistake; nothing changed.", request=number)
            await note(problem, scope, self.hub)(scope, receive, send)  # every answer is made before it is sent

    async def _check_out(self, scope: Scope, path: str, send: Send) -> None:
        """GET /v1/tasks/{hash}/publication: what the server offers now; 304 if the device has it."""
        runner = self.hub.find(_hash(path[len(TASKS) : -len(PUBLICATION)]))
        offer = runner.offer
        tag, full, same = self._head(runner)
        for name, value in scope["headers"]:
            if name == b"if-none-match" and (tag in value or value == b"*"):
                await send({"type": "http.response.start", "status": 304, "headers": same})
                await send(NOTHING)
                return
        await send({"type": "http.response.start", "status": 200, "headers": full})
        await send({"type": "http.response.body", "body": offer.body})

    def _head(self, runner: TaskRunner) -> tuple[bytes, list[Header], list[Header]]:
        """The tag and the headers of a check-out, made once for each version, state and window."""
        offer, hash_ = runner.offer, runner.task.hash
        now = (offer, self.hub.states[hash_], self.hub.window())
        tag = f'"{offer.version}"'.encode()
        kept = self._heads.get(hash_)
        if kept is None or kept[0] != now:
            same: list[Header] = [
                (b"etag", tag),
                (b"cache-control", b"no-cache"),
                (b"crowdml-version", str(offer.version).encode()),
                (b"crowdml-next", str(now[2]).encode()),
                (b"crowdml-state", now[1].encode()),
                (b"crowdml-index", str(offer.index).encode()),
                (b"crowdml-chain", offer.chain.hex().encode()),
            ]
            full = [
                *same,
                (b"content-type", MSGPACK.encode()),
                (b"crowdml-kind", offer.kind.encode()),
                (b"content-length", str(len(offer.body)).encode()),
            ]
            kept = self._heads[hash_] = now, full, same
        return tag, kept[1], kept[2]

    async def _check_in(self, scope: Scope, receive: Receive, path: str, send: Send) -> None:
        """POST /v1/tasks/{hash}/check-in: one signed envelope. 202 if new, 200 if already here; both with a receipt."""
        hub = self.hub
        runner = hub.find(_hash(path[len(TASKS) : -len(CHECK_IN)]))  # 404
        data = await read_body(scope, receive, hub.limits.body)  # 413
        signed = open_signed(data)  # 400
        if signed.envelope.task != runner.task.hash:
            raise Problem("wrong-task", "The envelope names another task than the path.")  # 422
        status, receipt = await hub.check_in(signed)  # 401, 403, 409, 410, 422, 429, 503, 507
        headers = [
            (b"content-type", MSGPACK.encode()),
            (b"content-length", str(len(receipt)).encode()),
            (b"crowdml-next", str(hub.window()).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": receipt})


def note(problem: Problem, scope: Scope, hub: Hub) -> Response:
    """A refusal: counted, one line in the log without a traceback, and the answer."""
    number = scope.setdefault("crowdml.request", secrets.token_hex(6))
    hub.counts[problem.slug] = hub.counts.get(problem.slug, 0) + 1
    logs.refused(scope, problem.status, problem.slug)
    headers = {"Crowdml-Request": number}
    if problem.retry_after is not None:
        headers["Retry-After"] = str(problem.retry_after)
    if problem.slug in ("too-large", "too-slow"):  # the rest of the body is not waited for
        headers["Connection"] = "close"
    if portal.wants_page(scope):
        return portal.error_page(problem, scope, headers)
    return Response(problem.encode(), problem.status, headers, media_type=PROBLEM)


def _shown(scope: Scope) -> str:
    """Method and path on one line, whatever the peer put in them."""
    return f"{scope['method']} {logs.shown_path(scope['path'])}"


async def refuse(request: Request, problem: Exception) -> Response:
    assert isinstance(problem, Problem)
    return note(problem, request.scope, request.app.state.hub)


async def refuse_plainly(request: Request, error: Exception) -> Response:
    """The router's own refusals, in the one shape of all errors."""
    status = getattr(error, "status_code", 400)
    slug = {404: "not-found", 405: "method"}.get(status, "bad-request")
    response = note(
        Problem(slug, f"{request.method} is not answered at this path."), request.scope, request.app.state.hub
    )
    response.headers.update(getattr(error, "headers", None) or {})
    return response


# --- handlers ---


async def in_front(request: Request) -> Response:
    """Answered before the router; here so that the router knows which methods the path takes."""
    raise Problem("not-found", "There is nothing at this path.")


async def enrol(request: Request) -> Response:
    """POST /v1/devices: an invitation code and the device's key, signed by it. 201 if new, 200 if already here."""
    hub: Hub = request.app.state.hub
    body = await read_body(request.scope, request.receive, LARGEST_ENROLMENT)
    is_new, enrolled = await hub.enrol(open_enrolment(body, request.headers.get("crowdml-signature")))
    return Response(enrolled.encode(), 201 if is_new else 200, media_type=MSGPACK)


async def tasks(request: Request) -> Response:
    """GET /v1/tasks: what runs here, and what it costs."""
    hub: Hub = request.app.state.hub
    found = [
        {
            "name": each.task.name,
            "title": each.task.title,
            "purpose": each.task.purpose,
            "collects": each.task.collects,
            "hash": each.task.hash.hex(),
            "state": each.state,
            "version": each.offer.version,
            "check_ins": each.check_ins,
            "price": price_of(hub.runners[each.task.hash]),
        }
        for each in hub.hosted()
    ]
    return json_response({"tasks": found})


async def task(request: Request) -> Response:
    """GET /v1/tasks/{hash}: the task itself. Its SHA-256 is its name, so it may be cached for ever."""
    hub: Hub = request.app.state.hub
    runner = hub.find(_hash(request.path_params["task"]))
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "ETag": f'"{runner.task.hash.hex()}"'}
    return Response(runner.task.canonical, 200, headers, media_type=JSON)


async def publication_version(request: Request) -> Response:
    """GET /v1/tasks/{hash}/publications/{version}: a version that is kept; it never changes."""
    hub: Hub = request.app.state.hub
    runner = hub.find(_hash(request.path_params["task"]))
    text = request.path_params["version"]
    if not text.isdecimal() or len(text) > 12:
        raise Problem("unknown-version", "A version is a whole number.")
    if int(text) == runner.offer.version:
        return Response(runner.offer.body, 200, {"Crowdml-Kind": runner.offer.kind}, media_type=MSGPACK)
    kept = await asyncio.to_thread(hub.store.publication, runner.task.hash, int(text))
    if kept is None:
        raise Problem("version-gone" if int(text) < runner.offer.version else "unknown-version", "It is not kept.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Crowdml-Kind": kept.kind}
    return Response(kept.body, 200, headers, media_type=MSGPACK)


async def statement(request: Request) -> Response:
    """GET /v1/devices/{id}/statement: the last signed envelope that the server has of this device, for its owner."""
    hub: Hub = request.app.state.hub
    device = await authenticate(request, b"")
    data = await asyncio.to_thread(hub.store.statement, device)
    if data is None:
        raise Problem("not-found", "This device has not checked in yet.")
    return Response(data, media_type=MSGPACK)


async def withdraw(request: Request) -> Response:
    """POST /v1/devices/{id}/withdraw: forget this device. What it gave stays in the model."""
    hub: Hub = request.app.state.hub
    body = await read_body(request.scope, request.receive, 1024)
    device = await authenticate(request, body)
    await hub.withdraw(device)
    return json_response({"device": device, "withdrawn": True})


async def health(request: Request) -> Response:
    """GET /healthz: the process answers."""
    return json_response({"alive": True})


async def ready(request: Request) -> Response:
    """GET /readyz: check-ins are taken."""
    hub: Hub = request.app.state.hub
    if hub.closing:
        raise Problem("not-ready", "The server is stopping.", retry_after=5)
    if hub.is_full():
        raise Problem("full", "The server's disk is full; reading goes on.", retry_after=300)
    return json_response({"ready": True, "tasks": len(hub.runners)})


async def problem_page(request: Request) -> Response:
    """GET /problems/{slug}: what a refusal of this type means, and what to do."""
    kind = PROBLEMS.get(request.path_params["slug"])
    if kind is None:
        raise Problem("not-found", "No problem has this name.")
    return json_response({"title": kind.title, "status": kind.status, "help": kind.help})


async def openapi(request: Request) -> Response:
    """GET /openapi.json: this API, as OpenAPI 3.1."""
    return json_response(describe())


async def metrics(request: Request) -> Response:
    """GET /metrics: Prometheus text."""
    hub: Hub = request.app.state.hub
    lines = ["# TYPE crowdml_devices gauge", f"crowdml_devices {len(hub.keys)}", "# TYPE crowdml_check_ins counter"]
    lines += [f'crowdml_check_ins{{task="{each.task.hash.hex()[:12]}"}} {each.check_ins}' for each in hub.hosted()]
    lines.append("# TYPE crowdml_refusals counter")
    lines += [f'crowdml_refusals{{problem="{slug}"}} {count}' for slug, count in sorted(hub.counts.items())]
    return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


# --- what handlers share ---


async def authenticate(request: Request, body: bytes) -> str:
    """The device that signed this request, if it is the one in the path."""
    hub: Hub = request.app.state.hub
    claim = parse_authorization(request.headers.get("authorization"))
    public = hub.keys.get(claim.device)
    if public is None:
        raise await asyncio.to_thread(hub.stranger, claim.device)
    path, query = request.scope["raw_path"], request.scope["query_string"]
    target = (path + b"?" + query if query else path).decode("latin-1")
    claim.check(public, request.method, target, body, now=time.time())
    if request.path_params.get("device", claim.device) != claim.device:
        raise Problem("forbidden", "A device reads and changes what is its own.")
    return claim.device


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The body, if it is short enough. Whether it comes soon enough, the connection watches."""
    for name, value in scope["headers"]:
        if name == b"content-length" and (not value.isdigit() or len(value) > 18 or int(value) > limit):
            raise Problem("too-large", f"At most {limit:,} bytes are read here.", limit=limit)
    body = b""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":  # it went away, or was too slow: the connection watches that
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise Problem("too-large", f"At most {limit:,} bytes are read here.", limit=limit)
        if not message.get("more_body", False):
            return body


def json_response(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value, ensure_ascii=False, allow_nan=False), status, media_type=JSON)


def _hash(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != 32 or text != found.hex():
        raise Problem("unknown-task", "A task is named by the 64 hex digits of its hash.")
    return found
