"""Hamm, Luken & Xie, "Crowd-ML: a library for privacy-preserving machine learning on smart devices", 2017.

Section 4.2: Fig. 2 (a network of two hidden layers under noise of a stated deviation) and the demonstration with 80
Android devices. The paper gives no epsilon: each cell of Fig. 2 has the one it would have cost had each sample's
gradient been clipped to 1, for the one device of the experiment and for a sample; without a clip there is none.

Fig. 2 cannot have been made by Algorithm 1 as printed: noise of deviation 1 added to the weights of a network ends at
chance whatever c0 is. Noise times the learning rate (section 2.3) gives what the paper describes; both are here.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.arrays import Array
from crowdml.datasets import Dataset, blobs, iid, load
from crowdml.experiments.crowds import devices_for, label, public_line, six_digits
from crowdml.experiments.figure import MAIN, SOUND, Claim, Figure, Panel, PrivacyLabel, Series, over_trials
from crowdml.experiments.live import Played, play
from crowdml.experiments.published import local_updates as published_local
from crowdml.experiments.published.local_updates import (
    BY_RATE,
    CONSTANT,
    GAUSSIAN,
    LAPLACE,
    PATH,
    WARNING,
    Cost,
    Published,
    real_cost,
)
from crowdml.experiments.registry import Parts, Progress
from crowdml.models import Model, make_model
from crowdml.price import Price
from crowdml.protocols import find, settled
from crowdml.sim import compiled
from crowdml.sim.layout import Holding, Schedule, lay_out, meet
from crowdml.sim.world import Delay, World
from crowdml.task import Bound, Features, Labels, Masking, Privacy, StopRule, Task, TaskBudget

C0 = (0.1, 1.0, 10.0)
DEVIATIONS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
HIDDEN = (75, 75)
NETWORK_SEED = 2017
CLIP = 1.0
DELTA = 1e-5
"""Delta of Fig. 2: the review's."""
ACCURACY, END = "accuracy on the test rows", "accuracy at the end"


@dataclass(frozen=True)
class Case:
    """Data and size of a figure: the paper's own, or a quick one."""

    published: Dataset
    sound: Dataset
    trials: int
    quick: bool
    seed: int = 2017

    @property
    def seeds(self) -> list[int]:
        return [self.seed + 1_000_003 * trial for trial in range(self.trials)]

    @property
    def network(self) -> Model:
        hidden = (8, 8) if self.quick else HIDDEN
        return make_model("mlp", self.published.features, len(self.published.classes), hidden=hidden, seed=NETWORK_SEED)

    @property
    def not_covered(self) -> tuple[str, ...]:
        return ("float-noise",) if self.quick else ("pca", "tuning", "float-noise")


def _case(quick: bool, trials: int | None, most: int) -> Case:
    if quick:
        data = blobs(rows=1500, features=10, classes=3, seed=4, normalise="l2")
        return Case(data, data, trials or 2, quick)
    return Case(load("mnist-as-published"), load("mnist", normalise="l2"), trials or most, quick)


def accuracy(model: Model, weights: Array, x: Array, y: Array) -> Array:
    """Accuracy [...] of models [..., *shape]."""
    flat = np.asarray(weights).reshape(-1, *model.shape)
    told = [float((np.asarray(model.predict(each, x)) == y).mean()) for each in flat]
    return np.asarray(told).reshape(np.shape(weights)[: np.ndim(weights) - len(model.shape)])


# --- Fig. 2 ---


def cell(
    case: Case, c0: float, deviation: float, noise: str, *, falling: str = CONSTANT, clip: float | None = None
) -> Published:
    """One cell of Fig. 2, with Algorithm 1's own counter."""
    small: dict[str, Any] = {"rounds": 20, "local_steps": 3, "minibatch": 20} if case.quick else {}
    return Published(c0, deviation, noise, counter=PATH, falling=falling, clip=clip, **small)


def cost_of(case: Case, settings: Published) -> Cost:
    """What it would have cost with each sample's gradient clipped to 1; one device makes all check-ins."""
    clipped = replace(settings, clip=CLIP)
    return real_cost(clipped, dimension=math.prod(case.network.shape), samples=len(case.published.y_train), delta=DELTA)


