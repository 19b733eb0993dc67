"""Two figures of ours: how far a network gets that protects whole devices, and every protocol on the same digits.

`ours/local-updates-frontier`: `local_updates` under masks, an MLP, every device in every round; the total is that of a
whole device over all rounds. `ours/protocols`: what a sample's or a device's epsilon buys in each protocol, and what it
costs in bytes, rounds and the time of a device.

Settings come from crowds of the figure's size that hold digits drawn by code (R4): `ours/local-tuning`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from crowdml.arrays import Array, Samples
from crowdml.datasets import Dataset, blobs, load
from crowdml.datasets.populations import drawn, iid
from crowdml.experiments import masked
from crowdml.experiments.crowds import DELTA, Choice, Size, devices_for, make_task, public_line, trial_seed
from crowdml.experiments.figure import MAIN, Claim, Figure, Panel, PrivacyLabel, Series, over_trials
from crowdml.experiments.registry import Progress
from crowdml.experiments.tuning import TABLES
from crowdml.models import Model, make_model
from crowdml.price import Price
from crowdml.privacy.noise import SystemSource
from crowdml.protocols import admm, find, local_updates, sgd
from crowdml.sim import compiled
from crowdml.sim.layout import Holding, meet
from crowdml.sim.studies import simulate
from crowdml.task import Bound, Features, Labels, Masking, Privacy, Task, TaskBudget
from crowdml.turn import check_in, first_turn

EPSILONS = (1.0, 4.0, 8.0)
HIDDEN = 16
LARGEST_COHORT = 65_536
"""The most that `masking.cohort` allows."""
CLIP = 10.0
"""Clip of one sample's gradient: far above what occurs; the clip of the whole update is what counts."""


@dataclass(frozen=True)
class LocalChoice:
    """Rounds, in each of which every device takes `steps` steps of size `rate`; the clip of its update; the server."""

    rounds: int
    steps: int
    rate: float
    clip: float
    server_rate: float
    momentum: float = 0.0


@dataclass(frozen=True)
class FrontierCrowd:
    """So many devices with so many samples each, and what was chosen for them by the device's total epsilon."""

    devices: int
    held: int
    choices: Mapping[float, LocalChoice]


CROWDS: Mapping[str, FrontierCrowd] = {
    "mnist-996": FrontierCrowd(996, 60, {
        1.0: LocalChoice(40, 8, 2.0, 0.1, 0.1875, 0.9),
        4.0: LocalChoice(80, 8, 4.0, 0.05, 1.875),
        8.0: LocalChoice(80, 8, 4.0, 0.05, 1.875),
    }),
    "mnist-9960": FrontierCrowd(9960, 6, dict.fromkeys(EPSILONS, LocalChoice(80, 4, 4.0, 0.1, 5.0))),
    "synthetic-100000": FrontierCrowd(100_000, 6, dict.fromkeys(EPSILONS, LocalChoice(80, 4, 4.0, 0.1, 5.0))),
}  # fmt: skip
"""At delta = 1e-6. Coarse grids had 1, 4 or 8 local steps, 10 to 80 rounds, clips 0.05 to 0.4, a server's step 1 to 16
times as long as the clip, with momentum and without; `ours/local-tuning` looks around what was chosen."""
QUICK = FrontierCrowd(200, 20, {8.0: LocalChoice(10, 4, 4.0, 0.1, 1.875)})


