"""What a device does before it sends: draws of each law, sums on the grid, verdicts, local updates, whole turns.

`make_vectors.py` writes these beside the vectors of the wire. Only `draws.json` and `turns.json` have noise in them,
from random bytes that stand beside it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from crowdml import protocols
from crowdml.arrays import Samples
from crowdml.messages import SERVER, encode
from crowdml.privacy.budget import Budget
from crowdml.privacy.door import Door
from crowdml.privacy.grid import Grid
from crowdml.privacy.laws import DiscreteGaussian, Geometric, Skellam, Thresholds
from crowdml.privacy.losses import ZCDP, Loss, Pure, Renyi, group
from crowdml.privacy.mechanisms import GaussianStable, GridGaussian, Scheduled
from crowdml.privacy.noise import WORD, Silence, SystemSource, _block
from crowdml.privacy.private import Masked, Private, Rows
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.privacy.spending import Charge, History
from crowdml.protocol import Context, Send
from crowdml.protocols import gram, local_updates, sgd
from crowdml.task import Task, parse
from crowdml.turn import check_in
from crowdml.wire.keys import Key
from crowdml.wire.statements import Statement

# --- draws ---


class Stream:
    """Random bytes that were written down: what is drawn from them is known to everybody."""

    def __init__(self, data: bytes) -> None:
        self.data, self.used = data, 0

    def __call__(self, size: int) -> bytes:
        self.used += size
        assert self.used <= len(self.data), "The stream of a vector is too short."
        return self.data[self.used - size : self.used]


def random_bytes(label: str, size: int) -> bytes:
    """The same bytes in every run."""
    blocks = (hashlib.sha256(f"{label} {block}".encode()).digest() for block in range(-(-size // 32)))
    return b"".join(blocks)[:size]


def words(values: Iterable[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def on_an_edge(law: Thresholds, k: int) -> int:
    """A word whose 63 bits lie across F(k), so that they decide nothing; its sign bit is 1."""
    more = 64
    low = law.thresholds(WORD + more)[k]
    assert low >> more == low + 2 >> more, "Choose another place: these bits do not tell the edge either."
    return (low >> more) << 1 | 1


LAWS = (
    ("discrete-laplace", "scale", ("40", "7/3", "1/5", "20001/2")),
    ("discrete-gaussian", "sigma", ("7/2", "1/3", "3000/7", "1")),
    ("skellam", "variance", ("49/4", "1/2", "900")),
)
"""Laws with parameters: large, small, whole and broken."""


def draws() -> Any:
    cases = [draw(law, name, Fraction(each), 12, b"") for law, name, parameters in LAWS for each in parameters]
    gaussian, skellam, scale = DiscreteGaussian(Fraction(7, 2)), Skellam(Fraction(49, 4)), Fraction(7, 3)
    side, last = Geometric(scale, below=2), 2**64 - 1
    for k, beginning in ((0, [on_an_edge(gaussian, 0)]), (4, [5, on_an_edge(gaussian, 4)]), (9, [last, last])):
        cases.append(draw("discrete-gaussian", "sigma", gaussian.sigma, len(beginning), words(beginning), edge=k))
    cases.append(draw("skellam", "variance", skellam.variance, 1, words([on_an_edge(skellam, 2)]), edge=2))
    edge = words([3, 2**63 + 1, on_an_edge(side, 0)])
    cases.append(draw("discrete-laplace", "scale", scale, 1, edge, edge=0))
    cases.append(draw("discrete-gaussian", "sigma", Fraction(7, 2), 60, b""))
    return cases


def draw(law: str, name: str, parameter: Fraction, count: int, beginning: bytes, edge: int | None = None) -> Any:
    """So many draws, one after another from one stream. `edge`: one of them needs a second look."""
    stream = Stream(beginning + random_bytes(f"{law} {parameter} {edge}", 24 * count + 64))
    source, like = SystemSource(stream), np.empty(count)
    ask = {
        "discrete-laplace": source.discrete_laplace,
        "discrete-gaussian": source.discrete_gaussian,
        "skellam": source.skellam,
    }
    values = ask[law](parameter, like).tolist()
    found: dict[str, Any] = {"law": law, name: str(parameter), "bytes": stream.data[: stream.used].hex()}
    if law == "discrete-laplace":
        found["block"] = _block(parameter)
    return {**found, "values": values}


# --- the grid ---

NAN, INF = float("nan"), float("inf")
ROWS: tuple[tuple[str, str, str, int, list[list[float]]], ...] = (
    ("within the clip", "l2", "1/8", 100, [[1.5, -2.25, 0.0], [-0.125, 0.0625, 3.1875], [0.1, -0.1, 0.0]]),
    ("longer than the clip", "l2", "1/8", 10, [[1.5, -2.25, 0.0], [30.0, 40.0, -7.0], [-0.5, 0.5, 0.25]]),
    ("the same in the l1 norm", "l1", "1/8", 10, [[1.5, -2.25, 0.0], [30.0, 40.0, -7.0], [-0.5, 0.5, 0.25]]),
    ("a coarse step", "l2", "4", 5, [[7.0, -3.0], [100.0, -8.0], [3.9, 4.1]]),
    ("exactly at the clip", "l2", "1/2", 5, [[1.5, 2.0], [-1.5, -2.0], [2.5, 0.0]]),
    ("numbers that are none", "l2", "1/8", 10, [[1.0, NAN], [INF, 0.0], [0.5, -INF], [0.25, 0.75]]),
    ("beyond any use", "l1", "1", 100, [[3e15, 1.0], [9e14, -3e14], [2.0, 3.0]]),
)  # fmt: skip


def grids() -> Any:
    cases: list[Any] = []
    for name, norm, step, clip, rows in ROWS:
        grid = Grid(Fraction(step))
        table = np.array(rows, np.float32)
        assert norm in ("l1", "l2")
        cases.append({
            "name": name, "norm": norm, "step": step, "clip": clip,
            "rows": [[value if math.isfinite(value) else _named(value) for value in row] for row in table.tolist()],
            "sum": grid.sum(table, norm=norm, clip=clip).tolist(),
        })  # fmt: skip
    return cases


def _named(value: float) -> str:
    """JSON has no such numbers: as JavaScript writes them."""
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


# --- verdicts ---

FIRST, SECOND = (hashlib.sha256(name).digest() for name in (b"first task", b"second task"))
DELTA = 1e-6
TENTH, SMALL = Pure(Fraction(1, 10)), ZCDP(Fraction(1, 500))
ORDERS = Renyi((2, 4, 16), (Fraction(1, 100), Fraction(1, 50), Fraction(1, 10)))

Asked = tuple[bytes, Sequence[tuple[int, int, Loss]]]


def budget(epsilon: str, samples: int, device: str | None = None, task: bytes | None = None, delta: float = DELTA):
    return Budget(Fraction(epsilon), delta, samples, None if device is None else Fraction(device), task)


def each(count: int, step: int, *parts: tuple[int, int, Loss], task: bytes = FIRST) -> list[Asked]:
    """The same parts over and over, each time so many serials further."""
    return [(task, [(first + turn * step, last + turn * step, loss) for first, last, loss in parts])
            for turn in range(count)]  # fmt: skip


HISTORIES: tuple[tuple[str, list[Budget], list[Asked]], ...] = (
    ("fresh samples until there are no more", [budget("1", 30)], each(4, 10, (0, 9, TENTH))),
    ("one span again and again", [budget("1/2", 10)], each(6, 0, (0, 9, TENTH))),
    ("zCDP adds up, and is converted once", [budget("1", 10)], each(14, 0, (0, 9, SMALL))),
    ("spans that overlap by half", [budget("3/20", 100)], each(3, 5, (0, 9, TENTH)) + each(1, 0, (20, 29, TENTH))),
    ("two parts of one step, and a row over both", [budget("1", 100, "9")],
     each(8, 10, (0, 3, SMALL), (4, 9, TENTH), (0, 9, Pure(Fraction(1, 20))))),
    ("two charges of one step that are too much together", [budget("1/10", 10)],
     each(1, 0, (0, 9, TENTH), (9, 9, TENTH)) + each(1, 0, (0, 9, TENTH))),
    ("a cap on the device", [budget("1", 100, "5/2")], each(3, 10, (0, 9, TENTH))),
    ("a device's zCDP grows with the square of its samples", [budget("1", 100, "3")], each(6, 5, (0, 4, SMALL))),
    ("each task has its budget, and the owner one for all",
     [budget("3/10", 100), budget("1/5", 100, task=FIRST), budget("1/10", 15, task=SECOND)],
     each(3, 0, (0, 9, TENTH)) + each(2, 0, (5, 12, TENTH), task=SECOND) + each(1, 0, (13, 20, TENTH), task=SECOND)
     + each(1, 0, (21, 30, TENTH), task=SECOND)),
    ("without a budget of its own or of all", [budget("1", 100, task=SECOND)], each(1, 0, (0, 9, TENTH))),
    ("with delta 0 pure losses alone", [budget("1", 100, delta=0.0)],
     each(1, 0, (0, 9, SMALL)) + each(1, 0, (0, 9, TENTH))),
    ("Renyi losses at their orders", [budget("2", 100)], each(15, 0, (0, 4, ORDERS))),
)  # fmt: skip


def spending() -> Any:
    """Steps in a row of one device: what its budgets say of each, and its totals after those that they allow."""
    return [history(*row) for row in HISTORIES]


def history(name: str, budgets: list[Budget], asked: list[Asked]) -> Any:
    kept, steps = History(), list[Any]()
    for task, parts in asked:
        charges = [charge(task, *part) for part in parts]
        refusal = kept.refusal(task, charges, budgets)
        if refusal is None:
            kept.add(task, charges)
        steps.append({
            "task": task.hex(),
            "charges": [
                {"first": each.first_sample, "last": each.last_sample, "loss": str(each.loss),
                 "device_loss": str(each.device_loss)}
                for each in charges
            ],
            "cap": None if refusal is None else refusal.cap,
            "budget": None if refusal is None or refusal.budget is None else budgets.index(refusal.budget),
            "statement": Statement.of(*kept.spent().after([], 0)).plain(),
        })  # fmt: skip
    return {
        "name": name,
        "budgets": [
            {"epsilon": str(each.epsilon), "delta": each.delta, "samples": each.samples,
             "device_epsilon": None if each.device_epsilon is None else str(each.device_epsilon),
             "task": None if each.task is None else each.task.hex()}
            for each in budgets
        ],
        "steps": steps,
    }  # fmt: skip


def charge(task: bytes, first: int, last: int, loss: Loss) -> Charge:
    device = loss if isinstance(loss, Renyi) else group(loss, last - first + 1)
    when = "2025-01-31T12:00:00+00:00"
    return Charge(task, "row", loss, device, Observer.ANYONE, Adjacency.REPLACE_SAMPLE, first, last, when)


# --- local updates ---

BEGINNING = """
name = "vector-local"
[features]
dimension = 3
norm = { kind = "l2", bound = 1.0 }
[labels]
classes = ["a", "b", "c", "d"]
[model]
kind = "softmax"
"""
LOCAL = {
    "a sample, one step": BEGINNING + """
