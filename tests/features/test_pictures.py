"""Variations of public pictures: the same for everybody, near to what they were made of, and not too many."""

from __future__ import annotations

import numpy as np

from crowdml.features.pictures import MOST_BENT, VARIATIONS, bend, variations


def pictures(count: int) -> np.ndarray:
    """A bright bar on a dark ground, 12 by 12, each at another place."""
    made = np.zeros((count, 12, 12), np.float32)
    for place in range(count):
        made[place, 2:10, 3 + place % 5 : 5 + place % 5] = 1.0
    return made.reshape(count, -1)


def test_each_variation_is_another_and_near_to_its_picture():
    plain, bent = pictures(10), bend(pictures(10), 3)
    assert bent.shape == (30, 144)
    assert bent.dtype == np.float32
    assert 0 <= bent.min() <= bent.max() <= 1
    apart = np.linalg.norm(bent.reshape(3, 10, -1) - plain, axis=2) / np.linalg.norm(plain, axis=1)
    assert 0.05 < apart.min() < apart.max() < 1.0
    assert np.abs(bent[:10] - bent[10:20]).max() > 0.1


def test_the_draw_is_public_and_fixed():
    np.testing.assert_array_equal(bend(pictures(4), 2), bend(pictures(4), 2))


def test_of_many_pictures_each_is_bent_less_often():
    assert [variations(pictures(count))[1] for count in (1, 500, 1000, 3000, 5000)] == [VARIATIONS, 8, 4, 1, 0]
    assert variations(pictures(5000))[0].shape == (0, 144)
    assert len(variations(pictures(999))[0]) <= MOST_BENT
