"""A model by the name that a task file gives it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from crowdml.errors import TaskError
from crowdml.models.binary import Logistic, SmoothSvm, Svm
from crowdml.models.linear import LeastSquares, Linear
from crowdml.models.model import Model
from crowdml.models.softmax import Softmax

__all__ = ["KINDS", "make_model"]

LARGEST_SETTING = 1e6
"""Settings of the linear model stay below this: width * LARGEST must be a float32."""

Builder = Callable[[int, "int | None", Mapping[str, Any]], Model]

LINEAR_SETTINGS = ("width", "tolerance", "bound", "bins")


def _number(kind: str, make: Callable[..., Model], allowed: tuple[str, ...]) -> Builder:
    def build(dimension: int, classes: int | None, settings: Mapping[str, Any]) -> Model:
        if classes is not None:
            raise TaskError(f"model {kind!r} predicts a number, but {classes} classes are given. Use 'softmax'.")
        _refuse_unknown(kind, settings, allowed)
        for name in ("width", "tolerance", "bound"):
            _refuse_number(kind, name, settings.get(name, 1.0), zero=name == "tolerance")
        bins = settings.get("bins", 10)
        if not isinstance(bins, int) or isinstance(bins, bool) or bins < 1:
            raise TaskError(f"model {kind!r}: bins = {bins!r} is not a positive whole number.")
        return make(dimension, **settings)

    return build


def _refuse_number(kind: str, name: str, value: Any, *, zero: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (0 < value <= LARGEST_SETTING or (zero and value == 0)):
        raise TaskError(f"model {kind!r}: {name} = {value!r} is not a positive number up to {LARGEST_SETTING:g}.")


def _two_classes(kind: str, make: Callable[..., Model], allowed: tuple[str, ...] = ()) -> Builder:
    def build(dimension: int, classes: int | None, settings: Mapping[str, Any]) -> Model:
        if classes != 2:
            raise TaskError(f"model {kind!r} needs exactly 2 classes, not {classes}. Use 'softmax' for more.")
        _refuse_unknown(kind, settings, allowed)
        for name, value in settings.items():
            _refuse_number(kind, name, value)
        return make(dimension, **settings)

    return build


def _softmax(dimension: int, classes: int | None, settings: Mapping[str, Any]) -> Model:
    if classes is None or classes < 2:
        raise TaskError(f"model 'softmax' needs at least 2 classes, not {classes}. Use 'linear' to predict a number.")
    _refuse_unknown("softmax", settings, ())
    return Softmax(dimension, classes)


KINDS: Mapping[str, Builder] = {
    "least-squares": _number("least-squares", LeastSquares, LINEAR_SETTINGS[1:]),
    "linear": _number("linear", Linear, LINEAR_SETTINGS),
    "logistic": _two_classes("logistic", Logistic),
    "smooth-svm": _two_classes("smooth-svm", SmoothSvm, ("width",)),
    "softmax": _softmax,
    "svm": _two_classes("svm", Svm),
}
"""Every kind of model that a task may name."""


def make_model(kind: str, dimension: int, classes: int | None, **settings: Any) -> Model:
    """The model that a task names, for x [b, dimension]; `classes` is None where the label is a number."""
    if kind not in KINDS:
        raise TaskError(f"there is no model {kind!r}. The kinds are {', '.join(sorted(KINDS))}.")
    if dimension < 1:
        raise TaskError(f"model {kind!r}: dimension = {dimension!r} is not a positive whole number.")
    return KINDS[kind](dimension, classes, settings)


def _refuse_unknown(kind: str, settings: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    unknown = sorted(set(settings) - set(allowed))
    if unknown:
        choices = f"Its settings are {', '.join(allowed)}." if allowed else "It has none."
        raise TaskError(f"model {kind!r} has no setting {', '.join(map(repr, unknown))}. {choices}")
