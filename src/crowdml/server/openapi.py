"""The API as OpenAPI 3.1: one table of what each path takes and answers. A test holds it against the router.

Bodies in msgpack have no JSON schema; docs/protocol.md and spec/ say them byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from crowdml import __version__
from crowdml.wire.packing import LARGEST_INTEGER
from crowdml.wire.problems import CONTENT_TYPE, PROBLEMS

MSGPACK, JSON, BINARY = "application/msgpack", "application/json", "application/octet-stream"
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
    schema: str | None = None
    """Schema of the answers in JSON, by its name in `SCHEMAS`."""
    takes: str | None = None
    """The schema of a body in JSON, by its name in `SCHEMAS`."""
    headers: tuple[str, ...] = ()
    """Headers of the answers where all is well: rows of `HEADERS`."""
    signed: Literal["always", "if closed"] | None = None
    """Whether a device signs the request: where it must, or where the task is closed."""


ENVELOPE = ("malformed", "unknown-device", "signature", "not-joined", "revoked", "unknown-task", "too-slow",
            "seq-conflict", "seq-gap", "totals-fell", "task-stopped", "withdrawn", "too-large", "wrong-task",
            "wrong-kind", "wrong-recipient", "wrong-place", "wrong-message", "stale", "round-refused", "round-over",
            "busy", "not-ready", "task-paused", "full")  # fmt: skip
SIGNED = ("authorization", "clock", "signature", "unknown-device", "forbidden", "revoked", "withdrawn")
READER = ("unknown-task", "closed", "authorization", "clock", "signature", "unknown-device", "not-joined", "revoked",
          "withdrawn")  # fmt: skip

LOOK = tuple(slug for slug in READER if slug != "closed")
SAYING = tuple(slug for slug in ENVELOPE if slug not in ("seq-conflict", "seq-gap", "stale"))

HEADERS: dict[str, dict[str, Any]] = {
    "Crowdml-Kind": {"description": "The kind of the message in the body.", "schema": {"type": "string"}},
    "Crowdml-Next": {
        "description": "Seconds after which the device should come back.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "Crowdml-State": {
        "description": "The task's state.",
        "schema": {"type": "string", "enum": ["draft", "running", "paused", "stopped"]},
    },
    "ETag": {"description": "For If-None-Match.", "schema": {"type": "string", "pattern": '^"[^"]+"$'}},
    "Cache-Control": {"description": "Who may keep the answer, and how long.", "schema": {"type": "string"}},
}

OPERATIONS = (
    Operation("post", "/v1/devices", "Enrol a device with an invitation and its own key.", {201: MSGPACK, 200: MSGPACK},
              ("malformed", "signature", "invitation", "revoked", "withdrawn", "too-large", "too-slow", "full"),
              MSGPACK, (("header", "Crowdml-Signature", {"type": "string", "pattern": "^[A-Za-z0-9_-]{86}$"}),)),
    Operation("post", "/v1/invitations/check", "Which tasks a code admits to; it is not used up.", {200: JSON},
              ("malformed", "invitation", "too-large", "too-slow"), JSON, schema="Invited", takes="Code"),
    Operation("get", "/v1/devices/{device}/statement", "The last signed envelope of this device.", {200: MSGPACK},
              (*SIGNED, "not-found"), signed="always"),
    Operation("post", "/v1/devices/{device}/withdraw", "Forget this device; what it gave stays in the model.",
              {200: JSON}, (*SIGNED, "too-large", "too-slow"), "application/octet-stream", schema="Withdrawn",
              signed="always"),
    Operation("get", "/v1/artefacts/{sha256}", "A public file that a task names by its SHA-256; it never changes.",
              {200: BINARY, 304: None}, ("not-found",), None, (("header", "If-None-Match", {"type": "string"}),),
              headers=("ETag", "Cache-Control")),
    Operation("get", "/v1/tasks", "What runs here, and what it costs.", {200: JSON}, schema="Tasks"),
    Operation("get", "/v1/tasks/{task}", "The task itself; its SHA-256 is its name.", {200: JSON}, READER,
              schema="Task", headers=("ETag", "Cache-Control"), signed="if closed"),
    Operation("get", "/v1/tasks/{task}/publication", "What the server offers now.", {200: MSGPACK, 304: None},
              READER, None, (("header", "If-None-Match", {"type": "string"}),),
              headers=("ETag", "Crowdml-Next", "Crowdml-State"), signed="if closed"),
    Operation("get", "/v1/tasks/{task}/publications/{version}", "A version that is kept; it never changes.",
              {200: MSGPACK}, (*READER, "unknown-version", "version-gone"), headers=("Crowdml-Kind",),
              signed="if closed"),
    Operation("get", "/v1/tasks/{task}/chain", "The journal's chain at some places: hashes alone.", {200: MSGPACK},
              (*READER, "bad-request"), None, (("query", "from", {"type": "integer", "minimum": 0}),
                                               ("query", "to", {"type": "integer", "minimum": 0})),
              signed="if closed"),
    Operation("post", "/v1/tasks/{task}/check-in", "Deliver one signed envelope; the answer is a receipt.",
              {202: MSGPACK, 200: MSGPACK}, ENVELOPE, MSGPACK, headers=("Crowdml-Next",)),
    Operation("get", "/v1/tasks/{task}/round", "What this device is told of a round of masking now.", {200: MSGPACK},
              (*LOOK, "not-found", "bad-request", "round-over", "task-stopped", "task-paused"), None,
              (("query", "round", {"type": "integer", "minimum": 1, "maximum": 10**18 - 1}),),
              headers=("Cache-Control",), signed="always"),
    Operation("post", "/v1/tasks/{task}/round", "Say something in a round of masking; the answer is its view.",
              {202: MSGPACK, 200: MSGPACK}, (*SAYING, "not-found"), MSGPACK, headers=("Cache-Control",)),
    Operation("post", "/v1/tasks/{task}/places/{place}", "Stand at a place of the task's list, from now on.",
              {201: JSON, 200: JSON}, (*LOOK, "not-found", "place-taken", "place-held", "task-stopped", "too-large",
                                       "too-slow", "full"),
              "application/octet-stream", schema="Place", headers=("Cache-Control",), signed="always"),
    Operation("get", "/v1/tasks/{task}/places", "Which devices stand at the places that this device hears.",
              {200: MSGPACK}, (*LOOK, "not-found", "no-place"), None, headers=("Cache-Control",), signed="always"),
    Operation("get", "/v1/tasks/{task}/mailbox", "What peers wrote to the place where this device stands.",
              {200: MSGPACK}, (*LOOK, "not-found", "bad-request", "no-place"), None,
              (("query", "after", {"type": "integer", "minimum": 0, "maximum": LARGEST_INTEGER}),),
              headers=("Cache-Control",), signed="always"),
    Operation("get", "/problems/{slug}", "What a refusal of this type means.", {200: JSON}, ("not-found",),
              schema="Meaning"),
    Operation("get", "/openapi.json", "This description.", {200: JSON}, schema="Description"),
    Operation("get", "/healthz", "The process answers.", {200: JSON}, schema="Health"),
    Operation("get", "/readyz", "Check-ins are taken.", {200: JSON}, ("not-ready", "full"), schema="Ready"),
    Operation("get", "/metrics", "Numbers for Prometheus.", {200: "text/plain"}),
)  # fmt: skip

OPTIONAL = ("If-None-Match", "round", "after")
PATH_PARAMETERS: dict[str, dict[str, Any]] = {
    "task": HASH,
    "sha256": HASH,
    "device": DEVICE,
    "version": {"type": "integer", "minimum": 0},
    "place": {"type": "integer", "minimum": 0},
    "slug": {"type": "string", "enum": sorted(PROBLEMS)},
}


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
EPSILON = {"type": "number", "minimum": 0}


INVITED = ("hash", "name", "title", "state", "closed")
"""What a code's holder reads of each task that it admits to: enough to choose."""


