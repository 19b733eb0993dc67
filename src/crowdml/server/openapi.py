"""The API as OpenAPI 3.1: one table of what each path takes and answers. A test holds it against the router.

Bodies in msgpack have no JSON schema; docs/protocol.md and spec/ say them byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from crowdml import __version__
from crowdml.wire.problems import CONTENT_TYPE, PROBLEMS

MSGPACK, JSON = "application/msgpack", "application/json"
HASH = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
DEVICE = {"type": "string", "pattern": "^[0-9a-f]{32}$"}


@dataclass(frozen=True)
class Operation:
    """One method of one path: what it answers where all is well, by status and content type, and its refusals."""

    method: str
    path: str
    summary: str
    answers: dict[int, str | None]
    problems: tuple[str, ...] = ()
    body: str | None = None
    parameters: tuple[tuple[str, str, dict[str, Any]], ...] = ()
    """Beside those in the path: where, name, schema."""


ENVELOPE = ("malformed", "unknown-device", "signature", "not-joined", "revoked", "unknown-task", "too-slow",
            "seq-conflict", "seq-gap", "task-stopped", "withdrawn", "too-large", "wrong-task", "wrong-kind",
            "wrong-recipient", "wrong-message", "stale", "busy", "not-ready", "full")  # fmt: skip
SIGNED = ("authorization", "clock", "signature", "unknown-device", "forbidden", "revoked", "withdrawn")
AUTHORIZATION = ("header", "Authorization", {"type": "string"})

OPERATIONS = (
    Operation("post", "/v1/devices", "Enrol a device with an invitation and its own key.", {201: MSGPACK, 200: MSGPACK},
              ("malformed", "signature", "invitation", "revoked", "withdrawn", "too-large", "too-slow", "full"),
              MSGPACK, (("header", "Crowdml-Signature", {"type": "string", "pattern": "^[A-Za-z0-9_-]{86}$"}),)),
    Operation("get", "/v1/devices/{device}/statement", "The last signed envelope of this device.", {200: MSGPACK},
              (*SIGNED, "not-found"), None, (AUTHORIZATION,)),
    Operation("post", "/v1/devices/{device}/withdraw", "Forget this device; what it gave stays in the model.",
              {200: JSON}, (*SIGNED, "too-large", "too-slow"), "application/octet-stream", (AUTHORIZATION,)),
    Operation("get", "/v1/tasks", "What runs here, and what it costs.", {200: JSON}),
    Operation("get", "/v1/tasks/{task}", "The task itself; its SHA-256 is its name.", {200: JSON}, ("unknown-task",)),
    Operation("get", "/v1/tasks/{task}/publication", "What the server offers now.", {200: MSGPACK, 304: None},
              ("unknown-task",), None, (("header", "If-None-Match", {"type": "string"}),)),
    Operation("get", "/v1/tasks/{task}/publications/{version}", "A version that is kept; it never changes.",
              {200: MSGPACK}, ("unknown-task", "unknown-version", "version-gone")),
    Operation("post", "/v1/tasks/{task}/check-in", "Deliver one signed envelope; the answer is a receipt.",
              {202: MSGPACK, 200: MSGPACK}, ENVELOPE, MSGPACK),
    Operation("get", "/problems/{slug}", "What a refusal of this type means.", {200: JSON}, ("not-found",)),
    Operation("get", "/openapi.json", "This description.", {200: JSON}),
    Operation("get", "/healthz", "The process answers.", {200: JSON}),
    Operation("get", "/readyz", "Check-ins are taken.", {200: JSON}, ("not-ready", "full")),
    Operation("get", "/metrics", "Numbers for Prometheus.", {200: "text/plain"}),
)  # fmt: skip

PATH_PARAMETERS: dict[str, dict[str, Any]] = {
    "task": HASH,
    "device": DEVICE,
    "version": {"type": "integer", "minimum": 0},
    "slug": {"type": "string", "enum": sorted(PROBLEMS)},
}


@cache
def describe() -> dict[str, Any]:
    """The whole description, as JSON."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    problem = {
        "type": "object",
        "required": ["type", "title", "status", "detail"],
        "properties": {
            "type": {"type": "string", "enum": [f"/problems/{slug}" for slug in sorted(PROBLEMS)]},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
            "expected": {"type": "integer", "description": "The seq that comes next."},
            "limit": {"type": "integer"},
            "retry_after": {"type": "integer"},
            "request": {"type": "string"},
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Crowd-ML", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": {"Problem": problem}},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for status, kind in operation.answers.items():
        answers[str(status)] = {"description": "", **({"content": {kind: {"schema": _schema(kind)}}} if kind else {})}
    refusals: dict[int, list[str]] = {}
    for slug in (*operation.problems, "too-many"):
        refusals.setdefault(PROBLEMS[slug].status, []).append(slug)
    for status, slugs in sorted(refusals.items()):
        answers[str(status)] = {
            "description": "; ".join(f"{slug}: {PROBLEMS[slug].title}" for slug in slugs),
            "content": {CONTENT_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
    names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters: list[dict[str, Any]] = [
        {"in": "path", "name": name, "required": True, "schema": PATH_PARAMETERS[name]} for name in names
    ]
    parameters += [
        {"in": place, "name": name, "required": name != "If-None-Match", "schema": schema}
        for place, name, schema in operation.parameters
    ]
    found: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if parameters:
        found["parameters"] = parameters
    if operation.body:
        found["requestBody"] = {"required": True, "content": {operation.body: {"schema": _schema(operation.body)}}}
    return found


def _schema(kind: str) -> dict[str, Any]:
    return {"type": "object"} if kind == JSON else {"type": "string"} if kind == "text/plain" else {}
