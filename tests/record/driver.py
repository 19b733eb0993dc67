"""The adapter between the record and the code: all that the record asks of `crowdml`, and the only file that names it.

The record itself never changes when code moves. Whoever moves an API mends the function here that calls it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

import crowdml
from crowdml import turn as turns
from crowdml.arrays import Samples
from crowdml.datasets.populations import Population
from crowdml.messages import KINDS, PUBLIC, encode, masked_steps, total
from crowdml.price import Price
from crowdml.privacy.private import RECEIVED, Masked, Private, Release
from crowdml.privacy.seeded import SeededSource, stream
from crowdml.protocol import Context, place_of
from crowdml.protocols import PROTOCOLS, find, settled
from crowdml.secagg import messages as secagg
from crowdml.sim import cities, compiled, events
from crowdml.sim.layout import Holding, lay_out, meet
from crowdml.sim.world import Delay, World
from crowdml.task import Task, parse
from crowdml.turn import check_in

Plain = Any
"""Numbers, texts, arrays, and mappings and lists of them: what the record can keep."""

TASKS = Path(crowdml.__file__).parent / "tasks"


# --- tasks ---


def read(text: str) -> Task:
    return parse(text)


def shipped() -> dict[str, str]:
    """The text of every task that is shipped, by name."""
    return {path.stem: path.read_text("utf-8") for path in sorted(TASKS.glob("*.toml"))}


def batch_of(task: Task) -> int:
    return find(task).batch(task)


def is_masked(task: Task) -> bool:
    return task.masking is not None


def places_of(task: Task) -> int:
    """How many places a task of peers lists; 0 where devices write to the server alone."""
    chosen = find(task).peers
    return len(task.places) if chosen is not None and chosen(task) else 0


def facts(task: Task) -> dict[str, Plain]:
    """What a task is and costs, without a handler that runs."""
    protocol = find(task)
    published = settled(task)
    return {
        "hash": task.hash.hex(),
        "settled": published.canonical,
        "settled hash": published.hash.hex(),
        "batch": protocol.batch(task),
        "price": price(task),
        "expected": expected(task),
        "mechanisms": {name: mechanism(_as_it_was(row, task)) for name, row in protocol.mechanisms(task).items()},
        "peers": [] if protocol.peers is None else [list(each) for each in protocol.peers(task)],
        "keeps": protocol.keeps(task),
    }


def price(task: Task) -> dict[str, Plain]:
    """Losses as exact text, and what they are in epsilon for a few numbers of check-ins."""
    priced = Price.of(find(task), task)
    times = sorted({1, 2, 7, task.privacy.uses})
    return {
        "rows": {
            row.name: [str(each) for each in (row.loss, row.device_loss, row.alone, row.device_alone)]
            for row in priced.rows
        },
        "sample": {str(uses): _total(priced.sample(uses)) for uses in times},
        "device": _total(priced.device()),
        "delta": priced.delta.hex(),
        "sample epsilon": {str(uses): priced.sample_epsilon(uses).hex() for uses in times},
        "device epsilon": {str(count): priced.device_epsilon(count).hex() for count in times},
        "sample epsilon alone": {str(uses): priced.sample_epsilon(uses, alone=True).hex() for uses in times},
        "device epsilon alone": {str(count): priced.device_epsilon(count, alone=True).hex() for count in times},
        "affordable": priced.affordable() if task.privacy.mechanism != "none" else None,
    }


def _total(total: Any) -> list[str]:
    return [f"{name} {_text(getattr(total, name))}" for name in ("pure", "squares", "zcdp", "orders", "values")] + [
        f"unbounded {total.unbounded}"
    ]


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def expected(task: Task) -> Plain:
    """For each kind that a server hears, the type, shape, least and most of each field; or why it hears none."""
    try:
        found = find(task).expected(task)
    except crowdml.errors.TaskError as error:
        return f"refused: {error}"
    return {
        kind: {name: [field.dtype, list(field.shape), field.low, field.high] for name, field in sorted(fields.items())}
        for kind, fields in found.items()
    }


def _as_it_was(row: Any, task: Task) -> Any:
    """Without noise admm's update is one contribution now; it was one a sample, all but the first of them zero."""
    odd = task.protocol["kind"] == "admm" and row.law is None
    return dataclasses.replace(row, whole=False) if odd else row


CONSTANTS = (
    "clip", "epsilon", "rho", "scale", "sigma", "variance", "honest", "length", "stability", "device_stability",
    "reach", "levels", "of", "classes", "whole", "positive", "samples",
)  # fmt: skip


