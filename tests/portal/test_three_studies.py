"""An operator and owners on a server with three studies, who have nothing but what is printed.

Review 2, users, verdict: "the printed join command fails as soon as a second study runs". Here every address is opened
and every command is run exactly as a terminal, a page, a card or a CSV file shows it, by real processes.
"""

from __future__ import annotations

import contextlib
import csv
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from desk import PASSWORD
from screens import DESKTOP, Window, chromium, window

pytestmark = pytest.mark.browser

LABELS = ("0", "1", "2")
ROWS = 60
TITLE = "Which of three digits is this?"
CLIPBOARD = {"permissions": ["clipboard-read", "clipboard-write"]}
LINE = f"{','.join(['0.25'] * 64)}"


@dataclass
class Terminal:
    """A person's shell in a folder of their own. `crowdml` is on the path; FILE and FILE.csv are their samples."""

    folder: Path
    path: str

    def environment(self) -> dict[str, str]:
        home = {"HOME": str(self.folder), "PATH": self.path, "COLUMNS": "100"}
        return {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")} | home

    def run(self, command: str, answer: str = "") -> str:
        """Everything that the command says in a real terminal, without colours; it has to succeed."""
        ours, theirs = pty.openpty()
        try:
            process = subprocess.Popen(
                ["sh", "-c", command], cwd=self.folder, env=self.environment(), start_new_session=True,
                stdin=theirs, stdout=theirs, stderr=theirs,
            )  # fmt: skip
            os.close(theirs)
            os.write(ours, answer.encode())  # it waits in the terminal until it is asked for
            said = b"".join(iter(lambda: _heard(ours), b"")).decode()
        finally:
            os.close(ours)
        assert process.wait(120) == 0, f"{command}\n{said}"
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).replace("\r\n", "\n")


def _heard(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65_536)
    except OSError:  # on Linux, so a terminal says that nobody is at its other end any more
        return b""


@dataclass
class Machines:
    """Terminals of as many people as a test needs."""

    folder: Path
    count: int = 0

    def __post_init__(self) -> None:
        program = self.folder / "bin" / "crowdml"
        program.parent.mkdir(parents=True)
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m crowdml.cli "$@"\n')
        program.chmod(0o755)

    def terminal(self) -> Terminal:
        self.count += 1
        folder = self.folder / f"person-{self.count}"
        folder.mkdir()
        rows = "".join(f"{LINE},{LABELS[number % 3]}\n" for number in range(ROWS))
        for name in ("FILE", "FILE.csv"):
            (folder / name).write_text(rows)
        return Terminal(folder, f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}")


