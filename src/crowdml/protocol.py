"""Protocols: two tables of pure handlers and one table of what may leave. Not a line about a particular one.

A handler takes (task, state, event, context) and returns a `Step`: the next state and the effects that the shell shall
carry out. It raises on no value and branches on no value; its shapes do not grow. So one handler serves one NumPy
device, or ten thousand in a compiled loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from crowdml.arrays import Array, Integers, Samples, namespace
from crowdml.channels import (
    NUMBER,
    Channel,
    Close,
    Field,
    Gathering,
    combining,
    default_channel,
    fields_heard,
    let_out,
    root_table,
)
from crowdml.channels import Gathered as Gathered
from crowdml.errors import ProtocolError, TaskError
from crowdml.messages import SERVER, Address
from crowdml.privacy.mechanisms import Mechanism
from crowdml.privacy.private import Masked, Private, Release
from crowdml.privacy.rows import pin_grid
from crowdml.records import record
from crowdml.settings import docstrings, read_kind
from crowdml.shape import Shape
from crowdml.task import Task

if TYPE_CHECKING:
    from crowdml.models import Model

S = TypeVar("S")

BATCHES_HELD = 10
"""Batches that a device's buffer holds where a task does not say: they ride out a short outage."""


# Events, besides the messages themselves.
@record
class Sensed:
    """A device's buffer holds a full batch."""

    batch: Private[Samples]


@record
class Woken:
    """The time that a `Wake` asked for has passed."""

    tag: str


# Effects. One that depends on a value carries `when`, a boolean array: its structure never changes.
@record
class CheckOut:
    """Read the publication. The runner answers from the last one, so it can be cached; a failure is retried."""


@record
class Send:
    to: Address | frozenset[Address]
    message: Any
    when: Array | None = None


@record
class Publish:
    """What the next check-out returns."""

    message: Any
    when: Array | None = None


@record
class Wake:
    """Tell this role `Woken(tag)` after so many seconds. A later `Wake` with the same tag takes its place."""

    after: float
    tag: str


@record
class Rule:
    """Why a task ends: a rule by its name, the numbers in it, and a sentence for operators."""

    name: str
    """"steps", "error", "diverged", "schedule", or a name of the protocol's own. "" where an earlier version wrote the
    sentence alone."""
    sentence: str
    numbers: tuple[tuple[str, float], ...] = ()

    def plain(self) -> list[Any]:
        """The rule as snapshots keep it."""
        return [self.name, self.sentence, dict(self.numbers)]

    @staticmethod
    def read(plain: Any) -> Rule | None:
        """The rule that `plain` wrote, or the sentence that an earlier version did; None where there was none."""
        if plain is None or isinstance(plain, str):
            return Rule("", plain) if plain else None
        name, sentence, numbers = plain
        return Rule(name, sentence, tuple(numbers.items()))


@record
class Stop:
    rule: Rule
    when: Array | None = None


def stop_after(last: int | None, made: Integers, thing: str, done: str) -> tuple[Stop, ...]:
    """Stop by the task's `stop.steps`, where it has one: "3 cohorts have been added up"."""
    if last is None:
        return ()
    sentence = f"{last} {thing} has {done}" if last == 1 else f"{last} {thing}s have {done}"
    return (Stop(Rule("steps", sentence, (("steps", last),)), made >= last),)


Effect = CheckOut | Send | Publish | Wake | Stop


@record
class Step(Generic[S]):
    """What a handler returns."""

    state: S
    effects: tuple[Effect, ...] = ()


def _shut(row: str, private: Private[Any]) -> Release[Integers]:
    raise ProtocolError(f"There is no door in this step, so nothing can leave as {row!r}: the server holds no samples.")


def _shut_masked(row: str, private: Private[Any]) -> Masked[Integers]:
    raise ProtocolError(f"There is no door in this step, so nothing can leave as {row!r}, masked or not.")


def _untried(state: Any, x: Array) -> Array:
    raise ProtocolError("A device's handler has no state of the server's, so it asks no model what it would say.")


@record
class Context:
    """What the shell hands to a handler: who, when, and the door, for anyone to see (`release`) or under masks."""

    me: Address | Array
    sender: Address | Array | None = None
    now: float | Array = 0.0
    release: Callable[[str, Private[Any]], Release[Integers]] = _shut
    masked: Callable[[str, Private[Any]], Masked[Integers]] = _shut_masked
    trip: int | Integers = 0
    """How many check-ins of this task the device made before: public, for the server counts them too."""
    place: int | Integers = -1
    """Where in the task's public list of places this device stands; -1: nowhere."""
    rows: Private[Samples] | None = None
    """Rows of the server's own, when a round closes or its timer wakes it: for its own door alone."""
    predict: Callable[[Any, Array], Array] = _untried
    """What the model in a state of the server's says of x [n, dimension]."""


