"""`crowdml simulate` for a draft, in a process of its own: one at a time, bounded in time, and cancelled on request.

The server itself never imports JAX. Where it is not installed, the page says so, and everything else works.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from crowdml import plugins
from crowdml.datasets import NAMES, catalogue, is_table
from crowdml.datasets.cells import SUFFIXES
from crowdml.errors import FormError
from crowdml.protocols import find
from crowdml.suggest import has_fleet_time
from crowdml.task import Task, parse
from crowdml.texts import count_text, hidden_control

LONGEST = 300.0
"""Seconds: a simulation that takes longer is ended, and the page says so."""
MEMORY = 16 * 2**30
"""Bytes of address space that a simulation may take, far more than it uses: the server's machine is for devices."""
MOST_SAID = 2**20
"""Bytes of its result: a result has some thousands."""
MOST_DEVICES, MOST_TRIALS = 20_000, 20
USUAL_DEVICES, USUAL_TRIALS = 500, 5
KEPT = 20
_PROGRESS = re.compile(rb"progress (\d+) of (\d+)")

Stage = Literal["running", "done", "failed", "cancelled", "too-long"]


class SimulationRefused(FormError):  # noqa: N818  # reads as the sentence it raises
    """No simulation was started. `about` is the field that it stands next to."""


def has_jax() -> bool:
    return importlib.util.find_spec("jax") is not None


def suitable_data(task: Task) -> tuple[str, ...]:
    """The data sets that a draft may be tried on: of its features and classes, and what code makes in any shape.

    What is on this machine comes first, and of that the task's namesake; of the others the files have to be put here.
    """
    if task.classes is None:
        return ()
    shape = task.features.width, task.classes
    fitting = [each for each in catalogue() if each.name != "synthetic" and (each.features, each.classes) == shape]
    here = sorted((each for each in fitting if each.found), key=lambda each: each.name != task.name)
    return (*(each.name for each in here), "synthetic", *(each.name for each in fitting if not each.found))


def _check_file(name: str, about: str = "rows") -> None:
    if not is_table(name) or hidden_control(name) or name.startswith(".") or "/" in name or "\\" in name:
        raise SimulationRefused(f"{name!r} does not end in {', '.join(SUFFIXES)}. Nothing was read.", about)


def most_devices(task: Task, data: str) -> int:
    """How many devices this data set makes with a check-in each; synthetic data is made for as many as are asked."""
    found = next((each for each in catalogue() if each.name == data), None)
    if found is None or data == "synthetic":
        return MOST_DEVICES
    return found.rows[0] // find(task).batch(task)


def fitting_crowd(task: Task, data: str, expected: int | None = None) -> int:
    """A crowd to begin with: as many devices as are expected, or as a simulation runs quickly, if the data has them."""
    return max(1, min(expected or USUAL_DEVICES, MOST_DEVICES, most_devices(task, data)))


@dataclass(frozen=True)
class Asked:
    """What to simulate."""

    data: str
    """A data set, or the name of the file that was sent."""
    devices: int | None
    """None: as many as have a check-in each."""
    trials: int
    columns: tuple[str, ...] = ()
    """Options that say what the columns of a file are, and which rows are for the test or public."""


