"""What the benchmark of the server says. How fast anything is, is not asserted here."""

from __future__ import annotations

import pytest

from crowdml import bench
from crowdml.bench import server


def test_the_benchmark_of_the_server_says_both_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in {"DEVICES": 8, "CONNECTIONS": 4, "CHECK_INS": 32, "CHECK_OUTS": 40}.items():
        monkeypatch.setattr(server, name, small)
    result = server.measure(turns=1)
    assert result["id"] == "bench/server"
    assert [each["key"] for each in result["ratios"]] == ["check-in", "check-out"]
    for each in result["ratios"]:
        assert each["value"] == min(each["by_wall"], each["by_cpu"]) > 0
        assert each["holds"] == (each["value"] >= each["goal"])
    assert all({"name", "value", "unit", "low", "high"} <= set(row) for row in result["rows"])
    assert "server" in bench.NAMES
