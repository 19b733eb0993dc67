"""`crowdml bench secagg`: what masking costs a device and the server, beside bare masks and Flower's SecAgg+.

Everything is one thread, and the goals are held against its CPU time; the clock stands beside it.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.bench.peers import Peer, ask
from crowdml.bench.timing import Rate, bound, in_turns, plain_row, sheet
from crowdml.privacy.noise import SystemSource
from crowdml.secagg import device, masks, server
from crowdml.secagg.device import DeviceRound
from crowdml.secagg.masks import Binding
from crowdml.secagg.messages import encode, open_message
from crowdml.secagg.server import ServerRound
from crowdml.secagg.terms import RingField, Terms
from crowdml.wire.keys import Key

TASK = bytes(32)
ROUND = 1
PUBLICATION = bytes(32)
PEER = Peer("Flower", "flwr", "run_flower_secagg.py", seconds=300.0)
GOALS = {"device": 25.0, "server": 0.5, "server-dropout": 1.5, "device-1000": 40.0, "bytes": 1.1}


def measure(
    progress: Callable[[str], None],
    repeats: int = 5,
    length: int = 100_000,
    cohort: int = 100,
    large: int = 1000,
    with_peers: bool = True,
) -> dict[str, Any]:
    field = RingField("v", length, 32, bound=1000, slack=10_000)
    small_terms = Terms(TASK, (field,), cohort, cohort, survivors=cohort * 7 // 10, colluders=cohort // 20)
    large_terms = Terms(TASK, (field,), large, large, survivors=large * 4 // 5, colluders=large // 20)
    values = np.random.default_rng(0).integers(-1000, 1001, length)
    sparse = large_terms.plan(large)
    progress(f"masking: {cohort} and {large} devices")
    alone = np.zeros(length, "<u4")
    keys = [(bytes([index % 256, index // 256]) * 16, 1 - index % 2 * 2) for index in range(cohort)]
    work: dict[str, Callable[[], Any]] = {
        "device": _masking(small_terms, values, cohort - 1),
        "device-1000": _masking(large_terms, values, sparse.neighbours),
        "bare masks": lambda: masks.add_stream(alone, keys),
        "noise": lambda: SystemSource().skellam(Fraction(10_000), np.zeros(length, np.int32)),
    }
    timed = in_turns(work, dict.fromkeys(work, 1.0), repeats)
    rows = [
        _row(f"device: masks, cohort of {cohort}", timed["device"], 1e3, "ms"),
        _row(f"device: masks, cohort of {large}", timed["device-1000"], 1e3, "ms"),
        _row(f"limit: {cohort} streams, added", timed["bare masks"], 1e3, "ms"),
        _row("device: Skellam noise", timed["noise"], 1e3, "ms"),
    ]
    values_of = {"device": timed["device"], "device-1000": timed["device-1000"]}
    said: dict[str, int] = {}
    for key, dropout in (("server", 0), ("server-dropout", cohort * 3 // 10)):
        progress(f"a round of {cohort} devices, {dropout} of them missing")
        played = Round(small_terms, cohort, dropout, values)
        played.run()
        values_of[key] = Rate(1.0, *played.repeat_server(max(1, repeats // 2)))
        rows += [
            _row(f"server: {dropout} of {cohort} missing", values_of[key], 1.0, "s"),
            *(
                plain_row(f"{name} ({dropout} missing)", 1e3 * seconds, "ms")
                for name, seconds in played.seconds.items()
            ),
        ]
        said = said or {kind: max(map(len, messages.values())) for kind, messages in played.heard.items()}
    shares = said.pop("secagg/shares/1") + said.pop("secagg/reveal/1")
    rows += [
        plain_row("sent by a device, but shares", sum(said.values()), "bytes"),
        plain_row("sent by a device in shares", shares, "bytes"),
        plain_row("the vector", field.size, "bytes"),
    ]
    points = _points(progress, length)
    if with_peers:
        progress(PEER.name)
        rows += _peer(length, cohort)
    cpu = {key: sorted(rate.cpus)[len(rate.cpus) // 2] for key, rate in values_of.items()}
    return {
        "id": "bench/secagg",
        "work": f"a vector of {length:,} elements of 32 bits; complete graph of {cohort}, sparse graph of {large} "
        f"({sparse.neighbours} neighbours, threshold {sparse.threshold}); CPU time of one thread, median",
        "rows": rows,
        "points": points,
        "ratios": [
            bound("device", f"masking, cohort of {cohort}, CPU", 1e3 * cpu["device"], "ms", GOALS["device"]),
            bound("server", "server, nobody missing, CPU", cpu["server"], "s", GOALS["server"]),
            bound("server-dropout", "server, 30 % missing, CPU", cpu["server-dropout"], "s", GOALS["server-dropout"]),
            bound(
                "device-1000",
                f"masking, {large} devices, sparse, CPU",
                1e3 * cpu["device-1000"],
                "ms",
                GOALS["device-1000"],
            ),
            bound("bytes", "sent without shares / vector", sum(said.values()) / field.size, "ratio", GOALS["bytes"]),
        ],
    }


def _masking(terms: Terms, values: Any, neighbours: int) -> Callable[[], Any]:
    """What a device does after key agreement: derive a key for each neighbour, stretch, add."""
    salt = Binding(TASK, ROUND, bytes(32)).salt
    secrets = {f"{index:032x}": index.to_bytes(32, "big") for index in range(1, neighbours + 1)}
    me = f"{neighbours // 2:031x}f"  # about half of the pairs have either sign
    return lambda: device.mask_vectors(terms, {"v": values}, salt, me, bytes(32), secrets)


class Round:
    """One real round, every message as bytes; what the server hears from the masked vectors on can be heard again."""

    def __init__(self, terms: Terms, count: int, dropout: int, values: Any) -> None:
        self.terms, self.values = terms, values
        self.keys = {key.id: key for key in (Key.generate() for _ in range(count))}
        self.gone = set(sorted(self.keys)[:: max(1, count // max(dropout, 1))][:dropout])
        self.devices: dict[str, DeviceRound] = {}
        self.server = server.begin(ROUND)
        self.seconds: dict[str, float] = {}
        self.heard: dict[str, dict[str, bytes]] = {}
        self.before: ServerRound = self.server

    def run(self) -> None:
        count = len(self.keys)
        began = time.process_time()
        for one, key in self.keys.items():
            self.devices[one] = device.advertise(self.terms, ROUND, key, after=0)
        self._took("device: fresh keys", began, count)
        self._phase("secagg/advert/1", self.keys, "server: hear adverts")
        self._tell(lambda state, _, said: device.share(self.terms, state, said), "device: seal its shares")
        self._phase("secagg/shares/1", self.keys, "server: hear shares")
        self._tell(lambda state, _, said: device.hold(self.terms, state, said, PUBLICATION), "device: open shares")
        began = time.process_time()
        for one, state in self.devices.items():
            self.devices[one] = device.mask(self.terms, state, {"v": self.values})
        self._took("device: agree on keys, mask", began, count)
        self.before = self.server
        here = [one for one in self.keys if one not in self.gone]
        self._phase("secagg/masked/1", here, "server: fold")
        self._tell(lambda state, key, said: device.agree(self.terms, state, key, said), "device: sign survivors")
        self._phase("secagg/agreement/1", here, "server: hear signatures")
        self._tell(lambda state, _, said: device.reveal(self.terms, state, said), "device: verify, reveal")
        self._phase("secagg/reveal/1", here, "server: rebuild, unmask")
        found = server.sums(self.terms, self.server)["v"]
        if not (found == len(here) * self.values).all():
            raise AssertionError("The sum is wrong: what follows would be times of nothing.")

    def repeat_server(self, repeats: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Clock and CPU seconds of everything from the masked vectors to the sum."""
        walls: list[float] = []
        cpus: list[float] = []
        for _ in range(repeats):
            gc.collect()
            state = self.before
            wall, cpu = time.perf_counter(), time.process_time()
            for kind in ("secagg/masked/1", "secagg/agreement/1", "secagg/reveal/1"):
                for one, data in self.heard[kind].items():
                    state = server.hear(self.terms, state, one, open_message(kind, data))
                state = server.close(self.terms, state)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        return tuple(walls), tuple(cpus)

    def _phase(self, kind: str, ids: Iterable[str], name: str) -> None:
        self.heard[kind] = {one: self.devices[one].sent for one in ids}
        began = time.process_time()
        for one, data in self.heard[kind].items():
            self.server = server.hear(self.terms, self.server, one, open_message(kind, data))
        self.server = server.close(self.terms, self.server, PUBLICATION)
        self._took(name, began, 1)

    def _tell(self, step: Callable[[DeviceRound, Key, Any], DeviceRound], name: str) -> None:
        told: dict[str, bytes] = {}
        kind = ""
        for one in self.keys:
            message = server.tell(self.terms, self.server, one)
            if message is not None:
                kind, told[one] = message.kind, encode(message)
        began = time.process_time()
        for one, data in told.items():
            self.devices[one] = step(self.devices[one], self.keys[one], open_message(kind, data))
        self._took(name, began, len(told))

    def _took(self, name: str, began: float, count: int) -> None:
        self.seconds[name] = (time.process_time() - began) / count


