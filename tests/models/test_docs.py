"""docs/models.md has a heading for every kind and setting, and its examples run."""

import dataclasses
import re
from pathlib import Path

import pytest

from crowdml.models import KINDS, Linear

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^## ([\w-]+)$.*?^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_every_kind_of_model_has_a_heading_and_an_example():
    assert sorted(name for name, _ in EXAMPLES) == sorted(KINDS)


def test_every_setting_of_the_linear_model_is_in_the_table_with_its_default():
    for field in dataclasses.fields(Linear)[1:]:
        assert f"| `{field.name}` | {field.default} |" in PAGE


@pytest.mark.parametrize(("name", "code"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_the_example_of_each_model_runs(name, code):
    exec(compile(code, f"docs/models.md, {name}", "exec"), {})
