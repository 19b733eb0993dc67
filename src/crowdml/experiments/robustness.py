"""Our own figure: how far lies go against each rule, worst attack and worst seed, at equal epsilon of honest devices.

Moments are computed once for each split, exactly; noise and lies are added to them. Noise is drawn as normal numbers of
the mechanism's variance: its standard deviation is above 10^5 grid steps, where the two laws cannot be told apart.
What liars send is a function of moments, so an attack costs a few sums. The map, the ridge and the tests' thresholds
were fixed on digits drawn by code and on the theory of the noise, while only `SEEN` attacks were looked at; `HELD_OUT`
ones were added after that. The rule changed once more when a figure had shown them: on drawn digits and for crowds
without a liar, so they are out of sight no longer in the strict sense.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from crowdml.arrays import Array, Integers
from crowdml.attacks import mark
from crowdml.datasets import Dataset, load
from crowdml.datasets.populations import by_class, iid
from crowdml.experiments.figure import Claim, Figure, Panel, PrivacyLabel, Series, numbers
from crowdml.experiments.registry import Parts, Progress
from crowdml.features.maps import MapSettings, make_map
from crowdml.features.pictures import VARIATIONS, bend
from crowdml.models.ridge import predict, solve
from crowdml.privacy.mechanisms import l1_of
from crowdml.privacy.moments import join, moments_move, moments_variance, split
from crowdml.robust import Combine, combine_rows
from crowdml.rooted import Root, choose_group, fltrust, top

SEED = 2027
SILOS, HELD = 20, 60
MAP = MapSettings("convolution", seed=1, filters=64, keep=256, normalise=True)
"""Of 128, 256, 512 and 1,024 directions the best on drawn digits, under the noise of 20 releases and of cohorts."""
RIDGE = 0.7
"""c of the ridge, the best of 0.35, 0.7 and 1.4 there."""
CLIP = 512
SILO_DELTA, CROWD_DELTA = 1.5e-4, 1e-6
SHARES = (0.0, 0.2, 0.4, 0.6, 0.9)
COHORTS: Mapping[float, int] = {0.0: 50, 0.01: 50, 0.05: 20, 0.1: 10}
"""The cohorts of a task that expects this share of liars."""
FACTORS = (0.1, 0.3, 1.0)
"""What searches try: the attack that does most harm counts."""

SEEN = ("none", "sign-flip", "label-flip", "target-flip", "scaling", "gaussian", "alie", "inner-product", "mimic",
        "random", "unreliable", "no-noise", "late", "root-copy", "orthogonal", "slightly-orthogonal",
        "tenth-roll", "half-flip", "backdoor", "min-max", "alie-search", "inner-product-search", "roll",
        "two-ways")  # fmt: skip
HELD_OUT = ("two-swapped", "faint", "blurred-roll")
CROWD_SEEN = ("none", "sign-flip", "label-flip", "target-flip", "scaling", "gaussian", "random", "unreliable", "ring")
CROWD_HELD_OUT = ("backdoor", "takeover-label-flip", "takeover-roll", "takeover-half-flip", "takeover-unreliable",
                  "takeover-orthogonal", "sybil-label-flip", "sybil-roll")  # fmt: skip


# --- what everybody holds ---


@dataclass(frozen=True, eq=False)
class Digits:
    """Features of the data as the mechanism rounds them, and the mean moments of what liars make up."""

    data: Dataset
    train: Array  # [n, d]
    test: Array
    public: Array
    noise: tuple[Array, Array]
    """The mean moments and the mean features of pictures that are noise."""
    marked: tuple[Array, Array]
    """Those of training pictures that are marked for a backdoor."""
    trigger: Array
    """Features of marked test pictures."""
    bent: Array  # [VARIATIONS, public rows, d]
    """Variations of each public picture: models are tried on them."""

    @staticmethod
    def of(data: Dataset, settings: MapSettings) -> Digits:
        mapped = make_map(settings, data.x_train.shape[1])
        chance = np.random.default_rng([SEED, 1])
        some = chance.permutation(len(data.x_train))[:2000]
        noise = chance.random((2000, data.x_train.shape[1])).astype(np.float32) * data.x_train.max()
        bent = bend(data.x_public, VARIATIONS)
        made = [_rounded(mapped(x)) for x in (data.x_train, data.x_test, data.x_public, noise, mark(data.x_train[some]),
                                              mark(data.x_test[:2000]), bent)]  # fmt: skip
        train, test, public = made[:3]
        pairs = [(each.T @ each / len(each), each.mean(0)) for each in made[3:5]]
        variations = made[6].reshape(VARIATIONS, *public.shape)
        return Digits(data, train, test, public, pairs[0], pairs[1], made[5], variations)

    @property
    def width(self) -> int:
        return self.train.shape[1]

    @property
    def classes(self) -> int:
        return len(self.data.classes or ())

    @property
    def length(self) -> int:
        return self.width * (self.width + 1) // 2 + self.width * self.classes

    def root(self, rows: Integers) -> Root:
        labels = np.eye(self.classes)[self.data.y_public[rows]]
        tried = self.bent[:, rows].reshape(-1, self.width), np.tile(labels, (len(self.bent), 1))
        return Root(self.public[rows], labels, True, tried=tried)

    def moments(self, rows: Integers) -> Array:
        """[L]: exact sums over these training rows."""
        h, y = self.train[rows], np.eye(self.classes)[self.data.y_train[rows]]
        return join(CLIP**2 * (h.T @ h), CLIP**2 * (h.T @ y)) / CLIP**2

    def error(self, weights: Array) -> float:
        return float((predict(weights, self.test, self.classes) != self.data.y_test).mean())

    def success(self, weights: Array) -> float:
        """The share of marked test pictures of other classes that a model takes for the first class."""
        found = predict(weights, self.trigger, self.classes)
        return float((found[self.data.y_test[: len(found)] != 0] == 0).mean())

    def model(self, total: Array, deviation: float) -> Array:
        return solve(*split(total, self.width, self.classes), deviation, RIDGE)


def _rounded(features: Array) -> Array:
    return np.trunc(features.astype(np.float64) * CLIP) / CLIP


@lru_cache(maxsize=16)
def noise_of(length: int, epsilon: float, delta: float) -> float:
    """The standard deviation of the noise of a release, or of a cohort's sum, on the diagonal."""
    l2 = moments_move(CLIP, False)
    return math.sqrt(moments_variance(l2, l1_of(l2, length), Fraction(repr(epsilon)), delta)) / CLIP**2


