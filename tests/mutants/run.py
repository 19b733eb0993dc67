"""Applies each mutant to a copy of the source and shows that the test named beside it goes red.

    python tests/mutants/run.py            every mutant of table.py
    python tests/mutants/run.py NAME...    some of them, by name
    python tests/mutants/run.py --check    whether every mutant has its place and its test, in seconds

First every named test must be green on the copy as it is. Then each mutant is patched in, alone, and its test must
fail: a test that cannot be collected, or that does not exist, has shown nothing, and its mutant counts as alive.
Stdout carries one JSON object, everything else goes to stderr; the exit code is 1 if a mutant survived.
"""

from __future__ import annotations

import compileall
import faulthandler
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
from multiprocessing import get_context
from pathlib import Path
from py_compile import PycInvalidationMode

from aim import LostError, Mutant, Package
from table import MUTANTS

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = ROOT / "src" / "crowdml"
PROCESSES = int(os.environ.get("CROWDML_MUTANT_PROCESSES", "2"))
LONGEST = 240  # seconds that one test may take
TRIES = 3  # a test without an answer has shown nothing: it is asked again, in a process of its own
SLOW_TO_IMPORT = [
    *["pytest", "hypothesis.strategies", "schemathesis.pytest.plugin", "numpy", "scipy.stats", "mpmath", "msgpack"],
    *["sqlalchemy", "alembic.command", "starlette.applications", "uvicorn", "cryptography.hazmat.primitives.hashes"],
]
NOT_THE_COPY = 70
WORKERS = get_context("forkserver")
NO_ANSWER = -1
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
        file, mutated = Package(self.package).applied(mutant)
        path = self.package / file
        healthy = path.read_text(encoding="utf-8")
        path.write_text(mutated, encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(healthy, encoding="utf-8")

    def test(self, *tests: str) -> tuple[int, str]:
        """pytest's exit code and its last words, from a process of its own; once more where none comes."""
        for _ in range(TRIES):
            code, words = self._asked(*tests)
            if code != NO_ANSWER:
                return code, words
            say(f"No answer by {', '.join(tests)}; it stood here:\n{words}")
        return NO_ANSWER, f"no answer, {TRIES} times"

    def _asked(self, *tests: str) -> tuple[int, str]:
        words, answer = self.folder / "words.txt", self.folder / "answer.txt"
        answer.unlink(missing_ok=True)
        process = WORKERS.Process(target=run_tests, args=(str(self.folder), tests, str(words), str(answer)))
        process.start()
        latest = time.monotonic() + LONGEST
        while not answer.exists() and process.is_alive() and time.monotonic() < latest:
            process.join(0.05)
        if answer.exists():
            process.join(1)
            process.kill()
            return int(answer.read_text(encoding="ascii")), _end_of(words, lines=8)
        process.kill()
        return NO_ANSWER, _end_of(words, lines=60)


def _end_of(words: Path, *, lines: int) -> str:
    said = words.read_text(encoding="utf-8", errors="replace") if words.exists() else ""
    return "\n".join(said.strip().splitlines()[-lines:])


def run_tests(folder: str, tests: tuple[str, ...], words: str, answer: str) -> None:
    """In a process that was forked from one with the slow imports done, and none of ours.

    The answer goes through a file: two threads that ask for children at once can lose an exit code of multiprocessing.
    """
    with open(words, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(LONGEST - 10)  # where it stands, should it hang
    if any(name.split(".")[0] == "crowdml" for name in sys.modules):
        raise SystemExit(NOT_THE_COPY)
    os.chdir(ROOT)
    os.environ.update(
        PYTHONPATH=folder,  # for the processes that tests start
        PYTHONDONTWRITEBYTECODE="1",  # the copy has its bytecode
        HYPOTHESIS_STORAGE_DIRECTORY=f"{folder}/hypothesis",
        OMP_NUM_THREADS="1",
    )
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)
    import pytest

    import crowdml

    if not Path(crowdml.__file__).is_relative_to(folder):
        raise SystemExit(NOT_THE_COPY)
    # With CI set, pytest explains a failed comparison of large arrays for minutes: whether it failed is all we ask.
    options = ["-x", "-p", "no:xdist", "--assert=plain", "--hypothesis-seed=0", "--no-header", "--tb=line"]
    code = int(pytest.main([*options, *tests]))
    sys.stdout.flush()
    Path(f"{answer}.part").write_text(str(code), encoding="ascii")
    os.replace(f"{answer}.part", answer)
    os._exit(code)  # what else could end badly on the way out is not the test's answer


def make_copy(folder: Path) -> Copy:
    """A copy with its bytecode, which holds only for a source of the same hash: none can hide a mutant."""
    shutil.copytree(SOURCE, folder / "crowdml", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(folder / "crowdml", quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
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


def lost_places(mutants: list[Mutant]) -> list[str]:
    """A sentence for each of these mutants that has no place, or no single one, in the source."""
    package, lost = Package(SOURCE), []
    for mutant in mutants:
        try:
            package.applied(mutant)
        except LostError as error:
            lost.append(str(error))
    return lost


def lost_tests(mutants: list[Mutant]) -> list[str]:
    """A line for each test of these mutants that pytest does not find, parameters included."""
    tests = list(dict.fromkeys(mutant.test for mutant in mutants))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "--collect-only", *tests]
    ours = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    found = subprocess.run(command, cwd=ROOT, env=ours, capture_output=True, check=False)
    said = (found.stdout + found.stderr).decode(errors="replace").splitlines()
    return [line for line in said if line.startswith("ERROR")] or said[-8:] if found.returncode else []


def main(names: list[str]) -> int:
    if names == ["--check"]:
        lost = [*lost_places(list(MUTANTS)), *lost_tests(list(MUTANTS))]
        say("\n".join([*lost, f"{len(MUTANTS)} mutants, {len(lost)} faults of places and tests."]))
        return 2 if lost else 0
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        say(f"No mutant is called {', '.join(sorted(unknown))}: tests/mutants/table.py has their names.")
        return 2
    mutants = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if lost := lost_places(mutants):
        say("\n".join([*lost, "The source has moved on; bring tests/mutants/table.py up to date."]))
        return 2
    begun = time.monotonic()
    WORKERS.set_forkserver_preload(SLOW_TO_IMPORT)
    with tempfile.TemporaryDirectory(prefix="mutants-") as place, ThreadPoolExecutor(PROCESSES) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(PROCESSES):
            copies.put(make_copy(Path(place) / str(number)))
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
