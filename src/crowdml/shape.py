"""What is public about a crowd before a study starts, and how far its models may travel: the ground of all defaults.

A rule here is a function of the shape of a crowd and of the price: it looks at no sample, so nothing is tuned (R4).
"""

from __future__ import annotations

import math
from fractions import Fraction

from crowdml.records import record
from crowdml.task import Task
from crowdml.texts import count_text


@record
class Rules:
    """The numbers in the rules for what nobody chose. `crowdml reproduce ours/defaults` tries others in their place."""

    clip: float = 0.35
    """The clip of a gradient, as a part of the longest that the model's loss can have."""
    furthest: float = 1000.0
    """How far a model travels where no noise holds it back: steps times their size."""
    in_a_score: float = 1.4
    """The standard deviation of what noise may add to a score x.w in the end, for x of length one."""
    in_a_number: float = 0.15
    """The standard deviation of what noise may add to a predicted number, as a part of the label's bound."""
    steepest: float = 1.0
    """A step of a classifier may be this many times what is stable in the worst case: its gradients are bounded."""
    rounds: int = 20
    """Rounds of `admm` and `local_updates`: a device computes much in each of them."""
    steps: int = 60
    """Rounds of masked `sgd`: each of them is a single step."""
    most_steps: int = 120
    """The most such rounds where labels are numbers: squared errors need more of them if noise lets weights go far."""
    waves: float = 12.0
    """Where labels are numbers, the momentum of many rounds is 1 - waves / rounds: by the end its waves are over."""
    alone: int = 30
    """Check-ins that a task plans where each of them is a step."""
    momentum: float = 0.9
    """The share of a step that the next one carries on, where steps are few and labels are classes."""
    momentum_of_numbers: float = 0.8
    """The momentum where labels are numbers: with a larger one the weights still oscillate after a few dozen rounds."""
    bias: bool = False
    """Whether a linear model for classes has an intercept."""
    bias_of_numbers: bool = True
    """Whether a linear model for numbers has an intercept."""
    constant_of_numbers: float = 0.5
    """The constant that gram appends to each row, where labels are numbers."""
    ridge_of_numbers: float = 1.0
    """The c of gram's ridge c sigma sqrt(d), where labels are numbers."""


RULES = Rules()
"""The rules in force."""


@record
class Shape:
    """A crowd: how many devices there are, what each of them holds, and what a sample looks like."""

    features: int
    classes: int | None
    """None: labels are numbers, at most `bound` in size."""
    devices: int
    held: int
    """Samples of a device: the fewest with which it should take part."""
    bound: Fraction = Fraction(1)
    rules: Rules = RULES

    @property
    def momentum(self) -> Fraction:
        """The share of a step that the next one carries on, where steps are few."""
        rules = self.rules
        return short(rules.momentum if self.classes is not None else rules.momentum_of_numbers)

    def momentum_in(self, rounds: int) -> Fraction:
        """The momentum of so many single steps: the usual one, more for numbers in many steps."""
        if self.classes is not None:
            return self.momentum
        return max(self.momentum, short(1 - self.rules.waves / rounds))

    @property
    def rows(self) -> int:
        return self.devices * self.held

    @property
    def text(self) -> str:
        return f"{count_text(self.devices, 'device')} with {count_text(self.held, 'sample')} each"

    def check_ins(self, task: Task, batch: int) -> int:
        """How many check-ins the whole crowd makes in all uses of its samples."""
        return self.devices * max(1, self.held // batch) * task.privacy.uses

    def rounds(self, task: Task, batch: int) -> int:
        """How many steps the server makes: a check-in each, or a cohort each."""
        together = 1 if task.masking is None else min(task.masking.cohort, self.devices)
        return max(1, self.check_ins(task, batch) // together)

    def longest_step(
        self, *, noise: float, rounds: int, momentum: float, smoothness: float, clipped: float = 1.0
    ) -> float:
        """How long each of so many equal steps shall be, for the mean gradient of all samples.

        `noise`: the standard deviation of one entry of the mean over all check-ins of the study. However many steps
        there are, steps that add up to t leave noise of t times this in each weight: so t is as long as noise allows,
        `rules.furthest` at most. `clipped`: the clip over the longest gradient; shorter ones may take longer steps.
        """
        far = self._farthest(noise, clipped)
        steepest = self.rules.steepest / clipped if self.classes is not None else 1.0
        return min(far / pushed(rounds, momentum), steepest * (1 + momentum) / smoothness)

    def single_steps(self, *, noise: float, smoothness: float) -> int:
        """How many rounds of a single step each a study needs; `noise` and `smoothness` as in `longest_step`.

        Where labels are numbers, as many as go with stable steps as far as noise allows: with the momentum
        1 - waves / k, k of them go about 2 k^2 / (waves smoothness) far.
        """
        rules = self.rules
        if self.classes is not None:
            return rules.steps
        needed = math.sqrt(self._farthest(noise) * rules.waves * smoothness / 2)
        return max(rules.steps, min(rules.most_steps, math.ceil(needed)))

    def _farthest(self, noise: float, clipped: float = 1.0) -> float:
        """What all steps may add up to: as far as noise allows, and no farther than without noise."""
        rules = self.rules
        allowed = rules.in_a_score if self.classes is not None else rules.in_a_number * float(self.bound)
        most = rules.furthest / clipped
        return most if noise <= 0 else min(most, allowed / noise)


def short(number: float) -> Fraction:
    """A setting with four digits: a task file shows it."""
    return Fraction(f"{number:.4g}")


def pushed(rounds: int, momentum: float) -> float:
    """How many steps' worth the weights move in so many rounds with momentum, for equal gradients."""
    kept = 1 - momentum
    return (rounds - momentum * (1 - momentum**rounds) / kept) / kept if momentum else float(rounds)


def deviation_of_mean(variance: float, check_ins: int) -> float:
    """The standard deviation of one entry of the mean over so many check-ins, each with noise of this variance."""
    return math.sqrt(variance / check_ins)
