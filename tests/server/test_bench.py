"""What the benchmark of the server says. How fast anything is, is not asserted here."""

from __future__ import annotations

import pytest

from crowdml import bench
from crowdml.bench import server


@pytest.mark.slow
def test_the_benchmark_of_the_server_says_all_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    small_sizes = {"DEVICES": 8, "CONNECTIONS": 4, "CHECK_INS": 32, "CHECK_OUTS": 40, "FLEET": 5, "FLEET_SECONDS": 3}
    for name, small in small_sizes.items():
        monkeypatch.setattr(server, name, small)
    monkeypatch.setenv("CROWDML_BENCH_CHECK_INS", "5000")
    result = server.measure(turns=1)
    assert result["id"] == "bench/server"
    assert [each["key"] for each in result["ratios"]] == ["check-in", "check-out", "fleet", "restart", "memory"]
    for each in result["ratios"][:2]:
        assert each["value"] == min(each["by_wall"], each["by_cpu"]) > 0
        assert each["holds"] == (each["value"] >= each["goal"])
    assert all({"name", "value", "unit", "low", "high"} <= set(row) for row in result["rows"])
    assert "server" in bench.NAMES
