"""What the benchmark of the server says. How fast anything is, is not asserted here."""

from __future__ import annotations

import pytest

from crowdml import bench
from crowdml.bench import server


@pytest.mark.slow
def test_the_benchmark_of_the_server_says_all_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    small_sizes = {
        "DEVICES": 8, "CONNECTIONS": 4, "CHECK_INS": 32, "CHECK_OUTS": 40, "FLEET": 5, "FLEET_SECONDS": 3,
        "FLOOD_SECONDS": 1, "FLOOD_CONNECTIONS": 8, "HONEST": 16, "PAGES": 3,
    }  # fmt: skip
    for name, small in small_sizes.items():
        monkeypatch.setattr(server, name, small)
    monkeypatch.setenv("CROWDML_BENCH_CHECK_INS", "5000")
    result = server.measure(turns=1)
    assert result["id"] == "bench/server"
    keys = ["check-in", "check-out", "fleet", "restart", "memory", "tasks-flood-ms", "study-page-ms"]
    assert [each["key"] for each in result["ratios"]] == keys
    assert all(each["value"] > 0 for each in result["ratios"])
    for each in result["ratios"][:2]:
        assert each["value"] == min(each["by_wall"], each["by_cpu"]) > 0
        assert each["holds"] == (each["value"] >= each["goal"])
    assert all({"name", "value", "unit", "low", "high"} <= set(row) for row in result["rows"])
    assert "server" in bench.NAMES
