"""HTTP under /v1. Each handler reads like its own documentation: no SQL, no arithmetic.

Check-outs and check-ins are answered before the router: they are the hot paths of a large crowd.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from crowdml.server import logs, portal
from crowdml.server.connection import Answered, Header, packed_head
from crowdml.server.hub import Hub
from crowdml.server.limits import Rates, source
from crowdml.server.openapi import describe
from crowdml.server.portal.public import CONTACT
from crowdml.server.portal.studies import find_price
from crowdml.server.runner import Offer, TaskRunner
from crowdml.server.sizes import largest_check_in, largest_masked, largest_message
from crowdml.storage.server import StoreError
from crowdml.wire.envelopes import open_signed
from crowdml.wire.packing import LARGEST_INTEGER, pack
from crowdml.wire.problems import PROBLEMS, Problem
from crowdml.wire.receipts import chain_start
from crowdml.wire.requests import LARGEST_CHECK, LARGEST_ENROLMENT, open_code, open_enrolment, parse_authorization

log = logging.getLogger("crowdml.server")

MSGPACK, JSON, PROBLEM = "application/msgpack", "application/json", "application/problem+json"
BINARY = "application/octet-stream"
TASKS, PUBLICATION, CHECK_IN, ROUND = "/v1/tasks/", "/publication", "/check-in", "/round"
MAILBOX, HELD, PLACES = "/mailbox", "/places", "/places/"
NOTHING: Message = {"type": "http.response.body", "body": b""}
UNUSUAL = frozenset((b"transfer-encoding", b"x-forwarded-for", b"x-forwarded-proto"))
"""Headers with which a check-in or check-out goes through ASGI."""


def make_app(hub: Hub) -> Front:
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
        Route("/v1/invitations/check", check_invitation, methods=["POST"]),
        Route("/v1/artefacts/{sha256}", artefact, methods=["GET"]),
        Route("/v1/tasks", tasks, methods=["GET"]),
        Route("/v1/tasks/{task}", task, methods=["GET"]),
        Route("/v1/tasks/{task}/publication", in_front, methods=["GET"]),
        Route("/v1/tasks/{task}/publications/{version}", publication_version, methods=["GET"]),
        Route("/v1/tasks/{task}/chain", chain_values, methods=["GET"]),
        Route("/v1/tasks/{task}/check-in", in_front, methods=["POST"]),
        Route("/v1/tasks/{task}/round", in_front, methods=["GET", "POST"]),
        Route("/v1/tasks/{task}/places/{place}", in_front, methods=["POST"]),
        Route("/v1/tasks/{task}/places", in_front, methods=["GET"]),
        Route("/v1/tasks/{task}/mailbox", in_front, methods=["GET"]),
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
        self._urls: dict[bytes, tuple[bytes, bytes, int]] = {}
        self._answers: dict[bytes, tuple[Any, bytes, bytes, bytes]] = {}
        self._receipt_heads: dict[tuple[int, int], bytes] = {}
        self._receipts_for: tuple[Any, int] = (None, 0)
        self._busy_said = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            path: str = scope["path"]
            address = source((scope.get("client") or ("",))[0])
            self.addresses.take(address, time.monotonic())
            if path.startswith(TASKS):
                if path.endswith(PUBLICATION) and scope["method"] in ("GET", "HEAD"):
                    await self._check_out(scope, path, send)
                    return
                answer = self._signed_request(scope["method"], path)
                if answer is not None:
                    await answer(scope, receive, path, send)
                    self.addresses.give(address)
                    return
            scope["crowdml.request"] = secrets.token_hex(6)
            await self.app(scope, receive, logs.logged(scope, send))
        except ClientDisconnect:
            log.debug("%s: the peer went away", _shown(scope))
        except Exception as error:
            await note(self._problem(error, scope), scope, self.hub)(scope, receive, send)  # made before it is sent

    # --- from the connection, without ASGI ---

    def look_up(self, method: bytes, url: bytes, headers: list[Header]) -> bytes | None:
        """The task's hash, if this is a check-out or a check-in with nothing unusual about it."""
        found = self._urls.get(url)
        if found is None:
            found = self._known_url(url)
            if found is None:
                return None
        wanted, hash_, largest = found
        if method != wanted:
            return None
        if method == b"GET":
            if hash_ in self.hub.closed:
                return None
            for name, _ in headers:
                if name in UNUSUAL:
                    return None
            return hash_
        size = b""
        for name, value in headers:
            if name == b"content-length":
                size = value
            elif name in UNUSUAL:
                return None
        return hash_ if size.isdigit() and len(size) < 12 and int(size) <= largest else None

    def _known_url(self, url: bytes) -> tuple[bytes, bytes, int] | None:
        """The method, the task and the largest body of a hot path, for tasks that are here.

        So no more are kept than there are tasks.
        """
        text = url.decode("latin-1")
        for method, ending in ((b"GET", PUBLICATION), (b"POST", CHECK_IN)):
            if text.startswith(TASKS) and text.endswith(ending):
                with contextlib.suppress(Problem):
                    hash_ = _hash(text[len(TASKS) : -len(ending)])
                    runner = self.hub.runners.get(hash_)
                    if runner is not None:
                        self._urls[url] = method, hash_, most_bytes(runner, self.hub)
                        return self._urls[url]
        return None

    def check_out(self, hash_: bytes, headers: list[Header], address: str, common: list[Header]) -> bytes:
        """GET /v1/tasks/{hash}/publication, whole."""
        self.addresses.take(address, time.monotonic())
        runner = self.hub.find(hash_)
        offer, window, state = runner.offer, self.hub.window(), self.hub.states[hash_]
        kept = self._answers.get(hash_)
        if kept is None or kept[0][0] is not offer or kept[0][1] is not common or kept[0][2:] != (window, state):
            tag, full, same = self._head(runner, offer)
            whole = packed_head(200, [*common, *full]) + offer.body
            kept = self._answers[hash_] = (
                (offer, common, window, state),
                tag,
                whole,
                packed_head(304, [*common, *same]),
            )
        for name, value in headers:
            if name == b"if-none-match" and (kept[1] in value or value == b"*"):
                return kept[3]
        return kept[2]

    def begin_check_in(self, address: str) -> None:
        """Whether a body may come: by address, and by how many wait."""
        self.addresses.take(address, time.monotonic())
        self.hub.admit()

    def check_in(self, hash_: bytes, data: bytes, address: str, done: Answered) -> None:
        """POST /v1/tasks/{hash}/check-in, as `_check_in`."""
        signed = open_signed(data)  # 400
        if signed.envelope.task != hash_:
            raise Problem("wrong-task", "The envelope names another task than the path.")  # 422

        def answered(answer: tuple[int, bytes] | Problem) -> None:
            if not isinstance(answer, Problem):
                self.addresses.give(address)
            done(answer)

        self.hub.submit(signed, answered)

    def head(self, status: int, size: int, common: list[Header]) -> bytes:
        """The head of the answer to a check-in, made once for each size of a receipt while nothing changes."""
        window = self.hub.window()
        if self._receipts_for[0] is not common or self._receipts_for[1] != window:
            self._receipts_for = common, window
            self._receipt_heads.clear()
        found = self._receipt_heads.get((status, size))
        if found is None:
            headers = [*common, *receipt_headers(size, window)]
            found = self._receipt_heads[status, size] = packed_head(status, headers)
        return found

    def refusal(self, error: Exception, method: str, path: str) -> tuple[int, list[Header], bytes]:
        """What is answered to an error, counted and logged; of many that are busy, one line a second."""
        scope: Scope = {"type": "http", "method": method, "path": path, "headers": []}
        problem = self._problem(error, scope)
        now = time.monotonic()
        if problem.slug == "busy" and now - self._busy_said < 1:
            self.hub.counts["busy"] = self.hub.counts.get("busy", 0) + 1
            status, headers, body = _busy(problem.detail, problem.retry_after)
            return status, list(headers), body
        self._busy_said = now if problem.slug == "busy" else self._busy_said
        response = note(problem, scope, self.hub)
        return response.status_code, response.raw_headers, bytes(response.body)

    def _problem(self, error: Exception, scope: Scope) -> Problem:
        """An error as it travels. What it said, and where, is in the log alone."""
        if isinstance(error, Problem):
            return error
        if isinstance(error, StoreError):
            log.error("%s: %s", _shown(scope), error)
            return self.hub.unwritten(error)
        number = scope.setdefault("crowdml.request", secrets.token_hex(6))
        log.error("request %s: %s failed", number, _shown(scope), exc_info=error)
        return Problem("internal", "The server made a mistake; nothing changed.", request=number)

    # --- through ASGI ---

    def _signed_request(self, method: str, path: str) -> Any:
        """What answers a request that a device signs; None where the router does."""
        if path.endswith(CHECK_IN) and method == "POST":
            return self._check_in
        if path.endswith(ROUND) and method in ("GET", "POST"):
            return self._round
        if path.endswith(MAILBOX) and method == "GET":
            return self._mailbox
        if path.endswith(HELD) and method == "GET":
            return self._held
        return self._claim if PLACES in path and method == "POST" else None

    async def _check_out(self, scope: Scope, path: str, send: Send) -> None:
        """GET /v1/tasks/{hash}/publication: what the server offers now; 304 if the device has it."""
        runner = self.hub.find(_hash(path[len(TASKS) : -len(PUBLICATION)]))
        await admit_reader(self.hub, scope, runner.task.hash)
        offer = runner.offer
        tag, full, same = self._head(runner, offer)
        for name, value in scope["headers"]:
            if name == b"if-none-match" and (tag in value or value == b"*"):
                await send({"type": "http.response.start", "status": 304, "headers": same})
                await send(NOTHING)
                return
        await send({"type": "http.response.start", "status": 200, "headers": full})
        await send({"type": "http.response.body", "body": offer.body})

    def _head(self, runner: TaskRunner, offer: Offer) -> tuple[bytes, list[Header], list[Header]]:
        """The tag and the headers of a check-out, made once for each version, state and window.

        `offer` is the one whose body follows: the runner may have the next one by now, from another thread.
        """
        hash_ = runner.task.hash
        state = self.hub.states[hash_]
        now = (offer, state, self.hub.next_visit(state))
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
        hub.admit()  # 503, before the body is read
        data = await read_body(scope, receive, most_bytes(runner, hub))  # 413
        signed = open_signed(data)  # 400
        if signed.envelope.task != runner.task.hash:
            raise Problem("wrong-task", "The envelope names another task than the path.")  # 422
        status, receipt = await hub.check_in(signed)  # 401, 403, 409, 410, 422, 429, 503, 507
        headers = receipt_headers(len(receipt), hub.window())
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": receipt})

    async def _round(self, scope: Scope, receive: Receive, path: str, send: Send) -> None:
        """GET /v1/tasks/{hash}/round: what a device is told of a round now. POST: what it says in one; 202 if new, 200
        if already here, both with the same view."""
        hub, hash_ = self.hub, _hash(path[len(TASKS) : -len(ROUND)])
        rounds = hub.rounds(hash_)  # 404
        if scope["method"] == "GET":
            device = await member(self.hub, scope, hash_)  # 401, 403
            status, view = 200, hub.look_at(hash_, device, _number(scope, "round"))  # 410, 429, 503
        else:
            hub.admit()  # 503, before the body is read
            data = await read_body(scope, receive, largest_message(rounds.terms))  # 413
            signed = open_signed(data)  # 400
            if signed.envelope.task != hash_:
                raise Problem("wrong-task", "The envelope names another task than the path.")  # 422
            status, view = await hub.check_in(signed, posted=True)  # 401, 403, 409, 410, 422, 429, 503, 507
        await _answer(send, status, MSGPACK, view)

    async def _claim(self, scope: Scope, receive: Receive, path: str, send: Send) -> None:
        """POST /v1/tasks/{hash}/places/{number}: this device stands there from now on. 201 if new, 200 if it did."""
        hub = self.hub
        name, _, text = path[len(TASKS) :].partition(PLACES)
        hash_ = _hash(name)
        relay = hub.relay(hash_)  # 404
        if not (text.isascii() and text.isdigit() and len(text) <= 9):
            raise Problem("not-found", "A place is named by its number in the task's list, from 0.")
        device = await member(hub, scope, hash_, await read_body(scope, receive, 1024))  # 401, 403, 413
        is_new = await hub.claim(hash_, int(text), device)  # 404, 409, 410, 429, 507
        said = {"place": int(text), "name": relay.task.places[int(text)].name}
        await _answer(send, 201 if is_new else 200, JSON, json.dumps(said, ensure_ascii=False).encode())

    async def _mailbox(self, scope: Scope, _: Receive, path: str, send: Send) -> None:
        """GET /v1/tasks/{hash}/mailbox?after=: what peers wrote to this device's place, after that journal entry."""
        hash_ = _hash(path[len(TASKS) : -len(MAILBOX)])
        self.hub.relay(hash_)  # 404
        device = await member(self.hub, scope, hash_)  # 401, 403
        after = _number(scope, "after") or 0
        await _answer(send, 200, MSGPACK, await self.hub.mailbox(hash_, device, after))  # 404, 409, 429

    async def _held(self, scope: Scope, _: Receive, path: str, send: Send) -> None:
        """GET /v1/tasks/{hash}/places: which devices stand at the places that this device hears."""
        hash_ = _hash(path[len(TASKS) : -len(HELD)])
        self.hub.relay(hash_)  # 404
        device = await member(self.hub, scope, hash_)  # 401, 403
        await _answer(send, 200, MSGPACK, self.hub.held(hash_, device))  # 409, 429


