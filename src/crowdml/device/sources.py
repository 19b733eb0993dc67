"""Where a device's samples come from. A source is read in order and never twice. No error shows a sample.

    shard:NAME          a data set of `crowdml data list`; its share is named by --shard I/N
    csv:PATH            a row a sample: features, then the label; '-' is stdin; a first line of names is skipped
    ndjson:PATH         a line a sample: {"x": [...], "y": label}; '-' is stdin
    python:MODULE:NAME  a function without arguments that yields (x, y)

Of a task with `features.kind = "windows"` a row is one reading, as a sensor gives it: a number a row of a CSV file, a
number or {"value": number} a line of NDJSON, a number from a function. A share of such a file is a column, and of a
data set a series. Samples are cut from the readings one after another: a window of w, and the bin of a later reading.
So the n-th sample begins at the n-th reading, and who goes on at sample n begins there, with nothing lost and nothing
given twice. A live stream begins its first window anew. A reading that cannot be read keeps its place, as no number.

A label is the name of a class of the task, or its index; for tasks with numbers, the number. Rows outside the ball of
the task's features are shrunk onto it. A row that cannot be read is kept as the zero sample of no label, which adds
nothing to what leaves, and is counted: to drop it would tell by the number of check-ins, and move every later batch.
A file or data set whose very first row has another width or label than the task is refused when it is opened.
"""

from __future__ import annotations

import asyncio
import csv
import importlib
import json
import math
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from crowdml.errors import DataError
from crowdml.features.norms import Norm, into_ball
from crowdml.records import record
from crowdml.task import Task
from crowdml.texts import one_line

__all__ = ["FileSource", "LiveSource", "Sample", "SampleSource", "Share", "deal_sources", "open_source", "parse_share"]

Kind = Literal["shard", "csv", "ndjson", "python"]
KINDS: tuple[str, ...] = ("shard:NAME", "csv:PATH", "ndjson:PATH", "python:MODULE:FUNCTION")
NOTHING_SENT = "Nothing was sent."
POLL = 0.05
"""Seconds between two looks of a reading thread at whether it shall stop."""


@record
class Sample:
    """x [d] float32 within the task's ball; y a class index or a number. It has no repr that shows them."""

    x: Any
    y: float

    def __repr__(self) -> str:
        return "Sample(hidden)"


@record
class Share:
    """Rows `index`, `index + of`, `index + 2 of`, ... of a file or data set."""

    index: int = 0
    of: int = 1


def parse_share(text: str) -> Share:
    """'3/100', counted from 0."""
    index, slash, of = text.partition("/")
    if slash and index.isdecimal() and of.isdecimal() and int(index) < int(of):
        return Share(int(index), int(of))
    raise DataError(f"--shard {text!r}: write I/N with I below N, such as 0/10 for the first of ten.")


class SampleSource:
    """What a runner reads. `name` is None where there is no place to come back to, as with a live sensor.

    A name ends with the share: 'csv:/rows.csv:0/1'. A device reads one share of what stands before it, for life.
    """

    name: str | None = None
    taken: int = 0
    """Rows read so far: each is a sample."""
    unread: int = 0
    """Rows that could not be read. For the owner alone: it depends on samples and never leaves."""
    why_ended: str = "The source has no more samples."
    waits: bool = False
    """Whether its rows stay where they are until they are read: then there is no need to read ahead."""

    @property
    def before(self) -> int:
        """Rows that come before the first sample's label. A place in a source is told in rows, labels and all: a task
        with shorter windows goes on after the last reading that was a label, or one of them would be in two batches."""
        return 0

    @property
    def latest(self) -> Any | None:
        """The window [w] of the newest readings, whose label nobody knows yet; None where samples are no windows."""
        return None

    async def skip(self, rows: int) -> None:
        """Go to where the last reader stopped."""

    async def read(self, most: int) -> list[Sample]:
        """Between 1 and `most` samples, as soon as there is one; none at the end."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of files and threads."""


