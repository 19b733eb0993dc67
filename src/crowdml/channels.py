"""Channels: how the server hears of what devices give. A protocol declares one contribution, and all channels carry it.

- ONE_BY_ONE: the server hears each check-in as it comes.
- SUMMED: devices meet in cohorts, check in under masks, and the server hears a cohort's total (`[masking]`).
- GATHERED: uploads wait until a round closes, and the server hears all of them at once. Under masks cohorts' totals do.
  A task with `protocol.combine` gathers, and a robust rule makes one total of the round.
- RELAYED: the server counts what devices say to it, and passes on to their peers what they say to them.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints
from typing import Protocol as Interface

import numpy as np

from crowdml.arrays import Array, Integers, Samples, namespace
from crowdml.errors import LeakError, ProtocolError, TaskError
from crowdml.features.bounds import label_scale
from crowdml.messages import Public, message, releases_of, total
from crowdml.privacy.grid import COUNTS, Grid
from crowdml.privacy.mechanisms import FromPublic, Mechanism, Selection
from crowdml.privacy.private import Masked, Private, Release, Rows
from crowdml.privacy.sensitivity import L1
from crowdml.records import record
from crowdml.settings import read_section
from crowdml.task import Task

if TYPE_CHECKING:
    from crowdml.robust import Combine  # the rules are for servers and simulators: a device starts without them

__all__ = [
    "NUMBER",
    "Channel",
    "Close",
    "Field",
    "Gathered",
    "Gathering",
    "Stacked",
    "Uploads",
    "combined",
    "combining",
    "contribution",
    "default_channel",
    "fields_heard",
    "heard_by",
    "let_out",
    "root_table",
    "rows_in",
    "weigh_uploads",
]  # fmt: skip

T = TypeVar("T")

FINE = 1024
"""Steps between a rating of 0 and one of 1, where numbers are rated."""
LEAST = 0.05
"""What a label counts at the least where ratings divide by it and the task says nothing."""


class Channel(enum.Enum):
    """How the server hears of contributions."""

    ONE_BY_ONE = "one by one"
    SUMMED = "summed"
    GATHERED = "gathered"
    RELAYED = "relayed"


def default_channel(task: Task) -> Channel:
    """GATHERED where a robust rule combines uploads; else SUMMED under masks and ONE_BY_ONE without."""
    if combining(task) is not None:
        return Channel.GATHERED
    return Channel.ONE_BY_ONE if task.masking is None else Channel.SUMMED


@lru_cache(maxsize=256)
def combining(task: Task) -> Combine | None:
    """The robust rule by which the task combines its rounds, `protocol.combine`; None where it names none."""
    found = task.protocol.get("combine")
    if found is None:
        return None
    from crowdml.robust import Combine

    by = read_section(Combine, found, "protocol.combine")
    if by.rule == "grouping" and ("moments" not in task.privacy.epsilon or task.privacy.mechanism != "skellam"):
        raise TaskError(
            'protocol.combine.rule = "grouping": it groups second moments with Skellam noise, which only protocols '
            f"with a row `moments` release, such as gram and secprobe. Name another rule for {task.protocol['kind']}."
        )
    by.check_rows(task.classes)
    return by


# --- one contribution, and its messages ---


def contribution(alone: str | None, *, masked: str | None = None, total: str | None = None) -> Callable[[type[T]], Any]:
    """Declare what one device gives in a check-in: a message of kind `alone`, with its forms for the other channels.

    The class declares the message of one device. Its `Release` fields are its rows: `masked` is the kind in which they
    leave under masks, `total` the kind in which the server hears them summed over a cohort, with `devices` (the
    survivors) and the `version` of the publication that the cohort used. Both messages become attributes of the class,
    and so does `devices = 1`, so that one handler hears one device and a cohort alike. Where `alone` is None, rows
    leave under masks alone.
    """

    if (masked is None) != (total is None):
        lacks, given = ("total", masked) if total is None else ("masked", total)
        raise ProtocolError(
            f"a contribution has {given!r} and no `{lacks}`: name both kinds, `masked` of what one device says under "
            "masks and `total` of their sum, or neither."
        )

    def decorate(cls: type[T]) -> Any:
        declared = get_type_hints(cls, include_extras=True)
        made: Any = cls if alone is None else message(alone)(cls)
        made.rows, made.devices, made.masked, made.total = releases_of(declared), 1, None, None
        if masked is not None and total is not None:
            counted = {"devices": Public[Integers], "version": Public[Integers]}
            if not made.rows or counted.keys() & made.rows:
                raise LeakError(
                    f"{cls.__name__} leaves under masks, so it needs a row of its own (Release[...]); `devices` and "
                    "`version` are taken: a cohort's total adds them."
                )
            made.masked = _derived(cls, "Masked", masked, _as(Masked[Integers], made.rows))
            made.total = _derived(cls, "Total", total, _as(Release[Integers], made.rows) | counted)
        return made

    return decorate


def _as(hint: Any, rows: Mapping[str, bool]) -> dict[str, Any]:
    return {name: hint | None if optional else hint for name, optional in rows.items()}


def _derived(cls: type, form: str, kind: str, fields: Mapping[str, Any]) -> Any:
    """A message with the rows of a contribution in another form."""
    doc = {"Masked": "What one device says under masks.", "Total": "What the server hears of a cohort."}[form]
    body = {"__annotations__": dict(fields), "__module__": cls.__module__, "__doc__": f"{doc} See `{cls.__name__}`."}
    return message(kind)(type(f"{cls.__name__}{form}", (), body))


def let_out(made: Any, task: Task, ctx: Any, rows: Mapping[str, Private[Any]], **public: Any) -> Any:
    """The message in which a device gives these rows: let out for anyone to see, or under masks.

    A row of the contribution that is not given is None. `public` are the other fields of the message of one device.
    """
    let = ctx.release if task.masking is None else ctx.masked
    given = {**dict.fromkeys(made.rows), **{name: let(name, private) for name, private in rows.items()}}
    return made(**given, **public) if task.masking is None else made.masked(**given)


@record(eq=False)
class Close:
    """The handler of a closed round: a rule makes one total of it, and the protocol's own handler hears that."""

    made: Any
    handler: Any
    rows: Collection[str] | None = None
    tried: Any = None
    grouped: Any = None
    updated: Any = None

    def __call__(self, task: Task, state: Any, event: Gathered, ctx: Any) -> Any:
        weights = weigh_uploads(self, task, state, event, ctx)
        return self.handler(task, state, combined(self.made, task, event, self.rows, weights), ctx)

    def refuse(self, task: Task) -> None:
        """Refuse a task with a rule that this protocol has not said enough for."""
        by = combining(task)
        if by is not None and by.rule == "fltrust" and self.updated is None:
            raise TaskError(
                f'protocol.combine.rule = "fltrust": it compares uploads with an update of the server\'s own, and '
                f"{task.protocol['kind']} has none. It is for sgd, local_updates, and plug-ins that say `updated`."
            )


