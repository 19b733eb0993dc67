"""Takes each comparison of the code that privacy rests on away, one at a time, and says which test notices.

    python tests/mutants/deep.py                 every comparison of every file in TARGETS
    python tests/mutants/deep.py secagg/ring.py  those of some files
    python tests/mutants/deep.py --list          the comparisons, without running a test

`table.py` holds mutants that somebody thought of; here a program finds them. In `a or b` a comparison becomes False, in
`a and b` True, so that the other clause decides alone; one that stands alone is tried as both. A mutant that no test
notices is a survivor: `survivors.py` must say why it does no harm, and must name no mutant that a test kills. Stdout
carries one JSON object, everything else goes to stderr; the exit code is 1 if a survivor is not explained.
"""

from __future__ import annotations

import ast
import json
import queue
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from run import PASSED, PROCESSES, SLOW_TO_IMPORT, SOURCE, WORKERS, Copy, make_copy, say
from survivors import SURVIVORS

CORE = tuple(
    f"tests/secagg/test_{name}.py" for name in ("guards", "lies", "codec", "graph", "shamir", "masks", "rounds")
)
MASKED_SERVER = ("tests/server/test_masked_rounds.py", "tests/server/test_masked_phases.py")
MASKED_DEVICE = ("tests/device/test_round_marks.py", "tests/device/test_masked_device.py")
RUNNER = tuple(f"tests/device/test_{name}.py" for name in ("older_ledgers", "verification", "runner"))
SPENDING = ("tests/privacy/test_spending.py", "tests/privacy/test_spans.py")
LEDGER = tuple(
    f"tests/storage/test_{name}.py"
    for name in ["ledger_guards", "ledger", "ledger_memory", "ledger_masked", "ledger_crash", "erased"]
)

FAST = ("-m", "not slow and not kill and not postgres and not browser")

TARGETS: dict[str, tuple[str, ...]] = {
    **{f"secagg/{name}.py": CORE for name in ("cohort", "graph", "masks", "messages", "ring", "shamir", "terms")},
    "secagg/device.py": (*CORE, *MASKED_DEVICE),
    "secagg/server.py": (*CORE, *MASKED_SERVER),
    "privacy/door.py": ("tests/privacy/test_door.py", "tests/test_messages.py"),
    "privacy/spending.py": (*SPENDING, *LEDGER, *RUNNER, *MASKED_DEVICE),
    **{f"storage/device/{name}.py": (*LEDGER, *RUNNER, *MASKED_DEVICE) for name in ("charges", "file", "ledger")},
    "device/rounds.py": (*MASKED_DEVICE, "tests/loopback/test_masked_loop.py"),
}
"""The tests that are run for a file, in this order, until one fails."""


@dataclass(frozen=True)
class Site:
    """One comparison of a file, and the constant that takes its place."""

    file: str
    function: str
    comparison: str
    value: bool
    place: int
    """Index among the equal comparisons of this function, from 0."""
    start: int
    end: int

    @property
    def name(self) -> str:
        return f"{self.file} {self.within}"

    @property
    def within(self) -> str:
        again = f" #{self.place + 1}" if self.place else ""
        return f"{self.function}: {self.comparison}{again} -> {self.value}"

    def applied(self, source: str) -> str:
        """The source with the constant. Offsets count bytes, as Python's parser does."""
        raw = source.encode()
        return (raw[: self.start] + str(self.value).encode() + raw[self.end :]).decode()


