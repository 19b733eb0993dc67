"""Arrays: the one place that tells NumPy from JAX. No randomness, no mathematics.

A handler computes on whatever arrays it is given. On a device and on the server these are NumPy's; in the
simulator they may be JAX tracers. `namespace` finds the functions that go with them, and `struct` marks the small
frozen dataclasses that may travel through a compiled loop; `sim` registers them with JAX, so nothing here imports it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar, dataclass_transform, overload

import numpy as np

Array = Any
"""A NumPy array or a JAX array. Shapes and types stand in docstrings."""

Integers = Any
"""An array of int32: what travels."""

T = TypeVar("T")

STRUCTS: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {}
"""Each struct with the names of its array fields and of its static fields; read by `sim`."""


def namespace(*values: Array) -> ModuleType:
    """The module whose functions fit these values: `numpy`, or `jax.numpy` as soon as one of them is JAX's."""
    found: ModuleType = np
    for value in values:
        if isinstance(value, (np.ndarray, np.generic)):
            continue
        find = getattr(value, "__array_namespace__", None)
        if find is not None:
            return find()
    return found


def fold(step: Callable[[Any, T], T], carry: T, count: int, like: Array) -> T:
    """`carry = step(i, carry)` for i = 0 to count - 1: a loop in Python, or where `like` is JAX's a compiled one.

    A compiled loop uses its memory again in each turn. Written out, ten steps of a network took a quarter longer.
    """
    if namespace(like) is not np:
        return sys.modules["jax"].lax.fori_loop(0, count, step, carry)
    for i in range(count):
        carry = step(i, carry)
    return carry


@overload
def struct(cls: type[T], /) -> type[T]: ...
@overload
def struct(*, static: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True)
def struct(cls: type[Any] | None = None, /, *, static: tuple[str, ...] = ()) -> Any:
    """A frozen dataclass that may enter a compiled loop. Fields named in `static` are constants of the trace."""

    def decorate(target: type[Any]) -> type[Any]:
        made = dataclasses.dataclass(frozen=True, eq=False)(target)
        names = tuple(field.name for field in dataclasses.fields(made))
        unknown = set(static) - set(names)
        if unknown:
            raise TypeError(
                f"{target.__name__}: static names no field: {sorted(unknown)}. The fields are {list(names)}."
            )
        STRUCTS[made] = (tuple(name for name in names if name not in static), static)
        return made

    return decorate if cls is None else decorate(cls)


@struct
class Samples:
    """A batch as the handlers see it: x [b, d] float, y [b] (a class index, or a number)."""

    x: Array
    y: Array

    def __len__(self) -> int:
        return int(self.x.shape[0])

    def __getitem__(self, rows: slice) -> Samples:
        return Samples(self.x[rows], self.y[rows])


def finite_samples(x: Array, y: Array) -> Samples:
    """Samples as they enter a buffer: one with a non-finite number becomes the zero sample.

    It takes its place in the batch, whose size is public. Its gradient is zero in a linear model; a bias, or a network
    with biases, learns from its label as from any other.
    """
    xp = namespace(x, y)
    good = xp.isfinite(x).all(axis=-1, keepdims=True)
    return Samples(xp.where(good, x, 0), y)
