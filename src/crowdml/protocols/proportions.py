"""Private learning from label proportions: devices teach each other how often each label occurred, and no more.

Sachweh, Boiar, Liebig, *Differentially private learning from label proportions* (p-LLP), over Stolpe and Morik 2011.
A device cuts its readings into windows; the label of a window is the bin of a later reading. Of each batch of b windows
it says once, to its c nearest peers and to those that have it among theirs, how often each label occurred, with noise.
From its own windows and what its c nearest said of the same batch it learns c + 1 labellings of its own clusters, and
they vote. The server relays, and adds the noisy counts up; it sees no window and no model. Without peers that histogram
is all of the task, and it may be a cohort's, under masks.

Where we differ (privacy review, section 3):
- Algorithm 1 normalises inside its loop, by sums that hold exact counts: no guarantee at all (P1). Here integers leave,
  with discrete Laplace noise, and whoever hears them divides.
- Batches have a fixed public size, so neighbours replace one measurement and move two counts: the scale is 2 / epsilon,
  where the paper has 1 / epsilon (P2, P5). A measurement is the label of one window in one batch (P3), and pays once.
- The same bytes go to every peer (P4): noise that is drawn again for each of them would be paid for each time.
- Clusters are labelled by least squares with the known variance of the noise (`models/clusters.py`), not by a search:
  it is better at every epsilon that we measured (`model.solver`). It takes counts as they came: rows that were clipped
  or projected are biased.
- Votes may be weighed by a device's own labels (`protocol.vote`): a peer's proportions say what happened there, and
  where that is not what happens here, every vote counting the same costs more than the peers bring.
- A device's own labelling uses its own proportions without noise. It never leaves, and nor do predictions: to publish
  either would be a release that nobody charged (P6).
- A device writes to its c nearest, and also to who has it among the c nearest: "near" is not mutual, and c + 1 models
  need the c nearest of each. What is released is for anyone to see, so that costs nothing.

What is protected is one measurement, not a person: somebody who is in K measurements pays K times as much
(`protocol.person`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np

from crowdml.arrays import Array, Integers, Samples, struct
from crowdml.channels import NUMBER, Channel, Field, contribution, default_channel, fields_heard, heard_by, let_out
from crowdml.errors import TaskError
from crowdml.messages import SERVER, Public, message
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.private import Private, Release, Rows
from crowdml.privacy.rows import Promise, count_row
from crowdml.protocol import (
    CheckOut,
    Context,
    Kept,
    Noisy,
    Protocol,
    Publish,
    Role,
    Rule,
    Send,
    Sensed,
    Step,
    Stop,
    Tally,
    address_of,
)
from crowdml.settings import Between, OneOf, read_kind
from crowdml.task import Task

if TYPE_CHECKING:
    from crowdml.models.clusters import Voters

EARTH = 6_371_008.8
"""Metres: the mean radius, for distances along great circles."""
OCCURRED = Promise(
    "about how often each label occurred among this batch's measurements",
    "about how often each label occurred, over a cohort",
    "how often each label occurred, exactly",
)
MOST_LISTENERS = 1_000
"""Places that one may write to: an envelope names each of them."""


@dataclass(frozen=True)
class Settings:
    """The `[protocol]` table of a task."""

    batch: Annotated[int, Between(1, 100_000)]
    """b: windows of a batch, and samples of a release."""
    peers: Annotated[int, Between(0, 64)] = 0
    """c: the nearest places that a device learns from; 0 where the crowd's histogram is all that is wanted."""
    memory: Annotated[int, Between(1, 10_000)] = 128
    """Batches of which a device keeps its own windows and what its peers said, newest first."""
    person: Annotated[int, Between(1, 100_000)] = 1
    """K: in how many measurements one person may be. It changes no noise: it is what `task check` says of a person."""
    vote: Annotated[str, OneOf("majority", "weighted")] = "majority"
    """How a device's models vote: each the same, or `weighted` by the device's own labels, which never leave."""
    kind: str = "proportions"


@dataclass(frozen=True)
class Clusters:
    """The `[model]` table of a task with peers."""

    k: Annotated[int, Between(2, 1_000)] = 16
    """Clusters of a device's own windows; each gets one label."""
    restarts: Annotated[int, Between(1, 1_000)] = 10
    """Starts of a search for their labels."""
    solver: Annotated[str, OneOf("shares", "search")] = "shares"
    """How they get labels: by the shares of classes that explain all batches best, or by a `search` (Stolpe, Morik)."""
    kind: str = "clusters"


