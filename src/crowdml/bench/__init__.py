"""Speed, as ratios: ours beside hand-written limits and installed peers, in one run."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from crowdml.errors import UnknownName

WHAT = {
    "noise": "exact noise from the system's entropy, 10,000 values at a time",
    "sim": "noisy and clean updates a second in the simulator",
    "rounds": "a network trained in rounds of ten devices",
    "scale": "cost and memory from a thousand devices to a million",
    "gpu": "crowds that fill an accelerator, where there is one",
    "server": "check-ins and check-outs of the server beside bare ASGI",
    "device": "how light a device is: import, disk, CPU of a check-in",
    "secagg": "what masking costs a device and the server",
    "proportions": "what a device and a city need to learn from label proportions",
}
"""Every benchmark, in a line; each is a module here with a function `measure`."""
NAMES = tuple(WHAT)


def run(name: str, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure, and say what came out in the form of docs/performance.md. `progress` hears what is measured now."""
    if name not in NAMES:
        raise UnknownName(f"There is no benchmark {name!r}; there are {', '.join(NAMES)}.")
    return import_module(f"crowdml.bench.{name}").measure(progress)
