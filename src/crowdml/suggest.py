"""A complete task for a crowd of a known shape: every choice that nobody made, made by public rules.

    suggest(Shape(features=30, classes=2, devices=39, held=10), protocol="gram", epsilon=4.0)

`Crowd`, `compare`, `task new` and the portal all ask here, and none has rules of its own. A rule reads the shape of the
crowd and the price, and no sample: so what it chooses costs no privacy (review, R4). docs/defaults.md says how the
rules were found, and on which data.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from crowdml.channels import Channel
from crowdml.errors import TaskError
from crowdml.price import Price
from crowdml.privacy.losses import exact
from crowdml.protocol import Protocol
from crowdml.protocols import PROTOCOLS, find
from crowdml.records import record
from crowdml.settings import read_section
from crowdml.shape import Shape as Shape
from crowdml.task import Bound, Features, Labels, Masking, Privacy, Task, largest_delta
from crowdml.texts import count_text, did_you_mean, number_text

LARGEST_COHORT = 1000
"""Devices that meet at once where nobody says how many: more of them meet in several cohorts."""
SURVIVE = Fraction(4, 5)
"""The part of a cohort whose noise is enough: as many may be lost as this leaves."""
COLLUDE = Fraction(1, 20)
"""The part of a cohort that may work with the server."""
FEWEST_MASKED = 10
"""Devices from which on sums of cohorts hide one device well enough to be the first choice."""


DELTA = 1e-6
"""Delta where nobody names one and the crowd is not so large that less is needed."""


def fitting_delta(rows: int, given: float | None = None) -> float:
    """The delta of a crowd with so many rows: the given one, which must not be too large, or the usual one."""
    most = largest_delta(rows)
    if given is None:
        return min(DELTA, most)
    if not 0 < given <= most:
        raise TaskError(
            f"delta = {given:g}: above 0 and at most {number_text(most)} for {rows:,} rows, for no device accepts "
            "another. Leave it out, or take a smaller one."
        )
    return given


def fits(protocol: str, shape: Shape, masked: bool) -> str | None:
    """Why a protocol cannot learn from a crowd of this shape, in a sentence; None where it can."""
    found = _protocol(protocol, shape.classes)
    if masked and found.masked is None:
        return f"{protocol} has no masked form: its server needs single check-ins."
    if masked and shape.devices < 4:
        return f"Masks need at least 4 devices, so that a sum hides each of them; there are {shape.devices}."
    return found.fits(shape, masked)


def prefers_masks(protocol: str, shape: Shape) -> bool:
    """Whether masks are the first choice for a crowd of this shape."""
    return shape.devices >= FEWEST_MASKED and fits(protocol, shape, True) is None


def suggest(
    shape: Shape,
    *,
    protocol: str = "sgd",
    epsilon: float | Fraction | None,
    delta: float = 1e-6,
    masked: bool = False,
    masking: Mapping[str, Any] | None = None,
    model: str | Mapping[str, Any] | None = None,
    names: Sequence[str] | None = None,
    low: Any = None,
    high: Any = None,
    ends: tuple[Fraction, Fraction] | None = None,
    settings: Mapping[str, Any] | None = None,
    uses: int | None = None,
    mechanism: str | None = None,
    name: str = "crowd",
) -> Task:
    """The task with which this crowd learns; what a sample pays in all its uses is at most `epsilon` (None: no noise).

    `masked`, or a `masking` table, has the server hear sums of cohorts alone; keys that the table leaves out are
    chosen. A protocol that has no other form is masked in any case. `settings` are the protocol's own, by name; `names`
    are those of the classes. `low` and `high` are public bounds of the features, `ends` those of labels that are
    numbers. `uses`: in how many check-ins each sample serves.
    """
    found = _protocol(protocol, shape.classes)
    alone = not masked and masking is None
    masked = not alone or (fits(protocol, shape, False) is not None and found.fits(shape, True) is None)
    reason = fits(protocol, shape, masked)
    if reason is not None:
        raise TaskError(reason)
    kind = _mechanism(mechanism, epsilon, masked, f"{protocol} needs masks: " if masked and alone else "")
    laplace, plain = kind == "discrete-laplace", kind == "none"
    rows = [row for row, _, optional in found.rows() if not optional]
    price = {} if plain or epsilon is None else dict.fromkeys(rows, exact(epsilon))
    least, largest = (None if value is None else _bounds(value) for value in (low, high))
    task = Task(
        name=name,
        features=Features(shape.features, Bound("l1" if laplace else "l2"), low=least, high=largest),
        labels=_labels(shape, names, ends),
        model=_model(found, shape, model),
        protocol={"kind": protocol, **_settings(found, shape, settings or {})},
        privacy=Privacy(kind, price, 0.0 if laplace else float(delta), uses=_check_uses(uses)),
        masking=cohorts(shape, masking or {}) if masked else None,
    )
    whole = None if plain or epsilon is None else exact(epsilon)
    return _within(found, complete(task, shape, uses), shape, rows, whole)


def complete(task: Task, shape: Shape, uses: int | None) -> Task:
    """The task with the settings of its protocol that nobody chose, and with its uses, where they are None."""
    found = _protocol(str(task.protocol["kind"]))
    if uses is None:
        task = task.with_(privacy=replace(task.privacy, uses=found.uses(task, shape)))
    return found.advise(task, shape)


def choices(classes: int | None) -> list[str]:
    """The protocols that can learn labels of this kind from a table, alone or under masks; None: numbers."""
    crowd = Shape(2, classes, 100, 10)
    return [name for name in PROTOCOLS if any(fits(name, crowd, masked) is None for masked in (False, True))]


def _protocol(name: str, classes: int | None = 2) -> Protocol:
    if name not in PROTOCOLS:
        known = choices(classes)
        raise TaskError(f"protocol = {name!r}: choose one of {', '.join(known)}.{did_you_mean(name, known)}")
    return PROTOCOLS[name]


def _check_uses(uses: int | None) -> int:
    if uses is not None and uses < 1:
        raise TaskError(f"passes = {uses}: a crowd goes over its samples at least once.")
    return uses or 1


def _mechanism(given: str | None, epsilon: Any, masked: bool, why: str) -> str:
    usual = "skellam" if masked else "discrete-gaussian"
    if masked and given not in (None, "skellam", "none"):
        raise TaskError(
            f'mechanism = {given!r}: {why}masking needs mechanism = "skellam", for no other noise is the sum of shares '
            f"of its own kind. Leave mechanism out{'' if why else ', or learn without masks'}."
        )
    return "none" if epsilon is None else usual if masked or given is None else given


def _labels(shape: Shape, names: Sequence[str] | None, ends: tuple[Fraction, Fraction] | None) -> Labels:
    if shape.classes is None:
        low, high = ends or (None, None)
        return Labels(kind="number", bound=shape.bound, low=low, high=high)
    return Labels(tuple(names) if names is not None else tuple(str(number) for number in range(shape.classes)))


def _bounds(given: Any) -> Fraction | tuple[Fraction, ...]:
    """Bounds of the features as a task holds them: one for all columns, or one for each."""
    if isinstance(given, (int, float, Fraction)):
        return exact(given)
    return tuple(each if isinstance(each, Fraction) else exact(float(each)) for each in given)


def _model(found: Protocol, shape: Shape, model: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The model, by what fits the protocol and the labels."""
    if model is not None:
        return {"kind": model} if isinstance(model, str) else _exactly(model)
    kind = found.usual_model(shape)
    if kind == "linear":
        return {"kind": kind, "width": shape.bound, **({"bias": True} if shape.rules.bias_of_numbers else {})}
    return {"kind": kind, **({"bias": True} if shape.rules.bias and kind == "softmax" else {})}


