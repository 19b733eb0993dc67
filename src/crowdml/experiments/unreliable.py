"""SecProbe with participants who are unreliable or lie: figures 9 to 11 of Zhao et al. (2020). See `zhao`.

The sound form without masks: an upload of second moments with its own noise from each, and a rule that looks at the
server's public rows. Uploads are released and the rows are public, so a rule costs nobody anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.experiments import federated
from crowdml.experiments.figure import MAIN, SOUND, Claim, Figure, Panel, PrivacyLabel, Series, level_at, over_trials
from crowdml.experiments.published import secprobe
from crowdml.experiments.registry import Parts, Progress
from crowdml.experiments.zhao import (
    ACCURACY,
    DEVICES,
    HUNDRED,
    MRE,
    Case,
    alone,
    census_case,
    constant_line,
    digits_case,
    held_predictions,
    make_task,
    masked_label,
    masked_scores,
    moments_of,
    notes,
    others,
    public_only,
    published_label,
    runs,
    within,
)
from crowdml.models.ridge import predict
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import gram
from crowdml.robust import Combine, combine_rows
from crowdml.rooted import choose_group
from crowdml.second_moments import Regression, root_of, solve_moments

ROUNDS = 5
"""Of SecProbe and the schemes beside it, for a run of minutes; without noise its MRE falls slowly after them."""
CENTRAL = 15_000
"""Iterations in one place: as many as 30 participants take in so many rounds."""
PARTS_AT = {"r30": 0.3, "r70": 0.7}
"""Panels of fig. 9 by P that a full run has more, and the R of each."""
Spoil = Callable[[Array, Array, int], tuple[Array, Array]]
"""x [N, J, d], y [N, J] and a seed -> the same crowd with bad rows."""


# --- figures 9 and 10: those who are unreliable, and those who lie ---


def spoiled(x: Array, y: Array, share: float, part: float, seed: int) -> tuple[Array, Array]:
    """The crowd x [N, J, d], y [N, J] where a share of participants has random numbers in [0, 1] in a part of its rows.

    Labels are drawn from 0.05, the least of `census`."""
    rng = np.random.default_rng([seed, 9])
    x, y = x.copy(), y.copy()
    for who in rng.permutation(len(y))[: round(share * len(y))]:
        rows = rng.permutation(y.shape[1])[: round(part * y.shape[1])]
        x[who, rows] = rng.random((len(rows), x.shape[2]), np.float32)
        y[who, rows] = (
            rng.uniform(0.05, 1.0, len(rows)) if y.dtype.kind == "f" else rng.integers(0, y.max() + 1, len(rows))
        )
    return x, y


def uploads_of(case: Case, fixed: Regression, x: Array, y: Array, seed: int, liars: int = 0) -> Array:
    """[N, L]: the moments of each participant with its own noise, as if it alone were the cohort.

    The first `liars` upload what random weights are to SecProbe: random numbers in [0, 1] for the mean of a moment.
    """
    devices, row = len(y), fixed.mechanism
    exact = moments_of(fixed, case.features(x), y)
    found = [each + row.noise(SeededSource(stream(seed, 2, number)), devices) for number, each in enumerate(exact)]
    rng = np.random.default_rng([seed, 10])
    held = y.shape[1] * row.clip**2
    for who in rng.permutation(devices)[:liars]:
        found[who] = np.rint(rng.random(row.length) * held).astype(found[who].dtype)
    return np.stack(found)


def everybody(case: Case, fixed: Regression, uploads: Array) -> Array:
    """Weights from the mean of all uploads."""
    return solve_moments(fixed, uploads.sum(0), float(len(uploads) ** 2))


def by_root_rows(case: Case, fixed: Regression, uploads: Array) -> Array:
    """Weights from the uploads that the public rows speak for. Deterministic, so it costs nothing.

    Each upload is solved by itself and scored on the public rows; of the means of the best 1, 2, ... uploads the one
    with the least error there is taken, of equals the largest. It need not be told how many are bad.
    """
    devices, rows, labels = float(len(uploads)), fixed.map(case.sharp.x_public), case.sharp.y_public

    def error(weights: Array) -> float:
        return case.worse(case.score_on(within(fixed, predict(weights, rows, fixed.classes)), labels), 0.0)

    single = [error(solve_moments(fixed, each, devices)) for each in uploads]
    sums = np.cumsum(uploads[np.argsort(single, kind="stable")], axis=0)
    models = [solve_moments(fixed, each, devices * (place + 1)) for place, each in enumerate(sums)]
    found = [error(each) for each in models]
    return models[len(found) - 1 - int(np.argmin(found[::-1]))]


def by_distance(case: Case, fixed: Regression, uploads: Array) -> Array:
    """Weights from Multi-Krum after nearest-neighbour mixing, told the most liars that it can stand."""
    count = len(uploads)
    rule = Combine("multi-krum", uploads=count, f=(count - 3) // 2, before="nnm")
    mixed = np.asarray(combine_rows(uploads.astype(np.float64), rule))
    return solve_moments(fixed, mixed * count, float(count**2) * rule.inflation(count))


def by_groups(case: Case, fixed: Regression, uploads: Array) -> Array:
    """Weights by the rule that ships, `grouping`, on the same public rows."""
    row, devices = fixed.mechanism, float(len(uploads))
    held = np.full(len(uploads), float(len(case.plain.y_train) // len(uploads)))
    deviation = np.sqrt(devices * float(row.variance)) / row.clip**2
    root = root_of(fixed, Samples(case.sharp.x_public, case.sharp.y_public))
    taken = choose_group(uploads / row.clip**2, held, deviation, root, fixed.c).weights > 0
    return solve_moments(fixed, uploads[taken].sum(0), devices * float(taken.sum()))


RULES: dict[str, tuple[str, Callable[[Case, Regression, Array], Array]]] = {
    "mean": ("mean of 60 uploads, ε = 1 each in all", everybody),
    "krum": ("NNM and Multi-Krum", by_distance),
    "root": ("chosen by root rows", by_root_rows),
    "shipped": ("grouping, the rule that ships", by_groups),
}


def robust_scores(
    case: Case, devices: int, spoil: Spoil, liars: int = 0, epsilon: float = 1.0
) -> dict[str, list[float]]:
    """For each rule the scores of all seeds, where `spoil` makes some of the crowd's rows bad."""
    fixed = gram.plan(make_task(case.sharp, devices, epsilon))
    found: dict[str, list[float]] = {key: [] for key in RULES}
    for seed in case.seeds:
        x, y = spoil(*case.shares(devices, seed), seed)
        uploads = uploads_of(case, fixed, x, y, seed, liars)
        for key, (_, rule) in RULES.items():
            found[key].append(case.score(held_predictions(fixed, rule(case, fixed, uploads), case.sharp.x_test)))
    return found


