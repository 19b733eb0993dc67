"""Every sentence that a participant reads, in a catalogue for each language.

A catalogue is a TOML file of nested tables; a sentence is found by its dotted name. `{name}` is filled in when it is
read. A table of `one` and `other` is chosen by the number `n`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape

from crowdml.server.estimates import Estimate
from crowdml.texts import number_text
from crowdml.verdict import Verdict

__all__ = ["LANGUAGES", "Words", "choose", "words"]

LANGUAGES = ("en", "de")
"""The first is the default. The catalogue `words/<language>.toml` says its own name."""


@dataclass(frozen=True)
class Words:
    """One language: its sentences, and how it writes numbers and times."""

    language: str
    sentences: dict[str, str]

    def __call__(self, name: str, /, **values: Any) -> Markup:
        """The sentence of this name, escaped, with its places filled in. An unknown name is a mistake of ours."""
        if name not in self.sentences and "n" in values:
            name = f"{name}.{'one' if values['n'] == 1 else 'other'}"
        shown = {key: self.number(value) if isinstance(value, int) else value for key, value in values.items()}
        return Markup(escape(self.sentences[name])).format(**shown)

    def get(self, name: str, otherwise: str) -> str:
        """The sentence, or `otherwise` where the catalogue has none: for what a task may name freely."""
        return self.sentences.get(name, otherwise)

    def number(self, value: float, digits: int = 3) -> str:
        """A count in full, another number to so many significant digits; as this language writes it."""
        text = f"{value:,}" if isinstance(value, int) else number_text(value, digits)
        if self.sentences["number.point"] == ".":
            return text
        return text.translate(str.maketrans(",.", self.sentences["number.group"] + self.sentences["number.point"]))

    def percent(self, value: float, digits: int = 1) -> str:
        return self("number.percent", value=_localised(f"{100 * value:.{digits}f}", self.sentences["number.point"]))

    def estimate(self, found: Estimate, digits: int = 1) -> Markup:
        """A noisy rate with its likely range, both within 0 and 100 %; or that the noise leaves everything open."""
        if found.hidden:
            return self("number.noisy")
        shown = found.clipped
        low, high = (self.percent(each, digits) for each in (shown.low, shown.high))
        return self("number.estimate", value=self.percent(shown.value), low=low, high=high)

    def verdict(self, found: Verdict | None) -> Markup:
        """What an accuracy is worth, for participants; empty where nobody knows it."""
        if found is None:
            return Markup()
        known = {name: self.percent(value) for name, value in found.numbers}
        name = "learned_majority" if found.level == "learned" and "majority" in known else found.level
        helps = ["helps"] if found.is_poor else []
        return Markup(" ").join(self(f"verdict.{each}", **known) for each in ("right", name, *helps))

    def moment(self, at: str, *, relative: bool = False) -> Markup:
        """A time as a <time> element: UTC, to the minute. `static/times.js` shows it in the reader's time zone.

        `relative`: the script says how long ago it was, as long as that is less than a week.
        """
        when = datetime.fromisoformat(at).astimezone(UTC)
        month = self.sentences["month"].split()[when.month - 1]
        shown = self("number.moment", day=f"{when.day}", month=month, year=f"{when.year}", time=f"{when:%H:%M}")
        how = Markup(" data-relative") if relative else ""
        return Markup('<time datetime="{}"{}>{}</time>').format(when.isoformat(timespec="seconds"), how, shown)

    def clock(self, at: datetime) -> Markup:
        """A time of today as a <time> element: hours and minutes."""
        when = at.astimezone(UTC)
        return Markup('<time datetime="{}" data-clock>{} UTC</time>').format(
            when.isoformat(timespec="seconds"), f"{when:%H:%M}"
        )


def _localised(text: str, point: str) -> str:
    return text.replace(".", point)


@lru_cache
def words(language: str) -> Words:
    text = files(__name__).joinpath(f"{language}.toml").read_text(encoding="utf-8")
    return Words(language, {name: _kept_together(sentence) for name, sentence in _flat(tomllib.loads(text), "")})


def _kept_together(sentence: str) -> str:
    """No line ends inside `ε = 1` or before a `%`."""
    return re.sub(r"(?<=[εδρ]) = ", "\u00a0=\u00a0", sentence).replace(" %", "\u00a0%")


def _flat(table: dict[str, Any], prefix: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, value in table.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, dict) else [(name, value)]
    return found


def choose(asked: str | None, kept: str | None, accepted: str) -> str:
    """The language: what the address says, then the cookie, then the browser's list by its weights."""
    for each in (asked, kept):
        if each in LANGUAGES:
            return each
    weighed: list[tuple[float, str]] = []
    for part in accepted[:1000].split(","):
        tag, _, weight = part.strip().partition(";")
        language = tag.strip().lower().split("-")[0]
        try:
            weighed.append((float(weight.strip().removeprefix("q=") or 1), language))
        except ValueError:
            continue
    for weight, language in sorted(weighed, key=lambda pair: -pair[0]):
        if language in LANGUAGES and weight > 0:
            return language
    return LANGUAGES[0]
