"""The server's store: the journal, and who and what the server knows. Tasks, devices, invitations, operators, events.

Plain functions over plain tables; each is one transaction. The caller passes the time: there is no clock in here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from crowdml.errors import CrowdmlError
from crowdml.storage.server.database import NOTHING_WRITTEN, StoreError, insert, utc
from crowdml.storage.server.journal import task_number
from crowdml.storage.server.letters import Letters
from crowdml.storage.server.rounds import add_event
from crowdml.storage.server.schema import (
    SERVER_NUMBER,
    admission,
    body,
    device,
    event,
    invitation,
    invitation_task,
    journal,
    last_statement,
    latest,
    letter,
    operator,
    place,
    point,
    publication,
    session,
    setting,
    snapshot,
    task,
    withdrawn,
)
from crowdml.wire.keys import device_id

State = Literal["draft", "running", "paused", "stopped"]
Reason = Literal["unknown-code", "used-up", "ended", "too-fast", "other-task", "revoked", "withdrawn"]

MOST_POINTS = 400
_NONE: frozenset[int] = frozenset()
SALT = "salt"
IS_DEVICE = device.c.number != SERVER_NUMBER


@dataclass(frozen=True)
class StoredTask:
    """A task as it was added: `canonical` has the SHA-256 `hash`, and neither ever changes."""

    hash: bytes
    name: str
    canonical: bytes
    state: State
    created_at: str
    changed_at: str
    closed: bool = False
    """Only devices that joined may read what it publishes."""


@dataclass(frozen=True)
class Device:
    """`public_key` and `enrolled_at` are None once it withdrew. `invitations` are the labels of those it used."""

    id: str
    public_key: bytes | None
    enrolled_at: str | None
    revoked_at: str | None
    withdrawn_at: str | None
    invitations: tuple[str, ...]

    @property
    def is_active(self) -> bool:
        return self.revoked_at is None and self.withdrawn_at is None


@dataclass(frozen=True)
class Invitation:
    """`rate` is enrolments an hour, None: any. No `tasks`: to every task. The code itself is not kept."""

    code_hash: bytes
    label: str
    uses: int
    used: int
    rate: int | None
    ends_at: str | None
    created_at: str
    tasks: tuple[bytes, ...]


@dataclass(frozen=True)
class Enrolment:
    """`is_new` is False where this key was enrolled before. `tasks`: see `Store.tasks_of`."""

    device: str
    is_new: bool
    tasks: tuple[bytes, ...]


class EnrolmentRefused(CrowdmlError):  # noqa: N818  # reads as the sentence it raises
    """An invitation does not let this device in; nothing changed. `retry_after` in seconds, where waiting helps."""

    def __init__(self, reason: Reason, sentence: str, retry_after: int | None = None) -> None:
        super().__init__(sentence)
        self.reason: Reason = reason
        self.retry_after = retry_after


@dataclass(frozen=True)
class Session:
    token_hash: bytes
    csrf: str
    operator: str
    ends_at: str


@dataclass(frozen=True)
class Event:
    id: int
    kind: str
    at: str
    task: bytes | None
    detail: str


@dataclass(frozen=True)
class Point:
    """A moment of a task's plots: the journal's index, the time, and the packed figures."""

    index: int
    at: str
    figures: bytes


@dataclass(frozen=True)
class Given:
    """A check-in as its owner sees it: its place in the journal of `task`, and the packed totals that it was signed
    with; None where those are erased."""

    task: bytes
    index: int
    seq: int
    hash: bytes
    chain: bytes
    statement: bytes | None
    received_at: str


@dataclass(frozen=True)
class Counts:
    """For metrics. `entries` is over all journals; `bodies` those not reduced."""

    tasks: dict[str, int]
    devices: int
    revoked: int
    withdrawn: int
    entries: int
    bodies: int
    snapshots: int
    publications: int
    invitations: int
    bytes: int


class Store(Letters):
    """Everything that the server keeps. See `Database` for how it is opened, `Journal` for check-ins, `Rounds` and
    `Letters`."""

    def check(self) -> dict[bytes, int]:
        """Read all that can be verified: pages, tables, chains, bodies, letters, snapshots, tasks, the devices' keys.

        How long each journal is.
        """
        self.check_pages()
        self.check_schema()
        self._check_keys()
        for each in self.tasks():
            if hashlib.sha256(each.canonical).digest() != each.hash:
                raise self.corrupt(f"task {each.name!r} is not the one that was added")
            self.last_snapshot(each.hash)
        self.check_letters()
        return {each.hash: self.verify_chain(each.hash).index for each in self.tasks()}

    def _check_keys(self) -> None:
        """A device's id is the hash of its key, and every device that did not withdraw has one."""
        query = sa.select(device.c.id, device.c.public_key).where(IS_DEVICE, device.c.withdrawn_at.is_(None))
        with self.reading() as connection:
            for row in connection.execute(query):
                if row.public_key is None or device_id(row.public_key) != row.id:
                    raise self.corrupt(f"the key of device {row.id} is another one")

    def server_name(self) -> str | None:
        """The id under which the server's own entries stand in the journal; None where there are none."""
        return self.read_value(sa.select(device.c.id).where(device.c.number == SERVER_NUMBER))

    # Tasks

    def add_task(self, canonical: bytes, name: str, at: str, state: State = "draft", *, closed: bool = False) -> bytes:
        """Add a task by its canonical bytes; its hash. The same bytes again change nothing."""
        digest, time = hashlib.sha256(canonical).digest(), utc(at)
        with self.writing() as connection:
            if connection.execute(sa.select(task.c.number).where(task.c.hash == digest)).scalar() is None:
                new = {"state": _state(state), "closed": int(closed), "created_at": time, "changed_at": time}
                insert(connection, task, hash=digest, name=name, canonical=canonical, **new)
        return digest

    def set_state(self, hash_: bytes, state: State, at: str) -> None:
        self._change_task(hash_, at, state=_state(state))

    def set_closed(self, hash_: bytes, closed: bool, at: str) -> None:
        """Whether only devices that joined may read what the task publishes."""
        self._change_task(hash_, at, closed=int(closed))

    def _change_task(self, hash_: bytes, at: str, **values: object) -> None:
        with self.writing() as connection:
            number = task_number(connection, hash_)
            connection.execute(task.update().where(task.c.number == number).values(changed_at=utc(at), **values))

    def add_point(self, hash_: bytes, index: int, at: str, figures: bytes) -> None:
        """Keep a moment of the plots. Above `MOST_POINTS` the one goes whose neighbours are nearest to each other.

        So points stay spread over the whole life of a task, within a factor of two; the first and the last stay.
        """
        with self.writing() as connection:
            number = task_number(connection, hash_)
            here = (point.c.task == number) & (point.c.index == index)
            if not connection.execute(point.update().where(here).values(figures=figures)).rowcount:
                connection.execute(point.insert().values(task=number, index=index, at=utc(at), figures=figures))
            query = sa.select(point.c.index).where(point.c.task == number).order_by(point.c.index)
            kept = list(connection.execute(query).scalars())
            if len(kept) > MOST_POINTS:
                _, gone = min((kept[place + 1] - kept[place - 1], kept[place]) for place in range(1, len(kept) - 1))
                connection.execute(point.delete().where(point.c.task == number, point.c.index == gone))

    def points(self, hash_: bytes) -> list[Point]:
        """Oldest first."""
        place = point.c.index.label("place")  # a row has an `index` of its own
        query = sa.select(place, point.c.at, point.c.figures).join(task, task.c.number == point.c.task)
        rows = self.read(query.where(task.c.hash == hash_).order_by(point.c.index))
        return [Point(row.place, row.at, row.figures) for row in rows]

    def task(self, hash_: bytes) -> StoredTask | None:
        found = self.read(sa.select(task).where(task.c.hash == hash_))
        return _task(found[0]) if found else None

    def tasks(self, state: State | None = None) -> list[StoredTask]:
        """All tasks, or those in a state, in the order in which they were added."""
        query = sa.select(task).order_by(task.c.number)
        return [_task(row) for row in self.read(query if state is None else query.where(task.c.state == state))]

    # Invitations

    def invite(self, code_hash: bytes, at: str, *, label: str = "", **terms: Any) -> None:
        """Add an invitation under the hash of its code, on the terms of `invite_many`."""
        if self.invitation(code_hash) is not None:
            raise StoreError(f"this code is an invitation already. {NOTHING_WRITTEN} Draw another code.")
        self.invite_many([(code_hash, label)], at, **terms)

    def invite_many(
        self,
        codes: Sequence[tuple[bytes, str]],
        at: str,
        *,
        uses: int = 1,
        ends_at: str | None = None,
        rate: int | None = None,
        tasks: Sequence[bytes] = (),
    ) -> None:
        """Add invitations, each by the hash of its code and with its label: all of them, or none.

        What is not kept cannot be stolen: of a code there is the hash alone.
        """
        if uses < 1 or (rate is not None and rate < 1):
            raise StoreError(
                f"an invitation of {uses} uses at {rate} an hour lets nobody in. {NOTHING_WRITTEN} "
                "Give at least one use, and a rate of at least one or none."
            )
        now, until = utc(at), None if ends_at is None else utc(ends_at)
        with self.writing() as connection:
            numbers = [task_number(connection, each) for each in dict.fromkeys(tasks)]
            for code_hash, label in codes:
                terms = {"uses": uses, "used": 0, "rate": rate, "ends_at": until, "created_at": now}
                number = insert(connection, invitation, code_hash=code_hash, label=label, **terms)
                for each in numbers:
                    insert(connection, invitation_task, invitation=number, task=each)

    def invitations(self) -> list[Invitation]:
        """Newest first."""
        with self.reading() as connection:
            rows = connection.execute(sa.select(invitation).order_by(invitation.c.number.desc())).all()
            to = _tasks_named(connection)
        return [_invitation(row, to.get(row.number, ())) for row in rows]

    def invitation(self, code_hash: bytes) -> Invitation | None:
        """The invitation of this code; None where there is none. It is not used by being looked at."""
        with self.reading() as connection:
            row = connection.execute(sa.select(invitation).where(invitation.c.code_hash == code_hash)).first()
            if row is None:
                return None
            to = sa.select(task.c.hash).join(invitation_task, invitation_task.c.task == task.c.number)
            to = to.where(invitation_task.c.invitation == row.number).order_by(task.c.number)
            return _invitation(row, connection.execute(to).scalars())

    # Devices

    def enrol(self, code_hash: bytes, public_key: bytes, at: str, wanted: Sequence[bytes] = ()) -> Enrolment:
        """Let a device in by an invitation; one use less, in the same transaction. Raises `EnrolmentRefused`.

        The same key by the same code again is the same enrolment, costs no use, and is answered even when the
        invitation has ended. A key that is enrolled may use another invitation, for its tasks; one that adds none to
        those that the device has is answered likewise, and no use is spent. Where a device asks for some tasks
        (`wanted`) and its invitations admit it to none of them, it is refused and no use is spent.
        """
        name, now = device_id(public_key), utc(at)
        with self.writing() as connection:
            row = connection.execute(sa.select(device).where(device.c.id == name)).first()
            if row is not None and (row.withdrawn_at or row.revoked_at):
                raise _closed(name, withdrew=row.withdrawn_at is not None)
            by = connection.execute(sa.select(invitation).where(invitation.c.code_hash == code_hash)).first()
            if by is None:
                raise _unknown_code()
            if row is None or self._adds_tasks(connection, by.number, row.number, name):
                _check_open(by.uses, by.used, by.ends_at, now)
                self._check_rate(connection, by, now)
                new = {"id": name, "public_key": public_key, "enrolled_at": now}
                number = row.number if row is not None else insert(connection, device, **new)
                insert(connection, admission, invitation=by.number, device=number, at=now)
                connection.execute(
                    invitation.update().where(invitation.c.number == by.number).values(used=invitation.c.used + 1)
                )
            admitted = self._tasks_of(connection, name)
            if wanted and not set(wanted) & set(admitted):
                raise EnrolmentRefused(  # and what was written above is taken back
                    "other-task", "This invitation does not admit to the task that was asked for. It was not used."
                )
            return Enrolment(name, row is None, admitted)

    def check_invitation(self, code_hash: bytes, at: str) -> Invitation:
        """The invitation of this code, if it would let a device in now. It is not used by being checked.

        Raises `EnrolmentRefused`. How many devices it lets in an hour is not looked at: whoever waits is let in.
        """
        found = self.invitation(code_hash)
        if found is None:
            raise _unknown_code()
        _check_open(found.uses, found.used, found.ends_at, utc(at))
        return found

    def _adds_tasks(self, connection: Connection, by: int, number: int, name: str) -> bool:
        """Whether this invitation admits an enrolled device to a task that its other invitations do not admit it to.

        One that names no task admits to all, those that come later included.
        """
        held = sa.select(admission.c.invitation).where(admission.c.device == number)
        names_none = ~sa.exists().where(invitation_task.c.invitation == admission.c.invitation)
        if connection.execute(sa.select(held.where((admission.c.invitation == by) | names_none).exists())).scalar():
            return False
        to = sa.select(task.c.hash).join(invitation_task, invitation_task.c.task == task.c.number)
        named = set(connection.execute(to.where(invitation_task.c.invitation == by)).scalars())
        return not named or not named <= set(self._tasks_of(connection, name))

    def _check_rate(self, connection: Connection, by: Any, now: str) -> None:
        if by.rate is None:
            return
        hour_ago = (datetime.fromisoformat(now) - timedelta(hours=1)).isoformat(timespec="microseconds")
        recent = sa.select(admission.c.at).where(admission.c.invitation == by.number, admission.c.at > hour_ago)
        times = list(connection.execute(recent.order_by(admission.c.at.desc()).limit(by.rate)).scalars())
        if len(times) >= by.rate:
            wait = datetime.fromisoformat(times[-1]) + timedelta(hours=1) - datetime.fromisoformat(now)
            seconds = max(1, int(wait.total_seconds()) + 1)
            raise EnrolmentRefused(
                "too-fast", f"This invitation lets in {by.rate} an hour. Try again in {seconds} s.", seconds
            )

    def tasks_of(self, device_id: str) -> tuple[bytes, ...]:
        """The tasks that the device's invitations name; every task where one of them names none."""
        with self.reading() as connection:
            return self._tasks_of(connection, device_id)

    def joined(self) -> dict[str, frozenset[bytes]]:
        """`tasks_of` every device that is active, at once; equal sets are one object, for a crowd has few of them."""
        with self.reading() as connection:
            every = frozenset(connection.execute(sa.select(task.c.hash)).scalars())
            named = _tasks_named(connection)
            held = sa.select(device.c.id, admission.c.invitation).join(admission, admission.c.device == device.c.number)
            by: dict[str, frozenset[int]] = {}
            for name, number in connection.execute(held.where(device.c.public_key.is_not(None))):
                by[name] = by.get(name, _NONE) | {number}
        sets: dict[frozenset[int], frozenset[bytes]] = {}
        for numbers in set(by.values()):
            found = [named.get(number) for number in numbers]
            tasks = every if None in found else frozenset(hash_ for each in found for hash_ in each or ())
            sets[numbers] = tasks
        return {name: sets[numbers] for name, numbers in by.items()}

    def _tasks_of(self, connection: Connection, name: str) -> tuple[bytes, ...]:
        held = (
            sa.select(admission.c.invitation)
            .join(device, device.c.number == admission.c.device)
            .where(device.c.id == name)
        )
        named = sa.select(invitation_task.c.task).where(invitation_task.c.invitation.in_(held))
        open_to_all = sa.exists(held.where(~sa.exists().where(invitation_task.c.invitation == admission.c.invitation)))
        query = sa.select(task.c.hash).where(task.c.number.in_(named) | open_to_all).order_by(task.c.number)
        return tuple(connection.execute(query).scalars())

    def device(self, device_id: str) -> Device | None:
        found = self._devices(device.c.id == device_id, limit=1)
        return found[0] if found else None

    def devices(self, after: str = "", limit: int = 100) -> list[Device]:
        """Devices in the order of their ids, those after `after`; a page at a time."""
        return self._devices(device.c.id > after, limit=limit)

    def contributors(self, hash_: bytes) -> int:
        """How many devices have checked in to this task, whatever became of them."""
        return self._contributors(hash_, latest.c.device != SERVER_NUMBER)

    def participants(self, hash_: bytes) -> int:
        """How many devices have checked in to this task and may go on: none that withdrew or was revoked."""
        stays = device.c.revoked_at.is_(None) & device.c.withdrawn_at.is_(None)
        return self._contributors(hash_, latest.c.device.in_(sa.select(device.c.number).where(stays, IS_DEVICE)))

    def _contributors(self, hash_: bytes, condition: Any) -> int:
        query = sa.select(sa.func.count()).select_from(latest).join(task, task.c.number == latest.c.task)
        with self.reading() as connection:
            return connection.execute(query.where(condition, task.c.hash == hash_)).scalar_one()

    def given(self, device_id: str, limit: int = 100) -> list[Given]:
        """What a device checked in, over all tasks, newest first; of one that withdrew, nothing."""
        at = journal.c.index.label("at")
        columns = (at, journal.c.seq, journal.c.hash, journal.c.chain, journal.c.statement, journal.c.received_at)
        here = (device.c.id == device_id) & device.c.withdrawn_at.is_(None)
        found: list[Given] = []
        with self.reading() as connection:
            number = connection.execute(sa.select(device.c.number).where(here)).scalar()
            if number is None:
                return []
            for row in connection.execute(self._tasks_given_to(number)).all():
                mine = (journal.c.task == row.number) & (journal.c.device == number)  # by the index of its entries
                query = sa.select(*columns).where(mine).order_by(journal.c.seq.desc()).limit(limit)
                found += [Given(row.hash, *each) for each in connection.execute(query)]
        return sorted(found, key=lambda each: (each.received_at, each.index), reverse=True)[:limit]

    def seqs(self, device_id: str) -> dict[bytes, int]:
        """How often a device has checked in to each task that it ever checked in to."""
        with self.reading() as connection:
            number = connection.execute(sa.select(device.c.number).where(device.c.id == device_id)).scalar()
            return {row.hash: row.seq for row in connection.execute(self._tasks_given_to(number))}

    @staticmethod
    def _tasks_given_to(number: int | None) -> sa.Select[Any, Any, Any]:
        every = latest.c.task.in_(sa.select(task.c.number))  # so that the key, which begins with the task, is used
        return (
            sa.select(task.c.number, task.c.hash, latest.c.seq)
            .join(latest, latest.c.task == task.c.number)
            .where(every, latest.c.device == number)
            .order_by(task.c.number)
        )

    def active_keys(self) -> dict[str, bytes]:
        """The public key of every device that may check in."""
        active = device.c.revoked_at.is_(None) & device.c.withdrawn_at.is_(None)
        rows = self.read(sa.select(device.c.id, device.c.public_key).where(active, IS_DEVICE))
        return {row.id: row.public_key for row in rows}

    def _devices(self, condition: Any, limit: int) -> list[Device]:
        with self.reading() as connection:
            rows = connection.execute(
                sa.select(device).where(condition, IS_DEVICE).order_by(device.c.id).limit(limit)
            ).all()
            return read_devices(connection, rows)

    def revoke(self, device_id: str, at: str) -> bool:
        """Take no check-in from this device any more; whether there is such a device. What it gave stays."""
        first = sa.func.coalesce(device.c.revoked_at, utc(at))
        return self.change(device.update().where(device.c.id == device_id, IS_DEVICE).values(revoked_at=first)) > 0

    def withdraw(self, device_id: str, at: str) -> bool:
        """Forget a device that leaves; whether there is such a device.

        Kept: what it had spent, under the hash of this server's salt and its id; and its journal entries (id, seq,
        hash), for the chain runs over them. Erased: its key, times, invitations and statements, and the bodies that
        no replay needs; the others go with the next `reduce`. What it said in a round of masking goes with the round;
        its letters go at once, and the place where it stood is free.
        """
        with self.writing() as connection:
            row = connection.execute(sa.select(device).where(device.c.id == device_id, IS_DEVICE)).first()
            if row is None:
                return False
            if row.withdrawn_at is not None:
                return True
            salt = connection.execute(sa.select(setting.c.value).where(setting.c.name == SALT)).scalar()
            if salt is None:
                salt = os.urandom(32)
                connection.execute(setting.insert().values(name=SALT, value=salt))
            last = (journal.c.task == row.last_task) & (journal.c.index == row.last_index)
            said = connection.execute(sa.select(journal.c.statement).where(last)).scalar()
            insert(connection, withdrawn, hash=_salted(salt, device_id), statement=said, withdrawn_at=utc(at))
            mine = (journal.c.device == row.number) & journal.c.task.in_(sa.select(task.c.number))  # by the index
            connection.execute(journal.update().where(mine).values(statement=None))
            connection.execute(admission.update().where(admission.c.device == row.number).values(device=None))
            connection.execute(last_statement.delete().where(last_statement.c.device == row.number))
            connection.execute(letter.delete().where(letter.c.device == row.number))
            connection.execute(place.update().where(place.c.device == row.number).values(device=None, last_at=None))
            connection.execute(
                device.update()
                .where(device.c.number == row.number)
                .values(public_key=None, enrolled_at=None, withdrawn_at=utc(at), last_task=None, last_index=None)
            )
            if row.last_task is not None and row.last_index not in self._spared(
                connection.connection.cursor(), row.last_task
            ):
                oldest = sa.select(sa.func.min(snapshot.c.index)).where(snapshot.c.task == row.last_task)
                connection.execute(
                    body.delete().where(
                        body.c.task == row.last_task,
                        body.c.index == row.last_index,
                        body.c.index <= oldest.scalar_subquery(),
                    )
                )
        self.cut_log()
        return True

    def spent_before(self, device_id: str) -> bytes | None:
        """The packed totals of a device that withdrew; None of one that did not, or gave nothing."""
        salt = self.setting(SALT)
        if salt is None:  # nobody has withdrawn
            return None
        return self.read_value(sa.select(withdrawn.c.statement).where(withdrawn.c.hash == _salted(salt, device_id)))

    # Settings

    def setting(self, name: str) -> bytes | None:
        return self.read_value(sa.select(setting.c.value).where(setting.c.name == name))

    def set_setting(self, name: str, value: bytes) -> None:
        with self.writing() as connection:
            if not connection.execute(setting.update().where(setting.c.name == name).values(value=value)).rowcount:
                connection.execute(setting.insert().values(name=name, value=value))

    # Operators and their sessions

    def set_operator(self, name: str, password: str, at: str) -> None:
        """Add an operator, or give one a new password (its argon2 hash); open sessions of that name end."""
        with self.writing() as connection:
            connection.execute(session.delete().where(session.c.operator == name))
            here = operator.c.name == name
            if not connection.execute(operator.update().where(here).values(password=password)).rowcount:
                connection.execute(operator.insert().values(name=name, password=password, created_at=utc(at)))

    def operator_password(self, name: str) -> str | None:
        return self.read_value(sa.select(operator.c.password).where(operator.c.name == name))

    def operators(self) -> list[str]:
        return [row.name for row in self.read(sa.select(operator.c.name).order_by(operator.c.name))]

    def open_session(self, opened: Session, at: str, known: str | None = None, renewed: str | None = None) -> bool:
        """Keep a session; those that ended are cleared away.

        `known`: the password (its argon2 hash) that was given. Where another holds by now nothing is kept: False.
        `renewed`: the same password hashed anew, which takes the place of `known`.
        """
        with self.writing() as connection:
            if known is not None:
                here = (operator.c.name == opened.operator) & (operator.c.password == known)
                if not connection.execute(operator.update().where(here).values(password=renewed or known)).rowcount:
                    return False
            connection.execute(session.delete().where(session.c.ends_at <= utc(at)))
            connection.execute(session.insert().values(dataclasses.asdict(opened) | {"ends_at": utc(opened.ends_at)}))
        return True

    def session(self, token_hash: bytes, at: str) -> Session | None:
        """The session of this token, unless it has ended."""
        here = (session.c.token_hash == token_hash) & (session.c.ends_at > utc(at))
        found = self.read(sa.select(session).where(here))
        return Session(*found[0]) if found else None

    def close_session(self, token_hash: bytes) -> None:
        self.change(session.delete().where(session.c.token_hash == token_hash))

    # Events, for the portal

    def record(self, kind: str, at: str, detail: str = "", task: bytes | None = None) -> int:
        """Write an event for people to read; its id. No sample and no secret goes in here. The last 10,000 stay."""
        with self.writing() as connection:
            number = None if task is None else task_number(connection, task)
            return add_event(connection, kind, detail, utc(at), number)

    def events(self, *, after: int = 0, task: bytes | None = None, limit: int = 100) -> list[Event]:
        """Newest first; those with an id above `after`."""
        about = _TASK_OF_EVENT
        query = sa.select(event, about.c.hash).join(about, about.c.number == event.c.task, isouter=True)
        query = query.where(event.c.id > after).order_by(event.c.id.desc()).limit(limit)
        rows = self.read(query if task is None else query.where(about.c.hash == task))
        return [Event(row.id, row.kind, row.at, row.hash, row.detail) for row in rows]

    # Numbers

    def counts(self) -> Counts:
        def many(connection: Connection, table: sa.Table, *where: Any) -> int:
            return connection.execute(sa.select(sa.func.count()).select_from(table).where(*where)).scalar_one()

        with self.reading() as connection:
            states = connection.execute(sa.select(task.c.state, sa.func.count()).group_by(task.c.state)).all()
            found: dict[str, int] = {row[0]: row[1] for row in states}
            last = sa.select(sa.func.max(journal.c.index)).where(journal.c.task == task.c.number).scalar_subquery()
            entries = connection.execute(sa.select(sa.func.sum(sa.func.coalesce(last, 0))).select_from(task)).scalar()
            counts = Counts(
                tasks={state: found.get(state, 0) for state in get_args(State)},
                devices=many(connection, device, IS_DEVICE),
                revoked=many(connection, device, device.c.revoked_at.is_not(None)),
                withdrawn=many(connection, device, device.c.withdrawn_at.is_not(None)),
                entries=int(entries or 0),
                bodies=many(connection, body),
                snapshots=many(connection, snapshot),
                publications=many(connection, publication),
                invitations=many(connection, invitation),
                bytes=0,
            )
        return dataclasses.replace(counts, bytes=self.size())