async def _answer(send: Send, status: int, kind: str, body: bytes) -> None:
    """For one device, and now: nobody keeps it."""
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _number(scope: Scope, name: str) -> int | None:
    """A number in the query, if it is there."""
    asked = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    found = asked.get(name, [])
    if not found:
        return None
    text = found[0]
    if len(found) > 1 or not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) <= LARGEST_INTEGER):
        raise Problem("bad-request", f"`{name}` is a whole number, once.")
    return int(text)


def most_bytes(runner: TaskRunner, hub: Hub) -> int:
    """Bytes of the largest check-in that the task could take, or that the operator allows; masked vectors, all."""
    if runner.rounds is not None:
        return largest_masked(runner.rounds.terms)
    recipients = 0 if runner.relay is None else runner.relay.most_recipients
    return min(hub.limits.body, largest_check_in(runner.fold.expected, recipients))


@lru_cache(maxsize=1024)
def _busy(detail: str, retry_after: int | None) -> tuple[int, tuple[Header, ...], bytes]:
    """A refusal that a crowd hears at once: made once for each second to come back at."""
    response = problem_response(Problem("busy", detail, retry_after=retry_after), {})
    return response.status_code, tuple(response.raw_headers), bytes(response.body)


def receipt_headers(size: int, window: int) -> list[Header]:
    return [
        (b"content-type", MSGPACK.encode()),
        (b"content-length", str(size).encode()),
        (b"crowdml-next", str(window).encode()),
    ]