def heard_by(
    made: Any,
    handler: Any,
    rows: Collection[str] | None = None,
    *,
    tried: Any = None,
    grouped: Any = None,
    updated: Any = None,
) -> dict[type, Any]:
    """One server handler for a check-in of one device, for a cohort's total, and for a round that a rule combined.

    `rows` are those that a rule combines, without them all. The others add up. A rule that rates uploads asks what the
    model would be if the round had one upload alone: the state that `tried` makes of it, or without it the handler.
    `grouped(task, uploads, rows)` says which uploads the rule "grouping" takes, [M], where a protocol knows.
    `updated(task, state, samples)` is what one device that held these samples would give, row by row and without
    noise, in the rows' own steps: the server's own update, with which the rule "fltrust" compares uploads.
    """
    kinds = [made] if hasattr(made, "kind") else []
    if made.total is None:
        return dict.fromkeys(kinds, handler)

    close = Close(made, handler, rows, tried, grouped, updated)
    return {**dict.fromkeys([*kinds, made.total], handler), Gathered: close}


def combined(
    made: Any, task: Task, event: Gathered, rows: Collection[str] | None = None, weights: Array | None = None
) -> Any:
    """A closed round as one total, by the rule of `protocol.combine`: as many times what the rule makes of the means
    of its uploads as there are devices in them. A rule that asks for rows of the server's own is given as the `weights`
    [M] that it came to."""
    from crowdml.robust import bucket_ranks, combine_blocks

    by, uploads = combining(task), event.uploads
    if by is None:
        raise ProtocolError("a round was closed, and protocol.combine does not say by which rule it is combined.")
    devices = uploads.devices
    if weights is not None and by.rule == "grouping":  # a sum of those that were taken, with their noise and no more
        devices = devices * (weights > 0).astype(devices.dtype)
        weights = devices / max(1, int(devices.sum()))
    xp, ranks = namespace(devices), bucket_ranks(event.round, uploads.count) if by.before == "bucketing" else None
    sums: dict[str, Array] = {}
    for row in uploads.rows:
        if rows is not None and row not in rows:
            sums[row] = sum(each.sum(0) for each in uploads.blocks(row))
            continue
        if weights is None:
            found = combine_blocks(lambda row=row: _means(uploads, row), uploads.count, by, ranks)
        else:
            found = xp.concatenate([weights @ some for some in _means(uploads, row)])
        found = found * devices.sum()
        whole = xp is np and next(uploads.blocks(row, 1)).dtype.kind in "iu"
        sums[row] = np.rint(found).astype(np.int64) if whole else found
    return total(made.total.kind, sums, devices=devices.sum().astype(xp.int32), version=event.round)


