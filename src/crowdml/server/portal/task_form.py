"""The form for a new task: each key of a task file as a field with a sentence, and back.

A field is called as its key, so that what the task's own check says of a key stands next to its field.
"""

from __future__ import annotations

import contextlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from crowdml.errors import PluginError, TaskError
from crowdml.protocol import Protocol
from crowdml.protocols import PROTOCOLS, settled
from crowdml.settings import Setting, describe
from crowdml.suggest import Shape, cohorts, complete, prefers_masks
from crowdml.task import Task, parse

Kind = Literal["text", "area", "number", "numbers", "lines", "choice"]
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")


@dataclass(frozen=True)
class Input:
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
    when: tuple[str, tuple[str, ...]] | None = None
    """The choices that it belongs to, a key and its values: with another one its key is left out."""


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    fields: tuple[Input, ...]
    folded: bool = False


TRUTH = (("false", "no"), ("true", "yes"))


def _read_form() -> tuple[Section, ...]:
    """The form of a new task, as `form.toml` says it."""
    text = files("crowdml.server.portal").joinpath("form.toml").read_text("utf-8")
    sections = tomllib.loads(text)["section"]
    return tuple(Section(fields=tuple(map(_field, each.pop("field"))), **each) for each in sections)


def _field(said: dict[str, Any]) -> Input:
    if "when" in said:
        key, values = said["when"]
        said["when"] = key, tuple(values)
    said["choices"] = tuple((value, label) for value, label in said.get("choices", ()))
    return Input(**said)


SECTIONS = _read_form()

DEVICES = "crowd.devices"
"""The field that is no key of a task: how many devices the operator expects."""
MECHANISM, STEP, SCHEDULE = "privacy.mechanism", "protocol.step.c", "protocol.step.schedule"
CLIP, USUAL_CLIP = "protocol.clip", "1"
COHORT = ("masking.cohort", "masking.minimum", "masking.colluders")
BY_RULE = (MECHANISM, *COHORT, "privacy.uses", CLIP, STEP, SCHEDULE, "protocol.update", "protocol.rate.c",
           "protocol.local_steps", "protocol.server_batch")  # fmt: skip
"""Fields that rules fill in where they are empty."""
MOST_DEVICES = 10**7
GAUSSIAN, SKELLAM = '"discrete-gaussian"', '"skellam"'


def sections() -> tuple[Section, ...]:
    """The form, with the protocols that are installed besides ours and a field for each of their settings."""
    return _sections(tuple(name for name in PROTOCOLS if name not in PROTOCOLS.ours))


@lru_cache(maxsize=8)
def _sections(installed: tuple[str, ...]) -> tuple[Section, ...]:
    plugged: dict[str, dict[str, Input]] = {}
    for name in installed:
        with contextlib.suppress(PluginError):  # one that cannot be imported is not offered: `task check` says why
            plugged[name] = _fields_of(PROTOCOLS[name])
    known = {field.key for section in SECTIONS for field in section.fields}
    found = [
        replace(section, fields=tuple(_shared(field, plugged) for field in section.fields)) for section in SECTIONS
    ]
    for fields in plugged.values():
        for field in fields.values():
            place = next(i for i, each in enumerate(found) if each.title == _SECTION_OF[field.key.split(".")[0]])
            if field.key not in known:
                found[place] = replace(found[place], fields=(*found[place].fields, field))
    return tuple(found)


_SECTION_OF = {"privacy": "Privacy", "protocol": "Learning"}


def _shared(field: Input, plugged: Mapping[str, Mapping[str, Input]]) -> Input:
    """A field of ours beside those of plug-ins: it is theirs, too, where they have a setting of its name."""
    if field.key == "protocol.kind":
        return replace(field, choices=(*field.choices, *((name, f"{name} (plug-in)") for name in plugged)))
    if not plugged or not field.key.startswith(("protocol.", "privacy.epsilon.", "model.l2")):
        return field
    theirs = [name for name, fields in plugged.items() if field.key in fields]
    ours = field.when[1] if field.when is not None else ("sgd", "local_updates")
    return replace(field, only=field.only or "where it applies", when=("protocol.kind", (*ours, *theirs)))


def _fields_of(protocol: Protocol) -> dict[str, Input]:
    """A field for each setting that a plug-in's protocol declares, and one for the price of each row that leaves."""
    only: Any = {"only": f"for {protocol.name}", "when": ("protocol.kind", (protocol.name,))}
    found = [
        Input(f"privacy.epsilon.{row}", f"ε of {row.replace('_', ' ')}", text or "What a sample pays for it.", "number",
              default="" if optional else "1.0", optional=optional, **only)
        for row, text, optional in protocol.rows()
    ]  # fmt: skip

    def add(prefix: str, settings: Sequence[Setting], needed: bool = True) -> None:
        for each in settings:
            key, label = f"{prefix}.{each.name}", each.name.replace("_", " ").capitalize()
            choices = tuple((one, one) for one in each.choices) or (TRUTH if each.type is bool else ())
            kind: Kind = "choice" if choices else "text" if each.type is str else "number"
            default = "" if each.default is None else plain_text(each.default)
            if each.fields:
                add(key, each.fields, needed and each.required)
            elif each.type is not object:
                optional = not (needed and each.required)
                default = "" if optional and not needed else default
                found.append(Input(key, label, each.help, kind, choices, default, optional, each.type is int, **only))

    add("protocol", () if protocol.settings is None else describe(protocol.settings))
    return {field.key: field for field in found}


