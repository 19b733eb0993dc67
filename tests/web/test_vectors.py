"""The browser device's modules against the vectors in spec/.

The checks are in tests/web/checks, one module for each file of vectors, and run alike under Deno and in Chromium.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HELPERS = {"expect", "silence"}
FILES = sorted({path.stem for path in (Path(__file__).parent / "checks").glob("*.js")} - HELPERS)


@pytest.mark.parametrize("name", FILES)
def test_the_modules_hold_the_vectors_under_deno(name: str, deno: Any):
    done = deno("test", "tests/web/vectors_test.js", "--", name, "spec/vectors")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.browser
@pytest.mark.parametrize("name", FILES)
def test_the_modules_hold_the_vectors_in_chromium(name: str, page: Any):
    failed = page.evaluate("async (name) => (await import('/tests/web/page.js')).failures(name)", name)
    assert not failed, "\n".join(failed)
