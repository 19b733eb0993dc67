"""A device as its runner knows it: key, ledger and budgets, its clock and its patience, and what a step costs it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Literal

from crowdml.device.folder import Folder
from crowdml.errors import CrowdmlError
from crowdml.price import Price
from crowdml.privacy.door import Passage
from crowdml.privacy.losses import Loss
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.sensitivity import Observer
from crowdml.protocol import Protocol
from crowdml.records import record
from crowdml.storage import Budget, Charge, Ledger
from crowdml.task import Task
from crowdml.wire.keys import Key
from crowdml.wire.statements import Statement

EndingKind = Literal["budget", "source", "limit", "stopped", "withdrawn", "revoked", "refused"]


@record
class Ending:
    """Why a device stopped, and the sentence for its owner."""

    kind: EndingKind
    reason: str


@record
class Clock:
    """The time, and how to let it pass."""

    now: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep

    def utc(self) -> str:
        return datetime.fromtimestamp(self.now(), UTC).isoformat()

    def local(self) -> datetime:
        return datetime.fromtimestamp(self.now())


@record
class Patience:
    """Capped exponential back-off with jitter: after the n-th failure, between half and all of first * 2^n seconds."""

    first: float = 1.0
    cap: float = 300.0

    def pause(self, failures: int, asked: float | None = None, *, chance: float) -> float:
        """Seconds to wait; at least what the server asked for, and then spread out, so that a crowd does not return at
        once. `chance`: a number drawn from [0, 1)."""
        grown = min(self.cap, self.first * 2.0 ** min(failures, 30))
        return grown * (0.5 + 0.5 * chance) if asked is None else asked + grown * chance


def chance() -> float:
    """Uniform in [0, 1), from the operating system."""
    return secrets.randbits(53) / 2**53


@record
class Member:
    """The device that a runner runs: its key, its ledger, and the server's key that receipts must be signed with."""

    key: Key
    ledger: Ledger
    server_key: bytes
    budgets: tuple[Budget, ...]
    recovered: bool = False
    """Whether its ledger began from a statement: then nobody knows which rows of which source were given."""
    exhausted: bool = False
    """Whether nobody knows what the device gave: then it gives nothing more."""
    exhaust: Callable[[], None] = lambda: None
    """Note in the folder, for good, that nobody knows what the device gave."""


def terms(folder: Folder, task: Task, protocol: Protocol) -> Callable[[Key, Ledger], Member]:
    """Makes members of a folder: with the task's budget and the owner's, which are fixed here for all of them.

    On doubt about what a device has given, nothing is allowed to it.
    """
    server, own, limit = folder.server, folder.budget, task.privacy.budget
    recovered, exhausted = folder.recovered, folder.exhausted
    if server is None:
        raise CrowdmlError(f"{folder.path} has not joined a server. Join with `crowdml join URL CODE`.")
    public = bytes.fromhex(server.key)
    owners = () if own is None else (own.to_give_under(),)
    tasks: dict[bytes | None, Budget] = {}
    if limit is not None:
        plan = Price.of(protocol, task).sample(task.privacy.uses)
        for whose in (task.hash, None):
            tasks[whose] = Budget(limit.epsilon, task.privacy.delta, limit.samples, task=whose, plan=plan)

    def member(key: Key, ledger: Ledger) -> Member:
        # After a lost ledger nobody knows which task took what: then all of it counts against this one.
        whose = None if ledger.device in recovered else task.hash
        budgets = (*((tasks[whose],) if tasks else ()), *owners)
        if ledger.device in exhausted:
            budgets = tuple(Budget(each.epsilon, each.delta, 0) for each in budgets)
        exhaust = partial(folder.note_recovery, frozenset[int](), frozenset((ledger.device,)))
        return Member(key, ledger, public, budgets, ledger.device in recovered, ledger.device in exhausted, exhaust)

    return member


Losses = Mapping[str, tuple[Loss, Loss]]
"""What each row of a table costs a sample and the device: worked out once."""


def charges_of(
    task: Task, passages: Iterable[Passage], first: int, now: str, losses: Losses | None = None
) -> list[Charge]:
    """What went through the door, bound to the serials of the batch whose first sample has serial `first`.

    `losses` are those of the table that the passages are of, where somebody has them at hand and they are always the
    same.
    """
    return [
        Charge(
            task.hash,
            passage.row,
            *(losses_of(passage.priced) if losses is None else losses[passage.row]),
            passage.mechanism.observer,
            passage.mechanism.sensitivity.adjacency,
            first + passage.part.start,
            first + passage.part.stop - 1,
            now,
            *_alone(passage.mechanism),
        )
        for passage in passages
    ]


def losses_of(mechanism: Mechanism) -> tuple[Loss, Loss]:
    return mechanism.loss, mechanism.device_loss


def _alone(mechanism: Mechanism) -> tuple[Loss | None, Loss | None]:
    """What a row costs if everyone else colludes, where that is not the loss itself (review, R11)."""
    if mechanism.observer is not Observer.AGGREGATE:
        return None, None
    return mechanism.alone, mechanism.device_alone


def statement_after(ledger: Ledger, charges: Sequence[Charge], samples: int) -> Statement:
    """The device's running totals once these charges on `samples` samples are written.

    What it names for the dearest sample bounds every sample's total at every delta: whoever reads it chooses one.
    """
    return Statement.of(*ledger.after(charges, samples))