Handler = Callable[[Task, Any, Any, Context], Step[Any]]


@record(eq=False)
class Role:
    """One side of a protocol: its first step, and a handler for each type of event."""

    start: Callable[[Task, Context], Step[Any]]
    on: Mapping[type, Handler]


@record
class Noisy:
    """Sums of noisy counts: `counts` over `samples` samples, and the `variance` that the noise gave to each of them.

    All three add up, so the difference of two moments is the same thing for the check-ins between them.
    """

    counts: tuple[int, ...]
    samples: int
    variance: float


@record
class Kept:
    """The samples of the last batches that a device gave: x [h, b, d], y [h, b], and the number of each batch [h]."""

    x: Array
    y: Array
    numbers: Integers


@record
class Tally:
    """How a task goes, from releases alone: mistakes (one count), and labels (a count for each cell), since its start.

    None where the task lets no such count out.
    """

    check_ins: int
    errors: Noisy | None = None
    labels: Noisy | None = None


def _untold(task: Task, state: Any) -> Tally | None:
    return None


@lru_cache(maxsize=256)
def settings_of(task: Task, cls: type[Any]) -> Any:
    """The `[protocol]` table of a task as this dataclass; what does not fit is refused by its key."""
    return read_kind(cls, task.protocol, "protocol")


@lru_cache(maxsize=256)
def model_of(task: Task, *penalties: str) -> Model:
    """The model that a task's `[model]` table names. A protocol names the penalties that it applies itself ("l2")."""
    from crowdml.models import read_model

    return read_model(task.model, task.features.dimension, task.classes, task.labels.bound, penalties)


def _predict(task: Task, weights: Array, x: Array) -> Array:
    """By the task's own model."""
    return model_of(task, "l1", "l2").predict(weights, x)


def _scores(task: Task, weights: Array, x: Array) -> Array:
    """By the task's own model; a model of a plug-in that has no scores gives 1 to the class that it predicts."""
    model = model_of(task, "l1", "l2")
    if hasattr(model, "scores"):
        return model.scores(weights, x)  # pyright: ignore[reportAttributeAccessIssue]
    said = model.predict(weights, x)
    return said if task.classes is None else (said[:, None] == namespace(said).arange(task.classes)) * 1.0


def _as_it_is(task: Task, shape: Shape | None) -> Task:
    return task


def _once(task: Task, shape: Shape) -> int:
    return 1


def _any_shape(shape: Shape, masked: bool) -> str | None:
    return None


def _linear_model(shape: Shape) -> str:
    return "linear" if shape.classes is None else "softmax"


def _each_is_a_step(task: Task, versions: Integers, trips: Integers, steps: int) -> int:
    return steps


def _unremarkable(task: Task) -> tuple[str, ...]:
    return ()


