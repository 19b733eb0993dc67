"""Where the tests of the portal find what they share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "server")]

from crowd import Crowd, open_crowd  # noqa: E402  # found by the line above


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    """A server with a study that nobody has checked in to yet."""
    with open_crowd(tmp_path / "data") as opened:
        yield opened


@pytest.fixture(scope="session")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crowd]:
    """A server with a study that has gone on for a while. Tests that share it only read."""
    with open_crowd(tmp_path_factory.mktemp("busy") / "data") as opened:
        opened.goes_on(check_ins=360, moments=24)
        yield opened
