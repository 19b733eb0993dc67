"""Settings: a table of a task file as a dataclass, with its limits in the types and its help beside its fields.

    @dataclass(frozen=True)
    class Settings:
        batch: Annotated[int, Between(1, 100_000)]
        'How many samples a check-in uses.'

An unknown key, a wrong type, a missing key and a value out of its range are refused with a sentence that names the key,
the value and what would be allowed. `describe` gives the same fields to programs: the portal's form is made of them.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from crowdml.errors import TaskError
from crowdml.records import record
from crowdml.texts import did_you_mean, hidden_control

C = TypeVar("C")


class Limit:
    """What a setting may be, as an annotation of its type: `Annotated[int, Between(1, 10)]`."""

    def check(self, where: str, value: Any) -> None:
        """Refuse a value that is out of the limit, by its key."""
        raise NotImplementedError


@record
class Between(Limit):
    """A number from `low` to `high`, both included."""

    low: float | Fraction
    high: float | Fraction

    def check(self, where: str, value: Any) -> None:
        between(where, value, self.low, self.high)


@record
class Positive(Limit):
    """A number above zero."""

    def check(self, where: str, value: Any) -> None:
        positive(where, value)


class OneOf(Limit):
    """One of several texts."""

    def __init__(self, *allowed: str) -> None:
        self.allowed = allowed

    def check(self, where: str, value: Any) -> None:
        choose(where, value, self.allowed)


@record
class Setting:
    """A field of a settings class, for those who show it: a form, `task check`."""

    name: str
    type: type
    """int, float, Fraction, str or bool; a table is one of `fields`, and anything else is an object."""
    help: str
    """The docstring of the field."""
    default: Any = None
    required: bool = False
    choices: tuple[str, ...] = ()
    fields: tuple[Setting, ...] = ()
    """The fields of a table."""


def describe(cls: type) -> tuple[Setting, ...]:
    """The settings that a class declares, in its order; `kind` and `plugin` name the class itself, and are none."""
    hints, helps = get_type_hints(cls, include_extras=True), docstrings(cls)
    entries = [entry for entry in dataclasses.fields(cls) if entry.name not in ("kind", "plugin")]
    return tuple(_describe(entry, hints[entry.name], helps.get(entry.name, "")) for entry in entries)


def _describe(entry: dataclasses.Field[Any], hint: Any, text: str) -> Setting:
    default: Any = None if entry.default is dataclasses.MISSING else entry.default
    required = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
    kind: Any = hint
    if type(None) in get_args(kind):
        kind = next(each for each in get_args(kind) if each is not type(None))
    limits = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    kind = get_args(kind)[0] if limits else kind
    choices = next((limit.allowed for limit in limits if isinstance(limit, OneOf)), ())
    inner = describe(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else ()
    plain = kind if kind in (int, float, Fraction, str, bool) else object
    return Setting(entry.name, plain, text, default, required, choices, inner)


def docstrings(cls: type) -> dict[str, str]:
    """The strings that stand behind the fields of a class, each on one line."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except (OSError, TypeError, SyntaxError):  # a class without a source, typed at a prompt
        return {}
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            said = text.value
            if isinstance(said, ast.Constant) and isinstance(said.value, str):
                found[field.target.id] = " ".join(said.value.split())
    return found