@record(eq=False)
class Protocol:
    """`mechanisms` is the privacy plan: quote, ledger, the owner's sentence, docs and audit all read it."""

    name: str
    device: Role
    server: Role
    mechanisms: Callable[[Task], Mapping[str, Mechanism]]
    model: Callable[[Task, Any], Array]
    """The weights to use, from the server's state."""
    check: Callable[[Task], object] = None  # pyright: ignore[reportAssignmentType]  see __post_init__, as for the next
    """Refuse a task that this protocol cannot run, with a TaskError that names the key. Left out: `mechanisms` does."""
    batch: Callable[[Task], int] = None  # pyright: ignore[reportAssignmentType]
    """How many samples a `Sensed` batch has: public, and always the same. Left out: the setting `batch`."""
    settle: Callable[[Task], Task] = None  # pyright: ignore[reportAssignmentType]
    """The task with what the protocol chose for it written in: the form that is published and pinned. Left out: the
    grid of the first row."""
    expected: Callable[[Task], Mapping[str, Mapping[str, Field]]] = None  # pyright: ignore[reportAssignmentType]
    """For each kind of message that the server hears, what its fields look like; anything else is refused. Left out:
    the contribution, its rows of these `shapes`."""
    shapes: Callable[[Task], Mapping[str, tuple[int, ...]]] = None  # pyright: ignore[reportAssignmentType]
    """The shape of each row of one device's contribution, where `expected` is left out. Left out: the model's own."""
    progress: Callable[[Task, Any], Tally | None] = _untold
    """From the server's state, what plots may show; None where a protocol counts nothing."""
    remarks: Callable[[Task], tuple[str, ...]] = _unremarkable
    """Sentences on the price of a task, for who is about to start one: `crowdml task check` prints them."""
    contribution: Any = None
    """What one device gives in a check-in (`channels.contribution`), where all channels carry the same rows: it knows
    what leaves under masks and what a cohort's total is. None where the protocol has no masked form."""
    channel: Callable[[Task], Channel] = default_channel
    """How the server hears of contributions: a function of the task alone."""
    capacity: Callable[[Task], int] = None  # pyright: ignore[reportAssignmentType]
    """How many samples a device's buffer holds, live and simulated. Left out: the setting `buffer`, or ten batches."""
    predict: Callable[[Task, Array, Array], Array] = _predict
    """What a model's weights say of x [n, dimension]: class indices [n], or numbers [n]."""
    scores: Callable[[Task, Array, Array], Array] = _scores
    """What `predict` decides by: a score for each class [n, c], or one [n], above 0 for the second of two classes."""
    gathering: Callable[[Task], Gathering] | None = None
    """When a round of uploads closes; asked where `channel` says GATHERED. Left out: as `protocol.combine` says."""
    server_mechanisms: Callable[[Task], Mapping[str, Mechanism]] = root_table
    """What the server may release from rows of its own, through its own door. Left out: what `protocol.combine` asks
    for."""
    peers: Callable[[Task], Sequence[tuple[int, ...]]] | None = None
    """For each place of the task, the places that a device there writes to and hears from: the server relays what they
    say (`address_of` them, and of nobody else). None, or none of them: all that is said is said to the server."""
    keeps: Callable[[Task], int] = lambda task: 0
    """How many batches of samples that it gave a device keeps: `learn` needs them, and they never leave."""
    learn: Callable[[Task, Any, Kept, int], Any] | None = None
    """What a device makes for itself of its own samples and of what it heard (its state): `models.clusters.Voters`, and
    they never leave. None where devices use what the server publishes."""
    traced: bool = True
    """Whether its handlers can be compiled: they take JAX's arrays as well as NumPy's, with numbers of at most 32 bits.
    Where they cannot, the simulator runs them event by event."""
    check_ins_until: Callable[[Task, Integers, Integers, int], int] = _each_is_a_step
    """How many check-ins arrive until the server has made so many steps, `stop.steps`: of each in the order of arrival,
    how many had arrived when its weights were read, and which of its device's it is."""
    advise: Callable[[Task, Shape | None], Task] = _as_it_is
    """The task with settings that nobody chose, where a public rule chooses them: it looks at no sample. The shape of
    the crowd is None where nobody knows it."""
    uses: Callable[[Task, Shape], int] = _once
    """In how many check-ins a sample shall serve, where nobody says so. The task has no settings by rule yet."""
    fits: Callable[[Shape, bool], str | None] = _any_shape
    """Why a crowd of this shape cannot run the protocol, alone or under masks, in a sentence; None where it can."""
    usual_model: Callable[[Shape], str] = _linear_model
    """The kind of model for a crowd of this shape, where nobody says which."""
    claims: Callable[[Task], float] | None = None
    """What a paper says that a sample pays, where a task runs as published."""
    regression: Callable[[Task], Any] | None = None
    """The ridge regression that the server solves (`second_moments.Regression`): exports and comparisons ask it for its
    features. None where weights belong to the features as they are."""
    overlaps: bool = False
    """Whether samples may share a reading (`features.kind = "windows"`): only where features never leave a device, and
    each reading is the label of one sample. Elsewhere replacing a reading would change many samples at once."""
    settings: type | None = None
    """The dataclass of the `[protocol]` table (`crowdml.settings`): forms and errors know its keys, limits and help."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "mechanisms", lru_cache(maxsize=256)(self.mechanisms))  # asked for in every turn
        usual = {"check": self.mechanisms, "batch": self._batch, "settle": self._settle, "expected": self._expected,
                 "shapes": self._shapes, "capacity": self._capacity}  # fmt: skip
        for name, default in usual.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    @property
    def lacks(self) -> str | None:
        """What its author forgot, as the end of a sentence; None where nothing is missing."""
        parts: tuple[Any, ...] = self.name, self.device, self.server
        if not all(isinstance(part, kind) for part, kind in zip(parts, (str, Role, Role), strict=True)):
            return "has a text as its name, and a Role as its `device` and its `server`"
        fields = [] if self.settings is None else [each.name for each in dataclasses.fields(self.settings)]
        if self.batch == self._batch and "batch" not in fields:
            return "does not say how many samples a check-in has: declare `batch` in its settings, or pass `batch`"
        if self.contribution is None and self.expected == self._expected:
            return "does not say what a device gives: pass its `contribution`, or what the server has `expected`"
        return None

    def _batch(self, task: Task) -> int:
        return settings_of(task, self.settings or object).batch

    def _capacity(self, task: Task) -> int:
        own = 0 if self.settings is None else getattr(settings_of(task, self.settings), "buffer", 0)
        return own or BATCHES_HELD * self.batch(task)

    def _settle(self, task: Task) -> Task:
        return pin_grid(task, next(iter(self.mechanisms(task).values())).grid)

    def _shapes(self, task: Task) -> Mapping[str, tuple[int, ...]]:
        return dict.fromkeys(self.contribution.rows, model_of(task).shape)

    def _expected(self, task: Task) -> Mapping[str, Mapping[str, Field]]:
        return fields_heard(self.contribution, task, self.mechanisms(task), self.shapes(task), version=NUMBER)

    def rows(self) -> tuple[tuple[str, str, bool], ...]:
        """Each row of the contribution: its name, its docstring, and whether a task may leave it out."""
        if self.contribution is None:
            return ()
        helps = docstrings(self.contribution)
        return tuple((name, helps.get(name, ""), optional) for name, optional in self.contribution.rows.items())

    @property
    def masked(self) -> tuple[Any, Any] | None:
        """What one device says under masks, and what the server hears of a cohort; None where it has no such form."""
        made = self.contribution
        return None if made is None or made.masked is None else (made.masked, made.total)

    def is_masked(self, task: Task) -> bool:
        """Whether check-ins of this task leave under masks, and the server hears the totals of cohorts alone."""
        return task.masking is not None and self.masked is not None

    def gathers(self, task: Task) -> Gathering | None:
        """When a round of uploads closes; None of a task that gathers none."""
        if self.channel(task) is not Channel.GATHERED:
            return None
        if self.gathering is not None:
            return self.gathering(task)
        by = combining(task)
        if by is None:
            raise ProtocolError(f"protocol {self.name!r} gathers uploads, and does not say when a round closes.")
        close = self.server.on.get(Gathered)
        if isinstance(close, Close):
            close.refuse(task)
        if by.drawn is not None and task.masking is not None:
            raise TaskError(
                "protocol.combine.drawn with [masking]: who meets in a cohort is drawn already. Leave it out."
            )
        return Gathering(by.uploads, by.fewest, None if by.seconds is None else float(by.seconds), by.drawn)

    @property
    def waits(self) -> bool:
        """Whether a role of it sets timers."""
        return any(Woken in role.on for role in (self.device, self.server))


def place_of(address: Address) -> int:
    """The place that `@17` names; -1 where it names none."""
    digits = address[1:]
    return int(digits) if address[:1] == "@" and digits.isascii() and digits.isdecimal() else -1


def address_of(place: int) -> Address:
    """A device by where it stands in the task's list of places, whoever it is: that is how peers write to it."""
    return f"@{place}"