def _means(uploads: Uploads, row: str) -> Iterator[Array]:
    """A row of all uploads for one device of each, some columns after the others."""
    from crowdml.robust import block_width

    for _, some in uploads.columns(row, block_width(uploads.count)):
        xp = namespace(some)
        yield some / uploads.devices[:, None].astype(np.float64 if xp is np else xp.float32)


# --- rows of the server's own ---


def root_table(task: Task) -> Mapping[str, Mechanism]:
    """What the rule of `protocol.combine` lets out of rows of the server's own: public scores, or a charged choice."""
    by = combining(task)
    if by is None or not by.rooted or by.rows is None:
        return {}
    covers = Rows(0, by.rows)
    if by.rule == "fltrust":
        said = "how far each upload goes along an update of the server's own, made of the operator's public rows"
        return {
            "scores": FromPublic(covers, said),
            "length": FromPublic(covers, "how long that update is, as a power of two"),
        }
    if by.rule == "grouping":
        return {"taken": FromPublic(covers, "which uploads were taken, by how they go with the operator's public rows")}
    assert by.keep is not None
    if by.rule == "top":
        return {"scores": FromPublic(covers, "how well each upload does on public rows of the operator's")}
    low, high, grid = (0, 1, COUNTS) if task.classes is not None else (-FINE, FINE, Grid(Fraction(1, FINE)))
    moved = Fraction(high - low)
    if task.as_published:  # eq. (7) takes 1/2 for accuracies, and 1 for numbers, however many rows there are
        moved = max(moved, by.rows * Fraction(high, 2 if task.classes is not None else 1))
    epsilon = by.epsilon or Fraction(0)
    said = f"which {by.keep} uploads were taken, drawn by how well they do on rows of the operator's own"
    return {"chosen": Selection(by.keep, low, high, L1(moved), epsilon, covers, said, grid)}


def weigh_uploads(close: Close, task: Task, state: Any, event: Gathered, ctx: Any) -> Array | None:
    """[M]: what each upload counts in the result, by a rule that asks for rows of the server's own; else None.

    All that is known of these rows passes the server's door, so that the journal has it and a replay needs no rows.
    """
    by, count = combining(task), event.uploads.count
    if by is None or not by.rooted:
        return None
    by.check(count)
    if by.rule == "grouping":
        taken = ctx.release("taken", ctx.rows.map(lambda rows: close.grouped(task, event.uploads, rows)[None]))
        return (np.asarray(taken.value) > 0).astype(np.float64)
    if by.rule == "fltrust":
        return _trusted_along(close, task, state, event, ctx)
    assert by.keep is not None

    def ratings(rows: Any) -> Iterator[Array]:
        """[rows] of each upload."""
        for one in _each_alone(close.made, event):
            said = ctx.predict((close.tried or close.handler)(task, state, one, ctx).state, rows.x)
            yield _rate(task, by, said, rows.y)

    def means_of(rows: Any) -> Array:
        return np.array([np.asarray(each, np.float32).mean() for each in ratings(rows)])

    def rated(rows: Any) -> Array:
        found = np.empty((len(rows), count), np.float32)
        for place, each in enumerate(ratings(rows)):
            found[:, place] = each
        return found

    if by.rule == "top":
        scores = np.asarray(ctx.release("scores", ctx.rows.map(lambda rows: means_of(rows)[None])).value)
        taken = np.argsort(-scores, kind="stable")[: by.keep]
    else:
        taken = np.asarray(ctx.release("chosen", ctx.rows.map(rated)).value)
    weights = np.zeros(count)
    weights[taken] = 1 / by.keep
    return weights


