"""A crowd in scikit-learn's shape, and the study under it."""

from __future__ import annotations

import copy
import math
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score

from crowdml import Crowd
from crowdml.datasets import blobs
from crowdml.errors import CrowdmlError, DataError, GuaranteeError, TaskError
from crowdml.price import Price
from crowdml.protocols import find
from crowdml.protocols.sgd import plan
from crowdml.sim.studies import message_bytes, simulate
from crowdml.sim.world import Delay
from crowdml.task import StopRule, TaskBudget

pytestmark = pytest.mark.filterwarnings("ignore::crowdml.PrivacyWarning")
DATA = blobs(rows=2000, features=8, classes=3, seed=5)


@pytest.fixture(scope="module")
def crowd() -> Crowd:
    return Crowd(epsilon=2.0, devices=50, seed=1).fit(DATA.x_train, DATA.y_train)


def test_a_private_crowd_learns_blobs(crowd: Crowd):
    assert crowd.score(DATA.x_test, DATA.y_test) > 0.75
    assert crowd.predict_proba(DATA.x_test).sum(axis=1) == pytest.approx(1.0)
    assert (crowd.predict(DATA.x_test) == crowd.classes_[crowd.decision_function(DATA.x_test).argmax(1)]).all()


def test_both_totals_are_there_and_the_samples_is_what_was_asked_for(crowd: Crowd):
    assert 1.99 < crowd.epsilon_sample_ <= 2.0
    assert crowd.epsilon_device_ > 40 * crowd.epsilon_sample_ / 2


def test_the_ledger_of_the_dearest_device_holds_the_same_totals(crowd: Crowd):
    ledger = crowd.ledger_
    found = ledger.dearest_sample(1e-6)
    assert found is not None
    assert found[1].epsilon(1e-6) == crowd.epsilon_sample_
    assert ledger.device_total().epsilon(1e-6) == crowd.epsilon_device_
    assert ledger.samples_given() == 40
    assert {charge.task for charge in ledger.charges()} == {crowd.task_.hash}


@pytest.mark.parametrize("mechanism", ["discrete-gaussian", "discrete-laplace"])
@pytest.mark.parametrize("passes", [2, 3])
def test_several_passes_share_the_samples_total_and_the_ledger_agrees(mechanism: str, passes: int):
    many = Crowd(epsilon=3.0, devices=20, batch=15, passes=passes, mechanism=mechanism, seed=2)
    many.fit(DATA.x_train, DATA.y_train)
    assert 2.99 < many.epsilon_sample_ <= 3.0
    assert many.check_ins_ == 20 * 6 * passes
    delta = many.task_.privacy.delta
    found = many.ledger_.dearest_sample(delta)
    assert found is not None
    assert found[1].epsilon(delta) == many.epsilon_sample_
    assert many.ledger_.device_total().epsilon(delta) == many.epsilon_device_


def test_a_published_task_claims_epsilon_once_and_the_estimator_says_what_it_costs():
    sound = Crowd(epsilon=2.0, devices=20, batch=20, passes=1, mechanism="discrete-laplace", seed=1)
    task = sound.fit(DATA.x_train, DATA.y_train).task_.with_(as_published=True)
    published = Crowd.from_task(task, devices=20, passes=5, seed=1).fit(DATA.x_train, DATA.y_train)
    assert published.claimed_epsilon_ == 2.0
    assert published.epsilon_sample_ == 10.0
    assert published.task_.as_published


def test_no_privacy_has_no_epsilon_and_no_ledger():
    bare = Crowd(epsilon=None, devices=20, seed=1).fit(DATA.x_train, DATA.y_train)
    assert math.isinf(bare.epsilon_sample_)
    assert bare.score(DATA.x_test, DATA.y_test) > 0.9
    with pytest.raises(GuaranteeError, match="without noise"):
        _ = bare.ledger_


