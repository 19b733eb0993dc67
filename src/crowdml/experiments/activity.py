"""`ours/activity`: the first paper's own application, tested on ten people who are no devices.

31 people are the devices, and their windows the samples; ten others are public, and ten more tell the accuracy. The
public people alone choose features, protocol and settings: a crowd of the same size is drawn from about eight of them
and tested on the others, five times in turn (review, R4). Among the candidates within one standard error of the best,
the simplest is taken (Breiman et al. 1984), for ten people tell small differences badly. Every run of this command
makes the choice again. No label of a public row is in any weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import Dataset, blobs, load
from crowdml.datasets.populations import usually_held
from crowdml.experiments.crowds import DELTA, Size
from crowdml.experiments.figure import MAIN, Claim, Figure, Panel, PrivacyLabel, Series, over_trials
from crowdml.experiments.registry import Parts, Progress
from crowdml.experiments.tuning import trial_crowds
from crowdml.features import Pca, prepared
from crowdml.models.ridge import solve
from crowdml.protocols import find, gram
from crowdml.second_moments import label_rows
from crowdml.sim.baselines import baselines
from crowdml.sim.studies import simulate
from crowdml.suggest import Shape, suggest
from crowdml.task import Bound, Features, Task

EPSILONS = (0.1, 0.3, 1.0, 10.0)
GOALS: Mapping[float, float] = {0.3: 0.03, 1.0: 0.015}
"""How far below no privacy the crowd may end, by the total of a sample."""
SEED = 2026
TRIED = 3
"""Seeds of the noise for each crowd that a candidate is tried on."""
INSIDE = 75
"""The percentage of public rows that lie within the unit ball; longer rows are shrunk onto it."""

Rows = Callable[[Array], Array]


@dataclass(frozen=True)
class Candidate:
    """Public features, and a protocol under masks. The rules of `suggest` choose its other settings."""

    protocol: str
    components: int
    rooted: bool
    """Whether each bin's square root is taken first: a few bins are far larger than the others."""
    width: Fraction | None = None
    """The width of gram's cosine map; None: the components themselves."""

    def weights(self, classes: int) -> int:
        """How many weights its model has."""
        return classes * (self.components if self.width is None else WAVES)

    @property
    def words(self) -> str:
        waves = "" if self.width is None else f" with {WAVES} cosines of width {float(self.width):g}"
        return f"{self.protocol}{waves} on {self.components} components of {'root ' if self.rooted else ''}spectra"

    def features(self, public: Array) -> Rows:
        """A map to rows of norm one at most, fitted on public rows: standard columns, then their components.

        Components are brought halfway to equal variances: the small ones count, and noise does not rule them.
        """
        first: Rows = np.sqrt if self.rooted else np.asarray
        seen = first(public)
        middle, spread = seen.mean(axis=0), np.maximum(seen.std(axis=0), 1e-6)
        pca = Pca.fit((seen - middle) / spread, self.components)

        def parts(x: Array) -> Array:
            return pca.transform((first(x) - middle) / spread) * np.maximum(pca.variance, 1e-12) ** -0.25

        radius = np.percentile(np.linalg.norm(parts(public), axis=1), INSIDE)
        ball = Features(self.components, Bound("l2"))
        return lambda x: prepared(ball, parts(x) / radius)

    def task(self, shape: Shape, epsilon: float | None, classes: tuple[str, ...]) -> Task:
        settings: dict[str, Any] = {}
        if self.protocol == "gram":
            waves = {"kind": "cosine", "seed": 1, "features": WAVES, "width": self.width}
            settings["map"] = {"kind": "identity", "constant": CONSTANT} if self.width is None else waves
        own = replace(shape, features=self.components)
        return suggest(own, protocol=self.protocol, epsilon=epsilon, delta=DELTA, masked=True, names=classes,
                       settings=settings, name="activity")  # fmt: skip


WAVES = 256
CONSTANT = Fraction(3, 10)
CANDIDATES = tuple(
    Candidate(protocol, components, rooted, width)
    for rooted in (False, True)
    for components in (4, 8)
    for protocol, width in (("gram", None), ("gram", Fraction(1, 2)), ("gram", Fraction(1)), ("sgd", None),
                            ("admm", None), ("local_updates", None))
)  # fmt: skip


def tried(candidate: Candidate, data: Dataset, shape: Shape, epsilon: float, seeds: int = TRIED) -> Array:
    """[5]: the mean accuracy of each crowd that is drawn from public rows, tested on other public rows."""
    rows, task = candidate.features(data.x_public), candidate.task(shape, epsilon, data.classes)
    crowd, crowds = trial_crowds(replace(data, x_public=rows(data.x_public)), Size(devices=shape.devices))
    return np.array([
        simulate(task, crowd.x_train, crowd.y_train, devices=each.population, test=(each.x, each.y), trials=seeds,
                 seed=SEED + number, points=1, workers=1).scores.mean()
        for number, each in enumerate(crowds)
    ])  # fmt: skip


def choose(scores: Mapping[Candidate, Array], classes: int) -> Candidate:
    """The candidate with the fewest weights within one standard error of the best; among equals, the better one."""
    best = max(scores.values(), key=lambda found: found.mean())
    least = best.mean() - best.std(ddof=1) / np.sqrt(len(best))
    near = [each for each, found in scores.items() if found.mean() >= least]
    return min(near, key=lambda each: (each.weights(classes), -scores[each].mean()))


def learned(candidate: Candidate, data: Dataset, shape: Shape, epsilon: float, trials: int) -> Array:
    """[trials]: the accuracy on the test people of what the devices learn together."""
    rows, task = candidate.features(data.x_public), candidate.task(shape, epsilon, data.classes)
    study = simulate(task, rows(data.x_train), data.y_train, devices=data.groups, trials=trials, seed=SEED, points=1,
                     test=(rows(data.x_test), data.y_test), workers=1)  # fmt: skip
    return study.scores


