"""The examples of the documentation run, and print what the pages say.

The Python blocks of a page share one namespace and one empty folder. A plain block right below one is its output, and
`...` in it stands for anything. A block marked `python slow` runs in `make test-all` only, `python data` only where
$CROWDML_DATA is set. Of the console blocks the cheap commands are run: help, tasks and the list of data sets.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import PAGES, ROOT, Block, Page

CHEAP = re.compile(r"^crowdml( .*--help| -h|( (task (list|check|new)|data list)\b.*))$")
WITH_CODE = [page for page in PAGES if any(block.language == "python" for block in page.blocks)]
# test_own_data.py runs every command of these pages, in order.
OWN_DATA = ("docs/your-own-data.md", "docs/which-protocol.md", "README.md", "docs/tutorial.md")
WITH_COMMANDS = [
    page for page in PAGES if any(block.language == "console" for block in page.blocks) and page.name not in OWN_DATA
]


def same(shown: str, printed: str) -> bool:
    """Equal but for space at the ends of lines, `...`, and numbers of seconds."""
    flat = ["\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n" for text in (shown, printed)]
    return doctest.OutputChecker().check_output(flat[0], flat[1], doctest.ELLIPSIS)


def run_python(page: Page, *, slow: bool) -> None:
    names: dict[str, object] = {"__name__": "example"}
    for block in page.blocks:
        if block.language != "python" or ("slow" in block.words and not slow):
            continue
        if "data" in block.words and not os.environ.get("CROWDML_DATA"):
            continue
        where, printed = f"{page.name}:{block.line}", io.StringIO()
        if ">>> " in block.text:
            test = doctest.DocTestParser().get_doctest(block.text, names, where, page.name, block.line)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            with contextlib.redirect_stdout(printed):
                failed = runner.run(test, clear_globs=False).failed
            assert not failed, printed.getvalue()
            names.update(test.globs)
            continue
        code = compile("\n" * block.line + block.text, str(page.path), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        if block.shown is not None:
            assert same(block.shown, printed.getvalue()), (
                f"{where} prints\n{printed.getvalue()}and the page shows\n{block.shown}"
            )


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_python_of_a_page_runs_and_prints_what_it_says(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_python(page, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in WITH_CODE if any("slow" in block.words for block in page.blocks)])
def test_the_slow_python_of_a_page_runs_too(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run_python(page, slow=True)


def said(block: Block) -> list[tuple[str, str]]:
    """The commands of a console block, each with the output that is shown below it."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    return [
        (command.partition("  #")[0].strip(), output) for command, _, output in (part.partition("\n") for part in parts)
    ]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_the_cheap_commands_of_a_page_run_and_print_what_it_says(page: Page, tmp_path: Path):
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT / "src")}
    environment.pop("FORCE_COLOR", None)
    for block in page.blocks:
        for command, output in said(block) if block.language == "console" else ():
            if not CHEAP.match(command):
                continue
            done = subprocess.run(
                [sys.executable, "-c", "from crowdml.cli import main; main()", *shlex.split(command)[1:]],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            where = f"{page.name}:{block.line}: {command}"
            assert done.returncode == 0, f"{where}\n{done.stderr}"
            shown = output.strip()
            printed = done.stdout + done.stderr
            assert not shown or same(shown, printed), f"{where} prints\n{printed}\nand the page shows\n{output}"
