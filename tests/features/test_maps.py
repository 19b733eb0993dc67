"""Public feature maps: bounded, the same on every machine, and made of nobody's samples."""

import hashlib
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from crowdml.errors import TaskError
from crowdml.features.maps import (
    BELL,
    SHRINK_DOWN,
    TALL,
    WIDE,
    MapSettings,
    draw_path,
    draw_strokes,
    make_map,
    normalise_pictures,
    random_filters,
)

VECTORS = json.loads((Path(__file__).parent / "maps.json").read_text(encoding="utf-8"))
SMALL = {"filters": 4, "size": 3, "pool": 3}
MAPS = {
    "identity": (MapSettings("identity"), 9),
    "cosine": (MapSettings("cosine", seed=5, features=16), 9),
    "convolution": (MapSettings("convolution", seed=3, **SMALL), 64),
    "kept": (MapSettings("convolution", seed=3, keep=12, **SMALL), 64),
    "normalised": (MapSettings("convolution", seed=3, normalise=True, **SMALL), 64),
}


def pictures(count, dimension, seed=1):
    """Mostly dark: where every pixel has the same ink, no filter answers above its threshold."""
    return (np.random.default_rng(seed).random((count, dimension)) ** 8).astype(np.float32)


@pytest.mark.parametrize("name", MAPS)
def test_features_have_norm_at_most_one_and_the_constant_at_the_end(name):
    settings, dimension = MAPS[name]
    found = make_map(settings, dimension)(100 * pictures(50, dimension))
    assert found.dtype == np.float32
    assert found.shape == (50, make_map(settings, dimension).length)
    assert (np.sqrt((found.astype(np.float64) ** 2).sum(axis=1)) <= 1).all()
    assert np.allclose(found[:, -1], 0.1, atol=1e-6)


@pytest.mark.parametrize("name", MAPS)
def test_features_of_a_sample_depend_on_that_sample_alone(name):
    settings, dimension = MAPS[name]
    rows = pictures(300, dimension)
    found = make_map(settings, dimension)(rows)
    changed = rows.copy()
    changed[7] = changed[8]
    again = make_map(settings, dimension)(changed)
    others = np.arange(300) != 7
    assert (found[others] == again[others]).all()
    assert (found[7] != again[7]).any()


@given(arrays(np.float64, (3, 64), elements=st.floats(allow_nan=True, allow_infinity=True)))
@settings(max_examples=30, deadline=None)
def test_no_sample_makes_features_that_are_not_finite_or_too_long(rows):
    for name in ("convolution", "kept", "normalised"):
        found = make_map(*MAPS[name])(np.clip(rows, -1e30, 1e30)).astype(np.float64)
        assert np.isfinite(found).all()
        assert ((found**2).sum(axis=1) <= 1).all()


@pytest.mark.parametrize("name", MAPS)
def test_features_are_those_of_the_vectors(name):
    found = make_map(*MAPS[name])(np.asarray(VECTORS["pictures"][str(MAPS[name][1])], np.float32) / 256)
    assert np.abs(found - np.asarray(VECTORS["features"][name])).max() < 2e-5


def test_filters_and_strokes_are_those_of_the_vectors():
    assert np.abs(random_filters(2, 7, 1) - np.asarray(VECTORS["filters"])).max() < 1e-12
    assert np.abs(draw_strokes(2, 1, 12) - np.asarray(VECTORS["strokes"])).max() < 1e-9


def test_the_stream_is_sha_256_of_tag_seed_and_block_as_specified():
    head = b"crowdml/maps/1\0filters\0" + (9).to_bytes(8, "little")
    data = b"".join(hashlib.sha256(head + i.to_bytes(8, "little")).digest() for i in range(2))
    bells = np.frombuffer(data[: 4 * 9], np.uint8).reshape(9, 4).sum(axis=1, dtype=np.int64) - 510
    smoother = np.array([[6, 4, 1], [4, 6, 4], [1, 4, 6]])
    smooth = smoother @ bells.reshape(3, 3) @ smoother.T
    wanted = (smooth - smooth.mean()) / np.linalg.norm(smooth - smooth.mean())
    assert np.allclose(random_filters(1, 3, 9)[0], wanted, atol=1e-12)


def test_bells_have_the_standard_deviation_that_is_divided_by():
    assert pytest.approx(math.sqrt(4 * np.arange(256).var()), rel=1e-12) == BELL


def test_filters_have_mean_zero_and_norm_one_and_other_seeds_give_others():
    filters = random_filters(8, 7, 1)
    assert np.allclose(filters.sum(axis=(1, 2)), 0, atol=1e-12)
    assert np.allclose((filters**2).sum(axis=(1, 2)), 1)
    assert np.abs(filters - random_filters(8, 7, 2)).max() > 0.1


def test_strokes_are_drawings_with_room_around_them():
    drawn = draw_strokes(64, 1)
    assert drawn.shape == (64, 28, 28)
    assert drawn.min() == 0
    assert drawn.max() == 1
    assert 0.05 < drawn.mean() < 0.2
    assert drawn[:, [0, -1]].max() == 0


def test_a_convolution_does_not_care_for_the_scale_of_its_pixels():
    mapped = make_map(*MAPS["convolution"])
    rows = pictures(5, 64)
    assert np.abs(mapped(rows) - mapped(rows / 7)).max() < 1e-5


