"""Where the tests of old data find what they share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from old_data import Old, Serving, serving


@pytest.fixture
def old(tmp_path: Path) -> Old:
    """What version 0.1 left, to be unpacked below this test's own folder."""
    return Old(tmp_path)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Today's server in the old folder, for all tests of a module: each has a device of its own."""
    with serving(Old(tmp_path_factory.mktemp("served")).server()) as server:
        yield server
