"""A model by the name that a task file gives it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from fractions import Fraction
from typing import Any

from crowdml.errors import PluginError, TaskError
from crowdml.models.binary import Logistic, SmoothSvm, Svm
from crowdml.models.cnn import Cnn
from crowdml.models.linear import LeastSquares, Linear
from crowdml.models.mlp import ACTIVATIONS, TOPS, Mlp
from crowdml.models.model import Model
from crowdml.models.softmax import Softmax
from crowdml.plugins import Registry
from crowdml.settings import read_section
from crowdml.texts import did_you_mean

LARGEST_SETTING = 1e6
"""Settings of the linear model stay below this: width * LARGEST must be a float32."""

Builder = Callable[[int, "int | None", Mapping[str, Any]], Model]

LINEAR_SETTINGS = ("width", "tolerance", "bound", "bins", "bias")
MLP_SETTINGS = ("hidden", "activation", "top", "seed")
CNN_SETTINGS = ("filters", "size", "hidden", "seed")
LARGEST_KERNEL = 15

MOST_WEIGHTS = 10_000_000
"""Most weights of a perceptron: 40 MB, which is what a device would send and the server keep for each version."""


def _number(kind: str, make: Callable[..., Model], allowed: tuple[str, ...]) -> Builder:
    def build(dimension: int, classes: int | None, settings: Mapping[str, Any]) -> Model:
        if classes is not None:
            raise TaskError(f"model {kind!r} predicts a number, but {classes} classes are given. Use 'softmax'.")
        _refuse_unknown(kind, settings, allowed)
        _refuse_label_settings(kind, settings)
        _refuse_bias(kind, settings)
        return make(dimension, **settings)

    return build


def _refuse_label_settings(kind: str, settings: Mapping[str, Any]) -> None:
    for name in ("width", "tolerance", "bound"):
        _refuse_number(kind, name, settings.get(name, 1.0), zero=name == "tolerance")
    bins = settings.get("bins", 10)
    if not _whole(bins) or bins < 1:
        raise TaskError(f"model {kind!r}: bins = {bins!r} is not a positive whole number.")


def _refuse_bias(kind: str, settings: Mapping[str, Any]) -> None:
    bias = settings.get("bias", False)
    if not isinstance(bias, bool):
        raise TaskError(f"model {kind!r}: bias = {bias!r} is not true or false.")


def _refuse_number(kind: str, name: str, value: Any, *, zero: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (0 < value <= LARGEST_SETTING or (zero and value == 0)):
        raise TaskError(f"model {kind!r}: {name} = {value!r} is not a positive number up to {LARGEST_SETTING:g}.")


def _two_classes(kind: str, make: Callable[..., Model], allowed: tuple[str, ...] = ("bias",)) -> Builder:
    def build(dimension: int, classes: int | None, settings: Mapping[str, Any]) -> Model:
        if classes != 2:
            raise TaskError(f"model {kind!r} needs exactly 2 classes, not {classes}. Use 'softmax' for more.")
        _refuse_unknown(kind, settings, allowed)
        _refuse_bias(kind, settings)
        if "width" in allowed:
            _refuse_number(kind, "width", settings.get("width", 1.0))
        return make(dimension, **settings)

    return build


def _softmax(dimension: int, classes: int | None, settings: Mapping[str, Any]) -> Model:
    if classes is None or classes < 2:
        raise TaskError(f"model 'softmax' needs at least 2 classes, not {classes}. Use 'linear' to predict a number.")
    _refuse_unknown("softmax", settings, ("bias",))
    _refuse_bias("softmax", settings)
    return Softmax(dimension, classes, **settings)


def _mlp(dimension: int, classes: int | None, settings: Mapping[str, Any]) -> Model:
    _refuse_unknown("mlp", settings, MLP_SETTINGS if classes else (*MLP_SETTINGS, *LINEAR_SETTINGS[1:-1]))
    if classes is not None and classes < 2:
        raise TaskError(f"model 'mlp' needs at least 2 classes, not {classes}, or labels that are numbers.")
    made: dict[str, Any] = {"seed": 1, "top": "softmax" if classes else "squared", **settings}
    hidden = made.pop("hidden", None)
    if not isinstance(hidden, (list, tuple)) or not hidden or not all(_whole(each) and each >= 1 for each in hidden):
        raise TaskError(
            f"model 'mlp': hidden = {hidden!r} is not a list of the units of each hidden layer, such as [75, 75]."
        )
    for name, allowed in (("activation", ACTIVATIONS), ("top", TOPS)):
        if made.get(name, allowed[0]) not in allowed:
            raise TaskError(f"model 'mlp': {name} = {made[name]!r}: choose one of {', '.join(allowed)}.")
    if classes is None and made["top"] == "softmax":
        raise TaskError("model 'mlp': top = 'softmax' needs classes, and these labels are numbers. Use 'squared'.")
    _refuse_seed("mlp", made["seed"])
    _refuse_label_settings("mlp", settings)
    model = Mlp(dimension, classes, tuple(hidden), **made)
    if model.shape[0] > MOST_WEIGHTS:
        raise TaskError(f"model 'mlp': {model.shape[0]:,} weights; at most {MOST_WEIGHTS:,}. Use fewer units.")
    return model


def _cnn(dimension: int, classes: int | None, settings: Mapping[str, Any]) -> Model:
    if classes is None or classes < 2:
        raise TaskError("model 'cnn' tells classes of pictures apart, at least 2. Use 'mlp' to predict a number.")
    _refuse_unknown("cnn", settings, CNN_SETTINGS)
    for name, what in (("filters", "the filters of each convolution, such as [16, 32]"),
                       ("hidden", "the units of each hidden layer, such as [128]")):  # fmt: skip
        given = settings.get(name, [1])
        if not isinstance(given, (list, tuple)) or not given or not all(_whole(each) and each >= 1 for each in given):
            raise TaskError(f"model 'cnn': {name} = {given!r} is not a list of {what}.")
    size, seed = settings.get("size", Cnn.size), settings.get("seed", 1)
    if not _whole(size) or not 1 <= size <= LARGEST_KERNEL or size % 2 == 0:
        raise TaskError(f"model 'cnn': size = {size!r} is not an odd number from 1 to {LARGEST_KERNEL}.")
    _refuse_seed("cnn", seed)
    given = {name: tuple(each) if isinstance(each, list) else each for name, each in settings.items()}
    made: dict[str, Any] = {"seed": 1, **given}
    model = Cnn(dimension, classes, **made)
    if model.side**2 != dimension:
        raise TaskError(
            f"model 'cnn' takes square pictures, and features.dimension = {dimension} is no square. Use 'mlp'."
        )
    if model.side >> len(model.filters) < 1:
        raise TaskError(
            f"model 'cnn': {len(model.filters)} poolings leave nothing of a picture of {model.side} by {model.side} "
            "pixels. Give fewer filters."
        )
    if max(model.head.dimension, model.shape[0]) > MOST_WEIGHTS:
        raise TaskError(f"model 'cnn': {model.shape[0]:,} weights; at most {MOST_WEIGHTS:,}. Use fewer filters.")
    return model


def _refuse_seed(kind: str, seed: Any) -> None:
    if not _whole(seed) or not 0 <= seed < 2**63:
        raise TaskError(f"model {kind!r}: seed = {seed!r} is not a whole number from 0 to 2^63 - 1.")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _plugged(value: Any, where: str) -> tuple[str, Builder]:
    """A model of a plug-in: a dataclass with a `kind`, whose fields are `dimension`, `classes` and its settings."""
    kind = getattr(value, "kind", None)
    if not isinstance(value, type) or not is_dataclass(value) or not isinstance(kind, str):
        raise PluginError(f"{where}: `model` has to be a dataclass with a `kind`, the name that tasks give it.")

    def build(dimension: int, classes: int | None, settings: Mapping[str, Any]) -> Model:
        made: Any = value
        return read_section(made, {**settings, "dimension": dimension, "classes": classes}, "model")

    return kind, build


_OURS: Mapping[str, Builder] = {
    "cnn": _cnn,
    "least-squares": _number("least-squares", LeastSquares, LINEAR_SETTINGS[1:]),
    "linear": _number("linear", Linear, LINEAR_SETTINGS),
    "logistic": _two_classes("logistic", Logistic),
    "mlp": _mlp,
    "smooth-svm": _two_classes("smooth-svm", SmoothSvm, ("bias", "width")),
    "softmax": _softmax,
    "svm": _two_classes("svm", Svm),
}

KINDS: Registry[Builder] = Registry(
    "model",
    "crowdml.models",
    {kind: lambda builder=builder: builder for kind, builder in _OURS.items()},
    _plugged,
    reserved=("clusters", "histogram", "ridge"),  # what `proportions` and `gram` make themselves
)
"""Every kind of model that a task may name."""


def make_model(kind: str, dimension: int, classes: int | None, **settings: Any) -> Model:
    """The model that a task names, for x [b, dimension]; `classes` is None where the label is a number."""
    build = KINDS.pinned({"kind": kind, "plugin": settings.pop("plugin", None)}, "model")
    if build is None:
        near = did_you_mean(kind, KINDS)
        raise TaskError(f"there is no model {kind!r}.{near} The kinds are {', '.join(sorted(KINDS))}.")
    if dimension < 1:
        raise TaskError(f"model {kind!r}: dimension = {dimension!r} is not a positive whole number.")
    return build(dimension, classes, settings)


def read_model(
    table: Mapping[str, Any], dimension: int, classes: int | None, bound: Fraction, penalties: tuple[str, ...] = ("l2",)
) -> Model:
    """The model of a task's `[model]` table. The penalties in it are the protocol's own: it reads them itself.

    `bound`: of the labels, where they are numbers and the table does not set another.
    """
    settings = {key: float(value) if isinstance(value, Fraction) else value for key, value in table.items()}
    kind = str(settings.pop("kind"))
    for penalty in penalties:
        settings.pop(penalty, None)
    if classes is None:
        settings.setdefault("bound", float(bound))
    return make_model(kind, dimension, classes, **settings)


def describe_model(kind: str, model: Model) -> str:
    """`softmax, 50 x 10 weights`, `svm with a bias, 51 weights`, `mlp 50-75-75-10, relu, softmax, 10,135 weights`."""
    count = " x ".join(f"{each:,}" for each in model.shape)
    if isinstance(model, Mlp):
        return f"{kind} {'-'.join(map(str, model.widths))}, {model.activation}, {model.top}, {count} weights"
    if isinstance(model, Cnn):
        layers = "-".join(map(str, (*model.filters, *model.head.widths[1:])))
        return f"{kind} {layers}, filters of {model.size} by {model.size}, {count} weights"
    return f"{kind}{' with a bias' if getattr(model, 'bias', False) else ''}, {count} weights"


def _refuse_unknown(kind: str, settings: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    unknown = sorted(set(settings) - set(allowed))
    if unknown:
        choices = f"Its settings are {', '.join(allowed)}." if allowed else "It has none."
        near = did_you_mean(unknown[0], allowed)
        raise TaskError(f"model {kind!r} has no setting {', '.join(map(repr, unknown))}.{near} {choices}")
