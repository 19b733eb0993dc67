"""Simulated crowds in scikit-learn's shape: `Crowd` learns classes, `CrowdRegressor` numbers."""

from __future__ import annotations

import dataclasses
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any, Self, cast, get_type_hints

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data  # pyright: ignore[reportUnknownVariableType]

from crowdml.arrays import Array
from crowdml.datasets.populations import usual_devices, usually_held
from crowdml.errors import DataError, FitError, PrivacyWarning, TaskError
from crowdml.features.bounds import LEAST, Bounds, label_scale
from crowdml.privacy.losses import exact
from crowdml.protocols import PROTOCOLS, delta_ceiling, find
from crowdml.sim.arguments import (
    MEND,
    clipped_labels,
    clipped_numbers,
    erased_columns,
    is_number,
    of_one_kind,
    owners,
    pair,
    read_labels,
    read_rows,
    read_target,
    refuse_bounds,
    unusable_cell,
    whole,
)
from crowdml.sim.baselines import baselines
from crowdml.sim.layout import POPULATIONS, spread_out
from crowdml.sim.run import Tick
from crowdml.sim.studies import Study, describe_price, inside, refuse_width, replayed_ledger, simulate, trial_seeds
from crowdml.sim.trial import Deal
from crowdml.storage import Ledger
from crowdml.suggest import Shape, choices, fits, outlook, suggest
from crowdml.task import Task, find_task
from crowdml.texts import did_you_mean
from crowdml.verdict import share_of_majority, verdict


