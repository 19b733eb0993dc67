"""Every figure in its quick form: the shape of its JSON, its keys, what its curves cost, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from crowdml.datasets import blobs
from crowdml.errors import DataError, TaskError, UnknownName
from crowdml.experiments import baselines
from crowdml.experiments.crowds import Size
from crowdml.experiments.figure import Claim, Figure, FigureError, Panel, PrivacyLabel, Series, level, over_trials
from crowdml.experiments.hamm2015 import Case, _central_label
from crowdml.experiments.plot import inks_of
from crowdml.experiments.registry import FIGURES, listing, reproduce
from crowdml.experiments.tuning import TABLES

IDS = sorted(FIGURES)
SOUND = {"crowd-sound-e10", "crowd-sound-e1"}
KEYS = {
    "hamm2015/fig3": {"crowd"} | SOUND,
    "hamm2015/fig4": {"crowd", "batch", "decentralised", "crowd-l1-sound-e10"} | SOUND,
    "hamm2015/fig5": {"crowd-b1", "crowd-b20", "central-sgd-b1", "central-sgd-b20", "batch", "batch-fair"} | SOUND,
    "hamm2015/fig6": {"crowd-b1-d1", "crowd-b20-d1", "batch"} | SOUND,
    "hamm2015/fig7": {"crowd", "batch", "decentralised"} | SOUND,
    "hamm2015/fig8": {"crowd-b1", "crowd-b20", "central-sgd-b20", "batch"} | SOUND,
    "hamm2015/fig9": {"crowd-b1-d1", "crowd-b20-d1", "batch"} | SOUND,
    "hamm2015/scalability": {"bytes-crowd", "staleness-b1", "noise-measured"} | SOUND,
    "hamm2015/tuning": {"synthetic-sound-e10"},
    "guo/fig3": {"local", "centralised"},
    "guo/fig4": {"admm-as-published", "admm-sound", "centralised", "local", "admm-local-noise"},
    "guo/async": {"s40", "s8", "s8-tau5", "private-s40", "private-s4"},
    "guo/rounds": {"gradient", "proximal", "proximal-private", "duals"},
    "guo/tuning": {"sound-e0.1"},
    "hamm2017/fig2": {"laplace-c1-sd0.01", "gaussian-c1-sd1", "by-rate-c1", "clipped-c1", "sound", "public-only"},
    "hamm2017/devices": {"crowd", "alone", "crowd-private", "public-only"},
    "zhao/table2": {"rounds-printed", "rounds-share-0.95", "rounds-sound", "mre-quiet", "mre-noisy", "constant-sound"},
    "zhao/fig8": {"quiet-usual", "quiet-special", "sound-usual", "sound-special", "constant", "constant-special"},
    "zhao/fig4": {"secprobe-n4", "secprobe-quiet", "centralised", "alone", "dssgd", "csdp", "sound", "constant"},
    "zhao/fig5": {"secprobe-n4", "secprobe-quiet", "centralised", "alone", "dssgd", "csdp", "sound", "public-only"},
    "zhao/fig6": {"secprobe-n4", "secprobe-quiet", "centralised", "alone", "dssgd", "csdp", "sound", "public-only"},
    "zhao/fig7": {"sound", "public-only", "constant", "quiet-r1", "noisy-r4"},
    "zhao/fig9": {
        "noisy-main",
        "quiet-main",
        "root-main",
        "mean-main",
        "root-share",
        "shipped-main",
        "shipped-crowd",
        "dssgd",
        "csdp",
    },
    "zhao/fig10": {
        "noisy",
        "quiet",
        "quiet-top",
        "mean",
        "krum",
        "root",
        "shipped",
        "averaged-noisy",
        "public-only",
        "constant",
    },
    "zhao/fig11": {"census-secprobe", "census-sound", "digits-secprobe", "digits-sound", "constant", "public-only"},
    "zhao/table1": {"census-baseline", "census-clipped", "census-truncated", "census-sound", "constant", "public-only"},
    "sachweh/fig2": {"llp", "p-llp-as-published", "p-llp", "knn", "majority", "alone", "kilobytes-p-llp"},
    "sachweh/fig3": {
        "llp",
        "p-llp-as-published",
        "p-llp",
        "knn",
        "majority",
        "alone",
        "peers-llp",
        "weighted",
        "p-llp-quantiles",
    },
    "ours/activity": {"crowd", "no-privacy", "no-privacy-best", "same-model"},
    "ours/compare": {"iris-gram-masked", "iris-sgd", "iris-sgd-masked", "iris-majority", "iris-no-privacy"},
    "ours/defaults": {"classes-in-force", "numbers-in-force", "classes-before", "numbers-before"},
    "ours/gram-tables": {"adult-gram", "adult-guo", "adult-majority"},
    "ours/gram-tuning": {"gram-e10-f64-k1024", "gram-e10-f64-k1024-public"},
    "ours/local-tuning": {"synthetic-200-e8"},
    "ours/local-updates-frontier": {"synthetic-200", "synthetic-200-silent"},
    "ours/masked-tuning": {"masked-e10"},
    "ours/mnist-frontier": {"gram-sample", "no-privacy", "public-only"},
    "ours/robustness": {"silos-default", "silos-median", "crowd-default", "root-only"},
    "ours/protocols": {"sgd-local", "sgd-masked", "gram", "local-mlp-device", "gram-seconds"},
}


@cache
def quick(id_: str) -> Figure:
    return reproduce(id_, quick=True)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@pytest.mark.parametrize("id_", IDS)
def test_a_figures_json_has_the_shape_of_the_design_its_keys_and_its_tables_on_the_page(id_: str) -> None:
    found = json.loads(json.dumps(quick(id_).to_json(), allow_nan=False))
    assert set(found) == {"id", "seconds", "data", "trials", "series", "claims"}
    assert found["id"] == id_
    assert found["seconds"] > 0
    assert isinstance(found["data"], str)
    assert isinstance(found["trials"], int)
    for series in found["series"]:
        assert set(series) == {"key", "name", "x", "y", "low", "high", "privacy"}
        assert len(series["x"]) == len(series["y"]) >= 1
        assert len(series["low"]) == len(series["high"])
        assert len(series["low"]) in (0, len(series["x"]))
        assert all(is_number(value) for name in ("x", "y", "low", "high") for value in series[name])
        privacy = series["privacy"]
        assert set(privacy) == {"unit", "epsilon", "claimed", "delta", "as_published", "not_covered", "delta_too_large"}
        assert privacy["unit"] in ("sample", "device", "measurement")
        assert privacy["epsilon"] is None or privacy["epsilon"] > 0
        assert privacy["epsilon"] is not None or privacy["claimed"] is None
    for claim in found["claims"]:
        assert set(claim) == {"key", "text", "paper", "ours", "holds"}
        assert isinstance(claim["holds"], bool)
        assert is_number(claim["ours"])
    _has_the_keys_that_others_look_for(quick(id_))
    _has_both_tables_on_the_page_of_figures(quick(id_))


def _has_the_keys_that_others_look_for(figure: Figure) -> None:
    assert {series.key for series in figure.series} >= KEYS[figure.id]
    assert figure.claims
    assert figure.notes


def _has_both_tables_on_the_page_of_figures(figure: Figure) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "figures.md").read_text(encoding="utf-8")
    section = page.partition(f"`crowdml reproduce {figure.id}`\n")[2].partition("\n## ")[0]
    assert section, f"docs/figures.md has no section for {figure.id}"
    heads, small = (
        [line for line in text.splitlines() if line.startswith(("| key |", "| claim |"))]
        for text in (section, figure.to_markdown())
    )
    if "device" not in small[0]:  # a quick run may leave out the curves that protect devices whole
        heads[0] = heads[0].replace(" or a device", "")
    assert heads == small
    assert len(heads) == 2


TESTED_ELSEWHERE = {
    "hamm2015/scalability": "it measures bytes, work and noise, and no model's error",
    **{f"ours/{name}-tuning": "its errors are on drawn digits" for name in ("gram", "local", "masked")},
    "hamm2015/tuning": "its sound errors are on drawn digits",
}
"""The figures that use MNIST and show no sound model's error on its test images."""


