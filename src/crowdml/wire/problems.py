"""Problems: every refusal that may travel, as RFC 9457 problem+json. One table, one shape.

`type` is "/problems/<slug>", relative to the server; the page there says `help`. A problem is the peer's fault (4xx) or
the server's plight (5xx); it never contains a sample, a secret or a traceback.
"""

from __future__ import annotations

import json
from typing import Any

from crowdml.errors import CrowdmlError
from crowdml.records import record

__all__ = ["CONTENT_TYPE", "LARGEST_PROBLEM", "PROBLEMS", "Problem", "ProblemKind"]

CONTENT_TYPE = "application/problem+json"
LARGEST_PROBLEM = 65_536
"""Bytes: a device reads no more of an answer that is not the one it hoped for."""
TYPE = "/problems/"
OWN_MEMBERS = ("type", "title", "status", "detail")


@record
class ProblemKind:
    """A row of the table: what every problem of this slug has in common."""

    status: int
    title: str
    help: str


PROBLEMS: dict[str, ProblemKind] = {
    "bad-request": ProblemKind(
        400, "The request is malformed", "Compare the request with the description of this path in docs/protocol.md."
    ),
    "malformed": ProblemKind(
        400,
        "The bytes are not what they should be",
        "Encode as docs/protocol.md says, with sorted keys and the shortest form of each value, and try spec/.",
    ),
    "authorization": ProblemKind(
        401,
        "This needs a signed Authorization header",
        "Sign the request with the device's key as docs/protocol.md says under Authorization.",
    ),
    "closed": ProblemKind(
        401,
        "This task is for those who joined it",
        "Sign the request with the key of a device that joined, as docs/protocol.md says under Authorization.",
    ),
    "clock": ProblemKind(
        401, "The request was signed too long ago, or in the future", "Set the device's clock and sign again."
    ),
    "signature": ProblemKind(
        401, "The signature does not verify", "Sign the exact bytes that are sent, with the key that was enrolled."
    ),
    "unknown-device": ProblemKind(
        401, "This device is not enrolled here", "Enrol with an invitation code: POST /v1/devices."
    ),
    "login": ProblemKind(401, "An operator has to log in", "Log in on the portal."),
    "forbidden": ProblemKind(403, "This is not yours", "A device reads and changes what is its own."),
    "form-token": ProblemKind(
        403, "The form is too old or came from elsewhere", "Load the page again and repeat what you did."
    ),
    "invitation": ProblemKind(
        403, "This invitation does not admit a device", "Ask whoever runs the study for a new invitation."
    ),
    "not-joined": ProblemKind(
        403, "This device did not join this task", "Enrol for the task with an invitation that names it."
    ),
    "revoked": ProblemKind(
        403, "This device was revoked", "Ask whoever runs the study; nothing from this device is accepted."
    ),
    "not-found": ProblemKind(404, "There is nothing at this path", "The paths are listed in /openapi.json."),
    "unknown-task": ProblemKind(404, "No such task here", "GET /v1/tasks lists the tasks of this server."),
    "unknown-version": ProblemKind(
        404, "No such version of this task", "GET the publication for the version that holds now."
    ),
    "method": ProblemKind(405, "This path does not take this method", "The header Allow lists those that it takes."),
    "not-acceptable": ProblemKind(
        406, "This cannot be had in the form asked for", "Accept the content type that docs/protocol.md names."
    ),
    "too-slow": ProblemKind(408, "The request took too long to arrive", "Send it again over a better connection."),
    "conflict": ProblemKind(409, "This is taken or already so", "Read what is there, and decide again."),
    "seq-conflict": ProblemKind(
        409,
        "Another message has this seq",
        "Never change a message that was sent; send the next one under the seq in `expected`.",
    ),
    "seq-gap": ProblemKind(409, "Messages are missing before this one", "Send the message whose seq is `expected`."),
    "totals-fell": ProblemKind(
        409,
        "The totals of this device fell",
        "Stop, and go on from the newest copy of the ledger: it gave more than this one knows.",
    ),
    "round-refused": ProblemKind(
        409, "A round of masking does not take this", "Drop the message, and take part in the next round."
    ),
    "place-taken": ProblemKind(
        409, "Another device stands at this place", "Name the place where this device is, or ask who runs the study."
    ),
    "place-held": ProblemKind(
        409, "This device stands at another place", "A device keeps its place: use the one in `held`."
    ),
    "no-place": ProblemKind(
        409, "This device holds no place of this task", "Claim one: POST /v1/tasks/{task}/places/{number}."
    ),
    "task-stopped": ProblemKind(410, "The task is stopped", "Keep the model, and drop what waits in the outbox."),
    "round-over": ProblemKind(
        410, "The round or its phase is over", "Drop the message, which stays charged, and wait for the next round."
    ),
    "version-gone": ProblemKind(
        410, "This version is no longer kept", "GET the publication for the one that holds now."
    ),
    "withdrawn": ProblemKind(
        410, "This device has withdrawn", "Nothing to do: its spent totals are kept under a hash."
    ),
    "length-required": ProblemKind(411, "The length of the body is missing", "Send a Content-Length header."),
    "too-large": ProblemKind(413, "The body is too large", "Send at most as many bytes as `limit` says."),
    "uri-too-long": ProblemKind(414, "The path is too long", "Send a shorter path; the longest are in /openapi.json."),
    "media-type": ProblemKind(
        415, "This content type is not understood here", "Send a form of the portal as browsers do."
    ),
    "wrong-task": ProblemKind(
        422, "The envelope is for another task", "Send it to the path of the task whose hash it carries."
    ),
    "wrong-kind": ProblemKind(
        422, "Nobody here hears this kind of message", "Send a kind that the task's protocol names in docs/protocol.md."
    ),
    "wrong-recipient": ProblemKind(
        422,
        "The message is not addressed to where it was sent",
        "Address a check-in to `server` alone; of a task with peers, to every place that hears the sender's.",
    ),
    "wrong-place": ProblemKind(
        422, "The message is from a place that its sender does not hold", "Claim a place, and name that one."
    ),
    "wrong-message": ProblemKind(
        422,
        "A field of the message is not as the task says",
        "Compute dtype, shape and range of each field from the task, as docs/protocol.md says under its kind.",
    ),
    "stale": ProblemKind(
        422, "The message answers a version that was never published", "Check out again; what was given stays charged."
    ),
    "invalid-task": ProblemKind(
        422, "The task cannot be run", "Change what `detail` names; docs/task.md has all keys."
    ),
    "invalid-form": ProblemKind(422, "The form cannot be used as it is", "Change what `detail` names."),
    "too-many": ProblemKind(429, "Too many requests", "Come back after the seconds in Retry-After."),
    "headers-too-large": ProblemKind(431, "The headers are too large", "Send fewer or shorter headers."),
    "internal": ProblemKind(
        500, "The server made a mistake", "Try again later, and tell whoever runs it the id in `request`."
    ),
    "busy": ProblemKind(503, "The server is busy", "Come back after the seconds in Retry-After."),
    "task-paused": ProblemKind(
        503,
        "This task is paused",
        "Keep the message, and send the same bytes after the seconds in Retry-After; nothing is lost meanwhile.",
    ),
    "not-ready": ProblemKind(503, "The server is starting or stopping", "Come back after the seconds in Retry-After."),
    "full": ProblemKind(507, "The server's disk is full", "Keep the message and come back later; reading still works."),
}
"""Every slug that may travel."""


