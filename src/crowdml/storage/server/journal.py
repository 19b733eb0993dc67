"""The journal: every acknowledged check-in, once, in order, hash-chained; its snapshots, and what was published.

An entry is (device, seq, hash, chain); its statement, and its body, the signed envelope, stay until `reduce`.
`append` writes a batch in one transaction: what it answered is on disk. `tail` gives the bodies back in order, so that
the server's state is a fold over them from the last snapshot.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain as chain_of
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgpack
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from crowdml.storage.server.database import NOTHING_WRITTEN, Database, StoreError, insert, utc
from crowdml.storage.server.schema import (
    SERVER_NUMBER,
    body,
    device,
    journal,
    last_statement,
    publication,
    setting,
    snapshot,
    task,
)
from crowdml.wire.envelopes import Signed, open_signed
from crowdml.wire.packing import pack
from crowdml.wire.receipts import chain_next, chain_start
from crowdml.wire.statements import totals_fell

__all__ = [
    "Contribution",
    "Declined",
    "Entry",
    "Head",
    "Journal",
    "JournalRow",
    "Last",
    "Publication",
    "Reduced",
    "Snapshot",
    "kept_versions",
]  # fmt: skip

PAGE = 500
LARGEST = 2**63 - 1
_AT, _SNAPSHOT_AT = journal.c.index.label("at"), snapshot.c.index.label("at")  # a row has an `index` of its own
KEEP_VERSIONS = 64
STEP = 5_000
"""Entries whose statements are erased in one transaction."""
SPARED = "bodies spared/"
"""A setting of each task, by its number: the entries behind its newest snapshot whose bodies a round needs, packed."""
UNSAID = "statements erased/"
"""A setting of each task, by its number: up to which entry statements are erased, in digits."""


class JournalRow(NamedTuple):
    """A check-in to append. `hash` is the SHA-256 of `signed`, the signed envelope; `statement` its packed totals."""

    device: str
    seq: int
    hash: bytes
    signed: bytes
    statement: bytes
    received_at: str

    @staticmethod
    def of(signed: Signed, received_at: str) -> JournalRow:
        envelope = signed.envelope
        return JournalRow(envelope.sender, envelope.seq, signed.hash, signed.data, signed.said, received_at)


@dataclass(frozen=True, slots=True)
class Entry:
    """A check-in that is in the journal, as its receipt says it. `is_new` is False where it was there before."""

    device: str
    seq: int
    index: int
    hash: bytes
    chain: bytes
    is_new: bool


@dataclass(frozen=True)
class Declined:
    """A check-in that changed nothing.

    `other-bytes`: this seq is in the journal with another hash. `gap`: the next seq of this device is `expected`.
    `unknown`, `revoked`, `withdrawn`: the device is not, or no longer, enrolled. `fell`: its statement names less than
    that of the device's entry before it in this task.
    """

    device: str
    seq: int
    reason: Literal["other-bytes", "gap", "unknown", "revoked", "withdrawn", "fell"]
    expected: int


@dataclass(frozen=True)
class Head:
    """How long a task's journal is, and its chain there."""

    index: int
    chain: bytes


@dataclass(frozen=True)
class Last:
    """A device's last entry in a task."""

    seq: int
    hash: bytes
    index: int


@dataclass(frozen=True)
class Snapshot:
    """The server's state after the first `index` entries; `published` is whatever the runner offered then."""

    index: int
    chain: bytes
    state: bytes
    published: bytes


@dataclass(frozen=True)
class Publication:
    version: int
    kind: str
    body: bytes


@dataclass(frozen=True)
class Reduced:
    """What `reduce` did: bodies up to `index` are gone, `bodies` of them by this call, and later ones but for some."""

    index: int
    bodies: int


@dataclass(frozen=True)
class Contribution:
    """One body of a transcript. `sender` counts the devices in the order in which they appear: no identity, no time."""

    index: int
    sender: int
    kind: str
    body: bytes


