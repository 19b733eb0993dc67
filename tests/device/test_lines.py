"""One line of a source is one row, whatever stands in it (review 2, privacy finding 5)."""

from __future__ import annotations

import asyncio
import io
import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loopback import small_task
from test_series_sources import TASK as WINDOWS

from crowdml.device.files import Share, check_known
from crowdml.device.rows import Text
from crowdml.device.sources import LiveSource, Sample, check_enough, deal_sources, open_source
from crowdml.errors import DataError
from crowdml.lines import LONGEST, read_lines

TASK = small_task()
COUNT = 12
LINES = {
    ("csv", False): [f"0,0,0,0.{place + 1},{'abc'[place % 3]}".encode() for place in range(COUNT)],
    ("ndjson", False): [json.dumps({"x": [0, 0, 0, place / 20], "y": place % 3}).encode() for place in range(COUNT)],
    ("csv", True): [str(3 * place).encode() for place in range(COUNT)],
    ("ndjson", True): [json.dumps({"value": 3 * place}).encode() for place in range(COUNT)],
}
NASTY = [
    b"", b"   ", b'"', b'0,0,0,"0.1,a', b"0,0\r0,0,a", b"\r", b"\r\r", b"\xff\xfe,0,0,0,a", b"\x00", b"0,0,0,0,a\x00",
    b"1e999,0,0,0,a", b"9" * 5000, b"9" * 10**6 + b",0,0,0,a", b"nan,0,0,0,a", b"0,0,0,0,7", b"0,0,0,0,seven", b"a,b,c",
    b",,,,", b"," * 100, b'{"x": [1, 2], "y": 0}', b'{"x": [0, 0, 0, 1e999], "y": 0}', b"[" * 5000,
    b"x" * (LONGEST + 999), b'{"x": null}', b'{"value": "q"}', b"[1, 2]", b"true", b"\xe2\x80\xa8", b"\x0b\x0c\x1c\x85",
    b'"1"2,0,0,0,a',
]  # fmt: skip
"""Lines that a reader might drop, split, join to others, or stop at."""


def all_of(source) -> list[Sample]:
    async def whole() -> list[Sample]:
        found: list[Sample] = []
        while samples := await source.read(5):
            found += samples
        return found

    return asyncio.run(whole())


def shown(samples: list[Sample]) -> list[tuple[list[float], float]]:
    return [(sample.x.tolist(), sample.y) for sample in samples]


def live(kind: str, task, data: bytes) -> LiveSource:
    """What `csv:-` is, with these bytes on stdin."""
    text = Text(kind, "stdin", task)
    return LiveSource(lambda: text.rows(read_lines(io.BytesIO(data), text.longest)), task, 100)


@pytest.mark.parametrize(("kind", "readings"), LINES)
def test_what_stands_in_one_line_never_changes_how_many_rows_there_are_nor_which_the_others_are(
    tmp_path, kind, readings
):
    path, task, lines = tmp_path / "rows", WINDOWS if readings else TASK, LINES[kind, readings]
    path.write_bytes(b"\n".join(lines) + b"\n")
    whole = shown(all_of(open_source(f"{kind}:{path}", task)))
    window = task.features.dimension + task.features.horizon if readings else 1

    def replaced(place: int, content: bytes, ended: bool) -> None:
        changed = [*lines[:place], content, *lines[place + 1 :]]
        data = b"\n".join(changed) + (b"\n" if ended or not changed[-1] else b"")
        path.write_bytes(data)
        source = open_source(f"{kind}:{path}", task)
        count, found = source.count, shown(all_of(source))
        assert (count, source.taken, len(found)) == (len(whole), len(whole), len(whole))
        kept = [n for n in range(len(whole)) if not n <= place < n + window]
        assert [found[n] for n in kept] == [whole[n] for n in kept]
        assert all(np.isfinite(x).all() for x, _ in found)
        if not readings:
            assert [each for source in deal_sources(f"{kind}:{path}", task, 3) for each in shown(all_of(source))] == [
                found[n] for share in range(3) for n in range(share, len(found), 3)
            ]

    @settings(max_examples=25, deadline=None)
    @given(st.integers(1, COUNT - 1), st.binary(max_size=60).map(lambda line: line.replace(b"\n", b"")), st.booleans())
    @example(COUNT - 1, b"", True)
    @example(COUNT - 1, b'"', False)
    def arbitrary(place: int, content: bytes, ended: bool) -> None:
        replaced(place, content, ended)

    arbitrary()
    for content in NASTY:
        replaced(5, content, True)


