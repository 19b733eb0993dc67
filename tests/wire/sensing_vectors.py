"""What a device senses: spectra of windows of motion, and samples out of the lines of a file."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from crowdml.device.rows import Faults, Text, samples_of
from crowdml.features import spectrum
from crowdml.features.norms import into_ball
from crowdml.lines import read_lines
from crowdml.task import parse

TIME = np.arange(64) / 20  # seconds

ROWS = """
name = "rows"
title = "Lines of a file"
collects = "numbers"
features = { dimension = 2, norm = { kind = "l2", bound = 1.0 }BOUNDS }
labels = { classes = ["left", "right", "2"] }
model = { kind = "softmax" }
protocol = { kind = "sgd", batch = 2, step = { c = 1.0 } }
[privacy]
mechanism = "discrete-gaussian"
epsilon = { gradient = 1.0 }
delta = 1e-6
budget = { epsilon = 1.0, samples = 10 }
"""

FILES = {
    "numbers and names": b"0.5,0.25,left\n0.125,-0.5,right\n",
    "a heading, CRLF, and no line feed at the end": b"a,b,kind\r\n0.5,0.25,left\r\n-1,0,0",
    "a mark of UTF-8": b"\xef\xbb\xbf0.5,0.25,left\n0.25,0.5,1\n",
    "semicolons and decimal commas": b"a;b;kind\n0,5;0,25;left\n1;-0,5;right\n.5;5.;2\n",
    "tabs": b"0.5\t0.25\tleft\n1e-1\t+2E-1\t right \n",
    "quotes": b'"0.5","0.25","left"\n"0.5",0.25,"le""ft"\n"0.5,0.25,left\n0.5,0.2"5,left\n',
    "rows that cannot be used keep their places": (
        b"0.5,0.25,left\n\n   \n0.5,left\n0.5,0.25,0.125,left\nx,0.25,left\nnan,0.25,left\ninf,0,left\n"
        b"0.5,0.25,up\n0.5,0.25,3\n0.5,0.25,1.5\n0.5,0.25,\n\xff,0.25,left\n1_0,0.25,left\n0x1,0,left\n0.5,0.25,-1\n"
    ),
    "outside the ball": b"3,4,left\n1e200,1e200,right\n1e-320,0,left\n1e400,0,left\n",
    "an empty file": b"",
}


def spectra() -> Any:
    """|a| of 64 readings, its spectrum, and that in the ball of a task."""
    draw = np.random.default_rng(1)
    windows = {
        "at rest": np.full(64, 9.81),
        "five swings": 9.81 + 2 * np.cos(2 * np.pi * 5 * TIME / 3.2),
        "walking": np.abs(9.81 + 3 * np.sin(2 * np.pi * 1.8 * TIME) + draw.normal(0, 0.5, 64)),
        "a shock": np.where(np.arange(64) == 20, 40.0, 9.81),
        "in steps of a tenth": np.round(9.81 + draw.normal(0, 1, 64), 1),
        "nothing": np.zeros(64),
    }
    return [
        {
            "name": name,
            "magnitudes": [float(value) for value in window],
            "spectrum": spectrum(window[None])[0].tolist(),
            "l1": into_ball(spectrum(window[None])[0], "l1", 1.0).tolist(),
            "l2": into_ball(spectrum(window[None])[0], "l2", 1.0).tolist(),
        }
        for name, window in windows.items()
    ]


def lines() -> Any:
    """The samples that a device makes of a CSV file's bytes, and why rows could not be used."""
    plain, bounded = ROWS.replace("BOUNDS", ""), ROWS.replace("BOUNDS", ", low = [-1.0, 0.0], high = [1.0, 0.5]")
    cases = [(name, plain, data) for name, data in FILES.items()]
    cases.append(("public bounds of the columns", bounded, b"0.5,0.25,left\n-3,9,right\n0,0.125,2\n"))
    return [lines_case(*case) for case in cases]


def lines_case(name: str, text: str, data: bytes) -> Any:
    task, faults = parse(text), Faults()
    reader = Text("csv", "rows.csv", task)
    rows = list(reader.rows(read_lines(io.BytesIO(data), reader.longest)))
    samples = samples_of(rows, task, faults)
    return {
        "name": name,
        "task": task.canonical.decode(),
        "file": data.hex(),
        "x": [sample.x.tolist() for sample in samples],
        "y": [int(sample.y) for sample in samples],
        "faults": faults.counts,
    }


def build() -> dict[str, Any]:
    """Every file of vectors by its name."""
    return {"spectra": spectra(), "lines": lines()}
