"""Second privacy review: parameters that would void a promise are refused wherever a device could meet them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from bench import masked_text, task_text

import crowdml.tasks
from crowdml.cli.budget import budget_text
from crowdml.device.folder import Folder, OwnerBudget, consent_to, readable_task
from crowdml.device.member import terms
from crowdml.errors import GuaranteeError, TaskError
from crowdml.price import Price
from crowdml.privacy.losses import ZCDP, Total
from crowdml.privacy.mechanisms import Scheduled
from crowdml.privacy.noise import SystemSource
from crowdml.protocols import check_for_devices, delta_ceiling, find, is_delta_too_large, refusal, settled
from crowdml.server.hub import check_hosted
from crowdml.task import Task, from_canonical, load, parse
from crowdml.texts import digits_below, number_text

SHIPPED = sorted(Path(next(iter(crowdml.tasks.__path__))).glob("*.toml"))


def with_delta(text: str, delta: float, samples: int | None = None, more: str = "") -> Task:
    budget = "" if samples is None else f"\nbudget = {{ epsilon = 9.0, samples = {samples} }}"
    return parse(text.replace("\nepsilon = ", f"\ndelta = {delta}{budget}\n{more}\nepsilon = "))


# --- delta has a ceiling (finding 1) ---


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_devices_may_take_part_in_every_shipped_task(path: Path) -> None:
    assert refusal(settled(load(path))) is None


@pytest.mark.parametrize(("delta", "is_refused"), [(1e-6, False), (1e-5, False), (1.01e-5, True), (0.999, True)])
def test_a_delta_above_a_hundred_thousandth_is_refused_by_server_and_device(delta: float, is_refused: bool) -> None:
    """Finding 1: with delta = 0.999 a guess was right 96.7 % of the time, and every check passed."""
    task = settled(with_delta(task_text(), delta))
    assert is_delta_too_large(task) == is_refused
    for run in (check_hosted, check_for_devices, lambda each: readable_task(each.canonical, each.hash)):
        if is_refused:
            with pytest.raises(TaskError, match=r"privacy.delta = .* at most 1e-05"):
                run(task)
        else:
            run(task)


@pytest.mark.parametrize(
    ("task", "most"),
    [
        (with_delta(masked_text(cohort=100, minimum=60), 1e-6, 300), 1 / 300_000),
        (with_delta(masked_text(cohort=100, minimum=60), 1e-6), 1e-5),
        (with_delta(masked_text(cohort=6), 1e-6, 14), 1e-5),
        (with_delta(task_text(), 1e-6, 10**9), 1e-5),
    ],
)
def test_the_ceiling_is_a_tenth_of_one_over_devices_times_samples_where_both_are_known(task: Task, most: float) -> None:
    assert delta_ceiling(task) == pytest.approx(most, rel=1e-12)
    at, above = (replace(task, privacy=replace(task.privacy, delta=delta)) for delta in (most, most * 1.001))
    assert not is_delta_too_large(at)
    assert is_delta_too_large(above)


def test_a_task_that_protects_devices_counts_devices_and_not_their_samples() -> None:
    text = (Path(crowdml.tasks.__path__[0]) / "digits-mlp.toml").read_text(encoding="utf-8")
    task = parse(text)
    assert (task.protected, task.privacy.unit) == (100, "device")
    crowd = replace(task, masking=replace(task.masking, cohort=200_000, minimum=190_000))
    assert crowd.largest_delta == pytest.approx(1 / 2_000_000)


def test_places_are_devices_too() -> None:
    traffic = load(next(path for path in SHIPPED if path.stem == "traffic"))
    assert traffic.protected == len(traffic.places) * traffic.privacy.budget.samples


def test_a_refusal_names_where_the_ceiling_comes_from_and_a_number_that_is_allowed() -> None:
    task = with_delta(masked_text(cohort=1000, minimum=750), 9e-6, 60)
    refused = refusal(task)
    assert refused is not None
    assert "at most 1/(10 x 1,000 devices x 60 samples) = 1.66e-06" in refused.sentence
    assert refusal(replace(task, privacy=replace(task.privacy, delta=1.66e-6))) is None


@pytest.mark.parametrize("value", [1 / 600_000, 1e-7, 9.999e-8, 1.0005e-9, 3.14159e-12])
def test_a_limit_that_people_copy_is_never_above_itself(value: float) -> None:
    assert value * 0.98 < float(digits_below(value)) <= value


def test_pure_promises_need_no_delta_and_are_not_converted_at_a_large_one() -> None:
    """A pure row needs none; totals are converted at it all the same, and ε = 1 is "ε = 0 at δ = 0.9"."""
    laplace = {"mechanism": "discrete-laplace", "norm": "l1"}
    city = with_delta(task_text(**laplace), 1e-6, 10**9)
    assert delta_ceiling(city) == 1e-5
    assert refusal(with_delta(task_text(**laplace), 0.0)) is None
    voided = refusal(with_delta(task_text(**laplace), 0.9))
    assert voided is not None
    assert voided.kind == "delta"


def test_the_simulator_reads_what_devices_refuse() -> None:
    task = with_delta(task_text(), 0.1)
    assert find(task).mechanisms(task)
    assert from_canonical(settled(task).canonical) == settled(task)


def test_a_device_that_consented_in_the_past_stops_giving_and_still_reads_its_task(tmp_path: Path) -> None:
    task = settled(with_delta(task_text(), 0.1))
    home = Folder(tmp_path / "device")
    home.make()
    home.accept(task, consent_to(Price.of(find(task), task)))  # as a version without a ceiling did
    with pytest.raises(TaskError, match=r"privacy.delta = 0\.1"):
        home.accepted(task.hash)
    assert home.consented(task.hash) == task
    home.ledger().close()


@pytest.mark.parametrize(
    ("samples", "delta", "is_refused"),
    [(100, 1e-5, False), (100, 1.1e-5, True), (100_000, 1e-6, False), (100_000, 1.1e-6, True), (0, 1e-5, False)],
)
def test_an_owners_budget_has_the_same_ceiling(tmp_path: Path, samples: int, delta: float, is_refused: bool) -> None:
    home, chosen = Folder(tmp_path / "device"), OwnerBudget("1", samples, None, delta)
    home.make()
    if is_refused:
        with pytest.raises(GuaranteeError, match="Set it with `crowdml budget set --delta 1e-06`"):
            home.set_budget(chosen)
        assert home.budget is None
    else:
        home.set_budget(chosen)
        assert home.budget == chosen


def test_a_budget_that_an_earlier_version_kept_is_still_read_and_nothing_is_given_under_it(tmp_path: Path) -> None:
    home, task = Folder(tmp_path / "device"), settled(parse(task_text()))
    home.make()
    kept = {"server": {"url": "http://127.0.0.1:1", "key": "00" * 32}, "budget": {"epsilon": "1", "samples": 10}}
    kept["budget"]["delta"] = 0.1
    (home.path / "device.json").write_text(json.dumps(kept))
    assert home.budget is not None
    assert budget_text(home.budget, (), tmp_path)[1]["delta"] == 0.1
    with pytest.raises(GuaranteeError, match="Nothing was sent"):
        terms(home, task, find(task))


# --- one reading, one serial (finding 3) ---

WINDOWS = """
name = "readings"
[features]
kind = "windows"
dimension = 8
norm = {{ kind = "l2", bound = 1.0 }}
[labels]
classes = ["low", "high"]
bins = [0.5]
[model]
kind = "{model}"
[protocol]
{protocol}
[privacy]
{privacy}
"""
STEP = "step = { c = 1.0 }"
LEAVING = {
    "sgd": ("softmax", f'kind = "sgd"\nbatch = 10\n{STEP}', "gradient", ""),
    "local_updates": ("softmax", 'kind = "local_updates"\nbatch = 10\nclip = 1.0\nrate = { c = 0.1 }', "update", ""),
    "admm": ("logistic", 'kind = "admm"\nbatch = 10\nrho = 5.0', "update", ""),
}


def windowed(kind: str) -> Task:
    model, protocol, row, _ = LEAVING[kind]
    privacy = f'mechanism = "discrete-gaussian"\nepsilon = {{ {row} = 1.0 }}'
    return parse(WINDOWS.format(model=model, protocol=protocol, privacy=privacy))


@pytest.mark.parametrize("kind", LEAVING)
def test_windows_that_overlap_are_refused_where_they_leave(kind: str) -> None:
    """Finding 3: one reading replaced moved a gradient sum by 3.95 times the sensitivity that was priced."""
    task = windowed(kind)
    assert find(task).name == kind, "the simulator, exports and replays read it"
    for run in (check_hosted, lambda each: readable_task(each.canonical, each.hash)):
        with pytest.raises(TaskError, match="each reading would be in up to 9 samples that leave"):
            run(settled(task))


def test_windows_that_stay_on_the_device_are_accepted() -> None:
    privacy = 'mechanism = "discrete-laplace"\nepsilon = { counts = 1.0 }'
    task = parse(WINDOWS.format(model="histogram", protocol='kind = "proportions"\nbatch = 10', privacy=privacy))
    assert refusal(task) is None


def test_one_reading_of_overlapping_windows_moves_a_sum_further_than_one_sample_may() -> None:
    """What the refusal is for: the premise of the ledger is that a real sample has one serial."""
    from crowdml.features.series import look_ahead

    readings = np.zeros(30)
    other = readings.copy()
    other[15] = 1.0
    first, second = (look_ahead(each, 8, 1)[0] for each in (readings, other))
    assert (first != second).any(axis=1).sum() == 8


# --- noise that no device can draw (finding 13) ---


def test_noise_beyond_the_exact_sampler_is_refused_before_a_device_fails_at_every_draw() -> None:
    """Finding 13: admm with sigma = 179,946 steps was accepted, and each device failed."""
    text = task_text(
        dimension=400, classes='["a", "b"]', model="", mechanism="discrete-gaussian", epsilon="{ update = 0.05 }"
    )
    text = text.replace('kind = "softmax"', 'kind = "logistic"')
    start, end = text.index("[protocol]"), text.index("[privacy]")
    text = text[:start] + '[protocol]\nkind = "admm"\nbatch = 10\nrho = 5.0\n' + text[end:]
    task = parse(text.replace("\nepsilon = ", "\nuses = 20\nepsilon = "))
    row = find(task).mechanisms(task)["update"]
    with pytest.raises(TaskError, match="a device draws at most 32768"):
        SystemSource().discrete_gaussian(row.sigma, np.zeros(1))
    refused = refusal(task)
    assert refused is not None
    assert refused.kind == "noise"
    assert "asks for noise of" in refused.sentence
    assert "a device draws at most 32,768. Raise it or lower privacy.uses." in refused.sentence
    with pytest.raises(TaskError, match="grid steps"):
        check_hosted(settled(task))


def test_counts_with_noise_that_no_device_draws_are_refused_too() -> None:
    task = parse(task_text(epsilon="{ gradient = 1.0, labels = 0.00005 }"))
    with pytest.raises(TaskError, match="a device draws at most 1048576"):
        SystemSource().discrete_laplace(Fraction(2**20 + 1), np.zeros(1))
    refused = refusal(task)
    assert refused is not None
    assert refused.sentence.startswith("privacy.epsilon.labels = 1/20000 asks for noise of 40,000 grid steps")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_noise_of_every_row_is_stated_by_the_mechanism(path: Path) -> None:
    task = load(path)
    for row in find(task).mechanisms(task).values():
        assert row.law is not None
        assert row.law.steps > 0
        assert row.law.is_drawable


def test_a_row_with_a_schedule_of_noise_says_which_noise_it_has() -> None:
    """Finding 14: task check and the portal's price said "none"."""
    text = (Path(crowdml.tasks.__path__[0]) / "digits-mlp.toml").read_text(encoding="utf-8")
    text = text[: text.index("[masking]")]
    text = text.replace('"skellam"', '"discrete-gaussian"').replace(
        "update_clip = 0.3", 'noise = { schedule = "geometric", ratio = 1.25 }\nupdate_clip = 0.3'
    )
    task = settled(parse(text))
    row = find(task).mechanisms(task)["update"]
    assert isinstance(row, Scheduled)
    assert row.law == row.row.law
    (shown,) = Price.of(find(task), task).rows
    assert shown.noise == f"σ = {number_text(float(row.row.sigma), 4)} steps"
    assert dict(shown.parameters)["sigma"] == pytest.approx(float(row.row.sigma * row.grid.step))