def test_a_stream_has_a_row_for_each_line_too():
    for (kind, readings), lines in LINES.items():
        task = WINDOWS if readings else TASK
        whole = all_of(live(kind, task, b"\n".join(lines)))
        for content in NASTY:
            source = live(kind, task, b"\n".join([*lines[:5], content, *lines[6:]]))
            assert len(all_of(source)) == len(whole), content[:20]


@pytest.mark.parametrize("kind", ["csv", "ndjson"])
def test_a_line_that_is_written_in_two_goes_is_one_row_and_later_lines_wait(tmp_path, kind):
    """Review 3, rows 6: the end of a line that a writer appended while the file was read became a row of its own."""
    lines = LINES[kind, False]
    whole = b"\n".join(lines) + b"\n"
    for early in range(len(whole) - len(lines[-1]), len(whole)):
        path = tmp_path / "rows"
        path.write_bytes(whole[:early])
        source = open_source(f"{kind}:{path}", TASK)
        found = asyncio.run(source.read(len(lines)))
        assert (len(found), source.count) == (len(lines), len(lines))
        path.write_bytes(whole + lines[0] + b"\n")
        assert asyncio.run(source.read(5)) == [], "no row of its own"
        again = open_source(f"{kind}:{path}", TASK)
        asyncio.run(again.skip(source.taken))
        assert shown(all_of(again)) == shown(found[:1]), "nor is the line given twice in a later run"


def test_a_stream_that_goes_on_after_its_end_has_no_second_row_for_its_last_line():
    """Review 3, rows 6: as a terminal's stdin does, or a file that grows."""
    data = io.BytesIO(b"1,2\n3,")
    lines = read_lines(data, 100)
    assert [next(lines), next(lines)] == [b"1,2", b"3,"]
    data.write(b"4\n5,6\n")
    data.seek(6)
    assert list(lines) == []


def test_a_file_has_the_rows_that_it_had_when_it_was_opened(tmp_path):
    """Review 3, rows 6."""
    path, lines = tmp_path / "rows.csv", LINES["csv", False]
    path.write_bytes(b"\n".join(lines[:8]) + b"\n" + lines[8][:3])
    source = open_source(f"csv:{path}", TASK)
    path.write_bytes(b"\n".join(lines) + b"\n")
    found = all_of(source)
    assert (len(found), source.count) == (9, 9)
    assert shown(found) == shown(all_of(open_source(f"csv:{path}", TASK)))[:9], "the last is whole by now"


def test_the_owner_is_told_how_many_rows_cannot_be_used_and_why_and_where(tmp_path):
    """Review 2, owner 5: bad labels and NaN were charged without a word."""
    path = tmp_path / "rows.csv"
    good = "0,0,0,0.5,a"
    path.write_text("\n".join([good, "0,0,0,1,12", good, "0,0,0,1,seven", "0,0,0,nan,a", "", "1,2,a", good]) + "\n")
    source = open_source(f"csv:{path}", TASK)
    tried, early = source.look_through()
    assert (tried, source.taken) == (8, 0)
    samples = all_of(source)
    assert [sample.y for sample in samples] == [0, -1, 0, -1, -1, -1, -1, 0]
    assert not any(sample.x.any() for sample in samples if sample.y < 0)
    assert source.faults.counts == early.counts == {"label": 2, "number": 1, "blank": 1, "fields": 1}
    assert str(source.faults).startswith("a label that is none of the task's: 2 (first in line 2); ")
    assert (
        "5 of its rows could not be used: a label that is none of the task's: 2 (first in line 2);" in source.why_ended
    )
    assert "seven" not in source.why_ended
    (dealt,) = deal_sources(f"csv:{path}", TASK, 1)
    assert dealt.faults.counts == early.counts


def test_a_line_that_has_no_end_takes_no_memory_and_is_one_row():
    asked: list[int] = []

    class Endless(io.RawIOBase):
        def __init__(self) -> None:
            self.left = 50 * LONGEST

        def readline(self, size: int = -1) -> bytes:
            asked.append(size)
            assert size > 0
            given = min(size, self.left)
            self.left -= given
            return b"9" * given

    assert list(read_lines(Endless(), LONGEST)) == [None]
    assert max(asked) <= LONGEST + 2


