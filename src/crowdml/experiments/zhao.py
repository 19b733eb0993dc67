"""Zhao et al., "Privacy-Preserving Collaborative Deep Learning with Unreliable Participants" (SecProbe).

Section IV: tables I and II and figures 4 to 11, as published (`published/secprobe.py`, which keeps no promise) and
sound.
Census income, their regression task, is `census` here: other rows, another scale, so that a mean relative error (MRE)
has no meaning by itself. A line `constant` is what the best constant has, and thresholds are given as printed and as a
share of it. Digits are MNIST in 50 public directions in place of pixels, and a dense layer stands for their CNN.

The sound form is one release of a device's second moments (`gram`): under masks, one noisy sum of everybody; without,
an upload with its own noise from each, and a rule that leaves out what does not fit the server's public rows. Its
settings were chosen on public rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import Dataset, blobs, load
from crowdml.experiments import federated
from crowdml.experiments.figure import MAIN, SOUND, Claim, Figure, Panel, PrivacyLabel, Series, level_at, over_trials
from crowdml.experiments.published import secprobe
from crowdml.experiments.published.secprobe import WARNING, Course, Network, Published
from crowdml.experiments.registry import Parts, Progress
from crowdml.features import Pca
from crowdml.models.mlp import Mlp
from crowdml.models.ridge import predict
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import gram
from crowdml.second_moments import Regression, label_rows, solve_moments
from crowdml.task import Bound, Features, Labels, Masking, Privacy, Task

DELTA = 6e-7
DEVICES = 60
UPLOADS, KEPT = 30, 15
"""The paper's M = N / 2 and K = M / 2."""
ITERATIONS = 100
MANY, HUNDRED = 200, 100
"""Rounds of a full run: of figures 4 to 6, and of 7 to 11."""
MRE = "mean relative error on the test rows"
ACCURACY = "accuracy on the test rows"
THRESHOLD = 0.15
"""The MRE of table II, as printed."""
SHARES = (0.95, 0.9)
"""Thresholds as shares of the best constant's MRE."""


@dataclass(frozen=True)
class Case:
    """The data, as it is for the published network and sharpened for the sound form; and the size of the crowd."""

    plain: Dataset
    sharp: Dataset
    features: Callable[[Array], Array]
    """From rows of the one to rows of the other."""
    hidden: int
    trials: int
    quick: bool
    seed: int = 2020

    @property
    def classes(self) -> int | None:
        return len(self.plain.classes) or None

    @property
    def seeds(self) -> list[int]:
        return [self.seed + 1_000_003 * trial for trial in range(self.trials)]

    @property
    def validation(self) -> tuple[Array, Array]:
        return self.plain.x_public, self.plain.y_public

    @property
    def measure(self) -> str:
        return MRE if self.classes is None else ACCURACY

    def plan(self, rounds: int, uploads: int, keep: int, **changes: Any) -> Published:
        """A run at the paper's step and minibatch; the step of classes is the largest power of ten that is stable."""
        sized = Published(rounds, ITERATIONS, uploads, keep, rate=0.01 if self.classes is None else 0.001)
        small = {"minibatch": 16, "iterations": 5} if self.quick else {}
        return replace(sized, **{**small, **changes})

    def network(self, **changes: Any) -> Network:
        return replace(Network(self.plain.features, self.hidden, self.classes), **changes)

    def shares(self, devices: int, seed: int) -> tuple[Array, Array]:
        return federated.shares(self.plain.x_train, self.plain.y_train, devices, seed)

    def score(self, said: Array) -> float:
        """MRE or accuracy of what was said of the test rows."""
        return self.score_on(said, self.plain.y_test)

    def score_on(self, said: Array, y: Array) -> float:
        said = np.asarray(said, np.float64)
        return float((np.abs(said - y) / y).mean() if self.classes is None else (said == y).mean())

    def worse(self, ours: float, than: float) -> float:
        """By how much: an MRE is worse if larger, an accuracy if smaller."""
        return ours - than if self.classes is None else than - ours

    def scores(self, net: Network, course: Course) -> list[float]:
        """Of each look of a run."""
        return [self.score(net.predict(each, self.plain.x_test)) for each in course.weights]

    @cached_property
    def constant(self) -> float:
        """What always saying one thing has on the test rows: the best number for the public rows' MRE, or a class."""
        y = self.plain.y_public
        if self.classes is not None:
            return self.score(np.full(len(self.plain.y_test), np.bincount(y).argmax()))
        order = np.argsort(y)
        weight = np.cumsum(1 / y[order])
        return self.score(np.full(len(self.plain.y_test), y[order][np.searchsorted(weight, weight[-1] / 2)]))


def sharpening(data: Dataset) -> Callable[[Array], Array]:
    """Rows [..., d] in the directions of the public ones, sharpened, and a constant. Power, floor and constant were
    chosen on the public rows of `census`, and no label was looked at for the directions (R4)."""
    pca = Pca.fit(data.x_public, data.features - 1)

    def features(x: Array) -> Array:
        flat = np.asarray(x).reshape(-1, data.features)
        return pca.sharpen(flat, power=0.25, floor=0.003, constant=0.4).reshape(x.shape)

    return features


