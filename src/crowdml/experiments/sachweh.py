"""Sachweh, Boiar and Liebig, "Differentially private learning from label proportions": Figs. 2 and 3.

Traffic of another city than theirs, from the same kind of signals (`scats`): w = 5, r = 1, five bins. As published:
four places and their three nearest, ten folds, noise of scale 1 / epsilon, drawn anew in each fold; that is charged as
what it is, 18 epsilon for a measurement, and nothing at all is promised where rows are normalised in the loop. Sound:
all places, held-out days, integer noise of scale 2 / epsilon, drawn once. Beside them: label proportions without noise
(LLP), a central kNN on everybody's windows, each place's most frequent class, and clusters with a place's own labels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import msgpack
import numpy as np

from crowdml.arrays import Array, Integers
from crowdml.datasets import Readings, made_up_city, series, traffic
from crowdml.experiments.figure import Claim, Figure, Panel, PrivacyLabel, Second, Series, level, level_at, over_trials
from crowdml.experiments.published.proportions import FOLDS, IN_LOOP, ONCE, WARNING, noisy_proportions, real_epsilon
from crowdml.experiments.registry import Parts, Progress
from crowdml.features.series import label, look_ahead
from crowdml.messages import Envelope
from crowdml.models.clusters import Voters, assign, fit, trust, verdicts
from crowdml.models.proportions import Rule
from crowdml.price import Price
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocols import find
from crowdml.protocols.proportions import mechanisms, near
from crowdml.sim import cities
from crowdml.task import Features, Labels, Place, Privacy, Task
from crowdml.wire.envelopes import pack_envelope
from crowdml.wire.keys import SIGNATURE_SIZE
from crowdml.wire.statements import Statement

BATCHES = (8, 16, 32, 64, 128)
CLUSTERS = (8, 16, 32, 64)
EPSILONS = (0.01, 0.05, 0.1, 0.2, 0.5, 1.0)
EPSILON = 0.1
PEERS = 3
MOST_PEERS = 10
NEIGHBOURS = 16
"""k of kNN."""
RESTARTS = 10
ACCURACY = "accuracy"
WITHIN = 0.02
"""Two points: what "nearly as good as LLP" is here."""
NOT_COVERED = ("tuning", "float-noise")
"""What the paper's numbers leave out: b = 32 and k = 16 were the best in the same folds."""

UNIT = "measurement"
"""What is protected: one reading of one place."""

INK = {
    "llp": 0,
    "llp-shares": 7,
    "p-llp": 1,
    "knn": 2,
    "published": 3,
    "alone": 4,
    "in-loop": 5,
    "handlers": 6,
    "majority": 8,
    "weighted": 9,
    "more": 10,
}
"""Which colour each method has, in every panel."""


@dataclass(frozen=True)
class City:
    """Windows x [places, n, w] and labels y [places, n] to learn from, the same to predict, and who is near whom."""

    x: Array
    y: Integers
    x_test: Array
    y_test: Integers
    nearest: Integers
    classes: int

    @property
    def places(self) -> range:
        return range(len(self.y))


@dataclass(frozen=True)
class Case:
    """Data and size of a figure: the paper's, or a quick one."""

    readings: Readings
    trials: int
    quick: bool
    seed: int = 2021

    @property
    def seeds(self) -> list[int]:
        return [self.seed + 1_000_003 * trial for trial in range(self.trials)]

    @property
    def chosen(self) -> list[int]:
        """The four places of the figures as published: evenly along the list, for the paper names none."""
        return np.linspace(0, self.readings.places - 1, 2 if self.quick else 4).round().astype(int).tolist()

    @cached_property
    def quantiles(self) -> tuple[float, ...]:
        """Edges that leave as many public readings in each of five bins, by whole vehicles."""
        return tuple(np.unique(np.quantile(np.concatenate(self.readings.public), (0.2, 0.4, 0.6, 0.8)).round()))

    def city(self, edges: Sequence[float]) -> City:
        """By days: those that are learned from, and those held out."""
        learned = self.readings.learned
        (x, y), (x_test, y_test) = (
            cut(values, edges) for values in (self.readings.values[:, :learned], self.readings.values[:, learned:])
        )
        task = make_task(self.readings, traffic.EDGES, batch=32, epsilon=1.0, most=self.most_peers)
        return City(x, y, x_test, y_test, near(task, self.most_peers), len(edges) + 1)

    @property
    def days(self) -> int:
        """Days that are learned from, where days are held out."""
        return self.readings.learned // self.readings.day

    @property
    def most_peers(self) -> int:
        return min(MOST_PEERS, self.readings.places - 1)


def cut(values: Array, edges: Sequence[float]) -> tuple[Array, Integers]:
    """values [places, n] -> windows [places, m, w] and labels [places, m]."""
    parts = [look_ahead(each, traffic.WIDTH, traffic.HORIZON) for each in values]
    return np.stack([x for x, _ in parts]), np.stack([label(target, edges) for _, target in parts])


