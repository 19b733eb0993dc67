"""Finds the place of a mutant in the package by file, function and a small piece of syntax, and puts the mutant there.

A function is named by its qualified name: `spread`, `Ledger.give`, `outer.inner`. A class (`Ledger`: its fields) and a
constant of a module or class (`DRAWN`) have names, too. The file is a hint: a function that moved to another file is
found there as long as its qualified name is unique in the package. A piece is an expression, a keyword argument, or one
or more statements. Pieces are compared as syntax trees, so that white space, line breaks, comments, parentheses and
quotes do not matter.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Node = ast.stmt | ast.expr | ast.keyword
ATOMS = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Dict, ast.ListComp)


class LostError(Exception):
    """A mutant's place is gone or is not the only one."""


@dataclass(frozen=True)
class Mutant:
    """In the function that `where` names, `old` occurs exactly once and becomes `new`; `test` must then fail.

    `where` is "FILE FUNCTION", with a path within the package. `index` chooses among several equal pieces of the
    function, counted from 1. Statements become nothing where `new` is empty. In a file that is not Python, `where` is
    the file alone, and `old` and `new` are text.
    """

    name: str
    where: str
    old: str
    new: str
    test: str
    index: int | None = None

    @property
    def file(self) -> str:
        return self.where.partition(" ")[0]

    @property
    def function(self) -> str:
        return self.where.partition(" ")[2]


class Module:
    """One source file: its text, its syntax tree and the functions, classes and constants in it."""

    def __init__(self, source: str) -> None:
        self.raw = source.encode()
        self.tree = ast.parse(source)
        self._starts = [0]
        for line in self.raw.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, first: Node, last: Node) -> tuple[int, int]:
        """Where these nodes begin and end. Offsets count bytes, as Python's parser does."""
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        start = self._starts[first.lineno - 1] + first.col_offset
        return start, self._starts[last.end_lineno - 1] + last.end_col_offset

    @cached_property
    def names(self) -> Mapping[str, list[ast.stmt]]:
        """Qualified names with what they define: several nodes where a property has a setter."""
        found: dict[str, list[ast.stmt]] = {}

        def visit(node: ast.AST, prefix: str, inside: bool) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                    found.setdefault(f"{prefix}{child.name}", []).append(child)
                    visit(child, f"{prefix}{child.name}.", isinstance(child, FUNCTIONS))
                    continue
                if not inside and isinstance(child, (ast.Assign, ast.AnnAssign)):
                    for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                        for name in ast.walk(target):
                            if isinstance(name, ast.Name):
                                found.setdefault(f"{prefix}{name.id}", []).append(child)
                visit(child, prefix, inside)

        visit(self.tree, "", inside=False)
        return found


class Piece:
    """A piece of syntax to look for: an expression, or statements of which one may stand for a keyword argument."""

    def __init__(self, text: str, *, statements: bool) -> None:
        self.nodes: list[Node] = [*_parsed(text)] if statements else [_expression(text)]
        self._statements = statements

    def places(self, scope: ast.AST) -> Iterator[Place]:
        """Every place of this piece in a scope: runs of statements, or single expressions and keywords."""
        for node in _walk(scope):
            for nodes in self._candidates(node):
                gaps: list[Gap] = []
                if _is_like(self.nodes, nodes, gaps):
                    yield Place(nodes, gaps)
            if isinstance(node, ast.keyword) and (wanted := self._as_keyword()) is not None:
                gaps = []
                if _is_like(wanted, node, gaps):
                    yield Place([node], gaps)

    def _candidates(self, node: ast.AST) -> Iterator[list[Node]]:
        kind, long = type(self.nodes[0]), len(self.nodes)
        if not self._statements:
            if isinstance(node, ast.expr) and isinstance(node, kind):
                yield [node]
            return
        for _, body in ast.iter_fields(node):
            if isinstance(body, list):
                yield from (body[at : at + long] for at, found in enumerate(body) if isinstance(found, kind))

    def _as_keyword(self) -> ast.keyword | None:
        match self.nodes:
            case [ast.Assign(targets=[ast.Name(id=name)], value=value)]:
                return ast.keyword(name, value)
            case _:
                return None


