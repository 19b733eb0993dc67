"""A task whose outcome is a histogram, as files: how often each label occurred in the crowd, with what the noise hides.

Nothing here predicts: devices of such a task that learn do so for themselves, and their models never leave them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from crowdml.errors import DataError
from crowdml.protocol import Noisy
from crowdml.server.estimates import share_of
from crowdml.server.spreadsheets import csv_text
from crowdml.task import Task

KINDS = ("histogram", "clusters")
"""Models of tasks whose server only counts."""
ENDINGS = (".json", ".csv", ".safetensors")
FORMAT = "crowdml/histogram/1"
COLUMNS = ("label", "count", "share", "low", "high", "projected")


@dataclass(frozen=True)
class Bar:
    """A label: its noisy count, its share with about 95 % (cut off nowhere), and the share as it can be."""

    label: str
    count: int
    share: float
    low: float
    high: float
    projected: float


def is_histogram(task: Task) -> bool:
    return task.model["kind"] in KINDS


def bars_of(task: Task, labels: Noisy | None, projected: Any) -> list[Bar]:
    """One for each class; none before the first check-in."""
    if labels is None or not labels.samples:
        return []
    found = [share_of(labels, place) for place in range(len(task.labels.classes))]
    return [
        Bar(name, labels.counts[place], each.value, each.low, each.high, float(np.asarray(projected)[place]))
        for place, (name, each) in enumerate(zip(task.labels.classes, found, strict=True))
    ]


def json_file(bars: list[Bar], labels: Noisy | None, metadata: dict[str, str]) -> bytes:
    said = {
        **metadata,
        "format": FORMAT,
        "classes": json.loads(metadata["classes"]),
        "measurements": 0 if labels is None else labels.samples,
        "variance": 0.0 if labels is None else labels.variance,
        "labels": [{name: getattr(bar, name) for name in COLUMNS} for bar in bars],
    }
    return (json.dumps(said, indent=1, ensure_ascii=False) + "\n").encode()


def csv_file(bars: list[Bar]) -> bytes:
    return csv_text(COLUMNS, ([getattr(bar, name) for name in COLUMNS] for bar in bars)).encode()


def tensors(bars: list[Bar]) -> dict[str, Any]:
    """By column, each [classes]."""
    return {name: np.array([getattr(bar, name) for bar in bars], np.float32) for name in COLUMNS[1:]}


def snippet(file: str) -> str:
    """A few lines that read the file and print a row a label."""
    each = '    print(row["label"], row["share"], row["low"], row["high"])'
    if file.endswith(".csv"):
        return f'import csv\nfor row in csv.DictReader(open("{file}")):\n{each}'
    if file.endswith(".json"):
        return f'import json\nfor row in json.load(open("{file}"))["labels"]:\n{each}'
    return "\n".join(
        (
            "import json, numpy as np",
            f'raw = open("{file}", "rb").read(); end = 8 + int.from_bytes(raw[:8], "little")',
            'head = json.loads(raw[8:end]); labels = json.loads(head["__metadata__"]["classes"])',
            'read = lambda name: np.frombuffer(raw[end:][slice(*head[name]["data_offsets"])], "<f4")',
            'for row in zip(labels, read("share"), read("low"), read("high")): print(*row)',
        )
    )


def no_onnx(task: Task) -> DataError:
    return DataError(
        f"Task {task.name} has no model to run as ONNX: its server counts labels, and what devices learn stays on "
        f"them. Export the histogram instead, with --model FILE{', FILE'.join(ENDINGS)}."
    )
