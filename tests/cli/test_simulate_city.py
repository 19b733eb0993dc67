"""`crowdml simulate` of devices that teach each other: a city, what it costs, and options without a meaning."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_runner import crowdml, refused
from tasks import STREET, toml

from crowdml.datasets import series
from crowdml.datasets.files import locate
from crowdml.datasets.traffic import CLASSES, EDGES, SCATS
from crowdml.price import Price
from crowdml.protocols import find
from crowdml.task import find_task

CORNERS = "".join(f'[[places]]\nname = "corner {n}"\nlat = 0.0\nlon = 0.{n}\n' for n in range(1, 4))


def street(folder: Path) -> str:
    path = folder / "street.toml"
    path.write_text(toml(STREET, title="How busy?") + CORNERS)
    return str(path)


def test_a_city_learns_and_says_what_a_measurement_pays_and_what_was_sent(tmp_path: Path):
    found = crowdml("simulate", street(tmp_path), "--data", "synthetic", "--seed", "1", "--trials", "2",
                    "--plot", str(tmp_path / "city.svg"), "--json", "-")  # fmt: skip
    assert found.code == 0, found.err
    told = found.json
    assert (told["devices"], told["peers"], told["trials"]) == (3, 2, 2)
    assert told["check_ins"] == 3 * ((8 * 96 - 5) // 48)
    assert told["epsilon_sample"] == 1
    assert told["epsilon_device"] == 48 * 15
    assert told["accuracy_low"] <= told["accuracy"] <= told["accuracy_high"]
    assert told["accuracy"] > 0.5
    assert 1 / 3 <= told["commonest"] < told["accuracy"]
    assert told["bytes_up"] == sum(place["bytes_up"] for place in told["places"]) > 0
    assert [place["name"] for place in told["places"]] == ["corner 1", "corner 2", "corner 3"]
    assert told["series"][0]["y"] == sorted(told["series"][0]["y"])
    assert "<svg" in (tmp_path / "city.svg").read_text()


def test_the_same_seed_gives_the_same_city(tmp_path: Path):
    runs = [crowdml("simulate", street(tmp_path), "--data", "synthetic", "--seed", "7", "--json", "-").json
            for _ in range(2)]  # fmt: skip
    assert runs[0]["places"] == runs[1]["places"]


@pytest.mark.parametrize("option", [("--devices", "3"), ("--passes", "2"), ("--delay", "9"), ("--population", "iid")])
def test_options_about_who_devices_are_have_no_meaning_where_they_stand_at_places(
    tmp_path: Path, option: tuple[str, str]
):
    assert "its 3 places" in refused("simulate", street(tmp_path), "--data", "synthetic", *option)


def test_data_without_the_tasks_places_is_refused(tmp_path: Path):
    assert "no data set of readings is called 'digits'" in refused("simulate", street(tmp_path), "--data", "digits")


def test_the_shipped_task_lists_the_places_of_its_data_and_has_the_papers_bins():
    task = find_task("traffic")
    assert task.labels.classes == CLASSES
    assert [float(edge) for edge in task.labels.bins] == list(EDGES)
    assert Price.of(find(task), task).sample_epsilon() == 1
    assert len(task.places) == 106
    if locate(SCATS) is not None:
        assert tuple(place.name for place in task.places) == series("scats").names
