"""Rendering: one way to make a page, with its language and the headers that keep it to itself.

The content security policy lets in scripts, styles, images and connections of this server alone, and nothing inline.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import Scope

from crowdml.server.portal import assets
from crowdml.server.portal.words import LANGUAGES, Words, choose, words
from crowdml.wire.problems import Problem

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "worker-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
"""The policy of every page. Charts need no more than this: see `static/charts.js`."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
    "Vary": "Accept-Language, Cookie",
}
LANGUAGE_COOKIE = "lang"
A_YEAR = 365 * 24 * 3600
API = ("/v1/", "/problems/", "/openapi.json", "/healthz", "/readyz", "/metrics")
"""Paths that answer programs: their errors stay problem+json, whoever asks."""
OWNER = "/device"
"""Where a link of the device is asked for, and no name and password."""


@lru_cache(1)
def environment() -> Environment:
    made = Environment(
        loader=PackageLoader("crowdml.server.portal"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["unbroken"] = unbroken
    return made


def language(request: HTTPConnection) -> Words:
    """The language that this request is answered in."""
    asked, kept = request.query_params.get("lang"), request.cookies.get(LANGUAGE_COOKIE)
    return words(choose(asked, kept, request.headers.get("accept-language", "")))


def render(
    request: Request, template: str, status: int = 200, headers: Mapping[str, str] | None = None, **values: Any
) -> Response:
    """A page, made for this request."""
    said = language(request)
    return answer(request, page_text(said, request.url.path, template, request=request, **values), status, headers)


def page_text(said: Words, path: str, template: str, /, **values: Any) -> str:
    """The text of the page at this path. In templates `t` reads the catalogue; `number`, `percent`, `estimate` and
    `moment` write as the language does. Links to other languages keep no query, for it may be a signature."""
    known = {name: getattr(said, name) for name in ("number", "percent", "estimate", "moment")}
    switches = [(each, words(each)("language"), f"{path}?lang={each}") for each in LANGUAGES]
    known |= {
        "t": said,
        "lang": said.language,
        "static": assets.address,
        "module": assets.module,
        "code": code,
        "switches": switches,
    }
    return environment().get_template(template).render(known | values)


def answer(request: Request, text: str, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A page's text with the headers that keep it to itself. Who asks for a language by a link keeps it."""
    said = language(request)
    response = Response(text, status, {**HEADERS, **(headers or {})}, media_type="text/html")
    if request.query_params.get("lang") in LANGUAGES:
        response.set_cookie(
            LANGUAGE_COOKIE,
            said.language,
            A_YEAR,
            path="/",
            samesite="lax",
            httponly=True,
            secure=request.url.scheme == "https",
        )
    return response


def redirect(to: str) -> Response:
    """See other: after a form, and after a link that shall not stay in the address bar."""
    return RedirectResponse(to, 303, {**HEADERS, "Cache-Control": "no-store"})


def wants_page(scope: Scope) -> bool:
    """Whether a refusal is for somebody at a browser, on a path that is no program's."""
    if scope["path"].startswith(API):
        return False
    return any(name == b"accept" and b"text/html" in value for name, value in scope["headers"])


def error_page(problem: Problem, scope: Scope, headers: Mapping[str, str]) -> Response:
    """A refusal as a page: what happened and what to do, in the reader's language.

    Only operators meet a conflict. Its own sentence, in English as their pages are, says what stands in the way.
    """
    request = Request(scope)
    said = language(request)
    name = problem.slug if f"error.{problem.slug}.title" in said.sentences else _general(problem.status)
    if problem.status == 401 and scope["path"].startswith(OWNER):
        name = "link"
    return render(
        request,
        "error.html",
        problem.status,
        {**headers, "Cache-Control": "no-store"},
        title=said(f"error.{name}.title"),
        text=problem.detail if name == "conflict" else said(f"error.{name}.text"),
        wait=problem.retry_after,
        number_of_request=headers.get("Crowdml-Request", ""),
    )


def _general(status: int) -> str:
    return {401: "login", 403: "forbidden", 404: "not-found", 410: "not-found", 429: "too-many", 503: "busy",
            507: "busy"}.get(status, "internal" if status >= 500 else "bad-request")  # fmt: skip


INVITATION = re.compile(r"(?:[0-9a-z]{4}-){4}[0-9a-z]{4}$")
"""A code at the end of a word, as `new_code` makes it."""


def code(text: str) -> Markup:
    """A command inside a sentence, on one line where it fits."""
    return Markup('<code class="command">{}</code>').format(text)


def unbroken(command: str) -> Markup:
    """A command that may take several lines, none of which ends at a hyphen of an option or of a code."""
    return Markup(" ").join(map(_unbroken, command.split(" ")))


def _unbroken(word: str) -> Markup | str:
    if (found := INVITATION.search(word)) is not None:
        return Markup('{}<span class="whole-line">{}</span>').format(word[: found.start()], found[0])
    return Markup('<span class="whole-line">{}</span>').format(word) if word.startswith("--") else word