@dataclass(frozen=True)
class Plan:
    """What a task fixes once and for all: read by handlers, never written."""

    settings: Settings
    model: Clusters | None
    counts: Mechanism
    classes: int
    nearest: Integers
    """[places, c]: the c nearest of each place, nearest first."""
    correspondents: tuple[tuple[int, ...], ...]
    """For each place, the places it writes to and hears from. The relation is symmetric."""


@lru_cache(maxsize=256)
def plan(task: Task) -> Plan:
    """Read the task; refuse what this protocol cannot run."""
    settings = read_kind(Settings, task.protocol, "protocol")
    if task.as_published:
        raise TaskError(
            "as_published = true: p-LLP as published has no guarantee, and no door lets it out. "
            "`crowdml reproduce sachweh/fig3` runs it, beside what it really costs."
        )
    if task.classes is None:
        raise TaskError('labels.kind = "number": proportions count classes. Name them, or cut numbers by labels.bins.')
    if set(task.privacy.epsilon) - {"counts"} or (not task.privacy.epsilon and task.privacy.mechanism != "none"):
        raise TaskError("privacy.epsilon has to name `counts`, and nothing else: what a sample pays for its batch.")
    if task.privacy.unit != "sample":
        raise TaskError('privacy.unit = "device": proportions protect one measurement. Leave it out.')
    if task.privacy.uses != 1:
        raise TaskError(f"privacy.uses = {task.privacy.uses}: a batch is counted once. Leave it out.")
    if task.privacy.grid is not None and task.privacy.grid != 1:
        raise TaskError(f"privacy.grid = {float(task.privacy.grid):g}: counts are whole numbers. Leave it out.")
    if task.stop.error is not None:
        raise TaskError("stop.error: nobody counts errors in this protocol. Stop by stop.steps.")
    model = _model(task, settings)
    nearest = near(task, settings.peers)
    return Plan(settings, model, _counts(task, settings), task.classes, nearest, _mutual(nearest))


def _model(task: Task, settings: Settings) -> Clusters | None:
    kind = task.model["kind"]
    if not settings.peers:
        if dict(task.model) != {"kind": "histogram"}:
            raise TaskError(
                f'model.kind = {kind!r}: without peers the histogram is all that is learned. Say kind = "histogram" '
                "and nothing else, or give protocol.peers a number."
            )
        return None
    if kind != "clusters":
        raise TaskError(f'model.kind = {kind!r}: devices with peers learn "clusters", and nothing else.')
    if task.masking is not None:
        raise TaskError(
            f"[masking] with protocol.peers = {settings.peers}: peers need what each device says, and under masks "
            "there are sums alone. Leave one of them out."
        )
    if task.features.kind != "windows":
        raise TaskError(f'features.kind = {task.features.kind!r}: devices with peers learn from "windows" of readings.')
    if len(task.places) <= settings.peers:
        raise TaskError(
            f"protocol.peers = {settings.peers}, and [[places]] lists {len(task.places)}: each has at most "
            f"{max(0, len(task.places) - 1)} others to learn from."
        )
    return read_kind(Clusters, task.model, "model")


def _counts(task: Task, settings: Settings) -> Mechanism:
    if task.masking is None and task.privacy.mechanism not in ("discrete-laplace", "none"):
        raise TaskError(
            f'privacy.mechanism = "{task.privacy.mechanism}": counts take the least noise from "discrete-laplace".'
        )
    return count_row(task, "counts", cells=int(task.classes or 0), covers=Rows(0, settings.batch), promise=OCCURRED)


# --- who is near whom ---


def near(task: Task, peers: int) -> Integers:
    """[places, peers]: the nearest other places along great circles, nearest first; of equals the first in the list."""
    count = len(task.places)
    degrees = np.array([(float(place.lat), float(place.lon)) for place in task.places]).reshape(count, 2)
    lat, lon = np.radians(degrees).T
    found = np.zeros((count, peers), np.int32)
    if not peers:
        return found
    for place in range(count):
        a = np.sin((lat - lat[place]) / 2) ** 2
        a = a + np.cos(lat[place]) * np.cos(lat) * np.sin((lon - lon[place]) / 2) ** 2
        metres = 2 * EARTH * np.arcsin(np.sqrt(np.clip(a, 0, 1)))
        order = np.round(metres, 3)  # to the millimetre: the same ties on every machine
        order[place] = np.inf
        found[place] = np.argsort(order, kind="stable")[:peers]
    return found


