"""A plug-in for the tests: gathered rounds whose server takes the median of the uploads, coordinate by coordinate.

With `wake` it asks to be woken after each close and counts how often; with `peek` it lets out through the server's own
door how many of the operator's rows have the first label.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from crowdml.arrays import Array, Integers, struct
from crowdml.channels import NUMBER, Channel, Gathering, contribution, fields_heard, let_out
from crowdml.messages import SERVER, Public, message
from crowdml.privacy.mechanisms import CountLaplace
from crowdml.privacy.private import Release, Rows
from crowdml.privacy.rows import pin_grid, sum_row
from crowdml.privacy.sensitivity import L1
from crowdml.protocol import (
    Gathered,
    Protocol,
    Publish,
    Role,
    Send,
    Sensed,
    Step,
    Tally,
    Wake,
    Woken,
    check_out,
    stop_after,
    wait,
)
from crowdml.settings import read_kind


@dataclass(frozen=True)
class Settings:
    size: int
    minimum: int = 1
    seconds: Fraction = Fraction(0)
    wake: Fraction = Fraction(0)
    peek: int = 0
    "How many rows the operator has; 0: the server looks at none."
    batch: int = 1
    kind: str = "test_median"


def read(task):
    return read_kind(Settings, task.protocol, "protocol")


def shape(task):
    return task.features.dimension, task.classes


def mechanisms(task):
    bound, covers = float(task.features.norm.bound), Rows(0, read(task).batch)
    return {"sums": sum_row(task, "sums", bound=bound, shape=shape(task), covers=covers, promise="sums of each label")}


def server_mechanisms(task):
    rows = read(task).peek
    return {"first": CountLaplace(L1(Fraction(1)), Fraction(1), Rows(0, rows), "how many are first")} if rows else {}


@message("test_median/model/1")
class Model:
    weights: Public[Array]
    seen: Public[Integers]
    version: Public[Integers]


@contribution("test_median/sums/1", masked="test_median/masked/1", total="test_median/total/1")
class Sums:
    sums: Release[Integers]
    version: Public[Integers]


def contribute(task, waiting, model, ctx):
    if waiting is None:
        return Step(None)
    labels = np.arange(task.classes)
    sums = waiting.map(lambda batch: batch.x[:, :, None] * (batch.y[:, None, None] == labels))
    return Step(None, (Send(SERVER, let_out(Sums, task, ctx, {"sums": sums}, version=model.version)),))


@struct
class State:
    weights: Array
    seen: Integers
    woken: Integers
    version: Integers


def start(task, ctx):
    state = State(np.zeros(shape(task), np.float32), np.int64(0), np.int32(0), np.int32(0))
    return Step(state, (Publish(Model(state.weights, state.seen, state.version)),))


def combine(task, state, event, ctx):
    grid, flat = mechanisms(task)["sums"].grid, np.zeros(state.weights.size, np.float64)
    for where, part in event.uploads.columns("sums", 3):
        flat[where] = np.median(grid.decode(part) / event.uploads.devices[:, None], axis=0)
    seen = state.seen
    if read(task).peek:
        first = ctx.release("first", ctx.rows.map(lambda rows: (rows.y == 0).astype(np.int32)[:, None]))
        seen = np.int64(seen + np.asarray(first.value).sum())
    weights = (state.weights + flat.reshape(state.weights.shape)).astype(np.float32)
    after = State(weights, seen, state.woken, np.int32(state.version + 1))
    wakes = (Wake(float(read(task).wake), "count"),) if read(task).wake else ()
    stops = stop_after(task.stop.steps, after.version, "round", "been closed")
    return Step(after, (Publish(Model(weights, seen, after.version)), *wakes, *stops))


def count(task, state, event, ctx):
    assert event.tag == "count"
    return Step(State(state.weights, state.seen, np.int32(state.woken + 1), state.version))


def gathering(task):
    found = read(task)
    return Gathering(found.size, found.minimum, float(found.seconds) or None)


def expected(task):
    return fields_heard(Sums, task, mechanisms(task), {"sums": shape(task)}, version=NUMBER)


protocol = Protocol(
    "test_median",
    Role(wait, {Sensed: check_out, Model: contribute}),
    Role(start, {Gathered: combine, Woken: count}),
    mechanisms,
    check=read,
    batch=lambda task: read(task).batch,
    model=lambda task, state: state.weights,
    settle=lambda task: pin_grid(task, mechanisms(task)["sums"].grid),
    expected=expected,
    progress=lambda task, state: Tally(int(state.version)),
    contribution=Sums,
    channel=lambda task: Channel.GATHERED,
    gathering=gathering,
    server_mechanisms=server_mechanisms,
    settings=Settings,
)