Gap = ast.expr | list[ast.stmt]
"""What a `...` of a piece stands for: an expression, or all statements of a block."""


@dataclass(frozen=True)
class Place:
    """Where a piece is: its nodes, and what each of its `...` stands for, in their order."""

    nodes: list[Node]
    gaps: list[Gap]


def _is_gap(pattern: object) -> bool:
    return isinstance(pattern, ast.Constant) and pattern.value is ...


def _is_gap_of_statements(pattern: object) -> bool:
    match pattern:
        case [ast.Expr(value=value)]:
            return _is_gap(value)
        case _:
            return False


def _is_like(pattern: object, found: object, gaps: list[Gap]) -> bool:
    """Whether syntax is that of a pattern. Fills `gaps`."""
    if _is_gap(pattern) and isinstance(found, ast.expr):
        gaps.append(found)
        return True
    if isinstance(pattern, list) and isinstance(found, list):
        if _is_gap_of_statements(pattern) and found:
            gaps.append(found)
            return True
        return len(pattern) == len(found) and all(_is_like(*pair, gaps) for pair in zip(pattern, found, strict=True))
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(found) and all(
            _is_like(getattr(pattern, field, None), getattr(found, field, None), gaps) for field in pattern._fields
        )
    return type(pattern) is type(found) and pattern == found


def _filled(pattern: Any, gaps: Iterator[Gap]) -> Any:
    """A copy of a pattern with what its `...` stand for."""
    if _is_gap(pattern) or _is_gap_of_statements(pattern):
        return next(gaps)
    if isinstance(pattern, list):
        return [_filled(each, gaps) for each in pattern]
    if isinstance(pattern, ast.AST):
        return type(pattern)(**{field: _filled(getattr(pattern, field, None), gaps) for field in pattern._fields})
    return pattern


def _is_expression(text: str) -> bool:
    try:
        _expression(text)
    except SyntaxError:
        return False
    return True