# --- lies about moments: linear maps of what an honest device would sum ---


@dataclass(frozen=True, eq=False)
class Lies:
    """What liars make of moments [n, L], each as a device that held such samples, or said such things of them."""

    digits: Digits

    @cached_property
    def middle(self) -> int:
        """Where features times labels begin."""
        return self.digits.width * (self.digits.width + 1) // 2

    def counts(self, moments: Array) -> Array:
        """[n, C]: samples of each class, from the constant feature."""
        k = self.digits.public[0, -1]
        return moments[:, self.middle :].reshape(len(moments), -1, self.digits.classes)[:, -1] / k

    def relabelled(self, order: Array, moments: Array) -> Array:
        """Class c is called order[c]."""
        cross = moments[:, self.middle :].reshape(len(moments), -1, self.digits.classes)
        after = np.zeros_like(cross)
        for old, new in enumerate(order):
            after[:, :, new] += cross[:, :, old]
        return np.concatenate([moments[:, : self.middle], after.reshape(len(moments), -1)], axis=1)

    def replaced(self, share: float, what: tuple[Array, Array], label: int | None, moments: Array) -> Array:
        """A share of the samples is something else: with the labels that they had, or all with this one."""
        gram, mean = what
        counts = self.counts(moments)
        if label is not None:
            counts = counts.sum(1, keepdims=True) * np.eye(self.digits.classes)[label]
        other = np.concatenate([counts.sum(1)[:, None] * join_floats(gram)[None],
                                (mean[None, :, None] * counts[:, None]).reshape(len(moments), -1)], axis=1)  # fmt: skip
        return (1 - share) * moments + share * other

    def beyond(self, root: Root, times: float, moments: Array) -> Array:
        """Classes rolled on in the directions that no root row has, nor any of their variations, so that nothing that
        the rule is given sees anything of it."""
        left, sizes, _ = np.linalg.svd(root.trials[0].T, full_matrices=True)
        seen = left[:, : int((sizes > 0.05 * sizes[0]).sum())]
        cross = moments[:, self.middle :].reshape(len(moments), -1, self.digits.classes)
        inside = np.einsum("dr,er,nec->ndc", seen, seen, cross, optimize=True)
        after = inside - times * np.roll(cross - inside, 1, axis=2)
        return np.concatenate([moments[:, : self.middle], after.reshape(len(moments), -1)], axis=1)

    def scaled(self, times: float, moments: Array) -> Array:
        """Features times labels, so many times as long."""
        return np.concatenate([moments[:, : self.middle], times * moments[:, self.middle :]], axis=1)

    def simple(self, name: str, root: Root) -> Callable[[Array], Array] | None:
        """A lie of one device about its own samples, where the attack is one."""
        classes = np.arange(self.digits.classes)
        flip = classes[::-1]
        ways: Mapping[str, Callable[[Array], Array]] = {
            "none": lambda m: m,
            "sign-flip": lambda m: -m,
            "label-flip": lambda m: self.relabelled(flip, m),
            "roll": lambda m: self.relabelled(np.roll(classes, 1), m),
            "target-flip": lambda m: self.relabelled(np.where(classes == 0, 1, classes), m),
            "half-flip": lambda m: (m + self.relabelled(flip, m)) / 2,
            "scaling": lambda m: 10 * self.relabelled(flip, m),
            "late": lambda m: 0 * m,
            "unreliable": lambda m: self.replaced(0.6, self.digits.noise, None, m),
            "backdoor": lambda m: self.replaced(0.5, self.digits.marked, 0, m),
            "orthogonal": lambda m: self.beyond(root, 3.0, m),
            "slightly-orthogonal": lambda m: self.beyond(root, 1.0, m),
            "two-swapped": lambda m: self.relabelled(np.where(classes < 2, 1 - classes, classes), m),
            "faint": lambda m: self.scaled(0.3, m),
            "blurred-roll": lambda m: self.replaced(
                0.5, self.digits.noise, None, self.relabelled(np.roll(classes, 1), m)
            ),
            "tenth-roll": lambda m: 0.9 * m + 0.1 * self.relabelled(np.roll(classes, 1), m),
        }
        return ways.get(name)


