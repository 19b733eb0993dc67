"""What an accuracy is worth, in one sentence."""

from __future__ import annotations

import pytest

from crowdml.verdict import share_of_majority, verdict


@pytest.mark.parametrize(
    ("accuracy", "beside", "level"),
    [
        (0.16, {"classes": 10}, "chance"),
        (0.51, {"classes": 2, "majority": 0.6}, "chance"),
        (0.61, {"classes": 2, "majority": 0.6}, "majority"),
        (0.75, {"classes": 2, "majority": 0.6}, "learned"),
        (0.63, {"classes": 2, "majority": 0.6, "spread": 0.05}, "majority"),
        (0.75, {"classes": 2, "majority": 0.6, "no_privacy": 0.95}, "far"),
        (0.94, {"classes": 2, "majority": 0.6, "no_privacy": 0.95}, "near"),
        (0.88, {"classes": 2, "majority": 0.6, "no_privacy": 0.95}, "learned"),
        (0.61, {"classes": 2, "majority": 0.6, "no_privacy": 0.62}, "near"),
        (5 / 12, {"classes": 3, "no_privacy": 5 / 12}, "chance"),
        (0.605, {"classes": 2, "majority": 0.6, "no_privacy": 0.61}, "majority"),
        (0.62, {"classes": 2, "majority": 0.6, "no_privacy": 0.63, "spread": 0.1}, "near"),
        (0.9, {"classes": 2, "majority": 0.6, "no_privacy": 0.6}, "near"),
        (-0.28, {"classes": None, "no_privacy": -0.29}, "mean"),
        (-0.2, {"classes": None}, "mean"),
        (0.04, {"classes": None, "spread": 0.05}, "mean"),
        (0.4, {"classes": None}, "learned"),
        (0.4, {"classes": None, "no_privacy": 0.6}, "far"),
        (0.59, {"classes": None, "no_privacy": 0.6}, "near"),
    ],
)
def test_a_score_is_weighed_against_a_constant_answer_and_no_privacy(accuracy, beside, level):
    found = verdict(accuracy, **beside)
    assert found.level == level
    assert found.plain["accuracy" if beside["classes"] else "r2"] == accuracy
    assert found.is_poor == (level in ("chance", "majority", "mean", "far"))
    assert ("would help" in found.sentence) == (found.is_poor and not found.is_hopeless)
    assert "\n" not in found.sentence


def test_a_study_near_chance_says_so_with_both_numbers():
    said = verdict(0.16, classes=10).sentence
    assert said.startswith("16 % is near chance (10 %).")


def test_numbers_stand_beside_the_mean_whose_r2_is_0():
    assert verdict(-0.1, classes=None).sentence.startswith("R² -0.10 is no better than always saying the mean (R² 0).")
    assert verdict(0.4, classes=None, no_privacy=0.45).sentence == (
        "R² 0.40: always saying the mean is R² 0 and a model without privacy reaches R² 0.45."
    )


def test_nothing_is_said_to_help_where_a_model_without_privacy_is_no_better_than_a_constant():
    assert verdict(5 / 12, classes=3, no_privacy=5 / 12).sentence == (
        "41.7 % is near chance (33.3 %). A model without privacy is no better (41.7 %): these columns say little about "
        "the labels."
    )
    assert verdict(-0.28, classes=None, no_privacy=-0.29).sentence == (
        "R² -0.28 is no better than always saying the mean (R² 0). A model without privacy is no better (R² -0.29): "
        "these columns say little about the labels."
    )


def test_masks_are_not_advised_to_who_has_them():
    assert "masks" in verdict(0.16, classes=10).sentence
    assert "masks" not in verdict(0.16, classes=10, masked=True).sentence


def test_the_majority_is_the_share_of_the_most_common_label():
    assert share_of_majority([0, 1, 1, 1]) == 0.75
    assert share_of_majority([-1, -1, 1, 0, 1]) == 0.4
    assert share_of_majority([]) == 0


def test_the_constant_answer_is_the_most_common_class_of_the_devices_rows():
    """Never that of the test rows, which nobody knows before."""
    assert share_of_majority([0, 1, 1, 1], held=[0, 0, 1]) == 0.25
    assert share_of_majority([0, 1, 1, 2], held=[2, 1]) == 0.5  # the lowest of equals
    assert share_of_majority([0, 1], held=[5]) == 0
    assert share_of_majority([0, 1], held=[]) == 0