def mechanism(row: Any) -> dict[str, Plain]:
    """The constants of a row: those that all have, those of its own, and of a schedule its first three check-ins."""
    sensitivity = row.sensitivity
    found = {
        "kind": row.kind,
        "sensitivity": [type(sensitivity).__name__, str(sensitivity.bound), sensitivity.adjacency.name],
        "grid": str(row.grid.step),
        "loss": str(row.loss),
        "device loss": str(row.device_loss),
        "observer": row.observer.name,
        "covers": [row.covers.start, row.covers.stop],
        "promise": row.promise,
        "noise": None if row.law is None else _law(row.law),
    }
    inner = getattr(row, "row", row)
    for name in CONSTANTS:
        holder = row if name in ("levels", "of") else inner
        value = getattr(holder, "limit" if name == "reach" else name, None)
        if name == "whole" and not value and "whole" not in vars(type(inner)):
            continue  # rows that never ask
        if isinstance(value, (int, tuple)) or type(value).__name__ == "Fraction":
            found[name] = _text(value)
    if inner is not row:
        found["first check-ins"] = [mechanism(row.at(trip)) for trip in range(3)]
    return found


def _law(law: Any) -> list[str]:
    """The noise on an entry: its parameter, the square of its width in steps, the unit, the most, and whose shares."""
    return [law.parameter, str(law.squared), str(law.unit), str(law.most), str(law.honest)]


# --- turns ---


@dataclasses.dataclass
class DeviceTurn:
    """What a device did: its state, what it said to whom, what its door let out, and why it would stop."""

    state: Any
    said: list[tuple[list[str], Any]]
    passages: list[list[Any]]
    stops: list[tuple[str, bool]]


@dataclasses.dataclass
class ServerTurn:
    """What the server did: its state, what it published, and each reason to stop with whether it holds."""

    state: Any
    published: Any
    stops: list[tuple[str, bool]]


def begin_device(task: Task, place: int = -1) -> Any:
    return find(task).device.start(task, Context(me="record", place=np.int32(place))).state


def device_turn(
    task: Task, state: Any, batch: tuple[Any, Any], publication: Any, *, seed: int, device: int, trip: int, place: int
) -> DeviceTurn:
    """A batch is sensed, the publication is read, and messages are said; the noise is that of (seed, device, trip)."""
    turn = check_in(
        find(task), task, Samples(*batch), publication, state=state, noise=SeededSource(stream(seed, device, trip)),
        me=f"{device:032x}", trip=np.int32(trip), place=np.int32(place),
    )  # fmt: skip
    said = [(sorted(to), message) for to, message in turn.said]
    passages = [[each.row, each.part.start, each.part.stop, int(each.trip)] for each in turn.passages]
    stops = _stops(turn)
    assert len(said) + len(stops) == len(turn.effects)
    return DeviceTurn(turn.state, said, passages, stops)


def hear_peer(task: Task, state: Any, message: Any, place: int) -> Any:
    """A device hears what a peer said: its next state."""
    return turns.device_turn(find(task), task, state, message, noise=None, me="record", place=np.int32(place)).state


def place_named(address: str) -> int:
    return place_of(address)


def begin_server(task: Task) -> ServerTurn:
    return _server(turns.first_turn(find(task), task))


def server_turn(task: Task, state: Any, message: Any, sender: str) -> ServerTurn:
    return _server(turns.server_turn(find(task), task, state, message, sender=sender))


def _server(turn: Any) -> ServerTurn:
    stops = _stops(turn)
    assert len(turn.effects) == len(stops) + (turn.published is not None)
    return ServerTurn(turn.state, turn.published, stops)


def _stops(turn: Any) -> list[tuple[str, bool]]:
    return [(stop_text(stop), stop.when is None or bool(stop.when)) for stop in turn.stops]


def stop_text(stop: Any) -> str:
    """Why a task ends, in the operator's English."""
    return stop.rule.sentence


def cohort_total(task: Task, said: Sequence[Any], publication: Any) -> Any:
    """What the server hears of a cohort whose devices said this."""
    sums: dict[str, Any] = {}
    for message in said:
        for name, steps in masked_steps(message).items():
            sums[name] = sums.get(name, 0) + steps.astype(np.int64)
    masked = find(task).masked
    assert masked is not None
    hears: Any = masked[1]
    return total(hears.kind, sums, devices=np.int32(len(said)), version=publication.version)


def kind_of(message: Any) -> str:
    return message.kind


def encoded(message: Any) -> bytes:
    """The bytes of a message that travels by itself."""
    return encode(message)


