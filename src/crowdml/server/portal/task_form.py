"""The form for a new task: each key of a task file as a field with a sentence, and back.

A field is called as its key, so that what the task's own check says of a key stands next to its field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from crowdml.errors import TaskError
from crowdml.protocols import settled
from crowdml.protocols.sgd import public_step
from crowdml.task import Task, parse

__all__ = [
    "SECTIONS",
    "Field",
    "Section",
    "applies",
    "begin_from",
    "by_rule",
    "check_text",
    "defaults",
    "field_of",
    "flaws_of",
    "in_fields",
    "prefilled",
    "says_all_of",
    "task_text",
    "values_of",
]

Kind = Literal["text", "area", "number", "numbers", "lines", "choice"]
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")


@dataclass(frozen=True)
class Field:
    """A key of a task file. `whole`: a count. An empty optional field leaves its key out."""

    key: str
    label: str
    help: str
    kind: Kind = "text"
    choices: tuple[tuple[str, str], ...] = ()
    default: str = ""
    optional: bool = False
    whole: bool = False
    only: str = ""
    """What it is for, where another choice decides whether it must be filled in."""
    when: tuple[str, str] | None = None
    """The choice that it belongs to, a key and its value: with another one its key is left out."""


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    fields: tuple[Field, ...]
    folded: bool = False


SGD, LOCAL, NETWORK = ("protocol.kind", "sgd"), ("protocol.kind", "local_updates"), ("model.kind", "mlp")
_SGD: Any = {"only": "for single gradients", "when": SGD}
_LOCAL: Any = {"only": "for local steps", "when": LOCAL}
_NETWORK: Any = {"only": "for a network", "when": NETWORK}

SECTIONS: tuple[Section, ...] = (
    Section(
        "What participants read",
        "These sentences appear on the study's page and in the consent. They are part of the task: changing one later "
        "makes a new task.",
        (
            Field("name", "Name", "Short, for commands and addresses: letters, digits, - and _."),
            Field("title", "Title", "The question that is learned, in one line."),
            Field("purpose", "Purpose", "Why it is learned, and who benefits.", "area"),
            Field("collects", "What is sensed", "What devices sense, what stays on them, and what leaves.", "area"),
        ),
    ),
    Section(
        "Samples",
        "What one sample looks like after the device has computed its features.",
        (
            Field(
                "features.kind",
                "Features",
                "Numbers that the device brings along, or the spectrum of its accelerometer.",
                "choice",
                (("vector", "a vector of numbers"), ("accelerometer-spectrum", "accelerometer spectrum (64 numbers)")),
                "vector",
            ),
            Field("features.dimension", "How many numbers", "d, the length of a feature vector.", "number",
                  default="64", whole=True),
            Field(
                "features.norm.kind",
                "Length measured as",
                "Longer vectors are scaled down to the bound; all noise rests on it. Laplace noise needs l1.",
                "choice",
                (("l2", "l2, the usual length"), ("l1", "l1, the sum of sizes")),
                "l2",
            ),
            Field("features.norm.bound", "Bound on the length", "1 suits features that were normalised.", "number",
                  default="1.0"),
            Field(
                "labels.kind",
                "Labels",
                "One of several classes, or a number.",
                "choice",
                (("class", "classes"), ("number", "a number")),
                "class",
            ),
            Field("labels.classes", "Classes", "One per line, or with commas between them; at least two.", "lines",
                  optional=True, only="for classes"),
            Field("labels.bound", "Bound on a number", "For a number only: its largest size.", "number", optional=True,
                  only="for a number"),
        ),
    ),
    Section(
        "Model and protocol",
        "The linear ones are convex and learn from noisy gradients without tuning. A network can learn what they "
        "cannot, and needs more devices, a clip and some trying: simulate it first.",
        (
            Field(
                "model.kind",
                "Model",
                "Softmax for classes; logistic or svm for exactly two; linear for a number; a network for either.",
                "choice",
                (("softmax", "softmax"), ("logistic", "logistic"), ("svm", "support vector machine"),
                 ("linear", "linear, for a number"), ("mlp", "neural network (multi-layer perceptron)")),
                "softmax",
            ),
            Field(
                "protocol.kind",
                "Protocol",
                "A device sends one noisy gradient, or takes several steps of its own and sends where they lead.",
                "choice",
                (("sgd", "single gradients (sgd)"), ("local_updates", "local steps (local_updates)")),
                "sgd",
            ),
            Field("model.hidden", "Hidden layers", "Units of each layer between samples and answer, such as 75, 75.",
                  "numbers", default="16", **_NETWORK),
            Field(
                "model.activation",
                "Activation",
                "What a unit does with its sum.",
                "choice",
                (("relu", "ReLU"), ("tanh", "tanh"), ("sigmoid", "sigmoid")),
                "relu",
                **_NETWORK,
            ),
            Field("model.l2", "Regulariser λ", "Pulls weights towards zero; 0 for none.", "number", default="0.0"),
        ),
    ),
    Section(
        "Privacy",
        "ε is what may be lost; smaller is more private and learns slower. A sample serves one check-in and is "
        "dropped, unless you say otherwise below.",
        (
            Field(
                "privacy.unit",
                "Who is protected",
                "Any one sample of a device, or the device as a whole with all that it ever gives.",
                "choice",
                (("sample", "each sample"), ("device", "each device, whole")),
                "sample",
                **_LOCAL,
            ),
            Field(
                "privacy.mechanism",
                "Noise",
                "Gaussian learns better in many dimensions and needs a δ; Laplace gives δ = 0 and needs the l1 bound.",
                "choice",
                (("discrete-gaussian", "discrete Gaussian"), ("discrete-laplace", "discrete Laplace")),
                "discrete-gaussian",
            ),
            Field("privacy.epsilon.gradient", "ε of the gradient", "How the model should change, in one check-in. Most "
                  "of the budget belongs here; around 1 protects well.", "number", default="0.9", **_SGD),
            Field("privacy.epsilon.errors", "ε of the error count", "Lets everybody see how well the model does. "
                  "Empty: it does not leave.", "number", default="0.05", optional=True, **_SGD),
            Field("privacy.epsilon.labels", "ε of the label counts", "Shows how common each class is. Empty: they do "
                  "not leave.", "number", default="0.05", optional=True, **_SGD),
            Field("privacy.epsilon.update", "ε of the update", "Where a device's own steps lead. What is paid in all: "
                  "by a sample for the check-ins that use it, by a device for all that its budget allows.",
                  "number", default="1.0", **_LOCAL),
            Field("privacy.delta", "δ", "The chance that the guarantee fails: at most 1e-5, and far below one over all "
                  "samples.",
                  "number", default="1e-6"),
            Field("privacy.budget.epsilon", "Budget: ε of a sample", "The most that any one sample may lose to this "
                  "task.", "number", default="1.0", optional=True),
            Field("privacy.budget.samples", "Budget: samples of a device", "After so many a device is done.", "number",
                  default="2000", optional=True, whole=True),
        ),
    ),
    Section(
        "Learning",
        "How samples become check-ins, and how the server moves.",
        (
            Field("protocol.batch", "Samples in a check-in", "More of them drown the noise better; devices come less "
                  "often.", "number", default="20", whole=True),
            Field("protocol.clip", "Clip of a gradient", "Longer ones are shrunk to it, and the noise with them. "
                  "Empty: the model's own bound. A network has none, and needs a clip, such as 1.", "number",
                  optional=True),
            Field("protocol.local_steps", "Local steps", "Of a device, between two check-ins.", "number", default="5",
                  whole=True, **_LOCAL),
            Field("protocol.minibatch", "Samples in a step", "A divisor of the samples in a check-in. Empty: all of "
                  "them.", "number", optional=True, whole=True, **_LOCAL),
            Field("protocol.rate.c", "Rate of a step c", "How far a device's own step goes. Too long ones end the "
                  "task: the last good weights stay.", "number", default="0.5", **_LOCAL),
            Field("protocol.server_batch", "Check-ins in a round", "The server averages so many, then publishes.",
                  "number", default="10", whole=True, **_LOCAL),
            Field("protocol.step.c", "Step size c", "Empty: taken from the noise and the bound alone, so that no data "
                  "is looked at. That is what the shipped tasks do.", "number", optional=True, **_SGD),
            Field("stop.steps", "Stop after check-ins", "Over all devices; of local steps, after so many rounds. "
                  "Empty: it goes on until you stop it.", "number", default="20000", optional=True, whole=True),
            Field("stop.error", "Stop at an error rate of", "On the crowd's noisy count, such as 0.05. Empty: never.",
                  "number", optional=True, **_SGD),
        ),
    ),
    Section(
        "Advanced",
        "The defaults suit most studies.",
        (
            Field("protocol.buffer", "Samples that wait at most", "On a device that is away. Empty: ten batches.",
                  "number", optional=True, whole=True),
            Field("privacy.uses", "Check-ins that a sample serves", "For one price in all. Empty: one.", "number",
                  optional=True, whole=True),
            Field("protocol.update_clip", "Clip of an update", "Of all that a device gives in a check-in: its price "
                  "where the device is protected. Empty: what its steps can reach.", "number", optional=True, **_LOCAL),
            Field(
                "protocol.rate.schedule",
                "Rate schedule",
                "How a device's steps fall with the rounds t.",
                "choice",
                (("constant", "constant"), ("1/sqrt(t)", "c / √t"), ("1/t", "c / t"), ("adagrad", "AdaGrad"),
                 ("rmsprop", "RMSprop")),
                "constant",
                **_LOCAL,
            ),
            Field(
                "protocol.stale",
                "A check-in of an old round",
                "Refused as in the paper, or taken with less weight the older it is.",
                "choice",
                (("refuse", "refused"), ("weigh", "weighed by its age")),
                "refuse",
                **_LOCAL,
            ),
            Field(
                "protocol.optimiser",
                "What the server does with a round",
                "It works on what was blurred already, so devices do not notice.",
                "choice",
                (("average", "average"), ("momentum", "momentum"), ("adam", "Adam")),
                "average",
                **_LOCAL,
            ),
            Field("protocol.held_out", "Held-out samples", "The first so many of a batch test the model and do not "
                  "train it.", "number", optional=True, whole=True, **_SGD),
            Field(
                "protocol.step.schedule",
                "Step schedule",
                "How the step falls with the check-ins t.",
                "choice",
                (("1/sqrt(t)", "c / √t"), ("1/t", "c / t"), ("constant", "constant")),
                "1/sqrt(t)",
                **_SGD,
            ),
            Field("protocol.radius", "Radius of the weights", "They are kept in a ball of this radius.", "number",
                  default="200.0", **_SGD),
            Field(
                "protocol.update",
                "Update",
                "What the server does with a gradient; devices do not notice.",
                "choice",
                (("sgd", "plain step"), ("average", "plain step, averaged weights"), ("adagrad", "AdaGrad"),
                 ("rmsprop", "RMSprop")),
                "sgd",
                **_SGD,
            ),
        ),
        folded=True,
    ),
)  # fmt: skip

STEP = "protocol.step.c"
"""The field that a rule fills in where it is empty."""
CLIP, USUAL_CLIP = "protocol.clip", "1"
FIELDS: dict[str, Field] = {field.key: field for section in SECTIONS for field in section.fields}


def defaults() -> dict[str, str]:
    return {key: field.default for key, field in FIELDS.items()}


def field_of(sentence: str) -> str | None:
    """The field that a task's refusal is about: the longest key that it begins with, or that it names."""
    plain = sentence.partition(": ")[2] if sentence.startswith("the task: ") else sentence
    at_start = [key for key in FIELDS if re.match(rf"{re.escape(key)}(?![\w])", plain)]
    named = [key for key in FIELDS if "." in key and re.search(rf"\b{re.escape(key)}(?![\w])", plain)]
    if found := at_start or named:
        return max(found, key=len)
    if (setting := re.match(r"model '[\w-]+': (\w+) =", plain)) and f"model.{setting[1]}" in FIELDS:
        return f"model.{setting[1]}"
    prefix = re.match(r"([a-z_]+(?:\.[a-z_]+)*) (?:=|is)", plain)
    inner = [key for key in FIELDS if prefix and key.startswith(f"{prefix[1]}.")]
    return inner[0] if inner else "model.kind" if plain.startswith("model ") else None