@contextlib.contextmanager
def served(terminal: Terminal, command: str) -> Iterator[list[str]]:
    """A server that somebody started in a terminal; what it has printed once it says where to set it up."""
    process = subprocess.Popen(
        ["sh", "-c", f"exec {command}"], cwd=terminal.folder, env=terminal.environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    said: list[str] = []
    try:
        for line in process.stdout:
            said.append(line.rstrip())
            if "/operator/setup" in line:
                break
        rest = threading.Thread(target=process.stdout.read, daemon=True)  # a pipe that nobody reads would hold it up
        rest.start()
        yield said
    finally:
        process.terminate()
        assert process.wait(60) == 0, said


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        if found is None:
            pytest.skip("there is no Chromium here")
        yield found


def address_in(text: str) -> str:
    """The one address in what somebody reads."""
    (found,) = re.findall(r"https?://\S+", text)
    return found


def copied(page: Any, line: Any) -> str:
    """What the button beside a command copies."""
    line.get_by_role("button", name="Copy").click()
    line.get_by_role("button", name="Copied").wait_for()
    return page.evaluate("navigator.clipboard.readText()")


def fill(page: Any, **fields: str) -> None:
    for name, value in fields.items():
        page.locator(f'[name="{name.replace("__", ".")}"]').fill(value)


def starts_a_third_study(at: Window) -> None:
    page = at.page
    page.get_by_role("link", name="New task").click()
    fill(page, name="three-digits", title=TITLE, purpose="Show a small crowd learning.",
         collects="Pictures of digits, 8 by 8 pixels. They stay here.", labels__classes=", ".join(LABELS),
         crowd__devices="40", protocol__batch="20", privacy__epsilon__gradient="2", privacy__epsilon__errors="0.5",
         privacy__epsilon__labels="0.5", privacy__budget__epsilon="3", privacy__budget__samples="200")  # fmt: skip
    page.locator('[name="privacy.mechanism"]').select_option("discrete-gaussian")  # nobody waits for a cohort here
    page.get_by_role("button", name="Check and price it").click()
    page.get_by_role("heading", name="The price").wait_for()
    page.get_by_role("button", name="Start the task").click()
    page.get_by_text("The task runs. Devices with an invitation may join now.").wait_for()


def makes_invitations(at: Window, **fields: str) -> tuple[list[str], list[dict[str, str]]]:
    """The texts of the printed cards, and the rows of the CSV file."""
    page = at.page
    fill(page, **fields)
    page.get_by_label("I know; only this machine").check()
    page.get_by_role("button", name="Make the codes").click()
    page.get_by_role("button", name="Print the cards").wait_for()
    with page.expect_download() as saved:
        page.get_by_role("link", name="Save as CSV").click()
    with open(saved.value.path(), encoding="utf-8", newline="") as file:
        return page.locator(".qr-card").all_inner_texts(), list(csv.DictReader(file))


def takes_part_and_leaves(browser: Any, card: str, terminal: Terminal) -> None:
    """An owner with a card in hand, from its address to the end."""
    link = address_in(card)
    base = link.partition("/join/")[0]
    with window(browser, base, DESKTOP, **CLIPBOARD) as at:
        page = at.page
        page.goto(link)
        page.get_by_role("heading", name=TITLE).wait_for()
        (run,) = [each for each in page.locator(".to-copy").all() if "crowdml join" in each.inner_text()]
        said = terminal.run(copied(page, run), "y\n")
        assert TITLE in said
        assert "Joined as device" in said

        # the study's page says how to see what was given, and how to stop
        page.get_by_role("link", name="Everything about this study").click()
        printed = page.locator("section", has=page.locator("#leave")).locator("code").all_inner_texts()
        (leave,) = [each for each in printed if "leave" in each]
        (ledger,) = [each for each in printed if "ledger" in each]
        mine = address_in(terminal.run(ledger))
        page.goto(mine)
        page.get_by_role("heading", name="Your device", exact=True).wait_for()
        assert TITLE in page.content()
        assert page.locator('[aria-labelledby="given"] tbody tr').count() == ROWS // 20
    with window(browser, base) as other:  # somebody else who has the link opens nothing
        other.page.goto(mine)
        assert "works once, within 10 minutes" in other.page.content()
    terminal.run(leave, "y\n")
    assert not (terminal.folder / "crowdml-device").exists()


def test_what_is_printed_works_on_a_server_with_three_studies(browser: Any, tmp_path: Path):
    machines = Machines(tmp_path)
    desk = machines.terminal()
    with contextlib.ExitStack() as stack:
        said = stack.enter_context(
            served(desk, "crowdml serve --port 0 --folder study --task digits012 --task digits --invite 0")
        )
        setup = address_in(said[-1])
        base = setup.partition("/operator")[0]
        at = stack.enter_context(window(browser, base, DESKTOP, accept_downloads=True, **CLIPBOARD))
        page = at.page

        # the operator: an account, a third study by the form, cards for it, and one code for all three
        page.goto(setup)
        fill(page, name="anna", password=PASSWORD, again=PASSWORD)
        page.get_by_role("button", name="Make the account").click()
        page.get_by_role("heading", name="Overview").wait_for()
        starts_a_third_study(at)
        task_page = page.url
        page.get_by_role("link", name="Invite devices").click()
        cards, listed = makes_invitations(at, label="Class 7b", number="2", uses="1", ends="7d")
        assert [row["url"] for row in listed] == [address_in(card) for card in cards]
        page.get_by_role("link", name="Done").click()
        page.get_by_role("link", name="Invite", exact=True).click()
        page.get_by_label("To which task").select_option("all")
        (poster,), _ = makes_invitations(at, label="Poster", number="1", uses="3", ends="7d")

        # one owner by the card, another by the command in the CSV file
        takes_part_and_leaves(browser, cards[0], machines.terminal())
        assert "Joined as device" in machines.terminal().run(listed[1]["command"], "y\n")

        # the poster's page has a command for each study, and each works
        with window(browser, base, DESKTOP, **CLIPBOARD) as opened:
            opened.page.goto(address_in(poster))
            lines = [each for each in opened.page.locator(".to-copy").all() if "crowdml join" in each.inner_text()]
            commands = [copied(opened.page, each) for each in lines]
        assert len(set(commands)) == 3
        for command in commands:
            assert "Joined as device" in machines.terminal().run(command, "y\n")

        # the operator sees them, and has the model looked at by the command on the page
        page.goto(f"{base}/operator/devices")
        assert sorted(page.locator('td[data-label="State"]').all_inner_texts()) == ["active"] * 4 + ["withdrawn"]
        page.goto(task_page)
        (validate,) = [each for each in page.locator(".to-copy").all() if "task validate" in each.inner_text()]
        assert "rows of FILE.csv" in desk.run(copied(page, validate))
        page.reload()
        page.get_by_role("heading", name="Validation").wait_for()
        assert not at.outside
        assert not at.complaints