def as_it_is(x: Array, y: Array, seed: int) -> tuple[Array, Array]:
    return x, y


SECPROBES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("noisy", "SecProbe, ε = 1 an epoch", {}),
    ("quiet", "SecProbe without noise in the loss", {"epsilon": None}),
    ("quiet-top", "so, but the best K in place of the printed draw", {"epsilon": None, "selection": None}),
)


def published_scores(
    case: Case, devices: int, rounds: int, spoil: Spoil, liars: int = 0, **changes: Any
) -> tuple[list[float], float]:
    """The scores of all seeds, and the share of bad participants among those averaged, where the first are liars."""
    found, chosen = [], []
    net = case.network()
    for seed in case.seeds:
        x, y = spoil(*case.shares(devices, seed), seed)
        lying = np.zeros(devices, bool)
        lying[np.random.default_rng([seed, 10]).permutation(devices)[:liars]] = True
        plan = case.plan(rounds, devices // 2, devices // 4, **changes)
        told = secprobe.learn(net, plan, x, y, case.validation, seed, liars=lying)
        found.append(case.scores(net, told)[-1])
        chosen.append(float(lying[told.chosen].mean()))
    return found, float(np.mean(chosen))


def fig9(quick: bool, trials: int | None, progress: Progress, full: bool = False) -> Figure:
    """Unreliable participants: a share R of N has random numbers in a part P of its rows. M = N / 2, K = M / 2."""
    case = census_case(quick, trials, 5)
    few = case if full else replace(case, trials=1)
    base, rounds = (8, 3) if quick else (DEVICES, HUNDRED if full else ROUNDS)
    grids: dict[str, list[float]] = (
        {MAIN: [0.6], "share": [0.5], "crowd": [8]}
        if quick
        else {MAIN: [0.0, 0.2, 0.4, 0.6], "share": [0.3, 0.5, 0.7], "crowd": [30, 60, 100]}
    )
    if full:
        grids |= dict.fromkeys(PARTS_AT, grids[MAIN])
    tell = Parts(progress, sum(map(len, grids.values())) + 2)
    series: list[Series] = []
    spread: dict[str, list[float]] = {}
    for panel, x in grids.items():
        found: dict[str, list[list[float]]] = {}
        for value in x:
            tell(f"{panel}: {value:g}")
            part, share, devices = 0.6, 0.5, base
            if panel in (MAIN, *PARTS_AT):
                part, share = value, PARTS_AT.get(panel, share)
            elif panel == "share":
                share = value
            else:
                devices = int(value)

            def spoil(rows: Array, labels: Array, seed: int, share: float = share, part: float = part) -> Any:
                return spoiled(rows, labels, share, part, seed)

            for key, _, changes in SECPROBES if panel == MAIN or full else SECPROBES[:2]:
                found.setdefault(key, []).append(published_scores(few, devices, rounds, spoil, **changes)[0])
            some = case if panel == MAIN or full else replace(case, trials=min(case.trials, 2))
            for key, scores in robust_scores(some, devices, spoil).items():
                found.setdefault(key, []).append(scores)
                spread[f"{key}-{panel}-{value:g}"] = scores
        names = {key: name for key, name, _ in SECPROBES} | {key: name for key, (name, _) in RULES.items()}
        for key, told in found.items():
            paid = masked_label(1.0) if key in RULES else _secprobe_label(case, key, base)
            one = f"{key}-{panel}"
            series.append(over_trials(one, names[key], x, np.asarray(told).T, paid, panel=panel, marks=True))
        series.append(constant_line(case, x if len(x) > 1 else [x[0], x[0] + 1], panel))
    tell("DSSGD and CSDP")
    x = grids[MAIN]
    series += _others_over(few, base, rounds, [x[0], x[-1]] if len(x) > 1 else x)
    tell("all in one place")
    series.append(_centralised_over(few, x))
    clean = "root-main"
    loss = float(np.mean(spread[f"shipped-{MAIN}-{x[-1]:g}"]) - np.mean(spread[f"mean-{MAIN}-{x[0]:g}"]))
    by_key = {each.key: each for each in series}
    claims = (
        Claim(
            "robust-as-printed",
            "SecProbe at P = 0.6 is almost as at P = 0, and better than a constant; ours is how much worse it gets",
            by_key["noisy-main"].last - by_key["noisy-main"].y[0],
            by_key["noisy-main"].last - by_key["noisy-main"].y[0] <= 0.01 and by_key["noisy-main"].last < case.constant,
            paper=0.0,
        ),
        Claim(
            "quiet-robust",
            "So is SecProbe without noise in the loss",
            by_key["quiet-main"].last - by_key["quiet-main"].y[0],
            by_key["quiet-main"].last - by_key["quiet-main"].y[0] <= 0.01,
            paper=0.0,
        ),
        Claim(
            "draw-is-why",
            "The printed draw is why: ours is how much worse it is than the best K",
            by_key["quiet-main"].last - by_key["quiet-top-main"].last,
            by_key["quiet-main"].last - by_key["quiet-top-main"].last > 0.005,
        ),
        Claim(
            "beats-others",
            "SecProbe is better than DSSGD, and than a constant; ours is by how much than DSSGD",
            by_key["dssgd"].last - by_key["noisy-main"].last,
            case.constant > by_key["noisy-main"].last < by_key["dssgd"].last,
        ),
        Claim(
            "census-unreliable",
            "The rule that ships, grouping, loses at most 0.012 to 60 clean uploads (P = 0.6, R = 0.5), mean of five "
            "seeds",
            loss,
            loss <= 0.012,
        ),
        Claim(
            "sound-beats-published",
            "Uploads chosen by root rows, ε = 1 in all, are better than SecProbe; ours is by how much",
            by_key["noisy-main"].last - by_key[clean].last,
            by_key["noisy-main"].last > by_key[clean].last,
        ),
    )
    panels = (
        Panel(MAIN, f"R = 0.5, N = {base}", "P, the part of bad rows", MRE, x_ticks=tuple(grids[MAIN])),
        Panel("share", f"P = 0.6, N = {base}", "R, the share of the unreliable", MRE, x_ticks=tuple(grids["share"])),
        Panel("crowd", "P = 0.6, R = 0.5", "N, participants", MRE),
        *(
            Panel(key, f"R = {share:g}, N = {base}", "P, the part of bad rows", MRE, x_ticks=tuple(grids[MAIN]))
            for key, share in (PARTS_AT if full else {}).items()
        ),
    )
    tried = f"one trial of SecProbe, DSSGD and CSDP; {case.trials} of the sound form by P, else two"
    more = (f"{rounds} rounds; {f'{case.trials} trials of each' if full else tried}.",)
    return Figure(
        "zhao/fig9",
        "Unreliable participants",
        case.plain.name,
        case.trials,
        tuple(series),
        claims,
        panels,
        (*notes(case), *more),
        ends="MRE at the largest x",
    )


def _secprobe_label(case: Case, key: str, devices: int) -> PrivacyLabel:
    held = len(case.plain.y_train) // devices
    changes = next(each for name, _, each in SECPROBES if name == key)
    return published_label(case.plan(1, 2, 1, **changes), held, devices)


def _others_over(case: Case, devices: int, rounds: int, parts: Sequence[float]) -> list[Series]:
    """DSSGD and CSDP by the part of bad rows."""
    found: dict[str, list[Series]] = {}
    for part in parts:
        told = others(
            case, rounds, devices, [rounds], spoil=lambda x, y, seed, part=part: spoiled(x, y, 0.5, part, seed)
        )
        for each in told:
            found.setdefault(each.key, []).append(each)
    return [
        replace(
            each[0],
            x=tuple(map(float, parts)),
            y=tuple(one.last for one in each),
            marks=True,
            low=tuple(one.low[-1] for one in each if one.low),
            high=tuple(one.high[-1] for one in each if one.high),
        )
        for each in found.values()
    ]


def _centralised_over(case: Case, parts: Sequence[float]) -> Series:
    """All rows in one place, without noise, by the part of bad rows of half of the participants."""
    net, told = case.network(clipped=False, truncated=False), []
    for part in parts:
        for_seeds = []
        for seed in case.seeds:
            x, y = case.shares(1, seed)
            x, y = spoiled(x, y, 1.0, part / 2, seed)
            run = secprobe.learn(
                net, case.plan(1 if case.quick else CENTRAL // 100, 1, 1, epsilon=None), x, y, case.validation, seed
            )
            for_seeds.append(case.scores(net, run)[-1])
        told.append(for_seeds)
    return over_trials("centralised", "all rows in one place", parts, np.asarray(told).T, PrivacyLabel(), marks=True)


def fig10(quick: bool, trials: int | None, progress: Progress, full: bool = False) -> Figure:
    """Malicious participants, who upload random weights in [0, 1]: M = N / 2, K = M / 2."""
    case = census_case(quick, trials, 5)
    few = case if full else replace(case, trials=1)
    devices, rounds = (8, 3) if quick else (DEVICES, HUNDRED if full else ROUNDS)
    counts = [0, 2, 4] if quick else [0, 10, 18, 20, 30, 40, 50]
    tell = Parts(progress, len(counts))
    found: dict[str, list[list[float]]] = {}
    shares: dict[str, list[float]] = {}
    for count in counts:
        tell(f"{count} malicious")
        for key, _, changes in SECPROBES:
            told, share = published_scores(few, devices, rounds, as_it_is, count, **changes)
            found.setdefault(key, []).append(told)
            shares.setdefault(key, []).append(share)
        for key, told in robust_scores(case, devices, as_it_is, count).items():
            found.setdefault(key, []).append(told)
    names = {key: name for key, name, _ in SECPROBES} | {key: name for key, (name, _) in RULES.items()}
    series = [
        over_trials(
            key,
            names[key],
            counts,
            np.asarray(told).T,
            masked_label(1.0) if key in RULES else _secprobe_label(case, key, devices),
            marks=True,
        )
        for key, told in found.items()
    ]
    series += [
        Series(
            f"averaged-{key}",
            f"{names[key]}: liars among those averaged",
            tuple(map(float, counts)),
            tuple(shares[key]),
            panel=SOUND,
            marks=True,
            privacy=_secprobe_label(case, key, devices),
        )
        for key in shares
    ]
    series += [
        level_at(public_only(case), "public-only", "moments of the public rows alone", counts, PrivacyLabel(), MAIN),
        constant_line(case, counts),
    ]
    by_key = {each.key: each for each in series}
    attacked = counts.index(2 if quick else 18)
    loss = by_key["shipped"].y[attacked] - by_key["mean"].y[0]
    worst = max(by_key["noisy"].y[1:])
    middle = counts.index(4 if quick else 30)
    claims = (
        Claim(
            "below-0.2",
            "With 10 to 50 of 60 malicious the MRE stays below 0.2; ours is the largest",
            worst,
            worst < 0.2,
            paper=0.2,
        ),
        Claim(
            "quiet-below-0.2",
            "So it does without noise in the loss",
            max(by_key["quiet"].y[1:]),
            max(by_key["quiet"].y[1:]) < 0.2,
            paper=0.2,
        ),
        Claim(
            "chosen-by-chance",
            "The printed draw averages fewer liars than chance (half, at 30 of 60); ours is their share",
            shares["noisy"][middle],
            shares["noisy"][middle] < 0.4,
        ),
        Claim(
            "top-none",
            "The best K has no liar where 30 of 60 are; ours is their share",
            shares["quiet-top"][middle],
            shares["quiet-top"][middle] == 0.0,
        ),
        Claim(
            "census-liars",
            "With 18 of 60 lying, the rule that ships, grouping, loses at most 0.010 to 60 honest uploads, mean of "
            "five seeds",
            loss,
            loss <= 0.010,
        ),
        Claim(
            "root-holds",
            "Uploads chosen by root rows stay below 0.2 with 50 of 60 lying; ours is its MRE",
            by_key["root"].last,
            by_key["root"].last < 0.2,
        ),
    )
    panels = (
        Panel(MAIN, "Model", "malicious participants of 60", MRE),
        Panel(SOUND, "Who is averaged", "malicious participants of 60", "share of liars among those averaged"),
    )
    tried = "" if full else "one trial of SecProbe, "
    more = (f"{rounds} rounds; {tried}{case.trials} of {'each' if full else 'the sound form'}.",)
    return Figure(
        "zhao/fig10",
        "Malicious participants",
        case.plain.name,
        case.trials,
        tuple(series),
        claims,
        panels,
        (*notes(case), *more),
        ends="MRE, or share of liars, at the most malicious",
    )


# --- figure 11 ---


def fig11(quick: bool, trials: int | None, progress: Progress, full: bool = False) -> Figure:
    """Over epsilon: N = 60, M = 30, K = 15, half of the participants unreliable with P = 0.2."""
    epsilons = [0.1, 1.0] if quick else [0.01, 0.1, 1.0, 10.0, 100.0]
    devices, rounds = (8, 3) if quick else (DEVICES, HUNDRED if full else ROUNDS)
    most = 5 if full else 1
    cases = ((MAIN, "census", census_case(quick, trials, most)), (SOUND, "digits", digits_case(quick, trials, most)))
    tell = Parts(progress, 2 * (len(epsilons) + 1))
    series: list[Series] = []
    claims: list[Claim] = []

    def spoil(x: Array, y: Array, seed: int) -> tuple[Array, Array]:
        return spoiled(x, y, 0.5, 0.2, seed)

    for panel, name, case in cases:
        found: dict[str, list[list[float]]] = {"secprobe": [], "sound": [], "dssgd": []}
        for epsilon in epsilons:
            tell(f"{name}: ε = {epsilon:g}")
            found["secprobe"].append(
                published_scores(case, devices, rounds, spoil, epsilon=epsilon, selection=epsilon)[0]
            )
            x, y = spoil(*federated.shares(case.sharp.x_train, case.sharp.y_train, devices, case.seed), case.seed)
            if panel == MAIN:
                x = case.features(spoil(*case.shares(devices, case.seed), case.seed)[0])
            found["sound"].append(masked_scores(case, devices, epsilon, x, y).tolist())
            found["dssgd"].append([others(case, rounds, devices, [rounds], epsilon=epsilon, spoil=spoil)[0].last])
        held = len(case.plain.y_train) // devices
        paid = {
            "secprobe": published_label(case.plan(rounds, 2, 1), held, devices),
            "sound": masked_label(epsilons[-1]),
            "dssgd": PrivacyLabel(as_published=True, not_covered=("float-noise",)),
        }
        words = {
            "secprobe": "SecProbe, ε an epoch",
            "sound": "one masked sum of moments, ε in all",
            "dssgd": "DSSGD, ε an entry",
        }
        series += [
            over_trials(f"{name}-{key}", words[key], epsilons, np.asarray(told).T, paid[key], panel=panel, marks=True)
            for key, told in found.items()
        ]
        tell(f"{name}: in one place, and alone")
        free, one = case.network(clipped=False, truncated=False), case.plan(rounds, 1, 1, epsilon=None)
        ends = [rounds]
        central = runs(case, one, 1, ends, free)[0].mean()
        lonely = alone(case, one, devices, ends, 3).mean()
        series += [
            level_at(float(central), f"{name}-centralised", "all rows in one place", epsilons, PrivacyLabel(), panel),
            level_at(float(lonely), f"{name}-alone", "each alone", epsilons, PrivacyLabel(silent=True), panel),
            level_at(
                public_only(case),
                "public-only" if panel == SOUND else f"{name}-public-only",
                "moments of the public rows alone",
                epsilons,
                PrivacyLabel(),
                panel,
            ),
            constant_line(case, epsilons, panel),
        ]
        by_key = {each.key: each for each in series}
        at = epsilons.index(0.1)
        theirs, ours = by_key[f"{name}-secprobe"].y, by_key[f"{name}-sound"].y
        claims += [
            Claim(
                f"{name}-as-centralised",
                f"{name}: at ε ≥ 0.1 almost as in one place; ours is by how much it is worse at best",
                min(case.worse(each, float(central)) for each in theirs[at:]),
                max(case.worse(each, float(central)) for each in theirs[at:]) <= 0.02,
                paper=0.0,
            ),
            Claim(
                f"{name}-beats-alone",
                f"{name}: at ε ≥ 0.1 better than alone; ours is by how much it is worse at best",
                min(case.worse(each, float(lonely)) for each in theirs[at:]),
                max(case.worse(each, float(lonely)) for each in theirs[at:]) < 0,
            ),
            Claim(
                f"{name}-sound-beats",
                f"{name}: one masked sum at ε = 1 in all is better than SecProbe at every ε",
                ours[epsilons.index(1.0)],
                all(case.worse(ours[epsilons.index(1.0)], each) < 0 for each in theirs),
            ),
        ]
    panels = (
        Panel(MAIN, "Census income", "ε, of an epoch, an entry or in all", MRE, "log"),
        Panel(SOUND, "Digits", "ε, of an epoch, an entry or in all", ACCURACY, "log"),
    )
    more = (f"{rounds} rounds. DSSGD's ε is of one entry, of which a device uploads all in each round.",)
    return Figure(
        "zhao/fig11",
        "Accuracy over epsilon",
        "census, mnist" if not quick else "synthetic",
        cases[0][2].trials,
        tuple(series),
        tuple(claims),
        panels,
        (*notes(cases[0][2]), *more),
        ends="MRE, or accuracy, at the largest ε",
    )