def _settings(found: Protocol, shape: Shape, given: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol's own settings: those given, and the batch, which is all that a device holds."""
    known = [each.name for each in dataclasses.fields(found.settings)] if found.settings else []
    for key in given:
        if known and key not in known:
            raise TaskError(
                f"{key} = {given[key]!r}: {found.name} has no such setting.{did_you_mean(key, known)} It has "
                f"{', '.join(each for each in known if each != 'kind')}."
            )
    batch = {"batch": shape.held} if "batch" in known else {}
    return {**batch, **_exactly(given)}


def _exactly(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table as a task file would hold it: floats as the fractions that their writer meant."""
    return {
        key: exact(value) if isinstance(value, float) else _exactly(value) if isinstance(value, Mapping) else value
        for key, value in table.items()
    }


def cohorts(shape: Shape, given: Mapping[str, Any]) -> Masking:
    """The masking table with what `given` leaves out. One cohort of everybody: as many separate sums as there are
    cohorts would each need all of the noise."""
    table = _exactly(given)
    cohort = table.get("cohort", max(3, min(shape.devices, LARGEST_COHORT)))
    if isinstance(cohort, int) and not isinstance(cohort, bool):
        fewest = table.get("minimum", math.ceil(SURVIVE * cohort))
        colluders = max(0, min(int(COLLUDE * cohort), 2 * fewest - cohort - 4)) if isinstance(fewest, int) else 0
        given_colluders = table.get("colluders", colluders)
        least = (cohort + given_colluders) // 2 + 2 if isinstance(given_colluders, int) else 0
        table = {"minimum": min(cohort, max(fewest, least, 3)), "colluders": colluders, **table, "cohort": cohort}
    return read_section(Masking, table, "masking")


def _within(found: Protocol, task: Task, shape: Shape, rows: Sequence[str], whole: Fraction | None) -> Task:
    """The task with prices that add up to at most `whole` in all uses: less for each row, where there are several."""
    if whole is None or _cost(task) <= whole:
        return task

    def priced(each: Fraction) -> Task:
        return found.advise(task.with_(privacy=replace(task.privacy, epsilon=dict.fromkeys(rows, each))), shape)

    low, high = whole / (2 * task.privacy.uses * len(rows)), whole
    for _ in range(20):
        middle = Fraction(math.floor((low + high) / 2 * 10**9), 10**9)
        low, high = (middle, high) if _cost(priced(middle)) <= whole else (low, middle)
    return priced(low)


def _cost(task: Task) -> Fraction:
    """What a sample pays in all its uses."""
    return exact(Price.of(find(task), task).sample_epsilon(task.privacy.uses))


# --- before a run ---

TOO_MUCH = 0.25
"""Noise in the mean over the crowd, over the longest contribution of a sample, beyond which a crowd is told that it is
too small. Found with the other rules: docs/defaults.md."""


@record
class Outlook:
    """A crowd that is too small for its price: how much noise there is, and what would help."""

    sentence: str
    noise: float
    """The length of the noise in the mean of all that the crowd gives, over the longest contribution of a sample."""
    devices: int
    """About how many devices, as they are, would be enough."""


def noise_of(task: Task, shape: Shape) -> float:
    """The length of the noise in the mean of all check-ins, over that of the longest contribution of a sample."""
    found = find(task)
    row = next(iter(found.mechanisms(task).values()))
    batch, entries = found.batch(task), shape.features * (shape.classes or 1)
    longest = float(row.sensitivity.bound) / 2
    if not longest:
        return 0.0
    check_ins = shape.check_ins(task, batch)
    return math.sqrt(row.noise_variance * entries / check_ins) / (batch * longest)


def expected_crowd(task: Task, devices: int | None = None, held: int | None = None) -> Shape | None:
    """The crowd of a task: of the size given, else one full cohort, each device with all samples of the task's budget,
    or with one batch where it has none; None where nothing says how many devices there are."""
    budget, masking = task.privacy.budget, task.masking
    if devices is None and masking is not None:
        devices = masking.cohort
    if devices is None:
        return None
    held = held or (find(task).batch(task) if budget is None else budget.samples)
    return Shape(task.features.dimension, task.classes, devices, held, task.labels.bound)


def too_few(task: Task, shape: Shape) -> str | None:
    """Why nothing would ever arrive from a crowd of this shape, and what would help; None where something would."""
    found, masking = find(task), task.masking
    batch, gathering = found.batch(task), found.gathers(task)
    if shape.held < batch:
        return (
            f"No device could check in: a check-in takes {count_text(batch, 'sample')}, and each device has "
            f"{shape.held:,}. Have devices with at least {batch:,} samples, or lower protocol.batch to {shape.held:,}."
        )
    if masking is not None and shape.devices < masking.minimum:
        return (
            f"No round could end: each needs masking.minimum = {masking.minimum:,} devices. Find at least as many, or "
            f"lower masking.minimum and masking.cohort to at most {shape.devices:,}; each device then adds more noise."
        )
    if masking is None and gathering is not None:
        fewest = gathering.size if gathering.seconds is None else gathering.minimum
        if shape.devices < fewest:
            return (
                f"No round could end: each needs {count_text(fewest, 'device')}. Find at least as many, or write a "
                "task whose rounds are smaller."
            )
    return None


def has_outlook(task: Task) -> bool:
    """Whether there is a rule that tells if a crowd is too small: for models from noisy samples."""
    one = Shape(task.features.dimension, task.classes, 1, 1)
    fits_none = find(task).fits(one, task.masking is not None) is not None
    return task.privacy.mechanism != "none" and task.privacy.unit == "sample" and not fits_none


def outlook(task: Task, shape: Shape) -> Outlook | None:
    """Whether noise will hide what this crowd knows, before it runs; None where it will not, and without noise."""
    if not has_outlook(task):
        return None
    noise = noise_of(task, shape)
    if noise <= TOO_MUCH:
        return None
    short = noise / TOO_MUCH
    enough = math.ceil(shape.devices * (short if task.masking is not None else short**2))
    help_ = [f"about {enough:,} such devices" if enough < 10**7 else "many more devices"]
    if task.masking is None and fits(str(task.protocol["kind"]), shape, True) is None:
        help_.append("masks, which let a cohort share one noise")
    help_.append(f"{short:.2g} times the ε")
    return Outlook(
        f"This crowd is small for its price: the noise in the mean of all that {shape.devices:,} devices give is "
        f"{noise:.2g} times as long as what one sample can give. Above {TOO_MUCH:g}, a model often stays far below one "
        "without privacy. "
        f"What would help: {', '.join(help_[:-1])}, or {help_[-1]}.",
        noise,
        enough,
    )


# --- what a simulation assumes ---


def has_fleet_time(task: Task) -> bool:
    """Whether the simulator has the timing of a live fleet for this task (`--world fleet`)."""
    found = find(task)
    several = task.masking is not None and found.gathers(task) is not None
    return found.channel(task) is not Channel.RELAYED and not several


def assumed(task: Task, *, world: str | None = None, delay: str = "0", dropout: float = 0.0) -> str:
    """What a simulation of a task assumes of the crowd's timing, and how to find out what a live one does."""
    if world is not None:
        return (
            "Assumed: the timing of one `crowdml fleet`, whose devices check in together. Devices of their own come "
            "one by one. Pilot with a few of them before you rely on it."
        )
    late = "messages are never late" if delay == "0" else f"each message takes --delay {delay}, counted in samples"
    if task.masking is None and find(task).gathers(task) is None:
        newest = ", each with the newest weights" if delay == "0" else ""
        said = f"Assumed: devices check in one by one{newest}, and {late}."
    else:
        lost = "and nobody drops out" if not dropout else f"and {100 * dropout:g} % of each drop out"
        said = f"Assumed: rounds follow one another{', ' if task.masking else ' and '}{late}"
        said += f", {lost}." if task.masking is not None else "."
    if not has_fleet_time(task):
        return f"{said} Pilot with `crowdml fleet` before you rely on it."
    return f"{said} A live crowd may do worse: try --world fleet, then pilot with `crowdml fleet`."
