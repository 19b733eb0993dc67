"""The table of mutants keeps up with the source: `make test` says so at once, `make mutants` only after minutes."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from aim import LostError, Mutant, Package
from deep import TARGETS, all_sites, explained
from survivors import SURVIVORS
from table import MUTANTS

import crowdml

PACKAGE = Package(Path(crowdml.__file__).parent)
ROOT = Path(__file__).resolve().parents[2]


def test_every_mutant_still_finds_its_place():
    lost = []
    for mutant in MUTANTS:
        try:
            file, mutated = PACKAGE.applied(mutant)
            if mutated == PACKAGE.text(file):
                lost.append(f"mutant {mutant.name!r} changes nothing.")
        except LostError as error:
            lost.append(str(error))
    assert not lost, "\n".join(["bring tests/mutants/table.py up to date:", *lost])


def test_every_mutant_names_a_test_that_is_there():
    lost = []
    for mutant in MUTANTS:
        file, _, name = mutant.test.partition("::")
        name = name.partition("[")[0]
        if name not in _tests(file):
            others = [str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/*.py") if name in _tests(str(path))]
            where = f"a test of that name is in {' and '.join(others)}" if others else "no file has a test of that name"
            lost.append(f"mutant {mutant.name!r}: the test {name} is gone from {file}; {where}.")
    assert not lost, "\n".join(["bring tests/mutants/table.py up to date:", *lost])


@cache
def _tests(file: str) -> set[str]:
    path = ROOT / file
    return set(re.findall(r"def (test_\w+)\(", path.read_text(encoding="utf-8"))) if path.exists() else set()


def test_no_two_mutants_have_one_name():
    assert [name for name, times in Counter(mutant.name for mutant in MUTANTS).items() if times > 1] == []


def test_every_explained_survivor_is_still_a_comparison_of_the_source():
    found = all_sites(list(TARGETS))
    assert len({site.name for site in found}) == len(found)
    lost = []
    for name in SURVIVORS.keys() - explained(found).values():
        file, _, comparison = name.partition(" ")
        homes = [home for home in PACKAGE.having(comparison.partition(":")[0]) if home != file]
        lost.append(f"{name}: gone from {file}; a function of that name is in {homes or 'no file'}.")
    assert not lost, "\n".join(["bring survivors.py, or TARGETS of deep.py, up to date:", *sorted(lost)])


SOURCE = '''
"""A module."""
LIMIT = (1, 2)


class Ledger:
    rows: int = 3

    def give(self, n):
        if n > self.rows:  # a comment
            raise ValueError(
                "too many"
            )
        elif n < 0:
            return (self.rows -
                    n) * 2
        return dict(rows=self.rows, n=n)


def spread(n):
    total = n + 1
    total = n + 1
    return f"{n}" + str(total)
'''


@pytest.fixture
def package(tmp_path) -> Package:
    (tmp_path / "inner").mkdir()
    (tmp_path / "ledger.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "inner" / "other.py").write_text("def spread(a):\n    return a\n\ndef alone(a):\n    return a - 1\n")
    return Package(tmp_path)


@pytest.mark.parametrize(
    ("where", "old", "new", "index", "line"),
    [
        ("ledger.py Ledger.give", "(self.rows - n)", "n", None, "            return (n) * 2"),
        ("ledger.py Ledger.give", "n > self.rows", "n or 1", None, "        if (n or 1):  # a comment"),
        ("ledger.py Ledger.give", "n=n", "n=n, 1", None, "        return dict(rows=self.rows, n=((n, 1)))"),
        ("ledger.py Ledger.give", "dict(rows=..., n=n)", "dict(n=...)", None, "        return dict(n=self.rows)"),
        ("ledger.py Ledger", "3", "4", None, "    rows: int = 4"),
        ("ledger.py Ledger.rows", "3", "4", None, "    rows: int = 4"),
        ("ledger.py LIMIT", "1, 2", "1", None, "LIMIT = 1"),
        ("ledger.py spread", "total = n + 1", "", 2, "    pass"),
        ("ledger.py spread", "total = n + 1; total = n + 1", "total = n\nif n: total = 2", None, "    if n:"),
        ("elsewhere.py alone", "a - 1", "a", None, "    return a"),
    ],
)
def test_a_piece_is_found_as_syntax_and_only_its_own_text_changes(package, where, old, new, index, line):
    file, mutated = package.applied(Mutant("m", where, old, new, "", index))
    healthy = package.text(file)
    assert line in mutated.splitlines()
    assert mutated[: next(i for i, (a, b) in enumerate(zip(mutated, healthy, strict=False)) if a != b)] in healthy
    compile(mutated, file, "exec")


@pytest.mark.parametrize(
    ("where", "old", "says"),
    [
        ("gone.py spread", "n + 1", "gone from gone.py; functions of that name are in inner/other.py and ledger.py"),
        ("ledger.py Ledger.take", "n + 1", "nothing in the package has that name. Its piece 'n + 1' is now in `s"),
        ("inner/other.py Ledger.alone", "n + 1", "of a similar name there is `alone` in inner/other.py"),
        ("ledger.py spread", "total = n + 1", "is 2 times in `spread` (ledger.py, lines 21, 22)"),
        ("ledger.py Ledger.give", "a - 1", "is not in `Ledger.give` (ledger.py). Its piece 'a - 1' is now in `alone`"),
    ],
)
def test_a_lost_mutant_says_where_to_look(package, where, old, says):
    with pytest.raises(LostError) as raised:
        package.applied(Mutant("m", where, old, "0", ""))
    assert says in str(raised.value)
