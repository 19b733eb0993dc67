"""Texts for people: numbers as they are written, and no character of another that moves a cursor or hides words."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from datetime import datetime

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


def number_text(value: float, digits: int = 3) -> str:
    """'26,053', '0.557', '10⁻⁶': so many significant digits, and never e+04: people do not write numbers so."""
    if math.isinf(value):
        return "∞"
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        text = f"{value:,.{max(0, digits - len(str(int(abs(value)))) if abs(value) >= 1 else digits)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"10{raised}" if mantissa == "1" else f"{mantissa} × 10{raised}"


def percent_text(share: float, digits: int = 1) -> str:
    """A share as people read it in English text of ours: 92.5 %."""
    return f"{100 * share:.{digits}f} %"


def epsilon_text(epsilon: float) -> str:
    """An ε to four digits; words where there is no guarantee."""
    return "none: no noise" if math.isinf(epsilon) else number_text(epsilon, 4)


def local_time(moment: str) -> str:
    """'2026-11-17 04:37': a moment of a record, which is in UTC, by the clock of whoever reads it."""
    return f"{datetime.fromisoformat(moment).astimezone():%Y-%m-%d %H:%M}"


def digits_below(value: float) -> str:
    """A number above 0 to three digits, never above itself: a limit that people can copy."""
    shown = f"{value:.2e}"
    if float(shown) > value:
        shown = f"{float(shown) - 10.0 ** (int(shown[shown.index('e') + 1 :]) - 2):.2e}"
    return f"{float(shown):g}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ " Did you mean 'protocol'?" for a word that is nearly one of the known ones; nothing where none is near."""
    lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    return f" Did you mean {one_line(lower[near[0]])!r}?" if near and lower[near[0]] != word else ""


_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
_MARKS = re.compile(r"[\\`*_~\[\]|$]|^(?:[#+=-]|[0-9]+(?=[.)]))")


def markdown_text(text: str) -> str:
    """`text` as Markdown and HTML show it word for word: no tag, link, emphasis, heading, list or cell begins in it.

    Lines become paragraphs of their own; in a table or a heading, pass `one_line` of the text.
    """
    lines = filter(None, map(one_line, text.split("\n")))
    return "\n\n".join(_MARKS.sub(_escaped, line).translate(_ENTITIES) for line in lines)


def _escaped(found: re.Match[str]) -> str:
    """A backslash before the mark; before the point or bracket behind a number that begins a line."""
    return f"{found[0]}\\" if found[0].isdigit() else f"\\{found[0]}"
