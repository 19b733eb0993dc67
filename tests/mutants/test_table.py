"""The table of mutants keeps up with the source: `make test` says so at once, `make mutants` only after minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from deep import TARGETS, all_sites
from survivors import SURVIVORS
from table import MUTANTS, Mutant

import crowdml

PACKAGE = Path(crowdml.__file__).parent
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_still_finds_its_place(mutant: Mutant):
    source = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    assert mutant.applied(source) != source


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_names_a_test_that_is_there(mutant: Mutant):
    file, _, name = mutant.test.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")


def test_no_two_mutants_have_one_name():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_every_explained_survivor_is_still_a_comparison_of_the_source():
    names = [site.name for site in all_sites(list(TARGETS))]
    assert len(set(names)) == len(names)
    assert not set(SURVIVORS) - set(names)
