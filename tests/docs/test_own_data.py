"""The pages on a table of one's own: every command of them, in its order, from the file to 90 %."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable

import click
import pytest
from pages import PAGES, ROOT, Page
from test_examples import OWN_DATA, said, same
from test_pages import COMMANDS

OWN = [next(page for page in PAGES if page.name == name) for name in OWN_DATA]
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
ACCURACY = re.compile(r"^  ?(\w+) +(0\.\d{3})\b", re.MULTILINE)
SENT = re.compile(r"^  ?(\w+) +0\.\d{3} .* ([\d.]+ (?:bytes|kB|MB)) +(\d+) +[\d.]+ *$", re.MULTILINE)
"""A protocol in a comparison, the bytes that it sends and its rounds."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Run a command beside the table of patients, once: pages repeat one another. Return what it prints."""
    folder = tmp_path_factory.mktemp("own-data")
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "PYTHONPATH": str(ROOT / "src")}
    environment.pop("FORCE_COLOR", None)
    printed: dict[str, str] = {}

    def python(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stderr}"
        return done.stdout + done.stderr

    def command(text: str) -> str:
        if text not in printed:
            printed[text] = python("-m", "crowdml", *shlex.split(text)[1:])
        return printed[text]

    python("-c", writes_the_table(OWN[0]))
    return command


def writes_the_table(page: Page) -> str:
    return next(block.text for block in page.blocks if block.language == "python" and "patients.csv" in block.text)


def without_numbers(text: str) -> str:
    """The words of an output: accuracies differ a little between machines, and seconds a lot."""
    return re.sub(r"[ \t]+", " ", NUMBER.sub("#", text))


@pytest.mark.parametrize("page", OWN, ids=lambda page: page.name)
def test_the_commands_of_a_page_lead_from_a_table_to_ninety_percent(page: Page, run: Callable[[str], str]):
    best: list[float] = []
    for block in page.blocks:
        for command, shown in said(block) if block.language == "console" else ():
            if not command.startswith("crowdml "):
                continue
            printed = run(command)
            assert same(without_numbers(shown), without_numbers(printed)), (
                f"{page.name}:{block.line}: {command} prints\n{printed}\nand the page shows\n{shown}"
            )
            told, found = ACCURACY.findall(shown), ACCURACY.findall(printed)
            for (name, on_page), (_, here) in zip(reversed(told), reversed(found), strict=False):
                assert abs(float(on_page) - float(here)) < 0.05, f"{command}: {name} is {here}, not {on_page}"
            sent = SENT.findall(printed)
            for line in SENT.findall(shown):
                assert line in sent, f"{page.name}:{block.line}: {line} is none of {sent}"
            if "--data patients.csv" in command and found:
                best.append(max(float(value) for _, value in found))
    assert best
    assert min(best) >= 0.9


@pytest.mark.parametrize("page", OWN, ids=lambda page: page.name)
def test_the_commands_for_a_live_crowd_have_the_options_that_a_page_gives_them(page: Page):
    for block in page.blocks:
        for line in block.text.strip().splitlines() if block.language == "sh" else ():
            words = shlex.split(line, comments=True)
            depth = next(depth for depth in (3, 2) if " ".join(words[:depth]) in COMMANDS)
            command = COMMANDS[" ".join(words[:depth])]
            command.make_parser(click.Context(command)).parse_args(words[depth:])


def test_the_tutorial_writes_the_same_table_as_the_page_on_your_own_data():
    assert writes_the_table(OWN[0]) == writes_the_table(OWN[-1])
