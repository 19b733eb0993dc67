"""Where the tests of the portal find what they share. Each page is asked of both databases."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from argon2 import PasswordHasher

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parent.parent),
    str(Path(__file__).parent.parent / "server"),
    str(Path(__file__).parent.parent / "cli"),
]

from crowd import Crowd, open_crowd  # noqa: E402  # found by the line above
from real_postgresql import fresh_database, postgresql, postgresql_url  # noqa: E402, F401  fixtures

from crowdml.server import operators  # noqa: E402

BOTH = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(scope="module", autouse=True)
def servers_hasher() -> Iterator[PasswordHasher]:
    """The hasher of real servers; the tests have a quick one, for theirs takes a tenth of a second a password."""
    with pytest.MonkeyPatch.context() as patch:
        own = operators._hasher
        patch.setattr(operators, "_hasher", PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))
        yield own


@pytest.fixture(params=BOTH)
def database(request: pytest.FixtureRequest) -> str | None:
    """An address of a new database, or None: SQLite in the server's folder."""
    return request.getfixturevalue("postgresql_url") if request.param == "postgresql" else None


@pytest.fixture
def crowd(tmp_path: Path, database: str | None) -> Iterator[Crowd]:
    """A server with a study that nobody has checked in to yet."""
    with open_crowd(tmp_path / "data", database=database) as opened:
        yield opened


@pytest.fixture(scope="session", params=BOTH)
def busy(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Crowd]:
    """A server with a study that has gone on for a while. Tests that share it only read."""
    with ExitStack() as stack:
        url = None
        if request.param == "postgresql":
            url = stack.enter_context(fresh_database(request.getfixturevalue("postgresql"), "busy"))
        opened = stack.enter_context(open_crowd(tmp_path_factory.mktemp("busy") / "data", database=url))
        opened.goes_on(check_ins=360, moments=24)
        yield opened
