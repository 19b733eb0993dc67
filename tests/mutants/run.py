"""Applies each mutant to a copy of the source and shows that the test named beside it goes red.

    python tests/mutants/run.py            every mutant of table.py
    python tests/mutants/run.py NAME...    some of them, by name

First every named test must be green on the copy as it is. Then each mutant is patched in, alone, and its test must
fail: a test that cannot be collected, or that does not exist, has shown nothing, and its mutant counts as alive.
Stdout carries one JSON object, everything else goes to stderr; the exit code is 1 if a mutant survived.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from table import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "src" / "crowdml"
PROCESSES = 2
LONGEST = 240  # seconds that one test may take
PASSED, FAILED = 0, 1  # pytest's exit codes; others say that no test was run to its end


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Copy:
    """A copy of the package, in a folder of its own, that tests import in the place of the original."""

    folder: Path

    @property
    def package(self) -> Path:
        return self.folder / "crowdml"

    @contextmanager
    def with_(self, mutant: Mutant):
        """The copy with this mutant, and without it afterwards."""
        path = self.package / mutant.file
        healthy = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(healthy), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(healthy, encoding="utf-8")

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",  # a stale one would hide the mutant
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self.folder / "hypothesis"),
            "OMP_NUM_THREADS": "1",
        }

    def test(self, *tests: str) -> tuple[int, str]:
        """pytest's exit code and its last words."""
        options = ["-x", "-p", "no:xdist", "--hypothesis-seed=0", "--no-header", "--tb=line"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=ROOT,
                env=self.environment(),
                capture_output=True,
                text=True,
                timeout=LONGEST,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1, f"no answer within {LONGEST} s"
        return done.returncode, "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])

    def check_that_tests_import_it(self) -> None:
        code = "import crowdml; print(crowdml.__file__)"
        found = subprocess.run(
            [sys.executable, "-c", code], env=self.environment(), capture_output=True, text=True, check=True
        )
        if not Path(found.stdout.strip()).is_relative_to(self.folder):
            raise SystemExit(f"Tests would import {found.stdout.strip()} and not the copy: no mutant would be seen.")


def make_copy(folder: Path) -> Copy:
    shutil.copytree(SOURCE, folder / "crowdml", ignore=shutil.ignore_patterns("__pycache__"))
    return Copy(folder)


def red_without_mutant(copies: queue.SimpleQueue[Copy], tests: list[str]) -> list[str]:
    """Those of these tests that fail on healthy source: all in one process, and one by one only if that is red."""
    copy = copies.get()
    try:
        if copy.test(*tests)[0] == PASSED:
            return []
        return [test for test in tests if copy.test(test)[0] != PASSED]
    finally:
        copies.put(copy)


def try_mutant(copies: queue.SimpleQueue[Copy], mutant: Mutant) -> tuple[bool, str, float]:
    copy = copies.get()
    begun = time.monotonic()
    try:
        with copy.with_(mutant):
            code, words = copy.test(mutant.test)
        return code == FAILED, words if code != FAILED else "", time.monotonic() - begun
    finally:
        copies.put(copy)


def main(names: list[str]) -> int:
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        say(f"No mutant is called {', '.join(sorted(unknown))}. There are: {', '.join(m.name for m in MUTANTS)}.")
        return 2
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    for mutant in mutants:
        mutant.applied((SOURCE / mutant.file).read_text(encoding="utf-8"))  # raises if the patch does not fit
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as place, ThreadPoolExecutor(PROCESSES) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(PROCESSES):
            copy = make_copy(Path(place) / str(number))
            copy.check_that_tests_import_it()
            copies.put(copy)
        by_file: dict[str, list[str]] = {}
        for test in dict.fromkeys(mutant.test for mutant in mutants):
            by_file.setdefault(test.split("::")[0], []).append(test)
        say(
            f"{len(mutants)} mutants. Without them: {sum(map(len, by_file.values()))} tests in {len(by_file)} files ..."
        )
        checks = [pool.submit(red_without_mutant, copies, tests) for tests in by_file.values()]
        red = {test for check in checks for test in check.result()}
        for test in sorted(red):
            say(f"RED WITHOUT A MUTANT  {test}")
        say(f"{time.monotonic() - begun:5.0f} s  {'all green' if not red else 'those show nothing'}. One at a time:")
        killed = {mutant.name: False for mutant in mutants}
        waiting = {pool.submit(try_mutant, copies, mutant): mutant for mutant in mutants if mutant.test not in red}
        for done in as_completed(waiting):
            mutant = waiting[done]
            killed[mutant.name], words, seconds = done.result()
            say(
                f"{seconds:5.1f} s  {'killed' if killed[mutant.name] else 'SURVIVED'}  {mutant.name}  by  {mutant.test}"
            )
            if words:
                say(words)
    rows = [{"mutant": mutant.name, "test": mutant.test, "killed": killed[mutant.name]} for mutant in mutants]
    print(json.dumps({"id": "mutants", "rows": rows}, ensure_ascii=False))
    survivors = [name for name, dead in killed.items() if not dead]
    say(f"{time.monotonic() - begun:5.0f} s  {len(rows) - len(survivors)} of {len(rows)} killed.")
    if survivors:
        say(f"Alive: {', '.join(survivors)}.")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