def test_every_table_of_errors_on_mnist_has_a_line_for_the_public_rows_alone() -> None:
    top = Path(__file__).resolve().parents[2]
    uses = {id_ for id_, spec in FIGURES.items() if {"mnist", "mnist-pixels"} & set(spec.data)}
    expected, found = uses - set(TESTED_ELSEWHERE), set[str]()
    for page in (top / "README.md", top / "docs" / "figures.md", *(top / "docs" / "protocols").glob("*.md")):
        for section in page.read_text(encoding="utf-8").split("\n## "):
            words = " ".join(section.split())
            here = {id_ for id_ in expected if f"`crowdml reproduce {id_}`" in words}
            tables = "\n".join(line for line in section.splitlines() if line.startswith("|"))
            assert not here or "`public-only`" in tables, f"{page.name}: no line for the public rows in {here}"
            found |= here
    assert found == expected


@pytest.mark.parametrize("id_", sorted(id_ for id_ in KEYS if KEYS[id_] >= SOUND))
def test_the_sound_panel_costs_what_its_key_says_and_is_not_as_published(id_: str) -> None:
    for epsilon in (10, 1):
        privacy = quick(id_)[f"crowd-sound-e{epsilon}"].privacy
        assert 0.999 * epsilon <= (privacy.epsilon or 0) <= epsilon
        assert privacy.claimed is None
        assert privacy.delta == 1e-6
        assert not privacy.as_published


