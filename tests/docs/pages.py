"""The documentation as data: headings, rows of tables, fenced blocks and links of every page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```\s*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words after it, its text, and the plain block right below, if there is one."""

    language: str
    words: frozenset[str]
    text: str
    line: int
    shown: str | None


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The page without its fenced blocks."""
        return _FENCE.sub("", self.text)

    @property
    def headings(self) -> list[str]:
        return re.findall(r"^#{1,6}\s+(.+?)\s*$", self.prose, re.MULTILINE)

    @property
    def row_heads(self) -> list[str]:
        """The first cell of every row of every table."""
        return re.findall(r"^\|\s*((?:\\\||[^|\n])+?)\s*\|", self.prose, re.MULTILINE)

    @property
    def names(self) -> set[str]:
        """What has a heading or a row: the whole heading or cell, and every `name` in it."""
        found: set[str] = set()
        for text in (*self.headings, *self.row_heads):
            found.add(text.replace("`", "").strip())
            found.update(re.findall(r"`([^`]+)`", text))
        return found

    @property
    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", self.prose))

    @cached_property
    def blocks(self) -> list[Block]:
        matches = list(_FENCE.finditer(self.text))
        blocks: list[Block] = []
        for match, below in pairwise([*matches, None]):
            assert match is not None
            language, *words = match["info"].split() or [""]
            plain = below is not None and below["info"].strip() in ("", "text")
            shown = below["body"] if plain and not self.text[match.end() : below.start()].strip() else None
            line = self.text.count("\n", 0, match.start()) + 1
            blocks.append(Block(language, frozenset(words), match["body"], line, shown))
        return blocks


PAGES = [Page(path) for path in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])]
REFERENCE = [page for page in PAGES if page.name != "README.md"]