class _CrowdEstimator(BaseEstimator):
    """What both estimators share: their parameters, the task made of them, and the study under them."""

    def __init__(
        self,
        *,
        protocol: str = "sgd",
        epsilon: float | None = 1.0,
        delta: float = 1e-6,
        devices: int | None = None,
        model: str | Mapping[str, Any] | None = None,
        masking: bool | Mapping[str, Any] | None = None,
        bounds: Any = None,
        target: tuple[float, float] | None = None,
        mechanism: str | None = None,
        passes: int | None = None,
        delay: float | str = 0,
        dropout: float = 0.0,
        population: str = "iid",
        engine: str = "compiled",
        trials: int = 1,
        seed: int | None = None,
        task: Task | str | None = None,
        settings: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self.protocol = protocol
        self.epsilon = epsilon
        self.delta = delta
        self.devices = devices
        self.model = model
        self.masking = masking
        self.bounds = bounds
        self.target = target
        self.mechanism = mechanism
        self.passes = passes
        self.delay = delay
        self.dropout = dropout
        self.population = population
        self.engine = engine
        self.trials = trials
        self.seed = seed
        self.task = task
        self.settings = settings
        if named:  # settings of the protocol, by name
            self._named = named

    _named: Mapping[str, Any] = {}

    @classmethod
    def from_task(cls, task: Task | str | Path, **parameters: Any) -> Self:
        """An estimator that runs a task: a file, the name of a shipped task, or a `Task`.

        The task fixes protocol, price, model, masking and settings. The other parameters say what crowd runs it.
        """
        return cls(task=task if isinstance(task, Task) else find_task(str(task)), **parameters)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All parameters by name, the protocol's own settings that were given included."""
        return {**super().get_params(deep), **self._named}

    def set_params(self, **params: Any) -> Self:
        """Set parameters by name; one that is no parameter of the estimator is a setting of the protocol."""
        own = super().get_params(deep=False)
        named = {name: value for name, value in params.items() if name.partition("__")[0] not in own}
        super().set_params(**{name: value for name, value in params.items() if name not in named})
        if named:
            self._named = {**self._named, **named}
        return self

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        groups: Any = None,
        evaluate: tuple[Any, Any] | None = None,
        tick: Tick = lambda _: None,
    ) -> Self:
        """Let the crowd learn X [n, d], y [n].

        groups [n]: whose each row is; each person is then a device. evaluate: (X, y) on which `history_` and `scores_`
        are computed; without it they are on the crowd's own samples, which only a simulator can look at. tick: called
        with how many more check-ins were done, or rounds where devices meet in cohorts.
        """
        try:
            self._check_parameters()
            return self._fit(X, y, groups, evaluate, tick)
        except (TaskError, DataError) as error:
            raise FitError(str(error) if self.task is not None else self._in_own_words(str(error))) from error

    def _fit(self, X: Any, y: Any, groups: Any, evaluate: tuple[Any, Any] | None, tick: Tick) -> Self:
        try:
            checked: Any = validate_data(self, X, _one_kind(y), dtype=np.float64)
        except ValueError as error:
            found = None if hasattr(X, "toarray") else unusable_cell(X, columns=self._columns)
            if found is None:
                raise
            raise FitError(f"{found} {MEND}") from error
        rows = read_rows(checked[0])
        if self.task is not None:
            refuse_width(self._given_task(), rows)
        labels = self._encoded(np.asarray(checked[1]))
        seen = (rows, labels) if evaluate is None else self._evaluated(evaluate)
        low, high = self._bounds(rows)
        self.seed_ = secrets.randbits(32) if self.seed is None else int(self.seed)
        deal = self._deal(len(rows), groups)
        people = spread_out(deal.kind, labels, deal.devices, trial_seeds(self.seed_, 1)[0], deal.groups)
        shape = Shape(rows.shape[1], self._classes, people.devices, usually_held(people.counts))
        self.task_ = self._task(shape, low, high)
        for changed in self._changed(rows, np.asarray(checked[1])):
            warnings.warn(changed, stacklevel=3)
        most = delta_ceiling(self.task_)
        if most is not None and self.task_.privacy.delta > most:
            warnings.warn(
                f"delta = {self.task_.privacy.delta:g} is above {most:g}: a promise may fail with this probability, "
                "and no device accepts one as large.",
                PrivacyWarning,
                stacklevel=3,
            )
        doubt = outlook(self.task_, shape)
        if doubt is not None:
            warnings.warn(doubt.sentence, stacklevel=3)
        self.study_ = simulate(
            self.task_,
            rows,
            checked[1] if self.task is not None and self._classes is None else labels,
            devices=deal,
            trials=int(self.trials),
            seed=self.seed_,
            passes=self.passes if self.task is not None else None,
            delay=self.delay,
            dropout=self.dropout,
            engine=self.engine,
            tick=tick,
        )
        study = self.study_
        self.weights_ = study.runs[0].model
        self.epsilon_sample_, self.epsilon_device_ = study.planned.sample, study.planned.device
        self.epsilon_sample_alone_, self.epsilon_device_alone_ = study.planned.sample_alone, study.planned.device_alone
        self.claimed_epsilon_ = study.claimed
        self.check_ins_, self.bytes_up_, self.bytes_down_ = study.check_ins, study.bytes_up, study.bytes_down
        curves = self._judged(study, inside(self.task_, seen[0]), seen[1])
        self.history_ = {
            study.unit.replace("-", "_"): study.points,
            self._measure: curves[0],
            "of": "evaluation data" if evaluate is not None else "the crowd's own samples",
        }
        self.scores_ = curves[:, -1]
        self.interval_ = float(self.scores_.min()), float(self.scores_.max())
        self.verdict_ = verdict(
            float(self.scores_.mean()),
            classes=self._classes,
            majority=None if self._classes is None else share_of_majority(seen[1], labels),
            spread=float(self.scores_.std()),
            masked=self.task_.masking is not None,
        )
        self._ledger: Ledger | None = None
        self._finish()
        return self

    def baselines(self, X: Any, y: Any, test: tuple[Any, Any] | None = None) -> dict[str, float]:
        """Scores to set this crowd's beside, on `test` = (X, y) or on the rows themselves.

        "constant": always the most common class of y, or its mean. "no_privacy": a linear model of all rows in one
        place, without noise.
        """
        x, labels = self._seen(X), self._numbers(y)
        seen = (x, labels)
        if test is not None:
            other, theirs = pair(test, "test")
            seen = self._seen(other), self._numbers(theirs)
        constant, no_privacy = baselines(x, labels, *seen, classes=self._classes is not None)
        return {"constant": constant, "no_privacy": no_privacy}

    @property
    def ledger_(self) -> Ledger:
        """The ledger of the device that gave most, replayed into memory when first asked for."""
        check_is_fitted(self, "study_")
        if self._ledger is None:
            self._ledger = replayed_ledger(self.study_)
        return self._ledger

    def plot(self, path: str | Path | None = None) -> Any:
        """Accuracy or R² over check-ins or rounds, with both totals in the title; the matplotlib axes, or a file."""
        check_is_fitted(self, "study_")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.study_.points, self.history_[self._measure], color="#2563a8", marker=".")
        axes.set(
            xlabel=self.study_.unit,
            ylabel=f"{self._measure} on {self.history_['of']}",
            ylim=(0, 1),
            title=f"{self.study_.population.devices:,} devices · {describe_price(self.study_)}",
        )
        axes.grid(alpha=0.3)
        if path is not None:
            figure.savefig(path, dpi=150)
        return axes

    def __getstate__(self) -> dict[str, Any]:
        state = dict(cast("dict[str, Any]", super().__getstate__()))
        if "_ledger" in state:  # a database connection cannot be copied; it is replayed again
            state["_ledger"] = None
        return state

    # --- what the two kinds differ in ---

    n_features_in_: int
    _measure: str
    """What `history_` and `scores_` measure."""

    @property
    def _classes(self) -> int | None:
        """How many classes there are; None where labels are numbers."""
        raise NotImplementedError

    def _encoded(self, y: Array) -> Array:
        """Labels as the task knows them: class numbers, or numbers from -1 to 1."""
        raise NotImplementedError

    def _numbers(self, y: Any) -> Array:
        """Labels to compare predictions with, which may be of no known class."""
        raise NotImplementedError

    def _judged(self, study: Study, x: Array, y: Array) -> Array:
        raise NotImplementedError

    def _finish(self) -> None:
        """Set what only one kind has."""

    def _refuse_strange(self, labels: Array, given: Array) -> None:
        """Refuse labels to evaluate on of which the crowd knows none."""

    def _changed(self, rows: Array, y: Array) -> Iterator[str]:
        """What bounds do to rows [n, d] and labels [n], in sentences."""
        names, features = self._columns, self.task_.features
        theirs = "bounds" if self.task is None else "features.low and features.high of the task"
        taken = self.task is None and self.bounds is None
        yield from filter(
            None, [clipped_numbers(features, rows, names, theirs), erased_columns(features, rows, names, taken=taken)]
        )

    @property
    def _columns(self) -> list[str] | None:
        """The names of X's columns, where it has names."""
        found = getattr(self, "feature_names_in_", None)
        return None if found is None else found.tolist()

    # --- parameters ---

    def _check_parameters(self) -> None:
        """Refuse what no crowd could run, in the estimator's own words."""

        for key, least, none in WHOLE:
            whole(getattr(self, key), key, least, none)
        if self.epsilon is not None and not (is_number(self.epsilon) and self.epsilon > 0):
            raise FitError(f"epsilon = {self.epsilon!r}: a positive number, or None for no privacy.")
        if not is_number(self.delta) or not 0 <= self.delta < 1 or (self.delta == 0 and not self._laplace):
            raise FitError(
                f"delta = {self.delta!r}: above 0 and below 1, such as 1e-6. Only mechanism='discrete-laplace' takes 0."
            )
        for key, kinds in {"mechanism": (str,), "model": (str, Mapping)}.items():
            if not isinstance(value := getattr(self, key), (*kinds, type(None))):
                raise FitError(f"{key} = {value!r}: say its name{', or a table' * (len(kinds) > 1)}, or None.")
        if self.mechanism == "none" and self.epsilon is not None:
            raise FitError("mechanism = 'none': say epsilon=None to learn without privacy.")
        if self.mechanism not in (None, "none", *MECHANISMS):
            near = did_you_mean(str(self.mechanism), MECHANISMS)
            raise FitError(f"mechanism = {self.mechanism!r}: choose one of {', '.join(MECHANISMS)}, or None.{near}")
        masking: Any = self.masking
        if not (masking is None or isinstance(masking, bool | Mapping)):
            raise FitError(
                f'masking = {masking!r}: say True, or a table such as {{"cohort": 20, "minimum": 16, "colluders": 1}}.'
            )
        if self.population not in POPULATIONS:
            raise FitError(f"population = {self.population!r}: choose one of {', '.join(POPULATIONS)}.")
        if self.task is not None:
            self._refuse_beside_task()
            return
        if self.protocol not in PROTOCOLS:
            known = choices(2 if isinstance(self, ClassifierMixin) else None)
            near = did_you_mean(str(self.protocol), known)
            raise FitError(f"protocol = {self.protocol!r}: choose one of {', '.join(known)}.{near}")
        kind = PROTOCOLS[self.protocol].settings
        known = [] if kind is None else [each.name for each in dataclasses.fields(kind) if each.name != "kind"]
        for key in self._own_settings:
            if kind is not None and key not in known:
                near = did_you_mean(key, [*super().get_params(deep=False), *known])
                raise FitError(
                    f"{key} is no parameter of {type(self).__name__} and no setting of {self.protocol}, which has "
                    f"{', '.join(known)}.{near}"
                )

    def _refuse_beside_task(self) -> None:
        defaults = signature(_CrowdEstimator.__init__).parameters
        given = {key: getattr(self, key) for key in FIXED_BY_TASK if getattr(self, key) != defaults[key].default}
        for key, value in {**given, **self._own_settings}.items():
            raise FitError(f"{key} = {value!r}: the task fixes it. Change the task, or leave {key} out.")

    @property
    def _own_settings(self) -> dict[str, Any]:
        """Settings of the protocol that were given."""
        return _plain({**(self.settings or {}), **self._named})

    @property
    def _laplace(self) -> bool:
        return self.mechanism == "discrete-laplace"

    def _bounds(self, X: Array) -> tuple[Bounds, Bounds]:
        """The public bounds of the columns, as the task holds them; (None, None) where columns are not scaled."""
        if self.bounds is False or self.task is not None:
            return None, None
        if self.bounds is not None:
            refuse_bounds(self.bounds, X.shape[1], self._columns)
            low, high = self.bounds
            return _bound(low, X.shape[1]), _bound(high, X.shape[1])
        warnings.warn(
            "bounds were taken from X, the smallest and the largest value of each column: no ε covers what they show. "
            "Give bounds=(low, high) that are known without looking at X, or bounds=False to leave columns alone.",
            PrivacyWarning,
            stacklevel=4,
        )
        low, high = (np.where(abs(each) < LEAST, 0.0, each) for each in (X.min(axis=0), X.max(axis=0)))
        return _bound(low, X.shape[1]), _bound(high, X.shape[1])

    def _deal(self, rows: int, groups: Any) -> Deal:
        """Who holds which rows."""
        if rows < 2:
            raise FitError("X has 1 sample, and a crowd needs at least two.")
        if groups is not None:
            for key, usual in (("devices", (None,)), ("population", ("iid", "by_user"))):
                if (value := getattr(self, key)) not in usual:
                    raise FitError(f"{key} = {value!r}, and groups say whose each row is: leave out one of the two.")
        if groups is not None or self.population == "by_user":
            return Deal("by_user", groups=None if groups is None else owners(groups, rows))
        if self.devices is not None:
            if self.devices > rows:
                raise FitError(f"devices = {self.devices}, and X has {rows} rows: each device holds at least one.")
            return Deal(self.population, int(self.devices))
        if self.task is not None:
            task = self._given_task()
            return Deal(self.population, max(1, rows // find(task).batch(task)))
        batch = self._own_settings.get("batch")
        if isinstance(batch, int) and batch > 0:
            return Deal(self.population, max(1, rows // batch))
        return Deal(self.population, usual_devices(rows))

    def _task(self, shape: Shape, low: Bounds, high: Bounds) -> Task:
        """The task that these parameters describe, with what public rules choose where none was given."""
        if self.task is not None:
            task = self._given_task()
            if (task.classes is None) != (shape.classes is None):
                other = "CrowdRegressor" if task.classes is None else "Crowd"
                raise FitError(
                    f"task {task.name!r} learns {'numbers' if task.classes is None else 'classes'}: use {other}."
                )
            return task
        alone = fits(self.protocol, shape, False)
        if self.masking is False and alone is not None and fits(self.protocol, shape, True) is None:
            raise FitError(f"masking = False: {alone} Leave masking out, or take another protocol.")
        return suggest(
            shape,
            protocol=self.protocol,
            epsilon=_plain(self.epsilon),
            delta=self.delta,
            masked=bool(self.masking),
            masking=_plain(self.masking) if isinstance(self.masking, Mapping) else None,
            model=_plain(self.model),
            names=self._names,
            low=low,
            high=high,
            settings={key: self._as_table(key, value) for key, value in self._own_settings.items()},
            uses=None if self.passes is None else int(self.passes),
            mechanism=self.mechanism,
        )

    def _given_task(self) -> Task:
        return self.task if isinstance(self.task, Task) else find_task(str(self.task))

    def _as_table(self, key: str, value: Any) -> Any:
        """A setting as its table, where it is one of several numbers and the first is given: step=0.5 is {"c": 0.5}."""
        kind = get_type_hints(PROTOCOLS[self.protocol].settings).get(key) if PROTOCOLS[self.protocol].settings else None
        if dataclasses.is_dataclass(kind) and is_number(value):
            return {dataclasses.fields(kind)[0].name: value}
        return value

    def _in_own_words(self, sentence: str) -> str:
        """A sentence about a task that `suggest` made: its reader knows parameters, and no task file."""
        words = dict(OWN_WORDS)
        if self.epsilon is None:
            words = {r'\bprivacy\.mechanism = "none"': "epsilon = None", **words}
        if isinstance(self.model, Mapping):
            words = {r"\bmodel\.(\w+)": r"model['\1']", **words}
        for key, name in words.items():
            sentence = re.sub(key, name, sentence)
        return sentence

    _names: list[str] | None = None
    """Names of the classes."""

    def _seen(self, X: Any) -> Array:
        """Rows as the model sees them."""
        check_is_fitted(self, "study_")
        return inside(self.task_, validate_data(self, X, dtype=np.float64, reset=False))

    def _evaluated(self, given: Any) -> tuple[Array, Array]:
        """Rows and labels to evaluate on, as they were given."""
        X, y = pair(given, "evaluate")
        x = read_rows(X, "evaluate[0]").astype(np.float64)
        if x.shape[1] != self.n_features_in_:
            raise FitError(
                f"evaluate[0] has {x.shape[1]} columns, and X has {self.n_features_in_}: give the same ones."
            )
        labels = read_labels(y, len(x), "evaluate[1]", numbers=self._classes is None)
        found = self._numbers(labels)
        self._refuse_strange(found, labels)
        return x, found

    def _said(self, X: Any) -> Array:
        x = self._seen(X)
        return find(self.task_).predict(self.task_, self._wide, x)

    @property
    def _wide(self) -> Array:
        """Weights in double precision, so that a row's score does not depend on the rows beside it."""
        return self.weights_.astype(np.float64)


FIXED_BY_TASK = ("protocol", "epsilon", "delta", "model", "masking", "bounds", "target", "mechanism")
"""Parameters that a task fixes."""


WHOLE = (
    ("devices", 1, "as many as the rows allow"),
    ("passes", 1, "as many as a public rule says"),
    ("trials", 1, ""),
    ("seed", 0, "a fresh seed"),
)
"""Parameters that are whole numbers: from which one on, and what None means."""
MECHANISMS = ("discrete-gaussian", "discrete-laplace", "skellam")

OWN_WORDS = {
    r"\bprivacy\.epsilon(\.\w+)?": "epsilon",
    r"\bprivacy\.uses\b": "passes",
    r"\b(protocol|model)\.kind\b": r"\1",
    r"\b(privacy|protocol)\.(?=\w)": "",
    r"\bfeatures\.(low|high)\b": r"\1",
    r"\[masking\]": "masking",
    r"\btask 'crowd'": "this crowd",
}
"""Keys of a task file, and what these estimators call them."""


def _bound(value: Any, columns: int) -> Bounds:
    """A bound of all columns, or one of each, as the fractions that a task holds."""
    if np.ndim(value) == 0:
        return exact(float(value))
    if np.shape(value) != (columns,):
        raise ValueError
    return tuple(exact(float(each)) for each in value)


def _plain(value: Any) -> Any:
    """A setting as Python's own number or table: grids of parameters hold NumPy's."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def _one_kind(y: Any) -> Any:
    """Labels as they were given, and objects as the texts or numbers that they are; refuse missing ones."""
    found = None if y is None or hasattr(y, "toarray") else np.asarray(y)
    return y if found is None or found.dtype.kind not in "fO" or not found.ndim else of_one_kind(found)


def _gives_chances(estimator: Crowd) -> bool:
    """Whether the model has probabilities: that of the task, or before there is one, the model asked for."""
    model: Any = estimator.task_.model if hasattr(estimator, "task_") else estimator.model
    if model is None:
        protocol = PROTOCOLS.get(estimator.protocol)
        model = "softmax" if protocol is None else protocol.usual_model(Shape(1, 2, 1, 1))
    model = {"kind": model} if isinstance(model, str) else model
    return model["kind"] in ("cnn", "softmax", "logistic") or (model["kind"] == "mlp" and model.get("top") != "squared")


class Crowd(ClassifierMixin, _CrowdEstimator):
    """A crowd of simulated devices that learns a classifier privately: `Crowd(epsilon=1.0, seed=1).fit(X, y)`.

    Guarantee: what the devices of such a crowd send is (epsilon, delta)-DP in all for replacing any one sample,
    against anyone who sees all of it; `epsilon_sample_` is that total, at most `epsilon`. It is the total of the plan,
    fixed before the run by the passes. With `masking` it holds against an observer of the sums of cohorts who works
    with at most `colluders` devices of each; `epsilon_sample_alone_` is what is left if everyone else colludes.
    A device gives many samples: `epsilon_device_` is what it would cost to replace all of them at once, and it is much
    larger. Both are of simulated devices, whose noise comes from a seed: the data given to `fit` is protected from
    nobody who holds the object.

    Not covered: whatever was fitted on X before, such as scaling or PCA; bounds that were taken from X; settings that
    were tuned by looking at scores on private data (R4); the names of the classes and their number, which are read
    off y.

    protocol: "sgd", "gram", "admm", "local_updates", or that of a plug-in. epsilon: a sample's total; None for no
    privacy. delta: the chance that epsilon does not hold. devices: rows are dealt out to so many, equally (what is left
    over belongs to nobody); None: as many as have ten rows each, from 5 to 1000. model: a kind of model, such as
    "logistic", or a table with its settings, {"kind": "softmax", "l2": 0.01}; None: the protocol's usual one. masking:
    True for one cohort of all devices, so that the server hears sums alone, or the task's [masking] table; what it
    leaves out is chosen. bounds: (low, high) of the columns, numbers or one for each; columns are clipped to them and
    scaled to [-1, 1]. None: taken from X, with a warning; False: columns stay as they are. Rows longer than 1 are then
    shortened to 1. mechanism: "discrete-laplace" for delta = 0; None: Gaussian, or Skellam under masks. passes: how
    often a sample is used, at shares of epsilon; None: by rule. delay: of each leg of a trip, in samples of the whole
    crowd ("100", "exponential:100"). dropout: the share of a cohort that vanishes. population: who holds which rows,
    "iid", "by_class" or "by_user" (with `groups` in `fit`). engine: "compiled" or "events". trials: how many runs;
    the first one's model predicts, and `interval_` is the range of their scores. seed: of the split, the timing and the
    noise; None: fresh from the operating system. task: see `from_task`. Settings of the protocol are parameters by
    name: `Crowd(batch=20, step=0.5)`; `settings` holds those whose name is a parameter here, {"delay": 5} of admm.
    """

    _measure = "accuracy"

    @property
    def _classes(self) -> int | None:
        return len(self.classes_)

    def _encoded(self, y: Array) -> Array:
        if self.target is not None:
            raise FitError(f"target = {self.target!r}: Crowd learns classes. Use CrowdRegressor for numbers.")
        kind = type_of_target(y)
        if kind.startswith("continuous"):
            raise FitError(
                f"y holds continuous numbers, such as {y[np.flatnonzero(y != np.round(y))[0]]:g}, and Crowd learns "
                "classes. Use CrowdRegressor for numbers, or make classes of them."
            )
        if kind not in ("binary", "multiclass"):
            raise FitError(f"Unknown label type: {kind}. y is one label for each row: a number or a name.")
        if self.task is None:
            self.classes_, labels = np.unique(y, return_inverse=True)
            self._names = [str(name) for name in self.classes_]
        else:  # as in `simulate`: names of the task's classes, or their numbers
            names = np.array(self._given_task().labels.classes)
            self.classes_ = np.arange(len(names)) if y.dtype.kind in "iu" else names
            labels = self._numbers(y)
            if (labels < 0).any():
                strange = str(y[int(np.argmin(labels))])
                raise FitError(
                    f"y holds {strange!r}; the task's classes are {', '.join(names)}. Give these names, or their "
                    "numbers from 0 as integers."
                )
        if len(self.classes_) < 2:
            raise FitError(f"y has one class, {self.classes_[0]}, in {len(y)} rows: a classifier needs at least two.")
        return labels.astype(np.int32)

    def _numbers(self, y: Any) -> Array:
        number = {label: place for place, label in enumerate(self.classes_.tolist())}
        return np.array([number.get(label, -1) for label in np.asarray(y).tolist()])

    def _refuse_strange(self, labels: Array, given: Array) -> None:
        if (labels >= 0).any():
            return
        raise FitError(
            f"evaluate[1] holds no label that y holds, but {given.tolist()[0]!r}, and y holds "
            f"{self.classes_.tolist()[0]!r}: give labels of the same kind."
        )

    def _judged(self, study: Study, x: Array, y: Array) -> Array:
        return study.accuracy(x, y)

    def _finish(self) -> None:
        size, weights = self.n_features_in_, self.weights_
        if len(weights) in (size, size + 1) and weights.ndim <= 2:
            columns = weights[:, None] if weights.ndim == 1 else weights
            if columns.shape[1] == 2:
                columns = columns[:, 1:] - columns[:, :1]
            self.coef_ = columns[:size].T
            self.intercept_ = columns[size] if len(columns) > size else np.zeros(columns.shape[1])

    def decision_function(self, X: Any) -> Array:
        """A score for each class [n, c], or one for each row [n] where there are two classes."""
        x = self._seen(X)
        scores = find(self.task_).scores(self.task_, self._wide, x)
        return scores[:, 1] - scores[:, 0] if scores.ndim == 2 and scores.shape[1] == 2 else scores

    def predict(self, X: Any) -> Array:
        """The class of each row."""
        said = self._said(X)
        return self.classes_[said]

    @available_if(_gives_chances)
    def predict_proba(self, X: Any) -> Array:
        """Probabilities [n, c], of a softmax or logistic model."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = self.epsilon is not None  # as much noise as a sample's protection takes
        return tags


class CrowdRegressor(RegressorMixin, _CrowdEstimator):
    """A crowd of simulated devices that learns to predict a number privately: `CrowdRegressor(epsilon=1.0).fit(X, y)`.

    Guarantee, what it does not cover, and parameters are those of `Crowd`. target: (low, high) of y, which are public:
    numbers are clipped to them. None: taken from y, with a warning of what no ε covers.
    """

    _measure = "R²"

    @property
    def _classes(self) -> int | None:
        return None

    def _encoded(self, y: Array) -> Array:
        if y.dtype.kind not in "fiub":
            raise FitError(f"Unknown label type: {y.dtype}. CrowdRegressor learns numbers; use Crowd for classes.")
        if self.task is not None:
            self._middle, self._half = label_scale(self._given_task().labels)
            return self._numbers(y)
        low, high = self._target_bounds(y)
        self._middle, self._half = (low + high) / 2, max((high - low) / 2, 1e-9)
        return np.clip(self._numbers(y), -1, 1)

    def _target_bounds(self, y: Array) -> tuple[float, float]:
        if self.target is None:
            warnings.warn(
                "target was taken from y, its smallest and largest value: no ε covers what they show. Give "
                "target=(low, high) that are known without looking at y.",
                PrivacyWarning,
                stacklevel=5,
            )
            return float(y.min()), float(y.max())
        low, high = read_target(self.target)
        return float(low), float(high)

    def _changed(self, rows: Array, y: Array) -> Iterator[str]:
        yield from super()._changed(rows, y)
        if self.target is not None and (clipped := clipped_labels(y, *self.target)) is not None:
            yield clipped

    def _numbers(self, y: Any) -> Array:
        return ((np.asarray(y, np.float64) - self._middle) / self._half).astype(np.float32)

    def _judged(self, study: Study, x: Array, y: Array) -> Array:
        return study.r2(x, y)

    def _finish(self) -> None:
        size, weights = self.n_features_in_, self.weights_
        if weights.size in (size, size + 1):
            column = weights.reshape(-1)
            self.coef_ = column[:size] * self._half
            self.intercept_ = float(column[size] if len(column) > size else 0.0) * self._half + self._middle

    def predict(self, X: Any) -> Array:
        """The number of each row."""
        return self._said(X).astype(np.float64) * self._half + self._middle

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = self.epsilon is not None
        return tags
