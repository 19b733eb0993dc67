"""What no run of the modules would show: where their randomness comes from, what they reach, what their types hide."""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = ROOT / "src" / "crowdml" / "web" / "device"
MODULES = sorted(FOLDER.glob("*.js"))
SHELL = "worker.js"
"""The shell of a device: it alone knows the time and asks the server, and nothing imports it."""
EVERY_MODULE = pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)


@cache
def code(path: Path) -> str:
    """The source without its comments."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


@EVERY_MODULE
def test_randomness_is_the_browsers_and_nothing_else_reaches_out(path: Path):
    found = code(path)
    for word in (
        "Math.random",
        *(["fetch("] if path.name != SHELL else []),
        "XMLHttpRequest",
        "WebSocket",
        "eval(",
        "Function(",
        "localStorage",
        "document",
    ):
        assert word not in found, word
    assert ("getRandomValues" in found) == (path.name == "noise.js")
    reads_clock = re.search(r"Date\.now|new Date\(\)|performance\.now", found)
    assert (reads_clock is not None) == (path.name == SHELL), "The clock is an argument."


@EVERY_MODULE
def test_a_module_imports_its_neighbours_alone_and_exports_by_name(path: Path):
    for source in re.findall(r"from \"([^\"]+)\"|import\(\"([^\"]+)\"\)", code(path)):
        assert re.fullmatch(r"\./[a-z_]+\.js", source[0] or source[1])
    assert "export default" not in code(path)
    assert ("export " in code(path)) == (path.name != SHELL)


@EVERY_MODULE
def test_types_are_said(path: Path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"@ts-|\bany\b\s*[}>|)\]]|[{<|(]\s*any\b|eslint-disable|oxlint-disable", text)
    assert text.startswith("/**"), "A module begins with what it is for."


@EVERY_MODULE
def test_the_page_names_each_module(path: Path):
    assert f"`{path.name}`" in (ROOT / "docs" / "browser.md").read_text(encoding="utf-8")


@EVERY_MODULE
def test_a_module_names_python_that_is_there(path: Path):
    for named in re.findall(r"src/crowdml/[a-z_/]+(?:\.py)?", path.read_text(encoding="utf-8")):
        assert (ROOT / named).exists(), named


def test_only_the_door_opens_what_is_private():
    """`Private`, `Release` and `Masked` are made in door.js; a mask is put on a summand where a round is made."""
    for path in MODULES:
        makes = re.search(r"new (?:Private|Release|Masked)\(", code(path))
        assert (makes is not None) == (path.name == "door.js")
        opened = re.sub(r"\b(?:indexedDB|Store)\.open\(", "", code(path))  # these open a database
        assert ".open(" not in opened or path.name == "door.js"


def test_modules_come_with_the_package():
    folder = resources.files("crowdml").joinpath("web", "device")
    assert {path.name for path in MODULES} <= {entry.name for entry in folder.iterdir()}
    assert '"web/**/*.js"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
