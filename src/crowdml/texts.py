"""Texts on a terminal: no character of another may move the cursor, hide words or turn their order around."""

from __future__ import annotations

import re

__all__ = ["count_text", "harmless", "hidden_control", "one_line", "size_text"]

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 but tab and newline, delete, C1, separators of lines and paragraphs, bidirectional controls, lone surrogates."""


def hidden_control(text: str) -> str | None:
    """The first character of `text` that a terminal obeys instead of showing it, as U+001B; None without any."""
    found = _CONTROLS.search(text)
    return None if found is None else f"U+{ord(found[0]):04X}"


def harmless(text: str) -> str:
    """`text` with every such character replaced by one that shows; tabs and newlines stay."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def count_text(number: int, thing: str) -> str:
    """'1 check-in', '2,000 check-ins'."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def size_text(count: float) -> str:
    """'17 bytes', '1.1 kB'."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def one_line(text: str) -> str:
    """`harmless`, and on one line: text of another cannot begin a line that looks like ours."""
    return " ".join(harmless(text).split())
