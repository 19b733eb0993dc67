"""The adapter to what lies around turns and engines: snapshots, the terms of masking, and whole studies.

Studies are `simulate`, and what a trusted server or the papers' forms compute. The estimators are not recorded: they
run `simulate` on tasks by `suggest`, whose rules may become better.

Like driver.py it is mended by whoever moves an API; it serves the sources before the core moved as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import cases
import driver
import numpy as np

from crowdml.datasets.populations import Population, iid
from crowdml.models import make_model
from crowdml.protocols import find
from crowdml.secagg.terms import terms_of
from crowdml.sim.world import Delay
from crowdml.wire.states import pack_state, unpack_state

try:
    from crowdml.sim.layout import Holding
except ModuleNotFoundError:  # before the core moved
    from crowdml.sim.crowd import Holding

try:
    from crowdml.sim.studies import replayed_ledger, simulate
except ModuleNotFoundError:  # before studies had a module of their own
    from crowdml.sim.estimator import replayed_ledger, simulate

Plain = Any


def terms(task: Any) -> Plain:
    """What devices of a masked task hold the server to: the ring of each vector, and the sizes of a cohort."""
    if task.masking is None or task.privacy.mechanism == "none":
        return None
    found = terms_of(task, find(task).mechanisms(task))
    fields = [[each.tag, each.length, each.bits, each.bound, each.slack] for each in found.fields]
    return {"fields": fields, "cohort": [found.smallest, found.largest, found.survivors, found.colluders, found.size]}


def snapshot(state: Any) -> bytes:
    """A server's state as it is stored. It is read back to the same bytes."""
    data = pack_state(state)
    assert pack_state(unpack_state(state, data)) == data
    return data


def names() -> list[str]:
    return list(_all())


def run(name: str) -> Plain:
    return _all()[name]()


def compiles(name: str) -> bool:
    """Whether XLA compiles for it, which takes a second: only `compare.py` runs these."""
    return name not in ("simulate gram", "trusted factorisations", "published proportions")


def _all() -> dict[str, Callable[[], Plain]]:
    late = {"delay": Delay.parse("exponential:20")}
    found = {
        "simulate sgd": partial(_simulated, "sgd momentum", devices=9, **late),
        "simulate sgd on events": partial(_simulated, "sgd error", devices=9, engine="events"),
        "simulate sgd masked": partial(_simulated, "sgd average masked", devices=19, dropout=0.1),
        "simulate local": partial(_simulated, "local adam weigh", devices=9, **late),
        "simulate local masked": partial(_simulated, "local momentum masked", devices=9),
        "simulate admm masked": partial(_simulated, "admm logistic masked", devices=9, dropout=0.1),
        "simulate gram": partial(_simulated, "gram device", devices=9, dropout=0.1),
        "trusted factorisations": _factorised,
        "published proportions": _published_proportions,
        "published admm": _published_admm,
        "published local": _published_local,
        "stragglers": _stragglers,
    }  # fmt: skip
    return {**found, **{f"trusted mean {law}": partial(_trusted_mean, law) for law in ("gaussian", "l2-gamma")}}


MOVED = {
    "published_admm": "admm", "published_local": "local_updates", "published_proportions": "proportions",
    "trusted": "matrix_noise",
}  # fmt: skip
"""What modules of `sim` are called among the experiments, where that is not their old name."""


def _moved(name: str) -> Any:
    """A module that was in `sim` before the core moved, and is among the experiments after it."""
    try:
        return import_module(f"crowdml.experiments.published.{MOVED.get(name, name)}")
    except ModuleNotFoundError:
        return import_module(f"crowdml.sim.{name}")


def _simulated(name: str, *, devices: int, **settings: Any) -> Plain:
    task = driver.read(cases.variants()[name].text)
    each = 2 * driver.batch_of(task) + 1
    x, y = cases.samples(task.features.dimension, task.classes, devices * each)

    crowd: Any = {"devices": devices, "seed": [3, 4]}
    if "deal" in signature(simulate).parameters:  # before `simulate` was public
        crowd = {"deal": lambda seed: iid(len(y), devices, seed), "seeds": [3, 4]}
    study = simulate(task, x, y, **crowd, points=2, workers=1, **settings)
    ledger = replayed_ledger(study) if name == "sgd momentum" else None
    return {
        "runs": [driver._run(each) for each in study.runs],
        "cost": _cost(study),
        "accuracy": study.accuracy(x, y) if task.classes is not None else None,
        "crowd says": study.crowd_says,
        "ledger": None if ledger is None else [str(charge.loss) for charge in ledger.charges()],
        **{name: getattr(study, name)
           for name in ("check_ins", "bytes_up", "bytes_down", "silent", "uses", "rounds", "abandoned")},
    }  # fmt: skip