def _trusted_along(close: Close, task: Task, state: Any, event: Gathered, ctx: Any) -> Array:
    """[M]: weights by FLTrust. Of the server's own rows the angles of uploads with its own update leave, and the
    length of that; none of its coordinates."""
    from crowdml.robust import cosines, trusted

    uploads, table = event.uploads, root_table(task)
    rows = [row for row in uploads.rows if close.rows is None or row in close.rows]

    def update(samples: Samples) -> Mapping[str, Array]:
        samples = samples if task.classes is None else Samples(samples.x, samples.y.astype(np.int32))
        found = close.updated(task, state, samples)
        return {row: np.asarray(found[row], np.float64).reshape(-1) for row in rows}

    own = ctx.rows.map(update)

    def along(own: Mapping[str, Array]) -> Array:
        products, squares = np.zeros(uploads.count), np.zeros(uploads.count)
        for row in rows:
            done = 0
            for some in _means(uploads, row):
                products += some @ own[row][done : done + some.shape[1]]
                squares += (some**2).sum(1)
                done += some.shape[1]
        return cosines(products, np.sqrt(squares), _length(own, rows))[None]

    def decoded(name: str, private: Any) -> Array:
        return np.asarray(ctx.release(name, private).value) * float(table[name].grid.step)

    angles = decoded("scores", own.map(along))
    length = 2.0 ** decoded("length", own.map(lambda own: np.log2([[_length(own, rows)]])))[0]
    squares = sum((some**2).sum(1) for row in rows for some in _means(uploads, row))
    return trusted(angles, np.sqrt(np.asarray(squares)), length)


def _length(own: Mapping[str, Array], rows: Sequence[str]) -> float:
    """How long the server's own update is."""
    length = float(np.sqrt(sum((own[row] ** 2).sum() for row in rows)))
    if not 0 < length < np.inf:
        raise TaskError(
            "the server's own update has no direction, and FLTrust compares uploads with it. Name other public rows."
        )
    return length


def _each_alone(made: Any, event: Gathered) -> Iterator[Any]:
    """Each upload of a round as a total of its own."""
    uploads = event.uploads
    parts = {
        row: (one[0] for block in uploads.blocks(row) for one in np.split(block, len(block))) for row in uploads.rows
    }
    for devices in uploads.devices:
        one = {row: next(each) for row, each in parts.items()}
        yield total(made.total.kind, one, devices=np.int32(devices), version=event.round)


def _rate(task: Task, by: Combine, said: Array, labels: Array) -> Array:
    from crowdml.ratings import rate_classes, rate_numbers

    if task.classes is not None:
        return rate_classes(said, labels)
    middle, half = label_scale(task.labels)
    return rate_numbers(middle + half * said, middle + half * labels, float(by.least or LEAST))


# --- what a message may hold ---


@record
class Field:
    """What a message's array must look like: NumPy's little-endian name of its type, its shape, its least and most."""

    dtype: str
    shape: tuple[int, ...]
    low: int
    high: int


NUMBER = Field("<i4", (), 0, 2**31 - 1)
"""A count, or a version."""


def fields_heard(
    made: Any,
    task: Task,
    table: Mapping[str, Mechanism],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    **public: Field,
) -> dict[str, dict[str, Field]]:
    """What the server may hear of a contribution: its kind on the task's channel, and the range of each field.

    `shapes` are those of the rows of one device, `public` its other fields. Noise beyond a row's reach has a chance
    below 2^-64, so no honest device is refused; an honest sum leaves its own reach once in 10^9 entries.
    """
    bare = next((name for name, row in table.items() if row.law is None), None)
    if bare is not None:
        what = f"row {bare!r} has no noise" if task.masking is None else "a sum without noise or masks"
        raise TaskError(f"{what}: the simulator runs such a task, a server does not.")
    if task.masking is None:
        rows = {name: Field("<i4", (shapes or {})[name], *row.reach) for name, row in table.items()}
        return {made.kind: {**public, **rows}}
    cohort, devices = task.masking.cohort, Field("<i4", (), task.masking.minimum, task.masking.cohort)
    return {made.total.kind: {"version": NUMBER, "devices": devices, **_summed(table, cohort)}}