def sharpened(data: Dataset, trials: int, hidden: int, quick: bool) -> Case:
    features = sharpening(data)
    rows = {name: features(getattr(data, name)) for name in ("x_train", "x_test", "x_public")}
    return Case(data, replace(data, **rows), features, hidden, trials, quick)


def census_case(quick: bool, trials: int | None, most: int) -> Case:
    if quick:
        made = blobs(rows=1500, features=6, classes=2, seed=3, normalise="none")
        y = {
            f"y_{part}": (0.2 + 0.6 / (1 + np.exp(-getattr(made, f"x_{part}")[:, :2].sum(1)))).astype(np.float32)
            for part in ("train", "test", "public")
        }
        data = replace(made, classes=(), **y)
        return sharpened(data, trials or 1, 6, quick)
    data = load("census", normalise="none")
    return sharpened(data, trials or most, 80, quick)


def digits_case(quick: bool, trials: int | None, most: int, name: str = "mnist") -> Case:
    if quick:
        data = blobs(rows=1500, features=8, classes=3, seed=4, normalise="l2")
        return Case(data, data, np.asarray, 8, trials or 1, quick)
    data = load(name)
    return Case(data, data, np.asarray, 128, trials or most, quick)


# --- the sound form ---


RIDGE = Fraction(1)
"""c of gram's rule, chosen on the public rows of `census`."""
COSINES = {"kind": "cosine", "seed": 1, "features": 512, "width": Fraction(1)}
"""The map of digits and objects; the width was chosen on MNIST's public rows among 0.5, 0.7, 1 and 1.4."""


def make_task(data: Dataset, devices: int, epsilon: float) -> Task:
    """One release of second moments of all that a device holds: a sample's total is epsilon at DELTA."""
    cosines = {**COSINES, "features": 512 if data.features > 20 else 64}
    return Task(
        name="secprobe-sound",
        features=Features(data.features, Bound("l2")),
        labels=Labels(data.classes) if data.classes else Labels(kind="number"),
        model={"kind": "ridge", "c": RIDGE},
        protocol={
            "kind": "gram",
            "batch": len(data.y_train) // devices,
            "map": {"kind": "identity", "constant": Fraction(0)} if not data.classes else cosines,
        },
        privacy=Privacy("skellam", {"moments": Fraction(repr(float(epsilon)))}, DELTA),
        masking=Masking(devices, devices),
    )


def moments_of(fixed: Regression, x: Array, y: Array) -> Array:
    """[N, L]: the exact moments of each participant's rows x [N, J, d], y [N, J]."""
    found = [
        fixed.mechanism.moments(np.concatenate([fixed.map(mine), label_rows(fixed, labels)], axis=1))
        for mine, labels in zip(x, y, strict=True)
    ]
    return np.stack(found)


def held_predictions(fixed: Regression, weights: Array, x: Array) -> Array:
    """What the model says of rows; numbers held above 0, as salaries are public to be."""
    return within(fixed, predict(weights, fixed.map(x), fixed.classes))


def within(fixed: Regression, found: Array) -> Array:
    """Numbers held between the ends of `census`; classes as they are."""
    return found if fixed.classes is not None else np.clip(found, 0.05, 1)


def masked_scores(case: Case, devices: int, epsilon: float, x: Array | None = None, y: Array | None = None) -> Array:
    """[T]: one masked sum of everybody at this total; `x`, `y` where the crowd holds other rows than the data's."""
    data = case.sharp
    if x is None or y is None:
        x, y = federated.shares(data.x_train, data.y_train, devices, case.seed)
    fixed = gram.plan(make_task(data, devices, epsilon))
    exact = moments_of(fixed, x, y).sum(0)
    found: list[float] = []
    for seed in case.seeds:
        noisy = exact + fixed.mechanism.noise(SeededSource(stream(seed, 1, 0)), devices)
        found.append(case.score(held_predictions(fixed, solve_moments(fixed, noisy, devices), data.x_test)))
    return np.asarray(found)


def public_only(case: Case) -> float:
    """What the sound form's model has from the public rows alone, without noise."""
    data, fixed = case.sharp, gram.plan(make_task(case.sharp, DEVICES, 1.0))
    exact = moments_of(fixed, data.x_public[None], data.y_public[None])[0]
    return case.score(held_predictions(fixed, solve_moments(fixed, exact, 0.0), data.x_test))


def masked_label(epsilon: float) -> PrivacyLabel:
    return PrivacyLabel(epsilon=float(epsilon), delta=DELTA)


# --- as published ---