@dataclass
class Simulation:
    """One run and how far it is."""

    asked: Asked
    stage: Stage = "running"
    done: int = 0
    total: int = 0
    outlook: str = ""
    """Why the crowd is too small for its price, said before it runs; empty where it is not."""
    result: Mapping[str, Any] | None = None
    error: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class Simulations:
    """Every simulation that is remembered, by the draft's hash. At most one runs."""

    def __init__(self, ending: asyncio.Event) -> None:
        self._ending = ending
        self._runs: OrderedDict[str, Simulation] = OrderedDict()
        self._task: asyncio.Task[None] | None = None
        self._cancel = asyncio.Event()

    def of(self, draft: str) -> Simulation | None:
        return self._runs.get(draft)

    def running(self) -> str | None:
        """The draft whose simulation runs now."""
        return next((draft for draft, run in self._runs.items() if run.stage == "running"), None)

    def start(
        self,
        draft: str,
        text: str,
        asked: Asked,
        rows: bytes | None = None,
        others: Mapping[str, tuple[str, bytes]] | None = None,
    ) -> Simulation:
        """Begin; raises `SimulationRefused` where one runs already, JAX is missing, or too much is asked.

        `rows`: a table of the operator's own. `others`: names and bytes of files beside it, by what they are: "test",
        "public". All of them lie in the folder of the simulation, and go with it.
        """
        if not has_jax():
            raise SimulationRefused("JAX is not installed on this server: pip install 'crowdml[sim]'.", "data")
        if self.running() is not None:
            raise SimulationRefused("Another simulation runs. Wait for it, or cancel it.", "data")
        if rows is not None:
            _check_file(asked.data)
            for what, (name, _) in (others or {}).items():
                _check_file(name, f"{what}-file")
        elif asked.data not in NAMES:
            raise SimulationRefused("Choose one of the data sets.", "data")
        if asked.devices is not None and not 1 <= asked.devices <= MOST_DEVICES:
            raise SimulationRefused(f"Between 1 and {MOST_DEVICES:,} devices.", "devices")
        if (
            rows is None
            and asked.devices is not None
            and asked.devices > (most := most_devices(parse(text), asked.data))
        ):
            raise SimulationRefused(
                f"A check-in takes more rows than each of {asked.devices:,} devices would have: {asked.data} makes "
                f"{count_text(most, 'device')} at most. Ask for fewer, or lower the samples in a check-in.",
                "devices",
            )
        if not 1 <= asked.trials <= MOST_TRIALS:
            raise SimulationRefused(f"Between 1 and {MOST_TRIALS} trials.", "trials")
        files = {} if rows is None else {asked.data: rows}
        for what, (name, data) in (others or {}).items():
            lies = name if name not in files else f"{what}-{name}"
            files[lies] = data
            asked = replace(asked, columns=(*asked.columns, f"--{what}={lies}"))
        run = self._runs[draft] = Simulation(asked)
        self._runs.move_to_end(draft)
        while len(self._runs) > KEPT:
            self._runs.popitem(last=False)
        self._cancel = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(run, text, self._cancel, files))
        return run

    async def cancel(self, draft: str) -> None:
        if self.running() == draft and self._task is not None:
            self._cancel.set()
            await asyncio.shield(self._task)

    async def _run(self, run: Simulation, text: str, cancel: asyncio.Event, files: Mapping[str, bytes]) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="crowdml-simulate-") as folder:
                file = Path(folder) / "task.toml"
                file.write_text(text, encoding="utf-8")
                for name, data in files.items():
                    await asyncio.to_thread((Path(folder) / name).write_bytes, data)
                await self._process(run, str(file), folder, cancel)
        except SimulationRefused as error:
            run.stage, run.error = "failed", str(error)
        except Exception as error:
            run.stage, run.error = "failed", f"The simulation could not be started: {error}."

    async def _process(self, run: Simulation, file: str, folder: str, cancel: asyncio.Event) -> None:
        asked = run.asked
        timing = ["--world", "fleet"] if has_fleet_time(parse(Path(file).read_text(encoding="utf-8"))) else []
        many = [*timing, *([] if asked.devices is None else ["--devices", str(asked.devices)])]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "crowdml.cli", "simulate", file, f"--data={asked.data}", *asked.columns, *many,
            "--trials", str(asked.trials), "--seed", str(secrets.randbits(31)), "--progress", "--json", "-",
            *plugins.options(),
            cwd=folder, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True, env=_environment(),
        )  # fmt: skip
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)  # devices come first
        _bound_memory(process.pid)
        loop = asyncio.get_running_loop()
        talking = loop.create_task(_listen(process, run))
        stops = [loop.create_task(self._ending.wait()), loop.create_task(cancel.wait())]
        ended: Stage | None = None
        try:
            await asyncio.wait({talking, *stops}, timeout=LONGEST, return_when=asyncio.FIRST_COMPLETED)
            if talking.done():
                out, said = talking.result()
                _finish(run, await process.wait(), out, said)
            else:
                ended = "cancelled" if any(each.done() for each in stops) else "too-long"
        finally:
            if process.returncode is None:
                _end(process)
                await asyncio.wait({talking}, timeout=5)  # it reads what is left, so that the process can be gone
                await process.wait()
            for each in (talking, *stops):
                each.cancel()
        if ended is not None:  # said once its process is gone
            run.stage = ended


def _environment() -> dict[str, str]:
    """Ours, without what a learning process could use to slow the server or reach elsewhere."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the process and those that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _bound_memory(pid: int) -> None:
    """Let the process have `MEMORY` at most, where the system can say so to another process (Linux)."""
    if sys.platform == "linux":
        import resource

        with contextlib.suppress(OSError, ValueError):
            resource.prlimit(pid, resource.RLIMIT_AS, (MEMORY, MEMORY))


async def _listen(process: asyncio.subprocess.Process, run: Simulation) -> tuple[bytes, bytes]:
    """What it wrote; on the way, how far it is. Raises `SimulationRefused` where it says more than a result has."""
    assert process.stdout is not None
    assert process.stderr is not None

    async def progress(stream: asyncio.StreamReader) -> bytes:
        last, line = b"", b" "
        while line:
            try:
                line = await stream.readline()
            except ValueError:  # a line without end, which is dropped
                line = b" "
            if match := _PROGRESS.fullmatch(line.strip()):
                run.done, run.total = int(match[1]), int(match[2])
            elif line.startswith(b"outlook "):
                run.outlook = line.decode(errors="replace").removeprefix("outlook ").strip()
            elif line.startswith(b"crowdml: "):
                last = line
        return last

    async def result(stream: asyncio.StreamReader) -> bytes:
        found = b""
        while part := await stream.read(65_536):
            if len(found) <= MOST_SAID:
                found += part
            else:  # the rest is dropped, for a pipe that nobody reads never ends
                _end(process)
        return found

    out, said = await asyncio.gather(result(process.stdout), progress(process.stderr))
    if len(out) > MOST_SAID:
        raise SimulationRefused(f"It wrote more than {MOST_SAID:,} bytes and was ended.", "data")
    return out, said


def _finish(run: Simulation, code: int, out: bytes, said: bytes) -> None:
    try:
        result = json.loads(out)
        run.result, run.stage = result if isinstance(result, dict) else None, "done"
    except ValueError:
        words = said.decode(errors="replace").strip().removeprefix("crowdml: ")
        run.stage, run.error = "failed", words or f"The simulation ended with code {code} and said nothing."
