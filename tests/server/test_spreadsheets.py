"""CSV files of the server: written by one function, and no cell of theirs runs in a spreadsheet."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

import crowdml
from crowdml.server.histograms import Bar, csv_file
from crowdml.server.invitations import Batch, Card, batch_csv
from crowdml.server.spreadsheets import csv_text

FORMULAS = ["=cmd|x!A1", "+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "＝1"]


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("text", FORMULAS)
def test_words_that_a_spreadsheet_would_compute_are_written_as_text_in_every_file(text: str):
    """Review 2, network L5: names of classes were written as they are, labels of invitations were not."""
    bars = csv_file([Bar(text, -3, -0.01, -0.2, 0.1, 0.0)]).decode()
    cards = batch_csv(Batch("t", "http://here", 1, None, None, (Card(text, "abc", "http://here/join/abc", "crowdml"),)))
    assert read(bars)[1] == [f"'{text}", "-3", "-0.01", "-0.2", "0.1", "0.0"], "numbers stay numbers"
    assert read(cards)[1][0] == f"'{text}"


def test_other_cells_stay_as_they_are():
    cells = ["", "a", 'say "a, b"', "5-0", "0-5", "é\n2", -1, 0.5, None]
    (row,) = read(csv_text(("a",) * 9, [cells]))[1:]
    assert row == ["", "a", 'say "a, b"', "5-0", "0-5", "é\n2", "-1", "0.5", ""]
    assert csv_text(("a", "b"), [(1, 2)]) == "a,b\r\n1,2\r\n"


def test_one_function_writes_every_csv_file():
    source = Path(crowdml.__file__).parent
    texts = {path: path.read_text(encoding="utf-8") for path in source.rglob("*.py")}
    writers = [path for path, text in texts.items() if "csv.writer" in text or "DictWriter" in text]
    assert [path.relative_to(source).as_posix() for path in writers] == ["server/spreadsheets.py"]
