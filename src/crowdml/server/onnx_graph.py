"""A task's model as ONNX: what a device computes before learning, the scores, and the answer, in one graph.

Inputs: `x` [n, d] float32, one row for each sample; for `accelerometer-spectrum` instead `acceleration` [n, 64, 3],
windows of 3.2 s at 20 Hz. Columns with bounds are held within them and scaled to [-1, 1], rows outside the ball of the
task's features are shrunk onto it, and a row with an entry that is not finite becomes the zero row, as on a device.

Outputs: softmax, logistic and mlp: `label` [n] int64, an index into the names in the metadata, and `probabilities`
[n, c]; an mlp with squared error: `label` and `scores` [n, c]. svm and smooth-svm: `label` and `scores` [n], positive
for the second class. linear, least-squares, and an mlp for a number: `prediction` [n]. ridge, the model of `gram` and
`secprobe`, with the identity map: `label` and `scores` [n, c], or `prediction`; its other maps are computed by this
library alone. A plug-in's model is not written as ONNX.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from crowdml.errors import MissingExtra, TaskError
from crowdml.features.bounds import label_scale, scaling
from crowdml.features.maps import MapSettings
from crowdml.features.spectrum import BINS
from crowdml.models import KINDS, Cnn, Logistic, Mlp, Model, Softmax, read_model
from crowdml.task import Task

RIDGE = "ridge"
"""The model of `gram` and `secprobe`: linear in public features of a sample."""
OPSET, IR = 17, 8
"""ONNX of 2022: old enough for runtimes in the field."""


def make_onnx(task: Task, weights: Any, metadata: Mapping[str, str]) -> bytes:
    """The graph of a model with these weights, checked by ONNX itself. Strings of `metadata` go with it."""
    try:
        import onnx
        from onnx import TensorProto, helper, numpy_helper
    except ImportError as error:
        raise MissingExtra(
            "A model is written as ONNX by the package onnx, which is not installed. Run `pip install "
            "'crowdml[server]'`, or export the model as .safetensors, which needs nothing."
        ) from error
    ridge, classes = task.model["kind"] == RIDGE, list(task.labels.classes)
    model = None if ridge else fitting_model(task, weights)
    if not ridge and task.model["kind"] not in KINDS.ours:
        raise TaskError(
            f"model.kind = {task.model['kind']!r}: a plug-in computes it, and it is not written as ONNX. Export the "
            "model as .safetensors; its card has five lines that use it."
        )
    if ridge and task.protocol.get("map", {}).get("kind", "identity") != "identity":
        raise TaskError(
            f"protocol.map.kind = {task.protocol['map']['kind']!r}: its features are computed by crowdml, and are not "
            "written as ONNX. Export the model as .safetensors; its card has five lines that use it."
        )
    if task.features.extractor is not None:
        raise TaskError(
            "features.extractor: how pictures are brought upright is not written as ONNX. Export the model as "
            ".safetensors; its card has the lines that use it, and the extractor lies beside it."
        )
    nodes: list[Any] = []
    constants: dict[str, Any] = {}

    def add(operation: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(operation, inputs, [output], **attributes))
        return output

    if task.features.kind == "accelerometer-spectrum":
        entry = helper.make_tensor_value_info("acceleration", TensorProto.FLOAT, ["n", BINS, 3])
        rows = _spectrum(add, constants)
    else:
        entry = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", task.features.dimension])
        rows = "x"
    inside = _into_ball(add, constants, rows, task)
    if model is None:
        outputs = _ridge(add, constants, task, weights, inside)
    else:
        outputs = _answers(add, constants, model, task, _scores(add, constants, model, weights, inside))
    several = ["n", len(classes)]
    kinds = {"label": (TensorProto.INT64, ["n"]), "probabilities": (TensorProto.FLOAT, several),
             "scores": (TensorProto.FLOAT, several if ridge or isinstance(model, (Cnn, Mlp)) else ["n"]),
             "prediction": (TensorProto.FLOAT, ["n"])}  # fmt: skip
    graph = helper.make_graph(
        nodes,
        task.name,
        [entry],
        [helper.make_tensor_value_info(name, *kinds[name]) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
        doc_string=task.title,
    )
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR, producer_name="crowdml"
    )
    helper.set_model_props(made, {**metadata, "classes": json.dumps(classes)})
    onnx.checker.check_model(made, full_check=True)
    return made.SerializeToString()


def fitting_model(task: Task, weights: Any) -> Model:
    """The model of a task, for weights of its shape; a TaskError where there is none that can be exported."""
    kind = str(task.model["kind"])
    if kind not in KINDS:
        raise TaskError(f"model.kind = {kind!r} is none of {', '.join(KINDS)}.")
    model = read_model(task.model, task.features.dimension, task.classes, task.labels.bound, ("l1", "l2"))
    if tuple(np.shape(weights)) != model.shape:
        shape, wanted = (" x ".join(map(str, each)) for each in (np.shape(weights), model.shape))
        raise TaskError(
            f"model.kind = {kind!r}: with {task.features.dimension} features it has {wanted} weights, and these are "
            f"{shape}. They belong to another task."
        )
    return model


def _scores(add: Any, constants: dict[str, Any], model: Model, weights: Any, rows: str) -> str:
    """What the model says of rows in the ball: [n], or [n, c]."""
    weights = np.asarray(weights, np.float32)
    if isinstance(model, Cnn):
        rows = _pooled(add, constants, model, weights, rows)
        model, weights = model.head, weights[-model.head.shape[0] :]
    if isinstance(model, Mlp):
        operation = {"relu": "Relu", "tanh": "Tanh", "sigmoid": "Sigmoid"}[model.activation]
        for index, (matrix, biases) in enumerate(model.layers(weights)):
            rows = rows if index == 0 else add(operation, [rows], f"units {index}")
            constants |= {f"weights {index}": matrix, f"biases {index}": biases}
            product = add("MatMul", [rows, f"weights {index}"], f"product {index}")
            rows = add("Add", [product, f"biases {index}"], f"entering {index + 1}")
        return rows
    if getattr(model, "bias", False):
        constants |= {"weights": weights[:-1], "bias": weights[-1:]}
        return add("Add", [add("MatMul", [rows, "weights"], "product"), "bias"], "raw")
    constants["weights"] = weights
    return add("MatMul", [rows, "weights"], "raw")


def _pooled(add: Any, constants: dict[str, Any], model: Cnn, weights: Any, rows: str) -> str:
    """What the last pooling of a convolutional network gives, [n, k]: by row, column and filter."""
    constants |= {"side": np.float32(model.side), "picture": np.asarray([-1, 1, model.side, model.side], np.int64)}
    constants["flat"] = np.asarray([-1, model.head.dimension], np.int64)
    found = add("Reshape", [add("Mul", [rows, "side"], "pixels"), "picture"], "pictures")
    for index, (kernel, biases) in enumerate(model.layers(weights)[: len(model.filters)]):
        constants |= {f"kernel {index}": kernel.transpose(3, 2, 0, 1), f"kernel biases {index}": biases}
        given = [found, f"kernel {index}", f"kernel biases {index}"]
        answers = add("Conv", given, f"answers {index}", pads=[model.size // 2] * 4)
        largest = add("MaxPool", [answers], f"pooled {index}", kernel_shape=[2, 2], strides=[2, 2])
        found = add("Relu", [largest], f"passed {index}")
    return add("Reshape", [add("Transpose", [found], "by place", perm=[0, 2, 3, 1]), "flat"], "entering the head")


def _ridge(add: Any, constants: dict[str, Any], task: Task, weights: Any, rows: str) -> list[str]:
    """What a ridge says of rows in the ball: the identity map shrinks them onto radius sqrt(1 - k^2) and appends k."""
    weights = np.asarray(weights, np.float32)
    k = float(MapSettings(**task.protocol.get("map", {})).constant)
    constants |= {"radius": np.float32(np.sqrt(1 - k * k)), "weights": weights[:-1] if k else weights}
    size = add("ReduceL2", [rows], "norm", axes=[1], keepdims=1)
    shrunk = add("Mul", [rows, add("Div", ["radius", add("Max", [size, "radius"], "reach")], "factor")], "features")
    scores = add("MatMul", [shrunk, "weights"], "product")
    if k:
        constants["intercept"] = np.float32(k) * weights[-1]
        scores = add("Add", [scores, "intercept"], "raw")
    if task.classes is not None:
        add("ArgMax", [scores], "label", axis=1, keepdims=0)
        add("Identity", [scores], "scores")
        return ["label", "scores"]
    constants |= {"last": np.asarray([1], np.int64), "label bound": np.float32(task.labels.bound)}
    number = add("Mul", [add("Squeeze", [scores, "last"], "of the bound"), "label bound"], "number")
    return [_in_units(add, constants, task, number)]


def _in_units(add: Any, constants: dict[str, Any], task: Task, number: str) -> str:
    """What the model says, in the labels' own unit."""
    if task.labels.low is None:
        return add("Identity", [number], "prediction")
    middle, half = label_scale(task.labels)
    constants |= {"label middle": np.float32(middle), "label half": np.float32(half)}
    return add("Add", [add("Mul", [number, "label half"], "from the label middle"), "label middle"], "prediction")


