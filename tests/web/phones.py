"""Phones in a real Chromium: pages of phone size with an accelerometer that a test moves."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import expect

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / name) for name in ("portal", "server", "loopback") if str(TESTS / name) not in sys.path]

from crowd import Crowd  # noqa: E402  # found by the line above
from screens import chromium  # noqa: E402

__all__ = ["PHONE", "Crowd", "Phone", "chromium", "phone", "violations", "watch"]

PHONE = (390, 844)
MOVE = """([windows, hertz, seed]) => {
  // as a phone would: a reading has a timestamp, and a window is over when 3.2 s of them are there
  const last = window.moved ?? performance.now();
  const step = 1000 / hertz;
  const count = Math.ceil(windows * 3200 / step) + 1;
  for (let at = 0; at < count; at++) {
    const t = last + at * step;
    const swing = Math.sin(t / 80 + seed);
    const event = new DeviceMotionEvent("devicemotion", {
      accelerationIncludingGravity: { x: 0.3 * swing, y: 2 * swing, z: 9.8 + swing }, interval: step,
    });
    Object.defineProperty(event, "timeStamp", { value: t });
    window.dispatchEvent(event);
    window.moved = t + step;
  }
}"""


@dataclass
class Phone:
    """One page, what its owner does, and what went wrong."""

    page: Any
    base: str
    complaints: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    posted: list[bytes] = field(default_factory=list)
    """The bodies of check-ins that left this page, those without an answer included."""
    taps: int = 0

    def open(self, path: str) -> None:
        self.page.goto(self.base + path)

    def tap(self, selector: str) -> None:
        self.page.locator(selector).tap()
        self.taps += 1

    def join(self) -> None:
        self.page.wait_for_selector("#phone[data-ready]")
        self.tap("button[data-join]")
        self.page.wait_for_selector("#phone-live:not([hidden])")

    def say(self, label: str) -> None:
        """What the owner does now."""
        button = self.page.get_by_role("button", name=label, exact=True)
        button.tap()
        self.taps += 1
        expect(button).to_have_attribute("aria-pressed", "true")

    def move(self, windows: int, hertz: float = 50.0, seed: float = 0.0) -> None:
        """Readings of an accelerometer for so many windows of 3.2 s, in no time."""
        self.page.evaluate(MOVE, [windows, hertz, seed])

    def gives(self, check_ins: int, timeout: float = 30_000) -> None:
        """Wait until so many check-ins have a verified receipt."""
        self.page.wait_for_selector(f'#phone-live[data-check-ins="{check_ins}"]', timeout=timeout)

    def text(self, part: str) -> str:
        return self.page.locator(f"#{part}").inner_text()

    def stored(self, store: str, database: str = "crowdml") -> list[Any]:
        """What lies in a store of IndexedDB; bytes as lists, big numbers as texts."""
        return self.page.evaluate(READ, [database, store])


READ = """([database, store]) => new Promise((resolve, reject) => {
  const request = indexedDB.open(database);
  request.onerror = () => reject(request.error);
  request.onsuccess = () => {
    const found = request.result.transaction([store]).objectStore(store).getAll();
    found.onsuccess = () => {
      request.result.close();
      const plain = (key, value) => typeof value === "bigint" ? `${value}`
        : value instanceof Uint8Array || value instanceof Float32Array ? [...value] : value;
      resolve(JSON.parse(JSON.stringify(found.result, plain)));
    };
  };
})"""


def watch(page: Any, base: str) -> Phone:
    found = Phone(page, base)

    def asked(request: Any) -> None:
        if not request.url.startswith((base, "data:", "blob:")):
            found.outside.append(request.url)
        if request.url.endswith("/check-in"):
            found.posted.append(request.post_data_buffer)

    page.on("console", lambda said: found.complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.complaints.append(str(error)))
    page.context.on("request", asked)
    return found


@contextlib.contextmanager
def phone(
    browser: Any, base: str, *, dark: bool = False, size: tuple[int, int] = PHONE, **options: Any
) -> Iterator[Phone]:
    """A phone of its own: nothing is stored on it yet."""
    options.setdefault("locale", "en-GB")
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, is_mobile=True, has_touch=True, device_scale_factor=1,
        color_scheme="dark" if dark else "light", **options,
    )  # fmt: skip
    context.set_default_timeout(20_000)
    try:
        yield watch(context.new_page(), base)
    finally:
        context.close()


RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def violations(page: Any) -> list[str]:
    """What axe finds on the page, WCAG 2.2 AA included."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, options={"runOnly": RULES})
    return [f"{each['id']}: {each['nodes'][0]['html'][:160]}" for each in found.response["violations"]]