[protocol]
kind = "local_updates"
batch = 4
rate = { c = 0.5 }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { update = 1.0 }
delta = 1e-6
""",
    "a sample, four steps on two minibatches, with a ridge": BEGINNING + """l2 = 0.125
[protocol]
kind = "local_updates"
batch = 4
minibatch = 2
local_steps = 4
rate = { c = 0.5, schedule = "1/sqrt(t)" }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { update = 1.0 }
delta = 1e-6
""",
    "a device, clipped, three steps": BEGINNING + """
[protocol]
kind = "local_updates"
batch = 4
local_steps = 3
clip = 0.25
rate = { c = 2.0, schedule = "1/t", counter = "path" }
[privacy]
mechanism = "discrete-gaussian"
unit = "device"
epsilon = { update = 4.0 }
delta = 1e-6
budget = { epsilon = 4.0, samples = 40 }
""",
    "noise that grows": BEGINNING + """
[protocol]
kind = "local_updates"
batch = 4
local_steps = 2
rate = { c = 0.5 }
noise = { schedule = "geometric", ratio = 1.5 }
[privacy]
mechanism = "discrete-gaussian"
unit = "device"
epsilon = { update = 4.0 }
delta = 1e-6
budget = { epsilon = 4.0, samples = 12 }
""",
}  # fmt: skip
OWNER = Key.from_secret(b"\1" * 32)
TRIPS = (0, 2)
"""Check-ins that are shown: the first, and a later one."""
X = np.array([[1, 0, 2], [-3, 4, 0], [2, -5, 1], [24, -8, 16]], np.float32) / 8
BATCH = Samples(X, np.array([0, 3, 1, 2]))
START = np.arange(-5, 7, dtype=np.float32).reshape(3, 4) / 8


def local() -> Any:
    """From a task and a batch to the bytes of a check-in, without the noise."""
    return [local_case(name, parse(text)) for name, text in LOCAL.items()]


def local_case(name: str, task: Task) -> Any:
    row = local_updates.plan(task).table["update"]
    first = row.at(0)
    assert isinstance(first, GridGaussian | GaussianStable)
    weights = local_updates.Weights(START, np.int32(3), np.int32(9))
    runs: list[Any] = []
    for trip in TRIPS:
        door = Door(local_updates.mechanisms(task), Silence(), trip=trip)
        context = Context(OWNER.id, SERVER, release=door.release, trip=trip)
        private = Private(BATCH, Rows(0, len(BATCH)))
        send, *_ = local_updates.device.on[local_updates.Weights](task, private, weights, context).effects
        assert isinstance(send, Send)
        said: Any = send.message
        assert isinstance(said, local_updates.Update | local_updates.ScheduledUpdate)
        priced = row.at(trip)
        runs.append({
            "trip": trip, "count": int(said.count), "share": str(row.levels[trip] / Fraction(row.of))
            if isinstance(row, Scheduled) else "1",
            "loss": str(priced.loss), "device_loss": str(priced.device_loss), "kind": said.kind,
            "update": said.update.value.tolist(), "body": encode(said).hex(),
        })  # fmt: skip
    return {
        "name": name, "task": task.canonical.decode(), "hash": task.hash.hex(), "grid": str(first.grid.step),
        "most": first.limit if isinstance(first, GaussianStable) else first.clip,
        "rounding": "to the nearest" if isinstance(first, GaussianStable) else "toward zero",
        "sigma": str(first.sigma), "x": BATCH.x.tolist(), "y": BATCH.y.tolist(), "weights": START.tolist(),
        "version": 3, "taken": 9, "publication": encode(weights).hex(), "runs": runs,
    }  # fmt: skip


# --- whole turns ---

TURN_END = """
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 0.9, errors = 0.05, labels = 0.05 }
delta = 1e-6
budget = { epsilon = 1.0, samples = 100 }
"""
TWO_CLASSES = BEGINNING.replace('["a", "b", "c", "d"]', '["no", "yes"]')
SGD_PROTOCOL = """
[protocol]
kind = "sgd"
batch = 4
step = { c = 1.0 }
"""
TURNS = {
    "sgd, softmax with a bias, held out": BEGINNING + "bias = true" + SGD_PROTOCOL + "held_out = 1" + TURN_END,
    "sgd, logistic": TWO_CLASSES.replace("softmax", "logistic") + SGD_PROTOCOL + TURN_END,
    "sgd, svm in the l1 norm": TWO_CLASSES.replace("softmax", "svm").replace('"l2"', '"l1"') + SGD_PROTOCOL + """
