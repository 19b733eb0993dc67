"""Compares two commits bit for bit on this machine: what tests/record records, with every bit of every state.

    python tests/record/compare.py [OLD [NEW]]

OLD is the last commit before the core moved, unless another is named; NEW is the working tree. Each commit runs its
own sources through its own adapter (driver.py, and before.py for a commit without a record), over the cases of NEW.
One line for each task and engine; the exit code is 1 if anything of OLD differs. A task, a kind of message or a vector
that NEW alone has is new.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
BEFORE = "1fe12d0305efb7317c9686621c73963c401f35ed"
"""The last commit before the core moved."""
SHARED = ("make.py", "cases.py", "before.py", "studies.py")
"""What is taken from NEW for both sides."""


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def recorded(sources: Path, record: Path) -> dict[str, Any]:
    """Run the record on these sources, with the adapter that lies in `record`."""
    out = record / "exact.json"
    environment = {**os.environ, "PYTHONPATH": str(sources), "OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(record / "make.py"), "--exact", str(out)]
    done = subprocess.run(command, env=environment, check=False)
    if done.returncode:
        sys.exit(f"make.py failed on {sources}. Mend that commit's tests/record/driver.py; nothing was compared.")
    return json.loads(out.read_text("utf-8"))


def of_commit(commit: str | None, shared: Path, folder: Path) -> dict[str, Any]:
    """The record of a commit, or of the working tree."""
    tree = folder / "tree"
    if commit is None:
        tree = ROOT
    else:
        git("worktree", "add", "--detach", str(tree), commit)
    try:
        record = tree / "tests" / "record"
        if commit is not None:
            record.mkdir(exist_ok=True)
            for name in SHARED:
                shutil.copy(shared / name, record / name)
            if not (record / "driver.py").exists():
                shutil.copy(shared / "before.py", record / "driver.py")
        return recorded(tree / "src", record)
    finally:
        (ROOT / "tests" / "record" / "exact.json").unlink(missing_ok=True)
        if commit is not None:
            git("worktree", "remove", "--force", str(tree))


def differences(old: Any, new: Any, where: str = "", *, grows: bool = False) -> list[str]:
    """The places where two records differ. One that `grows` may have more names than before."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = old if grows else dict.fromkeys([*old, *new])
        return [line for name in names for line in differences(old.get(name), new.get(name), f"{where}/{name}")]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return [line for number, (a, b) in pairs for line in differences(a, b, f"{where}/{number}")]
    return [] if old == new else [f"{where}: {old} became {new}"]


def main() -> None:
    old = sys.argv[1] if len(sys.argv) > 1 else BEFORE
    new = sys.argv[2] if len(sys.argv) > 2 else None
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder) / "shared"
        shared.mkdir()
        for name in SHARED:
            text = git("show", f"{new}:tests/record/{name}") + "\n" if new else (HERE / name).read_text("utf-8")
            (shared / name).write_text(text, "utf-8")
        before = of_commit(old, shared, Path(folder) / "old")
        after = of_commit(new, shared, Path(folder) / "new")
    unlike = 0
    for part, entries in before.items():
        for name in dict.fromkeys([*entries, *after[part]]):
            is_new = name not in entries
            found = [] if is_new else differences(entries[name], after[part].get(name), grows=part == "kinds")
            unlike += bool(found)
            print(f"{'new' if is_new else 'differs' if found else 'equal':8} {part:8} {name}")
            for line in found[:5]:
                print(f"         {line[:300]}")
    print(f"{unlike} entries differ between {old[:12]} and {new[:12] if new else 'the working tree'}.")
    sys.exit(1 if unlike else 0)


if __name__ == "__main__":
    main()
