"""Where a device's samples come from. A source is read in order and never twice. No error shows a sample.

    shard:NAME          a data set of `crowdml data list`; its share is named by --shard I/N
    csv:PATH            a line a sample: features, then the label; '-' is stdin; --header: whether line 1 is a heading
    ndjson:PATH         a line a sample: {"x": [...], "y": label}; '-' is stdin
    python:MODULE:NAME  a function without arguments that yields (x, y)

In a task with `features.kind = "windows"` a row is one reading, as a sensor gives it: a number a line of a CSV file, a
number or {"value": number} a line of NDJSON, a number from a function. A share of such a file is a column, and a share
of a data set is a series. Samples are cut from the readings one after another: a window of w, and the bin of a later
reading. So the n-th sample begins at the n-th reading, and a reader that goes on at sample n begins there: nothing is
lost and nothing is given twice. A live stream begins its first window anew.

A label is the name of a class of the task, or its index; for tasks with numbers, the number. Rows outside the ball of
the task's features are shrunk onto it. A line is a row whatever stands in it (device/rows.py): only too few lines and
the width of the first one stop a device.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import importlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from crowdml.device.files import Held, Share, TextFile, say_nothing
from crowdml.device.rows import NOTHING_SENT, Faults, Row, Sample, Text, clipped_text, reading_of, samples_of
from crowdml.errors import DataError
from crowdml.features.bounds import prepared
from crowdml.features.norms import Norm
from crowdml.lines import Format, columns_of, csv_fields, longest_line, read_lines, separator
from crowdml.task import Task
from crowdml.texts import count_text

KINDS: tuple[str, ...] = ("shard:NAME", "csv:PATH", "ndjson:PATH", "python:MODULE:FUNCTION")
POLL = 0.05
"""Seconds between two looks of a reading thread at whether it shall stop."""
NO_MORE = "The source has no more samples."
MOST_COLUMNS = 100_000
LOOKED_THROUGH = 10_000
"""Rows that are tried before their owner decides: the rest is counted when it is read."""


class SampleSource:
    """What a runner reads. `name` is None where there is no place to come back to, as with a live sensor.

    A name ends with the share: 'csv-lines:/rows.csv:0/1'. A device reads one share of what stands before it, for life.
    """

    name: str | None = None
    waits: bool = False
    """Whether its rows stay where they are until they are read: then there is no need to read ahead."""

    def __init__(self, faults: Faults | None = None) -> None:
        self.taken = 0
        """Rows read so far: each is a sample."""
        self.faults = faults or Faults()
        """Which rows could not be used."""

    @property
    def why_ended(self) -> str:
        """The sentence for the owner when there is nothing more to read."""
        faults = self.faults
        bad = f" {faults.total:,} of its rows could not be used: {faults}." if faults.total else ""
        held = f" {clipped_text(faults.clipped)}" if faults.clipped else ""
        return f"{NO_MORE}{bad}{held}"

    @property
    def count(self) -> int | None:
        """How many samples there are in all, whatever is in them; None where nobody knows."""
        return None

    @property
    def before(self) -> int:
        """Rows that come before the first sample's label. A place in a source is told in rows, labels and all: a task
        with shorter windows goes on after the last reading that was a label, or one of them would be in two batches."""
        return 0

    @property
    def latest(self) -> Any | None:
        """The window [w] of the newest readings, whose label nobody knows yet; None where samples are no windows."""
        return None

    def place(self, known: Mapping[str, int]) -> int:
        """How many rows of it were given before, from what the ledger knows of all sources."""
        return 0 if self.name is None else known.get(self.name, 0)

    def look_through(self, most: int = LOOKED_THROUGH) -> tuple[int, Faults]:
        """How many rows were tried before anything is decided, and which of them cannot be used. It moves nothing."""
        return 0, Faults()

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

    def __init__(
        self,
        name: str,
        rows: Iterable[Any],
        task: Task,
        *,
        file: TextFile | None = None,
        share: Share | None = None,
        held: int | None = None,
    ) -> None:
        self.name, self.rows, self._task = name, iter(rows), task
        self._file, self._share, self._held = file, share or Share(), held
        super().__init__(self.rows.faults if isinstance(self.rows, Series) else None)

    @property
    def count(self) -> int | None:
        held = self._held
        if self._file is not None:
            held = self._file.count if self._file.text.is_readings else self._share.count(self._file.count)
        return None if held is None else max(0, held - self.before)

    @property
    def before(self) -> int:
        return self.rows.before if isinstance(self.rows, Series) else 0

    @property
    def latest(self) -> Any | None:
        return self.rows.latest if isinstance(self.rows, Series) else None

    def place(self, known: Mapping[str, int]) -> int:
        return super().place(known) if self._file is None else self._file.place(self._share, known)

    def look_through(self, most: int = LOOKED_THROUGH) -> tuple[int, Faults]:
        if self._file is None:
            return 0, Faults()
        found = Faults()
        if self._file.text.is_readings:
            rows = list(islice(self._file.rows(), most))
            for row in rows:
                reading_of(row, self._share.index, found)
        else:
            rows = list(islice(islice(self._file.rows(), self._share.index, None, self._share.of), most))
            samples_of(rows, self._task, found)
        return len(rows), found

    async def skip(self, rows: int) -> None:
        self.taken += sum(1 for _ in islice(self.rows, max(0, rows - self.taken)))
        self.faults.clear()  # those were told when they were read

    async def read(self, most: int) -> list[Sample]:
        rows = list(islice(self.rows, most))
        self.taken += len(rows)
        return samples_of(rows, self._task, self.faults)


class DealtSource(SampleSource):
    """The samples of one device of a fleet, which were read together with those of the others."""

    waits = True

    def __init__(
        self,
        name: str,
        samples: list[Sample],
        *,
        faults: Faults | None = None,
        file: TextFile | None = None,
        share: Share | Held | None = None,
    ) -> None:
        super().__init__(faults)
        self.name, self._samples, self._file, self._share = name, samples, file, share or Share()

    @property
    def count(self) -> int | None:
        return len(self._samples)

    def place(self, known: Mapping[str, int]) -> int:
        return super().place(known) if self._file is None else self._file.place(self._share, known)

    def look_through(self, most: int = LOOKED_THROUGH) -> tuple[int, Faults]:
        return len(self._samples), self.faults

    async def skip(self, rows: int) -> None:
        self.taken = min(len(self._samples), max(rows, self.taken))

    async def read(self, most: int) -> list[Sample]:
        samples = self._samples[self.taken : self.taken + most]
        self.taken += len(samples)
        return samples


class Series:
    """Readings, cut into samples one after another: (x [w], y), where y is the bin of the reading `horizon` later."""

    def __init__(self, readings: Iterable[Any], task: Task, column: int = 0) -> None:
        from crowdml.features.series import Windower  # for tasks with windows alone

        features = task.features
        self._readings, self._task, self._column = iter(readings), task, column
        self._cut = Windower(features.dimension, features.horizon, [float(edge) for edge in task.labels.bins])
        self._newest: deque[float] = deque(maxlen=features.dimension)
        self.faults = Faults()
        """Which readings were none."""

    def __iter__(self) -> Series:
        return self

    def __next__(self) -> tuple[Any, Any]:
        for reading in self._readings:
            value = reading_of(reading, self._column, self.faults)
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
        newest = list(self._newest)
        if len(newest) < self._task.features.dimension:
            return None
        return prepared(self._task.features, np.array(newest))


def _stdin() -> BinaryIO:
    """Standard input, by a reader of its own: a thread that waits in `sys.stdin` aborts its process at the end."""
    with contextlib.suppress(OSError, ValueError):  # a stdin without a descriptor: the tests' own
        return open(os.dup(sys.stdin.fileno()), "rb")
    return sys.stdin.buffer


class LiveSource(SampleSource):
    """Rows as they come, from a thread that may block: stdin, a sensor, a function. It ends with the process."""

    def __init__(self, rows: Callable[[], Iterable[Any]], task: Task, capacity: int) -> None:
        super().__init__()
        self._task, self._rows, self._queue = task, rows, queue.Queue[Sample | None](capacity)
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
                if isinstance(self._failure, DataError):  # a sentence of ours, which shows no sample
                    raise self._failure
                raise DataError(f"The source failed: {type(self._failure).__name__}. Mend it and join again.") from None
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

    def _cut(self, rows: Iterable[Any]) -> Iterable[Any]:
        if self._task.features.kind != "windows":
            return rows
        self._series = Series(rows, self._task)
        self.faults = self._series.faults
        return self._series

    def _pump(self) -> None:
        try:
            for row in self._cut(self._rows()):
                samples = samples_of([row], self._task, self.faults)
                self.taken += 1
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


# --- opening ---


def open_source(
    spec: str,
    task: Task,
    share: Share | None = None,
    *,
    seed: int | None = None,
    header: bool | None = None,
    label: str | None = None,
    ignore: tuple[str, ...] = (),
    tell: Callable[[str], None] = say_nothing,
) -> SampleSource:
    """The source that `spec` names, for this task. `header`: whether the first line of a CSV file is a heading; None
    decides by the line itself. `label` and `ignore` name columns of its heading. `tell` hears how it decided."""
    kind, rest = _parse(spec, header, label, ignore)
    share, capacity = share or Share(), int(task.protocol.get("buffer") or 1024)
    if kind == "python":
        return LiveSource(_function(rest), task, capacity)
    if kind == "shard":
        return _open_set(rest, task, share, seed)
    text = Text(cast(Format, kind), "stdin" if rest == "-" else rest, task, header, share.of, label, ignore)
    if rest == "-":
        return LiveSource(lambda: text.rows(read_lines(_stdin(), text.longest), tell), task, capacity)
    _check_columns(spec, text)
    file = TextFile(Path(rest), text, tell)
    rows = file.rows()
    cut = Series(rows, task, share.index) if text.is_readings else islice(rows, share.index, None, share.of)
    return FileSource(file.name(share), cut, task, file=file, share=share)


def deal_sources(
    spec: str,
    task: Task,
    devices: int,
    *,
    seed: int | None = None,
    header: bool | None = None,
    label: str | None = None,
    ignore: tuple[str, ...] = (),
    device: str | None = None,
    tell: Callable[[str], None] = say_nothing,
) -> list[SampleSource]:
    """One source for each device of a fleet, read once: device i has rows i, i + devices, ... as with --shard.

    Where the task's samples are cut from readings, device i has column i of the file, or series i of the data set.
    `device` names a column of a CSV file that says who holds a row: each of those is a device, in the order of names.
    """
    kind, rest = _parse(spec, header, label, ignore, device)
    if kind == "python" or rest == "-":
        raise DataError(f"--source {spec}: a fleet deals out a file or a data set, and this is a stream of one device.")
    shares = [Share(number, devices) for number in range(devices)]
    if kind == "shard":
        if task.features.kind == "windows":
            return [_open_set(rest, task, share, seed) for share in shares]
        x, y = _data_set(rest, task, seed)
        file, rows = None, list(zip(x, y, strict=True))
    else:
        file = TextFile(Path(rest), Text(cast(Format, kind), rest, task, header, devices, label, ignore, device), tell)
        _check_columns(spec, file.text)
        rows = list(file.rows())
        if device is not None:
            return _by_holder(file, rows, task, device)
    if file is not None and file.text.is_readings:
        return [
            FileSource(file.name(share), Series(rows, task, share.index), task, file=file, share=share)
            for share in shares
        ]
    if len(rows) < devices:
        raise DataError(f"--source {spec} has {len(rows):,} rows, too few for {devices:,} devices. {NOTHING_SENT}")
    dealt: list[SampleSource] = []
    for share in shares:
        faults = Faults()
        samples = samples_of(rows[share.index :: share.of], task, faults)
        name = f"{spec}:{share}" if file is None else file.name(share)
        dealt.append(DealtSource(name, samples, faults=faults, file=file, share=share))
    return dealt


def _by_holder(file: TextFile, rows: list[Row], task: Task, column: str) -> list[SampleSource]:
    """One source for each name in a column, in the order of names."""
    held: dict[str, list[Row]] = {}
    for row in rows:
        if not row.holder:
            raise DataError(
                f"{file.path}, line {row.line:,}: column {column!r} does not say whose the row is. Fill it in, or "
                f"delete the row. {NOTHING_SENT}"
            )
        held.setdefault(row.holder, []).append(row)
    dealt: list[SampleSource] = []
    for name in sorted(held):
        faults, share = Faults(), Held(column, name)
        samples = samples_of(held[name], task, faults)
        dealt.append(DealtSource(file.name(share), samples, faults=faults, file=file, share=share))
    return dealt


def holders_in(spec: str, column: str) -> int:
    """How many devices a column of a CSV file names: the size of a fleet that deals out rows by it."""
    _, rest = _parse(spec, None, None, (), column)
    path = Path(rest)
    if not path.is_file():
        raise DataError(f"--source {spec}: --device deals out the rows of a file, and there is no file {rest}.")
    with path.open("rb") as file:
        lines = read_lines(file, longest_line(MOST_COLUMNS))
        first = next(lines, None)
        names, _ = columns_of(first, rest, None, (column,), NOTHING_SENT)
        place, mark, found = names.index(column), separator(first), set[str]()
        for line in lines:
            with contextlib.suppress(ValueError, csv.Error, IndexError):  # `deal_sources` says what is wrong in it
                found.add(csv_fields((line or b"").decode(), mark)[place].strip())
    return len(found - {""})


def check_enough(spec: str, sources: Sequence[SampleSource], batch: int) -> None:
    """Refuse sources with fewer samples than one check-in takes, before anything is sent. Their number is public."""
    counts = [source.count for source in sources if source.count is not None]
    fewest = min(counts, default=batch)
    if fewest >= batch:
        return
    takes = f"and a check-in of this task takes {batch:,}. {NOTHING_SENT}"
    before = sources[0].before
    cut = f", cut from {count_text(before + fewest, 'reading')}," if before and fewest else ""
    if len(sources) == 1:
        raise DataError(f"--source {spec} has {count_text(fewest, 'sample')}{cut or ','} {takes}")
    devices = 0 if before else sum(counts) // batch
    advice = f" Say --devices {devices} or fewer." if devices else ""
    raise DataError(
        f"--source {spec} has {count_text(fewest, 'sample')} for one of its {len(sources):,} devices, {takes}{advice}"
    )


def _parse(
    spec: str, header: bool | None, label: str | None, ignore: tuple[str, ...], device: str | None = None
) -> tuple[str, str]:
    kind, _, rest = spec.partition(":")
    if kind not in ("shard", "csv", "ndjson", "python") or not rest:
        raise DataError(f"--source {spec!r} is not known. Write one of {', '.join(KINDS)}.")
    if header is not None and kind != "csv":
        raise DataError(f"--header is for CSV files, and --source {spec} is none. Leave it out.")
    if (label is not None or ignore or device is not None) and kind != "csv":
        raise DataError(
            f"--label, --ignore and --device are for CSV files, and --source {spec} is none. Leave them out."
        )
    return kind, rest


def _check_columns(spec: str, text: Text) -> None:
    if text.is_readings and text.format == "ndjson" and text.columns > 1:
        raise DataError(f"--source {spec}: its lines hold one reading each, and no columns to share. {NOTHING_SENT}")


def _open_set(name: str, task: Task, share: Share, seed: int | None) -> FileSource:
    """A share of a data set: of its training rows, or one of its series."""
    if task.features.kind != "windows":
        x, y = _data_set(name, task, seed)
        rows = zip(x[share.index :: share.of], y[share.index :: share.of], strict=True)
        return FileSource(f"shard:{name}:{share}", rows, task, held=share.count(len(x)))
    from crowdml.datasets.traffic import series

    found = series(name)
    if share.of > found.places:
        raise DataError(f"data set {name!r} has {found.places} series, too few for {share.of}. {NOTHING_SENT}")
    readings = found.values[share.index, : found.learned]
    return FileSource(f"shard:{name}:{share}", Series(readings, task), task, held=len(readings))


def _data_set(name: str, task: Task, seed: int | None) -> tuple[Any, list[Any]]:
    from crowdml.datasets import load

    norm = task.features.norm.kind if task.features.low is None else "none"  # bounds are those of raw columns
    data = load(name, normalise=cast(Norm, norm), seed=seed)
    if data.features != task.features.width:
        raise DataError(
            f"data set {name!r} has {data.features} features, and task {task.name!r} takes {task.features.width}. "
            f"{NOTHING_SENT}"
        )
    if task.classes is not None and len(data.classes) > task.classes:
        raise DataError(
            f"data set {name!r} has {len(data.classes)} classes, and task {task.name!r} takes {task.classes}. "
            f"{NOTHING_SENT}"
        )
    return data.x_train, data.y_train.tolist()


def _function(rest: str) -> Callable[[], Iterable[Any]]:
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