def learn(case: Case, settings: Published, looks: int) -> tuple[Array, Array]:
    """Rounds [E] and accuracy [trials, E]."""
    data, model = case.published, case.network
    courses = published_local.run(settings, model, data.x_train, data.y_train, case.seeds, looks=looks)
    weights = np.stack([course.weights for course in courses])
    return courses[0].rounds, accuracy(model, weights, data.x_test, data.y_test)


@dataclass(frozen=True)
class Choice:
    """A masked run of the sound form; `server_rate` is how far the server follows the mean."""

    rounds: int
    steps: int
    rate: float
    clip: float
    server_rate: float


SOUND_CHOICES: Mapping[float, Choice] = {1.0: Choice(6, 5, 1.0, 1.0, 0.6), 8.0: Choice(10, 5, 1.0, 2.0, 1.0)}
"""By a device's total epsilon, of 996 devices with 60 digits each: `ours/local-tuning` tries each setting again."""


def sound_task(
    data: Dataset, choice: Choice, *, epsilon: float, devices: int, held: int, hidden: tuple[int, ...]
) -> Task:
    """`local_updates` under masks with the same network; every device in each round, none is missing or colludes."""
    return Task(
        name=data.name,
        features=Features(data.features, Bound("l2")),
        labels=Labels(data.classes),
        model={"kind": "mlp", "hidden": hidden, "seed": NETWORK_SEED},
        protocol={
            "kind": "local_updates",
            "batch": held,
            "local_steps": choice.steps,
            "rate": {"c": six_digits(choice.rate)},
            "clip": six_digits(choice.clip),
            "server_rate": six_digits(choice.server_rate),
        },
        masking=Masking(devices, devices),
        privacy=Privacy(
            "skellam",
            {"update": six_digits(epsilon)},
            DELTA,
            uses=choice.rounds,
            unit="device",
            budget=TaskBudget(six_digits(epsilon), held),
        ),
    )


def sound_accuracy(case: Case, epsilon: float, choice: Choice) -> tuple[float, Array]:
    """The device's honest total, and the accuracy [trials]."""
    data, devices = case.sound, 20 if case.quick else devices_for(case.sound, 1000)
    held = len(data.y_train) // devices
    hidden = (8, 8) if case.quick else HIDDEN
    task = sound_task(data, choice, epsilon=epsilon, devices=devices, held=held, hidden=hidden)
    total = Price.of(find(task), task).device_epsilon(choice.rounds)
    found = []
    for seed in case.seeds:
        holding = Holding(data.x_train, data.y_train, iid(len(data.y_train), devices, seed), choice.rounds)
        (course,) = compiled.run(task, holding, [meet(task, holding, seed)], [seed])
        found.append(accuracy(case.network, course.model, data.x_test, data.y_test))
    return total, np.asarray(found)