def plain_text(value: Any) -> str:
    """A value of a task as its field shows it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{float(value):.12g}" if isinstance(value, (Fraction, float)) else str(value)


def fields() -> dict[str, Input]:
    """Every field of the form by its key."""
    return {field.key: field for section in sections() for field in section.fields}


def defaults() -> dict[str, str]:
    return {key: field.default for key, field in fields().items()}


def field_of(sentence: str) -> str | None:
    """The field that a task's refusal is about: the longest key that it begins with, or that it names."""
    plain = sentence.partition(": ")[2] if sentence.startswith("the task: ") else sentence
    at_start = [key for key in fields() if re.match(rf"{re.escape(key)}(?![\w])", plain)]
    named = [key for key in fields() if "." in key and re.search(rf"\b{re.escape(key)}(?![\w])", plain)]
    if found := at_start or named:
        return max(found, key=len)
    if (setting := re.match(r"model '[\w-]+': (\w+) =", plain)) and f"model.{setting[1]}" in fields():
        return f"model.{setting[1]}"
    prefix = re.match(r"([a-z_]+(?:\.[a-z_]+)*) (?:=|is)", plain)
    inner = [key for key in fields() if prefix and key.startswith(f"{prefix[1]}.")]
    return inner[0] if inner else "model.kind" if plain.startswith("model ") else None


def in_fields(sentence: str) -> str:
    """A task's refusal in the words of the form: a key of the task file becomes the label of its field."""
    names = {key: f"“{field.label}”" for key, field in fields().items() if "." in key}
    names["privacy.epsilon"] = "an ε of what leaves"
    keys = "|".join(re.escape(key) for key in sorted(names, key=len, reverse=True))
    return re.sub(rf"\b(?:{keys})(?![\w.]*\w)", lambda found: names[found[0]], sentence)


def task_text(values: Mapping[str, str]) -> tuple[str, dict[str, str]]:
    """The task file that the fields describe, and what is wrong with single fields. Checked as a whole afterwards."""
    flaws: dict[str, str] = {}
    found: dict[str, Any] = {}
    for key, field in fields().items():
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
            _put(found, key, given if field.choices == TRUTH else _quoted(given))
    devices = found.pop("crowd", {}).get("devices", "")
    if devices and not 1 <= int(devices) <= MOST_DEVICES:
        flaws[DEVICES] = f"Between 1 and {MOST_DEVICES:,} devices."
    if values.get(SCHEDULE, "").strip() not in ("", "constant") and not values.get(STEP, "").strip():
        flaws.setdefault(STEP, "A step by rule is constant. Give c, or leave the schedule to the rule, too.")
    return _toml(found if flaws else _completed(found, int(devices))), flaws