def fields_of(message: Any) -> Plain:
    """What a message says, field by field."""
    found = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return {name: _bare(each.value if isinstance(each, Release) else each) for name, each in found.items()}


def _bare(value: Any) -> Plain:
    return None if value is None else np.asarray(value)


def summands(message: Any) -> Mapping[str, Any]:
    """What a message says under masks: integers by field."""
    return masked_steps(message)


def model(task: Task, state: Any) -> Any:
    return find(task).model(task, state)


def tally(task: Task, state: Any) -> Plain:
    """How a task goes by its noisy counts."""
    found = find(task).progress(task, state)
    if found is None:
        return None
    noisy = {
        name: None if each is None else [list(each.counts), each.samples, float(each.variance).hex()]
        for name, each in (("errors", found.errors), ("labels", found.labels))
    }
    return {"check-ins": found.check_ins, **noisy}


def plain_state(state: Any) -> Plain:
    """A role's state as a mapping of its fields; a batch that waits is only said to be there."""
    if state is None or isinstance(state, Private):
        return None if state is None else "a private batch"
    return {field.name: plain_state_of(getattr(state, field.name)) for field in dataclasses.fields(state)}


def plain_state_of(value: Any) -> Plain:
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, Private):
        return "a private batch"
    return plain_state(value) if dataclasses.is_dataclass(value) else np.asarray(value)


# --- engines ---


@dataclasses.dataclass(frozen=True)
class Crowd:
    """Who holds what, and how they meet: the input of an engine."""

    x: Any
    y: Any
    rows: Any  # [devices, n] int32
    seed: int = 3
    passes: int = 1
    delay: str = "0"
    """Of each leg of a trip, as `crowdml simulate --delay` reads it."""
    dropout: float = 0.0
    points: tuple[int, ...] = ()

    @property
    def holding(self) -> Holding:
        devices, each = self.rows.shape
        counts = np.full(devices, each, np.int32)
        return Holding(self.x, self.y, Population("iid", self.rows, counts, 0), self.passes)

    @property
    def world(self) -> World:
        devices, each = self.rows.shape
        delay = Delay.parse(self.delay)
        return World(devices, each * self.passes, request=delay, check_out=delay, check_in=delay)


def run_compiled(task: Task, crowd: Crowd) -> Plain:
    schedule = lay_out(crowd.world, seed=crowd.seed, batch=batch_of(task), capacity=_capacity(task))
    (run,) = compiled.run(task, crowd.holding, [schedule], [crowd.seed], points=crowd.points, keep_said=True)
    return _run(run)


def run_compiled_together(task: Task, crowd: Crowd) -> Plain:
    """Two trials in one `vmap`, as on an accelerator."""
    seeds = [crowd.seed, crowd.seed + 1]
    schedule = lay_out(crowd.world, seed=crowd.seed, batch=batch_of(task), capacity=_capacity(task))
    runs = compiled.run(task, crowd.holding, [schedule, schedule], seeds, points=crowd.points, together=True)
    return [_run(run) for run in runs]


def run_events(task: Task, crowd: Crowd, backend: Any = "numpy") -> Plain:
    run = events.run(
        task,
        crowd.holding,
        crowd.world,
        seed=crowd.seed,
        capacity=_capacity(task),
        points=crowd.points,
        keep_said=True,
        backend=backend,
    )
    passages = {
        str(device): [
            [list(serials), [[each.row, each.part.start, each.part.stop, int(each.trip)] for each in let_out]]
            for serials, let_out in all_of_it
        ]
        for device, all_of_it in run.passages.items()
    }
    return {**_run(run), "passages": passages}


def run_events_on_jax(task: Task, crowd: Crowd) -> Plain:
    return run_events(task, crowd, "jax")


def run_cohorts(task: Task, crowd: Crowd) -> Plain:
    laid = meet(task, crowd.holding, crowd.seed, dropout=crowd.dropout)
    (run,) = compiled.run(task, crowd.holding, [laid], [crowd.seed], points=crowd.points)
    return _run(run)


def run_uncompiled(task: Task, crowd: Crowd) -> Plain:
    laid = meet(task, crowd.holding, crowd.seed, dropout=crowd.dropout)
    return _run(events.run_rounds(task, crowd.holding, laid, seed=crowd.seed, points=crowd.points))


class InTurns(World):
    """Devices sense at the same moments, and so check in in their order."""

    def sensed(self, seed: int, device: Any, sample: Any) -> Any:
        there = np.asarray(sample) < self.samples
        return np.where(there, np.asarray(sample, np.float64) + 0 * np.asarray(device), np.inf)


