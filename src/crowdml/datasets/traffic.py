"""Traffic of Boroondara (Melbourne), October 2006: vehicles a quarter of an hour at approaches of signalled junctions.

What Sachweh, Boiar and Liebig had for Dublin, from the same kind of signals. A place is one approach: their bins, 0 to
260, fit those, and a whole junction is mostly above the last edge. A place counts as a device if it measured on all 31
days, so that its batches are of the same hours as its peers'; one of these 106 has no coordinates and stands in the
middle of its junction's others. The 34 with missing days are public: bins and hyper-parameters may look at them, on the
days before evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crowdml.datasets.dataset import Prepared, frozen
from crowdml.datasets.files import SourceFile, find, read_npz
from crowdml.errors import DataError, UnknownName
from crowdml.features.series import label, look_ahead

SCATS = SourceFile(
    "traffic_scats_boroondara_2006.npz", ("7c427c4891032e497e7ebcc4af88fc453ce04ad9564157bbe660196283b0047c",), 469_466
)
NAME = "scats"
DAY = 96
"""Readings of a day."""
LEARNED_DAYS = 24
"""1 to 24 October are learned from; the last seven, 25 to 31, are for evaluation."""
WIDTH, HORIZON = 5, 1
"""w and r of the paper."""
EDGES = (5.0, 30.0, 60.0, 150.0)
"""The paper's bins; its last one ended at 260, and here it is open: counts go up to 695."""
CLASSES = ("0-5", "5-30", "30-60", "60-150", "150 and more")


@dataclass(frozen=True)
class Readings:
    """Series of readings, one a place, all of the same times: `values` [places, n] float32, `day` of them a day.

    `names`, `lat` and `lon` [places] are public. The first `learned` readings of each are what devices hold; the others
    are for evaluation. `public`: stretches of readings that nobody has to protect, each without a gap.
    """

    name: str
    names: tuple[str, ...]
    lat: NDArray[np.float64]
    lon: NDArray[np.float64]
    values: NDArray[np.float32]
    learned: int
    public: tuple[NDArray[np.float32], ...]
    day: int = DAY

    @property
    def places(self) -> int:
        return len(self.names)


def series(name: str) -> Readings:
    """The readings of that name, place by place. Raises `UnknownName`, `DataError`."""
    if name != NAME:
        raise UnknownName(f"no data set of readings is called {name!r}; known is {NAME!r}.")
    return arrange(read_npz(find(SCATS, name), name))


def arrange(arrays: dict[str, NDArray[Any]]) -> Readings:
    """flow [approaches, days, 96], -1 on a missing day; site, location, lat, lon [approaches]."""
    flow, site = arrays["flow"], arrays["site"]
    absent: NDArray[np.bool_] = np.any(flow < 0, axis=2)
    whole: NDArray[np.bool_] = ~np.any(absent, axis=1)
    if not whole.any():
        raise DataError(f"data set {NAME!r}: no place measured on all {flow.shape[1]} days.")
    lat, lon = (_filled(arrays[name], site) for name in ("lat", "lon"))
    values = flow[whole].reshape(int(whole.sum()), -1).astype(np.float32)
    return Readings(
        NAME,
        _named([str(place) for place in arrays["location"][whole]]),
        frozen(lat[whole]),
        frozen(lon[whole]),
        frozen(values),
        LEARNED_DAYS * flow.shape[2],
        tuple(frozen(part) for place in np.flatnonzero(~whole) for part in _stretches(flow[place], absent[place])),
        flow.shape[2],
    )


def _filled(degrees: NDArray[Any], site: NDArray[Any]) -> NDArray[np.float64]:
    """Where one is missing, the mean of its junction's others."""
    found = np.array(degrees, np.float64)
    for place in np.flatnonzero(np.isnan(found)):
        found[place] = np.nanmean(np.asarray(degrees)[site == site[place]])
    return found