def published_label(plan: Published, held: int, devices: int) -> PrivacyLabel:
    """The claim beside what is so: a trained hidden layer has no epsilon at all, and stands as "none" (Z1), as
    does one noise that is kept while the batches change (Z2)."""
    if plan.epsilon is None:
        return PrivacyLabel(as_published=True)
    if plan.train_hidden:
        return PrivacyLabel(as_published=True, not_covered=("hidden-layer", "float-noise"))
    total = plan.total(held, devices)
    if total is None:
        return PrivacyLabel(as_published=True, not_covered=("float-noise",))
    return PrivacyLabel(epsilon=total, claimed=plan.epsilon, as_published=True, not_covered=("float-noise",))


def runs(
    case: Case, plan: Published, devices: int, looks: Sequence[int], net: Network | None = None
) -> tuple[Array, list[Course]]:
    """Scores [T, E] after `looks` rounds, and the runs."""
    net = net or case.network()
    courses: list[Course] = []
    for seed in case.seeds:
        x, y = case.shares(devices, seed)
        courses.append(secprobe.learn(net, plan, x, y, case.validation, seed, looks=looks))
    return np.asarray([case.scores(net, course) for course in courses]), courses


def constant_line(case: Case, x: Sequence[float], panel: str = MAIN) -> Series:
    key = "constant" if panel == MAIN else f"constant-{panel}"
    ends = (float(x[0]), float(x[-1]))
    return Series(key, "always one constant", ends, (round(case.constant, 6),) * 2, panel=panel)


# --- Table I ---

VARIANTS = (
    ("baseline", "ReLU and the loss as they are", False, False),
    ("clipped", "ReLU held at 1", True, False),
    ("truncated", "held, and the loss cut after its second order", True, True),
)
PAPER = {MRE: (0.11, 0.11, 0.11), ACCURACY: (0.9648, 0.9543, 0.9594)}


