"""Where the tests of old data find what they share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from old_data import Old


@pytest.fixture
def old(tmp_path: Path) -> Old:
    """What version 0.1 left, to be unpacked below this test's own folder."""
    return Old(tmp_path)