def sites(file: str, source: str) -> Iterator[Site]:
    """Every comparison of a source that decides something, with the constants that take it away."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    seen: dict[tuple[str, str], int] = {}

    def visit(node: ast.AST, function: str, values: tuple[bool, ...]) -> Iterator[Site]:
        if isinstance(node, ast.Assert):
            return  # says what a reader may rely on; a refusal is an `if`
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            function = f"{function}.{node.name}".lstrip(".")
        if isinstance(node, ast.Compare):
            text = ast.unparse(node)
            place = seen.get((function, text), 0)
            seen[function, text] = place + 1
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = starts[node.lineno - 1] + node.col_offset
            end = starts[node.end_lineno - 1] + node.end_col_offset
            for value in values:
                yield Site(file, function, text, value, place, start, end)
            values = (False, True)
        elif isinstance(node, ast.BoolOp):
            values = (isinstance(node.op, ast.And),)
        elif not (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)):
            values = (False, True)
        else:
            values = tuple(not value for value in values)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function, values)

    yield from visit(ast.parse(source), "", (False, True))


def all_sites(files: list[str]) -> list[Site]:
    return [site for file in files for site in sites(file, (SOURCE / file).read_text(encoding="utf-8"))]


def explained(found: list[Site]) -> dict[str, str]:
    """The names of survivors that have a reason, each with its key in SURVIVORS.

    The file in a key is a hint: a function that moved to another file keeps its reasons, if no other of that name is
    among these comparisons.
    """
    names = {site.name for site in found}
    keys = {name: name for name in SURVIVORS if name in names}
    for key in SURVIVORS.keys() - keys.keys():
        moved = [site.name for site in found if site.within == key.partition(" ")[2] and site.name not in SURVIVORS]
        if len(moved) == 1:
            keys[moved[0]] = key
    return keys


def red_without_mutant(copies: queue.SimpleQueue[Copy], tests: list[str]) -> list[str]:
    """Those of these test files that fail on healthy source."""
    copy = copies.get()
    try:
        return [test for test in tests if copy.test(*FAST, test)[0] != PASSED]
    finally:
        copies.put(copy)


def noticed_by(copies: queue.SimpleQueue[Copy], site: Site) -> tuple[str | None, float]:
    """The first test that fails with this mutant; None if all pass."""
    copy, begun = copies.get(), time.monotonic()
    path = copy.package / site.file
    healthy = path.read_text(encoding="utf-8")
    try:
        path.write_text(site.applied(healthy), encoding="utf-8")
        for test in TARGETS[site.file]:
            code, words = copy.test(*FAST, test)
            if code != PASSED:
                failed = [line.split()[1] for line in words.splitlines() if line.startswith(("FAILED", "ERROR"))]
                return failed[0] if failed else f"{test} (ended with {code})", time.monotonic() - begun
        return None, time.monotonic() - begun
    finally:
        path.write_text(healthy, encoding="utf-8")
        copies.put(copy)


def main(arguments: list[str]) -> int:
    files = [name for name in arguments if name != "--list"] or list(TARGETS)
    if unknown := set(files) - set(TARGETS):
        say(f"No comparisons are taken from {', '.join(sorted(unknown))}. There are: {', '.join(TARGETS)}.")
        return 2
    found = all_sites(files)
    if "--list" in arguments:
        print("\n".join(site.name for site in found))
        return 0
    begun = time.monotonic()
    WORKERS.set_forkserver_preload(SLOW_TO_IMPORT)
    killers: dict[str, str | None] = {}
    reasons = {name: SURVIVORS[key] for name, key in explained(found).items()}
    with tempfile.TemporaryDirectory(prefix="mutants-") as place, ThreadPoolExecutor(PROCESSES) as pool:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(PROCESSES):
            copies.put(make_copy(Path(place) / str(number)))
        say(f"{len(found)} mutants of {len(files)} files. Tests run without one first, then with each until one fails.")
        if red := red_without_mutant(copies, list(dict.fromkeys(test for file in files for test in TARGETS[file]))):
            say(f"RED WITHOUT A MUTANT, so nothing can be shown: {', '.join(red)}")
            return 2
        waiting = {pool.submit(noticed_by, copies, site): site for site in found}
        for done in as_completed(waiting):
            site = waiting[done]
            killers[site.name], seconds = done.result()
            note = killers[site.name] or ("SURVIVED, explained" if site.name in reasons else "SURVIVED")
            say(f"{len(killers):4} of {len(found)}  {seconds:5.1f} s  {site.name}  {note}")
    rows = [
        {"mutant": name, "test": test, "killed": test is not None, "reason": reasons.get(name)}
        for name, test in ((site.name, killers[site.name]) for site in found)
    ]
    print(json.dumps({"id": "mutants-deep", "rows": rows}, ensure_ascii=False))
    alive = [row["mutant"] for row in rows if not row["killed"]]
    unexplained = [name for name in alive if name not in reasons]
    killed_after_all = [row["mutant"] for row in rows if row["killed"] and row["reason"]]
    say(f"{time.monotonic() - begun:5.0f} s  {len(rows) - len(alive)} of {len(rows)} killed, {len(alive)} alive.")
    for name in unexplained:
        say(f"No reason in survivors.py: {name}")
    for name in killed_after_all:
        say(f"Killed, so its reason can go: {name}")
    return 1 if unexplained or killed_after_all else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