def read_section(cls: type[C], values: Any, where: str) -> C:
    """A dataclass from a table of a task file: unknown keys, wrong types and missing keys are refused by name."""
    if not isinstance(values, Mapping):
        raise TaskError(f"{where} = {show(values)}: expected a table with {_keys(cls)}{_example(where, values)}.")
    hints = get_type_hints(cls, include_extras=True)
    fields = {entry.name: entry for entry in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    prefix = f"{where}." if where else ""
    for key in values:
        if key not in fields:
            is_table = isinstance(values[key], Mapping)
            said = (
                f"[{prefix}{key}]: no such table." if is_table else f"{prefix}{key} = {show(values[key])}: no such key."
            )
            raise TaskError(f"{said}{did_you_mean(key, fields)} Known here: {_keys(cls)}.")
    found = {name: _convert(hints[name], values[name], f"{prefix}{name}") for name in fields if name in values}
    for name, entry in fields.items():
        missing = entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
        if name not in found and missing:
            told = docstrings(cls).get(name) or cls.__doc__ or ""
            said = "" if told.startswith(f"{cls.__name__}(") else told  # a dataclass without a docstring: its signature
            raise TaskError(f"{prefix}{name} is missing{_example(f'{prefix}{name}')}. {said}".strip())
    return cls(**found)


def read_kind(cls: type[C], values: Mapping[str, Any], where: str) -> C:
    """The settings of what a table names: its `kind`, and the `plugin` that it comes from, are not among them."""
    own = {entry.name for entry in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    given = {key: value for key, value in values.items() if key in own or key not in ("kind", "plugin")}
    return read_section(cls, given, where)


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = _convert(arguments[0], value, where)
        for limit in arguments[1:]:
            if isinstance(limit, Limit):
                limit.check(where, found)
        return found
    if value is None and type(None) in arguments:
        return None
    if origin is Union or str(origin) == "<class 'types.UnionType'>":
        kinds = [kind for kind in arguments if kind is not type(None)]
        several = [kind for kind in kinds if get_origin(kind) is tuple]
        return _convert(several[0] if several and isinstance(value, list) else kinds[0], value, where)
    if dataclasses.is_dataclass(hint):
        return read_section(hint, value, where)  # pyright: ignore[reportArgumentType]
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, where) for item in value)
    if origin in (Mapping, dict) or hint in (Mapping, dict) or getattr(origin, "__name__", "") == "Mapping":
        if not isinstance(value, Mapping):
            raise TaskError(f"{where} = {show(value)}: expected a table{_example(where, value)}.")
        return {
            key: _convert(arguments[1], item, f"{where}.{key}") if arguments else item for key, item in value.items()
        }
    if hint is Any or (hint in (bool, str) and isinstance(value, hint)):
        return value
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if hint in (Fraction, float) and isinstance(value, (int, float, Fraction)) and not isinstance(value, bool):
        return hint(value)
    names = {int: "a whole number", Fraction: "a number", float: "a number", str: "a text", bool: "true or false"}
    lists = {str: "a list of texts", Fraction: "a list of numbers"}
    wanted = names.get(hint) or lists.get(next(iter(arguments), str), "a list of tables")
    raise TaskError(f"{where} = {show(value)}: expected {wanted}.")


EXAMPLES = {
    "features.norm": 'norm = { kind = "l2", bound = 1.0 }',
    "privacy.epsilon": "epsilon = { gradient = 1.0 }",
    "privacy.budget": "budget = { epsilon = 1.0, samples = 1000 }",
    "protocol.step": "step = { c = 1.0 }",
    "protocol.batch": "batch = 20",
    "masking.cohort": "cohort = 50",
    "masking.minimum": "minimum = 40",
    "name": 'name = "my-study"',
    "features.dimension": "dimension = 64",
    "privacy.mechanism": 'mechanism = "discrete-gaussian"',
}
"""A line that works, for errors about a key; a number that its writer gave stands in it."""


def _example(where: str, given: Any = None) -> str:
    if where not in EXAMPLES:
        return ""
    number = isinstance(given, (int, Fraction)) and not isinstance(given, bool) and given > 0
    example = EXAMPLES[where]
    return f", such as {example.replace('1.0', show(given), 1) if number else example}"


def _keys(cls: type) -> str:
    return ", ".join(entry.name for entry in dataclasses.fields(cls))


def show(value: Any) -> str:
    """A value as its writer wrote it, for errors; a table by its keys alone, and a long one cut."""
    if isinstance(value, Mapping):
        return short(f"{{ {', '.join(f'{key} = ...' for key in value)} }}")
    if isinstance(value, (list, tuple)):
        return short(f"[{', '.join(map(show, value))}]")
    return f"{float(value):g}" if isinstance(value, Fraction) else short(repr(value))


def short(text: str) -> str:
    """A text of another, cut where it would fill a screen."""
    return text if len(text) <= 200 else f"{text[:200]}..."


def choose(where: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise TaskError(f"{where} = {value!r}: choose one of {', '.join(allowed)}.{did_you_mean(value, allowed)}")


def between(where: str, value: float | Fraction, low: float | Fraction, high: float | Fraction) -> None:
    if not low <= value <= high:
        raise TaskError(f"{where} = {show(value)}: must lie between {show(low)} and {show(high)}.")


def positive(where: str, value: float | Fraction) -> None:
    if value <= 0:
        raise TaskError(f"{where} = {show(value)}: must be above 0.")


def readable(where: str, text: str, *, lines: bool = True) -> None:
    """Refuse a text that would not show as it reads: people decide by it whether to take part. `lines`: several."""
    found = hidden_control(text)
    if found is not None:
        raise TaskError(f"{where} has the control character {found} in it, which a terminal obeys: take it out.")
    if not lines and ("\n" in text or "\t" in text):
        raise TaskError(f"{where} = {text!r}: one line, without tabs.")