def _stretches(flow: NDArray[Any], absent: NDArray[np.bool_]) -> list[NDArray[np.float32]]:
    """Runs of days [d, 96] that were measured, before the days of evaluation: [n] each."""
    there = np.flatnonzero(~absent[:LEARNED_DAYS])
    runs = np.split(there, np.flatnonzero(np.diff(there) > 1) + 1)
    return [flow[run].ravel().astype(np.float32) for run in runs if len(run)]


_WINDS = {"N", "NE", "E", "SE", "S", "SW", "W", "NW"}


def _named(locations: list[str]) -> tuple[str, ...]:
    """'HIGH STREET_RD E OF WARRIGAL_RD' -> 'High Street Rd E of Warrigal Rd'; a name that was there is numbered."""
    names: list[str] = []
    for location in locations:
        words = [word if word in _WINDS else word.title() for word in location.upper().replace("_", " ").split()]
        name = " ".join(words).replace(" Of ", " of ")
        again = sum(each.partition(" (")[0] == name for each in names)
        names.append(f"{name} ({again + 1})" if again else name)
    return tuple(names)


def scats(paths: tuple[Path, ...]) -> Prepared:
    """Windows of five readings and the paper's bin of the next one, by days; groups are places. Nothing is fitted."""
    return splits(arrange(read_npz(paths[0], NAME)))


def splits(readings: Readings) -> Prepared:
    """Windows never span two splits, two places or a gap."""
    held = [look_ahead(each[: readings.learned], WIDTH, HORIZON) for each in readings.values]
    later = [look_ahead(each[readings.learned :], WIDTH, HORIZON) for each in readings.values]
    public = [look_ahead(each, WIDTH, HORIZON) for each in readings.public]
    x_train, y_train = _joined(held)
    x_test, y_test = _joined(later)
    x_public, y_public = _joined(public)
    groups = np.repeat(np.arange(readings.places, dtype=np.int32), [len(x) for x, _ in held])
    return Prepared(x_train, y_train, x_test, y_test, x_public, y_public, groups)


def _joined(parts: list[tuple[NDArray[Any], NDArray[Any]]]) -> tuple[NDArray[Any], NDArray[np.int32]]:
    if not parts:
        return np.zeros((0, WIDTH), np.float32), np.zeros(0, np.int32)
    return np.concatenate([x for x, _ in parts]), label(np.concatenate([target for _, target in parts]), EDGES)


def made_up_city(*, places: int, days: int, learned_days: int, seed: int) -> Readings:
    """Readings that look like traffic, from a seed: two rush hours, less at weekends, each its size and hours.

    Neighbours along the road share some of what happens on a day. For quick looks, tests and benchmarks.
    """
    chance = np.random.default_rng(seed)
    hour = np.arange(DAY) / 4
    size = np.exp(chance.normal(4.2, 0.6, (places, 1, 1)))
    shift = chance.normal(0, 0.7, (places, 1))
    lean = chance.uniform(0.3, 1.0, (places, 2))
    peaks = ((8.3, 1.6, lean[:, :1]), (13.0, 4.5, 0.5), (17.2, 2.4, lean[:, 1:]))
    shape = 0.05 + np.sum([high * np.exp(-(((hour - at - shift) / wide) ** 2)) for at, wide, high in peaks], axis=0)
    weekday = np.where(np.arange(days) % 7 < 2, 0.65, 1.0)
    shared = np.cumsum(chance.normal(0, 0.15, (places, days)), axis=0)
    shared -= shared.mean(axis=0)
    level = size * shape[:, None, :] * (weekday * np.exp(shared / np.sqrt(places)))[:, :, None]
    values = chance.poisson(level * 1.6).astype(np.float32).reshape(places, days * DAY)
    along = np.arange(places)
    return Readings(
        "made-up",
        tuple(f"corner {place}" for place in along),
        frozen(np.full(places, -37.8)),
        frozen(145.0 + along / 200 + chance.uniform(0, 0.002, places)),
        frozen(values),
        learned_days * DAY,
        tuple(frozen(each) for each in chance.poisson(level * 1.6).astype(np.float32).reshape(places, -1)[:2]),
    )
