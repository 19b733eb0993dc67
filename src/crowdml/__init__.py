"""Crowd-ML: private learning by crowds of devices."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crowdml.errors import CrowdmlError, PrivacyWarning
    from crowdml.protocols.registry import load_plugin
    from crowdml.sim.compare import compare
    from crowdml.sim.estimator import Crowd, CrowdRegressor
    from crowdml.sim.studies import simulate
    from crowdml.sim.trial import Deal, Trial, run_trial
    from crowdml.task import find_task

__version__ = "0.1.0"
__all__ = [
    "Crowd",
    "CrowdRegressor",
    "CrowdmlError",
    "Deal",
    "PrivacyWarning",
    "Trial",
    "__version__",
    "compare",
    "find_task",
    "load_plugin",
    "run_trial",
    "simulate",
]

_HOMES = {
    "Crowd": "sim.estimator",
    "CrowdRegressor": "sim.estimator",
    "CrowdmlError": "errors",
    "Deal": "sim.trial",
    "PrivacyWarning": "errors",
    "Trial": "sim.trial",
    "compare": "sim.compare",
    "find_task": "task",
    "load_plugin": "protocols.registry",
    "run_trial": "sim.trial",
    "simulate": "sim.studies",
}


def __getattr__(name: str) -> Any:
    """A name of the public surface (docs/python.md), imported when it is asked for: a device imports no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module 'crowdml' has no attribute {name!r}")
    try:
        return getattr(import_module(f"crowdml.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        from crowdml.errors import MissingExtra

        raise MissingExtra(
            f"{name} needs {error.name}, which is not installed; run `pip install 'crowdml[sim]'`."
        ) from error