def _spectrum(add: Any, constants: dict[str, Any]) -> str:
    """|FFT of |a|| / 64, as `crowdml.features.spectrum`: two products with the cosines and sines of the transform."""
    angle = 2 * np.pi * np.outer(np.arange(BINS), np.arange(BINS)) / BINS
    constants |= {"cosines": np.cos(angle).astype(np.float32), "sines": np.sin(angle).astype(np.float32)}
    constants["bins"] = np.float32(BINS)
    add("ReduceL2", ["acceleration"], "magnitude", axes=[2], keepdims=0)
    for name in ("cosines", "sines"):
        add("MatMul", ["magnitude", name], f"by {name}")
        add("Mul", [f"by {name}", f"by {name}"], f"{name} squared")
    add("Add", ["cosines squared", "sines squared"], "power")
    return add("Div", [add("Sqrt", ["power"], "amplitude"), "bins"], "spectrum")


def _into_ball(add: Any, constants: dict[str, Any], rows: str, task: Task) -> str:
    """`crowdml.features.prepared`."""
    norm, scale = task.features.norm, scaling(task.features)
    constants |= {"zero": np.float32(0), "bound": np.float32(norm.bound)}
    add("Or", [add("IsNaN", [rows], "no number"), add("IsInf", [rows], "infinite")], "not finite")
    from_number = add("Cast", ["not finite"], "flags", to=1)
    flagged = add("ReduceMax", [from_number], "flagged", axes=[1], keepdims=1)
    usable = add("Where", [add("Greater", [flagged, "zero"], "unusable"), "zero", rows], "usable")
    if scale is not None:
        middle, factor = (np.asarray(each, np.float32) for each in scale)
        constants |= {"column middle": middle, "column factor": factor, "least": np.float32(-1), "most": np.float32(1)}
        centred = add(
            "Mul", [add("Sub", [usable, "column middle"], "from the middle"), "column factor"], "of the bounds"
        )
        held = add("Clip", [centred, "least", "most"], "within the bounds")
        usable = add("Where", ["unusable", "zero", held], "scaled")
    size = add("ReduceL1" if norm.kind == "l1" else "ReduceL2", [usable], "size", axes=[1], keepdims=1)
    shrink = add("Div", ["bound", add("Max", [size, "bound"], "at least the bound")], "shrink")
    return add("Mul", [usable, shrink], "in the ball")


def _answers(add: Any, constants: dict[str, Any], model: Model, task: Task, scores: str) -> list[str]:
    last = {"last": np.asarray([1], np.int64)}
    if model.classes is None:
        if isinstance(model, Mlp):
            constants |= last
            scores = add("Squeeze", [scores, "last"], "number")
        return [_in_units(add, constants, task, scores)]
    if isinstance(model, (Softmax, Cnn, Mlp)):
        add("ArgMax", [scores], "label", axis=1, keepdims=0)
        if isinstance(model, Mlp) and model.top == "squared":
            add("Identity", [scores], "scores")
            return ["label", "scores"]
        add("Softmax", [scores], "probabilities", axis=1)
        return ["label", "probabilities"]
    add("Cast", [add("Greater", [scores, "zero"], "second")], "label", to=7)
    if not isinstance(model, Logistic):
        add("Identity", [scores], "scores")
        return ["label", "scores"]
    constants |= last
    column = add("Unsqueeze", [scores, "last"], "column")
    first, second = add("Sigmoid", [add("Neg", [column], "against")], "no"), add("Sigmoid", [column], "yes")
    add("Concat", [first, second], "probabilities", axis=1)
    return ["label", "probabilities"]
