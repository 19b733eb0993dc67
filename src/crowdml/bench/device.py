"""How light a device is: import, size on disk, CPU of a check-in, and what it must never import.

A check-in is the shipped MNIST task's (softmax, 50 features, 10 classes) by a real device with a ledger on disk, over
real HTTP to a stand-in for the server in a process of its own, which signs receipts and does nothing else.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from crowdml.bench.timing import bound, spread_row, started

IMPORTS, CHECK_INS, TURNS = 9, 60, 5
RUNTIME = "crowdml.device.fleet, crowdml.device.sources, crowdml.device.joining"
"""What `crowdml join` imports to run."""
FORBIDDEN = {"jax", "scipy", "sklearn", "starlette", "uvicorn", "sqlalchemy", "matplotlib", "crowdml.server"}
MEGABYTE = 1e6


def measure(progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Rows and goals, as every benchmark says them."""
    progress("import")
    walls, cpus, found = _imports()
    progress("size on disk")
    sizes = _sizes()
    progress("check-ins")
    per_check_in, memory = _check_ins(progress)
    rows = [
        spread_row("import beyond NumPy, on the clock", walls, "s"),
        spread_row("import beyond NumPy, CPU", cpus, "s"),
        spread_row("installed beyond NumPy", [sum(sizes.values()) / MEGABYTE], "MB", sizes=sizes),
        spread_row("CPU of a check-in, softmax 50x10", per_check_in, "ms"),
        spread_row("memory of a device at work", [memory / 2**20], "MiB"),
        spread_row("forbidden modules imported", [len(found)], "modules"),
    ]
    if found:
        rows[-1]["note"] = ", ".join(found)
    goals = [
        bound("import", "import beyond NumPy", statistics.median(cpus), "s", 0.1),
        bound("install", "installed beyond NumPy", sum(sizes.values()) / MEGABYTE, "MB", 30),
        bound("cpu", "CPU of a check-in, softmax 50x10", statistics.median(per_check_in), "ms", 10),
        bound("modules", "forbidden modules imported", len(found), "modules", 0),
    ]
    return {"id": "bench/device", "rows": rows, "ratios": goals}


# --- import ---

_CODE = f"""
import sys, time
import numpy
wall, cpu = time.perf_counter(), time.thread_time()
import {RUNTIME}
print(time.perf_counter() - wall, time.thread_time() - cpu)
print(*({FORBIDDEN!r} & sys.modules.keys()))
"""


def _imports() -> tuple[list[float], list[float], list[str]]:
    """In fresh processes with bytecode at hand, as an installed package has it: the clock, CPU, and forbidden modules.

    CPU is that of the importing thread, for the threads that NumPy started for its BLAS go on spinning beside it. The
    first process compiles, and does not count.
    """
    source = str(Path(__file__).parents[2])
    with tempfile.TemporaryDirectory(prefix="crowdml-bench-") as cache:
        paths = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache, "PYTHONPATH": paths}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        said = [
            subprocess.run([sys.executable, "-c", _CODE], env=environment, capture_output=True, text=True, check=True)
            for _ in range(IMPORTS + 1)
        ]
    found = [each.stdout.split() for each in said[1:]]
    return [float(each[0]) for each in found], [float(each[1]) for each in found], sorted(found[0][2:])


# --- size ---


def _sizes() -> dict[str, int]:
    """Bytes on disk of each distribution that `pip install crowdml` brings beside NumPy, crowdml itself included.

    As installed here, bytecode and all; by the requirements that crowdml's own metadata names.
    """
    sizes: dict[str, int] = {}
    waiting = ["crowdml"]
    while waiting:
        name = waiting.pop()
        if name in sizes or name == "numpy":
            continue
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        sizes[name] = _own_size() if name == "crowdml" else _size(found)
        waiting += [_name(each) for each in found.requires or () if _is_wanted(each)]
    return dict(sorted(sizes.items(), key=lambda pair: -pair[1]))


def _size(found: metadata.Distribution) -> int:
    files = [Path(str(found.locate_file(file))) for file in found.files or ()]
    return sum(file.stat().st_size for file in files if file.is_file())