def join_floats(gram: Array) -> Array:
    return np.concatenate([np.diagonal(gram), gram[np.triu_indices(len(gram), 1)]])


def silo_lies(name: str, digits: Digits, root: Root, exact: Array, honest: Array, noise: Array) -> list[Array]:
    """What A liars say, [A, L], in each way that the attack tries: they know what honest silos hold [20, L], exact, and
    say `honest` [20, L]; `noise` [A, L] is what honest devices in their place would add."""
    lies, liars = Lies(digits), len(noise)
    own = exact[np.arange(liars) % len(exact)]
    simple = lies.simple(name, root)
    if simple is not None:
        return [simple(own) + noise]
    mean, spread = honest.mean(0), honest.std(0)
    away = {"alie": -spread, "inner-product": -2 * mean}.get(name.removesuffix("-search"))
    if name.endswith("-search"):  # each with noise of its own, so that they are no copies; so the next two
        assert away is not None
        return [exact.mean(0) + factor * away + noise for factor in FACTORS]
    if name == "mimic":
        return [exact[0] + noise]
    if name == "min-max":
        return [exact.mean(0) - _min_max(honest, exact.mean(0) + noise[0], spread) * spread + noise]
    if name == "two-ways":
        flip, roll = lies.simple("label-flip", root), lies.simple("roll", root)
        assert flip is not None
        assert roll is not None
        return [np.concatenate([flip(own[::2]), roll(own[1::2])]) + noise]
    if name == "root-copy":
        h, y = root.features, root.labels
        one = np.concatenate([join_floats(h.T @ h), (h.T @ y).reshape(-1)]) / len(h)
        return [digits_of(own, lies)[:, None] * one + noise]
    alone: Mapping[str, Callable[[], Array]] = {
        "gaussian": lambda: 10 * noise,
        "no-noise": lambda: own,
        "random": lambda: np.random.default_rng([SEED, liars]).random(noise.shape),
        "alie": lambda: np.broadcast_to(mean - spread, noise.shape),
        "inner-product": lambda: np.broadcast_to(-mean, noise.shape),
    }
    return [np.array(alone[name]())]