def test_a_seed_repeats_a_run_and_none_is_fresh():
    small = Crowd(epsilon=2.0, devices=20, seed=3)
    one, two = (clone(small).fit(DATA.x_train, DATA.y_train).weights_ for _ in range(2))
    assert (one == two).all()
    fresh = [Crowd(epsilon=2.0, devices=20).fit(DATA.x_train, DATA.y_train) for _ in range(2)]
    assert (fresh[0].weights_ != fresh[1].weights_).any()
    again = Crowd(epsilon=2.0, devices=20, seed=fresh[0].seed_).fit(DATA.x_train, DATA.y_train)
    assert (again.weights_ == fresh[0].weights_).all()


def test_both_engines_learn_the_same_bits():
    late = {"epsilon": 2.0, "devices": 10, "batch": 20, "delay": "exponential:40", "seed": 4}
    one, two = (
        Crowd(engine=name, **late).fit(DATA.x_train[:600], DATA.y_train[:600]) for name in ("compiled", "events")
    )
    assert (one.weights_ == two.weights_).all()
    assert one.epsilon_device_ == two.epsilon_device_


def test_it_behaves_as_scikit_learn_expects(crowd: Crowd):
    assert clone(crowd).get_params() == crowd.get_params()
    assert Crowd().set_params(devices=7).devices == 7
    assert crowd.n_features_in_ == 8
    assert crowd.coef_.shape == (3, 8)
    with pytest.raises(NotFittedError):
        Crowd().predict(DATA.x_test)
    scores = cross_val_score(Crowd(epsilon=8.0, devices=40, seed=1), DATA.x_train, DATA.y_train, cv=2)
    assert scores.min() > 0.6
    for copied in (copy.deepcopy(crowd), pickle.loads(pickle.dumps(crowd))):
        assert (copied.predict(DATA.x_test) == crowd.predict(DATA.x_test)).all()
        assert copied.ledger_.device_total() == crowd.ledger_.device_total()


@pytest.mark.parametrize("model", ["logistic", "svm"])
def test_two_classes_with_names_are_learned_by_one_weight_vector(model: str):
    two = blobs(rows=2000, features=8, classes=2, seed=6)
    names = np.array(["no", "yes"])
    crowd = Crowd(epsilon=4.0, devices=40, model=model, seed=1).fit(two.x_train, names[two.y_train])
    assert crowd.coef_.shape == (1, 8)
    assert crowd.score(two.x_test, names[two.y_test]) > 0.75


def test_rows_outside_the_ball_are_brought_onto_it_so_scale_does_not_matter(crowd: Crowd):
    wide = clone(crowd).fit(DATA.x_train * 1000, DATA.y_train)
    np.testing.assert_allclose(wide.weights_, crowd.weights_, atol=0.02)


def test_the_step_by_rule_depends_on_the_task_alone_and_falls_with_the_noise(crowd: Crowd):
    calm = Crowd(epsilon=8.0, devices=50, seed=9).fit(DATA.x_train, DATA.y_train)
    again = Crowd(epsilon=2.0, devices=50, seed=9).fit(-DATA.x_train, DATA.y_train)
    assert plan(calm.task_).settings.step.c > plan(crowd.task_).settings.step.c == plan(again.task_).settings.step.c


def test_bytes_are_those_of_the_encoded_messages(crowd: Crowd):
    up, down = message_bytes(crowd.task_)
    assert (crowd.bytes_up_, crowd.bytes_down_) == (up * 50, down * 50)
    assert up > 8 * 3 * 4  # the gradient's integers alone


