"""The strict reader of safetensors files: what our own writer and the usual one write, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crowdml.errors import DataError
from crowdml.safetensors import LONGEST_HEADER, pack_tensors, read_tensors

FILE = pack_tensors({"a": np.arange(6.0).reshape(2, 3), "b": np.float32([0.5])}, {"side": "8"}, "F16")


def file_of(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(begin: int, end: int, *shape: int, kind: str = "F32") -> dict[str, Any]:
    return {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_what_is_written_is_read(kind):
    numbers = np.random.default_rng(1).normal(size=(3, 4)).astype(np.float16)
    tensors, metadata = read_tensors(pack_tensors({"x": numbers, "": numbers[:0]}, {"a": "b"}, kind), "it")
    assert metadata == {"a": "b"}
    assert tensors["x"].dtype == np.float32
    assert np.array_equal(tensors["x"], numbers.astype(np.float32))
    assert tensors[""].shape == (0, 4)


def test_a_file_written_by_hand_is_read_and_ours_is_one_too():
    header = b'{"x":{"dtype":"F16","shape":[2],"data_offsets":[0,4]},"__metadata__":{"m":"n"}}'
    data = b"\x4f\x00\x00\x00\x00\x00\x00\x00" + header + b"\x00\x3c\x00\xc0"
    tensors, metadata = read_tensors(data, "it")
    assert metadata == {"m": "n"}
    assert tensors["x"].tolist() == [1, -2]
    ours = pack_tensors({"x": [1, -2]}, {"m": "n"}, "F16")
    assert ours[:8] == b"\x50\x00\x00\x00\x00\x00\x00\x00"
    assert json.loads(ours[8:88]) == json.loads(header)
    assert ours[88:] == data[-4:]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "header"),
        (b"\x00" * 7, "header"),
        ((2**63).to_bytes(8, "little") + FILE[8:], "header"),
        (file_of(b" " * (LONGEST_HEADER + 1)), "header"),
        (file_of(b"[" * 50_000), "no JSON"),
        (file_of(b"\xff"), "no JSON"),
        (file_of(b"[]"), "no table"),
        (file_of(b'{"a": 1, "a": 2}'), "no JSON"),
        (file_of({"__metadata__": {"a": 1}}), "metadata"),
        (file_of({str(place): entry(0, 0, 0) for place in range(300)}), "no table"),
        (file_of({"a": entry(0, 4)}), "tensor 'a'"),
        (file_of({"a": entry(0, 8, 1)}, bytes(8)), "tensor 'a'"),
        (file_of({"a": entry(4, 8, 1)}, bytes(8)), "tensor 'a'"),
        (file_of({"a": entry(0, 4, 1), "b": entry(0, 4, 1)}, bytes(4)), "tensor 'b'"),
        (file_of({"a": entry(0, 4, 2**20, 2**20, 2**20)}, bytes(4)), "tensor 'a'"),
        (file_of({"a": entry(0, 4, -1, -1)}, bytes(4)), "tensor 'a'"),
        (file_of({"a": entry(0, 4, True)}, bytes(4)), "tensor 'a'"),  # type: ignore[arg-type]
        (file_of({"a": entry(0, 8, 1, kind="F64")}, bytes(8)), "tensor 'a'"),
        (file_of({"a": {**entry(0, 4, 1), "more": 1}}, bytes(4)), "tensor 'a'"),
        (file_of({"a": entry(0, 4, 1)}, b"\x00\x00\xc0\x7f"), "not finite"),
        (FILE + b"\x00", "1 bytes after"),
        (FILE[:-1], "tensor 'b'"),
    ],
)
def test_any_other_file_is_refused_in_a_sentence(data, why):
    with pytest.raises(DataError, match="the file is no safetensors file that we read") as refused:
        read_tensors(data, "the file")
    assert why in str(refused.value)
    assert len(str(refused.value)) < 300


def tensors_or_none(data: bytes) -> dict[str, Any]:
    """What is read of these bytes; nothing where they are refused as they should be."""
    try:
        return read_tensors(data, "it")[0]
    except DataError as error:
        if "it is no safetensors file" not in str(error):
            raise AssertionError(str(error)) from error
        return {}


@given(st.binary(max_size=200) | st.tuples(st.integers(0, len(FILE) - 1), st.binary(max_size=3)))
def test_no_bytes_end_in_anything_but_tensors_or_that_sentence(changed):
    data = changed if isinstance(changed, bytes) else FILE[: changed[0]] + changed[1] + FILE[changed[0] + 1 :]
    assert all(np.isfinite(each).all() for each in tensors_or_none(data).values())


@given(st.recursive(st.none() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=3)))  # fmt: skip
def test_no_header_does_either(header):
    for given_ in (header, {"a": header}, {"a": {**entry(0, 4, 1), "shape": header}}, {"__metadata__": header}):
        assert tensors_or_none(file_of(given_, bytes(4))).keys() <= {"a"}
