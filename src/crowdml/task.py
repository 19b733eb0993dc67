"""A task is one file: parse it, check it, hash it. An edited task is a new task.

Numbers are read exactly: `epsilon = 0.9` is nine tenths. An unknown key, an impossible value or a budget that
the plan overspends is refused with a sentence that names the key, the value and what would be allowed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

from crowdml.errors import TaskError, UnknownName
from crowdml.exact import LARGEST, read_exact
from crowdml.records import record
from crowdml.settings import between, choose, positive, read_section, readable, short
from crowdml.settings import show as show  # for protocols
from crowdml.texts import did_you_mean

LONGEST_FILE = 2**20
"""Bytes of a task file, which names at most `MOST_PLACES` places."""
DEEPEST = 16
"""Tables within tables and lists within lists; tasks have three."""
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PART = r"""(?:a|(?<!\\)"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"{_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{2 * DEEPEST}}}")
"""A dotted key of more parts than any task has, once each bare part is written as `a`."""
SPECTRUM = 64
"""Numbers in an `accelerometer-spectrum`: `crowdml.features.spectrum.BINS`, which needs NumPy; a test compares them."""


@record
class Bound:
    """`{ kind = "l1" | "l2", bound = 1.0 }`: the ball that every feature vector lies in."""

    kind: str
    bound: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        choose("features.norm.kind", self.kind, ("l1", "l2"))
        positive("features.norm.bound", self.bound)


LARGEST_DELTA = 1e-5
"""The most that delta may be on a device, however few samples there are."""


def largest_delta(protected: int | None) -> float:
    """The ceiling of delta where so many samples (or devices) are protected; None: nobody knows how many.

    A mechanism that publishes each of n samples whole with probability delta is (0, delta)-DP, and gives n * delta of
    them away on average. So delta is at most a tenth of one over n, and at most `LARGEST_DELTA`.
    """
    return LARGEST_DELTA if protected is None else min(LARGEST_DELTA, 1 / (10 * protected))


WIDE = Fraction(10**6)
"""The ball of windows whose task names none: raw readings are not shortened by it. Only `proportions` takes windows on
devices, where they never leave."""
QUIET = {"quiet": True}
"""Metadata of a key that came later: at its default it is left out of the published form, so old hashes stand."""


@record
class Extractor:
    """`{ sha256 = "...", pixels = 784 }`: the public network that makes features of pictures, by the hash of its file.

    `pixels`: of a picture as a row holds it, a square; the network's own side may be another.
    """

    sha256: str
    pixels: int

    def __post_init__(self) -> None:
        if not _DIGEST.fullmatch(self.sha256):
            raise TaskError(
                f"features.extractor.sha256 = {self.sha256[:80]!r}: the SHA-256 of the extractor's file, 64 digits "
                "from 0 to 9 and a to f."
            )
        between("features.extractor.pixels", self.pixels, 4, 4096)
        if math.isqrt(self.pixels) ** 2 != self.pixels:
            raise TaskError(
                f"features.extractor.pixels = {self.pixels}: pictures are squares, such as 784 for 28 by 28 pixels."
            )


