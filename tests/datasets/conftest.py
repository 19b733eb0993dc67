"""Folders of their own for every test, and the real data where $CROWDML_DATA says it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REAL = os.environ.get("CROWDML_DATA")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [
        report for report in terminalreporter.stats.get("skipped", []) if "real data: SKIPPED" in str(report.longrepr)
    ]
    if skipped:
        terminalreporter.write_line(
            f"datasets: {len(skipped)} tests on real data were SKIPPED, for CROWDML_DATA is not set", yellow=True
        )


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test sees this account's cache or data, nor sends 127.0.0.1 through a proxy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("CROWDML_DATA", raising=False)


@pytest.fixture(scope="session")
def kept_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for all tests on real data, so that each is prepared once."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch, kept_cache: Path, own_folders: None) -> Path:
    if not REAL:
        pytest.skip("real data: SKIPPED, for CROWDML_DATA is not set; nothing about the real files was tested")
    monkeypatch.setenv("CROWDML_DATA", REAL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept_cache))
    return Path(REAL)
