"""How the hyper-parameters of the figures were chosen; `crowdml reproduce hamm2015/tuning` does it again.

Sound runs see nothing that a device holds and no test row (review, R4). MNIST's are chosen on crowds of digits drawn by
code (`drawn.py`). Elsewhere the public split is cut into five parts; a crowd of the figure's size is drawn from four of
them, and its error taken on the fifth, in turn. Coarser grids (c by factors of 2 to 3, the radius, b = 10, 20 or all
that a device holds) came first, by the same `sound_errors`; the command looks around what they gave.

As published: by the test error, as the paper did, which is why those runs are marked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import Dataset, Population, blobs, iid, load
from crowdml.experiments import baselines
from crowdml.experiments.crowds import LARGE, Choice, Size, deals, devices_for, label, learn, make_task
from crowdml.experiments.drawn import drawn_crowd
from crowdml.experiments.figure import MAIN, SOUND, Claim, Figure, Panel, PrivacyLabel, Series, over_trials
from crowdml.experiments.registry import Progress
from crowdml.features import Norm

FOLDS = 5
EPSILON = 10.0


@dataclass(frozen=True, kw_only=True)
class Table:
    """What was chosen for one family of data. `late`: under delays of 1000 samples of the crowd a leg."""

    clean: Choice
    noisy: Mapping[int, Choice] = field(default_factory=dict)
    central: Mapping[int, float] = field(default_factory=dict)
    alone: float
    sound: Mapping[float, Choice]
    sound_l1: Choice
    sound_late: Mapping[float, Choice] = field(default_factory=dict)


TABLES: dict[str, Table] = {
    "mnist": Table(
        clean=Choice(1000.0, 1),
        noisy={1: Choice(3.0, 1), 10: Choice(30.0, 10), 20: Choice(100.0, 20)},
        central={1: 0.1, 10: 0.1, 20: 1.0},
        alone=100.0,
        sound={10.0: Choice(20.0, 60, 60.0), 1.0: Choice(2.0, 60, 10.0)},
        sound_l1=Choice(60.0, 20),
        sound_late={10.0: Choice(10.0, 60, 60.0), 1.0: Choice(2.0, 60, 10.0)},
    ),
    "cifar10": Table(
        clean=Choice(2000.0, 1),
        noisy={1: Choice(1.0, 1), 10: Choice(10.0, 10), 20: Choice(30.0, 20)},
        central={1: 0.1, 10: 1.0, 20: 1.0},
        alone=1000.0,
        sound={10.0: Choice(10.0, 50, 30.0), 1.0: Choice(0.5, 50, 5.0)},
        sound_l1=Choice(10.0, 20),
        sound_late={10.0: Choice(5.0, 50, 30.0), 1.0: Choice(1.0, 50, 10.0)},
    ),
    "activity": Table(
        clean=Choice(1.0, 1),
        alone=1.0,
        sound={10.0: Choice(30.0, 60), 1.0: Choice(3.0, 60, 20.0)},
        sound_l1=Choice(30.0, 60),
    ),
    # For quick runs: sizes and data that no paper has, so plain guesses.
    "digits": Table(
        clean=Choice(100.0, 1),
        noisy={1: Choice(3.0, 1), 10: Choice(10.0, 10), 20: Choice(10.0, 20)},
        central={1: 0.1, 10: 0.1, 20: 0.1},
        alone=100.0,
        sound={10.0: Choice(5.0, 59, 60.0), 1.0: Choice(2.0, 59, 10.0)},
        sound_l1=Choice(10.0, 20),
        sound_late={10.0: Choice(5.0, 20, 60.0), 1.0: Choice(2.0, 20, 10.0)},
    ),
    "synthetic": Table(
        clean=Choice(1.0, 1),
        alone=1.0,
        sound={10.0: Choice(5.0, 50), 1.0: Choice(1.0, 50, 10.0)},
        sound_l1=Choice(3.0, 20),
    ),
}
"""Chosen by `tuning` below: clean, noisy, central and alone by the test error, the rest on public rows, or for MNIST on
drawn digits."""

AROUND = (1 / 3, 1.0, 3.0)
"""The grid of a published c: the choice, and a third and three times as much."""
AROUND_SOUND = (0.5, 1.0, 2.0)
LATE = 1000.0


def whole_test(data: Dataset) -> tuple[Array, Array]:
    """The paper's test set: every test row, public or not. CIFAR-10's public rows are test images, MNIST's are not."""
    if data.name != "cifar10":
        return data.x_test, data.y_test
    return np.concatenate([data.x_public, data.x_test]), np.concatenate([data.y_public, data.y_test])


