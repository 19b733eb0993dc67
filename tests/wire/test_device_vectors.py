"""The vectors of what a device does before it sends, held against other ways to the same numbers.

Draws are looked up in distribution functions of 200 bits; sums on the grid are whole fractions; budgets add up each
serial by itself; local updates walk the path in float64. None of it calls what made the vectors.
"""

from __future__ import annotations

import json
import math
from fractions import Fraction
from functools import cache

import mpmath
import msgpack
import numpy as np
import pytest
from make_vectors import SPEC


def vectors(name: str):
    return json.loads((SPEC / "vectors" / f"{name}.json").read_text(encoding="utf-8"))


def named(rows) -> list:
    return [pytest.param(row, id=f"{number} {row.get('name', row.get('law'))}") for number, row in enumerate(rows)]


# --- draws ---


def magnitude_beyond(law: str, parameter: Fraction):
    """P(|X| <= k) for k = 0, 1, ..."""
    number = mpmath.mpf(parameter.numerator) / parameter.denominator
    if law == "skellam":
        last = 40 + int(14 * math.sqrt(parameter))
        weights = [mpmath.besseli(k, number) for k in range(last)]
    else:
        weights = [mpmath.exp(-k * k / (2 * number**2)) for k in range(40 + int(14 * parameter))]
    return cumulative([weight * (2 if k else 1) for k, weight in enumerate(weights)])


def cumulative(weights):
    total, sums, done = mpmath.fsum(weights), [], mpmath.mpf(0)
    for weight in weights:
        done += weight
        sums.append(done / total)
    return sums


def drawn(sums, data: bytes, count: int):
    """`count` inversions and sign bits, and what is left of the bytes: words of 63 bits, longer where they must be."""
    words = [int.from_bytes(data[8 * i : 8 * i + 8], "little") for i in range(count)]
    rest, found = data[8 * count :], []
    for word in words:
        low, bits = word >> 1, 63
        while True:
            first = next((k for k, each in enumerate(sums) if low < each * mpmath.mpf(2) ** bits), len(sums))
            edges = [each * mpmath.mpf(2) ** bits for each in sums[max(0, first - 2) : first + 1]]
            # an enclosure of F(k) reaches up to two units above a whole number that is at most 2^bits F(k)
            if not any(mpmath.floor(edge) <= low <= mpmath.floor(edge) for edge in edges):
                break
            low, bits, rest = low << 64 | int.from_bytes(rest[:8], "little"), bits + 64, rest[8:]
        found.append((first, word & 1))
    return found, rest


@pytest.mark.parametrize("case", named(vectors("draws")))
def test_a_draw_is_where_its_bits_lie_in_the_distribution(case):
    data, count = bytes.fromhex(case["bytes"]), len(case["values"])
    with mpmath.workprec(400):
        if case["law"] == "discrete-laplace":
            scale, m = Fraction(case["scale"]), case["block"]
            ratio = mpmath.exp(-mpmath.mpf(scale.denominator) / scale.numerator)
            blocks = cumulative([ratio ** (m * k) for k in range(3 + int(140 * scale / m))])
            places, sides = cumulative([ratio**k for k in range(m)]), cumulative([mpmath.mpf(1), ratio])
            high, data = drawn(blocks, data, count)
            low, data = drawn(places, data, count)
            side, data = drawn(sides, data, count)
            g = [m * block + place for (block, _), (place, _) in zip(high, low, strict=True)]
            values = [-1 - each if below else each for each, (below, _) in zip(g, side, strict=True)]
        else:
            parameter = Fraction(case.get("sigma") or case["variance"])
            found, data = drawn(magnitude_beyond(case["law"], parameter), data, count)
            values = [-magnitude if negative else magnitude for magnitude, negative in found]
    assert values == case["values"]
    assert data == b""


def test_some_vectors_need_a_second_look_and_some_a_table_of_many():
    rows = vectors("draws")
    words = {"discrete-laplace": 3, "discrete-gaussian": 1, "skellam": 1}
    again = {row["law"] for row in rows if len(row["bytes"]) > 16 * words[row["law"]] * len(row["values"])}
    assert again == set(words)
    assert max(len(row["values"]) for row in rows) > 48


# --- the grid ---


def on_the_grid(row: list[float], norm: str, step: Fraction, clip: int) -> list[int]:
    """The row's part of the sum: the largest whole numbers within its scaled entries, in whole fractions."""
    if not all(map(math.isfinite, row)):
        return [0] * len(row)
    exact = [Fraction(value) / step for value in row]
    square = sum(map(abs, exact)) ** 2 if norm == "l1" else sum(value * value for value in exact)
    if square > 10**30:
        return [0] * len(row)
    if square <= clip * clip:
        return [math.trunc(value) for value in exact]
    found = []
    for value in exact:  # the largest t with t * size <= |value| * clip
        most = value * value * clip * clip / square
        size = math.isqrt(math.floor(most))
        apart = abs(math.sqrt(most) - round(math.sqrt(most)))
        assert apart > 1e-3 or apart < 1e-12, "A vector must be the same on every machine."
        found.append(size if value > 0 else -size)
    return found