def _completed(found: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The tables of a task with what rules choose, under masks where that is the first choice and nothing typed is
    against it. Where something is wrong, they are such that the task's check says what."""
    mechanism, made = found["privacy"].get("mechanism"), dict[str, Any]()
    forms = (mechanism == SKELLAM,) if mechanism is not None else (True,) if "masking" in found else (None, False)
    for masked in forms:
        made = _with_rules(found, devices, masked)
        with contextlib.suppress(TaskError):
            check_text(_toml(made))
            break
    return made


def _with_rules(found: Mapping[str, Any], devices: int, masked: bool | None) -> dict[str, Any]:
    """`masked`: None for masks where a rule prefers them."""
    tables: dict[str, Any] = {key: dict(each) if isinstance(each, Mapping) else each for key, each in found.items()}
    protocol, privacy, masking = tables["protocol"], tables["privacy"], tables.pop("masking", {})
    begun = [key for key, each in protocol.items() if isinstance(each, Mapping) and key in ("step", "rate")]
    typed = {key: protocol.pop(key) for key in begun if "c" not in protocol[key]}
    kind, uses = json.loads(protocol["kind"]), privacy.get("uses")
    privacy["mechanism"] = GAUSSIAN if masked or "mechanism" not in privacy else privacy["mechanism"]
    with contextlib.suppress(TaskError):
        task = parse(_toml(tables))
        held = task.privacy.budget.samples if task.privacy.budget is not None else int(task.protocol["batch"])
        shape = Shape(task.features.dimension, task.classes, devices, held, task.labels.bound)
        if prefers_masks(kind, shape) if masked is None else masked:
            given = tomllib.loads(_toml({"masking": masking}), parse_float=Fraction)["masking"]
            terms = cohorts(shape, given)
            privacy["mechanism"] = SKELLAM
            masking = {**masking, **{key: str(getattr(terms, key)) for key in ("cohort", "minimum", "colluders")}}
            task = replace(task, masking=terms, privacy=replace(task.privacy, mechanism="skellam"))
        made = complete(task, shape, None if uses is None else int(uses))
        privacy |= {"uses": str(made.privacy.uses)} if made.privacy.uses > 1 else {}
        protocol |= {key: _written(value) for key, value in made.protocol.items() if key not in protocol}
    for name, usual in {"sgd": {"step": "1.0"}, "local_updates": {"rate": "0.5"}}.get(kind, {}).items():
        protocol[name] = {**typed.get(name, {}), **protocol.get(name, {"c": usual})}
    return {**tables, "masking": masking} if masking else tables


def _written(value: Any) -> Any:
    """A setting that a rule made, as TOML writes it."""
    if isinstance(value, Mapping):
        return {key: _written(each) for key, each in value.items()}
    if isinstance(value, str):
        return _quoted(value)
    return str(value).lower() if isinstance(value, int) else _exact(plain_text(value))


def applies(field: Input, values: Mapping[str, str]) -> bool:
    """Whether the field belongs to what was chosen."""
    return field.when is None or _chosen(values, field.when[0]) in field.when[1]


def _chosen(values: Mapping[str, str], key: str) -> str:
    return values.get(key, "").strip() or fields()[key].default


def says_all_of(task: Task) -> bool:
    """Whether the form has a field for everything that the task says."""
    known = {*fields(), "model.seed"} if task.model.get("seed", 1) == 1 else set(fields())

    def said(where: str, table: Mapping[str, Any]) -> bool:
        return all(
            said(f"{where}.{key}", value) if isinstance(value, Mapping) else f"{where}.{key}" in known
            for key, value in table.items()
        )

    kinds = dict(fields()["protocol.kind"].choices), dict(fields()["model.kind"].choices)
    chosen = str(task.protocol["kind"]) in kinds[0] and str(task.model["kind"]) in kinds[1]
    more = task.features.low is not None or task.features.extractor is not None
    return chosen and not more and said("protocol", task.protocol) and said("model", task.model)


def flaws_of(values: Mapping[str, str]) -> dict[str, str]:
    """Everything that is wrong with the fields, in the words of the task's own check, which stops at its first refusal.

    So what it refused is set to what suits the rest, and it is asked again, until it refuses nothing more.
    """
    tried = dict(values)
    flaws = task_text(tried)[1]
    for _ in fields():
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
    return known.get(key, fields()[key].default)


def _no_number(given: str, *, whole: bool) -> str:
    """What is wrong with something that is no number, and what was meant where that is plain."""
    said = f"{given[:40]!r} is no {'whole ' if whole else ''}number"
    comma = re.fullmatch(r"[+-]?\d*,\d+", given)
    return f"{said}: write {given.replace(',', '.')}, with a point." if comma and not whole else f"{said}."


def by_rule(values: Mapping[str, str]) -> frozenset[str]:
    """The fields of a filled-in form whose values a rule makes: those that may be empty, and are."""
    text, flaws = task_text(values)
    made = {} if flaws else values_of(parse(text))
    return frozenset(key for key in BY_RULE if made.get(key) and not values.get(key, "").strip())


def prefilled(values: Mapping[str, str]) -> dict[str, str]:
    """The fields with a clip where a network needs one and none was given. A script does the same at once."""
    needs_clip = _chosen(values, "model.kind") == "mlp" and not values.get(CLIP, "").strip()
    return {**values, **({CLIP: USUAL_CLIP} if needs_clip else {})}


def begin_from(
    task: Task, rules: frozenset[str] | None = None, devices: int | None = None
) -> tuple[dict[str, str], dict[str, str]]:
    """The fields of a task to begin another one from, and the values of those that a rule made: they stay empty.

    `rules` says which a rule made. None: nobody kept it, so a step that is the rule's for a crowd of no known size,
    rounded to two digits or more, counts as made by one. `devices`: how many were expected.
    """
    values = values_of(task) | ({} if devices is None else {DEVICES: str(devices)})
    if rules is None:
        rules = frozenset([STEP] if str(task.protocol["kind"]) == "sgd" and _is_rules(task, values[STEP]) else [])
    made = {key: values[key] for key in BY_RULE if key in rules and values[key]}
    return {**values, **dict.fromkeys([*made, *([SCHEDULE] if STEP in made else [])], "")}, made


def _is_rules(task: Task, step: str) -> bool:
    bare = replace(task, protocol={key: value for key, value in task.protocol.items() if key != "step"})
    rule = float(PROTOCOLS["sgd"].advise(bare, None).protocol["step"]["c"])
    return any(step and float(step) == float(f"{rule:.{digits}g}") for digits in (2, 3, 4))


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
    values = dict.fromkeys(fields(), "")
    for key, field in fields().items():
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
            values[key] = plain_text(found)
    if task.labels.kind == "class":
        values["labels.bound"] = ""
    if task.masking is not None:
        values[DEVICES] = str(task.masking.cohort)
    return values