@dataclass(frozen=True)
class Trial:
    """One crowd that a setting is tried on: who holds which rows, and the rows x, y that tell its error."""

    population: Population
    x: Array
    y: Array


def trial_crowds(data: Dataset, size: Size, norm: Norm = "l2") -> tuple[Dataset, list[Trial]]:
    """Five crowds of the figure's size that a setting of `data` is tried on: none has a row that a device holds.

    MNIST has too few public rows, so its crowds hold digits that are drawn by code, dealt out anew, and 10,000 others
    tell the error. Elsewhere a crowd is drawn from four fifths of the public rows and tested on the fifth left out.
    Fifths are runs of rows, so that all windows of a public user but those at a border lie in one of them.
    """
    if data.name == "mnist":
        crowd = drawn_crowd("mnist", norm)
        deals = (iid(len(crowd.y_train), size.devices, np.random.default_rng([size.seed, n])) for n in range(FOLDS))
        return crowd, [Trial(population, crowd.x_test, crowd.y_test) for population in deals]
    held = len(data.y_train) // size.devices
    parts = np.array_split(np.arange(len(data.y_public)), FOLDS)
    found: list[Trial] = []
    for number, left_out in enumerate(parts):
        others = np.concatenate([part for part in parts if part is not left_out])
        rows = np.random.default_rng([size.seed, number]).choice(others, (size.devices, held)).astype(np.int32)
        population = Population("iid", rows, np.full(size.devices, held, np.int32), 0)
        found.append(Trial(population, data.x_public[left_out], data.y_public[left_out]))
    return replace(data, x_train=data.x_public, y_train=data.y_public), found


def sound_errors(
    data: Dataset, choice: Choice, *, epsilon: float, mechanism: str, size: Size, delay: float = 0.0
) -> Array:
    """Error of each of the `trial_crowds`, [FOLDS]."""
    crowd, tried = trial_crowds(data, size, "l1" if mechanism == "discrete-laplace" else "l2")
    task = make_task(data, choice, epsilon=epsilon, mechanism=mechanism)
    once = replace(size, passes=1, trials=FOLDS, looks=1)
    curves = learn(task, crowd, once, delay=delay, populations=[trial.population for trial in tried])
    return np.stack([
        baselines.errors(weights[-1], trial.x, trial.y) for weights, trial in zip(curves.weights, tried, strict=True)
    ])  # fmt: skip


