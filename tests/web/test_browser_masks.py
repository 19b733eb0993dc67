"""The browser's terms of masking and its graphs beside those of crowdml.secagg."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from crowdml import protocols
from crowdml.secagg.graph import circle, neighbours_on, plan
from crowdml.secagg.terms import terms_of
from crowdml.task import find_task


@pytest.mark.parametrize("name", ["demo", "digits-gram", "digits-masked", "digits-mlp"])
def test_the_terms_of_a_task_are_pythons(engine: Any, name: str):
    task = find_task(name)
    terms = terms_of(task, protocols.find(task).mechanisms(task))
    assert engine("masking.js", "masked", task.canonical.decode()) == {
        "fields": [[each.tag, each.length, each.bits] for each in terms.fields],
        "smallest": terms.smallest, "largest": terms.largest, "survivors": terms.survivors,
        "colluders": terms.colluders,
    }  # fmt: skip


def test_graphs_are_planned_as_in_python(engine: Any):
    cases = [(5, 0, 4), (60, 2, 40), (201, 3, 150), (300, 10, 240), (1000, 100, 700), (10, 3, 6), (3, 1, 3)]
    for case, found in zip(cases, engine("masking.js", "plans", cases), strict=True):
        wanted = plan(*case)
        assert (found is None) == (wanted is None)
        if wanted is not None:
            names = ("neighbours", "threshold", "quorum", "survivors", "complete")
            assert found == {name: getattr(wanted, name) for name in names}


def test_neighbours_on_the_circle_are_pythons(engine: Any):
    ids = sorted(hashlib.sha256(bytes([n])).hexdigest()[:32] for n in range(40))
    wanted = neighbours_on(circle(ids, bytes([9]) * 32), 6)
    assert engine("masking.js", "circle", ids, 6) == wanted.tolist()


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("bits", [32, 64])
def test_masks_of_a_large_cohort_are_quick(page: Any, bits: int):
    """100,000 elements among 100 devices; the bench's limit is 500 ms."""
    run = "async ([bits]) => (await import('/tests/web/masking.js')).maskTime(100_000, bits, 100)"
    assert min(page.evaluate(run, [bits]) for _ in range(3)) < (500 if bits == 32 else 1000)
