"""The samples that wait: b to B, stop at B, oldest first. One class for every shell.

Device Routine 1 of Hamm et al. 2015. The batch that leaves always has `batch` samples, so what a device sends does
not tell how many it sensed; what arrives while a check-out is under way waits for the next batch. Samples that arrive
at a full buffer are not collected.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from crowdml.arrays import Array, Samples, finite_or_zero, finite_samples
from crowdml.privacy.private import Private, Rows


class Buffer:
    """Serial numbers go with the samples: the first of a batch names its span in the ledger."""

    def __init__(self, batch: int, capacity: int) -> None:
        if not 1 <= batch <= capacity:
            raise ValueError(
                f"A buffer for batches of {batch} must hold at least {batch} samples; {capacity} is too few."
            )
        self._batch = batch
        self._capacity = capacity
        self._waiting: deque[tuple[int, Array, Array]] = deque()
        self._block: Samples | None = None
        """A batch that came as one, before what waits."""

    def __len__(self) -> int:
        return len(self._waiting) + (0 if self._block is None else self._batch)

    @property
    def full(self) -> bool:
        """Collection has stopped."""
        return len(self) >= self._capacity

    @property
    def ready(self) -> bool:
        """A batch can be taken."""
        return len(self) >= self._batch

    def add(self, serial: int, x: Array, y: Array) -> bool:
        """Keep a sample; false if the buffer is full and it was not collected. Not finite: kept as the zero sample."""
        if self.full:
            return False
        self._waiting.append((serial, finite_or_zero(np.asarray(x), rows=True), y))
        return True

    def fill(self, x: Array, y: Array) -> None:
        """Keep samples that have no serials yet, x [n, d] and y [n]: those that there is room for, in order."""
        room = self._capacity - len(self)
        samples = finite_samples(np.asarray(x)[:room], y[:room])
        if not self._waiting and self._block is None and len(samples) == self._batch:
            self._block = samples  # a whole batch: no need to take it apart
            return
        self._waiting.extend((-1, *each) for each in zip(samples.x, samples.y, strict=True))

    def take(self) -> tuple[tuple[int, ...], Private[Samples]]:
        """The oldest batch and its serials. It is gone from the buffer: a sample serves one check-in."""
        if not self.ready:
            raise ValueError(f"{len(self)} samples wait, and a batch has {self._batch}.")
        if self._block is not None:
            block, self._block = self._block, None
            return (-1,) * self._batch, Private(block, Rows(0, self._batch))
        serials, xs, ys = zip(*(self._waiting.popleft() for _ in range(self._batch)), strict=True)
        return serials, Private(Samples(np.stack(xs), np.stack(ys)), Rows(0, self._batch))