def make_local_task(
    data: Dataset, choice: LocalChoice, *, epsilon: float, devices: int, held: int, unit: str = "device"
) -> Task:
    """An MLP by masked `local_updates`. Every device is in every round, survives, and colludes with nobody."""
    settings = {
        "kind": "local_updates",
        "batch": held,
        "local_steps": choice.steps,
        "rate": {"c": Fraction(repr(choice.rate))},
        "clip": Fraction(repr(CLIP)),
        "update_clip": Fraction(repr(choice.clip)),
        "optimiser": "momentum" if choice.momentum else "average",
        "server_rate": Fraction(repr(choice.server_rate)),
        "momentum": Fraction(repr(choice.momentum)),
    }
    parts = -(-devices // LARGEST_COHORT)  # a larger crowd meets in several cohorts
    privacy = Privacy(
        "skellam",
        {"update": Fraction(repr(epsilon))},
        DELTA,
        uses=choice.rounds,
        unit=unit,
        budget=TaskBudget(Fraction(repr(2 * epsilon)), held),
    )
    return Task(
        name=data.name,
        features=Features(data.features, Bound("l2")),
        labels=Labels(data.classes),
        model={"kind": "mlp", "hidden": (HIDDEN,), "seed": 1},
        protocol=settings,
        privacy=privacy,
        masking=Masking(devices // parts, devices // parts),
    )


def learn_local(task: Task, holding: Holding, trials: int, *, noise: bool = True) -> Array:
    """The last weights of each trial, [T, P]."""
    seeds = [trial_seed(Size(), number) for number in range(trials)]
    laid = [meet(task, holding, seed) for seed in seeds]
    return np.stack([run.model for run in compiled.run(task, holding, laid, seeds, noise=noise, workers=1)])


def model_errors(task: Task, weights: Array, data: Dataset) -> Array:
    """[T]"""
    model = find_model(task)
    return np.array([float((np.asarray(model.predict(each, data.x_test)) != data.y_test).mean()) for each in weights])


def find_model(task: Task) -> Model:
    kind = task.protocol["kind"]
    return (local_updates.plan(task) if kind == "local_updates" else sgd.plan(task)).model


def device_label(task: Task) -> PrivacyLabel:
    """The honest total of a whole device over all its check-ins, against who sees the totals of cohorts."""
    total = Price.of(find(task), task).device_epsilon(task.privacy.uses)
    return PrivacyLabel("device", epsilon=float(f"{total:.6g}"), delta=task.privacy.delta)


def frontier(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """`ours/local-updates-frontier`: accuracy of the network over the total epsilon of a device."""
    count = trials or (1 if quick else 3)
    crowds = {"synthetic-200": QUICK} if quick else CROWDS
    series: list[Series] = []
    for number, (name, crowd) in enumerate(crowds.items()):
        progress(name.replace("-", ", ") + " devices", number, len(crowds))
        data, population = rows_of(name, crowd)
        tasks = [
            make_local_task(data, choice, epsilon=epsilon, devices=crowd.devices, held=crowd.held)
            for epsilon, choice in crowd.choices.items()
        ]
        dealt = [Holding(data.x_train, data.y_train, population, task.privacy.uses) for task in tasks]
        found = [
            1 - model_errors(task, learn_local(task, holding, count), data)
            for task, holding in zip(tasks, dealt, strict=True)
        ]
        epsilons = tuple(crowd.choices)
        made = " (synthetic)" if name.startswith("synthetic") else ""
        words = f"{crowd.devices:,} devices with {crowd.held} samples{made}"
        privacy = device_label(tasks[-1])
        series.append(over_trials(name, words, epsilons, np.stack(found, axis=1), privacy, marks=True))
        silent = 1 - model_errors(tasks[-1], learn_local(tasks[-1], dealt[-1], 1, noise=False), data)
        flat = np.full((1, len(epsilons)), silent[0])
        series.append(over_trials(f"{name}-silent", f"{words}, without noise", epsilons, flat, PrivacyLabel()))
        if data.name == "mnist" and number == 0:
            series.append(public_line(find_model(tasks[-1]), data, epsilons, MAIN))
    claims = (_quick_claim(series),) if quick else _claims(series)
    notes = (
        "Every device is in every round, nobody drops out or colludes, and a device's total covers all of its rounds.",
        "Settings were chosen on digits drawn by code, for the synthetic crowd too. Synthetic rows are ten blobs "
        "in 50 dimensions, drawn with replacement: their accuracy says nothing about digits.",
    )
    panels = (
        Panel(MAIN, "A network that protects devices whole", "total ε of a device", "test accuracy", "log",
              x_ticks=EPSILONS),
    )  # fmt: skip
    return Figure(
        "ours/local-updates-frontier", "A network's accuracy over a device's total epsilon",
        "synthetic" if quick else "mnist, synthetic", count, tuple(series), claims, panels, notes,
        ends="accuracy at the largest ε",
    )  # fmt: skip


def rows_of(name: str, crowd: FrontierCrowd) -> tuple[Dataset, Any]:
    if name.startswith("mnist"):
        data = load("mnist", normalise="l2")
        return data, iid(len(data.y_train), crowd.devices, 2026)
    rows = 60_000 if crowd.devices > 1000 else 4000
    data = blobs(rows=rows, features=50, classes=10, seed=5, normalise="l2")
    return data, drawn(len(data.y_train), crowd.devices, crowd.held, seed=2026)


def _quick_claim(series: list[Series]) -> Claim:
    text = "Two hundred devices that are protected whole learn more than chance, 0.1"
    return Claim("learns", text, series[0].last, series[0].last > 0.1, paper=0.1)


def _claims(series: list[Series]) -> tuple[Claim, ...]:
    by = {each.key: each for each in series}
    small, large = by["mnist-996"], by["mnist-9960"]
    rise = [high - low for low, high in pairwise(large.y)]
    return (
        Claim("mnist-996-e8", "996 devices, protected whole at ε = 8: at least 0.85", small.last,
              small.last >= 0.85),
        Claim("mnist-9960-e1", "9,960 devices, protected whole at ε = 1: at least 0.85", large.y[0],
              large.y[0] >= 0.85),
        Claim("more-epsilon", "9,960 devices: more ε never costs more than 0.02; ours is the smallest rise", min(rise),
              min(rise) > -0.02),
    )  # fmt: skip


# --- every protocol ---

SAMPLE, DEVICE = 1.0, 8.0
"""The honest totals at which protocols are compared: of a sample, and of a whole device."""
SECONDS = "seconds"
ROUNDS = "rounds"


@dataclass(frozen=True)
class Entry:
    """A protocol at its own settings."""

    key: str
    name: str
    task: Task


def entries(data: Dataset, devices: int, quick: bool) -> list[Entry]:
    """Each protocol so far, at one total of a sample; and those that protect devices whole, at one of a device."""
    held = len(data.y_train) // devices
    once = Choice(5.0, held, 60.0) if quick else TABLES["mnist"].sound[SAMPLE]
    cohort = masked.MaskedChoice(30.0, devices, 2) if quick else masked.MNIST[SAMPLE]
    local = next(iter(QUICK.choices.values())) if quick else CROWDS["mnist-996"].choices[DEVICE]
    everyone = Masking(devices, devices)

    def under_masks(model: str, protocol: Mapping[str, Any], privacy: Privacy) -> Task:
        features, labels = Features(data.features, Bound("l2")), Labels(data.classes)
        return Task(data.name, features, labels, {"kind": model}, protocol, privacy, masking=everyone)

    def skellam(row: str, uses: int = 1) -> Privacy:
        return Privacy("skellam", {row: Fraction(repr(SAMPLE))}, DELTA, uses=uses)

    rate, rho = 1 / (held / 4 + 100.0), 100.0
    relaxation = 100.0 * 0.5 * rho / (admm.solved(rate, rho, 1) * held)
    one_map = {"kind": "identity", "constant": Fraction(1, 5)}
    by_admm = {"kind": "admm", "batch": held, "rho": Fraction(100), "relaxation": Fraction(f"{relaxation:.6g}"),
               "momentum": Fraction(1, 2)}  # fmt: skip
    by_steps = {"kind": "local_updates", "batch": held, "local_steps": 5, "rate": {"c": Fraction(1)},
                "server_rate": Fraction(20)}  # fmt: skip
    few = min(6, held)  # of its samples a device gives where it is protected whole, once
    gram_device = Privacy(
        "skellam", {"moments": Fraction(repr(DEVICE))}, DELTA, unit="device", budget=TaskBudget(Fraction(100), few)
    )
    by_moments = {"kind": "gram", "map": one_map}
    found = [
        Entry("sgd-local", "sgd, local noise", make_task(data, once, epsilon=SAMPLE, mechanism="discrete-gaussian")),
        Entry("sgd-masked", "sgd, masked", masked.make_masked_task(data, cohort, epsilon=SAMPLE, batch=held)),
        Entry("admm", "admm, masked", under_masks("softmax", by_admm, skellam("update", 20))),
        Entry("gram", "gram, masked", under_masks("ridge", by_moments | {"batch": held}, skellam("moments"))),
        Entry("local-softmax", "local updates of softmax, masked",
              under_masks("softmax", by_steps, skellam("update", 20))),
        Entry("gram-device", "gram, devices protected",
              under_masks("ridge", by_moments | {"batch": few}, gram_device)),
        Entry("local-mlp-device", "local updates of an MLP, devices protected",
              make_local_task(data, local, epsilon=DEVICE, devices=devices, held=held)),
    ]  # fmt: skip
    left_out = ("admm", "local-softmax", "gram-device") if quick else ()
    return [entry for entry in found if entry.key not in left_out]


def device_seconds(task: Task, data: Dataset) -> float:
    """CPU time of one turn as a device computes it, in NumPy with noise from the system: the median of five."""
    protocol, batch = find(task), find(task).batch(task)
    offered = first_turn(protocol, task).published
    rows = Samples(data.x_train[:batch], data.y_train[:batch])
    times: list[float] = []
    for _ in range(6):  # the first one builds tables
        began = time.process_time()
        check_in(protocol, task, rows, offered, noise=SystemSource(), me="device")
        times.append(time.process_time() - began)
    return float(np.median(times[1:]))


def protocols(quick: bool, trials: int | None, progress: Progress) -> Figure:
    """`ours/protocols`: accuracy over what a device sends, how often it is asked, and how long it computes."""
    count = trials or (1 if quick else 3)
    data = blobs(rows=2000, features=20, classes=3, seed=3, normalise="l2") if quick else load("mnist", normalise="l2")
    devices = 20 if quick else devices_for(data, 1000)
    series, notes = list[Series](), list[str]()
    listed = entries(data, devices, quick)
    for number, entry in enumerate(listed):
        progress(entry.name, number, len(listed))
        study = simulate(
            entry.task, data.x_train, data.y_train, devices=devices,
            seed=[trial_seed(Size(), each) for each in range(count)], points=1, workers=1,
        )  # fmt: skip
        right = study.accuracy(data.x_test, data.y_test)[:, -1:]
        by_device = entry.task.privacy.unit == "device"
        total = study.planned.device if by_device else study.planned.sample
        privacy = PrivacyLabel("device" if by_device else "sample", float(f"{total:.6g}"), delta=DELTA)
        rounds = study.check_ins / devices
        costs = {MAIN: study.bytes_up / devices / 1000, ROUNDS: rounds,
                 SECONDS: rounds * device_seconds(entry.task, data)}  # fmt: skip
        for panel, cost in costs.items():
            key = entry.key if panel == MAIN else f"{entry.key}-{panel}"
            series.append(over_trials(key, entry.name, (cost,), right, privacy, panel=panel, marks=True))
        notes.append(
            f"{entry.name}: accuracy {right.mean():.3f}; a sample pays ε = {study.planned.sample:.3g} and its "
            f"device {study.planned.device:.3g}; a device sends {costs[MAIN]:.3g} kB in {rounds:g} check-ins, and "
            f"computes for {costs[SECONDS]:.2g} s."
        )
    sent = [each.x[0] for each in series if each.panel == MAIN]
    if data.name == "mnist":
        softmax = make_model("softmax", data.features, len(data.classes))
        series.append(public_line(softmax, data, (min(sent), max(sent)), MAIN))
    by = {each.key: each.last for each in series}
    worth = by["sgd-masked"] - by["sgd-local"]
    text = "At the same total of a sample, masks are worth accuracy to sgd; ours is how much"
    claims = (Claim("masks-help", text, worth, worth > 0),)
    notes.append(
        f"Softmax, ridge or MLP on the same rows. A sample's total is {SAMPLE:g}, a device's {DEVICE:g} where "
        "devices are protected: sgd and admm protect samples, and say what a device pays beside it. Local noise is "
        "against anyone, masks against who sees sums. Settings of admm and of local updates of softmax are guesses "
        "that saw no rows."
    )
    panels = (
        Panel(MAIN, "Bytes", "kB sent up by a device", "test accuracy", "log"),
        Panel(ROUNDS, "Rounds", "check-ins of a device", "test accuracy", "log", priced=False),
        Panel(SECONDS, "Time", "CPU-seconds of a device", "test accuracy", "log", priced=False),
    )
    return Figure(
        "ours/protocols", "Every protocol on the same digits", "synthetic" if quick else "mnist", count, tuple(series),
        claims, panels, tuple(notes), ends="accuracy",
    )  # fmt: skip
