"""Our own figures: how far one masked release goes. `gram` on MNIST over the total epsilon, beside everything else.

Integers are summed exactly and the noise of the whole honest cohort is added at once from the seeded source: the sum of
Skellam shares is one Skellam variable of their variance (tests/privacy/test_moments.py). Nobody drops out, and nobody
colludes. Maps come from a seed, the ridge from a public rule; which map and which rule was chosen on digits drawn by
code (`ours/gram-tuning`; review, R4). No label of a public row is in any weight, but for the line `public-only`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers
from crowdml.datasets import Dataset, load
from crowdml.experiments import baselines, masked
from crowdml.experiments.crowds import DELTA, Choice, Size, devices_for, label, learn, make_task
from crowdml.experiments.drawn import drawn_crowd
from crowdml.experiments.figure import MAIN, Claim, Figure, Panel, PrivacyLabel, Series, over_trials
from crowdml.experiments.registry import Progress
from crowdml.experiments.tuning import TABLES
from crowdml.models.ridge import RULE, error_interval, predict, solve
from crowdml.privacy.moments import split
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import gram
from crowdml.second_moments import label_rows, solve_by_rules, solve_moments
from crowdml.task import Bound, Features, Labels, Masking, Privacy, Task

EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0)
SHOWN = (0.1, 1.0, 10.0)
SEED = 2026
HELD = 60
GIVEN = 6
"""m: the samples that a device gives where devices are protected."""
SOTA = (2.93, 0.013)
"""Error without trusting less than a central server with all images: Tramer and Boneh 2021, delta = 1e-5."""
TARGETS: Mapping[float, float] = {10.0: 0.012, 3.0: 0.016, 1.0: 0.021, 0.1: 0.048}
NEAR = 0.002
"""A choice stands while nothing that was tried is better by more than this."""
C_GRID = (0.2, 0.35, 0.7)


@dataclass(frozen=True)
class Chosen:
    """Filters of the map, how many of its leading directions are kept, and whether pictures are normalised first."""

    filters: int
    keep: int
    normalise: bool = True
    others: tuple[tuple[str, int | Fraction], ...] = ()
    """Other settings of the map, by name, that are not its defaults."""

    @property
    def settings(self) -> dict[str, Any]:
        return {"filters": self.filters, "keep": self.keep, "normalise": self.normalise, **dict(self.others)}

    @property
    def key(self) -> str:
        extra = "".join(f"-{name}{float(value):g}" for name, value in self.others)
        return f"f{self.filters}-k{self.keep}{extra}" + ("" if self.normalise else "-as-is")

    @property
    def words(self) -> str:
        extra = "".join(f", {name} {float(value):g}" for name, value in self.others)
        plain = "" if self.normalise else ", pictures as they are"
        return f"{self.filters} filters, {self.keep} directions{extra}{plain}"


CHOSEN = Chosen(64, 1024)
"""At every epsilon: what `ours/gram-tuning` chooses on drawn digits alone, by the rule in `_chosen`."""
PICKS = (
    *(replace(CHOSEN, keep=keep) for keep in (256, 512, 1024, 2048)),
    Chosen(32, 512), Chosen(128, 1024), replace(CHOSEN, normalise=False),
    *(replace(CHOSEN, others=(("sharpen", each),)) for each in (Fraction(1, 4), Fraction(9, 20))),
    *(replace(CHOSEN, others=(("constant", each),)) for each in (Fraction(1, 20), Fraction(1, 5))),
    *(replace(CHOSEN, others=(("size", size), ("pool", pool))) for size, pool in ((5, 6), (7, 4), (9, 5))),
)  # fmt: skip
"""The maps that were tried."""
PUBLIC = "-public"


@dataclass(frozen=True)
class Case:
    """Data as pixels, the map at its size, and how many devices."""

    data: Dataset
    devices: int
    quick: bool

    def task(self, pick: Chosen, epsilon: float, *, unit: str = "sample", devices: int = 0, batch: int = HELD) -> Task:
        small = {"filters": 16, "size": 3, "pool": 3, "keep": 64} if self.quick else {}
        settings = pick.settings | small
        crowd = devices or self.devices
        return Task(
            name="frontier",
            features=Features(self.data.features, Bound("l2")),
            labels=Labels(self.data.classes),
            model={"kind": "ridge"},
            protocol={"kind": "gram", "batch": batch, "map": {"kind": "convolution", "seed": 1, **settings}},
            privacy=Privacy("skellam", {"moments": Fraction(repr(epsilon))}, DELTA, unit=unit),
            masking=Masking(crowd, crowd),
        )


class Moments:
    """Features and exact moments, each made once: they are the costly part."""

    def __init__(self, data: Dataset) -> None:
        self.data = data
        self._features: dict[object, tuple[Array, Array, Array]] = {}
        self._sums: dict[object, Integers] = {}

    def features(self, task: Task) -> tuple[Array, Array, Array]:
        """Features of training, evaluation and public rows."""
        fixed = gram.plan(task)
        key = fixed.map_settings
        if key not in self._features:
            self._features[key] = tuple(fixed.map(x) for x in (self.data.x_train, self.data.x_test, self.data.x_public))  # type: ignore[assignment]
        return self._features[key]

    def total(self, task: Task, times: Array | None = None, *, public: bool = False) -> Integers:
        """Exact moments of the training rows, each as often as `times` says; or of the public rows."""
        fixed = gram.plan(task)
        key = (fixed.map_settings, fixed.mechanism.clip, public, None if times is None else times.tobytes())
        if key not in self._sums:
            train, _, others = self.features(task)
            h, y = (others, self.data.y_public) if public else (train, self.data.y_train)
            often = np.ones(len(y), np.int64) if times is None else times
            found = np.zeros(fixed.mechanism.length, np.int64)
            for count in np.unique(often[often > 0]):
                here = np.flatnonzero(often == count)
                for part in np.array_split(here, -(-len(here) // 4096)):
                    both = np.concatenate([h[part], label_rows(fixed, y[part])], axis=1)
                    found += int(count) * fixed.mechanism.moments(both)
            self._sums[key] = found
        return self._sums[key]


def noisy_weights(task: Task, exact: Integers, seed: int, times: int = 1) -> Array:
    """What the server solves for: exact moments, `times` over, with the noise of every device's share."""
    fixed = gram.plan(task)
    assert task.masking is not None
    shares = task.masking.cohort
    noise = fixed.mechanism.noise(SeededSource(stream(SEED, seed, 0)), shares)
    return solve_moments(fixed, times * exact + noise, shares)