def wait(task: Task, ctx: Context) -> Step[None]:
    """How a device begins that has nothing to say before it has sensed."""
    return Step(None)


def check_out(task: Task, waiting: Private[Samples] | None, event: Sensed, ctx: Context) -> Step[Any]:
    """A batch is full: hold it, and ask for the publication. The runner retries a check-out that fails."""
    return Step(event.batch, (CheckOut(),))


def device_role(made: Any, publication: type, rows: Callable[[Task, Private[Samples], Any], Mapping[str, Any]]) -> Role:
    """A device that checks out when its batch is full and answers the `publication` with one contribution.

    `rows(task, batch, publication)` gives each row as a Private value: its entry i depends on sample i alone.
    """

    def answer(task: Task, waiting: Private[Samples] | None, public: Any, ctx: Context) -> Step[Any]:
        if waiting is None:  # a late or repeated answer
            return Step(None)
        said = let_out(made, task, ctx, rows(task, waiting, public), version=public.version)
        return Step(None, (Send(SERVER, said),))

    return Role(wait, {Sensed: check_out, publication: answer})


def advance(role: Role, task: Task, state: Any, event: Any, ctx: Context) -> Step[Any]:
    """One step of one role: find the handler for this event and call it."""
    handler = role.on.get(type(event))
    if handler is None:
        heard = ", ".join(kind.__name__ for kind in role.on)
        raise ProtocolError(f"Nobody here hears {type(event).__name__}; this role hears {heard}.")
    return handler(task, state, event, ctx)
