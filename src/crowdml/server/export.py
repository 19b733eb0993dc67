"""A task's model as files that others can use: safetensors, ONNX, and a card that says what was promised to whom."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from crowdml.artefacts import ENDING
from crowdml.errors import DataError
from crowdml.features.bounds import label_scale, scaling
from crowdml.models import KINDS, Cnn, Mlp, describe_model
from crowdml.price import Epsilons, Price
from crowdml.protocol import Noisy
from crowdml.protocols import find, gathering_of
from crowdml.safetensors import pack_tensors
from crowdml.second_moments import Regression
from crowdml.server.artefacts import keep_artefacts
from crowdml.server.histograms import Bar, bars_of, csv_file, is_histogram, json_file, no_onnx, tensors
from crowdml.server.histograms import snippet as histogram_snippet
from crowdml.server.onnx_graph import fitting_model, make_onnx
from crowdml.server.runner import TaskRunner
from crowdml.server.validation import Shown, Watched, watched
from crowdml.storage.server import Store
from crowdml.task import Task
from crowdml.texts import count_text, did_you_mean, markdown_text, number_text, one_line, percent_text
from crowdml.wire.keys import Key

NAMES = ("weights", "biases")
"""Names of a layer's two tensors."""
PENALTIES = ("l1", "l2")
"""Settings of a model that a protocol reads: they do not change what its weights say."""


@dataclass(frozen=True)
class Exported:
    """A model, and the numbers of its card."""

    task: Task
    weights: Any
    version: int
    check_ins: int
    devices: int
    most: int
    """Check-ins of the device that gave most."""
    paid: Epsilons
    """What the device that gave most has paid so far."""
    cohorts: int = 0
    """Cohorts that were added up; 0 where check-ins stand alone."""
    labels: Noisy | None = None
    """The crowd's noisy counts, where the outcome is a histogram."""
    artefacts: Mapping[str, bytes] = field(default_factory=dict)
    """Public files that the task names, by their SHA-256."""
    watched: Watched | None = None
    """How versions of it did on the operator's own rows; None where nobody looked."""


def export_model(store: Store, task: bytes) -> Exported:
    """The model as the journal has it; the task may be served at the same time."""
    stored = store.task(task)
    if stored is None:
        raise DataError(f"There is no task {task.hex()[:12]} in {store.name}.")
    runner = TaskRunner(store, stored.canonical, Key.generate(), lambda: "")
    tally = runner.fold.protocol.progress(runner.task, runner.fold.state) if is_histogram(runner.task) else None
    lasts = store.last_seq(task)
    most = max((last.seq for last in lasts.values()), default=0)
    return Exported(
        task=runner.task,
        weights=runner.fold.weights,
        version=runner.offer.version,
        check_ins=runner.check_ins,
        devices=len(lasts),
        most=most,
        paid=Price.of(runner.fold.protocol, runner.task).after(most),
        cohorts=runner.totals,
        labels=None if tally is None else tally.labels,
        artefacts=keep_artefacts(store, runner.task),
        watched=watched(store, runner.task),
    )


def model_file(model: Exported) -> bytes:
    """As safetensors: one tensor, `weights` (a bias is its last entry); of a network `weights.0`, `biases.0` and so on.

    The layers follow one another, so the file's numbers are in either case the weights as devices see them. Of a
    histogram its columns.
    """
    return pack_tensors(_tensors(model), _metadata(model))


def _tensors(model: Exported) -> dict[str, Any]:
    if is_histogram(model.task):
        return tensors(_bars(model))
    network = _network(model)
    if network is None:
        return {"weights": model.weights}
    layers = enumerate(network.layers(model.weights))
    return {f"{name}.{index}": tensor for index, pair in layers for name, tensor in zip(NAMES, pair, strict=True)}


def _bars(model: Exported) -> list[Bar]:
    return bars_of(model.task, model.labels, model.weights)


def table_file(model: Exported, ending: str) -> bytes:
    """A histogram as `.json` or `.csv`."""
    if not is_histogram(model.task):
        raise DataError(
            f"A {ending} holds a histogram, and task {model.task.name} learns a model: export .safetensors."
        )
    return csv_file(_bars(model)) if ending == ".csv" else json_file(_bars(model), model.labels, _metadata(model))


