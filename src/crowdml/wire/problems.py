"""Problems: every refusal that may travel, as RFC 9457 problem+json. One table, one shape.

`type` is "/problems/<slug>", relative to the server; the page there says `help`. A problem is the peer's fault (4xx) or
the server's plight (5xx); it never contains a sample, a secret or a traceback.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from crowdml.errors import CrowdmlError
from crowdml.records import record

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
    also: tuple[int, ...] = ()
    """Other statuses under which it travels."""


@lru_cache(maxsize=1)
def _table() -> dict[str, ProblemKind]:
    """The rows of `problems.toml`: read when the first is needed, for a device seldom meets one."""
    import tomllib
    from importlib.resources import files

    rows: dict[str, Any] = tomllib.loads(files("crowdml.wire").joinpath("problems.toml").read_text("utf-8"))
    return {
        slug: ProblemKind(row["status"], row["title"], row["help"], tuple(row.get("also", ())))
        for slug, row in rows.items()
    }


def __getattr__(name: str) -> dict[str, ProblemKind]:
    if name == "PROBLEMS":
        return _table()
    raise AttributeError(name)


"""Every slug that may travel."""


class Problem(CrowdmlError):  # noqa: N818  # the word of RFC 9457
    """A refusal: a slug of the table, and a sentence about this case. `extra` are members beside the standard ones."""

    slug: str
    status: int
    title: str
    detail: str
    extra: dict[str, Any]

    def __init__(self, slug: str, detail: str, *, status: int | None = None, **extra: Any) -> None:
        """`status`: another one of those that the slug has."""
        kind = _table()[slug]
        clash = sorted(set(extra) & set(OWN_MEMBERS))
        if clash or status not in (None, kind.status, *kind.also):
            said = ", ".join(clash) or f"status {status}"
            raise ValueError(f"{said}: members of every problem have their own values; call extra ones otherwise.")
        super().__init__(detail)
        self.slug, self.status, self.title, self.detail, self.extra = (
            slug, status or kind.status, kind.title, detail, extra
        )  # fmt: skip

    @property
    def help(self) -> str:
        return _table()[self.slug].help

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
        if slug not in _table() or status not in (_table()[slug].status, *_table()[slug].also):
            slug = next((name for name, row in _table().items() if row.status == status), "")
            slug = slug or ("bad-request" if status < 500 else "internal")
        text = detail if isinstance(detail, str) and detail else f"The server answered {status}."
        extra = {
            name: value
            for name, value in members.items()
            if name not in OWN_MEMBERS and name.isidentifier() and isinstance(value, (str, int, float, bool))
        }
        extra.pop("slug", None)
        extra.pop("self", None)
        known = status in (_table()[slug].status, *_table()[slug].also)
        return Problem(slug, text, status=status if known else None, **extra)