def run_counting(task: Task, crowd: Crowd) -> Plain:
    if is_masked(task):
        laid = meet(task, crowd.holding, crowd.seed, dropout=crowd.dropout)
        run = events.run_rounds(task, crowd.holding, laid, seed=crowd.seed)
    else:
        run = events.run(task, crowd.holding, InTurns(*crowd.rows.shape), seed=crowd.seed)
    tally = find(task).progress(task, run.state)
    assert tally is not None
    noisy, told = tally.labels, run.schedule.heard
    assert noisy is not None
    rows = crowd.holding.rows(told.device[:, None], told.samples)
    return {
        "counts": list(noisy.counts),
        "samples": noisy.samples,
        "variance": float(noisy.variance),
        "true": np.bincount(crowd.y[rows].reshape(-1), minlength=task.classes or 0),
        "trips": np.bincount(run.schedule.device, minlength=crowd.holding.devices),
        "sums": int(run.state.version),
    }


def run_peers(task: Task, crowd: Crowd) -> Plain:
    """`crowd.x` are readings [places, n]; the last place leaves after its first batch."""
    city = cities.simulate(task, crowd.x, seed=crowd.seed, leaving={places_of(task) - 1: 1})
    return {
        "states": [plain_state(state) for state in city.states],
        "server": plain_state(city.server),
        "said": city.said,
        "heard": city.heard,
        "check-ins": city.check_ins,
        "kept": [[each.x, each.y, each.numbers] for each in city.kept],
        "voters": [None if each is None else plain_state(each) for each in city.voters],
    }


ENGINES = {
    "compiled": run_compiled,
    "compiled together": run_compiled_together,
    "events": run_events,
    "events on jax": run_events_on_jax,
    "cohorts": run_cohorts,
    "uncompiled": run_uncompiled,
    "counting": run_counting,
    "peers": run_peers,
}
"""Every engine by the name that it had when the record was made."""


def _capacity(task: Task) -> int:
    """Samples that wait on a simulated device."""
    return find(task).capacity(task)


def _run(run: Any) -> Plain:
    schedule = run.schedule
    return {
        "points": run.points,
        "weights": list(run.weights),
        "state": plain_state(run.state),
        "stopped": stopped_text(run.stopped),
        "said": dict(run.said),
        "schedule": {name: getattr(schedule, name) for name in ("device", "trip", "samples", "version", "time")},
        "dropped": schedule.dropped,
    }


def stopped_text(stopped: Any) -> str | None:
    """Why a run ended, in the operator's English."""
    return None if stopped is None else stopped.sentence


# --- wire kinds ---


def kinds() -> dict[str, Plain]:
    """Every kind of message: what each field holds, and the bytes of a made-up one."""
    for name in PROTOCOLS:
        assert PROTOCOLS[name].name == name  # imported, so that its messages are declared
    found: dict[str, Plain] = {kind: _kind(cls) for kind, cls in sorted(KINDS.items())}
    for kind, cls in sorted(secagg.KINDS.items()):
        fields = {field.name: dict(field.metadata) for field in dataclasses.fields(cls)}
        example = cls(**{name: _secagg_example(form) for name, form in fields.items()})
        found[kind] = {
            "fields": {name: _text(tuple(f"{k} {v}" for k, v in form.items())) for name, form in fields.items()},
            "example": secagg.encode(example).hex(),
        }
    return found


def _kind(cls: Any) -> Plain:
    fields: dict[str, str] = {}
    example: dict[str, Any] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        optional = type(None) in get_args(hint)
        inner = next(one for one in get_args(hint) if one is not type(None)) if optional else hint
        public = PUBLIC in get_args(inner)
        holds = "public" if public else {Release: "release", Masked: "masked"}[get_origin(inner)]
        fields[name] = f"{holds}{' or nothing' if optional else ''}"
        if public:
            example[name] = np.array([0.5, -2.0], np.float32) if name in ("weights", "moments") else np.int32(7)
        else:
            example[name] = Release(np.array([1, -2, 3], np.int32), RECEIVED)
    if "masked" in " ".join(fields.values()):
        return {"fields": fields, "example": None}  # has no bytes of its own
    nothing = {name: None if "nothing" in fields[name] else value for name, value in example.items()}
    return {"fields": fields, "example": encode(cls(**example)).hex(), "least": encode(cls(**nothing)).hex()}


def _secagg_example(form: Mapping[str, Any]) -> Any:
    if form["form"] == "binary":
        return bytes(range(form["exactly"] or 5))
    if form["form"] == "number":
        return 300
    if form["form"] == "text":
        return "text"
    return {"a" * 32: b"one"} if form["named"] else {1: b"one", 2: b"two"}