def note(problem: Problem, scope: Scope, hub: Hub) -> Response:
    """A refusal: counted, one line in the log without a traceback, and the answer."""
    number = scope.setdefault("crowdml.request", secrets.token_hex(6))
    hub.counts[problem.slug] = hub.counts.get(problem.slug, 0) + 1
    logs.refused(scope, problem.status, problem.slug)
    headers = {"Crowdml-Request": number}
    if problem.slug in ("too-large", "too-slow"):  # the rest of the body is not waited for
        headers["Connection"] = "close"
    if portal.wants_page(scope):
        if problem.retry_after is not None:
            headers["Retry-After"] = str(problem.retry_after)
        return portal.error_page(problem, scope, headers)
    return problem_response(problem, headers)


def problem_response(problem: Problem, headers: dict[str, str]) -> Response:
    if problem.retry_after is not None:
        headers = {**headers, "Retry-After": str(problem.retry_after)}
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


MOST_LINKS = 1024
"""Places of the chain in one answer."""


async def in_front(request: Request) -> Response:
    """Answered before the router; here so that the router knows which methods the path takes."""
    raise Problem("not-found", "There is nothing at this path.")


async def enrol(request: Request) -> Response:
    """POST /v1/devices: an invitation code and the device's key, signed by it. 201 if new, 200 if already here."""
    hub: Hub = request.app.state.hub
    body = await read_body(request.scope, request.receive, LARGEST_ENROLMENT)
    is_new, enrolled = await hub.enrol(open_enrolment(body, request.headers.get("crowdml-signature")))
    return Response(enrolled.encode(), 201 if is_new else 200, media_type=MSGPACK)


