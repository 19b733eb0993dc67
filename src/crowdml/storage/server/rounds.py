"""Rounds of masking in the server's store: each change is one transaction, so that a restart goes on where it was.

A masked vector is a check-in like any other, in the journal and its chain. Its body goes as soon as the sum that has it
is kept, and with the round at the latest; the entry, with its hash, stays. The server's own totals are entries too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from crowdml.storage.server.database import ROUNDS_ABOVE, insert, utc
from crowdml.storage.server.journal import Declined, Entry, Journal, JournalRow, Publication, task_number
from crowdml.storage.server.schema import (
    body,
    device,
    event,
    last_statement,
    round_,
    round_message,
    round_sum,
    setting,
    task,
)

__all__ = [
    "ENDED", "MASKED", "MOST_EVENTS", "MOST_ROUNDS", "OpenRound", "RoundMessage", "RoundRow", "RoundStore", "add_event",
]  # fmt: skip

MASKED = "secagg/masked/1"
ENDED = ("summed", "abandoned")
NOBODY = {"roster": b"", "sharers": b"", "survivors": b""}
"""Who is in a round, before its cohort is fixed and once it ended."""
MOST_EVENTS = 10_000
MOST_ROUNDS = 10_000
"""Ended rounds of a task that are kept, for people to look at."""


class RoundMessage(NamedTuple):
    """What a device said in a round; `signed` is its envelope, where it has the device's totals after it masked."""

    round: int
    device: str
    kind: str
    body: bytes
    signed: bytes | None = None


@dataclass(frozen=True)
class RoundRow:
    """A round as people see it: times, and how many were there. `cause` is a word and `why` a sentence."""

    number: int
    phase: str
    opened_at: str
    fixed_at: str | None = None
    ended_at: str | None = None
    devices: int = 0
    shared: int = 0
    survived: int = 0
    version: int | None = None
    cause: str = ""
    why: str = ""


@dataclass(frozen=True)
class OpenRound:
    """All that is kept of a round that is not over. `said` has (device, kind, body), a masked vector by its hash.

    `sum` is the sum under masks of the vectors up to the entry `folded`; the others are in `masked_bodies`.
    """

    row: RoundRow
    roster: bytes
    sharers: bytes
    survivors: bytes
    publication: Publication | None
    said: tuple[tuple[str, str, bytes], ...]
    folded: int
    sum: bytes