def _mutual(nearest: Integers) -> tuple[tuple[int, ...], ...]:
    linked: list[set[int]] = [set() for _ in nearest]
    for place, others in enumerate(nearest.tolist()):
        linked[place].update(others)
        for other in others:
            linked[other].add(place)
    for place, others in enumerate(linked):
        if len(others) > MOST_LISTENERS:
            raise TaskError(
                f"places: place {place} is among the nearest of {len(others):,} others, and a message names at most "
                f"{MOST_LISTENERS:,}. Give places their own coordinates."
            )
    return tuple(tuple(sorted(others)) for others in linked)


def mechanisms(task: Task) -> Mapping[str, Mechanism]:
    """Everything that may leave, and at what price: one row."""
    return {"counts": plan(task).counts}


def remarks(task: Task) -> tuple[str, ...]:
    """What is protected, and what is not."""
    fixed, epsilon = plan(task), task.privacy.epsilon.get("counts")
    if epsilon is None:
        return ()
    person = fixed.settings.person
    whose = (
        "The guarantee protects one measurement, not a person: somebody who is in K measurements pays K times as much. "
        "protocol.person states a bound on K."
        if person == 1
        else f"A person who is in at most {person} measurements pays ε={float(person * epsilon):g} in all."
    )
    deviation = fixed.counts.noise_variance**0.5
    return (
        whose,
        f"A count's noise has a standard deviation of {deviation:.3g}, in batches of {fixed.settings.batch}.",
    )


# --- what travels ---


@message("proportions/counted/1")
class Counted:
    """The publication: noisy label counts of all batches so far, [classes] int64, and how many messages are in them."""

    counts: Public[Integers]
    version: Public[Integers]


@contribution("proportions/counts/1", masked="proportions/masked/1", total="proportions/total/1")
class Proportions:
    """A device's check-in: how often each label occurred in its batch of this number, and where it stands."""

    counts: Release[Integers]
    place: Public[Integers]
    batch: Public[Integers]


# --- the device ---


@struct
class Listening:
    """Device state: what its nearest peers said, and the batch that waits for a check-out.

    counts [c, memory, classes] int32; batches [c, memory] int32, the number of the batch that stands there, or -1.
    """

    counts: Integers
    batches: Integers
    waiting: Private[Samples] | None = None


def listen(task: Task, ctx: Context) -> Step[Listening]:
    fixed = plan(task)
    peers, memory = fixed.settings.peers, fixed.settings.memory
    counts = np.zeros((peers, memory, fixed.classes), np.int32)
    return Step(Listening(counts, np.full((peers, memory), -1, np.int32)))


def hold(task: Task, state: Listening, event: Sensed, ctx: Context) -> Step[Listening]:
    """A batch is full: hold it, and ask for the publication, which says whether the task goes on."""
    return Step(replace(state, waiting=event.batch), (CheckOut(),))


def tell(task: Task, state: Listening, counted: Counted, ctx: Context) -> Step[Listening]:
    """Say how often each label occurred: one release, the same bytes to everybody (P4)."""
    batch, after = state.waiting, replace(state, waiting=None)
    if batch is None:  # a late or repeated answer
        return Step(after)
    fixed = plan(task)
    rows = batch.map(lambda samples: (samples.y[:, None] == np.arange(fixed.classes)).astype(np.int32))
    here, number = np.int32(ctx.place), np.int32(ctx.trip)
    said = let_out(Proportions, task, ctx, {"counts": rows}, place=here, batch=number)
    to = frozenset(map(address_of, fixed.correspondents[int(ctx.place)])) if fixed.settings.peers else SERVER
    return Step(after, (Send(to, said),))


def hear(task: Task, state: Listening, said: Proportions, ctx: Context) -> Step[Listening]:
    """Keep what one of the c nearest said of a batch; a repeated or older one changes nothing, a stranger's neither."""
    fixed = plan(task)
    peer, column = fixed.nearest[int(ctx.place)] == said.place, said.batch % fixed.settings.memory
    fresh = peer & (state.batches[:, column] < said.batch)
    if not fresh.any():
        return Step(state)
    counts, batches = state.counts.copy(), state.batches.copy()
    counts[fresh, column], batches[fresh, column] = said.counts.value, said.batch
    return Step(Listening(counts, batches, state.waiting))


