"""Public files that tasks name by their SHA-256, such as the weights of an extractor: found, checked, never trusted.

The hash is part of the task, so of what an owner accepted: whoever hands a file over, it is that file or it is refused.
Some come with the package. A device gets others from its server and keeps them in its folder; a server keeps those of
its tasks beside them. What was checked once stays in memory under its hash.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from crowdml.errors import DataError

LARGEST = 2**20
"""Bytes of an artefact. Nothing of a longer file is read."""
ENDING = ".safetensors"

_KNOWN: dict[str, bytes] = {}


def checked(data: bytes, sha256: str, where: str) -> bytes:
    """These bytes, if they are the artefact of this hash. `where` says in errors where they came from."""
    if len(data) > LARGEST:
        raise DataError(f"{where} has {len(data):,} bytes, and an artefact has at most {LARGEST:,}. It was not kept.")
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise DataError(
            f"{where} has the SHA-256 {found[:12]}, and the task names {sha256[:12]}. It was not kept, and nothing was "
            "sent. Ask whoever runs the study."
        )
    return data


def admit(data: bytes, sha256: str, where: str) -> None:
    """Keep an artefact in memory, for all that computes with it. Another file than the one of this hash is refused."""
    _KNOWN[sha256] = checked(data, sha256, where)


def is_here(sha256: str) -> bool:
    """Whether the artefact is in memory or came with the package."""
    return sha256 in _KNOWN or shipped(sha256) is not None


def find(sha256: str) -> bytes:
    """The artefact of this hash; a DataError says how to get one that is not here."""
    found = _KNOWN.get(sha256) or shipped(sha256)
    if found is None:
        raise DataError(
            f"The artefact {sha256[:12]} that the task names is not here. A device fetches it from the task's server; "
            "elsewhere, name its file with --artefact FILE."
        )
    return found


@cache
def shipped(sha256: str) -> bytes | None:
    """An artefact that came with the package, if it is there as it was."""
    from importlib import resources

    file = resources.files("crowdml").joinpath("artefacts", f"{sha256}{ENDING}")
    if not (len(sha256) == 64 and sha256.isalnum() and file.is_file()):
        return None
    return checked(file.read_bytes(), sha256, f"The package's file {sha256[:12]}{ENDING}")


def read_file(path: Path | str) -> str:
    """Keep the artefact in a file in memory; its hash."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        raise DataError(f"The artefact {path} cannot be read: {error.strerror}. Name a .safetensors file.") from error
    digest = hashlib.sha256(data).hexdigest()
    admit(data, digest, str(path))
    return digest