[privacy]
mechanism = "discrete-laplace"
epsilon = { gradient = 2.0, labels = 0.5 }
delta = 0.0
""",
    "sgd, two passes of a network": BEGINNING.replace("softmax", "mlp") + """hidden = [3]
activation = "tanh"
""" + SGD_PROTOCOL + "clip = 1.0" + TURN_END + "uses = 2\n",
    "local updates of a network, adaptive": BEGINNING.replace("softmax", "mlp") + """hidden = [3]
[protocol]
kind = "local_updates"
batch = 4
minibatch = 2
local_steps = 3
clip = 0.5
rate = { c = 0.25, schedule = "adagrad" }
[privacy]
mechanism = "discrete-gaussian"
unit = "device"
epsilon = { update = 4.0 }
delta = 1e-6
budget = { epsilon = 4.0, samples = 40 }
""",
    "sgd under masks": BEGINNING + SGD_PROTOCOL + """
[privacy]
mechanism = "skellam"
epsilon = { gradient = 2.0, labels = 0.5 }
delta = 1e-7
[masking]
cohort = 10
minimum = 8
colluders = 1
""",
    "gram, under masks": BEGINNING.replace("softmax", "ridge") + """
[protocol]
kind = "gram"
batch = 4
[privacy]
mechanism = "skellam"
epsilon = { moments = 2.0 }
delta = 1e-7
[masking]
cohort = 10
minimum = 8
""",
    "local updates in the l1 norm": BEGINNING + """
