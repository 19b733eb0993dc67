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
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from crowdml.errors import BudgetExhausted, LedgerError
from crowdml.price import Epsilons
from crowdml.privacy.budget import Allowance, Budget
from crowdml.privacy.losses import Total
from crowdml.privacy.spending import NOTHING_SENT, Charge, History, Refusal, Spent, Totals, task_name
from crowdml.records import record
from crowdml.storage.device.charges import ChargeTable
from crowdml.storage.device.file import LedgerFile


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


class _Shared:
    """What the views of one file have in common."""

    def __init__(self, path: str, *, must_exist: bool) -> None:
        self.views: dict[int, Ledger] = {}
        self.tasks: set[bytes] = set()
        """Those that have a row."""
        self.file = LedgerFile(path, self.forget, must_exist=must_exist)

    def forget(self) -> None:
        self.tasks.clear()
        for view in self.views.values():
            view._forget()


class Ledger:
    """The ledger of one device. A file that cannot be trusted or written is a `LedgerError`.

    `Ledger(":memory:")` forgets at the end. A file that is not there is made, readable by its owner alone; with
    `must_exist` it is an error, for a device that lost its ledger does not know what it has given (design, 3.3).
    """

    def __init__(self, path: str | os.PathLike[str], *, must_exist: bool = False) -> None:
        self._see(_Shared(os.fspath(path), must_exist=must_exist), 0)

    def of(self, device: int) -> Ledger:
        """The ledger of another device in the same file. Each has its own serials, charges, outbox and budgets."""
        if device < 0:
            raise LedgerError(f"there is no device {device}: devices of one file are numbered from 0. {NOTHING_SENT}")
        views = self._shared.views
        if device not in views:
            view: Ledger = Ledger.__new__(Ledger)
            view._see(self._shared, device)
        return views[device]

    def _see(self, shared: _Shared, device: int) -> None:
        """Become the view of one device of the file."""
        self.device, self._shared = device, shared
        self.path, self._connection, self._read = shared.file.path, shared.file.connection, shared.file.read
        self._charges = ChargeTable(shared.file, device)
        self._forget()
        shared.views[device] = self

    def _forget(self) -> None:
        """Read again what the rows say, when it is next asked for."""
        self._serial: int | None = None
        """The next one."""
        self._seqs: dict[bytes, int] = {}
        """The next one of a task."""
        self._history = History(self._charges)

    def _undone(self) -> None:
        """What is remembered was not written."""
        self._forget()
        self._shared.tasks.clear()

    def _transaction(self, kind: Literal["deferred", "immediate", "single"]) -> AbstractContextManager[None]:
        return self._shared.file.transaction(kind, self._undone)

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
        self._shared.file.connection.close()

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
                    f"task {task_name(task)}: a step wants serials from {take.start} on, and {self._next_serial()} is "
                    f"the next. {NOTHING_SENT} Look whether two processes share this ledger."
                )
            self._check(task, charges, budgets, None, 0 if take is None else len(take))
            write = self._connection.execute
            self._know(task)
            if take is not None:
                self._take_serials(len(take))
                self._wait(task, zip(take, keep, strict=True) if keep else ())
            if source is not None:
                write(_WRITE_SOURCE, (self.device, source, taken))
            if charges:
                self._history.add(task, charges)
            self._discard(given)
            for seq in done:
                write(_ACKNOWLEDGE, (None, self.device, task, seq))
            for seq, body in (outbox or {}).items():
                if self._written(task, seq):
                    raise LedgerError(
                        f"task {task_name(task)}: message {seq} was written before. {NOTHING_SENT} "
                        "Send the bytes of `resend`, or seal the new message under `next_seq`."
                    )
                content = None if contents is None else contents.get(seq)
                write(_INSERT_OUTBOX, (self.device, task, seq, body, hashlib.sha256(body).digest(), content))
                self._seqs[task] = max(seq + 1, self._next_seq(task))
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
                    f"task {task_name(task)}: message {seq} was acknowledged and never written here. Nothing was "
                    "changed. Look whether two devices share one key."
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
            self._seqs[task] = seq + 1

    def devices(self) -> tuple[int, ...]:
        """The devices of this file that have sealed a message."""
        return tuple(row[0] for row in self._read("select distinct device from outbox order by 1"))

    def state(self, task: bytes) -> bytes | None:
        """The protocol's state after its last step that was written; None before the first."""
        found = self._read("select body from state where device = ? and task = ?", self.device, task)
        return found[0][0] if found else None

    # Totals

    def after(self, charges: Sequence[Charge], samples: int) -> Totals:
        """What the device has given once these charges on `samples` samples are written: it signs that."""
        with self._transaction("deferred"):
            return self._history.spent().after(charges, samples)

    def check(
        self, task: bytes, charges: Sequence[Charge], budgets: Iterable[Budget], *, at: int | None = None, take: int = 0
    ) -> None:
        """Raise `BudgetExhausted` unless all the budgets allow this task these charges. Nothing is written.

        `at` moves them: as if the first of their samples had that serial. `take` is how many serials the step would
        take for its samples.
        """
        with self._transaction("deferred"):
            self._check(task, charges, budgets, at, take)

    def dearest_sample(self, delta: float, *, alone: bool = False) -> tuple[int, Total] | None:
        """The serial of a sample whose total is the greatest at this delta, and that total. None before any charge.

        `alone`: if everyone else colludes, which may be another sample.
        """
        with self._transaction("deferred"):
            return self._spent(alone=alone).dearest(delta)

    def device_total(self, *, alone: bool = False) -> Total:
        """What all releases together cost if all samples that this device ever gave are replaced.

        `alone`: and if everyone else colludes.
        """
        with self._transaction("deferred"):
            return self._spent(alone=alone).device

    def samples_given(self) -> int:
        """How many samples any release has used."""
        with self._transaction("deferred"):
            return self._history.spent().given.size

    def allowance(self, budget: Budget) -> Allowance:
        """What is left of a budget. A fresh sample has all of its epsilon; the dearest one, what is said here."""
        with self._transaction("deferred"):
            return self._history.spent(budget.task).allowance(budget)

    def charges(self, task: bytes | None = None) -> tuple[Charge, ...]:
        """What was charged, newest first."""
        return self._charges.listed(task)

    # Inside a transaction

    def _know(self, task: bytes) -> None:
        if task not in self._shared.tasks:
            self._connection.execute("insert into task (hash) values (?) on conflict do nothing", (task,))
            self._shared.tasks.add(task)

    def _next_seq(self, task: bytes) -> int:
        if task not in self._seqs:
            row = self._connection.execute(
                "select max(seq) from outbox where device = ? and task = ?", (self.device, task)
            ).fetchone()
            self._seqs[task] = 0 if row[0] is None else row[0] + 1
        return self._seqs[task]

    def _next_serial(self) -> int:
        serial = self._serial
        if serial is None:
            row = self._connection.execute("select next from serial where device = ?", (self.device,)).fetchone()
            if row is None and (self.device == 0 or not self._charges.is_empty()):
                raise self._shared.file.corrupt("the counter of serials is gone")
            serial = self._serial = 0 if row is None else int(row[0])
        return serial

    def _take_serials(self, n: int) -> range:
        first = self._next_serial()
        done = self._connection.execute("update serial set next = ? where device = ?", (first + n, self.device))
        if not done.rowcount:
            self._connection.execute("insert into serial (device, next) values (?, ?)", (self.device, first + n))
        self._serial = first + n
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

    def _spent(self, *, alone: bool) -> Spent:
        return self._history.spent(alone=alone and self._charges.any_masked())

    def _check(
        self, task: bytes, charges: Sequence[Charge], budgets: Iterable[Budget], at: int | None, take: int
    ) -> None:
        if not charges:
            return
        refusal = self._history.refusal(task, charges, budgets, at=at)
        last = max([charge.last_sample for charge in charges])
        if at is not None:
            last += at - min([charge.first_sample for charge in charges])
        if last >= self._next_serial() + take:
            raise LedgerError(
                f"task {task_name(task)}: a charge covers serial {last}, and {self._next_serial()} is the next to be "
                f"handed out. {NOTHING_SENT} Number the samples with `take_serials` first."
            )
        if refusal is not None:
            raise self._refused(refusal)

    def _refused(self, refusal: Refusal) -> BudgetExhausted:
        """The sentences name no task: a device works for one at a time, and its owner does not know it by its hash."""
        folder = os.path.dirname(self.path)
        command = "crowdml budget set" + (f" --folder {shlex.quote(folder)}" if folder else "")
        if refusal.budget is None:
            return BudgetExhausted(
                f"No budget was given, and without one nothing is allowed. Nothing was sent. Set one with `{command}`."
            )
        if refusal.budget.task is None:
            whose, remedy = "of your budget for all tasks", f"Raise it with `{command}`, or leave the task."
        elif refusal.cap == "samples":
            whose, remedy = "of what the task itself may take", "The task has all that it asked for: leave it."
        else:
            whose, remedy = "of what the task itself may take", "Wait for new samples, or leave the task."
        return BudgetExhausted(f"This check-in {refusal.words} {whose}. Nothing was sent. {remedy}")


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


def paid_in(ledgers: Sequence[Ledger], delta: float) -> Epsilons:
    """What the most expensive sample and the most expensive device of these ledgers have paid."""

    def most(totals: Iterable[Total | None]) -> float:  # devices that gave as much have equal totals
        return max((total.epsilon(delta) for total in set(totals) if total is not None), default=0.0)

    tops = [[each.dearest_sample(delta, alone=alone) for each in ledgers] for alone in (False, True)]
    samples = [most(None if top is None else top[1] for top in found) for found in tops]
    devices = [most(each.device_total(alone=alone) for each in ledgers) for alone in (False, True)]
    return Epsilons(samples[0], devices[0], samples[1], devices[1])


def _sent(row: tuple[Any, ...]) -> Sent:
    task, seq, hash_, content, acknowledged, receipt = row
    return Sent(task, seq, hash_, content, bool(acknowledged), receipt)
