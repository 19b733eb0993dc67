"""What plots show: windows of noisy counts, their uncertainty, and when to say nothing."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree
from fractions import Fraction

import numpy as np
import pytest
from crowd import make_study

from crowdml.protocol import Noisy, Tally
from crowdml.server.estimates import Estimate
from crowdml.server.export import thinned
from crowdml.server.plot_points import Moment
from crowdml.server.portal.figures import CHARTS, LOOKS, can_draw, draw, work_out
from crowdml.server.portal.health import _histogram
from crowdml.server.portal.words import words
from crowdml.server.validation import Shown, Watched
from crowdml.storage.server.looks import Terms, Validation

TASK = make_study()
VARIANCE = 7.8
"""Of the noise in one count."""


def moments(rates: list[float], each: int = 50, seed: int | None = None, variance: float = VARIANCE) -> list[Moment]:
    """A moment after every `each` check-ins of 20 samples; counts as they are, or with seeded noise."""
    draw = None if seed is None else np.random.default_rng(seed)
    found, errors, labels = [], 0.0, np.zeros(3)
    for place, rate in enumerate(rates, 1):
        errors += rate * 20 * each
        labels += np.array([0.5, 0.3, 0.2]) * 20 * each
        noise = np.zeros(4) if draw is None else draw.normal(0, math.sqrt(variance * each), 4)
        errors, labels = errors + noise[0], labels + noise[1:]
        seen = place * each
        tally = Tally(
            seen,
            Noisy((round(errors),), seen * 20, seen * variance),
            Noisy(tuple(round(count) for count in labels), seen * 20, seen * variance),
        )
        found.append(Moment(seen, f"2026-01-01T00:{place // 60:02d}:{place % 60:02d}+00:00", 3 + place, tally))
    return found


def test_the_error_is_that_of_the_last_window_and_not_of_the_whole_past():
    figures = work_out(TASK, moments([0.9] * 20 + [0.1] * 20))
    last = figures.errors[-1]
    assert last.rate.value == pytest.approx(0.1)
    assert last.window < figures.index / 2


def test_before_a_window_is_full_the_error_is_over_everything_since_the_start():
    first = work_out(TASK, moments([0.4] * 30)).errors[0]
    assert (first.check_ins, first.window) == (50, 50)
    assert first.rate.value == pytest.approx(0.4)


def test_the_interval_holds_the_truth_about_as_often_as_it_says():
    hits = total = 0
    for seed in range(40):
        for each in work_out(TASK, moments([0.3] * 25, seed=seed)).errors:
            hits += each.rate.low <= 0.3 <= each.rate.high
            total += 1
    assert hits / total > 0.93


def test_an_interval_that_rules_nothing_out_is_hidden_and_says_how_many_check_ins_it_needs():
    figures = work_out(TASK, moments([0.4], each=1, variance=800.0))
    assert figures.errors[-1].rate.hidden
    assert figures.shown == ()
    assert not can_draw("error", figures)
    needed = figures.needed
    assert needed is not None
    enough = work_out(TASK, moments([0.4], each=needed, variance=800.0)).errors[-1].rate
    assert enough.high - enough.value == pytest.approx(0.1, rel=0.05)


def test_estimates_are_not_cut_off_at_zero():
    moment = moments([0.0])[0]
    assert moment.tally.errors is not None
    below = Tally(50, Noisy((-40,), 1000, 50 * VARIANCE), moment.tally.labels)
    rate = work_out(TASK, [Moment(50, moment.at, 1, below)]).errors[-1].rate
    assert rate.value == -0.04
    assert rate.low < rate.value < rate.high


def test_label_shares_have_their_names_and_a_number_has_its_bins():
    assert [name for name, _ in work_out(TASK, moments([0.1])).labels] == ["still", "on foot", "in vehicle"]


def test_a_study_that_counts_nothing_shows_check_ins_and_devices_alone():
    silent = [Moment(place, f"2026-01-01T00:00:0{place}+00:00", place, Tally(place)) for place in (1, 2)]
    figures = work_out(TASK, silent)
    assert [name for name in CHARTS if can_draw(name, figures)] == ["check-ins", "devices"]
    assert figures.needed is None


def test_before_the_first_check_in_there_is_nothing_to_draw():
    nothing = [Moment(0, "2026-01-01T00:00:00+00:00", 0, Tally(0, Noisy((0,), 0, 0.0), Noisy((0, 0, 0), 0, 0.0)))]
    for known in ([], nothing):
        figures = work_out(TASK, known)
        assert not any(can_draw(name, figures) for name in CHARTS)


def seen(measure: str, epsilon: str | None = None) -> Watched:
    """Three looks at the operator's own rows."""
    terms = Terms("own.csv", None, None) if epsilon is None else Terms("own.csv", Fraction(epsilon), Fraction(3))
    found = Validation(TASK.hash, 1, 200, 64, terms, "2026-01-01T00:00:00+00:00", None, Fraction(0), 9)
    reach = 0.0 if epsilon is None else 0.2
    values = [(1, 0.3), (4, 0.6), (9, 0.7)]
    shown = [Shown(version, "", Estimate(value, value - reach, value + reach)) for version, value in values]
    return Watched(found, measure, tuple(shown))