def _network(model: Exported) -> Cnn | Mlp | None:
    """The model of a task that trains a network."""
    if model.task.model["kind"] not in KINDS:  # the server solves for it
        return None
    made = fitting_model(model.task, model.weights)
    return made if isinstance(made, (Cnn, Mlp)) else None


def onnx_file(model: Exported) -> bytes:
    """As ONNX: from what a device senses to the answer (`crowdml.server.onnx_graph`)."""
    if is_histogram(model.task):
        raise no_onnx(model.task)
    return make_onnx(model.task, model.weights, _metadata(model))


def _metadata(model: Exported) -> dict[str, str]:
    task = model.task
    return {
        "format": "crowdml/model/1",
        "task": task.hash.hex(),
        "name": task.name,
        "model": str(task.model["kind"]),
        "classes": json.dumps(list(task.labels.classes)),
        "version": str(model.version),
        **{name: _epsilon(value) for name, value in model.paid.plain.items()},
        "delta": f"{task.privacy.delta:g}",
        **_scaled(task),
    }


def _scaled(task: Task) -> dict[str, str]:
    """How columns with bounds are brought to [-1, 1]: clip((x - middle) * factor)."""
    found = scaling(task.features)
    if found is None:
        return {}
    return {name: json.dumps(each.tolist()) for name, each in zip(("middle", "factor"), found, strict=True)}


def model_card(model: Exported, *files: str) -> str:
    """Markdown: what the model is, what was promised to whom, and how to use each of its files."""
    task = model.task
    rows = Price.of(find(task), task).rows
    observers = ", ".join(sorted({row.mechanism.observer.value for row in rows}))
    adjacencies = ", ".join(sorted({row.mechanism.sensitivity.adjacency.value for row in rows}))
    leaves = "\n".join(
        f"| {row.name} | {row.mechanism.kind} | {row.loss_text} | {row.mechanism.promise} |" for row in rows
    )
    most, delta = count_text(model.most, "check-in"), number_text(task.privacy.delta)
    cohorts = f", added up in {count_text(model.cohorts, 'cohort')}" if model.cohorts else ""
    if (gathered := gathering_of(model.task)) is not None:
        cohorts += f", gathered in rounds of {count_text(gathered.size, 'upload')}"
    use = "\n".join(f"`{file}`:\n\n```python\n{snippet(model, file)}\n```\n" for file in files)
    return f"""# {_words(task.title or task.name)}

{markdown_text(task.purpose)}

| | |
|---|---|
| task | `{task.name}`, SHA-256 `{task.hash.hex()}` |
| model | {_built(model)}, version {model.version} |
| features | {_features(task)} |
| labels | {", ".join(map(_words, task.labels.classes)) or "a number"} |
| made of | {count_text(model.check_ins, "check-in")} of {count_text(model.devices, "device")}{cohorts} |

## Privacy

| | |
|---|---|
| unit | {task.privacy.unit} |
| adjacency | {adjacencies} |
| observer | {observers} |
| a sample's ε | {_epsilon(model.paid.sample)} at δ = {delta} |
| a device's ε | {_epsilon(model.paid.device)} at δ = {delta}, paid so far ({most}) |{_alone(model)}
| accountant | losses as the noise proves them (pure, zCDP, Rényi), composed exactly, converted once at δ |

Data never seen: no sample left its device. {markdown_text(task.collects)}

What left, each with noise that its own device drew:

| what | mechanism | loss of a sample | in words |
|---|---|---|---|
{leaves}

{_outcome(model)}{_validated(model)}## Use

{use}"""


def _words(text: str) -> str:
    """A text of the task in a heading or a cell of the card."""
    return markdown_text(one_line(text))


def _features(task: Task) -> str:
    if task.features.kind == "windows":
        left = "none of them left its device" if find(task).overlaps else "one reading is in several, and paid as one"
        return f"windows of {task.features.dimension} readings; {left}"
    norm = task.features.norm
    bounds = "" if task.features.low is None else ", each clipped to public bounds and scaled to [-1, 1]"
    size = f"{norm.kind} norm at most {float(norm.bound):g}"
    if task.features.extractor is not None:
        made = f"made of pictures of {task.features.width} pixels by the public extractor"
        return f"{task.features.dimension}, {made} `{task.features.extractor.sha256[:12]}`, {size}"
    return f"{task.features.kind}, {task.features.dimension} of them{bounds}, {size}"


