"""An operator at a browser without scripts: fills in forms with the token of their page."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlencode

from crowd import Browser, Crowd, Page

PASSWORD = "correct horse battery staple"


def token_of(page: Page) -> str:
    """The token of a page's forms; empty where it has none."""
    found = re.search(r'name="form-token" value="([^"]*)"', page.text)
    return found[1] if found else ""


@dataclass
class Desk:
    """A browser, and the page that it shows."""

    browser: Browser
    page: Page

    @property
    def text(self) -> str:
        return self.page.text

    def get(self, path: str, **headers: str) -> Page:
        self.page = self.browser.get(path, **headers)
        return self.page

    def post(self, path: str, token: str | None = None, headers: dict[str, str] | None = None, **form: str) -> Page:
        """Send a form of the page that is shown."""
        fields = {"form-token": token_of(self.page) if token is None else token, **form}
        request = urllib.request.Request(self.browser.base + path, urlencode(fields).encode(), method="POST")
        self.page = self.browser._ask(request, headers or {})
        return self.page

    @property
    def cookie(self) -> str:
        return next((each.value or "" for each in self.browser.jar if each.name == "crowdml-operator"), "")


def set_up(crowd: Crowd, name: str = "anna", password: str = PASSWORD) -> Desk:
    """The first operator, by the address that the server printed."""
    assert crowd.running.started.setup is not None
    browser = crowd.browser()
    address = crowd.running.started.setup.removeprefix(crowd.base)
    desk = Desk(browser, browser.get(address))
    token = address.partition("token=")[2]
    fields = {"form-token": token_of(desk.page), "token": token, "name": name, "password": password, "again": password}
    desk.page = browser.post("/operator/setup", **fields)
    assert desk.page.status == 200, desk.text
    assert desk.page.address.endswith("/operator")
    return desk


def log_in(crowd: Crowd, name: str = "anna", password: str = PASSWORD) -> Desk:
    browser = crowd.browser()
    desk = Desk(browser, browser.get("/operator/login"))
    desk.post("/operator/login", name=name, password=password)
    return desk


def sit_down(crowd: Crowd, name: str) -> Desk:
    """An operator of a server that tests share: made where nobody has made it yet, and logged in."""
    from crowdml.server.operators import hash_password

    store = crowd.running.hub.store
    if name not in store.operators():
        store.set_operator(name, hash_password(PASSWORD), crowd.running.hub.clock())
    return log_in(crowd, name)