def without_noise(candidate: Candidate, data: Dataset, shape: Shape) -> float:
    """The accuracy of the same features and the same kind of model, from the devices' rows in one place."""
    rows = candidate.features(data.x_public)
    x, test = rows(data.x_train), rows(data.x_test)
    if candidate.protocol != "gram":
        return baselines(x, data.y_train, test, data.y_test, classes=True)[1]
    task = candidate.task(shape, 1.0, data.classes)
    fixed = gram.plan(task)
    h, labels = fixed.map(x).astype(np.float64), label_rows(fixed, data.y_train)
    said = find(task).predict(task, solve(h.T @ h, h.T @ labels, 0.0), test)
    return float((said == data.y_test).mean())


def without_privacy(data: Dataset) -> dict[str, float]:
    """Accuracies of models that see all devices' rows in one place, by name."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    low, high = (tuple(Fraction(f"{each:.6g}") for each in side(data.x_public, axis=0)) for side in (np.min, np.max))
    scaled = Features(data.features, Bound("l2"), low=low, high=high)
    x, test = (prepared(scaled, each) for each in (data.x_train, data.x_test))
    found = {"logistic regression, columns between public bounds":
             baselines(x, data.y_train, test, data.y_test, classes=True)[1]}  # fmt: skip
    models: dict[str, Any] = {
        "logistic regression, standard columns": make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)),
        "support vectors": make_pipeline(StandardScaler(), SVC(C=10.0)),
    }
    for name, model in models.items():
        found[name] = float(model.fit(data.x_train, data.y_train).score(data.x_test, data.y_test))
    return found


def activity(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """Accuracy over the total of a sample. A quick run chooses between two candidates on made-up data."""
    count = trials or (2 if quick else 10)
    data, epsilons = (_quick_data(), (1.0, 10.0)) if quick else (_real_data(), EPSILONS)
    choices, seeds = (CANDIDATES[:2], 1) if quick else (CANDIDATES, TRIED)
    assert data.groups is not None
    counts = np.unique(data.groups, return_counts=True)[1]
    held = usually_held(counts)
    shape = Shape(data.features, len(data.classes), int((counts >= held).sum()), held)
    parts = Parts(progress, len(epsilons) * (len(choices) + 1))
    chosen: dict[float, Candidate] = {}
    public: dict[float, float] = {}
    found: list[Array] = []
    same: list[float] = []
    for epsilon in epsilons:
        scores = {each: tried(each, data, shape, epsilon, seeds) for each in parts.each(choices, "{0.words}")}
        chosen[epsilon] = choose(scores, len(data.classes))
        public[epsilon] = float(scores[chosen[epsilon]].mean())
        parts(f"the crowd at ε {epsilon:g}")
        found.append(learned(chosen[epsilon], data, shape, epsilon, count))
        same.append(without_noise(chosen[epsilon], data, shape))
    plain = without_privacy(data)
    linear, best = next(iter(plain)), max(plain, key=plain.__getitem__)
    whole = PrivacyLabel(epsilon=max(epsilons), delta=DELTA)
    levels = (("no-privacy", linear, [plain[linear]] * len(epsilons)),
              ("no-privacy-best", f"{best}: the best without privacy", [plain[best]] * len(epsilons)),
              ("same-model", "the chosen features and model without noise", same))  # fmt: skip
    series = [over_trials("crowd", "the crowd, as public people chose", epsilons, np.stack(found, axis=1), whole,
                          marks=True)]  # fmt: skip
    series += [over_trials(key, name, epsilons, np.array([values]), PrivacyLabel()) for key, name, values in levels]
    claims = _claims(series, GOALS if not quick else {1.0: 0.5})
    notes = (
        *(
            f"ε = {epsilon:g}: {each.words}; {public[epsilon]:.3f} on public people."
            for epsilon, each in chosen.items()
        ),
        NOTE,
    )
    panels = (Panel(MAIN, "Accuracy on ten people who are no devices", "total ε of a sample", "accuracy", "log",
                    priced=False, x_ticks=epsilons),)  # fmt: skip
    return Figure("ours/activity", "Activity on ten people who are no devices", data.name, count, tuple(series),
                  claims, panels, notes, ends=f"accuracy at ε = {max(epsilons):g}")  # fmt: skip


NOTE = (
    "The best without privacy is the best of three models on the test people themselves: logistic regression on two "
    "scalings, and support vectors. Masks are those of `suggest`: a fifth of the devices may drop out."
)


def _claims(series: list[Series], goals: Mapping[float, float]) -> tuple[Claim, ...]:
    crowd, *others = series
    claims: list[Claim] = []
    for epsilon, most in goals.items():
        place = crowd.x.index(epsilon)
        for other in others:
            behind = other.y[place] - crowd.y[place]
            text = f"At ε = {epsilon:g} the crowd is at most {most:g} below: {other.name}; ours is how far"
            claims.append(Claim(f"e{epsilon:g}-{other.key}", text, behind, behind <= most))
    return tuple(claims)


def _real_data() -> Dataset:
    """The spectra as they are, less their mirrored half: the acceleration's magnitude is real."""
    data = load("activity", normalise="none")
    half = slice(0, data.features // 2 + 1)
    return replace(data, x_train=data.x_train[:, half], x_test=data.x_test[:, half], x_public=data.x_public[:, half])


def _quick_data() -> Dataset:
    """Blobs in place of people."""
    data = blobs(rows=1200, features=12, classes=3, seed=3, normalise="none")
    return replace(data, groups=np.arange(len(data.y_train)) % 12)