def fig2(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """Accuracy by noise and learning rate as published; the same noise times the step; and what privacy costs."""
    case = _case(quick, trials, 1)
    deviations = (1e-2, 1.0) if quick else DEVIATIONS
    rates = (1.0,) if quick else C0
    looks = 5 if quick else 20
    by_rate = (1.0,) if quick else (0.1, 1.0, 10.0)
    clipped_at = (0.1,) if quick else (0.01, 0.1, 1.0)
    sound = {8.0: Choice(5, 2, 1.0, 1.0, 1.0)} if quick else SOUND_CHOICES
    part = Parts(progress, len(rates) * (2 * len(deviations) + len(by_rate) + len(clipped_at)) + len(sound))
    public = PrivacyLabel(as_published=True, not_covered=case.not_covered)
    series: list[Series] = []
    panels: list[Panel] = []
    last: dict[tuple[str, float, float], float] = {}
    for noise, title in ((LAPLACE, "Laplace"), (GAUSSIAN, "Gaussian")):
        for c0 in rates:
            panel = f"{noise}-{c0:g}"
            panels.append(Panel(panel, f"{title} noise, c0 = {c0:g}", "rounds", ACCURACY, y_range=(0, 1), priced=False))
            for deviation in deviations:
                part(f"{title}, c0 = {c0:g}, s.d. {deviation:g}")
                settings = cell(case, c0, deviation, noise)
                rounds, told = learn(case, settings, looks)
                key = f"{noise}-c{c0:g}-sd{deviation:g}"
                name = f"s.d. {deviation:g}; clipped to 1: {_short(cost_of(case, settings))}"
                series.append(over_trials(key, name, rounds, told, public, panel=panel, marks=True))
                last[noise, c0, deviation] = float(told[:, -1].mean())
    series_rate, best_rate = _by_rate(case, rates, by_rate, part)
    series_sound = [*_clipped(case, rates, clipped_at, part), _sound(case, sound, part)]
    series_sound.append(public_line(case.network, case.sound, series_sound[-1].x, SOUND))
    over: dict[str, Any] = {"y_label": ACCURACY, "x_scale": "log", "y_range": (0, 1), "priced": False}
    title, paid = "Gaussian noise times the step (not Algorithm 1)", f"What a device really pays, δ = {DELTA:.0e}"
    panels += [
        Panel("rate", title, "s.d., before it is multiplied by η", **over),
        Panel(SOUND, paid.replace("e-0", "e-"), "total ε of a device", **over),
    ]
    claims = _fig2_claims(rates, deviations, last, best_rate, case)
    notes = (
        WARNING,
        "As run there is no clip, so nothing bounds what leaves and there is no privacy at any noise: the ε in the "
        "legends is what the cell would have cost with each sample's gradient clipped to 1.",
        "A device's ε is of one device that makes all 1,000 check-ins; a sample's of one that is used once a pass.",
        "Laplace noise is charged by zCDP, |Δ|² over the variance, or by the l1 norm where that is less.",
    )
    title = "A network under noise of a stated deviation"
    shown, name = (*series, *series_rate, *series_sound), case.published.name
    return Figure("hamm2017/fig2", title, name, case.trials, shown, claims, tuple(panels), notes, ends=END)


def _short(cost: Cost) -> str:
    if math.isinf(cost.device) or cost.device > 1e5:
        return "none to speak of (ε > 100,000)"
    device, sample = (f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in (cost.device, cost.sample))
    return f"device ε = {device}, sample {sample}"


def _by_rate(
    case: Case, rates: Sequence[float], deviations: Sequence[float], part: Parts
) -> tuple[list[Series], dict[float, tuple[float, float]]]:
    """Final accuracy where noise is multiplied by the step, and the best c0 at each deviation with its accuracy."""
    found: dict[tuple[float, float], Array] = {}
    for c0 in rates:
        for deviation in part.each(deviations, f"times the step, c0 = {c0:g}, s.d. {{:g}}"):
            settings = cell(case, c0, deviation, GAUSSIAN, falling=BY_RATE)
            found[c0, deviation] = learn(case, settings, 1)[1][:, -1]
    label = PrivacyLabel(as_published=True, not_covered=case.not_covered)
    series: list[Series] = []
    for c0 in rates:
        costs = [cost_of(case, cell(case, c0, deviation, GAUSSIAN, falling=BY_RATE)) for deviation in deviations]
        told = np.stack([found[c0, deviation] for deviation in deviations], axis=1)
        dear = "; ".join(f"{deviation:g}: {_short(cost)}" for deviation, cost in zip(deviations, costs, strict=True))
        name = f"c0 = {c0:g}" + (f"; clipped to 1 at s.d. {dear}" if c0 == rates[0] else "; the same ε")
        series.append(over_trials(f"by-rate-c{c0:g}", name, deviations, told, label, panel="rate", marks=True))
    best = {}
    for deviation in deviations:
        means = {c0: float(found[c0, deviation].mean()) for c0 in rates}
        chosen = max(means, key=lambda c0: means[c0])
        best[deviation] = (chosen, means[chosen])
    return series, best


def _clipped(case: Case, rates: Sequence[float], deviations: Sequence[float], part: Parts) -> list[Series]:
    """Algorithm 1 with a clip of 1: accuracy over what a device pays, by c0."""
    label = PrivacyLabel("device", as_published=True, delta=DELTA, not_covered=case.not_covered)
    series: list[Series] = []
    for c0 in rates:
        points: list[tuple[float, Array]] = []
        for deviation in part.each(deviations, f"clipped, c0 = {c0:g}, s.d. {{:g}}"):
            settings = cell(case, c0, deviation, GAUSSIAN, clip=CLIP)
            points.append((cost_of(case, settings).device, learn(case, settings, 1)[1][:, -1]))
        points.sort(key=lambda point: point[0])
        x, told = [point[0] for point in points], np.stack([point[1] for point in points], axis=1)
        dearest = replace(label, epsilon=float(f"{x[-1]:.6g}"))
        name = f"Algorithm 1 with a clip of 1, Gaussian, c0 = {c0:g}"
        series.append(over_trials(f"clipped-c{c0:g}", name, x, told, dearest, panel=SOUND, marks=True))
    return series


def _sound(case: Case, choices: Mapping[float, Choice], part: Parts) -> Series:
    """`local_updates` under masks, over a device's total."""
    asked = part.each(choices, "sound form, device ε = {:g}")
    x, told = zip(*(sound_accuracy(case, epsilon, choices[epsilon]) for epsilon in asked), strict=True)
    label = PrivacyLabel("device", math.ceil(x[-1] * 1e6 - 1e-3) / 1e6, delta=DELTA)
    name = "local_updates, masked, every device in each round"
    return over_trials("sound", name, x, np.stack(told, axis=1), label, panel=SOUND, marks=True)


def _fig2_claims(
    rates: Sequence[float],
    deviations: Sequence[float],
    last: Mapping[tuple[str, float, float], float],
    best_rate: Mapping[float, tuple[float, float]],
    case: Case,
) -> tuple[Claim, ...]:
    low, high = deviations[0], deviations[-1]
    best = {
        (noise, deviation): max(last[noise, c0, deviation] for c0 in rates)
        for noise in (LAPLACE, GAUSSIAN)
        for deviation in deviations
    }
    alike = max(abs(best[LAPLACE, deviation] - best[GAUSSIAN, deviation]) for deviation in deviations)
    chance = 1 / len(case.published.classes)
    largest = max(rates, key=lambda c0: last[GAUSSIAN, c0, low])
    noisiest = max(best_rate)
    cheapest = cost_of(case, cell(case, rates[0], high, GAUSSIAN))
    scaled = cost_of(case, cell(case, rates[0], noisiest, GAUSSIAN, falling=BY_RATE))
    return (
        Claim.near("low-noise", f"0.95 at s.d. {low:g} with the best c0", best[GAUSSIAN, low], 0.95, within=0.025),
        Claim(
            "low-noise-rate",
            "A larger rate, c0 = 10, works better at low noise; ours is the best c0",
            largest,
            largest == 10.0,
            paper=10.0,
        ),
        Claim.near(
            "high-noise",
            f"0.65 at s.d. {high:g} with the best c0, by Algorithm 1; chance is {chance:.2g}",
            best[GAUSSIAN, high],
            0.65,
            within=0.1,
        ),
        Claim.near(
            "high-noise-by-rate",
            f"0.65 at s.d. {noisiest:g} if noise is multiplied by the step",
            best_rate[noisiest][1],
            0.65,
            within=0.1,
        ),
        Claim(
            "high-noise-rate-by-rate",
            "A smaller rate, c0 = 0.1, works better at high noise: so it is where noise is multiplied by the step",
            best_rate[noisiest][0],
            best_rate[noisiest][0] == 0.1,
            paper=0.1,
        ),
        Claim(
            "laplace-as-gaussian",
            "Laplace and Gaussian noise make no noticeable difference; ours is the largest, best c0 each",
            alike,
            alike <= 0.03,
            paper=0.0,
        ),
        Claim(
            "least-epsilon",
            f"ε of a device at s.d. {high:g}, c0 = {rates[0]:g}, clipped to 1 (L8); the paper names none",
            cheapest.device,
            cheapest.device <= 1,
        ),
        Claim(
            "epsilon-by-rate",
            f"ε of a device where noise is multiplied by the step, at s.d. {noisiest:g}, which still learns",
            min(scaled.device, 1e12),
            scaled.device <= 10,
        ),
    )


# --- 80 devices ---

ALL = 80
ACTIVE = 10
SERVER_BATCH = 20
ROUNDS_OF_DEVICES = 100
RATE = 10.0
"""c of c / sqrt(t), which the paper does not name for this: the best of Fig. 2's three on drawn digits."""
STABLE_RATE = 4.0
"""Constant, 2 / L: the longest step whose stability prices a sample (L5)."""
LIVE_EPSILON = 10.0
"""A sample's epsilon over HTTP: a server does not host a task without noise."""


def softmax_task(
    data: Dataset, *, batch: int, server_batch: int, rounds: int, held: int, epsilon: float | None
) -> Task:
    """One local step (the paper's S_d = 0, L11) on a batch, and the mean of `server_batch` check-ins."""
    privacy = Privacy("none", {}, 1e-6)
    if epsilon is not None:
        budget = TaskBudget(six_digits(epsilon), held)
        privacy = Privacy("discrete-gaussian", {"update": six_digits(epsilon)}, 1e-6, budget=budget)
    return Task(
        name="eighty-devices",
        features=Features(data.features, Bound("l2")),
        labels=Labels(data.classes),
        model={"kind": "softmax"},
        protocol={
            "kind": "local_updates",
            "batch": batch,
            "rate": {"c": six_digits(STABLE_RATE)} if epsilon else {"c": six_digits(RATE), "schedule": "1/sqrt(t)"},
            "server_batch": server_batch,
        },
        privacy=privacy,
        stop=StopRule(steps=rounds),
    )


def rounds_after(schedule: Schedule, server_batch: int) -> Array:
    """[N + 1]: rounds that were closed after each check-in; those of an older round do not count."""
    at, now, heard = [0], 0, 0
    for version in schedule.version.tolist():
        heard += at[version] == now
        if heard == server_batch:
            now, heard = now + 1, 0
        at.append(now)
    return np.asarray(at)


def simulated(
    task: Task, data: Dataset, model: Model, *, devices: int, active: int, passes: int, seed: int
) -> tuple[Array, Array]:
    """Rounds [E] and accuracy [E] of a crowd of which about `active` devices are there at a time."""
    batch, settings = find(task).batch(task), task.protocol
    crowd = iid(len(data.y_train), devices, seed)
    held = crowd.rows.shape[1]
    leg = Delay("uniform", batch * devices / 40)
    world = World(
        devices,
        held * passes,
        request=leg,
        check_out=leg,
        check_in=leg,
        away=1 - active / devices,
        cycle=2.0 * devices * batch,
    )
    schedule = lay_out(world, seed=seed, batch=batch, capacity=batch)
    size = int(settings["server_batch"])
    at = rounds_after(schedule, size)
    points = [int(np.argmax(at == number)) for number in range(1, min(int(at[-1]), task.stop.steps or 10**9) + 1)]
    holding = Holding(data.x_train, data.y_train, crowd, passes)
    (run,) = compiled.run(task, holding, [schedule], [seed], points=points, workers=1)
    found = dict(zip(run.points.tolist(), run.weights, strict=True))
    weights = np.stack([found[point] for point in points])
    return np.arange(1, len(points) + 1), accuracy(model, weights, data.x_test, data.y_test)


def over_http(task: Task, data: Dataset, model: Model, *, devices: int, seed: int) -> tuple[Array, Array, Played]:
    """A run over real HTTP: rounds [E] that were seen, accuracy [E], and what the fleet did."""
    rows = iid(len(data.y_train), devices, seed).rows
    with tempfile.TemporaryDirectory() as folder:
        played = play(task, data.x_train, data.y_train, rows, Path(folder) / "live", at_work=ACTIVE)
    learned = np.asarray(played.rounds) > 0
    told = accuracy(model, played.weights[learned], data.x_test, data.y_test)
    return np.asarray(played.rounds)[learned], told, played


def devices(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """Eighty devices, about ten at a time, against one alone; without noise as published, and with it over HTTP."""
    case = _case(quick, trials, 5)
    data, count, rounds = case.sound, 20 if quick else ALL, 6 if quick else ROUNDS_OF_DEVICES
    size, batch, passes = (5, 20, 3) if quick else (SERVER_BATCH, 100, 5)
    model = make_model("softmax", data.features, len(data.classes))
    held = len(data.y_train) // count
    small = max(1, held // 25)

    def course(task: Task, again: int) -> tuple[Array, Array]:
        return _as_long_as_all(
            simulated(task, data, model, devices=count, active=ACTIVE, passes=again, seed=seed) for seed in case.seeds
        )

    progress("the crowd in the simulator, no noise", 0, 4)
    plain = softmax_task(data, batch=batch, server_batch=size, rounds=rounds, held=held, epsilon=None)
    x, crowd = course(plain, passes)
    progress("one device", 1, 4)
    lone = softmax_task(data, batch=batch, server_batch=1, rounds=25, held=held, epsilon=None)
    x_alone, alone = _alone(lone, data, model, case, count, passes)
    progress(f"the crowd in the simulator, ε = {LIVE_EPSILON:g}", 2, 4)
    noisy = settled(softmax_task(data, batch=small, server_batch=size, rounds=rounds, held=held, epsilon=LIVE_EPSILON))
    x_noisy, private = course(noisy, 1)
    paid, exposed = label(noisy, passes=noisy.privacy.uses), PrivacyLabel(as_published=True)
    series = [
        over_trials("crowd", f"{count} devices, B_s = {size}", x, crowd, exposed),
        over_trials("alone", "one device alone", x_alone, alone, exposed),
        over_trials("crowd-private", f"{count} devices with noise, B_d = {small}, simulated", x_noisy, private, paid),
        public_line(model, data, x.tolist(), MAIN),
    ]
    end, lonely = series[0].last, series[1].last
    claims = [
        Claim.near("crowd", f"0.87 after {rounds} rounds of {size} check-ins", end, 0.87, within=0.02),
        Claim.near("alone", "0.76 for a single device after 25", lonely, 0.76, within=0.03),
        Claim(
            "crowd-beats-alone",
            "The crowd beats the device; ours is by how much",
            end - lonely,
            end > lonely,
            paper=0.11,
        ),
    ]
    notes = [
        "Without noise a sample serves up to five times, with noise once, so that its batches are smaller.",
        "The paper names no step: c is the best of Fig. 2's three on digits drawn by code.",
    ]
    if not quick:
        progress("the crowd over HTTP", 3, 4)
        x_live, live, played = over_http(noisy, data, model, devices=count, seed=case.seed)
        series.append(over_trials("crowd-http", "the same over HTTP", x_live, live[None], paid))
        apart = float(live[-1] - private[:, -1].mean())
        text = "Over HTTP it ends where the simulator does, with noise; ours is the difference"
        claims.append(Claim("http-as-simulated", text, apart, abs(apart) <= 0.03))
        notes.append(
            f"Over HTTP: {count} devices, {played.summary.check_ins} check-ins in {played.summary.seconds:.0f} s, "
            f"{played.taken} of them in a round, the others of an older one; at most {ACTIVE} at work at a time."
        )
    panels = (Panel(MAIN, "Learning together", "rounds t_s (of one device: its check-ins)", ACCURACY),)
    title = "Eighty devices, about ten at a time"
    shown, said = tuple(series), tuple(claims)
    return Figure("hamm2017/devices", title, data.name, case.trials, shown, said, panels, tuple(notes), ends=END)


def _alone(task: Task, data: Dataset, model: Model, case: Case, count: int, passes: int) -> tuple[Array, Array]:
    """One of the devices with the samples it holds, in every trial another one: accuracy [trials, 25]."""
    found = []
    for number, seed in enumerate(case.seeds):
        rows = iid(len(data.y_train), count, case.seed).rows[number % count]
        own = replace(data, x_train=data.x_train[rows], y_train=data.y_train[rows])
        found.append(simulated(task, own, model, devices=1, active=1, passes=passes, seed=seed))
    return _as_long_as_all(found)


def _as_long_as_all(courses: Iterable[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Rounds and accuracy [trials, rounds], as far as every trial went."""
    rounds, told = zip(*courses, strict=True)
    shortest = min(map(len, rounds))
    return rounds[0][:shortest], np.stack([each[:shortest] for each in told])
