"""A task run by a simulated crowd (`simulate`), and the same in scikit-learn's shape (`Crowd`).

What a simulated device pays is what a real one would pay: both totals come from the protocol's own table.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.validation import check_array, check_is_fitted, check_X_y  # pyright: ignore[reportUnknownVariableType]

from crowdml.arrays import Array, Samples
from crowdml.datasets.populations import Population, by_class, by_user, iid
from crowdml.errors import DataError, GuaranteeError, TaskError
from crowdml.features import normalise
from crowdml.messages import SERVER, encode, masked_steps
from crowdml.models import Model
from crowdml.privacy.losses import Loss, Total, exact
from crowdml.privacy.mechanisms import Mechanism, at
from crowdml.privacy.noise import Silence
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.protocol import Context, alone, check_budget, device_alone, quote
from crowdml.protocols import PROTOCOLS, admm, find, gram, is_delta_too_large, local_updates
from crowdml.protocols.sgd import claimed_epsilon, plan, progress, public_step
from crowdml.secagg.terms import terms_of
from crowdml.sim import cohorts, compiled, uncompiled
from crowdml.sim.crowd import Holding, Run, published, turn
from crowdml.sim.schedule import Schedule, lay_out
from crowdml.sim.world import Delay, World
from crowdml.storage.budget import Budget
from crowdml.storage.ledger import Charge, Ledger
from crowdml.task import Bound, Features, Labels, Masking, Privacy, Task, read_section

ENGINES = ("compiled", "events")
POPULATIONS = ("iid", "by_class", "by_user")


Tick = Callable[[int], None]


# --- a task, run by a crowd ---


@dataclass(frozen=True)
class Cost:
    """What the dearest sample and the dearest device pay in all, at `delta`; infinite where nothing is proved.

    `epsilon_sample` and `epsilon_device` are totals of the plan: of every check-in that samples, passes, budget and
    `stop.steps` allow, fixed before the run by public values. They hold however the run ends.
    `paid_sample` and `paid_device` are what was paid so far, by the check-ins that there were. Where `stop.error` ended
    the run, its own releases decided when, and these are a reading of an odometer and no guarantee.
    """

    epsilon_sample: float
    epsilon_device: float
    delta: float
    delta_too_large: bool
    """Whether no device accepts a promise at this delta: only simulations show it."""
    claimed: float | None
    """What the paper says a sample pays; None unless the task runs as published."""
    paid_sample: float
    paid_device: float
    alone_sample: float
    """`epsilon_sample` if everyone else colludes (review, R11): the same, but for what leaves under masks."""
    alone_device: float


@dataclass(frozen=True)
class Study:
    """Some trials of one task on one crowd."""

    task: Task
    runs: tuple[Run, ...]
    population: Population
    cost: Cost
    check_ins: int
    """Of the first trial, as the bytes: they depend on public timing alone."""
    bytes_up: int
    bytes_down: int
    silent: int
    """Devices that hold fewer samples than a check-in takes, and so give nothing."""
    uses: int
    """In how many check-ins the plan uses a sample, at most."""
    seconds: float
    rounds: int | None = None
    """Of the first trial, where check-ins leave under masks: the cohorts that met. `points` then counts rounds."""
    abandoned: int = 0
    """Of those, how many had too few survivors."""

    @property
    def unit(self) -> str:
        """What `points` counts."""
        return "check-ins" if self.rounds is None else "rounds"

    def accuracy(self, x: Array, y: Array) -> Array:
        """Share of x [n, d] that the model gets right at each point of each trial: [trials, points]."""
        predict = partial(gram.predictions, self.task) if self._by_moments else model_of(self.task).predict
        return np.array([[np.mean(predict(w, x) == y) for w in run.weights] for run in self.runs])

    @property
    def _by_moments(self) -> bool:
        return self.task.protocol["kind"] == "gram"

    @property
    def points(self) -> Array:
        return self.runs[0].points

    @property
    def crowd_says(self) -> dict[str, float] | None:
        """The error rate as the server sees it, eq. (14), of the first trial; None where no error count leaves."""
        state = self.runs[0].state
        if self.task.protocol["kind"] != "sgd" or "errors" not in plan(self.task).table:
            return None
        seen = progress(self.task, int(state.counted), float(state.errors), state.labels)
        return {"error": seen.error, "error_sd": seen.error_sd}


def _fixed(task: Task) -> Any:
    """What the task's protocol fixes: its settings and its model among it."""
    return {"admm": admm.plan, "local_updates": local_updates.plan}.get(str(task.protocol["kind"]), plan)(task)