async def check_invitation(request: Request) -> Response:
    """POST /v1/invitations/check: which tasks a code admits to, and how many devices more. Nothing is used up.

    The code is in the body, so no log has it. Its holder reads the same on the page behind it, /join/{code}.
    """
    hub: Hub = request.app.state.hub
    code = open_code(await read_body(request.scope, request.receive, LARGEST_CHECK))
    found, admitted = await hub.check_invitation(code)
    contact = await asyncio.to_thread(hub.store.setting, CONTACT)
    return json_response(
        {
            "tasks": [
                {
                    "hash": each.task.hash.hex(),
                    "name": each.task.name,
                    "title": each.task.title,
                    "state": each.state,
                    "closed": each.task.hash in hub.closed,
                }
                for each in admitted
            ],
            "left": found.uses - found.used,
            "ends_at": found.ends_at,
            "run_by": (contact or b"").decode(errors="replace") or None,
        }
    )


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
            "closed": each.task.hash in hub.closed,
            "version": each.offer.version,
            "check_ins": each.check_ins,
            "price": (await find_price(each.task)).plain,
            "reason": each.reason,
            "round": None if (now := await asyncio.to_thread(hub.round_now, each.task.hash)) is None else now.plain(),
        }
        for each in hub.hosted()
    ]
    aside = [{"name": each.name, "hash": hash_.hex(), "reason": each.why} for hash_, each in hub.aside.items()]
    return json_response({"tasks": found, "aside": aside})


