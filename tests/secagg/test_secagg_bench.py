"""What the benchmark of masking says, at a size that takes seconds. How fast anything is, is not asserted here."""

from __future__ import annotations

from pathlib import Path

import pytest

from crowdml.bench import secagg


def test_the_benchmark_of_masking_plays_real_rounds_and_says_its_goals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(secagg.PEER.variable, str(tmp_path / "python"))  # no peer here
    result = secagg.measure(lambda _: None, repeats=2, length=1000, cohort=20, large=300)
    assert result["id"] == "bench/secagg"
    assert [each["key"] for each in result["ratios"]] == ["device", "server", "server-dropout", "device-1000", "bytes"]
    assert [each["unit"] for each in result["ratios"]] == ["ms", "s", "s", "ms", "ratio"]
    for row in result["rows"]:
        assert {"name", "value", "unit", "low", "high"} <= set(row)
        assert row["value"] is not None or row["note"]
    secagg.plot(result, tmp_path / "secagg.png")
    assert (tmp_path / "secagg.png").stat().st_size > 10_000