def _outcome(model: Exported) -> str:
    """The bars of a histogram, and what the ε above is about."""
    if not is_histogram(model.task):
        return ""
    rows = "\n".join(
        f"| {_words(bar.label)} | {bar.count:,} | {percent_text(bar.share)} | "
        f"{percent_text(bar.low)} to {percent_text(bar.high)} |"
        for bar in _bars(model)
    )
    person = int(model.task.protocol.get("person", 1))
    whose = f" One who is in at most {person} measurements pays {person} times that." if person > 1 else ""
    return f"""The guarantee protects one measurement, not a person: someone in K of them pays K times the ε.{whose}

## What came of it

Noisy counts, and shares among all measurements with what noise and chance leave open, about 95 %:

| label | count | share | between |
|---|---|---|---|
{rows}

"""


def _validated(model: Exported) -> str:
    """How it did on rows of the operator's own, and what that cost them."""
    seen = model.watched
    if seen is None or not seen.shown:
        chance = 0 if model.task.classes is None or is_histogram(model.task) else 1 / model.task.classes
        return f"Nobody tried how often this model is right. Chance is {percent_text(chance)}.\n\n" if chance else ""
    rows = "\n".join(f"| {each.version:,} | {_figure(seen, each)} |" for each in thinned(seen.shown))
    return f"""## Validation

On {seen.found.count:,} rows that whoever ran the study brought along; no device gave them. {seen.promise()}

| version | {seen.measure if seen.measure == "accuracy" else "mean distance"} |
|---|---|
{rows}

{_verdict(seen)}"""


def _verdict(seen: Watched) -> str:
    """What the last accuracy is worth, with the numbers beside which it stands."""
    if seen.verdict is None:
        return ""
    names = {"chance": "chance", "majority": "the most common class alone", "no_privacy": "a model without privacy"}
    beside = "\n".join(
        f"| {names[name]} | {percent_text(value)} |" for name, value in seen.verdict.numbers if name in names
    )
    return f"""{seen.verdict.sentence}

| beside it | accuracy |
|---|---|
{beside}

"""


def _figure(seen: Watched, each: Shown) -> str:
    figure, form = each.figure, percent_text if seen.measure == "accuracy" else "{:.4g}".format
    between = f"{form(figure.low)} to {form(figure.high)} (about 95 %)"
    return form(figure.value) + (f", between {between}" if figure.low < figure.high else "")


def thinned(rows: Sequence[Any], most: int = 12) -> list[Any]:
    """At most so many of the rows, evenly, with the first and the last: for a table that people read."""
    if len(rows) <= most:
        return list(rows)
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def _built(model: Exported) -> str:
    """Its kind, its layers where it has several, and its weights."""
    kind = str(model.task.model["kind"])
    if is_histogram(model.task):
        return f"a histogram of {len(model.task.labels.classes)} labels" + (
            "; devices learn from it and from their own readings, and keep what they learn" * (kind == "clusters")
        )
    if kind not in KINDS:
        return f"{kind}, {' x '.join(map(str, model.weights.shape))} weights"
    return describe_model(kind, fitting_model(model.task, model.weights))


def _alone(model: Exported) -> str:
    """What is left under masks if the operator and everyone else collude (review, R11)."""
    masking = model.task.masking
    if masking is None:
        return ""
    least = f"{masking.minimum:,} survivors at least, {masking.colluders:,} colluders tolerated"
    alone = f"a sample's ε {_epsilon(model.paid.sample_alone)}, a device's ε {_epsilon(model.paid.device_alone)}"
    return f"\n| cohorts | {masking.cohort:,} devices at most, {least} |\n| if everyone else colludes | {alone} |"


def snippet(model: Exported, file: str) -> str:
    """Five lines that load the file and predict: with NumPy alone, or with onnxruntime where the file is .onnx."""
    if is_histogram(model.task):
        return histogram_snippet(file)
    return _onnx_snippet(model, file) if file.endswith(".onnx") else _numpy_snippet(model, file)