async def task(request: Request) -> Response:
    """GET /v1/tasks/{hash}: the task itself. Its SHA-256 is its name, so it may be cached for ever."""
    hub: Hub = request.app.state.hub
    runner = hub.find(_hash(request.path_params["task"]))
    scope_of = await admit_reader(hub, request.scope, runner.task.hash)
    headers = {"Cache-Control": f"{scope_of}, max-age=31536000, immutable", "ETag": f'"{runner.task.hash.hex()}"'}
    return Response(runner.task.canonical, 200, headers, media_type=JSON)


async def artefact(request: Request) -> Response:
    """GET /v1/artefacts/{sha256}: a public file that a task here names by its hash. It never changes; 304 if known.

    Whoever knows the hash may read it, also where the task is closed: it holds nothing of anyone.
    """
    hub: Hub = request.app.state.hub
    sha256 = request.path_params["sha256"]
    headers = {"Cache-Control": "public, max-age=31536000, immutable", "ETag": f'"{sha256}"'}
    data = hub.artefacts.get(sha256)
    if data is None:
        raise Problem("not-found", "No task of this server names an artefact of this hash.")
    if any(tag.strip() in (headers["ETag"], "*") for tag in request.headers.get("if-none-match", "").split(",")):
        return Response(status_code=304, headers=headers)
    return Response(data, 200, headers, media_type=BINARY)


async def publication_version(request: Request) -> Response:
    """GET /v1/tasks/{hash}/publications/{version}: a version that is kept; it never changes."""
    hub: Hub = request.app.state.hub
    runner = hub.find(_hash(request.path_params["task"]))
    scope_of = await admit_reader(hub, request.scope, runner.task.hash)
    text = request.path_params["version"]
    if not text.isdecimal() or len(text) > 12:
        raise Problem("unknown-version", "A version is a whole number.")
    if int(text) == runner.offer.version:
        return Response(runner.offer.body, 200, {"Crowdml-Kind": runner.offer.kind}, media_type=MSGPACK)
    kept = await asyncio.to_thread(hub.store.publication, runner.task.hash, int(text))
    if kept is None:
        raise Problem("version-gone" if int(text) < runner.offer.version else "unknown-version", "It is not kept.")
    headers = {"Cache-Control": f"{scope_of}, max-age=31536000, immutable", "Crowdml-Kind": kept.kind}
    return Response(kept.body, 200, headers, media_type=MSGPACK)


