"""A rehearsal: a plug-in's device and server take their first turns before anybody takes part, on made-up samples.

It finds what would otherwise end the first check-ins of every device: a Private value in a message, a row that is not
in the table, a shape that the server does not expect, a handler that raises or changes its state in place. It replaces
single samples, and finds rows and public fields that move further than the table says. It proves nothing: other
samples may do what these did not.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from crowdml.arrays import Array, Samples, finite_or_zero
from crowdml.channels import combining, stacked
from crowdml.errors import ProtocolError
from crowdml.messages import SERVER, decode, encode, summed
from crowdml.plugins import blaming
from crowdml.privacy.door import OwnDoor
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.noise import Silence, SystemSource
from crowdml.privacy.private import Masked, Private, Release, Rows, Unseen
from crowdml.privacy.sensitivity import L1
from crowdml.protocol import Gathered, Protocol, Woken, place_of
from crowdml.task import Task
from crowdml.turn import Outcome, check_in, first_device_turn, first_turn, letter_turn, server_turn

__all__ = ["rehearse"]

LARGEST = 10_000_000
"""Numbers in a batch, in what its samples contribute, or in a round: more would take seconds, and are left out."""
CHECK_INS = 2
"""The first one meets what the server starts with, the second one what it has learnt."""
ME = "rehearsal"


def rehearse(protocol: Protocol, task: Task) -> None:
    """Refuse a plug-in whose first check-ins would fail, or let out more than they pay for, with a sentence why."""
    if protocol.batch(task) * task.features.dimension > LARGEST:
        return
    what = f"protocol.kind = {protocol.name!r} failed in a rehearsal with made-up samples"
    with blaming(what, "No device takes part before this is mended.", kept=()):
        state, offered = _play(protocol, task)
        size = _use(protocol, task, state)
        if task.privacy.mechanism != "none" and protocol.batch(task) * size <= LARGEST:
            _replace_samples(protocol, task, offered)


# --- turns ---


def _play(protocol: Protocol, task: Task) -> tuple[Any, Any]:
    """A few check-ins, as devices and the server have them: the server's state, and what it offers, at the end."""
    first = first_turn(protocol, task)
    if first.published is None:
        raise ProtocolError("the server publishes nothing at its start, so no device can check out")
    state, offered = first.state, _travelled(first.published)
    for wake in first.wakes:
        state, offered = _serve(protocol, task, state, Woken(wake.tag), offered)
    for trip in range(CHECK_INS):
        turn = _check_in(protocol, task, _samples(task, protocol.batch(task), trip), offered, trip)
        for event in _heard(protocol, task, turn, offered):
            state, offered = _serve(protocol, task, state, event, offered)
    return state, offered


def _check_in(protocol: Protocol, task: Task, batch: Samples, offered: Any, trip: int = 0) -> Outcome:
    place = 0 if task.places else -1
    return check_in(protocol, task, batch, offered, noise=SystemSource(), me=ME, trip=trip, place=place)