def test_a_plot_names_both_totals(crowd: Crowd, tmp_path: Path):
    axes = crowd.plot(tmp_path / "crowd.png")
    assert "sample ε 2" in axes.get_title()
    assert "device ε" in axes.get_title()
    assert (tmp_path / "crowd.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"devices": 0}, "devices"),
        ({"devices": 3000}, "devices = 3000, and X has 2000 rows"),
        ({"devices": 2.5}, "devices = 2.5"),
        ({"epsilon": -1.0}, "^epsilon = -1.0: a positive number"),
        ({"epsilon": 0.0}, "^epsilon = 0.0: a positive number"),
        ({"epsilon": "much"}, "^epsilon = 'much'"),
        ({"epsilon": 1e-9}, "^epsilon is so small"),
        ({"delta": 0.0}, "^delta = 0.0"),
        ({"masking": 20}, "masking = 20: say True, or a table"),
        ({"masking": {"cohrt": 20}}, "masking.cohrt = 20: no such key. Did you mean 'cohort'"),
        ({"masking": True, "devices": 2}, "Masks need at least 4 devices"),
        ({"bounds": 3}, r"bounds = 3: give \(low, high\)"),
        ({"bounds": (1, 0)}, r"low = 1 is above high = 0 in X\[:, 0\]. Swap them"),
        ({"bounds": ([0, 0], [1, 1])}, "numbers or one for each of 8 columns"),
        ({"target": (0, 1)}, "Use CrowdRegressor"),
        ({"trials": 0}, "trials = 0"),
        ({"seed": -1}, "seed = -1"),
        ({"protocol": "gossip"}, "gossip"),
        ({"protocol": "proportions"}, "readings at public places"),
        ({"protocol": "gram", "epsilon": None}, "gram always adds noise. Give an epsilon"),
        ({"protocol": "gram", "passes": 2}, "^passes = 2"),
        ({"protocol": "local_updates", "local_step": 3}, "local_step is no parameter .* Did you mean 'local_steps'"),
        ({"epsilion": 3}, "epsilion is no parameter of Crowd .* Did you mean 'epsilon'"),
        ({"model": "forest"}, "forest"),
        ({"model": "logistic"}, "2 classes"),
        ({"mechanism": "laplace"}, "^mechanism = 'laplace'"),
        ({"population": "moon"}, "moon"),
        ({"population": "by_user"}, "whose its rows are"),
        ({"passes": 0}, "passes"),
        ({"batch": 41, "devices": 50}, "nobody would check in"),
        ({"engine": "steam"}, "steam"),
        ({"delay": "soon"}, "soon"),
        ({"step": 0.0}, "^step.c = 0"),
        ({"step": "big"}, "^step = 'big': expected a table"),
        ({"update": "magic"}, "^update = 'magic'"),
        ({"batch": 2.5}, "^batch = 2.5"),
        ({"task": "digits012", "epsilon": 2.0}, "epsilon = 2.0: the task fixes it"),
        ({"task": "digits012", "batch": 3}, "batch = 3: the task fixes it"),
        ({"task": "digits012", "devices": 5}, "rows of 64 numbers, and X has 8 columns"),
        ({"task": "nothing.toml"}, "no task file nothing.toml"),
    ],
)
def test_a_wrong_parameter_is_refused_in_the_estimators_own_words(settings: dict, said: str):
    with pytest.raises(CrowdmlError, match=said) as refused:
        Crowd(**{"devices": 50, "seed": 1, **settings}).fit(DATA.x_train, DATA.y_train)
    assert isinstance(refused.value, ValueError)  # as scikit-learn's own refusals
    assert not re.search(r"Fraction|protocol\.\w|privacy\.\w", str(refused.value))


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (np.zeros(10), "y has one class, 0.0"),
        (np.arange(10) / 4, "continuous numbers, such as 0.25, .* Use CrowdRegressor"),
    ],
)
def test_labels_that_are_no_classes_are_refused(y: np.ndarray, said: str):
    with pytest.raises(DataError, match=said):
        Crowd(devices=5, seed=1).fit(np.ones((10, 2)), y)