class FileSource(SampleSource):
    """Rows that are there already: a file, or a share of a data set."""

    waits = True

    def __init__(self, name: str, rows: Iterable[tuple[Any, Any]], task: Task) -> None:
        self.name, self.taken, self.unread, self.rows, self._task = name, 0, 0, iter(rows), task

    @property
    def before(self) -> int:
        return self.rows.before if isinstance(self.rows, Series) else 0

    @property
    def latest(self) -> Any | None:
        return self.rows.latest if isinstance(self.rows, Series) else None

    async def skip(self, rows: int) -> None:
        self.taken += sum(1 for _ in islice(self.rows, max(0, rows - self.taken)))

    async def read(self, most: int) -> list[Sample]:
        rows = list(islice(self.rows, most))
        self.taken += len(rows)
        samples, unread = _samples(rows, self._task)
        self.unread += unread
        if not samples and self.unread:
            self.why_ended = f"The source has no more samples; {self.unread} of its rows could not be read."
        return samples


class DealtSource(SampleSource):
    """A share of samples that were read together: of one device of a fleet."""

    waits = True

    def __init__(self, name: str, samples: list[Sample]) -> None:
        self.name, self.taken, self._samples = name, 0, samples

    async def skip(self, rows: int) -> None:
        self.taken = min(len(self._samples), max(rows, self.taken))

    async def read(self, most: int) -> list[Sample]:
        samples = self._samples[self.taken : self.taken + most]
        self.taken += len(samples)
        return samples


class Series:
    """Readings, cut into samples one after another: (x [w], y), where y is the bin of the reading `horizon` later."""

    def __init__(self, readings: Iterable[Any], task: Task) -> None:
        from crowdml.features.series import Windower  # for tasks with windows alone

        features = task.features
        self._readings, self._task = iter(readings), task
        self._cut = Windower(features.dimension, features.horizon, [float(edge) for edge in task.labels.bins])
        self._newest: deque[float] = deque(maxlen=features.dimension)

    def __iter__(self) -> Series:
        return self

    def __next__(self) -> tuple[Any, Any]:
        for reading in self._readings:
            value = _reading(reading)
            self._newest.append(value)
            sample = self._cut.push(value)
            if sample is not None:
                return sample
        raise StopIteration

    @property
    def before(self) -> int:
        """Readings that come before the first label."""
        return self._task.features.dimension + self._task.features.horizon - 1

    @property
    def latest(self) -> Any | None:
        """The newest readings [w], in the task's ball like any window; None while there are fewer."""
        newest, norm = list(self._newest), self._task.features.norm
        if len(newest) < self._task.features.dimension:
            return None
        return into_ball(np.array(newest), cast(Norm, norm.kind), float(norm.bound))