@pytest.mark.parametrize("id_", ["hamm2015/fig5", "hamm2015/fig8"])
def test_h2_as_published_curves_show_what_their_passes_cost_beside_the_claim(id_: str) -> None:
    figure = quick(id_)  # a quick run has two passes
    for key in ("crowd-b1", "crowd-b20"):
        assert figure[key].privacy == PrivacyLabel("sample", 20.0, 10.0, 0.0, True)
    assert figure["batch"].privacy == PrivacyLabel("sample", 7.5, 10.0, 0.0, True, ("float-noise",))
    for key in ("batch-fair", "central-sgd-fair-b20"):  # better labels, on the same preprocessing and noise
        assert figure[key].privacy == PrivacyLabel("sample", 10.0, None, 0.0, True, ("float-noise",))
    claim = figure.claim("five-passes-cost-once")
    assert (claim.paper, claim.ours, claim.holds) == (10.0, 20.0, False)


def test_m8_the_corrected_noise_is_of_published_preprocessing_and_marked_so() -> None:
    assert quick("hamm2015/scalability")["noise-corrected"].privacy.as_published


@pytest.mark.parametrize(("family", "sound"), [("mnist", ()), ("cifar10", ("pca",))])
def test_m8_a_full_size_figure_names_what_no_epsilon_covers(family: str, sound: tuple[str, ...]) -> None:
    data = blobs(rows=600, features=6, classes=3, seed=1, normalise="l1")
    case = Case(family, data, data, data, TABLES["digits"], Size(devices=10, trials=1), quick=False)
    sets = [baselines.Perturbed(data.x_train, data.y_train, 10.0)]
    assert case.fitted == sound
    assert case.plain.not_covered == case.not_covered == ("pca", "tuning")
    assert _central_label(case, sets, fair=True).not_covered == ("pca", "tuning", "float-noise")
    assert _central_label(case, sets, fair=True).as_published


