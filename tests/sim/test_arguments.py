"""`Crowd`, `simulate` and `compare` refuse the same arguments in one sentence, and tell what bounds do to data."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest

from crowdml import Crowd, CrowdRegressor, PrivacyWarning, compare, simulate
from crowdml.errors import CrowdmlError, FitError
from crowdml.protocols import PROTOCOLS
from crowdml.sim.arguments import erased_columns, of_one_kind, read_rows, unusable_cell
from crowdml.suggest import Shape, choices, suggest
from crowdml.task import Bound, Features

X = np.random.default_rng(1).uniform(0, 1, (60, 3))
Y = np.arange(60) % 2
TEXTS = np.array(["a", "b"])[Y]
SMALL: Any = {"bounds": (0, 1), "seed": 1}
QUICK: Any = {**SMALL, "devices": 6, "protocols": ["sgd"], "masked": False, "trials": 1}
TASK = suggest(Shape(3, 2, 6, 10), epsilon=1.0, low=0.0, high=1.0)


def swapped(values: np.ndarray, place: Any, other: Any) -> np.ndarray:
    """A copy with another value in one place."""
    found = values.astype(object if not isinstance(other, float) else float)
    found[place] = other
    return found


def fit(x: Any = X, y: Any = Y, **given: Any) -> Any:
    return Crowd(**{**SMALL, **given.pop("parameters", {})}).fit(x, y, **given)


def run(x: Any = X, y: Any = Y, **given: Any) -> Any:
    return simulate(given.pop("task", TASK), x, y, **{"seed": 1, **given})


def compared(x: Any = X, y: Any = Y, **given: Any) -> Any:
    return compare(x, y, **{**QUICK, **given})


# --- rows and labels ---


@pytest.mark.parametrize("door", [fit, run, compared])
@pytest.mark.parametrize(
    ("x", "y", "said"),
    [
        (swapped(X, (2, 1), np.nan), Y, r"X\[2, 1\] is missing \(NaN\), and 1 of 60 rows .* Put finite numbers there"),
        (swapped(X, (2, 1), np.inf), Y, r"X\[2, 1\] is infinite"),
        (swapped(X, (2, 1), 1e31), Y, r"X\[2, 1\] is 1e\+31, larger in size than 1e\+30"),
        (swapped(X, (2, 1), "tall"), Y, r"X\[2, 1\] is a text"),
        (X, swapped(Y, 3, None), r"y\[3\] is missing \(in 1 of 60 rows\). Fill it in, or leave these rows out"),
        (X, swapped(TEXTS, 3, None), r"y\[3\] is missing"),
        (X, swapped(Y, 3, np.nan), r"y\[3\] is missing"),
        (X, swapped(TEXTS, 3, 7), "y holds 'a' and 7: give texts alone, or numbers alone"),
    ],
)
def test_all_three_refuse_the_same_rows_and_labels(door: Any, x: Any, y: Any, said: str):
    with pytest.raises(CrowdmlError, match=said):
        door(x, y)


@pytest.mark.parametrize("door", [fit, compared])
def test_objects_are_the_numbers_or_the_texts_that_they_hold(door: Any):
    door(X, Y.astype(object))
    door(X, TEXTS.astype(object))


def test_a_data_frame_has_names_for_its_columns():
    found = unusable_cell(swapped(X, (2, 1), np.nan), columns=["age", "height", "weight"])
    assert found is not None
    assert found.startswith("X[2, 1] (column 'height') is missing")


@pytest.mark.parametrize("x", [np.zeros((3, 2), bool), np.zeros((3, 2), np.uint64), np.zeros((3, 2), np.float16)])
def test_any_type_of_number_is_a_number(x: np.ndarray):
    assert (read_rows(x) == x).all()


def test_what_a_data_frame_has_in_place_of_a_value_is_missing():
    class Unknown:
        def __ne__(self, other: object) -> Any:
            return self

        def __bool__(self) -> bool:
            raise TypeError

    with pytest.raises(CrowdmlError, match=r"y\[1\] is missing \(in 1 of 2 rows\)"):
        of_one_kind(np.array([1, Unknown()], object))


PAIRS = [
    (X, r"is an array of shape \(60, 3\): give \(X, y\), rows and their labels"),
    ((X,), "is a tuple of 1: give"),
    ((X, Y, Y), "is a tuple of 3: give"),
    (3 + 4j, "is .*: give"),
    ((swapped(X, (2, 1), np.nan), Y), r"\[0\]\[2, 1\] is missing"),
    ((X, Y[:4]), r"\[1\] has shape \(4,\), and there are 60 rows: give one label for each row"),
    ((X, swapped(Y, 3, None)), r"\[1\]\[3\] is missing"),
    ((X[:, :2], Y), r"\[0\] has 2 columns"),
]


@pytest.mark.parametrize(("door", "name"), [(fit, "evaluate"), (run, "test"), (run, "own"), (compared, "test")])
@pytest.mark.parametrize(("given", "said"), PAIRS)
def test_rows_to_evaluate_on_are_a_pair(door: Any, name: str, given: Any, said: str):
    with pytest.raises(CrowdmlError, match=rf"\b{name}.*{said}"):
        door(**{name: given})


@pytest.mark.parametrize("labels", [["q"] * 60, TEXTS, Y + 7])
@pytest.mark.parametrize(("door", "name"), [(fit, "evaluate"), (compared, "test")])
def test_labels_to_evaluate_on_are_of_the_same_kind(door: Any, name: str, labels: Any):
    with pytest.raises(CrowdmlError, match=rf"{name}\[1\] holds no label that y holds, but .+, and y holds"):
        door(**{name: (X, labels)})


def test_a_rare_label_to_evaluate_on_counts_as_wrong():
    assert fit(evaluate=(X, np.where(np.arange(60) < 10, 5, Y))).scores_[0] <= 50 / 60


def test_numbers_to_evaluate_on_are_numbers():
    with pytest.raises(FitError, match=r"evaluate\[1\] holds 'a', and labels are numbers here"):
        CrowdRegressor(**SMALL, target=(0, 1)).fit(X, X[:, 0], evaluate=(X, TEXTS))


def test_rows_of_another_width_than_the_tasks_are_refused_by_an_estimator_too():
    with pytest.raises(FitError, match="takes rows of 3 numbers, and X has 2 columns"):
        Crowd.from_task(TASK.with_(features=Features(3, Bound("l2"), low=(0, 0, 0), high=(1, 1, 1))), seed=1).fit(
            X[:, :2], Y
        )


# --- settings ---


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"y": TEXTS, "target": (0, 1)}, r"target = \(0, 1\), and y holds 'a': .* Leave target out"),
        ({"target": 3}, r"target = 3: give \(low, high\), two numbers"),
        ({"target": (1, 0)}, "target = .*: low must be below high"),
        ({"seed": "a"}, "seed = 'a': a whole number from 0 on, or None"),
        ({"seed": -1}, "seed = -1"),
        ({"trials": 1.5}, "trials = 1.5: a whole number from 1 on"),
        ({"epsilon": []}, "epsilon is empty: give a number above 0, such as 1, or several"),
        ({"epsilon": "much"}, "epsilon = 'much': a number above 0"),
        ({"delta": "a"}, "delta = 'a': a number above 0"),
        ({"devices": []}, "devices is empty"),
        ({"devices": 2.5}, "devices = 2.5: a whole number"),
        ({"protocols": []}, "protocols is empty: give a name, or several"),
        ({"protocols": "gramm"}, "protocol = 'gramm': choose one of .* Did you mean 'gram'"),
        ({"protocols": "gram"}, "needs masks: .* Compare under masks, too, or name other protocols"),
        ({"masked": "yes"}, "masked = 'yes': True for masks alone, False for none, or None for both"),
        ({"bounds": 3}, r"bounds = 3: give \(low, high\)"),
        ({"bounds": (0,)}, r"bounds = \(0,\): give"),
        ({"bounds": ("a", 1)}, "bounds = .*: give"),
        ({"bounds": (0, np.nan)}, "bounds = .*: give"),
        ({"bounds": ([0, 0], 1)}, "one for each of 3 columns"),
        ({"bounds": (0, [1, 1, -1])}, r"low = 0 is above high = -1 in X\[:, 2\]. Swap them"),
        ({"test": "a"}, r"test is 'a': give \(X, y\), rows and their labels; or a share of X, such as 0.2"),
    ],
)
def test_a_wrong_argument_of_compare_is_named(given: dict[str, Any], said: str):
    with pytest.raises(CrowdmlError, match=said):
        compared(**given)


def test_one_protocol_needs_no_list():
    assert [row.protocol for row in compared(protocols="sgd", seed=np.int64(1)).rows] == ["sgd"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"seed": "a"}, "seed = 'a': a whole number from 0 on"),
        ({"seed": []}, "seed is empty"),
        ({"seed": [1, -1]}, "seed = -1"),
        ({"passes": 0}, "passes = 0: a whole number from 1 on"),
        ({"trials": "a"}, "trials = 'a'"),
    ],
)
def test_a_wrong_argument_of_simulate_is_named(given: dict[str, Any], said: str):
    with pytest.raises(CrowdmlError, match=said):
        run(**given)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"protocol": "gram", "masking": False}, "masking = False: gram needs masks: .* Leave masking out"),
        ({"protocol": "gram", "epsilon": None}, "^epsilon = None: gram always adds noise. Give an epsilon"),
        ({"mechanism": "foo"}, "^mechanism = 'foo': choose one of discrete-gaussian, discrete-laplace, skellam"),
        ({"mechanism": "discrete-gausian"}, "Did you mean 'discrete-gaussian'"),
        ({"mechanism": "foo", "protocol": "gram"}, "^mechanism = 'foo': choose one of"),
        ({"mechanism": "none"}, "^mechanism = 'none': say epsilon=None"),
        ({"mechanism": "discrete-laplace", "protocol": "gram"}, "gram needs masks: .*. Leave mechanism out.$"),
        ({"mechanism": "discrete-gaussian", "masking": True}, "Leave mechanism out, or learn without masks"),
        ({"protocol": "gram", "model": {"kind": "softmax", "l3": 1}}, r"^model\['kind'\] = 'softmax': gram solves for"),
        ({"protocol": "gram", "model": {"kind": "ridge", "c3": 1}}, r"^model\['c3'\]: the ridge model has c"),
        ({"protocol": "gram", "model": "softmax"}, "^model = 'softmax': gram solves for"),
        ({"bounds": (0, [1, 1, -1])}, r"low = 0 is above high = -1 in X\[:, 2\]. Swap them"),
    ],
)
def test_a_parameter_that_would_be_ignored_is_refused(parameters: dict[str, Any], said: str):
    with pytest.raises(FitError, match=said):
        fit(parameters={"devices": 12, **parameters})


@pytest.mark.parametrize("parameters", [{"devices": 3}, {"population": "by_class"}])
def test_groups_and_another_way_to_deal_rows_out_are_one_too_many(parameters: dict[str, Any]):
    with pytest.raises(FitError, match=r"= .*, and groups say whose each row is: leave out one of the two"):
        fit(parameters=parameters, groups=Y)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: fit(parameters={"protocol": "secprobe"}),
        lambda: fit(parameters={"protocol": "secprobe", "masking": True, "devices": 12}),
        *(lambda masked=masked: compared(protocols=["secprobe"], masked=masked) for masked in (True, False, None)),
    ],
)
def test_secprobe_says_what_it_needs_and_where(ask: Any):
    with pytest.raises(
        CrowdmlError, match=r"needs a task file that chooses a rule, .*combine.*Crowd.from_task"
    ) as refused:
        ask()
    assert len(re.findall("chooses a rule", str(refused.value))) == 1


@pytest.mark.parametrize("classes", [2, None])
def test_what_never_fits_a_table_is_not_offered(classes: int | None):
    assert (
        choices(classes)
        == ["admm", "gram", "local_updates", "sgd"]
        == sorted(set(PROTOCOLS.ours) - {"proportions", "secprobe"})
    )
    kind: Any = CrowdRegressor if classes is None else Crowd
    with pytest.raises(FitError, match=r"choose one of admm, gram, local_updates, sgd\.$"):
        kind(protocol="gossip", **SMALL).fit(X, Y)


# --- what bounds do ---


def told(ask: Any) -> list[str]:
    """The warnings of a call, but those about its price and about what no epsilon covers."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ask()
    texts = [str(each.message) for each in found if not issubclass(each.category, PrivacyWarning)]
    return [text for text in texts if "small for its price" not in text]