def _own_size() -> int:
    """From the package's folder, which an editable install has elsewhere."""
    files = Path(__file__).parents[1].rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file() and "__pycache__" not in file.parts)


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def _is_wanted(requirement: str) -> bool:
    """Not for an extra, and not for another Python or platform than this one."""
    _, _, marker = requirement.partition(";")
    if "extra" in marker:
        return False
    old = re.search(r"python_(?:full_)?version\s*<=?\s*[\"']3\.(\d+)", marker)
    return not (old and int(old[1]) <= sys.version_info.minor) and "win32" not in marker and "Windows" not in marker


# --- a check-in ---


def _check_ins(progress: Callable[[str], None]) -> tuple[list[float], int]:
    """Milliseconds of CPU a check-in, in each turn, and the most memory that this process had."""
    with (
        tempfile.TemporaryDirectory(prefix="crowdml-bench-") as place,
        started([sys.executable, "-m", __name__, place]) as (_, said),
    ):
        found = asyncio.run(_live(Path(place), int(said.readline()), progress))
    return found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


async def _live(place: Path, port: int, progress: Callable[[str], None]) -> list[float]:
    import numpy as np

    from crowdml.device.client import Client
    from crowdml.device.fleet import Fleet
    from crowdml.device.folder import Folder, Server, consent_to
    from crowdml.device.sources import DealtSource, Sample
    from crowdml.price import Price

    task, protocol = _task()
    home, batch = Folder(place / "device"), protocol.batch(task)
    home.make()
    home.accept(task, consent_to(Price.of(protocol, task)))
    home.key()
    home.ledger().close()
    home.pin(Server(f"http://127.0.0.1:{port}", (place / "public").read_text()))
    rng = np.random.default_rng(1)
    x = rng.normal(size=(CHECK_INS * batch, task.features.dimension))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    samples = [Sample(row, float(label)) for row, label in zip(x, rng.integers(task.classes, size=len(x)), strict=True)]
    taken: list[float] = []
    client = Client(f"http://127.0.0.1:{port}")
    try:
        for turn in range(TURNS + 1):  # the first builds the tables of the noise
            progress(f"check-ins, turn {turn} of {TURNS}")
            fleet = Fleet(home, client, task, protocol)
            cpu = time.process_time()
            made = await fleet.run(lambda _, turn=turn: DealtSource(f"turn {turn}", samples))
            if turn:
                taken.append(1e3 * (time.process_time() - cpu) / made.check_ins)
    finally:
        await client.close()
    return taken


def _task() -> Any:
    from crowdml.protocols import find, settled
    from crowdml.task import parse, shipped_text

    text = shipped_text("mnist").replace("samples = 60", "samples = 1000000")  # so that a device may go on
    task = settled(parse(text))
    return task, find(task)


async def _serve(place: Path) -> None:
    """Answers check-outs with the first publication and check-ins with receipts."""
    from crowdml.messages import encode
    from crowdml.turn import first_turn
    from crowdml.wire.envelopes import open_signed
    from crowdml.wire.keys import Key
    from crowdml.wire.receipts import Receipt, chain_start

    task, protocol = _task()
    key = Key.generate()
    offered = first_turn(protocol, task).published
    body, kind = encode(offered), offered.kind

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await _head(reader):
            if head.startswith(b"GET"):
                answer, line = body, f"200 OK\r\nCrowdml-Kind: {kind}"
            else:
                found = re.search(rb"content-length: (\d+)", head.lower())
                signed = open_signed(await reader.readexactly(int(found[1]) if found else 0))
                envelope = signed.envelope
                receipt = Receipt(
                    task.hash, envelope.sender, envelope.seq, envelope.seq, signed.hash, chain_start(task.hash)
                )
                answer, line = receipt.sign(key).encode(), "202 Accepted"
            writer.write(f"HTTP/1.1 {line}\r\nContent-Length: {len(answer)}\r\n\r\n".encode() + answer)

    (place / "public").write_text(key.public.hex())
    listening = await asyncio.start_server(talk, "127.0.0.1", 0)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


async def _head(reader: asyncio.StreamReader) -> bytes:
    """The head of the next request; nothing where the peer went away."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b""


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