@record
class Features:
    """`dimension` and `norm`; of `windows`, how many values one has, and how far ahead its label lies (`horizon`)."""

    dimension: int
    norm: Bound = None  # pyright: ignore[reportAssignmentType]  windows have a ball of their own
    kind: str = "vector"
    horizon: int = field(default=1, metadata=QUIET)
    low: Fraction | tuple[Fraction, ...] | None = field(default=None, metadata=QUIET)
    """Public bounds of the features, one for all or one for each: values are held within them and scaled to [-1, 1]."""
    high: Fraction | tuple[Fraction, ...] | None = field(default=None, metadata=QUIET)
    extractor: Extractor | None = field(default=None, metadata=QUIET)
    """Rows are pictures, and `dimension` counts the features that this public network makes of one."""

    @property
    def width(self) -> int:
        """How many numbers a row has as it is read, before anything is made of it."""
        return self.dimension if self.extractor is None else self.extractor.pixels

    def __post_init__(self) -> None:
        choose("features.kind", self.kind, ("vector", "accelerometer-spectrum", "windows"))
        if self.norm is None:  # pyright: ignore[reportUnnecessaryComparison]
            if self.kind != "windows":
                raise TaskError(f"features.norm is missing. {Bound.__doc__}")
            object.__setattr__(self, "norm", Bound("l2", WIDE))
        if self.horizon != 1 and self.kind != "windows":
            raise TaskError(f'features.horizon = {self.horizon}: only features.kind = "windows" look ahead.')
        between("features.dimension", self.dimension, 1, 1_000_000)
        between("features.horizon", self.horizon, 1, 1_000_000)
        self._check_bounds()
        if self.extractor is not None and (self.kind != "vector" or self.low is not None):
            raise TaskError(
                'features.extractor takes pictures of any brightness, as features.kind = "vector" without features.low '
                "and features.high. Leave those out."
            )
        if self.kind == "accelerometer-spectrum" and self.dimension != SPECTRUM:
            raise TaskError(
                f"features.dimension = {self.dimension}: an accelerometer-spectrum has {SPECTRUM} numbers, and a model "
                f'of another size does not fit it. Say {SPECTRUM}, or features.kind = "vector".'
            )

    def _check_bounds(self) -> None:
        if self.low is None and self.high is None:
            return
        if self.low is None or self.high is None:
            given, other = ("high", "low") if self.low is None else ("low", "high")
            raise TaskError(f"features.{given} without features.{other}: columns have two bounds. Say both.")
        if self.kind != "vector":
            raise TaskError(f'features.low and features.high are for features.kind = "vector", not "{self.kind}".')
        for name, bounds in (("low", self.low), ("high", self.high)):
            if isinstance(bounds, tuple) and len(bounds) != self.dimension:
                raise TaskError(
                    f"features.{name} has {len(bounds):,} numbers: one for all columns, or one for each of "
                    f"features.dimension = {self.dimension:,}."
                )
        lows, highs = (
            bounds if isinstance(bounds, tuple) else (bounds,) * self.dimension for bounds in (self.low, self.high)
        )
        crossed = next((place for place in range(self.dimension) if lows[place] > highs[place]), None)
        if crossed is not None:
            raise TaskError(
                f"features.low = {show(lows[crossed])} is above features.high = {show(highs[crossed])} in column "
                f"{crossed + 1}. Swap them."
            )


@record
class Labels:
    """Classes by name, or `kind = "number"` with a bound on its size. `bins`: the edges between classes of readings."""

    classes: tuple[str, ...] = ()
    kind: str = "class"
    bound: Fraction = Fraction(1)
    bins: tuple[Fraction, ...] = field(default=(), metadata=QUIET)
    low: Fraction | None = field(default=None, metadata=QUIET)
    """Public bounds of a number: labels are held within them and scaled to [-1, 1], and predictions scaled back."""
    high: Fraction | None = field(default=None, metadata=QUIET)

    def __post_init__(self) -> None:
        choose("labels.kind", self.kind, ("class", "number"))
        positive("labels.bound", self.bound)
        self._check_ends()
        if self.kind == "class" and (len(self.classes) < 2 or len(set(self.classes)) < len(self.classes)):
            raise TaskError(f"labels.classes = {list(self.classes)}: name at least two different classes, each once.")
        if self.kind == "number" and self.classes:
            raise TaskError('labels.classes and labels.kind = "number" exclude each other: keep one of them.')
        for name in self.classes:
            readable("labels.classes", name, lines=False)
        if not self.bins:
            return
        edges = [float(edge) for edge in self.bins]
        if len(edges) + 1 != len(self.classes) or sorted({*edges}) != edges:
            raise TaskError(
                f"labels.bins = {edges}: the edges between {len(self.classes)} classes, {len(self.classes) - 1} of "
                "them, each above the one before."
            )

    def _check_ends(self) -> None:
        if self.low is None and self.high is None:
            return
        if self.low is None or self.high is None:
            given, other = ("high", "low") if self.low is None else ("low", "high")
            raise TaskError(f"labels.{given} without labels.{other}: a number has two bounds. Say both.")
        if self.kind != "number":
            raise TaskError('labels.low and labels.high are for labels.kind = "number". Leave them out.')
        if self.bound != 1:
            raise TaskError(
                f"labels.bound = {show(self.bound)} beside labels.low and labels.high, which bound the labels already. "
                "Leave it out."
            )
        if self.low >= self.high:
            raise TaskError(f"labels.low = {show(self.low)} is not below labels.high = {show(self.high)}.")

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest number that a label can be."""
        if self.low is None or self.high is None:
            return -float(self.bound), float(self.bound)
        return float(self.low), float(self.high)


@record
class TaskBudget:
    """What this task may take of a device: any one sample's total, and the samples given."""

    epsilon: Fraction
    samples: int

    def __post_init__(self) -> None:
        positive("privacy.budget.epsilon", self.epsilon)
        between("privacy.budget.samples", self.samples, 1, 10**12)