def tuning(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """Every grid again: does each choice of `TABLES` still stand? A quick run looks at one grid on made-up data."""
    curves = list(_quick() if quick else _everything(trials or 2, progress))
    claims = tuple(Claim.stands(series, chosen, f"the table's c = {chosen:g}") for series, chosen in curves)
    panels = (
        Panel(MAIN, "As published: by the test error", "c", "test error", "log", y_range=(0, 1)),
        Panel(
            SOUND,
            "Sound: public rows or drawn digits, five crowds",
            "c",
            "error on others of them",
            "log",
            y_range=(0, 1),
        ),
    )
    notes = (
        "Sound choices see public rows alone (R4), or for MNIST, which has 240 of them, digits that are drawn by code. "
        "Those as published were made by the test error, as in the paper.",
    )
    shown = tuple(series for series, _ in curves)
    data = "synthetic" if quick else "mnist, cifar10, activity"
    title = "How the hyper-parameters were chosen"
    count, ends = 1 if quick else trials or 2, "error at the largest c"
    return Figure("hamm2015/tuning", title, data, count, shown, claims, panels, notes, ends=ends)


def _grid(centre: float, around: tuple[float, ...]) -> list[float]:
    return [float(f"{centre * factor:.3g}") for factor in around]


def _quick() -> Iterator[tuple[Series, float]]:
    data = blobs(rows=2000, features=20, classes=3, seed=3, normalise="l2")
    size = Size(devices=20, passes=1, workers=1)
    yield _sound_series(data, "synthetic-sound-e10", Choice(4.0, 50), 10.0, size)


def _sound_series(
    data: Dataset, key: str, choice: Choice, epsilon: float, size: Size, *, delay: float = 0.0, mechanism: str = ""
) -> tuple[Series, float]:
    kind = mechanism or "discrete-gaussian"
    x = _grid(choice.c, AROUND_SOUND)
    found = [
        sound_errors(data, replace(choice, c=c), epsilon=epsilon, mechanism=kind, size=size, delay=delay) for c in x
    ]
    name = f"{key}, b = {choice.batch}, R = {choice.radius:g}"
    fitted = ("pca",) if data.name == "cifar10" else ()
    privacy = label(make_task(data, choice, epsilon=epsilon, mechanism=kind), not_covered=fitted)
    return over_trials(key, name, x, np.stack(found, axis=1), privacy, panel=SOUND, marks=True), choice.c


def _everything(trials: int, progress: Progress) -> Iterator[tuple[Series, float]]:
    steps = ("mnist", "cifar10")
    for number, family in enumerate(steps):
        progress(f"{family}, as published", 2 * number, 5)
        yield from _published(family, replace(Size(), trials=trials, looks=1))
        progress(f"{family}, on public rows", 2 * number + 1, 5)
        table, data = TABLES[family], load(family, normalise="l2")
        size = Size(devices=devices_for(data, Size().devices))
        for epsilon, choice in table.sound.items():
            yield _sound_series(data, f"{family}-sound-e{epsilon:g}", choice, epsilon, size)
        for epsilon, choice in table.sound_late.items():
            yield _sound_series(data, f"{family}-sound-e{epsilon:g}-late", choice, epsilon, size, delay=LATE)
        plain = load(family, normalise="l1")
        key = f"{family}-l1-sound-e10"
        yield _sound_series(plain, key, table.sound_l1, EPSILON, size, mechanism="discrete-laplace")
    progress("activity, on public rows", 4, 5)
    data = load("activity", normalise="l2")
    for epsilon, choice in TABLES["activity"].sound.items():
        yield _sound_series(data, f"activity-sound-e{epsilon:g}", choice, epsilon, Size(devices=31))


def _published(family: str, size: Size) -> Iterator[tuple[Series, float]]:
    data = load({"mnist": "mnist-as-published"}.get(family, family), normalise="l1")
    table, test = TABLES[family], whole_test(data)
    outside = ("pca", "tuning")
    plain = PrivacyLabel(as_published=True, not_covered=outside)
    for choice, epsilon in ((table.clean, None), *((choice, EPSILON) for choice in table.noisy.values())):
        x = _grid(choice.c, AROUND)
        mechanism = "none" if epsilon is None else "discrete-laplace"
        tasks = [
            make_task(data, replace(choice, c=c), epsilon=epsilon, mechanism=mechanism, as_published=True) for c in x
        ]
        found = [learn(task, data, size).errors(*test)[:, -1] for task in tasks]
        key = f"{family}-crowd" if epsilon is None else f"{family}-crowd-b{choice.batch}"
        privacy = label(tasks[0], passes=size.passes, as_published=True, not_covered=outside)
        yield over_trials(key, key, x, np.stack(found, axis=1), privacy, marks=True), choice.c
    noisy = baselines.perturb(
        data.x_train, data.y_train, len(data.classes), EPSILON, np.random.default_rng([size.seed]), fair=False
    )
    for batch, c in table.central.items():
        chance = np.random.default_rng([size.seed, batch])
        rows = np.concatenate([chance.permutation(len(data.y_train)) for _ in range(size.passes)])
        order = rows[: len(rows) // batch * batch].reshape(-1, batch)
        x = _grid(c, AROUND)
        found = [
            baselines.central_sgd(noisy.x, noisy.y, len(data.classes), order, c=each, radius=LARGE, looks=1)[1]
            for each in x
        ]
        key = f"{family}-central-sgd-b{batch}"
        privacy = PrivacyLabel(
            epsilon=noisy.epsilon, claimed=EPSILON, as_published=True, not_covered=(*outside, "float-noise")
        )
        yield over_trials(key, key, x, baselines.errors(np.stack(found), *test).T, privacy, marks=True), c
    x = _grid(table.alone, AROUND)
    crowd = deals(data, size)[0]
    ends = [crowd.rows.shape[1] * size.passes]
    dealt = np.arange(len(test[1])).reshape(size.devices, -1)
    alone = [
        baselines.decentralised(
            data.x_train, data.y_train, len(data.classes), crowd, c=c, radius=LARGE, passes=size.passes, looks=ends
        )
        for c in x
    ]
    errors = np.stack([baselines.alone_errors(weights, *test, dealt) for weights in alone], axis=1)
    yield over_trials(f"{family}-decentralised", f"{family}-decentralised", x, errors, plain, marks=True), table.alone
