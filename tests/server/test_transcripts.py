"""Transcripts from strangers: whatever their bytes are, `crowdml replay` says one sentence."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import msgpack
import numpy as np
import pytest
from device import make_task, serving

from crowdml.device.verification import check_transcript
from crowdml.errors import CrowdmlError
from crowdml.server.limits import Limits
from crowdml.server.transcript import replay, write_transcript

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_runner import refused

TASK = make_task()
MANY = Limits(device_rate=1e6, device_burst=1e6, address_rate=1e6, address_burst=1e6, snapshot_every=3)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A transcript that begins with a snapshot."""
    folder = tmp_path_factory.mktemp("told")
    with serving(folder / "data", TASK, limits=MANY) as server:
        device = server.device()
        for each in range(8):
            assert device.check_in(TASK, gradient=np.full((8, 2), each, np.int32)).status == 202
        with (folder / "told").open("wb") as file:
            write_transcript(server.hub.store, TASK.hash, file)
    assert replay(folder / "told").first > 0
    return (folder / "told").read_bytes()


def mutants(whole: bytes, chance: random.Random, many: int) -> Iterator[bytes]:
    """Bytes with one to four places changed, taken out, doubled or put in."""
    for _ in range(many):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            at = chance.randrange(len(data))
            match chance.randrange(5):
                case 0:
                    data[at] ^= 1 << chance.randrange(8)
                case 1:
                    data[at] = chance.choice((0, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC4, 0xC6, 0xDD, 0xDF, 0xFF))
                case 2:
                    del data[at : at + chance.randrange(1, 9)]
                case 3:
                    data[at:at] = data[at : at + chance.randrange(1, 40)]
                case _:
                    data[at:at] = chance.randbytes(chance.randrange(1, 6))
        yield bytes(data)


def test_any_change_of_a_transcript_is_one_sentence(tmp_path: Path, whole: bytes):
    """Review 2, network finding L7: 22 of 6,000 changed transcripts ended `replay` with a traceback."""
    file, told = tmp_path / "told", 0
    for data in mutants(whole, random.Random(7), int(os.environ.get("CROWDML_EXAMPLES", "250"))):
        file.write_bytes(data)
        try:
            replay(file)
        except CrowdmlError:
            told += 1
        with contextlib.suppress(CrowdmlError):
            check_transcript(file, [])
    assert told > 150


def parts(whole: bytes) -> list[object]:
    unpacker = msgpack.Unpacker()
    unpacker.feed(whole)
    return list(unpacker)


@pytest.mark.parametrize(
    "state",
    [b"", b"\xc0", b"\x80", b"\x90", msgpack.packb({"weights": None}), msgpack.packb({"weights": ["<f4", [8], b""]})],
    ids=["empty", "nil", "no-fields", "list", "none", "short"],
)
def test_a_snapshot_that_no_server_wrote_is_one_sentence(tmp_path: Path, whole: bytes, state: bytes):
    """Review 2, network finding L7: AttributeError and IndexError came from a snapshot of the wrong form."""
    first, *rest = parts(whole)
    assert isinstance(first, dict)
    first["snapshot"]["state"] = state
    file = tmp_path / "told"
    file.write_bytes(b"".join(map(msgpack.packb, (first, *rest))))
    assert "no whole transcript" in refused("replay", str(file))


@pytest.mark.parametrize("claim", [b"\xdd\x03\xff\xff\xff", b"\xdf\x03\xff\xff\xff", b"\xdb\x03\xff\xff\xff"])
def test_a_length_that_no_part_has_is_refused_before_memory_is_taken_for_it(tmp_path: Path, claim: bytes):
    file = tmp_path / "told"
    file.write_bytes(claim + b"\0" * 64)
    assert "no whole transcript" in refused("replay", str(file))
