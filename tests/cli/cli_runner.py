"""Runs the command in this process, as a terminal would."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from click.testing import CliRunner

from crowdml.cli import cli


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as one JSON object, and nothing else."""
        return json.loads(self.out, parse_constant=lambda name: (_ for _ in ()).throw(ValueError(name)))


def crowdml(*args: str) -> Answer:
    result = CliRunner().invoke(cli, list(args), prog_name="crowdml")
    return Answer(result.exit_code, result.stdout, result.stderr)


def refused(*args: str) -> str:
    """The one line of a refusal: exit code 1, one line on stderr, nothing on stdout, no traceback."""
    answer = crowdml(*args)
    lines = [line for line in answer.err.splitlines() if not line.startswith(("A simulated crowd", "Measuring"))]
    assert answer.code == 1, (answer.code, answer.out, answer.err)
    assert answer.out == ""
    assert len(lines) == 1, lines
    assert lines[0].startswith("crowdml: ")
    assert lines[0].endswith(".")
    assert "Traceback" not in answer.err
    return lines[0]
