"""Pages that anyone may read: which studies run here, and what each of them asks of a device."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from crowdml.server.hub import Hub
from crowdml.server.portal.pages import render


async def home(request: Request) -> Response:
    """GET /: the studies of this server."""
    hub: Hub = request.app.state.hub
    return render(request, "home.html", studies=[each for each in hub.hosted() if each.state != "draft"])
