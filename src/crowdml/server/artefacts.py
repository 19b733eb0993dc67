"""Public files that tasks name by hash, kept in the server's database: they survive a restart, a backup and an upgrade.

They lie among the settings, each under its SHA-256, and go to whoever asks for that hash (`/v1/artefacts/{sha256}`).
"""

from __future__ import annotations

from crowdml import artefacts
from crowdml.features.extractor import check_extractor
from crowdml.storage.server import Store
from crowdml.task import Task

PREFIX = "artefact/"


def check_artefacts(task: Task) -> None:
    """Refuse a task whose artefacts are not here, or do not fit it."""
    if task.features.extractor is not None:
        check_extractor(task.features.extractor, task.features.dimension)


def keep_artefacts(store: Store, task: Task) -> dict[str, bytes]:
    """The artefacts of a task by their hash: those of the store, and what it does not have yet, put there.

    A DataError where one is nowhere, or the store's is another file than the task names.
    """
    found: dict[str, bytes] = {}
    for sha256 in task.artefacts:
        kept = store.setting(PREFIX + sha256)
        if kept is None:
            store.set_setting(PREFIX + sha256, artefacts.find(sha256))
        else:
            artefacts.admit(kept, sha256, f"The artefact {sha256[:12]} in {store.name}")
        found[sha256] = artefacts.find(sha256)
    return found