@pytest.mark.parametrize("case", named(vectors("grid")))
def test_a_sum_on_the_grid_is_that_of_whole_fractions(case):
    rows = [
        on_the_grid([float(value) for value in row], case["norm"], Fraction(case["step"]), case["clip"])
        for row in case["rows"]
    ]
    assert [sum(column) for column in zip(*rows, strict=True)] == case["sum"]


# --- verdicts ---


@cache
def best_order(epsilon: float, delta: float) -> float:
    """Where (epsilon - c(a)) / a is largest, from a fine grid."""
    order = 1 + np.exp(np.linspace(-9, 30, 400_000))
    return float(order[np.argmax((epsilon - conversion(order, delta)) / order)])


def conversion(order, delta: float):
    return -np.log(order * delta) / (order - 1) + np.log1p(-1 / order)


def at(loss: str, order: float) -> float:
    """The value of a Renyi loss at the next order that it lists."""
    pairs = [pair.split(":") for pair in loss.removeprefix("renyi ").split(",")]
    return next((float(Fraction(value)) for listed, value in pairs if int(listed) >= order), math.inf)


def is_within(losses: list[str], epsilon: Fraction, delta: float) -> bool:
    pure = [Fraction(loss.split()[1]) for loss in losses if loss.startswith("pure")]
    if len(pure) == len(losses) and sum(pure) <= epsilon:
        return True
    if delta == 0:
        return False
    order = best_order(float(epsilon), delta)
    limit = float(epsilon) - float(conversion(order, delta))
    spent = min(float(sum(pure)), order * float(sum(each * each for each in pure)) / 2)
    spent += sum(order * float(Fraction(loss.split()[1])) for loss in losses if loss.startswith("zcdp"))
    spent += sum(at(loss, order) for loss in losses if loss.startswith("renyi"))
    assert abs(spent - limit) > 1e-3, "A verdict must be the same on every machine."
    return spent <= limit


def cap_of(budget, charges, before) -> str | None:
    """What a budget says of a step after those before, each serial by itself."""
    if budget["task"] is not None:
        before = [each for each in before if each["task"] == budget["task"]]
    epsilon, delta = Fraction(budget["epsilon"]), budget["delta"]

    def paid(serial: int, rows) -> list[str]:
        return [row["loss"] for row in rows if row["first"] <= serial <= row["last"]]

    serials = {serial for row in charges for serial in range(row["first"], row["last"] + 1)}
    given = {serial for row in before for serial in range(row["first"], row["last"] + 1)}
    if len(given | serials) > budget["samples"]:
        return "samples"
    if not all(is_within(paid(serial, [*before, *charges]), epsilon, delta) for serial in serials):
        return "sample"
    if budget["device_epsilon"] is not None:
        losses = [row["device_loss"] for row in [*before, *charges]]
        if not is_within(losses, Fraction(budget["device_epsilon"]), delta):
            return "device"
    return None


def added(losses: list[str]) -> list[str]:
    """Losses of each kind added up, as a statement writes them."""
    found = {}
    for loss in losses:
        kind, _, rest = loss.partition(" ")
        values = [Fraction(pair.rpartition(":")[2]) for pair in rest.split(",")]
        orders = [pair.rpartition(":")[0] for pair in rest.split(",")]
        kept = found.setdefault(kind, (orders, [Fraction(0)] * len(values)))
        assert kept[0] == orders
        found[kind] = orders, [one + other for one, other in zip(kept[1], values, strict=True)]
    return [
        f"{kind} " + ",".join(f"{order}:{value}" if order else str(value) for order, value in zip(*each, strict=True))
        for kind, each in sorted(found.items())
    ]


def most(texts: list[list[str]]) -> list[str]:
    """The largest loss of each kind among these totals."""
    found: dict[str, tuple[list[Fraction], str]] = {}
    for text in (text for total in texts for text in total):
        values = [Fraction(pair.rpartition(":")[2]) for pair in text.partition(" ")[2].split(",")]
        kind = text.partition(" ")[0]
        found[kind] = max(found.get(kind, ([], "")), (values, text))
    return [text for _, (_, text) in sorted(found.items())]


