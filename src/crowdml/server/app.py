"""HTTP under /v1. Each handler reads like its own documentation: no SQL, no arithmetic.

A check-out is answered before the router: it is the hot path of a large crowd, and a plain read of bytes in memory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from crowdml.server.hub import Hub, price_of
from crowdml.server.limits import Rates
from crowdml.wire.envelopes import open_signed
from crowdml.wire.problems import Problem
from crowdml.wire.requests import LARGEST_ENROLMENT, open_enrolment, parse_authorization

log = logging.getLogger("crowdml.server")

MSGPACK, JSON, PROBLEM = "application/msgpack", "application/json", "application/problem+json"
Handler = Callable[[Request], Awaitable[Response]]


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
        Route("/v1/tasks/{task}/publications/{version}", publication_version, methods=["GET"]),
        Route("/v1/tasks/{task}/check-in", check_in, methods=["POST"]),
        Route("/healthz", health, methods=["GET"]),
        Route("/readyz", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    app = Starlette(
        routes=routes, lifespan=running, exception_handlers={Problem: refuse, HTTPException: refuse_plainly}
    )
    app.state.hub = hub
    app.state.addresses = Rates(hub.limits.address_rate, hub.limits.address_burst)
    app.state.devices = Rates(hub.limits.device_rate, hub.limits.device_burst)
    return Front(app, hub)


class Front:
    """In front of the router: check-outs, request ids, one shape for every error, one log line a refusal."""

    def __init__(self, app: Starlette, hub: Hub) -> None:
        self.app, self.hub, self.addresses = app, hub, app.state.addresses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False
        number = secrets.token_hex(6)

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        scope["crowdml.request"] = number
        try:
            self.addresses.take((scope.get("client") or ("", 0))[0], time.monotonic())
            path: str = scope["path"]
            if scope["method"] == "GET" and path.startswith("/v1/tasks/") and path.endswith("/publication"):
                await self._check_out(scope, path, watched)
                return
            await self.app(scope, receive, watched)
        except Problem as problem:
            await note(problem, scope, self.hub)(scope, receive, watched)
        except (ClientDisconnect, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("request %s: %s failed", number, scope["path"])
            if not started:
                problem = Problem("internal", "The server made a mistake; nothing changed.", request=number)
                await note(problem, scope, self.hub)(scope, receive, watched)

    async def _check_out(self, scope: Scope, path: str, send: Send) -> None:
        """GET /v1/tasks/{hash}/publication: what the server offers now; 304 if the device has it."""
        runner = self.hub.find(_hash(path[len("/v1/tasks/") : -len("/publication")]))
        offer = runner.offer
        tag = f'"{offer.version}"'.encode()
        headers = [
            (b"etag", tag),
            (b"cache-control", b"no-cache"),
            (b"content-type", MSGPACK.encode()),
            (b"crowdml-kind", offer.kind.encode()),
            (b"crowdml-version", str(offer.version).encode()),
            (b"crowdml-next", str(self.hub.window()).encode()),
            (b"crowdml-state", self.hub.states[runner.task.hash].encode()),
        ]
        same = any(name == b"if-none-match" and tag in value for name, value in scope["headers"])
        body = b"" if same else offer.body
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": 304 if same else 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def note(problem: Problem, scope: Scope, hub: Hub) -> Response:
    """A refusal: counted, one line in the log without a traceback, and the answer."""
    hub.counts[problem.slug] = hub.counts.get(problem.slug, 0) + 1
    log.info(
        "request %s: %s %s: %d %s",
        scope.get("crowdml.request"),
        scope["method"],
        scope["path"][:100],
        problem.status,
        problem.slug,
    )
    headers = {} if problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
    return Response(problem.encode(), problem.status, headers, media_type=PROBLEM)


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


async def check_in(request: Request) -> Response:
    """POST /v1/tasks/{hash}/check-in: one signed envelope. 202 if new, 200 if already here; both with a receipt."""
    hub: Hub = request.app.state.hub
    runner = hub.find(_hash(request.path_params["task"]))
    signed = open_signed(await read_body(request, hub.limits.body, hub.limits.slow))  # 413, 408, 400
    if signed.envelope.task != runner.task.hash:
        raise Problem("wrong-task", "The envelope names another task than the path.")  # 422
    request.app.state.devices.take(signed.envelope.sender, time.monotonic())  # 429
    status, receipt = await hub.check_in(signed)  # 401, 403, 409, 410, 422, 503, 507
    return Response(receipt, status, {"Crowdml-Next": str(hub.window())}, media_type=MSGPACK)


async def enrol(request: Request) -> Response:
    """POST /v1/devices: an invitation code and the device's key, signed by it. 201 if new, 200 if already here."""
    hub: Hub = request.app.state.hub
    body = await read_body(request, LARGEST_ENROLMENT, hub.limits.slow)
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
    kept = await hub.write(hub.store.publication, runner.task.hash, int(text))
    if kept is None:
        raise Problem("version-gone" if int(text) < runner.offer.version else "unknown-version", "It is not kept.")
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "Crowdml-Kind": kept.kind}
    return Response(kept.body, 200, headers, media_type=MSGPACK)


async def statement(request: Request) -> Response:
    """GET /v1/devices/{id}/statement: the last signed envelope that the server has of this device, for its owner."""
    hub: Hub = request.app.state.hub
    device = await authenticate(request, b"")
    data = await hub.write(hub.store.statement, device)
    if data is None:
        raise Problem("not-found", "This device has not checked in yet.")
    return Response(data, media_type=MSGPACK)


async def withdraw(request: Request) -> Response:
    """POST /v1/devices/{id}/withdraw: forget this device. What it gave stays in the model."""
    hub: Hub = request.app.state.hub
    body = await read_body(request, 1024, hub.limits.slow)
    device = await authenticate(request, body)
    await hub.withdraw(device)
    return json_response({"device": device, "withdrawn": True})


async def health(request: Request) -> Response:
    return json_response({"alive": True})


async def ready(request: Request) -> Response:
    hub: Hub = request.app.state.hub
    return json_response({"ready": True, "tasks": len(hub.runners)})


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
        raise Problem("unknown-device", f"Device {claim.device} is not enrolled here.")
    target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    claim.check(public, request.method, target, body, now=time.time())
    if request.path_params.get("device", claim.device) != claim.device:
        raise Problem("forbidden", "A device reads and changes what is its own.")
    return claim.device


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
    """The body, if it is short enough and comes soon enough."""
    length = request.headers.get("content-length")
    if length is not None and (not length.isdecimal() or int(length) > limit):
        raise Problem("too-large", f"At most {limit:,} bytes are read here.", limit=limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise Problem("too-large", f"At most {limit:,} bytes are read here.", limit=limit)
                parts.append(part)
    except TimeoutError as error:
        raise Problem("too-slow", f"The body did not arrive within {seconds:g} seconds.") from error
    return b"".join(parts)


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
