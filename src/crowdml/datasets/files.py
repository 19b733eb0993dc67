"""Where data files lie, whether they are the right ones, and the cache of what was computed from them.

Files are looked for in $CROWDML_DATA, then in the cache folder. A file is read only after its SHA-256 was seen to be
right. Whatever is written appears under its name complete or not at all: a temporary file in the same folder, renamed.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
import tempfile
import tomllib
import warnings
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from crowdml.errors import DataError

Arrays = Mapping[str, NDArray[Any]]
TABLE: Mapping[str, Any] = tomllib.loads(files("crowdml.datasets").joinpath("table.toml").read_text("utf-8"))
"""What `table.toml` says of data sets and their files."""

UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error, NotImplementedError)

LONGEST_HEAD = 2**16
"""Bytes of the head of an array in an NPZ file."""


def npz_head(file: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and the type of an array in an NPZ file. Read them first: a packed array grows a thousandfold."""
    with file.open(f"{name}.npy") as member:
        head = io.BytesIO(member.read(LONGEST_HEAD))
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, _, dtype = read[np.lib.format.read_magic(head)](head)
    return shape, dtype


def npz_array(file: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """An array in an NPZ file; one of Python objects is refused, for to read it would run its code."""
    with file.open(f"{name}.npy") as member:
        return np.asarray(np.lib.format.read_array(member, allow_pickle=False))


@dataclass(frozen=True)
class SourceFile:
    """One file that a data set is read from. `sha256` lists every accepted version: the first is the one we hand round,
    a second is what `crowdml data fetch` builds (same arrays, other packing)."""

    name: str
    sha256: tuple[str, ...]
    bytes: int  # of the first version


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/crowdml, or the platform's place for caches. Not created here."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "crowdml"
    try:
        home = Path.home()
    except RuntimeError:
        raise DataError("no cache folder: this account has no home folder; set XDG_CACHE_HOME to one.") from None
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "crowdml" / "cache"
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "crowdml"
    return home / ".cache" / "crowdml"


def folders() -> tuple[tuple[Path, str], ...]:
    """The folders that are searched, in order, each with what it is called in messages."""
    named = os.environ.get("CROWDML_DATA")
    given = ((Path(named).expanduser(), "$CROWDML_DATA"),) if named else ()
    return (*given, (cache_folder() / "data", "the cache folder"))


def locate(file: SourceFile) -> Path | None:
    """Where the file lies, unchecked; None where it is missing."""
    return next((folder / file.name for folder, _ in folders() if (folder / file.name).is_file()), None)


def find(file: SourceFile, dataset: str) -> Path:
    """Where the file lies, with its checksum verified; a `DataError` says what is wrong and what to do."""
    path = locate(file)
    if path is None:
        places = " nor in ".join(f"{folder} ({called})" for folder, called in folders())
        unset = "" if os.environ.get("CROWDML_DATA") else ", and $CROWDML_DATA is not set"
        raise DataError(
            f"data set {dataset!r}: {file.name} is not in {places}{unset}; "
            f"run `crowdml data fetch {dataset}`, or set CROWDML_DATA to the folder that holds it."
        )
    try:
        digest = _verified_digest(path)
    except OSError as error:
        raise DataError(
            f"data set {dataset!r}: {path} cannot be read ({error.strerror or error}); check its permissions."
        ) from None
    if digest not in file.sha256:
        raise DataError(
            f"data set {dataset!r}: {path} is damaged or another version: {path.stat().st_size:,} bytes with SHA-256 "
            f"{digest[:12]}..., where {file.bytes:,} bytes with {file.sha256[0][:12]}... were expected; "
            f"delete it and run `crowdml data fetch {dataset}`."
        )
    return path


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _verified_digest(path: Path) -> str:
    """SHA-256 of the file; remembered in the cache folder for this path, size and time of change."""
    stat = path.stat()
    state = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n"
    memory = cache_folder() / "verified" / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
    try:
        known, _, digest = memory.read_text(encoding="utf-8").rpartition("\n")
        if known + "\n" == state and len(digest) == 64:
            return digest
    except (OSError, ValueError):
        pass
    digest = sha256_of(path)
    with _only_a_cache("a verified checksum"), written(memory) as stream:
        stream.write((state + digest).encode())
    return digest


def read_npz(path: Path, dataset: str) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file, without pickles."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except UNREADABLE as error:
        raise DataError(
            f"data set {dataset!r}: {path} is not a readable .npz file ({type(error).__name__}); "
            f"delete it and run `crowdml data fetch {dataset}`."
        ) from None


def npz_bytes(arrays: Arrays) -> bytes:
    """An .npz file as bytes that depend on the arrays alone: stored, not deflated, and without dates or platform."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(arrays):
            entry = io.BytesIO()
            np.lib.format.write_array(entry, np.asarray(arrays[name], order="C"), version=(1, 0), allow_pickle=False)
            info = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.create_system = 3
            info.external_attr = 0o644 << 16
            archive.writestr(info, entry.getvalue())
    return packed.getvalue()


@contextmanager
def written(path: Path) -> Generator[IO[bytes]]:
    """Write a file that appears complete or not at all; folders are made on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def cached(key: str, fields: frozenset[str], make: Callable[[], Arrays]) -> dict[str, NDArray[Any]]:
    """The arrays under `key` from the cache folder, or made now and kept there.

    The key names everything the arrays depend on: recipe, its version, checksums of the sources. An entry that is
    damaged (the archive carries its own CRC) or lacks a field is made again; a folder that cannot be written costs
    time, not correctness, so it only warns.
    """
    path = cache_folder() / "prepared" / f"{key}.npz"
    try:
        with np.load(path, allow_pickle=False) as archive:
            if fields <= set(archive.files):
                return {name: archive[name] for name in fields}
    except UNREADABLE:
        pass
    made = {name: array for name, array in make().items() if name in fields}
    with _only_a_cache("a prepared data set"), written(path) as stream:
        stream.write(npz_bytes(made))
    return made


@contextmanager
def _only_a_cache(what: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"{what} could not be kept in {cache_folder()} ({error.strerror or error}); it is computed anew next time.",
            stacklevel=2,
        )
