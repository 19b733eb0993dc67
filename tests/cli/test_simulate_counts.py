"""`crowdml simulate` of a crowd that only counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import crowdml, refused
from tasks import COUNTS, toml

MOODS = toml(COUNTS, title="How do people feel today?", privacy={"budget": {"epsilon": 0.5, "samples": 60}})


def moods(folder: Path, more: str = "", text: str = MOODS) -> str:
    path = folder / "moods.toml"
    path.write_text(text + more)
    return str(path)


def test_shares_come_with_their_noise_and_the_truth_beside_them(tmp_path: Path):
    plot = tmp_path / "moods.svg"
    done = crowdml("simulate", moods(tmp_path), "--data", "synthetic", "--devices", "50", "--seed", "1",
                   "--plot", str(plot), "--json", "-")  # fmt: skip
    assert done.code == 0, done.err
    told = done.json
    assert (told["devices"], told["check_ins"], told["samples"]) == (50, 300, 3000)
    assert (told["epsilon_sample"], told["epsilon_device"]) == (0.5, 30)
    assert [each["class"] for each in told["labels"]] == ["bad", "fair", "good"]
    assert sum(each["true"] for each in told["labels"]) == pytest.approx(1)
    assert all(abs(each["share"] - each["true"]) < 3 * each["reach"] for each in told["labels"])
    assert "<svg" in plot.read_text()


def test_under_masks_both_prices_are_given(tmp_path: Path):
    text = MOODS.replace('"discrete-laplace"', '"skellam"\ndelta = 1e-6')
    path = moods(tmp_path, "[masking]\ncohort = 10\nminimum = 7\ncolluders = 1\n", text)
    done = crowdml("simulate", path, "--data", "synthetic", "--devices", "50", "--seed", "1", "--dropout", "0.1")
    assert done.code == 0, done.err
    assert "if everyone else colludes" in done.out
    assert "cohorts added up" in done.out


@pytest.mark.parametrize("option", [("--passes", "2"), ("--delay", "9")])
def test_options_without_a_meaning_are_refused(tmp_path: Path, option: tuple[str, str]):
    assert "passes" in refused("simulate", moods(tmp_path), "--data", "synthetic", *option)
