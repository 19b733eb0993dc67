"""How an operator comes in: the first account by the set-up address, log in, log out."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request
from starlette.responses import Response

from crowdml.server.limits import source
from crowdml.server.operators import FORM_COOKIE, FORM_FIELD, BadOperator, LoginNeeded, operators_of
from crowdml.server.portal import pages
from crowdml.server.portal.forms import read_form
from crowdml.server.portal.visits import Visit, render, visited
from crowdml.wire.problems import Problem

_HERE = re.compile(r"/operator(/[A-Za-z0-9_./-]*)?")


async def log_in(request: Request) -> Response:
    """GET, POST /operator/login."""
    operators, to = operators_of(request), request.query_params.get("next", "/operator")
    to = to if _HERE.fullmatch(to) else "/operator"
    if request.method != "POST":
        try:
            await operators.require(request)
            return pages.redirect(to)
        except LoginNeeded:
            first = not await asyncio.to_thread(operators.hub.store.operators)
            return _form(request, "login.html", to=to, first=first)
    form = await read_form(request)
    operators.check_form(request, form.get(FORM_FIELD, ""), None)
    name = form.get("name", "")
    try:
        session = await operators.log_in(name, form.get("password", ""), _address(request))
    except BadOperator as error:
        return _form(request, "login.html", 403, to=to, name=name, flaw=str(error))
    except Problem as problem:
        if problem.slug not in ("too-many", "busy"):
            raise
        return _form(request, "login.html", problem.status, to=to, name=name, flaw=problem.detail)
    await _close_old(request)
    response = pages.redirect(to)
    operators.set_cookie(response, request, session)
    return response


async def set_up(request: Request) -> Response:
    """GET, POST /operator/setup: the first account, for whoever has the token that `crowdml serve` printed."""
    operators = operators_of(request)
    if request.method != "POST":
        token = request.query_params.get("token", "")
        if await asyncio.to_thread(operators.hub.store.operators):
            return pages.redirect("/operator/login")
        status = 200 if await asyncio.to_thread(operators.may_set_up, token) else 403
        return _form(request, "setup.html", status, token=token, valid=status == 200)
    form = await read_form(request)
    operators.check_form(request, form.get(FORM_FIELD, ""), None)
    token, name = form.get("token", ""), form.get("name", "")
    flaws: dict[str, str] = {}
    if form.get("password") != form.get("again"):
        flaws["again"] = "The two passwords differ."
    else:
        try:
            session = await operators.set_up(token, name, form.get("password", ""), _address(request))
            response = pages.redirect("/operator")
            operators.set_cookie(response, request, session)
            return response
        except BadOperator as error:
            flaws[error.about] = str(error)
        except Problem as problem:
            if problem.slug not in ("too-many", "busy"):
                raise
            flaws["password"] = problem.detail
    valid = "token" not in flaws
    return _form(request, "setup.html", 422 if valid else 403, token=token, valid=valid, name=name, flaws=flaws)


@visited
async def log_out(visit: Visit) -> Response:
    """POST /operator/logout."""
    await visit.operators.log_out(visit.session)
    response = pages.redirect("/operator/login")
    visit.operators.clear_cookie(response, visit.request)
    return response


def _form(request: Request, template: str, status: int = 200, **values: object) -> Response:
    """A form before anybody is logged in, with its own token."""
    operators = operators_of(request)
    cookie, token = operators.open_form(request)
    defaults: dict[str, object] = {"name": "", "flaw": "", "flaws": {}, "first": False}
    response = render(request, template, None, status, csrf=token, **{**defaults, **values})
    operators.set_cookie(response, request, cookie, FORM_COOKIE)
    return response


async def _close_old(request: Request) -> None:
    """End the session that this browser had, if any: a login begins anew."""
    operators = operators_of(request)
    try:
        await operators.log_out(await operators.require(request))
    except LoginNeeded:
        return


def _address(request: Request) -> str:
    return source(request.client.host) if request.client else ""
