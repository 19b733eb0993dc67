"""What is recorded: tasks, their samples and their crowds, all made by code. Nothing here imports `crowdml`.

Samples are whole multiples of a power of two, so that every machine makes the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Case:
    """A task, the engines that run it, and its crowd: `devices`, samples of `each`, and the other settings."""

    text: str
    engines: tuple[str, ...] = ()
    """Those that the tests run."""
    more: tuple[str, ...] = ()
    """Those that only `compare.py` runs: XLA takes a second to compile one."""
    devices: int = 8
    each: int = 0
    """Samples of each device; 0: two batches."""
    crowd: dict[str, Any] = field(default_factory=dict)
    turns: int = 6
    cohort: int = 3
    """Devices whose messages are added up to one total, where a task is masked."""


EVENTS, COMPILED = ("events",), ("compiled",)
NUMPY, COHORTS = ("uncompiled",), ("cohorts",)
LATE = {"delay": "8"}


def small(
    protocol: str,
    privacy: str,
    *,
    model: str = 'kind = "softmax"',
    labels: str = 'classes = ["a", "b", "c"]',
    dimension: int = 5,
    more: str = "",
) -> str:
    """A small task."""
    return f"""
name = "small"
[features]
dimension = {dimension}
norm = {{ kind = "l2", bound = 1.0 }}
[labels]
{labels}
[model]
{model}
[protocol]
{protocol}
[privacy]
{privacy}
{more}
"""


MASKS = "[masking]\ncohort = 8\nminimum = 6\ncolluders = 1\n"
STEPS = "[stop]\nsteps = {}\n"
TWO = 'classes = ["no", "yes"]'
NUMBER = 'kind = "number"\nbound = 2.0'
LOGISTIC = 'kind = "logistic"'


def gaussian(**epsilon: float) -> str:
    return _noise("discrete-gaussian", epsilon)


def laplace(**epsilon: float) -> str:
    return _noise("discrete-laplace", epsilon)


def skellam(**epsilon: float) -> str:
    return _noise("skellam", epsilon)


def _noise(mechanism: str, epsilon: dict[str, float]) -> str:
    each = ", ".join(f"{name} = {value}" for name, value in epsilon.items())
    return f'mechanism = "{mechanism}"\nepsilon = {{ {each} }}\ndelta = 1e-6\n'


def _sgd() -> dict[str, Case]:
    all_three = {"gradient": 2.0, "errors": 0.5, "labels": 0.5}
    found: dict[str, Case] = {}
    for update in ("sgd", "adagrad", "rmsprop", "momentum", "average"):
        settings = f'kind = "sgd"\nbatch = 4\nbuffer = 40\nstep = {{ c = 1.0 }}\nupdate = "{update}"'
        text = small(settings, gaussian(**all_three), more=STEPS.format(9))
        quick, also = update == "momentum", update in ("sgd", "rmsprop")
        found[f"sgd {update}"] = Case(text, EVENTS + COMPILED * quick, COMPILED * also, crowd=LATE)
        text = small(settings.replace("buffer = 40\n", ""), skellam(**all_three) + "uses = 2\n", more=MASKS)
        found[f"sgd {update} masked"] = Case(text, NUMPY, COHORTS * (quick or also), crowd={"passes": 2})
    held = 'kind = "sgd"\nbatch = 6\nheld_out = 2\nstep = { schedule = "1/t", c = 2.0 }\nradius = 0.5'
    found["sgd laplace"] = Case(
        small(held, laplace(**all_three), model='kind = "softmax"\nl2 = 0.01').replace('"l2", b', '"l1", b'),
        EVENTS,
        ("compiled together",),
    )
    ends = "[stop]\nerror = 1.0\n"
    found["sgd error"] = Case(small(held, gaussian(gradient=2.0, errors=9.0), more=ends), EVENTS, COMPILED)
    found["sgd held out masked"] = Case(
        small(held, skellam(**all_three) + "uses = 2\n", more=MASKS + "[stop]\nsteps = 2\nerror = 0.0\n"),
        NUMPY,
        COHORTS,
        devices=11,
        crowd={"dropout": 0.1},
    )
    constant = 'kind = "sgd"\nbatch = 4\nstep = { schedule = "constant", c = 0.5 }'
    for name, model, labels in (
        ("logistic", LOGISTIC, TWO),
        ("smooth-svm", 'kind = "smooth-svm"\nwidth = 0.5', TWO),
        ("svm", 'kind = "svm"', TWO),
        ("linear", 'kind = "linear"\nwidth = 1.0', NUMBER),
    ):
        found[f"sgd {name}"] = Case(
            small(constant, gaussian(gradient=2.0), model=model, labels=labels), EVENTS, turns=3
        )
    perceptron = 'kind = "mlp"\nhidden = [4]\nseed = 2'
    found["sgd mlp"] = Case(
        small(constant + "\nclip = 0.5", gaussian(gradient=2.0), model=perceptron), EVENTS, COMPILED, turns=3
    )
    found["sgd without noise"] = Case(small(constant, 'mechanism = "none"'), EVENTS, turns=3)
    found["sgd without noise masked"] = Case(small(constant, 'mechanism = "none"', more=MASKS), NUMPY, COHORTS, turns=3)
    published = "as_published = true\n" + small(constant, laplace(**all_three))
    found["sgd as published"] = Case(published.replace('"l2", b', '"l1", b'), EVENTS, turns=3)
    return found


def _local() -> dict[str, Case]:
    found: dict[str, Case] = {}
    settings = 'kind = "local_updates"\nbatch = 4\nlocal_steps = 3\nminibatch = 2\nrate = { c = 0.5 }\n'
    unit = gaussian(update=4.0) + 'unit = "device"\nbudget = { epsilon = 4.0, samples = 40 }\n'
    for optimiser in ("average", "momentum", "adam"):
        for stale in ("refuse", "weigh"):
            text = settings + f'optimiser = "{optimiser}"\nstale = "{stale}"\nserver_batch = 2\nbuffer = 40\n'
            also = (optimiser, stale) in (("average", "refuse"), ("momentum", "weigh"), ("adam", "weigh"))
            found[f"local {optimiser} {stale}"] = Case(
                small(text, unit, more=STEPS.format(3)), EVENTS, COMPILED * also, crowd=LATE
            )
        text = settings + f'optimiser = "{optimiser}"\nserver_rate = 0.5\n'
        masked = skellam(update=4.0) + 'unit = "device"\nuses = 2\nbudget = { epsilon = 4.0, samples = 8 }\n'
        found[f"local {optimiser} masked"] = Case(
            small(text, masked, more=MASKS),
            NUMPY + COHORTS * (optimiser == "adam"),
            COHORTS * (optimiser == "momentum"),
            crowd={"passes": 2},
        )
    for name, noise in (
        ("growing", 'noise = { schedule = "geometric", ratio = 1.25 }\n'),
        ("shrinking", 'noise = { schedule = "geometric", ratio = 0.8 }\n'),
        ("of the weights", 'noise = { schedule = "weights" }\n'),
    ):
        rate = 'rate = { schedule = "1/t", c = 0.5, counter = "trips" }' if "weights" in name else "rate = { c = 0.5 }"
        text = settings.replace("rate = { c = 0.5 }", rate) + noise
        found[f"local {name}"] = Case(small(text, unit), EVENTS, COMPILED * (name != "shrinking"))
        clipped = unit.replace("discrete-gaussian", "discrete-laplace")
        found[f"local {name} laplace"] = Case(small(text + "update_clip = 1.0\n", clipped), EVENTS)
        stable = gaussian(update=4.0) + "uses = 3\nbudget = { epsilon = 4.0, samples = 40 }\n"
        found[f"local {name} stable"] = Case(small(text, stable), EVENTS)
    found["local stable"] = Case(small(settings, gaussian(update=4.0) + "uses = 3\n"), EVENTS, crowd={"passes": 3})
    found["local stable masked"] = Case(
        small(settings, skellam(update=4.0) + "uses = 3\n", model=LOGISTIC, labels=TWO, more=MASKS), NUMPY, COHORTS
    )
    for counter in ("check-ins", "trips", "steps", "path"):
        rate = f'rate = {{ schedule = "1/sqrt(t)", c = 0.5, counter = "{counter}" }}'
        found[f"local {counter}"] = Case(small(settings.replace("rate = { c = 0.5 }", rate), unit), EVENTS, turns=4)
    for schedule in ("adagrad", "rmsprop"):
        rate = f'rate = {{ schedule = "{schedule}", c = 0.5 }}'
        found[f"local {schedule}"] = Case(small(settings.replace("rate = { c = 0.5 }", rate), unit), EVENTS, turns=4)
    plain = 'mechanism = "none"'
    found["local without noise"] = Case(small(settings, plain), EVENTS, turns=3)
    found["local without noise masked"] = Case(small(settings, plain, more=MASKS), NUMPY, turns=3)
    return found


def _admm() -> dict[str, Case]:
    settings = 'kind = "admm"\nbatch = 5\nrho = 2.0\nlocal_steps = 8\n'
    kept = "relaxation = 1.5\nmomentum = 0.5\n"
    noisy, masked = gaussian(update=4.0) + "uses = 3\n", skellam(update=4.0) + "uses = 3\n"
    losses = {
        "logistic": (LOGISTIC + "\nl1 = 0.01\nl2 = 0.02", TWO),
        "smooth-svm": ('kind = "smooth-svm"\nwidth = 0.5', TWO),
        "huber": ('kind = "linear"\nwidth = 1.0', NUMBER),
        "softmax": ('kind = "softmax"', TWO),
    }
    found: dict[str, Case] = {}
    for name, (model, labels) in losses.items():
        loss = {"model": model, "labels": labels}
        late = settings + "barrier = 2\ndelay = 1\nbuffer = 50\n"
        found[f"admm {name}"] = Case(
            small(late + kept, noisy, **loss, more=STEPS.format(2)),
            EVENTS,
            COMPILED * (name in ("logistic", "softmax")),
            crowd={"passes": 3, **LATE},
        )
        found[f"admm {name} masked"] = Case(
            small(settings + kept, masked, **loss, more=MASKS),
            NUMPY,
            COHORTS * (name in ("logistic", "softmax")),
            crowd={"passes": 3},
        )
    found["admm without noise"] = Case(
        small(settings, 'mechanism = "none"', model=LOGISTIC, labels=TWO), EVENTS, turns=3
    )
    return found


def _gram() -> dict[str, Case]:
    found: dict[str, Case] = {}
    ridge = {"model": 'kind = "ridge"', "dimension": 16, "more": MASKS + STEPS.format(1)}
    price = skellam(moments=4.0) + "budget = { epsilon = 4.0, samples = 4 }\n"
    for name, settings in (
        ("gram", ""),
        ("gram positive", "positive = true\n"),
        ("gram cosine", 'map = { kind = "cosine", seed = 1, features = 16 }\n'),
        ("gram convolution", 'map = { kind = "convolution", seed = 1, filters = 4, size = 3, pool = 2, keep = 8 }\n'),
    ):
        text = small(f'kind = "gram"\nbatch = 4\n{settings}', price, **ridge)
        found[name] = Case(text, ("uncompiled",), turns=2, devices=8, each=4)
    text = small('kind = "gram"\nbatch = 4\n', price + 'unit = "device"\n', **{**ridge, "labels": NUMBER})
    found["gram device"] = Case(text, ("uncompiled",), turns=2, devices=8, each=4, crowd={"dropout": 0.1})
    return found


def _proportions() -> dict[str, Case]:
    histogram = {"model": 'kind = "histogram"', "dimension": 1}
    settings = 'kind = "proportions"\nbatch = 4'
    found = {
        "histogram": Case(small(settings, laplace(counts=0.5), **histogram, more=STEPS.format(11)), ("counting",)),
        "histogram masked": Case(
            small(settings, skellam(counts=0.5), **histogram, more=MASKS),
            ("counting", "uncompiled"),
            devices=11,
            crowd={"dropout": 0.1},
        ),
        "histogram without noise": Case(small(settings, 'mechanism = "none"', **histogram), ("counting",), turns=3),
    }
    corners = "\n".join(
        f'[[places]]\nname = "corner {place}"\nlat = 0.0\nlon = {(place + place * place) / 1000:.3f}'
        for place in range(5)
    )
    for name, vote, solver in (("peers", "majority", "shares"), ("peers weighted", "weighted", "search")):
        settings = f'kind = "proportions"\nbatch = 8\npeers = 2\nmemory = 3\nvote = "{vote}"'
        text = small(
            settings,
            laplace(counts=1.0) + "budget = { epsilon = 1.0, samples = 100 }",
            labels='classes = ["quiet", "busy", "full"]\nbins = [10, 50]',
            model=f'kind = "clusters"\nk = 4\nrestarts = 2\nsolver = "{solver}"',
            dimension=3,
            more=corners,
        )
        text = text.replace('norm = { kind = "l2", bound = 1.0 }', 'kind = "windows"\nhorizon = 1')
        found[name] = Case(text, ("peers",), each=43, turns=2)
    return found


def variants() -> dict[str, Case]:
    """Every protocol on every channel that it has, with its optimisers and schedules."""
    return {**_sgd(), **_local(), **_admm(), **_gram(), **_proportions()}


def of_shipped(texts: dict[str, str]) -> dict[str, Case]:
    """Every shipped task as it is, on the engines that run it."""
    found = {
        name: {
            "activity": Case(text, EVENTS, COMPILED, crowd=LATE),
            "admm-adult": Case(text, COHORTS, devices=60, each=300, turns=2),
            "demo": Case(text, COHORTS, devices=33, each=14, turns=2, crowd={"passes": 3}),
            "digits-cnn": Case(text, turns=1, cohort=1),
            "digits-gram": Case(text, NUMPY, devices=45, each=14, turns=1),
            "digits-masked": Case(text, COHORTS, devices=25, each=14, turns=2, crowd={"passes": 2}),
            "digits-mlp": Case(text, (), COHORTS, devices=90, each=14, turns=2),
            "gram-mnist": Case(text, turns=1, cohort=1),  # its cohort of a thousand takes minutes
            "mnist-cnn": Case(text, turns=1, cohort=1),
            "robust-digits": Case(text, turns=1),  # rounds of uploads are in tests/server/test_combined.py
            "traffic": Case(text, ("peers",), each=70, turns=1),
        }.get(name, Case(text, EVENTS, ("compiled", "events on jax")))
        for name, text in texts.items()
    }
    return {f"shipped {name}": case for name, case in found.items()}


# --- samples ---


def samples(dimension: int, classes: int | None, count: int) -> tuple[Any, Any]:
    """x [count, dimension] float32 within the unit ball of l1, y [count]: both exact in binary."""
    rng = np.random.default_rng(dimension + 1)
    x = rng.integers(-64, 65, (count, dimension)).astype(np.float32) / np.float32(64)
    sums = np.abs(x).sum(1, keepdims=True)
    x = x / np.exp2(np.ceil(np.log2(np.maximum(sums, 1)))).astype(np.float32)
    y = rng.integers(-64, 65, count).astype(np.float32) / np.float32(64)
    return x, y if classes is None else rng.integers(0, classes, count).astype(np.int32)


def readings(places: int, count: int) -> Any:
    """[places, count]: counts of vehicles, whole numbers that rise and fall."""
    rng = np.random.default_rng(places)
    wave = np.abs(np.arange(count) % 24 - 12) * 6
    return np.maximum(wave + rng.integers(-5, 6, (places, count)), 0).astype(np.float64)
