"""`crowdml reproduce ID --full`: what a figure has more where its usual run is a part, and that it says so."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from crowdml.cli import cli
from crowdml.errors import TaskError
from crowdml.experiments import robustness, unreliable, zhao
from crowdml.experiments.registry import FIGURES, listing, reproduce


def test_a_figure_that_has_nothing_more_to_run_says_so() -> None:
    with pytest.raises(TaskError, match=r"hamm2015/fig4 has no --full: what it runs without is all of it"):
        reproduce("hamm2015/fig4", full=True)
    with pytest.raises(TaskError, match="a quick run and a full one: choose one"):
        reproduce("zhao/fig9", quick=True, full=True)


FULL = ("zhao/table2", *(f"zhao/fig{number}" for number in range(4, 12)), "ours/robustness")


def test_every_figure_whose_usual_run_is_a_part_has_the_rest_behind_a_word_and_is_listed_with_it() -> None:
    assert tuple(spec.id for spec in FIGURES.values() if spec.full) == FULL
    assert {line.id: line.full for line in listing() if line.full} == {id_: FIGURES[id_].full for id_ in FULL}
    listed = CliRunner().invoke(cli, ["reproduce"]).output
    assert all(f" {id_}: " in listed for id_ in FULL)


@pytest.mark.parametrize("id_", [spec.id for spec in FIGURES.values()])
def test_a_figure_takes_the_word_if_it_says_what_it_adds(id_: str) -> None:
    assert ("full" in inspect.signature(FIGURES[id_].function).parameters) == bool(FIGURES[id_].full)


def test_what_a_full_run_has_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes that the list names, without running them."""
    asked, case = list[tuple[int, int]](), replace(zhao.census_case(True, 1, 1), quick=False)

    class EnoughError(Exception):
        pass

    def note(case: Any, plan: Any, devices: int, looks: Any, *_: Any) -> Any:
        asked.append((plan.rounds, plan.iterations))
        return np.full((1, len(list(looks))), 0.5), []

    def stop(*_: Any) -> Any:
        raise EnoughError

    monkeypatch.setattr(zhao, "runs", note)
    monkeypatch.setattr(zhao, "masked_scores", stop)
    monkeypatch.setattr(zhao, "alone", stop)
    monkeypatch.setattr(zhao, "census_case", lambda *_: case)
    monkeypatch.setattr(zhao, "digits_case", lambda *_: case)
    for name, rounds in (("table2", 193), ("fig4", 200), ("fig5", 200), ("fig6", 200), ("fig7", 100)):
        asked.clear()
        with pytest.raises(EnoughError):
            getattr(zhao, name)(False, None, lambda *_: None, True)
        assert asked[-1][0] == rounds, name
        if name == "table2":
            assert asked == [
                (many, each) for each, many in ((20, 443), (50, 190), (100, 152), (1000, 193)) for _ in "ab"
            ]


def test_a_full_run_of_fig9_has_the_whole_grid() -> None:
    figure = unreliable.fig9(True, 1, lambda *_: None, True)
    keys = {panel.key for panel in figure.panels}
    assert keys == {"main", "share", "crowd", "r30", "r70"}
    assert {series.key for series in figure.series} >= {f"{rule}-{panel}" for rule in ("noisy", "quiet-top", "root")
                                                        for panel in keys}  # fmt: skip
    assert "r30" not in {panel.key for panel in unreliable.fig9(True, 1, lambda *_: None).panels}


def test_in_a_full_run_other_rules_meet_every_attack() -> None:
    usual, full = (robustness.pieces(False, 5, more) for more in (False, True))
    default = [piece for piece in usual if piece.rules == ("default",) and piece.epsilon == 1]
    assert [piece for piece in full if piece.rules == ("default",) and piece.epsilon == 1] == default
    others = [piece for piece in full if piece.rules != ("default",)]
    assert {(piece.crowd, piece.people, piece.seed) for piece in others} == {
        (crowd, people, seed) for crowd in ("silos", "crowd") for people in ("iid", "by-class") for seed in range(5)
    }
    assert not any(piece.attacks for piece in others)
    assert any(piece.attacks for piece in usual)
