"""Two engines that run the browser device's modules: Deno in `make test`, Chromium in `make test-all`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

Call = Callable[..., Any]
"""(module, function, arguments...) -> what the function returns. All of it travels as JSON."""


@pytest.fixture(scope="session")
def deno() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the pip package's program, in the repository, with the right to read it and nothing else."""
    program = shutil.which("deno", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        pytest.skip("NO DENO ON THIS MACHINE: not one JavaScript module was run. It is among the dev extras")
    own = {"DENO_DIR": str(ROOT / ".cache" / "deno"), "DENO_NO_UPDATE_CHECK": "1"}

    def run(command: str, *arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
        allowed = [program, command, "--quiet", "--no-check", f"--allow-read={ROOT}"]
        return subprocess.run(
            [*allowed, *arguments], input=said, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300,
            env={**own, **os.environ, "NO_COLOR": "1"},
        )  # fmt: skip

    return run


class Files(SimpleHTTPRequestHandler):
    """The repository's files, for a page that imports modules; `/page` is an empty page with a strict policy."""

    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript"}  # noqa: RUF012

    def do_GET(self) -> None:
        if self.path != "/page":
            super().do_GET()
            return
        body = b"<!doctype html><title>checks</title>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Security-Policy", "default-src 'self'")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A page in the system's own browser, from a server on this machine.

    It is closed with its module: Playwright runs a loop in its process, beside which no other can be.
    """
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("NO CHROMIUM ON THIS MACHINE: not one module was run in a browser")
    from playwright.sync_api import sync_playwright

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(ROOT)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with sync_playwright() as player:
            browser = player.chromium.launch(executable_path=program, args=["--no-sandbox"])
            opened = browser.new_page()
            opened.goto(f"http://127.0.0.1:{server.server_port}/page")
            yield opened
            browser.close()
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module", params=["deno", pytest.param("chromium", marks=pytest.mark.browser)])
def engine(request: pytest.FixtureRequest) -> Call:
    """Calls a function of a module in tests/web, in Deno or in Chromium."""
    if request.param == "chromium":
        page = request.getfixturevalue("page")
        run = "async ([module, name, values]) => (await import(`/tests/web/${module}`))[name](...values)"
        return lambda module, name, *values: page.evaluate(run, [module, name, list(values)])
    run_deno = request.getfixturevalue("deno")

    def call(module: str, name: str, *values: Any) -> Any:
        done = run_deno("run", "tests/web/call.js", module, name, said=json.dumps(values))
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return call
