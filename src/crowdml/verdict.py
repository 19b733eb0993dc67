"""How good an accuracy or an R² is: beside a constant answer and a model without privacy. One sentence for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from crowdml.records import record

NEAR = 0.015
"""An accuracy this close to that of no privacy is as good as it."""
FAR = 0.1
"""An accuracy this far below that of no privacy is far from it."""
NO_BETTER = 0.02
"""An accuracy less than this above a constant guess is no better than it."""
HELPS = "More devices, {masks}more samples in a check-in or a larger ε would help."
NOTHING_HELPS = "A model without privacy is no better ({no_privacy}): these columns say little about the labels."
CONSTANT = frozenset({"chance", "majority", "mean"})
"""Levels that are no better than a constant answer."""
POOR = CONSTANT | {"far"}
"""Levels with which a study should not be content."""


@record
class Verdict:
    """What an accuracy, or an R², is worth: a level and the numbers behind it. Pages in several languages put them into
    their own words."""

    level: str
    """For programs: "chance", "majority" or "mean" (no better than a constant answer), "far" (from no privacy), "near"
    (to it) or "learned"."""
    numbers: tuple[tuple[str, float], ...]
    """What is known of accuracy or r2, chance, majority or mean, and no_privacy."""
    masked: bool = False

    @property
    def is_poor(self) -> bool:
        return self.level in POOR

    @property
    def sentence(self) -> str:
        """The verdict in English."""
        known = {name: _r2(value) if "r2" in dict(self.numbers) else _percent(value) for name, value in self.numbers}
        said = known.get("accuracy") or known["r2"]
        helps = HELPS.format(masks="" if self.masked else "masks, ")
        if self.level == "learned":
            beside = [words.format(known[name]) for name, words in BESIDE.items() if name in known]
            return f"{said}: {' and '.join(filter(None, (', '.join(beside[:-1]), beside[-1])))}."
        if self.is_hopeless:
            helps = NOTHING_HELPS.format(**known)
        return WORDS[self.level].format(said=said, **known) + (f" {helps}" if self.is_poor else "")

    @property
    def is_hopeless(self) -> bool:
        """Whether a model without privacy is no better than a constant answer, either: nothing here would help."""
        known = dict(self.numbers)
        score = known["r2"] if "r2" in known else known["accuracy"]
        return self.level in CONSTANT and "no_privacy" in known and score >= known["no_privacy"] - NEAR

    @property
    def plain(self) -> dict[str, Any]:
        return {"level": self.level, "sentence": self.sentence, **dict(self.numbers)}


WORDS = {
    "chance": "{said} is near chance ({chance}).",
    "majority": "{said} is no better than the most common class alone ({majority}).",
    "mean": "{said} is no better than always saying the mean ({mean}).",
    "far": "{said} is far below a model without privacy ({no_privacy}).",
    "near": "{said} is as good as a model without privacy ({no_privacy}).",
}
BESIDE = {
    "chance": "chance is {}",
    "majority": "the most common class alone is {}",
    "mean": "always saying the mean is {}",
    "no_privacy": "a model without privacy reaches {}",
}


def verdict(
    score: float,
    *,
    classes: int | None,
    majority: float | None = None,
    no_privacy: float | None = None,
    spread: float | None = None,
    masked: bool = False,
) -> Verdict:
    """What an accuracy is worth, or an R² where there are no classes.

    `majority`: the share of the most common class; `spread`: the standard deviation over trials, which a score has to
    pass to count as better than a guess; `masked`: masks are there already.
    """
    margin = max(NO_BETTER, spread or 0.0)
    if classes is None:
        known = {"r2": score, "mean": 0.0, "no_privacy": no_privacy}
    else:
        known = {"accuracy": score, "chance": 1 / classes, "majority": majority, "no_privacy": no_privacy}
    numbers = tuple((name, value) for name, value in known.items() if value is not None)
    poor = _constant(score, classes, majority, margin)
    if no_privacy is None:
        return Verdict(poor or "learned", numbers, masked)
    near = score >= no_privacy - NEAR
    if near and (poor is None or _constant(no_privacy, classes, majority, NO_BETTER) is None):
        return Verdict("near", numbers, masked)
    return Verdict(poor or ("far" if score < no_privacy - FAR else "learned"), numbers, masked)


def _constant(score: float, classes: int | None, majority: float | None, margin: float) -> str | None:
    """Which constant answer the score is no better than: "chance", "majority" or "mean"; None where it is better."""
    if classes is None:
        return "mean" if score < margin else None
    chance = 1 / classes
    if score < max(chance + margin, min(1.6 * chance, 0.5)):
        return "chance"
    return "majority" if majority is not None and score < majority + margin else None


def share_of_majority(labels: Iterable[Any], held: Iterable[Any] | None = None) -> float:
    """The accuracy, on rows with these labels, of always saying the most common label of the devices' rows.

    `held`: labels of the devices' rows; None where nobody but they may know those: then the rows themselves tell it.
    Labels below 0 are of no known class. Of equally common ones it is the lowest.
    """
    counts = Counter(int(label) for label in labels)
    known = counts if held is None else Counter(int(label) for label in held)
    often = max((label for label in sorted(known) if label >= 0), key=known.__getitem__, default=-1)
    return (counts[often] if often >= 0 else 0) / max(1, counts.total())


def _r2(value: float) -> str:
    return f"R² {value:.2f}" if value else "R² 0"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