def test_tables_of_a_figure_are_markdown_that_the_page_of_figures_holds() -> None:
    label = PrivacyLabel("sample", 7.5, 10.0, 0.0, True, ("pca", "float-noise"))
    sound = PrivacyLabel("sample", 10.0, None, 1e-6)
    series = (
        Series("a", "A", (1.0, 2.0), (0.5, 0.25), (0.4, 0.2), (0.6, 0.3), label),
        Series("b", "B", (1.0,), (0.125,), privacy=sound),
        Series("c", "C", (1.0,), (0.5,)),
    )
    claims = (Claim("k", "of |x|", 0.25, False, 0.1), Claim("l", "other", 1.0, True))
    figure = Figure("x/y", "t", "digits", 1, series, claims, (Panel("main", "t", "x", "y"),))
    assert figure.to_markdown().splitlines() == [
        "| key | error at the end | lowest to highest | ε of a sample |",
        "|---|---|---|---|",
        "| `a` | 0.250 | 0.200 to 0.300 | 7.5 (claimed 10), as published; not covered: pca, float-noise |",
        "| `b` | 0.125 |  | 10, δ = 1e-6 |",
        "| `c` | 0.500 |  | none |",
        "",
        "| claim | paper | ours | holds |",
        "|---|---|---|---|",
        "| `k`: of \\|x\\| | 0.1 | 0.250 | **no** |",
        "| `l`: other |  | 1.000 | yes |",
    ]


def test_a_table_says_whose_epsilon_it_is_in_its_head_or_row_by_row_where_there_are_several() -> None:
    def table(*labels: PrivacyLabel) -> list[str]:
        series = tuple(Series(f"s{n}", "S", (1.0,), (0.5,), privacy=label) for n, label in enumerate(labels))
        lines = Figure("x/y", "t", "d", 1, series, (), (Panel("main", "t", "x", "y"),)).to_markdown().splitlines()
        return [line.split(" | ")[-1].removesuffix(" |") for line in (lines[0], *lines[2 : 2 + len(series)])]

    nothing = PrivacyLabel()
    assert table(PrivacyLabel("device", 8.0, delta=1e-6), nothing) == ["ε of a device", "8, δ = 1e-6", "none"]
    silent = PrivacyLabel("measurement", silent=True)
    assert table(PrivacyLabel("measurement", 0.1), silent) == ["ε of a measurement", "0.1", "none, nothing is sent"]
    assert table(nothing) == ["ε of a sample", "none"]
    assert table(PrivacyLabel(epsilon=1.0), PrivacyLabel("device", 8.0, delta=1e-6), nothing) == [
        "ε of a sample or a device",
        "1 of a sample",
        "8 of a device, δ = 1e-6",
        "none",
    ]


def test_curves_without_noise_have_no_epsilon() -> None:
    for key in ("crowd", "batch", "decentralised"):
        assert quick("hamm2015/fig4")[key].privacy.epsilon is None


@pytest.mark.parametrize("id_", ["sachweh/fig2", "sachweh/fig3"])
def test_p2_p4_label_proportions_as_published_show_what_their_folds_cost_beside_the_claim(id_: str) -> None:
    figure = quick(id_)  # three folds: a measurement is in two of them, and replace-one doubles
    claimed = 0.1 if id_ == "sachweh/fig2" else 1.0
    outside = ("tuning", "float-noise")
    published = PrivacyLabel("measurement", 4 * claimed, claimed, as_published=True, not_covered=outside)
    assert figure["p-llp-as-published"].privacy == published
    assert figure["p-llp-in-loop"].privacy.epsilon is None
    assert figure["p-llp-cv"].privacy.epsilon == 2 * claimed
    assert figure["p-llp"].privacy == PrivacyLabel("measurement", claimed)
    assert figure["alone"].privacy.silent
    assert figure["majority"].privacy.silent
    assert not figure["knn"].privacy.silent


@pytest.mark.parametrize("id_", IDS)
def test_a_series_has_one_colour_in_all_panels_and_shares_it_with_none_in_one(id_: str) -> None:
    figure = quick(id_)
    inks = inks_of(figure)
    by_name: dict[tuple[str, int], set[int]] = {}
    for panel in figure.panels:
        shown = [series for series in figure.series if panel.key in series.panel.split()]
        names = [series.name for series in shown]
        assert len({inks[series.key] for series in shown}) == len(shown)
        for place, series in enumerate(shown):
            by_name.setdefault((series.name, names[:place].count(series.name)), set()).add(inks[series.key])
    if id_ != "sachweh/fig3":  # there "p-LLP, ours" is drawn for several b, each with a colour of its own
        assert all(len(found) == 1 for found in by_name.values()), by_name


