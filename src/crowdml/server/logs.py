"""Logs: one line a request that changed something, was refused, or was for a person, each with its request id.

Check-ins and check-outs that went well are counted in /metrics and have no line. A path is shown without its query, and
a code in it is masked: no sample and no secret is in any log.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from datetime import UTC, datetime
from typing import Any, Literal

from starlette.types import Message, Scope, Send

Shape = Literal["plain", "json"]

log = logging.getLogger("crowdml.server")
_SECRET = re.compile(r"((?:^|/)join/+|(?:^|/)operator/+setup/+)[^/]+|[0-9a-z]{4,}(?:-[0-9a-z]{4,}){3,}", re.IGNORECASE)
"""What follows /join/ or /operator/setup/, however it is written; and what looks like a code, wherever it is."""
_FIELDS = ("request", "method", "path", "status", "problem", "milliseconds")


def shown_path(path: str) -> str:
    """A path as a log may show it: on one line, without an invitation's code."""
    masked = _SECRET.sub(lambda found: f"{found[1] or ''}***", path)
    return masked[:120].encode("unicode_escape").decode("ascii")


def logged(scope: Scope, send: Send) -> Send:
    """Sends as `send` does, and writes the request's line when its answer begins."""
    began = time.perf_counter()
    scope["crowdml.began"] = began

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and "crowdml.logged" not in scope:
            _line(scope, message["status"], None, began)
        await send(message)

    return sending


def refused(scope: Scope, status: int, slug: str) -> None:
    """The one line of a refusal."""
    _line(scope, status, slug, scope.get("crowdml.began"))


def _line(scope: Scope, status: int, problem: str | None, began: float | None) -> None:
    scope["crowdml.logged"] = True
    path, request = shown_path(scope["path"]), scope.get("crowdml.request", "-")
    quiet = problem is None and path in ("/healthz", "/readyz", "/metrics")
    level = logging.DEBUG if quiet or path.startswith(("/static/", "/web/")) else logging.INFO
    if not log.isEnabledFor(level):
        return
    taken = None if began is None else round(1000 * (time.perf_counter() - began), 1)
    extra: dict[str, Any] = {"request": request, "method": scope["method"], "path": path, "status": status}
    if problem is not None:
        extra["problem"] = problem
    if taken is not None:
        extra["milliseconds"] = taken
    after = "" if taken is None else f" in {taken} ms"
    why = "" if problem is None else f" {problem}"
    log.log(level, "request %s: %s %s: %d%s%s", request, scope["method"], path, status, why, after, extra=extra)


class Json(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and a request's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        said: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        said |= {name: getattr(record, name) for name in _FIELDS if hasattr(record, name)}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said, ensure_ascii=False)


def log_to_stderr(shape: Shape = "plain") -> None:
    """Log on stderr, as lines for people or as JSON for machines."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    handler.setFormatter(Json() if shape == "json" else plain)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in ("uvicorn.error", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
