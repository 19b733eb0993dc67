"""The public Python surface is what `docs/python.md` lists, with its signatures, no more and no less."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from typing import Any

import pytest
from pages import ROOT

import crowdml
from crowdml import plugin

PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")

GIVEN = {"Array", "Context", "Integers", "MapSettings", "Mechanism", "Private", "Release", "Task"}
"""What the library makes and authors read: the page lists no signature of it."""


def listed(heading: str) -> list[str]:
    """The names in the first column of the tables below a heading, up to the next one of its level."""
    text = re.split(rf"^## {re.escape(heading)}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0]
    text = re.sub(r"^### What a Protocol holds$.*?(?=^### )", "", text, flags=re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`(\w+)", cell)]


def signature(name: str, found: Any) -> str:
    """What the page says of a name: `fold(step, carry, count, like)`, or the bare name of what nobody calls."""
    makes = inspect.isclass(found) and not issubclass(found, (Exception, enum.Enum)) and name not in GIVEN
    if not (inspect.isfunction(inspect.unwrap(found)) or makes) or getattr(found, "_is_protocol", False):
        return f"`{name}`"
    if dataclasses.is_dataclass(found):
        dataclasses.fields(found)  # completes a record, whose signature waits for that
    said: list[str] = []
    for each in inspect.signature(found).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not any(part.startswith("*") for part in said):
            said.append("*")
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        plain = each.default is None or isinstance(each.default, (bool, int, float, str, tuple))
        default = "" if each.default is each.empty else f"={each.default!r}" if plain else "=..."
        said.append(f"{star}{each.name}{default}".replace("'", '"'))
    return f"{name}({', '.join(said)})"


@pytest.mark.parametrize("module", [crowdml, plugin], ids=lambda module: module.__name__)
def test_the_page_lists_exactly_what_a_module_exports(module: object):
    names = listed(module.__name__)  # pyright: ignore
    assert len(names) == len(set(names))
    assert set(names) == set(module.__all__)  # pyright: ignore


@pytest.mark.parametrize("module", [crowdml, plugin], ids=lambda module: module.__name__)
def test_the_page_says_how_each_name_is_called(module: object):
    page = re.sub(r"\(\s+", "(", re.sub(r",\s+", ", ", PAGE)).replace(",)", ")")
    said = [signature(name, getattr(module, name)) for name in module.__all__ if name != "Protocol"]  # pyright: ignore
    wrong = [each for each in said if each not in page]
    assert not wrong, "docs/python.md says otherwise; a name is called like this:\n" + "\n".join(wrong)


def test_the_page_lists_the_fields_of_a_protocol():
    table = PAGE.split("\n### What a Protocol")[1].split("\n### ")[0]
    fields = [(field.name, field.default is dataclasses.MISSING) for field in dataclasses.fields(plugin.Protocol)]
    said = re.findall(r"^\| `(\w+)[^|]*\| ([^|]*) \|", table, re.MULTILINE)
    assert [(name, default == "required") for name, default in said] == fields


def test_every_name_of_the_surface_is_there_and_another_is_not():
    for name in crowdml.__all__:
        assert getattr(crowdml, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = crowdml.Nothing  # pyright: ignore


def test_the_examples_import_the_public_surface_alone():
    for file in (ROOT / "examples" / "protocols" / "crowdml_examples").glob("*.py"):
        found = re.findall(r"^(?:from|import) crowdml.*$", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert set(found) <= {"from crowdml import plugin as cm"}
        for name in re.findall(r"\bcm\.(\w+)", file.read_text(encoding="utf-8")):
            assert name in plugin.__all__
