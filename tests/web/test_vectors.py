"""The browser device's modules against the vectors in spec/: under Deno in `make test`, in Chromium in `make test-all`.

The checks are in tests/web/checks, one module for each file of vectors, and run alike in both.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VECTORS = ROOT / "spec" / "vectors"
FILES = sorted(path.stem for path in (HERE / "checks").glob("*.js") if path.stem != "expect")


def deno() -> str:
    """The program of the pip package, beside this Python or on the path."""
    found = shutil.which("deno", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("NO DENO ON THIS MACHINE: not one JavaScript module was run. It is among the dev extras")
    return found


@pytest.mark.parametrize("name", FILES)
def test_the_modules_hold_the_vectors_under_deno(name: str, tmp_path: Path):
    """Every check of one file. It reads the repository, and has no network."""
    arguments = ["test", "--quiet", "--no-check", f"--allow-read={ROOT}", str(HERE / "vectors_test.js")]
    environment = {"DENO_DIR": str(tmp_path), **os.environ, "NO_COLOR": "1", "DENO_NO_UPDATE_CHECK": "1"}
    done = subprocess.run(
        [deno(), *arguments, "--", name, str(VECTORS)], capture_output=True, text=True, check=False, env=environment,
        cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


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
    """A page in the system's own browser, from a server on this machine."""
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
            opened.set_default_timeout(300_000)
            opened.goto(f"http://127.0.0.1:{server.server_port}/page")
            yield opened
            browser.close()
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.browser
@pytest.mark.parametrize("name", FILES)
def test_the_modules_hold_the_vectors_in_chromium(name: str, page: Any):
    run = f"async () => (await import('/tests/web/page.js')).failures({json.dumps(name)})"
    failed = page.evaluate(run)
    assert not failed, "\n".join(failed)