WIDE = np.column_stack([X[:, 0], 3 * X[:, 1], X[:, 2]])
FLAT = np.column_stack([X[:, 0], np.full(60, 0.5), X[:, 2]])


def outside_of(x: np.ndarray) -> str:
    most = (x > 1).sum()
    return (
        f"{most} of {x.size} numbers lie outside their bounds and are clipped, most often in X[:, 1] ({most} of "
        f"{len(x)} rows). If such numbers are right, widen {{}} there."
    )


def test_numbers_outside_bounds_are_told_with_column_and_remedy():
    assert told(lambda: fit(WIDE)) == [outside_of(WIDE).format("bounds")]
    assert told(lambda: compared(WIDE, test=(X, Y))) == [outside_of(WIDE).format("bounds")]
    assert told(lambda: Crowd.from_task(TASK, seed=1).fit(WIDE, Y)) == [
        outside_of(WIDE).format("features.low and features.high of the task")
    ]
    assert told(fit) == told(compared) == []


def test_labels_outside_target_are_told():
    y = X[:, 0]
    text = (
        f"{(y > 0.1).sum()} of 60 labels lie outside target = (0, 0.1) and are clipped to it. If such labels are right"
    )
    (of_crowd,) = told(lambda: CrowdRegressor(**SMALL, target=(0, 0.1)).fit(X, y))
    (of_compare,) = told(lambda: compared(X, y, target=(0, 0.1), test=(X, y)))
    assert of_crowd == of_compare == f"{text}, widen target."
    assert told(lambda: CrowdRegressor(**SMALL, target=(0, 1)).fit(X, y)) == []


