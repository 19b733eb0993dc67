"""Every protocol by its name in task files: ours, and those of plug-ins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from crowdml.errors import PluginError
from crowdml.plugins import Registry, load_file
from crowdml.protocol import Protocol
from crowdml.task import Task

__all__ = ["PROTOCOLS", "check_plugins", "load_plugin", "plugins_of", "with_plugins"]


def _ours(name: str) -> Protocol:
    return import_module(f"crowdml.protocols.{name}").protocol


def _accept(value: Any, where: str) -> tuple[str, Protocol]:
    if not isinstance(value, Protocol):
        raise PluginError(f"{where}: `protocol` is a {type(value).__name__}, and has to be a crowdml Protocol.")
    if lacks := value.lacks:
        raise PluginError(f"{where}: protocol {value.name!r} {lacks}.")
    return value.name, value


PROTOCOLS: Registry[Protocol] = Registry(
    "protocol",
    "crowdml.protocols",
    {name: partial(_ours, name) for name in ("admm", "gram", "local_updates", "proportions", "secprobe", "sgd")},
    _accept,
)


def load_plugin(path: Path | str) -> None:
    """Take the protocol, the model and the feature map that a file defines: `protocol`, `model`, `feature_map`."""
    load_file(path, _registries())


def check_plugins() -> None:
    """Refuse installed plug-ins whose names are taken."""
    for registry in _registries().values():
        registry.check()


def with_plugins(task: Task) -> Task:
    """The task with every plug-in that it uses pinned, and so in its hash; the task itself where it uses none."""
    from crowdml.models.make import KINDS as MODELS

    protocol, table = PROTOCOLS.pin(task.protocol), task.protocol.get("map")
    if isinstance(table, Mapping):
        from crowdml.features.maps import KINDS as MAPS

        mapped = MAPS.pin(table)
        protocol = protocol if mapped is table else {**protocol, "map": mapped}
    model = MODELS.pin(task.model)
    if protocol is task.protocol and model is task.model:
        return task
    return replace(task, protocol=protocol, model=model)


def plugins_of(task: Task) -> tuple[str, ...]:
    """What a published task pins: each distribution and version, or each file's digest, once."""
    tables = (task.protocol, task.model, task.protocol.get("map"))
    pins = (table.get("plugin") for table in tables if isinstance(table, Mapping))
    return tuple(dict.fromkeys(str(pin) for pin in pins if pin is not None))


def _registries() -> dict[str, Registry[Any]]:
    from crowdml.features.maps import KINDS as MAPS  # a device without plug-ins needs no maps
    from crowdml.models.make import KINDS as MODELS

    return {"protocol": PROTOCOLS, "model": MODELS, "feature_map": MAPS}