def _heard(protocol: Protocol, task: Task, turn: Outcome, offered: Any) -> Iterator[Any]:
    """What the server hears of a check-in, on the task's channel; what goes to peers, a device hears, too."""
    gathering = protocol.gathers(task)
    for to, message in turn.said:
        heard = _travelled(_of_cohort(protocol, task, message, offered))
        _check_fields(protocol, task, heard)
        for place in [each for each in map(place_of, to) if each >= 0]:
            peer = first_device_turn(protocol, task, me=ME, place=place)
            letter_turn(protocol, task, peer, heard, me=ME, sender=ME, place=place)
        if gathering is None:
            yield heard
        else:
            count = min(
                gathering.size,
                max(8 if combining(task) is None else gathering.minimum, LARGEST // max(1, len(encode(heard)) // 4)),
            )
            yield Gathered(int(offered.version), stacked([heard] * count))


def _of_cohort(protocol: Protocol, task: Task, message: Any, offered: Any) -> Any:
    """The message, or under masks the total of a cohort in which all devices say the same."""
    if task.masking is None or protocol.masked is None:
        return message
    says, hears = protocol.masked
    if type(message) is not says:
        raise ProtocolError(f"a device says {message.kind} under masks, and its contribution leaves as {says.kind}")
    return summed(hears.kind, [message] * task.masking.minimum, offered.version)


def _check_fields(protocol: Protocol, task: Task, heard: Any) -> None:
    if task.privacy.mechanism == "none":  # no server hosts such a task, and nothing bounds what it would hear
        return
    expected = protocol.expected(task)
    if heard.kind not in expected:
        raise ProtocolError(f"a device says {heard.kind}, and the server expects {', '.join(expected)}")
    for name, field in expected[heard.kind].items():
        value = getattr(heard, name)
        shape = np.shape(value.value if isinstance(value, Release) else value)
        if shape != field.shape:
            raise ProtocolError(f"a device says {name} of shape {shape}, and the server expects {field.shape}")


def _serve(protocol: Protocol, task: Task, state: Any, event: Any, offered: Any) -> tuple[Any, Any]:
    """The server's turn, twice: a handler changes nothing that it is given, and the same arguments give the same."""
    before, turns = _kept(state), [_server_turn(protocol, task, state, event) for _ in range(2)]
    if _kept(state) != before:
        raise ProtocolError("the server's handler changes its state in place: it has to return a new one")
    after, again = (_kept(each.state) for each in turns)
    if after != again and not protocol.server_mechanisms(task):
        raise ProtocolError("the server's handler gives another state for the same arguments: no clock, no randomness")
    turn = turns[0]
    _compare_shapes("the server's state", state, turn.state)
    if turn.published is not None:
        _compare_shapes("what the server publishes", offered, _travelled(turn.published))
    if isinstance(event, Gathered) and (turn.published is None or int(turn.published.version) <= event.round):
        raise ProtocolError(f"the server closes round {event.round} and publishes no later version")
    state, offered = turn.state, offered if turn.published is None else _travelled(turn.published)
    for wake in () if isinstance(event, Woken) else turn.wakes:
        state, offered = _serve(protocol, task, state, Woken(wake.tag), offered)
    return state, offered


def _server_turn(protocol: Protocol, task: Task, state: Any, event: Any) -> Outcome:
    table = protocol.server_mechanisms(task) if isinstance(event, (Gathered, Woken)) else {}
    if not table:
        return server_turn(protocol, task, state, event, sender=ME)
    rows = max(row.covers.stop for row in table.values())
    own = Unseen(Private(_samples(task, rows, CHECK_INS), Rows(0, rows)))
    door = OwnDoor(table, SystemSource(), public=all(row.public for row in table.values()))
    return server_turn(protocol, task, state, event, sender=SERVER, door=door, rows=own)


def _travelled(message: Any) -> Any:
    """The message as it is heard at the other end. Its arrays cannot be changed."""
    if not hasattr(message, "kind"):
        raise ProtocolError(f"a {type(message).__name__} cannot travel: declare it with @message(kind)")
    return decode(message.kind, encode(message))


def _kept(state: Any) -> bytes:
    """The state as the server's snapshots keep it. From now on its arrays cannot be changed."""
    if not dataclasses.is_dataclass(state) or isinstance(state, type):
        raise ProtocolError(f"the server's state is a {type(state).__name__}: it is a dataclass of arrays (`struct`)")
    for field in dataclasses.fields(state):
        value = getattr(state, field.name)
        if value is not None and np.asarray(value).dtype.kind not in "biuf":
            raise ProtocolError(f"{type(state).__name__}.{field.name} is a {type(value).__name__}, and no array")
        if isinstance(value, np.ndarray):
            value.setflags(write=False)
    return encode(state)


def _compare_shapes(what: str, before: Any, after: Any) -> None:
    if type(before) is not type(after):
        raise ProtocolError(f"{what} is a {type(after).__name__}, and was a {type(before).__name__}")
    for field in dataclasses.fields(before):
        old, new = (np.asarray(getattr(each, field.name)) for each in (before, after))
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ProtocolError(
                f"{what} has a {field.name} of {new.dtype} {new.shape} after a turn, and of {old.dtype} {old.shape} "
                "before: shapes and types never change"
            )


def _use(protocol: Protocol, task: Task, state: Any) -> int:
    """What is asked of a protocol beside its turns: its model, what that predicts, how it goes. The model's size."""
    weights = np.asarray(protocol.model(task, state))
    protocol.progress(task, state)
    protocol.remarks(task)
    if weights.dtype.kind not in "iuf":
        raise ProtocolError(f"`model` gives an array of {weights.dtype}, and weights are numbers")
    counts = task.model["kind"] == "histogram"  # they predict nothing
    shape = (3,) if counts else np.shape(protocol.predict(task, weights, _samples(task, 3, CHECK_INS).x))
    if shape != (3,):
        raise ProtocolError(f"`predict` gives the shape {shape} for 3 samples: one answer for each")
    return weights.size


# --- one sample replaced ---


class _Watched:
    """A row that lets out zeros, and notes what it was given: a public value may depend on releases, which stay."""

    def __init__(self, row: Mechanism, seen: list[tuple[Array, Array]]) -> None:
        self._row, self._seen = row, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._row, name)

    def draw_at(self, trip: Any, contributions: Array, noise: Any) -> Array:
        steps = self._row.draw_at(trip, contributions, Silence())
        self._seen.append((np.array(contributions), np.asarray(steps)))
        return steps * 0


