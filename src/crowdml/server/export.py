"""A task's model as files that others can use: safetensors, and a card that says what was promised to whom."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crowdml.errors import DataError
from crowdml.protocol import quote
from crowdml.server.runner import TaskRunner
from crowdml.storage.server import Store
from crowdml.task import Task
from crowdml.wire.keys import Key


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
    sample_epsilon: float
    device_epsilon: float


def export_model(store: Store, task: bytes) -> Exported:
    """The model as the journal has it; the task may be served at the same time."""
    stored = store.task(task)
    if stored is None:
        raise DataError(f"There is no task {task.hex()[:12]} in {store.name}.")
    runner = TaskRunner(store, stored.canonical, Key.generate(), lambda: "")
    lasts = store.last_seq(task)
    most = max((last.seq for last in lasts.values()), default=0)
    priced = quote(runner.fold.protocol, runner.task)
    return Exported(
        task=runner.task,
        weights=runner.fold.weights,
        version=runner.offer.version,
        check_ins=runner.index,
        devices=len(lasts),
        most=most,
        sample_epsilon=priced.sample_epsilon() if most else 0.0,
        device_epsilon=priced.device_epsilon(most) if most else 0.0,
    )


def safetensors(tensors: dict[str, Any], metadata: dict[str, str]) -> bytes:
    """The format of the same name: the header's length in 8 bytes, a JSON header, then float32 tensors one by one."""
    header: dict[str, Any] = {"__metadata__": metadata}
    data = b""
    for name, tensor in tensors.items():
        raw = np.ascontiguousarray(tensor, "<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def model_file(model: Exported) -> bytes:
    task = model.task
    metadata = {
        "format": "crowdml/model/1",
        "task": task.hash.hex(),
        "name": task.name,
        "model": str(task.model["kind"]),
        "classes": json.dumps(list(task.labels.classes)),
        "version": str(model.version),
    }
    return safetensors({"weights": model.weights}, metadata)


def model_card(model: Exported, file: str) -> str:
    """Markdown: what the model is, what was promised to whom, and how to use it."""
    from crowdml.protocols import find

    task = model.task
    rows = quote(find(task), task).rows
    observers = ", ".join(sorted({row.mechanism.observer.value for row in rows}))
    adjacencies = ", ".join(sorted({row.mechanism.sensitivity.adjacency.value for row in rows}))
    leaves = "\n".join(f"| {row.row} | {row.mechanism.kind} | `{row.loss}` | {row.mechanism.promise} |" for row in rows)
    return f"""# {task.title or task.name}

{task.purpose}

| | |
|---|---|
| task | `{task.name}`, SHA-256 `{task.hash.hex()}` |
| model | {task.model["kind"]}, {" x ".join(map(str, model.weights.shape))} weights, version {model.version} |
| features | {task.features.dimension}, {task.features.norm.kind} norm at most {float(task.features.norm.bound):g} |
| labels | {", ".join(task.labels.classes) or "a number"} |
| made of | {model.check_ins:,} check-ins of {model.devices:,} devices |

## Privacy

| | |
|---|---|
| unit | {task.privacy.unit} |
| adjacency | {adjacencies} |
| observer | {observers} |
| a sample's ε | {_epsilon(model.sample_epsilon)} at δ = {task.privacy.delta:g} |
| a device's ε | {_epsilon(model.device_epsilon)} at δ = {task.privacy.delta:g}, paid so far ({model.most} check-ins) |
| accountant | losses as the noise proves them (pure, zCDP, Rényi), composed exactly, converted once at δ |

Data never seen: no sample left its device. {task.collects}
What left, each with noise that its own device drew:

| what | mechanism | loss of a sample | in words |
|---|---|---|---|
{leaves}

## Use

```python
{snippet(model, file)}
```
"""


def snippet(model: Exported, file: str) -> str:
    """Five lines that load the file and predict, with NumPy alone. x has one row a sample."""
    kind = model.task.model["kind"]
    dimension, labels = model.task.features.dimension, model.task.labels.classes
    last = {
        "softmax": f"np.array({list(labels)})[(x @ weights).argmax(1)]",
        "linear": "x @ weights",
    }.get(str(kind), f"np.array({list(labels)})[(x @ weights > 0).astype(int)]")
    return "\n".join(
        (
            "import json, numpy as np",
            f'raw = open("{file}", "rb").read(); end = 8 + int.from_bytes(raw[:8], "little")',
            'weights = np.frombuffer(raw[end:], "<f4").reshape(json.loads(raw[8:end])["weights"]["shape"])',
            f"x = np.zeros((1, {dimension}))  # a row a sample",
            f"print({last})",
        )
    )


def _epsilon(value: float) -> str:
    return "none" if math.isinf(value) else f"{value:.4g}"


def find_hash(store: Store, name: str) -> bytes:
    """A task of this server by its name, or by the beginning of its hash."""
    found = [
        each for each in store.tasks() if each.name == name or (len(name) >= 8 and each.hash.hex().startswith(name))
    ]
    if len(found) == 1:
        return found[0].hash
    names = ", ".join(f"{each.name} ({each.hash.hex()[:12]})" for each in store.tasks()) or "none yet"
    how = "No task here is" if not found else f"{len(found)} tasks here are"
    raise DataError(f"{how} called {name!r}. There are: {names}. Name one, or begin its hash.")


def write_model(model: Exported, path: Path, write: Any) -> Path:
    """The model and its card beside it; the card's path."""
    card = path.with_suffix(".md")
    with write(path) as draft:
        draft.write_bytes(model_file(model))
    with write(card) as draft:
        draft.write_text(model_card(model, path.name), encoding="utf-8")
    return card