@record
class Masking:
    """The server learns only the sum over a cohort, and devices hold it to these numbers (docs/secagg.md)."""

    cohort: int
    """The most devices of a round."""
    minimum: int
    """The fewest survivors: with fewer it is abandoned."""
    colluders: int = 0
    window: Fraction = Fraction(60)
    lease: Fraction = Fraction(30)
    floor: Fraction | None = None

    def __post_init__(self) -> None:
        between("masking.cohort", self.cohort, 3, 2**20)
        between("masking.minimum", self.minimum, 3, self.cohort)
        between("masking.colluders", self.colluders, 0, self.minimum - 2)
        between("masking.window", self.window, 0.1, 30 * 86_400)
        between("masking.lease", self.lease, 0.1, 30 * 86_400)
        if self.floor is not None:
            positive("masking.floor", self.floor)
        least = (self.cohort + self.colluders) // 2 + 2
        if self.minimum < least:
            raise TaskError(
                f"masking.minimum = {self.minimum}: in a cohort of {self.cohort} with {self.colluders} colluders a "
                f"server could tell two lists of survivors to two halves; at least {least} must survive. Raise it, "
                "or lower masking.cohort or masking.colluders."
            )

    @property
    def honest(self) -> int:
        """h_min: the fewest honest devices whose noise is in a published sum."""
        return self.minimum - self.colluders


@record
class Privacy:
    """`epsilon` has a price for each thing that leaves: what a sample pays for it, at `delta`, in all its `uses`."""

    mechanism: str
    epsilon: Mapping[str, Fraction] = field(default_factory=dict)
    delta: float = 1e-6
    budget: TaskBudget | None = None
    unit: str = "sample"
    grid: Fraction | None = None
    uses: int = field(default=1, metadata=QUIET)

    def __post_init__(self) -> None:
        choose("privacy.mechanism", self.mechanism, ("discrete-gaussian", "discrete-laplace", "skellam", "none"))
        between("privacy.uses", self.uses, 1, 100_000)
        choose("privacy.unit", self.unit, ("sample", "device"))
        if not 0 <= self.delta < 1:
            raise TaskError(
                f"privacy.delta = {self.delta:g}: a probability far below one over the samples, such as 1e-6."
            )
        for name, epsilon in self.epsilon.items():
            positive(f"privacy.epsilon.{name}", epsilon)
        if self.mechanism in ("discrete-gaussian", "skellam") and self.delta == 0:
            raise TaskError(
                f"privacy.delta = 0: {'Gaussian' if self.mechanism != 'skellam' else 'Skellam'} noise has no guarantee "
                "without a delta. Use 1e-6, or discrete-laplace."
            )


@record
class StopRule:
    """Stop after `steps` check-ins, or when the crowd's error on its noisy counts is at most `error`."""

    steps: int | None = None
    error: Fraction | None = None

    def __post_init__(self) -> None:
        if self.steps is not None:
            between("stop.steps", self.steps, 1, 2**31 - 1)
        if self.error is not None and not 0 <= self.error <= 1:
            raise TaskError(f"stop.error = {float(self.error):g}: an error rate between 0 and 1.")


MOST_PLACES = 4_096
"""Every device works out who is near whom: the square of this many distances."""
LONGEST_NAME = 64