class Journal(Database):
    """The journals of all tasks. A task is named by its hash; one that is not here is a `StoreError`."""

    # Append

    def append(self, task: bytes, rows: Sequence[JournalRow]) -> list[Entry | Declined]:
        """Append check-ins in order, in ONE transaction; answers row by row, durable when it returns.

        A new one gets the next index and the next link of the chain. The same seq and hash again is answered with the
        first entry: to append a batch again, because nobody knows how the last try ended, is safe.
        """
        for row in rows:
            _check(row)
        with self.writing() as connection:
            return self._append(connection.connection.cursor(), task, rows)

    def _append(self, cursor: Any, task: bytes, rows: Sequence[JournalRow]) -> list[Entry | Declined]:
        sql, times = self._sql, {time: utc(time) for time in {row.received_at for row in rows}}
        number = cursor.execute(sql["task"], (task,)).fetchone()
        if number is None:
            raise _no_task(task)
        number = number[0]
        head = cursor.execute(sql["head"], (number,)).fetchone()
        index, chain = head or (0, chain_start(task))
        known = self._known(cursor, number, {row.device for row in rows})
        answers: list[Entry | Declined] = []
        fresh: dict[tuple[str, int], Entry] = {}
        moved: dict[int, tuple[int, int, int, int, bytes]] = {}
        left: list[tuple[int, int]] = []
        unsaid: list[tuple[int, int]] = []
        entries: list[tuple[Any, ...]] = []
        bodies: list[tuple[Any, ...]] = []
        spoke: dict[int, int] = {}  # where in `entries` each device's last one is
        for name, seq, hash_, signed, statement, received_at in rows:
            found = known.get(name)
            if found is None or found[1] or found[2]:
                reason = "unknown" if found is None else "withdrawn" if found[2] else "revoked"
                answers.append(Declined(name, seq, reason, 0))
                continue
            writer, _, _, last, said, *pointer = found
            if writer in moved:
                last, said = moved[writer][2], entries[spoke[writer]][6]
            if seq > last + 1:
                answers.append(Declined(name, seq, "gap", last + 1))
            elif seq == last + 1 and said is not None and totals_fell(bytes(said), statement):
                answers.append(Declined(name, seq, "fell", last + 1))
            elif seq == last + 1:
                index, chain = index + 1, chain_next(chain, task, name, seq, hash_)
                fresh[name, seq] = entry = Entry(name, seq, index, hash_, chain, True)
                if writer not in moved and pointer[1] is not None:
                    left.append((pointer[0], pointer[1]))
                if writer not in moved and pointer[2] is not None:
                    unsaid.append((number, pointer[2]))
                moved[writer] = number, writer, seq, index, hash_
                place = spoke[writer] = len(entries)
                entries.append((number, index, writer, seq, hash_, chain, statement, times[received_at], place))
                bodies.append((number, index, signed))
                answers.append(entry)
            else:
                first = fresh.get((name, seq))
                if first is None:
                    found = cursor.execute(sql["entry"], (number, writer, seq)).fetchone()
                    first = Entry(name, seq, found[0], bytes(found[1]), bytes(found[2]), False)
                if first.hash != hash_:
                    answers.append(Declined(name, seq, "other-bytes", last + 1))
                else:
                    answers.append(replace(first, is_new=False))
        if entries:
            cursor.executemany(sql["insert"], entries)
            cursor.executemany(sql["body"], bodies)
            moves = [moved[writer] for writer in sorted(moved)]
            cursor.executemany(sql["latest"], moves)
            cursor.executemany(sql["pointer"], [(number, at, writer) for _, writer, _, at, _ in moves])
            reduced = dict(cursor.execute(sql["reduced"]).fetchall())
            stale = sorted(each for each in left if each[1] <= reduced.get(each[0], 0))
            if stale:
                spared = {of: self._spared(cursor, of) for of in {of for of, _ in stale}}
                stale = [each for each in stale if each[1] not in spared[each[0]]]
            if stale:  # they were kept as the last ones of their devices, and are so no more
                cursor.executemany(sql["forget"], stale)
            stale = sorted(each for each in unsaid if each[1] <= reduced.get(number, 0))
            if stale:  # likewise, as the last ones of their devices in this task
                cursor.executemany(sql["unsay"], stale)
        return answers

    def append_own(
        self, task: bytes, row: JournalRow, also: Callable[[Connection, int, Entry], None] | None = None
    ) -> Entry:
        """Append an entry of the server's own, with what `also` writes of it: one transaction."""
        with self.writing() as connection:
            entry = self.append_own_in(connection, task, row)
            if also is not None:
                also(connection, task_number(connection, task), entry)
            return entry

    def append_own_in(self, connection: Connection, task: bytes, row: JournalRow) -> Entry:
        """Append an entry of the server's own in a transaction that the caller ends."""
        known = connection.execute(sa.select(device.c.id).where(device.c.number == SERVER_NUMBER)).scalar()
        if known is None:
            insert(connection, device, number=SERVER_NUMBER, id=row.device)
        (answer,) = self._append(connection.connection.cursor(), task, [row])
        if not isinstance(answer, Entry) or not answer.is_new:
            raise StoreError(f"this is not the next entry of the server's own: {answer}. {NOTHING_WRITTEN}")
        return answer

    def _known(
        self, cursor: Any, number: int, names: set[str]
    ) -> dict[str, tuple[int, bool, bool, int, Any, Any, Any, Any]]:
        """For each enrolled device: its number, whether it was revoked or withdrew, its last seq and statement in this
        task, its last entry in any, and the place of its last entry in this one."""
        wanted = json.dumps([*names]) if self.is_sqlite else [*names]
        found = cursor.execute(self._sql["device"], (number, wanted)).fetchall()
        return {row[0]: (row[1], row[2] is not None, row[3] is not None, row[4] or 0, *row[5:]) for row in found}

    def _spared(self, cursor: Any, number: int) -> frozenset[int]:
        """Entries behind a snapshot whose bodies stay: a round of uploads still needs them."""
        found = cursor.execute(self._sql["setting"], (f"{SPARED}{number}",)).fetchone()
        return frozenset(() if found is None else msgpack.unpackb(bytes(found[0])))

    @property
    def _sql(self) -> Mapping[str, str]:
        return _SQLITE if self.is_sqlite else _POSTGRESQL

    # Read

    def _of(self, task: bytes, table: sa.Table, query: sa.Select[*tuple[Any, ...]]) -> Sequence[Any]:
        """The rows of a query, of those that one task has in this table."""
        with self.reading() as connection:
            return connection.execute(query.where(table.c.task == task_number(connection, task))).all()

    def statements(self, task: bytes, devices: set[str]) -> dict[str, bytes]:
        """The packed statement of each device's last entry in this task, where it has one."""
        with self.reading() as connection:
            known = self._known(connection.connection.cursor(), task_number(connection, task), devices)
        return {name: bytes(row[4]) for name, row in known.items() if row[4] is not None}

    def head(self, task: bytes) -> Head:
        """Where the task's journal stands; index 0 before the first entry."""
        with self.reading() as connection:
            number = task_number(connection, task)
            return self._head(connection, task, number)

    def _head(self, connection: Connection, task: bytes, number: int) -> Head:
        query = sa.select(_AT, journal.c.chain).where(journal.c.task == number)
        row = connection.execute(query.order_by(journal.c.index.desc()).limit(1)).first()
        return Head(0, chain_start(task)) if row is None else Head(row.at, row.chain)

    def last_seq(self, task: bytes, *, server: bool = False) -> dict[str, Last]:
        """Each device's last entry in this task, and the `server`'s own."""
        with self.reading() as connection:
            cursor = connection.connection.cursor()
            cursor.execute(self._sql["last"], (task_number(connection, task), -1 if server else SERVER_NUMBER))
            return {name: Last(seq, hash_, index) for name, seq, hash_, index in cursor.fetchall()}

    def entry(self, task: bytes, device_id: str, seq: int) -> Entry | None:
        """The entry behind a receipt; None where there is none."""
        query = (
            sa.select(_AT, journal.c.hash, journal.c.chain)
            .join(device, device.c.number == journal.c.device)
            .where(device.c.id == device_id, journal.c.seq == seq)
        )
        found = self._of(task, journal, query)
        return Entry(device_id, seq, found[0].at, found[0].hash, found[0].chain, False) if found else None

    def together(self, task: bytes, index: int) -> tuple[list[Entry], int]:
        """The entries that were committed with this one, in order, and its place among them."""
        with self.reading() as connection:
            number = task_number(connection, task)
            here = (journal.c.task == number) & (journal.c.index == index)
            place = connection.execute(sa.select(journal.c.place).where(here)).scalar()
            if place is None:
                raise StoreError(f"task {_short(task)} has no entry {index}. {NOTHING_WRITTEN} Name one that it has.")
            cursor = connection.connection.cursor()
            cursor.execute(self._sql["together"], (number, index - place, PAGE))
            rows: list[Any] = []
            for row in cursor.fetchall():
                if rows and row[5] == 0:
                    break
                rows.append(row)
        return [
            Entry(name, seq, at, bytes(hash_), bytes(chain), False) for name, seq, at, hash_, chain, _ in rows
        ], place

    def entries(self, task: bytes, after_index: int = 0) -> Iterator[Entry]:
        """Every entry after this one, oldest first, whether its body is kept or reduced."""
        for row in self._pages(task, after_index, _AT, device.c.id, journal.c.seq, journal.c.hash, journal.c.chain):
            yield Entry(row.id, row.seq, row.at, row.hash, row.chain, False)

    def tail(self, task: bytes, after_index: int = 0) -> Iterator[tuple[int, bytes]]:
        """The index and the body of every entry after this one, oldest first. A body that was reduced is an error.

        Reads a page at a time, so that a long replay neither holds memory nor stops the log from being cut.
        """
        return self._bodies(task, after_index)

    def _bodies(self, task: bytes, after_index: int, *where: Any) -> Iterator[tuple[int, bytes]]:
        for row in self._pages(task, after_index, _AT, body.c.signed, where=where):
            if row.signed is None:
                raise self._reduced(task, row.at)
            yield row.at, row.signed

    def bodies_at(self, task: bytes, places: Sequence[int]) -> Iterator[bytes]:
        """The bodies of these entries, which are in the order of the journal, a page at a time."""
        for start in range(0, len(places), PAGE):
            page = places[start : start + PAGE]
            query = sa.select(body.c.index.label("at"), body.c.signed).where(body.c.index.in_(page))
            found = {row.at: row.signed for row in self._of(task, body, query)}
            for place in page:
                if place not in found:
                    raise self._reduced(task, place)
                yield found[place]

    def senders_of(self, task: bytes, places: Sequence[int]) -> set[str]:
        """The devices whose entries these are."""
        found: set[str] = set()
        for start in range(0, len(places), PAGE):
            here = journal.c.index.in_(places[start : start + PAGE])
            query = sa.select(device.c.id).join(journal, journal.c.device == device.c.number).where(here)
            found.update(row.id for row in self._of(task, journal, query))
        return found

    def received_at(self, task_hash: bytes, index: int) -> str:
        """When an entry was journalled; 0: when the task came to this server."""
        query = sa.select(journal.c.received_at).join(task, task.c.number == journal.c.task)
        if not index:
            query = sa.select(task.c.created_at)
        here = query.where(task.c.hash == task_hash)
        return str(self.read(here.where(journal.c.index == index) if index else here)[0][0])

    def kept_bodies(self, task: bytes, after_index: int = 0) -> Iterator[tuple[int, bytes]]:
        """Like `tail`, but entries whose body was reduced are passed over: for figures, never for a replay."""
        for row in self._pages(task, after_index, _AT, body.c.signed):
            if row.signed is not None:
                yield row.at, row.signed

    @staticmethod
    def _reduced(task: bytes, index: int) -> StoreError:
        return StoreError(
            f"entry {index} of task {_short(task)} was reduced: its body is gone. {NOTHING_WRITTEN} "
            "Replay from a snapshot at or after it."
        )

    def totals(self, task: bytes, after_index: int = 0) -> Iterator[tuple[int, bytes]]:
        """Like `tail`, of the server's own entries alone: what it heard of the cohorts of a masked task."""
        return self._bodies(task, after_index, journal.c.device == SERVER_NUMBER)

    def totals_count(self, task: bytes, up_to: int | None = None) -> int:
        """How many entries of the server's own there are, or are among the first `up_to`."""
        query = sa.select(sa.func.max(journal.c.seq)).where(journal.c.device == SERVER_NUMBER)
        if up_to is not None:
            query = query.where(journal.c.index <= up_to)
        return int(self._of(task, journal, query)[0][0] or 0)

    def _pages(self, task: bytes, after: int, *columns: sa.ColumnElement[Any], where: Any = ()) -> Iterator[Any]:
        beside = (body.c.task == journal.c.task) & (body.c.index == journal.c.index)
        query = (
            sa.select(*columns)
            .select_from(journal.join(device, device.c.number == journal.c.device).join(body, beside, isouter=True))
            .where(*where)
            .order_by(journal.c.index)
            .limit(PAGE)
        )
        while True:
            page = self._of(task, journal, query.where(journal.c.index > after))
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1].at

    def statement(self, device_id: str) -> bytes | None:
        """The last signed envelope of the device over all tasks that has its running totals; None of none.

        That of its last check-in, or of what it said later in a round of masking. The body of a masked check-in is gone
        when its round is over: if the device said nothing after it, there is none.
        """
        query = (
            sa.select(body.c.signed)
            .join(device, (device.c.last_task == body.c.task) & (device.c.last_index == body.c.index))
            .where(device.c.id == device_id)
        )
        later = (
            sa.select(last_statement.c.signed)
            .join(device, device.c.number == last_statement.c.device)
            .where(device.c.id == device_id)
        )
        with self.reading() as connection:
            told, checked_in = connection.execute(later).scalar(), connection.execute(query).scalar()
        if told is None or checked_in is None:
            return told or checked_in
        # A check-in of another task may have come after the round: then what was said in the round names less.
        said, last = (open_signed(bytes(each)).statement.plain() for each in (told, checked_in))
        return checked_in if totals_fell(pack(last), pack(said)) else told

    # The chain

    def verify_chain(self, task: bytes, after: Head | None = None, upto: int = LARGEST, *, bodies: bool = True) -> Head:
        """Compute the chain anew over the journal, and raise where it differs from what is stored; the head.

        Every body that is kept must have the hash of its entry, no index may be missing, and each snapshot and each
        device's last entry must agree with the journal. `after` begins at a head that was verified before; `upto` ends
        there; without `bodies` they are not read.
        """
        at = after or Head(0, chain_start(task))
        index, chain = at.index, at.chain
        lasts: dict[str, Last] = {}
        for place, seq, hash_, stored, name, signed in self._chained(task, index, upto, bodies):
            index, chain = index + 1, chain_next(chain, task, name, seq, hash_)
            if place != index:
                raise self._broken(task, index, "is missing")
            if stored != chain:
                raise self._broken(task, index, "does not continue the chain")
            if signed is not None and hashlib.sha256(signed).digest() != hash_:
                raise self._broken(task, index, "has a body of another hash")
            if after is None:
                if seq != (lasts[name].seq + 1 if name in lasts else 1):
                    raise self._broken(task, index, f"has seq {seq} out of order")
                lasts[name] = Last(seq, hash_, place)
        for found in self._snapshot_heads(task):
            if at.index < found.index <= index and self._chain_at(task, found.index) != found.chain:
                raise self._broken(task, found.index, "has a snapshot of another chain")
        if after is None:
            now = self.last_seq(task, server=True)
            if any(last.index <= index and lasts.get(name) != last for name, last in now.items()) or set(lasts) - set(
                now
            ):
                raise self.corrupt(f"the last entries of task {_short(task)}'s devices are not those of its journal")
        return Head(index, chain)

    def _chained(
        self, task: bytes, after: int, upto: int, bodies: bool
    ) -> Iterator[tuple[int, int, bytes, bytes, str, bytes | None]]:
        """Every entry between: index, seq, hash, chain, device, body."""
        sql = self._sql["verify" if bodies else "verify chain"]
        while True:
            with self.reading() as connection:
                cursor = connection.connection.cursor()
                cursor.execute(sql, (task_number(connection, task), after, upto, PAGE))
                page = cursor.fetchall()
            yield from page
            if len(page) < PAGE:
                return
            after = page[-1][0]

    def _broken(self, task: bytes, index: int, flaw: str) -> StoreError:
        return self.corrupt(f"entry {index} of task {_short(task)}'s journal {flaw}")

    def _chain_at(self, task: bytes, index: int) -> bytes | None:
        if index == 0:
            return chain_start(task)
        found = self._of(task, journal, sa.select(journal.c.chain).where(journal.c.index == index))
        return found[0].chain if found else None

    # Snapshots

    def snapshot(
        self, task: bytes, index: int, chain: bytes, state: bytes, published: bytes = b"", spare: Collection[int] = ()
    ) -> None:
        """Keep the state after the first `index` entries. Its chain must be the journal's own there.

        `spare`: entries up to it whose bodies stay until the next snapshot, for a round needs them that is open here or
        was open at the snapshot before.
        """
        if (found := self._chain_at(task, index)) != chain:
            where = "has no such entry" if found is None else "has another chain there"
            raise StoreError(
                f"a snapshot of task {_short(task)} at entry {index}: the journal {where}. {NOTHING_WRITTEN} "
                "Fold the journal anew from the last snapshot."
            )
        digest = hashlib.sha256(state).digest()
        with self.writing() as connection:
            number = task_number(connection, task)
            here = (snapshot.c.task == number) & (snapshot.c.index == index)
            kept = connection.execute(sa.select(snapshot.c.state_hash).where(here)).scalar()
            if kept is not None and kept != digest:
                raise self._broken(task, index, "has a snapshot of another state: the fold did not repeat itself")
            if kept is None:
                kept_as = {"state": state, "state_hash": digest, "published": published, "verified": 0}
                insert(connection, snapshot, task=number, index=index, chain=chain, **kept_as)
                cursor = connection.connection.cursor()
                if spare or self._spared(cursor, number):
                    cursor.execute(self._sql["keep"], (f"{SPARED}{number}", pack(sorted(spare))))

    def last_snapshot(self, task: bytes, upto: int = LARGEST) -> Snapshot | None:
        """The newest snapshot at or before `upto`, its state and chain checked; None of none."""
        return self._snapshot(task, snapshot.c.index.desc(), upto)

    def oldest_snapshot(self, task: bytes) -> Snapshot | None:
        """The oldest snapshot kept: every body after it is there too."""
        return self._snapshot(task, snapshot.c.index, LARGEST)

    def _snapshot(self, task: bytes, order: Any, upto: int) -> Snapshot | None:
        query = sa.select(_SNAPSHOT_AT, snapshot).where(snapshot.c.index <= upto).order_by(order).limit(1)
        found = self._of(task, snapshot, query)
        if not found:
            return None
        row = found[0]
        if hashlib.sha256(row.state).digest() != row.state_hash:
            raise self._broken(task, row.at, "has a snapshot whose state is not what was written")
        if self._chain_at(task, row.at) != row.chain:
            raise self._broken(task, row.at, "has a snapshot of another chain")
        return Snapshot(row.at, row.chain, row.state, row.published)

    def _snapshot_heads(self, task: bytes) -> list[Head]:
        query = sa.select(_SNAPSHOT_AT, snapshot.c.chain).order_by(snapshot.c.index)
        return [Head(row.at, row.chain) for row in self._of(task, snapshot, query)]

    def reduce(self, task: bytes, upto_index: int, after: int = 0) -> Reduced:
        """Erase the bodies and statements behind a verified snapshot: those up to the newest at or before `upto_index`.

        What stays of each is its entry (device, seq, hash, chain). The body of a device's very last check-in also
        stays: it is the signed statement that a device without its ledger asks for. So does the statement of each
        device's last entry in this task: totals that are below it are refused. So do the bodies that `snapshot` was
        told to spare. Snapshots before that one go too; without a snapshot nothing does. Verified: its state has its
        hash, and the chain up to it was computed anew, from the snapshot that was verified last. Erases in steps, so
        that no check-in waits long, and begins after the entry `after`, for whoever knows that all before it was
        reduced and is done.
        """
        keep = self.last_snapshot(task, upto_index)
        if keep is None:
            return Reduced(0, 0)
        self.verify_chain(task, self._verified_head(task, keep.index), upto=keep.index, bodies=False)
        with self.writing() as connection:  # from here on no one starts before this snapshot
            number = task_number(connection, task)
            mine = snapshot.c.task == number
            connection.execute(snapshot.update().where(mine, snapshot.c.index == keep.index).values(verified=1))
            connection.execute(snapshot.delete().where(mine, snapshot.c.index < keep.index))
            spared = sorted(self._spared(connection.connection.cursor(), number))
        self._erase_statements(number, keep.index)
        gone = self._erase_bodies(number, after, keep.index, spared)
        self.cut_log()
        return Reduced(min([keep.index, *(each - 1 for each in spared[:1])]), gone)  # from there the next one looks

    def _verified_head(self, task: bytes, upto: int) -> Head | None:
        query = sa.select(_SNAPSHOT_AT, snapshot.c.chain).where(snapshot.c.verified == 1, snapshot.c.index <= upto)
        found = self._of(task, snapshot, query.order_by(snapshot.c.index.desc()).limit(1))
        return Head(found[0].at, found[0].chain) if found else None

    def _erase_statements(self, number: int, upto: int) -> None:
        """In steps, each a transaction that also keeps how far it came: a killed server goes on there. A device's last
        statement in this task stays, until `append` has a later one."""
        name = f"{UNSAID}{number}"
        kept = self.read_value(sa.select(setting.c.value).where(setting.c.name == name))
        low = 0 if kept is None else int(kept)
        while low < upto:
            low, after = min(upto, low + STEP), low
            with self.writing() as connection:
                cursor = connection.connection.cursor()
                cursor.execute(self._sql["unsay all"], (number, after, low))
                cursor.execute(self._sql["keep"], (name, b"%d" % low))

    def _erase_bodies(self, number: int, after: int, upto: int, spared: Sequence[int]) -> int:
        """In steps of a page, each a transaction; a device's last body stays, until `append` has a later one."""
        gone = 0
        while True:
            with self.writing() as connection:
                query = sa.select(body.c.index).where(body.c.task == number, body.c.index > after, body.c.index <= upto)
                page = list(connection.execute(query.order_by(body.c.index).limit(PAGE)).scalars())
                if not page:
                    return gone
                cursor = connection.connection.cursor()
                held = cursor.execute(self._sql["held"], (number, after, page[-1])).fetchall()
                spare = spared[bisect_right(spared, after) : bisect_right(spared, page[-1])]
                kept = sorted({*(row[0] for row in held), *spare})
                for low, high in pairwise([after, *kept, page[-1] + 1]):
                    if high - low > 1:
                        cursor.execute(self._sql["erase"], (number, low, high))
                gone += len(page) - len(kept)
                after = page[-1]

    def export_transcript(
        self, task: bytes, needs: Callable[[Snapshot], Sequence[int]] = lambda _: (), *, masked: bool = False
    ) -> tuple[Snapshot | None, Iterator[Contribution]]:
        """The oldest snapshot kept (None: the journal's beginning) and every body since: what rebuilds the weights.

        `needs` says which entries before the snapshot its open round of uploads has: their bodies come first.

        Without identities or times: no signature, no statement, no device; senders are numbered as they appear. Of a
        masked task the server's totals: nothing else moved the weights.
        """
        start = self.oldest_snapshot(task)
        after, before = (0, ()) if start is None else (start.index, needs(start))
        since = self.totals(task, after) if masked else self.tail(task, after)
        first = zip(before, self.bodies_at(task, before), strict=True)
        return start, self._contributions(chain_of(first, since))

    def _contributions(self, bodies: Iterator[tuple[int, bytes]]) -> Iterator[Contribution]:
        senders: dict[str, int] = {}
        for index, signed in bodies:
            envelope = open_signed(signed).envelope
            sender = senders.setdefault(envelope.sender, len(senders) + 1)
            yield Contribution(index, sender, envelope.kind, envelope.body)

    # Publications

    def publish(self, task: bytes, published: Publication, keep: int = KEEP_VERSIONS) -> None:
        """Keep a version, and thin the older ones by the rule of `kept_versions`. A version never changes."""
        with self.writing() as connection:
            number = task_number(connection, task)
            mine = publication.c.task == number
            versions = sorted(connection.execute(sa.select(publication.c.version).where(mine)).scalars())
            if published.version in versions:
                here = mine & (publication.c.version == published.version)
                row = connection.execute(sa.select(publication.c.kind, publication.c.body).where(here)).one()
                if (row.kind, row.body) != (published.kind, published.body):
                    raise StoreError(
                        f"version {published.version} of task {_short(task)} was published with other bytes. "
                        f"{NOTHING_WRITTEN} Publish what changed under the next version."
                    )
                return
            insert(connection, publication, task=number, **asdict(published))
            newest = max([*versions, published.version])
            gone = set(versions) - set(kept_versions(versions, newest, keep))
            if gone:
                connection.execute(publication.delete().where(mine, publication.c.version.in_(gone)))

    def last_publication(self, task: bytes) -> Publication | None:
        return self._publication(task, sa.select(publication).order_by(publication.c.version.desc()).limit(1))

    def publication(self, task: bytes, version: int) -> Publication | None:
        """A version that is kept; None where it never was or was thinned."""
        return self._publication(task, sa.select(publication).where(publication.c.version == version))

    def _publication(self, task: bytes, query: sa.Select[*tuple[Any, ...]]) -> Publication | None:
        found = self._of(task, publication, query)
        return Publication(found[0].version, found[0].kind, found[0].body) if found else None


