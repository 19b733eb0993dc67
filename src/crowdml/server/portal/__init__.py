"""The portal: pages for participants, owners and operators. Rendered here, readable without JavaScript.

`routes()` is mounted behind the API; `error_page` answers a browser's refused request in the portal's own look.
"""

from __future__ import annotations

from starlette.routing import BaseRoute, Route

from crowdml.server.portal import assets, live, operator, owner, phone, public
from crowdml.server.portal.pages import error_page, wants_page

__all__ = ["error_page", "routes", "wants_page"]


def routes() -> list[BaseRoute]:
    """Every page, in the order in which paths are tried."""
    return [
        Route("/", public.home, methods=["GET"]),
        Route("/studies/{study}", public.study, methods=["GET"]),
        Route("/studies/{study}/figures.json", public.figures, methods=["GET"]),
        Route("/studies/{study}/plots/{file}", public.plot, methods=["GET"]),
        Route("/studies/{study}/live", live.live, methods=["GET"]),
        Route("/join/{code}", public.join, methods=["GET"]),
        Route("/phone", phone.page, methods=["GET"]),
        Route("/device", owner.page, methods=["GET"]),
        Route("/device/withdraw", owner.withdrawing, methods=["GET"]),
        Route("/device/withdraw", owner.withdraw, methods=["POST"]),
        Route("/device/close", owner.leave, methods=["POST"]),
        Route("/device/{device}", owner.enter, methods=["GET"]),
        *operator.routes(),
        Route("/static/{name}", assets.serve, methods=["GET"]),
        Route("/web/{path:path}", assets.serve_module, methods=["GET"]),
    ]
