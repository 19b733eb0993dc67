"""Plug-ins for tests: the examples' files, and a way to forget every plug-in afterwards."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from crowdml import plugins
from crowdml.features.maps import KINDS as MAPS
from crowdml.messages import KINDS as MESSAGES
from crowdml.messages import forget
from crowdml.models.make import KINDS as MODELS
from crowdml.protocols import PROTOCOLS, find, refusal
from crowdml.protocols.registry import load_plugin

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "protocols"
SIGNS, MEDIANS = (EXAMPLES / "crowdml_examples" / f"{name}.py" for name in ("signs", "medians"))


@contextmanager
def no_plugins_left(*files: Path) -> Generator[None]:
    """Load these files; afterwards, forget them and every other plug-in that was loaded meanwhile."""
    modules, kinds = set(sys.modules), set(MESSAGES)
    _forget_plugins()  # what an earlier test found installed is not what is installed now
    try:
        for file in files:
            load_plugin(file)
        yield
    finally:
        _forget_plugins()
        forget([k for k, cls in MESSAGES.items() if k not in kinds and not cls.__module__.startswith("crowdml.")])
        for name in set(sys.modules) - modules:
            if name.split(".")[0].lower().startswith(("crowdml_plugin_", "crowd_copy", "crowdml_examples")):
                del sys.modules[name]


def _forget_plugins() -> None:
    for registry in (PROTOCOLS, MODELS, MAPS):
        registry._named.clear()
        registry._loaded.clear()
        vars(registry).pop("_installed", None)
    plugins.FILES.clear()
    find.cache_clear()
    refusal.cache_clear()
