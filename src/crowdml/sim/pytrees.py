"""Registers what handlers pass around with JAX, so that it may enter a compiled loop."""

from __future__ import annotations

from typing import Any

import jax

from crowdml.arrays import STRUCTS
from crowdml.channels import Stacked
from crowdml.privacy.private import Masked, Private, Release
from crowdml.protocol import CheckOut, Gathered, Publish, Send, Step, Stop, Wake

_known: set[type] = set()

STEPS: tuple[tuple[type, list[str], list[str]], ...] = (
    (Step, ["state", "effects"], []),
    (CheckOut, [], []),
    (Send, ["message", "when"], ["to"]),
    (Publish, ["message", "when"], []),
    (Wake, [], ["after", "tag"]),
    (Stop, ["when"], ["rule"]),
    (Gathered, ["round", "uploads"], []),
    (Stacked, ["rows", "devices"], []),
)
"""A step, its effects and a closed round, with what is an array in them and what is a constant."""


WHOLE_SUMS = {"xla_disable_hlo_passes": "tree_reduction_rewriter"}
"""A sum of a few hundred numbers is one loop. Cut into a tree, as on a CPU by default, it took a fifth of a step."""


def compile_alike(function: Any) -> Any:
    """`jax.jit` as both engines call it: with the same options, so that they add in the same order."""
    return jax.jit(function, compiler_options=WHOLE_SUMS if jax.default_backend() == "cpu" else None)


def kept_apart(values: Any) -> Any:
    """The values, with what made them and what uses them compiled apart, so that both engines round alike.

    On a CPU alone: an accelerator adds in an order of its own anyway, and would write each value down and read it back.
    """
    return jax.lax.optimization_barrier(values) if jax.default_backend() == "cpu" else values


def register() -> None:
    """Make every struct a pytree. Called by the engines; again after a protocol was imported later."""
    for cls, (names, static) in STRUCTS.items():
        if cls not in _known:
            _known.add(cls)
            jax.tree_util.register_dataclass(cls, data_fields=list(names), meta_fields=list(static))
    if Step not in _known:
        _known.add(Step)
        for cls, names, static in STEPS:
            jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=static)
    if Private not in _known:
        _known.update((Private, Release, Masked))
        jax.tree_util.register_pytree_node(
            Private,
            lambda private: ((private._value,), (private.part, private._rows)),
            lambda fixed, inner: Private(inner[0], fixed[0], _rows=fixed[1]),
        )
        jax.tree_util.register_pytree_node(Release, lambda release: ((release.value,), release._stamp), _release)
        jax.tree_util.register_pytree_node(
            Masked, lambda masked: ((masked._summand,), masked._stamp), lambda stamp, inner: Masked(inner[0], stamp)
        )


def _release(stamp: Any, inner: tuple[Any]) -> Release[Any]:
    return Release(inner[0], stamp)