def test_a_clip_of_everything_that_a_device_gives_is_not_called_that_of_a_sample() -> None:
    """Finding 10: what pages say of units comes from the mechanism."""
    tasks = {path.stem: load(path) for path in SHIPPED}
    names = {name: dict(Price.of(find(task), task).rows[0].parameters) for name, task in tasks.items()}
    assert "clip_whole" in names["digits-mlp"]
    assert "clip" in names["digits-masked"]


def test_the_noise_of_moments_is_in_the_unit_of_products() -> None:
    """Finding 9: products of numbers on a grid are multiples of the step squared; pages showed 256 times as much."""
    task = load(next(path for path in SHIPPED if path.stem == "gram-mnist"))
    row = find(task).mechanisms(task)["moments"]
    step = float(row.grid.step)
    assert row.law.size == pytest.approx(math.sqrt(row.variance) * step**2)
    sensitivity = float(row.sensitivity.bound) * step**2
    assert sensitivity == pytest.approx(math.sqrt(4.5), rel=0.05)
    # what the sum's noise proves, from the numbers that are shown alone: Gaussian of this sigma, a little less exact
    rho = (sensitivity / row.law.size_in_sum) ** 2 / 2
    assert Total.of([ZCDP(Fraction(rho))]).epsilon(task.privacy.delta) == pytest.approx(1.0, rel=0.1)
