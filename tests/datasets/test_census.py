"""Salaries of government employees: public bounds, classifications of the government, three splits."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from crowdml.datasets import census, load
from crowdml.errors import DataError


def row(**changes):
    numbers = dict.fromkeys(census.NUMBERS, "1")
    words = {name: each[0] for name, each in census.WORDS.items()}
    plain = {"sex": "male", "hispanic_origin": "no", "nativity": "native", "salary": "50000"}
    return {**numbers, **words, **plain, "occupation": "11-1021", "industry": "111", **changes}


def column(name, word):
    names = [*census.NUMBERS, *census.YES, *((each, one) for each, all_ in census.WORDS.items() for one in all_)]
    return names.index((name, word) if word else name)


def test_a_row_becomes_79_numbers_with_one_indicator_an_attribute():
    found = census.encode([row(sex="female", children="-1", age="80", hours_worked="33")])[0]
    assert len(found) == census.COLUMNS == 79
    assert found[len(census.NUMBERS) + len(census.YES) :].sum() == len(census.WORDS)
    assert found[column("sex", "")] == 1
    assert found[column("children", "")] == 0
    assert found[column("age", "")] == 1
    assert found[column("hours_worked", "")] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("code", "sector"), [("928P", "92"), ("3MS", "31"), ("32", "31"), ("4M", "44"), ("491", "48"), ("611M1", "61")]
)
def test_codes_count_as_their_sector_and_their_major_group(code, sector):
    found = census.encode([row(industry=code, occupation="25-1000")])[0]
    assert found[column("industry", sector)] == 1
    assert found[column("occupation", "25")] == 1


def test_salaries_are_on_a_logarithm_between_public_ends():
    dollars = np.array([1_001.0, 1_413.0, 31_622.7766, 1_000_000.0, 5_000_000.0])
    np.testing.assert_allclose(census.scale(dollars), [0.05, 0.05005, 0.5, 1, 1], atol=1e-5)


def test_rows_of_a_thousand_dollars_are_left_out_and_too_few_are_refused():
    rows = [row(salary="1000"), *[row()] * 40_000]
    with pytest.raises(DataError, match=r"40,000 rows with a salary above 1,000 dollars, and 40,000"):
        census.splits(rows)
    made = census.splits([row(salary="1001"), *rows])
    assert (len(made.y_train), len(made.y_test), len(made.y_public)) == (1, 30_000, 10_000)


def test_a_file_that_is_no_table_is_a_data_error(tmp_path):
    path = tmp_path / "census.csv.gz"
    path.write_bytes(gzip.compress(b"age,sex\n1,2\n")[:-6])
    with pytest.raises(DataError, match="not a readable"):
        census.read(path)


def test_the_labels_of_the_data_set_are_numbers_and_a_constant_has_a_quarter_of_them(real_data):
    data = load("census", normalise="none")
    assert data.classes == ()
    assert data.y_test.dtype == np.float32
    assert data.y_train.min() == np.float32(census.LEAST)
    assert 0.9 < data.y_train.max() <= 1
    assert (data.x_train.min(), data.x_train.max()) == (0, 1)
    assert (abs(0.534 - data.y_test) / data.y_test).mean() == pytest.approx(0.242, abs=0.003)