def digits_of(moments: Array, lies: Lies) -> Array:
    """[n]: how many samples moments sum."""
    return lies.counts(moments).sum(1)


def _min_max(honest: Array, start: Array, spread: Array) -> float:
    """How many standard deviations an upload may go off from its start, and be no farther from any honest upload than
    these are from each other."""
    own = (honest**2).sum(1)
    most, gaps = (own[:, None] + own[None] - 2 * (honest @ honest.T)).max(), honest - start
    low, high = 0.0, 100.0
    for _ in range(30):
        middle = (low + high) / 2
        within = ((gaps + middle * spread) ** 2).sum(1).max() <= most
        low, high = (middle, high) if within else (low, middle)
    return low


# --- rules ---

PLAIN: Mapping[str, Callable[[int, int], Combine]] = {
    "mean": lambda m, f: Combine("mean", m),
    "median": lambda m, f: Combine("median", m),
    "trimmed-mean": lambda m, f: Combine("trimmed-mean", m, min(f, (m - 1) // 2)),
    "krum": lambda m, f: Combine("krum", m, min(f, (m - 3) // 2)),
    "multi-krum": lambda m, f: Combine("multi-krum", m, min(f, (m - 3) // 2)),
    "nnm": lambda m, f: Combine("trimmed-mean", m, min(f, (m - 1) // 2), before="nnm"),
    "geometric-median": lambda m, f: Combine("geometric-median", m),
    "centred-clipping": lambda m, f: Combine("centred-clipping", m),
}


def learned(rule: str, digits: Digits, root: Root, uploads: Array, samples: Array, deviation: float, f: int) -> Array:
    """The weights that a rule ends with; zeros where it refuses, as a server that learned nothing."""
    if rule == "default":
        chosen = choose_group(uploads, samples, deviation, root, RIDGE).weights
        return digits.model(uploads[chosen > 0].sum(0), deviation * math.sqrt(chosen.sum()))
    if rule in ("top", "fltrust"):
        return digits.model(*_by_root(rule, digits, root, uploads, samples, deviation, f))
    by = PLAIN[rule](len(uploads), f)
    total = combine_rows(uploads, by) * len(uploads)
    return digits.model(total, deviation * math.sqrt(len(uploads) * by.inflation(len(uploads))))


def _by_root(
    rule: str, digits: Digits, root: Root, uploads: Array, samples: Array, deviation: float, f: int
) -> tuple[Array, float]:
    """The sum, and its noise, by a rule of others that looks at root rows."""
    if rule == "top":
        scores = np.array([-root.error(digits.model(each, deviation)) for each in uploads])
        weights = top(scores, max(1, len(uploads) - f)) * (len(uploads) - f)
    else:
        h, y = root.features, root.labels
        own = np.concatenate([join_floats(h.T @ h), (h.T @ y).reshape(-1)]) / len(h)
        weights = fltrust(uploads, own * samples.mean()) * len(uploads)
    return weights @ uploads, deviation * math.sqrt((weights**2).sum())


RULES = ("default", *PLAIN, "top", "fltrust")
OTHERS = ("label-flip", "target-flip", "inner-product", "half-flip", "orthogonal", "slightly-orthogonal")
"""The attacks that all rules meet; the default rule meets every one. The last two are what breaks rules by score."""
WAYS: Mapping[str, Callable[..., Any]] = {"iid": iid, "by-class": by_class}


# --- pieces: one split and one draw of the noise, under every attack ---


@dataclass(frozen=True)
class Piece:
    """One seed of one crowd: what is computed at once."""

    crowd: str
    """"silos" or "crowd"."""
    people: str
    """"iid" or "by-class"."""
    seed: int
    epsilon: float = 1.0
    rules: tuple[str, ...] = ("default",)
    shares: tuple[float, ...] = SHARES
    attacks: tuple[str, ...] = ()
    """All of them, where it is empty."""
    roots: int = 240
    held: int = HELD


@dataclass(frozen=True)
class Result:
    """One run: a rule against an attack."""

    piece: Piece
    rule: str
    share: float
    attack: str
    error: float
    seconds: float
    success: float
    """How often a backdoor opens; of other attacks, how often it opens by chance."""


def roots_of(digits: Digits, count: int) -> Root:
    """The first public rows, as many of each class."""
    y = digits.data.y_public
    if count >= len(y):
        return digits.root(np.arange(len(y)))
    each = count // digits.classes
    return digits.root(np.sort(np.concatenate([np.flatnonzero(y == c)[:each] for c in range(digits.classes)])))


def run_piece(piece: Piece, digits: Digits) -> list[Result]:
    return (_silos if piece.crowd == "silos" else _crowd)(piece, digits)


def _silos(piece: Piece, digits: Digits) -> list[Result]:
    y, root = digits.data.y_train, roots_of(digits, piece.roots)
    rows = WAYS[piece.people](len(y) if piece.people == "iid" else y, SILOS, piece.seed).rows
    exact = np.stack([digits.moments(each) for each in rows])
    deviation = noise_of(digits.length, piece.epsilon, SILO_DELTA)
    most = _liars(max(piece.shares))
    noise = _noise(digits, SILOS + most, deviation, [SEED, piece.seed, 2])
    honest, samples = exact + noise[:SILOS], float(rows.shape[1])
    found: list[Result] = []
    for share in piece.shares:
        liars = _liars(share)
        for attack in (piece.attacks or (*SEEN, *HELD_OUT)) if liars else ("none",):
            ways = [np.zeros((0, digits.length))]
            if liars:
                ways = silo_lies(attack, digits, root, exact, honest, noise[SILOS : SILOS + liars])
            for rule in piece.rules:
                tried = (np.concatenate([honest, lies]) for lies in ways)
                found.append(_worst(piece, rule, share, attack, digits, root, tried, samples, deviation, liars))
    return found


def _liars(share: float) -> int:
    """How many liars join the honest silos, so that they are this share of all."""
    return round(SILOS * share / (1 - share))


def _noise(digits: Digits, count: int, deviation: float, seed: list[int]) -> Array:
    d = digits.width
    drawn = np.random.default_rng(seed).standard_normal((count, digits.length))
    drawn[:, d : d * (d + 1) // 2] *= math.sqrt(0.5)
    return drawn * deviation


def _worst(piece: Piece, rule: str, share: float, attack: str, digits: Digits, root: Root, tried: Iterable[Array],
           samples: float, deviation: float, f: int) -> Result:  # fmt: skip
    """The run that does most harm of those that a search tries."""
    worst: Result | None = None
    for uploads in tried:
        began = time.perf_counter()
        weights = learned(rule, digits, root, uploads, np.full(len(uploads), samples), deviation, f)
        took = time.perf_counter() - began
        here = Result(piece, rule, share, attack, digits.error(weights), took, digits.success(weights))
        worst = here if worst is None or here.error > worst.error else worst
    assert worst is not None
    return worst


def _crowd(piece: Piece, digits: Digits) -> list[Result]:
    y, root = digits.data.y_train, roots_of(digits, piece.roots)
    devices = len(y) // piece.held
    rows = WAYS[piece.people](len(y) if piece.people == "iid" else y, devices, piece.seed).rows
    exact = np.stack([digits.moments(each) for each in rows])
    deviation = noise_of(digits.length, piece.epsilon, CROWD_DELTA)
    found: list[Result] = []
    for share in piece.shares:
        size = COHORTS[share]
        chance = np.random.default_rng([SEED, piece.seed, 3, size])
        met = chance.permutation(devices)[: devices // size * size].reshape(-1, size)
        noise = _noise(digits, len(met), deviation, [SEED, piece.seed, 4, size])
        lying = np.zeros(devices, bool)
        lying[chance.permutation(devices)[: round(share * devices)]] = True
        for attack in (piece.attacks or (*CROWD_SEEN, *CROWD_HELD_OUT)) if share else ("none",):
            sums = crowd_sums(attack, digits, root, exact, met, lying, chance, deviation) + noise
            for rule in piece.rules:
                bad = int(lying[met].any(1).sum())
                found.append(_worst(piece, rule, share, attack, digits, root, (sums,), float(size * rows.shape[1]),
                                    deviation, bad))  # fmt: skip
    return found


def crowd_sums(attack: str, digits: Digits, root: Root, exact: Array, met: Integers, lying: Array,
               chance: np.random.Generator, deviation: float) -> Array:  # fmt: skip
    """[cohorts, L]: what cohorts [K, s] sum without their noise. A liar says of its own samples what is not so; one
    that takes over knows what a cohort sums on average, and says what turns that into what it likes; Sybils fill
    cohorts."""
    lies, size = Lies(digits), met.shape[1]
    way, _, kind = attack.rpartition("-")
    if attack.startswith(("takeover", "sybil")):
        way, _, kind = attack.partition("-")
    else:
        way, kind = "", attack
    bad = lying[met]  # [K, s]
    if way == "sybil":
        bad = np.zeros_like(bad)
        bad[: int(lying.sum()) // size] = True
    true = exact[met].sum(1)
    if kind in ("random", "ring"):
        wild = chance.random((len(met), exact.shape[1])) * (1 if kind == "random" else 1e6)
        return np.where(bad.any(1)[:, None], true + wild, true)
    if kind == "gaussian":
        more = _noise(digits, len(met), 10 * deviation, [SEED, 5])
        return true + more * np.sqrt(bad.sum(1) / size)[:, None]
    lie = lies.simple(kind, root)
    assert lie is not None
    if way == "takeover":
        usual = size * exact.mean(0)[None]
        return np.where(bad.any(1)[:, None], true - usual + lie(usual), true)
    own = exact[met.reshape(-1)]
    said = np.where(bad.reshape(-1)[:, None], lie(own), own)
    return said.reshape(*met.shape, -1).sum(1)


# --- the figure ---


def pieces(quick: bool, seeds: int, full: bool = False) -> list[Piece]:
    """Everything that the figure is made of. The default rule meets every attack in every seed at ε = 1, among silos
    and in the crowd, iid and by class; what else there is has fewer seeds or attacks, but in a full run."""
    if quick:
        attacks = ("label-flip", "mimic")
        return [Piece("silos", "iid", 0, 20.0, rules=("default", "median"), shares=(0.0, 0.6), attacks=attacks),
                Piece("crowd", "iid", 0, 20.0, shares=(0.0, 0.1), attacks=("label-flip",), held=6)]  # fmt: skip
    found: list[Piece] = []
    shares = tuple(COHORTS)
    for seed in range(seeds):
        for people in WAYS:
            found += [Piece("silos", people, seed), Piece("crowd", people, seed, shares=shares)]
        found.append(Piece("silos", "iid", seed, roots=20, shares=(0.0, 0.6, 0.9)))
    plain, others = ("mean", "median", "geometric-median"), tuple(rule for rule in RULES if rule != "default")
    for seed in range(seeds if full else 0):
        for people in WAYS:
            found += [
                Piece("silos", people, seed, rules=others),
                Piece("crowd", people, seed, rules=plain, shares=shares),
            ]
        found += [Piece("silos", "iid", seed, epsilon) for epsilon in (0.5, 0.125)]
    for seed in range(0 if full else min(seeds, 2)):
        found += [Piece("silos", "iid", seed, epsilon, shares=(0.0, 0.6, 0.9)) for epsilon in (0.5, 0.125)]
        found.append(Piece("silos", "iid", seed, rules=others, shares=(0.0, 0.2, 0.4, 0.6), attacks=OTHERS))
        attacks = ("label-flip", "takeover-label-flip")
        found.append(Piece("crowd", "iid", seed, rules=plain, shares=shares, attacks=attacks))
    return found


def robustness(quick: bool, trials: int | None, progress: Progress, full: bool = False) -> Figure:
    """`ours/robustness`: the worst attack and the worst seed against each rule, over the share of liars."""
    seeds = trials or (1 if quick else 5)
    work = pieces(quick, seeds, full)
    parts = Parts(progress, len(work) + 1)
    parts("features of every picture")
    digits = quick_digits() if quick else Digits.of(load("mnist-pixels", normalise="none"), MAP)
    with ThreadPoolExecutor(2) as pool:
        found: list[Result] = []
        for piece, results in zip(work, pool.map(lambda each: run_piece(each, digits), work), strict=True):
            parts(f"{piece.crowd}, {piece.people}, seed {piece.seed}")
            found += results
    return assemble(found, digits, seeds, quick)


def quick_digits() -> Digits:
    """scikit-learn's digits, of which the first stand for public rows, under a small map."""
    data = load("digits", normalise="l2")
    data = replace(data, x_public=data.x_train[:240], y_public=data.y_train[:240])
    settings = MapSettings("convolution", seed=1, filters=8, size=3, pool=3, keep=32)
    return Digits.of(data, settings)


@dataclass(frozen=True)
class Line:
    """One series: the results of one rule in one crowd, and where it is drawn."""

    key: str
    name: str
    results: tuple[Result, ...]
    panel: str
    privacy: PrivacyLabel

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(sorted({each.share for each in self.results}))

    def worst(self, share: float) -> tuple[Result, float]:
        """The run that went worst, and the mean over seeds under its attack."""
        here = [each for each in self.results if each.share == share]
        last = max(here, key=lambda each: each.error)
        return last, float(np.mean([each.error for each in here if each.attack == last.attack]))

    @property
    def series(self) -> Series:
        found = [self.worst(share) for share in self.shares]
        y, low = (numbers([each[0].error for each in found]), numbers([each[1] for each in found]))
        return Series(self.key, self.name, self.shares, y, low, y, self.privacy, self.panel, marks=True)

    @property
    def breaks(self) -> str:
        """The first share at which the worst run has more than twice the error without liars."""
        usual = self.worst(self.shares[0])[0].error
        at = [share for share in self.shares if self.worst(share)[0].error > 2 * usual]
        return f"{at[0]:.0%}" if at else f"none up to {self.shares[-1]:.0%}"


def assemble(found: list[Result], digits: Digits, seeds: int, quick: bool) -> Figure:
    """The figure from the runs, in whatever pieces they were made."""
    lines: dict[str, list[Result]] = {}
    for each in found:
        piece = each.piece
        start = piece.crowd if piece.roots == 240 else f"{piece.crowd}{piece.roots}"
        end = ("" if piece.people == "iid" else f"-{piece.people}") + (
            "" if quick or piece.epsilon == 1 else f"-e{piece.epsilon:g}"
        )
        lines.setdefault(f"{start}-{each.rule}{end}", []).append(each)
    shown = [_line(key, tuple(results)) for key, results in lines.items()]
    alone = _alone(digits)
    series = [each.series for each in shown]
    series += [
        Series("root-only", "the public rows alone", (x[0], x[-1]), (alone, alone), panel=panel,
               privacy=PrivacyLabel(silent=True))
        for panel, x in (("silos", SHARES),)
    ]  # fmt: skip
    named = {each.key: each for each in shown}
    claims = tuple(_claims(named, alone, quick))
    panels = (
        Panel("silos", "20 honest silos, one release each", "share of liars", "worst error", "linear", "log"),
        Panel("crowd", "996 devices in masked cohorts", "share of liars", "worst error", "linear", "log"),
    )
    name = digits.data.name
    return Figure("ours/robustness", "Worst error over the share of liars", name, seeds, tuple(series), claims, panels,
                  tuple(_notes(named, quick)), ends="worst error at the largest share")  # fmt: skip


def _line(key: str, results: tuple[Result, ...]) -> Line:
    piece = results[0].piece
    delta = SILO_DELTA if piece.crowd == "silos" else CROWD_DELTA
    words = {"iid": "", "by-class": ", by class"}[piece.people] + (
        f", {piece.roots} root rows" if piece.roots != 240 else ""
    )
    many = "" if piece.epsilon == 1 else f", ε = {piece.epsilon:g}"
    return Line(key, f"{results[0].rule}{words}{many}", results, piece.crowd,
                PrivacyLabel(epsilon=piece.epsilon, delta=delta))  # fmt: skip


def _alone(digits: Digits) -> float:
    """The error of the same model from the root rows alone."""
    h, y = digits.public, np.eye(digits.classes)[digits.data.y_public]
    return digits.error(solve(h.T @ h, h.T @ y, 0.0))


GOALS: Mapping[str, Mapping[float, tuple[float, float]]] = {
    "silos-default": {0.6: (0.044, 0.038), 0.9: (0.050, 0.042)},
    "crowd-default": {0.01: (0.050, 0.042), 0.05: (0.065, 0.056), 0.1: (0.090, 0.080)},
}
"""What the worst attack's worst seed should reach at most, and what it aims at, by share."""


def _claims(named: Mapping[str, Line], alone: float, quick: bool) -> Iterable[Claim]:
    if quick:
        ours = named["silos-default"].worst(0.6)[0].error - named["silos-default"].worst(0.0)[0].error
        yield Claim("liars-cost-little", "Liars that are 60 % cost less than 0.1 of error", ours, ours < 0.1)
        return
    for key, goals in GOALS.items():
        for share, (most, aim) in goals.items():
            for end in ("", "-by-class"):
                worst, _ = named[key + end].worst(share)
                who = f"{key}{end} at {share:.0%} liars"
                text = f"{who}: at most {most:g}, worst attack ({worst.attack}) and worst seed"
                yield Claim(f"{key}{end}-{share:g}", text, worst.error, worst.error <= most)
                yield Claim(f"{key}{end}-{share:g}-aim", f"{who}: the aim of {aim:g}", worst.error, worst.error <= aim)
    for key in ("silos-default", "crowd-default"):
        held = [each for each in named[key].results if each.attack in (*HELD_OUT, *CROWD_HELD_OUT)]
        seen = [each for each in named[key].results if each.attack in (*SEEN, *CROWD_SEEN)]
        gap = max(each.error for each in held) - max(each.error for each in seen)
        text = (
            f"{key}: attacks that were out of sight are at most 0.005 worse than those that were seen; ours is how much"
        )
        yield Claim(f"{key}-held-out", text, gap, gap <= 0.005)
    for share, paper in ((0.0, 0.043), (0.6, 0.044), (0.9, 0.047)):
        ours = named["silos-default"].worst(share)[0].error
        text = f"Xiang et al. 2023 at ε = 1 and {share:.0%} liars; ours is the worst of all attacks and seeds"
        yield Claim(f"xiang-{share:g}", text, ours, ours <= paper, paper=paper)
    worst = max(named["silos-default"].worst(share)[0].error for share in (0.6, 0.9))
    yield Claim("beats-root-only", f"The silos are better than the root rows alone, which are at {alone:.3f}", worst,
                worst < alone)  # fmt: skip


def _notes(named: Mapping[str, Line], quick: bool) -> Iterable[str]:
    if quick:
        yield "A quick run, on 1,437 digits: too small to judge a rule by."
        return
    yield (
        "y is the worst attack's worst seed, low the mean over seeds under that attack. Errors are on all 10,000 test "
        "images. The 240 public rows score and choose; no label of theirs is in a weight, but in `root-only`."
    )
    yield (
        f"Attacks on silos that were seen while thresholds were fixed: {', '.join(SEEN)}; held out: "
        f"{', '.join(HELD_OUT)}."
    )
    yield (
        f"Attacks on the crowd that were seen: {', '.join(CROWD_SEEN)}; held out: {', '.join(CROWD_HELD_OUT)}. "
        "Cohorts have 50, 50, 20 and 10 devices for 0, 1, 5 and 10 % liars: a task names the share that it expects."
    )
    for key, line in named.items():
        base = line.worst(line.shares[0])[0]
        took = max(each.seconds for each in line.results)
        yield f"{key}: breaks at {line.breaks}; {base.error:.4f} without liars; up to {took:.1f} s a round."
    doors = [each for line in named.values() for each in line.results if each.attack == "backdoor"]
    worst = max(doors, key=lambda each: each.success)
    yield (
        f"Backdoor: marked pictures are taken for a 0 in at most {worst.success:.1%} of cases (`{worst.rule}`, "
        f"{worst.share:.0%} liars)."
    )