def table1(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """Table I: what holding the ReLU and cutting the loss cost, all rows in one place and no noise; beside it the noise
    of Lemmas 3 and 4, and the sound form."""
    tell = Parts(progress, 2 * (len(VARIANTS) + 2))
    series: list[Series] = []
    claims: list[Claim] = []
    cases = (("census", MAIN, census_case(quick, trials, 3)), ("digits", SOUND, digits_case(quick, trials, 3)))
    rounds, iterations = (4, 10) if quick else (150, ITERATIONS)
    looks = [rounds // 4, rounds // 2, rounds]
    x = [each * iterations for each in looks]
    for name, panel, case in cases:
        alone = case.plan(rounds, 1, 1, iterations=iterations, epsilon=None)
        for number, (key, words, clipped, truncated) in enumerate(VARIANTS):
            tell(f"{name}: {words}")
            net = case.network(clipped=clipped, truncated=truncated)
            told, _ = runs(case, alone, 1, looks, net)
            series.append(over_trials(f"{name}-{key}", words, x, told, PrivacyLabel(), panel=panel, marks=True))
            paper, ours = PAPER[case.measure][number], series[-1].last
            text = f"{name}, {words}: {'MRE' if panel == MAIN else 'accuracy'}, as good within 0.01"
            claims.append(Claim(f"{name}-{key}", text, ours, case.worse(ours, paper) <= 0.01, paper=paper))
        ends = [each.last for each in series[-3:]]
        gap, theirs = max(ends) - min(ends), 0.005 if panel == MAIN else 0.0105
        claims.append(
            Claim(
                f"{name}-no-obvious-impact",
                f"{name}: neither has an obvious impact; the largest difference, which is at most theirs",
                gap,
                gap <= theirs,
                paper=theirs,
            )
        )
        tell(f"{name}: with the printed noise")
        noisy = replace(alone, epsilon=1.0)
        told, _ = runs(case, noisy, 1, looks)
        paid = published_label(noisy, len(case.plain.y_train), 1)
        words = "cut, with the noise of ε = 1 an epoch"
        series.append(over_trials(f"{name}-noisy", words, x, told, paid, panel=panel, marks=True))
        tell(f"{name}: sound")
        devices = 10 if quick else DEVICES
        told = np.repeat(masked_scores(case, devices, 1.0)[:, None], 2, axis=1)
        words = "one masked sum of moments, ε = 1 in all"
        ends = [x[0], x[-1]]
        series.append(over_trials(f"{name}-sound", words, ends, told, masked_label(1.0), panel=panel))
        series.append(constant_line(case, x, panel))
    for case, key, panel in ((cases[0][2], "census-public-only", MAIN), (cases[1][2], "public-only", SOUND)):
        told = public_only(case)
        series.append(level_at(told, key, "moments of the public rows alone", x, PrivacyLabel(), panel))
    baseline = next(each for each in series if each.key == "census-baseline").last
    share = baseline / cases[0][2].constant
    claims.append(
        Claim("census-share-of-constant", "Census baseline as a share of the best constant's MRE", share, share < 1)
    )
    panels = (
        Panel(MAIN, "Census income", "iterations of SGD, all rows in one place", MRE),
        Panel(SOUND, "Digits", "iterations of SGD, all rows in one place", ACCURACY),
    )
    return Figure(
        "zhao/table1",
        "What cutting the loss costs",
        "census, mnist" if not quick else "synthetic",
        cases[0][2].trials,
        tuple(series),
        tuple(claims),
        panels,
        notes(cases[0][2]),
        ends="MRE, or accuracy of digits, at the end",
    )


def notes(case: Case) -> tuple[str, ...]:
    """What every figure says."""
    if case.quick:
        return ("A quick run on made-up data.", f"As published: {WARNING}")
    return (
        f"As published: {WARNING}",
        f"Census: {case.plain.note}" if case.classes is None else f"{case.plain.name}: {case.plain.note}",
    )


# --- Table II and figures 4 to 6 ---


def table2(quick: bool, trials: int | None, progress: Progress, full: bool = False) -> Figure:
    """Table II: rounds to an MRE of 0.15, by the iterations of a round; N = 60, M = K = 30, everybody is reliable."""
    case = census_case(quick, trials, 1)
    devices, uploads = (8, 4) if quick else (DEVICES, UPLOADS)
    most = {2: 6, 4: 5} if quick else {20: 443, 50: 190, 100: 152, 1000: 193 if full else 8}
    printed = {20: 443, 50: 190, 100: 152, 1000: 193}
    few = max(most.values()) if full else 3
    tell = Parts(progress, 2 * len(most) + 1)
    goals = {"printed": THRESHOLD, **{f"share-{share:g}": share * case.constant for share in SHARES}}
    found: dict[str, list[float]] = {goal: [] for goal in goals}
    ends: list[list[float]] = []
    noisy_ends: list[list[float]] = []
    labels: list[PrivacyLabel] = []
    held = len(case.plain.y_train) // devices
    for iterations, rounds in most.items():
        tell(f"I = {iterations}, without noise")
        plan = case.plan(rounds, uploads, uploads, iterations=iterations, epsilon=None)
        told, _ = runs(case, plan, devices, range(1, rounds + 1))
        for goal, level in goals.items():
            found[goal].append(reached(told.mean(0), level))
        ends.append(told[:, -1].tolist())
        tell(f"I = {iterations}, with the printed noise")
        plan = case.plan(min(few, rounds), uploads, uploads, iterations=iterations)
        noisy_ends.append(runs(case, plan, devices, [plan.rounds])[0][:, -1].tolist())
        labels.append(published_label(plan, held, devices))
    tell("sound")
    sound = masked_scores(case, devices, 1.0)
    x = list(most)
    words = {
        "printed": f"an MRE of {THRESHOLD:g}",
        **{f"share-{each:g}": f"{each:g} of the constant's MRE ({each * case.constant:.3f})" for each in SHARES},
    }
    quiet = PrivacyLabel(as_published=True)
    series = [
        Series(
            f"rounds-{goal}",
            f"without noise, to {words[goal]}",
            tuple(map(float, x)),
            tuple(found[goal]),
            marks=True,
            privacy=quiet,
        )
        for goal in goals
    ]
    series += [
        Series(
            "rounds-sound",
            "one masked sum of moments, ε = 1 in all",
            (x[0], x[-1]),
            (1.0, 1.0),
            privacy=masked_label(1.0),
        ),
        over_trials("mre-quiet", "without noise", x, np.asarray(ends).T, quiet, panel=SOUND, marks=True),
        over_trials(
            "mre-noisy",
            f"with the noise of ε = 1 an epoch, {'as many' if full else few} rounds",
            x,
            np.asarray(noisy_ends).T,
            labels[0],
            panel=SOUND,
            marks=True,
        ),
        over_trials(
            "mre-sound",
            "one masked sum of moments, ε = 1 in all",
            [x[0], x[-1]],
            np.repeat(sound[:, None], 2, 1),
            masked_label(1.0),
            panel=SOUND,
        ),
        constant_line(case, x, SOUND),
    ]
    claims = []
    alone = Published(152, 100, 30, 30, train_hidden=False, noise="iteration")
    total = float(alone.total(8333, 30) or 0)
    for iterations, rounds, ours in zip(x, most.values(), found["printed"], strict=True):
        theirs = float(printed.get(iterations, rounds))
        text = f"I = {iterations}: rounds to an MRE of 0.15, without noise; {rounds + 1} where {rounds} are not enough"
        claims.append(Claim(f"rounds-i{iterations}", text, ours, ours <= min(theirs, rounds), paper=theirs))
    claims += [
        Claim(
            "noise-reaches",
            "With the noise of ε = 1 an epoch an MRE of 0.15 is reached; ours is the least MRE at any I",
            float(np.min(noisy_ends)),
            float(np.min(noisy_ends)) <= THRESHOLD,
            paper=THRESHOLD,
        ),
        Claim(
            "larger-i-is-faster",
            "A larger I needs fewer rounds, to 0.95 of the constant's MRE; ours is the rounds at the "
            "smallest I over those at the next",
            found["share-0.95"][0] / found["share-0.95"][1],
            found["share-0.95"][0] > found["share-0.95"][1] <= list(most.values())[1],
            paper=443 / 190,
        ),
        Claim(
            "epsilon-is-a-total",
            "ε = 1 is what a sample pays; ours is the total of table II's I = 100 for 8,333 "
            "samples, had only the last layer been trained, with new noise for each batch (Z3)",
            total,
            total <= 1,
            paper=1.0,
        ),
        Claim(
            "sound-beats-quiet",
            "One masked sum at ε = 1 in all is below all of them without noise; ours is its MRE",
            float(sound.mean()),
            float(sound.mean()) < np.min(ends),
        ),
        Claim(
            "threshold-share",
            "The printed threshold as a share of the constant's MRE",
            THRESHOLD / case.constant,
            case.constant > THRESHOLD,
        ),
    ]
    panels = (
        Panel(MAIN, "Rounds to a threshold", "iterations of a round, I", "rounds", "log", "log"),
        Panel(SOUND, "Where it ends", "iterations of a round, I", MRE, "log"),
    )
    counted = ", ".join(f"{rounds} at I = {each}" for each, rounds in most.items())
    more = (f"Rounds: {counted}; {'as many' if full else few} with noise.",)
    return Figure(
        "zhao/table2",
        "Rounds by the iterations of a round",
        case.plain.name,
        case.trials,
        tuple(series),
        tuple(claims),
        panels,
        (*notes(case), *more),
        ends="rounds, or MRE, at the largest I",
    )


def reached(told: Array, level: float) -> float:
    """The first round at which the MRE [T] is at most this; one more than all of them where it never is."""
    there = np.flatnonzero(told <= level)
    return float(there[0] + 1 if len(there) else len(told) + 1)


def convergence(
    name: str,
    title: str,
    case: Case,
    rounds: int,
    crowds: Sequence[int],
    progress: Progress,
    more: tuple[str, ...] = (),
) -> Figure:
    """All schemes by rounds: M = N, K = M, everybody is reliable."""
    tell = Parts(progress, len(crowds) + 6)
    looks = sorted({1, 2, rounds // 4, rounds // 2, rounds} - {0})
    middle = crowds[len(crowds) // 2]
    held = len(case.plain.y_train) // middle
    series: list[Series] = []
    for devices in crowds:
        tell(f"as published, N = {devices}")
        plan = case.plan(rounds, devices, devices)
        told, _ = runs(case, plan, devices, looks)
        series.append(
            over_trials(
                f"secprobe-n{devices}",
                f"SecProbe, N = {devices}, ε = 1 an epoch",
                looks,
                told,
                published_label(plan, held, devices),
            )
        )
    tell("as published, without noise")
    plan = case.plan(rounds, middle, middle, epsilon=None)
    told, _ = runs(case, plan, middle, looks)
    series.append(
        over_trials(
            "secprobe-quiet", f"SecProbe without noise, N = {middle}", looks, told, PrivacyLabel(as_published=True)
        )
    )
    tell("centralised")
    free = case.network(clipped=False, truncated=False)
    one = case.plan(rounds, 1, 1, epsilon=None)
    series.append(
        over_trials("centralised", "all rows in one place", looks, runs(case, one, 1, looks, free)[0], PrivacyLabel())
    )
    tell("each alone")
    series.append(
        over_trials(
            "alone", f"each of {middle} alone", looks, alone(case, one, middle, looks), PrivacyLabel(silent=True)
        )
    )
    tell("DSSGD")
    series += others(case, rounds, middle, looks, tell)
    tell("sound")
    sound = masked_scores(case, middle, 1.0)
    ends = [looks[0], looks[-1]]
    series.append(
        over_trials(
            "sound", "one masked sum of moments, ε = 1 in all", ends, np.repeat(sound[:, None], 2, 1), masked_label(1.0)
        )
    )
    series.append(constant_line(case, looks))
    series.append(
        level_at(public_only(case), "public-only", "moments of the public rows alone", looks, PrivacyLabel(), MAIN)
    )
    by_key = {each.key: each.last for each in series}
    best = f"secprobe-n{middle}"
    claims = (
        Claim(
            "almost-as-centralised",
            "SecProbe is almost as good as all rows in one place; ours is by how much it is worse",
            case.worse(by_key[best], by_key["centralised"]),
            case.worse(by_key[best], by_key["centralised"]) <= 0.02,
            paper=0.0,
        ),
        Claim(
            "quiet-as-centralised",
            "So is SecProbe without noise",
            case.worse(by_key["secprobe-quiet"], by_key["centralised"]),
            case.worse(by_key["secprobe-quiet"], by_key["centralised"]) <= 0.02,
            paper=0.0,
        ),
        Claim(
            "beats-dssgd",
            "SecProbe is at least as good as DSSGD; ours is by how much it is worse",
            case.worse(by_key[best], by_key["dssgd"]),
            case.worse(by_key[best], by_key["dssgd"]) <= 0.0,
        ),
        Claim(
            "beats-alone",
            "SecProbe is better than each alone; ours is by how much it is worse",
            case.worse(by_key[best], by_key["alone"]),
            case.worse(by_key[best], by_key["alone"]) < 0.0,
        ),
        Claim(
            "beats-constant",
            "SecProbe is better than one constant; ours is by how much it is worse",
            case.worse(by_key[best], by_key["constant"]),
            case.worse(by_key[best], by_key["constant"]) < 0.0,
        ),
        Claim(
            "sound-beats-published",
            "One masked sum at ε = 1 in all is better; ours is by how much it is worse",
            case.worse(by_key["sound"], by_key[best]),
            case.worse(by_key["sound"], by_key[best]) < 0.0,
        ),
    )
    panels = (Panel(MAIN, title, "rounds", case.measure, "log"),)
    return Figure(
        name,
        title,
        case.plain.name,
        case.trials,
        tuple(series),
        claims,
        panels,
        (*notes(case), *more),
        ends=f"{'MRE' if case.classes is None else 'accuracy'} at the end",
    )


def alone(case: Case, plan: Published, devices: int, looks: Sequence[int], few: int = 5) -> Array:
    """[T, E]: the mean of the first few of so many participants who learn alone, without noise."""
    free = case.network(clipped=False, truncated=False)
    found = []
    for seed in case.seeds:
        x, y = case.shares(devices, seed)
        mine = [
            secprobe.learn(free, plan, x[[who]], y[[who]], case.validation, seed, looks=looks) for who in range(few)
        ]
        found.append(np.mean([case.scores(free, each) for each in mine], axis=0))
    return np.asarray(found)


RATE_OF_NUMBERS, RATE_OF_CLASSES = 0.1, 0.5
"""Of the baselines' network."""
DSSGD_BOUND = 0.001
"""gamma, as the paper sets it."""


def others(
    case: Case,
    rounds: int,
    devices: int,
    looks: Sequence[int],
    tell: Any = lambda what: None,
    *,
    epsilon: float = 1.0,
    spoil: Any = None,
) -> list[Series]:
    """DSSGD with everything uploaded (theta_u = 1) and CSDP, on a network with biases, by rounds of everybody."""
    top = "squared" if case.classes is None else "softmax"
    model = Mlp(case.plain.features, case.classes, (case.hidden,), 1, top=top)
    length = int(model.shape[0])
    small, rate = 5 if case.quick else ITERATIONS, RATE_OF_NUMBERS if case.classes is None else RATE_OF_CLASSES
    plan = federated.Recipe(rounds, devices, small, 16 if case.quick else 128, rate)
    dssgd = federated.Dssgd(1.0, DSSGD_BOUND, per_parameter=epsilon)
    device = 8.0 * epsilon
    csdp = federated.csdp_for(device, DELTA, plan, devices, clip=1.0)
    paid = (
        PrivacyLabel(
            epsilon=float(dssgd.epsilon(plan, devices, length)),
            claimed=epsilon,
            as_published=True,
            not_covered=("float-noise",),
        ),
        PrivacyLabel("device", device, delta=DELTA, not_covered=("float-noise",)),
    )
    made = []
    for rule, key, words, price in (
        (dssgd, "dssgd", f"DSSGD, ε = {epsilon:g} an entry", paid[0]),
        (csdp, "csdp", f"CSDP, a device's total ε = {device:g}", paid[1]),
    ):
        told = []
        for seed in case.seeds:
            x, y = case.shares(devices, seed)
            x, y = (x, y) if spoil is None else spoil(x, y, seed)
            weights = federated.learn(model, x, y, plan, rule, seed, looks=looks)
            told.append([case.score(heard(case, model, each)) for each in weights])
        made.append(over_trials(key, words, looks, np.asarray(told), price))
        tell(words)
    return made


def heard(case: Case, model: Mlp, weights: Array) -> Array:
    """What the baselines' network says of the test rows; numbers held to salaries' public ends."""
    found = np.asarray(model.predict(weights, case.plain.x_test))
    return found if case.classes is not None else np.clip(found, 0.05, 1)


def fig4(quick: bool, trials: int | None, progress: Progress, full: bool = False) -> Figure:
    """Convergence of all schemes on census income."""
    crowds, rounds = ([4, 8], 4) if quick else ([30, 60, 100], MANY if full else 30)
    case = census_case(quick, trials, 1)
    return convergence("zhao/fig4", "Convergence on census income", case, rounds, crowds, progress)


def fig5(quick: bool, trials: int | None, progress: Progress, full: bool = False) -> Figure:
    """Convergence of all schemes on digits."""
    crowds, rounds = ([4, 8], 4) if quick else ([30, 60, 100], MANY if full else 15)
    return convergence("zhao/fig5", "Convergence on digits", digits_case(quick, trials, 1), rounds, crowds, progress)


def fig6(quick: bool, trials: int | None, progress: Progress, full: bool = False) -> Figure:
    """Their SVHN is not at hand: convergence of all schemes on CIFAR-10's features."""
    crowds, rounds = ([4, 8], 4) if quick else ([30, 60, 100], MANY) if full else ([60], 15)
    case = digits_case(quick, trials, 1, "cifar10")
    more = ("SVHN is not at hand: objects (CIFAR-10, 100 features of a public network) stand in its place.",)
    return convergence("zhao/fig6", "Convergence on objects, for SVHN", case, rounds, crowds, progress, more)


# --- figures 7 and 8 ---


def fig7(quick: bool, trials: int | None, progress: Progress, full: bool = False) -> Figure:
    """The effect of M: how many participants are drawn in a round, K = M, everybody is reliable."""
    case = census_case(quick, trials, 1)
    devices, rounds = (8, 4) if quick else (DEVICES, HUNDRED if full else 12)
    drawn = [2, 4, 8] if quick else [6, 18, 30, 42, 60]
    looks = [rounds // 3 or 1, rounds]
    tell = Parts(progress, 2 * len(drawn) + 1)
    held = len(case.plain.y_train) // devices
    told: dict[str, list[Array]] = {"quiet": [], "noisy": []}
    for uploads in drawn:
        for key, epsilon in (("quiet", None), ("noisy", 1.0)):
            tell(f"M = {uploads}, {key}")
            told[key].append(runs(case, case.plan(rounds, uploads, uploads, epsilon=epsilon), devices, looks)[0])
    tell("sound")
    series: list[Series] = []
    label = {"quiet": PrivacyLabel(as_published=True), "noisy": published_label(case.plan(rounds, 2, 2), held, devices)}
    words = {"quiet": "SecProbe without noise", "noisy": "SecProbe, ε = 1 an epoch"}
    for key in told:
        for place, look in enumerate(looks):
            found = np.stack([each[:, place] for each in told[key]], axis=1)
            name = f"{words[key]}, {look} rounds"
            series.append(over_trials(f"{key}-r{look}", name, drawn, found, label[key], marks=True))
    series += levels(case, devices, drawn)
    quiet = {each.key: each for each in series}
    first, last = quiet[f"quiet-r{looks[0]}"].y, quiet[f"quiet-r{looks[1]}"].y
    claims = (
        Claim(
            "more-is-faster",
            f"A larger M learns faster; ours is the fall of the MRE from the smallest M to the largest "
            f"after {looks[0]} rounds, without noise",
            first[0] - first[-1],
            first[0] - first[-1] > 0.005,
        ),
        Claim(
            "more-is-better",
            f"A larger M leads to a better model; ours is the same fall after {looks[1]} rounds",
            last[0] - last[-1],
            last[0] - last[-1] > 0.005,
        ),
        Claim(
            "few-are-accurate",
            "With M = 0.1 N it is still relatively accurate; ours is its MRE over the largest M's",
            last[0] / last[-1],
            last[0] / last[-1] < 1.1,
        ),
        Claim(
            "noise-is-above-constant",
            "With noise it is below one constant's MRE; ours is the least MRE with noise",
            min(quiet[f"noisy-r{looks[1]}"].y),
            min(quiet[f"noisy-r{looks[1]}"].y) < case.constant,
        ),
    )
    panels = (Panel(MAIN, "Participants in a round", "M", MRE),)
    return Figure(
        "zhao/fig7",
        "The effect of parallelism",
        case.plain.name,
        case.trials,
        tuple(series),
        claims,
        panels,
        notes(case),
        ends="MRE at the largest M",
    )


def levels(case: Case, devices: int, x: Sequence[float], panel: str = MAIN) -> list[Series]:
    """The level lines of a figure: one masked sum, the public rows alone, and one constant."""
    suffix = "" if panel == MAIN else f"-{panel}"
    sound, ends = masked_scores(case, devices, 1.0), [x[0], x[-1]]
    return [
        over_trials(
            f"sound{suffix}",
            "one masked sum of moments, ε = 1 in all",
            ends,
            np.repeat(sound[:, None], 2, 1),
            masked_label(1.0),
            panel=panel,
        ),
        level_at(
            public_only(case), f"public-only{suffix}", "moments of the public rows alone", x, PrivacyLabel(), panel
        ),
        constant_line(case, x, panel),
    ]


AGES = ((19 + 0.25 * 45) / 64, (19 + 0.7 * 45) / 64)
"""Their 0.25 and 0.7 of the ages from 19 to 64 on the scale of `census`, age over 64."""


def fig8(quick: bool, trials: int | None, progress: Progress, full: bool = False) -> Figure:
    """Special participants: rows of the young and the old are with a few of them, and in none of the server's."""
    case = census_case(quick, trials, 1)
    devices, rounds, column = (10, 4, 0) if quick else (DEVICES, HUNDRED if full else 10, 0)
    ages = tuple(np.quantile(case.plain.x_train[:, 0], [0.25, 0.75])) if quick else AGES
    counts = [1, 2] if quick else [1, 6, 12]
    parts = {"usual": split_by(case, column, ages, False), "special": split_by(case, column, ages, True)}
    tell = Parts(progress, 3 * len(counts))
    found: dict[str, list[list[float]]] = {}
    for count in counts:
        for key, epsilon in (("quiet", None), ("noisy", 1.0), ("sound", None)):
            tell(f"{count} special participants, {key}")
            x, y = special_crowd(parts, devices, count, case.seed)
            if key == "sound":
                say = sound_model(case, x, y)
            else:
                plan = case.plan(rounds, devices // 2, devices // 4, epsilon=epsilon)
                net = case.network()
                told = secprobe.learn(net, plan, x, y, parts["usual"].validation, case.seed)
                say = model_of(net, told)
            for name, part in parts.items():
                found.setdefault(f"{key}-{name}", []).append([case.score_on(say(part.plain.x_test), part.plain.y_test)])
    words = {
        "quiet": "SecProbe without noise",
        "noisy": "SecProbe, ε = 1 an epoch",
        "sound": "masked sum, ε = 1 in all",
    }
    paid = {
        "quiet": PrivacyLabel(as_published=True),
        "sound": masked_label(1.0),
        "noisy": published_label(case.plan(rounds, 2, 1), 1, devices),
    }
    series = [
        over_trials(
            key,
            f"{words[key.split('-')[0]]}, {key.split('-')[1]} test rows",
            counts,
            np.asarray(told).T,
            paid[key.split("-")[0]],
            marks=True,
        )
        for key, told in found.items()
    ]
    series += [constant_line(parts["usual"], counts), constant_line(parts["special"], counts, "special")]
    series[-1] = replace(series[-1], panel=MAIN, name="one constant, special test rows")
    by_key = {each.key: each.y for each in series}
    gaps = by_key["quiet-special"][0] - by_key["quiet-usual"][0]
    falls = by_key["quiet-special"][0] - by_key["quiet-special"][-1]
    claims = (
        Claim(
            "special-is-worse",
            "Special test rows are told significantly worse; ours is by how much with one special "
            "participant, without noise",
            gaps,
            gaps > 0.01,
        ),
        Claim(
            "more-help",
            "More special participants make them better; ours is the fall from the fewest to the most",
            falls,
            falls > 0.002,
        ),
        Claim(
            "sound-special",
            "In one masked sum, where nobody is chosen, special rows are told better with the most "
            "special participants; ours is by how much",
            by_key["quiet-special"][-1] - by_key["sound-special"][-1],
            by_key["quiet-special"][-1] > by_key["sound-special"][-1],
        ),
    )
    panels = (Panel(MAIN, "Participants that the server knows nothing like", "special participants", MRE),)
    return Figure(
        "zhao/fig8",
        "What the validation rows do not cover",
        case.plain.name,
        1,
        tuple(series),
        claims,
        panels,
        notes(case),
        ends="MRE with the most special participants",
    )


def split_by(case: Case, column: int, ends: tuple[float, float], outside: bool) -> Case:
    """The case with the rows whose column lies between the ends alone, or with those outside."""

    def kept(data: Dataset) -> Dataset:
        where = {
            part: (lambda v: (v <= ends[0]) | (v >= ends[1]))(getattr(case.plain, f"x_{part}")[:, column]) == outside
            for part in ("train", "test", "public")
        }
        arrays = {f"{axis}_{part}": getattr(data, f"{axis}_{part}")[where[part]] for part in where for axis in "xy"}
        return replace(data, **arrays)

    return replace(case, plain=kept(case.plain), sharp=kept(case.sharp))


def special_crowd(parts: dict[str, Case], devices: int, count: int, seed: int) -> tuple[Array, Array]:
    """x [N, J, d], y [N, J]: the last `count` participants hold special rows, the others usual ones."""
    usual, special = parts["usual"].plain, parts["special"].plain
    held = len(usual.y_train) // devices
    x, y = federated.shares(usual.x_train, usual.y_train, devices, seed)
    rng = np.random.default_rng([seed, 5])
    rows = rng.choice(len(special.y_train), (count, held), replace=len(special.y_train) < count * held)
    x[-count:], y[-count:] = special.x_train[rows], special.y_train[rows]
    return x, y


def model_of(net: Network, course: Course) -> Callable[[Array], Array]:
    """What the last model of a run says of rows."""
    return lambda x: np.asarray(net.predict(course.weights[-1], x))


def sound_model(case: Case, x: Array, y: Array) -> Callable[[Array], Array]:
    """What one masked sum of a crowd's plain rows x [N, J, d], y [N, J] at ε = 1 says of plain rows."""
    fixed = gram.plan(make_task(case.sharp, len(y), 1.0))
    exact = moments_of(fixed, case.features(x), y).sum(0)
    noisy = exact + fixed.mechanism.noise(SeededSource(stream(case.seed, 1, 0)), len(y))
    weights = solve_moments(fixed, noisy, len(y))
    return lambda rows: held_predictions(fixed, weights, case.features(rows))
