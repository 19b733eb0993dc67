"""UCI Adult as Guo and Gong prepare it, without looking at rows that devices hold."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from crowdml.datasets import adult, load
from crowdml.errors import DataError


def row(**changes):
    plain = {"age": "39", "fnlwgt": "1", "education-num": "13", "capital-gain": "0", "capital-loss": "0",
             "hours-per-week": "40", "sex": "Male", "income": ">50K"}  # fmt: skip
    return {**plain, **{name: words[0] for name, words in adult.WORDS.items()}, **changes}


def test_a_row_becomes_105_numbers_with_one_indicator_an_attribute():
    numbers, rest, y = adult.encode([row(), row(sex="Female", income="<=50K", race="Black")])
    assert numbers.shape[1] + rest.shape[1] == adult.COLUMNS == 105
    assert rest.sum(1).tolist() == [1 + 7 + 1, 7 + 1]
    assert y.tolist() == [1, 0]
    assert (rest[:, -1] == 1).all()


def test_numbers_are_scaled_by_the_rows_that_were_seen_and_clipped_beyond_them():
    scaled = adult.scale(np.array([[0.0], [10.0], [40.0]]), np.array([[10.0], [30.0]]))
    assert scaled.ravel().tolist() == [0.0, 0.0, 1.0]
    constant = adult.scale(np.array([[5.0]]), np.array([[5.0], [5.0]]))
    assert np.isfinite(constant).all()


def test_rows_with_gaps_are_left_out_and_too_few_are_refused():
    with pytest.raises(DataError, match="2 complete rows"):
        adult.splits([row(), row(), row(race="?")], as_published=False)


def test_a_file_that_is_no_table_is_a_data_error(tmp_path):
    path = tmp_path / "adult.csv.gz"
    path.write_bytes(gzip.compress(b"age,sex\n1,2\n")[:-6])
    with pytest.raises(DataError, match="not a readable"):
        adult.read(path)


def test_g13_scaling_sees_public_rows_alone_and_as_published_it_sees_all(real_data):
    """Moving a device's row moves nothing of any other row in `adult`; the published scaling has the true extremes."""
    sound, published = load("adult", normalise="none"), load("adult-as-published", normalise="none")
    numbers = len(adult.NUMBERS)
    assert sound.x_public[:, :numbers].min(0).tolist() == [0.0] * numbers
    assert sound.x_public[:, :numbers].max(0).tolist() == [1.0] * numbers
    everything = np.concatenate([published.x_train, published.x_test])[:, :numbers]
    assert not np.array_equal(sound.x_train, published.x_train)
    assert everything.max() == 1.0
    assert np.array_equal(sound.y_train, published.y_train)
    assert np.array_equal(sound.x_train[:, numbers:], published.x_train[:, numbers:])


def test_the_label_is_as_frequent_as_the_data_set_says(real_data):
    data = load("adult")
    share = np.concatenate([data.y_train, data.y_test, data.y_public]).mean()
    assert share == pytest.approx((7508 + 3700) / 45_222)