@pytest.mark.parametrize("case", named(vectors("spending")))
def test_a_budget_refuses_what_the_samples_under_a_step_cannot_pay(case):
    before: list = []
    for step in case["steps"]:
        charges = [{**row, "task": step["task"]} for row in step["charges"]]
        held = [n for n, each in enumerate(case["budgets"]) if each["task"] in (None, step["task"])]
        caps = [(cap_of(case["budgets"][n], charges, before), n) for n in held] or [("budget", None)]
        assert (step["cap"], step["budget"]) == next((each for each in caps if each[0]), (None, None))
        if step["cap"] is None:
            before += charges
        serials = {serial for row in before for serial in range(row["first"], row["last"] + 1)}
        each = [added([row["loss"] for row in before if row["first"] <= n <= row["last"]]) for n in serials]
        assert step["statement"] == {
            "dearest": most(each), "device": added([row["device_loss"] for row in before]), "samples": len(serials),
        }  # fmt: skip


def test_the_histories_meet_every_cap():
    caps = {step["cap"] for case in vectors("spending") for step in case["steps"]}
    assert caps == {None, "budget", "samples", "sample", "device"}


# --- local updates ---


def softmax_gradient(weights, x, y, clip: float):
    scores = np.exp(x @ weights - (x @ weights).max(1, keepdims=True))
    rows = x[:, :, None] * (scores / scores.sum(1, keepdims=True) - np.eye(weights.shape[1])[y])[:, None, :]
    size = np.sqrt((rows**2).sum((1, 2), keepdims=True))
    return (rows * np.minimum(1, clip / size)).mean(0)


@pytest.mark.parametrize("case", named(vectors("local_updates")))
def test_a_local_update_is_the_mean_gradient_along_the_devices_own_path(case):
    task = json.loads(case["task"])
    protocol, l2 = task["protocol"], float(task["model"].get("l2", 0))
    x, y, start = np.array(case["x"]), np.array(case["y"]), np.array(case["weights"])
    steps, size = protocol.get("local_steps", 1), protocol.get("minibatch") or protocol["batch"]
    stable = case["rounding"] == "to the nearest"
    bound = float(task["features"]["norm"]["bound"])
    if stable:
        x = x * np.minimum(1, bound / np.maximum(np.sqrt((x**2).sum(1, keepdims=True)), 1e-30))
    clip = math.inf if stable else float(protocol.get("clip", math.inf))
    for run in case["runs"]:
        rate, counter = protocol["rate"], protocol["rate"].get("counter", "rounds")
        first = {"rounds": case["version"], "path": run["trip"] * steps}[counter] + 1
        assert run["count"] == first
        weights, rates = start.copy(), []
        for step in range(steps):
            t = first + (step if counter == "path" else 0)
            shrink = {"constant": 1, "1/t": 1 / t, "1/sqrt(t)": t**-0.5}[rate.get("schedule", "constant")]
            rates.append(float(rate["c"]) * shrink)
            part = slice(step * size % len(x), step * size % len(x) + size)
            weights = (1 - l2 * rates[-1]) * weights - rates[-1] * softmax_gradient(weights, x[part], y[part], clip)
        kept = [math.prod(1 - l2 * later for later in rates[step:]) for step in range(steps + 1)]
        reach = sum(one * left for one, left in zip(rates, kept[1:], strict=True))
        update = float(Fraction(run["share"])) * (kept[0] * start - weights) / reach / float(Fraction(case["grid"]))
        edge = update + 0.5 if stable else update
        assert (np.abs(edge - np.round(edge)) > 1e-3).all(), "A vector must be the same on every machine."
        steps_of = np.rint(update) if stable else np.trunc(update)
        assert steps_of.ravel().tolist() == run["update"]
        body = msgpack.unpackb(bytes.fromhex(run["body"]))
        assert body.pop("update") == ["<i4", [update.size], np.array(run["update"], "<i4").tobytes()]
        scheduled = {"trip": run["trip"]} if run["kind"] == "local/scheduled/1" else {}
        assert body == {"count": run["count"], "version": case["version"], **scheduled}
    published = msgpack.unpackb(bytes.fromhex(case["publication"]))
    assert published == {
        "weights": ["<f4", [3, 4], start.astype("<f4").tobytes()], "version": case["version"], "taken": case["taken"],
    }  # fmt: skip


def test_a_changed_vector_is_noticed():
    """One of each kind, off by one: the other way to its number must not follow it."""
    case = vectors("grid")[0]
    case["sum"][0] += 1
    with pytest.raises(AssertionError):
        test_a_sum_on_the_grid_is_that_of_whole_fractions(case)
    case = vectors("draws")[0]
    case["values"][3] += 1
    with pytest.raises(AssertionError):
        test_a_draw_is_where_its_bits_lie_in_the_distribution(case)
    case = vectors("spending")[1]
    case["steps"][4] |= {"cap": "sample", "budget": 0}
    with pytest.raises(AssertionError):
        test_a_budget_refuses_what_the_samples_under_a_step_cannot_pay(case)
    case = vectors("local_updates")[0]
    case["runs"][0]["update"][2] += 1
    with pytest.raises(AssertionError):
        test_a_local_update_is_the_mean_gradient_along_the_devices_own_path(case)