def _numpy_snippet(model: Exported, file: str) -> str:
    task, regression = model.task, find(model.task).regression
    order, bound = 1 if task.features.norm.kind == "l1" else 2, float(task.features.norm.bound)
    network, size = _network(model), f"np.linalg.norm(x, {order}, 1, True) / {bound:g}"
    if regression is not None:
        return _ridge_snippet(task, regression(task), file, size)
    if isinstance(network, Mlp):
        return _mlp_snippet(task, network, file, size)
    if network is not None or task.model["kind"] not in KINDS.ours:
        return _library_snippet(task, file, size)
    names, scores = list(task.labels.classes), "x @ weights"
    if task.model.get("bias") is True:
        scores = "x @ weights[:-1] + weights[-1]"
    last = f"np.array({names})[({scores} > 0).astype(int)]" if names else _in_units(task, scores)
    if task.model["kind"] == "softmax":
        last = f"np.array({names})[({scores}).argmax(1)]"
    return "\n".join(
        (
            "import json, numpy as np",
            f'raw = open("{file}", "rb").read(); end = 8 + int.from_bytes(raw[:8], "little")',
            'weights = np.frombuffer(raw[end:], "<f4").reshape(json.loads(raw[8:end])["weights"]["shape"])',
            f"x = np.zeros((1, {task.features.width}))  # one row per sample; long rows shrink, as on a device:",
            *_scaling_lines(task),
            f"x = x / np.maximum(1, {size}); print({last})",
        )
    )


def _library_snippet(task: Task, file: str, size: str) -> str:
    """Lines for a model that this library computes, or a plug-in that is installed."""
    table = {name: each for name, each in _plain(task.model).items() if name not in ("kind", *PENALTIES)}
    settings = "".join(f", {name}={list(each) if isinstance(each, tuple) else each!r}" for name, each in table.items())
    made = f'make_model("{task.model["kind"]}", {task.features.dimension}, {task.classes}{settings})'
    said = "model.predict(weights, x)"
    last = f"np.array({list(task.labels.classes)})[{said}]" if task.classes else _in_units(task, said)
    return "\n".join(
        (
            "import json, numpy as np; from crowdml.models import make_model",
            f'raw = open("{file}", "rb").read(); end = 8 + int.from_bytes(raw[:8], "little")',
            f"x = np.zeros((1, {task.features.width}))  # one row per sample; long rows shrink, as on a device:",
            *_scaling_lines(task),
            f"x = x / np.maximum(1, {size}); model = {made}",
            f"weights = np.frombuffer(raw[end:], '<f4').reshape(model.shape); print({last})",
        )
    )


def _mlp_snippet(task: Task, model: Mlp, file: str, size: str) -> str:
    step = {
        "relu": "np.maximum(x @ w.pop(0) + w.pop(0), 0)",
        "tanh": "np.tanh(x @ w.pop(0) + w.pop(0))",
        "sigmoid": "1 / (1 + np.exp(-(x @ w.pop(0) + w.pop(0))))",
    }[model.activation]
    names = list(task.labels.classes)
    last = f"np.array({names})[(x @ w[0] + w[1]).argmax(1)]" if names else _in_units(task, "(x @ w[0] + w[1])[:, 0]")
    zeros, shrunk = f"x = np.zeros((1, {task.features.width}))", f"x = x / np.maximum(1, {size})"
    rows = [f"{zeros}; {shrunk}  # long rows are shrunk"]
    if _scaling_lines(task):
        rows = [zeros, *_scaling_lines(task), f"{shrunk}  # long rows are shrunk"]
    return "\n".join(
        (
            f'import json, numpy as np; raw = open("{file}", "rb").read(); end = 8 + int.from_bytes(raw[:8], "little")',
            'w = [np.frombuffer(raw[end:][slice(*t["data_offsets"])], "<f4").reshape(t["shape"]) '
            'for name, t in json.loads(raw[8:end]).items() if "." in name]  # weights and biases, layer by layer',
            *rows,
            f"while len(w) > 2: x = {step}",
            f"print({last})",
        )
    )


def _scaling_lines(task: Task) -> list[str]:
    """Lines of a snippet that make features of pictures, or bring columns with bounds to [-1, 1]."""
    extractor, norm = task.features.extractor, task.features.norm
    if extractor is not None:
        return [
            "from crowdml.features.extractor import picture_features  # the file lies beside the model's",
            f'x = picture_features("{extractor.sha256}{ENDING}", x, "{norm.kind}", {float(norm.bound):g})',
        ]
    if task.features.low is None:
        return []
    return [
        'public = json.loads(raw[8:end])["__metadata__"]',
        'x = np.clip((x - json.loads(public["middle"])) * json.loads(public["factor"]), -1, 1)',
    ]


def _in_units(task: Task, said: str) -> str:
    """What a model says, in the labels' own unit: an expression of a snippet."""
    middle, half = label_scale(task.labels)
    return said if task.labels.low is None else f"{middle:.9g} + {half:.9g} * ({said})"