def _expression(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _parsed(text: str) -> list[ast.stmt]:
    return ast.parse(textwrap.dedent(text).strip("\n")).body


def _walk(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, in the order of the source: of a class its fields and not its methods.

    What stands inside an f-string has no reliable position before Python 3.12, so it is no place of its own.
    """
    if not isinstance(scope, ast.ClassDef):
        yield scope
    for child in ast.iter_child_nodes(scope):
        if isinstance(scope, ast.ClassDef) and isinstance(child, (*FUNCTIONS, ast.ClassDef)):
            continue
        if isinstance(scope, ast.JoinedStr):
            continue
        yield from _walk(child)


class Package:
    """The source files of a package in a folder, read and parsed as they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._modules: dict[str, Module] = {}

    def text(self, file: str) -> str:
        return (self.folder / file).read_text(encoding="utf-8")

    def module(self, file: str) -> Module:
        if file not in self._modules:
            self._modules[file] = Module(self.text(file))
        return self._modules[file]

    @cached_property
    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*.py"))

    def having(self, name: str) -> list[str]:
        """The files that define this qualified name."""
        last = re.escape(name.rpartition(".")[2])
        sign = re.compile(rf"\b(?:def|class)\s+{last}\b|^\s*{last}\b[^\n]*=", re.MULTILINE)
        return [file for file in self.files if sign.search(self.text(file)) and name in self.module(file).names]

    def place(self, mutant: Mutant) -> str:
        """The file that has the mutant's function by now."""
        file, function = mutant.file, mutant.function
        if (self.folder / file).exists() and (not function or function in self.module(file).names):
            return file
        gone = f"mutant {mutant.name!r}: `{function}` is gone from {file}"
        found = self.having(function) if function else []
        if len(found) == 1:
            return found[0]
        if found:
            raise LostError(f"{gone}; functions of that name are in {' and '.join(found)}: say in which one.")
        last = function.rpartition(".")[2]
        alike = [
            f"`{name}` in {other}"
            for other in self.files
            if re.search(rf"\b{re.escape(last)}\b", self.text(other))
            for name in self.module(other).names
            if name.rpartition(".")[2] == last
        ]
        near = f"of a similar name there is {', '.join(alike[:4])}" if alike else "nothing in the package has that name"
        raise LostError(f"{gone}; {near}.{self._elsewhere(mutant)}")

    def _elsewhere(self, mutant: Mutant) -> str:
        """Where else the mutant's piece is, for who has to look for it."""
        if not mutant.function:
            return ""
        piece, found = _old(mutant), []
        for file in self.files:
            for name, nodes in self.module(file).names.items():
                if any(True for node in nodes for _ in piece.places(node)):
                    found.append(f"`{name}` ({file})")
        return f" Its piece {mutant.old!r} is now in {', '.join(found[:4])}." if found else " Its piece is nowhere."

    def applied(self, mutant: Mutant) -> tuple[str, str]:
        """The file that the mutant is in by now, and the text of that file with the mutant."""
        file = self.place(mutant)
        if not mutant.function:
            source = self.text(file)
            if (found := source.count(mutant.old)) != 1:
                raise LostError(f"mutant {mutant.name!r}: its text occurs {found} times in {file}: {mutant.old!r}.")
            return file, source.replace(mutant.old, mutant.new)
        module = self.module(file)
        places = [place for node in module.names[mutant.function] for place in _old(mutant).places(node)]
        if len(places) < (mutant.index or 1):
            few = f"is not in `{mutant.function}` ({file})" if not places else f"is there {len(places)} times only"
            raise LostError(f"mutant {mutant.name!r}: its piece {mutant.old!r} {few}.{self._elsewhere(mutant)}")
        if mutant.index is None and len(places) > 1:
            lines = ", ".join(str(place.nodes[0].lineno) for place in places)
            raise LostError(
                f"mutant {mutant.name!r}: its piece {mutant.old!r} is {len(places)} times in `{mutant.function}` "
                f"({file}, lines {lines}): aim at a larger piece, or give an index."
            )
        return file, _replaced(module, places[(mutant.index or 1) - 1], mutant)


def _old(mutant: Mutant) -> Piece:
    return Piece(mutant.old, statements=not (_is_expression(mutant.old) and _is_expression(mutant.new)))


def _replaced(module: Module, place: Place, mutant: Mutant) -> str:
    """The text of a module with the mutant's new piece in this place. All other lines stay as they are."""
    first = place.nodes[0]
    start, end = module.span(first, place.nodes[-1])
    gaps = iter(place.gaps)
    if mutant.new.count("...") > mutant.old.count("..."):
        raise LostError(f"mutant {mutant.name!r}: its new piece has more `...` than its old one.")
    if isinstance(first, ast.keyword):
        (assigned,) = _filled(_parsed(mutant.new), gaps)
        new = f"{ast.unparse(assigned.targets[0])}=({ast.unparse(assigned.value)})"
    elif isinstance(first, ast.stmt):
        if module.raw[start:].startswith(b"elif"):
            raise LostError(f"mutant {mutant.name!r} aims at a whole `elif`: aim at its condition.")
        statements = _unparsed(ast.Module(_filled(_parsed(mutant.new), gaps), [])) or "pass"
        new = statements.replace("\n", "\n" + " " * first.col_offset)
    else:
        made = _filled(_expression(mutant.new), gaps)
        new = _unparsed(made) if isinstance(made, ATOMS) else f"({_unparsed(made)})"
    return (module.raw[:start] + new.encode() + module.raw[end:]).decode()


def _unparsed(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))