class LiveSource(SampleSource):
    """Rows as they come, from a thread that may block: stdin, a sensor, a function. It ends with the process."""

    def __init__(self, rows: Callable[[], Iterable[tuple[Any, Any]]], task: Task, capacity: int) -> None:
        self.taken, self.unread, self._task = 0, 0, task
        self._rows, self._queue = rows, queue.Queue[Sample | None](capacity)
        self._series: Series | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Event | None = None
        self._closed = threading.Event()
        self._failure: BaseException | None = None

    async def read(self, most: int) -> list[Sample]:
        if self._arrived is None:
            self._loop, self._arrived = asyncio.get_running_loop(), asyncio.Event()
            threading.Thread(target=self._pump, name="source", daemon=True).start()
        samples: list[Sample] = []
        while not samples:
            self._arrived.clear()
            ended = self._drain(samples, most)
            if self._failure is not None and not samples:
                raise DataError(
                    f"The source failed: {type(self._failure).__name__}. See to it and join again."
                ) from None
            if ended:
                break
            if not samples:
                await self._arrived.wait()
        return samples

    def _drain(self, samples: list[Sample], most: int) -> bool:
        """Whether the end was met; it is left for the next reader."""
        while len(samples) < most:
            try:
                sample = self._queue.get_nowait()
            except queue.Empty:
                return False
            if sample is None:
                self._queue.put_nowait(None)
                return True
            samples.append(sample)
        return False

    @property
    def latest(self) -> Any | None:
        return None if self._series is None else self._series.latest

    def _cut(self, rows: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
        if self._task.features.kind != "windows":
            return rows
        self._series = Series(rows, self._task)
        return self._series

    def _pump(self) -> None:
        try:
            for x, y in self._cut(self._rows()):
                samples, unread = _samples([(x, y)], self._task)
                self.taken += 1
                self.unread += unread
                if not self._put(samples[0]):
                    return
        except Exception as error:  # a thread has nobody to raise to: `read` does
            self._failure = error
        self._put(None)

    def _put(self, sample: Sample | None) -> bool:
        """Wait for room; false when the source was closed."""
        while not self._closed.is_set():
            try:
                self._queue.put(sample, timeout=POLL)
            except queue.Full:
                continue
            loop, arrived = self._loop, self._arrived
            if loop is not None and arrived is not None and not loop.is_closed():
                loop.call_soon_threadsafe(arrived.set)
            return True
        return False

    def close(self) -> None:
        self._closed.set()


def open_source(spec: str, task: Task, share: Share | None = None, *, seed: int | None = None) -> SampleSource:
    """The source that `spec` names, for this task."""
    kind, _, rest = spec.partition(":")
    share, capacity = share or Share(), int(task.protocol.get("buffer") or 1024)
    if kind not in ("shard", "csv", "ndjson", "python") or not rest:
        raise DataError(f"--source {spec!r} is not known. Write one of {', '.join(KINDS)}.")
    if task.features.kind == "windows":
        return _open_series(spec, task, share, capacity)
    if kind == "shard":
        rows = _fitting(_shard(rest, task, share, seed), task, f"data set {rest!r}")
        return FileSource(f"shard:{rest}:{share.index}/{share.of}", rows, task)
    if kind == "python":
        return LiveSource(_function(rest), task, capacity)
    read = _csv_rows if kind == "csv" else _ndjson_rows
    if rest == "-":
        return LiveSource(lambda: read(sys.stdin), task, capacity)
    path = Path(rest)
    if not path.is_file():
        raise DataError(f"--source {spec}: there is no file {path}.")
    rows = _fitting(islice(read(_lines(path)), share.index, None, share.of), task, rest)
    return FileSource(f"{kind}:{path.resolve()}:{share.index}/{share.of}", rows, task)


def deal_sources(spec: str, task: Task, devices: int, *, seed: int | None = None) -> list[SampleSource]:
    """One source for each device of a fleet, read once: device i has rows i, i + devices, ... as with --shard.

    Of readings, device i has column i of the file, or series i of the data set.
    """
    kind, _, rest = spec.partition(":")
    if kind == "python" or rest == "-":
        raise DataError(f"--source {spec}: a fleet deals out a file or a data set, and this is a stream of one device.")
    if task.features.kind == "windows":
        table = _table(spec, devices)
        return [_share_of(table, Share(number, devices), task) for number in range(devices)]
    whole = open_source(spec, task, seed=seed)  # which looks at the first row
    assert isinstance(whole, FileSource)
    rows, name = list(whole.rows), str(whole.name).removesuffix("0/1")
    if len(rows) < devices:
        raise DataError(f"--source {spec} has {len(rows):,} rows, too few for {devices:,} devices.")
    samples, _ = _samples(rows, task)
    return [DealtSource(f"{name}{number}/{devices}", samples[number::devices]) for number in range(devices)]


# --- readings ---


def _open_series(spec: str, task: Task, share: Share, capacity: int) -> SampleSource:
    """The source of a task whose samples are cut from readings."""
    kind, _, rest = spec.partition(":")
    if kind == "python":
        return LiveSource(_function(rest), task, capacity)
    if rest == "-":
        read = _csv_readings if kind == "csv" else _ndjson_readings
        return LiveSource(lambda: _column(read(sys.stdin), Share()), task, capacity)
    return _share_of(_table(spec, share.of), share, task)


@record
class _Table:
    """Readings of several sensors, side by side or one after the other; and what a source of one is called."""

    name: str
    rows: Iterable[Any]
    """Of a file: what stands in each row, a list where that is more than one reading."""
    series: Any = None
    """Of a data set: the readings of each sensor."""


def _table(spec: str, columns: int) -> _Table:
    kind, _, rest = spec.partition(":")
    if kind == "shard":
        from crowdml.datasets.traffic import series

        found = series(rest)
        if columns > found.places:
            raise DataError(f"data set {rest!r} has {found.places} series, too few for {columns}. {NOTHING_SENT}")
        return _Table(spec, (), found.values[:, : found.learned])
    path = Path(rest)
    if not path.is_file():
        raise DataError(f"--source {spec}: there is no file {path}.")
    if kind == "ndjson" and columns > 1:
        raise DataError(f"--source {spec}: its lines hold one reading each, and no columns to share. {NOTHING_SENT}")
    rows = (_csv_readings if kind == "csv" else _ndjson_readings)(_lines(path))
    rows = _as_many(rows, rest, columns)
    return _Table(f"{kind}:{path.resolve()}", rows if columns == 1 else list(rows))


def _share_of(table: _Table, share: Share, task: Task) -> FileSource:
    readings = _column(table.rows, share) if table.series is None else table.series[share.index]
    return FileSource(f"{table.name}:{share.index}/{share.of}", Series(readings, task), task)


def _column(rows: Iterable[Any], share: Share) -> Iterator[Any]:
    return (row[share.index] if isinstance(row, list) and len(row) == share.of else row for row in rows)


def _csv_readings(lines: Iterable[str]) -> Iterator[Any]:
    """Rows. A blank line among them is a reading that is missing; at the end it is the end."""
    blank = 0
    for number, row in enumerate(csv.reader(lines)):
        if not any(field.strip() for field in row):
            blank += 1
            continue
        yield from (None for _ in range(blank))
        blank = 0
        if number > 0 or not all(_is_name(field) for field in row):
            yield row


def _is_name(field: str) -> bool:
    """Whether this heads a column. What stands for a missing reading does not: to skip it would move all others."""
    text = field.strip().lower()
    return bool(text) and not _is_number(text) and text not in ("na", "n/a", "null", "none", "missing", "-", "?")


def _ndjson_readings(lines: Iterable[str]) -> Iterator[Any]:
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        yield row.get("value") if isinstance(row, dict) else row


def _as_many(rows: Iterator[Any], name: str, columns: int) -> Iterator[Any]:
    """The same rows, unless the first has another number of columns: then all of them would pay for nothing.

    One that is only missing stays. An empty source is no error here.
    """
    first = list(islice(rows, 1))
    if first and isinstance(first[0], list) and len(first[0]) != columns:
        wanted = "one a row; --shard I/N reads one of N columns" if columns == 1 else f"{columns} columns"
        raise DataError(
            f"{name}: its first row has {_many(len(first[0]))}, and the task wants {wanted}. {NOTHING_SENT}"
        )
    return chain(first, rows)


def _reading(value: Any) -> float:
    """A number; NaN where it cannot be read. It keeps its place."""
    if value is None or isinstance(value, bool):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


# --- rows ---


def _shard(name: str, task: Task, share: Share, seed: int | None) -> Iterator[tuple[Any, Any]]:
    from crowdml.datasets import load

    data = load(name, normalise=cast(Norm, task.features.norm.kind), seed=seed)
    if data.features != task.features.dimension:
        raise DataError(
            f"data set {name!r} has {data.features} features, and task {task.name!r} takes {task.features.dimension}. "
            f"{NOTHING_SENT}"
        )
    if task.classes is not None and len(data.classes) > task.classes:
        raise DataError(
            f"data set {name!r} has {len(data.classes)} classes, and task {task.name!r} takes {task.classes}. "
            f"{NOTHING_SENT}"
        )
    return zip(data.x_train[share.index :: share.of], data.y_train[share.index :: share.of].tolist(), strict=True)


def _fitting(rows: Iterable[tuple[Any, Any]], task: Task, name: str) -> Iterator[tuple[Any, Any]]:
    """The same rows, unless the first has another width or label than the task: then all of them would pay for nothing.

    A first row that lacks a value is one bad row like any other, and stays. An empty source is no error here.
    """
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        return rows
    (x, y), dimension = first, task.features.dimension
    if not isinstance(x, list | tuple | np.ndarray):
        raise DataError(
            f'{name}: its first row is no object like {{"x": [...], "y": ...}} with {_many(dimension)} and a label. '
            f"{NOTHING_SENT}"
        )
    if len(x) != dimension:
        raise DataError(
            f"{name}: its first row has {_many(len(x))}, and the task wants {dimension} and a label. {NOTHING_SENT}"
        )
    if _label(y, task) is None:
        wanted = "a number, as the task wants" if task.classes is None else f"among the task's ({_names(task)})"
        raise DataError(f"{name}: the label of its first row is not {wanted}. {NOTHING_SENT}")
    return chain((first,), rows)


def _many(numbers: int) -> str:
    return f"{numbers} number{'' if numbers == 1 else 's'}"


def _names(task: Task) -> str:
    """The classes, at most ten of them."""
    names = [one_line(name) for name in task.labels.classes] or [str(index) for index in range(task.classes or 0)]
    return ", ".join(names if len(names) <= 10 else [*names[:8], "...", names[-1]])


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read to its end: {type(error).__name__}.") from None


def _csv_rows(lines: Iterable[str]) -> Iterator[tuple[Any, Any]]:
    for number, row in enumerate(csv.reader(lines)):
        if not row or (number == 0 and _is_heading(row)):
            continue
        yield row[:-1], row[-1]


def _is_heading(row: list[str]) -> bool:
    """Names of columns: all different, and no number among them. A sample with a missing value is none."""
    return len({*row}) == len(row) and all(field.strip() and not _is_number(field) for field in row)


def _ndjson_rows(lines: Iterable[str]) -> Iterator[tuple[Any, Any]]:
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        yield (row.get("x"), row.get("y")) if isinstance(row, dict) else (None, None)


def _function(rest: str) -> Callable[[], Iterable[tuple[Any, Any]]]:
    module, colon, name = rest.rpartition(":")
    if not colon:
        raise DataError(f"--source python:{rest}: write python:MODULE:FUNCTION.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it: the owner's own file beside the command
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"--source python:{rest}: {error}.") from error
    return found


def _samples(rows: list[tuple[Any, Any]], task: Task) -> tuple[list[Sample], int]:
    """A sample for each row, all at once or one by one where some cannot be read; and how many could not."""
    dimension, norm = task.features.dimension, task.features.norm
    try:
        x = np.asarray([x for x, _ in rows], np.float64)
    except (ValueError, TypeError, OverflowError):
        x = np.zeros(0)
    if x.shape != (len(rows), dimension):
        if len(rows) <= 1:
            return [_unreadable(task) for _ in rows], len(rows)
        parts = [_samples([row], task) for row in rows]
        return [sample for samples, _ in parts for sample in samples], sum(unread for _, unread in parts)
    x = into_ball(x, cast(Norm, norm.kind), float(norm.bound))
    labels = [_label(y, task) for _, y in rows]
    samples = [_unreadable(task) if label is None else Sample(row, label) for row, label in zip(x, labels, strict=True)]
    return samples, sum(label is None for label in labels)


def _unreadable(task: Task) -> Sample:
    """What stands for a row that cannot be read: no model takes its label for one, so that it adds nothing."""
    return Sample(np.zeros(task.features.dimension, np.float32), math.nan if task.classes is None else -1.0)


def _label(y: Any, task: Task) -> float | None:
    if isinstance(y, str) and y.strip() in task.labels.classes:
        return float(task.labels.classes.index(y.strip()))
    if y is None or isinstance(y, bool) or (isinstance(y, str) and not _is_number(y)):
        return None
    try:
        number = float(y)
    except (TypeError, ValueError, OverflowError):
        return None
    if task.classes is None:
        bound = float(task.labels.bound)
        return min(bound, max(-bound, number)) if math.isfinite(number) else None
    return number if number in range(task.classes) else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
