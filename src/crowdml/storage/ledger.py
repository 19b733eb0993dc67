"""The device's ledger: what every release has cost its samples, on disk before a byte is sent.

One SQLite file holds the charges, the serials handed out, the samples that wait, the messages that wait for their
acknowledgement, and where each protocol stands. `Ledger.charge` writes a step in one transaction, so that a crash at
any point leaves either nothing of it or all of it: a message that can be sent has been paid for, and is sent as the
same bytes. A fleet keeps the ledgers of all its devices in one file: `Ledger.of`.

The totals are computed from the charges and stored nowhere on disk. In memory they are kept as long as nobody else
writes to the file (SQLite says so), so that a step reads nothing back. On doubt the ledger refuses: nothing is sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from datetime import datetime, timedelta
from fractions import Fraction
from functools import lru_cache
from operator import ge
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar
from urllib.parse import quote

from crowdml.errors import ASK_FOR_STATEMENT, BudgetExhausted, GuaranteeError, LedgerError
from crowdml.price import Epsilons
from crowdml.privacy.losses import ZCDP, Filter, Loss, Pure, Renyi, Total, Unbounded, parse_loss
from crowdml.privacy.sensitivity import Adjacency, Observer
from crowdml.records import record
from crowdml.storage.budget import Allowance, Budget, shortfall, spent
from crowdml.storage.migrations import apply, bring_up_to_date, migrations
from crowdml.storage.spans import Coverage, Priced, covered, dearest, front, undominated

P = ParamSpec("P")
T = TypeVar("T")

NOTHING_SENT = "Nothing was charged and nothing was sent."
MOST_REMEMBERED = 1024
"""Steps, and pairs of totals, that are worked out once."""


@record
class Charge:
    """One release's loss on one span of samples: who is protected, from whom, under which neighbours (review, R0).

    `loss` is that of one sample of the span, `device_loss` that of all of them replaced at once. Where the release
    protects all of a device's data (`replace-device`) the two are the same.

    What is seen as an aggregate alone has `loss` as long as enough of the others are honest. `alone` and
    `device_alone` are what it costs if none of them is (review, R11); for other observers they are the loss itself.
    """

    task: bytes  # SHA-256 of the task file
    mechanism: str  # the row of the protocol's table
    loss: Loss
    device_loss: Loss
    observer: Observer
    adjacency: Adjacency
    first_sample: int  # serials, both included
    last_sample: int
    charged_at: str  # UTC, ISO 8601
    alone: Loss | None = None
    device_alone: Loss | None = None

    def __post_init__(self) -> None:
        if len(self.task) != 32:
            raise LedgerError(
                f"a charge names its task by 32 bytes, the SHA-256 of its file, and these are {len(self.task)}. "
                f"{NOTHING_SENT} Pass the task's hash."
            )
        if not 0 <= self.first_sample <= self.last_sample < 2**62:
            raise LedgerError(
                f"a charge covers serials {self.first_sample} to {self.last_sample}: no such span. {NOTHING_SENT} "
                "Pass the first and the last serial of the part, both included."
            )
        if self.adjacency is Adjacency.REPLACE_DEVICE and self.loss != self.device_loss:
            raise LedgerError(
                f"a replace-device charge protects all samples at once, and it names two losses: {self.loss} and "
                f"{self.device_loss}. {NOTHING_SENT} Pass the same loss for both."
            )
        if not _covers(self.device_loss, self.loss):
            raise LedgerError(
                f"a charge costs one sample {self.loss} and the device {self.device_loss}, and to replace all samples "
                f"is to replace this one too. {NOTHING_SENT} Pass a device loss that is at least that of a sample."
            )
        _check_alone(self)
        if not _is_utc(self.charged_at):
            raise LedgerError(
                f"a charge was made at {self.charged_at!r}, which is no UTC time in ISO 8601. {NOTHING_SENT} "
                "Pass one like '2025-01-31T12:00:00+00:00'."
            )

    @property
    def unit(self) -> Literal["sample", "device"]:
        """What the guarantee protects: one sample, or all samples of a device."""
        return "device" if self.adjacency is Adjacency.REPLACE_DEVICE else "sample"

    @property
    def scope(self) -> Literal["release"]:
        """What the loss covers: this release. Totals are computed from charges, and never stored as one."""
        return "release"


@record
class Added:
    """What some charges add: to any of their samples at most, to the device, and in samples not given before."""

    sample: Total
    device: Total
    samples: int


@record
class Outgoing:
    """A sealed message that was paid for. Until it is acknowledged it is sent as these bytes and no others."""

    task: bytes
    seq: int
    body: bytes


@record
class Sent:
    """A message and what became of it: the hashes of its bytes and of what it says, where they were kept."""

    task: bytes
    seq: int
    hash: bytes | None
    content: bytes | None
    acknowledged: bool
    receipt: bytes | None


@record
class Round:
    """The last round of masking that the device began for a task, and what it keeps of it: None when that is over."""

    number: int
    body: bytes | None


@record
class Waiting:
    """A sample that was sensed and not given yet, as the bytes that its runner keeps."""

    serial: int
    body: bytes


@record
class Batch:
    """The samples of a batch that was given, as the bytes that its runner keeps: a device learns from them itself."""

    number: int
    body: bytes


@record(frozen=False)
class _Seen:
    """What the charges of a device add up to: of one task, or of all."""

    device: Total
    given: Coverage


@record(frozen=False)
class _Memory:
    """What one device's rows say, as far as it was asked for. It is forgotten whenever it may not be so any more."""

    serial: int | None = None
    """The next one."""
    seen: dict[bytes | None, _Seen] = field(default_factory=dict)
    front: dict[bytes | None, list[tuple[int, Total]]] = field(default_factory=dict)
    ceiling: Total | None = None
    """The ceiling of all tasks."""
    seq: dict[bytes, int] = field(default_factory=dict)
    """The next one of a task."""