def _replace_samples(protocol: Protocol, task: Task, offered: Any) -> None:
    """Refuse rows and public fields that move further than the table says when one sample of the batch is replaced."""
    table = protocol.mechanisms(task)

    def given(batch: Samples) -> tuple[Outcome, dict[str, list[tuple[Array, Array]]]]:
        seen: dict[str, list[tuple[Array, Array]]] = {name: [] for name in table}
        rows: Any = {name: _Watched(row, seen[name]) for name, row in table.items()}
        watched = dataclasses.replace(protocol, mechanisms=lambda task: rows)
        return _check_in(watched, task, batch, offered), seen

    batch = _samples(task, protocol.batch(task), 0)
    before, rows = given(batch)
    for neighbour in _neighbours(task, batch):
        after, moved = given(neighbour)
        _compare_public(before, after)
        for name, row in table.items():
            for old, new in zip(rows[name], moved[name], strict=True):
                _compare_row(name, row, old, new)


def _compare_public(before: Outcome, after: Outcome) -> None:
    told = [[(to, type(message)) for to, message in each.said] for each in (before, after)]
    if before.wakes != after.wakes or told[0] != told[1]:
        raise ProtocolError("one sample was replaced, and the device says something else, to others, or later")
    for (_, old), (_, new) in zip(before.said, after.said, strict=True):
        for field in dataclasses.fields(old):
            pair = getattr(old, field.name), getattr(new, field.name)
            if not isinstance(pair[0], (Release, Masked)) and not np.array_equal(*pair):
                raise ProtocolError(
                    f"one sample was replaced, and the public field {field.name!r} of {old.kind} changed: it would "
                    "leave without noise. Let it out by a row of `mechanisms`"
                )


def _compare_row(name: str, row: Mechanism, old: tuple[Array, Array], new: tuple[Array, Array]) -> None:
    contributions = [finite_or_zero(np.asarray(each[0], np.float32)).reshape(len(each[0]), -1) for each in (old, new)]
    far = np.abs(contributions[0] - contributions[1]).max(axis=1, initial=0)
    others = np.sort(far)[:-1]  # one sample may move its own contribution
    if not row.whole and (others > 1e-5 * max(1e-9, *(np.abs(each).max(initial=0) for each in contributions))).any():
        raise ProtocolError(
            f"one sample was replaced, and the contributions of {np.count_nonzero(far)} samples to row {name!r} moved, "
            f"others by up to {others.max():.3g}: row i of what `map` gives depends on sample i alone"
        )
    steps = (old[1].astype(float) - new[1].astype(float)).reshape(-1)
    moved, bound = np.linalg.norm(steps, 1 if isinstance(row.sensitivity, L1) else 2), float(row.sensitivity.bound)
    if row.law is not None and moved > bound * (1 + 1e-9):
        raise ProtocolError(
            f"one sample was replaced, and row {name!r} moved by {moved:,.0f} grid steps: its noise hides {bound:,.0f}"
        )


# --- samples ---


def _samples(task: Task, count: int, number: int) -> Samples:
    """Made-up samples in the task's ball, the same ones whenever this task is rehearsed. They cannot be changed."""
    width = task.features.dimension + 1
    data = hashlib.shake_256(task.hash + bytes([number])).digest(2 * count * width)
    drawn = np.frombuffer(data, "<u2").reshape(count, width) / 2**16
    x = 2 * drawn[:, 1:] - 1
    sizes = np.linalg.norm(x, 1 if task.features.norm.kind == "l1" else 2, axis=1, keepdims=True)
    x = x / np.maximum(1, sizes) * float(task.features.norm.bound)
    labels = drawn[:, 0] * float(task.labels.bound) if task.classes is None else np.int32(drawn[:, 0] * task.classes)
    return _fixed(x.astype(np.float32), labels.astype(np.float32 if task.classes is None else np.int32))


def _fixed(*arrays: Array) -> Samples:
    for each in arrays:
        each.setflags(write=False)
    return Samples(*arrays)


def _neighbours(task: Task, batch: Samples) -> Iterator[Samples]:
    """The batch with one sample replaced: the first one by another, the largest one by zeros."""
    other = _samples(task, 2, CHECK_INS + 1)
    for place, x, y in ((0, other.x[0], other.y[0]), (np.abs(batch.x).max(1).argmax(), 0, other.y[1])):
        changed = batch.x.copy(), batch.y.copy()
        changed[0][place], changed[1][place] = x, y
        yield _fixed(*changed)