class Problem(CrowdmlError):  # noqa: N818  # the word of RFC 9457
    """A refusal: a slug of the table, and a sentence about this case. `extra` are members beside the standard ones."""

    slug: str
    status: int
    title: str
    detail: str
    extra: dict[str, Any]

    def __init__(self, slug: str, detail: str, **extra: Any) -> None:
        kind = PROBLEMS[slug]
        clash = sorted(set(extra) & set(OWN_MEMBERS))
        if clash:
            raise ValueError(f"{', '.join(clash)} are members of every problem; call the extra ones otherwise.")
        super().__init__(detail)
        self.slug, self.status, self.title, self.detail, self.extra = slug, kind.status, kind.title, detail, extra

    @property
    def help(self) -> str:
        return PROBLEMS[self.slug].help

    @property
    def retry_after(self) -> int | None:
        """Seconds, for the header Retry-After."""
        seconds = self.extra.get("retry_after")
        return seconds if isinstance(seconds, int) and not isinstance(seconds, bool) and seconds >= 0 else None

    def members(self) -> dict[str, Any]:
        """The members of the JSON object, standard ones first."""
        standard = {"type": TYPE + self.slug, "title": self.title, "status": self.status, "detail": self.detail}
        return {**standard, **self.extra}

    def encode(self) -> bytes:
        return json.dumps(self.members(), separators=(",", ":"), ensure_ascii=False).encode()

    @staticmethod
    def decode(status: int, body: bytes) -> Problem:
        """The problem in an answer. What is no problem of the table becomes the nearest one: nothing is trusted."""
        try:
            members = json.loads(body[:LARGEST_PROBLEM])
        except (ValueError, RecursionError):
            members = None
        if not isinstance(members, dict):
            members = {}
        kind, detail = members.get("type"), members.get("detail")
        slug = kind.removeprefix(TYPE) if isinstance(kind, str) else ""
        if slug not in PROBLEMS or PROBLEMS[slug].status != status:
            slug = next((name for name, row in PROBLEMS.items() if row.status == status), "")
            slug = slug or ("bad-request" if status < 500 else "internal")
        text = detail if isinstance(detail, str) and detail else f"The server answered {status}."
        extra = {
            name: value
            for name, value in members.items()
            if name not in OWN_MEMBERS and name.isidentifier() and isinstance(value, (str, int, float, bool))
        }
        extra.pop("slug", None)
        extra.pop("self", None)
        return Problem(slug, text, **extra)