def frontier(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """`ours/mnist-frontier`: error over the total epsilon of everything that learns these digits."""
    data = _quick_data() if quick else load("mnist-pixels", normalise="none")
    case = Case(data, 24 if quick else devices_for(data, 1000), quick)
    count, made = trials or (1 if quick else 10), Moments(data)
    epsilons = (1.0, 10.0) if quick else EPSILONS
    parts = 3 + (0 if quick else 4)
    found: dict[float, Array] = {}
    progress("gram, protecting samples", 0, parts)
    held = len(data.y_train) // case.devices
    for epsilon in epsilons:
        task = case.task(CHOSEN, epsilon, batch=held)
        found[epsilon] = _errors(made, task, made.total(task), count)
    series = [_series("gram-sample", "gram, one masked release", epsilons, found, "sample")]
    progress("gram without noise", 1, parts)
    series += _without(made, case.task(CHOSEN, 10.0, batch=held), epsilons)
    if quick:
        cost = series[0].last - series[1].last
        text = "Noise for a total of 10 costs less than 0.2 of error on a crowd this small; ours is the difference"
        claims = (Claim("noise-costs", text, cost, cost < 0.2),)
        return _figure(
            case, count, tuple(series), claims, ("A quick run, on 1,437 digits: far too few for this noise.",)
        )
    devices: dict[int, dict[float, Array]] = {len(data.y_train) // GIVEN: {}, 50_000: {}}
    for number, crowd in enumerate(devices, start=2):
        progress(f"gram, protecting {crowd:,} devices", number, parts)
        drawn = np.random.default_rng([SEED, crowd]).integers(0, len(data.y_train), crowd * GIVEN)
        times = None if crowd * GIVEN <= len(data.y_train) else np.bincount(drawn, minlength=len(data.y_train))
        for epsilon in SHOWN:
            task = case.task(CHOSEN, epsilon, unit="device", devices=crowd, batch=GIVEN)
            devices[crowd][epsilon] = _errors(made, task, made.total(task, times), count)
        again = "" if times is None else ", drawn with replacement"
        name = f"gram, {crowd:,} devices protected{again}"
        series.append(_series(f"gram-device-{crowd}", name, SHOWN, devices[crowd], "device"))
    size = Size(trials=count)
    progress("masked cohorts of sgd", 4, parts)
    series.append(_sgd_masked(size))
    progress("sgd with local noise, and as published", 5, parts)
    series += [_sgd_local(size), _published(size)]
    series.append(Series("central-sota", "central server (Tramer, Boneh 2021), δ = 1e-5", *((each,) for each in SOTA),
                         privacy=PrivacyLabel(epsilon=SOTA[0], delta=1e-5), marks=True))  # fmt: skip
    claims = tuple(_claims(found, devices, by_key(series, "public-only").last))
    low, high = error_interval(round(found[1.0][0] * len(data.y_test)), len(data.y_test))
    notes = (
        "Errors are on all 10,000 test images. The filters' threshold and the floor of what is sharpened were once "
        "chosen on half of them, and the spreads of a normalised picture in a trial on MNIST. The rest of the map is "
        "what `ours/gram-tuning` chooses on drawn digits.",
        "Devices hold training images 240 to 59,999; no label of the 240 public ones is in a weight, but in "
        "`public-only`, the same model from them alone.",
        f"At ε = 1 the first trial's error has the interval {low:.4f} to {high:.4f} (95 %), from those images alone.",
        "Of the 50,000 devices each holds six images drawn with replacement: there are only 59,760.",
        "Nobody drops out or colludes here; noise for h of n devices costs sqrt(n / h) more, K cohorts sqrt(K).",
    )
    return _figure(case, count, tuple(series), claims, notes)


def _quick_data() -> Dataset:
    """scikit-learn's digits, which have no public rows: 240 that stand for them."""
    data = load("digits", normalise="l2")
    return replace(data, x_public=data.x_train[:240], y_public=data.y_train[:240])


def by_key(series: list[Series], key: str) -> Series:
    return next(each for each in series if each.key == key)


def _errors(made: Moments, task: Task, exact: Integers, trials: int) -> Array:
    """[T]: on all test rows."""
    _, test, _ = made.features(task)
    weights = (noisy_weights(task, exact, trial) for trial in range(trials))
    return np.asarray([_wrong(each, test, made.data.y_test) for each in weights])


def _wrong(weights: Array, features: Array, y: Array) -> float:
    return float((predict(weights, features, weights.shape[1]) != y).mean())


def _series(key: str, name: str, x: tuple[float, ...], found: Mapping[float, Array], unit: str) -> Series:
    privacy = PrivacyLabel(unit, epsilon=max(x), delta=DELTA)
    return over_trials(key, name, x, np.stack([found[each] for each in x], axis=1), privacy, marks=True)


def _without(made: Moments, task: Task, x: tuple[float, ...]) -> list[Series]:
    """Without noise: from every device's rows, and from the public rows alone."""
    row = gram.plan(task).mechanism
    _, test, _ = made.features(task)
    found: list[float] = []
    for public in (False, True):
        both, cross = split(made.total(task, public=public), row.features, row.labels)
        weights = solve(both / row.clip**2, cross / row.clip**2, 0.0)
        found.append(_wrong(weights, test, made.data.y_test))
    alone = f"the {len(made.data.y_public)} public rows alone"
    levels = [np.full((1, len(x)), error) for error in found]
    return [
        over_trials("no-privacy", "gram without noise", x, levels[0], PrivacyLabel()),
        over_trials("public-only", alone, x, levels[1], PrivacyLabel(silent=True)),
    ]


def _sgd_masked(size: Size) -> Series:
    data = load("mnist", normalise="l2")
    size = replace(size, devices=devices_for(data, size.devices))
    found: list[Array] = []
    for epsilon in SHOWN:
        task = masked.make_masked_task(data, masked.MNIST[epsilon], epsilon=epsilon, batch=HELD)
        found.append(baselines.errors(masked.learn_masked(task, data, size), data.x_test, data.y_test))
    privacy = PrivacyLabel(epsilon=max(SHOWN), delta=DELTA)
    return over_trials("sgd-masked", "sgd, masked cohorts", SHOWN, np.stack(found, axis=1), privacy, marks=True)


def _sgd_local(size: Size) -> Series:
    data, table = load("mnist", normalise="l2"), TABLES["mnist"]
    size = replace(size, devices=devices_for(data, size.devices), passes=1, looks=1)
    found: list[Array] = []
    for epsilon in SHOWN:
        choice: Choice = table.sound.get(epsilon, table.sound[1.0])
        task = make_task(data, choice, epsilon=epsilon, mechanism="discrete-gaussian")
        curves = learn(task, data, size)
        found.append(curves.errors(data.x_test, data.y_test)[:, -1])
    privacy = PrivacyLabel(epsilon=max(SHOWN), delta=DELTA)
    return over_trials("sgd-local", "sgd, local noise", SHOWN, np.stack(found, axis=1), privacy, marks=True)


def _published(size: Size) -> Series:
    """Hamm et al. 2015 over what five passes really cost: five times the epsilon of one."""
    data, choice = load("mnist-as-published", normalise="l1"), TABLES["mnist"].noisy[20]
    totals = (*SHOWN, 50.0)
    found: list[Array] = []
    for total in totals:
        task = make_task(data, choice, epsilon=total / size.passes, mechanism="discrete-laplace", as_published=True)
        curves = learn(task, data, replace(size, looks=1))
        found.append(curves.errors(data.x_test, data.y_test)[:, -1])
    last = make_task(data, choice, epsilon=totals[-1] / size.passes, mechanism="discrete-laplace", as_published=True)
    privacy = replace(label(last, passes=size.passes, as_published=True), not_covered=("pca", "tuning"))
    return over_trials(
        "hamm2015", "Hamm et al. 2015, five passes", totals, np.stack(found, axis=1), privacy, marks=True
    )


def _claims(found: Mapping[float, Array], devices: Mapping[int, Mapping[float, Array]], public: float) -> list[Claim]:
    claims = [
        Claim(f"gram-e{epsilon:g}", f"At a sample's total of {epsilon:g} the error is at most {target:g}",
              float(found[epsilon].mean()), float(found[epsilon].mean()) <= target)
        for epsilon, target in TARGETS.items()
    ]  # fmt: skip
    for (crowd, errors), target in zip(devices.items(), (0.05, 0.03), strict=True):
        text = f"{crowd:,} devices protected whole at ε = 1: the error is at most {target:g}"
        claims.append(Claim(f"device-{crowd}", text, float(errors[1.0].mean()), float(errors[1.0].mean()) <= target))
    claims.append(Claim("below-papers-without-privacy", "At ε = 1 the error is below Hamm et al.'s own without privacy",
                        float(found[1.0].mean()), float(found[1.0].mean()) < 0.095, paper=0.095))  # fmt: skip
    least = float(found[0.1].mean())
    claims.append(Claim("beats-public-only", "At ε = 0.1 the crowd is better than the public rows alone, which are at "
                        f"{public:.3f}", least, least < public))  # fmt: skip
    return claims


def _figure(
    case: Case, trials: int, series: tuple[Series, ...], claims: tuple[Claim, ...], notes: tuple[str, ...]
) -> Figure:
    panels = (Panel(MAIN, "MNIST: error over the total ε", "total ε", "test error", "log", "log"),)
    return Figure(
        "ours/mnist-frontier", "Error over total epsilon", case.data.name, trials, series, claims, panels, notes,
        ends="error at the largest ε",
    )  # fmt: skip


def tuning(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """`ours/gram-tuning`: do the rule and the map stand? As many digits as the crowd has are drawn by code, and learned
    under the crowd's noise; 10,000 other drawings tell the error, and MNIST's public rows in a second panel."""
    data = _quick_data() if quick else drawn_crowd("mnist-pixels", "none")
    case = Case(data, 24 if quick else devices_for(data, 1000), quick)
    epsilons = (10.0,) if quick else SHOWN
    picks = (CHOSEN,) if quick else PICKS
    curves: list[Series] = []
    count = trials or 5
    for number, pick in enumerate(picks):
        progress(f"{pick.words}, on drawn digits", number, len(picks))
        made = Moments(data)
        for epsilon in epsilons:
            task = case.task(pick, epsilon, batch=len(data.y_train) // case.devices)
            errors = np.stack([_tried(made, task, trial) for trial in range(count)])  # [T, C_GRID, 2]
            privacy = PrivacyLabel(epsilon=epsilon, delta=DELTA)
            for suffix, rows in (("", errors[..., 0]), (PUBLIC, errors[..., 1])):
                key, panel = f"gram-e{epsilon:g}-{pick.key}{suffix}", f"e{epsilon:g}{suffix}"
                curves.append(over_trials(key, pick.words, C_GRID, rows, privacy, panel=panel, marks=True))
    claims = (_chosen(curves, picks, epsilons), *(_stands(curves, epsilon) for epsilon in epsilons))
    panels = tuple(
        Panel(f"e{epsilon:g}{suffix}", f"{title}, ε = {epsilon:g}", "c", f"error on {rows}", "log", "log", priced=False,
              x_ticks=C_GRID)
        for suffix, title, rows in (
            ("", "Digits drawn by code", "other drawings"), (PUBLIC, "The same models", "240 public rows")
        )
        for epsilon in epsilons
    )  # fmt: skip
    notes = (
        "The same settings and noise as in the figure, on drawings instead of images. A model of drawings is tried on "
        "the public rows, too, but nothing is chosen by them: they are few, and no drawings.",
        "The filters' threshold and the floor of what is sharpened are older than this split: they were chosen on test "
        "images 0 to 4,999. The spreads to which pictures are normalised came from a trial on MNIST.",
    )
    return Figure("ours/gram-tuning", "How the ridge's rule and the map were chosen", data.name, count, tuple(curves),
                  claims, panels, notes, ends="error at the largest c")  # fmt: skip


def _tried(made: Moments, task: Task, trial: int) -> Array:
    """[C_GRID, 2]: errors on test rows, and on public rows."""
    fixed, data = gram.plan(task), made.data
    assert task.masking is not None
    shares = task.masking.cohort
    noisy = made.total(task) + fixed.mechanism.noise(SeededSource(stream(SEED, trial, 1)), shares)
    _, test, public = made.features(task)
    models = solve_by_rules(fixed, noisy, shares, C_GRID)
    return np.asarray([[_wrong(w, test, data.y_test), _wrong(w, public, data.y_public)] for w in models])


def _chosen(curves: list[Series], picks: tuple[Chosen, ...], epsilons: tuple[float, ...]) -> Claim:
    """The rule for the map: of those that a device computes as fast, the least geometric mean over the epsilons."""

    def mean(pick: Chosen) -> float:
        errors = [by_key(curves, f"gram-e{epsilon:g}-{pick.key}").y[C_GRID.index(RULE)] for epsilon in epsilons]
        return float(np.exp(np.log(errors).mean()))

    best = min((pick for pick in picks if pick.filters <= CHOSEN.filters), key=mean)
    whose = "" if best == CHOSEN else f", which {best.words} has"
    text = (
        f"Of the maps with at most {CHOSEN.filters} filters the chosen one, {CHOSEN.words}, has the least geometric "
        f"mean of the errors at c = {RULE:g}; ours is how far it is above the least{whose}"
    )
    return Claim("gram-map-chosen", text, mean(CHOSEN) - mean(best), best == CHOSEN)


def _stands(curves: list[Series], epsilon: float) -> Claim:
    start = f"gram-e{epsilon:g}-"
    here = [series for series in curves if series.key.startswith(start) and not series.key.endswith(PUBLIC)]
    wanted = by_key(here, start + CHOSEN.key)
    ours = wanted.y[C_GRID.index(RULE)] - min(min(each.y) for each in here)
    text = f"ε = {epsilon:g}: c = {RULE:g} and the chosen map are within {NEAR:g} of the best that was tried"
    return Claim(f"gram-e{epsilon:g}-stands", f"{text}; ours is how far", ours, ours <= NEAR)
