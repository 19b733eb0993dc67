"""A real Chromium over the portal: `look` opens a page and notes all that a strict page must not have.

Run as a program it puts a picture of every page into a folder: `make screenshots`.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PHONE, DESKTOP = (360, 740), (1280, 900)


@dataclass
class Window:
    """A browser window, and what went wrong in it."""

    page: Any
    base: str
    complaints: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        self.page.goto(self.base + path)

    def whole(self, path: Path) -> None:
        """A picture of the whole page, once everything on it is there."""
        self.page.screenshot(path=str(path), full_page=True)


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """The system's own browser; None where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        yield None
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def window(
    browser: Any, base: str, size: tuple[int, int] = DESKTOP, *, dark: bool = False, **options: Any
) -> Iterator[Window]:
    """A window of its own, without a cookie. Options are those of a Playwright context."""
    options.setdefault("locale", "en-GB")
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme="dark" if dark else "light",
        device_scale_factor=1, **options,
    )  # fmt: skip
    try:
        page = context.new_page()
        opened = Window(page, base)
        page.on(
            "console", lambda said: opened.complaints.append(said.text) if said.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on(
            "request", lambda asked: None if asked.url.startswith((base, "data:")) else opened.outside.append(asked.url)
        )
        yield opened
    finally:
        context.close()


def charts_are_drawn(page: Any) -> None:
    """Scroll to the charts and wait until plotly has drawn them."""
    page.locator("#charts").scroll_into_view_if_needed()
    page.wait_for_selector("#charts[data-drawn] .main-svg", timeout=20_000)


def main(folder: Path) -> None:
    """A picture of every page of participants and owners: desktop and phone, light and dark, both languages."""
    from crowd import make_study, open_crowd
    from test_masked_pages import TASK, one_round

    folder.mkdir(parents=True, exist_ok=True)
    ended = make_study("ended", "Which way do you come to work?", epsilon="{ gradient = 0.9 }", stop="")
    with contextlib.ExitStack() as stack:
        browser = stack.enter_context(chromium())
        data = stack.enter_context(tempfile.TemporaryDirectory())
        crowd = stack.enter_context(open_crowd(Path(data) / "data", TASK, ended))
        if browser is None:
            sys.exit("There is no Chromium here: no picture was made.")
        crowd.running.hub.store.set_setting(
            "contact", b"City of Example, transport planning\nstudy@example.org\nhttps://example.org/study"
        )
        left = crowd.running.device()
        for _ in range(3):
            one_round(crowd)
            crowd.check_in(left, task=ended)
            crowd.point()
        crowd.running.run(crowd.running.hub.change(ended.hash, "stop"))
        crowd.goes_on(check_ins=480, moments=30)
        code = crowd.running.started.code
        owner = crowd.owner_address(crowd.devices[0])
        pages = {
            "home": "/", "study": crowd.path, "join": f"/join/{code}", "join-unknown": "/join/nothing",
            "study-masked": f"/studies/{TASK.hash.hex()[:12]}", "study-ended": f"/studies/{ended.hash.hex()[:12]}",
            "device": owner, "withdraw": "/device/withdraw", "error": "/nothing",
        }  # fmt: skip
        looks = [
            ("desktop-light", DESKTOP, False, "en-GB"),
            ("desktop-dark", DESKTOP, True, "de-DE"),
            ("phone-light", PHONE, False, "de-DE"),
            ("phone-dark", PHONE, True, "en-GB"),
        ]
        for look, size, dark, locale in looks:
            with window(browser, crowd.base, size, dark=dark, locale=locale) as opened:
                for name, path in pages.items():
                    opened.open(path)
                    if name.startswith("study"):
                        charts_are_drawn(opened.page)
                    if name == "study":
                        opened.page.locator("details").first.evaluate("each => each.open = true")
                    opened.whole(folder / f"{name}-{look}.png")
                    print(folder / f"{name}-{look}.png")
                print(*opened.complaints, *opened.outside, sep="\n", file=sys.stderr)
        with window(browser, crowd.base, DESKTOP, java_script_enabled=False) as opened:
            opened.open(crowd.path)
            opened.whole(folder / "study-without-script.png")


if __name__ == "__main__":
    tests = Path(__file__).parent.parent
    sys.path[:0] = [str(tests / name) for name in ("portal", "server", "cli")]
    main(Path(sys.argv[1]))