def test_the_quick_crowd_learns_the_digits() -> None:
    figure = quick("hamm2015/fig4")
    assert figure.data == "digits"
    assert figure["crowd"].last < 0.15 < figure["decentralised"].last


def test_a_repeated_figure_is_the_same_but_for_its_seconds() -> None:
    again = reproduce("hamm2015/fig4", quick=True)
    assert replace(again, seconds=0) == replace(quick("hamm2015/fig4"), seconds=0)


@pytest.mark.parametrize(
    "id_", ["hamm2015/fig4", "hamm2015/fig6", "hamm2015/scalability", "sachweh/fig2", "sachweh/fig3"]
)
def test_a_figure_is_drawn_into_a_file(id_: str, tmp_path) -> None:
    path = quick(id_).plot(tmp_path / "made" / "figure.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_progress_is_told_of_every_part_in_order() -> None:
    heard: list[tuple[str, int, int]] = []
    reproduce("hamm2015/scalability", quick=True, progress=lambda *part: heard.append(part))
    assert [part[1] for part in heard] == list(range(len(heard)))
    assert {part[2] for part in heard} == {len(heard)}


def test_an_unknown_figure_is_answered_with_near_names() -> None:
    with pytest.raises(UnknownName, match=r"'hamm2015/fig44'; did you mean .*hamm2015/fig4"):
        reproduce("hamm2015/fig44")
    with pytest.raises(UnknownName, match=r"did you mean .*hamm2015/fig5"):
        reproduce("fig5")
    with pytest.raises(UnknownName, match="known are hamm2015/fig3, "):
        reproduce("zzz")


def test_no_trials_are_refused() -> None:
    with pytest.raises(TaskError, match="trials = 0"):
        reproduce("hamm2015/fig4", trials=0)


def test_a_figure_whose_data_is_missing_says_so_before_it_starts(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CROWDML_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    states = {line.id: line for line in listing()}
    assert list(states) == list(FIGURES)
    assert states["hamm2015/fig4"].state == "data missing"
    assert states["hamm2015/fig4"].missing == ("mnist-as-published", "mnist")
    with pytest.raises(DataError, match="crowdml data fetch mnist-as-published"):
        reproduce("hamm2015/fig4")


def test_a_series_with_a_hole_is_refused() -> None:
    with pytest.raises(FigureError, match="not finite"):
        Series("a", "A", (1.0,), (float("nan"),))
    with pytest.raises(FigureError, match="2 x and 1 y"):
        Series("a", "A", (1.0, 2.0), (1.0,))
    with pytest.raises(FigureError, match="None"):
        PrivacyLabel(epsilon=float("inf"))


def test_two_series_of_one_key_are_refused() -> None:
    one = Series("a", "A", (1.0,), (1.0,))
    with pytest.raises(FigureError, match="one key"):
        Figure("x/y", "t", "digits", 1, (one, one), (), (Panel("main", "t", "x", "y"),))


def test_trials_become_a_mean_and_a_range_and_a_level_line_keeps_them() -> None:
    series = over_trials("a", "A", [5], [[1.0], [2.0], [6.0]], PrivacyLabel())
    assert (series.y, series.low, series.high) == ((3.0,), (1.0,), (6.0,))
    line = level(series, [10.0, 20.0, 30.0])
    assert (line.x, line.y, line.low, line.high) == ((10.0, 30.0), (3.0, 3.0), (1.0, 1.0), (6.0, 6.0))


def test_a_claim_without_a_number_in_the_paper_is_null_in_json() -> None:
    assert Claim("k", "t", 0.25, True).to_json() == {
        "key": "k",
        "text": "t",
        "paper": None,
        "ours": 0.25,
        "holds": True,
    }