def test_a_device_gives_no_more_samples_than_the_tasks_budget(crowd: Crowd):
    task = crowd.task_.with_(protocol={"batch": 10})
    capped = task.with_(privacy=replace(task.privacy, budget=TaskBudget(Fraction(3), 25)))
    study = simulate(capped, DATA.x_train, DATA.y_train, devices=50, seed=[1, 2])
    assert study.check_ins == 50 * 2
    with pytest.raises(TaskError, match=r"privacy\.budget\.epsilon = 3"):
        simulate(capped, DATA.x_train, DATA.y_train, devices=study.population, seed=[1], passes=3)


def test_a_stop_ends_the_run_and_the_bill(crowd: Crowd):
    task = crowd.task_.with_(protocol={"batch": 10}, stop=StopRule(steps=30))
    for engine in ("compiled", "events"):
        study = simulate(task, DATA.x_train, DATA.y_train, devices=50, seed=[1], engine=engine)
        assert study.runs[0].stopped.sentence == "30 check-ins have arrived"
        assert study.check_ins == 30
        assert study.accuracy(DATA.x_test, DATA.y_test).shape == (1, len(study.points))


def test_m2_several_passes_over_a_buffer_that_overflows_are_refused(crowd: Crowd):
    """Batches such as [0 1 2 3 4 2 3 4 5 6] would hold a sample twice, which costs more than once twice as often."""
    task = crowd.task_.with_(protocol={"batch": 10, "buffer": 15})

    def run(passes: int, **settings: Delay):
        return simulate(task, DATA.x_train, DATA.y_train, devices=75, seed=[1], passes=passes, **settings)

    with pytest.raises(TaskError, match=r"passes = 4 and protocol\.buffer = 15: .* one sample twice"):
        run(4, delay=Delay("uniform", 3000.0))
    assert run(1, delay=Delay("uniform", 3000.0)).runs[0].schedule.dropped > 0
    study = run(4)
    held = study.population.counts[study.runs[0].schedule.device][:, None]
    batches = np.sort(study.runs[0].schedule.samples % held, axis=1)
    assert (np.diff(batches, axis=1) > 0).all()
    assert study.planned.sample == Price.of(find(task), task).sample_epsilon(4)


def test_m3_a_run_that_its_own_releases_stopped_shows_the_plans_totals_and_what_was_paid_so_far(crowd: Crowd):
    task = crowd.task_.with_(protocol={"batch": 10})
    counted = {**task.privacy.epsilon, "errors": Fraction(1)}
    task = task.with_(privacy=replace(task.privacy, epsilon=counted), stop=StopRule(error=Fraction(9, 10)))

    def run(stop: StopRule):
        return simulate(task.with_(stop=stop), DATA.x_train, DATA.y_train, devices=50, seed=[1])

    early, whole = run(task.stop), run(StopRule())
    assert early.runs[0].stopped is not None
    assert early.check_ins < whole.check_ins
    assert early.planned.device == whole.planned.device == whole.paid.device
    assert early.paid.device < early.planned.device
    assert early.paid.sample == early.planned.sample  # its one check-in
    capped = run(StopRule(steps=60, error=Fraction(1, 1000)))  # public: steps bound the plan
    assert capped.planned.device == run(StopRule(steps=60)).planned.device < whole.planned.device


def test_devices_that_hold_less_than_a_batch_give_nothing():
    groups = np.repeat([0, 1, 2], [30, 30, 5])
    x, y = DATA.x_train[:65], DATA.y_train[:65]
    crowd = Crowd(epsilon=2.0, population="by_user", batch=10, passes=2, seed=1).fit(x, y, groups=groups)
    assert crowd.study_.silent == 1
    assert crowd.check_ins_ == 2 * 3 * 2
    assert crowd.epsilon_sample_ <= 2.0


def test_importing_crowdml_imports_no_jax():
    code = "import sys, crowdml; assert 'jax' not in sys.modules and 'numpy' not in sys.modules; crowdml.Crowd()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_crowd_too_small_for_its_price_warns_before_it_runs():
    with pytest.warns(UserWarning, match="small for its price: .* 20 devices .* would help: about .* such devices"):
        Crowd(epsilon=0.1, devices=20, seed=1).fit(DATA.x_train[:200], DATA.y_train[:200])