@pytest.mark.parametrize("name", CHARTS)
def test_every_plot_is_drawn_as_svg_in_both_themes_and_as_png(name: str):
    figures = work_out(TASK, moments([0.5, 0.4, 0.3, 0.2]), seen(name, "0.1") if name in LOOKS else None)
    assert can_draw(name, figures)
    light, dark = (draw(name, figures, words("en"), theme, "svg") for theme in ("light", "dark"))
    assert ElementTree.fromstring(light).tag.endswith("svg")
    assert light != dark
    assert light == draw(name, figures, words("en"), "light", "svg"), "the same figures give the same picture"
    assert draw(name, figures, words("de"), "dark", "png").startswith(b"\x89PNG")


def test_the_figures_of_the_interactive_charts_are_plain_and_finite():
    plain = work_out(TASK, moments([0.5, 0.4])).plain()
    assert plain["index"] == 100
    assert all(math.isfinite(value) for value in plain["error"]["y"] + plain["labels"]["low"])
    assert plain["devices"]["y"] == [4, 5]


def test_looks_at_the_operators_own_rows_are_news_and_have_a_band_where_they_were_charged():
    before, after = (work_out(TASK, moments([0.5]), each) for each in (None, seen("accuracy")))
    assert after.index == before.index + 3
    assert after.plain()["accuracy"]["x"] == [1, 4, 9]
    assert after.plain()["accuracy"]["low"] == after.plain()["accuracy"]["y"]
    assert work_out(TASK, [], seen("accuracy", "0.1")).plain()["accuracy"]["high"] == pytest.approx([0.5, 0.8, 0.9])
    assert not can_draw("distance", after)
    exact, blurred = (draw("accuracy", work_out(TASK, [], seen("accuracy", each)), words("en"), "light", "svg")
                      for each in (None, "0.1"))  # fmt: skip
    assert b"FillBetween" not in exact
    assert b"FillBetween" in blurred


def test_a_long_table_is_thinned_evenly_and_keeps_its_ends():
    kept = thinned(list(range(400)))
    assert (len(kept), kept[0], kept[-1]) == (12, 0, 399)
    assert thinned([1, 2]) == [1, 2]


def test_no_axis_of_an_error_rate_goes_below_nothing():
    few = work_out(TASK, moments([0.02, 0.02]))
    assert few.errors[-1].rate.low < 0, "the noise would have it so"
    assert "−" not in draw("error", few, words("en"), "light", "svg").decode()


def test_values_that_are_all_the_same_have_no_spread():
    same, other = _histogram([1.9, 1.9]), _histogram([1.0, 2.0])
    assert same is not None
    assert same.is_one
    assert other is not None
    assert not other.is_one
