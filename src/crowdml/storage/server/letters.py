"""Places and letters in the server's store: who stands where, and what peers may still read of what was said there.

A letter is written in the transaction that appends its check-in to the journal: one is never there without the other.
Of each place the newest stay, so that what is kept is bounded by the task, not by how much devices say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import sqlalchemy as sa

from crowdml.storage.server.database import utc
from crowdml.storage.server.journal import Declined, Entry, JournalRow, task_number
from crowdml.storage.server.rounds import RoundStore
from crowdml.storage.server.schema import device, journal, letter, place
from crowdml.wire.letters import MOST_LETTERS, Letter

Claim = Literal["new", "again", "taken", "elsewhere", "unknown"]
"""What became of a claim. `taken`: by a device that is enrolled. `elsewhere`: this device holds another place."""


@dataclass(frozen=True)
class Standing:
    """A place, as people and the server see it. `device` is None where nobody holds it, or who did is gone."""

    place: int
    device: str | None
    letters: int
    bytes: int
    last_at: str | None
    newest: int
    """The index of the newest letter that is kept; 0 of none."""


class Letters(RoundStore):
    """The places of all tasks whose devices write to one another, and their letters."""

    def claim(self, task: bytes, number: int, device_id: str) -> Claim:
        """Let a device stand at a place, for good; one whose device was revoked or withdrew is free."""
        with self.writing() as connection:
            of = task_number(connection, task)
            enrolled = (device.c.id == device_id) & device.c.revoked_at.is_(None) & device.c.withdrawn_at.is_(None)
            me = connection.execute(sa.select(device.c.number).where(enrolled)).scalar()
            if me is None:
                return "unknown"
            mine = sa.select(place.c.place).where(place.c.task == of, place.c.device == me)
            held = connection.execute(mine).scalar()
            if held is not None:
                return "again" if held == number else "elsewhere"
            here = (place.c.task == of) & (place.c.place == number)
            row = connection.execute(
                sa.select(place.c.device, device.c.revoked_at, device.c.withdrawn_at)
                .select_from(place.outerjoin(device, device.c.number == place.c.device))
                .where(here)
            ).first()
            if row is None:
                connection.execute(place.insert().values(task=of, place=number, device=me, letters=0, bytes=0))
            elif row.device is None or row.revoked_at is not None or row.withdrawn_at is not None:
                connection.execute(place.update().where(here).values(device=me))
            else:
                return "taken"
            return "new"

    def standings(self, task: bytes) -> list[Standing]:
        """Every place that was ever held, in the order of the list."""
        newest = (
            sa.select(letter.c.place, sa.func.max(letter.c.index).label("newest"))
            .group_by(letter.c.task, letter.c.place)
            .add_columns(letter.c.task)
            .subquery()
        )
        active = device.c.revoked_at.is_(None) & device.c.withdrawn_at.is_(None)
        query = (
            sa.select(place, sa.case((active, device.c.id)).label("holder"), newest.c.newest)
            .select_from(
                place.outerjoin(device, device.c.number == place.c.device).outerjoin(
                    newest, (newest.c.task == place.c.task) & (newest.c.place == place.c.place)
                )
            )
            .order_by(place.c.place)
        )
        return [
            Standing(row.place, row.holder, row.letters, row.bytes, row.last_at, int(row.newest or 0))
            for row in self._of(task, place, query)
        ]

    def post(self, task: bytes, rows: Sequence[JournalRow], places: Sequence[int], keep: int) -> list[Entry | Declined]:
        """Append check-ins, each written at a place, and keep the newest `keep` of each place as letters.

        In ONE transaction: what is answered is on disk, in the journal and for its readers.
        """
        with self.writing() as connection:
            of = task_number(connection, task)
            answers = self._append(connection.connection.cursor(), task, rows)
            fresh = [
                (entry, row, where)
                for entry, row, where in zip(answers, rows, places, strict=True)
                if isinstance(entry, Entry) and entry.is_new
            ]
            if not fresh:
                return answers
            names = sa.select(device.c.id, device.c.number).where(device.c.id.in_({one[0].device for one in fresh}))
            numbers = {row.id: row.number for row in connection.execute(names)}
            if keep:
                connection.execute(
                    letter.insert(),
                    [
                        {"task": of, "index": entry.index, "place": where, "device": numbers[entry.device],
                         "signed": row.signed}
                        for entry, row, where in fresh
                    ],
                )  # fmt: skip
            for where in sorted({one[2] for one in fresh}):
                said = [row for _, row, at in fresh if at == where]
                connection.execute(
                    place.update()
                    .where(place.c.task == of, place.c.place == where)
                    .values(
                        letters=place.c.letters + len(said),
                        bytes=place.c.bytes + sum(len(row.signed) for row in said),
                        last_at=utc(said[-1].received_at),
                    )
                )
                here = (letter.c.task == of) & (letter.c.place == where)
                kept = sa.select(letter.c.index).where(here).order_by(letter.c.index.desc())
                oldest = connection.execute(kept.limit(1).offset(max(0, keep - 1))).scalar()
                if oldest is not None:
                    connection.execute(letter.delete().where(here, letter.c.index < oldest))
            return answers

    def check_letters(self) -> None:
        """Compare every letter with its entry in the journal."""
        query = (
            sa.select(letter.c.index.label("at"), letter.c.signed, journal.c.hash)
            .select_from(
                letter.outerjoin(journal, (journal.c.task == letter.c.task) & (journal.c.index == letter.c.index))
            )
            .order_by(letter.c.task, letter.c.index)
        )
        with self.reading() as connection:
            for row in connection.execute(query):
                if hashlib.sha256(row.signed).digest() != row.hash:
                    raise self.corrupt(f"the letter of entry {row.at} is not the one that was journalled")

    def letters(self, task: bytes, places: Sequence[int], after: int, upto: int) -> list[Letter]:
        """What was written at these places, in the order of the journal; the first ones, one more than an answer has.

        Nothing of a device that was revoked; of one that withdrew nothing is kept.
        """
        query = (
            sa.select(letter.c.index.label("at"), device.c.public_key, letter.c.signed)
            .join(device, device.c.number == letter.c.device)
            .where(letter.c.place.in_(places), letter.c.index > after, letter.c.index <= upto)
            .where(device.c.revoked_at.is_(None), device.c.public_key.is_not(None))
            .order_by(letter.c.index)
            .limit(MOST_LETTERS + 1)
        )
        return [Letter(row.at, row.public_key, row.signed) for row in self._of(task, letter, query)]