[protocol]
kind = "local_updates"
batch = 4
local_steps = 2
update_clip = 1.0
rate = { c = 0.5 }
[privacy]
mechanism = "discrete-laplace"
unit = "device"
epsilon = { update = 6.0 }
delta = 0.0
budget = { epsilon = 6.0, samples = 12 }
""",
    **{f"local updates: {name}": text for name, text in LOCAL.items()},
}  # fmt: skip
TURN_TRIPS = (0, 2)
"""Check-ins that are shown, with as many batches before them."""


def turns() -> Any:
    """From a task, a batch, a publication and random bytes to the message and the charges of one check-in."""
    return [turn_case(name, parse(text)) for name, text in TURNS.items()]


def turn_case(name: str, task: Task) -> Any:
    protocol = protocols.find(task)
    shape = {
        "sgd": lambda: sgd.plan(task).model.shape,
        "local_updates": lambda: local_updates.plan(task).model.shape,
        "gram": lambda: (gram.plan(task).mechanism.features, task.classes),
    }[protocol.name]()  # fmt: skip
    labels = BATCH.y % (task.classes or 1)
    batch = Samples(BATCH.x, labels)
    weights = (np.arange(math.prod(shape), dtype=np.float32).reshape(shape) % 7 - 3) / 8
    history, runs = History(), list[Any]()
    for trip in range(max(TURN_TRIPS) + 1):
        stream = Stream(random_bytes(f"turn {name} {trip}", 4096))
        turned = check_in(
            protocol, task, batch, published(protocol.name, weights), noise=SystemSource(stream), me=OWNER.id, trip=trip
        )
        for wide in (weights, weights.astype(np.float64)):  # a vector is the same in either float
            offer = published(protocol.name, wide)
            quiet = check_in(protocol, task, batch, offer, noise=Silence(), me=OWNER.id, trip=trip)
            noise = drawn_rows(task, protocol, SystemSource(Stream(stream.data)), quiet)
            sums = [(steps + drawn).tolist() for (_, steps), drawn in zip(rows_of(quiet.message), noise, strict=True)]
            assert [steps.tolist() for _, steps in rows_of(turned.message)] == sums
        charges = [
            Charge(task.hash, each.row, each.priced.loss, each.priced.device_loss, each.mechanism.observer,
                   each.mechanism.sensitivity.adjacency, 4 * trip + each.part.start, 4 * trip + each.part.stop - 1,
                   "2025-01-31T12:00:00+00:00",
                   *((each.mechanism.alone, each.mechanism.device_alone) if task.masking is not None else ()))
            for each in turned.passages
        ]  # fmt: skip
        history.add(task.hash, charges)
        if trip in TURN_TRIPS:
            runs.append({
                "trip": trip, "first": 4 * trip, "bytes": stream.data[: stream.used].hex(),
                "kind": turned.message.kind,
                **({"body": encode(turned.message).hex()} if task.masking is None
                   else {"masked": {row: steps.ravel().tolist() for row, steps in rows_of(turned.message)}}),
                "charges": [
                    {"row": each.mechanism, "first": each.first_sample, "last": each.last_sample,
                     "loss": str(each.loss), "device_loss": str(each.device_loss)}
                    for each in charges
                ],
                "statement": Statement.of(*history.spent().after([], 0)).plain(),
            })  # fmt: skip
    return {
        "name": name, "task": task.canonical.decode(), "hash": task.hash.hex(), "x": BATCH.x.tolist(),
        "y": labels.tolist(), "publication": encode(published(protocol.name, weights)).hex(), "runs": runs,
    }  # fmt: skip


def published(protocol: str, weights: Any) -> Any:
    if protocol == "gram":
        return gram.Fitted(weights, np.int32(3))
    if protocol == "sgd":
        return sgd.Params(weights, np.int32(3))
    return local_updates.Weights(weights, np.int32(3), np.int32(9))


def rows_of(message: Any) -> list[tuple[str, Any]]:
    """The rows that a message releases, or that leave under masks, in the order of the table."""
    named = ((row, getattr(message, row, None)) for row in ("gradient", "errors", "labels", "update", "moments"))
    return [(row, held._summand if isinstance(held, Masked) else held.value) for row, held in named if held is not None]


def drawn_rows(task: Task, protocol: Any, source: SystemSource, turned: Any) -> list[Any]:
    """The noise of each row, drawn by its law alone."""
    table, found = protocol.mechanisms(task), list[Any]()
    for row, steps in rows_of(turned.message):
        law = table[row].law.drawn
        if row == "moments":
            found.append(table[row].noise(source))
        elif isinstance(law, Skellam):
            found.append(source.skellam(law.variance, steps))
        elif isinstance(law, DiscreteGaussian):
            found.append(source.discrete_gaussian(law.sigma, steps))
        else:
            found.append(source.discrete_laplace(law.scale, steps))
    return found


def build() -> dict[str, Any]:
    """Every file of vectors by its name."""
    return {"draws": draws(), "grid": grids(), "spending": spending(), "local_updates": local(), "turns": turns()}
