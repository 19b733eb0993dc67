"""Every CSV file that the server or a command writes: by one function, so that no cell runs in a spreadsheet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

_COMPUTED = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""What a formula begins with, for one spreadsheet or another."""


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A heading and its rows, as RFC 4180 has them. Text that a spreadsheet would compute gets a ' before it.

    Names of classes, labels of invitations and the like are other people's words. Numbers stay as they are.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow(map(_cell, columns))
    writer.writerows(map(_cell, row) for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    runs = value[:1] in ("\t", "\r", "\n") or value.lstrip().startswith(_COMPUTED)
    return f"'{value}" if value and runs else value