def in_fields(sentence: str) -> str:
    """A task's refusal in the words of the form: a key of the task file becomes the label of its field."""
    names = {key: f"“{field.label}”" for key, field in FIELDS.items() if "." in key}
    names["privacy.epsilon"] = "an ε of what leaves"
    keys = "|".join(re.escape(key) for key in sorted(names, key=len, reverse=True))
    return re.sub(rf"\b(?:{keys})(?![\w.]*\w)", lambda found: names[found[0]], sentence)


def task_text(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The task file that the fields describe, and what is wrong with single fields. Checked as a whole afterwards."""
    flaws: dict[str, str] = {}
    found: dict[str, Any] = {}
    for key, field in FIELDS.items():
        given = values.get(key, "").replace("\r\n", "\n").strip()
        if not applies(field, values):
            continue
        if not given:
            if (not field.optional and field.kind in ("number", "numbers", "choice")) or key == "name":
                flaws[key] = "Fill this in."
            continue
        if field.kind == "number":
            plain = given.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", given) else given
            if len(plain) > 60 or not _NUMBER.fullmatch(plain) or (field.whole and not plain.isdecimal()):
                flaws[key] = _no_number(given, whole=field.whole)
                continue
            _put(found, key, plain if field.whole else _exact(plain))
        elif field.kind == "numbers":
            parts = re.split(r"[\s,]+", given.strip("[] "))
            if not all(part.isdecimal() and len(part) < 10 for part in parts):
                flaws[key] = f"{given[:40]!r} is no list of whole numbers, such as 75, 75."
                continue
            _put(found, key, f"[{', '.join(str(int(part)) for part in parts)}]")
        elif field.kind == "lines":
            lines = [line for line in given.split("\n") if line.strip()]
            lines = lines if len(lines) > 1 else re.split("[,;]", given)  # of one line alone: walk, bike, tram
            _put(found, key, "[" + ", ".join(_quoted(line.strip()) for line in lines if line.strip()) + "]")
        elif field.kind == "choice" and given not in dict(field.choices):
            flaws[key] = "Choose one of the list."
        else:
            _put(found, key, _quoted(given))
    if _chosen(values, "protocol.kind") == "sgd" and "c" not in found.setdefault("protocol", {}).get("step", {}):
        found["protocol"].setdefault("step", {})["c"] = "1.0"
        if not flaws:
            found["protocol"]["step"]["c"] = _suggested(_toml(found))
    return _toml(found), flaws


def applies(field: Field, values: Mapping[str, str]) -> bool:
    """Whether the field belongs to what was chosen."""
    return field.when is None or _chosen(values, field.when[0]) == field.when[1]


def _chosen(values: Mapping[str, str], key: str) -> str:
    return values.get(key, "").strip() or FIELDS[key].default


def says_all_of(task: Task) -> bool:
    """Whether the form has a field for everything that the task says."""
    known = {*FIELDS, "model.seed"} if task.model.get("seed", 1) == 1 else set(FIELDS)

    def said(where: str, table: Mapping[str, Any]) -> bool:
        return all(
            said(f"{where}.{key}", value) if isinstance(value, Mapping) else f"{where}.{key}" in known
            for key, value in table.items()
        )

    kinds = dict(FIELDS["protocol.kind"].choices), dict(FIELDS["model.kind"].choices)
    chosen = str(task.protocol["kind"]) in kinds[0] and str(task.model["kind"]) in kinds[1]
    return task.masking is None and chosen and said("protocol", task.protocol) and said("model", task.model)


def flaws_of(values: Mapping[str, str]) -> dict[str, str]:
    """Everything that is wrong with the fields, in the words of the task's own check, which stops at its first refusal.

    So what it refused is set to what suits the rest, and it is asked again, until it refuses nothing more.
    """
    tried = dict(values)
    flaws = task_text(tried)[1]
    for _ in FIELDS:
        tried |= {key: _suiting(key, tried) for key in flaws if key}
        text, left = task_text(tried)
        try:
            if not left:
                check_text(text)
            return flaws
        except TaskError as error:
            key = field_of(str(error)) or ""
            if key in flaws:  # what we set does not suit either: the rest is said when this is mended
                return flaws
            flaws[key] = str(error)
    return flaws


def _suiting(key: str, values: Mapping[str, str]) -> str:
    """A value with which a field is no reason to refuse the others."""
    is_number = values.get("labels.kind") == "number"
    known = {"name": "task", "title": "A task", "labels.classes": "" if is_number else "a\nb",
             "labels.bound": "1" if is_number else "", "model.kind": "linear" if is_number else "softmax",
             "protocol.clip": "1" if values.get("model.kind") == "mlp" else ""}  # fmt: skip
    return known.get(key, FIELDS[key].default)


def _no_number(given: str, *, whole: bool) -> str:
    """What is wrong with something that is no number, and what was meant where that is plain."""
    said = f"{given[:40]!r} is no {'whole ' if whole else ''}number"
    comma = re.fullmatch(r"[+-]?\d*,\d+", given)
    return f"{said}: write {given.replace(',', '.')}, with a point." if comma and not whole else f"{said}."


def by_rule(values: Mapping[str, str]) -> frozenset[str]:
    """The fields of a filled-in form whose values a rule makes: those that may be empty, and are."""
    is_sgd = _chosen(values, "protocol.kind") == "sgd"
    return frozenset([STEP] if is_sgd and not values.get(STEP, "").strip() else [])


def prefilled(values: Mapping[str, str]) -> dict[str, str]:
    """The fields with a clip where a network needs one and none was given. A script does the same at once."""
    needs_clip = _chosen(values, "model.kind") == "mlp" and not values.get(CLIP, "").strip()
    return {**values, **({CLIP: USUAL_CLIP} if needs_clip else {})}


def begin_from(task: Task, rules: frozenset[str] | None = None) -> tuple[dict[str, str], dict[str, str]]:
    """The fields of a task to begin another one from, and the values of those that a rule made: they stay empty.

    `rules` says which a rule made. None: nobody kept it, so a value that is the rule's, rounded to two digits or more,
    counts as made by it.
    """
    values = values_of(task)
    if rules is None:
        rules = frozenset([STEP] if str(task.protocol["kind"]) == "sgd" and _is_rules(task, values[STEP]) else [])
    made = {key: values[key] for key in rules if key in values}
    return {**values, **dict.fromkeys(made, "")}, made


def _is_rules(task: Task, step: str) -> bool:
    rule = float(public_step(task))
    return any(step and float(step) == float(f"{rule:.{digits}g}") for digits in (2, 3, 4))


def _suggested(text: str) -> str:
    """The step that looks at no data; where the rest of the task is wrong, that is said first."""
    try:
        return _exact(f"{float(public_step(parse(text))):.4g}")
    except TaskError:
        return "1.0"


def _exact(text: str) -> str:
    """A number as TOML writes it: with a digit on each side of the point."""
    head, mark, tail = text.lower().lstrip("+").partition("e")
    whole, _, part = head.partition(".")
    return (
        f"{int(whole or 0)}.{part or 0}{mark}{tail}"
        if not whole.startswith("-")
        else f"{whole}.{part or 0}{mark}{tail}"
    )


def _put(found: dict[str, Any], key: str, value: str) -> None:
    *tables, last = key.split(".")
    for name in tables:
        found = found.setdefault(name, {})
    found[last] = value


def _quoted(text: str) -> str:
    return json.dumps(" ".join(text.split()), ensure_ascii=False).replace("\x7f", "")


def _toml(found: Mapping[str, Any]) -> str:
    """Top keys first, then a section for each table; tables within it in one line."""
    lines = [f"{key} = {value}" for key, value in found.items() if isinstance(value, str)]
    for section, table in found.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{section}]"]
            lines += [f"{key} = {_inline(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, str):
        return value
    return "{ " + ", ".join(f"{key} = {_inline(inner)}" for key, inner in value.items()) + " }"


def check_text(text: str) -> Task:
    """The task in its published form, checked by the same code as everywhere; raises TaskError."""
    return settled(parse(text))


def values_of(task: Task) -> dict[str, str]:
    """The fields of a task that exists, to begin another one from."""
    values = dict.fromkeys(FIELDS, "")
    for key, field in FIELDS.items():
        found: Any = task
        for name in key.split("."):
            found = found.get(name) if isinstance(found, Mapping) else getattr(found, name, None)
        if found is None:
            values[key] = field.default if not field.optional and key != "name" else ""
        elif field.kind == "lines":
            values[key] = "\n".join(found)
        elif field.kind == "numbers":
            values[key] = ", ".join(map(str, found))
        else:
            values[key] = f"{float(found):.12g}" if isinstance(found, (Fraction, float)) else str(found)
    if task.labels.kind == "class":
        values["labels.bound"] = ""
    return values
