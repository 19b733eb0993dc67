"""Speed, as ratios: ours beside hand-written limits and installed peers, in one run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from crowdml.errors import UnknownName

NAMES = ("noise", "sim", "rounds", "scale", "gpu", "server", "device", "secagg", "proportions")
"""Every benchmark; each is a module here with a function `measure`."""


def run(name: str, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure, and say what came out in the form of docs/performance.md. `progress` hears what is measured now."""
    if name not in NAMES:
        raise UnknownName(f"There is no benchmark {name!r}; there are {', '.join(NAMES)}.")
    return import_module(f"crowdml.bench.{name}").measure(progress)