def _ridge_snippet(task: Task, fixed: Regression[Any], file: str, size: str) -> str:
    """Five lines for weights of a regression. Features other than the sample itself come from this library."""
    table = _plain(task.protocol.get("map", {}))
    last = f"np.array({list(task.labels.classes)})[scores.argmax(1)]" if task.classes else "scores[:, 0]"
    last = last if task.classes else _in_units(task, f"{float(task.labels.bound):g} * {last}")
    plain, start = fixed.map_settings.kind == "identity", f"x = np.zeros((1, {task.features.width}), np.float32)"
    if plain:
        k = float(fixed.map_settings.constant)
        radius = min(math.sqrt(1 - k * k), float(task.features.norm.bound))
        scores = f"x / np.maximum(1, np.linalg.norm(x, 2, 1, True) / {radius:.9g})"
        scores += f" @ weights[:-1] + {k:g} * weights[-1]" if k else " @ weights"
    else:
        scores = f"make_map(MapSettings(**{table}), {task.features.dimension})(x / np.maximum(1, {size}))"
        if fixed.mechanism.takes_units:
            scores = f"np.clip({scores} * {fixed.mechanism.features} ** 0.5, 0, 1)"
        scores += " @ weights"
    return "\n".join(
        (
            "import json, numpy as np" + ("" if plain else "; from crowdml.features.maps import MapSettings, make_map"),
            f'raw = open("{file}", "rb").read(); end = 8 + int.from_bytes(raw[:8], "little")',
            'weights = np.frombuffer(raw[end:], "<f4").reshape(json.loads(raw[8:end])["weights"]["shape"])',
            f"{start}  # one row for each sample; long ones are shrunk, as on a device:",
            *_scaling_lines(task),
            f"scores = {scores}; print({last})",
        )
    )


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of the task as its lines spell it: fractions are floats."""
    return {key: float(value) if isinstance(value, Fraction) else value for key, value in table.items()}


def _onnx_snippet(model: Exported, file: str) -> str:
    task = model.task
    spectrum = task.features.kind == "accelerometer-spectrum"
    name, shape = ("acceleration", "(1, 64, 3)") if spectrum else ("x", f"(1, {task.features.dimension})")
    answer = "answer[0]" if task.classes is None else f"np.array({list(task.labels.classes)})[answer[0]]"
    return "\n".join(
        (
            "import numpy as np, onnxruntime",
            f'model = onnxruntime.InferenceSession("{file}")',
            f"x = np.zeros({shape}, np.float32)  # {'a window' if spectrum else 'a row'} a sample",
            f'answer = model.run(None, {{"{name}": x}})',
            f"print({answer})",
        )
    )


def _epsilon(value: float) -> str:
    return "none" if math.isinf(value) else number_text(value, 4)


def find_hash(store: Store, name: str) -> bytes:
    """A task of this server by its name, or by the beginning of its hash."""
    found = [
        each for each in store.tasks() if each.name == name or (len(name) >= 8 and each.hash.hex().startswith(name))
    ]
    if len(found) == 1:
        return found[0].hash
    names = ", ".join(f"{each.name} ({each.hash.hex()[:12]})" for each in store.tasks()) or "none yet"
    how = "No task here is" if not found else f"{len(found)} tasks here are"
    near = did_you_mean(name, [each.name for each in store.tasks()]) if not found else ""
    raise DataError(f"{how} called {name!r}.{near} There are: {names}. Name one, or begin its hash.")


def _file(model: Exported, ending: str) -> bytes:
    if ending == ".onnx":
        return onnx_file(model)
    return table_file(model, ending) if ending in (".json", ".csv") else model_file(model)


def write_model(model: Exported, paths: Sequence[Path], write: Any) -> Path:
    """The model, in the format that each path's ending names; beside the first its card and the task's artefacts.

    It returns the card's path.
    """
    made = [(path, _file(model, path.suffix)) for path in paths]  # all of them before any is written
    made += [(paths[0].with_name(f"{sha256}{ENDING}"), data) for sha256, data in model.artefacts.items()]
    for path, data in made:
        with write(path) as draft:
            draft.write_bytes(data)
    card = paths[0].with_suffix(".md")
    with write(card) as draft:
        draft.write_text(model_card(model, *(path.name for path in paths)), encoding="utf-8")
    return card