def test_drawings_are_centred_and_their_directions_made_more_alike():
    plain = MapSettings("convolution", seed=3, sharpen=Fraction(0), **SMALL)
    sharp = MAPS["convolution"][0]
    drawn = draw_strokes(500, 3, 8).reshape(500, -1)

    def spread(settings):
        features = make_map(settings, 64)(drawn)[:, :-1].astype(np.float64)
        values = np.linalg.eigvalsh(np.cov(features.T))
        return values[-1] / values.sum()

    assert spread(sharp) < 0.8 * spread(plain)


def test_fewer_directions_are_the_leading_ones_in_order():
    features = make_map(*MAPS["kept"])(draw_strokes(500, 3, 8).reshape(500, -1))[:, :-1]
    spread = features.var(axis=0)
    assert spread.shape == (12,)
    assert spread[:3].mean() > spread[-3:].mean()


def spreads(picture):
    """Centre, variances and covariance of a picture's ink, down and across."""
    rows, columns = np.indices(picture.shape)
    share = picture / picture.sum()
    down, across = (share * rows).sum(), (share * columns).sum()
    return (
        down,
        across,
        *(
            (share * a * b).sum()
            for a, b in ((rows - down,) * 2, (columns - across,) * 2, (rows - down, columns - across))
        ),
    )


def test_a_normalised_picture_is_centred_upright_and_of_the_stated_height():
    drawn = draw_strokes(40, 5).astype(np.float32)
    for before, after in zip(drawn, normalise_pictures(drawn), strict=True):
        down, across, tall, _, both = spreads(after)
        assert abs(down - 13.5) < 0.25
        assert abs(across - 13.5) < 0.25
        stretched = math.sqrt(spreads(before)[2]) / (TALL * 28)
        if SHRINK_DOWN[0] < stretched < SHRINK_DOWN[1]:
            assert math.sqrt(tall) == pytest.approx(TALL * 28, rel=0.04)
        if abs(spreads(before)[4] / spreads(before)[2]) < 1:
            assert abs(both / tall) < 0.06


def test_the_width_goes_half_of_the_way_to_the_stated_one():
    bar = np.zeros((1, 28, 28), np.float32)
    bar[0, 5:23, 11:17] = 1  # 18 by 6 pixels: no slant
    _, _, _, wide, _ = spreads(normalise_pictures(bar)[0])
    half_way = math.sqrt(math.sqrt(35 / 12) * WIDE * 28)  # the geometric mean of what is and what is aimed at
    assert math.sqrt(wide) == pytest.approx(half_way, rel=0.04)


def test_a_moved_slanted_and_enlarged_picture_has_nearly_the_features_of_the_first():
    path = np.array([[9.0, 7.0], [16.0, 6.0], [18.0, 11.0], [11.0, 15.0], [10.0, 19.0], [17.0, 20.0]])
    across, down = path.T
    other = 1.15 * (across - 14) + 0.35 * (down - 13) + 15.5, 1.15 * (down - 13) + 14.0
    pair = np.concatenate([draw_path(x[None], y[None], np.array([1.2]), 28) for x, y in ((across, down), other)])
    plain, normalised = (
        make_map(MapSettings("convolution", seed=1, filters=8, normalise=each), 784)(pair.reshape(2, -1))
        for each in (False, True)
    )
    assert normalised[0] @ normalised[1] > 0.9 > plain[0] @ plain[1]


def test_a_picture_without_ink_stays_blank_and_a_dot_does_not_fill_it():
    blank, dot = np.zeros((2, 28, 28), np.float32)
    dot[3, 20] = 1
    found = normalise_pictures(np.stack([blank, dot]))
    assert not found[0].any()
    assert found[1].sum() < 9
    assert found[1, 10:18, 10:18].sum() == pytest.approx(found[1].sum())


def test_normalising_is_named_in_the_task_and_off_where_a_task_does_not_say():
    assert not MapSettings("convolution", seed=3).normalise
    rows = pictures(5, 64)
    assert np.abs(make_map(*MAPS["normalised"])(rows) - make_map(*MAPS["convolution"])(rows)).max() > 0.05


def test_a_cosine_map_is_a_gaussian_kernel_on_average():
    mapped = make_map(MapSettings("cosine", seed=1, features=4096, constant=Fraction(0)), 3)
    x = np.array([[0.1, 0.2, 0.3], [0.5, -0.2, 0.0]])
    features = mapped(x).astype(np.float64)
    assert features[0] @ features[1] == pytest.approx(math.exp(-((x[0] - x[1]) ** 2).sum() / 2), abs=0.05)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "deep"}, "protocol.map.kind"),
        ({"kind": "convolution", "seed": 1, "filters": 0}, "protocol.map.filters"),
        ({"kind": "convolution", "seed": 1, "sharpen": Fraction(2)}, "protocol.map.sharpen"),
        ({"constant": Fraction(1)}, "protocol.map.constant"),
        ({"seed": -1}, "protocol.map.seed"),
        ({"kind": "cosine"}, "protocol.map.seed is missing"),
    ],
)
def test_a_map_that_cannot_be_made_is_refused_by_its_key(changes, said):
    with pytest.raises(TaskError, match=said):
        MapSettings(**changes)


@pytest.mark.parametrize("dimension", [783, 16])
def test_a_convolution_needs_square_pictures_with_room(dimension):
    with pytest.raises(TaskError, match="square pictures"):
        make_map(MapSettings("convolution", seed=1), dimension)


def test_no_more_directions_can_be_kept_than_there_are():
    with pytest.raises(TaskError, match=r"protocol\.map\.keep"):
        make_map(MapSettings("convolution", seed=1, keep=1000, **SMALL), 64)