_TASK_OF_EVENT = task.alias("about")


def read_devices(connection: Connection, rows: Sequence[Any]) -> list[Device]:
    """The devices of these rows, each with the labels of the invitations that it used."""
    pairs = connection.execute(
        sa.select(admission.c.device, invitation.c.label)
        .join(invitation, invitation.c.number == admission.c.invitation)
        .where(admission.c.device.in_([row.number for row in rows]))
        .order_by(admission.c.id)
    ).all()
    labels: dict[int, list[str]] = {}
    for number, label in pairs:
        labels.setdefault(number, []).append(label)
    return [
        Device(
            row.id, row.public_key, row.enrolled_at, row.revoked_at, row.withdrawn_at, tuple(labels.get(row.number, ()))
        )
        for row in rows
    ]


def _tasks_named(connection: Connection) -> dict[int, list[bytes]]:
    """By the number of each invitation, the tasks that it names; one that admits to every task is not there."""
    pairs = sa.select(invitation_task.c.invitation, task.c.hash).join(task, task.c.number == invitation_task.c.task)
    named: dict[int, list[bytes]] = {}
    for number, hash_ in connection.execute(pairs.order_by(task.c.number)):
        named.setdefault(number, []).append(hash_)
    return named


def _task(row: Any) -> StoredTask:
    return StoredTask(row.hash, row.name, row.canonical, row.state, row.created_at, row.changed_at, bool(row.closed))