def _points(progress: Callable[[str], None], length: int) -> list[dict[str, float]]:
    """CPU milliseconds of masking over the size of the cohort and over the length of the vector."""
    found: list[dict[str, float]] = []
    cohorts, lengths = (10, 30, 100, 300, 1000, 3000), tuple(length // by for by in (100, 10, 3, 1))
    for cohort, here in dict.fromkeys([*((cohort, length) for cohort in cohorts), *((100, here) for here in lengths)]):
        progress(f"masking {here:,} elements in a cohort of {cohort:,}")
        field = RingField("v", here, 32, bound=1000, slack=10_000)
        terms = Terms(TASK, (field,), cohort, cohort, survivors=cohort * 4 // 5, colluders=cohort // 20)
        around = terms.plan(cohort).neighbours
        work = _masking(terms, np.zeros(here, np.int64), around)
        rate = in_turns({"it": work}, {"it": 1.0}, 3)["it"]
        cpu = 1e3 * sorted(rate.cpus)[1]
        found.append({"cohort": cohort, "length": here, "neighbours": around, "device_ms": cpu})
    return found


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Milliseconds of masking over cohort size, and over length."""
    longest = max(point["length"] for point in result["points"])
    sides = (
        ("cohort", [point for point in result["points"] if point["length"] == longest], f"{longest:,} elements"),
        ("length", [point for point in result["points"] if point["cohort"] == 100], "cohort of 100"),
    )
    with sheet(path, ncols=2, figsize=(9, 3.6)) as axes:
        for axis, (name, chosen, title) in zip(axes, sides, strict=True):
            points = sorted(chosen, key=lambda point, name=name: point[name])
            axis.plot([point[name] for point in points], [point["device_ms"] for point in points], "o-")
            axis.set(xlabel=name, ylabel="masking, CPU ms", title=title, xscale="log")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)


def _peer(length: int, cohort: int) -> list[dict[str, Any]]:
    """Flower's own functions on the same work, in an interpreter that has them; a note where there is none."""
    name = f"{PEER.name}: masks, {cohort - 1} neighbours"
    with tempfile.TemporaryDirectory(prefix="crowdml-peers-") as folder:
        said = ask(PEER, (str(length), str(cohort)), Path(folder))
    if isinstance(said, str):
        return [plain_row(name, None, "ms") | {"note": said}]
    return [
        plain_row(name, said["device_ms"], "ms") | {"note": f"flwr {said['version']}"},
        plain_row(f"{PEER.name}: masks, 21 neighbours", said["device_21_ms"], "ms"),
        plain_row(f"{PEER.name}: server, nobody missing", said["server_s"], "s")
        | {"note": f"SecAgg+; {said['rebuilt']} of {cohort} seeds rebuilt, that time reckoned for each of the others"},
    ]


def _row(name: str, rate: Rate, scale: float, unit: str) -> dict[str, Any]:
    walls, cpus = sorted(rate.walls), sorted(rate.cpus)
    row = plain_row(name, scale * walls[len(walls) // 2], unit, scale * walls[0], scale * walls[-1])
    return row | {"cpu": scale * cpus[len(cpus) // 2]}