class RoundStore(Journal):
    """The rounds of all tasks, beside their journals."""

    def take(
        self, task: bytes, rows: Sequence[JournalRow], masked: Sequence[tuple[int, bytes]], said: Sequence[RoundMessage]
    ) -> list[Entry | Declined]:
        """Append masked check-ins, each with its round and the hash of its vector, and keep what else was said.

        In ONE transaction: what is answered is on disk.
        """
        with self.writing() as connection:
            number = task_number(connection, task)
            answers = self._append(connection.connection.cursor(), task, rows) if rows else []
            notes = [
                (round_of, entry.device, MASKED, hash_, entry.index)
                for (round_of, hash_), entry in zip(masked, answers, strict=True)
                if isinstance(entry, Entry) and entry.is_new
            ]
            notes += [(each.round, each.device, each.kind, each.body, None) for each in said]
            numbers = _numbers(connection, {note[1] for note in notes})
            if notes:
                connection.execute(
                    round_message.insert(),
                    [
                        {"task": number, "round": of, "device": numbers[name], "kind": kind, "body": data, "index": at}
                        for of, name, kind, data, at in notes
                    ],
                )
            gone = [numbers[name] for _, name, kind, _, _ in notes if kind == MASKED]
            told = {numbers[each.device]: each.signed for each in said if each.signed is not None}
            if gone or told:
                connection.execute(last_statement.delete().where(last_statement.c.device.in_([*gone, *told])))
            if told:
                connection.execute(
                    last_statement.insert(), [{"device": one, "signed": signed} for one, signed in told.items()]
                )
            return answers

    def open_round(self, task: bytes, number: int, at: str) -> None:
        """Begin a round; its number was never used."""
        with self.writing() as connection:
            self._open_round(connection, task_number(connection, task), number, at)

    @staticmethod
    def _open_round(connection: Connection, of: int, number: int, at: str) -> None:
        fresh = {**_shown(RoundRow(number, "advertise", at)), **NOBODY, "cause": "", "why": ""}
        insert(connection, round_, task=of, number=number, opened_at=utc(at), **fresh)
        kept = sa.select(round_.c.number).where(round_.c.task == of).order_by(round_.c.number.desc())
        oldest = kept.limit(1).offset(MOST_ROUNDS).scalar_subquery()
        connection.execute(
            round_.delete().where(round_.c.task == of, round_.c.number <= oldest, round_.c.ended_at.is_not(None))
        )

    def change_round(
        self,
        task: bytes,
        row: RoundRow,
        *,
        roster: bytes,
        sharers: bytes,
        survivors: bytes,
        publication: Publication | None,
        without: Sequence[str] = (),
        then_open: int | None = None,
        at: str = "",
    ) -> None:
        """A round goes on to its next phase. `without`: devices whose adverts are dropped; `then_open`: the next round,
        opened at `at` in the same transaction."""
        with self.writing() as connection:
            number = task_number(connection, task)
            here = (round_.c.task == number) & (round_.c.number == row.number)
            values = {**_shown(row), "roster": roster, "sharers": sharers, "survivors": survivors}
            values["fixed_at"] = None if row.fixed_at is None else utc(row.fixed_at)
            if publication is not None:
                values |= {"version": publication.version, "kind": publication.kind, "publication": publication.body}
            connection.execute(round_.update().where(here).values(**values))
            if without:
                said = (round_message.c.task == number) & (round_message.c.round == row.number)
                numbers = _numbers(connection, set(without))
                connection.execute(round_message.delete().where(said, round_message.c.device.in_(numbers.values())))
            if then_open is not None:
                self._open_round(connection, number, then_open, at)

    def end_round(
        self, task: bytes, row: RoundRow, total: JournalRow | None = None, told: Sequence[tuple[str, str]] = (), *,
        keep_devices: bool = False,
    ) -> Entry | None:  # fmt: skip
        """A round is over: what devices said in it goes, bodies of masked vectors included, and a total is journalled.

        One transaction: after it the sum stands in the journal, and of each vector its hash alone. `told` are the kind
        and the detail of events for people. `keep_devices`: which devices are in the total stays known
        (`devices_in_totals`) until there is a total of a later version.
        """
        assert row.phase in ENDED
        assert row.ended_at is not None
        entry: Entry | None = None
        with self.writing() as connection:
            number = task_number(connection, task)
            if total is not None:
                entry = self.append_own_in(connection, task, total)
            self._forget_bodies(connection, number, row.number)
            connection.execute(round_sum.delete().where(round_sum.c.task == number, round_sum.c.round == row.number))
            gone = (round_message.c.task == number) & (round_message.c.round == row.number)
            if keep_devices:
                gone &= round_message.c.kind != MASKED
                here = (round_.c.task == number) & (round_.c.ended_at.is_(None) | (round_.c.version == row.version))
                kept = sa.select(round_.c.number).where(here)
                gone |= (round_message.c.task == number) & round_message.c.round.not_in(kept)
            connection.execute(round_message.delete().where(gone))
            ended = {**_shown(row), **NOBODY, "cause": row.cause, "why": row.why, "ended_at": utc(row.ended_at)}
            here = (round_.c.task == number) & (round_.c.number == row.number)
            connection.execute(round_.update().where(here).values(**ended, publication=None))
            for event_kind, detail in told:
                add_event(connection, event_kind, detail, utc(row.ended_at), number)
        self.cut_log()  # of the vectors, and of what else was said
        return entry

    @staticmethod
    def _forget_bodies(connection: Connection, number: int, of: int, upto: int | None = None) -> None:
        mine = (round_message.c.task == number) & (round_message.c.round == of) & round_message.c.index.is_not(None)
        if upto is not None:
            mine &= round_message.c.index <= upto
        indices = sa.select(round_message.c.index).where(mine)
        connection.execute(body.delete().where(body.c.task == number, body.c.index.in_(indices)))

    def keep_sums(self, task: bytes, sums: Sequence[tuple[int, int, bytes]]) -> None:
        """Keep the sums under masks of rounds, as (round, entry up to which, sum), and erase the bodies in them."""
        with self.writing() as connection:
            number = task_number(connection, task)
            for of, folded, data in sums:
                here = (round_sum.c.task == number) & (round_sum.c.round == of)
                changed = connection.execute(round_sum.update().where(here).values(folded=folded, sum=data))
                if not changed.rowcount:
                    connection.execute(round_sum.insert().values(task=number, round=of, folded=folded, sum=data))
                self._forget_bodies(connection, number, of, folded)
        self.cut_log()

    # Read

    def rounds(self, task_hash: bytes, limit: int = 100) -> list[RoundRow]:
        """The newest rounds, those under way included."""
        query = sa.select(round_).join(task, task.c.number == round_.c.task).where(task.c.hash == task_hash)
        return [_row(row) for row in self.read(query.order_by(round_.c.number.desc()).limit(limit))]

    def round_counts(self, task_hash: bytes) -> dict[str, int]:
        """How many of the rounds that are kept were summed ('summed'), and abandoned, by their cause.

        A round to which no device came is not counted: one is always open, also when a task ends.
        """
        query = (
            sa.select(round_.c.cause, sa.func.count())
            .join(task, task.c.number == round_.c.task)
            .where(task.c.hash == task_hash, round_.c.ended_at.is_not(None), round_.c.devices > 0)
            .group_by(round_.c.cause)
        )
        return {cause or "summed": count for cause, count in self.read(query)}

    def open_rounds(self, task_hash: bytes) -> list[OpenRound]:
        """Every round that is not over, oldest first."""
        with self.reading() as connection:
            number = task_number(connection, task_hash)
            mine = (round_.c.task == number) & round_.c.ended_at.is_(None)
            rows = connection.execute(sa.select(round_).where(mine).order_by(round_.c.number)).all()
            return [self._open(connection, number, row) for row in rows]

    @staticmethod
    def _open(connection: Connection, number: int, row: Any) -> OpenRound:
        said = (
            sa.select(device.c.id, round_message.c.kind, round_message.c.body)
            .join(device, device.c.number == round_message.c.device)
            .where(round_message.c.task == number, round_message.c.round == row.number)
            .order_by(device.c.id)
        )
        kept = sa.select(round_sum.c.folded, round_sum.c.sum)
        found = connection.execute(kept.where(round_sum.c.task == number, round_sum.c.round == row.number)).first()
        published = None if row.publication is None else Publication(row.version, row.kind, row.publication)
        return OpenRound(
            _row(row),
            row.roster,
            row.sharers,
            row.survivors,
            published,
            tuple((each.id, each.kind, each.body) for each in connection.execute(said)),
            0 if found is None else found.folded,
            b"" if found is None else found.sum,
        )

    def masked_bodies(self, task_hash: bytes, number: int, after: int) -> Iterator[tuple[int, str, bytes]]:
        """Entry, device and signed envelope of the masked vectors of a round after the entry `after`, one at a time."""
        while True:
            beside = (body.c.task == round_message.c.task) & (body.c.index == round_message.c.index)
            query = (
                sa.select(round_message.c.index.label("at"), device.c.id, body.c.signed)
                .join(device, device.c.number == round_message.c.device)
                .join(body, beside, isouter=True)
                .where(round_message.c.round == number, round_message.c.index > after)
                .order_by(round_message.c.index)
                .limit(1)
            )
            found = self._of(task_hash, round_message, query)
            if not found:
                return
            row = found[0]
            if row.signed is None:
                raise self.corrupt(f"a masked vector of round {number} is in no sum, and its body is gone")
            yield row.at, row.id, row.signed
            after = row.at

    def devices_in_totals(self, task_hash: bytes, version: int) -> set[str]:
        """The devices in the totals that answer this version, of rounds that were ended with `keep_devices`."""
        ended = (round_.c.task == round_message.c.task) & (round_.c.number == round_message.c.round)
        query = sa.select(device.c.id).join(round_message, round_message.c.device == device.c.number)
        mine = query.join(round_, ended).where(round_.c.version == version, round_.c.phase == "summed")
        return {row.id for row in self._of(task_hash, round_, mine)}

    def last_round(self, task_hash: bytes) -> int:
        """The highest number that a round of this task may ever have had; 0 of none.

        Of a restored database it is what `restore` wrote down, for the rounds since its backup are not in it.
        """
        query = sa.select(sa.func.max(round_.c.number)).join(task, task.c.number == round_.c.task)
        restored = sa.select(setting.c.value).where(setting.c.name == ROUNDS_ABOVE)
        with self.reading() as connection:
            kept = int(connection.execute(query.where(task.c.hash == task_hash)).scalar() or 0)
            return max(kept, int(connection.execute(restored).scalar() or 0))


def add_event(connection: Connection, kind: str, detail: str, at: str, of: int | None) -> int:
    """Write an event for people to read; its id. The last 10,000 stay."""
    written = insert(connection, event, kind=kind, at=at, task=of, detail=detail)
    if written % 100 == 0:
        connection.execute(event.delete().where(event.c.id <= written - MOST_EVENTS))
    return int(written)


def _numbers(connection: Connection, names: set[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    wanted = sorted(names)
    for at in range(0, len(wanted), 500):
        query = sa.select(device.c.id, device.c.number).where(device.c.id.in_(wanted[at : at + 500]))
        found |= {row.id: row.number for row in connection.execute(query)}
    return found


def _shown(row: RoundRow) -> dict[str, Any]:
    """What stands in the table of how far a round is."""
    return {name: getattr(row, name) for name in ("phase", "devices", "shared", "survived")}


def _row(row: Any) -> RoundRow:
    return RoundRow(
        row.number, row.phase, row.opened_at, row.fixed_at, row.ended_at, row.devices, row.shared, row.survived,
        row.version, row.cause, row.why,
    )  # fmt: skip
