"""Numbers on a command line: every one has a least and a largest value, and none is NaN or infinite."""

from __future__ import annotations

import math
from typing import Any

import click

MANY = 10**9
"""The largest count where nothing else bounds it."""


class Number(click.FloatRange):
    """A finite number between two bounds. `click.FloatRange` lets NaN through: it is neither below nor above them."""

    def __init__(self, least: float, largest: float, *, below: bool = False) -> None:
        """`below`: the largest itself is not allowed."""
        super().__init__(least, largest, max_open=below)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{found} is not a finite number.", param, ctx)
        return found


class Whole(click.IntRange):
    """A whole number between two bounds, both allowed."""

    def __init__(self, least: int, largest: int) -> None:
        super().__init__(least, largest)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if len(text := str(value)) > 40:
            self.fail(f"a number of {len(text):,} characters is not in the range {self._describe_range()}.", param, ctx)
        return super().convert(value, param, ctx)
