"""A model as files for others: ONNX and safetensors give our own predictions, and the card's lines run."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import BALL, toml

from crowdml.errors import MissingExtra, TaskError
from crowdml.features import into_ball, prepared, spectrum
from crowdml.models import KINDS
from crowdml.price import Epsilons
from crowdml.protocols import PROTOCOLS, find, gram
from crowdml.protocols.sgd import plan
from crowdml.second_moments import predictions
from crowdml.server.export import Exported, model_card, model_file, onnx_file, snippet
from crowdml.task import Labels, Task, parse
from crowdml.turn import first_turn

onnxruntime = pytest.importorskip("onnxruntime")

TEXT = """
name = "small"
title = "A small task"
purpose = "To be exported."
collects = "Numbers."
[features]
kind = "{features}"
dimension = {dimension}
norm = {{ kind = "{norm}", bound = {bound} }}
[labels]
{labels}
[model]
{model}
[protocol]
kind = "sgd"
batch = 5
step = {{ c = 1.0 }}
clip = 3.0
[privacy]
mechanism = "{mechanism}"
epsilon = {{ gradient = 1.0 }}
delta = {delta}
"""
NAMES = {2: 'classes = ["no", "yes"]', 3: 'classes = ["a", "b\\"c", "ü"]', 0: 'kind = "number"'}
MODELS = [
    ("softmax", 3), ("softmax", 2), ("logistic", 2), ("svm", 2), ("smooth-svm", 2), ("linear", 0), ("least-squares", 0),
    ("logistic, bias", 2), ("svm, bias", 2), ("smooth-svm, bias", 2), ("softmax, bias", 3),
    ("linear, bias", 0),
    ("mlp, relu", 3), ("mlp, tanh", 2), ("mlp, sigmoid", 3), ("mlp, relu, squared", 3), ("mlp, tanh, squared", 0),
]  # fmt: skip


def table(model: str) -> str:
    """`svm, bias` or `mlp, relu, squared` as a `[model]` table says it."""
    kind, *rest = model.split(", ")
    said = [f'kind = "{kind}"', *(["hidden = [7, 5]", "seed = 4"] if kind == "mlp" else [])]
    said += [f'activation = "{each}"' for each in rest if each in ("relu", "tanh", "sigmoid")]
    return "\n".join([*said, *(f'top = "{each}"' for each in rest if each == "squared"),
                      *("bias = true" for each in rest if each == "bias")])  # fmt: skip


def make(
    model: str, classes: int, *, norm: str = "l2", bound: float = 1.0, dimension: int = 6, features: str = "vector"
) -> Task:
    laplace = norm == "l1"
    return parse(
        TEXT.format(
            model=table(model),
            labels=NAMES[classes],
            norm=norm,
            bound=bound,
            dimension=dimension,
            features=features,
            mechanism="discrete-laplace" if laplace else "discrete-gaussian",
            delta=0.0 if laplace else 1e-6,
        )
    )


def exported(task: Task, seed: int) -> Exported:
    weights = np.random.default_rng(seed).normal(size=plan(task).model.shape).astype(np.float32)
    return Exported(task, weights, version=7, check_ins=7, devices=3, most=4, paid=Epsilons(1.0, 5.5))


def answers(model: Exported, x: Any, name: str = "x") -> dict[str, Any]:
    session = onnxruntime.InferenceSession(onnx_file(model))
    names = [each.name for each in session.get_outputs()]
    return dict(zip(names, session.run(names, {name: x}), strict=True))


def by_hand(kind: str, weights: Any, x: Any) -> Any:
    """Scores from the weights as they are laid out: [n], or [n, c]."""
    if "bias" in kind:
        return x @ weights[:-1] + weights[-1]
    if not kind.startswith("mlp"):
        return x @ weights
    at, widths = 0, (6, 7, 5, (len(weights) - 6 * 7 - 7 - 7 * 5 - 5) // 6)
    for into, out in itertools.pairwise(widths):
        if at:
            act = {"relu": lambda z: np.maximum(z, 0), "tanh": np.tanh, "sigmoid": lambda z: 1 / (1 + np.exp(-z))}
            x = act[kind.split(", ")[1]](x)
        x = x @ weights[at : at + into * out].reshape(into, out) + weights[at + into * out : at + (into + 1) * out]
        at += (into + 1) * out
    return x


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize(("kind", "classes"), MODELS)
def test_onnx_predicts_as_the_model_itself_on_rows_of_any_length(kind: str, classes: int, norm: str) -> None:
    task = make(kind, classes, norm=norm, bound=2.0)
    model, rng = exported(task, 1), np.random.default_rng(2)
    x = (rng.normal(size=(500, 6)) * rng.choice([0.01, 1.0, 100.0], (500, 1))).astype(np.float32)
    found, within = answers(model, x), into_ball(x, norm, 2.0)  # pyright: ignore[reportArgumentType]
    ours = plan(task).model.predict(model.weights, within)
    if classes == 0:
        np.testing.assert_allclose(found["prediction"], ours, rtol=1e-4, atol=1e-4)
        return
    scores = by_hand(kind, model.weights, within)
    margin = np.diff(np.sort(scores, axis=1))[:, -1] if scores.ndim == 2 else np.abs(scores)
    clear = margin > 1e-4  # closer ones may fall either way when sums are taken in another order
    assert clear.sum() > 400
    np.testing.assert_array_equal(found["label"][clear], ours[clear])
    if "probabilities" in found:
        assert found["probabilities"].shape == (500, classes)
        np.testing.assert_allclose(found["probabilities"].sum(1), 1, atol=1e-5)
        np.testing.assert_array_equal(found["probabilities"][clear].argmax(1), ours[clear])
    else:
        np.testing.assert_allclose(found["scores"], scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "classes"), [("softmax, bias", 3), ("linear", 0), ("mlp, tanh", 2)])
def test_columns_with_bounds_are_scaled_in_onnx_and_in_the_lines_of_the_card(
    kind: str, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low, high = (Fraction(-3),) * 6, (*(Fraction(1), Fraction(50)) * 2, Fraction(-3), Fraction(4))
    task = make(kind, classes)
    model = exported(dataclasses.replace(task, features=dataclasses.replace(task.features, low=low, high=high)), seed=6)
    x = (30 * np.random.default_rng(7).normal(size=(40, 6))).astype(np.float32)
    expected = find(task).predict(model.task, model.weights, prepared(model.task.features, x))
    said = answers(model, x)
    np.testing.assert_allclose(said["label" if classes else "prediction"], expected, rtol=1e-4, atol=1e-4)
    assert "each clipped to public bounds and scaled to [-1, 1]" in model_card(model)
    (tmp_path / "m.safetensors").write_bytes(model_file(model))
    monkeypatch.chdir(tmp_path)
    lines = snippet(model, "m.safetensors").replace("np.zeros((1, 6))", repr(x[:1].tolist()).join(["np.array(", ")"]))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(lines, {})
    if classes:
        assert printed.getvalue().strip() == str(np.array(task.labels.classes)[expected[:1]])
    else:
        assert float(printed.getvalue().strip().strip("[]")) == pytest.approx(float(expected[0]), rel=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, -3.0, np.nan, np.inf, -np.inf]), min_size=6, max_size=6))
def test_a_row_that_is_not_finite_is_the_zero_row_in_onnx_too(row: list[float]) -> None:
    task = make("linear", 0)
    found = answers(exported(task, 3), np.asarray([row], np.float32))["prediction"]
    expected = into_ball(np.asarray([row]), "l2", 1.0) @ exported(task, 3).weights
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_onnx_takes_acceleration_where_the_task_does() -> None:
    task = make("softmax", 3, dimension=64, features="accelerometer-spectrum")
    model, rng = exported(task, 4), np.random.default_rng(5)
    windows = rng.normal(size=(200, 64, 3)).astype(np.float32)
    found = answers(model, windows, "acceleration")
    within = into_ball(spectrum(windows), "l2", 1.0)
    expected = np.exp(within @ model.weights)
    np.testing.assert_allclose(found["probabilities"], expected / expected.sum(1, keepdims=True), atol=1e-4)


def test_the_metadata_says_whose_model_it_is_and_what_it_cost() -> None:
    model = exported(make("softmax", 3), 6)
    data = onnxruntime.InferenceSession(onnx_file(model)).get_modelmeta().custom_metadata_map
    raw = model_file(model)
    same = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    for each in (data, same):
        assert each["task"] == model.task.hash.hex()
        assert json.loads(each["classes"]) == ["a", 'b"c', "ü"]
        assert (each["version"], each["epsilon_sample"], each["epsilon_device"]) == ("7", "1", "5.5")


@pytest.mark.parametrize(("kind", "classes"), MODELS)
def test_both_snippets_of_the_card_have_five_lines_that_run_and_agree(
    kind: str, classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = exported(make(kind, classes), 8)
    (tmp_path / "m.safetensors").write_bytes(model_file(model))
    (tmp_path / "m.onnx").write_bytes(onnx_file(model))
    card = model_card(model, "m.safetensors", "m.onnx")
    for word in ("unit | sample", "replace-sample", "anyone", "a sample's ε | 1 ", "a device's ε | 5.5", "accountant",
                 "3 devices", "never seen"):  # fmt: skip
        assert word in card
    codes = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert [len(code.strip().splitlines()) for code in codes] == [5, 5]
    monkeypatch.chdir(tmp_path)
    row = np.random.default_rng(9).normal(size=(4, 6)).astype(np.float32)
    said = []
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(re.sub(r"np\.zeros\(\(1, 6\)[^)]*\)", "row", code), {"row": row})
        said.append(printed.getvalue().strip())
    if classes == 0:
        numbers = [np.fromstring(text.strip("[]"), sep=" ") for text in said]
        np.testing.assert_allclose(*numbers, rtol=1e-4)
    else:
        assert said[0] == said[1]


def test_a_convolutional_network_is_written_layer_by_layer_and_all_its_files_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make("softmax", 3, dimension=49)
    model = exported(task.with_(model={"kind": "cnn", "filters": (2, 3), "size": 3, "hidden": (4,)}), 8)
    raw = model_file(model)
    end = 8 + int.from_bytes(raw[:8], "little")
    shapes = {name: each["shape"] for name, each in json.loads(raw[8:end]).items() if name != "__metadata__"}
    assert shapes == {"weights.0": [3, 3, 1, 2], "biases.0": [2], "weights.1": [3, 3, 2, 3], "biases.1": [3],
                      "weights.2": [3, 4], "biases.2": [4], "weights.3": [4, 3], "biases.3": [3]}  # fmt: skip
    np.testing.assert_array_equal(np.frombuffer(raw[end:], "<f4"), model.weights)
    (tmp_path / "m.safetensors").write_bytes(raw)
    card = model_card(model, "m.safetensors")
    assert "| model | cnn 2-3-4-3, filters of 3 by 3, 108 weights, version 7 |" in card
    x = (np.random.default_rng(2).normal(size=(60, 49)) * 3).astype(np.float32)
    found, within = answers(model, x), into_ball(x, "l2", 1.0)
    ours = plan(model.task).model
    scores = np.asarray(ours.scores(model.weights, within))  # pyright: ignore[reportAttributeAccessIssue]
    odds = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(found["probabilities"], odds / odds.sum(1, keepdims=True), rtol=1e-3, atol=1e-4)
    assert len({*found["label"].tolist()}) > 1
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(re.sub(r"np\.zeros\(\(1, 49\)[^)]*\)", "row", code), {"row": x})
    names = np.array(task.labels.classes)[found["label"]]
    assert printed.getvalue() == f"{names}\n"


def test_a_perceptron_is_written_layer_by_layer_and_the_card_says_how_it_is_built() -> None:
    model = exported(make("mlp, relu", 3), 8)
    raw = model_file(model)
    end = 8 + int.from_bytes(raw[:8], "little")
    head = json.loads(raw[8:end])
    shapes = {name: each["shape"] for name, each in head.items() if name != "__metadata__"}
    assert shapes == {"weights.0": [6, 7], "biases.0": [7], "weights.1": [7, 5], "biases.1": [5],
                      "weights.2": [5, 3], "biases.2": [3]}  # fmt: skip
    np.testing.assert_array_equal(np.frombuffer(raw[end:], "<f4"), model.weights)
    assert "| model | mlp 6-7-5-3, relu, softmax, 107 weights, version 7 |" in model_card(model, "m.onnx")
    assert "| model | svm with a bias, 7 weights, version 7 |" in model_card(
        exported(make("svm, bias", 2), 8), "m.onnx"
    )


@pytest.mark.parametrize(("kind", "classes"), [("mlp, relu", 3), ("svm, bias", 2), ("softmax", 3)])
def test_weights_that_do_not_fit_the_features_are_refused_with_both_shapes(kind: str, classes: int) -> None:
    model = exported(make(kind, classes, dimension=9), 1)
    other = dataclasses.replace(model, task=make(kind, classes))
    with pytest.raises(TaskError, match=r"with 6 features it has .* weights, and these are .* another task"):
        onnx_file(other)
    with pytest.raises(TaskError, match="with 6 features it has"):
        model_file(other)


def test_a_missing_onnx_is_one_sentence_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra, match=r"crowdml\[server\].*\.safetensors"):
        onnx_file(exported(make("softmax", 3), 1))


HOSTILE = [
    "<script>alert(1)</script>",
    "[a](javascript:x) ![b](http://c/d)",
    "# big",
    "- item",
    "1. item",
    "a | b",
    "*a* _b_ `c` ~~d~~ \\<e> &lt;",
    "```",
    "=====",
    "> quote",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_card_shows_the_texts_of_a_task_word_for_word(text: str) -> None:
    """Review 2, network finding L12: `<script>` in a title or a class stood in the card as it was."""
    from markdown_it import MarkdownIt

    model = exported(make("softmax", 2), 4)
    labels = dataclasses.replace(model.task.labels, classes=(text, "other"))
    task = model.task.with_(title=text, purpose=f"{text}\n{text}", collects=f"Numbers.\n{text}", labels=labels)
    shown = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).render(
        model_card(dataclasses.replace(model, task=task), "m.safetensors")
    )  # fmt: skip
    plain = html.escape(" ".join(text.split()), quote=False)
    loose = shown.replace("&quot;", '"')
    assert f"<h1>{plain}</h1>" in loose
    assert loose.count(f"<p>{plain}</p>") == 3
    assert f"<td>{plain}, other</td>" in loose
    assert not re.search(r"<(script|a|img|em|strong|s|ul|ol|blockquote)\b", shown)


GRAM = """
name = "moments"
[features]
dimension = 6
norm = {{ kind = "l2", bound = {bound} }}
[labels]
{labels}
[model]
kind = "ridge"
[protocol]
kind = "gram"
batch = 5
{map}
[privacy]
mechanism = "skellam"
epsilon = {{ moments = 1.0 }}
delta = 1e-6
[masking]
cohort = 10
minimum = 8
"""


@pytest.mark.parametrize("high", [None, 50])
@pytest.mark.parametrize("bound", [0.5, 1.0])
@pytest.mark.parametrize("constant", [0.0, 0.1])
@pytest.mark.parametrize("classes", [0, 3])
def test_a_model_of_gram_predicts_the_same_by_onnx_by_its_snippet_and_by_itself(
    classes: int, constant: float, bound: float, high: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = NAMES[classes] + ("\nbound = 40.0" if not classes else "")
    task = parse(GRAM.format(labels=labels, bound=bound, map=f'map = {{ kind = "identity", constant = {constant} }}'))
    if high is not None:  # columns with public bounds
        features = dataclasses.replace(task.features, low=Fraction(-9), high=Fraction(high))
        task = dataclasses.replace(task, features=features)
    rng = np.random.default_rng(3)
    weights = rng.normal(size=(6 + bool(constant), classes or 1)).astype(np.float32)
    model = Exported(task, weights, 1, 8, 8, 1, paid=Epsilons(1.0, 5.5), cohorts=1)
    x = (rng.normal(size=(200, 6)) * rng.choice([0.01, 1.0, 100.0], (200, 1))).astype(np.float32)
    ours = predictions(gram.plan(task), weights, prepared(task.features, x))
    found = answers(model, x)
    (tmp_path / "m.safetensors").write_bytes(model_file(model))
    (code,) = re.findall(r"```python\n(.*?)```", model_card(model, "m.safetensors"), re.DOTALL)
    assert len(code.strip().splitlines()) == (5 if high is None else 7)
    assert "crowdml" not in code
    monkeypatch.chdir(tmp_path)
    said: dict[str, Any] = {"row": x, "print": lambda value: said.update(value=value)}
    exec(re.sub(r"np\.zeros\(\(1, 6\)[^)]*\)", "row", code), said)
    if not classes:
        np.testing.assert_allclose(found["prediction"], ours, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(said["value"], ours, rtol=1e-3, atol=1e-4)
    else:
        np.testing.assert_array_equal(found["label"], ours)
        np.testing.assert_array_equal(said["value"], np.array(task.labels.classes)[ours])


@pytest.mark.parametrize("kind", ["linear", "mlp, tanh", "gram"])
def test_a_number_with_bounds_is_predicted_in_its_own_unit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = parse(GRAM.format(labels=NAMES[0], bound=1.0, map="")) if kind == "gram" else make(kind, 0)
    rng = np.random.default_rng(7)
    shape = (7, 1) if kind == "gram" else plan(plain).model.shape
    x, weights = rng.normal(size=(1, 6)).astype(np.float32), rng.normal(size=shape).astype(np.float32)
    inside = prepared(plain.features, x)
    expected = 200 + 20 * float(np.ravel(find(plain).predict(plain, weights, inside))[0])
    task = plain.with_(labels=Labels(kind="number", low=Fraction(180), high=Fraction(220)))
    model = Exported(task, weights, 1, 8, 8, 1, paid=Epsilons(1.0, 5.5), cohorts=1)
    assert float(np.ravel(answers(model, x)["prediction"])[0]) == pytest.approx(expected, rel=1e-5)
    (tmp_path / "m.safetensors").write_bytes(model_file(model))
    monkeypatch.chdir(tmp_path)
    said: dict[str, Any] = {"row": x, "print": lambda value: said.update(value=value)}
    exec(re.sub(r"np\.zeros\(\(1, 6\)[^)]*\)", "row", snippet(model, "m.safetensors")), said)
    assert float(np.ravel(said["value"])[0]) == pytest.approx(expected, rel=1e-5)


MODEL = {
    "softmax": ({"kind": "softmax"}, 3), "softmax, bias": ({"kind": "softmax", "bias": True}, 2),
    "logistic": ({"kind": "logistic"}, 2), "svm": ({"kind": "svm", "bias": True}, 2),
    "smooth-svm": ({"kind": "smooth-svm"}, 2), "linear": ({"kind": "linear"}, 0),
    "least-squares": ({"kind": "least-squares"}, 0), "mlp": ({"kind": "mlp", "hidden": [5, 4]}, 3),
    "mlp, numbers": ({"kind": "mlp", "hidden": [5], "top": "squared"}, 0),
    "cnn": ({"kind": "cnn", "filters": [2], "size": 3, "hidden": [4]}, 3),
    "ridge": ({"kind": "ridge"}, 3), "ridge, two": ({"kind": "ridge"}, 2), "ridge, numbers": ({"kind": "ridge"}, 0),
}  # fmt: skip
STEP = {"step": {"c": 1.0}}
SMOOTH = ("softmax", "logistic", "smooth-svm", "linear")
"""The models that `admm` learns: they are convex and smooth, and the slope of their loss has a bound."""
TRAINED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "sgd": ({"batch": 5, **STEP, "clip": 3.0}, {"mechanism": "discrete-gaussian", "epsilon": {"gradient": 1.0}}, None),
    "local_updates": (
        {"batch": 5, "rate": {"c": 1.0}, "clip": 1.0, "update_clip": 1.0},
        {"mechanism": "discrete-gaussian", "epsilon": {"update": 1.0}},
        None,
    ),
    "admm": (
        {"batch": 5, "rho": 1.0},
        {"mechanism": "skellam", "epsilon": {"update": 1.0}},
        {"cohort": 10, "minimum": 8},
    ),
}
MAPS: dict[str, dict[str, Any]] = {
    "identity": {}, "cosine": {"map": {"kind": "cosine", "seed": 3, "features": 9, "width": 0.5}},
    "convolution": {"map": {"kind": "convolution", "seed": 1, "filters": 2, "size": 3, "pool": 2}},
    "layers": {"map": {"kind": "layers", "seed": 1, "features": 8, "constant": 0.0}},
}  # fmt: skip
TOP = {"combine": {"rule": "top", "uploads": 4, "rows": 10, "keep": 2}}
SOLVED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "gram": ({}, {"mechanism": "skellam"}, {"cohort": 10, "minimum": 8}),
    "secprobe": (TOP, {"mechanism": "skellam"}, None),
    "secprobe, perturbed": (TOP, {"mechanism": "discrete-laplace"}, None),
}


def every_export() -> Iterator[Any]:
    """Each protocol with each model that it learns: the tables of its task, and how many classes there are."""
    for name, (protocol, privacy, masking) in TRAINED.items():
        for kind, (model, classes) in MODEL.items():
            if "ridge" not in kind and (name != "admm" or model["kind"] in SMOOTH):
                yield pytest.param({"kind": name, **protocol}, model, classes, privacy, masking, id=f"{name}-{kind}")
    for name, (protocol, privacy, masking) in SOLVED.items():
        for kind, (model, classes) in MODEL.items():
            for each in ("layers",) if "perturbed" in name else MAPS:
                if "ridge" in kind:
                    table = {"kind": name.split(",")[0], "batch": 5, **protocol, **MAPS[each]}
                    asks = {**privacy, "epsilon": {"moments": 1.0}}
                    yield pytest.param(table, model, classes, asks, masking, id=f"{name}-{kind}-{each}")


EXPORTS = list(every_export())


def test_every_protocol_and_every_model_of_ours_is_among_those_whose_lines_are_run() -> None:
    """A histogram has lines of its own (test_histograms.py)."""
    learned = {(each.values[0]["kind"], each.values[1]["kind"]) for each in EXPORTS}  # type: ignore[index]
    assert {kind for kind, _ in learned} == set(PROTOCOLS.ours) - {"proportions"}
    assert {kind for _, kind in learned} == {*KINDS.ours, "ridge"}


@pytest.mark.parametrize(("protocol", "model", "classes", "privacy", "masking"), EXPORTS)
def test_the_lines_of_the_card_say_what_the_protocol_predicts(
    protocol: dict[str, Any], model: dict[str, Any], classes: int, privacy: dict[str, Any],
    masking: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    labels = {"classes": ["a", 'b"c', "ü"][:classes]} if classes else {"kind": "number", "low": -5, "high": 15}
    delta = 0.0 if privacy["mechanism"] == "discrete-laplace" else 1e-6
    tables = {"features": {"dimension": 81, "norm": BALL}, "labels": labels, "model": model, "protocol": protocol}
    privacy = {**privacy, "delta": delta}
    tables |= {} if masking is None else {"masking": masking}
    task = parse(toml({"name": "each", **tables, "privacy": privacy}))
    found = find(task)
    rng = np.random.default_rng(5)
    weights = rng.normal(size=found.model(task, first_turn(found, task).state).shape).astype(np.float32)
    exported = Exported(task, weights, 1, 8, 8, 1, paid=Epsilons(1.0, 5.5))
    x = (rng.normal(size=(60, 81)) * rng.choice([0.01, 1.0, 100.0], (60, 1))).astype(np.float32)
    inside = prepared(task.features, x)
    expected = np.asarray(found.predict(task, weights, inside))
    (tmp_path / "m.safetensors").write_bytes(model_file(exported))
    monkeypatch.chdir(tmp_path)
    said: dict[str, Any] = {"row": x, "print": lambda value: said.update(value=value)}
    exec(re.sub(r"np\.zeros\(\(1, 81\)[^)]*\)", "row", snippet(exported, "m.safetensors")), said)
    if not classes:
        np.testing.assert_allclose(np.ravel(said["value"]), 5 + 10 * np.ravel(expected), rtol=1e-3, atol=1e-3)
        return
    scores = np.asarray(found.scores(task, weights, inside))
    margin = np.diff(np.sort(scores, axis=1))[:, -1] if scores.ndim == 2 else np.abs(scores)
    clear = margin > 1e-4  # closer ones may fall either way when sums are taken in another order
    assert clear.sum() > 50
    np.testing.assert_array_equal(said["value"][clear], np.array(task.labels.classes)[expected[clear]])


def test_features_that_onnx_cannot_compute_are_refused_with_a_way_out() -> None:
    task = parse(GRAM.format(labels=NAMES[3], bound=1.0, map='map = { kind = "cosine", seed = 1, features = 8 }'))
    model = Exported(task, np.zeros((9, 3), np.float32), 1, 8, 8, 1, paid=Epsilons(1.0, 5.5))
    with pytest.raises(TaskError, match=r"Export the model as \.safetensors"):
        onnx_file(model)
    assert "make_map" in model_card(model, "m.safetensors")