@record
class Place:
    """`name`, `lat` and `lon` in degrees: where a device stands, for everybody to read."""

    name: str
    lat: Fraction
    lon: Fraction

    def __post_init__(self) -> None:
        readable("places.name", self.name, lines=False)
        if not 0 < len(self.name) <= LONGEST_NAME:
            raise TaskError(f"places.name = {self.name!r}: between 1 and {LONGEST_NAME} characters.")
        between("places.lat", self.lat, -90, 90)
        between("places.lon", self.lon, -180, 180)


@record(eq=False)
class Task:
    """A learning problem: a protocol and its public parameters. Equal if and only if the hash is equal."""

    name: str
    features: Features
    labels: Labels
    model: Mapping[str, Any]
    protocol: Mapping[str, Any]
    privacy: Privacy
    title: str = ""
    purpose: str = ""
    collects: str = ""
    stop: StopRule = field(default_factory=StopRule)
    as_published: bool = False
    masking: Masking | None = field(default=None, metadata=QUIET)
    places: tuple[Place, ...] = field(default=(), metadata=QUIET)

    def __post_init__(self) -> None:
        names = [place.name for place in self.places]
        if len(names) > MOST_PLACES or len({*names}) < len(names):
            raise TaskError(f"places: at most {MOST_PLACES:,}, each with a name of its own; these are {len(names):,}.")
        if (self.features.kind == "windows") != bool(self.labels.bins):
            raise TaskError(
                'features.kind = "windows" and labels.bins go together: a window\'s label is the bin of a later value.'
            )
        if self.masking is not None and self.privacy.mechanism not in ("skellam", "none"):
            raise TaskError(
                f'privacy.mechanism = "{self.privacy.mechanism}" with [masking]: shares of noise must add up to noise '
                'of the same kind, and only "skellam" does. Say "skellam", or leave [masking] out.'
            )
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise TaskError(f"name = {self.name!r}: letters, digits, '-' and '_', such as \"activity\".")
        readable("title", self.title, lines=False)
        readable("purpose", self.purpose)
        readable("collects", self.collects)
        for section, values in (("model", self.model), ("protocol", self.protocol)):
            if not isinstance(values.get("kind"), str):
                raise TaskError(f"{section}.kind is missing: say which {section}, such as kind = "
                                f'"{"softmax" if section == "model" else "sgd"}".')  # fmt: skip

    @cached_property
    def canonical(self) -> bytes:
        """The published task: JSON with sorted keys and without blanks; numbers are exact decimals."""
        return _json(self).encode()

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the published task: in the consent, every envelope and every charge."""
        return hashlib.sha256(self.canonical).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Task) and self.hash == other.hash

    def __hash__(self) -> int:
        return int.from_bytes(self.hash[:8], "big")

    @property
    def classes(self) -> int | None:
        return len(self.labels.classes) or None

    @property
    def artefacts(self) -> tuple[str, ...]:
        """The SHA-256 of each public file that the task needs besides itself."""
        return () if self.features.extractor is None else (self.features.extractor.sha256,)

    @property
    def protected(self) -> int | None:
        """How many samples, or devices with `unit = "device"`, one release may tell about; None: the task says not.

        A round has at most `masking.cohort` devices, a task with places one device at each of them; a device gives at
        most `privacy.budget.samples`.
        """
        devices = self.masking.cohort if self.masking is not None else len(self.places) or None
        if devices is None or self.privacy.unit == "device":
            return devices
        return None if self.privacy.budget is None else devices * self.privacy.budget.samples

    @property
    def largest_delta(self) -> float:
        """The most that `privacy.delta` may be where devices take part; the simulator runs more, and says so."""
        return largest_delta(self.protected)

    def with_(self, **sections: Any) -> Task:
        """A new task with some sections changed; a mapping changes only the keys it names."""
        changes: dict[str, Any] = {}
        names = [entry.name for entry in dataclasses.fields(self)]
        for name, value in sections.items():
            if name not in names:
                raise TaskError(f"there is no section {name!r} to change. A task has {', '.join(names)}.")
            old = getattr(self, name)
            changes[name] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        return dataclasses.replace(self, **changes)


def parse(text: str, where: str = "the task") -> Task:
    """A task from TOML. `where` names the file in errors."""
    import tomllib  # a device reads canonical JSON

    if len(text) > LONGEST_FILE:
        raise TaskError(
            f"{where} is no task file: it has {len(text):,} characters, and one has at most {LONGEST_FILE:,}."
        )
    if _LONG_KEY.search(_BARE.sub("a", text)):  # the parser's time and memory grow with the square of the parts
        raise TaskError(
            f"{where} is no task file: a key in it has more than {2 * DEEPEST} parts with dots between them."
        )
    try:
        values = tomllib.loads(text, parse_float=read_exact)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        raise TaskError(f"{where} is not a task file: {error}. See docs/task.md for one that works.") from error
    try:
        _check_values(values)
        return read_section(Task, values, "")
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from error


def _check_values(values: Any) -> None:
    """Refuse what no key of a task can be: whole numbers beyond any use, dates and times, tables without end."""
    waiting = [(values, "", 0)]
    while waiting:  # no recursion: whoever wrote the file chose its depth
        value, where, depth = waiting.pop()
        if depth > DEEPEST:
            raise TaskError(f"{short(where)} lies {depth} tables or lists deep: a task has at most {DEEPEST}.")
        if isinstance(value, Mapping):
            waiting += [(inner, f"{where}.{key}" if where else str(key), depth + 1) for key, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(inner, where, depth + 1) for inner in value]
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise TaskError(f"{short(where)} is a number of {value.bit_length():,} bits: at most {LARGEST:g} in size.")
        elif value is not None and not isinstance(value, (str, bool, int, Fraction)):
            raise TaskError(
                f"{short(where)} = {value}: a task holds texts, numbers, lists and tables; no date, and no NaN."
            )


def from_canonical(data: bytes) -> Task:
    """The task behind its published bytes. They have one form: bytes that would hash otherwise are refused."""
    try:
        values = json.loads(data, parse_float=read_exact)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"These {len(data)} bytes are not a published task: {error}.") from error
    _check_values(values)
    task = read_section(Task, values, "")
    if task.canonical != data:
        raise TaskError("These bytes are not the one form of the task that they describe: their hash is not its hash.")
    return task


def load(path: Path | str) -> Task:
    """A task from a file."""
    try:
        with Path(path).open(encoding="utf-8", newline=None) as file:
            text = file.read(LONGEST_FILE + 1)
    except FileNotFoundError as error:
        raise TaskError(f"There is no task file {path}. `crowdml task list` names those that are shipped.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read as a task file: {error}.") from error
    return parse(text, str(path))


def shipped() -> list[str]:
    """Names of the tasks that come with the package."""
    from importlib import resources  # a device reads no shipped task

    found = resources.files("crowdml.tasks").iterdir()
    return sorted(entry.name[:-5] for entry in found if entry.name.endswith(".toml"))


def shipped_text(name: str) -> str:
    """The text of a task that comes with the package, as TOML."""
    from importlib import resources

    return resources.files("crowdml.tasks").joinpath(f"{name}.toml").read_text(encoding="utf-8")


def find_task(given: str) -> Task:
    """A task by its file, or by the name of one that is shipped."""
    if given in shipped() and not Path(given).is_file():
        return parse(shipped_text(given), f"the shipped task {given!r}")
    if not Path(given).exists() and "/" not in given and not given.endswith(".toml"):
        near = did_you_mean(given, shipped())
        raise UnknownName(f"{given!r} is neither a file nor a shipped task.{near} Shipped are {', '.join(shipped())}.")
    return load(given)


def _json(value: Any) -> str:
    """One encoding for one task: sorted keys, no blanks, a fraction as the decimal that it is."""
    if isinstance(value, Fraction):
        return _decimal(value)
    if dataclasses.is_dataclass(value):
        entries = [(entry, getattr(value, entry.name)) for entry in dataclasses.fields(value)]
        said = {e.name: held for e, held in entries if not (e.metadata.get("quiet") and held == e.default)}
        return _json(said)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_json(str(key))}:{_json(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_json, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _decimal(value: Fraction) -> str:
    """A fraction whose denominator divides a power of ten, with a point: that is how it is told from a count."""
    places = 1
    while (value * 10**places).denominator != 1:
        places += 1
        if places > 400:
            raise TaskError(f"{value} has no finite decimal form, so it cannot stand in a task. Round it.")
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}d}"
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
