"""Traffic as series of readings: which approaches are devices, which are public, and windows that span no gap."""

from __future__ import annotations

import numpy as np
import pytest

from crowdml.datasets import made_up_city, series, traffic
from crowdml.errors import DataError, UnknownName


def small() -> dict[str, np.ndarray]:
    """Four approaches of two junctions: the second has no coordinates, the third was off on the 3rd day."""
    chance = np.random.default_rng(1)
    flow = chance.integers(0, 300, (4, 31, 96)).astype(np.int16)
    flow[2, 2] = -1
    return {
        "flow": flow,
        "site": np.array([7, 7, 7, 8]),
        "location": np.array(["HIGH STREET_RD E of A_RD", "A_RD N OF HIGH_ST", "B_ST W of A_RD", "A_RD N of HIGH_ST"]),
        "lat": np.array([-37.0, np.nan, -38.0, -39.0]),
        "lon": np.array([145.0, np.nan, 146.0, 147.0]),
    }


def test_places_that_measured_every_day_are_devices_and_the_others_are_public():
    found = traffic.arrange(small())
    assert found.names == ("High Street Rd E of A Rd", "A Rd N of High St", "A Rd N of High St (2)")
    assert found.values.shape == (3, 31 * 96)
    assert found.learned == 24 * 96
    assert [len(stretch) for stretch in found.public] == [2 * 96, 21 * 96]  # never a day of evaluation


def test_a_place_without_coordinates_stands_among_its_junctions_others():
    found = traffic.arrange(small())
    assert (found.lat[1], found.lon[1]) == (-37.5, 145.5)


def test_windows_span_neither_places_nor_splits_nor_gaps():
    arrays = small()
    found = traffic.splits(traffic.arrange(arrays))
    each = 24 * 96 - 5
    assert found.x_train.shape == (3 * each, 5)
    assert np.bincount(found.groups).tolist() == [each] * 3
    assert len(found.x_test) == 3 * (7 * 96 - 5)
    assert len(found.x_public) == 2 * 96 - 5 + 21 * 96 - 5
    assert found.x_train[0].tolist() == arrays["flow"][0, 0, :5].tolist()
    assert found.y_train[0] == np.searchsorted(traffic.EDGES, arrays["flow"][0, 0, 5], side="right")
    assert min(part.min() for part in (found.y_train, found.y_test, found.y_public)) >= 0


def test_data_without_a_whole_place_is_refused_and_an_unknown_name_too():
    arrays = small()
    arrays["flow"][:, 0] = -1
    with pytest.raises(DataError, match="no place measured on all 31 days"):
        traffic.arrange(arrays)
    with pytest.raises(UnknownName, match=r"'trams'.*'scats'"):
        series("trams")


def test_a_made_up_city_is_the_same_from_the_same_seed():
    one, two, other = (made_up_city(places=4, days=3, learned_days=2, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(one.values, two.values)
    assert not np.array_equal(one.values, other.values)
    assert (one.places, one.values.shape, one.learned) == (4, (4, 288), 192)
    assert len(set(one.names)) == 4


def test_the_real_file_has_106_whole_places_of_which_none_lacks_coordinates(real_data):
    found = series("scats")
    assert found.places == len(set(found.names)) == 106
    assert np.isfinite(found.lat).all()
    assert np.isfinite(found.lon).all()
    assert found.values.min() >= 0
    assert found.values.max() == 695
    assert found.names[found.names.index("Auburn Rd N of Burwood Rd")]
