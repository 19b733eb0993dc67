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

__all__ = ["SECTIONS", "Field", "Section", "check_text", "defaults", "field_of", "flaws_of", "task_text", "values_of"]

Kind = Literal["text", "area", "number", "lines", "choice"]
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


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    fields: tuple[Field, ...]
    folded: bool = False


SECTIONS: tuple[Section, ...] = (
    Section(
        "What participants read",
        "These sentences stand on the study's page and in the consent. They are part of the task: to change one later "
        "is a new task.",
        (
            Field("name", "Name", "Short, for commands and addresses: letters, digits, - and _."),
            Field("title", "Title", "The question that is learned, in one line."),
            Field("purpose", "Purpose", "Why it is learned, and who has what of it.", "area"),
            Field("collects", "What is sensed", "What devices sense, what stays there, and what leaves.", "area"),
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
            Field("labels.classes", "Classes", "One a line, at least two. Nothing here for a number.", "lines",
                  optional=True, only="for classes"),
            Field("labels.bound", "Bound on a number", "For a number only: its largest size.", "number", optional=True,
                  only="for a number"),
        ),
    ),
    Section(
        "Model",
        "All are small and convex: they learn from noisy gradients without tuning.",
        (
            Field(
                "model.kind",
                "Model",
                "Softmax for classes; logistic or svm for exactly two; linear for a number.",
                "choice",
                (("softmax", "softmax"), ("logistic", "logistic"), ("svm", "support vector machine"),
                 ("linear", "linear, for a number")),
                "softmax",
            ),
            Field("model.l2", "Regulariser λ", "Pulls weights towards zero; 0 for none.", "number", default="0.0"),
        ),
    ),
    Section(
        "Privacy",
        "ε is what a sample may lose in one check-in; smaller is more private and learns slower. A sample serves one "
        "check-in and is dropped.",
        (
            Field(
                "privacy.mechanism",
                "Noise",
                "Gaussian learns better in many dimensions and needs a δ; Laplace gives δ = 0 and needs the l1 bound.",
                "choice",
                (("discrete-gaussian", "discrete Gaussian"), ("discrete-laplace", "discrete Laplace")),
                "discrete-gaussian",
            ),
            Field("privacy.epsilon.gradient", "ε of the gradient", "How the model should change. Most of the budget "
                  "belongs here; around 1 protects well.", "number", default="0.9"),
            Field("privacy.epsilon.errors", "ε of the error count", "Lets everybody see how well the model does. "
                  "Empty: it does not leave.", "number", default="0.05", optional=True),
            Field("privacy.epsilon.labels", "ε of the label counts", "Shows how common each class is. Empty: they do "
                  "not leave.", "number", default="0.05", optional=True),
            Field("privacy.delta", "δ", "The chance that the guarantee fails; far below one over all samples.",
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
            Field("protocol.step.c", "Step size c", "Empty: taken from the noise and the bound alone, so that no data "
                  "is looked at. That is what the shipped tasks do.", "number", optional=True),
            Field("stop.steps", "Stop after check-ins", "Over all devices. Empty: it goes on until you stop it.",
                  "number", default="20000", optional=True, whole=True),
            Field("stop.error", "Stop at an error rate of", "On the crowd's noisy count, such as 0.05. Empty: never.",
                  "number", optional=True),
        ),
    ),
    Section(
        "For those who know why",
        "The defaults suit most studies.",
        (
            Field("protocol.buffer", "Samples that wait at most", "On a device that is away. Empty: ten batches.",
                  "number", optional=True, whole=True),
            Field("protocol.held_out", "Held-out samples", "The first so many of a batch test the model and do not "
                  "train it.", "number", optional=True, whole=True),
            Field(
                "protocol.step.schedule",
                "Step schedule",
                "How the step falls with the check-ins t.",
                "choice",
                (("1/sqrt(t)", "c / √t"), ("1/t", "c / t"), ("constant", "constant")),
                "1/sqrt(t)",
            ),
            Field("protocol.radius", "Radius of the weights", "They are kept in a ball of this radius.", "number",
                  default="200.0"),
            Field("protocol.clip", "Clip of a gradient", "Longer ones are shrunk to it, and the noise with them. "
                  "Empty: the model's own bound.", "number", optional=True),
            Field(
                "protocol.update",
                "Update",
                "What the server does with a gradient; devices do not notice.",
                "choice",
                (("sgd", "plain step"), ("average", "plain step, averaged weights"), ("adagrad", "AdaGrad"),
                 ("rmsprop", "RMSprop")),
                "sgd",
            ),
        ),
        folded=True,
    ),
)  # fmt: skip

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
    prefix = re.match(r"([a-z_]+(?:\.[a-z_]+)*) (?:=|is)", plain)
    inner = [key for key in FIELDS if prefix and key.startswith(f"{prefix[1]}.")]
    return inner[0] if inner else "model.kind" if plain.startswith("model ") else None


def task_text(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The task file that the fields describe, and what is wrong with single fields. Checked as a whole afterwards."""
    flaws: dict[str, str] = {}
    found: dict[str, Any] = {}
    for key, field in FIELDS.items():
        given = values.get(key, "").replace("\r\n", "\n").strip()
        if not given:
            if (not field.optional and field.kind in ("number", "choice")) or key == "name":
                flaws[key] = "Fill this in."
            continue
        if field.kind == "number":
            plain = given.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", given) else given
            if not _NUMBER.fullmatch(plain) or (field.whole and not plain.isdigit()):
                flaws[key] = f"{given[:40]!r} is no {'whole ' if field.whole else ''}number."
                continue
            _put(found, key, plain if field.whole else _exact(plain))
        elif field.kind == "lines":
            _put(found, key, "[" + ", ".join(_quoted(line.strip()) for line in given.split("\n") if line.strip()) + "]")
        elif field.kind == "choice" and given not in dict(field.choices):
            flaws[key] = "Choose one of the list."
        else:
            _put(found, key, _quoted(given))
    found.setdefault("protocol", {})["kind"] = '"sgd"'
    if "c" not in found["protocol"].get("step", {}):
        found["protocol"].setdefault("step", {})["c"] = "1.0"
        if not flaws:
            found["protocol"]["step"]["c"] = _suggested(_toml(found))
    return _toml(found), flaws


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
             "labels.bound": "1" if is_number else "", "model.kind": "linear" if is_number else "softmax"}  # fmt: skip
    return known.get(key, FIELDS[key].default)


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
        else:
            values[key] = f"{float(found):.12g}" if isinstance(found, (Fraction, float)) else str(found)
    if task.labels.kind == "class":
        values["labels.bound"] = ""
    return values