def _invitation(row: Any, to: Iterable[bytes]) -> Invitation:
    return Invitation(row.code_hash, row.label, row.uses, row.used, row.rate, row.ends_at, row.created_at, tuple(to))


def _salted(salt: bytes, name: str) -> bytes:
    return hashlib.sha256(salt + name.encode()).digest()


def _state(state: str) -> str:
    if state not in get_args(State):
        raise StoreError(f"a task cannot be {state!r}. {NOTHING_WRITTEN} It is one of {', '.join(get_args(State))}.")
    return state


def _unknown_code() -> EnrolmentRefused:
    return EnrolmentRefused("unknown-code", "No invitation has this code. Ask the operator for a new one.")


def _check_open(uses: int, used: int, ends_at: str | None, now: str) -> None:
    """Refuse an invitation that has ended or is used up."""
    if ends_at is not None and ends_at <= now:
        when = f"{datetime.fromisoformat(ends_at):%Y-%m-%d %H:%M} UTC"
        raise EnrolmentRefused("ended", f"This invitation ended on {when}. Ask the operator for a new one.")
    if used >= uses:
        times = "one device" if uses == 1 else f"{uses:,} devices"
        raise EnrolmentRefused("used-up", f"This invitation was for {times}, and is used up. Ask for a new one.")


def _closed(name: str, *, withdrew: bool) -> EnrolmentRefused:
    if withdrew:
        return EnrolmentRefused("withdrawn", f"Device {name} has withdrawn. To take part again, make a new key.")
    return EnrolmentRefused("revoked", f"Device {name} was revoked by the operator.")