def _cost(study: Any) -> list[str]:
    """What was planned and what was paid: sample, device, and both if everyone else colludes."""
    cost = getattr(study, "cost", None)
    if cost is not None:
        return [each.hex() for each in (cost.epsilon_sample, cost.epsilon_device, cost.alone_sample, cost.alone_device,
                                        cost.paid_sample, cost.paid_device)]  # fmt: skip
    planned, paid = study.planned, study.paid
    return [each.hex() for each in (planned.sample, planned.device, planned.sample_alone, planned.device_alone,
                                    paid.sample, paid.device)]  # fmt: skip


def _holding(devices: int, each: int, dimension: int, classes: int) -> Holding:
    x, y = cases.samples(dimension, classes, devices * each)
    rows = np.arange(devices * each, dtype=np.int32).reshape(devices, each)
    return Holding(x, y, Population("iid", rows, np.full(devices, each, np.int32), 0))


def _trusted_mean(law: str) -> Plain:
    text = cases.variants()["local without noise"].text
    task = driver.read(text.replace("local_steps = 3", "local_steps = 3\nclip = 0.5"))
    found = _moved("trusted_mean").run(
        task, _holding(12, 8, 5, 3), 3, cohort=6, least=4, epsilon=2.0, law=law, dropout=0.2
    )
    told = {name: getattr(found, name) for name in ("weights", "heard", "released", "rounds", "epsilon")}
    return {**told, "loss": str(found.mechanism.loss), "observer": found.mechanism.observer.name}


def _factorised() -> Plain:
    module = _moved("trusted")
    found = {kind: module.factorise(kind, 12) for kind in sorted(module.KINDS)}
    return {
        kind: [each.encode, each.decode, each.bands, each.error, str(each.loss(1.0, 2.0, participations=2))]
        for kind, each in found.items()
    }


def _stragglers() -> Plain:
    module = _moved("stragglers")
    task = driver.read(cases.variants()["admm logistic masked"].text)
    pace = module.Pace(joining=10.0, leaving=0.3, horizon=20.0)
    layout = module.lay_out(pace, 12, seed=3, barrier=6, delay=3, rounds=5)
    laid = {name: getattr(layout, name) for name in ("device", "trip", "version", "time")}
    (course,) = module.run(task, _holding(12, 5, 5, 2), layout, [3])
    return {**laid, "weights": course.weights}


def _published_admm() -> Plain:
    module, held = _moved("published_admm"), _holding(6, 5, 5, 2)
    settings = module.Published(0.5, 0.01, module.published_sigma(1.0, 1e-3, 0.5), solver=5)
    x, y = held.x.reshape(6, 5, -1), held.y.reshape(6, 5)
    layout = _moved("stragglers").synchronous(6, 3)
    (told,) = module.run(settings, make_model("logistic", 5, 2), x, y, layout, [3])
    found = {name: getattr(told, name) for name in ("weights", "moves", "duals", "local")}
    return {**found, "total": module.total_epsilon(1.0, 20), "dual price": module.dual_price(20)}


def _published_local() -> Plain:
    module, held = _moved("published_local"), _holding(6, 10, 5, 3)
    settings = module.Published(0.5, 0.1, rounds=6, local_steps=2, minibatch=5, server_batch=2, stale=0.2)
    (course,) = module.run(settings, make_model("softmax", 5, 3), held.x, held.y, [3], looks=2)
    cost = module.real_cost(settings, dimension=15, samples=60)
    return {"weights": course.weights, "heard": course.heard, "cost": driver.plain_state(cost)}


def _published_proportions() -> Plain:
    module = _moved("published_proportions")
    counts = module.batch_counts(cases.samples(2, 3, 40)[1], 8, 3)
    kinds = (module.IN_LOOP, module.ONCE)
    noisy = [module.noisy_proportions(counts, 1.0, kind, np.random.default_rng(2)) for kind in kinds]
    return {"counts": counts, "noisy": noisy, "atoms": module.atoms(counts[0]),
            "epsilon": [str(module.real_epsilon(1.0, kind, uses=9)) for kind in kinds]}  # fmt: skip