async def chain_values(request: Request) -> Response:
    """GET /v1/tasks/{hash}/chain?from=&to=: the journal's chain at these places, for a device to check its own link.

    Hashes, and nothing else: what went into one is known to its device alone.
    """
    hub: Hub = request.app.state.hub
    runner = hub.find(_hash(request.path_params["task"]))
    await admit_reader(hub, request.scope, runner.task.hash)
    hash_, head = runner.task.hash, runner.offer.index
    first, last = (_place(request.query_params.get(name)) for name in ("from", "to"))
    if not first <= last <= head or last - first >= MOST_LINKS:
        raise Problem("bad-request", f"Ask for at most {MOST_LINKS} places, in order, from 0 to {head}.")

    def read() -> list[bytes]:
        begin = [chain_start(hash_)] if first == 0 else []
        wanted = last - first + 1 - len(begin)
        return begin + [each.chain for each in islice(hub.store.entries(hash_, max(0, first - 1)), wanted)]

    return Response(pack({"chain": b"".join(await asyncio.to_thread(read)), "from": first}), media_type=MSGPACK)


def _place(text: str | None) -> int:
    if text is None or not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Problem("bad-request", "`from` and `to` are places of the journal: whole numbers.")
    return int(text)


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
    problem = await asyncio.to_thread(hub.not_ready)
    if problem is not None:
        raise problem
    return json_response({"ready": True, "tasks": len(hub.runners), "aside": len(hub.aside)})


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
    lines += hub.queue.metrics()
    masked = [(each.task.hash.hex()[:12], each.rounds) for each in hub.runners.values() if each.rounds is not None]
    if masked:
        lines.append("# TYPE crowdml_rounds counter")
        for name, rounds in masked:
            counts = sorted(rounds.counts.items())
            lines += [f'crowdml_rounds{{task="{name}",ended="{how}"}} {many}' for how, many in counts]
        lines.append("# TYPE crowdml_round_survivors counter")
        lines += [f'crowdml_round_survivors{{task="{name}"}} {rounds.survived}' for name, rounds in masked]
    relays = [each.relay for each in hub.runners.values() if each.relay is not None]
    if relays:
        lines.append("# TYPE crowdml_letter_bytes counter")
        lines += [f'crowdml_letter_bytes{{task="{each.task.hash.hex()[:12]}"}} {each.handed}' for each in relays]
    lines.append("# TYPE crowdml_refusals counter")
    lines += [f'crowdml_refusals{{problem="{slug}"}} {count}' for slug, count in sorted(hub.counts.items())]
    return Response("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")


# --- what handlers share ---


async def authenticate(request: Request, body: bytes) -> str:
    """The device that signed this request, if it is the one in the path."""
    device = await signer(request.app.state.hub, request.scope, body)
    if request.path_params.get("device", device) != device:
        raise Problem("forbidden", "A device reads and changes what is its own.")
    return device


async def signer(hub: Hub, scope: Scope, body: bytes) -> str:
    """The device that signed this request."""
    headers = dict(scope["headers"])
    claim = parse_authorization(headers.get(b"authorization", b"").decode("latin-1"))
    public = hub.keys.get(claim.device)
    if public is None:
        raise await asyncio.to_thread(hub.stranger, claim.device)
    path, query = scope["raw_path"], scope["query_string"]
    target = (path + b"?" + query if query else path).decode("latin-1")
    claim.check(public, scope["method"], target, body, now=time.time())
    return claim.device


async def admit_reader(hub: Hub, scope: Scope, hash_: bytes) -> str:
    """For whom an answer may be cached: anyone ("public"), or ("private") a device that joined the task and signed."""
    if hash_ not in hub.closed:
        return "public"
    if not any(name == b"authorization" for name, _ in scope["headers"]):
        raise Problem("closed", "Only devices that joined this task may read it. Sign the request.")
    await member(hub, scope, hash_)
    return "private"


async def member(hub: Hub, scope: Scope, hash_: bytes, body: bytes = b"") -> str:
    """The device that signed this request, if it joined the task."""
    device = await signer(hub, scope, body)
    if not await hub.may_read(device, hash_):
        raise Problem("not-joined", f"Device {device} was not invited to this task.")
    return device


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