# Under masks


def test_masks_are_no_worse_than_none_on_rows_far_from_the_middle():
    """Accelerometer spectra once ended at chance under masks, where a crowd without them learned: features of one sign,
    few rounds."""
    data = blobs(rows=3000, features=40, classes=2, seed=3, normalise="none")
    x, x_test = data.x_train + 0.5, data.x_test + 0.5
    alone, masked = (
        Crowd(epsilon=10.0, devices=60, seed=1, masking=masking).fit(x, data.y_train).score(x_test, data.y_test)
        for masking in (None, {"cohort": 30, "minimum": 24, "colluders": 3})
    )
    assert masked > 0.9
    assert masked >= alone - 0.02


MASKS = {"cohort": 20, "minimum": 15, "colluders": 2}


def test_a_masked_crowd_learns_in_rounds_and_says_both_epsilons():
    x, y = load_digits(return_X_y=True)
    crowd = Crowd(masking=MASKS, epsilon=10.0, devices=100, passes=2, seed=1, update="momentum").fit(x, y)
    assert crowd.task_.privacy.mechanism == "skellam"
    assert crowd.task_.privacy.uses == 2
    assert crowd.epsilon_sample_ <= 10 < crowd.epsilon_sample_alone_ < crowd.epsilon_device_alone_
    assert crowd.epsilon_sample_ == pytest.approx(10, abs=1e-4)
    assert crowd.history_["rounds"][-1] == crowd.study_.rounds == 10
    assert crowd.check_ins_ == 200
    assert crowd.bytes_up_ == 200 * 640 * 4
    assert crowd.score(x, y) > 0.7
    assert crowd.plot().get_xlabel() == "rounds"
    assert "if everyone else colludes" in crowd.plot().get_title()


def test_the_ledger_of_a_masked_device_holds_what_was_charged_and_what_is_left_if_all_collude():
    x, y = load_digits(return_X_y=True)
    crowd = Crowd(masking=MASKS, epsilon=1.0, devices=100, passes=3, seed=1).fit(x, y)
    ledger = crowd.ledger_
    assert ledger.dearest_sample(1e-6)[1].epsilon(1e-6) == crowd.epsilon_sample_
    assert ledger.dearest_sample(1e-6, alone=True)[1].epsilon(1e-6) == crowd.epsilon_sample_alone_
    assert ledger.device_total().epsilon(1e-6) == crowd.epsilon_device_
    assert ledger.device_total(alone=True).epsilon(1e-6) == crowd.epsilon_device_alone_


def test_vanished_devices_and_abandoned_rounds_have_paid():
    x, y = load_digits(return_X_y=True)
    crowd = Crowd(masking=MASKS, epsilon=1.0, devices=100, passes=1, seed=1, dropout=0.3).fit(x, y)
    assert crowd.study_.abandoned > 0
    assert crowd.study_.rounds == 5
    assert crowd.check_ins_ == 100
    assert crowd.epsilon_sample_ == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mechanism": "discrete-laplace"}, "masking needs mechanism"),
        ({"delay": "100"}, "messages take longer than masking.lease"),
        ({"dropout": 1.0}, "dropout = 1"),
        ({"masking": {"cohort": 20, "minimum": 2}}, "masking.minimum = 2"),
        ({"masking": {**MASKS, "floor": 2.0}}, "masking.floor = 2"),
        ({"masking": None, "dropout": 0.1}, "has no masking"),
    ],
)
def test_a_masked_crowd_that_cannot_be_is_refused(changes, words):
    x, y = load_digits(return_X_y=True)
    with pytest.raises(TaskError, match=words):
        Crowd(**{"masking": MASKS, "devices": 100, "seed": 1, **changes}).fit(x, y)
