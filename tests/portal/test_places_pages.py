"""Studies that count labels, as their pages show them: private shares, places that are alive, and no model to load."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from crowd import Crowd, open_crowd
from desk import Desk, set_up
from device import Device
from markupsafe import Markup
from masked_device import crowd as masked_crowd
from masked_device import through
from proportions_task import HISTOGRAM, ROW, histogram
from relay_device import claim, mailbox, say
from test_public import words_of

from crowdml.server.export import export_model
from crowdml.server.portal.places import PlaceRow, Places, place_map, places_of
from crowdml.server.relay import PlaceFigures
from crowdml.task import Task, find_task, parse

CORNERS = 12
CITY = "\n".join(
    f'[[places]]\nname = "corner {place}"\n'
    f"lat = {53.33 + 0.01 * math.sin(place):.4f}\nlon = {-6.26 + 0.02 * math.cos(place):.4f}"
    for place in range(CORNERS)
)
TITLED = 'title = "How do people feel today?"\n' + HISTOGRAM


def city() -> Task:
    text = ROW.format(peers=3, epsilon=1.0, places=CITY).replace('name = "street"', 'name = "city"')
    return parse(text.replace("batch = 8", "batch = 8\nperson = 4"))


STREETS, MOODS = (
    city(),
    parse(TITLED.format(privacy='mechanism = "discrete-laplace"\nepsilon = { counts = 0.5 }\n', masking="")),
)


@dataclass
class City:
    """Twelve devices that told some batches each, the last two of them fewer."""

    crowd: Crowd
    devices: list[Device]

    def path(self, task: Task = STREETS) -> str:
        return f"/studies/{task.hash.hex()[:12]}"


def fill(crowd: Crowd, rounds: int = 6) -> City:
    """Ten devices go on, and two fall silent half an hour ago."""
    devices = [crowd.running.device() for _ in range(CORNERS - 1)]  # the last place stays free
    assert {claim(device, place, STREETS).status for place, device in enumerate(devices)} == {201}
    runner, draw = crowd.running.hub.runners[STREETS.hash], np.random.default_rng(3)
    began = datetime.now(UTC) - timedelta(minutes=30)
    for number in range(rounds):
        runner.now = lambda number=number: (began + timedelta(minutes=6 * number)).isoformat(timespec="microseconds")
        for place, device in enumerate(devices):
            if number >= 2 and place in (3, 7):
                continue
            counts = draw.multinomial(8, [0.55, 0.3, 0.15]) + np.rint(draw.laplace(0, 2, 3)).astype(int)
            assert say(device, place, STREETS, counts=counts).status == 202
        crowd.point()
    assert len(mailbox(devices[0], None, STREETS).letters) > 3
    for device in devices[:5]:
        device.seq = 0
        for _ in range(8):
            counts = draw.multinomial(20, [0.5, 0.35, 0.15]) + np.rint(draw.laplace(0, 4, 3)).astype(int)
            assert say(device, -1, MOODS, counts=counts).status == 202
    crowd.point()
    return City(crowd, devices)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[City]:
    with open_crowd(tmp_path_factory.mktemp("city") / "data", STREETS, MOODS, histogram(masked=True)) as crowd:
        yield fill(crowd)


@pytest.fixture(scope="module")
def desk(filled: City) -> Desk:
    return set_up(filled.crowd)


def test_a_place_is_silent_that_lags_far_behind_the_others_and_free_where_nobody_spoke(filled: City):
    found = places_of(filled.crowd.running.hub, STREETS)
    assert found is not None
    states = [row.state for row in found.rows]
    assert states == [
        "alive" if place not in (3, 7, 11) else "free" if place == 11 else "silent" for place in range(12)
    ]
    assert (found.held, found.letters) == (11, 9 * 6 + 2 * 2)
    assert found.heard[-1].figures.name in ("corner 3", "corner 7")
    assert places_of(filled.crowd.running.hub, MOODS) is None


def test_a_study_with_peers_shows_private_counts_places_bytes_and_what_a_person_pays(filled: City):
    page = filled.crowd.browser().get(filled.path())
    seen = words_of(page.text)
    assert "Places with a device 11 of 12 Alive 9 Silent 2 Batches reported 58" in seen
    assert re.search(r"Passed on to peers [\d.]+ kB", seen)
    assert page.text.count("<circle") == 12
    assert "corner 3: silent" in seen
    assert "Somebody who is in at most 4 measurements pays at most ε = 4 in all" in seen
    assert "quiet" in seen
    assert "The samples of the last 6 batches stay on the device a while longer" in seen
    assert "one reading per line, the oldest first" in seen
    assert "--place PLACE" in seen
    assert "plots/labels.svg" in page.text
    german = words_of(filled.crowd.browser("de").get(filled.path()).text)
    assert "Orte mit einem Gerät 11 von 12 Aktiv 9 Verstummt 2 Gemeldete Portionen 58" in german
    assert "Wer in höchstens 4 Messungen vorkommt, zahlt insgesamt höchstens ε = 4" in german


@pytest.mark.parametrize("task", [STREETS, MOODS], ids=lambda task: task.name)
def test_the_shares_of_labels_are_drawn_with_intervals_from_the_known_noise(filled: City, task: Task):
    figures = json.loads(filled.crowd.browser().get(f"{filled.path(task)}/figures.json").text)["labels"]
    state = filled.crowd.running.hub.runners[task.hash].fold.state
    samples = int(state.batches) * task.protocol["batch"]
    assert figures["x"] == list(task.labels.classes)
    assert figures["y"] == pytest.approx([count / samples for count in state.counts])
    assert all(low < y < high for low, y, high in zip(figures["low"], figures["y"], figures["high"], strict=True))
    picture = filled.crowd.browser().get(f"{filled.path(task)}/plots/labels.svg?theme=dark")
    assert (picture.status, picture.headers["content-type"]) == (200, "image/svg+xml")


def test_every_page_of_a_study_without_a_model_opens(filled: City, desk: Desk):
    masked = histogram(masked=True)
    browser = filled.crowd.browser()
    for task in (STREETS, MOODS, masked):
        for path in (filled.path(task), f"{filled.path(task)}?lang=de", f"{filled.path(task)}/figures.json"):
            assert browser.get(path).status == 200, path
        assert "one measurement, not a person" in words_of(filled.crowd.browser().get(filled.path(task)).text)
        for name in ("task.json", "card.md", "transcript", "model.safetensors", "histogram.json", "histogram.csv"):
            assert desk.browser.get(f"/operator/tasks/{task.hash.hex()[:12]}/{name}").status == 200, name
        page = desk.browser.get(f"/operator/tasks/{task.hash.hex()[:12]}")
        assert page.status == 200
        assert "histogram.csv" in page.text
        assert "model.onnx" not in page.text
        assert desk.browser.get(f"/operator/tasks/{task.hash.hex()[:12]}/model.onnx").status == 404
    assert desk.browser.get("/operator").status == 200
    assert browser.get("/").status == 200
    assert browser.get(f"/join/{filled.crowd.running.started.code}").status == 200
    other = filled.crowd.task.hash.hex()[:12]
    assert desk.browser.get(f"/operator/tasks/{other}/histogram.csv").status == 404


def test_an_operator_sees_who_is_alive_and_how_much_was_relayed(filled: City, desk: Desk):
    seen = words_of(desk.browser.get(f"/operator/tasks/{STREETS.hash.hex()[:12]}").text)
    assert "11 of 12 places have a device; 9 are alive, 2 fell silent. 58 batches came" in seen
    assert re.search(r"peers have read [\d.]+ kB of them", seen)
    assert "A person who is in at most 4 measurements pays ε=4 in all." in seen


def test_an_owner_reads_that_one_measurement_is_protected(filled: City):
    page = filled.crowd.browser().get(filled.crowd.owner_address(filled.devices[0]))
    seen = words_of(page.text)
    assert "How busy will it be in a quarter of an hour?: the promise protects one measurement, not a person." in seen
    assert "How do people feel today?: the promise protects one measurement" in seen


def test_a_draft_that_counts_has_nothing_to_simulate_and_says_what_its_noise_does(filled: City, desk: Desk):
    desk.get("/operator/tasks/file")
    desk.post("/operator/tasks/file", text=ROW.format(peers=2, epsilon=0.5, places=CITY).replace("street", "draft"))
    seen = words_of(desk.text)
    assert "This task counts labels, and a histogram has no accuracy to try." in seen
    assert "A count's noise has a standard deviation of 5.64, in batches of 8." in seen
    assert 'name="devices"' not in desk.text
    refused = desk.post(f"{desk.page.address.removeprefix(filled.crowd.base)}/simulate", data="synthetic")
    assert refused.status == 409


def test_a_crowd_that_counts_under_masks_shows_its_sums_alone(tmp_path: Path):
    task = histogram(masked=True)
    with open_crowd(tmp_path / "data", task) as crowd:
        rounds = crowd.running.hub.runners[task.hash].rounds
        assert rounds is not None
        devices = masked_crowd(crowd.running, task, 10)
        for each in devices:
            each.advertise()
        vectors = {each.number: {"counts": np.array([12, 6, 2])} for each in devices}
        through(devices, lambda: rounds.counts.get("summed", 0) == 1, vectors)
        crowd.point()
        page = crowd.browser().get(f"/studies/{task.hash.hex()[:12]}")
        seen = words_of(page.text)
        assert "Cohorts added up 1" in seen
        assert "about how often each label occurred, over a cohort" in seen
        figures = json.loads(crowd.browser().get(f"/studies/{task.hash.hex()[:12]}/figures.json").text)
        assert figures["labels"]["y"] == pytest.approx([0.6, 0.3, 0.1])
        model = export_model(crowd.running.hub.store, task.hash)
        assert model.labels is not None
        assert (model.labels.counts, model.labels.samples, model.cohorts) == ((120, 60, 20), 200, 1)


def test_a_closed_study_shows_no_places(tmp_path: Path):
    with open_crowd(tmp_path / "data", STREETS) as crowd:
        crowd.running.run(crowd.running.hub.set_closed(STREETS.hash, True))
        page = crowd.browser().get(f"/studies/{STREETS.hash.hex()[:12]}")
        assert page.status == 200
        assert "<circle" not in page.text


@pytest.mark.parametrize("task", ["traffic", "one spot"])
def test_dots_of_places_that_are_a_few_metres_apart_stand_side_by_side(task: str):
    listed = find_task("traffic").places if task == "traffic" else [find_task("traffic").places[0]] * 12
    figures = [PlaceFigures(n, each.name, float(each.lat), float(each.lon), True, 1, 300, None)
               for n, each in enumerate(listed)]  # fmt: skip
    drawn = place_map(Places(tuple(PlaceRow(each, "alive", 3) for each in figures), ()), "map", {"alive": "alive"})
    found = re.findall(r'cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)"', drawn)
    at = np.array([(float(x), float(y)) for x, y, _ in found])
    far = np.hypot(*(at[:, None] - at[None]).transpose(2, 0, 1)) + np.diag([np.inf] * len(at))
    assert far.min() >= 2 * float(found[0][2])
    wide, high = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)[0])
    assert at.min() > 0
    assert (at.max(0) < (wide, high)).all()


def test_a_map_is_drawn_once_for_all_who_look_until_somebody_falls_silent():
    figures = [PlaceFigures(n, f"<corner {n}>", n / 7, n / 5, True, 1, 1, None) for n in range(6)]
    alive = tuple(PlaceRow(each, "alive", 3) for each in figures)
    states = {"alive": "alive", "silent": "silent"}
    drawn = place_map(Places(alive, ()), "map", states)
    newer = tuple(replace(row, figures=replace(row.figures, letters=2, bytes=9)) for row in alive)
    assert place_map(Places(newer, ()), "map", states) is drawn
    assert "&lt;corner 5&gt;: alive" in drawn
    silent = (replace(alive[0], state="silent"), *alive[1:])
    assert "&lt;corner 0&gt;: silent" in place_map(Places(silent, ()), "map", states)
    assert "<b>" in place_map(Places(alive, ()), Markup("<b>"), states)
    assert "<b>" not in place_map(Places(alive, ()), "<b>", states)