@pytest.mark.parametrize("readings", [False, True])
def test_a_place_that_an_earlier_version_noted_holds_where_it_counted_lines(tmp_path, readings):
    task, lines = (WINDOWS, LINES["csv", True]) if readings else (TASK, LINES["csv", False])
    heading = b"vehicles" if readings else b"w,x,y,z,label"
    path = tmp_path / "rows.csv"
    older, newer = f"csv:{path.resolve()}:0/1", f"csv-lines:{path.resolve()}:0/1"

    def place(content: list[bytes], known: dict[str, int]) -> int:
        path.write_bytes(b"\n".join(content) + b"\n")
        return open_source(f"csv:{path}", task).place(known)

    assert place([heading, *lines], {older: 7}) == 7
    assert place([heading, *lines], {older: 7, newer: 9}) == 9
    odd = b'"' if readings else b""
    assert place([heading, *lines, odd], {older: 7}) == 7
    for content in ([heading, *lines[:2], odd, *lines[2:]], [b"na" if readings else b"w,w,w,w,a", *lines]):
        with pytest.raises(DataError, match=r"an earlier version of crowdml read 7 rows of it.*given twice\."):
            place(content, {older: 7})
        assert place(content, {older: 7, newer: 9}) == 9


def test_a_file_is_read_with_the_heading_that_it_was_read_with(tmp_path):
    """Otherwise every row has moved by one, and the next one was given already."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b"w,x,y,z,label\n" + b"\n".join(LINES["csv", False]))
    usual, other = (str(open_source(f"csv:{path}", TASK, header=header).name) for header in (None, False))
    assert usual == open_source(f"csv:{path}", TASK, header=True).name
    check_known(other, {other: 3})
    for known in (usual, f"csv:{path.resolve()}:0/1"):
        check_known(usual, {known: 3})
        with pytest.raises(DataError, match="was read with another --header"):
            check_known(other, {known: 3})
        with pytest.raises(DataError, match="was read as share 0/1"):
            check_known(open_source(f"csv:{path}", TASK, Share(0, 2)).name, {known: 3})


@pytest.mark.parametrize("kind", ["csv", "ndjson"])
def test_too_few_lines_for_one_check_in_are_refused_whatever_is_in_them(tmp_path, kind):
    """Review 2, owner 4. How many lines there are is public: what stands in them is not."""
    path = tmp_path / "rows"
    path.write_bytes(b"\n".join([*LINES[kind, False][:3], b"", b"?"]))
    spec = f"{kind}:{path}"
    check_enough(spec, [open_source(spec, TASK)], 5)
    with pytest.raises(DataError, match=r"has 5 samples, and a check-in of this task takes 6\. Nothing was sent\."):
        check_enough(spec, [open_source(spec, TASK)], 6)
    check_enough(spec, deal_sources(spec, TASK, 2), 2)
    few = r"has 2 samples for one of its 2 devices, and a check-in of this task takes 3\..* Say --devices 1"
    with pytest.raises(DataError, match=few):
        check_enough(spec, deal_sources(spec, TASK, 2), 3)
    check_enough("csv:-", [live(kind, TASK, b"")], 5)


def test_too_few_readings_for_one_check_in_are_refused(tmp_path):
    path = tmp_path / "readings.csv"
    path.write_text("vehicles\n" + "7\n" * 9)
    spec = f"csv:{path}"
    check_enough(spec, [open_source(spec, WINDOWS)], 5)
    with pytest.raises(DataError, match=r"has 5 samples, cut from 9 readings, and a check-in of this task takes 6\."):
        check_enough(spec, [open_source(spec, WINDOWS)], 6)


def test_a_stream_whose_first_line_has_another_width_is_refused_in_a_sentence():
    with pytest.raises(DataError, match="stdin: its first line has 3 fields, and the task wants 4 numbers and a label"):
        all_of(live("csv", TASK, b"0.1,0.2,a\n" * 5))


def test_whatever_a_function_yields_is_a_row():
    class Odd:
        def __float__(self) -> float:
            raise OSError("a sensor that is away")

    odd = [None, 5, (1, 2, 3), ("0,0,0,1", "a"), ([0, 0, 0, Odd()], 1), ([0, 0, 0, 1], Odd()), ([[0], 0, 0, 0], 1),
           ({}, 1), (Odd(), 1), ([0, 0, 0, 10**400], 1)]  # fmt: skip
    source = LiveSource(lambda: iter([*odd, ([0, 0, 0, 0.5], "b")]), TASK, 100)
    samples = all_of(source)
    assert [sample.y for sample in samples] == [-1.0] * len(odd) + [1.0]
    assert source.faults.total == len(odd)
    readings = LiveSource(lambda: iter([None, Odd(), "q", [1], True, 1, 2, 3, 4, 5]), WINDOWS, 100)
    assert len(all_of(readings)) == 6
    assert readings.faults.total == 5
