"""Writes the record: what must not change when code moves.

    python tests/record/make.py                  writes tests/record/*.json
    python tests/record/make.py --exact FILE     writes all of it with the bits of every array, for compare.py

What a task is and costs, every message and state of a recorded schedule with fixed noise, what each engine makes of
it, and every kind of message. Integers, bytes and texts are kept exactly, large ones by their SHA-256; arrays of
floats by a few projections, which are compared to 1e-6.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
import cases
import driver
import studies

HERE = Path(__file__).parent
SPEC = HERE.parents[1] / "spec" / "vectors"
FEW = 8
"""Numbers that are kept as they are; of more, projections."""
LONG = 100
"""Characters of a text that is kept as it is."""
PARTS = ("facts", "turns", "engines", "studies", "kinds")


def all_cases() -> dict[str, cases.Case]:
    return {**cases.of_shipped(driver.shipped()), **cases.variants()}


# --- what is kept of a value ---


@dataclass(frozen=True)
class Bits:
    """Bytes that hold floats: `compare.py` compares all of them, and the tests how many they are."""

    data: bytes


def kept(value: Any) -> Any:
    """A value as JSON, with every bit of it: large arrays and bytes by their hash, floats by projections besides."""
    if isinstance(value, Mapping):
        return {str(name): kept(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(each) for each in value]
    if isinstance(value, Bits):
        return {"array": f"{len(value.data)} bytes", "floats": [], "bits": _hash(value.data)}
    if isinstance(value, bytes):
        return f"{len(value)} bytes {_hash(value)}"
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value if len(value) <= LONG else f"{value[:20]}... {_hash(value.encode())}"
    array = np.asarray(value)
    named = f"{array.dtype.newbyteorder('<').str}{list(array.shape)}"
    data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
    if array.dtype.kind == "f":
        return {"array": named, "floats": _projected(array), "bits": _hash(data)}
    if array.size <= FEW:
        return {"array": named, "integers": array.reshape(-1).tolist()}
    return {"array": named, "integers": _hash(data)}


def packed(tree: Any) -> dict[str, Any]:
    """What the repository keeps of a tree: one hash of all that is exact, what was said, and the floats."""
    exact: list[str] = []
    said: list[str] = []
    floats: list[list[float]] = []

    def walk(path: str, node: Any) -> None:
        if isinstance(node, dict) and "floats" in node:
            exact.append(f"{path} {node['array']}")
            if node["floats"] not in floats:
                floats.append(node["floats"])
        elif isinstance(node, dict):
            if "body" in node:
                said.append(f"{node['kind']} {node['body']}")
            for name, each in node.items():
                walk(f"{path}/{name}", each)
        elif isinstance(node, list):
            for number, each in enumerate(node):
                walk(f"{path}/{number}", each)
        else:
            exact.append(f"{path} {json.dumps(node)}")

    walk("", tree)
    rounded = [float(f"{each:.8g}") for row in floats for each in row]
    found = {"exact": _hash("\n".join(exact).encode()), "floats": rounded}
    return {"said": said, **found} if said else found


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _projected(array: Any) -> list[float]:
    """A few numbers that no change of the array leaves alone: its size, and sums with random signs."""
    flat = array.astype(np.float64).reshape(-1)
    if flat.size <= FEW:
        return flat.tolist()
    signs = np.random.default_rng(flat.size).integers(0, 2, (3, flat.size)) * 2.0 - 1
    return [*(float((row * flat).sum()) for row in signs), float(np.sqrt((flat * flat).sum()))]


# --- turns ---


def turns(case: cases.Case) -> list[Any]:
    """Device and server take turns; some devices read a publication that is late."""
    task = driver.read(case.text)
    if driver.places_of(task):
        return _turns_of_peers(task, case)
    batch, masked = driver.batch_of(task), driver.is_masked(task)
    x, y = cases.samples(task.features.dimension, task.classes, case.turns * case.cohort * batch)
    start = driver.begin_server(task)
    state, publications = start.state, [start.published]
    found: list[Any] = [_server(task, start)]
    for turn in range(case.turns):
        late = 0 if masked else (0, 0, 1, 2, 0, 3)[turn % 6]
        read = publications[max(0, len(publications) - 1 - late)]
        said: list[Any] = []
        entry: dict[str, Any] = {"devices": []}
        for place in range(case.cohort if masked else 1):
            number = turn * case.cohort + place
            those = slice(number * batch, (number + 1) * batch)
            trip = turn if masked else turn // 2
            device = place if masked else turn % 2
            done = driver.device_turn(
                task, driver.begin_device(task), (x[those], y[those]), read, seed=7, device=device, trip=trip, place=-1
            )
            said += [message for _, message in done.said]
            entry["devices"].append(_device(done))
        heard = [driver.cohort_total(task, said, read)] if masked else said
        for message in heard:
            step = driver.server_turn(task, state, message, f"{turn:032x}")
            state = step.state
            publications.append(step.published or publications[-1])
            entry["heard"] = _message(message)
            entry["server"] = _server(task, step)
        found.append(entry)
    return found


def _turns_of_peers(task: Any, case: cases.Case) -> list[Any]:
    """Each place gives its batches, the server counts, and peers hear them."""
    batch, count = driver.batch_of(task), driver.places_of(task)
    x, _ = cases.samples(task.features.dimension, None, count * case.turns * batch)
    y = np.random.default_rng(1).integers(0, task.classes, len(x)).astype(np.int32)
    start = driver.begin_server(task)
    state, offered = start.state, start.published
    devices = [driver.begin_device(task, place) for place in range(count)]
    found: list[Any] = [_server(task, start)]
    for turn in range(case.turns):
        for place in range(0, count, max(1, count // 5)):
            number = turn * count + place
            those = slice(number * batch, (number + 1) * batch)
            done = driver.device_turn(
                task, devices[place], (x[those], y[those]), offered, seed=7, device=place, trip=turn, place=place
            )
            devices[place] = done.state
            entry: dict[str, Any] = {"devices": [_device(done)], "peers": {}}
            for to, message in done.said:
                step = driver.server_turn(task, state, message, f"{place:032x}")
                state, offered = step.state, step.published or offered
                for address in to:
                    other = driver.place_named(address)
                    devices[other] = driver.hear_peer(task, devices[other], message, other)
                    entry["peers"][address] = driver.plain_state(devices[other])
                entry["server"] = _server(task, step)
            found.append(entry)
    return found


def _device(done: driver.DeviceTurn) -> Any:
    said = [{"to": to, **_message(message)} for to, message in done.said]
    stops = [list(each) for each in done.stops]
    return {"state": driver.plain_state(done.state), "said": said, "passages": done.passages, "stops": stops}


def _message(message: Any) -> dict[str, Any]:
    under_masks = driver.summands(message)
    if under_masks:
        return {"kind": driver.kind_of(message), "under masks": dict(under_masks)}
    fields = driver.fields_of(message)
    return {"kind": driver.kind_of(message), "body": driver.encoded(message), "fields": fields}


def _server(task: Any, step: driver.ServerTurn) -> Any:
    return {
        "state": driver.plain_state(step.state),
        "snapshot": Bits(studies.snapshot(step.state)),
        "published": None if step.published is None else _message(step.published),
        "stops": [list(each) for each in step.stops],
        "model": driver.model(task, step.state),
        "tally": driver.tally(task, step.state),
    }


# --- engines ---


def engine(name: str, case: cases.Case) -> Any:
    task = driver.read(case.text)
    places = driver.places_of(task)
    if places:
        x, y, rows = cases.readings(places, case.each), None, None
    else:
        each = case.each or 2 * driver.batch_of(task)
        x, y = cases.samples(task.features.dimension, task.classes, case.devices * each)
        rows = np.arange(case.devices * each, dtype=np.int32).reshape(case.devices, each)
    return driver.ENGINES[name](task, driver.Crowd(x, y, rows, points=(1, 2), **case.crowd))


# --- the whole ---


def machine() -> str:
    """A hash of how this machine rounds: NumPy's exponentials and products here, as processors differ in both."""
    rng = np.random.default_rng(1)
    found: list[Any] = []
    for kind in (np.float32, np.float64):
        x, w = (rng.integers(-64, 65, shape).astype(kind) / 64 for shape in ((60, 64), (64, 10)))
        chances = np.exp(x @ w)
        found += [chances, x.T @ (chances / chances.sum(1, keepdims=True)), np.log1p(chances), (x * x).sum(1)]
    square = x.T @ x + np.eye(64)
    found += [np.linalg.solve(square, w), np.linalg.eigvalsh(square)]
    return _hash(b"".join(each.tobytes() for each in found))