def test_a_column_that_bounds_erase_is_told():
    for text in (
        *told(lambda: fit(FLAT, parameters={"bounds": None})),
        *told(lambda: compared(FLAT, bounds=None, test=(X, Y))),
    ):
        assert text == (
            "X[:, 1] has one value in all 60 rows, so it tells nothing and becomes 0. Leave it out, or give bounds "
            "that are wider."
        )
    assert told(lambda: fit(FLAT)) == []  # within wider bounds it stays as it is
    erased = "X[:, 0], X[:, 1] and X[:, 2] have bounds whose low equals the high, so they become 0 in all rows. "
    for ask in (lambda: fit(parameters={"bounds": (3, 3)}), lambda: compared(bounds=(3, 3))):
        assert told(ask) == [f"{erased}Give a low below the high, or leave them out."]


def test_columns_of_a_data_frame_are_called_by_their_names():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(WIDE, columns=["age", "height", "weight"])
    for (text,) in (told(lambda: fit(frame)), told(lambda: compared(frame, test=(frame, Y)))):
        assert "most often in column 'height'" in text
    with pytest.raises(CrowdmlError, match=r"X\[3, 0\] \(column 'age'\) is missing \(NaN\)"):
        run(frame.assign(age=np.where(np.arange(60) == 3, np.nan, frame["age"])))


def test_many_columns_are_named_by_the_first_five():
    features = Features(20, Bound("l2"), low=(0,) * 20, high=(0,) * 20)
    said = erased_columns(features, np.zeros((2, 20)), [f"pixel{place}" for place in range(20)], taken=True)
    assert said is not None
    assert said.startswith(
        "column 'pixel0', column 'pixel1', column 'pixel2', column 'pixel3', column 'pixel4' and 15 more"
    )
