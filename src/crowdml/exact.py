"""Exact numbers as people write them: the one parser for task files, budgets and options of commands."""

from __future__ import annotations

from fractions import Fraction

LARGEST = 1e30
"""Numbers that people write lie between 1 / LARGEST and LARGEST in size, or are zero: a float32 holds them all."""
LONGEST = 1000
"""Characters of such a number."""


def read_exact(text: str) -> Fraction:
    """The number that the text says: 0.1, 1e-6 or 1/10. One out of range raises ValueError.

    Its size is looked at before it is written out: 1e999999999 has more digits than a machine has memory.
    """
    if len(text) > LONGEST:
        raise ValueError(f"a number of {len(text):,} characters is too long; write it with at most {LONGEST:,}")
    if "/" in text:
        try:
            found = Fraction(text)
        except ZeroDivisionError as error:
            raise ValueError(f"{text} divides by zero") from error
        if found and not 1 / LARGEST <= abs(found) <= LARGEST:
            raise _out_of_range(text)
        return found
    size = abs(float(text))
    if not size and not Fraction(text.lower().partition("e")[0]):
        return Fraction(0)
    if not 1 / LARGEST <= size <= LARGEST:  # NaN and infinity are not, either
        raise _out_of_range(text)
    return Fraction(text)


def _out_of_range(text: str) -> ValueError:
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    return ValueError(f"the number {shown} is not between {1 / LARGEST:g} and {LARGEST:g} in size")
