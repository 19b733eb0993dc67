"""The table of mutants still fits the source, so that `make mutants` tells of tests and not of itself."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from table import MUTANTS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_fits_the_source_once_changes_it_and_names_a_test_that_is_there(mutant):
    source = (ROOT / "src" / "crowdml" / mutant.file).read_text(encoding="utf-8")
    mutated = mutant.applied(source)
    assert mutated != source
    if mutant.file.endswith(".py"):
        ast.parse(mutated)
    file, _, name = mutant.test.partition("::")
    tests = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name.split("[")[0] in {node.name for node in tests.body if isinstance(node, ast.FunctionDef)}


def test_every_mutant_has_a_name_of_its_own():
    assert not [name for name, times in Counter(mutant.name for mutant in MUTANTS).items() if times > 1]
