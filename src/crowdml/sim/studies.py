"""A task run by a simulated crowd: `simulate` makes a `Study` of it.

What a simulated device pays is what a real one would pay: both totals come from the protocol's own table.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.attacks import Attackers
from crowdml.datasets.populations import Population
from crowdml.errors import DataError, GuaranteeError, TaskError
from crowdml.features import label_scale, prepared, prepared_numbers
from crowdml.messages import encode, masked_steps
from crowdml.price import Epsilons, Price, check_budget
from crowdml.privacy.losses import Loss, Total, exact
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.noise import Silence
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.protocols import find, is_delta_too_large
from crowdml.secagg.terms import terms_of
from crowdml.sim.arguments import is_number, owners, pair, read_labels, read_rows, several, whole
from crowdml.sim.layout import Rounds, Schedule
from crowdml.sim.run import Run, Tick
from crowdml.sim.trial import Deal, Laid, Trial, laid_out
from crowdml.sim.world import Delay
from crowdml.storage import Budget, Charge, Ledger
from crowdml.task import Task, find_task
from crowdml.texts import number_text
from crowdml.turn import Tamper, check_in, first_turn


@dataclass(frozen=True)
class Study:
    """Some trials of one task on one crowd."""

    task: Task
    runs: tuple[Run, ...]
    populations: tuple[Population, ...]
    """Which device holds which rows, in each trial."""
    planned: Epsilons
    """What every check-in costs that samples, passes, budget and `stop.steps` allow: fixed before the run by public
    values, so it holds however the run ends. Infinite where nothing is proved."""
    paid: Epsilons
    """What the check-ins that there were cost. Where `stop.error` ended the run, its own releases decided when: then
    this is the reading of an odometer and no guarantee."""
    check_ins: int
    """Check-ins in the first trial. These and the bytes, of the first trial too, depend on public timing alone."""
    bytes_up: int
    bytes_down: int
    silent: int
    """Devices that hold fewer samples than a check-in takes, and so give nothing."""
    uses: int
    """In how many check-ins the plan uses a sample, at most."""
    seconds: float
    engine: str
    """The engine that ran it: "compiled" or "events"."""
    rounds: int | None = None
    """How many cohorts or rounds met in the first trial, where the task has them. `points` then counts rounds."""
    abandoned: int = 0
    """How many of these rounds had too few survivors."""
    seed: int = 0
    """The seed that repeats the study."""
    test: Samples | None = None
    """The rows on which `scores` are computed, where `simulate` was given some."""

    @property
    def population(self) -> Population:
        return self.populations[0]

    @property
    def unit(self) -> str:
        """What `points` counts."""
        return "check-ins" if self.rounds is None else "rounds"

    def accuracy(self, x: Array, y: Array) -> Array:
        """Share of x [n, d] that the model gets right at each point of each trial: [trials, points]."""
        return self._judged(x, lambda said: np.mean(said == y))

    def r2(self, x: Array, y: Array) -> Array:
        """R², one minus the share of the variance of y [n] that is left, at each point of each trial: for numbers."""
        spread = max(float(np.var(y)), 1e-30)
        return self._judged(x, lambda said: 1 - np.mean((said - y) ** 2) / spread)

    def distance(self, x: Array, y: Array) -> Array:
        """The mean distance between y [n] and what the model says, in the unit of the labels: [trials, points].

        y: as devices learn it, between -1 and 1 where the task has `labels.low` and `labels.high`.
        """
        half = label_scale(self.task.labels)[1]
        return self._judged(x, lambda said: half * np.mean(abs(said - y)))

    @property
    def scores(self) -> Array:
        """Accuracy on the test rows at the end of each trial, or R² where the task predicts numbers: [trials]."""
        if self.test is None:
            raise DataError("this study has no test rows, so it has no scores. Give simulate `test=(X, y)`.")
        judge = self.r2 if self.task.classes is None else self.accuracy
        return judge(self.test.x, self.test.y)[:, -1]

    def _judged(self, x: Array, judge: Callable[[Array], Any]) -> Array:
        predict = find(self.task).predict
        return np.array([[judge(predict(self.task, w, x)) for w in run.weights] for run in self.runs])

    @property
    def claimed(self) -> float | None:
        """What the paper says a sample pays; None unless the task runs as published."""
        claims = find(self.task).claims
        return claims(self.task) if self.task.as_published and claims is not None else None

    @property
    def server_row(self) -> float | None:
        """What a row of the server's own paid in all rounds that were closed, in the trial with the most of them. None
        where the server lets out nothing that it charges."""
        losses = [row.loss for row in find(self.task).server_mechanisms(self.task).values() if not row.public]
        if not losses:
            return None
        return Total.of(losses).scaled(max(run.heard for run in self.runs)).epsilon(self.task.privacy.delta)

    @property
    def points(self) -> Array:
        return self.runs[0].points

    @property
    def crowd_says(self) -> dict[str, float] | None:
        """The error rate as the server sees it, eq. (14), of the first trial; None where no error count leaves."""
        tally = find(self.task).progress(self.task, self.runs[0].state)
        if tally is None or tally.errors is None:
            return None
        counted, samples = tally.errors, max(1, tally.errors.samples)
        return {"error": counted.counts[0] / samples, "error_sd": math.sqrt(counted.variance) / samples}


def simulate(
    task: Task | str | Path,
    X: Any,
    y: Any,
    *,
    devices: int | Sequence[Any] | Array | Deal | Population | None = None,
    test: tuple[Any, Any] | None = None,
    trials: int = 1,
    seed: int | Sequence[int] | None = None,
    passes: int | None = None,
    delay: Delay | str | float = 0,
    world: Literal["fleet"] | None = None,
    dropout: float = 0.0,
    engine: str = "compiled",
    points: int = 40,
    liars: Mapping[int, Tamper] | Attackers | None = None,
    own: tuple[Any, Any] | None = None,
    workers: int = 2,
    expect: Tick = lambda _: None,
    tick: Tick = lambda _: None,
) -> Study:
    """Run a task on a simulated crowd that holds rows X [n, d] with labels y [n], `trials` times.

    Guarantee: none for X and y, which stay with the caller, as the seed does; the study says what the devices of such a
    crowd would pay.

    task: a `Task`, a file, or the name of a task that is shipped. X: finite numbers; rows outside the ball of
    `features.norm` are shrunk onto it, as a device does. y: names of the task's classes, or class numbers from 0 as
    integers; for a task that predicts numbers, numbers. devices: how many, with equal numbers of rows each; an array
    that says whose each row is; a `Deal` for other ways to deal rows out; None: as many as have one check-in each.
    test: (X, y) on which `Study.scores` are computed. seed: of who holds what, the timing and the noise of all trials,
    None for a fresh one (`Study.seed`); or a list with the seed of each trial. passes: how often a sample is used,
    `privacy.uses` where it is None. delay: of each leg of a trip, in samples of the whole crowd (100,
    "exponential:100"). world: "fleet" for the timing of `crowdml fleet` in place of a delay. dropout: the share of a
    cohort that vanishes. engine: "compiled", or "events", which draws the same noise. points: how often the model is
    looked at on the way. liars: devices by number, and what they do, or `Attackers(share, attack)`. own: (X, y), rows
    of the server's own, where the task combines its rounds with some; None: as many rows of X are set apart, chosen by
    the seed, and no device holds them. workers: threads.
    `expect` hears how many check-ins there will be in all, `tick` how many more were done; both count rounds where the
    server hears rounds.
    """
    task = task if isinstance(task, Task) else find_task(str(task))
    x, labels = _rows(task, X, y)
    held = None if test is None else Samples(*_rows(task, *pair(test, "test"), "test[0]", "test[1]"))
    servers = None if own is None else Samples(*_rows(task, *pair(own, "own"), "own[0]", "own[1]"))
    whole(trials, "trials", 1)
    whole(passes, "passes", 1, "those of the task")
    seed = _seed(seed)
    if servers is None:
        x, labels, servers = _set_apart(task, x, labels, devices, seed)
    people = _people(task, devices, len(labels))
    late = delay if isinstance(delay, Delay) else Delay.parse(str(delay))
    seeds = trial_seeds(seed, trials) if isinstance(seed, int) else list(seed)
    passes = task.privacy.uses if passes is None else passes
    price, started = check_budget(find(task), task, passes), time.perf_counter()
    laid = [
        laid_out(Trial(task, people, each, passes, late, world, dropout, engine, points, True, liars or {},
                      servers), labels)
        for each in seeds
    ]  # fmt: skip
    lengths = [each.length for each in laid]
    expect(sum(lengths))
    looks = laid[0].looks(min(lengths))
    with ThreadPoolExecutor(workers) as pool:
        runs = list(pool.map(lambda each: each.run(x, labels, looks, tick), laid))
    up, down = message_bytes(task)
    count, first = len(runs[0].schedule), laid[0]
    trips, uses = _most([each.planned for each in laid], laid)
    rounds = first.layout if isinstance(first.layout, Rounds) else None
    met = int((rounds.round_of < runs[0].heard).sum()) if rounds is not None else 0
    return Study(
        task,
        tuple(runs),
        tuple(cast("Population", each.population) for each in laid),
        price.after(trips, uses),
        price.after(*_most([run.schedule for run in runs], laid)),
        count,
        up * count,
        down * count,
        int((first.sensed == 0).sum()),
        uses,
        time.perf_counter() - started,
        first.engine,
        (met if rounds is not None else runs[0].heard) if first.in_rounds else None,
        0 if rounds is None else met - int(rounds.summed[:met].sum()),
        seed if isinstance(seed, int) else seeds[0],
        held,
    )


def _seed(given: Any) -> int | list[int]:
    """The seed of all trials, a fresh one where None is given; or the seed of each."""
    for each in several(given, "seed", "a whole number from 0 on"):
        whole(each, "seed", 0, "a fresh one" if given is None else "")
    if given is None:
        return secrets.randbits(32)
    return int(given) if is_number(given) else [int(each) for each in given]


def trial_seeds(seed: int, trials: int) -> list[int]:
    """The seed of each trial of a study."""
    if trials < 1:
        raise TaskError(f"trials = {trials}: at least 1.")
    return [int(word) for word in np.random.SeedSequence(seed).generate_state(trials)]


def _rows(task: Task, X: Any, y: Any, name: str = "X", label: str = "y") -> tuple[Array, Array]:
    """Rows and labels as a device's buffer would hold them: float32 in the task's ball, class numbers or numbers."""
    x = read_rows(X, name)
    refuse_width(task, x, name)
    labels = read_labels(y, len(x), label, numbers=task.classes is None)
    x = inside(task, x)
    if task.classes is None:
        return x, prepared_numbers(task.labels, labels).astype(np.float32)
    if labels.dtype.kind not in "iu":
        number = {name: index for index, name in enumerate(task.labels.classes)}
        strange = next((row for row, name in enumerate(labels) if str(name) not in number), None)
        if strange is not None:
            raise DataError(
                f"{label}[{strange}] is {str(labels[strange])!r}; task {task.name!r} has the classes "
                f"{', '.join(task.labels.classes)}. Give these names, or their numbers from 0 as integers."
            )
        labels = np.array([number[str(name)] for name in labels])
    elif ((labels < 0) | (labels >= task.classes)).any():
        strange = int(np.flatnonzero((labels < 0) | (labels >= task.classes))[0])
        raise DataError(
            f"{label}[{strange}] is {labels[strange]}; task {task.name!r} has {task.classes} classes, and class "
            f"numbers are 0 to {task.classes - 1}."
        )
    return x, labels.astype(np.int32)


def refuse_width(task: Task, x: Array, name: str = "X") -> None:
    """Refuse rows [n, d] that have another number of columns than the task."""
    if x.shape[1] != task.features.width:
        raise DataError(
            f"task {task.name!r} takes rows of {task.features.width} numbers, and {name} has {x.shape[1]} columns. "
            "Change the task, or give other rows."
        )


def inside(task: Task, x: Array) -> Array:
    """Rows as a device prepares them; without bounds, rows that lie in the ball already stay as they are."""
    norm = task.features.norm
    if task.features.low is not None or task.features.extractor is not None:
        return prepared(task.features, x)
    fits = np.linalg.norm(x.astype(np.float64), 1 if norm.kind == "l1" else 2, axis=1) <= float(norm.bound)
    if fits.all() and x.dtype == np.float32:
        return x
    return np.where(fits[:, None], x, prepared(task.features, x)).astype(np.float32)


def _people(task: Task, devices: Any, rows: int) -> Population | Deal:
    """Which device holds which rows: see `simulate`."""
    if devices is None:
        return Deal("iid", max(1, rows // find(task).batch(task)))
    if isinstance(devices, Population | Deal):
        return devices
    if np.ndim(devices) == 0:
        return Deal("iid", int(devices))
    return Deal("by_user", groups=owners(devices, rows, "devices"))


def _set_apart(
    task: Task, x: Array, y: Array, devices: Any, seed: int | Sequence[int]
) -> tuple[Array, Array, Samples | None]:
    """The rows that devices hold, and those of the server's own, where the task's server lets something out of some."""
    table = find(task).server_mechanisms(task)
    if not table:
        return x, y, None
    count = min(row.covers.size for row in table.values())
    dealt = isinstance(devices, Deal) and devices.groups is None
    if not (devices is None or isinstance(devices, int) or dealt):
        raise DataError(
            f"task {task.name!r} combines its rounds with rows of the server's own, and `devices` says whose each row "
            "is. Give simulate `own=(X, y)`, rows that no device holds."
        )
    if count >= len(y):
        raise DataError(
            f"task {task.name!r} sets {count:,} rows apart for its server, and there are {len(y):,} in all. Lower "
            "protocol.combine.rows, or take more data."
        )
    drawn = np.random.default_rng([seed] if isinstance(seed, int) else list(seed)).permutation(len(y))
    theirs, rest = np.sort(drawn[:count]), np.sort(drawn[count:])
    return x[rest], y[rest], Samples(x[theirs], y[theirs])


def _most(schedules: list[Schedule], laid: Sequence[Laid]) -> tuple[int, int]:
    """How often the busiest device of any trial checked in, and in how many check-ins its most used sample was."""
    trips = max(int(np.bincount(schedule.device).max()) for schedule in schedules)
    return trips, max(_uses(schedule, each.population) for schedule, each in zip(schedules, laid, strict=True))


def _uses(schedule: Schedule, population: Any) -> int:
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
    offered = first_turn(protocol, task).published
    down = len(encode(offered))
    if task.masking is not None and task.privacy.mechanism != "none":
        return terms_of(task, protocol.mechanisms(task)).size, down
    message = check_in(protocol, task, nothing, offered, noise=Silence(), me="device").message
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
    if math.isinf(study.planned.sample):
        raise GuaranteeError(
            "this crowd learned without noise, so every sample's loss is unbounded and no budget allows to charge it: "
            "there is no ledger. Give an epsilon."
        )
    device = int(np.bincount(schedule.device).argmax())
    held = int(study.population.counts[device])
    own, order = schedule.device == device, np.argsort(schedule.trip[schedule.device == device])
    trips = zip(schedule.trip[own][order], schedule.samples[own][order] % held, strict=True)
    whole = Price.of(find(task), task).sample(study.uses)
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
            for row, mechanism in ((row, each.at(int(trip))) for row, each in table.items())
        ]
        ledger.charge(task.hash, charges, [budget])
    return ledger


def _if_all_collude(mechanism: Mechanism) -> tuple[Loss, ...]:
    """What a charge says besides, of a row that leaves under masks."""
    return (mechanism.alone, mechanism.device_alone) if mechanism.observer is Observer.AGGREGATE else ()


def _just_above(total: Total, delta: float) -> Fraction:
    """A budget that this total just fits into."""
    return exact(total.epsilon(delta)) * (1 + Fraction(1, 10**9))


def describe_price(study: Study) -> str:
    """'sample ε 1, device ε 155 (δ 10⁻⁶)': what the plan costs; after it what a paper claims for it."""
    text, claimed = study.planned.text(study.task.privacy.delta), study.claimed
    if is_delta_too_large(study.task):
        text += "; no device accepts a δ as large"
    return text if claimed is None else f"{text}; as published, claimed {number_text(claimed, 4)}"