def kept_versions(versions: Sequence[int], newest: int, keep: int) -> list[int]:
    """The rule of thinning: all of the last `keep`; before them multiples of 2, then of 4, 8, ... each twice as far.

    A version of age a = newest - version, keep * 2^(k-1) <= a < keep * 2^k with k >= 1, stays if 2^k divides it. So at
    most keep / 2 + 1 stay of each such stretch, and what stays now was never dropped by an earlier thinning.
    """
    return [each for each in versions if each % (1 << ((newest - each) // keep).bit_length()) == 0]


def task_number(connection: Connection, hash_: bytes) -> int:
    number = connection.execute(sa.select(task.c.number).where(task.c.hash == hash_)).scalar()
    if number is None:
        raise _no_task(hash_)
    return number


def _no_task(hash_: bytes) -> StoreError:
    return StoreError(f"there is no task {_short(hash_)} in this database. {NOTHING_WRITTEN} Add it first.")


def _short(hash_: bytes) -> str:
    return hash_.hex()[:12]


def _check(row: JournalRow) -> None:
    if not (1 <= row.seq <= LARGEST and len(row.hash) == 32):
        raise StoreError(
            f"a check-in of seq {row.seq} and a hash of {len(row.hash)} bytes cannot be journalled. {NOTHING_WRITTEN} "
            "A seq counts from 1 and a hash has 32 bytes."
        )


# The hot path, by hand: a batch costs one transaction, four inserts of many rows and a look-up a device.
_SQLITE = {
    "task": "select number from task where hash = ?",
    "head": 'select "index", chain from journal where task = ? order by "index" desc limit 1',
    "device": """
        select d.id, d.number, d.revoked_at, d.withdrawn_at, l.seq, j.statement, d.last_task, d.last_index, l."index"
        from device d left join latest l on l.task = ? and l.device = d.number
        left join journal j on j.task = l.task and j."index" = l."index"
        where d.id in (select value from json_each(?))""",
    "entry": 'select "index", hash, chain from journal where task = ? and device = ? and seq = ?',
    "insert": """
        insert into journal (task, "index", device, seq, hash, chain, statement, received_at, place)
        values (?, ?, ?, ?, ?, ?, ?, ?, ?)""",
    "body": 'insert into body (task, "index", signed) values (?, ?, ?)',
    "latest": """
        insert into latest (task, device, seq, "index", hash) values (?, ?, ?, ?, ?)
        on conflict (task, device) do update
        set seq = excluded.seq, "index" = excluded."index", hash = excluded.hash""",
    "reduced": 'select task, max("index") from snapshot where verified = 1 group by task',
    "forget": 'delete from body where task = ? and "index" = ?',
    "unsay": 'update journal set statement = null where task = ? and "index" = ?',
    "unsay all": """
        update journal set statement = null where task = ? and "index" > ? and "index" <= ? and statement is not null
        and "index" <> (select l."index" from latest l where l.task = journal.task and l.device = journal.device)""",
    "setting": "select value from setting where name = ?",
    "keep": "insert into setting (name, value) values (?, ?) on conflict (name) do update set value = excluded.value",
    "pointer": "update device set last_task = ?, last_index = ? where number = ?",
    "held": """
        select j."index" from journal j join device d on d.number = j.device
        join body b on b.task = j.task and b."index" = j."index"
        where j.task = ? and j."index" > ? and j."index" <= ? and d.last_task = j.task and d.last_index = j."index"
        order by j."index" """,
    "erase": 'delete from body where task = ? and "index" > ? and "index" < ?',
    "together": """
        select d.id, j.seq, j."index", j.hash, j.chain, j.place from journal j join device d on d.number = j.device
        where j.task = ? and j."index" >= ? order by j."index" limit ?""",
    "verify": """
        select j."index", j.seq, j.hash, j.chain, d.id, b.signed
        from journal j join device d on d.number = j.device
        left join body b on b.task = j.task and b."index" = j."index"
        where j.task = ? and j."index" > ? and j."index" <= ? order by j."index" limit ?""",
    "verify chain": """
        select j."index", j.seq, j.hash, j.chain, d.id, null from journal j join device d on d.number = j.device
        where j.task = ? and j."index" > ? and j."index" <= ? order by j."index" limit ?""",
    "last": """
        select d.id, l.seq, l.hash, l."index" from latest l join device d on d.number = l.device
        where l.task = ? and l.device > ?""",
}
_POSTGRESQL = {name: sql.replace("?", "%s") for name, sql in _SQLITE.items()} | {
    "device": _SQLITE["device"].replace("in (select value from json_each(?))", "= any(%s)").replace("?", "%s")
}