def _summed(table: Mapping[str, Any], cohort: int) -> dict[str, Field]:
    far = {name: row.reach_of_sum(cohort) for name, row in table.items()}
    return {name: Field("<i8", (row.length,), -far[name], far[name]) for name, row in table.items()}


# --- a closed round of uploads ---


@record
class Gathering:
    """When a round of uploads closes: `size` of them are in, or at least `minimum` after `seconds`."""

    size: int
    minimum: int = 1
    seconds: float | None = None
    """None: a round closes by number alone."""
    drawn: Fraction | None = None
    """The share of all devices that is drawn for a round; None: whoever comes first is in it."""

    def draws(self, task: Task, number: int, device: str, looks: int = 0) -> bool:
        """Whether a public lottery draws this device for a round. Its chance doubles with each look at which it found
        the round still open, so that a round whose devices are gone takes others."""
        if self.drawn is None:
            return True
        told = b"crowdml/drawn/1\0" + task.hash + number.to_bytes(8, "little") + device.encode()
        word = int.from_bytes(hashlib.sha256(told).digest()[:8], "little")
        return word < self.drawn * 2 ** (64 + min(looks, 64))

    @staticmethod
    def looks_within(seconds: float) -> int:
        """How many times more a device may have looked at a round since it opened so many seconds ago. Between two
        looks it waits at least 0.5, 1, 2, ... 128 seconds, and then 150 each; a tenth of the time, and a tenth of a
        second, are slack."""
        passed = 1.1 * max(0.0, seconds) + 0.1
        return int(math.log2(2 * passed + 1) if passed < 255.5 else min(64.0, 9 + (passed - 255.5) / 150))

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.size:
            raise TaskError(f"a round closes with {self.minimum} to {self.size} uploads: at least 1, in this order.")
        if self.seconds is not None and not 0 < self.seconds <= 315_360_000:  # ten years
            raise TaskError(f"a round closes after {self.seconds:g} s: above 0 and at most ten years, or none.")


class Uploads(Interface):
    """The uploads of a closed round, in the order in which they came. Read them in blocks where they are many."""

    @property
    def count(self) -> int: ...
    @property
    def rows(self) -> Collection[str]:
        """The rows that they have."""
        ...

    @property
    def devices(self) -> Integers:
        """[M]: how many devices are in each: 1, or the survivors of a cohort."""
        ...

    def array(self, row: str) -> Array:
        """[M, ...]: a row of all uploads at once."""
        ...

    def blocks(self, row: str, size: int = 256) -> Iterator[Array]:
        """[m, ...]: the same, `size` uploads after another."""
        ...

    def columns(self, row: str, width: int = 65_536) -> Iterator[tuple[slice, Array]]:
        """Where they stand, and [M, width] of them: all uploads, some entries of the flat row after the others."""
        ...


@record
class Gathered:
    """A round of a gathered task is closed: number `round`, with its uploads in the order of the journal."""

    round: int | Integers
    uploads: Uploads


@record
class Stacked:
    """Uploads that are all in memory: what simulators give. Each row is [M, ...]."""

    rows: Mapping[str, Array]
    devices: Integers

    @property
    def count(self) -> int:
        return len(self.devices)

    def array(self, row: str) -> Array:
        return self.rows[row]

    def blocks(self, row: str, size: int = 256) -> Iterator[Array]:
        for start in range(0, self.count, size):
            yield self.rows[row][start : start + size]

    def columns(self, row: str, width: int = 65_536) -> Iterator[tuple[slice, Array]]:
        flat = self.rows[row].reshape(self.count, -1)
        for start in range(0, flat.shape[1], width):
            those = slice(start, min(start + width, flat.shape[1]))
            yield those, flat[:, those]


def rows_in(message: Any) -> tuple[str, ...]:
    """The rows that a message has: a task may leave some out."""
    declared = releases_of(get_type_hints(type(message), include_extras=True))
    return tuple(name for name in declared if getattr(message, name) is not None)


def stacked(messages: Sequence[Any]) -> Stacked:
    """The uploads of these messages, as they were received."""
    there = rows_in(messages[0])
    xp = namespace(*(getattr(messages[0], name).value for name in there))
    arrays = {name: xp.stack([getattr(each, name).value for each in messages]) for name in there}
    return Stacked(arrays, np.asarray([int(each.devices) for each in messages], np.int32))