def model_of(task: Task) -> Model:
    """The model that the task's protocol trains."""
    return _fixed(task).model


def spread_out(kind: str, y: Array, devices: int, seed: int, groups: Array | None = None) -> Population:
    """Rows dealt out to devices: 'iid', 'by_class' (at most two classes a device) or 'by_user' (one a person)."""
    if kind == "iid":
        return iid(len(y), devices, seed)
    if kind == "by_class":
        return by_class(y, devices, seed)
    if kind == "by_user":
        return by_user(groups)
    raise TaskError(f"population {kind!r}: choose one of {', '.join(POPULATIONS)}.")


def simulate(
    task: Task,
    x: Array,
    y: Array,
    deal: Callable[[int], Population],
    *,
    seeds: Sequence[int],
    passes: int | None = None,
    delay: Delay | None = None,
    dropout: float = 0.0,
    engine: str = "compiled",
    points: int = 40,
    workers: int = 2,
    expect: Tick = lambda _: None,
    tick: Tick = lambda _: None,
) -> Study:
    """Run the task on rows x [n, d], y [n] once for each seed; the model is looked at `points` times on the way.

    `deal` deals the rows out to devices, from the trial's seed. A device gives no more samples than
    `privacy.budget.samples`, and none where it holds fewer than a check-in takes; several passes over a buffer that
    overflows are refused (`refuse_repeats`): so no batch ever holds one sample twice. `expect` hears how many
    check-ins there will be in all, `tick` how many more were done. Without `passes` there are as many as the task has
    `privacy.uses`.

    A masked task runs in cohorts, one after the other (`sim/cohorts.py`), and all of this counts rounds; `dropout` is
    the chance that a device of a cohort vanishes after it drew its noise.
    """
    if task.protocol["kind"] == "proportions":
        raise TaskError(
            f"task {task.name!r}: its server has no model to look at. `crowdml.sim.counting.counts` runs a crowd that "
            "counts, `crowdml.sim.peers.simulate` devices that teach each other, and `crowdml simulate` both."
        )
    passes = task.privacy.uses if passes is None else passes
    price, started = check_budget(find(task), task, passes), time.perf_counter()
    if engine not in ENGINES:
        raise TaskError(f"engine {engine!r}: choose one of {', '.join(ENGINES)}.")
    if x.shape[1] != task.features.dimension:
        raise DataError(
            f"task {task.name!r} wants features.dimension = {task.features.dimension}, and this data has {x.shape[1]} "
            "features. Change the task, or name other data."
        )
    batch, cap = find(task).batch(task), task.privacy.budget.samples if task.privacy.budget else None
    crowds = [_Crowd.of(deal(seed), batch, cap, passes, delay or Delay()) for seed in seeds]
    trials = _Masked if task.masking is not None else _OneByOne
    laid = trials.of(task, crowds, seeds, passes, delay, dropout, engine)
    lengths = laid.lengths
    expect(sum(lengths))
    shortest = min(lengths)
    even = -(-shortest // points)  # even stretches compile once; other lengths would compile each
    looks = np.append(np.arange(even, shortest, even), shortest)

    def trial(number: int) -> Run:
        return _looked(laid.run(number, Holding(x, y, crowds[number].population, passes), looks, tick), looks)

    with ThreadPoolExecutor(workers) as pool:
        runs = list(pool.map(trial, range(len(seeds))))
    up, down = message_bytes(task)
    count = len(runs[0].schedule)
    trips, uses = _most(laid.planned, crowds)
    trips_paid, uses_paid = _most([run.schedule for run in runs], crowds)
    cost = Cost(
        price.sample_epsilon(uses),
        price.device_epsilon(trips),
        task.privacy.delta,
        is_delta_too_large(task),
        claimed_epsilon(task) if task.as_published else None,
        price.sample_epsilon(uses_paid),
        price.device_epsilon(trips_paid),
        price.sample_epsilon_alone(uses),
        price.device_epsilon_alone(trips),
    )
    seconds = time.perf_counter() - started
    first, (met, abandoned) = crowds[0], laid.met(runs[0])
    return Study(
        task,
        tuple(runs),
        first.population,
        cost,
        count,
        up * count,
        down * count,
        first.silent,
        uses,
        seconds,
        met,
        abandoned,
    )


@dataclass(frozen=True)
class _OneByOne:
    """Trials in which devices check in on their own: laid out beforehand, since timing depends on no value."""

    task: Task
    crowds: list[_Crowd]
    seeds: Sequence[int]
    schedules: list[Schedule]
    engine: str

    @staticmethod
    def of(
        task: Task,
        crowds: list[_Crowd],
        seeds: Sequence[int],
        passes: int,
        delay: Delay | None,
        dropout: float,
        engine: str,
    ) -> _OneByOne:
        if dropout:
            raise TaskError(f"dropout = {dropout:g}: cohorts lose devices, and task {task.name!r} has no [masking].")
        batch, capacity = _fixed(task).settings.batch, _fixed(task).settings.capacity
        pairs = zip(crowds, seeds, strict=True)
        schedules = [lay_out(crowd.world, seed=seed, batch=batch, capacity=capacity) for crowd, seed in pairs]
        for schedule in schedules:
            refuse_repeats(schedule, batch=batch, capacity=capacity, passes=passes)
        return _OneByOne(task, crowds, seeds, schedules, engine)

    @property
    def lengths(self) -> list[int]:
        return [len(schedule) for schedule in self.schedules]

    @property
    def planned(self) -> list[Schedule]:
        last = self.task.stop.steps
        if last is None:
            return self.schedules
        return [_sent(schedule, _check_ins_until(self.task, schedule, last)) for schedule in self.schedules]

    def run(self, number: int, holding: Holding, looks: Array, tick: Tick) -> Run:
        schedule, seed = self.schedules[number], self.seeds[number]
        if self.engine == "compiled":
            (run,) = compiled.run(self.task, holding, [schedule], [seed], points=looks.tolist(), tick=tick)
        else:
            from crowdml.sim import event_queue

            run = event_queue.run(
                self.task,
                holding,
                self.crowds[number].world,
                seed=seed,
                capacity=_fixed(self.task).settings.capacity,
                points=looks.tolist(),
                backend="jax",
                tick=tick,
            )
        return _ended(run, schedule)

    def met(self, run: Run) -> tuple[int | None, int]:
        return None, 0


@dataclass(frozen=True)
class _Masked:
    """Trials in cohorts, whose members are drawn beforehand from public numbers."""

    task: Task
    seeds: Sequence[int]
    rounds: list[cohorts.Rounds]
    dropout: float

    @staticmethod
    def of(
        task: Task,
        crowds: list[_Crowd],
        seeds: Sequence[int],
        passes: int,
        delay: Delay | None,
        dropout: float,
        engine: str,
    ) -> _Masked:
        if delay not in (None, Delay()):
            raise TaskError(
                f"task {task.name!r} is masked: its cohorts take their turns in step, so no message is late. Leave out "
                "the delay; devices vanish by `dropout`."
            )
        if engine != "compiled":
            raise TaskError(f"task {task.name!r} is masked, and cohorts run on the engine 'compiled' alone.")
        if not 0 <= dropout < 1:
            raise TaskError(f"dropout = {dropout:g}: a share of the devices, from 0 to below 1.")
        empty = np.zeros((1, 1), np.float32), np.zeros(1, np.int32)
        rounds = [
            cohorts.lay_out(task, Holding(*empty, crowd.population, passes), seed, dropout=dropout)
            for crowd, seed in zip(crowds, seeds, strict=True)
        ]
        return _Masked(task, seeds, rounds, dropout)

    @property
    def lengths(self) -> list[int]:
        return [len(laid) for laid in self.rounds]

    @property
    def planned(self) -> list[Schedule]:
        """Every round that there may be: with `stop.steps`, up to the last that is summed, which dropouts decide."""
        masking, last = self.task.masking, self.task.stop.steps
        assert masking is not None
        plans: list[Schedule] = []
        for laid in self.rounds:
            summed = np.cumsum(laid.alive.sum(1) >= masking.minimum)
            count = len(laid) if last is None else min(len(laid), int((summed < last).sum()) + 1)
            plans.append(cohorts.paid(laid, find(self.task).batch(self.task), count))
        return plans

    def run(self, number: int, holding: Holding, looks: Array, tick: Tick) -> Run:
        seed, points = self.seeds[number], looks.tolist()
        if self.task.protocol["kind"] in uncompiled.PROTOCOLS:
            return uncompiled.run(self.task, holding, seed, dropout=self.dropout, points=points, tick=tick)
        plans = [self.rounds[number]]
        (run,) = cohorts.run(self.task, holding, [seed], points=points, plans=plans, tick=tick)
        return run

    def met(self, run: Run) -> tuple[int | None, int]:
        rounds = int(run.schedule.version.max(initial=-1)) + 1
        masking = self.task.masking
        assert masking is not None
        laid = self.rounds[self.seeds.index(run.seed)]
        summed = int((laid.alive.sum(1)[:rounds] >= masking.minimum).sum())
        return rounds, rounds - summed


@dataclass(frozen=True)
class _Crowd:
    """Who takes part in a trial, and when."""

    population: Population
    world: World
    silent: int

    @staticmethod
    def of(population: Population, batch: int, cap: int | None, passes: int, delay: Delay) -> _Crowd:
        """No more samples a device than the cap; with several passes whole batches only, so that none wraps round."""
        counts = population.counts if cap is None else np.minimum(population.counts, cap)
        if passes > 1:
            counts = counts // batch * batch
        gives = counts >= batch
        if not gives.any():
            raise DataError(
                f"a check-in takes {batch} samples and each of {population.devices} devices holds "
                f"{int(population.counts.max())} at most, so nobody would check in. Use fewer devices, or lower "
                "protocol.batch."
            )
        sensed = np.where(gives, counts, 0) * passes
        world = World(
            population.devices, int(sensed.max()), counts=sensed, request=delay, check_out=delay, check_in=delay
        )
        held = np.where(gives, counts, population.counts).astype(np.int32)
        return _Crowd(replace(population, counts=held), world, int((~gives).sum()))


def refuse_repeats(schedule: Schedule, *, batch: int, capacity: int, passes: int) -> None:
    """Refuse several passes over a buffer that overflows, for batches of more than one sample.

    The samples that were turned away shift what follows, and a batch could then hold one sample twice, from two passes.
    Replacing it would move the sum by twice its sensitivity, and no charge here speaks of that.
    """
    if passes > 1 and batch > 1 and schedule.dropped:
        raise TaskError(
            f"passes = {passes} and protocol.buffer = {capacity}: with these delays {schedule.dropped} samples met a "
            f"full buffer, so a batch of {batch} could hold one sample twice, at more than its price. Take a larger "
            "protocol.buffer, smaller delays, or one pass."
        )


def _ended(run: Run, schedule: Schedule) -> Run:
    """The schedule up to the stop."""
    if run.stopped is None:
        return run
    if len(run.schedule) < len(schedule):
        last = int(run.points[-1])
    elif run.task.protocol["kind"] == "local_updates":  # where it diverged, the round that did is not counted
        last = _check_ins_until(run.task, schedule, int(run.state.rounds) + ("finite" in run.stopped))
    else:
        last = int(run.state.steps)
    return replace(run, schedule=_sent(schedule, last))


def _check_ins_until(task: Task, schedule: Schedule, steps: int) -> int:
    """How many check-ins arrive until the server has made so many steps: public timing decides."""
    if task.protocol["kind"] != "local_updates":
        return steps
    return local_updates.check_ins_until(task, schedule.version, schedule.trip, steps)


def _sent(schedule: Schedule, last: int) -> Schedule:
    """The first so many check-ins, with those who had read the weights before the last: they are paid for too."""
    sent = (np.arange(len(schedule)) < last) | (schedule.version < last)
    names = ("device", "trip", "samples", "version", "time")
    return replace(schedule, **{name: getattr(schedule, name)[sent] for name in names})


def _looked(run: Run, looks: Array) -> Run:
    """As many looks in each trial: one that stopped early keeps its last weights; its own end is the last look."""
    places = np.searchsorted(run.points, looks, side="left").clip(max=len(run.points) - 1)
    places[-1] = len(run.points) - 1
    return replace(run, points=looks, weights=run.weights[places])


def _most(schedules: list[Schedule], crowds: list[_Crowd]) -> tuple[int, int]:
    """How often the busiest device of any trial checked in, and in how many check-ins its most used sample was."""
    trips = max(int(np.bincount(schedule.device).max()) for schedule in schedules)
    uses = max(_uses(schedule, crowd.population) for schedule, crowd in zip(schedules, crowds, strict=True))
    return trips, uses


def _uses(schedule: Schedule, population: Population) -> int:
    """In how many check-ins the most used sample took part; no batch holds one twice (`refuse_repeats`)."""
    held = population.counts[schedule.device][:, None]
    keys = schedule.device[:, None].astype(np.int64) * population.rows.shape[1] + schedule.samples % held
    return int(np.unique(keys, return_counts=True)[1].max())


def message_bytes(task: Task) -> tuple[int, int]:
    """Bytes of a check-in and of a check-out, without signature and transport. They depend on shapes alone.

    Under masks a check-in is the masked vectors; keys and shares come on top (docs/secagg.md).
    """
    protocol = find(task)
    batch = protocol.batch(task)
    nothing = Samples(np.zeros((batch, task.features.dimension), np.float32), np.zeros(batch, np.int32))
    offered = published(protocol.server.start(task, Context(me=SERVER)))
    down = len(encode(offered))
    if task.masking is not None and task.privacy.mechanism != "none":
        return terms_of(task, protocol.mechanisms(task)).size, down
    message, _ = turn(protocol, task, nothing, offered, Silence(), me="device")
    if task.masking is not None:
        return sum(4 * steps.size for steps in masked_steps(message).values()), down
    return len(encode(message)), down


def replayed_ledger(study: Study, trial: int = 0) -> Ledger:
    """The ledger of the device that checked in most often, as its own file would hold it, in memory.

    A sample's serial is its place among the device's samples. A part is in one piece, and holds no sample twice:
    `simulate` refused what could break it up in a later pass (`refuse_repeats`). A part with gaps, where a full buffer
    turned samples away in the only pass, is charged from its first to its last serial.
    """
    task, schedule = study.task, study.runs[trial].schedule
    table = find(task).mechanisms(task)
    if math.isinf(study.cost.epsilon_sample):
        raise GuaranteeError(
            "this crowd learned without noise, so every sample's loss is unbounded and no budget allows to charge it: "
            "there is no ledger. Give an epsilon."
        )
    device = int(np.bincount(schedule.device).argmax())
    held = int(study.population.counts[device])
    own, order = schedule.device == device, np.argsort(schedule.trip[schedule.device == device])
    trips = zip(schedule.trip[own][order], schedule.samples[own][order] % held, strict=True)
    whole = quote(find(task), task).sample(study.uses)
    ledger = Ledger(":memory:")
    ledger.take_serials(held)
    budget = Budget(_just_above(whole, task.privacy.delta), task.privacy.delta, held, plan=whole)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for trip, samples in trips:
        charges = [
            Charge(
                task.hash,
                row,
                mechanism.loss,
                mechanism.device_loss,
                mechanism.observer,
                Adjacency.REPLACE_SAMPLE,
                int(samples[mechanism.covers.start : mechanism.covers.stop].min()),
                int(samples[mechanism.covers.start : mechanism.covers.stop].max()),
                now,
                *_if_all_collude(mechanism),
            )
            for row, mechanism in ((row, at(each, int(trip))) for row, each in table.items())
        ]
        ledger.charge(task.hash, charges, [budget])
    return ledger


def _if_all_collude(mechanism: Mechanism) -> tuple[Loss, ...]:
    """What a charge says besides, of a row that leaves under masks."""
    return (alone(mechanism), device_alone(mechanism)) if mechanism.observer is Observer.AGGREGATE else ()


def _just_above(total: Total, delta: float) -> Fraction:
    """A budget that this total just fits into."""
    return exact(total.epsilon(delta)) * (1 + Fraction(1, 10**9))


# --- in scikit-learn's shape ---


class Crowd(ClassifierMixin, BaseEstimator):
    """A crowd of simulated devices that learns a classifier privately: `Crowd(epsilon=1.0, seed=1).fit(X, y)`.

    Guarantee: what the devices of such a crowd send is (epsilon, delta)-DP in all for replacing any one sample,
    against anyone who sees all of it; `epsilon_sample_` is that total, at most `epsilon`. It is the total of the plan,
    fixed before the run by the passes. With `masking` it holds against who sees the sums of cohorts, with at most
    `colluders` devices among them; `epsilon_sample_alone_` is what is left if everyone else colludes.
    A device gives many samples:
    `epsilon_device_` is what all of them replaced at once would cost, and it is much larger. Both are of simulated
    devices, whose noise comes from a seed: the data given to `fit` is protected from nobody who holds the object.

    Not covered: whatever was fitted on X before it came here, such as scaling or PCA, and settings that were tuned
    by looking at scores on private data (R4); the names of the classes and their number, which are read off y. Rows of
    X are scaled one by one onto the unit sphere, which is free.

    protocol: "sgd". epsilon: a sample's total; None for no privacy. devices: samples are dealt out to so many, equally
    (what is left over belongs to nobody). model: "softmax", or "logistic" or "svm" for two classes. mechanism:
    "discrete-gaussian" (l2 sphere) or "discrete-laplace" (l1, delta = 0). batch: samples a check-in; None: all that a
    device has, in one. step: c of c/sqrt(t); None: `public_step`. passes: over the data, at a share of epsilon each.
    delay: of each leg of a trip, in samples of the whole crowd ("100", "exponential:100"). population: "iid",
    "by_class" or "by_user" (with `groups` in `fit`). update: "sgd", "adagrad", "rmsprop", "momentum" or "average".
    masking: the task's [masking] table, such as {"cohort": 50, "minimum": 40, "colluders": 5}: devices meet in cohorts
    and the server hears sums, with Skellam noise. dropout: the chance that a device of a cohort vanishes. engine:
    "compiled" or "events". seed: of the split, the timing and the noise; None: fresh from the operating system.
    as_published: the paper's Laplace form, in which `epsilon` is claimed once however many passes there are;
    `epsilon_sample_` says what it really costs.
    """

    def __init__(
        self,
        *,
        protocol: str = "sgd",
        epsilon: float | None = 1.0,
        delta: float = 1e-6,
        devices: int = 1000,
        model: str = "softmax",
        mechanism: str = "discrete-gaussian",
        batch: int | None = None,
        step: float | None = None,
        radius: float = 1000.0,
        l2: float = 0.0,
        passes: int = 1,
        delay: float | str = 0,
        population: str = "iid",
        update: str = "sgd",
        engine: str = "compiled",
        seed: int | None = None,
        as_published: bool = False,
        masking: Mapping[str, Any] | None = None,
        dropout: float = 0.0,
    ) -> None:
        self.protocol = protocol
        self.epsilon = epsilon
        self.delta = delta
        self.devices = devices
        self.model = model
        self.mechanism = mechanism
        self.batch = batch
        self.step = step
        self.radius = radius
        self.l2 = l2
        self.passes = passes
        self.delay = delay
        self.population = population
        self.update = update
        self.engine = engine
        self.seed = seed
        self.as_published = as_published
        self.masking = masking
        self.dropout = dropout

    def fit(
        self,
        X: Any,
        y: Any,
        *,
        groups: Any = None,
        evaluate: tuple[Any, Any] | None = None,
        tick: Tick = lambda _: None,
    ) -> Crowd:
        """Let the crowd learn X [n, d], y [n].

        `history_` holds the accuracy after so many check-ins: on `evaluate` = (X, y), or on the crowd's own samples,
        which only a simulator can look at. `tick` hears how many check-ins were done. With masks both count rounds.
        """
        rows, y = check_X_y(X, y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        self.n_features_in_ = rows.shape[1]
        if len(self.classes_) < 2:
            raise DataError(f"all {len(y)} labels are {self.classes_[0]!r}; a classifier needs at least two classes.")
        seed = secrets.randbits(32) if self.seed is None else int(self.seed)
        people = spread_out(self.population, labels, self.devices, seed, groups)
        task = self._task(int(people.counts.max()))
        x, labels = self._on_sphere(rows, task), labels.astype(np.int32)
        study = simulate(
            task,
            x,
            labels,
            lambda _: people,
            seeds=[seed],
            passes=self.passes,
            delay=Delay.parse(str(self.delay)),
            dropout=self.dropout,
            engine=self.engine,
            tick=tick,
        )
        run = study.runs[0]
        self.task_, self.study_, self.seed_ = task, study, seed
        self.weights_ = run.model
        self.coef_ = run.model.T if run.model.ndim == 2 else run.model[None, :]
        self.intercept_ = np.zeros(len(self.coef_))
        self.epsilon_sample_, self.epsilon_device_ = study.cost.epsilon_sample, study.cost.epsilon_device
        self.epsilon_sample_alone_, self.epsilon_device_alone_ = study.cost.alone_sample, study.cost.alone_device
        self.claimed_epsilon_ = study.cost.claimed
        self.check_ins_, self.bytes_up_, self.bytes_down_ = study.check_ins, study.bytes_up, study.bytes_down
        seen = (x, labels)
        if evaluate is not None:
            seen = (self._on_sphere(check_array(evaluate[0]), task), self._numbers(evaluate[1]))
        self.history_ = {
            study.unit.replace("-", "_"): study.points,
            "accuracy": study.accuracy(*seen)[0],
            "of": "evaluation data" if evaluate is not None else "the crowd's own samples",
        }
        self._ledger: Ledger | None = None
        return self

    @property
    def ledger_(self) -> Ledger:
        """The ledger of the device that gave most, replayed into memory when first asked for."""
        check_is_fitted(self, "study_")
        if self._ledger is None:
            self._ledger = replayed_ledger(self.study_)
        return self._ledger

    def decision_function(self, X: Any) -> Array:
        """Scores x.w: [n, c], or [n] for two classes and one weight vector."""
        return self._seen(X) @ self.weights_

    def predict(self, X: Any) -> Array:
        x = self._seen(X)
        return self.classes_[plan(self.task_).model.predict(self.weights_, x)]

    def predict_proba(self, X: Any) -> Array:
        """Softmax or logistic probabilities [n, c]. An svm has none."""
        if self.model == "svm":
            raise TaskError('model = "svm" gives no probabilities. Use "logistic" or "softmax".')
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        odds = np.exp(scores - scores.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def plot(self, path: str | Path | None = None) -> Any:
        """Accuracy over check-ins or rounds, with both totals in the title; the matplotlib axes, or a file."""
        check_is_fitted(self, "study_")
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 4), layout="constrained")
        axes = figure.add_subplot()
        axes.plot(self.study_.points, self.history_["accuracy"], color="#2563a8", marker=".")
        axes.set(
            xlabel=self.study_.unit,
            ylabel=f"accuracy on {self.history_['of']}",
            ylim=(0, 1),
            title=f"{self.devices:,} devices · {describe_cost(self.study_.cost)}",
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

    def _seen(self, X: Any) -> Array:
        check_is_fitted(self, "study_")
        x = check_array(X)
        if x.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X has {x.shape[1]} features, but Crowd is expecting {self.n_features_in_} features as input."
            )
        return self._on_sphere(x, self.task_)

    @staticmethod
    def _on_sphere(x: Array, task: Task) -> Array:
        norm = task.features.norm
        return normalise(x, "l1" if norm.kind == "l1" else "l2", float(norm.bound))

    def _numbers(self, y: Any) -> Array:
        return np.array(
            [int(np.flatnonzero(self.classes_ == label)[0]) if label in self.classes_ else -1 for label in y]
        )

    def _task(self, held: int) -> Task:
        """The task that these parameters describe; its step from `public_step` unless one was given."""
        if self.protocol not in PROTOCOLS:
            raise TaskError(f"protocol = {self.protocol!r}: choose one of {', '.join(PROTOCOLS)}.")
        laplace = self.mechanism == "discrete-laplace" or self.as_published
        if self.masking is not None and (laplace or self.mechanism not in ("discrete-gaussian", "skellam")):
            raise TaskError('masking needs mechanism = "skellam": no other noise is the sum of shares of its own kind.')
        gaussian = self.mechanism if self.masking is None else "skellam"
        mechanism = "none" if self.epsilon is None else "discrete-laplace" if laplace else gaussian
        delta = 0.0 if laplace else float(self.delta)
        epsilon = {} if self.epsilon is None else {"gradient": exact(self.epsilon)}
        task = Task(
            name="crowd",
            features=Features(self.n_features_in_, Bound("l1" if laplace else "l2")),
            labels=Labels(tuple(str(name) for name in self.classes_)),
            model={"kind": self.model, "l2": exact(self.l2)},
            protocol={
                "kind": self.protocol,
                "batch": held if self.batch is None else int(self.batch),
                "step": {"c": Fraction(1) if self.step is None else exact(self.step)},
                "radius": exact(self.radius),
                "update": self.update,
            },
            privacy=Privacy(mechanism, epsilon, delta, uses=1 if self.masking is None else self.passes),
            as_published=self.as_published,
            masking=None if self.masking is None else read_section(Masking, _exactly(self.masking), "masking"),
        )
        if self.epsilon is not None and not self.as_published and self.masking is None:
            task = task.with_(privacy=replace(task.privacy, epsilon={"gradient": _a_pass(task, self.passes)}))
        if self.step is None:
            task = task.with_(protocol={"step": {"c": public_step(task)}})
        return task


def _exactly(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table as a task file would hold it: floats as the fractions that their writer meant."""
    return {key: exact(value) if isinstance(value, float) else value for key, value in table.items()}


def _a_pass(task: Task, passes: int) -> Fraction:
    """What one of the passes may cost so that all of them cost a sample privacy.epsilon.gradient: rounded down."""
    whole = task.privacy.epsilon["gradient"]
    if passes <= 1:
        return whole

    def fits(epsilon: Fraction) -> bool:
        shared = task.with_(privacy=replace(task.privacy, epsilon={"gradient": epsilon}))
        return exact(quote(find(shared), shared).sample_epsilon(passes)) <= whole

    if task.privacy.mechanism == "discrete-laplace":
        return whole / passes
    low, high = whole / passes, whole
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return Fraction(math.floor(low * 10**6), 10**6)


def describe_cost(cost: Cost) -> str:
    """'sample ε 1, device ε 155 (δ 1e-06)': both totals of the plan, always together; with masks both prices."""
    if math.isinf(cost.epsilon_sample):
        return "no privacy"
    text = f"sample ε {cost.epsilon_sample:.3g}, device ε {cost.epsilon_device:.4g}"
    text += f" (δ {cost.delta:g}{', too large' if cost.delta_too_large else ''})" if cost.delta else ""
    if cost.alone_sample > cost.epsilon_sample:
        text += f"; if everyone else colludes {cost.alone_sample:.4g} and {cost.alone_device:.4g}"
    return text if cost.claimed is None else f"{text}; as published, claimed {cost.claimed:.3g}"
