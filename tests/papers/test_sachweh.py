"""Sachweh, Boiar and Liebig on traffic of another city, all 106 places of it (privacy review, section 3).

At a reduced size: one trial of everything, where `make figures` has five.
"""

from __future__ import annotations

from functools import cache

import pytest

from crowdml.experiments.figure import Figure
from crowdml.experiments.registry import listing, reproduce

READY = {line.id for line in listing() if line.state == "ready"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("sachweh/fig3" not in READY, reason="the SCATS counts are not in $CROWDML_DATA"),
]


@cache
def made(id_: str) -> Figure:
    return reproduce(id_, trials=1)


def at(figure: Figure, key: str, x: float) -> float:
    return dict(zip(figure[key].x, figure[key].y, strict=True))[x]


@pytest.mark.parametrize("id_", ["sachweh/fig2", "sachweh/fig3"])
def test_p2_p4_what_was_published_costs_eighteen_times_its_claim_and_ours_what_it_says(id_: str) -> None:
    figure = made(id_)
    published = figure["p-llp-as-published"].privacy
    assert published.epsilon == pytest.approx(18 * (published.claimed or 0))
    assert figure["p-llp-in-loop"].privacy.epsilon is None
    assert figure["p-llp-cv"].privacy.epsilon == pytest.approx(9 * (published.claimed or 0))
    assert figure["p-llp"].privacy.epsilon == published.claimed
    assert not figure["p-llp"].privacy.not_covered


def test_p1_the_printed_loop_learns_far_worse_than_one_normalisation_besides_promising_nothing() -> None:
    figure = made("sachweh/fig3")
    assert at(figure, "p-llp-in-loop", 0.1) < at(figure, "p-llp-as-published", 0.1) - 0.08


def test_p7_the_published_search_cannot_have_63_percent_at_an_honest_tenth_and_least_squares_can() -> None:
    figure = made("sachweh/fig3")
    assert at(figure, "rule-clip", 0.1) < 0.62
    assert 0.66 <= at(figure, "p-llp", 0.1) <= 0.70  # 0.679
    assert figure.claim("solver").ours >= 0.03
    assert figure.claim("within-2-b32").ours in (0.05, 0.1)
    assert figure.claim("within-2-shares").ours in (0.1, 0.2)


def test_peers_never_help_here_and_own_labels_alone_beat_them() -> None:
    figure = made("sachweh/fig3")
    assert not figure.claim("peers-help").holds
    assert not figure.claim("peers-help-honestly").holds
    assert figure.claim("own-labels").ours >= 0.1
    assert figure["majority"].last < figure["llp"].last < figure["alone"].last < figure["knn"].last


def test_the_protocols_handlers_end_where_the_figure_does() -> None:
    assert made("sachweh/fig3").claim("handlers").holds


def test_small_batches_suffer_most_as_the_paper_says_and_label_counts_save_few_bytes() -> None:
    figure = made("sachweh/fig2")
    assert at(figure, "p-llp", 8) < at(figure, "p-llp", 32)
    assert figure["kilobytes-p-llp"].y == figure["kilobytes-llp"].y
    assert figure.claim("bytes").holds
    assert figure["kilobytes-p-llp"].y[0] > figure["kilobytes-knn"].y[0]  # batches of eight: longer than their readings