def make_task(
    readings: Readings, edges: Sequence[float], *, batch: int, epsilon: float, k: int = 16, most: int = PEERS
) -> Task:
    """The sound form: what `crowdml join` would take part in."""
    return Task(
        name="traffic",
        features=Features(traffic.WIDTH, kind="windows", horizon=traffic.HORIZON),
        labels=Labels(tuple(map(str, range(len(edges) + 1))), bins=tuple(map(Fraction, edges))),
        model={"kind": "clusters", "k": k, "restarts": RESTARTS},
        protocol={"kind": "proportions", "batch": batch, "peers": most, "memory": -(-readings.learned // batch)},
        privacy=Privacy("discrete-laplace", {"counts": Fraction(repr(epsilon))}, 1e-6),
        places=tuple(
            Place(name, Fraction(f"{lat:.7f}"), Fraction(f"{lon:.7f}"))
            for name, lat, lon in zip(readings.names, readings.lat, readings.lon, strict=True)
        ),
    )


# --- what devices say, and what they learn ---


def count(y: Integers, batch: int, classes: int) -> Integers:
    """Labels [places, n] -> counts [places, h, classes] of whole batches; what is left fills none."""
    batches = y.shape[1] // batch
    cells = y[:, : batches * batch].reshape(len(y), batches, batch, 1) == np.arange(classes)
    return cells.sum(axis=2).astype(np.int32)


@dataclass(frozen=True)
class Said:
    """What places say of their batches, trial by trial: counts [trials, places, h, classes], noise of `variance`."""

    counts: Array
    variance: float
    solver: Any = "shares"
    rule: Rule = "raw"


def exact(counts: Integers, solver: str = "search") -> Said:
    """LLP: no noise; labels by the published search, or by our least squares."""
    return Said(counts[None], 0.0, solver)


def sound(
    case: Case, counts: Integers, epsilon: float, *, salt: int = 0, solver: str = "shares", rule: Rule = "raw"
) -> Said:
    """The mechanism of a task's `counts`, on all batches at once."""
    task = make_task(case.readings, traffic.EDGES, batch=32, epsilon=epsilon, most=1)
    row: Any = mechanisms(task)["counts"]
    noise = [SeededSource(stream(seed, salt, 0)).discrete_laplace(row.scale, like=counts) for seed in case.seeds]
    return Said(counts + np.stack(noise), row.noise_variance, solver, rule)


def published(case: Case, counts: Integers, epsilon: float, normalise: str, *, salt: int) -> Said:
    """The pseudocode, its rows as counts again: what is learned from is what it hands out, unchanged."""
    flat, batch = counts.reshape(-1, counts.shape[-1]), counts[0, 0].sum()
    rows = [
        batch * noisy_proportions(flat, epsilon, normalise, np.random.default_rng([seed, salt])).reshape(counts.shape)
        for seed in case.seeds
    ]
    return Said(np.stack(rows), 0.0, "search")


@dataclass(frozen=True)
class Learned:
    """One place's clusters with the labels of every model, and how its test rows fall: hits [k, classes]."""

    labels: Integers
    """[trials, 1 + c, k]: its own first, then the nearest, nearest first."""
    hits: Integers
    own: Integers
    """[k, classes]: how the rows that it learned from fall."""

    def accuracy(self, many: int, *, weighted: bool = False) -> Array:
        """[trials]: of the vote of its own model and of its `many` nearest, all alike or weighed by its own labels."""
        total = max(1, int(self.hits.sum()))
        cells = np.arange(len(self.hits))
        models = [each[: 1 + many] for each in self.labels]
        voted = [
            verdicts(Voters(np.zeros((0, 0)), each, trust(each, self.own) if weighted else None)) for each in models
        ]
        return np.array([self.hits[cells, each].sum() / total for each in voted])


def learn(city: City, place: int, own: Integers, said: Said, *, batch: int, k: int, many: int, seed: int) -> Learned:
    """What a device at this place makes of it, by its own function; models of all trials have the same clusters."""
    batches, trials = own.shape[1], len(said.counts)
    heard = said.counts[:, city.nearest[place, :many]].reshape(trials * many, batches, -1)
    voters = fit(
        city.x[place, : batches * batch],
        own[place],
        heard,
        np.ones((trials * many, batches), bool),
        k=k,
        restarts=RESTARTS,
        seed=seed + place,
        variance=said.variance,
        solver=said.solver,
        rule=said.rule,
    )
    others = voters.labels[1:].reshape(trials, many, k)
    labels = np.concatenate([np.broadcast_to(voters.labels[:1], (trials, 1, k)), others], axis=1)
    rows = slice(batches * batch)
    return Learned(
        labels,
        _hits(voters.centres, city.x_test[place], city.y_test[place], city.classes),
        _hits(voters.centres, city.x[place, rows], city.y[place, rows], city.classes),
    )


def _hits(centres: Array, x: Array, y: Integers, classes: int) -> Integers:
    """[k, classes]: rows of each label in each cluster."""
    cells = assign(centres, x) * classes + y
    return np.bincount(cells, minlength=len(centres) * classes).reshape(-1, classes)


def score(
    city: City,
    own: Integers,
    said: Said,
    *,
    batch: int,
    k: int,
    seed: int,
    many: int = PEERS,
    places: Sequence[int] = (),
) -> Array:
    """[trials]: mean accuracy over places."""
    found = [
        learn(city, place, own, said, batch=batch, k=k, many=many, seed=seed).accuracy(many)
        for place in places or city.places
    ]
    return np.mean(found, axis=0)


def ours(case: Case, city: City, epsilon: float | None, *, batch: int, k: int, **how: Any) -> Array:
    """[trials]: mean accuracy over places of the sound form at this epsilon; None: of LLP, without noise."""
    own = count(city.y, batch, city.classes)
    said = exact(own, **how) if epsilon is None else sound(case, own, epsilon, **how)
    return score(city, own, said, batch=batch, k=k, seed=case.seed)


# --- what it is compared with ---


def alone(city: City, *, k: int, seed: int, places: Sequence[int] = ()) -> float:
    """Clusters that each place labels by its own labels, which it has: no messages at all."""
    found = []
    for place in places or city.places:
        x, y = city.x[place], city.y[place]
        one = np.zeros((1, city.classes))
        voters = fit(
            x, one, np.zeros((0, 1, city.classes)), np.zeros((0, 1)), k=k, restarts=1, seed=seed + place, variance=0.0
        )
        mine = _hits(voters.centres, x, y, city.classes).argmax(axis=1)
        hits = _hits(voters.centres, city.x_test[place], city.y_test[place], city.classes)
        found.append(hits[np.arange(k), mine].sum() / hits.sum())
    return float(np.mean(found))


def majority(city: City, places: Sequence[int] = ()) -> float:
    """Each place's most frequent class."""
    usual = [np.bincount(city.y[place], minlength=city.classes).argmax() for place in places or city.places]
    return float(
        np.mean([(city.y_test[place] == most).mean() for place, most in zip(places or city.places, usual, strict=True)])
    )


def nearest_neighbours(city: City, places: Sequence[int], pool: Sequence[int]) -> float:
    """kNN (k = 16) on the windows of all of `pool` in one place."""
    from sklearn.neighbors import KNeighborsClassifier  # an extra of the simulator

    model = KNeighborsClassifier(NEIGHBOURS, algorithm="kd_tree")
    model.fit(np.concatenate(city.x[list(pool)]), np.concatenate(city.y[list(pool)]))
    told = np.asarray(model.predict(np.concatenate(city.x_test[list(places)])))
    return float((told == np.concatenate(city.y_test[list(places)])).mean())


# --- bytes ---


@dataclass(frozen=True)
class Traffic:
    """Kilobytes of one device in the learned days, sealed and signed: the mean over all places."""

    said: float
    """Label counts, one envelope a batch for all who listen; without noise they are as long."""
    heard: float
    """What its relay hands it: the counts of those it listens to, and of those it writes to."""
    raw: float
    """Its readings themselves to one server, as often."""


def kilobytes(case: Case, batch: int) -> Traffic:
    """What the protocol's own handlers send. Nobody could seal readings: theirs are such envelopes, 2 bytes each."""
    task = make_task(case.readings, traffic.EDGES, batch=batch, epsilon=EPSILON)
    city = cities.exchange(task, case.readings.values[:, : case.readings.learned], seed=case.seed)
    messages = int(city.check_ins[0])
    return Traffic(city.said.mean() / 1000, city.heard.mean() / 1000, _raw_bytes(task, batch, messages) / 1000)


def _raw_bytes(task: Task, batch: int, messages: int) -> int:
    """Bytes of `messages` signed envelopes, each with a batch of readings as 16-bit integers, to one server."""
    priced = Price.of(find(task), task)
    readings = np.zeros(batch, "<i2")
    body = bytes(msgpack.packb({"readings": ["<i2", [batch], readings.tobytes()]}) or b"")
    total = 0
    for seq in range(1, messages + 1):
        envelope = Envelope(task.hash, f"{0:032x}", frozenset({"server"}), seq, "raw/readings/1", body)
        statement = Statement.of(priced.device(seq), seq * batch, priced.sample())
        total += SIGNATURE_SIZE + len(pack_envelope(envelope, statement))
    return total


# --- as published: ten folds ---


def folds(case: Case, edges: Sequence[float]) -> Iterator[City]:
    """All days in ten pieces: each place learns from nine and is tested on the tenth."""
    x, y = cut(case.readings.values, edges)
    task = make_task(case.readings, traffic.EDGES, batch=32, epsilon=1.0)
    nearest, classes = near(task, PEERS), len(edges) + 1
    pieces = np.array_split(np.arange(y.shape[1]), 3 if case.quick else FOLDS)
    for out in pieces:
        rest = np.setdiff1d(np.arange(y.shape[1]), out)
        yield City(x[:, rest], y[:, rest], x[:, out], y[:, out], nearest, classes)


@dataclass(frozen=True)
class Setting:
    """One point of a figure."""

    batch: int
    k: int
    epsilon: float


def cross_validated(case: Case, settings: Sequence[Setting], tell: Parts) -> dict[str, Array]:
    """[trials, settings] of each method as published, and [1] of those that have none; noise anew in each fold."""
    found: dict[str, list[list[Array]]] = {name: [] for name in ("llp", "published", "in-loop", "p-llp")}
    plain: dict[str, list[float]] = {"knn": [], "majority": []}
    for number, city in enumerate(folds(case, traffic.EDGES)):
        tell(f"fold {number + 1}")
        pool = sorted({*case.chosen, *city.nearest[case.chosen].ravel().tolist()})
        plain["knn"].append(nearest_neighbours(city, case.chosen, pool))
        plain["majority"].append(majority(city, case.chosen))
        rows: dict[str, list[Array]] = {name: [] for name in found}
        for setting in settings:
            own = count(city.y, setting.batch, city.classes)
            sayings = {
                "llp": exact(own),
                "published": published(case, own, setting.epsilon, ONCE, salt=number),
                "in-loop": published(case, own, setting.epsilon, IN_LOOP, salt=100 + number),
                "p-llp": sound(case, own, setting.epsilon, salt=200 + number),
            }
            for name, said in sayings.items():
                told = score(city, own, said, batch=setting.batch, k=setting.k, seed=case.seed, places=case.chosen)
                rows[name].append(np.broadcast_to(told, case.trials))
        for name, each in rows.items():
            found[name].append(each)
    means = {name: np.mean(values, axis=0).T for name, values in found.items()}
    return {**means, **{name: np.array([np.mean(values)]) for name, values in plain.items()}}


def uses(case: Case) -> int:
    """In how many folds a measurement is counted."""
    return (3 if case.quick else FOLDS) - 1


def published_label(case: Case, epsilon: float) -> PrivacyLabel:
    """What a measurement pays for all folds, replace-one, beside the claim."""
    honest = round(real_epsilon(epsilon, ONCE, uses=uses(case)), 9)
    return PrivacyLabel(UNIT, honest, claimed=epsilon, as_published=True, not_covered=NOT_COVERED)


def published_series(
    case: Case, x: Sequence[float], told: Mapping[str, Array], panel: str, suffix: str, epsilon: float
) -> list[Series]:
    """The five curves of a panel as published. `suffix` keeps keys apart; "" names the ones that others look for."""
    nothing = PrivacyLabel(UNIT, as_published=True, not_covered=NOT_COVERED)
    fresh = PrivacyLabel(UNIT, round(uses(case) * epsilon, 9), not_covered=("tuning",))
    end = f"-{suffix}" if suffix else ""

    def line(key: str, name: str, label_: PrivacyLabel, method: str) -> Series:
        trials = told[method][:1] if method == "llp" else told[method]  # without noise all trials are one
        return over_trials(key, name, x, trials, label_, panel=panel, marks=True, ink=INK[method])

    def flat(key: str, name: str, method: str) -> Series:
        nowhere = PrivacyLabel(UNIT, silent=method == "majority")
        return level_at(float(told[method][0]), key, name, x, nowhere, panel, INK[method])

    return [
        line(f"llp-cv{end}", "LLP, no noise", PrivacyLabel(UNIT, not_covered=("tuning",)), "llp"),
        line(f"p-llp-as-published{end}", "p-LLP normalised once", published_label(case, epsilon), "published"),
        line(f"p-llp-in-loop{end}", "p-LLP as printed, in the loop (ε = ∞)", nothing, "in-loop"),
        line(f"p-llp-cv{end}", "p-LLP ours, noise anew in each fold", fresh, "p-llp"),
        flat(f"knn-cv{end}", "kNN, central", "knn"),
        flat(f"majority-cv{end}", "most frequent class", "majority"),
    ]


# --- sound: held-out days ---


BASELINES = {"knn": "kNN, central", "alone": "own clusters, own labels", "majority": "most frequent class"}
"""What needs no messages, or no privacy."""


def baselines(case: Case, city: City, k: int = 16) -> dict[str, float]:
    """The accuracy of each of `BASELINES` on one city."""
    central = nearest_neighbours(city, list(city.places), list(city.places))
    return {"knn": central, "alone": alone(city, k=k, seed=case.seed), "majority": majority(city)}


def level_series(x: Sequence[float], panel: str, suffix: str, known: Mapping[str, float]) -> list[Series]:
    """These baselines as level lines."""
    end = f"-{suffix}" if suffix else ""
    return [
        level_at(value, f"{key}{end}", BASELINES[key], x, PrivacyLabel(UNIT, silent=key != "knn"), panel, INK[key])
        for key, value in known.items()
    ]


def curve(
    key: str, name: str, x: Sequence[float], told: Sequence[Array], panel: str, epsilon: float | None, ink: str
) -> Series:
    """A sound series from [trials] at each x; without noise all trials are one."""
    trials, label_ = np.stack(told, axis=1), PrivacyLabel(UNIT, epsilon)
    return over_trials(key, name, x, trials, label_, panel=panel, marks=True, ink=INK[ink])


def _case(quick: bool, trials: int | None) -> Case:
    if quick:
        return Case(made_up_city(places=5, days=7, learned_days=5, seed=11), trials or 1, quick)
    return Case(series(traffic.NAME), trials or 5, quick)


def fig2(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """Accuracy by batch size and by clusters at epsilon 0.1: as published, and sound."""
    case = _case(quick, trials)
    sizes, clusters = ((8, 32), (4, 8)) if quick else (BATCHES, CLUSTERS)
    fixed, at_b = (8, 16) if quick else (16, 50)
    pieces = 3 if quick else FOLDS
    tell = Parts(progress, 2 * pieces + 2 * (1 + len(sizes)) + len(clusters) + 1)
    by_b = cross_validated(case, [Setting(b, fixed, EPSILON) for b in sizes], tell)
    by_k = cross_validated(case, [Setting(at_b, k, EPSILON) for k in clusters], tell)
    series_ = published_series(case, sizes, by_b, "published-b", "", EPSILON)
    series_ += published_series(case, clusters, by_k, "published-k", "k", EPSILON)
    ends: dict[str, Array] = {}
    found: dict[str, dict[str, float]] = {}
    for edges, panel, suffix in ((traffic.EDGES, "sound-b", ""), (case.quantiles, "quantiles-b", "quantiles")):
        city = case.city(edges)
        tell(f"{panel}: what it is compared with")
        known = found[panel] = baselines(case, city, fixed)
        without: list[Array] = []
        squares: list[Array] = []
        private: list[Array] = []
        for b in tell.each(sizes, f"{panel}: b = {{}}"):
            without.append(ours(case, city, None, batch=b, k=fixed))
            squares.append(ours(case, city, None, batch=b, k=fixed, solver="shares"))
            private.append(ours(case, city, EPSILON, batch=b, k=fixed))
        end = f"-{suffix}" if suffix else ""
        series_ += [
            curve(f"llp{end}", "LLP, no noise", sizes, without, panel, None, "llp"),
            curve(f"llp-shares{end}", "LLP by our least squares, no noise", sizes, squares, panel, None, "llp-shares"),
            curve(f"p-llp{end}", "p-LLP, ours", sizes, private, panel, EPSILON, "p-llp"),
            *level_series(sizes, panel, suffix, known),
        ]
        ends[panel] = np.array([np.mean(each, axis=1) for each in (without, squares, private)])
    city = case.city(traffic.EDGES)
    both: list[list[Array]] = [[], []]
    own_labels: list[Array] = []
    for k in tell.each(clusters, "sound-k: k = {}"):
        own_labels.append(np.array([alone(city, k=k, seed=case.seed)]))
        both[0].append(ours(case, city, None, batch=at_b, k=k))
        both[1].append(ours(case, city, EPSILON, batch=at_b, k=k))
    series_ += [
        curve("llp-k", "LLP, no noise", clusters, both[0], "sound-k", None, "llp"),
        curve("p-llp-k", "p-LLP, ours", clusters, both[1], "sound-k", EPSILON, "p-llp"),
        *level_series(clusters, "sound-k", "k", {key: found["sound-b"][key] for key in ("knn", "majority")}),
        replace(
            curve("alone-k", "own clusters, own labels", clusters, own_labels, "sound-k", None, "alone"),
            privacy=PrivacyLabel(UNIT, silent=True),
        ),
    ]
    tell("bytes")
    sent = [kilobytes(case, b) for b in sizes]
    daily = make_task(case.readings, traffic.EDGES, batch=case.readings.day, epsilon=EPSILON)
    by_day = _raw_bytes(daily, case.readings.day, case.readings.learned // case.readings.day) / 1000
    none = [0.0] * len(sizes)
    for key, name, told, ink in (
        ("llp", "LLP sends: label counts, one envelope for all", [each.said for each in sent], "llp"),
        ("p-llp", "p-LLP sends: the same", [each.said for each in sent], "p-llp"),
        ("heard", "either hears from its peers", [each.heard for each in sent], "more"),
        ("knn", "kNN: the readings themselves, as often", [each.raw for each in sent], "knn"),
        ("knn-daily", "kNN: the readings themselves, once a day", [by_day] * len(sizes), "handlers"),
        ("alone", "own clusters, own labels: nothing", none, "alone"),
        ("majority", "most frequent class: nothing", none, "majority"),
    ):
        line = Series(f"kilobytes-{key}", name, tuple(map(float, sizes)), tuple(round(each, 3) for each in told))
        series_.append(replace(line, privacy=PrivacyLabel(UNIT), panel="bytes", marks=True, ink=INK[ink]))
    folded = f"{len(case.chosen)} places, {pieces} folds"
    by_public = f"{len(city.y)} places, held-out days"
    over_b: Any = {"x_label": "batch size b", "y_label": ACCURACY, "x_scale": "log", "x_ticks": sizes}
    over_k: Any = {**over_b, "x_label": "clusters k", "x_ticks": clusters}
    in_bytes: Any = {**over_b, "y_label": "kilobytes", "y_scale": "symlog", "priced": False}
    panels = (
        Panel("published-b", f"As published: {folded}, k = {fixed}", **over_b),
        Panel("published-k", f"As published: {folded}, b = {at_b}", **over_k),
        Panel("sound-b", f"Sound: {by_public}, k = {fixed}", **over_b),
        Panel("sound-k", f"Sound: {by_public}, b = {at_b}", **over_k),
        Panel("quantiles-b", "Sound: the same with bins of equal size", **over_b),
        Panel("bytes", f"What one device sends and hears in {case.days} days", **in_bytes),
    )
    claims = _fig2_claims(case, sizes, by_b, by_k, ends, sent, by_day)
    title, at = "Label proportions by batch size and by clusters", "accuracy at the largest b or k"
    return Figure(
        "sachweh/fig2", title, case.readings.name, case.trials, tuple(series_), claims, panels, _notes(case), ends=at
    )


def _notes(case: Case) -> tuple[str, ...]:
    return (
        WARNING,
        f"As published a measurement is counted in {uses(case)} folds, each with its own noise; replace-one doubles: "
        f"{2 * uses(case)} ε. Ours in the same folds pays {uses(case)} ε; on held-out days it is counted once.",
        "ε protects one measurement of a quarter of an hour, not a driver, who is in many.",
        "Each point is a run of its own: whoever let all of them out would pay their sum.",
        "A device's own model uses its own proportions without noise, in every curve; it never leaves.",
        "Edges of the bins of equal size, from public places: "
        + ", ".join(f"{edge:g}" for edge in case.quantiles)
        + ".",
    )


def _fig2_claims(
    case: Case,
    sizes: Sequence[int],
    by_b: Mapping[str, Array],
    by_k: Mapping[str, Array],
    ends: Mapping[str, Array],
    sent: Sequence[Traffic],
    by_day: float,
) -> tuple[Claim, ...]:
    llp, once = by_b["llp"].mean(0), by_b["published"].mean(0)
    gaps = llp - once
    best = sizes[int(llp.argmax())]
    late = max((abs(gap) for b, gap in zip(sizes, gaps, strict=True) if b > 32), default=abs(float(gaps[-1])))
    drop = float((by_k["llp"].mean(0) - by_k["published"].mean(0)).max())
    plain, squares, private = ends["sound-b"]
    enough, more = (
        [b for b, best, told in zip(sizes, line, private, strict=True) if best - told <= WITHIN]
        for line in (plain, squares)
    )
    honest = real_epsilon(EPSILON, ONCE, uses=uses(case))
    gap_quantiles = float((ends["quantiles-b"][0] - ends["quantiles-b"][2])[-1])
    return (
        Claim(
            "llp",
            "LLP is between 0.65 and 0.67 (in these folds; ours is the mean over b)",
            float(llp.mean()),
            bool(llp.min() >= 0.65 and llp.max() <= 0.67),
            paper=0.66,
        ),
        Claim("best-b", "b = 16 is best for LLP", float(best), best == 16, paper=16.0),
        Claim(
            "small-batches-suffer",
            "p-LLP differs most at b = 8; ours is the gap to LLP there, as published",
            float(gaps[0]),
            int(gaps.argmax()) == 0,
        ),
        Claim(
            "large-batches-alike",
            "For b over 32 p-LLP is within 0.005 of LLP; ours is the largest gap, as published",
            late,
            late <= 0.005,
            paper=0.005,
        ),
        Claim("clusters-drop", "Over k, p-LLP drops by up to 0.06 below LLP", drop, drop >= 0.04, paper=0.06),
        Claim(
            "epsilon",
            "What is shown costs a measurement ε = 0.1 (P2, P4: ten folds, replace-one)",
            honest,
            False,
            paper=EPSILON,
        ),
        Claim(
            "within-2",
            f"The smallest of these b at which ours comes within 2 points of LLP at an honest ε = {EPSILON:g}, both at "
            "that b (0: none)",
            float(enough[0] if enough else 0),
            bool(enough),
        ),
        Claim("within-2-shares", "The same, of LLP by our least squares", float(more[0] if more else 0), bool(more)),
        Claim(
            "gap-quantiles",
            f"With bins of equal size, ours at b = {sizes[-1]} is within 2 points of LLP; ours is the gap",
            gap_quantiles,
            gap_quantiles <= WITHIN,
        ),
        Claim(
            "bytes",
            f"Label counts save bytes: at b = {sizes[-1]} a device sends this share of what its readings would take",
            sent[-1].said / sent[-1].raw,
            sent[-1].said < sent[-1].raw,
        ),
        Claim(
            "bytes-daily",
            "Label counts save bytes: at b = 32 a device sends this share of what its readings take once a day",
            sent[sizes.index(32)].said / by_day,
            sent[sizes.index(32)].said < by_day,
        ),
    )


def fig3(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """Accuracy over epsilon at b = 32 and k = 16: as published, sound, by peers, by rule, and by batch size."""
    case = _case(quick, trials)
    epsilons = (0.1, 1.0) if quick else EPSILONS
    batch, k = (16, 8) if quick else (32, 16)
    sizes = (8, 32) if quick else BATCHES
    rules = list(RULES)[:1] if quick else list(RULES)
    pieces = 3 if quick else FOLDS
    parts = pieces + 2 * (1 + len(epsilons)) + 3 + len(rules) + len(sizes) + (0 if quick else 1)
    tell = Parts(progress, parts)
    folded = cross_validated(case, [Setting(batch, k, epsilon) for epsilon in epsilons], tell)
    series_ = published_series(case, epsilons, folded, "published", "", epsilons[-1])
    ends: dict[str, Array] = {}
    for edges, panel, suffix in ((traffic.EDGES, "sound", ""), (case.quantiles, "quantiles", "quantiles")):
        city = case.city(edges)
        tell(f"{panel}: what it is compared with")
        known = baselines(case, city, k)
        told = tell.each(epsilons, f"{panel}: ε = {{:g}}")
        private = [ours(case, city, epsilon, batch=batch, k=k) for epsilon in told]
        end, where = (f"-{suffix}", panel) if suffix else ("", f"{panel} rules")
        without = ours(case, city, None, batch=batch, k=k)
        squares = ours(case, city, None, batch=batch, k=k, solver="shares")
        exactly_ = (("llp", "LLP, no noise", without), ("llp-shares", "LLP by our least squares, no noise", squares))
        series_ += [
            *(
                level_at(float(told.mean()), f"{key}{end}", name, epsilons, PrivacyLabel(UNIT), panel, INK[key])
                for key, name, told in exactly_
            ),
            curve(f"p-llp{end}", "p-LLP, ours", epsilons, private, where, epsilons[-1], "p-llp"),
            *level_series(epsilons, panel, suffix, known),
        ]
        ends[panel] = np.array([without.mean(), squares.mean(), known["alone"], *np.mean(private, axis=1)])
    city = case.city(traffic.EDGES)
    by_peers, below = _by_peers(case, city, batch, k, tell)
    series_ += by_peers
    lonely = next(each for each in series_ if each.key == "alone")
    series_.append(replace(level(lonely, range(case.most_peers + 1)), key="alone-peers", panel="peers"))
    series_ += _by_rule(case, city, batch, k, epsilons, rules, tell)
    grid, exactly = _by_batch(case, city, k, epsilons, sizes, tell)
    series_ += grid
    claims = [*_fig3_claims(case, epsilons, folded, ends, grid, exactly, batch, {each.key: each for each in series_})]
    claims += _weighted_claims(city, {each.key: each for each in series_}["weighted"], below)
    if not quick:
        tell("the protocol's own handlers")
        series_ += _by_handlers(case, batch, k, claims, {each.key: each for each in series_})
    places = len(city.y)
    over: dict[str, Any] = {
        "x_label": "ε of a measurement",
        "y_label": ACCURACY,
        "x_scale": "log",
        "priced": False,
        "x_ticks": epsilons,
    }
    really = Second(
        f"ε that a measurement pays in all folds: {2 * uses(case)} times as much (ours: {uses(case)} times)",
        epsilons,
        tuple(round(2 * uses(case) * epsilon, 9) for epsilon in epsilons),
    )
    peers = tuple(range(case.most_peers + 1))
    folded_ = f"As published: {len(case.chosen)} places, {pieces} folds, b = {batch}, k = {k}"
    panels = (
        replace(Panel("published", folded_, **over), x_label="ε as claimed, of one fold", second=really),
        Panel("sound", f"Sound: {places} places, held-out days, b = {batch}, k = {k}", **over),
        Panel("quantiles", "Sound: the same with bins of equal size", **over),
        Panel("peers", f"Sound: by the number of peers, b = {batch}", "peers c", ACCURACY, x_ticks=peers),
        Panel("rules", f"Sound: least squares and the published search, b = {batch}", **over),
        Panel("batches", "Sound: by batch size", **over),
    )
    title, at, shown = "Label proportions over epsilon", "accuracy at the largest ε, or c", tuple(series_)
    return Figure(
        "sachweh/fig3", title, case.readings.name, case.trials, shown, tuple(claims), panels, _notes(case), ends=at
    )


def _by_peers(case: Case, city: City, batch: int, k: int, tell: Parts) -> tuple[list[Series], float]:
    """c from 0 to 10: without noise, at 0.1 and at 1; at 0.1 also with votes that own labels weigh.

    And of how many places the weighted vote with `PEERS` is worse than hearing nobody: the mean over trials.
    """
    most = case.most_peers
    own = count(city.y, batch, city.classes)
    made: list[Series] = []
    below = 0.0
    for key, name, epsilon, ink in (
        ("peers-llp", "LLP, no noise", None, "llp"),
        ("peers-e0.1", "p-LLP, ours", EPSILON, "p-llp"),
        ("peers-e1", "p-LLP, ours", 1.0, "more"),
    ):
        tell(f"peers: {key}")
        said = exact(own) if epsilon is None else sound(case, own, epsilon)
        learned = [learn(city, place, own, said, batch=batch, k=k, many=most, seed=case.seed) for place in city.places]
        told = [np.mean([each.accuracy(many) for each in learned], axis=0) for many in range(most + 1)]
        made.append(curve(key, name, tuple(range(most + 1)), told, "peers", epsilon, ink))
        if epsilon == EPSILON:
            each_place = [np.stack([one.accuracy(many, weighted=True) for one in learned]) for many in range(most + 1)]
            told, weighed = [places.mean(axis=0) for places in each_place], f"{name}, votes weighed by own labels"
            made.append(curve("weighted", weighed, tuple(range(most + 1)), told, "peers", epsilon, "weighted"))
            below = float((each_place[min(PEERS, most)] < each_place[0]).sum(axis=0).mean())
    return made, below


RULES: Mapping[Rule, tuple[str, int]] = {
    "clip": ("search, clipped and divided as published", 3),
    "project": ("search, projected on the simplex", 10),
    "shrink": ("search, shrunk towards the mean", 11),
    "raw": ("search, counts as they came", 9),
}
"""What is done to noisy counts before the published search, in words, and its colour."""


def _by_rule(
    case: Case, city: City, batch: int, k: int, epsilons: Sequence[float], rules: Sequence[Rule], tell: Any
) -> list[Series]:
    """The published search on counts at the honest scale, by what is done to them first."""
    made: list[Series] = []
    for rule in tell.each(rules, "rule: {}"):
        told = [ours(case, city, epsilon, batch=batch, k=k, solver="search", rule=rule) for epsilon in epsilons]
        name, ink = RULES[rule]
        made.append(replace(curve(f"rule-{rule}", name, epsilons, told, "rules", epsilons[-1], "p-llp"), ink=ink))
    return made


BATCH_INKS = (9, 10, 1, 11, 12)


def _by_batch(
    case: Case, city: City, k: int, epsilons: Sequence[float], sizes: Sequence[int], tell: Any
) -> tuple[list[Series], list[float]]:
    """Ours over epsilon for each b, and LLP without noise at the same b."""
    made: list[Series] = []
    exactly: list[float] = []
    for number, b in enumerate(tell.each(sizes, "b = {}")):
        exactly.append(float(ours(case, city, None, batch=b, k=k).mean()))
        told = [ours(case, city, epsilon, batch=b, k=k) for epsilon in epsilons]
        line = curve(f"p-llp-b{b}", f"p-LLP, ours, b = {b}", epsilons, told, "batches", epsilons[-1], "p-llp")
        made.append(replace(line, ink=BATCH_INKS[number]))
    return made, exactly


def _by_handlers(case: Case, batch: int, k: int, claims: list[Claim], made: Mapping[str, Series]) -> list[Series]:
    """One point of the sound panel again, message by message: every envelope sealed, counted, relayed and heard."""
    values, learned = case.readings.values, case.readings.learned
    task = make_task(case.readings, traffic.EDGES, batch=batch, epsilon=1.0, k=k)
    city = cities.simulate(task, values[:, :learned], seed=case.seed)
    told = float(cities.right(task, city.voters, values[:, learned:]).mean())
    apart = told - made["p-llp"].last
    claims.append(
        Claim(
            "handlers",
            "The protocol's handlers, message by message, end where the figure does at ε = 1; ours is the difference",
            apart,
            abs(apart) <= 0.01,
        )
    )
    claims.append(
        Claim(
            "kilobytes",
            "Kilobytes that a device sends in 24 days, sealed and signed",
            float(city.said.mean()) / 1000,
            True,
        )
    )
    point = Series(
        "p-llp-handlers",
        "the same by the protocol's handlers",
        (1.0,),
        (round(told, 6),),
        marks=True,
        privacy=PrivacyLabel(UNIT, 1.0),
        panel="sound",
        line=False,
        ink=INK["handlers"],
    )
    return [point]


def _weighted_claims(city: City, line: Series, below: float) -> tuple[Claim, ...]:
    at = min(PEERS, len(line.y) - 1)
    gain = line.y[at] - line.y[0]
    return (
        Claim(
            "weighted",
            f"Votes weighed by a device's own labels: c = {at} less c = 0, which hears nobody, at ε = {EPSILON:g}",
            gain,
            gain >= 0,
        ),
        Claim(
            "weighted-below",
            f"Of {len(city.places)} places, those that such a vote with c = {at} leaves below c = 0",
            below,
            below < len(city.places) / 2,
        ),
    )


def _fig3_claims(
    case: Case,
    epsilons: Sequence[float],
    folded: Mapping[str, Array],
    ends: Mapping[str, Array],
    grid: Sequence[Series],
    exactly: Sequence[float],
    batch: int,
    made: Mapping[str, Series],
) -> Iterator[Claim]:
    once, printed, llp = (folded[name].mean(0) for name in ("published", "in-loop", "llp"))
    plain, squares, own, *private = ends["sound"].tolist()
    yield Claim.near("llp", "LLP has 0.67", float(llp[0]), 0.67, within=0.02)
    for epsilon, paper in ((0.01, 0.32), (0.05, 0.48), (0.1, 0.63)):
        if epsilon in epsilons:
            at = epsilons.index(epsilon)
            claimed = f"{paper:g} at ε = {epsilon:g}"
            yield Claim.near(
                f"e{epsilon:g}-as-published",
                f"{claimed}: normalised once, really {2 * uses(case) * epsilon:.2g}",
                float(once[at]),
                paper,
                within=0.03,
            )
            yield Claim.near(
                f"e{epsilon:g}-in-loop",
                f"{claimed}: as printed, without any guarantee",
                float(printed[at]),
                paper,
                within=0.03,
            )
            yield Claim(
                f"e{epsilon:g}-honest",
                f"{claimed}, honestly: ours, all places, held-out days",
                private[at],
                private[at] >= paper - 0.01,
                paper=paper,
            )
    first = epsilons.index(0.1)
    for each, best in zip(grid, exactly, strict=True):
        size = each.key.rpartition("-b")[2]
        yield Claim(
            f"within-2-b{size}",
            f"The smallest of these ε at which ours is within 2 points of LLP, both at b = {size} (0: none)",
            *_smallest(epsilons, each.y, best),
        )
    yield Claim(
        "within-2-shares",
        f"The same of LLP by our least squares, both at b = {batch}",
        *_smallest(epsilons, private, squares),
    )
    sizes = [float(each.key.rpartition("-b")[2]) for each in grid]
    for end, name, best in (("", "LLP", plain), ("-shares", "LLP by our least squares", squares)):
        yield Claim(
            f"within-2-at-0.1{end}",
            f"The smallest of these b at which ours at ε = 0.1 is within 2 points of {name} at b = {batch} (0: none)",
            *_smallest(sizes, [each.y[first] for each in grid], best),
        )
    for key, name, ending in (("peers-llp", "without noise", ""), ("peers-e0.1", "at ε = 0.1", "-honestly")):
        gain = max(made[key].y[2:]) - made[key].y[0]
        yield Claim(
            f"peers-help{ending}",
            f"Peers help {name}: the best c from 2 on, less c = 0, which sends nothing (c = 1 is the same: a tie is "
            "the device's own)",
            gain,
            gain > 0.005,
        )
    yield Claim(
        "own-labels",
        "Clusters with a device's own labels, which send nothing, less LLP with its peers",
        own - plain,
        own > plain,
    )
    rules = [each for key, each in made.items() if key.startswith("rule-")]
    gain = min(private[first] - each.y[first] for each in rules)
    yield Claim(
        "solver",
        "At ε = 0.1 least squares with the known noise beats the search after any rule; ours is by how much "
        "over the best of them",
        gain,
        gain > 0,
    )


def _smallest(at: Sequence[float], told: Sequence[float], best: float) -> tuple[float, bool]:
    """Where two points or less are missing for the first time, and whether that is anywhere."""
    enough = [float(x) for x, y in zip(at, told, strict=True) if best - y <= WITHIN]
    return (enough[0] if enough else 0.0), bool(enough)
