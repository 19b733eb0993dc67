"""A device's samples: read from their source, kept until a step gives them, and what that step writes of them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from crowdml.buffer import Buffer
from crowdml.device.commits import Commits
from crowdml.device.machine import Machine, Serving, Write, read_standing
from crowdml.device.sources import NO_MORE, Sample, SampleSource
from crowdml.errors import BudgetExhausted
from crowdml.storage import Batch, Waiting
from crowdml.task import Task
from crowdml.texts import count_text

if TYPE_CHECKING:
    from crowdml.device.learning import Learner


class Sensing:
    """The samples of one device and one task that wait to be given: in the ledger, or at their source.

    `learner`: where the device also learns for itself, from what it gave.
    """

    def __init__(
        self,
        machine: Machine,
        source: SampleSource,
        *,
        commit: Commits,
        tell: Callable[[str], None],
        learner: Learner | None = None,
        new_data: bool = False,
    ) -> None:
        self.machine, self.source, self.learner, self.ledger = machine, source, learner, machine.member.ledger
        self._commit, self._tell, self._new_data = commit, tell, new_data
        self._capacity = machine.protocol.capacity(machine.task)
        self.buffer = Buffer(machine.batch, self._capacity)
        self.is_lazy = False
        """Whether samples wait at their source, and are written down by the step that gives them."""
        self._place = 0
        self._bodies: list[bytes] = []
        """The samples that were read last, where they will have to wait here until they have served as often as they
        may, or are learned from."""
        self._sensed: dict[int, bytes] = {}
        """Those that wait in the buffer, by serial, where they are learned from."""
        self.changed, self.room = asyncio.Event(), asyncio.Event()
        self.ended: str | None = None
        self.failure: BaseException | None = None
        self._told_faults = 1

    def restore(self) -> Serving | None:
        """Samples that waited when this device last stopped, and the batch that has served and may serve again.

        A batch is one span: what lies before a gap is dropped.
        """
        serving, waiting = self._restore_serving(self.ledger.waiting(self.machine.task.hash))
        start = max((i for i in range(1, len(waiting)) if waiting[i].serial != waiting[i - 1].serial + 1), default=0)
        self.ledger.discard(each.serial for each in waiting[:start])
        self.buffer = Buffer(
            self.machine.batch, max(self._capacity, len(waiting))
        )  # one batch was under way beside a full one
        for each in waiting[start:]:
            self._keep_in_sight(each.serial, each.body)
            self.buffer.add(each.serial, *_unpack(each.body, self.machine.task))
        return serving

    def _keep_in_sight(self, serial: int, body: bytes) -> None:
        if self.learner is not None:
            self._sensed[serial] = body

    def _restore_serving(self, waiting: tuple[Waiting, ...]) -> tuple[Serving | None, tuple[Waiting, ...]]:
        """The batch that has served and may serve again; and what waits beside it."""
        kept = read_standing(self.ledger.state(self.machine.task.hash))
        first, served = kept.get("first", 0), kept.get("served", 0)
        if not served:
            return None, waiting
        span = range(first, first + self.machine.batch)
        again = Buffer(self.machine.batch, self.machine.batch)
        for each in waiting:
            if each.serial in span:
                again.add(each.serial, *_unpack(each.body, self.machine.task))
        serving = Serving(*again.take(), served) if again.ready and served < self.machine.uses else None
        if serving is None:
            self.ledger.discard(span)
        return serving, tuple(each for each in waiting if each.serial not in span)

    async def find_place(self) -> None:
        """Go to the first row of the source that no step has used."""
        place = self.source.place(self.ledger.sources())
        if self.machine.member.recovered and not place and not self._new_data:
            raise BudgetExhausted(_AGAIN)
        await self.source.skip(max(0, place - self.source.before))
        self._place = self.source.taken

    async def sense(self) -> None:
        """Fill the buffer while there is room; at a full one nothing is collected."""
        ledger, name = self.ledger, self.source.name
        try:
            await self.find_place()
            while True:
                room = (self.machine.batch if self.source.waits else self._capacity) - len(self.buffer)
                if room <= 0:
                    self.room.clear()
                    await self.room.wait()
                    continue
                samples = await self.source.read(room)
                self._tell_faults()
                if not samples:
                    self.ended = self.source.why_ended
                    break
                bodies = [_pack(sample) for sample in samples]
                taken = self.source.before + self.source.taken
                keep = partial(ledger.keep, self.machine.task.hash, bodies, source=name, taken=taken)
                serials = await self._commit(keep)
                for serial, body in zip(serials, bodies, strict=True):
                    self._keep_in_sight(serial, body)
                    self.buffer.add(serial, *_unpack(body, self.machine.task))
                self.changed.set()
        except Exception as error:  # the main loop raises it: a task of its own would swallow it
            self.failure = error
        self.ended = self.ended or NO_MORE
        self.changed.set()

    async def read(self) -> bool:
        """A batch of rows that stay at their source until they are charged; false where there are too few."""
        while not self.buffer.ready:
            samples = await self.source.read(self.machine.batch - len(self.buffer))
            self._tell_faults()
            if not samples:
                self.ended = self.source.why_ended
                return False
            x = np.array([sample.x for sample in samples], "<f4").reshape(len(samples), -1)
            self.buffer.fill(x, _labels([sample.y for sample in samples], self.machine.task))
            if self.machine.uses > 1 or self.learner is not None:
                self._bodies = [*self._bodies, *map(_pack, samples)][-self.machine.batch :]
        return True

    def why_ended(self) -> str:
        """The source's own sentence, and what is there and fills no batch: how much follows from the number of rows."""
        said, left = self.ended or NO_MORE, len(self.buffer)
        if not left:
            return said
        few = "is too few" if left == 1 else "are too few"
        waits = f"wait{'s' * (left == 1)} {'in the source' if self.is_lazy else 'in the folder'} for more"
        return (
            f"Every full batch was given.{said.removeprefix(NO_MORE)} {count_text(left, 'sample')} {few} for a "
            f"check-in of {self.machine.batch:,}, and {waits}."
        )

    def _tell_faults(self) -> None:
        """Tell the owner, at the first, tenth, hundredth, ... one, of rows that cannot be used."""
        faults = self.source.faults
        if faults.total >= self._told_faults:
            self._told_faults = 10 ** len(str(faults.total))
            self._tell(
                f"{count_text(faults.total, 'row')} of the source could not be used, for these reasons: {faults}"
            )

    # --- what a step writes of its samples ---

    def given(self, write: Write, trips: int) -> Mapping[str, Any]:
        """What the ledger is told of the samples of a step: they wait no more, or serve again."""
        used = write.used
        if used is None:
            return {"given": write.dropped}
        own, batches = self._own(used.serials, trips)
        step: dict[str, Any] = {"remember": own, "batches": batches}
        if not self.is_lazy or used.served:
            return {**step, "given": () if write.again else used.serials}
        step |= {"take": range(used.serials[0], used.serials[-1] + 1), "keep": self._bodies if write.again else []}
        return {**step, "source": self.source.name, "taken": self.source.before + self._place + len(used.serials)}

    def written(self, write: Write, step: Mapping[str, Any]) -> None:
        """What `given` said of a step is on disk."""
        if write.used is None:
            return
        self._bodies = []
        if "take" in step:
            self._place += len(write.used.serials)
        if self.learner is not None and step["remember"] is not None:
            self.learner.add(step["remember"])

    def _own(self, serials: Sequence[int], trips: int) -> tuple[Batch | None, int]:
        """The batch as it is kept to learn from, once it was predicted; and how many of them are kept."""
        learner = self.learner
        if learner is None:
            return None, 0
        bodies = self._bodies if self.is_lazy else [self._sensed.pop(serial) for serial in serials]
        samples = [_unpack(body, self.machine.task) for body in bodies]
        x, y = np.stack([x for x, _ in samples]), np.stack([y for _, y in samples])
        learner.judge(x, y)
        return learner.packed(trips, x, y, self.source.latest), learner.batches


_AGAIN = (
    "This device lost its ledger, and with it the note of which samples it gave: those of this source may have been "
    "given before. Nothing was sent. If none of them ever was, say so once with --new-data; if you do not know, name "
    "another source."
)


def _pack(sample: Sample) -> bytes:
    x = np.asarray(sample.x, "<f4").reshape(-1)
    return struct.pack("<d", float(sample.y)) + x.tobytes()


def _labels(ys: Sequence[float], task: Task) -> Any:
    """Labels [b] as the handlers see them; one that is no class is -1, which no model counts."""
    labels = np.array(ys, np.float64)
    if not task.classes:
        return labels.astype(np.float32)
    return np.where((labels >= 0) & (labels < task.classes), labels, -1).astype(np.int32)


def _unpack(body: bytes, task: Task) -> tuple[Any, Any]:
    (y,) = struct.unpack_from("<d", body)
    if not task.classes:
        return np.frombuffer(body, "<f4", offset=8), np.float32(y)
    return np.frombuffer(body, "<f4", offset=8), np.int32(y if 0 <= y < task.classes else -1)  # not a number: no class
