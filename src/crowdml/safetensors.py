"""Numbers in a file that runs nothing when it is read: the safetensors format, with `F32` and `F16` alone.

Eight bytes say how long the header is, little-endian; the header is JSON with the type, the shape and the place of each
tensor; their bytes follow. Whatever else a file may be, reading it ends in one sentence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.errors import DataError

LONGEST_HEADER = 100_000
MOST_TENSORS = 256
TYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2")}
METADATA = "__metadata__"


def pack_tensors(tensors: Mapping[str, Any], metadata: Mapping[str, str], kind: str = "F32") -> bytes:
    """The file of these tensors, one after another in the order given; the header is filled up with blanks."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    data = b""
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor, TYPES[kind]).tobytes()
        header[name] = {
            "dtype": kind,
            "shape": list(np.shape(tensor)),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def read_tensors(data: bytes, where: str) -> tuple[dict[str, NDArray[np.float32]], dict[str, str]]:
    """The tensors of a file as float32, all finite, and its metadata. `where` names the file in errors.

    Tensors lie one after another without a gap, each byte belongs to one, and nothing is read beyond the file.
    """

    def refuse(why: str) -> DataError:
        return DataError(f"{where} is no safetensors file that we read: {why}. Get it again from where it came from.")

    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(LONGEST_HEADER, len(data) - 8):
        raise refuse(f"its header would be {size:,} bytes long, and the file has {len(data):,}")
    try:
        header = json.loads(data[8 : 8 + size].decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise refuse("its header is no JSON") from error
    if not isinstance(header, dict) or len(header) > MOST_TENSORS:
        raise refuse("its header is no table of tensors")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refuse("its metadata is no table of texts")
    found: dict[str, NDArray[np.float32]] = {}
    body, at = data[8 + size :], 0
    for name, entry in header.items():
        kind, shape, begin, end = _entry(entry)
        if kind is None or begin != at or end > len(body) or end - begin != math.prod(shape) * kind.itemsize:
            raise refuse(f"its tensor {name[:64]!r} is not where or what its header says")
        numbers = np.frombuffer(body, kind, math.prod(shape), begin).astype(np.float32).reshape(shape)
        if not np.isfinite(numbers).all():
            raise refuse(f"its tensor {name[:64]!r} has a number that is not finite")
        found[name], at = numbers, end
    if at != len(body):
        raise refuse(f"{len(body) - at:,} bytes after its last tensor belong to none")
    return found, metadata


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table in which no name stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice")
    return found


def _entry(entry: Any) -> tuple[np.dtype[Any] | None, tuple[int, ...], int, int]:
    """Type, shape, first byte and last of a tensor; no type where any of them cannot be read."""
    nothing = None, (), 0, 0
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return nothing
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in TYPES or not isinstance(shape, list) or not isinstance(offsets, list):
        return nothing
    counts = [*shape, *offsets]
    if len(shape) > 8 or len(offsets) != 2 or not all(type(each) is int and 0 <= each < 2**31 for each in counts):
        return nothing
    return TYPES[kind], tuple(shape), offsets[0], offsets[1]