def spec() -> dict[str, str]:
    """Every named entry of the test vectors of the wire, by its hash."""
    found: dict[str, str] = {}
    for path in sorted(SPEC.glob("*.json")):
        whole = json.loads(path.read_text("utf-8"))
        for name, entry in whole.items() if isinstance(whole, dict) else [("", whole)]:
            for number, each in enumerate(entry if isinstance(entry, list) else [entry]):
                found[f"{path.stem}/{name}/{number}"] = _hash(json.dumps(each, sort_keys=True).encode())
    return found


def build(part: str, name: str) -> Any:
    """One entry of the record, with every bit: `part` of the case `name`, or of all kinds."""
    if part == "kinds":
        return {"messages": driver.kinds, "vectors": spec}[name]()
    if part == "studies":
        return kept(studies.run(name))
    case = all_cases()[name.split(": ")[0]]
    if part == "facts":
        task = driver.read(case.text)
        return kept({**driver.facts(task), "terms": studies.terms(task)})
    return kept(turns(case) if part == "turns" else engine(name.split(": ")[1], case))


def summary(part: str, name: str) -> Any:
    """The same entry as the repository keeps it: each turn and each run packed, and the facts of our own cases too."""
    found = build(part, name)
    if part == "turns":
        return [packed(turn) for turn in found]
    if part == "facts" and not name.startswith("shipped "):
        return {"hash": found["hash"], **{section: packed(each)["exact"] for section, each in found.items()}}
    return packed(found) if part in ("engines", "studies") else found


def names(part: str, more: bool = False) -> list[str]:
    """The entries of a part; with `more`, also those for which XLA compiles, which only `compare.py` asks for."""
    if part == "kinds":
        return ["messages", "vectors"]
    if part == "studies":
        return [name for name in studies.names() if more or not studies.compiles(name)]
    every = all_cases()
    if part == "engines":
        chosen = {name: case.engines + case.more if more else case.engines for name, case in every.items()}
        return [f"{name}: {engine}" for name, engines in chosen.items() for engine in engines]
    return list(every)


def main() -> None:
    if sys.argv[1:2] == ["--exact"]:
        whole = {part: {name: build(part, name) for name in names(part, more=True)} for part in PARTS}
        Path(sys.argv[2]).write_text(json.dumps(whole), "utf-8")
        return
    (HERE / "machine.json").write_text(json.dumps({"rounds like": machine()}) + "\n", "utf-8")
    for part in PARTS:
        lines = [f"{json.dumps(name)}: {json.dumps(summary(part, name))}" for name in names(part)]
        (HERE / f"{part}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