def _all_of(required: dict[str, Any], *, more: bool = False, **optional: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": sorted(required),
        "properties": {**required, **optional},
        **({} if more else {"additionalProperties": False}),
    }


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _schemas() -> dict[str, Any]:
    number, noise = {"type": "number"}, {"type": ["number", "null"]}
    row = {"row": TEXT, "mechanism": TEXT, "promise": TEXT, "loss": TEXT, "epsilon": EPSILON, "adjacency": TEXT,
           "sensitivity": TEXT, "noise": TEXT, "noise_steps": noise, "noise_unit": noise, "grid": number,
           "observer": {"type": "string", "enum": ["anyone", "aggregate", "devices"]}}  # fmt: skip
    paid = {"check_ins": COUNT, "after": TEXT, "epsilon": EPSILON, "epsilon_alone": EPSILON, "epsilon_sample": EPSILON,
            "epsilon_sample_alone": EPSILON}  # fmt: skip
    price = {"unit": TEXT, "adjacency": TEXT, "delta": number, "batch": COUNT, "uses": COUNT,
             "sample_epsilon": EPSILON, "device_epsilon": EPSILON, "epsilon_sample": EPSILON,
             "epsilon_sample_alone": EPSILON, "budget": {"type": ["object", "null"]},
             "device": _list_of(_all_of(paid)), "rows": _list_of(_all_of(row))}  # fmt: skip
    listed = {"name": TEXT, "title": TEXT, "purpose": TEXT, "collects": TEXT, "hash": HASH,
              "state": HEADERS["Crowdml-State"]["schema"], "version": COUNT, "check_ins": COUNT, "closed": FLAG,
              "price": _all_of(price), "reason": {"type": ["string", "null"]},
              "round": {"type": ["object", "null"]}}  # fmt: skip
    part = {"type": "object"}
    return {
        "Problem": _all_of(
            {
                "type": {"type": "string", "enum": [f"/problems/{slug}" for slug in sorted(PROBLEMS)]},
                "title": TEXT,
                "status": {"type": "integer", "minimum": 400, "maximum": 599},
                "detail": TEXT,
            },
            more=True,
            help={"type": "string", "description": "What to do."},
            expected={"type": "integer", "description": "The seq that comes next."},
            limit={"type": "integer"},
            retry_after={"type": "integer"},
            request=TEXT,
        ),
        "Tasks": _all_of(
            {
                "tasks": _list_of(_all_of(listed)),
                "aside": _list_of(_all_of({"name": TEXT, "hash": HASH, "reason": TEXT})),
            }
        ),
        "Task": _all_of(
            {"name": TEXT, "features": part, "labels": part, "model": part, "protocol": part, "privacy": part},
            more=True,
        ),
        "Code": _all_of({"code": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"}}),
        "Invited": _all_of(
            {
                "tasks": _list_of(_all_of({name: listed[name] for name in INVITED})),
                "left": COUNT,
                "ends_at": {"type": ["string", "null"]},
                "run_by": {"type": ["string", "null"]},
            }
        ),
        "Place": _all_of({"place": COUNT, "name": TEXT}),
        "Withdrawn": _all_of({"device": DEVICE, "withdrawn": {"const": True}}),
        "Meaning": _all_of({"title": TEXT, "status": {"type": "integer"}, "help": TEXT}),
        "Health": _all_of({"alive": {"const": True}}),
        "Ready": _all_of({"ready": {"const": True}, "tasks": COUNT, "aside": COUNT}),
        "Description": _all_of({"openapi": {"const": "3.1.0"}, "info": part, "paths": part}, more=True),
    }


@cache
def describe() -> dict[str, Any]:
    """The whole description, as JSON."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    device = {
        "type": "http",
        "scheme": "Crowdml",
        "description": "A device signs the request with its own key: docs/protocol.md, under Authorization.",
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Crowd-ML", "version": __version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": {"device": device}},
    }


def _operation(operation: Operation) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for status, kind in operation.answers.items():
        answer: dict[str, Any] = {"description": operation.summary if kind else "Nothing has changed."}
        if kind:
            answer["content"] = {kind: {"schema": _schema(kind, operation.schema)}}
        if operation.headers:
            names = [name for name in operation.headers if kind or name != "Crowdml-Kind"]
            answer["headers"] = {name: {"required": True, **HEADERS[name]} for name in names}
        answers[str(status)] = answer
    refusals: dict[int, list[str]] = {}
    for slug in dict.fromkeys((*operation.problems, "too-many", "busy")):  # what any request may hear
        for status in (PROBLEMS[slug].status, *PROBLEMS[slug].also):
            refusals.setdefault(status, []).append(slug)
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
        {"in": place, "name": name, "required": name not in OPTIONAL, "schema": schema}
        for place, name, schema in operation.parameters
    ]
    found: dict[str, Any] = {"summary": operation.summary, "responses": answers}
    if parameters:
        found["parameters"] = parameters
    if operation.signed:
        found["security"] = [{"device": []}] if operation.signed == "always" else [{}, {"device": []}]
    if operation.body:
        required = operation.body in (MSGPACK, JSON)
        schema = _schema(operation.body, operation.takes)
        found["requestBody"] = {"required": required, "content": {operation.body: {"schema": schema}}}
    return found


def _schema(kind: str, name: str | None) -> dict[str, Any]:
    """The schema of a body: in JSON by its name; msgpack has none."""
    if kind == JSON:
        return {"$ref": f"#/components/schemas/{name}"}
    return TEXT if kind == "text/plain" else {}