@record(frozen=False)
class _Shared:
    """What the views of one file have in common."""

    views: dict[int, Ledger]
    tasks: set[bytes] = field(default_factory=set)
    """Those that have a row."""
    version: int = -1
    """SQLite's count of what others wrote."""

    def forget(self) -> None:
        self.tasks.clear()
        for view in self.views.values():
            view._memory = _Memory()


class Ledger:
    """The ledger of one device. A file that cannot be trusted or written is a `LedgerError`.

    `Ledger(":memory:")` forgets at the end. A file that is not there is made, readable by its owner alone; with
    `must_exist` it is an error, for a device that lost its ledger does not know what it has given (design, 3.3).
    """

    def __init__(self, path: str | os.PathLike[str], *, must_exist: bool = False) -> None:
        self.path = os.fspath(path)
        self.device = 0
        self._memory = _Memory()
        self._shared = _Shared({0: self})
        with self._explained():
            if self.path == ":memory:":
                self._connection = _connect(self.path)
                apply(self._connection, migrations())
            else:
                self._prepare(must_exist=must_exist)
                self._connection = _connect(_uri(self.path, "rw"))
        try:
            with self._explained():
                for pragma in (
                    "secure_delete = on",  # what is erased is overwritten with zeros,
                    "journal_mode = truncate",  # and no log keeps it: a write-ahead log has old pages long after
                    "synchronous = full",
                    "foreign_keys = on",
                    "trusted_schema = off",
                ):
                    self._connection.execute(f"pragma {pragma}").fetchall()
                flaws = self._connection.execute("pragma quick_check(1)").fetchone()
                if flaws != ("ok",):
                    raise self._corrupt(str(flaws[0] if flaws else "no answer"))
                bring_up_to_date(self._connection, f"the ledger {self.path}")
        except BaseException:
            self._connection.close()
            raise

    def of(self, device: int) -> Ledger:
        """The ledger of another device in the same file. Each has its own serials, charges, outbox and budgets."""
        if device < 0:
            raise LedgerError(f"there is no device {device}: devices of one file are numbered from 0. {NOTHING_SENT}")
        views = self._shared.views
        if device not in views:
            view: Ledger = Ledger.__new__(Ledger)
            view.path, view.device, view._connection, view._shared = self.path, device, self._connection, self._shared
            view._memory = _Memory()
            views[device] = view
        return views[device]

    @contextlib.contextmanager
    def together(self) -> Generator[None]:
        """Write what devices of this file do in here as one transaction: on disk, all of it, when this returns.

        Each call is still all or nothing by itself: one that a budget refuses leaves the others as they are. If the
        whole cannot be written, nothing of it was, and nothing of it may be sent.
        """
        try:
            with self._transaction("immediate"):
                yield
        except BaseException:
            self._shared.forget()
            raise

    @contextlib.contextmanager
    def reading(self) -> Generator[None]:
        """Several questions at one moment: nothing changes between them."""
        with self._transaction("deferred"):
            yield

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Serials

    def next_serial(self) -> int:
        """The serial that the next sample will have: all below it were handed out."""
        with self._transaction("deferred"):
            return self._next_serial()

    def take_serials(self, n: int) -> range:
        """The serials of the next n samples of this device, over all its tasks. No serial is handed out twice."""
        if n < 0:
            raise LedgerError(f"{n} serials cannot be taken. {NOTHING_SENT} Ask for the number of new samples.")
        with self._transaction("immediate"):
            return self._take_serials(n)

    # Samples that wait

    def keep(self, task: bytes, samples: Sequence[bytes], *, source: str | None = None, taken: int = 0) -> range:
        """Keep sensed samples until a step of the task gives them; their serials.

        `source` and `taken` note in the same transaction how many samples were read from where, so that after a crash
        none of them is read a second time.
        """
        with self._transaction("immediate"):
            write = self._connection.execute
            self._know(task)
            serials = self._take_serials(len(samples))
            self._wait(task, zip(serials, samples, strict=True))
            if source is not None:
                write(_WRITE_SOURCE, (self.device, source, taken))
        return serials

    def waiting(self, task: bytes) -> tuple[Waiting, ...]:
        """The samples of this task that no step has given, oldest first."""
        wanted = "select serial, body from waiting where device = ? and task = ? order by serial"
        return tuple(Waiting(*row) for row in self._read(wanted, self.device, task))

    def discard(self, serials: Iterable[int]) -> None:
        """Forget samples that wait: they are never given."""
        with self._transaction("immediate"):
            self._discard(serials)

    def sources(self) -> dict[str, int]:
        """Every source that samples were read from, and how many, over all tasks."""
        return dict(self._read("select name, taken from source where device = ?", self.device))

    # Charge, then send

    def charge(
        self,
        task: bytes,
        charges: Sequence[Charge],
        budgets: Iterable[Budget],
        *,
        outbox: Mapping[int, bytes] | None = None,
        contents: Mapping[int, bytes] | None = None,
        state: bytes | None = None,
        given: Iterable[int] = (),
        done: Iterable[int] = (),
        take: range | None = None,
        source: str | None = None,
        taken: int = 0,
        keep: Sequence[bytes] = (),
        round_: Round | None = None,
        remember: Batch | None = None,
        batches: int = 0,
    ) -> None:
        """Write one step of a task: its charges, its sealed messages by sequence number, and the protocol's state.

        `contents` are hashes of what the messages say, kept beside the hash of their bytes.
        `given` are serials of waiting samples that it used: they wait no more. `done` are messages that these replace
        or that were refused for good: their bytes are forgotten. `take` are the next serials, where the samples of
        this step have none yet; `source` and `taken` as in `keep`, where they waited at their source. `keep` are those
        samples, where they serve again: from now on they wait here. `round_` is where the device stands in its round.
        `remember` is the batch itself, where the device learns from the last `batches`: older ones are forgotten.
        All of it or nothing, on disk when this returns. Raises `BudgetExhausted` where any of the budgets does not
        allow the charges; then nothing was written and nothing may be sent.
        """
        with self._transaction("immediate"):
            if take is not None and take.start != self._next_serial():
                raise LedgerError(
                    f"task {_name(task)}: a step wants serials from {take.start} on, and {self._next_serial()} is the "
                    f"next. {NOTHING_SENT} Look whether two processes share this ledger."
                )
            step = _step_of(charges) if charges else None
            self._check(task, charges, budgets, step, None, 0 if take is None else len(take))
            write = self._connection.execute
            self._know(task)
            if take is not None:
                self._take_serials(len(take))
                self._wait(task, zip(take, keep, strict=True) if keep else ())
            if source is not None:
                write(_WRITE_SOURCE, (self.device, source, taken))
            if step is not None:
                self._add(task, charges, step)
            self._discard(given)
            for seq in done:
                write(_ACKNOWLEDGE, (None, self.device, task, seq))
            for seq, body in (outbox or {}).items():
                if self._written(task, seq):
                    raise LedgerError(
                        f"task {_name(task)}: message {seq} was written before. {NOTHING_SENT} "
                        "Send the bytes of `resend`, or seal the new message under `next_seq`."
                    )
                content = None if contents is None else contents.get(seq)
                write(_INSERT_OUTBOX, (self.device, task, seq, body, hashlib.sha256(body).digest(), content))
                self._memory.seq[task] = max(seq + 1, self._next_seq(task))
            if state is not None:
                write(_WRITE_STATE, (self.device, task, state))
            if round_ is not None:
                write(_WRITE_ROUND, (self.device, task, round_.number, round_.body))
            if remember is not None:
                number = remember.number
                write(_WRITE_MEMORY, (self.device, task, number, remember.body))
                write(_FORGET, (self.device, task, number - batches, number))

    def remembered(self, task: bytes) -> tuple[Batch, ...]:
        """The last batches that were given and kept to learn from, oldest first."""
        wanted = "select number, body from memory where device = ? and task = ? order by number"
        return tuple(Batch(*row) for row in self._read(wanted, self.device, task))

    def keep_round(self, task: bytes, round_: Round) -> None:
        """Keep where the device stands in its round. Rounds only grow, and one that is over never begins again."""
        with self._transaction("immediate"):
            self._know(task)
            self._connection.execute(_WRITE_ROUND, (self.device, task, round_.number, round_.body))

    def round(self, task: bytes) -> Round | None:
        """The last round of this task that the device ever began; None before the first."""
        found = self._read("select number, body from round where device = ? and task = ?", self.device, task)
        return Round(*found[0]) if found else None

    def next_seq(self, task: bytes) -> int:
        """The number under which this task's next message is sealed."""
        with self._transaction("deferred"):
            return self._next_seq(task)

    def resend(self, task: bytes | None = None) -> tuple[Outgoing, ...]:
        """What was paid for and not acknowledged, oldest first. To send it again is free: these are the same bytes."""
        rows = self._read(f"select task, seq, body {_OUTBOX} and acknowledged = 0 order by rowid", self.device, task)
        return tuple(Outgoing(*row) for row in rows)

    def acknowledge(self, task: bytes, seq: int, receipt: bytes | None = None) -> None:
        """The server has it: forget the bytes, keep its receipt. A second acknowledgement changes nothing."""
        with self._transaction("single"):
            done = self._connection.execute(_ACKNOWLEDGE, (receipt, self.device, task, seq))
            if not done.rowcount and not self._written(task, seq):
                raise LedgerError(
                    f"task {_name(task)}: message {seq} was acknowledged and never written here. Nothing was changed. "
                    "Look whether two devices share one key."
                )

    def receipts(self, task: bytes | None = None) -> tuple[bytes, ...]:
        """What the server gave for the messages that it acknowledged, oldest first."""
        rows = self._read(f"select receipt {_OUTBOX} and receipt is not null order by rowid", self.device, task)
        return tuple(row[0] for row in rows)

    def sent(self, task: bytes | None = None) -> tuple[Sent, ...]:
        """Every message that was ever sealed and may have been sent, oldest first."""
        return tuple(map(_sent, self._read(f"{_SENT} {_OUTBOX} order by rowid", self.device, task)))

    def last_sent(self) -> Sent | None:
        """The message that was sealed last, over all tasks; None before the first."""
        last = "from outbox where rowid = (select max(rowid) from outbox where device = ?)"
        found = self._read(f"{_SENT} {last}", self.device)
        return _sent(found[0]) if found else None

    def knows(self, hash_: bytes) -> bool:
        """Whether a message whose bytes have this SHA-256 was sealed here, or is known from an earlier ledger."""
        return bool(self._read("select 1 from outbox where device = ? and hash = ?", self.device, hash_))

    def any_taken(self) -> bool:
        """Whether the server gave a receipt for any message of this device."""
        return bool(self._read("select 1 from outbox where device = ? and receipt is not null limit 1", self.device))

    def adopt(self, task: bytes, hash_: bytes) -> None:
        """Know a message that an earlier ledger of this device sealed, whose charges this one begins with."""
        with self._transaction("immediate"):
            self._know(task)
            seq = self._next_seq(task)
            self._connection.execute(_ADOPT, (self.device, task, seq, hash_))
            self._memory.seq[task] = seq + 1

    def devices(self) -> tuple[int, ...]:
        """The devices of this file that have sealed a message."""
        return tuple(row[0] for row in self._read("select distinct device from outbox order by 1"))

    def state(self, task: bytes) -> bytes | None:
        """The protocol's state after its last step that was written; None before the first."""
        found = self._read("select body from state where device = ? and task = ?", self.device, task)
        return found[0][0] if found else None

    # Totals

    def added(self, charges: Sequence[Charge]) -> Added:
        """What these charges would add, on samples charged for nothing else."""
        with self._transaction("deferred"):
            if not charges:
                return Added(Total(), Total(), 0)
            seen, step, start = self._seen_by(None), _step_of(charges), _start(charges)
            new = sum(seen.given.missing(start + first, start + last) for first, last in step.spans)
            return Added(step.ceiling, step.device, new)

    def after(self, charges: Sequence[Charge], samples: int) -> tuple[Total, int, Total]:
        """Once these charges on `samples` samples are written: the device's total, how many samples it has given, and
        a total that is at least each sample's in every part."""
        with self._transaction("deferred"):
            added, before, seen = self.added(charges), self.sample_ceiling(), self._seen_by(None)
            own = added.sample
            if charges and added.samples < samples:  # some were charged before: what those paid adds to this
                step, start = _step_of(charges), _start(charges)
                spans = [(start + first, start + last, total) for first, last, total in step.shape]
                met = [each for first, last in step.spans for each in self._spans(None, start + first, start + last)]
                own = ceiling(total for _, total in _front_of_shape(_shape([*met, *spans])[1]))
            top = _ceiling_of_two(before, own)
            return _sum_of_two(seen.device, added.device), seen.given.size + added.samples, top

    def check(
        self, task: bytes, charges: Sequence[Charge], budgets: Iterable[Budget], *, at: int | None = None, take: int = 0
    ) -> None:
        """Raise `BudgetExhausted` unless all the budgets allow this task these charges. Nothing is written.

        `at` moves them: as if the first of their samples had that serial. `take` is how many serials the step would
        take for its samples.
        """
        with self._transaction("deferred"):
            self._check(task, charges, budgets, _step_of(charges) if charges else None, at, take)

    def sample_total(self, serial: int) -> Total:
        """What this sample has paid, over all tasks."""
        with self._transaction("deferred"):
            return Total.of(total for _, _, total in self._spans(None, serial, serial))

    def dearest_sample(self, delta: float, *, alone: bool = False) -> tuple[int, Total] | None:
        """The serial of a sample whose total is the greatest at this delta, and that total. None before any charge.

        `alone`: if everyone else colludes, which may be another sample.
        """
        with self._transaction("deferred"):
            if alone and self._any_masked():
                first, last = self._extent(None)
                found = front(self._spans(None, first, last, alone=True))
            else:
                found = self._front_of(None)
            return dearest(found, lambda total: epsilon_of(total, delta))

    def sample_ceiling(self) -> Total:
        """A total that is at least every sample's in every part, and so at every delta. That of none is no loss."""
        with self._transaction("deferred"):
            front = self._front_of(None)
            if self._memory.ceiling is None:
                self._memory.ceiling = ceiling(total for _, total in front)
            return self._memory.ceiling

    def device_total(self, *, alone: bool = False) -> Total:
        """What all releases together cost if all samples that this device ever gave are replaced.

        `alone`: and if everyone else colludes.
        """
        with self._transaction("deferred"):
            if alone and self._any_masked():
                return self._device_total(None, _DEVICE_ALONE)
            return self._seen_by(None).device

    def samples_given(self) -> int:
        """How many samples any release has used."""
        with self._transaction("deferred"):
            return self._seen_by(None).given.size

    def allowance(self, budget: Budget) -> Allowance:
        """What is left of a budget. A fresh sample has all of its epsilon; the dearest one, what is said here."""
        with self._transaction("deferred"):
            seen = self._seen_by(budget.task)
            used = dearest(self._front_of(budget.task), lambda total: spent(budget.sample_filter, total))
            left = budget.epsilon - spent(budget.sample_filter, used[1] if used else Total())
            device_left = None
            if budget.device_filter is not None:
                device_left = budget.device_filter.epsilon - spent(budget.device_filter, seen.device)
            return Allowance(
                max(0.0, float(left)),
                max(0, budget.samples - seen.given.size),
                None if device_left is None else max(0.0, float(device_left)),
            )

    def charges(self, task: bytes | None = None) -> tuple[Charge, ...]:
        """What was charged, newest first."""
        rows = self._read(
            "select task, mechanism, loss, device_loss, observer, adjacency, first_sample, last_sample, "
            "charged_at, alone, device_alone "
            "from charge where device = ? and task = coalesce(?, task) order by id desc",
            self.device,
            task,
        )
        return tuple(self._charge(row) for row in rows)

    # Inside a transaction

    def _know(self, task: bytes) -> None:
        if task not in self._shared.tasks:
            self._connection.execute("insert into task (hash) values (?) on conflict do nothing", (task,))
            self._shared.tasks.add(task)

    def _next_seq(self, task: bytes) -> int:
        if task not in self._memory.seq:
            row = self._connection.execute(
                "select max(seq) from outbox where device = ? and task = ?", (self.device, task)
            ).fetchone()
            self._memory.seq[task] = 0 if row[0] is None else row[0] + 1
        return self._memory.seq[task]

    def _next_serial(self) -> int:
        serial = self._memory.serial
        if serial is None:
            row = self._connection.execute("select next from serial where device = ?", (self.device,)).fetchone()
            if row is None and (self.device == 0 or self._any_charge()):
                raise self._corrupt("the counter of serials is gone")
            serial = self._memory.serial = 0 if row is None else int(row[0])
        return serial

    def _take_serials(self, n: int) -> range:
        first = self._next_serial()
        done = self._connection.execute("update serial set next = ? where device = ?", (first + n, self.device))
        if not done.rowcount:
            self._connection.execute("insert into serial (device, next) values (?, ?)", (self.device, first + n))
        self._memory.serial = first + n
        return range(first, first + n)

    def _wait(self, task: bytes, samples: Iterable[tuple[int, bytes]]) -> None:
        self._connection.executemany(
            "insert into waiting (device, task, serial, body) values (?, ?, ?, ?)",
            [(self.device, task, serial, body) for serial, body in samples],
        )

    def _discard(self, serials: Iterable[int]) -> None:
        self._connection.executemany(
            "delete from waiting where device = ? and serial = ?", [(self.device, serial) for serial in serials]
        )

    def _written(self, task: bytes, seq: int) -> bool:
        if seq >= self._next_seq(task):
            return False
        return bool(
            self._read("select 1 from outbox where device = ? and task = ? and seq = ?", self.device, task, seq)
        )

    def _check(
        self,
        task: bytes,
        charges: Sequence[Charge],
        budgets: Iterable[Budget],
        step: _Step | None,
        at: int | None,
        take: int,
    ) -> None:
        if step is None:
            return
        start = _start(charges) if at is None else at
        name, after = _name(task), start + step.spans[-1][1]
        stray = next((charge for charge in charges if charge.task != task), None)
        if stray is not None:
            raise LedgerError(
                f"a step of task {name} holds a charge of task {_name(stray.task)}. {NOTHING_SENT} "
                "Write each task's step by itself."
            )
        if after >= self._next_serial() + take:
            raise LedgerError(
                f"task {name}: a charge covers serial {after}, and {self._next_serial()} is the next to be handed out. "
                f"{NOTHING_SENT} Number the samples with `take_serials` first."
            )
        held = [budget for budget in budgets if budget.task in (None, task)]
        if not held:
            raise BudgetExhausted(
                "No budget was given, and without one nothing is allowed. Nothing was sent. "
                f"Set one with `{self._budget_command}`."
            )
        for budget in held:
            self._check_one(start, budget, step)

    @property
    def _budget_command(self) -> str:
        """The command that changes the owner's budget, as they can paste it."""
        folder = os.path.dirname(self.path)
        return "crowdml budget set" + (f" --folder {shlex.quote(folder)}" if folder else "")

    def _check_one(self, start: int, budget: Budget, step: _Step) -> None:
        """The sentences name no task: a device works for one at a time, and its owner does not know it by its hash."""
        if budget.task is None:
            whose = "of your budget for all tasks"
            remedy = f"Raise it with `{self._budget_command}`, or leave the task."
        else:
            whose, remedy = "of what the task itself may take", "Wait for new samples, or leave the task."
        seen = self._seen_by(budget.task)
        spans = [(start + first, start + last) for first, last in step.spans]

        new, samples_left = sum(seen.given.missing(*span) for span in spans), budget.samples - seen.given.size
        if new > max(0, samples_left):
            raise BudgetExhausted(
                f"This check-in gives {new} new samples, and {max(0, samples_left)} of {budget.samples} "
                f"are left {whose}. Nothing was sent. "
                + (remedy if budget.task is None else "The task has all that it asked for: leave it.")
            )

        if new == step.size:  # then no charge meets them
            before: list[Priced] = []
            top, allowed = step.verdict(budget.sample_filter)
        else:
            before = [priced for span in spans for priced in self._spans(budget.task, *span)]
            own = [(start + first, start + last, total) for first, last, total in step.shape]
            start, shape = _shape([*before, *own])
            top, allowed = _verdict(shape, budget.sample_filter)
        if not allowed:
            top = top[0] + start, top[1]
            paid = Total.of(total for a, b, total in before if a <= top[0] <= b)
            raise BudgetExhausted(
                f"This check-in costs sample {top[0]} {shortfall(budget.sample_filter, paid, top[1])} "
                f"{whose}. Nothing was sent. {remedy}"
            )

        cap, cost = budget.device_filter, step.device
        if cap is not None and not cap.allows(seen.device, cost):
            raise BudgetExhausted(
                f"This check-in costs the device {shortfall(cap, seen.device, seen.device + cost)} "
                f"{whose}. Nothing was sent. {remedy}"
            )

    def _spans(self, task: bytes | None, first: int, last: int, *, alone: bool = False) -> Iterator[Priced]:
        """The charges that meet serials first to last, cut to them."""
        wanted = {"device": self.device, "task": task, "first": first, "last": last}
        rows = self._connection.execute(_OVERLAPPING.format(loss=_ALONE if alone else "loss"), wanted)
        for loss, a, b, times in rows.fetchall():
            yield a, b, self._total(loss, times)

    def _add(self, task: bytes, charges: Sequence[Charge], step: _Step) -> None:
        """Write the charges, and bring up to date what is remembered: as if it had been read again."""
        self._connection.executemany(_INSERT_CHARGE, [(*_row(charge), self.device) for charge in charges])
        memory, start = self._memory, _start(charges)
        spans = [(start + first, start + last) for first, last in step.spans]
        everything = memory.seen.get(None)
        fresh = everything is not None and sum(everything.given.missing(*span) for span in spans) == step.size
        for whose, seen in memory.seen.items():
            if whose in (None, task):
                seen.device = _sum_of_two(seen.device, step.device)
                for first, last in spans:
                    seen.given.add(first, last)
        for whose, kept in memory.front.items():
            if whose in (None, task):
                if fresh:
                    found = [(serial + start, total) for serial, total in step.front]
                else:
                    found = self._front_between(whose, spans[0][0], spans[-1][1])
                known = [total for _, total in kept]
                if any(total not in known for _, total in found):
                    memory.front[whose] = undominated([*found, *kept])
                    memory.ceiling = None

    def _seen_by(self, task: bytes | None) -> _Seen:
        seen = self._memory.seen.get(task)
        if seen is None:
            whose = {"task": task, "device": self.device}
            spans = self._connection.execute(f"select first_sample, last_sample {_OF}", whose).fetchall()
            seen = self._memory.seen[task] = _Seen(self._device_total(task, "device_loss"), covered(spans))
        return seen

    def _device_total(self, task: bytes | None, column: str) -> Total:
        whose = {"task": task, "device": self.device}
        losses = self._connection.execute(f"select {column}, count(*) {_OF} group by 1", whose)
        return Total.of([self._total(loss, times) for loss, times in losses.fetchall()])

    def _any_masked(self) -> bool:
        """Whether a charge has a second number at all: where none has, the first is both."""
        return bool(self._read("select 1 from charge where device = ? and observer = 'aggregate' limit 1", self.device))

    def _extent(self, task: bytes | None) -> tuple[Any, Any]:
        """The first and the last serial that were charged; None of none."""
        return self._connection.execute(
            f"select min(first_sample), max(last_sample) {_OF}", {"task": task, "device": self.device}
        ).fetchone()

    def _front_of(self, task: bytes | None) -> list[tuple[int, Total]]:
        """Totals that no other dominates. They only grow, and only under new charges: `_add` looks where those lie."""
        front = self._memory.front.get(task)
        if front is None:
            first, last = self._extent(task)
            front = self._memory.front[task] = [] if first is None else self._front_between(task, first, last)
        return front

    def _front_between(self, task: bytes | None, first: int, last: int) -> list[tuple[int, Total]]:
        start, shape = _shape(self._spans(task, first, last))
        return [(serial + start, total) for serial, total in _front_of_shape(shape)]

    def _any_charge(self) -> bool:
        return bool(self._read("select 1 from charge where device = ? limit 1", self.device))

    def _loss(self, text: str) -> Loss:
        try:
            return _parse(text)
        except (GuaranteeError, ValueError) as error:  # not a loss, or one too long to read
            raise self._corrupt(f"a charge holds the loss {text!r}") from error

    def _total(self, text: str, times: int) -> Total:
        return _times(self._loss(text), times)

    def _charge(self, row: tuple[Any, ...]) -> Charge:
        task, mechanism, loss, device_loss, observer, adjacency, first, last, charged_at, alone, device_alone = row
        if alone is None and observer == Observer.AGGREGATE.value:
            alone = device_alone = str(Unbounded())  # from before it was kept
        return Charge(
            task,
            mechanism,
            self._loss(loss),
            self._loss(device_loss),
            Observer(observer),
            Adjacency(adjacency),
            first,
            last,
            charged_at,
            None if alone is None else self._loss(alone),
            None if device_alone is None else self._loss(device_alone),
        )

    # The file

    def _prepare(self, *, must_exist: bool) -> None:
        """Make the file where there is none. It gets its name when it is whole: half a ledger is never found."""
        path = Path(self.path)
        if path.exists():
            if os.name == "posix" and path.stat().st_mode & 0o077:
                path.chmod(0o600)
            return
        logs = (Path(f"{self.path}-wal"), Path(f"{self.path}-journal"))
        remains = [log for log in logs if log.exists() and log.stat().st_size]
        if must_exist or remains:
            found = f", though {remains[0]} is" if remains else ""
            raise LedgerError(
                f"the ledger {self.path} is not there{found}: what this device has given is not known. "
                f"Nothing was sent. {ASK_FOR_STATEMENT}"
            )
        import tempfile  # a device makes its ledger once

        handle, draft = tempfile.mkstemp(prefix=f"{path.name}.new-", dir=path.parent)  # mode 0600
        os.close(handle)
        try:
            connection = _connect(_uri(draft, "rw"))
            try:
                connection.execute("pragma synchronous = full")
                apply(connection, migrations())
            finally:
                connection.close()
            with contextlib.suppress(FileExistsError):  # another process was first: its ledger is the ledger
                os.link(draft, path)
        finally:
            os.unlink(draft)
        if os.name == "posix":
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    @contextlib.contextmanager
    def _transaction(self, kind: Literal["deferred", "immediate", "single"]) -> Generator[None]:
        """One transaction; inside `together`, a part of it that succeeds or fails by itself.

        What only reads (`deferred`) or makes a single change (`single`) has nothing to undo there.
        """
        with self._explained():
            inner = self._connection.in_transaction
            if inner and kind != "immediate":
                yield
                return
            begin, end, undo = "begin deferred" if kind == "deferred" else "begin immediate", "commit", ("rollback",)
            if inner:
                begin, end, undo = "savepoint step", "release step", ("rollback to step", "release step")
            self._connection.execute(begin)
            try:
                if not inner:
                    self._look_round()
                yield
                self._connection.execute(end)
            except BaseException:
                if self._connection.in_transaction:
                    with contextlib.suppress(sqlite3.Error):  # what was not committed is gone either way
                        for statement in undo:
                            self._connection.execute(statement)
                if kind != "deferred":  # what is remembered may not have been written
                    self._memory = _Memory()
                    self._shared.tasks.clear()
                raise

    def _look_round(self) -> None:
        """Forget what is remembered if another connection has written: once a transaction, within it."""
        version: int = self._connection.execute("pragma data_version").fetchone()[0]
        if version != self._shared.version:
            self._shared.version = version
            self._shared.forget()

    def _read(self, question: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows that answer a question which stands by itself."""
        with self._explained():
            return self._connection.execute(question, values).fetchall()

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        """Say in one sentence what the disk or SQLite said in a word."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._explain(error) from error
        except OSError as error:
            raise self._unwritten(error.strerror or str(error)) from error

    def _explain(self, error: sqlite3.Error) -> LedgerError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
            return self._unwritten(str(error))
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return LedgerError(
                f"the ledger {self.path} is in use by another process ({error}). {NOTHING_SENT} "
                "Stop the other one, or try again."
            )
        if isinstance(error, sqlite3.IntegrityError):
            return LedgerError(f"the ledger {self.path} refused: {error}. {NOTHING_SENT} Report this as a bug.")
        return self._corrupt(str(error))

    def _unwritten(self, reason: str) -> LedgerError:
        room = ""
        with contextlib.suppress(OSError):
            import shutil

            free = shutil.disk_usage(Path(self.path).resolve().parent).free
            room = f" There are {free:,} bytes free on its disk."
        return LedgerError(
            f"the ledger {self.path} could not be written: {reason}.{room} {NOTHING_SENT} "
            "Free some space, or check the folder's permissions, and try again."
        )

    def _corrupt(self, flaw: str) -> LedgerError:
        return LedgerError(f"the ledger {self.path} cannot be trusted: {flaw}. Nothing was sent. {ASK_FOR_STATEMENT}")


_INSERT_CHARGE = """
insert into charge (task, mechanism, loss, device_loss, unit, adjacency, observer, scope,
                    first_sample, last_sample, level, charged_at, alone, device_alone, device)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

_OUTBOX = "from outbox where device = ? and task = coalesce(?, task)"

_SENT = "select task, seq, hash, content, acknowledged, receipt"

_INSERT_OUTBOX = "insert into outbox (device, task, seq, body, hash, content) values (?, ?, ?, ?, ?, ?)"

_ADOPT = "insert into outbox (device, task, seq, body, hash, acknowledged) values (?, ?, ?, null, ?, 1)"

_WRITE_STATE = """
insert into state (device, task, body) values (?, ?, ?)
on conflict (device, task) do update set body = excluded.body
"""

_WRITE_ROUND = """
insert into round (device, task, number, body) values (?, ?, ?, ?)
on conflict (device, task) do update set number = excluded.number, body = excluded.body
"""

_WRITE_MEMORY = """
insert into memory (device, task, number, body) values (?, ?, ?, ?)
on conflict (device, task, number) do update set body = excluded.body
"""

# After a message was refused its number serves again: what was kept under later ones was not given under them.
_FORGET = "delete from memory where device = ? and task = ? and (number <= ? or number > ?)"

_WRITE_SOURCE = """
insert into source (device, name, taken) values (?, ?, ?)
on conflict (device, name) do update set taken = excluded.taken
"""

_ACKNOWLEDGE = """
update outbox set acknowledged = 1, body = null, receipt = ?
where device = ? and task = ? and seq = ? and acknowledged = 0
"""

_ALONE = "coalesce(alone, iif(observer = 'aggregate', 'unbounded', loss))"
_DEVICE_ALONE = "coalesce(device_alone, iif(observer = 'aggregate', 'unbounded', device_loss))"
"""What a charge costs if everyone else colludes: where that was not kept, nothing is promised."""

_OF = "from charge where device = :device and (:task is null or task = :task)"

# Each level that occurs, then a range of the index in each: a span of that level which meets the serials begins no
# more than 2^level before them.
_OVERLAPPING = """
with recursive present (level) as (
    select min(level) from charge where device = :device
    union all
    select (select min(level) from charge where device = :device and level > present.level)
    from present where present.level is not null
)
select {loss}, max(first_sample, :first), min(last_sample, :last), count(*)
from present cross join charge on charge.level = present.level
where device = :device and first_sample between :first - (1 << present.level) and :last and last_sample >= :first
  and (:task is null or task = :task)
group by 1, 2, 3
"""


def _row(charge: Charge) -> tuple[Any, ...]:
    return (
        charge.task,
        charge.mechanism,
        str(charge.loss),
        str(charge.device_loss),
        charge.unit,
        charge.adjacency.value,
        charge.observer.value,
        charge.scope,
        charge.first_sample,
        charge.last_sample,
        (charge.last_sample - charge.first_sample).bit_length(),
        charge.charged_at,
        None if charge.alone is None else str(charge.alone),
        None if charge.device_alone is None else str(charge.device_alone),
    )


def paid_in(ledgers: Sequence[Ledger], delta: float) -> Epsilons:
    """What the most expensive sample and the most expensive device of these ledgers have paid."""

    def most(totals: Iterable[Total | None]) -> float:  # devices that gave as much have equal totals
        return max((total.epsilon(delta) for total in set(totals) if total is not None), default=0.0)

    tops = [[each.dearest_sample(delta, alone=alone) for each in ledgers] for alone in (False, True)]
    samples = [most(None if top is None else top[1] for top in found) for found in tops]
    devices = [most(each.device_total(alone=alone) for each in ledgers) for alone in (False, True)]
    return Epsilons(samples[0], devices[0], samples[1], devices[1])


def _check_alone(charge: Charge) -> None:
    """A masked release names what it costs if everyone else colludes, which is no less; nothing else names it."""
    alone, device_alone = charge.alone, charge.device_alone
    if charge.observer is not Observer.AGGREGATE:
        if alone is not None or device_alone is not None:
            raise LedgerError(
                f"a charge seen by {charge.observer.value} names what it costs if everyone else colludes, and nobody "
                f"else stands in for it. {NOTHING_SENT} Leave it out."
            )
    elif alone is None or device_alone is None:
        raise LedgerError(
            "a charge of an aggregate does not say what it costs if everyone else colludes (review, R11). "
            f"{NOTHING_SENT} Pass `alone` and `device_alone` of its mechanism."
        )
    elif not (_covers(alone, charge.loss) and _covers(device_alone, charge.device_loss)):
        raise LedgerError(
            f"a charge costs {charge.loss} with honest others and {alone} with none, which is less. {NOTHING_SENT} "
            "Pass `alone` and `device_alone` of its mechanism."
        )
    elif not _covers(device_alone, alone):
        raise LedgerError(
            f"a charge costs one sample {alone} and the device {device_alone} if everyone else colludes, and to "
            f"replace all samples is to replace this one too. {NOTHING_SENT} Pass a device loss that is at least that."
        )


def _sent(row: tuple[Any, ...]) -> Sent:
    task, seq, hash_, content, acknowledged, receipt = row
    return Sent(task, seq, hash_, content, bool(acknowledged), receipt)


def _priced(charge: Charge) -> Priced:
    return charge.first_sample, charge.last_sample, _times(charge.loss, 1)


def _name(task: bytes) -> str:
    return task.hex()[:12]


def _is_utc(text: str) -> bool:
    try:
        return datetime.fromisoformat(text).utcoffset() == timedelta(0)
    except ValueError:
        return False


def _connect(target: str) -> sqlite3.Connection:
    return sqlite3.connect(target, uri=target.startswith("file:"), isolation_level=None, timeout=10.0)


def _uri(path: str, mode: str) -> str:
    return f"file:{quote(os.path.abspath(path))}?mode={mode}"


def ceiling(totals: Iterable[Total]) -> Total:
    """The least total that is at least each of these in every part: it costs no less than any of them, at any delta."""
    least = Total()
    for total in totals:
        if least.orders == total.orders:
            reached = list(zip(least.orders, map(max, least.values, total.values), strict=True))
        else:
            orders = tuple(sorted({*least.orders, *total.orders}))
            pairs = [(order, _renyi_at(least, order), _renyi_at(total, order)) for order in orders]
            reached = [(order, max(a, b)) for order, a, b in pairs if a is not None and b is not None]
        least = Total(
            max(least.pure, total.pure),
            max(least.squares, total.squares),
            max(least.zcdp, total.zcdp),
            tuple(order for order, _ in reached),
            tuple(value for _, value in reached),
            least.unbounded or total.unbounded,
        )
    return least


def _renyi_at(total: Total, order: int) -> Fraction | None:
    """Its Renyi losses at an order: those of the next one listed. None beyond the last, where nothing is known."""
    if not total.orders:
        return Fraction(0)
    return next((value for listed, value in zip(total.orders, total.values, strict=True) if listed >= order), None)


def _by_identity(work: Callable[[Total, Total], Total]) -> Callable[[Total, Total], Total]:
    """Remember the answers for totals that are the same objects: a device asks about the same few at every step."""
    found: dict[tuple[int, int], tuple[Total, Total, Total]] = {}  # which it keeps alive, so that no id is reused

    def ask(one: Total, other: Total) -> Total:
        known = found.get((id(one), id(other)))
        if known is None:
            if len(found) >= MOST_REMEMBERED:
                found.clear()
            known = found[id(one), id(other)] = one, other, work(one, other)
        return known[2]

    return ask


_ceiling_of_two = _by_identity(lambda one, other: ceiling([one, other]))
_sum_of_two = _by_identity(lambda one, other: one + other)


Shape = tuple[Priced, ...]
"""Spans from 0 on. Check-ins of one task look alike, so what is worked out of one serves for the next."""


def _shape(spans: Iterable[Priced]) -> tuple[int, Shape]:
    """Where the spans begin, and the spans moved to 0."""
    spans = tuple(spans)
    start = min((first for first, _, _ in spans), default=0)
    return start, tuple((first - start, last - start, total) for first, last, total in spans)


def _remembered(work: Callable[Concatenate[Shape, P], T]) -> Callable[Concatenate[Shape, P], T]:
    """Remember the answers for small shapes, those of a check-in: a whole ledger is asked about once."""
    remembered = lru_cache(maxsize=4096)(work)

    def ask(shape: Shape, *rest: P.args, **named: P.kwargs) -> T:
        return remembered(shape, *rest, **named) if len(shape) <= 64 else work(shape, *rest, **named)

    return ask


@_remembered
def _front_of_shape(shape: Shape) -> tuple[tuple[int, Total], ...]:
    return tuple(front(shape))


@_remembered
def _verdict(shape: Shape, sample_filter: Filter) -> tuple[tuple[int, Total], bool]:
    """The sample of the shape that is dearest to the filter, and whether the filter allows what it paid."""
    top = dearest(_front_of_shape(shape), lambda total: spent(sample_filter, total)) or (0, Total())
    return top, sample_filter.allows(Total(), top[1])


class _Step:
    """The charges of a step, as if its first sample had serial 0. Check-ins of a task look alike: worked out once."""

    def __init__(self, charges: Sequence[Charge]) -> None:
        self.losses = tuple((charge.loss, charge.device_loss) for charge in charges)  # alive, so that no id is reused
        self.shape = _shape(map(_priced, charges))[1]
        coverage = covered((first, last) for first, last, _ in self.shape)
        self.spans, self.size = tuple(coverage), coverage.size
        self.front = _front_of_shape(self.shape)
        self.ceiling = ceiling(total for _, total in self.front)
        self.device = Total.of(loss for _, loss in self.losses)
        self._verdicts: dict[int, tuple[Filter, tuple[tuple[int, Total], bool]]] = {}

    def verdict(self, sample_filter: Filter) -> tuple[tuple[int, Total], bool]:
        found = self._verdicts.get(id(sample_filter))
        if found is None:
            if len(self._verdicts) >= MOST_REMEMBERED:
                self._verdicts.clear()
            found = self._verdicts[id(sample_filter)] = sample_filter, _verdict(self.shape, sample_filter)
        return found[1]


_steps: dict[tuple[int, ...], _Step] = {}


def _step_of(charges: Sequence[Charge]) -> _Step:
    """By the identity of its losses, which a step keeps alive: to compare fractions would cost more than it saves."""
    start = _start(charges)
    key = tuple(
        part
        for charge in charges
        for part in (charge.first_sample - start, charge.last_sample - start, id(charge.loss), id(charge.device_loss))
    )
    step = _steps.get(key)
    if step is None:
        step = _Step(charges)
        if len(charges) <= 64:
            if len(_steps) >= MOST_REMEMBERED:
                _steps.clear()
            _steps[key] = step
    return step


def _start(charges: Sequence[Charge]) -> int:
    return min(charge.first_sample for charge in charges)


def _covers(whole: Loss, one: Loss) -> bool:
    """Whether the loss of all samples replaced at once is at least that of one, where both can be compared."""
    match whole, one:
        case Pure(), Pure():
            return whole.epsilon >= one.epsilon
        case ZCDP(), ZCDP():
            return whole.rho >= one.rho
        case Renyi(), Renyi() if whole.orders == one.orders:
            return all(map(ge, whole.values, one.values))
        case Renyi(), Renyi():
            total = Total.of([one])
            each = [(value, _renyi_at(total, order)) for order, value in zip(whole.orders, whole.values, strict=True)]
            return all(least is None or value >= least for value, least in each)
        case _:
            return isinstance(whole, Unbounded) or not isinstance(one, Unbounded)


_parse = lru_cache(maxsize=4096)(parse_loss)


@lru_cache(maxsize=4096)
def epsilon_of(total: Total, delta: float) -> float:
    """`total.epsilon(delta)`, remembered: a device asks about the same few totals at every step."""
    return total.epsilon(delta)


@lru_cache(maxsize=4096)
def _times(loss: Loss, times: int) -> Total:
    return Total.of([loss]).scaled(times)
