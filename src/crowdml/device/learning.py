"""What a device learns for itself, of its own samples and of what it heard, and what it says to its owner alone.

Models and predictions come from raw samples: each of them published would be a release that nobody charged (review,
P6). So nothing of this is in a message, and what is kept of it lies in the device's own folder.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from crowdml.arrays import finite_samples
from crowdml.errors import ProtocolError, TaskError
from crowdml.protocol import Kept, Protocol
from crowdml.records import record
from crowdml.storage import Batch, Ledger
from crowdml.task import Task
from crowdml.texts import count_text, one_line, size_text
from crowdml.turn import first_device_turn
from crowdml.wire.packing import pack
from crowdml.wire.states import unpack_state

if TYPE_CHECKING:
    from crowdml.device.letters import Post
    from crowdml.models.clusters import Voters


@record
class Score:
    """How often this device's own predictions were right: each sample is predicted before it is learned from."""

    right: int = 0
    guessed: int = 0

    @property
    def share(self) -> float | None:
        return self.right / self.guessed if self.guessed else None


@record
class Forecast:
    """What the votes say comes next: the class, how many of this device's models say so, and how many there are.

    `weight` is the part of all votes that is for it, from 0 to 1, where the device's own labels weigh them; else None.
    """

    label: int
    votes: int
    models: int
    weight: float | None = None


@record
class _Held:
    """A batch that was given: x [b, d], y [b], and the newest window when it was, whose label was not known yet."""

    number: int
    x: Any
    y: Any
    latest: Any


class Learner:
    """One device's memory of a task: the samples of its last batches, and what it made of them."""

    def __init__(
        self, task: Task, protocol: Protocol, kept: Sequence[Batch] = (), plain: Mapping[str, Any] | None = None
    ) -> None:
        self.task, self.protocol = task, protocol
        self.batches = protocol.keeps(task)
        plain = plain or {}
        self.seed: int = plain.get("seed") or secrets.randbits(62) + 1
        """Where searches start: from the operating system, once. It is no secret, and no noise."""
        self.score = Score(plain.get("right", 0), plain.get("guessed", 0))
        self._held: deque[_Held] = deque((self._opened(each) for each in kept), maxlen=self.batches)
        self._voters: Voters | None = None

    @property
    def has_samples(self) -> bool:
        """Whether there is anything to learn from."""
        return bool(self._held)

    def plain(self) -> dict[str, int]:
        return {"guessed": self.score.guessed, "right": self.score.right, "seed": self.seed}

    # --- a batch ---

    def judge(self, x: Any, y: Any) -> None:
        """Predict these samples with what was learned before them."""
        if self._voters is None:
            return
        from crowdml.models.clusters import predict

        known = np.asarray(y) >= 0
        right = (predict(self._voters, self._finite(x)) == y) & known
        self.score = Score(self.score.right + int(right.sum()), self.score.guessed + int(known.sum()))

    def packed(self, number: int, x: Any, y: Any, latest: Any | None) -> Batch:
        """The bytes that are kept of a batch."""
        newest = None if latest is None else np.asarray(latest, "<f4").tobytes()
        labels = np.asarray(y, "<i4").tobytes()
        return Batch(number, pack({"latest": newest, "x": self._finite(x).tobytes(), "y": labels}))

    def add(self, batch: Batch) -> None:
        """Learn from this batch too, from now on; the oldest is forgotten."""
        kept = [each for each in self._held if batch.number - self.batches < each.number < batch.number]
        self._held = deque([*kept, self._opened(batch)], maxlen=self.batches)

    def _opened(self, batch: Batch) -> _Held:
        plain, width = msgpack.unpackb(batch.body), self.task.features.dimension
        x = np.frombuffer(plain["x"], "<f4").reshape(-1, width)
        latest = None if plain["latest"] is None else np.frombuffer(plain["latest"], "<f4")
        return _Held(batch.number, x, np.frombuffer(plain["y"], "<i4"), latest)

    def _finite(self, x: Any) -> Any:
        return np.asarray(finite_samples(np.asarray(x, "<f4"), None).x, "<f4")

    # --- what it makes of them ---

    def learn(self, state: Any) -> None:
        """Begin anew from the samples that are kept and from what was heard."""
        if not self._held:
            return
        if self.protocol.learn is None:
            raise ProtocolError(f"devices of protocol {self.protocol.name!r} learn nothing of their own.")
        held = list(self._held)
        kept = Kept(
            np.stack([each.x for each in held]),
            np.stack([each.y for each in held]),
            np.array([each.number for each in held], np.int64),
        )
        self._voters = self.protocol.learn(self.task, state, kept, self.seed)

    def forecast(self, window: Any | None = None) -> Forecast | None:
        """What comes after the newest window (that of the last batch, where none is given); None before any batch."""
        if self._voters is None or not self._held:
            return None
        from crowdml.models.clusters import assign, verdicts

        newest = self._held[-1]
        if window is None:
            window = newest.x[-1] if newest.latest is None else newest.latest
        (cluster,) = assign(self._voters.centres, self._finite(np.asarray(window)[None])).tolist()
        label = int(verdicts(self._voters)[cluster])
        votes, weights = self._voters.labels[:, cluster], self._voters.weights
        weight = None
        if weights is not None:
            weight = float(weights[votes == label, cluster].sum() / weights[:, cluster].sum())
        return Forecast(label, int((votes == label).sum()), int((votes >= 0).sum()), weight)


def recall(ledger: Ledger, task: Task, protocol: Protocol) -> tuple[Learner, Post, Any]:
    """What a device knows, from its ledger: to learn anew while it is not at work, or beside it."""
    from crowdml.device.letters import Post

    if protocol.learn is None or not protocol.keeps(task):
        raise TaskError(f"devices of task {task.name!r} learn nothing of their own: ask the server for the model.")
    data = ledger.state(task.hash)
    plain = {} if data is None else msgpack.unpackb(data)
    state = first_device_turn(protocol, task, me="")
    if plain.get("state") is not None:
        state = unpack_state(state, plain["state"])
    return Learner(task, protocol, ledger.remembered(task.hash), plain.get("own")), Post.of(plain.get("post")), state


def outlook(task: Task, forecast: Forecast | None, score: Score, post: Post | None) -> str:
    """One line for the owner: what comes next, how often that was right, and who was heard."""
    parts: list[str] = []
    if forecast is not None:
        name = one_line(task.labels.classes[forecast.label])
        weight = "" if forecast.weight is None else f", {100 * forecast.weight:.0f}% by weight"
        parts.append(f"next: {name} ({forecast.votes} of {count_text(forecast.models, 'vote')}{weight})")
    if score.share is not None:
        parts.append(f"right {100 * score.share:.0f}% of {score.guessed:,} so far")
    if post is not None:
        parts.append(f"heard {count_text(post.heard, 'letter')}, {size_text(post.size)}")
        if post.refused:
            parts.append(f"left {sum(post.refused.values()):,} aside")
    return " · ".join(parts)
