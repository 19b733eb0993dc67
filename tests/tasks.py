"""The small tasks of the tests: a task of each kind as a table, and the text of one with what a test changes in it.

    toml(SGD, name="walk", features={"dimension": 8}, stop={"steps": 40})

A section that is named is taken over setting by setting; one that the table does not have is added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

BALL = {"kind": "l2", "bound": 1.0}

SGD: Mapping[str, Any] = {
    "name": "small",
    "features": {"dimension": 4, "norm": BALL},
    "labels": {"classes": ["a", "b", "c"]},
    "model": {"kind": "softmax"},
    "protocol": {"kind": "sgd", "batch": 5, "step": {"c": 1.0}},
    "privacy": {"mechanism": "discrete-gaussian", "epsilon": {"gradient": 1.0}},
}
"""Three classes by softmax; each check-in is a noisy gradient of five samples."""

MOMENTS: Mapping[str, Any] = {
    "name": "moments",
    "features": {"dimension": 64, "norm": BALL},
    "labels": {"classes": [str(digit) for digit in range(10)]},
    "model": {"kind": "ridge"},
    "protocol": {"kind": "gram", "batch": 20},
    "privacy": {"mechanism": "skellam", "epsilon": {"moments": 10.0}},
    "masking": {"cohort": 70, "minimum": 50, "colluders": 2},
    "stop": {"steps": 1},
}
"""Ten digits by ridge regression on the moments of one cohort of seventy, under masks."""

COUNTS: Mapping[str, Any] = {
    "name": "moods",
    "features": {"dimension": 1, "norm": BALL},
    "labels": {"classes": ["bad", "fair", "good"]},
    "model": {"kind": "histogram"},
    "protocol": {"kind": "proportions", "batch": 10},
    "privacy": {"mechanism": "discrete-laplace", "epsilon": {"counts": 0.5}},
}
"""A crowd that only counts three labels."""

STREET: Mapping[str, Any] = {
    "name": "street",
    "features": {"kind": "windows", "dimension": 5},
    "labels": {"classes": ["quiet", "busy", "full"], "bins": [20, 60]},
    "model": {"kind": "clusters", "k": 6},
    "protocol": {"kind": "proportions", "batch": 48, "peers": 2},
    "privacy": {"mechanism": "discrete-laplace", "epsilon": {"counts": 1.0}},
}
"""How busy a street will be, from counts of the label proportions of two neighbours."""


def toml(task: Mapping[str, Any], **changes: Any) -> str:
    """This task as TOML, with these changes; a setting that is changed to None is left out."""
    whole = {**task, **{name: value for name, value in changes.items() if not isinstance(value, Mapping)}}
    for name, value in changes.items():
        if isinstance(value, Mapping):
            whole[name] = {**task.get(name, {}), **value}
    plain = {name: value for name, value in whole.items() if not isinstance(value, Mapping) and value is not None}
    sections = [f"[{name}]\n{_settings(value)}" for name, value in whole.items() if isinstance(value, Mapping)]
    return _settings(plain) + "".join(sections)


def _settings(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {_value(value)}\n" for name, value in values.items() if value is not None)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_value(each)}" for name, each in value.items() if each is not None) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