def learn(task: Task, state: Listening, kept: Kept, seed: int) -> Voters:
    """c + 1 labellings of this device's clusters, whose votes `models.clusters.predict` counts. They never leave.

    The first labelling is from the device's own labels, counted without noise; each other one from what a peer said of
    the same batches. A peer that is late, silent or gone has no vote. With `protocol.vote = "weighted"` the device's
    own labels weigh the votes: they stay where they are, and so do the weights.
    """
    from crowdml.models.clusters import fit  # devices that only count do without it

    fixed = plan(task)
    model, memory = fixed.model, fixed.settings.memory
    if model is None:
        raise TaskError("protocol.peers = 0: devices of this task count, and learn nothing of their own.")
    x, numbers = np.asarray(kept.x), np.asarray(kept.numbers)
    columns = numbers % memory
    there = state.batches[:, columns] == numbers
    own = (np.asarray(kept.y)[..., None] == np.arange(fixed.classes)).sum(1)
    return fit(
        x.reshape(-1, x.shape[-1]),
        own,
        state.counts[:, columns],
        there,
        k=model.k,
        restarts=model.restarts,
        seed=seed,
        variance=fixed.counts.noise_variance,
        solver=model.solver,  # pyright: ignore[reportArgumentType]  one of two, as checked
        y=np.asarray(kept.y).ravel() if fixed.settings.vote == "weighted" else None,
    )


# --- the server ---


@struct
class Histogram:
    """Server state: noisy counts of all batches so far, of how many devices' batches, in how many check-ins or sums."""

    counts: Integers  # int64
    batches: Integers
    version: Integers


def publish_initial(task: Task, ctx: Context) -> Step[Histogram]:
    none = np.int32(0)
    state = Histogram(np.zeros(plan(task).classes, np.int64), none, none)
    return Step(state, (Publish(Counted(state.counts, none)),))


def add(task: Task, state: Histogram, said: Any, ctx: Context) -> Step[Histogram]:
    """Count a batch. To relay what was said is the shell's part: the server has nothing to add to it."""
    version, counts = np.int32(state.version + 1), np.asarray(said.counts.value, np.int64)
    after = Histogram(state.counts + counts, np.int32(state.batches + said.devices), version)
    last = task.stop.steps
    rule = Rule("steps", f"stop.steps = {last} is reached", (("steps", last or 0),))
    stops = () if last is None else (Stop(rule, version >= last),)
    return Step(after, (Publish(Counted(after.counts, version)), *stops))


def tally(task: Task, state: Histogram) -> Tally:
    """The crowd's noisy label counts, and how much noise is in them."""
    fixed, batches = plan(task), int(state.batches)
    counts = tuple(int(count) for count in np.asarray(state.counts))
    noisy = Noisy(counts, batches * fixed.settings.batch, batches * fixed.counts.noise_variance)
    return Tally(batches, labels=noisy)


def distribution(task: Task, state: Histogram) -> Array:
    """How often each label occurs, [classes] float32, as the crowd's noisy counts have it: from 0, summing to one."""
    from crowdml.models.proportions import project

    batches = max(1, int(state.batches))
    return project(np.asarray(state.counts, np.float64) / (batches * plan(task).settings.batch)).astype(np.float32)


def expected(task: Task) -> Mapping[str, Mapping[str, Field]]:
    """What a check-in, or a cohort's total, may hold."""
    where = Field("<i4", (), 0, len(task.places) - 1) if task.places else Field("<i4", (), -1, -1)
    shapes = {"counts": (plan(task).classes,)}
    return fields_heard(Proportions, task, mechanisms(task), shapes, place=where, batch=NUMBER)


device = Role(start=listen, on={Sensed: hold, Counted: tell, Proportions: hear})
server = Role(start=publish_initial, on=heard_by(Proportions, add))
protocol = Protocol(
    "proportions",
    device,
    server,
    mechanisms,
    model=distribution,
    settle=lambda task: task,
    expected=expected,
    progress=tally,
    remarks=remarks,
    contribution=Proportions,
    channel=lambda task: Channel.RELAYED if plan(task).settings.peers else default_channel(task),
    peers=lambda task: plan(task).correspondents if plan(task).settings.peers else (),
    keeps=lambda task: plan(task).settings.memory if plan(task).settings.peers else 0,
    learn=learn,
    traced=False,  # counts have 64 bits
    overlaps=True,
    settings=Settings,
    fits=lambda shape, masked: (
        "proportions learns from windows of readings at public places, not from rows of a table."
    ),
)
