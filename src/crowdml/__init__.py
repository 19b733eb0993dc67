"""Crowd-ML: private learning by crowds of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crowdml.sim.estimator import Crowd

__version__ = "0.1.0"
__all__ = ["Crowd", "__version__"]


def __getattr__(name: str) -> Any:
    """`Crowd` is found when it is asked for: importing crowdml on a device does not import JAX."""
    if name != "Crowd":
        raise AttributeError(f"module 'crowdml' has no attribute {name!r}")
    try:
        from crowdml.sim.estimator import Crowd
    except ModuleNotFoundError as error:
        from crowdml.errors import MissingExtra

        raise MissingExtra(
            f"Crowd needs {error.name}, which is not installed; run `pip install 'crowdml[sim]'`."
        ) from error
    return Crowd
