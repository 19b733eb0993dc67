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


def compiled_for_cpu(values: Array) -> bool:
    """Whether what is computed from these values is compiled, and runs on a CPU."""
    return namespace(values) is not np and sys.modules["jax"].default_backend() == "cpu"


def gains_by_factors(rows: int, width: int, like: Array) -> bool:
    """Whether what is computed from products of so many rows is faster by their factors: where it is compiled.

    On a CPU nothing is gained with fewer than eight rows. Wide rows are taken as products everywhere.
    """
    if namespace(like) is np or width > 64:
        return False
    return rows >= 8 or not compiled_for_cpu(like)


def computed_once(values: Array) -> Array:
    """The finite values [b, n] as they are, but computed before they are used, where a CPU compiles what uses them.

    XLA computes a cheap value again for each element of what it is multiplied with, in each kernel that does so: with
    20 samples a check-in that took 12 of 27 microseconds. It stops at a product of matrices, so this is one with the
    identity, which is exact.
    """
    rows, width = values.shape
    gains = compiled_for_cpu(values) and gains_by_factors(rows, width, values)
    return values @ np.eye(width, dtype=values.dtype) if gains else values


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


@struct
class Outer:
    """Rows [b, n, m] by their factors: row i is the outer product of left[i] and right[i]. None is written down."""

    left: Array  # [b, n]
    right: Array  # [b, m]

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.left.shape, self.right.shape[1])

    def sum(self, axis: int) -> Array:
        """The sum of all rows, [n, m]; `axis` is 0, as for an array of rows."""
        assert axis == 0
        return (self.right.T @ self.left).T  # faster on a CPU than the other way round


LARGEST_NUMBER = 1e9
"""Where weights or samples are squared and added up, a number beyond this counts as not finite."""


def is_usable(values: Array, most: float | None = None) -> Array:
    """Which numbers are finite, and no larger than `most`."""
    return namespace(values).isfinite(values) if most is None else abs(values) <= most  # false for NaN


def finite_or_zero(values: Array, *, most: float | None = None, rows: bool = False) -> Array:
    """Zero in the place of what is not finite, or is larger than `most`: the one rule for broken numbers (R6).

    Nothing is refused for such a number, since a refusal would tell. With `rows`, a whole row (last axis) is zero where
    one of its numbers is broken: so it is for samples and contributions. Weights that a server published are treated
    number by number.
    """
    good = is_usable(values, most)
    good = good.all(axis=-1, keepdims=True) if rows else good
    return namespace(values).where(good, values, 0)


def finite_samples(x: Array, y: Array) -> Samples:
    """Samples as they enter a buffer: one with a non-finite number becomes the zero sample.

    It takes its place in the batch, whose size is public. Its gradient is zero in a linear model; a bias, or a network
    with biases, learns from its label as from any other.
    """
    return Samples(finite_or_zero(x, rows=True), y)
